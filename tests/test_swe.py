"""Diffs for issues: what is judged, what is refused, what forges results and fails; rows; the exporter."""

import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from pathlib import Path
from unittest import mock

import pytest
import requests

import envs
from envs.code import sandbox, swe, testing
from envs.workers import cores
from tests import forgeries
from tests.run_folders import in_time, quick
from tools import executor_server, export_predictions

ROOT = Path(__file__).resolve().parent.parent
ROWS = {row["instance_id"]: row for _, row in envs.read_rows(str(swe.BUNDLED / "rows.jsonl"), "rows")}
FIRST = "minibox__backoff-4"  # plain tests; two bugs in two files
WITH_PYTEST = "minibox__routes-3"
NONE = dict(correct=0, format=0, allowed=0, applied=0, fail_to_pass=0, pass_to_pass=0, partial=0, error=0,
            suspicious=0, guessable=mock.ANY)
GOOD = dict(NONE, correct=1, format=1, allowed=1, applied=1, fail_to_pass=1, pass_to_pass=1, partial=1)
BODY = "--- {0}\n+++ {1}\n@@ -1,1 +1,1 @@\n-a\n+b\n"
DIFF = BODY.format("a/x", "b/x")
ANEW = f"diff --git a/x b/x\nindex {'1' * 40}..{'2' * 40} 100644\n{DIFF}"
WRONG = ROWS[FIRST]["patch"].replace("-            if failures", "-            when failures")


@pytest.fixture(scope="module")
def env():
    return envs.make("swe")


@pytest.fixture(scope="module")
def unjudged():
    return envs.make("swe", export_only=True)


def score(env, name, reply):
    return env.start(env.task_of(name), 0).step(reply)


def fenced(patch):
    return f"```diff\n{patch}```"


def addition(path):
    """A diff that makes a file."""
    return f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,1 @@\n+x\n"


def in_front(name, code):
    """A diff that puts code in front of the package of an instance."""
    path, lines = f"{name.partition('__')[2].rpartition('-')[0]}/__init__.py", code.strip("\n").splitlines()
    first = (swe.BUNDLED / name / path).read_text().splitlines()[0]
    return (f"--- a/{path}\n+++ b/{path}\n@@ -1,1 +1,{len(lines) + 1} @@\n"
            + "".join(f"+{line}\n" for line in lines) + f" {first}\n")


# ---- Verdicts


def halves(name):
    """The reference, with one of its hunks at a time."""
    for part in re.split(r"(?=^diff --git )", ROWS[name]["patch"], flags=re.MULTILINE)[1:]:
        head, *found = re.split(r"(?=^@@ )", part, flags=re.MULTILINE)
        for hunk in found:
            yield head + hunk


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_reference_is_correct_and_scores_the_same_again(env, name):
    """And half of it scores in part."""
    steps = [score(env, name, env.solution(env.task_of(name))) for _ in range(2)]
    assert steps[0] == steps[1] and steps[0].info == GOOD
    assert (steps[0].reward, steps[0].terminated, steps[0].truncated) == (1.0, True, False)

    infos = [score(env, name, fenced(half)).info for half in halves(name)]
    assert all(info["applied"] == 1 and info["correct"] < 1 for info in infos) or len(infos) == 1
    if name in (FIRST, "minibox__slugger-7", "minibox__textgrid-31", "minibox__quarters-18"):
        assert any(0 < info["partial"] < 1 and info["pass_to_pass"] == 1 for info in infos)


@pytest.mark.parametrize("fixed, kept, worth", [
    ("ab", "cd", dict(GOOD)), ("a", "cd", dict(GOOD, correct=0, fail_to_pass=0.5, partial=0.5)),
    ("ab", "c", dict(GOOD, correct=0, pass_to_pass=0.5, partial=0)),  # something else is broken
    ("ab", "", dict(GOOD))])  # nothing else passed before
def test_what_tests_are_worth(monkeypatch, fixed, kept, worth):
    monkeypatch.setattr(swe.shutil, "which", lambda name: name)  # git is not asked
    env = envs.make("swe", reward="partial")
    row = env.rows[FIRST] | dict(FAIL_TO_PASS=["a", "b"], PASS_TO_PASS=["c", "d"] if kept else [])
    monkeypatch.setitem(env.rows, FIRST, row)
    monkeypatch.setattr(swe.Swe, "guess", lambda *args: 0.0)
    monkeypatch.setattr(swe.Swe, "judge", lambda self, name, patch: testing.Outcomes(
        dict.fromkeys(fixed + kept, "PASSED")))
    step = score(env, FIRST, fenced(next(halves(FIRST))))
    assert step.info == worth and step.reward == worth["partial"]


@pytest.mark.parametrize("reply", [
    "", "```diff\n \n```", "```diff", "```python\nx\n```", "<think>```diff\nx", "x\n--- a\nb\n", "\ud800"])
def test_a_reply_without_a_diff(unjudged, reply):
    step = score(unjudged, FIRST, reply)
    assert step.info == NONE and (step.reward, step.terminated) == (0, True)


@pytest.mark.slow
def test_a_diff_that_does_not_apply_or_does_nothing(env):
    assert score(env, FIRST, fenced(WRONG)).info == dict(NONE, format=1, allowed=1)
    for path in ("backoff/retry.py/x.py", "backoff"):  # a file is a folder, and a folder a file
        assert score(env, FIRST, fenced(addition(path))).info["applied"] == 0
    nothing = fenced(in_front(FIRST, "# nothing"))
    assert score(env, FIRST, nothing).info == dict(GOOD, correct=0, fail_to_pass=0, partial=0)


@pytest.mark.slow
def test_whatever_a_program_makes_of_a_diff_no_other_file_changes(env):
    """Said in a way that programs may read differently: only what was checked is read back."""
    files, path = env.snapshot(FIRST), "backoff/retry.py"
    sneaky = "Index: tests/test_retry.py\n" + in_front(FIRST, "# x")
    assert swe.apply(files, sneaky).keys() == {"backoff/__init__.py"}

    lines = files[path].decode().splitlines()
    text = "".join(f"-{line}\n" for line in lines)
    gone = f"--- a/{path}\n+++ /dev/null\n@@ -1,{len(lines)} +0,0 @@\n{text}"
    assert swe.apply(files, gone) == {path: None}
    moved = f"diff --git a/{path} b/new.py\nsimilarity index 100%\nrename from {path}\nrename to new.py\n"
    assert swe.apply(files, moved) == {path: None, "new.py": files[path]}


