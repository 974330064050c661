from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    player: str
    points: int
    time: float  # seconds since the start, when the points were reached
