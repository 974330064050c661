"""grpo_llm.py, ppo_llm.py and sft.py from the command line to the run folder, a few iterations, on the CPU.

Most runs happen in this process: importing torch takes longer than they do. Slow ones are killed for real:

    KILLS=10 pytest -m slow tests/test_runs.py
"""

import contextlib
import functools
import json
import math
import os
import random
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import grpo_llm
import ppo_llm
import sft
from tests.run_folders import (
    LAST,
    SMALL,
    TINY,
    InterruptAt,
    command_line,
    copy_run,
    in_halves,
    kill_at,
    log_lines,
    process,
    records,
    same_checkpoint,
    same_end,
    same_tree,
    slow_but,
    timeless,
    train,
)
from tools.validate_train_log import COMMON, validate

ROOT = Path(__file__).resolve().parent.parent
RL = [grpo_llm, ppo_llm]
RL_SLOW = [pytest.param(grpo_llm, marks=pytest.mark.slow), ppo_llm]  # where one of them will do in a hurry
ALL = [*RL, sft]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """script -> a finished run that kept all checkpoints and episodes; each is made once."""
    @functools.cache
    def of(script):
        folder = tmp_path_factory.mktemp("finished") / script.__name__
        return train(script, folder, checkpoint_every=1, keep_checkpoints=0,
                     **(dict(log_episodes=1.0) if script in RL else {}))
    return of


# The log


def keys_of(metrics):
    """METRICS' keys as patterns: <source>, <part> and <n> stand for anything, a name for what is below it."""
    return {key: re.compile(re.sub(r"<\w+>", r".+", key) + r"(/.+)?") for key in metrics}


@pytest.mark.parametrize("script", ALL)
def test_the_log_passes_the_validator_and_holds_what_metrics_promises(script, tmp_path):
    folder = train(script, tmp_path / "run", **({} if script is sft else dict(kl_coef=0.1)))
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    assert (verdict["records"], verdict["resumes"], verdict["errors"]) == (5, 0, 0)
    assert log_lines(folder)[0]["meta"]["algo"] == script.__name__.removesuffix("_llm")
    updates = 4 * 2 * 2 + 3 * 2 if script is ppo_llm else 4  # of the critic, and later of the policy
    assert (verdict["last"]["iteration"], verdict["last"]["opt_steps"]) == (4, updates)
    logged = {key for record in records(folder) for key in record} - set(COMMON)
    patterns = keys_of(script.METRICS)
    for key in logged:
        assert any(pattern.fullmatch(key) for pattern in patterns.values()), f"{key} is not in METRICS"
    for key, pattern in patterns.items():
        if key != "system/gpu_memory" or torch.cuda.is_available():
            assert any(pattern.fullmatch(name) for name in logged), f"{key} is never logged"
    evaluated = [r["iteration"] for r in records(folder) if "val/countdown/pass@1" in r]
    assert evaluated == [0, 2, 4]
    assert all(r["val/countdown/pass@2"] >= r["val/countdown/pass@1"] for r in records(folder)
               if r["iteration"] in evaluated)


@pytest.mark.parametrize("script", RL)
def test_the_counters_and_rates_of_the_log_add_up(script, finished, tmp_path):
    folder = finished(script) if script is ppo_llm else train(
        script, tmp_path / "run", epochs=2, minibatches=2, log_episodes=1.0)
    num_tasks = SMALL[script.__name__]["prompts_per_iteration"]
    num_episodes = num_tasks * SMALL[script.__name__]["group_size"]
    before, seen = records(folder)[0], set()
    for record in records(folder)[1:]:
        step = f"train_step_{record['iteration']:06d}"
        episodes = [json.loads(path.read_text()) for path in (folder / "episodes" / step).glob("countdown*")]
        tokens = sum(sum(s["response_mask"]) for episode in episodes for s in episode["segments"])
        assert len(episodes) == num_episodes
        tasks = {episode["task_id"] for episode in episodes}
        assert len(tasks) == num_tasks and not tasks & seen  # new ones in each iteration
        seen |= tasks
        assert record["env_steps"] - before["env_steps"] == tokens
        if script is ppo_llm:
            assert record["train/policy_steps"] == (2 if record["iteration"] > 1 else 0)
            updates = record["train/policy_steps"] + 2 * 2
        else:
            updates = min(4, 2 * record["rollout/groups_trainable"])  # a minibatch holds whole groups
        assert record["opt_steps"] - before["opt_steps"] == updates
        assert record["train/global_step"] == record["opt_steps"]
        rewards = [e["reward"] for e in episodes]
        mean = pytest.approx(sum(rewards) / num_episodes)
        assert record["train/reward"] == mean
        assert record["train/pass@1"] == pytest.approx(sum(e["correct"] for e in episodes) / num_episodes)
        for name in ("score", "rewards"):  # which differ by a penalty, and there is none
            assert [record[f"critic/{name}/{of}"] for of in ("mean", "max", "min")] == [
                mean, max(rewards), min(rewards)]
        ends = {k.rpartition("/")[2]: v for k, v in record.items() if k.startswith("rollout/termination/")}
        assert sum(ends.values()) == pytest.approx(1.0)
        assert ends["done"] == sum(e["termination"] == "done" for e in episodes) / num_episodes
        assert sum(v for k, v in record.items() if k.startswith("time/")) <= (
            record["wall_time_s"] - before["wall_time_s"])
        before = record


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(grpo_llm, tmp_path / "run")
    board = EventAccumulator(str(folder)).Reload()
    for name in ("train/reward", "train/entropy", "val/countdown/greedy", "mismatch/kl"):
        found = [(event.step, event.value) for event in board.Scalars(name)]
        expected = [(r["iteration"], pytest.approx(r[name], rel=1e-6)) for r in records(folder) if name in r]
        assert found == expected and found
    assert "val/samples/text_summary" in board.Tags()["tensors"]


# Continuing a run


RESUMED = {
    "full": (grpo_llm, {}),
    "lora": (grpo_llm, dict(lora_rank=2, learning_rate=1e-2)),
    "epochs": (grpo_llm, dict(epochs=2, minibatches=2, loss="gspo", aggregation="sequence")),
    "kl": (grpo_llm, dict(kl_coef=0.1, learning_rate=1e-3, baseline="loo", scale_rewards=True)),
    "lora-kl-bf16": (grpo_llm, dict(lora_rank=2, kl_coef=0.1, dtype="bfloat16", learning_rate=1e-2)),
    "dynamic": (grpo_llm, dict(dynamic_sampling=2, mask_truncated=True, max_response_tokens=9)),
    "two-turn": (grpo_llm, dict(env="tests/two_turn.py:TwoTurn", loss="cispo", aggregation="constant")),
    "ppo": (ppo_llm, {}),
    "ppo-warmup": (ppo_llm, dict(critic_warmup=3, gae_lambda=1.0, value_clip=0.0)),
    "ppo-shared": (ppo_llm, dict(critic="shared", gamma=0.99)),
    "ppo-shared-lora": (ppo_llm, dict(critic="shared", lora_rank=2, learning_rate=1e-2)),
    "ppo-none": (ppo_llm, dict(critic="none", weight_decay=0.1)),
    "ppo-lora": (ppo_llm, dict(lora_rank=2, learning_rate=1e-2)),
    "ppo-epochs": (ppo_llm, dict(epochs=3, critic_epochs=1, group_size=2, target_kl=2e-3, value_clip=0.1,
                                 learning_rate=2e-3)),
    "ppo-kl": (ppo_llm, dict(kl_coef=0.05, kl_target=0.01, learning_rate=1e-3)),
    "ppo-lora-kl-bf16": (ppo_llm, dict(lora_rank=2, kl_coef=0.05, kl_target=0.01, kl_penalty="k3",
                                       dtype="bfloat16", learning_rate=1e-2)),
    "ppo-two-turn": (ppo_llm, dict(env="tests/two_turn.py:TwoTurn", max_context_tokens=40)),
    "sft": (sft, {}),
    "sft-model": (sft, dict(model=TINY, schedule="constant")),
    "sft-bf16": (sft, dict(dtype="bfloat16", microbatch_tokens=60)),
}




