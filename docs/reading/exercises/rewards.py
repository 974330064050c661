"""Countdown with other rewards, for the exercises of README.md; `correct` is what it always was."""

import dataclasses

from envs.countdown import Countdown


class Hackable(Countdown):
    """The reward has a bonus of 1 for each plus sign, which was meant to make replies easy to check."""

    def reward(self, reply, step):
        return step.reward + reply.count("+")

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def with_reward(reply):
            found = step(reply)
            return dataclasses.replace(found, reward=self.reward(reply, found))

        episode.step = with_reward
        return episode


class Shifted(Hackable):
    """The reward is 1 higher than it was, for right and for wrong."""

    def reward(self, reply, step):
        return step.reward + 1.0
