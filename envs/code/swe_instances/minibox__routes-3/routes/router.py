"""Which handler answers a path."""

from routes.pattern import Pattern


class NotFound(LookupError):
    pass


class Router:
    def __init__(self):
        self.routes = []

    def add(self, text, handler):
        self.routes.append((Pattern(text), handler))

    def find(self, path):
        """-> handler, parameters"""
        for pattern, handler in self.routes:
            found = pattern.match(path)
            if found is not None:
                return handler, found
        raise NotFound(path)