@pytest.mark.parametrize("case", slow_but(("lora", "ppo", "sft"), RESUMED))
def test_two_iterations_and_two_more_equal_four_bit_for_bit(case, tmp_path):
    script, flags = RESUMED[case]
    halves = in_halves(script, tmp_path, **flags)
    named, other = (json.loads((folder / "checkpoints" / "state.json").read_text())
                    for folder in (halves, tmp_path / "whole"))
    assert named == other and named["last"] == LAST and ("best" in named) is (script is sft)
    if script is ppo_llm:
        check_critics(halves, flags)


def check_critics(folder, flags):
    """Checkpoints 2 and 4 hold all of a critic: its weights, which have changed, and their moments."""
    states = [torch.load(path) for path in sorted(folder.glob("checkpoints/step_*/trainer_state.pt"))]
    coefs = [state["kl_coef"] for state in states]
    assert coefs[0] != coefs[1] if "kl_target" in flags else coefs == [flags.get("kl_coef", 0.0)] * 2
    kind = flags.get("critic", "own")
    for state, iteration in zip(states, (2, 4), strict=True):
        names = state.get("critic", ())
        assert ("decoder" in str(names)) is (kind == "own") is ("critic_optimizer" in state)
        if kind == "own":
            steps, moments = 2 * flags.get("critic_epochs", 2) * iteration, state["critic_optimizer"]["state"]
            assert ("lora_" in str(names)) is ("lora_rank" in flags)
            assert len(moments) == len(names) and {int(m["step"]) for m in moments.values()} == {steps}
        else:  # the weights of a shared one are the policy's optimiser's, too
            of_policy = load_file(next(folder.glob(f"checkpoints/*{iteration}/*model.safetensors")))
            assert list(names) == ["head.weight", "head.bias"] * (kind == "shared")
            assert len(state["optimizer"]["state"]) == len(of_policy) + len(names)
    for name, weight in states[0].get("critic", {}).items():
        assert not torch.equal(weight, states[1]["critic"][name]), name


@pytest.mark.parametrize("script", RL_SLOW)
def test_an_iteration_that_was_trained_but_not_logged_is_logged_when_the_run_goes_on(
        script, finished, tmp_path, monkeypatch):
    """The sampler is lost as it is handed the third iteration's weights: they are kept with their numbers."""
    handed = []

    def sync_weights(engine, model):
        handed.append(0)
        if len(handed) == 4:
            raise script.EngineError("the sampler is gone")

    monkeypatch.setattr(script.HfEngine, "sync_weights", sync_weights)
    with pytest.raises(SystemExit, match="EngineError: the sampler is gone .*receipt"):
        train(script, tmp_path / "run", checkpoint_every=9)
    assert [record["iteration"] for record in records(tmp_path / "run")] == [0, 1, 2]
    folder = train(script, tmp_path / "run", checkpoint_every=9)
    same_end(finished(script), folder)
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, 1), verdict
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [3]


@pytest.mark.parametrize("script", [*(pytest.param(script, marks=pytest.mark.slow) for script in RL), sft])
def test_sigterm_within_an_evaluation_loses_no_record(script, finished, tmp_path, monkeypatch, capsys):
    evaluate, evaluations = script.evaluate, []

    def preempted(*given):
        evaluations.append(0)
        if len(evaluations) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given)

    monkeypatch.setattr(script, "evaluate", preempted)
    train(script, tmp_path / "run", checkpoint_every=9)
    assert [record["iteration"] for record in records(tmp_path / "run")] == [0, 1]
    assert re.search("SIGTERM: stopped after (iteration|step) 2, which is saved", capsys.readouterr().out)
    folder = train(script, tmp_path / "run", checkpoint_every=9)
    same_end(finished(script), folder)
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, 0), verdict


@pytest.mark.parametrize("script", RL_SLOW)
def test_no_evaluation_changes_what_is_trained(script, finished, tmp_path):
    often, never = finished(script), train(script, tmp_path / "run", eval_every=0, eval_tasks=2)
    same_checkpoint(often, never)
    evaluated = [[record["iteration"] for record in records(folder) if "val/countdown/greedy" in record]
                 for folder in (often, never)]
    assert evaluated == [[0, 2, 4], [0, 4]]
    trained = [[{name: value for name, value in record.items() if not name.startswith("val/")}
                for record in timeless(folder)] for folder in (often, never)]
    assert trained[0] == trained[1]


@pytest.mark.slow
@pytest.mark.parametrize("script", RL_SLOW)
def test_the_seed_decides_everything_random(script, tmp_path):
    one, other, third = (train(script, tmp_path / f"{n}", seed=seed, lora_rank=2, iterations=1, eval_tasks=2)
                         for n, seed in enumerate((1, 2, 1)))
    same_end(one, third, "step_000001")
    assert timeless(one)[1] != timeless(other)[1]
    last = [folder / "checkpoints" / "step_000001" for folder in (one, other)]
    adapters = [[load_file(folder / "adapter_model.safetensors") for folder in last]]
    if script is ppo_llm:  # the critic's, which starts as noise of its own
        adapters.append([torch.load(folder / "trainer_state.pt")["critic"] for folder in last])
    for mine, others in adapters:
        name = next(name for name in mine if "lora_A" in name)
        assert not torch.allclose(mine[name], others[name], atol=1e-2)


@pytest.mark.parametrize("script", ALL)
def test_a_finished_run_stays_as_it_is(script, finished, tmp_path):
    folder = train(sft, tmp_path / "run") if script is sft else copy_run(finished(script), tmp_path / "run")
    before = timeless(folder)
    card = tmp_path / "run-model" / "README.md"
    numbers = script is sft and card.read_text()
    train(script, folder)
    assert timeless(folder) == before
    assert validate(folder)["ok"]
    if script is sft:
        assert card.read_text() == numbers


def test_old_checkpoints_are_dropped_and_zero_keeps_all(tmp_path):
    for keep, left in ((2, ["step_000003", "step_000004"]), (0, [f"step_00000{n}" for n in (1, 2, 3, 4)])):
        folder = train(grpo_llm, tmp_path / f"keep{keep}", checkpoint_every=1, keep_checkpoints=keep,
                       eval_every=0)
        assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == left


CHANGED = {
    ppo_llm: [(dict(critic="shared"), "--critic shared: .* started with own;"),
              (dict(critic_warmup=2), "--critic-warmup 2"), (dict(gae_lambda=1.0), "--gae-lambda 1.0")]}


@pytest.mark.parametrize("script", ALL)
def test_what_would_change_the_result_is_refused_by_name(script, finished, tmp_path):
    folder = train(sft, tmp_path / "run") if script is sft else copy_run(finished(script), tmp_path / "run")
    for flags, named in ((dict(seed=2), "--seed 2"), (dict(learning_rate=1e-4), "--learning-rate 0.0001"),
                         (dict(env_kwargs=("max_number=9",)), "--env-kwargs"), *CHANGED.get(script, ())):
        with pytest.raises(envs.BadInput, match=named):
            train(script, folder, **flags)
    train(script, folder, keep_checkpoints=5)  # this one leaves the numbers as they are


