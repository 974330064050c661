"""Thousands of small Game-Boy-like worlds in search of a picture, simulated and drawn as tensors.

    env = make_vec("pixel-goal", 1024, difficulty=8)
    obs = env.reset(seed=1)                                # (1024, 1, 72, 80) uint8, shades 0 (lightest) to 3
    obs, reward, terminated, truncated, info = env.step(actions)

A player walks over a map of 18 x 20 tiles; the camera keeps it in the middle of a view of 9 x 10 tiles. A
opens the door that the player faces, START shows a menu that hides the map, B closes it. The agent must make
the screen look like the goal picture and keep it so (envs/pixels/goals.py: distance, streak and reward).

One world has 5,760 states: menu x door x row x column x facing. All that happens in it is therefore written
down once, in tables: where each action leads, which piece of the map is seen, how far that is from the goal.
A step is a few gathers, for one world or 16,384, with no Python per environment and no wait for the device.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Literal

import numpy as np
import torch

from envs import BadInput
from envs.pixels import VecEnv
from envs.pixels.goals import GoalConfig, goal_step, l1_distance, load_goal

ACTIONS = ["NOOP", "A", "B", "START", "UP", "DOWN", "LEFT", "RIGHT"]
NOOP, A, B, START, UP, DOWN, LEFT, RIGHT = range(8)
CODEC = "gb8"  # the eight actions above, in this order
FRAMES_PER_STEP = 24  # emulated frames that one tile stands for
PIPELINE = "pixel-goal-1"  # change it when the same world would be drawn otherwise

ROWS, COLUMNS, TILE = 18, 20, 8
VIEW_ROWS, VIEW_COLUMNS = 9, 10
HEIGHT, WIDTH = VIEW_ROWS * TILE, VIEW_COLUMNS * TILE  # 72 x 80 pixels
ABOVE, LEFT_OF = 4, 5  # tiles of the view above and left of the player
PAD_ROWS, PAD_COLUMNS = ROWS + VIEW_ROWS - 1, COLUMNS + VIEW_COLUMNS - 1
FARTHEST = HEIGHT * WIDTH * 3  # sum of differences between a white screen and a black one
CENTRE = np.s_[ABOVE * TILE:(ABOVE + 1) * TILE, LEFT_OF * TILE:(LEFT_OF + 1) * TILE]

FLOOR, WALL, DOOR = range(3)
STATES = (2, 2, ROWS, COLUMNS, 4)  # menu open, door open, row, column, facing (up, down, left, right)
NUM_STATES = int(np.prod(STATES))
STEP = [(-1, 0), (1, 0), (0, -1), (0, 1)]  # (row, column) for UP, DOWN, LEFT, RIGHT


@dataclasses.dataclass(frozen=True)
class PixelGoalConfig(GoalConfig):
    map_seed: int = 1
    """which map"""
    num_maps: int = 1
    """maps, of which each episode draws one"""
    num_goals: int = 1
    """goals per map, of which each episode draws one; with several of them set goal_in_obs"""
    goal_in_obs: bool = False
    """show the goal picture as the first channel of the observation"""
    goal_dir: str = ""
    """folder of a recorded goal (tools/make_goal.py); empty: the map's most enclosed cell, facing down"""
    difficulty: int = 0
    """longest path from a start to the goal [actions]; 0: starts everywhere"""
    door: bool = True
    """a wall with one door cuts the map in two"""
    menu_prob: float = 0.25
    """share of the episodes that begin with the menu open"""
    stack_k: int = 1
    """frames in an observation, newest last"""
    pack: Literal["none", "2bpp"] = "none"
    """2bpp: observations hold 4 pixels a byte, low bits first; `decode` unpacks them"""

    def __post_init__(self):
        super().__post_init__()
        for name, least in dict(num_maps=1, num_goals=1, stack_k=1, difficulty=0, map_seed=0).items():
            if getattr(self, name) < least:
                raise BadInput(f"pixel-goal: {name} {getattr(self, name)}: expected {least} or more")
        if not 0 <= self.menu_prob <= 1:
            raise BadInput(f"pixel-goal: menu_prob {self.menu_prob}: expected 0 to 1")
        if self.goal_dir and self.num_maps * self.num_goals > 1:
            raise BadInput("pixel-goal: a recorded goal (goal_dir) needs num_maps 1 and num_goals 1")


