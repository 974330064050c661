"""Supervised fine-tuning of a causal language model: next-token cross-entropy on responses.

    loss = - sum_t mask_t log p(x_t | x_<t) / sum_t mask_t       mask: 1 on a response and its eos, else 0

Both sums run over the global batch, so neither the loss nor its gradient depends on packing or on how the
batch is cut into passes. The data are an environment's reference solutions (fresh ones at every step), or
rows of parquet and JSONL files or of a hub data set: prompts with responses, or conversations, of which the
assistant turns are learned. Rows are tokenised once, to a memory-mapped file in the run folder.

    python sft.py                                  # makes a small model on one CPU core in 100 s
    python sft.py --model Qwen/Qwen2.5-0.5B-Instruct --train-files chats.parquet --messages-key messages \
        --packing --gradient-checkpointing --run-dir runs/mine
    python sft.py --model Qwen/Qwen2.5-7B-Instruct --dataset OWNER/NAME --lora-rank 16 --learning-rate 1e-4

With --model other defaults apply: REAL_MODEL below. The default run (`skill=mixed`) imitates what a base
model has seen: 70 % of its rows are random legal moves and 30 % are solved games, so the model learns the
format and the arithmetic but seldom the answer. Expect val/loss to fall to 0.37 and greedy accuracy to end
near 0.6; grpo_llm.py goes on from there. With --run-dir DIR the same command continues a stopped run.
"""

import atexit
import contextlib
import difflib
import functools
import hashlib
import json
import math
import os
import re
import reprlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from dotenv import load_dotenv

if __name__ == "__main__":
    load_dotenv(".env")  # before the libraries below read HF_HOME; a variable that is set already stays

import datasets
import numpy as np
import peft
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import transformers
import tyro
from datasets.arrow_writer import ArrowWriter
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from tensorboard.compat.proto.summary_pb2 import Summary
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available
from transformers.utils.chat_template_utils import render_jinja_template

import envs
from envs import BadInput, as_bad_input
from envs.chat import check_template, decoded, encode_within, for_template, is_learned, opened_thought
from envs.files import flush_to_disk, sha256, take_lock
from envs.splits import fingerprints, hold_out, is_repeated

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=dict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True))
class Args:
    # Data
    env: str = "countdown"  # its reference solutions are learned; its test tasks measure accuracy
    env_kwargs: tuple[str, ...] = ("skill=mixed",)  # its options, as key=value; in a mixture, name.key=value
    # parquet and JSONL files to learn from in place of the environment; FILE=2: each row twice an epoch
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()  # files for val/loss; none: --val-ratio of the training rows is held out
    dataset: str = ""  # hub data set to learn from in place of files, OWNER/NAME or OWNER/NAME:CONFIG
    splits: tuple[str] | tuple[str, str] = ("train",)  # its split to learn from, a second one for val/loss
    prompt_key: str = "prompt"  # column with the prompt (a text, or a list of chat messages)
    response_key: str = "response"  # column with the response (a text)
    messages_key: str = ""  # column with conversations, in place of the two: assistant turns are learned
    chat_template: str = "model"  # model: its own; plain: the contents joined; or a Jinja file
    val_ratio: Share = 0.1  # training rows held out without others, at most --eval-tasks; 0: none
    max_length: PositiveInt = 2048  # longest row; demonstrations that exceed it become several rows [tokens]
    truncation: Literal["error", "left", "right"] = "error"  # of a longer row: refused, or cut at this end
    packing: bool = False  # several rows in one, without attention across them: less padding, same gradient

    # Model
    model: str = ""  # folder or hub id to start from; empty: a small Llama with random weights
    lora_rank: NonNegativeInt = 0  # rank of the LoRA adapter; 0 trains all weights
    lora_alpha: PositiveInt = 32  # LoRA scale: the adapter's output is multiplied by alpha / rank
    lora_target_modules: str = "all-linear"  # modules to adapt: all-linear, or names with commas
    lora_adapter_path: str = ""  # folder of a PEFT adapter to train further; replaces the three flags above
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the passes; trained weights stay float32
    gradient_checkpointing: bool = False  # keep one activation per layer: less memory, a third more time

    # Optimisation
    batch_size: PositiveInt = 128  # rows, or demonstrations of an environment, per optimiser step
    microbatch_tokens: PositiveInt = 4096  # tokens per pass, padded [tokens]; never changes the gradient
    seed: Annotated[int, Field(ge=0, lt=2**40)] = 1  # of everything random
    steps: NonNegativeInt = 1200  # optimiser steps; 0: as many as --epochs takes
    epochs: NonNegativeFloat = 10.0  # passes over the training rows, where --steps is 0 or not given
    learning_rate: PositiveFloat = 5e-3  # peak learning rate of AdamW
    warmup_steps: NonNegativeInt = 20  # linear warm-up [steps]
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"  # wsd: linear decay in the last tenth
    final_learning_rate: Share = 0.05  # share of the peak that cosine and wsd end at
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # AdamW's second decay rate; the first is 0.9
    weight_decay: NonNegativeFloat = 0.01  # AdamW's decoupled weight decay, of matrices only

    # Evaluation
    eval_every: NonNegativeInt = 200  # between evaluations, beside epochs' ends; 0: first and last [steps]
    eval_tasks: PositiveInt = 512  # held-out tasks or rows, always the same ones
    eval_samples: PositiveInt = 16  # responses per task for pass@1 and pass@n at temperature 1
    max_response_tokens: PositiveInt = 16  # longest response in evaluation, eos included [tokens]

    # Log
    experiment: str = "sft"  # runs/<experiment>/ holds the run
    run_dir: str = ""  # the run's folder; one that holds a checkpoint is continued (default: a new one)
    log_every: PositiveInt = 10  # between records [steps]; a record's loss is the mean since the one before
    checkpoint_every: PositiveInt = 200  # steps between checkpoints [steps]
    keep_checkpoints: NonNegativeInt = 2  # newest regular ones to keep beside the last and the best; 0: all

    def __post_init__(self):
        # What must hold where a flag is not at its default.
        for flag, is_fine, expected in (
                ("dataset", not self.train_files, "no --train-files"),
                ("val_files", self.train_files, "--train-files"),
                ("splits", self.dataset, "--dataset"),
                ("messages_key", self.train_files or self.dataset, "--train-files or --dataset"),
                ("lora_adapter_path", self.model and not self.lora_rank, "--model, and no --lora-rank,"),
                ("lora_rank", self.model, "--model")):
            if getattr(self, flag) != getattr(Args, flag) and not is_fine:
                raise BadInput(f"--{flag.replace('_', '-')}: expected {expected} beside it")

    @property
    def may_change(self) -> set[str]:
        """Flags that a continued run may change, since they do not affect what is learned."""
        flags = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints"}
        if self.schedule == "constant":  # the others depend on the number of steps
            flags |= {"steps", "epochs"}
        return flags


# The defaults where --model is given; with a GPU --dtype is bfloat16, too.
REAL_MODEL = dict(
    env_kwargs=(), batch_size=32, microbatch_tokens=16384, steps=0,
    learning_rate=2e-6, beta2=0.98, weight_decay=0.05, eval_every=50, eval_tasks=128, eval_samples=4,
    checkpoint_every=50, max_response_tokens=512)
MAX_GRAD_NORM = 1.0  # gradient clipping, by global norm
WSD_DECAY = 0.1  # share of the steps in which the schedule wsd decays
SKIPPING_KERNELS = ("flash_attention_2", "flex_attention")  # they skip what the block-diagonal mask hides
LONGEST_ROW = 1_000_000  # to tokenise more would take seconds and 0.3 GB [characters]
LONGEST_TOKEN = 20  # more of them where --max-length has so many for each of its tokens [characters]
MIN_PACKED = 128  # rows are packed to at least this length, even if all are shorter [tokens]


UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # it started this process
RANK, WORLD_SIZE = 0, 1
if UNDER_TORCHRUN:
    RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# Maths


