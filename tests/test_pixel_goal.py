"""The pixel-goal environment against a slow world of its own: one row, plain Python, tile by tile."""

import dataclasses
import functools
import hashlib
import itertools
import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import envs
from envs.pixels import make_vec, pixel_goal, row_seeds
from envs.pixels.goals import save_goal
from envs.pixels.pixel_goal import PixelGoal, PixelGoalConfig, pack_2bpp, unpack_2bpp
from tests.run_folders import slow_but

torch.set_num_threads(1)
NOOP, A, B, START, UP, DOWN, LEFT, RIGHT = range(8)
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
FACINGS = [*MOVES]
FLOOR, WALL, DOOR = range(3)


# The slow world. A state is (menu open, door open, row, column, facing: the action that faces there).


class SlowMap:
    """A map with its own rules and pictures. Of the environment it takes the map's drawing."""

    def __init__(self, tiles, art):
        self.tiles = {(r, c): int(tiles[r, c]) for r in range(18) for c in range(20)}
        self.art, self.pictures = art, {}

    def move(self, state, action):
        menu, door, row, column, facing = state
        if menu:
            return (0, door, row, column, facing) if action == B else state
        if action == START:
            return (1, door, row, column, facing)
        if action == A:
            row_ahead, column_ahead = np.add((row, column), MOVES[facing]).tolist()
            return (0, 1, row, column, facing) if self.tiles[row_ahead, column_ahead] == DOOR else state
        if action in MOVES:
            there = tuple(np.add((row, column), MOVES[action]).tolist())
            if self.tiles[there] == FLOOR or (self.tiles[there] == DOOR and door):
                row, column = there
            return (0, door, row, column, action)
        return state

    def picture(self, state):
        if state[0]:
            return pixel_goal.menu_picture()
        if state not in self.pictures:
            self.pictures[state] = self.draw(*state[1:])
        return self.pictures[state]

    def draw(self, door, row, column, facing):
        picture = np.zeros((72, 80), np.uint8)
        for y, x in np.ndindex(9, 10):  # the tiles of the view; the map's drawing has 4 more above, 5 left
            top, left = 8 * (row + y), 8 * (column + x)
            picture[8 * y:8 * y + 8, 8 * x:8 * x + 8] = self.art[door, top:top + 8, left:left + 8]
        picture[32:40, 40:48] = pixel_goal.sprite_pictures()[FACINGS.index(facing)]
        return picture

    def states(self, menus=(0, 1)):
        for menu, door, (row, column), facing in itertools.product(menus, (0, 1), sorted(self.tiles), MOVES):
            tile = self.tiles[row, column]
            if tile == FLOOR or (tile == DOOR and door):
                yield menu, door, row, column, facing

    def blocked(self, cell):
        return sum(self.tiles[tuple(np.add(cell, step).tolist())] != FLOOR for step in MOVES.values())

    def nearest(self, goal):
        """Distance of what resembles a goal most, in another cell or under the menu."""
        others = [state for state in self.states((0,)) if state[2:4] != goal[2:4]]
        pictures = [self.picture(state) for state in others] + [pixel_goal.menu_picture()]
        return min(dist([picture], self.picture(goal)[None]) for picture in pictures)


@functools.cache
def slow_maps(env):
    """Those of an environment. Not every map that is drawn can be used: the next one takes its place then."""
    config = env.config
    for attempts in itertools.product(range(3), repeat=config.num_maps):
        drawn = [pixel_goal.draw_map(config.door, (config.map_seed, *place)) for place in enumerate(attempts)]
        if hashlib.sha256(b"".join(art.tobytes() for _, art in drawn)).hexdigest() == env.world_sha256:
            return [SlowMap(*one) for one in drawn]


def dist(frames, goal):
    """Of the newest frames, as many as the goal has, in whole numbers."""
    total = sum(int(np.abs(f.astype(int) - g.astype(int)).sum())
                for f, g in zip(frames[-len(goal):], goal, strict=True))
    return np.float32(total) / np.float32(17280 * len(goal))


def mix(x):
    x %= 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def code_of(state):
    """The environment's number of a state of the first map."""
    return int(np.ravel_multi_index((*state[:4], FACINGS.index(state[4])), pixel_goal.STATES))


def state_of(code):
    *rest, facing = map(int, np.unravel_index(code, pixel_goal.STATES))
    return *rest, FACINGS[facing]


