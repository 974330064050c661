"""Any Gymnasium id as a vectorised environment: vector or image observations, discrete actions.

Rows are stepped here, one after the other, rather than by Gymnasium's SyncVectorEnv, which spends 15 to 25 %
of a CartPole step on copies and on its info dictionary. CartPole itself uses Gymnasium's vectorised version.
"""

from __future__ import annotations

import ast
import importlib
import json
import types
import warnings
import weakref

import numpy as np
import torch

from envs import BadInput
from envs.pixels import VecEnv

try:
    import gymnasium
except ImportError as error:
    raise BadInput(f"Gymnasium ids need a package: pip install gymnasium ({error})") from error


class GymnasiumVec(VecEnv):
    """num_envs copies of a registered environment; options go to its constructor (and max_episode_steps).

    Observations: Box of uint8 images (H, W, C), (C, H, W) or (H, W) -> (C, H, W) uint8; Box of one axis ->
    float32; Discrete -> one-hot float32. BadInput: another space, an unknown id or option, a missing package.
    """

    def __init__(self, env_id: str, num_envs: int, device="cpu", options: dict | None = None):
        self.num_envs, self.device = num_envs, torch.device(device)
        options = {key: _literal(value) for key, value in (options or {}).items()}
        limit = options.get("max_episode_steps", 1)
        if not isinstance(limit, int) or limit < 1:
            raise BadInput(f"environment {env_id}: max_episode_steps: expected at least 1, got {limit!r}")
        self._cartpole = None
        try:
            module, _, name = env_id.rpartition(":")
            if module:  # as gymnasium.make has it: the module registers the environment
                importlib.import_module(module)
            spec = gymnasium.spec(name)
            if spec.max_episode_steps is None and "max_episode_steps" not in options:
                warnings.warn(f"environment {env_id} has no time limit known to Gymnasium. If it has none of "
                              "its own, an episode may never end, nor an evaluation: --env-kwargs "
                              "max_episode_steps=200 sets one", stacklevel=2)
            vectorised = str(spec.vector_entry_point)
            if vectorised.endswith("cartpole:CartPoleVectorEnv") and "render_mode" not in options:
                self._vector = gymnasium.make_vec(env_id, num_envs, "vector_entry_point", **options)
                self._cartpole = self._vector.unwrapped
            else:
                # The checker keeps the last observation, which may be a second name of a row's state.
                options["disable_env_checker"] = True
                self._vector = gymnasium.make_vec(env_id, num_envs, "sync", **options)
                self._rows = self._vector.envs
        except Exception as error:  # an environment's constructor may raise anything at all
            line = " ".join(f"{type(error).__name__}: {error}".split())
            unknown = (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound)
            if isinstance(error, unknown) or ".py:" in env_id:
                line += " (an id that a module registers: module:Id, such as ale_py:ALE/Pong-v5)"
            raise BadInput(f"environment {env_id}: {line}") from error
        self._finalizer = weakref.finalize(self, self._vector.close)  # at the latest when Python ends
        self._plan_observations(env_id, self._vector.single_observation_space)
        actions = self._vector.single_action_space
        if not isinstance(actions, gymnasium.spaces.Discrete):
            raise BadInput(f"environment {env_id}: expected discrete actions, found {actions}")
        self.num_actions, self._first_action = int(actions.n), int(actions.start)
        if self._cartpole is not None:  # check_actions has done it: a seventh of a step of 8 rows
            self._cartpole.action_space = types.SimpleNamespace(contains=lambda actions: True)
        self.action_names = [str(action) for action in range(self.num_actions)]
        if self._cartpole is None and hasattr(self._rows[0].unwrapped, "get_action_meanings"):  # Atari
            self.action_names = list(self._rows[0].unwrapped.get_action_meanings())
        self.log_meta = {"num_actions": self.num_actions, "action_codec_id": f"gymnasium:{env_id}",
                         "frames_per_step": 1, "stack_k": 1, "goal_dir": None, "goal_sha256": None,
                         "obs_scaling": self.scaling}
        self._obs = torch.zeros(num_envs, *self.obs_shape, dtype=self.obs_dtype)
        self._array = self._obs.numpy()  # the same memory
        self._none_ended = torch.zeros(0, *self.obs_shape, dtype=self.obs_dtype, device=self.device)
        self._env_id = env_id
        self._outside = 0  # observations that were not in their space

    def reset(self, seed: int | list[int]) -> torch.Tensor:
        seeds = self.row_seeds(seed)
        if self._cartpole is not None:
            self._vector.reset(seed=0)
            self._rngs = [gymnasium.utils.seeding.np_random(seed)[0] for seed in seeds]
            self._restart_cartpole(range(self.num_envs))
        else:
            for row, env in enumerate(self._rows):
                try:
                    obs = _reset(env, seeds[row])
                    self._check_observation(obs)
                    self._array[row] = self._convert(obs)
                except Exception as error:  # may raise anything, such as that a render_mode lacks pygame
                    raise BadInput(f"environment's reset, render_mode={env.render_mode}: {error}") from error
        return self._obs.to(self.device)

    def step(self, actions: torch.Tensor):
        actions = self.check_actions(actions)
        step = self._step_rows if self._cartpole is None else self._step_cartpole
        rewards, terminated, truncated, final = step(actions.cpu().numpy())
        rewards, terminated, truncated = (torch.from_numpy(array).to(self.device)
                                          for array in (rewards, terminated, truncated))
        final = self._none_ended if final is None else torch.from_numpy(final).to(self.device)
        info = {"reset_mask": terminated | truncated, "final_obs": final}
        return self._obs.to(self.device), rewards, terminated, truncated, info

    def check_actions(self, actions) -> torch.Tensor:
        """As VecEnv's. Of a few rows, a list is compared sooner than a tensor: a fifth of a CartPole step."""
        if self.num_envs <= 64 and isinstance(actions, torch.Tensor) and actions.dtype == torch.int64 \
                and actions.shape == (self.num_envs,) and actions.device == self.device:
            values = actions.tolist()
            if 0 <= min(values) and max(values) < self.num_actions:
                return actions
        return super().check_actions(actions)

    def _step_rows(self, actions: np.ndarray):
        """Fills the buffer.  -> rewards float32, terminated, truncated, final observations or None"""
        rewards, terminated, truncated, final = [], [], [], []
        for row, action in enumerate(actions + self._first_action):
            env = self._rows[row]
            obs, reward, ended, cut, _ = env.step(action)
            if ended or cut:
                self._check_observation(obs)
                final.append(np.array(self._convert(obs), self._array.dtype))  # reset may reuse its memory
                obs, _ = env.reset()
                self._check_observation(obs)
            self._array[row] = self._convert(obs)
            rewards.append(np.asarray(reward).item())  # some give an array of one
            terminated.append(ended)
            truncated.append(cut)
        final = np.stack(final) if final else None
        terminated, truncated = (np.array(flags, bool).reshape(-1) for flags in (terminated, truncated))
        return np.array(rewards, np.float32), terminated, truncated, final

    def _step_cartpole(self, actions: np.ndarray):
        """As _step_rows. Left to itself, Gymnasium restarts a row a step later, from a shared generator."""
        obs, rewards, terminated, truncated, _ = self._vector.step(actions)
        self._array[:] = obs
        final = None
        ended = self._cartpole.prev_done
        if ended.any():
            final = obs[ended]
            for last in final:
                self._check_observation(last)
            self._restart_cartpole(np.flatnonzero(ended))
        return rewards, terminated, truncated, final

    def _restart_cartpole(self, rows) -> None:
        env = self._cartpole
        for row in rows:
            env.state[:, row] = self._rngs[row].uniform(env.low, env.high, size=4)
            self._array[row] = env.state[:, row]
        env.steps[rows] = 0
        env.prev_done[rows] = False  # so that the next step does not begin this row's episode again

    def _plan_observations(self, env_id: str, space) -> None:
        """Set obs_shape, obs_dtype, scaling and _convert: one row's observation -> an array of obs_shape."""
        self._image = False
        self._shift, self._factor, self.scaling = 0.0, 1.0, "one-hot"
        axes = len(space.shape or ()) if isinstance(space, gymnasium.spaces.Box) else 0
        if isinstance(space, gymnasium.spaces.Discrete):
            count, first = int(space.n), int(space.start)
            one_hot = dict(enumerate(np.eye(count, dtype=np.float32), first))
            self._bounds = np.array(first), np.array(first + count - 1)
            self.obs_shape, self.obs_dtype = (count,), torch.float32
            self._convert = lambda obs: one_hot[int(obs)]
        elif axes == 1:
            self.obs_shape, self.obs_dtype = space.shape, torch.float32
            self._convert = lambda obs: obs
        elif axes in (2, 3) and space.dtype == np.uint8:
            self._image, self.obs_dtype = True, torch.uint8
            if axes == 2:
                self._convert = lambda obs: obs[None]
            elif space.shape[2] <= space.shape[0]:  # channels are the shorter end
                self._convert = lambda obs: obs.transpose(2, 0, 1)
            else:
                self._convert = lambda obs: obs
            self.obs_shape = self._convert(np.zeros(space.shape, np.uint8)).shape
        else:
            raise BadInput(f"environment {env_id}: expected observations that are a vector, a uint8 image or "
                           f"Discrete, found {' '.join(str(space).split())}")
        if axes:
            self._bounds = space.low, space.high
            low, high = (self._convert(bounds.astype(np.float64)) for bounds in (space.low, space.high))
            shift, factor, self.scaling = scaling_of(low, high)
            self._shift, self._factor = (torch.tensor(values, dtype=torch.float32, device=self.device)
                                         for values in (shift, factor))

    def scale(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs - self._shift) * self._factor

    def _check_observation(self, obs) -> None:
        """BadInput for what would be made to fit: NumPy repeats, cuts off fractions and wraps round.

        Of other observations outside their space there is a warning: the first, the tenth, the hundredth, ...
        """
        space, obs = self._vector.single_observation_space, np.asarray(obs)
        if obs.shape != space.shape or (self._image and obs.dtype.kind == "f"):
            raise BadInput(f"environment {self._env_id}: expected an observation of its space, {space.dtype} "
                           f"of shape {space.shape}; found {obs.dtype} of shape {obs.shape}")
        if space.dtype.kind == "f":
            obs = obs.astype(space.dtype)  # 0.7 is more than the float32 next to it
        low, high = self._bounds
        outside = ~((obs >= low) & (obs <= high))  # NaN too
        if not outside.any():
            return
        place = tuple(np.argwhere(outside)[0].tolist())
        said = (f"environment {self._env_id}: an observation has {obs[place]} at {place}, where its space "
                f"allows {low[place]} to {high[place]}")
        wraps = self._image and bool((obs.astype(np.uint8) != obs).any())
        if wraps or isinstance(space, gymnasium.spaces.Discrete):
            raise BadInput(said)
        self._outside += 1
        if str(self._outside).strip("0") == "1":
            warnings.warn(f"{said} ({self._outside} so far, of the first and the last ones of episodes)",
                          stacklevel=2)

    def state_dict(self) -> dict | None:
        state = {}
        if self._cartpole is not None:
            env = self._cartpole
            state = {"state": env.state.T, "steps": env.steps, "prev_done": env.prev_done}
            state = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
        rows, seen = self._rows if self._cartpole is None else self._rngs, set()
        try:
            state["rows"] = [json.dumps(_encode(row, seen)) for row in rows]
        except _Unknown:
            return None
        return state | {"obs": self._obs.clone()}

    def load_state_dict(self, state: dict) -> torch.Tensor:
        if state["obs"].shape != self._obs.shape:
            raise BadInput(f"environment state: expected observations of shape {tuple(self._obs.shape)}, "
                           f"got {tuple(state['obs'].shape)}")
        self.reset(seed=0)  # so that attributes which appear with the first reset exist
        if self._cartpole is not None:
            env = self._cartpole
            env.state = state["state"].T.numpy().copy()
            env.steps, env.prev_done = state["steps"].numpy().copy(), state["prev_done"].numpy().copy()
            self._rngs = [_decode(json.loads(row), None) for row in state["rows"]]
        else:
            for env, row in zip(self._rows, state["rows"], strict=True):
                _decode(json.loads(row), env)
        self._obs.copy_(state["obs"])
        return self._obs.to(self.device)

    def frames(self, row: int = 0):
        if self._cartpole is None and self._rows[row].render_mode == "rgb_array":
            try:
                return np.asarray(self._rows[row].render())
            except gymnasium.error.DependencyNotInstalled as error:
                raise BadInput(f"render_mode=rgb_array: {error}") from error
        if not self._image:
            return None
        frame = self._array[row]
        return frame[-1].copy() if len(frame) != 3 else frame.transpose(1, 2, 0).copy()

    def close(self) -> None:
        self._finalizer()


