"""The exercises of docs/reading/README.md: each change against the same flags without it, over three seeds.

    python benchmarks/exercises.py                     # all runs that runs/exercises has not, then the CSV
    python benchmarks/exercises.py --only no_clip --seeds 1
    python benchmarks/exercises.py --table             # the last evaluations, and the numbers that tell
    python benchmarks/exercises.py --plot              # the figure, of the CSV

All runs are made in this process on one thread, one after the other. A run that was killed begins anew.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from typing import NamedTuple

from sides import REPOSITORY, check_environment

EXERCISES = REPOSITORY / "docs/reading/exercises"
SEEDS = (1, 2, 3)
ACCURACY = "val/countdown/pass@1"
SIZES = {  # far less than the defaults: the effects show early
    "grpo": "--iterations 60 --eval-every 10 --eval-tasks 256 --eval-samples 2",
    "ppo": "--iterations 30 --critic-warmup 5 --prompts-per-iteration 256 "
           "--eval-every 10 --eval-tasks 256 --eval-samples 2",
}


class Exercise(NamedTuple):
    script: str
    change: str  # its flags; where there is a diff of the exercise's name, that is made too
    both: str  # flags with and without the change
    tells: str  # the logged number that shows it, beside accuracy
    title: str


REWARDS = "docs/reading/exercises/rewards.py"
EIGHT = {
    "no_baseline": Exercise("grpo", f"--env {REWARDS}:Shifted", "", "train/grad_norm", "1 no baseline"),
    "scale": Exercise("grpo", "--scale-rewards", "", "train/grad_norm", "2 divide by the deviation"),
    "length_normalise": Exercise("grpo", "", "", "response_length/mean", "3 length-normalise"),
    "no_clip": Exercise("ppo", "", "--epochs 4", "train/approx_kl", "4 no clip, four epochs"),
    "temperature": Exercise("grpo", "--temperature 0.5", "", "train/entropy", "5 temperature 0.5"),
    "kl": Exercise("grpo", "--kl-coef 0.1", "--kl-coef 1e-6", "train/kl_loss", "6 KL 0.1"),  # 1e-6 logs it
    "wrong_mask": Exercise("ppo", "", "--env-kwargs min_operands=2 max_operands=4", "train/approx_kl",
                           "7 a wrong mask"),
    "hackable": Exercise("grpo", f"--env {REWARDS}:Hackable", "", "train/reward",
                         "8 a reward that can be hacked"),
}
COLORS = {"default": "#0072B2", "changed": "#D55E00"}


def load(path):
    """-> the module that a file is"""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def script_of(name, changed, folder):
    """The short program, with the exercise's diff where it has one.  -> its module"""
    script = EIGHT[name].script
    path = REPOSITORY / f"docs/reading/{script}.py"
    diff = EXERCISES / f"{name}.diff"
    if changed and diff.is_file():
        made = folder / f"{name}.py"  # two folders below the repository, as the scripts are
        subprocess.run(["patch", path, diff, "-o", made], check=True, stdout=subprocess.DEVNULL)
        path = made
    return load(path)


def run_folder(name, changed, seed, runs):
    """Where the same run without the change serves several exercises, it is one."""
    exercise = EIGHT[name]
    if not changed:
        name = f"default_{name}" if exercise.both else f"default_{exercise.script}"
    return runs / name / f"s{seed}"


def train(name, changed, seed, runs):
    exercise = EIGHT[name]
    folder = run_folder(name, changed, seed, runs)
    iterations = int(SIZES[exercise.script].split()[1])
    if (folder / "train_log.jsonl").is_file():
        if records(folder)[-1]["iteration"] == iterations:
            return
        shutil.rmtree(folder)
    print(folder, flush=True)
    script = script_of(name, changed, runs)
    flags = f"{SIZES[exercise.script]} {exercise.both} {exercise.change if changed else ''}"
    script.main(script.tyro.cli(script.Args, args=[
        *shlex.split(flags), "--seed", str(seed), "--run-dir", str(folder)]))


