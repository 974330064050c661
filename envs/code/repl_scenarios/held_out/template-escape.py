import pytest

from template import Template, TemplateError
from template.escape import escape, unescape


def test_text_alone():
    assert Template("no tags } here {").render() == "no tags } here {"


def test_values():
    assert Template("{{a}}-{{ b.c }}").render(a=3, b={"c": "d"}) == "3-d"


def test_less_and_more():
    assert escape("<i>") == "&lt;i&gt;"


def test_marks():
    assert escape('"quoted"') == "&quot;quoted&quot;"


def test_and():
    assert escape("R&D & co") == "R&amp;D &amp; co"


def test_what_is_escaped_already():
    assert escape("&lt;") == "&amp;lt;" and escape("&quot;") == "&amp;quot;"


def test_all_at_once():
    assert escape('<a b="&">') == "&lt;a b=&quot;&amp;&quot;&gt;"


def test_back():
    for text in ('<a b="&">', "&gt;", "&amp;&amp;lt;", "plain"):
        assert unescape(escape(text)) == text


def test_numbers():
    assert escape(12) == "12"


def test_in_templates():
    assert Template("<b>{{ x }}</b>{{{ x }}}").render(x="<>") == "<b>&lt;&gt;</b><>"


def test_in_loops():
    assert Template("{{# all }}{{ item }};{{/ all }}").render(all=["<", "&", 1]) == "&lt;;&amp;;1;"


def test_errors():
    for text in ("{{ none }}", "{{ a.b }}"):
        with pytest.raises(TemplateError):
            Template(text).render(a=1)
    with pytest.raises(TemplateError):
        Template("{{/ rows }}")