def token_losses(hidden, head, targets, chunk_elements=2**25):
    """-log p of each target in nats, in float32.  hidden (N, H), targets (N,) -> (N,).

    Logits exist for one chunk of tokens at a time: chunk_elements bounds tokens x vocabulary. The backward
    pass recomputes each chunk, so memory does not grow with N x vocabulary.
    """
    def of_chunk(hidden, targets):
        logits = head(hidden).float()                                   # (n, V)
        return functional.cross_entropy(logits, targets, reduction="none")

    size = max(1, chunk_elements // len(head.weight))  # of a chunk [tokens]
    if len(targets) <= size:
        return of_chunk(hidden, targets)
    losses = []
    for chunk in zip(hidden.split(size), targets.split(size), strict=True):
        losses.append(torch.utils.checkpoint.checkpoint(of_chunk, *chunk, use_reentrant=False))
    return torch.cat(losses)


def response_loss(model, batch):
    """Sum of -log p over response tokens, not normalised.  batch tokens, mask (B, T) -> scalar.

    Rows are padded on the right, so causal attention needs no mask. In packed rows position_ids restart at
    each row, and transformers derives a block-diagonal mask from that (only without use_cache).
    """
    # Token t is predicted at position t - 1: the only shift.
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]   # (B, T - 1)
    is_learned = batch["response_mask"][:, 1:].bool()                   # (B, T - 1)
    positions = batch["position_ids"]
    if positions is not None:
        positions = positions[:, :-1]                                   # (B, T - 1)

    def of_pass():
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        output = decoder(input_ids=inputs, position_ids=positions, use_cache=False)
        hidden = output.last_hidden_state[is_learned]                   # (N, H)
        return token_losses(hidden, head, targets[is_learned]).sum()

    return model.as_forward(of_pass)


def learning_rate(step, steps, args):
    """Linear warm-up, then constant, cosine, or constant with a linear decay (WSD, arXiv:2404.06395)."""
    warm = min(1.0, step / max(args.warmup_steps, 1))
    start = args.warmup_steps  # of the decay
    if args.schedule == "wsd":
        start = max(start, round(steps * (1 - WSD_DECAY)))
    progress = (step - start) / max(steps - start, 1)
    progress = min(max(progress, 0.0), 1.0)
    left = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - progress}
    low = args.final_learning_rate
    return args.learning_rate * warm * (low + (1 - low) * left[args.schedule])


# Data: text to tokens. A row of tokens is (ids, mask), two lists; mask is 1 where a token is learned.


def encode(parts, tokenizer):
    """[(text, 1 if learned, else 0)] -> (ids, mask). As at sampling, no token spans two parts."""
    ids, mask = [], []
    for text, learned in parts:
        if ids:
            part = encode_within(text, tokenizer)
        else:
            part = tokenizer(text, add_special_tokens=False).input_ids
        ids += part
        mask += [learned] * len(part)
    return ids, mask


def text_and_turns(messages, tokenizer, tools=None, **options):
    """What the template writes, and [start, end) of the turns in it that it tags."""
    (text,), turns = render_jinja_template(
        [for_template(messages, tokenizer)], tools=tools, chat_template=tokenizer.get_chat_template(),
        **options, **tokenizer.special_tokens_map)
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # JSON can hold them unpaired; tokenizers refuse them
    return text, turns[0] if turns else []


def eos_pattern(tokenizer, eos):
    return "|".join(re.escape(text) for text in tokenizer.convert_ids_to_tokens(eos) if text)


def end_of_turn(turn, tokenizer, eos):
    """The end of the first eos, where sampling stops; 0 where there is none. Others may follow at once."""
    ends = [match.end() for match in re.finditer(eos_pattern(tokenizer, eos), turn)] or [0]
    between = re.sub(eos_pattern(tokenizer, eos), "", turn[ends[0]:ends[-1]])
    if between.strip():
        raise BadInput(f"--chat-template: it writes {between!r:.80} between two eos of a turn; expected none "
                       "before the end")
    return ends[0]


def encode_response(messages, response, tokenizer, eos, tools=None):
    """A prompt and an assistant message, which is learned unless it is blank.  -> (ids, mask)

    What is learned is what the template writes behind the generation prompt, up to its eos; where it writes
    none, the tokenizer's is added.
    """
    learned = is_learned(response, eos_pattern(tokenizer, eos))
    prompt, _ = text_and_turns(messages, tokenizer, tools, add_generation_prompt=True)
    text, _ = text_and_turns([*messages, response], tokenizer, tools)
    if not text.startswith(prompt):
        raise BadInput("--chat-template: it writes a reply that does not begin with the generation prompt; "
                       "expected one that does, or whole conversations with --messages-key")
    turn = text[len(prompt):]
    end = end_of_turn(turn, tokenizer, eos)
    turn = turn[:end] if end else turn + tokenizer.eos_token
    return encode([(prompt, 0), (turn, int(learned))], tokenizer)


def encode_conversation(messages, tokenizer, eos, tools=None):
    """Assistant turns are learned, each with the eos that ends it, unless they are blank.  -> (ids, mask)

    A turn is what the template puts between {% generation %} tags. Without tags it is what the template adds
    to the earlier messages and the generation prompt, up to its eos, and must never rewrite earlier text.
    """
    tagged = bool(re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()))
    text, turns = text_and_turns(messages, tokenizer, tools, return_assistant_tokens_mask=tagged)
    wanted = []  # of each turn
    for number, message in enumerate(messages):
        learned = is_learned(message, eos_pattern(tokenizer, eos))
        if message["role"] != "assistant":
            continue
        wanted.append(learned)
        if tagged:
            continue
        before, _ = text_and_turns(messages[:number], tokenizer, tools, add_generation_prompt=True)
        after, _ = text_and_turns(messages[:number + 1], tokenizer, tools)
        if not after.startswith(before) or not text.startswith(after):
            raise BadInput(f"--chat-template: it renders message {number + 1} differently when others follow "
                           "or a reply begins; expected one that only appends, or {% generation %} tags")
        turns.append((len(before), len(after)))
    if len(turns) != len(wanted):  # a template may tag some turns, or parts of them
        if not all(wanted):
            raise BadInput(f"--chat-template: it tags {len(turns)} turns for {len(wanted)} assistant "
                           "messages, of which one is blank or not to be learned; expected one turn for each")
        wanted = [True] * len(turns)

    parts, done = [], 0  # done: characters of the text that are in parts
    for (start, end), learned in zip(turns, wanted, strict=True):
        if not learned:
            continue
        length = end_of_turn(text[start:end], tokenizer, eos)
        if not length:
            raise BadInput("--chat-template (plain, where the model has none): it ends an assistant turn "
                           "without an eos token")
        parts += [(text[done:start], 0), (text[start:start + length], 1)]
        done = start + length
    return encode([*parts, (text[done:], 0)], tokenizer)


def text_of(content):
    """The text of a message's content: a string, null, or a list of text blocks."""
    if isinstance(content, list):
        return "\n".join(block["text"] for block in content)
    if not isinstance(content, str | None):
        raise TypeError("a content that is no text")
    return content or ""


def to_messages(value):
    """A list of chat messages or its JSON; contents become strings, null items (parquet's) are removed."""
    messages = []
    for given in decoded(value):
        message = {key: item for key, item in given.items() if item is not None}
        message |= dict(role=given["role"], content=text_of(given.get("content")))
        messages.append(message)
    return messages


def encode_row(row, tokenizer, args, eos):
    """A row of a file or data set -> (ids, mask), before truncation. A malformed row raises any exception."""
    tools = decoded(row.get("tools"))  # JSON schemas of functions
    if args.messages_key:
        return encode_conversation(to_messages(row[args.messages_key]), tokenizer, eos, tools)
    prompt, response = envs.parsed_prompt(row[args.prompt_key]), row[args.response_key]
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    if not prompt:
        raise ValueError("the prompt is an empty list")
    reply = dict(role="assistant", content=text_of(response))
    return encode_response(to_messages(prompt), reply, tokenizer, eos, tools)


