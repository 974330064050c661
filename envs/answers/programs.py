"""Programs in replies, and tests in rows: which code is judged, and what runs before and after it.

A solution may assume what the harnesses of HumanEval, MBPP and their kin let it assume: it runs after the
imports and helpers of the row's prompt (where that is code, or holds some in a fence) and after the columns
`test_setup_code`, `test_imports`, `setup_code`, `setup` and `imports`; it may be the body of the prompt's
function alone. Tests are asserts, a list of them, a check(candidate), functions test_*, or classes of them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
import sys
import textwrap

import envs
from envs.code import testing

SET_UP = ("test_setup_code", "test_setup", "test_imports", "setup_code", "setup", "imports")
PROMPTS = ("prompt", "code_prompt", "starter_code")  # columns that may hold the function's head
MOST_CODE = 20_000  # characters of a reply's program
MOST_TESTS = 1_000_000  # characters of a row's tests
MOST_BLOCKS = 50
NO_CODE = (SyntaxError, ValueError, RecursionError, MemoryError)  # of a text; the last two: nested too deeply
_FENCES = (
    re.compile(r"^(?P<indent>[ \t>]{0,40})(?P<mark>`{3,9}|~{3,9})(?![`~])"
               r"(?!\w{0,9}[ \t]+(?:def|class|import|from)\b)[^\n`]{0,80}\n(?P<code>.*?)"
               r"(?:^(?P=indent)(?P=mark)(?=[^\w\n]|$)|(?<=\S)(?P=mark)[ \t]{0,40}$|\Z)", re.DOTALL | re.M),
    re.compile(r"```(?:[Pp]ython3?|py)?[ \t]{0,40}(?P<code>(?:def|class|import|from|\w{1,40}\s?=)"
               r"\s?[^`]{1,20000})```"),
    re.compile(r"\[(?:PYTHON|BEGIN|CODE)\](?P<code>.*?)(?:\[/?(?:PYTHON|DONE|END|CODE)\]|\Z)", re.DOTALL),
    re.compile(r"<(?:code|python)[^>\n]{0,50}>(?P<code>.*?)(?:</(?:code|python)>|\Z)", re.DOTALL),
    re.compile(r"\A(?P<code>.*\n)[ \t]{0,40}(?:```|~~~)\s*\Z", re.DOTALL))  # a fence that only closes
_DEFINES = re.compile(r"^(?:async\s+def|def|class)\s+(\w+)|^(\w+)\s{0,40}(?::[^=\n]{1,80})?=(?!=)", re.M)
_IMPORTS = re.compile(r"^(?:from\s+[\w.]+\s+)?import\s+(.+)$", re.M)
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.M)


# The reply


def blocks_of(text: str) -> list[str]:
    """The code blocks of a text, in whatever marks; without any, all of it."""
    text = text.lstrip("\ufeff")
    for fence in _FENCES:
        if found := [textwrap.dedent(match["code"]) for match in fence.finditer(text)]:
            return found[-MOST_BLOCKS:]
    return [text]


def defined(code: str, imports: bool = False) -> set[str]:
    names = {match[1] or match[2] for match in _DEFINES.finditer(code)}
    for match in _IMPORTS.finditer(code) if imports else ():
        names |= {(name.split() or [""])[-1].strip("()") for name in match[1].split(",")}  # a as b
    return names


def code_of(text: str, data: dict) -> str | None:
    """The block of a reply that defines what is tested, with those that define what it uses before it; where
    none does, the last one, which may be the body of a function."""
    entry = data.get("entry_point", "")
    wanted = tested_names(() if entry else tuple(map(str, data.get("answers", ()))), entry)
    blocks = blocks_of(text[-MOST_CODE:])
    defining = [k for k, block in enumerate(blocks) if wanted & defined(block)]
    last = defining[-1] if defining else len(blocks) - 1
    code, length = blocks[last], 0
    for other in [*blocks[:last][::-1], *blocks[last + 1:]]:
        length += len(code)
        if length > 10 * MOST_CODE:
            break
        missing = (set(re.findall(r"\w+", code)) | wanted) - defined(code, imports=True)
        if missing & defined(other, imports=True):
            code = f"{other}\n\n{code}"
    return code.strip("\n") if code.strip() else None


@functools.lru_cache(1024)
def tested_names(tests: tuple[str, ...], entry_point: str) -> set[str]:
    """What tests expect a solution to define."""
    entry = {re.split(r"\W", entry_point)[0]} - {""}
    try:
        nodes = [*ast.walk(ast.parse("\n".join(tests)))]
    except NO_CODE:
        return entry
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar))}
    own |= {(name.asname or name.name).partition(".")[0] for node in nodes
            if isinstance(node, ast.Import) or isinstance(node, ast.ImportFrom) and node.module != "solution"
            for name in node.names}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {*dir(builtins), "__name__"}
    return entry | {node.id for node in nodes if isinstance(node, ast.Name)} - own


# What it runs after


def parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except NO_CODE:
        return None


def head_of(data: dict) -> str:
    """The code of a row's prompt: imports, helpers, the head of the function that is asked for. "": none"""
    texts = [data.get("row", {}).get(name) for name in PROMPTS] + [data.get("question", "")]
    for text in texts:
        for code in heads_of(text) if isinstance(text, str) else ():
            tree = parsed(code) or parsed(f"{code.rstrip()}\n    pass")
            if tree and any(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))
                            for node in tree.body):
                return code.rstrip()
    return ""


def heads_of(text: str) -> list[str]:
    """What in a prompt may be code: all of it, a block, or what begins with the first line of code."""
    start = re.search(r"^(?:import|from|def|class|@)\s?\w", text, re.M)
    return [text, *blocks_of(text), *([text[start.start():]] if start else [])]


