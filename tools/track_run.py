"""Mirror a run's log to Weights & Biases, while it runs or afterwards (docs/train_log.md).

    pip install wandb; wandb login
    python tools/track_run.py runs/grpo/RUN                  # follows the log until Ctrl-C
    python tools/track_run.py runs/grpo/RUN --once           # what is in the log now
    python tools/track_run.py runs/sft/RUN --once --artifacts best --name "sft, two epochs"

Its own variables hold, also from a file .env: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_NAME and others.
The run there has this run's id, flags and commit, the seeds of one experiment as its group, and the iteration
as its step; a log that goes on, or a second call, continues it. Episodes become tables: those of validation,
and with --train-table-every some of training. It reads the run's folder, and the run knows nothing of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from dotenv import load_dotenv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools import runs
from tools.command_line import Parser, at_least, ends_in_one_line
from tools.validate_train_log import is_number

COLUMNS = ["prompt", "response", "reward", "is_correct", "data_source", "metrics_json"]  # of a table
MOST_TEXT = 20_000  # characters of a cell
# What wandb sends of its own accord and --redact could not look at: command line, host, commit, console.
PRIVATE = dict(console="off", disable_git=True, disable_code=True, x_disable_meta=True,
               x_disable_machine_info=True, x_save_requirements=False)


# That a reader does not see, beside those of category Cf (zero width, soft hyphens, marks of direction,
# tags): what joins or varies letters, fillers, and what stands for half of a character.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffd"
                    "\U000e0100-\U000e01ef]")


JOINED = re.compile("[\u0300-\u036f\u1161-\u11ff\u3099\u309a]")  # accents, and letters of a Korean syllable


def as_read(text: str, marks: bool) -> tuple[str, list[tuple[int, int]]]:
    """A text as a reader sees it: letters in their plain form (NFKC, so that those in full width, bold or
    superscript are letters), without what does not show; marks: with accents on letters, or without them.
    -> the text, and where each of its characters stood
    """
    seen, places, start = [], [], 0
    while start < len(text):
        end = start + 1
        while marks and end < len(text) and JOINED.match(text[end]):
            end += 1  # e and an accent are one letter
        for letter in unicodedata.normalize("NFKC" if marks else "NFKD", text[start:end]):
            kind = unicodedata.category(letter)
            if kind != "Cf" and not UNSEEN.match(letter) and (marks or kind[0] != "M"):
                seen.append(letter)
                places.append((start, end))
        start = end
    return "".join(seen), places


def redacted(text: str, patterns: list[re.Pattern]) -> str:
    """A text without what a pattern matches, as it stands or as it is read."""
    forms = [(text, [(place, place + 1) for place in range(len(text))])]
    if not text.isascii():
        forms += [as_read(text, True), as_read(text, False)]
    spans = []
    for pattern in patterns:
        for seen, places in forms:
            for match in pattern.finditer(seen):
                if match[0]:
                    spans.append((places[match.start()][0], places[match.end() - 1][1]))
    kept, place = [], 0
    for start, end in sorted(spans):
        if start >= place:
            kept += [text[place:start], "[redacted]"]
        place = max(place, end)
    return "".join([*kept, text[place:]])


def safe(value, patterns):
    """A JSON value whose texts have no control characters and lone surrogates, nor what a pattern matches."""
    if isinstance(value, dict):
        return {safe(name, patterns): safe(item, patterns) for name, item in value.items()}
    if isinstance(value, list):
        return [safe(item, patterns) for item in value]
    if not isinstance(value, str):
        return value
    kept = []
    for letter in value:
        kind = unicodedata.category(letter)
        if kind == "Cs":  # half of a UTF-16 pair, which UTF-8 has no form for
            kept.append("\ufffd")
        elif kind != "Cc" or letter in "\n\t":
            kept.append(letter)
    text = "".join(kept)
    return redacted(text, patterns) if patterns else text


# Episodes as rows


def episodes_of(folder: Path, kind: str, iteration: int) -> list[dict]:
    """Those that the run wrote down of an iteration, the first attempt at each task before others."""
    path = folder / "episodes" / f"{kind}_step_{iteration:06d}.jsonl"
    if not path.is_file():
        return []
    found = [line for line in runs.objects(path) if isinstance(line.get("messages"), list)]
    return sorted(found, key=lambda episode: episode.get("number") or 0)


def spoken(messages: list[dict], patterns) -> str:
    """A conversation as one text; who says what, where there are several messages."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(str(block.get("text", "")) for block in content)
        calls = message.get("tool_calls")
        if calls:
            content = f"{content}\n{json.dumps(safe(calls, patterns), ensure_ascii=False)}".strip()
        parts.append(content if len(messages) == 1 else f"{message.get('role')}: {content}")
    return "\n\n".join(parts)


def row(episode: dict, patterns) -> list:
    """The cells of COLUMNS. The prompt is what stands before the first reply."""
    messages = episode["messages"]
    replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    replies = replies[-len(episode.get("turns") or replies):]  # a task may begin with assistants' messages
    start = replies[0] if replies else len(messages)
    metrics = dict(episode.get("info") or {}, termination=episode.get("termination"))
    correct = episode.get("correct")
    prompt, response = spoken(messages[:start], patterns), spoken(messages[start:], patterns)
    return [cell(prompt, patterns), cell(response, patterns),
            episode.get("reward"), None if correct is None else correct == 1,
            cell(str(episode.get("source") or ""), patterns),
            json.dumps(safe(metrics, patterns), ensure_ascii=False)]


