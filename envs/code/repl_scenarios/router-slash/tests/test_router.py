import pytest

from router import NotFound, Router


@pytest.fixture
def router():
    made = Router()
    made.add("/", lambda query: "home")
    made.add("/files/{name}", lambda name, query: f"file {name}")
    made.add("/files/{name}/{version:int}", lambda name, version, query: f"{name} v{version}")
    made.add("/files/latest", lambda query: "latest")
    made.add("/search", lambda query: f"search {query.get('q')}")
    return made


def test_home(router):
    assert router.call("/") == "home"


def test_placeholder(router):
    assert router.call("/files/notes.txt") == "file notes.txt"


def test_integer(router):
    assert router.call("/files/notes/12") == "notes v12"


def test_integer_only(router):
    with pytest.raises(NotFound):
        router.call("/files/notes/twelve")


def test_fixed_parts_win(router):
    assert router.call("/files/latest") == "latest"


def test_encoded_space(router):
    assert router.call("/files/my%20notes") == "file my notes"


def test_encoded_slash_is_part_of_a_name(router):
    assert router.call("/files/2024%2F05") == "file 2024/05"


def test_encoded_question_mark(router):
    assert router.call("/files/why%3F.txt") == "file why?.txt"


def test_query(router):
    assert router.call("/search?q=a+b%26c") == "search a b&c"


def test_trailing_slash(router):
    assert router.call("/files/notes.txt/") == "file notes.txt"


def test_unknown(router):
    with pytest.raises(NotFound):
        router.call("/nothing/here/at/all")
