import pytest

from phrasebook.cache import LruCache


def test_oldest_goes_first():
    cache = LruCache(2)
    for key in "abc":
        cache.get(key, lambda: key)
    assert len(cache) == 2
    cache.get("b", lambda: None)
    assert cache.hits == 1


def test_use_keeps_an_entry():
    cache = LruCache(2)
    for key in "abac":
        cache.get(key, lambda: key)
    cache.get("a", lambda: None)
    assert cache.hits == 2


def test_size():
    with pytest.raises(ValueError):
        LruCache(0)
