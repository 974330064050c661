from csvtable.reader import read
from csvtable.writer import write


def to_csv(records):
    """A list of dicts with the same keys -> text with a heading."""
    if not records:
        return ""
    names = list(records[0])
    return write([names, *([record[name] for name in names] for record in records)])


def from_csv(text):
    rows = read(text)
    return [dict(zip(rows[0], row)) for row in rows[1:]] if rows else []
