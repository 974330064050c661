"""GRPO and its critic-free relatives: policy gradients for language models with verifiable rewards.

For each prompt, `group_size` responses are sampled; a response's advantage is its reward against its group's:

    A_i = r_i - mean(r_1..r_G)            [/ (std + 1e-6) with --scale-rewards]    GRPO, arXiv:2402.03300
    L   = - mean_t min(ratio A, clip(ratio, 1 - low, 1 + high) A)                  PPO, arXiv:1707.06347 eq. 7

Where the defaults differ from the GRPO paper: no division by the standard deviation (Dr. GRPO,
arXiv:2503.20783), a mean over all tokens of the batch and an asymmetric clip (DAPO, arXiv:2503.14476), groups
whose rewards are all equal are dropped, no KL penalty, a small entropy bonus.

    python grpo_llm.py                               # Countdown on a laptop CPU, offline, about a minute
    python grpo_llm.py --iterations 0                # evaluate the model and end
    python grpo_llm.py --model Qwen/Qwen2.5-1.5B-Instruct --engine vllm --dtype bfloat16 --lora-rank 16 \
        --env-kwargs style=r1 max_operands=4 max_number=100 max_target=1000 operators=+-*/ \
        --max-response-tokens 1024 --learning-rate 1e-5 --entropy-coef 0

Expect greedy accuracy on held-out problems to climb from 0.61 to 0.99 and pass@1 at temperature 1 from 0.31
to 0.98, while pass@16 ends at 0.99 or more. With --run-dir DIR the same command continues a stopped run.

The algorithm is `group_advantages` to `token_logprobs`, the section Update and `main`: read these 500 lines
first. Processes (torchrun), Engine (sampling), Rollout (environments of several turns) and Log (the run
folder) serve any algorithm; ppo_llm.py has the same.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import peft
import psutil
import requests
import torch
import torch.distributed as dist
import transformers
import tyro
from dotenv import load_dotenv
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

import envs
from envs import BadInput


@dataclasses.dataclass(frozen=True)
class Args:
    # Task
    env: str = "countdown"
    """environment: a name known to envs.make, path/to/file.py:Class, or several with commas and weights"""
    env_kwargs: tuple[str, ...] = ()
    """its options, as key=value; of several environments, as name.key=value"""
    reward_fn: str = ""
    """path/to/file.py:name of a function to use in place of episode_reward"""
    # Model
    model: str = "models/countdown-tiny"
    """folder or hub id of the causal language model to start from"""
    chat_template: Literal["model", "plain"] = "model"
    """the tokenizer's chat template, or the bare text of the messages (base models)"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """arithmetic of the forward and backward pass; trained weights and AdamW's moments stay float32"""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1"""
    threads: int = 1
    """CPU threads of torch [threads]; the small default model gains nothing from more"""
    dist_timeout: float = 1800.0
    """longest wait for another process, under torchrun [s]"""
    lora_rank: int = 0
    """rank of the LoRA adapter; 0 trains all weights"""
    lora_alpha: int = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank"""
    lora_target_modules: str = "all-linear"
    """modules to adapt: all-linear, or names with commas"""
    lora_exclude_modules: str = "lm_head,embed_tokens"
    """modules never to adapt, names with commas"""
    lora_adapter_path: str = ""
    """folder of a PEFT adapter to go on from; its own configuration then replaces the four flags above"""
    # Engine
    engine: Literal["hf", "vllm"] = "hf"
    """sampler: hf samples with the trained weights themselves; vllm has its own, handed over each time"""
    vllm_url: tuple[str, ...] = ()
    """servers to ask, such as http://127.0.0.1:8000, in place of vLLM in this process"""
    vllm_gpu_memory: float = 0.4
    """share of the GPU's memory that vLLM in this process takes for its weights and cache"""
    vllm_cpu_cache: float = 0.25
    """vLLM's cache where there is no GPU [GiB]"""
    vllm_max_seqs: int = 256
    """replies that vLLM samples at once"""
    vllm_sleep: bool = True
    """on a GPU, vLLM in this process gives its memory back during the update"""
    vllm_timeout: float = 600.0
    """longest wait for a server's answer [s]"""
    vllm_retries: int = 6
    """tries again, after 1, 2, 4, ... s, when a server is away or fails"""
    check_sync: bool = False
    """compare sampler and trainer after every hand-over of weights, not only after the first two"""
    # The three sizes
    prompts_per_iteration: int = 64
    """different prompts in an iteration"""
    group_size: int = 8
    """responses sampled per prompt; the group is the baseline, so at least 2"""
    microbatch_tokens: int = 4096
    """response tokens per forward/backward pass [tokens]; changes memory and speed, never the gradient"""
    # Rollout
    max_response_tokens: int = 16
    """longest reply in one turn, eos included [tokens]"""
    max_context_tokens: int = 4096
    """longest prompt and response together; a longer history is cut and starts a new segment [tokens]"""
    temperature: float = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    dynamic_sampling: int = 0
    """extra rounds of prompts, at most, drawn until enough groups carry a signal (DAPO)"""
    max_concurrent: int = 0
    """episodes in play at once, their sub-agents not counted; 0: all"""
    env_threads: int = 8
    """threads that call environments"""
    max_turns: int = 0
    """replies after which an episode ends; 0: the environment's own limit"""
    episode_timeout: float = 0.0
    """longest time that an episode may be in play; 0: any [s]"""
    episode_retries: int = 2
    """times that an episode whose environment fails is played again from its start"""
    train_sub_agents: bool = False
    """train an episode's sub-agents too, on what it is worth"""
    # Optimisation
    seed: int = 1
    """of everything random"""
    iterations: int = 500
    """rollouts, each followed by its updates; 0 evaluates the model and ends"""
    epochs: int = 1
    """passes over an iteration's responses"""
    minibatches: int = 1
    """optimiser steps per epoch"""
    learning_rate: float = 5e-4
    """peak learning rate of AdamW"""
    warmup_iterations: int = 10
    """linear warm-up [iterations]"""
    final_learning_rate: float = 0.1
    """share of the peak that the linear decay ends at; 1 keeps it constant"""
    beta2: float = 0.95
    """AdamW's second decay rate (the first is 0.9)"""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradient clipping, by global norm"""
    # Loss
    baseline: Literal["mean", "loo"] = "mean"
    """the group's mean, or the mean of the others (RLOO, arXiv:2402.14740)"""
    scale_rewards: bool = False
    """divide advantages by the group's standard deviation (GRPO; without it: Dr. GRPO)"""
    advantage_balance: float = 0.0
    """b > 0 multiplies negative advantages by 1 - b, b < 0 positive ones by 1 + b; in [-1, 1]"""
    loss: Literal["clip", "cispo", "gspo"] = "clip"
    """PPO's clipped ratio; CISPO (arXiv:2506.13585); GSPO's sequence ratio (arXiv:2507.18071)"""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """mean over tokens; over sequences of their token means; sum over sequences x longest reply (Dr. GRPO)"""
    clip_low: float = 0.2
    """the ratio is clipped at 1 - this"""
    clip_high: float = 0.28
    """the ratio is clipped at 1 + this"""
    kl_coef: float = 0.0
    """weight of the k3 penalty towards the starting model; 0 loads no reference"""
    entropy_coef: float = 0.02
    """weight of the entropy bonus [1/nats]"""
    tis_cap: float = 2.0
    """cap of the importance weight between sampler and trainer; 0 turns the correction off"""
    mask_truncated: bool = False
    """leave responses cut by a length limit out of the loss"""
    # Evaluation
    eval_every: int = 50
    """iterations between evaluations [iterations]; 0: only before and after"""
    eval_tasks: int = 512
    """held-out tasks, always the same ones"""
    eval_samples: int = 16
    """responses per task, for pass@1 and pass@n"""
    eval_temperature: float = 1.0
    """sampling temperature of pass@1 and pass@n; greedy decoding is measured beside it"""
    # Log
    experiment: str = "grpo"
    """runs/<experiment>/ holds the run"""
    run_dir: str = ""
    """the run's folder; one that holds a checkpoint is continued (default: a new one)"""
    checkpoint_every: int = 50
    """iterations between checkpoints [iterations]"""
    keep_checkpoints: int = 2
    """newest checkpoints to keep; 0: all"""
    log_episodes: float = 0.001
    """share of the episodes written to episodes/"""
    print_samples: int = 0
    """sample episodes to print at each rollout and evaluation"""
    val_table_samples: int = 10
    """rows of the validation table"""
    track: bool = False
    """mirror the TensorBoard log to Weights & Biases"""
    health_every: float = 60.0
    """time between two looks at child processes and temporary space; 0: none [s]"""

    def __post_init__(self):
        for name, value in vars(self).items():
            low = LOWEST.get(name, 0)
            if isinstance(value, (int, float)) and not low <= value < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected {low} or more")
            if name in SHARES and value > 1:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected at most 1")
            if name in POSITIVE and value == 0:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected more than 0")
        if self.minibatches > self.prompts_per_iteration:
            raise BadInput(f"--minibatches {self.minibatches}: a minibatch holds whole groups, so at most "
                           f"--prompts-per-iteration {self.prompts_per_iteration}")
        if self.max_context_tokens <= self.max_response_tokens:
            raise BadInput(f"--max-context-tokens {self.max_context_tokens}: expected more than "
                           f"--max-response-tokens {self.max_response_tokens}")
        if self.lora_rank and self.lora_adapter_path:
            raise BadInput(f"--lora-rank {self.lora_rank}: the adapter of --lora-adapter-path brings its own")
        if self.vllm_url and self.engine != "vllm":
            raise BadInput(f"--vllm-url {self.vllm_url[0]}: needs --engine vllm")
        for url in self.vllm_url:
            if not re.fullmatch(r"https?://[^/\s]+", url):
                raise BadInput(f"--vllm-url {url}: expected the form http://host:port")

    @property
    def on_policy(self) -> bool:
        """One update per rollout: the policy that sampled is the one that is trained, and the ratio is 1."""
        return self.epochs * self.minibatches == 1

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained and the model beneath it stays as it is."""
        return bool(self.lora_rank or self.lora_adapter_path)


LOWEST = {"group_size": 2, "advantage_balance": -1} | dict.fromkeys((
    "prompts_per_iteration", "microbatch_tokens", "max_response_tokens", "env_threads", "epochs",
    "minibatches", "eval_tasks", "eval_samples", "checkpoint_every", "threads",
    "vllm_max_seqs"), 1)  # the others: 0
SHARES = ("log_episodes", "final_learning_rate", "clip_low", "advantage_balance", "vllm_gpu_memory")
POSITIVE = ("temperature", "eval_temperature", "learning_rate", "max_grad_norm", "vllm_gpu_memory",
            "vllm_cpu_cache", "vllm_timeout", "dist_timeout")

METRICS = {
    "train/policy_loss": "policy loss without entropy bonus and KL penalty, mean of the iteration's updates",
    "train/kl_loss": "k3 estimate of KL(policy || starting model), 0 without a reference [nats/token]",
    "train/entropy": "mean entropy of the next-token distribution on response tokens [nats]",
    "train/reward": "mean reward of the iteration's episodes, failed ones aside, as in all that follows",
    "train/advantage": "mean advantage over the tokens trained on",
    "train/clipfrac": "share of trained tokens whose ratio was clipped",
    "train/approx_kl": "k3 estimate of KL(old policy || policy) [nats/token]",
    "train/grad_norm": "global gradient norm before clipping",
    "train/weight_norm": "global norm of the trained weights",
    "train/learning_rate": "learning rate of the iteration",
    "train/global_step": "optimiser steps so far",
    "train/pass@1": "share of the iteration's episodes that are correct",
    "kl/k1": "mean of logprobs - ref_logprobs, with a reference only [nats/token]",
    "critic/score": "episode rewards: mean, max, min",
    "critic/rewards": "episode rewards after penalties (GRPO has none in the reward): mean, max, min",
    "critic/advantages": "advantages of the trained responses: mean, max, min",
    "critic/returns": "the same (there is no critic): mean, max, min",
    "response_length": "tokens after the prompt: mean, max, min [tokens]; clip_ratio is the share cut off",
    "prompt_length": "tokens of the prompt: mean, max, min [tokens]",
    "rollout/throughput": "generated tokens per second of rollout [tokens/s]",
    "rollout/turns": "mean replies per episode",
    "rollout/finished": "share of the episodes that the environment ended",
    "rollout/termination": "share by reason: done, truncated (environment's limit), length, context, turns, "
                           "timeout, error",
    "rollout/retries": "times that an episode was played again because its environment failed",
    "rollout/sub_agents": "mean number of sub-agents per episode",
    "rollout/groups_submitted": "groups sampled",
    "rollout/groups_trainable": "groups whose rewards differ",
    "rollout/groups_incomplete": "groups that lost a member to a failing environment",
    "mismatch/kl": "k3 estimate of KL(sampler || trainer) before the update [nats/token]",
    "mismatch/ratio_max": "largest trainer / sampler probability ratio of a token, before the cap",
    "mismatch/frac_capped": "share of tokens whose ratio exceeds --tis-cap",
    "time": "rollout, update, sync, eval, checkpoint (those since the record before) [s]",
    "system/processes": "processes of torchrun; 1 without it",
    "system/memory_usage": "resident memory of the process; as all of system/*, of the first one [GiB]",
    "system/cpu_utilization": "processor time over wall time since the record before [cores]",
    "system/gpu_memory": "peak memory allocated on the GPU [GiB]",
    "system/child_processes": "processes that this one has started, and theirs",
    "system/temporary_space": "taken by the environments' work folders [GiB]",
    "system/stale_folders": "those of them that were left behind: over an hour old, no process in them",
    "val/<source>/pass@1": "held-out correctness at --eval-temperature, mean over tasks and samples",
    "val/<source>/pass@<n>": "share of held-out tasks with a correct response among n",
    "val/<source>/greedy": "held-out correctness of greedy decoding",
    "val/<source>/<part>": "mean of each named part of the environment's info",
}


def group_advantages(rewards, scale=False, baseline="mean", balance=0.0, played=None):
    """Each reward against its group.  rewards (groups, group_size) -> the same shape.

    GRPO (arXiv:2402.03300 sec. 4.1.2) with scale (population std), Dr. GRPO (arXiv:2503.20783) without;
    baseline "loo" is RLOO (arXiv:2402.14740): r_i minus the mean of the others, = G / (G - 1) (r_i - mean).
    played: False where a member is missing; the group is then the others, G their number, and its own is 0.
    """
    played = torch.ones_like(rewards) if played is None else played.to(rewards.dtype)
    size = played.sum(1, keepdim=True)                                                   # (groups, 1)
    centred = (rewards - (rewards * played).sum(1, keepdim=True) / size.clamp(min=1)) * played
    advantages = centred * size / (size - 1).clamp(min=1) if baseline == "loo" else centred
    if scale:
        deviation = (centred.square().sum(1, keepdim=True) / size.clamp(min=1)).sqrt()
        advantages = advantages / (deviation + 1e-6)
    return torch.where(advantages < 0, 1 - max(balance, 0.0), 1 + min(balance, 0.0)) * advantages


def k3(log_ratio):
    """Unbiased, never negative estimate of KL(p || q) from samples of p; log_ratio = log q - log p."""
    return torch.expm1(log_ratio) - log_ratio  # expm1: exact where the ratio is nearly 1


def policy_loss(logprobs, old_logprobs, advantages, mask, loss, clip_low, clip_high):
    """Loss of each token, and whether it was clipped.  All (B, T), but advantages (B, 1)."""
    log_ratio = logprobs - old_logprobs
    if loss == "gspo":
        # GSPO (arXiv:2507.18071) eqs. 7 and 14: the sequence's geometric-mean ratio, its gradient spread over
        # the tokens' own log-probabilities.
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        sequence = (log_ratio * mask).sum(1, keepdim=True) / lengths                     # (B, 1)
        log_ratio = sequence.detach() + logprobs - logprobs.detach()
    ratio = torch.exp(log_ratio)                                                         # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss == "cispo":
        # CISPO (arXiv:2506.13585) eqs. 4, 5: every token keeps a gradient; only its weight is clipped.
        return -clipped.detach() * advantages * logprobs, ratio != clipped
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)                 # PPO eq. 7
    return per_token, -clipped * advantages > -ratio * advantages


def token_weights(mask, aggregation, num_tokens, num_sequences, longest):
    """Weights that turn per-token losses into one number by a plain sum.  mask (B, T) -> (B, T).

    num_tokens and num_sequences are those of the whole minibatch: the sum over its passes is its loss,
    however it is cut.
    """
    if aggregation == "token":
        return mask / num_tokens
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / num_sequences
    return mask / (num_sequences * longest)


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


def hidden_states(decoder, batch):
    """The decoder's state at the position before each response token, which predicts it.  -> (R, T, H)

    That shift by one happens here and nowhere else. Where responses share a prompt, it is computed once and
    its keys and values handed to them, with gradient.
    """
    prompts, rows = batch["prompts"], batch["prompt_of_row"]
    valid = torch.cat([batch["prompt_valid"][rows], batch["valid"][:, :-1]], 1)          # (R, P + T - 1)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    start = prompts.shape[1] - 1 if batch["share_prompts"] else 0  # what is computed once
    cache = new_cache(decoder) if start else None
    if start:
        before = decoder(input_ids=prompts[:, :-1], attention_mask=batch["prompt_valid"][:, :-1],
                         position_ids=(batch["prompt_valid"].cumsum(1) - 1).clamp(min=0)[:, :-1],
                         past_key_values=cache, use_cache=True).last_hidden_state
        cache.batch_select_indices(rows)
    inputs = torch.cat([prompts[rows], batch["responses"][:, :-1]], 1)[:, start:]        # (R, ... + T - 1)
    hidden = decoder(input_ids=inputs, attention_mask=valid, position_ids=positions[:, start:],
                     past_key_values=cache, use_cache=bool(start)).last_hidden_state
    if start and UNDER_TORCHRUN:
        # FSDP2 gathers a layer's weights for the backward pass when a gradient reaches its output. Nothing
        # else reads that of the last layer: its keys and values would meet weights that are gone.
        hidden = hidden + 0 * before[:, -1].sum()
    return hidden[:, prompts.shape[1] - 1 - start:]


def token_logprobs(model, batch, temperature, hidden=None):
    """Log-probability and entropy of each response token of each segment.  -> two (B, T).

    hidden: the decoder's states (R, T, H), where they are computed already.
    """
    def of_pass(hidden):
        decoder, head = decoder_and_head(model)
        hidden = hidden_states(decoder, batch) if hidden is None else hidden
        chosen = batch["chosen"]                                                         # (R, T)
        values = selected_logprobs(hidden[chosen], head, batch["responses"][chosen], temperature)
        zeros = torch.zeros(chosen.shape, device=chosen.device)
        return [zeros.to(v.dtype).masked_scatter(chosen, v)[batch["row_of_segment"]] for v in values]

    return as_forward(model, of_pass, None) if hidden is None else of_pass(hidden)


def decoder_and_head(model):
    """The transformer without its head, and the head, beneath PEFT's wrapper if there is one."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.get_decoder(), base.get_output_embeddings()


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


