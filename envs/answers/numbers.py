r"""The number that a text gives as its answer.

    number_in("It is 1.0 × 10^3 (see step 2)")            # "1.0*10^3"
    number_in("The answer is 42 km/h. Check: 84 / 2")     # "42"
    number_in("2000 or 1000")                             # None: it offers two

It is the number right behind "the answer is" (or "Antwort:", "答案是"), else the last one. Numbers of steps,
units and remarks do not count. Of a chain of equations it is the last side that is one number. A text that
offers several numbers, or leaves a sum to the reader, gives none.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from fractions import Fraction

MOST_DIGITS = 100  # of a number; also its largest exponent
MOST_TEXT = 4000  # characters from the end of a text that are read
MOST_JOINED = 50  # numbers before and behind one that are looked at together with it
TOLERANCE = Fraction(1, 10**6)  # of numbers that are not whole, as a share of the right one
PERCENT = r"%|percent|per cent|prozent|por ciento|por cento|pour cent|процент\w*|パーセント"
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
          "trillion": 10**12, "lakh": 10**5, "crore": 10**7, "万": 10**4, "萬": 10**4, "亿": 10**8,
          "億": 10**8}
# What a question about a percentage says.
ASKS_PERCENT = re.compile(rf"{PERCENT}|percentage|prozent|percentuale|porcentaje|pourcentage|百分",
                          re.IGNORECASE)

# LaTeX that says how a text is set.
SETTING = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf|sc|normal|color\{[^{}]{0,20}\})?|"
                     r"math(?:rm|bf|it|sf|tt|cal|bb)|mbox|emph|underline|boldsymbol|bm|operatorname|ensuremath|color\{[^{}]{0,20}\})"
                     r"\s?\{([^{}]*)\}")
# "Answer" in languages that models reply in, and what may stand between it and the answer.
CUE = re.compile(
    r"(?:\b(?:answers?|antwort|lösung|solu(?:tion|ción|ção|zione)|réponse|respuesta|resposta|risposta"
    r"|antwoord|odpowiedź|odpověď|svar(?:et)?|cevap|jawaban\w*|ответ|відповідь|απάντηση)\b|đáp án"
    r"|उत्तर|答案|答え|答|回答|正解|정답|답|الإجابة|الجواب|תשובה)",
    re.IGNORECASE)
LINK = (r"(?:is|are|was|be|must|should|would|equals|equal|to|therefore|thus|then|so|the|correct|right|final|"
        r"approximately|about|roughly|exactly|simply|clearly|definitely|option|choice|letter|number|value|"
        r"ist|lautet|die|der|das|est|la|es|é|è|final|finale|correcta|to|это|är|是|为|為|は|은|는|هو|هي|है|[a-z])")
BETWEEN = re.compile(rf"(?:[\W_]|(?<!\w){LINK}(?!\w)|[是为為はです은는]){{0,40}}", re.IGNORECASE)
# What takes back the answer before it, at the start of a sentence.
WITHDRAWN = re.compile(r"[.!?;:,\n—…]\W*(?:wait|hmm|actually|oops|sorry|correction|scratch that|"
                       r"on second thought|no[,.!]|(?:that is|that's) wrong|i made a mistake)",
                       re.IGNORECASE)
HEDGE = (r"or|either|maybe|perhaps|possibly|alternatively|might|could|versus|vs|oder|ou|oppure|eller|lub|или|"
         r"або|或|または")

_DIGITS = (r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)(?:\.\d+)?"  # 1,00,000 too
           r"|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)|\d+(?:\.\d+)?|\.\d+)")  # 1.234,5 as well
_EXPONENT = r"\s?\^\s?[{(]*(?P<%s>[-+]?\d{1,3})[)}]*"
_NUMBER = re.compile(
    rf"(?<![\w.^])(?:(?<![)\]%])(?P<sign>[-+](?=(?:[$€£¥]\s?)?[\d.])))?(?:[$€£¥]\s?)?(?P<minus>(?<=[$€£¥])-)?"
    rf"(?:(?P<whole>\d+)\s{{1,2}}(?:and\s)?(?=\d+\s?/))?(?P<number>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w)|\s{{0,2}}[*x]\s{{0,2}}10{_EXPONENT % 'ten'}|"
    rf"{_EXPONENT % 'power'})?"
    rf"(?:\s?/\s?(?P<denominator>\d+(?![\d.,]\d)))?"
    rf"\s?(?P<scale>(?:{PERCENT}|(?:{'|'.join(SCALES)})s?)(?![A-Za-z]))?", re.IGNORECASE)
# 2x, 2π, 3!=6, (-2)^3, 5k: the number is but a part of what is said.
_MORE_BEHIND = re.compile(r"[.,]\d|\s?[π√∞]|[xyznikeM](?![A-Za-z])|\s?[)\]}]*\s?\^|!(?=\s?[=*/+])|\s?±"
                          r"|\s?/\s?\d|‰|\+(?!\s?[\d(])")
_MORE_BEFORE = re.compile(r"[√±≤≥]\s?[({]?$|(?<![-=~\n])(?<!^)[<>]\s?$|\d[.,/]$"
                          r"|\b(?:sqrt|log|ln|sin|cos|tan|exp|root)\s?[({]$"
                          r"|\b(?:(?:more|less|fewer|greater) than|at (?:least|most)|up to|over|under)\s$",
                          re.IGNORECASE)
# Numbers that are no answers where there are others.
_LABEL = re.compile(
    r"\b(?:steps?|eqs?|equations?|examples?|questions?|problems?|parts?|cases?|sections?|figures?|fig|tables?|"
    r"lines?|pages?|chapters?|methods?|theorems?|lemmas?|notes?|refs?|items?|attempts?|points?|rules?|rows?|no|nr|"
    r"q|per|out of|base|mod|modulo|not|than|instead of|schritt|étape|paso)[.:]?\s?[#(]?$|#$", re.IGNORECASE)
_LABEL_BEHIND = re.compile(r"\s?(?:decimal places?|decimals|significant|digits?|steps?|methods|dp\b|sf\b)|"
                           r"(?<=\d)(?:st|nd|rd|th)\b", re.IGNORECASE)
_ITEM = re.compile(r"(?m)^[^\S\n]*(?=\d{1,3}[.)][^\S\n]+\S)")
_REMARK = re.compile(r"(\d[}%.°]{0,2}(?:[^\S\n]{1,3}[^\W\d]{1,20}){0,3}[^\S\n]{0,3})"
                     r"(?:\((?=[^()\n]{0,200}[^\W\d_]|\s?=)([^()\n]{1,200})\)|\[\^?\d{1,3}\]|\[(?=[^\[\]\n]{0,200}[^\W\d_])[^\[\]\n]{1,200}\])")


def plain_number_text(text: str) -> str:
    r"""A text with its numbers in ASCII: 1{,}234, 1 234, ٤٢, 3², 2½, \frac12, \$5, −4 and 10**3 as 1,234,
    1,234, 42, 3^{2}, 2 1/2, 1/2, $5, -4 and 10^3; exponents of units are gone."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = re.sub("[¼-¾⅐-⅞↉]", lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub(r"(?<=\d)(?:[\u00a0\u2007-\u200a\u202f\u066c'’_~]|\\[,;:! ]|\{,\})(?=\d{3}(?!\d))",
                  ",", text)
    text = unicodedata.normalize("NFKC", text).translate(_CHARACTERS)
    if not text.isascii():
        text = re.sub(r"(?![0-9])\d", lambda m: str(unicodedata.decimal(m[0])), text)
        text = re.sub(r"(?<=[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])(?=[-$\d.])", " ", text)
    text = _plain_latex(text)
    text = re.sub(r"(?<![\d.,/^])(\d{1,3})((?: \d{3})+)(?![\d/,]|\.\d)",
                  lambda m: m[1] + m[2].replace(" ", ","), text)
    text = re.sub(r"(?<=[\d)])\s?\*\*\s?(?=[-\d({])", "^", text)
    text = re.sub(r"\*\*|(?<!\w)(?<!\d )[*_`]+(?=[-\w$.])|(?<=[\w%.])[*_`]+(?!\w|\s\d)|`", "", text)  # **4**
    text = re.sub(r"(?<=[^\W\d_])\s?\^\s?\{?-?\d+\}?|(?<=[^\W_])_\{?\w{1,9}\}?", "", text)  # cm^2, x_1
    text = re.sub(r"[—―]|--+", " — ", text)
    text = re.sub(r"(\d) to the (?:power of )?(\d{1,3})(?:st|nd|rd|th)?(?: power)?", r"\1^\2", text)
    text = re.sub(r"<<[^<>\n]{0,200}>>", "", text)  # GSM8K's notes to a calculator
    text = re.sub(r"(?<=[=≈(:])[^\S\n]*-[^\S\n]+(?=[$€£¥]?[\d.])", " -", text)  # = - 5
    return _REMARK.sub(_without_remark, text)


_CHARACTERS = str.maketrans({"\u2044": "/", "\u2215": "/", "\u066b": ".", "\u2212": "-", "\u2010": "-",
                             "\u2012": "-", "\u2013": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*",
                             "⩽": "≤", "⩾": "≥", "°": " "})
_LATEX = {"times": " * ", "cdot": " * ", "ast": " * ", "div": "÷", "pm": "±", "mp": "±", "approx": "≈",
          "simeq": "≈",
          "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "lt": "<", "gt": ">", "pi": "π", "sqrt": "√",
          "infty": "∞", "overline": "√", "ldots": "…", "dots": "…", "cdots": "…", "quad": " ", "lor": " or "}


def _plain_latex(text):
    text = text.replace("{,}", ",")
    text = re.sub(r"(?<![\w^_}\\])\{\s?(-?[\d.,]{1,50})\s?\}(?!\s?\{)", r"\1", text)  # {1}/{2}
    if "\\" not in text:
        return text
    text = SETTING.sub(r" \1", text)
    text = re.sub(r"(\d{1,50})\s?\\over\s?(?=\d)", r"\1/", text)
    part = r"\s?(?:\{\s?(-?[\d.,]{1,50})\s?\}|(\d))"
    text = re.sub(rf"(\d?)\s?\\[dtc]?frac{part}{part}",
                  lambda m: f"{m[1]}{' ' * bool(m[1])}{m[2] or m[3]}/{m[4] or m[5]}", text)
    text = re.sub(r"\s?\^\s?\{?\s?\\circ\s?\}?|\\degree", " ", text)
    text = re.sub(r"\\(?=[$%])|\\!|\{,\}(?!\d{3})", "", text).replace("{,}", ",")
    text = re.sub(r"\\([A-Za-z]+)", lambda m: _LATEX.get(m[1], f" \\{m[1]}"), text)
    return re.sub(r"\\[,;: ()\[\]]", " ", text)


def _without_remark(match):
    """It is 1000 (see step 2): 2 is no answer. It is 1000 (or 2000) offers two."""
    remark = match[2] or ""
    return f"{match[1]} {remark}" if re.search(rf"\b(?:{HEDGE})\b", remark, re.IGNORECASE) else match[1]


class Number:
    """A number in a text; what it is worth is reckoned when it is asked for."""

    def __init__(self, match: re.Match, text: str):
        self.match, self.text, self.start = match, text, match.start()
        self.end = match.start() + len(match[0].rstrip())

    @functools.cached_property
    def whole(self) -> bool:
        """Whether it is all that is said, and not too long: 2x is not 2, and more than 5 not 5."""
        before, behind = self.text[max(self.start - 16, 0):self.start], self.text[self.end:self.end + 8]
        return not (_MORE_BEHIND.match(behind) or _MORE_BEFORE.search(before)
                    or len(self.match[0]) > MOST_DIGITS) and self._number is not None

    @functools.cached_property
    def _number(self) -> Fraction | None:
        """As it is written, before its scale."""
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
        return Fraction(SCALES[word]) if word in SCALES else Fraction(1, 100 if word else 1)

    @property
    def amount(self) -> Fraction | str:
        return self.value * self.scale if self.whole else self.match[0]


def numbers_of(text: str) -> list[Number]:
    """All numbers of a text that `plain_number_text` made, but for labels where there are others."""
    found = [Number(match, text) for match in _NUMBER.finditer(text)]
    items = {match.end() for match in _ITEM.finditer(text)}
    answers = [number for number in found if number.start not in items
               and not _LABEL.search(text[max(number.start - 20, 0):number.start])
               and not _LABEL_BEHIND.match(text, number.end)]
    return answers or found


_SAYS = re.compile(r"(?:\b(?:is|are|be|equals|it's|that's)|[=≈:])[\s~$€£¥*(]*$", re.IGNORECASE)
_REMARK_BEGINS = re.compile(r"(?:\s?[^\W\d]{1,20}){0,3}?[\s,;:)—-]*\b(?:because|since|as|see|after|from|"
                            r"using|given|due|for|where|when|by|with|at|if)\b", re.IGNORECASE)
_CONCLUDES = re.compile(r"[=≈]|\b(?:so|thus|hence|therefore|total|altogether|gives?|makes?|is|are|equals?|"
                        r"gets?|got|leaves|leaving|in all)\b", re.IGNORECASE)
_UNIT = r"(?:\s?[^\W\d_]{1,12}){0,2}"
_OPEN = r"[\s$€£¥(\[{]*"
# Of "5 feet 10 inches" neither number is the length.
_COMPOUND = (r"(?:feet|foot|ft|'|hours?|hrs?|h|minutes?|min|m|days?|weeks?|months?|years?|pounds?|lbs?|stone|"
             r"dollars?|euros?|degrees?)")
_OPERATION = re.compile(rf"[)\]}}]*{_UNIT}\s?[-+*/÷:]\s?{_OPEN}|[)\]\s]*x{_OPEN}", re.IGNORECASE)
_LIST = re.compile(rf"[)\]}}]*\s?(?:[,;?]|\s?{_COMPOUND}|{_UNIT}[,;]?\s?"
                   rf"(?:and|to|through|until|till|bis|und|y|et|e|и|&|~|…|\.\.+|—))\s?{_OPEN}|[\s()\[\]]*",
                   re.IGNORECASE)
_HEDGED = re.compile(rf"\b(?:{HEDGE})\b|或|または", re.IGNORECASE)


def _joint(gap: str) -> str:
    """How two numbers hang together, by the text between them: "=", "or", an operation, or not at all."""
    if len(gap) > 80:
        return ""
    if _HEDGED.search(gap) and "\n\n" not in gap:
        return "or"
    if re.search("[=≈≡]", gap):
        return "" if re.search(r"[,;.]\s|\n.*\w", gap) else "="
    if "\n" in gap:
        return ""
    if _OPERATION.fullmatch(gap):
        return "operation"
    return "or" if _LIST.fullmatch(gap) else ""


def _one_number(found: list[Number], place: int, text: str) -> Number | None:
    """The number at a place, with all that hangs together with it; None: that offers several, or none."""
    joints, first, last = {}, place, place  # joints: of a number's place, what hangs it to the next one
    while first > max(place - MOST_JOINED, 0):
        if not (joint := _joint(text[found[first - 1].end:found[first].start])):
            break
        first -= 1
        joints[first] = joint
    while last < min(place + MOST_JOINED, len(found) - 1):
        if not (joint := _joint(text[found[last].end:found[last + 1].start])):
            break
        joints[last] = joint
        last += 1
    while last >= first:  # a side of the equation, from the last on
        start = last
        while start > first and joints[start - 1] != "=":
            start -= 1
        between = [joints[k] for k in range(start, last)]
        if "operation" not in between:
            one = found[last]
            several = any(number.amount != one.amount for number in found[start:last])
            return one if one.whole and not several else None
        if "or" in between:
            return None
        last = start - 1
    return None


def _before_remark(found: list[Number], text: str) -> int:
    """The place of the last number, or of one before it in its sentence that a remark follows.

    "It is 42 for 7 kids" says 42, "there are 7 kids with 6 each, so 42" does not say 7.
    """
    last = len(found) - 1
    sentence = max(text.rfind("\n", 0, found[last].start), text.rfind(". ", 0, found[last].start))
    for place in range(last - 1, max(last - 10, -1), -1):
        number = found[place]
        if number.start < sentence:
            break
        rest = text[number.end:number.end + 300].partition("\n")[0]
        if (_SAYS.search(text[max(number.start - 12, 0):number.start]) and _REMARK_BEGINS.match(rest)
                and not _CONCLUDES.search(rest)):
            return place
    return last


def number_in(text: str, cues: bool = True) -> str | None:
    """The number that a text gives as its answer, as it is written, in ASCII. None: none, or several."""
    text = plain_number_text(text[-MOST_TEXT:])[-MOST_TEXT:]
    found = numbers_of(text)
    if not found:
        return None
    place = _before_remark(found, text) if cues else len(found) - 1
    starts = {number.start: k for k, number in enumerate(found)}
    for cue in [*CUE.finditer(text)][::-1] if cues else ():
        end = BETWEEN.match(text, cue.end()).end()
        behind = next((k for start, k in starts.items() if cue.end() <= start <= end), None)
        if behind is not None:
            if not WITHDRAWN.search(text, found[behind].end):
                place = behind
            break
    number = _one_number(found, place, text)
    return None if number is None else text[number.start:number.end].strip()


def number_of(text: str) -> Number | None:
    """The same, as a number."""
    found = number_in(text)
    if found is None:
        return None
    match = _NUMBER.search(found)
    return match and Number(match, found)


def same(one: Fraction, gold: Fraction) -> bool:
    """Whether two numbers are equal: whole ones exactly, others but for rounding."""
    if one.denominator == 1 or gold.denominator == 1:
        return abs(one - gold) <= Fraction(1, 10**9) * (one != int(one) or gold != int(gold))
    return abs(one - gold) <= TOLERANCE * max(abs(one), abs(gold))


def equal(found: str, gold: str, question: str = "") -> bool:
    """Whether two texts give the same number. 45% is 0.45; it is 45 where the question asks for a percentage,
    or the other one says percent, and 2 million is 2 where the question says million."""
    one, right = number_of(found), number_of(gold)
    if one is None or right is None:
        return False
    if same(one.amount, right.amount):
        return True
    scaled = one if one.scale != 1 else right
    if (one.scale == 1) == (right.scale == 1):
        return False
    if scaled.scale < 1:
        fits = right.scale < 1 or ASKS_PERCENT.search(question)
    else:
        words = [word for word, scale in SCALES.items() if scale == scaled.scale]
        fits = words and words[0] in question.lower()
    return bool(fits) and same(one.value, right.value)
