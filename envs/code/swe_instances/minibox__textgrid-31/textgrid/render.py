"""A table as lines of text."""

from textgrid.layout import pad, widths


def render(header, rows, align=""):
    """Lines with columns as wide as they need. align: a letter for each column, l or r (missing: l)."""
    cells = [[str(cell) for cell in row] for row in rows]
    sizes = widths(header, cells)
    align = align.ljust(len(header), "l")
    lines = [line(header, sizes, align)]
    lines += [line(row, sizes, align) for row in cells]
    return "\n".join(lines)


def line(row, sizes, align):
    columns = [pad(row[index], size, align[index]) for index, size in enumerate(sizes)]
    return " | ".join(columns).rstrip()