class SlowEnv:
    """One row of the environment, whose episodes begin where its do."""

    def __init__(self, env, goal=None):
        self.config, self.recorded, self.maps = env.config, goal, slow_maps(env)
        self.goals = env._goal_codes.tolist()
        self.starts = [*zip(env._start_codes.tolist(), env._start_goals.tolist(), strict=True)]

    def reset(self, seed):
        self.seed, self.episode = seed, 0
        return self.begin()

    def begin(self):
        draw = mix(mix(self.seed + self.episode) ^ (self.seed >> 32))
        code, number = self.starts[draw % len(self.starts)]
        index, code = divmod(code, pixel_goal.NUM_STATES)
        menu = mix(draw + 1) < self.config.menu_prob * 2**32
        self.map, self.state = self.maps[index], (int(menu), *state_of(code)[1:])
        self.goal = self.recorded
        if self.recorded is None:
            goal = self.goals[index * self.config.num_goals + number] % pixel_goal.NUM_STATES
            self.goal = self.map.picture(state_of(goal))[None]
        self.frames = [self.map.picture(self.state)] * self.config.stack_k
        self.dist = dist(self.frames, self.goal)
        self.episode, self.steps, self.streak = self.episode + 1, 0, 0
        return self.obs()

    def obs(self):
        return np.stack([self.goal[-1]] * self.config.goal_in_obs + self.frames)

    def step(self, action):
        """-> obs, reward, terminated, truncated, dist, final obs or None"""
        config, before = self.config, self.dist
        self.state = self.map.move(self.state, action)
        self.frames = [*self.frames, self.map.picture(self.state)][1:]
        self.dist = after = dist(self.frames, self.goal)
        self.steps += 1
        self.streak = self.streak + 1 if after < config.tau else 0
        terminated, truncated = self.streak >= config.k_consecutive, self.steps >= config.max_steps
        reward = config.step_cost + config.alpha * float(before - after) + config.goal_bonus * terminated
        obs, ended = self.obs(), terminated or truncated
        final = obs if ended else None
        return self.begin() if ended else obs, reward, terminated, truncated, after, final


def guide(env, codes, generator):
    """Actions that often follow a shortest path, in every other episode, so that some succeed."""
    following = env._next.view(-1, 8)[codes]
    way = env.paths.flatten()[following * env.config.num_goals + env._goal[:, None]].argmin(1)
    chance = torch.randint(0, 8, (env.num_envs,), generator=generator)
    guided = (torch.rand(env.num_envs, generator=generator) < 0.7) & (env._episode % 2 == 1)
    return torch.where(guided, way, chance)


WORLDS = {
    "defaults": {},
    "no door": dict(door=False, map_seed=3),
    "no menu": dict(menu_prob=0, map_seed=5, difficulty=6, max_steps=20),
    "menu always": dict(menu_prob=1, map_seed=2, difficulty=9, alpha=10.0, max_steps=40),
    "stack": dict(stack_k=3, difficulty=5, k_consecutive=2, max_steps=30),
    "goals": dict(num_goals=3, goal_in_obs=True, difficulty=8, max_steps=25, step_cost=0.0),
    "maps": dict(num_maps=2, num_goals=2, goal_in_obs=True, stack_k=2, difficulty=6, max_steps=25),
    "packed": dict(pack="2bpp", stack_k=2, difficulty=4, k_consecutive=1, max_steps=8),
    "cut at the goal": dict(difficulty=1, k_consecutive=3, max_steps=3, num_goals=2, goal_in_obs=True),
    "pocket": dict(map_seed=60, difficulty=5, max_steps=20),  # its most enclosed cells are closed off
}


@pytest.fixture(scope="module")
def plain():
    """The default world, two rows of it."""
    return PixelGoal(2)


@pytest.mark.parametrize("name", slow_but(("defaults", "packed", "cut at the goal"), WORLDS))
def test_steps_like_the_slow_world(name):
    env = PixelGoal(3, "cpu", PixelGoalConfig(**WORLDS[name]))
    compare(env, [SlowEnv(env) for _ in range(3)], 11, 200)


@pytest.mark.parametrize("name", slow_but(("no menu",), ("no door", "no menu", "goals", "pocket")))
def test_goals_starts_and_the_lengths_of_ways(name):
    env = PixelGoal(1, "cpu", PixelGoalConfig(**WORLDS[name]))
    config, (world,) = env.config, slow_maps(env)
    goals, starts, open_cells = list(map(state_of, env._goal_codes.tolist())), set(), set()
    for state, number in itertools.product(world.states(), range(config.num_goals)):
        way = int(env.paths[code_of(state), number])
        after = min(int(env.paths[code_of(world.move(state, action)), number]) for action in range(8))
        near = dist([world.picture(state)], world.picture(goals[number])[None]) < config.tau
        assert way == (0 if near else min(after + 1, 10_000))
        if way < 10_000:
            open_cells.add(state[2:4])
        if state[:2] == (0, not config.door) and 0 < way <= (config.difficulty or 9999):
            starts.add((code_of(state), number))
    assert starts == set(zip(env._start_codes.tolist(), env._start_goals.tolist(), strict=True))
    assert len(open_cells) > 0.8 * sum(tile != WALL for tile in world.tiles.values())

    for goal in goals:  # door open, facing down: of what is not closed off the most enclosed that is unique
        assert (goal[:2], goal[4]) == ((0, 1), DOWN) and world.nearest(goal) > config.tau
    for cell in open_cells:
        if world.tiles[cell] == FLOOR and world.blocked(cell) > world.blocked(goals[-1][2:4]):
            assert (0, 1, *cell, DOWN) in goals or world.nearest((0, 1, *cell, DOWN)) <= config.tau


