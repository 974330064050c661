"""The code REPL: its loop and tools, what it scores, code that cheats or attacks, formats, the generator."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import time
import tracemalloc
import uuid
from unittest import mock

import pytest

import envs
from envs.code import repl, sandbox, testing, trees
from tests import forgeries
from tests.run_folders import ROOT, in_time, quick
from tools import executor_server, make_scenarios

TINY = dict(scenarios="tiny", prompt="short")
SCENARIOS = ROOT / "envs" / "code" / "repl_scenarios"
BUNDLED = sorted(json.loads((SCENARIOS / "index.json").read_text(encoding="utf-8")))

# A repository whose tests run without pytest, which is fast. Its bug is in two places.
CHECKS = {"total": "total([1, 2, 3]) == 6", "total_of_none": "total([]) == 0",
          "cheapest": "cheapest([4, 2]) == 2", "cheapest_of_one": "cheapest([4]) == 4"}
SHOP = {
    "shop/__init__.py": "",
    "shop/price.py": "def total(prices):\n    return sum(prices[1:])\n\n\n"
                     "def cheapest(prices):\n    return max(prices)\n",
    "tests/test_price.py": "from shop.price import cheapest, total\n" + "".join(
        f"def test_{name}():\n    assert {check}\n" for name, check in CHECKS.items()),
}
FIX_TOTAL = "apply_patch('shop/price.py', 'prices[1:]', 'prices')"
UNDO = "apply_patch('shop/price.py', 'sum(prices)', 'sum(prices[1:])')"
FIX_CHEAPEST = "apply_patch('shop/price.py', 'max(', 'min(')"
ROW = dict(
    problem_statement="The total is wrong, and so is the cheapest price.", plain=True,
    expected_output_json={f"tests/test_price.py::test_{name}": "PASSED" for name in CHECKS},
    test_command="python3 -c 'import sys; print(sys.argv[1:])'",
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


make = functools.partial(envs.make, "repl", guessable=True)


def alone(name="", **options):
    """An environment of one instance, and its task."""
    env = make(instance_ids=name, **options)
    return env, env.task("train" if env.num_tasks("train") else "test", 0)


def fenced(code):
    return code if "```" in code else f"```python\n{code}\n```"


class Play(contextlib.AbstractContextManager):
    """An episode, block by block."""

    def __init__(self, env, task):
        self.episode = env.start(task, 1)
        self.is_bare = env.config.prompt == "short"  # its replies are code alone

    def __exit__(self, *exc):
        self.episode.close()

    def __call__(self, code):
        """What a block prints."""
        step = self.step(code)
        assert not (step.terminated or step.truncated or step.children), step
        return self.text(step)

    def step(self, code):
        return self.episode.step(code if self.is_bare else fenced(code))

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
        return alone(cache_dir=folder, **({"turn_timeout": 20.0} | options))
    return build


@pytest.fixture
def play(shop):
    with Play(*shop(max_turns=100)) as playing:
        yield playing


# ---- Tasks


@pytest.mark.parametrize("prompt", ["default", "minimal", "cot"])
def test_prompts_hold_no_answers(prompt):
    for name in BUNDLED:
        env, task = alone(name, prompt=prompt, max_turns=7)
        scenario, text = env.scenario(task), json.dumps(task.messages, ensure_ascii=False)
        assert task.messages[1]["content"] == scenario.problem_statement
        assert all(word in text for word in ("finish()", "7 replies", "llm_query"))
        assert json.loads(json.dumps(task.data)) == {"instance_id": name}
        added = [line[1:].strip() for line in scenario.patch.splitlines()
                 if line.startswith("+") and not line.startswith("+++")]
        assert added and not [line for line in added if len(line) > 15 and line in text]
        assert not any(test.partition("::")[2] in text for test in scenario.expected)
        assert "PASSED" not in text and "expected_output" not in text and "@@" not in text
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
            parts = dict(id=task.id, source=task.source, messages=task.messages, data=task.data)
            assert task == envs.Task(**parts)
            digest.update(repr((sorted(parts.items()), files, env.solution(task))).encode())
    assert digest.hexdigest()[:16] == pinned  # Python hashes texts differently in each process


@pytest.mark.parametrize("untouched, passing, cheapest, correct, partial", [
    ([], ["total", "cheapest"], "PASSED", 1, 1), ([], ["total"], "PASSED", 0, 0.5),
    ([], ["total"], "FAILED", 0, 0.5), ([], ["total", "cheapest"], "FAILED", 0, 0.5),  # none is not FAILED
    (["total"], ["total"], "PASSED", 0, 0), (["total"], ["total", "cheapest"], "PASSED", 1, 1),
    (["total"], ["cheapest"], "PASSED", 0, 0), (["total"], [], "PASSED", 0, 0)])
def test_what_outcomes_are_worth(tmp_path, monkeypatch, untouched, passing, cheapest, correct, partial):
    expected = {"tests/test_price.py::test_total": "PASSED", "tests/test_price.py::test_cheapest": cheapest}
    folder = write_cache(tmp_path, {"shop-1": ROW | dict(expected_output_json=expected, patch="")})

    def run_tests(files, *args, **options):
        found = passing if "shop/new.py" in files else untouched
        return testing.Outcomes({f"tests/test_price.py::test_{name}": "PASSED" for name in found})

    monkeypatch.setattr(repl, "run_tests", run_tests)
    for mode, reward in (("correct", correct), ("partial", partial)):
        env, task = alone(cache_dir=folder, reward_mode=mode)
        scenario = env.scenario(task)
        for left, worth in (
                (["shop/new.py"], (correct, partial, 1, reward)),
                (["tests/test_price.py", "tests/test_more.py", "conftest.py"], (0, 0, 0, 0))):
            files = scenario.files | dict.fromkeys(left, b"")
            step = repl.ReplEpisode(env, task, scenario, files, depth=0).end("length")
            parts = (step.info[part] for part in ("correct", "partial", "modified"))
            assert (*parts, step.reward) == worth


def test_tiny_train_and_test_share_nothing_and_calls_tell_all_expressions_apart():
    env, seen = make(train_tasks=120, test_tasks=60, **TINY), {}
    for split in env.splits:
        tasks = [env.task(split, index) for index in range(env.num_tasks(split))]
        seen[split] = {(task.messages[0]["content"], env.scenario(task).files["m.py"]) for task in tasks}
    assert len(seen["train"]) > 90 and len(seen["test"]) > 45 and not seen["train"] & seen["test"]
    results = {tuple(repl.value(expression, *call) for call in repl.CALLS) for expression in repl.EXPRESSIONS}
    assert len(results) == len(repl.EXPRESSIONS)


@pytest.mark.slow
def test_tiny_tasks_are_solved_by_their_demonstration():
    """Whose answers are the sandbox's, and whose last reply is the solution."""
    env = make(max_turns=5, **TINY)
    words = set(env.vocabulary)
    for index in range(8):
        task = env.task("train", index)
        first, look, shown, last = demonstration = env.demonstration(task)
        assert [first] == task.messages and last["content"] == env.solution(task)
        assert all(set(message["content"].split()) <= words for message in demonstration)
        fix = last["content"].replace("finish ( )", "run_tests ( )")
        with contextlib.closing(env.start(task, 1)) as episode:
            for reply, answer in (("read ( 'nothing' )", "error"), ("run_tests ( )", "error"),
                                  (look["content"], shown["content"]), (fix, "passed")):
                assert episode.step(reply).messages == [{"role": "user", "content": answer}]
            step = episode.step("def def")
        assert step.truncated and step.reward == step.info["correct"] == 1 and step.info["repl_turns"] == 5


# ---- Replies