def cut(ids, mask, args):
    """Truncate to --max-length.  -> (ids, mask), where perhaps nothing is left to learn"""
    if len(ids) > args.max_length and args.truncation == "error":
        raise BadInput(f"--max-length {args.max_length}: a row has {len(ids)} tokens; pass --max-length "
                       f"{len(ids)}, if the model has so many positions, or --truncation right, or left")
    kept = slice(-args.max_length, None) if args.truncation == "left" else slice(args.max_length)
    return ids[kept], [0, *mask[kept][1:]]  # nothing predicts the first token


def weights_of_files(names):
    """("a.jsonl,b.jsonl=2",) -> {"a.jsonl": 1.0, "b.jsonl": 2.0}: how often an epoch has each of its rows."""
    weights = {}
    for text in names:
        for part in [text] if Path(text).is_file() else text.split(","):
            weighted = re.fullmatch(r"(.+)=(\d+\.?\d*)", part)
            name = part
            weight = 1.0
            if weighted and not Path(part).is_file():
                name = weighted[1]
                weight = float(weighted[2])
            if name in weights or not weight:
                raise BadInput(f"--train-files, --val-files: {part}: expected each file once, with a weight "
                               "above 0")
            weights[name] = weight
    return weights


def mixed(train, weights, seed):
    """Places in the training rows, each as often as its file's weight says: 2.5 is twice, and half of them
    once more.  train: a data set with a column file, weights: of the files -> (rows of an epoch,)
    """
    files = np.array(train["file"])
    places = []
    for number, weight in enumerate(weights):
        of_file = np.random.default_rng((seed, number)).permutation(np.flatnonzero(files == number))
        whole, part = divmod(weight, 1)
        places += [of_file] * int(whole)
        places.append(of_file[:round(part * len(of_file))])
    return np.concatenate(places)


def check_size(row, keys, args):
    """Refuse a row that is far too long before it is tokenised."""
    most = max(LONGEST_ROW, LONGEST_TOKEN * args.max_length)
    size = sum(len(str(row.get(key))) for key in (*keys, "tools"))
    if size > most:
        raise BadInput(f"--max-length {args.max_length}: expected at most {most:,} characters, got {size:,}")


def encode_rows(args, side, path, tokenizer, eos, counts):
    """Write the rows of a side (train or val) as an Arrow file, a few in memory at a time; add to counts."""
    names = weights_of_files(getattr(args, f"{side}_files"))
    split = ""
    if args.dataset:
        names = [args.dataset]
        split = args.splits[0] if side == "train" else args.splits[1]
    keys = [args.messages_key] if args.messages_key else [args.prompt_key, args.response_key]
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    features = datasets.Features(ids=[datasets.Value("int32")], mask=[datasets.Value("bool")],
                                 file=datasets.Value("int32"), prompt=datasets.Value("int64"),
                                 row=datasets.Value("int64"))
    with ArrowWriter(path=str(temporary), features=features, writer_batch_size=64) as writer:
        for file, name in enumerate(names):
            where = f"--dataset {name}, split {split}" if args.dataset else f"--{side}-files {name}"
            rows = envs.read_rows(name, where, split, keys, streaming=True, optional=["tools"])
            for number, row in tqdm(rows, f"tokenising {name}", unit="row", disable=None):
                try:
                    check_size(row, keys, args)
                    all_ids, all_mask = encode_row(row, tokenizer, args, eos)
                    ids, mask = cut(all_ids, all_mask, args)
                except BadInput as error:
                    raise BadInput(f"{where}, row {number}, {error}") from error
                except Exception as error:  # a chat template may raise anything
                    raise BadInput(f"{where}, row {number}: expected text or messages in {' and '.join(keys)}"
                                   f", got {reprlib.repr(row)} ({error!r:.200})") from error
                if len(ids) < len(all_ids):
                    counts["data/truncated"] += 1
                if any(mask):
                    prints = fingerprints(all_ids, all_mask.index(1), row[keys[0]])
                    writer.write(dict(ids=ids, mask=mask, file=file) | prints)
                else:
                    counts["data/dropped"] += 1
        writer.finalize()
    flush_to_disk(temporary)
    temporary.replace(path)


def examples_of_rows(args, tokenizer, eos, run):
    """Rows of data.  -> (function: index -> [(ids, mask)], number of rows, held-out rows, counts)"""
    counts = {"data/truncated": 0, "data/dropped": 0, "data/repeated": 0}

    def load(side):
        path = run.dir / "data" / f"{side}.arrow"
        try:
            if RANK == 0 and not (run.checkpoint and path.exists()):  # a continued run reuses its file
                encode_rows(args, side, path, tokenizer, eos, counts)
        finally:
            gather([])  # the other processes wait for it; there is no file if a row was bad
        return datasets.Dataset.from_file(str(path))

    train = load("train")
    has_val = args.val_files or len(args.splits) == 2
    if has_val:
        val = load("val")
        repeated = is_repeated(train, val)
        val = val.select(np.flatnonzero(~repeated))
        counts["data/repeated"] = int(repeated.sum())
    else:
        num_val = max(1, round(args.val_ratio * len(train))) if args.val_ratio else 0
        num_val = min(num_val, args.eval_tasks, len(train) - 1)
        learned, others, counts["data/repeated"] = hold_out(train, num_val, args.seed)
        val = train.select(others)
        train = train.select(learned)
    if counts["data/repeated"]:
        print_rank_0(f"{counts['data/repeated']:,} rows have the prompt of another one: "
                     + ("they are not held out" if has_val else "all of one prompt are learned, or held out"))
    if not len(train) or not len(val) and (has_val or args.val_ratio):
        where = args.dataset or " ".join(args.train_files + args.val_files)
        raise BadInput(f"{where}: expected rows to learn from and rows to hold out (--val-ratio 0: none), "
                       f"got {len(train)} and {len(val)}; {counts}")

    weights = weights_of_files(args.train_files).values()
    if any(weight != 1 for weight in weights):
        train = train.select(mixed(train, weights, args.seed))
    val = [(row["ids"], row["mask"]) for row in val.select(range(min(args.eval_tasks, len(val))))]
    train = train.select_columns(["ids", "mask"])
    return lambda index: [tuple(train[index].values())], len(train), val, counts


def encode_demonstration(messages, num_prompt, tokenizer, args, eos, tools=None):
    """Messages, of which the first num_prompt are the task -> [(ids, mask)]; each reply is learned once.

    They are one row if it fits --max-length. Otherwise a turn that does not fit begins a new row without the
    oldest turns, as a rollout does at --max-context-tokens: contexts in training are those of sampling.
    """
    turns = [k for k in range(num_prompt, len(messages)) if messages[k]["role"] == "assistant"]

    def encode_turn(number, oldest):  # a reply, after the task and the turns since the oldest
        history = messages[:num_prompt] + messages[turns[oldest]:turns[number]]
        return encode_response(history, messages[turns[number]], tokenizer, eos, tools)

    rows, oldest = [], 0  # oldest: the first turn of the current row
    for number in range(len(turns)):
        before = oldest
        ids, mask = encode_turn(number, oldest)
        while len(ids) > args.max_length and oldest < number - 1:
            oldest += 1
            ids, mask = encode_turn(number, oldest)
        if rows and oldest == before and ids[:len(rows[-1][0])] == rows[-1][0]:  # it continues the row
            _, learned = rows.pop()
            mask = learned + mask[len(learned):]
        rows.append((ids, mask))
    return rows


def examples_of_env(env, args, tokenizer, eos):
    """Demonstrations.  -> (function: index -> [(ids, mask)], number of tasks, held-out rows, counts)"""
    def example(index, split="train"):
        task = env.task(split, index)
        messages = env.demonstration(task)
        if messages is None:
            raise BadInput(f"--env {args.env}: task {task.id} has no reference solution to learn from")
        encoded = encode_demonstration(messages, len(task.messages), tokenizer, args, eos, task.tools)
        rows = [cut(ids, mask, args) for ids, mask in encoded]
        if not all(any(mask) for _, mask in rows):
            raise BadInput(f"--max-length {args.max_length}: nothing is left of task {task.id}")
        return rows

    env.training_task(0, args.seed)  # raises BadInput where there is none
    held_out = []
    for index in range(min(args.eval_tasks, env.num_tasks("test"))):
        held_out += example(index, "test")
    return example, env.num_tasks("train"), held_out, {}


