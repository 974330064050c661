"""What tests expect, kept away from the process in which they run beside the code under test.

    taken = expectations.taken_out("def test_total(): assert total([3, 4]) == 7")
    print(taken.source)                               # def test_total(): __told__(10025, total([3, 4]))
    taken.wrong("test_total", [(10025, None, 8)])     # ({10025}, set()): 8 was reported, and 7 is expected

A comparison with a value that is written down becomes a report of its other side, and is made here, where no
code under test is. That code may report what it likes: it does not know what is expected, nor how it is
compared, so it has to compute it or to guess. What cannot be taken out (both sides are computed, or failures
are caught) is compared there as it was, and counts as known: `bits` says how much is left to guess.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import datetime
import decimal
import fractions
import json
import math
import operator
import re

OPERATORS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not,
    "In": lambda value, known: value in known, "NotIn": lambda value, known: value not in known}
MIRRORED = dict(Eq="Eq", NotEq="NotEq", Lt="Gt", LtE="GtE", Gt="Lt", GtE="LtE", Is="Is", IsNot="IsNot")
# unittest's checks of a value and of one that is written down
OF_UNITTEST = {
    "assertEqual": "Eq", "assertEquals": "Eq", "assertListEqual": "Eq", "assertTupleEqual": "Eq",
    "assertDictEqual": "Eq", "assertSetEqual": "Eq", "assertSequenceEqual": "Eq", "assertNotEqual": "NotEq",
    "assertMultiLineEqual": "Eq", "assertIs": "Is", "assertIsNot": "IsNot", "assertIn": "In",
    "assertNotIn": "NotIn", "assertGreater": "Gt", "assertGreaterEqual": "GtE", "assertLess": "Lt",
    "assertLessEqual": "LtE", "assertAlmostEqual": "Close"}
OF_ONE = {"assertTrue": ("true", True), "assertFalse": ("false", False), "assertIsNone": ("Is", None),
          "assertIsNotNone": ("IsNot", None)}
RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
HIDING = re.compile("rais|suppress|expect|error|fail|ignore|except|skip|xfail", re.IGNORECASE)
CHECKING = re.compile("assert|check|expect|verify|^fail$|rais|warn|skip", re.IGNORECASE)
# What follows such a call may not run.
ENDING = {"skip", "xfail", "skipTest", "importorskip", "exit", "_exit"}
MAKERS = {  # what may be called in a value that is written down
    "set": set, "frozenset": frozenset, "dict": dict, "list": list, "tuple": tuple, "float": float,
    "bytes": lambda value: bytes([*value]), "complex": complex, "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time,
    "timedelta": datetime.timedelta}
MOST_TEXT = 20_000  # characters of a value that is written down
MOST_HASHED = 500  # items of a set or dict that is reported: code may choose some with one hash
MOST_BITS = 10.0  # of one value, however long
BITS_OF_A_PLACE = 4.0  # of one that stands in the test for something else, too


@dataclasses.dataclass(frozen=True)
class Close:
    """A number, or several, up to rounding, as pytest.approx or unittest's assertAlmostEqual have it."""

    wanted: object
    relative: float
    absolute: float

    def __eq__(self, value):
        wanted = self.wanted
        if isinstance(wanted, dict):
            return (isinstance(value, dict) and value.keys() == wanted.keys()
                    and all(self.near(value[key], wanted[key]) for key in wanted))
        if isinstance(wanted, list | tuple):
            return (isinstance(value, list | tuple) and len(value) == len(wanted)
                    and all(map(self.near, value, wanted)))
        return self.near(value, wanted)

    def near(self, value, wanted) -> bool:
        if value == wanted or isinstance(wanted, bool) or not isinstance(wanted, int | float | complex):
            return value == wanted
        return abs(value - wanted) <= max(self.absolute, self.relative * abs(wanted)) < math.inf


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison: how, and with what; one value for each row where it is in a loop over a table."""

    holds: str  # of OPERATORS, or true, false, raises
    wanted: tuple
    text: str  # as it was written

    def passes(self, row: int | None, value) -> bool:
        if not 0 <= (row or 0) < len(self.wanted):
            return False
        wanted = self.wanted[row or 0]
        if self.holds == "raises":
            return raised(value, *wanted)
        if self.holds in ("true", "false"):
            return value is (self.holds == "true")
        try:
            return bool(OPERATORS[self.holds](value, wanted))
        except (TypeError, ValueError, ArithmeticError, RecursionError):
            return False

    def guess(self, row: int, shown: str, source: str) -> tuple[str, float]:
        """What has to be guessed, and how many bits it has. shown, source: without blanks"""
        wanted = self.wanted[row]
        if self.holds not in ("Eq", "Is"):
            return self.holds, 0.0  # many values hold
        what, bits = repr(wanted), bits_of(wanted)
        text = squeezed(what).strip("'\"")
        if bits > BITS_OF_A_PLACE and text in source:  # it is one of the values in the test
            bits = BITS_OF_A_PLACE
        if squeezed(self.text) in shown or bits > 7 and text in shown:
            bits = 0.0
        return what, bits


def raised(value, names: tuple[str, ...], pattern: str) -> bool:
    """Whether what was raised, (names of its classes, what it says), is one of these and says so."""
    try:
        classes, text = value
        return not {*names}.isdisjoint(classes) and re.search(pattern, text) is not None
    except (TypeError, ValueError, re.error):
        return False


@dataclasses.dataclass(frozen=True)
class Taken:
    """A module of tests without what they expect."""

    source: str
    checks: dict[int, Check]
    needed: dict[str, frozenset]  # test, without its file -> (check, row) that it has reported if it passes
    known: frozenset[str]  # tests in which something is compared where the code under test runs

    def wrong(self, test: str, reports: list) -> tuple[set[int], set[int]]:
        """The checks that do not hold by a test's reports, [(check, row, value)], and those left out."""
        needed = self.needed.get(test.partition("[")[0], frozenset())
        missing = needed - {(number, row) for number, row, _ in reports}
        return {number for number, row, value in reports if number not in self.checks
                or not self.checks[number].passes(row, value)}, {number for number, _ in missing}

    def bits(self, tests=None, shown: str = "") -> float:
        """What is left to guess for code that computes nothing: it is right once in 2 ** bits.

        tests: those that fail until the work is done; of each the easiest check alone may do so. None: there
        is nothing yet, and each check of each test has to be guessed. shown: the task, with examples.
        Equal values count once, and the ways in which they may be arranged.
        """
        shown, source = squeezed(shown), squeezed(self.source)
        each = {test: [self.checks[number].guess(row or 0, shown, source) for number, row in needed]
                for test, needed in self.needed.items()}
        if tests is None:
            found = [guess for guesses in each.values() for guess in guesses]
        else:
            names = {test.partition("[")[0] for test in tests} - self.known
            found = [min(each[name], key=operator.itemgetter(1)) for name in names if each.get(name)]
        found = [guess for guess in found if guess[1]]
        counts = collections.Counter(what for what, _ in found)
        ways = math.lgamma(len(found) + 1) - sum(math.lgamma(count + 1) for count in counts.values())
        return min(sum(bits for _, bits in found), sum(dict(found).values()) + ways / math.log(2))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def bits_of(value) -> float:
    """How many bits a guess of a value has to get right: small numbers and short texts are tried first."""
    if value is None or isinstance(value, bool):
        return 1.0
    if isinstance(value, Close):
        return bits_of(value.wanted)
    if isinstance(value, float) and math.isfinite(value) and not value % 1:
        value = int(value)
    if isinstance(value, int):
        return min(MOST_BITS, math.log2(4 + 0.6 * min(abs(value), 10**9)))  # of a digit below log2(10)
    if isinstance(value, str | bytes):
        return min(MOST_BITS, 2 + 2.5 * len(value))
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return min(MOST_BITS, 2 + sum({repr(item): bits_of(item) for item in value}.values()))
    return 6.0


