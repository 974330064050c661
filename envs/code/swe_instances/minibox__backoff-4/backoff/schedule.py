"""Pauses between attempts."""


def delays(base=0.5, factor=2.0, cap=30.0):
    """Endless pauses in seconds: base, base * factor, ... and never more than cap."""
    delay = base
    while True:
        yield delay
        delay = min(delay, cap) * factor
