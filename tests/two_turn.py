"""Countdown with a second chance: a wrong reply is answered by the problem once more, the next one counts.

    python grpo_llm.py --env tests/two_turn.py:TwoTurn
"""

import zlib

import numpy as np

from envs import Episode, Step
from envs.countdown import Countdown


class TwoTurn(Countdown):
    multi_turn = True
    replies = 2  # the last one ends the episode, right or wrong

    def start(self, task, seed):
        return Chances(lambda: Countdown.start(self, task, seed), task.messages[-1], self.replies)


class FourTurn(TwoTurn):
    """Long enough for a history to outgrow a context of 45 tokens."""

    replies = 4


class Flaky(Countdown):
    """Fails in training, at most replies."""

    often = 80  # of 100

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def fails(reply):
            if "train" in task.id and zlib.crc32(reply.encode()) % 100 < self.often:
                raise ConnectionError("no answer")
            return step(reply)

        episode.step = fails
        return episode


class Broken(Flaky):
    often = 100


class Chances(Episode):
    def __init__(self, attempt, problem, replies):
        self.attempt, self.problem, self.left = attempt, problem, replies

    def step(self, reply):
        self.left -= 1
        step = self.attempt().step(reply)
        if step.info["correct"] or not self.left:
            return step
        return Step([self.problem], np.float32(0), np.bool_(False), False, step.info)
