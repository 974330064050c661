"""Atari 2600 games through ale-py's vector environment: emulators in C++ threads, the usual preprocessing.

    env = make_vec("ALE/Pong-v5", 16, clip_rewards=False)

The defaults are those of Mnih et al. (Nature 518, 2015, Methods): each action for 4 frames, the brighter of
the last two at each pixel, 84 x 84 shades of grey, the 4 newest such pictures; up to 29 frames without an
action at first; rewards cut to -1..1; a lost life ends the return, though not the game. What Machado et al.
(arXiv:1709.06009) ask for instead is a matter of options (docs/atari.md).
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import torch

import envs
from envs import BadInput
from envs.pixels import VecEnv, derive_seed
from envs.workers import cores

try:
    import ale_py  # registers its games
    import gymnasium
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise BadInput(f"Atari games need a package: pip install -r requirements-envs.txt ({error})") from error


@dataclasses.dataclass(frozen=True)
class Config:
    """The options."""

    frame_skip: int = 4
    """frames for which an action is held; one step [frames of 1/60 s]"""
    max_pool: bool = True
    """a picture is, at each pixel, the brighter of a step's last two frames: some games draw in turns"""
    screen_size: int = 84
    """height and width of a picture [pixels]"""
    stack: int = 4
    """newest pictures in an observation; before a game's first they are black"""
    noop_max: int = 30
    """a game begins with a random number of frames without an action, less than this [frames]"""
    fire_reset: bool = False
    """a game begins with the button FIRE, where it has one"""
    episodic_life: bool = True
    """a lost life terminates, so that no return reaches beyond it; the game goes on"""
    clip_rewards: bool = True
    """the agent's rewards are cut to -1..1; returns that are logged are the game's own score"""
    repeat_action_probability: float = 0.0
    """sticky actions: how likely a frame repeats the action of the one before"""
    full_action_space: bool = False
    """all 18 actions, rather than those that the game has"""
    max_episode_frames: int = 108_000
    """a game is cut after so long (30 minutes) [frames]"""
    threads: int = 0
    """of the emulators; 0: one for each core that this process may use"""
    replay_steps: int = 5000
    """after so many steps of a row its next game begins from a fresh seed, so that a resumed run need not
    replay more than these and a game; 0: never, and a resumed run begins new games [steps]"""

    def __post_init__(self):
        for option, least in (("frame_skip", 1), ("screen_size", 1), ("stack", 1), ("noop_max", 0),
                              ("max_episode_frames", 1), ("threads", 0), ("replay_steps", 0)):
            envs.check_option("atari", self, getattr(self, option) >= least, option, f"at least {least}")
        sticky = self.repeat_action_probability
        envs.check_option("atari", self, 0 <= sticky < 1, "repeat_action_probability", "0 to below 1")


