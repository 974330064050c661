"""tools/dump_policy_gif.py: the GIF and the lines beside it show what happened, and bad input is JSON."""

import functools
import hashlib
import json
import os
import shutil

import gymnasium
import make_rom
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import a2c_vecenv
from envs.pixels import make_vec
from envs.pixels.game_boy import Config, goal_meta, record_frames
from envs.pixels.goals import save_goal
from tools import dump_policy_gif, make_goal

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
        return np.full((30, 20, 3), 40 * self.count, np.uint8)


gymnasium.register("Lamp-v0", Lamp, disable_env_checker=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder, env_id, env_kwargs, change, **flags) -> folder, a checkpoint as a2c_vecenv.py writes it.

    change(state, meta) alters what it holds.
    """
    @functools.cache
    def trained(**flags):
        run = tmp_path_factory.mktemp("runs")
        a2c_vecenv.main(a2c_vecenv.Args(**dict(
            run_dir=str(run), iterations=1, num_envs=2, num_steps=1, hidden_size=16, log_every=1,
            checkpoint_every=1, eval_every=0, eval_episodes=1, eval_envs=1) | flags))
        return run / "checkpoints" / "step_000001"

    def written(folder, env_id="pixel-goal", env_kwargs=(), change=lambda state, meta: None, **flags):
        shutil.copytree(trained(env_id=env_id, env_kwargs=env_kwargs, **flags), folder, dirs_exist_ok=True)
        state = torch.load(folder / "trainer_state.pt", weights_only=True)
        meta = json.loads((folder / "meta.json").read_text())
        change(state, meta)
        (folder / "meta.json").write_text(json.dumps(meta))
        return signed(folder, state)
    return written


def signed(folder, state=None):
    """With the hashes of what it holds now, or of another state."""
    if state:
        torch.save(state, folder / "trainer_state.pt")
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "manifest.json").write_text(json.dumps(hashes))
    return folder


def steer(action):
    """Weights that always prefer one action."""
    def change(state, meta):
        state["agent"]["policy.bias"] += 50 * torch.eye(len(state["agent"]["policy.bias"]))[action]
    return change


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


def replay(env, seed, actions):
    """What a world of its own shows and says along the same actions: (1 + steps) frames, rewards, dists."""
    def seen(obs):
        return 255 - 85 * env.decode(obs)[0, -1].numpy()

    frames, rewards, dists = [seen(env.reset(seed))], [], []
    for action in actions:
        obs, reward, _, _, info = env.step(torch.tensor([action]))
        frames.append(seen(info["final_obs"] if info["reset_mask"] else obs))
        rewards.append(float(reward))
        dists.append(float(info["dist"]))
    return frames, rewards, dists


@pytest.mark.parametrize("mode, options", [
    ("--sample", ()), ("--greedy", ("pack=2bpp", "stack_k=2", "goal_in_obs=true", "num_goals=2"))])
def test_the_frames_and_lines_are_what_happened(mode, options, dump, checkpoint, tmp_path):
    """Each pixel of the screen, and the last frame is the one before the reset."""
    path = checkpoint(tmp_path / "a", env_kwargs=("max_steps=9", *options), alpha=3.0)
    status, said, out = dump("--checkpoint", path, mode, "--seed", 5, "--scale", 3)
    steps, frames = steps_of(out), frames_of(out)
    assert (status, said["frames"], len(frames), len(steps)) == (0, 10, 10, 9)
    assert [step["step"] for step in steps] == [*range(1, 10)]
    assert all(list(step) == ["step", "action", "reward", "value", "dist", "done", "trunc"] for step in steps)
    assert [(step["done"], step["trunc"]) for step in steps] == [(False, False)] * 8 + [(False, True)]
    env = make_vec("pixel-goal", 1, alpha=3.0, max_steps=9, **dict(pair.split("=") for pair in options))
    shown, rewards, dists = replay(env, 5, [step["action"] for step in steps])
    assert [step["reward"] for step in steps] == pytest.approx(rewards)
    assert [step["dist"] for step in steps] == pytest.approx(dists)
    assert {frame.shape for frame in frames} == {(3 * 72 + STRIP, 2 * 3 * 80 + dump_policy_gif.GAP, 3)}
    for frame, picture in zip(frames, shown, strict=True):
        assert (frame[:216:3, :240:3] == picture[..., None]).all()
    assert not np.array_equal(shown[-1], 255 - 85 * env.decode(env._obs)[0, -1].numpy())  # the next episode's


@pytest.mark.slow
def test_the_goal_is_shown_beside_the_screen(dump, checkpoint, tmp_path):
    """The world's own goal, each of several, and a recorded one."""
    goal, left = tmp_path / "goal", 80 + dump_policy_gif.GAP
    assert make_goal.main(["--actions", "B UP*3 RIGHT*2 DOWN", "--seed", "7", "--out", str(goal)]) == 0
    recorded = np.load(goal / "goal_template.npy")
    cases = [((), None), (("num_goals=5", "num_maps=2"), None), ((f"goal_dir={goal}",), recorded)]
    for options, picture in cases:
        path = checkpoint(tmp_path / "a", env_kwargs=options)
        for seed in range(2 if "num_goals=5" in options else 1):
            _, said, out = dump("--checkpoint", path, "--steps", 1, "--seed", seed, "--scale", 1)
            assert said["ok"], said
            shown = frames_of(out)[0][:72, left:left + 80, 0]
            if picture is None:  # as the option that puts it into the observation
                several = dict(pair.split("=") for pair in options)
                env = make_vec("pixel-goal", 1, goal_in_obs=True, **several)
                wanted = env.reset(seed)[0, 0].numpy()
            else:
                wanted = picture
            assert np.array_equal(shown, 255 - 85 * wanted), (options, seed)


