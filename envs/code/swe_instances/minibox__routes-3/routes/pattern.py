"""A path with parameters, such as /users/<id>."""


class Pattern:
    def __init__(self, text):
        self.text = text
        self.parts = split(text)
        self.parameters = [part[1:-1] for part in self.parts if is_parameter(part)]
        if len(set(self.parameters)) != len(self.parameters):
            raise ValueError(f"{text}: a parameter occurs twice")

    def match(self, path):
        """The parameters of a path, or None if it is not of this pattern."""
        parts = split(path)
        if len(parts) != len(self.parts):
            return None
        found = {}
        for part, expected in zip(parts, self.parts, strict=True):
            if is_parameter(expected):
                found[expected[1:-1]] = part
            elif part != expected:
                return None
        return found


def split(path):
    return path.lstrip("/").split("/")


def is_parameter(part):
    return part.startswith("<") and part.endswith(">")
