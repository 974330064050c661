"""Make scenarios for envs/code/repl.py: break correct repositories by one expression; keep what tests see.

    python tools/make_scenarios.py --out scenarios --count 100
    python tools/make_scenarios.py --source ../mylib ../other --out scenarios --count 1000 --seed 2
    python grpo_llm.py --model OWNER/NAME --env repl --env-kwargs cache_dir=scenarios

A source is a folder with modules and a folder `tests` (or `test`) that pytest runs and that all pass; without
--source these are the bundled repositories after their fix. It may have held-out tests beside it,
held_out/<folder>.py, which are its mutants' too. A mutant differs from it in one expression: a comparison, an
operator, a constant, `not`, and/or, the order of arguments, a slice's bound, the variable that is returned, a
default, min for max and the like. It is kept if some of the tests fail, not all, none is lost and all end in
time; and if some held-out tests fail. Its bug report is made of what the failing tests call, expect and get.

The same sources, count and seed give the same scenarios, whatever --jobs. The last line printed is JSON.
docs/repl.md describes what is written.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import collections
import difflib
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs
from envs import BadInput
from envs.code import repl, sandbox, trees
from envs.code.testing import decides, run_tests
from tools.command_line import Parser, at_least, one_line

COMPARISONS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",),
               "!=": ("==",), "in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",)}
OPERATORS = {"+": ("-",), "-": ("+",), "*": ("/", "+"), "/": ("//", "*"), "//": ("/",), "%": ("//",),
             "&": ("|",), "|": ("&",), "<<": (">>",), ">>": ("<<",), "**": ("*",)}
SYMBOLS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
           ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
           ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
           ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>", ast.Pow: "**",
           ast.And: "and", ast.Or: "or"}
TWINS = [("min", "max"), ("any", "all"), ("lstrip", "rstrip"), ("strip", "rstrip"), ("lower", "upper"),
         ("startswith", "endswith"), ("partition", "rpartition"), ("find", "rfind"), ("append", "extend"),
         ("floor", "ceil"), ("keys", "values"), ("remove", "discard"), ("union", "intersection")]
MOST_SHOWN = 500  # characters of what a failing test says, in a bug report
MOST_LINES = 12  # of its own

# Runs in the sandbox: what comes of the tests, what those that fail call, and what they say. Prints nothing
# where that takes longer than the processor time given. Only repositories of one's own come here, so it need
# not distrust them as envs/code/testing_worker.py does.
EXPLAIN = """
import json, os, signal, sys, textwrap, pytest
sys.path.insert(0, os.getcwd())
signal.signal(signal.SIGPROF, lambda *_: os._exit(1))
signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
failed, outcomes = {}, {}
class Explain:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed or call.when == "call":
            outcomes[item.nodeid] = report.passed and outcomes.get(item.nodeid, True)
        if report.failed and call.excinfo is not None:
            here = str(item.path)
            entries = [entry for entry in call.excinfo.traceback if str(entry.path) == here]
            given = getattr(getattr(item, "callspec", None), "params", {})
            lines = [f"{name} = {value!r}" for name, value in given.items()]
            if entries:
                body = list(entries[0].getsource())
                while body and not body.pop(0).rstrip().endswith(":"):
                    pass  # the test's name and arguments
                lines += textwrap.dedent("\\n".join(body or [str(entries[0].statement)])).splitlines()
            failed[item.nodeid] = [lines, call.excinfo.typename, str(call.excinfo.value)]
        return report
out = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
pytest.main(["-vv", "-o", "cache_dir=/tmp/cache", "--rootdir=.", *sys.argv[2:]], plugins=[Explain()])
os.write(out, json.dumps([outcomes, failed]).encode())
"""


@dataclass(frozen=True)
class Source:
    """A correct repository."""

    name: str
    files: dict[str, bytes]
    tests: tuple[str, ...]
    held_out: dict[str, bytes]  # {path: module of tests}, which no tree holds; empty: none

    def is_test(self, path: str) -> bool:
        return decides(path) or any(path == place or path.startswith(f"{place}/") for place in self.tests)

    def split(self, files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """-> modules and data; tests and what configures them"""
        tests = {path: text for path, text in files.items() if self.is_test(path)}
        return {path: text for path, text in files.items() if path not in tests}, tests


@dataclass(frozen=True)
class Mutant:
    source: Source
    path: str
    kind: str
    text: bytes  # of the whole module

    @property
    def id(self) -> str:
        digest = hashlib.sha256(self.path.encode() + b"\0" + self.text).hexdigest()
        return f"{self.source.name}-{digest[:10]}"

    @property
    def files(self) -> dict[str, bytes]:
        return self.source.files | {self.path: self.text}


# Mutants: places in the bytes of a module, and what to put there


def edits(text: bytes) -> Iterator[tuple[str, int, int, bytes]]:
    """(kind, start, end, replacement) of all that can be changed in a module, in the order of the tree."""
    starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]

    def begin(node):
        return starts[node.lineno - 1] + node.col_offset

    def end(node):
        return starts[node.end_lineno - 1] + node.end_col_offset

    def operator(kind, left, right, symbol, others):
        """An operator between two nodes; brackets and blanks may stand there too, a comment must not."""
        gap = text[end(left):begin(right)]
        found = list(re.finditer(rb"\s+".join(map(re.escape, symbol.encode().split())), gap))
        if len(found) == 1 and b"#" not in gap:
            place = end(left) + found[0].start()
            for other in others:
                yield kind, place, place + len(found[0][0]), other.encode()

    tree = ast.parse(text)
    for node, function in walk(tree, None):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, right, op in zip(sides, sides[1:], node.ops, strict=False):
                symbol = SYMBOLS[type(op)]
                yield from operator("comparison", left, right, symbol, COMPARISONS[symbol])
        elif isinstance(node, ast.BinOp) and not any(map(is_text, (node.left, node.right))):
            symbol = SYMBOLS.get(type(node.op), "")
            yield from operator("operator", node.left, node.right, symbol, OPERATORS.get(symbol, ()))
        elif isinstance(node, ast.AugAssign) and not is_text(node.value):
            symbol = SYMBOLS.get(type(node.op), "")
            others = [other + "=" for other in OPERATORS.get(symbol, ())]
            yield from operator("operator", node.target, node.value, symbol + "=", others)
        elif isinstance(node, ast.BoolOp):
            symbol = SYMBOLS[type(node.op)]
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from operator("and/or", left, right, symbol, ["or" if symbol == "and" else "and"])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            word = re.match(rb"not\b\s*|-\s*", text[begin(node):])
            kind = "not" if isinstance(node.op, ast.Not) else "sign"
            yield kind, begin(node), begin(node) + word.end(), b""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "constant", begin(node), end(node), str(not node.value).encode()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            if text[begin(node):end(node)].isdigit():
                for value in sorted({node.value + 1, abs(node.value - 1)}):
                    yield "constant", begin(node), end(node), str(value).encode()
        elif isinstance(node, ast.Call):
            yield from call_edits(node, text, begin, end)
        elif isinstance(node, ast.Slice):
            for bound in filter(None, (node.lower, node.upper)):
                if isinstance(bound, (ast.Name, ast.Attribute, ast.Call)):
                    for more in (b" + 1", b" - 1"):
                        yield "slice", end(bound), end(bound), more
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and function is not None:
            for name in sorted(locals_of(function) - {node.value.id, "self", "cls"}):
                yield "return", begin(node.value), end(node.value), name.encode()


def call_edits(node, text, begin, end):
    """The first two arguments of a call swapped; another function of the same kind."""
    if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
        (a, b), (c, d) = ((begin(arg), end(arg)) for arg in node.args[:2])
        brackets = text[b:c].strip(b" \n\t,") or isinstance(node.args[0], ast.GeneratorExp)
        if not brackets and text[a:b] != text[c:d]:
            yield "arguments", a, d, text[c:d] + text[b:c] + text[a:b]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for twins in TWINS:
        if name in twins and text[:end(node.func)].endswith(name.encode()):
            other = twins[1 - twins.index(name)].encode()
            yield "function", end(node.func) - len(name), end(node.func), other


def walk(node, function):
    """(node, the function that it is in), without what is no code to break: annotations, f-strings, docs."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node
    yield node, function
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            # Python 3.11 does not know where in the source the parts of an f-string are.
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from walk(child, function)


