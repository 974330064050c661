"""a2c_vecenv.py from the command line to the run folder, a few iterations at a time, on the CPU.

What the run folder promises in all four scripts is in tests/test_runs.py. Slow ones are killed for real:

    KILLS=10 pytest -m slow tests/test_a2c_runs.py
"""

import json
import math
import os
import random
import re
import signal
import time

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

import a2c_vecenv as a2c
from envs import BadInput
from tests.run_folders import (
    LAST,
    command_line,
    kill_at,
    killed_after,
    log_lines,
    process,
    records,
    same_tree,
    slow_but,
    timeless,
)
from tools.validate_train_log import COMMON, METRICS, known, validate

SMALL = dict(iterations=4, num_envs=6, num_steps=4, hidden_size=16, log_every=1, checkpoint_every=2,
             eval_every=2, eval_episodes=3, eval_envs=2, keep_checkpoints=0)
GOAL = ("max_steps=9",)  # so that a few iterations see episodes end


def train(folder, **flags):
    """A run in this process, from its beginning to its end. -> its folder"""
    defaults = SMALL if "env_id" in flags else SMALL | dict(env_kwargs=GOAL)
    a2c.main(a2c.Args(**defaults | dict(run_dir=str(folder)) | flags))
    return folder


def end_of(folder, name=LAST):
    """What a checkpoint holds, the clock aside."""
    state = torch.load(folder / "checkpoints" / name / "trainer_state.pt", weights_only=True)
    return {key: value for key, value in state.items() if key not in ("elapsed", "log_bytes")}


def same_end(one, other, name=LAST):
    """Bit for bit: weights, optimiser, environments, counters and log."""
    states = [end_of(folder, name) for folder in (one, other)]
    assert {"agent", "optimizer", "env", "episodes", "iteration"} <= set(states[0])
    same_tree(*states)
    assert timeless(one) == timeless(other)


# The log, and continuing a run


SEVERAL = (*GOAL, "pack=2bpp", "stack_k=2", "goal_in_obs=true", "num_goals=4")
TWICE = dict(update_every=2, log_every=2, iterations=8, checkpoint_every=4, eval_every=4)
CASES = {
    "default": {},
    "td0": TWICE | dict(num_steps=1),
    "cartpole": dict(env_id="CartPole-v1", num_steps=9),
    "one-step": TWICE | dict(env_id="CartPole-v1", num_steps=1, num_envs=1, normalize_advantages=False),
    "nature": dict(network="nature", dtype="bfloat16"),
    "patch": dict(network="patch", recompute=True, chunk=5, dtype="bfloat16"),
    "several": dict(env_kwargs=SEVERAL),
    "old": dict(bootstrap_truncated=False, normalize_advantages=False, anneal=False, gae_lambda=1.0),
}


@pytest.mark.parametrize("case", slow_but(("default", "td0"), CASES))
def test_the_log_is_sound_and_a_killed_run_goes_on_bit_for_bit(case, tmp_path):
    flags = SMALL | CASES[case]
    whole = train(tmp_path / "whole", **CASES[case])
    check_log(whole, flags)
    half = flags["checkpoint_every"]
    folder = killed_after(whole, tmp_path / "run", half)
    torch.manual_seed(1234)  # whatever this process did before must not matter
    train(folder, **CASES[case])
    same_end(whole, folder, f"step_{2 * half:06d}")
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["records"], verdict["resumes"], verdict["errors"]) == (4, 1, 1), verdict
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert (mark["iteration"], mark["checkpoint"]) == (half, f"checkpoints/step_{half:06d}")
    first, last = (end_of(folder, f"step_{number:06d}") for number in (half, 2 * half))
    for part in ("agent", "env"):  # there was something to continue
        with pytest.raises(AssertionError):
            same_tree(first[part], last[part])


def check_log(folder, flags):
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    last = records(folder)[-1]
    assert last["iteration"] == flags["iterations"] == last["opt_steps"] * flags.get("update_every", 1)
    assert last["env_steps"] == flags["iterations"] * flags["num_envs"] * flags["num_steps"]
    assert sum(last["action_hist"]) == flags["log_every"] * flags["num_envs"] * flags["num_steps"]
    evaluated = [record["iteration"] for record in records(folder) if "eval/return" in record]
    assert evaluated == [flags["eval_every"], 2 * flags["eval_every"]]
    if "env_id" in flags:
        assert {record["success_rate"] for record in records(folder)} == {0}
    logged = {key for record in records(folder) for key in record}
    assert set(COMMON) <= logged and all(known("a2c", key) for key in logged)
    assert set(METRICS["a2c"]) - logged <= {"system/gpu_memory", "time"}
    assert {"time/eval", "time/checkpoint"} <= logged


