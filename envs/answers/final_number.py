r"""The number that a text gives as its answer.

    number_in("It is 1.0 × 10^3 (see step 2)")            # "1.0*10^3"
    number_in("The answer is 42 km/h. Check: 84 / 2")     # "42"
    number_in("2000 or 1000")                             # None: it offers two

It is the number right behind "the answer is" (or "Antwort:", "答案是"), else the only one in bold, else the
last one. Numbers of steps, units and remarks do not count. Of a chain of equations it is the last side that
is one number. A text that offers several numbers, or leaves a sum to the reader, gives none.
"""

from __future__ import annotations

import bisect
import re

from envs.answers.cues import CUE, WITHDRAWN, cues
from envs.answers.numbers import MOST_TEXT, NUMBER, UNITS, Number
from envs.answers.plain_text import plain_numbers

MOST_NUMBERS = 300  # of a text, from its end
MOST_JOINED = 50  # before and behind one that are looked at together with it
FUNCTIONS = set("sin cos tan log ln exp lim mod max min sqrt gcd lcm".split())
HEDGE = ("or|either|maybe|perhaps|possibly|alternatively|otherwise|else|might|could|versus|vs|oder|ou|o|"
         "oppure|eller|lub|или|або")

# Numbers that are no answers where there are others: of a step, "of 50", "In 2030, ...".
_LABEL = re.compile("|".join((
    r"\b(?:steps?|eqs?|equations?|examples?|questions?|problems?|parts?|cases?|sections?|figures?|fig|tables?|"
    r"lines?|pages?|chapters?|methods?|theorems?|lemmas?|notes?|refs?|items?|attempts?|points?|rules?|rows?|no|"
    r"nr|q|per|out of|base|mod|modulo|not|than|schritt|étape|paso)[.:]?\s?[#($]*$|#$|\d%?\sof\s(?:the\s)?$",
    r"(?:^|[.!?,;\n]\s{0,2})(?:in|by|on|at|after|before|since|with|from)\s(?:the\s|day\s)?$")), re.IGNORECASE)
_LABEL_BEHIND = re.compile(r"\s?(?:decimal places?|decimals|significant|digits?|steps?|methods|dp\b|sf\b)|"
                           r"(?<=\d)(?:st|nd|rd|th)\b", re.IGNORECASE)
_ITEM = re.compile(r"(?m)^[^\S\n]*(?=\d{1,3}[.)][^\S\n]+\S)")  # of a list

# How numbers hang together, by the text between them.
_UNIT, _OPEN = r"(?:\s?[^\W\d_]{1,12}){0,2}", r"[\s$€£¥(\[{]*"
_COMPOUND = (r"(?:feet|foot|ft|'|hours?|hrs?|h|minutes?|min|m|days?|weeks?|months?|years?|pounds?|lbs?|stone|"
             r"dollars?|euros?|degrees?)")  # of "5 feet 10 inches" neither number is the length
_OPERATION = re.compile(rf"[)\]}}]*{_UNIT}\s?[-+*/÷:]\s?{_OPEN}|[)\]\s]*x{_OPEN}", re.IGNORECASE)
_LIST = re.compile(
    rf"[)\]}}]*\s?(?:[,;?|]|\s?{_COMPOUND}|{_UNIT}[,;]?\s?"
    rf"(?:\b(?:and|to|through|until|till|bis|und|y|et|e|и)\b|[&~…]|\.\.+))\s?{_OPEN}|[\s()\[\]]*",
    re.IGNORECASE)
_NAMED = re.compile(r"(?: [^\W\d]{1,12}){0,2}[ ,;]+\(?[^\W\d]{1,8}\s?[=:)]\s*|\s[^\W\d]{1,12},\s|"
                    r"\n[^\W\d]{2,12}:\s*")
_HEDGED = re.compile(rf"\b(?:{HEDGE})\b|或|または", re.IGNORECASE)

# What comes after an answer.
_IN_BRACKETS = re.compile(
    r"(\d[}%.°]{0,2}(?:[^\S\n]{1,3}[^\W\d]{1,20}){0,3}[^\S\n]{0,3})(?:\[\^?\d{1,3}\]|"
    r"[(\[](?=[^()\[\]\n]{0,200}[^\W_\d]|[\d\s]*[=+*/-])([^()\[\]\n]{1,200})[)\]])")