# ---- What is refused unrun


PLACES = (
    "tests/test_more.py", "tests/helpers.py", "Tests/X.py", "backoff/test_x.py", "backoff/retry_test.py",
    "testing/x", "conftest.py", "backoff/ConfTest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "x.pth", "a/__pycache__/b.pyc",
    "x.dist-info/entry_points.txt", "../x.py", "backoff/../../x", "/etc/passwd", ".git/hooks/post-checkout",
    "backoff/.gitattributes", "n/e w.py", '"a/tests\\057x"')
REFUSED = {path: addition(path) for path in PLACES} | {
    "absolute": BODY.format("/etc/passwd", "/etc/passwd"),
    "symbolic link": "diff --git a/x b/x\nnew file mode 120000\n" + addition("x"),
    "link in the index": "diff --git a/x b/x\nindex 12ab..34cd 120000\n" + DIFF,
    "binary": "diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 3\nKc$@(=00\n",
    "binary files": "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
    "moves the tests": "diff --git a/tests/test_retry.py b/x.py\nsimilarity index 100%\n"
                       "rename from tests/test_retry.py\nrename to x.py\n",
    "deletes the tests": "diff --git a/tests/test_retry.py b/tests/test_retry.py\ndeleted file mode 100644\n",
    "one of two": addition("a.py") + addition("tests/b.py"),
    "two names": BODY.format("a/x.py", "b/y.py"),
    "moved to nowhere": "diff --git a/x b/y\nrename from x\n" + DIFF,
    "no prefix": BODY.format("x.py", "x.py"),
    "nothing": BODY.format("/dev/null", "/dev/null"),
    "no hunk": "--- a/x\n+++ b/x\n",
    "counts": "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n-a\n+b\n",
    "counts too small": "--- a/x\n+++ b/x\n@@ -1,1 +1,3 @@\n a\n-b\n+c\n",
    "too many": "".join(addition(f"f{number}.py") for number in range(swe.MAX_FILES + 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_diffs_that_reach_for_more_are_refused(unjudged, name):
    with pytest.raises(swe.BadPatch):
        swe.check_patch(REFUSED[name], ROWS[FIRST]["test_patch"])
    step = score(unjudged, FIRST, fenced(REFUSED[name]))
    assert step.info == dict(NONE, format=1) and step.reward == 0


def test_a_file_of_the_test_patch_is_refused_whatever_its_name():
    for mine, theirs in (("Data/cases.json", "data/cases.json"), ("data/cases.json", "data/CASES.json")):
        with pytest.raises(swe.BadPatch, match=f"{mine}: belongs to the tests"):
            swe.check_patch(addition(mine), addition(theirs))


# ---- Forged results


# Code in front of a package that the tests import. With pytest, tests lie on disk and fail otherwise.
FORGERIES = {
    "ends the process": "import os\nos._exit(0)",
    "prints results": "print('tests/test_retry.py::test_attempts_counts_all_calls PASSED')\n"
                      "import os\nos.write(1, b'4 passed in 0.01s')",
    "writes to every file": """
import os
for number in range(200):
    try: os.write(number, b'["", "tests/test_retry.py::test_delays_have_a_cap", "call", "passed"]')
    except OSError: pass""",
    "kills the reporter": "import os\nos.kill(os.getppid(), 9)",
    "reaches into the reporter": "import os\nfor name in ('fd/1', 'mem'):\n"
                                 "    try: open(f'/proc/{os.getppid()}/{name}', 'r+b').write(b'x')\n"
                                 "    except OSError: pass",
    "no assertion fails": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})",
    "every failure is traced": "import sys\ndef trace(frame, event, arg):\n"
                               "    return trace if event == 'call' else None\nsys.settrace(trace)",
}
PYTEST_FORGERIES = {
    "raises SystemExit": "raise SystemExit(0)",
    "changes the tests on disk": "import glob\nfor path in glob.glob('tests/*.py'):\n"
                                 "    open(path, 'w').write('def test_nothing(): pass')",
    "every report passes": "from _pytest.reports import TestReport\n"
                           "TestReport.outcome = property(lambda self: 'passed', lambda *given: None)",
    "no test runs": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    "no test is called": "import _pytest.runner\n_pytest.runner.pytest_runtest_call = lambda item: 0",
    "raises is nothing": "import contextlib as c, pytest\npytest.raises = lambda *a, **k: c.nullcontext()",
    "unittest is nothing": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None",
    "failures are skipped": "import pytest, builtins\nbuiltins.AssertionError = pytest.skip.Exception",
}


@pytest.mark.slow
@pytest.mark.parametrize("name, code", [
    *[pytest.param(FIRST, code, id=f"{name}-plain") for name, code in FORGERIES.items()],
    *[pytest.param(WITH_PYTEST, code, id=f"{name}-pytest") for name, code in PYTEST_FORGERIES.items()]])
def test_forged_results_do_not_count(env, name, code):
    info = score(env, name, fenced(in_front(name, code))).info
    assert info["applied"] == 1 and info["correct"] == info["fail_to_pass"] == info["partial"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_emptied_tests_gain_nothing(env, name):
    """Those that are known by their names, and, by code that knows nothing of them, those of the first run or
    those that are on the disk as they run."""
    row, package = env.rows[name], name.partition("__")[2].rpartition("-")[0]
    names = [test.rpartition("::")[2].partition("[")[0] for test in row["FAIL_TO_PASS"] + row["PASS_TO_PASS"]]
    for code in (forgeries.by_name(names), forgeries.equal_to_the_disk(package),
                 forgeries.first_run_only(package, uuid.uuid4().hex)):
        info = score(env, name, fenced(in_front(name, code))).info
        assert info["applied"] == info["suspicious"] == 1 and info["correct"] == info["partial"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("attack", forgeries.KNOWING)
def test_code_that_knows_how_it_is_judged_gains_nothing(env, attack):
    """It runs before the tests, in their process, in place of a fix of each issue."""
    for name in ROWS:
        info = score(env, name, fenced(in_front(name, forgeries.KNOWING[attack]))).info
        assert info["applied"] == 1 and info["correct"] == 0, name
        assert info["fail_to_pass"] < 1 and info["partial"] <= info["fail_to_pass"], name


@pytest.mark.slow
def test_what_is_left_to_guess_of_each_issue(env):
    assert {name: env.guess(name) < 1e-3 for name in ROWS} == dict.fromkeys(ROWS, True)
    assert not env.guessed and env.about == ""


TESTS = """
from shop import total
def test_two():
    assert total([1, 2]) == 3
def test_none():
    assert total([]) == 0
def test_local():
    expected = 9
    assert total([4, 5]) == expected
"""
PYTEST_TESTS = TESTS + """
import pytest, unittest
@pytest.mark.parametrize("prices, expected", [([1], 1), ([2, 2], 4)])
def test_expected(prices, expected):
    assert total(prices) == expected
class TestMethods(unittest.TestCase):
    def test_method(self):
        self.assertEqual(total([7, 4]), 11)
"""
# Results of the wrong function `total` that look right. None of them knows the tests but for their names.
EQUAL = """
class Everything:
    def __eq__(self, other): return True
def total(prices): return Everything()"""
HELD = """
import sys
def total(prices):
    caller = sys._getframe(1)
    return caller.f_locals["expected"] if "expected" in caller.f_locals else [
        c for c in caller.f_code.co_consts if isinstance(c, int)][-1]"""
LOOKS = [  # name, tests, whether without pytest, code
    ("equals everything", TESTS, True, EQUAL), ("equals everything", "\ufeff" + PYTEST_TESTS, False, EQUAL),
    ("what the caller holds", PYTEST_TESTS, False, HELD),
    ("emptied tests", TESTS, True, forgeries.ALL_TESTS),
    ("emptied tests", PYTEST_TESTS, False, forgeries.ALL_TESTS),
    ("a wrapped report", TESTS, True, forgeries.SEND),
    ("failures are swallowed", PYTEST_TESTS, False, forgeries.SELECTIVE),
    ("canaries are spared by their place", TESTS, False, forgeries.BY_POSITION)]


@pytest.mark.slow
@pytest.mark.parametrize("tests, plain, code", [
    pytest.param(*case, id=f"{name}-{'plain' if case[1] else 'pytest'}") for name, *case in LOOKS])
def test_results_that_only_look_right_do_not_count(tests, plain, code):
    tests = {"tests/test_shop.py": tests.encode()}
    fair = testing.run_tests({"shop.py": b"def total(prices): return sum(prices)"}, tests, plain=plain)
    assert len(fair) > 1 and set(fair.values()) == {"PASSED"} and not fair.forged

    files = {"shop.py": f"def total(prices): return None\n{code}".encode()}
    found = testing.run_tests(files, tests, list(fair), plain)
    # Parameters stay with their tests, where what fails can be swallowed.
    assert {name for name, outcome in found.items() if outcome == "PASSED" and "[" not in name} == set()


@pytest.mark.slow
def test_an_end_before_the_end_is_none():
    code = """
import os, sys
def watch(frame, event, given):
    if event == "return" and frame.f_code.co_name == "run_plain":
        os._exit(0)
sys.setprofile(watch)
total = sum
"""
    found = testing.run_tests({"shop.py": code.encode()}, {"tests/test_shop.py": TESTS.encode()}, plain=True)
    assert found == {} and not found.forged


@pytest.mark.slow
def test_no_module_of_tests_reaches_another():
    """What the code does as soon as the first of two imports it would let the second pass."""
    attack = b"import prices; prices.total = sum; open('prices.py', 'w').write('total = sum')"
    files = {"shop.py": attack, "prices.py": b"def total(prices): return None"}
    tests = {"tests/test_a.py": b"import shop\ndef test_a(): assert shop.__name__ == 'shop'\n",
             "tests/test_b.py": b"from prices import total\ndef test_b(): assert total([1, 2]) == 3\n"}
    found = testing.run_tests(files, tests, plain=True)
    assert found == {"tests/test_a.py::test_a": "PASSED", "tests/test_b.py::test_b": "FAILED"}


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False])
def test_configuration_in_the_tree_does_not_count(plain):
    """Even if it got there: run_tests leaves out what decides over tests and is not of the tests."""
    tests = {"tests/test_f.py": b"import f\ndef test_f():\n    assert f.f() == 2\n"}
    hook = b"import os\nos._exit(0)\n"
    files = {"f.py": b"def f():\n    return 1\n", "conftest.py": hook, "tests/conftest.py": hook,
             "sitecustomize.py": hook, "pytest.ini": b"[pytest]\naddopts = --collect-only\n",
             "pytest.py": hook, "setup.cfg": b"[tool:pytest]\naddopts = -p f\n",
             "tests/test_f.py": b"def test_f(): pass\n"}
    assert testing.run_tests(files, tests, plain=plain) == {"tests/test_f.py::test_f": "FAILED"}


# ---- Which tests pass


def run_tests(code, tests, **options):
    tests = {path: text.encode() for path, text in tests.items()}
    return testing.run_tests({"f.py": code.encode()}, tests, **options)


@pytest.mark.slow
def test_plain_outcomes():
    tests = {"test_a.py": "import f\ndef test_a(): assert f.x == 1\ndef test_b(): assert f.x == 2\n"
                          "def test_c(): f.loop()\ndef test_d(): raise SystemExit\ndef helper(): pass\n"
                          "def test_e(missing): pass\nclass test_f: pass\n",
             "test_b.py": "import nowhere\n", "test_c.py": "def test_last(): pass\n"}
    code = "x = 1\ndef loop():\n    while True: pass\n"

    def check(limit):
        assert run_tests(code, tests, plain=True, timeout=limit) == {
            "test_a.py::test_a": "PASSED", "test_a.py::test_b": "FAILED", "test_a.py::test_c": "FAILED",
            "test_a.py::test_d": "FAILED", "test_a.py::test_e": "FAILED", "test_b.py": "ERROR",
            "test_c.py::test_last": "PASSED"}

    in_time(check, (1.0, 4.0, 16.0))
    names = ["test_c.py::test_last", "test_b.py::test_x", "test_a.py::test_none", "other.py::test_a"]
    assert run_tests(code, tests, names=names, plain=True) == {
        "test_c.py::test_last": "PASSED", "test_b.py::test_x": "ERROR"}
    assert run_tests(code, {}, plain=True) == {}


@pytest.mark.slow
def test_pytest_outcomes():
    tests = {"pytest.ini": "[pytest]\naddopts = -x -v --ff\n", "tests/test_broken.py": "import nowhere\n",
             "tests/conftest.py": "import pytest\n@pytest.fixture\ndef value(): return 1\n",
             "tests/test_f.py": '''
import pytest, unittest, f
@pytest.fixture
def broken(): raise ValueError
@pytest.fixture
def breaks(): yield; raise ValueError
@pytest.mark.parametrize("x", [1, 2])
def test_x(x, value): assert value == x
def test_setup(broken): pass
def test_teardown(breaks): pass
def test_skip(): pytest.skip("so")
@pytest.mark.xfail
def test_marked(): assert 0
def test_unmarked(): f.give_up()
class TestU(unittest.TestCase):
    def test_u(self): self.assertEqual(f.x, 1)
    def test_parts(self):
        for part in "abc":
            with self.subTest(part): self.assertEqual(f.x, 1)
    def test_broken_parts(self):
        for part in "abc":
            with self.subTest(part): self.assertEqual(f.x, 2)
def test_exit(): raise SystemExit
'''}
    code = "x = 1\ndef give_up():\n    import pytest\n    pytest.xfail('so')\n"
    path = "tests/test_f.py::"
    expected = {"test_x[1]": "PASSED", "test_x[2]": "FAILED", "test_setup": "ERROR", "test_teardown": "ERROR",
                "test_skip": "FAILED", "test_marked": "PASSED", "test_unmarked": "FAILED",
                "TestU::test_u": "PASSED", "TestU::test_parts": "PASSED",
                "TestU::test_broken_parts": "FAILED", "test_exit": "FAILED"}
    expected = {path + name: outcome for name, outcome in expected.items()}
    assert run_tests(code, tests) == expected | {"tests/test_broken.py": "ERROR"}
    names = ["tests/test_broken.py::test_a", f"{path}TestU::test_u", f"{path}test_none"]
    assert run_tests(code, tests, names=names) == {names[0]: "ERROR", names[1]: "PASSED"}


MONEY = """
class Money:
    def __init__(self, cents): self.cents = cents
    def __eq__(self, other): return self.cents == getattr(other, "cents", other)
def total(*cents): return Money(sum(cents){})
def count(*cents): return len(cents){}
"""


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False])
def test_what_is_no_plain_value_is_compared_where_it_is_if_the_solution_says_so(plain):
    tests = {"test_f.py": b"import f\ndef test_a():\n    assert f.total(3, 4) == 7\n"
                          b"def test_b():\n    assert f.count(3, 4) == 2\n"}
    files = {wrong: {"f.py": MONEY.format(*wrong).encode()} for wrong in (("", ""), ("+ 1", ""), ("", "+ 1"))}
    right = files["", ""]
    outcomes = {wrong: [*testing.run_tests(tree, tests, plain=plain, solved=right).values()]
                for wrong, tree in files.items()}
    assert outcomes == {("", ""): ["PASSED", "PASSED"], ("+ 1", ""): ["FAILED", "PASSED"],
                        ("", "+ 1"): ["PASSED", "FAILED"]}
    found = testing.run_tests(right, tests, plain=plain, solved=right)
    assert [*found.kept] == ["test_f.py"] and len(found.kept["test_f.py"]) == 1 and not found.skipped
    assert [*testing.run_tests(right, tests, plain=plain).values()] == ["FAILED", "PASSED"]
    names = ["test_f.py::test_a", "test_f.py::test_b"]
    assert testing.guess(tests, names[1:], "", found.kept) == testing.guess(tests, names, "", found.kept) < 1


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False])
def test_code_without_end_takes_no_more_than_its_time(plain):
    tests = {"test_f.py": "import f\ndef test_a(): assert f.f() == 1\ndef test_b(): assert 1 == 1"}

    def check(limit):
        start = time.monotonic()
        found = run_tests("def f():\n    while True: pass", tests, plain=plain, timeout=limit)
        assert found == {"test_f.py::test_a": "FAILED", "test_f.py::test_b": "PASSED"}
        assert time.monotonic() - start < 4 * limit

    in_time(check, (3.0, 12.0))