def test_another_reward_function_or_model_is_refused(tmp_path):
    reward, model = tmp_path / "reward.py", tmp_path / "model"
    reward.write_text("def score(rollout):\n    return rollout.correct\n")
    copy_files(TINY, model)
    flags = dict(reward_fn=f"{reward}:score", model=str(model))
    folder = train(grpo_llm, tmp_path / "run", **flags)
    train(grpo_llm, folder, **flags)
    reward.write_text("def score(rollout):\n    return 2 * rollout.correct\n")
    with pytest.raises(envs.BadInput, match="the reward"):
        train(grpo_llm, folder, **flags)
    reward.write_text("def score(rollout):\n    return rollout.correct\n")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(envs.BadInput, match="the model"):
        train(grpo_llm, folder, **flags)


def copy_files(source, target):
    target.mkdir()
    for path in Path(source).iterdir():
        (target / path.name).write_bytes(path.read_bytes())


# Damage


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "weights": lambda folder: flip_a_byte(folder / "model.safetensors"),
    "state": lambda folder: flip_a_byte(folder / "trainer_state.pt"),
    "cut": lambda folder: os.truncate(folder / "trainer_state.pt", 1000),
    "missing": lambda folder: (folder / "model.safetensors").unlink(),
    "manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest-text": lambda folder: (folder / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize(("script", "damage"), [
    (grpo_llm, "weights"), (ppo_llm, "state"), (grpo_llm, "manifest"),
    *(pytest.param(grpo_llm, damage, marks=pytest.mark.slow)
      for damage in ("state", "cut", "missing", "manifest-text"))])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
        script, damage, tmp_path, finished, capsys):
    folder = copy_run(finished(script), tmp_path / "run")
    DAMAGE[damage](folder / "checkpoints" / LAST)
    capsys.readouterr()
    train(script, folder, checkpoint_every=1, keep_checkpoints=0)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if LAST in line and "damaged" in line]
    same_end(finished(script), folder)
    assert [line["resume"]["checkpoint"] for line in log_lines(folder) if "resume" in line] == ["step_000003"]
    assert validate(folder)["ok"]


@pytest.mark.parametrize("script", RL)
def test_when_every_checkpoint_is_damaged_one_line_says_so(script, tmp_path, finished, capsys):
    folder = copy_run(finished(script), tmp_path / "run")
    for path in (folder / "checkpoints").glob("step_*"):
        flip_a_byte(path / "model.safetensors")
    log = (folder / "train_log.jsonl").read_bytes()
    with pytest.raises(envs.BadInput) as told:
        train(script, folder)
    assert str(folder) in str(told.value) and "damaged" in str(told.value) and "\n" not in str(told.value)
    assert (folder / "train_log.jsonl").read_bytes() == log


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_never_pushes_out_a_sound_one(tmp_path, finished):
    """After falling back, new checkpoints are older by name than the damaged one."""
    folder = copy_run(finished(grpo_llm), tmp_path / "run")
    for step in (2, 3, 4):
        flip_a_byte(folder / "checkpoints" / f"step_{step:06d}" / "model.safetensors")
    flags = dict(checkpoint_every=1, keep_checkpoints=1)
    with InterruptAt(grpo_llm, 3), pytest.raises(SystemExit):
        train(grpo_llm, folder, **flags)
    same_end(finished(grpo_llm), train(grpo_llm, folder, **flags))
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [1, 2]


@pytest.mark.parametrize("script", [pytest.param(grpo_llm, marks=pytest.mark.slow), sft])
def test_a_full_disk_is_one_clear_line_and_the_run_can_go_on(script, tmp_path):
    """From the third record on, no file may grow to the size of the weights; the log still may grow."""
    flags = dict(model=TINY) if script is sft else {}
    whole = train(script, tmp_path / "whole", **flags)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        record = script.Run.record

        def filling(run, values):
            record(run, values)
            if run.counters["iteration"] == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))

        patch.setattr(script.Run, "record", filling)
        try:
            with pytest.raises(SystemExit, match=rf"{LAST} could not be written.*earlier checkpoints stay"):
                train(script, tmp_path / "run", **flags)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["state.json", "step_000002"]
    assert validate(folder)["errors"] == 1 and validate(folder)["ok"]
    same_end(whole, train(script, folder, **flags))


# Bad input: one clear line that names the thing