# Engine: load, generate, sync


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


class EngineError(OSError):
    """The sampler is gone or cannot be trusted, while the trainer and its weights are whole."""


class Engine:
    """A sampler: submit prompts under keys, then collect the replies that are finished while it is busy."""

    def sync_weights(self, model):
        """Hand over the trained weights."""

    def wake(self):
        """Before a rollout, in all processes together."""

    def sleep(self):
        """Give the device's memory back until the next hand-over or rollout."""

    def close(self):
        """Drop what is still asked."""


class HfEngine(Engine):
    """Samples with the trained weights themselves: nothing to hand over, no other arithmetic."""

    continuous = False  # the replies to all waiting prompts come together

    def __init__(self, model, tokenizer, args):
        self.model, self.tokenizer, self.args, self.waiting = model, tokenizer, args, []
        self.eos = eos_ids(model, tokenizer)

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def wake(self):
        gather_weights(self.model, whole=True)

    def sleep(self):
        gather_weights(self.model, whole=False)

    def submit(self, key: int, prompt: list[int], temperature: float, seed: int = 0):
        self.waiting.append((key, prompt, temperature, seed))

    def collect(self):
        """-> [(key, response_ids, logprobs)]"""
        waiting, self.waiting, replies = self.waiting, [], []
        limit = self.args.max_response_tokens
        # A cached token costs far less memory than a trained one, hence the factor.
        longest = max(len(prompt) for _, prompt, *_ in waiting) + limit
        rows = max(1, 16 * self.args.microbatch_tokens // longest)
        for start in range(0, len(waiting), rows):
            keys, prompts, temperatures, seeds = zip(*waiting[start:start + rows], strict=True)
            with precision(self.args, self.model.device):
                sampled = generate(self.model, prompts, limit, temperatures[0], self.tokenizer, seeds)
            replies += [(key, *reply) for key, reply in zip(keys, sampled, strict=True)]
        return replies


def import_vllm(device):
    """The library, not installed with the others; what it reads from the environment is set before."""
    if device.index:
        raise BadInput(f"--device {device}: vLLM takes the first GPU that it sees; use --device cuda with "
                       f"CUDA_VISIBLE_DEVICES={device.index}")
    # One process: weights need no transport, and torch.manual_seed rules vLLM's sampling too.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device.type == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than it saves
    try:
        import vllm
    except ImportError as error:
        raise BadInput(f"--engine vllm: {first_line(error)}; see requirements-vllm.txt") from error
    return vllm


class VllmEngine(Engine):
    """vLLM in this process: token ids in, ids and log-probabilities out.

    A reply that ends makes room for the next prompt at once: no turn waits for the slowest of the others.
    """

    continuous = True

    def __init__(self, args, eos, device, lora_rank, folder):
        vllm, gpu = import_vllm(device), device.type == "cuda"
        memory = (dict(gpu_memory_utilization=args.vllm_gpu_memory, enable_sleep_mode=args.vllm_sleep) if gpu
                  else dict(kv_cache_memory_bytes=int(args.vllm_cpu_cache * 2**30), enforce_eager=True))
        if lora_rank:
            allowed = next((r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= lora_rank), lora_rank)
            memory |= dict(enable_lora=True, max_loras=1, max_lora_rank=allowed)
        try:
            self.llm = vllm.LLM(
                find_model(args.model), skip_tokenizer_init=True, generation_config="vllm", dtype=args.dtype,
                # Weights that training will replace start as noise: whatever does not arrive shows at once.
                load_format="auto" if lora_rank else "dummy",
                # log_softmax(logits / temperature), as the trainer computes; the default ignores temperature.
                logprobs_mode="processed_logprobs",
                max_model_len=args.max_context_tokens, max_num_seqs=args.vllm_max_seqs, seed=args.seed,
                disable_log_stats=True, **memory)
        except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
            raise BadInput(f"--engine vllm: {first_line(error)}") from error
        self.vllm, self.eos, self.folder, self.lora, self.running = vllm, eos, folder, None, set()
        self.sampling = dict(max_tokens=args.max_response_tokens, stop_token_ids=eos, logprobs=0,
                             detokenize=False)
        self.sleep_level = 0 if not gpu or not args.vllm_sleep else 1 if lora_rank else 2
        self.asleep = False

    @property
    def busy(self):
        return bool(self.running)

    def submit(self, key, prompt, temperature, seed=0):
        params = self.vllm.SamplingParams(temperature=temperature, **self.sampling)
        prompt = self.vllm.TokensPrompt(prompt_token_ids=prompt)
        self.llm.llm_engine.add_request(str(key), prompt, params, lora_request=self.lora)
        self.running.add(key)

    def collect(self):
        """One step of the whole batch.  -> [(key, response_ids, logprobs)] of the replies that it ended."""
        ended = [(int(out.request_id), out.outputs[0]) for out in self.llm.llm_engine.step() if out.finished]
        self.running -= {key for key, _ in ended}
        return [(key, list(reply.token_ids), [of[token].logprob for token, of
                                              in zip(reply.token_ids, reply.logprobs, strict=True)])
                for key, reply in ended]

    def sync_weights(self, model):
        """All that reaches into the engine. What its prefix cache holds was computed with the old weights."""
        if self.asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        if isinstance(model, peft.PeftModel):
            # An adapter under the name or number of an earlier one would be that one.
            number = self.lora.lora_int_id + 1 if self.lora else 1
            path = write_weights(model, self.folder / str(number))
            before, make = self.lora, self.vllm.lora.request.LoRARequest
            self.lora = make(f"policy-{number}", number, path)
            try:
                self.llm.llm_engine.add_lora(self.lora)
            except (ValueError, RuntimeError) as error:
                raise EngineError(f"vLLM cannot use this adapter: {first_line(error)}") from error
            if before:
                shutil.rmtree(before.lora_path)
        else:
            # state_dict names a tied head, which named_parameters leaves out and vLLM would then not change.
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=saved_weights(model)))
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.asleep = False

    def sleep(self):
        if self.sleep_level:
            self.llm.sleep(self.sleep_level)
            self.asleep = True

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class VllmServers(Engine):
    """Running vLLM servers that see the run's folder (docs/engines.md has the command that starts one).

    A server that fails is asked again after growing pauses. By then it may be a new process with the weights
    that it was started with, so it is handed the policy's first.
    """

    continuous = True

    def __init__(self, args, eos, lora, folder):
        self.args, self.eos, self.lora, self.folder = args, eos, lora, folder
        self.session, self.stop = requests.Session(), threading.Event()
        self.session.trust_env = False  # a proxy for the web is not for these
        self.session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=args.vllm_max_seqs))
        self.threads = ThreadPoolExecutor(args.vllm_max_seqs)
        self.waiting, self.asked, self.count = {}, {}, 0
        self.number, self.path, self.pushes, self.locks, self.names, self.failed = 0, None, {}, {}, {}, set()
        self.tag, self.problem = together(os.urandom(4).hex)[0], "closed"
        for url in (url.rstrip("/") for url in args.vllm_url):
            self.pushes[url], self.locks[url] = 0, threading.Lock()
            self.names[url], longest = self.persist(url, functools.partial(self.describe, url))
            if longest < args.max_context_tokens:
                raise BadInput(f"--max-context-tokens {args.max_context_tokens}: {url} was started with "
                               f"--max-model-len {longest}")

    @property
    def busy(self):
        return bool(self.waiting or self.asked)

    def submit(self, key, prompt, temperature, seed=0):
        # Replies to one prompt are one request, which halves their cost; greedy ones may not be.
        self.waiting.setdefault((tuple(prompt), temperature, 0 if temperature else key), []).append(key)

    @property
    def adapter(self) -> str:
        return f"policy-{self.tag}-{self.number}"

    def describe(self, url):
        card = self.call(url, "/v1/models")["data"][0]  # the base; adapters come after it
        return card["id"], int(card["max_model_len"])

    def ask(self, url, prompt, temperature, num_replies):
        # All that a server would otherwise take from the model's generation config is said.
        answer = self.call(url, "/v1/completions", dict(
            model=self.names[url], prompt=prompt, n=num_replies, temperature=temperature, top_p=1.0, top_k=0,
            min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=0,
            max_tokens=self.args.max_response_tokens, stop_token_ids=self.eos, return_token_ids=True))
        replies = [(choice["token_ids"], choice["logprobs"]["token_logprobs"])
                   for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        whole = sum(len(ids) == len(logprobs) > 0 for ids, logprobs in replies)
        if not len(replies) == whole == num_replies:
            raise ValueError(f"{whole} replies of {num_replies}")
        return replies

    def collect(self):
        """Ask for what waits, and wait a moment.  -> [(key, response_ids, logprobs)] of what came."""
        for (prompt, temperature, _), keys in self.waiting.items():
            url = list(self.names)[self.count % len(self.names)]
            ask = functools.partial(self.ask, url, prompt, temperature, len(keys))
            self.asked[self.threads.submit(self.persist, url, ask)] = keys
            self.count += 1
        self.waiting = {}
        done, _ = wait(self.asked, timeout=0.05, return_when=FIRST_COMPLETED)
        return [(key, *reply) for future in done
                for key, reply in zip(self.asked.pop(future), future.result(), strict=True)]

    def call(self, url, path, body=None):
        """One request: POST with a body, GET without.  -> the answer's JSON."""
        answer = self.session.request("POST" if body else "GET", url + path, json=body,
                                      timeout=(5, self.args.vllm_timeout))
        unknown_adapter = answer.status_code == 404 and path == "/v1/completions"  # by a server that is new
        if answer.status_code >= 500 or unknown_adapter:
            answer.raise_for_status()
        if not answer.ok:
            raise EngineError(f"{url}{path} answered {answer.status_code}: {answer.text[:300]} "
                              "(docs/engines.md has the command that starts a server)")
        return answer.json() if answer.text.startswith("{") else {}

    def persist(self, url, action):
        """The action's result; where it fails for the server's sake, after a pause and a hand-over again."""
        pushes = self.pushes[url]
        for attempt in range(self.args.vllm_retries + 1):
            try:
                with self.locks[url]:  # one hands over, for all that failed together and for new requests too
                    if url in self.failed and self.path:
                        self.push(url)
                    pushes = self.pushes[url]
                return action()
            except (requests.RequestException, LookupError, TypeError, ValueError) as error:
                failure = error
                if self.pushes[url] == pushes:
                    self.failed.add(url)
            if attempt == self.args.vllm_retries or self.stop.wait(min(2**attempt, 30)):
                break
        if not self.stop.is_set():  # the other requests need not try either, and say the same
            self.problem = f"--vllm-url {url}: no answer after {attempt + 1} tries ({first_line(failure)})"
            self.stop.set()
        raise EngineError(self.problem)

    def push(self, url):
        """Hand the weights in self.path to a server. What it had cached was computed with older ones."""
        if self.lora:
            # Under a new name: one loaded in place is read from the disk again by every batch of requests.
            name = self.adapter
            loaded = {card["id"] for card in self.call(url, "/v1/models")["data"]}
            if name not in loaded:
                self.call(url, "/v1/load_lora_adapter", dict(lora_name=name, lora_path=self.path))
            for old in loaded - {name}:
                if re.match("policy-[0-9a-f]{8}-", old):
                    self.call(url, "/v1/unload_lora_adapter", dict(lora_name=old))
            self.names[url] = name
        else:
            load = dict(method="reload_weights", kwargs=dict(weights_path=self.path))
            self.call(url, "/collective_rpc", load)
        self.call(url, "/reset_prefix_cache", {"reset": True})
        self.pushes[url] += 1
        self.failed.discard(url)

    def sync_weights(self, model):
        self.number += 1
        before, self.path = self.path, write_weights(model, self.folder / f"{self.tag}-{self.number}", 0)
        for url in self.names:
            if rank() == 0:
                self.persist(url, functools.partial(self.push, url))
            elif self.lora:
                self.names[url] = self.adapter
        if before and rank() == 0:
            shutil.rmtree(before, ignore_errors=True)

    def close(self):
        """Do not wait for what is still being asked. The last weights stay: a server may read them again."""
        self.stop.set()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.session.close()


def write_weights(model, folder, only=None):
    """What a sampler needs of a model: its adapter alone or all weights.  -> the folder's absolute path.

    only: the one process that writes them; otherwise each does, in a folder of its own.
    """
    writes = only in (None, rank())
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in saved_weights(model) if writes}
    if writes and isinstance(model, peft.PeftModel):
        model.save_pretrained(folder, state_dict=tensors)
    elif writes:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors")  # copies, so that a tied head is written too
    return str(folder.resolve())


