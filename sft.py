"""Supervised fine-tuning of a causal language model: next-token cross-entropy on responses.

    loss = - sum_t mask_t log p(x_t | x_<t) / sum_t mask_t       mask: 1 on a response and its eos, else 0

Both sums run over the whole global batch, so neither the loss nor its gradient depends on how the batch is
cut into passes, nor on packing. Demonstrations are an environment's reference solutions (fresh ones at every
step), rows of parquet and JSONL files, or a hub data set: prompts and responses, or conversations whose
assistant turns are learned. Rows become tokens once, in a memory-mapped file of the run's folder.

    python sft.py                                  # makes models/countdown-tiny on one CPU core in 100 s
    python sft.py --model Qwen/Qwen2.5-0.5B-Instruct --train-files chats.parquet --messages-key messages \
        --packing --gradient-checkpointing --output-dir models/mine
    python sft.py --model Qwen/Qwen2.5-7B-Instruct --dataset OWNER/NAME --lora-rank 16 --learning-rate 1e-4

With --model the defaults are others: REAL_MODEL below. The default run learns from mixed company, as base
models do: 70 % of its rows are a novice's random moves and 30 % are solved games (`skill=mixed`), so it knows
the form and the arithmetic and seldom the answer. Expect val/loss to fall to 0.37 and greedy accuracy to end
near 0.6; the rest is for grpo_llm.py to teach.

Read the maths from `token_losses` on and `main` first, then Data, where most mistakes are made.
Processes (torchrun), Engine (sampling, for evaluation) and Log (the run folder) are those of grpo_llm.py.
"""

from __future__ import annotations

import atexit
import bisect
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import reprlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import peft
import psutil
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
import tyro
from datasets.arrow_writer import ArrowWriter
from dotenv import load_dotenv
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available
from transformers.utils.chat_template_utils import render_jinja_template

import envs
from envs import BadInput


@dataclasses.dataclass(frozen=True)
class Args:
    # Data
    env: str = "countdown"
    """environment whose solutions or games are the demonstrations, and whose test tasks measure accuracy"""
    env_kwargs: tuple[str, ...] = ("skill=mixed",)
    """its options, as key=value; of several environments (--env a=3,b), as name.key=value"""
    train_files: tuple[str, ...] = ()
    """parquet and JSONL files to learn from in place of the environment's solutions"""
    val_files: tuple[str, ...] = ()
    """such files for val/loss; none: a share of the training rows is held out"""
    dataset: str = ""
    """hub data set to learn from in place of files, OWNER/NAME or OWNER/NAME:CONFIG"""
    train_split: str = "train"
    """its split to learn from"""
    val_split: str = ""
    """its split for val/loss; empty: a share of the training rows is held out"""
    prompt_key: str = "prompt"
    """column with the prompt (a text, or a list of chat messages)"""
    response_key: str = "response"
    """column with the response (a text)"""
    messages_key: str = ""
    """column with whole conversations, in place of the two: every assistant turn is learned"""
    chat_template: str = ""
    """file with a Jinja chat template, in place of the tokenizer's"""
    val_ratio: float = 0.1
    """share of the training rows held out for val/loss, where no rows are given for it; 0: none"""
    max_rows: int = 0
    """read at most so many rows to learn from [rows]; 0: all"""
    on_bad_row: Literal["error", "skip"] = "error"
    """a row of a wrong form ends the run before it starts, by name, or is left out (five are named)"""
    max_length: int = 2048
    """longest row, prompt and response together [tokens]; a turn of a game that does not fit begins a row
    of its own without the oldest turns"""
    truncation: Literal["error", "left", "right"] = "error"
    """a longer row is a bad row, or loses its beginning (left) or its end (right)"""
    packing: bool = False
    """several rows in one, none seeing another: less padding, the same loss and gradient"""
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
    lora_rank: int = 0
    """rank of the LoRA adapter; 0 trains all weights"""
    lora_alpha: int = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank"""
    lora_target_modules: str = "all-linear"
    """names of the linear layers to adapt, with commas"""
    lora_exclude_modules: str = "lm_head,embed_tokens"
    """never these, though named above: adapting them changes the vocabulary and the merged model's size"""
    lora_adapter_path: str = ""
    """folder of a PEFT adapter to go on from; its own configuration then replaces the four flags above"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """arithmetic of the forward and backward pass; trained weights and AdamW's moments stay float32"""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """auto: flash_attention_2 on a GPU in bfloat16 where flash-attn is installed, else the model's default"""
    gradient_checkpointing: bool = False
    """keep one activation per layer and recompute the rest: a third more time, far less memory"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1"""
    threads: int = 1
    """CPU threads of torch [threads]; the small default model gains nothing from more"""
    dist_timeout: float = 1800.0
    """longest wait for another process, under torchrun [s]"""
    output_dir: str = "models/countdown-tiny"
    """the finished model or adapter; what was there is kept as <name>.previous; empty: in the run's folder"""
    # Sizes
    batch_size: int = 128
    """rows, or demonstrations of an environment, per optimiser step"""
    microbatch_tokens: int = 4096
    """tokens per forward/backward pass, padding included [tokens]; never changes the gradient"""
    # Optimisation
    seed: int = 1
    """of everything random"""
    steps: int = 1200
    """optimiser steps; 0: as many as --epochs takes"""
    epochs: float = 10
    """passes over the training rows, where --steps is 0"""
    learning_rate: float = 5e-3
    """peak learning rate of AdamW"""
    warmup_steps: int = 20
    """linear warm-up [steps]"""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """of the learning rate after the warm-up; wsd: constant, then a line down"""
    decay: float = 0.1
    """share of the steps in which wsd goes down"""
    final_learning_rate: float = 0.05
    """share of the peak that cosine and wsd end at"""
    beta2: float = 0.95
    """AdamW's second decay rate (the first is 0.9)"""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, of matrices; never of norms and biases"""
    max_grad_norm: float = 1.0
    """gradient clipping, by global norm"""
    # Evaluation
    eval_every: int = 200
    """steps between evaluations [steps]; 0: none but before, after and with --eval-epochs"""
    eval_epochs: int = 1
    """passes over the training rows between further evaluations [epochs]; 0: none"""
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
    """newest checkpoints to keep beside the one with the lowest val/loss; 0: all"""
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
        if self.train_files and self.dataset:
            raise BadInput(f"--dataset {self.dataset}: --train-files are given too; expected one of them")
        if self.val_files and not self.train_files:
            raise BadInput(f"--val-files {self.val_files[0]}: expected --train-files beside it")
        if self.val_split and not self.dataset:
            raise BadInput(f"--val-split {self.val_split}: expected --dataset beside it")
        if self.messages_key and not self.from_rows:
            raise BadInput(f"--messages-key {self.messages_key}: expected --train-files or --dataset too")
        if self.lora and not self.model:
            raise BadInput(f"--lora-rank {self.lora_rank}: expected --model beside it")
        if self.lora_rank and self.lora_adapter_path:
            raise BadInput(f"--lora-rank {self.lora_rank}: the adapter of --lora-adapter-path brings its own")
        if self.checkpoint_every % self.log_every or self.eval_every % self.log_every:
            raise BadInput(f"--log-every {self.log_every}: expected a divisor of --checkpoint-every "
                           f"{self.checkpoint_every} and of --eval-every {self.eval_every}")

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained and the model beneath it stays as it is."""
        return bool(self.lora_rank or self.lora_adapter_path)

    @property
    def env_options(self) -> tuple[str, ...]:
        """--env-kwargs, whose default is for Countdown alone."""
        return () if self.env != Args.env and self.env_kwargs == Args.env_kwargs else self.env_kwargs

    @property
    def from_rows(self) -> bool:
        """Whether demonstrations are rows of data, not an environment's solutions."""
        return bool(self.train_files or self.dataset)