def test_a_frame_stays_a_frame_where_nothing_moves(dump, checkpoint, tmp_path):
    """Pillow leaves out pictures that repeat the one before."""
    path = checkpoint(tmp_path / "a", change=steer(0), env_kwargs=("menu_prob=0",))
    _, said, out = dump("--checkpoint", path, "--steps", 6, "--episodes", 2, "--scale", 1)
    frames = frames_of(out)
    assert {step["action"] for step in steps_of(out)} == {0}
    assert said["frames"] == len(frames) == 2 * 7
    assert np.array_equal(frames[0][:-STRIP, :80], frames[6][:-STRIP, :80])
    with Image.open(out / "rollout.gif") as gif:
        times = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert times in [[800, *[middle] * 5, 800] * 2 for middle in (120, 130)]


def test_episodes_follow_each_other_and_each_begins_anew(dump, checkpoint, tmp_path):
    path = checkpoint(tmp_path / "a", env_kwargs=("max_steps=7",))
    _, said, out = dump("--checkpoint", path, "--episodes", 2, "--seed", 4, "--scale", 1)
    numbers = [step["step"] for step in steps_of(out)]
    assert numbers == [*range(1, 8)] * 2 and [e["steps"] for e in said["episodes"]] == [7, 7]
    second = frames_of(out)[8:]
    _, _, single = dump("--checkpoint", path, "--seed", 5, "--scale", 1, out=tmp_path / "single")
    for one, other in zip(frames_of(single), second, strict=True):
        assert np.array_equal(one[:-STRIP], other[:-STRIP])


# Gymnasium


def test_a_rendering_environment_shows_its_last_frame_before_the_reset(dump, checkpoint, tmp_path):
    path = checkpoint(tmp_path / "a", "Lamp-v0")
    status, said, out = dump("--checkpoint", path, "--episodes", 2, "--scale", 2)
    assert status == 0 and said["episodes"][0] == dict(steps=5, success=None, done=True, trunc=False) | {
        "return": 5.0}
    assert [frame[5, 5, 0] for frame in frames_of(out)] == [0, 40, 80, 120, 160, 200] * 2
    assert {step["dist"] for step in steps_of(out)} == {None}


@pytest.mark.parametrize("render", ["render=false", "broken=list", "broken=float"])
def test_image_observations_are_shown_where_there_is_no_render(render, dump, checkpoint, tmp_path):
    path = checkpoint(tmp_path / "a", "Lamp-v0", ("image=true", render))
    status, _, out = dump("--checkpoint", path, "--scale", 2)
    shown = [int(frame[9, 9, 1]) for frame in frames_of(out)]
    assert status == 0 and np.diff(shown).tolist() == [40] * 5 and shown[0] < 9
    path = checkpoint(tmp_path / "a", "Lamp-v0", (render,))  # a vector: there is nothing to show
    status, said, _ = dump("--checkpoint", path)
    assert status == 1 and "cannot be drawn" in said["reason"] and "no images" in said["reason"]


@pytest.mark.slow
def test_a_game_boy_is_shown_with_its_goal(dump, checkpoint, tmp_path):
    """A policy that always presses RIGHT moves the block of our own ROM to where it should be."""
    (tmp_path / "game.gb").write_bytes(make_rom.rom())
    config = Config(rom=str(tmp_path / "game.gb"), tau=0.001, k_consecutive=1)
    shown = 255 - 85 * np.concatenate([record_frames(config, ["RIGHT"] * n) for n in range(4)])
    save_goal(tmp_path / "goal", record_frames(config, ["RIGHT"] * 3)[0], **goal_meta(config))
    options = [f"rom={config.rom}", f"goal_dir={tmp_path / 'goal'}", "tau=0.001", "k_consecutive=1"]
    path = checkpoint(tmp_path / "a", "pyboy", tuple(options), steer(7), network="patch")
    status, said, out = dump("--checkpoint", path, "--scale", 1, "--greedy")
    assert status == 0 and said["episodes"][0]["success"] is True and said["frames"] == 4, said
    assert [step["dist"] == 0 for step in steps_of(out)] == [False, False, True]
    left = 80 + dump_policy_gif.GAP
    for frame, picture in zip(frames_of(out), shown, strict=True):
        assert np.array_equal(frame[:72, :80, 0], picture)
        assert np.array_equal(frame[:72, left:left + 80, 0], shown[-1])