def test_the_meta_line_says_what_was_run(tmp_path):
    flags = dict(seed=5, env_kwargs=(*GOAL, "stack_k=2"), iterations=2)
    folder = train(tmp_path / "run", **flags)
    meta = log_lines(folder)[0]["meta"]
    args = vars(a2c.Args(**SMALL | flags | dict(run_dir=str(folder))))
    assert meta["args"] == args | dict(env_kwargs=[*GOAL, "stack_k=2"])
    assert (meta["num_envs"], meta["num_actions"], meta["stack_k"], meta["seed"]) == (6, 8, 2, 5)
    assert re.fullmatch(r"\d{8}_\d{6}__a2c__pixel-goal__s5", meta["run_id"])
    assert re.fullmatch("[0-9a-f]{64}", meta["goal_sha256"]) and meta["action_codec_id"] == "gb8"
    assert json.loads((folder / "checkpoints" / "step_000002" / "meta.json").read_text()) == meta


def test_the_seed_decides_everything_random(tmp_path):
    one, other, third = (train(tmp_path / f"{n}", seed=seed, env_id="CartPole-v1")
                         for n, seed in enumerate((1, 2, 1)))
    same_end(one, third)
    for name in ("grad_norm", "value_mean", "action_hist"):
        assert [r[name] for r in records(one)] != [r[name] for r in records(other)]
    assert not torch.equal(*(end_of(folder)["agent"]["policy.weight"] for folder in (one, other)))


def test_what_would_change_the_result_is_refused_by_name(tmp_path):
    folder = train(tmp_path / "run")
    log = (folder / "train_log.jsonl").read_bytes()
    for flags, named in ((dict(seed=2), "--seed 2"), (dict(env_kwargs=("tau=0.06",)), "--env-kwargs"),
                         (dict(num_envs=7), "--num-envs 7"), (dict(anneal=False), "--anneal False"),
                         (dict(iterations=8), "--iterations 8"),
                         (dict(env_id="CartPole-v1", env_kwargs=()), "--env-id CartPole-v1")):
        with pytest.raises(BadInput, match=named):
            train(folder, **flags)
    assert (folder / "train_log.jsonl").read_bytes() == log
    before = end_of(folder)
    train(folder, keep_checkpoints=5, checkpoint_every=1)  # these leave the numbers as they are
    same_tree(end_of(folder), before)


@pytest.mark.slow
def test_another_goal_under_the_same_name_is_refused(tmp_path):
    from tools import make_goal

    goal = tmp_path / "goal"
    words = ["--out", str(goal), "--force", "--seed", "7", "--actions"]
    assert make_goal.main([*words, "B UP*3 RIGHT*2 DOWN"]) == 0
    flags = dict(env_kwargs=(f"goal_dir={goal}",))
    folder = train(tmp_path / "run", **flags)
    assert validate(folder)["ok"] and log_lines(folder)[0]["meta"]["goal_dir"] == str(goal)
    train(folder, **flags)
    assert make_goal.main([*words, "B UP*2 RIGHT*2 DOWN"]) == 0
    with pytest.raises(BadInput, match="goal changed"):
        train(folder, **flags)


