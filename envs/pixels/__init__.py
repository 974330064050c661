"""Vectorised environments: what a2c_vecenv.py asks of them.

    env = make_vec("pixel-goal", 64, "cpu", difficulty=8)
    obs = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(actions)

All in Gymnasium's meaning, a tensor of `num_envs` rows each. A row whose episode ends starts its next one in
the same step (autoreset), so that `obs` is already the first observation of that one, while

    info["reset_mask"]   the next episode has begun: terminated | truncated, but for      (num_envs,) bool
                         lives that are lost (envs/pixels/atari.py)
    info["final_obs"]    the last observations of the episodes that ended, in row order   (ended, *obs_shape)
    info["dist"]         distance to the goal before the reset, where there is a goal     (num_envs,) float32
    info["score"]        where the rewards are not what an episode is judged by: these    (num_envs,) float32

`obs` is the environment's own buffer, valid until its next step: clone to keep it.
"""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import torch
from PIL import Image

import envs
from envs.pixels.goals import recorded_options


class VecEnv:
    """num_envs copies of one environment. Subclasses set the attributes below."""

    num_envs: int
    num_actions: int
    obs_shape: tuple[int, ...]  # of one row
    obs_dtype: torch.dtype  # uint8 or float32, as the environment gives them
    obs_high: float = 1.0  # the darkest shade; `scale` divides by it
    scaling = "as they are"  # what `scale` does, for people
    device: torch.device
    action_names: list[str]
    has_goal = False  # True: info["dist"], and a terminated episode is a success
    log_meta: dict  # for the meta line of a log (spec: num_actions, action_codec_id, goal_sha256, ...)

    def reset(self, seed: int | list[int]) -> torch.Tensor:
        """Begin new episodes. seed: one for each row, or what row_seeds derives them from.

        -> obs (num_envs, *obs_shape)
        """
        raise NotImplementedError

    def row_seeds(self, seed: int | list[int]) -> list[int]:
        return seed if isinstance(seed, list) else row_seeds(seed, range(self.num_envs))

    def step(self, actions: torch.Tensor):
        """actions: (num_envs,) of an integer dtype on `device`, each in 0..num_actions - 1; else an error.

        -> obs, reward (num_envs,) float32, terminated and truncated (num_envs,) bool, info.
        """
        raise NotImplementedError

    def state_dict(self) -> dict | None:
        """What an exact continuation needs, as torch.save and torch.load(weights_only=True) take it.

        By name: a tensor on the CPU or a list, with an entry for each row; or anything else, the same in all
        rows. So rows of several environments can be joined (join_states) and parted (state_of_rows).
        None: this environment cannot be saved, and a resumed run begins new episodes.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict) -> torch.Tensor:
        """Continue from a state.  -> obs, as the step before it returned"""
        raise NotImplementedError

    def decode(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as shades, where they are kept in another form (packed)."""
        return obs

    def scale(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as a network takes them: a copy, float32, in 0..1 or -1..1 where they have bounds."""
        return self.decode(obs) * (1 / self.obs_high)

    def frames(self, row: int = 0):
        """A picture of a row for people, uint8 (H, W) grey or (H, W, 3); None where there is none."""
        return None

    def goal_picture(self, row: int = 0):
        """The goal of a row for people, uint8 (H, W) grey; None where there is none."""
        return None

    def close(self) -> None:
        """Release processes and windows."""

    def check_actions(self, actions) -> torch.Tensor:
        """actions as int64; TypeError or ValueError with what was expected."""
        if not isinstance(actions, torch.Tensor):
            raise TypeError(f"actions: expected a tensor, got {type(actions).__name__}")
        if actions.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise TypeError(f"actions: expected an integer dtype, got {actions.dtype}")
        if actions.shape != (self.num_envs,):
            raise ValueError(f"actions: expected shape ({self.num_envs},), got {tuple(actions.shape)}")
        if actions.device != self.device:
            raise ValueError(f"actions: expected them on {self.device}, got {actions.device}")
        if actions.device.type == "cpu":
            low, high = map(int, actions.aminmax())
            if low < 0 or high >= self.num_actions:
                raise ValueError(f"actions: expected 0..{self.num_actions - 1}, got {low}..{high}")
        else:  # a device-side assertion, which does not wait for the device
            torch._assert_async(((actions >= 0) & (actions < self.num_actions)).all())
        return actions.long()


class RecordEpisodeStatistics:
    """Wraps a VecEnv as Gymnasium's wrapper of this name does: return and length of each episode that ends.

    info["success"]           terminated, where there is a goal                           (num_envs,) bool
    info["episode_return"]    sum of its rewards (score); 0 where no episode ended        (num_envs,) float32
    info["episode_length"]    its steps; 0 where no episode ended                         (num_envs,) float32
    info["dist"]              0 where there is no goal                                    (num_envs,) float32

    others: how many rows before and after these belong to other processes. reset takes the seed of the run,
    load_state_dict the state of all rows.
    """

    def __init__(self, env: VecEnv, others: tuple[int, int] = (0, 0)):
        self.env, self.others = env, others
        self.so_far = torch.zeros(2, env.num_envs, device=env.device)  # return and length

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, seed: int, split: str = "train", start: int = 0) -> torch.Tensor:
        self.so_far.zero_()
        rows = range(self.others[0], self.others[0] + self.num_envs)
        return self.env.reset(row_seeds(seed, rows, split, start))

    def step(self, actions: torch.Tensor):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.so_far += torch.stack([info.get("score", rewards), torch.ones_like(rewards)])
        info["episode_return"], info["episode_length"] = self.so_far * info["reset_mask"]
        self.so_far.masked_fill_(info["reset_mask"], 0)
        info["success"] = terminated & self.has_goal
        info.setdefault("dist", torch.zeros_like(rewards))
        return obs, rewards, terminated, truncated, info

    def state_dict(self) -> dict | None:
        """Of these rows alone: join_states makes one of all processes'."""
        state = self.env.state_dict()
        return state and state | {"so_far": self.so_far.T.cpu()}

    def load_state_dict(self, state: dict) -> torch.Tensor:
        state = state_of_rows(state, range(self.others[0], self.others[0] + self.num_envs))
        self.so_far.copy_(state["so_far"].T)
        return self.env.load_state_dict(state)


def derive_seed(seed: int, use: str, *numbers: int) -> int:
    """A seed of 63 bits for one use of a run's seed: no two uses, numbers or runs have the same.

    Sums do not do that: of seed + row, all rows but one of seed 1 are rows of seed 2 as well. Where fewer
    bits are read, two may meet by chance: torch's generator on a CPU reads 32, an Atari emulator 31.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(*use.encode(), *numbers))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def row_seeds(seed: int, rows: range, split: str = "train", start: int = 0) -> list[int]:
    """Of these rows among all, whoever holds them. start: environment steps at which new episodes begin."""
    return [derive_seed(seed, split, start, row) for row in rows]


def join_states(states: list[dict | None]) -> dict | None:
    """The state of all rows, from those of environments that hold some of them each."""
    if any(state is None for state in states):
        return None
    joined = dict(states[0])
    for name, value in joined.items():
        if isinstance(value, torch.Tensor):
            joined[name] = torch.cat([state[name] for state in states])
        elif isinstance(value, list):
            joined[name] = [row for state in states for row in state[name]]
    return joined


def state_of_rows(state: dict, rows: range) -> dict:
    """The part of a state that an environment of these rows takes."""
    rows = slice(rows.start, rows.stop)
    return {name: value[rows] if isinstance(value, torch.Tensor | list) else value
            for name, value in state.items()}


def receipt_files(env: VecEnv, batch: dict) -> dict[str, bytes]:
    """What four rows did in a rollout, tensors (num_steps, num_envs) by name, and how they look now.

    -> {file name: content}: batch.json and frame_<row>.png, as far as they can be had: a receipt is written
    when something has failed, be it the device or the environment that should draw itself.
    """
    files = {}
    with contextlib.suppress(Exception):
        steps = {name: batch[name][:, :4].tolist() for name in ("actions", "dist", "rewards") if batch}
        steps = json.loads(json.dumps(steps), parse_constant=lambda name: None)  # JSON has no NaN
        files["batch.json"] = json.dumps(steps).encode()
        for row in range(min(4, env.num_envs)):
            if (frame := env.frames(row)) is not None:
                picture = io.BytesIO()
                Image.fromarray(frame).save(picture, "png")
                files[f"frame_{row}.png"] = picture.getvalue()
    return files


VEC_ENVS = {"pixel-goal": "envs.pixels.pixel_goal:PixelGoal", "pyboy": "envs.pixels.game_boy:GameBoy"}
ATARI = "envs.pixels.atari:Atari"  # of ids that begin with ALE/
GYMNASIUM = "envs.pixels.gymnasium:GymnasiumVec"  # of any other id


def make_vec(env_id: str, num_envs: int, device="cpu", /, **options) -> VecEnv:
    """Build a vectorised environment: one of VEC_ENVS, an Atari game (ALE/...), or any Gymnasium id.

    Option values may be strings.
    Raises BadInput for an unknown id or option, a wrong value, or a package that is not installed.
    """
    device = torch.empty(0, device=device).device  # cuda is cuda:0 from here on
    if env_id in VEC_ENVS:
        cls = envs.load_object(VEC_ENVS[env_id], "--env-id")
        recorded = {}
        if options.get("goal_dir"):
            recorded = {name: value for name, value in recorded_options(options["goal_dir"]).items()
                        if hasattr(cls.Config, name) and name not in options}
        env = cls(num_envs, device, envs.make_config(cls.Config, env_id, recorded | options))
        if recorded:  # no flag has them, and a folder may be recorded anew
            env.log_meta["goal_options"] = recorded
        return env
    if env_id.removeprefix("ale_py:").startswith("ALE/"):
        cls = envs.load_object(ATARI, "--env-id")
        return cls(env_id, num_envs, device, envs.make_config(cls.Config, env_id, options))
    return envs.load_object(GYMNASIUM, "--env-id")(env_id, num_envs, device, options)