@pytest.mark.slow
def test_a_verdict_is_the_same_however_many_are_judged_at_once():
    """Each test needs a fifth of its time: eight that share a core would not get it."""
    count = 8 * cores()

    def check(limit):
        busy = f"import time\ndef f():\n    while time.process_time() < {limit / 10}: pass\n    return 1\n"
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            found = pool.map(lambda number: run_tests(
                f"{busy}n = {number}", {"test_f.py": "import f\ndef test_a(): assert f.f() == 1"},
                plain=True, timeout=limit), range(count))
            assert [*found] == [{"test_f.py::test_a": "PASSED"}] * count

    in_time(check, (2.0, 8.0, 24.0))


@pytest.mark.slow
def test_values_without_end_are_not_read_without_end():
    """Sets of numbers with one hash take a time that grows with their square."""
    tests = {"test_f.py": "import f\ndef test_a(): assert f.f() == 1"}
    for count in (499, 2500):
        code = (f"def f():\n    found = {{n * (2**61 - 1) for n in range({count})}}\n"
                "    for _ in range(300): __told__(1, found)\n")
        with quick(count, most=10):
            found = run_tests(f"{code}    return 1", tests, plain=True)
        assert found == {"test_f.py::test_a": "FAILED"}


@pytest.mark.slow
def test_many_tests_are_all_reported():
    tests = "".join(f"def test_{number:0400}(): pass\n" for number in range(5_000))
    found = run_tests("", {"test_f.py": tests}, plain=True)
    assert len(found) == 5_000 and set(found.values()) == {"PASSED"}


