"""Environments of other packages, one short file each. docs/environments.md says which command each needs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

from envs import BadInput, Env, Episode, Message, Step, Task, first_line, make_config, parse_options

LOCK = threading.RLock()  # of the global generators
TEST_SHARE = 10  # each tenth task of a `Listed` environment belongs to the test split


def package(name: str, env: str):
    """The module `name` of a package that environment `env` needs, or one line on how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"environment {env} needs the package {name.partition('.')[0]}: "
                       f"pip install -r requirements-envs.txt ({first_line(error)})") from error


@contextlib.contextmanager
def seeded(key: str):
    """Within it, what is drawn from Python's and NumPy's global generators is the key's, and leaves no trace
    there; nothing is printed. One thread is within it at a time."""
    import numpy as np

    with LOCK:
        state, generator, quiet = random.getstate(), np.random.get_bit_generator(), io.StringIO()
        inner = np.random.get_state() if generator is _spare_generator() else None
        random.seed(key)
        np.random.set_bit_generator(_spare_generator())
        np.random.seed(random.getrandbits(32))
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                yield
        finally:
            random.setstate(state)
            np.random.set_bit_generator(generator)
            if inner:
                np.random.set_state(inner)


@functools.cache
def _spare_generator():
    import numpy as np

    return np.random.MT19937(0)  # making one takes longer than a move of a game


def arguments(function, text: str, where: str, defaults: dict) -> dict:
    """Arguments of a function from "a=1;b=2". `defaults` go before its own and tell, as they do, the types:
    int, float, bool or str. BadInput, which begins with `where`, names what is known."""
    parameters = inspect.signature(function).parameters
    kinds = {name: type(defaults.get(name, known.default)) for name, known in parameters.items()}
    fields = [(name, kind, None) for name, kind in kinds.items() if kind in (int, float, bool, str)]
    given = make_config(dataclasses.make_dataclass("Arguments", fields), where,
                        parse_options(filter(None, text.split(";"))))
    return {name: value for name, value in vars(given).items() if value is not None}


def in_a_loop(coroutine: Coroutine, timeout: float | None):
    """The result of a coroutine, run in a thread and an event loop of its own.

    Raises TimeoutError after `timeout` seconds (None: never); what goes on in the thread is left to itself.
    """
    future = Future()

    def work():
        try:
            future.set_result(asyncio.run(coroutine))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout)


class Listed(Env):
    """Tasks of one reply that are read once, at the start. Each tenth is held out."""

    source = "listed"

    def __init__(self, config):
        super().__init__(config)
        self.listed = {}  # what was added, by the text of its prompt

    def add(self, messages: list[Message], given) -> None:
        """A task: its prompt, and what `score` gets. One whose prompt is there already is left out."""
        self.listed.setdefault(json.dumps(messages), given)

    @functools.cached_property
    def prompts(self) -> list[str]:
        return list(self.listed)

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        held_out = len(self.prompts[::TEST_SHARE])
        count = held_out if split == "test" else len(self.prompts) - held_out
        if not count:
            raise BadInput(f"{self.source}: expected 2 tasks or more, found {len(self.prompts)}: each "
                           "tenth is held out for the test split, from the first on")
        return count

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        place = index * TEST_SHARE if split == "test" else index + index // (TEST_SHARE - 1) + 1
        messages = json.loads(self.prompts[place])
        return Task(f"{self.source}-{place}", self.source, messages, {"place": place})

    def start(self, task: Task, seed: int) -> Episode:
        given = self.listed[self.prompts[task.data["place"]]]
        return Reply(lambda reply: self.score(given, reply))

    def score(self, given, reply: str) -> Step:
        """The verdict on a reply to a task."""
        raise NotImplementedError


class Reply(Episode):
    """An attempt that its only reply ends."""

    def __init__(self, score: Callable[[str], Step]):
        self.step = score
