WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def convert(text):
    """A number, a truth value, or the text itself; quotes keep a text a text."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
