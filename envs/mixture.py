"""Several environments as one: `make("countdown=3,logic")` draws three tasks of countdown for one of logic.

    env = envs.make("countdown=3,logic", **{"countdown.max_operands": 4, "logic.types": "dyck_language"})

Training tasks come in the proportion of the weights (whole numbers, 1 where none is given), and a smaller
environment's repeat before a larger one's are used up. Test tasks take turns, one of each, as long as there
are any, so that an evaluation of n tasks measures every source on about as many; metrics are by source as
always. A task is its environment's own (source, messages, data); its id has the environment's name before it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re

from envs import BadInput, Env, Episode, Message, Step, Task


def question_of(task: Task) -> str:
    return json.dumps([message for message in task.messages if message["role"] != "system"])


def kinds(env: Env) -> set[str]:
    """Names of its classes: those of a file may be there twice. None where a prompt is not the whole task."""
    return set() if env.multi_turn else {kind.__name__ for kind in type(env).__mro__} - {"Env", "object"}


class Mixture(Env):
    """Tasks of several environments. A name with weights and options such as "logic.types" make one."""

    def __init__(self, name: str, options: dict, make):
        """`make`: name, options -> the environment of one of the names."""
        weights = {}
        for part in name.split(","):
            place, sign, number = map(str.strip, part.partition("="))
            short = place.rpartition(":")[2]
            if sign and not (re.fullmatch("[0-9]{1,9}", number) and 1 <= int(number) <= 1000):
                raise BadInput(f"environment {name}: weight of {short}: expected a whole number from 1 to "
                               f"1000, got {number!r}")
            if not place or short in weights:
                raise BadInput(f"environment {name}: expected different names with commas, got {part!r}")
            weights[short] = (place, int(number or 1))
        given = {short: {} for short in weights}
        for key, value in options.items():
            short, dot, option = key.partition(".")
            if not dot or short not in given:
                raise BadInput(f"environment {name}: option {key!r}: expected NAME.OPTION, with NAME one of "
                               f"{', '.join(given)}")
            given[short][option] = value
        self.envs = {short: make(place, **given[short]) for short, (place, _) in weights.items()}
        self.pattern = [short for short, (_, weight) in weights.items() for _ in range(weight)]
        self.multi_turn = any(env.multi_turn for env in self.envs.values())
        self.blocking = any(env.blocking for env in self.envs.values())
        self.at_once = min((env.at_once for env in self.envs.values() if env.at_once), default=0)
        self.threads = max(env.threads for env in self.envs.values())
        self.identity = "".join(env.identity for env in self.envs.values())
        words = [env.vocabulary for env in self.envs.values()]
        # A token per word is for one tokenizer that knows all of them; else one for bytes.
        self.vocabulary = list(dict.fromkeys(word for part in words for word in part)) if all(words) else None

    @property
    def about(self) -> str:
        return "\n".join(env.about for env in self.envs.values() if env.about)

    def num_tasks(self, split: str) -> int:
        """train: until each environment's tasks have come once, in whole patterns; test: all there are."""
        sizes = {short: env.num_tasks(split) for short, env in self.envs.items()}
        if split == "test":
            return sum(sizes.values())
        if not all(sizes.values()):
            raise BadInput(f"environment mixture: {min(sizes, key=sizes.get)}: no training tasks")
        return len(self.pattern) * max(math.ceil(n / self.pattern.count(short)) for short, n in sizes.items())

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        if split == "test":
            short, inner = self._in_turn(index)
            task = self.envs[short].task("test", inner)
        else:
            short, inner = self._by_weight(index)
            task = self._training_task(short, inner)
        return dataclasses.replace(task, id=f"{short}:{task.id}")

    def start(self, task: Task, seed: int) -> Episode:
        env, own = self._own(task)
        episode = env.start(own, seed)
        if episode.own_task:
            episode.own_task = dataclasses.replace(episode.own_task, id=task.id)
        return episode

    def score_group(self, task: Task, conversations: list[list[Message]], steps: list[Step]) -> list[Step]:
        env, task = self._own(task)
        return env.score_group(task, conversations, steps)

    def solution(self, task: Task) -> str | None:
        env, task = self._own(task)
        return env.solution(task)

    def demonstration(self, task: Task) -> list[Message] | None:
        env, task = self._own(task)
        return env.demonstration(task)

    def _by_weight(self, index: int) -> tuple[str, int]:
        """The pattern again and again: an environment's k-th place in it is its k-th task."""
        rounds, place = divmod(index, len(self.pattern))
        short = self.pattern[place]
        inner = rounds * self.pattern.count(short) + self.pattern[:place].count(short)
        return short, inner % self.envs[short].num_tasks("train")

    def _training_task(self, short: str, inner: int) -> Task:
        """An environment's task, or the next one that no other environment holds out."""
        env = self.envs[short]
        size = env.num_tasks("train")
        for further in range(size):
            task = env.task("train", (inner + further) % size)
            if question_of(task) not in self._held_out[short]:
                return task
        raise BadInput(f"environment mixture: {short}: no training tasks, as others hold all of them out")

    @functools.cached_property
    def _held_out(self) -> dict[str, set[str]]:
        """What others of its kind hold out, of each environment: two files may have a row in common."""
        found = {}
        for short, env in self.envs.items():
            found[short] = set()
            for other in self.envs.values():
                if other is not env and kinds(other) & kinds(env):
                    tasks = [other.task("test", k) for k in range(other.num_tasks("test"))]
                    found[short].update(map(question_of, tasks))
        return found

    def _in_turn(self, index: int) -> tuple[str, int]:
        """One of each, those that are used up left out."""
        sizes, done = {short: env.num_tasks("test") for short, env in self.envs.items()}, 0
        for size in sorted(set(sizes.values())):
            left = [short for short, n in sizes.items() if n > done]
            if index < (size - done) * len(left):
                return left[index % len(left)], done + index // len(left)
            index -= (size - done) * len(left)
            done = size
        raise AssertionError("an index within num_tasks is somebody's")

    def _own(self, task: Task) -> tuple[Env, Task]:
        """The environment of a task, and the task as that one knows it."""
        short, _, name = task.id.partition(":")
        return self.envs[short], dataclasses.replace(task, id=name)
