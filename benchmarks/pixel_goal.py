"""The pixel goal: frames a second, and what players without a network reach.

    taskset -c 1 python benchmarks/pixel_goal.py speed --out benchmarks/results/pixel_goal_speed.csv
    python benchmarks/pixel_goal.py players --out benchmarks/results/pixel_goal_players.csv
    python benchmarks/pixel_goal.py figure --out docs/figures/pixel_goal.png

One thread. `speed` steps N environments with random actions, in turns of about half a second, and takes the
median of the turns: of the wall-clock time, and of the process's CPU time, which other work on the machine
disturbs less. `players` plays 2,048 episodes in each of some worlds: uniformly random actions, and the
shortest path followed by rest. `figure` draws the pictures of the documentation.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

from sides import REPOSITORY, check_environment

check_environment("numpy", "torch", "PIL")
import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.insert(0, str(REPOSITORY))
from envs.pixels import make_vec  # noqa: E402
from envs.pixels.pixel_goal import draw_map, menu_picture  # noqa: E402

RECORDED = "envs/pixels/goals/map1"
SIZES = (1, 64, 1024, 16384)
WORLDS = ({}, {"difficulty": 8}, {"difficulty": 8, "door": False, "menu_prob": 0.0},
          {"num_goals": 16, "goal_in_obs": True}, {"goal_dir": RECORDED})


def speed(repeats: int):
    for pack in ("none", "2bpp"):
        turns = {n: ([], []) for n in SIZES}
        worlds = {n: make_vec("pixel-goal", n, pack=pack) for n in SIZES}
        actions = {n: torch.randint(0, 8, (64, n)).unbind() for n in SIZES}
        for env in worlds.values():
            env.reset(1)
        for turn in range(repeats + 1):  # the first warms up
            for n, env in worlds.items():
                steps = max(60, 10_000 // (1 + n // 64))
                start = time.perf_counter(), time.process_time()
                for step in range(steps):
                    env.step(actions[n][step % 64])
                if turn:
                    turns[n][0].append(n * steps / (time.perf_counter() - start[0]))
                    turns[n][1].append(n * steps / (time.process_time() - start[1]))
        for n, (wall, cpu) in turns.items():
            yield {"pack": pack, "num_envs": n, "frames_per_s": round(statistics.median(wall)),
                   "frames_per_cpu_s": round(statistics.median(cpu)), "turns": repeats}


def players(episodes: int = 2048):
    for options in WORLDS:
        for player in ("random", "shortest path"):
            env = make_vec("pixel-goal", episodes, **options)
            env.reset(0)
            torch.manual_seed(0)
            following, playing = env._next.view(-1, 8), torch.ones(episodes, dtype=torch.bool)
            returns, steps, successes = torch.zeros(episodes), torch.zeros(episodes), torch.zeros(episodes)
            while playing.any():
                code, goal = env._codes[:, -1], env._goal[:, None]
                way = env.paths[following[code], goal].argmin(1)
                way[env.paths[code, goal[:, 0]] == 0] = 0  # there: rest
                actions = torch.randint(0, 8, (episodes,)) if player == "random" else way
                _, reward, terminated, _, info = env.step(actions)
                returns += reward * playing
                steps += playing
                successes += terminated & playing
                playing &= ~info["reset_mask"]
            yield {"world": " ".join(f"{k}={v}" for k, v in options.items()) or "defaults", "player": player,
                   "success_rate": round(float(successes.mean()), 4),
                   "mean_steps": round(float(steps.mean()), 1),
                   "mean_return": round(float(returns.mean()), 2), "episodes": episodes}


def figure(path: Path, scale: int = 3) -> None:
    """The map, and what is seen: an episode's first frame, the open door, the menu, the goal."""
    from PIL import Image, ImageDraw

    env = make_vec("pixel-goal", 1, goal_in_obs=True, menu_prob=0.0)
    obs = env.reset(seed=8)[0].numpy().copy()
    recorded = make_vec("pixel-goal", 1, goal_in_obs=True, goal_dir=RECORDED).reset(0)[0, 0].numpy()
    whole = draw_map(True, (1, 0, 0))[1][0][32:32 + 144, 40:40 + 160]
    shades = [whole, obs[1], menu_picture(), obs[0], recorded]
    titles = ["the map (map_seed 1)", "a start", "the menu", "its own goal", RECORDED]
    places = [(0, 0), (168, 0), (256, 0), (168, 92), (256, 92)]
    image = Image.new("L", (scale * 344, scale * 180), 255)
    draw = ImageDraw.Draw(image)
    for picture, title, (x, y) in zip(shades, titles, places, strict=True):
        part = Image.fromarray((255 - 85 * picture).astype(np.uint8))
        part = part.resize((part.width * scale, part.height * scale), Image.Resampling.NEAREST)
        image.paste(part, (scale * (x + 4), scale * (y + 12)))
        draw.text((scale * (x + 4), scale * (y + 3)), title, fill=0, font_size=5 * scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and difficulty of the pixel goal.")
    parser.add_argument("what", choices=["speed", "players", "figure"])
    parser.add_argument("--out", type=Path, help="CSV of the measurements, or the figure")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each size; their median counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "figure":
        return figure(args.out or Path("pixel_goal.png"))
    rows = []
    for row in speed(args.repeats) if args.what == "speed" else players():
        if not rows:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        rows.append(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
