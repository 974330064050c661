"""The option that a text chooses, and what the options of a row are called.

    chosen("Answer: b. Option A is wrong.", marked=False, numbered=False)     # "B"
    chosen("A) yes B) no C) no", marked=False, numbered=False)                # "A"
    chosen("It is A or B", marked=False, numbered=False)                      # None: it offers two
"""

from __future__ import annotations

import re
import unicodedata

from envs.answers.cues import WITHDRAWN, cues
from envs.answers.numbers import MOST_TEXT
from envs.answers.plain_text import spaced, without_tags

LABEL = r"(?:[A-Z]|\d{1,2})"
# Behind a letter or number that is no label: "A train", "I think", "B's", "A = 3", "2.5", "2 km".
_OTHER_USE = (
    r"(?!\w|['’]\w|[.,]\d|%|\s*[=+*^]|\s+(?!(?:because|since|as|is|was|and|or|which|not|for|due|but|with|by|from|"
    r"rather|instead|would|must|seems)\b)[a-z])")
_OPTION = rf"(?<![\w.-])(?!I\s+[a-z])({LABEL}{_OTHER_USE})"
_WRONG = ("wrong|incorrect|false|out|excluded|eliminated|impossible|unlikely|tempting|nicht|falsch|"
          "incorrecta|faux")
_REJECTED = re.compile("|".join((
    rf"\b(?:wrong|incorrect|false)\s+(?:answer|option|choice)s?\W{{1,3}}(?:is\W{{1,3}}|are\W{{1,3}})?({LABEL})\b",
    r"\b(?:not|neither|nor|rule out|ruling out|eliminate|exclude|reject|avoid|unlike|instead of|rather than|"
    r"cannot be|can't be|don't think|do not think)\s+"
    rf"(?:(?:choose|pick|be|is|it|it's|option|choice|the|answer)\s+){{0,5}}\W?({LABEL})\b",
    rf"n't\s+(?:be\s+)?\(?({LABEL})\b",
    rf"\b({LABEL})\W{{0,3}}\s+(?:is|was|seems|looks|must be|would be|can be|ist|est|es)\s+(?:\w+\s+)?"
    rf"(?:not|{_WRONG}|ruled out)\b",
    rf"\b({LABEL})\W{{0,3}}\s+(?:isn't|doesn't|does not|can't|cannot|fails?|contradicts?)",
    rf"\b({LABEL})\W{{1,4}}(?:(?:no|nope|nein)(?!\s*,|\s+wait)|wrong|incorrect|false|falsch|faux)\b",
    rf"\b({LABEL})[^\w\n]{{0,3}}[✗✘❌×]|[✗✘❌][^\w\n]{{0,3}}({LABEL})\b")), re.IGNORECASE)
_RIGHT = re.compile("|".join((
    rf"(?<!\w)({LABEL})(?:\W{{0,3}}\s+(?:is|must be|would be|ist)\s+(?:the\s+)?|\W{{1,4}}(?:\d+\W+)?)"
    r"(?:correct|right|best|true|yes|answer|korrekt|richtig|ja)\b",
    rf"(?<!\w)({LABEL})[^\w\n]{{0,3}}[✓✔✅]|[✓✔✅][^\w\n]{{0,3}}({LABEL})\b")))
_CHOSEN = re.compile(
    r"(?i:\b(?:so|thus|hence|therefore|choose|pick|select|go with|say|it's|it is|elimination|leaves|matches|"
    r"must be|(?:option|choice) is|richtig ist|letter)\b|=>|→|选择|选项|选)"
    rf"(?:\W|(?i:\b(?:it|is|must|be|option|choice|the|answer|letter|是|为)\b)){{0,6}}?(?:{_OPTION}|"
    r"(?<!\w)([a-z](?=[).:]?\s*(?:\n|$))))")
_LAST = re.compile(rf"(?:^|[.!?]\s|\n|\b[Nn]o,\s)\s*[^\w\s,]{{0,4}}({LABEL})[\s.)*\]]*$")
_NAMED = re.compile(rf"(?i:\b(?:option|choice|is))\W{{0,4}}({LABEL}|[a-z])"
                    r"(?=\W*(?:$|\n|[.:)!]|,\s(?![A-Z]\b)|\s(?:because|since|as)\b))")
_LISTED = re.compile(rf"\(({LABEL})\)|\*\*\(?([A-HJ-Z]|\d{{1,2}})\b|(?m:^)[^\w\n]*({LABEL})(?=[.):]|\s*$)"
                     rf"|\b({LABEL})\)|(?:(?m:^)|(?<=\s))\(?([a-z])\)")
