"""PPO with a learned critic: policy gradients for language models with verifiable rewards.

A critic reads the same tokens as the policy and estimates the reward to come before each response token:

    A_t = sum_l (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l)            GAE, arXiv:1506.02438 eq. 16
    L   = - mean_t min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)          PPO, arXiv:1707.06347 eq. 7
    L_V = 1/2 mean_t max((V - R)^2, (V_old + clip(V - V_old) - R)^2)        R_t = A_t + V_old,t

Where grpo_llm.py compares several responses to the same prompt, this asks for one response to each of many
prompts; `diff grpo_llm.py ppo_llm.py` shows what this changes. Rewards come at the end of each turn, a
penalty for leaving the starting model at every token (--kl-coef), as in arXiv:1909.08593; advantages are
whitened over the batch. Where the defaults differ from that paper: no penalty, a small entropy bonus, and a
critic with a backbone, learning rate and minibatches of its own, fitted before the policy and alone in the
first iterations.

    python ppo_llm.py                                # Countdown on a laptop CPU, offline, under three minutes
    python ppo_llm.py --critic shared                # a value head on the policy's own last layer
    python ppo_llm.py --model Qwen/Qwen2.5-1.5B-Instruct --engine vllm --lora-rank 16 \
        --env-kwargs style=r1 max_operands=4 max_number=100 max_target=1000 operators=+-*/ \
        --max-response-tokens 1024

Expect held-out greedy accuracy to climb from 0.61 to 0.99 and pass@1 at temperature 1 from 0.31 to 0.96,
while pass@16 ends at 0.99 or more. With --run-dir DIR the same command continues a stopped run.
"""

import asyncio
import atexit
import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from dotenv import load_dotenv

if __name__ == "__main__":
    load_dotenv(".env")  # before the libraries below read HF_HOME; a variable that is set already stays

import numpy as np
import peft
import psutil
import pydantic.dataclasses
import requests
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import transformers
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

import envs
from envs import BadInput, as_bad_input, first_line
from envs.chat import check_calls, check_template, encode_within, opened_thought, parse_reply, rendered
from envs.files import flush_to_disk, sha256, take_lock

Share = Annotated[float, Field(ge=0, le=1)]


# Pydantic checks types and ranges, and refuses infinity and NaN; tyro prints what is wrong.
@pydantic.dataclasses.dataclass(
    frozen=True, config=dict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True))
class Args:
    # Task
    env: str = "countdown"  # a name that envs.make knows, path/to/file.py:Class, or several with commas
    env_kwargs: tuple[str, ...] = ()  # its options, as key=value; in a mixture, name.key=value
    reward_fn: str = ""  # path/to/file.py:name of a function to use in place of episode_reward

    # Model
    model: str = "models/countdown-tiny"  # folder or hub id of the causal language model to start from
    chat_template: str = "model"  # model: the tokenizer's; plain: the bare texts; or a file with a template
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the passes; trained weights stay float32
    lora_rank: NonNegativeInt = 0  # rank of the LoRA adapters; 0 trains all weights
    lora_alpha: PositiveInt = 32  # LoRA scale: an adapter's output is multiplied by alpha / rank
    lora_target_modules: str = "all-linear"  # modules to adapt: all-linear, or names with commas
    lora_adapter_path: str = ""  # folder of a PEFT adapter to train further; replaces the three flags above
    gradient_checkpointing: bool = False  # keep one activation per layer: less memory, a third more time

    # Engine
    engine: Literal["hf", "vllm"] = "hf"  # hf samples with the trained weights, vllm with a copy of them
    # running servers to sample from, such as http://127.0.0.1:8000, in place of vLLM in this process
    vllm_url: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")], ...] = ()
    vllm_kwargs: tuple[str, ...] = ()  # more arguments of vllm.LLM, as key=value: gpu_memory_utilization=0.6

    # The three sizes: of a rollout and of a pass
    prompts_per_iteration: PositiveInt = 512  # different prompts in an iteration
    group_size: PositiveInt = 1  # responses sampled per prompt; the critic is the baseline, so one is enough
    microbatch_tokens: PositiveInt = 4096  # tokens per pass, padded [tokens]; affects memory, not gradients

    # Rollout
    max_response_tokens: PositiveInt = 16  # longest reply in one turn, eos included [tokens]
    max_context_tokens: PositiveInt = 4096  # prompt and response; a longer history loses old turns [tokens]
    temperature: PositiveFloat = 1.0  # sampling temperature; the trainer divides its logits by it too
    max_concurrent: NonNegativeInt = 0  # episodes at once, without sub-agents; 0: all (of agents: 256)
    max_turns: NonNegativeInt = 0  # replies after which an episode ends; 0: the environment's own limit
    episode_timeout: NonNegativeFloat = 0.0  # time limit of an episode; 0: none [s]
    train_sub_agents: bool = False  # train the sub-agents that episodes call, too, with their reward

    # Optimisation
    seed: Annotated[int, Field(ge=0, lt=2**40)] = 1  # of all that is random; 1_000_003 * seed fits 64 bits
    iterations: NonNegativeInt = 160  # rollouts, each followed by its updates; 0 evaluates the model and ends
    epochs: PositiveInt = 1  # passes of the policy over an iteration's responses
    minibatches: PositiveInt = 4  # the policy's optimiser steps per epoch, of one episode or more
    target_kl: NonNegativeFloat = 0.0  # KL(old || policy) that ends its updates; 0: no limit [nats/token]
    learning_rate: PositiveFloat = 5e-4  # peak learning rate of the policy's AdamW
    warmup_iterations: NonNegativeInt = 10  # linear warm-up, from a rate's first update [iterations]
    final_learning_rate: Share = 0.1  # share of the peak that the linear decay ends at; 1 keeps it constant
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # AdamW's second decay rate; the first is 0.9

    # Critic
    critic: Literal["own", "shared", "none"] = "own"  # a backbone of its own; a head on the policy's; V = 0
    critic_warmup: NonNegativeInt = 10  # first iterations, which train an own critic alone [iterations]
    critic_epochs: PositiveInt = 1  # passes of a critic of its own over an iteration's responses
    critic_minibatches: PositiveInt = 16  # its optimiser steps per epoch
    critic_learning_rate: PositiveFloat = 1e-3  # peak learning rate of its AdamW
    critic_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99  # its second decay rate

    # Loss
    gae_lambda: Share = 0.95  # GAE's lambda: 1 uses the returns alone, less relies on the critic
    clip: Share = 0.2  # the ratio is clipped at 1 - this and at 1 + this
    # penalty in the reward of each token, per nat from the starting model; 0 loads no reference [1/nats]
    kl_coef: NonNegativeFloat = 0.0
    # its estimate: logprobs - ref_logprobs; or k3, never negative, which in a reward hardly pulls back
    kl_penalty: Literal["k1", "k3"] = "k1"
    kl_target: NonNegativeFloat = 0.0  # KL that the coefficient is adapted to; 0: it is fixed [nats/token]
    entropy_coef: NonNegativeFloat = 0.04  # weight of the entropy bonus [1/nats]

    # Evaluation
    eval_every: NonNegativeInt = 20  # iterations between evaluations [iterations]; 0: only first and last
    eval_tasks: PositiveInt = 512  # held-out tasks, always the same ones
    eval_samples: PositiveInt = 16  # responses per task, for pass@1 and pass@n
    eval_temperature: PositiveFloat = 1.0  # of pass@1 and pass@n; greedy decoding is measured beside it

    # Log
    experiment: str = "ppo"  # runs/<experiment>/ holds the run
    run_dir: str = ""  # the run's folder; one that holds a checkpoint is continued (default: a new one)
    checkpoint_every: PositiveInt = 20  # iterations between checkpoints [iterations]
    keep_checkpoints: NonNegativeInt = 2  # newest regular ones to keep beside the last one; 0: all
    log_episodes: Share = 0.001  # share of the episodes written to episodes/
    print_samples: NonNegativeInt = 0  # sample episodes to print at each rollout and evaluation

    def __post_init__(self):
        if self.kl_target and not self.kl_coef:
            raise BadInput(f"--kl-target {self.kl_target}: needs a --kl-coef to start from")
        if self.lora_rank and self.lora_adapter_path:
            raise BadInput(f"--lora-rank {self.lora_rank}: the adapter of --lora-adapter-path has its own")
        if (self.vllm_url or self.vllm_kwargs) and self.engine != "vllm":
            raise BadInput("--vllm-url and --vllm-kwargs need --engine vllm")
        if self.vllm_url and self.vllm_kwargs:
            raise BadInput("--vllm-kwargs: for vLLM in this process; servers of --vllm-url have their own")

    @property
    def may_change(self) -> set[str]:
        """Flags that a continued run may change, since they do not affect what is learned."""
        flags = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints", "log_episodes",
                 "print_samples", "max_concurrent", "vllm_url", "vllm_kwargs"}
        if self.final_learning_rate == 1:  # else the learning rate depends on the number of iterations
            flags.add("iterations")
        return flags

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained and the base model frozen."""
        return bool(self.lora_rank or self.lora_adapter_path)


# The defaults of a model with REAL_SIZE weights or more; those above would destroy it in two updates.
REAL_SIZE = 20_000_000
REAL_MODEL = dict(
    gradient_checkpointing=True, prompts_per_iteration=64, microbatch_tokens=8192, max_response_tokens=512,
    critic_learning_rate=1e-5, gae_lambda=1.0,
    iterations=200, learning_rate=1e-6, entropy_coef=0.0, eval_every=20, eval_tasks=64, eval_samples=4,
    checkpoint_every=10, log_episodes=0.05)
REAL_LORA = dict(learning_rate=2e-5, critic_learning_rate=1e-4)  # with adapters


DISCOUNT = 1.0  # GAE's gamma, per token
VALUE_CLIP = 0.5  # how far from its old value a value may move before the clipped loss holds it [reward]
VALUE_COEF = 5.0  # of the value loss with --critic shared: large, as errors in [0, 1] are small
KL_GAIN = 0.1  # how fast the penalty's coefficient adapts: by a fifth of this at most
TIS_CAP = 2.0  # of the importance weight between sampler and trainer
MAX_GRAD_NORM = 1.0  # of policy and critic each


UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # it started this process
RANK, WORLD_SIZE = 0, 1
if UNDER_TORCHRUN:
    RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# Maths


def gae(rewards, values, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16). All (B, T), zeros after an end -> (B, T).

    A step is a token of the policy: tokens of the environment between two of them are no steps. The value
    after the last one is 0: a length limit counts as an end, since the task sets it.
    """
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    advantages = torch.empty_like(deltas)
    trace = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        trace = deltas[:, t] + gamma * lam * trace
        advantages[:, t] = trace
    return advantages


