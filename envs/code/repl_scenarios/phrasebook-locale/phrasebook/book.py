from phrasebook.cache import LruCache
from phrasebook.plural import category


class Phrasebook:
    """Texts by locale and name; a text may have a form for each plural category."""

    def __init__(self, texts, fallback="en", cache_size=100):
        self.texts, self.fallback = texts, fallback
        self.cache = LruCache(cache_size)

    def text(self, name, locale):
        """The text in a locale, in the fallback where it is not translated."""
        return self.cache.get(("text", name), lambda: self._find(name, locale))

    def counted(self, name, count, locale):
        """The form for a number, with {n} filled in."""
        return self.cache.get(("counted", name, count), lambda: self._count(name, count, locale))

    def _find(self, name, locale):
        for where in (locale, self.fallback):
            if name in self.texts.get(where, {}):
                return self.texts[where][name]
        raise KeyError(name)

    def _count(self, name, count, locale):
        used = locale if name in self.texts.get(locale, {}) else self.fallback
        forms = self._find(name, locale)
        return forms[category(count, used)].replace("{n}", str(count))
