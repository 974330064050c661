"""Quarters of years."""

from quarters.model import Quarter, quarter_of
from quarters.text import parse

__all__ = ["Quarter", "parse", "quarter_of"]