# Passes: rows of tokens to tensors


def pack(rows, size):
    """First-fit decreasing into rows of at most `size` tokens.  -> [(ids, mask, positions)], longest first"""
    packed = []
    for ids, mask in sorted(rows, key=lambda row: len(row[0]), reverse=True):
        row = next((row for row in packed if len(row[0]) + len(ids) <= size), None)
        if row is None:
            row = ([], [], [])
            packed.append(row)
        row[0].extend(ids)
        row[1].extend(mask)
        row[2].extend(range(len(ids)))
    return sorted(packed, key=lambda row: len(row[0]), reverse=True)


def batches(rows, args, pad_id, model):
    """Rows (ids, mask) -> passes of at most --microbatch-tokens, the longest rows first.

    A pass ends early rather than be more than a quarter padding. Packed rows are no longer than the longest
    row where the kernel computes masked attention too; kernels that skip it get one long row per pass.
    FSDP2 gathers weights in every pass, so a process with fewer passes than others adds ones of weight 0.
    """
    size = 0  # of packed rows: 0 packs none [tokens]
    if args.packing:
        size = max([MIN_PACKED, *(len(ids) for ids, _ in rows)])
        if model.config._attn_implementation in SKIPPING_KERNELS:
            size = args.microbatch_tokens
    passes, num_real = [], 0  # num_real: tokens of the last pass, without padding
    for row in pack(rows, size):
        num_real += len(row[0])
        num_computed = math.inf
        if passes:
            longest = len(passes[-1][0][0])  # ids of the first row
            num_computed = longest * (len(passes[-1]) + 1)
        if num_computed > args.microbatch_tokens or num_real < 0.75 * num_computed:
            passes.append([])
            num_real = len(row[0])
        passes[-1].append(row)
    most = max(gather([len(passes)]))
    while len(passes) < most:
        passes.append([([pad_id, pad_id], [0, 0], [0, 1])])  # a row of two tokens, none learned

    tensors = []
    for rows_of_pass in passes:
        ids, mask, positions = zip(*rows_of_pass, strict=True)
        tensors.append(dict(
            tokens=pad(ids, pad_id, model.device),        # (B, T)
            response_mask=pad(mask, 0, model.device),     # (B, T)
            position_ids=pad(positions, 0, model.device) if args.packing else None))
    return tensors


# Evaluate


@torch.no_grad()
def evaluate(model, tokenizer, env, held_out, args):
    """Loss on held-out rows; with a single-turn environment, accuracy on its test tasks too.  -> metrics"""
    metrics = {}
    if held_out:
        mine = [held_out[index] for index in shard(len(held_out))]
        loss = torch.zeros((), dtype=torch.float64)
        with precision(args, model.device):
            for batch in batches(mine, args, tokenizer.pad_token_id, model):
                loss += response_loss(model, batch).cpu()
        metrics["val/loss"] = float(all_reduce(loss)) / sum(sum(mask) for _, mask in held_out)
    if env is not None and not env.multi_turn:
        metrics |= accuracy(model, tokenizer, env, args)
    return metrics


def sample_responses(model, tokenizer, texts, args, **sampling):
    """Token ids of the responses to prompts, padded; those to the same one follow one another.  -> lists"""
    prompts = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left",
                        return_tensors="pt").to(model.device)
    tokens = model.generate(
        **prompts, **sampling, max_new_tokens=args.max_response_tokens,
        eos_token_id=eos_ids(model, tokenizer), pad_token_id=tokenizer.pad_token_id,
        synced_gpus=False)  # waits for no other process
    return tokens[:, prompts.input_ids.shape[1]:].tolist()


