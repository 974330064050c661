import re

from slugs.fold import fold


def slugify(title, limit=40):
    """A title as a part of an address: "Hello, World!" -> "hello-world". Cut between words where it can be."""
    slug = re.sub(r"[^a-z0-9]+", "-", fold(title)).strip("-")
    if len(slug) > limit:
        cut = slug[:limit + 1].rfind("-")
        slug = slug[:cut if cut > 0 else limit]
    return slug or "untitled"
