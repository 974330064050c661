"""Show what a policy does: play episodes with a checkpoint of a2c_vecenv.py and draw them as a GIF.

    python tools/dump_policy_gif.py --run runs/a2c/20261121_041500__a2c__pixel-goal__s1 --out look
    python tools/dump_policy_gif.py --checkpoint checkpoints/step_001600 --greedy --episodes 3 --out look
    python tools/dump_policy_gif.py --run runs/a2c/mine --env-kwargs menu_prob=1 --steps 40 --out look

In one environment, with the flags of the run; --env-kwargs adds options or replaces them. Episode number i
(from 0) begins as row i of a training with that --seed does, and stops when it ends or after --steps steps.

    rollout.gif    1 + steps frames an episode: what it begins with, then what each step led to. The last one
                   is what the episode ended with, not the first of the next episode, which the environment
                   has begun already. On the right the goal, below it the distance so far
    rollout.jsonl  a line per step: step (from 1 in each episode), action, reward, value (of the observation
                   that the action was chosen on), dist (null without a goal), done (terminated), trunc
    meta.json      flags, hashes and how each episode went

A Gymnasium id is drawn by its render_mode rgb_array; where it has none, its image observations are shown.
The last line printed is JSON, "ok": true; or false with a reason and exit status 1, and then no GIF.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from a2c_vecenv import Agent, Args, choose_actions, make_env, sha256
from envs import BadInput
from envs.pixels import VEC_ENVS, derive_seed
from tools.command_line import Parser, at_least, one_line
from tools.runs import checkpoints

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it would stand before the JSON
ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
INK, PAPER, FAINT, ACCENT = (40, 40, 48), (234, 234, 238), (180, 180, 188), (213, 94, 0)
STRIP, GAP = 40, 12  # height of the text below the pictures, room between them [pixels]
FIRST_AND_LAST = 800  # how long an episode's two ends are shown at least [ms]


# The checkpoint


def newest_checkpoint(run: Path) -> tuple[Path, dict, dict, list[str]]:
    """-> the newest one that is complete, its meta line and state; the names of damaged newer ones"""
    folders = checkpoints(run)
    if not folders:
        raise BadInput(f"--run {run}: no checkpoints/step_* in it")
    damaged = []
    for folder in reversed(folders):
        try:
            return folder, *load_checkpoint(folder), damaged
        except BadInput as error:
            damaged.append(folder.name)
            reason = error
    raise BadInput(f"--run {run}: no checkpoint in it can be used ({reason})")


def load_checkpoint(folder: Path) -> tuple[dict, dict]:
    """-> meta line of the run, state.  BadInput for what is no complete checkpoint of a2c_vecenv.py"""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {name: (folder / name).read_bytes() for name in manifest}
        if wrong := [name for name in manifest if sha256(folder / name) != manifest[name]]:
            raise ValueError(f"{wrong[0]} is not what was written")
        state = torch.load(io.BytesIO(files["trainer_state.pt"]), map_location=CPU, weights_only=True)
        return json.loads(files["meta.json"]), state | {"sha256": manifest["trainer_state.pt"]}
    except Exception as error:  # torch.load raises many kinds; weights_only runs no code of the file
        reason = one_line(error).partition(". ")[0]
        raise BadInput(f"checkpoint {folder}: not a complete one of a2c_vecenv.py ({reason})") from error


def run_args(meta: dict, extra: list[str]) -> Args:
    """The flags of the run, with further options of the environment."""
    try:
        known = {name: value for name, value in meta["args"].items() if name in Args.__dataclass_fields__}
        return Args(**known | {"env_kwargs": (*known["env_kwargs"], *extra)})
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"the checkpoint's flags cannot be used ({one_line(error)})") from error


# The environment and its pictures


def open_env(args: Args, seed: int):
    """One environment that can be drawn, and the function that does: it takes what an observation of a row
    is, and returns uint8 (H, W) or (H, W, 3).
    """
    if args.env_id in VEC_ENVS:
        env = make_env(args, 1, CPU)
        return env, lambda obs: 255 - 85 * env.decode(obs)[-1].numpy()
    reason = None
    for extra in (("render_mode=rgb_array",), ()):
        env = None
        try:
            env = make_env(dataclasses.replace(args, env_kwargs=args.env_kwargs + extra), 1, CPU)
            env.reset(seed)
            if extra:
                as_frame(env.frames())
                return env, follow(env)
            if len(env.obs_shape) == 3:
                return env, lambda obs: as_frame(obs[-1] if len(obs) != 3 else obs.permute(1, 2, 0))
            reason = f"{reason}, and its observations are no images"
        except Exception as error:  # an environment may raise anything at all
            reason = one_line(error)
        if env:
            env.close()
    raise BadInput(f"environment {args.env_id} cannot be drawn: {reason}")


def follow(env):
    """Pictures by `render`; of an episode that ended the one from before the environment began the next."""
    (row,), last = env._rows, []
    begin = row.reset

    def reset(**options):
        last[:] = [as_frame(row.render())]
        return begin(**options)

    def draw(obs):
        return last.pop() if last else as_frame(env.frames())

    row.reset = reset
    env.forget = last.clear
    return draw


def as_frame(frame) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3); BadInput for what is no picture."""
    frame = np.asarray(frame)
    if frame.dtype != np.uint8 or frame.ndim not in (2, 3) or frame.shape[2:] not in ((), (3,)):
        raise BadInput(f"render_mode rgb_array gave no picture ({frame.dtype} of shape {frame.shape})")
    return frame.copy()