class PixelGoal(VecEnv):
    """The worlds. `paths` (num_maps * NUM_STATES, num_goals): length of the shortest solution [actions]."""

    Config = PixelGoalConfig
    num_actions, action_names, has_goal = len(ACTIONS), ACTIONS, True
    obs_dtype, obs_high, scaling = torch.uint8, 3.0, "0..3 to 0..1"

    def __init__(self, num_envs: int, device="cpu", config: PixelGoalConfig | None = None):
        if not 1 <= num_envs <= 16_384:
            raise BadInput(f"pixel-goal: {num_envs} environments: expected 1 to 16384")
        self.config = config = config or PixelGoalConfig()
        self.num_envs, self.device = num_envs, torch.device(device)
        self.goal_frames, goal_meta = None, {}
        if config.goal_dir:
            self.goal_frames, goal_meta = load_goal(
                config.goal_dir, action_codec_id=CODEC, frames_per_step=FRAMES_PER_STEP, downsample_h=HEIGHT,
                downsample_w=WIDTH, stack_k=config.stack_k, tau=config.tau,
                k_consecutive=config.k_consecutive, pipeline_version=PIPELINE)
        self._build()
        if config.goal_dir and goal_meta["sha256"].get("world") != self.world_sha256:
            raise BadInput(f"{config.goal_dir}: sha256 world is {goal_meta['sha256'].get('world')}, expected "
                           f"{self.world_sha256}: it was recorded on another map (map_seed, door)")
        K = config.stack_k
        channels = K + config.goal_in_obs
        self.obs_shape = (channels, HEIGHT, WIDTH)
        self._codes = self._zeros(channels)  # what is seen: [the goal's code,] K states, newest last
        self._final = self._codes.clone()  # before the reset
        self._goal = self._zeros()  # which of the map's goals
        self._seed, self._episode = self._zeros(), self._zeros()
        self._steps, self._streak = self._zeros(), self._zeros()
        self._dist = self._zeros(dtype=torch.float32)
        self._canvas = self._new_canvas(num_envs)
        self._obs = self._canvas[0]
        self.log_meta = dict(num_actions=8, action_codec_id=CODEC, frames_per_step=FRAMES_PER_STEP, stack_k=K,
                             goal_dir=config.goal_dir or None, goal_sha256=self.goal_sha256)

    def _zeros(self, *shape, dtype=torch.int64):
        return torch.zeros(self.num_envs, *shape, dtype=dtype, device=self.device)

    # The protocol

    def reset(self, seed: int | list[int]) -> torch.Tensor:
        self._seed[:] = torch.tensor(self.row_seeds(seed))
        self._episode.zero_()
        self._begin(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self._render(self._codes, self._canvas)

    def step(self, actions: torch.Tensor):
        actions = self.check_actions(actions)
        codes, newest = self._codes, self._codes[:, -1]
        if self.config.stack_k > 1:
            codes[:, -self.config.stack_k:-1] = codes[:, 1 - self.config.stack_k:].clone()
        torch.index_select(self._next, 0, torch.add(actions, newest, alpha=8), out=newest)
        dist = self._distance()
        reward, terminated, truncated, self._streak, self._steps = goal_step(
            dist, self._dist, self._streak, self._steps, self.config)
        done = terminated | truncated
        info = _Info(self, dist=dist, reset_mask=done)
        self._dist = dist
        if self.device.type != "cpu" or bool(done.any()):  # asking would make the host wait for a GPU
            self._final.copy_(codes)
            self._begin(done)
        return self._render(codes, self._canvas), reward, terminated, truncated, info

    def state_dict(self) -> dict:
        return {name: getattr(self, name).to("cpu", copy=True) for name in self._STATE}

    def load_state_dict(self, state: dict) -> torch.Tensor:
        for name in self._STATE:
            setattr(self, name, state[name].to(self.device).clone())
        return self._render(self._codes, self._canvas)

    _STATE = ("_codes", "_goal", "_seed", "_episode", "_steps", "_streak", "_dist")

    def decode(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as pixels: (..., 72, 20) packed -> (..., 72, 80); those not packed as they are."""
        return unpack_2bpp(obs) if self.config.pack == "2bpp" else obs

    def frames(self, row: int = 0) -> np.ndarray:
        """The newest frame of a row as grey values, uint8 (72, 80)."""
        return 255 - 85 * self.decode(self._obs[row, -1]).cpu().numpy()

    def goal_picture(self, row: int = 0) -> np.ndarray:
        """The picture that a row is looking for (the last of a stack) as grey values, uint8 (72, 80)."""
        code = self._goals_seen()[row].expand(1, self.obs_shape[0])
        return 255 - 85 * self.decode(self._render(code, self._new_canvas(1)))[0, -1].cpu().numpy()

    # One step, in parts

    def _goals_seen(self):
        """The code of each row's goal picture.  -> (num_envs,)"""
        its_map = self._codes[:, -1] // NUM_STATES
        return self._goal_codes[its_map * self.config.num_goals + self._goal]

    def _distance(self):
        """Distance of the newest frame (of the stack, if the goal is a stack) to each row's goal."""
        tables = self._distances  # 1 or stack_k of them, (codes * goals)
        if len(tables) == 1:
            key = torch.add(self._goal, self._codes[:, -1], alpha=self.config.num_goals)
            return tables[0].index_select(0, key)
        seen = self._codes[:, -len(tables):]
        total = torch.stack([table[seen[:, k]] for k, table in enumerate(tables)]).sum(0)
        return total / torch.full((), len(tables) * FARTHEST, device=self.device)  # as l1_distance divides

    def _begin(self, mask):
        """New episodes where mask is set. Which ones follows from (seed, episode), whatever other rows do."""
        draw = hash32(hash32(self._seed + self._episode) ^ (self._seed >> 32))
        slot = draw % len(self._start_codes)
        menu = hash32(draw + 1) < int(self.config.menu_prob * 2**32)  # a float would compare in float32
        code = self._start_codes[slot] + menu * (NUM_STATES // 2)
        goal = self._start_goals[slot]
        self._codes[:, -self.config.stack_k:] = torch.where(
            mask[:, None], code[:, None], self._codes[:, -self.config.stack_k:])
        self._goal = torch.where(mask, goal, self._goal)
        if self.config.goal_in_obs:
            self._codes[:, 0] = self._goals_seen()
        self._episode += mask
        self._steps.masked_fill_(mask, 0)
        self._streak.masked_fill_(mask, 0)
        self._dist = torch.where(mask, self._distance(), self._dist)

    def _new_canvas(self, n):
        """New observations of n rows, and views into them: their words, and those of the player's tile."""
        width = WIDTH if self.config.pack == "none" else WIDTH // 4
        obs = torch.zeros(n, self.obs_shape[0], HEIGHT, width, dtype=torch.uint8, device=self.device)
        words = obs.view(self._windows.dtype).view(-1, HEIGHT, VIEW_COLUMNS)
        return obs, words.flatten(1), words[:, ABOVE * TILE:(ABOVE + 1) * TILE, LEFT_OF]

    def _render(self, codes, canvas):
        """Draw (n, channels) codes.  -> the observations of the canvas, (n, channels, 72, 80 or 20)"""
        obs, words, player = canvas
        codes = codes.flatten()
        # index_select is the cheapest gather there is, which counts where one world is stepped at a time.
        torch.index_select(self._windows, 0, self._window_of.index_select(0, codes), out=words)
        player.copy_(self._sprites.index_select(0, self._sprite_of.index_select(0, codes)))
        return obs

    # The tables

    def _build(self):
        """Draw the maps and write down what each action does, what each state shows and how far that is."""
        config = self.config
        draw = _drawn_world if self.goal_frames is None else _World
        worlds = [draw(config, index, self.goal_frames) for index in range(config.num_maps)]
        base = np.arange(config.num_maps) * NUM_STATES
        pictures = np.concatenate([*(world.pictures for world in worlds), _screen(menu_picture())[None]])
        sprites = [*sprite_pictures(), menu_picture()[CENTRE]]
        window_of, sprite_of = [], []
        for index, world in enumerate(worlds):
            _, door, row, column, facing = np.unravel_index(np.arange(NUM_STATES), STATES)
            image = np.where(world.menu_open, 2 * config.num_maps, 2 * index + door)
            place = np.where(world.menu_open, 0, column * PAD_ROWS + row)
            window_of.append(image * COLUMNS * PAD_ROWS + place)
            sprite_of.append(np.where(world.menu_open, 4, facing))
        goals = np.concatenate([base[i] + world.goal_states for i, world in enumerate(worlds)])
        goal_codes = torch.as_tensor(goals)
        if self.goal_frames is not None:  # its picture is one more thing to be seen
            newest = self.goal_frames.reshape(-1, HEIGHT, WIDTH)[-1]
            pictures = np.concatenate([pictures, _screen(newest)[None]])
            sprites.append(newest[CENTRE])
            window_of.append([(2 * config.num_maps + 1) * COLUMNS * PAD_ROWS])
            sprite_of.append([5])
            goal_codes = torch.tensor([config.num_maps * NUM_STATES])
        self._goal_codes = goal_codes.to(self.device)
        self._windows = self._words(_strips(pictures)).to(self.device).flatten()
        rows = len(pictures) * COLUMNS * PAD_ROWS - VIEW_ROWS + 1
        self._windows = self._windows.as_strided((rows, HEIGHT * VIEW_COLUMNS), (TILE * VIEW_COLUMNS, 1))
        self._sprites = self._words(np.stack(sprites)).to(self.device)

        def table(parts, dtype=torch.int64):
            return torch.as_tensor(np.concatenate(parts), dtype=dtype, device=self.device)

        self._window_of, self._sprite_of = table(window_of), table(sprite_of)
        self._next = table([(base[i] + world.next).ravel() for i, world in enumerate(worlds)])
        self._distances = [
            table([world.distances[k].ravel() for world in worlds], torch.float32)
            for k in range(len(worlds[0].distances))]
        if len(self._distances) > 1:  # totals, so that the mean over a stack is exact
            self._distances = [(distance * FARTHEST).round() for distance in self._distances]
        self.paths = table([world.paths for world in worlds], torch.int16)
        self._start_codes = table([base[i] + world.start_states for i, world in enumerate(worlds)])
        self._start_goals = table([world.start_goals for world in worlds])
        self.world_sha256 = hashlib.sha256(b"".join(world.pictures.tobytes() for world in worlds)).hexdigest()
        picture = self.goal_frames
        if picture is None:
            picture = np.stack([world.goal_pictures for world in worlds])
        self.goal_sha256 = hashlib.sha256(np.ascontiguousarray(picture)).hexdigest()

    def _words(self, pixels: np.ndarray) -> torch.Tensor:
        """(..., 8 n) pixels as (..., n) words of eight pixels: what is copied at a time."""
        pixels = torch.as_tensor(np.ascontiguousarray(pixels))
        if self.config.pack == "none":
            return pixels.view(torch.int64).squeeze(-1)
        return pack_2bpp(pixels).view(torch.int16).squeeze(-1)


class _Info(dict):
    """`final_obs` is drawn when it is asked for: only those rows, and only then does a GPU's host wait."""

    def __init__(self, env, **values):
        super().__init__(values)
        self.env = env

    def __missing__(self, key):
        if key != "final_obs":
            raise KeyError(key)
        codes = self.env._final[self["reset_mask"]]
        self[key] = self.env._render(codes, self.env._new_canvas(len(codes)))
        return self[key]


class _World:
    """One map with its goals, as NumPy tables over its NUM_STATES states.

    next (NUM_STATES, 8); distances (1 or K, NUM_STATES, num_goals); paths (NUM_STATES, num_goals) [actions];
    start_states and start_goals (starts,); goal_states (num_goals,), goal_pictures (num_goals, 72, 80);
    pictures (2, 208, 232) of the map and what surrounds it, with the door closed and open.
    """

    def __init__(self, config, index, goal_frames):
        self.menu_open, self.door_open, self.row, self.column, self.facing = np.unravel_index(
            np.arange(NUM_STATES), STATES)
        self.sprites = sprite_pictures()
        for attempt in range(20):  # not every map has a cell that no other resembles
            self.tiles, self.pictures = draw_map(config.door, (config.map_seed, index, attempt))
            self.next = transitions(self.tiles)
            tile = self.tiles[self.row, self.column]
            self.legal = (tile == FLOOR) | ((tile == DOOR) & (self.door_open == 1))
            self.views = np.stack([*map(self._view, range(NUM_STATES // 2)), menu_picture()])
            if self._own_goals(config):
                break
        else:
            raise BadInput(f"pixel-goal: map_seed {config.map_seed}: no map with a cell that no other "
                           f"resembles within tau {config.tau}")
        if goal_frames is not None:
            self._recorded_goal(config, goal_frames)
        if len(self.goal_states) < config.num_goals:
            raise BadInput(f"pixel-goal: num_goals {config.num_goals}: map {index} of map_seed "
                           f"{config.map_seed} has {len(self.goal_states)} cells that no other resembles "
                           f"within tau {config.tau}")
        self.goal_pictures = self.views[self.goal_states]
        del self.views  # 17 MB
        self.paths = shortest_paths(self.next, self._nearest_walks(1) < config.tau)
        starts = self.legal & (self.menu_open == 0) & (self.door_open == int(not config.door))
        longest = min(config.difficulty or UNREACHABLE, UNREACHABLE - 1)
        starts = starts[:, None] & (self.paths > 0) & (self.paths <= longest)
        self.start_states, self.start_goals = np.nonzero(starts)
        if not len(self.start_states):
            raise BadInput(f"pixel-goal: difficulty {config.difficulty}: no start from which the goal can be "
                           "reached" + " in so few actions" * (config.difficulty > 0))

    def _own_goals(self, config) -> bool:
        """The most enclosed cells, facing down, door open; of these the first that nothing else resembles."""
        blocked = sum(np.roll(self.tiles != FLOOR, (-dy, -dx), (0, 1)).astype(int) for dy, dx in STEP)
        cells = sorted(map(tuple, np.argwhere(self.tiles == FLOOR).tolist()), key=lambda cell: -blocked[cell])
        found, distances = [], []
        for row, column in cells:
            goal = np.ravel_multi_index((0, 1, row, column, DOWN - UP), STATES)
            beside = abs(self.row - row) + abs(self.column - column) == 1
            beside &= self.legal & (self.menu_open == 0)
            if not beside.any() or self._distances(self.views[goal], beside).min() <= config.tau:
                continue  # most that fail do so here, without a look at the whole map
            # A pocket closed off by obstacles is the most enclosed place of all, and not worth a visit.
            if connected(self.tiles, (row, column)).sum() < 0.8 * (self.tiles != WALL).sum():
                continue
            distance = self._distances(self.views[goal])
            here = (self.row == row) & (self.column == column) & (self.menu_open == 0)
            if distance[self.legal & ~here].min() > config.tau:
                found.append(goal)
                distances.append(distance)
                if len(found) == config.num_goals:
                    break
        self.goal_states = np.array(found, dtype=np.int64)
        self.distances = np.stack(distances, -1)[None] if found else None
        return bool(found)

    def _recorded_goal(self, config, goal_frames):
        """The goal of goal_dir: one picture, or one for each frame of the stack."""
        frames = goal_frames.reshape(-1, HEIGHT, WIDTH)
        self.distances = np.stack([self._distances(frame) for frame in frames])[..., None]
        nearest = self._nearest_walks(1).min()
        if nearest >= config.tau:
            raise BadInput(f"{config.goal_dir}: nothing on the map resembles the goal: the nearest is at "
                           f"distance {nearest:.3f}, tau is {config.tau}")
        alike = self.legal & (self.distances[-1, :, 0] < config.tau)  # its newest frame
        cells = sorted(set(zip(self.row[alike].tolist(), self.column[alike].tolist(), strict=True)))
        if len(cells) > 1:  # the menu, for one, looks the same wherever it is opened
            raise BadInput(f"{config.goal_dir}: {len(cells)} cells look like the goal within tau "
                           f"{config.tau}, (row, column) {cells[0]} to {cells[-1]}: expected one")
        if len(frames) > 1 and self._nearest_walks(config.k_consecutive).min() >= config.tau:
            raise BadInput(f"{config.goal_dir}: its frames differ so much that no walk shows them for "
                           f"{config.k_consecutive} steps in a row: set k_consecutive 1, or record a rest")
        self.goal_states = np.array([self.distances[-1, :, 0].argmin() % (NUM_STATES // 2)])

    def _nearest_walks(self, windows):
        """Distance of the best walk that ends in each state, over as many stacks in a row as `windows`.

        -> (NUM_STATES, num_goals): of one frame its distance; of several the smallest mean that any walk of
        so many steps can have, inf where there is none that keeps to the map.
        """
        depth = len(self.distances)
        cost = np.zeros((depth + windows - 1, *self.distances.shape[1:]), np.float32)
        for start in range(windows):
            cost[start:start + depth] += self.distances
        best = np.where(self.legal[:, None], cost[0], np.float32(np.inf))
        for here in cost[1:]:
            before = np.full_like(best, np.inf)
            for action in range(len(ACTIONS)):
                np.minimum.at(before, self.next[:, action], best)
            best = before + here
        return best / (depth * windows)

    def _view(self, state) -> np.ndarray:
        """What a state with the menu closed shows, (72, 80)."""
        top, left = self.row[state] * TILE, self.column[state] * TILE
        picture = self.pictures[self.door_open[state], top:top + HEIGHT, left:left + WIDTH].copy()
        picture[CENTRE] = self.sprites[self.facing[state]]
        return picture

    def _distances(self, goal, states=slice(None)) -> np.ndarray:
        """Distance of what each state shows, or each of `states`, to a goal picture.  (72, 80) -> (n,)"""
        numbers = np.arange(NUM_STATES)[states].clip(max=NUM_STATES // 2)  # all menus look the same
        shown, which = np.unique(numbers, return_inverse=True)
        parts = np.split(self.views[shown], range(128, len(shown), 128))  # the differences stay in the cache
        goal = torch.as_tensor(goal)
        return np.concatenate([l1_distance(torch.as_tensor(part)[:, None], goal) for part in parts])[which]


_drawn_world = functools.lru_cache(maxsize=64)(_World)  # environments of training and evaluation share them


# The world's rules and its looks


UNREACHABLE = 10_000


def transitions(tiles) -> np.ndarray:
    """Where each of the 8 actions leads from each state.  tiles (18, 20) -> (NUM_STATES, 8) states"""
    menu, door, row, column, facing = np.unravel_index(np.arange(NUM_STATES), STATES)
    step = np.array(STEP)

    def state(menu=menu, door=door, row=row, column=column, facing=facing):
        return np.ravel_multi_index((menu, door, row, column, facing), STATES)

    def ahead(direction):
        there = row + step[direction, 0], column + step[direction, 1]
        there = there[0].clip(0, ROWS - 1), there[1].clip(0, COLUMNS - 1)
        return *there, tiles[there]

    following = np.repeat(state()[:, None], len(ACTIONS), axis=1)
    following[:, START] = state(menu=1)
    following[:, A] = state(door=np.where(ahead(facing)[2] == DOOR, 1, door))
    for direction, action in enumerate((UP, DOWN, LEFT, RIGHT)):
        there_row, there_column, tile = ahead(direction)
        free = (tile == FLOOR) | ((tile == DOOR) & (door == 1))
        following[:, action] = state(row=np.where(free, there_row, row), facing=direction,
                                     column=np.where(free, there_column, column))
    hidden = menu == 1  # only B does anything under the menu
    following[hidden] = state()[hidden, None]
    following[:, B] = state(menu=0)
    return following


def shortest_paths(following, reached) -> np.ndarray:
    """Fewest actions to a state where `reached`, by breadth-first search from there.

    following (S, 8), reached (S, G) -> (S, G) int16, UNREACHABLE where there is no way
    """
    paths = np.where(reached, 0, UNREACHABLE).astype(np.int16)
    while True:
        shorter = paths.copy()
        for action in range(following.shape[1]):
            np.minimum(shorter, paths[following[:, action]] + 1, out=shorter)
        if (shorter == paths).all():
            return paths
        paths = shorter


def connected(tiles, cell) -> np.ndarray:
    """The cells that can be walked to from a cell, doors included.  tiles (18, 20) -> (18, 20) bool"""
    inside = np.zeros(tiles.shape, bool)
    inside[cell] = True
    while True:
        grown = inside.copy()
        for step in STEP:
            grown |= np.roll(inside, step, (0, 1)) & (tiles != WALL)  # nothing rolls round: walls all about
        if (grown == inside).all():
            return inside
        inside = grown


def draw_map(with_door, seeds):
    """-> tiles (18, 20), pictures (2, 208, 232) of them and what surrounds them, door closed and open"""
    rng = np.random.default_rng(seeds)
    tiles = np.full((ROWS, COLUMNS), WALL)
    tiles[1:-1, 1:-1] = np.where(rng.random((ROWS - 2, COLUMNS - 2)) < 0.14, WALL, FLOOR)
    wall, door = rng.integers(7, 13), rng.integers(3, ROWS - 3)
    if with_door:
        tiles[:, wall] = WALL
        tiles[door, wall] = DOOR
        tiles[door, [wall - 1, wall + 1]] = FLOOR
    # Regions of different shade: without them the picture says little of how far the goal is.
    points = rng.random((4, 2)) * (ROWS, COLUMNS)
    y, x = np.mgrid[:ROWS, :COLUMNS]
    region = ((y[..., None] - points[:, 0]) ** 2 + (x[..., None] - points[:, 1]) ** 2).argmin(-1)
    floors = [_tile(0, 1), _tile(1, 3), _tile(1, 0), _tile(2, 0)]
    pictures = []
    for door_tile in (_door(closed=True), _door(closed=False)):
        picture = np.full((PAD_ROWS * TILE, PAD_COLUMNS * TILE), 3, np.uint8)
        for (row, column), kind in np.ndenumerate(tiles):
            art = {FLOOR: floors[region[row, column]], WALL: _wall(), DOOR: door_tile}[int(kind)]
            top, left = (row + ABOVE) * TILE, (column + LEFT_OF) * TILE
            picture[top:top + TILE, left:left + TILE] = art
        pictures.append(picture)
    return tiles, np.stack(pictures)


def _tile(shade, dots):
    art = np.full((TILE, TILE), shade, np.uint8)
    art[1::4, 1::4] = art[3::4, 3::4] = dots
    return art


def _wall():
    art = np.full((TILE, TILE), 3, np.uint8)
    art[3, :] = art[7, :] = art[:3, 3] = art[4:7, 7] = 2
    return art


def _door(closed):
    art = np.full((TILE, TILE), 1 if closed else 0, np.uint8)
    art[:, 0] = art[:, -1] = 3
    if closed:
        art[::2, 1:-1] = 2
        art[4, 5] = 3
    return art


def sprite_pictures() -> np.ndarray:
    """The player facing up, down, left, right: (4, 8, 8) shades, a beetle with its dark head in front.

    Half of its pixels tell where it faces. With a few pixels of face a small network takes facing the door
    for standing beside it, and its greedy policy pushes the wrong button there for ever.
    """
    rows = "03333330 33033033 33333333 03333330 30000003 30011003 30011003 03333330"
    up = np.array([list(map(int, row)) for row in rows.split()], np.uint8)
    left = np.rot90(up)
    return np.stack([up, up[::-1], left, left[:, ::-1]])


def menu_picture() -> np.ndarray:
    """The full-screen menu, (72, 80) shades: a frame with lines of writing."""
    picture = np.zeros((HEIGHT, WIDTH), np.uint8)
    picture[2:-2, 2:-2] = 3
    picture[4:-4, 4:-4] = 0
    for line in range(6):
        picture[10 + 9 * line:14 + 9 * line, 16:66 - 7 * (line * 3 % 5):2] = 3
    picture[10:14, 8:12] = 3
    return picture


def _screen(picture) -> np.ndarray:
    """A picture of 72 x 80 in the corner of a padded map's canvas."""
    canvas = np.zeros((PAD_ROWS * TILE, PAD_COLUMNS * TILE), np.uint8)
    canvas[:HEIGHT, :WIDTH] = picture
    return canvas


def _strips(pictures) -> np.ndarray:
    """(I, 208, 232) pictures -> (I, 20, 208, 80): for each column of the map the strip that its view is from.

    Within a strip the view from any row is one contiguous run of bytes, which copies fastest.
    """
    lefts = [column * TILE for column in range(COLUMNS)]
    return np.stack([pictures[:, :, left:left + WIDTH] for left in lefts], axis=1)


# Bits


def hash32(x: torch.Tensor) -> torch.Tensor:
    """A well-mixed 32-bit number from each integer (multiply-xorshift), the same on every device."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def pack_2bpp(pixels: torch.Tensor) -> torch.Tensor:
    """Shades 0..3 as 2 bits, 4 pixels a byte, low bits first.  (..., 4 n) uint8 -> (..., n) uint8"""
    a, b, c, d = pixels.unflatten(-1, (-1, 4)).unbind(-1)
    return a | (b << 2) | (c << 4) | (d << 6)


def unpack_2bpp(packed: torch.Tensor) -> torch.Tensor:
    """The inverse, by a table of all bytes.  (..., n) uint8 -> (..., 4 n) uint8"""
    device = packed.device
    if device not in _UNPACK:
        shifts = torch.tensor([0, 2, 4, 6], device=device)
        table = (torch.arange(256, device=device)[:, None] >> shifts) & 3
        _UNPACK[device] = table.to(torch.uint8).view(torch.int32).flatten()  # four pixels at a time
    quads = _UNPACK[device].index_select(0, packed.flatten().int())
    return quads.view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])  # -1 fails on no rows


_UNPACK = {}
