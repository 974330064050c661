"""What the games of envs/openspiel cost: tasks and scores per second, and 512 replies of an iteration.

    python benchmarks/openspiel.py speed --out benchmarks/results/openspiel.csv
    python benchmarks/openspiel.py games --out benchmarks/results/openspiel_games.csv     # who wins how often
    python benchmarks/openspiel.py games --model DIR DIR --cases "hex(board_size=4)" --out games.csv    # they
    python benchmarks/openspiel.py iteration --out benchmarks/results/openspiel_iteration.csv    # who waits?

speed: one process, one thread (open_spiel holds Python's lock while it plays, so threads would not help), and
processor time. An iteration is 64 tasks with 8 replies each, random legal moves: the first reply of a task
plays the games on from every legal move, the others look their score up. "With 16": baseline_moves=16.

iteration: the same by the clock, through grpo_llm.rollout, with a sampler that sleeps for a stated time and
then has all replies (`together`, as --engine hf), or hands them out evenly during the second half of it
(`spread`, as vLLM). workers=0 and the default take turns on new tasks, after a first use that is not
counted. The wait is the time from the last reply to the last score: medians, and the longest.
"""

import argparse
import asyncio
import csv
import os
import random
import re
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from sides import REPOSITORY, check_environment

check_environment("numpy", "pyspiel", "torch", "transformers", "tyro", "pydantic")
sys.path.insert(0, str(REPOSITORY))
import envs  # noqa: E402
from envs.openspiel import CASES  # noqa: E402

SMALL = ("tic_tac_toe", "breakthrough(rows=5,columns=4)", "hex(board_size=4)")
TASKS, GROUP = 64, 8
GAMES = 400
TURNS = 5  # of an iteration, each way
ITERATIONS = (  # name, options, whether replies come spread, time that sampling takes [s]
    ("16 default cases", {}, False, 10), ("16 default cases", {}, True, 10),
    ("the same, baseline_moves=16", {"baseline_moves": 16}, False, 10),
    ("go 13, baseline_moves=16", {"cases": "go(board_size=13)", "baseline_moves": 16}, False, 10),
    ("chess", {"cases": "chess"}, False, 30))


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


def one_iteration(env, tasks, replies, spread, seconds):
    """-> seconds of it, seconds from the last reply to the last score, rewards"""
    import grpo_llm

    class Sampler(grpo_llm.Engine):
        """Stands in for an engine on another device: sleeps, and answers the k-th request with the id k."""

        def __init__(self):
            self.eos = (1,)

        async def serve(self):
            requests = []
            while len(requests) < len(replies):
                requests += await self.next_requests()
            began = time.perf_counter()
            self.ended = began + seconds
            for number, request in enumerate(requests):
                share = (1 + (number + 1) / len(requests)) / 2 if spread else 1
                if (left := began + share * seconds - time.perf_counter()) > 0:
                    await asyncio.sleep(left)
                request.future.set_result(([number, 1], [0.0, 0.0]))
            await asyncio.Event().wait()  # there is no second turn

    class Tokenizer:
        def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt):
            return ""

        def __call__(self, texts, add_special_tokens):
            return SimpleNamespace(input_ids=[[0]] * len(texts))

        def decode(self, ids):
            return replies[ids[0]]

    args = grpo_llm.Args(chat_template="plain", max_response_tokens=2, max_context_tokens=9)
    sampler, began = Sampler(), time.perf_counter()
    sampling = grpo_llm.Sampling(1.0, (args.seed, "train"))
    rollouts = grpo_llm.rollout(sampler, Tokenizer(), env, tasks, GROUP, sampling, args,
                                grpo_llm.episode_reward)
    end = time.perf_counter()
    return end - began, end - sampler.ended, [r.reward for r in rollouts]


def iteration(name, options, spread, seconds):
    """What scoring adds to an iteration, in this process and with workers."""
    both = {workers: envs.make("openspiel", workers=workers, num_tasks_per_case=10_000, **options)
            for workers in (0, -1)}
    env, found = both[0], {0: [], -1: []}
    for turn in range(-1, TURNS):
        # As many tasks of each case; the first turn warms up.
        count = TASKS // len(env.cases)
        tasks = [env.task("train", case * 10_000 + (turn + 1) * count + k)
                 for k in range(count if turn >= 0 else 1) for case in range(len(env.cases))]
        rng, replies = random.Random(turn), []
        for task in tasks:
            _, state, player = env.load(task)
            replies += [state.action_to_string(player, rng.choice(state.legal_actions(player)))
                        for _ in range(GROUP)]
        rewards = {}
        for workers in (0, -1) if turn % 2 else (-1, 0):
            *times, rewards[workers] = one_iteration(both[workers], tasks, replies, spread,
                                                     seconds if turn >= 0 else 0)
            found[workers] += [times] * (turn >= 0)
        assert rewards[0] == rewards[-1]
    row = {"cases": name, "replies": "spread" if spread else "together", "sampling [s]": seconds}
    for workers, times in found.items():
        label = "workers=0" if workers == 0 else f"workers={env.pool.count}"
        whole, waits = zip(*times, strict=True)
        row |= {f"{label}: iteration [s]": round(statistics.median(whole), 2),
                f"{label}: wait [s]": round(statistics.median(waits), 2),
                f"{label}: longest wait [s]": round(max(waits), 2)}
    return row | {"load": round(os.getloadavg()[0], 1)}


