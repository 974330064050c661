from router.pattern import Pattern
from router.url import parse_query, split_path


class NotFound(Exception):
    pass


class Router:
    def __init__(self):
        self.routes = []

    def add(self, pattern, handler):
        self.routes.append((Pattern(pattern), handler))
        self.routes.sort(key=lambda route: -route[0].fixed)

    def resolve(self, path):
        """(handler, arguments). Fixed parts win over placeholders."""
        segments = split_path(path)
        for pattern, handler in self.routes:
            found = pattern.match(segments)
            if found is not None:
                return handler, found
        raise NotFound(path)

    def call(self, path):
        handler, found = self.resolve(path)
        return handler(**found, query=parse_query(path))