def masked_mean(x, mask):
    """Mean of x where mask is 1, over all processes; 0 where it never is.  x, mask (B, T) -> scalar"""
    total, count = all_reduce(torch.stack([(x * mask).sum(), mask.sum()]))
    return total / count.clamp(min=1)


def whiten(x, mask):
    """Zero mean and unit (population) variance where mask is 1, 0 elsewhere.  x, mask (B, T) -> (B, T)"""
    x = x - masked_mean(x, mask)
    variance = masked_mean(x.square(), mask)
    # The constant is large enough that rounding errors of equal advantages are not blown up to signals.
    return x * torch.rsqrt(variance + 1e-8) * mask


def k3(log_ratio):
    """Unbiased, non-negative estimator of KL(p || q) from samples of p; log_ratio = log q - log p."""
    return torch.expm1(log_ratio) - log_ratio  # expm1: exact where the ratio is nearly 1

def adapt_kl_coef(coef, kl, target):
    """The next coefficient of the penalty: a proportional controller (arXiv:1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + KL_GAIN * error)


def clipped_policy_loss(logprobs, old_logprobs, advantages, clip):
    """Loss of each token (arXiv:1707.06347, eq. 7), and whether it was clipped.  All (B, T)."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = clipped * advantages < ratio * advantages  # the minimum is the one without a gradient
    return per_token, is_clipped


def clipped_value_loss(values, old_values, returns, clip):
    """Squared error of each value, or that of a value at most clip away from the old one, if larger.

    As in the PPO paper's code (openai/baselines), not in its text. All (B, T).  -> errors, was it clipped
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    error = (values - returns).square()
    near_error = (near - returns).square()
    is_clipped = (near_error > error) & ((values - old_values).abs() > clip)
    return torch.maximum(error, near_error), is_clipped


def selected_logprobs(hidden, head, targets, temperature=1.0, chunk_elements=2**25):
    """Log-probabilities of the targets and entropies, in nats.  hidden (N, H), targets (N,) -> (N,), (N,).

    Logits exist for one chunk of tokens at a time, in float32: chunk_elements bounds tokens x vocabulary. The
    backward pass recomputes each chunk, so memory does not grow with N x vocabulary.
    """
    def of_chunk(hidden, targets):
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)  # (n, V)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    vocabulary = len(head.weight)
    size = max(1, chunk_elements // vocabulary)
    if len(targets) <= size:
        return of_chunk(hidden, targets)
    logprobs, entropies = [], []
    for chunk in zip(hidden.split(size), targets.split(size), strict=True):
        selected, entropy = torch.utils.checkpoint.checkpoint(of_chunk, *chunk, use_reentrant=False)
        logprobs.append(selected)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)

def learning_rate(peak, iteration, start, args):
    """0 before iteration `start`, linear warm-up from there, then linear decay to a share of the peak."""
    done = iteration - start + 1
    total = args.iterations - start + 1
    warm = min(max(done / max(args.warmup_iterations, 1), 0.0), 1.0)
    progress = (done - args.warmup_iterations) / max(total - args.warmup_iterations, 1)
    progress = min(max(progress, 0.0), 1.0)
    decay = 1 - (1 - args.final_learning_rate) * progress
    return peak * warm * decay


# Update: scored episodes to a gradient


@dataclasses.dataclass(slots=True)
class Segment:
    """A prompt, and sampled and environment tokens after it; all lists but prompt_ids have equal length."""

    prompt_ids: list[int]
    response_ids: list[int] = dataclasses.field(default_factory=list)
    response_mask: list[int] = dataclasses.field(default_factory=list)  # 1: sampled; 0: environment's
    rollout_logprobs: list[float] = dataclasses.field(default_factory=list)  # [nats]; 0 where mask is 0
    rewards: list[float] = dataclasses.field(default_factory=list)  # at each turn's last token
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    advantages: list[float] | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    def append(self, ids, mask, logprobs):
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.rollout_logprobs += logprobs
        self.rewards += [0.0] * len(ids)
        assert len(self.response_ids) == len(self.response_mask) == len(self.rollout_logprobs)


# The fields of Segment that become tensors (B, T) of a pass, where they are known.
PER_TOKEN = ("response_mask", "rollout_logprobs", "old_logprobs", "advantages", "values", "returns")

def trainable_episodes(rollouts, args):
    """The segments of each episode that hold sampled tokens, without episodes whose environment failed. With
    --train-sub-agents a sub-agent is an episode of its own, with its parent's reward; in a game that the
    policy plays with itself, with its seat's.
    """
    episodes = []
    for r in rollouts:
        if not math.isfinite(r.reward):
            raise FloatingPointError(f"the reward of task {r.task.id} is {r.reward}: --reward-fn")
        for member in r.family if args.train_sub_agents or r.seat_rewards else [r]:
            segments = [segment for segment in member.segments if any(segment.response_mask)]
            if segments and "error" not in (r.termination, member.termination):
                episodes.append(segments)
    return episodes


def microbatches(segments, args, device):
    """Sort this rank's segments by length and cut them into passes of at most --microbatch-tokens, prompts
    and padding included.  Yields (segments, their tensors).

    Tensors: prompts (B, P), padded with -1 on the left; responses, on the right, and what is known, (B, T).
    A rank that has fewer passes than others adds some of weight 0, since FSDP2's forward is collective.
    """
    parts = [[]]  # the segments of each pass
    prompt, response = 0, 0  # the longest ones of the last one
    for segment in sorted(segments, key=lambda segment: len(segment.ids)):
        prompt = max(prompt, len(segment.prompt_ids))
        response = max(response, len(segment.response_ids))
        num_tokens = (len(parts[-1]) + 1) * (prompt + response)
        if parts[-1] and num_tokens > args.microbatch_tokens:
            parts.append([])
            prompt, response = len(segment.prompt_ids), len(segment.response_ids)
        parts[-1].append(segment)
    parts = [part for part in parts if part]
    nothing = Segment([0], response_ids=[0], response_mask=[0], rollout_logprobs=[0.0])
    num_passes = max(gather([len(parts)]))
    while len(parts) < num_passes:
        parts.append([nothing])
    for part in parts:
        batch = dict(prompts=pad([s.prompt_ids for s in part], -1, device, left=True),
                     responses=pad([s.response_ids for s in part], -1, device))
        for name in PER_TOKEN:
            rows = [getattr(s, name) or [0.0] * len(s.response_ids) for s in part]  # 0: not known yet
            batch[name] = pad(rows, 0, device, dtype=torch.float32)
        yield part, batch


def hidden_states(decoder, batch):
    """The decoder's state at the position before each response token, which predicts it.  -> (rows, T, H)"""
    prompts, responses = batch["prompts"], batch["responses"]  # (rows, P), (rows, T)
    tokens = torch.cat([prompts, responses[:, :-1]], 1)  # (rows, P + T - 1)
    valid = (tokens >= 0).long()  # padding is -1
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    hidden = decoder(input_ids=tokens.clamp(min=0), attention_mask=valid, position_ids=positions,
                     use_cache=False).last_hidden_state
    return hidden[:, prompts.shape[1] - 1:]  # the shift by one, here and nowhere else


def token_logprobs(model, batch, temperature):
    """Log-probability and entropy of each response token; the state before it.  -> two (B, T), (B, T, H)."""
    is_sampled = batch["response_mask"].bool()  # (B, T)

    def in_rows(values):
        """Values of the sampled tokens of all rows, one after the other (N,) -> (B, T), 0 elsewhere."""
        rows = torch.zeros(is_sampled.shape, dtype=values.dtype, device=is_sampled.device)
        return rows.masked_scatter(is_sampled, values)

    def of_pass():
        hidden = hidden_states(model.get_decoder(), batch)  # (B, T, H)
        logprobs, entropies = selected_logprobs(hidden[is_sampled], model.get_output_embeddings(),
                                                batch["responses"][is_sampled], temperature)
        return in_rows(logprobs), in_rows(entropies), hidden

    return model.as_forward(of_pass)  # distribute() defines it: FSDP2 gathers the weights


class Critic(torch.nn.Module):
    """V before each response token [reward]: a linear head, zero at first, on the states of a decoder."""

    def __init__(self, policy, backbone, args):
        """backbone: a copy of the starting model, not adapted yet, for --critic own; else None."""
        super().__init__()
        self.decoder = None
        if backbone:
            if args.lora:
                backbone = add_lora(backbone, args)
            self.decoder = backbone.get_decoder()
        self.head = torch.nn.Linear(policy.get_output_embeddings().weight.shape[1], 1)
        for weight in self.head.parameters():
            torch.nn.init.zeros_(weight).requires_grad_(args.critic != "none")  # of none they stay zero

    def forward(self, batch, hidden=None):
        """-> (B, T); at the environment's tokens as well, where the values mean nothing.

        hidden: the policy's states (B, T, H), which a critic reads that has no decoder of its own.
        """
        if self.decoder:
            hidden = hidden_states(self.decoder, batch)
        with torch.autocast(hidden.device.type, enabled=False):  # values need more than bfloat16's 8 bits
            return self.head(hidden.float()).squeeze(-1)

