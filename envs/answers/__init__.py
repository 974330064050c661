r"""Whether a reply's answer is the right one: the checks of `--env rows`.

    check = CHECKS["number"]
    check.equal(check.marked("So 6 x 7 is 42.", "auto"), "42", {})    # True

What in a reply is its answer: the last <answer>...</answer>, else the last \boxed{...}, else what follows the
last ####, else what the check looks for (the last number, say). A mark may stand within another one.
"""

from __future__ import annotations

import os
import re

from envs import MAX_REPLY
from envs.answers import choices, final_number, numbers, programs
from envs.answers.cues import CUE
from envs.answers.plain_text import CHINESE, KOREAN, composed, plain, without_markdown
from envs.workers import shared_pool

WORKER_SECONDS = 2.0  # of processor time, for sympy or a regular expression in a process of its own [s]
MOST_MATH = 2000  # characters that sympy reads, from the end of a reply
REGEX_SECONDS = 0.08  # that a search may take by itself; its preparation is not in it [s]
PATTERN_SECONDS = 1.0  # that a regular expression may take at the start of a run [s]
MOST_ANSWER = MAX_REPLY  # characters; no reply could have a longer answer in it

# Where an answer stands

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox(?:\[[^\]\n]{0,20}\])?|bbox(?:\[[^\]\n]{0,40}\])?|"
                  r"f?colorbox(?:\{[^{}\n]{0,20}\}){1,2})\s{0,3}(\{|[A-Za-z0-9](?![A-Za-z0-9.,]))")
_BRACE = re.compile(r"(?<!\\)[{}]")
_HEADING = re.compile(r"\W*(?:steps?|parts?|final|answer|solution|result|conclusion|explanation|summary|"
                      r"check|calculation|verification|notes?|approach|analysis|cases?|examples?)\b",
                      re.IGNORECASE)


def tagged(text: str) -> str | None:
    """The inside of the last <answer>...</answer>."""
    tags = [*_TAG.finditer(text)]
    for opening, closing in zip(tags[-2::-1], tags[:0:-1], strict=True):
        if closing[1] and not opening[1]:
            return text[opening.end():closing.start()]
    return None


def boxed(text: str) -> str | None:
    r"""The inside of the last \boxed{...}, whose braces are balanced; \fbox{...} and \boxed 4 as well."""
    boxes = [*_BOX.finditer(text)]
    if not boxes or boxes[-1][1] != "{":
        return boxes[-1][1] if boxes else None
    begin = boxes[-1].end()
    inside = _balanced(text, begin)
    if inside is not None and len(boxes) > 1:  # two boxes with "or", "and" or a comma between: both
        first = _balanced(text, boxes[-2].end())
        between = "" if first is None else text[boxes[-2].end() + len(first) + 1:boxes[-1].start()]
        if match := re.fullmatch(r"(?:\\text|[\s{}$])*(or|and|,|&)[\s{}$]*", between[:30]):
            return f"{first} or {inside}" if match[1] == "or" else f"{first}, {inside}"
    return inside


def _balanced(text: str, begin: int) -> str | None:
    """What stands before the brace that closes the one before `begin`."""
    depth = 1
    for match in _BRACE.finditer(text, begin):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return text[begin:match.start()]
    return None


def after_hashes(text: str, to_end: bool = False) -> str | None:
    """What follows the last ####, unless it is a heading ("#### Step 2") or a picture made of #.

    to_end: only where nothing comes after that line.
    """
    before, hashes, rest = text.rpartition("####")
    rest, is_picture = rest.strip(), not re.match(r"\s*[\w$\\(+-]", rest) or before[-1:] in ("#", ".")
    if not hashes or is_picture or _HEADING.match(rest) or to_end and "\n" in rest:
        return None
    return rest.splitlines()[0]


def extracted(text: str, how: str) -> str | None:
    """What in a reply is its answer; None: it is not marked in this way (auto: in any)."""
    if how == "whole":
        return text.strip()
    if how == "last_number":
        return final_number.number_in(text, last=True)
    found = None
    if how in ("auto", "answer_tag"):
        found = tagged(text)
    if how in ("auto", "boxed") and found is None:
        found = boxed(text)
    if how == "auto" and found is None:
        found = after_hashes(text)
    if found is not None:  # a mark within it
        found = after_hashes(found, to_end=True) or found
        if (inner := boxed(found)) is not None:
            found = inner
    return None if found is None else found.strip()


def gold_of(answer) -> str:
    """A right answer as a text; of GSM8K's worked solutions what follows the last ####."""
    return after_hashes(str(answer), to_end=True) or str(answer).strip()


# Comparing