def program(code: str, data: dict) -> str:
    """A reply's code as a module, after what it may assume."""
    row, name = data.get("row", {}), re.split(r"\W", data.get("entry_point", ""))[0]
    setup = []
    for column in SET_UP:
        value = row.get(column) or ""
        if isinstance(value, str) and value.strip().startswith("["):  # a list as text
            with contextlib.suppress(ValueError):
                value = envs.parsed(value)
        lines = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        setup.append(without_words(parsed(lines)))
    head = head_of(data)
    if name and name not in defined(code) and name in defined(head):
        setup.append(completed(head, code))
    else:
        setup += [without_words(parsed(head) or parsed(f"{head}\n    pass"), name), code]
    text = "\n".join(setup)
    return "".join(_FUTURE.findall(text)) + _FUTURE.sub("", text)


def without_words(tree: ast.Module | None, name: str = "") -> str:
    """What a module defines and calls, but for the function of a name; what is no code is left out."""
    kept = []
    for node in tree.body if tree else ():
        is_word = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
        if not is_word and (not name or getattr(node, "name", "") != name):
            kept.append(node)
    try:
        return ast.unparse(ast.Module(kept, []))
    except RecursionError:
        return ""


def completed(head: str, body: str) -> str:
    """The function that a head and a body make, whose first line, or all, may have lost its indentation."""
    first, *rest = body.split("\n")
    forms = [textwrap.indent(body, "    "), "\n".join([f"    {first}", *rest])]
    for indented in forms if first[:1].strip() else [body]:
        try:
            compile(whole := f"{head}\n{indented}", "solution", "exec")
            return whole
        except NO_CODE:
            pass
    return f"{head}\n{body}"


def passes(code: str, data: dict) -> bool:
    module = test_module(data["answers"], data)
    results = testing.run_tests({"solution.py": program(code, data).encode(errors="replace")},
                                {"test_row.py": module.encode()}, plain=True, timeout=data["timeout"])
    return results == {"test_row.py::test_row": "PASSED"}


# The tests


def guess(tests: list, row: dict, shown: str) -> float:
    """How often code that computes nothing passes, at most, though it knows what is shown and the judge."""
    return testing.guess({"test_row.py": test_module(tests, row).encode()}, None, str(shown))


def test_module(tests: list, row: dict) -> str:
    """A module in which what the tests say is one function. ValueError: what cannot be run about them"""
    try:
        body = ast.parse("\n".join(map(str, tests))).body
    except SyntaxError as error:
        raise ValueError(f"tests that are not Python ({error})") from error
    body = [node for node in body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    for node in ast.walk(ast.Module(body, [])):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if name.partition(".")[0] not in (*sys.stdlib_module_names, "solution"):
                raise ValueError(f"tests that import {name}; expected the standard library alone")
    body += ast.parse("\n".join(calls_of(body, str(row.get("entry_point") or "")))).body
    if not any(isinstance(node, (ast.Assert, ast.Raise)) or isinstance(node, ast.Call)
               and re.search("assert|raises|fail|check", ast.unparse(node.func), re.IGNORECASE)
               for node in ast.walk(ast.Module(body, []))):
        raise ValueError("tests that assert nothing")
    stars = [node for node in body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    function = ast.parse("def test_row(): pass").body[0]
    function.body = [node for node in body if node not in stars] or function.body
    # By name: a solution that defines `all` or `round` has them for itself.
    names = sorted(tested_names(tuple(map(str, tests)), str(row.get("entry_point") or "")))
    needed = [f"try:\n    from solution import {name}\nexcept ImportError:\n    pass\n" for name in names]
    stars = [node for node in stars if node.module != "solution"]
    module = ast.Module([*ast.parse("import solution\n" + "".join(needed)).body, *stars, function], [])
    return ast.unparse(ast.fix_missing_locations(module))


def calls_of(body: list, entry_point: str) -> list[str]:
    """The calls that run what the tests only define."""
    statements = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    called = {node.func.id for node in ast.walk(ast.Module(statements, []))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    calls = []
    for node in body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            raise ValueError(f"the test {node.name} is async; expected plain functions")
        if isinstance(node, ast.ClassDef):
            calls += class_calls(node)
        if not isinstance(node, ast.FunctionDef) or node.name in called:
            continue
        needed = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
        if node.name == "check" and needed == 1:
            if not entry_point:
                raise ValueError("tests check(candidate), and no column entry_point that names the candidate")
            calls.append(f"check({entry_point})")
        elif node.name.startswith("test"):
            if needed:
                raise ValueError(f"the test {node.name} has parameters; expected none")
            calls.append(f"{node.name}()")
    return calls


def class_calls(node: ast.ClassDef) -> list[str]:
    """The calls that run a class of tests, unittest's or pytest's."""
    if any(ast.unparse(base).endswith("TestCase") for base in node.bases):
        return ["import unittest", f"_tests = unittest.defaultTestLoader.loadTestsFromTestCase({node.name})",
                "_result = unittest.TestResult()", "_tests.run(_result)",
                "assert _result.testsRun and not _result.skipped and not _result.expectedFailures",
                "assert _result.wasSuccessful(), _result.failures + _result.errors"]
    if not node.name.startswith("Test"):
        return []
    names = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    if "setup_method" in names or "setUp" in names or node.decorator_list:
        raise ValueError(f"the class of tests {node.name} has fixtures; expected unittest.TestCase, or none")
    return [f"{node.name}().{name}()" for name in names if name.startswith("test")]