@torch.no_grad()
def store(model, critic, reference, episodes, args):
    """Write into the segments what the models compute for each response token before they are updated."""
    for part, batch in microbatches([*itertools.chain(*episodes)], args, model.device):
        known = {}
        with precision(args, model.device):
            known["old_logprobs"], _, hidden = token_logprobs(model, batch, args.temperature)
            known["values"] = critic(batch, hidden)
            if args.kl_coef:
                # The starting model: a copy, or the policy with its adapter switched off.
                with contextlib.nullcontext() if reference else model.disable_adapter():
                    known["ref_logprobs"], _, _ = token_logprobs(reference or model, batch, args.temperature)
        for name, rows in known.items():
            for segment, row in zip(part, rows.tolist(), strict=True):
                setattr(segment, name, row[:len(segment.response_ids)])


def sampled_tokens(episodes, name):
    """One number of each sampled token, an episode a row, whatever its segments.  -> (B, T) float64"""
    rows = []
    for segments in episodes:
        rows.append([])
        for s in segments:
            rows[-1] += itertools.compress(getattr(s, name), s.response_mask)
    return pad(rows or [[0.0]], 0, "cpu", dtype=torch.float64)


def store_sampled(episodes, name, rows):
    """The other way: write rows (B, T) into the segments, 0 at the environment's tokens."""
    for segments, row in zip(episodes, rows.tolist(), strict=False):  # one row of zeros without an episode
        numbers = iter(row)
        for s in segments:
            setattr(s, name, [next(numbers) if chosen else 0.0 for chosen in s.response_mask])


def estimate_advantages(episodes, kl_coef, args):
    """KL penalty, GAE and whitening: set the advantages and returns of all segments.  -> metrics

    All sampled tokens of an episode form one row, whatever its segments, so that GAE runs across its turns.
    Means and metrics are over all processes.
    """
    mask = sampled_tokens(episodes, "response_mask")  # (B, T), as all that follows
    old_logprobs = sampled_tokens(episodes, "old_logprobs")
    ref_logprobs = sampled_tokens(episodes, "ref_logprobs") if args.kl_coef else old_logprobs
    kl = dict(k1=old_logprobs - ref_logprobs, k3=k3(ref_logprobs - old_logprobs))
    rewards = sampled_tokens(episodes, "rewards") - kl_coef * kl[args.kl_penalty]
    values = sampled_tokens(episodes, "values")
    advantages = gae(rewards, values, DISCOUNT, args.gae_lambda)
    returns = advantages + values
    store_sampled(episodes, "advantages", whiten(advantages, mask))
    store_sampled(episodes, "returns", returns)

    mismatch = old_logprobs - sampled_tokens(episodes, "rollout_logprobs")
    means = {"train/kl_loss": kl["k3"], "kl/k1": kl["k1"], "mismatch/kl": k3(mismatch),
             "mismatch/frac_capped": torch.exp(mismatch) > TIS_CAP,
             "train/entropy": -old_logprobs}  # an estimate, which the policy's update replaces
    metrics = {name: float(masked_mean(x, mask)) for name, x in means.items()}
    metrics |= spread("critic/rewards", gather(rewards.sum(1).tolist()[:len(episodes)]))
    tokens = {}  # of all processes, one after the other
    for name, x in dict(advantages=advantages, returns=returns, values=values).items():
        tokens[name] = gather(x[mask > 0].tolist()) or [0.0]
        metrics |= spread(f"critic/{name}", tokens[name])
    # What the values leave unexplained of the returns is the advantages.
    unexplained = np.var(tokens["advantages"])
    variance = np.var(tokens["returns"])
    metrics["critic/vf_explained_var"] = 0.0
    if variance > 1e-12:
        metrics["critic/vf_explained_var"] = float(1 - unexplained / variance)
    return metrics | {"kl/coef": kl_coef}


def policy_terms(model, critic, batch, args):
    """The policy's loss of each token, and its metrics.  -> (B, T), {name: (B, T)}"""
    logprobs, entropy, hidden = token_logprobs(model, batch, args.temperature)  # (B, T), (B, T, H)
    old_logprobs, advantages = batch["old_logprobs"], batch["advantages"]
    per_token, clipped = clipped_policy_loss(logprobs, old_logprobs, advantages, args.clip)
    # Truncated importance sampling, for a sampler whose numerics differ.
    mismatch = torch.exp(old_logprobs - batch["rollout_logprobs"])
    per_token = per_token * mismatch.clamp(max=TIS_CAP)
    logged = {"train/policy_loss": per_token, "train/entropy": entropy, "train/clipfrac": clipped,
              "train/approx_kl": k3(logprobs - old_logprobs), "train/advantage": advantages}
    loss = per_token - args.entropy_coef * entropy
    if args.critic == "shared":  # it is trained in the same pass
        value_loss, measured = value_terms(critic(batch, hidden), batch)
        loss = loss + VALUE_COEF * value_loss
        logged |= measured
    return loss, logged


def value_terms(values, batch):
    """The critic's loss of each token, and its metrics.  -> (B, T), {name: (B, T)}"""
    errors, clipped = clipped_value_loss(values, batch["values"], batch["returns"], VALUE_CLIP)
    return errors / 2, {"train/value_loss": errors / 2, "critic/vf_loss": errors,
                        "critic/vf_clipfrac": clipped, "critic/vpred_mean": values}


def update(terms, optimizer, rate, episodes, epochs, minibatches, args):
    """All optimiser steps of an iteration, of the policy or of the critic. terms(batch) is its loss.

    -> metrics (means over tokens), gradient norm (mean over steps), number of steps
    """
    for parameter_group in optimizer.param_groups:
        parameter_group["lr"] = rate
    parameters = optimizer.param_groups[0]["params"]
    device = parameters[0].device
    totals = collections.defaultdict(float)  # sums over the tokens of all steps
    num_seen = 0  # those tokens
    norms = []  # of each step
    minibatches = min(minibatches, max(gather([len(episodes)])))
    orders = [torch.randperm(len(episodes)).tensor_split(minibatches) for _ in range(epochs)]
    for chosen in itertools.chain(*orders):
        segments = [*itertools.chain(*(episodes[index] for index in chosen.tolist()))]
        # Over the minibatch, however it is cut into passes and processes.
        num_tokens = int(all_reduce(torch.tensor(sum(sum(s.response_mask) for s in segments))))
        kl = torch.zeros((), dtype=torch.float64, device=device)
        for _, batch in microbatches(segments, args, device):
            mask = batch["response_mask"]
            with precision(args, device):
                per_token, logged = terms(batch)
                loss = (per_token * mask).sum() / num_tokens
            loss.backward()
            for name, value in logged.items():
                total = (value.detach() * mask).double().sum()
                totals[name] += total
                if name == "train/approx_kl":
                    kl += total / num_tokens
        num_seen += num_tokens
        if args.target_kl and all_reduce(kl) > args.target_kl:
            optimizer.zero_grad()
            break
        norms.append(full_tensor(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)))
        if not torch.isfinite(norms[-1] + loss):  # the sum is finite if both are
            raise FloatingPointError(f"loss {loss.item()}, gradient norm {float(norms[-1])}")
        optimizer.step()
        optimizer.zero_grad()
    means = all_reduce(torch.stack([*totals.values()])) / num_seen
    norm = float(torch.stack(norms).mean()) if norms else 0.0
    return dict(zip(totals, means.tolist(), strict=True)), norm, len(norms)


# Sampling: prompts to responses


class Sampling(NamedTuple):
    """How replies are sampled. Their random numbers depend on the seed alone, not on the batch."""

    temperature: float  # 0: greedy
    seed: tuple  # numbers and texts; those of two replies in a run differ


def uniform(seeds, count):
    """Random numbers in [0, 1), by SHAKE128 (FIPS 202) of each seed's text.  -> (seeds, count) float64"""
    data = b"".join(hashlib.shake_128(str(seed).encode()).digest(8 * count) for seed in seeds)
    bits = torch.frombuffer(bytearray(data), dtype=torch.int64).view(len(seeds), count)
    return (bits & (2**53 - 1)).double() * 2.0**-53  # float64 has 53 bits