# What one fine-tunes a real model with: the defaults where --model is given.
REAL_MODEL = dict(
    env_kwargs=(), dtype="bfloat16", output_dir="", batch_size=32, microbatch_tokens=16384, steps=0,
    learning_rate=2e-6, beta2=0.98, weight_decay=0.05, eval_every=50, checkpoint_every=50,
    max_response_tokens=512)

LOWEST = dict.fromkeys((
    "batch_size", "microbatch_tokens", "max_length", "max_response_tokens", "hidden_size", "num_layers",
    "num_heads", "intermediate_size", "eval_tasks", "eval_samples", "log_every", "checkpoint_every",
    "threads"), 1)  # the others: 0
SHARES = ("final_learning_rate", "val_ratio", "beta2", "decay")
POSITIVE = ("learning_rate", "max_grad_norm", "dist_timeout")

METRICS = {
    "train/loss": "cross-entropy per response token, mean of the steps since the record before [nats]",
    "train/learning_rate": "learning rate of the last step",
    "train/epoch": "rows seen over rows there are",
    "train/global_step": "optimiser steps so far",
    "train/throughput": "tokens per second, prompts included, padding not [tokens/s]",
    "train/grad_norm": "global gradient norm before clipping, mean since the record before",
    "train/weight_norm": "global norm of the trained weights",
    "train/padding": "share of the computed tokens that are padding, in the last step",
    "data/rows": "rows that are learned from (first record only, as are the four below)",
    "data/held_out": "rows that val/loss is measured on",
    "data/truncated": "rows of both kinds that were cut to --max-length",
    "data/dropped": "rows that were left out, having nothing to learn: an empty response, or one cut off",
    "data/bad": "rows that were left out, being of a wrong form",
    "val/loss": "cross-entropy per response token on held-out rows [nats]",
    "val/<source>/pass@1": "held-out correctness at temperature 1, mean over tasks and samples",
    "val/<source>/pass@<n>": "share of held-out tasks with a correct response among n",
    "val/<source>/greedy": "held-out correctness of greedy decoding",
    "time": "update, eval, checkpoint (those since the record before; rollout and sync are 0 here) [s]",
    "system/processes": "processes of torchrun; 1 without it",
    "system/memory_usage": "resident memory of the process; as all of system/*, of the first one [GiB]",
    "system/cpu_utilization": "processor time over wall time since the record before [cores]",
    "system/gpu_memory": "peak memory allocated on the GPU [GiB]",
}


def token_losses(hidden, head, targets, chunk_elements=2**25):
    """-log p of each target in nats, in float32.  hidden (N, H), targets (N,) -> (N,).

    Logits exist for one chunk of tokens at a time: chunk_elements bounds tokens x vocabulary. The backward
    pass recomputes each chunk, so memory does not grow with N x vocabulary.
    """
    def of_chunk(hidden, targets):
        return functional.cross_entropy(head(hidden).float(), targets, reduction="none")     # logits (n, V)

    size = max(1, chunk_elements // head.out_features)
    if len(targets) <= size:
        return of_chunk(hidden, targets)
    return torch.cat([recompute(of_chunk, h, t, use_reentrant=False)
                      for h, t in zip(hidden.split(size), targets.split(size), strict=True)])


def response_loss(model, batch):
    """Sum of -log p over response tokens, divided by nothing yet.  batch tokens, mask (B, T) -> scalar.

    Rows are padded on the right, where no token of theirs looks, so they need no attention mask. In packed
    rows position_ids start anew with each row, from which transformers keeps attention within it (with
    use_cache, it would not).
    """
    tokens, positions = batch["tokens"], batch["position_ids"]
    chosen = batch["response_mask"][:, 1:].bool()     # token t is predicted at position t - 1: the only shift

    def of_pass():
        decoder, head = decoder_and_head(model)
        hidden = decoder(input_ids=tokens[:, :-1], use_cache=False,
                         position_ids=None if positions is None else positions[:, :-1]).last_hidden_state
        return token_losses(hidden[chosen], head, tokens[:, 1:][chosen]).sum()               # (B, T - 1, H)

    return as_forward(model, of_pass)


def decoder_and_head(model):
    """The transformer without its head, and the head, beneath PEFT's wrapper if there is one."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.get_decoder(), base.get_output_embeddings()


def learning_rate(step, steps, args):
    """Linear warm-up, then constant, a cosine, or constant and a line down (WSD, arXiv:2404.06395)."""
    warm = min(1.0, step / max(args.warmup_steps, 1))
    start = max(args.warmup_steps, round(steps * (1 - args.decay)) if args.schedule == "wsd" else 0)
    progress = min(max((step - start) / max(steps - start, 1), 0.0), 1.0)
    left = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - progress}
    low = args.final_learning_rate
    return args.learning_rate * warm * (low + (1 - low) * left[args.schedule])


def parameter_groups(model, weight_decay):
    """Trained parameters for AdamW: matrices decay, vectors (norms and biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=weight_decay),
            dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]


# Processes: those that torchrun started, if it did. Each holds a part of the weights (FSDP2) and plays its
# share of the episodes; all know all episodes, so that each computes the same advantages, order and metrics.


UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # a process group alone may be one that vLLM has made


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def start_processes(args):
    """Join the processes of torchrun, if it started this one.  -> the device of this process

    Of several GPUs each process sees its own alone, as vLLM wants it too.
    """
    if not UNDER_TORCHRUN:
        return choose_device(args)
    if args.device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"--device {args.device}: under torchrun each process has its own; use cuda or cpu")
    if not args.run_dir and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise BadInput("--run-dir: needed with torchrun --max-restarts, or a restart would begin a new run")
    if args.device != "cpu":
        number, seen = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = (seen.split(",") if seen else [*map(str, range(64))])[number]
    device = choose_device(args)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=args.dist_timeout)
    store, number, count = next(dist.rendezvous("env://", timeout=patience))
    Peers.store = own_part(store, number, count)
    dist.init_process_group(backend, store=Peers.store, rank=number, world_size=count, timeout=patience)
    watch = threading.Thread(target=Peers.watch, name="peers", daemon=True)
    watch.start()
    atexit.register(Peers.close, watch)
    return device


def own_part(store, number, count):
    """The part of torchrun's store that belongs to this start. The store still holds what the processes of an
    earlier one wrote: that one of them failed, and addresses where nobody listens any more.
    """
    mine = os.urandom(8).hex()
    store.set(f"hello/{number}", mine)
    while True:
        if number == 0:
            names = [mine, *(store.get(f"hello/{other}").decode() for other in range(1, count))]
            store.set("names", " ".join(names))  # again, until nobody reads an old one
            if all(store.check([f"heard/{other}/{mine}"]) for other in range(1, count)):
                return dist.PrefixStore(mine, store)
        else:
            names = store.get("names").decode().split()
            if names[number:number + 1] == [mine]:
                store.set(f"heard/{number}/{names[0]}", "")
                return dist.PrefixStore(names[0], store)
        time.sleep(0.05)


def end_processes():
    if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM ends all groups at exit
        dist.destroy_process_group()


def say(text, file=None):
    """Print beside the progress bar, in the first process alone."""
    if rank() == 0:
        tqdm.write(text, file)


