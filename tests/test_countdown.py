"""Countdown: tasks, splits, verifier, solver, traces and data files, against evaluators written apart."""

import collections
import itertools
import math
import re
import time
import warnings
from fractions import Fraction

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import envs
from envs import countdown
from tests.run_folders import ROOT, work, write_jsonl

CHAT = {"style": "r1", "operators": "+-*/"}
TRIES = {"min_operands": 4, "max_operands": 4, "operators": "+-*/", "trace": "tries", "draw": "uniform"}


def score(env, reply, nums, target):
    """(correct, format, score) of a reply to a problem."""
    task = envs.Task("t", "countdown", [], {"nums": list(nums), "target": target})
    return tuple(env.start(task, 0).step(reply).info.values())


def value_of(text):
    """An expression's value by Python itself, with integers made exact (None: division by zero)."""
    try:
        return eval(re.sub(r"\d+", r"F(\g<0>)", f"({text})"), {"F": Fraction})
    except ZeroDivisionError:
        return None


def holds(style, reply, nums, target, limit=99):
    """Whether a well-formed reply is right, worked out apart from the verifier."""
    if style != "compact":
        text = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", reply, re.DOTALL)[-1]
        return (collections.Counter(map(int, re.findall(r"\d+", text))) == collections.Counter(nums)
                and value_of(text) == target)
    pool = collections.Counter(nums)
    for step in reply.split("|")[-1].split(";"):
        left, result = step.split("=")
        operands = collections.Counter(map(int, re.findall(r"\d+", left)))
        if operands - pool or value_of(left) != int(result) or not 0 <= int(result) <= limit:
            return False
        pool = pool - operands + collections.Counter([int(result)])
    return pool == collections.Counter([target])


@pytest.mark.parametrize("count, options", [
    (100, {"min_operands": 2, "max_operands": 4, "operators": "+-*/"}),
    (100, {"operators": "*/"}),  # random games get stuck here
    (100, {"skill": "mixed", "novice_share": 0, "max_operands": 4, "operators": "+-*/"}),
    (100, {**CHAT, "min_operands": 2, "max_operands": 4, "trace": "search"}),
    (50, {"style": "plain", "max_operands": 4}),
    (100, {**TRIES, "max_number": 99, "min_target": 90, "max_target": 99}),
    (5, {"min_operands": 6, "max_operands": 6, "operators": "+-*/", "trace": "search"}),
    pytest.param(700, {**CHAT, "min_operands": 4, "max_operands": 4, "max_number": 99, "max_target": 99},
                 marks=pytest.mark.slow),
], ids=str)
def test_solutions_are_right_by_other_means(count, options):
    env = envs.make("countdown", **options)
    style = env.config.style
    for k in range(count):
        task = env.task("train", k)
        nums, target = task.data["nums"], task.data["target"]
        assert env.config.min_operands <= len(nums) <= env.config.max_operands
        assert all(1 <= n <= env.config.max_number for n in nums) and (
            env.config.min_target <= target <= env.config.max_target)
        reply = env.solution(task)
        assert env.start(task, 0).step(reply).info == {"correct": 1.0, "format": 1.0, "score": 1.0}, reply
        assert holds(style, reply, nums, target), reply


@pytest.mark.parametrize("style, roles", [("r1", ["system", "user"]), ("plain", ["user"])])
def test_prompts_hold_the_problem_and_lead_into_the_solution(style, roles):
    env = envs.make("countdown", style=style, operators="+-*")
    task = env.task("train", 3)
    text = task.messages[-1]["content"]
    assert [message["role"] for message in task.messages] == roles
    assert f"Numbers: {' '.join(map(str, task.data['nums']))}\nTarget: {task.data['target']}\n" in text
    assert "multiplication" in text and "division" not in text
    assert text.endswith("<think>") == (style == "plain")
    whole = (text if style == "plain" else "") + env.solution(task)
    assert re.search(r"<think>\n[^<]+\n</think>\n<answer>[^<]+</answer>$", whole)


