"""The option that a text chooses, and what the options of a row are called.

    chosen("Answer: b. Option A is wrong.", marked=False, numbered=False)     # "B"
    chosen("A) yes B) no C) no", marked=False, numbered=False)                # "A"
    chosen("It is A or B", marked=False, numbered=False)                      # None: it offers two
"""

from __future__ import annotations

import re

from envs.answers import numbers

LABEL = r"(?:[A-Z]|\d{1,2})"
# "The answer is A because", but not "A train" or "so I".
_ARTICLE = r"(?<=[AI])\s+(?!(?:because|since|as|is|was|and|or|which|not|for|due|but|with|by|from)\b)[a-z]"
_WRONG = "wrong|incorrect|false|out|excluded|eliminated|impossible|nicht|falsch|incorrecta|faux"
_REJECTED = re.compile(
    r"\b(?:not|n't|neither|nor|rule out|ruling out|eliminate|exclude|reject|unlike|instead of|rather than)\s+"
    rf"(?:(?:choose|pick|be|is|option|choice|answer)\s+){{0,4}}\W?({LABEL})\b"
    rf"|\b({LABEL})\W{{0,3}}\s+(?:is|was|seems|looks|must be|would be|ist|est|es)\s+(?:\w+\s+)?"
    rf"(?:not|n't|{_WRONG})\b"
    rf"|\b({LABEL})\W{{1,4}}(?:no|nope|wrong|incorrect|false|nein|falsch|faux)\b", re.IGNORECASE)
_CHOSEN = re.compile(
    r"(?i:\b(?:so|thus|hence|therefore|choose|pick|select|go with|is|option|choice)\b|=>|→)\W*"
    rf"(?:(?:it|is|must|be|option|choice|the|answer)\W+){{0,4}}\(?({LABEL}(?!['’]|\w|{_ARTICLE})|[a-z](?=[).:]?\s*(?:\n|$)))"
    rf"|\b({LABEL})(?:\W{{0,3}}\s+is\s+(?:the\s+)?|\W{{1,4}})(?:correct|right|best|true|yes|richtig|ja)\b")
_LISTED = re.compile(rf"\(({LABEL})\)|\*\*\(?({LABEL})\b|(?m:^)[^\w\n]*({LABEL})(?=[.):]|\s*$)"
                     rf"|\b({LABEL})\)|(?:(?m:^)|(?<=\s))\(?([a-z])\)")
_ALTERNATIVE = re.compile(r"\W{0,3}\s?(?:,|/|&|\b(?i:or|and|oder|und|ou|et|o|y)\b)\W*"
                          r"(?:(?i:option|choice|maybe|perhaps|possibly|even|also|it could be)\s)*"
                          rf"\W?({LABEL})\b(?!['’])")
_FIRST = re.compile(rf"(?<!\w)({LABEL})\b\W{{0,3}}\s?(?:/|\b(?i:or|oder|ou|o)\b)\W*"
                    r"(?:(?i:option|choice)\s)?\W?$")
# A small letter is one where nothing follows ("Answer: b"): "the answer is a dog" has none.
_CUED = {numbered: re.compile(rf"(?:[\W_]|(?<!\w)(?i:{numbers.LINK})(?!\w)|[是为為はです은는]){{0,40}}?"
                              rf"(?<![A-Za-z0-9_])({label}(?!['’]|[A-Za-z0-9_]|{_ARTICLE})|[a-z](?=[).:](?!\w)|\W*(?:\n|$)))")
         for numbered, label in ((False, "[A-Z]"), (True, LABEL))}


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
        first = counts_from(pairs)
        remark = f"answers are numbers of options from {first}"
        places = [[int(label) - first for label in labels] for labels in found]
    else:
        raise ValueError("answers are letters in some rows and numbers in others; expected one kind, or each "
                         "row's options with labels (a column, or lines of the prompt)")
    for row, known, at in zip(rows, options, places, strict=True):
        row["answers"] = [chr(ord("A") + place) for place in at]
        row["labels"] = known if known and all(label.isdigit() for label in known) else []
    return remark


def counts_from(pairs: list[tuple[list[str], list[str]]]) -> int:
    """0 or 1, the number of the first option: of pairs of a row's answers and its options' labels."""
    answers = [(int(label), len(known)) for labels, known in pairs for label in labels]
    has_zero = any(number == 0 for number, _ in answers)
    has_last = any(number == count for number, count in answers if count)
    if has_zero == has_last:
        raise ValueError("answers are numbers, and nothing tells whether they count from 0 or from 1; "
                         "expected letters, a 0 in some row, or each row's options with labels (a column, or "
                         "lines of the prompt)")
    return int(has_last)


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
    text = text[-numbers.MOST_TEXT:]
    label = LABEL if numbered else "[A-Z]"
    rejected = {match.end(match.lastindex) for match in _REJECTED.finditer(text)}

    def alone(match) -> bool:
        """Whether no other option is offered beside it."""
        start, end = match.span(match.lastindex)
        first, second = _FIRST.search(text[:start]), _ALTERNATIVE.match(text, end)
        return (first is None or first.end(1) in rejected) and (second is None or second.end(1) in rejected)

    lone = re.fullmatch(rf"\W*({label})\W*", text, re.IGNORECASE)
    lone = lone or marked and re.match(rf"\W*({label})(?=\s*[.):]|\s+\()", text, re.IGNORECASE)
    if lone:
        return lone[1].upper() if alone(lone) else None
    for cue in [*numbers.CUE.finditer(text)][::-1]:
        match = _CUED[numbered].match(text, cue.end())
        if match is None:
            continue
        if numbers.WITHDRAWN.search(text, match.end()):
            return chosen(text[match.end():], False, numbered) or match[1].upper()
        return match[1].upper() if alone(match) else None
    for pattern in (_CHOSEN, _LISTED):
        found = [match for match in pattern.finditer(text) if match.end(match.lastindex) not in rejected
                 and (numbered or match[match.lastindex].isalpha())]
        if pattern is _LISTED:
            found = without_list(found)
        if not found:
            continue
        verdicts = [match for match in found if pattern is _LISTED or match.lastindex == 2]  # "A: right"
        several = found[-1] in verdicts and len({match[match.lastindex] for match in verdicts}) > 1
        return found[-1][found[-1].lastindex].upper() if alone(found[-1]) and not several else None
    return None


def without_list(found: list[re.Match]) -> list[re.Match]:
    """What is chosen after a list of all options: "A) 3 B) 4 C) 5" chooses none."""
    letters = [match[match.lastindex] for match in found]
    if len(set(letters)) < 2 or letters[0] not in ("A", "0", "1"):
        return found
    count = 1
    while count < len(letters) and ord(letters[count][-1]) == ord(letters[count - 1][-1]) + 1:
        count += 1
    return found[count:] if count > 1 else found
