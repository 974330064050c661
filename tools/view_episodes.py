"""Browse the episodes of one or more runs in one HTML page that needs nothing else (docs/view_episodes.md).

    python tools/view_episodes.py runs/grpo/RUN
    python tools/view_episodes.py runs/grpo/S1 runs/grpo/S2 --out both.html

RUN is a run folder, a folder or file inside one, or a folder of runs. The page is tools/view_episodes.html
with the episodes in it, compressed: an index that it reads at once, and chunks that it unpacks when they are
needed. All text travels as base64, so whatever a model wrote, none of it can be markup.
"""

from __future__ import annotations

import argparse
import base64
import codecs
import contextlib
import functools
import hashlib
import json
import math
import re
import sys
import zlib
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools.command_line import Parser, answers_in_json, one_line
from tools.runs import EPISODES, checkpoints, episode_files, read

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_suffix(".html")
CHUNK = 2**18  # characters of JSON: what the page unpacks to show one episode
PREVIEW = 120  # characters of the last reply, for the list
DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


# What is read


def step_files(run: Path) -> list[Path]:
    return [path for _, _, path in episode_files(run)]


def find(path: Path) -> dict[Path, list[Path]]:
    """{run folder: its files of episodes} for what a person may name."""
    if not path.exists():
        raise BadInput(f"{path}: there is no such folder")
    inside = path.resolve()
    if EPISODES.fullmatch(inside.name) and inside.parent.name == "episodes":
        return {inside.parent.parent: [inside]}
    for run in (inside, *inside.parents[:2]):  # episodes/ and checkpoints/step_000010/ lie in their run
        if files := step_files(run):
            return {run: files}
    below = {run: files for run in sorted(inside.glob("*/")) if (files := step_files(run))}
    if not below:
        raise BadInput(f"{path}: no episodes (expected a run folder that has episodes/val_step_000010.jsonl "
                       "or the like; ppo_llm.py and grpo_llm.py write them, the share --log-episodes)")
    return below


