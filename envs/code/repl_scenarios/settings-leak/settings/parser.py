"""Files of `key = value` lines under [section] headings."""

from settings.values import convert


class ParseError(ValueError):
    def __init__(self, number, line):
        super().__init__(f"line {number}: {line!r}")
        self.number = number


def parse(text, sections={}):
    """{section: {key: value}}, added to `sections` where that is given. Keys before any heading are in ""."""
    current = sections.setdefault("", {})
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and line.endswith("]"):
            current = sections.setdefault(line[1:-1].strip(), {})
            continue
        key, sign, value = line.partition("=")
        if not sign or not key.strip():
            raise ParseError(number, line)
        current[key.strip()] = convert(value.strip())
    return sections
