"""Golden logs: the first records of ten short runs, kept in tests/golden, against which changes are held.

    python tools/compare_runs.py --golden            # makes the runs again and compares
    python tools/golden.py grpo sft                  # renews the logs of these; without names, all

A golden log holds the numbers of the first iterations, without times and without what names a run or a
machine. Renewing one is a decision: see CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, hint

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "golden"
RELATIVE = 1e-4  # another processor rounds otherwise
ABSOLUTE = 1e-7
ROUNDING = "mismatch/"  # what sampler and trainer differ by is rounding alone, and must only stay small
ABSOLUTE_OF_ROUNDING = 1e-5
SECONDS = 600.0  # for the iterations of a run
FEW = "--eval-tasks 32 --eval-samples 2"  # evaluations do not change what is trained
SMALL = f"{FEW} --prompts-per-iteration 16"

# name -> the command, and the iterations that are kept. The first of each script is its default run, but
# for what is evaluated and how often something is logged.
RUNS = {
    "grpo": (f"grpo_llm.py {FEW}", 10),
    "ppo": (f"ppo_llm.py {FEW}", 12),  # the policy moves from the eleventh on
    "sft": (f"sft.py {FEW} --log-every 1", 10),
    "a2c": ("a2c_vecenv.py --log-every 1 --eval-every 10 --eval-episodes 8 --eval-envs 8", 10),
    "grpo_lora": (f"grpo_llm.py {SMALL} --lora-rank 4 --learning-rate 1e-2 --kl-coef 0.05", 10),
    "grpo_gspo": (f"grpo_llm.py {SMALL} --loss gspo --epochs 2 --minibatches 2 --aggregation sequence", 10),
    "grpo_turns": (f"grpo_llm.py {SMALL} --env tests/two_turn.py:FourTurn --max-context-tokens 45", 10),
    "ppo_shared": (f"ppo_llm.py {FEW} --prompts-per-iteration 128 --critic shared --epochs 2", 10),
    "sft_packed": (f"sft.py {FEW} --log-every 1 --packing --env-kwargs max_operands=4", 10),
    "a2c_cartpole": ("a2c_vecenv.py --env-id CartPole-v1 --num-envs 8 --log-every 1 --eval-every 10 "
                     "--eval-episodes 8 --eval-envs 8", 10),
}
CLOCK = ("time/", "system/", "wall_time_s", "sps", "rollout/throughput", "train/throughput")
NAMES = ("run_id", "trace_id")


def words_of(name: str) -> list[str]:
    """The command line of a golden run: its script and flags."""
    if name not in RUNS:
        raise BadInput(f"no golden run {name!r}: expected {', '.join(RUNS)}{hint(name, RUNS)}")
    return RUNS[name][0].split()


def read(folder: Path, iterations: int) -> list[dict]:
    """The records of a run folder, or of a golden log, up to an iteration, without times and names."""
    path = folder / "train_log.jsonl" if folder.is_dir() else folder
    records = []
    with path.open() as lines:
        for line in lines:
            if not line.endswith("\n"):  # it is being written
                break
            record = json.loads(line)
            if record.get("iteration", math.inf) <= iterations:
                records.append({key: value for key, value in record.items()
                                if key not in NAMES and not key.startswith(CLOCK)})
    return records


def is_long_enough(folder: Path, name: str) -> bool:
    """Whether a run has logged all iterations that its golden log has."""
    iterations = RUNS[name][1]
    with contextlib.suppress(OSError):
        return any(record["iteration"] == iterations for record in read(folder, iterations))
    return False


def make(name: str, folder: Path) -> None:
    """Start a golden run, and end it once it has logged as many iterations as its golden log has."""
    command = [sys.executable, *words_of(name), "--run-dir", str(folder)]
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, text=True)
        deadline = time.monotonic() + SECONDS
        try:
            while not is_long_enough(folder, name):
                if run.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
                    raise BadInput(f"{' '.join(command[1:])}: expected iteration {RUNS[name][1]}; {last}")
                time.sleep(0.05)
        finally:
            run.kill()
            run.wait()


def is_near(key: str, expected, found) -> bool:
    """Whether two values of a key are equal but for rounding."""
    if isinstance(expected, list) and isinstance(found, list):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(is_near(key, *pair) for pair in pairs)
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        absolute = ABSOLUTE_OF_ROUNDING if key.startswith(ROUNDING) else ABSOLUTE
        return math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=absolute)
    return expected == found


def first_difference(name: str, folder: Path) -> str:
    """The first number of a run that is not its golden log's: a line; empty where all are."""
    iterations = RUNS[name][1]
    golden = read(FOLDER / f"{name}.jsonl", iterations)
    found = read(folder, iterations)
    for expected, record in zip(golden, found, strict=False):
        where = f"{name}, iteration {expected['iteration']}"
        for key in expected | record:
            if key not in record:
                return f"{where}: {key} is no longer logged (it was {expected[key]})"
            if key not in expected:
                return f"{where}: {key} {record[key]} was not logged"
            if not is_near(key, expected[key], record[key]):
                return f"{where}: {key} {record[key]} (it was {expected[key]})"
    if len(golden) != len(found):
        return f"{name}: {len(found)} records up to iteration {iterations} (it was {len(golden)})"
    return ""


def compare(names: list[str], folder: Path | None = None) -> int:
    """Print a line for each golden run, made now or in a folder.  -> how many differ"""
    different = 0
    for name in names or RUNS:
        words_of(name)  # raises BadInput where there is none
        with tempfile.TemporaryDirectory() as made:
            if folder is None:
                make(name, Path(made, "run"))
            line = first_difference(name, folder or Path(made, "run"))
        different += bool(line)
        print(line or f"{name}: equal", flush=True)
    return different


def rounded(value):
    """Seven digits, which hold a float32."""
    if isinstance(value, list):
        return [*map(rounded, value)]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def write(name: str, folder: Path) -> None:
    """Make the golden log of a run that is long enough."""
    lines = []
    for record in read(folder, RUNS[name][1]):
        lines.append(json.dumps({key: rounded(value) for key, value in record.items()}) + "\n")
    (FOLDER / f"{name}.jsonl").write_text("".join(lines))


def main(argv: list[str]) -> int:
    for name in argv or RUNS:
        words_of(name)
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder, "run"))
            write(name, Path(folder, "run"))
        print(f"{name}: renewed", flush=True)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except (BadInput, OSError) as error:
        raise SystemExit(f"error: {error}") from error
