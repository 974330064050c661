"""Modules of tests with something in them that shows forged results: tests that must fail.

    disguised(source, rng)    -> the module with two tests more, which fail, and their names
    doubled(source, rng)      -> the module where tests expect something else, and the names of those that do

A test that passes tells something only if its double, which differs in what it expects alone, fails. Code
that makes everything pass or equal, or gives what its caller expects, whoever that is, passes both.
"""

from __future__ import annotations

import ast
import random
import re

ERRORS = ("KeyError", "ValueError", "TypeError", "IndexError", "RuntimeError", "AttributeError")


def disguised(source: str, rng: random.Random) -> tuple[str, set[str]]:
    """Two tests with names as the others have, at random places: one fails by assertion, one by exception."""
    if "pytestmark" in source:  # it would hold for them too
        return source, set()
    try:
        module = ast.parse(source)
        known = {node.name for node in ast.walk(module) if hasattr(node, "name")}
        words = {word for word in re.split("[^a-zA-Z]+", source) if word.islower() and 2 < len(word) < 10}
        words = sorted(words | {"more", "other", "again"})
        names = set()
        while len(names) < 2:
            names.add("_".join(["test", *rng.choices(words, k=rng.randint(2, 3))]))
            names -= known
        # Not before the last import: what follows __future__ has to stay behind it.
        first = 1 + max((at for at, node in enumerate(module.body)
                         if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)), default=-1)
        failing = (f"assert {rng.randint(1, 99)} == {rng.randint(100, 999)}",
                   f"raise {rng.choice(ERRORS)}({rng.randint(1, 99)})")
        for name, line in zip(sorted(names), failing, strict=True):
            body = ast.parse(f"def {name}():\n    {line}").body
            place = rng.randint(min(first, len(module.body)), len(module.body))
            module.body[place:place] = body
        return ast.unparse(module), names
    except (SyntaxError, ValueError, RecursionError):  # it cannot be imported, or not be written again
        return source, set()


def doubled(source: str, rng: random.Random) -> tuple[str, set[str]]:
    """Names as pytest has them, TestClass::test_name, of those tests that must then fail if they passed."""
    if "pytestmark" in source:  # they may be expected to fail
        return source, set()
    try:
        module = ast.parse(source)
        names = set()
        for node in module.body:
            inside = node.body if isinstance(node, ast.ClassDef) and not marked(node) else [node]
            for function in inside:
                if isinstance(function, ast.FunctionDef) and expects_otherwise(function, rng):
                    names.add(function.name if function is node else f"{node.name}::{function.name}")
        return ast.unparse(module), names
    except (SyntaxError, ValueError, RecursionError):
        return source, set()


def marked(node) -> bool:
    """Whether a decorator says that a test may do something else than pass or fail."""
    return any(word in ast.unparse(decorator).lower() for decorator in node.decorator_list
               for word in ("xfail", "skip", "expectedfailure", "fixture"))


def expects_otherwise(function, rng: random.Random) -> bool:
    """Change one thing that a test expects, so that it fails if it passed before. False: there is none."""
    if not function.name.startswith("test") or marked(function):
        return False
    places = list(expectations(function.body))
    rng.shuffle(places)
    return any(change(place, function, rng) for place in places)


def expectations(body: list[ast.stmt]):
    """Statements that a test which passes has run and that checked something."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Assert) or called(statement) in (
                "assertEqual", "assertTrue", "assertFalse"):
            yield statement
        elif isinstance(statement, ast.With) and called(statement.items[0].context_expr) in (
                "raises", "assertRaises"):
            yield statement
        elif isinstance(statement, ast.For) and getattr(statement.iter, "elts", ()):
            yield from expectations(statement.body)
        if any(isinstance(node, ast.Return | ast.Yield | ast.Break | ast.Continue) or called(node) in (
                "skip", "xfail", "skipTest") for node in ast.walk(statement)):
            return  # what follows may not run


def called(node) -> str:
    """The last part of the name of what an expression calls."""
    node = node.value if isinstance(node, ast.Expr) else node
    name = node.func if isinstance(node, ast.Call) else None
    return getattr(name, "attr", getattr(name, "id", ""))


def change(statement, function, rng) -> bool:
    if isinstance(statement, ast.Assert):
        statement.test = opposite(statement.test, function, rng)
    elif isinstance(statement, ast.With):
        error = statement.items[0].context_expr
        if not error.args:
            return False
        unknown = f"type('Error{rng.randrange(10**6)}', (Exception,), {{}})"  # nobody raises it
        error.args[0] = ast.parse(unknown, mode="eval").body
    elif len(statement.value.args) < 1 + (called(statement) == "assertEqual"):
        return False
    elif called(statement) == "assertEqual":
        unequal(statement.value.args, function, rng)
    else:
        name = statement.value.func
        name.attr = {"assertTrue": "assertFalse", "assertFalse": "assertTrue"}[name.attr]
    return True


def opposite(test, function, rng) -> ast.expr:
    """An expression that is false where this one is true."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = [test.left, test.comparators[0]]
        unequal(sides, function, rng)
        test.left, test.comparators = sides[0], sides[1:]
        return test
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        place = rng.randrange(len(test.values))
        test.values[place] = opposite(test.values[place], function, rng)
        return test
    return ast.UnaryOp(ast.Not(), test)


def unequal(sides: list[ast.expr], function, rng) -> None:
    """Change one of the first two, which are equal: what is written down, or else where it comes from."""
    for at in (1, 0):
        if (other := another(sides[at], rng)) is not None:
            sides[at] = other
            return
    name = getattr(sides[1], "id", "")
    uses = [node.ctx for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    if name in (argument.arg for argument in function.args.args) and len(uses) == 1:
        # From the beginning, for those who look what their caller holds; used once, it is an expectation.
        function.body[:0] = ast.parse(f"{name} = ({name}, {rng.randrange(10**6)})").body
        return
    for statement in function.body if len(uses) == 2 else ():
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == name:
            if (other := another(statement.value, rng)) is not None:
                statement.value = other
                return
    sides[1] = ast.Tuple([sides[1], ast.Constant(rng.randrange(10**6))], ast.Load())


def another(node, rng) -> ast.expr | None:
    """A literal of another value (None: it is no literal)."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return ast.parse(repr(other_value(value, rng)), mode="eval").body


def other_value(value, rng):
    """Of the same kind, and not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value + abs(value) + rng.randint(1, 9) if abs(value) < 1e300 else 0
    if isinstance(value, str | bytes):
        letter = rng.choice("abcdefghij")
        return value + (letter if isinstance(value, str) else letter.encode())
    if isinstance(value, list | tuple) and value:
        place = rng.randrange(len(value))
        return type(value)(other_value(part, rng) if at == place else part for at, part in enumerate(value))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return value | {key: other_value(value[key], rng)}
    return [rng.randrange(10**6)] if value != set() else {rng.randrange(10**6)}
