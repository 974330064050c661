"""Record a goal picture: play a script of actions and keep what the screen shows at its end.

    python tools/make_goal.py --actions "B UP*3 A RIGHT DOWN" --seed 7 --env-kwargs map_seed=1 --out mine
    python tools/make_goal.py --actions-file way.txt --stack-k 3 --keep-stack --env-kwargs k_consecutive=1 \\
        --out walk --png walk.png --force
    python tools/make_goal.py --env-id pyboy --env-kwargs rom=game.gb state=start.state --actions "A*2 UP" \\
        --out goals/door

The script begins where an episode begins, in the pixel goal the one with that --seed. Actions are separated
by blanks or commas, NAME*3 is three of them, and in a file # begins a comment. What is kept is the last
frame, or with --keep-stack the last --stack-k of them. The folder (envs/pixels/goals.py) is written only if
the environment takes it, as `--env-kwargs goal_dir=OUT` with the same options otherwise; docs/pixel_goal.md.

Prints a line of JSON: where the picture is; in the pixel goal how far it is from the world's own goal, how
many starts there are and how long their shortest paths; of a Game Boy how far it is from where episodes
begin. What cannot be recorded is one line of JSON on standard error, and exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs
from envs.pixels import make_vec
from envs.pixels.goals import SHADES, l1_distance, save_goal
from tools.command_line import answers_in_json, at_least

MOST_ACTIONS = 10_000
WORD = re.compile(r"([A-Za-z]+)(?:\*([0-9]{1,9}))?")


def parse_actions(text: str, names: list[str]) -> list[int]:
    """The actions of a script: numbers in `names`.  BadInput for a word that is none, and for too many."""
    actions = []
    for number, word in enumerate(re.sub("#.*", "", text).replace(",", " ").split(), 1):
        match = WORD.fullmatch(word)
        if not match or match[1].upper() not in names:
            raise envs.BadInput(f"word {number} of the actions, {word[:40]!r}: expected one of "
                                f"{', '.join(names)}, or NAME*COUNT")
        count = int(match[2] or 1)
        if not 1 <= count <= MOST_ACTIONS - len(actions):
            raise envs.BadInput(f"word {number} of the actions, {word[:40]!r}: expected a count from 1, and "
                                f"{MOST_ACTIONS:,} actions at most")
        actions += [names.index(match[1].upper())] * count
    if not actions:
        raise envs.BadInput("the script holds no action")
    return actions


def record_pixel_goal(options: dict, script: str, seed: int) -> tuple[np.ndarray, dict, dict]:
    """-> frames (K, 72, 80), the fields of the goal's meta, what to report"""
    from envs.pixels import pixel_goal

    config = envs.make_config(pixel_goal.PixelGoalConfig, "pixel-goal", dict(options))
    if config.num_maps * config.num_goals > 1:
        raise envs.BadInput("pixel-goal: a goal is recorded with num_maps 1 and num_goals 1")
    actions = parse_actions(script, pixel_goal.ACTIONS)
    # Reaching the world's own goal, or the time limit, must not begin another episode within the script.
    endless = dataclasses.replace(config, max_steps=MOST_ACTIONS + 1, k_consecutive=MOST_ACTIONS + 1)
    env = pixel_goal.PixelGoal(1, "cpu", endless)
    obs = env.reset(seed)
    for action in actions:
        obs, _, _, _, info = env.step(torch.tensor([action]))
    frames = env.decode(obs)[0, -config.stack_k:].numpy().copy()
    meta = dict(action_codec_id=pixel_goal.CODEC, frames_per_step=pixel_goal.FRAMES_PER_STEP,
                downsample_h=pixel_goal.HEIGHT, downsample_w=pixel_goal.WIDTH, stack_k=config.stack_k,
                tau=config.tau, k_consecutive=config.k_consecutive, pipeline_version=pixel_goal.PIPELINE,
                sha256={"world": env.world_sha256})
    return frames, meta, {"distance": round(float(info["dist"]), 6), "actions": len(actions)}


