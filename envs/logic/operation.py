"""operation: evaluate an expression with newly defined operators."""

from __future__ import annotations

import itertools
import operator
from fractions import Fraction

from envs.logic.common import ARITHMETIC, Family, Unreadable, answer_of, compute, number_of

FORMS = ("a + {k} * b", "{k} * a + b", "{k} * a - b", "a * b + {k}", "a * b - a", "a * a - {k} * b",
         "{k} * ( a - b )", "{k} * ( a + b )", "a - b + {k}", "b - {k} * a")
QUOTIENTS = ("( a + b ) / {k}", "( a - b ) / {k}", "a * b / {k}")  # not in style=words
CONDITIONS = {
    "a is even": lambda a, b: a % 2 == 0, "a is odd": lambda a, b: a % 2 == 1,
    "b is even": lambda a, b: b % 2 == 0, "b is odd": lambda a, b: b % 2 == 1,
    "a > b": operator.gt, "a < b": operator.lt, "a + b > 10": lambda a, b: a + b > 10,
    "a is a multiple of 3": lambda a, b: a % 3 == 0, "b is a multiple of 3": lambda a, b: b % 3 == 0,
    "a + b is a multiple of 5": lambda a, b: (a + b) % 5 == 0,
}


class Operation(Family):
    name = "operation"
    wordings = (
        "New operators are defined:\n\n{definitions}\n\nA higher precedence binds tighter; operators of "
        "equal precedence are applied from left to right; + and - have precedence 2, * and / have 4; "
        "parentheses go first. What is the value of\n\n{expression}\n\nEnd with the value inside "
        "\\boxed{{}}.",
        "Evaluate an expression in which some operators are new.\n\nExpression: {expression}\n\n"
        "{definitions}\n\n+ and - have precedence 2, * and / have precedence 4. The higher number is applied "
        "first, equal ones from left to right, and parentheses before all. Give the value inside "
        "\\boxed{{}}.",
    )
    symbols = "◆▲■★◎⊕⊗⊙∇"

    def draw(self, rng, config):
        definitions = []
        for symbol in rng.sample(self.symbols, rng.randint(1, config.operation_max_symbols)):
            forms = FORMS if config.style == "words" else FORMS + QUOTIENTS
            bodies = [form.format(k=rng.randint(2, 5)) for form in rng.sample(forms, 2)]
            conditional = rng.random() < 0.5 and config.operation_conditions
            definitions.append({
                "symbol": symbol, "precedence": rng.randint(1, 5), "body": bodies[0],
                "condition": rng.choice(list(CONDITIONS)) if conditional else "",
                "otherwise": bodies[1] if conditional else ""})
        data = {"definitions": definitions, "expression": self.random_expression(rng, config, definitions)}
        try:
            value = evaluate_operation(data, config.operation_max_value)
        except Unreadable:
            return None
        return {**data, "answer": str(value)}

    def random_expression(self, rng, config, definitions):
        count = rng.randint(config.operation_min_operands, config.operation_max_operands)
        signs = [rng.choice(definitions)["symbol"] if rng.random() < 0.65 else rng.choice("+-*")
                 for _ in range(count - 1)]
        signs[rng.randrange(count - 1)] = definitions[0]["symbol"]
        terms = [str(rng.randint(1, config.operation_max_number)) for _ in range(count)]
        if count > 2 and rng.random() < 0.5:
            first = rng.randrange(count - 1)
            last = rng.randint(first + 1, min(count - 1, first + count - 2))
            terms[first], terms[last] = f"( {terms[first]}", f"{terms[last]} )"
        return " ".join(word for pair in itertools.zip_longest(terms, signs) for word in pair if word)

    def key(self, data):
        return data["definitions"], data["expression"]

    def fields(self, data):
        lines = []
        for d in data["definitions"]:
            cases = f" if {d['condition']}, otherwise {d['otherwise']}" if d["condition"] else ""
            lines.append(f"a {d['symbol']} b = {d['body']}{cases} (precedence {d['precedence']})")
        return {"definitions": tight("\n".join(lines)), "expression": tight(data["expression"])}

    def words(self, data):
        texts = []
        for d in data["definitions"]:
            cases = f" if {d['condition']} else {d['otherwise']}" if d["condition"] else ""
            texts.append(f"{d['symbol']} {d['precedence']} : {d['body']}{cases} |")
        return " ".join([*texts, data["expression"]])

    def vocabulary(self, config):
        top = config.operation_max_value
        numbers = " ".join(map(str, sorted({*range(-top, top + 1), *range(100)})))
        return f"{' '.join(self.symbols)} {' '.join(CONDITIONS)} if else : | + - * ( ) {numbers}"

    def judge(self, text, data, style):
        return abs(number_of(answer_of(text, style)) - Fraction(data["answer"])) <= Fraction(1, 10**6)


def tight(text) -> str:
    """Without the space inside parentheses, which only style=words needs."""
    return text.replace("( ", "(").replace(" )", ")")


def evaluate_operation(data, limit) -> Fraction:
    """The value. Unreadable: over the limit on the way, or an operand of a new operator is not whole."""
    def define(d):
        def function(a, b):
            if a.denominator != 1 or b.denominator != 1:
                raise Unreadable
            holds = not d["condition"] or CONDITIONS[d["condition"]](a, b)
            return compute(d["body"] if holds else d["otherwise"], ARITHMETIC, {"a": a, "b": b})[0]
        return d["precedence"], bounded(function)

    def bounded(function):
        def checked(a, b):
            value = function(a, b)
            if abs(value) > limit:
                raise Unreadable
            return value
        return checked

    plain = {sign: (precedence, bounded(function)) for sign, (precedence, function) in ARITHMETIC.items()}
    return compute(data["expression"], plain | {d["symbol"]: define(d) for d in data["definitions"]})[0]
