"""Tables in plain text."""

from textgrid.records import from_records
from textgrid.render import render

__all__ = ["from_records", "render"]
