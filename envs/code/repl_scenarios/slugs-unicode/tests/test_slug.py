import pytest

from slugs import SlugStore, slugify


@pytest.mark.parametrize("title, slug", [
    ("Hello, World!", "hello-world"),
    ("  spaces   everywhere ", "spaces-everywhere"),
    ("100% sure", "100-sure"),
    ("!!!", "untitled"),
])
def test_plain_titles(title, slug):
    assert slugify(title) == slug


def test_accents():
    assert slugify("Cr\u00e8me br\u00fbl\u00e9e") == "creme-brulee"


def test_accents_typed_apart():
    assert slugify("Cre\u0300me bru\u0302le\u0301e") == "creme-brulee"


def test_special_letters():
    assert slugify("Stra\u00dfe nach \u0141\u00f3d\u017a") == "strasse-nach-lodz"


def test_ligatures():
    assert slugify("\ufb01ne of\ufb01ce") == "fine-office"


def test_long_titles_are_cut_between_words():
    assert slugify("one two three four", limit=10) == "one-two"


def test_exactly_the_limit():
    assert slugify("one two three", limit=7) == "one-two"


def test_one_long_word():
    assert slugify("abcdefghij", limit=4) == "abcd"


def test_same_title_twice():
    store = SlugStore()
    assert [store.add("Hello") for _ in range(3)] == ["hello", "hello-2", "hello-3"]


def test_same_title_in_two_spellings():
    store = SlugStore()
    assert store.add("caf\u00e9") == "cafe" and store.add("cafe\u0301") == "cafe-2"


def test_find():
    store = SlugStore()
    store.add("A title")
    assert store.find("a-title") == "A title" and store.find("b") is None
