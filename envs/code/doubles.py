"""Copies of a module of tests that lie beside each other, in each of which other tests are doubles.

    made = versions(source, rng, number=2)
    made.sources[made.real["TestCart::test_total"]]     # the copy in which this test is what it was

A double differs from its test in what it expects alone, so it fails where the test passes. Which of the
copies holds the test is drawn for each test by itself, and what a double has more, the test has, too: nothing
tells them apart but what is expected. Code that makes everything pass or equal, or gives what its caller
expects, whoever that is, passes doubles too; code that guesses is right once in number ** tests.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re

# Calls that check something, and arguments with which they fail, whatever they stand for: {n} is a number.
FAIL_WITH = {
    "assertGreater": ("1", "2"), "assertGreaterEqual": ("1", "2"), "assertLess": ("2", "1"),
    "assertLessEqual": ("2", "1"), "assertIn": ("", "({n},)"), "assertNotIn": ("7", "(7,)"),
    "assertIs": ("", "object()"), "assertIsNot": ("None", "None"), "assertIsNone": ("{n}",),
    "assertIsNotNone": ("None",), "assertNotEqual": ("7", "7"), "assertCountEqual": ("[{n}]", "[7]"),
    "assertIsInstance": ("", "type('Other', (), {{}})"), "assertNotIsInstance": ("7", "int"),
    "assertRegex": ("'a'", "'b'"), "assertNotRegex": ("'a'", "'a'"), "assert_array_less": ("2", "1"),
}
EQUALS = re.compile(r"(assert|check)_?\w*(equal|close|same|identical)\w*", re.IGNORECASE)
# Of unittest, by == alone
EXACT = {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual",
         "assertSetEqual", "assertSequenceEqual", "assertMultiLineEqual"}
OF_ARRAYS = {"assert_equal", "assert_allclose", "assert_array_equal", "assert_almost_equal",
             "assert_array_almost_equal"}
TRUTH = {"assertTrue", "assertFalse", "assert_"}
RAISES = {"raises", "assertRaises", "assertRaisesRegex", "assert_raises", "assert_raises_regex"}
WARNS = {"warns", "assertWarns", "assertWarnsRegex", "assert_warns"}
HIDING = re.compile("rais|suppress|expect|error|fail|ignore|except|skip|xfail", re.IGNORECASE)
# What follows such a call may not run.
ENDING = {"skip", "xfail", "skipTest", "importorskip", "exit", "_exit"}


@dataclasses.dataclass(frozen=True)
class Versions:
    sources: list[str]  # the copies; only one where nothing in the module can have a double
    real: dict[str, int]  # test, as pytest writes it without its file: in which copy it is itself
    kinds: dict[str, str]  # test -> what its doubles expect otherwise: value, check or line
    must: frozenset[str]  # tests whose doubles fail for certain if the test passes


@dataclasses.dataclass(frozen=True)
class Copy:
    """Of a test."""

    at: int  # which one it is
    real: int  # which one is the test itself
    number: int  # of all
    same: random.Random  # draws the same for all
    rng: random.Random

    @property
    def itself(self) -> bool:
        return self.at == self.real


def versions(source: str, rng: random.Random, number: int) -> Versions:
    """number: of copies, 2 or more."""
    alone = Versions([source], {}, {}, frozenset())
    try:
        modules = [ast.parse(source) for _ in range(number)]
        if hides_failures(modules[0]):
            return alone
        real, kinds = {}, {}
        marks = marking(modules[0])
        for same in zip(*(tests_of(module, marks) for module in modules), strict=True):
            name, seed = same[0][0], rng.random()
            at = real.setdefault(name, rng.randrange(number))  # of two with one name, the last is run
            for copy, (_, function) in enumerate(same):
                kinds[name] = change(function, Copy(copy, at, number, random.Random(seed), rng))
        inherited, doubtful = inherit(modules[0], real, marks)
        found = [ast.unparse(ast.fix_missing_locations(module)) for module in modules] if real else [source]
        return Versions(found, inherited, kinds, frozenset(inherited) - doubtful)
    except (SyntaxError, ValueError, RecursionError):  # it cannot be imported, or not be written again
        return alone


# Which tests have doubles


def hides_failures(module: ast.Module) -> bool:
    """Whether `pytestmark`, which holds for all tests of a module, may make one that fails something else."""
    marks, known = [], 0
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            known += 1
            marks += [ast.unparse(mark) for mark in getattr(node.value, "elts", [node.value])]
    return ast.unparse(module).count("pytestmark") > known or any(
        not re.match(r"(pytest\.)?mark\.", mark) or "xfail" in mark for mark in marks)


def tests_of(module: ast.Module, marks: re.Pattern) -> list:
    """(name, function) of those that can have doubles."""
    mentioned = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(module)}
    return [*_tests_in(module, "", mentioned, marks)]


def _tests_in(node, inside: str, mentioned: set[str], marks: re.Pattern):
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not marked(child, marks):
            yield from _tests_in(child, f"{inside}{child.name}::", mentioned, marks)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test"):
            yields = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in within(child.body))
            # One that another test calls must do what it did.
            if not (yields or child.name in mentioned or marked(child, marks)):
                yield f"{inside}{child.name}", child


def marking(module: ast.Module) -> re.Pattern:
    """Matches decorators that may make something else of a failure: by name, or by what stands for them."""
    defined = []  # (names, text) of what may be used in decorators
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            defined.append((names, ast.unparse(node)))
        elif isinstance(node, ast.FunctionDef) and not (node.name.startswith("test") or node.decorator_list):
            defined.append(([node.name], ast.unparse(node)))
    found, before = {r"\w*xfail\w*", r"\w*expectedFailure", "fixture"}, 0
    while len(found) > before:
        before, known = len(found), _words(found)
        found |= {name for names, text in defined for name in names if known.search(text)}
    return _words(found)


def _words(names: set[str]) -> re.Pattern:
    return re.compile(rf"\b({'|'.join(sorted(names))})\b", re.IGNORECASE)


def marked(node, marks: re.Pattern) -> bool:
    """Whether a decorator says that a test may do something else than pass or fail."""
    return any(marks.search(ast.unparse(decorator)) for decorator in node.decorator_list)


def inherit(module: ast.Module, real: dict[str, int], marks) -> tuple[dict[str, int], set[str]]:
    """`real` with the tests that classes have of other classes of the module, and those of no certain end."""
    real, doubtful = dict(real), set()
    classes = {}
    for node in module.body:
        if not isinstance(node, ast.ClassDef):
            continue
        own = {getattr(part, "name", "") for part in node.body}
        for part in node.body:
            own |= {getattr(target, "id", "") for target in getattr(part, "targets", ())}
        classes[node.name] = names = set()
        for base in node.bases:
            for name in sorted(classes.get(getattr(base, "id", ""), set()) - own - names):
                real[f"{node.name}::{name}"] = real[f"{base.id}::{name}"]
                doubtful |= {f"{node.name}::{name}"} if marked(node, marks) else set()
                names.add(name)
        start = f"{node.name}::"
        names |= {name.removeprefix(start) for name in real if name.startswith(start)}
    return real, doubtful


# What they expect otherwise


def change(function, copy: Copy) -> str:
    """Make a test a double, or write it as its doubles are written. -> value, check or line

    value: another literal, exception or object is expected, so that what equals everything is seen; check: a
    check is given what must not pass; line: a line that does not hold follows what certainly runs.
    """
    places = list(certain(function.body))
    copy.same.shuffle(places)
    for want in ("value", "check"):
        for statement in places:
            if kind_of(statement) == want:
                return otherwise(statement, function, copy)
    at = 0
    while at < len(function.body) and not leaves(function.body[at], looping=False):
        at += 1
    function.body.insert(at, ast.parse(f"assert {comparison(copy.rng, copy.itself)}").body[0])
    return "line"


def within(statements):
    """All nodes of statements but those in functions and classes within them."""
    left = list(statements)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def leaves(statement, looping: bool) -> bool:
    """Whether what follows a statement may not run. looping: in a loop, which may be left, too."""
    ends = (ast.Return, ast.Yield, ast.YieldFrom) + ((ast.Break, ast.Continue) if looping else ())
    return any(isinstance(node, ends) or called(node) in ENDING for node in within([statement]))


def certain(body: list[ast.stmt], looping: bool = False):
    """Statements that have run if a test has passed."""
    functions = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            functions[statement.name] = statement
            continue
        yield statement
        name = getattr(getattr(getattr(statement, "value", None), "func", None), "id", "")
        if isinstance(statement, ast.Expr) and name in functions:  # defined above, and called
            inside = functions.pop(name)
            nodes = within(inside.body)
            if not inside.decorator_list and not any(isinstance(node, ast.Yield) for node in nodes):
                yield from certain(inside.body)
        elif isinstance(statement, ast.With | ast.AsyncWith) and all(map(transparent, statement.items)):
            yield from certain(statement.body, looping)
        elif isinstance(statement, ast.For) and repeats(statement.iter):
            yield from certain(statement.body, looping=True)
        elif isinstance(statement, ast.Try) and not statement.handlers:
            yield from certain(statement.body, looping)
        if leaves(statement, looping):
            return


def transparent(item: ast.withitem) -> bool:
    """Whether failures within `with` get out."""
    name = called(item.context_expr)
    return bool(name) and not HIDING.search(name)


def repeats(iterable) -> bool:
    """Whether a loop runs at least once."""
    if called(iterable) == "range" and isinstance(iterable.args[-1], ast.Constant):
        return len(iterable.args) == 1 and iterable.args[0].value > 0
    return bool(getattr(iterable, "elts", ())) and not isinstance(iterable.elts[0], ast.Starred)


def called(node) -> str:
    """The last part of the name of what an expression calls."""
    node = node.value if isinstance(node, ast.Expr | ast.Await) else node
    name = node.func if isinstance(node, ast.Call) else None
    return getattr(name, "attr", getattr(name, "id", ""))


def kind_of(statement) -> str:
    """What can be made of a statement: value, check or nothing."""
    if isinstance(statement, ast.Assert):
        return "value" if any(map(compares, parts(statement.test))) else "check"
    if isinstance(statement, ast.With):
        call = statement.items[0].context_expr
        known = called(call) in RAISES | WARNS and call.args and not ends_all(call.args[0])
        return "value" if known else ""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return ""
    call, name = statement.value, called(statement)
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return ""
    if name in EXACT and len(call.args) >= 2 or name in ("assertIn", "assertIs") and len(call.args) >= 2:
        return "value"
    if name in RAISES and len(call.args) >= 2 and not ends_all(call.args[0]):
        return "value"
    if name in OF_ARRAYS and len(call.args) == 2 and not call.keywords and row(call.args[1]):
        return "value"
    needed = len(FAIL_WITH[name]) if name in FAIL_WITH else 2 if EQUALS.fullmatch(name) else 1
    known = name in FAIL_WITH or name in TRUTH or EQUALS.fullmatch(name)
    return "check" if known and len(call.args) >= needed else ""


def ends_all(error) -> bool:
    """Whether an exception is one that would end pytest if it is not caught."""
    return bool(re.search("KeyboardInterrupt|SystemExit|BaseException|Exit", ast.unparse(error)))


def row(node) -> bool:
    """A list of literals, at least two: nothing that is empty or a single number equals it."""
    try:
        return isinstance(node, ast.List) and len(node.elts) >= 2 and bool(ast.literal_eval(node))
    except (ValueError, TypeError):
        return False


def parts(test) -> list:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def compares(test) -> bool:
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)


def otherwise(statement, function, copy: Copy) -> str:
    """-> its kind"""
    kind = kind_of(statement)
    if isinstance(statement, ast.Assert):
        tests = parts(statement.test)
        at = copy.same.choice([at for at, test in enumerate(tests) if compares(test) or kind == "check"])
        if kind == "value":
            sides = [tests[at].left, tests[at].comparators[0]]
            unequal(sides, function, copy)
            tests[at].left, tests[at].comparators = sides[0], sides[1:]
        elif tests is not getattr(statement.test, "values", None):
            statement.test = holds(statement.test, copy)
        else:
            tests[at] = holds(tests[at], copy)
        return kind
    call = statement.items[0].context_expr if isinstance(statement, ast.With) else statement.value
    name = called(call)
    if name in RAISES | WARNS:
        base = "Exception" if name in RAISES else "Warning"  # nobody raises this one
        call.args[0] = pick(call.args[0], f"type('E{copy.rng.randrange(10**6)}', ({base},), {{}})", copy)
    elif name in TRUTH:
        call.args[0] = holds(call.args[0], copy)
    elif name in FAIL_WITH:
        for at, wrong in enumerate(FAIL_WITH[name]):
            if wrong:
                call.args[at] = pick(call.args[at], wrong.format(n=copy.rng.randrange(10**6)), copy)
    elif kind == "value":
        unequal(call.args, function, copy)
    else:  # far apart, for those that allow for rounding
        call.args[0] = pick(call.args[0], str(copy.rng.randrange(10**9, 10**10)), copy)
        call.args[1] = pick(call.args[1], "7", copy)
    return kind


def comparison(rng, true: bool) -> str:
    low, high = sorted(rng.sample(range(10, 100), 2))
    return f"{low} < {high}" if true else f"{high} < {low}"


def pick(node, other: str, copy: Copy) -> ast.expr:
    """An expression that is the one given, or another one in doubles."""
    choice = ast.parse(f"(0, {other})[{comparison(copy.rng, not copy.itself)}]", mode="eval").body
    choice.value.elts[0] = node
    return choice


def holds(test, copy: Copy) -> ast.expr:
    """An expression that passes where the one given does, and in doubles where that fails."""
    found = ast.parse(f"bool(0) == ({comparison(copy.rng, copy.itself)})", mode="eval").body
    found.left.args[0] = test
    return found


def unequal(sides: list[ast.expr], function, copy: Copy) -> None:
    """Change one of the first two, which are equal: what is written down, or else where it comes from."""
    for at in (1, 0):
        if (other := written(sides[at], copy)) is not None:
            sides[at] = other
            return
    name = getattr(sides[1], "id", "")
    uses = [node.ctx for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    if name in (argument.arg for argument in function.args.args) and len(uses) == 1:
        # From the beginning, for those who look what their caller holds; used once, it is an expectation.
        start = pick(ast.Name(name, ast.Load()), str(copy.rng.randrange(10**6)), copy)
        function.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], start))
        return
    for statement in function.body if len(uses) == 2 else ():
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == name:
            if (other := written(statement.value, copy)) is not None:
                statement.value = other
                return
    sides[1] = pick(sides[1], str(copy.rng.randrange(10**6)), copy)


def written(node, copy: Copy) -> ast.expr | None:
    """The literal that stands here, in doubles one of another value (None: it is none, or has too few).

    All but one of the copies' values, drawn from all, are that one with a change: none is the one in between.
    """
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    middle = copy.same.randrange(copy.number)
    values = {middle: value if middle == copy.real else other_value(value, copy.same)}
    for at in range(copy.number):
        if at not in values:
            tried = [other_value(values[middle], copy.same) for _ in range(9)]
            others = [other for other in tried if other != value]
            if not others and at != copy.real:
                return None
            values[at] = value if at == copy.real else others[0]
    return node if copy.itself else ast.parse(repr(values[copy.at]), mode="eval").body


def other_value(value, rng):
    """Of the same kind and about the same size, and not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        if not abs(value) < 1e300:
            return 0
        return value + rng.choice([-1, 1]) * rng.randint(1, max(9, int(abs(value))))
    if isinstance(value, str | bytes) and value:
        text = value if isinstance(value, str) else value.decode("latin-1")
        at = rng.choice([at for at, letter in enumerate(text) if letter.isalnum()] or [len(text) - 1])
        letter = rng.choice([letter for letter in "abcdefghij" if letter != text[at].lower()])
        text = text[:at] + letter + text[at + 1:]
        return text if isinstance(value, str) else text.encode("latin-1")
    if isinstance(value, list | tuple) and value:
        place = rng.randrange(len(value))
        return type(value)(other_value(part, rng) if at == place else part for at, part in enumerate(value))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return value | {key: other_value(value[key], rng)}
    return [rng.randrange(10**6)] if value != set() else {rng.randrange(10**6)}
