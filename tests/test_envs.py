"""envs/: what its modules import, and what every environment says of itself."""

import ast
import decimal
import fractions
import graphlib
import json
import math
import random
import warnings

import numpy as np
import pytest

import envs
from tests.run_folders import ROOT

DATA = ("repl_scenarios", "swe_instances")  # repositories that are tasks


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in (ROOT / "envs").rglob("*.py") if not set(DATA) & set(path.parts)}


def imports_of(path):
    """Modules that a file imports, in functions too: of `from envs.code import swe`, envs.code.swe alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def test_no_two_modules_of_envs_import_each_other_in_a_circle():
    imports = {name: set(imports_of(path)) for name, path in MODULES.items()}
    assert "envs.pixels" in imports["envs.pixels.gymnasium"]  # a package, then a module of one
    assert "envs.code.sandbox" in imports["envs.code.swe"]
    assert not imports["envs"] & MODULES.keys()  # which every module imports
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, with the circle


def test_no_script_imports_a_tool_and_no_environment_a_script_or_a_tool():
    scripts, tools = ({path.stem for path in folder.glob("*.py")} for folder in (ROOT, ROOT / "tools"))
    tools |= {"tools", "tests", "benchmarks"}
    assert {"grpo_llm", "a2c_vecenv"} <= scripts and "command_line" in tools
    forbidden = [(path, scripts | tools) for path in MODULES.values()]
    forbidden += [(path, tools) for path in ROOT.glob("*.py")]
    for path, names in forbidden:
        assert not names & {name.partition(".")[0] for name in imports_of(path)}, path


@pytest.mark.parametrize("name, options, blocking", [
    ("countdown", {}, False), ("repl", {}, True), ("swe", dict(export_only=True), True),
    ("arcagi3", {}, False),
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


def test_tasks_come_in_a_new_order_in_each_epoch():
    first, second = ([envs.shuffled(i + 10 * e, 1, 10) for i in range(10)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [envs.shuffled(i, 2, 10) for i in range(10)] != first
    env = envs.make("countdown")
    assert env.training_task(3, 7) == env.task("train", envs.shuffled(3, 7, env.num_tasks("train")))


def test_a_number_is_not_rounded_to_an_option():
    assert envs.make("countdown", max_operands=4.0).config.max_operands == 4
    for value in (3.7, "3.7", True, "x", float("nan")):
        with pytest.raises(envs.BadInput, match="option max_operands: expected int, got"):
            envs.make("countdown", max_operands=value)


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_of_several_names_one_is_held_out_whatever_their_order(count):
    names = [f"game-{number}" for number in range(count)]
    found = []
    for order in (names, names[::-1], random.Random(1).sample(names, count)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            split = envs.hold_out(order, lambda name: False, "environment it: game")
        assert sorted(split["train"] + split["test"]) == sorted(names)
        assert len(split["test"]) == (count > 1) == len(said)
        assert all(f"game {name} is held out" in str(said[0].message) for name in split["test"])
        found.append(split["test"])
    assert found[0] == found[1] == found[2]
    if count == 9:
        split = envs.hold_out(names, lambda name: name > "game-5", "it")
        assert split == dict(train=names[:6], test=names[6:])


def test_options_are_what_stands_before_and_after_the_first_sign():
    assert envs.parse_options(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    assert envs.json_options(["a=1", "b=x=1", "c=[1,2]"]) == {"a": 1, "b": "x=1", "c": [1, 2]}
    for pair in ("a", "=a"):
        with pytest.raises(envs.BadInput, match="expected key=value"):
            envs.parse_options([pair])


def test_a_part_that_a_reply_lacks_counts_as_none():
    infos = [{"correct": 1.0, "polite": 1.0, "state": "WIN"}, {"correct": 0.0}, {"correct": np.float32(0.5)}]
    assert envs.means(infos) == {"correct": 0.5, "polite": pytest.approx(1 / 3)}


@pytest.mark.parametrize("values, mean", [
    ([math.inf, -math.inf], math.nan), ([np.float32("inf"), -np.inf, 1.0], math.nan),
    ([math.nan, 1], math.nan), ([math.inf, 1.0], math.inf), ([1e308, 1e308], math.inf),
    ([fractions.Fraction(1, 2), decimal.Decimal(1)], 0.75)])
@pytest.mark.filterwarnings("error")
def test_a_part_may_be_any_number_without_a_warning(values, mean):
    assert envs.means([{"part": value} for value in values]) == pytest.approx({"part": mean}, nan_ok=True)


def test_what_a_float_cannot_hold_is_no_number():
    class Odd:
        def __float__(self):
            raise KeyError

    for value in (1, True, 0.5, 10**300, np.float32(1), np.array(1.0), decimal.Decimal("1.5"), float("nan")):
        assert envs.is_number(value), value
    for value in (10**400, 10**5000, decimal.Decimal("sNaN"), np.datetime64("2020"), np.ones(1), Odd(), "1"):
        assert not envs.is_number(value)
    assert envs.means([{"large": 10**400, "part": 1}]) == {"part": 1.0}
    assert envs.shown([10**5000]) == "list that cannot be printed" and len(envs.shown("x" * 999)) == 80


def test_what_environments_tell_is_json():
    said = {"nan": float("nan"), "endless": [float("inf")], "number": np.float64(0.5), "kind": {1}, 2: "é"}
    assert json.loads(envs.to_json(said)) == {
        "nan": None, "endless": [None], "number": 0.5, "kind": "{1}", "2": "é"}
    assert b"NaN" not in envs.to_json(said)
