"""A task that a small chat model solves at times: is one number larger than another?

Half of the reward is for the form, a single word, and half for a right first word, so that a group's rewards
differ. With turns=2 the first answer is asked again.
"""

import dataclasses
import random
import re

import envs


class YesNo(envs.Env):
    multi_turn = True

    @dataclasses.dataclass
    class Config:
        turns: int = 1

    def num_tasks(self, split):
        return 200

    def task(self, split, index):
        one, other = random.Random(f"{split} {index}").sample(range(1, 100), 2)
        messages = [{"role": "user", "content": f"Is {one} larger than {other}? Answer with Yes or No."}]
        answer = "yes" if one > other else "no"
        return envs.Task(f"{split}-{index}", "yes_no", messages, {"answer": answer})

    def start(self, task, seed):
        return Question(task.data["answer"], self.config.turns)


class Question(envs.Episode):
    def __init__(self, answer, turns):
        self.answer, self.turns = answer, turns

    def step(self, reply):
        words = re.findall("[a-z]+", envs.final_part(reply).lower())
        form = float(words in (["yes"], ["no"]))
        right = float(words[:1] == [self.answer])
        correct = form * right
        self.turns -= 1
        again = [{"role": "user", "content": "Are you sure?"}] if self.turns else []
        info = {"correct": correct, "format": form}
        return envs.Step(again, (form + right) / 2, not self.turns, False, info)
