"""What tools read of a run folder: its log, its files of episodes, its checkpoints (docs/train_log.md).

A log may be one that is being written, that a kill cut off, or that is no log at all. What cannot be used is
one line that names the file and the line. Nothing heavy is imported here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools.validate_train_log import is_number

# Flags that name a run, its folder or the machine's share of the work, and never its result; as may_change in
# the scripts has them.
OF_THE_FOLDER = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints", "log_episodes",
                 "print_samples", "max_concurrent", "vllm_url", "vllm_kwargs"}
EPISODES = re.compile(r"((train|val)_step_([0-9]{1,12}))\.jsonl")


@dataclasses.dataclass
class Log:
    """The lines of a train_log.jsonl by their kind, in order."""

    folder: Path
    meta: dict  # with args, a dict
    records: list[dict]  # each with a number as its iteration
    resumes: list[dict]
    errors: list[dict]


def log_of(path: Path) -> Path:
    """The log of a run folder; what is no folder is the log itself."""
    return path / "train_log.jsonl" if path.is_dir() else path


def objects(path: Path, damaged: list[str] | None = None) -> list[dict]:
    """The JSON objects of a file that has one a line. A last line that is still being written is left out.

    damaged: gets a text for each other line that is no object; without it the first one is a BadInput.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise TypeError
            found.append(value)
        except (ValueError, TypeError, RecursionError) as error:
            if not line.endswith(b"\n"):  # or a kill cut it off
                break
            says = f"{path}, line {number}: expected a JSON object ({type(error).__name__})"
            if damaged is None:
                raise BadInput(says) from error
            damaged.append(says)
    return found


def read(path: Path, damaged: list[str] | None = None) -> Log:
    """A run's log, by its folder or itself; damaged: see `objects`. Raises BadInput for what is none."""
    log = log_of(path)
    lines = objects(log, damaged) if log.is_file() else []
    meta = lines[0].get("meta") if lines else None
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise BadInput(f"{path}: expected a run folder, with a meta line first in its train_log.jsonl")
    found = Log(log.absolute().parent, meta, [], [], [])
    for line in lines[1:]:
        if "resume" in line or "error" in line:
            for kind, kept in (("resume", found.resumes), ("error", found.errors)):
                if isinstance(line.get(kind), dict):
                    kept.append(line[kind])
        elif is_number(line.get("iteration")):
            found.records.append(line)
    return found


def experiment_hash(meta: dict) -> str:
    """The same for all seeds of an experiment: of flags that change the result, but for the seed, and of what
    else decides it: weights, the reward's source, files.
    """
    args = meta["args"]
    left_out = OF_THE_FOLDER | {"seed"}
    # Where no rate depends on the length, a run is the beginning of a longer one.
    if args.get("final_learning_rate") == 1 or args.get("anneal") is False:
        left_out |= {"iterations"}
    if args.get("schedule") == "constant":
        left_out |= {"steps", "epochs"}
    kept = {name: value for name, value in args.items() if name not in left_out}
    for name, value in meta.items():
        # Code changes without changing an experiment; random weights follow from the seed.
        is_of_seed = name == "model_sha256" and not args.get("model")
        if name in ("algo", "env") or name.endswith("_sha256") and name != "script_sha256" and not is_of_seed:
            kept[f"meta {name}"] = value
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def episode_files(run: Path) -> list[tuple[int, str, Path]]:
    """(iteration, train or val, file) of the episodes that a run wrote down, in order."""
    found = []
    for path in (run / "episodes").glob("*_step_*"):
        match = EPISODES.fullmatch(path.name)
        if match:
            found.append((int(match[3]), match[2], path))
    return sorted(found)


def checkpoints(run: Path) -> list[Path]:
    """Oldest first; copies and what is not renamed yet have other names."""
    numbered = (path for path in (run / "checkpoints").glob("step_*") if path.name[5:].isdecimal())
    return sorted(numbered, key=lambda path: int(path.name[5:]))