def make_engine(model, tokenizer, args, folder):
    """The sampler that --engine and --vllm-url name; it writes weights that it hands over into `folder`."""
    if args.engine == "hf":
        return HfEngine(model, tokenizer, args)
    eos, lora = eos_ids(model, tokenizer), isinstance(model, peft.PeftModel)
    if args.vllm_url:
        shutil.rmtree(folder, ignore_errors=True)  # left behind by a killed run
        return VllmServers(args, eos, lora, folder)
    folder = folder / str(rank())
    shutil.rmtree(folder, ignore_errors=True)
    return VllmEngine(args, eos, model.device, model.peft_config["default"].r if lora else 0, folder)


def check_sync(engine, model, tokenizer, args):
    """Mean difference of the log-probabilities that sampler and trainer give to the same tokens [nats].

    After a prompt so long that a stale prefix cache shows. Raises EngineError over SYNC_TOLERANCE.
    """
    length = min(256, args.max_context_tokens - args.max_response_tokens)
    prompt = np.random.default_rng(0).integers(len(tokenizer), size=length).tolist()
    for key in range(8):
        engine.submit(key, prompt, args.temperature, key)
    segments = []
    while engine.busy:
        for _, ids, logprobs in engine.collect():
            segments.append(Segment(prompt))
            segments[-1].append(ids, 1, logprobs)
    for segment in segments:  # as many passes in each process
        batch = collate([segment], tokenizer.pad_token_id, model.device)
        write_logprobs(model, [segment], batch, "old_logprobs", args)
    difference = float(np.mean(np.abs(np.concatenate(
        [np.subtract(segment.old_logprobs, segment.rollout_logprobs) for segment in segments]))))
    if not difference <= SYNC_TOLERANCE[args.dtype]:
        raise EngineError(f"after the hand-over of weights sampler and trainer differ by {difference:.2g} "
                          f"nats per token; tolerated are {SYNC_TOLERANCE[args.dtype]} in {args.dtype} "
                          "(docs/engines.md, troubleshooting)")
    return difference


