"""Values by a path such as "log.level"."""

MISSING = object()


def lookup(settings, path, default=MISSING):
    """The value at a path of keys with dots; KeyError without a default if there is none."""
    value = settings
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            if default is MISSING:
                raise KeyError(path)
            return default
        value = value[key]
    return value
