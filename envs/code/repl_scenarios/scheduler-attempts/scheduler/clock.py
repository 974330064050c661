class Clock:
    """Time that moves when it is told to, for tests; anything with now() will do."""

    def __init__(self, start=0):
        self._now = start

    def now(self):
        return self._now

    def advance(self, seconds):
        self._now += seconds
