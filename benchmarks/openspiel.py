"""What the games of envs/openspiel.py cost: tasks and scores per second, and 512 replies of an iteration.

    python benchmarks/openspiel.py speed --out benchmarks/results/openspiel.csv
    python benchmarks/openspiel.py games --out benchmarks/results/openspiel_games.csv     # who wins how often
    python benchmarks/openspiel.py games --model DIR --cases "breakthrough(rows=5,columns=4)"    # and a model

One process, one thread (open_spiel holds Python's lock while it plays, so threads would not help). Times are
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import envs
from envs.openspiel import CASES

SMALL = ("tic_tac_toe", "breakthrough(rows=5,columns=4)", "hex(board_size=4)")
TASKS, GROUP = 64, 8
GAMES = 400


def seconds(work, least=0.5):
    """Processor time of a call of work(k), k = 0, 1, ..., over at least so long [s]."""
    began, count = time.process_time(), 0
    while (spent := time.process_time() - began) < least or count < 3:
        work(count)
        count += 1
    return spent / count


def speed(case, least):
    """What tasks and replies cost, and what random legal moves and the reference moves score."""
    env = envs.make("openspiel", cases=case, num_tasks_per_case=1_000_000)
    legal = envs.make("openspiel", cases=case, num_tasks_per_case=1_000_000, reward_mode="legal")
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
    few = envs.make("openspiel", cases=case, num_tasks_per_case=1_000_000, baseline_moves=16)
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


def games(case, least):
    """Share of whole games won against random play and MCTS, from openings of 0 to 2 random moves."""
    result = {"case": case}
    for opponent, count in (("random", GAMES), ("mcts", GAMES // 4)):
        for name in ("random", "reference"):
            wins, turns = won(case, count, opponent, random_player if name == "random" else reference_player)
            result |= {f"{name} against {opponent}": wins, f"turns of {name} against {opponent}": turns}
    return result


def random_player(episodes, prompts):
    """Uniformly random legal moves, the same ones whenever asked for."""
    return [e.state.action_to_string(e.player, random.Random(f"{e.task.id} {e.turns}").choice(
        e.state.legal_actions(e.player))) for e in episodes]


def reference_player(episodes, prompts):
    """The best moves by playouts of the opponent's kind."""
    return [episode.env.reference(episode.case, episode.state, episode.player, episode.task.id)
            for episode in episodes]


def model_player(folder):
    """A model that reads each state as a prompt of its own, at temperature 1."""
    import torch

    import sft

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, tokenizer = sft.load_weights(folder), sft.load_tokenizer(folder)

    def player(episodes, prompts):
        ids = [sft.prompt_tokens([prompt], tokenizer) for prompt in prompts]
        with torch.no_grad():
            replies = sft.generate(model, ids, 8, 1.0, tokenizer)
        return tokenizer.batch_decode([ids for ids, _ in replies], skip_special_tokens=True)
    return player


def won(case, count, opponent, player, style="full"):
    """Play so many games side by side.  -> share of wins, mean turns"""
    env = envs.make("openspiel", cases=case, mode="game", opponent=opponent, max_random_steps=2, style=style,
                    num_tasks_per_case=count)
    tasks = [env.task("test", k) for k in range(count)]
    playing = [(env.start(task, 0), task.messages[0]) for task in tasks]
    ends = []
    while playing:
        replies = player(*zip(*playing, strict=True))
        steps = [episode.step(reply) for (episode, _), reply in zip(playing, replies, strict=True)]
        ends += [step.info for step in steps if step.terminated or step.truncated]
        playing = [(episode, step.messages[0]) for (episode, _), step in zip(playing, steps, strict=True)
                   if step.messages]
    return tuple(round(sum(info[part] for info in ends) / count, 3) for part in ("correct", "turns"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "games"), nargs="?", default="speed")
    parser.add_argument("--model", default="", help="only games of this model against random play")
    parser.add_argument("--style", default="words", help="of its prompts")
    parser.add_argument("--out", type=Path, default=Path("openspiel.csv"), help="the CSV to write")
    parser.add_argument("--cases", default="", help="game strings with ; between them")
    parser.add_argument("--seconds", type=float, default=0.5, help="processor time of each measurement [s]")
    args = parser.parse_args()
    default = (*SMALL, *CASES) if args.what == "speed" else SMALL
    cases = re.split(" *; *", args.cases) if args.cases else default
    if args.model:
        print(won(cases[0], GAMES, "random", model_player(args.model), args.style))
        return
    rows = []
    for case in cases:
        rows.append((speed if args.what == "speed" else games)(case, args.seconds))
        print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
