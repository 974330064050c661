"""The picture that an agent must make its screen look like: how it is stored, compared and rewarded.

A goal template is a folder of two files. goal_template.npy holds one frame (H, W), compared with the newest
one, or a whole stack (K, H, W); uint8, shades 0 (lightest) to 3. goal_template.meta.json says how it was
made, so that an environment which would never show such a picture refuses it instead of training towards
nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

import envs

ARRAY, META = "goal_template.npy", "goal_template.meta.json"
SHADES = 4
KEYS = {"schema_version": int, "created_at": str, "action_codec_id": str, "frames_per_step": int,
        "downsample_h": int, "downsample_w": int, "stack_k": int, "shade_levels": int, "dist_metric": str,
        "tau": float, "k_consecutive": int, "pipeline_version": str, "sha256": dict, "template_sha256": str}
FIXED = {"schema_version": 1, "shade_levels": SHADES, "dist_metric": "l1_mean_norm"}


@dataclasses.dataclass(frozen=True)
class GoalConfig:
    """Options of every environment that has a goal. Subclasses check their own and call this check."""

    max_steps: int = 128
    """an episode is truncated here [steps]"""
    tau: float = 0.05
    """the screen looks like the goal where the distance is below this [0..1]"""
    k_consecutive: int = 4
    """so many steps in a row below tau end the episode as a success [steps]"""
    step_cost: float = -0.01
    """reward of every step"""
    alpha: float = 1.0
    """reward of coming closer, per distance"""
    goal_bonus: float = 10.0
    """reward of the step that succeeds"""

    def __post_init__(self):
        for name in ("max_steps", "k_consecutive"):
            if getattr(self, name) < 1:
                raise envs.BadInput(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_steps < self.k_consecutive:
            raise envs.BadInput(f"max_steps: expected at least k_consecutive ({self.k_consecutive}), or no "
                                f"episode could succeed, got {self.max_steps}")
        if not 0 < self.tau <= 1:
            raise envs.BadInput(f"tau: expected 0 < tau <= 1, got {self.tau}")
        for name in ("step_cost", "alpha", "goal_bonus"):
            if not math.isfinite(getattr(self, name)):
                raise envs.BadInput(f"{name}: expected a finite number, got {getattr(self, name)}")


def l1_distance(frames, goal):
    """mean |frame - goal| / 3, in 0..1.  frames (N, K, H, W) uint8, goal uint8 -> (N,) float32

    A goal (H, W) is compared with the newest frame (the last of K), (K, H, W) with the stack, (N, K, H, W)
    row by row. The sum is exact, so that a distance is the same on every device and in every batch.
    """
    if goal.dim() == 2:
        frames, goal = frames[:, -1:], goal[None]
    if frames.dim() != 4 or frames.shape[1:] != goal.shape[-3:] or goal.dtype != frames.dtype:
        raise ValueError(f"frames {tuple(frames.shape)} {frames.dtype} cannot be compared with a goal "
                         f"{tuple(goal.shape)} {goal.dtype}")
    difference = torch.maximum(frames, goal) - torch.minimum(frames, goal)  # frames - goal would wrap below 0
    total = difference.sum(dim=(1, 2, 3), dtype=torch.float32)  # exact: integers far below 2 ** 24
    # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently close to tau.
    return total / torch.full((), (SHADES - 1) * goal.shape[-3:].numel(), device=total.device)


def goal_step(dist, previous_dist, streak, steps, config):
    """What one step of every row means: all (num_envs,), nothing waits for the device.

    dist, previous_dist: float32, after the step and before it. streak: steps in a row with dist < tau; steps:
    since the reset; both int64, as they were before the step.
    -> reward float32, terminated bool, truncated bool, streak, steps. Rows that ended are not reset here.
    """
    steps = steps + 1
    streak = (streak + 1) * (dist < config.tau)
    terminated = streak >= config.k_consecutive
    truncated = steps >= config.max_steps  # both may hold
    reward = config.step_cost + config.alpha * (previous_dist - dist) + config.goal_bonus * terminated
    return reward, terminated, truncated, streak, steps


def save_goal(folder, frames: np.ndarray, *, force: bool = False, **meta) -> dict:
    """Write a goal template folder, all of it or nothing.  -> its meta

    meta: the KEYS that are not filled in here (schema_version, created_at, shade_levels, dist_metric and
    template_sha256 are). Raises BadInput for a picture or field that does not fit, and for a folder that
    exists, unless force; even then only a folder with nothing but a goal template in it is replaced.
    """
    folder = Path(folder).resolve()
    where = f"goal template {folder}"
    if not isinstance(frames, np.ndarray):
        raise envs.BadInput(f"{where}: expected an array, got {type(frames).__name__}")
    meta = {**FIXED, "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **meta, "template_sha256": hashlib.sha256(np.ascontiguousarray(frames).tobytes()).hexdigest()}
    _check_meta(meta, where)
    _check_frames(frames, meta, where)
    if folder.exists():
        if not force:
            raise envs.BadInput(f"{where}: exists; --force replaces it")
        if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= {ARRAY, META}:
            raise envs.BadInput(f"{where}: holds more than a goal template, so it is not replaced")
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        temporary.chmod(0o755)
        with open(temporary / ARRAY, "wb") as file:
            np.save(file, np.ascontiguousarray(frames), allow_pickle=False)
            _sync(file)
        with open(temporary / META, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=2, allow_nan=False)
            _sync(file)
        if not folder.exists():
            os.rename(temporary, folder)
        elif not _exchange(temporary, folder):  # then there is a moment with neither
            shutil.rmtree(folder)
            os.rename(temporary, folder)
    except OSError as error:
        raise envs.BadInput(f"{where}: cannot be written ({error})") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # what is left of it, or the old one
    return meta


def load_goal(folder, **expected) -> tuple[np.ndarray, dict]:
    """A goal template and its meta. Raises BadInput, in one line, for whatever is damaged or does not fit.

    expected: fields that must have these values, e.g. frames_per_step=24; None or "" are not checked. Of
    sha256, a dict, only the names that are given are compared.
    """
    where = f"goal template {folder}"
    for name in (ARRAY, META):
        if not (Path(folder) / name).is_file():
            raise envs.BadInput(f"{where}: {name} is missing")
    try:
        meta = json.loads((Path(folder) / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise envs.BadInput(f"{where}: {META} cannot be read ({_line(error)})") from error
    _check_meta(meta, where)
    try:  # mapped, so that a header which claims terabytes is compared with the file, not allocated
        frames = np.load(Path(folder) / ARRAY, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header of a damaged file in many ways
        raise envs.BadInput(f"{where}: {ARRAY} cannot be read ({_line(error)})") from error
    if not isinstance(frames, np.ndarray):
        raise envs.BadInput(f"{where}: {ARRAY} holds no array")
    _check_frames(frames, meta, where)
    frames = np.array(frames)  # C order, and the file is no longer needed
    if hashlib.sha256(frames.tobytes()).hexdigest() != meta["template_sha256"]:
        raise envs.BadInput(f"{where}: {ARRAY} is not the picture whose template_sha256 {META} holds")
    for field, value in expected.items():
        for name, wanted in (value or {}).items() if field == "sha256" else [(None, value)]:
            found = meta[field].get(name) if name else meta.get(field)
            if wanted not in (None, "", {}) and found != wanted:
                label = f"{field}.{name}" if name else field
                raise envs.BadInput(f"{where}: {label} is {_short(found)}, expected {wanted!r}")
    return frames, meta


def recorded_options(folder) -> dict:
    """The options of the environment that a template was recorded in, but for its files: the defaults beside
    it. Empty where the template cannot be read, which load_goal says.
    """
    try:
        meta = json.loads((Path(folder) / META).read_text(encoding="utf-8"))
        options = {name: meta[name] for name in ("tau", "k_consecutive", "stack_k")}
        options |= meta.get("recorded", {}).get("env_kwargs", {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: value for name, value in options.items() if name not in ("goal_dir", "rom", "state")}


def _check_meta(meta, where: str) -> None:
    """BadInput unless meta holds every key of KEYS, with its type and a value that can be meant."""
    if not isinstance(meta, dict):
        raise envs.BadInput(f"{where}: {META} holds no object")
    for key, kind in KEYS.items():
        if key not in meta:
            raise envs.BadInput(f"{where}: {key} is missing")
        value, kinds = meta[key], (int, float) if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise envs.BadInput(f"{where}: {key} is {_short(value)}, expected {kind.__name__}")
        if key in FIXED and value != FIXED[key]:
            raise envs.BadInput(f"{where}: {key} is {_short(value)}, expected {FIXED[key]!r}")
        if kind is int and value < 1:
            raise envs.BadInput(f"{where}: {key} is {_short(value)}, expected at least 1")
    if not 0 < meta["tau"] <= 1:
        raise envs.BadInput(f"{where}: tau is {_short(meta['tau'])}, expected 0 < tau <= 1")
    for key, value in {**meta["sha256"], "template_sha256": meta["template_sha256"]}.items():
        if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
            name = key if key == "template_sha256" else f"sha256.{key}"
            raise envs.BadInput(f"{where}: {name} is {_short(value)}, expected 64 hexadecimal digits")


def _check_frames(frames: np.ndarray, meta: dict, where: str) -> None:
    """BadInput unless the array is a picture, or a stack of them, of the size and depth that meta says."""
    if frames.dtype != np.uint8:
        raise envs.BadInput(f"{where}: dtype is {frames.dtype}, expected uint8")
    size = (meta["downsample_h"], meta["downsample_w"])
    stack = (meta["stack_k"], *size)
    if frames.shape not in (size, stack):
        raise envs.BadInput(f"{where}: shape is {frames.shape}, expected {size} or {stack} "
                            "(downsample_h, downsample_w, stack_k)")
    if frames.max() >= SHADES:
        raise envs.BadInput(f"{where}: shade {frames.max()} found, expected 0..{SHADES - 1}")


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step (renameat2 with RENAME_EXCHANGE); False where that is not to be had."""
    at_cwd, exchange = -100, 2
    try:
        rename = ctypes.CDLL(None).renameat2
        return rename(at_cwd, os.fsencode(left), at_cwd, os.fsencode(right), exchange) == 0
    except (OSError, AttributeError, TypeError):
        return False


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
