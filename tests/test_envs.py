"""envs/: what its modules import, and what every environment says of itself."""

import ast
import graphlib
from pathlib import Path

import pytest

import envs

ROOT = Path(__file__).resolve().parent.parent
DATA = ("repl_scenarios", "swe_instances")  # repositories that are tasks


def modules_of(folder):
    """{dotted name: path} of the modules of a package"""
    paths = [path for path in (ROOT / folder).rglob("*.py") if not set(DATA) & set(path.parts)]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports_of(path, modules):
    """Modules that a file imports, in functions too: of `from envs.code import swe`, envs.code.swe alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


MODULES = modules_of("envs")
IMPORTS = {name: set(imports_of(path, MODULES)) for name, path in MODULES.items()}


def test_no_two_modules_import_each_other_in_a_circle():
    assert "envs.pixels" in IMPORTS["envs.pixels.gymnasium"]  # a package, then a module of one
    assert "envs.code.sandbox" in IMPORTS["envs.code.swe"]
    assert not IMPORTS["envs"] & MODULES.keys()  # which every module imports
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError, with the circle


def test_no_environment_imports_a_script_or_a_tool():
    others = {path.stem for path in ROOT.glob("*.py")} | {"tools", "tests", "benchmarks"}
    others |= {path.stem for folder in ("tools", "tests") for path in (ROOT / folder).glob("*.py")}
    assert {"grpo_llm", "a2c_vecenv", "command_line"} <= others
    found = {name: {module.partition(".")[0] for module in imported} & others
             for name, imported in IMPORTS.items()}
    assert not any(found.values()), found


@pytest.mark.parametrize("name, options, blocking", [
    ("countdown", {}, False), ("repl", {}, True), ("swe", {}, True), ("arcagi3", {}, False),
    ("arcagi3", dict(live=True, root_url="http://127.0.0.1:1"), True),
    ("openspiel", dict(cases="tic_tac_toe"), True), ("openspiel", dict(workers=0), False),
    ("openspiel", dict(mode="game"), False), ("openspiel", dict(reward_mode="legal"), False),
    ("countdown,openspiel", {"openspiel.cases": "tic_tac_toe"}, True),
])
def test_an_environment_says_whether_its_steps_wait(name, options, blocking):
    assert envs.make(name, **options).blocking is blocking


@pytest.mark.parametrize("text, value", [("True", True), ("false", False), ("1", True), ("0", False)])
def test_what_a_flag_says_of_yes_and_no(text, value):
    assert envs.make("countdown", difficulty=text).config.difficulty is value
