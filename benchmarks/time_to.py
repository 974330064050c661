"""CPU seconds until held-out accuracy is there: 0.95 greedily and 0.90 at temperature 1, on the default task.

    python benchmarks/time_to.py --sides default,maxrl,reading,ppo,trl --seeds 1,2,3,4,5
    python benchmarks/time_to.py --sides "default,--minibatches 4" --seeds 11,12 --stop    # a search

A side is a name of SIDES below and flags, flags of grpo_llm.py, or a changed copy of it (a path) and flags.
Each is a process of its own with one thread on one core. They take turns, a block of iterations each, so that
a machine that slows down slows all of them. The process's CPU time in these blocks is counted; start-up and
evaluations are not. After each block 512 held-out problems are answered greedily and twice at temperature 1.
The goal is reached at the last of three evaluations in a row whose means are 0.95 and 0.90. With --stop a
side ends there; else at the end of its schedule, where sixteen replies to each problem are drawn. --out FILE
keeps each block, --table FILE makes a table of them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time

from sides import REPOSITORY, Worker, append_csv, check_environment, in_turn

# name -> (program, its flags)
SIDES = {
    "default": ("grpo_llm", ""),
    "maxrl": ("grpo_llm", "--baseline maxrl"),
    "reading": ("docs/reading/grpo.py", ""),
    "ppo": ("ppo_llm", ""),
    "trl": ("trl", ""),
}
GREEDY, SAMPLED, IN_A_ROW = 0.95, 0.90, 3
BLOCK = 10  # iterations between evaluations
FIELDS = ("side", "seed", "iteration", "seconds", "evaluation", "greedy", "sampled", "best")


def side_of(name):
    """-> program, flags"""
    program, _, flags = name.partition(" ")
    if program.endswith(".py"):
        return program, flags
    if program in SIDES:
        script, of_side = SIDES[program]
        return script, f"{of_side} {flags}"
    return "grpo_llm", name


# A side's process


class Clock:
    """Tells the parent what a block has cost and what was reached, and waits for it."""

    def __init__(self, answers):
        self.answers, self.began = answers, time.process_time()

    def look(self, evaluate):
        """evaluate() -> numbers for the parent"""
        stopped = time.process_time()
        numbers = evaluate()
        done = time.process_time()
        answer = numbers | dict(seconds=stopped - self.began, evaluation=done - stopped)
        print(json.dumps(answer), file=self.answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.began = time.process_time()


def work(job):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = Clock(answers)
    program, flags = side_of(job["side"])
    (work_trl if program == "trl" else work_ours)(job, clock, program, shlex.split(flags))


def work_ours(job, clock, program, flags):
    """One of our programs, with its evaluation between two looks at the clock."""
    import tyro
    if program.endswith(".py"):
        spec = importlib.util.spec_from_file_location("program", REPOSITORY / program)
        module = importlib.util.module_from_spec(spec)
        sys.modules["program"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(program)
    evaluate, seen = module.evaluate, 0

    def evaluate_and_tell(*given):
        nonlocal seen
        result = None

        def numbers():
            nonlocal result
            *before, args = given[:4]
            samples = 16 if seen == -(-args.iterations // BLOCK) else 2
            args = dataclasses.replace(args, eval_samples=samples)
            result = evaluate(*before, args, *given[4:])
            metrics = result[0] if isinstance(result, tuple) else result
            return dict(greedy=metrics["val/countdown/greedy"], sampled=metrics["val/countdown/pass@1"],
                        best=metrics[f"val/countdown/pass@{samples}"])

        clock.look(numbers)
        seen += 1
        return result

    module.evaluate = evaluate_and_tell
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seed", str(job["seed"]), "--eval-every", str(BLOCK), "--run-dir", f"{folder}/run"]
        words += [*flags, *job["more"]]
        if hasattr(module.Args, "checkpoint_every"):
            words += ["--checkpoint-every", "1000000", "--log-episodes", "0"]
        module.main(tyro.cli(module.Args, args=words))
        os._exit(0)


def work_trl(job, clock, program, flags):
    """TRL with the flags of the default run, by grpo_vs_trl.py."""
    import grpo_vs_trl
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    import envs
    torch.set_num_threads(1)
    settings = job["settings"]
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY / settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / settings["model"])
    env = envs.make("countdown")
    tests = [env.task("test", index) for index in range(settings["eval_tasks"])]

    def prompt_of(task):
        return tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)

    def correct(task, text, ended):
        return float(ended and env.start(task, 1).step(text).info["correct"])

    def accuracy(samples, **sampling):
        batch = tokenizer([prompt_of(task) for task in tests], return_tensors="pt", padding=True,
                          padding_side="left", return_token_type_ids=False)
        ids = model.generate(**batch, max_new_tokens=settings["max_response_tokens"], pad_token_id=0,
                             num_return_sequences=samples, **sampling)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
        ended = (ids == tokenizer.eos_token_id).any(1).tolist()
        scores = [correct(tests[k // samples], text, end) for k, (text, end)
                  in enumerate(zip(texts, ended, strict=True))]
        best = [max(scores[k:k + samples]) for k in range(0, len(scores), samples)]
        return statistics.mean(scores), statistics.mean(best)

    def numbers(samples=2):
        model.eval()
        greedy, _ = accuracy(1, do_sample=False)
        sampled, best = accuracy(samples, do_sample=True, temperature=1.0, top_k=0)
        model.train()
        return dict(greedy=greedy, sampled=sampled, best=best)

    def rewards(prompts, completions, completion_ids, index, **_):
        return [correct(tasks[number], text, ids[-1] == tokenizer.eos_token_id)
                for number, text, ids in zip(index, completions, completion_ids, strict=True)]

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % BLOCK == 0:
                clock.look(lambda: numbers(16 if state.global_step == settings["iterations"] else 2))

    tasks = {index: env.task("train", index) for index in job["tasks"]}
    texts = {index: prompt_of(task) for index, task in tasks.items()}
    rows = Dataset.from_dict(dict(prompt=[texts[i] for i in job["tasks"]], index=job["tasks"]))
    with tempfile.TemporaryDirectory() as folder:
        config = grpo_vs_trl.trl_config(settings, output_dir=folder)
        trainer = GRPOTrainer(model, rewards, config, rows, processing_class=tokenizer, callbacks=[Look()])
        clock.look(numbers)
        trainer.train()
        os._exit(0)


# The parent


def run(sides, seed, options):
    """One seed of all sides, in turns.  -> rows of the CSV"""
    import envs
    import grpo_llm
    rows, workers, env = [], [], envs.make("countdown")
    try:
        for side in sides:
            program, flags = side_of(side)
            more = ["--iterations", str(options.iterations)] if options.iterations else []
            job = dict(side=side, seed=seed, more=more)
            python = sys.executable
            if program == "trl":
                import tyro
                args = tyro.cli(grpo_llm.Args, args=["--seed", str(seed), *shlex.split(flags), *more])
                job["settings"] = dataclasses.asdict(args)
                job["tasks"] = [envs.shuffled(cursor, seed, env.num_tasks("train"))
                                for cursor in range(args.prompts_per_iteration * args.iterations)]
                python = options.trl_python
            workers.append(Worker(__file__, python, job, options.core))
            rows.append(dict(side=side, seed=seed, iteration=0) | workers[-1].first)
        block = 0
        while workers:
            block += 1
            for worker in in_turn(workers, block):
                worker.write("go")
                line = worker.process.stdout.readline()
                if line:
                    rows.append(dict(side=worker.side, seed=seed, iteration=block * BLOCK) | json.loads(line))
                own = [row for row in rows if row["side"] == worker.side]
                reached = time_to(own)
                if not line or options.stop and math.isfinite(reached):
                    workers.remove(worker)
                    worker.close()
                    print(f"seed {seed}  {worker.side:40} {reached:7.1f} s, at the end greedy "
                          f"{own[-1]['greedy']:.3f}, temperature 1 {own[-1]['sampled']:.3f}", flush=True)
    finally:
        for worker in workers:
            worker.close()
    return [{name: row[name] for name in FIELDS} for row in rows]


def time_to(rows):
    """CPU seconds of blocks until the goal is reached; infinity: it is not.  rows: of one side and seed"""
    seconds = 0.0
    for place, row in enumerate(rows):
        if row["iteration"]:
            seconds += row["seconds"]
        last = rows[max(0, place + 1 - IN_A_ROW):place + 1]
        if (len(last) == IN_A_ROW and statistics.mean(r["greedy"] for r in last) >= GREEDY
                and statistics.mean(r["sampled"] for r in last) >= SAMPLED):
            return seconds
    return math.inf


def read(name):
    """-> {side: {seed: rows}}"""
    runs = {}
    with open(name, newline="") as file:
        for row in csv.DictReader(file):
            numbers = {key: float(value) for key, value in row.items() if key != "side"}
            runs.setdefault(row["side"], {}).setdefault(numbers["seed"], []).append(numbers)
    return runs


def plot(name, picture):
    """Held-out accuracy against CPU seconds: means over the seeds, ranges of greedy accuracy."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharex=True, sharey=True)
    for side, seeds in read(name).items():
        blocks = [*zip(*seeds.values(), strict=True)]
        blocks[0] = [row | dict(seconds=0.0) for row in blocks[0]]  # start-up does not count
        taken = [statistics.mean(row["seconds"] for row in block) for block in blocks]
        seconds = [*itertools.accumulate(taken)]
        for axis, kind in zip(axes, ("greedy", "sampled"), strict=True):
            values = [[row[kind] for row in block] for block in blocks]
            line, = axis.plot(seconds, [statistics.mean(x) for x in values], label=side, linewidth=1.3)
            axis.fill_between(seconds, [min(x) for x in values], [max(x) for x in values], alpha=0.15,
                              color=line.get_color(), linewidth=0)
    for axis, title, goal in zip(axes, ("greedy", "temperature 1"), (GREEDY, SAMPLED), strict=True):
        axis.axhline(goal, color="0.5", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="CPU seconds, without start-up and evaluations", xlim=(0, 130),
                 ylim=(0.25, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy")
    axes[1].legend(fontsize=8, loc="lower right", edgecolor="none")
    figure.savefig(picture, dpi=130)


def table(name):
    """The board, as Markdown."""
    runs = read(name)
    first, *_ = runs.values()
    print("| side | CPU seconds (mean ± std) | relative (lowest to highest) | reached after iterations | of "
          "| greedy at the end | temperature 1 | pass@16 | seeds |\n|---|---|---|---|---|---|---|---|---|")
    for side, seeds in runs.items():
        times = {seed: time_to(own) for seed, own in seeds.items()}
        ratios = [times[seed] / time_to(first[seed]) for seed in seeds if seed in first]
        ends = [own[-1] for own in seeds.values()]
        reached = [next((place * BLOCK for place in range(len(own))
                         if math.isfinite(time_to(own[:place + 1]))), math.inf) for own in seeds.values()]
        cells = [f"{statistics.mean(times.values()):.1f} ± {statistics.pstdev(times.values()):.1f}"
                 if all(map(math.isfinite, times.values())) else "not reached by all",
                 f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                 f"{min(reached)} to {max(reached)}", f"{max(end['iteration'] for end in ends):.0f}",
                 *(f"{statistics.mean(end[name] for end in ends):.3f}"
                   for name in ("greedy", "sampled", "best")), str(len(seeds))]
        print(f"| {side} | {' | '.join(cells)} |")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("word", nargs="?", choices=("worker",), help=argparse.SUPPRESS)
    parser.add_argument("--sides", default="default", help="with commas: names, or flags of grpo_llm.py")
    parser.add_argument("--seeds", default="1", help="with commas")
    parser.add_argument("--iterations", type=int, default=0, help="of every side, a multiple of 10")
    parser.add_argument("--stop", action="store_true", help="end a side once it has reached the goal")
    parser.add_argument("--trl-python", default=str(REPOSITORY / ".venv-trl/bin/python"))
    parser.add_argument("--core", type=int, default=0, help="the core that all sides are pinned to")
    parser.add_argument("--out", default="", help="CSV file to append each block's measurements to")
    parser.add_argument("--table", default="", help="print the board of such a file, and end")
    parser.add_argument("--plot", default="", help="with --table: a picture to write")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.table:
        table(options.table)
        if options.plot:
            plot(options.table, options.plot)
        return
    if options.word:
        work(json.loads(sys.stdin.readline()))
        return
    check_environment("torch", "transformers", "peft", "tyro", "pydantic")
    sides = [side.strip() for side in options.sides.split(",")]
    if any(side_of(side)[0] == "trl" for side in sides):
        check_environment("torch", "transformers", "datasets", "peft", "trl", python=options.trl_python,
                          made_by="trl")
    for seed in map(int, options.seeds.split(",")):
        rows = run(sides, seed, options)
        if options.out:
            append_csv(options.out, rows)


if __name__ == "__main__":
    main()
