PAIRS = (("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("&", "&amp;"))


def escape(value):
    """A value as text that is safe within HTML."""
    text = str(value)
    for plain, entity in PAIRS:
        text = text.replace(plain, entity)
    return text


def unescape(text):
    for plain, entity in reversed(PAIRS):
        text = text.replace(entity, plain)
    return text
