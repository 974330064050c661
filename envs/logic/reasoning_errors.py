"""dyck_language_reasoning_errors: name the wrong lines of a stack trace."""

from __future__ import annotations

import re

from envs.logic.common import Family, answer_of, boxed
from envs.logic.dyck import BRACKETS, CLOSER, PAIRS, random_prefix


class Errors(Family):
    name = "dyck_language_reasoning_errors"
    wordings = (
        "Somebody reads the bracket sequence\n\n{sequence}\n\nfrom left to right and writes down, step by "
        "step, which brackets are open (the stack, its top on the right). Some of the lines are wrong:\n\n"
        "{trace}\n\nA line is wrong if its stack is not what is open after that many brackets of the "
        "sequence; each line is judged by itself, whatever stands before it. End with the numbers of all "
        "wrong steps, separated by commas, inside \\boxed{{}}, or with the word none there.",
        "Check this trace of the open brackets in {sequence}\n\n{trace}\n\nEach step reads one more bracket "
        "and should show all that are open then, the latest on the right. Which steps show something else? "
        "Judge every step against the sequence, not against the step before. Put their numbers, with commas, "
        "or none, inside \\boxed{{}}.",
    )

    def draw(self, rng, config):
        pairs = rng.sample(PAIRS, rng.randint(config.errors_min_pairs, config.errors_max_pairs))
        openers = [pair[0] for pair in pairs]
        length = rng.randint(config.errors_min_length, config.errors_max_length)
        sequence, _ = random_prefix(rng, length, None, openers)
        stacks = open_brackets(sequence)
        count = rng.randint(config.errors_min_errors, config.errors_max_errors)
        wrong = sorted(rng.sample(range(length), count))
        for k in wrong:
            stacks[k] = self.corrupted(rng, stacks[k], openers)
        return {"sequence": sequence, "trace": stacks,
                "answer": ", ".join(str(k + 1) for k in wrong) or "none"}

    def corrupted(self, rng, stack, openers):
        """A bracket more, less or exchanged: never the same stack."""
        kind = rng.randrange(3) if stack else 0
        if kind == 0:
            return stack + rng.choice(openers)
        if kind == 1:
            return stack[:-1]
        place = rng.randrange(len(stack))
        return stack[:place] + rng.choice([o for o in openers if o != stack[place]]) + stack[place + 1:]

    def key(self, data):
        return data["sequence"], data["trace"]

    def fields(self, data):
        lines = [f"Step {k}: read {bracket}, stack: {' '.join(stack) or 'empty'}"
                 for k, (bracket, stack) in enumerate(zip(data["sequence"], data["trace"], strict=True), 1)]
        return {"sequence": data["sequence"], "trace": "\n".join(lines)}

    def words(self, data):
        lines = [f"{k} {' '.join(stack) or 'empty'}" for k, stack in enumerate(data["trace"], 1)]
        return f"{' '.join(data['sequence'])} : {' '.join(lines)}"

    def vocabulary(self, config):
        steps = " ".join(map(str, range(1, config.errors_max_length + 1)))
        return f"{' '.join(BRACKETS)} : empty none {steps}"

    def reference(self, data, style):
        return boxed(data["answer"]) if style == "chat" else data["answer"].replace(",", "")

    def judge(self, text, data, style):
        answer = answer_of(text, style)
        if answer.lower().removesuffix(".") == "none":
            return data["answer"] == "none"
        numbers = answer.removesuffix(".").replace(" and ", " ").replace(",", " ").split()
        if not numbers or not all(re.fullmatch("[1-9][0-9]{0,3}", n) for n in numbers):
            return False
        return data["answer"] != "none" and set(numbers) == set(data["answer"].split(", "))


def open_brackets(sequence: str) -> list[str]:
    """What is open after each bracket, the latest on the right."""
    stack, stacks = "", []
    for bracket in sequence:
        stack = stack + bracket if bracket in CLOSER else stack[:-1]
        stacks.append(stack)
    return stacks
