"""Slugs of which no two are the same."""

from slugger.slug import slugify


class UniqueSlugs:
    def __init__(self):
        self.taken = set()

    def take(self, title):
        """A slug that was not given before."""
        slug = slugify(title)
        if slug in self.taken:
            slug = f"{slug}-2"
        self.taken.add(slug)
        return slug

    def release(self, slug):
        self.taken.discard(slug)
