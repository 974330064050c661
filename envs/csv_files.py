"""CSV files as spreadsheets, pandas and people write them.

    rows, remark = read("train.csv")    # [(1, {"question": "What is 6 x 7?", "answer": "42"}), ...], ""

All values are texts: "007" stays what it is. Cells are separated by commas, semicolons, tabs or bars.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

from envs import read_text

DELIMITERS = ",;\t|"


def read(path: str | Path) -> tuple[list[tuple[int, dict]], str]:
    """-> [(number from 1, row)], and what a person should know of it. ValueError: what is wrong"""
    table = _table(read_text(path, newline=""))
    columns, indices, count = _columns(table)
    rows = []
    for number, cells in enumerate(table[1:], 1):
        if len(cells) < count or any(cells[count:]):
            raise ValueError(f"row {number}: expected a value for each column of {', '.join(columns)}, got "
                             f"{len(cells)}")
        rows.append((number, {name: cells[place] for name, place in columns.items()}))
    remarks = _undo_gaps(rows, columns)
    if indices:
        remarks.insert(0, "its first column has no name, as an index has none, and is not read")
    return rows, "; ".join(remarks)


def _table(text: str) -> list[list[str]]:
    """Lists of cells, the first of which has the names of columns. The delimiter is the first of DELIMITERS
    by which there are several columns and all rows have as many; else the comma."""
    tables, errors = {}, {}
    for delimiter in DELIMITERS:
        try:
            table = _cells(text, delimiter)
        except ValueError as error:
            errors[delimiter] = error
            continue
        if len(table[0]) > 1 and all(len(cells) == len(table[0]) for cells in table):
            return table
        tables[delimiter] = table
    if "," in errors:
        raise errors[","]
    return tables[","]


def _cells(text: str, delimiter: str) -> list[list[str]]:
    csv.field_size_limit(sys.maxsize)  # else 131,072 characters
    lines, options = io.StringIO(text, newline=""), dict(delimiter=delimiter, strict=True)
    reader = csv.reader(lines, **options)
    try:
        names = next(reader, [])
        if len(names) > 1 and all(name.startswith(" ") for name in names[1:]):  # as in "question, answer"
            options["skipinitialspace"] = True
        lines.seek(0)
        reader = csv.reader(lines, **options)
        table = [cells for cells in reader if len(cells) > 1 or cells and cells[0].strip()]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error
    if not table:
        raise ValueError("expected a line with the names of columns, got an empty file")
    return table


def _columns(table) -> tuple[dict[str, int], int, int]:
    """-> {name: place}, how many without a name come before them, and how many cells a row has at least"""
    names = [name.strip() for name in table[0]]
    count = max((place for place, name in enumerate(names, 1) if name), default=0)
    if not count:
        raise ValueError("expected a line with the names of columns, got empty cells")
    indices = next(place for place, name in enumerate(names) if name)
    columns = {}
    for place, name in enumerate(names[:count]):
        if name in columns:
            raise ValueError(f"column {name} stands twice")
        if name:
            columns[name] = place
        elif place > indices and any(cells[place:place + 1] != [""] for cells in table[1:]):
            raise ValueError(f"column {place + 1} has no name")
    return columns, indices, count


def _undo_gaps(rows, columns) -> list[str]:
    """pandas writes whole numbers as 8.0 in a column where one is missing: as 8 again. -> what was done"""
    remarks = []
    for name in columns:
        values = [row[name] for _, row in rows]
        if "" in values and any(values) and all(not value or _WHOLE.fullmatch(value) for value in values):
            for _, row in rows:
                row[name] = row[name].removesuffix(".0")
            remarks.append(f"column {name} has gaps and whole numbers: 8.0 is read as 8")
    return remarks


_WHOLE = re.compile(r"[-+]?\d+\.0")
