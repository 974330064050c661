"""Pointers into nested data such as /users/0/name; ~1 stands for a slash and ~0 for a tilde."""


def parse(pointer):
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise ValueError(f"a pointer starts with a slash: {pointer!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]


def build(parts):
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def step(value, part):
    """One step into a dict or a list."""
    if isinstance(value, list):
        if not part.isdecimal():
            raise KeyError(part)
        return value[int(part)]
    if isinstance(value, dict):
        return value[part]
    raise TypeError(f"{part!r} of {type(value).__name__}")
