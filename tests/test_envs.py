"""envs/: what its modules import, and what every environment says of itself."""

import ast
from pathlib import Path

import pytest

import envs

ROOT = Path(__file__).resolve().parent.parent
DATA = ("repl_scenarios", "swe_instances")  # repositories that are tasks


def imports_of(path):
    """First names of what a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield node.module.partition(".")[0]


def test_no_script_imports_a_tool_and_no_environment_a_script_or_a_tool():
    scripts, tools = ({path.stem for path in folder.glob("*.py")} for folder in (ROOT, ROOT / "tools"))
    tools |= {"tools", "tests", "benchmarks"}
    assert {"grpo_llm", "a2c_vecenv"} <= scripts and "command_line" in tools
    modules = [path for path in (ROOT / "envs").rglob("*.py") if not set(DATA) & set(path.parts)]
    wrong = {path: found for path in modules if (found := (scripts | tools) & set(imports_of(path)))}
    wrong |= {path: found for path in ROOT.glob("*.py") if (found := tools & set(imports_of(path)))}
    assert len(modules) > 20 and wrong == {}


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
