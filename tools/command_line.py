"""What the command lines of tools have in common: numbers with bounds, and errors of one line."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, BadInput) else f"{type(error).__name__}: {text}")[:300]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(message)


def at_least(least: float, kind=int, most: float = math.inf):
    def convert(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least} to {most}" if most < math.inf else
                                             f"{text}: expected {least} or more")
        return value
    convert.__name__ = kind.__name__
    return convert