def cell(text: str, patterns) -> str:
    text = safe(text, patterns)
    left_out = len(text) - MOST_TEXT
    return text if left_out <= 0 else f"{text[:MOST_TEXT]}\n[{left_out} more characters]"


# To wandb


def begin(folder: Path, meta: dict, args):
    """-> wandb's run of this id"""
    try:
        import wandb  # which not everybody has
        known = meta["run_id"].translate(str.maketrans(":;,#?/'", "-------"))  # those wandb refuses
        name = args.name or os.environ.get("WANDB_NAME") or meta["run_id"]
        group = None  # wandb's own variable
        if not os.environ.get("WANDB_RUN_GROUP"):
            group = f"{meta['algo']}-{meta['experiment_hash']}"
        config = meta["args"] | {key: value for key, value in meta.items() if key != "args"}
        settings = wandb.Settings(**PRIVATE) if args.redact else None
        return wandb.init(id=known, name=safe(name, args.redact), dir=folder, resume="allow", group=group,
                          config=safe(config, args.redact), settings=settings)
    except Exception as error:  # not installed, no key, no network
        raise BadInput(f"wandb: {error!r:.300} (pip install wandb; wandb login)") from error


def tables(args, iteration: int) -> dict:
    """{name: wandb.Table} of the episodes of an iteration"""
    import wandb

    wanted = ["val"]
    if args.train_table_every and iteration % args.train_table_every == 0:
        wanted.append("train")
    found = {}
    for kind in wanted:
        rows = [row(episode, args.redact) for episode in episodes_of(args.run, kind, iteration)]
        if rows and args.table_samples:
            found[f"{kind}/sample_table"] = wandb.Table(columns=COLUMNS, data=rows[:args.table_samples])
    return found


def send(run, records: list[dict], after: int, args) -> Iterator[int]:
    """Send the records of iterations after that one. Yields the iteration of each once it is sent."""
    for record in records:
        if record["iteration"] > after and "wall_time_s" in record:
            after = record["iteration"]
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            run.log(safe(numbers, args.redact) | tables(args, after), after)
            yield after


def send_checkpoint(run, meta: dict, sent: str, args) -> str:
    """A new version of the artifact where state.json names another checkpoint.  -> its name"""
    import wandb

    folder = args.run / "checkpoints"
    try:
        name = json.loads((folder / "state.json").read_text()).get(args.artifacts, sent)
        if name == sent:
            return sent
        known = {key: meta[key] for key in ("run_id", "config_hash", "experiment_hash") if key in meta}
        artifact = wandb.Artifact(f"{run.id}-{args.artifacts}", type="model",
                                  metadata=safe(known | dict(checkpoint=name), args.redact))
        artifact.add_dir(str(folder / name))  # copied at once
    except (OSError, ValueError):  # there is none yet, or it is just replaced by a newer one
        return sent
    run.log_artifact(artifact, aliases=["latest", name])
    return name


def regular_expression(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text}: expected a regular expression ({error})") from error


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    load_dotenv(".env")  # before wandb reads its variables; those that are set already stay
    parser = Parser(description="Mirror a run's log to Weights & Biases.")
    parser.add_run(every=10.0)
    parser.add_argument("--once", action="store_true", help="send what there is, and end")
    parser.add_argument("--name", default="", help="the run's name there (WANDB_NAME, else its id)")
    parser.add_argument("--table-samples", type=at_least(0), default=10, metavar="N",
                        help="episodes of a table, at most (10); 0: no tables")
    parser.add_argument("--train-table-every", type=at_least(0), default=0, metavar="K",
                        help="iterations between tables of training (0: none)")
    parser.add_argument("--redact", type=regular_expression, action="append", default=[], metavar="REGEX",
                        help="what must not leave the machine; may be given several times")
    parser.add_argument("--artifacts", choices=("last", "best"), help="send this checkpoint, too")
    args = parser.parse_args(argv)
    log, last = args.run / "train_log.jsonl", args.once
    while not runs.objects(log) and not args.once:
        time.sleep(args.every)  # the run is still loading
    meta = runs.read(args.run).meta
    meta["experiment_hash"] = runs.experiment_hash(meta)
    if args.artifacts == "best" and meta.get("algo") != "sft":
        raise BadInput(f"--artifacts best: {meta.get('algo')} keeps none, as sft does; expected last")
    run, after, sent = begin(args.run, meta, args), -1, ""
    try:
        while True:
            try:
                # None are left for a moment where a run that starts again has cut the log.
                records = [line for line in runs.objects(log) if is_number(line.get("iteration"))]
                for iteration in send(run, records, max(after, run.starting_step - 1), args):
                    after = iteration
                if args.artifacts:
                    sent = send_checkpoint(run, meta, sent, args)
                if last:
                    return 0
                time.sleep(args.every)
            except KeyboardInterrupt:  # the first is followed by a last look
                if last:
                    raise
                last = True
    finally:
        run.finish()


if __name__ == "__main__":
    sys.exit(main())