class Peers:
    """Word of a process that failed: the others end, without a receipt of their own."""

    store, first, ended = None, False, threading.Event()

    @classmethod
    def tell(cls):
        """Let the others know that this process fails.  -> whether it is the first, as far as can be known"""
        answers = []

        def ask():
            with contextlib.suppress(RuntimeError):  # the store is gone with torchrun
                answers.append(cls.store.add("failed", 1))

        if cls.store:
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(10)  # over a link that is cut, no answer comes
        cls.first = not answers or answers == [1]
        return cls.first

    @classmethod
    def watch(cls):
        with contextlib.suppress(RuntimeError):
            while not cls.ended.wait(1):
                # What waits for a process that is gone fails by itself; but with NCCL it does not.
                if cls.store.check(["failed"]) and not cls.ended.wait(5) and not cls.first:
                    os._exit(1)

    @classmethod
    def close(cls, watch):
        """Python must not end while a thread asks the store."""
        cls.ended.set()
        watch.join(10)
        if watch.is_alive():
            sys.stderr.flush()
            os._exit(1)


class Preempted(Exception):
    """SIGTERM came, as from a cluster that takes its machines back: save, and end well."""

    asked = at_once = False
    before = None  # the handler that was there

    @classmethod
    def listen(cls):
        cls.asked = False
        if threading.current_thread() is threading.main_thread():
            cls.before = signal.signal(signal.SIGTERM, cls.on_signal)

    @classmethod
    def forget(cls):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, cls.before)

    @classmethod
    def on_signal(cls, *_):
        cls.asked = True
        if cls.at_once:
            cls.at_once = False
            raise cls


def together(work, at_once=False):
    """work() in every process.  -> what each returned, in order of ranks.

    What ends the run well in one of them, SIGTERM or a sampler that is gone, is raised in all, between two
    collective operations. at_once: SIGTERM interrupts the work, which must be without such operations.
    """
    result = problem = None
    try:
        try:
            Preempted.at_once = at_once
            result = None if Preempted.asked else work()
        finally:
            Preempted.at_once = False
        if Preempted.asked:
            raise Preempted
    except (OSError, Preempted) as error:
        problem = error
    results = [(result, problem)] * num_ranks()
    if UNDER_TORCHRUN:
        dist.all_gather_object(results, (result, problem))
    for _, problem in results:
        if problem:
            raise problem
    return [result for result, _ in results]


def total(tensor):
    """The sum of a tensor over all processes, in its place."""
    if UNDER_TORCHRUN:
        dist.all_reduce(tensor)
    return tensor


def share(size):
    """The part of range(size) that is this process's: in order of ranks, and as even as can be."""
    return range(rank() * size // num_ranks(), (rank() + 1) * size // num_ranks())


def shard(model, device):
    """A model on its device. Under torchrun each process keeps a part of each weight (FSDP2); a layer's are
    gathered when it computes.
    """
    if not UNDER_TORCHRUN:
        return model.to(device)
    mesh = dist.init_device_mesh(device.type, (num_ranks(),))
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    modules = [*(m for m in model.modules() if type(m).__name__ in names and m is not model), model]
    for before, module in zip([modules[0], *modules], modules, strict=False):
        fully_shard(module, mesh=mesh)
        # Else all forward passes before it decide what a backward pass gathers in advance, and those of a
        # rollout are not as many in each process.
        module.set_modules_to_backward_prefetch([before])
        module.set_gradient_divide_factor(1.0)  # the loss is a sum over all processes, not a mean
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.as_forward = lambda function, *given: function(*given)
    register_fsdp_forward_method(model, "as_forward")
    model.as_forward(lambda: None)  # FSDP2 takes the first module that computes for the root
    model.reshard()
    return model


def as_forward(model, function, *given):
    """function(*given) as the model's forward pass: what it calls of a sharded model has whole weights."""
    if not isinstance(model, FSDPModule):
        return function(*given)
    result = model.as_forward(function, *given)
    if not torch.is_grad_enabled():
        model.reshard()  # else its backward pass does; until then it shows whole parameters
    return result


def gather_weights(model, whole):
    """Whole weights on each process, until they are let go: meanwhile none waits for another to compute."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not whole and module is not model, recurse=False)
            module.unshard() if whole else module.reshard()


def plain(tensor):
    """A tensor whose parts lie in several processes as a whole one, in all of them; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def saved_weights(model):
    """(name, tensor) of an adapter's weights, or of all; to be read to the end by all processes together."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in model.state_dict().items():
        if not isinstance(model, peft.PeftModel) or name in trained:
            yield name, plain(tensor)


def whole_weights(model):
    """What save_pretrained is to write of a sharded model, on the CPU; None where it can see for itself."""
    if UNDER_TORCHRUN:
        # Without the second name of a tied head.
        once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        keep = once if rank() == 0 else ()  # the first process writes
        return {name: tensor.cpu() for name, tensor in saved_weights(model) if name in keep}
    return None


def optimizer_state(optimizer):
    """As torch saves it, with whole tensors: it loads into any number of processes."""
    state = optimizer.state_dict()
    return state | dict(state={index: {name: plain(value).cpu() for name, value in moments.items()}
                               for index, moments in state["state"].items()})


def split(tensor, parameter):
    """A whole tensor as the parameter is: this process's part of it where that is sharded."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, tensor = parameter.device_mesh, tensor.to(parameter.device)
    return distribute_tensor(tensor, mesh, parameter.placements, src_data_rank=None)


def load_optimizer(optimizer, state):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.load_state_dict(state | dict(state={
        index: {name: value if name == "step" else split(value, parameters[index])
                for name, value in moments.items()} for index, moments in state["state"].items()}))


def deal(sizes):
    """Items for each process, evenly by size: the largest first, to whoever has least.

    -> the indices of each rank's items, the same in every process
    """
    loads, hands = [0] * num_ranks(), [[] for _ in range(num_ranks())]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        hands[least].append(index)
        loads[least] += sizes[index]
    return [sorted(hand) for hand in hands]


def seed_of(text):
    """A seed for `uniform` that a text names."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} : {{ m.content }}{{ eos_token }}"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} : {% endif %}")


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


def add_lora(model, args, checkpoint=""):
    """Wrap the frozen base in a LoRA adapter: a checkpoint's, that of --lora-adapter-path, or a new one.

    Without dropout: the ratio of an update must compare two policies, not two draws of a mask.
    """
    if folder := checkpoint or args.lora_adapter_path:
        try:
            names = set(load_file(Path(folder, "adapter_model.safetensors")))
            config = peft.LoraConfig.from_pretrained(folder)
            config.lora_dropout, config.inference_mode = 0.0, False
            model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True, config=config)
            if odd := names ^ set(peft.get_peft_model_state_dict(model)):
                raise ValueError(f"{len(odd)} tensors are of another model, {min(odd)} among them")
            return model
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise BadInput(f"--lora-adapter-path {folder}: expected adapter_config.json and "
                           f"adapter_model.safetensors for {args.model} ({first_line(error)})") from error
    targets = args.lora_target_modules
    config = peft.LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, task_type="CAUSAL_LM",
        target_modules=targets if targets == "all-linear" else targets.split(","),
        exclude_modules=[name for name in args.lora_exclude_modules.split(",") if name] or None)
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise BadInput(f"--lora-target-modules {targets}: {first_line(error)}") from error


def adapter_sha256(folder):
    """Of the weights of an adapter that PEFT saved. Raises BadInput where there is none."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not Path(folder, name).is_file():
            raise BadInput(f"--lora-adapter-path {folder}: expected a folder with {name}")
    return sha256(Path(folder, "adapter_model.safetensors"))


def set_up_passes(model, args):
    """The attention kernel, and gradient checkpointing where it is asked for."""
    base, kernel = model.get_base_model() if args.lora else model, args.attention
    gpu = model.device.type != "cpu"
    if kernel == "auto" and gpu and args.dtype == "bfloat16" and is_flash_attn_2_available():
        kernel = "flash_attention_2"
    if kernel == "flex_attention" and not gpu:
        raise BadInput(f"--attention {kernel}: has no backward pass on a CPU")
    if kernel != "auto":
        try:
            base.set_attn_implementation(kernel)
        except (ImportError, ValueError) as error:
            raise BadInput(f"--attention {kernel}: {first_line(error)}") from error
    if args.gradient_checkpointing:
        # Not transformers' own switch: it works in training mode only, which would wake dropout.
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise BadInput(f"--gradient-checkpointing: {args.model} has no layers that can be recomputed")
        for layer in layers:
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False,
                                              preserve_rng_state=False)


