"""Diffs of a run, or of replies in a file, as the official evaluators of SWE-bench read them.

    python tools/export_predictions.py --run runs/<run> --model mine --out predictions.jsonl
    python tools/export_predictions.py --replies replies.jsonl --model mine --out predictions.jsonl

Writes {"instance_id", "model_name_or_path", "model_patch"} for each instance: lines where --out ends in
.jsonl, one list where it ends in .json, as the evaluators tell them apart. --run takes the episodes of
environment swe that a training script wrote (with --log-episodes 1 all of them), of the last step of --kind
unless --step says another, and of each instance the sample --sample. --replies takes lines with instance_id
(or task_id) and reply (or response). Both may be given; of an instance the first one counts. A model_patch is
the diff as the environment reads it, and so with the blanks and line ends that git wants; one that the
environment cannot read is there as it stands in the reply. A reply without a diff has an empty model_patch.

Prints a line of JSON: what was read and written. What cannot be read is one line of JSON on standard error
and exit status 1, and no file is written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, final_part, from_json
from envs.code.swe import BadPatch, find_patch, parse_patch, write_patch
from tools.command_line import Parser, answers_in_json, at_least, one_line
from tools.runs import episode_files


def replies_of_run(run: Path, kind: str, step: int | None, sample: int) -> Iterator[tuple[str, str]]:
    """(instance_id, last reply) of the episodes of one step."""
    files = {iteration: path for iteration, of, path in episode_files(run) if of == kind}
    if not files:
        raise BadInput(f"--run {run}: no episodes/{kind}_step_*.jsonl")
    if step is not None and step not in files:
        raise BadInput(f"--step {step}: {run} has {kind} episodes of {', '.join(map(str, sorted(files)))}")
    found, file = False, files[max(files) if step is None else step]
    for where, episode in rows(file, f"--run {run}: {file.name}"):
        if not isinstance(episode, dict) or not str(episode.get("source", "")).startswith("swe"):
            continue  # the summary, another environment
        found = True
        if episode.get("number") == sample:
            try:
                last = [turn["content"] for turn in episode["messages"] if turn["role"] == "assistant"][-1:]
                yield text(episode["task_id"]).rpartition(":")[2], text("".join(last))
            except (KeyError, TypeError) as error:
                raise BadInput(f"{where}: expected task_id and messages") from error
    if not found:
        raise BadInput(f"--run {run}: no episodes of environment swe in {file.name}")


def replies_of_file(path: Path) -> Iterator[tuple[str, str]]:
    for where, row in rows(path, f"--replies {path}"):
        try:
            name = row["instance_id"] if "instance_id" in row else row["task_id"]
            yield text(name), text(row["reply"] if "reply" in row else row["response"])
        except (KeyError, TypeError) as error:
            raise BadInput(f"{where}: expected instance_id or task_id, and reply or response") from error


def rows(path: Path, name: str) -> Iterator[tuple[str, object]]:
    """(where it stands, what stands there) of the lines of a .jsonl file."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"{name}: line {number}", from_json(line)
                except (ValueError, RecursionError) as error:
                    what = one_line(error)[:100]
                    raise BadInput(f"{name}: line {number}: expected JSON ({what})") from error


def text(value) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def model_patch(reply: str) -> str:
    patch = find_patch(final_part(reply)) or ""
    try:
        return write_patch(parse_patch(patch))
    except BadPatch:
        return patch


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    parser = Parser(description="Write diffs as the official evaluators of SWE-bench read them.")
    parser.add_argument("--run", type=Path, help="a run's folder")
    parser.add_argument("--kind", choices=("val", "train"), default="val", help="which of its episodes (val)")
    parser.add_argument("--step", type=at_least(0), help="of which iteration (the last)")
    parser.add_argument("--sample", type=at_least(0), default=0, help="which sample of an instance (0)")
    parser.add_argument("--replies", type=Path, help="a .jsonl file of replies")
    parser.add_argument("--model", required=True, help="what model_name_or_path says")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, .jsonl or .json")
    args = parser.parse_args(argv)
    if not args.run and not args.replies:
        raise BadInput("expected --run or --replies")
    if args.out.suffix not in (".json", ".jsonl"):
        raise BadInput(f"--out {args.out}: expected a name that ends in .jsonl or .json")
    pairs = [*(replies_of_run(args.run, args.kind, args.step, args.sample) if args.run else ()),
             *(replies_of_file(args.replies) if args.replies else ())]
    patches = {}
    for name, reply in pairs:
        patches.setdefault(name, model_patch(reply))
    rows = [dict(instance_id=name, model_name_or_path=args.model, model_patch=patch)
            for name, patch in patches.items()]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if args.out.suffix == ".json":
        content = json.dumps(rows, indent=1) + "\n"
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(args.out)
    with_diff = sum(bool(row["model_patch"]) for row in rows)
    return {"replies": len(pairs), "instances": len(rows), "with_diff": with_diff,
            "without_diff": len(rows) - with_diff, "out": str(args.out)}


if __name__ == "__main__":
    sys.exit(main())