def games(case, least):
    """Share of whole games won against random play and MCTS, from openings of 0 to 2 random moves."""
    result = {"case": case}
    for opponent, count in (("random", GAMES), ("mcts", GAMES // 4)):
        for name, player in (("random", random_player), ("reference", reference_player)):
            wins, turns = won(case, count, opponent, player)
            result |= {f"{name} against {opponent}": wins, f"turns of {name} against {opponent}": turns}
    return result


def games_of_models(case, folders, style):
    """A row for each player: the share of whole games that it wins against each opponent."""
    players = {"random legal moves": random_player, "reference": reference_player}
    players |= {f"{folder}{how}": model_player(folder, temperature) for folder in folders
                for how, temperature in (("", 1.0), (", greedy", 0.0))}
    return [{"player": name} | {f"against {opponent}": won(case, GAMES, opponent, player, style)[0]
                                for opponent in ("random", "mcts", "reference")}
            for name, player in players.items()]


def random_player(episodes, conversations):
    """Uniformly random legal moves, the same ones whenever asked for."""
    return [e.state.action_to_string(e.player, random.Random(f"{e.task.id} {e.turns}").choice(
        e.state.legal_actions(e.player))) for e in episodes]


def reference_player(episodes, conversations):
    """The best moves by playouts of the opponent's kind."""
    return [episode.env.reference(episode.case, episode.state, episode.player, episode.task.id)
            for episode in episodes]


def model_player(folder, temperature):
    """A model that reads the conversation so far, as in training with mode=game."""
    import torch

    import grpo_llm

    torch.set_num_threads(1)
    torch.manual_seed(1)
    args = grpo_llm.Args(model=folder)
    model, tokenizer = grpo_llm.load_weights(folder), grpo_llm.load_tokenizer(args)

    def player(episodes, conversations):
        texts = [grpo_llm.render(messages, tokenizer, args) for messages in conversations]
        prompts = tokenizer(texts, add_special_tokens=False).input_ids
        seeds = torch.randint(2**40, (len(prompts),)).tolist()
        replies = grpo_llm.generate(model, prompts, 8, temperature, [tokenizer.eos_token_id], seeds)
        return tokenizer.batch_decode([ids for ids, _ in replies], skip_special_tokens=True)
    return player


class Reference:
    """The reference player as an opponent: it takes the move that scores best by 8 playouts."""

    def __init__(self, episode):
        self.episode = episode

    def step(self, state):
        e = self.episode
        scores = e.env.scores(e.case, state, state.current_player(), e.task.id)
        return max(scores, key=scores.get)


def won(case, count, opponent, player, style="full"):
    """Play so many games side by side, all held out.  -> share of wins, mean turns"""
    env = envs.make("openspiel", cases=case, mode="game", max_random_steps=2, style=style,
                    opponent="mcts" if opponent == "mcts" else "random", num_tasks_per_case=count)
    tasks = [env.task("test", k) for k in range(count)]
    playing = [(env.start(task, 0), task.messages) for task in tasks]
    for episode, _ in playing:
        episode.bot = Reference(episode) if opponent == "reference" else episode.bot
    ends = []
    while playing:
        replies = player(*zip(*playing, strict=True))
        steps = [episode.step(reply) for (episode, _), reply in zip(playing, replies, strict=True)]
        ends += [step.info for step in steps if step.terminated or step.truncated]
        playing = [(episode, [*messages, {"role": "assistant", "content": reply}, *step.messages])
                   for (episode, messages), reply, step in zip(playing, replies, steps, strict=True)
                   if step.messages]
    return tuple(round(sum(info[part] for info in ends) / count, 3) for part in ("correct", "turns"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "games", "iteration"), nargs="?", default="speed")
    parser.add_argument("--model", nargs="*", default=[], help="games of these models, in the first case")
    parser.add_argument("--style", default="words", help="of its prompts")
    parser.add_argument("--out", type=Path, default=Path("openspiel.csv"), help="the CSV to write")
    parser.add_argument("--cases", default="", help="game strings with ; between them")
    parser.add_argument("--seconds", type=float, default=0.5,
                        help="processor time of each measurement [s]; of `iteration --cases` of sampling")
    args = parser.parse_args()
    default = (*SMALL, *CASES) if args.what == "speed" else SMALL
    cases = re.split(" *; *", args.cases) if args.cases else default
    rows = games_of_models(cases[0], args.model, args.style) if args.model else []
    if args.what == "iteration":
        cases = [(args.cases, {"cases": args.cases}, True, args.seconds)] if args.cases else ITERATIONS
    for case in () if args.model else cases:
        rows.append(iteration(*case) if args.what == "iteration" else
                    (speed if args.what == "speed" else games)(case, args.seconds))
        print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
