r"""Texts without what only sets them, and numbers as they are typed.

    plain(r"\text{New} **York**")                   # New **York**
    plain_numbers("1\u202f234 cm², ½ and −3")       # 1,234 cm, 1/2 and -3
"""

from __future__ import annotations

import re
import unicodedata

# Letters of scripts that write no spaces between words: Chinese and Japanese; Korean has particles.
CHINESE, KOREAN = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff", "\uac00-\ud7af"

_SETTING = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|sc|normal|color\{[^{}]{0,20}\})?|math(?:rm|bf|it|sf|tt|cal|bb)|mbox|bold|emph|underline|"
    r"boldsymbol|bm|operatorname|ensuremath|boxed|fbox|color\{[^{}]{0,20}\})\s?\{([^{}]*)\}")
_SWITCH = re.compile(r"\\(?:boxed|fbox|displaystyle|left|right|bf|rm|it|large|Large)(?![A-Za-z])\s?")
_WRAPPED = re.compile(r"(\*{1,3}|_{1,3}|`+|\${1,2}|\\\(|\\\[|\{)\s*([^\s](?:.*[^\s])?)\s*(?:\1|\\\)|\\\]|\})",
                      re.DOTALL)
_MARKDOWN = re.compile(r"(?<![\w*_`])[*_`]{1,3}(?=[-\w$(\[])|(?<=[\w$)\]%.])[*_`]{1,3}(?![\w*_`])")
_ACCENTS = "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff"


def composed(text: str) -> str:
    """In form NFC; of a run of accents over one letter the first ones, since many take long."""
    return unicodedata.normalize("NFC", re.sub(f"([{_ACCENTS}]{{8}})[{_ACCENTS}]+", r"\1", text))


def plain(text: str) -> str:
    r"""A text without what sets all of it: **Paris**, $Paris$ and \text{Paris} are Paris."""
    text = composed(text).strip()
    is_latex = "\\" in text
    for _ in range(4):
        before = text
        text = _SWITCH.sub("", _SETTING.sub(r"\1", text)).strip()
        if len(text) < 1000 and (match := _WRAPPED.fullmatch(text)) and match[1] not in match[2]:
            text = match[2]
        if text == before:
            break
    return re.sub(r"\\(?=[%$#&_ ])", "", text.replace("~", " ")) if is_latex else text


def without_markdown(text: str) -> str:
    """Words without the marks of bold, italics and code around them."""
    return _MARKDOWN.sub("", text)


def without_tags(text: str) -> str:
    return re.sub(r"</?[A-Za-z][^<>\n]{0,40}>", " ", text)


def spaced(text: str) -> str:
    """Chinese, Japanese and Korean words apart from others and from "is": 答案是C is 答案 是 C."""
    if text.isascii():
        return text
    words = CHINESE + KOREAN
    text = re.sub(rf"(?<=[{words}])(?=[^{words}\s])|(?<=[^{words}\s])(?=[{words}])", " ", text)
    return re.sub("(答案|答え|正解|정답|답)(?=[是为為は은는])", r"\1 ", text)


# Numbers


def plain_numbers(text: str) -> str:
    r"""A text with its numbers in ASCII: 1{,}234, 1 234, ٤٢, 3², 2½, \frac12, \$5, −4, minus 4 and 10**3 as
    1,234, 1,234, 42, 3^{2}, 2 1/2, 1/2, $5, -4, -4 and 10^3; exponents of units are gone."""
    text = without_tags(re.sub(r"<<[^<>\n]{0,200}>>", "", text))  # GSM8K's notes to a calculator
    for pattern, by in _UNUSUAL:
        text = pattern.sub(by, text)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    if not text.isascii():
        text = re.sub(r"(?![0-9])\d", lambda m: str(unicodedata.decimal(m[0])), text)
    text = _plain_latex(spaced(text))
    for pattern, by in _FORMS:
        text = pattern.sub(by, text)
    return text


def _ascii(match):
    return unicodedata.normalize("NFKC", match[0])


