"""GDPO (docs/rewards.md) beside sums of the same two parts: no program, but what grpo_llm.py is given.

    python grpo_llm.py --env benchmarks/rewards.py:Ordered --reward-fn benchmarks/rewards.py:decoupled
"""

import dataclasses
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path += [str(REPOSITORY), str(REPOSITORY / "docs/rewards")]
from benchmarks.sides import check_environment  # noqa: E402

check_environment("numpy", "pydantic")
import gdpo  # noqa: E402

from envs.countdown import Countdown  # noqa: E402


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
    """The second part in points, of which a reply in order has ten."""
    return [r.correct + 10 * r.info.get("ordered", 0.0) for r in rollouts]


def decoupled(rollouts):
    return gdpo.decoupled(rollouts, {"correct": 1.0, "ordered": 1.0})
