"""What benchmarks/refresh.py compares the rewards of docs/rewards.md on, and with.

    python benchmarks/rewards.py --out wordy.jsonl

writes rows for sft.py whose responses begin with up to 15 words that do nothing: a model of them answers as
well in few words as in many. `Wordy` tells how many a reply has, `Ordered` has a second part of another kind.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path += [str(REPOSITORY), str(REPOSITORY / "docs/rewards")]
from benchmarks.sides import check_environment  # noqa: E402

check_environment("numpy", "pydantic")
import gdpo  # noqa: E402

from envs.countdown import Config, Countdown  # noqa: E402

MOST_IDLE = 16  # words before a solution, and one
POINTS = 10  # what a reply in perfect order earns where parts are added as they are


class Telling(Countdown):
    """Countdown that tells one more part of each reply."""

    def part(self, reply) -> dict:
        raise NotImplementedError

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def with_part(reply):
            found = step(reply)
            return dataclasses.replace(found, info=found.info | self.part(reply))

        episode.step = with_part
        return episode


class Ordered(Telling):
    """... in what share of its steps the larger number stands first."""

    def part(self, reply):
        pairs = [(int(a), int(b)) for a, b in re.findall(r"(\d+) [-+*/] (\d+) =", reply)]
        return {"ordered": sum(a >= b for a, b in pairs) / max(len(pairs), 1)}


class Wordy(Telling):
    """... how many words it has."""

    def part(self, reply):
        return {"words": len(reply.split())}


def summed(rollouts):
    return [r.correct + r.info.get("ordered", 0.0) for r in rollouts]


def summed_points(rollouts):
    return [r.correct + POINTS * r.info.get("ordered", 0.0) for r in rollouts]


def decoupled(rollouts):
    return gdpo.decoupled(rollouts, {"correct": 1.0, "ordered": 1.0})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of prompts and responses")
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    env = Countdown(Config(skill="mixed", novice_share=0.3))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w") as file:
        for number in range(options.rows):
            task = env.task("train", number)
            response = "x " * (number % MOST_IDLE) + "| " + env.solution(task)
            file.write(json.dumps(dict(prompt=task.messages, response=response)) + "\n")


if __name__ == "__main__":
    main()