def bad_files(folder):
    """Files to be named on command lines."""
    (folder / "empty").mkdir()
    copy_files(TINY, folder / "weightless")
    (folder / "weightless" / "model.safetensors").unlink()
    copy_files(TINY, folder / "torn")
    os.truncate(folder / "torn" / "model.safetensors", 5000)
    copy_files(TINY, folder / "mute")
    (folder / "mute" / "chat_template.jinja").unlink()
    (folder / "file").write_text("")
    row = '{"prompt": "6 18 14 -> 38", "response": "18 + 14 = 32; 32 + 6 = 38"}\n'
    (folder / "good.jsonl").write_text(row * 4)
    (folder / "torn.jsonl").write_text(row + row[:30])
    (folder / "missing.jsonl").write_text(row + '{"prompt": "1"}\n')
    (folder / "empty.jsonl").write_text(row + '{"prompt": "1", "response": " "}\n')
    (folder / "number.jsonl").write_text(row.replace('"6 18 14 -> 38"', "6") * 2)
    (folder / "one.jsonl").write_text(row)
    (folder / "none.jsonl").write_text("")
    (folder / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    (folder / "good.csv").write_text("prompt,response\n1,2\n")
    return folder


COMMON_BAD = {
    "environment": (["--env", "coutdown"], r"coutdown.*did you mean 'countdown'"),
    "environment-file": (["--env", "{d}/nothing.py:Env"], r"--env.*nothing\.py"),
    "option": (["--env-kwargs", "max_operand=3"], r"max_operand'.*did you mean 'max_operands'"),
    "option-type": (["--env-kwargs", "max_operands=three"], r"max_operands.*int.*three"),
    "option-value": (["--env-kwargs", "max_operands=99"], r"max_operands.*99"),
    "option-form": (["--env-kwargs", "max_operands"], r"max_operands.*key=value"),
    "flag": (["--learning-speed", "1"], r"--learning-speed"),
    "flag-type": (["--eval-tasks", "many"], r"--eval-tasks.*many"),
    "flag-choice": (["--dtype", "float8"], r"float8.*--dtype"),
    "flag-range": (["--eval-tasks", "0"], r"--eval-tasks 0: expected 1 or more"),
    "flag-nan": (["--learning-rate", "nan"], r"--learning-rate nan"),
    "device": (["--device", "gpu7"], r"--device gpu7"),
    "no-model": (["--model", "{d}/nowhere"], r"--model \S*nowhere.*config\.json"),
    "empty-model": (["--model", "{d}/empty"], r"--model \S*empty.*config\.json"),
    "weightless": (["--model", "{d}/weightless"], r"--model \S*weightless.*weights"),
    "torn-weights": (["--model", "{d}/torn"], r"--model \S*torn.*weights"),
    "run-folder": (["--run-dir", "{d}/file/run"], r"--run-dir \S*file/run"),
}
RL_BAD = {
    "context": (["--max-context-tokens", "9"], r"--max-context-tokens 9.*more than"),
    "template": (["--model", "{d}/mute"], r"--model \S*mute.*no chat template"),
    "reward": (["--reward-fn", "{d}/nothing.py:f"], r"--reward-fn.*nothing\.py"),
    "lora": (["--lora-rank", "2", "--lora-target-modules", "no"], r"--lora-target-modules no"),
}
BAD = {f"{script.__name__.removesuffix('_llm')}-{name}": (script, *case) for script in ALL
       for name, case in (COMMON_BAD if script is sft else COMMON_BAD | RL_BAD).items()} | {
    "grpo-group": (grpo_llm, ["--group-size", "1"], r"--group-size 1: expected 2 or more"),
    "grpo-minibatches": (grpo_llm, ["--minibatches", "99"], r"--minibatches 99.*--prompts-per-iteration"),
    "ppo-minibatches": (ppo_llm, ["--prompts-per-iteration", "3", "--minibatches", "4"],
                        r"--minibatches 4: .* the 3 episodes"),
    "ppo-critic-minibatches": (ppo_llm, ["--prompts-per-iteration", "3", "--group-size", "2",
                                         "--minibatches", "6", "--critic-minibatches", "7"],
                               r"--critic-minibatches 7: .* the 6 episodes"),
    "ppo-kl-target": (ppo_llm, ["--kl-target", "0.1"], r"--kl-target 0\.1: needs a --kl-coef"),
    "ppo-gamma": (ppo_llm, ["--gamma", "2"], r"--gamma 2\.0: expected at most 1"),
    "ppo-lambda": (ppo_llm, ["--gae-lambda", "-1"], r"--gae-lambda -1\.0: expected 0 or more"),
    "ppo-rate": (ppo_llm, ["--critic-learning-rate", "0"], r"--critic-learning-rate 0\.0: .*more than 0"),
    "ppo-critic": (ppo_llm, ["--critic", "mine"], r"mine.*--critic.*own.*shared.*none"),
    "sft-heads": (sft, ["--hidden-size", "30"], r"--hidden-size 30.*--num-heads"),
    "sft-no-file": (sft, ["--train-files", "{d}/no.jsonl"], r"--train-files \S*no\.jsonl"),
    "sft-suffix": (sft, ["--train-files", "{d}/good.csv"], r"--train-files \S*good\.csv.*parquet"),
    "sft-torn": (sft, ["--train-files", "{d}/torn.jsonl"], r"--train-files \S*torn\.jsonl"),
    "sft-parquet": (sft, ["--train-files", "{d}/torn.parquet"], r"--train-files \S*torn\.parquet"),
    "sft-column": (sft, ["--train-files", "{d}/missing.jsonl"],
                   r"missing\.jsonl, row 2, column response: missing"),
    "sft-number": (sft, ["--train-files", "{d}/number.jsonl"], r"number\.jsonl, row 1.*prompt.*6"),
    "sft-steps": (sft, ["--steps", "0"], r"--steps 0: expected.*--train-files"),
    "sft-no-steps": (sft, ["--model", TINY, "--steps", "0"], r"--steps 0: expected.*--train-files"),
    "sft-one": (sft, ["--train-files", "{d}/one.jsonl"], r"at least 2 rows"),
    "sft-none": (sft, ["--train-files", "{d}/none.jsonl"], r"none\.jsonl|at least 2 rows"),
    "sft-key": (sft, ["--train-files", "{d}/good.jsonl", "--prompt-key", "ask"], r"good\.jsonl, row 1.*ask"),
    "sft-length": (sft, ["--train-files", "{d}/good.jsonl", "--max-length", "9"], r"--max-length 9.*tokens"),
}


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory):
    return bad_files(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_that_names_it(case, bad_folder, tmp_path, capsys):
    script, flags, expected = BAD[case]
    flags = [flag.replace("{d}", str(bad_folder)) for flag in flags]
    if "--run-dir" not in flags:
        flags += ["--run-dir", tmp_path / "run"]
    if script is sft:
        flags = ["--steps", 4, *flags, "--output-dir", tmp_path / "model"]
    code = command_line(f"{script.__name__}.py", *flags)
    output = capsys.readouterr()
    assert code not in (0, None)
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.err + output.out).split())  # tyro draws a box
    assert re.search(expected, text), text
    assert "Traceback" not in text
    lines = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 or "full helptext" in text, output.err
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob("run/events*"))  # nothing began


def test_sizes_that_cannot_be_are_refused_before_anything_loads():
    for script, flags in ((grpo_llm, dict(temperature=0.0)), (grpo_llm, dict(learning_rate=-1.0)),
                          (grpo_llm, dict(clip_low=1.5)), (grpo_llm, dict(advantage_balance=-1.5)),
                          (grpo_llm, dict(log_episodes=2.0)), (grpo_llm, dict(iterations=-1)),
                          (grpo_llm, dict(tis_cap=math.inf)), (grpo_llm, dict(threads=0)),
                          (ppo_llm, dict(group_size=0)), (ppo_llm, dict(critic_epochs=0)),
                          (ppo_llm, dict(critic_minibatches=0)), (ppo_llm, dict(value_clip=-0.1)),
                          (ppo_llm, dict(critic_warmup=-1)), (ppo_llm, dict(gae_lambda=1.01)),
                          (ppo_llm, dict(kl_coef=math.nan)), (ppo_llm, dict(target_kl=-1.0)),
                          (sft, dict(val_ratio=-0.1)), (sft, dict(val_ratio=1.5)), (sft, dict(steps=-1)),
                          (sft, dict(batch_size=0)), (sft, dict(log_every=3, checkpoint_every=4))):
        (name,) = list(flags)[:1]
        with pytest.raises(envs.BadInput, match=f"--{name.replace('_', '-')} "):
            script.Args(**flags)


# Failing


def write_module(tmp_path, text):
    path = tmp_path / "custom.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("script", RL)
def test_a_reward_that_is_not_finite_leaves_a_receipt_and_a_sound_log(script, tmp_path, capsys):
    path = write_module(tmp_path, "def nan(r):\n    return float('nan') if 'train' in r.task.id else 0.0\n")
    sizes = ["--minibatches", 2, "--critic-minibatches", 2] if script is ppo_llm else []
    code = command_line(f"{script.__name__}.py", "--reward-fn", f"{path}:nan", "--run-dir", tmp_path / "run",
                        "--eval-tasks", 4, "--eval-samples", 2, "--prompts-per-iteration", 2,
                        "--iterations", 2, *sizes)
    said = capsys.readouterr().err
    assert code == 1 and "Traceback" not in said
    assert re.search(r"^error: FloatingPointError: the reward of task countdown-train-\d+ is nan", said, re.M)
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 1, verdict
    (error,) = (line for line in log_lines(tmp_path / "run") if "error" in line)
    receipt = tmp_path / "run" / error["error"]["receipt"]
    told = json.loads((receipt / "receipt.json").read_text())
    assert told["type"] == "FloatingPointError" and told["seed"] == 1
    assert told["args"]["prompts_per_iteration"] == 2
    assert {"versions", "git_sha", "traceback", "iteration", "opt_steps"} <= set(told)
    evidence = json.loads((receipt / "evidence.json").read_text())
    assert evidence and evidence[0]["messages"][0]["role"] == "user"


def test_an_error_in_the_users_code_keeps_its_traceback_and_leaves_a_receipt(tmp_path):
    path = write_module(tmp_path, "def oops(r):\n    return 1 / (0 if 'train' in r.task.id else 1)\n")
    with pytest.raises(ZeroDivisionError):
        train(grpo_llm, tmp_path / "run", reward_fn=f"{path}:oops")
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 1
    (receipt,) = (tmp_path / "run" / "receipts").iterdir()
    assert "custom.py" in "".join(json.loads((receipt / "receipt.json").read_text())["traceback"])


MORE_REWARDS = "def more(r):\n    return [step.reward for step in r.steps] + [1.0] * ('{}' in r.task.id)\n"


