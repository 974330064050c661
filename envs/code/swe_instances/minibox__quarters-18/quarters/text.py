"""Quarters as text."""

import re

from quarters.model import Quarter

FORM = re.compile(r"(\d{4})-?[Qq](\d)")


def parse(text):
    """2024-Q3, 2024Q3 or 2024q3."""
    found = FORM.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no quarter")
    return Quarter(int(found[1]), int(found[2]))