def is_text(node) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), (str, bytes))


def locals_of(function) -> set[str]:
    arguments = function.args
    names = {arg.arg for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    within = {id(name) for node in ast.walk(function) if isinstance(node, ast.comprehension)
              for name in ast.walk(node.target)}
    names |= {node.id for node in ast.walk(function) if id(node) not in within
              and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names - set(dir(builtins))


def mutants_of(source: Source) -> list[Mutant]:
    """All of them, no two equal, none that is the same program."""
    found, seen = [], set()
    for path, text in sorted(source.files.items()):
        if not path.endswith(".py") or source.is_test(path):
            continue
        mark = codecs.BOM_UTF8 if text.startswith(codecs.BOM_UTF8) else b""  # which no node's place counts
        text = text.removeprefix(mark)
        try:
            same = ast.dump(ast.parse(text.decode()))
            places = list(edits(text))
        except (SyntaxError, ValueError) as error:
            raise BadInput(f"{source.name}: {path}: not Python ({one_line(error)})") from error
        for kind, start, end, replacement in places:
            new = text[:start] + replacement + text[end:]
            try:
                program = ast.dump(ast.parse(new))
            except (SyntaxError, ValueError):
                continue
            if program != same and (path, program) not in seen:
                seen.add((path, program))
                found.append(Mutant(source, path, kind, mark + new))
    return found


def in_turn(mutants: list[Mutant], rng: random.Random) -> Iterator[Mutant]:
    """At random, but one of each source and kind after another: there are far more constants than `not`s."""
    groups = collections.defaultdict(list)
    for mutant in mutants:
        groups[mutant.source.name, mutant.kind].append(mutant)
    for group in groups.values():
        rng.shuffle(group)
    queues = list(groups.values())
    while queues:
        rng.shuffle(queues)
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]


# Sources


def bundled_sources() -> list[Source]:
    """The repositories that come with envs/code/repl.py, fixed."""
    env = envs.make("repl")
    sources = []
    for split in env.splits:
        for index in range(env.num_tasks(split)):
            scenario = env.scenario(env.task(split, index))
            files = patched(scenario.files, scenario.patch, scenario.instance_id)
            name = scenario.instance_id.partition("-")[0]  # without what its own bug is about
            sources.append(Source(name, files, scenario.tests, held_out_files(scenario)))
    return sorted(sources, key=lambda source: source.name)


def held_out_files(scenario: repl.Scenario) -> dict[str, bytes]:
    return {scenario.held_out_path: scenario.held_out.encode()} if scenario.held_out else {}


def patched(files: dict[str, bytes], patch: str, name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text)
        try:
            done = subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=folder,
                                  capture_output=True)
        except OSError as error:
            raise BadInput(f"git is needed to fix the bundled repositories ({error})") from error
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()
            raise BadInput(f"{name}: its patch does not apply ({reason})")
        return trees.read(Path(folder))


def read_source(folder: Path) -> Source:
    folder = folder.resolve()
    if not folder.is_dir():
        raise BadInput(f"--source {folder}: expected a folder")
    row = dict(folder=folder, instance_id=folder.name, problem_statement="", expected={})
    scenario = repl.load_scenario(row)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", folder.name)
    return Source(name, scenario.files, scenario.tests, held_out_files(scenario))


# Which mutants are scenarios


