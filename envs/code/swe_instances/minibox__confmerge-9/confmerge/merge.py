"""Settings laid over each other: dictionaries are merged at every depth, everything else is replaced.

A key whose value is None in the overrides is removed.
"""


def merge(base, overrides):
    """A new dictionary: `base` with `overrides` laid over it."""
    result = dict(base)
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key].update(merge(result[key], value))
        else:
            result[key] = value
    return result


def merge_all(*layers):
    """The layers laid over each other, the first below."""
    result = {}
    for layer in layers:
        result = merge(result, layer)
    return result