def read(text: str) -> tuple[int, int | None, object]:
    """(check, row, value) of what a test has reported; a value of no known kind is UNKNOWN."""
    failures = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
    try:
        number, row, said = json.loads(text)
        if not isinstance(number, int) or not isinstance(row, int | None):
            return -1, None, UNKNOWN
    except failures:
        return -1, None, UNKNOWN
    try:
        return number, row, rebuilt(json.loads(said))
    except failures:
        return number, row, UNKNOWN


UNKNOWN = object()
READERS = {
    "int": lambda text: int(text, 16), "bytes": lambda text: text.encode("latin-1"), "complex": complex,
    "Decimal": decimal.Decimal, "Fraction": lambda pair: fractions.Fraction(*pair),
    "date": datetime.date.fromisoformat, "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat, "timedelta": lambda parts: datetime.timedelta(*parts),
    "list": lambda items: [rebuilt(item) for item in items],
    "tuple": lambda items: tuple(rebuilt(item) for item in items),
    "set": lambda items: frozenset(rebuilt(item) for item in items),
    "dict": lambda pairs: {rebuilt(key): rebuilt(value) for key, value in pairs}}


def rebuilt(said):
    if not isinstance(said, list):
        return said
    if said[0] in ("set", "dict") and len(said[1]) > MOST_HASHED:
        raise ValueError("too many items")
    return READERS[said[0]](*said[1:])