def compare(env, rows, seed, steps):
    generator = torch.Generator().manual_seed(0)
    seeds = row_seeds(seed, range(len(rows)))
    obs, expected = env.reset(seed), [row.reset(its) for row, its in zip(rows, seeds, strict=True)]
    ends = np.zeros(2, int)
    for _ in range(steps):
        assert (env.decode(obs).numpy() == np.stack(expected)).all()
        actions = guide(env, env._codes[:, -1], generator)
        obs, reward, terminated, truncated, info = env.step(actions)
        results = [row.step(action) for row, action in zip(rows, actions.tolist(), strict=True)]
        expected, rewards, terminations, truncations, distances, finals = zip(*results, strict=True)
        assert terminated.tolist() == list(terminations) and truncated.tolist() == list(truncations)
        assert info["dist"].tolist() == [float(d) for d in distances]
        assert reward.numpy() == pytest.approx(np.array(rewards), abs=1e-5)
        assert info["reset_mask"].tolist() == [final is not None for final in finals]
        for found, final in zip(env.decode(info["final_obs"]).numpy(),
                                [final for final in finals if final is not None], strict=True):
            assert (found == final).all()
        ends += terminated.sum().item(), truncated.sum().item()
    assert min(ends) > 0, "no episode of one of the two kinds: nothing was tested"
    assert env.frames(2).dtype == np.uint8 and (env.frames(2) == 255 - 85 * expected[2][-1]).all()
    assert (reward.dtype, obs.dtype) == (torch.float32, torch.uint8)
    assert terminated.dtype == truncated.dtype == info["reset_mask"].dtype == torch.bool


def save(folder, frames, world_sha256, config, **meta):
    fields = dict(action_codec_id="gb8", frames_per_step=24, downsample_h=72, downsample_w=80,
                  stack_k=config.stack_k, tau=config.tau, k_consecutive=config.k_consecutive,
                  pipeline_version="pixel-goal-1", sha256={"world": world_sha256})
    save_goal(folder, frames, **fields | meta)
    return str(folder)


def test_recorded_goals_step_like_the_slow_world(plain, tmp_path):
    config = PixelGoalConfig(stack_k=3, k_consecutive=2, max_steps=30, goal_in_obs=True, menu_prob=0.5)
    (world,) = slow_maps(plain)
    goal = np.stack([world.picture((0, 1, 14, 5, facing)) for facing in (DOWN, RIGHT, RIGHT)])
    folder = save(tmp_path / "goal", goal, plain.world_sha256, config)
    env = PixelGoal(3, "cpu", dataclasses.replace(config, goal_dir=folder))
    compare(env, [SlowEnv(env, goal) for _ in range(3)], 5, 200)


def test_starts_are_drawn_evenly():
    env = PixelGoal(16384, "cpu", PixelGoalConfig())
    env.reset(123)
    codes = env._codes[:, 0]
    menu, starts = codes >= pixel_goal.NUM_STATES // 2, codes % (pixel_goal.NUM_STATES // 2)
    counts = torch.bincount(torch.searchsorted(env._start_codes, starts), minlength=len(env._start_codes))
    expected, freedom = 16384 / len(counts), len(counts) - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    assert float(menu.float().mean()) == pytest.approx(0.25, abs=0.02)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


def test_on_another_device_nothing_is_read_and_any_number_of_rows_takes_as_many_calls():
    """Tensors of the meta device have shapes and no values: reading one would raise."""
    counts = []
    for num_envs in (1, 64):
        env = make_vec("pixel-goal", num_envs, "meta", **WORLDS["maps"])
        env.reset(0)
        with Calls() as calls:
            obs, *rest, info = env.step(torch.zeros(num_envs, dtype=torch.int64, device="meta"))
        counts.append(calls.count)
        assert obs.shape[:2] == (num_envs, env.obs_shape[0])
        assert {x.device.type for x in (obs, *rest, info["dist"], info["reset_mask"])} == {"meta"}
    assert counts[0] == counts[1]


