"""Gymnasium ids as vectorised environments, against single environments stepped by hand."""

import functools
import multiprocessing

import gymnasium
import numpy as np
import pytest
import torch

from envs import BadInput
from envs.pixels import make_vec


class Counter(gymnasium.Env):
    """Counts its steps. Ends after `end` steps; its observations are made by `show(count)`."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, end=5, kind="vector"):
        box = gymnasium.spaces.Box
        self.observation_space = {
            "vector": box(-1e6, 1e6, (2,), np.float64), "grey": box(0, 255, (5, 6), np.uint8),
            "rgb": box(0, 255, (5, 6, 3), np.uint8), "chw": box(0, 255, (3, 5, 6), np.uint8),
            "ram": box(0, 255, (9,), np.uint8), "discrete": gymnasium.spaces.Discrete(9, start=2),
            "cube": box(0, 1, (4, 4, 4)),
        }[kind]
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


class Held(Counter):
    """State in an object that cannot be written as plain data."""

    def reset(self, *, seed=None, options=None):
        self.engine = object()
        return super().reset(seed=seed)


class Start2(Counter):
    """Actions 2, 3 and 4; the reward says which one came."""

    action_space = gymnasium.spaces.Discrete(3, start=2)


@pytest.fixture(scope="module", autouse=True)
def registered():
    torch.set_num_threads(1)
    for kind in (Counter, Held, Start2):
        gymnasium.register(f"{kind.__name__}-v0", kind)
    yield
    for kind in (Counter, Held, Start2):
        del gymnasium.registry[f"{kind.__name__}-v0"]


def by_hand(env_id, seed, actions, **options):
    """One environment with autoreset.  -> first obs, [(obs, reward, terminated, truncated, final or None)]"""
    env = gymnasium.make(env_id, **options)
    first, _ = env.reset(seed=seed)
    steps = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(int(action))
        final = None
        if terminated or truncated:
            final = obs
            obs, _ = env.reset()
        steps.append((obs, reward, terminated, truncated, final))
    env.close()
    return first, steps


def balance(obs):
    """Actions that keep a CartPole upright until its limit."""
    return (obs @ torch.tensor([0.05, 0.1, 1.0, 0.3]) > 0).long()


@pytest.mark.parametrize(("env_id", "steps", "options"), [
    ("CartPole-v1", 120, {"max_episode_steps": "15"}), ("CartPole-v0", 210, {}),
    ("CartPole-v1", 120, {"render_mode": "rgb_array", "max_episode_steps": "15"}),
    ("Acrobot-v1", 120, {"max_episode_steps": "7"}),
])
def test_rows_are_single_environments(env_id, steps, options):
    env, generator = make_vec(env_id, 3, **options), torch.Generator().manual_seed(3)
    first = env.reset(seed=11).clone()
    assert first.dtype == torch.float32 and first.shape == (3, *env.obs_shape)
    obs, actions, results = first, [], []
    for _ in range(steps):
        at_random = torch.randint(0, env.num_actions, (3,), generator=generator)
        actions.append(balance(obs) if env_id == "CartPole-v0" else at_random)
        obs, *rest, info = env.step(actions[-1])
        results.append((obs.clone(), *rest, info["reset_mask"], info["final_obs"].clone()))
    env.close()

    kwargs = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    begun, singles = zip(*(by_hand(env_id, 11 + row, torch.stack(actions)[:, row], **kwargs)
                           for row in range(3)), strict=True)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-5)  # the last bit may be rounded
    close(first, torch.tensor(np.stack(begun)).float())
    ends = cuts = 0
    for (obs, reward, terminated, truncated, mask, final), *expected in zip(results, *singles, strict=True):
        shown, rewards, terminations, truncations, finals = zip(*expected, strict=True)
        assert terminated.tolist() == list(terminations) and truncated.tolist() == list(truncations)
        assert reward.dtype == torch.float32 and reward.tolist() == list(rewards)
        assert torch.equal(mask, terminated | truncated)
        close(obs, torch.from_numpy(np.stack(shown)))
        finals = [torch.from_numpy(one) for one in finals if one is not None]
        close(final, torch.stack(finals) if finals else torch.empty(0, *env.obs_shape))
        ends, cuts = ends + int(terminated.sum()), cuts + int(truncated.sum())
    assert ends + cuts >= 5 or env_id == "CartPole-v0"  # the test has seen what it is about
    assert cuts > 0


def test_an_episode_may_end_and_be_cut_in_one_step():
    env = make_vec("Counter-v0", 2, max_episode_steps=3, end="3")
    first = env.reset(seed=5).clone()
    for step in range(3):
        obs, _, terminated, truncated, info = env.step(torch.tensor([0, 2]))
        assert (terminated & truncated).all() if step == 2 else not (terminated | truncated).any()
        assert len(info["final_obs"]) == (2 if step == 2 else 0)
    assert info["final_obs"][:, 0].tolist() == [3, 3] and obs[:, 0].tolist() == [0, 0]
    assert torch.equal(info["final_obs"][:, 1], first[:, 1]) and not torch.equal(obs[:, 1], first[:, 1])
    assert first[0, 1] != first[1, 1]  # each row has a seed of its own


@pytest.mark.parametrize(("kind", "shape", "dtype", "high"), [
    ("vector", (2,), torch.float32, 1.0), ("ram", (9,), torch.float32, 255.0),
    ("grey", (1, 5, 6), torch.uint8, 255.0), ("rgb", (3, 5, 6), torch.uint8, 255.0),
    ("chw", (3, 5, 6), torch.uint8, 255.0), ("discrete", (9,), torch.float32, 1.0),
])
def test_observation_kinds(kind, shape, dtype, high):
    env = make_vec("Counter-v0", 2, kind=kind, end=2)
    obs = env.reset(seed=1)
    assert (env.obs_shape, env.obs_dtype, env.obs_high) == (shape, dtype, high)
    assert obs.dtype == dtype and obs.shape == (2, *shape)
    single = Counter(kind=kind)
    single.reset(seed=1)
    for _ in range(2):
        obs, *_, info = env.step(torch.tensor([1, 0]))
        seen = single.step(1)[0]
    expected = torch.as_tensor(seen)
    if kind == "discrete":
        expected = torch.nn.functional.one_hot(expected - 2, 9)
    elif kind == "rgb":
        expected = expected.permute(2, 0, 1)
    assert torch.equal(info["final_obs"][0], expected.reshape(shape).to(dtype))
    picture = env.frames(0)
    if dtype == torch.float32:
        assert picture is None
    else:
        assert picture.shape == ((5, 6) if kind == "grey" else (5, 6, 3))
    if kind == "rgb":
        assert (picture == single.reset(seed=1)[0]).all()


def test_pictures_are_rendered_where_that_was_asked_for():
    env = make_vec("CartPole-v1", 2, render_mode="rgb_array")
    env.reset(seed=1)
    try:
        import pygame  # noqa: F401
    except ImportError:
        with pytest.raises(BadInput, match="pygame"):
            env.frames(1)
    else:
        assert env.frames(1).shape == (400, 600, 3)
    assert make_vec("CartPole-v1", 2).frames(1) is None


def test_actions_start_where_the_space_starts_and_are_checked():
    env = make_vec("Start2-v0", 3)
    env.reset(seed=1)
    assert env.step(torch.tensor([0, 1, 2], dtype=torch.int32))[1].tolist() == [2, 3, 4]
    for wrong in (torch.tensor([0, 1, 3]), torch.tensor([-1, 0, 0]), torch.tensor([0, 1])):
        with pytest.raises(ValueError):
            env.step(wrong)
    with pytest.raises(TypeError):
        env.step(torch.tensor([0.0, 1, 1]))


@pytest.mark.parametrize(("env_id", "options", "message"), [
    ("NoSuchThing-v0", {}, "NoSuchThing"), ("CartPole-v7", {}, "CartPole"),
    ("no_such_module:X-v0", {}, "no_such_module"), ("CartPole-v1", {"gravity": "5"}, "gravity"),
    ("Acrobot-v1", {"max_episode_steps": "0"}, "max_episode_steps"), ("Pendulum-v1", {}, "discrete actions"),
    ("Blackjack-v1", {}, "Tuple"), ("Counter-v0", {"kind": "cube"}, "Box"),
    ("Counter-v0", {"knid": "grey"}, "knid"),
])
def test_bad_input_is_one_line(env_id, options, message):
    with pytest.raises(BadInput) as error:
        make_vec(env_id, 2, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_log_meta():
    env = make_vec("CartPole-v1", 2)
    assert env.log_meta == {"num_actions": 2, "action_codec_id": "gymnasium:CartPole-v1",
                            "frames_per_step": 1, "stack_k": 1, "goal_dir": None, "goal_sha256": None}


def played(env, steps, seed):
    """What each step returned, by random actions of that seed."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        actions = torch.randint(0, env.num_actions, (3,), generator=generator)
        obs, reward, terminated, truncated, info = env.step(actions)
        seen += [obs.clone(), reward, terminated, truncated, info["final_obs"].clone()]
    return seen