_REMARK = (r"because|since|as|see|after|from|using|given|due|for|where|when|while|by|with|at|if|in|on|per|of|"
           r"i\.?e|which|to the nearest")
_REMARK_BEGINS = re.compile(rf"(?:\s?[^\W\d]{{1,20}}){{0,4}}?[\s,;:)—-]*\b(?:{_REMARK})\b", re.IGNORECASE)
_IN_REMARK = re.compile(rf"\b(?:{_REMARK}|each|all|another|every)\s(?:(?:the|her|his|their|these|its)\s)?$",
                        re.IGNORECASE)
_CONCLUDES = re.compile("|".join((
    r"[=≈]|\b(?:so|thus|hence|therefore|gives?|makes?|equals?|gets?|got|leaves|leaving)\b",
    r"\btotal\W+(?:of|is|are)?\W*\d|\d\s(?:[^\W\d]+\s){0,2}(?:in total|altogether|in all)",
    r"(?<!there )\b(?:is|are|be)\s[$\d-]|\bi\.?e\.?,?\s[$\d-]")), re.IGNORECASE)
_STATES = re.compile(r"\b(?:so|thus|hence|therefore|then|total|gives?|makes?|is|are)\b", re.IGNORECASE)
_CHECKS = re.compile(r"\b(?:check|verif|because|since|explanation|note)", re.IGNORECASE)
_UNKNOWN = re.compile(r"[A-Za-z]\s?=")  # behind the 3 of 3x = 21
_BOLD = re.compile(r"\*\*([^*\n]{1,60})\*\*")


def number_in(text: str, last: bool = False, marked: bool = False) -> str | None:
    """The number that a text gives as its answer, as it is written, in ASCII. None: none, or several.

    last: the last one, whatever is announced. marked: the text was marked as the answer, and has to be a
    number alone, or a sentence.
    """
    number = find_number(text, last, marked)
    return None if number is None else str(number)


def number_of(text: str) -> Number | None:
    """The number that a text is."""
    return find_number(text, marked=True)


def find_number(text: str, last: bool = False, marked: bool = False) -> Number | None:
    text = text[-MOST_TEXT:]
    if not last and not marked and not CUE.search(text):
        text = _stands_out(text) or text
    text = _IN_BRACKETS.sub(_without_remark, plain_numbers(text))[-MOST_TEXT:]
    if marked:
        text = re.sub(r"^\s*-\s(?=[$.\d])", "-", text)
    if not re.search(r"[^\W\d]", text):  # lines of numbers, and nothing else
        text = text.replace("\n", " ")
    found = answers_of(text)
    if not found or marked and _is_expression(text, found):
        return None
    place = len(found) - 1 if last else _announced(found, text)
    if place is None:
        place = _before_remark(found, text)
    if _are_several(found[:place + 1], text, marked):
        return None
    return _one_number(found, place, text)


def _without_remark(match):
    """It is 1000 (see step 2): 2 is no answer. It is 1000 (or 2000) offers two."""
    remark = match[2] or ""
    return f"{match[1]} {remark}" if _HEDGED.search(remark) else match[1]


def answers_of(text: str) -> list[Number]:
    """All numbers of a text that `plain_numbers` made, but for labels where there are others."""
    found = [Number(match, text) for match in NUMBER.finditer(text)][-MOST_NUMBERS:]
    items = {match.end() for match in _ITEM.finditer(text)}
    answers = [number for number in found if number.start not in items
               and not _LABEL.search(text, max(number.start - 20, 0), number.start)
               and not _LABEL_BEHIND.match(text, number.end)]
    return answers or found


# Which number


def _announced(found: list[Number], text: str) -> int | None:
    """The place of the number that a cue announces ("the answer is"). None: there is none, or more follows,
    since what comes after "Solution:" may be its first step, and an answer may be taken back."""
    starts = [number.start for number in found]
    for cue, end in cues(text):
        place = bisect.bisect_left(starts, cue.end())
        if place == len(found) or starts[place] > end:
            continue
        rest = text[found[place].end:]
        sentence = re.split(r"[.!?]\s|\n", rest, maxsplit=1)[0]
        goes_on = place + 1 < len(found) and found[place + 1].start < found[place].end + len(sentence)
        if goes_on and _CONCLUDES.search(_CHECKS.split(sentence)[0]):
            return None
        is_heading = re.match(r"\W{0,4}[:\n]", text[cue.end():])
        if is_heading and re.search(r"=\s?[$(]?[\d.]", rest) and not _CHECKS.search(rest):
            return None
        return None if WITHDRAWN.search(rest) else place
    return None


