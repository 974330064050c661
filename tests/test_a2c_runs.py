"""a2c_vecenv.py from the command line to the run folder, a few iterations at a time, on the CPU."""

import json
import re

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

import a2c_vecenv as a2c
from envs import BadInput
from envs.pixels import row_seeds
from envs.pixels.pixel_goal import PixelGoal
from tests.run_folders import (
    SMALL,
    killed_after,
    log_lines,
    process,
    receipt_of,
    records,
    state_of,
    timeless,
    train,
)
from tools.validate_train_log import validate


def test_the_meta_line_says_what_was_run(tmp_path):
    flags = dict(seed=5, env_kwargs=("max_steps=9", "stack_k=2"), iterations=2)
    folder = train(a2c, tmp_path / "run", **flags)
    meta = log_lines(folder)[0]["meta"]
    args = vars(a2c.Args(**SMALL["a2c_vecenv"] | flags | dict(run_dir=str(folder))))
    assert meta["args"] == args | dict(env_kwargs=["max_steps=9", "stack_k=2"])
    assert (meta["num_envs"], meta["num_actions"], meta["stack_k"], meta["seed"]) == (6, 8, 2, 5)
    assert re.fullmatch(r"\d{8}_\d{6}__a2c__pixel-goal__s5", meta["run_id"])
    assert json.loads((folder / "checkpoints" / "step_000002" / "meta.json").read_text()) == meta


@pytest.mark.slow
def test_another_goal_under_the_same_name_is_refused(tmp_path):
    from tools import make_goal

    goal = tmp_path / "goal"
    words = ["--out", str(goal), "--force", "--seed", "7", "--actions"]
    assert make_goal.main([*words, "B UP*3 RIGHT*2 DOWN"]) == 0
    flags = dict(env_kwargs=(f"goal_dir={goal}",))
    folder = train(a2c, tmp_path / "run", **flags)
    assert validate(folder)["ok"] and log_lines(folder)[0]["meta"]["goal_dir"] == str(goal)
    train(a2c, folder, **flags)
    assert make_goal.main([*words, "B UP*2 RIGHT*2 DOWN"]) == 0
    with pytest.raises(BadInput, match="goal_sha256"):
        train(a2c, folder, **flags)


