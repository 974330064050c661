"""Entries with a cost, of which the least recently used are dropped."""

from collections import OrderedDict

from lrucost.stats import Stats


class CostCache:
    def __init__(self, limit):
        self.limit = limit
        self.cost = 0
        self.stats = Stats()
        self._entries = OrderedDict()

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        return key in self._entries

    def get(self, key, default=None):
        """The value of a key, which counts as a use of it."""
        if key not in self._entries:
            self.stats.misses += 1
            return default
        self.stats.hits += 1
        return self._entries[key][0]

    def put(self, key, value, cost=1):
        """Keep a value. One that costs more than the limit is not kept at all."""
        if cost > self.limit:
            return
        self._entries[key] = (value, cost)
        self._entries.move_to_end(key)
        self.cost += cost
        while self.cost > self.limit:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.cost -= dropped
