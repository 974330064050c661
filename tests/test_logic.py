"""Logic: tasks, splits and verifiers of the eight families, against solvers written apart."""

import functools
import itertools
import re
from fractions import Fraction

import pytest

import envs
import sft
from envs import logic
from envs.logic.boolean_expressions import FACTS
from tests.run_folders import ROOT

PARTNER = dict("() [] {} <> ⟨⟩ ⟦⟧ ⦃⦄ ⦅⦆".split())
NAMES = ["dyck_language", "game_of_24", "operation", "cryptarithm", "dyck_language2", "dyck_language2",
         "boolean_expressions", "sudoku", "dyck_language_reasoning_errors"]
WORDS = {"style": "words", "operation_max_value": 999}
SMALL = {  # brackets of which there are few
    "dyck_min_length": 4, "dyck_max_length": 8, "dyck_pairs": 2, "dyck2_min_length": 2, "dyck2_max_length": 6,
    "dyck2_min_pairs": 1, "dyck2_max_pairs": 2, "errors_min_pairs": 2, "errors_max_pairs": 2,
    "errors_min_length": 2, "errors_max_length": 3, "errors_min_errors": 0, "errors_max_errors": 1}


def score(env, task, reply):
    return env.start(task, 0).step(reply).reward


def tasks(count, number, split="train", **options):
    """(environment, `count` tasks of a type)"""
    env = envs.make("logic", types=str(number), test_tasks=max(count, 512), **options)
    return env, [env.task(split, k) for k in range(count)]


def left_open(text):
    """What stays of brackets without those that close each other."""
    pairs = "|".join(re.escape(opener + closer) for opener, closer in PARTNER.items())
    while text != (text := re.sub(pairs, "", text)):
        pass
    return text


@functools.cache
def all_values(numbers, operators):
    """Every value that the numbers can give, negative ones too, by combining any two of them."""
    found = {numbers[0]} if len(numbers) == 1 else set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        made = {a + b, a - b} | ({a * b} if "*" in operators else set())
        made |= {a / b} if "/" in operators and b else set()
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        found = found.union(*(all_values(tuple(sorted([*rest, value])), operators) for value in made))
    return found


def operation_value(data):
    """By reducing the operator of the highest precedence, the leftmost first; the bodies by Python."""
    rules = {d["symbol"]: d for d in data["definitions"]}
    levels = {"+": 2, "-": 2, "*": 4} | {symbol: d["precedence"] for symbol, d in rules.items()}

    def apply(a, sign, b):
        if sign not in rules:
            return {"+": a + b, "-": a - b, "*": a * b}[sign]
        rule = rules[sign]
        condition = re.sub(r"(.+) is a multiple of (\d)", r"(\1) % \2 == 0", rule["condition"] or "True")
        condition = condition.replace("is even", "% 2 == 0").replace("is odd", "% 2 == 1")
        assert a.denominator == b.denominator == 1
        values = {"a": a, "b": b}
        return eval(rule["body"] if eval(condition, values) else rule["otherwise"], values)

    def reduce(words):
        while len(words) > 1:
            k = max(range(1, len(words), 2), key=lambda k: (levels[words[k]], -k))
            words[k - 1:k + 2] = [apply(*words[k - 1:k + 2])]
        return words[0]

    words = [Fraction(word) if word.isdigit() else word for word in data["expression"].split()]
    if "(" in words:
        first, last = words.index("("), words.index(")")
        words[first:last + 1] = [reduce(words[first + 1:last])]
    return reduce(words)


def assignments(words, operators):
    """How many solutions a cryptarithm has, by trying all digits for all letters."""
    *left, result = words
    text = " ".join(f"{word} {op}" for word, op in zip(left, [*operators, "=="], strict=True))
    letters, found = "".join(sorted(set("".join(words)))), 0
    for digits in itertools.permutations("0123456789", len(letters)):
        equation = f"{text} {result}".translate(str.maketrans(letters, "".join(digits)))
        found += not re.search(r"\b0", equation) and eval(equation)
    return found