@torch.no_grad()
def check_packing(model, args):
    """Raise BadInput where packed rows see each other, as in layers with a state that no mask cuts.

    The second of two packed rows must come out the same, whatever the first one is, but for rounding.
    """
    decoder, head = decoder_and_head(model)
    ids = torch.arange(64, device=model.device) % head.out_features
    positions = torch.arange(32, device=model.device).repeat(2)[None]

    def second(first):
        return decoder(input_ids=torch.cat([first, ids[32:]])[None], position_ids=positions,
                       use_cache=False).last_hidden_state[0, 32:].float()                    # (32, H)

    with precision(args, model.device):
        one, other = (as_forward(model, second, first) for first in (ids[:32], ids[:32].flip(0)))
    if (one - other).norm(dim=-1).max() > 1e-2 * one.norm(dim=-1).max():
        raise BadInput(f"--packing: rows of {args.model} change one another: this architecture cannot pack")


def precision(args, device):
    """The arithmetic of every pass, sampling included, so that sampler and trainer agree."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def pad(rows, value, device, left=False, dtype=torch.long):
    """Lists of different lengths -> (rows, longest), padded on the right or the left."""
    width = max(map(len, rows))
    rows = [([*row], [value] * (width - len(row))) for row in rows]
    rows = [fill + row if left else row + fill for row, fill in rows]
    return torch.tensor(rows, dtype=dtype, device=device)


def uniform(state):
    """A number in [0, 1) from each row's own state, so that none depends on what is sampled beside it:
    splitmix64 (Steele et al., OOPSLA 2014, fig. 17), whose state grows by GAMMA from number to number.

    state (B,) int64, which wraps around -> (B,) float64
    """
    z = state
    for shift, factor in ((30, -0x40a7b892e31b1a47), (27, -0x6b2fb644ecceee15)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return (z >> 11 & (1 << 53) - 1).double() * 2.0**-53


GAMMA = -0x61c8864680b583eb


def sample(logits, temperature, uniform):
    """A token from each row of logits (B, V), the likeliest at temperature 0.  -> tokens, logprobs (B,).

    uniform (B,) float64 in [0, 1): a random number for each row.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        # Inverse transform: the first token whose cumulative probability exceeds a uniform number. One random
        # number a row instead of V; in float64, since the tail of a large vocabulary drowns in float32 sums.
        cdf = logprobs.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
        tokens = tokens.clamp(max=cdf.shape[1] - 1)
    else:
        tokens = logprobs.argmax(-1, keepdim=True)                                       # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def generate(model, prompts, max_new_tokens, temperature, tokenizer, seeds=None):
    """Sample a response to each prompt (lists of ids).  -> [(response_ids, logprobs)], eos included.

    seeds: one for each response, which decides its random numbers; without them torch's generator does.
    Responses that have not parted yet share a row of the batch and of the cache: a group's prompt is computed
    once, and so is every beginning that several responses have in common. Those that ended leave when they
    are an eighth of the batch: leaving copies the cache.
    """
    decoder, head = decoder_and_head(model)
    device, size, unique = model.device, head.out_features, {}
    seeds = (torch.randint(2**62, (len(prompts),)) if seeds is None else torch.tensor(seeds)).to(device)
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
        seeds = seeds + GAMMA
        token, logprob = sample(head(hidden)[row], temperature, uniform(seeds))          # (live,)
        ids[live, t], logprobs[live, t] = token.masked_fill(done, -1), logprob.masked_fill(done, 0.0)
        done = done | torch.isin(token, eos)
        ended = int(done.sum())
        if t + 1 == max_new_tokens or ended == len(done):
            break
        if ended > len(done) // 8:
            live, row, token, seeds, done = (x[~done] for x in (live, row, token, seeds, done))
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


# Data: rows of text to rows of tokens


class BadRow(ValueError):
    """What was expected of a row, and what it has."""

    def __init__(self, message, rows=1):
        super().__init__(message)
        self.rows = rows  # how many it stands for


def data_sha256(args):
    """Of each file that decides what the rows are. Raises BadInput for what is none."""
    for flag, names in (("--train-files", args.train_files), ("--val-files", args.val_files)):
        for name in names:
            if Path(name).suffix not in (".parquet", ".jsonl") or not Path(name).is_file():
                raise BadInput(f"{flag} {name}: expected an existing .parquet or .jsonl file")
    template = [args.chat_template] if args.chat_template else []
    return "".join(sha256(Path(name)) for name in (*args.train_files, *args.val_files, *template))


def file_rows(flag, names, columns):
    """Rows of parquet and JSONL files, a few in memory at a time.  -> (where, row or BadRow), ..."""
    for name in names:
        rows = parquet_rows(name, columns) if name.endswith(".parquet") else jsonl_rows(name)
        try:
            for number, row in rows:
                yield f"{flag} {name}, row {number}", row
        except Exception as error:  # a torn file makes the reader raise anything
            raise BadInput(f"{flag} {name}: cannot be read ({first_line(error)})") from error


def jsonl_rows(name):
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield number, BadRow(f"expected a line of JSON ({first_line(error)})")


def parquet_rows(name, columns):
    """A page that cannot be read spoils the rows from there to the end of its row group."""
    first, file = 1, pyarrow.parquet.ParquetFile(
        name, page_checksum_verification=True, buffer_size=2**16, pre_buffer=False)
    columns = [column for column in columns if column in file.schema_arrow.names]
    for group in range(file.num_row_groups):
        number, last = first, first + file.metadata.row_group(group).num_rows - 1
        try:
            for table in file.iter_batches(batch_size=16, row_groups=[group], columns=columns):
                for index in range(table.num_rows):
                    try:
                        row = {column: table.column(column)[index].as_py() for column in columns}
                    except (ValueError, OverflowError) as error:  # not UTF-8; a date that Python has not
                        row = BadRow(f"expected a text ({first_line(error)})")
                    yield number, row
                    number += 1
        except (OSError, pyarrow.ArrowException) as error:
            rows = last - number + 1
            yield f"{number} to {last}", BadRow(f"a torn part of the file ({first_line(error)})", rows)
            number = last + 1
        if number != last + 1:  # a torn page header: its page was passed over, and columns no longer match
            raise OSError(f"rows {first} to {last} are {number - first}")
        first = last + 1


def hub_rows(dataset, split, columns):
    """Rows of a hub data set, streamed.  -> (where, row), ..."""
    name, _, config = dataset.partition(":")
    where, number = f"--dataset {dataset}, split {split}", 0
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=True)
        if known := [column for column in data.column_names or () if column in columns]:
            data = data.select_columns(known)
        for number, row in enumerate(data, 1):
            yield f"{where}, row {number}", row
    except Exception as error:  # offline, no such data set or split, a torn file: each has one of its own
        raise BadInput(f"{where}: cannot be read after row {number} ({first_line(error)})") from error


