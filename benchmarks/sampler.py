"""Is the sampler the policy? How far rounding moves what grpo_llm.py's check looks at, and how far faults do.

    python tools/get_smollm2.py                       # once: models/smollm2-135m
    python benchmarks/sampler.py updates              # over 2,000 updates in bfloat16: two hours of one core
    python benchmarks/sampler.py faults               # samplers that are wrong: one hour
    python benchmarks/sampler.py table                # both as Markdown, and the CSV of `updates`

`updates` runs grpo_llm.py with a sampler that is right: few and many episodes, short and long replies, full
weights and LoRA, learning rates up to ten times the default, both models, and reads its log: the largest
values of all updates, and whether the check ended one. --engine vllm does the same with vLLM, in an
environment of tools/make_vllm_cpu_env.sh. `faults` samples an iteration of the defaults with a sampler that
is wrong, twice, on different tasks, and asks the check. A run that has ended is not run again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from benchmarks.sides import append_csv, check_environment, check_smollm2  # noqa: E402

MODELS = {"tiny": "models/countdown-tiny", "smollm2": "models/smollm2-135m"}
ENVS = {"tiny": [], "smollm2": ["--env", "tests/yes_no.py:YesNo"]}  # that they are trained on
# What a sampler is asked that is wrong in another way than by its age; yes and no are too few tokens.
CHAT = dict(data="benchmarks/chat_rows.jsonl", prompt="prompt", answer="response", check="exact")
ASKED = {"tiny": ("countdown", {}), "smollm2": ("rows", CHAT)}
SIZES = {"tiny": (64, 8), "smollm2": (8, 8)}  # prompts and replies of an iteration by default
REPLIES = {"tiny": 16, "smollm2": 24}  # longest of them [tokens]
REWARD = ["--reward-fn", "benchmarks/sampler.py:variety"]
RATES = {("tiny", "full"): 5e-4, ("tiny", "lora"): 2e-3, ("smollm2", "full"): 2e-6, ("smollm2", "lora"): 5e-5}
# model, prompts, replies to each, longest reply [tokens], updates: of each with full weights and LoRA, and
# with 1 and 10 times the rate.
GRID = [("tiny", 1, 2, 4, 150), ("tiny", 2, 4, 16, 100), ("tiny", 8, 8, 16, 120), ("tiny", 8, 8, 64, 40),
        ("tiny", 4, 8, 128, 20), ("tiny", 2, 4, 512, 10), ("tiny", 8, 8, 512, 3),
        ("smollm2", 1, 2, 4, 40), ("smollm2", 2, 4, 6, 25), ("smollm2", 1, 2, 64, 4),
        ("smollm2", 4, 4, 16, 4), ("smollm2", 8, 8, 4, 2), ("smollm2", 1, 2, 512, 1)]
STALE = (1, 5, 20)  # updates
FAULTS = REPOSITORY / "benchmarks" / "results" / "sampler_faults.csv"
UPDATES = FAULTS.with_name("sampler_updates.csv")


def variety(rollout):
    """A reward that always differs, draws replies out and keeps them varied: different pairs of letters."""
    reply = rollout.messages[-1]["content"]
    return len({*zip(reply, reply[1:], strict=False)}) + random.Random(str(rollout.order)).random()


def planned(engine):
    """Yield (name, model, weights, factor of the rate, prompts, group, longest reply, updates)."""
    for model, prompts, group, longest, updates in GRID:
        for weights in ("full", "lora"):
            for factor in (1, 10):
                if engine == "vllm" and (factor == 1 or longest > 64):
                    continue
                name = f"{model}_{prompts}x{group}x{longest}_{weights}_{factor}"
                yield name, model, weights, factor, prompts, group, longest, updates


def run_updates(options):
    engine, dtype = options.engine, options.dtype
    for name, model, weights, factor, prompts, group, longest, updates in planned(engine):
        run = options.runs / f"{engine}_{dtype}_{name}"
        chosen = name in options.only if options.only else model in options.models
        if not chosen or (run / "ended").exists():
            continue
        rate = RATES[model, weights] * factor
        words = ["--model", MODELS[model], *ENVS[model], *REWARD, "--dtype", dtype, "--engine", engine,
                 "--prompts-per-iteration", prompts, "--group-size", group, "--max-response-tokens", longest,
                 "--max-context-tokens", longest + 128, "--iterations", updates, "--learning-rate", rate,
                 "--warmup-iterations", 0, "--final-learning-rate", 1, "--entropy-coef", 0,
                 "--eval-every", 0, "--eval-tasks", 1, "--eval-samples", 1, "--checkpoint-every", 1000,
                 "--microbatch-tokens", 4096, "--log-episodes", 0, "--run-dir", run]
        if weights == "lora":
            words += ["--lora-rank", 8]
        if model == "smollm2":
            words += ["--no-gradient-checkpointing"]
        done = subprocess.run([sys.executable, "grpo_llm.py", *map(str, words)], cwd=REPOSITORY, text=True,
                              capture_output=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
        said = done.stdout + done.stderr
        if done.returncode and "the sampler is not the policy" not in said:
            sys.exit(f"error: {name}: {said[-2000:]}")
        (run / "ended").write_text(said)
        print(name, said.strip().splitlines()[-1], flush=True)


def summary_of_updates(folder):
    """A row for each run: updates, errors, warnings, and the largest value of each number."""
    rows = []
    for said in sorted(folder.glob("*_*/ended")):
        engine, dtype, model, size, weights, factor = said.parent.name.split("_")
        text = said.read_text()
        row = dict(engine=engine, dtype=dtype, model=model, size=size, weights=weights, factor=factor,
                   updates=0, errors=text.count("error: "), warnings=text.count("warning: mismatch"),
                   longest=0.0, kl=0.0, mean_less_1=0.0, slope=0.0, ratio_max=0.0)
        for line in (said.parent / "train_log.jsonl").open():
            record = json.loads(line)
            if "mismatch/ratio_mean" not in record:
                continue
            row["updates"] += 1
            seen = dict(longest=record["response_length/max"], kl=record["mismatch/kl"],
                        mean_less_1=abs(record["mismatch/ratio_mean"] - 1),
                        slope=abs(record["mismatch/slope"]), ratio_max=record["mismatch/ratio_max"])
            for name, value in seen.items():
                row[name] = max(row[name], value)
        rows.append({name: f"{value:.3g}" if isinstance(value, float) else value
                     for name, value in row.items()})
    return rows


# Faults


def nucleus(sample, share):
    """Words that are left out, and what is left reported as if it were all."""
    import torch

    def of_fewer(logits, row, temperature, uniform):
        p, order = torch.softmax(logits.float() / temperature, -1).sort(-1, descending=True)
        p = p.masked_fill(p.cumsum(-1) - p > share, 0.0)
        p = torch.zeros_like(p).scatter(-1, order, p)
        return sample((p / p.sum(-1, keepdim=True)).log(), row, 1.0, uniform)
    return of_fewer


def hotter(sample, factor):
    return lambda logits, row, temperature, uniform: sample(logits, row, temperature * factor, uniform)


def with_head(model, weight):
    import torch
    other = copy.deepcopy(model)
    other.get_output_embeddings().weight = torch.nn.Parameter(weight.detach().clone())
    return other


def with_stale_prefix(model, old):
    """A sampler whose keys and values of the prompts are of old weights."""
    sampler = copy.deepcopy(model)
    decode = sampler.model.forward

    def forward(input_ids, past_key_values, **given):
        first = not past_key_values.get_seq_length()
        return (old.model.forward if first else decode)(
            input_ids=input_ids, past_key_values=past_key_values, **given)
    sampler.model.forward = forward
    return sampler


def faults_of(model, old, sample):
    """Yield (fault, sampler, its function sample).  old: {updates: weights so many updates before}"""
    import torch
    yield "none", model, sample
    for updates, weights in old.items():
        yield f"weights {updates} updates old", weights, sample
    oldest = old[max(old)]
    yield f"prompts cached {max(old)} updates ago", with_stale_prefix(model, oldest), sample
    for factor in (0.7, 0.9, 1.02, 1.1):
        yield f"temperature {factor}", model, hotter(sample, factor)
    for share in (0.95, 0.8):
        yield f"top-p {share}", model, nucleus(sample, share)
    head = model.get_output_embeddings().weight
    yield f"head {max(old)} updates old", with_head(model, oldest.get_output_embeddings().weight), sample
    torch.manual_seed(1)
    yield "head of noise", with_head(model, torch.randn_like(head) * head.std()), sample


def measure(script, model, sampler, sample, env, tokenizer, args, first):
    """Sample an iteration and compare.  -> {column: value}"""
    import itertools
    from unittest import mock

    import numpy as np
    import torch
    tasks = [env.training_task(first + n, 1) for n in range(args.prompts_per_iteration)]
    with mock.patch.object(script, "sample", sample):
        rollouts = script.rollout(script.HfEngine(sampler, tokenizer, args), tokenizer, env, tasks,
                                  args.group_size, script.Sampling(1.0, (1, "train")), args,
                                  lambda rollout: 0.0, first)
    groups = [[*rollout.segments] for rollout in rollouts]
    script.store_logprobs(model, groups, "old_logprobs", args)
    pairs = []
    for segment in itertools.chain(*groups):
        both = zip(segment.old_logprobs, segment.rollout_logprobs, strict=True)
        pairs += itertools.compress(both, segment.response_mask)
    trainer, reported = torch.tensor(pairs).double().T
    seen = script.check_sampler(trainer, reported, (math.inf,) * 3)
    try:
        script.check_sampler(trainer, reported, script.LIMITS[args.dtype])
        found = ""
    except script.EngineError as error:
        found = str(error).removeprefix("the sampler is not the policy: ")
    difference = (trainer - reported).numpy()
    ratio = np.exp(difference)
    off = float(ratio.mean() - 1)
    error = float(ratio.std()) / math.sqrt(len(ratio))
    return {"tokens": len(pairs), "kl": float((ratio - 1 - difference).mean()), "mean_less_1": off,
            "standard_errors": off / (error + 1e-12), "slope": seen["mismatch/slope"], "found": found}


def run_faults(folder, models):
    import torch

    import envs
    import grpo_llm as script
    done = set()
    if FAULTS.exists():
        with FAULTS.open() as file:
            for row in csv.DictReader(file):
                done.add((row["model"], row["dtype"], row["fault"], row["rollout"]))
    for name in models:
        path = MODELS[name]
        run = folder / f"stale_{name}"
        words = ["--model", path, *ENVS[name], "--max-response-tokens", 8 if name == "smollm2" else 16,
                 "--iterations", STALE[-1], "--warmup-iterations", 0, "--final-learning-rate", 1,
                 "--eval-every", 0, "--eval-tasks", 1, "--eval-samples", 1, "--checkpoint-every", 1,
                 "--keep-checkpoints", 0, "--run-dir", run]
        if not (run / f"checkpoints/step_{STALE[-1]:06d}").exists():
            subprocess.run([sys.executable, "grpo_llm.py", *map(str, words)], cwd=REPOSITORY, check=True)
        torch.set_num_threads(1)
        asked, options = ASKED[name]
        trained_on = envs.make(ENVS[name][-1] if ENVS[name] else asked)
        other = envs.make(asked, **options)

        def load(step, path=path, run=run):
            folder = run / f"checkpoints/step_{step:06d}" if step else path
            return script.distribute(script.load_weights(str(folder)), torch.device("cpu"))

        model = load(STALE[-1])
        old = {updates: load(STALE[-1] - updates) for updates in STALE}
        prompts, group = SIZES[name]
        for dtype in ("float32", "bfloat16"):
            args = script.Args(model=path, dtype=dtype, prompts_per_iteration=prompts, group_size=group,
                               max_response_tokens=REPLIES[name], microbatch_tokens=8192)
            tokenizer = script.load_tokenizer(args)
            for fault, sampler, sample in faults_of(model, old, script.sample):
                for rollout in range(1 if (name, dtype) == ("smollm2", "float32") else 2):
                    if (name, dtype, fault, str(rollout)) in done:
                        continue
                    row = dict(model=name, dtype=dtype, fault=fault, rollout=rollout)
                    env = trained_on if "old" in fault or "ago" in fault else other
                    row |= measure(script, model, sampler, sample, env, tokenizer, args, rollout * prompts)
                    for key, value in row.items():
                        row[key] = f"{value:.3g}" if isinstance(value, float) else value
                    print(*row.values(), sep="  ", flush=True)
                    append_csv(FAULTS, [row])


# Tables


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def table_of_updates(rows):
    """The runs of a model and size together: full weights and LoRA, both rates."""
    groups = {}
    for row in rows:
        groups.setdefault((row["engine"], row["model"], row["size"]), []).append(row)
    cells = []
    for (engine, model, size), runs in groups.items():
        prompts, group, longest = map(int, size.split("x"))
        counts = [sum(int(run[name]) for run in runs) for name in ("updates", "errors", "warnings")]
        most = [max(float(run[name]) for run in runs) for name in ("kl", "mean_less_1", "slope")]
        cells.append((engine, model, prompts * group, longest, *counts, *(f"{value:.2g}" for value in most)))
    total = [sum(row[place] for row in cells) for place in (4, 5, 6)]
    cells.sort(key=lambda row: (row[0], row[1] != "tiny", row[3], row[2]))
    cells.append(("all", "", "", "", *total, "", "", ""))
    return table(["engine", "model", "episodes", "longest reply [tokens]", "updates", "errors", "warnings",
                  "largest mismatch/kl", "mean - 1", "slope"], cells)


# What the check says, by the number that it looks at.
SAYS = {"kl": "mismatch/kl", "mean_less_1": "the mean", "slope": "its log-prob"}


def table_of_faults(rows):
    """Of the iterations that were sampled the smaller number; bold where the check ended one by it."""
    faults = dict.fromkeys(row["fault"] for row in rows)
    columns = [(model, dtype, number) for model in MODELS for dtype in ("float32", "bfloat16")
               for number in (("kl",) if dtype == "float32" else SAYS)]
    lines = []
    for fault in faults:
        cells = [fault]
        for model, dtype, number in columns:
            seen = [row for row in rows if row["fault"] == fault and row["model"] == model
                    and row["dtype"] == dtype]
            cell = min((row[number] for row in seen), key=lambda text: abs(float(text)), default="nan")
            cell = f"{float(cell):.2g}"
            if any(row["found"].startswith(SAYS[number]) for row in seen):
                cell = f"**{cell}**"
            cells.append(cell)
        lines.append(cells)
    header = [f"{model}, {dtype}: {number.replace('_less_', ' - ')}" for model, dtype, number in columns]
    return table(["sampler", *header], lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("updates", "faults", "table"))
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "sampler", help="their folders")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="of `updates`")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of `updates`")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--only", nargs="+", metavar="RUN", default=[], help="of `updates`, by name")
    options = parser.parse_args()
    check_environment("torch", "transformers", "tyro", "pydantic", "peft")
    if options.engine == "vllm":
        check_environment("vllm", made_by="vllm")
    if options.what != "table" and "smollm2" in options.models and not options.only:
        check_smollm2()
    if options.what == "updates":
        run_updates(options)
    if options.what == "faults":
        run_faults(options.runs, options.models)
    if options.what == "table":
        rows = summary_of_updates(options.runs)
        if rows:  # else those of the CSV
            UPDATES.unlink(missing_ok=True)
            append_csv(UPDATES, rows)
        with UPDATES.open() as updates, FAULTS.open() as faults:
            print(table_of_faults([*csv.DictReader(faults)]), table_of_updates([*csv.DictReader(updates)]),
                  sep="\n\n")


if __name__ == "__main__":
    main()
