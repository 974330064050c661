import pytest

from settings import ParseError, parse


def test_values():
    found = parse("a = 1\nb = 2.5\nc = yes\nd = 'yes'\ne = some words")
    assert found == {"": {"a": 1, "b": 2.5, "c": True, "d": "yes", "e": "some words"}}


def test_sections():
    assert parse("[x]\na=1\n[y]\na=2") == {"": {}, "x": {"a": 1}, "y": {"a": 2}}


def test_comments_and_blank_lines():
    assert parse("# one\n\n; two\nkey = value") == {"": {"key": "value"}}


def test_a_section_twice():
    assert parse("[x]\na=1\n[y]\n[x]\nb=2")["x"] == {"a": 1, "b": 2}


def test_equals_sign_in_a_value():
    assert parse("url = http://host/?a=b")[""]["url"] == "http://host/?a=b"


def test_bad_line():
    with pytest.raises(ParseError) as info:
        parse("a = 1\nnonsense")
    assert info.value.number == 2


def test_empty():
    assert parse("") == {"": {}}


def test_two_texts_do_not_mix():
    parse("[server]\nport = 80")
    assert parse("[client]\nretries = 3") == {"": {}, "client": {"retries": 3}}
