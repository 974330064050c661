"""a2c_vecenv.py from the command line to the run folder, a few iterations at a time, on the CPU.

Most runs happen in this process: importing torch takes longer than they do. Slow ones are killed for real:

    KILLS=10 pytest -m slow tests/test_a2c_runs.py
"""

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
import pytest
import torch
from PIL import Image

gymnasium = pytest.importorskip("gymnasium")

import a2c_vecenv as a2c  # noqa: E402
from envs import BadInput  # noqa: E402
from tests.run_folders import (  # noqa: E402
    command_line,
    copy_run,
    kill_at,
    log_lines,
    process,
    records,
    same_tree,
    slow_but,
    timeless,
)
from tools import plot_train_log  # noqa: E402
from tools.validate_train_log import COMMON, validate  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(iterations=4, num_envs=6, num_steps=4, hidden_size=16, log_every=1, checkpoint_every=2,
             eval_every=2, eval_episodes=3, eval_envs=2, device="cpu")
GOAL = ("max_steps=9",)  # so that a few iterations see episodes end
LAST = "step_000004.pt"
FAST = dict(env_id="CartPole-v1")  # where the environment does not matter


def train(folder, **flags):
    """A run in this process, from its beginning to its end. -> its folder"""
    defaults = SMALL if "env_id" in flags else SMALL | dict(env_kwargs=GOAL)
    a2c.main(a2c.Args(**defaults | dict(run_dir=str(folder)) | flags))
    return folder


def end_of(folder, name=LAST):
    """What a checkpoint holds, the clock and the run's name aside."""
    state = torch.load(folder / "checkpoints" / name, weights_only=True)
    return {key: value for key, value in state.items() if key not in ("elapsed", "log_bytes", "meta")}


def same_end(one, other, name=LAST):
    """Bit for bit: weights, optimiser, environments, counters and log."""
    states = [end_of(folder, name) for folder in (one, other)]
    assert {"agent", "optimizer", "env", "iteration"} <= set(states[0])
    same_tree(*states)
    assert timeless(one) == timeless(other)


class InterruptAt:
    """Ctrl-C, or another error, as the rollout of the given iteration ends."""

    def __init__(self, count, error=KeyboardInterrupt):
        self.count, self.error, self.patch = count, error, pytest.MonkeyPatch()

    def __enter__(self):
        rollout, calls = a2c.rollout, []

        def interrupted(*arguments):
            calls.append(1)
            result = rollout(*arguments)
            if len(calls) == self.count:
                raise self.error
            return result

        self.patch.setattr(a2c, "rollout", interrupted)

    def __exit__(self, *error):
        self.patch.undo()


# The log


CASES = {
    "default": {},
    "cartpole": dict(env_id="CartPole-v1"),
    "nature": dict(network="nature", dtype="bfloat16"),
    "patch": dict(network="patch", recompute=True, chunk=5),
    "several": dict(env_kwargs=(*GOAL, "pack=2bpp", "stack_k=2", "goal_in_obs=true", "num_goals=4")),
    "td0": dict(num_steps=1, update_every=2, log_every=2, iterations=8, checkpoint_every=4, eval_every=4),
    "old": dict(bootstrap_truncated=False, normalize_advantages=False, anneal=False, gae_lambda=1.0),
    "one-step": dict(env_id="CartPole-v1", num_steps=1, num_envs=1, update_every=2, log_every=2,
                     normalize_advantages=False),
}


