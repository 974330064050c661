"""Spans of minutes since midnight. A span begins at `start` and is over at `end`."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    start: int
    end: int

    def __post_init__(self):
        if self.end <= self.start:
            raise ValueError(f"a span must end after it starts: {self.start}..{self.end}")

    @property
    def length(self):
        return self.end - self.start

    def overlaps(self, other):
        return self.start <= other.end and other.start <= self.end

    @classmethod
    def parse(cls, text):
        """"09:30-10:15" -> Span(570, 615)."""
        start, _, end = text.partition("-")
        return cls(minutes(start), minutes(end))


def minutes(text):
    hour, _, minute = text.strip().partition(":")
    return int(hour) * 60 + int(minute or 0)