def accuracy(model, tokenizer, env, args):
    """Correctness of responses to test tasks, sampled at temperature 1 and greedy.  -> metrics"""
    num_tasks = min(args.eval_tasks, env.num_tasks("test"))
    tasks = [env.task("test", index) for index in range(num_tasks)]
    eos = set(eos_ids(model, tokenizer))

    def are_correct(task, prompt, responses):
        scores = np.zeros(len(responses))
        ended, conversations, steps = [], [], []
        for number, ids in enumerate(responses):
            end = next((place for place, token in enumerate(ids) if token in eos), None)
            if end is not None:  # else it was cut off by --max-response-tokens
                reply = opened_thought(prompt) + tokenizer.decode(ids[:end])
                ended.append(number)
                conversations.append([*task.messages, dict(role="assistant", content=reply)])
                episode = env.start(task, args.seed)
                steps.append(episode.step(reply))
                envs.close(episode)
        if steps:
            steps = env.score_group(task, conversations, steps)
        scores[ended] = [step.info.get("correct", 0.0) for step in steps]
        return scores

    n = args.eval_samples
    # Tasks per call: at most 64, and fewer where the cache of their responses would need more memory.
    size = min(64, max(1, 4 * args.microbatch_tokens // (args.max_response_tokens * n)))
    starts = range(0, num_tasks, size)
    scores = []
    with unsharded(model), precision(args, model.device):
        for number in shard(len(starts)):
            start = starts[number]
            chunk = tasks[start:start + size]
            prompts = []
            for task in chunk:
                text, _ = text_and_turns(task.messages, tokenizer, task.tools, add_generation_prompt=True)
                prompts.append(text)
            torch.manual_seed(args.seed * 1_000_003 + start)  # the same draws at every evaluation
            sampled = sample_responses(model, tokenizer, prompts, args, num_return_sequences=n,
                                       do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
            greedy = sample_responses(model, tokenizer, prompts, args, do_sample=False)
            for k, task in enumerate(chunk):
                responses = [*sampled[k * n:(k + 1) * n], greedy[k]]
                scores.append(are_correct(task, prompts[k], responses))

    scores = np.array(gather(scores))                     # (tasks, n + 1): the last is the greedy one
    sources = np.array([task.source for task in tasks])
    metrics = {}
    for source in np.unique(sources):
        of_source = scores[sources == source]
        metrics[f"val/{source}/pass@1"] = float(of_source[:, :-1].mean())
        metrics[f"val/{source}/pass@{n}"] = float(of_source[:, :-1].max(1).mean())
        metrics[f"val/{source}/greedy"] = float(of_source[:, -1].mean())
    return metrics


# Machinery: the model, its tokenizer and its adapter. What cannot be loaded ends the script in one line.


def from_pretrained(kind, name, **options):
    """kind.from_pretrained; name: a folder, here or beside this script, or a hub id. Raises BadInput."""
    path = Path(name)
    beside = Path(__file__).parent / name  # so that the default model is found from any working directory
    if beside.is_dir() and not path.is_dir():
        path = beside
    is_folder = path.is_dir() or name.startswith(("models/", "runs/"))  # no hub id begins like this
    with as_bad_input(f"--model {name}: it cannot be loaded; expected a hub id, or a folder with config.json "
                      "and weights"):
        if is_folder and not (path / "config.json").is_file():
            raise ValueError("no config.json; of a run, expected one of its checkpoints/step_*; of an "
                             "adapter, expected its base, and the adapter as --lora-adapter-path")
        if name.endswith(".gguf"):
            raise ValueError("a GGUF file: tools/get_smollm2.py --gguf makes a folder of one")
        try:
            return kind.from_pretrained(str(path), trust_remote_code=False, **options)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise BadInput(f"--model {name}: it needs code of its own (auto_map), which is not run; if you "
                           "trust it, write trust_remote_code=True in from_pretrained") from error


@torch.no_grad()
def load_weights(name, dtype=torch.float32):
    """A causal language model, on the CPU."""
    model = from_pretrained(AutoModelForCausalLM, name, dtype=dtype).eval()
    # Only eos is needed of its generation config; save_pretrained refuses some of the rest.
    eos = model.generation_config.eos_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos)
    ids = torch.arange(4)[None]  # any four tokens
    with as_bad_input(f"--model {name}: it changes its logits after the head (a soft cap?), or has none"):
        hidden = model.get_decoder()(ids).last_hidden_state
        logits = model.get_output_embeddings()(hidden.to(dtype))
        torch.testing.assert_close(logits, model(ids).logits, check_dtype=False)
    return model


def weights_sha256(model, adapter=""):
    """Hash of the names, shapes and values of all weights, and of --lora-adapter-path's adapter."""
    digest = hashlib.sha256()
    weights = Path(adapter, "adapter_model.safetensors")
    if adapter and weights.is_file():
        digest.update(sha256(weights).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def new_model(args, tokenizer, **shape):
    """A small Llama with random weights. vLLM on a CPU wants heads of at least 32 numbers."""
    shape = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2) | shape
    config = LlamaConfig(
        **shape, vocab_size=len(tokenizer), tie_word_embeddings=True,
        max_position_embeddings=args.max_length, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config).eval()


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} : {{ m.content }}{{ eos_token }}"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} : {% endif %}")
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def new_tokenizer(words):
    """A tokenizer for the small model: word-level, or byte-level without a list of words.

    A solution reads `18 + 14 = 32; 32 + 6 = 38`. Its `=` and `;` carry no information and would cost a third
    more tokens: encoding drops them, and decoding restores them for the verifier.
    """
    tokens = [*words, ":"] if words else sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(["<pad>", "<bos>", "<eos>", "<unk>", *tokens])  # each once
    ids = {token: number for number, token in enumerate(tokens)}
    if words:
        core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        core.normalizer = normalizers.Replace(Regex("[=;]"), " ")
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.decoder = decoders.Sequence([
            decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(),  # a space between words
            decoders.Replace(Regex(r"[-+*/] \d+\K (?=\d)"), " = "),
            decoders.Replace(Regex(r"(?<=\d) (?=\d+ [-+*/] )"), "; ")])
    else:
        core = Tokenizer(models.BPE(ids, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE)


def make_tokenizer(args, env):
    """The model's tokenizer, or a new one, with a padding token and the template of --chat-template."""
    if args.model:
        tokenizer = from_pretrained(AutoTokenizer, args.model)
    else:
        tokenizer = new_tokenizer(env.vocabulary if env else None)
    if tokenizer.eos_token_id is None:
        raise BadInput(f"--model {args.model}: its tokenizer has no eos token, so no response could end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    plain = PLAIN_TEMPLATE
    if tokenizer.bos_token_id in tokenizer("").input_ids:  # it begins every text with its bos
        plain = "{{ bos_token }}" + plain
    with as_bad_input(f"--chat-template {args.chat_template}: expected model, plain, or a file with a Jinja "
                      "template"):
        if args.chat_template not in ("model", "plain"):
            tokenizer.chat_template = envs.read_text(args.chat_template)
        elif args.chat_template == "model" and tokenizer.chat_template:
            tokenizer.chat_template = tokenizer.get_chat_template()  # of several, the default one
        else:
            tokenizer.chat_template = plain
        check_template(tokenizer, args.chat_template)
        tokenizer.apply_chat_template([dict(role="user", content="hello")])
    return tokenizer


# What the configuration of an adapter may set. All else, such as aLoRA's tokens or copies of layers, is not
# computed here, or by vLLM, as it was in the adapter's training.
LORA_OPTIONS = set(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform "
    "loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_core modules_to_save peft_type "
    "peft_version qalora_group_size r rank_pattern revision target_modules target_parameters task_type "
    "trainable_token_indices use_dora use_rslora".split())


def saved_adapter(folder):
    """The configuration of an adapter. ValueError for one that would not be applied as it was trained."""
    given = json.loads(Path(folder, "adapter_config.json").read_text("utf-8"))
    kind = given.get("peft_type")
    other = [name for name, value in given.items() if value and name not in LORA_OPTIONS]
    if kind != "LORA" or other:
        raise ValueError(f"expected LoRA, rsLoRA or DoRA, got {' with '.join([str(kind), *other])}")
    start = given.get("init_lora_weights", True)
    if start not in (True, False, "gaussian", "eva", "orthogonal"):
        raise ValueError(f"init_lora_weights {start} changes the base or freezes a part: expected an adapter "
                         "that PEFT saved with path_initial_model_for_weight_conversion")
    return peft.LoraConfig.from_pretrained(folder)


def new_adapter(model, args):
    """The configuration of a new adapter. ValueError for a name that the model lacks; PEFT skips it."""
    targets = args.lora_target_modules
    parameters = None
    if targets != "all-linear":
        targets = targets.replace(" ", "").split(",")
        # Experts are often parameters of a module that is no linear layer, and are named with it.
        parameters = [target for target in targets if "experts." in target] or None
        modules = [*dict(model.named_modules())][1:]  # the first one is the model
        for target in targets:
            names = modules
            if "experts." in target:
                names = modules + [*dict(model.named_parameters())]
            if not any(f".{name}".endswith(f".{target}") for name in names):
                near = difflib.get_close_matches(target, {*".".join(names).split(".")}, 3, 0)
                raise ValueError(f"it has no {target!r}; the nearest are {', '.join(near)}")
    return peft.LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets,
                           target_parameters=parameters, task_type="CAUSAL_LM")


def add_lora(model, args, checkpoint=""):
    """Add a LoRA adapter to the frozen base: a checkpoint's, that of --lora-adapter-path, or a new one."""
    folder = checkpoint or args.lora_adapter_path
    flag = f"--lora-adapter-path {folder}" if folder else f"--lora-target-modules {args.lora_target_modules}"
    with as_bad_input(f"{flag}: no adapter for {args.model}"):
        config = saved_adapter(folder) if folder else new_adapter(model, args)
        config.lora_dropout = 0.0  # a ratio must compare two policies, not two dropout masks
        config.inference_mode = False
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = embedding.weight is head.weight
        model = peft.get_peft_model(model, config)
        adapted = {id(layer.get_base_layer()) for layer in model.modules()
                   if isinstance(layer, peft.tuners.lora.LoraLayer)}
        if is_tied and adapted & {id(embedding), id(head)}:
            raise ValueError("its head is its embedding: an adapter of one of them could not be merged")
        # By default PEFT asks the hub, at each save, whether the base has another vocabulary.
        model.save_pretrained = functools.partial(model.save_pretrained, save_embedding_layers=False)
        if folder:
            loaded = model.load_adapter(folder, "default", is_trainable=True)
            foreign = [n for n in loaded.missing_keys + loaded.unexpected_keys if "lora_" in n]
            if foreign:
                raise ValueError(f"{len(foreign)} tensors are of another model, {min(foreign)} among them")
        return model


@torch.no_grad()
def check_packing(model, args):
    """Raise BadInput where a packed row changes with the row before it, as recurrent layers let it."""
    positions = torch.arange(32, device=model.device)  # of each of two rows
    row = positions % len(model.get_output_embeddings().weight)  # any tokens of the vocabulary
    hidden = []
    for first in (row, row.flip(0)):
        forward = functools.partial(
            model.get_decoder(), input_ids=torch.cat([first, row])[None],
            position_ids=torch.cat([positions, positions])[None], use_cache=False)
        with precision(args, model.device):
            output = model.as_forward(forward)
        hidden.append(output.last_hidden_state[0, len(row):].float())   # of the second row (32, H)
    change = (hidden[0] - hidden[1]).norm(dim=-1).max()
    if change > 1e-2 * hidden[0].norm(dim=-1).max():  # more than rounding
        raise BadInput(f"--packing: rows of {args.model} change one another: this architecture cannot pack")


def precision(args, device):
    """Autocast for every forward pass, sampling included, so that sampler and trainer agree."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def pad(rows, value, device, left=False, dtype=torch.long):
    """Lists of different lengths -> (rows, longest), padded on the right or the left."""
    width = max(map(len, rows))
    padded = []
    for row in rows:
        fill = [value] * (width - len(row))
        padded.append([*fill, *row] if left else [*row, *fill])
    return torch.tensor(padded, dtype=dtype, device=device)


def eos_ids(model, tokenizer):
    """Every id that ends a response: the tokenizer's eos and those of the generation config."""
    more = model.generation_config.eos_token_id  # one, several or None
    if not isinstance(more, list):
        more = [] if more is None else [more]
    return [tokenizer.eos_token_id, *more]


# Machinery: processes, under torchrun. Each holds a shard of the weights (FSDP2) and learns from its share of
# the rows; losses and gradients are those of one process.


def start_processes():
    """Set up this process, and join the others if torchrun started it.  -> its device"""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))  # more do not help a small model
    torch.empty(8_000_000)  # 32 MB: from then on glibc keeps freed memory for the next pass
    if UNDER_TORCHRUN:
        # Each process sees its own GPU alone, as vLLM wants it too; where GPUs are fewer, they are shared.
        rank = os.environ["LOCAL_RANK"]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", rank).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(rank) % len(gpus)]
        store, _, _ = next(dist.rendezvous("env://"))
        # It outlives a restart of the workers, which must not read what an earlier attempt wrote.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE,
                                timeout=timedelta(hours=2))  # a rollout or encoding may take long
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def print_rank_0(text):
    if RANK == 0:
        tqdm.write(text)  # beside the progress bar


