import pytest

from router import NotFound, Router
from router.url import parse_query, split_path


def router():
    made = Router()
    made.add("/users/{user}", lambda user, query: ("user", user))
    made.add("/users/{user}/posts/{number:int}", lambda user, number, query: (user, number))
    made.add("/users/me", lambda query: "me")
    made.add("/tags/{tag}", lambda tag, query: (tag, query))
    return made


def test_names():
    assert router().call("/users/ada") == ("user", "ada")


def test_numbers():
    assert router().call("/users/ada/posts/7") == ("ada", 7)
    with pytest.raises(NotFound):
        router().call("/users/ada/posts/x")


def test_fixed():
    assert router().call("/users/me") == "me"


def test_a_slash_in_a_name():
    assert router().call("/users/a%2Fb") == ("user", "a/b")


def test_slashes_in_the_middle():
    assert router().call("/users/x%2Fy%2Fz/posts/12") == ("x/y/z", 12)


def test_a_question_mark_in_a_name():
    assert router().call("/tags/c%3Fd") == ("c?d", {})


def test_a_question_mark_and_a_query():
    assert router().call("/tags/c%3Fd?e=f") == ("c?d", {"e": "f"})


def test_a_percent_sign():
    assert router().call("/tags/50%25") == ("50%", {})


def test_other_escapes():
    assert router().call("/users/an%20na") == ("user", "an na")


def test_segments():
    assert split_path("//a/b%2Fc/?d=/e") == ["a", "b/c"]


def test_queries():
    assert parse_query("/x?a=1&b=c%26d+e&") == {"a": "1", "b": "c&d e"}


def test_nowhere():
    with pytest.raises(NotFound):
        router().call("/users")