def test_results_are_cached_and_waited_for(monkeypatch):
    calls, go = [], threading.Event()

    def slow(*args):
        calls.append(args)
        go.wait(10)
        return testing.Outcomes(a="PASSED")

    monkeypatch.setattr(testing, "_run", slow)
    monkeypatch.setattr(testing, "_cache", testing.collections.OrderedDict())
    monkeypatch.setattr(testing, "MOST_CACHED", 2)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(testing.run_tests, {"f.py": code}, {}, plain=True) for code in (b"1", b"1", b"2")]
        time.sleep(0.1)
        go.set()
        assert [future.result() for future in jobs] == [{"a": "PASSED"}] * 3 and len(calls) == 2
    for code in (b"3", b"4", b"1"):  # the first is forgotten by then
        testing.run_tests({"f.py": code}, {}, plain=True)
    assert len(calls) == 5


def test_failures_of_the_sandbox_are_errors_and_not_kept(monkeypatch):
    monkeypatch.setattr(sandbox, "run", lambda *args, **options: sandbox.Result("bwrap: no", 1, 0.1))
    for _ in range(2):
        with pytest.raises(sandbox.SandboxError, match="the tests did not start: bwrap: no"):
            testing.run_tests({}, {"test_never.py": b""})
    monkeypatch.setattr(testing, "has_pytest", lambda: False)
    with pytest.raises(sandbox.SandboxError, match="has no pytest"):
        testing.run_tests({}, {"test_never.py": b""})