@pytest.mark.parametrize("case", slow_but(("default", "patch", "td0", "one-step"), CASES))
def test_the_log_passes_the_validator(case, tmp_path):
    flags = SMALL | CASES[case]
    folder = train(tmp_path / "run", **CASES[case])
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    counts = [verdict[name] for name in ("records", "resumes", "errors")]
    assert counts == [flags["iterations"] // flags["log_every"], 0, 0]
    last = records(folder)[-1]
    assert last["iteration"] == flags["iterations"] == last["opt_steps"] * flags.get("update_every", 1)
    assert last["env_steps"] == flags["iterations"] * flags["num_envs"] * flags["num_steps"]
    assert sum(last["action_hist"]) == flags["log_every"] * flags["num_envs"] * flags["num_steps"]
    evaluated = [record["iteration"] for record in records(folder) if "eval/return" in record]
    assert evaluated == [n for n in range(1, flags["iterations"] + 1) if n % flags["eval_every"] == 0]
    if "env_id" in flags:
        assert {record["success_rate"] for record in records(folder)} == {0}
    first, end = (end_of(folder, path.name)["agent"]
                  for path in sorted((folder / "checkpoints").glob("step_*.pt"))[-2:])
    assert all(tensor.isfinite().all() for tensor in end.values())
    assert any(not torch.equal(first[name], end[name]) for name in end)


def test_every_metric_is_documented_and_every_documented_one_is_logged(tmp_path):
    folder = train(tmp_path / "run")
    logged = {key for record in records(folder) for key in record}
    assert logged <= set(a2c.METRICS) | {"run_id", "trace_id"} and set(COMMON) <= logged
    assert set(a2c.METRICS) - logged <= {"system/gpu_memory"}


def test_the_meta_line_says_what_was_run(tmp_path):
    folder = train(tmp_path / "run", seed=5, env_kwargs=(*GOAL, "stack_k=2"))
    meta = log_lines(folder)[0]["meta"]
    assert meta["args"] == vars(a2c.Args(**SMALL | dict(
        run_dir=str(folder), seed=5))) | dict(env_kwargs=[*GOAL, "stack_k=2"])
    assert (meta["num_envs"], meta["num_actions"], meta["stack_k"], meta["seed"]) == (6, 8, 2, 5)
    assert re.fullmatch(r"\d{8}_\d{6}__a2c__pixel-goal__s5", meta["run_id"])
    assert re.fullmatch("[0-9a-f]{64}", meta["goal_sha256"]) and meta["action_codec_id"] == "gb8"
    other = train(tmp_path / "other", seed=6)
    assert log_lines(other)[0]["meta"]["config_hash"] != meta["config_hash"]


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(tmp_path / "run")
    board = EventAccumulator(str(folder)).Reload()
    for name in ("reward_mean", "entropy_mean", "dist_p50", "eval/return"):
        found = [(event.step, event.value) for event in board.Scalars(name)]
        expected = [(r["iteration"], pytest.approx(r[name], rel=1e-6)) for r in records(folder) if name in r]
        assert found == expected and found


@pytest.mark.slow
def test_logs_of_several_seeds_are_drawn(tmp_path, capsys):
    folders = [train(tmp_path / f"{seed}", seed=seed, eval_every=0) for seed in (1, 2, 3)]
    capsys.readouterr()
    status = plot_train_log.main(["--log", *map(str, folders), "--out", str(tmp_path / "a.png"),
                                  "--csv", str(tmp_path / "a.csv")])
    said, warned = capsys.readouterr()
    report = json.loads(said)
    assert (status, warned, report["runs"]) == (0, "", [3]) and len(report["panels"]) >= 4
    assert np.ptp(np.asarray(Image.open(tmp_path / "a.png").convert("L"))) > 200
    rewards = [records(folder)[0]["reward_mean"] for folder in folders]
    assert len(set(rewards)) == 3
    assert f"{sum(rewards) / 3:.6g}"[:6] in (tmp_path / "a.csv").read_text()


# Continuing a run


RESUMED = {
    "default": {}, "cartpole": dict(env_id="CartPole-v1", num_steps=9),
    "several": dict(env_kwargs=(*GOAL, "pack=2bpp", "stack_k=2", "goal_in_obs=true", "num_goals=4")),
    "td0": dict(num_steps=1, update_every=2, log_every=2, eval_every=0),
    "bfloat16": dict(dtype="bfloat16", recompute=True, network="patch"),
}


@pytest.mark.parametrize("case", slow_but(("default", "several"), RESUMED))
def test_two_iterations_and_two_more_equal_four_bit_for_bit(case, tmp_path):
    flags = RESUMED[case]
    whole = train(tmp_path / "whole", **flags)
    torch.manual_seed(1234)  # whatever this process did before must not matter
    with InterruptAt(3), pytest.raises(SystemExit, match="KeyboardInterrupt.*receipt"):
        train(tmp_path / "halves", **flags)
    torch.manual_seed(4321)
    halves = train(tmp_path / "halves", **flags)
    same_end(whole, halves)
    verdict = validate(halves, strict=True)
    assert verdict["ok"], verdict
    assert (verdict["resumes"], verdict["errors"]) == (1, 1)
    (mark,) = (line["resume"] for line in log_lines(halves) if "resume" in line)
    assert (mark["iteration"], mark["checkpoint"]) == (2, "step_000002.pt")
    assert json.loads((halves / "checkpoints" / "state.json").read_text()) == {"last": LAST}
    first, last = (end_of(halves, name) for name in ("step_000002.pt", LAST))
    for part in ("agent", "env"):  # there was something to continue
        with pytest.raises(AssertionError):
            same_tree(first[part], last[part])


def test_what_a_kill_left_behind_the_checkpoint_is_cut_off(tmp_path):
    """A record past the checkpoint, and half a line: both are written anew."""
    whole = train(tmp_path / "whole")
    with InterruptAt(4), pytest.raises(SystemExit):
        train(tmp_path / "run")
    folder = tmp_path / "run"
    assert records(folder)[-1]["iteration"] == 3
    log = folder / "train_log.jsonl"
    log.write_bytes(log.read_bytes() + b'{"run_id": "2026')
    (folder / "checkpoints" / ".step_000004.pt.writing").write_bytes(b"half of it")
    same_end(whole, train(folder))
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and (verdict["records"], verdict["errors"]) == (4, 1), verdict


def test_a_run_stopped_before_its_first_checkpoint_begins_again(tmp_path):
    whole = train(tmp_path / "whole", **FAST)
    with InterruptAt(2), pytest.raises(SystemExit):
        train(tmp_path / "run", **FAST)
    same_end(whole, train(tmp_path / "run", **FAST))
    assert validate(tmp_path / "run", strict=True)["ok"]


def test_the_seed_decides_everything_random(tmp_path):
    one, other, third = (train(tmp_path / f"{n}", seed=seed, **FAST) for n, seed in enumerate((1, 2, 1)))
    same_end(one, third)
    for name in ("grad_norm", "value_mean", "action_hist"):
        assert [r[name] for r in records(one)] != [r[name] for r in records(other)]
    assert not torch.equal(*(end_of(folder)["agent"]["policy.weight"] for folder in (one, other)))


def test_a_finished_run_stays_as_it_is(tmp_path):
    folder = train(tmp_path / "run", **FAST)
    before, state = timeless(folder), end_of(folder)
    train(folder, **FAST)
    assert timeless(folder) == before and validate(folder, strict=True)["ok"]
    same_tree(end_of(folder), state)


def test_old_checkpoints_are_dropped_and_zero_keeps_all(tmp_path):
    for keep, left in ((1, [4]), (3, [2, 3, 4]), (0, [1, 2, 3, 4])):
        folder = train(tmp_path / f"{keep}", checkpoint_every=1, keep_checkpoints=keep, **FAST)
        found = sorted(path.name for path in (folder / "checkpoints").glob("*step_*"))
        assert found == [f"step_{number:06d}.pt" for number in left]


def test_what_would_change_the_result_is_refused_by_name(tmp_path):
    folder = train(tmp_path / "run")
    log = (folder / "train_log.jsonl").read_bytes()
    for flags, named in ((dict(seed=2), "--seed 2"), (dict(learning_rate=0.5), "--learning-rate 0.5"),
                         (dict(env_kwargs=("tau=0.06",)), "--env-kwargs"), (dict(gamma=0.5), "--gamma 0.5"),
                         (dict(num_envs=7), "--num-envs 7"), (dict(anneal=False), "--anneal False"),
                         (dict(network="patch"), "--network patch"), (dict(iterations=8), "--iterations 8"),
                         (dict(env_id="CartPole-v1", env_kwargs=()), "--env-id CartPole-v1")):
        with pytest.raises(BadInput, match=named):
            train(folder, **flags)
    assert (folder / "train_log.jsonl").read_bytes() == log
    train(folder, keep_checkpoints=5)  # this one leaves the numbers as they are


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


# Damage


def flip_bytes(path):
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 4, 3 * len(data) // 4, 5):
        data[at] ^= 255
    path.write_bytes(data)


DAMAGE = {"cut": lambda path: os.truncate(path, path.stat().st_size // 2),
          "empty": lambda path: os.truncate(path, 0), "text": lambda path: path.write_text("hello"),
          "flipped": flip_bytes}


@pytest.fixture(scope="module")
def four_checkpoints(tmp_path_factory):
    """A finished run that kept the checkpoints of all its iterations."""
    return train(tmp_path_factory.mktemp("finished") / "run", checkpoint_every=1, keep_checkpoints=0, **FAST)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
        damage, tmp_path, four_checkpoints, capsys):
    folder = copy_run(four_checkpoints, tmp_path / "run")
    DAMAGE[damage](folder / "checkpoints" / LAST)
    capsys.readouterr()
    train(folder, checkpoint_every=1, keep_checkpoints=0, **FAST)
    said = capsys.readouterr().err
    assert LAST in said and "damaged" in said and "Traceback" not in said
    same_end(four_checkpoints, folder)
    marks = [line["resume"]["checkpoint"] for line in log_lines(folder) if "resume" in line]
    assert marks == ["step_000003.pt"] and validate(folder)["ok"]


def test_when_every_checkpoint_is_damaged_one_line_says_so(tmp_path, four_checkpoints):
    folder = copy_run(four_checkpoints, tmp_path / "run")
    for path in (folder / "checkpoints").glob("step_*.pt"):
        os.truncate(path, 100)
    log = (folder / "train_log.jsonl").read_bytes()
    with pytest.raises(BadInput) as told:
        train(folder, checkpoint_every=1, keep_checkpoints=0, **FAST)
    assert str(folder) in str(told.value) and "damaged" in str(told.value) and "\n" not in str(told.value)
    assert (folder / "train_log.jsonl").read_bytes() == log


def test_a_damaged_newest_checkpoint_never_pushes_out_a_sound_one(tmp_path, four_checkpoints):
    """After falling back, new checkpoints are older by name than the damaged one."""
    folder = copy_run(four_checkpoints, tmp_path / "run")
    for number in (2, 3, 4):
        os.truncate(folder / "checkpoints" / f"step_{number:06d}.pt", 100)
    flags = FAST | dict(checkpoint_every=1, keep_checkpoints=1)
    with InterruptAt(2), pytest.raises(SystemExit):
        train(folder, **flags)
    same_end(four_checkpoints, train(folder, **flags))
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [1, 2]


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_the_run_can_go_on(tmp_path):
    """From the third iteration on, no file may grow to the size of the weights; the log still may grow."""
    whole, folder = train(tmp_path / "whole"), tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    rollout, calls = a2c.rollout, []

    def filling(*arguments):
        calls.append(1)
        if len(calls) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        return rollout(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2c, "rollout", filling)
        try:
            with pytest.raises(SystemExit, match=rf"{LAST}.* could not be written.*earlier checkpoints stay"):
                train(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["state.json", "step_000002.pt"]
    assert validate(folder)["errors"] == 1 and validate(folder)["ok"]
    same_end(whole, train(folder))


# Failing


def receipt_of(folder):
    """The one error of a log and its receipt. -> receipt.json, its folder"""
    (line,) = (line for line in log_lines(folder) if "error" in line)
    assert line["trace_id"].startswith(log_lines(folder)[0]["meta"]["run_id"] + ":")
    path = folder / line["error"]["receipt"]
    told = json.loads((path / "receipt.json").read_text())
    assert told["type"] == line["error"]["type"]
    assert {"versions", "git_sha", "seed", "args", "traceback", "iteration", "opt_steps"} <= set(told)
    return told, path


def check_evidence(told, path, num_steps=4):
    """The last frames of four environments, their last actions and distances."""
    pictures = [Image.open(file) for file in sorted(path.glob("*.png"))]
    assert [picture.size for picture in pictures] == [(80, 72)] * 4
    assert all(set(np.unique(picture)) <= {0, 85, 170, 255} and np.ptp(picture) for picture in pictures)
    actions, dist = np.array(told["last_actions"]), np.array(told["last_dist"])
    assert actions.shape == dist.shape == (num_steps, 4)
    assert actions.min() >= 0 and actions.max() < 8 and 0 < dist.max() <= 1


def test_weights_that_are_not_finite_leave_a_receipt_and_no_broken_checkpoint(tmp_path, capsys):
    """A learning rate that overflows float32."""
    with pytest.raises(SystemExit, match="FloatingPointError"):
        train(tmp_path / "run", learning_rate=1e38)
    verdict = validate(tmp_path / "run", strict=True)
    assert verdict["errors"] == 1 and verdict["ok"] or verdict["records"] == 0, verdict
    told, path = receipt_of(tmp_path / "run")
    check_evidence(told, path)
    assert told["type"] == "FloatingPointError" and told["args"]["learning_rate"] == 1e38


def test_no_checkpoint_holds_weights_that_are_not_finite(tmp_path):
    """The update that breaks the weights is the last before a checkpoint; its own losses were sound."""
    with pytest.raises(SystemExit, match="FloatingPointError"):
        train(tmp_path / "run", learning_rate=1e39, checkpoint_every=1)
    for path in (tmp_path / "run" / "checkpoints").glob("step_*.pt"):
        weights = end_of(tmp_path / "run", path.name)["agent"]
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_ctrl_c_leaves_a_receipt_an_error_line_and_a_run_to_continue(tmp_path, capsys):
    with InterruptAt(3), pytest.raises(SystemExit) as end:
        train(tmp_path / "run")
    assert isinstance(end.value.code, str) and "KeyboardInterrupt" in end.value.code
    told, path = receipt_of(tmp_path / "run")
    check_evidence(told, path)
    assert told["iteration"] == 2 and told["type"] == "KeyboardInterrupt"
    assert validate(tmp_path / "run", strict=True)["ok"]


def test_an_error_in_an_environment_keeps_its_traceback_and_leaves_a_receipt(tmp_path):
    with InterruptAt(3, ZeroDivisionError("in the engine")), pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", env_id="CartPole-v1")
    told, path = receipt_of(tmp_path / "run")
    assert "in the engine" in "".join(told["traceback"]) and not list(path.glob("*.png"))
    assert validate(tmp_path / "run", strict=True)["ok"]


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
    "flag-type": (["--num-envs", "many"], "--num-envs.*many"),
    "flag-choice": (["--network", "resnet"], "resnet.*--network"),
    "flag-range": (["--num-envs", "0"], "--num-envs 0: expected 1 or more"),
    "gamma": (["--gamma", "1.5"], "--gamma 1.5: expected 0 to 1"),
    "multiple": (["--iterations", "30", "--log-every", "20"], "--iterations 30: expected a multiple"),
    "one-step": (["--num-envs", "1", "--num-steps", "1"], "--normalize-advantages"),
    "many": (["--num-envs", "20000"], "20000.*16384"),
    "device": (["--device", "gpu7"], "--device gpu7"),
    "run-dir": (["--run-dir", "{d}/file/run"], r"--run-dir \S*file/run"),
    "log": (["--run-dir", "{d}/other"], r"other.*meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_that_names_it(case, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train_log.jsonl").write_text('{"note": "of something else"}\n')
    flags, expected = BAD[case]
    flags = [flag.replace("{d}", str(tmp_path)) for flag in flags]
    if "--run-dir" not in flags:
        flags += ["--run-dir", tmp_path / "run"]
    code = command_line("a2c_vecenv.py", *flags)
    output = capsys.readouterr()
    assert code not in (0, None)
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.err + output.out).split())  # tyro draws a box
    assert re.search(expected, text), text
    assert "Traceback" not in text
    lines = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 or "full helptext" in text, output.err
    assert not list(tmp_path.glob("run/*")) and not list(tmp_path.rglob("events*"))  # nothing began