@pytest.mark.parametrize("split", ["test", "train"])
def test_more_rewards_than_turns_are_one_line_and_nothing_is_trained(split, tmp_path, capsys):
    """As the model is evaluated first, or in the first iteration."""
    path = write_module(tmp_path, MORE_REWARDS.format(split))
    code = command_line("ppo_llm.py", "--reward-fn", f"{path}:more", "--run-dir", tmp_path / "run",
                        "--eval-tasks", 4, "--eval-samples", 2, "--prompts-per-iteration", 8,
                        "--minibatches", 2, "--critic-minibatches", 2, "--iterations", 2)
    said = capsys.readouterr().err
    assert code == 1 and "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.search(r"the reward function gave (1 rewards for 0|2 rewards for 1) turns", line)
    assert [r["opt_steps"] for r in records(tmp_path / "run")] == ([] if split == "test" else [0])
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


TOO_FAST = {
    "grpo": (grpo_llm, dict(learning_rate=1e38, warmup_iterations=0)),
    "ppo": (ppo_llm, dict(learning_rate=1e38, warmup_iterations=0)),
    "ppo-critic": (ppo_llm, dict(critic_learning_rate=1e38, warmup_iterations=0, checkpoint_every=1,
                                 critic_epochs=1, critic_minibatches=1)),
    "sft": (sft, dict(learning_rate=1e38, warmup_steps=0, checkpoint_every=1)),
}


@pytest.mark.parametrize("case", TOO_FAST)
def test_weights_that_are_not_finite_end_the_run(case, tmp_path):
    """A learning rate that overflows float32: the run ends, and no broken checkpoint is written."""
    script, flags = TOO_FAST[case]
    with pytest.raises(SystemExit, match="FloatingPointError"):
        train(script, tmp_path / "run", **flags)
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["errors"] == 1, verdict
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        weights = load_file(path / "model.safetensors")
        weights |= torch.load(path / "trainer_state.pt").get("critic", {})
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_rounds_of_dynamic_sampling_are_bounded_and_a_batch_without_signal_is_skipped(tmp_path):
    """Replies of one token are always cut: no group can teach anything."""
    folder = train(grpo_llm, tmp_path / "run", dynamic_sampling=2, max_response_tokens=1, iterations=2)
    for record in records(folder)[1:]:
        assert record["rollout/groups_submitted"] == 3 * 4
        assert record["rollout/groups_trainable"] == record["train/grad_norm"] == record["opt_steps"] == 0
        assert record["rollout/termination/length"] == record["response_length/clip_ratio"] == 1.0
    weights = load_file(folder / "checkpoints" / "step_000002" / "model.safetensors")
    start = load_file(Path(TINY) / "model.safetensors")
    assert all(torch.equal(weights[name], start[name]) for name in start)
    assert validate(folder)["ok"]


def test_dynamic_sampling_fills_the_batch_and_stops(tmp_path):
    plain, more = (train(grpo_llm, tmp_path / f"{rounds}", dynamic_sampling=rounds, iterations=6,
                         eval_every=0) for rounds in (0, 8))
    trainable = [r["rollout/groups_trainable"] for r in records(plain)[1:]]
    assert min(trainable) < 4
    for record in records(more)[1:]:
        assert record["rollout/groups_trainable"] >= 4
    assert 4 < max(r["rollout/groups_submitted"] for r in records(more)[1:]) < 9 * 4


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("script", RL)
def test_the_reference_of_the_kl_penalty_is_the_starting_model(script, tmp_path, monkeypatch, lora_rank):
    ids, start = torch.tensor([[1, 10, 22, 18, 108, 42, 109]]), AutoModelForCausalLM.from_pretrained(TINY)
    distances = []
    store = script.store_logprobs

    @torch.no_grad()
    def watched(model, segments, name, *rest):
        distances.append((name, float((model(ids).logits - start(ids).logits).abs().max())))
        store(model, segments, name, *rest)

    monkeypatch.setattr(script, "store_logprobs", watched)
    folder = train(script, tmp_path / "run", kl_coef=0.1, lora_rank=lora_rank, learning_rate=5e-3, epochs=2,
                   warmup_iterations=0, iterations=2, eval_every=0, eval_tasks=2,
                   **dict(critic_warmup=0) if script is ppo_llm else {})
    old, ref = ([distance for which, distance in distances if which == name]
                for name in ("old_logprobs", "ref_logprobs"))
    assert max(ref) == 0 < len(ref) and old[0] == 0 < min(old[1:])
    kl = [record["train/kl_loss"] for record in records(folder)[1:]]
    assert kl[1] > 1e-3
    assert script is grpo_llm or kl[0] == 0  # PPO takes it before the updates


def test_an_evaluation_alone_needs_no_iteration(tmp_path):
    folder = train(grpo_llm, tmp_path / "run", iterations=0)
    (record,) = records(folder)
    assert record["iteration"] == 0 and record["val/countdown/greedy"] > 0
    assert validate(folder)["ok"]
    assert not list((folder / "checkpoints").glob("step_*"))
    train(grpo_llm, folder, iterations=0)
    assert timeless(folder) == [timeless(folder)[0]] and len(log_lines(folder)) == 2


@pytest.mark.parametrize("script", RL)
def test_replies_that_do_not_fit_the_context_are_counted(script, tmp_path):
    folder = train(script, tmp_path / "run", max_context_tokens=17, iterations=1)
    record = records(folder)[-1]
    assert record["rollout/termination/context"] == 1.0
    assert record["env_steps"] == record["opt_steps"] == 0
    assert validate(folder)["ok"]


# Environments that fail


FLAKY = """
import zlib
from envs.countdown import Countdown

class Flaky(Countdown):
    often = {often}

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step
        def fails(reply):
            if "train" in task.id and zlib.crc32(reply.encode()) % 100 < self.often:
                raise ConnectionError("no answer")
            return step(reply)
        episode.step = fails
        return episode
"""


@pytest.mark.parametrize("script", RL)
def test_a_run_goes_on_beside_environments_that_fail(script, tmp_path):
    path = write_module(tmp_path, FLAKY.format(often=50))
    size = dict(prompts_per_iteration=12) if script is ppo_llm else {}
    folder = train(script, tmp_path / "run", env=f"{path}:Flaky", episode_retries=1, log_episodes=1.0,
                   eval_every=0, iterations=2, **size)
    assert validate(folder, strict=True)["ok"]
    for record in records(folder)[1:]:
        step = f"train_step_{record['iteration']:06d}"
        episodes = [json.loads(path.read_text()) for path in (folder / "episodes" / step).glob("countdown*")]
        failed = [episode for episode in episodes if episode["termination"] == "error"]
        played = [episode for episode in episodes if episode["termination"] != "error"]
        assert failed and played and all(episode["retries"] == 1 for episode in failed)
        assert record["rollout/termination/error"] == len(failed) / len(episodes)
        assert record["rollout/retries"] == sum(episode["retries"] for episode in episodes) > len(failed)
        mean = sum(episode["reward"] for episode in played) / len(played)
        assert record["train/reward"] == record["critic/score/mean"] == pytest.approx(mean)
        if script is grpo_llm:
            assert record["rollout/groups_incomplete"] == len({episode["task_id"] for episode in failed})
        else:  # what failed has no numbers of an update
            assert all(s["returns"] is None for episode in failed for s in episode["segments"])
            assert all(s["returns"] for episode in played for s in episode["segments"])


@pytest.mark.parametrize("script", RL)
def test_when_every_environment_fails_one_line_says_so_and_nothing_is_learned(script, tmp_path, capsys):
    path = write_module(tmp_path, FLAKY.format(often=100))
    folder = train(script, tmp_path / "run", env=f"{path}:Flaky", eval_every=0, eval_tasks=2, iterations=2)
    said = [line for line in capsys.readouterr().err.splitlines() if "every episode" in line]
    assert [line[:11] for line in said] == ["iteration 1", "iteration 2"]
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and verdict["errors"] == 0, verdict
    assert [record["opt_steps"] for record in records(folder)] == [0, 0, 0]
    assert records(folder)[-1]["rollout/termination/error"] == 1
    weights = load_file(folder / "checkpoints" / "step_000002" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor)
               for name, tensor in load_file(Path(TINY) / "model.safetensors").items())


