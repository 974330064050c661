import pytest

from settings import ParseError, Settings, parse


def test_kinds_of_values():
    assert parse("n = -3\nf = 1e3\nt = On\ns = \"off\"")[""] == {"n": -3, "f": 1000.0, "t": True, "s": "off"}


def test_headings():
    assert parse("[one]\nk = v\n[ two ]\nk = w") == {"": {}, "one": {"k": "v"}, "two": {"k": "w"}}


def test_nothing_but_comments():
    assert parse("; a\n# b\n") == {"": {}}


def test_no_heading_is_left_over():
    parse("[old]\nk = 1")
    assert "old" not in parse("[new]\nk = 2")


def test_no_key_is_left_over():
    parse("colour = red")
    assert parse("size = 4") == {"": {"size": 4}}


def test_what_is_returned_is_not_shared():
    first = parse("k = 1")
    first[""]["k"] = 9
    first["more"] = {}
    assert parse("l = 2") == {"": {"l": 2}}


def test_sections_that_are_given():
    given = {"x": {"a": 1}}
    assert parse("[x]\nb = 2", given) is given and given["x"] == {"a": 1, "b": 2}


def test_empty_sections_that_are_given():
    given = {}
    parse("[x]\nb = 2", given)
    assert given == {"": {}, "x": {"b": 2}}


def test_bad_lines():
    with pytest.raises(ParseError) as info:
        parse("\n\n = 4")
    assert info.value.number == 3


def test_several_texts():
    settings = Settings("[s]\nk = 1\nl = 1", "[s]\nl = 2")
    assert settings.section("s") == {"k": 1, "l": 2} and settings.get("m", "s", 7) == 7


def test_other_settings():
    Settings("k = 1")
    assert Settings("l = 2").get("k") is None
