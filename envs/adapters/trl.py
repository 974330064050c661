"""Environment classes of TRL's form: reset(**row), tools as public methods, get_reward().

    env = envs.make("trl", file="shop.py:Shop", data="train.jsonl", max_turns=8)

An object of the class is made for each episode. What its reset returns ends the row's prompt (None: nothing).
Public methods are tools, with schemas from their type hints and docstrings. A reply without a call ends the
episode, and get_reward() says what it is worth. Options, checks and reward functions are those of --env rows.
For episodes that can be repeated, reset may draw from `random` or np.random, which are seeded by the row.
"""

from __future__ import annotations

import dataclasses
import inspect

from envs import BadInput, Episode, Step, Task, as_bad_input, check_option, load_object, rows, shown
from envs.adapters import in_a_loop, seeded


@dataclasses.dataclass(frozen=True)
class Config(rows.Config):
    file: str = ""
    """the class: path/to/file.py:Class"""
    max_turns: int = 10
    """replies after which an episode is cut off, and scored as it stands"""
    solved_at: float = 1.0
    """get_reward() from which a task is solved, where no check says it"""
    blocking: bool = False
    """whether methods wait for something, so that they are called in threads"""


class Trl(rows.Rows):
    """Replies with calls of tools, until one has none; a single reply where the class has no tools."""

    Config = Config

    def __init__(self, config: Config):
        check_option("trl", config, config.file, "file", "path/to/file.py:Class")
        check_option("trl", config, config.max_turns > 0, "max_turns", "at least 1")
        self.make = load_object(config.file, "environment trl: option file")
        with as_bad_input(f"environment trl: {config.file}: expected a class with a method reset"):
            example = self.make()
            example.reset  # noqa: B018
        self.has_reward = self.scores_itself = callable(getattr(example, "get_reward", None))
        self.tools = [name for name, _ in inspect.getmembers(example, inspect.ismethod)
                      if not name.startswith("_") and name not in ("reset", "get_reward", "close")]
        with as_bad_input(f"environment trl: {config.file}: expected tools with type hints and docstrings"):
            from transformers.utils import get_json_schema  # slow to import

            self.schemas = [get_json_schema(getattr(example, name)) for name in self.tools]
        self.multi_turn = bool(self.tools)
        super().__init__(config)
        self.blocking |= config.blocking

    def task(self, split: str, index: int) -> Task:
        task = super().task(split, index)
        _, said = self.begin(task)
        messages = [*task.messages]
        messages[-1] = messages[-1] | {"content": messages[-1].get("content", "") + said}
        return dataclasses.replace(task, messages=messages, tools=self.schemas or None,
                                   data=task.data | {"said": said})

    def begin(self, task: Task):
        """-> an object of the class, and what its reset says"""
        where = f"environment trl: {self.config.file}: reset, row {task.id}"
        with seeded(task.id), as_bad_input(where):
            made = self.make()
            said = awaited(made.reset(**task.data["row"]))
        if not isinstance(said, str | None):
            raise BadInput(f"{where}: expected a text or None, got {shown(said)}")
        return made, said or ""

    def start(self, task: Task, seed: int) -> Episode:
        made, said = self.begin(task)
        if said != task.data["said"]:
            raise BadInput(f"environment trl: {self.config.file}: reset, row {task.id}: says something else "
                           "each time; expected it to draw from `random` or np.random alone")
        return Play(self, task, made)


class Play(Episode):
    def __init__(self, env: Trl, task: Task, made):
        self.env, self.task, self.made, self.turns, self.failed = env, task, made, 0, 0.0

    def step(self, reply: str, calls: list[dict] | None = None) -> Step:
        self.turns += 1
        answers = [self.answer(call["name"], call["arguments"]) for call in calls or ()]
        if calls and self.turns < self.env.config.max_turns:
            return Step(answers, 0.0, False, False, {})
        return self.verdict(reply, bool(calls))

    def answer(self, name, arguments) -> dict:
        """What a tool says; the model reads its errors."""
        try:
            if name not in self.env.tools:
                raise ValueError(f"there is no {name!r:.80}, but {', '.join(self.env.tools)}")
            content = str(awaited(getattr(self.made, name)(**arguments)))
        except Exception as error:
            self.failed += 1
            content = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": str(name), "content": content}

    def verdict(self, reply: str, truncated: bool) -> Step:
        step = rows.Attempt(self.env, self.task).step(reply)
        info = step.info | {"failed_calls": self.failed}
        if self.env.has_reward:
            reward = awaited(self.made.get_reward())
            if reward is None or not rows.is_reward(reward):
                raise BadInput(f"environment trl: {self.env.config.file}: get_reward: expected a number, got "
                               f"{shown(reward)}")
            info["get_reward"] = float(reward)
            step.reward += info["get_reward"]
            if not self.env.check:
                info["correct"] = float(reward >= self.env.config.solved_at)
        return Step([], step.reward, not truncated, truncated, info)

    def end(self, reason: str) -> Step:
        return self.verdict("", True)

    def close(self) -> None:
        if callable(getattr(self.made, "close", None)):
            awaited(self.made.close())


def awaited(value):
    """The result of a method, which may be a coroutine."""
    return in_a_loop(rows.awaited(value), None) if inspect.isawaitable(value) else value
