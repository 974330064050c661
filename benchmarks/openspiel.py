"""What the games of envs/openspiel cost: tasks and scores per second, and 512 replies of an iteration.

    python benchmarks/openspiel.py --out benchmarks/results/openspiel.csv

One process, one thread (open_spiel holds Python's lock while it plays, so threads would not help), and
processor time. An iteration is 64 tasks with 8 replies each, random legal moves: the first reply of a task
plays the games on from every legal move, the others look their score up. "With 16": baseline_moves=16.
"""

import argparse
import csv
import random
import re
import sys
import time
from pathlib import Path

from sides import REPOSITORY, check_environment

check_environment("numpy", "pyspiel", "torch", "transformers", "tyro", "pydantic")
sys.path.insert(0, str(REPOSITORY))
import envs  # noqa: E402
from envs.openspiel import CASES  # noqa: E402

SMALL = ("tic_tac_toe", "breakthrough(rows=5,columns=4)", "hex(board_size=4)")
TASKS, GROUP = 64, 8


def seconds(work, least=0.5):
    """Processor time of a call of work(k), k = 0, 1, ..., over at least so long [s]."""
    began, count = time.process_time(), 0
    while (spent := time.process_time() - began) < least or count < 3:
        work(count)
        count += 1
    return spent / count


def speed(case, least):
    """What tasks and replies cost, and what random legal moves and the reference moves score."""
    options = dict(cases=case, num_tasks_per_case=1_000_000, workers=0)
    env, legal = envs.make("openspiel", **options), envs.make("openspiel", **options, reward_mode="legal")
    task_s = {split: seconds(lambda k, split=split: env.task(split, k), least) for split in env.splits}
    tasks = [env.task("train", k) for k in range(TASKS)]
    rng, replies = random.Random(0), {}
    for task in tasks:
        _, state, player = env.load(task)
        replies[task.id] = [state.action_to_string(player, rng.choice(state.legal_actions(player)))
                            for _ in range(GROUP)]
    moves = [len(env.load(task)[1].legal_actions()) for task in tasks]

    def score(env, task):
        return [env.start(task, 0).step(reply).info for reply in replies[task.id]]

    legal_s = seconds(lambda k: score(legal, tasks[k % TASKS]), least) / GROUP
    began, infos = time.process_time(), []
    for task in tasks:
        infos += score(env, task)
    iteration = time.process_time() - began
    few = envs.make("openspiel", **options, baseline_moves=16)
    began = time.process_time()
    for task in tasks:
        score(few, task)
    short_iteration = time.process_time() - began
    best = [env.start(task, 0).step(env.solution(task)) for task in tasks]
    ties = sum(len(set(env.scores(*env.load(task), task.id).values())) == 1 for task in tasks)
    return {"case": case, "legal moves": round(sum(moves) / TASKS, 1),
            "train tasks/s": round(1 / task_s["train"]), "test tasks/s": round(1 / task_s["test"]),
            "legal: replies/s": round(1 / legal_s), "outcome: replies/s": round(TASKS * GROUP / iteration),
            "512 replies [s]": round(iteration, 2), "with 16 [s]": round(short_iteration, 2),
            "random: outcome": round(sum(info["outcome"] for info in infos) / len(infos), 3),
            "random: correct": round(sum(info["correct"] for info in infos) / len(infos), 3),
            "reference: outcome": round(sum(step.reward for step in best) / TASKS, 3),
            "all moves alike": round(ties / TASKS, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("openspiel.csv"), help="the CSV to write")
    parser.add_argument("--cases", default="", help="game strings with ; between them")
    parser.add_argument("--seconds", type=float, default=0.5, help="processor time of each measurement [s]")
    args = parser.parse_args()
    cases = re.split(" *; *", args.cases) if args.cases else (*SMALL, *CASES)
    rows = []
    for case in cases:
        rows.append(speed(case, args.seconds))
        print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
