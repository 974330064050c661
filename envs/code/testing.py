"""Which tests pass on a tree of files, told apart from what the code in the tree says about it.

    results = run_tests({"shop.py": b"..."}, {"tests/test_shop.py": b"..."})
    results == {"tests/test_shop.py::test_total": "PASSED"}

Each module of tests runs in a sandbox of its own, so that nothing that happens in one reaches another. What
tests print counts for nothing: what became of each comes over a pipe that was opened, with a random token,
before any code of the tree ran, is passed on by a process that runs none of it, and made into outcomes here.
What tests expect is not in the sandbox (expectations.py): they report values, which are compared here. Where
a canary in modules beside them does not turn out as it must (someone patched pytest or unittest, or ended the
process with os._exit(0)), no result counts.
"""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path, PurePosixPath

from envs.code import expectations, sandbox, trees
from envs.workers import cores

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
MOST_TOLD = 2**20  # characters of reported values of a module that are read; what is beyond counts as missing
MOST_GUESSED = 1e-3  # instances that are guessed oftener are not trained on unless one asks for it

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
    """{test: "PASSED" | "FAILED" | "ERROR"}; empty where results were forged, which `forged` then says.

    skipped: a test came to its end without a check that it makes if it passes.
    """

    forged = skipped = False

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.wrong = {}  # module -> checks that did not hold in tests that came to their end
        self.kept = {}  # module -> checks that were made in the sandbox all the same


@functools.cache
def has_pytest() -> bool:
    """Whether the interpreter of the tests has it; asked before any code of theirs can answer."""
    return not subprocess.run([sys.executable, "-I", "-c", "import pytest"], capture_output=True).returncode


def run_tests(files: dict[str, bytes], test_files: dict[str, bytes], names: list[str] | None = None,
              plain: bool = False, timeout: float = 60.0, memory: int = 1024,
              hide: bool = True, solved: dict[str, bytes] | None = None) -> Outcomes:
    """{test: "PASSED" | "FAILED" | "ERROR"}; a test that gave no result is not in it, and has not passed.

    files: the tree, path -> content. test_files: the tests and their configuration, laid over it; a file of
    `files` that decides over tests (conftest.py, pytest.ini, ...) and is not in test_files is left out.
    names: of tests, as pytest writes them ("tests/test_x.py::TestShop::test_total[3]"); None: all there are.
    plain: no pytest, for tests that are module-level functions without arguments; about eight times as fast.
    timeout: of the modules, one after the other [s]. Each has what is left of it and at least an equal share;
    a test, half of what is left of that. One more than there are cores run at once; waiting is not in it.
    hide: keep what the tests expect out of the sandbox. solved: a tree for which they pass, if one is known:
    what they expect of it that is no plain value is compared in the sandbox all the same.

    A skipped test is FAILED, one that is marked xfail and does fail is PASSED. ERROR: its module cannot be
    imported, or its fixtures failed.

    Raises SandboxError where nothing could be run, whatever the tree. Results are cached; safe to call from
    several threads.
    """
    if not (plain or has_pytest()):
        raise sandbox.SandboxError(f"the tests did not start: {sys.executable} has no pytest")
    keep = {} if hide else None
    if solved is not None:
        keep = _cached(solved, test_files, names, plain, timeout, memory, {}).wrong
    found = copy.copy(_cached(files, test_files, names, plain, timeout, memory, keep))
    found.kept = keep
    return found


def guess(test_files: dict[str, bytes], names: list[str] | None, shown: str, keep=None) -> float:
    """How often code that computes nothing passes, at most, if it knows what is shown and how it is judged.

    names: of tests that fail until the work is done; None: all have to be guessed. keep: checks, by their
    module, that are made in the sandbox.
    """
    bits = 0.0
    for path in judged(test_files, names):
        own = names and [name.partition("::")[2] for name in names if name.partition("::")[0] == path]
        taken = expectations.taken_out(_text(test_files[path]), (keep or {}).get(path, ()))
        bits += taken.bits(own, shown)
    return 0.5 ** bits


