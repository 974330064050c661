"""Sets of half-open integer spans."""

from intervals.query import contains, total_length
from intervals.spanset import SpanSet

__all__ = ["SpanSet", "contains", "total_length"]
