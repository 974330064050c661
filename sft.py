"""Supervised fine-tuning of a causal language model: next-token cross-entropy on responses.

    loss = - sum_t mask_t log p(x_t | x_<t) / sum_t mask_t       mask: 1 on the response and its eos, else 0

The prompt becomes a chat turn through the tokenizer's template. Both sums run over the whole global batch, so
neither the loss nor its gradient depends on how the batch is cut into passes. Demonstrations are an
environment's reference solutions (fresh ones at every step) or rows of parquet and JSONL files.

    python sft.py                                  # makes models/countdown-tiny on one CPU core in 100 s
    python sft.py --model Qwen/Qwen2.5-0.5B-Instruct --train-files chats.parquet --steps 500 \
        --batch-size 32 --learning-rate 2e-6 --dtype bfloat16 --output-dir models/mine

The default run learns from mixed company, as base models do: 70 % of its rows are a novice's random moves and
30 % are solved games (`skill=mixed`), so it knows the form and the arithmetic and seldom the answer.
Expect val/loss to fall to 0.37 and greedy accuracy to end near 0.6; the rest is for grpo_llm.py to teach.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import peft
import psutil
import torch
import transformers
import tyro
from dotenv import load_dotenv
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

import envs
from envs import BadInput


@dataclasses.dataclass(frozen=True)
class Args:
    # Data
    env: str = "countdown"
    """environment whose reference solutions are the demonstrations, and whose test tasks measure accuracy"""
    env_kwargs: tuple[str, ...] = ("skill=mixed",)
    """its options, as key=value"""
    train_files: tuple[str, ...] = ()
    """parquet or JSONL files to learn from in place of the environment's solutions"""
    prompt_key: str = "prompt"
    """their column with the prompt (a text, or a list of chat messages)"""
    response_key: str = "response"
    """their column with the response"""
    val_ratio: float = 0.1
    """share of the files' rows held out for val/loss"""
    max_length: int = 2048
    """longest prompt and response together; a longer row is an error [tokens]"""
    # Model
    model: str = ""
    """folder or hub id to start from; empty: a small Llama with random weights"""
    hidden_size: int = 64
    """width of the small model"""
    num_layers: int = 3
    """its layers"""
    num_heads: int = 2
    """its attention heads; vLLM on a CPU wants hidden-size / num-heads to be at least 32"""
    intermediate_size: int = 192
    """width of its feed-forward layers"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """arithmetic of the forward and backward pass; weights and AdamW's moments stay float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1"""
    threads: int = 1
    """CPU threads of torch [threads]; the small default model gains nothing from more"""
    output_dir: str = "models/countdown-tiny"
    """the finished model; what was there before is kept beside it as <name>.previous"""
    # Sizes
    batch_size: int = 128
    """rows per optimiser step"""
    microbatch_tokens: int = 4096
    """tokens per forward/backward pass, padding included [tokens]; never changes the gradient"""
    # Optimisation
    seed: int = 1
    """of everything random"""
    steps: int = 1200
    """optimiser steps"""
    learning_rate: float = 5e-3
    """peak learning rate of AdamW"""
    warmup_steps: int = 20
    """linear warm-up [steps]"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """of the learning rate after the warm-up"""
    final_learning_rate: float = 0.05
    """share of the peak that the cosine ends at"""
    beta2: float = 0.95
    """AdamW's second decay rate (the first is 0.9)"""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradient clipping, by global norm"""
    # Evaluation
    eval_every: int = 200
    """steps between evaluations [steps]; 0: only before and after"""
    eval_tasks: int = 512
    """held-out tasks or rows, always the same ones"""
    eval_samples: int = 16
    """responses per task, for pass@1 and pass@n at temperature 1; greedy is measured beside it"""
    max_response_tokens: int = 16
    """longest response in evaluation, eos included [tokens]"""
    # Log
    experiment: str = "sft"
    """runs/<experiment>/ holds the run"""
    run_dir: str = ""
    """the run's folder; one that holds a checkpoint is continued (default: a new one)"""
    log_every: int = 10
    """steps between records [steps]; a record's loss is the mean since the one before"""
    checkpoint_every: int = 200
    """steps between checkpoints [steps]"""
    keep_checkpoints: int = 2
    """newest checkpoints to keep; 0: all"""
    track: bool = False
    """mirror the TensorBoard log to Weights & Biases"""

    def __post_init__(self):
        for name, value in vars(self).items():
            low = LOWEST.get(name, 0)
            if isinstance(value, (int, float)) and not low <= value < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected {low} or more")
            if name in SHARES and value > 1:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected at most 1")
            if name in POSITIVE and value == 0:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected more than 0")
        if self.hidden_size % (2 * self.num_heads):
            raise BadInput(f"--hidden-size {self.hidden_size}: expected a multiple of 2 x --num-heads "
                           f"{self.num_heads}")
        if self.checkpoint_every % self.log_every or self.eval_every % self.log_every:
            raise BadInput(f"--log-every {self.log_every}: expected a divisor of --checkpoint-every "
                           f"{self.checkpoint_every} and of --eval-every {self.eval_every}")


