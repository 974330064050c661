import pytest

from template.escape import escape, unescape


def test_nothing_to_do():
    assert escape("plain text") == "plain text"


def test_ampersand():
    assert escape("salt & pepper") == "salt &amp; pepper"


def test_comparison():
    assert escape("1 < 2 && 3 > 2") == "1 &lt; 2 &amp;&amp; 3 &gt; 2"


def test_quotes():
    assert escape('say "hi"') == "say &quot;hi&quot;"


@pytest.mark.parametrize("text", ["a < b", "&lt;", "&amp;quot;", "x & y"])
def test_there_and_back(text):
    assert unescape(escape(text)) == text
