"""cryptarithm: an equation in letters, each of which stands for a digit."""

from __future__ import annotations

import itertools
import operator
import re
from string import ascii_uppercase

from envs.logic.common import Family, answer_of


class Cryptarithm(Family):
    name = "cryptarithm"
    wordings = (
        "In the equation\n\n{equation}\n\nevery letter stands for a digit: the same letter for the same "
        "digit, different letters for different digits, and no number begins with 0. Multiplication goes "
        "before addition and subtraction. Find the digits, and end with the equation in digits inside "
        "\\boxed{{}}.",
        "Solve the cryptarithm {equation}: replace each letter by a digit of its own so that the equation "
        "holds; the first digit of a number is never 0, not even of a short one; * binds tighter than + and "
        "-. There is exactly one solution. Write it, as an equation of numbers, inside \\boxed{{}}.",
    )
    # Digits of the longest word, by letters: shorter ones leave many solutions. A product tells more.
    lengths = {3: 4, 4: 5, 5: 6, 6: 6, 7: 7, 8: 7}

    def draw(self, rng, config):
        # Few letters and operators are drawn more often, because they are refused more often below.
        counts = range(config.cryptarithm_min_letters, config.cryptarithm_max_letters + 1)
        letters = rng.choices(counts, [9 - n for n in counts])[0]
        levels = range(1, config.cryptarithm_max_operators + 1)
        level = rng.choices(levels, (5, 3, 2)[:len(levels)])[0]
        operators = rng.choices("+-", k=level)
        longest = self.lengths[letters] - (level == 3)
        sizes = [longest, *(rng.randint(max(1, longest - 2), longest) for _ in range(level))]
        if level == 3:
            place = rng.randrange(3)
            operators[place] = "*"
            sizes[place] = rng.randint(1, longest - 1)
            sizes[place + 1] = longest - sizes[place]
        digits = "".join(rng.sample("0123456789", letters))
        numbers = ["".join(rng.choices(digits, k=size)) for size in sizes]
        result = str(evaluate_equation([int(n) for n in numbers], operators))
        words = [*numbers, result]
        if result[0] == "-" or any(word[0] == "0" for word in words) or set("".join(words)) != set(digits):
            return None
        return {"numbers": words, "operators": operators}

    def key(self, data):
        """The pattern of the letters, whatever their names."""
        order = list(dict.fromkeys("".join(data["numbers"])))
        return [[order.index(digit) for digit in word] for word in data["numbers"]], data["operators"]

    def complete(self, data, rng, config):
        digits = list(dict.fromkeys("".join(data["numbers"])))
        names = dict(zip(digits, rng.sample(ascii_uppercase, len(digits)), strict=True))
        words = ["".join(names[digit] for digit in number) for number in data["numbers"]]
        operators = data["operators"]
        if len(cryptarithm_solutions(words, operators, 2)) != 1:
            return None
        return {"words": words, "operators": operators, "answer": equation(data["numbers"], operators),
                "digits": {letter: int(digit) for digit, letter in names.items()}}

    def fields(self, data):
        return {"equation": equation(data["words"], data["operators"])}

    def words(self, data):
        return " ".join(equation([" ".join(word) for word in data["words"]], data["operators"], "->").split())

    def vocabulary(self, config):
        return " ".join(ascii_uppercase + "0123456789+-*") + " ->"

    def reference(self, data, style):
        if style == "chat":
            return super().reference(data, style)
        return " ".join(f"{letter} {digit}" for letter, digit in data["digits"].items())

    def judge(self, text, data, style):
        answer, words = answer_of(text, style), data["words"]
        if style == "words":  # A 1 B 2 ..., a letter and its digit
            parts = answer.split()
            digits = dict(zip(parts[::2], parts[1::2], strict=False))
            if len(parts) != 2 * len(data["digits"]) or set(digits) != set(data["digits"]):
                return False
            if not all(len(digit) == 1 and digit in "0123456789" for digit in digits.values()):
                return False
            numbers = ["".join(digits[letter] for letter in word) for word in words]
        else:
            numbers = re.findall("[0-9]+", answer)
            if "".join(answer.split()) != equation(numbers, data["operators"], "=", "", strict=False):
                return False
        return fits(words, numbers, data["operators"])


def equation(words, operators, sign="=", space=" ", strict=True) -> str:
    signs = [*operators, sign, ""]
    return space.join(f"{word}{space}{op}" for word, op in zip(words, signs, strict=strict)).strip()


def evaluate_equation(numbers, operators) -> int:
    """The value of n0 op0 n1 op1 ..., with * before + and -."""
    total, term = 0, numbers[0]
    for op, n in zip(operators, numbers[1:], strict=False):
        if op == "*":
            term *= n
        else:
            total, term = total + term, n if op == "+" else -n
    return total + term


def fits(words, numbers, operators) -> bool:
    """Whether the numbers (texts) spell the words, a digit for each letter, no zero leads, and it is true."""
    if [len(n) for n in numbers] != [len(word) for word in words] or any(n[0] == "0" for n in numbers):
        return False
    matched = set(zip("".join(words), "".join(numbers), strict=True))
    letters, digits = {letter for letter, _ in matched}, {digit for _, digit in matched}
    *values, result = map(int, numbers)
    return len(matched) == len(letters) == len(digits) and evaluate_equation(values, operators) == result


def cryptarithm_solutions(words, operators, limit) -> list[dict[str, int]]:
    """Up to `limit` solutions, column by column from the right.

    Where the letters of the last k columns are known, both sides are known modulo 10^k, products too. So only
    the letters of the left side are tried, and the result's digit in each column follows.
    """
    *left, result = words
    leading = {word[0] for word in words}
    columns = max(map(len, words))
    found, digits = [], {}
    place = operators.index("*") if "*" in operators else None
    signs = [1, *(1 if op == "+" else -1 for op in operators if op != "*")]  # of the terms

    def total(values):
        """As evaluate_equation, for one * at most, three times as fast."""
        if place is not None:
            values = [*values[:place], values[place] * values[place + 1], *values[place + 2:]]
        return sum(map(operator.mul, signs, values))

    def column(k, values):
        """values: of the left words, their last k digits"""
        if k == columns:
            if total(values) == int("".join(str(digits[c]) for c in result)):
                found.append(dict(digits))
            return
        here = [word[-1 - k] if k < len(word) else "" for word in left]
        new = list(dict.fromkeys(letter for letter in here if letter and letter not in digits))
        free = [d for d in range(10) if d not in digits.values()]
        shift, last = 10**k, result[-1 - k] if k < len(result) else ""
        for chosen in itertools.permutations(free, len(new)):
            if 0 in chosen and new[chosen.index(0)] in leading:
                continue
            digits.update(zip(new, chosen, strict=True))
            after = [v + shift * digits[letter] if letter else v
                     for v, letter in zip(values, here, strict=True)]
            digit = total(after) // shift % 10
            if last in digits or not last:
                if not last or digits[last] == digit:
                    column(k + 1, after)
            elif digit not in digits.values() and (digit or last not in leading):
                digits[last] = digit
                column(k + 1, after)
                del digits[last]
            if len(found) >= limit:
                break
        for letter in new:
            digits.pop(letter, None)

    column(0, [0] * len(left))
    return found
