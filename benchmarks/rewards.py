"""Rewards of docs/rewards.md against plain ones: what the runs of benchmarks/refresh.py learn from.

    python grpo_llm.py --env benchmarks/rewards.py:Ordered --reward-fn benchmarks/rewards.py:decoupled
    python benchmarks/rewards.py --log runs/refresh/concise/s1 runs/refresh/plain4/s1

The second command prints a row for each evaluation: how many held-out replies are right, and the tokens of
right and of wrong ones. It needs runs with --log-episodes 1.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from docs.rewards import gdpo
from envs.countdown import Countdown

POINTS = 10  # what a reply in perfect order earns where parts are added as they are


class Ordered(Countdown):
    """Countdown that also tells in what share of a reply's steps the larger number stands first."""

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def with_order(reply):
            found = step(reply)
            pairs = [(int(a), int(b)) for a, b in re.findall(r"(\d+) [-+*/] (\d+) =", reply)]
            ordered = sum(a >= b for a, b in pairs) / max(len(pairs), 1)
            return dataclasses.replace(found, info=found.info | {"ordered": ordered})

        episode.step = with_order
        return episode


def summed(rollouts):
    return [r.correct + r.info.get("ordered", 0.0) for r in rollouts]


def summed_points(rollouts):
    return [r.correct + POINTS * r.info.get("ordered", 0.0) for r in rollouts]


def decoupled(rollouts):
    return gdpo.decoupled(rollouts, {"correct": 1.0, "ordered": 1.0})


def lengths(path):
    """(tokens of each right reply, of each wrong one) of an episodes file"""
    right, wrong = [], []
    for line in path.read_text("utf-8").splitlines()[:-1]:  # the last one is a summary
        episode = json.loads(line)
        tokens = sum(len(segment["response_ids"]) for segment in episode["segments"])
        (right if episode["correct"] else wrong).append(tokens)
    return right, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, nargs="+", required=True, help="run folders")
    for run in parser.parse_args().log:
        for path in sorted(run.glob("episodes/val_step_*.jsonl")):
            right, wrong = lengths(path)
            means = [statistics.fmean(tokens) if tokens else 0.0 for tokens in (right, wrong)]
            share = len(right) / len(right + wrong)
            print(f"{run} {path.stem}: right {share:.3f}, tokens {means[0]:.1f} and {means[1]:.1f}")


if __name__ == "__main__":
    main()
