"""Tables of dictionaries."""

from textgrid.render import render


def from_records(records, align=""):
    """A table with a column for each key, in the order in which they first occur."""
    header = list(dict.fromkeys(key for record in records for key in record))
    return render(header, [[record.get(key, "") for key in header] for record in records], align)
