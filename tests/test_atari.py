"""Atari through ale-py's vector environment, against Gymnasium's wrappers around single emulators."""

import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import a2c_vecenv as a2c
from envs import BadInput
from envs.pixels import RecordEpisodeStatistics, make_vec, row_seeds
from tests.run_folders import killed_after, log_lines, package, records, same_end, train
from tests.stand_ins import install_atari
from tools import dump_policy_gif
from tools.validate_train_log import validate


@pytest.fixture(scope="module")
def ale():
    torch.set_num_threads(1)
    package("ale_py")


def played(env, number, seed):
    """What each step returned, by random actions of that seed, until `number` steps."""
    generator, steps = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        actions = torch.randint(env.num_actions, (env.num_envs,), generator=generator)
        obs, reward, terminated, truncated, info = env.step(actions)
        kept = {name: info[name].clone() for name in ("reset_mask", "final_obs", "score")}
        kept |= {name: info[name] for name in ("episode_return", "episode_length") if name in info}
        steps.append(kept | dict(actions=actions, obs=obs.clone(), reward=reward, terminated=terminated,
                                 truncated=truncated))
    return steps


def equal(one, other, *names):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in names or a)


# The game


def shrink(picture, size, interpolation):
    """Area averaging by its definition, in place of OpenCV's: what a new pixel covers of each old one."""
    def weights(old, new):
        edges = np.arange(new + 1)[:, None] * old / new
        return np.diff(np.clip(edges - np.arange(old), 0, 1), axis=0) * new / old  # (new, old)

    height, width = picture.shape
    mean = weights(height, size[1]) @ picture.astype(float) @ weights(width, size[0]).T
    return np.rint(mean).astype(np.uint8)


def single_game(monkeypatch, game, noops, **options):
    """One emulator in Gymnasium's wrappers, whose games begin with `noops` frames without an action."""
    import ale_py
    import gymnasium

    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(resize=shrink, INTER_AREA=3))
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, **options)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=noops)
    env = gymnasium.wrappers.FrameStackObservation(env, 4, padding_type="zero")
    env.reset(seed=1)
    env.unwrapped.np_random = SimpleNamespace(integers=lambda low, high: noops)
    return env


def most_shades_apart(single, first, steps):
    """Step it with the same actions.  -> how much two pixels differ at most; None: the game went otherwise"""
    worst = int(np.abs(single.reset()[0] - first[0].numpy().astype(int)).max())
    for step in steps:
        obs, reward, terminated, truncated, _ = single.step(int(step["actions"]))
        shown = step["final_obs"] if step["reset_mask"] else step["obs"]
        worst = max(worst, int(np.abs(obs - shown[0].numpy().astype(int)).max()))
        ours = (step["reward"].item(), step["terminated"].item(), step["truncated"].item())
        if worst > 20 or ours != (reward, terminated, truncated):
            return None
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("game", "noop_max", "ours", "theirs"), [
    pytest.param("Pong", 0, {}, {}, marks=pytest.mark.release),
    pytest.param("Breakout", 30, {}, {}, marks=pytest.mark.release),
    pytest.param("SpaceInvaders", 30, {}, {}, marks=pytest.mark.release),
    ("MsPacman", 30, dict(full_action_space=True), dict(full_action_space=True)),
    ("Breakout", 0, dict(max_episode_frames=402), dict(max_num_frames_per_episode=402))])
def test_a_game_is_that_of_gymnasiums_wrappers(ale, monkeypatch, game, noop_max, ours, theirs):
    env = make_vec(f"ALE/{game}-v5", 1, noop_max=noop_max, episodic_life=False, clip_rewards=False, **ours)
    first = env.reset(seed=4).clone()
    assert first.shape == (1, 4, 84, 84) and first.dtype == torch.uint8
    steps = played(env, 1500, 0)
    length = 1 + [bool(step["reset_mask"]) for step in steps].index(True)
    assert any(step["score"] for step in steps) and (length == 101) is ("max_episode_frames" in ours)
    apart = [most_shades_apart(single_game(monkeypatch, game, noops, **theirs), first, steps[:length])
             for noops in range(max(noop_max, 1))]
    same = [noops for noops, shades in enumerate(apart) if shades is not None]
    # Rounding may go the other way. Where nothing moves at first, several counts begin alike.
    assert same and all(apart[noops] <= 1 for noops in same), apart


@pytest.fixture
def dice(monkeypatch):
    install_atari(monkeypatch)


