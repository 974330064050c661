"""How fast the logic families make tasks and judge replies, and what simple players score.

    python benchmarks/logic.py --out benchmarks/results/logic.csv

One process, processor time. A task is made with the default options (chat), from its number to its prompt. A
reply is the reference solution, or the prompt sent back. The random player answers in the right form:

    dyck_language, dyck_language2      what is given, and as many random brackets of the task's as are needed
    game_of_24                         a random legal game (countdown's novice), as an expression
    operation                          a whole number between -99 and 99
    cryptarithm                        a digit for each letter, at random, all different
    boolean_expressions                any set of the labels but none
    sudoku                             random digits in the empty cells
    dyck_language_reasoning_errors     two to five steps

The constant player always says the same: None in game_of_24, 0 in operation, all labels, no wrong step, one
and the same bracket as often as any are missing.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from pathlib import Path

from sides import REPOSITORY, check_environment

check_environment("numpy", "pydantic")
sys.path.insert(0, str(REPOSITORY))
import envs  # noqa: E402
from envs import logic  # noqa: E402
from envs.countdown import Rules, expression, random_game, tree  # noqa: E402
from envs.logic.cryptarithm import equation  # noqa: E402


def random_reply(task, rng) -> str:
    data, name = task.data, logic.TYPES[task.data["type"]].name
    if name in ("dyck_language", "dyck_language2"):
        side = [pair[name == "dyck_language"] for pair in data["pairs"]]
        added = "".join(rng.choice(side) for _ in data["missing"])
        return data["given"] + added if name == "dyck_language" else added + data["given"]
    if name == "game_of_24":
        steps = random_game(data["numbers"], Rules(data["operators"], float("inf"), False), rng.random)
        return f"```\n{expression(tree(data['numbers'], steps))}\n```" if steps else ""
    if name == "operation":
        return f"\\boxed{{{rng.randint(-99, 99)}}}"
    if name == "cryptarithm":
        digits = dict(zip(data["digits"], rng.sample("0123456789", len(data["digits"])), strict=True))
        numbers = ["".join(digits[letter] for letter in word) for word in data["words"]]
        return f"\\boxed{{{equation(numbers, data['operators'])}}}"
    if name == "boolean_expressions":
        labels = "ABCDEFGH"[:len(data["statements"])]
        chosen = rng.randrange(1, 2 ** len(labels))
        return f"\\boxed{{{', '.join(c for k, c in enumerate(labels) if chosen >> k & 1)}}}"
    if name == "sudoku":
        return "".join(cell if cell != "." else rng.choice("123456789") for cell in data["puzzle"])
    steps = rng.sample(range(1, len(data["sequence"]) + 1), rng.randint(2, min(5, len(data["sequence"]))))
    return f"\\boxed{{{', '.join(map(str, steps))}}}"


def constant_reply(task) -> str:
    data, name = task.data, logic.TYPES[task.data["type"]].name
    if name in ("dyck_language", "dyck_language2"):
        side = data["pairs"][0][name == "dyck_language"]
        added = side * len(data["missing"])
        return data["given"] + added if name == "dyck_language" else added + data["given"]
    labels = ", ".join("ABCDEFGH"[:len(data.get("statements", "A"))])
    return {"game_of_24": "```\nNone\n```", "operation": "\\boxed{0}", "cryptarithm": "\\boxed{}",
            "boolean_expressions": f"\\boxed{{{labels}}}", "sudoku": "123456789\n" * 9,
            "dyck_language_reasoning_errors": "\\boxed{none}"}[name]


def timed(function, *inputs) -> tuple[object, float]:
    began = time.process_time()
    value = function(*inputs)
    return value, 1e3 * (time.process_time() - began)


def measure(number: int, count: int) -> dict:
    """Times [ms] of so many tasks of a type, half of them held out, and what share each player gets right."""
    env, rng = envs.make("logic", types=str(number)), random.Random(number)
    made, judged, scores = [], [], {"solution": 0, "echo": 0, "random": 0, "constant": 0}
    for k in range(count):
        task, spent = timed(env.by_id, logic.encode(number, k // 2 + (k % 2) * logic.TEST_SEEDS))
        made.append(spent)
        replies = {"solution": env.solution(task), "echo": task.messages[0]["content"],
                   "random": random_reply(task, rng), "constant": constant_reply(task)}
        for player, reply in replies.items():
            step, spent = timed(env.start(task, 0).step, reply)
            scores[player] += step.reward
            if player == "solution":
                judged.append(spent)
    made.sort()
    judged.sort()
    row = {"type": number, "name": logic.TYPES[number].name, "tasks": count,
           "tasks_per_s": 1e3 * count / sum(made), "task_p50_ms": made[count // 2],
           "task_p99_ms": made[count * 99 // 100], "replies_per_s": 1e3 * count / sum(judged),
           "reply_p50_ms": judged[count // 2], "reply_p99_ms": judged[count * 99 // 100]}
    row = {key: float(f"{value:.3g}") if isinstance(value, float) else value
           for key, value in row.items()}
    return row | {player: round(total / count, 4) for player, total in scores.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--tasks", type=int, default=2000, help="tasks per type; of the slow ones a tenth")
    args = parser.parse_args(argv)
    slow = {"cryptarithm", "sudoku"}
    rows = []
    for number, family in enumerate(logic.TYPES):
        rows.append(measure(number, args.tasks // 10 if family.name in slow else args.tasks))
        print(rows[-1], flush=True)
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
