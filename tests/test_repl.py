"""The code REPL: its loop and tools, what it scores, code that cheats or attacks, formats, the generator."""

import ast
import concurrent.futures
import contextlib
import hashlib
import json
import random
import threading
import time
import tracemalloc
import uuid
from pathlib import Path

import pytest

import envs
from envs import BadInput
from envs.code import repl, sandbox, testing, trees
from tests import forgeries
from tests.forgeries import gone, processes
from tools import executor_server, make_scenarios

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(scenarios="tiny", prompt="short")
SCENARIOS = ROOT / "envs" / "code" / "repl_scenarios"
BUNDLED = sorted(json.loads((SCENARIOS / "index.json").read_text(encoding="utf-8")))

# A repository whose tests run without pytest, which is fast. Its bug is in two places.
SHOP = {
    "shop/__init__.py": "",
    "shop/price.py": "def total(prices):\n    return sum(prices[1:])\n\n\n"
                     "def cheapest(prices):\n    return max(prices)\n",
    "tests/test_price.py": "from shop.price import cheapest, total\n\n\n"
                           "def test_total():\n    assert total([1, 2, 3]) == 6\n\n\n"
                           "def test_total_of_none():\n    assert total([]) == 0\n\n\n"
                           "def test_cheapest():\n    assert cheapest([4, 2]) == 2\n\n\n"
                           "def test_cheapest_of_one():\n    assert cheapest([4]) == 4\n",
}
FIX_TOTAL = "apply_patch('shop/price.py', 'prices[1:]', 'prices')"
UNDO = "apply_patch('shop/price.py', 'sum(prices)', 'sum(prices[1:])')"
FIX_CHEAPEST = "apply_patch('shop/price.py', 'max(', 'min(')"
ROW = dict(
    problem_statement="The total is wrong, and so is the cheapest price.", plain=True,
    expected_output_json={f"tests/test_price.py::test_{name}": "PASSED"
                          for name in ("total", "total_of_none", "cheapest", "cheapest_of_one")},
    test_command="python3 -c 'import sys; sys.path.insert(0, str())\n"
                 "import tests.test_price as t\nnames = sys.argv[1:]\n"
                 "for name in vars(t):\n"
                 "    if name.startswith(\"test_\") and (not names or name in names): print(name)'",
    patch="--- a/shop/price.py\n+++ b/shop/price.py\n@@ -1,6 +1,6 @@\n def total(prices):\n"
          "-    return sum(prices[1:])\n+    return sum(prices)\n \n \n def cheapest(prices):\n"
          "-    return max(prices)\n+    return min(prices)\n")


def write_cache(folder, rows, files=SHOP):
    for name in rows:
        for path, text in files.items():
            place = folder / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    (folder / "index.json").write_text(json.dumps(rows))
    return str(folder)


def make(**options):
    return envs.make("repl", **options)


def find(env, instance_id):
    """The task of an instance, whatever its split."""
    for split in env.splits:
        with contextlib.suppress(BadInput):  # of one instance, none is held out
            for index in range(env.num_tasks(split)):
                if (task := env.task(split, index)).data["instance_id"] == instance_id:
                    return task
    raise KeyError(instance_id)


def fenced(code):
    return f"```python\n{code}\n```"


class Play:
    """An episode, block by block."""

    def __init__(self, env, task):
        self.episode = env.start(task, 1)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.episode.close()

    def __call__(self, code):
        """What a block prints."""
        step = self.step(code)
        assert not (step.terminated or step.truncated or step.children), step
        return self.text(step)

    def step(self, code):
        return self.episode.step(fenced(code))

    def say(self, reply):
        return self.text(self.episode.step(reply))

    def text(self, step):
        (message,) = step.messages
        assert message["role"] == "user" and step.reward == 0
        return message["content"]


