r"""Whether a reply's answer is the right one: the checks of `--env rows`.

    check = CHECKS["number"]
    check.equal(check.marked("So 6 x 7 is 42.", "auto"), "42", {})    # True

What in a reply is its answer: the last <answer>...</answer>, else the last \boxed{...}, else what follows the
last ####, else what the check looks for (the last number, say).
"""

from __future__ import annotations

import ast
import os
import re
from fractions import Fraction

from envs.code import testing
from envs.workers import shared_pool

MATH_SECONDS = 2.0  # that sympy may take for a reply [s]
REGEX_SECONDS = 0.2  # that a search may take [s]
MOST_DIGITS = 100  # of a number; also its largest exponent

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+\u2212]?)\s?[$\u20ac\xa3\xa5]?\s?(?:(?P<whole>\d+)\s)?(?P<number>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})\b)?(?:\s?/\s?(?P<denominator>\d+))?\s?(?P<percent>%)?")
_LETTER = re.compile(r"(?i:answer|option|choice)\W*(?i:is|:)?\W*\(?([A-Z])\b(?!['\u2019])")
_MARKED = re.compile(r"\(([A-Z])\)|\*\*([A-Z])\b|(?m:^)[^\w\n]*([A-Z])(?=[.):]|\s*$)")
_CODE = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def tagged(text: str) -> str | None:
    """The inside of the last <answer>...</answer>."""
    tags = [*_TAG.finditer(text)]
    for opening, closing in zip(tags[-2::-1], tags[:0:-1], strict=True):
        if closing[1] and not opening[1]:
            return text[opening.end():closing.start()]
    return None


def boxed(text: str) -> str | None:
    r"""The inside of the last \boxed{...}, whose braces are balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[begin + 1:place]
    return None


def extracted(text: str, how: str) -> str | None:
    """What in a reply is its answer; None: it is not marked in this way (auto: in any)."""
    found = None
    if how in ("auto", "answer_tag"):
        found = tagged(text)
    if how in ("auto", "boxed") and found is None:
        found = boxed(text)
    if how == "auto" and found is None and "####" in text:
        found = (text.rpartition("####")[2].strip().splitlines() or [""])[0]
    if how == "last_number":
        found = last_number(text)
    if how == "whole":
        found = text
    return None if found is None else found.strip()


def last_number(text: str) -> str | None:
    found = [match[0] for match in _NUMBER.finditer(_plain_latex(text))]
    return found[-1] if found else None


def _plain_latex(text: str) -> str:
    r"""1{,}234, \$5, 40\% and \frac{1}{2} as 1,234, $5, 40% and 1/2."""
    text = re.sub(r"\\[dt]?frac\s?\{\s?(-?\d+)\s?\}\s?\{\s?(\d+)\s?\}", r" \1/\2", text)
    return re.sub(r"\\[!,;]|\\(?=[$%])", "", text.replace("{,}", ","))


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The last number of a text, and whether it is a percentage. None: there is none, or none so long."""
    matches = [*_NUMBER.finditer(_plain_latex(text))]
    if not matches or len(matches[-1][0]) > MOST_DIGITS:
        return None
    match = matches[-1]
    value = Fraction(match["number"].replace(",", ""))
    denominator = int(match["denominator"] or 1)
    if not denominator or abs(int(match["exponent"] or 0)) > MOST_DIGITS:
        return None
    value = value * Fraction(10) ** int(match["exponent"] or 0) / denominator
    if match["whole"] and match["denominator"] and value < 1:  # 2 1/2
        value += int(match["whole"])
    return (-value if match["sign"] in ("-", "\u2212") else value), bool(match["percent"])


def gold_of(answer) -> str:
    """A right answer as a text; of GSM8K's worked solutions what follows ####."""
    return str(answer).rpartition("####")[2].strip()


class Check:
    """Compares replies with answers. The methods are total on replies."""

    def check_answers(self, answers: list, row: dict) -> None:
        """ValueError where an answer cannot be compared with anything."""

    def marked(self, text: str, how: str) -> str | None:
        """What in a reply is its answer; None: nothing is."""
        found = extracted(text, how)
        return text.strip() or None if found is None and how == "auto" else found

    def equal(self, found: str, answer, data: dict) -> bool:
        raise NotImplementedError


class Exact(Check):
    """The same text, spaces aside."""

    def equal(self, found, answer, data):
        return found.split() == gold_of(answer).split()


