"""Browse the episodes of one or more runs in one HTML page that needs nothing else (docs/view_episodes.md).

    python tools/view_episodes.py runs/grpo/RUN
    python tools/view_episodes.py runs/grpo/S1 runs/grpo/S2 --out both.html

RUN is a run folder, a folder inside one, or a folder of runs. The page is tools/view_episodes.html with the
episodes in it, compressed: an index that it reads at once, and chunks that it unpacks when they are needed.
All text travels as base64, so whatever a model wrote, none of it can be markup.
"""

from __future__ import annotations

import argparse
import base64
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
from tools.command_line import Parser, one_line

TEMPLATE = Path(__file__).with_suffix(".html")
FOLDER = re.compile(r"(train|val)_step_([0-9]{1,12})")
CHUNK = 2**18  # characters of JSON: what the page unpacks to show one episode
PREVIEW = 120  # characters of the last reply, for the list


# What is read


def step_folders(run: Path) -> list[Path]:
    found = [(int(match[2]), path.name, path) for path in (run / "episodes").glob("*_step_*")
             if (match := FOLDER.fullmatch(path.name)) and path.is_dir()]
    return [path for *_, path in sorted(found)]


def find(path: Path) -> dict[Path, list[Path]]:
    """{run folder: its folders of episodes} for what a person may name."""
    if not path.exists():
        raise BadInput(f"{path}: there is no such folder")
    inside = path.resolve()
    if FOLDER.fullmatch(inside.name) and inside.parent.name == "episodes":
        return {inside.parent.parent: [inside]}
    for run in (inside, *inside.parents[:2]):  # episodes/ and checkpoints/step_000010/ lie in their run
        if folders := step_folders(run):
            return {run: folders}
    below = {run: folders for run in sorted(inside.glob("*/")) if (folders := step_folders(run))}
    if not below:
        raise BadInput(f"{path}: no episodes (expected a run folder that holds episodes/val_step_000010 or "
                       "the like; ppo_llm.py and grpo_llm.py write them, the share --log-episodes)")
    return below


def labels(runs: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for parts in range(1, max(len(run.parts) for run in runs) + 1):
        names = ["/".join(run.parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


# An episode as the page wants it


def number(value, digits: int = 12) -> float | int | None:
    """None for what is no finite number: JSON in a page has no NaN."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return round(value, digits) if isinstance(value, float) else int(value)


def text(value) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def shape(raw, tokens: list, name: str) -> dict:
    """The same keys as in the file, every value of the type that the page relies on.

    Tokens go to the end of `tokens`, and a turn keeps their index: they are large, and rarely looked at.
    Raises ValueError, TypeError and the like for what is no episode.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        raise ValueError("expected an episode with messages")
    turns, segments, info = [], raw.get("segments", 1), raw.get("info")
    for turn in raw.get("turns") or []:
        turns.append({"reward": number(turn.get("reward"))})
        if turn.get("tokens"):
            turns[-1]["tokens"] = len(tokens)
            tokens.append([[text(token) for token in turn["tokens"]],
                           [number(logprob, 5) for logprob in turn.get("logprobs") or []]])
    return {
        "task_id": text(raw.get("task_id", name)), "source": text(raw.get("source")),
        "number": number(raw.get("number")), "reward": number(raw.get("reward")),
        "correct": number(raw.get("correct")), "termination": text(raw.get("termination")),
        "segments": len(segments) if isinstance(segments, list) else number(segments),
        "retries": number(raw.get("retries", 0)),
        "info": {key: number(value) if isinstance(value, float) else value
                 for key, value in (info if isinstance(info, dict) else {}).items()},
        "messages": [{"role": text(message.get("role")), "content": text(message.get("content"))}
                     for message in raw["messages"]],
        "turns": turns,
        "sub_agents": [shape(each, tokens, name) for each in raw.get("sub_agents") or []]}


def read(file: Path) -> tuple[dict, list]:
    """An episode and its tokens. parse_constant: NaN is null to the page."""
    if not file.is_file():
        raise ValueError("expected a file")
    tokens = []
    raw = json.loads(file.read_bytes(), parse_constant=lambda name: None)
    return shape(raw, tokens, file.stem), tokens


def row(folder: int, file: Path, episode: dict, tokens: list) -> list:
    """What the list, the filters and the sorting need, in the order of COLUMNS in the page."""
    replies = [message["content"] for message in episode["messages"] if message["role"] == "assistant"]
    return [folder, file.stem, episode["task_id"], episode["number"], episode["source"], episode["reward"],
            episode["correct"], episode["termination"], len(replies), sum(map(len, replies)),
            sum(len(texts) for texts, _ in tokens), " ".join("".join(replies[-1:])[:999].split())[:PREVIEW]]


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


def elements(runs: dict[Path, list[Path]], report: dict):
    """Yields the elements that hold the episodes, about CHUNK characters in each, and at last the index.

    Adds to the report how many episodes there are, and appends the names of damaged files.
    """
    names = labels(list(runs))
    folders, files, rows, sizes, chunk = [], [], [], [], []
    for name, run in zip(names, runs, strict=True):
        for folder in runs[run]:
            files += [(len(folders), file) for file in sorted(folder.glob("*.json"))
                      if file.name not in ("summary.json", "table.json") and not file.name.startswith(".")]
            folders.append([name, folder.name, *FOLDER.fullmatch(folder.name).groups()])

    def flush():
        for name, texts in zip(("episodes", "tokens"), zip(*chunk, strict=True), strict=True):
            yield packed(f"{name}{len(sizes)}", f"[{','.join(texts)}]")
        sizes.append(len(chunk))
        chunk.clear()

    for folder, file in tqdm(files, unit=" episodes", disable=None, leave=False):
        try:
            episode, tokens = read(file)
            found = as_json(episode), as_json(tokens), row(folder, file, episode, tokens)
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            report["damaged"].append("/".join([*folders[folder][:2], file.name]))
            tqdm.write(f"skipped {file}: {one_line(error)}", file=sys.stderr)
            continue
        chunk.append(found[:2])
        rows.append(found[2])
        if sum(len(text) for text, _ in chunk) > CHUNK:
            yield from flush()
    if chunk:
        yield from flush()
    if not rows:
        where = ", ".join(map(str, runs))
        raise BadInput(f"{where}: no episode that can be read ({len(report['damaged'])} damaged files)")
    report["episodes"] = len(rows)
    yield packed("index", as_json({"runs": names, "folders": folders, "rows": rows, "sizes": sizes,
                                   "damaged": report["damaged"]}))


def run(args: argparse.Namespace) -> dict:
    runs = {}
    for path in args.runs:
        for run, folders in find(path).items():
            runs[run] = list(dict.fromkeys([*runs.get(run, []), *folders]))
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
    except OSError as error:  # those of reading are damaged files
        raise BadInput(f"--out {out}: cannot be written ({error})") from error
    finally:
        if beside.is_file():
            beside.unlink()
    return {"out": str(out), "bytes": out.stat().st_size} | report | {"damaged": len(report["damaged"])}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Browse the episodes of runs in one HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="the page (default: episodes.html in the folder of the first run)")
    try:
        print(json.dumps(run(parser.parse_args(argv))))
    except (BadInput, OSError) as error:  # OSError: a folder that may not be looked into
        print(json.dumps({"error": one_line(error)}), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