class Held(gymnasium.Env):
    """State that cannot be written down: a resumed run begins new episodes."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    breaks_at = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.engine, self.time = object(), 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        if self.time == Held.breaks_at:
            raise ZeroDivisionError("in the engine")
        self.time += 1
        return np.array([self.time, action], np.float32), 1.0, self.time == 7, False, {}


gymnasium.register("HeldFast-v0", Held, disable_env_checker=True)


def test_an_environment_that_cannot_be_saved_begins_anew_on_resume(tmp_path):
    whole = train(tmp_path / "whole", env_id="HeldFast-v0")
    folder = train(killed_after(whole, tmp_path / "run", 2), env_id="HeldFast-v0")
    assert end_of(folder)["env"] is None and validate(folder)["ok"]
    assert records(folder)[-1]["episode_length"] <= 7


# Failing


def receipt_of(folder):
    """The one error of a log and its receipt. -> receipt.json, its folder"""
    (line,) = (line for line in log_lines(folder) if "error" in line)
    path = folder / line["error"]["receipt"]
    told = json.loads((path / "receipt.json").read_text())
    assert told["type"] == line["error"]["type"] and validate(folder)["ok"]
    assert {"versions", "git_sha", "seed", "args", "traceback", "iteration", "opt_steps"} <= set(told)
    return told, path


def check_evidence(path, num_steps=4):
    """The last frames of four environments, their last actions and distances."""
    pictures = [Image.open(file) for file in sorted(path.glob("*.png"))]
    assert [picture.size for picture in pictures] == [(80, 72)] * 4
    assert all(set(np.unique(picture)) <= {0, 85, 170, 255} and np.ptp(picture) for picture in pictures)
    told = json.loads((path / "batch.json").read_text())
    actions, dist, rewards = (np.array(told[name]) for name in ("actions", "dist", "rewards"))
    assert actions.shape == dist.shape == rewards.shape == (num_steps, 4)
    assert actions.min() >= 0 and actions.max() < 8 and 0 < dist.max() <= 1


def test_ctrl_c_leaves_a_receipt_with_frames(tmp_path, monkeypatch):
    loss, calls = a2c.a2c_loss, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(*given)

    monkeypatch.setattr(a2c, "a2c_loss", interrupted)
    with pytest.raises(SystemExit, match="KeyboardInterrupt.*receipt"):
        train(tmp_path / "run")
    told, path = receipt_of(tmp_path / "run")
    assert told["iteration"] == 2 and told["type"] == "KeyboardInterrupt"
    check_evidence(path)


def test_sigterm_saves_at_the_next_record_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    add_scalar = SummaryWriter.add_scalar

    def signalled(writer, name, value, step):
        if step == 2 and name == "grad_norm":
            os.kill(os.getpid(), signal.SIGTERM)
        add_scalar(writer, name, value, step)

    whole = train(tmp_path / "whole", checkpoint_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", signalled)
        folder = train(tmp_path / "run", checkpoint_every=4)
    said = capsys.readouterr().out
    assert re.search(f"stopped after iteration 2, which is saved; .* --run-dir {folder}", said)
    assert records(folder)[-1]["iteration"] == 2 and (folder / "checkpoints" / "step_000002").exists()
    same_end(whole, train(folder, checkpoint_every=4))


@pytest.mark.parametrize("learning_rate", [1e38, 1e39])
def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(learning_rate, tmp_path):
    """The update that breaks the weights may be the last before a checkpoint; its own losses were sound."""
    with pytest.raises(SystemExit, match="FloatingPointError"):
        train(tmp_path / "run", learning_rate=learning_rate, checkpoint_every=1)
    told, path = receipt_of(tmp_path / "run")
    assert told["args"]["learning_rate"] == learning_rate
    check_evidence(path)
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        weights = end_of(tmp_path / "run", folder.name)["agent"]
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_an_error_in_an_environment_keeps_its_traceback_and_leaves_a_receipt(tmp_path, monkeypatch):
    """Nor does it matter that the environment cannot draw itself."""
    def undrawn(*_):
        raise BadInput("render_mode=rgb_array: pygame is not installed")

    monkeypatch.setattr("envs.pixels.gymnasium.GymnasiumVec.frames", undrawn)
    monkeypatch.setattr(Held, "breaks_at", 5)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", env_id="HeldFast-v0")
    told, path = receipt_of(tmp_path / "run")
    assert "in the engine" in "".join(told["traceback"]) and not list(path.glob("*.png"))


BAD = {
    "environment": (["--env-id", "NoSuch-v0"], "NoSuch"),
    "continuous": (["--env-id", "Pendulum-v1"], "discrete actions"),
    "option": (["--env-kwargs", "max_step=3"], "max_step'.*did you mean 'max_steps'"),
    "option-type": (["--env-kwargs", "max_steps=three"], "max_steps.*int.*three"),
    "option-value": (["--env-kwargs", "tau=2"], "tau.*2"),
    "option-form": (["--env-kwargs", "max_steps"], "max_steps.*key=value"),
    "goal": (["--env-kwargs", "goal_dir={d}/nothing"], "nothing.*is missing"),
    "rom": (["--env-id", "pyboy"], "rom"),
    "flag": (["--learning-speed", "1"], "--learning-speed"),
    "flag-choice": (["--network", "resnet"], "resnet.*--network"),
    "flag-range": (["--num-envs", "0"], "num_envs.*greater than or equal to 1"),
    "multiple": (["--iterations", "3", "--update-every", "2"], "--iterations 3: expected a multiple"),
    "one-step": (["--num-envs", "1", "--num-steps", "1"], "--normalize-advantages"),
    "many": (["--num-envs", "20000"], "20000.*16384"),
    "run-dir": (["--run-dir", "{d}/file/run"], r"--run-dir \S*file/run"),
    "log": (["--run-dir", "{d}/other"], r"other.*meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message_that_names_it(case, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train_log.jsonl").write_text('{"note": "of something else"}\n')
    flags, expected = BAD[case]
    flags = [flag.replace("{d}", str(tmp_path)) for flag in flags]
    if "--run-dir" not in flags:
        flags += ["--run-dir", tmp_path / "run"]
    code = command_line("a2c_vecenv.py", *flags)
    output = capsys.readouterr()
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.err + output.out).split())  # tyro draws a box
    assert code not in (0, None) and re.search(expected, text), text
    assert "Traceback" not in text
    lines = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 or code == 2, output.err
    assert not list(tmp_path.glob("run/*")) and not list(tmp_path.rglob("events*"))  # nothing began


@pytest.mark.parametrize("flags", [
    dict(learning_rate=math.nan), dict(learning_rate=-1.0), dict(max_grad_norm=0.0), dict(gamma=1.5),
    dict(entropy_coef=math.inf), dict(keep_checkpoints=-1), dict(eval_every=-100), dict(seed=2**70)], ids=str)
def test_numbers_that_cannot_be_are_refused_before_anything_begins(flags):
    (name,) = flags
    with pytest.raises(ValueError, match=name):
        a2c.Args(**flags)


# Slow: processes of their own


@pytest.mark.slow
@pytest.mark.parametrize("env", ["pixel-goal", "CartPole-v1"])
def test_kills_at_any_moment_change_nothing(env, tmp_path):
    kills, rng = int(os.environ.get("KILLS", "2")), random.Random(os.environ.get("KILLS_SEED", "1"))
    length = 400 * kills
    flags = ["--env-id", env, "--iterations", length, "--num-envs", 8, "--log-every", 10, "--eval-every", 200,
             "--checkpoint-every", 10, "--eval-episodes", 4, "--eval-envs", 2, "--hidden-size", 16]
    whole = process("a2c_vecenv.py", *flags, "--run-dir", tmp_path / "whole")
    output, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, output
    folder, killed, torn = tmp_path / "killed", 0, 0
    for number in range(kills):
        run = process("a2c_vecenv.py", *flags, "--run-dir", folder)
        killed += kill_at(("writing", "log", "start")[number % 3], run, folder, rng)
        torn += any((folder / "checkpoints").glob(".step_*.writing"))
    run = process("a2c_vecenv.py", *flags, "--run-dir", folder)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert killed == kills and torn >= 1, (killed, torn)
    same_end(tmp_path / "whole", folder, f"step_{length:06d}")
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and 1 <= verdict["resumes"] <= kills, verdict


@pytest.mark.slow
def test_ctrl_c_at_a_real_process(tmp_path):
    run = process("a2c_vecenv.py", "--iterations", 100_000, "--num-envs", 8, "--num-steps", 8,
                  "--eval-every", 0, "--run-dir", tmp_path / "run",
                  "--log-every", 20, "--checkpoint-every", 20, "--hidden-size", 16)
    log = tmp_path / "run" / "train_log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and b'"iteration"' in log.read_bytes()):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1 and "Traceback" not in output, output
    assert re.search(r"^error: KeyboardInterrupt.*receipt", output, re.M)
    check_evidence(receipt_of(tmp_path / "run")[1], num_steps=8)


@pytest.mark.slow
def test_the_self_test_passes_and_says_so_as_json(tmp_path):
    run = process("a2c_vecenv.py", "--self-test", env=dict(TMPDIR=str(tmp_path)))
    output, _ = run.communicate(timeout=400)
    verdict = json.loads(output.splitlines()[-1])
    assert run.returncode == 0 and verdict["ok"] is True and verdict["eval/success_rate"] >= 0.95, output
    left = [path.name for path in tmp_path.iterdir() if "torchinductor" not in path.name]  # torch's cache
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(env_id="CartPole-v1"), dict(recompute=True, chunk=4),
                                   dict(dtype="bfloat16")], ids=str)
def test_compiled_runs_give_the_same_numbers(flags, tmp_path):
    plain, compiled = (train(tmp_path / str(on), compile=on, iterations=12, checkpoint_every=12,
                             eval_every=12, num_steps=6, **flags) for on in (False, True))
    torch.compiler.reset()
    assert validate(compiled, strict=True)["ok"]
    loose = 0.1 if flags.get("dtype") else 1e-3
    for one, other in zip(timeless(plain), timeless(compiled), strict=True):
        for name in ("value_mean", "value_loss", "grad_norm", "entropy_mean", "reward_mean"):
            assert other[name] == pytest.approx(one[name], rel=loose, abs=loose), (one["iteration"], name)
    weights = [end_of(folder, "step_000012")["agent"] for folder in (plain, compiled)]
    assert list(weights[0]) == list(weights[1])  # a compiled run can be continued without --compile
