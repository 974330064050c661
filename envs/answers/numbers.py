r"""Numbers in texts, and when two are equal.

    [number.amount for number in all_of("1.5 million, 2½ and 10^3")]    # 1500000, 5/2, 1000
    equal("45%", "0.45"), equal("3628803", "3628800")                   # True, False
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from envs.answers.plain_text import plain_numbers

MOST_DIGITS = 100  # of a number; also its largest exponent
MOST_TEXT = 4000  # characters from the end of a text that are read
TOLERANCE = Fraction(1, 10**6)  # of numbers that are not whole, as a share of the larger one
PERCENT = r"%|percent|per cent|prozent|por ciento|por cento|pour cent|процент\w*|パーセント"
# What a question about a percentage says.
ASKS_PERCENT = re.compile(rf"{PERCENT}|percentage|percentuale|porcentaje|pourcentage|百分", re.IGNORECASE)
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "lakh": 10**5, "crore": 10**7, "millionen": 10**6, "millones": 10**6, "百": 100, "千": 1000, "万": 10**4,
    "萬": 10**4, "만": 10**4, "亿": 10**8, "億": 10**8, "억": 10**8}
SUFFIXES = {"k": 1000, "K": 1000, "M": 10**6, "bn": 10**9}  # that stand right behind a number
UNITS = "mslhgdtLAVWNJKCFTH"  # single letters that are units

_DIGITS = "|".join((
    r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?",  # 1,234.5
    r"\d{1,2}(?:,\d{2})+,\d{3}(?!\d)(?:\.\d+)?",  # 1,00,000
    r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)",  # 1.234,5 and 1.234.567
    r"\d+(?:\.\d+)?|\.\d+"))
_EXPONENT = r"\s?\^\s?[{(]*(?P<%s>[-+]?\d{1,3})[)}]*"
NUMBER = re.compile(
    rf"(?<![\w.^])(?:(?<![)\]%])(?P<sign>[-+](?=(?:[$€£¥]\s?)?[\d.])))?(?:[$€£¥]\s?)?(?P<minus>(?<=[$€£¥])-)?"
    rf"(?:(?P<whole>\d+)\s{{1,2}}(?:and\s)?(?=\d+\s?/))?(?P<number>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w)|\s{{0,2}}[*x]\s{{0,2}}10{_EXPONENT % 'ten'}|"
    rf"{_EXPONENT % 'power'})?(?:\s?/\s?(?P<denominator>\d+(?![\d.,]\d)))?"
    rf"(?:\s?(?P<scale>(?:{PERCENT}|(?:{'|'.join(SCALES)})s?)(?![A-Za-z]))|"
    rf"(?P<suffix>(?-i:{'|'.join(SUFFIXES)})(?![A-Za-z])))?", re.IGNORECASE)

# What makes a number a part of something else, or denies it.
_BEHIND = re.compile("|".join((
    r"[.,:]\d|_|\s?/\s?\d|\s?±|\s?[π√∞‰]|\+(?!\s?[\d(])|\s?[)\]}]*\s?\^",
    r"!(?=\s?[=*/+])",  # 3! = 6, but not "It is 3!"
    rf"(?!(?-i:[{UNITS}]))[A-Za-z](?![A-Za-z]|e?[+-]?\d)|\s[xyz](?![A-Za-z]|\s?\d)",  # 2x, but 2 m and 1e3
    r"\s?[-+*/^]\s?\(?[A-Za-z](?![A-Za-z])|\s?\\(?!ldots|%|\$|\\|quad)",  # 2 + x
    r"(?:st|nd|rd|th)(?![A-Za-z])",
    r"\s(?:k|mil|mio|mrd|squared|cubed|factorial|sin|cos|tan|log|ln|mod|remainder)\b",
    r"\s(?:less than|more than|and a half|divided by|multiplied by|plus|point \d)\b",
    r"\s(?:is|was) (?:not|wrong|incorrect|false)\b|\s(?:isn't|wasn't)|\s?\?\s*no\b")), re.IGNORECASE)
_BEFORE = re.compile("|".join((
    r"\d[.,/:]$|[√∛∜±≤≥≠]\s?[({]?$|\\[A-Za-z]+\s?\{?$",
    r"(?:[<>!]=|(?<![-=~])<|(?<![-=~\n])(?<!^)>)\s?$",  # < 3, but not an arrow or a quotation
    r"(?<![A-Za-z])[A-Za-z](?:\)?\s?[-+*^|/]\s?|\()$",  # x + 2, f(2)
    r"\b(?:sqrt|log|ln|sin|cos|tan|exp|root)\s?[({]?\s?$",
    r"\b(?:(?:more|less|fewer|greater) than|at (?:least|most)|up to|over|under|below|above|beyond)\s$",
    r"\b(?:exceeds|min|max|plus|mod|remainder|twice|double|triple|(?:half|third|quarter|root|square) of)\s$",
    r"\b(?:not|cannot be|can't be|nor|neither|never|anything but)\s$|n't(?: be)?\s$")), re.IGNORECASE)


class Number:
    """A number in a text that `plain_numbers` made; what it is worth is reckoned when it is asked for."""

    def __init__(self, match: re.Match, text: str):
        self.match, self.text, self.start = match, text, match.start()
        self.end = match.start() + len(match[0].rstrip())

    def __str__(self):
        return self.text[self.start:self.end].strip()

    @functools.cached_property
    def whole(self) -> bool:
        """Whether it is all that is said, and not too long: 2x is not 2, and more than 5 not 5."""
        if len(self.match[0]) > MOST_DIGITS or self._number is None:
            return False
        before, behind = self.text[max(self.start - 24, 0):self.start], self.text[self.end:self.end + 20]
        return not (_BEHIND.match(behind) or _BEFORE.search(before))

    @functools.cached_property
    def _number(self) -> Fraction | None:
        """As it is written, before its scale. None: it is infinite, or too large"""
        match, digits = self.match, self.match["number"]
        if re.search(r"\.\d{3}[.,]", digits) or digits.count(".") > 1:  # 1.234,5
            digits = digits.replace(".", "").replace(",", ".")
        value = Fraction(digits.replace(",", ""))
        power, ten = int(match["power"] or 1), int(match["exponent"] or match["ten"] or 0)
        denominator = int(match["denominator"] or 1)
        too_large = abs(ten) > MOST_DIGITS or abs(power) * len(digits) > 10 * MOST_DIGITS
        if too_large or not denominator or power < 0 and not value:
            return None
        value = value ** power * Fraction(10) ** ten / denominator
        if match["whole"] and value < 1:  # 2 1/2
            value += int(match["whole"])
        return -value if match["sign"] == "-" or match["minus"] else value

    @property
    def value(self) -> Fraction:
        return self._number if self.whole else Fraction(0)

    @property
    def scale(self) -> Fraction:
        """Of "percent" or "million"."""
        word = (self.match["scale"] or "").lower().removesuffix("s")
        if self.match["suffix"]:
            return Fraction(SUFFIXES[self.match["suffix"]])
        return Fraction(SCALES[word]) if word in SCALES else Fraction(1, 100 if word else 1)

    @property
    def amount(self) -> Fraction | str:
        """What it is worth; what it is where that is not known."""
        return self.value * self.scale if self.whole else self.match[0]


def all_of(text: str) -> list[Number]:
    """All numbers of the end of a text."""
    text = plain_numbers(text[-MOST_TEXT:])[-MOST_TEXT:]
    return [Number(match, text) for match in NUMBER.finditer(text)]


def same(one: Fraction, gold: Fraction) -> bool:
    """Whether two numbers are equal: whole ones but for what floats lose, others but for rounding."""
    if one.denominator == 1 or gold.denominator == 1:
        return abs(one - gold) <= Fraction(1, 10**9)
    return abs(one - gold) <= TOLERANCE * max(abs(one), abs(gold))


def equal(one: Number, gold: Number, question: str = "") -> bool:
    """Whether two numbers are the same. 45% is 0.45; it is 45 where the question asks for a percentage, or
    the other one says percent. 2 million is 2 where the question says million."""
    if not one.whole or not gold.whole:
        return False
    if same(one.amount, gold.amount):
        return True
    if (one.scale == 1) == (gold.scale == 1):
        return False
    scale = one.scale * gold.scale  # of the one that has one
    if scale < 1:
        is_meant = gold.scale < 1 or ASKS_PERCENT.search(question)
    else:
        is_meant = any(word in question.lower() for word, of_word in SCALES.items() if of_word == scale)
    return bool(is_meant) and same(one.value, gold.value)
