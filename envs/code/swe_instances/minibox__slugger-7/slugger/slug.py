"""A title as a part of a URL."""

import re


def slugify(title, longest=60):
    """Lower-case words of letters and digits, joined by dashes; at most `longest` characters, whole words."""
    text = title.encode("ascii", "ignore").decode().lower()
    words = re.findall(r"[a-z0-9]+", text)
    while words and len("-".join(words)) > longest:
        words.pop()
    return "-".join(words) or "untitled"
