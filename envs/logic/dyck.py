"""dyck_language and dyck_language2: close what is open, and open what is closed."""

from __future__ import annotations

from envs.logic.common import Family

PAIRS = ("()", "[]", "{}", "<>", "⟨⟩", "⟦⟧", "⦃⦄", "⦅⦆")
CLOSER = dict(PAIRS)
OPENER = {closer: opener for opener, closer in PAIRS}
BRACKETS = "".join(PAIRS)


def random_prefix(rng, length: int, end: int | None, openers) -> tuple[str, list[str]]:
    """(a sequence that can be completed, what is open after it); `end` brackets are open, or any number."""
    text, stack = "", []
    for left in range(length - 1, -1, -1):  # steps after this one
        can_open = end is None or len(stack) + 1 - end <= left
        can_close = stack and (end is None or end - len(stack) + 1 <= left)
        if can_open and not (can_close and rng.random() < 0.5):
            stack.append(rng.choice(openers))
            text += stack[-1]
        else:
            text += CLOSER[stack.pop()]
    return text, stack


def bracket_line(text: str) -> str:
    """The brackets of the last line that has any; "" if between them stands anything but space."""
    for line in reversed(text.splitlines()):
        places = [k for k, letter in enumerate(line) if letter in BRACKETS]
        if places:
            found = "".join(line[places[0]:places[-1] + 1].split())
            return found if len(found) == len(places) else ""
    return ""


class Dyck(Family):
    name = "dyck_language"
    # The sequence is the last line with brackets: an echoed list of pairs could be the answer.
    wordings = (
        "This bracket sequence, with the pairs {pairs}, was cut off before its end:\n\n{sequence}\n\n"
        "Complete it: every bracket that is still open has to be closed, in the right order, and nothing "
        "else may be added. Write the complete sequence, from its first bracket to its last, on a line of "
        "its own at the end.",
        "Add the missing closing brackets, as few as possible, so that the sequence below is balanced.\n\n"
        "Pairs: {pairs}\nSequence: {sequence}\n\nYour last line must be the whole sequence, what is given "
        "followed by what you add.",
        "The brackets {pairs} are nested properly in a text of which only the beginning is left:\n\n"
        "{sequence}\n\nWhich brackets follow if each open one is closed and no new one opened? End with one "
        "line that holds the beginning and what follows it, brackets alone.",
    )
    word = "close"

    def sizes(self, rng, config):
        """(pair types, shortest length, longest length)"""
        return config.dyck_pairs, config.dyck_min_length, config.dyck_max_length

    def draw(self, rng, config):
        count, low, high = self.sizes(rng, config)
        pairs = rng.sample(PAIRS, count)
        length = 2 * rng.randint((low + 1) // 2, high // 2)
        missing = rng.randint(-(-length // 5), length // 2)  # 20 to 50 %, exactly what is open there
        given, stack = random_prefix(rng, length - missing, missing, [pair[0] for pair in pairs])
        return {"pairs": pairs, "given": given, "missing": "".join(CLOSER[o] for o in reversed(stack))}

    def key(self, data):
        return data["given"]

    def complete(self, data, rng, config):
        return {**data, "answer": data["given"] + data["missing"]}

    def fields(self, data):
        return {"sequence": data["given"], "pairs": " ".join(data["pairs"])}

    def words(self, data):
        return f"{self.word} {' '.join(data['given'])}"

    def vocabulary(self, config):
        return f"{self.word} {' '.join(BRACKETS)}"

    def reference(self, data, style):
        return data["answer"] if style == "chat" else " ".join(data["answer"])

    def judge(self, text, data, style):
        return bracket_line(text) == data["answer"]


class Dyck2(Dyck):
    """The mirror image: the end is given, and the openers that it needs are missing."""

    name = "dyck_language2"
    wordings = (
        "Of a balanced bracket sequence, with the pairs {pairs}, only the end is left:\n\n{sequence}\n\nSome "
        "closing brackets have no partner, because the openers before them were lost. Put exactly the needed "
        "openers in front. Write the complete sequence on a line of its own at the end.",
        "Balance this sequence by adding opening brackets at its beginning, as few as possible and none "
        "elsewhere.\n\nPairs: {pairs}\nSequence: {sequence}\n\nYour last line must be the whole sequence, "
        "what you add followed by what is given.",
    )
    word = "open"

    def sizes(self, rng, config):
        pairs = rng.randint(config.dyck2_min_pairs, config.dyck2_max_pairs)
        return pairs, config.dyck2_min_length, config.dyck2_max_length

    def draw(self, rng, config):
        data = super().draw(rng, config)
        mirror = {**OPENER, **CLOSER}
        given, missing = ("".join(mirror[b] for b in reversed(data[part])) for part in ("given", "missing"))
        return {"pairs": data["pairs"], "given": given, "missing": missing}

    def complete(self, data, rng, config):
        return {**data, "answer": data["missing"] + data["given"]}
