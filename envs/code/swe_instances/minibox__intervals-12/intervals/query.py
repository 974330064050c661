"""Questions about sets of spans."""

from bisect import bisect_right


def contains(spanset, point):
    index = bisect_right(spanset.spans, (point, float("inf"))) - 1
    return index >= 0 and spanset.spans[index][0] <= point < spanset.spans[index][1]


def total_length(spanset):
    return sum(stop - start for start, stop in spanset.spans)