def gather(items):
    """All-gather: the lists of all ranks, concatenated."""
    if not UNDER_TORCHRUN:
        return [*items]
    lists = [None] * WORLD_SIZE
    dist.all_gather_object(lists, items)
    return sum(lists, [])


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    if UNDER_TORCHRUN:
        dist.all_reduce(tensor, op)
    return tensor


def shard(size):
    """This rank's contiguous part of range(size), all as equal as can be."""
    return range(RANK * size // WORLD_SIZE, (RANK + 1) * size // WORLD_SIZE)


def checkpoint_layers(model):
    """--gradient-checkpointing; transformers' own switch works in training mode only, with its dropout."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                              use_reentrant=False, preserve_rng_state=False)


def full_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a shard of it


def distribute(model, device):
    """Move a model to its device; under torchrun shard it with FSDP2, layer by layer."""
    # Runs a function that calls parts of the model. FSDP2, registered for it below, gathers them around it.
    model.as_forward = lambda function: function()
    if not UNDER_TORCHRUN:
        return model.to(device)
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    names = set()  # of the classes of layers
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    modules = [m for m in model.modules() if type(m).__name__ in names and m is not model]
    modules.append(model)
    before = modules[0]
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)  # the root module, too
        # By default the order of earlier forward passes decides what a backward pass prefetches, and in a
        # rollout the processes do not run equally many.
        module.set_modules_to_backward_prefetch([before])
        before = module
        module.set_gradient_divide_factor(1.0)  # the loss is a sum over all processes, not a mean
        module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    register_fsdp_forward_method(model, "as_forward")
    model.as_forward(lambda: None)  # FSDP2 takes the first module that runs a forward pass for the root
    return model


@contextlib.contextmanager
def unsharded(model):
    """All weights on each process, so that sampling waits for no other process."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


# Machinery: run folder. A kill at any moment loses at most the work since the last checkpoint, from which the
# same command goes on exactly. The same to the letter in all four scripts.


TIMES = ("time/rollout", "time/update", "time/sync", "time/eval", "time/checkpoint")  # measured by Run.timed
# What Run.record shows: name -> metric, of any source, and its format.
SHOWN = {"loss": ("train/loss", ".3f"), "val": ("val/loss", ".3f"),
         "tok/s": ("train/throughput", ",.0f"),
         "pass@1": ("val/.+/pass@1", ".3f"),
         "pass@n": ("val/.+/pass@(?!1$).+", ".3f"), "greedy": ("val/.+/greedy", ".3f")}
# Of a sharded model: whole tensors on the CPU, without frozen ones. strict: a checkpoint lacks those.
FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class Run:
    """A run folder and counters. One that holds a checkpoint is continued. Rank 0 writes all but errors."""

    def __init__(self, args, algo, env, **identity):
        """identity: what a continued run must share beside its flags, such as a model's hash."""
        self.args = args
        run_id = f"{datetime.now(UTC):%Y%m%d_%H%M%S}__{algo}__{Path(env or 'rows').stem}__s{args.seed}"
        self.meta = dict(schema_version=1, run_id=gather([run_id])[0], algo=algo, env=env, seed=args.seed,
                         args=json.loads(json.dumps(vars(args))), **identity)
        self.dir = Path(args.run_dir or Path("runs", args.experiment, self.meta["run_id"]))
        with as_bad_input(f"--run-dir {self.dir}: expected a folder to write into, or a new name"):
            # Of two runs that begin in the same second without a --run-dir, one ends here.
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=bool(args.run_dir or UNDER_TORCHRUN))
            self.lock = (self.dir / "lock").open("a+")  # locked while open
            self.log = (self.dir / "train_log.jsonl").open("a+", 1, errors="replace")  # line by line
        if RANK == 0:  # where it fails, torchrun ends the others
            take_lock(self.lock)
        self.log.seek(0)
        first_line = self.log.readline()
        numbered = (p for p in self.dir.glob("checkpoints/step_*") if p.name[5:].isdecimal())  # no copies
        self.checkpoints = sorted(numbered, key=lambda p: int(p.name[5:]))  # oldest first
        if self.checkpoints or first_line.endswith("\n"):  # else it was cut short
            self.check_same_run(first_line)
        self.state = self.load_state()
        self.checkpoint = str(self.checkpoints[-1]) if self.checkpoints else None
        seen = set(gather([self.checkpoint]))
        if len(seen) > 1:
            raise BadInput(f"--run-dir {self.dir}: expected one folder for all processes; they see {seen}")
        self.counters = {name: self.state[name] for name in ("iteration", "env_steps", "opt_steps")}
        self.started = time.perf_counter() - self.state["elapsed"]
        self.spoken_at = 0.0
        self.begin_record(time.perf_counter())

    def check_same_run(self, first_line):
        """Refuse, by name, whatever would change the result of a continued run."""
        with as_bad_input(f"{self.log.name}: expected a meta line first"):
            old = json.loads(first_line)["meta"]
            self.meta["run_id"] = old["run_id"]
            was = old | old["args"]
            if old.get("script_sha256") not in (None, sha256(Path(__file__))):
                print_rank_0(f"warning: {Path(__file__).name} is not what began {self.dir}: it was changed")
        now = self.meta | self.meta["args"]
        # Either may lack a flag: a variant of this script has others.
        flags = {name: f"--{name.replace('_', '-')}" for name in was["args"] | now["args"]}
        may_differ = self.args.may_change | {"args", "run_id"}
        differ = []
        for name in now | flags:
            if name not in may_differ and was.get(name) != now.get(name):
                differ.append(f"{flags.get(name, name)} {now.get(name)} (it was {was.get(name)})")
        if differ:
            raise BadInput(f"{', '.join(differ[:5])}: use another --run-dir than {self.dir}, or its own")

    def load_state(self):
        """-> the trainer's state in the newest whole checkpoint; damaged ones leave the list."""
        if not self.checkpoints:
            return dict(iteration=0, env_steps=0, opt_steps=0, elapsed=0.0, log_bytes=0)
        while self.checkpoints:
            folder = self.checkpoints[-1]
            try:
                manifest = json.loads((folder / "manifest.json").read_text())
                for name, digest in manifest.items():
                    if sha256(folder / name) != digest:
                        raise ValueError(f"{name} is not what was written")
                state = torch.load(folder / "trainer_state.pt", weights_only=True, map_location="cpu")
                if state["log_bytes"] > self.log.seek(0, os.SEEK_END):
                    raise ValueError("the log ends before it")
                return state
            except (OSError, ValueError, AttributeError) as error:
                print(f"checkpoint {folder} is damaged ({error}): trying the one before", file=sys.stderr)
                self.checkpoints.pop()
        raise BadInput(f"--run-dir {self.dir}: every checkpoint in it is damaged")

    def open(self, total):
        """On rank 0: the meta line; or cut the log at the checkpoint, with a resume line."""
        git = subprocess.run("git describe --always --exclude='*' --abbrev=40 --dirty", shell=True, text=True,
                             capture_output=True, cwd=Path(__file__).parent).stdout.strip()  # "": no git
        modules = [name for name in ("torch", "numpy", "transformers", "vllm") if name in sys.modules]
        versions = {name: sys.modules[name].__version__ for name in modules}
        what = self.meta | self.meta["args"]
        kept = {name: what[name] for name in sorted(what.keys() - self.args.may_change - {"args", "run_id"})}
        self.meta |= dict(
            config_hash=hashlib.sha256(json.dumps(kept).encode()).hexdigest(),
            script_sha256=sha256(Path(__file__)),
            git_sha=git.removesuffix("-dirty") or None, git_dirty=git.endswith("-dirty") if git else None,
            versions=versions | dict(python=sys.version.split()[0], cuda=torch.version.cuda or "none"),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else os.uname().machine,
            argv=sys.argv, started_at=datetime.now(UTC).isoformat())
        start = self.counters["iteration"]
        self.progress = tqdm(total=total, initial=start, leave=False, dynamic_ncols=True,
                             disable=RANK > 0 or None)
        if RANK:
            return
        # Records after the checkpoint are cut off; errors stay, and resumes from a checkpoint that is left.
        self.log.seek(self.state["log_bytes"])
        kept = ('{"trace_id"', '{"resume"') if self.checkpoint else ('{"trace_id"',)  # as these lines begin
        lines = [line for line in self.log if line.startswith(kept) and line.endswith("\n")]
        self.log.truncate(self.state["log_bytes"])
        if not self.checkpoint:
            self.write({"meta": self.meta})
        self.log.writelines(lines)
        if self.checkpoint:
            self.write({"resume": self.header | dict(
                git_sha=self.meta["git_sha"], git_dirty=self.meta["git_dirty"], at=self.meta["started_at"],
                script_sha256=self.meta["script_sha256"], checkpoint=f"checkpoints/step_{start:06d}")})
        self.writer = SummaryWriter(self.dir, purge_step=start + bool(self.checkpoint))

    @property
    def header(self):
        run_id = self.meta["run_id"]
        return dict(run_id=run_id, trace_id=f"{run_id}:{self.counters['opt_steps']}") | self.counters

    def begin_record(self, now):
        """From here on times and rates are those of the next record."""
        self.times = dict.fromkeys(TIMES, 0.0)
        self.clock, self.processor_clock = now, time.process_time()
        self.env_steps_before = self.counters["env_steps"]

    @contextlib.contextmanager
    def timed(self, name):
        began = time.perf_counter()
        yield
        self.times[f"time/{name}"] += time.perf_counter() - began

    def record(self, values):
        """Log numbers, all finite, with times since the last record."""
        now = time.perf_counter()
        seconds = now - self.clock
        env_steps = self.counters["env_steps"] - self.env_steps_before
        values = dict(wall_time_s=now - self.started, sps=env_steps / seconds) | values | self.times
        processor = time.process_time() - self.processor_clock
        values |= {"system/processes": WORLD_SIZE, "system/cpu_utilization": processor / seconds,
                   "system/memory_usage": psutil.Process().memory_info().rss / 2**30,
                   "system/gpu_memory": torch.cuda.max_memory_allocated() / 2**30}
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise FloatingPointError(f"{name} is {value}")
        self.begin_record(now)
        if RANK:
            return
        iteration = self.counters["iteration"]
        # One event for all numbers: add_scalar would take longer than all else that is logged.
        scalars = [dict(tag=k, simple_value=v) for k, v in values.items() if not isinstance(v, list)]
        self.writer.file_writer.add_summary(Summary(value=scalars), iteration)
        self.writer.flush()
        self.write(self.header | values)
        cells = {}
        for name, (pattern, form) in SHOWN.items():
            found = [value for key, value in values.items() if re.fullmatch(pattern, key)]
            if found:
                cells[name] = f"{np.mean(found):{form}}"  # of all sources
        self.progress.set_postfix(cells, refresh=False)
        self.progress.update(iteration - self.progress.n)
        # A table, of evaluations; where there is no bar, of every ten seconds too.
        if values["time/eval"] or self.progress.disable and now > self.spoken_at + 10:
            row = {"iteration": f"{iteration:9}", "time": f"{values['wall_time_s']:,.0f} s"}
            row |= dict.fromkeys(SHOWN, "") | cells
            row["eval"] = f"{values['time/eval']:.1f} s"
            if not self.spoken_at:
                tqdm.write("".join(map("{:>8}".format, row)))
            tqdm.write("".join(map("{:>8}".format, row.values())))
            self.spoken_at = now

    def finish(self):
        """A tool says what was reached and draws curve.png."""
        # Nothing that happens there is an error of the run. Without a terminal, a short run goes without.
        if RANK == 0 and (not self.progress.disable or time.perf_counter() > self.started + 10):
            self.progress.close()
            tool = Path(__file__).parent / "tools/report_run.py"
            os.system(shlex.join([sys.executable, str(tool), str(self.dir)]))

    def write(self, line):
        self.log.write(json.dumps(line, allow_nan=False) + "\n")

    def save(self, state, *parts):
        """Write checkpoints/step_<iteration> atomically; each of parts(folder) writes its files."""
        if RANK:
            return
        folder = self.dir / "checkpoints" / f"step_{self.counters['iteration']:06d}"
        temporary = folder.with_name(f".{folder.name}.writing")
        pointer = folder.with_name(".state.json.writing")  # names the last one
        state |= self.counters | dict(elapsed=time.perf_counter() - self.started, log_bytes=self.log.tell())
        names = {"last": folder.name} | ({"best": state["best"]} if state.get("best") else {})  # sft.py's
        try:
            temporary.mkdir(exist_ok=True)  # a kill may have left it
            for part in parts:
                part(temporary)
            torch.save(state, temporary / "trainer_state.pt")
            manifest = {p.name: sha256(p) for p in sorted(temporary.iterdir()) if p.name != "manifest.json"}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            pointer.write_text(json.dumps(names))
            flush_to_disk(*temporary.iterdir(), temporary, pointer, self.dir / "train_log.jsonl")
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            flush_to_disk(folder.parent)
            pointer.rename(folder.with_name("state.json"))
        except Exception as error:  # a full disk: each library raises its own
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"{folder} could not be written ({error}); earlier checkpoints stay") from error
        self.checkpoints.append(folder)
        regular = [p.name for p in self.checkpoints if int(p.name[5:]) % self.args.checkpoint_every == 0]
        kept = {*names.values(), *regular[-self.args.keep_checkpoints:]}
        for old in [p for p in self.checkpoints if self.args.keep_checkpoints and p.name not in kept]:
            self.checkpoints.remove(old)
            shutil.rmtree(old, ignore_errors=True)  # it may be read, or removed by hand

    def fail(self, error, evidence):
        """Write a receipt: traceback, meta line and evidence ({name: bytes}). Exits with an error."""
        self.progress.close()
        trace_id = self.header["trace_id"]
        path = self.dir / "receipts" / f"{trace_id}:{RANK}"
        what = dict(type=type(error).__name__, message=str(error), rank=RANK, receipt=f"receipts/{path.name}")
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            path.mkdir(parents=True, exist_ok=True)
            (path / "traceback.txt").write_text("".join(traceback.format_exception(error)), errors="replace")
            (path / "meta.json").write_text(json.dumps(self.meta | self.header, indent=1))
            for name, data in evidence.items():
                (path / name).write_bytes(data)
            self.write({"trace_id": trace_id, "error": what})
        if not isinstance(error, (FloatingPointError, KeyboardInterrupt, OSError, BadInput, SystemExit)):
            raise error
        raise SystemExit(f"error: {what['type']}: {error} (rank {RANK}; receipt: {path})")


