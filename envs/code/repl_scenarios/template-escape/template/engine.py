"""Templates with {{ name }} (escaped), {{{ name }}} (as it is) and {{# name }}...{{/ name }} (for each)."""

import re

from template.escape import escape

TAG = re.compile(r"\{\{\{\s*(?P<raw>[\w.]+)\s*\}\}\}|\{\{(?P<sign>[#/]?)\s*(?P<name>[\w.]+)\s*\}\}")


class TemplateError(ValueError):
    pass


class Template:
    def __init__(self, text):
        self.nodes, rest = self._parse(text, 0, None)

    def _parse(self, text, position, section):
        nodes = []
        while match := TAG.search(text, position):
            nodes.append(("text", text[position:match.start()]))
            position = match.end()
            if match["raw"]:
                nodes.append(("raw", match["raw"]))
            elif match["sign"] == "#":
                inner, position = self._parse(text, position, match["name"])
                nodes.append(("each", match["name"], inner))
            elif match["sign"] == "/":
                if match["name"] != section:
                    raise TemplateError(f"unexpected end of {match['name']}")
                return nodes, position
            else:
                nodes.append(("value", match["name"]))
        if section is not None:
            raise TemplateError(f"{section} has no end")
        nodes.append(("text", text[position:]))
        return nodes, len(text)

    def render(self, **values):
        return "".join(self._render(self.nodes, values))

    def _render(self, nodes, values):
        for kind, *rest in nodes:
            if kind == "text":
                yield rest[0]
            elif kind == "each":
                for item in look_up(rest[0], values):
                    yield from self._render(rest[1], {**values, "item": item})
            else:
                found = look_up(rest[0], values)
                yield str(found) if kind == "raw" else escape(found)


def look_up(name, values):
    for part in name.split("."):
        try:
            values = values[part]
        except (KeyError, TypeError):
            raise TemplateError(f"no value for {name}") from None
    return values