SYNC_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}  # [nats]


# Rollout: tasks to scored token sequences


@dataclasses.dataclass
class Segment:
    """What the model saw and said without a break; the lists from response_ids on are equally long."""

    prompt_ids: list[int]
    response_ids: list[int] = dataclasses.field(default_factory=list)
    response_mask: list[int] = dataclasses.field(default_factory=list)  # 1: sampled; 0: the environment's
    rollout_logprobs: list[float] = dataclasses.field(default_factory=list)  # [nats]; 0 where the mask is
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    advantage: float = 0.0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def key(self) -> tuple:
        return tuple(self.prompt_ids), tuple(self.response_ids), tuple(self.response_mask)

    def append(self, ids, mask, logprobs):
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.rollout_logprobs += logprobs
        assert len(self.response_ids) == len(self.response_mask) == len(self.rollout_logprobs)


@dataclasses.dataclass(eq=False)
class Rollout:
    """One episode: its texts, its tokens (one segment, or more where the history was cut) and its score."""

    task: envs.Task
    number: int  # within the group; of a sub-agent, among its parent's
    messages: list[dict]
    segments: list[Segment]
    steps: list[envs.Step] = dataclasses.field(default_factory=list)
    termination: str = ""  # one of TERMINATIONS once it is over
    reward: float = 0.0
    turns: list[tuple] = dataclasses.field(default_factory=list)  # (segment, start, end) of a reply's tokens
    start: int = 0  # message of the history that the last segment begins with; 0: nothing is cut
    cut: str = ""  # the termination, while the environment is asked what the episode is worth so far
    retries: int = 0
    children: list[Rollout] = dataclasses.field(default_factory=list)  # sub-agents
    parent: Rollout | None = None
    key: int = 0  # that the engine knows it by
    draws: str = ""  # names its random numbers

    @property
    def info(self) -> dict:
        return self.steps[-1].info if self.steps else {}

    @property
    def correct(self) -> float:
        return float(self.info.get("correct", 0.0)) if self.termination != "error" else 0.0

    @property
    def family(self) -> list[Rollout]:
        """Itself, then its sub-agents, each followed by its own."""
        return [self, *(member for child in self.children for member in child.family)]

    @property
    def last_reply(self) -> str:
        """Empty where there is none, and where the environment failed."""
        said = [m["content"] for m in self.messages[len(self.task.messages):] if m["role"] == "assistant"]
        return said[-1] if said and self.termination != "error" else ""

    @property
    def reply_seed(self) -> int:
        """Of the next reply's random numbers."""
        return seed_of(f"{self.draws} {self.retries} {len(self.turns)}")

    def restart(self):
        """Back to the task alone."""
        self.messages, self.segments = list(self.task.messages), [Segment(self.segments[0].prompt_ids)]
        self.steps, self.turns, self.start, self.children, self.cut = [], [], 0, [], ""
        self.retries += 1


# done: the environment's own end; truncated: its own limit; then --max-response-tokens, --max-context-tokens,
# --max-turns and --episode-timeout; error: the environment failed, which says nothing of the replies.
TERMINATIONS = ("done", "truncated", "length", "context", "turns", "timeout", "error")
CUTS = ("length", "context", "turns")


def episode_reward(rollout: Rollout) -> float:
    """The scalar that is maximised: edit here, or point --reward-fn at a function of the same form.

    rollout.steps are the environment's answers, their .info the named parts, rollout.messages the texts. A
    reply cut by the length limit never reaches the environment; Episode.end judges what was there before it.
    """
    return sum(step.reward for step in rollout.steps)


def encode_prompt(messages, tokenizer, args):
    """Ids of the messages and of the opening of the model's turn."""
    if args.chat_template == "plain":
        return tokenizer("".join(message["content"] for message in messages)).input_ids
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_answer(messages, tokenizer, args):
    """Ids of the environment's messages as they follow a reply that ended with eos."""
    if args.chat_template == "plain":
        text = "".join(message["content"] for message in messages)
        return tokenizer(text, add_special_tokens=False).input_ids
    mark = "@@reply@@"  # that no template contains
    before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
    text = tokenizer.apply_chat_template(before + messages, tokenize=False, add_generation_prompt=True)
    tail = text[text.index(mark) + len(mark):]
    closing, eos, rest = tail.partition(tokenizer.eos_token)
    # Usually the reply's own eos has closed the turn; a template with another closing mark keeps that mark.
    return tokenizer(rest if eos and not closing.strip() else tail, add_special_tokens=False).input_ids


