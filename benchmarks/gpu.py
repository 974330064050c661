"""What the four scripts do on this GPU, in one command and under 20 minutes of an H100. No network is used.

    python benchmarks/gpu.py all --out runs/gpu           # goes on where it was stopped
    python benchmarks/gpu.py smoke grpo --out runs/gpu    # some of the parts
    python benchmarks/gpu.py table --out runs/gpu         # the Markdown table of what is in runs/gpu/gpu.csv

    smoke    each script three iterations in float32, bfloat16, LoRA, with checkpointing, compiled
    grpo     64 x 8 replies of 256 and 1,024 tokens: tokens/s, MFU, memory; the default run; SmolLM2
    ppo      the same with a critic
    sft      packed rows of 2,048 and 8,192 tokens
    a2c      the pixel goal with 1,024, 4,096 and 16,384 environments; its success after 60 s
    memory   MiB that a token of a pass takes, beside what benchmarks/update_memory.py reckons
    exact    kill -9 and resume, and two runs of one seed: the difference of their logs

Models have random weights in the shapes of Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-0.6B, and a tokenizer of one
token per word. Random weights hardly ever end a reply, so that replies are as long as they may be. A reward
for every second reply gives each group something to learn. Without a GPU, or with --toy, the same jobs run at
sizes of a few seconds. Each job is a process of its own that calls the script's main; its output is in
OUT/logs, its run in OUT/runs. What a job measured is appended to OUT/gpu.csv when it ends, and a job that is
there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import smollm2
from sides import REPOSITORY, append_csv, check_environment
from update_memory import MODELS as QWEN25

sys.path.insert(0, str(REPOSITORY))
import envs

PARTS = ("smoke", "grpo", "ppo", "sft", "a2c", "memory", "exact")
MODELS = QWEN25 | {"Qwen3-0.6B": dict(
    model_type="qwen3", attention_bias=False, vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
    num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=40960, tie_word_embeddings=True)}
TOY_SIZES = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # vLLM's on the CPU
PROMPT_WORDS = 128
PASS_TOKENS = 16_384  # of a pass of the update

# Dense bfloat16 peaks, without sparsity [FLOP/s], by a part of the device's name: NVIDIA's data sheets.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}


# What the jobs train on


@dataclasses.dataclass(frozen=True)
class WordsConfig:
    words: int = PROMPT_WORDS
    """words of a prompt"""
    vocabulary: int = 512
    """different words"""


class Words(envs.Env):
    """Prompts of random words. Nothing is right or wrong: see every_second."""

    Config = WordsConfig

    def num_tasks(self, split):
        return 4096

    def task(self, split, index):
        numbers = random.Random(f"{split} {index}")
        words = [f"w{numbers.randrange(self.config.vocabulary - 8)}" for _ in range(self.config.words)]
        messages = [{"role": "user", "content": " ".join(words)}]
        return envs.Task(f"words-{split}-{index}", "words", messages, None)

    def start(self, task, seed):
        return Reply()


class Reply(envs.Episode):
    def step(self, reply):
        return envs.Step([], 0.0, True, False, {"correct": 0.0})


def every_second(rollout):
    """--reward-fn: every second reply of a group is right, whatever it says."""
    return sum(rollout.order) % 2


def make_model(folder, name, toy):
    """A folder with random weights in the shape of a known model, and a tokenizer of one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    # As a Llama with biases, whose tokenizer may be any: transformers loads its own with a Qwen2.
    sizes = dict(model_type="llama", attention_bias=True) | MODELS[name] | (TOY_SIZES if toy else {})
    special = ["<end>", "<pad>", "<unknown>", "<system>", "<user>", "<assistant>"]
    words = special + [f"w{number}" for number in range(sizes["vocab_size"] - len(special))]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>",
                                        unk_token="<unknown>")
    tokenizer.chat_template = ("{% for message in messages %}<{{ message.role }}> {{ message.content }}"
                               "{% if message.role == 'assistant' %} <end>{% endif %} {% endfor %}"
                               "{% if add_generation_prompt %}<assistant> {% endif %}")
    config = AutoConfig.for_model(**sizes, eos_token_id=0, pad_token_id=1, bos_token_id=None)
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    new = folder.with_name(folder.name + ".writing")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    new.rename(folder)


