"""Which tests pass on a tree of files, told apart from what the code in the tree says about it.

    results = run_tests({"shop.py": b"..."}, {"tests/test_shop.py": b"..."})
    results == {"tests/test_shop.py::test_total": "PASSED"}

Each module of tests runs in a sandbox of its own, so that nothing that happens in one reaches another. What
tests print counts for nothing: what became of each comes over a pipe that was opened, with a random token,
before any code of the tree ran, is passed on by a process that runs none of it, and made into outcomes here.
A module lies there in several copies. For each test, one of them, drawn at random, holds it as it is, and the
others expect something else and have to fail (doubles.py): where a test passes with a double, or a canary in
modules beside them does not turn out as it must (someone patched pytest or unittest, or ended the process
with os._exit(0)), no result counts. Tests and code under test do share a process, so code that was written
against this and knows the tests could forge a result; docs/sandbox.md says more.
"""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import json
import os
import random
import re
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path, PurePosixPath

from envs.code import doubles, sandbox, trees

# As `python -m pytest`, except that what lies in the folder can be imported only once pytest and its plugins
# have been. (`python -c` puts the folder on the path as well; versions before 3.11 know no -P.)
LAUNCHER = """import os, sys
path = [p for p in sys.path if p]
sys.path[:] = [p for p in path if os.path.realpath(p) != os.getcwd()]
import pytest, unittest
sys.path[:] = path
class Late:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(plugins=[Late()]))"""
WORKER = Path(__file__).with_name("testing_worker.py").read_text(encoding="utf-8")
# Names of files that change how or which tests run, wherever they lie.
DECIDING = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml",
            "tox.ini", "setup.cfg", "sitecustomize.py", "usercustomize.py", "entry_points.txt", "pyvenv.cfg"}
# Top-level names that the tests' process imports: a new one in the tree would run in place of the real one.
SHADOWS = {"pytest", "_pytest", "pluggy", "iniconfig", "unittest", "site", "sitecustomize", "usercustomize"}
MOST_CACHED = 4096  # results kept
GUESSES = 1000  # a guess of all tests of a row is to be right no oftener than once in so many,
MOST_COPIES = 4  # if that takes no more copies of each module

CANARIES = '''
import unittest
import pytest
def test_{0}():
    assert {a} + 1 == {b} + 1
def test_{1}():
    assert {a} == {a}
def test_{2}():
    with pytest.raises(KeyError):
        {{{a}: 0}}[{a}]
@pytest.mark.parametrize("value", [{b}])
def test_{3}(value):
    raise ValueError(value)
class Test{4}(unittest.TestCase):
    def test_{4}(self):
        self.assertEqual({a}, {b})
    def test_{5}(self):
        self.assertTrue({b} == {a})
    def test_{6}(self):
        with self.assertRaises(ZeroDivisionError):
            {a} / {b}
    def test_{7}(self):
        self.assertEqual({b}, {b})
'''
PLAIN_CANARIES = '''
def test_{0}():
    assert {a} + 1 == {b} + 1
def test_{1}():
    assert {a} == {a}
def test_{2}():
    raise ValueError({a})
def test_{3}():
    assert isinstance({a}, str)
'''


class Outcomes(dict):
    """{test: "PASSED" | "FAILED" | "ERROR"}; empty where results were forged, which `forged` then says."""

    forged = False


@functools.cache
def has_pytest() -> bool:
    """Whether the interpreter of the tests has it; asked before any code of theirs can answer."""
    return not subprocess.run([sys.executable, "-I", "-c", "import pytest"], capture_output=True).returncode


def run_tests(files: dict[str, bytes], test_files: dict[str, bytes], names: list[str] | None = None,
              plain: bool = False, timeout: float = 60.0, memory: int = 1024, draw: str = "") -> Outcomes:
    """{test: "PASSED" | "FAILED" | "ERROR"}; a test that gave no result is not in it, and has not passed.

    files: the tree, path -> content. test_files: the tests and their configuration, laid over it; a file of
    `files` that decides over tests (conftest.py, pytest.ini, ...) and is not in test_files is left out.
    names: of tests, as pytest writes them ("tests/test_x.py::TestShop::test_total[3]"); None: all there are.
    plain: no pytest, for tests that are module-level functions without arguments; about eight times as fast.
    timeout: of the modules, one after the other, for each copy [s]. Each has what is left of it and at least
    an equal share; a test, half of what is left of that.
    draw: trees of one draw are judged by the same copies in the same order, for tests whose outcome depends
    on what ran before them. What is drawn is known to this process alone. "": each tree has its own.

    A skipped test is FAILED, one that is marked xfail and does fail is PASSED. ERROR: its module cannot be
    imported, or its fixtures failed.

    Raises SandboxError where nothing could be run, whatever the tree. Results are cached; safe to call from
    several threads.
    """
    if not (plain or has_pytest()):
        raise sandbox.SandboxError(f"the tests did not start: {sys.executable} has no pytest")
    files = {path: content for path, content in files.items() if not decides(path)}
    tree = trees.laid_over(files, test_files)
    key = digest(sorted(tree.items()), sorted(test_files), names, [plain, timeout, memory, draw])
    with _lock:
        found = _cache.get(key)
        if mine := found is None:
            found = _cache[key] = Future()
            while len(_cache) > MOST_CACHED:
                _cache.popitem(last=False)
        else:
            _cache.move_to_end(key)
    if mine:
        try:
            rng = random.Random(SECRET + (draw or key))
            found.set_result(_run(tree, test_files, names, plain, timeout, memory, rng))
        except BaseException as error:
            with _lock:
                _cache.pop(key, None)
            found.set_exception(error)
    return copy.copy(found.result())


