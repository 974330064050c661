"""Environments of other packages, one short file each. docs/environments.md says which command each needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import random
import threading

from envs import BadInput, first_line, make_config, parse_options

LOCK = threading.RLock()  # of the global generators


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
