"""Amounts of money are whole numbers of cents."""

import math


def parse_amount(text):
    """"1,234.50" -> 123450. A sign may stand in front. ValueError for what is no amount."""
    cleaned = text.strip().replace(",", "")
    try:
        value = float(cleaned)
    except ValueError:
        raise ValueError(f"not an amount: {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"not an amount: {text!r}")
    return int(value * 100)


def format_cents(cents):
    """123450 -> "1,234.50"."""
    sign = "-" if cents < 0 else ""
    whole, part = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{part:02d}"


def split(cents, parts):
    """Divide an amount into parts that differ by a cent at most, the larger ones first."""
    if parts < 1:
        raise ValueError("at least one part")
    share, left = divmod(cents, parts)
    return [share + 1] * left + [share] * (parts - left)
