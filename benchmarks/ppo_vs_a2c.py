"""docs/variants/ppo_vecenv.diff against a2c_vecenv.py: environment steps and CPU seconds to a fixed return.

    python benchmarks/ppo_vs_a2c.py --list              # what is planned
    python benchmarks/ppo_vs_a2c.py                     # all runs that the CSV has not, one after the other
    python benchmarks/ppo_vs_a2c.py --problems CartPole-v1 --seeds 1 2
    python benchmarks/ppo_vs_a2c.py --table             # what docs/variants.md shows
    python benchmarks/ppo_vs_a2c.py --plot

Each run is a process of its own on one thread. Counted is its CPU time from the first rollout on without that
of evaluations. The CSV grows by the rows of a run as it ends; a run that was killed begins anew. `stop` ends
a run before its last iteration; its schedules are those of the whole run.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sides import REPOSITORY, append_csv, check_environment, load_ppo

SEEDS = (1, 2, 3)
SCRIPTS = ("a2c_vecenv", "ppo_vecenv")
COLORS = dict(a2c_vecenv="#D55E00", ppo_vecenv="#0072B2")


class Problem(NamedTuple):
    measure: str  # of the log; its first record that reaches the target counts
    target: float
    flags: dict  # of both scripts
    of_script: dict  # of one of them
    stop: dict  # of each script: when it is stopped [environment steps]


PROBLEMS = {
    # The defaults. Evaluations would take as long as training, so the episodes of training count.
    "pixel-goal": Problem(
        "success_rate", 0.95, dict(eval_every=0, log_every=10), dict(a2c_vecenv={}, ppo_vecenv={}),
        dict(a2c_vecenv=300_000, ppo_vecenv=102_400)),
    # The flags of docs/a2c_vecenv.md; the RL Zoo's of PPO but for epochs, minibatches, the value's weight.
    "CartPole-v1": Problem(
        "eval/greedy_return", 500.0, dict(num_envs=8, hidden_size=64, eval_envs=100, eval_episodes=100), dict(
            a2c_vecenv=dict(iterations=3900, learning_rate=3e-3, entropy_coef=0.03, eval_every=80),
            ppo_vecenv=dict(iterations=200, num_steps=32, entropy_coef=0.0, gamma=0.98, gae_lambda=0.8,
                            eval_every=10)),
        dict(a2c_vecenv=250_000, ppo_vecenv=51_200)),
    # A linear encoder of patches, and an early target, since more would take hours. A2C's flags are those of
    # docs/atari.md, PPO's those of OpenAI's baselines but for a larger learning rate.
    "ALE/Breakout-v5": Problem(
        "episode_return", 2.0, dict(network="patch", hidden_size=128, eval_every=0, entropy_coef=0.01,
                                    value_coef=0.5, env_kwargs=("threads=1", "fire_reset=true")), dict(
            a2c_vecenv=dict(num_envs=16, num_steps=5, iterations=1250, learning_rate=5e-4, anneal=False,
                            normalize_advantages=False, log_every=128),
            ppo_vecenv=dict(num_envs=8, num_steps=128, iterations=100, learning_rate=1e-3, clip=0.1,
                            log_every=10)),
        dict(a2c_vecenv=92_000, ppo_vecenv=92_000)),
}


def work(problem_name, script_name, seed, smoke):
    """Run one script to its end; print a JSON line for each of its records."""
    problem, evaluating, rows = PROBLEMS[problem_name], 0.0, []
    sys.path.insert(0, str(REPOSITORY))
    with tempfile.TemporaryDirectory() as folder:
        script = load_ppo() if script_name == "ppo_vecenv" else importlib.import_module(script_name)
        evaluate, record, begin = script.evaluate, script.Run.record, script.Run.open

        def timed_evaluate(*given, **options):
            nonlocal evaluating
            began = time.process_time()
            found = evaluate(*given, **options)
            evaluating += time.process_time() - began
            return found

        def timed_begin(run, total):
            begin(run, total)
            run.cpu_clock = time.process_time()

        def kept_record(run, values):
            row = dict(problem=problem_name, script=script_name, seed=seed,
                       env_steps=run.counters["env_steps"],
                       cpu_s=time.process_time() - run.cpu_clock - evaluating)
            rows.append(row | dict(value=values.get(problem.measure, "")))
            record(run, values)
            if row["env_steps"] >= problem.stop[script_name]:
                os.kill(os.getpid(), signal.SIGTERM)  # it stops after its next record

        script.evaluate, script.Run.record, script.Run.open = timed_evaluate, kept_record, timed_begin
        flags = dict(env_id=problem_name, seed=seed, checkpoint_every=10**6)
        flags |= problem.flags | problem.of_script[script_name]
        flags.setdefault("log_every", flags["eval_every"] or 20)
        if smoke:
            flags["iterations"] = 2 * flags["log_every"]
        script.main(script.Args(run_dir=str(Path(folder, "run")), **flags))
    print(json.dumps([row for row in rows if row["value"] != ""]))


def read_csv(path):
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def groups_of(rows):
    """-> {(problem, script): {seed: rows}}, in the order of PROBLEMS"""
    groups = {}
    for problem in PROBLEMS:
        for script in SCRIPTS:
            for row in rows:
                if (row["problem"], row["script"]) == (problem, script):
                    groups.setdefault((problem, script), {}).setdefault(int(row["seed"]), []).append(row)
    return groups


def reached(rows, target):
    """The first row whose value is at least the target; None if there is none"""
    return next((row for row in rows if float(row["value"]) >= target), None)


def print_table(rows):
    """Of each problem: steps and CPU seconds of each seed to the target, and the ratio of their medians."""
    print("| | target | script | environment steps | CPU s | steps per CPU s | at the end |\n"
          "|---|---|---|---|---|---|---|")
    for (name, script), by_seed in groups_of(rows).items():
        problem = PROBLEMS[name]
        steps, seconds = [], []
        for seed in sorted(by_seed):
            first = reached(by_seed[seed], problem.target)
            steps.append(f"{int(first['env_steps']):,}" if first else "never")
            seconds.append(f"{float(first['cpu_s']):.1f}" if first else "never")
        last = [by_seed[seed][-1] for seed in sorted(by_seed)]
        speed = statistics.median(int(row["env_steps"]) / float(row["cpu_s"]) for row in last)
        ends = ", ".join(f"{float(row['value']):.4g}" for row in last)
        print(f"| {name} | {problem.measure} {problem.target:g} | {script}.py | {'; '.join(steps)} | "
              f"{'; '.join(seconds)} | {speed:,.0f} | {ends} |")


def plot(rows, path):
    """A column for each problem: the measure against environment steps, and against CPU seconds."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter
    groups = groups_of(rows)
    names = list(dict.fromkeys(name for name, _ in groups))
    figure, axes = plt.subplots(2, len(names), figsize=(3.6 * len(names), 5.4), squeeze=False)
    for (name, script), by_seed in groups.items():
        for axis, x in zip(axes[:, names.index(name)], ("env_steps", "cpu_s"), strict=True):
            for seed, group in by_seed.items():
                label = f"{script}.py" if seed == min(by_seed) else None
                axis.plot([float(row[x]) for row in group], [float(row["value"]) for row in group], lw=1,
                          color=COLORS[script], alpha=0.8, label=label)
            axis.axhline(PROBLEMS[name].target, color="grey", lw=0.7, ls=":")
            axis.set_xlabel("environment steps" if x == "env_steps" else "CPU seconds, evaluation left out")
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.grid(alpha=0.3)
        axes[0, names.index(name)].set_title(f"{name}: {PROBLEMS[name].measure}", fontsize=9)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what is planned and left")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", nargs="?", const="docs/figures/variants_ppo.png", metavar="PNG")
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS], default=[*PROBLEMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--smoke", action="store_true", help="two records a run, to try it out")
    parser.add_argument("--csv", default="docs/results/variants_ppo.csv")
    parser.add_argument("--work", nargs=3, metavar=("PROBLEM", "SCRIPT", "SEED"), help="in this process")
    options = parser.parse_args()
    check_environment("torch", "numpy", "tyro", "pydantic", "gymnasium", "PIL")
    if options.work:
        name, script, seed = options.work
        return work(name, script, int(seed), options.smoke)
    rows = read_csv(options.csv)
    if options.table:
        return print_table(rows)
    if options.plot:
        return plot(rows, options.plot)
    done = {(row["problem"], row["script"], int(row["seed"])) for row in rows}
    for name in options.problems:
        for seed in options.seeds:
            for script in SCRIPTS:
                if (name, script, seed) in done:
                    continue
                if options.list:
                    print(name, script, seed)
                    continue
                words = [sys.executable, __file__, "--work", name, script, str(seed)]
                if options.smoke:
                    words.append("--smoke")
                run = subprocess.run(words, env=os.environ | dict(OMP_NUM_THREADS="1"), text=True,
                                     capture_output=True)
                if run.returncode:
                    sys.exit(f"error: {name}, {script}, seed {seed}:\n{run.stderr[-3000:]}")
                made = json.loads(run.stdout.splitlines()[-1])
                append_csv(options.csv, made)
                first = reached(made, PROBLEMS[name].target)
                when = f"{first['env_steps']:,} steps" if first else "never"
                print(f"{name}, {script}, seed {seed}: {when}", flush=True)


if __name__ == "__main__":
    main()