SECRET = secrets.token_hex(16)
_cache: collections.OrderedDict[str, Future] = collections.OrderedDict()
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: (_cache.clear(), globals().update(_lock=threading.Lock())))


def decides(path: str) -> bool:
    """Whether a file changes how tests run, by its name (of upper and lower case, which some disks mix)."""
    pure = PurePosixPath(path.lower())
    return pure.name in DECIDING or pure.suffix == ".pth" or "__pycache__" in pure.parts


def is_test(path: str) -> bool:
    """Whether a file holds tests, as pytest finds them."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def digest(*values) -> str:
    """Of JSON-like values with bytes in them."""
    text = json.dumps(values, default=lambda value: hashlib.sha256(value).hexdigest())
    return hashlib.sha256(text.encode()).hexdigest()


def shadows(path: str) -> bool:
    """Whether a file would be imported in place of what runs the tests."""
    return PurePosixPath(path).parts[0].partition(".")[0].lower() in SHADOWS


def _run(tree, test_files, names, plain, timeout, memory, rng: random.Random) -> Outcomes:
    asked = {name.partition("::")[0] for name in names} if names is not None else None
    sources = {path: _text(content) for path, content in sorted(test_files.items())
               if (is_test(path) if asked is None else path in asked)}
    if names is None:
        number = sum(source.count("def test") for source in sources.values())
    else:
        number = len({name.partition("[")[0] for name in names})
    copies = 2
    while copies < MOST_COPIES and copies ** number < GUESSES:
        copies += 1
    made = {path: doubles.versions(source, rng, copies) for path, source in sources.items()}

    results, deadline = Outcomes(), time.monotonic() + timeout * copies
    for path, version in made.items():
        # What is not as it runs would tell what runs. Others are as they are where this one may import them.
        others = {other: found.sources[0].encode() for other, found in made.items()
                  if other == path or PurePosixPath(other).stem not in sources[path]}
        own = None if names is None else [name for name in names if name.partition("::")[0] == path]
        left = max(deadline - time.monotonic(), timeout * copies / len(made))
        found = _once(tree | others, own, plain, left, memory, path, version, rng)
        results.update(found)
        results.forged |= found.forged
    if results.forged:
        results.clear()
    return results


def _once(tree, names, plain, timeout, memory, path: str, version: doubles.Versions,
          rng: random.Random) -> Outcomes:
    """Of one module, which lies there in several copies."""
    first, last = canaries(path, plain), canaries(path, plain)
    must = first[2] | last[2]
    places = [path]
    while len(places) < len(version.sources):
        place = str(PurePosixPath(path).with_name(f"{new_name(version.sources[0], rng)}.py"))
        places += [place] * (place not in tree and place not in places)
    beside = [*zip(places, version.sources, strict=True)]
    rng.shuffle(beside)
    sources = dict([first[:2], *beside, last[:2]])
    if not plain:
        tree = tree | {path: source.encode() for path, source in sources.items()}
        sources = dict.fromkeys(sources, "")
    wanted = None
    if names is not None:
        wanted = [place + name.removeprefix(path) for name in names for place in places]
        rng.shuffle(asked := [*wanted, *must])
    nonce = secrets.token_hex(16)
    job = dict(nonce=nonce, plain=plain, timeout=timeout, copies=len(places), modules=list(sources.items()),
               names=None if names is None else asked)
    start = [sys.executable, "-I", *(["-S"] if plain else []), "-c", WORKER]
    size = sum(len(content) + 4096 for content in tree.values()) // sandbox.MIB  # whole blocks
    limits = dict(timeout=timeout + 10, cpu=int(timeout) + 10, memory=memory, output=2**24,
                  disk=2 * size + 128)
    for again in (False, True):
        try:
            done = sandbox.run(start, tree, stdin=json.dumps(job).encode(), **limits)
            break
        except sandbox.SandboxError:
            if not sandbox.works():
                raise
            if again:  # the machine is fine: no file system holds this tree
                return Outcomes()
    begun, _, rest = done.output.partition("\n")
    if begun != nonce:
        raise sandbox.SandboxError(f"the tests did not start: {done.output[-300:].strip() or done.exit_code}")
    return told_apart(counted(_reports(rest, nonce), must, wanted), places, version)


def new_name(source: str, rng: random.Random) -> str:
    """A name of a module of tests, of words that are in the source."""
    words = {word for word in re.split("[^a-zA-Z]+", source) if word.islower() and 2 < len(word) < 10}
    words = sorted(words | {"more", "other", "again"})
    return "_".join(["test", *rng.choices(words, k=rng.randint(2, 3))])


def _reports(text, nonce) -> list[tuple[str, str]]:
    """[(test, outcome)] of what the reporting process said; none where it did not come to its end."""
    try:
        said, reports = json.loads(text)
    except ValueError:
        return []  # it was killed
    if said != nonce or ["", "end", ""] not in reports:
        return []  # an end before the end
    return outcomes(report for report in reports if report[0])


def outcomes(reports) -> list[tuple[str, str]]:
    """[(test, outcome)] of [(test, phase, result)]: pytest's phases, or `call` alone; `part` of subtests.

    A test that did not come to its end has none, and one of which a phase came twice has two.
    """
    tests = collections.defaultdict(list)
    for name, phase, result in reports:
        tests[name].append((phase, result))

    found = []
    for name, results in tests.items():
        phases, order = dict(results), [phase for phase, _ in results if phase != "part"]
        bad = next((phase for phase, result in results if result != "passed"), None)
        if bad is None:
            outcome = "PASSED" if "call" in phases else "FAILED"
        else:
            outcome = "FAILED" if bad in ("call", "part") or phases[bad] == "skipped" else "ERROR"
        if "teardown" in phases or "setup" not in phases:
            found += [(name, outcome)] * (2 if len(set(order)) < len(order) else 1)
    return found


def counted(reports, must: dict[str, str], names: list[str] | None) -> Outcomes:
    """What counts of [(test, outcome)]: nothing, unless all came once and the canaries as they must.

    Nor where there are results of tests in a module that cannot be imported.
    """
    results = dict(reports)
    found = Outcomes({name: outcome for name, outcome in results.items() if name not in must})
    broken = {name for name, outcome in results.items() if "::" not in name and outcome == "ERROR"}
    found.forged = (len(results) != len(reports)
                    or any(results.get(name, outcome) != outcome for name, outcome in must.items())
                    or any(name.partition("::")[0] in broken for name in results if "::" in name))
    if names is not None:
        modules = {name: results.get(name.partition("::")[0]) for name in names}
        kept = {name: results.get(name, modules[name]) for name in names if results.get(name, modules[name])}
        found.clear()
        found.update(kept)
    if found.forged or any(name not in results for name in must):
        found.clear()
    return found


def told_apart(found: Outcomes, places: list[str], version: doubles.Versions) -> Outcomes:
    """Outcomes of the tests themselves from those of all copies, of which the first lies in their place.

    A test that passes counts if none of its doubles does; one without doubles, if it passes in all copies.
    """
    said = {place: {} for place in places}
    for name, outcome in found.items():
        place, _, test = name.partition("::")
        if place in said:  # not what is said of a folder
            said[place][test] = outcome
    results = Outcomes()
    results.forged = found.forged
    for test in dict.fromkeys(test for tests in said.values() for test in tests):
        outcomes = [said[place].get(test) for place in places]
        real = version.real.get(test.partition("[")[0])
        if real is None:
            failed = [outcome for outcome in outcomes if outcome not in ("PASSED", None)]
            outcome = failed[0] if failed else None if None in outcomes else "PASSED"
        else:
            outcome = outcomes.pop(real)
            if outcome == "PASSED" and test.partition("[")[0] in version.must:
                results.forged |= "PASSED" in outcomes
                outcome = None if None in outcomes else outcome  # they did not come to their end
        if outcome is not None:
            results[f"{places[0]}::{test}" if test else places[0]] = outcome
    if results.forged:
        results.clear()
    return results


def canaries(beside: str, plain: bool) -> tuple[str, str, dict[str, str]]:
    """-> path of a module of tests in the folder of another one, its source, {test: what it must give}"""
    ids = [secrets.token_hex(4) for _ in range(9)]
    a, b = secrets.randbelow(10**6) + 1, secrets.randbelow(10**6) + 10**7
    path = str(PurePosixPath(beside).with_name(f"test_{ids[8]}.py"))
    source = (PLAIN_CANARIES if plain else CANARIES).format(*ids, a=a, b=b)
    if plain:
        return path, source, {f"{path}::test_{name}": "PASSED" if index == 1 else "FAILED"
                              for index, name in enumerate(ids[:4])}
    names = [f"test_{ids[0]}", f"test_{ids[1]}", f"test_{ids[2]}", f"test_{ids[3]}[{b}]",
             *(f"Test{ids[4]}::test_{name}" for name in ids[4:8])]
    return path, source, {f"{path}::{name}": "PASSED" if index in (1, 7) else "FAILED"
                          for index, name in enumerate(names)}


def _text(content: bytes | str) -> str:
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    return text.removeprefix("\ufeff")  # a byte order mark, which `ast` and `compile` do not know in a text