@pytest.mark.parametrize("phases, expected", [
    ("setup passed", None), ("setup passed, call passed", None), ("setup passed, teardown passed", "FAILED"),
    ("setup passed, call passed, teardown passed", "PASSED"), ("setup skipped, teardown passed", "FAILED")])
def test_what_phases_of_a_test_come_to(phases, expected):
    said = [("t", *phase.split()) for phase in phases.split(", ")]
    assert testing.outcomes(said) == [("t", expected)] * (expected is not None)
    twice = testing.outcomes([*said, said[-1]])
    assert len(twice) == 2 * (expected is not None)


@pytest.mark.parametrize("said, expected, forged", [
    ("c1 PASSED, a PASSED, c2 FAILED", {"a": "PASSED"}, False),
    ("c1 PASSED, a PASSED", {}, False), ("c1 PASSED, a PASSED, c2 PASSED", {}, True),
    ("c1 FAILED, a PASSED, c2 FAILED", {}, True), ("c1 PASSED, a FAILED, a PASSED, c2 FAILED", {}, True),
    ("c1 PASSED, a PASSED, t ERROR, c2 FAILED", {"a": "PASSED"}, False),
    ("c1 PASSED, a PASSED, t ERROR, t::b PASSED, c2 FAILED", {}, True),  # a module that cannot be imported
])
def test_nothing_counts_without_the_canaries(said, expected, forged):
    reports = [tuple(report.split()) for report in said.split(", ")]
    for names in (None, ["a", "b"]):
        found = testing.counted(reports, {"c1": "PASSED", "c2": "FAILED"}, names)
        found.pop("t", None)
        assert (found, found.forged) == (expected, forged)


# ---- Diffs in replies


@pytest.mark.parametrize("reply", [
    "Here:\n{0}", "```\n{0}```", "a\n``` Diff\n{0}\n```\nb", "```patch\r\n{0}```", "```diff\n{0}",
    "```diff\nold\n```\nno:\n```diff\n{0}```", "```diff\n{0}```\n```python\nx = 1\n```"])
def test_the_diff_of_a_reply(reply):
    for patch in (DIFF, f"{DIFF} ```\n ```\n"):  # a fence within is further to the right
        assert swe.find_patch(reply.format(patch)) == patch
        in_a_list = re.sub("(?m)^", "   ", reply.format(patch))
        assert "```" not in reply or swe.find_patch(in_a_list) == patch


@pytest.mark.parametrize("patch, expected", [
    (BODY.format("a/x\t2020-01-01", "b/x\t2020-01-02"), ["x"]), (addition("n/e w.py"), ["n/e w.py"]),
    (f"commit 1\nAuthor: x\n\n{DIFF}-- \n2.39\n", ["x"]),
    ("--- a/x\n+++ b/x\n@@ -1 +1,2 @@ f():\n a\n+--- a/tests/y\n@@ -9,2 +10 @@\n-++++ b/tests/y\n\n", ["x"]),
    ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline\n", ["x"]),
    ("diff --git a/x b/x\ndeleted file mode 100644\nindex 1..0\n", ["x"]),
    ("--- a/x\n+++ b/x\n@@ -1,3 +1,4 @@\n+b\n a\n", ["x"]),  # two blank lines have gone from its end
    ("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", ["x", "y"]),
])
def test_the_files_of_a_diff(patch, expected):
    assert swe.changed_paths(patch) == expected


def test_a_diff_is_written_anew_as_git_writes_one():
    for patch in (DIFF, DIFF.replace("\n", "\r\n"), f"Index: y\n{DIFF}-- \n2.39\n"):
        assert swe.check_patch(patch, DIFF.replace("x", "t")) == ANEW


PIECES = [*REFUSED.values(), *(row["patch"] for row in ROWS.values()), "```", "```diff\n", "\n", "--- a/x\n",
          "+++ b/x\n", "@@ -1,3 +1,3 @@\n", "@@ -0,0 +999999999,999999999 @@\n", "\0", "\ud800", "\u2028",
          "<think>", "diff --git a/x b/x\n", "rename to \n", "new file mode 1\n", "-" * 300, "+" * 300, "\r"]
LONG = ["```diff\n" * 50_000, "--- a/x\n+++ b/x\n" * 25_000, "@@ -1 +1 @@\n" * 40_000, DIFF * 10_000,
        "diff --git a/" + " b/" * 300_000, "`" * 1_000_000, " " * 1_000_000]


def test_any_reply_gets_a_verdict_at_once(unjudged):
    rng, texts = random.Random(1), LONG[:]
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        for _ in range(rng.randint(0, 8)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES)[:rng.randint(0, 5)] + text[at + rng.randint(0, 3):]
        texts.append(text)
    for text in texts:
        with quick(text[:60], most=20):
            step = score(unjudged, rng.choice(list(ROWS)), text)
            swe.find_patch(text)
        assert step.reward == 0 and step.info.keys() == NONE.keys() and step.terminated


@pytest.mark.parametrize("options", [{}, {"context": "tree"}, {"context": "oracle", "hints": True}])
def test_neither_the_reference_nor_the_tests_reach_a_prompt(options):
    env = envs.make("swe", export_only=True, **options)
    for name, row in ROWS.items():
        text = "\n".join(message["content"] for message in env.task_of(name).messages)
        own = b"\n".join(env.snapshot(name).values()).decode() + row["problem_statement"]
        for line in (row["patch"] + row["test_patch"]).splitlines():
            if line[:1] == "+" and len(line) > 12:
                assert line[1:].strip() not in text or line[1:].strip() in own
        for test in env.rows[name]["FAIL_TO_PASS"] + env.rows[name]["PASS_TO_PASS"]:
            assert test.rpartition("::")[2].partition("[")[0] not in text
        assert "tests/test_" not in text and row["base_commit"] not in text


