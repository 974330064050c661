import pytest

from pointer import Document, PointerError

DATA = {"users": [{"name": "Ada"}, {"name": "Bo", "tags": ["x"]}], "a/b": 1, "t~": 2, "none": None}


@pytest.fixture
def document():
    return Document(DATA)


def test_whole_document(document):
    assert document.resolve("") is DATA


def test_nested(document):
    assert document.resolve("/users/1/name") == "Bo"


def test_escapes(document):
    assert document.resolve("/a~1b") == 1 and document.resolve("/t~0") == 2


def test_missing_key(document):
    with pytest.raises(PointerError) as info:
        document.resolve("/users/0/age")
    assert info.value.depth == 2


def test_index_past_the_end(document):
    with pytest.raises(PointerError) as info:
        document.resolve("/users/2/name")
    assert info.value.depth == 1


def test_word_as_index(document):
    with pytest.raises(PointerError):
        document.resolve("/users/first")


def test_into_a_text(document):
    with pytest.raises(PointerError):
        document.resolve("/users/0/name/0")


def test_default(document):
    assert document.get("/nobody", "x") == "x"


def test_default_past_the_end(document):
    assert document.get("/users/7", "x") == "x"


def test_contains(document):
    assert "/none" in document and "/users/1/tags/0" in document
    assert "/users/1/tags/1" not in document


def test_first(document):
    assert document.first("/users/5", "/users/0/name") == "Ada"


def test_must_start_with_a_slash(document):
    with pytest.raises(ValueError):
        document.resolve("users")
