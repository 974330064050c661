"""SmolLM2-135M-Instruct learns sums on a laptop: the runs, table and figure of docs/smollm2.md.

    python tools/get_smollm2.py                         # once: models/smollm2-135m
    python benchmarks/smollm2.py --list                 # the commands, in order
    python benchmarks/smollm2.py --jobs 2               # run them: some four hours of one core
    python benchmarks/smollm2.py --only form_1 grpo_1   # or some of them
    python benchmarks/smollm2.py --table                # what the logs in --runs say, as Markdown
    python benchmarks/smollm2.py --plot

Each run is a command of one of the scripts, with a folder of its own in --runs. One that has ended is not run
again, and one that was killed goes on. A run waits for those that it starts from.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from benchmarks.sides import check_environment, check_smollm2  # noqa: E402

MODEL = "models/smollm2-135m"
CHAT = "benchmarks/chat_rows.jsonl"
SYSTEM = "system=Answer with the final answer only."
SUMS = ["task=chain_sum", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=2"]
FORM_ROWS, FORM_STEPS = 320, 20
ITERATIONS = 60
DTYPE = ["--dtype", "bfloat16"]  # of the figures; without a GPU the default is float32
SIZES = ["--prompts-per-iteration", 16, "--group-size", 8]
PPO_SIZES = ["--prompts-per-iteration", 64, "--minibatches", 1, "--critic", "shared"]
PPO_ITERATIONS = 25  # take about as long, too
SAMPLED_TASKS, SAMPLES = 500, 16  # of rejection sampling
SEEDS = (1, 2, 3)
CONVERSATIONS = (0, 1, 2, 3, 4)  # rows of CHAT whose replies are kept
KINDS = {"grpo_": "GRPO, all weights", "lora_": "GRPO, LoRA", "ppo_": "PPO",
         "shuffled_": "GRPO, rewards shuffled",
         "same_rows_": "SFT on the same 320 rows", "more_rows_": "SFT on new rows",
         "rejection_": "SFT on its own right replies"}
README_KINDS = ("grpo_", "shuffled_", "same_rows_")
TITLES = dict(temperature_1="temperature 1", greedy="greedy", pass_16="pass@16")
BY_SFT = ("same_rows_1", "more_rows_1", "rejection_1")  # grpo_llm.py's evaluation samples faster
COMPARED = ("form_1", "grpo_1", "lora_1", "more_rows_1")


class Run(NamedTuple):
    """A command, the folder that it fills, and the run whose last checkpoint it starts from."""

    name: str
    script: str
    start: str  # name of a run; MODEL
    flags: list[str]

    @property
    def needs(self) -> set[str]:
        """Names of the runs that must have ended: that of its model, and those whose files it reads."""
        return {self.start, *re.findall(r"{runs}/(\w+)/", " ".join(map(str, self.flags)))}


def task(*options, train_tasks=4_000):
    return ["--env", "reasoning-gym", "--env-kwargs", *options, SYSTEM, f"train_tasks={train_tasks}",
            "test_tasks=200"]


def grpo(name, start, *flags, seed=1, script="grpo_llm.py", iterations=ITERATIONS):
    return Run(name, script, start, [
        *task(*SUMS), *(PPO_SIZES if script == "ppo_llm.py" else SIZES), "--max-response-tokens", 8,
        "--eval-every", 20, "--eval-tasks", 200, "--eval-samples", SAMPLES, "--iterations", iterations,
        "--microbatch-tokens", 4096, "--no-gradient-checkpointing", *DTYPE, "--seed", seed, *flags])


def sft(name, start, source, *flags, seed=1):
    return Run(name, "sft.py", start, [
        *source, "--batch-size", 16, "--learning-rate", "3e-5", "--warmup-steps", 4,
        "--max-response-tokens", 8, "--eval-every", 0, "--eval-tasks", 20, "--eval-samples", 1, *DTYPE,
        "--seed", seed, *flags])


def planned():
    """-> the runs, each after those that it needs"""
    few = task(*SUMS, train_tasks=FORM_ROWS)
    runs = [sft(f"form_{seed}", MODEL, few, "--steps", FORM_STEPS, seed=seed)
            for seed in SEEDS]
    adapter = ["--lora-rank", 16]
    for seed in SEEDS:
        runs.append(grpo(f"grpo_{seed}", f"form_{seed}", "--learning-rate", "4e-6", seed=seed))
        runs.append(grpo(f"lora_{seed}", f"form_{seed}", "--learning-rate", "1e-4", *adapter, seed=seed))
    runs += [
        grpo("shuffled_1", "form_1", "--learning-rate", "4e-6", script="grpo_shuffled.py"),
        sft("same_rows_1", "form_1", few, "--steps", 60),  # takes about as long as GRPO
        sft("more_rows_1", "form_1", task(*SUMS, train_tasks=1_600), "--steps", 100),  # each of them once
        Run("sampled_1", "", "form_1", []),
        sft("rejection_1", "form_1", ["--train-files", "{runs}/sampled_1/rows.jsonl"],
            "--messages-key", "messages", "--steps", 0, "--epochs", 1, "--val-ratio", 0),
        *(grpo(f"after_{start}", start, iterations=0) for start in BY_SFT),
        grpo("ppo_1", "form_1", "--learning-rate", "4e-6", script="ppo_llm.py", iterations=PPO_ITERATIONS),
    ]
    runs += [Run(f"chat_{Path(start).name}", "", start, []) for start in (MODEL, *COMPARED)]
    return runs


def checkpoint_of(start, runs) -> Path:
    """The folder of the model that a run starts from: that of a run's last checkpoint."""
    if start == MODEL:
        return REPOSITORY / MODEL
    return max((runs / start / "checkpoints").glob("step_*"))