def taken_out(source: str, keep=()) -> Taken:
    """keep: numbers of checks that stay as they are, since what they compare is no plain value; None: all."""
    if keep is None:
        return Taken(source, {}, {}, frozenset())
    blocked = set()  # names of values that are used for something else, too
    try:
        while True:
            module = ast.parse(source)
            taking = _Taking(module, keep, blocked)
            if not (left := taking.left_over() - blocked):
                break
            blocked |= left
        if taking.checks:
            source = ast.unparse(ast.fix_missing_locations(module))
        return Taken(source, taking.checks, taking.needed, frozenset(taking.known))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it cannot be imported, or not be written
        return Taken(source, {}, {}, frozenset())


class _Taking:
    """Takes out of a module, which it changes, what its tests expect."""

    def __init__(self, module: ast.Module, keep, blocked: set[tuple[str, str]]):
        self.module, self.keep, self.blocked = module, keep, blocked
        self.checks, self.needed, self.known = {}, {}, set()
        self.values = {}  # (scope, name) -> the values that a name has, one for each row of its table
        self.scopes = {}  # (scope, name) -> the node in which it is known
        self.rows = collections.Counter()  # (scope, name) -> reports that say with it which row it is
        self.marks = marking(module)
        self.helpers = helpers(module)
        self.constants("", module)
        self.tests_in(module, "", hides_failures(module))
        self.inherit()
        self.drop("", module)

    def tests_in(self, node, inside: str, marked: bool):
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                self.tests_in(child, f"{inside}{child.name}::", marked or is_marked(child, self.marks))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test"):
                self.test(f"{inside}{child.name}", child, marked or is_marked(child, self.marks))

    def test(self, name: str, function, marked: bool):
        self.name, self.found = name, set()
        self.scope = f"{name} {function.lineno}"  # of two with one name, the last is run
        self.own = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
        self.known.discard(name)
        self.note(any(getattr(node, "id", getattr(node, "attr", "")) in self.helpers - self.own
                      for node in ast.walk(function)))
        if marked or any(isinstance(node, ast.Yield | ast.YieldFrom) for node in within(function.body)):
            self.note(True)
        else:
            self.constants(self.scope, function)
            function.body = self.block(function.body, certain=True)
            self.drop(self.scope, function)
        self.needed[name] = frozenset(self.found)

    def inherit(self):
        """Classes have the tests of other classes of the module."""
        for node in self.module.body:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in [base.id for base in node.bases if isinstance(base, ast.Name)]:
                for name in [name for name in self.needed if name.startswith(f"{base}::")]:
                    own = node.name + name.removeprefix(base)
                    if own not in self.needed:
                        self.needed[own] = self.needed[name]
                        if name in self.known or is_marked(node, self.marks):
                            self.known.add(own)

    # Values that have names

    def constants(self, scope: str, node):
        """Names that are bound once, to a value that is written down."""
        self.bound = collections.Counter(bindings(node))
        for part in node.body:
            if isinstance(part, ast.Assign) and isinstance(target := part.targets[0], ast.Name):
                value = written(part.value)
                if len(part.targets) == 1 and value and self.bound[target.id] == 1:
                    self.bind(scope, target.id, value, node)

    def bind(self, scope: str, name: str, values: tuple, node):
        if (scope, name) not in self.blocked:
            self.values[scope, name] = values
            self.scopes[scope, name] = node

    def drop(self, scope: str, node):
        """Leave out the constants of a scope, and write numbers of rows in the place of columns."""
        names = {name for place, name in self.values if place == scope}
        node.body = [part for part in node.body if not (
            isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name)
            and part.targets[0].id in names)] or [ast.Pass()]

    def left_over(self) -> set[tuple[str, str]]:
        """Names whose values something else uses, too."""
        found = set()
        for (scope, name), node in self.scopes.items():
            used = sum(isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)
                       for part in ast.walk(node))
            if used > self.rows[scope, name]:
                found.add((scope, name))
        return found

    def literal(self, node) -> tuple[tuple, tuple | None] | None:
        """(values, the key of the name that says which row) of an expression in which nothing is computed."""
        if isinstance(node, ast.Name):
            for scope in (self.scope, ""):
                if (values := self.values.get((scope, node.id))) and (scope or not self.bound[node.id]):
                    return values, (scope, node.id) if isinstance(values, _Column) else None
            return None
        values = written(node)
        return values and (values, None)

    # Statements

    def block(self, body: list, certain: bool, looping: bool = False) -> list:
        """What stands in the place of statements. certain: they have all run if the test has passed."""
        functions, found = {}, []
        for node in body:
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = node, False
            name = called(node) if isinstance(node, ast.Expr) else ""
            if name in functions and isinstance(node.value.func, ast.Name):  # defined above, and called
                functions[name] = functions[name][0], certain
            if leaves(node, looping):
                break
        certain_here = certain
        for node in body:
            if isinstance(node, ast.FunctionDef):
                runs = functions.get(node.name, (node, False))[1] and not node.decorator_list
                plain = not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in within(node.body))
                node.body = self.block(node.body, runs and plain)
                found.append(node)
                continue
            found += self.statement(node, certain_here, looping)
            if leaves(node, looping):
                certain_here = False
        return found

    def statement(self, node, certain: bool, looping: bool) -> list:
        if isinstance(node, ast.Assert):
            found = [self.comparison(test, certain) or ast.Assert(test, node.msg)
                     for test in parts(node.test)]
            self.note(any(isinstance(part, ast.Assert) for part in found))
            return found
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if taken := self.call(node.value, certain):
                return [taken]
            self.note(called(node) not in self.own and CHECKING.search(called(node)))
        elif isinstance(node, ast.With | ast.AsyncWith):
            if all(map(transparent, node.items)):
                node.body = self.block(node.body, certain, looping)
            else:
                self.note(not self.raising(node, certain))
        elif isinstance(node, ast.For):
            table = self.table(node) if certain else {}
            node.body = self.block(node.body, bool(table) or certain and repeats(node.iter), looping=True)
            node.orelse = self.block(node.orelse, False, looping)
            self.number_rows(node, table)
        elif isinstance(node, ast.Try) and not node.handlers:
            node.body = self.block(node.body, certain, looping)
            node.finalbody = self.block(node.finalbody, certain, looping)
        elif isinstance(node, ast.If | ast.While):
            node.body = self.block(node.body, False, looping or isinstance(node, ast.While))
            node.orelse = self.block(node.orelse, False, looping)
        else:  # failures may be caught
            self.note(any(isinstance(part, ast.Assert | ast.Raise) or CHECKING.search(called(part))
                          for part in within([node])))
        return [node]

    def note(self, known):
        if known:
            self.known.add(self.name)

    # Comparisons

    def comparison(self, test, certain: bool):
        """The report that stands in the place of what is asserted; None: there is none."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self.compared(type(test.ops[0]).__name__, test.left, test.comparators[0], test, certain)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.take("false", ((False,), None), truth(test.operand), test, certain)
        if isinstance(test, ast.Compare | ast.BoolOp | ast.Constant):
            return None
        return self.take("true", ((True,), None), truth(test), test, certain)

    def compared(self, holds: str, left, right, test, certain: bool):
        sides = self.literal(left), self.literal(right)
        if (sides[0] is None) == (sides[1] is None):
            return None
        value, wanted = (left, sides[1]) if sides[1] else (right, sides[0])
        if value is right:
            holds = MIRRORED.get(holds)  # many values hold what `7 in value` asks for
        if holds is None or holds in ("Is", "IsNot") and not all(
                one is None or isinstance(one, bool) for one in wanted[0]):
            return None
        return self.take(holds, wanted, value, test, certain)

    def call(self, node: ast.Call, certain: bool):
        """Of unittest's checks."""
        name, given = called(node), node.args
        if any(isinstance(argument, ast.Starred) for argument in given):
            return None
        if name in OF_ONE and given:
            holds, wanted = OF_ONE[name]
            if holds in ("true", "false"):
                test = given[0] if wanted else ast.UnaryOp(ast.Not(), given[0])
                return self.comparison(test, certain)
            return self.take(holds, ((wanted,), None), given[0], node, certain)
        if name not in OF_UNITTEST or len(given) < 2:
            return None
        if (holds := OF_UNITTEST[name]) != "Close":
            return self.compared(holds, *given[:2], node, certain)
        places = [written(keyword.value) for keyword in node.keywords if keyword.arg == "places"]
        places = places[0][0] if places and places[0] else 7
        wanted = self.literal(given[1])
        if wanted is None or len(given) > 2 or any(keyword.arg == "delta" for keyword in node.keywords):
            return None
        close = tuple(Close(one, 0.0, 0.5 * 10.0 ** -places) for one in wanted[0])
        return self.take("Eq", (close, wanted[1]), given[0], node, certain)

    def raising(self, node, certain: bool) -> bool:
        """Take out which exception is expected, and what it says, where these are written down."""
        call = node.items[0].context_expr
        if len(node.items) > 1 or called(call) not in RAISES or not call.args:
            return False
        classes = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
        said = [written(one) for one in [*call.args[1:], *(keyword.value for keyword in call.keywords)]]
        if not all(isinstance(one, ast.Name | ast.Attribute) for one in classes) or len(said) > 1 or not all(
                one and isinstance(one[0], str) for one in said):
            return False
        names = tuple(ast.unparse(one).rpartition(".")[2] for one in classes)
        report = self.take("raises", (((names, said[0][0] if said else ""),), None), None, call, certain)
        if report:
            node.items[0].context_expr = report.value
        return report is not None

    def take(self, holds: str, wanted, value, test, certain: bool):
        """-> the report; None: the check stays"""
        place = value if value is not None else test
        number = place.lineno * 10_000 + place.col_offset
        if number in self.keep:
            return None
        values, row = wanted
        self.checks[number] = Check(holds, tuple(values), ast.unparse(test))
        given = [ast.Constant(number)] + [value] * (value is not None)
        if row:
            self.rows[row] += 1
            given.append(ast.Name(row[1], ast.Load()))
        if certain:
            self.found |= {(number, at if row else None) for at in range(len(values))}
        else:
            self.known.add(self.name)
        name = "__raises__" if holds == "raises" else "__told__"
        return ast.Expr(ast.Call(ast.Name(name, ast.Load()), given, []))

    # Loops over tables

    def table(self, node: ast.For) -> dict[str, int]:
        """Bind the columns of rows that are written down. -> {name: its place in a row}"""
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else []
        rows = node.iter.elts if isinstance(node.iter, ast.List | ast.Tuple) else []
        fits = rows and all(isinstance(row, ast.List | ast.Tuple) and len(row.elts) == len(targets)
                            for row in rows) and all(isinstance(target, ast.Name) for target in targets)
        if not fits or any(leaves(part, looping=True) for part in node.body):
            return {}
        columns = {}
        for at, target in enumerate(targets):
            values = [written(row.elts[at]) for row in rows]
            if all(values) and self.bound[target.id] == 1:
                self.bind(self.scope, target.id, _Column(value for value, in values), node)
                columns[target.id] = at
        return columns

    def number_rows(self, node: ast.For, columns: dict[str, int]):
        for name, at in columns.items():
            key = self.scope, name
            if not self.rows[key]:
                self.values.pop(key, None)
                self.scopes.pop(key, None)
            elif key in self.values:
                for number, row in enumerate(node.iter.elts):
                    row.elts[at] = ast.Constant(number)


