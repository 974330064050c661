"""What the families of envs/logic share: their interface, and grammars that read replies."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

MAX_ANSWER = 1_000  # characters of an expression, a number or a list
MAX_DEPTH = 60  # nesting of an expression


class Unreadable(Exception):
    """Not an answer in the task's grammar, or an expression without a value."""


PLAIN = (("-", ("−", "–")), ("*", ("×", "\\times", "\\cdot")), (",", ("{,}",)), (" ", ("\\ ", "\\;", "~")),
         ("", ("$", "\\,", "\\!", "\\left", "\\right", "\\{", "\\}")))
TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def answer_of(text: str, style: str) -> str:
    """The content of the last \\boxed{} whose braces balance, in plain text; in style=words all there is."""
    if style == "words":
        found = text.strip()
    else:
        open_braces, found, latest = [], None, -1
        for match in re.finditer(r"\\boxed\{|[{}]", text):  # one pass, however many are open
            if match[0] != "}":
                open_braces.append(match.end() if match[0] != "{" else -1)
            elif open_braces and (start := open_braces.pop()) > latest:
                found, latest = text[start:match.start()], start
    if found is None or len(found) > MAX_ANSWER:
        raise Unreadable
    while style == "chat" and (found := found.strip())[:1] + found[-1:] == "{}":
        found = found[1:-1]  # a group, which LaTeX does not show
    for plain, forms in PLAIN:
        for form in forms:
            found = found.replace(form, plain)
    return TEXT.sub(r"\1", found).strip()


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


WHOLE = "(?:[0-9]{1,12}|[0-9]{1,3}(?:,[0-9]{3}){1,4})"
INTEGER = re.compile(WHOLE)
DECIMAL = re.compile(r"[0-9]{0,12}\.[0-9]{1,30}|[0-9]{1,3}(?:,[0-9]{3}){1,4}\.[0-9]{1,30}")
FRACTION = re.compile(rf"({WHOLE}) ?/ ?({WHOLE})|"
                      rf"\\[dt]?frac ?\{{ ?(-?{WHOLE}) ?\}} ?\{{ ?(-?{WHOLE}) ?\}}")


def number_of(text: str) -> Fraction:
    """The value of an integer, a decimal or a fraction, with or without a sign and thousands commas."""
    if len(text) > 60:
        raise Unreadable
    sign = -1 if text.startswith("-") else 1
    digits = text[1:].lstrip(" ") if text.startswith(("-", "+")) else text
    # A full stop may end the sentence that the number is.
    if INTEGER.fullmatch(digits.removesuffix(".")) or DECIMAL.fullmatch(digits):
        return sign * Fraction(digits.replace(",", ""))
    if match := FRACTION.fullmatch(digits):
        above, below = (int(part.replace(",", "")) for part in match.groups() if part)
        if below:
            return sign * Fraction(above, below)
    raise Unreadable


def divide(a, b):
    if b == 0:
        raise Unreadable
    return a / b


ARITHMETIC = {"+": (2, operator.add), "-": (2, operator.sub), "*": (4, operator.mul), "/": (4, divide)}
UNARY = 9  # binds tighter than any operator
TOKEN = re.compile(r"\s*([0-9]+|\S)", re.ASCII)


def compute(text, operators, names=None) -> tuple[Fraction, list[int], set[str]]:
    """(exact value, numbers used, operators used) of an infix expression, by precedence climbing.

    operators: symbol -> (precedence, function); the higher binds tighter, equals go from left to right. A
    unary minus is a use of -. names: letter -> value. Unreadable: the text is not such an expression.
    """
    if len(text) > MAX_ANSWER:
        raise Unreadable
    tokens = TOKEN.findall(text)[::-1]
    numbers, used = [], set()

    def climb(level, depth) -> Fraction:
        token = tokens.pop() if tokens and depth < MAX_DEPTH else ""
        if token == "(":
            value = climb(0, depth + 1)
            if not tokens or tokens.pop() != ")":
                raise Unreadable
        elif token == "-" and "-" in operators:
            used.add("-")
            sign = -1
            while tokens and tokens[-1] == "-":  # however many: they nest nothing
                tokens.pop()
                sign = -sign
            value = sign * climb(UNARY, depth + 1)
        elif token in (names or ()):
            value = names[token]
        elif token.isascii() and token.isdigit() and len(token) <= 12 and (token == "0" or token[0] != "0"):
            numbers.append(int(token))
            value = Fraction(numbers[-1])
        else:
            raise Unreadable
        while tokens and tokens[-1] in operators and operators[tokens[-1]][0] >= level:
            used.add(symbol := tokens.pop())
            precedence, function = operators[symbol]
            value = function(value, climb(precedence + 1, depth + 1))
        return value

    value = climb(0, 0)
    if tokens:
        raise Unreadable
    return value, numbers, used


class Family:
    """What the families share. `data` is JSON-serialisable; its `answer` is a correct one, as plain text."""

    name: str
    wordings: tuple[str, ...]  # of chat prompts; filled in with `fields`

    def draw(self, rng, config) -> dict | None:
        """A candidate, cheaply; it fixes `key` (None: a dead end)."""
        raise NotImplementedError

    def key(self, data):
        """What the problem is. Equal prompts have equal keys."""
        raise NotImplementedError

    def complete(self, data, rng, config) -> dict | None:
        """The finished data (None: the candidate is no good, for one because its solution is not unique)."""
        return data

    def fields(self, data) -> dict[str, str]:
        """The parts of a chat prompt."""
        raise NotImplementedError

    def words(self, data) -> str:
        """The prompt in style=words."""
        raise NotImplementedError

    def vocabulary(self, config) -> str:
        """All the words of prompts and replies in style=words."""
        raise NotImplementedError

    def reference(self, data, style) -> str:
        return boxed(data["answer"]) if style == "chat" else data["answer"]

    def judge(self, text, data, style) -> bool:
        """Whether a reply is correct. Total; may raise Unreadable for a wrong one."""
        raise NotImplementedError