# Episodes


@dataclasses.dataclass
class Episode:
    goal: np.ndarray | None
    frames: list[np.ndarray]  # 1 + len(steps)
    steps: list[dict]  # the lines of rollout.jsonl

    def outcome(self, has_goal: bool) -> dict:
        last = self.steps[-1]
        return {"steps": len(self.steps), "return": math.fsum(step["reward"] for step in self.steps),
                "success": last["done"] if has_goal else None, "done": last["done"], "trunc": last["trunc"]}


@torch.no_grad()
def play(agent, env, draw, args: Args, seed: int, row: int, most: int, greedy: bool) -> Episode:
    torch.manual_seed(derive_seed(seed, "episode", row))
    env.others = (row, 0)  # those before it would have had the rows before
    obs = env.reset(seed)
    getattr(env, "forget", lambda: None)()
    episode = Episode(env.goal_picture(), [draw(obs[0])], [])
    for number in range(1, most + 1):
        logits, value = agent(obs)
        if not (logits.isfinite().all() and value.isfinite().all()):
            raise BadInput(f"the network's output at step {number} is not finite")
        action = choose_actions(logits, greedy)
        obs, reward, terminated, truncated, info = env.step(action)
        ended = bool(info["reset_mask"])
        episode.frames.append(draw(info["final_obs"][0] if ended else obs[0]))
        episode.steps.append(dict(
            step=number, action=int(action), reward=float(reward), value=float(value),
            dist=float(info["dist"]) if env.has_goal else None, done=bool(terminated), trunc=bool(truncated)))
        if ended:
            break
    return episode


# Drawing


def enlarge(frame: np.ndarray, scale: int) -> Image.Image:
    picture = Image.fromarray(frame).convert("RGB")
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def draw_frame(episode: Episode, number: int, scale: int, action_names: list[str], tau) -> Image.Image:
    """Frame `number` of an episode (0: its beginning), the goal beside it, a strip of text below."""
    screen = enlarge(episode.frames[number], scale)
    goal = None if episode.goal is None else enlarge(episode.goal, scale)
    width = max(screen.width + (GAP + goal.width if goal else 0), 200)
    canvas = Image.new("RGB", (width, max(screen.height, goal.height if goal else 0) + STRIP), PAPER)
    canvas.paste(screen, (0, 0))
    pen = ImageDraw.Draw(canvas)
    pen.fontmode = "1"  # no shades of grey: a small palette, and text that does not flicker
    font, line = ImageFont.load_default(13), canvas.height - STRIP + 4

    # The number of the step is in every frame: of equal ones Pillow would write one alone.
    step = episode.steps[number - 1] if number else None
    name = action_names[step["action"]] if step else "start"
    pen.text((4, line), f"{number}  {name}", INK, font)
    if step:
        end = ("goal reached" if goal else "over") if step["done"] else "time is up" if step["trunc"] else ""
        pen.text((4, line + 17), f"reward {step['reward']:+.2f}   value {step['value']:.2f}", INK, font)
        pen.text((screen.width - 4, line), end, ACCENT, font, anchor="ra")
    if goal:
        left, bottom = screen.width + GAP, canvas.height - 4
        canvas.paste(goal, (left, 0))
        pen.text((left, line), "goal", INK, font)
        pen.text((left, line + 17), f"distance {step['dist']:.3f}" if step else "distance", INK, font)
        dist = [step["dist"] for step in episode.steps]
        right, top = left + goal.width - 4, line
        left += 110
        high = max(*dist, tau, 1e-9)

        def place(index, value):
            return (left + (right - left) * index / max(len(dist) - 1, 1),
                    bottom - (bottom - top) * value / high)

        if left < right:  # there is room
            pen.line([place(0, tau), (right, place(0, tau)[1])], FAINT)
        if left < right and number > 1:
            pen.line([place(index, value) for index, value in enumerate(dist[:number])], ACCENT, 2)
    return canvas