def sample(logits, row, temperature, uniform_numbers):
    """A token for each response, the likeliest at temperature 0.  -> tokens, logprobs (B,).

    logits (rows, V), of which a response reads those of its `row` (B,); uniform_numbers (B,) float64 in
    [0, 1): one for each response.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)  # (rows, V)
    if not temperature:
        tokens = logprobs.argmax(-1)[row]
        return tokens, logprobs[row, tokens]
    # Inverse transform sampling: the first token whose cumulative probability exceeds a uniform number.
    # float64, since the sum over a large vocabulary would lose its tail in float32.
    cdf = logprobs.exp().double().cumsum(-1)[row]  # (B, V)
    thresholds = uniform_numbers[:, None] * cdf[:, -1:]  # the sum is 1 only up to rounding
    tokens = torch.searchsorted(cdf, thresholds, right=True)
    tokens = tokens.squeeze(1).clamp(max=cdf.shape[1] - 1)
    return tokens, logprobs[row, tokens]


def unique(lists):
    """-> the different lists, as tuples, in the order in which they first appear; the index of each list"""
    numbers = {}
    for ids in lists:
        numbers.setdefault(tuple(ids), len(numbers))
    return [*numbers], [numbers[tuple(ids)] for ids in lists]


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, temperature, eos, seeds, count=None):
    """Sample a response to each prompt (lists of ids), up to an id of eos.  -> [(response_ids, logprobs)]

    seeds: a text or a number for each response, on which alone its random numbers depend. count(replies) is
    told of those that a step has finished.
    Responses that are equal so far share a row of the batch and of the cache: a group's prompt is computed
    once, and so is every common prefix (without, late iterations of the default run take twice as long).
    Finished responses are removed once they are an eighth of the batch, since that copies the cache.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    device, vocabulary = model.device, len(head.weight)
    draws = uniform(seeds, max_new_tokens).to(device)  # (B, T)
    prompts, row = unique(prompts)
    # Of each response that has not been removed: its row, its index among all, and whether it has ended.
    row = torch.tensor(row, device=device)  # (live,)
    live = torch.arange(len(row), device=device)
    done = torch.zeros_like(row, dtype=torch.bool)
    tokens = pad(prompts, -1, device, left=True)  # (rows, P), later (rows, 1)
    mask = (tokens >= 0).long()  # (rows, all so far)
    tokens = tokens.clamp(min=0)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=decoder.config)
    ids = torch.full((len(row), max_new_tokens), -1, device=device)
    logprobs = torch.zeros(len(row), max_new_tokens, device=device)
    eos = torch.tensor(eos, device=device)
    num_done = 0
    for t in range(max_new_tokens):
        hidden = decoder(input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache,
                         use_cache=True).last_hidden_state[:, -1]  # (rows, H)
        if not cache.is_initialized:  # by a recurrent architecture, such as Mamba
            raise EngineError("sampling needs a cache of keys and values: this model has another")
        token, logprob = sample(head(hidden), row, temperature, draws[live, t])  # (live,)
        ids[live, t] = token.masked_fill(done, -1)
        logprobs[live, t] = logprob.masked_fill(done, 0.0)
        done = done | torch.isin(token, eos)
        was_done, num_done = num_done, int(done.sum())
        if count:
            count(num_done - was_done)
        if t + 1 == max_new_tokens or num_done == len(done):
            break
        if num_done > len(done) // 8:
            going_on = ~done
            live, row = live[going_on], row[going_on]
            token, done = token[going_on], done[going_on]
            num_done = 0
        # A new row for each different pair of an old row and a token; a pair is one number.
        pairs, row = torch.unique(row * vocabulary + token, return_inverse=True)
        parent = pairs // vocabulary  # (rows,): the old row of each new one
        tokens = (pairs % vocabulary)[:, None]
        if not torch.equal(parent, torch.arange(len(mask), device=device)):
            mask, position = mask[parent], position[parent]
            cache.reorder_cache(parent)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        position = position[:, -1:] + 1
    ids = ids[:, :t + 1]
    lengths = (ids >= 0).sum(1).tolist()
    rows = zip(ids.tolist(), logprobs.tolist(), lengths, strict=True)
    return [(tokens[:length], values[:length]) for tokens, values, length in rows]


# Rollout: tasks to scored token sequences, one coroutine per episode


@dataclasses.dataclass(eq=False, slots=True)
class Rollout:
    """One episode: its texts, its tokens (one segment, or more where the history forked) and its score."""

    task: envs.Task
    order: tuple  # number of the task, number in its group; a sub-agent's has its parent's in front
    prompt_text: str  # the rendered messages of the task
    prompt_ids: list[int]
    messages: list[dict] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    turns: list[tuple] = dataclasses.field(default_factory=list)  # (segment, start, end) of each reply
    steps: list[envs.Step] = dataclasses.field(default_factory=list)
    children: list["Rollout"] = dataclasses.field(default_factory=list)  # sub-agents
    # For `observe`: the text of the last segment up to the last reply; that reply, with the thought that its
    # prompt begins; the index of the first message after the task's that the segment holds.
    text: str = ""
    reply: str = ""
    start: int = 0
    termination: str = "timeout"  # one of TERMINATIONS
    retries: int = 0
    reward: float = 0.0

    def begin(self, attempt):
        """Forget the attempt before this one."""
        self.retries = attempt
        self.segments = [Segment(self.prompt_ids)]
        self.text = self.prompt_text
        self.messages = [*self.task.messages]
        self.start = len(self.task.messages)
        self.turns, self.steps, self.children = [], [], []

    @property
    def info(self) -> dict:
        return self.steps[-1].info if self.steps else {}

    @property
    def correct(self) -> float:
        """Whether the task was solved."""
        return float(self.info.get("correct", 0.0)) if self.termination != "error" else 0.0

    @property
    def family(self) -> list["Rollout"]:
        """Itself and its sub-agents, each followed by its own."""
        members = [self]
        for child in self.children:
            members += child.family
        return members

    @property
    def seat_rewards(self) -> tuple:
        """Of a game that the policy has played with itself: what each seat earned."""
        return self.steps[-1].seat_rewards if self.steps else ()

    def seat_reward(self, seat) -> float:
        """What a seat earned: seat 0 is the episode's own. Nothing where the game was cut off."""
        if seat == 0:
            return self.reward
        return float(self.seat_rewards[seat]) if self.seat_rewards else 0.0

    @property
    def num_sampled(self) -> int:
        """Tokens that it and its sub-agents sampled, without those of an attempt that was given up."""
        return sum(sum(segment.response_mask) for member in self.family for segment in member.segments)


# done, truncated: Gymnasium's terminated and truncated; length, context, turns and timeout: the limits
# --max-response-tokens, --max-context-tokens, --max-turns, --episode-timeout; error: the environment failed.
TERMINATIONS = ("done", "truncated", "length", "context", "turns", "timeout", "error")
EPISODE_RETRIES = 2  # times that an episode is played again because its environment failed


def episode_reward(rollout: Rollout) -> list[float]:
    """What is maximised: edit here, or point --reward-fn at a function of the same form. One
    with a parameter `rollouts` gets all episodes of a task: docs/rewards.md.

    rollout.steps are the environment's answers, their .info the named parts, rollout.messages the texts. A
    list has a number for each turn; a single number comes with the last one. A reply cut by the length limit
    never reaches the environment; Episode.end judges what was there before it.
    """
    return [step.reward for step in rollout.steps]


def set_reward(r, rewards):
    """Put a turn's reward at its last token; a single number is the last turn's."""
    if not isinstance(rewards, (list, tuple)):
        rewards = [0.0] * (len(r.turns) - 1) + [rewards]
    if len(rewards) > max(len(r.turns), 1):
        raise BadInput(f"--reward-fn: {len(rewards)} rewards for {len(r.turns)} turns of {r.task.id}")
    r.reward = float(sum(rewards))
    for (segment, _, end), reward in zip(r.turns, rewards, strict=False):
        r.segments[segment].rewards[end - 1] = float(reward)


def render(messages, tokenizer, args, tools=None):
    """The text of the messages and of the start of a reply; empty where the template fails."""
    try:
        text = rendered(messages, tokenizer, tools)
    except Exception as error:  # a template is a program
        tqdm.write(f"--chat-template {args.chat_template}: {error!r:.300}", sys.stderr)
        return ""
    return text.encode(errors="replace").decode()  # tokenizers refuse lone surrogates


def extension(text, r, tokenizer):
    """The ids that `text` appends to the last segment, which ended with eos; None if it is no extension."""
    if not text.startswith(r.text):
        return None
    rest, reply = text[len(r.text):], r.reply
    if not rest.startswith(reply):  # templates strip messages
        rest, reply = rest.lstrip(), reply.strip()
    if not rest.startswith(reply):
        return None
    closing, eos, added = rest[len(reply):].partition(tokenizer.eos_token)
    if not eos:  # a turn may close without one
        added = closing
    elif closing.strip():  # such as the empty thought that a template adds to an empty reply
        return None
    ids = encode_within(added, tokenizer)
    if ids[:1] == r.segments[-1].response_ids[-1:]:  # it is one of several eos tokens, and was sampled
        return ids[1:]
    return ids


def observe(r, tokenizer, args):
    """Extend the last segment by the environment's messages; or fork, that is, start a new segment, where the
    template has rewritten the history or its oldest turns must go.  -> whether another reply fits
    """
    for start in range(r.start, len(r.messages)):
        if r.messages[start]["role"] != "assistant":
            continue  # the kept part of the history starts with a reply
        text = render(r.task.messages + r.messages[start:], tokenizer, args, r.task.tools)
        if not text:  # not an error: a retry would be a second chance
            return False
        segment = r.segments[-1]
        added = None
        if start == r.start:
            added = extension(text, r, tokenizer)
        if added is None:
            segment = Segment(tokenizer.encode(text, add_special_tokens=False))
            added = []
        if len(segment.ids) + len(added) + args.max_response_tokens <= args.max_context_tokens:
            segment.append(added, 0, [0.0] * len(added))
            if segment is not r.segments[-1]:
                r.segments.append(segment)
            r.text = text
            r.start = start
            return True
    return False


