"""Golden logs: the first records of ten short runs, kept in tests/golden, against which changes are held.

    python tools/compare_runs.py --golden            # makes the runs again and compares
    python tools/golden.py grpo sft                  # renews the logs of these; without names, all
    python tools/golden.py --machines grpo           # are they equal where another machine's code computes?

A golden log holds the numbers of the first iterations, without times and without what names a run or a
machine. Renewing one is a decision: see CONTRIBUTING.md.

Machines round otherwise: a number may differ by 1e-4 of itself, or by 1e-5 of the terms that it is a sum of
where these cancel (SCALES). The runs are short, since what they differ by grows with each update: a token
that is another then, as its random number lay on the border of two, would be an error of no one's making.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, hint
from tools import runs
from tools.command_line import Parser, ends_in_one_line

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "golden"
RELATIVE = 1e-4  # of a number: another processor rounds otherwise
OF_TERMS = 1e-5  # of the size of the terms that cancel in it
OF_EXACT = 2e-6  # of rates, computed in float64, and of norms of weights, which hardly change
EXACT = r".*(learning_rate|weight_norm)"
SECONDS = 600.0  # for the iterations of a run
FEW = "--eval-tasks 32 --eval-samples 2"  # evaluations do not change what is trained
SMALL = f"{FEW} --prompts-per-iteration 16"
SHORT = "--iterations 5 --warmup-iterations 2"  # all of the schedule, and an evaluation at its end

# name -> the command, and the iterations that are kept. The first of each script is its default run, but
# for what is evaluated, how often something is logged and how soon warm-up is over. With a --seed that stands
# here, no random number is nearer than 5e-6 to the border of two tokens.
RUNS = {
    "grpo": (f"grpo_llm.py {FEW} --warmup-iterations 3", 5),
    "ppo": (f"ppo_llm.py {FEW} --warmup-iterations 2 --critic-warmup 2", 5),  # the policy moves from 3 on
    "sft": (f"sft.py {FEW} --log-every 1 --warmup-steps 3", 6),
    "a2c": ("a2c_vecenv.py --log-every 1 --eval-every 8 --eval-episodes 8 --eval-envs 8", 8),
    "grpo_lora": (f"grpo_llm.py {SMALL} {SHORT} --lora-rank 4 --learning-rate 2e-3 --kl-coef 0.05 "
                  "--max-grad-norm 0.165 --seed 3", 5),  # which is between those of its iterations
    # Hot enough for responses of several lengths; bounds that the ratio passes on both sides.
    "grpo_gspo": (f"grpo_llm.py {SMALL} {SHORT} --loss gspo --epochs 2 --minibatches 2 --temperature 1.3 "
                  "--aggregation sequence --clip-low 0.02 --clip-high 0.03", 5),
    # Texts that the model was never trained on: a slow run, as its gradient follows each weight closely.
    "grpo_turns": (f"grpo_llm.py {FEW} --warmup-iterations 2 --learning-rate 2e-5 --seed 2 "
                   "--prompts-per-iteration 4 --env tests/two_turn.py:FourTurn --max-context-tokens 45", 4),
    "ppo_shared": (f"ppo_llm.py {FEW} {SHORT} --prompts-per-iteration 128 --critic shared --epochs 2 "
                   "--kl-coef 0.05 --kl-target 0.01 --microbatch-tokens 256", 5),  # several passes a step
    "sft_packed": (f"sft.py {FEW} --log-every 1 --steps 6 --warmup-steps 2 --packing "
                   "--microbatch-tokens 1024 --env-kwargs max_operands=4", 6),
    # Its time limit ends episodes within a rollout, that of a2c at the end of one.
    "a2c_cartpole": ("a2c_vecenv.py --env-id CartPole-v1 --env-kwargs max_episode_steps=20 --num-envs 8 "
                     "--log-every 1 --eval-every 5 --eval-episodes 8 --eval-envs 8", 5),
}
# Metrics in which terms of both signs cancel -> the size of these terms: the largest of other numbers in the
# same record, or a constant. All others are sums of terms of one sign, norms, counts, or drawn.
ADVANTAGES = ("critic/advantages/max", "critic/advantages/min")
RETURNS = ("critic/returns/max", "critic/returns/min")
SCALES = {
    # What sampler and trainer differ by is rounding alone, of ratios that are 1.
    "mismatch/.*": 1.0,
    # Rewards less a baseline: some above it, some below.
    "critic/advantages/.*": ADVANTAGES,
    # The task's reward less a penalty, which is a sum of differences of log-probabilities.
    "critic/rewards/.*": ("critic/rewards/max", "critic/rewards/min"),
    "critic/returns/.*": RETURNS,
    # A value is a product of vectors with numbers of both signs, and is trained to be a return.
    "critic/(values/.*|vpred_mean)": RETURNS,
    "value_(mean|min|max)": ("value_min", "value_max"),
    # Means of advantages, of which ppo's and a2c's have deviation 1, times ratios or log-probabilities.
    # The roundings of hundreds of them average out.
    "(train/)?policy_loss|train/advantage": 0.1,
    # Differences of log-probabilities, whose mean is the entropy but for its sign.
    "kl/k1": ("train/entropy",),
    # Half their squares: what is rounded is the difference, which is a tenth of a nat at most.
    "train/(approx_kl|kl_loss)": 0.1,
    # 1 less a share.
    "critic/vf_explained_var|explained_variance": 1.0,
    # Steps cost, nearing the goal pays.
    "reward_mean": ("reward_p10", "reward_p90"),
}
# Settings that make this machine compute as another does, alone and together: code for processors without
# AVX512 or AVX2, of PyTorch, MKL, oneDNN and NumPy; threads; MOVED, weights of the start off by one rounding.
MACHINES = (
    "OMP_NUM_THREADS=1",
    "OMP_NUM_THREADS=2",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "NPY_DISABLE_CPU_FEATURES=AVX2,FMA3,AVX512F",
    "MOVED=1",
    "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41",
    "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 MOVED=2",
    "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 MOVED=3",
)
CLOCK = ("time/", "system/", "wall_time_s", "sps", "rollout/throughput", "train/throughput")
NAMES = ("run_id", "trace_id")


def words_of(name: str) -> list[str]:
    """The command line of a golden run: its script and flags."""
    if name not in RUNS:
        raise BadInput(f"no golden run {name!r}: expected {', '.join(RUNS)}{hint(name, RUNS)}")
    return RUNS[name][0].split()


def read(folder: Path, iterations: int) -> list[dict]:
    """The records of a run folder, or of a golden log, up to an iteration, without times and names."""
    records = []
    for record in runs.objects(runs.log_of(folder)):
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


def make(name: str, folder: Path, machine: str = "") -> None:
    """Start a golden run, and end it once it has logged as many iterations as its golden log has."""
    # Of several threads, those that wait leave their core to others.
    environment = os.environ | dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
    environment |= dict(setting.split("=") for setting in machine.split())
    driver = ["-m", "tests.moved_start"] if "MOVED=" in machine else []
    command = [sys.executable, *driver, *words_of(name), "--run-dir", str(folder)]
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


def tolerated(key: str, size: float, record: dict) -> float:
    """What rounding may do to a metric of a record; size: its own."""
    if re.fullmatch(EXACT, key):
        return OF_EXACT * size
    for pattern, scale in SCALES.items():
        if re.fullmatch(pattern, key):
            if isinstance(scale, tuple):
                scale = max(abs(record.get(name, 0.0)) for name in scale)
            return max(RELATIVE * size, OF_TERMS * scale)
    return RELATIVE * size


def excess(key: str, expected, found, record: dict) -> float:
    """How far two values are apart, in units of what is tolerated; inf where they are not numbers."""
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = zip(expected, found, strict=True)
        return max((excess(key, *pair, record) for pair in pairs), default=0.0)
    if expected == found:
        return 0.0
    if not isinstance(expected, (int, float)) or not isinstance(found, (int, float)):
        return math.inf
    return abs(expected - found) / tolerated(key, max(abs(expected), abs(found)), record)


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
            if not excess(key, expected[key], record[key], expected) <= 1:  # it may be nan
                return f"{where}: {key} {record[key]} (it was {expected[key]})"
    if len(golden) != len(found):
        return f"{name}: {len(found)} records up to iteration {iterations} (it was {len(golden)})"
    return ""


def compare(names: list[str], folder: Path | None = None, machine: str = "") -> int:
    """Print a line for each golden run, made now, on such a machine, or in a folder.  -> how many differ"""
    different = 0
    for name in names or RUNS:
        words_of(name)  # raises BadInput where there is none
        with tempfile.TemporaryDirectory() as made:
            run = folder or Path(made, "run")
            if folder is None:
                make(name, run, machine)
            line = first_difference(name, run)
            size, key = largest_excess(name, run)
        different += bool(line)
        says = line or f"{name}: equal"
        if machine:
            says = f"{machine}: {says} (furthest off: {key}, {size:.2g} of what may be)"
        print(says, flush=True)
    return different


def largest_excess(name: str, folder: Path) -> tuple[float, str]:
    """Of the numbers that a run and its golden log share: the one that is furthest off, in units as above."""
    iterations = RUNS[name][1]
    largest = (0.0, "nothing")
    for expected, record in zip(read(FOLDER / f"{name}.jsonl", iterations), read(folder, iterations),
                                strict=False):
        for key in expected.keys() & record.keys():
            largest = max(largest, (excess(key, expected[key], record[key], expected), key))
    return largest


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


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Renew golden logs, or compare them on machines that are simulated.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)} (all)")
    parser.add_argument("--machines", action="store_true", help="compare, as each of MACHINES computes")
    options = parser.parse_args(argv)
    for name in options.names:
        words_of(name)  # raises BadInput where there is none
    if options.machines:
        return min(sum(compare(options.names, machine=machine) for machine in MACHINES), 1)
    for name in options.names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder, "run"))
            write(name, Path(folder, "run"))
        print(f"{name}: renewed", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
