"""docs/variants/overlap.diff against grpo_llm.py: wall-clock on two cores.

    python benchmarks/overlap.py --vllm-python .venv-vllm/bin/python
    python benchmarks/overlap.py --engine hf
    python benchmarks/overlap.py --engine hf --in-flight --eval-tasks 256 --iterations 40
    python benchmarks/overlap.py --in-flight --width 64 --max-response-tokens 200 --prompts 4 --iterations 16

A vLLM server on core 0 samples, the trainer on core 1 learns, by the default recipe; the two scripts
take turns, and a ratio is the median of the turns' ratios. With --engine hf there is no server, and
overlap_hf.diff has a process that samples; both may run on both cores. --in-flight compares these, whose
weights are handed over between requests, with inflight.diff and inflight_hf.diff, where they are between
tokens. Counted is the time from the second iteration's record to the last one's but one, so neither set-up
nor evaluation. Wants a quiet machine.
With --width a Llama of that hidden size, with random weights, takes the place of models/countdown-tiny, and
the reply's text decides at random what it is worth, so that every group is learned from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from sides import REPOSITORY, append_csv, check_environment

check_environment("torch", "transformers", "tyro", "pydantic", "peft")
import torch  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

ONE_THREAD = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def make_variants(folder):
    """The scripts that docs/variants.md makes, beside envs and models."""
    for name in ("envs", "models"):
        Path(folder, name).symlink_to(REPOSITORY / name)
    for script, diff, target in (("grpo_llm.py", "overlap.diff", "grpo_overlap.py"),
                                 (f"{folder}/grpo_overlap.py", "inflight.diff", "grpo_inflight.py"),
                                 (f"{folder}/grpo_overlap.py", "overlap_hf.diff", "grpo_overlap_hf.py"),
                                 (f"{folder}/grpo_overlap_hf.py", "inflight_hf.diff", "grpo_inflight_hf.py")):
        subprocess.run(["patch", script, f"docs/variants/{diff}", "-o", f"{folder}/{target}"], cwd=REPOSITORY,
                       check=True, stdout=subprocess.DEVNULL)


def random_model(folder, width):
    """A Llama with the tokenizer of countdown-tiny, and a reward that its replies can have."""
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "models/countdown-tiny")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=width // 32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reward = Path(folder, "reward.py")
    reward.write_text("import zlib\n\n\ndef random_reward(rollout):\n"
                      "    return zlib.crc32(rollout.messages[-1]['content'].encode()) % 2\n")
    return ["--model", folder, "--reward-fn", f"{reward}:random_reward"]


def train(script, run_dir, cores, *flags):
    """Run a script to its end.  -> the records of its log"""
    command = ["taskset", "-c", cores, sys.executable, script, "--run-dir", run_dir, *map(str, flags)]
    done = subprocess.run(command, cwd=REPOSITORY, env=ONE_THREAD, capture_output=True, text=True)
    if done.returncode and "EngineError: mismatch/kl" not in done.stderr:
        sys.exit(f"error: {' '.join(map(str, command))}\n{done.stderr[-3000:]}")
    lines = map(json.loads, Path(run_dir, "train_log.jsonl").read_text().splitlines())
    return [line for line in lines if "iteration" in line]


@contextmanager
def vllm_server(python, core, model):
    """-> its address"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = ONE_THREAD | dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1",
                                    TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND=core)
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            ["taskset", "-c", core, python, "-m", "vllm.entrypoints.openai.api_server", "--model",
             model, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
             "--max-model-len", "256", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
             "--enable-scale-out"],
            cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 400
            while True:
                try:
                    urllib.request.urlopen(url + "/health", timeout=5)
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        sys.exit(f"error: the server did not start\n{log.read()[-3000:].decode()}")
                    time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def speed(args, folder):
    flags = ["--iterations", args.iterations, "--eval-every", 0, "--eval-tasks", args.eval_tasks,
             "--eval-samples", 1, "--max-response-tokens", args.max_response_tokens,
             "--prompts-per-iteration", args.prompts]
    rows, turns = [], []
    if args.width:
        flags += random_model(f"{folder}/model", args.width)
    model = f"{folder}/model" if args.width else "models/countdown-tiny"
    server, trainer = args.cores
    if args.engine == "hf":
        trainer = f"{server},{trainer}"
    with vllm_server(args.vllm_python, server, model) if args.engine == "vllm" else nothing() as url:
        if url:
            flags += ["--engine", "vllm", "--vllm-url", url, "--max-context-tokens", 256]
        end = ".py" if url else "_hf.py"
        name = f"grpo_overlap{end}"
        stale = ("--max-staleness", args.staleness)
        sides = {"grpo_llm.py": (REPOSITORY / "grpo_llm.py",), name: (f"{folder}/{name}", *stale)}
        if args.in_flight:
            sides = {side: (f"{folder}/{side}", *stale) for side in (name, f"grpo_inflight{end}")}
        first, second = sides
        for turn in range(args.repeats):
            seconds = {}
            for side, (script, *more) in [*sides.items()][::-1 if turn % 2 else 1]:
                before = served(url)
                records = train(script, f"{folder}/{turn}-{side}", trainer, *flags, *more,
                                "--seed", 1 + turn)
                times = {record["iteration"]: record["wall_time_s"] for record in records}
                seconds[side] = (times[args.iterations - 1] - times[2]) / (args.iterations - 3)
                parts = {part: statistics.median(record[f"time/{part}"] for record in records[2:-1])
                         for part in ("rollout", "update", "sync")}
                if args.in_flight:
                    parts |= learned(records, args.iterations, times)
                if url:
                    tokens, steps = (now - then for now, then in zip(served(url), before, strict=True))
                    parts["tokens_per_step"] = tokens / steps
                rows.append(dict(engine=args.engine, cores=" ".join(args.cores), width=args.width,
                                 turn=turn, side=side,
                                 staleness=args.staleness if more else 0, seconds=seconds[side], **parts))
                print(f"turn {turn}: {side} {seconds[side]:.3f} s an iteration ({parts})", file=sys.stderr)
            turns.append(seconds[first] / seconds[second])
    print("| script | seconds an iteration |\n|---|---|")
    for side in sides:
        print(f"| {side} | {statistics.median(row['seconds'] for row in rows if row['side'] == side):.3f} |")
    print(f"\n{first} takes {statistics.median(turns):.2f} times as long "
          f"({min(turns):.2f} to {max(turns):.2f} in {len(turns)} turns)")
    if args.in_flight:
        rates = {(row["turn"], row["side"]): row["tokens_per_s"] for row in rows}
        ratios = [rates[turn, second] / rates[turn, first] for turn in range(args.repeats)]
        print(f"{second} learns from {statistics.median(ratios):.2f} times as many tokens a second "
              f"({min(ratios):.2f} to {max(ratios):.2f})")
    return rows


