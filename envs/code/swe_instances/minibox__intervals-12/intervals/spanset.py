"""A sorted list of disjoint half-open spans [start, stop)."""


class SpanSet:
    def __init__(self, spans=()):
        self.spans = []
        for start, stop in spans:
            self.add(start, stop)

    def add(self, start, stop):
        """Add [start, stop); an empty span changes nothing."""
        if start >= stop:
            return
        kept = []
        for low, high in self.spans:
            if high <= start or low >= stop:
                kept.append((low, high))
            else:
                start, stop = min(low, start), max(high, stop)
        kept.append((start, stop))
        self.spans = sorted(kept)

    def subtract(self, start, stop):
        """Remove [start, stop) from every span."""
        if start >= stop:
            return
        kept = []
        for low, high in self.spans:
            if low < start:
                kept.append((low, min(high, start)))
            elif high > stop:
                kept.append((max(low, stop), high))
        self.spans = kept