@dataclasses.dataclass
class Player:
    """Plays episodes between an engine and an environment."""

    engine: "Engine"
    tokenizer: transformers.PreTrainedTokenizerBase
    env: envs.Env
    args: Args
    sampling: Sampling

    def __post_init__(self):
        self.call = envs.Calls(self.env)
        # Special tokens stay: thoughts and calls may be written with them. Replies are often equal.
        self.decode = functools.lru_cache(10_000)(self.tokenizer.decode)

    def prompts(self, tasks):
        """Yield (task, rendered text, ids)."""
        texts = [render(task.messages, self.tokenizer, self.args, task.tools) for task in tasks]
        ids = self.tokenizer(texts, add_special_tokens=False).input_ids if texts else []
        return zip(tasks, texts, ids, strict=True)

    async def play_all(self, rollouts):
        """Play the episodes, --max-concurrent at a time, beside the engine's own task."""
        waiting = iter(rollouts)  # all workers draw from it
        self.engine.begin_rollout(self.args.max_concurrent or self.env.at_once or len(rollouts))
        # Of replies; of several turns it is not known.
        total = None if self.env.multi_turn else len(rollouts)
        self.engine.bar = tqdm(total=total, unit=" replies", leave=False, delay=1, disable=RANK > 0 or None)

        async def worker():
            for r in waiting:
                try:
                    await asyncio.wait_for(self.play(r), self.args.episode_timeout or None)
                except TimeoutError:
                    r.termination = "timeout"
            self.engine.leave()

        with contextlib.closing(self.engine.bar):
            async with asyncio.TaskGroup() as group:  # a failure of the engine ends all
                serving = group.create_task(self.engine.serve())
                # At least one, so that serve starts: under FSDP2 it gathers weights with the other processes.
                for task in [asyncio.create_task(worker()) for _ in range(self.engine.active or 1)]:
                    await task
                serving.cancel()

    async def play(self, r, given=None):
        """Play an episode, again if its environment fails. given: the Episode of a sub-agent."""
        for attempt in range(1 if given else 1 + EPISODE_RETRIES):
            episode = given
            try:
                r.begin(attempt)
                if not given:
                    episode = await self.call(self.env.start, r.task, self.args.seed)
                    if episode.own_task:  # with another prompt
                        r.task = episode.own_task
                        _, r.prompt_text, r.prompt_ids = next(self.prompts([r.task]))
                        r.begin(attempt)
                r.termination = await self.play_turns(r, episode)
                if r.turns and r.termination in ("length", "context", "turns"):
                    # The script's own limit: the environment scores what there is.
                    if step := await self.call(episode.end, r.termination):
                        earned = 0.0
                        if len(r.steps) == len(r.turns):  # its last step is replaced
                            earned = r.steps.pop().reward
                        r.steps.append(dataclasses.replace(step, messages=[], reward=earned + step.reward))
                return
            except (Exception, SystemExit) as error:
                tqdm.write(f"task {r.task.id!r}: the environment failed: {error!r:.300}", sys.stderr)
                r.termination = "error"
            finally:
                if episode:
                    await self.call.close(episode)

    async def play_turns(self, r, episode):
        """Each turn: a reply, the environment's step, the sub-agents that it calls.  -> termination"""
        if not 0 < len(r.prompt_ids) <= self.args.max_context_tokens - self.args.max_response_tokens:
            return "context"
        while True:
            segment, start = r.segments[-1], len(r.segments[-1].response_ids)
            seed = (*self.sampling.seed, *r.order, r.retries, len(r.turns))
            ids, logprobs = await self.engine.sample(segment.ids, self.sampling._replace(seed=seed))
            segment.append(ids, 1, logprobs)
            r.turns.append((len(r.segments) - 1, start, start + len(ids)))
            has_ended = ids[-1] in self.engine.eos
            sampled = self.decode(tuple(ids[:-1] if has_ended else ids))
            prompt = r.text
            opening = opened_thought(prompt)
            r.text = prompt.removesuffix(opening)
            r.reply = opening + sampled
            r.messages.append({"role": "assistant", "content": r.reply})
            if not has_ended:
                return "length"
            given = [r.reply]
            if r.task.tools:
                _, calls = parse_reply(sampled, prompt, self.tokenizer, r.task.tools)
                given.append(calls)
            step = await self.call(episode.step, *given)
            while step.children:
                step = await self.call(episode.resume, await self.play_children(r, step.children))
            r.steps.append(step)
            r.messages += step.messages
            if step.terminated or step.truncated:
                if step.info.get("error") == 1:
                    return "error"
                return "done" if step.terminated else "truncated"
            if len(r.turns) == self.args.max_turns:
                return "turns"
            if not observe(r, self.tokenizer, self.args):
                return "context"

    async def play_children(self, r, pairs):
        """Play sub-agents, given as (task, Episode).  -> the last reply of each"""
        children = []
        for task, text, ids in self.prompts([task for task, _ in pairs]):
            children.append(Rollout(task, (*r.order, r.retries, len(r.children)), text, ids))
            r.children.append(children[-1])
        self.engine.active += len(children) - 1  # the parent is not active while they are
        unfinished = len(children)

        async def play_child(child, episode):
            nonlocal unfinished
            await self.play(child, episode)
            unfinished -= 1
            if unfinished:  # with the last one the parent is active again
                self.engine.leave()

        async with asyncio.TaskGroup() as group:
            for child, (_, episode) in zip(children, pairs, strict=True):
                group.create_task(play_child(child, episode))
        return [child.reply if child.termination != "error" else "" for child in children]


def score_groups(env, rollouts, num_samples):
    """Let the environment score the finished episodes of each task together."""
    for start in range(0, len(rollouts), num_samples):
        group = [r for r in rollouts[start:start + num_samples] if r.termination in ("done", "truncated")]
        if group:
            conversations = [r.messages for r in group]
            steps = env.score_group(group[0].task, conversations, [r.steps[-1] for r in group])
            for r, step in zip(group, steps, strict=True):
                r.steps[-1] = step


def rollout(engine, tokenizer, env, tasks, num_samples, sampling, args, score, first=0):
    """Play num_samples episodes of each task.  -> Rollouts, those of a task side by side

    sampling: its seed is (seed of the run, "train" or "val"). first: the number of the first of these tasks
    among all of that kind, which seeds their replies, too.
    """
    player = Player(engine, tokenizer, env, args, sampling)
    rollouts = []
    for number, (task, text, ids) in enumerate(player.prompts(tasks), first):
        rollouts += [Rollout(task, (number, sample), text, ids) for sample in range(num_samples)]
    # vLLM draws from the global generators, and so may an environment or a reward function.
    (number,) = uniform([(*sampling.seed, first)], 1).tolist()
    transformers.set_seed(int(2**32 * number[0]))
    problem = ""
    try:
        envs.run(player.play_all(rollouts))
    except EngineError as error:
        problem = str(error)
    problems = [text for text in gather([problem]) if text]
    if problems:  # raised on all ranks, since saving is collective
        raise EngineError(problems[0])
    score_groups(env, rollouts, num_samples)
    for start in range(0, len(rollouts), num_samples):
        played = [r for r in rollouts[start:start + num_samples] if r.termination != "error"]
        rewards = envs.rewards_of(score, played, args.reward_fn, of_turns=True)
        for r, reward in zip(played, rewards, strict=True):
            set_reward(r, reward)
            for child in r.family[1:]:
                set_reward(child, r.seat_reward(child.task.seat))
    return rollouts


# Evaluate: the same rollout on held-out tasks, with fixed seeds


def evaluate(engine, tokenizer, env, args, score):
    """pass@1, pass@n and greedy accuracy of each source.  -> metrics, the sampled Rollouts"""
    num_samples = args.eval_samples
    seed = (args.seed, "val")
    mine = shard(min(args.eval_tasks, env.num_tasks("test")))
    tasks = [env.task("test", index) for index in mine]
    sampled = gather(rollout(engine, tokenizer, env, tasks, num_samples,
                             Sampling(args.eval_temperature, seed), args, score, mine.start))
    greedy = gather(rollout(engine, tokenizer, env, tasks, 1, Sampling(0.0, seed), args, score, mine.start))
    metrics = {}
    for source in sorted({r.task.source for r in greedy}):
        rollouts = [r for r in sampled if r.task.source == source]
        correct = np.array([r.correct for r in rollouts]).reshape(-1, num_samples)  # (tasks, samples)
        means = envs.means([r.info for r in rollouts])
        means["pass@1"] = correct.mean()
        means[f"pass@{num_samples}"] = correct.max(1).mean()
        means["greedy"] = np.mean([r.correct for r in greedy if r.task.source == source])
        for name, mean in means.items():
            metrics[f"val/{source}/{name}"] = float(mean)
    return metrics, sampled


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


