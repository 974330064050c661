"""CSV as RFC 4180 has it: fields with special characters are quoted, quotes in them doubled."""


def needs_quotes(text, comma):
    return comma in text or '"' in text or text != text.strip()


def field(value, comma):
    text = "" if value is None else str(value)
    if not needs_quotes(text, comma):
        return text
    return '"' + text.replace('"', '""') + '"'


def write(rows, comma=","):
    """Rows of values -> text. None is an empty field."""
    return "".join(comma.join(field(value, comma) for value in row) + "\r\n" for row in rows)