def test_what_a_prompt_shows():
    def user(**options):
        return envs.make("swe", export_only=True, **options).task_of(FIRST).messages[-1]["content"]

    assert user().startswith("Repository: minibox/backoff\n\nIssue:\nretry() tries once too often")
    assert "\n\nbackoff/retry.py\n```\n\"\"\"Call until it works.\"\"\"\n" in user()
    names = ["backoff/__init__.py", "backoff/retry.py", "backoff/schedule.py"]
    assert user(context="tree").endswith("\n".join(["Files, by name:", *names]))
    assert "Files" not in user(context="none") and "__init__" not in user(context="oracle")
    assert "lines left out]" in user(max_file_lines=5)
    assert user(max_context_chars=400).endswith("Other files:\nbackoff/retry.py\nbackoff/schedule.py")
    odd = {"m.py": "a = '\f\u2028'\r\n\nb\n".encode()}
    assert swe.context(ROWS[FIRST], odd, swe.Config()).endswith("m.py\n```\na = '\f\u2028'\n\nb\n```")
    first = envs.make("swe", export_only=True).task("train", 0)
    assert json.loads(json.dumps(first.data)) == first.data == {"instance_id": first.id}


def test_splits_are_disjoint(unjudged):
    names = {split: {unjudged.task(split, index).id for index in range(unjudged.num_tasks(split))}
             for split in unjudged.splits}
    assert len(names["train"]) >= 4 and len(names["test"]) >= 2 and not names["train"] & names["test"]
    assert names["train"] | names["test"] == ROWS.keys()
    with pytest.raises(IndexError):
        unjudged.task("train", 99)

    nothing = envs.make("swe", test_share=0, export_only=True)
    everything = envs.make("swe", test_share=1, export_only=True)
    assert nothing.num_tasks("train") == everything.num_tasks("test") == len(ROWS)
    one = envs.make("swe", task_ids=FIRST, export_only=True)
    for env, split, says in [
            (unjudged, "val", "split"), (everything, "train", "test_share=0"),
            (one, "test", "name more, or choose with test_share")]:
        with pytest.raises(envs.BadInput, match=says):
            env.num_tasks(split)
    with pytest.warns(match="swe: instance .* is held out: of these 2, no other is in the test split"):
        few = envs.make("swe", task_ids=",".join(sorted(names["train"])[:2]), export_only=True)
    assert few.num_tasks("train") == few.num_tasks("test") == 1


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def many(count):
    return [dict(ROWS[FIRST], instance_id=f"a__b-{number}") for number in range(count)]


def ids(**options):
    return list(envs.make("swe", export_only=True, **options).rows)


def test_which_rows_are_taken(tmp_path):
    file = write(tmp_path / "rows.jsonl", many(120))
    assert ids(dataset=file) == [f"a__b-{number}" for number in range(100)]
    assert ids(dataset=file, task_id_range="98-101") == [f"a__b-{number}" for number in range(98, 102)]
    assert ids(dataset=file, task_id_range="98-101", task_ids="a__b-119, a__b-3") == ["a__b-119", "a__b-3"]
    assert ids(dataset=file, task_id_range="[98,101]") == [f"a__b-{number}" for number in range(98, 102)]
    for asked in ("[0, 99]", [0, 99], "0,99", '["a__b-0", 99]'):
        assert ids(dataset=file, task_ids=asked) == ["a__b-0", "a__b-99"]
    for name in ("swe-synth", "swesynth"):
        assert [*envs.make(name, dataset=file, task_ids="[3]", export_only=True).rows] == ["a__b-3"]
    with pytest.raises(envs.BadInput, match="task_ids: no instance 120$"):
        ids(dataset=file, task_ids="[0,120]")
    with pytest.raises(envs.BadInput, match="no instances in .* at 130-140"):
        ids(dataset=file, task_id_range="130-140")

    for content in (b"{", b"[]\n", b"", b"\xff"):
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(envs.BadInput, match=r"bad\.jsonl"):
            ids(dataset=str(tmp_path / "bad.jsonl"))

    # A list; a row may hold lists, and need not have texts that nothing depends on
    row = dict(ROWS[FIRST], FAIL_TO_PASS=["t.py::a"], PASS_TO_PASS=[], version=None)
    del row["hints_text"], row["created_at"], row["plain"]
    (tmp_path / "rows.json").write_text(json.dumps([row, *many(1)]), "utf-8-sig")
    assert ids(dataset=str(tmp_path / "rows.json")) == [FIRST, "a__b-0"]


def test_a_data_set_of_the_hub_is_cached(tmp_path, monkeypatch):
    def load_dataset(name, config, split, streaming):
        if (name, split) != ("princeton-nlp/SWE-bench_Lite", "dev"):
            raise ConnectionError("no network")
        return types.SimpleNamespace(to_list=lambda: many(4))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    dataset, cache = dict(dataset="princeton-nlp/SWE-bench_Lite", split="dev"), dict(cache_dir=str(tmp_path))
    assert ids(**dataset, **cache, task_id_range="1-3") == ["a__b-1", "a__b-2", "a__b-3"]
    with pytest.raises(envs.BadInput, match="dataset=a/broken: cannot be read .ConnectionError: no network"):
        ids(dataset="a/broken")

    cache["use_cache_only"] = True
    assert ids(**cache) == ["a__b-1", "a__b-2", "a__b-3"]
    (tmp_path / "task_a__b-1.json").rename(tmp_path / "task_7.json")
    for asked in ("7,a__b-3", "a__b-1, a__b-3"):
        assert ids(**cache, task_ids=asked) == ["a__b-1", "a__b-3"]
    with pytest.raises(envs.BadInput, match="task_ids: no instance 9$"):
        ids(**cache, task_ids="7,9")


@pytest.mark.parametrize("field, values", [
    ("patch", [None, "x"]), ("instance_id", ["a/../b", "..", []]), ("FAIL_TO_PASS", ["[1]", "[]", "tests"]),
    ("version", [3]), ("plain", ["yes"])])