def write_rows(path, length, count, words):
    """Conversations of random words and of different lengths, up to `length` tokens."""
    numbers = random.Random(length)
    with path.open("w") as file:
        for _ in range(count):
            size = numbers.randrange(length // 8, length - 8)
            text = " ".join(f"w{numbers.randrange(words - 8)}" for _ in range(size))
            messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": text}]
            file.write(json.dumps(dict(messages=messages)) + "\n")


# What is computed from a run's log


def read_log(run_dir):
    lines = (Path(run_dir) / "train_log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if "iteration" in record and "event" not in record]


def middle(records, key):
    """The median over the records, without the first of training, which warms up."""
    values = [record[key] for record in records if record["iteration"] > 1 and key in record]
    return statistics.median(values) if values else float("nan")


def training_flops(model_dir, prompts, prompt_tokens, replies, reply_tokens, lora):
    """Floating-point operations of a forward and backward pass over so many prompts and replies.

    2 per weight of a matrix and token in the forward pass and twice that in the backward pass; of frozen
    weights, once that. Attention: 2 matrix products of 2 * heads * head_dim operations for each pair of a
    token and one before it. The head sees reply tokens alone. Recomputation by checkpointing does not count.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    width, narrow = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    matrices = layers * (2 * hidden * width + 2 * hidden * narrow + 3 * hidden * config["intermediate_size"])
    tokens = prompts * prompt_tokens + replies * reply_tokens
    pairs = prompts * prompt_tokens**2 / 2 + replies * reply_tokens * (prompt_tokens + reply_tokens / 2)
    times = 2 if lora else 3
    dense = 2 * matrices * tokens + 2 * hidden * config["vocab_size"] * replies * reply_tokens
    return times * dense + 3 * 4 * layers * width * pairs


def peak_of(device, given):
    if given:
        return given * 1e12
    known = [peak for name, peak in PEAKS.items() if name.lower().replace(" pcie", "") in device.lower()
             and ("PCIe" in name) == ("PCIe" in device)]
    return known[0] if known else None


def difference(a, b):
    """The largest relative difference of the results in two logs; inf where their records are others."""
    a, b = [results(record) for record in read_log(a)], [results(record) for record in read_log(b)]
    if [record.keys() for record in a] != [record.keys() for record in b]:
        return float("inf")
    largest = 0.0
    for x, y in zip(a, b, strict=True):
        for key in x:
            if x[key] != y[key]:
                largest = max(largest, abs(x[key] - y[key]) / max(abs(x[key]), abs(y[key])))
    return largest


def results(record):
    """The numbers of a record that do not depend on how fast the machine was."""
    numbers = {key: value for key, value in record.items() if isinstance(value, (int, float))}
    return {key: value for key, value in numbers.items() if not (
        key.startswith(("time/", "system/")) or key.endswith("throughput") or key in ("wall_time_s", "sps"))}


# Jobs


class Bench:
    """The jobs of a part, one after the other; what they measured goes to OUT/gpu.csv."""

    def __init__(self, out, toy, device, peak):
        self.out, self.toy, self.device, self.peak = out, toy, device, peak
        self.rows, self.failed = read_rows(out), []
        for name in ("models", "runs", "logs"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def is_done(self, part, job):
        return any((row["part"], row["job"]) == (part, job) for row in self.rows)

    def add(self, part, job, **figures):
        """figures: name=(value, unit). Each is a line on the screen and a row of the CSV."""
        import torch
        import transformers
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = dict(device=self.device, commit=commit(), torch=torch.__version__,
                     transformers=transformers.__version__, measured_at=now)
        rows = [dict(part=part, job=job, figure=figure, value=value, unit=unit) | about
                for figure, (value, unit) in figures.items()]
        append_csv(self.out / "gpu.csv", rows)
        self.rows += rows
        for row in rows:
            print(f"{part:7} {job:44} {row['figure']:22} {row['value']:>12.6g} {row['unit']}", flush=True)

    def fail(self, part, job, why):
        self.failed.append(f"{part} {job}: {why}")
        print(f"{part:7} {job:44} FAILED: {why}", flush=True)

    def model(self, name):
        folder = self.out / "models" / name
        if not folder.exists():
            self.process("model " + name, make_model, folder, name, self.toy)
        return folder

    def words(self, model):
        return json.loads((self.model(model) / "config.json").read_text())["vocab_size"]

    def run_dir(self, part, job):
        return self.out / "runs" / f"{part} {job}".replace(" ", "_").replace("/", "_")

    def process(self, name, function, *arguments, seconds=None, until=None, how=signal.SIGTERM):
        """Call it in a child, and send it a signal after `seconds` or when until() is true.  -> exit code"""
        child = multiprocessing.get_context("fork").Process(
            target=in_child, args=(self.out / "logs" / f"{name.replace(' ', '_')}.txt", function, *arguments))
        child.start()
        began = time.perf_counter()
        while child.is_alive():
            child.join(0.05)
            if seconds and time.perf_counter() - began > seconds or until and until():
                os.kill(child.pid, how)
                seconds = until = None
        return child.exitcode

    def script(self, part, job, script, new=True, stop=None, **flags):
        """Run a script's main in a child.  -> the records of its log, or None where it failed"""
        run_dir = self.run_dir(part, job)
        if new:
            shutil.rmtree(run_dir, ignore_errors=True)
        code = self.process(f"{part} {job}", call_main, script, flags | dict(run_dir=str(run_dir)),
                            **(stop or {}))
        if code != 0 and not stop:
            text = (self.out / "logs" / f"{part} {job}.txt".replace(" ", "_")).read_text().strip()
            self.fail(part, job, text.splitlines()[-1][:200] if text else f"exit code {code}")
            return None
        return read_log(run_dir)


def in_child(log, function, *arguments):
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()
    function(*arguments)


def call_main(script, flags):
    module = __import__(script)
    module.main(module.Args(**flags))


def read_rows(out):
    path = out / "gpu.csv"
    if not path.exists():
        return []
    import csv
    with path.open(newline="") as file:
        return [row | dict(value=float(row["value"])) for row in csv.DictReader(file)]


def commit():
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, text=True, check=True,
                              capture_output=True).stdout.strip()
    return ""


# Parts


def smoke(bench):
    """Three iterations each: finite numbers, sampler and trainer agree, the log is valid."""
    tiny = str(REPOSITORY / "models/countdown-tiny")
    evaluation = dict(eval_tasks=4, eval_samples=2, eval_every=0)
    small = evaluation | dict(iterations=3, prompts_per_iteration=4, group_size=4)
    ways = {"float32": {}, "bfloat16": dict(dtype="bfloat16"), "LoRA": dict(lora_rank=8),
            "checkpointing": dict(gradient_checkpointing=True)}
    jobs = {}
    for name, way in ways.items():
        jobs[f"grpo_llm {name}"] = "grpo_llm", small | way | dict(model=tiny)
        jobs[f"ppo_llm {name}"] = "ppo_llm", small | way | dict(model=tiny, group_size=1)
        jobs[f"sft {name}"] = "sft", evaluation | way | dict(steps=3, batch_size=16, model=tiny)
    pixels = dict(iterations=3, num_envs=32, eval_episodes=8, eval_envs=8, log_every=1)
    for name in ("float32", "bfloat16", "compile", "cudagraphs"):
        way = {name: True} if name.startswith("c") else dict(dtype=name)
        jobs[f"a2c_vecenv {name}"] = "a2c_vecenv", pixels | way
    for job, (script, flags) in jobs.items():
        if bench.toy and job.endswith(("compile", "cudagraphs")):
            continue  # compiling takes longer than the rest together
        if bench.is_done("smoke", job) or (records := bench.script("smoke", job, script, **flags)) is None:
            continue
        from tools.validate_train_log import validate
        valid = bool(validate(bench.run_dir("smoke", job) / "train_log.jsonl")["ok"])
        figures = {"log is valid": (float(valid), "")}
        mismatch = [record["mismatch/kl"] for record in records if "mismatch/kl" in record]
        if mismatch:
            figures["mismatch/kl"] = max(mismatch), "nats/token"
        bench.add("smoke", job, **figures)
        if not valid:
            bench.fail("smoke", job, f"the log is not valid: {bench.run_dir('smoke', job)}")


def reinforcement(bench, part, script, model, reply_tokens, **flags):
    """One size of grpo or ppo: 64 x 8 replies, three iterations of which the first warms up."""
    prompts, group = (4, 2) if bench.toy else (64, 8)
    prompt_words = 8 if bench.toy else PROMPT_WORDS
    lora, engine = flags.get("lora_rank", 0) > 0, flags.get("engine", "hf")
    way = "LoRA" if lora else "all weights"
    job = f"{model} {way}, {reply_tokens} tokens, {engine}"
    if bench.is_done(part, job):
        return
    folder = bench.model(model)
    kwargs = (f"words={prompt_words}", f"vocabulary={bench.words(model)}")
    this = str(Path(__file__).resolve())
    if part == "ppo":
        prompts, group = prompts * group, 1
    tokens = prompt_words + 4 + reply_tokens
    records = bench.script(
        part, job, script, model=str(folder), env=f"{this}:Words", env_kwargs=kwargs,
        reward_fn=f"{this}:every_second", prompts_per_iteration=prompts, group_size=group, iterations=3,
        max_response_tokens=reply_tokens, max_context_tokens=2 * tokens, learning_rate=1e-6, entropy_coef=0.0,
        microbatch_tokens=PASS_TOKENS, eval_tasks=1, eval_samples=1, eval_every=0,
        log_episodes=0.0, checkpoint_every=10**6, dtype="float32" if bench.toy else "bfloat16", **flags)
    if records is None:
        return
    rollout, update = middle(records, "time/rollout"), middle(records, "time/update")
    replies = prompts * group
    flops = training_flops(folder, replies, prompt_words + 4, replies, reply_tokens, lora)
    trained = replies * (reply_tokens + prompt_words + 4)
    figures = {"sampling": (replies * reply_tokens / rollout, "tokens/s"),
               "update": (trained / update, "tokens/s"),
               "iteration": (rollout + update + middle(records, "time/sync"), "s"),
               "peak memory": (max(record["system/gpu_memory"] for record in records), "GiB")}
    if part == "grpo" and bench.peak:  # PPO's update has several epochs and a critic
        figures["update, MFU"] = flops / update / bench.peak, ""
    bench.add(part, job, **figures)


def engines():
    return ["hf"] + (["vllm"] if importlib.util.find_spec("vllm") else [])


def grpo(bench):
    lengths = (8, 16) if bench.toy else (256, 1024)
    for engine in engines():
        if bench.toy and engine == "vllm":  # it takes long to start
            reinforcement(bench, "grpo", "grpo_llm", "Qwen2.5-0.5B", lengths[0], engine=engine)
            continue
        for length in lengths:
            reinforcement(bench, "grpo", "grpo_llm", "Qwen2.5-0.5B", length, engine=engine)
        reinforcement(bench, "grpo", "grpo_llm", "Qwen2.5-1.5B", lengths[0], engine=engine, lora_rank=16)
    if not bench.is_done("grpo", "default run"):
        flags = dict(iterations=3, eval_tasks=8, eval_samples=1) if bench.toy else {}
        model = str(REPOSITORY / "models/countdown-tiny")
        records = bench.script("grpo", "default run", "grpo_llm", model=model, seed=1, **flags)
        if records:
            bench.add("grpo", "default run", time=(records[-1]["wall_time_s"], "s"),
                      greedy=(records[-1]["val/countdown/greedy"], ""))


    real_model(bench)


def real_model(bench):
    """Ten minutes of docs/smollm2.md, where its model and its task are there."""
    model, job = REPOSITORY / smollm2.MODEL, "SmolLM2-135M, ten minutes"
    if not model.is_dir() or not importlib.util.find_spec("reasoning_gym"):
        print(f"grpo    {job}: left out. It needs reasoning-gym and tools/get_smollm2.py", flush=True)
        return
    if bench.is_done("grpo", job):
        return
    flags = dict(env="reasoning-gym", env_kwargs=(*smollm2.SUMS, smollm2.SYSTEM, "test_tasks=200"),
                 max_response_tokens=8, eval_every=0, eval_tasks=2 if bench.toy else 200)
    records = bench.script("grpo", "SmolLM2-135M, form", "sft", model=str(model), learning_rate=3e-5,
                           steps=1 if bench.toy else smollm2.FORM_STEPS, batch_size=2 if bench.toy else 16,
                           warmup_steps=4, eval_samples=1, **flags)
    if records is None:
        return
    form = smollm2.checkpoint_of(bench.run_dir("grpo", "SmolLM2-135M, form").name, bench.out / "runs")
    records = bench.script(
        "grpo", job, "grpo_llm", model=str(form), learning_rate=4e-6, entropy_coef=0.0, group_size=8,
        prompts_per_iteration=1 if bench.toy else 16, iterations=1 if bench.toy else 2_000, eval_samples=16,
        checkpoint_every=100, stop=None if bench.toy else dict(seconds=600), **flags | dict(eval_every=100))
    if records is None:
        return
    evaluated = [record for record in records if smollm2.value(record, "/greedy") is not None]
    figures = dict(iterations=(records[-1]["iteration"], ""), sampling=(
        records[-1]["rollout/throughput"], "tokens/s"))
    for name, record in (("before", evaluated[0]), ("after", evaluated[-1])):
        figures[f"greedy {name}"] = smollm2.value(record, "/greedy"), ""
        figures[f"temperature 1 {name}"] = smollm2.value(record, "/pass@1"), ""
    bench.add("grpo", job, **figures)


def ppo(bench):
    for length in (8, 16) if bench.toy else (256, 1024):
        reinforcement(bench, "ppo", "ppo_llm", "Qwen2.5-0.5B", length)


def sft(bench):
    for model in ("Qwen2.5-0.5B", "Qwen3-0.6B"):
        for length in (64, 128) if bench.toy else (2048, 8192):
            job = f"{model} all weights, packed to {length}"
            if bench.is_done("sft", job):
                continue
            folder, batch, steps = bench.model(model), 8 if bench.toy else 64, 12
            rows = bench.out / f"rows-{length}.jsonl"
            if not rows.exists():
                write_rows(rows, length, batch * 4, 512)  # words that every tokenizer here knows
            records = bench.script(
                "sft", job, "sft", model=str(folder), train_files=(str(rows),), messages_key="messages",
                packing=True, max_length=length, batch_size=batch, microbatch_tokens=PASS_TOKENS,
                steps=steps, learning_rate=1e-6, val_ratio=0.05, eval_every=0, eval_tasks=4,
                checkpoint_every=10**6, dtype="float32" if bench.toy else "bfloat16")
            if records is None:
                continue
            speed = middle(records, "train/throughput")
            per_token = training_flops(folder, 0, 0, 1, length * 9 / 16, False) / (length * 9 / 16)
            figures = dict(training=(speed, "tokens/s"),
                           memory=(max(record["system/gpu_memory"] for record in records), "GiB"))
            if bench.peak:
                figures["MFU"] = speed * per_token / bench.peak, ""
            bench.add("sft", job, **figures)


def a2c(bench):
    on_gpu = not bench.toy
    ways = {"float32": {}, "bfloat16": dict(dtype="bfloat16")}
    if on_gpu:
        ways |= {"bfloat16, compile": dict(dtype="bfloat16", compile=True),
                 "bfloat16, CUDA graphs": dict(dtype="bfloat16", cudagraphs=True)}
    for network in ("small", "nature"):
        for num_envs in (1024, 4096, 16384) if on_gpu else (32,):
            for name, way in ways.items():
                job = f"{network}, {num_envs} environments, {name}"
                if bench.is_done("a2c", job):
                    continue
                iterations = 4 if bench.toy else max(24, 2**19 // num_envs)
                chunk = 256 if bench.toy else min(num_envs * 4, 16384)
                records = bench.script(
                    "a2c", job, "a2c_vecenv", network=network, num_envs=num_envs, num_steps=4, chunk=chunk,
                    iterations=iterations, log_every=max(1, iterations // 4), eval_every=0, eval_episodes=8,
                    eval_envs=8, **way)
                if records:
                    bench.add("a2c", job, training=(middle(records, "sps"), "steps/s"),
                              memory=(max(record["system/gpu_memory"] for record in records), "GiB"))
    job = "success after 60 s"
    if not bench.is_done("a2c", job):
        seconds = 75
        flags = dict(num_envs=4096, num_steps=4, chunk=16384, network="nature", dtype="bfloat16",
                     eval_every=50)
        if bench.toy:
            seconds = 3
            flags = dict(num_envs=32, eval_every=2, eval_episodes=8, eval_envs=8, log_every=1)
        stop = dict(seconds=seconds)
        records = bench.script("a2c", job, "a2c_vecenv", iterations=10**6, stop=stop, **flags)
        done = [record for record in records if record["wall_time_s"] <= 60 and "eval/success_rate" in record]
        if done:
            bench.add("a2c", job, success=(done[-1]["eval/success_rate"], ""),
                      steps=(done[-1]["env_steps"], "steps"))


def memory(bench):
    """A token's MiB, from two sizes of pass: what both hold cancels."""
    from update_memory import read_config, reckon
    model = "Qwen2.5-0.5B"
    sizes = (256, 512) if bench.toy else (8192, 16384)
    for lora, checkpointing in ((0, False), (0, True), (16, False), (16, True)):
        job = f"{model} {'LoRA' if lora else 'all weights'}{', checkpointing' if checkpointing else ''}"
        if bench.is_done("memory", job):
            continue
        peaks = []
        length = 64 if bench.toy else 1024
        rows = bench.out / f"equal-rows-{length}.jsonl"
        if not rows.exists():
            text = " ".join(f"w{number % 500}" for number in range(length - 6))
            row = dict(messages=[dict(role="user", content="w1"), dict(role="assistant", content=text)])
            rows.write_text((json.dumps(row) + "\n") * 64)
        for size in sizes:
            records = bench.script(
                "memory", f"{job}, {size}", "sft", model=str(bench.model(model)), train_files=(str(rows),),
                messages_key="messages", batch_size=2 * size // length, microbatch_tokens=size,
                max_length=length, steps=2, learning_rate=1e-6, val_ratio=0.0, eval_every=0, lora_rank=lora,
                gradient_checkpointing=checkpointing, dtype="float32" if bench.toy else "bfloat16")
            if records:
                peaks.append(max(record["system/gpu_memory"] for record in records))
        if len(peaks) == 2:
            measured = (peaks[1] - peaks[0]) * 1024 / (sizes[1] - sizes[0])
            figures = dict(measured=(measured, "MiB/token"), peak=(peaks[1], "GiB"))
            if not bench.toy:
                name = "token_checkpointed" if checkpointing else "token"
                figures["reckoned"] = reckon(read_config(model), lora)[name] / 2**20, "MiB/token"
            bench.add("memory", job, **figures)


def exact(bench):
    for script in ("grpo_llm", "ppo_llm", "sft", "a2c_vecenv"):
        if bench.is_done("exact", script):
            continue
        flags = dict(iterations=8, checkpoint_every=2, eval_every=0, log_every=1, seed=3)
        if script == "sft":
            flags |= dict(steps=flags.pop("iterations"), batch_size=16)
        if script in ("grpo_llm", "ppo_llm"):
            flags.pop("log_every")
            flags |= dict(prompts_per_iteration=8, model=str(REPOSITORY / "models/countdown-tiny"))
        if script == "a2c_vecenv":
            flags |= dict(eval_episodes=8, eval_envs=8)
        else:
            flags |= dict(eval_tasks=8, eval_samples=1)
        if script == "sft":
            flags.pop("log_every")
        folders = []
        for name in ("whole", "again"):
            if bench.script("exact", f"{script} {name}", script, **flags) is not None:
                folders.append(bench.run_dir("exact", f"{script} {name}"))
        name = f"{script} killed"
        checkpoint = bench.run_dir("exact", name) / "checkpoints" / "step_000004"
        bench.script("exact", name, script, stop=dict(until=checkpoint.exists, how=signal.SIGKILL), **flags)
        resumed = bench.script("exact", name, script, new=False, **flags)
        if len(folders) == 2 and resumed is not None:
            killed = bench.run_dir("exact", name)
            bench.add("exact", script, **{
                "one seed, two runs": (difference(*folders), "relative"),
                "kill -9 and resume": (difference(folders[0], killed), "relative")})


def table(rows):
    """Markdown: a line for each job with its figures; parts without any say so."""
    lines = ["| part | job | figures |", "|---|---|---|"]
    for part in PARTS:
        jobs = {}
        for row in rows:
            if row["part"] == part:
                unit = f" {row['unit']}" if row["unit"] else ""
                jobs.setdefault(row["job"], []).append(f"{row['figure']} {row['value']:.4g}{unit}")
        for job, figures in (jobs or {"": ["not measured yet"]}).items():
            lines.append(f"| {part} | {job} | {'; '.join(figures)} |")
    return "\n".join(lines)


def describe_device():
    """Of the GPU that the jobs will use. It is asked in a process of its own: a process that has talked to a
    GPU cannot fork ones that do."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], text=True, check=True, capture_output=True)
    return asked.stdout.strip()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "all", "table"))
    parser.add_argument("--out", type=Path, required=True, help="folder of models, runs and gpu.csv")
    parser.add_argument("--toy", action="store_true", help="sizes of a few seconds, as without a GPU")
    parser.add_argument("--peak-tflops", type=float, default=0.0,
                        help="for MFU, where PEAKS has not the device")
    options = parser.parse_args()
    if options.parts == ["table"]:
        print(table(read_rows(options.out)))
        return
    check_environment("torch", "transformers", "tyro", "pydantic", "peft", "datasets", "gymnasium")
    device = describe_device()
    toy = options.toy or not device
    bench = Bench(options.out.resolve(), toy, device or "cpu", peak_of(device, options.peak_tflops))
    print(f"on {bench.device}{', toy sizes' if toy else ''}; results in {bench.out / 'gpu.csv'}", flush=True)
    for script in ("grpo_llm", "ppo_llm", "sft", "a2c_vecenv"):
        __import__(script)  # once, before the jobs are forked
    began = time.perf_counter()
    for part in PARTS:
        if part in options.parts or "all" in options.parts:
            globals()[part](bench)
    (bench.out / "gpu.md").write_text(table(bench.rows) + "\n")
    print(f"{time.perf_counter() - began:.0f} s; {bench.out / 'gpu.md'}", flush=True)
    if bench.failed:
        sys.exit("error: these failed (OUT/logs has their output):\n" + "\n".join(bench.failed))


if __name__ == "__main__":
    main()