def write_gif(path: Path, episodes: list[Episode], scale: int, fps: float, action_names, tau) -> int:
    """scale 0: up to 4, as long as the screen is 640 pixels wide at most.  -> the number of frames"""
    pictures, milliseconds = [], []
    scale = scale or max(1, min(4, 640 // episodes[0].frames[0].shape[1]))
    for episode in episodes:
        for number in range(len(episode.frames)):
            picture = draw_frame(episode, number, scale, action_names, tau)
            pictures.append(picture.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE))
            milliseconds.append(round(1000 / fps))
        for end in (-len(episode.frames), -1):
            milliseconds[end] = max(milliseconds[end], FIRST_AND_LAST)
    buffer = io.BytesIO()
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    path.write_bytes(buffer.getvalue())
    return len(pictures)


# The command


def dump(args: argparse.Namespace) -> dict:
    damaged = []
    if args.run:
        path, meta, state, damaged = newest_checkpoint(args.run)
    else:
        path, (meta, state) = args.checkpoint, load_checkpoint(args.checkpoint)
    flags = run_args(meta, args.env_kwargs)
    torch.set_num_threads(1)
    env, draw = open_env(flags, args.seed)
    try:
        if not args.env_kwargs and env.log_meta["goal_sha256"] != meta.get("goal_sha256"):
            raise BadInput(f"the goal of {flags.env_id} is not the one that the checkpoint was trained on; "
                           "to see it all the same, name the goal by --env-kwargs")
        agent = Agent(env, flags.network, flags.hidden_size, flags.dtype)
        try:
            agent.load_state_dict(state["agent"])
        except (KeyError, RuntimeError) as error:
            raise BadInput(f"checkpoint {path}: its network does not fit the environment "
                           f"({one_line(error)})") from error
        episodes = [play(agent, env, draw, flags, args.seed, index, args.steps, args.greedy)
                    for index in range(args.episodes)]
        tau = env.config.tau if env.has_goal else 0.0
    finally:
        env.close()
    outcomes = [episode.outcome(env.has_goal) for episode in episodes]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        frames = write_gif(args.out / "rollout.gif", episodes, args.scale, args.fps, env.action_names, tau)
        lines = [json.dumps(step, allow_nan=False) + "\n" for episode in episodes for step in episode.steps]
        (args.out / "rollout.jsonl").write_text("".join(lines))
        told = dict(checkpoint=str(path), checkpoint_sha256=state["sha256"], damaged=damaged,
                    iteration=state["iteration"], run_id=meta["run_id"], run_git_sha=meta["git_sha"],
                    git_sha=git_sha(), goal_sha256=env.log_meta["goal_sha256"], args=meta["args"],
                    env_kwargs=list(flags.env_kwargs), seed=args.seed,
                    mode="greedy" if args.greedy else "sample", most_steps=args.steps, scale=args.scale,
                    fps=args.fps, frames=frames, episodes=outcomes)
        (args.out / "meta.json").write_text(json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise BadInput(f"--out {args.out}: cannot be written ({error})") from error
    return {"ok": True, "out": str(args.out), "checkpoint": str(path), "damaged": damaged, "frames": frames,
            "episodes": outcomes}


def git_sha() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() or None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Play episodes with a checkpoint and draw them as a GIF.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="run folder; its newest complete checkpoint is taken")
    source.add_argument("--checkpoint", type=Path, help="a folder checkpoints/step_<iteration>")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--greedy", action="store_true", help="take the likeliest action")
    mode.add_argument("--sample", action="store_true", help="draw actions as in training (default)")
    parser.add_argument("--steps", type=at_least(1, most=10_000), default=1000, metavar="N",
                        help="of an episode at most (1000)")
    parser.add_argument("--episodes", type=at_least(1, most=100), default=1, metavar="K", help="how many (1)")
    parser.add_argument("--seed", type=at_least(0, most=2**31), default=0, help="of the episodes (0)")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE",
                        help="options of the environment, added to those of the run")
    parser.add_argument("--scale", type=at_least(1, most=32), default=0, metavar="PIXELS",
                        help="a pixel of the environment becomes so many (4; fewer for large pictures)")
    parser.add_argument("--fps", type=at_least(0.1, float, 50), default=8, help="steps shown per second (8)")
    try:
        print(json.dumps(dump(parser.parse_args(argv)), allow_nan=False))
    except Exception as error:
        print(json.dumps({"ok": False, "reason": one_line(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
