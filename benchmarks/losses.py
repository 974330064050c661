"""Losses, corrections and baselines of grpo_llm.py side by side, with seeds, on and off the policy.

    python benchmarks/losses.py --list                       # what is planned, and for how long
    python benchmarks/losses.py --stage rates --jobs 2       # first: the learning rate of each method
    python benchmarks/losses.py --stage grid --jobs 2
    python benchmarks/losses.py --stage knobs --jobs 2
    python benchmarks/losses.py --table                      # what docs/losses.md shows
    python benchmarks/losses.py --plot

Each run is a process of grpo_llm.py, or of docs/variants/stale.diff where the sampler is behind, with a
folder of its own in --runs. A finished run is not run again, and one that was killed goes on. The CSV grows
by a row as a run ends. A run has *collapsed* if an error ended it or its last held-out greedy accuracy is
under that of the model it started from.

The rule for rates: of 1/2, 1 and 2 times the problem's rate the one with the largest mean area under the
held-out greedy curve over seeds 11 and 12, four iterations behind (a method on the policy: 0). The harder
problem takes the factors that the default one has chosen.

Left out of the full product, since it says nothing or costs too much: (1) on the policy, one step a rollout
has a ratio of 1, and there all losses have one gradient: one of them runs. (2) A correction makes the
trainer's own policy the one that a ratio is to; it is 1 again, so corrections run with pg alone. (3) MaxRL
and RLOO run with the default loss, 0 and 4 behind. (4) The harder problem runs on the policy and 16 behind,
where the default one tells most methods apart, with one baseline and one of the knobs. (5) A rate is chosen
once for each method and problem, not for each staleness. (6) VESPO, dual clip and DeepSeek-V3.2's mask, which
the script has not.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from benchmarks.sides import append_csv, check_environment  # noqa: E402

PROBLEMS = {  # flags, learning rate, minutes of a run on one core
    "countdown": (["--iterations", "250", "--eval-every", "25", "--eval-tasks", "256"], 5e-4, 1.0),
    "countdown4": ([
        "--model", "models/countdown4", "--env-kwargs", "min_operands=4", "max_operands=4", "operators=+-*/",
        "max_number=99", "min_target=10", "max_target=100", "draw=uniform", "held_out=parts",
        "max_intermediate=200", "test_tasks=128", "--max-response-tokens", "128", "--max-context-tokens",
        "160", "--temperature", "0.3", "--aggregation", "sequence", "--prompts-per-iteration", "16",
        "--entropy-coef", "0", "--iterations", "40", "--eval-every", "20", "--eval-tasks", "64"], 1e-4, 2.4),
}
SMOKE = ["--iterations", "6", "--eval-every", "3", "--eval-tasks", "8", "--prompts-per-iteration", "4",
         "--checkpoint-every", "2", "--max-response-tokens", "10"]
METHODS = [("clip", "none"), ("cispo", "none"), ("gspo", "none"), ("sapo", "none"), ("dppo", "none"),
           ("pg", "none"), ("pg", "tis"), ("pg", "icepop"), ("pg", "mis")]
FACTORS = (0.5, 1.0, 2.0)
SEEDS = (1, 2, 3, 4, 5)
RATE_SEEDS = (11, 12)
STALENESS = (0, 1, 4, 16)
CHOSEN_AT = 4  # the staleness at which rates are chosen
KNOBS = {  # flags, how many times as long a run takes
    "default": ([], 1), "scale-rewards": (["--scale-rewards"], 1),
    "aggregation sequence": (["--aggregation", "sequence"], 1),
    "aggregation constant": (["--aggregation", "constant"], 1), "kl 0.01": (["--kl-coef", "0.01"], 1.3),
    "1 epoch x 4": (["--minibatches", "4"], 1.2), "4 epochs x 1": (["--epochs", "4"], 2),
    "2 epochs x 2": (["--epochs", "2", "--minibatches", "2"], 1.5),
    # The clip binds only after the first step of a rollout.
    "2 epochs x 2, clip-high 0.2": (["--epochs", "2", "--minibatches", "2", "--clip-high", "0.2"], 1.5),
    "2 epochs x 2, clip-high 0.4": (["--epochs", "2", "--minibatches", "2", "--clip-high", "0.4"], 1.5),
}
HARDER_KNOBS = "default", "2 epochs x 2"  # of the harder problem
# 97.5 % quantiles of Student's t, by degrees of freedom.
T_QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
OUTCOMES = ("greedy", "temperature_1", "pass_16", "area", "entropy")


class Job(NamedTuple):
    """A run: what stands in the CSV beside its results, and its name."""

    stage: str
    problem: str
    loss: str
    correction: str
    baseline: str
    staleness: int
    factor: float  # of the problem's learning rate
    seed: int
    knob: str = ""

    @property
    def name(self):
        return "_".join(str(part).replace(" ", "-").replace(",", "") for part in self if part != "")

    @property
    def minutes(self):
        return PROBLEMS[self.problem][2] * KNOBS.get(self.knob, ([], 1))[1]


def methods_of(problem):
    """(loss, correction, baseline), and how far behind the sampler is."""
    behind = (1, 4, 16) if problem == "countdown" else (16,)
    found = [(loss, correction, "mean", behind) for loss, correction in METHODS]
    found.append(("clip", "tis", "mean", (0,)))
    if problem == "countdown":
        found += [("clip", "tis", baseline, (0, CHOSEN_AT)) for baseline in ("loo", "maxrl")]
    return found


def jobs_of(stage, rows, problems):
    """-> the jobs of a stage; those of the grid have the rate that the rows of `rates` say, or 1."""
    jobs = []
    if stage == "knobs":
        for problem in problems:
            for knob in KNOBS if problem == "countdown" else HARDER_KNOBS:
                jobs += [Job(stage, problem, "clip", "tis", "mean", 0, 1.0, seed, knob) for seed in SEEDS]
        return jobs
    for problem in problems:
        for loss, correction, baseline, behind in methods_of(problem):
            method = problem, loss, correction, baseline
            if stage == "rates":
                if problem != "countdown":
                    continue
                staleness = CHOSEN_AT if CHOSEN_AT in behind else 0
                jobs += [Job(stage, *method, staleness, factor, seed)
                         for factor in FACTORS for seed in RATE_SEEDS]
            else:
                factor = chosen_factor(method, rows)
                for staleness in behind:
                    jobs += [Job(stage, *method, staleness, factor, seed) for seed in SEEDS]
    return jobs


def chosen_factor(method, rows):
    """The factor of the largest mean area over all seeds of `rates`, whatever the problem; nan before all."""
    areas = {factor: [] for factor in FACTORS}
    for row in rows:
        of = row["loss"], row["correction"], row["baseline"]
        if row["stage"] == "rates" and of == method[1:]:
            areas[float(row["factor"])].append(float(row["area"]))
    if min(map(len, areas.values())) < len(RATE_SEEDS):
        return math.nan
    return max(FACTORS, key=lambda factor: statistics.mean(areas[factor]))


def read_csv(path):
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def command_of(job, variant, folder, smoke):
    flags, rate, _ = PROBLEMS[job.problem]
    script = [variant, "--max-staleness", job.staleness] if job.staleness else [REPOSITORY / "grpo_llm.py"]
    more = KNOBS[job.knob][0] if job.knob else []
    return [*map(str, [
        sys.executable, *script, *flags, "--loss", job.loss, "--correction", job.correction, "--baseline",
        job.baseline, "--learning-rate", rate * job.factor, "--seed", job.seed, "--checkpoint-every", 20,
        *more, *(SMOKE if smoke else []), "--run-dir", folder])]


def result_of(folder, failed):
    """What a run's log says of its end.  -> {column: value}"""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    records = [line for line in lines if "iteration" in line]
    evaluated = [record for record in records if any(name.endswith("/greedy") for name in record)]

    def value(record, ending):
        names = [name for name in record if name.startswith("val/") and name.endswith(ending)]
        return statistics.mean(record[name] for name in names)  # of one source, or over several

    curve = [(record["iteration"], value(record, "/greedy")) for record in evaluated]
    area = sum((end - start) * (low + high) / 2
               for (start, low), (end, high) in zip(curve, curve[1:], strict=False))
    last = evaluated[-1]
    entropies = [record["train/entropy"] for record in records if "train/entropy" in record]
    return dict(
        iterations=records[-1]["iteration"], start=curve[0][1], greedy=curve[-1][1],
        temperature_1=value(last, "/pass@1"), pass_16=value(last, "/pass@16"),
        area=area / max(curve[-1][0], 1), entropy=entropies[-1] if entropies else math.nan,
        collapsed=int(failed or curve[-1][1] < curve[0][1]), error=int(failed),
        seconds=records[-1]["wall_time_s"])