@dataclass
class Maker:
    timeout: float  # of a run of the tests [s of processor time]

    def explain(self, source: Source, files: dict[str, bytes]) -> tuple[dict[str, bool], dict[str, list]]:
        """-> test -> passed, test -> what it did and said where it failed; both empty: not in time."""
        argv = [sys.executable, "-I", "-c", EXPLAIN, str(self.timeout), *source.tests]
        done = sandbox.run(argv, files, timeout=10 * self.timeout, output=2**18)
        try:
            outcomes, failed = json.loads(done.output)
        except ValueError:
            return {}, {}
        return outcomes, failed

    def judge(self, source: Source, files: dict[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
        """test -> outcome, as the environment will judge: of those in the tree, of those held out"""
        modules, tests = source.split(files)
        results = run_tests(modules, tests | source.held_out, timeout=10 * self.timeout)
        held_out = {name: results[name] for name in results if name.partition("::")[0] in source.held_out}
        return {name: results[name] for name in results if name not in held_out}, held_out

    def check(self, source: Source) -> dict[str, str]:
        """What the tests say of the correct repository; BadInput unless all pass, in time."""
        outcomes, _ = self.explain(source, source.files)
        results, held_out = self.judge(source, source.files)
        wrong = [f"{name} is {outcome}" for name, outcome in sorted((results | held_out).items())
                 if outcome != "PASSED"]
        if not results or wrong:
            raise BadInput(f"{source.name}: expected tests that all pass, but "
                           f"{(wrong or ['there are none'])[0]}")
        if outcomes.keys() != results.keys() or not all(outcomes.values()):
            raise BadInput(f"{source.name}: expected tests that all pass, the same ones each time, within "
                           f"--timeout {self.timeout:g}")
        return results

    def row(self, mutant: Mutant, expected: dict[str, str], seed: int) -> dict | None:
        """A row of index.json; None where the mutant is no scenario."""
        outcomes, failed = self.explain(mutant.source, mutant.files)
        if outcomes.keys() != expected.keys() or not 0 < len(failed) < len(expected):
            return None
        results, held_out = self.judge(mutant.source, mutant.files)
        if {name: outcome == "PASSED" for name, outcome in results.items()} != outcomes:
            return None
        if held_out and set(held_out.values()) == {"PASSED"}:  # what decides does not see it
            return None
        report = self.report(mutant, failed, random.Random(f"{seed} {mutant.id}"))
        failing = [name.rpartition("::")[2] for name, outcome in held_out.items() if outcome != "PASSED"]
        return dict(problem_statement=report, expected_output_json=expected, patch=patch_back(mutant),
                    tests=list(mutant.source.tests)) | (dict(fail_to_pass=failing) if failing else {})

    def report(self, mutant: Mutant, failed: dict[str, list], rng: random.Random) -> str:
        """What one would write who saw the tests fail. Nothing of the place that was changed."""
        names = rng.sample(sorted(failed), min(len(failed), 2))
        title = sentence(names[0])
        opening = rng.choice((
            f"{title}: this no longer works.",
            f"I get wrong results. ({title}.)",
            f"{mutant.source.name}: {title[0].lower() + title[1:]} - not so here"))
        tests = "test fails" if len(failed) == 1 else "tests fail"
        closing = rng.choice((f"{len(failed)} {tests}, among them {names[0].partition('::')[2]}.",
                              "The tests that do not touch this still pass."))
        return "\n\n".join([opening, *(told_of(*failed[name]) for name in names), closing])


def told_of(lines: list[str], kind: str, message: str) -> str:
    """What a failing test called, what it expected and what it got."""
    shown = indented("\n".join(lines[-MOST_LINES:]) or "(the test's set-up)")
    if wanted := re.match(r"DID NOT RAISE (.*)", message):
        name = re.search(r"(\w+)'?>?\)*$", wanted[1])
        return f"{shown}\n\nExpected {name[1] if name else 'an exception'}, but nothing is raised."
    got = sides(message)
    if kind == "AssertionError" and got:
        return f"{shown}\n\nExpected: {clip(got[1])}\nGot: {clip(got[0])}"
    if kind == "AssertionError":
        return f"{shown}\n\ndoes not hold:\n\n{clip(indented(message or 'False'))}"
    return f"{shown}\n\nraises {kind}: {clip(message)}"


def sides(message: str) -> tuple[str, str] | None:
    """("got", "expected") of pytest's `assert got == expected`."""
    line = message.partition("\n")[0]
    try:
        test = ast.parse(line).body[0].test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            return ast.get_source_segment(line, test.left), ast.get_source_segment(line, test.comparators[0])
    except (SyntaxError, ValueError, AttributeError, IndexError, RecursionError):
        pass
    return None


def sentence(test: str) -> str:
    """tests/test_x.py::TestRoom::test_gap_is_free[3] -> Gap is free"""
    name = test.rpartition("::")[2].partition("[")[0].removeprefix("test_")
    words = name.replace("_", " ").strip() or "a test"
    return words[0].upper() + words[1:]


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())


def clip(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + " ..."


def patch_back(mutant: Mutant) -> str:
    """A unified diff from the mutant to the correct module."""
    wrong, right = (re.findall(r"[^\n]*\n|[^\n]+", text.decode())
                    for text in (mutant.text, mutant.source.files[mutant.path]))
    lines = difflib.unified_diff(wrong, right, f"a/{mutant.path}", f"b/{mutant.path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                   for line in lines)


# The command


def make(args) -> dict:
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"--out {out}: expected a new or an empty folder")
    sandbox.check()
    sources = [read_source(folder) for folder in args.source] if args.source else bundled_sources()
    if twice := [name for name, n in collections.Counter(s.name for s in sources).items() if n > 1]:
        raise BadInput(f"--source: two folders are named {twice[0]}")
    maker, start = Maker(args.timeout), time.monotonic()
    rows, tried = {}, 0
    with ThreadPoolExecutor(args.jobs) as pool:
        expected = dict(zip((source.name for source in sources), pool.map(maker.check, sources), strict=True))
        mutants = [mutant for source in sources for mutant in mutants_of(source)]
        ahead = in_turn(mutants, random.Random(f"mutants {args.seed}"))

        def submit(mutant):
            return mutant, pool.submit(maker.row, mutant, expected[mutant.source.name], args.seed)

        waiting = collections.deque(map(submit, itertools.islice(ahead, 2 * args.jobs)))
        with tqdm(total=args.count, unit="scenario", disable=None) as progress:
            while waiting and len(rows) < args.count:
                mutant, future = waiting.popleft()
                waiting.extend(map(submit, itertools.islice(ahead, 1)))
                tried += 1
                if (row := future.result()) is not None:
                    rows[mutant.id] = mutant, row
                    progress.update()
        for _, future in waiting:
            future.cancel()
    if not rows:
        raise BadInput(f"none of {tried} mutants makes some of the tests fail and not all")
    write(out, rows)
    minutes = (time.monotonic() - start) / 60
    kinds = collections.Counter(mutant.kind for mutant, _ in rows.values())
    return dict(out=str(out), scenarios=len(rows), asked=args.count, tried=tried, mutants=len(mutants),
                train=sum(repl.split_of(name) == "train" for name in rows),
                test=sum(repl.split_of(name) == "test" for name in rows),
                kinds=dict(sorted(kinds.items())), per_minute=round(len(rows) / minutes, 1))


def write(out: Path, rows: dict[str, tuple[Mutant, dict]]) -> None:
    try:
        for name, (mutant, _) in rows.items():
            for path, text in mutant.files.items():
                place = out / name / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(text)
            for text in mutant.source.held_out.values():
                (out / "held_out").mkdir(exist_ok=True)
                (out / "held_out" / f"{name}.py").write_bytes(text)
        index = {name: row for name, (_, row) in sorted(rows.items())}
        text = json.dumps(index, indent=1, ensure_ascii=False) + "\n"
        (out / "index.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written ({error})") from error


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Make scenarios for envs/code/repl.py by breaking correct repositories.")
    parser.add_argument("--source", nargs="+", type=Path, default=[], metavar="FOLDER",
                        help="correct repositories with tests (the bundled ones, fixed)")
    parser.add_argument("--out", type=Path, required=True, metavar="CACHE_DIR", help="a new folder")
    parser.add_argument("--count", type=at_least(1), required=True, help="of scenarios")
    parser.add_argument("--seed", type=at_least(0), default=1, help="which mutants are taken (1)")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1,
                        help="runs at the same time (cores)")
    parser.add_argument("--timeout", type=at_least(1, float), default=20.0, metavar="SECONDS",
                        help="of processor time for all tests; mutants that take more are dropped (20)")
    try:
        print(json.dumps(make(parser.parse_args(argv))))
    except (BadInput, OSError, sandbox.SandboxError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
