r"""What a run on rows says first: how many are used, which are left out and why, and whether the check judges
the right answers right.

    rows: train.csv: 36 to train on, 4 held out; left out: 2 like row 17: column answer: expected an answer,
    got ''; the check judges 39 of 40 gold answers right (97.5 %): row 9, sentence: 'The answer is 2-3.' is
    read as '3', and the answer is '2'

A right answer is given to the check as it stands, in a sentence, in \boxed{} and in <answer></answer>.
"""

from __future__ import annotations

import math
import re
import time

FORMS = {"plain": "{}", "sentence": "The answer is {}.", "box": "\\boxed{{{}}}", "tag": "<answer>{}</answer>"}
MOST_ROWS = dict(math=64, python=8)  # that are judged, evenly spread over a file
MOST_OTHERS = 1000
MOST_SECONDS = 5.0  # after which no further row is judged
MOST_REASONS = 5
LONGEST = 300  # of a reason [characters]
# Columns of HumanEval, MBPP and their like with code that passes the tests.
SOLUTIONS = ("canonical_solution", "reference_solution", "solution", "code")


def look(env, part, everything: bool = False) -> tuple[str, bool]:
    """What became of the rows of a file, and whether all is well. everything: judge all right answers."""
    parts = [f"{count:,} {what}" for what, count in part.counts.items()]
    left_out = []
    if part.bad:
        left_out.append(f"{len(part.bad):,} that cannot be used ({reasons(part.bad)})")
    if part.in_both:
        left_out.append(f"{part.in_both:,} that are held out too")
    if part.guessed:
        left_out.append(f"{part.guessed:,} whose tests can be passed by guessing (guessable=true keeps them)")
    said = [", ".join(parts)]
    if left_out:
        said.append(f"left out: {', '.join(left_out)}")
    if part.remark:
        said.append(part.remark)
    fine = not part.bad
    if env.check:
        verdicts, all_right = judged(env, part, everything)
        said.append(verdicts)
        fine &= all_right
    return f"rows: {part.name}: {'; '.join(said)}", fine


def replies(env, task) -> list[tuple[str, list]]:
    """[(a right answer, [(name of a form, a reply with it)])]; none where an answer is no reply."""
    check, extract = env.config.check, env.config.extract
    if check == "python":
        code = solution_of(task.data["row"])
        return [(code, [("code", f"```python\n{code}\n```")])] if code else []
    if check in ("", "regex"):
        return []
    names = {"auto": [*FORMS], "boxed": ["box"], "answer_tag": ["tag"]}.get(extract, ["plain", "sentence"])
    if check == "exact":  # a sentence is another text
        names = [name for name in names if name != "sentence"]
    found = []
    for answer in env.gold(task):
        texts = dict.fromkeys(names, answer)
        if check == "math":
            bare = answer.replace("\\$", "").replace("$", "")
            texts = {name: f"${bare}$" if name in ("plain", "sentence") else bare for name in names}
        found.append((answer, [(name, FORMS[name].format(text)) for name, text in texts.items()]))
    return found


def solution_of(row: dict) -> str | None:
    """Code that passes a row's tests; HumanEval's is the body of the function that the prompt begins."""
    for name in SOLUTIONS:
        code = row.get(name)
        if isinstance(code, str) and code.strip():
            begun = row.get("prompt")
            return f"{begun}{code}" if code[0].isspace() and isinstance(begun, str) else code
    return None


def judged(env, part, everything: bool) -> tuple[str, bool]:
    """How many right answers the check judges right, and the first that it does not; whether all are."""
    most = len(part.rows) if everything else MOST_ROWS.get(env.config.check, MOST_OTHERS)
    places = [*part.rows]
    step = max(1.0, len(places) / most)
    places = [places[int(k * step)] for k in range(min(most, len(places)))]
    deadline = time.monotonic() + (math.inf if everything else MOST_SECONDS)
    looked_at = right = total = 0
    first = ""
    for place in places:
        if time.monotonic() > deadline:
            break
        looked_at += 1
        for answer, given in replies(env, part.rows[place]):
            total += 1
            wrong = wrong_form(env, part.rows[place], given)
            right += not wrong
            first = first or wrong and f"{place}, {wrong}; its answer is {answer!r:.80}"
    if not total:
        return "there are no gold answers to try the check on", True
    of_all = f" (in {looked_at:,} of {len(part.rows):,} rows)" if looked_at < len(part.rows) else ""
    if right == total:
        return f"the check judges all {total:,} gold answers right{of_all}", True
    share = math.floor(1000 * right / total) / 10
    return f"the check judges {right:,} of {total:,} gold answers right ({share:g} %){of_all}: {first}", False


def wrong_form(env, task, given: list) -> str:
    """The first of the replies that is judged wrong, and what is read out of it."""
    for name, reply in given:
        found, right = env.judge(task, reply)
        if not right:
            return f"{name}: {reply!r:.80} is read as {found!r:.80}"
    return ""


def printable(text: str) -> str:
    """One line of a text, with every character escaped that does not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:LONGEST])


def reasons(bad: list) -> str:
    """Rows that cannot be used, by kind, each with the first of its rows."""
    kinds = {}
    for place, reason in bad:
        # What is quoted, and numbers, differ from row to row.
        kind = re.sub(r"""(["']).*\1|\d+|, got .*""", "", reason, flags=re.DOTALL)
        kinds.setdefault(kind, []).append(f"{place}: {reason}")
    parts = [some[0] if len(some) == 1 else f"{len(some)} like {some[0]}" for some in kinds.values()]
    more = [f"and rows of {len(parts) - MOST_REASONS} more kinds"] if len(parts) > MOST_REASONS else []
    return "; ".join(parts[:MOST_REASONS] + more)
