"""tools/dump_policy_gif.py: the GIF and the lines beside it show what happened, and bad input is JSON."""

import functools
import hashlib
import json
import os
import shutil

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import a2c_vecenv
from envs.pixels import make_vec
from tests.run_folders import ROOT
from tools import dump_policy_gif

GOAL = str(ROOT / "envs" / "pixels" / "goals" / "map1")
STRIP = dump_policy_gif.STRIP


class Lamp(gymnasium.Env):
    """Counts its steps and shows the count as grey, by render or in its observation; ends after five."""

    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, image=False, render=True, render_mode=None, broken=""):
        if render_mode and not render:
            raise TypeError("no render_mode here")
        self.render_mode, self.image, self.broken, self.episodes = render_mode, image, broken, 0
        shape, dtype = ((48, 40, 3), np.uint8) if image else ((1,), np.float32)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, dtype)

    def seen(self):
        space = self.observation_space
        return np.full(space.shape, 40 * self.count + self.episodes, space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.episodes += 1
        return self.seen(), {}

    def step(self, action):
        self.count += 1
        return self.seen(), 1.0, self.count == 5, False, {}

    def render(self):
        if self.broken:
            return {"list": [1], "float": np.zeros((4, 4))}[self.broken]
        return np.full((30, 20, 3), 40 * self.count + self.episodes, np.uint8)


gymnasium.register("Lamp-v0", Lamp, disable_env_checker=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint as a2c_vecenv.py writes it, by its flags: made once."""
    @functools.cache
    def checkpoint(**flags):
        run = tmp_path_factory.mktemp("runs")
        a2c_vecenv.main(a2c_vecenv.Args(**dict(
            run_dir=str(run), iterations=1, num_envs=2, num_steps=1, hidden_size=16, log_every=1,
            checkpoint_every=1, eval_every=0, eval_episodes=1, eval_envs=1) | flags))
        return run / "checkpoints" / "step_000001"
    return checkpoint


def holding(change):
    """-> what lets change(state, meta) alter what a checkpoint holds"""
    def alter(path):
        state = torch.load(path / "trainer_state.pt", weights_only=True)
        meta = json.loads((path / "meta.json").read_text())
        change(state, meta)
        torch.save(state, path / "trainer_state.pt")
        (path / "meta.json").write_text(json.dumps(meta))
        return signed(path)
    return alter


def signed(path):
    """With the hashes of what it holds now."""
    names = [file.name for file in path.iterdir() if file.name != "manifest.json"]
    hashes = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    (path / "manifest.json").write_text(json.dumps(hashes))
    return path


@pytest.fixture
def dump(tmp_path, capsys):
    """Runs the command. -> exit status, what it said as JSON, folder"""
    def run(*words, out=tmp_path / "out"):
        capsys.readouterr()
        status = dump_policy_gif.main([*map(str, words), "--out", str(out)])
        (line,) = capsys.readouterr().out.splitlines()
        said = json.loads(line)
        assert said["ok"] is (status == 0)
        return status, said, out
    return run


def frames_of(folder):
    with Image.open(folder / "rollout.gif") as gif:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]


def steps_of(folder):
    return [json.loads(line) for line in (folder / "rollout.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode, options", [
    ("--sample", ()), ("--sample", (f"goal_dir={GOAL}",)),
    ("--greedy", ("pack=2bpp", "stack_k=2", "goal_in_obs=true", "num_goals=2"))])
def test_the_frames_and_lines_are_what_happened(mode, options, dump, trained):
    """Each pixel of the screen and of the goal, and the last frame is the one before the reset."""
    path = trained(env_kwargs=("max_steps=9", *options), alpha=3.0)
    status, said, out = dump("--checkpoint", path, mode, "--seed", 5, "--scale", 3)
    steps, frames = steps_of(out), frames_of(out)
    assert (status, said["frames"], len(frames), len(steps)) == (0, 10, 10, 9)
    assert [step["step"] for step in steps] == [*range(1, 10)]
    assert all(list(step) == ["step", "action", "reward", "value", "dist", "done", "trunc"] for step in steps)
    assert [(step["done"], step["trunc"]) for step in steps] == [(False, False)] * 8 + [(False, True)]

    # A world of its own shows and says the same along these actions.
    env = make_vec("pixel-goal", 1, alpha=3.0, max_steps=9, **dict(pair.split("=") for pair in options))
    shown = [env.reset(5).clone()]
    for step in steps:
        obs, reward, _, _, info = env.step(torch.tensor([step["action"]]))
        shown.append((info["final_obs"] if info["reset_mask"] else obs).clone())
        assert (step["reward"], step["dist"]) == pytest.approx((float(reward), float(info["dist"])))
    assert not torch.equal(shown[-1], obs)  # the next episode's
    left = 240 + dump_policy_gif.GAP
    assert {frame.shape for frame in frames} == {(3 * 72 + STRIP, left + 240, 3)}
    goal = np.load(f"{GOAL}/goal_template.npy") if GOAL in str(options) else env.decode(env.reset(5))[0, 0]
    for frame, seen in zip(frames, shown, strict=True):
        assert (frame[:216:3, :240:3] == 255 - 85 * env.decode(seen)[0, -1, ..., None].numpy()).all()
        assert (frame[:216:3, left::3, 0] == 255 - 85 * np.asarray(goal)).all() or not options


def test_episodes_follow_each_other_and_begin_as_rows_of_a_training_do(dump, trained):
    path = trained(env_kwargs=("max_steps=7",))
    _, said, out = dump("--checkpoint", path, "--episodes", 2, "--seed", 4, "--scale", 1)
    assert [step["step"] for step in steps_of(out)] == [*range(1, 8)] * 2
    assert [episode["steps"] for episode in said["episodes"]] == [7, 7]
    starts = 255 - 85 * make_vec("pixel-goal", 2).reset(4)[:, 0].numpy()
    assert not np.array_equal(*starts)
    for start, frame in zip(starts, frames_of(out)[::8], strict=True):
        assert np.array_equal(start, frame[:-STRIP, :80, 0])

    def actions(*words):
        _, _, out = dump("--checkpoint", path, "--scale", 1, *words)
        return [step["action"] for step in steps_of(out)]

    two = actions("--episodes", 2, "--seed", 4)
    assert two[:7] != two[7:] and two == actions("--episodes", 3, "--seed", 4)[:14]  # each has its own draws
    assert two[:7] != actions("--seed", 5)


def test_a_frame_stays_a_frame_where_nothing_moves(dump, trained, tmp_path):
    """Pillow leaves out pictures that repeat the one before."""
    stay = holding(lambda state, meta: state["agent"]["policy.bias"][0].add_(50))
    path = stay(shutil.copytree(trained(env_kwargs=("menu_prob=0",)), tmp_path / "a"))
    _, said, out = dump("--checkpoint", path, "--steps", 6, "--scale", 1)
    frames = frames_of(out)
    assert {step["action"] for step in steps_of(out)} == {0} and said["frames"] == len(frames) == 7
    assert np.array_equal(frames[0][:-STRIP, :80], frames[6][:-STRIP, :80])
    with Image.open(out / "rollout.gif") as gif:
        times = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert times in [[800, *[middle] * 5, 800] for middle in (120, 130)]


def test_a_rendering_environment_shows_its_last_frame_before_the_reset(dump, trained):
    status, said, out = dump("--checkpoint", trained(env_id="Lamp-v0"), "--episodes", 2, "--scale", 2)
    assert status == 0 and said["episodes"][0] == dict(steps=5, success=None, done=True, trunc=False) | {
        "return": 5.0}
    seen = [int(frame[5, 5, 0]) for frame in frames_of(out)]
    assert np.diff(seen[:6]).tolist() == np.diff(seen[6:]).tolist() == [40] * 5
    assert seen[6] == seen[0] + 2  # begun by the end of the one before, and again by its own seed
    assert {step["dist"] for step in steps_of(out)} == {None}


@pytest.mark.parametrize("render", ["render=false", "broken=list", "broken=float"])
def test_image_observations_are_shown_where_there_is_no_render(render, dump, trained, tmp_path):
    path = trained(env_id="Lamp-v0", env_kwargs=("image=true", render))
    status, _, out = dump("--checkpoint", path, "--scale", 2)
    shown = [int(frame[9, 9, 1]) for frame in frames_of(out)]
    assert status == 0 and np.diff(shown).tolist() == [40] * 5 and shown[0] < 9

    path = trained(env_id="Lamp-v0", env_kwargs=(render,))  # a vector: there is nothing to show
    status, said, _ = dump("--checkpoint", path)
    assert status == 1 and "cannot be drawn" in said["reason"] and "no images" in said["reason"]


def test_the_newest_checkpoint_that_is_complete_is_taken(dump, trained, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (9, 999_999, 1_000_000):
        path = shutil.copytree(trained(), folder / f"step_{step:06d}")
        holding(lambda state, meta, step=step: state.update(iteration=step))(path)
    (folder / ".step_2000000.writing").mkdir()
    assert dump("--run", tmp_path / "run", "--steps", 1)[1]["checkpoint"] == str(path)

    data = bytearray((path / "trainer_state.pt").read_bytes())
    data[-9000] ^= 1
    (path / "trainer_state.pt").write_bytes(data)
    _, said, out = dump("--run", tmp_path / "run", "--steps", 1)
    assert said["damaged"] == [path.name]
    assert json.loads((out / "meta.json").read_text())["iteration"] == 999_999

    for path in folder.glob("step_*/trainer_state.pt"):
        path.write_bytes(b"")
    status, said, _ = dump("--run", tmp_path / "run")
    assert status == 1 and "no checkpoint in it can be used" in said["reason"]


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil-was-here",))


def of_a_run_with(**flags):
    return holding(lambda state, meta: meta["args"].update(flags))


@pytest.mark.parametrize("damage, expected", [
    (shutil.rmtree, "manifest.json"),
    (lambda path: (path / "trainer_state.pt").write_bytes(b""), "not what was written"),
    (lambda path: (path / "manifest.json").write_bytes(b""), "not a complete one"),
    (lambda path: (path / "meta.json").unlink() or signed(path), "meta.json"),  # of a language model, say
    (holding(lambda state, meta: state.update(agent=Evil())), "not a complete one"),
    (holding(lambda state, meta: state.pop("agent")), "does not fit"),
    (holding(lambda state, meta: state["agent"]["value.bias"].fill_(float("nan"))), "not finite"),
    (holding(lambda state, meta: meta.pop("args")), "flags"),
    (of_a_run_with(gamma=2), "gamma"), (of_a_run_with(env_kwargs=["a=1"]), "'a'"),
    (of_a_run_with(env_id="No-v1"), "No-v1"), (of_a_run_with(hidden_size=8), "does not fit"),
    (of_a_run_with(env_kwargs=["map_seed=2"]), "goal of pixel-goal is not the one"),
])
def test_a_checkpoint_that_cannot_be_shown_is_one(damage, expected, dump, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = shutil.copytree(trained(), tmp_path / "a")
    damage(path)
    status, said, out = dump("--checkpoint", path, "--steps", 3)
    assert status == 1 and expected in said["reason"] and len(said["reason"]) < 600, said
    assert not out.exists() and not (tmp_path / "evil-was-here").exists()


def test_bad_flags_are_a_reason_too(dump, trained, tmp_path):
    path = trained()
    for words, expected in (
            (["--steps", 0], "--steps"), (["--fps", "nan"], "--fps"), (["--scale", "x"], "--scale"),
            (["--greedy", "--sample"], "--sample"), (["--run", tmp_path], "not allowed with"),
            (["--env-kwargs", "max_steps=0"], "max_steps")):
        status, said, out = dump("--checkpoint", path, *words)
        assert status == 1 and expected in said["reason"] and not out.exists(), said
    assert dump()[1]["reason"] and dump("--run", tmp_path)[1]["reason"].endswith("step_* in it")
    (tmp_path / "file").write_text("")
    status, said, _ = dump("--checkpoint", path, "--steps", 1, out=tmp_path / "file" / "out")
    assert status == 1 and "--out" in said["reason"]