def play(job, core, variant, runs, smoke):
    """Run a job to its end, from where it was stopped.  -> its row; None if it was killed"""
    folder = runs / job.name
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    pin = []
    if core is not None:
        pin = ["taskset", "-c", str(core)]
    done = subprocess.run([*pin, *command_of(job, variant, folder, smoke)], cwd=REPOSITORY, env=environment,
                          capture_output=True, text=True)
    has_failed = "FloatingPointError" in done.stderr  # NaN or infinity: a result, and no fault
    if done.returncode and not has_failed:
        print(f"{job.name}: exit status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return job._asdict() | result_of(folder, has_failed)


def run_all(jobs, args):
    """-> whether all have ended"""
    runs = Path(args.runs).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    variant = runs / "grpo_stale.py"
    for name in ("envs", "models"):
        if not (runs / name).exists():
            (runs / name).symlink_to(REPOSITORY / name)
    subprocess.run(["patch", "grpo_llm.py", "docs/variants/stale.diff", "-o", variant], cwd=REPOSITORY,
                   check=True, stdout=subprocess.DEVNULL)
    lock, cores, missing = threading.Lock(), [*range(os.cpu_count())], []
    if args.jobs > len(cores):
        cores = [None] * args.jobs

    def one(job):
        with lock:
            core = cores.pop(0)
        row = play(job, core, variant, runs, args.smoke)
        with lock:
            cores.append(core)
            if row:
                append_csv(args.csv, [row])
                print(f"{job.name}: greedy {row['greedy']:.3f}, {row['seconds']:.0f} s", flush=True)
            else:
                missing.append(job)

    with ThreadPoolExecutor(args.jobs) as pool:
        [*pool.map(one, jobs)]
    return not missing


def interval(values):
    """Mean, and half of its 95 % interval by Student's t over seeds (nan with one)."""
    half = math.nan
    if len(values) > 1:
        half = T_QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def groups_of(rows, stage):
    """Rows that differ in their seed alone.  -> {(problem, staleness, method, factor): rows}"""
    groups = {}
    for row in rows:
        if row["stage"] == stage:
            method = row["knob"] or f"{row['loss']}, {row['correction']}, {row['baseline']}"
            key = row["problem"], int(row["staleness"]), method, float(row["factor"])
            groups.setdefault(key, []).append(row)
    return dict(sorted(groups.items()))


def reference_of(stage, method, staleness):
    """What a method is compared to: the default; off the policy clip, and of baselines pg with tis (2)."""
    if stage == "knobs":
        return "default"
    if staleness == 0:
        return "clip, tis, mean"
    return "clip, none, mean" if method.endswith(", mean") else "pg, tis, mean"


def paired(rows, others, name):
    """Mean and half interval of the differences of runs with the same seed; of no others: (nan, nan)."""
    by_seed = {row["seed"]: float(row[name]) for row in others}
    differences = [float(row[name]) - by_seed[row["seed"]] for row in rows if row["seed"] in by_seed]
    if not differences:
        return math.nan, math.nan
    return interval(differences)


def print_tables(rows):
    """A table for each stage and problem; the last column is the area less that of the reference, by seed."""
    for stage in ("rates", "grid", "knobs"):
        groups = groups_of(rows, stage)
        if not groups:
            print(f"\n{stage}: not run yet.")
        for problem in sorted({key[0] for key in groups}):
            columns = ["staleness", stage, "rate x", "seeds", "collapsed", "greedy", "temperature 1",
                       "pass@16", "area", "entropy", "area less the reference's"]
            print(f"\n### {stage}, {problem}\n\n| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
            for (of, staleness, method, factor), same in groups.items():
                if of != problem:
                    continue
                cells = [staleness, method, f"{factor:g}", len(same),
                         sum(int(row["collapsed"]) for row in same)]
                for name in OUTCOMES:
                    cells.append("{:.3f} ± {:.3f}".format(*interval([float(row[name]) for row in same])))
                reference = reference_of(stage, method, staleness)
                cells.append("")
                if stage != "rates" and method != reference:
                    others = [row for key, others in groups.items() for row in others
                              if key[:3] == (problem, staleness, reference)]
                    cells[-1] = "{:+.3f} ± {:.3f}".format(*paired(same, others, "area"))
                print("| " + " | ".join(map(str, cells)) + " |")


def plot(rows, path):
    """A row of panels for each problem and staleness, and one for the knobs: seeds, means, 95 % intervals."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {}  # title -> {method: rows}
    for stage in ("grid", "knobs"):
        for (problem, staleness, method, _), same in groups_of(rows, stage).items():
            title = f"{problem}, on the policy"
            if staleness:
                title = f"{problem}, sampler behind by up to {staleness}"
            if stage == "knobs":
                title = f"{problem}, flags beside the default"
            panels.setdefault(title, {})[method] = same
    if not panels:
        sys.exit("error: the CSV has no runs of --stage grid or knobs")
    heights = [1 + len(methods) for methods in panels.values()]
    figure, axes = plt.subplots(len(panels), 2, figsize=(11, 1 + sum(heights) / 4), squeeze=False,
                                gridspec_kw=dict(height_ratios=heights))
    for row, (title, methods) in zip(axes, panels.items(), strict=True):
        for axis, name in zip(row, ("area", "temperature_1"), strict=True):
            for place, same in enumerate(methods.values()):
                values = [float(one[name]) for one in same]
                mean, half = interval(values)
                axis.plot(values, [place] * len(values), ".", color="tab:blue", alpha=0.4)
                axis.errorbar(mean, place, xerr=half, fmt="|", color="tab:blue", capsize=3, markersize=12)
            axis.set_yticks(range(len(methods)), methods if axis is row[0] else [""] * len(methods))
            axis.set_ylim(len(methods) - 0.4, -0.6)
            axis.grid(alpha=0.3)
        row[0].set_title(f"{title}: greedy, mean over the run", fontsize=9)
        row[1].set_title("temperature 1, at the end", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("rates", "grid", "knobs"))
    parser.add_argument("--list", action="store_true", help="print what is planned, and for how long")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", nargs="?", const="docs/figures/losses.png", metavar="PNG")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one core each")
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS], default=[*PROBLEMS])
    parser.add_argument("--staleness", type=int, nargs="+", choices=STALENESS, default=STALENESS,
                        help="only runs whose sampler is up to so many iterations behind")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N runs of the stage")
    parser.add_argument("--smoke", action="store_true", help="six small iterations a run, to try it out")
    parser.add_argument("--runs", default="runs/losses")
    parser.add_argument("--csv", default="docs/results/losses.csv")
    args = parser.parse_args()
    check_environment("torch", "transformers", "tyro", "pydantic", "peft", "matplotlib")
    rows = read_csv(args.csv)
    if args.table:
        return print_tables(rows)
    if args.plot:
        return plot(rows, args.plot)
    done = {row["stage"] + str(Job(*(row[name] for name in Job._fields)).name) for row in rows}
    total = 0.0
    for stage in ("rates", "grid", "knobs"):
        jobs = [job for job in jobs_of(stage, rows, args.problems) if job.staleness in args.staleness]
        left = [job for job in jobs if stage + job.name not in done]
        hours = sum(job.minutes for job in left) / 60
        total += hours
        if args.list:
            print(f"{stage}: {len(jobs)} runs, {len(left)} left, {hours:.1f} hours of a core")
        elif stage == args.stage:
            if any(math.isnan(job.factor) for job in left):
                sys.exit("error: --stage grid: expected all runs of --stage rates first")
            sys.exit(0 if run_all(left[:args.first], args) else 1)
    if not args.list:
        sys.exit("error: expected --stage, --list, --table or --plot")
    print(f"together {total:.1f} hours of a core: {total / max(args.jobs, 1):.1f} with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