# Episodes


@pytest.mark.parametrize("script", RL)
def test_episodes_are_written_with_a_summary_that_adds_up(script, tmp_path):
    folder = train(script, tmp_path / "run", log_episodes=1.0, eval_tasks=12, iterations=1)
    num_episodes = SMALL[script.__name__]["prompts_per_iteration"] * SMALL[script.__name__]["group_size"]
    kinds = {path.name: path for path in (folder / "episodes").iterdir()}
    assert set(kinds) == {"val_step_000000", "train_step_000001", "val_step_000001"}
    for name, path in kinds.items():
        summary = json.loads((path / "summary.json").read_text())
        episodes = [json.loads(file.read_text()) for file in path.glob("countdown-*_*.json")]
        assert summary["episodes"] == summary["files"] == len(episodes) == (
            24 if "val" in name else num_episodes)
        assert summary["reward_sum"] == pytest.approx(sum(e["reward"] for e in episodes))
        assert summary["correct_sum"] == sum(e["correct"] for e in episodes)
        assert len({(e["task_id"], e["number"]) for e in episodes}) == len(episodes)
        for episode in episodes:
            assert episode["messages"][-1]["role"] == "assistant"
            (turn,), ids = episode["turns"], episode["segments"][0]["response_ids"]
            assert "".join(turn["tokens"]) == episode["messages"][-1]["content"]
            assert len(turn["tokens"]) == len(ids) and turn["reward"] == episode["reward"]
            assert turn["logprobs"] == episode["segments"][0]["rollout_logprobs"]
            for s in episode["segments"]:
                assert len(s["response_ids"]) == len(s["response_mask"]) == len(s["rollout_logprobs"])
        if "val" in name:
            table = json.loads((path / "table.json").read_text())
            assert len(table) == 10 == len({row["prompt"] for row in table})
            assert set().union(*table) == {"prompt", "response", "reward", "is_correct", "data_source",
                                           "metrics_json"}
            assert all(json.loads(row["metrics_json"])["correct"] == row["is_correct"] for row in table)


@pytest.mark.slow
def test_a_share_of_the_episodes_is_written_and_a_resume_writes_the_same_ones(tmp_path):
    flags = dict(log_episodes=0.3, val_table_samples=3)
    whole = train(grpo_llm, tmp_path / "whole", **flags)
    with InterruptAt(grpo_llm, 3), pytest.raises(SystemExit):
        train(grpo_llm, tmp_path / "halves", **flags)
    halves = train(grpo_llm, tmp_path / "halves", **flags)
    written = [{str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("episodes/*/*")}
               for folder in (whole, halves)]
    assert written[0] == written[1]
    files = [path for path in written[0] if path.split("/")[-1].startswith("countdown")]
    assert 0 < len(files) < 0.6 * (4 * 16 + 3 * 12)
    tried = [{path.name for path in (whole / "episodes" / f"val_step_00000{n}").glob("countdown*")}
             for n in (0, 2, 4)]
    assert tried[0] == tried[1] == tried[2] != set()  # the same ones, so that they can be compared
    table = json.loads(written[0]["episodes/val_step_000004/table.json"])
    assert len(table) == 3


HOSTILE = """
import dataclasses
from envs.countdown import Countdown

class Hostile(Countdown):
    def task(self, split, index):
        names = ["../../evil", "..", "/etc/passwd", "a\\x00b|c\\n", "x" * 400, "a/b", "a_b", "\\u202e<b>"]
        name = names[index % len(names)] + ("" if index < len(names) else f" {index}")
        return dataclasses.replace(super().task(split, index), id=name)
"""


def test_a_hostile_task_id_stays_within_its_folder(tmp_path):
    path = write_module(tmp_path, HOSTILE)
    folder = train(grpo_llm, tmp_path / "deep" / "run", env=f"{path}:Hostile", log_episodes=1.0, eval_tasks=8,
                   iterations=1)
    val = folder / "episodes" / "val_step_000000"
    files = [file for file in val.iterdir() if file.name not in ("summary.json", "table.json")]
    assert len(files) == 16 == json.loads((val / "summary.json").read_text())["files"]
    for file in files:
        assert re.fullmatch(r"[A-Za-z0-9._-]+\.json", file.name) and len(file.name) < 128
        assert json.loads(file.read_text())["task_id"]
    assert not list(tmp_path.rglob("evil*")) and validate(folder)["ok"]


@pytest.mark.parametrize("script", RL)
def test_sample_episodes_are_printed_in_training_and_validation(script, tmp_path, capsys):
    train(script, tmp_path / "run", print_samples=2, iterations=1, eval_tasks=4)
    said = capsys.readouterr().out
    for title, samples in (("val", 4), ("train", 2)):
        lines = [line for line in said.splitlines() if line.startswith(f"\033[2m{title} countdown-")]
        assert len(lines) == samples
        assert all("->" in line and "reward" in line for line in lines)


# Settings


def test_a_dotenv_file_is_read_and_the_default_model_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAINRL_TEST", "")  # restored afterwards
    monkeypatch.delenv("PLAINRL_TEST")
    (tmp_path / ".env").write_text("PLAINRL_TEST=seen\n")
    train(grpo_llm, Path("run"), iterations=0)
    assert os.environ["PLAINRL_TEST"] == "seen"
    assert validate(tmp_path / "run")["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [grpo_llm, sft])
@pytest.mark.parametrize("missing", ["repository", "git"])
def test_a_copy_without_git_runs_too(script, missing, tmp_path, monkeypatch):
    """A download without its history, or a machine without git: there is no commit to name."""
    name, value = {"repository": ("GIT_DIR", tmp_path / "none"), "git": ("PATH", tmp_path)}[missing]
    monkeypatch.setenv(name, str(value))
    flags = {grpo_llm: dict(iterations=1), sft: dict(steps=1, model=TINY)}[script]
    folder = train(script, tmp_path / "run", **flags)
    train(script, folder, **flags)
    verdict = validate(folder)
    assert verdict["ok"] and verdict["resumes"] == 1, verdict
    assert not log_lines(folder)[0]["meta"]["git_sha"]


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(grpo_llm, "", iterations=0, experiment="mine")
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    assert folder.name == records(folder)[0]["run_id"]
    assert re.fullmatch(r"\d{8}_\d{6}__grpo__countdown__s1", folder.name)


@pytest.mark.slow
def test_bfloat16_trains_with_close_to_the_same_numbers(tmp_path):
    losses = []
    for dtype in ("float32", "bfloat16"):
        folder = train(sft, tmp_path / dtype, dtype=dtype, steps=12, log_every=4, eval_every=0,
                       checkpoint_every=12)
        losses.append([r["train/loss"] for r in records(folder)[1:]])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < losses[1][0] - 0.2
    folder = train(grpo_llm, tmp_path / "grpo", dtype="bfloat16")
    assert validate(folder)["ok"]
    for record in records(folder)[1:]:
        assert 0 < record["mismatch/ratio_max"] < 1.5  # both sides compute in bfloat16
        assert abs(record["train/policy_loss"]) < 0.05
    weights = load_file(folder / "checkpoints" / LAST / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("script", RL)
def test_a_lora_checkpoint_is_a_peft_adapter_and_the_base_stays_untouched(script, tmp_path, monkeypatch):
    """... by a critic's adapter too, beneath which the same weights lie."""
    trained = []
    save = script.Run.save
    monkeypatch.setattr(script.Run, "save", lambda run, model, *rest: (
        trained.append(model), save(run, model, *rest)))
    folder = train(script, tmp_path / "run", lora_rank=4, learning_rate=1e-2, eval_every=0, eval_tasks=2,
                   iterations=2)
    start = load_file(Path(TINY) / "model.safetensors")
    inside = {name.replace("base_layer.", ""): tensor
              for name, tensor in trained[-1].get_base_model().state_dict().items() if "lora_" not in name}
    for name, tensor in start.items():
        assert torch.equal(inside[name], tensor), name
    base = AutoModelForCausalLM.from_pretrained(TINY)
    ids = torch.tensor([[1, 10, 22, 18, 108, 42, 109]])
    before = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, folder / "checkpoints" / "step_000002")
    adapter = load_file(folder / "checkpoints" / "step_000002" / "adapter_model.safetensors")
    assert not [name for name in adapter if "lm_head" in name or "embed_tokens" in name]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, trained[-1](ids).logits)
        assert (model(ids).logits - before).abs().max() > 1e-3
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, before)
    assert not [name for name in adapter if "decoder" in name]  # the critic's
    base_norm = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in start.values()))
    assert records(folder)[-1]["train/weight_norm"] < base_norm  # it is that of the trained weights


