"""The four scripts from the command line to the run folder. KILLS=10 pytest -m slow ... kills more often."""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

import a2c_vecenv as a2c
import envs.chat
import grpo_llm
import ppo_llm
import sft
from envs.countdown import Countdown
from tests.density import MOST, density
from tests.run_folders import (
    LAST,
    ROOT,
    SMALL,
    TINY,
    command_line,
    episodes,
    fork,
    full_disk,
    kill_at,
    killed_after,
    log_lines,
    receipt_of,
    records,
    same_checkpoint,
    same_end,
    same_tree,
    signal_once,
    slow_but,
    spoken,
    timeless,
    train,
    until,
    weights_of,
    write_jsonl,
)
from tools.runs import experiment_hash
from tools.validate_train_log import COMMON, METRICS, keys_of, name_of, validate

RL = [grpo_llm, ppo_llm]
LLM = [*RL, sft]
ALL = [*LLM, a2c]
RICH = {  # flags whose runs log every metric, and keep more than the plain ones from step to step
    grpo_llm: dict(epochs=2, minibatches=2, kl_coef=0.1, learning_rate=1e-3),
    ppo_llm: dict(kl_coef=0.05, kl_target=0.01, learning_rate=1e-3),
    sft: {}, a2c: {},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """script, flags -> a finished run that kept all checkpoints and episodes; each is made once."""
    @functools.cache
    def of(script, **flags):
        folder = tmp_path_factory.mktemp("finished") / script.__name__
        flags = in_files(folder.parent, flags)
        every = dict(log_episodes=1.0) if script in RL else {}
        return train(script, folder, **every | dict(checkpoint_every=1, keep_checkpoints=0) | flags)
    return of


SUMS = ["6 18 14 -> 38", "1 1 -> 2", "9 4 -> 5", "20 20 20 -> 60", "2 5 -> 7", "8 8 1 -> 1", "3 7 -> 10"]


def in_files(folder, flags):
    """The flags with paths of files in place of {d}, where rows to learn from are written."""
    if "train_files" not in flags:
        return flags
    turns = [[dict(role="user", content=text), dict(role="assistant", content=text[::-1])] for text in SUMS]
    write_jsonl(folder / "rows.jsonl", [dict(prompt=text, response=text[::-1]) for text in SUMS])
    write_jsonl(folder / "chats.jsonl", [dict(messages=messages) for messages in (
        *turns, *(one + other for one, other in zip(turns, turns[1:], strict=False)))])
    return flags | {name: tuple(path.replace("{d}", str(folder)) for path in flags[name])
                    for name in ("train_files", "val_files") if name in flags}


def go_on(script, folder, whole, **flags):
    """The command that made `whole`, with another run folder and other flags that may change."""
    own = dict(log_episodes=1.0) if script in RL else {}
    return train(script, folder, **own | in_files(whole.parent, flags))


def write(folder, text):
    path = folder / "custom.py"
    path.write_text(text)
    return path


def start_weights():
    return load_file(Path(TINY) / "model.safetensors")


# At most, for all that a script promises: its lines, and the characters of a line of code.
# One in, one out: these lengths are upper bounds. A change that needs more lines takes something out.
BOUNDS = {grpo_llm: (2143, 59), ppo_llm: (2191, 59), sft: (1443, 59.5), a2c: (737, 61)}


@pytest.mark.parametrize("script", ALL)
def test_scripts_are_plain_and_short_and_have_few_flags(script):
    lines, width = BOUNDS[script]
    found = density(Path(script.__file__))
    too_much = [name for name, most in (MOST | dict(lines=lines, width=width)).items() if found[name] > most]
    assert not too_much, found
    assert 10 < len(dataclasses.fields(script.Args)) <= (56 if script in RL else 45)


@pytest.mark.parametrize("script", ALL)
def test_the_log_passes_the_validator_and_holds_the_metrics_of_the_table(script, finished):
    folder, algo = finished(script, **RICH[script]), script.__name__.split("_")[0]
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    assert (verdict["records"], verdict["resumes"], verdict["errors"]) == (4 if script is a2c else 5, 0, 0)
    assert log_lines(folder)[0]["meta"]["algo"] == algo
    logged = {key for record in records(folder) for key in record} - set(COMMON)
    assert [key for key in logged if not name_of(algo, key)] == []
    for name, (kind, _) in METRICS[algo].items():
        for key in keys_of(name, kind):
            found = [one for one in {*logged, *COMMON} if re.fullmatch(re.sub("<.+?>", ".+", key), one)]
            assert found or key in ("data/truncated", "data/dropped", "data/repeated", "data/bad"), (
                f"{key} is never logged")
    evaluated = [r["iteration"] for r in records(folder) if {"val/countdown/pass@1", "eval/return"} & set(r)]
    assert evaluated == ([2, 4] if script is a2c else [0, 2, 4])


SAVING = 1e-3  # seconds of a checkpoint


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """script, flags -> a run of five iterations of 10 s each, of which it computes for 20 s on two cores: the
    time of a step, as all others but checkpoints take none.  -> its folder, what it said; each is made once.
    """
    @functools.cache
    def of(script, **flags):
        folder, clock, said = tmp_path_factory.mktemp("five") / script.__name__, [1000.0], io.StringIO()

        def tick():
            clock[0] += 1e-7
            return clock[0]

        length = dict(steps=5, model=TINY, batch_size=4) if script is sft else dict(iterations=5)
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(time, "perf_counter", tick)
            patch.setattr(time, "process_time", lambda: 2 * tick())
            patch.setattr(os, "system", lambda command: 0)  # the end of a run starts no tool
            optimiser = torch.optim.Adam if script is a2c else torch.optim.AdamW
            step = optimiser.step

            def slow_step(*given):
                clock[0] += 10
                return step(*given)

            def slow_save(*given):
                clock[0] += SAVING
                return save(*given)

            save = torch.save
            patch.setattr(torch, "save", slow_save)
            patch.setattr(optimiser, "step", slow_step)
            train(script, folder, **length | dict(checkpoint_every=2, keep_checkpoints=1, eval_every=0)
                  | (dict(eval_tasks=12, log_episodes=0.5) if script in RL else {}) | flags)
        return folder, said.getvalue()
    return of


LESS = {a2c: dict(log_every=2), sft: dict(log_every=2), grpo_llm: {},
        ppo_llm: dict(critic_warmup=5, critic_epochs=1, critic_minibatches=1)}


@pytest.mark.parametrize("script", slow_but((grpo_llm, sft, a2c), ALL))
def test_times_and_rates_are_of_what_was_done_since_the_record_before(script, five):
    folder, said = five(script, **LESS[script])
    found = records(folder)
    assert [r["iteration"] for r in found] == ([*range(6)] if script in RL else [0, 2, 4, 5][script is a2c:])
    before = dict(iteration=0, env_steps=0, wall_time_s=0.0)
    for record in found:
        seconds = 10 * (record["iteration"] - before["iteration"])
        saved = [step for step in (2, 4) if before["iteration"] <= step < record["iteration"]]
        assert record["time/checkpoint"] == pytest.approx(SAVING * len(saved), abs=SAVING / 10)
        assert record["wall_time_s"] == pytest.approx(10 * record["iteration"], abs=0.01)
        if seconds:
            speed = (record["env_steps"] - before["env_steps"]) / seconds
            expected = {"sps": speed, "system/cpu_utilization": 2.0, "train/throughput": speed}
            expected |= {} if script is a2c else {"time/update": seconds}
            for name in expected.keys() & record.keys():
                assert record[name] == pytest.approx(expected[name], rel=1e-3), name
        used = psutil.Process().memory_info().rss / 2**30
        assert record["system/memory_usage"] == pytest.approx(used, rel=0.9)
        before = record
    state = torch.load(folder / "checkpoints" / "step_000004" / "trainer_state.pt")
    assert state["elapsed"] == pytest.approx(40, abs=0.01)
    assert "warning" not in said


@pytest.mark.parametrize("script", slow_but((grpo_llm,), RL))
def test_a_share_of_the_episodes_is_written_and_the_summary_is_of_all(script, five):
    """Others in each iteration; of evaluations always the same, the first replies to ten tasks among them."""
    folder, _ = five(script, **LESS[script])
    chosen = set()
    size = SMALL[script.__name__]["prompts_per_iteration"] * SMALL[script.__name__]["group_size"]
    for record in records(folder)[1:]:
        found, summary = episodes(folder, f"train_step_{record['iteration']:06d}")
        assert summary["episodes"] == size > len(found) == summary["logged"] > 0
        assert summary["reward_sum"] == pytest.approx(record["train/reward"] * size)
        assert summary["correct_sum"] == pytest.approx(record["train/pass@1"] * size)
        chosen.add(tuple(e["number"] for e in found))  # of one reply to a prompt: how many
    assert len(chosen) == 5 if script is grpo_llm else len(chosen) > 1
    (start, summary), (end, _) = (episodes(folder, f"val_step_00000{n}") for n in (0, 5))
    places = [[(e["task_id"], e["number"]) for e in found] for found in (start, end)]
    assert places[0] == places[1] and 10 <= len(start) < summary["episodes"] == 24
    assert {f"countdown-test-{n}" for n in range(10)} <= {task for task, number in places[0] if not number}


def test_only_an_iteration_without_a_trainable_group_may_lack_the_numbers_of_an_update(finished, tmp_path):
    lines = log_lines(finished(grpo_llm, **RICH[grpo_llm]))
    assert lines[2].pop("train/entropy") and lines[2]["rollout/groups_trainable"]
    verdicts = []
    for lines[2]["rollout/groups_trainable"] in (1, 0):
        write_jsonl(tmp_path / "train_log.jsonl", lines)
        verdicts.append(validate(tmp_path)["ok"])
    assert verdicts == [False, True]


SEVERAL_TURNS = dict(env="tests/two_turn.py:FourTurn", max_context_tokens=45, iterations=1)


@pytest.mark.parametrize(("script", "more"), [
    (grpo_llm, {}), (grpo_llm, SEVERAL_TURNS), (ppo_llm, {}),
    pytest.param(ppo_llm, SEVERAL_TURNS, marks=pytest.mark.slow)])
def test_the_counters_and_rates_of_the_log_add_up(script, more, finished):
    folder = finished(script, **RICH[script], **more)
    num_tasks = SMALL[script.__name__]["prompts_per_iteration"]
    num_episodes = num_tasks * SMALL[script.__name__]["group_size"]
    before, seen = records(folder)[0], set()
    for record in records(folder)[1:]:
        played, summary = episodes(folder, f"train_step_{record['iteration']:06d}")
        assert len(played) == num_episodes == summary["episodes"] == summary["logged"]
        tasks = {episode["task_id"] for episode in played}
        assert len(tasks) == num_tasks and not tasks & seen  # new ones in each iteration
        seen |= tasks
        tokens = sum(sum(s["response_mask"]) for episode in played for s in episode["segments"])
        assert record["env_steps"] - before["env_steps"] == tokens
        assert not more or record["rollout/turns"] > 1 < record["rollout/segments"]
        if script is ppo_llm:
            assert record["train/policy_steps"] == (2 if record["iteration"] > 1 else 0)
            updates = record["train/policy_steps"] + 2 * 2
        else:
            updates = min(4, 2 * record["rollout/groups_trainable"])  # a minibatch holds whole groups
            learned = []  # the advantages of the sampled tokens of groups in which one is not 0
            for _, group in itertools.groupby(played, lambda episode: episode["task_id"]):
                segments = [s for episode in group for s in episode["segments"] if s["advantages"]]
                if any(any(s["advantages"]) for s in segments):
                    for s in segments:
                        learned += itertools.compress(s["advantages"], s["response_mask"])
            assert record["critic/advantages/mean"] == pytest.approx(sum(learned) / max(len(learned), 1))
        assert record["opt_steps"] - before["opt_steps"] == updates
        rewards = [e["reward"] for e in played]
        assert record["train/reward"] == pytest.approx(sum(rewards) / num_episodes)
        assert record["train/pass@1"] == pytest.approx(summary["correct_sum"] / num_episodes)
        assert [record[f"critic/score/{of}"] for of in ("mean", "max", "min")] == [
            pytest.approx(summary["reward_sum"] / num_episodes), max(rewards), min(rewards)]
        ends = {k.rpartition("/")[2]: v for k, v in record.items() if k.startswith("rollout/termination/")}
        for end, share in ends.items():
            assert share == sum(e["termination"] == end for e in played) / num_episodes
        assert record["rollout/finished"] == ends["done"]
        assert record["response_length/clip_ratio"] == pytest.approx(ends["length"] + ends["context"])
        sizes = dict(response_length=[sum(len(s["response_ids"]) for s in e["segments"]) for e in played],
                     prompt_length=[len(e["segments"][0]["prompt_ids"]) for e in played])
        for name, numbers in sizes.items():
            expected = [sum(numbers) / num_episodes, max(numbers), min(numbers)]
            assert [record[f"{name}/{of}"] for of in ("mean", "max", "min")] == pytest.approx(expected)
        for name in ("turns", "segments"):
            assert record[f"rollout/{name}"] == sum(len(e[name]) for e in played) / num_episodes
        seconds = record["wall_time_s"] - before["wall_time_s"]
        assert sum(v for k, v in record.items() if k.startswith("time/")) <= seconds
        assert record["sps"] * seconds == pytest.approx(tokens)
        before = record


def test_tensorboard_gets_the_numbers_of_the_log(finished, tmp_path):
    """... and what a resume makes again takes the place of what it was before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, flags = finished(grpo_llm, **RICH[grpo_llm]), RICH[grpo_llm]
    folder = go_on(grpo_llm, killed_after(whole, tmp_path / "run", 3), whole, **flags)
    board = EventAccumulator(str(folder)).Reload()
    names = {key for record in records(folder) for key in record} - {
        "run_id", "trace_id", "iteration", "env_steps", "opt_steps"}
    assert names == set(board.Tags()["scalars"])
    for name in names:
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert found == [(r["iteration"], pytest.approx(r[name], rel=1e-6))
                         for r in records(folder) if name in r]


ROWS_OF_FILES = dict(model=TINY, batch_size=5, train_files=("{d}/rows.jsonl",))
RESUMED = {
    "grpo": (grpo_llm, RICH[grpo_llm]),
    "grpo-lora": (grpo_llm, dict(lora_rank=2, kl_coef=0.1, learning_rate=1e-2, dtype="bfloat16")),
    "grpo-turns": (grpo_llm, dict(env="tests/two_turn.py:TwoTurn", dynamic_sampling=2, loss="gspo",
                                  max_context_tokens=40)),
    "ppo": (ppo_llm, RICH[ppo_llm]),
    "ppo-shared": (ppo_llm, dict(critic="shared", lora_rank=2, learning_rate=1e-2, prompts_per_iteration=4,
                                 eval_tasks=1, eval_samples=1, eval_every=4)),
    "ppo-turns": (ppo_llm, dict(env="tests/two_turn.py:TwoTurn", max_context_tokens=40, lora_rank=2,
                                dtype="bfloat16", kl_coef=0.05, critic_epochs=1, target_kl=2e-3, epochs=3)),
    "ppo-none": (ppo_llm, dict(critic="none")),
    "sft": (sft, {}),
    "sft-model": (sft, dict(model=TINY, dtype="bfloat16", microbatch_tokens=60)),
    # Ten rows an epoch. Killed after step 3: the loss was least after step 2, and its record is not yet due.
    "sft-packing": (sft, dict(ROWS_OF_FILES, train_files=("{d}/rows.jsonl=1.67",), packing=True,
                              microbatch_tokens=130, log_every=5, warmup_steps=4,
                              learning_rate=0.03)),
    "sft-messages": (sft, dict(ROWS_OF_FILES, train_files=("{d}/chats.jsonl",), messages_key="messages",
                               steps=0, epochs=1.4, schedule="wsd")),
    "sft-lora": (sft, dict(ROWS_OF_FILES, lora_rank=2, learning_rate=1e-2, dtype="bfloat16", packing=True,
                           gradient_checkpointing=True)),
    "a2c": (a2c, {}),
    "a2c-td0": (a2c, dict(num_steps=1, update_every=2, log_every=3, checkpoint_every=2)),
    "a2c-cartpole": (a2c, dict(env_id="CartPole-v1", num_steps=9)),
    "a2c-patch": (a2c, dict(network="patch", chunk=5, dtype="bfloat16")),
    "a2c-goals": (a2c, dict(env_kwargs=("max_steps=9", "pack=2bpp", "stack_k=2", "goal_in_obs=true",
                                        "num_goals=4"))),
}


@pytest.mark.parametrize("case", slow_but(("grpo", "ppo", "ppo-shared", "sft-packing", "a2c"), RESUMED))
def test_a_killed_run_goes_on_bit_for_bit_and_keeps_its_errors(case, finished, tmp_path):
    script, flags = RESUMED[case]
    whole = finished(script, **flags)
    at = 3 if case == "sft-packing" else 2
    folder = killed_after(whole, tmp_path / "run", at)
    torch.manual_seed(1234)  # whatever this process did before must not matter
    clock, began = time.perf_counter, time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:  # where a run looks at the clock twice, nothing comes between
        patch.setattr(time, "perf_counter", lambda: (
            began if sys._getframe(1).f_code.co_name == "__init__" else clock()))
        go_on(script, folder, whole, **flags)
    same_end(whole, folder)
    verdict = validate(folder)
    counts = verdict["records"], verdict["resumes"], verdict["errors"]
    assert verdict["ok"] and counts == (len(records(whole)), 1, 1), verdict
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert (mark["iteration"], mark["checkpoint"]) == (at, f"checkpoints/step_00000{at}")
    assert len({line["run_id"] for line in records(folder)}) == 1
    state = torch.load(whole / "checkpoints" / f"step_00000{at}" / "trainer_state.pt")
    after = next(record for record in records(folder) if record["iteration"] > at)
    seconds = after["wall_time_s"] - state["elapsed"]  # since it was taken up again
    assert after["sps"] * seconds == pytest.approx(after["env_steps"] - state["env_steps"], rel=1e-3)
    named = [json.loads((one / "checkpoints" / "state.json").read_text()) for one in (whole, folder)]
    assert named[0] == named[1] and named[0]["last"] == LAST and ("best" in named[0]) is (script is sft)
    if case == "ppo-shared":  # or nothing is shown
        assert state["critic"]["head.weight"].any()
    if case == "sft-packing":
        assert named[0]["best"] == "step_000002" and len(state["window"]) == 1
    first, last = (weights_of(whole / "checkpoints" / step) for step in (f"step_00000{at}", LAST))
    assert any(not torch.equal(first[name], last[name]) for name in first)  # there was something to continue
    if script in RL:  # made again where they were not yet
        for path in whole.glob("episodes/*"):
            assert (folder / "episodes" / path.name).read_bytes() == path.read_bytes()


# At the first task it starts a process that lives on when this one is killed.
OUTLIVED = """
import os
import time

def score(r, started=[]):
    if not started:
        started.append(os.fork())
        if not started[0]:
            time.sleep(15)
            os._exit(0)
    return r.correct
"""


@pytest.mark.parametrize("script", slow_but((grpo_llm,), ALL))
def test_a_second_run_in_a_folder_is_refused_until_the_first_one_ends(script, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL[script.__name__].items()]
    flags += ["--run-dir", tmp_path / "run"]
    if script in RL:
        flags += ["--reward-fn", f"{write(tmp_path, OUTLIVED)}:score", "--env-kwargs", "test_tasks=32"]
    name, log = f"{script.__name__}.py", tmp_path / "run" / "train_log.jsonl"
    first = multiprocessing.get_context("fork").Process(  # from this one, which has imported all
        target=spoken, args=(tmp_path / "said", ROOT, {}, name, *flags, "--seed", 3))
    with pytest.MonkeyPatch.context() as patch:
        signal_once(patch, signal.SIGSTOP, 2)
        first.start()
    try:
        until(lambda: psutil.Process(first.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
        assert first.is_alive(), (tmp_path / "said").read_text()
        before = log.read_bytes()
        assert command_line(name, *flags, "--seed", 3) == 1
        assert log.read_bytes() == before
    finally:
        first.kill()
        first.join()
    told = f"error: --run-dir {tmp_path}/run: process {first.pid} on {os.uname().nodename} is running in it"
    assert told in capsys.readouterr().err
    assert command_line(name, *flags, "--seed", 3) == 0
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 0, verdict


def test_where_nothing_can_be_locked_a_line_says_so(tmp_path, monkeypatch, capsys):
    def lockf(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    folder = train(grpo_llm, tmp_path / "run", iterations=0, eval_tasks=1)
    assert validate(folder)["ok"]
    assert re.search(f"warning: {folder}/lock cannot be locked .*No locks available", capsys.readouterr().out)


SIGNALS = {f"{script.__name__}-{name}": (script, name) for script in ALL for name in ("SIGTERM", "SIGINT")
           if (script, name) != (a2c, "SIGINT")}  # which is in test_a2c_runs.py


@pytest.mark.parametrize("case", slow_but(("grpo_llm-SIGTERM",), SIGNALS))
def test_sigterm_saves_and_ctrl_c_leaves_a_receipt_and_the_same_command_goes_on(
        case, finished, tmp_path, monkeypatch, capsys):
    script, name = SIGNALS[case]
    whole, folder = finished(script), tmp_path / "run"
    flags = dict(keep_checkpoints=0, checkpoint_every=1 if name == "SIGINT" else 3)
    signal_once(monkeypatch, getattr(signal, name), 2)

    if name == "SIGTERM":
        train(script, folder, **flags)
        said = capsys.readouterr().out
        assert re.search(f"SIGTERM: stopped after (iteration|step) 2; .*--run-dir {folder}", said)
        assert [record["iteration"] for record in records(folder)] == [0, 1, 2][script is a2c:]
    else:
        with pytest.raises(SystemExit, match="error: KeyboardInterrupt.*receipt"):
            train(script, folder, **flags)
        error, *_ = receipt_of(folder)
        assert error["type"] == "KeyboardInterrupt"

    train(script, folder, **flags)
    same_end(whole, folder)
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, name == "SIGINT"), verdict


def test_ctrl_c_while_replies_are_sampled_is_one_line(tmp_path, monkeypatch):
    generate = grpo_llm.generate
    monkeypatch.setattr(grpo_llm, "generate", lambda *given: [generate(*given), signal.raise_signal(2)][0])
    with pytest.raises(SystemExit, match="error: KeyboardInterrupt.*receipt"):
        train(grpo_llm, tmp_path / "run")


@pytest.mark.parametrize("script", slow_but((grpo_llm,), RL))
def test_neither_evaluations_nor_the_log_change_what_is_trained(script, finished, tmp_path):
    whole = finished(script)
    bare = train(script, tmp_path / "run", eval_every=0, eval_tasks=2, checkpoint_every=3, log_episodes=0.0)
    same_checkpoint(whole, bare)
    evaluated = [[record["iteration"] for record in records(folder) if "val/countdown/greedy" in record]
                 for folder in (whole, bare)]
    assert evaluated == [[0, 2, 4], [0, 4]]
    trained = [[{name: value for name, value in record.items() if not name.startswith("val/")}
                for record in timeless(folder)] for folder in (whole, bare)]
    assert trained[0] == trained[1]
    # Two are kept by default, and ten validation episodes, as many as there are, are always written.
    assert sorted(path.name for path in (bare / "checkpoints").glob("step*")) == ["step_000003", LAST]
    assert {path.name for path in bare.glob("episodes/*")} == {f"val_step_00000{n}.jsonl" for n in (0, 4)}
    assert episodes(bare, "val_step_000004")[1]["logged"] == 2


CHANGED = {
    grpo_llm: (dict(clip_low=0.1), "--clip-low 0.1"),
    ppo_llm: (dict(critic="shared"), r"--critic shared .it was own."),
    sft: (dict(weight_decay=0.5), "--weight-decay 0.5"),
    a2c: (dict(anneal=False), "--anneal False"),
}


ONE = {  # what makes a run of one step short
    "sft": dict(steps=1, batch_size=1, eval_every=0, eval_tasks=1, eval_samples=1, schedule="constant"),
    "a2c_vecenv": dict(iterations=1, eval_every=0, eval_episodes=2),
}


def hashes(script, folder, **flags):
    short = ONE.get(script.__name__, dict(iterations=0, eval_tasks=1, eval_samples=1))
    meta = log_lines(train(script, folder, **short | flags))[0]["meta"]
    return meta["config_hash"], experiment_hash(meta)


@pytest.mark.parametrize("script", slow_but((a2c,), ALL))
def test_runs_that_give_the_same_have_one_hash_and_seeds_of_an_experiment_another(script, tmp_path):
    """sft.py's weights are random here, and follow from the seed."""
    more = dict(keep_checkpoints=7, checkpoint_every=3, experiment="other")
    if script in RL:
        more |= dict(log_episodes=0.5, max_concurrent=3)
    if script is sft:
        more |= dict(steps=2)  # the rate is constant, so that a continued run may go on for longer
    one, same = hashes(script, tmp_path / "one"), hashes(script, tmp_path / "same", **more)
    seed = hashes(script, tmp_path / "seed", seed=2)
    other = hashes(script, tmp_path / "other", learning_rate=0.01)
    assert one == same and one[0] != one[1]
    assert seed[0] != one[0] and seed[1] == one[1]
    assert other[0] != one[0] and other[1] != one[1]


SPY = """import os
raise SystemExit("|".join(os.environ.get(name, "-") for name in ("HF_HOME", "WANDB_PROJECT", "ARC_API_KEY")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [*(f"{script.__name__}.py" for script in ALL), "tools/track_run.py"])
def test_a_file_of_variables_is_read_before_the_libraries_that_want_them(program, tmp_path):
    """In place of the first library that reads them stands one that says what it finds."""
    (tmp_path / ".env").write_text("HF_HOME=/from/file\nWANDB_PROJECT=file\nARC_API_KEY='a b'\n")
    first = dict(sft="datasets", a2c_vecenv="envs.pixels.pixel_goal", track_run="wandb").get(
        Path(program).stem, "numpy")
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nclass Spy:\n    def find_spec(self, name, path, target=None):\n"
        f"        if name == {first!r}: import spy\nsys.meta_path.insert(0, Spy())\n")
    (tmp_path / "train_log.jsonl").write_text('{"meta": {"run_id": "a", "args": {}}}\n')
    words = [tmp_path, "--once"] if "track" in program else []
    environment = os.environ | dict(PYTHONPATH=str(tmp_path), WANDB_PROJECT="set")
    for name in ("HF_HOME", "ARC_API_KEY"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, ROOT / program, *words], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=120)
    assert "/from/file|set|a b" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("script", slow_but((grpo_llm,), ALL))
def test_a_finished_run_stays_as_it_is_and_other_flags_are_refused_by_name(script, finished, tmp_path):
    whole = finished(script)
    folder, before = shutil.copytree(whole, tmp_path / "run"), timeless(whole)
    go_on(script, folder, whole, keep_checkpoints=5, checkpoint_every=2, experiment="other")
    assert timeless(folder) == before and validate(folder)["ok"]
    for old, new in ((3, 999_999), (4, 1_000_000)):  # of which the larger is the newest
        (folder / "checkpoints" / f"step_{old:06d}").rename(folder / "checkpoints" / f"step_{new}")
    go_on(script, folder, whole)
    assert timeless(folder) == before
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [4, 4]
    # A digit, but no number; in bytes, since not every locale has it in names of files.
    os.mkdir(os.path.join(os.fsencode(folder / "checkpoints"), "step_²".encode()))
    (folder / "checkpoints" / "step_000009_mine").mkdir()  # nor is a copy a checkpoint
    both = r"(?=.*--seed 2 .it was 1.).*--learning-rate 0.25 .it was "
    for flags, named in ((dict(seed=2, learning_rate=0.25), both),
                         (dict(env_kwargs=("seed=9" if script is not a2c else "tau=0.06",)), "--env-kwargs"),
                         CHANGED[script]):
        with pytest.raises(envs.BadInput, match=named):
            go_on(script, folder, whole, **flags)
    if script is grpo_llm:
        with pytest.raises(envs.BadInput, match=r"algo \w+ \(it was grpo\)"):
            train(ppo_llm, folder)
    assert timeless(folder) == before
    shutil.rmtree(folder / "checkpoints")  # so all begins anew, without the marks of earlier resumes
    with pytest.raises(envs.BadInput, match="--seed 2 .it was 1."):
        go_on(script, folder, whole, seed=2)
    assert validate(go_on(script, folder, whole))["resumes"] == 0 and validate(folder)["ok"]
    log = folder / "train_log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"args": {', b'"args": {"pool": 9, ', 1))
    with pytest.raises(envs.BadInput, match="--pool None .it was 9.: use another"):  # of a variant
        go_on(script, folder, whole)


@pytest.mark.parametrize("script", slow_but((a2c,), ALL))
def test_a_finished_run_is_extended_where_no_schedule_depends_on_its_length(script, tmp_path):
    """Windows, evaluation and checkpoint fall on the last iteration too."""
    length = "steps" if script is sft else "iterations"
    constant = {sft: dict(schedule="constant"), a2c: dict(anneal=False)}
    constant = constant.get(script, dict(final_learning_rate=1.0))
    flags = dict(eval_every=0) | (dict(eval_tasks=1, model=TINY) if script in LLM else {})
    whole = train(script, tmp_path / "whole", **flags | constant | {length: 2})
    folder = train(script, tmp_path / "run", **flags | constant | {length: 1})
    train(script, folder, **flags | constant | {length: 2})
    same_tree(*(weights_of(run / "checkpoints/step_000002") for run in (whole, folder)))
    assert validate(folder, strict=True)["ok"] and records(folder)[-1]["iteration"] == 2
    decays = {sft: dict(schedule="cosine"), a2c: dict(anneal=True)}.get(script, dict(final_learning_rate=0.1))
    other = train(script, tmp_path / "other", **flags | decays | {length: 1})
    with pytest.raises(envs.BadInput, match=f"--{length} 2 .it was 1."):
        train(script, other, **flags | decays | {length: 2})


def test_what_a_kill_or_a_full_disk_left_of_a_first_line_is_begun_anew_and_errors_stay(tmp_path):
    log, seen = tmp_path / "run" / "train_log.jsonl", tmp_path / "seen"
    score = f"def score(r):\n    open({str(seen)!r}, 'w').write(open({str(log)!r}).read())\n    return 0.0\n"
    flags = dict(iterations=0, eval_tasks=1, reward_fn=f"{write(tmp_path, score)}:score")
    log.parent.mkdir()
    log.write_text('{"meta": {"schema_ver')
    lines = log_lines(train(grpo_llm, log.parent, **flags))
    error = {"trace_id": lines[-1]["trace_id"], "error": dict(type="OSError", message="", receipt=None)}
    log.write_text(json.dumps(lines[0]) + "\n" + json.dumps(error) + "\n")
    assert validate(train(grpo_llm, log.parent, **flags))["errors"] == 1
    assert json.loads(seen.read_text().splitlines()[1]) == error  # on the disk before the first record


@pytest.mark.slow
def test_two_runs_that_begin_in_the_same_second_do_not_share_a_folder(tmp_path, monkeypatch):
    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, zone):
            return cls(2026, 11, 30, 12, tzinfo=zone)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo_llm, "datetime", Stopped)
    ends = [command_line("grpo_llm.py", "--iterations", 0, "--eval-tasks", 1, "--env-kwargs", "test_tasks=32")
            for _ in range(3)]
    (folder,) = tmp_path.glob("runs/grpo/20261130_120000__*")
    assert ends == [0, 1, 1] and validate(folder)["ok"]


@pytest.mark.parametrize("script, template", [
    (grpo_llm, "model"), (grpo_llm, "plain"), (sft, "plain"), (sft, "file")])
def test_of_several_templates_the_default_is_taken_and_plain_begins_with_bos(script, template, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    short = dict(steps=1, batch_size=1) if script is sft else dict(
        iterations=1, prompts_per_iteration=1, group_size=2)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
    tokenizer.save_pretrained(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("none")
    given = template
    if template == "file":  # with a byte order mark, which is no text
        given = str(tmp_path / "template.jinja")
        Path(given).write_text("\ufeff" + tokenizer.get_chat_template())
    folder = train(script, tmp_path / "run", model=str(model), chat_template=given, eval_every=0,
                   eval_tasks=1, eval_samples=1, **short)
    saved = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step_000001")
    text = saved.apply_chat_template([dict(role="user", content="6 18")], tokenize=False)
    assert text == ("<bos>6 18" if template == "plain" else "<bos> 6 18")
    assert saved(text, add_special_tokens=False).tokens() == ["<bos>", "6", "18"]


@pytest.mark.slow
def test_another_reward_function_chat_template_or_model_is_refused(tmp_path):
    """A template of a file takes the place of the model's: the same text does the same, another does not."""
    reward, model = write(tmp_path, "def score(r):\n    return r.correct\n"), tmp_path / "model"
    template = Path(shutil.copy(Path(TINY, "chat_template.jinja"), tmp_path))
    shutil.copytree(TINY, model)
    own = dict(reward_fn=f"{reward}:score", model=str(model), iterations=0, eval_tasks=2)
    flags = own | dict(chat_template=str(template))
    folder = train(grpo_llm, tmp_path / "run", **flags)
    assert timeless(folder) == timeless(train(grpo_llm, tmp_path / "models", **own))
    train(grpo_llm, folder, **flags)
    write(tmp_path, "def score(r):\n    return 2 * r.correct\n")
    with pytest.raises(envs.BadInput, match=r"reward_and_template_sha256 \w+ \(it was"):
        train(grpo_llm, folder, **flags)
    write(tmp_path, "def score(r):\n    return r.correct\n")
    template.write_text("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %} : ")
    with pytest.raises(envs.BadInput, match=r"reward_and_template_sha256 \w+ \(it was"):
        train(grpo_llm, folder, **flags)
    assert timeless(train(grpo_llm, tmp_path / "twice", **flags)) != timeless(folder)
    weights = start_weights()
    weights["model.norm.weight"] += 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(envs.BadInput, match=r"model_sha256 \w+ \(it was"):
        train(grpo_llm, folder, **flags)
    (model / "generation_config.json").write_text(json.dumps(dict(temperature=0.6, pad_token_id=-1)))
    grpo_llm.load_weights(str(model)).save_pretrained(tmp_path / "saved")  # which writes no such thing


@pytest.mark.parametrize("script", slow_but((grpo_llm,), RL))
def test_an_evaluation_alone_needs_no_iteration_and_a_run_no_folder(script, tmp_path, monkeypatch):
    """From anywhere: the default model lies beside the script."""
    monkeypatch.chdir(tmp_path)
    train(script, "", iterations=0, experiment="mine")
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    assert folder.name == records(folder)[0]["run_id"]
    assert re.fullmatch(rf"\d{{8}}_\d{{6}}__{script.__name__[:-4]}__countdown__s1", folder.name)
    (record,) = before = timeless(folder)
    assert record["iteration"] == 0 and record["val/countdown/greedy"] > 0 and validate(folder)["ok"]
    assert not list((folder / "checkpoints").glob("step_*"))
    meta = log_lines(folder)[0]["meta"]
    more = dict(keep_checkpoints=7, checkpoint_every=3, experiment="other", log_episodes=0.5, print_samples=1,
                max_concurrent=3)
    assert timeless(train(script, folder, iterations=0, **more)) == before
    assert log_lines(folder)[0]["meta"]["config_hash"] == meta["config_hash"]  # they do not matter


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("script", "damage"), [
    (sft, lambda folder: (folder / "model.safetensors").unlink()),
    (sft, lambda folder: os.truncate(  # as of one that could not be read once, when an earlier one was
        folder.parents[1] / "train_log.jsonl", torch.load(folder / "trainer_state.pt")["log_bytes"] - 1)),
    (a2c, lambda folder: os.truncate(folder / "trainer_state.pt", 1000)),
    (grpo_llm, lambda folder: flip_a_byte(folder / "model.safetensors")),
    (grpo_llm, lambda folder: (folder / "manifest.json").unlink()),
    (grpo_llm, lambda folder: (folder / "manifest.json").write_text("[]"))])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
        script, damage, tmp_path, finished, capsys):
    """New checkpoints are then older by name than the damaged one, which must not push them out."""
    whole = finished(script)
    folder = shutil.copytree(whole, tmp_path / "run")
    damage(folder / "checkpoints" / LAST)
    capsys.readouterr()
    go_on(script, folder, whole, keep_checkpoints=1)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert f"{LAST} is damaged" in said and "Traceback" not in said
    same_end(whole, folder)
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert mark["checkpoint"] == "checkpoints/step_000003"
    assert validate(folder)["ok"]


