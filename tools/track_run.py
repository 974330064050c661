"""Mirror a run's log to Weights & Biases, while it runs or afterwards (docs/train_log.md).

    pip install wandb; wandb login
    python tools/track_run.py runs/grpo/RUN                  # follows the log until Ctrl-C
    python tools/track_run.py runs/grpo/RUN --once           # what is in the log now

Its own variables hold: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and others. The run there has this run's id,
flags and commit, and the iteration as its step; a log that goes on, or a second call, continues it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools.command_line import Parser, ends_in_one_line, one_line


def log_lines(log: Path) -> list[dict]:
    """The complete lines: the last one may still be being written."""
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        return [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise BadInput(f"{log}: expected lines of JSON objects ({one_line(error)})") from error


def begin(folder: Path, meta: dict):
    """-> wandb's run of this id"""
    try:
        import wandb  # which not everybody has
        known = meta["run_id"].translate(str.maketrans(":;,#?/'", "-------"))  # those wandb refuses
        return wandb.init(id=known, name=meta["run_id"], dir=folder, resume="allow",
                          config=meta.pop("args") | meta)
    except Exception as error:  # not installed, no key, no network
        raise BadInput(f"wandb: {error!r:.300} (pip install wandb; wandb login)") from error


def send(run, lines: list[dict], after: int) -> int:
    """Send the records of iterations after that one.  -> the last one's iteration"""
    for line in lines:
        if line.get("iteration", -1) > after and "wall_time_s" in line:
            after = line["iteration"]
            run.log({name: value for name, value in line.items() if isinstance(value, int | float)}, after)
    return after


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Mirror a run's log to Weights & Biases.")
    parser.add_run(every=10.0)
    parser.add_argument("--once", action="store_true", help="send what there is, and end")
    args = parser.parse_args(argv)
    log = args.run / "train_log.jsonl"
    while not (lines := log_lines(log)) and not args.once:
        time.sleep(args.every)  # the run is still loading
    if not (lines and isinstance(meta := lines[0].get("meta"), dict) and "args" in meta):
        raise BadInput(f"{args.run}: expected a run folder, with a meta line in train_log.jsonl")
    run, after = begin(args.run, meta), -1
    try:
        while True:
            after = send(run, log_lines(log), max(after, run.starting_step - 1))
            if args.once:
                return 0
            time.sleep(args.every)
    finally:
        run.finish()


if __name__ == "__main__":
    sys.exit(main())
