from lrucost import CostCache, hit_rate


def test_the_oldest_is_dropped():
    cache = CostCache(2)
    for key in "abc":
        cache.put(key, key.upper())
    assert "a" not in cache and cache.get("c") == "C" and len(cache) == 2


def test_costs_add_up():
    cache = CostCache(10)
    cache.put("a", 1, cost=6)
    cache.put("b", 2, cost=6)
    assert "a" not in cache and cache.cost == 6


def test_what_costs_too_much_is_not_kept():
    cache = CostCache(3)
    cache.put("a", 1, cost=4)
    assert len(cache) == 0 and cache.cost == 0


def test_hit_rate():
    cache = CostCache(3)
    assert hit_rate(cache) == 0.0
    cache.put("a", 1)
    cache.get("a"), cache.get("b")
    assert hit_rate(cache) == 0.5