def set_template(tokenizer, args):
    """Give the tokenizer --chat-template, and try whatever it has. Raises BadInput."""
    where = f"--chat-template {args.chat_template}" if args.chat_template else f"--model {args.model}"
    try:
        if args.chat_template:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        prompt_tokens([dict(role="user", content="hello")], tokenizer)
    except Exception as error:  # no such file, no text, or whatever a program in it raises
        raise BadInput(f"{where}: expected a text with a chat template ({first_line(error)})") from error
    if args.messages_key and not (tokenizer.chat_template and tokenizer.is_fast):
        raise BadInput(f"--messages-key {args.messages_key}: expected a model with a chat template (or "
                       f"--chat-template) and with a fast tokenizer, which {args.model} has not")


def plain_text(content, where):
    """The text of a content: a text, null, or a list of text blocks."""
    blocks = [] if content is None else content if isinstance(content, list) else [content]
    texts = []
    for block in blocks:
        is_text = isinstance(block, dict) and (block.get("type") or "text") == "text"
        texts.append(block.get("text") if is_text else block)
        if not isinstance(texts[-1], str):
            raise BadRow(f"{where}: expected a text, text blocks or null, got {reprlib.repr(block)}")
    # Half of a UTF-16 pair, which JSON can spell, has no UTF-8 and would stop the tokenizer.
    return re.sub("[\ud800-\udfff]", "\ufffd", "\n".join(texts))


def to_messages(value, where):
    """A list of chat messages (or its JSON), checked, each content a plain text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not value:
        raise BadRow(f"{where}: expected a list of messages, got {reprlib.repr(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"{where}, message {number}: expected a role and a content, "
                         f"got {reprlib.repr(message)}")
        content = plain_text(message.get("content"), f"{where}, message {number}")
        others = {key: item for key, item in message.items() if item is not None}  # parquet fills with nulls
        messages.append(others | {"content": content})
    return messages


def encode_row(row, tokenizer, args, eos):
    """-> (ids, mask), not cut yet.  Raises BadRow."""
    if isinstance(row, BadRow):
        raise row
    for column in (args.messages_key,) if args.messages_key else (args.prompt_key, args.response_key):
        if not isinstance(row, dict) or column not in row:
            raise BadRow(f"column {column}: missing in {reprlib.repr(row)}")
    try:
        if args.messages_key:
            messages = to_messages(row[args.messages_key], f"column {args.messages_key}")
            return encode_conversation(messages, tokenizer, eos)
        prompt = row[args.prompt_key]
        messages = to_messages([dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt,
                               f"column {args.prompt_key}")
        return encode(messages, plain_text(row[args.response_key], f"column {args.response_key}"), tokenizer)
    except (BadRow, BadInput):
        raise
    except Exception as error:  # a template is a program
        raise BadRow(f"the chat template refuses it ({first_line(error)})") from error


def prompt_tokens(messages, tokenizer):
    """The ids of the messages and of what the template puts before a reply."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "".join(message["content"] for message in messages)
    return tokenizer(text, add_special_tokens=False).input_ids


def encode(messages, response, tokenizer):
    """-> (ids, mask): mask is 1 on the response and its eos; on nothing if the response is blank."""
    prompt, learned = prompt_tokens(messages, tokenizer), int(bool(response.strip()))
    ids = tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    return prompt + ids, [0] * len(prompt) + [learned] * len(ids)


def encode_conversation(messages, tokenizer, eos):
    """-> (ids, mask): mask is 1 on the text of each assistant turn and the eos that ends it."""
    tagged = bool(re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()))
    text, spans = assistant_spans(messages, tokenizer, tagged)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets, mask = coded.input_ids, coded.offset_mapping, [0] * len(coded.input_ids)
    starts = [start for start, _ in offsets]
    for start, end in spans:
        first, last = bisect.bisect_left(starts, start), bisect.bisect_left(starts, end)
        while first < last and offsets[first][1] <= start:
            first += 1  # the space before the turn, where offsets leave spaces out
        while not tagged and first < last and ids[last - 1] not in eos:
            last -= 1  # what the template writes after the turn's eos, a line break mostly
        if not any(token in eos for token in ids[first:last]):
            raise BadInput("the chat template ends an assistant turn without an eos token, so no reply would "
                           "ever end; expected another --chat-template")
        mask[first:last] = [1] * (last - first)
    return ids, mask


def assistant_spans(messages, tokenizer, tagged):
    """-> the whole text; where in it the assistant's turns are that are not blank, [(start, end)].

    Tags of a template ({% generation %}) say it. Else a turn is what the template adds to the messages before
    it and to the start of a reply: its text, its eos and what follows that. A template that does not only
    append is refused. (apply_chat_template has a mask of its own, but it errs where a turn's first or last
    character has no token to itself.)
    """
    def render(count, **options):
        texts, spans = render_jinja_template([messages[:count]], chat_template=tokenizer.get_chat_template(),
                                             **options, **tokenizer.special_tokens_map)
        return (texts[0], spans[0]) if tagged else texts[0]

    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spoken = [bool(messages[turn]["content"].strip() or messages[turn].get("tool_calls")) for turn in turns]
    if tagged:
        text, spans = render(len(messages), return_assistant_tokens_mask=True)
        known = len(spans) == len(turns)  # else which is whose cannot be told, and all are learned
        return text, [span for span, said in zip(spans, spoken, strict=True) if said] if known else spans
    text, spans = render(len(messages)), []
    for turn, said in zip(turns, spoken, strict=True):
        if said:
            before, after = render(turn, add_generation_prompt=True), render(turn + 1)
            if not after.startswith(before) or not text.startswith(after):
                raise BadInput(
                    f"the chat template writes message {turn + 1} otherwise when others follow or a reply "
                    "begins, so its tokens cannot be told; expected a --chat-template that only appends, or "
                    "one with {% generation %} tags, or rows of prompt and response")
            spans.append((len(before), len(after)))
    return text, spans


def cut(ids, mask, args):
    """Truncation to --max-length.  -> (ids, mask); nothing may be left in the mask."""
    if len(ids) > args.max_length:
        if args.truncation == "error":
            raise BadRow(f"--max-length {args.max_length}: a row has {len(ids)} tokens")
        kept = slice(-args.max_length, None) if args.truncation == "left" else slice(args.max_length)
        ids, mask = ids[kept], mask[kept]
    return ids, [0, *mask[1:]]  # nothing predicts the first token


def encode_rows(rows, path, tokenizer, args, eos, continued):
    """Rows to tokens, once, into an Arrow file that is read as it is needed.  -> data set, counts.

    Memory holds a few rows, whatever there are. A continued run finds its file.
    """
    temporary, summary = path.with_name(f".{path.name}.writing"), path.with_suffix(".json")
    if not (continued and path.exists() and summary.exists()):
        path.parent.mkdir(exist_ok=True)
        counts = dict(truncated=0, dropped=0, bad=0)
        features = datasets.Features(ids=datasets.List(datasets.Value("int32")),
                                     mask=datasets.List(datasets.Value("bool")))
        with ArrowWriter(path=str(temporary), features=features, writer_batch_size=16) as writer:
            for where, row in tqdm(rows, desc=f"{path.stem} rows to tokens", unit="row", disable=None):
                try:
                    whole = encode_row(row, tokenizer, args, eos)
                    ids, mask = cut(*whole, args)
                except BadRow as error:
                    what = f"{where}, {error}".encode(errors="replace").decode()  # half a character, maybe
                    if args.on_bad_row == "error":
                        raise BadInput(what) from error
                    if counts["bad"] < 5:
                        tqdm.write(f"left out: {what}")
                    counts["bad"] += error.rows
                    continue
                except BadInput as error:
                    raise BadInput(f"{where}: {error}") from error
                counts["truncated"] += len(ids) < len(whole[0])
                if any(mask):
                    writer.write(dict(ids=ids, mask=mask))
                else:
                    counts["dropped"] += 1
            writer.finalize()
        flush_to_disk(temporary)
        replace_file(summary, json.dumps(counts).encode())
        temporary.replace(path)
    return datasets.Dataset.from_file(str(path)), json.loads(summary.read_text())