def records(folder):
    """-> the iterations of a log, the last one not if it is cut"""
    lines = (folder / "train_log.jsonl").read_text().split("\n")[1:-1]
    return [json.loads(line) for line in lines]


def summary(runs, seeds):
    """-> rows of the CSV: of each iteration the mean, least and most of the seeds"""
    rows = []
    for name, exercise in EIGHT.items():
        for changed in (False, True):
            logs = [records(run_folder(name, changed, seed, runs)) for seed in seeds]
            for metric in (ACCURACY, exercise.tells):
                for same in zip(*logs, strict=True):
                    values = [record[metric] for record in same if metric in record]
                    if values:
                        rows.append(dict(
                            exercise=name, side="changed" if changed else "default", metric=metric,
                            iteration=same[0]["iteration"], mean=f"{statistics.mean(values):.6g}",
                            low=f"{min(values):.6g}", high=f"{max(values):.6g}", n=len(values)))
    return rows


def read_csv(path):
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def curve(rows, name, side, metric):
    return [row for row in rows if (row["exercise"], row["side"], row["metric"]) == (name, side, metric)]


def print_table(rows):
    """Means of the last evaluation, and of the number that tells over its last ten iterations."""
    print("| exercise | accuracy, default | changed | number | default | changed |")
    print("|---|---|---|---|---|---|")
    for name, exercise in EIGHT.items():
        cells = [name]
        for metric, last in ((ACCURACY, 1), (exercise.tells, 10)):
            cells += [exercise.tells] * (metric != ACCURACY)
            for side in COLORS:
                end = curve(rows, name, side, metric)[-last:]
                low = min(float(row["low"]) for row in end)
                high = max(float(row["high"]) for row in end)
                mean = statistics.mean(float(row["mean"]) for row in end)
                cells.append(f"{mean:.3g} ({low:.3g} to {high:.3g})")
        print(f"| {' | '.join(cells)} |")


def plot(rows, path):
    """Eight panels, each of held-out accuracy and below it the number that tells."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(4, 4, figsize=(13, 10))
    for place, (name, exercise) in enumerate(EIGHT.items()):
        for below, metric in enumerate((ACCURACY, exercise.tells)):
            axis = axes[place // 4 * 2 + below, place % 4]
            for side, color in COLORS.items():
                points = curve(rows, name, side, metric)
                x = [int(row["iteration"]) for row in points]
                axis.plot(x, [float(row["mean"]) for row in points], color=color, lw=1.2, label=side)
                low = [float(row["low"]) for row in points]
                high = [float(row["high"]) for row in points]
                axis.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
            axis.set_ylabel("held-out accuracy" if metric == ACCURACY else metric, fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
            if metric == ACCURACY:
                axis.set_ylim(0, 1)
                axis.set_title(exercise.title, fontsize=10)
            elif metric == "train/approx_kl":
                axis.set_yscale("log")
            elif metric == "response_length/mean":
                axis.set_ylim(0, 16)
            if below:
                axis.set_xlabel("iteration", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", nargs="?", const="docs/figures/reading_exercises.png", metavar="PNG")
    parser.add_argument("--only", nargs="+", choices=[*EIGHT], default=[*EIGHT])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--runs", default="runs/exercises", help="two folders below the repository")
    parser.add_argument("--csv", default="docs/results/reading_exercises.csv")
    options = parser.parse_args()
    check_environment("torch", "transformers", "tyro", "pydantic")
    if options.table:
        return print_table(read_csv(options.csv))
    if options.plot:
        return plot(read_csv(options.csv), options.plot)
    sys.path.insert(0, str(REPOSITORY))
    runs = REPOSITORY / options.runs
    runs.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in options.only:
            for changed in (False, True):
                train(name, changed, seed, runs)
    if options.only == [*EIGHT]:
        write_csv(options.csv, summary(runs, options.seeds))


if __name__ == "__main__":
    main()