def outcome(env, task, *codes):
    """The last step of an episode of these blocks."""
    with Play(env, task) as play:
        for code in codes:
            step = play.step(code)
        assert step.terminated or step.truncated
        return step


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Builder of an environment with the shop alone, and its task."""
    folder = write_cache(tmp_path_factory.mktemp("shop"), {"shop-1": ROW})

    def build(**options):
        env = make(cache_dir=folder, **({"turn_timeout": 20.0} | options))
        return env, find(env, "shop-1")
    return build


@pytest.fixture
def play(shop):
    with Play(*shop(max_turns=100)) as playing:
        yield playing


def named(attempts):
    """The attempts as parameters."""
    return [pytest.param(code, id=name) for name, code in attempts.items()]


# ---- Tasks


def test_bundled_scenarios_are_what_they_should_be():
    env = make()
    counts = {split: env.num_tasks(split) for split in env.splits}
    assert sum(counts.values()) == len(BUNDLED) >= 10 and 2 <= counts["test"] <= 4
    names, contents, reports = set(), set(), set()
    for split in env.splits:
        for index in range(counts[split]):
            task = env.task(split, index)
            scenario = env.scenario(task)
            assert repl.split_of(scenario.instance_id) == split and task.source == "repl"
            modules = [path for path in scenario.files if not scenario.is_test(path)]
            lines = sum(scenario.files[path].count(b"\n") for path in modules)
            assert 2 <= len(modules) <= 5 and 40 <= lines <= 200, scenario.instance_id
            assert 6 <= len(scenario.expected) <= 20 and set(scenario.expected.values()) == {"PASSED"}
            assert all(ast.parse(text) for path, text in scenario.files.items() if path.endswith(".py"))
            names.add(task.id)
            contents.add(tuple(sorted(scenario.files.items())))
            reports.add(task.messages[-1]["content"])
    assert len(names) == len(contents) == len(reports) == len(BUNDLED)


@pytest.mark.parametrize("prompt", ["default", "minimal", "cot"])
def test_prompts_hold_no_answers(prompt):
    env = make(prompt=prompt)
    for name in BUNDLED:
        task = find(env, name)
        scenario, text = env.scenario(task), json.dumps(task.messages, ensure_ascii=False)
        assert task.messages[1]["content"] == scenario.problem_statement and "finish()" in text
        assert json.loads(json.dumps(task.data)) == {"instance_id": name}
        added = [line[1:].strip() for line in scenario.patch.splitlines()
                 if line.startswith("+") and not line.startswith("+++")]
        assert added and not [line for line in added if len(line) > 15 and line in text]
        assert not any(test.partition("::")[2] in text for test in scenario.expected)
        assert "PASSED" not in text and "expected_output" not in text and "@@" not in text


def test_number_of_turns_and_sub_agents_are_told():
    assert "7 replies" in make(max_turns=7).task("train", 0).messages[0]["content"]
    assert "llm_query" in make().task("train", 0).messages[0]["content"]
    assert "llm_query" not in make(max_sub_agent_depth=0).task("train", 0).messages[0]["content"]


@pytest.mark.parametrize("options, pinned", [
    ({}, "94c3ccdf1707ccf4"), (TINY, "13e7ef5c00496852")], ids=["bundled", "tiny"])
def test_tasks_are_the_same_in_every_process(options, pinned):
    """A published run names its tasks by index: a change here changes what old results were measured on."""
    env, digest = make(**options), hashlib.sha256()
    for split in reversed(env.splits):
        for index in reversed(range(min(env.num_tasks(split), 30))):
            task = env.task(split, index)
            files = sorted(env.scenario(task).files.items())
            digest.update(repr((sorted(vars(task).items()), files, env.solution(task))).encode())
    assert digest.hexdigest()[:16] == pinned  # Python hashes texts differently in each process


@pytest.mark.parametrize("passing, expected, worth", [
    (["total", "cheapest"], {}, dict(correct=1, partial=1, modified=1)),
    (["total"], {}, dict(correct=0, partial=0.5, modified=1)),
    (["total"], dict(cheapest="FAILED"), dict(correct=0, partial=0.5, modified=1)),  # it gave no result
    (["total", "cheapest"], dict(cheapest="FAILED"), dict(correct=0, partial=0.5, modified=1)),
])
def test_what_outcomes_are_worth(tmp_path, monkeypatch, passing, expected, worth):
    names = {name: f"tests/test_price.py::test_{name}" for name in ("total", "cheapest")}
    row = ROW | dict(expected_output_json={
        full: expected.get(name, "PASSED") for name, full in names.items()})
    folder = write_cache(tmp_path, {"shop-1": row})
    monkeypatch.setattr(repl, "run_tests", lambda *args, **options: testing.Outcomes(
        {names[name]: "PASSED" for name in passing}))
    for mode, part in (("correct", "correct"), ("partial", "partial")):
        env = make(cache_dir=folder, reward_mode=mode)
        task = find(env, "shop-1")
        scenario = env.scenario(task)
        files = scenario.files | {"shop/new.py": b""}
        step = repl.ReplEpisode(env, task, scenario, files, depth=0).end("length")
        assert step.reward == step.info[part] and {name: step.info[name] for name in worth} == worth

        files = scenario.files | {"tests/test_price.py": b"", "tests/test_more.py": b"", "conftest.py": b""}
        step = repl.ReplEpisode(env, task, scenario, files, depth=0).end("length")
        assert step.reward == step.info["partial"] == step.info["modified"] == 0


# ---- Tiny scenarios


def test_tiny_train_and_test_share_nothing():
    env, seen = make(train_tasks=120, test_tasks=60, **TINY), {}
    for split in env.splits:
        tasks = [env.task(split, index) for index in range(env.num_tasks(split))]
        seen[split] = {(task.messages[0]["content"], env.scenario(task).files["m.py"]) for task in tasks}
        assert all(task.source == "repl/tiny" and task.id.startswith(f"repl-tiny-{split}-") for task in tasks)
    assert len(seen["train"]) > 90 and len(seen["test"]) > 45 and not seen["train"] & seen["test"]


@pytest.mark.slow
def test_tiny_tasks_are_solved_by_demonstration_and_solution():
    """And a demonstration's answers are the sandbox's."""
    env = make(**TINY)
    words = set(env.vocabulary)
    for index in range(60):
        task = env.task("train", index)
        with contextlib.closing(env.start(task, 1)) as episode:
            step = episode.step(env.solution(task))
        assert step.terminated and step.reward == step.info["correct"] == step.info["partial"] == 1

        demonstration = env.demonstration(task)
        assert demonstration[:len(task.messages)] == task.messages
        assert all(set(message["content"].split()) <= words for message in demonstration)
        replies = iter([message["content"] for message in demonstration if message["role"] == "assistant"])
        assert envs.play(env.start(task, 1), task, lambda replies=replies: next(replies)) == demonstration
        assert next(replies, None) is None


@pytest.mark.slow
def test_every_expression_but_one_fails_a_tiny_task():
    """So the report allows no other either."""
    env = make(**TINY)
    for index in range(20):
        task = env.task("train", index)
        scenario, parts = env.scenario(task), task.data["tiny"]
        for number, expression in enumerate(repl.EXPRESSIONS):
            source = f"def f ( a , b ) : return ( {expression} )\n".encode()
            score = env.score(scenario, scenario.files | {"m.py": source})
            assert score["correct"] == (number == parts[3]) and score["modified"] == (number != parts[2])
            assert score["partial"] < 1 or number == parts[3]


@pytest.mark.slow
def test_what_tiny_replies_are_answered():
    env = make(max_turns=3, **TINY)
    task = env.task("train", 5)
    fix = env.solution(task).replace("finish ( )", "run_tests ( )")
    with contextlib.closing(env.start(task, 1)) as episode:
        for reply in ("read ( 'nothing' )", "run_tests ( )"):
            assert episode.step(reply).messages[0]["content"] == "error"
        step = episode.step("def def")
    assert step.truncated and step.reward == 0 and step.info["repl_turns"] == 3
    with contextlib.closing(env.start(task, 1)) as episode:
        assert episode.step(fix).messages[0]["content"] == "passed"


# ---- Replies


@pytest.mark.parametrize("reply, code", [
    ("```python\nx\n```", "x"),
    ("```repl\nx\n```", "x"),
    ("```py\r\nx\n```", "x"),
    ("First\n```python  \nx\ny\n  ```\nand\n```python\nz\n```", "x\ny"),
    ("```\nx\n```\n```repl\ny\n```", "y"),
    ("```json\n{}\n```\n```python\ny```", "y"),
    ("```python\nx = 1\nfinish()", "x = 1\nfinish()"),
    ("<think>```python\nx\n```</think>```python\ny\n```", "y"),
    ("```python\nx\n```</think>no block", None),
    ("<think>```python\nx\n```", None),
    ("```pythonx\n```", None), ("x", None), ("", None), ("``` python\nx\n```", None),
    ("```python\n```", ""),
    ("```python\n" + "x" * 50_000, None),  # of a long reply only the end is read
])
def test_the_first_block_counts(reply, code):
    assert repl.find_block(reply) == code


def test_hostile_replies_take_no_time():
    start = time.process_time()
    for part in ("```python\n", "```", "<think>", "</think>", "\n```python", " " * 99, "\0", "\ud800"):
        repl.find_block(part * (500_000 // len(part)))
    assert time.process_time() - start < 2


def test_replies_without_a_block(shop):
    with Play(*shop(max_turns=4)) as play:
        nudges = [play.say(text) for text in ("Hello", "", "finish()")]
        step = play.episode.step("```\nfinish()\n```")
    assert nudges[0] == nudges[1] == repl.NUDGES[0] and nudges[2] == repl.NUDGES[1] != nudges[0]
    assert "finish()" in nudges[2]
    assert step.truncated and not step.terminated and step.messages == [] and step.reward == 0
    assert step.info == dict(correct=0, partial=0, modified=0, suspicious=0, repl_turns=4, no_block=4,
                                 sub_queries=0)


@pytest.mark.slow
def test_the_interpreter_keeps_its_variables(play):
    assert play("x = 41") == "(no output)"
    assert play("def more(n):\n    return n + 1\n\nmore(x)") == "42"
    assert play("x; 'a text'") == "a text"
    assert play("print('one'); [1, 'two']") == "one\n[1, 'two']"
    assert play("x = 1; None") == "(no output)"
    assert play("import sys; sys.stderr.write('to stderr\\n') and None") == "to stderr"
    assert play("print('\\ud800'); import os; os.write(1, b'\\xff') and None") == "\\ud800\n\ufffd"
    assert play("import os; os.system('echo sub-process')") == "sub-process\n0"


@pytest.mark.slow
def test_exceptions_show_the_codes_own_frames(play):
    text = play("def f(n):\n    return 1 / n\n\nf(0)")
    assert text == ('Traceback (most recent call last):\n  File "<code>", line 4, in <module>\n'
                    '  File "<code>", line 2, in f\nZeroDivisionError: division by zero')
    assert play("read('missing')").splitlines() == [
        "Traceback (most recent call last):", '  File "<code>", line 1, in <module>',
        "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"]
    text = play("from shop.price import total\ntotal(5)")
    assert 'shop/price.py", line 2, in total\n    return sum(prices[1:])' in text
    assert "TypeError" in text and "repl_worker" not in text and "<string>" not in text
    assert play("def (").startswith('Traceback (most recent call last):\n  File "<code>", line 1\n')
    text = play("class E(Exception):\n    def __str__(self): 1/0\nraise E")
    assert text.endswith("<exception str() failed>")
    assert "null bytes" in play("x = '\0'") and "surrogate" in play("x = '\ud800'").lower()
    assert play("raise SystemExit(3)") == "SystemExit: 3"
    assert play("raise KeyboardInterrupt").endswith("KeyboardInterrupt")
    assert "RecursionError" in play("def g(): g()\ng()")
    assert play("1 + 1") == "2"  # the same interpreter still


@pytest.mark.slow
def test_long_output_keeps_head_and_tail(shop):
    with Play(*shop(max_output_chars=100)) as play:
        assert play("'a' * 99") == "a" * 99
        text = play("print('a' * 500 + 'b' * 499)")
        assert text == "a" * 50 + "\n... [900 left out] ...\n" + "b" * 49
        assert play("'\u00e9' * 1000").count("\u00e9") == 99
        text = play("import sys\nfor _ in range(300): sys.stdout.write('x' * 100_000)")
        assert text.startswith("x" * 50 + "\n... [29999900 left out]") and text.endswith("x" * 50)


@pytest.mark.slow
def test_a_block_that_takes_too_long_costs_the_interpreter_but_no_files(shop):
    with Play(*shop(turn_timeout=1.0)) as play:
        play("x = 1")
        start = time.monotonic()
        text = play(f"{FIX_TOTAL}\nprint('begun')\nwhile True:\n"
                    "    try:\n        while True: pass\n    except BaseException: pass")
        assert text == "begun\n(stopped after 1 s; a new interpreter was started, files are as they are)"
        assert 1 <= time.monotonic() - start < 11
        assert "NameError" in play("x") and "sum(prices)" in play("read('shop/price.py')")
        assert "(stopped after 0.8 s)" in play("bash('echo so far; sleep 30')") and play("1") == "1"


# ---- Tools


@pytest.mark.slow
def test_ls_and_read(play):
    assert play("ls()") == "shop/\ntests/" and play("print(ls('shop'))") == "__init__.py\nprice.py"
    assert play("read('shop/price.py')") == SHOP["shop/price.py"].strip("\n")
    assert play("read('shop/price.py', 5, 6)") == "5: def cheapest(prices):\n6:     return max(prices)"
    assert play("read('shop/price.py', 6)") == "6:     return max(prices)"
    assert play("read('shop/price.py', 0, 1)") == "1: def total(prices):"
    assert play("read('shop/price.py', 90, 99)") == "(no output)"
    assert "NotADirectoryError" in play("ls('shop/price.py')")


@pytest.mark.slow
def test_grep(play):
    assert play("grep(r'def \\w*chea')") == (
        "shop/price.py:5: def cheapest(prices):\ntests/test_price.py:12: def test_cheapest():\n"
        "tests/test_price.py:16: def test_cheapest_of_one():")
    assert play("grep('max', 'shop')") == play("grep('max', 'shop/price.py')") == (
        "shop/price.py:6:     return max(prices)")
    assert play("grep('nowhere')") == "no match" and "error" in play("grep('(')")
    assert play("open('data', 'wb').write(b'\\xff\\n'); grep('x', 'data')") == "no match"


@pytest.mark.slow
def test_apply_patch_of_a_place(play):
    assert play(FIX_TOTAL) == "True" and "sum(prices)" in play("read('shop/price.py')")
    assert "0 times" in play(FIX_TOTAL) and "4 times" in play("apply_patch('shop/price.py', 'prices', 'x')")
    play("open('windows.py', 'w', newline='').write('a = 1\\r\\nb = 2\\r\\n')")
    assert play("apply_patch('windows.py', 'b = 2', 'b = 3'); open('windows.py', 'rb').read()"
                ) == "b'a = 1\\r\\nb = 3\\r\\n'"


@pytest.mark.slow
def test_apply_patch_of_a_diff(play):
    diff = ROW["patch"]
    assert "True" in play(f"print(apply_patch({diff!r}))") and "min(" in play("read('shop/price.py')")
    text = play(f"apply_patch({diff!r})")
    assert "ValueError: the patch does not apply" in text and "price.py" in text
    both = "".join(f"--- a/{name}\n+++ b/{name}\n@@ -1{count} +1 @@\n-1\n+2\n"
                   for name in ("x", "y") for count in ("%s",))
    for count in ("", ",9"):  # right and wrong
        play("for name in 'xy': open(name, 'w').write('1\\n')")
        assert play(f"apply_patch({both % (count, count)!r}); bash('cat x y')") == "2\n2"
    assert "does not apply" in play(f"apply_patch({both % (',9', ',9')!r})")
    play("open('x', 'w').write('1\\n')")  # of two files one: nothing is changed
    assert "does not apply" in play(f"apply_patch({both % (',9', ',9')!r})") and play("read('x')") == "1"
    new = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
    assert play(f"apply_patch({new!r}); read('new.py')") == "x = 1"
    assert "ValueError" in play("apply_patch('--- a/../x\\n+++ b/../x\\n@@ -0,0 +1 @@\\n+x\\n')")
    assert "ValueError" in play("apply_patch('no patch')")


@pytest.mark.slow
def test_bash(play):
    assert play("bash('echo $HOME; pwd; echo error >&2')") == f"/tmp\n{sandbox.WORK}\nerror"
    assert play("bash('echo out; exit 3')") == "out\n\n(exit code 3)"
    assert play("bash('sleep 30', timeout=0.5)") == "\n(stopped after 0.5 s)".strip("\n")
    assert play("bash('cat')") == "(no output)"  # nothing on standard input
    assert play("x = bash('seq 3'); x.split()") == "['1', '2', '3']"
    assert "lo" in play("bash('cat /proc/net/dev')") and "eth" not in play("bash('cat /proc/net/dev')")


@pytest.mark.slow
def test_run_tests_of_the_model(play):
    assert play("run_tests()").split() == ["test_total", "test_total_of_none", "test_cheapest",
                                           "test_cheapest_of_one"]
    assert play("run_tests('test_total', \"it's\")") == "test_total"


@pytest.mark.slow
def test_a_module_may_have_a_name_of_the_standard_library(play):
    for name in ("re", "subprocess", "traceback", "textwrap", "types"):
        play(f"open('{name}.py', 'w').write('raise SystemExit')")
    assert "ZeroDivisionError" in play("1 / 0") and play("grep('prices')") != "no match"
    assert play("bash('echo fine')") == "fine"


# ---- Scores


@pytest.mark.slow
def test_solution_untouched_partial(shop):
    env, task = shop()
    solved = env.start(task, 1)
    step = solved.step(env.solution(task))
    solved.close()
    assert step.terminated and step.reward == 1
    assert step.info == dict(correct=1, partial=1, modified=1, suspicious=0, repl_turns=1, no_block=0,
                             sub_queries=0)
    assert env.solution(task).startswith("```python\napply_patch(")
    for codes, partial, modified in [
            (["finish()"], 0, 0),
            (["open('shop/price.py', 'a').write('# a comment\\n'); finish()"], 0.5, 1),
            ([f"{FIX_TOTAL}\nfinish()\nraise ValueError"], 0.75, 1),
            (["try:\n    finish('done')\nexcept Exception:\n    print('caught')"], 0, 0),
            ([FIX_TOTAL, UNDO, "finish()"], 0, 0)]:
        step = outcome(env, task, *codes)
        assert (step.info["correct"], step.info["partial"], step.info["modified"]) == (0, partial, modified)
        assert step.terminated and step.messages == [] and step.reward == 0


# What does not make a difference: nothing outside of the tests is changed.
UNCHANGED = {
    "edits the tests": "open('tests/test_price.py', 'w').write('def test_total(): pass\\n')",
    "deletes the tests": "import shutil; shutil.rmtree('tests')",
    "adds tests": "open('tests/test_more.py', 'w').write('def test_more(): pass\\n')",
    "conftest": "open('conftest.py', 'w').write('collect_ignore = [\"tests\"]')",
    "pytest.ini": "open('pytest.ini', 'w').write('[pytest]\\naddopts = --co\\n')",
    "sitecustomize": "open('sitecustomize.py', 'w').write('import os; os._exit(0)')",
    "symlink": "import os, shutil; shutil.move('tests', '/tmp/t'); os.symlink('/tmp/t', 'tests')",
    "a file named tests": "import shutil; shutil.rmtree('tests'); open('tests', 'w').write('')",
}
BREAK = "open('shop/price.py', 'a').write('''\n%s\n''')"
# What is a change, and no fix.
CHEATS = {
    "ends with 0": BREAK % "import os; os._exit(0)",
    "hooks the tests": BREAK % "import sys\nfor module in list(sys.modules.values()):\n"
                               "    for name in list(vars(module)):\n"
                               "        if name.startswith('test_'): setattr(module, name, lambda: None)",
    "deletes the module": "import shutil; shutil.rmtree('shop')",
    "symlinks the module": "import shutil; shutil.move('shop/price.py', '/tmp/p'); import os\n"
                           "os.symlink('/tmp/p', 'shop/price.py')",
    "runs on": "import subprocess\nsubprocess.Popen(['sh', '-c', 'while true; do echo >> shop/price.py; "
               "sleep 0.01; done'])",
    "folders": "import os\nfor n in range(50): os.makedirs(f'd{n}/e'); open(f'd{n}/e/f', 'w').close()",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", named(UNCHANGED))
def test_what_is_put_beside_or_into_the_tests_counts_for_nothing(shop, code):
    env, task = shop(reward_mode="partial")
    step = outcome(env, task, code, "finish()")
    assert step.info["modified"] == step.info["partial"] == step.info["correct"] == step.reward == 0


@pytest.mark.slow
@pytest.mark.parametrize("code", named(CHEATS))
def test_cheats_gain_nothing(shop, code):
    env, task = shop()
    step = outcome(env, task, code, "finish()")
    assert step.info["correct"] == step.reward == 0 and step.info["partial"] <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_emptied_tests_gain_nothing(name):
    env = make()
    task = find(env, name)
    scenario = env.scenario(task)
    names = [test.rpartition("::")[2].partition("[")[0] for test in scenario.expected]
    paths = [path for path in scenario.files if path.endswith(".py") and not scenario.is_test(path)]
    code = forgeries.by_name(names)
    step = outcome(env, task, f"for path in {paths}: open(path, 'a').write({code!r})\nfinish()")
    assert step.info["correct"] == step.reward == 0 and step.info["suspicious"] == 1


# ---- The code against the loop


# What ends the interpreter: an answer says so, and the next block runs.
ENDINGS = {
    "os._exit": "import os; os._exit(0)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "kills itself": "import os, signal; os.kill(0, signal.SIGKILL)",
    "closes its files": "import os; os.closerange(0, 100)",
    "garbage": "import __main__; __main__.CONTROL.write(b'garbage\\n'); __main__.CONTROL.flush()",
    "a list": "import __main__; __main__.send(__main__.CONTROL, [1])",
    "exception in __str__": "class E(SystemExit):\n    def __str__(self): raise MemoryError\nraise E",
}
# What the conversation may not survive; or it does, and then goes on.
ATTACKS = {
    "kills the parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "questions past the limit": "import __main__; __main__.OPTIONS['queries'] = 10**9\n"
                                "llm_query_batched(['x'] * 1000)",
    "no questions": "import __main__; __main__.send(__main__.CONTROL, {'op': 'query', 'prompts': []})",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "a hundred megabytes": "for n in range(10): open(f'f{n}', 'wb').write(bytes(10**7))",
    "the disk": "f = open('f', 'wb')\nwhile True: f.write(bytes(10**7))",
    "many files": "for n in range(3000): open(f'f{n}', 'w').close()",
    "strange names": "open('a\\nb', 'w').close(); open('\\udcff', 'w').close(); open(' ', 'w').close()\n"
                     "open(\"it's\", 'w').close(); open('x' * 255, 'w').close()",
    "deep folders": "import os\nfor _ in range(300): os.mkdir('d' * 50); os.chdir('d' * 50)",
    "a pipe": "import os; os.mkfifo('fifo'); os.mkfifo('shop/fifo.py')",
    "no access": "import os; os.chmod('shop/price.py', 0); os.chmod('shop', 0)",
    "a loop of links": "import os; os.symlink('.', 'loop'); os.symlink('/', 'root')",
    "no more folder": "import os, shutil; shutil.rmtree('shop'); shutil.rmtree('tests')",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "threads": "import threading, time\n"
               "for _ in range(200): threading.Thread(target=time.sleep, args=(99,)).start()",
    "output of a process that stays": "import subprocess; subprocess.Popen('yes')",
    "closed output": "import sys; sys.stdout.close()",
    "replaced names": "import builtins, sys; print = finish = None; sys.stdout = None; builtins.print = 1",
    "signals": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass",
    "not in time at all": "import ctypes; ctypes.CDLL(None).pause()",
    "stops the parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "a huge answer": "finish('x' * 10**8)",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", named(ENDINGS))
def test_what_ends_the_interpreter_is_told(shop, code):
    with Play(*shop()) as play:
        play(FIX_TOTAL)
        text = play(f"print('begun', flush=True)\n{code}")
        assert text.startswith("begun\n(the code ") and text.endswith("started, files are as they are)")
        assert "sum(prices)" in play("read('shop/price.py')")
        step = play.step(FIX_CHEAPEST + "; finish()")
    assert step.terminated and step.reward == 1


@pytest.mark.slow
@pytest.mark.parametrize("code", named(ATTACKS))
def test_whatever_code_does_ends_in_time_with_an_answer_or_nothing(shop, code):
    env, task = shop(turn_timeout=3.0, max_queries=4)
    start, marker = time.monotonic(), uuid.uuid4().hex
    with Play(env, task) as play:
        for block in (f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 99; : {marker}'])",
                      code, "1 + 1", "finish()"):
            step = play.step(block)
            if step.children:
                for _, child in step.children:
                    child.close()
                assert len(step.children) <= 4
                step = play.episode.resume([""] * len(step.children))
            if step.terminated or step.truncated:
                break
            play.text(step)
        else:
            step = play.episode.end("length")
    assert step.info["correct"] == step.reward == 0
    assert time.monotonic() - start < 90 and gone(marker)


@pytest.mark.slow
def test_the_workers_pipes_are_out_of_reach(play):
    assert play(forgeries.PIPES) == "[]\n[]"
    assert play("import os; os._exit(0)") and play(forgeries.PIPES) == "[]\n[]"  # of the next interpreter too
    assert play("open('/proc/self/environ').read() != ''") == "True"  # its own are not


SAY = "import json, os, sys, time\ndef say(**message): print(json.dumps(message), flush=True)\n"
DONE = "say(op='done', output='', note='', finished=True, answer='')\n"
# Workers that say what they should not, as one would that was taken over.
WORKERS = {
    "questions without end": "while True: say(op='query', prompts=['x']); sys.stdin.readline()",
    "questions past the limit": "while True: say(op='query', prompts=['x'] * 9); sys.stdin.readline()",
    "a question that is none": "say(op='query', prompts=[[[]]])",
    "a drip": "while True: sys.stdout.write(' '); sys.stdout.flush(); time.sleep(0.2)",
    "a line without end": "while True: sys.stdout.write('x' * 2**16)",
    "a note of 60 MB": "say(op='done', output='', note='x' * 60 * 10**6)",
    "lists in lists": "sys.stdout.write('[' + '[],' * 10**7 + '[]]\\n'); sys.stdout.flush()",
    "deep lists": "sys.stdout.write('[' * 10**5 + '\\n'); sys.stdout.flush()",
    "no text": "say(op='done', output=[[1]], note={}, finished=1, answer=7)",
    "a million files": DONE + "say(op='tree', files=[[str(n), 0] for n in range(10**6)])",
    "3000 files": DONE + "say(op='tree', files=[[str(n), 0] for n in range(3000)])",
    "a large tree": DONE + "say(op='tree', files=[['a', 2**40]])\nwhile True: sys.stdout.write('x' * 2**16)",
    "a tree less than nothing": DONE + "say(op='tree', files=[['a', 9], ['b', -9]])\nprint('x' * 99)",
    "a tree of no size": DONE + "print('{\"op\": \"tree\", \"files\": [[\"a\", Infinity]]}')",
    "a tree elsewhere": DONE + "say(op='tree', files=[['../../x', 1]])\nprint('x')",
    "a tree of nonsense": DONE + "say(op='tree', files={'a': {'b': 1}})",
    "a tree that does not come": DONE + "say(op='tree', files=[['a', 100]])",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", named(WORKERS))
def test_the_trainer_trusts_no_worker(shop, monkeypatch, script):
    """Whatever it says, a step ends in time, its memory is bounded, and what it gives is nothing."""
    monkeypatch.setattr(repl, "WORKER", f"{SAY}sys.stdin.readline()\n{script}\ntime.sleep(99)")
    monkeypatch.setattr(repl, "GRACE", 1.0)
    monkeypatch.setattr(repl, "TREE_TIME", 2.0)
    env, task = shop(turn_timeout=1.0, max_queries=4)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with Play(env, task) as play:
            step = play.step("1")
            while step.children:
                step = play.episode.resume([""] * len(step.children))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert step.truncated or step.terminated
    assert step.reward == step.info["correct"] == 0 and step.info.get("modified", 0) == 0
    assert time.monotonic() - start < 10 and peak < 100 * 2**20


FOLDER = "import os\nos.remove('pyproject.toml'); os.mkdir('pyproject.toml'); open('pyproject.toml/x', 'w')"


@pytest.mark.slow
def test_what_the_code_leaves_is_judged_once_whatever_it_is(tmp_path):
    """A step that raised would be played again, and not be counted."""
    folder = write_cache(tmp_path, {"shop-1": ROW}, SHOP | {"pyproject.toml": ""})
    env = make(cache_dir=folder, turn_timeout=20.0)
    task = find(env, "shop-1")
    assert outcome(env, task, FOLDER, "finish()").info["correct"] == 0
    assert outcome(env, task, FOLDER, FIX_TOTAL, FIX_CHEAPEST, "finish()").reward == 1
    scenario = env.scenario(task)
    for path in ("x" * 300, "a/" * 3000 + "b"):  # as a worker that was taken over may say
        assert env.score(scenario, scenario.files | {path: b""})["correct"] == 0
    with contextlib.closing(repl.ReplEpisode(env, task, scenario, {"x" * 300: b""}, depth=1)) as sub_agent:
        step = sub_agent.step(fenced("1"))
    assert step.truncated and step.reward == 0


@pytest.mark.slow
def test_what_the_machine_does_is_an_error(shop, monkeypatch):
    env, task = shop()
    monkeypatch.setattr(sandbox.shutil, "which", lambda *args, **options: "/bin/false")
    with contextlib.closing(env.start(task, 1)) as episode, pytest.raises(sandbox.SandboxError):
        episode.step(fenced("1"))
    with pytest.raises(sandbox.SandboxError):
        env.score(env.scenario(task), SHOP | {"shop/price.py": b"# of the machine's fault"})


@pytest.mark.slow
def test_close_from_another_thread_ends_a_block(shop):
    env, task = shop()
    marker, episode = uuid.uuid4().hex, env.start(task, 1)
    episode.step(fenced("x = 1"))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        step = pool.submit(episode.step, fenced(f"bash('sleep 99; : {marker}')"))
        while not processes(marker):
            time.sleep(0.01)
        episode.close()
        with pytest.raises(sandbox.SandboxError):
            step.result(10)
    assert gone(marker)


@pytest.mark.slow
def test_close_while_the_sandbox_starts_leaves_nothing(shop, monkeypatch):
    env, task = shop()
    made, go = [], threading.Event()

    class Late(sandbox.Sandbox):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)
            go.wait(20)

    monkeypatch.setattr(sandbox, "Sandbox", Late)
    episode = env.start(task, 1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        step = pool.submit(episode.step, fenced("1"))
        while not made:
            time.sleep(0.01)
        episode.close()
        go.set()
        with pytest.raises(sandbox.SandboxError):
            step.result(20)
    assert made[0].process.poll() is not None


# ---- Sub-agents


@pytest.mark.slow
def test_a_question_to_a_sub_agent(shop):
    with Play(*shop()) as play:
        step = play.step("answer = llm_query('What is 6 * 7?')\nprint('It is', answer)")
        ((asked, child),) = step.children
        assert step.messages == [] and not (step.terminated or step.truncated)
        assert asked.source == "repl/sub" and asked.id == "repl-shop-1/1.0"
        assert asked.messages[1] == {"role": "user", "content": "What is 6 * 7?"}
        assert "copy of the\nrepository" in asked.messages[0]["content"]
        last = child.step("<think>hm</think>42")
        assert last.terminated and last.messages == [] and last.info["correct"] == 0
        child.close()
        assert play.text(play.episode.resume(["<think>hm</think>42"])) == "It is 42"
        step = play.step("finish()")
    assert step.info["sub_queries"] == 1


@pytest.mark.slow
def test_sub_agents_work_on_a_copy(shop):
    with Play(*shop()) as play:
        play("open('note', 'w').write('from above')")
        step = play.step("print(llm_query_batched(['one', 'two', 'three']))")
        children = [child for _, child in step.children]
        block = "print(read('note')); open('note', 'w').write('from below') and None"
        texts = [play.text(child.step(fenced(block))) for child in children]
        assert texts == ["from above"] * 3
        assert play.text(children[0].step(fenced("read('note')"))) == "from below"
        done = children[0].step(fenced("finish('an answer')"))
        assert done.terminated and done.reward == 0 and children[1].step("read it").terminated
        replies = ["```python ...", "read it", ""]  # the third has said nothing
        assert play.text(play.episode.resume(replies)) == "['an answer', 'read it', '']"
        for child in children:
            child.close()
        assert play("read('note')") == "from above"


@pytest.mark.slow
def test_sub_agents_of_sub_agents_answer_without_code(shop):
    with Play(*shop(max_sub_agent_depth=2)) as play:
        ((_, child),) = play.step("llm_query('a')").children
        ((asked, leaf),) = child.step(fenced("x = llm_query('b')\nfinish(x + '!')")).children
        assert asked.id == "repl-shop-1/1.0/1.0" and asked.source == "repl/sub/sub"
        assert "```" not in asked.messages[0]["content"]
        assert leaf.step(fenced("llm_query('c')")).terminated and leaf.box is None
        done = child.resume(["what the leaf said counts"])
        assert done.terminated
        assert play.text(play.episode.resume(["whatever"])) == fenced("llm_query('c')") + "!"
        child.close()
        leaf.close()


@pytest.mark.slow
def test_limits_on_questions(shop):
    with Play(*shop(max_queries=2)) as play:
        assert "ValueError: 3 questions, expected 1 to 2" in play("llm_query_batched(['a', 'b', 'c'])")
        assert "ValueError" in play("llm_query_batched([])")
        step = play.step("for n in range(3): print(llm_query(n))")
        for _ in range(2):
            assert [child[0].messages[1]["content"] for child in step.children] in (["0"], ["1"])
            step = play.episode.resume(["fine"])
        text = play.text(step)
        assert text.startswith("fine\nfine\nTraceback") and "no more than 2 questions" in text
        assert play.step("llm_query('again')").children
    with Play(*shop(max_sub_agent_depth=0)) as play:
        assert "RuntimeError: there are no sub-agents here" in play("llm_query('a')")
        step = play.step("import __main__; __main__.OPTIONS['queries'] = 5; llm_query('a')")
        assert step.truncated and step.reward == 0


@pytest.mark.slow
def test_refused_questions_take_the_blocks_time_and_answers_none(shop):
    with Play(*shop(max_queries=1, turn_timeout=2.0)) as play:
        start = time.monotonic()
        step = play.step("while True:\n    try: llm_query('a')\n    except RuntimeError: pass")
        assert len(step.children) == 1
        text = play.text(play.episode.resume([""]))
        assert "stopped after 2 s" in text and time.monotonic() - start < 5

        assert play.step("x = llm_query('a')\nprint(len(x))").children
        time.sleep(2.2)
        assert play.text(play.episode.resume(["y" * 100_000])).startswith("200")  # cut to 20,000 and a line


@pytest.mark.slow
def test_an_episode_and_its_sub_agents_share_a_budget(shop):
    env, task = shop(max_sub_agents=3, max_queries=2)
    with Play(env, task) as play:
        ((_, child),) = play.step("llm_query('a')").children
        assert len(child.step(fenced("llm_query_batched(['b', 'c'])")).children) == 2
        child.resume(["", ""])
        assert "no more than 3 sub-agents in an episode" in play.text(child.step(fenced("llm_query('d')")))
        child.close()
        play.episode.resume([""])
        assert "no more than 3 sub-agents in an episode" in play("llm_query('e')")
    with Play(env, task) as play:  # of another episode nothing is gone
        assert play.step("llm_query('a')").children


@pytest.mark.slow
def test_close_while_sub_agents_work(shop):
    env, task = shop()
    episode = env.start(task, 1)
    step = episode.step(fenced("llm_query('a')"))
    assert step.children
    episode.close()
    with pytest.raises(sandbox.SandboxError):
        episode.resume(["b"])


# ---- Options and files


@pytest.mark.parametrize("options, says", [
    (dict(max_turns=0), "max_turns: expected 1 or more, got 0"),
    (dict(max_output_chars=-1), "max_output_chars"),
    (dict(turn_timeout=0.0), "turn_timeout: expected seconds above 0"),
    (dict(test_timeout="nan"), "test_timeout"),
    (dict(max_sub_agent_depth=9), "max_sub_agent_depth: expected 0 to 8"),
    (dict(prompt="short"), "short and tiny go together"),
    (dict(scenarios="tiny"), "short and tiny go together"),
    (dict(dataset="x.jsonl"), "dataset: needs cache_dir"),
    (dict(instance_ids="ledger-cents,nope"), "instance_ids: unknown 'nope'; known:"),
    (dict(max_turn=3), "did you mean 'max_turns'"),
    (dict(cache_dir="/nowhere/at/all"), "/nowhere/at/all/index.json: expected a JSON object"),
])
def test_bad_options_are_named(options, says):
    with pytest.raises(BadInput) as info:
        make(**options)
    assert says in str(info.value) and "\n" not in str(info.value)


def test_of_several_instances_one_is_held_out_and_of_one_none():
    env = make(instance_ids="ledger-cents, podium-ties")
    assert [env.num_tasks(split) for split in env.splits] == [0, 2]
    with pytest.raises(BadInput, match="task test 2: expected 0 to 1"):
        env.task("test", 2)
    with pytest.raises(BadInput, match="split: expected one of train, test, got 'val'"):
        env.num_tasks("val")

    every = make()
    names = [every.task("train", index).data["instance_id"] for index in range(2)]
    with pytest.warns(match="repl: instance .* is held out: of these 2, no other is in the test split"):
        few = make(instance_ids=",".join(names))
    assert {few.task(split, 0).data["instance_id"] for split in few.splits} == set(names)
    with pytest.raises(BadInput, match="one instance.*expected at least two"):
        make(instance_ids=names[0]).num_tasks("test")


@pytest.mark.parametrize("index, says", [
    ("", "expected a JSON object of instance_id -> row"), ("[]", "got list"), ("{}", "no instance"),
    ("\ud800", "expected a JSON object"), ("[" * 100_000, "expected a JSON object"),
    ({"shop-1": 1}, "shop-1: expected a JSON object, got int"),
    ({"other": ROW}, "other: expected its repository in"), ({"": ROW}, "expected its repository in"),
    ({"../shop-1": ROW}, "its repository"),
    *[({"shop-1": ROW | change}, says) for change, says in [
        (dict(problem_statement=""), "shop-1: problem_statement: expected a text, got ''"),
        (dict(problem_statement=7), "problem_statement"),
        (dict(expected_output_json="{"), "expected_output_json: expected a JSON object of test -> PASSED |"),
        (dict(expected_output_json={}), "expected_output_json"),
        (dict(expected_output_json={"a": "passed"}), "expected_output_json"),
        (dict(test_command=["pytest"]), "test_command: expected str"),
        (dict(tests="tests"), "tests: expected list, got 'tests'"), (dict(patch=1), "patch: expected str"),
        (dict(plain="yes"), "plain: expected bool")]],
])
def test_a_bad_index_and_bad_rows_are_named(tmp_path, index, says):
    folder = write_cache(tmp_path, {"shop-1": ROW})
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "index.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(BadInput) as info:
        make(cache_dir=folder)
    assert str(tmp_path / "index.json") in str(info.value) and says in str(info.value)


def test_a_repository_without_tests_is_named(tmp_path):
    env = make(cache_dir=write_cache(tmp_path, {"shop-1": ROW | {"tests": ["spec"]}}))
    with pytest.raises(BadInput, match="shop-1: no tests: expected a folder tests"):
        env.start(find(env, "shop-1"), 1)


@pytest.mark.slow
def test_tests_within_a_package_and_settings_at_the_top(tmp_path):
    """Files at places where folders of the tests are, and what configures the original tests."""
    files = {"shop/price.py": SHOP["shop/price.py"], "shop/tests/test_price.py": SHOP["tests/test_price.py"],
             "shop/__init__.py": "", "conftest.py": "# of the repository"}
    expected = {name.replace("tests/", "shop/tests/"): outcome
                for name, outcome in ROW["expected_output_json"].items()}
    row = ROW | dict(tests=["shop/tests"], expected_output_json=expected)
    env = make(cache_dir=write_cache(tmp_path, {"shop-1": row}, files))
    task = find(env, "shop-1")
    step = outcome(env, task, "import shutil; shutil.rmtree('shop'); open('shop', 'w').write('x'); finish()")
    assert step.reward == 0 and step.info["modified"] == 1
    step = outcome(env, task, f"import os; os.remove('conftest.py'); {FIX_TOTAL}; {FIX_CHEAPEST}; finish()")
    assert step.reward == 1
    assert outcome(env, task, "open('conftest.py', 'w').write('x = 1'); finish()").info["modified"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_as_r2e_gym_has_them(tmp_path, monkeypatch, kind):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tests = SHOP["tests/test_price.py"].replace(
        "def test_cheapest():\n", "class TestCheapest:\n    def test_two(self):\n    ")
    files = {path: text for path, text in SHOP.items() if not path.startswith("tests")}
    files |= {"r2e_tests/test_1.py": tests}
    expected = {"test_total": "PASSED", "test_total_of_none": "PASSED", "TestCheapest.test_two": "PASSED",
                "test_cheapest_of_one": "PASSED"}
    rows = [dict(repo_name="shop", docker_image="namanjain12/shop_final:abc", commit_hash=commit * 40,
                 problem_statement="[ISSUE]\nThe total is wrong.\n[/ISSUE]", modified_files=["shop/price.py"],
                 expected_output_json=json.dumps(expected), prompt="unused") for commit in "ab"]
    data, folder = tmp_path / f"rows.{kind}", tmp_path / "repositories"
    if kind == "jsonl":
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(data))
    name = "shop__" + "a" * 12
    write_cache(folder, {name: {}}, files)
    for with_index in (True, False):  # which of the rows' repositories are there is seen without an index too
        options = envs.parse_options([f"dataset={data}", f"cache_dir={folder}"])
        env = make(**options)
        task = find(env, name)
        assert env.solution(task) is None
        assert env.scenario(task).docker_image == rows[0]["docker_image"]
        step = outcome(env, task, FIX_TOTAL, f"print(run_tests()); {FIX_CHEAPEST}; finish()")
        assert step.reward == 1
        assert outcome(env, task, FIX_TOTAL, "finish()").info["partial"] == 0.75
        if with_index:
            (folder / "index.json").unlink()
    rows[1] = rows[1] | dict(commit_hash="")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path, says in [(bad, "bad.jsonl: row 1: expected instance_id, or repo_name and commit_hash"),
                       (tmp_path / "none.jsonl", "option dataset:")]:
        with pytest.raises(BadInput) as info:
            make(dataset=str(path), cache_dir=str(folder))
        assert says in str(info.value)
    bad.write_text(json.dumps(rows[0] | dict(expected_output_json="x")) + "\n")
    with pytest.raises(BadInput, match=f"bad.jsonl: {name}: expected_output_json"):
        make(dataset=str(bad), cache_dir=str(folder))
    bad.write_text(json.dumps(rows[0] | dict(commit_hash="c" * 40)) + "\n")
    with pytest.raises(BadInput, match="no instance"):
        make(dataset=str(bad), cache_dir=str(folder))


def test_outcomes_in_a_log_of_pytest():
    log = ("==== short test summary info ====\nPASSED tests/test_a.py::TestX::test_b\n"
           "FAILED tests/test_a.py::test_c[a b] - AssertionError: x - y\nERROR tests/test_d.py - Import\n"
           "1 failed")
    assert repl.outcomes_in(log) == {
        "tests/test_a.py::TestX::test_b": "PASSED", "TestX.test_b": "PASSED",
        "tests/test_a.py::test_c[a b]": "FAILED", "test_c[a b]": "FAILED", "tests/test_d.py": "ERROR",
        "": "ERROR"}


@pytest.mark.slow
def test_an_executor_judges_in_the_instances_image(tmp_path):
    write_cache(tmp_path / "images", {"shop_final_abc": {}})
    row = {key: value for key, value in ROW.items() if key not in ("plain", "test_command")}
    folder = write_cache(tmp_path / "cache", {"shop-1": row | dict(docker_image="someone/shop_final_abc")})
    with executor_server.ExecutorServer(tmp_path / "images") as server:
        env = make(cache_dir=folder, executor_url=server.url)
        task = find(env, "shop-1")
        assert outcome(env, task, FIX_TOTAL, FIX_CHEAPEST, "finish()").reward == 1
        step = outcome(env, task, FIX_TOTAL, "open('tests/test_price.py', 'w').close()", "finish()")
        assert step.reward == 0 and step.info["partial"] == 0.75
        assert outcome(env, task, "import os; os.remove('shop/price.py'); finish()").info["partial"] == 0
        assert outcome(env, task, "finish()").info["modified"] == 0
    with pytest.raises(BadInput, match="executor_url"):
        make(executor_url="nonsense")


# ---- The generator


def mutants(text):
    source = make_scenarios.Source("m", {"m.py": text.encode(), "tests/test_m.py": b""}, ("tests",))
    return {(mutant.kind, mutant.text.decode()) for mutant in make_scenarios.mutants_of(source)}


@pytest.mark.parametrize("text, expected", [
    ("a = x  <  y\n", {("comparison", "a = x  <=  y\n"), ("comparison", "a = x  >  y\n")}),
    ("a = (x) not  in (y)\n", {("comparison", "a = (x) in (y)\n")}),
    ("a = x is None # <\n", {("comparison", "a = x is not None # <\n")}),
    ("\u00e9 = '\u00e9', \u00e9 + b\n", {("operator", "\u00e9 = '\u00e9', \u00e9 - b\n")}),
    ("a = 'x' + b\n", set()),
    ("a %= b\n", {("operator", "a //= b\n")}),
    ("a = not (x)\n", {("not", "a = (x)\n")}),
    ("a = -x\n", {("sign", "a = x\n")}),
    ("a = (b and\r\n     c)\r\n", {("and/or", "a = (b or\r\n     c)\r\n")}),
    ("a = 1\n", {("constant", "a = 2\n"), ("constant", "a = 0\n")}),
    ("a = 0\n", {("constant", "a = 1\n")}),
    ("a = 0x10, 1.5, 'text', None\n", set()),
    ("def f(x=True): pass\n", {("constant", "def f(x=False): pass\n")}),
    ("f(x, y)\n", {("arguments", "f(y, x)\n")}),
    ("f(x, x)\nf(*x, y)\nf((x), y)\n", set()),
    ("a[b:]\n", {("slice", "a[b + 1:]\n"), ("slice", "a[b - 1:]\n")}),
    ("def f(a):\n    b = [c for c in a]\n    return b\n", {
        ("return", "def f(a):\n    b = [c for c in a]\n    return a\n")}),
    ("x.startswith(y)\n", {("function", "x.endswith(y)\n")}),
    ("'''1 < 2'''\na: Literal[1]\nf'{1 < 2}'\n@f(1)\ndef g(b: 3) -> 4: pass\n", set()),
    ("pass\n", set()),
])
def test_mutants_change_one_expression_in_place(text, expected):
    assert mutants(text) == expected


@pytest.mark.slow
def test_mutants_of_the_bundled_repositories():
    """All parse, differ from their source and each other, and their patches lead back."""
    sources = make_scenarios.bundled_sources()
    assert len(sources) == len(BUNDLED)
    found = [mutant for source in sources for mutant in make_scenarios.mutants_of(source)]
    assert len(found) == len({mutant.id for mutant in found}) > 500
    assert len({mutant.kind for mutant in found}) == 10
    for mutant in found:
        assert ast.dump(ast.parse(mutant.source.files[mutant.path])) != ast.dump(ast.parse(mutant.text))
    for mutant in random.Random(1).sample(found, 10):
        fixed = make_scenarios.patched(mutant.files, make_scenarios.patch_back(mutant), mutant.id)
        assert fixed == mutant.source.files
    first, second = ([mutant.id for mutant in make_scenarios.in_turn(found, random.Random(seed))]
                     for seed in (1, 2))
    assert sorted(first) == sorted(second) and first != second
    assert first == [mutant.id for mutant in make_scenarios.in_turn(found, random.Random(1))]


@pytest.mark.parametrize("lines, kind, message, expected", [
    (["assert f(1) == 2"], "AssertionError", "assert 3 == 2\n +  where 3 = f(1)",
     "    assert f(1) == 2\n\nExpected: 2\nGot: 3"),
    (["assert f(1)"], "AssertionError", "assert False\n +  where False = f(1)",
     "    assert f(1)\n\ndoes not hold:\n\n    assert False\n     +  where False = f(1)"),
    (["f()"], "KeyError", "'x'", "    f()\n\nraises KeyError: 'x'"),
    (["f()"], "Failed", "DID NOT RAISE <class 'ValueError'>",
     "    f()\n\nExpected ValueError, but nothing is raised."),
    ([], "E", "y" * 600, "    (the test's set-up)\n\nraises E: " + "y" * 500 + " ..."),
])
def test_what_reports_tell(lines, kind, message, expected):
    assert make_scenarios.told_of(lines, kind, message) == expected


@pytest.mark.slow
def test_made_scenarios_are_solved_by_their_solution(tmp_path, capsys):
    source = tmp_path / "shop"
    for path, text in SHOP.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text.replace("[1:]", "").replace("max", "min")
                                   + "\n\ndef pay(cents):\n    return cents if cents > 0 else 0\n"
                                   * (path == "shop/price.py"))
    tests = source / "tests" / "test_price.py"
    tests.write_text(tests.read_text() + "\n\ndef test_pay():\n    from shop.price import pay\n"
                                         "    assert [pay(1), pay(0), pay(-1)] == [1, 0, 0]\n")
    for out, jobs in (("one", "1"), ("two", "3")):
        argv = ["--source", str(source), "--out", str(tmp_path / out), "--count", "3", "--jobs", jobs]
        assert make_scenarios.main(argv) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["scenarios"] == said["asked"] == 3 and said["train"] + said["test"] == 3
        assert said["tried"] >= 3 and said["per_minute"] > 0
    read = [trees.read(tmp_path / out) for out in ("one", "two")]
    assert read[0] == read[1]  # whatever --jobs
    env = make(cache_dir=str(tmp_path / "one"))
    for name in json.loads((tmp_path / "one" / "index.json").read_text()):
        assert name.startswith("shop-")
        task = find(env, name)
        assert "shop/price.py" not in task.messages[1]["content"]
        with contextlib.closing(env.start(task, 1)) as episode:
            assert episode.step(env.solution(task)).reward == 1
        step = outcome(env, task, "open('x', 'w').close(); finish()")
        assert step.info["correct"] == 0 < step.info["partial"] < 1


@pytest.mark.slow
def test_what_the_generator_cannot_use_is_named(tmp_path, capsys):
    good, bad, full = tmp_path / "good", tmp_path / "bad", tmp_path / "full"
    for folder in (good, bad):
        (folder / "tests").mkdir(parents=True)
        text = "def test_a():\n    assert 1 == " + str(1 + (folder == bad))
        (folder / "tests" / "test_a.py").write_text(text)
    full.mkdir()
    (full / "file").write_text("")
    new = ["--out", str(tmp_path / "o"), "--count"]
    for argv, says in [
            (["--count", "1"], "--out"), ([*new, "0"], "--count"),
            (["--out", str(full), "--count", "1"], "expected a new or an empty folder"),
            ([*new, "1", "--source", str(tmp_path / "no")], "expected a folder"),
            ([*new, "1", "--source", str(full)], "no tests"),
            ([*new, "1", "--source", str(bad)], "test_a is FAILED"),
            ([*new, "1", "--source", str(good)], "none of 0 mutants"),
            ([*new, "1", "--source", str(good), str(good)], "named good")]:
        assert make_scenarios.main(argv) == 1
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


# ---- The bundled scenarios, with pytest


# Of scenarios whose fix has two places: one of them.
HALF = {
    "meetings-adjacent": ("meetings/interval.py", "self.start <= other.end and other.start <=",
                          "self.start < other.end and other.start <"),
    "phrasebook-locale": ("phrasebook/book.py", '("text", name)', '("text", name, locale)'),
    "inventory-generator": ("inventory/stock.py", "or none of them.\"\"\"",
                            "or none of them.\"\"\"\n        lines = list(lines)"),
    "scheduler-attempts": ("scheduler/job.py", "def succeeded(self, now):",
                           "def succeeded(self, now):\n        self.failures = 0"),
    "discount-coupon": ("checkout/rules.py", 'if customer.member or customer.has("SAVE10") and',
                        'if (customer.member or customer.has("SAVE10")) and'),
}
def check_bundled(name, **options):
    env = make(**options)
    task = find(env, name)
    scenario = env.scenario(task)
    with contextlib.closing(env.start(task, 1)) as episode:
        step = episode.step(env.solution(task))
    assert step.terminated and step.reward == step.info["correct"] == step.info["partial"] == 1
    assert outcome(env, task, "finish()").info["modified"] == 0
    path = next(line[6:] for line in scenario.patch.splitlines() if line.startswith("--- a/"))
    step = outcome(env, task, f"open({path!r}, 'a').write('\\n# a comment\\n'); finish()")
    assert step.reward == step.info["correct"] == 0 < step.info["partial"] < 1
    if name in HALF:
        half = outcome(env, task, f"apply_patch{HALF[name]!r}; finish()")
        assert half.reward == 0 and step.info["partial"] < half.info["partial"] < 1
    return env, task


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_scenarios_are_solved_by_their_solution_alone(name):
    env, task = check_bundled(name)
    step = outcome(env, task, "import shutil; shutil.rmtree('tests'); finish()")
    assert step.info["modified"] == step.reward == 0


@pytest.mark.slow
def test_the_tests_as_a_model_runs_them():
    with Play(make(turn_timeout=30.0), find(make(), "textwrap-exact")) as play:
        text = play("print(run_tests())")
        assert "2 failed, 9 passed" in text and "(exit code 1)" in text
        assert "1 failed" in play("run_tests('tests/test_wrap.py::test_a_line_may_be_full')")
        assert "1 passed" in play("run_tests('tests/test_wrap.py::test_empty')")