def served(url):
    """What a server has done so far: the tokens that it has sampled, and the steps that it took for them."""
    if not url:
        return None
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return [float(re.search(rf"^vllm:{name}\S* (\S+)$", text, re.MULTILINE).group(1))
            for name in ("generation_tokens_total", "iteration_tokens_total_count")]


def learned(records, iterations, times):
    """Of a run: tokens a second of the whole loop, age and mismatch of its tokens, and its last accuracy."""
    between = {record["iteration"]: record for record in records if 2 <= record["iteration"] < iterations}
    tokens = between[iterations - 1]["env_steps"] - between[2]["env_steps"]
    found = dict(tokens_per_s=tokens / (times[iterations - 1] - times[2]))
    for name in ("rollout/staleness/mean", "mismatch/kl", "mismatch/frac_capped"):
        found[name] = statistics.mean(record[name] for record in between.values())
    found["greedy"] = records[-1]["val/countdown/greedy"]
    return found


@contextmanager
def nothing():
    yield None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--vllm-python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--in-flight", action="store_true", help="against weights in flight")
    parser.add_argument("--cores", nargs=2, default=("0", "1"), help="of the server and of the trainer")
    parser.add_argument("--eval-tasks", type=int, default=1, help="of the accuracy after the last iteration")
    parser.add_argument("--max-response-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64, help="of an iteration, with 8 replies each")
    parser.add_argument("--width", type=int, default=0, help="hidden size of a model with random weights")
    parser.add_argument("--iterations", type=int, default=30, help="of a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="CSV to append to")
    args = parser.parse_args()
    if args.engine == "vllm":
        check_environment("vllm", python=args.vllm_python, made_by="vllm")
    with tempfile.TemporaryDirectory() as folder:
        make_variants(folder)
        rows = speed(args, folder)
    if args.out:
        append_csv(args.out, rows)


if __name__ == "__main__":
    main()
