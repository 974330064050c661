"""One process against two: time of an iteration, and the share of it that goes into communication.

    python benchmarks/scaling.py --repeats 5                                     # grpo_llm.py as it is
    python benchmarks/scaling.py --repeats 5 --flags --prompts-per-iteration 128 --microbatch-tokens 8192

Alternates one process without torchrun, one and two with it; medians over repeats of the medians over
iterations, the first three aside. Communication is what gloo's operations take in the first process, in the
profiler's account: it includes the wait for the other process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM = 3  # iterations that are not counted


def worker(flags):
    """One run of grpo_llm.py in this process; under torchrun the first one is profiled."""
    sys.path.insert(0, str(ROOT))
    import torch
    import tyro

    import grpo_llm

    args = tyro.cli(grpo_llm.Args, args=flags)
    if os.environ.get("RANK") != "0" or not os.environ.get("PROFILE"):
        return grpo_llm.main(args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        grpo_llm.main(args)
    took = {}
    for event in profile.key_averages():
        if event.key.startswith("gloo:"):
            took[event.key[5:]] = dict(seconds=event.cpu_time_total / 1e6, calls=event.count)
    Path(args.run_dir, "communication.json").write_text(json.dumps(took))


def measure(folder, count, flags, profile=False):
    """-> seconds of a rollout, of an update, of an iteration; tokens per second; communication"""
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count else []
    environment = os.environ | dict(OMP_NUM_THREADS="1") | ({"PROFILE": "1"} if profile else {})
    subprocess.run([sys.executable, *many, __file__, "--worker", "--run-dir", folder, *flags], check=True,
                   cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in Path(folder, "train_log.jsonl").read_text().splitlines()]
    records = [line for line in lines if line.get("iteration", 0) > WARM]
    found = {name: statistics.median(record[f"time/{name}"] for record in records)
             for name in ("rollout", "update", "sync")}
    tokens = statistics.median(later["env_steps"] - sooner["env_steps"]
                               for sooner, later in zip(records, records[1:], strict=False))
    found["iteration"] = sum(found.values())
    found["tokens_per_s"] = tokens / found["iteration"]
    path = Path(folder, "communication.json")
    if path.exists():
        took = json.loads(path.read_text())
        total = sum(line.get("time/rollout", 0) + line.get("time/update", 0) + line.get("time/sync", 0)
                    for line in lines)
        found["communication"] = {name: dict(share=row["seconds"] / total, calls=row["calls"])
                                  for name, row in took.items()}
    return found


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=13)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of grpo_llm.py")
    args = parser.parse_args()
    flags = ["--iterations", str(args.iterations), "--eval-every", "0", "--eval-tasks", "1", "--eval-samples",
             "1", "--checkpoint-every", "1000", "--health-every", "0", *args.flags]
    found = {0: [], 1: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(args.repeats):
            for count, results in found.items():
                results.append(measure(f"{scratch}/{count}-{repeat}", count, flags))
        profiled = measure(f"{scratch}/profiled", 2, flags, profile=True)
    for count, results in found.items():
        medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
        name = f"{count} of torchrun" if count else "1, without torchrun"
        print(f"{name:20}", *(f"{key} {value:.3f}" for key, value in medians.items()))
    shares = profiled["communication"].items()
    print("communication, 2 processes:",
          ", ".join(f"{name} {row['share']:.1%} ({row['calls']} calls)" for name, row in shares))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()
