import unicodedata

SPECIAL = {"\u00df": "ss", "\u00e6": "ae", "\u00f8": "o", "\u0142": "l"}


def fold(text):
    """Lower case, without accents."""
    text = unicodedata.normalize("NFC", text.lower())
    return "".join(SPECIAL.get(char, char) for char in text if not unicodedata.combining(char))