def check_template(tokenizer, args, multi_turn):
    """Refuse a missing template, and one that changes earlier turns: a model would not read what it wrote."""
    if args.chat_template == "plain":
        return
    if tokenizer.chat_template is None:
        raise BadInput(f"--model {args.model}: its tokenizer has no chat template; use --chat-template plain")
    reply = {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nthree"}
    turns = [{"role": "user", "content": "one"}, reply, {"role": "user", "content": "four"}]
    short, long = (tokenizer.apply_chat_template(part, tokenize=False) for part in (turns[:2], turns))
    if multi_turn and not long.startswith(short.rstrip()):
        raise BadInput(f"--model {args.model}: its chat template rewrites earlier turns, so the model would "
                       "not read the tokens that it sampled; use --chat-template plain or another model")


class Call:
    """Work for a thread, whose result goes to a queue. Once `lost`, nobody waits for it."""

    def __init__(self, results, work, r, *given):
        self.results, self.work, self.r, self.given = results, work, r, given
        self.begun = self.lost = False


class EnvThreads:
    """Threads that call environments. One whose call does not come back is left behind, not waited for."""

    def __init__(self, count):
        self.queue, self.count = queue.SimpleQueue(), count
        for _ in range(count):
            self.start()

    def start(self, call=None):
        """One more thread; call: what it does first."""
        threading.Thread(target=self.work, args=(call,), daemon=True).start()

    def work(self, call):
        while call := call or self.queue.get():
            call.begun = True
            if not call.lost:
                result = call.work(call.r, *call.given)
                if call.lost:
                    return  # another thread has taken this one's place
                call.results.put((call.r, result))
            call = None

    def leave(self, call, first=None):
        """Do not wait for a call any longer. first: a call that a thread in its place would begin with."""
        call.lost = True
        if call.begun:
            self.start(first)
        elif first:
            self.queue.put(first)

    def close(self):
        for _ in range(self.count):
            self.queue.put(None)


class Play:
    """The episodes of a rollout: who is to be answered by the engine or an environment, and how each ends.

    One thread decides everything; others do no more than call env.start, step, resume and close.
    """

    CLOSING = 10.0  # longest wait for an environment that is being closed [s]

    def __init__(self, engine, tokenizer, env, args, pool, rollouts):
        self.engine, self.tokenizer, self.env, self.args, self.pool = engine, tokenizer, env, args, pool
        self.waiting, self.keys = collections.deque(rollouts), itertools.count()
        self.began = {}  # when each came into play: the episodes that are, without their sub-agents [s]
        self.ready, self.asked = [], {}  # to be handed to the engine; what it works on, by key
        self.live = {}  # envs.Episodes that are to be closed
        self.calls, self.results = {}, queue.SimpleQueue()  # the threads' work on each
        self.closing, self.closed = {}, queue.SimpleQueue()
        self.called = {}  # the sub-agents that an episode waits for
        for r in rollouts:
            r.key = next(self.keys)

    @property
    def room(self) -> bool:
        return bool(self.waiting) and len(self.began) < (self.args.max_concurrent or math.inf)

    def ask(self, temperature):
        """Fill the room that there is, and hand the engine what it is to answer."""
        while self.room:
            r = self.waiting.popleft()
            self.began[r] = time.monotonic()
            self.continue_if(fits(r, self.args), r)
        for r in self.ready:
            if not r.termination:  # it may have timed out since
                self.engine.submit(r.key, r.segments[-1].ids, temperature, r.reply_seed)
                self.asked[r.key] = r
        self.ready = []

    def continue_if(self, fit, r):
        if fit:
            self.ready.append(r)
        else:
            self.end(r, r.termination)

    def hear(self):
        """The engine's replies: each that ended goes to its environment."""
        asked = time.monotonic()
        replies = self.engine.collect() if self.engine.busy else []
        self.patience = time.monotonic() - asked
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for _, ids, _ in replies]
        for (key, ids, logprobs), text in zip(replies, texts, strict=True):
            r = self.asked.pop(key)
            if r.termination:
                continue  # it timed out
            segment, start = r.segments[-1], len(r.segments[-1].response_ids)
            segment.append(ids, 1, logprobs)
            r.turns.append((len(r.segments) - 1, start, start + len(ids)))
            r.messages.append({"role": "assistant", "content": text})
            if ids[-1] in self.engine.eos:
                self.call(r, "step", text)
            else:
                self.end(r, "length")

    def call(self, r, method, given):
        self.calls[r] = call = Call(self.results, self.work, r, method, given)
        self.pool.queue.put(call)

    def work(self, r, method, given):
        """In a thread: hand an episode a reply, or those of its sub-agents.  -> a Step, or what was raised"""
        try:
            if r not in self.live:
                self.live[r] = self.env.start(r.task, self.args.seed)
            step = None if r.termination else getattr(self.live[r], method)(given)
            if r.termination:
                self.drop(r, step)
            elif method == "end" or (step.terminated or step.truncated) and not step.children:
                self.release(r)
            return step
        except BaseException as error:
            self.release(r)
            return error

    def release(self, r):
        """Close an episode, whoever comes first; what it leaves behind must not end the run."""
        if (episode := self.live.pop(r, None)) is not None:
            with contextlib.suppress(BaseException):
                episode.close()

    def drop(self, r, step):
        """A step that came too late: close its episode, and the sub-agents that it would have begun."""
        self.release(r)
        for _, self.live[r] in getattr(step, "children", ()):
            self.release(r)

    def settle(self):
        """What the environments answered. While the engine has replies to work on, nothing waits for them."""
        self.time_out()
        results, began = [], time.monotonic()
        while self.calls:
            idle = not (results or self.ready or self.room or self.engine.busy)
            # An engine that answers all prompts together is given all of them together; but where the clock
            # runs, what takes longer than the replies did does not hold up the others.
            late = self.args.episode_timeout and time.monotonic() - began > self.patience
            wait = idle or not (self.engine.continuous or late)
            try:
                r, step = self.results.get(wait, timeout=0.1)
            except queue.Empty:
                if not wait:
                    break
                self.time_out()
                continue
            self.calls.pop(r, None)
            results.append((r, step))
        for r, step in sorted(results, key=lambda result: result[0].key):
            if r.termination:
                self.drop(r, step)
            else:
                self.take(r, step)

    def take(self, r, step):
        """Append a step's answer, call its sub-agents, or play the episode again where it failed."""
        if isinstance(step, Exception):
            tqdm.write(f"task {r.task.id}: the environment failed: {step!r}", sys.stderr)
            if r.parent or r.retries == self.args.episode_retries:
                self.end(r, "error")
            else:
                r.restart()
                self.began[r] = time.monotonic()
                self.ready.append(r)
        elif isinstance(step, BaseException):
            raise step
        elif r.cut:
            if step:  # beside what its last reply earned
                earned = r.steps.pop().reward if len(r.steps) == len(r.turns) else 0.0
                r.steps.append(dataclasses.replace(step, messages=[], reward=earned + step.reward))
            self.end(r, r.cut)
        elif step.children:
            self.called[r] = [self.sub_agent(r, *child) for child in step.children]
            for child in self.called[r]:
                self.continue_if(fits(child, self.args), child)
        else:
            r.steps.append(step)
            r.messages += step.messages
            r.termination = "done" if step.terminated else "truncated" if step.truncated else (
                "turns" if len(r.turns) == self.args.max_turns else "")
            self.continue_if(not r.termination and observe(r, self.tokenizer, self.args), r)

    def sub_agent(self, parent, task, episode):
        prompt = encode_prompt(task.messages, self.tokenizer, self.args)
        number = len(parent.children)
        child = Rollout(task, number, list(task.messages), [Segment(prompt)], parent=parent,
                        key=next(self.keys), draws=f"{parent.draws} {parent.retries}.{number}")
        parent.children.append(child)
        self.live[child] = episode
        return child

    def end(self, r, termination):
        """Where a limit of ours ends an episode, its environment judges what there is. Then it is over, and
        the last of a step's sub-agents hands their replies to the parent.
        """
        if termination in CUTS and r in self.live and not r.cut:
            r.cut, r.termination = termination, ""
            return self.call(r, "end", termination)
        r.termination = termination
        self.close(r)
        self.began.pop(r, None)
        called = self.called.get(r.parent, ())
        if called and all(child.termination for child in called):
            self.call(r.parent, "resume", [child.last_reply for child in self.called.pop(r.parent)])

    def time_out(self):
        """End the episodes that are over their time, and their sub-agents."""
        limit = time.monotonic() - (self.args.episode_timeout or math.inf)
        for root in [r for r, began in self.began.items() if began < limit]:
            self.stop(root, "timeout")

    def stop(self, root, termination):
        del self.began[root]
        for r in root.family:
            self.called.pop(r, None)
            if not r.termination:
                r.termination = termination
                self.close(r)

    def close(self, r):
        """Have a thread close an episode, at once where it is to end a step that takes too long."""
        call, closing = self.calls.pop(r, None), None
        if r in self.live:
            self.closing[r] = closing = Call(self.closed, self.release, r)
        if call:
            self.pool.leave(call, closing)
        elif closing:
            self.pool.queue.put(closing)

    def finish(self):
        """End what is left, which is nothing unless the run ends here, and wait for what is being closed."""
        for root in list(self.began):
            self.stop(root, "error")
        while self.closing:
            try:
                r, _ = self.closed.get(timeout=self.CLOSING)
                del self.closing[r]
            except queue.Empty:
                tqdm.write(f"{len(self.closing)} episodes do not close; left behind", sys.stderr)
                for call in self.closing.values():
                    self.pool.leave(call)
                break


def rollout(engine, tokenizer, env, tasks, num_samples, temperature, args, pool, score, kind="train",
            first=0):
    """Play num_samples episodes of each of this process's tasks, turn by turn.  -> the Rollouts of all
    processes, those of a task side by side.

    kind, and the number of the first task among all of that kind, name the random numbers of the replies.
    """
    prompts = [encode_prompt(task.messages, tokenizer, args) for task in tasks]
    rollouts = [Rollout(task, number, list(task.messages), [Segment(prompt)],
                        draws=f"{args.seed} {kind} {position} {number}")
                for position, (task, prompt) in enumerate(zip(tasks, prompts, strict=True), first)
                for number in range(num_samples)]

    def play_all():
        play = Play(engine, tokenizer, env, args, pool, rollouts)
        try:
            while play.waiting or play.began or engine.busy:
                play.ask(temperature)
                play.hear()
                play.settle()
        finally:
            play.finish()
        for r in rollouts:
            if r.termination != "error":
                r.reward = float(score(r))
            for child in r.family[1:]:
                child.reward = r.reward
        return rollouts

    engine.wake()
    return [r for part in together(play_all, at_once=True) for r in part]


def fits(r, args, answer=()):
    """Whether the environment's answer and another reply fit the context budget; if not, the episode ends."""
    if len(r.segments[-1].ids) + len(answer) + args.max_response_tokens > args.max_context_tokens:
        r.termination = "context"
    return not r.termination