def examples_of_rows(args, tokenizer, eos, run):
    """Rows of data.  -> a function: index -> [(ids, mask)], how many, the held-out ones, counts."""
    counts = collections.Counter()

    def read(side, files, split, limit=None):
        columns = (args.messages_key,) if args.messages_key else (args.prompt_key, args.response_key)
        rows = (hub_rows(args.dataset, split, columns) if args.dataset else
                file_rows(f"--{side}-files", files, columns))
        path = run.dir / "data" / f"{side}.arrow"
        for writes in (True, False):  # the first process does, then the others find the file
            if writes == (rank() == 0):
                continued = run.state or not writes
                data, more = encode_rows(itertools.islice(rows, limit), path, tokenizer, args, eos, continued)
            together(lambda: None)
        counts.update(more)
        return lambda index: tuple(data[int(index)].values()), len(data)

    row, num_rows = read("train", args.train_files, args.train_split, args.max_rows or None)
    given = bool(args.val_files or args.val_split)
    expected = "1 row" if given or not args.val_ratio else "2 rows, one of them to hold out"
    if num_rows < int(expected[0]):
        raise BadInput(f"{args.dataset or ' '.join(args.train_files)}: expected at least {expected}, got "
                       f"{num_rows} and {dict(counts)}")
    if given:
        val_row, num_val = read("val", args.val_files, args.val_split)
        held_out = [val_row(i) for i in range(min(num_val, args.eval_tasks))]
        return lambda index: [row(index)], num_rows, held_out, counts
    order = permutation(args.seed, num_rows)
    num_val = min(max(1, round(args.val_ratio * num_rows)), num_rows - 1) if args.val_ratio else 0
    kept, held_out = order[num_val:], [row(index) for index in order[:num_val][:args.eval_tasks]]
    return lambda index: [row(kept[index])], len(kept), held_out, counts


def encode_demonstration(messages, num_prompt, tokenizer, args):
    """A conversation after `num_prompt` messages -> [(ids, mask)], each reply learned once.

    One row, if it fits --max-length. Else a turn that does not fit begins a row without the oldest turns, as
    a rollout does that outgrows --max-context-tokens: the policy will read what it has learned to read.
    """
    turns = [k for k in range(num_prompt, len(messages)) if messages[k]["role"] == "assistant"]
    rows, ids, mask, start = [], [], [], 0
    for number, turn in enumerate(turns):
        def encoded(start, turn=turn):
            history = messages[:num_prompt] + messages[turns[start]:turn]
            return encode(history, messages[turn]["content"], tokenizer)

        longer, learned = encoded(start)
        if number and len(longer) <= args.max_length and longer[:len(ids)] == ids:
            ids, mask = longer, mask + learned[len(ids):]
            rows[-1] = ids, mask
            continue
        while len(longer) > args.max_length and start + 1 < number:
            start += 1
            longer, learned = encoded(start)
        ids, mask = longer, learned
        rows.append((ids, mask))
    return rows


def examples_of_env(env, args, tokenizer):
    """Demonstrations.  -> a function: index -> rows (ids, mask), how many, the held-out ones, counts."""
    def example(index, split="train"):
        task = env.task(split, index)
        messages = env.demonstration(task)
        if messages is None:
            raise BadInput(f"--env {args.env}: task {task.id} has no reference solution to learn from")
        rows = []
        for ids, mask in encode_demonstration(messages, len(task.messages), tokenizer, args):
            try:
                rows.append(cut(ids, mask, args))
            except BadRow as error:
                raise BadInput(f"{error}: {messages[-1]['content'][:60]!r}") from error
            if not any(rows[-1][1]):
                raise BadInput(f"--max-length {args.max_length}: nothing is left of "
                               f"{messages[-1]['content'][:60]!r}")
        return rows

    num_held_out = min(args.eval_tasks, env.num_tasks("test"))
    held_out = [row for index in range(num_held_out) for row in example(index, "test")]
    return example, env.num_tasks("train"), held_out, dict(truncated=0, dropped=0, bad=0)


SKIPPING_KERNELS = ("flash_attention_2", "flex_attention")


def pack(rows, size):
    """First-fit decreasing into rows of at most `size` tokens; 0: one each.  -> [(ids, mask, positions)]"""
    packed = []
    for ids, mask in sorted(rows, key=lambda row: -len(row[0])):
        fit = next((p for p in packed if len(p[0]) + len(ids) <= size), None) if size else None
        if fit is None:
            packed.append(fit := ([], [], []))
        for whole, part in zip(fit, (ids, mask, range(len(ids))), strict=True):
            whole.extend(part)
    return sorted(packed, key=lambda row: -len(row[0]))


