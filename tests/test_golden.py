"""Golden logs: what the scripts log is what they logged, and the comparison says what is not."""

import json
import math
import re
import signal

import pytest

from tests.run_folders import command_line, signal_once, slow_but, write_jsonl
from tools import compare_runs, golden

FAST = ("a2c_cartpole",)


@pytest.mark.parametrize("name", slow_but(FAST, golden.RUNS))
def test_a_run_logs_what_its_golden_log_holds(name, tmp_path, monkeypatch, capsys):
    """A difference that is meant: CONTRIBUTING.md says how to renew the logs."""
    signal_once(monkeypatch, signal.SIGTERM, golden.RUNS[name][1])
    assert command_line(*golden.words_of(name), "--run-dir", tmp_path / "run") == 0
    assert golden.is_long_enough(tmp_path / "run", name)
    capsys.readouterr()
    code = compare_runs.main([str(tmp_path / "run"), "--golden", name])
    assert (code, capsys.readouterr().out) == (0, f"{name}: equal\n")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine"), zip(
    ("grpo_turns", "a2c_cartpole", "ppo_shared"), golden.MACHINES[-3:], strict=True))
def test_other_machines_log_the_same(name, machine, monkeypatch, capsys):
    """Settings together; tools/golden.py --machines tries them alone, too, and makes all runs."""
    monkeypatch.setattr(golden, "MACHINES", (machine,))
    code = golden.main(["--machines", name])
    said = capsys.readouterr().out
    assert code == 0 and said.startswith(f"{machine}: {name}: equal (furthest off: "), said


@pytest.mark.slow
def test_the_command_makes_the_run_itself_and_golden_renews_the_log(tmp_path, monkeypatch, capsys):
    assert compare_runs.main(["--golden", "a2c_cartpole"]) == 0
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    assert golden.main(["a2c_cartpole"]) == 0
    assert compare_runs.main(["--golden", "a2c_cartpole"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a2c_cartpole: equal", "a2c_cartpole: renewed", "a2c_cartpole: equal"]


DIFFERS = "{name}, iteration {iteration}: {key} {new} (it was {old})"
EQUAL = "{name}: equal"
# name, number of a line from 0, key, its new value from its old one (None: without the key), what is said
CHANGES = [
    ("grpo", 4, "train/entropy", lambda old: old, EQUAL),
    ("grpo", 4, "train/entropy", lambda old: old * (1 + 5e-5), EQUAL),  # another processor rounds otherwise
    ("grpo", 4, "train/entropy", lambda old: old * (1 + 3e-4), DIFFERS),
    ("grpo", 5, "train/learning_rate", lambda old: old * (1 + 1e-5), DIFFERS),  # it has no rounding
    ("grpo", 4, "mismatch/kl", lambda old: old + 8e-6, EQUAL),  # which is rounding
    ("grpo", 4, "mismatch/kl", lambda old: old + 2e-5, DIFFERS),
    ("grpo", 4, "train/policy_loss", lambda old: old + 5e-7, EQUAL),  # in which advantages cancel
    ("grpo", 4, "train/policy_loss", lambda old: old + 3e-6, DIFFERS),
    ("ppo", 4, "critic/advantages/mean", lambda old: old + 3e-6, EQUAL),  # of numbers between -1 and 1
    ("ppo", 4, "critic/advantages/mean", lambda old: old + 3e-5, DIFFERS),
    ("ppo", 5, "critic/vf_loss", lambda old: old * 0.99, DIFFERS),
    ("sft", 4, "train/loss", None, "{name}, iteration 4: train/loss is no longer logged (it was {old})"),
    ("a2c", 4, "action_hist", lambda old: old * 2, DIFFERS),
    ("a2c", 4, "policy_loss", lambda old: math.nan, DIFFERS),
]


@pytest.mark.parametrize(("name", "number", "key", "change", "says"), CHANGES)
def test_the_first_number_that_differs_is_named_with_both_values(
        name, number, key, change, says, tmp_path, capsys):
    lines = [json.loads(line) for line in (golden.FOLDER / f"{name}.jsonl").read_text().splitlines()]
    new = None
    old = lines[number].pop(key)
    if change:
        new = lines[number][key] = change(old)
    clock = {"time/update": 1.5, "system/memory_usage": 2, "sps": 9, "run_id": "mine", "trace_id": "mine:1"}
    logged = [{"meta": {}}, *(line | clock for line in lines), lines[-1] | dict(iteration=13)]
    write_jsonl(tmp_path / "train_log.jsonl", logged)
    code = compare_runs.main([str(tmp_path), "--golden", name])
    says = says.format(name=name, iteration=lines[number]["iteration"], key=key, new=new, old=old)
    assert code == (0 if says.endswith("equal") else 1)
    assert capsys.readouterr().out == says + "\n"


def test_records_and_keys_that_are_new_or_missing_are_named(tmp_path, capsys):
    lines = [json.loads(line) for line in (golden.FOLDER / "sft.jsonl").read_text().splitlines()]
    short, more = lines[:-1], [lines[0] | dict(extra=1), *lines[1:]]
    for logged, says in ((short, "sft: 6 records up to iteration 6 (it was 7)"),
                         (more, "sft, iteration 0: extra 1 was not logged")):
        write_jsonl(tmp_path / "train_log.jsonl", logged)
        assert compare_runs.main([str(tmp_path), "--golden", "sft"]) == 1
        assert capsys.readouterr().out == says + "\n"


@pytest.mark.parametrize(("words", "says"), [
    (["--golden", "grp"], "no golden run 'grp': expected grpo, .*did you mean 'grpo'"),
    (["{d}", "--golden"], "expected one run and one name behind --golden"),
    (["{d}", "--golden", "sft"], "FileNotFoundError.*train_log.jsonl"),
    ([], "--golden")])
def test_bad_input_is_one_line(words, says, tmp_path, capsys):
    assert compare_runs.main([word.replace("{d}", str(tmp_path)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line), line
