"""tools/make_goal.py, and the goal that ships with the repository."""

import functools
from pathlib import Path

import make_rom
import numpy as np
import pytest
import torch
from PIL import Image

from envs.pixels import make_vec
from envs.pixels.goals import load_goal
from envs.pixels.pixel_goal import ACTIONS, PixelGoal
from tests.run_folders import ROOT, told
from tools import make_goal

torch.set_num_threads(1)
SHIPPED = ROOT / "envs" / "pixels" / "goals" / "map1"


@pytest.fixture(scope="module")
def world():
    """The default world, one row of it."""
    return PixelGoal(1)


@pytest.fixture
def run(capsys):
    """words -> the report on standard output, or the error on standard error"""
    return functools.partial(told, capsys, make_goal.main)


def succeeds(env, script, recorder=None, seed=0):
    """Whether the script, then rest, ends the episode as a success; with a recorder, from where it began."""
    env.reset(seed)
    if recorder:
        recorder.reset(seed)
        env._codes[:] = recorder._codes
    actions = [*make_goal.parse_actions(script, ACTIONS), *[0] * 3]
    return any(bool(env.step(torch.tensor([action]))[2]) for action in actions)


def towards(env):
    """The first actions of shortest ways to the goal."""
    codes = env._codes[:, -1]
    return env.paths[env._next.view(-1, 8)[codes], 0].argmin(1) * (env.paths[codes, 0] > 0)


def test_the_shipped_goal_is_what_its_script_records(run, tmp_path):
    frame, meta = load_goal(SHIPPED)
    recorded = meta["recorded"]
    options = [f"{key}={value}" for key, value in recorded["env_kwargs"].items()]
    report = run("--actions", recorded["actions"], "--seed", recorded["seed"],
                 "--env-kwargs", *options, "--out", tmp_path / "again")
    assert report["template_sha256"] == meta["template_sha256"]
    assert (np.load(tmp_path / "again" / "goal_template.npy") == frame).all()
    assert report["distance"] > 0.3 and report["starts"] > 800  # another place than the world's own goal
    words = f'--actions "{recorded["actions"]}"'
    assert words in " ".join((ROOT / "docs" / "pixel_goal.md").read_text().replace("\\\n", " ").split())


def test_the_shipped_goal_is_reached_by_its_script_and_by_shortest_paths(world):
    recorded = load_goal(SHIPPED)[1]["recorded"]
    env = make_vec("pixel-goal", 1, goal_dir=str(SHIPPED))
    assert succeeds(env, recorded["actions"], world, recorded["seed"])
    assert not succeeds(env, "NOOP", world, recorded["seed"])

    env = make_vec("pixel-goal", 512, goal_dir=str(SHIPPED))
    env.reset(0)
    done = torch.zeros(512, dtype=torch.bool)
    for _ in range(40):
        done |= env.step(towards(env))[2]
    assert done.all()


@pytest.mark.parametrize("script, options", [
    ("B DOWN*2 NOOP*2", []),  # at rest: four stacks in a row are alike
    ("B DOWN*5", ["--env-kwargs", "k_consecutive=1"]),  # on the move: only one stack is like it
])
def test_a_stack_is_reached_by_its_script(script, options, run, world, tmp_path):
    out, picture = tmp_path / "goal", tmp_path / "deep" / "goal.png"
    report = run("--actions", script, "--stack-k", 3, "--keep-stack", "--out", out,
                 "--seed", 2, "--png", picture, *options)
    assert report["shape"] == [3, 72, 80]
    env = make_vec("pixel-goal", 1, goal_dir=str(out))  # what it was recorded with are the defaults
    assert succeeds(env, script, world, 2) and not succeeds(env, "B NOOP*9", world, 2)

    grey = np.asarray(Image.open(picture))[::4, ::4]
    assert (grey == 255 - 85 * np.concatenate([*load_goal(out)[0]], axis=1)).all()


def test_actions_come_from_a_file_too_and_a_goal_is_replaced_by_force_alone(run, tmp_path):
    (tmp_path / "way.txt").write_text("# the menu first\nB, down*2  # two down\nUP")
    words = ["--out", tmp_path / "goal", "--env-kwargs", "pack=2bpp", "--actions"]
    other = run(*words, "B UP")["template_sha256"]
    assert "exists; --force replaces it" in run(*words, "B DOWN*2 UP")["error"]
    assert load_goal(tmp_path / "goal")[1]["template_sha256"] == other

    first = run(*words, "B DOWN*2 UP", "--force")
    second = run(*words[:-1], "--actions-file", tmp_path / "way.txt", "--force")
    assert first["template_sha256"] == second["template_sha256"] != other and first["actions"] == 4
    frame, meta = load_goal(tmp_path / "goal")
    assert meta["recorded"]["actions"] == "B, down*2 UP" and frame.shape == (72, 80)


def test_the_worlds_own_goal_is_at_no_distance(run, world, tmp_path):
    """The script may rest there, and be longer than an episode."""
    world.reset(4)
    world.step(torch.tensor([ACTIONS.index("B")]))
    script = ["B"]
    while (action := towards(world)) > 0:
        script.append(ACTIONS[action])
        world.step(action)
    report = run("--actions", " ".join([*script, "NOOP*200"]), "--seed", 4, "--out", tmp_path / "goal")
    assert report["distance"] < world.config.tau


@pytest.mark.parametrize("words, says", [
    (["--actions", "B JUMP"], "word 2 of the actions, 'JUMP': expected one of NOOP, A, B, START, UP"),
    (["--actions", "UP*9999 DOWN*2"], "word 2 of the actions, 'DOWN*2': expected a count from 1, and 10,000"),
    (["--actions", " # nothing"], "the script holds no action"),
    (["--actions-file", "nowhere.txt"], "nowhere.txt: cannot be read"),
    (["--actions", "B", "--env-id", "chess"], "--env-id chess: expected one of pixel-goal, pyboy"),
    (["--actions", "B", "--env-kwargs", "num_maps=2"], "recorded with num_maps 1 and num_goals 1"),
    (["--actions", "B", "--stack-k", "2", "--env-kwargs", "stack_k=3"], "stack_k is given twice"),
    (["--actions", "START"], "out/goal: 234 cells look like the goal within tau 0.05"),
])
def test_what_cannot_be_recorded_is_one_line(words, says, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in run(*words, "--out", "out/goal")["error"]
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_game_boys_screen_is_recorded_and_reached(run, tmp_path):
    (tmp_path / "test.gb").write_bytes(make_rom.rom())
    options, script = [f"rom={tmp_path / 'test.gb'}", "workers=1", "tau=0.001"], "LEFT*3 UP A"
    words = ["--env-id", "pyboy", "--env-kwargs", *options, "--out", tmp_path / "goal", "--actions"]
    assert "the script ends with what an episode begins with" in run(*words, "NOOP*2")["error"]
    report = run(*words, script)
    assert report["distance_from_start"] > 0.001 and report["shape"] == [72, 80]
    env = make_vec("pyboy", 1, goal_dir=str(tmp_path / "goal"), **dict(pair.split("=") for pair in options))
    try:
        assert succeeds(env, script) and not succeeds(env, "NOOP")
    finally:
        env.close()