class Check:
    """Compares replies with answers. The methods are total on replies."""

    most = MOST_ANSWER

    def size(self, answers: list[str]) -> int:
        """Characters, of which there may be `most`."""
        return max(map(len, answers))

    def check_answers(self, answers: list, row: dict) -> None:
        """ValueError where an answer cannot be compared with anything."""

    def settle(self, rows: list[dict]) -> str:
        """Make the answers of all rows (their "answers") what replies are compared with, where only all rows
        together tell what they mean.  -> what a run says about that. ValueError: they do not tell it"""
        return ""

    def marked(self, text: str, how: str, data: dict | None = None) -> str | None:
        """What in a reply is its answer; None: nothing is."""
        found = extracted(text, how)
        return text.strip() or None if found is None and how == "auto" else found

    def equal(self, found: str, answer, data: dict) -> bool:
        raise NotImplementedError

    def right(self, found: str, data: dict) -> bool:
        """Whether it is one of the answers."""
        return any(self.equal(found, answer, data) for answer in data["answers"])


class Exact(Check):
    """The same text, spaces aside, and what sets it (bold, a formula's \\text). TRUE is true."""

    def equal(self, found, answer, data):
        one, gold = plain(found).split(), plain(gold_of(answer)).split()
        if gold in (["true"], ["false"]):
            one = [word.lower() for word in one]
        return one == gold


class Number(Check):
    """Equal as numbers: 1,234 is 1234, $5 is 5, 3/4 is 0.75, 10^3 is 1000 (final_number.py, numbers.py)."""

    def check_answers(self, answers, row):
        for answer in answers:
            if final_number.number_of(gold_of(answer)) is None:
                raise ValueError(f"answer {answer!r:.80}: expected a number")

    def marked(self, text, how, data=None):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        if found is None:
            return final_number.number_in(text)
        return final_number.number_in(found, marked=True)

    def equal(self, found, answer, data):
        one, gold = final_number.number_of(found), final_number.number_of(gold_of(answer))
        return bool(one and gold) and numbers.equal(one, gold, data.get("question", ""))


class Choice(Check):
    """The letter of an option (choices.py), or its number where the options are numbered."""

    def check_answers(self, answers, row):
        for answer in answers:
            if not self.label(answer):
                raise ValueError(f"answer {answer!r:.80}: expected the letter or number of an option")

    @staticmethod
    def label(answer) -> str:
        return choices.label_of(plain(gold_of(answer)))

    def settle(self, rows):
        for row in rows:
            row["answers"] = [self.label(answer) for answer in row["answers"]]
        return choices.settle(rows)

    def marked(self, text, how, data=None):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        numbered = bool((data or {}).get("labels"))
        return choices.chosen(plain(text if found is None else found), found is not None, numbered)

    def equal(self, found, answer, data):
        return choices.is_option(found, self.label(answer), data.get("labels") or [])


class Math(Check):
    """Equal as mathematics (math-verify): intervals, sets, matrices and formulas too."""

    def marked(self, text, how, data=None):
        found = extracted(text, how)
        if found is None:
            return text[-MOST_MATH:].strip() or None if how == "auto" else None
        return f"\\boxed{{{found}}}" if len(found) <= MOST_MATH else None

    def equal(self, found, answer, data):
        return self.right(found, {"answers": [answer]})

    def right(self, found, data):
        golds = [gold_of(answer) for answer in data["answers"]]
        try:
            return in_worker("math_verify", WORKER_SECONDS, math_equal, found, golds)
        except (RuntimeError, ValueError):  # too long, too much memory, a number of too many digits
            return False


def in_worker(module: str, seconds: float, function, *given):
    """What a function that uses a module gives, in a process with limits of time and memory.

    RuntimeError: it went beyond them. WorkerError: there is no such process here, which is no verdict.
    """
    pool = shared_pool(min(os.cpu_count() or 1, 16), "envs.answers", module)
    return pool.submit(function, *given, seconds=seconds).result()


def math_equal(reply: str, golds: list[str]) -> bool:
    """Whether a reply is equal to an answer; called in a process of its own, since sympy may not end."""
    from math_verify import parse, verify

    if is_denied(reply, golds):
        return False
    # A bare (1,2] is no formula to it: what follows "the answer is", or all without words, is made one.
    reply = without_markdown(reply)
    cues = [*CUE.finditer(reply)]
    bare = re.sub(r"^(?:\s|:|is\b|=)+|[\s.]+$", "", reply[cues[-1].end():] if cues else reply)
    forms = [reply]
    if not re.search(r"(?<!\\)\b[A-Za-z]{2}|\$|\\(?:boxed|\(|\[)", bare):
        forms.insert(0, f"${bare}$")
    if pair := _PAIR.search(bare):  # The point is (1, 2).
        forms.insert(0, f"${pair[0]}$")
    found = next(filter(None, (parse(form, parsing_timeout=None) for form in forms)), [])
    for gold in golds:
        if "\\boxed" not in gold:
            gold = f"${gold.replace(chr(92) + '$', '').replace('$', '')}$"
        if verify(parse(gold, parsing_timeout=None), found, timeout_seconds=None):
            return True
    return False


