import pytest

from ledger import format_cents, parse_amount, split


def test_whole_amounts():
    assert parse_amount("7") == 700
    assert parse_amount(" 1,200 ") == 120000


def test_cents_are_kept():
    assert parse_amount("0.29") == 29
    assert parse_amount("19.99") == 1999
    assert parse_amount("1.15") == 115


def test_negative_amounts():
    assert parse_amount("-4.35") == -435


@pytest.mark.parametrize("text", ["", "abc", "1.2.3", "nan", "inf"])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError):
        parse_amount(text)


def test_every_cent_comes_back():
    for cents in range(0, 5000, 7):
        assert parse_amount(format_cents(cents)) == cents


def test_format():
    assert format_cents(123450) == "1,234.50"
    assert format_cents(-5) == "-0.05"


def test_split_loses_nothing():
    assert split(100, 3) == [34, 33, 33]
    assert sum(split(1001, 4)) == 1001
