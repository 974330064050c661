"""Widths and padding of columns."""


def widths(header, rows):
    """How wide each column is."""
    return [max((len(row[index]) for row in rows), default=len(name)) for index, name in enumerate(header)]


def pad(text, size, align):
    return text.rjust(size) if align == "r" else text.ljust(size)