def record_game_boy(options: dict, script: str, seed: int) -> tuple[np.ndarray, dict, dict]:
    """The same of a cartridge; a seed changes nothing there."""
    game_boy = envs.load_object("envs.pixels.game_boy:GameBoy", "--env-id pyboy")
    module = sys.modules[game_boy.__module__]
    config = envs.make_config(game_boy.Config, "pyboy", dict(options))
    names = game_boy.action_names
    actions = [names[action] for action in parse_actions(script, names)]
    start, frames = (torch.from_numpy(module.record_frames(config, part)) for part in ([], actions))
    distance = float(l1_distance(frames[None], start[-1]))
    if distance < config.tau:
        raise envs.BadInput(f"{config.rom}: the script ends with what an episode begins with (distance "
                            f"{distance:.3f}, tau {config.tau}): there would be nothing to look for")
    report = {"distance_from_start": round(distance, 6), "actions": len(actions)}
    return frames.numpy(), module.goal_meta(config), report


def check(env_id: str, options: dict, frames: np.ndarray, meta: dict, out: Path) -> dict:
    """Load the goal as the environment will.  BadInput if it does not; -> what to report"""
    with tempfile.TemporaryDirectory() as folder:
        trial = str(Path(folder) / "goal")
        save_goal(trial, frames, **meta)
        try:
            env = make_vec(env_id, 1, **{**options, "goal_dir": trial})
        except envs.BadInput as error:
            raise envs.BadInput(str(error).replace(trial, str(out))) from error
    try:
        if not hasattr(env, "paths"):
            return {}
        paths = env.paths[env._start_codes].flatten()
        return {"starts": len(paths), "median_path": int(paths.median()), "longest_path": int(paths.max())}
    finally:
        env.close()


def write_png(path: Path, frames: np.ndarray, scale: int = 4) -> None:
    """The frames side by side, oldest first, light where the shade is 0."""
    from PIL import Image

    grey = (255 - frames * (255 // (SHADES - 1))).astype(np.uint8)
    picture = Image.fromarray(np.concatenate([*grey], axis=1))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that Pillow does not know
        raise envs.BadInput(f"{path}: cannot be written ({error})") from error


def record(args: argparse.Namespace) -> dict:
    options = envs.parse_options(args.env_kwargs)
    if args.stack_k is not None:
        if "stack_k" in options:
            raise envs.BadInput("stack_k is given twice: --stack-k and --env-kwargs stack_k=")
        options["stack_k"] = str(args.stack_k)
    script = args.actions
    if args.actions_file:
        try:
            script = envs.read_text(args.actions_file)
        except (OSError, ValueError) as error:
            raise envs.BadInput(f"{args.actions_file}: cannot be read ({error})") from error
    if args.env_id not in RECORDERS:
        raise envs.BadInput(f"--env-id {args.env_id}: expected one of {', '.join(RECORDERS)}")
    if options.get("goal_dir"):
        raise envs.BadInput("--env-kwargs goal_dir: a goal is recorded without one; name the folder by --out")
    frames, meta, report = RECORDERS[args.env_id](options, script, args.seed)
    meta |= {"recorded": {"env_id": args.env_id, "env_kwargs": options, "seed": args.seed,
                          "actions": " ".join(re.sub("#.*", "", script).split())}}
    goal = frames if args.keep_stack else frames[-1]
    report |= check(args.env_id, options, goal, meta, args.out)
    if args.png:
        write_png(args.png, frames if args.keep_stack else frames[-1:])
    meta = save_goal(args.out, goal, force=args.force, **meta)
    return {"out": str(args.out), "shape": list(goal.shape), **report,
            "template_sha256": meta["template_sha256"]}


RECORDERS = {"pixel-goal": record_pixel_goal, "pyboy": record_game_boy}


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="Record a goal picture from a script of actions.")
    script = parser.add_mutually_exclusive_group(required=True)
    script.add_argument("--actions", help='such as "B UP*3 A RIGHT DOWN"')
    script.add_argument("--actions-file", type=Path, help="the same from a file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the goal template")
    parser.add_argument("--env-id", default="pixel-goal", help=f"one of {', '.join(RECORDERS)}")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="its options")
    parser.add_argument("--seed", type=at_least(0, most=2**31), default=1,
                        help="of the episode in which the script is played")
    parser.add_argument("--stack-k", type=int, metavar="K", help="frames in an observation (stack_k=K)")
    parser.add_argument("--keep-stack", action="store_true", help="the goal is the stack, not the last frame")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also write the picture for people")
    parser.add_argument("--force", action="store_true", help="replace the folder's goal template")
    return record(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