def problem(task):
    return (*sorted(task.data["nums"]), task.data["target"])


def test_a_tenth_of_the_problems_is_held_out_whatever_the_order():
    share = sum(countdown.is_test([a, b, c], t) for a, b, c in itertools.combinations(range(1, 21), 3)
                for t in range(1, 11)) / 11400
    assert 0.09 < share < 0.11
    assert len({countdown.is_test(nums, 17) for nums in itertools.permutations([3, 5, 9])}) == 1


def test_the_test_split_is_as_large_as_there_are_problems():
    assert envs.make("countdown", test_tasks=40).num_tasks("test") == 40
    small = envs.make("countdown", min_operands=2, max_operands=2, max_number=8, max_target=16, test_tasks=99)
    universe = {(a, b, t) for a in range(1, 9) for b in range(a, 9) for t in (a + b, b - a) if 1 <= t <= 16}
    expected = {p for p in universe if countdown.is_test(p[:2], p[2])}
    assert sorted(problem(small.task("test", k)) for k in range(small.num_tasks("test"))) == sorted(expected)
    assert 0 < len(expected) < 99


def test_held_out_parts_are_targets_and_sets_of_numbers():
    env = envs.make("countdown", held_out="parts", max_number=8, max_target=20, test_tasks=60)
    train, tests = [problem(env.task("train", k)) for k in range(2000)], collections.defaultdict(list)
    for k in range(env.num_tasks("test")):
        task = env.task("test", k)
        tests[task.source].append(problem(task))
    assert sorted(tests) == ["countdown/new_numbers", "countdown/new_target"]
    assert not {p[-1] for p in train} & {p[-1] for p in tests["countdown/new_target"]}
    assert not {p[:-1] for p in train} & {p[:-1] for p in tests["countdown/new_numbers"]}
    assert {p[-1] for p in tests["countdown/new_numbers"]} <= {p[-1] for p in train}


def test_uniform_draws_make_every_target_as_likely():
    env = envs.make("countdown", draw="uniform", min_target=20, max_target=27)
    targets = collections.Counter(env.task("train", k).data["target"] for k in range(800))
    assert set(targets) == set(range(20, 28)) and max(targets.values()) < 2 * min(targets.values())