NO_BOUND = 1e6  # a bound as large says that there is none: finfo.max, a large number
MOST_KINDS = 6  # of bounds that are named


def scaling_of(low: np.ndarray, high: np.ndarray):
    """What makes a network's input of what a space allows.  -> shift, factor, the same in words

    (x - shift) * factor is in 0..1, or in -1..1 where both signs occur: there 0 stays 0. An element without a
    bound stays as it is.
    """
    bounded = np.maximum(abs(low), abs(high)) < NO_BOUND
    signed = (low < 0) & (high > 0)
    shift = np.where(bounded & ~signed, low, 0)
    span = np.where(signed, np.maximum(-low, high), high - low)
    span = np.where(bounded & (span > 0), span, 1)
    kinds, counts = np.unique(np.stack([low, high]).reshape(2, -1), axis=1, return_counts=True)
    words = []
    for least, most, count in zip(*kinds, counts, strict=True):
        to = "as they are"
        if max(abs(least), abs(most)) < NO_BOUND:
            to = "to -1..1" if least < 0 < most else "to 0..1"
        words.append(f"{count} in {least:g}..{most:g} {to}")
    if len(words) > MOST_KINDS:
        words[MOST_KINDS:] = [f"and so on: {len(words)} kinds"]
    return shift, 1 / span, ", ".join(words)