def load_tokenizer(args):
    """The model's tokenizer, with a padding token and the chat template that is asked for."""
    tokenizer = from_pretrained(AutoTokenizer, args.model)
    if tokenizer.eos_token_id is None:
        raise BadInput(f"--model {args.model}: its tokenizer has no eos token, so no response could end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if tokenizer.bos_token_id in tokenizer("").input_ids:
        plain = "{{ bos_token }}" + plain
    with as_bad_input(f"--model {args.model} --chat-template {args.chat_template}: expected model, where it "
                      "has one, plain, or a file"):
        if args.chat_template == "model":
            tokenizer.chat_template = tokenizer.get_chat_template()
        elif args.chat_template == "plain":
            tokenizer.chat_template = plain
        else:
            tokenizer.chat_template = envs.read_text(args.chat_template)
        check_template(tokenizer, args.chat_template)
    return tokenizer


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


def check_prompts(env, tokenizer, args):
    """Refuse a model whose tokenizer or context does not fit the tasks of the first iteration."""
    tasks = []
    if args.iterations:
        tasks = [env.training_task(n, args.seed) for n in range(args.prompts_per_iteration)]
    elif env.num_tasks("test"):
        tasks = [env.task("test", 0)]
    texts = [render(task.messages, tokenizer, args, task.tools) for task in tasks]
    prompts = tokenizer(texts, add_special_tokens=False).input_ids if texts else [[]]
    if not all(prompts):
        raise BadInput(f"--env {args.env}, --chat-template {args.chat_template}: no prompt, or an empty one")
    ids = [*itertools.chain(*prompts)]
    unknown = ids.count(tokenizer.unk_token_id) / len(ids)
    if unknown > 0.1:  # with a few, such as a rare character, a model can learn
        raise BadInput(f"--model {args.model}: its tokenizer does not know {unknown:.0%} of the prompts' "
                       f"tokens; expected a model for them, such as python sft.py --env {args.env} makes")
    shortest = min(map(len, prompts))
    if shortest + args.max_response_tokens > args.max_context_tokens:
        raise BadInput(f"--max-context-tokens {args.max_context_tokens}: the shortest prompt has {shortest} "
                       f"tokens, and a reply has up to {args.max_response_tokens}")


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


# Machinery: engines. `sample` answers with a reply of the current policy and its log-probabilities, and
# `sync_weights` keeps the engine's weights those of the trainer.


class EngineError(OSError):
    """The sampler failed or disagrees with the trainer, whose own state is intact. It ends in one line."""


Request = collections.namedtuple("Request", "prompt_ids sampling future")


class Engine:
    """A sampler. Episodes await `sample`; the task `serve` runs beside them and answers their requests."""

    def __init__(self, model, tokenizer, args, folder=None):
        """folder: where weights are written for servers to read."""
        self.model = model
        self.args = args
        self.folder = folder
        self.bar = tqdm(disable=True)  # of the replies of a rollout
        self.begin_rollout(0)
        more = model.generation_config.eos_token_id  # that end a reply: one, several or None
        if not isinstance(more, list):
            more = [] if more is None else [more]
        self.eos = [tokenizer.eos_token_id, *more]

    def begin_rollout(self, active):
        """active: the number of episodes that will request, without those that wait for a sub-agent."""
        self.active = active
        self.requests = []
        self.changed = asyncio.Event()

    def sample(self, prompt_ids, sampling):
        """Await it.  -> response_ids, logprobs"""
        future = asyncio.get_running_loop().create_future()
        self.requests.append(Request(prompt_ids, sampling, future))
        self.changed.set()
        return future

    def leave(self):
        """An active episode will request no more."""
        self.active -= 1
        self.changed.set()

    async def next_requests(self, of_all=False):
        """The new requests, sorted by seed; of_all: once every active episode has one."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            # An episode that timed out has cancelled its own.
            waiting = [request for request in self.requests if not request.future.done()]
            # With no active episode left there is one request at least: that of a sub-agent.
            if not of_all or len(waiting) >= max(self.active, 1):
                self.requests = []
                return sorted(waiting, key=lambda request: request.sampling.seed)

    def sync_weights(self, model):
        """Copy the trained weights to the sampler."""

    def sleep(self):
        """Free the device's memory until the next sync_weights."""


# What rounding never makes of mismatch/kl [nats/token] and, six standard errors aside, of the mean ratio
# less 1 and of the slope. docs/engines.md has the sizes of rounding and of faults.
LIMITS = dict(float32=(1e-6, 1e-5, 1e-3), bfloat16=(0.1, 0.002, 0.01))


def check_sampler(trainer, sampler, limits):
    """Raise EngineError where tokens were not sampled from the policy; before the first update.  -> metrics

    trainer, sampler (N,): log-probabilities of the tokens of this process, which rounding makes differ. But
    the mean of trainer / sampler stays 1, as the tokens are the sampler's: it is less where that draws from
    fewer words (top-p). And the difference does not grow with the log-probability, as it does where the
    sampler has another temperature or older weights.
    """
    both = torch.stack([trainer, sampler]).double().cpu().numpy()
    both = np.concatenate(gather([both]), 1)  # (2, N) of all processes
    difference = both[0] - both[1]
    ratio = np.exp(difference)
    mean = ratio.mean()
    error = ratio.std() / math.sqrt(len(ratio))
    # As if they agreed on 100 tokens more, so that a few raise no alarm.
    kl = (ratio - 1 - difference).sum() / (len(ratio) + 100)
    # Equal tokens after equal texts are rounded alike: they count once.
    trainer, sampler = np.unique(both, axis=1)
    difference = trainer - sampler
    difference -= difference.mean()
    level = (trainer + sampler) / 2
    level -= level.mean()
    square = (level**2).sum() + 1e-9
    slope = (level * difference).sum() / square
    # MacKinnon's and White's standard error (HC3): rare tokens are rounded more, and weigh more.
    residual = (difference - slope * level) / (1 - level**2 / square)
    slope_error = np.sqrt((level**2 * residual**2).sum()) / square
    most_kl, most_off, most_slope = limits
    enough = len(level) >= 100
    fault = ""
    if not kl <= most_kl:  # it may be nan
        fault = f"mismatch/kl is {kl:.2g} nats per token; expected {most_kl:.2g} at most"
    elif enough and abs(mean - 1) > most_off + 6 * error:
        fault = f"the mean of trainer / sampler is {mean:.4f}, not 1: it draws from other words (top-p?)"
    elif enough and abs(slope) > most_slope + 6 * slope_error:
        fault = f"its log-probabilities are {slope:+.1%} off in scale: another temperature, older weights?"
    if fault:
        raise EngineError(f"the sampler is not the policy: {fault} (docs/engines.md)")
    return {"mismatch/ratio_max": float(ratio.max()), "mismatch/ratio_mean": float(mean),
            "mismatch/slope": float(slope), "mismatch/ess": float(mean**2 / (ratio**2).mean())}


class HfEngine(Engine):
    """Samples with the trained weights themselves, so there is nothing to sync."""

    async def serve(self):
        """Answer in batches, each once every active episode waits, so that none depends on timing."""
        with unsharded(self.model):
            while True:
                waiting = await self.next_requests(of_all=True)
                longest = max(len(request.prompt_ids) for request in waiting) + self.args.max_response_tokens
                size = max(1, 16 * self.args.microbatch_tokens // longest)  # a cached token is small
                for start in range(0, len(waiting), size):
                    self.answer(waiting[start:start + size])

    def answer(self, batch):
        prompts = [request.prompt_ids for request in batch]
        seeds = [" ".join(map(str, request.sampling.seed)) for request in batch]
        temperature = batch[0].sampling.temperature  # all replies of a rollout have the same
        with precision(self.args, self.model.device):
            replies = generate(self.model, prompts, self.args.max_response_tokens, temperature, self.eos,
                               seeds, self.bar.update)
        for request, reply in zip(batch, replies, strict=True):
            if not request.future.done():  # cancelled by Ctrl-C
                request.future.set_result(reply)


class VllmEngine(Engine):
    """vLLM in this process, with continuous batching: an episode's next turn waits for no other episode."""

    lora = None  # the last adapter that was loaded
    num_adapters = 0

    def __init__(self, model, tokenizer, args, folder=None):
        super().__init__(model, tokenizer, args, folder)
        # In one process weights need no transport, and transformers.set_seed seeds vLLM's sampling too.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        options = dict(max_num_seqs=256, gpu_memory_utilization=0.4, enable_sleep_mode=True)
        if model.device.type == "cpu":
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than it saves
            options = dict(max_num_seqs=256, kv_cache_memory_bytes=2**28, enforce_eager=True)
        with as_bad_input("--engine vllm: it cannot be started; requirements-vllm.txt has its version"):
            import vllm  # not installed with the others
            if args.lora:
                config = model.peft_config["default"]
                largest = max(8, config.r, *config.rank_pattern.values())
                rank = 2 ** math.ceil(math.log2(largest))  # rounded up: vLLM has powers of 2
                options |= dict(enable_lora=True, max_lora_rank=rank)
            options |= envs.json_options(args.vllm_kwargs)
            self.llm = vllm.LLM(
                model.name_or_path, skip_tokenizer_init=True, generation_config="vllm", dtype=args.dtype,
                max_model_len=args.max_context_tokens, seed=args.seed % 2**32,
                # Weights that sync_weights will replace start as noise: one that it misses is noticed.
                load_format="auto" if args.lora else "dummy",
                # log_softmax(logits / temperature), as the trainer computes; the default ignores temperature.
                logprobs_mode="processed_logprobs", **options)
        self.vllm = vllm

    async def serve(self):
        engine = self.llm.llm_engine
        running = {}  # futures, by the ids of their requests
        try:
            while True:
                for request in await self.next_requests():
                    prompt = self.vllm.TokensPrompt(prompt_token_ids=request.prompt_ids)
                    params = self.vllm.SamplingParams(
                        temperature=request.sampling.temperature, max_tokens=self.args.max_response_tokens,
                        stop_token_ids=self.eos, logprobs=0, flat_logprobs=True, detokenize=False)
                    name = str(request.sampling.seed)
                    engine.add_request(name, prompt, params, lora_request=self.lora)
                    running[name] = request.future
                while running and not self.changed.is_set():
                    for output in engine.step():
                        if not output.finished:
                            continue
                        reply = output.outputs[0]  # its logprobs are vLLM's FlatLogprobs: one list
                        future = running.pop(output.request_id)
                        self.bar.update()
                        if not future.done():  # else its episode timed out
                            future.set_result((list(reply.token_ids), reply.logprobs.logprobs))
                    await asyncio.sleep(0)  # let episodes go on and request before the next step
        except Exception as error:
            raise EngineError(f"--engine vllm: {first_line(error)} (docs/engines.md)") from error
        finally:
            engine.abort_request([*running])

    def sync_weights(self, model):
        """In place; with LoRA the adapter alone. The prefix cache was computed with the old weights."""
        torch.cuda.empty_cache()
        self.llm.wake_up(tags=["weights"])  # no effect where it is awake
        if self.args.lora:
            self.num_adapters += 1  # its number: under a known one the old adapter would stay
            with tempfile.TemporaryDirectory() as path, as_bad_input("--engine vllm: it refuses the adapter"):
                model.save_pretrained(path, state_dict=dict(trained_weights(model)))
                name = f"policy-{self.num_adapters}"
                self.lora = self.vllm.lora.request.LoRARequest(name, self.num_adapters, path)
                self.llm.llm_engine.add_lora(self.lora)
        else:
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=trained_weights(model)))
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def sleep(self):
        if self.llm.llm_engine.model_config.enable_sleep_mode:
            self.llm.sleep(1 if self.args.lora else 2)  # 2 drops the weights: sync_weights brings new ones


