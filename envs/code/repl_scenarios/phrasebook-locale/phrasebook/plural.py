def category(count, locale):
    """The plural form of a number: "one", "few" or "many"."""
    if locale in ("en", "de"):
        return "one" if count == 1 else "many"
    if locale == "pl":
        if count == 1:
            return "one"
        if count % 10 in (2, 3, 4) and count % 100 not in (12, 13, 14):
            return "few"
        return "many"
    if locale == "ja":
        return "many"
    raise KeyError(locale)
