import pytest

from paragraph import fill, wrap


def test_short_text():
    assert wrap("one two", 20) == ["one two"]


def test_empty():
    assert wrap("", 10) == []


def test_breaks_between_words():
    assert wrap("the quick brown fox", 12) == ["the quick", "brown fox"]


def test_a_line_may_be_full():
    assert wrap("aaa bbb ccc", 7) == ["aaa bbb", "ccc"]


def test_a_full_line_with_an_indent():
    assert wrap("aa bb cc", 7, indent="  ") == ["  aa bb", "  cc"]


def test_long_words_are_cut():
    assert wrap("abcdefghij", 4) == ["abcd", "efgh", "ij"]


def test_nothing_is_too_wide():
    text = "It was the best of times, it was the worst of times."
    for width in range(5, 40):
        assert all(len(line) <= width for line in wrap(text, width))


def test_wide_characters_take_two_columns():
    assert wrap("\u65e5\u672c \u8a9e", 6) == ["\u65e5\u672c", "\u8a9e"]


def test_combining_characters_take_none():
    assert wrap("e\u0301e\u0301 e\u0301", 5) == ["e\u0301e\u0301 e\u0301"]


def test_no_room():
    with pytest.raises(ValueError):
        wrap("text", 3, indent="  ")


def test_paragraphs():
    assert fill("a b\n\nc d\n", 10) == "a b\n\nc d"