def units(cell):
    return {("row", cell // 9), ("column", cell % 9), ("box", cell // 27, cell % 9 // 3)}


PEERS = [[other for other in range(81) if other != cell and units(other) & units(cell)] for cell in range(81)]


def sudoku_count(grid, limit=2):
    """Number of solutions, up to the limit: the cell with the fewest choices is filled first."""
    seen = [{grid[other] for other in PEERS[cell]} for cell in range(81)]
    if "." not in grid:
        return int(all(digit not in others for digit, others in zip(grid, seen, strict=True)))

    cell = max((cell for cell in range(81) if grid[cell] == "."), key=lambda cell: len(seen[cell]))
    total = 0
    for digit in set("123456789") - seen[cell]:
        if total < limit:
            total += sudoku_count(grid[:cell] + digit + grid[cell + 1:], limit - total)
    return total


def is_right(task):
    """Whether the data's answer is right, apart from the verifier."""
    data, number = task.data, task.data["type"]
    answer = data["answer"]
    if NAMES[number].startswith("dyck_language") and number != 8:
        given, missing = data["given"], data["missing"]
        kinds = set(PARTNER) if number in (4, 5) else set(PARTNER.values())
        whole = missing + given if number in (4, 5) else given + missing
        pairs = set("".join(data["pairs"]))
        return answer == whole and not left_open(whole) and set(missing) <= kinds and set(whole) <= pairs
    if number == 1:
        if answer == "None":
            return data["target"] not in all_values(tuple(map(Fraction, data["numbers"])), data["operators"])
        used = sorted(map(int, re.findall(r"\d+", answer)))
        value = eval(re.sub(r"\d+", r"F(\g<0>)", answer), {"F": Fraction})
        return (value == data["target"] and used == sorted(data["numbers"])
                and set(re.findall(r"[-+*/]", answer)) <= set(data["operators"]))
    if number == 2:
        return operation_value(data) == Fraction(answer) and abs(Fraction(answer)) < 100_000
    if number == 3:
        left, right = re.sub(r"\b0", "!", answer).split(" = ")
        plain = "".join(re.findall("[A-Z]", "".join(data["words"])))
        matched = set(zip(plain, re.findall(r"\d", answer), strict=True))
        return eval(left) == int(right) and len(matched) == len(set(plain)) == len({d for _, d in matched})
    if number == 6:
        text = task.messages[0]["content"]
        for fact, value in FACTS.items():
            text = text.replace(fact, str(value))
        statements = re.findall(r"^([A-H])\. (.+)$", text, re.MULTILINE)
        return answer.split(", ") == [label for label, statement in statements if eval(statement)]
    if number == 7:
        kept = all(given in (".", digit) for given, digit in zip(data["puzzle"], answer, strict=True))
        return kept and sudoku_count(data["puzzle"]) == 1 and sudoku_count(answer) == 1
    stacks = [left_open(data["sequence"][:k]) for k in range(1, len(data["sequence"]) + 1)]
    assert set("".join(stacks)) <= set(PARTNER)
    wrong = [str(k) for k, pair in enumerate(zip(stacks, data["trace"], strict=True), 1) if len({*pair}) == 2]
    return (", ".join(wrong) or "none") == answer


def check_tasks(number, count, **options):
    for split in ("train", "test"):
        env, found = tasks(count, number, split, **options)
        for task in found:
            reply = env.solution(task)
            assert score(env, task, f"<think>\n{reply} or not\n</think>\n{reply}") == 1
            assert score(env, task, reply.replace("\n", "\r\n") + "\r\n") == 1
            assert score(env, task, f"<think>{reply}") == score(env, task, f"</think>{reply}</think>") == 0
            assert task.source == f"logic/{NAMES[number]}"
            yield task


@pytest.mark.parametrize("number, count, options", [
    *((number, 20, {}) for number in (0, 2, 4, 5, 6, 8)), (1, 25, dict(game_max_numbers=4)),
    (3, 2, dict(cryptarithm_max_letters=4)), (7, 3, {}),
    pytest.param(1, 10, dict(game_max_numbers=5), marks=pytest.mark.slow),
    pytest.param(3, 12, {}, marks=pytest.mark.slow), pytest.param(7, 25, {}, marks=pytest.mark.slow),
])
def test_answers_are_right_by_other_means(number, count, options):
    for task in check_tasks(number, count, **options):
        assert is_right(task), task.id
        if number == 3 and len(set("".join(task.data["words"]))) < 6:  # more letters have too many readings
            assert assignments(task.data["words"], task.data["operators"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_small_models_read_words(number):
    assert envs.make("logic", types=str(number)).vocabulary is None
    env = envs.make("logic", types=str(number), **WORDS)
    words = set(env.vocabulary)
    assert len(words) == len(env.vocabulary) and not words & {"<unk>", "<eos>", "<pad>", "<bos>"}
    assert len(words) < 400 or number == 2  # which has a word for each value
    tokenizer = sft.new_tokenizer(env.vocabulary)
    for task in check_tasks(number, 3, **WORDS):
        game = [*task.messages, {"role": "assistant", "content": env.solution(task)}]
        text = tokenizer.apply_chat_template(game, tokenize=False)
        assert "=" not in text and ";" not in text  # a tokenizer of sft.py drops these
        assert tokenizer.unk_token_id not in tokenizer(text).input_ids


def depth(statement):
    if isinstance(statement, str) or statement[0] not in ("not", "and", "or"):
        return 0
    return 1 + max(map(depth, statement[1:]))


@functools.cache
def drawn(number):
    return [task.data for task in tasks({1: 150, 3: 40}.get(number, 300), number)[1]]


@pytest.mark.slow
@pytest.mark.parametrize("number, measure, expected", [
    (0, lambda data: [len(data["pairs"])], {3}),
    (0, lambda data: [len(data["answer"])], set(range(40, 61, 2))),
    (0, lambda data: [10 * len(data["missing"]) // len(data["answer"])], {2, 3, 4, 5}),
    (1, lambda data: [len(data["numbers"])], {4, 5, 6}),
    (1, lambda data: [min(data["numbers"])], {1, 2, 3, 5}),
    (1, lambda data: [max(data["numbers"])], set(range(9, 21))),
    (1, lambda data: [data["target"]], {24, 36, 48, 60, 72, 100}),
    (1, lambda data: [data["operators"]], {"+-*/", "+-*", "+-"}),
    (2, lambda data: [len(data["definitions"])], {1, 2, 3}),
    (2, lambda data: [d["precedence"] for d in data["definitions"]], {1, 2, 3, 4, 5}),
    (2, lambda data: [bool(d["condition"]) for d in data["definitions"]], {True, False}),
    (2, lambda data: [len(re.findall(r"\d+", data["expression"]))], {3, 4, 5, 6}),
    (3, lambda data: [len(set("".join(data["words"])))], {4, 5, 6, 7, 8}),
    (3, lambda data: [f"{len(data['operators'])}{'*' * ('*' in data['operators'])}"], {"1", "2", "3*"}),
    (4, lambda data: [len(data["pairs"])], set(range(3, 9))),
    (4, lambda data: [len(data["answer"])], set(range(6, 61, 2))),
    (6, lambda data: [len(data["statements"])], set(range(3, 9))),
    (6, lambda data: [depth(statement) for statement in data["statements"]], {2, 3, 4, 5, 6}),
    (8, lambda data: [len(data["sequence"])], set(range(10, 31))),
    (8, lambda data: [len(data["answer"].split(", "))], {2, 3, 4, 5}),
])
def test_families_keep_their_sizes(number, measure, expected):
    """The numbers of the specification, at the defaults."""
    assert {size for data in drawn(number) for size in measure(data)} == expected


@pytest.mark.slow
def test_shares_of_tasks_are_as_they_should_be():
    """A tenth of the games cannot be solved; sudokus are easy, medium and hard."""
    assert 8 < sum(data["answer"] == "None" for data in drawn(1)) < 35
    givens = [81 - task.data["puzzle"].count(".") for task in tasks(60, 7)[1]]
    assert 22 <= min(givens) and max(givens) <= 45
    shares = [sum(low <= n <= high for n in givens) / 60 for low, high in ((36, 45), (28, 35), (22, 27))]
    assert max(abs(share - goal) for share, goal in zip(shares, (0.3, 0.4, 0.3), strict=True)) < 0.18, shares


def test_task_ids_are_type_and_seed():
    assert logic.encode(3, 17) == 300_000_017 and logic.decode(899_999_999) == (8, 99_999_999)
    with pytest.raises(envs.BadInput, match="unknown"):
        logic.decode(900_000_000)
    env = envs.make("logic")
    assert [env.task("train", k).id for k in (0, 8, 9, 20)] == ["0", "800000000", "1", "200000002"]
    assert env.task("test", 13).id == "490000001" and env.task("test", 13) == env.by_id(490_000_001)
    assert [family.name for family in logic.TYPES] == NAMES
    assert env.task("train", 4).data["given"] != env.task("train", 5).data["given"]  # types 4 and 5


@pytest.mark.parametrize("number", [0, 4, 8])
def test_no_prompt_is_in_both_splits(number, count=300):
    """With options so small that the same problem turns up again and again."""
    env = envs.make("logic", types="dyck_language2" if number == 4 else str(number), **WORDS | SMALL)
    train, test = ({env.task(split, k).messages[0]["content"] for k in range(count)} for split in env.splits)
    assert not train & test
    assert 0 < len(test) and len(train | test) < 2 * count, "no repetition: the test shows nothing"


@pytest.mark.parametrize("options", [{}, WORDS], ids=["chat", "words"])
def test_the_examples_on_the_page_are_current(options):
    page = " ".join((ROOT / "docs" / "logic.md").read_text("utf-8").split())
    env, (task,) = tasks(1, 1, **options)
    for text in (task.messages[0]["content"], env.solution(task)):
        assert " ".join(text.split()) in page, text


@pytest.mark.parametrize("options, expected", [
    ({"types": "sudokus"}, "option types: expected all"), ({"types": "0,dyck_language"}, "different ones"),
    ({"dyck_min_length": 61}, "dyck_min_length: expected 2 to dyck_max_length .60., got 61"),
    ({"dyck_min_length": 5, "dyck_max_length": 5}, "even"),
    ({"dyck_pairs": 9}, "dyck_pairs: expected 1 to 8"), ({"sudoku_max_givens": 25}, "26 to 80"),
    ({"style": "words"}, "operation_max_value"), ({"errors_max_errors": 11}, "errors_min_length"),
    pytest.param({"operation_min_operands": 6, "operation_max_number": 99, "operation_max_value": 9},
                 "options of operation: .* too few", marks=pytest.mark.slow),
])
def test_bad_options_are_named(options, expected):
    with pytest.raises(envs.BadInput, match=expected) as error:
        envs.make("logic", **options)
    assert "\n" not in str(error.value)


def game(numbers, target, operators="+-*/", answer="None"):
    return {"type": 1, "numbers": numbers, "target": target, "operators": operators, "answer": answer}


def score_of(data, reply):
    env = envs.make("logic", types=str(data["type"]), style=data.get("style", "chat"))
    return score(env, envs.Task("t", "s", [], data), reply)


@pytest.mark.parametrize("reply", [
    "```\n" + "no\n" * 8_000 + "```\nso\n```\nGOOD\n```", "```c++\nGOOD\n```", "````\nGOOD\n````",
    "``` python\r\nGOOD\r\n```\r\n", "Between ``` and ``` stands\n```\nGOOD\n```", "So: ```\nGOOD\n```",
    "so ```GOOD``` it is", "````\n``` is no end here\n````\n```\nGOOD\n```\nand ``` after it",
    "  ```\n\tGOOD\n  ```", "```\nGOOD\n```\n```\n12 + 12"])  # the last one never closes
def test_trap_code_blocks(reply):
    data, good = game([1, 4, 9, 12], 24), reply.replace("GOOD", "(9 - 1) * 12 / 4")
    assert score_of(data, good) == 1 and score_of(data, reply.replace("GOOD", "12 + 12")) == 0
    assert score_of(data, f"{good}\n```\n12 + 12\n```") == 0


BRACKETS = {"pairs": ["()", "[]"], "answer": "([])"}
SEND = {"type": 3, "words": ["SEND", "MORE", "MONEY"], "operators": ["+"],
        "digits": dict.fromkeys("SENDMORY"), "answer": "9567 + 1085 = 10652"}
STEPS = {"type": 8, "sequence": "()", "trace": []}
BLOCK, BOX = "```\nANSWER\n```", r"\boxed{ANSWER}"


@pytest.mark.parametrize("data, form, right, wrong", [
    (BRACKETS | {"type": 0, "given": "([", "missing": "])"}, "ANSWER",
     ("([])", "( [ ] )", "Answer: `([])`.", "([ is given\n\n**([])**\n"),
     ("])", "([", "([])()", "([]]", "(x[])", "([〉])", "([])\nor ([")),
    (SEND, r"$\boxed{ANSWER}$", ("9567 + 1085 = 10652", "9567+1085=10652"),
     ("9567 + 1085 = 10653", "9567 - 1085 = 10652", "1085 + 9567 = 10652", "SEND + MORE = MONEY",
      "0000 + 0000 = 00000", "9567 + 1085", "2817 + 0368 = 03185", "9567 + 1085 = 10652 = 10652")),
    (SEND | {"style": "words"}, "S 9 E 5 N 6 D 7 M 1 O 0 ANSWER", ("R 8 Y 2",),
     ("R 8 Y 3", "R 8", "", "R 8 Y 2 Y 2", "R 8 Y 22")),
    ({"type": 6, "statements": [], "answer": "A, C"}, BOX,
     ("C,A", "AC", "A, C, A", r"\text{A, and C}", "{A}, {C}", r"\{A, C\}",
      r"\left\{\text{A},\; \text{C}\right\}"),
     ("", "A", "A, B, C", "A, C, H", "a, c", "ABLE", "all", "none")),
    (STEPS | {"answer": "3, 7"}, BOX,
     ("7,3", "3 7", "3, 7, 3", "3, and 7.", r"\{3, 7\}", r"3,\ 7", "{3, 7}", r"{ \{3, 7\} }"),
     ("", r"\{\}", "3", "3, 7, 8", "none", "03, 7", "3.0, 7", "three", "٣, 7")),
    (STEPS | {"answer": "none"}, BOX, ("none", "None", "None.", r"\text{none}", r"\mathrm{none}", "{none}"),
     ("", r"\{\}", "{}", "3")),
    # Game of 24: only 8 / (3 - 8 / 3), and without a division nothing.
    (game([8, 8, 3, 3], 24, answer="8 / (3 - 8 / 3)"), BLOCK, ("8 / (3 - 8 / 3)", "8/(3-8/3)"),
     ("None", "8 / (3 - 8 / 3) + 0", "8 / (3 - 8 / 3) = 24", "24", "8 + 8 + 8", "(8)(3)", "8 3", "")),
    (game([8, 8, 3, 3], 24, "+-*"), BLOCK, ("None", "none"), ("8 / (3 - 8 / 3)",)),
    (game([8, 8, 3, 3], 24, "+-*"), "ANSWER", (), ("None",)),
    (game([7], 7), BLOCK, ("7", "((7))", "-" * 500 + "7"),
     ("07", "7.0", "7 +", "abs(7)", "7 = 7", "(" * 100 + "7" + ")" * 100, "9" * 13, "7 / (7 - 7)")),
    (game([1, 2, 3], -4), BLOCK, ("1 - 2 - 3", "-(3 + 2) + 1", "-3 - 2 + 1"), ("1 - (2 - 3)", "1 ** 2 - 3")),
    (game([1] * 401, 401), BLOCK, (), ("1" + " + 1" * 400,)),
    # Operation: within a millionth, in any form of a number.
    ({"type": 2, "answer": "-7/2"}, BOX,
     ("-7 / 2", r"\frac{7}{-2}", r"\frac{ -7 }{ 2 }", r"-\dfrac{7}{2}", "- 3.5", "−3.5", "-3.5000009"),
     ("-3.500002", "3.5", "+-3.5", "-3,5", r"\frac{7}{0}", "7/0", r"\frac{7}{--2}", "nan", "", "+", ".",
      "-3.5.", "-3.5\0", "9" * 10**6)),
    ({"type": 2, "answer": "1234"}, BOX,
     ("1,234.", "1{,}234", "1,234.00", "+1234", r"1\,234", r"\text{1234}", r"\text{1,234}", " {{1,234} } ",
      "2,468 / 2", r"\frac{2,468}{2}"), ("12,34", "1_234", "١٢٣٤", "0x4d2", "1234..", "1.234e3", "2,46/2")),
    ({"type": 2, "answer": "1/2"}, "ANSWER",
     (r"\boxed{.5}", r"\boxed{1} and \boxed{\frac{1}{2}}", r"\boxed{.5} \boxed{2", r"} \boxed{.5}",
      r"\boxed{\boxed{.5}}", r"$\boxed{0.5}$"),
     ("", "0.5", r"\boxed{", r"\boxed .5", r"\boxed{" * 5000, r"\boxed{.5} \boxed{x}")),
])
def test_trap_answers(data, form, right, wrong):
    for expected, answers in ((1, right), (0, wrong)):
        for answer in answers:
            assert score_of(data, form.replace("ANSWER", answer)) == expected, answer


def replaced(items, place, item):
    return [*items[:place], item, *items[place + 1:]]


def unlike(data):
    """Tasks that differ in one thing.  -> which, data, whether a right reply to it is right there"""
    number, answer = data["type"], data["answer"]
    if number == 1 and answer != "None":
        first, *rest = data["numbers"]
        yield "the same numbers", data | dict(numbers=rest + [first]), 1
        yield "one of them twice", data | dict(numbers=[first, *rest, first]), 0
        yield "one fewer", data | dict(numbers=rest), 0
        yield "another one", data | dict(numbers=[first + 1, *rest]), 0
        yield "target", data | dict(target=data["target"] + 1), 0
        for sign in set(re.findall("[-+*/]", answer)):
            yield f"no {sign}", data | dict(operators=data["operators"].replace(sign, "")), 0
    elif number == 3:
        words = data["words"]
        letters = sorted(set("".join(words)))
        for one, other in itertools.combinations(letters, 2):
            yield f"{one} is {other}", data | dict(words=[word.replace(one, other) for word in words]), 0
        new = next(letter for letter in "ABCDEFGHIJK" if letter not in letters)
        for place, word in enumerate(words):
            for k, letter in enumerate(word):
                alone = "".join(words).count(letter) == 1
                changed = replaced(words, place, word[:k] + new + word[k + 1:])
                yield f"{letter} of word {place} is {new}", data | dict(words=changed), int(alone)
        for place, sign in enumerate(data["operators"]):
            changed = replaced(data["operators"], place, "-" if sign == "+" else "+")
            yield f"operator {place}", data | dict(operators=changed), 0
        yield "a word longer", data | dict(words=[words[0] * 2, *words[1:]]), 0
    elif number == 7:
        for cell in range(0, 81, 9):
            digit = str(int(answer[cell]) % 9 + 1)
            changed = data["puzzle"][:cell] + digit + data["puzzle"][cell + 1:]
            yield f"cell {cell}", data | dict(puzzle=changed), 0
    elif number == 2:
        for off in (Fraction(1, 10**5), Fraction(-1, 10**5), 1, -1, -2 * Fraction(answer) or 1):
            yield f"value {off}", data | dict(answer=str(Fraction(answer) + off)), 0
    elif number in (6, 8):
        known = "ABCDEFGH" if number == 6 else [str(k) for k in range(1, len(data["sequence"]) + 1)]
        listed = set(answer.split(", ")) - {"none", ""}
        for item in known:
            changed = ", ".join(k for k in known if k in listed ^ {item}) or "none"
            yield item, data | dict(answer=changed), 0
    elif number in (0, 4, 5):
        for place in range(len(answer) - 1):
            a, b = answer[place:place + 2]
            changed = answer[:place] + b + a + answer[place + 2:]
            yield f"place {place}", data | dict(answer=changed), int(a == b)
            yield f"without place {place}", data | dict(answer=answer[:place] + answer[place + 1:]), 0


@pytest.mark.parametrize("number", range(9))
def test_a_right_reply_is_wrong_where_the_task_differs_in_one_thing(number):
    env, found = tasks(1 if number in (3, 7) else 4, number, cryptarithm_max_letters=4, game_max_numbers=4)
    seen = set()
    for task in found:
        for which, data, right in unlike(task.data):
            seen.add(right)
            told = score(env, envs.Task("t", "s", [], data), env.solution(task))
            assert told == right, f"{env.solution(task)!r}, {which}: {data}"
    assert 0 in seen


def test_a_sudoku_has_each_digit_once_in_rows_in_columns_and_in_boxes():
    """Rows are nine digits in turn, from another one on in each: where they start may break one rule."""
    digits, empty = "123456789", "." * 81
    starts = {"right": [0, 3, 6, 1, 4, 7, 2, 5, 8], "boxes": [*range(9)], "columns": [0, 3, 6] * 3}
    grids = {name: "".join(digits[k:] + digits[:k] for k in of_rows) for name, of_rows in starts.items()}
    right = grids.pop("right")
    grids["rows"] = "".join(grids["columns"][k::9] for k in range(9))  # exchanged with columns
    assert score_of(dict(type=7, puzzle=empty, answer=right), right) == 1
    for name, grid in grids.items():
        seen = {unit[0] + "s" if unit[0] != "box" else "boxes" for cell in range(81) for other in PEERS[cell]
                if grid[cell] == grid[other] for unit in units(cell) & units(other)}
        assert seen == {name}
        assert score_of(dict(type=7, puzzle=empty, answer=right), grid) == 0, name


def test_trap_sudoku_grids():
    env, (task, *_) = tasks(1, 7)
    full = task.data["answer"]
    rows = [full[k:k + 9] for k in range(0, 81, 9)]
    puzzle = "\n".join(task.data["puzzle"][k:k + 9] for k in range(0, 81, 9))
    listed = "[" + ",\n ".join("[" + ", ".join(row) + "]" for row in rows) + "]"
    drawn = "\n------+-------+------\n├─────┼───────┼─────┤\n".join(
        "\n".join(" | ".join(" ".join(row[k:k + 3]) for k in (0, 3, 6)) for row in rows[j:j + 3])
        for j in (0, 3, 6))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows).replace("\n", f"\n{'|:-:' * 9}|\n", 1)
    for good in ("\n".join(rows), full, " ".join(full), listed, drawn, table, f"```\n{drawn}\n```",
                 f"{puzzle}\n\n" + "\n\n".join(rows), "1" * 81 + "\n" + full):
        assert score(env, task, good) == 1
    place = task.data["puzzle"].index(".")
    bad = full[:place] + str(int(full[place]) % 9 + 1) + full[place + 1:]
    moved = full.translate(str.maketrans("123456789", "234567891"))  # valid, but not with these givens
    for wrong in (puzzle, bad, moved, f"{full}\n{moved}", full[:80], full + "1", "\n".join(rows[:8]),
                  "\n".join([*rows[:4], "and", *rows[4:]]), full.replace("1", "١")):
        assert score(env, task, wrong) == 0