# What offers another option beside one.
_SECOND = re.compile(
    r"\W{0,3}\s?(?:,|/|&|\b(?i:or|and|oder|und|ou|et|o|y)\b)\W{0,3}"
    rf"(?:(?i:option|choice|maybe|perhaps|possibly|even|also|it could be)\s)*\W?{_OPTION}")
_FIRST = re.compile(rf"(?<!\w)({LABEL})\b\W{{0,3}}\s?(?:/|\b(?i:or|oder|ou|o)\b)\W{{0,3}}"
                    r"(?:(?i:option|choice)\s)?\W?$")
# Right behind a cue a small letter is one where nothing follows: "the answer is a dog".
_BEHIND = re.compile(rf"[^\w\n-]{{0,4}}(?:{_OPTION}|(?<!\w)([a-z](?=[).:](?!\w)|\W*(?:\n|$))))")
_BEGINS = re.compile(
    r"\W{0,6}([A-Za-z]|\d{1,2})(?:\W*$|(?=\s*[.):\]、](?!\d)|\s+[-–—(]|\s*,\s+(?:not|because|since)|"
    r"\s+(?:because|since|rather|instead|not|is the|would be|it is)\b))")


# What options are called


def label_of(answer: str) -> str:
    """B of "b", "(B)" or "B) Paris"; 3 of "3". "": none"""
    match = re.match(r"\W*(?:([A-Za-z])(?![^\W_])|(\d{1,2})(?!\w))", answer)
    return (match[1] or match[2]).upper() if match else ""


def is_option(found: str, letter: str, labels: list[str]) -> bool:
    """Whether what a reply chose, a letter or one of the labels, is the option with a letter."""
    place = ord(letter[0]) - ord("A")
    return found == letter or 0 <= place < len(labels) and found == labels[place]


def settle(rows: list[dict]) -> str:
    """Make the answers of all rows letters, and name the "labels" of options that are numbered.  -> how they
    were read, where they are numbers

    An answer is a label of the row's options, in all rows; else a letter; else a number that counts from 0 or
    from 1. ValueError: which of these it is cannot be told
    """
    remark = ""
    found = [row["answers"] for row in rows]
    options = [options_of(row) for row in rows]
    pairs = [*zip(found, options, strict=True)]
    are_numbers = {label.isdigit() for labels in found for label in labels}
    if all(set(labels) <= set(known) for labels, known in pairs):
        places = [[known.index(label) for label in labels] for labels, known in pairs]
        if True in are_numbers:
            remark = "answers that are numbers are labels of options"
    elif are_numbers == {False}:
        places = [[ord(label) - ord("A") for label in labels] for labels in found]
    elif are_numbers == {True}:
        first = counts_from([(labels, len(known) or number_of_options(row))
                             for row, (labels, known) in zip(rows, pairs, strict=True)])
        remark = f"answers are numbers of options from {first}"
        places = [[int(label) - first for label in labels] for labels in found]
    else:
        raise ValueError("answers are letters in some rows and numbers in others; expected one kind, or each "
                         "row's options with labels (a column, or lines of the prompt)")
    for row, known, at in zip(rows, options, places, strict=True):
        row["answers"] = [chr(ord("A") + place) for place in at]
        row["labels"] = known if known and all(label.isdigit() for label in known) else []
    return remark


def counts_from(pairs: list[tuple[list[str], int]]) -> int:
    """0 or 1, the number of the first option: of pairs of a row's answers and its number of options."""
    answers = [(int(label), count) for labels, count in pairs for label in labels]
    has_zero = any(number == 0 for number, _ in answers)
    has_last = any(number == count for number, count in answers if count)
    if has_zero == has_last:
        raise ValueError("answers are numbers, and nothing tells whether they count from 0 or from 1; "
                         "expected letters, a 0 in some row, or each row's options with labels (a column, or "
                         "lines of the prompt)")
    return int(has_last)


def number_of_options(data: dict) -> int:
    """Of a column `choices` or `options` that is a list of texts. 0: there is none"""
    found = [data["row"].get(name) for name in ("choices", "options", "endings") if "row" in data]
    return next((len(texts) for texts in found if isinstance(texts, list)), 0)


