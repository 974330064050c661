import pytest

from paragraph import fill, wrap


def test_one_line():
    assert wrap("some words", 30) == ["some words"] and wrap("  ", 30) == []


def test_full_lines():
    assert wrap("ab cd ef gh", 5) == ["ab cd", "ef gh"]


def test_one_column_less():
    assert wrap("ab cd ef gh", 4) == ["ab", "cd", "ef", "gh"]


def test_full_at_the_end():
    assert wrap("x yy zzz", 8) == ["x yy zzz"]


def test_full_with_an_indent():
    assert wrap("ab cd e", 8, indent="...") == ["...ab cd", "...e"]


def test_words_as_wide_as_the_line():
    assert wrap("abcdef gh", 6) == ["abcdef", "gh"]


def test_words_that_are_too_wide():
    assert wrap("a bcdefgh", 3) == ["a", "bcd", "efg", "h"]


def test_pieces_and_words():
    assert wrap("abcde f", 3) == ["abc", "de", "f"] and wrap("abcd f", 3) == ["abc", "d f"]


def test_wide_letters():
    assert wrap("\u6f22\u5b57 \u6f22", 7) == ["\u6f22\u5b57 \u6f22"] and wrap("\u6f22\u5b57 \u6f22", 6) == [
        "\u6f22\u5b57", "\u6f22"]


def test_never_wider():
    text = "a bb ccc dddd eeeee ffffff ggggggg " * 3
    for width in range(2, 30):
        assert max(map(len, wrap(text, width))) <= width


def test_never_shorter_than_need_be():
    lines = wrap("aa bb cc dd ee ff gg", 8)
    assert lines == ["aa bb cc", "dd ee ff", "gg"]


def test_too_narrow():
    with pytest.raises(ValueError):
        wrap("x", 1)


def test_blocks():
    assert fill("aa bb\n\n\n\ncc dd ee", 5) == "aa bb\n\ncc dd\nee"
