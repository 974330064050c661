"""Tasksets of verifiers: its own verdicts, any text, what is refused."""

import asyncio
import copy
import dataclasses
import json
import sys
import threading
import time

import pytest

import envs
from tests import stand_ins
from tests.run_folders import in_time, package, quick

FILE = "tests/letters_taskset.py"
LETTERS = f"{FILE}:Letters"


@pytest.fixture(scope="module")
def vf():
    return package("verifiers.v1")


@pytest.fixture(scope="module")
def env(vf):
    return envs.make("verifiers", taskset=LETTERS, tasks="1000", correct="exact")


@pytest.mark.parametrize("options, said", [
    ({}, "taskset"), ({"taskset": LETTERS, "weight": 1}, "unknown option 'weight'.*known: taskset, options"),
    ({"taskset": LETTERS, "tasks": "many"}, "option tasks: expected int")])
def test_options_that_are_not_are_named_before_anything_is_imported(options, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(envs.BadInput, match=said):
        envs.make("verifiers", **options)


def test_a_reply_that_takes_too_long_is_no_verdict(monkeypatch):
    stand_ins.install(monkeypatch)

    def check(limit):
        env = envs.make("verifiers", taskset="letters", timeout=limit)
        began = time.monotonic()
        step = env.start(env.task("train", 0), 0).step("wait")
        assert time.monotonic() - began < 10 * limit
        assert step.truncated and not step.terminated and step.info == {"correct": 0, "error": 1}
        return env

    env = in_time(check)
    step = env.start(env.task("train", 0), 0).step("raise")
    assert step.terminated and step.info["raised"] == 1 and step.info["error"] == 0


@pytest.mark.slow
def test_reward_and_named_rewards_are_those_of_verifiers(vf, env):
    """Against a trace read from a record, as verifiers keeps them, and against the numbers by hand."""
    counts = set()
    for split in env.splits:
        for index in range(12):
            task = env.task(split, index)
            system, prompt = task.messages
            assert system == {"role": "system", "content": "You count."} and prompt["role"] == "user"
            word = prompt["content"].split()[7].rstrip("0123456789?")
            right = word.count("a")
            counts.add(right)
            for reply, exact, number in ((f"{right}", 1, 1), (f" {right}\n", 1, 1), (f"{right + 1}", 0, 1),
                                         (f"<think>{right + 1}</think>{right}", 1, 1), ("many", 0, 0)):
                step = env.start(task, 0).step(reply)
                assert step.terminated and not step.truncated and step.messages == []
                assert step.reward == 2 * exact + 0.5 * number and step.info == {
                    "exact": exact, "number": number, "correct": exact, "raised": 0, "error": 0}
                text = reply.rpartition("</think>")[2]
                nodes = [{"parent": None, "message": system}, {"parent": 0, "message": prompt},
                         {"parent": 1, "message": {"role": "assistant", "content": text}, "sampled": True}]
                theirs = env.listed[env.prompts[task.data["place"]]]
                trace = vf.Trace[type(theirs.data)].model_validate_json(json.dumps({
                    "task": {"type": "LettersTask", "data": theirs.data.model_dump()},
                    "agent": {"config": {}}, "nodes": nodes}))
                asyncio.run(theirs.score(trace))
                assert trace.reward == step.reward
                assert {name: reward.score for name, reward in trace.rewards.items()} == {
                    "exact": exact, "number": number}
    assert len(counts) > 2


@pytest.mark.slow
def test_tasks_are_the_same_each_time_and_their_splits_apart(env):
    tasks = {split: [env.task(split, k) for k in range(env.num_tasks(split))] for split in env.splits}
    assert {split: len(found) for split, found in tasks.items()} == {"train": 900, "test": 100}
    prompts = {split: {json.dumps(task.messages) for task in found} for split, found in tasks.items()}
    assert len(prompts["train"]) == 900 and len(prompts["test"]) == 100
    assert not prompts["train"] & prompts["test"]
    assert len({task.id for found in tasks.values() for task in found}) == 1000
    assert tasks["train"][7].source == "verifiers/Letters"
    again = envs.make("verifiers", taskset=LETTERS, tasks=1000)
    assert all(again.task(task_split, 7) == tasks[task_split][7] for task_split in again.splits)
    for index in (-1, 100):
        with pytest.raises(IndexError):
            env.task("test", index)
    copied = envs.make("verifiers", taskset=LETTERS, tasks=240, options='{"copies": 2, "letter": "e"}')
    assert copied.num_tasks("train") + copied.num_tasks("test") == 120  # the same prompt once
    assert "letter e in" in copied.task("train", 0).messages[1]["content"]


@pytest.mark.slow
def test_any_text_gets_a_verdict_in_bounded_time_and_always_the_same(env):
    from test_text_envs import MEGABYTES

    task = env.task("train", 0)
    for text in MEGABYTES:
        with quick(text[:20], most=10):
            step, again = env.start(task, 1).step(text), env.start(task, 1).step(text)
        assert step == again
        assert step.terminated and step.info["correct"] == 0 and step.reward in (0, 0.5)  # 99...9 is a number
    for text, raised in (("raise", 1), ("nan", 0)):
        step = env.start(task, 1).step(text)
        assert step.terminated and (step.reward, step.info["raised"], step.info["correct"]) == (0, raised, 0)


@pytest.mark.slow
def test_rewards_that_take_too_long_are_no_verdict(env):
    def check(limit):
        hasty = copy.copy(env)  # others go on with the limit that they have
        hasty.config = dataclasses.replace(env.config, timeout=limit)
        began, steps, task = time.monotonic(), [], env.task("train", 0)
        waiting = [threading.Thread(target=lambda: steps.append(hasty.start(task, 0).step("wait")))
                   for _ in range(5)]
        [thread.start() for thread in waiting]
        [thread.join() for thread in waiting]
        assert time.monotonic() - began < 5 * limit and len(steps) == 5  # at once, that is
        for step in steps:
            assert step.truncated and not step.terminated and step.info == {"correct": 0, "error": 1}

    in_time(check, (1.0, 4.0, 12.0))


@pytest.mark.slow
def test_it_is_scored_where_a_loop_runs(env):
    async def main():
        call = envs.Calls(env)
        task = env.task("train", 0)
        steps = await asyncio.gather(*(call(env.start(task, 0).step, str(k)) for k in range(8)))
        direct = env.start(task, 0).step("3")  # nothing of it is in this loop
        return [step.info["exact"] for step in steps], direct.info["exact"]

    word = env.task("train", 0).messages[1]["content"].split()[7]
    right = word.count("a")
    assert envs.run(main()) == ([float(k == right) for k in range(8)], float(right == 3))


@pytest.mark.slow
@pytest.mark.parametrize("options, said", [
    ({"taskset": f"{FILE}:Boxes"}, "task 0 needs a runtime .for passes.: not supported"),
    ({"taskset": f"{FILE}:Prepared"}, "needs a runtime .for setup."),
    ({"taskset": f"{FILE}:Contained"}, "needs a container"), ({"taskset": f"{FILE}:Tools"}, "needs tools"),
    ({"taskset": f"{FILE}:Opening"}, "needs a prompt of texts"),
    ({"taskset": f"{FILE}:Unscored"}, "needs a reward"), ({"taskset": "no-such"}, "'no-such' not found"),
    ({"taskset": "openenv", "options": '{"base_url": "http://127.0.0.1:1"}'}, "needs an Env of its own"),
    ({"taskset": f"{FILE}:Nothing"}, "no attribute 'Nothing'"),
    ({"taskset": LETTERS, "options": '{"lettre": "e"}'}, "option options: expected some of .*letter, copies"),
    ({"taskset": LETTERS, "options": '{"letter'}, "option options"),
    ({"taskset": LETTERS, "correct": "exakt"}, "no reward 'exakt'.* mean 'exact'.*known: exact, number"),
    ({"taskset": LETTERS, "tasks": 0}, "expected 2 tasks or more, found 0"),
    ({"taskset": LETTERS, "tasks": 1}, "expected 2 tasks or more, found 1")])
def test_what_cannot_be_played_is_refused_in_a_line(vf, options, said):
    with pytest.raises(envs.BadInput, match=said) as told:
        envs.make("verifiers", **options).num_tasks("train")
    assert "\n" not in str(told.value)
