"""Game Boys that look for a picture: cartridges in PyBoy, stepped by worker processes.

    env = make_vec("pyboy", 8, rom="game.gb", state="start.state", goal_dir="goals/door")

The same observations, distance, reward and autoreset as pixel-goal, from a game of the user's own. An
emulator has no randomness: all rows begin alike, and a seed changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from envs import BadInput
from envs.pixels import VecEnv
from envs.pixels.goals import SHADES, GoalConfig, goal_step, l1_distance, load_goal
from envs.workers import cores

try:
    from envs.pixels import game_boy_worker as worker
except ImportError as error:
    raise BadInput(f"environment pyboy needs a package: pip install pyboy==2.8.1 ({error})") from error

ACTION_CODEC = "gb8"  # worker.ACTIONS, in this order
PIPELINE = "gameboy-72x80-mean2x2-v1"  # to be changed with whatever changes a frame


@dataclasses.dataclass(frozen=True)
class Config(GoalConfig):
    """The options; those of GoalConfig too."""

    rom: str = ""
    """cartridge, a .gb or .gbc file"""
    state: str = ""
    """PyBoy save state in which episodes begin; "": the Game Boy is switched on, and boot_frames pass"""
    goal_dir: str = ""
    """goal template folder; tools/make_goal.py records one"""
    frames_per_step: int = 24
    """emulated frames of a step [frames of 1/60 s]"""
    release_after_frames: int = 8
    """a step's button is held so long, less than frames_per_step [frames]"""
    stack_k: int = 1
    """newest frames in an observation"""
    workers: int = 0
    """processes; 0: one for each core, at most num_envs"""
    boot_frames: int = 300
    """see state [frames]"""
    emulate_sound: bool = False
    """slower; for games that wait until a sound has ended (none is played)"""

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("frames_per_step", 2), ("release_after_frames", 1), ("stack_k", 1),
                            ("workers", 0), ("boot_frames", 1)):
            value = getattr(self, name)
            if value < least:
                raise BadInput(f"environment pyboy: {name}: expected at least {least}, got {value}")
        if self.release_after_frames >= self.frames_per_step:
            raise BadInput("environment pyboy: release_after_frames: expected less than frames_per_step "
                           f"({self.frames_per_step}), got {self.release_after_frames}")