def labels(runs: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for parts in range(1, max(len(run.parts) for run in runs) + 1):
        names = ["/".join(run.parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


# The texts of tokens

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {  # how byte-level vocabularies spell bytes, as GPT-2's did
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


def load_tokenizer(run: Path):
    """The tokenizers.Tokenizer of a run's newest checkpoint, else of the model it started from; else None."""
    places = checkpoints(run)[::-1]
    try:
        model = read(run, damaged=[]).meta["model"]
        places += [Path(model), ROOT / model] if model else []
    except DAMAGE:
        model = None
    for place in places:
        if (place / "tokenizer.json").is_file():  # at once; transformers takes seconds to import
            import tokenizers

            with contextlib.suppress(Exception):  # tokenizers raises nothing else for a damaged file
                return tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    for place in [*filter(Path.is_dir, places), *filter(None, [model])]:
        try:
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
            return found.backend_tokenizer
        except Exception:  # whatever a folder without a tokenizer makes of it
            continue
    return None


class Pieces:
    """What each token says alone. Joined, the texts of a reply's tokens are the reply and its special tokens.

    tokenizer: a tokenizers.Tokenizer; with None a token is \u27e8its id\u27e9.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.found = tokenizer, {}
        self.anchor, self.start = [], ""  # a token of plain text, before which no decoder strips a space
        for token in range(tokenizer.get_vocab_size() if tokenizer else 0):
            start = self.decode([token])
            if start.isascii() and start.isalnum() and self.decode([token] * 2).startswith(start):
                self.anchor, self.start = [token], start
                break

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token: int, first: bool) -> str | bytes:
        """bytes of a token that is no whole number of characters."""
        name = self.tokenizer.id_to_token(token) if self.tokenizer else None
        if name is None:
            return f"\u27e8{token}\u27e9"
        text = self.decode([token] if first else [*self.anchor, token])
        text = text if first else text.removeprefix(self.start)
        if "\ufffd" in text and re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        if "\ufffd" in text and all(character in BYTES for character in name):
            return bytes(BYTES[character] for character in name)
        return text

    def texts(self, ids: list[int]) -> list[str]:
        """One for each token. A character of several tokens stands at the last of them."""
        pieces = []
        for i, token in enumerate(ids):
            if (token, i == 0) not in self.found:
                self.found[token, i == 0] = self.piece(token, i == 0)
            pieces.append(self.found[token, i == 0])
        if any(isinstance(piece, bytes) for piece in pieces):
            reader = codecs.getincrementaldecoder("utf-8")("replace")
            pieces = [reader.decode(each if isinstance(each, bytes) else each.encode()) for each in pieces]
            pieces[-1] += reader.decode(b"", final=True)
        return pieces


# An episode as the page wants it


def number(value, digits: int = 12) -> float | int | None:
    """None for what is no finite number: JSON in a page has no NaN."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return round(value, digits) if isinstance(value, float) else int(value)


def text(value) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def sampled(turn: dict, segments: list[dict], pieces) -> list:
    """[texts, log-probabilities, advantages (of GRPO one number)] of the tokens of one reply.

    pieces: a function that returns the run's Pieces, for many runs are looked at without tokens.
    """
    segment, span = segments[turn["segment"]], slice(turn["start"], turn["end"])
    advantages = segment.get("advantages")
    return [pieces().texts(segment["response_ids"][span]),
            [number(logprob, 5) for logprob in (segment.get("rollout_logprobs") or [])[span]],
            number(segment.get("advantage"), 5) if advantages is None else
            [number(advantage, 5) for advantage in advantages[span]]]


def shape(raw, pieces, tokens: list) -> dict:
    """The same keys as in the file, every value of the type that the page relies on.

    Tokens go to the end of `tokens`, and a turn keeps their index: they are large, and rarely looked at.
    Raises one of DAMAGE for what is no episode.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        raise ValueError("expected an episode with messages")
    turns, segments, info = [], raw.get("segments") or [], raw.get("info")
    for turn in raw.get("turns") or []:
        turns.append({"reward": number(turn.get("reward"))})
        if "segment" in turn:
            turns[-1]["tokens"] = len(tokens)
            tokens.append(sampled(turn, segments, pieces))
    return {
        "task_id": text(raw.get("task_id")), "source": text(raw.get("source")),
        "number": number(raw.get("number")), "reward": number(raw.get("reward")),
        "correct": number(raw.get("correct")), "termination": text(raw.get("termination")),
        "segments": len(segments), "retries": number(raw.get("retries", 0)),
        "info": {key: number(value) if isinstance(value, float) else value
                 for key, value in (info if isinstance(info, dict) else {}).items()},
        "messages": [{"role": text(message.get("role")), "content": text(message.get("content"))}
                     for message in raw["messages"]],
        "turns": turns,
        "sub_agents": [shape(each, pieces, tokens) for each in raw.get("sub_agents") or []]}


def row(file: int, line: int, episode: dict, tokens: list) -> list:
    """What the list, the filters and the sorting need, in the order of COLUMNS in the page."""
    replies = [message["content"] for message in episode["messages"] if message["role"] == "assistant"]
    return [file, line, episode["task_id"], episode["number"], episode["source"], episode["reward"],
            episode["correct"], episode["termination"], len(replies), sum(map(len, replies)),
            sum(len(texts) for texts, *_ in tokens), " ".join("".join(replies[-1:])[:999].split())[:PREVIEW]]


# The page


def as_json(value) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def packed(name: str, text: str) -> str:
    """An element that runs nothing and whose text is base64."""
    data = base64.b64encode(zlib.compress(text.encode(), 6)).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>\n'


def page_halves() -> tuple[str, str]:
    """The template before and after the data, its policy naming its one style and its one script."""
    page = TEMPLATE.read_text(encoding="utf-8")
    for tag in ("style", "script"):
        (code,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        page = page.replace("{{" + tag + "}}", digest)
    before, after = page.split("{{data}}")
    return before, after


def lines_of(files: list[Path]):
    """Yields (index of the file, number of the line, the line or what went wrong), a progress bar beside."""
    size = sum(file.stat().st_size for file in files if file.is_file())
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for index, file in enumerate(files):
            try:
                if not file.is_file():
                    raise ValueError("expected a file")
                with file.open("rb") as lines:
                    for number, line in enumerate(lines, 1):
                        bar.update(len(line))
                        yield index, number, line
            except (OSError, ValueError) as error:
                yield index, 0, error


def elements(runs: dict[Path, list[Path]], report: dict):
    """Yields the elements that hold the episodes, about CHUNK characters in each, and at last the index.

    Adds to the report how many episodes there are, and appends the names of damaged lines.
    """
    names = labels(list(runs))
    files = [(name, run, file) for name, run in zip(names, runs, strict=True) for file in runs[run]]
    rows, sizes, chunk = [], [], []

    @functools.cache
    def pieces_of(run):
        if (tokenizer := load_tokenizer(run)) is None:
            tqdm.write(f"{run}: no tokenizer, so tokens are shown as their ids", file=sys.stderr)
        return Pieces(tokenizer)

    def flush():
        for name, texts in zip(("episodes", "tokens"), zip(*chunk, strict=True), strict=True):
            yield packed(f"{name}{len(sizes)}", f"[{','.join(texts)}]")
        sizes.append(len(chunk))
        chunk.clear()

    for index, line, content in lines_of([file for *_, file in files]):
        name, run, file = files[index]
        try:
            if isinstance(content, Exception):
                raise content
            raw = json.loads(content, parse_constant=lambda name: None)  # NaN is null to the page
            if isinstance(raw, dict) and "summary" in raw:
                continue
            tokens = []
            episode = shape(raw, functools.partial(pieces_of, run), tokens)
            found = as_json(episode), as_json(tokens), row(index, line, episode, tokens)
        except DAMAGE as error:
            report["damaged"].append(f"{name}/{file.name}:{line}")
            tqdm.write(f"skipped {file}, line {line}: {one_line(error)}", file=sys.stderr)
            continue
        chunk.append(found[:2])
        rows.append(found[2])
        if sum(len(text) for text, _ in chunk) > CHUNK:
            yield from flush()
    if chunk:
        yield from flush()
    if not rows:
        where = ", ".join(map(str, runs))
        raise BadInput(f"{where}: no episode that can be read ({len(report['damaged'])} damaged lines)")
    report["episodes"] = len(rows)
    yield packed("index", as_json({
        "runs": names, "files": [[name, *EPISODES.fullmatch(file.name).groups()] for name, _, file in files],
        "rows": rows, "sizes": sizes, "damaged": report["damaged"]}))


def run(args: argparse.Namespace) -> dict:
    runs = {}
    for path in args.runs:
        for run, files in find(path).items():
            runs[run] = list(dict.fromkeys([*runs.get(run, []), *files]))
    out = args.out or next(iter(runs)) / "episodes.html"
    if out.suffix != ".html":
        raise BadInput(f"--out {out}: expected a name that ends in .html")
    before, after = page_halves()
    report, beside = {"runs": len(runs), "episodes": 0, "damaged": []}, out.with_name(f".{out.name}.writing")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as page:
            page.write(before)
            page.writelines(elements(runs, report))
            page.write(after)
        beside.replace(out)
    except OSError as error:  # those of reading are damaged lines
        raise BadInput(f"--out {out}: cannot be written ({error})") from error
    finally:
        if beside.is_file():
            beside.unlink()
    return {"out": str(out), "bytes": out.stat().st_size} | report | {"damaged": len(report["damaged"])}


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    parser = Parser(description="Browse the episodes of runs in one HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="the page (default: episodes.html in the folder of the first run)")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