def _stands_out(text: str) -> str | None:
    """The only number in bold, or one that is the first line, where nothing else is concluded after it."""
    line, _, rest = text.strip().partition("\n")
    spans = [(span[1], text[span.end():]) for span in _BOLD.finditer(text)]
    if len({span for span, _ in spans if re.search(r"\d", span)}) > 1:
        return None
    for inside, after in [*spans, (line, rest)] if rest else spans:
        plain = plain_numbers(inside)
        match = NUMBER.match(plain)
        if match is None or not re.fullmatch(r"(?:\s?[^\W\d]{1,12}){0,2}[.\s]*", plain[match.end():]):
            continue
        is_other = _CONCLUDES.search(after) and match["number"] not in after
        if not is_other and not WITHDRAWN.search(after):
            return inside
    return None


def _before_remark(found: list[Number], text: str) -> int:
    """The place of the last number, or of the first in its sentence that only a remark follows.

    "It is 42 for 7 kids" says 42, "there are 7 kids with 6 each, so 42" does not say 7.
    """
    last = len(found) - 1
    sentence = max(text.rfind("\n", 0, found[last].start), text.rfind(". ", 0, found[last].start))
    for place in range(max(last - 10, 0), last):
        number = found[place]
        if number.start <= sentence or _IN_REMARK.search(text[max(number.start - 20, 0):number.start]):
            continue
        rest = text[number.end:number.end + 300].partition("\n")[0]
        if _REMARK_BEGINS.match(rest) and not _CONCLUDES.search(rest):
            return place
    return last


# Whether it is one number


def _is_expression(text: str, found: list[Number]) -> bool:
    """Whether a mark says more than numbers, names and units: x + 42, f(42), \\vec{42}, > 42."""
    rest, end = "", 0
    for number in found:
        gap = text[end:number.start]
        rest += " " if end and _OPERATION.fullmatch(gap) else f"{gap} "
        end = number.end
    rest += text[end:]
    words = [*re.finditer(r"[^\W\d_]+", rest)]
    if sum(len(word[0]) > 2 for word in words) > 4:  # a sentence
        return False
    for word in words:
        is_letter = len(word[0]) == 1 and word[0].isascii() and word[0] not in UNITS
        is_name = re.match(r"\s?(?:\(\s*\w?\s*\))?\s?[=≈:]", rest[word.end():])
        if word[0].lower() in FUNCTIONS or is_letter and not is_name:
            return True
    return re.search(r"\\[A-Za-z\\]|[|_^!<>≤≥≠±√∛∑∫∏∞]|[^\W\d_]\s?\+|\+\s?[^\W\d_]", rest) is not None


def _are_several(found: list[Number], text: str, marked: bool) -> bool:
    """Whether a short text has different numbers under names of their own, as in x = 30, y = 42; in a mark,
    any numbers that differ."""
    if len(re.findall(r"[^\W\d_]{3,}", text)) > 4 or _STATES.search(text):
        return False
    for one, other in zip(found, found[1:], strict=False):
        gap = text[one.end:other.start]
        if one.amount != other.amount and (_NAMED.fullmatch(gap) or marked and not _joint(gap)):
            return True
    return False


def _joint(gap: str) -> str:
    """How two numbers hang together, by the text between them: "=", "or", an operation, or not at all."""
    if len(gap) > 80:
        return ""
    if _HEDGED.search(gap) and "\n\n" not in gap:
        return "or"
    if re.search("[=≈≡]", gap):
        return "" if re.search(r"[,;.]\s|\n.*\w|[→⇒⟹]|[-=]>", gap) else "="
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
        if start > first and _UNKNOWN.match(text, found[start - 1].end):
            return None
        between = [joints[k] for k in range(start, last)]
        if "operation" not in between:
            several = any(number.amount != found[last].amount for number in found[start:last])
            return found[last] if found[last].whole and not several else None
        if "or" in between:
            return None
        last = start - 1
    return None