# What cannot be shown is JSON


def test_the_newest_checkpoint_that_is_complete_is_taken(dump, checkpoint, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (9, 999_999, 1_000_000):
        checkpoint(folder / f"step_{step:06d}",
                   change=lambda state, _, step=step: state.update(iteration=step))
    (folder / ".step_2000000.writing").mkdir()
    newest = "step_1000000"
    assert dump("--run", tmp_path / "run", "--steps", 1)[1]["checkpoint"].endswith(newest)
    data = (folder / newest / "trainer_state.pt").read_bytes()
    (folder / newest / "trainer_state.pt").write_bytes(data[:-9000] + bytes([data[-9000] ^ 1]) + data[-8999:])
    _, said, out = dump("--run", tmp_path / "run", "--steps", 1)
    assert said["damaged"] == [newest] and json.loads((out / "meta.json").read_text())["iteration"] == 999_999
    for path in folder.glob("step_*/trainer_state.pt"):
        path.write_bytes(b"")
    status, said, _ = dump("--run", tmp_path / "run")
    assert status == 1 and "every checkpoint in it is damaged" in said["reason"]


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil-was-here",))


def refused(dump, path, expected):
    status, said, out = dump("--checkpoint", path, "--steps", 3)
    assert status == 1 and expected in said["reason"] and len(said["reason"]) < 600, said
    assert not out.exists()


@pytest.mark.parametrize("damage, expected", [
    (shutil.rmtree, "manifest.json"),
    (lambda path: (path / "trainer_state.pt").write_bytes(b""), "not what was written"),
    (lambda path: (path / "manifest.json").write_bytes(b""), "not a complete one"),
    (lambda path: signed(path, {"agent": Evil()}), "not a complete one"),
    (lambda path: (path / "meta.json").unlink() or signed(path), "meta.json"),  # of a language model, say
])
def test_a_folder_that_is_none_is_a_reason(damage, expected, dump, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint(tmp_path / "a")
    damage(path)
    refused(dump, path, expected)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("change, expected", [
    (lambda state, meta: state.pop("agent"), "does not fit"), (lambda state, meta: meta.pop("args"), "flags"),
    (lambda state, meta: state["agent"]["value.bias"].fill_(float("nan")), "not finite"),
])
def test_contents_that_cannot_be_shown_are_a_reason(change, expected, dump, checkpoint, tmp_path):
    refused(dump, checkpoint(tmp_path / "a", change=change), expected)


@pytest.mark.parametrize("flags, expected", [
    (dict(gamma=2), "gamma"), (dict(hidden_size=8), "does not fit"), (dict(env_id="No-v1"), "No-v1"),
    (dict(env_id="Lamp-v0", env_kwargs=["image=true"]), "goal of Lamp-v0"),
    (dict(env_kwargs=["a=1"]), "'a'"), (dict(env_kwargs=["map_seed=2"]), "goal of pixel-goal is not the one"),
])
def test_flags_of_another_run_than_the_weights_are_a_reason(flags, expected, dump, checkpoint, tmp_path):
    def change(state, meta):
        meta["args"].update(flags)

    refused(dump, checkpoint(tmp_path / "a", change=change), expected)


def test_bad_flags_are_a_reason_too(dump, checkpoint, tmp_path):
    path = checkpoint(tmp_path / "a")
    for words, expected in (
            (["--steps", 0], "--steps"), (["--fps", "nan"], "--fps"), (["--scale", "x"], "--scale"),
            (["--greedy", "--sample"], "--sample"), (["--speed", 1], "--speed"),
            (["--run", tmp_path], "not allowed with"), (["--env-kwargs", "max_steps=0"], "max_steps")):
        status, said, out = dump("--checkpoint", path, *words)
        assert status == 1 and expected in said["reason"] and not out.exists(), said
    assert dump()[1]["reason"] and dump("--run", tmp_path)[1]["reason"].endswith("step_* in it")
    (tmp_path / "file").write_text("")
    status, said, _ = dump("--checkpoint", path, "--steps", 1, out=tmp_path / "file" / "out")
    assert status == 1 and "--out" in said["reason"]