class _Column(tuple):
    """The values of a name in the rows of a table."""


# Syntax


ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.Pow: operator.pow}


def written(node) -> tuple | None:
    """(value,) of an expression in which nothing is computed but numbers."""
    try:
        if len(ast.unparse(node)) > MOST_TEXT:
            return None
        return (evaluated(node),)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


def evaluated(node):
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        sides = evaluated(node.left), evaluated(node.right)
        if is_large(node.op, *sides):
            raise ValueError("too large")
        return ARITHMETIC[type(node.op)](*sides)
    if isinstance(node, ast.Call):
        name, given = called(node), [evaluated(argument) for argument in node.args]
        named = {keyword.arg: evaluated(keyword.value) for keyword in node.keywords}
        if None in named:
            raise ValueError("**")
        if name == "approx" and len(given) == 1 and named.keys() <= {"rel", "abs"}:
            relative = named.get("rel", 0.0 if "abs" in named else 1e-6)
            return Close(given[0], relative, named.get("abs", 1e-12))
        if name in MAKERS:
            return MAKERS[name](*given, **named)
        raise ValueError(name)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return kind(evaluated(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {evaluated(key): evaluated(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def is_large(operation, left, right) -> bool:
    """Whether what would come of it takes more memory than a value that is written down."""
    if isinstance(operation, ast.Pow):
        return max(abs(left), abs(right)) > 100
    lengths = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)]
    counted = isinstance(operation, ast.Mult) and (hasattr(left, "__len__") or hasattr(right, "__len__"))
    return counted and lengths[0] * lengths[1] > MOST_TEXT


def bindings(node):
    """The names that are bound anywhere within a scope, each as often as it is."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.Global | ast.Nonlocal):
            yield from part.names
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]
        elif part is not node and isinstance(getattr(part, "name", None), str):
            yield part.name


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


def parts(test) -> list:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def truth(test) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name("bool", ast.Load()), [test], []), test)


# Marks and helpers


def helpers(module: ast.Module) -> set[str]:
    """Functions that are no tests, and check something."""
    return {node.name for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test")
            and any(isinstance(part, ast.Assert) or CHECKING.search(called(part)) for part in ast.walk(node))}


def hides_failures(module: ast.Module) -> bool:
    """Whether `pytestmark`, which holds for all tests of a module, may make one that fails something else."""
    marks, known = [], 0
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            known += 1
            marks += [ast.unparse(mark) for mark in getattr(node.value, "elts", [node.value])]
    return ast.unparse(module).count("pytestmark") > known or any(
        not re.match(r"(pytest\.)?mark\.", mark) or "xfail" in mark for mark in marks)


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


def is_marked(node, marks: re.Pattern) -> bool:
    """Whether a decorator says that a test may do something else than pass or fail."""
    return any(marks.search(ast.unparse(decorator)) for decorator in node.decorator_list)
