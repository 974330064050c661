"""boolean_expressions: which of some nested statements are true."""

from __future__ import annotations

import operator

from envs.logic.common import Family, answer_of, boxed

LABELS = "ABCDEFGH"


FACTS = {
    "the Earth orbits the Sun": True, "Paris is the capital of France": True,
    "a triangle has three sides": True, "water freezes at 0 degrees Celsius": True,
    "2 is a prime number": True, "whales are mammals": True,
    "a week has seven days": True, "iron is a metal": True, "spiders have eight legs": True,
    "Africa is a continent": True, "ice floats on water": True, "a byte has eight bits": True,
    "the Sun orbits the Moon": False, "Rome is the capital of Spain": False, "a square has five sides": False,
    "9 is a prime number": False, "penguins can fly": False, "a year has ten months": False,
    "gold is a gas": False, "sharks are mammals": False, "an hour has fifty minutes": False,
    "Asia is an ocean": False, "bees have six wings": False, "the Moon is larger than the Earth": False,
}
COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
           "!=": operator.ne}
# In style=words: sft.py's tokenizer drops every `=`.
COMPARE_WORDS = {"<=": "at-most", ">=": "at-least", "==": "equals", "!=": "differs"}


class Boolean(Family):
    name = "boolean_expressions"
    wordings = (
        "Which of these statements are true?\n\n{statements}\n\nEnd with the letters of all true statements, "
        "separated by commas, inside \\boxed{{}}. At least one is true.",
        "Evaluate each statement; == means equal, != not equal.\n\n{statements}\n\nGive the letters of "
        "those that are true, at least one, with commas inside \\boxed{{}}.",
    )

    def draw(self, rng, config):
        count = rng.randint(config.boolean_min_statements, config.boolean_max_statements)
        depths = [rng.randint(config.boolean_min_depth, config.boolean_max_depth) for _ in range(count)]
        statements = [self.random_statement(rng, depth, config.boolean_max_number) for depth in depths]
        true = [label for label, statement in zip(LABELS, statements, strict=False) if truth(statement)]
        return {"statements": statements, "answer": ", ".join(true)} if true else None

    def random_statement(self, rng, depth, top):
        """A tree of lists, connectives `depth` deep: [op, left, right], ["not", part] or a fact's text."""
        if depth == 0:
            if rng.random() < 0.3:
                return rng.choice(list(FACTS))
            return [rng.choice(list(COMPARE)), rng.randint(1, top), rng.randint(1, top)]
        deep = self.random_statement(rng, depth - 1, top)
        if rng.random() < 0.3:
            return ["not", deep]
        parts = [deep, self.random_statement(rng, rng.randint(0, min(2, depth - 1)), top)]
        rng.shuffle(parts)
        return [rng.choice(("and", "or")), *parts]

    def key(self, data):
        return self.words(data)  # where all true facts are one word

    def fields(self, data):
        lines = [f"{label}. {shown(statement)}"
                 for label, statement in zip(LABELS, data["statements"], strict=False)]
        return {"statements": "\n".join(lines)}

    def words(self, data):
        parts = zip(LABELS, data["statements"], strict=False)
        text = " ".join(f"{label} {shown(statement, words=True)}" for label, statement in parts)
        return text.replace("(", "( ").replace(")", " )")

    def vocabulary(self, config):
        numbers = " ".join(map(str, range(1, config.boolean_max_number + 1)))
        signs = " ".join(COMPARE_WORDS.values())
        return f"{' '.join(LABELS)} ( ) not and or < > {signs} true false {numbers}"

    def reference(self, data, style):
        return boxed(data["answer"]) if style == "chat" else data["answer"].replace(",", "")

    def judge(self, text, data, style):
        answer = answer_of(text, style).replace(" and ", " ")
        letters = set(answer.translate(dict.fromkeys(map(ord, " ,;.(){}\t\r\n"))))
        return letters == set(data["answer"]) - set(", ")


def truth(statement) -> bool:
    if isinstance(statement, str):
        return FACTS[statement]
    op, *parts = statement
    if op == "not":
        return not truth(parts[0])
    if op in COMPARE:
        return COMPARE[op](*parts)
    return (all if op == "and" else any)([truth(part) for part in parts])


def shown(statement, words=False) -> str:
    """The statement with parentheses about every part of a part."""
    if isinstance(statement, str):
        return statement if not words else str(FACTS[statement]).lower()
    op, *parts = statement
    if op in COMPARE:
        return f"{parts[0]} {COMPARE_WORDS.get(op, op) if words else op} {parts[1]}"
    texts = [f"({shown(part, words)})" for part in parts]
    return f"not {texts[0]}" if op == "not" else f" {op} ".join(texts)