@pytest.mark.parametrize("game, number", [
    pytest.param("SpaceInvaders", 900, marks=pytest.mark.slow), ("Dice", 150)])
def test_a_lost_life_ends_the_return_and_not_the_game_or_its_score(game, number, request):
    request.getfixturevalue("dice" if game == "Dice" else "ale")
    envs = [RecordEpisodeStatistics(make_vec(f"ALE/{game}-v5", 3, **options)) for options in (
        {}, dict(episodic_life="false", clip_rewards="false"))]
    for env in envs:
        env.reset(1)
    steps, whole = (played(env, number, 2) for env in envs)
    for name in ("obs", "final_obs", "score", "reset_mask", "episode_return", "episode_length"):
        assert equal(steps, whole, name), f"{name} is another where lives end returns and rewards are clipped"
    lives, before = torch.zeros(3), torch.zeros_like(steps[0]["obs"])
    for step, game in zip(steps, whole, strict=True):
        assert torch.equal(game["reward"], game["score"])
        assert torch.equal(step["reward"], game["score"].clamp(-1, 1))
        assert torch.equal(game["terminated"], game["reset_mask"])
        lives += step["terminated"]
        assert (lives[game["reset_mask"]] == 3).all()  # as many as this game gives
        lives[game["reset_mask"]] = 0
        assert torch.equal(step["final_obs"][:, :-1], before[step["reset_mask"]][:, 1:]), "of another game"
        before = step["obs"]
    scores = torch.stack([step["episode_return"] for step in steps])
    assert (scores > 20).sum() >= 4 and sum(float(step["score"].sum()) for step in steps) >= scores.sum()


@pytest.mark.slow
def test_a_seed_gives_a_row_its_games_whatever_the_threads_and_other_rows(ale):
    options = dict(repeat_action_probability=0.25, replay_steps=150)
    env = make_vec("ALE/Breakout-v5", 4, threads=1, **options)
    halves = [make_vec("ale_py:ALE/Breakout-v5", 2, threads=2, **options) for _ in range(2)]
    first, generator = env.reset(7).clone(), torch.Generator().manual_seed(0)
    seeds = row_seeds(7, range(4))
    for _ in range(2):  # another past does not matter
        again = torch.cat([half.reset(its) for half, its in zip(halves, (seeds[:2], seeds[2:]), strict=True)])
    assert torch.equal(first, again)
    ended = 0
    for _ in range(500):
        actions = torch.randint(env.num_actions, (4,), generator=generator)
        obs, reward, *_, info = env.step(actions)
        parts = [half.step(part) for half, part in zip(halves, actions.split(2), strict=True)]
        assert torch.equal(obs, torch.cat([part[0] for part in parts]))
        assert torch.equal(reward, torch.cat([part[1] for part in parts]))
        ended += int(info["reset_mask"].sum())
    assert ended >= 6
    assert torch.equal(make_vec("ALE/Breakout-v5", 4).reset(7), first)
    assert not torch.equal(played(make_env_at(7), 60, 1)[-1]["obs"], played(make_env_at(8), 60, 1)[-1]["obs"])


def make_env_at(seed):
    env = make_vec("ALE/Pong-v5", 1)
    env.reset(seed)
    return env


@pytest.mark.parametrize("game, another, options, number", [
    pytest.param("Breakout", "Pong", dict(replay_steps=150), 600, marks=pytest.mark.slow),
    pytest.param("Breakout", "Pong", dict(repeat_action_probability=0.25), 600, marks=pytest.mark.slow),
    ("Dice", "Cards", dict(replay_steps=40, screen_size=2), 120)])
