"""tools/diagnose.py, on recorded logs of good runs and of some broken on purpose; docs/symptoms.md."""

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time

import pytest

from tests.broken_runs import RUNS
from tests.run_folders import ROOT, write_jsonl
from tools import diagnose

DATA = ROOT / "tests" / "data" / "diagnose"
PAGE = (ROOT / "docs" / "symptoms.md").read_text()
RECORDED = sorted(path.parent.name for path in DATA.glob("*/train_log.jsonl"))


def look(run, capsys, *words):
    """-> exit code, {symptom: what it says}"""
    capsys.readouterr()
    code = diagnose.main([str(run), "--json", *map(str, words)])
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return code, {each["symptom"]: each["says"] for each in json.loads(out)["symptoms"]}


def expected(name):
    return set(RUNS[name].expected.split())


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_has_its_symptoms_and_no_others(name, capsys):
    code, found = look(DATA / name, capsys)
    assert {*found} == expected(name) and code == bool(found)


@pytest.mark.parametrize("name", [name for name in RECORDED if not expected(name)])
def test_a_good_run_has_none_on_its_way_either(name, tmp_path, capsys):
    lines = (DATA / name / "train_log.jsonl").read_text().splitlines(keepends=True)
    for end in range(1, len(lines)):
        (tmp_path / "train_log.jsonl").write_text("".join(lines[:end]))
        assert look(tmp_path, capsys) == (0, {})


def test_every_run_is_recorded_and_every_symptom_has_one():
    assert {*RECORDED} == {*RUNS} - {"stuck"}  # which has no end
    seen = set().union(*map(expected, RUNS))
    assert seen == {name for name, *_ in diagnose.SYMPTOMS}
    assert sum(not expected(name) for name in RECORDED) >= 3 and sum(map(bool, map(expected, RUNS))) >= 12


@pytest.mark.parametrize("name, says", [
    ("always_0", "(mean 0): no reply is right: the tasks are too hard"),
    ("always_1", "(mean 1): every reply is right: the tasks are too easy, or the verifier says yes"),
    ("cut", "replies are cut off before their answer (0% of the replies are right, 100% are cut off by "
            "--max-response-tokens 5 or --max-context-tokens, the environment failed in 0% of the episodes)"),
    ("ppo_always_0", "replies lack the form that the environment reads (0% of the replies are right, 5% are "
                     "cut off by --max-response-tokens 16 or --max-context-tokens, 33% have the form"),
    ("no_step", "29 optimiser steps with gradients of 0.2"),
    ("lora_rate_low", "have changed the norm of the adapter by 4"),
    ("hotter", "the run's own check ended it: the sampler is not the policy: mismatch/kl is 0.016"),
    ("hotter_unseen", "mismatch/slope 0.22"),
    ("memory", "in reorder_cache: the sampler's cache"),
    ("fooled", "one reply is right 27 times of 30 in val_step_000060.jsonl: '11 11 11"),
    ("longer", "while the share of right replies falls"),
    ("resumed", "iteration 4 with other code: commit ")])
def test_the_line_has_the_figures(name, says, capsys):
    assert says in " ".join(look(DATA / name, capsys)[1].values())


