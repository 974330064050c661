from intervals import SpanSet, contains, total_length


def test_overlapping_spans_are_one():
    assert SpanSet([(1, 4), (2, 6), (9, 10)]).spans == [(1, 6), (9, 10)]


def test_an_empty_span_changes_nothing():
    assert SpanSet([(3, 3), (5, 4)]).spans == []


def test_subtract_an_edge():
    spans = SpanSet([(0, 10)])
    spans.subtract(7, 12)
    assert spans.spans == [(0, 7)]


def test_contains():
    spans = SpanSet([(0, 2), (5, 7)])
    assert [point for point in range(-1, 9) if contains(spans, point)] == [0, 1, 5, 6]


def test_total_length():
    assert total_length(SpanSet([(0, 2), (5, 7), (1, 3)])) == 5