def cut_to_its_meta_line(log):
    with log.open("rb+") as file:
        file.readline()
        file.truncate()


@pytest.mark.parametrize(("damage", "names"), [
    (flip_a_byte, "checkpoints/step_*/trainer_state.pt"), (cut_to_its_meta_line, "train_log.jsonl")])
def test_when_every_checkpoint_is_damaged_one_line_says_so(damage, names, tmp_path, finished, capsys):
    folder = shutil.copytree(finished(grpo_llm), tmp_path / "run")
    for path in folder.glob(names):
        damage(path)
    log = (folder / "train_log.jsonl").read_bytes()
    with pytest.raises(envs.BadInput) as told:
        go_on(grpo_llm, folder, finished(grpo_llm))
    assert str(folder) in str(told.value) and "damaged" in str(told.value) and "\n" not in str(told.value)
    assert (folder / "train_log.jsonl").read_bytes() == log


@pytest.mark.parametrize("script", slow_but((grpo_llm,), [grpo_llm, a2c]))
def test_a_full_disk_is_one_clear_line_and_the_run_can_go_on(script, finished, tmp_path):
    """From the third checkpoint on, no file may grow to the size of the weights; the log still may grow."""
    flags = dict(hidden_size=64) if script is a2c else {}
    whole, folder = finished(script, **flags), tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in ("step_000003", LAST):
        shutil.rmtree(folder / "checkpoints" / step)
    with full_disk(300_000), pytest.raises(
            SystemExit, match="step_000003 could not be written.*earlier checkpoints stay"):
        go_on(script, folder, whole, checkpoint_every=1, keep_checkpoints=0, **flags)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "state.json", "step_000001", "step_000002"}
    assert validate(folder)["errors"] == 1 and validate(folder)["ok"]
    same_end(whole, go_on(script, folder, whole, **flags))


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory):
    """Files to be named on command lines."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("torn", "mute", "endless", "odd", "short", "capped", "coded", "coded_tokens", "longer"):
        shutil.copytree(TINY, folder / name)
    longer = AutoTokenizer.from_pretrained(TINY)
    longer.add_tokens(["<call>"])
    longer.save_pretrained(folder / "longer")
    for name, file in (("coded", "config.json"), ("coded_tokens", "tokenizer_config.json")):
        (folder / name / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        config = json.loads((folder / name / file).read_text())
        config |= dict(model_type="mine", tokenizer_class="Mine", auto_map=dict(
            AutoConfig="code.C", AutoModelForCausalLM="code.M", AutoTokenizer=["code.T", "code.T"]))
        (folder / name / file).write_text(json.dumps(config))
    (folder / "deaf.jinja").write_text("{% if add_generation_prompt %}Reply: {% else %}Reply: yes{% endif %}")
    start, end = "{% for i in range(100000) %}", "{% endfor %}"
    (folder / "loops.jinja").write_text(start + start + end + end + "{{ messages[0].content }}")
    (folder / "dangling").symlink_to(folder / "nowhere")
    Gemma2ForCausalLM(Gemma2Config(
        vocab_size=112, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.1)).save_pretrained(folder / "capped")
    os.truncate(folder / "torn" / "model.safetensors", 5000)
    (folder / "mute" / "chat_template.jinja").unlink()
    config = json.loads((folder / "short" / "config.json").read_text())
    (folder / "short" / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=9)))
    (folder / "odd" / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    (folder / "adapter").mkdir()
    (folder / "meta" / "checkpoints").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", alora_invocation_tokens=[5])))
    config = folder / "endless" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(eos_token=None)))
    (folder / "file").write_text("")
    (folder / "exits.py").write_text("raise SystemExit")
    write_jsonl(folder / "blank.jsonl", [dict(prompt="6 18 14 -> 38", response=" ")])
    (folder / "meta" / "train_log.jsonl").write_text("{}\n")
    good = [dict(prompt="6 18 14 -> 38", response="18 + 14 = 32")] * 4
    write_jsonl(folder / "good.jsonl", good)
    write_jsonl(folder / "long.jsonl", [*good, dict(prompt="6", response="18 + 14 = 32; " * 700_000)])
    return folder


BAD = [
    ([grpo_llm], "--env coutdown", r"coutdown.*did you mean 'countdown'"),
    (LLM, "--env-kwargs max_operand=3", r"max_operand'.*did you mean 'max_operands'"),
    ([grpo_llm], "--env-kwargs max_operands", r"max_operands.*key=value"),
    (LLM, "--eval-tasks 0", r"eval.tasks.*greater than 0"),
    ([grpo_llm], "--model {d}/nowhere", r"--model \S*nowhere.*config\.json"),
    (LLM, "--model {d}/torn", r"--model \S*torn.*"),
    ([grpo_llm], "--model {d}/odd", r"--model \S*odd.*hidden_size"),
    (ALL, "--run-dir {d}/file/run", r"error: .*Not a directory: '\S*file/run"),
    ([grpo_llm], "--run-dir {d}/meta", r"meta/train_log\.jsonl: expected a meta line"),
    ([grpo_llm], "--model {d}/meta", r"--model \S*meta: .*expected one of .*checkpoints/step_"),
    ([grpo_llm], "--model {d}/adapter", r"--model \S*adapter: .*as --lora-adapter-path"),
    ([grpo_llm], "--model gpt2", r"--model gpt2: .*connect to 'https://huggingface.co'"),
    ([grpo_llm], "--chat-template {d}/no.jinja", r"--chat-template \S*no\.jinja: expected model"),
    ([grpo_llm, sft], "--chat-template {d}/file", r"--chat-template \S*file: it writes the same for two"),
    ([ppo_llm, sft], "--chat-template {d}/deaf.jinja", r"--chat-template \S*deaf\.jinja: it writes the same"),
    ([grpo_llm], "--chat-template {d}/loops.jinja", r"loops\.jinja: it took more than 0\.2 s"),
    (LLM, "--model {d}/coded", r"--model \S*coded: it needs code of its own .*trust_remote_code=True"),
    ([grpo_llm, sft], "--model {d}/coded_tokens", r"--model \S*coded_tokens: it needs code of its own"),
    ([sft], "--run-dir {d}/dangling", r"--run-dir \S*dangling: expected a folder to write into, or a new"),
    ([grpo_llm], "--env tests/two_turn.py:Chances", r"--env tests/two_turn\.py:Chances: .*derived from envs"),
    ([grpo_llm], "--max-context-tokens 9", r"--max-context-tokens 9: the shortest prompt has"),
    ([grpo_llm], "--model {d}/mute", r"--model \S*mute --chat-template model: expected"),
    ([grpo_llm], "--model {d}/capped", r"--model \S*capped: it changes its logits after the head"),
    (LLM, "--model {d}/longer", r"longer: its tokenizer has ids up to 112, its embedding 112 rows"),
    ([grpo_llm], "--model {d}/endless", r"--model \S*endless.*no eos token"),
    ([grpo_llm], "--env logic --env-kwargs types=dyck_language",
     r"does not know .*% of the prompts.*sft\.py --env logic"),
    ([grpo_llm], "--reward-fn builtins:len", r"built-in function len.*expected a function or class"),
    ([grpo_llm], "--reward-fn no.py", r"--reward-fn no\.py: expected path/to/file\.py:name"),
    ([grpo_llm], "--reward-fn {d}/exits.py:f", r"--reward-fn \S*exits\.py:f: expected .*SystemExit"),
    (LLM, "--model models/countdown-tiny --lora-rank 2 --lora-target-modules q_proj,v_projj",
     r"--lora-target-modules q_proj,v_projj: .*it has no 'v_projj'; the nearest are v_proj, q_proj"),
    (LLM, "--model models/countdown-tiny --lora-adapter-path {d}/adapter",
     r"adapter: .*expected LoRA, rsLoRA or DoRA, got LORA with alora_invocation_tokens"),
    ([grpo_llm], "--vllm-url http://127.0.0.1:8000", r"--vllm-url.*need --engine vllm"),
    ([grpo_llm], "--engine vllm --vllm-url http://a:1 --vllm-kwargs a=1", r"--vllm-kwargs: for vLLM in"),
    ([grpo_llm], "--engine vllm --vllm-url ftp://a:1", r"vllm.url.*pattern"),
    ([grpo_llm], "--lora-rank 2 --lora-adapter-path a", r"--lora-rank 2: .*adapter"),
    ([ppo_llm], "--kl-target 0.1", r"--kl-target 0\.1: needs a --kl-coef"),
    ([sft], "--model models/countdown-tiny --steps 0", r"--steps 0: expected.*--train-files"),
    ([sft], "--train-files {d}/good.jsonl --max-length 9", r"--max-length 9.*tokens"),
    ([sft], "--train-files {d}/long.jsonl --truncation right",
     r"long\.jsonl, row 5, --max-length 2048: expected at most 1,000,000 characters, got 9,800,00\d"),
    ([sft], "--train-files {d}/good.jsonl --model {d}/short --steps 1", r"--max-length 9: .*1\d tokens"),
    ([sft], "--train-files {d}/good.jsonl --val-files {d}/blank.jsonl", "and rows to hold out .*, got"),
    ([a2c], "--env-id NoSuch-v0", "NoSuch"),
    ([a2c], "--env-kwargs num_envs=3", "unknown option 'num_envs'"),
    ([a2c], "--num-envs 1 --num-steps 1", "--normalize-advantages"),
    ([a2c], "--num-envs 20000", "20000.*16384"),
]


@pytest.mark.parametrize(("script", "flags", "expected"), [
    pytest.param(script, flags, expected, id=f"{script.__name__} {flags}")
    for scripts, flags, expected in BAD for script in scripts])
def test_bad_input_is_one_clear_message_that_names_it(
        script, flags, expected, bad_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *asked: "y")  # a person in a hurry
    if "loops.jinja" in flags:
        monkeypatch.setattr(envs.chat, "TEMPLATE_SECONDS", 0.2)
    flags = flags.replace("{d}", str(bad_folder)).split()
    flags += [] if "--run-dir" in flags else ["--run-dir", tmp_path / "run"]
    if script is sft:
        flags = ["--steps", 4, *flags]
    elif script in RL and "--env" not in " ".join(map(str, flags)):
        flags += ["--env-kwargs", "test_tasks=32"]  # sooner found
    code = command_line(f"{script.__name__}.py", *flags)
    output = capsys.readouterr()
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.err + output.out).split())  # tyro draws a box
    assert re.search(expected, text, re.I), text
    assert "Traceback" not in text
    lines = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert (code, len(lines)) in ((1, 1), (2, 0)), (code, output.err)
    assert not list(tmp_path.glob("run/events*")) and not (bad_folder / "ran").exists()  # nothing began


@pytest.mark.parametrize("script", slow_but((grpo_llm,), ALL))
def test_a_script_that_was_changed_says_so_when_it_goes_on(script, finished, tmp_path, capsys):
    whole = finished(script)
    now = log_lines(whole)[0]["meta"]["script_sha256"]
    for name, before in dict(same=now, changed="0" * 64).items():
        folder = killed_after(whole, tmp_path / name, 4)
        log = folder / "train_log.jsonl"
        log.write_text(log.read_text().replace(now, before, 1))
        capsys.readouterr()
        train(script, folder)
        warned = f"warning: {script.__name__}.py is not what began {folder}" in capsys.readouterr().out
        assert warned is (name == "changed")
        (resume,) = [line["resume"] for line in log_lines(folder) if "resume" in line]
        assert resume["script_sha256"] == now and "git_dirty" in resume


@pytest.mark.parametrize(("script", "returned", "error", "says"), [
    (grpo_llm, "float('nan')", SystemExit,
     r"error: FloatingPointError: the reward of task countdown-train-\d+ is nan"),
    (grpo_llm, "10**5000", SystemExit,
     r"error: BadInput: --reward-fn .* task countdown-train-\d+, got int that cannot be printed"),
    (ppo_llm, "[10**400]", SystemExit, r"error: BadInput: --reward-fn .*expected a number .*, got \[10000"),
    (ppo_llm, "exit(0)", SystemExit, r"error: SystemExit: 0 \(rank 0"),
    (grpo_llm, "1 / 0", ZeroDivisionError, "division by zero"),  # the user's own, with its traceback
    (ppo_llm, "[step.reward for step in r.steps] + [1.0]", SystemExit,
     r"error: .*(1 rewards for 0|2 rewards for 1) turns")])
def test_a_reward_that_is_none_leaves_a_receipt_and_a_sound_log(script, returned, error, says, tmp_path):
    path = write(tmp_path, f"def score(r):\n    return {returned} if 'train' in r.task.id else 0.0\n")
    with pytest.raises(error, match=says):
        train(script, tmp_path / "run", reward_fn=f"{path}:score", eval_tasks=1, eval_samples=1)
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 1, verdict
    assert [r["opt_steps"] for r in records(tmp_path / "run")] == [0]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    told, meta, frames, receipt = receipt_of(tmp_path / "run")
    assert meta["seed"] == 1 and meta["args"]["reward_fn"] == f"{path}:score"
    assert {"versions", "git_sha", "iteration", "opt_steps"} <= set(meta)
    assert (", in score\n" in frames) is (returned in ("1 / 0", "exit(0)"))
    text = (receipt / "evidence.json").read_text()
    if "nan" in returned:
        assert told["type"] == "FloatingPointError"
        assert json.loads(text)[0]["messages"][0]["role"] == "user" and "NaN" not in text
    with pytest.raises(error, match=says):  # begun again without a checkpoint, the log keeps the first error
        train(script, tmp_path / "run", reward_fn=f"{path}:score", eval_tasks=1, eval_samples=1)
    assert validate(tmp_path / "run")["errors"] == 2 and validate(tmp_path / "run")["ok"]


@pytest.mark.parametrize(("script", "flags"), [
    (grpo_llm, dict(learning_rate=1e38, warmup_iterations=0, eval_tasks=1)),
    (ppo_llm, dict(critic_learning_rate=1e38, warmup_iterations=0, checkpoint_every=1, critic_epochs=1,
                   critic_minibatches=1)),
    (sft, dict(learning_rate=1e38, warmup_steps=0, checkpoint_every=1, eval_tasks=1)),
    (a2c, dict(learning_rate=1e38, checkpoint_every=1))])
def test_weights_that_are_not_finite_end_the_run(script, flags, tmp_path):
    """A learning rate that overflows float32: the run ends, and no broken checkpoint is written."""
    with pytest.raises(SystemExit, match="FloatingPointError"):
        train(script, tmp_path / "run", **flags)
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 1, verdict
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        assert all(tensor.isfinite().all() for tensor in weights_of(path).values())


@pytest.mark.slow
def test_replies_that_do_not_fit_the_context_are_counted_and_an_error_where_none_does(tmp_path):
    numbers = ("min_operands=3", "max_operands=4", "test_tasks=32")
    with pytest.raises(envs.BadInput, match="--max-context-tokens 11: the shortest prompt has 7 tokens"):
        train(grpo_llm, tmp_path / "none", max_context_tokens=11, env_kwargs=numbers)
    folder = train(grpo_llm, tmp_path / "run", max_context_tokens=17, iterations=1, env_kwargs=numbers)
    record = records(folder)[-1]
    assert 0 < record["rollout/termination/context"] < 1 and record["env_steps"] > 0
    shares = [record[f"rollout/termination/{end}"] for end in ("length", "context")]
    assert record["response_length/clip_ratio"] == pytest.approx(sum(shares))
    assert validate(folder)["ok"]
    short = shutil.copytree(TINY, tmp_path / "short")  # a model of few positions
    config = json.loads((short / "config.json").read_text()) | dict(max_position_embeddings=17)
    (short / "config.json").write_text(json.dumps(config))
    other = train(grpo_llm, tmp_path / "other", model=str(short), iterations=1, env_kwargs=numbers)
    assert timeless(other) == timeless(folder)


@pytest.mark.parametrize("script", slow_but((grpo_llm,), RL))
def test_a_run_goes_on_beside_environments_that_fail(script, tmp_path):
    size = dict(prompts_per_iteration=16) if script is ppo_llm else {}
    folder = train(script, tmp_path / "run", env="tests/two_turn.py:Flaky", log_episodes=1.0, eval_tasks=1,
                   eval_every=0, iterations=2, **size)
    assert validate(folder, strict=True)["ok"]
    for record in records(folder)[1:]:
        played, summary = episodes(folder, f"train_step_{record['iteration']:06d}")
        failed = [episode for episode in played if episode["termination"] == "error"]
        sound = [episode for episode in played if episode["termination"] != "error"]
        assert failed and sound and all(episode["retries"] == 2 for episode in failed)
        assert record["rollout/termination/error"] == len(failed) / len(played)
        assert record["rollout/finished"] == sum(e["termination"] == "done" for e in played) / len(played)
        cut = sum(e["termination"] == "length" for e in sound) / len(sound)
        assert record["response_length/clip_ratio"] == pytest.approx(cut)
        assert record["rollout/retries"] == sum(episode["retries"] for episode in played) > 2 * len(failed)
        mean = sum(episode["reward"] for episode in sound) / len(sound)
        assert record["train/reward"] == record["critic/score/mean"] == pytest.approx(mean)
        if script is grpo_llm:
            assert record["rollout/groups_incomplete"] == len({episode["task_id"] for episode in failed})


@pytest.mark.parametrize("script", RL)
def test_when_every_environment_fails_nothing_is_learned(script, tmp_path, capsys):
    folder = train(script, tmp_path / "run", env="tests/two_turn.py:Broken", eval_every=0, eval_tasks=1,
                   eval_samples=1, iterations=2, prompts_per_iteration=1, group_size=2)
    assert "the environment failed: ConnectionError('no answer')" in capsys.readouterr().err
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and verdict["errors"] == 0, verdict
    assert [record["opt_steps"] for record in records(folder)] == [0, 0, 0]
    assert records(folder)[-1]["rollout/termination/error"] == 1
    same_tree(load_file(folder / "checkpoints" / "step_000002" / "model.safetensors"), start_weights())


def test_fewer_episodes_than_minibatches_make_fewer_steps_and_equal_rewards_explain_nothing(tmp_path):
    """And while the critic learns alone, there is a loss of its, and no gradient of the policy."""
    path = write(tmp_path, "def same(r):\n    return [0.1]\n")
    folder = train(ppo_llm, tmp_path / "run", prompts_per_iteration=3, minibatches=4, critic_minibatches=16,
                   epochs=1, critic_epochs=1, critic_warmup=1, iterations=2, eval_tasks=1, gae_lambda=1.0,
                   reward_fn=f"{path}:same")
    log = records(folder)[1:]
    assert log[-1]["opt_steps"] == 9  # three of the policy, twice three of the critic
    assert log[0]["critic/vf_loss"] > 0 and "train/grad_norm" not in log[0]
    assert log[1]["critic/vf_loss"] > 0 and log[1]["train/grad_norm"] > 0
    assert [record["critic/vf_explained_var"] for record in log] == [0, 0] and validate(folder)["ok"]
    assert log[-1]["critic/values/max"] > log[-1]["critic/values/min"]


class Hostile(Countdown):
    def task(self, split, index):
        names = ["../../evil", "a\x00b|c\n\x1b[2J", "x" * 400, "\u202e<b>", "\ud800"]
        return dataclasses.replace(super().task(split, index), id=names[index % 5] + f" {split} {index}")

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step
        episode.step = lambda reply: dataclasses.replace(step(reply), messages=[
            dict(role="user", content="\ud800")])
        return episode


class Undefined(Countdown):
    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step
        episode.step = lambda reply: dataclasses.replace(step(reply), info=dict(correct=0, own=math.nan))
        return episode


def test_a_number_that_is_none_is_named_and_not_logged(tmp_path):
    with pytest.raises(SystemExit, match="^error: FloatingPointError: val/countdown/own is nan .*receipt"):
        train(grpo_llm, tmp_path / "run", env=f"{__file__}:Undefined", iterations=0, eval_tasks=1)
    assert receipt_of(tmp_path / "run")[0]["type"] == "FloatingPointError" and not records(tmp_path / "run")


def test_episodes_are_written_and_printed_and_no_name_or_text_breaks_that(tmp_path, capsys):
    folder = train(grpo_llm, tmp_path / "deep" / "run", env=f"{__file__}:Hostile", log_episodes=1.0,
                   eval_tasks=12, iterations=1, print_samples=2)
    for name, count in {"val_step_000000": 24, "train_step_000001": 16, "val_step_000001": 24}.items():
        found, summary = episodes(folder, name)
        assert summary["episodes"] == summary["logged"] == len(found) == count
        assert len({(e["task_id"], e["number"]) for e in found}) == count
        for episode in found:
            (turn,), (segment,) = episode["turns"], episode["segments"]
            assert turn["reward"] == episode["reward"]
            assert turn["end"] - turn["start"] == sum(segment["response_mask"]) > 0
    said = capsys.readouterr().out
    assert [len(re.findall(f"^{kind} ", said, re.M)) for kind in ("val", "train")] == [4, 2]
    assert "\ufffd[2J" in said and "\033" not in said  # what moves a terminal's cursor does not reach it
    assert not list(tmp_path.rglob("evil*")) and validate(folder)["ok"]


@pytest.mark.parametrize("script", slow_but((grpo_llm,), RL))
def test_where_no_task_is_held_out_nothing_is_evaluated_and_the_log_is_sound(script, tmp_path):
    path = write(tmp_path, "from envs.countdown import Countdown\n\nclass AllTrain(Countdown):\n"
                           "    def num_tasks(self, split):\n"
                           "        return 0 if split == 'test' else super().num_tasks(split)\n")
    folder = train(script, tmp_path / "run", env=f"{path}:AllTrain", iterations=2)
    assert validate(folder)["ok"] and [record["iteration"] for record in records(folder)] == [1, 2]
    assert not any(key.startswith("val/") for record in records(folder) for key in record)


def test_a_copy_without_git_runs_too(tmp_path, monkeypatch):
    """A download without its history, or a machine without git: there is no commit to name."""
    for name, value in (("GIT_DIR", tmp_path / "none"), ("PATH", tmp_path)):
        monkeypatch.setenv(name, str(value))
        folder = train(grpo_llm, tmp_path / name, eval_tasks=1, iterations=0)
        assert validate(folder)["ok"] and not log_lines(folder)[0]["meta"]["git_sha"]


@pytest.mark.parametrize("says, expected", [("abc", ("abc", False)), ("abc-dirty", ("abc", True))])
def test_the_commit_is_named_and_whether_something_was_changed(says, expected, tmp_path, monkeypatch):
    (tmp_path / "git").write_text(f"#!/bin/sh\necho {says}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    meta = log_lines(train(a2c, tmp_path / "run", **ONE["a2c_vecenv"]))[0]["meta"]
    assert (meta["git_sha"], meta["git_dirty"]) == expected


def of_turns(r):
    return [0.1 * n + step.reward for n, step in enumerate(r.steps)]


@pytest.fixture(scope="module")
def long_games(tmp_path_factory):
    """A run of episodes with up to four turns and several segments, each of which is kept."""
    return train(ppo_llm, tmp_path_factory.mktemp("long_games"), env="tests/two_turn.py:FourTurn",
                 reward_fn=f"{__file__}:of_turns", max_context_tokens=45, kl_coef=0.2, kl_target=0.01,
                 gae_lambda=0.9, eval_tasks=1, eval_samples=1, critic_epochs=1, critic_warmup=1, iterations=3,
                 warmup_iterations=0, learning_rate=5e-3, log_episodes=1.0, eval_every=0,
                 checkpoint_every=1, keep_checkpoints=0)


def test_the_numbers_of_ppo_are_those_of_its_episodes(long_games):
    coef, split, num_turns = 0.2, 0, set()
    for record in records(long_games)[1:]:
        scores, penalised, tokens = [], [], []
        for episode in episodes(long_games, f"train_step_{record['iteration']:06d}")[0]:
            columns = {name: np.concatenate([segment[name] for segment in episode["segments"]]) for name in (
                "rewards", "values", "returns", "advantages", "old_logprobs", "ref_logprobs")}
            chosen = np.concatenate([segment["response_mask"] for segment in episode["segments"]]) == 1
            # A turn's last token: one that the policy chose, before one that it did not or the segment's end.
            ends = np.concatenate([np.diff([*s["response_mask"], 0]) < 0 for s in episode["segments"]])
            for name in ("rewards", "returns", "advantages"):
                assert not columns[name][~chosen].any()  # of the environment's tokens nothing is learned
            turns = sum(message["role"] == "assistant" for message in episode["messages"])
            expected = [0.1 * n for n in range(turns)]  # a right reply earns 1 beside, a cut one nothing
            expected[-1] = 0.0 if episode["termination"] == "length" else expected[-1] + episode["correct"]
            assert columns["rewards"][ends].tolist() == pytest.approx(expected)
            assert not columns["rewards"][~ends].any()

            own = {name: column[chosen] for name, column in columns.items()}
            rewards = own["rewards"] - coef * (own["old_logprobs"] - own["ref_logprobs"])
            deltas = rewards + np.append(own["values"][1:], 0.0) - own["values"]
            tokens.append(own | dict(estimates=[  # GAE as it is written (arXiv:1506.02438, eq. 16)
                sum(0.9**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]))
            scores.append(sum(expected))
            penalised.append(rewards.sum())
            split, num_turns = split + (len(episode["segments"]) > 1), num_turns | {turns}

        numbers = {name: np.concatenate([own[name] for own in tokens]) for name in tokens[0]}
        estimates, values, returns = (numbers[name] for name in ("estimates", "values", "returns"))
        assert returns == pytest.approx(estimates + values, abs=1e-6)
        whitened = (estimates - estimates.mean()) / estimates.std()
        assert numbers["advantages"] == pytest.approx(whitened, abs=1e-4)
        for name, column in dict(score=scores, rewards=penalised, advantages=estimates, values=values,
                                 returns=returns).items():
            assert [record[f"critic/{name}/{of}"] for of in ("mean", "max", "min")] == pytest.approx(
                [np.mean(column), np.max(column), np.min(column)], abs=1e-6), name
        explained = 1 - np.var(returns - values) / np.var(returns)
        assert record["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-6)
        drift = numbers["old_logprobs"] - numbers["ref_logprobs"]
        assert record["kl/k1"] == pytest.approx(drift.mean(), abs=1e-9)
        assert record["train/kl_loss"] == pytest.approx((np.exp(-drift) - 1 + drift).mean(), abs=1e-9)
        assert record["kl/coef"] == pytest.approx(coef)
        if record["train/policy_steps"]:  # the KL of a policy that may not move yet says nothing
            coef *= 1 + 0.1 * min(max(record["kl/k1"] / 0.01 - 1, -0.2), 0.2)
    assert abs(drift.mean()) > 1e-3 and coef not in (0.2, pytest.approx(0.2 * 0.98**2))  # it did move
    assert split > 4 and {1, 4} <= num_turns


def test_the_critic_learns_alone_before_the_policy_moves(long_games):
    assert validate(long_games, strict=True)["ok"]
    log, before, critic = records(long_games)[1:], start_weights(), {}
    for record in log:
        folder = long_games / "checkpoints" / f"step_{record['iteration']:06d}"
        weights = load_file(folder / "model.safetensors")
        alone = record["iteration"] == 1
        assert all(torch.equal(weights[name], before[name]) for name in before) is alone
        assert alone is ("train/learning_rate" not in record) is ("train/grad_norm" not in record)
        assert record["train/entropy"] > 0.1 and record["critic/grad_norm"] > 0
        assert record["opt_steps"] == 2 * record["iteration"] + 2 * (record["iteration"] - 1)
        norm = math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in weights.values()))
        assert record["train/weight_norm"] == pytest.approx(norm, rel=1e-6)
        learned = torch.load(folder / "trainer_state.pt")["critic"]
        assert not any(torch.equal(learned[name], tensor) for name, tensor in critic.items())
        before, critic = weights, learned
    values = [[record["critic/values/min"], record["critic/values/max"]] for record in log]
    assert values[0] == [0, 0] and values[1][0] < values[1][1]
    assert log[0]["critic/vf_explained_var"] == 0 != log[1]["critic/vf_explained_var"]


@pytest.mark.slow
def test_the_adapters_of_policy_and_critic_share_one_frozen_base(tmp_path, monkeypatch):
    """Of each frozen matrix one copy is in memory when the run begins to sample."""
    def modules():
        gc.unfreeze()  # get_objects does not tell what a script has frozen
        return [found for found in gc.get_objects() if isinstance(found, torch.nn.Module)]

    generate, copies, before = ppo_llm.generate, {}, {id(module) for module in modules()}

    def counted(*given):
        new = [] if copies else [module for module in modules() if id(module) not in before]
        copies.update((p.data_ptr(), p.numel()) for module in new for p in module.parameters(recurse=False)
                      if not p.requires_grad)
        return generate(*given)

    monkeypatch.setattr(ppo_llm, "generate", counted)
    train(ppo_llm, tmp_path / "run", lora_rank=2, iterations=1, eval_every=0, eval_tasks=1)
    assert sum(copies.values()) == sum(weight.numel() for weight in start_weights().values())


KILL = {
    "grpo_llm.py": "--prompts-per-iteration 4 --group-size 4 --eval-tasks 4 --eval-samples 2 --eval-every 5 "
                   "--checkpoint-every 2 --epochs 2 --log-episodes 0.1",
    "ppo_llm.py": "--prompts-per-iteration 4 --minibatches 1 --critic-minibatches 2 --critic-epochs 1 "
                  "--critic-warmup 10 --kl-coef 0.05 --kl-target 0.01 --eval-tasks 4 --eval-samples 2 "
                  "--eval-every 10 --checkpoint-every 3 --log-episodes 0.1",
    "sft.py": "--batch-size 16 --eval-tasks 4 --eval-samples 2 --eval-every 6 --log-every 2 --packing "
              "--checkpoint-every 2 --model models/countdown-tiny --dtype float32 --learning-rate 1e-3 "
              "--train-files",
    "a2c_vecenv.py": "--num-envs 8 --log-every 10 --eval-every 100 --checkpoint-every 10 --eval-episodes 4 "
                     "--eval-envs 2 --hidden-size 16 --env-kwargs max_steps=20",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", KILL)
def test_kills_at_any_moment_change_nothing(script, tmp_path):
    kills, rng = int(os.environ.get("KILLS", "2")), random.Random(os.environ.get("KILLS_SEED", "1"))
    length = (150 if script == "a2c_vecenv.py" else 30) * kills
    flags = KILL[script].split() + ([tmp_path / "rows.jsonl", "--steps", length] if script == "sft.py" else
                                    ["--iterations", length])
    moments = [("writing", "log")[n % 2] for n in range(kills)]
    if script == "sft.py":  # which reads its rows, for some seconds, before all else
        env, moments[0] = envs.make("countdown", skill="mixed"), "encoding"
        tasks = [env.task("train", index) for index in range(2500)]
        write_jsonl(tmp_path / "rows.jsonl", [
            dict(prompt=task.messages[-1]["content"], response=env.solution(task)) for task in tasks])

    def words(name):
        return script, *flags, "--run-dir", tmp_path / name

    torch.set_num_threads(1)
    folder, whole, said, torn = tmp_path / "killed", tmp_path / "whole", tmp_path / "said", 0
    for moment in moments:
        assert kill_at(moment, fork(said, *words("killed")), folder, rng)
        torn += any((folder / "checkpoints").glob(".step_*.writing")) or any(folder.glob("data/.*.writing"))
    assert torn >= 1
    run = fork(said, *words("killed"))
    assert command_line(*words("whole")) == 0
    run.join(600)
    assert run.exitcode == 0, said.read_text()
    same_end(whole, folder, f"step_{length:06d}")
    verdict = validate(folder)
    assert verdict["ok"] and not verdict["warnings"], verdict
    assert 1 <= verdict["resumes"] <= kills
    written = [{str(path.relative_to(f)): path.read_bytes() for path in f.glob("episodes/*")}
               for f in (whole, folder)]
    assert written[0] == written[1] and (script in ("sft.py", "a2c_vecenv.py") or written[0])
    if script == "sft.py":
        states = [json.loads((f / "checkpoints" / "state.json").read_text()) for f in (whole, folder)]
        assert states[0] == states[1] and not list(folder.glob("data/.*"))