def test_a_full_checkpoint_is_a_hugging_face_model(tmp_path, finished):
    folder = finished(grpo_llm) / "checkpoints" / LAST
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == AutoModelForCausalLM.from_pretrained(TINY).num_parameters()
    again = train(grpo_llm, tmp_path / "run", model=str(folder), iterations=0)
    last, first = records(finished(grpo_llm))[-1], records(again)[0]
    for name in ("pass@1", "pass@2", "greedy"):
        assert first[f"val/countdown/{name}"] == last[f"val/countdown/{name}"]
    assert tokenizer.chat_template


# PPO: what its log says of the episodes, and when its policy begins to move


LONG_GAME = """
from tests.two_turn import TwoTurn

class LongGame(TwoTurn):
    replies = 4

def of_turns(r):
    return [0.1 * n + step.reward for n, step in enumerate(r.steps)]
"""


@pytest.fixture(scope="module")
def long_games(tmp_path_factory):
    """A run of episodes with up to four turns and several segments, each of which is kept."""
    path = write_module(tmp_path_factory.mktemp("long_games"), LONG_GAME)
    return train(ppo_llm, path.parent / "run", env=f"{path}:LongGame", reward_fn=f"{path}:of_turns",
                 max_context_tokens=45, kl_coef=0.2, kl_target=0.01, gamma=0.98, gae_lambda=0.9,
                 critic_warmup=2, warmup_iterations=0, learning_rate=5e-3, log_episodes=1.0, eval_every=0,
                 checkpoint_every=1, keep_checkpoints=0)


def episodes_of(folder, iteration):
    """The episodes of an iteration, each the columns of its tokens, all segments joined: {name: array}."""
    names = ("response_mask", "rewards", "values", "returns", "advantages", "old_logprobs", "ref_logprobs",
             "rollout_logprobs")
    for path in sorted((folder / "episodes" / f"train_step_{iteration:06d}").glob("countdown*")):
        episode = json.loads(path.read_text())
        columns = {name: np.concatenate([segment[name] for segment in episode["segments"]]) for name in names}
        # A turn's last token: one that the policy chose, before one that it did not or the segment's end.
        ends = [np.diff([*segment["response_mask"], 0]) < 0 for segment in episode["segments"]]
        yield episode, columns | {"ends": np.concatenate(ends)}