RIGHT, WRONG, UNREADABLE = (1, 1, 1.0), (0, 1, 0.1), (0, 0, 0.0)  # correct, format, score
CASES = {  # options, numbers, target, replies by verdict (of style=r1, where without tags, what is in them)
    "expressions": (CHAT, [3, 5, 9], 17, {
        RIGHT: ["3 + 5 + 9", "9 - (-5 - 3)", "(9+(5))+3", "\n3 +\r\n5\t+ 9 \n", "3 - -5 + 9"],
        WRONG: ["3 + 9 + 5 + 0", "5 + 9 + 9 - 6", "17", "3 + 5 + 9 + 3 - 3", "3 + 5 - 9", "39 + 5"],
        UNREADABLE: [
            "3 + 5 + 9 = 17", "3 + 5 +", "3 5 9", "", "()", "3(5) + 9", "+3 + 5 + 9", "3 + 5 + 9 # 1",
            "3 + 5 + 9.0", "0x3 + 5 + 9", "3 + 5\\\n + 9", "3 / (5 - 5) + 9", "3 × 5 + 9"]}),
    "fractions": (CHAT, [3, 3, 8, 8], 24, {RIGHT: ["8 / (3 - 8 / 3)"]}),
    "less than 1 in floats": (CHAT, [1, 49, 49], 1, {RIGHT: ["1 / 49 * 49"]}),
    "the same in floats": (CHAT, [2**53 + 1, 2**53], 0, {WRONG: ["9007199254740993 - 9007199254740992"]}),
    "signs nest nothing": (CHAT, [3, 4], -1, {RIGHT: [f"3 {'-' * 400}(-4)"]}),
    "sums nest, up to 100 deep": (CHAT, [1] * 150, 150, {UNREADABLE: [" + ".join("1" * 150)]}),
    "not allowed": (dict(style="r1", operators="+*"), [3, 4, 5], 11, {WRONG: ["3 * 5 - 4"]}),
    "a sign is a -": (dict(style="r1", operators="+*"), [3, 4], 12, {RIGHT: ["3 * 4"], WRONG: ["-3 * -4"]}),
    "a step that is not allowed": (dict(operators="+"), [3, 4], 1, {WRONG: ["4 - 3 = 1"]}),
    "the last complete answer": (dict(style="r1"), [3, 4], 7, {
        RIGHT: [
            "<answer>3 - 4</answer> then <answer>3 + 4</answer> yes", "<answer>3 + 4</answer><answer>4 - 3",
            "<answer><answer>3 + 4</answer></answer>", "<answer>3 + 4" + " " * 990 + "</answer>"],
        WRONG: ["<answer>3 + 4</answer><answer>4 - 3</answer>"],
        UNREADABLE: [
            "<answer>3 + 4", "3 + 4</answer>", "</answer>3 + 4<answer>", "<ANSWER>3 + 4</ANSWER> no answer",
            "<answer>3 + 4< /answer>", "<answer>3 + 4" + " " * 996 + "</answer>"]}),
    "steps": ({}, [6, 18, 14], 38, {
        RIGHT: [
            "18 + 14 = 32; 32 + 6 = 38", " 14+18=32 ;\n6+32=38\n",
            "14 - 6 = 8; 18 + 8 = 26 x | any \0 text | 18 + 14 = 32; 32 + 6 = 38"],
        WRONG: [
            "18 + 14 = 32; 32 + 6 = 38 | 18 + 14 = 32", "18 + 14 = 32; 32 + 6 = 38; 38 + 0 = 38",
            "18 + 14 = 32; 32 + 6 = 39", "18 + 18 = 36; 36 + 2 = 38", "32 + 6 = 38; 18 + 14 = 32"],
        UNREADABLE: [
            "18 + 14 = 32; 32 + 6 = 38 |", "38", "18 + 14 = 32; 32 + 6 = 38;", "18 + 14 = 32, 32 + 6 = 38",
            "x 18 + 14 = 32; 32 + 6 = 38 x", "18 + 14 + 6 = 38", "6 - 14 = -8; -8 + 18 = 10",
            "018 + 14 = 32; 32 + 6 = 038", "1８ + 14 = 32; 32 + 6 = 3٨", "18 / 0 = 0; 32 + 6 = 38"]}),
    "steps up to 99": ({}, [60, 39, 60], 39, {RIGHT: ["60 + 39 = 99; 99 - 60 = 39"]}),
    "steps over 99": ({}, [60, 40, 60], 40, {
        RIGHT: ["60 - 60 = 0; 0 + 40 = 40"],
        WRONG: ["60 + 40 = 100; 100 - 60 = 40", "60 - 60 = 0"]}),  # a number is left over
    "exact steps": ({"operators": "+-*/"}, [4, 12], 3, {RIGHT: ["12 / 4 = 3"]}),
    "steps with a rest": ({"operators": "+-*/"}, [4, 13], 3, {WRONG: ["13 / 4 = 3"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_right_wrong_or_unreadable(case):
    options, nums, target, replies = CASES[case]
    env = envs.make("countdown", **options)
    wraps = env.config.style == "r1"
    for verdict, texts in replies.items():
        for text in texts:
            reply = f"<think>...</think> <answer>{text}</answer>" if wraps and "answer" not in text else text
            assert score(env, reply, nums, target) == verdict, reply


HOSTILE = [  # (numbers, target, text); a looser reader would take each of them for right, or long for it
    ([1, 5, 2], 3, "1.5*2"), ([7, 2], 3, "7//2"), ([95, 87, 92], 1, "95**87**92"), ([0, 7], 7, "00 + 7"),
    ([10, 3], 13, "1_0 + 3"), ([10, 3], 13, "１０ + 3"), ([7, 3], 10, "7 +\0 3"), ([7, 3], 10, "\ud800"),
    ([1], 1, "(" * 100_000 + "1" + ")" * 100_000), ([1], 1, "(" * 400 + "1" + ")" * 400),
    ([7, 3], 10, "7 + 3\u00a0"), ([7, 3], 10, "__import__('os').getpid() * 0 + 10"),
    ([7, 3], 10, "1" * 10_000_000), ([7, 3], 10, "1 + " * 2_500_000), ([7, 3], 10, "9" * 990 + "x"),
    ([7, 3], 10, "answer></answer>" * 600_000), ([7, 3], 10, "7 + 3 = 10;" * 900_000),
]


@pytest.mark.parametrize("style", ["compact", "r1"])
def test_hostile_replies_score_nothing_at_once(style):
    """The fastest of three, in processor time: other programs share this machine."""
    env, limit = envs.make("countdown", style=style, operators="+-*/"), work() / 2
    for nums, target, text in HOSTILE:
        for reply in (text, f"| {text} = {target}" if style == "compact" else f"<answer>{text}</answer>"):
            seconds = []
            while len(seconds) < 3 and min(seconds, default=limit) >= limit:
                began = time.thread_time()
                assert score(env, reply, nums, target) == UNREADABLE, (style, reply[:60])
                seconds.append(time.thread_time() - began)
            assert min(seconds) < limit, (style, reply[:60], min(seconds))


def shortest(nums, operators, limit=None):
    """value -> the least length of an expression, over all trees, orders and brackets; limit: of results on
    the way to it in a game of whole numbers"""
    least = {}

    def go(items, digits):
        if len(items) == 1:
            value, text = items[0]
            least[value] = min(least.get(value, math.inf), len(text) if limit is None else digits)
        for i, j in itertools.permutations(range(len(items)), 2):
            left, right, rest = items[i][1], items[j][1], [x for k, x in enumerate(items) if k not in (i, j)]
            for op in operators:
                texts = [f"{x} {op} {y}" for x in (left, f"({left})") for y in (right, f"({right})")]
                value = value_of(texts[-1])
                if value is not None and limit is None:
                    go([*rest, (value, min((x for x in texts if value_of(x) == value), key=len))], 0)
                elif value is not None and value.denominator == 1 and 0 <= value <= limit:
                    go([*rest, (value, str(value))], digits + len(str(value)))

    go([(Fraction(n), str(n)) for n in nums], 0)
    return least


WHOLE = dict(operators="+-*/", max_target=99)


@pytest.mark.parametrize("nums, options", [
    *((nums, CHAT) for nums in ((4, 4), (1, 7, 7), (2, 3, 10), (6, 18, 14), (1, 1, 1))),
    pytest.param((3, 3, 8, 8), CHAT, marks=pytest.mark.slow),
    ((6, 18, 14), dict(max_intermediate=25, max_target=25)), ((2, 3, 10, 7), WHOLE),
    ((12, 4, 3), WHOLE | dict(operators="/")), ((9, 9, 1, 2), WHOLE | dict(operators="+*")),
    ((2, 4, 6, 8), WHOLE | dict(operators="-*/"))], ids=str)
def test_the_solver_finds_a_solution_where_there_is_one_and_the_shortest(nums, options):
    env = envs.make("countdown", **options)
    limit, compact = env.config.max_intermediate, env.config.style == "compact"
    known = shortest(nums, env.config.operators, limit if compact else None)
    rules = countdown.Rules(env.config.operators, limit, True)
    for target in range(min(61, limit + 1)):
        reply = env.solution(envs.Task("t", "s", [], {"nums": list(nums), "target": target}))
        assert (reply is not None) == (target in known), target
        assert not compact or countdown.makes(nums, target, rules) == (target in known)
        if reply:
            parts = re.findall(r"= (\d+)" if compact else "<answer>(.*)</answer>", reply)
            assert holds(env.config.style, reply, nums, target, limit), reply
            assert sum(map(len, parts)) == known[target], reply


@pytest.mark.parametrize("nums, target, options, solvable", [
    ([50, 49, 48], 51, {}, True), ([60, 60], 120, {}, False),  # over the limit
    ([60, 59, 50], 5, dict(skill="mixed", novice_share=0), False),
    ([3, 3, 8, 8], 24, dict(operators="+-*/"), False),  # needs a fraction on the way
    ([3, 3, 8, 8], 24, CHAT, True), ([3, 3, 8, 8], 24, CHAT | dict(trace="search"), True),
    ([6, 6, 1, 1, 1, 4], 9, dict(operators="*/", max_intermediate=36, max_target=30), True),
    ([6, 6, 1, 1, 1, 4], 9, dict(operators="*/", max_intermediate=35, max_target=30), False),
    ([*range(1, 9)], 36, CHAT, False),  # eight numbers: more than the solver takes on
], ids=str)
def test_unsolvable_problems_have_no_solution(nums, target, options, solvable):
    env = envs.make("countdown", **options)
    reply = env.solution(envs.Task("t", "s", [], {"nums": nums, "target": target}))
    assert bool(reply) is solvable and (not reply or holds(env.config.style, reply, nums, target))


def test_mixed_skill_is_novices_and_random_solutions_or_searches():
    def rate(searches=0, **options):
        env = envs.make("countdown", skill="mixed", **options)
        games = [(task, env.solution(task)) for task in (env.task("train", k) for k in range(600))]
        steps = [env.start(task, 0).step(reply) for task, reply in games]
        assert all(step.info["format"] == 1 for step in steps)
        assert abs(sum(" | " in reply for _, reply in games) / len(games) - searches) < 0.05
        return sum(step.reward for step in steps) / len(steps)

    novice = rate(novice_share=1)
    assert 0.26 < novice < 0.36  # a random legal game hits the target that often
    assert abs(rate() - (0.3 + 0.7 * novice)) < 0.05
    assert abs(rate(0.3, trace="search") - (0.3 + 0.7 * novice)) < 0.05
    assert rate(novice_share=0) == rate(novice_share=0, max_operands=4, operators="+-*/", style="r1") == 1


@pytest.mark.parametrize("options", [{}, {"max_operands": 4, "operators": "+-*/", "max_trace_steps": 30},
                                     {"max_trace_steps": 0}], ids=str)
def test_compact_traces_are_searches_in_the_vocabulary(options):
    """Each step from the pool at hand, each x where the target is out of reach."""
    env = envs.make("countdown", trace="search", **options)
    words, total, longest = set(env.vocabulary), 0, 0
    for k in range(60):
        task = env.task("train", k)
        nums, target = task.data["nums"], task.data["target"]
        reply = env.solution(task)
        elided = reply.replace(" =", "").replace(";", "")
        assert set(elided.split()) <= words
        elided = re.sub(r"([-+*/] \d+) (?=\d)", r"\1 = ", elided)  # a tokenizer without them does so
        assert re.sub(r"(\d+) (?=\d)", r"\1; ", elided) == reply
        trace, _, answer = reply.partition(" | ")
        pools, path = [list(nums)], []
        for token in re.findall(r"x|\d+ [-+*/] \d+ = \d+", trace):
            if token == "x":
                assert target not in shortest(pools.pop(), env.config.operators, 99)
                path.pop()
                total += 1
                continue
            a, op, b, _, result = token.split()
            pool = list(pools[-1])
            pool.remove(int(a))
            pool.remove(int(b))
            assert value_of(f"{a} {op} {b}") == int(result)
            pools.append([*pool, int(result)])
            path.append(token)
        assert pools[-1] == [target] and "; ".join(path) == answer
        tried = len(re.findall("=", trace))
        assert tried <= env.config.max_trace_steps + len(nums) - 1
        longest = max(longest, tried)
    assert (total > 0 and longest >= 12) if env.config.max_trace_steps else total == 0


def makes_at_once(n, aside, target):
    return (target in (n + aside, abs(n - aside), n * aside) or n == target * aside and aside > 0
            or aside == target * n and n > 0)


@pytest.mark.parametrize("good", [0, 0.5, 1])
def test_tries_tell_all_that_a_first_step_leaves_until_one_succeeds(good):
    env, count = envs.make("countdown", good_tries=good, max_number=40, **TRIES), 0
    tasks = [task for task in (env.task("train", k) for k in range(20)) if len({*task.data["nums"]}) == 4]
    for task in tasks:
        nums, target, reply = *task.data.values(), env.solution(task)
        assert set(reply.replace(" =", "").replace(";", "").split()) <= set(env.vocabulary)
        tries, answer = reply.split(" | ")
        tries = tries.split("; ")
        count += len(tries)
        assert tries[-1].startswith(answer.split(";")[0])
        assert len({text.split(" = ")[0] for text in tries}) == len(tries)
        for text in tries:
            (a, op, b, _, result), written = text.split()[:5], text.split()[5:]
            assert value_of(f"{a} {op} {b}") == int(result)
            expected, pool = [], [n for n in nums if n not in (int(a), int(b))] + [int(result)]
            wins = target in shortest(pool, "+-*/", 99)
            for aside in range(written.count(":")):
                x, y = sorted(pool[:aside] + pool[aside + 1:], reverse=True)
                values = [value_of(f"{x} {op} {y}") for op in "+-*/"] + [value_of(f"{y} / {x}")] * (x != y)
                values = [v for v in values if v is not None and v == int(v) <= 99]
                wanted = [n for n in range(100) if makes_at_once(n, pool[aside], target)]
                start = len(expected) + 1
                assert sorted(map(int, written[start:start + len(wanted)])) == wanted
                expected += [str(pool[aside]), *written[start:start + len(wanted)], ":", *map(str, values)]
            assert wins == (text == tries[-1]) == (int(written[-1]) in wanted)
            assert written == expected[:len(written)]
            assert wins or (aside, len(written)) == (2, len(expected))
    assert count == len(tasks) if good == 1 else count > 1.3 * len(tasks)


def test_vocabulary_covers_prompts_and_replies():
    assert len(set(envs.make("countdown").vocabulary)) == 108
    assert envs.make("countdown", **CHAT).vocabulary is None
    env = envs.make("countdown", max_intermediate=30, max_target=30)
    assert "30" in env.vocabulary and "31" not in env.vocabulary
    for task in (env.task("train", k) for k in range(50)):
        text = f"{task.messages[0]['content']} : {env.solution(task)}"
        assert set(text.replace("=", "").replace(";", "").split()) <= set(env.vocabulary)


ROWS = [{"nums": [a, b, 2], "target": abs(a - b) + 2, "extra": "kept out"}
        for b in range(1, 29) for a in range(1, 91)]


def test_data_files_and_sets_of_the_hub_split_by_position(tmp_path, monkeypatch):
    parquet, sets = str(tmp_path / "rows.parquet"), {("some/rows", "train"): datasets.Dataset.from_list(ROWS)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split, streaming: sets[name, split])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    for data in (write_jsonl(tmp_path / "rows.jsonl", ROWS), parquet, "some/rows"):
        env = envs.make("countdown", data=data, difficulty=True)
        test = [env.task("test", k) for k in range(env.num_tasks("test"))]
        assert [task.data["nums"] for task in test] == [row["nums"] for row in ROWS[:1024]]
        held_out = {problem(task) for task in test}
        kept = [row for row in ROWS[1024:] if (*sorted(row["nums"]), row["target"]) not in held_out]
        assert 0 < len(kept) < len(ROWS) - 1024  # [1, 2, 2] and [2, 1, 2] are one problem
        assert [env.task("train", k).data for k in range(env.num_tasks("train"))] == [
            {"nums": row["nums"], "target": row["target"]} for row in kept]
        assert test[5].id == "countdown-test-5" and test[5].source == "countdown/3"


def test_rows_that_the_options_make_unsolvable_are_told_and_refused_where_they_are_many(tmp_path):
    rows = [{"nums": [n, 5], "target": n - 5 if n < 10 else 5 * n} for n in range(7, 17)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def says(count, operators):
        return f"{path}: {count} of 10 rows that were tried have no solution.*={re.escape(operators)}"

    with warnings.catch_warnings(action="error"):
        envs.make("countdown", data=path, style="r1", operators="+-*/")
    with pytest.warns(match=says(3, "+*")):
        envs.make("countdown", data=path, style="r1", operators="+*")
    with pytest.raises(envs.BadInput, match=f"{says(7, '+-')}.*half"):
        envs.make("countdown", data=path, style="r1", operators="+-")


@pytest.mark.parametrize("rows, expected", [
    ([*ROWS[:5], b"", {"nums": [3, 4]}], "row 7: field target is missing"),
    ([{"nums": [1] * 7, "target": 4}], "row 1: field nums: expected a list of 2 to 6 integers"),
    ([{"nums": "3 4", "target": 7}], "row 1: field nums: .* got '3 4'"),
    ([{"nums": [3, True], "target": 4}], "row 1: field nums: .*True"),
    ([{"nums": [3, 10**7], "target": 3}], "row 1: field nums: .* from 1 to 1000000"),
    ([{"nums": [3, 4], "target": 7.5}], "row 1: field target: expected an integer from 0 .* got 7.5"),
    ([[3, 4, 7]], "row 1: expected an object with the fields nums and target"),
    ([b"[" * 100_000], "cannot be read at row 1 .Recursion"), ([b"\xff\xfe"], "cannot be read"),
    (ROWS[:1], "expected at least 2 rows"), (ROWS[:1] * 2, ".* in the test split too"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_with_rows_is_named(rows, expected, tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(envs.BadInput, match=f"{path}: {expected}") as error:
        envs.make("countdown", data=path, **CHAT)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("options, expected", [
    ({"min_operands": 1}, "min_operands: expected 2 to 6"), ({"data": "some/missing"}, "some/missing: "),
    ({"min_operands": 4}, "max_operands: expected min_operands .4. to 6, got 3"),
    ({"max_number": 100}, "max_number: expected 1 to 99 .max_interm"), ({"test_tasks": 0}, "test_tasks"),
    ({"max_target": 2_000_000, "style": "r1"}, "max_target"), ({"operators": "++"}, "operators"),
    ({"style": "chat"}, "expected one of compact, r1, plain"), ({"novice_share": "nan"}, "novice_share"),
    ({"difficulty": "maybe"}, "expected bool"), ({"skill": "novice"}, "expected one of solver, mixed"),
    ({"min_target": 61}, "min_target"), ({"draw": "uniform", "max_operands": 5}, "draw: expected game"),
    ({"good_tries": 2}, "good_tries"), ({"trace": "tries"}, "trace: expected tries only together with"),
    ({"operators": "+", "max_number": 20, "max_target": 2}, "expected a train problem"),
    ({"max_number": 1, "operators": "+", "test_tasks": 1}, "expected a test problem"),
])
def test_bad_options_are_named(options, expected):
    with pytest.raises(envs.BadInput, match=expected) as error:
        envs.make("countdown", **options).num_tasks("test")
    assert "\n" not in str(error.value)


def test_the_replies_on_the_page_are_right():
    page = (ROOT / "docs" / "countdown.md").read_text()
    replies = re.findall(r"    user +([\d ]+) -> (\d+)\n    assistant +(.+)\n", page)
    assert len(replies) == 3
    for nums, target, reply in replies:
        assert score(envs.make("countdown"), reply, map(int, nums.split()), int(target)) == (1, 1, 1.0)
