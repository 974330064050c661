import unicodedata


def display_width(text):
    """Columns that a text takes in a terminal."""
    return sum(char_width(char) for char in text)


def char_width(char):
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