class Held(gymnasium.Env):
    """State that cannot be written down: a resumed run begins new episodes."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    breaks_at, seeds = None, []

    def reset(self, *, seed=None, options=None):
        self.seeds += [] if seed is None else [seed]  # no autoreset
        self.engine, self.time = object(), 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        if self.time == Held.breaks_at:
            raise ZeroDivisionError("in the engine")
        self.time += 1
        return np.array([self.time, action], np.float32), 1.0, self.time == 7, False, {}


gymnasium.register("HeldFast-v0", Held, disable_env_checker=True)


def test_an_environment_that_cannot_be_saved_begins_anew_on_resume(tmp_path):
    whole = train(a2c, tmp_path / "whole", env_id="HeldFast-v0", keep_checkpoints=0)
    folder = train(a2c, killed_after(whole, tmp_path / "run", 2), env_id="HeldFast-v0")
    assert state_of(folder / "checkpoints" / "step_000004")["env"] is None and validate(folder)["ok"]
    held_out = row_seeds(1, range(SMALL["a2c_vecenv"]["eval_envs"]), "eval")
    trained = [seed for seed in Held.seeds if seed not in held_out]
    assert records(folder)[-1]["episode_length"] <= 7 and len({*trained}) == len(trained) == 12
    assert {*held_out} < {*Held.seeds}


def test_what_is_random_differs_between_runs_and_between_training_and_evaluation(tmp_path, monkeypatch):
    """Of weights, of each iteration's actions, of an evaluation's (twice: sampled and greedy), of worlds."""
    seeds, worlds = [], []
    monkeypatch.setattr(torch, "manual_seed", lambda seed, seeded=torch.manual_seed: (
        seeds.append(seed), seeded(seed))[1])
    monkeypatch.setattr(PixelGoal, "reset", lambda env, seed, begin=PixelGoal.reset: (
        worlds.append(tuple(env.row_seeds(seed))), begin(env, seed))[1])
    for seed in (0, 1):
        train(a2c, tmp_path / str(seed), seed=seed, eval_every=0)
    assert len(seeds) == 2 * (1 + 4 + 2) and len({*seeds}) == 2 * (1 + 4 + 1)
    assert len(worlds) == 2 * 3 and len({*worlds}) == 2 * 2
    flat = [seed for rows in {*worlds} for seed in rows]
    assert len({*flat}) == len(flat) == 2 * (6 + SMALL["a2c_vecenv"]["eval_envs"])


@pytest.mark.parametrize("flags, says", [
    ({}, "Observations: 0..3 to 0..1"),
    (dict(env_id="HeldFast-v0"), "Observations: 2 in -9..9 to -1..1"),
])
def test_a_run_says_how_observations_are_scaled(flags, says, tmp_path, capsys):
    train(a2c, tmp_path / "run", iterations=1, **flags)
    assert says in capsys.readouterr().out.splitlines()


# Failing


def test_ctrl_c_leaves_a_receipt_with_frames(tmp_path, monkeypatch):
    """The last frames of four environments, their last actions and distances."""
    loss, calls = a2c.a2c_loss, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss(*given)

    monkeypatch.setattr(a2c, "a2c_loss", interrupted)
    with pytest.raises(SystemExit, match="KeyboardInterrupt.*receipt"):
        train(a2c, tmp_path / "run")
    error, meta, _, path = receipt_of(tmp_path / "run")
    assert meta["iteration"] == 2 and error["type"] == "KeyboardInterrupt"
    assert validate(tmp_path / "run")["ok"]

    pictures = [Image.open(file) for file in sorted(path.glob("*.png"))]
    assert [picture.size for picture in pictures] == [(80, 72)] * 4
    assert all(set(np.unique(picture)) <= {0, 85, 170, 255} and np.ptp(picture) for picture in pictures)
    told = json.loads((path / "batch.json").read_text())
    actions, dist, rewards = (np.array(told[name]) for name in ("actions", "dist", "rewards"))
    assert actions.shape == dist.shape == rewards.shape == (4, 4)
    assert actions.min() >= 0 and actions.max() < 8 and 0 < dist.max() <= 1


def test_an_error_in_an_environment_keeps_its_traceback_and_leaves_a_receipt(tmp_path, monkeypatch):
    """Nor does it matter that the environment cannot draw itself."""
    def undrawn(*_):
        raise BadInput("render_mode=rgb_array: pygame is not installed")

    monkeypatch.setattr("envs.pixels.gymnasium.GymnasiumVec.frames", undrawn)
    monkeypatch.setattr(Held, "breaks_at", 5)
    with pytest.raises(ZeroDivisionError):
        train(a2c, tmp_path / "run", env_id="HeldFast-v0")
    *_, frames, path = receipt_of(tmp_path / "run")
    assert "in the engine" in frames and not list(path.glob("*.png"))


# Slow: processes of their own


@pytest.mark.slow
@pytest.mark.release
def test_the_self_test_passes_and_says_so_as_json(tmp_path):
    run = process("a2c_vecenv.py", "--self-test", env=dict(TMPDIR=str(tmp_path)))
    output, _ = run.communicate(timeout=400)
    verdict = json.loads(output.splitlines()[-1])
    assert run.returncode == 0 and verdict["ok"] is True and verdict["eval/success_rate"] >= 0.95, output
    assert not [path for path in tmp_path.iterdir() if "torchinductor" not in path.name]  # torch's cache


@pytest.mark.slow
@pytest.mark.release
def test_a_compiled_run_gives_the_same_numbers(tmp_path):
    plain, compiled = (train(a2c, tmp_path / str(on), compile=on, iterations=12, checkpoint_every=12,
                             eval_every=12, num_steps=6, chunk=4) for on in (False, True))
    torch.compiler.reset()
    assert validate(compiled, strict=True)["ok"]
    for one, other in zip(timeless(plain), timeless(compiled), strict=True):
        for name in ("value_mean", "value_loss", "grad_norm", "entropy_mean", "reward_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-3), (one["iteration"], name)
    weights = [state_of(folder / "checkpoints" / "step_000012")["agent"] for folder in (plain, compiled)]
    assert list(weights[0]) == list(weights[1])  # a compiled run can be continued without --compile