LOWEST = dict.fromkeys((
    "batch_size", "microbatch_tokens", "max_length", "max_response_tokens", "hidden_size", "num_layers",
    "num_heads", "intermediate_size", "eval_tasks", "eval_samples", "log_every", "checkpoint_every",
    "threads"), 1)  # the others: 0
SHARES = ("final_learning_rate", "val_ratio", "beta2")
POSITIVE = ("learning_rate", "max_grad_norm", "val_ratio")

METRICS = {
    "train/loss": "cross-entropy per response token, mean of the steps since the record before [nats]",
    "train/learning_rate": "learning rate of the last step",
    "train/epoch": "rows seen over rows there are",
    "train/global_step": "optimiser steps so far",
    "train/throughput": "tokens per second, prompts included, padding not [tokens/s]",
    "train/grad_norm": "global gradient norm before clipping, mean since the record before",
    "train/weight_norm": "global norm of the weights",
    "val/loss": "cross-entropy per response token on held-out rows [nats]",
    "val/<source>/pass@1": "held-out correctness at temperature 1, mean over tasks and samples",
    "val/<source>/pass@<n>": "share of held-out tasks with a correct response among n",
    "val/<source>/greedy": "held-out correctness of greedy decoding",
    "time": "update, eval, checkpoint (those since the record before; rollout and sync are 0 here) [s]",
    "system/memory_usage": "resident memory of the process [GiB]",
    "system/cpu_utilization": "processor time over wall time since the record before [cores]",
    "system/gpu_memory": "peak memory allocated on the GPU [GiB]",
}


def selected_logprobs(hidden, head, targets, temperature=1.0, chunk_elements=2**25):
    """Log-probabilities of the targets and entropies, in nats.  hidden (N, H), targets (N,) -> (N,), (N,).

    Logits exist for one chunk of tokens at a time, in float32: chunk_elements bounds tokens x vocabulary. The
    backward pass recomputes each chunk, so memory does not grow with N x vocabulary.
    """
    def of_chunk(hidden, targets):
        logits = torch.log_softmax(head(hidden).float() / temperature, dim=-1)           # (n, V)
        entropy = -(logits.exp() * logits).sum(-1)
        return logits.gather(-1, targets[:, None]).squeeze(-1), entropy

    size = max(1, chunk_elements // head.out_features)
    if len(targets) <= size:
        return of_chunk(hidden, targets)
    parts = [recompute(of_chunk, h, t, use_reentrant=False)
             for h, t in zip(hidden.split(size), targets.split(size), strict=True)]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def response_loss(model, batch):
    """Sum of -log p over response tokens, divided by nothing yet.  batch tokens, mask (B, T) -> scalar."""
    decoder, head = decoder_and_head(model)
    tokens, mask = batch["tokens"], batch["response_mask"]
    hidden = decoder(input_ids=tokens[:, :-1], attention_mask=batch["valid"][:, :-1]).last_hidden_state
    chosen = mask[:, 1:].bool()                       # token t is predicted at position t - 1: the only shift
    logprobs, _ = selected_logprobs(hidden[chosen], head, tokens[:, 1:][chosen])
    return -logprobs.sum()


def decoder_and_head(model):
    """The transformer without its head, and the head, beneath PEFT's wrapper if there is one."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.get_decoder(), base.get_output_embeddings()


def learning_rate(step, args):
    """Linear warm-up, then a cosine to a share of the peak (or constant)."""
    warm = min(1.0, step / max(args.warmup_steps, 1))
    progress = min(max((step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1), 0.0), 1.0)
    low = args.final_learning_rate if args.schedule == "cosine" else 1.0
    return args.learning_rate * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


# Engine: load, generate


def new_model(args, tokenizer):
    """A small Llama with random weights."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden_size, intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers, num_attention_heads=args.num_heads, tie_word_embeddings=True,
        max_position_embeddings=args.max_length, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return LlamaForCausalLM(config).eval()


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} : {{ m.content }} {{ eos_token }}"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} :{% endif %}")


