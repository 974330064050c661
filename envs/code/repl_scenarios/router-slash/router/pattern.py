"""Patterns such as /files/{name}/{version:int}."""

CONVERTERS = {"str": str, "int": int}


class Pattern:
    def __init__(self, text):
        self.text = text
        self.parts = [part for part in text.split("/") if part]

    def match(self, segments):
        """{name: value} where the segments fit, else None."""
        if len(segments) != len(self.parts):
            return None
        found = {}
        for part, segment in zip(self.parts, segments):
            if not part.startswith("{"):
                if part != segment:
                    return None
                continue
            name, _, kind = part.strip("{}").partition(":")
            try:
                found[name] = CONVERTERS[kind or "str"](segment)
            except ValueError:
                return None
        return found

    @property
    def fixed(self):
        """How many parts are no placeholders: the more, the better the match."""
        return sum(not part.startswith("{") for part in self.parts)