def batches(rows, args, pad_id, model):
    """Encoded rows -> passes of at most --microbatch-tokens, the longest rows first.

    A pass ends early rather than be more than a quarter padding. Packed rows are short for kernels that
    compute the whole square and mask it; those that skip what lies between rows get one long row a pass.
    """
    budget = args.microbatch_tokens
    long = args.packing and model.config._attn_implementation in SKIPPING_KERNELS
    size = 0 if not args.packing else budget if long else max(128, max(len(ids) for ids, _ in rows))
    rows = pack(rows, size)
    while rows:
        longest, count, real = len(rows[0][0]), 0, 0
        for ids, *_ in rows[:1 if long else max(1, budget // len(rows[0][0]))]:
            count, real = count + 1, real + len(ids)
            if real < 0.75 * longest * count:
                count -= 1
                break
        part, rows = rows[:count], rows[count:]
        ids, mask, positions = zip(*part, strict=True)
        yield dict(tokens=pad(ids, pad_id, model.device), response_mask=pad(mask, 0, model.device),
                   position_ids=pad(positions, 0, model.device) if args.packing else None)


def my_batches(rows, args, pad_id, model):
    """`batches` of this process's share of the rows, which is even by tokens.

    All processes take part in every pass (FSDP2 gathers weights): one that has fewer adds some that learn
    nothing.
    """
    if not UNDER_TORCHRUN:
        return list(batches(rows, args, pad_id, model))
    mine = [rows[index] for index in deal([len(ids) for ids, _ in rows])[rank()]]
    mine, (filler, *_) = list(batches(mine, args, pad_id, model)), batches(rows[:1], args, pad_id, model)
    filler["response_mask"].zero_()
    return mine + [filler] * (max(together(lambda: len(mine))) - len(mine))


def count_targets(rows):
    return sum(sum(mask) for _, mask in rows)


# Evaluate


@torch.no_grad()
def evaluate(model, tokenizer, env, held_out, args):
    """Loss on held-out rows; with a single-turn environment, accuracy on its test tasks too.  -> metrics."""
    device, metrics = model.device, {}
    if held_out:
        loss = torch.zeros((), dtype=torch.float64, device=device)
        with precision(args, device):
            for batch in my_batches(held_out, args, tokenizer.pad_token_id, model):
                loss += response_loss(model, batch)
        metrics["val/loss"] = float(total(loss)) / count_targets(held_out)
    if env is None or env.multi_turn:
        return metrics
    num_tasks = min(args.eval_tasks, env.num_tasks("test"))
    tasks = [env.task("test", index) for index in share(num_tasks)]
    prompts = [prompt_tokens(task.messages, tokenizer) for task in tasks]
    gather_weights(model, whole=True)
    scores, ends = {}, eos_ids(model, tokenizer)
    for name, samples, temperature in (("sampled", args.eval_samples, 1.0), ("greedy", 1, 0.0)):
        places = [(index, number) for index in range(len(tasks)) for number in range(samples)]
        # The same draws at every evaluation.
        seeds = [seed_of(f"{args.seed} val {share(num_tasks)[index]} {number}") for index, number in places]

        def score(places=places, seeds=seeds, temperature=temperature):
            with precision(args, device):
                replies = generate(model, [prompts[index] for index, _ in places], args.max_response_tokens,
                                   temperature, tokenizer, seeds) if places else []
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in replies]
            return [ids[-1] in ends and env.start(tasks[index], args.seed).step(text).info["correct"]
                    for (index, _), (ids, _), text in zip(places, replies, texts, strict=True)]

        correct = [value for part in together(score) for value in part]
        scores[name] = np.array(correct, dtype=float).reshape(num_tasks, samples)
    gather_weights(model, whole=False)
    tasks = [task for part in together(lambda: tasks) for task in part]
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
                  "print_samples", "track", "max_concurrent", "env_threads", "health_every",
                  "check_sync", "dist_timeout"}  # and vLLM's flags
    TIMES = ("rollout", "update", "sync", "eval", "checkpoint")

    def __init__(self, args, meta):
        self.args, self.meta, self.state, self.checkpoint = args, together(lambda: meta)[0], None, None
        meta = self.meta
        self.dir = Path(args.run_dir or Path("runs", args.experiment, meta["run_id"]))
        try:
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.dir / "train_log.jsonl").open("ab").close()
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: not a folder that can be written to ({error})") from error
        self.find_checkpoint()
        if (self.dir / "train_log.jsonl").stat().st_size:
            self.check_same_run()
        if len(seen := set(together(lambda: self.checkpoint))) > 1:
            raise BadInput(f"--run-dir {self.dir}: expected one folder for all processes; they see {seen}")
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
        """In the first process: write the meta line; or cut the log to the checkpoint and mark the place."""
        self.log = self.writer = None
        if rank():
            return
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
        values["system/processes"] = num_ranks()
        values["system/memory_usage"] = psutil.Process().memory_info().rss / 2**30
        values["system/cpu_utilization"] = (processor - self.since[1]) / seconds
        if torch.cuda.is_available():
            values["system/gpu_memory"] = torch.cuda.max_memory_allocated() / 2**30
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value}")
            if self.writer:
                self.writer.add_scalar(name, value, self.counters["iteration"])
        self.write(dict(run_id=self.meta["run_id"], trace_id=self.trace_id) | self.counters | values)
        self.times, self.since = {}, (wall, processor, env_steps)

    def write(self, line):
        if self.log:
            self.log.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self.log.flush()

    def close(self):
        if self.writer:
            self.writer.close()

    def save(self, model, tokenizer, state):
        """checkpoints/step_<iteration>, complete or not at all; then drop the oldest.

        Under torchrun the first process writes it, with the weights of all.
        """
        weights = whole_weights(model)
        if rank():
            return
        folder = self.dir / "checkpoints" / f"step_{self.counters['iteration']:06d}"
        temporary = folder.with_name(f".{folder.name}.writing")
        elapsed = time.perf_counter() - self.started
        state = state | self.counters | dict(elapsed=elapsed, log_bytes=self.log.tell())
        try:
            os.fsync(self.log.fileno())
            shutil.rmtree(temporary, ignore_errors=True)
            model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
            torch.save(state, temporary / "trainer_state.pt")
            manifest = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                flush_to_disk(path)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            flush_to_disk(folder.parent)
            names = {"last": folder.name} | {name: state[name] for name in ("best",) if state.get(name)}
            replace_file(folder.parent / "state.json", json.dumps(names).encode())
        except Exception as error:  # a full disk: each library has an exception of its own for it
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"{folder} could not be written ({error}); earlier checkpoints stay") from error
        if self.args.keep_checkpoints:
            # A later one is a damaged one that this run fell back from; it must not count as the newest.
            complete = sorted(path for path in folder.parent.glob("step_*") if path.name <= folder.name)
            for old in complete[:-self.args.keep_checkpoints]:
                if old.name != state.get("best"):
                    shutil.rmtree(old)

    def fail(self, error, evidence):
        """Leave a receipt with what is needed to look into the failure, and end with a non-zero exit."""
        if not Peers.tell():
            raise SystemExit(f"rank {rank()}: ended, because another process failed")
        if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            lost = ConnectionError(f"another process is gone or does not answer: {first_line(error)}")
            lost.__cause__, error = error, lost
        if rank():
            self.log = (self.dir / "train_log.jsonl").open("ab")
        what = dict(type=type(error).__name__, message=str(error), rank=rank())
        folder = self.dir / "receipts" / self.trace_id
        receipt = self.meta | self.counters | what | dict(traceback=traceback.format_exception(error))
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "receipt.json").write_text(json.dumps(receipt, indent=1))
            (folder / "evidence.json").write_text(json.dumps(evidence, indent=1))
            self.write({"trace_id": self.trace_id, "error": what | dict(receipt=f"receipts/{folder.name}")})
        if not isinstance(error, (FloatingPointError, KeyboardInterrupt, OSError, BadInput)):
            raise error
        raise SystemExit(f"error: {what['type']}: {error} (rank {rank()}; receipt: {folder})")


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

{kind} of {parameters:,} parameters. {steps:,} steps of supervised fine-tuning on `{data}`,

    {command}

at commit {commit}, seed {seed}, torch {torch}, transformers {transformers}. At its end (val: held out):

