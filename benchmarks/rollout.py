"""Sampling: grpo_llm.generate against model.generate of transformers, same model, prompts and lengths.

    python benchmarks/rollout.py                               # the table
    python benchmarks/rollout.py --out benchmarks/results/rollout.csv
    python benchmarks/rollout.py --engines                     # --engine hf against --engine vllm

Groups of 16 responses to each prompt, at temperature 1, on one thread. The two sides take turns, and the
ratio is the median of the turns' ratios, in CPU time. The models: models/countdown-tiny as it is (nearly
all replies end after 9 tokens); a checkpoint of it after some GRPO, if --trained names one; and a Llama of
0.86M random parameters (4 layers, hidden 128), which answers 16-token prompts with up to 64 tokens. Its
head has a bias that ends a response with the probability 1/32 at each token (`natural`: mean length 28), or
never (`forced`). Prompts that are `padded` have 8 to 16 tokens. grpo_llm.generate also returns log-
probabilities, which training needs; model.generate is not asked for them.

With --engines both sides are engines of grpo_llm.py on the same rollout, log-probabilities included: the
prompts are asked for at once and all replies awaited. Their Llama has no bias, since vLLM's has none: its
replies end at the limit or, one token in 512, before.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from sides import REPOSITORY, check_environment

check_environment("torch", "transformers", "tyro", "pydantic", "peft")
import torch  # noqa: E402
import transformers  # noqa: E402

sys.path.insert(0, str(REPOSITORY))
import envs  # noqa: E402
import grpo_llm  # noqa: E402

GROUP, VOCABULARY, EOS, PAD = 16, 512, 2, 0


def random_llama(end_probability):
    """A Llama that ends a response with about this probability at each token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=4, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=1)
    model = transformers.LlamaForCausalLM(config).eval()
    head = torch.nn.Linear(128, VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        # The other logits are small: together they weigh about VOCABULARY x exp(variance / 2).
        others = (VOCABULARY - 1) * math.exp(128 * config.initializer_range**2 / 2)
        odds = end_probability / (1 - end_probability)
        head.bias[EOS] = math.log(odds * others) if odds else -1e9
    model.lm_head = head
    return model


def random_prompts(count, shortest, longest):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def countdown_prompts(count, tokenizer, args):
    env = envs.make("countdown")
    texts = [grpo_llm.render(env.task("train", i).messages, tokenizer, args) for i in range(count)]
    return tokenizer(texts, add_special_tokens=False).input_ids


def ours(model, prompts, max_new_tokens, tokenizer):
    """The number of tokens that grpo_llm.generate sampled."""
    seeds = torch.randint(2**40, (len(prompts),)).tolist()
    replies = grpo_llm.generate(model, prompts, max_new_tokens, 1.0, [tokenizer.eos_token_id], seeds)
    return sum(len(ids) for ids, _ in replies)


def ask_all(engine, prompts):
    """Ask an engine for GROUP replies to each prompt at once.  -> the number of tokens in them"""
    async def ask():
        order = range(len(prompts) * GROUP)
        engine.begin_rollout(len(order))
        serving = asyncio.create_task(engine.serve())
        replies = await asyncio.gather(*(
            engine.sample(prompts[n // GROUP], grpo_llm.Sampling(1.0, (n,))) for n in order))
        serving.cancel()
        return sum(len(ids) for ids, _ in replies)

    return asyncio.run(ask())


def compare_engines(repeats):
    """--engine hf and --engine vllm in turns.  -> rows of the CSV, printed as they come."""
    print("| case | prompts x 16 | hf, tokens/s | vllm, tokens/s | vllm / hf |\n|---|---|---|---|---|")
    random = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=4, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=1)).eval()
    rows, scratch = [], Path(tempfile.mkdtemp())
    random.save_pretrained(scratch / "llama")
    tiny = str(REPOSITORY / "models/countdown-tiny")
    tokenizer = grpo_llm.load_tokenizer(grpo_llm.Args(model=tiny))
    cases = [("countdown-tiny", tiny, tokenizer, 16, (32,)),
             ("llama-0.9M", str(scratch / "llama"), SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD), 64,
              (4, 8, 16))]
    for name, path, tokenizer, limit, counts in cases:
        args = grpo_llm.Args(model=path, engine="vllm", max_response_tokens=limit, max_context_tokens=256)
        model = grpo_llm.load_weights(path)
        engines = dict(hf=grpo_llm.HfEngine(model, tokenizer, args),
                       vllm=grpo_llm.VllmEngine(model, tokenizer, args))
        engines["vllm"].sync_weights(model)
        for count in counts:
            prompts = (countdown_prompts(count, tokenizer, args) if path == tiny
                       else random_prompts(count, 16, 16))
            speeds = {side: [] for side in engines}
            for turn in range(-1, repeats):  # turn -1 warms up
                for side in list(engines)[::1 if turn % 2 else -1]:
                    torch.manual_seed(turn + 1)
                    began = time.process_time()
                    tokens = ask_all(engines[side], prompts)
                    if turn >= 0:
                        speeds[side].append(tokens / (time.process_time() - began))
            ratio = statistics.median(b / a for a, b in zip(*speeds.values(), strict=True))
            rows.append(dict(case=name, prompts=count, rows=count * GROUP, repeats=repeats, **{
                f"{side}_tokens_per_s": round(statistics.median(values)) for side, values in speeds.items()},
                vllm_over_hf=round(ratio, 2)))
            print(f"| {name} | {count} | {rows[-1]['hf_tokens_per_s']:,} | {rows[-1]['vllm_tokens_per_s']:,} "
                  f"| {ratio:.2f} |", flush=True)
    shutil.rmtree(scratch)
    return rows


def theirs(model, prompts, max_new_tokens, tokenizer):
    """The number of tokens, up to and with eos, that model.generate sampled."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampled = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, max_new_tokens=max_new_tokens, eos_token_id=tokenizer.eos_token_id,
                             pad_token_id=PAD)[:, width:]
    ended = (sampled == tokenizer.eos_token_id).cumsum(1)
    return int((ended == 0).sum() + (ended.max(1).values > 0).sum())


def compare(name, model, prompts, max_new_tokens, tokenizer, repeats):
    """Let the sides take turns.  -> a row of the CSV."""
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    speeds, tokens = {ours: [], theirs: []}, {ours: [], theirs: []}
    for turn in range(-1, repeats):  # turn -1 warms up
        for side in (ours, theirs) if turn % 2 else (theirs, ours):
            torch.manual_seed(turn + 1)
            began = time.process_time()
            count = side(model, rows, max_new_tokens, tokenizer)
            seconds = time.process_time() - began
            if turn >= 0:
                speeds[side].append(count / seconds)
                tokens[side].append(count / len(rows))
    return dict(case=name, prompts=len(prompts), rows=len(rows), repeats=repeats,
                ours_tokens_per_s=round(statistics.median(speeds[ours])),
                transformers_tokens_per_s=round(statistics.median(speeds[theirs])),
                ratio=round(statistics.median(a / b for a, b in zip(*speeds.values(), strict=True)), 2),
                ours_mean_length=round(statistics.mean(tokens[ours]), 2),
                transformers_mean_length=round(statistics.mean(tokens[theirs]), 2))


def compare_libraries(options):
    """grpo_llm.generate and model.generate in turns.  -> rows of the CSV, printed as they come."""
    cases = []
    for name in ["models/countdown-tiny"] + ([options.trained] if options.trained else []):
        args = grpo_llm.Args(model=str(REPOSITORY / name))
        tokenizer = grpo_llm.load_tokenizer(args)
        cases.append((f"{Path(name).name} natural", grpo_llm.load_weights(args.model),
                      countdown_prompts(32, tokenizer, args), args.max_response_tokens, tokenizer))
    special = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
    for name, end_probability, counts, shortest in (
            ("llama-0.9M natural", 1 / 32, (4, 8, 16, 32), 16),
            ("llama-0.9M natural padded", 1 / 32, (16,), 8), ("llama-0.9M forced", 0, (8, 16), 16)):
        model = random_llama(end_probability)
        cases += [(name, model, random_prompts(count, shortest, 16), 64, special) for count in counts]
    rows = []
    print("| case | prompts x 16 | ours, tokens/s | transformers, tokens/s | ratio | mean length |\n"
          "|---|---|---|---|---|---|")
    for name, model, prompts, max_new_tokens, tokenizer in cases:
        rows.append(row := compare(name, model, prompts, max_new_tokens, tokenizer, options.repeats))
        print(f"| {name} | {row['prompts']} | {row['ours_tokens_per_s']:,} | "
              f"{row['transformers_tokens_per_s']:,} | {row['ratio']:.2f} | {row['ours_mean_length']:.1f} / "
              f"{row['transformers_mean_length']:.1f} |", flush=True)
    return rows


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trained", default="", help="a checkpoint of grpo_llm.py to sample from as well")
    parser.add_argument("--engines", action="store_true", help="compare --engine hf and --engine vllm")
    parser.add_argument("--out", default="", help="CSV file to append the rows to")
    options = parser.parse_args()
    if options.engines:
        check_environment("vllm", made_by="vllm")
    grpo_llm.start_processes()  # one thread
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rows = compare_engines(options.repeats) if options.engines else compare_libraries(options)
    if options.out:
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if not path.stat().st_size:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