# One after the other, before NFKC makes 32 of 3².
_UNUSUAL = [(re.compile(pattern), by) for pattern, by in (
    (r"<(-?[$\d][^<>\n]{0,30})>", r" \1 "),  # <4>
    ("[①-⓿❶-➓]", " "),
    ("[⁰¹²³⁴-⁹⁺⁻]+", lambda m: "^{" + _ascii(m) + "}"),
    ("[¼-¾⅐-⅞↉]", lambda m: " " + _ascii(m)),
    # What parts thousands: thin spaces, apostrophes, LaTeX's spaces.
    (r"(?<=\d)(?:[\u00a0\u2007-\u200a\u202f\u066c'’_~]|\\[,;:! ]|\{,\})(?=\d{3}(?!\d))", ","),
    (r"(\d),(\d{2})(?=\s?(?:€|EUR|Euro))", r"\1.\2"))]
_FORMS = [(re.compile(pattern, re.IGNORECASE), by) for pattern, by in (
    (r"(?<![\d.,/^])(\d{1,3})((?: \d{3})+)(?![\d/,]|\.\d)", lambda m: m[1] + m[2].replace(" ", ",")),
    (r"(?<=[\d)])\s?\*\*\s?(?=[-\d({])", "^"),
    (r"\*\*|(?<![\w*_`])(?<!\d )[*_`]{1,3}(?=[-\w$.])|(?<=[\w%.])[*_`]{1,3}(?![\w*_`]|\s\d)|`", ""),  # **4**
    (r"(?<=[^\W\d_])\s?\^\s?\{?-?\d+\}?|(?<=[^\W\d_])_\{?\w{1,9}\}?", ""),  # cm^2, x_1
    (r"[—―]|--+", " — "),
    (r"(\d) to the (?:power of )?(\d{1,3})(?:st|nd|rd|th)?(?: power)?", r"\1^\2"),
    (r"(?<!\d\s)\b(?:minus|negative)\s{1,3}(?=[$\d.])", "-"),
    (r"(\d\s)minus(?=\s)", r"\1-"),
    (r"(?<![\w)])-\s?\((\d[\d.,]*)\)", r"-\1"),  # -(4)
    (r"(\d)-(?=\d+/\d)", r"\1 "),  # 3-3/4
    (r"(?:(?<=[=≈(])|(?<=:[^\S\n]))[^\S\n]*-[^\S\n]+(?=[$€£¥]?[\d.])", " -"),  # = - 5
    (r"[^\S\n]{2,}", " "))]
_SIGNS = str.maketrans({
    "\u2044": "/", "\u2215": "/", "\u066b": ".", "\u2212": "-", "\u2010": "-", "\u2012": "-", "\u2013": "-",
    "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "⩽": "≤", "⩾": "≥", "°": " "})
_LATEX = {
    "times": " * ", "cdot": " * ", "ast": " * ", "div": "÷", "pm": "±", "mp": "±", "approx": "≈",
    "simeq": "≈", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "lt": "<", "gt": ">", "pi": "π",
    "sqrt": "√", "infty": "∞", "overline": "√", "neq": "≠", "ne": "≠", "ldots": "…", "dots": "…",
    "cdots": "…", "quad": " ", "lor": " or "}


def _plain_latex(text):
    text = text.replace("{,}", ",").replace("{.}", ".")
    text = re.sub(r"(?<![\w^_}\\])\{\s?(-?[\d.,]{1,50})\s?\}(?!\s?\{)", r"\1", text)  # {1}/{2}
    if "\\" not in text:
        return text
    text = _SWITCH.sub("", _SETTING.sub(r" \1", text)).removesuffix("\\")
    text = re.sub(r"(\d{1,50})\s?\\over\s?(?=\d)", r"\1/", text)
    part = r"\s?(?:\{\s?(-?[\d.,]{1,50})\s?\}|(\d))"
    text = re.sub(rf"(\d?)\s?\\[dtc]?frac{part}{part}",
                  lambda m: f"{m[1]}{' ' * bool(m[1])}{m[2] or m[3]}/{m[4] or m[5]}", text)
    text = re.sub(r"\s?\^\s?\{?\s?\\circ\s?\}?|\\degree", " ", text)
    text = re.sub(r"\\(?=[$%])|\\!", "", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: _LATEX.get(m[1], f" \\{m[1]}"), text)
    return re.sub(r"\\[,;: ()\[\]]", " ", text)