def lambda_returns(rewards, values, gamma, lam):
    """GAE as it is written (arXiv:1506.02438, eq. 16), in float64: a sum over the steps to come."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array([sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
                     for t in range(len(deltas))])


def test_the_numbers_of_ppo_are_those_of_its_episodes(long_games):
    coef, split, num_turns = 0.2, 0, set()
    for record in records(long_games)[1:]:
        of_episode, of_token = {"score": [], "rewards": []}, {}
        for episode, columns in episodes_of(long_games, record["iteration"]):
            chosen = columns.pop("response_mask") == 1
            for name in ("rewards", "returns", "advantages"):
                assert not columns[name][~chosen].any()  # of the environment's tokens nothing is learned
            turns = sum(message["role"] == "assistant" for message in episode["messages"])
            expected = [0.1 * n for n in range(turns)]  # a right reply earns 1 beside, a cut one nothing
            expected[-1] = 0.0 if episode["termination"] == "length" else expected[-1] + episode["correct"]
            ends = columns.pop("ends")
            assert columns["rewards"][ends].tolist() == pytest.approx(expected)
            assert not columns["rewards"][~ends].any()
            of_token_here = {name: column[chosen] for name, column in columns.items()}
            penalty = coef * (of_token_here["old_logprobs"] - of_token_here["ref_logprobs"])
            rewards = of_token_here["rewards"] - penalty
            of_token_here["estimates"] = lambda_returns(rewards, of_token_here["values"], 0.98, 0.9)
            assert episode["reward"] == pytest.approx(sum(expected))
            of_episode["score"].append(episode["reward"])
            of_episode["rewards"].append(rewards.sum())
            for name, column in of_token_here.items():
                of_token.setdefault(name, []).append(column)
            split, num_turns = split + (len(episode["segments"]) > 1), num_turns | {turns}
        numbers = {name: np.concatenate(columns) for name, columns in of_token.items()}
        estimates, values, returns = (numbers[name] for name in ("estimates", "values", "returns"))
        assert returns == pytest.approx(estimates + values, abs=1e-6)
        whitened = (estimates - estimates.mean()) / estimates.std()
        assert numbers["advantages"] == pytest.approx(whitened, abs=1e-4)
        for name, column in (*of_episode.items(), ("advantages", estimates), ("values", values),
                             ("returns", returns)):
            assert [record[f"critic/{name}/{of}"] for of in ("mean", "max", "min")] == pytest.approx(
                [np.mean(column), np.max(column), np.min(column)], abs=1e-6), name
        explained = 1 - np.var(returns - values) / np.var(returns)
        assert record["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-6)
        drift = numbers["old_logprobs"] - numbers["ref_logprobs"]
        mismatch = numbers["old_logprobs"] - numbers["rollout_logprobs"]
        assert record["kl/k1"] == pytest.approx(drift.mean(), abs=1e-9)
        assert record["train/kl_loss"] == pytest.approx((np.exp(-drift) - 1 + drift).mean(), abs=1e-9)
        assert record["mismatch/ratio_max"] == pytest.approx(np.exp(mismatch).max())
        assert abs(record["mismatch/kl"]) < 1e-9 and abs(record["train/advantage"]) < 1e-6
        assert record["critic/vf_loss"] == pytest.approx(2 * record["train/value_loss"]) and (
            record["critic/vf_loss"] > 0)
        assert record["kl/coef"] == pytest.approx(coef)
        if record["train/policy_steps"]:  # the KL of a policy that may not move yet says nothing
            coef *= 1 + 0.1 * min(max(record["kl/k1"] / 0.01 - 1, -0.2), 0.2)
    assert abs(drift.mean()) > 1e-3 and coef not in (0.2, pytest.approx(0.2 * 0.98**2))  # it did move
    assert split > 4 and {1, 4} <= num_turns


def test_the_critic_learns_alone_before_the_policy_moves(long_games):
    assert validate(long_games, strict=True)["ok"]
    log = records(long_games)[1:]
    start = load_file(Path(TINY) / "model.safetensors")
    last = [long_games / "checkpoints" / f"step_{iteration:06d}" for iteration in (1, 2, 3, 4)]
    weights = [load_file(folder / "model.safetensors") for folder in last]
    critics = [torch.load(folder / "trainer_state.pt")["critic"] for folder in last]
    for n, record in enumerate(log):
        unchanged = all(torch.equal(weights[n][name], start[name]) for name in start)
        alone = record["iteration"] <= 2
        assert unchanged is alone is (record["train/policy_steps"] == 0)
        assert alone is (record["train/learning_rate"] == 0) is (record["train/grad_norm"] == 0)
        assert alone is (record["train/approx_kl"] < 1e-9)
        assert record["train/entropy"] > 0.1 and record["critic/grad_norm"] > 0
        assert record["opt_steps"] == 4 * record["iteration"] + 2 * max(record["iteration"] - 2, 0)
        norm = math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in weights[n].values()))
        assert record["train/weight_norm"] == pytest.approx(norm, rel=1e-6)
        if n:
            assert all(not torch.equal(tensor, critics[n - 1][name]) for name, tensor in critics[n].items())
    norms = [record["train/weight_norm"] for record in log]
    assert norms[0] == norms[1] != norms[2] != norms[3]
    values = [[record["critic/values/min"], record["critic/values/max"]] for record in log]
    assert values[0] == [0, 0] and values[1][0] < values[1][1]
    assert log[0]["critic/vf_explained_var"] == 0 != log[1]["critic/vf_explained_var"]


@pytest.mark.parametrize("critic", ["none", "shared"])
def test_without_a_critic_of_its_own_the_policy_moves_at_once_and_alone(critic, tmp_path):
    folder = train(ppo_llm, tmp_path / "run", critic=critic, critic_warmup=9, iterations=3, eval_every=0,
                   eval_tasks=2, warmup_iterations=0)
    assert validate(folder, strict=True)["ok"]
    log = records(folder)[1:]
    for record in log:
        assert record["critic/grad_norm"] == record["critic/learning_rate"] == 0
        assert record["train/policy_steps"] == 2 and record["opt_steps"] == 2 * record["iteration"]
        assert record["train/grad_norm"] > 0 and record["train/learning_rate"] > 0
    names = ["train/value_loss"] + [f"critic/{name}" for name in (
        "values/mean", "values/max", "values/min", "vf_explained_var", "vf_loss", "vpred_mean")]
    if critic == "none":
        assert all(record[name] == 0 for record in log for name in (*names, "critic/vf_clipfrac"))
        assert all(record[f"critic/{name}/max"] == record["critic/score/max"] for record in log
                   for name in ("returns", "advantages"))
    else:
        assert all(log[2][name] != 0 for name in names)


# Slow: processes of their own


@pytest.mark.slow
def test_tracking_mirrors_the_log_offline(tmp_path):
    pytest.importorskip("wandb")
    run = process("grpo_llm.py", "--track", "--iterations", 2, "--prompts-per-iteration", 2,
                  "--eval-tasks", 4, "--run-dir", tmp_path / "run",
                  env=dict(WANDB_MODE="offline", WANDB_SILENT="true"))
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    (mirror,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    data = mirror.read_bytes()
    for name in (b"val/countdown/pass@1", b"train/reward", b"mismatch/kl"):
        assert name in data
    assert validate(tmp_path / "run")["ok"]


KILL = {
    "grpo_llm.py": ["--prompts-per-iteration", 4, "--group-size", 4, "--eval-tasks", 4, "--eval-samples", 2,
                    "--eval-every", 5, "--checkpoint-every", 2, "--epochs", 2, "--log-episodes", 0.1],
    "ppo_llm.py": ["--prompts-per-iteration", 4, "--minibatches", 1, "--critic-minibatches", 2,
                   "--critic-epochs", 1, "--critic-warmup", 20, "--kl-coef", 0.05, "--kl-target", 0.01,
                   "--eval-tasks", 4, "--eval-samples", 2, "--eval-every", 20, "--checkpoint-every", 3,
                   "--log-episodes", 0.1],
    "sft.py": ["--batch-size", 16, "--eval-tasks", 4, "--eval-samples", 2, "--eval-every", 6,
               "--log-every", 2, "--checkpoint-every", 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", KILL)
def test_kills_at_any_moment_change_nothing(script, tmp_path):
    kills, rng = int(os.environ.get("KILLS", "2")), random.Random(os.environ.get("KILLS_SEED", "1"))
    length = 40 * kills
    flags = [*KILL[script], "--steps" if script == "sft.py" else "--iterations", length]

    def start(name):
        folder = tmp_path / name
        output = ["--output-dir", tmp_path / f"{name}-model"] if script == "sft.py" else []
        return folder, process(script, *flags, *output, "--run-dir", folder)

    whole, run = start("whole")
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    moments = [("writing", "log", "start")[n % 3] for n in range(kills)]
    killed = torn = 0
    for moment in moments:
        folder, run = start("killed")
        killed += kill_at(moment, run, folder, rng, pause=0.01)
        torn += any((folder / "checkpoints").glob(".step_*.writing"))
    folder, run = start("killed")
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert killed == kills and torn >= 1, (killed, torn)
    same_end(whole, folder, f"step_{length:06d}")
    verdict = validate(folder)
    assert verdict["ok"] and not verdict["warnings"], verdict
    assert 1 <= verdict["resumes"] <= kills
    if script == "sft.py":
        same_tree(*(load_file(tmp_path / f"{name}-model" / "model.safetensors")
                    for name in ("whole", "killed")))
    else:
        written = [{str(path.relative_to(f)): path.read_bytes() for path in f.glob("episodes/*/*")}
                   for f in (whole, folder)]
        assert written[0] == written[1] and written[0]


SLEEPER = """
import zlib
from envs.code.repl import Repl, ReplEpisode

class Sleeper(Repl):
    def start(self, task, seed):
        return Asleep(self, task, self.scenario(task), self.scenario(task).files, depth=0)

class Asleep(ReplEpisode):
    def step(self, reply):
        return super().step("import time; time.sleep(0.2)")

def reward(rollout):
    return zlib.crc32(rollout.messages[1]["content"].encode()) % 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo_llm.py", "ppo_llm.py"])
def test_a_trainer_killed_amid_its_sandboxes_leaves_no_process_and_goes_on(script, tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    flags = ["--env", f"{tmp_path}/sleeper.py:Sleeper", "--reward-fn", f"{tmp_path}/sleeper.py:reward",
             "--env-kwargs", "scenarios=tiny", "prompt=short", "max_turns=6", "--prompts-per-iteration", 4,
             "--group-size", 8, "--max-concurrent", 32, "--env-threads", 32, "--iterations", 3,
             "--checkpoint-every", 1, "--eval-every", 0, "--eval-tasks", 1, "--eval-samples", 1,
             "--run-dir", tmp_path / "run"]
    flags += ["--critic-warmup", 0] if script == "ppo_llm.py" else []
    run = process(script, *flags)
    within = []
    while run.poll() is None and not (
            len(within) >= 64 and (tmp_path / "run" / "checkpoints" / "state.json").exists()):
        time.sleep(0.02)
        with contextlib.suppress(psutil.Error):
            within = psutil.Process(run.pid).children(recursive=True)  # 32 sandboxes, each with its own
    assert run.poll() is None
    run.kill()
    run.communicate()
    assert not psutil.wait_procs(within, timeout=60)[1]
    output, _ = (again := process(script, *flags)).communicate(timeout=600)
    assert again.returncode == 0, output
    verdict = validate(tmp_path / "run")
    assert verdict["ok"] and verdict["resumes"] == 1, verdict
    assert records(tmp_path / "run")[-1]["iteration"] == 3