class VllmServers(Engine):
    """Running vLLM servers that can read the run's folder (docs/engines.md has the command to start one).

    A failed request is not retried: a server that was restarted would answer with the weights on its disk.
    """

    adapter = None  # name of the last adapter that was loaded; None: the base model's

    def post(self, url, path, body):
        try:
            answer = requests.post(url.rstrip("/") + path, json=body, timeout=(5, 600),
                                   proxies=dict(http="", https=""))  # not through a proxy for the web
            answer.raise_for_status()
            return answer
        except requests.RequestException as error:
            why = first_line(error) if error.response is None else f"{error} {error.response.text[:300]}"
            raise EngineError(f"--vllm-url {url}: {path}: {why} (docs/engines.md)") from error

    async def serve(self):
        def same_request(request):  # one for a group's replies, at half the cost; not for greedy ones
            sampling = request.sampling
            return request.prompt_ids, None if sampling.temperature else sampling.seed

        servers = itertools.cycle(self.args.vllm_url)
        async with asyncio.TaskGroup() as posting:  # a failed request ends all
            while True:
                # Sorted by seed, requests of a group are neighbours.
                for _, group in itertools.groupby(await self.next_requests(), same_request):
                    posting.create_task(self.answer(next(servers), [*group]))

    async def answer(self, url, group):
        """Get the replies to requests with the same prompt and temperature."""
        # Whatever the server would otherwise take from the model's generation config is set.
        body = dict(
            model=self.adapter, prompt=group[0].prompt_ids, n=len(group), logprobs=0,
            temperature=group[0].sampling.temperature, max_tokens=self.args.max_response_tokens,
            stop_token_ids=self.eos, return_token_ids=True, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        answer = await envs.in_thread(self.post, url, "/v1/completions", body)
        try:
            for request, choice in zip(group, answer.json()["choices"], strict=True):
                ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
                # Neither ended nor as long as it may be: the server has a limit of its own.
                is_cut = ids[-1] not in self.eos and len(ids) < body["max_tokens"]
                if is_cut or len(ids) != len(logprobs):
                    raise ValueError(f"{len(ids)} ids, {len(logprobs)} logprobs, {choice['finish_reason']}")
                self.bar.update()
                if not request.future.done():
                    request.future.set_result((ids, logprobs))
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"--vllm-url {url}: not an answer of vLLM's ({error!r:.300})") from error

    def sync_weights(self, model):
        """Rank 0 writes the weights and has each server load them; the other ranks wait for it."""
        tensors = {}
        for name, tensor in trained_weights(model):  # all ranks, since it is a collective
            if RANK == 0:
                tensors[name] = tensor.to("cpu", copy=True)  # so that a tied head is written too
        name = f"policy-{os.urandom(8).hex()}"  # a new one, since network folders are cached
        path = str((self.folder / name).resolve())
        problem = ""
        if RANK == 0:
            model.save_pretrained(path, state_dict=tensors)
            try:
                for url in self.args.vllm_url:
                    # Ends requests of episodes that timed out, and empties the cache: both are old weights'.
                    self.post(url, "/pause?mode=abort", {})
                    self.load(url, name, path)
                    self.post(url, "/resume", {})
            except EngineError as error:
                problem = str(error)
            shutil.rmtree(self.folder)
        name, problem = gather([(name, problem)])[0]  # rank 0's
        self.adapter = name if self.args.lora else None
        if problem:
            raise EngineError(problem)

    def load(self, url, name, path):
        if self.args.lora:
            # Under a new name: an adapter loaded in place is read from the disk by every batch of requests.
            self.post(url, "/v1/load_lora_adapter", dict(lora_name=name, lora_path=path))
        else:
            self.post(url, "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=path)))


# Machinery: processes, under torchrun. Each holds a shard of the weights (FSDP2), plays its share of the
# episodes and trains on them; losses and gradients are those of one process.


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


def trained_weights(model):
    """Yield (name, full tensor) of the adapter's weights, or of all. A collective: all ranks exhaust it."""
    has_adapter = isinstance(model, peft.PeftModel)
    # state_dict, unlike named_parameters, has a tied head under its own name too, which vLLM needs.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or not has_adapter:
            yield name, full_tensor(tensor.detach())


# Machinery: run folder. A kill at any moment loses at most the work since the last checkpoint, from which the
# same command goes on exactly. The same to the letter in all four scripts.


TIMES = ("time/rollout", "time/update", "time/sync", "time/eval", "time/checkpoint")  # measured by Run.timed
# What Run.record shows: name -> metric, of any source, and its format.
SHOWN = {"reward": ("train/reward", ".3f"), "critic": ("critic/vf_explained_var", ".3f"),
         "tok/s": ("rollout/throughput", ",.0f"), "pass@1": ("val/.+/pass@1", ".3f"),
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


# Machinery: episodes in the log. Rollouts as JSON lines that tools/view_episodes.py shows, and as metrics.


def describe_episode(r):
    """The JSON form of an episode, its sub-agents nested (docs/train_log.md)."""
    turns = []
    for (segment, start, end), step in itertools.zip_longest(r.turns, r.steps):
        turns.append(dict(segment=segment, start=start, end=end, reward=step.reward if step else 0.0))
    return dict(
        task_id=r.task.id, source=r.task.source, number=r.order[-1], reward=r.reward, correct=r.correct,
        info=r.info, termination=r.termination, retries=r.retries, messages=r.messages, turns=turns,
        segments=[*map(dataclasses.asdict, r.segments)],
        sub_agents=[*map(describe_episode, r.children)])


def log_episodes(run, kind, rollouts, args):
    """Write some episodes and a summary of all to episodes/<kind>_step_<iteration>.jsonl; print a few."""
    step = run.counters["iteration"]
    draws = np.random.default_rng(step if kind == "train" else 0).random(len(rollouts))  # val: the same
    chosen = []
    for r, draw in zip(rollouts, draws, strict=True):
        is_to_read = kind == "val" and r.order[0] < 10 and r.order[-1] == 0  # ten of each evaluation
        if draw < args.log_episodes or is_to_read:
            chosen.append(r)
    if RANK == 0 and chosen:
        summary = dict(episodes=len(rollouts), reward_sum=sum(r.reward for r in rollouts),
                       correct_sum=sum(r.correct for r in rollouts), logged=len(chosen))
        lines = [*map(describe_episode, chosen), dict(summary=summary)]
        path = run.dir / "episodes" / f"{kind}_step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(envs.to_json(line) + b"\n" for line in lines))
    for r in [r for r in rollouts if r.order[-1] == 0][:args.print_samples]:
        texts = [f"{kind} {r.task.id}", *(str(m.get("content")) for m in r.messages),
                 f"reward {r.reward:g}, correct {r.correct:g} ({r.termination})"]
        # Control characters could change the terminal's state.
        print_rank_0("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in " | ".join(texts)))


def spread(name, values):
    """{name/mean, name/max, name/min}, zeros when there is nothing."""
    values = np.array(values or [0.0])
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()),
            f"{name}/min": float(values.min())}


def rollout_metrics(rollouts, throughput):
    """Metrics of an iteration's episodes; those whose environment failed are only counted."""
    played = [r for r in rollouts if r.termination != "error"]
    num_played = max(len(played), 1)

    def mean(numbers):
        return sum(numbers) / num_played

    ends = collections.Counter(r.termination for r in rollouts)
    rewards = [r.reward for r in played]
    lengths = [sum(len(s.response_ids) for s in r.segments) for r in played]
    metrics = {
        "train/reward": mean(rewards), "train/pass@1": mean(r.correct for r in played),
        **spread("critic/score", rewards), **spread("response_length", lengths),
        "response_length/clip_ratio": (ends["length"] + ends["context"]) / num_played,
        **spread("prompt_length", [len(r.segments[0].prompt_ids) for r in played if r.segments]),
        "rollout/throughput": throughput, "rollout/finished": ends["done"] / len(rollouts),
        "rollout/retries": sum(r.retries for r in rollouts),
        "rollout/turns": mean(len(r.turns) for r in played),
        "rollout/segments": mean(len(r.segments) for r in played),
        "rollout/sub_agents": mean(len(r.family) - 1 for r in played),
        "env/suspicious": mean(float(r.info.get("suspicious", 0.0)) for r in played)}
    infos = collections.defaultdict(list)  # of each source
    for r in played:
        infos[r.task.source].append(r.info)
    for source in sorted(infos):
        for part, value in envs.means(infos[source]).items():
            if math.isfinite(value):
                metrics[f"train/{source}/{part}"] = float(value)
    return metrics | {f"rollout/termination/{end}": ends[end] / len(rollouts) for end in TERMINATIONS}


# Main: set-up, then the loop


def main(args):
    # Set-up: errors in the input are found here, before anything is trained.
    transformers.utils.logging.disable_progress_bar()
    device = start_processes()
    env = envs.make(args.env, **envs.parse_options(args.env_kwargs))
    held_out = env.num_tasks("test")
    score = envs.load_object(args.reward_fn, "--reward-fn") if args.reward_fn else episode_reward
    tokenizer = load_tokenizer(args)
    check_calls(env, tokenizer, args.chat_template)
    # Of the frozen base, which halves its memory; the adapter is float32.
    dtype = torch.bfloat16 if args.lora and args.dtype == "bfloat16" else torch.float32
    model = load_weights(args.model, dtype)
    size = len(model.get_input_embeddings().weight)
    last = max(tokenizer.get_vocab().values())
    if last >= size:
        raise BadInput(f"--model {args.model}: its tokenizer has ids up to {last}, its embedding {size} rows;"
                       " expected one for each token (resize_token_embeddings)")
    source = envs.source_of(score) + str(tokenizer.chat_template) + env.identity
    run = Run(args, "ppo", args.env, reward_and_template_sha256=hashlib.sha256(source.encode()).hexdigest(),
              model=args.model, model_sha256=weights_sha256(model, args.lora_adapter_path))
    # The run has logged the flags as they were given; a model may have fewer positions.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    args = Args(**vars(args) | dict(max_context_tokens=min(args.max_context_tokens, positions)))
    check_prompts(env, tokenizer, args)
    torch.manual_seed(args.seed)  # of new adapters' weights
    backbone = None
    if args.critic == "own":
        # The critic starts as a copy of the policy; with LoRA the frozen weights are shared, not copied.
        shared = {}
        if args.lora:
            shared = {id(p): p for name, p in model.named_parameters() if "bias" not in name}
        backbone = copy.deepcopy(model, shared)
    if args.lora:
        model = add_lora(model, args, run.checkpoint)
        names = model.targeted_module_names + model.targeted_parameter_names
        print_rank_0(f"LoRA adapts {', '.join(sorted({name.rpartition('.')[2] for name in names}))}")
    elif run.checkpoint:
        model = load_weights(run.checkpoint)
    model = distribute(model, device)
    sampler = HfEngine
    if args.engine == "vllm":
        sampler = VllmServers if args.vllm_url else VllmEngine
    engine = sampler(model, tokenizer, args, run.dir / "sync")
    reference = None
    if args.kl_coef and not args.lora_rank:  # with a new adapter it is the policy, the adapter switched off
        reference = load_weights(args.model, dtype)
        if args.lora:
            reference = add_lora(reference, args)
        reference = distribute(reference, device)
    critic = distribute(Critic(model, backbone, args), device)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
        if backbone:
            checkpoint_layers(backbone)
    del backbone
    trained = torch.nn.ModuleList([model, critic])
    policy_weights = [p for p in model.parameters() if p.requires_grad]
    critic_weights = [p for p in critic.parameters() if p.requires_grad]
    adamw = functools.partial(torch.optim.AdamW, fused=True, weight_decay=0.0)
    optimizers = {}
    alone = 0  # iterations that train only the critic
    if args.critic == "own":
        alone = args.critic_warmup
        optimizers["optimizer"] = adamw(policy_weights, betas=(0.9, args.beta2))
        optimizers["critic_optimizer"] = adamw(critic_weights, betas=(0.9, args.critic_beta2))
    else:  # the backbone serves both, if there is a critic
        optimizers["optimizer"] = adamw(policy_weights + critic_weights, betas=(0.9, args.beta2))
    state = run.state if run.checkpoint else dict(metrics={}, kl_coef=args.kl_coef)
    metrics = state["metrics"]  # of the last iteration, if it was saved before they were logged
    kl_coef = state["kl_coef"]  # of the penalty, as adapted so far
    if run.checkpoint:
        dcp.set_model_state_dict(critic, state.pop("critic"), options=FULL)
    for name, optimizer in optimizers.items():
        if name in state:
            dcp.set_optimizer_state_dict(trained, optimizer, state.pop(name), options=FULL)
    run.open(args.iterations)
    iteration = saved = run.counters["iteration"]
    num_trained = sum(parameter.numel() for parameter in policy_weights + critic_weights)
    print_rank_0(f"{run.dir}\nFrom iteration {iteration + 1} on {args.prompts_per_iteration} prompts x "
                 f"{args.group_size} replies on {device}; {num_trained:,} weights; "
                 f"evaluations: {min(args.eval_tasks, held_out)} tasks x ({args.eval_samples} + 1)")
    if env.about:
        print_rank_0(env.about)
    rollouts = []
    num_idle = 0  # iterations whose episodes all had one reward, one after another
    stop = []  # not empty after SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    gc.set_threshold(100_000)  # an iteration makes many small lists, which would trigger useless collections

    def save():
        with run.timed("checkpoint"):
            tensors = dcp.get_model_state_dict(model, options=FULL)
            once = dict(model.named_parameters()) | dict(model.named_buffers())  # a tied head has two names
            tensors = {name: tensor for name, tensor in tensors.items() if args.lora or name in once}
            state = dict(metrics=metrics, kl_coef=kl_coef)
            state["critic"] = dcp.get_model_state_dict(critic, options=FULL)
            for name, optimizer in optimizers.items():
                if optimizer.state:  # without a step there is none, and this would create one
                    state[name] = dcp.get_optimizer_state_dict(trained, optimizer, options=FULL)
            run.save(state,
                     functools.partial(model.save_pretrained, state_dict=tensors), tokenizer.save_pretrained)

    def finish_iteration():
        """Sync the sampler's weights; evaluate, log and save when it is time.  -> whether to end"""
        nonlocal metrics, saved
        is_last = iteration >= args.iterations
        with run.timed("sync"):
            engine.sync_weights(model)
        is_due = is_last or args.eval_every and iteration % args.eval_every == 0
        if held_out and (iteration == 0 or metrics and is_due):
            with run.timed("eval"):
                evaluation, samples = evaluate(engine, tokenizer, env, args, score)
            metrics |= evaluation
            log_episodes(run, "val", samples, args)
        if metrics:  # none where a resumed run begins: they are in the log
            run.record(metrics)
        metrics = {}
        stopped = any(gather(stop))
        if iteration > saved and (is_last or stopped or iteration % args.checkpoint_every == 0):
            save()
            saved = iteration
        if stopped:
            print_rank_0(f"SIGTERM: stopped after iteration {iteration}; go on with --run-dir {run.dir}")
        return is_last or stopped

    try:
        ended = finish_iteration()  # that of the starting model; of a resumed run, the one it was saved in
        while not ended:
            # 1. Rollout: group_size responses to each prompt, from the current policy.
            cursor = iteration * args.prompts_per_iteration
            mine = shard(args.prompts_per_iteration)
            sampling = Sampling(args.temperature, (args.seed, "train"))
            with run.timed("rollout"):
                tasks = [env.training_task(cursor + i, args.seed) for i in mine]
                rollouts = rollout(engine, tokenizer, env, tasks, args.group_size, sampling, args, score,
                                   cursor + mine.start)
            episodes = trainable_episodes(rollouts, args)

            learned = any(gather([len(episodes)]))  # False if every environment failed
            measured, steps, critic_steps = {}, 0, 0
            # The order of the episodes; a resume needs no generator's state. Faster than torch.manual_seed.
            torch.default_generator.manual_seed(args.seed * 1_000_003 + iteration + 1)
            with run.timed("update"):
                engine.sleep()
                # 2. Old log-probabilities and values; penalty, advantages and returns at each token.
                store(model, critic, reference, episodes, args)
                measured |= estimate_advantages(episodes, kl_coef, args)
                if learned:  # stale weights, a wrong head or a stale prefix cache show here
                    is_sampled = sampled_tokens(episodes, "response_mask") > 0
                    measured |= check_sampler(sampled_tokens(episodes, "old_logprobs")[is_sampled],
                                              sampled_tokens(episodes, "rollout_logprobs")[is_sampled],
                                              LIMITS[args.dtype])

                # 3. Fit the critic to the returns; one that shares the policy's backbone is trained in 4.
                if learned and args.critic == "own":
                    rate = learning_rate(args.critic_learning_rate, iteration + 1, 1, args)
                    metrics_of_update, norm, critic_steps = update(
                        lambda batch: value_terms(critic(batch), batch), optimizers["critic_optimizer"], rate,
                        episodes, args.critic_epochs, args.critic_minibatches, args)
                    measured |= metrics_of_update
                    measured |= {"critic/grad_norm": norm, "critic/learning_rate": rate}

                # 4. Update the policy, after --critic-warmup.
                if learned and iteration >= alone:
                    rate = learning_rate(args.learning_rate, iteration + 1, alone + 1, args)
                    metrics_of_update, norm, steps = update(
                        lambda batch: policy_terms(model, critic, batch, args), optimizers["optimizer"], rate,
                        episodes, args.epochs, args.minibatches, args)
                    measured |= metrics_of_update
                    measured |= {"train/grad_norm": norm, "train/learning_rate": rate}
                    if args.kl_target:
                        kl_coef = adapt_kl_coef(kl_coef, measured["kl/k1"], args.kl_target)
                for name, weights in dict(train=policy_weights, critic=critic_weights).items():
                    norm = full_tensor(torch.nn.utils.get_total_norm(weights))
                    measured[f"{name}/weight_norm"] = float(norm)

            # 5. Metrics of the iteration, over all processes.
            rollouts = gather(rollouts)
            iteration += 1
            generated = sum(r.num_sampled for r in rollouts)
            opt_steps = run.counters["opt_steps"] + steps + critic_steps
            run.counters = dict(iteration=iteration, opt_steps=opt_steps,
                                env_steps=run.counters["env_steps"] + generated)
            metrics = rollout_metrics(rollouts, generated / run.times["time/rollout"]) | measured
            metrics["train/policy_steps"] = steps
            log_episodes(run, "train", rollouts, args)
            rewards = [r.reward for r in rollouts if r.termination != "error"]
            num_idle = 0 if rewards and max(rewards) - min(rewards) > 1e-9 else num_idle + 1
            if num_idle == 3:
                print_rank_0("warning: three iterations in which all episodes had the same reward: "
                             f"python tools/diagnose.py {run.dir} says why")

            # 6. Sync the sampler's weights; evaluate, log, checkpoint.
            ended = finish_iteration()
        if iteration >= args.iterations:
            run.finish()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, EngineError) and iteration > saved:
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                save()  # the trainer's state is intact: only the rollout is lost
        run.fail(error, {"evidence.json": envs.to_json([*map(describe_episode, rollouts[:64])])})


def num_weights(name):
    """The number of weights of a model, from its config alone; 0 where that cannot be read."""
    try:
        config = from_pretrained(AutoConfig, name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # what is wrong is said when the weights are loaded
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def parse_flags():
    """The flags. A model of REAL_SIZE weights or more has other defaults, which are printed."""
    args = tyro.cli(Args)
    size = num_weights(args.model)
    if size < REAL_SIZE:
        return args
    real = REAL_MODEL | REAL_LORA if args.lora else dict(REAL_MODEL)
    if torch.cuda.is_available():
        real["dtype"] = "bfloat16"
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in real.items())
    print_rank_0(f"--model {args.model} has {size:,} weights; defaults for {REAL_SIZE:,} or more: {words}")
    return tyro.cli(Args, default=Args(**real))


if __name__ == "__main__":
    # A reply may hold characters that the terminal cannot show; a file gets each line at once.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        main(parse_flags())
    except (BadInput, OSError) as problem:
        sys.exit(f"error: {problem}")
    if UNDER_TORCHRUN:
        # DTensor's caches keep gloo's threads alive, which may abort while the interpreter shuts down.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
