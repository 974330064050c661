import pytest
from routes import NotFound, Pattern, Router


@pytest.fixture
def router():
    router = Router()
    router.add("/", "home")
    router.add("/users", "index")
    router.add("/users/<id>", "show")
    router.add("/users/<id>/posts/<post>", "post")
    return router


@pytest.mark.parametrize("path, handler, parameters", [
    ("/", "home", {}),
    ("/users", "index", {}),
    ("/users/7", "show", {"id": "7"}),
    ("/users/7/posts/a", "post", {"id": "7", "post": "a"}),
])
def test_paths_are_found(router, path, handler, parameters):
    assert router.find(path) == (handler, parameters)


@pytest.mark.parametrize("path", ["/other", "/users/7/posts"])
def test_other_paths_are_not(router, path):
    with pytest.raises(NotFound):
        router.find(path)


def test_a_parameter_twice_is_refused():
    with pytest.raises(ValueError):
        Pattern("/<a>/<a>")