_PAIR = re.compile(r"[(\[][^()\[\]\n$]{1,50},[^()\[\]\n$]{1,50}[)\]](?=[\s.]*$)")
_DENIED = re.compile(r"(?:\b(?:not|neither|nor)|n't(?: (?:think|be|believe) (?:it is|it's|the answer is))?)"
                     r"\s\$?[-\d]\S*[\s.]*$", re.IGNORECASE)
_OFFERED = re.compile(r"\bbetween \S{1,30} and \S{1,30}[\s.]*$|"
                      r"\d\S{0,20} (?:or|to|oder) \$?-?\d\S{0,20}[\s.]*$", re.IGNORECASE)


def is_denied(reply: str, golds: list[str]) -> bool:
    """Whether a reply says what the answer is not, or ends in one of two numbers where no answer is two."""
    is_two = any(re.search(r"\b(?:or|to)\b", gold) for gold in golds)
    is_unequal = re.search(r"\\neq?\b|≠", reply) and not any("ne" in gold for gold in golds)
    return bool(_DENIED.search(reply) or is_unequal or not is_two and _OFFERED.search(reply))


class Contains(Check):
    """The answer occurs in the reply as a word, words or a whole number, in upper or lower case."""

    def equal(self, found, answer, data):
        reply, wanted = words_of(found), words_of(gold_of(answer))
        if re.fullmatch(r"[-+\u2212]?[\d.,]*\d", wanted) and (number := final_number.number_of(wanted)):
            return any(other.amount == number.amount for other in numbers.all_of(reply))
        before, behind = r"(?<!\w)", r"(?!\w)"
        if re.match(r"[-+$€£¥]?\.?\d", wanted):  # 4 apples are not in 14, 3.4, -4, 1/4 or 2^4 apples
            before = r"(?<!\w)(?<!\d[.,])(?<![.\-+/^\u2212])"
        elif re.match(f"[{UNSPACED}]", wanted):
            before = ""
        if wanted[-1:].isdigit():  # nor $4 in $45, $4.5, $4/5
            behind = r"(?!\w)(?![.,]\d)(?!\s?[%^/])"
        elif re.match(f"[{UNSPACED}{KOREAN}]", wanted[-1:]):  # Korean has particles behind a word
            behind = ""
        return re.search(before + re.escape(wanted) + behind, reply) is not None


UNSPACED = CHINESE + "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese and Khmer too


def words_of(text: str) -> str:
    """In one case, composed, with single spaces, without what sets words (**bold**)."""
    return composed(" ".join(without_markdown(composed(text)).casefold().split()))


class Regex(Check):
    """The answer is a regular expression that is found in the reply."""

    def check_answers(self, answers, row):
        for answer in map(str, answers):
            try:
                in_worker("regex", PATTERN_SECONDS, regex_found, answer, [answer])
            except ValueError as error:
                raise ValueError(f"answer {answer!r:.80}: expected a regular expression ({error})") from error
            except RuntimeError as error:  # its limits
                raise ValueError(f"answer {answer!r:.80}: expected a smaller regular expression "
                                 f"({error})") from error

    def equal(self, found, answer, data):
        try:  # as it stands, and without what sets it
            return in_worker("regex", WORKER_SECONDS, regex_found, composed(str(answer)),
                             [composed(found), plain(found)])
        except (RuntimeError, ValueError):
            return False


def regex_found(pattern: str, texts: list[str]) -> bool:
    """Whether a regular expression is found in one of the texts. ValueError: it is none

    In a process of its own: (a{65535}){65535} takes all memory before it searches, and a long word with
    repetitions minutes, which the time limit of a search does not see.
    """
    import regex  # searches within a time limit; transformers needs it too

    try:
        compiled = regex.compile(pattern, cache_pattern=False)  # or many large ones would stay
        return any(compiled.search(text, timeout=REGEX_SECONDS / 2) for text in dict.fromkeys(texts))
    except regex.error as error:
        raise ValueError(str(error)) from error
    except TimeoutError:
        return False


class Python(Check):
    """Tests run without an error after the reply's code: the answer is their text, or a list of texts."""

    most = programs.MOST_TESTS

    def size(self, answers):
        return sum(map(len, answers))

    def check_answers(self, answers, row):
        programs.test_module(answers, row)

    def marked(self, text, how, data=None):
        inside = tagged(text)
        fenced = "```" in text or "~~~" in text
        return programs.code_of(_TAG.sub("\n", text) if fenced or inside is None else inside, data or {})

    def right(self, found, data):
        return programs.passes(found, data)


CHECKS = {"exact": Exact(), "number": Number(), "choice": Choice(), "math": Math(), "contains": Contains(),
          "regex": Regex(), "python": Python()}
