"""Readable parts of URLs."""

from slugger.slug import slugify
from slugger.unique import UniqueSlugs

__all__ = ["UniqueSlugs", "slugify"]
