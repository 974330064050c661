"""Gymnasium ids as vectorised environments, against single environments stepped by hand."""

import functools
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch

from envs import BadInput
from envs.pixels import RecordEpisodeStatistics, VecEnv, make_vec


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
                            "frames_per_step": 1, "stack_k": 1, "goal_dir": None, "goal_sha256": None,
                            "obs_scaling": env.scaling}
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


@pytest.mark.parametrize(("kind", "shape", "dtype", "scaling"), [
    ("vector", (2,), torch.float32, "2 in -1e+06..1e+06 as they are"),
    ("ram", (9,), torch.float32, "9 in 0..255 to 0..1"),
    ("grey", (1, 5, 6), torch.uint8, "30 in 0..255 to 0..1"),
    ("rgb", (3, 5, 6), torch.uint8, "90 in 0..255 to 0..1"),
    ("chw", (3, 5, 6), torch.uint8, "90 in 0..255 to 0..1"), ("discrete", (9,), torch.float32, "one-hot"),
])
def test_observation_kinds(kind, shape, dtype, scaling):
    env, single = make_vec("Counter-v0", 2, kind=kind), Counter(kind=kind)
    obs, expected = env.reset([1, 2]), torch.as_tensor(single.reset(seed=1)[0])
    assert (env.obs_shape, env.obs_dtype, env.scaling) == (shape, dtype, scaling)
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


class Shown(gymnasium.Env):
    """Episodes of two steps: an observation, and at the end a later one. Its space need not hold them."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space, obs, later=None):
        self.observation_space, self.obs = space, obs
        self.later = obs if later is None else later

    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # which takes 32 bits
        self.count = 0
        return self.obs, {}

    def step(self, action):
        self.count += 1
        return self.later if self.count == 2 else self.obs, 0.0, self.count == 2, False, {}


gymnasium.register("Shown-v0", Shown, max_episode_steps=9)
Box, INF, MOST = gymnasium.spaces.Box, np.inf, np.finfo(np.float32).max


def box(low, high, dtype=np.float32):
    return Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


@pytest.mark.parametrize(("space", "obs", "expected"), [
    (Box(0, 8, (2, 3), np.uint8), [[0, 1, 2], [4, 7, 8]], [[[0, .125, .25], [.5, .875, 1]]]),
    (Box(0, 255, (2, 3), np.uint8), [[0, 51, 102], [153, 204, 255]], [[[0, .2, .4], [.6, .8, 1]]]),
    (box([[[0, 100]] * 3] * 3, [[[1, 200]] * 3] * 3, np.uint8), [[[1, 150]] * 3] * 3,
     [[[1.0] * 3] * 3, [[.5] * 3] * 3]),  # channels last
    (Box(10, 20, (3,), np.uint8), [10, 15, 20], [0, .5, 1]),
    (Box(-100, 50, (3,), np.int8), [-100, 0, 50], [-1, 0, .5]),
    (Box(0, 65_535, (2,), np.uint16), [0, 65_535], [0, 1]), (Box(-8, -4, (2,), np.int32), [-8, -5], [0, .75]),
    (box([0, -4, -INF, 0, 3, 0], [8, 2, INF, INF, 3, 5e4]), [4, -2, 7, 9, 3, 5e4], [.5, -.5, 7, 9, 0, 1]),
    (box([-MOST, -MOST], [MOST, MOST]), [7, -9], [7, -9]),
    (Box(-2**62, 2**62, (2,), np.int64), [7, -9], [7, -9]),
])
def test_a_network_sees_observations_scaled_by_the_bounds_of_their_space(space, obs, expected):
    """0 stays 0 where both signs occur; what has no bound stays as it is."""
    env = make_vec("Shown-v0", 2, space=space, obs=np.array(obs, space.dtype))
    shown = env.reset(1)
    seen = env.scale(shown)
    np.testing.assert_allclose(seen, [expected] * 2, rtol=1e-6)
    assert seen.dtype == torch.float32 and seen.data_ptr() != shown.data_ptr()


@pytest.mark.parametrize(("space", "obs", "says"), [
    (Box(0, 8, (2, 3), np.uint8), np.full((2, 3), 9, np.uint8), "9 at (0, 0), where its space allows 0 to 8"),
    (box([0, -1], [1, 1]), np.array([0.5, -1.5]), "-1.5 at (1,), where its space allows -1.0 to 1.0"),
    (Box(-1, 1, (2,)), np.array([np.nan, 0]), "nan at (0,)"), (Box(0, 5, (2,), np.int8), [0, 6], "6 at (1,)"),
])
def test_observations_outside_their_space_are_warned_of_and_counted(space, obs, says):
    inside = np.zeros(space.shape, space.dtype)
    env = make_vec("Shown-v0", 1, space=space, obs=inside, later=obs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        env.reset(1)
        assert not told
        for _ in range(2 * 10):
            env.step(torch.tensor([0]))
    first, tenth = (str(warning.message) for warning in told)
    assert says in first and says in tenth and "\n" not in first
    assert "(1 so far" in first and "(10 so far" in tenth


@pytest.mark.parametrize(("space", "obs", "says"), [
    (Box(0, 255, (2, 3), np.uint8), np.full((2, 3), 256), "256 at (0, 0)"),
    (Box(0, 255, (2, 3), np.uint8), np.full((2, 3), 0.5), "found float64 of shape (2, 3)"),
    (Box(0, 1, (2,)), np.zeros(1), "found float64 of shape (1,)"),
    (gymnasium.spaces.Discrete(3), 3, "has 3 at (), where its space allows 0 to 2"),
    (gymnasium.spaces.Discrete(3, start=1), 0, "has 0 at (), where its space allows 1 to 3"),
])
@pytest.mark.parametrize("at_first", [True, False])
def test_what_would_be_made_to_fit_is_one_line(space, obs, says, at_first):
    inside = np.full(space.shape, 1, space.dtype)
    env = make_vec("Shown-v0", 1, space=space, obs=obs if at_first else inside, later=obs)
    with pytest.raises(BadInput) as error:
        env.reset(1)
        env.step(torch.tensor([0]))
        env.step(torch.tensor([0]))
    assert says in str(error.value) and "Shown-v0" in str(error.value) and "\n" not in str(error.value)


def test_numbers_that_float32_rounds_are_in_their_space():
    env = make_vec("Shown-v0", 1, space=box([-0.7], [0.7]), obs=np.array([0.7]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(1)


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


class Judged(VecEnv):
    """Rewards an action with what it is, cut to 0 or 1; an episode of four steps is judged by the action."""

    num_envs, device = 2, torch.device("cpu")

    def reset(self, seeds):
        self.count = 0

    def step(self, actions):
        self.count += 1
        end = torch.tensor([self.count % 4 == 0] * 2)
        return None, actions.clamp(0, 1), end, ~end & False, {"reset_mask": end, "score": actions}


def test_the_return_of_an_episode_is_what_it_is_judged_by():
    env = RecordEpisodeStatistics(Judged())
    env.reset(0)
    steps = [env.step(action) for action in torch.tensor([[3.0, 0.0], [-2.0, 1.0], [5.0, -9.0], [1.0, 1.0]])]
    assert [info["episode_return"].tolist() for *_, info in steps] == [[0.0, 0.0]] * 3 + [[7.0, -7.0]]
    assert [rewards.tolist() for _, rewards, *_ in steps[:2]] == [[1.0, 0.0], [0.0, 1.0]]


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