def test_a_saved_game_goes_on_bit_for_bit_in_an_environment_of_another_past(game, another, options, number,
                                                                            request, tmp_path):
    request.getfixturevalue("dice" if game == "Dice" else "ale")
    env, other = (RecordEpisodeStatistics(make_vec(f"ALE/{game}-v5", 3, **options)) for _ in range(2))
    env.reset(1)
    other.reset(99)
    played(other, 30, 1)
    obs = played(env, number, 2)[-1]["obs"]
    torch.save(env.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    if "replay_steps" in options:  # a game more than these at most
        assert max(map(len, state["played"])) < number and len(set(map(len, state["played"]))) > 1
        assert not {*state["seeds"]} & {*row_seeds(1, range(3))}, "the first games come again"
    steps = played(env, number * 2 // 3, 3)
    assert sum(int(step["reset_mask"].sum()) for step in steps) >= 4
    assert torch.equal(other.load_state_dict(state), obs)
    again = played(other, len(steps), 3)
    assert all(equal(steps, again, name) for name in steps[0]), "a game that was saved goes on otherwise"

    assert make_vec(f"ALE/{game}-v5", 2, **options | dict(replay_steps=0)).state_dict() is None
    with pytest.raises(BadInput, match="3 rows|2 rows"):
        make_vec(f"ALE/{game}-v5", 2, **options).load_state_dict(state)
    with pytest.raises(BadInput, match="other pictures"):
        make_vec(f"ALE/{another}-v5", 3, **options).load_state_dict(state)


# Bad input


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "options", "message"), [
    ("ALE/Pnog-v5", {}, "did you mean 'ALE/Pong-v5'"), ("ale_py:ALE/Pong-v4", {}, "ALE/Pong-v5"),
    ("ALE/Pong-v5", dict(frameskip="4"), "did you mean 'frame_skip'.*noop_max"),
    ("ALE/Pong-v5", dict(stack="four"), "stack: expected int"),
    ("ALE/Pong-v5", dict(clip_rewards="maybe"), "clip_rewards: expected bool"),
    ("ALE/Pong-v5", dict(frame_skip="0"), "frame_skip: expected at least 1, got 0"),
    ("ALE/Pong-v5", dict(noop_max="-1"), "noop_max: expected at least 0"),
    ("ALE/Pong-v5", dict(repeat_action_probability="1"), "repeat_action_probability: expected 0 to below 1"),
])
def test_bad_input_is_one_line(ale, env_id, options, message):
    with pytest.raises(BadInput, match=message) as error:
        make_vec(env_id, 2, **options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_actions_are_checked(ale):
    env = make_env_at(1)
    assert env.num_actions == 6 and env.action_names[:2] == ["NOOP", "FIRE"]
    for actions, error in ((torch.tensor([6]), ValueError), (torch.tensor([-1]), ValueError),
                           (torch.tensor([1.0]), TypeError), (torch.tensor([1, 1]), ValueError)):
        with pytest.raises(error):
            env.step(actions)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(sys.modules, "envs.pixels.atari", raising=False)
    with pytest.raises(BadInput, match="pip install -r requirements-envs.txt") as error:
        make_vec("ALE/Pong-v5", 2)
    assert "\n" not in str(error.value)


# The script


SHORT = dict(env_id="ALE/Breakout-v5", env_kwargs=("max_episode_frames=320", "replay_steps=30"), num_steps=30,
             eval_episodes=2)


@pytest.mark.slow
def test_a_run_has_a_valid_log_of_whole_games_resumes_exactly_and_can_be_shown(ale, tmp_path, monkeypatch):
    gae, ends = a2c.gae, []  # what it is told: terminated, done
    monkeypatch.setattr(a2c, "gae", lambda *given: ends.append(given[3:5]) or gae(*given))
    whole = train(a2c, tmp_path / "whole", keep_checkpoints=0, **SHORT)
    report = validate(whole, strict=True)
    assert report["ok"], report
    meta = log_lines(whole)[0]["meta"]
    assert (meta["env"], meta["action_codec_id"], meta["frames_per_step"], meta["stack_k"],
            meta["num_actions"]) == ("ALE/Breakout-v5", "ale:breakout", 4, 4, 4)
    last = records(whole)[-1]
    assert 0 < last["eval/return"] < 20 and last["eval/steps"] == 0 == last["eval/success_rate"]
    assert any(record["done_rate"] > record["reset_rate"] for record in records(whole))  # lives
    assert len(ends) == 4 and all((done | ~terminated).all() for terminated, done in ends)
    killed = killed_after(whole, tmp_path / "killed", 2)
    train(a2c, killed, keep_checkpoints=0, **SHORT)
    same_end(whole, killed)

    out = tmp_path / "look"
    words = ["--run", str(whole), "--episodes", "2", "--scale", "2", "--out", str(out)]
    assert dump_policy_gif.main(words) == 0
    lines = [json.loads(line) for line in (out / "rollout.jsonl").read_text().splitlines()]
    told = json.loads((out / "meta.json").read_text())
    assert [episode["steps"] for episode in told["episodes"]] == [80, 80] and len(lines) == 160
    assert all(episode["trunc"] for episode in told["episodes"])
    frames = [*itertools.islice(ImageSequence.Iterator(Image.open(out / "rollout.gif")), 100)]
    assert len(frames) == 100 and frames[0].size[0] >= 168
