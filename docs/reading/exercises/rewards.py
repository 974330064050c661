"""Countdown with other rewards, for the exercises of README.md; `correct` is what it always was."""

import dataclasses

from envs.countdown import Countdown


class Hackable(Countdown):
    """The reward is 1 for a reply that ends with the target."""

    def reward(self, task, reply, step):
        return float(reply.split()[-1:] == [str(task.data["target"])])

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def with_reward(reply):
            found = step(reply)
            return dataclasses.replace(found, reward=self.reward(task, reply, found))

        episode.step = with_reward
        return episode


class Shifted(Hackable):
    """The reward is 1 higher than it was, for right and for wrong."""

    def reward(self, task, reply, step):
        return step.reward + 1.0