# Main: set-up, then the loop


def main(args):
    # Set-up: errors in the input are found here, before anything is trained.
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    device = start_processes()
    rows_given = args.train_files or args.dataset
    if not args.steps and not (rows_given and args.epochs):
        raise BadInput("--steps 0: expected --steps, or --train-files or --dataset with --epochs")
    env = env_name = None
    if not rows_given:
        env_name = args.env
        env = envs.make(env_name, **envs.parse_options(args.env_kwargs))
        if env.about:
            print_rank_0(env.about)
    if any(weight != 1 for weight in weights_of_files(args.val_files).values()):
        raise BadInput(f"--val-files {' '.join(args.val_files)}: expected files without weights")
    tokenizer = make_tokenizer(args, env)
    source = tokenizer.chat_template + (env.identity if env else "")
    with as_bad_input("--train-files, --val-files: expected files"):
        for name in [*weights_of_files(args.train_files), *weights_of_files(args.val_files)]:
            source += sha256(Path(name))
    lora = args.lora_rank or args.lora_adapter_path
    # Of the frozen base, which halves its memory; the adapter is float32.
    dtype = torch.bfloat16 if lora and args.dtype == "bfloat16" else torch.float32
    model = load_weights(args.model, dtype) if args.model else new_model(args, tokenizer)
    size = len(model.get_input_embeddings().weight)
    last = max(tokenizer.get_vocab().values())
    if last >= size:
        raise BadInput(f"--model {args.model}: its tokenizer has ids up to {last}, its embedding {size} rows;"
                       " expected one for each token (resize_token_embeddings)")
    run = Run(args, "sft", env_name, model=args.model,
              model_sha256=weights_sha256(model, args.lora_adapter_path),
              files_and_template_sha256=hashlib.sha256(source.encode()).hexdigest())
    # The run has logged the flags as they were given; a model may have fewer positions.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    args = Args(**vars(args) | dict(max_length=min(args.max_length, positions)))
    eos = eos_ids(model, tokenizer)
    if env:
        example, num_rows, held_out, counts = examples_of_env(env, args, tokenizer, eos)
    else:
        example, num_rows, held_out, counts = examples_of_rows(args, tokenizer, eos, run)
    # 1e-9: 1.1 * 100 is 110.00000000000001, which must not add a step.
    num_steps = args.steps or math.ceil(args.epochs * num_rows / args.batch_size - 1e-9)
    torch.manual_seed(args.seed)  # of a new adapter's weights
    if lora:
        model = add_lora(model, args, run.checkpoint)
        names = model.targeted_module_names + model.targeted_parameter_names
        print_rank_0(f"LoRA adapts {', '.join(sorted({name.rpartition('.')[2] for name in names}))}")
    elif run.checkpoint:
        model = load_weights(run.checkpoint)
    model = distribute(model, device)
    if model.device.type != "cpu" and args.dtype == "bfloat16" and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    if args.packing:
        check_packing(model, args)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    parameters = matrices + vectors
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=args.weight_decay), dict(params=vectors, weight_decay=0.0)],
        lr=args.learning_rate, betas=(0.9, args.beta2), fused=True)

    rows = []  # those of the current step
    window = []  # loss and gradient norm of each step since the last record
    best, best_loss = "", math.inf  # the checkpoint of lowest val/loss
    stop = []  # not empty after SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    if run.checkpoint:
        window = run.state["window"]
        best, best_loss = run.state["best"], run.state["best_loss"]
        dcp.set_optimizer_state_dict(model, optimizer, run.state.pop("optimizer"), options=FULL)
    run.open(num_steps)
    start = run.counters["iteration"]
    print_rank_0(f"{run.dir}\n{sum(p.numel() for p in parameters):,} weights are trained on {device}; "
                 f"steps {start:,} to {num_steps:,}, {num_steps * args.batch_size / num_rows:.3g} epochs of "
                 f"{num_rows:,} rows; {len(held_out):,} held out")

    def evaluation():
        with run.timed("eval"):
            return evaluate(model, tokenizer, env, held_out, args)

    def save():
        with run.timed("checkpoint"):
            tensors = dcp.get_model_state_dict(model, options=FULL)
            if not lora:  # a tied head has two names, of which the model lists one
                once = dict(model.named_parameters()) | dict(model.named_buffers())
                tensors = {name: tensor for name, tensor in tensors.items() if name in once}
            state = dcp.get_optimizer_state_dict(model, optimizer, options=FULL)
            run.save(dict(optimizer=state, window=window, best=best, best_loss=best_loss),
                     functools.partial(model.save_pretrained, state_dict=tensors), tokenizer.save_pretrained)

    try:
        if not run.checkpoint:
            run.record({"data/rows": num_rows, "data/held_out": len(held_out)} | counts | evaluation())
        for step in range(start + 1, num_steps + 1):
            # 1. Batch: this process's share of the next rows of the epoch's permutation.
            with run.timed("update"):
                rows = []
                for i in shard(args.batch_size):
                    place = (step - 1) * args.batch_size + i
                    rows += example(envs.shuffled(place, args.seed, num_rows))
                passes = batches(rows, args, tokenizer.pad_token_id, model)
                num_tokens = sum(len(ids) for ids, _ in rows)
                num_targets = sum(sum(mask) for _, mask in rows)
                num_computed = sum(batch["tokens"].numel() for batch in passes)  # padding included
                totals = all_reduce(torch.tensor([num_tokens, num_targets, num_computed]))
                num_tokens, num_targets, num_computed = totals.tolist()  # of all processes

                # 2. Gradient: sums over passes, divided by the response tokens of the global batch.
                loss = torch.zeros((), device=device)
                for batch in passes:
                    with precision(args, device):
                        loss_of_pass = response_loss(model, batch) / num_targets
                    loss_of_pass.backward()
                    loss += loss_of_pass.detach()
                norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM))
                window.append(torch.stack([all_reduce(loss), norm]).tolist())
                if not math.isfinite(sum(window[-1])):
                    raise FloatingPointError(f"loss {float(loss)}, gradient norm {float(norm)}")

                # 3. Step.
                rate = learning_rate(step, num_steps, args)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            # 4. Log the steps since the last record; evaluate every --eval-every steps and at epochs' ends.
            env_steps = run.counters["env_steps"] + num_tokens
            run.counters = dict(iteration=step, opt_steps=step, env_steps=env_steps)
            name = f"step_{step:06d}"
            last = step == num_steps
            epoch_ends = step * args.batch_size % num_rows < args.batch_size
            due = last or args.eval_every and (step % args.eval_every == 0 or epoch_ends)
            if due or step % args.log_every == 0:
                mean_loss, mean_norm = torch.tensor(window, dtype=torch.float64).mean(0).tolist()
                weight_norm = full_tensor(torch.nn.utils.get_total_norm(parameters))
                metrics = {
                    "train/loss": mean_loss,
                    "train/grad_norm": mean_norm,
                    "train/weight_norm": float(weight_norm),
                    "train/learning_rate": rate,
                    "train/epoch": step * args.batch_size / num_rows,
                    "train/padding": 1 - num_tokens / num_computed,
                    "train/throughput": (env_steps - run.env_steps_before) / run.times["time/update"]}
                if due:
                    metrics |= evaluation()
                run.record(metrics)
                window = []
                if metrics.get("val/loss", math.inf) < best_loss:
                    best, best_loss = name, metrics["val/loss"]

            # 5. Checkpoint; at SIGTERM, the last one.
            stopped = any(gather(stop))
            if last or stopped or best == name or step % args.checkpoint_every == 0:
                save()
            if stopped:
                print_rank_0(f"SIGTERM: stopped after step {step}; go on with --run-dir {run.dir}")
                break
        else:
            run.finish()
    except (Exception, KeyboardInterrupt) as error:
        texts = [tokenizer.decode(ids) for ids, _ in rows[:64]]  # some of the rows that it happened at
        run.fail(error, {"evidence.json": json.dumps(texts).encode()})


def read_flags():
    """The flags; their defaults depend on which are given."""
    given = {word.partition("=")[0] for word in sys.argv}
    defaults = {}
    if "--model" in given:
        defaults = REAL_MODEL | dict(dtype="bfloat16" if torch.cuda.is_available() else "float32")
    if "--epochs" in given:
        defaults["steps"] = 0
    if "--env" in given:
        defaults["env_kwargs"] = ()
    for name in sorted(os.environ):
        if name.startswith("SFT_"):  # which set up other systems
            print_rank_0(f"{name} is set, and not read: pass a flag (python sft.py --help)")
    return tyro.cli(Args, default=Args(**defaults))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a file gets each line at once
    try:
        main(read_flags())
    except (BadInput, OSError) as problem:
        sys.exit(f"error: {problem}")
    if UNDER_TORCHRUN:
        # DTensor's caches keep gloo's threads alive, which may abort while the interpreter shuts down.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