def observe(r, tokenizer, args):
    """Append the environment's answer; where it does not fit, start a segment without the oldest turns."""
    answer = encode_answer(r.steps[-1].messages, tokenizer, args)
    if answer and answer[0] == r.segments[-1].response_ids[-1]:
        answer = answer[1:]  # the mark that closes a turn was sampled, as one more kind of eos
    if fits(r, args, answer):
        r.segments[-1].append(answer, 0, [0.0] * len(answer))
    start = max(r.start, len(r.task.messages))  # what did not fit before will not now
    while r.termination and (start := start + 1) < len(r.messages) - len(r.steps[-1].messages):
        if r.messages[start]["role"] == "assistant":
            r.termination, r.start = "", start
            r.segments.append(Segment(encode_prompt(r.task.messages + r.messages[start:], tokenizer, args)))
            if not fits(r, args):
                r.segments.pop()
    return not r.termination


# Update: segments to a gradient


def learners(r, args):
    """The episodes that learn from r's reward: itself and, with --train-sub-agents, its sub-agents."""
    members = r.family if args.train_sub_agents else [r]
    return [member for member in members if "error" not in (r.termination, member.termination)]


def trainable_groups(rollouts, args):
    """Advantages of each group; one whose rewards and correctness are all equal teaches nothing and goes.

    A member whose environment failed is no member: neither the baseline nor the update knows it.
    """
    for r in rollouts:
        if not math.isfinite(r.reward):
            raise FloatingPointError(f"the reward of task {r.task.id} is {r.reward}")
    rewards, correct, played = (
        torch.tensor([value(r) for r in rollouts]).view(-1, args.group_size)             # (groups, group)
        for value in (lambda r: r.reward, lambda r: r.correct, lambda r: r.termination != "error"))
    advantages = group_advantages(rewards, args.scale_rewards, args.baseline, args.advantage_balance, played)

    def differ(x):
        return x.masked_fill(~played, -math.inf).amax(1) > x.masked_fill(~played, math.inf).amin(1)

    groups = []
    for index in (differ(rewards) | differ(correct)).nonzero().flatten().tolist():
        members = rollouts[index * args.group_size:(index + 1) * args.group_size]
        groups.append([])
        for r, advantage in zip(members, advantages[index].tolist(), strict=True):
            for member in learners(r, args):
                for segment in member.segments:
                    segment.advantage = advantage
                if not (args.mask_truncated and member.termination in ("length", "context")):
                    groups[-1] += [segment for segment in member.segments if any(segment.response_mask)]
    return groups


def microbatches(segments, budget):
    """Cut segments, by length, into passes of at most `budget` padded response tokens, or one response."""
    part, rows = [], set()
    for segment in sorted(segments, key=lambda segment: len(segment.response_ids)):
        if part and len(segment.response_ids) * len(rows | {segment.key}) > budget:
            yield part
            part, rows = [], set()
        part.append(segment)
        rows.add(segment.key)
    yield part


def deal_groups(groups):
    """Whole groups for each process, evenly by tokens.  -> a list of segments for each rank"""
    hands = deal([sum(len(segment.ids) for segment in group) for group in groups])
    return [[segment for index in hand for segment in groups[index]] for hand in hands]


def passes(groups, args, pad_id, device):
    """This process's passes over its share of the groups.  -> (segments, what collate makes of them) of each

    All processes take part in every pass and call each layer equally often, since FSDP2 gathers its weights:
    one that has fewer adds some that count 0, and all share prompts or none does.
    """
    parts = [list(microbatches(hand, args.microbatch_tokens)) if hand else [] for hand in deal_groups(groups)]
    filler = min((segment for group in groups for segment in group), key=lambda segment: len(segment.ids))
    for now in itertools.zip_longest(*parts, fillvalue=()):
        part = now[rank()] or [filler]
        batch = collate(part, pad_id, device)
        if not now[rank()]:
            batch["response_mask"].zero_()
        if UNDER_TORCHRUN:
            batch["share_prompts"] = any(map(pays_to_share, now)) and min(
                len(segment.prompt_ids) for part in now for segment in part or [filler]) > 1
        yield part, batch


def pays_to_share(part):
    """Whether to compute shared prompts once saves more than the second gathering of weights costs."""
    rows = {segment.key: len(segment.prompt_ids) for segment in part}
    saved = sum(rows.values()) - sum(map(len, {tuple(segment.prompt_ids) for segment in part}))
    return saved > sum(len(segment.ids) for segment in part) / 4


def tell_others(groups, name):
    """What the passes of each process have written into segment.<name>, into the same segment in all."""
    if UNDER_TORCHRUN:
        hands = deal_groups(groups)
        told = together(lambda: [getattr(segment, name) for segment in hands[rank()]])
        for segment, value in zip(itertools.chain(*hands), itertools.chain(*told), strict=True):
            setattr(segment, name, value)


def collate(segments, pad_id, device):
    """Tensors of a pass. Prompts (U, P), padded left, and responses (R, T), padded right, each different one
    once, since equal ones have equal log-probabilities; all else by segment, (B, T).
    """
    rows, prompts = {}, {}
    row_of_segment = [rows.setdefault(segment.key, len(rows)) for segment in segments]
    prompt_of_row = [prompts.setdefault(prompt, len(prompts)) for prompt, _, _ in rows]
    batch = dict(
        prompts=pad(prompts, pad_id, device, left=True),
        prompt_valid=pad([[1] * len(prompt) for prompt in prompts], 0, device, left=True),
        prompt_of_row=torch.tensor(prompt_of_row, device=device),
        responses=pad([response for _, response, _ in rows], pad_id, device),
        valid=pad([[1] * len(response) for _, response, _ in rows], 0, device),
        chosen=pad([mask for _, _, mask in rows], 0, device, dtype=torch.bool),
        share_prompts=len(prompts) < len(rows), row_of_segment=torch.tensor(row_of_segment, device=device),
        advantages=torch.tensor([[segment.advantage] for segment in segments], device=device))
    for name in ("response_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs"):
        if getattr(segments[0], name) is not None:
            batch[name] = pad([getattr(s, name) for s in segments], 0, device, dtype=torch.float32)
    return batch


@torch.no_grad()
def write_logprobs(model, part, batch, name, args):
    """Write the model's log-probabilities of a pass's responses into segment.<name>."""
    with precision(args, model.device):
        logprobs, _ = token_logprobs(model, batch, args.temperature)
    for segment, row in zip(part, logprobs.tolist(), strict=True):
        setattr(segment, name, row[:len(segment.response_ids)])


def store_logprobs(model, groups, name, args, pad_id):
    """write_logprobs of all groups; under torchrun of each in one process, which tells the others."""
    for part, batch in passes(groups, args, pad_id, model.device):
        write_logprobs(model, part, batch, name, args)
    tell_others(groups, name)


def pass_loss(model, batch, weight, args):
    """The part of the minibatch's loss that lies in this pass.  -> loss, sums over its tokens for the log."""
    logprobs, entropy = token_logprobs(model, batch, args.temperature)                   # (B, T)
    mask, advantages = batch["response_mask"], batch["advantages"]
    # On policy, the policy before the update is the one being differentiated.
    old_logprobs = batch.get("old_logprobs", logprobs.detach())
    ref_logprobs = batch.get("ref_logprobs", logprobs.detach())
    per_token, clipped = policy_loss(logprobs, old_logprobs, advantages, mask, args.loss, args.clip_low,
                                     args.clip_high)
    # Truncated importance sampling, for a sampler whose numerics differ: the raw ratio, then the cap.
    mismatch = torch.exp(old_logprobs - batch["rollout_logprobs"])
    if args.tis_cap:
        per_token = per_token * mismatch.clamp(max=args.tis_cap)
    kl = k3(ref_logprobs - logprobs)
    loss = ((per_token + args.kl_coef * kl - args.entropy_coef * entropy) * weight).sum()
    sums = {"train/policy_loss": per_token * weight, "train/kl_loss": kl * mask,
            "train/entropy": entropy * mask, "train/clipfrac": clipped * mask,
            "train/approx_kl": k3(logprobs - old_logprobs) * mask, "train/advantage": advantages * mask,
            "kl/k1": (logprobs - ref_logprobs) * mask,
            "mismatch/kl": k3(old_logprobs - batch["rollout_logprobs"]) * mask,
            "mismatch/frac_capped": (mismatch > (args.tis_cap or math.inf)) * mask}
    packed = torch.stack([value.detach().double().sum() for value in sums.values()])
    return loss, dict(zip(sums, packed, strict=True)), (mismatch * mask).detach().max()


