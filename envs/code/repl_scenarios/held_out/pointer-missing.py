import pytest

from pointer import Document, PointerError

TREE = {"list": [[1, 2], {"k": "v"}], "x/y": {"~": 5}, "empty": [], "zero": 0}


def document():
    return Document(TREE)


def depth_of(pointer):
    with pytest.raises(PointerError) as info:
        document().resolve(pointer)
    return info.value.depth


def test_everything():
    assert document().resolve("") == TREE


def test_deep():
    assert document().resolve("/list/0/1") == 2 and document().resolve("/list/1/k") == "v"


def test_escaped():
    assert document().resolve("/x~1y/~0") == 5


def test_a_key_that_is_not_there():
    assert depth_of("/list/1/q") == 2


def test_an_index_too_large():
    assert [depth_of(path) for path in ("/list/0/2", "/empty/0", "/list/9")] == [2, 1, 1]


def test_an_index_far_too_large_on_the_way():
    assert depth_of("/list/44/k") == 1


def test_no_index():
    assert depth_of("/list/last") == 1 and depth_of("/zero/0") == 1


def test_defaults_of_lists():
    assert [document().get(path, "none") for path in ("/empty/0", "/list/0/1")] == ["none", 2]


def test_without_a_default():
    assert document().get("/list/2") is None


def test_defaults_of_keys():
    assert document().get("/q/r", 3) == 3 and document().get("/zero", 3) == 0


def test_in():
    assert "/list/0/0" in document() and "/q" not in document()


def test_not_in_a_list():
    assert "/list/2" not in document() and "/empty/0" not in document()


def test_the_first_that_is_there():
    assert document().first("/empty/3", "/list/9", "/list/1") == {"k": "v"}


def test_a_slash_is_needed():
    with pytest.raises(ValueError):
        document().get("zero")
