from collections import OrderedDict


class LruCache:
    """Keeps the entries that were used last."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be positive")
        self.size, self.hits, self.misses = size, 0, 0
        self._entries = OrderedDict()

    def get(self, key, make):
        """The entry of a key; make() where there is none."""
        if key in self._entries:
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]
        self.misses += 1
        value = self._entries[key] = make()
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return value

    def clear(self):
        self._entries.clear()

    def __len__(self):
        return len(self._entries)