@pytest.mark.parametrize("actions, error, says", [
    (np.zeros(2, int), TypeError, "expected a tensor, got ndarray"),
    (torch.zeros(2, dtype=torch.bool), TypeError, "expected an integer dtype, got torch.bool"),
    (torch.zeros(2, 1, dtype=torch.int64), ValueError, "expected shape (2,), got (2, 1)"),
    (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "expected them on cpu, got meta"),
    (torch.tensor([0, 8]), ValueError, "expected 0..7, got 0..8"),
    (torch.tensor([-1, 7]), ValueError, "expected 0..7, got -1..7"),
])
def test_bad_actions_are_refused_and_change_nothing(actions, error, says, plain):
    plain.reset(0)
    before = plain.state_dict()
    with pytest.raises(error, match=re.escape(says)):
        plain.step(actions)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("num_envs, options, says", [
    (0, {}, "0 environments: expected 1 to 16384"), (16385, {}, "16385 environments: expected 1 to 16384"),
    (1, dict(stack_k=0), "stack_k 0: expected 1 or more"), (1, dict(tau="nan"), "tau: expected 0 < tau <= 1"),
    (1, dict(menu_prob=1.5), "menu_prob 1.5: expected 0 to 1"), (1, dict(alpha="nan"), "alpha: expected a f"),
    (1, dict(k_consecutive=0), "k_consecutive"), (1, dict(max_steps=0), "max_steps"),
    pytest.param(1, dict(tau=0.5), "no map with a cell that no other resembles within tau 0.5",
                 marks=pytest.mark.slow),
    pytest.param(1, dict(num_goals=300, tau=0.15), "num_goals 300: map 0 of map_seed 1 has ",
                 marks=pytest.mark.slow),
    (1, dict(pack="4bpp"), "expected one of none, 2bpp"), (1, dict(goal_dir="nowhere"), "npy is missing"),
    (1, dict(stack="2"), "unknown option 'stack' (did you mean 'stack_k'?)"),
    (1, dict(goal_dir="nowhere", num_maps=2), "needs num_maps 1 and num_goals 1"),
])
def test_bad_options_are_one_line(num_envs, options, says):
    with pytest.raises(envs.BadInput, match=re.escape(says)) as caught:
        make_vec("pixel-goal", num_envs, **options)
    assert "\n" not in str(caught.value)


def test_recorded_goals_that_do_not_fit_are_named(plain, tmp_path):
    (world,), one, stack = slow_maps(plain), PixelGoalConfig(), PixelGoalConfig(stack_k=3)
    picture = world.picture((0, 1, 14, 5, RIGHT))
    other = SlowMap(*pixel_goal.draw_map(True, (2, 0, 0))).picture((0, 1, 9, 9, RIGHT))
    walk = np.stack([world.picture((0, 1, row, 4, DOWN)) for row in (10, 11, 12)])
    for number, (frames, config, meta, says) in enumerate((
            (picture, one, dict(action_codec_id="gb4"), "action_codec_id is 'gb4', expected 'gb8'"),
            (picture, one, dict(frames_per_step=8), "frames_per_step is 8, expected 24"),
            (picture, one, dict(tau=0.1), "tau is 0.1, expected 0.05"),
            (picture, one, dict(k_consecutive=2), "k_consecutive is 2, expected 4"),
            (picture, one, dict(pipeline_version="x"), "pipeline_version is 'x'"),
            (picture, one, dict(sha256={}), "recorded on another map"),
            (picture, stack, dict(stack_k=1), "stack_k is 1, expected 3"),
            (picture[:36], one, dict(downsample_h=36), "downsample_h is 36, expected 72"),
            (other, one, {}, "nothing on the map resembles the goal: the nearest is at distance 0."),
            (walk, stack, {}, "no walk shows them for 4 steps in a row"))):
        folder = save(tmp_path / str(number), frames, plain.world_sha256, config, **meta)
        with pytest.raises(envs.BadInput, match=re.escape(says)):
            PixelGoal(1, "cpu", dataclasses.replace(config, goal_dir=folder))


def test_packed_bytes_and_pixels_are_inverse():
    every = torch.arange(256, dtype=torch.uint8)
    assert unpack_2bpp(every[:0].view(0, 8, 20)).shape == (0, 8, 80)
    assert unpack_2bpp(torch.tensor([0b11100100], dtype=torch.uint8)).tolist() == [0, 1, 2, 3]
    assert torch.equal(pack_2bpp(unpack_2bpp(every.view(4, 64))), every.view(4, 64))
