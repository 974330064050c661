import pytest

from phrasebook import Phrasebook
from phrasebook.cache import LruCache

TEXTS = {
    "en": {"yes": "Yes", "stop": "Stop", "days": {"one": "{n} day", "many": "{n} days"}},
    "de": {"yes": "Ja", "days": {"one": "{n} Tag", "many": "{n} Tage"}},
    "pl": {"yes": "Tak", "days": {"one": "{n} d", "few": "{n} dd", "many": "{n} ddd"}},
}


def test_three_locales_in_turn():
    book = Phrasebook(TEXTS)
    assert [book.text("yes", locale) for locale in ("pl", "de", "en", "pl")] == ["Tak", "Ja", "Yes", "Tak"]


def test_a_fallback_is_not_for_all():
    book = Phrasebook(TEXTS)
    assert [book.text("yes", locale) for locale in ("ja", "de")] == ["Yes", "Ja"]


def test_another_fallback():
    assert Phrasebook(TEXTS, fallback="de").text("yes", "fr") == "Ja"


def test_missing_everywhere():
    with pytest.raises(KeyError):
        Phrasebook(TEXTS).text("go", "de")


def test_missing_in_one():
    assert Phrasebook(TEXTS).text("stop", "pl") == "Stop"


def test_numbers_in_one_locale():
    book = Phrasebook(TEXTS)
    assert [book.counted("days", n, "de") for n in (1, 3, 0)] == ["1 Tag", "3 Tage", "0 Tage"]


def test_a_number_in_three_locales():
    book = Phrasebook(TEXTS)
    assert [book.counted("days", 4, locale) for locale in ("de", "en", "pl")] == ["4 Tage", "4 days", "4 dd"]


def test_polish():
    book = Phrasebook(TEXTS)
    assert [book.counted("days", n, "pl") for n in (1, 13, 24)] == ["1 d", "13 ddd", "24 dd"]


def test_the_fallback_counts():
    assert Phrasebook(TEXTS).counted("days", 1, "ja") == "1 day"


def test_a_second_time_comes_from_the_cache():
    book = Phrasebook(TEXTS)
    for locale in ("en", "de", "en", "de"):
        book.text("yes", locale)
    assert (book.cache.hits, book.cache.misses) == (2, 2)


def test_the_cache_forgets():
    cache = LruCache(3)
    for key in (1, 2, 3, 1, 4):
        cache.get(key, lambda: key)
    cache.get(2, lambda: "again")
    assert (cache.hits, cache.misses, len(cache)) == (1, 5, 3)
    cache.clear()
    assert len(cache) == 0