def _reset(env, seed: int):
    """-> the first observation. Gymnasium's generators take any seed, np.random.seed one of 32 bits."""
    try:
        return env.reset(seed=seed)[0]
    except (TypeError, ValueError, OverflowError):
        return env.reset(seed=seed % 2**31)[0]


def _literal(value):
    """The Python value of an option's text: 3, 0.5, True, None, [1, 2]; other text stays text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


# Saving an environment. A pickle of it would be a program that loading a checkpoint executes, so the
# attributes are written as plain data (numbers, text, arrays, generators' states) in JSON: for a tree of
# dicts torch.load takes half a second for each of Taxi's rows. An attribute of any other kind, such as a
# physics engine written in C, makes it an environment that cannot be saved: better no continuation than one
# that is silently not exact.

class _Unknown(Exception):
    """An attribute that may hold state and that cannot be written as plain data."""


_SPACES = (gymnasium.spaces.Box, gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete,
           gymnasium.spaces.MultiBinary)
_CONSTANT = (gymnasium.envs.registration.EnvSpec, np.dtype, type, types.ModuleType)


def _encode(value, seen: set[int]):
    """Plain data of a value. seen: ids of mutable objects before; two names of one would part on loading."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, _SPACES) and value._np_random is None:
        return {"kind": "constant"}  # a space that nobody samples from
    if isinstance(value, _CONSTANT) or type(value).__module__.partition(".")[0] == "pygame" \
            or (isinstance(value, types.FunctionType) and not value.__closure__):
        return {"kind": "constant"}  # the new environment has its own
    if not isinstance(value, (np.generic, tuple)):
        owner = value.base if isinstance(value, np.ndarray) and value.base is not None else value
        if id(owner) in seen:
            raise _Unknown
        seen.add(id(owner))
    if isinstance(value, gymnasium.Env):
        return {"kind": "env", "value": {name: _encode(part, seen) for name, part in vars(value).items()}}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        return {"kind": "array" if isinstance(value, np.ndarray) else "number",
                "value": value.tobytes().hex(), "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.random.Generator):
        return {"kind": "generator", "value": _encode(value.bit_generator.state, set())}
    if isinstance(value, _SPACES):
        return {"kind": "space", "value": _encode(value._np_random, seen)}
    if type(value) in (list, tuple):
        return {"kind": type(value).__name__, "value": [_encode(part, seen) for part in value]}
    if type(value) is dict:
        pairs = [[_encode(key, seen), _encode(part, seen)] for key, part in value.items()]
        return {"kind": "dict", "value": pairs}
    raise _Unknown


def _decode(data, current):
    """The value that `data` stands for. An existing environment, generator or space (current) is refilled."""
    if not isinstance(data, dict):
        return data
    kind, value = data["kind"], data.get("value")
    if kind == "constant":
        return current
    if kind == "env":
        for name, part in value.items():
            setattr(current, name, _decode(part, getattr(current, name, None)))
        return current
    if kind in ("array", "number"):
        array = np.frombuffer(bytes.fromhex(value), data["dtype"]).reshape(data["shape"]).copy()
        return array if kind == "array" else array[()]
    if kind == "generator":
        state = _decode(value, None)
        if not isinstance(current, np.random.Generator):
            current = np.random.Generator(np.random.PCG64(0))
        current.bit_generator.state = state  # refuses the state of another kind of generator
        return current
    if kind == "space":
        current._np_random = _decode(value, current._np_random)
        return current
    if kind == "dict":
        old = current if isinstance(current, dict) else {}
        return {key: _decode(part, old.get(key)) for key, part in ((_decode(k, None), p) for k, p in value)}
    if not isinstance(current, (list, tuple)) or len(current) != len(value):
        current = [None] * len(value)
    parts = [_decode(part, before) for part, before in zip(value, current, strict=True)]
    return tuple(parts) if kind == "tuple" else parts
