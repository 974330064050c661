"""How well a cache does."""


class Stats:
    def __init__(self):
        self.hits = 0
        self.misses = 0


def hit_rate(cache):
    """Share of the reads that found something; 0 before the first."""
    reads = cache.stats.hits + cache.stats.misses
    return cache.stats.hits / reads if reads else 0.0
