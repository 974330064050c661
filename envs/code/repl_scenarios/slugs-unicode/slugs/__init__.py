from slugs.slug import slugify
from slugs.store import SlugStore

__all__ = ["SlugStore", "slugify"]