def continued(env_id, folder, **options):
    """In a process of its own, whose environment has another past."""
    env = make_vec(env_id, 3, **options)
    env.reset(seed=99)
    obs = env.load_state_dict(torch.load(folder / "state.pt", weights_only=True)).clone()
    torch.save([obs, *played(env, 60, 4)], folder / "out.pt")


@pytest.mark.slow
@pytest.mark.parametrize("env_id, options", [
    ("CartPole-v1", dict(render_mode="rgb_array")), ("CartPole-v1", {}), ("FrozenLake-v1", {}),
    ("Taxi-v4", {})])
def test_a_saved_environment_continues_bit_for_bit_in_a_fresh_process(env_id, options, tmp_path):
    env = make_vec(env_id, 3, max_episode_steps=13, **options)
    env.reset(seed=1)
    obs = played(env, 40, 2)[-5]
    torch.save(env.state_dict(), tmp_path / "state.pt")
    seen = [obs, *played(env, 60, 4)]
    assert sum(len(final) for final in seen[5::5]) >= 5  # new starts were drawn
    process = multiprocessing.get_context("spawn").Process(
        target=continued, args=(env_id, tmp_path), kwargs=dict(max_episode_steps=13, **options))
    process.start()
    process.join(120)
    other = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(other) == len(seen)
    assert all(torch.equal(left, right) for left, right in zip(seen, other, strict=True))


def test_what_cannot_be_saved_says_so():
    env = make_vec("Held-v0", 2)
    env.reset(seed=1)
    assert env.state_dict() is None
    env = make_vec("Counter-v0", 2)
    env.reset(seed=1)
    with pytest.raises(BadInput, match="shape"):
        make_vec("Counter-v0", 3).load_state_dict(env.state_dict())
