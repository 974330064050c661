"""Layers of settings."""

from confmerge.lookup import lookup
from confmerge.merge import merge, merge_all

__all__ = ["lookup", "merge", "merge_all"]