@pytest.mark.parametrize("reply, code", [
    ("```repl\nx\n```", "x"),
    ("```py\r\nx\n```", "x"),
    ("First\n```python  \nx\ny\n  ```\nand\n```python\nz\n```", "x\ny"),
    ("```json\n{}\n```\n```python\ny```", "y"), ("```python\nx = 1\nfinish()", "x = 1\nfinish()"),
    ("<think>```python\nx\n```</think>```python\ny\n```", "y"), ("<think>```python\nx\n```", None),
    ("1. Do\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),  # in a list
    ("```pythonx\n```", None), ("``` python\nx\n```", None), ("```python\n```", ""),
    ("```python\nx = 'a ```sh'\n```", "x = 'a ```sh'"), ("```python\nx\n```</think>no block", None),
    ("```python\n" + "x" * 50_000, None),  # of a long reply only the end is read
])
def test_the_first_block_counts(reply, code):
    assert repl.find_block(reply) == code


def test_hostile_replies_take_no_time():
    for part in ("```python\n", "```", "<think>", "</think>", "\n```python", " " * 99):
        with quick(part, most=3):
            repl.find_block(part * (500_000 // len(part)))


def test_replies_without_a_block(shop):
    with Play(*shop(max_turns=4)) as play:
        nudges = [play.text(play.episode.step(reply)) for reply in ("Hello", "", "finish()")]
        step = play.episode.step("```\nfinish()\n```")
    assert nudges[0] == nudges[1] == repl.NUDGES[0] and nudges[2] == repl.NUDGES[1] != nudges[0]
    assert step.truncated and not step.terminated and step.messages == [] and step.reward == 0
    assert step.info == dict(correct=0, partial=0, modified=0, suspicious=0, guessable=mock.ANY,
                             repl_turns=4, no_block=4, sub_queries=0)


SAYS = [  # code, what it prints
    ("x = 41", "(no output)"), ("def more(n):\n    return n + 1\n\nmore(x)", "42"), ("None", "(no output)"),
    ("print('one'); [1, 'two']", "one\n[1, 'two']"),
    ("import sys; sys.stderr.write('to stderr\\n') and None", "to stderr"),
    ("print('\\ud800'); import os; os.write(1, b'\\xff') and None", "\\ud800\n\ufffd"),
    ("import os; os.system('echo sub-process')", "sub-process\n0"),
    ("ls('shop')", "__init__.py\nprice.py"), ("read('shop/price.py')", SHOP["shop/price.py"].strip("\n")),
    ("read('shop/price.py', 5)", "5: def cheapest(prices):\n6:     return max(prices)"),
    ("read('shop/price.py', 0, 1)", "1: def total(prices):"), ("read('shop/price.py', 9, 9)", "(no output)"),
    ("open('page', 'w').write('a\\n\\f\\nb'); read('page', 2)", "2: \f\n3: b"),
    ("grep(r'def \\w*chea', 'shop')", "shop/price.py:5: def cheapest(prices):"),
    ("grep('max', 'shop/price.py')", "shop/price.py:6:     return max(prices)"),
    ("open('data', 'wb').write(b'\\xff\\n'); grep('x', 'data')", "no match"),
    ("bash('echo $HOME; pwd; echo error >&2')", f"/tmp\n{sandbox.WORK}\nerror"),
    ("bash('echo out; exit 3')", "out\n\n(exit code 3)"),
    ("bash('sleep 30', timeout=0.5)", "(stopped after 0.5 s)"),
    ("bash('cat')", "(no output)"),  # nothing on standard input
    ("run_tests()", "[]"), ("run_tests('test_total', \"it's\")", "['test_total', \"it's\"]")]


@pytest.mark.slow
def test_what_blocks_and_tools_print(play):
    """Also where modules of the repository have names of the standard library."""
    assert play("ls()") == "shop/\ntests/"
    for name in ("re", "subprocess", "traceback", "textwrap", "types"):
        play(f"open('{name}.py', 'w').write('raise SystemExit')")
    assert "ZeroDivisionError" in play("1 / 0")
    for code, expected in SAYS:
        assert play(code) == expected


@pytest.mark.slow
def test_exceptions_show_the_codes_own_frames(play):
    text = play("def f(n):\n    return 1 / n\n\nf(0)")
    assert text == ('Traceback (most recent call last):\n  File "<code>", line 4, in <module>\n'
                    '  File "<code>", line 2, in f\nZeroDivisionError: division by zero')
    text = play("from shop.price import total\ntotal(5)")
    assert 'shop/price.py", line 2, in total\n    return sum(prices[1:])' in text
    assert "TypeError" in text and "repl_worker" not in text and "<string>" not in text
    for code, says in [
            ("read('missing')", "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"),
            ("ls('shop/price.py')", "NotADirectoryError"), ("grep('(')", "error"),
            ("def (", '  File "<code>", line 1\n'), ("x = '\0'", "null bytes"), ("x = '\ud800'", "surrogate"),
            ("class E(Exception):\n    def __str__(self): 1/0\nraise E", "<exception str() failed>"),
            ("raise SystemExit(3)", "SystemExit: 3"), ("def g(): g()\ng()", "RecursionError")]:
        assert says in play(code)
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
def test_apply_patch(play):
    assert play(FIX_TOTAL) == "True" and "sum(prices)" in play("read('shop/price.py')")
    assert "0 times" in play(FIX_TOTAL) and "4 times" in play("apply_patch('shop/price.py', 'prices', 'x')")
    play("open('windows.py', 'w', newline='').write('a = 1\\r\\nb = 2\\r\\n')")
    diff = "--- a/windows.py\n+++ b/windows.py\n@@ -1,2 +1,2 @@\n a = 1\n-b = 2\n+b = 4\n"
    assert play(f"apply_patch({diff!r})") == "True"
    assert play("apply_patch('windows.py', '1\\nb = 4', '1\\nb = 3'); open('windows.py', 'rb').read()"
                ) == "b'a = 1\\r\\nb = 3\\r\\n'"
    assert play("open('e', 'w').close(); apply_patch('e', '', '1\\n'); open('e', 'rb').read()") == r"b'1\n'"
    play(f"{UNDO}; apply_patch({ROW['patch']!r})")
    assert "sum(prices)" in play("read('shop/price.py')") and "min(" in play("read('shop/price.py')")
    text = play(f"apply_patch({ROW['patch']!r})")
    assert "ValueError: the patch does not apply" in text and "price.py" in text
    assert play("apply_patch('--- /dev/null\\n+++ b/new.py\\n@@ -0,0 +1 @@\\n+x\\n'); read('new.py')") == "x"
    for wrong in ("'--- a/../x\\n+++ b/../x\\n@@ -0,0 +1 @@\\n+x\\n'", "'no patch'"):
        assert "ValueError" in play(f"apply_patch({wrong})")

    for count in ("", ",9"):  # whatever the counts say
        both = "".join(f"--- a/{name}\n+++ b/{name}\n@@ -1{count} +1 @@\n-1\n+2\n" for name in "xy")
        play("for name in 'xy': open(name, 'w').write('1\\n')")
        assert play(f"apply_patch({both!r}); bash('cat x y')") == "2\n2"
    play("open('x', 'w').write('1\\n')")  # of two files one: nothing is changed
    assert "does not apply" in play(f"apply_patch({both!r})") and play("read('x')") == "1"


# ---- Scores


@pytest.mark.slow
def test_how_an_episode_ends_and_what_it_is_worth(shop):
    env, task = shop()
    step = outcome(env, task, env.solution(task))
    assert step.terminated and step.messages == [] and step.reward == 1
    assert step.info == dict(correct=1, partial=1, modified=1, suspicious=0, guessable=mock.ANY,
                             repl_turns=1, no_block=0, sub_queries=0)
    for codes, partial in [
            (["finish()"], 0), ([FIX_TOTAL, UNDO, "finish()"], 0),
            ([f"{FIX_TOTAL}\nfinish()\nraise ValueError"], 0.5),  # one of the two that fail
            (["try:\n    finish('done')\nexcept Exception:\n    print('caught')"], 0)]:
        step = outcome(env, task, *codes)
        assert (step.info["partial"], step.info["modified"]) == (partial, float(partial > 0))
        assert step.terminated and step.messages == [] and step.reward == step.info["correct"] == 0
    env, task = shop(reward_mode="partial")
    for code, partial in (("open('x', 'w').close()", 0), (FIX_TOTAL, 0.5), ("open('shop/price.py', 'w')", 0)):
        step = outcome(env, task, f"{code}; finish()")
        assert step.reward == step.info["partial"] == partial and step.info["modified"] == 1


# What gains nothing. The first three change nothing outside of the tests.
CHEATS = {
    "tests and configuration": "for path in ('tests/test_price.py', 'tests/test_more.py', 'conftest.py', "
                               "'pytest.ini', 'sitecustomize.py'): open(path, 'w').close()",
    "links the tests": "import os, shutil; shutil.move('tests', '/tmp/t'); os.symlink('/tmp/t', 'tests')",
    "a file named tests": "import shutil; shutil.rmtree('tests'); open('tests', 'w').write('')",
    "links the module": "import os, shutil; shutil.move('shop/price.py', '/tmp/p')\n"
                        "os.symlink('/tmp/p', 'shop/price.py')",
    "runs on": "import os, subprocess\nsize = os.path.getsize('shop/price.py')\n"
               "subprocess.Popen(['sh', '-c', 'while true; do echo >> shop/price.py; sleep 0.01; done'])\n"
               "while os.path.getsize('shop/price.py') == size:\n    pass",
    "emptied tests": f"open('shop/price.py', 'a').write("
                     f"{forgeries.by_name([f'test_{name}' for name in CHECKS])!r})",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_gain_nothing(shop, name):
    env, task = shop(reward_mode="partial")
    info = outcome(env, task, CHEATS[name], "finish()").info
    assert info["correct"] == 0 and info["modified"] == (name not in list(CHEATS)[:3])
    assert info["partial"] <= 0.5 * info["modified"] and info["suspicious"] == (name == "emptied tests")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUNDLED, "tiny"])
def test_a_copy_of_the_tests_as_data_gains_nothing(name):
    """Nor does code that would let tests pass in the first of two runs alone."""
    env, task = (make(**TINY), make(**TINY).task("train", 0)) if name == "tiny" else alone(name)
    scenario = env.scenario(task)
    path = min(path for path in scenario.files
               if not scenario.is_test(path) and path.endswith(("__init__.py", "m.py")))
    package = "m" if name == "tiny" else path.partition("/")[0]
    for attack in (forgeries.shipped_tests(path), forgeries.first_run_only(package, uuid.uuid4().hex)):
        code = attack if "finish()" in attack else f"open({path!r}, 'a').write({attack!r}); finish()"
        step = outcome(env, task, code)
        assert step.info["correct"] == step.reward == 0 and step.info["modified"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["meetings-adjacent", "matrix-determinant"])  # with least to guess
def test_code_that_knows_how_it_is_judged_gains_nothing(name):
    """It takes the place of what reports, and nothing is mended."""
    env, task = alone(name)
    scenario = env.scenario(task)
    path = min(path for path in scenario.files if path.endswith("__init__.py") and not scenario.is_test(path))
    for attack, code in forgeries.KNOWING.items():
        found = env.score(scenario, scenario.files | {path: code.encode() + scenario.files[path]})
        assert found["correct"] == 0 and found["modified"] == 1, attack


def test_held_out_tests_are_in_nothing_that_is_shown():
    for env in (make(), make(**TINY, train_tasks=3, test_tasks=3), make(tools=True)):
        for split in env.splits:
            for task in map(functools.partial(env.task, split), range(env.num_tasks(split))):
                scenario = env.scenario(task)
                assert scenario.held_out and scenario.held_out.encode() not in scenario.files.values()
                shown = json.dumps([task.messages, task.data, task.tools]) + "".join(
                    text.decode() for text in scenario.files.values())
                names = {name.partition("::")[2] for name in scenario.judged}
                assert names and scenario.judged.keys().isdisjoint(scenario.expected)
                assert "held_out" not in shown
                assert task.source == "repl/tiny" or len([name for name in names if name in shown]) < 4


@pytest.mark.parametrize("held_out, kept", [
    ("def test_a():\n    assert f() == 'hidden'", True), ("def test_a():\n    assert f() == 3", False),
    ("", False)])
def test_instances_whose_tests_can_be_guessed_are_not_trained_on(tmp_path, held_out, kept):
    rows = {f"shop-{n}": ROW | dict(fail_to_pass=["test_a"]) for n in range(9)}
    folder = write_cache(tmp_path, rows, SHOP)
    (tmp_path / "held_out").mkdir()
    every = make(cache_dir=folder)
    names = [every.task("train", n).data["instance_id"] for n in range(every.num_tasks("train"))]
    for name in names[1:] if held_out else []:
        (tmp_path / "held_out" / f"{name}.py").write_text(held_out)
    (tmp_path / "held_out" / f"{names[0]}.py").write_text("def test_a():\n    assert f() == 'another'")
    env = make(cache_dir=folder, guessable=False)
    assert env.num_tasks("test") == every.num_tasks("test") > 0
    ids = [env.task("train", n).data["instance_id"] for n in range(env.num_tasks("train"))]
    assert ids == (names if kept else names[:1])
    assert ("such as shop-" in env.about and "guessable=true" in env.about) == (not kept) and not every.about
    others = make(cache_dir=folder, guessable=False, instance_ids=",".join(names[1:]))
    if not kept:
        with pytest.raises(envs.BadInput, match="guessable=true keeps them.; none is left"):
            others.num_tasks("train")


@pytest.mark.parametrize("source, says", [
    ("def test_a(: pass", "a module of tests"), ("x = 1", "functions test_*, got none")])
def test_a_held_out_module_that_cannot_be_is_named(tmp_path, source, says):
    env, task = alone(cache_dir=write_cache(tmp_path, {"shop-1": ROW}, SHOP))
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "shop-1.py").write_text(source)
    with pytest.raises(envs.BadInput) as info:
        env.scenario(task)
    assert "held_out/shop-1.py: expected" in str(info.value) and says in str(info.value)


# ---- The code against the loop


# What ends the interpreter: an answer says so, and the next block runs.
ENDINGS = {
    "os._exit": "import os; os._exit(0)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "kills itself": "import os, signal; os.kill(0, signal.SIGKILL)",
    "closes its files": "import os; os.closerange(0, 100)",
    "garbage": "import __main__; __main__.CONTROL.write(b'garbage\\n'); __main__.CONTROL.flush()",
    "exception in __str__": "class E(SystemExit):\n    def __str__(self): raise MemoryError\nraise E",
    "no end": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
}
# What the conversation may not survive; or it does, and then goes on. Blocks, one after the other
ATTACKS = {
    "kills the parent": ["import os, signal; os.kill(os.getppid(), signal.SIGKILL)"],
    "stops the parent": ["import os, signal; os.kill(os.getppid(), signal.SIGSTOP)"],
    "no questions": ["import __main__; __main__.send(__main__.CONTROL, {'op': 'query', 'prompts': []})"],
    "the disk": ["f = open('f', 'wb')\nwhile True: f.write(bytes(10**7))"],
    "no more folder": ["import shutil; shutil.rmtree('shop'); shutil.rmtree('tests')"],
    "a name that is no text": ["open('\\udcff', 'w').close()"],
    "strange trees": [
        "import os; os.mkfifo('fifo'); os.mkfifo('shop/fifo.py')",
        "for name in ('a\\nb', ' ', \"it's\", 'x' * 255): open(name, 'w').close()",
        "import os; os.symlink('.', 'loop'); os.symlink('/', 'root'); os.chmod('shop', 0)",
        "import os\nfor _ in range(300): os.mkdir('d' * 50); os.chdir('d' * 50)"],
    "an interpreter that is of no use": [
        "import builtins, sys; print = finish = None; sys.stdout = None; builtins.print = 1",
        "import ctypes; ctypes.CDLL(None).pause()",
        "import subprocess, sys; subprocess.Popen('yes'); sys.stdout.close()",
        "import threading, time\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(99,)).start()"],
    "a huge answer": ["finish('x' * 10**8)"],
}


@pytest.mark.slow
def test_what_ends_the_interpreter_is_told_and_costs_no_files(shop):
    def check(limit):
        with Play(*shop(max_turns=100, turn_timeout=limit)) as play:
            play(FIX_TOTAL)
            for name, code in ENDINGS.items():
                start = time.monotonic()
                text = play(f"x = print('begun', flush=True)\n{code}")
                told = f"stopped after {limit:g} s;" if name == "no end" else "the code "
                assert text.startswith(f"begun\n({told}") and text.endswith("files are as they are)"), name
                assert limit * (name == "no end") <= time.monotonic() - start < 6 * limit
                assert "NameError" in play("x") and "sum(prices)" in play("read('shop/price.py')")
            stopped = play("bash('echo so far; sleep 60')")
            assert f"(stopped after {0.8 * limit:g} s)" in stopped and play("1") == "1"
            step = play.step(FIX_CHEAPEST + "; finish()")
        assert step.terminated and step.reward == 1

    in_time(check, (2.0, 8.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_whatever_code_does_ends_in_time_with_an_answer_or_nothing(shop, name):
    start, marker = time.monotonic(), uuid.uuid4().hex
    with Play(*shop(turn_timeout=3.0, max_queries=4)) as play:
        for block in (f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 99; : {marker}'])",
                      *ATTACKS[name], "1 + 1", "finish()"):
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
    assert time.monotonic() - start < 90 and forgeries.gone(marker)


@pytest.mark.slow
def test_the_workers_pipes_are_out_of_reach(play):
    assert play(forgeries.PIPES) == "[]\n[]"
    assert play("import os; os._exit(0)") and play(forgeries.PIPES) == "[]\n[]"  # of the next interpreter too
    assert play("open('/proc/self/environ').read() != ''") == "True"  # its own are not


SAY = "import json, os, sys, time\ndef say(**message): print(json.dumps(message), flush=True)\n"
DONE = "say(op='done', output='', note='', finished=True, answer='')\n"
# Workers that say what they should not, as one would that was taken over.
WORKERS = {
    "questions without end": "while True: say(op='query', prompts=['x'] * 3); sys.stdin.readline()",
    "a drip": "while True: sys.stdout.write(' '); sys.stdout.flush(); time.sleep(0.2)",
    "a line without end": "while True: sys.stdout.write('x' * 2**16)",
    "deep lists": "sys.stdout.write('[' * 10**5 + '\\n'); sys.stdout.flush()",
    "no text": "say(op='done', output=[[1]], note={}, finished=1, answer=7)",
    "a million files": DONE + "say(op='tree', files=[[str(n), 0] for n in range(10**6)])",
    "30000 files": DONE + "say(op='tree', files=[[str(n), 0] for n in range(30000)])",
    "a large tree": DONE + "say(op='tree', files=[['a', 2**40]])\nwhile True: sys.stdout.write('x' * 2**16)",
    "a tree less than nothing": DONE + "say(op='tree', files=[['a', 9], ['b', -9]])\nprint('x' * 99)",
    "a tree of no size": DONE + "print('{\"op\": \"tree\", \"files\": [[\"a\", Infinity]]}')",
    "a tree elsewhere": DONE + "say(op='tree', files=[['../../x', 1]])\nprint('x')",
    "a tree that does not come": DONE + "say(op='tree', files=[['a', 100]])",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKERS)
def test_the_trainer_trusts_no_worker(shop, monkeypatch, request, name):
    """Whatever it says, a step ends in time, its memory is bounded, and what it gives is nothing."""
    monkeypatch.setattr(repl, "WORKER", f"{SAY}sys.stdin.readline()\n{WORKERS[name]}\ntime.sleep(99)")
    request.addfinalizer(tracemalloc.stop)

    def check(limit):
        monkeypatch.setattr(repl, "GRACE", limit)
        monkeypatch.setattr(repl, "TREE_TIME", 2 * limit)
        env, task = shop(turn_timeout=limit, max_queries=4)
        start = time.monotonic()
        tracemalloc.start()
        with Play(env, task) as play:
            step = play.step("1")
            while step.children:
                step = play.episode.resume([""] * len(step.children))
        peak = tracemalloc.get_traced_memory()[1]
        assert step.truncated or step.terminated
        assert step.reward == step.info["correct"] == 0 and step.info.get("modified", 0) == 0
        assert time.monotonic() - start < 10 * limit and peak < 100 * 2**20

    in_time(check, (1.0, 4.0))


@pytest.mark.slow
def test_what_the_code_leaves_is_judged_once_whatever_it_is(tmp_path):
    """A step that raised would be played again, and not be counted. Tests may lie within a package."""
    files = {path.replace("tests/", "shop/tests/"): text for path, text in SHOP.items()}
    files |= {"conftest.py": "# of the repository", "pyproject.toml": ""}
    expected = {name.replace("tests/", "shop/tests/"): "PASSED" for name in ROW["expected_output_json"]}
    row = ROW | dict(tests=["shop/tests"], expected_output_json=expected)
    env, task = alone(cache_dir=write_cache(tmp_path, {"shop-1": row}, files))

    folder = "import os\nos.remove('{0}'); os.mkdir('{0}'); open('{0}/x', 'w')".format("pyproject.toml")
    assert outcome(env, task, folder, "finish()").info["correct"] == 0
    fixes = f"os.remove('conftest.py'); {FIX_TOTAL}; {FIX_CHEAPEST}; finish()"
    assert outcome(env, task, folder, fixes).reward == 1
    assert outcome(env, task, "open('conftest.py', 'w').write('x = 1'); finish()").info["modified"] == 0
    step = outcome(env, task, "import shutil; shutil.rmtree('shop'); open('shop', 'w').write('x'); finish()")
    assert step.reward == 0 and step.info["modified"] == 1

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
@pytest.mark.parametrize("starting", [True, False])
def test_close_from_another_thread_ends_a_block_or_the_start_of_its_sandbox(shop, monkeypatch, starting):
    (env, task), made, go, marker = shop(), [], threading.Event(), uuid.uuid4().hex

    class Late(sandbox.Sandbox):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)
            assert not starting or go.wait(20)

    monkeypatch.setattr(sandbox, "Sandbox", Late)
    with concurrent.futures.ThreadPoolExecutor() as pool, Play(env, task) as play:
        step = pool.submit(play.step, f"bash('sleep 99; : {marker}')")
        while not (made if starting else forgeries.processes(marker)):
            time.sleep(0.01)
        play.episode.close()
        go.set()
        with pytest.raises(sandbox.SandboxError):
            step.result(20)
    assert made[0].process.poll() is not None and forgeries.gone(marker)

    with Play(env, task) as play:  # while sub-agents work
        assert play.step("llm_query('a')").children
        play.episode.close()
        with pytest.raises(sandbox.SandboxError):
            play.episode.resume(["b"])


@pytest.mark.slow
def test_sub_agents_answer_and_work_on_a_copy_and_those_below_them_answer_without_code(shop):
    with Play(*shop()) as play:
        play("open('note', 'w').write('from above')")
        step = play.step("print(llm_query_batched(['What is 6 * 7?', 'two', 'three', 'four']))")
        assert step.messages == [] and not (step.terminated or step.truncated)
        asked, children = zip(*step.children, strict=True)
        assert asked[0].source == "repl/sub" and asked[1].id == "repl-shop-1/2.1"
        assert asked[0].messages[1] == {"role": "user", "content": "What is 6 * 7?"}
        assert "copy of the\nrepository" in asked[0].messages[0]["content"]

        block = "print(read('note')); open('note', 'w').write('from below') and None"
        texts = [play.text(child.step(fenced(block))) for child in children]
        assert texts == ["from above"] * 4
        assert play.text(children[0].step(fenced("read('note')"))) == "from below"

        done = children[0].step(fenced("finish('an answer')"))
        assert done.terminated and done.messages == [] and done.reward == done.info["correct"] == 0
        assert children[1].step("<think>hm</think>42").terminated
        ((asked, leaf),) = children[2].step(fenced("x = llm_query('b')\nfinish(x + '!')")).children
        assert asked.id == "repl-shop-1/2.2/2.0" and asked.source == "repl/sub/sub"
        assert "```" not in asked.messages[0]["content"]
        assert leaf.step(fenced("llm_query('c')")).terminated and leaf.box is None
        assert children[2].resume(["what the leaf said counts"]).terminated
        answers = ["an answer", "42", fenced("llm_query('c')") + "!", ""]  # the fourth has said nothing
        assert play.text(play.episode.resume(["```python ...", "<think>42", "?", ""])) == str(answers)
        for child in (*children, leaf):
            child.close()
        assert play("read('note')") == "from above"
        assert play.step("finish()").info["sub_queries"] == 4


@pytest.mark.slow
def test_limits_on_questions(shop):
    with Play(*shop(max_queries=2)) as play:
        assert "ValueError: 3 questions, expected 1 to 2" in play("llm_query_batched(['a', 'b', 'c'])")
        assert "ValueError" in play("llm_query_batched([])")
        (asked,) = play.step("for n in range(3): print(llm_query(n))").children
        assert asked[0].messages[1]["content"] == "0" and play.episode.resume(["fine"]).children
        text = play.text(play.episode.resume(["fine"]))
        assert text.startswith("fine\nfine\nTraceback") and "no more than 2 questions" in text
        assert play.step("llm_query('again')").children
    with Play(*shop(max_sub_agent_depth=0)) as play:
        assert "RuntimeError: there are no sub-agents here" in play("llm_query('a')")
        step = play.step("import __main__; __main__.OPTIONS['queries'] = 5; llm_query('a')")
        assert step.truncated and step.reward == 0


@pytest.mark.slow
def test_refused_questions_take_the_blocks_time_and_answers_none(shop):
    def check(limit):
        with Play(*shop(max_queries=1, turn_timeout=limit)) as play:
            start = time.monotonic()
            step = play.step("while True:\n    try: llm_query('a')\n    except RuntimeError: pass")
            assert len(step.children) == 1
            text = play.text(play.episode.resume([""]))
            assert f"stopped after {limit:g} s" in text and time.monotonic() - start < 2.5 * limit

            assert play.step("x = llm_query('a')\nprint(len(x))").children
            time.sleep(1.1 * limit)
            text = play.text(play.episode.resume(["y" * 100_000]))
            assert text.startswith("200")  # cut to 20,000 and a line

    in_time(check, (2.0, 8.0))


@pytest.mark.slow
def test_an_episode_and_its_sub_agents_share_a_budget(shop):
    with Play(*shop(max_sub_agents=3, max_queries=2)) as play:
        ((_, child),) = play.step("llm_query('a')").children
        assert len(child.step(fenced("llm_query_batched(['b', 'c'])")).children) == 2
        child.resume(["", ""])
        assert "no more than 3 sub-agents in an episode" in play.text(child.step(fenced("llm_query('d')")))
        child.close()
        play.episode.resume([""])
        assert "no more than 3 sub-agents in an episode" in play("llm_query('e')")


# ---- Calls of functions: tools=true


def call(name, **arguments):
    return dict(name=name, arguments=arguments)


run_python = functools.partial(call, "run_python")
FINISH = call("finish")


def answers(step):
    """What calls are answered, each with its function's name."""
    assert not (step.terminated or step.truncated or step.children) and step.reward == 0, step
    assert all(message.keys() == {"role", "name", "content"} for message in step.messages)
    assert {message["role"] for message in step.messages} == {"tool"}
    return [(message["name"], message["content"]) for message in step.messages]


def printed(step):
    names, texts = zip(*answers(step), strict=True)
    assert {*names} == {"run_python"}
    return list(texts)


@pytest.mark.parametrize("prompt", ["default", "minimal", "cot"])
def test_tools_are_told_by_schemas_alone(prompt):
    env, task = alone("ledger-cents", prompt=prompt, max_turns=7, tools=True)
    _, in_blocks = alone("ledger-cents", prompt=prompt, max_turns=7)
    system, report = task.messages
    assert "block" not in system["content"] and "```" not in system["content"]
    assert "7 replies" in system["content"] and "\n\n\n" not in system["content"]
    assert in_blocks.tools is None and env.solution(task) is None
    assert (task.id, task.data, report) == (in_blocks.id, in_blocks.data, in_blocks.messages[1])
    run, finish = (tool["function"] for tool in json.loads(json.dumps(dataclasses.asdict(task)))["tools"])
    assert (run["name"], finish["name"]) == ("run_python", "finish")
    assert run["parameters"]["required"] == ["code"] == [*run["parameters"]["properties"]]
    assert finish["parameters"] == dict(type="object", properties={}, required=[])
    assert all(word in run["description"] for word in ("apply_patch(", "run_tests(", "llm_query("))
    _, task = alone("ledger-cents", max_sub_agent_depth=0, tools=True)
    assert "llm_query" not in json.dumps(task.tools)


@pytest.mark.parametrize("wrong, name, says", [
    (call("python", code="1"), "python", "no function python; expected run_python(code) or finish()"),
    (call("<|im_end|>"), "unknown", "there is no function unknown;"),
    *[(call(name), "unknown", "no function") for name in ("", "x" * 10**6, "\ud800", None, 7, [], {})],
    *[(wrong, "unknown", "no function") for wrong in ({}, None, "finish", ["finish"])],
    (run_python(), "run_python", "Not called: expected as arguments of run_python: code."),
    (run_python(code="1", path="x"), "run_python", "of run_python: code."),
    (run_python(text="1"), "run_python", "of run_python: code."),
    (dict(name="run_python"), "run_python", "of run_python: code."),
    *[(dict(name="run_python", arguments=wrong), "run_python", "of run_python: code.")
      for wrong in (None, "finish()", ["code"], {1: 2})],
    *[(run_python(code=code), "run_python", f"code: expected a text, got {kind}")
      for code, kind in ((1, "int"), (None, "NoneType"), (["1"], "list"), ({"code": "1"}, "dict"))],
    (run_python(code="x" * 20_001), "run_python", "code: 20001 characters, expected at most 20000"),
    (call("finish", answer="done"), "finish", "expected as arguments of finish: none."),
    (dict(name="finish", arguments=[]), "finish", "of finish: none."),
])
def test_calls_that_cannot_be_done_are_told(shop, wrong, name, says):
    with Play(*shop(tools=True)) as play:
        ((answered, text),) = answers(play.episode.step("<tool_call>", [wrong]))
        assert answered == name and says in text and len(text) < 200 and text.startswith("Not called: ")
        text.encode()
        assert len(answers(play.episode.step("", [wrong, wrong]))) == 2
        step = play.episode.step("", [wrong, FINISH, wrong])
    assert step.terminated and step.messages == [] and step.reward == 0
    assert step.info == dict(correct=0, partial=0, modified=0, suspicious=0, guessable=mock.ANY,
                             repl_turns=3, no_block=3, sub_queries=0)


def test_replies_without_a_call_and_with_too_many(shop):
    env, task = shop(tools=True, max_turns=5)
    with Play(env, task) as play:
        nudges = [play.text(play.episode.step(reply, [])) for reply in ("Hello", fenced("finish()"))]
        nudges.append(play.text(play.episode.step("finish()")))
        assert nudges == [*repl.CALL_NUDGES[:1] * 2, repl.CALL_NUDGES[1]] and "```" not in "".join(nudges)
        *told, (name, last) = answers(play.episode.step("", [call("finish", x=1)] * 100_000))
        assert len(told) == 16 and name == "finish" and "a reply may have 16 calls, got 100000" in last
        step = play.episode.step("", [])
    assert step.truncated and not step.terminated and step.info["no_block"] == step.info["repl_turns"] == 5

    nothing = dict(role="assistant", content=None)
    said = ["Hello", nothing, repl.call_message("end"), repl.call_message("finish")]
    messages = envs.play(env.start(task, 1), task, iter(said).__next__)
    assert [message["role"] for message in messages[2:]] == [
        "assistant", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert messages[-1]["tool_calls"] == [
        dict(type="function", function=dict(name="finish", arguments={}))]


@pytest.mark.slow
def test_calls_run_in_order_in_one_interpreter_until_finish(shop):
    with Play(*shop(tools=True)) as play:
        calls = [run_python(code="x = 41"), run_python(code="1 / 0"), call("open"),
                 run_python(code="'\ud800'"), run_python(code="x + 1")]
        step = play.episode.step("I look.", calls)
        names, texts = zip(*answers(step), strict=True)
        assert names == ("run_python", "run_python", "open", "run_python", "run_python")
        assert "ZeroDivisionError" in texts[1] and "surrogates not allowed" in texts[3]
        assert texts[0] == "(no output)" and texts[4] == "42"
        assert printed(play.episode.step("", [run_python(code="x")])) == ["41"]
        step = play.episode.step("", [run_python(code=f"{FIX_TOTAL}; {FIX_CHEAPEST}"), FINISH,
                                      run_python(code=UNDO), call("open")])
    assert step.terminated and step.messages == [] and step.reward == 1
    assert step.info == dict(correct=1, partial=1, modified=1, suspicious=0, guessable=mock.ANY,
                             repl_turns=3, no_block=2, sub_queries=0)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [
    [], [FIX_TOTAL], [FIX_TOTAL, FIX_CHEAPEST], [FIX_TOTAL, UNDO], [CHEATS["tests and configuration"]],
    [FIX_TOTAL, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"]])
def test_calls_score_as_blocks_do(shop, codes):
    def last_step(replies, **options):
        with Play(*shop(reward_mode="partial", **options)) as play:
            for reply in replies:
                step = play.episode.step(*reply)
                if step.terminated or step.truncated:
                    return step

    in_blocks = last_step([(fenced(code),) for code in [*codes, "finish()"]])
    calls = [run_python(code=code) for code in codes]
    for last in (FINISH, run_python(code="finish()")):
        assert last_step([("", [made]) for made in [*calls, last]], tools=True) == in_blocks
        step = last_step([("", [*calls, last])], tools=True)  # in one reply
        assert step == dataclasses.replace(in_blocks, info=in_blocks.info | dict(repl_turns=1))


@pytest.mark.slow
def test_the_calls_of_a_reply_share_the_time_of_a_block(shop):
    def check(limit):
        with Play(*shop(tools=True, turn_timeout=limit)) as play:
            start = time.monotonic()
            step = play.episode.step("", [run_python(code=f"import time; time.sleep({limit / 2})"),
                                          *[run_python(code="while True: pass")] * 9])
            first, second, *others = printed(step)
            assert first == "(no output)" and second.startswith("(stopped after ")
            assert float(second.split()[2]) <= limit / 2 and time.monotonic() - start < 2 * limit
            assert others == [f"Not called: the calls of a reply have {limit:g} s in all."] * 8
            assert printed(play.episode.step("", [run_python(code="1 + 1")])) == ["2"]

    in_time(check, (2.0, 8.0))


@pytest.mark.slow
def test_sub_agents_are_asked_between_calls_and_call_themselves(shop):
    with Play(*shop(tools=True, max_queries=2)) as play:
        code = "a, b = llm_query_batched(['one', 'two'])"
        step = play.episode.step("", [run_python(code=code), run_python(code=code), run_python(code="a + b")])
        (task, child), (_, other) = step.children
        assert [tool["function"]["name"] for tool in task.tools] == ["run_python", "finish"]
        assert "```" not in task.messages[0]["content"] and task.messages[1]["content"] == "one"
        assert json.loads(json.dumps(dataclasses.asdict(task))) == dataclasses.asdict(task)
        assert [text for _, text in answers(child.step("", [FINISH, call("finish", answer=1)]))] == [
            "Not called: expected as arguments of finish: answer.",
            "Not called: answer: expected a text, got int."]
        ((leaf_task, leaf),) = child.step("", [run_python(code="c = llm_query('three')")]).children
        assert leaf_task.tools is None and leaf.step("<tool_call>").terminated
        assert printed(child.resume(["?"])) == ["(no output)"]
        assert printed(child.step("", [run_python(code="c")])) == ["<tool_call>"]
        assert child.step("", [call("finish", answer="\ud800 1"), FINISH]).terminated
        assert other.step("<think>hm</think> 2", []).terminated
        for episode in (child, other, leaf):
            episode.close()
        step = play.episode.resume(["", ""])  # the second of the three calls asks again
        assert len(step.children) == 2
        for _, episode in step.children:
            episode.close()
        assert printed(play.episode.resume(["3", "4"])) == ["(no output)", "(no output)", "34"]
        assert printed(play.episode.step("", [run_python(code="b")])) == ["4"]
        assert play.episode.step("", [FINISH]).info["sub_queries"] == 4


def replayed(env, task, messages):
    """The conversation that the replies of another make, and its last step."""
    replies = [message for message in messages if message["role"] == "assistant"]
    talk = [*task.messages]
    with contextlib.closing(env.start(task, 1)) as episode:
        for reply in replies:
            step = episode.step("", [made["function"] for made in reply["tool_calls"]])
            talk += [reply, *step.messages]
    return talk, step


@pytest.mark.slow
@pytest.mark.parametrize("options, replies", [
    ({}, 3), (dict(max_turns=2), 2), (dict(max_turns=1), 1), (dict(max_output_chars=50), 2)])
def test_a_demonstration_of_calls_is_what_happens(shop, options, replies):
    env, task = shop(tools=True, **options)
    messages = env.demonstration(task)
    assert json.loads(json.dumps(messages)) == messages and len(messages) == 2 + 2 * replies - 1
    talk, step = replayed(env, task, messages)
    assert talk == messages and step.reward == step.info["correct"] == 1 and step.info["no_block"] == 0
    assert step.terminated == (options.get("max_turns") != 1)


@pytest.mark.slow
def test_demonstrations_of_the_bundled_scenarios_are_what_happens():
    env = make(tools=True)
    for split in env.splits:
        for index in range(env.num_tasks(split)):
            task = env.task(split, index)
            messages = env.demonstration(task)
            assert len(messages) in (5, 7)  # the file may be too long to be shown
            assert replayed(env, task, messages[:-1])[0] == messages[:-1]


@pytest.mark.slow
def test_what_sft_learns_of_a_demonstration_of_calls_solves_a_rollouts_episode(shop):
    import sft
    from tests import test_chat, test_rollout

    env, task = shop(tools=True)
    tokenizer = test_chat.tokenizer_of(test_chat.CLOSED)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    args = sft.Args(env="repl", max_length=20_000)
    learned = []
    for ids, mask in sft.encode_demonstration(
            env.demonstration(task), len(task.messages), tokenizer, args, [eos], task.tools):
        assert "run_python" in tokenizer.decode(ids[:mask.index(1)])  # the template shows the tools
        learned += [token for token, is_learned in zip(ids, mask, strict=True) if is_learned]
    replies = [tokenizer(f"{text}<|im_end|>", add_special_tokens=False).input_ids
               for text in tokenizer.decode(learned).split("<|im_end|>")[:-1]]
    r, _ = test_rollout.play(tokenizer, env, replies, max_response_tokens=1500, max_context_tokens=30_000)
    assert len(replies) == 3 and r.termination == "done" and r.reward == 1 and r.info["no_block"] == 0
    assert [message["role"] for message in r.messages[2:]] == ["assistant", "tool"] * 2 + ["assistant"]


@pytest.mark.parametrize("patch, messages", [
    ("", None), ("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n", 5)])  # there is nothing to be read
def test_demonstrations_of_no_known_fix_and_of_new_files(tmp_path, patch, messages):
    env, task = alone(cache_dir=write_cache(tmp_path, {"shop-1": ROW | dict(patch=patch)}), tools=True)
    made = env.demonstration(task)
    assert messages == (made if made is None else len(made))


# ---- Options and files


@pytest.mark.parametrize("options, says", [
    (dict(max_turns=0), "max_turns: expected 1 or more, got 0"),
    (dict(test_timeout="nan"), "test_timeout: expected seconds above 0"),
    (dict(max_sub_agent_depth=9), "max_sub_agent_depth: expected 0 to 8"),
    (dict(scenarios="tiny"), "short and tiny go together"),
    (dict(tools=True, **TINY), "option tools: expected false with prompt=short, got True"),
    (dict(dataset="x.jsonl"), "dataset: needs cache_dir"),
    (dict(dataset="/nowhere.jsonl", cache_dir="/nowhere"), "option dataset=/nowhere.jsonl: cannot be read"),
    (dict(executor_url="http://a:1"), "executor_url: needs cache_dir, with a docker_image"),
    (dict(instance_ids="ledger-cents,nope"), "instance_ids: unknown 'nope'; known:"),
    (dict(cache_dir="/nowhere/at/all"), "/nowhere/at/all/index.json: expected a JSON object"),
    (dict(first=-1), "first: expected 0 or more"),
    (dict(first=2, **TINY), "first: expected 0 with scenarios=tiny, whose size is train_tasks"),
    (dict(system="/nowhere"), "system=/nowhere: expected a file of text"),
    (dict(system="/nowhere", **TINY), "system: expected no file with prompt=short"),
])
def test_bad_options_are_named(options, says):
    with pytest.raises(envs.BadInput) as info:
        make(**options)
    assert says in str(info.value) and "\n" not in str(info.value)


def test_the_first_instances_and_a_system_prompt_of_ones_own(tmp_path):
    whole, few = make(), make(first="5")
    names = {split: [few.task(split, k).id for k in range(few.num_tasks(split))] for split in few.splits}
    assert sorted(names["train"] + names["test"]) == sorted(f"repl-{name}" for name in [*whole._rows][:5])

    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Mend it in {turns} replies, {as} you like.\n{tools}")
    own = make(system=str(prompt), max_turns=3)
    system, said = own.task("train", 0).messages
    assert system["content"].startswith("Mend it in 3 replies, {as} you like.\nEvery reply holds one block")
    assert said == whole.task("train", 0).messages[1]
    assert own.identity == prompt.read_text() and not whole.identity  # another text is another run
    assert envs.make("repl,countdown", **{"repl.system": str(prompt)}).identity == own.identity


def test_of_several_instances_one_is_held_out_and_of_one_none():
    env = make(instance_ids="ledger-cents, podium-ties")
    assert [env.num_tasks(split) for split in env.splits] == [0, 2]
    with pytest.raises(IndexError, match="repl: test task 2 of 2"):
        env.task("test", 2)
    with pytest.warns(match="repl: instance .* is held out: of these 2, no other is in the test split"):
        few = make(instance_ids="slugs-unicode,textwrap-exact")
    assert few.num_tasks("train") == few.num_tasks("test") == 1
    with pytest.raises(envs.BadInput, match="one instance.*expected at least two"):
        make(instance_ids="slugs-unicode").num_tasks("test")


@pytest.mark.parametrize("index, says", [
    ("[]", "got list"), ("{}", "no instance"), ("\ud800", "expected a JSON object of instance_id -> row"),
    ({"shop-1": 1}, "shop-1: expected a JSON object, got int"), ({"../shop-1": ROW}, "its repository"),
    *[({"shop-1": ROW | change}, says) for change, says in [
        (dict(problem_statement=""), "shop-1: problem_statement: expected a text, got ''"),
        (dict(expected_output_json={"a": "passed"}), "expected_output_json: expected a JSON object of test"),
        (dict(expected_output_json="[" * 10**5), "expected_output_json: expected a JSON object of test"),
        (dict(tests="tests"), "tests: expected list, got 'tests'")]],
])
def test_a_bad_index_and_bad_rows_are_named(tmp_path, index, says):
    folder = write_cache(tmp_path, {"shop-1": ROW})
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "index.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(envs.BadInput) as info:
        make(cache_dir=folder)
    assert str(tmp_path / "index.json") in str(info.value) and says in str(info.value)


@pytest.mark.slow
def test_rows_as_r2e_gym_has_them(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    name, folder = "shop__" + "a" * 12, tmp_path / "repositories"
    tests = SHOP["tests/test_price.py"].replace(
        "def test_cheapest():\n", "class TestCheapest:\n    def test_two(self):\n    ")
    files = {path: text for path, text in SHOP.items() if not path.startswith("tests")}
    write_cache(folder, {name: {}}, files | {"r2e_tests/test_1.py": tests})
    expected = dict.fromkeys(
        ("test_total", "test_total_of_none", "TestCheapest.test_two", "test_cheapest_of_one"), "PASSED")
    row = dict(repo_name="shop", docker_image="namanjain12/shop_final:abc", commit_hash="a" * 40,
               problem_statement="[ISSUE]\nThe total is wrong.\n[/ISSUE]", modified_files=["shop/price.py"],
               expected_output_json=json.dumps(expected), prompt="unused")
    other = row | dict(commit_hash="b" * 40)

    def env_of(*rows, kind="json"):
        data = str(tmp_path / f"rows.{kind}")
        getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(data)
        return alone(dataset=data, cache_dir=str(folder))

    env, task = env_of(row, other)
    assert env.solution(task) is None and env.scenario(task).docker_image == row["docker_image"]
    with Play(env, task) as play:
        text = play(f"{FIX_TOTAL}; print(run_tests())")
        assert "1 failed, 3 passed" in text and "(exit code 1)" in text
        assert "1 passed" in play("run_tests('r2e_tests/test_1.py::test_total')")
        assert play.step(f"{FIX_CHEAPEST}; finish()").reward == 1
    assert outcome(env, task, FIX_TOTAL, "finish()").info["partial"] == 0.5

    for rows, says in [
            ([other, row | dict(commit_hash="")], "rows.json: row 2: expected instance_id, or repo_name"),
            ([row | dict(commit_hash="", instance_id=["a"])], "row 1: expected instance_id, or repo_name"),
            ([row | dict(expected_output_json="x")], f"rows.json: {name}: expected_output_json"),
            ([other], "no instance")]:
        with pytest.raises(envs.BadInput, match=says):
            env_of(*rows)

    (folder / "index.json").unlink()  # which of the rows' repositories are there is seen all the same
    again, same = env_of(row, other, kind="parquet")
    assert again.scenario(same) == env.scenario(task)


@pytest.mark.slow
def test_an_executor_judges_in_the_instances_image(tmp_path):
    write_cache(tmp_path / "images", {"shop_final_abc": {}})
    expected = {f"test_{name}": "FAILED" if name == "cheapest" else "PASSED" for name in CHECKS}
    row = dict(problem_statement="?", expected_output_json=expected, docker_image="someone/shop_final_abc")
    folder = write_cache(tmp_path / "cache", {"shop-1": row})
    with executor_server.ExecutorServer(tmp_path / "images") as server:
        env, task = alone(cache_dir=folder, executor_url=server.url, trust_executor=True)
        assert outcome(env, task, FIX_TOTAL, "open('tests/test_price.py', 'w').close(); finish()").reward == 1
        step = outcome(env, task, FIX_TOTAL, FIX_CHEAPEST, "finish()")
        assert step.reward == 0 and step.info["partial"] == 0  # as if nothing had been changed
        assert outcome(env, task, "import os; os.remove('shop/price.py'); finish()").info["partial"] == 0
        expected["test_cheapest"] = "PASSED"
        write_cache(tmp_path / "cache", {"shop-1": row | dict(expected_output_json=expected)})
        env, task = alone(cache_dir=folder, executor_url=server.url, trust_executor=True)
        assert outcome(env, task, FIX_TOTAL, FIX_CHEAPEST, "finish()").reward == 1
        for path in ("pytest.py", "unittest.py", "_pytest/__init__.py", "iniconfig.py", "sitecustomize.py"):
            code = f"import os; os.makedirs('_pytest'); open({path!r}, 'w').write({forgeries.PYTEST!r})"
            info = outcome(env, task, code, "finish()").info
            assert info["correct"] == info["partial"] == 0, path
        with pytest.raises(envs.BadInput, match="index.json: shop-2: docker_image: expected the image"):
            make(cache_dir=write_cache(tmp_path, {"shop-2": ROW}), executor_url=server.url)
    log = "PASSED t.py::a[x - y]\nFAILED t.py::B::c[1] - assert [1] == [2 - 3]\nERROR t.py - no [x] - y\n"
    assert [*repl.outcomes_in(log)] == ["t.py::a[x - y]", "a[x - y]", "t.py::B::c[1]", "B.c[1]", "t.py", ""]


@pytest.mark.parametrize("text, expected", [
    ("a = x  <  y\n", {("comparison", "a = x  <=  y\n"), ("comparison", "a = x  >  y\n")}),
    ("a = (x) not  in (y)\n", {("comparison", "a = (x) in (y)\n")}),
    ("\u00e9 = '\u00e9', \u00e9 + b\n", {("operator", "\u00e9 = '\u00e9', \u00e9 - b\n")}),
    ("a %= b\n", {("operator", "a //= b\n")}),
    ("a = not (x)\n", {("not", "a = (x)\n")}),
    ("a = -(-x)\n", {("sign", "a = (-x)\n")}),  # of two that are one program, one
    ("a = (b and\r\n     c)\r\n", {("and/or", "a = (b or\r\n     c)\r\n")}),
    ("a = 1\n", {("constant", "a = 2\n"), ("constant", "a = 0\n")}),
    ("f(x, y)\n", {("arguments", "f(y, x)\n")}),
    ("a[b:]\n", {("slice", "a[b + 1:]\n"), ("slice", "a[b - 1:]\n")}),
    ("def f(a):\n    b = [c for c in a]\n    return b\n", {
        ("return", "def f(a):\n    b = [c for c in a]\n    return a\n")}),
    ("x.startswith(y)\n", {("function", "x.endswith(y)\n")}),
    ("a = 'x' + b\na = 0x10, 1.5, 'text', None\nf(x, x)\nf(*x, y)\nf((x), y)\n"
     "'''1 < 2'''\na: Literal[1]\nf'{1 < 2}'\n@f(1)\ndef g(b: 3) -> 4: pass\n", set()),
])
def test_mutants_change_one_expression_in_place(text, expected):
    source = make_scenarios.Source("m", {"m.py": text.encode(), "tests/test_m.py": b""}, ("tests",), {})
    assert {(mutant.kind, mutant.text.decode()) for mutant in make_scenarios.mutants_of(source)} == expected


@pytest.mark.slow
def test_mutants_of_the_bundled_repositories():
    sources = make_scenarios.bundled_sources()
    assert len(sources) == len(BUNDLED)
    found = [mutant for source in sources for mutant in make_scenarios.mutants_of(source)]
    assert len(found) == len({mutant.id for mutant in found}) > 500


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_made_scenarios_are_solved_by_their_solution(held_out, tmp_path, capsys):
    files = {"m.py": "def pay(cents):\n    return cents if cents > 0 else 0\n\n\n"
                     "def add(a, b):\n    return a + b\n",
             "tests/test_m.py": "from m import add, pay\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
                                "def test_pay():\n    assert [pay(1), pay(0), pay(-1)] == [1, 0, 0]\n"}
    source = f"{write_cache(tmp_path, {'shop': {}}, files)}/shop"
    if held_out:  # which sees another mistake in pay alone
        (tmp_path / "held_out").mkdir()
        (tmp_path / "held_out" / "shop.py").write_text(
            "from m import pay\n\n\ndef test_hidden():\n    assert [pay(9), pay(-9)] == [9, 0]\n")
    for out, jobs in (("one", "1"), ("two", "2")):
        argv = ["--source", source, "--out", str(tmp_path / out), "--count", "1", "--jobs", jobs]
        assert make_scenarios.main(argv) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["scenarios"] == said["asked"] == said["train"] + said["test"] == 1
        assert said["tried"] >= 1 and said["per_minute"] > 0
    assert trees.read(tmp_path / "one") == trees.read(tmp_path / "two")  # whatever --jobs

    for name in json.loads((tmp_path / "one" / "index.json").read_text()):
        env, task = alone(name, cache_dir=str(tmp_path / "one"))
        report = task.messages[1]["content"]
        assert name.startswith("shop-") and "m.py" not in report and "hidden" not in report
        assert [*env.scenario(task).judged] == (
            ["tests/test_held_out.py::test_hidden"] if held_out else [*env.scenario(task).expected])
        assert not held_out or "cents" in env.scenario(task).patch.partition("\n-")[2].partition("\n")[0]
        assert "    assert " in report and "\n\nExpected: " in report and "\nGot: " in report
        assert outcome(env, task, env.solution(task)).reward == 1
        step = outcome(env, task, "open('x', 'w').close(); finish()")
        assert step.info["correct"] == step.info["partial"] == 0 < step.info["modified"]


@pytest.mark.slow
def test_what_the_generator_cannot_use_is_named(tmp_path, capsys):
    for name, number in (("good", 1), ("bad", 2)):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "test_a.py").write_text(f"def test_a():\n    assert 1 == {number}")
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    new = ["--out", str(tmp_path / "o"), "--count"]
    for argv, says in [
            (["--count", "1"], "--out"), ([*new, "0"], "--count"),
            (["--out", good, "--count", "1"], "expected a new or an empty folder"),
            ([*new, "1", "--source", str(tmp_path / "no")], "expected a folder"),
            ([*new, "1", "--source", f"{good}/tests"], "/tests: no tests: expected a folder tests"),
            ([*new, "1", "--source", bad], "test_a is FAILED"),
            ([*new, "1", "--source", good], "none of 0 mutants"),
            ([*new, "1", "--source", good, good], "named good")]:
        assert make_scenarios.main(argv) == 1
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


# Of bundled scenarios whose fix has two places: one of them.
HALF = {
    "meetings-adjacent": ("<= other.end and other.start <=", "< other.end and other.start <"),
    "phrasebook-locale": ('("text", name)', '("text", name, locale)'),
    "inventory-generator": ('or none of them."""', 'or none of them."""\n        lines = list(lines)'),
    "scheduler-attempts": ("succeeded(self, now):", "succeeded(self, now):\n        self.failures = 0"),
    "discount-coupon": ('if customer.member or customer.has("SAVE10") and',
                        'if (customer.member or customer.has("SAVE10")) and'),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_scenarios_are_solved_by_their_solution_alone(name):
    env, task = alone(name)
    step = outcome(env, task, env.solution(task))
    assert step.terminated and step.reward == step.info["correct"] == step.info["partial"] == 1

    path = next(line[6:] for line in env.scenario(task).patch.splitlines() if line.startswith("--- a/"))
    step = outcome(env, task, f"open({path!r}, 'a').write('\\n# a comment\\n'); finish()")
    assert step.reward == step.info["correct"] == step.info["partial"] == 0 < step.info["modified"]
    if name in HALF:
        half = outcome(env, task, f"apply_patch{(path, *HALF[name])!r}; finish()")
        assert half.reward == 0 < half.info["partial"] < 1


@pytest.mark.slow
def test_what_leaks_from_test_to_test_earns_nothing():
    """5 or 6 tests end as expected where nothing was mended, by what ran before them."""
    env, task = alone("settings-leak")
    for number in range(3):
        comment = f"open('settings/store.py', 'a').write('\\n# comment {number}\\n'); finish()"
        assert outcome(env, task, comment).info["partial"] == 0
