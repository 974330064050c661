"""What tests/mutants.py does: change a file, and see whether tests fail in a process of their own."""

import ast
import collections
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import importlib
import itertools
import math
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tqdm.std

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one mutant; one that hangs is killed, too


@dataclasses.dataclass
class Mutant:
    file: str
    name: str
    text: str  # of the whole file, changed
    lines: range  # that differ, by their numbers in the file as it is

    @property
    def key(self):
        return self.file, self.name


def kept_mutants(table):
    """Those of a table such as MUTANTS."""
    found = []
    for file, mutants in table.items():
        text = (ROOT / file).read_text("utf-8")
        for name, (old, new) in mutants.items():
            first = text[:text.index(old)].count("\n") + 1
            lines = range(first, first + old.rstrip("\n").count("\n") + 1)
            found.append(Mutant(file, name, text.replace(old, new), lines))
    return found


# Mutants of lines that nobody has written any for


OPPOSITE = {}
for one, other in ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn),
                   (ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)):
    OPPOSITE |= {one: other(), other: one()}
MOST_OF_LINE = 3  # mutants that are made of one line


def changes(node):
    """Yields (a node, what takes its place) for a node and its condition."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield node, ast.Compare(node.left, [OPPOSITE[type(node.ops[0])], *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp):
        yield node, node.left
        if type(node.op) in OPPOSITE:
            yield node, ast.BinOp(node.left, OPPOSITE[type(node.op)], node.right)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(OPPOSITE[type(node.op)], node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg != "strict":
        yield node, ast.Call(node.func, node.args, node.keywords[:-1])
    elif isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(node.value, ast.Constant | ast.Yield):
        yield node, ast.Pass()
    elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
        yield node, ast.Pass()  # of an attribute or an item; a name would not be known
    for test in getattr(node, "ifs", [getattr(node, "test", None)]):
        if test and not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, ast.UnaryOp(ast.Not(), test)


def made_mutants(file, numbers):
    """Up to MOST_OF_LINE changes of each of these lines."""
    data = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    found = collections.defaultdict(dict)  # of each line
    waiting = [ast.parse(data)]
    while waiting:
        parent = waiting.pop()
        if isinstance(parent, ast.JoinedStr):  # Python 3.11 does not know where its parts are
            continue
        waiting += ast.iter_child_nodes(parent)
        for node, new in changes(parent):
            if node.lineno in numbers:
                old, new = ast.unparse(node), ast.unparse(new)
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                written = new if isinstance(node, ast.stmt) else f"({new})"
                text = (data[:start] + written.encode() + data[end:]).decode()
                name = f"line {node.lineno}: {old:.60} -> {new:.60}"
                found[node.lineno][name] = Mutant(file, name, text, range(node.lineno, node.end_lineno + 1))
    mutants = []
    for line in sorted(found):
        of_line = [found[line][name] for name in sorted(found[line])]
        step = max(1, len(of_line) // MOST_OF_LINE)  # so that they are of several kinds
        mutants += of_line[::step][:MOST_OF_LINE]
    return mutants


def changed_lines(since):
    """{file: numbers of the lines} that commits, and what is not committed yet, have changed since then."""
    found = {}
    diff = subprocess.check_output(["git", "diff", "-U0", since, "--", "*.py"], cwd=ROOT, text=True)
    for line in diff.splitlines():
        if line.startswith("+++ "):
            numbers = found.setdefault(line[6:], set())
        if hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            numbers.update(range(first, first + count) if count else (first, first + 1))
    return {file: numbers for file, numbers in found.items() if numbers and (ROOT / file).is_file()}


# Running tests


class Told:
    """A plugin of pytest: which tests are run, in which order, and which failed."""

    def __init__(self, told, without=(), first=()):
        self.told, self.without, self.first = told, without, first

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.without]
        items.sort(key=lambda item: item.nodeid not in self.first)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.told.send(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def pytest_in(folder, arguments, plugin):
    """In this process, which says nothing and ends behind it.  -> pytest's exit code"""
    os.chdir(folder)
    sys.path[0], sys.argv[1:] = str(folder), []
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    flags = ["-n", "0", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return pytest.main([*flags, *arguments], plugins=[plugin])


def end_with_parent():
    """Whoever kills the program kills tests that hang, too (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_tests(folder, arguments, told, plugin):
    end_with_parent()
    code = pytest_in(folder, arguments, plugin)
    told.send(None if code in (0, 1, 5) else f"pytest ends with {code!r}")
    os._exit(0)


def failures(folder, arguments, limit, without=(), first=(), stop=True):
    """Run tests, but for some, in a process of its own.  -> those that failed, or why it did not end"""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = [*arguments, "-x"] if stop else arguments
    process = multiprocessing.Process(
        target=run_tests, args=(folder, arguments, theirs, Told(theirs, without, first)))
    process.start()
    theirs.close()
    failed, end = [], time.monotonic() + limit
    try:
        while True:
            if not ours.poll(max(0.0, end - time.monotonic())):
                return [*failed, f"out of time ({limit:.0f} s)"]
            said = ours.recv()
            if said is None:
                return failed
            failed.append(said)
            if stop:
                return failed
    except EOFError:
        return [*failed, "the process died"]
    finally:
        process.kill()
        process.join()
        ours.close()


def copy_tree(folder):
    """The working tree without what git ignores."""
    tree = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for path in filter(Path.is_file, map(ROOT.joinpath, tree.splitlines())):
        copy = Path(folder, path.relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


# Which tests execute which lines


def measure(folder, files, tests, traced, told):
    from tests.trace_lines import Tracer

    tracer = Tracer(Path(folder), files, traced)
    pytest_in(folder, tests, tracer)
    lines = tracer.found() if traced else {}
    told.put((tracer.seconds, tracer.failed, lines))
    told.close()
    told.join_thread()
    os._exit(0)


def trace(jobs):
    """-> dict(seconds={test: CPU s}, failed=[tests], sets=[places of tests in seconds],
    files={file: dict(text, lines={number: place of its tests in sets})})
    """
    tracked = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    files = [file for file in tracked if not file.startswith(("tests/", "benchmarks/"))]
    found = dict(seconds={}, failed=[], files={file: dict(text=(ROOT / file).read_text("utf-8"), lines={})
                                               for file in files})
    tests = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: path.stat().st_size)
    for traced in (False, True):
        told = multiprocessing.Queue()
        with contextlib.ExitStack() as folders:
            for job in range(jobs):
                folder = folders.enter_context(tempfile.TemporaryDirectory())
                copy_tree(folder)
                part = [f"tests/{path.name}" for path in tests[job::jobs]]
                multiprocessing.Process(target=measure, args=(folder, files, part, traced, told)).start()
            for _ in range(jobs):
                seconds, failed, lines = told.get()
                if not traced:
                    found["seconds"] |= seconds
                    found["failed"] += failed
                for file in lines:
                    of_file = found["files"][file]["lines"]
                    for number, names in lines[file].items():
                        of_file.setdefault(str(number), set()).update(names)
    return packed(found)


def packed(found):
    """With each set of tests written once, by their numbers: few sets are many lines'."""
    number_of = {name: number for number, name in enumerate(["", *found["seconds"]])}
    places = {}
    for known in found["files"].values():
        for number, names in known["lines"].items():
            key = tuple(sorted(number_of[name] for name in names if name in number_of))
            known["lines"][number] = places.setdefault(key, len(places))
    return found | {"sets": [*places]}


def tests_of(mutant, traced):
    """The tests that execute a mutant's lines, by a trace of the file as it was; None where it has none."""
    known = traced["files"].get(mutant.file)
    if not known:
        return None
    lines = {int(number): which for number, which in known["lines"].items()}
    now = (ROOT / mutant.file).read_text("utf-8")
    old = numbers_before(known["text"], now)
    # A statement is traced by the line that it begins in; a new line has the tests of the lines about it.
    first = begins_in(mutant, now)
    numbers = [*range(first, mutant.lines.stop)]
    while not any(old.get(number) in lines for number in numbers):
        numbers = [numbers[0] - 1, *numbers, numbers[-1] + 1]
        if numbers[0] < 1 and numbers[-1] > now.count("\n"):
            return None
    sets = {lines[old[number]] for number in numbers if old.get(number) in lines}
    places = set().union(*(traced["sets"][which] for which in sets))
    if 0 in places:  # by an import, and so for all tests that execute anything of the file
        places = set().union(*(traced["sets"][which] for which in lines.values()))
    every = ["", *traced["seconds"]]
    return {every[place] for place in places} - {"", *traced["failed"]}


@functools.cache
def numbers_before(was, now):
    """{number of a line: the number that it had in an older text}"""
    matcher = difflib.SequenceMatcher(None, was.splitlines(), now.splitlines(), autojunk=False)
    found = {}
    for old, new, size in matcher.get_matching_blocks():
        found.update({new + i + 1: old + i + 1 for i in range(size)})
    return found


@functools.cache
def nodes_of(text):
    return [*ast.walk(ast.parse(text))]


def begins_in(mutant, text):
    """The line in which the innermost statement begins that holds a mutant's first line."""
    found = mutant.lines.start
    for node in nodes_of(text):
        if isinstance(node, ast.stmt) and node.lineno <= mutant.lines.start <= node.end_lineno:
            has_body = hasattr(node, "body") and node.lineno < node.body[0].lineno
            if not has_body or mutant.lines.start < node.body[0].lineno:
                found = min(found, node.lineno)
    return found


# Many mutants


def import_libraries(folder):
    """All that tests import: once, not for each mutant. What is the tree's own is forgotten again."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    for path in sorted(Path(folder, "tests").glob("test_*.py")):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(f"tests.{path.stem}")
    places = {name: vars(module).get("__file__") or next(iter(vars(module).get("__path__", [])), "")
              for name, module in sys.modules.items()}
    for name, place in places.items():
        if str(place).startswith(folder):
            del sys.modules[name]
    sys.path.remove(folder)
    # One that all processes share stays locked where a process is killed that has it.
    tqdm.std.TqdmDefaultWriteLock.mp_lock = None
    tqdm.tqdm.set_lock(tqdm.std.TqdmDefaultWriteLock())


def work(waiting, results, end):
    """A process that tries mutants, in a copy of the tree."""
    end_with_parent()
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(folder)
        import_libraries(folder)
        while True:
            task = waiting.get()
            left = end - time.monotonic()
            if task is None or left < 1:
                results.put(None)
                return
            mutant, options = task
            path = Path(folder, mutant.file)
            text = path.read_text("utf-8")
            path.write_text(mutant.text, "utf-8")
            began = time.monotonic()
            failed = failures(folder, limit=min(left, LIMIT), **options)
            path.write_text(text, "utf-8")
            results.put((mutant, failed, time.monotonic() - began))


def tried(tasks, jobs, seconds=math.inf):
    """Yields (mutant, tests that failed, seconds) for tasks [(mutant, options of failures)], as they end."""
    waiting, results = multiprocessing.Queue(), multiprocessing.Queue()
    end = time.monotonic() + seconds
    processes = [multiprocessing.Process(target=work, args=(waiting, results, end)) for _ in range(jobs)]
    for process in processes:
        process.start()
    for task in [*tasks, *[None] * jobs]:
        waiting.put(task)
    while jobs:
        try:
            result = results.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a process that tries mutants has died: see above")
            continue
        if result is None:
            jobs -= 1
        else:
            yield result
    waiting.cancel_join_thread()
