"""One process against two: time of an iteration, and the share of it that goes into communication.

    python benchmarks/scaling.py --repeats 5                                     # grpo_llm.py as it is
    python benchmarks/scaling.py --repeats 5 --script sft.py
    python benchmarks/scaling.py --repeats 5 --flags --prompts-per-iteration 128 --microbatch-tokens 8192

Alternates one process without torchrun, one and two with it; medians over repeats of the medians over
iterations (ten steps of sft.py count as one, and twenty rollouts of a2c_vecenv.py), the first three aside.
env_steps are what the logs count as such: generated tokens, tokens of rows, environment steps.
Communication is what gloo's operations take in the first process, in the profiler's account: it includes the
wait for the other process.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sides import REPOSITORY as ROOT
from sides import check_environment

WARM = 3  # iterations that are not counted
RL = ("--iterations", 1, "--checkpoint-every", 1000, "--eval-tasks", 1, "--eval-samples", 1)
SCRIPTS = {  # flags; a number behind the first one is how often its unit fits into an iteration
    "grpo_llm.py": RL,
    "ppo_llm.py": (*RL, "--critic-warmup", 0),
    "sft.py": ("--steps", 10, "--log-every", 10, "--checkpoint-every", 10**6, "--val-ratio", 0,
               "--eval-tasks", 1),
    "a2c_vecenv.py": ("--iterations", 20, "--log-every", 20, "--checkpoint-every", 10**6, "--eval-envs", 2,
                      "--eval-episodes", 2),
}


def worker(script, flags):
    """One run of a script in this process; under torchrun the first one is profiled."""
    sys.path.insert(0, str(ROOT))
    import torch
    import tyro

    module = importlib.import_module(script.removesuffix(".py"))
    args = tyro.cli(module.Args, args=flags)
    if os.environ.get("RANK") != "0" or not os.environ.get("PROFILE"):
        return module.main(args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        module.main(args)
    took = {}
    for event in profile.key_averages():
        if event.key.startswith("gloo:"):
            took[event.key[5:]] = dict(seconds=event.cpu_time_total / 1e6, calls=event.count)
    Path(args.run_dir, "communication.json").write_text(json.dumps(took))


def measure(folder, count, script, flags, profile=False):
    """-> medians: seconds of a rollout, an update, a hand-over, an iteration; env_steps/s; communication"""
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count else []
    environment = os.environ | dict(OMP_NUM_THREADS="1") | ({"PROFILE": "1"} if profile else {})
    command = [sys.executable, *many, __file__, "--worker", script, "--run-dir", folder, *flags]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in Path(folder, "train_log.jsonl").read_text().splitlines()]
    records, before = [], 0
    for line in lines:
        if line.get("iteration", 0) > 0:
            steps, before = line["env_steps"] - before, line["env_steps"]
            if script == "a2c_vecenv.py":
                parts = {"iteration": steps / line["sps"]}
            else:
                parts = {name: line[f"time/{name}"] for name in ("rollout", "update", "sync")}
                parts["iteration"] = sum(parts.values())
            records.append(parts | {"env_steps_per_s": steps / parts["iteration"]})
    found = {name: statistics.median(record[name] for record in records[WARM:]) for name in records[0]}
    path = Path(folder, "communication.json")
    if path.exists():
        total = sum(record["iteration"] for record in records)
        found["communication"] = {name: dict(share=row["seconds"] / total, calls=row["calls"])
                                  for name, row in json.loads(path.read_text()).items()}
    return found


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--script", choices=SCRIPTS, default="grpo_llm.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=13)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the script")
    args = parser.parse_args()
    check_environment("torch", "transformers", "tyro", "pydantic", "peft", "datasets", "gymnasium")
    unit, number, *others = SCRIPTS[args.script]
    flags = map(str, (unit, number * args.iterations, *others, "--eval-every", 0))
    flags = [*flags, *args.flags]
    found = {0: [], 1: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(args.repeats):
            for count, results in found.items():
                results.append(measure(f"{scratch}/{count}-{repeat}", count, args.script, flags))
        profiled = measure(f"{scratch}/profiled", 2, args.script, flags, profile=True)
    for count, results in found.items():
        medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
        name = f"{count} of torchrun" if count else "1, without torchrun"
        print(f"{name:20}", *(f"{key} {value:.3f}" for key, value in medians.items()))
    shares = profiled["communication"].items()
    print("communication, 2 processes:",
          ", ".join(f"{name} {row['share']:.1%} ({row['calls']} calls)" for name, row in shares))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