def new_tokenizer(words):
    """A tokenizer for the small model: one id per word, or per byte when the environment names no words.

    The words of a solution are `18 + 14 = 32; 32 + 6 = 38`, but `=` and `;` cost a third more tokens and say
    nothing: encoding drops them and decoding puts them back, for people and verifiers to see.
    """
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    if words:
        vocabulary = {word: i for i, word in enumerate(special + words)}
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        core.normalizer = normalizers.Replace(Regex("[=;]"), " ")
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        result = r"(?<=[-+*/] \d|[-+*/] \d\d|[-+*/] \d\d\d|[-+*/] \d\d\d\d) (?=\d)"
        core.decoder = decoders.Sequence([
            decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(),  # a space between words
            decoders.Replace(Regex(result), " = "),
            decoders.Replace(Regex(r"(?<=\d) (?=\d+ [-+*/] )"), "; ")])
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({word: i for i, word in enumerate(special + alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def find_model(name):
    """A folder as given, or beside this script (the defaults work from anywhere), or a hub id."""
    folders = [str(f) for f in (Path(name), Path(__file__).parent / name) if (f / "config.json").is_file()]
    if not folders and (Path(name).exists() or name.count("/") != 1 or name.startswith("models/")):
        raise BadInput(f"--model {name}: expected a folder with config.json and weights, or a hub id")
    return folders[0] if folders else name


def load_pretrained(kind, name, **options):
    """kind.from_pretrained of a model's name. Raises BadInput with the first line of what went wrong."""
    folder = find_model(name)
    try:
        return kind.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        what = "tokenizer" if kind is AutoTokenizer else "weights"
        raise BadInput(f"--model {name}: its {what} cannot be loaded ({first_line(error)})") from error


def load_tokenizer(name):
    """The tokenizer of a model, with a padding token."""
    tokenizer = load_pretrained(AutoTokenizer, name)
    if tokenizer.eos_token_id is None:
        raise BadInput(f"--model {name}: its tokenizer has no eos token, so no response could end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_weights(name, dtype=torch.float32):
    """A causal language model in `dtype`, on the CPU, without dropout."""
    model = load_pretrained(AutoModelForCausalLM, name, dtype=dtype).eval()
    with torch.no_grad():
        ids = torch.arange(4)[None]
        logits = model.get_output_embeddings()(model.get_decoder()(ids).last_hidden_state)
        if not torch.allclose(logits, model(ids).logits, atol=1e-2):
            raise BadInput(f"--model {name}: it rescales its logits after the head (a soft cap, say), which "
                           "this script does not")
    return model


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def precision(args, device):
    """The arithmetic of every pass, sampling included, so that sampler and trainer agree."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def pad(rows, value, device, left=False, dtype=torch.long):
    """Lists of different lengths -> (rows, longest), padded on the right or the left."""
    width = max(map(len, rows))
    rows = [([*row], [value] * (width - len(row))) for row in rows]
    rows = [fill + row if left else row + fill for row, fill in rows]
    return torch.tensor(rows, dtype=dtype, device=device)


def sample(logits, temperature):
    """A token from each row of logits (B, V), the likeliest at temperature 0.  -> tokens, logprobs (B,)."""
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        # Inverse transform: the first token whose cumulative probability exceeds a uniform number. One random
        # number a row instead of V; in float64, since the tail of a large vocabulary drowns in float32 sums.
        cdf = logprobs.double().exp().cumsum(-1)
        uniform = torch.rand(len(cdf), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, uniform, right=True).clamp(max=cdf.shape[1] - 1)
    else:
        tokens = logprobs.argmax(-1, keepdim=True)                                       # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature, tokenizer):
    """Sample a response to each prompt (lists of ids).  -> [(response_ids, logprobs)], eos included.

    Responses that have not parted yet share a row of the batch and of the cache: a group's prompt is computed
    once, and so is every beginning that several responses have in common. Those that ended leave when they
    are an eighth of the batch: leaving copies the cache.
    """
    decoder, head = decoder_and_head(model)
    device, size, unique = model.device, head.out_features, {}
    row = [unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts]          # of each response
    row, live = torch.tensor(row, device=device), torch.arange(len(row), device=device)
    tokens = pad(unique, tokenizer.pad_token_id, device, left=True)                      # (rows, P)
    mask = pad([[1] * len(prompt) for prompt in unique], 0, device, left=True)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = new_cache(decoder, layer=GrowingLayer)
    ids = torch.full((len(row), max_new_tokens), -1, device=device)
    logprobs = torch.zeros(len(row), max_new_tokens, device=device)
    eos = torch.tensor(eos_ids(model, tokenizer), device=device)
    done = torch.zeros_like(row, dtype=torch.bool)
    for t in range(max_new_tokens):
        hidden = decoder(input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache,
                         use_cache=True).last_hidden_state[:, -1]                        # (rows, H)
        token, logprob = sample(head(hidden)[row], temperature)                          # (live,)
        ids[live, t], logprobs[live, t] = token.masked_fill(done, -1), logprob.masked_fill(done, 0.0)
        done = done | torch.isin(token, eos)
        ended = int(done.sum())
        if t + 1 == max_new_tokens or ended == len(done):
            break
        if ended > len(done) // 8:
            live, row, token, done = (x[~done] for x in (live, row, token, done))
        pairs, row = torch.unique(row * size + token, return_inverse=True)
        parent, tokens = pairs // size, (pairs % size)[:, None]
        if not torch.equal(parent, torch.arange(len(mask), device=device)):
            mask, position = mask[parent], position[parent]
            cache.batch_select_indices(parent)
        mask, position = torch.cat([mask, torch.ones_like(tokens)], 1), position[:, -1:] + 1
    lengths = (ids >= 0).sum(1).tolist()
    return [(i[:n], p[:n]) for i, p, n in zip(ids.tolist(), logprobs.tolist(), lengths, strict=True)]


def eos_ids(model, tokenizer):
    """Every id that ends a response: the tokenizer's eos and those of the generation config."""
    ids = model.generation_config.eos_token_id
    return [tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [] if ids is None else [ids])]


def new_cache(decoder, layer=DynamicLayer):
    """An empty cache of `layer`s; models with other than plain attention bring their own kinds of layer."""
    plain = set(getattr(decoder.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return Cache(layer_class_to_replicate=layer) if plain else DynamicCache(config=decoder.config)


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with room to grow: a decode step writes one column and copies nothing."""

    buffer = None

    def update(self, key_states, value_states, *args, **kwargs):
        """key_states, value_states (B, heads, new, D) -> all so far (B, heads, T, D)."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self.buffer is None or end > self.buffer.shape[-2]:
            batch, heads, _, dim = key_states.shape
            buffer = key_states.new_empty(2, batch, heads, end + max(16, end // 2), dim)
            if start:
                buffer[0, :, :, :start], buffer[1, :, :, :start] = self.keys, self.values
            self.buffer = buffer
        self.is_initialized = True
        self.buffer[0, :, :, start:end], self.buffer[1, :, :, start:end] = key_states, value_states
        self.keys, self.values = self.buffer[0, :, :, :end], self.buffer[1, :, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices):
        end, self.buffer = self.get_seq_length(), self.buffer.index_select(1, indices)  # with its room
        self.keys, self.values = self.buffer[0, :, :, :end], self.buffer[1, :, :, :end]


# Data: prompts and responses to tokens


def examples_of_env(env, args, tokenizer):
    """Reference solutions.  -> a function: index -> (ids, prompt length), how many, the held-out ones."""
    def example(index, split="train"):
        task = env.task(split, index)
        response = env.solution(task)
        if response is None:
            raise BadInput(f"--env {args.env}: task {task.id} has no reference solution to learn from")
        return encode(task.messages, response, tokenizer, args)

    num_held_out = min(args.eval_tasks, env.num_tasks("test"))
    return example, env.num_tasks("train"), [example(index, "test") for index in range(num_held_out)]


def examples_of_files(args, tokenizer):
    """Rows of --train-files.  -> a function: index -> (ids, prompt length), how many, the held-out ones."""
    rows = [encode(messages, response, tokenizer, args) for messages, response in read_rows(args)]
    order = permutation(args.seed, len(rows))
    num_held_out = min(max(1, round(args.val_ratio * len(rows))), len(rows) - 1)
    kept = order[num_held_out:]
    held_out = [rows[index] for index in order[:num_held_out][:args.eval_tasks]]
    return (lambda index: rows[kept[index]]), len(kept), held_out


def read_rows(args):
    """All rows of --train-files, checked.  -> [(messages, response)]; a bad one is named by file and row."""
    rows = []
    for name in args.train_files:
        kind = {".parquet": "parquet", ".jsonl": "json"}.get(Path(name).suffix)
        if kind is None or not Path(name).is_file():
            raise BadInput(f"--train-files {name}: expected an existing .parquet or .jsonl file")
        try:
            data = datasets.load_dataset(kind, data_files=name, split="train")
        except Exception as error:  # whatever the readers raise on bytes that are not theirs
            raise BadInput(f"--train-files {name}: cannot be read as {kind} ({first_line(error)})") from error
        for number, row in enumerate(data, 1):
            prompt, response = row.get(args.prompt_key), row.get(args.response_key)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            where = f"--train-files {name}, row {number}, column"
            if not isinstance(messages, list) or not messages or not all(
                    isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
                raise BadInput(f"{where} {args.prompt_key}: expected a text or messages, got {prompt!r}")
            if not isinstance(response, str) or not response.strip():
                raise BadInput(f"{where} {args.response_key}: expected a text, not empty, got {response!r}")
            rows.append((messages, response))
    if len(rows) < 2:
        raise BadInput(f"--train-files: expected at least 2 rows, one of them to hold out, got {len(rows)}")
    return rows


def encode(messages, response, tokenizer, args):
    """-> (ids, number of ids that are the prompt); the response ends with eos."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "".join(message["content"] for message in messages)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    ids = prompt + tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    if len(ids) > args.max_length:
        raise BadInput(f"--max-length {args.max_length}: a row has {len(ids)} tokens: {response[:60]!r}")
    return ids, len(prompt)


def batches(rows, pad_id, budget, device):
    """Cut encoded rows, longest first, into passes of at most `budget` padded tokens."""
    rows, start = sorted(rows, key=lambda row: -len(row[0])), 0
    while start < len(rows):
        part = rows[start:start + max(1, budget // len(rows[start][0]))]
        start += len(part)
        yield dict(
            tokens=pad([ids for ids, _ in part], pad_id, device),
            valid=pad([[1] * len(ids) for ids, _ in part], 0, device),
            response_mask=pad([[0] * prompt + [1] * (len(ids) - prompt) for ids, prompt in part], 0, device))


def count_targets(rows):
    return sum(len(ids) - prompt for ids, prompt in rows)


# Evaluate


@torch.no_grad()
def evaluate(model, tokenizer, env, held_out, args):
    """Loss on held-out rows; with a single-turn environment, accuracy on its test tasks too.  -> metrics."""
    device = model.device
    with precision(args, device):
        total = sum(float(response_loss(model, batch))
                    for batch in batches(held_out, tokenizer.pad_token_id, args.microbatch_tokens, device))
    metrics = {"val/loss": total / count_targets(held_out)}
    if env is None or env.multi_turn:
        return metrics
    tasks = [env.task("test", index) for index in range(min(args.eval_tasks, env.num_tasks("test")))]
    prompts = [encode(task.messages, "", tokenizer, args) for task in tasks]
    torch.manual_seed(args.seed)  # the same draws at every evaluation; each step seeds anew
    scores = {}
    for name, samples, temperature in (("sampled", args.eval_samples, 1.0), ("greedy", 1, 0.0)):
        repeated = [task for task in tasks for _ in range(samples)]
        with precision(args, device):
            replies = generate(model, [ids[:length] for ids, length in prompts for _ in range(samples)],
                               args.max_response_tokens, temperature, tokenizer)
        texts = tokenizer.batch_decode([ids for ids, _ in replies], skip_special_tokens=True)
        ended = [ids[-1] in eos_ids(model, tokenizer) for ids, _ in replies]
        correct = [end and env.start(task, args.seed).step(text).info["correct"]
                   for task, text, end in zip(repeated, texts, ended, strict=True)]
        scores[name] = np.array(correct, dtype=float).reshape(len(tasks), samples)
    for source in sorted({task.source for task in tasks}):
        mine = np.array([task.source == source for task in tasks])
        metrics |= {f"val/{source}/pass@1": float(scores["sampled"][mine].mean()),
                    f"val/{source}/pass@{args.eval_samples}": float(scores["sampled"][mine].max(1).mean()),
                    f"val/{source}/greedy": float(scores["greedy"][mine].mean())}
    return metrics


# Log and checkpoint: the run folder


def describe_run(args, algo, model_hash, source):
    """The meta line: what identifies a run. `source` is what else decides it, the reward's code, say."""
    def git(*command):
        with contextlib.suppress(OSError):  # a copy without git runs too
            here = Path(__file__).parent
            done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=here)
            return done.stdout.strip() if done.returncode == 0 else None

    flags = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                    transformers=transformers.__version__)
    if "vllm" in sys.modules:
        versions["vllm"] = sys.modules["vllm"].__version__
    gpu = torch.cuda.is_available()
    now = datetime.now(UTC)
    return dict(
        run_id=f"{now:%Y%m%d_%H%M%S}__{algo}__{Path(args.env).stem}__s{args.seed}",
        schema_version=1, algo=algo, env=args.env, seed=args.seed, args=flags, argv=sys.argv,
        config_hash=sha256(json.dumps(flags) + source), source_sha256=sha256(source),
        git_sha=git("rev-parse", "HEAD"), git_dirty=bool(git("status", "--porcelain")),
        model=args.model, model_sha256=model_hash,
        versions=versions | ({"cuda": torch.version.cuda} if gpu else {}), started_at=now.isoformat(),
        device=torch.cuda.get_device_name() if gpu else platform.machine())


def sha256(data):
    """Of bytes, a text, or what a file holds."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def weights_sha256(model):
    """Hash of the names, shapes and values of all weights."""
    parts = []
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        parts.append(f"{name} {tuple(tensor.shape)} {sha256(values)}")
    return sha256("\n".join(parts))


class Run:
    """A run folder: the log (train_log.jsonl and TensorBoard), checkpoints, receipts; and the counters.

    A folder that holds a checkpoint is continued. Whatever a kill could tear is written beside its place,
    flushed to the disk and renamed.
    """

    MAY_CHANGE = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints", "log_episodes",
                  "print_samples", "track", "max_concurrent", "check_sync"}  # and vLLM's flags
    TIMES = ("rollout", "update", "sync", "eval", "checkpoint")

    def __init__(self, args, meta):
        self.args, self.meta, self.state, self.checkpoint = args, meta, None, None
        self.dir = Path(args.run_dir or Path("runs", args.experiment, meta["run_id"]))
        try:
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.dir / "train_log.jsonl").open("ab").close()
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: not a folder that can be written to ({error})") from error
        self.find_checkpoint()
        if (self.dir / "train_log.jsonl").stat().st_size:
            self.check_same_run()
        start = self.state or dict(iteration=0, env_steps=0, opt_steps=0, elapsed=0.0)
        self.counters = {name: start[name] for name in ("iteration", "env_steps", "opt_steps")}
        self.started = time.perf_counter() - start["elapsed"]
        self.times, self.since = {}, (time.perf_counter(), time.process_time(), self.counters["env_steps"])

    def find_checkpoint(self):
        """The newest complete checkpoint; a damaged one is named, and the one before it taken."""
        folders = sorted((self.dir / "checkpoints").glob("step_*"), reverse=True)
        for folder in folders:
            try:
                for name, digest in json.loads((folder / "manifest.json").read_text()).items():
                    if sha256(folder / name) != digest:
                        raise ValueError(f"{name} is not what was written")
                self.state = torch.load(folder / "trainer_state.pt", weights_only=True)
                self.checkpoint = str(folder)
                return
            except (OSError, ValueError, AttributeError) as error:
                print(f"checkpoint {folder} is damaged ({error}): trying the one before", file=sys.stderr)
        if folders:
            raise BadInput(f"--run-dir {self.dir}: every checkpoint in it is damaged; use another folder")

    def check_same_run(self):
        """Refuse, by name, whatever would make the continued run another run."""
        try:
            with (self.dir / "train_log.jsonl").open() as log:
                old = json.loads(log.readline())["meta"]
        except (ValueError, KeyError) as error:
            raise BadInput(f"{self.dir}/train_log.jsonl: expected a meta line first ({error!r})") from error
        for name, value in self.meta["args"].items():
            may_change = name in self.MAY_CHANGE or name.startswith("vllm_")
            if not may_change and old["args"].get(name) != value:
                raise BadInput(f"--{name.replace('_', '-')} {value}: the run in {self.dir} was started with "
                               f"{old['args'].get(name)}; use that, or another --run-dir")
        for key, what in (("model_sha256", "the model"), ("source_sha256", "the reward or the data")):
            if old[key] != self.meta[key]:
                raise BadInput(f"--run-dir {self.dir}: {what} changed since that run was started")
        self.meta["run_id"] = old["run_id"]

    def open(self):
        """Write the meta line; or cut the log to the checkpoint and mark the place."""
        path, iteration = self.dir / "train_log.jsonl", self.counters["iteration"] if self.state else -1
        content = json.dumps({"meta": self.meta}).encode() + b"\n"
        if self.state:
            data, end = path.read_bytes(), self.state["log_bytes"]
            kept = [line for line in data[end:].splitlines(True) if line.startswith(b'{"resume"')
                    or line.startswith(b'{"trace_id"') and line.endswith(b"\n")]
            mark = dict(run_id=self.meta["run_id"], trace_id=self.trace_id, **self.counters,
                        checkpoint=Path(self.checkpoint).name, git_sha=self.meta["git_sha"],
                        at=self.meta["started_at"])
            content = data[:end] + b"".join(kept) + json.dumps({"resume": mark}).encode() + b"\n"
        for folder in self.dir.glob("episodes/*_step_*"):
            if int(folder.name.rpartition("_")[2]) > iteration:
                shutil.rmtree(folder)  # these will be written again, and summaries add up
        replace_file(path, content)
        self.log = path.open("ab")
        self.writer = SummaryWriter(self.dir, purge_step=iteration + 1)

    @property
    def trace_id(self):
        return f"{self.meta['run_id']}:{self.counters['opt_steps']}"

    @contextlib.contextmanager
    def timed(self, name):
        began = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def record(self, values):
        """One line of numbers, all finite, with the times since the line before."""
        wall, processor, env_steps = time.perf_counter(), time.process_time(), self.counters["env_steps"]
        seconds = wall - self.since[0]
        values = dict(wall_time_s=wall - self.started, sps=(env_steps - self.since[2]) / seconds) | values
        values |= {f"time/{name}": self.times.get(name, 0.0) for name in self.TIMES}
        values["system/memory_usage"] = psutil.Process().memory_info().rss / 2**30
        values["system/cpu_utilization"] = (processor - self.since[1]) / seconds
        if torch.cuda.is_available():
            values["system/gpu_memory"] = torch.cuda.max_memory_allocated() / 2**30
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value}")
            self.writer.add_scalar(name, value, self.counters["iteration"])
        self.write(dict(run_id=self.meta["run_id"], trace_id=self.trace_id) | self.counters | values)
        self.times, self.since = {}, (wall, processor, env_steps)

    def write(self, line):
        self.log.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self.log.flush()

    def save(self, model, tokenizer, state):
        """checkpoints/step_<iteration>, complete or not at all; then drop the oldest."""
        folder = self.dir / "checkpoints" / f"step_{self.counters['iteration']:06d}"
        temporary = folder.with_name(f".{folder.name}.writing")
        elapsed = time.perf_counter() - self.started
        state = state | self.counters | dict(elapsed=elapsed, log_bytes=self.log.tell())
        try:
            os.fsync(self.log.fileno())
            shutil.rmtree(temporary, ignore_errors=True)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            torch.save(state, temporary / "trainer_state.pt")
            manifest = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                flush_to_disk(path)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            flush_to_disk(folder.parent)
            replace_file(folder.parent / "state.json", json.dumps({"last": folder.name}).encode())
        except Exception as error:  # a full disk: each library has an exception of its own for it
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"{folder} could not be written ({error}); earlier checkpoints stay") from error
        if self.args.keep_checkpoints:
            # A later one is a damaged one that this run fell back from; it must not count as the newest.
            complete = sorted(path for path in folder.parent.glob("step_*") if path.name <= folder.name)
            for old in complete[:-self.args.keep_checkpoints]:
                shutil.rmtree(old)

    def fail(self, error, evidence):
        """Leave a receipt with what is needed to look into the failure, and end with a non-zero exit."""
        what = dict(type=type(error).__name__, message=str(error))
        folder = self.dir / "receipts" / self.trace_id
        receipt = self.meta | self.counters | what | dict(traceback=traceback.format_exception(error))
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "receipt.json").write_text(json.dumps(receipt, indent=1))
            (folder / "evidence.json").write_text(json.dumps(evidence, indent=1))
            self.write({"trace_id": self.trace_id, "error": what | dict(receipt=f"receipts/{folder.name}")})
        if not isinstance(error, (FloatingPointError, KeyboardInterrupt, OSError, BadInput)):
            raise error
        raise SystemExit(f"error: {what['type']}: {error} (receipt: {folder})")


def flush_to_disk(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def replace_file(path, data):
    """Write data beside path and rename: path is the old file or the new one, never a torn one."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_bytes(data)
    flush_to_disk(temporary)
    temporary.replace(path)


MODEL_CARD = """---
library_name: transformers
---
# {name}

A causal language model of {parameters:,} parameters. {steps:,} steps of supervised fine-tuning on `{data}`,

    {command}

at commit {commit}, seed {seed}, torch {torch}, transformers {transformers}. On held-out problems:

| metric | value |
|---|---|
{table}

    model = AutoModelForCausalLM.from_pretrained("{folder}")
    tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def export(model, tokenizer, run, args):
    """Write the finished model with its card to --output-dir; what was there becomes <name>.previous."""
    folder = Path(args.output_dir)
    if args.output_dir == Args.output_dir:
        folder = Path(__file__).parent / folder
    lines = [json.loads(line) for line in (run.dir / "train_log.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val/loss" in line][-1]
    measured = {name: value for name, value in last.items() if name.startswith("val/")}
    temporary = folder.with_name(f".{folder.name}.writing")
    previous = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(MODEL_CARD.format(
        name=folder.name, parameters=model.num_parameters(), steps=args.steps, seed=args.seed,
        data=" ".join(args.train_files or (args.env, *args.env_kwargs)),
        commit=(run.meta["git_sha"] or "unknown")[:12],
        command=" ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]), folder=args.output_dir,
        torch=torch.__version__, transformers=transformers.__version__,
        table="\n".join(f"| {name} | {value:.3f} |" for name, value in measured.items())))
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    temporary.rename(folder)
    return folder


# Main: set-up, then the loop


def task_index(cursor, seed, num_tasks):
    """The cursor-th task of training: a new permutation of all tasks in each epoch."""
    epoch, offset = divmod(cursor, num_tasks)
    return int(permutation(seed * 1_000_003 + epoch, num_tasks)[offset])


@functools.lru_cache(2)
def permutation(seed, size):
    return np.random.default_rng(seed).permutation(size)


def system_metrics(since):
    """Of this process. `since` is (wall time, processor time) at the record before [s]."""
    wall, processor = time.perf_counter(), time.process_time()
    metrics = {"system/memory_usage": psutil.Process().memory_info().rss / 2**30,
               "system/cpu_utilization": (processor - since[1]) / (wall - since[0])}
    if torch.cuda.is_available():
        metrics["system/gpu_memory"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics


def start_tracking(run, args):
    """Mirror TensorBoard to Weights & Biases; before the writer is opened, or it would see nothing."""
    if args.track:
        try:
            import wandb
        except ImportError as error:
            raise BadInput(f"--track: {error}; pip install wandb") from error
        wandb.init(project="plainrl", name=run.meta["run_id"], config=run.meta["args"], dir=run.dir,
                   sync_tensorboard=True)


def choose_device(args):
    """The device that --device names. Raises BadInput when there is none such."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"--device {name}: {first_line(error)}") from error


def main(args):
    # Set-up: whatever is wrong with the input is found here, before anything is trained.
    load_dotenv(".env")
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(args.threads)
    device = choose_device(args)
    env = None if args.train_files else envs.make(args.env, **envs.parse_options(args.env_kwargs))
    tokenizer = load_tokenizer(args.model) if args.model else new_tokenizer(getattr(env, "vocabulary", None))
    if args.train_files:
        example, num_rows, held_out = examples_of_files(args, tokenizer)
    else:
        example, num_rows, held_out = examples_of_env(env, args, tokenizer)
    base = load_weights(args.model) if args.model else new_model(args, tokenizer)
    data = "".join(sha256(Path(name)) for name in args.train_files)
    run = Run(args, describe_run(args, "sft", weights_sha256(base), data))
    model = (load_weights(run.checkpoint) if run.checkpoint else base).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, args.beta2),
                                  weight_decay=args.weight_decay, fused=True)
    if run.state:
        optimizer.load_state_dict(run.state["optimizer"])
    start_tracking(run, args)
    run.open()
    print(f"{run.dir}\n{args.batch_size} rows a step in passes of {args.microbatch_tokens} tokens; "
          f"{model.num_parameters():,} weights on {device}; {num_rows:,} rows, {len(held_out)} held out"
          + (f"; continuing after step {run.counters['iteration']}" if run.state else ""))
    progress = tqdm(total=args.steps, initial=run.counters["iteration"], disable=None, unit="step")
    window, rows = [], []

    def validate():
        with run.timed("eval"):
            metrics = evaluate(model, tokenizer, env, held_out, args)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        tqdm.write(f"step {run.counters['iteration']}: {shown}")
        return metrics

    try:
        if not run.state:
            run.record(validate())
        for step in range(run.counters["iteration"] + 1, args.steps + 1):
            torch.manual_seed(args.seed * 1_000_003 + step)  # a resume needs no generator's state
            with run.timed("update"):
                # 1. Batch: the next rows of this epoch's permutation.
                rows = [example(task_index(i, args.seed, num_rows))
                        for i in range((step - 1) * args.batch_size, step * args.batch_size)]

                # 2. Gradient: sums over passes, divided by the response tokens of the whole batch.
                loss, num_targets = 0.0, count_targets(rows)
                for batch in batches(rows, tokenizer.pad_token_id, args.microbatch_tokens, device):
                    with precision(args, device):
                        part = response_loss(model, batch) / num_targets
                    part.backward()
                    loss += part.detach()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                if not torch.isfinite(loss + norm):
                    raise FloatingPointError(f"loss {float(loss)}, gradient norm {float(norm)}")

                # 3. Step.
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, args)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            window.append(torch.stack([loss, norm]))

            # 4. Log, evaluate, checkpoint.
            run.counters = dict(iteration=step, opt_steps=step,
                                env_steps=run.counters["env_steps"] + sum(len(ids) for ids, _ in rows))
            progress.update()
            last = step == args.steps
            if last or step % args.log_every == 0:
                mean_loss, mean_norm = torch.stack(window).double().mean(0).tolist()
                weight_norm = torch.nn.utils.get_total_norm(model.parameters())  # the log refuses NaN
                metrics = {"train/loss": mean_loss, "train/grad_norm": mean_norm, "train/global_step": step,
                           "train/weight_norm": float(weight_norm),
                           "train/learning_rate": learning_rate(step, args),
                           "train/epoch": step * args.batch_size / num_rows,
                           "train/throughput":
                               (run.counters["env_steps"] - run.since[2]) / run.times["update"]}
                progress.set_postfix(loss=f"{mean_loss:.3f}", grad=f"{mean_norm:.2f}", refresh=False)
                if progress.disable:
                    print(f"{step}/{args.steps} loss {mean_loss:.3f} grad {mean_norm:.2f}")
                if last or args.eval_every and step % args.eval_every == 0:
                    metrics |= validate()
                run.record(metrics)
                window = []
            if last or step % args.checkpoint_every == 0:
                with run.timed("checkpoint"):
                    run.save(model, tokenizer, dict(optimizer=optimizer.state_dict()))
        print(f"wrote {export(model, tokenizer, run, args)}")
    except (Exception, KeyboardInterrupt) as error:
        run.fail(error, [tokenizer.decode(ids) for ids, _ in rows[:64]])
    finally:
        progress.close()
        run.writer.close()


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except BadInput as problem:
        sys.exit(f"error: {problem}")