def update(model, reference, optimizer, groups, args, pad_id):
    """All optimiser steps of an iteration on groups of segments.  -> metrics, number of steps."""
    if not args.on_policy:
        store_logprobs(model, groups, "old_logprobs", args, pad_id)
    if args.kl_coef:
        # The starting model: a copy, or the policy with its adapter switched off.
        with contextlib.nullcontext() if reference else model.disable_adapter():
            store_logprobs(reference or model, groups, "ref_logprobs", args, pad_id)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    totals, ratios, norms, num_seen = dict.fromkeys(UPDATE_METRICS, 0.0), [], [], 0
    for _ in range(args.epochs):
        order = range(len(groups)) if args.on_policy else torch.randperm(len(groups)).tolist()
        for chosen in np.array_split(np.array(order), min(args.minibatches, len(groups))):
            minibatch = [groups[index] for index in chosen]
            segments = [segment for group in minibatch for segment in group]
            num_tokens = sum(sum(segment.response_mask) for segment in segments)
            for _, batch in passes(minibatch, args, pad_id, model.device):
                weight = token_weights(batch["response_mask"], args.aggregation, num_tokens, len(segments),
                                       args.max_response_tokens)
                with precision(args, model.device):
                    loss, sums, ratio = pass_loss(model, batch, weight, args)
                loss.backward()
                totals = {name: totals[name] + value for name, value in sums.items()}
                ratios.append(ratio)
            norms.append(plain(torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)))
            if not torch.isfinite(norms[-1] + totals["train/policy_loss"]):
                raise FloatingPointError(f"loss {loss.item()}, gradient norm {float(norms[-1])}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            num_seen += num_tokens
    sums, largest = total(torch.stack([*totals.values()])), torch.stack(ratios).max().double()
    if UNDER_TORCHRUN:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    extremes = torch.stack([torch.stack(norms).mean().double(), largest])
    *values, grad_norm, ratio_max = torch.cat([sums, extremes]).tolist()  # one host transfer
    metrics = {name: value / (len(norms) if name == "train/policy_loss" else num_seen)
               for name, value in zip(totals, values, strict=True)}
    return metrics | {"train/grad_norm": grad_norm, "mismatch/ratio_max": ratio_max}, len(norms)


UPDATE_METRICS = ("train/policy_loss", "train/kl_loss", "train/entropy", "train/clipfrac", "train/approx_kl",
                  "train/advantage", "kl/k1", "mismatch/kl", "mismatch/frac_capped")


# Evaluate: the same rollout on held-out tasks, no update, fixed seeds


def evaluate(engine, tokenizer, env, args, pool, score):
    """pass@1 and pass@n at --eval-temperature, greedy accuracy, by source.  -> metrics, sampled Rollouts."""
    n = args.eval_samples
    mine = share(min(args.eval_tasks, env.num_tasks("test")))
    tasks = [env.task("test", index) for index in mine]
    torch.manual_seed(args.seed + rank())  # vLLM's draws, the same at every evaluation
    sampled, greedy = (
        rollout(engine, tokenizer, env, tasks, samples, temperature, args, pool, score, "val", mine.start)
        for samples, temperature in ((n, args.eval_temperature), (1, 0.0)))
    if failed := sum(r.termination == "error" for r in sampled + greedy):
        tqdm.write(f"evaluation: {failed} of {len(sampled + greedy)} episodes are incorrect because their "
                   "environment failed", sys.stderr)
    metrics = {}
    for source in sorted({r.task.source for r in greedy}):
        mine = [r for r in sampled if r.task.source == source]
        correct = np.array([r.correct for r in mine]).reshape(-1, n)                     # (tasks, n)
        parts = {name for r in mine for name, value in r.info.items() if not isinstance(value, str)}
        for part in sorted(parts):
            metrics[f"val/{source}/{part}"] = float(np.mean([r.info.get(part, 0.0) for r in mine]))
        metrics[f"val/{source}/pass@1"] = float(correct.mean())
        metrics[f"val/{source}/pass@{n}"] = float(correct.max(1).mean())
        greedily = [r.correct for r in greedy if r.task.source == source]
        metrics[f"val/{source}/greedy"] = float(np.mean(greedily))
    return metrics, sampled


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


class HealthMonitor(threading.Thread):
    """Looks after what environments leave behind: child processes and temporary folders; `latest` is logged.

    Over a limit an error line goes to the log. Training goes on, whatever happens here.
    """

    LIMITS = {"system/child_processes": 256, "system/temporary_space": 50.0}  # processes, [GiB]
    WARNING, STALE = 0.8, 3600.0  # share of a limit; age of a folder [s]

    def __init__(self, log, every):
        super().__init__(name="health", daemon=True)
        self.log, self.every, self.ended, self.latest, self.told = log, every, threading.Event(), {}, {}
        if every:
            self.look()
            self.start()

    def run(self):
        while not self.ended.wait(self.every):
            self.look()

    def close(self):
        self.ended.set()
        if self.every:
            self.join(10)

    def look(self):
        try:
            self.latest = self.measure()
            for name, limit in self.LIMITS.items():
                self.judge(name, self.latest[name], limit)
        except Exception as error:
            tqdm.write(f"the health monitor failed: {error!r}", sys.stderr)

    def measure(self):
        children = len(psutil.Process().children(recursive=True))
        folders = [path for path in Path(tempfile.gettempdir()).glob("envs-*") if path.is_dir()]
        size, stale = 0, []
        for path in (Path(place, name) for folder in folders for place, _, names in os.walk(folder)
                     for name in names):
            with contextlib.suppress(OSError):  # what was listed may be gone
                size += path.lstat().st_blocks * 512
        for folder in folders:
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > self.STALE:
                    stale.append(folder)
        used = [Path(p.info["cwd"]) for p in psutil.process_iter(["cwd"]) if p.info["cwd"]] if stale else []
        stale = [folder for folder in stale if not any(path.is_relative_to(folder) for path in used)]
        if len(stale) > self.told.get("stale", 0):
            tqdm.write(f"health: {len(stale)} work folders left behind, {stale[0]} among them", sys.stderr)
        self.told["stale"] = len(stale)
        return {"system/child_processes": children, "system/temporary_space": size / 2**30,
                "system/stale_folders": len(stale)}

    def judge(self, name, value, limit):
        """Tell once, when a number comes near its limit and when it passes it."""
        level = (value > self.WARNING * limit) + (value > limit)
        if level > self.told.get(name, 0):
            message = f"{name} is {value:g}, {'over' if level == 2 else 'near'} the limit of {limit:g}"
            tqdm.write(f"health: {message}", sys.stderr)
            if level == 2:
                error = dict(type="HealthError", message=message, receipt=None)
                self.log.write({"trace_id": self.log.trace_id, "error": error})
        self.told[name] = level


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


def write_episodes(run, kind, rollouts, args, tokenizer, table_rows=0):
    """episodes/<kind>_step_<iteration>/: some of the episodes, a summary that adds up, a table of samples."""
    folder = run.dir / "episodes" / f"{kind}_step_{run.counters['iteration']:06d}"
    # In validation always the same ones, so that checkpoints can be compared.
    draw = kind if kind == "val" else folder.name
    chosen = [r for r in rollouts
              if zlib.crc32(f"{draw} {r.task.id} {r.number}".encode()) / 2**32 < args.log_episodes]
    table = [dict(prompt=r.task.messages[-1]["content"], response=r.messages[-1]["content"], reward=r.reward,
                  is_correct=r.correct, data_source=r.task.source, metrics_json=json.dumps(finite(r.info)))
             for r in rollouts[:table_rows * args.eval_samples:args.eval_samples]]
    if not chosen and not table:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for r in chosen:
        name = re.sub(r"[^\w.-]", "_", r.task.id, flags=re.ASCII)[:80]  # an id may hold anything
        name += "" if name == r.task.id else f"_{sha256(r.task.id)[:8]}"
        episode = json.dumps(finite(describe_episode(r, tokenizer)), indent=1, allow_nan=False)
        (folder / f"{name}_{r.number}.json").write_text(episode)
    path = folder / "summary.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    new = dict(episodes=len(rollouts), reward_sum=sum(r.reward for r in rollouts),
               correct_sum=sum(r.correct for r in rollouts), files=len(chosen))
    replace_file(path, json.dumps({name: old.get(name, 0) + value for name, value in new.items()}).encode())
    if table:
        replace_file(folder / "table.json", json.dumps(table, indent=1).encode())
        cells = [list(table[0]), ["---"] * len(table[0]), *(row.values() for row in table)]
        rows = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in cells]
        markdown = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        run.writer.add_text("val/samples", markdown, run.counters["iteration"])


def describe_episode(r, tokenizer):
    """An episode as it is written, its sub-agents within it; of each reply the tokens that were sampled."""
    turns = []
    for (number, start, end), step in itertools.zip_longest(r.turns, r.steps):
        segment = r.segments[number]
        turns.append(dict(reward=step.reward if step else 0.0, logprobs=segment.rollout_logprobs[start:end],
                          tokens=token_texts(segment.response_ids[start:end], tokenizer)))
    return dict(task_id=r.task.id, source=r.task.source, number=r.number, reward=r.reward, correct=r.correct,
                info=r.info, termination=r.termination, retries=r.retries, messages=r.messages, turns=turns,
                segments=[dataclasses.asdict(segment) for segment in r.segments],
                sub_agents=[describe_episode(child, tokenizer) for child in r.children])


def token_texts(ids, tokenizer):
    """The text, cut into what each token adds to it as far as that can be told."""
    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    text, position, ends = decode(ids), 0, [0]
    for end in range(1, len(ids) + 1):
        near = ids[max(end - 32, 0):end]  # how a token joins on is decided here; to decode all is quadratic
        position += len(decode(near)) - len(decode(near[:-1]))  # of half a character, the length is a guess
        ends.append(max(ends[-1], min(position, len(text))) if end < len(ids) else len(text))
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def finite(value):
    """JSON has no NaN and no infinity: None in their place, at any depth."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_samples(rollouts, args, title):
    """Prompt, reply and reward of some episodes, in colours."""
    for r in rollouts[::max(1, len(rollouts) // max(args.print_samples, 1))][:args.print_samples]:
        reply = "\n".join(message["content"] for message in r.messages[len(r.task.messages):])
        tqdm.write(f"\033[2m{title} {r.task.id}\033[0m \033[34m{r.task.messages[-1]['content']}\033[0m "
                   f"\033[{'32' if r.correct else '33'}m{reply}\033[0m reward {r.reward:g} ({r.termination})")


def spread(name, values):
    """{name/mean, name/max, name/min}, zeros when there is nothing."""
    return {f"{name}/{of.__name__}": float(of(values)) if values else 0.0 for of in (np.mean, np.max, np.min)}


def rollout_metrics(rollouts, seconds):
    """What the log says of an iteration's episodes; those whose environment failed are but counted."""
    played = [r for r in rollouts if r.termination != "error"]
    rewards, num_played = [r.reward for r in played], max(len(played), 1)
    shares = {end: sum(r.termination == end for r in rollouts) / len(rollouts) for end in TERMINATIONS}
    return {
        "train/reward": sum(rewards) / num_played,
        "train/pass@1": sum(r.correct for r in played) / num_played,
        **spread("critic/score", rewards), **spread("critic/rewards", rewards),
        **spread("response_length", [sum(len(s.response_ids) for s in r.segments) for r in played]),
        "response_length/clip_ratio": shares["length"] + shares["context"],
        **spread("prompt_length", [len(r.segments[0].prompt_ids) for r in played]),
        "rollout/throughput": num_generated(rollouts) / seconds, "rollout/finished": shares["done"],
        "rollout/turns": sum(len(r.turns) for r in played) / num_played,
        "rollout/retries": sum(r.retries for r in rollouts),
        "rollout/sub_agents": sum(len(r.family) - 1 for r in played) / num_played,
        **{f"rollout/termination/{end}": share for end, share in shares.items()}}