def command_of(run, runs):
    """Words of the command line of one of the scripts."""
    folder = checkpoint_of(run.start, runs)
    model = ["--model", folder]
    if run.start.startswith("lora"):
        model = ["--model", checkpoint_of(run.start.replace("lora", "form"), runs), "--lora-adapter-path",
                 folder]
    script = runs / run.script if run.script == "grpo_shuffled.py" else REPOSITORY / run.script
    flags = [str(flag).replace("{runs}", str(runs)) for flag in run.flags]
    return [*map(str, [sys.executable, script, *model]), *flags, "--run-dir", str(runs / run.name)]


def load(start, runs):
    """-> model and tokenizer of a run's last checkpoint"""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = checkpoint_of(start, runs)
    if start.startswith("lora"):
        import peft
        base = AutoModelForCausalLM.from_pretrained(checkpoint_of(start.replace("lora", "form"), runs))
        return peft.PeftModel.from_pretrained(base, folder).eval(), AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def sample(run, runs):
    """Rejection sampling: the different right ones of SAMPLES replies to each of SAMPLED_TASKS tasks."""
    import torch

    import envs
    model, tokenizer = load(run.start, runs)
    options = dict(option.split("=", 1) for option in [*SUMS, SYSTEM, "train_tasks=4000", "test_tasks=200"])
    env = envs.make("reasoning-gym", **options)
    torch.manual_seed(1)
    began = time.perf_counter()
    with open(runs / run.name / "rows.jsonl", "w") as file:  # anew if it was killed
        for index in range(SAMPLED_TASKS):
            asked = env.training_task(index, 1)
            ids = tokenizer.apply_chat_template(asked.messages, add_generation_prompt=True,
                                                return_tensors="pt",
                                                return_dict=True)
            with torch.inference_mode():
                replies = model.generate(**ids, do_sample=True, top_k=0, num_return_sequences=SAMPLES,
                                         max_new_tokens=8, pad_token_id=tokenizer.pad_token_id)
            texts = tokenizer.batch_decode(replies[:, ids["input_ids"].shape[1]:], skip_special_tokens=True)
            for text in sorted(set(texts)):
                if env.start(asked, 1).step(text).info["correct"]:
                    row = [*asked.messages, dict(role="assistant", content=text)]
                    file.write(json.dumps(dict(messages=row)) + "\n")
    (runs / run.name / "seconds").write_text(f"{time.perf_counter() - began:.0f}")