def options_of(data: dict) -> list[str]:
    """The labels of a row's options: of a column with them (a struct with `label`, an object of options, a
    list of objects with `label` or `key`), else of lines of the prompt ("A. Paris", "(1) Paris"). []: none"""
    for value in data.get("row", {}).values():
        labels = None
        if isinstance(value, dict):
            labels = value.get("label") or value.get("labels") or [*value]
        elif isinstance(value, list) and all(isinstance(option, dict) for option in value):
            labels = [option.get("label") or option.get("key") or option.get("id") for option in value]
        if isinstance(labels, list) and len(labels) > 1:
            labels = [str(label).strip("(). ").upper() for label in labels]
            if all(re.fullmatch(LABEL, label) for label in labels):
                return labels
    listed = re.findall(r"(?:^|(?<=\s))\(?([A-Z]|\d{1,2})[.):]\s?(?=\S)", data.get("question", ""))
    for run in ([chr(ord("A") + k) for k in range(26)], [*map(str, range(1, 27))], [*map(str, range(26))]):
        labels = []
        for label in listed:
            if label == run[min(len(labels), 25)]:
                labels.append(label)
        if len(labels) > 1:
            return labels
    return []


# What a reply chooses


def chosen(text: str, marked: bool, numbered: bool) -> str | None:
    """The one option that a text chooses; None: none, or several. numbered: options may be numbers."""
    text = spaced(unicodedata.normalize("NFKC", text[-MOST_TEXT:]))
    text = without_tags(text).strip()
    rejected = {match.end(match.lastindex) for match in _REJECTED.finditer(text)}

    def usable(match) -> bool:
        """Whether it is a label, is not refused, and no other option is offered beside it."""
        start, end = match.span(match.lastindex)
        if end in rejected or text[start].isdigit() and not numbered:
            return False
        first, second = _FIRST.search(text[max(start - 20, 0):start]), _SECOND.match(text, end)
        return (not first or _place(first, start) in rejected) and (not second or second.end(1) in rejected)

    verdicts = [match for match in _RIGHT.finditer(text) if usable(match)]
    right = {_letter(match) for match in verdicts}
    begins = _BEGINS.match(text)
    is_alone = begins and not text[begins.end():].strip(" .)]*\"'")
    if begins and (is_alone or marked or text[begins.start(1)].isupper()):
        letter = _letter(begins)
        is_list = _lists_next(text[begins.end():], letter) or letter == "I" and not is_alone
        if (marked or is_alone) and (is_list or not usable(begins)):
            return right.pop() if len(right) == 1 else None
        if not is_list and usable(begins) and not right - {letter}:
            return letter
    for cue, end in cues(text, letters=False):
        match = _BEHIND.match(text, end)
        if cue[0].lower().endswith("answers") or not match or match.end(match.lastindex) in rejected:
            continue
        if taken_back := WITHDRAWN.search(text, match.end()):
            return chosen(text[taken_back.end():], True, numbered)
        later = {_letter(verdict) for verdict in verdicts if verdict.start() >= match.start()}
        if len(later) == 1:
            return later.pop()
        if _lists_next(text[match.end():], _letter(match)):
            continue
        return _letter(match) if usable(match) else None
    if right:
        return right.pop() if len(right) == 1 else None
    for pattern in (_CHOSEN, _LAST, _NAMED, _LISTED):
        found = [match for match in pattern.finditer(text) if match.end(match.lastindex) not in rejected
                 and (numbered or text[match.start(match.lastindex)].isalpha())]
        if pattern is _LISTED:
            found = without_list(found)
        if not found:
            continue
        several = pattern is not _CHOSEN and len({_letter(match) for match in found}) > 1
        return _letter(found[-1]) if usable(found[-1]) and not several else None
    return None


def _letter(match: re.Match) -> str:
    return match[match.lastindex].upper()


def _place(first: re.Match, start: int) -> int:
    """Where the label of a match in the text before `start` ends."""
    return start - len(first.string) + first.end(1)


def _lists_next(rest: str, letter: str) -> bool:
    """Whether a text goes on with the next option: "A. Rome, B. Paris"."""
    after = chr(ord(letter) + 1) if letter.isalpha() else str(int(letter) + 1)
    return re.search(rf"(?:^|[\s,;(]){after}\s?[.):]", rest) is not None


def without_list(found: list[re.Match]) -> list[re.Match]:
    """What is chosen after a list of all options: "A) 3 B) 4 C) 5" chooses none."""
    letters = [_letter(match) for match in found]
    if len(set(letters)) < 2 or letters[0] not in ("A", "0", "1"):
        return found
    count = 1
    while count < len(letters) and ord(letters[count][-1]) == ord(letters[count - 1][-1]) + 1:
        count += 1
    return found[count:] if count > 1 else found