@pytest.mark.parametrize("flags", [
    dict(learning_rate=math.nan), dict(learning_rate=-1.0), dict(max_grad_norm=math.nan),
    dict(max_grad_norm=0.0), dict(entropy_coef=math.inf), dict(value_coef=math.nan),
    dict(keep_checkpoints=-1), dict(eval_every=-100), dict(seed=-1), dict(seed=2**70)], ids=str)
def test_numbers_that_cannot_be_are_refused_before_anything_begins(flags):
    (name,) = flags
    with pytest.raises(BadInput, match=f"--{name.replace('_', '-')} "):
        a2c.Args(**flags)


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("", experiment="mine", iterations=1, checkpoint_every=1, eval_every=1, **FAST)
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    assert folder.name == records(folder)[0]["run_id"]


@pytest.mark.parametrize("missing", ["repository", "git"])
def test_a_copy_without_git_runs_too(missing, tmp_path, monkeypatch):
    name, value = {"repository": ("GIT_DIR", tmp_path / "none"), "git": ("PATH", tmp_path)}[missing]
    monkeypatch.setenv(name, str(value))
    folder = train(tmp_path / "run", **FAST)
    train(folder, **FAST)
    assert validate(folder)["ok"] and not log_lines(folder)[0]["meta"]["git_sha"]


