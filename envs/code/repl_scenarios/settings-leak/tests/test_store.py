from settings import Settings


def test_later_wins():
    settings = Settings("a = 1\nb = 1", "b = 2")
    assert (settings.get("a"), settings.get("b")) == (1, 2)


def test_default():
    assert Settings("").get("missing", default=5) == 5


def test_section_is_a_copy():
    settings = Settings("[x]\na = 1")
    settings.section("x")["a"] = 2
    assert settings.get("a", "x") == 1


def test_stores_are_apart():
    Settings("[x]\na = 1")
    assert Settings("[y]\nb = 1").get("a", "x") is None
