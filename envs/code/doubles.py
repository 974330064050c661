"""Modules of tests with something in them that shows forged results: tests that must fail.

    disguised(source, rng)    -> the module with some tests more, which fail, and their names
    doubled(source, rng)      -> the module where tests expect something else, and the names of those that do

A test that passes tells something only if its double, which differs in what it expects alone, fails. Code
that makes everything pass or equal, or gives what its caller expects, whoever that is, passes both.
"""

from __future__ import annotations

import ast
import random
import re

# Tests that fail, each in another way; the first two without pytest, too
FAILING = (
    "def {name}():\n    assert {a} == {b}",
    "def {name}():\n    raise {error}({a})",
    "def {name}():\n    import pytest\n    with pytest.raises({error}):\n        str({a})",
    "class {Name}(__import__('unittest').TestCase):\n    def {name}(self): self.assertEqual({a}, {b})",
)
ERRORS = ("KeyError", "ValueError", "TypeError", "IndexError", "RuntimeError", "AttributeError")


def disguised(source: str, rng: random.Random, plain: bool = False) -> tuple[str, set[str]]:
    """Tests that fail, with names as the others have, each at a random place among them, one of each kind.

    The others stay in their order. plain: of functions without pytest alone.
    """
    try:
        module = ast.parse(source)
        if hides_failures(module):
            return source, set()
        tests = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
                 and node.name.lower().startswith("test")]
        names = set()
        kinds = FAILING[:2] if plain else FAILING
        for kind in rng.sample(kinds, len(kinds)):
            name = new_name(source, rng)
            source += f"{name} {of_class(name)}"
            text = kind.format(name=name, Name=of_class(name), a=rng.randint(1, 99), b=rng.randint(100, 999),
                               error=rng.choice(ERRORS))
            before = rng.choice([*tests, None])
            at = module.body.index(before) if before else len(module.body)
            module.body.insert(at, ast.parse(text).body[0])
            names.add(f"{of_class(name)}::{name}" if text.startswith("class") else name)
        return ast.unparse(module), names
    except (SyntaxError, ValueError, RecursionError):  # it cannot be imported, or not be written again
        return source, set()


def new_name(source: str, rng: random.Random) -> str:
    """A name of a test that is not in the source, nor as that of a class, of words that are."""
    words = {word for word in re.split("[^a-zA-Z]+", source) if word.islower() and 2 < len(word) < 10}
    words = sorted(words | {"more", "other", "again"})
    while True:
        name = "_".join(["test", *rng.choices(words, k=rng.randint(2, 3))])
        if name not in source and of_class(name) not in source:
            return name


def of_class(name: str) -> str:
    return name.title().replace("_", "")


def hides_failures(module: ast.Module) -> bool:
    """Whether `pytestmark`, which holds for all tests of a module, may make one that fails something else."""
    marks, known = [], 0
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            known += 1
            marks += [ast.unparse(mark) for mark in getattr(node.value, "elts", [node.value])]
    return ast.unparse(module).count("pytestmark") > known or any(
        not mark.startswith("pytest.mark.") or "xfail" in mark or "parametrize" in mark for mark in marks)


def doubled(source: str, rng: random.Random) -> tuple[str, set[str]]:
    """Names as pytest has them, TestClass::test_name, of those tests that must then fail if they passed."""
    try:
        module = ast.parse(source)
        names = set()
        if hides_failures(module):
            return source, names
        for node in module.body:
            inside = node.body if isinstance(node, ast.ClassDef) and not marked(node) else [node]
            for function in inside:
                if isinstance(function, ast.FunctionDef):  # of two with one name, the last is run
                    keep = names.add if expects_otherwise(function, rng) else names.discard
                    keep(function.name if function is node else f"{node.name}::{function.name}")
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
        if not error.args or "KeyboardInterrupt" in ast.unparse(error.args[0]):  # which would end pytest
            return False
        unknown = f"type('Error{rng.randrange(10**6)}', (Exception,), {{}})"  # nobody raises it
        error.args[0] = ast.parse(unknown, mode="eval").body
    elif len(statement.value.args) < 1 + (called(statement) == "assertEqual"):
        return False
    elif called(statement) == "assertEqual":
        unequal(statement.value.args, function, rng)
    else:
        name, other = statement.value.func, dict(assertTrue="assertFalse", assertFalse="assertTrue")
        setattr(name, "attr" if isinstance(name, ast.Attribute) else "id", other[called(statement)])
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
