"""Trying again, with longer and longer pauses."""

from backoff.retry import GaveUp, retry
from backoff.schedule import delays

__all__ = ["GaveUp", "delays", "retry"]