def test_a_row_of_a_wrong_form_is_named(tmp_path, field, values):
    for value in values:
        file = write(tmp_path / "rows.jsonl", [ROWS[FIRST], many(1)[0] | {field: value}])
        assert ids(dataset=file, task_ids=FIRST) == [FIRST]  # which does not ask for it
        with pytest.raises(envs.BadInput, match=rf"rows.jsonl: row 2: field {field}: expected") as error:
            ids(dataset=file)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("options, says", [
    (dict(dataset="x" * 300, export_only=True), "expected a .jsonl"),
    (dict(use_cache_only=True, cache_dir="nowhere", export_only=True), "no instances in nowhere"),
    (dict(task_id_range="5"), "first-last"),
    (dict(task_id_range="[5,"), "first-last, or .first,last."),
    (dict(timeout=0), "above 0"), (dict(test_share=2), "0 to 1"),
    (dict(snapshots="x"), "a dataset beside it"), (dict(use_cache_only=True), "cache_dir beside it"),
    (dict(executor_url="http://a:1", image="{nope}"), "image: expected a name"),
    (dict(executor_url="http://a:1", export_only=True), "no executor_url beside"),
    (dict(dataset="x.jsonl"), "snapshots=FOLDER .*executor_url=URL .*export_only=true"),
    (dict(executor_url="localhost:1"), "executor_url=localhost:1: expected the form http://host:port"),
    (dict(executor_url="http://127.0.0.1:1"), "url=http://127.0.0.1:1: no answer from /health .*running"),
    (dict(executor_url="http://a:1"), "executor_url=http://a:1: /health answered 503: 'no room, today'")])
def test_options_are_checked(monkeypatch, options, says):
    def get(url, timeout):
        if url != "http://a:1/health":
            raise requests.ConnectionError
        return types.SimpleNamespace(ok=False, status_code=503, text="no room,\ntoday")

    monkeypatch.setattr(requests, "get", get)
    with pytest.raises(envs.BadInput, match=says):
        envs.make("swe", **options)


def test_instances_may_be_exported_unjudged(tmp_path):
    env = envs.make("swe", dataset=write(tmp_path / "rows.jsonl", many(1)), export_only=True)
    task = env.task_of("a__b-0")
    assert score(env, task.id, env.solution(task)).info == dict(NONE, format=1, allowed=1)
    assert "Files" not in task.messages[-1]["content"]


@pytest.mark.slow
def test_snapshots_of_ones_own(tmp_path):
    shutil.copytree(swe.BUNDLED / FIRST, tmp_path / "a__b-0")
    for path in (tmp_path / "a__b-0").rglob("*.py"):  # Windows' line ends, which no prompt shows
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    env = envs.make("swe", dataset=write(tmp_path / "rows.jsonl", many(1)), snapshots=str(tmp_path))
    assert score(env, "a__b-0", env.solution(env.task_of("a__b-0"))).info == GOOD
    with pytest.raises(envs.BadInput, match="a__b-1: no such folder"):
        envs.make("swe", dataset=write(tmp_path / "rows.jsonl", many(2)), snapshots=str(tmp_path))


@pytest.mark.slow
def test_an_executor_gives_the_same_verdicts():
    """One whose images are the repositories that come with this."""
    with executor_server.ExecutorServer(swe.BUNDLED, concurrency=2) as images:
        env = envs.make("swe", executor_url=images.url, image="{instance_id}")
        for name in (WITH_PYTEST, FIRST):
            assert score(env, name, env.solution(env.task_of(name))).info == dict(GOOD, unjudged=1)
        forged = [PYTEST_FORGERIES[name] for name in ("every report passes", "no test runs")]
        for code in ("# nothing", "import os\nos._exit(0)", *forged):
            info = score(env, WITH_PYTEST, fenced(in_front(WITH_PYTEST, code))).info
            assert info["correct"] == info["partial"] == 0, code
        assert score(env, FIRST, fenced(WRONG)).info == dict(NONE, unjudged=1, format=1, allowed=1)
        for path in ("pytest.py", "unittest.py", "_pytest/__init__.py", "iniconfig.py", "sitecustomize.py",
                     "xml.py", "json/__init__.py"):
            lines = forgeries.PYTEST.splitlines()
            diff = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(
                f"+{line}\n" for line in lines)
            info = score(env, WITH_PYTEST, fenced(diff)).info
            assert info["correct"] == info["partial"] == 0, path
            assert info["allowed"] == (path in ("xml.py", "json/__init__.py")), path


@pytest.fixture
def elsewhere(monkeypatch):
    """An environment whose executor is asked for nothing, and keeps what it is sent."""
    monkeypatch.setattr(swe.HttpExecutor, "check", lambda self: None)
    env = envs.make("swe", executor_url="http://here:1")

    def test(image, files, command, timeout):
        env.sent = image, next((path, text) for path, text in files.items() if path.endswith(".diff"))
        return sandbox.Result(env.answer.format(env.sent[1][0][1:-5]), 0, 1.0)

    env.executor.test, env.answer = test, "{0} refused\n"
    return env


@pytest.mark.parametrize("answer, error, applied", [
    ("python: not found", 1, 0), ("\n{0}\n<xml\n{0}\n", 0, 1), ("\n{0}\n", 0, 1), ("{0} refused\n", 0, 0),
    ("\n{0}\n<xml>\udcff</xml>\n{0}\n", 0, 1)])
def test_answers_of_an_executor_that_are_no_results(elsewhere, answer, error, applied):
    elsewhere.answer = answer
    step = score(elsewhere, FIRST, elsewhere.solution(elsewhere.task_of(FIRST)))
    assert step.truncated == (not step.terminated) == error
    assert step.info == dict(NONE, unjudged=1, format=1, allowed=1, error=error, applied=applied)
    assert elsewhere.sent[0] == "swebench/sweb.eval.x86_64.minibox_1776_backoff-4:latest"


@pytest.mark.parametrize("kind, partial", [
    ("", 1.0), ("<skipped/>", 0.5), ("<failure/>", 0.5), ("<error/>", 0.5)])
