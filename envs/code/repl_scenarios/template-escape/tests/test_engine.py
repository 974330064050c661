import pytest

from template import Template, TemplateError


def test_plain_text():
    assert Template("hello").render() == "hello"


def test_value():
    assert Template("Hi {{ name }}!").render(name="Ada") == "Hi Ada!"


def test_tags_are_escaped():
    assert Template("<p>{{ x }}</p>").render(x="<b>") == "<p>&lt;b&gt;</p>"


def test_raw():
    assert Template("{{{ x }}}").render(x="<b>&</b>") == "<b>&</b>"


def test_each():
    assert Template("{{# rows }}<{{ item }}>{{/ rows }}").render(rows=[1, 2]) == "<1><2>"


def test_dotted_names():
    assert Template("{{ user.name }}").render(user={"name": "Ada"}) == "Ada"


def test_missing_value():
    with pytest.raises(TemplateError, match="nothing"):
        Template("{{ nothing }}").render()


def test_section_without_end():
    with pytest.raises(TemplateError):
        Template("{{# rows }}")
