"""game_of_24: reach a target with each number once, or say that it cannot be done."""

from __future__ import annotations

import itertools
import math
import re

from envs import MAX_REPLY
from envs.countdown import Rules, expression, results, solve, steps_of, tree
from envs.logic.common import ARITHMETIC, Family, Unreadable, compute


class Game24(Family):
    name = "game_of_24"
    wordings = (
        "Numbers: {numbers}\nTarget: {target}\nOperators: {operators}\n\nWrite an expression with the value "
        "of the target that uses every number exactly once and no operators but these; parentheses are "
        "allowed. If there is no such expression, the answer is None. End with a code block (three "
        "backticks) that holds the answer and nothing else.",
        "Can {target} be made from the numbers {numbers}? Each has to be used exactly once, with the "
        "operators {operators} and parentheses alone. Division is exact. Put the expression, or the word "
        "None if it cannot be done, in a code block (between lines of three backticks) at the end.",
    )
    targets = (24, 36, 48, 60, 72, 100)
    may_fail = 0.25  # share of the draws that may turn out unsolvable, lest None be a good guess

    def draw(self, rng, config):
        operators, may_fail = rng.choice(("+-*/", "+-*", "+-")), rng.random() < self.may_fail
        for _ in range(100):  # sums alone seldom reach a target
            count = rng.randint(config.game_min_numbers, config.game_max_numbers)
            least, most = rng.choice((1, 2, 3, 5)), rng.randint(9, 20)
            numbers = [least, most, *(rng.randint(least, most) for _ in range(count - 2))]
            rng.shuffle(numbers)
            target = rng.choice(self.targets)
            if operators != "+-" or may_fail or signed_sum(numbers, target):
                return {"numbers": numbers, "target": target, "operators": operators, "may_fail": may_fail}
        return None

    def key(self, data):
        return sorted(data["numbers"]), data["target"], data["operators"]

    def complete(self, data, rng, config):
        numbers, target, operators, may_fail = data.values()
        found = find_expression(numbers, target, operators, rng, exhaustive=may_fail)
        if not found and not may_fail:
            return None
        return {"numbers": numbers, "target": target, "operators": operators, "answer": found or "None"}

    def fields(self, data):
        return {"numbers": " ".join(map(str, data["numbers"])), "target": str(data["target"]),
                "operators": " ".join(data["operators"])}

    def words(self, data):
        return "{operators} : {numbers} -> {target}".format(**self.fields(data))

    def vocabulary(self, config):
        return f"+ - * / ( ) : -> None {' '.join(map(str, (*range(1, 21), *self.targets)))}"

    def reference(self, data, style):
        if style == "chat":
            return f"```\n{data['answer']}\n```"
        return data["answer"].replace("(", "( ").replace(")", " )")

    def judge(self, text, data, style):
        answer = text.strip() if style == "words" else last_code_block(text)
        if answer.lower() == "none":
            return data["answer"] == "None"  # only ever so where an exhaustive search found nothing
        value, numbers, used = compute(answer, ARITHMETIC)
        return (sorted(numbers) == sorted(data["numbers"]) and used <= set(data["operators"])
                and value == data["target"])


INLINE = re.compile(r"(?<!`)(`{3,})([^`]+)\1")


def last_code_block(text: str) -> str:
    """The content of the last closed block of three or more backticks, less a language's name at its top."""
    block, still_open = closed_block(text.splitlines())
    if still_open and len(text) >= MAX_REPLY:  # cut off at its beginning, which may have been in a block
        block, _ = closed_block(["```", *text.splitlines()])
    if block is None:
        raise Unreadable
    named = any(block[1:]) and re.fullmatch(r"\s*[A-Za-z][\w+#.-]{0,19}\s*", block[0])
    return "\n".join(block[1:] if named else block).strip()


def closed_block(lines: list[str]) -> tuple[list[str] | None, bool]:
    """(lines of the last closed block, its first one what follows the fence; whether another is still open)

    A fence opens a block at the beginning or the end of a line, and as many backticks there close it.
    """
    found, block, fence = None, [], 0  # fence: backticks of the one that is open
    for line in map(str.strip, lines):
        before, after = len(line) - len(line.lstrip("`")), len(line) - len(line.rstrip("`"))
        if fence and max(before, after) >= fence:
            found, fence = (block if before >= fence else [*block, line.rstrip("`")]), 0
        elif fence:
            block.append(line)
        elif inline := INLINE.findall(line):
            found = [inline[-1][1]]
        elif max(before, after) >= 3:
            fence, block = max(before, after), [line.strip("`") if before >= 3 else ""]
    return found, fence > 0


def signed_sum(numbers, target) -> str | None:
    """All that + and - can say: parentheses only change signs."""
    for signs in itertools.product((1, -1), repeat=len(numbers)):
        if sum(sign * n for sign, n in zip(signs, numbers, strict=True)) == target:
            terms = sorted(zip(signs, numbers, strict=True), reverse=True)
            return "".join((" + " if sign > 0 else " - ") + str(n) for sign, n in terms)[3:]
    return None


def find_expression(numbers, target, operators, rng, exhaustive=True) -> str | None:
    """An expression with the value of the target, all exact.

    None says that there is none; without `exhaustive`, that five or six numbers gave none at a few tries.
    """
    if operators == "+-":
        return signed_sum(numbers, target)
    rules = Rules(operators, math.inf, False)
    for _ in range(12 if len(numbers) > 4 else 0):
        # Any first steps down to four numbers mostly leave a solution, at a hundredth of the search's time.
        pool, steps = list(numbers), []
        while len(pool) > 4:
            rng.shuffle(pool)
            steps.append(rng.choice(results(pool.pop(), pool.pop(), rules)))
            pool.append(steps[-1][3])
        if best := solve(pool, target, rules):
            return expression(tree(numbers, steps + steps_of(best)))
    best = solve(numbers, target, rules) if exhaustive or len(numbers) <= 4 else None
    return best and expression(best)
