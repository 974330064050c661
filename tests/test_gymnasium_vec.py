"""Gymnasium ids as vectorised environments, against single environments stepped by hand."""

import functools
import sys

import gymnasium
import numpy as np
import pytest
import torch

from envs import BadInput
from envs.pixels import RecordEpisodeStatistics, make_vec


class Counter(gymnasium.Env):
    """Counts its steps and rewards with the action. Ends after `end` steps; `kind` says what is seen."""

    def __init__(self, end=5, kind="vector", start=0):
        box = gymnasium.spaces.Box
        self.observation_space = {
            "vector": box(-1e6, 1e6, (2,), np.float64), "grey": box(0, 255, (5, 6), np.uint8),
            "rgb": box(0, 255, (5, 6, 3), np.uint8), "chw": box(0, 255, (3, 5, 6), np.uint8),
            "ram": box(0, 255, (9,), np.uint8), "discrete": gymnasium.spaces.Discrete(9, start=2),
            "cube": box(0, 1, (4, 4, 4)),
        }[kind]
        self.action_space = gymnasium.spaces.Discrete(3, start=start)
        self.end, self.kind, self.memory = end, kind, np.zeros(2)

    def show(self):
        if self.kind == "discrete":
            return 2 + self.count
        if self.kind == "vector":
            self.memory[:] = self.count, self.start
            return self.memory  # the same array every time, as some environments do
        frame = np.arange(np.prod(self.observation_space.shape)).reshape(self.observation_space.shape)
        return (frame + self.count).astype(np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.start = 0, self.np_random.random()
        return self.show(), {}

    def step(self, action):
        self.count += 1
        return self.show(), float(action), self.count >= self.end, False, {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    torch.set_num_threads(1)
    gymnasium.register("Counter-v0", Counter)
    yield
    del gymnasium.registry["Counter-v0"]


def by_hand(env_id, seed, actions, **options):
    """One environment with autoreset.  -> first obs, [(obs, reward, terminated, truncated, final or None)]"""
    env = gymnasium.make(env_id, disable_env_checker=True, **options)
    first, steps = np.array(env.reset(seed=seed)[0]), []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(int(action))
        final = np.array(obs) if terminated or truncated else None
        shown = np.array(obs if final is None else env.reset()[0])
        steps.append((shown, reward, terminated, truncated, final))
    env.close()
    return first, steps


@pytest.mark.parametrize(("env_id", "options"), [
    ("CartPole-v1", dict(max_episode_steps=15)), ("Acrobot-v1", dict(max_episode_steps=7)),
    ("CartPole-v1", dict(max_episode_steps=15, render_mode="rgb_array")),
    ("Counter-v0", dict(max_episode_steps=6, end=6)),  # ends and is cut in one step
])
def test_rows_are_single_environments(env_id, options):
    env = make_vec(env_id, 3, **{key: str(value) for key, value in options.items()})  # as flags are
    assert env.log_meta == {"num_actions": env.num_actions, "action_codec_id": f"gymnasium:{env_id}",
                            "frames_per_step": 1, "stack_k": 1, "goal_dir": None, "goal_sha256": None}
    seeds = [11, 12, 2**62]
    generator, first = torch.Generator().manual_seed(3), env.reset(seeds).clone()
    assert first.dtype == torch.float32 and first.shape == (3, *env.obs_shape)
    actions, results = torch.randint(0, env.num_actions, (120, 3), generator=generator), []
    for chosen in actions:
        obs, *rest, info = env.step(chosen)
        results.append((obs.clone(), *rest, info["reset_mask"], info["final_obs"].clone()))
    env.close()

    begun, singles = zip(*(by_hand(env_id, seeds[row], actions[:, row], **options) for row in range(3)),
                         strict=True)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)  # the last bit may be rounded
    close(first, np.stack(begun))
    ends = cuts = 0
    for (obs, reward, terminated, truncated, mask, final), *expected in zip(results, *singles, strict=True):
        shown, rewards, terminations, truncations, finals = zip(*expected, strict=True)
        assert terminated.tolist() == list(terminations) and truncated.tolist() == list(truncations)
        assert reward.dtype == torch.float32 and reward.tolist() == list(rewards)
        assert torch.equal(mask, terminated | truncated)
        close(obs, np.stack(shown))
        finals = [one for one in finals if one is not None]
        close(final, finals if finals else np.empty((0, *env.obs_shape)))
        assert obs.dtype == final.dtype == torch.float32
        ends, cuts = ends + int(terminated.sum()), cuts + int(truncated.sum())
    assert ends + cuts >= 5 and cuts > 0  # the test has seen what it is about


@pytest.mark.parametrize(("kind", "shape", "dtype", "high"), [
    ("vector", (2,), torch.float32, 1.0), ("ram", (9,), torch.float32, 255.0),
    ("grey", (1, 5, 6), torch.uint8, 255.0), ("rgb", (3, 5, 6), torch.uint8, 255.0),
    ("chw", (3, 5, 6), torch.uint8, 255.0), ("discrete", (9,), torch.float32, 1.0),
])
def test_observation_kinds(kind, shape, dtype, high):
    env, single = make_vec("Counter-v0", 2, kind=kind), Counter(kind=kind)
    obs, expected = env.reset([1, 2]), torch.as_tensor(single.reset(seed=1)[0])
    assert (env.obs_shape, env.obs_dtype, env.obs_high) == (shape, dtype, high)
    assert obs.dtype == dtype and obs.shape == (2, *shape)

    picture = env.frames(0)
    if dtype == torch.float32:
        assert picture is None
    else:
        assert torch.equal(torch.tensor(picture), expected.permute(1, 2, 0) if kind == "chw" else expected)
    if kind == "discrete":
        expected = torch.nn.functional.one_hot(expected - 2, 9)
    elif kind == "rgb":
        expected = expected.permute(2, 0, 1)
    assert torch.equal(obs[0], expected.reshape(shape).to(dtype))


def test_a_picture_without_pygame_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = make_vec("gymnasium.envs.classic_control:CartPole-v1", 2, render_mode="rgb_array")
    env.reset(seed=1)
    with pytest.raises(BadInput, match="pygame"):
        env.frames(1)


def test_actions_start_where_the_space_starts_and_are_checked():
    env = make_vec("Counter-v0", 3, start=2)
    env.reset(seed=1)
    assert env.step(torch.tensor([0, 1, 2], dtype=torch.int32))[1].tolist() == [2, 3, 4]
    with pytest.raises(ValueError):
        env.step(torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(("env_id", "options", "message"), [
    ("CartPole-v7", {}, "CartPole"), ("no_such_module:X-v0", {}, "no_such_module"),
    ("CartPole-v1", {"gravity": "5"}, "gravity"), ("CartPole-v1", {"max_episode_steps": "0"}, "max_episode"),
    ("Pendulum-v1", {}, "discrete actions"), ("Blackjack-v1", {}, "Tuple"),
    ("Counter-v0", {"kind": "cube"}, "Box"),
])
def test_bad_input_is_one_line(env_id, options, message):
    with pytest.raises(BadInput) as error:
        make_vec(env_id, 2, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def played(env, steps, seed):
    """What each step returned, by random actions of that seed."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        actions = torch.randint(0, env.num_actions, (3,), generator=generator)
        obs, reward, terminated, truncated, info = env.step(actions)
        seen += [obs.clone(), reward, terminated, truncated, info["final_obs"].clone()]
    return seen


@pytest.mark.parametrize(("env_id", "options"), [
    ("CartPole-v1", dict(render_mode="rgb_array")), ("CartPole-v1", {}), ("FrozenLake-v1", {}),
    ("Taxi-v4", {})])
def test_a_saved_environment_continues_bit_for_bit_in_one_of_another_past(env_id, options, tmp_path):
    env, other = (make_vec(env_id, 3, max_episode_steps=13, **options) for _ in range(2))
    env.reset(seed=1)
    other.reset(seed=99)
    obs = played(env, 40, 2)[-5]
    torch.save(env.state_dict(), tmp_path / "state.pt")
    seen = [obs, *played(env, 60, 4)]
    assert sum(len(final) for final in seen[5::5]) >= 5  # new starts were drawn
    found = other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)).clone()
    assert all(map(torch.equal, seen, [found, *played(other, 60, 4)]))


def test_a_saved_environment_of_other_size_is_refused():
    env = make_vec("Counter-v0", 2)
    env.reset(seed=1)
    with pytest.raises(BadInput, match="shape"):
        make_vec("Counter-v0", 3).load_state_dict(env.state_dict())


def test_statistics_of_episodes_are_sums_over_their_steps_and_go_on_from_a_state():
    env = RecordEpisodeStatistics(make_vec("Counter-v0", 3, end=5))
    env.reset(0)
    actions, returns = torch.randint(3, (14, 3), generator=torch.Generator().manual_seed(0)), []
    for step, action in enumerate(actions, 1):
        if step == 8:  # in the middle of an episode
            state = env.state_dict()
            env = RecordEpisodeStatistics(make_vec("Counter-v0", 3, end=5))
            env.load_state_dict(state)
        *_, info = env.step(action)
        returns.append(info["episode_return"])
        assert info["episode_length"].tolist() == [5.0 * (step % 5 == 0)] * 3
    expected = torch.zeros(14, 3)
    expected[4], expected[9] = actions[:5].sum(0), actions[5:10].sum(0)
    assert torch.equal(torch.stack(returns), expected)
    env.reset(0)
    assert [float(env.step(action)[-1]["episode_length"][0]) for action in actions[:5]] == [0, 0, 0, 0, 5]