class Atari(VecEnv):
    """num_envs games of one kind. obs (num_envs, stack, screen_size, screen_size) uint8, newest last.

    info["score"]       the game's own rewards of this step, never cut     (num_envs,) float32

    A lost life is `terminated` without being in info["reset_mask"]: the game, and its score, go on.
    """

    Config = Config
    obs_dtype, obs_high, scaling = torch.uint8, 255.0, "0..255 to 0..1"

    def __init__(self, env_id: str, num_envs: int, device, config: Config):
        self.num_envs, self.device, self.config = num_envs, torch.device(device), config
        self._game = rom_of(env_id)
        self._vector = AtariVectorEnv(
            self._game, num_envs, num_threads=min(config.threads or cores(), num_envs),
            frameskip=config.frame_skip, maxpool=config.max_pool, img_height=config.screen_size,
            img_width=config.screen_size, stack_num=config.stack, noop_max=config.noop_max,
            use_fire_reset=config.fire_reset, full_action_space=config.full_action_space,
            repeat_action_probability=config.repeat_action_probability,
            max_num_frames_per_episode=config.max_episode_frames,
            episodic_life=False, reward_clipping=False,  # both are done here: a score is of whole games
            autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP)  # but _begin comes before it
        self.obs_shape = self._vector.single_observation_space.shape
        self.action_names = [action.name for action in self._vector.ale.get_action_set()]
        self.num_actions = len(self.action_names)
        self.log_meta = {"num_actions": self.num_actions, "action_codec_id": f"ale:{self._game}",
                         "frames_per_step": config.frame_skip, "stack_k": config.stack, "goal_dir": None,
                         "goal_sha256": None, "ale_py": ale_py.__version__}

    def reset(self, seed: int | list[int]) -> torch.Tensor:
        self._seeds = self.row_seeds(seed)
        self._played = [bytearray() for _ in self._seeds]  # the actions since
        self._lives = np.zeros(self.num_envs, np.int32)
        self._begin(np.ones(self.num_envs, bool), self._seeds)
        return self._obs.to(self.device)

    def step(self, actions: torch.Tensor):
        rewards, terminated, truncated, final, lost = self._advance(self.check_actions(actions).cpu().numpy())
        score = torch.from_numpy(rewards).to(self.device, torch.float32)
        terminated, truncated, final, lost = (torch.from_numpy(array).to(self.device)
                                              for array in (terminated, truncated, final, lost))
        info = {"reset_mask": terminated | truncated, "final_obs": final, "score": score}
        if self.config.episodic_life:
            terminated = terminated | lost
        reward = score.clamp(-1, 1) if self.config.clip_rewards else score
        return self._obs.to(self.device), reward, terminated, truncated, info

    def _advance(self, actions: np.ndarray):
        """One step of all rows, and new games where one ends.

        -> rewards, terminated, truncated, final observations, whether a life was lost and others are left
        """
        obs, rewards, terminated, truncated, info = self._vector.step(actions)
        if self.config.replay_steps:
            for played, action in zip(self._played, actions.tolist(), strict=True):
                played.append(action)
        self._obs = torch.from_numpy(obs)
        lost = (info["lives"] > 0) & (info["lives"] < self._lives)
        self._lives = info["lives"]
        ended = terminated | truncated
        final = obs[ended]
        if ended.any():
            self._begin(ended, [self._next_seed(row) for row in np.flatnonzero(ended)])
        return rewards, terminated, truncated, final, lost

    def _next_seed(self, row: int) -> int:
        """For a row's next game; -1: its generator goes on. A seed loads the cartridge anew, in 0.15 s."""
        if not 0 < self.config.replay_steps <= len(self._played[row]):
            return -1
        self._seeds[row] = derive_seed(self._seeds[row], "next game")
        self._played[row].clear()
        return self._seeds[row]

    def _begin(self, rows: np.ndarray, seeds: list[int]) -> None:
        """New games in these rows, a mask. An emulator takes 31 bits of a seed."""
        seeds = np.array([seed if seed < 0 else seed % 2**31 for seed in seeds])
        obs, info = self._vector.reset(seed=seeds, options={"reset_mask": rows})
        self._obs, self._lives = torch.from_numpy(obs), info["lives"]

    def state_dict(self) -> dict | None:
        """The vector environment shows no state of its emulators: seeds and actions lead to the same one."""
        if not self.config.replay_steps:
            return None
        played = [torch.tensor(list(actions), dtype=torch.uint8) for actions in self._played]
        return {"seeds": list(self._seeds), "played": played, "pictures": self._checksums()}

    def load_state_dict(self, state: dict) -> torch.Tensor:
        if len(state["seeds"]) != self.num_envs:
            raise BadInput(f"environment state: expected {self.num_envs} rows, got {len(state['seeds'])}")
        self.reset(seed=0)
        lengths = np.array([len(actions) for actions in state["played"]])
        # All rows step together. One with less to replay plays something else until its time has come.
        actions = np.zeros((lengths.max(), self.num_envs), np.int64)
        for row, played in enumerate(state["played"]):
            actions[len(actions) - lengths[row]:, row] = played.numpy()
        for t in range(len(actions) + 1):
            rows = lengths == len(actions) - t
            if rows.any():
                for row in np.flatnonzero(rows):
                    self._seeds[row] = state["seeds"][row]
                    self._played[row].clear()
                self._begin(rows, [self._seeds[row] for row in np.flatnonzero(rows)])
            if t < len(actions):
                self._advance(actions[t])
        if self._checksums() != state["pictures"]:
            raise BadInput("environment state: its seeds and actions lead to other pictures here: of another "
                           f"game, other options or another version of ale-py than {ale_py.__version__}")
        return self._obs.to(self.device)

    def _checksums(self) -> list[int]:
        return [zlib.crc32(row) for row in self._obs.numpy()]

    def frames(self, row: int = 0):
        return self._obs[row, -1].numpy().copy()

    def close(self) -> None:
        self._vector = None  # its threads end


def rom_of(env_id: str) -> str:
    """The cartridge of an id as Gymnasium has it: "ALE/MsPacman-v5" -> "ms_pacman"."""
    known = {spec.id: spec.kwargs["game"] for spec in gymnasium.registry.values() if spec.namespace == "ALE"}
    name = env_id.removeprefix("ale_py:")
    if name not in known:
        raise BadInput(f"environment {env_id}: unknown game{envs.hint(name, known)}; ale-py has "
                       f"{len(known)}, such as ALE/Breakout-v5")
    return known[name]