def about_guessed(env: str, names: list[str]) -> str:
    if not names:
        return ""
    return (f"environment {env}: left out of training: {len(names):,} instances such as {names[0]}, whose "
            f"tests can be passed by guessing oftener than once in 1,000 (guessable=true keeps them)")


def _cached(files, test_files, names, plain, timeout, memory, keep: dict[str, set[int]] | None) -> Outcomes:
    files = {path: content for path, content in files.items() if not decides(path)}
    tree = trees.laid_over(files, test_files)
    kept = keep and sorted((path, sorted(numbers)) for path, numbers in keep.items())
    key = digest(sorted(tree.items()), sorted(test_files), names, [plain, timeout, memory, kept])
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
            with _places:
                result = _run(tree, test_files, names, plain, timeout, memory, keep)
            found.set_result(result)
        except BaseException as error:
            with _lock:
                _cache.pop(key, None)
            found.set_exception(error)
    return found.result()


_cache: collections.OrderedDict[str, Future] = collections.OrderedDict()
_lock = threading.Lock()


def places() -> threading.Semaphore:
    """One is held while tests run: their limits are of the clock, so that many at once would fail right code.

    One more than there are cores, since a sandbox also waits: 64 short ones then take no longer.
    """
    return threading.Semaphore(1 + cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


_places = places()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: (
        _cache.clear(), globals().update(_lock=threading.Lock(), _places=places())))


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


def _run(tree, test_files, names, plain, timeout, memory, keep) -> Outcomes:
    taken = {}
    for path in judged(test_files, names):
        kept = None if keep is None else keep.get(path, ())
        taken[path] = expectations.taken_out(_text(test_files[path]), kept)
    tree = tree | {path: module.source.encode() for path, module in taken.items()}
    results, deadline = Outcomes(), time.monotonic() + timeout
    for path, module in taken.items():
        own = None if names is None else [name for name in names if name.partition("::")[0] == path]
        left = max(deadline - time.monotonic(), timeout / len(taken))
        found = _once(tree, own, plain, left, memory, path, module)
        results.update(found)
        results.wrong.update(found.wrong)
        results.forged |= found.forged
        results.skipped |= found.skipped
    if results.forged:
        results.clear()
    return results


def judged(test_files: dict[str, bytes], names: list[str] | None) -> list[str]:
    """The modules in which the tests are."""
    asked = {name.partition("::")[0] for name in names} if names is not None else None
    return [path for path in sorted(test_files) if (is_test(path) if asked is None else path in asked)]


def _once(tree, names, plain, timeout, memory, path: str, module: expectations.Taken) -> Outcomes:
    """Of one module."""
    first, last = canaries(path, plain), canaries(path, plain)
    must = first[2] | last[2]
    sources = dict([first[:2], (path, module.source), last[:2]])
    if not plain:
        tree = tree | {path: source.encode() for path, source in sources.items()}
        sources = dict.fromkeys(sources, "")
    nonce = secrets.token_hex(16)
    job = dict(nonce=nonce, plain=plain, timeout=timeout, modules=list(sources.items()),
               names=None if names is None else [*names, *must])
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
    reports = _reports(rest, nonce)
    told, left = collections.defaultdict(list), MOST_TOLD
    for name, phase, said in reports:
        left -= len(said)
        if phase == "told" and left >= 0:
            told[name].append(expectations.read(said))
    found = counted(outcomes(report for report in reports if report[1] != "told"), must, names)
    for name, outcome in found.items():
        if outcome != "PASSED" or name in must:
            continue
        wrong, missing = module.wrong(name.partition("::")[2], told[name])
        if wrong | missing:
            found[name] = "FAILED"
            found.wrong.setdefault(path, set()).update(wrong | missing)
            found.skipped |= bool(missing)  # it passed without its checks
    return found


def _reports(text, nonce) -> list[tuple[str, str, str]]:
    """[(test, phase, result)] of what the reporting process said; none where it did not come to its end."""
    try:
        said, reports = json.loads(text)
    except ValueError:
        return []  # it was killed
    if said != nonce or ["", "end", ""] not in reports:
        return []  # an end before the end
    return [report for report in reports if report[0]]


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
