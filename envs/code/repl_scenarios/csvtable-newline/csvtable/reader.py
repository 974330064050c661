class CsvError(ValueError):
    pass


def read(text, comma=","):
    """Text -> rows of texts."""
    rows, row, chars = [], [], []
    quoted, position = False, 0
    while position < len(text):
        char = text[position]
        position += 1
        if quoted:
            if char != '"':
                chars.append(char)
            elif text[position:position + 1] == '"':
                chars.append('"')
                position += 1
            else:
                quoted = False
        elif char == '"' and not chars:
            quoted = True
        elif char == comma:
            row.append("".join(chars))
            chars = []
        elif char in "\r\n":
            if text[position - 1:position + 1] == "\r\n":
                position += 1
            rows.append([*row, "".join(chars)])
            row, chars = [], []
        else:
            chars.append(char)
    if quoted:
        raise CsvError("a quote is not closed")
    if row or chars:
        rows.append([*row, "".join(chars)])
    return rows