| metric | value |
|---|---|
{table}

    model = {loader}.from_pretrained("{folder}")
    tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def export(model, tokenizer, run, args):
    """Write the finished model or adapter with its card; what was there becomes <name>.previous."""
    weights = whole_weights(model)
    if rank():
        return
    folder = Path(args.output_dir or run.dir / "model")
    if args.output_dir == Args.output_dir:
        folder = Path(__file__).parent / folder
    lines = [json.loads(line) for line in (run.dir / "train_log.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val/loss" in line or "train/loss" in line][-1]
    measured = {name: value for name, value in last.items() if name.startswith(("val/", "train/loss"))}
    kind, loader = "A causal language model", "AutoModelForCausalLM"
    if args.lora:
        kind, loader = f"A LoRA adapter for `{args.model}`", "AutoPeftModelForCausalLM"
    temporary = folder.with_name(f".{folder.name}.writing")
    previous = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(MODEL_CARD.format(
        name=folder.name, kind=kind, loader=loader, steps=run.counters["iteration"], seed=args.seed,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        data=" ".join(args.train_files) or args.dataset or " ".join((args.env, *args.env_options)),
        commit=(run.meta["git_sha"] or "unknown")[:12],
        command=" ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]), folder=folder,
        torch=torch.__version__, transformers=transformers.__version__,
        table="\n".join(f"| {name} | {value:.3f} |" for name, value in measured.items())))
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    temporary.rename(folder)
    print(f"wrote {folder}")


# Main: set-up, then the loop


def task_index(cursor, seed, num_tasks):
    """The cursor-th task of training: a new permutation of all tasks in each epoch."""
    epoch, offset = divmod(cursor, num_tasks)
    return int(permutation(seed * 1_000_003 + epoch, num_tasks)[offset])


@functools.lru_cache(2)
def permutation(seed, size):
    return np.random.default_rng(seed).permutation(size)


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
    Preempted.listen()
    device = start_processes(args)
    if not args.steps and not (args.from_rows and args.epochs):
        raise BadInput("--steps 0: expected --steps, or --train-files or --dataset and --epochs (an "
                       "environment has fresh rows at every step)")
    env = None if args.from_rows else envs.make(args.env, **envs.parse_options(args.env_options))
    tokenizer = load_tokenizer(args.model) if args.model else new_tokenizer(getattr(env, "vocabulary", None))
    set_template(tokenizer, args)
    data_hash = data_sha256(args)
    frozen = args.lora and args.dtype == "bfloat16"
    base = (load_weights(args.model, torch.bfloat16 if frozen else torch.float32) if args.model
            else new_model(args, tokenizer))
    model_hash = weights_sha256(base)
    if args.lora_adapter_path:
        model_hash = sha256(model_hash + adapter_sha256(args.lora_adapter_path))
    run = Run(args, describe_run(args, "sft", model_hash, data_hash))
    if args.from_rows:
        example, num_rows, held_out, counts = examples_of_rows(args, tokenizer, eos_ids(base, tokenizer), run)
    else:
        example, num_rows, held_out, counts = examples_of_env(env, args, tokenizer)
    num_steps = args.steps or math.ceil(args.epochs * num_rows / args.batch_size - 1e-9)
    if args.lora:
        torch.manual_seed(args.seed)
        model = add_lora(base, args, run.checkpoint)
    else:
        model = load_weights(run.checkpoint) if run.checkpoint else base
    model = shard(model, device)
    set_up_passes(model, args)
    if args.packing:
        check_packing(model, args)
    groups = parameter_groups(model, args.weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, args.beta2), fused=True)
    best = dict(best="", best_loss=math.inf)  # checkpoint with the lowest val/loss
    window, unlogged, rows = [], {}, []  # loss and norm of the steps since the last record; a record to come
    if run.state:
        load_optimizer(optimizer, run.state["optimizer"])
        best = {name: run.state[name] for name in best}
        window, unlogged = run.state["window"], run.state["unlogged"]
    start_tracking(run, args)
    run.open()
    left_out = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    say(f"{run.dir}\n{args.batch_size} rows a step in passes of {args.microbatch_tokens} tokens; "
          f"{sum(p.numel() for p in parameters):,} trained weights on {device}; {num_rows:,} rows, "
          f"{len(held_out)} held out{', ' * bool(left_out)}{left_out}; {num_steps:,} steps"
          + (f"; continuing after step {run.counters['iteration']}" if run.state else ""))
    progress = tqdm(total=num_steps, initial=run.counters["iteration"], disable=bool(rank()) or None,
                    unit="step")
    saved = run.counters["iteration"]

    def validate():
        with run.timed("eval"):
            metrics = evaluate(model, tokenizer, env, held_out, args)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        say(f"step {run.counters['iteration']}: {shown}")
        return metrics

    def save():
        nonlocal saved
        with run.timed("checkpoint"):
            state = dict(optimizer=optimizer_state(optimizer), window=window, unlogged=unlogged, **best)
            run.save(model, tokenizer, state)
        saved = run.counters["iteration"]

    def evaluating(step):
        before, now = (step - 1) * args.batch_size, step * args.batch_size
        period = args.eval_epochs * num_rows
        return (step == num_steps or args.eval_every and step % args.eval_every == 0
                or period and now // period > before // period)

    def finish(step):
        nonlocal best
        saving = step == num_steps or step % args.checkpoint_every == 0
        if evaluating(step):
            unlogged.update(validate())
            if unlogged.get("val/loss", math.inf) < best["best_loss"]:
                best = dict(best=f"step_{step:06d}", best_loss=unlogged["val/loss"])
                saving = True
        if unlogged:
            run.record(unlogged)
            unlogged.clear()
        if saving:
            save()

    try:
        if not run.state:
            sizes = {"data/rows": num_rows, "data/held_out": len(held_out)}
            run.record(validate() | sizes | {f"data/{name}": count for name, count in counts.items()})
        if unlogged:  # the run ended while it was evaluated
            finish(run.counters["iteration"])
        for step in range(run.counters["iteration"] + 1, num_steps + 1):
            torch.manual_seed(args.seed * 1_000_003 + step)  # a resume needs no generator's state
            with run.timed("update"):
                # 1. Batch: the next rows of this epoch's permutation.
                first, end = (step - 1) * args.batch_size, step * args.batch_size
                mine = [task_index(first + i, args.seed, num_rows) for i in share(args.batch_size)]
                parts = together(lambda mine=mine: [row for i in mine for row in example(i)], at_once=True)
                rows = [row for part in parts for row in part]

                # 2. Gradient: sums over passes, divided by the response tokens of the whole batch.
                loss, num_targets, num_computed = 0.0, count_targets(rows), 0
                for batch in my_batches(rows, args, tokenizer.pad_token_id, model):
                    with precision(args, device):
                        part = response_loss(model, batch) / num_targets
                    part.backward()
                    loss += part.detach()
                    num_computed += batch["tokens"].numel()
                loss = total(loss)
                norm = plain(torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm))
                if not torch.isfinite(loss + norm):
                    raise FloatingPointError(f"loss {float(loss)}, gradient norm {float(norm)}")

                # 3. Step.
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, num_steps, args)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            window.append(torch.stack([loss, norm]))

            # 4. Log, evaluate, checkpoint.
            num_tokens = sum(len(ids) for ids, _ in rows)
            run.counters = dict(iteration=step, opt_steps=step,
                                env_steps=run.counters["env_steps"] + num_tokens)
            progress.update()
            if evaluating(step) or step % args.log_every == 0:
                mean_loss, mean_norm = torch.stack(window).double().mean(0).tolist()
                weight_norm = plain(torch.nn.utils.get_total_norm(parameters))  # the log refuses NaN
                num_computed = int(total(torch.tensor(num_computed, device=device)))
                unlogged.update({
                    "train/loss": mean_loss, "train/grad_norm": mean_norm, "train/global_step": step,
                    "train/weight_norm": float(weight_norm),
                    "train/learning_rate": learning_rate(step, num_steps, args),
                    "train/epoch": end / num_rows, "train/padding": 1 - num_tokens / num_computed,
                    "train/throughput": (run.counters["env_steps"] - run.since[2]) / run.times["update"]})
                window = []
                progress.set_postfix(loss=f"{mean_loss:.3f}", grad=f"{mean_norm:.2f}", refresh=False)
                if progress.disable:
                    say(f"{step}/{num_steps} loss {mean_loss:.3f} grad {mean_norm:.2f}")
            finish(step)
        export(model, tokenizer, run, args)
    except Preempted:
        step = run.counters["iteration"]
        if saved < step:
            save()
        say(f"SIGTERM: stopped after step {step}, which is saved; to go on, give the same command with "
            f"--run-dir {run.dir}" if step else "SIGTERM: stopped in the first step")
    except (Exception, KeyboardInterrupt) as error:
        run.fail(error, [tokenizer.decode(ids) for ids, _ in rows[:64]])
    finally:
        progress.close()
        run.close()
        Preempted.forget()
    end_processes()


def default_args(words):
    """The defaults of a command line: with --model those of REAL_MODEL, else the small model's."""
    real = any(word == "--model" or word.startswith("--model=") for word in words)
    return Args(**REAL_MODEL) if real else Args()


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, default=default_args(sys.argv)))
    except BadInput as problem:
        sys.exit(f"error: {problem}" if Peers.tell() else 1)