class Number(Check):
    """Equal as numbers: 1,234 is 1234, $5 is 5, 3/4 is 0.75, and 45% is both 45 and 0.45."""

    def check_answers(self, answers, row):
        for answer in answers:
            if number_of(gold_of(answer)) is None:
                raise ValueError(f"answer {answer!r:.80}: expected a number")

    def marked(self, text, how):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        return last_number(text if found is None else found)

    def equal(self, found, answer, data):
        read = number_of(found)
        if read is None:
            return False
        (value, is_percent), (gold, gold_is_percent) = read, number_of(gold_of(answer))
        same = {value}
        if is_percent and not gold_is_percent:
            same.add(value / 100)
        if gold_is_percent and not is_percent:
            same.add(value * 100)
        return any(abs(one - gold) <= abs(gold) / 10**6 for one in same)


class Choice(Check):
    """The letter of an option; an answer may be its number from 0."""

    @staticmethod
    def letter(answer):
        if isinstance(answer, int) or str(answer).isdigit():
            return chr(ord("A") + int(answer)) if int(answer) < 26 else ""
        match = re.match(r"\(?([A-Za-z])\)?(?![A-Za-z])", gold_of(answer))
        return match[1].upper() if match else ""

    def check_answers(self, answers, row):
        for answer in answers:
            if not self.letter(answer):
                raise ValueError(f"answer {answer!r:.80}: expected a letter, or a number from 0")

    def marked(self, text, how):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        text = (text if found is None else found).strip()
        if match := re.fullmatch(r"\W*(?:\\text\{)?([A-Za-z])\W*", text):
            return match[1].upper()
        for pattern in (_LETTER, _MARKED):
            if letters := [max(match.groups(default="")) for match in pattern.finditer(text)]:
                return letters[-1]
        return None

    def equal(self, found, answer, data):
        return found == self.letter(answer)


class Math(Check):
    """Equal as mathematics (math-verify): intervals, sets, matrices and formulas too."""

    def marked(self, text, how):
        found = extracted(text, how)
        return text.strip() or None if found is None and how == "auto" else found and f"\\boxed{{{found}}}"

    def equal(self, found, answer, data):
        pool = shared_pool(min(os.cpu_count() or 1, 16), "math_verify", "sympy")
        try:
            return pool.submit(math_equal, found, gold_of(answer), seconds=MATH_SECONDS).result()
        except RuntimeError:  # it took too long, or too much memory
            return False


class Contains(Check):
    """The answer occurs in the reply as a word or words, in upper or lower case."""

    def equal(self, found, answer, data):
        reply, wanted = " ".join(found.casefold().split()), " ".join(gold_of(answer).casefold().split())
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", reply) is not None


class Regex(Check):
    """The answer is a regular expression that is found in the reply."""

    def check_answers(self, answers, row):
        import regex  # searches within a time limit; transformers needs it too

        for answer in answers:
            try:
                regex.compile(str(answer))
            except regex.error as error:
                raise ValueError(f"answer {answer!r:.80}: expected a regular expression ({error})") from error

    def equal(self, found, answer, data):
        import regex

        try:
            return regex.search(str(answer), found, timeout=REGEX_SECONDS) is not None
        except TimeoutError:
            return False


class Python(Check):
    """Tests run without an error after the reply's code: the answer is their text, or a list of texts."""

    def check_answers(self, answers, row):
        try:
            module_of(answers, str(row.get("entry_point", "")))
        except SyntaxError as error:
            raise ValueError(f"tests that are not Python ({error})") from error

    def marked(self, text, how):
        blocks = _CODE.findall(text)
        return (blocks[-1] if blocks else text).strip() or None

    def passes(self, found, data, timeout) -> bool:
        module = module_of(data["answers"], data["entry_point"])
        results = testing.run_tests({"solution.py": found.encode(errors="replace")},
                                    {"test_row.py": module.encode()}, plain=True, timeout=timeout)
        return results == {"test_row.py::test_row": "PASSED"}


CHECKS = {"exact": Exact(), "number": Number(), "choice": Choice(), "math": Math(), "contains": Contains(),
          "regex": Regex(), "python": Python()}


def module_of(tests: list, entry_point: str) -> str:
    """A test module: what the tests say is one function. HumanEval's `check(candidate)` is called."""
    body = ast.parse("\n".join(map(str, tests))).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    calls = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    if names == ["check"] and not calls and entry_point:
        body += ast.parse(f"check({entry_point})").body
    stars = [node for node in body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    function = ast.parse("def test_row(): pass").body[0]
    function.body = [node for node in body if node not in stars] or function.body
    module = ast.Module([*ast.parse("from solution import *").body, *stars, function], [])
    return ast.unparse(ast.fix_missing_locations(module))


def math_equal(reply: str, gold: str) -> bool:
    """Whether a reply is equal to an answer; called in a process of its own, since sympy may not end."""
    from math_verify import parse, verify

    if "\\boxed" not in gold:
        gold = f"${gold.replace(chr(92) + '$', '').replace('$', '')}$"
    return bool(verify(parse(gold, parsing_timeout=None), parse(reply, parsing_timeout=None),
                       timeout_seconds=None))