class GameBoy(VecEnv):
    """num_envs emulators. obs (num_envs, stack_k, 72, 80) uint8 shades, newest frame last.

    A worker that dies or fails is a RuntimeError that names it, and the end of the others.
    """

    Config = Config
    num_actions, action_names = len(worker.ACTIONS), list(worker.ACTIONS)
    obs_dtype, obs_high, scaling, has_goal = torch.uint8, float(SHADES - 1), "0..3 to 0..1", True

    def __init__(self, num_envs: int, device, config: Config):
        self.num_envs, self.device, self.config = num_envs, torch.device(device), config
        self.obs_shape = (config.stack_k, worker.HEIGHT, worker.WIDTH)
        rom, state = _read(config)
        hashes = _hashes(rom, state)
        if not config.goal_dir:
            raise BadInput("environment pyboy: goal_dir: expected a goal template folder; record one with "
                           "`python tools/make_goal.py`")
        meta = goal_meta(config)
        # Any state of the same game will do: a goal may have been recorded further on than episodes begin.
        goal, goal_info = load_goal(config.goal_dir, **meta | {"sha256": {"rom": hashes["rom"]}})
        self._goal = torch.from_numpy(goal)
        emulator, start = _begin(config, rom, state)
        self._first = torch.from_numpy(emulator.shades()).repeat(config.stack_k, 1, 1)  # (K, 72, 80)
        emulator.close()
        self._first_dist = l1_distance(self._first[None], self._goal)  # (1,)
        if self._first_dist < config.tau:
            raise BadInput(f"{config.goal_dir}: what an episode begins with looks like the goal already "
                           f"(distance {self._first_dist.item():.3f}, tau {config.tau})")
        self._hashes = hashes
        self.log_meta = {
            "num_actions": self.num_actions, "action_codec_id": ACTION_CODEC,
            "frames_per_step": config.frames_per_step, "release_after_frames": config.release_after_frames,
            "stack_k": config.stack_k, "goal_dir": str(config.goal_dir),
            "goal_sha256": goal_info["template_sha256"], "rom_path": config.rom, "rom_sha256": hashes["rom"],
            "state_path": config.state or None, "state_sha256": hashes.get("state")}
        self._obs = torch.zeros(num_envs, *self.obs_shape, dtype=torch.uint8)
        self._start_workers(dataclasses.asdict(config) | {"rom": rom, "state": start})

    def reset(self, seed: int | list[int]) -> torch.Tensor:
        self._resets[:] = 1  # the workers load the state when they next step
        self._obs.copy_(self._first.expand_as(self._obs))
        self._previous_dist = self._first_dist.repeat(self.num_envs)
        self._streak = torch.zeros(self.num_envs, dtype=torch.int64)
        self._steps = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._obs.to(self.device)

    def step(self, actions: torch.Tensor):
        self._actions[:] = self.check_actions(actions).cpu().numpy()
        self._command("step")
        if self.config.stack_k > 1:
            self._obs[:, :-1] = self._obs[:, 1:].clone()
        self._obs[:, -1] = torch.from_numpy(self._frames)
        dist = l1_distance(self._obs, self._goal)
        reward, terminated, truncated, streak, steps = goal_step(
            dist, self._previous_dist, self._streak, self._steps, self.config)
        ended = terminated | truncated
        final = self._obs[ended]  # a copy
        self._obs[ended] = self._first
        self._resets[:] = ended.numpy()
        self._previous_dist = torch.where(ended, self._first_dist, dist)
        self._streak, self._steps = streak * ~ended, steps * ~ended
        info = {"reset_mask": ended.to(self.device), "final_obs": final.to(self.device),
                "dist": dist.to(self.device)}
        return (self._obs.to(self.device), reward.to(self.device), terminated.to(self.device),
                truncated.to(self.device), info)

    def state_dict(self) -> dict:
        states = {row: state for part in self._command("save") for row, state in part.items()}
        return {"hashes": dict(self._hashes), "obs": self._obs.clone(), "streak": self._streak.clone(),
                "steps": self._steps.clone(), "previous_dist": self._previous_dist.clone(),
                "emulators": [torch.frombuffer(bytearray(states[row]), dtype=torch.uint8)
                              for row in range(self.num_envs)]}

    def load_state_dict(self, state: dict) -> torch.Tensor:
        if state["obs"].shape != self._obs.shape or state["hashes"] != self._hashes:
            raise BadInput("environment state: of another num_envs, stack_k, cartridge or start")
        self._command("load", [part.numpy().tobytes() for part in state["emulators"]])
        self._resets[:] = 0
        self._obs.copy_(state["obs"])
        self._streak, self._steps = state["streak"].clone(), state["steps"].clone()
        self._previous_dist = state["previous_dist"].clone()
        return self._obs.to(self.device)

    def frames(self, row: int = 0):
        return (255 - 85 * self._obs[row, -1]).numpy()

    def goal_picture(self, row: int = 0):
        return (255 - 85 * self._goal.reshape(-1, *self._goal.shape[-2:])[-1]).numpy()

    def close(self) -> None:
        self._finalizer()

    def _start_workers(self, options: dict) -> None:
        count = min(self.config.workers or cores(), self.num_envs)
        bounds = [self.num_envs * index // count for index in range(count + 1)]
        # A file without a name: however the processes end, nothing is left of it.
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
            file.truncate(worker.shared_size(self.num_envs))
            self._memory = mmap.mmap(file.fileno(), worker.shared_size(self.num_envs))
            self._frames, self._actions, self._resets = worker.shared_views(self._memory, self.num_envs)
            self._workers = []
            self._finalizer = weakref.finalize(self, _stop, self._workers)  # at the latest when Python ends
            for first, last in zip(bounds, bounds[1:], strict=False):
                ours, theirs = socket.socketpair()
                with theirs:
                    numbers = map(str, (theirs.fileno(), file.fileno(), self.num_envs, first, last))
                    # A session: Ctrl-C does not reach it. -P: gymnasium.py beside the worker is no package.
                    process = subprocess.Popen(
                        [sys.executable, "-P", worker.__file__, *numbers], stdin=subprocess.DEVNULL,
                        pass_fds=(theirs.fileno(), file.fileno()), start_new_session=True)
                self._workers.append((process, Connection(ours.detach()), f"rows {first} to {last - 1}"))
        self._command("start", options)

    def _command(self, command: str, payload=None) -> list:
        """Have every worker do it, all at the same time.  -> their replies"""
        if not self._finalizer.alive:
            raise RuntimeError("the Game Boy workers are closed")
        current = None
        try:
            for current in self._workers:
                current[1].send((command, payload))
            replies = []
            for current in self._workers:
                outcome, reply = current[1].recv()
                if outcome != "done":
                    raise RuntimeError(f"Game Boy worker {current[0].pid} ({current[2]}) failed: {reply}")
                replies.append(reply)
            return replies
        except (EOFError, OSError) as error:
            self.close()
            process, _, rows = current
            raise RuntimeError(f"Game Boy worker {process.pid} ({rows}) died, "
                               f"exit status {process.returncode}") from error
        except BaseException:  # Ctrl-C too: replies left unread would be taken for the next command's
            self.close()
            raise


def record_frames(config: Config, actions: list[str]) -> np.ndarray:
    """The screen after these actions: (stack_k, 72, 80) uint8, as observations are. Needs no goal."""
    rom, state = _read(config)
    for action in actions:
        if action not in worker.ACTIONS:
            raise BadInput(f"action {action!r}: expected one of {', '.join(worker.ACTIONS)}")
    emulator, _ = _begin(config, rom, state)
    frames = [emulator.shades()] * config.stack_k
    for action in actions:
        emulator.step(worker.ACTIONS.index(action), config.frames_per_step, config.release_after_frames)
        frames.append(emulator.shades())
    emulator.close()
    return np.stack(frames[-config.stack_k:])


def goal_meta(config: Config) -> dict:
    """The fields of a goal template that save_goal asks for, and that this environment expects of one."""
    return {"action_codec_id": ACTION_CODEC, "frames_per_step": config.frames_per_step,
            "downsample_h": worker.HEIGHT, "downsample_w": worker.WIDTH, "stack_k": config.stack_k,
            "tau": config.tau, "k_consecutive": config.k_consecutive, "pipeline_version": PIPELINE,
            "sha256": _hashes(*_read(config))}


def _read(config: Config) -> tuple[bytes, bytes | None]:
    """The cartridge and the state (None: switch on) from their files."""
    contents = []
    for name in ("rom", "state"):
        path = getattr(config, name)
        if not path and name == "state":
            contents.append(None)
            continue
        if not path:
            raise BadInput("environment pyboy: rom: expected a cartridge file (--env-kwargs rom=game.gb)")
        try:
            contents.append(Path(path).read_bytes())
        except OSError as error:
            raise BadInput(f"environment pyboy: {name} {path}: cannot be read ({error.strerror})") from error
    return contents[0], contents[1]


def _hashes(rom: bytes, state: bytes | None) -> dict[str, str]:
    files = {"rom": rom} | ({} if state is None else {"state": state})
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def _begin(config: Config, rom: bytes, state: bytes | None) -> tuple[worker.Emulator, bytes]:
    """An emulator where episodes begin, and its state there."""
    name = "rom"
    try:
        emulator = worker.Emulator(rom, config.emulate_sound)
        name = "state"
        return emulator, emulator.begin(state, config.boot_frames)
    except ValueError as error:
        raise BadInput(f"environment pyboy: {name} {getattr(config, name)}: {error}") from error


def _stop(workers: list) -> None:
    """End the workers: without their connection they leave by themselves."""
    for _, connection, _ in workers:
        connection.close()
    for process, _, _ in workers:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