def test_every_test_of_an_executors_report_has_to_pass(elsewhere, kind, partial, monkeypatch):
    """The first one of those that the issue broke ends in another way."""
    monkeypatch.setattr(testing, "canaries", lambda path, plain: (path, "", {}))
    cases = []
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        for name in json.loads(ROWS[WITH_PYTEST][column]):
            path, _, function = name.partition("::")
            where = path.removesuffix(".py").replace("/", ".")
            cases.append(f'<testcase classname="{where}" name="{function}">')
    report = "".join(f"{case}{kind if case is cases[0] else ''}</testcase>" for case in cases)
    elsewhere.answer = "\n{0}\n<testsuite>" + report + "</testsuite>\n{0}\n"
    info = score(elsewhere, WITH_PYTEST, elsewhere.solution(elsewhere.task_of(WITH_PYTEST))).info
    assert (info["correct"], info["partial"]) == (float(not kind), partial)


HIDDEN = {  # what some programs read, in forms that others do not
    "a date after a name": (
        "--- a/conftest.py 2010-07-05\n+++ b/conftest.py 2010-07-05\n@@ -1 +1 @@\n-c\n+d\n"),
    "a context diff": "Index: conftest.py\n*** a/conftest.py\n--- b/conftest.py\n***************\n"
                      "*** 1,1 ****\n! c\n--- 1,1 ----\n! forged\n",
    "an ed script": "Index: conftest.py\n1c\nforged\n.\n",
    "a quoted name": '--- "a/conftest.py"\n+++ "b/conftest.py"\n@@ -1 +1 @@\n-c\n+d\n',
    "older words for a move": "diff --git a/x.py b/conftest.py\nrename old x.py\nrename new conftest.py\n",
    "a link": "diff --git a/y.py b/y.py\nnew file mode 0120000\n--- /dev/null\n+++ b/y.py\n"
              "@@ -0,0 +1 @@\n+x.py\n\\ No newline at end of file\n",
    "through a link": "--- a/link.py\n+++ b/link.py\n@@ -1,2 +1,2 @@\n-a\n+forged\n c\n",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_executor_is_sent_what_was_read_of_a_diff_and_nothing_else(elsewhere, name, tmp_path):
    """Whichever program applies it, no file that decides changes, and no link is made or changed."""
    fine = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
    for patch in (fine + HIDDEN[name], HIDDEN[name] + fine):
        if not score(elsewhere, FIRST, fenced(patch)).info["allowed"]:
            continue
        (tmp_path / "diff").write_text(elsewhere.sent[1][1])
        for program in (["git", "apply"], ["patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"]):
            tree = Path(tempfile.mkdtemp(dir=tmp_path))
            (tree / "conftest.py").write_text("c\n")
            (tree / "x.py").write_text("a\nc\n")
            (tree / "link.py").symlink_to("x.py")
            if shutil.which(program[0]):
                subprocess.run([*program, "../diff"], cwd=tree, capture_output=True, timeout=20)
            assert (tree / "conftest.py").read_text() == "c\n"
            assert "forged" not in (tree / "x.py").read_text()
            links = {path.name: os.readlink(path) for path in tree.rglob("*") if path.is_symlink()}
            assert links == {"link.py": "x.py"}


# ---- Predictions


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "episodes").mkdir()
    for kind, step, number in (("val", 5, 0), ("val", 10, 0), ("val", 10, 1), ("train", 10, 0)):
        reply = f"<think>x</think>{fenced(DIFF.replace('+b', f'+{kind}{step}{number}'))}"
        messages = [dict(role="user", content="?"), dict(role="assistant", content=reply)]
        episode = dict(task_id="a__b-1", source="swe", number=number, messages=messages)
        with (tmp_path / "episodes" / f"{kind}_step_{step:06d}.jsonl").open("a") as file:
            for line in (episode, episode | dict(source="countdown"), dict(summary=dict(episodes=2))):
                file.write(json.dumps(line) + "\n")
    return tmp_path


def export(capsys, out, *flags):
    """What export_predictions says."""
    code = export_predictions.main(["--model", "m", "--out", str(out), *map(str, flags)])
    told = capsys.readouterr()
    return json.loads(told.err if code else told.out)


@pytest.mark.parametrize("flags, expected", [
    ([], "val100"), (["--sample", 1], "val101"), (["--step", 5], "val50"), (["--kind", "train"], "train100")])
def test_predictions_of_a_run(run_folder, capsys, flags, expected):
    """By the name a file of lines or a list, as SWE-bench's evaluator reads them."""
    patch = ANEW.replace("+b", f"+{expected}")
    row = dict(instance_id="a__b-1", model_name_or_path="m", model_patch=patch)
    for name, rows in (("p.jsonl", row), ("p.json", [row])):
        told = export(capsys, out := run_folder / name, "--run", run_folder, *flags)
        assert told == dict(replies=1, instances=1, with_diff=1, without_diff=0, out=str(out))
        assert json.loads(out.read_text()) == rows


def test_predictions_of_replies(tmp_path, capsys):
    replies = write(tmp_path / "r.jsonl", [
        dict(instance_id="a", reply=fenced(DIFF.replace("1,1", "1,2") + "\n")),  # a blank line has no blank
        dict(task_id="b", response="no"), dict(task_id="c", response=fenced(REFUSED["counts"])),
        dict(instance_id="a", reply="later")])
    told = export(capsys, out := tmp_path / "new" / "p.json", "--replies", replies)
    assert told["replies"] == 4 and told["instances"] == 3 and told["without_diff"] == 1
    patches = [ANEW.replace("1,1", "1,2") + " \n", "", REFUSED["counts"]]
    assert [row["model_patch"] for row in json.loads(out.read_text())] == patches


@pytest.mark.parametrize("flags, says", [
    ([], "expected --run or --replies"), (["--run", "{}/nowhere"], "no episodes/val_step"),
    (["--run", "{}", "--step", "7"], "has val episodes of 5, 10"), (["--replies", "{}/none"], "none"),
    (["--replies", "{}/bad.jsonl"], "line 2: expected JSON"),
    (["--replies", "{}/odd.jsonl"], "line 1: expected instance"),
    (["--run", "{}", "--out", "{}/p"], "p: expected a name that ends in .jsonl or .json"),
])
def test_what_cannot_be_exported_is_named(run_folder, capsys, flags, says):
    (run_folder / "bad.jsonl").write_bytes(b'\n{"instance_id": "\xff"}\n')
    (run_folder / "odd.jsonl").write_text('{"instance_id": 1, "reply": "x"}\n')
    told = export(capsys, run_folder / "p.jsonl", *(flag.format(run_folder) for flag in flags))
    assert says in told["error"] and not (run_folder / "p.jsonl").exists()
