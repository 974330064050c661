r"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), one data set or several in turn.

    env = envs.make("reasoning-gym", task="chain_sum,spell_backward", max_terms=3)

A data set's own options are options here, for all that have them, or "chain_sum.max_terms" for one. Train and
test have different seeds; and a hash of the question says to which of the two it belongs, so that none is in
both. Some of its scorers evaluate the reply as Python or sympy, or may not end: they run in other processes,
for two seconds of processor time at most, on replies that are literals or formulas and nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import typing
import zlib
from typing import Literal

from envs import BadInput, Env, Episode, Step, Task, as_bad_input, final_part, hint, make_config
from envs.adapters import package
from envs.answers import extracted
from envs.workers import WorkerError, shared_pool

TEST_SHARE = 5  # one question in so many belongs to the test split
CHUNK, TEST_CHUNKS = 1_000, 1_000_000  # entries with one seed; the first chunk of the test split
DRAWS = 300  # in search of a question of the wanted split
SECONDS = 2.0  # of processor time, for a scorer in another process [s]
EVALUATES = re.compile(r"\beval\(|parse_expr\(|Fraction\(")  # scorers that run in another process
FORMULA = re.compile(r"(?:[\d\s+\-*/^().,=]|(?<!\w)(?:sqrt|exp|log|a?(?:sin|cos|tan)h?|pi|[A-Za-z_])(?!\w))*")


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "chain_sum"
    """data sets of reasoning-gym, with commas"""
    extract: Literal["auto", "last_number", "boxed", "answer_tag", "whole"] = "auto"
    """what in the reply is its answer; auto: a tag, a box, what follows ####, or all of it"""
    reward_mode: Literal["score", "binary"] = "score"
    """score: the data set's, between 0 and 1 for what is partly right; binary: 1 if it is right, else 0"""
    system: str = ""
    """system message before each question"""
    train_tasks: int = 10_000
    """tasks of the train split, the data sets in turn"""
    test_tasks: int = 500
    """tasks of the test split"""


@dataclasses.dataclass(frozen=True)
class Configured(Config):
    own: dict = dataclasses.field(default_factory=dict)  # {data set: its own options}


class ReasoningGym(Env):
    """One reply per question; `correct` is a score of 1."""

    Config = Config

    def __init__(self, config: Configured):
        super().__init__(config)
        self.names = [*config.own]
        self.entry = functools.lru_cache(4096)(self.find_entry)
        self.apart = {name for name in self.names
                      if EVALUATES.search(inspect.getsource(type(self.chunk(name, 0)).score_answer))}
        self.blocking = bool(self.apart)
        for k in range(len(self.names)):
            self.task("test", k)

    def chunk(self, name: str, number: int):
        return make_chunk(name, repr(self.config.own[name]), number)

    @classmethod
    def configure(cls, name, options):
        kinds, own = package("reasoning_gym.factory", name).DATASETS, {}
        for task in map(str.strip, options.get("task", Config.task).split(",")):
            if task not in kinds or task in own or task == "composite":
                raise BadInput(f"environment {name}: option task: expected different ones of "
                               f"{', '.join(sorted(kinds))}, got {task!r}{hint(task, kinds)}")
            own[task] = {}
        known = {task: set(typing.get_type_hints(kinds[task][1])) - {"seed", "size"} for task in own}
        common = {field.name: options.pop(field.name) for field in dataclasses.fields(Config)
                  if field.name in options}
        for key, value in options.items():
            task, _, option = key.rpartition(".")
            takers = [one for one in own if task in ("", one) and option in known[one]]
            if not takers:
                listed = sorted({f.name for f in dataclasses.fields(Config)}.union(*known.values()))
                raise BadInput(f"environment {name}: unknown option {key!r}{hint(option, listed)}; known: "
                               f"{', '.join(listed)}")
            for one in takers:
                own[one][option] = value
        for task, given in own.items():
            make_config(kinds[task][1], f"{name}: {task}", given)  # values become what they are to be
        return Configured(**vars(make_config(Config, name, common)), own=own)

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return self.config.train_tasks if split == "train" else self.config.test_tasks

    def task(self, split: str, index: int) -> Task:
        """The data sets in turn."""
        self.check_index(split, index)
        number, which = divmod(index, len(self.names))
        name, entry = self.names[which], self.entry(split, self.names[which], number)
        messages = [{"role": "system", "content": self.config.system}] if self.config.system else []
        messages.append({"role": "user", "content": entry["question"]})
        return Task(f"{name}-{split}-{number}", f"reasoning-gym/{name}", messages,
                    {"split": split, "name": name, "number": number})

    def find_entry(self, split, name, number):
        for draw in range(DRAWS):
            chunk, place = divmod(number + draw * self.num_tasks(split), CHUNK)
            entry = self.chunk(name, chunk if split == "train" else chunk + TEST_CHUNKS)[place]
            if (zlib.crc32(entry["question"].encode()) % TEST_SHARE == 0) == (split == "test"):
                return entry
        raise BadInput(f"environment reasoning-gym: {name} has too few different questions: none of {DRAWS} "
                       f"belongs to the {split} split; options that allow for more are needed")

    def start(self, task: Task, seed: int) -> Episode:
        return Attempt(self, task.data["name"], self.entry(*task.data.values()))

    def solution(self, task: Task) -> str | None:
        answer = self.entry(*task.data.values())["answer"]
        form = {"boxed": "\\boxed{%s}", "answer_tag": "<answer>%s</answer>"}.get(self.config.extract, "%s")
        return None if answer is None else form.replace("%s", answer)


class Attempt(Episode):
    def __init__(self, env, name, entry):
        self.env, self.name, self.entry = env, name, entry

    def step(self, reply: str) -> Step:
        config, text = self.env.config, final_part(reply)
        found = extracted(text, config.extract)
        if found is None and config.extract == "auto":
            found = text.strip()
        info = {"correct": 0.0, "score": 0.0, "format": float(bool(found)), "scorer_failed": 0.0}
        try:
            if found and self.name in self.env.apart:
                pool = shared_pool(min(os.cpu_count() or 1, 16), "reasoning_gym")
                given = (self.name, repr(config.own[self.name]), found, self.entry)
                info["score"] = pool.submit(score, *given, seconds=SECONDS).result()
            elif found:
                info["score"] = float(self.env.chunk(self.name, 0).score_answer(found, self.entry))
        except WorkerError:
            raise
        except Exception:  # scorers are not made for any text
            info["scorer_failed"] = 1.0
        info["correct"] = float(info["score"] == 1)
        reward = info["score"] if config.reward_mode == "score" else info["correct"]
        return Step([], reward, True, False, info)


@functools.lru_cache(256)
def make_chunk(name: str, options: str, number: int):
    """Entries of a data set, with seeds after those of the chunk before. None is 0: some take it for none."""
    import reasoning_gym

    with as_bad_input(f"environment reasoning-gym: {name} with {options}"):
        options = ast.literal_eval(options)
        return reasoning_gym.create_dataset(name, size=CHUNK, seed=1 + number * CHUNK, **options)


def score(name: str, options: str, answer: str, entry: dict) -> float:
    """What a scorer that evaluates the reply makes of it, if nothing in it can do harm."""
    if answer != entry["answer"] and not FORMULA.fullmatch(answer):
        ast.literal_eval(answer)  # raises where it is no literal
    return float(make_chunk(name, options, 0).score_answer(answer, entry))