def altered(tmp_path, change, name="good_short"):
    """A copy of a recorded log, each line changed in place.  -> the folder"""
    lines = [json.loads(line) for line in (DATA / name / "train_log.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        change(number, line)
    write_jsonl(tmp_path / "train_log.jsonl", lines)
    return tmp_path


def ramp(key, start, end):
    """From the first record on, where it stays from the tenth on."""
    def change(number, line):
        if key in line or "train/reward" in line and not key.startswith("val/"):
            line[key] = start + (end - start) * min(1.0, (number - 1) / 10)
    return change


@pytest.mark.parametrize("key, start, silent, seen, symptom", [
    ("train/entropy", 0.4, 0.1, 0.02, "entropy_collapses"),
    ("response_length/clip_ratio", 0.0, 0.1, 0.5, "length"),
    ("train/approx_kl", 0.0, 0.04, 0.2, "kl"),
    ("train/clipfrac", 0.0, 0.1, 0.5, "kl"),
    ("env/suspicious", 0.0, 0.0, 0.01, "verifier"),
    ("mismatch/ratio_mean", 1.0, 1.04, 1.3, "sampler"),
    ("mismatch/slope", 0.0, -0.04, -0.3, "sampler"),
    ("train/reward", 0.4, 0.3, 0.0, "reward_falls"),
    ("val/countdown/pass@16", 1.0, 0.95, 0.6, "pass_at_n"),
    ("val/countdown/greedy", 0.7, 0.65, 0.2, "greedy")])
def test_on_either_side_of_a_threshold(key, start, silent, seen, symptom, tmp_path, capsys):
    _, found = look(altered(tmp_path, ramp(key, start, silent)), capsys)
    assert symptom not in found
    _, found = look(altered(tmp_path, ramp(key, start, seen)), capsys)
    assert symptom in found


def line(start, end, last=20):
    """A straight one, from the first record of training to the last."""
    return lambda i: start + (end - start) * (i - 1) / (last - 1)


HEALTHY = {  # of training
    "train/reward": line(0.3, 0.9), "train/pass@1": line(0.3, 0.9), "critic/score/max": 1.0,
    "critic/score/min": 0.0, "rollout/groups_trainable": 9, "train/entropy": line(0.5, 0.3),
    "train/grad_norm": 0.4, "train/weight_norm": line(40.0, 40.4), "train/approx_kl": 0.001,
    "train/clipfrac": 0.01, "train/kl_loss": 0.01, "response_length/clip_ratio": 0.01,
    "response_length/mean": 9.0, "mismatch/kl": 1e-9, "mismatch/ratio_mean": 1.0, "mismatch/slope": 0.0,
    "rollout/turns": 1.0, "rollout/segments": 1.0, "env/suspicious": 0.0}
EVALUATED = {"pass@1": (0.3, 0.5, 0.7, 0.8, 0.9), "pass@16": (0.95,) * 5,
             "greedy": (0.6, 0.7, 0.8, 0.9, 0.95)}
LIKE_SFT = dict.fromkeys(HEALTHY, None) | {"train/grad_norm": 0.4, "train/weight_norm": line(40.0, 40.4)}
LIKE_A2C = dict.fromkeys(HEALTHY, None) | {"grad_norm": 0.4}
AT_REST = {"train/weight_norm": 40.0}
LORA = dict(lora_rank=2)


def stepwise(*values):
    return lambda i: values[min(i, len(values)) - 1]


def story(folder, args=(), steps=1, **changes):
    """A run of 20 iterations that is healthy but for some numbers, evaluated five times.  -> its folder"""
    evaluated = EVALUATED | {name[4:]: changes[name] for name in changes if name.startswith("val_")}
    curves = HEALTHY | changes.get("train", {})
    flags = dict(iterations=20, eval_tasks=512, eval_samples=16, dtype="float32", learning_rate=1e-3)
    lines = [dict(meta=dict(run_id="a", algo="grpo", args=flags | dict(args)))]
    for i in range(21):
        found = dict(run_id="a", trace_id=f"a:{i}", iteration=i, env_steps=9 * i, opt_steps=steps * i,
                     wall_time_s=float(i))
        for key, value in curves.items() if i else ():
            if value is not None:
                found[key] = value(i) if callable(value) else value
        if i % 5 == 0:
            found |= {f"val/countdown/{name}": values[i // 5] for name, values in evaluated.items()}
        lines.append(found)
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "train_log.jsonl", lines)
    return folder


@pytest.mark.parametrize("symptoms, changes", [
    ("", {}),
    ("no_step", dict(train=AT_REST)), ("lora", dict(train=AT_REST, args=LORA)),
    ("lora", dict(train=AT_REST, args=dict(lora_rank=0, lora_adapter_path="adapter"))),  # which goes on
    ("", dict(train=AT_REST, steps=0)), ("no_step", dict(train={"train/grad_norm": 0.0})),
    ("lora", dict(train={"train/weight_norm": line(40.0, 40.002)}, args=LORA, steps=3)),
    ("lora", dict(train={"train/weight_norm": line(40.0, 39.998)}, args=LORA, steps=3)),
    ("", dict(train={"train/weight_norm": line(40.0, 40.002)}, args=LORA)),  # of 19 steps, which are few
    ("", dict(train={"train/weight_norm": line(40.0, 39.9)}, args=LORA, steps=3)),
    ("", dict(train={"train/weight_norm": line(40.0, 40.002)}, steps=3)),
    ("reward_falls", dict(train={"train/reward": stepwise(0.9, 0.9, 0.1)})),  # before a window is full
    ("reward_falls", dict(train={"train/reward": line(-0.5, -1.0), "critic/score/min": -1.0})),
    ("", dict(train={"train/reward": line(-0.5, -1.0), "critic/score/min": -2.0})),  # not half of the way
    ("", dict(train={"train/reward": line(0.5, 0.4)})),
    ("reward_falls", dict(train=LIKE_A2C | {"reward_mean": line(0.9, 0.1)})),
    ("", dict(train=LIKE_A2C | {"reward_mean": line(0.1, 0.9)})),
    ("reward_falls", dict(train={"train/reward": line(0.9, 0.0), "rollout/groups_trainable": stepwise(
        *[9] * 17, 0)})),  # that it has come to nothing says no more
    ("", dict(train={"train/entropy": line(0.15, 0.1), "train/pass@1": 0.3})),
    ("entropy_collapses", dict(train={"train/entropy": line(0.5, 0.02), "train/pass@1": 0.3})),
    ("", dict(train={"train/entropy": line(0.5, 0.02)})),
    ("entropy_rises", dict(train={"train/entropy": line(0.5, 0.9), "train/reward": 0.4})),
    ("", dict(train={"train/entropy": line(0.5, 0.9)})),
    ("", dict(train={"train/entropy": line(0.5, 0.7), "train/reward": 0.4})),
    ("kl", dict(train={"train/kl_loss": line(0.0, 2.0), "train/pass@1": line(0.5, 0.48)})),
    ("", dict(train={"train/kl_loss": line(0.0, 2.0)})),
    ("", dict(train={"train/kl_loss": line(0.0, 0.8), "train/pass@1": line(0.5, 0.48)})),
    ("length", dict(train={"response_length/mean": line(9.0, 40.0), "train/pass@1": 0.5})),
    ("", dict(train={"response_length/mean": line(9.0, 40.0)})),
    ("", dict(train={"response_length/mean": line(9.0, 12.0), "train/pass@1": 0.5})),
    ("pass_at_n", {"val_pass@16": (0.95, 0.9, 0.8, 0.8, 0.8)}),
    ("", {"args": dict(eval_tasks=9), "val_pass@16": (0.95, 0.9, 0.8, 0.8, 0.8)}),
    ("", {"val_pass@16": (0.95, 0.9, 0.8, 0.95, 0.8)}),
    ("greedy", dict(val_greedy=(0.6, 0.7, 0.5, 0.5, 0.5))), ("", dict(val_greedy=(0.6, 0.7, 0.5, 0.8, 0.5))),
    ("sampler", dict(train={"mismatch/kl": 1e-4})), ("", dict(train={"mismatch/kl": 5e-7})),
    ("", dict(train={"mismatch/kl": 1e-4}, args=dict(dtype="bfloat16"))),
    ("sampler", dict(train={"mismatch/ratio_mean": 0.9})), ("sampler", dict(train={"mismatch/slope": 0.1})),
    ("template", dict(train={"rollout/turns": 3.0, "rollout/segments": 2.5})),
    ("", dict(train={"rollout/turns": 3.0, "rollout/segments": 1.8})),
    ("", dict(train={"rollout/turns": 1.05, "rollout/segments": 1.04})),
    ("verifier", dict(train={"train/pass@1": line(0.5, 0.3)})), ("", dict(train={"train/pass@1": 0.5})),
    ("", dict(train={"train/pass@1": line(0.5, 0.3), "train/reward": line(0.3, 0.35)})),
    ("", dict(train=LIKE_SFT | {"train/loss": line(1.0, 0.5)})),
    ("sft_loss", dict(train=LIKE_SFT | {"train/loss": line(1.0, 0.99)})),
    ("sft_loss", dict(train=LIKE_SFT | {"train/loss": stepwise(1.0, 1.6, 0.5)})),
    ("", dict(train=LIKE_SFT | {"train/loss": stepwise(1.0, 1.4, 0.5)})),
])
def test_a_run_that_is_healthy_but_for_one_thing(symptoms, changes, tmp_path, capsys):
    """On either side of what each symptom needs: a threshold, what goes with it, what explains it."""
    code, found = look(story(tmp_path, **changes), capsys)
    assert {*found} == {*symptoms.split()} and code == bool(symptoms), found


def test_the_plan_is_that_of_the_script_unless_a_run_was_extended(tmp_path, capsys):
    plans = {}
    for name, args in dict(sft=dict(iterations=None, steps=40), grpo={}, longer=dict(iterations=10)).items():
        lines = [json.loads(text) for text in story(tmp_path / name).joinpath("train_log.jsonl").open()]
        lines[0]["meta"]["args"] |= args
        write_jsonl(tmp_path / name / "train_log.jsonl", lines)
        assert diagnose.main([str(tmp_path / name), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        plans[name] = report["of"]
        assert (report["iteration"], report["records"]) == (20, 20)
    assert plans == dict(sft=40, grpo=20, longer=None)


def test_where_two_runs_part_first_whatever_the_machine(tmp_path, capsys):
    """In an evaluation, which is also of a record of training; what only one of them has is passed over."""
    one = story(tmp_path / "one", train={"system/memory_usage": 1.0, "time/update": 2.0})
    other = story(tmp_path / "other", train={"system/memory_usage": 3.0, "time/update": 4.0})
    log = other / "train_log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:4] + lines[5:]))
    assert look(one, capsys, "--like", other) == (0, {})
    for changed in (10, 0):  # the later one stays changed, too
        here = [*log.read_text().splitlines(keepends=True)]
        place = next(n for n, text in enumerate(here) if f'"iteration": {changed},' in text)
        altered = json.loads(here[place])
        key = "val/countdown/greedy"
        altered[key] += 0.25
        here[place] = json.dumps(altered) + "\n"
        log.write_text("".join(here))
        says = look(one, capsys, "--like", other)[1]["resumed"]
        assert says.startswith(f"iteration {changed} is the first that differs") and "in 1 metrics" in says


def test_a_script_that_was_changed_between_two_commits_is_told(tmp_path, capsys):
    def changed(number, line):
        inside = line.get("meta") or line.get("resume")
        if inside:
            inside |= dict(git_sha="same", script_sha256=f"script{number}")

    says = look(altered(tmp_path, changed, "resumed"), capsys)[1]["resumed"]
    assert "other code: a script of hash script" in says and says.endswith("before that script0")


def test_rewards_that_differ_later_do_not_stay(tmp_path, capsys):
    def differs(number, line):
        if line.get("iteration", 0) > 10:
            line |= {"critic/score/max": 1.0, "rollout/groups_trainable": 20}

    assert look(altered(tmp_path, differs, "always_0"), capsys) == (0, {})


def test_rewards_stay_where_three_iterations_in_a_row_are_idle(tmp_path, capsys):
    """The last three; or the first three, and nine in ten of all."""
    lines = [json.loads(line) for line in (DATA / "always_0" / "train_log.jsonl").read_text().splitlines()]
    idle = [line for line in lines if "train/reward" in line]
    learns = [line | {"rollout/groups_trainable": 9, "critic/score/max": 1.0} for line in idle]
    for three in itertools.product((True, False), repeat=3):
        some = [idle[k] if is_idle else learns[k] for k, is_idle in enumerate(three)]
        for kept in ([*learns[:5], *some], [*some, *idle[3:] * 4, *learns[:1]]):
            write_jsonl(tmp_path / "train_log.jsonl", [lines[0], *kept])
            found = look(tmp_path, capsys)[1]
            assert ("reward_stays" in found) == all(three), (three, len(kept))


@pytest.mark.parametrize("record, says", [
    ({"rollout/termination/error": 0.75}, "the environment fails (0% of the replies are right"),
    ({"train/pass@1": 0.5}, "the reward function does not pay for right replies (50% of the replies"),
    ({"train/pass@1": 0.5, "critic/score/max": 1.0}, "they differ between tasks, but not between the"),
    ({"train/countdown/format": 0.2}, "replies lack the form that the environment reads (0% of")])
def test_the_figures_of_episodes_that_teach_nothing(record, says, tmp_path, capsys):
    """After three iterations, as the scripts warn; also of a run that has learned before."""
    lines = [json.loads(line) for line in (DATA / "always_0" / "train_log.jsonl").read_text().splitlines()]
    head, trained = lines[:2], [line | record for line in lines if "train/reward" in line]
    learning = [line | {"rollout/groups_trainable": 9, "critic/score/max": 1.0} for line in trained[:5]]
    for kept in (trained[:3], [*learning, *trained[5:8]]):
        write_jsonl(tmp_path / "train_log.jsonl", [*head, *kept])
        code, found = look(tmp_path, capsys)
        assert code == 1 and says in found["reward_stays"]


EVEN = dict(task_id="t", reward=0.0, correct=0, termination="length", messages=[])


@pytest.mark.parametrize("metrics, episodes, says", [
    ({}, [], "are not: no reply is right: the tasks are too hard, or the verifier does not find the answers "
             "(0% of the replies are right)"),
    ({"val/countdown/format": 0.25}, [], "replies lack the form that the environment reads (0% of the "
                                         "replies are right, 25% have the form that the environment reads)"),
    ({}, [EVEN, EVEN | dict(termination="context"), EVEN | dict(termination="done")],
     "before their answer (0% of the replies are right, 67% are cut off by --max-response-tokens 16"),
    ({}, [EVEN | dict(termination="error")], "the environment fails (0% of the replies are right, 0% are"),
    ({"val/countdown/pass@1": 1.0, "val/countdown/pass@16": 1.0}, [], "every reply is right"),
    ({"val/countdown/pass@1": 0.5, "val/countdown/pass@16": 0.5}, [], "they differ between tasks"),
    ({"val/countdown/pass@1": 0.5, "val/countdown/pass@16": 0.6}, [], None),
    ({}, [EVEN, EVEN | dict(reward=0.1)], None)])  # for something else than to be right
def test_a_first_evaluation_in_which_nothing_differs_says_why(metrics, episodes, says, tmp_path, capsys):
    meta, first, *_ = (json.loads(line) for line in (DATA / "always_0" / "train_log.jsonl").open())
    write_jsonl(tmp_path / "train_log.jsonl", [meta, first | metrics])
    (tmp_path / "episodes").mkdir()
    write_jsonl(tmp_path / "episodes" / "val_step_000000.jsonl", episodes)
    code, found = look(tmp_path, capsys)
    assert code == bool(says) and (says or "") in found.get("reward_stays", "")


def test_the_newest_replies_count(tmp_path, capsys):
    folder = altered(tmp_path, lambda number, line: None)
    (folder / "episodes").mkdir()
    for same, code in ((10, 0), (60, 1)):
        for step in (10, 60):
            write_jsonl(folder / "episodes" / f"val_step_{step:06d}.jsonl", [
                dict(correct=1, task_id=f"{n}", messages=[dict(
                    role="assistant", content="1" if step == same else f"{n}")]) for n in range(12)])
        assert look(folder, capsys)[0] == code


def test_a_policy_that_always_says_no_has_not_fooled_the_verifier(tmp_path, capsys):
    folder = altered(tmp_path, lambda number, line: None)
    (folder / "episodes").mkdir()
    no = [dict(role="assistant", content="No")]
    write_jsonl(folder / "episodes" / "val_step_000060.jsonl",
                [dict(correct=n % 2, task_id=f"{n}", messages=no) for n in range(40)])
    assert look(folder, capsys) == (0, {})


@pytest.mark.parametrize("policy_steps, found", [(0, set()), (4, {"no_step"})])
def test_where_the_critic_learns_alone_the_policy_stands_still(policy_steps, found, tmp_path, capsys):
    def warm_up(number, line):
        if "train/reward" in line:
            line |= {"train/policy_steps": policy_steps, "train/weight_norm": 41.5}

    assert {*look(altered(tmp_path, warm_up, "good_ppo"), capsys)[1]} == found


@pytest.mark.parametrize("called, says", [
    ("update pass_loss token_logprobs linear", "in token_logprobs: the activations of a pass"),
    ("update backward _engine_run_backward", "in backward: the activations"),
    ("update step _use_grad _init_group", "in _init_group: the optimiser's states"),
    ("main rollout generate forward", "in generate: the sampler's cache"),
    ("main load_weights from_pretrained", "in from_pretrained: the weights"), ("main", "its receipt")])
def test_the_innermost_function_tells_which_part_of_the_memory_was_full(called, says, tmp_path, capsys):
    def fails(number, line):
        if number == 3:
            line.clear()
            line["error"] = dict(type="OutOfMemoryError", message="CUDA out of memory", receipt="receipts/a")

    folder = altered(tmp_path, fails)
    (folder / "receipts" / "a").mkdir(parents=True)
    frames = [f'  File "x.py", line 1, in {name}\n    code\n' for name in called.split()]
    (folder / "receipts" / "a" / "traceback.txt").write_text("".join(frames))
    assert says in look(folder, capsys)[1]["memory"]


@contextlib.contextmanager
def started(*command):
    """A process, which is killed at the end."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_hangs_has_a_process_and_no_new_record(tmp_path, capsys):
    def planned(iterations, _, line):
        line.get("meta", {}).get("args", {}).update(iterations=iterations)

    unfinished = functools.partial(planned, 999)

    def paced(seconds, number, line):
        unfinished(number, line)
        line["wall_time_s"] = seconds * number

    folder = altered(tmp_path, unfinished)
    log = folder / "train_log.jsonl"
    os.utime(log, (time.time() - 900,) * 2)
    assert look(folder, capsys) == (0, {})  # it was killed
    code = "print('up', flush=True); import time; time.sleep(600)"
    with started("-c", code, "--run-dir", folder) as process:
        process.stdout.readline()
        code, found = look(folder, capsys)
        for seconds, silent in ((0.1, 0), (0.1, 30), (100, 900)):  # between records; since the last one
            altered(tmp_path, functools.partial(paced, seconds))
            os.utime(log, (time.time() - silent,) * 2)
            assert look(folder, capsys) == (0, {}), (seconds, silent)
        last = max(json.loads(text).get("iteration", 0) for text in log.open())
        for iterations, hangs in ((last, set()), (last + 1, {"hangs"})):  # after its end it may write on
            altered(tmp_path, functools.partial(planned, iterations))
            os.utime(log, (time.time() - 900,) * 2)
            assert {*look(folder, capsys)[1]} == hangs, iterations
    says = rf"no record for 90\d s .*py-spy dump --pid {process.pid} "
    assert code == 1 and re.search(says, found["hangs"])


def test_the_first_difference_of_two_runs_is_named(tmp_path, capsys):
    def later(number, line):
        if line.get("iteration", 0) > 20 and "train/reward" in line:
            line["train/reward"] += 0.5
        line["wall_time_s"] = 2 * line.get("wall_time_s", 0.0)

    folder = altered(tmp_path, later)
    assert look(folder, capsys, "--like", folder) == (0, {})
    code, found = look(folder, capsys, "--like", DATA / "good_short")
    assert code == 1 and re.match(r"iteration 2\d is the first that differs .* in 1 metrics: train/reward 0.",
                                  found["resumed"])


def test_text_of_a_model_cannot_reach_the_terminal(tmp_path, capsys):
    evil = "\x1b[2J\x07\u202egone\n\r"

    def with_error(number, line):
        if number == 3:
            line.clear()
            line["error"] = dict(type="FloatingPointError", message=f"the reward of {evil}", receipt=evil)

    folder = altered(tmp_path, with_error)
    episode = dict(correct=1, messages=[dict(role="assistant", content=evil)])
    (folder / "episodes").mkdir()
    write_jsonl(folder / "episodes" / "val_step_000060.jsonl",
                [b"{", b"[1]", dict(messages=3), *(dict(episode, task_id=f"{evil}{n}") for n in range(12))])
    assert diagnose.main([str(folder)]) == 1
    out, err = capsys.readouterr()
    assert err == "" and "one reply is right 12 times of 12" in out and "not_finite" in out
    assert all(c.isprintable() or c == "\n" for c in out) and out.count("\n") == 5


META = json.dumps(dict(meta=dict(algo="grpo", args={}))).encode()


@pytest.mark.parametrize("content, says", [
    (None, "expected a run folder, with a meta line first"), (b"", "expected a run folder"),
    (META[:-1], "expected a run folder"), (b"{}\n", "expected a run folder"),
    (META + b"\n{\n", "train_log.jsonl, line 2: expected a JSON object"),
    (META + b"\n[1]\n", "line 2"), (b"\xff\x00\n", "line 1"), (b"[" * 100_000 + b"\n", "line 1"),
    (b'{"meta": {"args": 3}}\n', "expected a run folder")])
def test_a_damaged_or_empty_log_is_one_line(content, says, tmp_path, capsys):
    if content is not None:
        (tmp_path / "train_log.jsonl").write_bytes(content)
    assert diagnose.main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_values_of_a_wrong_kind_raise_nothing(tmp_path, capsys):
    """In a log that another program has written: whatever is no number counts as missing."""
    for wrong in (None, "x", [1], {}, True, float("nan"), -1, 10**400):
        for name in ("good_short", "memory", "resumed", "sft_rate_high"):
            def damage(number, line, wrong=wrong):
                for key in line.get("meta", {}).get("args", {}):
                    line["meta"]["args"][key] = wrong
                inside = line.get("error") or line.get("resume") or line
                for key in {*inside} - {"meta", "iteration", "opt_steps", "env_steps"}:
                    inside[key] = wrong

            folder = altered(tmp_path, damage, name)
            assert diagnose.main([str(folder)]) in (0, 1)
    write_jsonl(tmp_path / "train_log.jsonl", [json.loads(META)])
    assert diagnose.main([str(tmp_path)]) == 0


# Of the runs, those that take seconds. `python tests/broken_runs.py NAME FOLDER` makes any of them.
SHORT = ("always_0", "cut", "no_step", "rate_high", "hotter", "template", "nan", "sft_rate_0", "good_short")


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.release] * (name not in ("always_0", "template", "nan")))
    for name in SHORT])
def test_a_run_made_now_has_its_symptom_and_a_good_one_none(name, tmp_path, capsys):
    """What else a policy does that has broken down may depend on the machine."""
    made = subprocess.run([sys.executable, "tests/broken_runs.py", name, tmp_path / "run"], cwd=ROOT,
                          env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    assert made.returncode == (1 if name in ("hotter", "memory", "nan") else 0), made.stderr[-3000:]
    code, found = look(tmp_path / "run", capsys)
    assert {*RUNS[name].expected.split()[:1]} <= {*found} and bool(found) == bool(expected(name)) == code


@pytest.mark.slow
def test_a_run_that_hangs_now(tmp_path, capsys, monkeypatch):
    run, log = tmp_path / "run", tmp_path / "run" / "train_log.jsonl"
    with started("tests/broken_runs.py", "stuck", run) as process:
        while not log.exists() or '"iteration": 1,' not in log.read_text():
            assert process.poll() is None
            time.sleep(0.5)
        assert look(run, capsys)[0] == 0
        monkeypatch.setattr(diagnose, "SILENT", 5.0)
        monkeypatch.setattr(diagnose, "TIMES_LONGER", 0.0)
        time.sleep(20)
        code, found = look(run, capsys)
    assert code == 1 and f"--pid {process.pid} " in found["hangs"]


# The page


def test_each_symptom_has_a_section_with_what_backs_it_and_who_asks():
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"): heading for heading in headings}
    assert {anchor for _, anchor, _ in diagnose.SYMPTOMS} == {*anchors} - {"toolsdiagnosepy"}
    defined = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    named = set()
    for _, anchor, _ in diagnose.SYMPTOMS:
        text = PAGE.partition(f"\n## {anchors[anchor]}\n")[2].partition("\n## ")[0]
        assert all(part in text for part in ("**Look at**", "**Command**", "**Here**", "**Backed by**",
                                             "**Asked in**", "\n```\n")), anchor
        backed, asked = text.partition("**Backed by**")[2].split("**Asked in**")
        names = re.findall(r"`(\w+)`", backed)
        runs = [name for name in names if name in RUNS]
        assert all(f"def {name}(" in defined for name in names if name not in runs) and names, anchor
        assert len(re.findall(r"[\w.-]+/[\w.-]+#\d+", asked)) >= 2, anchor
        named |= {*runs}
        seen = {symptom for symptom, other, _ in diagnose.SYMPTOMS if other == anchor}
        assert any(seen <= expected(run) for run in runs), anchor
    assert {name for name in RUNS if expected(name)} <= named


def test_the_pages_output_is_the_tools(capsys):
    command, shown = re.search(r"\n    \$ python tools/diagnose.py (\S+)\n((?:    .*\n)+)", PAGE).groups()
    diagnose.main([str(ROOT / command)])
    out = capsys.readouterr().out.replace(f"{ROOT}/", "")
    assert [" ".join(line.split()) for line in shown.splitlines()] == [" ".join(line.split())
                                                                       for line in out.splitlines()]