class Held(gymnasium.Env):
    """State that cannot be written down: a resumed run begins new episodes."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.engine, self.time = object(), 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self.time += 1
        return np.array([self.time, action], np.float32), 1.0, self.time == 7, False, {}


gymnasium.register("HeldFast-v0", Held, disable_env_checker=True)


def test_an_environment_that_cannot_be_saved_begins_anew_on_resume(tmp_path):
    with InterruptAt(3), pytest.raises(SystemExit):
        train(tmp_path / "run", env_id="HeldFast-v0")
    folder = train(tmp_path / "run", env_id="HeldFast-v0")
    assert end_of(folder)["env"] is None and validate(folder, strict=True)["ok"]
    assert records(folder)[-1]["episode_length"] <= 7


@pytest.mark.parametrize("content", ["[1]\n", '{"meta": {"args": 3}}\n', '{"meta": 3}\n'])
def test_a_log_of_something_else_is_bad_input(content, tmp_path):
    (tmp_path / "train_log.jsonl").write_text(content)
    with pytest.raises(BadInput, match="meta"):
        train(tmp_path)


@pytest.mark.parametrize("state", [{"agent": 1}, [1, 2], {"iteration": 9}], ids=str)
def test_a_file_that_is_no_checkpoint_counts_as_damaged(state, tmp_path, four_checkpoints):
    folder = copy_run(four_checkpoints, tmp_path / "run")
    torch.save(state, folder / "checkpoints" / LAST)
    same_end(four_checkpoints, train(folder, checkpoint_every=1, keep_checkpoints=0, **FAST))


def test_a_checkpoint_without_its_log_makes_no_broken_log(tmp_path, four_checkpoints):
    """Someone took the log away: refuse, or begin one with its meta line."""
    folder = copy_run(four_checkpoints, tmp_path / "run")
    os.truncate(folder / "checkpoints" / LAST, 100)
    (folder / "train_log.jsonl").unlink()
    try:
        train(folder, checkpoint_every=1, keep_checkpoints=0, **FAST)
    except BadInput as error:
        assert "train_log.jsonl" in str(error)
    else:
        assert "meta" in log_lines(folder)[0]


def test_a_picture_that_cannot_be_drawn_does_not_hide_the_error(tmp_path):
    flags = dict(env_id="HeldFast-v0")
    with InterruptAt(3), pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="Keyboard"):
        def fail(*_):
            raise BadInput("render_mode=rgb_array: pygame is not installed")

        patch.setattr("envs.pixels.gymnasium.GymnasiumVec.frames", fail)
        train(tmp_path / "run", **flags)
    assert receipt_of(tmp_path / "run")[0]["type"] == "KeyboardInterrupt"


def test_checkpoints_past_a_million_iterations_are_in_order(tmp_path, four_checkpoints):
    """Streaming TD(0) gets that far: as text, step_1000000 comes before step_999999."""
    folder = copy_run(four_checkpoints, tmp_path / "run") / "checkpoints"
    for old, new in ((2, 999_999), (3, 1_000_000)):
        (folder / f"step_{old:06d}.pt").rename(folder / f"step_{new:06d}.pt")
    (folder / LAST).unlink()
    train(folder.parent, checkpoint_every=1, keep_checkpoints=0, **FAST)
    marks = [line["resume"]["iteration"] for line in log_lines(folder.parent) if "resume" in line]
    assert marks == [3]


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
    same_end(tmp_path / "whole", folder, f"step_{length:06d}.pt")
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
    check_evidence(*receipt_of(tmp_path / "run"), num_steps=8)
    assert validate(tmp_path / "run", strict=True)["ok"]


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
    weights = [end_of(folder, "step_000012.pt")["agent"] for folder in (plain, compiled)]
    assert list(weights[0]) == list(weights[1])  # a compiled run can be continued without --compile