def chat(run, runs):
    """What a run costs elsewhere: the loss of other chat text, and greedy replies to five of its rows."""
    import torch
    from torch.nn import functional
    model, tokenizer = load(run.start, runs)
    rows = [json.loads(line) for line in open(REPOSITORY / CHAT)]
    loss, num_tokens, replies = 0.0, 0, []
    for number, row in enumerate(rows):
        messages = [dict(role="user", content=row["prompt"]), dict(role="assistant", content=row["response"])]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))[:2048]
        with torch.inference_mode():
            logits = model(ids[None, :-1]).logits[0, len(prompt) - 1:]
            loss += float(functional.cross_entropy(logits, ids[len(prompt):], reduction="sum"))
            num_tokens += len(logits)
            if number in CONVERSATIONS:
                asked = torch.tensor([prompt])
                reply = model.generate(input_ids=asked, attention_mask=torch.ones_like(asked),
                                       do_sample=False,
                                       max_new_tokens=60, pad_token_id=tokenizer.pad_token_id)
                replies.append([row["prompt"],
                                tokenizer.decode(reply[0, len(prompt):], skip_special_tokens=True)])
    (runs / run.name / "chat.json").write_text(json.dumps(dict(loss=loss / num_tokens, replies=replies),
                                                          indent=1))


def play(run, runs, core):
    """Run it to its end, from where it was stopped.  -> whether it has come there"""
    folder = runs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--inside", run.name, "--runs", runs]
    if run.script:
        words = command_of(run, runs)
    pin = [] if core is None else ["taskset", "-c", str(core)]
    environment = os.environ | dict(HF_HUB_OFFLINE="1", **({} if core is None else dict(OMP_NUM_THREADS="1")))
    with open(folder.with_suffix(".out"), "a") as file:
        done = subprocess.run([*pin, *map(str, words)], cwd=REPOSITORY, env=environment, stdout=file,
                              stderr=file)
    if done.returncode == 0:
        (folder / "ended").touch()
    print(f"{run.name}: {'ended' if done.returncode == 0 else f'exit status {done.returncode}'}", flush=True)
    return done.returncode == 0


