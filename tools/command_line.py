"""What the command lines of tools share: numbers with bounds, answers and errors of one line, whole files."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, BadInput) else f"{type(error).__name__}: {text}")[:500]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(message)

    def add_run(self, every: float) -> None:
        """The arguments of a tool that looks at a run again and again."""
        self.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
        self.add_argument("--every", type=at_least(0.1, float, 86_400), default=every,
                          help=f"time between two looks [s] ({every:g})")


def ends_in_one_line(main):
    """Of such a tool: bad input is one line on standard error and exit status 2, Ctrl-C is exit status 0."""
    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except (BadInput, OSError) as error:
            print(one_line(error), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 0

    return guarded


def answers_in_json(main):
    """Of a tool that does one thing: what main returns becomes a line of JSON on standard output; bad input
    is one on standard error, and exit status 1.
    """
    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        try:
            print(json.dumps(main(argv)))
        except (BadInput, OSError, MemoryError) as error:
            print(json.dumps({"error": one_line(error)}), file=sys.stderr)
            return 1
        return 0

    return guarded


def at_least(least: float, kind=int, most: float = math.inf):
    def convert(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least} to {most}" if most < math.inf else
                                             f"{text}: expected {least} or more")
        return value
    convert.__name__ = kind.__name__
    return convert
