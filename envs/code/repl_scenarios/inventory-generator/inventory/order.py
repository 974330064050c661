from collections import namedtuple

Line = namedtuple("Line", "sku quantity")


def parse_lines(text):
    """Yield the lines of an order such as "2 x bolt, 10 x nut"."""
    for part in text.split(","):
        quantity, _, sku = part.strip().partition(" x ")
        yield Line(sku.strip(), int(quantity))


def total(lines):
    """{sku: quantity}, for orders that name a thing twice."""
    counts = {}
    for sku, quantity in lines:
        counts[sku] = counts.get(sku, 0) + quantity
    return counts