def run_all(todo, runs, jobs):
    """-> whether all have ended"""
    runs.mkdir(parents=True, exist_ok=True)
    for name in ("envs", "models"):  # beside the variant, which imports the one
        if not (runs / name).exists():
            (runs / name).symlink_to(REPOSITORY / name)
    subprocess.run(["patch", "grpo_llm.py", "docs/variants/shuffled.diff", "-o", runs / "grpo_shuffled.py"],
                   cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    names = {run.name for run in todo}
    ends = {name: threading.Event() for name in names}
    ok = {}
    lock, cores = threading.Lock(), [*range(jobs)] if jobs > 1 else [None]

    def one(run):
        for needed in names & run.needs:
            ends[needed].wait()
        with lock:
            core = cores.pop(0)
        if all(ok.get(needed, True) for needed in run.needs):
            ok[run.name] = (runs / run.name / "ended").exists() or play(run, runs, core)
        else:
            ok[run.name] = False
            print(f"{run.name}: left out, since a run that it needs has failed", flush=True)
        with lock:
            cores.append(core)
        ends[run.name].set()

    with ThreadPoolExecutor(jobs) as pool:  # in order, so that what is waited for has begun
        [*pool.map(one, todo)]
    return all(ok.values())


def records(folder):
    """The log's records; of a run that was continued, those that count."""
    found = {}
    for line in (folder / "train_log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "iteration" in record:
            found[record["iteration"]] = record
    return [found[iteration] for iteration in sorted(found)]


def value(record, ending):
    names = [name for name in record if name.startswith("val/reasoning-gym/") and name.endswith(ending)]
    return record[names[0]] if names else None


def curves(runs):
    """[{run, iteration, minutes, greedy, ...}] of each evaluation; minutes without the evaluations."""
    rows, spent = [], {}
    for run in planned():
        if not (runs / run.name / "train_log.jsonl").exists():
            continue
        seconds = memory = 0.0
        for record in records(runs / run.name):
            seconds += record["time/rollout"] + record["time/update"]
            memory = max(memory, record["system/memory_usage"])
            about = dict(run=run.name, iteration=record["iteration"], minutes=round(seconds / 60, 2),
                         tokens=record["env_steps"], memory_gib=round(memory, 2))
            if value(record, "/greedy") is not None and run.name not in BY_SFT:
                rows.append(about | dict(
                    greedy=value(record, "/greedy"), temperature_1=value(record, "/pass@1"),
                    pass_16=value(record, f"/pass@{SAMPLES}"), entropy=record.get("train/entropy")))
        spent[run.name] = about
    # What SFT has come to was evaluated by another run, and what it began with by grpo_1.
    evaluated = {row["run"]: row for row in rows if row["run"].startswith("after_") or row["iteration"] == 0}
    for name in BY_SFT:
        if f"after_{name}" in evaluated:
            both = evaluated["grpo_1"] | dict(run=name), evaluated[f"after_{name}"] | spent[name]
            if name == "rejection_1":
                both[1]["minutes"] += round(float((runs / "sampled_1" / "seconds").read_text()) / 60, 2)
            rows = [row for row in rows if row["run"] != f"after_{name}"] + [*both]
    return rows


def figure_of(value, digits=3):
    return "" if value in (None, "") else f"{float(value):.{digits}f}"


def print_table(rows, runs):
    print("| run | after | minutes | tokens | greedy | temperature 1 | pass@16 | entropy | GiB |")
    print("|---" * 9 + "|")
    for name in dict.fromkeys(row["run"] for row in rows):
        same = [row for row in rows if row["run"] == name]
        for row in [same[0], same[-1]][:len(same)]:
            cells = [name, row["iteration"], figure_of(row["minutes"], 1), row["tokens"], *(
                figure_of(row[key]) for key in ("greedy", "temperature_1", "pass_16", "entropy")),
                row["memory_gib"]]
            print("| " + " | ".join(map(str, cells)) + " |")
    print("\n| model | loss of other chat text |\n|---|---|")
    for path in sorted(runs.glob("chat_*/chat.json")):
        print(f"| {path.parent.name.removeprefix('chat_')} | {json.loads(path.read_text())['loss']:.3f} |")


def plot(rows, path, keys, kinds):
    """Held-out accuracy against minutes of sampling and learning, a line for each run."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(keys), figsize=(4.5 * len(keys), 3.8), sharey=True, squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for color, kind in enumerate(kinds):
            names = sorted({row["run"] for row in rows if row["run"].startswith(kind)})
            for name in names:
                same = [row for row in rows if row["run"] == name]
                label = KINDS[kind] if name == names[0] else None
                axis.plot([float(row["minutes"]) for row in same], [float(row[key]) for row in same],
                          marker="o", markersize=3, color=f"C{color}", label=label)
        axis.set(title=TITLES[key], xlabel="minutes of one core, evaluation aside", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of 200 held-out sums")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the runs' names and flags")
    parser.add_argument("--table", action="store_true", help="print the table, and write the CSV")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="RUN")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; with 2 and more, one core each")
    parser.add_argument("--inside", metavar="RUN", help="of this program's own: one run, in a process")
    parser.add_argument("--runs", default="runs/smollm2")
    parser.add_argument("--csv", default="docs/results/smollm2.csv")
    parser.add_argument("--figures", default="docs/figures", metavar="FOLDER")
    args = parser.parse_args()
    runs = Path(args.runs).resolve()
    known = {run.name: run for run in planned()}
    if unknown := [name for name in args.only or () if name not in known]:
        sys.exit(f"error: --only {' '.join(unknown)}: expected some of {', '.join(known)}")
    if args.inside:
        run = known[args.inside]
        return sample(run, runs) if run.name.startswith("sampled") else chat(run, runs)
    if args.list:
        for run in known.values():
            print(f"{run.name} from {run.start}: {shlex.join([run.script, *map(str, run.flags)])}")
        return
    if args.table:
        rows = curves(runs)
        if not rows:
            sys.exit(f"error: --runs {args.runs}: no run is there")
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
        return print_table(rows, runs)
    if args.plot:
        with open(args.csv, newline="") as file:
            rows = [*csv.DictReader(file)]
        plot(rows, f"{args.figures}/smollm2.png", [*TITLES], [*KINDS])
        return plot(rows, f"{args.figures}/smollm2_readme.png", ["temperature_1"], README_KINDS)
    check_environment("torch", "transformers", "tyro", "pydantic", "peft")
    check_environment("reasoning_gym", made_by="envs")
    check_smollm2()
    todo = [run for name, run in known.items() if not args.only or name in args.only]
    sys.exit(0 if run_all(todo, runs, args.jobs) else 1)


if __name__ == "__main__":
    main()