def num_generated(rollouts):
    """Tokens that the policy chose, its sub-agents' included."""
    return sum(sum(segment.response_mask) for r in rollouts for member in r.family
               for segment in member.segments)


# Main: set-up, then the loop


def task_index(cursor, seed, num_tasks):
    """The cursor-th task of training: a new permutation of all tasks in each epoch."""
    epoch, offset = divmod(cursor, num_tasks)
    return int(permutation(seed * 1_000_003 + epoch, num_tasks)[offset])


@functools.lru_cache(2)
def permutation(seed, size):
    return np.random.default_rng(seed).permutation(size)


def learning_rate(iteration, args):
    """Linear warm-up, then linear decay to a share of the peak, reached in the last iteration."""
    warm = min(1.0, iteration / max(args.warmup_iterations, 1))
    progress = (iteration - args.warmup_iterations) / max(args.iterations - args.warmup_iterations, 1)
    return args.learning_rate * warm * (1 - (1 - args.final_learning_rate) * min(max(progress, 0.0), 1.0))


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
    torch.set_num_threads(args.threads)
    Preempted.listen()
    device = start_processes(args)
    if args.engine == "vllm" and not args.vllm_url:
        import_vllm(device)
    env = envs.make(args.env, **envs.parse_options(args.env_kwargs))
    score = envs.load_object(args.reward_fn, "--reward-fn") if args.reward_fn else episode_reward
    tokenizer = load_tokenizer(args.model)
    check_template(tokenizer, args, env.multi_turn)
    frozen = args.lora and args.dtype == "bfloat16"
    base = load_weights(args.model, torch.bfloat16 if frozen else torch.float32)
    model_hash = weights_sha256(base)
    if args.lora_adapter_path:
        model_hash = sha256(model_hash + adapter_sha256(args.lora_adapter_path))
    run = Run(args, describe_run(args, "grpo", model_hash, envs.source_of(score)))
    if args.lora:
        torch.manual_seed(args.seed)
        model = add_lora(base, args, run.checkpoint)
    else:
        model = load_weights(run.checkpoint) if run.checkpoint else base
    model = shard(model, device)
    engine = make_engine(model, tokenizer, args, run.dir / "sync")
    reference = shard(load_weights(args.model), device) if args.kl_coef and not args.lora else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, args.beta2), fused=True,
                                  weight_decay=args.weight_decay)
    cursor, unlogged = 0, {}  # tasks drawn so far; numbers of an iteration that is trained but not logged yet
    if run.state:
        load_optimizer(optimizer, run.state["optimizer"])
        cursor, unlogged = run.state["cursor"], run.state["unlogged"]
    start_tracking(run, args)
    run.open()
    say(f"{run.dir}\n{args.prompts_per_iteration} prompts x {args.group_size} responses = "
          f"{args.prompts_per_iteration * args.group_size} episodes an iteration; "
          f"{args.epochs * args.minibatches} optimiser step(s) on them in passes of {args.microbatch_tokens} "
          f"tokens; {sum(p.numel() for p in parameters):,} trained weights on {device}"
          + (f"; continuing after iteration {run.counters['iteration']}" if run.state else ""))
    pool, health = EnvThreads(args.env_threads), HealthMonitor(run, 0 if rank() else args.health_every)
    progress = tqdm(total=args.iterations, initial=run.counters["iteration"], disable=bool(rank()) or None,
                    unit="it")
    rollouts, saved = [], run.counters["iteration"]
    gc.collect()
    gc.freeze()  # what is there now stays; the collector, woken by many small lists, need not walk it again

    handed = itertools.count(1)

    def hand_over():
        with run.timed("sync"):
            together(lambda: engine.sync_weights(model))
            if args.engine != "hf" and (next(handed) <= 2 or args.check_sync):
                difference = max(together(lambda: check_sync(engine, model, tokenizer, args)))
                say(f"sampler and trainer differ by {difference:.1g} nats per token")

    def validate():
        with run.timed("eval"):
            metrics, samples = evaluate(engine, tokenizer, env, args, pool, score)
        if rank() == 0:
            write_episodes(run, "val", samples, args, tokenizer, args.val_table_samples)
            print_samples(samples, args, "val")
        shown = [f"{name[4:]} {value:.3f}" for name, value in metrics.items()
                 if "@" in name or "greedy" in name]
        say(f"iteration {run.counters['iteration']}: {', '.join(shown)}")
        return metrics

    def save():
        nonlocal saved
        with run.timed("checkpoint"):
            state = dict(cursor=cursor, optimizer=optimizer_state(optimizer), unlogged=unlogged)
            run.save(model, tokenizer, state)
        saved = run.counters["iteration"]

    def finish(iteration):
        last = iteration == args.iterations
        if last or args.eval_every and iteration % args.eval_every == 0:
            unlogged.update(validate())
        run.record(unlogged | health.latest)
        unlogged.clear()
        if last or iteration % args.checkpoint_every == 0:
            save()

    try:
        hand_over()
        if not run.state:
            run.record(validate() | health.latest)
        if unlogged:  # the run ended when its weights could not be handed over
            finish(run.counters["iteration"])
        for iteration in range(run.counters["iteration"] + 1, args.iterations + 1):
            seed = args.seed * 1_000_003 + iteration  # a resume needs no generator's state
            torch.manual_seed(seed + rank() * 2**40)  # vLLM's draws

            # 1. Rollout: group_size responses to each prompt, from the current policy.
            # 2. Advantages: each reward against its group's.
            rollouts, groups, drawn = [], [], cursor
            mine = share(args.prompts_per_iteration)
            with run.timed("rollout"):
                for _ in range(1 + args.dynamic_sampling):
                    tasks = [env.task("train", task_index(drawn + i, args.seed, env.num_tasks("train")))
                             for i in mine]
                    rollouts += rollout(engine, tokenizer, env, tasks, args.group_size, args.temperature,
                                        args, pool, score, "train", drawn + mine.start)
                    drawn += args.prompts_per_iteration
                    groups = trainable_groups(rollouts, args)
                    if len(groups) >= args.prompts_per_iteration:
                        break
            num_groups, num_trainable = len(rollouts) // args.group_size, len(groups)
            groups = [group for group in groups if group][:args.prompts_per_iteration]

            # 3. Old log-probabilities, where the policy moves within the iteration.
            # 4. Update: sums over tokens divided by the minibatch's token count, so that the gradient does
            #    not depend on how the minibatch is cut into passes.
            metrics, steps = dict.fromkeys([*UPDATE_METRICS, "train/grad_norm", "mismatch/ratio_max"], 0.0), 0
            for parameter_group in optimizer.param_groups:
                parameter_group["lr"] = learning_rate(iteration, args)
            torch.manual_seed(seed)  # of the order of the groups, the same in all processes
            with run.timed("update"):
                if groups:
                    engine.sleep()
                    metrics, steps = update(model, reference, optimizer, groups, args, tokenizer.pad_token_id)
                metrics["train/weight_norm"] = float(plain(torch.nn.utils.get_total_norm(parameters)))

            # 5. What the log says of the iteration.
            cursor, run.counters["iteration"] = drawn, iteration
            run.counters["env_steps"] += num_generated(rollouts)
            run.counters["opt_steps"] += steps
            trained = [segment.advantage for group in groups for segment in group]
            metrics |= rollout_metrics(rollouts, run.times["rollout"])
            metrics |= spread("critic/advantages", trained) | spread("critic/returns", trained)
            metrics |= {"train/learning_rate": learning_rate(iteration, args),
                        "train/global_step": run.counters["opt_steps"],
                        "rollout/groups_submitted": num_groups, "rollout/groups_trainable": num_trainable,
                        "rollout/groups_incomplete": len({n // args.group_size for n, r in enumerate(rollouts)
                                                          if r.termination == "error"})}
            if iteration == 1:
                shown = rollouts[0].segments[0]
                say(f"first prompt {tokenizer.decode(shown.prompt_ids)!r}, first response "
                    f"{tokenizer.decode(shown.response_ids)!r}")
            if metrics["rollout/termination/error"] == 1:
                say(f"iteration {iteration}: the environment failed in every episode, so nothing is learned",
                    sys.stderr)
            if rank() == 0:
                print_samples(rollouts, args, "train")
                write_episodes(run, "train", rollouts, args, tokenizer)
            shown = {"reward": metrics["train/reward"], "pass@1": metrics["train/pass@1"],
                     "grad": metrics["train/grad_norm"], "trainable": num_trainable / num_groups}
            shown = {name: f"{value:.3f}" for name, value in shown.items()}
            progress.set_postfix(shown, refresh=False)
            progress.update()
            if progress.disable:
                say(f"{iteration}/{args.iterations} " + " ".join(f"{name} {n}" for name, n in shown.items()))
            unlogged.update(metrics)

            # 6. Hand the new weights to the sampler; evaluate, log, checkpoint.
            if steps:
                hand_over()
            finish(iteration)
    except Preempted:
        iteration = run.counters["iteration"]
        if unlogged or saved < iteration:
            save()
        say(f"SIGTERM: stopped after iteration {iteration}, which is saved; to go on, give the same command "
            f"with --run-dir {run.dir}" if iteration else "SIGTERM: stopped in the first iteration")
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, EngineError) and run.counters["iteration"]:
            save()  # the trainer is whole: only the rollout is lost
        evidence = [dict(task_id=r.task.id, messages=r.messages, reward=r.reward) for r in rollouts[:64]]
        run.fail(error, evidence)
    finally:
        health.close()
        pool.close()
        engine.close()
        progress.close()
        run.close()
        Preempted.forget()
    end_processes()


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (BadInput, EngineError) as problem:
        sys.exit(f"error: {problem}" if Peers.tell() else 1)
