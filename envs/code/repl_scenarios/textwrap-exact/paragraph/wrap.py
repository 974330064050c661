from paragraph.width import char_width, display_width


def wrap(text, width, indent=""):
    """The lines of a paragraph, none wider than `width` columns. Words that are too long are cut."""
    room = width - display_width(indent)
    if room < 2:
        raise ValueError("there is no room for text")
    lines, line = [], ""
    for word in text.split():
        for piece in pieces(word, room):
            if not line:
                line = piece
            elif display_width(line) + 1 + display_width(piece) < room:
                line += " " + piece
            else:
                lines.append(line)
                line = piece
    if line:
        lines.append(line)
    return [indent + line for line in lines]


def pieces(word, room):
    """A word cut into parts that fit."""
    part, used = "", 0
    for char in word:
        if used + char_width(char) > room:
            yield part
            part, used = "", 0
        part += char
        used += char_width(char)
    yield part


def fill(text, width, indent=""):
    """Paragraphs, which blank lines set apart, wrapped one by one."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return "\n\n".join("\n".join(wrap(block, width, indent)) for block in blocks)
