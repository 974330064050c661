from slugs.slug import slugify


class SlugStore:
    """Gives each title a slug of its own."""

    def __init__(self):
        self.titles = {}

    def add(self, title):
        base = slug = slugify(title)
        number = 2
        while slug in self.titles:
            slug = f"{base}-{number}"
            number += 1
        self.titles[slug] = title
        return slug

    def find(self, slug):
        return self.titles.get(slug)
