from datetime import date

import pytest
from quarters import Quarter, parse, quarter_of


@pytest.mark.parametrize("month, number", [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3), (11, 4)])
def test_months(month, number):
    assert quarter_of(date(2024, month, 15)) == Quarter(2024, number)


@pytest.mark.parametrize("text", ["2024-Q3", "2024Q3", " 2024q3 "])
def test_parse(text):
    assert parse(text) == Quarter(2024, 3)


@pytest.mark.parametrize("text", ["", "2024", "Q3-2024"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_days():
    assert (Quarter(2024, 4).first_day, Quarter(2024, 4).last_day) == (date(2024, 10, 1), date(2024, 12, 31))
