"""GRPO and its critic-free relatives: policy gradients for language models with verifiable rewards.

For each prompt, `group_size` responses are sampled; a response's advantage is its reward against its group's:

    A_i = r_i - mean(r_1..r_G)            [/ (std + 1e-6) with --scale-rewards]    GRPO, arXiv:2402.03300
    L   = - mean_t min(ratio A, clip(ratio, 1 - low, 1 + high) A)                  PPO, arXiv:1707.06347 eq. 7

Defaults that differ from the GRPO paper, each by a flag: no division by the standard deviation (Dr. GRPO,
arXiv:2503.20783), the mean runs over all tokens of the batch and the clip is asymmetric (DAPO, arXiv:2503.14476),
groups whose rewards are all equal are dropped, no KL penalty, a small entropy bonus.

    python grpo_llm.py                               # Countdown on a laptop CPU, offline, about two minutes
    python grpo_llm.py --iterations 0                # evaluate the model and end
    python grpo_llm.py --model Qwen/Qwen2.5-1.5B-Instruct --dtype bfloat16 --lora-rank 16 \
        --env-kwargs style=r1 max_operands=4 max_number=100 max_target=1000 operators=+-*/ \
        --max-response-tokens 1024 --learning-rate 1e-5 --entropy-coef 0

Expect greedy accuracy on held-out problems to climb from about 0.6 to 0.98, and pass@1 at temperature 1 from 0.3
to 0.94, while pass@16 stays near 1. Run folder: runs/<experiment>/<run_id>/; the same command with --run-dir goes on.
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
import random
import shutil
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import numpy as np
import peft
import psutil
import torch
import transformers
import tyro
from dotenv import load_dotenv
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
    """environment: a name known to envs.make, or path/to/file.py:Class"""
    env_kwargs: tuple[str, ...] = ()
    """its options, as key=value"""
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
    lora_rank: int = 0
    """rank of the LoRA adapter; 0 trains all weights"""
    lora_alpha: int = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank"""
    lora_dropout: float = 0.0
    """dropout before the adapter"""
    lora_target_modules: str = "all-linear"
    """modules to adapt: all-linear, or names with commas"""
    lora_exclude_modules: str = "lm_head,embed_tokens"
    """modules never to adapt, names with commas"""
    # The three sizes
    prompts_per_iteration: int = 32
    """different prompts in an iteration"""
    group_size: int = 16
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
    max_concurrent: int = 8
    """threads that step environments"""
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

    def __post_init__(self):
        at_least = dict(prompts_per_iteration=1, group_size=2, microbatch_tokens=1, max_response_tokens=1, epochs=1,
                        minibatches=1, iterations=0, max_concurrent=1, eval_samples=1, eval_tasks=1, threads=1,
                        eval_every=0, checkpoint_every=1, keep_checkpoints=0, lora_rank=0, warmup_iterations=0,
                        dynamic_sampling=0, kl_coef=0, tis_cap=0, print_samples=0, val_table_samples=0)
        for name, low in at_least.items():
            if not getattr(self, name) >= low:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {low} or more")
        for name in ("temperature", "eval_temperature", "learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected a positive number")
        for name in ("log_episodes", "final_learning_rate", "clip_low", "lora_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected a number in [0, 1]")
        if not -1 <= self.advantage_balance <= 1:
            raise BadInput(f"--advantage-balance {self.advantage_balance}: expected a number in [-1, 1]")
        if self.minibatches > self.prompts_per_iteration:
            raise BadInput(f"--minibatches {self.minibatches}: a minibatch holds whole groups, so at most "
                           f"--prompts-per-iteration {self.prompts_per_iteration}")
        if self.max_context_tokens <= self.max_response_tokens:
            raise BadInput(f"--max-context-tokens {self.max_context_tokens}: expected more than "
                           f"--max-response-tokens {self.max_response_tokens}")

    @property
    def responses_per_iteration(self) -> int:
        return self.prompts_per_iteration * self.group_size

    @property
    def on_policy(self) -> bool:
        """One update per rollout: the policy that sampled is the one that is trained, and the ratio is 1."""
        return self.epochs * self.minibatches == 1


METRICS = {
    "train/policy_loss": "policy loss, entropy bonus and KL penalty left out, mean of the iteration's updates",
    "train/kl_loss": "k3 estimate of KL(policy || starting model), 0 without a reference [nats/token]",
    "train/entropy": "mean entropy of the next-token distribution on response tokens [nats]",
    "train/reward": "mean reward of all responses of the iteration",
    "train/advantage": "mean advantage over the tokens trained on",
    "train/clipfrac": "share of trained tokens whose ratio was clipped",
    "train/approx_kl": "k3 estimate of KL(old policy || policy) [nats/token] (joschu.net/blog/kl-approx.html)",
    "train/grad_norm": "global gradient norm before clipping",
    "train/weight_norm": "global norm of the trained weights",
    "train/learning_rate": "learning rate of the iteration",
    "train/global_step": "optimiser steps so far",
    "train/pass@1": "share of the iteration's responses that are correct",
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
    "rollout/termination": "share by reason: done, truncated (environment's limit), length, context, error",
    "rollout/groups_submitted": "groups sampled",
    "rollout/groups_trainable": "groups whose rewards differ",
    "mismatch/kl": "k3 estimate of KL(sampler || trainer) before the update [nats/token]",
    "mismatch/ratio_max": "largest trainer / sampler probability ratio of a token, before the cap",
    "mismatch/frac_capped": "share of tokens whose ratio exceeds --tis-cap",
    "time": "rollout, update, sync, eval, checkpoint (those since the record before) [s]",
    "system/memory_usage": "resident memory of the process [GiB]",
    "system/cpu_utilization": "processor time over wall time since the record before [cores]",
    "system/gpu_memory": "peak memory allocated on the GPU [GiB]",
    "val/<source>/pass@1": "held-out correctness at --eval-temperature, mean over tasks and samples",
    "val/<source>/pass@<n>": "share of held-out tasks with a correct response among n",
    "val/<source>/greedy": "held-out correctness of greedy decoding",
    "val/<source>/<part>": "mean of each named part of the environment's info",
}


def group_advantages(rewards, scale=False, baseline="mean", balance=0.0):
    """Each reward against its group.  rewards (groups, group_size) -> the same shape.

    GRPO (arXiv:2402.03300 sec. 4.1.2) with scale (population std), Dr. GRPO (arXiv:2503.20783) without;
    baseline "loo" is RLOO (arXiv:2402.14740): r_i minus the mean of the others, = G / (G - 1) (r_i - mean).
    """
    advantages = rewards - rewards.mean(1, keepdim=True)
    if baseline == "loo":
        advantages = advantages * rewards.shape[1] / (rewards.shape[1] - 1)
    if scale:
        advantages = advantages / (rewards.std(1, keepdim=True, unbiased=False) + 1e-6)
    return torch.where(advantages < 0, 1 - max(balance, 0.0), 1 + min(balance, 0.0)) * advantages


def masked_mean(x, mask, denom=None):
    """Sum of x where mask is 1, over denom (default: the number of ones).  x, mask (B, T) -> scalar."""
    return (x * mask).sum() / (mask.sum() if denom is None else denom)


def k3(log_ratio):
    """Unbiased, never negative estimate of KL(p || q) from samples of p; log_ratio = log q - log p."""
    return torch.exp(log_ratio) - log_ratio - 1


def policy_loss(logprobs, old_logprobs, advantages, mask, loss, clip_low, clip_high):
    """Loss of each token and whether it was clipped.  logprobs, old_logprobs, mask (B, T), advantages (B, 1)."""
    log_ratio = logprobs - old_logprobs
    if loss == "gspo":
        # GSPO (arXiv:2507.18071) eqs. 7 and 14: the sequence's geometric-mean ratio, its gradient spread over
        # the tokens' own log-probabilities.
        sequence = masked_mean_rows(log_ratio, mask).detach()                            # (B, 1)
        log_ratio = sequence + logprobs - logprobs.detach()
    ratio = torch.exp(log_ratio)                                                         # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss == "cispo":
        # CISPO (arXiv:2506.13585) eq. 4: every token keeps a gradient; only its weight is clipped.
        return -clipped.detach() * advantages * logprobs, ratio != clipped
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)                 # PPO eq. 7
    return per_token, -clipped * advantages > -ratio * advantages


def masked_mean_rows(x, mask):
    """Mean of each row where mask is 1.  (B, T) -> (B, 1); a row without ones gives 0."""
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def token_weights(mask, aggregation, num_tokens, num_sequences, longest):
    """Weights that turn per-token losses into one number by a plain sum.  mask (B, T) -> (B, T).

    num_tokens and num_sequences are those of the whole minibatch, so that summing the passes gives the loss of
    the minibatch however it is cut.
    """
    if aggregation == "token":
        return mask / num_tokens
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / num_sequences
    return mask / (num_sequences * longest)


def selected_logprobs(hidden, head, targets, temperature=1.0, chunk_elements=2**23):
    """Log-probabilities of the targets and entropies, in nats.  hidden (N, H), targets (N,) -> (N,), (N,).

    Logits exist for one chunk of tokens at a time, in float32: chunk_elements bounds tokens x vocabulary. With more
    than one chunk the backward pass recomputes them, so memory does not grow with N x vocabulary.
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


def token_logprobs(model, batch, temperature):
    """Log-probability and entropy of each response token.  -> two (B, T), T the longest response.

    Each different prompt is computed once and its keys and values shared by its responses, with gradient. The
    response's token t is predicted from the position before it: this is the one place where that shift happens.
    """
    decoder, head = decoder_and_head(model)
    cache = new_cache(decoder)
    prompts, prompt_mask, rows = batch["prompts"], batch["prompt_mask"], batch["prompt_of_row"]
    if prompts.shape[1] > 1:
        positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        decoder(input_ids=prompts[:, :-1], attention_mask=prompt_mask[:, :-1], position_ids=positions[:, :-1],
                past_key_values=cache, use_cache=True)
        cache.batch_select_indices(rows)
    inputs = torch.cat([prompts[rows, -1:], batch["responses"][:, :-1]], 1)              # (B, T)
    mask = torch.cat([prompt_mask[rows], batch["valid"][:, :-1]], 1)                     # (B, P - 1 + T)
    positions = (mask.cumsum(1) - 1)[:, -inputs.shape[1]:]
    hidden = decoder(input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache,
                     use_cache=True).last_hidden_state                                   # (B, T, H)
    chosen = batch["response_mask"].bool()
    logprobs, entropy = selected_logprobs(hidden[chosen], head, batch["responses"][chosen], temperature)
    zeros = torch.zeros_like(batch["response_mask"])
    return zeros.masked_scatter(chosen, logprobs), zeros.masked_scatter(chosen, entropy)


def decoder_and_head(model):
    """The transformer without its head, and the head, beneath PEFT's wrapper if there is one."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return base.get_decoder(), base.get_output_embeddings()


# Engine: load, generate, sync


def find_model(name):
    """A folder as given, else beside this script (so that the defaults work from anywhere), else a hub id."""
    for folder in (Path(name), Path(__file__).parent / name):
        if (folder / "config.json").is_file():
            return str(folder)
    if Path(name).exists() or name.count("/") != 1 or name.startswith("models/"):
        raise BadInput(f"--model {name}: expected a folder with config.json and weights, or a hub id")
    return name


def load_tokenizer(name):
    """The tokenizer of a model, with a padding token. Raises BadInput when it has no eos."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(find_model(name))
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {name}: its tokenizer cannot be loaded ({first_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise BadInput(f"--model {name}: its tokenizer has no eos token, so no response could end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_weights(name, dtype=torch.float32):
    """A causal language model in `dtype`, on the CPU, without dropout."""
    try:
        model = AutoModelForCausalLM.from_pretrained(find_model(name), dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"--model {name}: its weights cannot be loaded ({first_line(error)})") from error
    model.config.use_cache = True
    return model.eval()


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def add_lora(model, args, adapter=""):
    """Wrap the frozen base in a LoRA adapter: a new one, or the one in a checkpoint's folder."""
    if adapter:
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    targets = args.lora_target_modules
    config = peft.LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, task_type="CAUSAL_LM",
        target_modules=targets if targets == "all-linear" else targets.split(","),
        exclude_modules=[name for name in args.lora_exclude_modules.split(",") if name] or None)
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise BadInput(f"--lora-target-modules {targets}: {first_line(error)}") from error


def precision(args, device):
    """The arithmetic of every pass, sampling included, so that sampler and trainer agree."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def pad(rows, value, device, left=False, dtype=torch.long):
    """Lists of different lengths -> (rows, longest), padded on the right or the left."""
    width = max(map(len, rows))
    rows = [[value] * (width - len(row)) + row if left else row + [value] * (width - len(row)) for row in rows]
    return torch.tensor(rows, dtype=dtype, device=device)


def sample(logits, temperature):
    """A token from each row of logits and its log-probability, temperature 0 meaning the likeliest.  (B, V)."""
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

    A prompt that occurs many times is prefilled once and its cache shared. Rows that ended leave the batch when
    they are an eighth of it. Only the last position's logits ever exist.
    """
    decoder, head = decoder_and_head(model)
    unique = {}
    rows = torch.tensor([unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts], device=model.device)
    tokens = pad([list(prompt) for prompt in unique], tokenizer.pad_token_id, model.device, left=True)          # (U, P)
    mask = pad([[1] * len(prompt) for prompt in unique], 0, model.device, left=True)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = new_cache(decoder, layer=GrowingLayer)
    hidden = decoder(input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache,
                     use_cache=True).last_hidden_state[:, -1]                            # (U, H)
    logits, mask, position = head(hidden)[rows], mask[rows], position[rows, -1:]
    cache.batch_select_indices(rows)
    ids = torch.full((len(rows), max_new_tokens), -1, device=model.device)
    logprobs = torch.zeros(len(rows), max_new_tokens, device=model.device)
    eos = torch.tensor(eos_ids(model, tokenizer), device=model.device)
    live = torch.arange(len(rows), device=model.device)                                  # row -> row of ids
    done = torch.zeros(len(rows), dtype=torch.bool, device=model.device)
    for t in range(max_new_tokens):
        token, logprob = sample(logits, temperature)
        ids[live, t], logprobs[live, t] = token.masked_fill(done, -1), logprob.masked_fill(done, 0.0)
        done = done | torch.isin(token, eos)
        ended = int(done.sum())
        if t + 1 == max_new_tokens or ended == len(done):
            break
        if ended > len(done) // 8:
            keep = (~done).nonzero().squeeze(1)
            live, token, mask, position, done = live[keep], token[keep], mask[keep], position[keep], done[keep]
            cache.batch_select_indices(keep)
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
        hidden = decoder(input_ids=token[:, None], attention_mask=mask, position_ids=position,
                         past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = head(hidden)
    lengths = (ids >= 0).sum(1).tolist()
    return [(i[:n], p[:n]) for i, p, n in zip(ids.tolist(), logprobs.tolist(), lengths, strict=True)]


def eos_ids(model, tokenizer):
    """Every id that ends a response: the tokenizer's eos and those of the generation config."""
    also = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(also if isinstance(also, list) else [also] if also is not None else [])})


def sync_weights(policy):
    """Hand the new weights to the sampler. The hf engine samples from the trained weights themselves."""


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
        super().batch_select_indices(indices)
        self.buffer = None


# Rollout: tasks to scored token sequences


@dataclasses.dataclass
class Segment:
    """What the model saw and said without a break. The last three lists are as long as response_ids."""

    prompt_ids: list[int]
    response_ids: list[int] = dataclasses.field(default_factory=list)
    response_mask: list[int] = dataclasses.field(default_factory=list)       # 1: sampled; 0: the environment's
    rollout_logprobs: list[float] = dataclasses.field(default_factory=list)  # [nats]; 0 where the mask is
    advantage: float = 0.0
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None

    def append(self, ids, mask, logprobs):
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.rollout_logprobs += logprobs
        assert len(self.response_ids) == len(self.response_mask) == len(self.rollout_logprobs)


@dataclasses.dataclass
class Rollout:
    """One episode: its messages, its tokens (one segment, or more where the history was cut) and its score."""

    task: envs.Task
    number: int  # within the group
    episode: envs.Episode
    messages: list[dict]
    segments: list[Segment]
    steps: list[envs.Step] = dataclasses.field(default_factory=list)
    termination: str = ""  # done, truncated, length, context, error
    reward: float = 0.0

    @property
    def info(self) -> dict:
        return self.steps[-1].info if self.steps else {}

    @property
    def correct(self) -> float:
        return float(self.info.get("correct", 0.0)) if self.termination != "length" else 0.0

    @property
    def num_tokens(self) -> int:
        return sum(sum(segment.response_mask) for segment in self.segments)


def episode_reward(rollout: Rollout) -> float:
    """The scalar that is maximised: edit here, or point --reward-fn at a function of the same form.

    rollout.steps are the environment's answers, their .info the named parts, rollout.messages the texts. A reply
    cut by the length limit never reaches the environment and so earns nothing.
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
        return tokenizer("".join(message["content"] for message in messages), add_special_tokens=False).input_ids
    before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]
    text = tokenizer.apply_chat_template(before + messages, tokenize=False, add_generation_prompt=True)
    tail = text[text.index("reply") + len("reply"):]
    closing, eos, rest = tail.partition(tokenizer.eos_token)
    # Usually the reply's own eos closes the turn; a template with another closing mark keeps it.
    return tokenizer(rest if eos and not closing.strip() else tail, add_special_tokens=False).input_ids


def check_template(tokenizer, args, multi_turn):
    """Refuse a missing template, and one that changes earlier turns: the model would not read what it wrote."""
    if args.chat_template == "plain":
        return
    if tokenizer.chat_template is None:
        raise BadInput(f"--model {args.model}: its tokenizer has no chat template; use --chat-template plain")
    turns = [{"role": "user", "content": "one"},
             {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nthree"}, {"role": "user", "content": "four"}]
    texts = [tokenizer.apply_chat_template(part, tokenize=False) for part in (turns[:2], turns)]
    if multi_turn and not texts[1].startswith(texts[0].rstrip()):
        raise BadInput(f"--model {args.model}: its chat template rewrites earlier turns, so that a multi-turn model "
                       "would not read the tokens it sampled; use --chat-template plain or another model")


def rollout(model, tokenizer, env, tasks, num_samples, temperature, args, pool):
    """Play num_samples episodes of each task, all turns in step.  -> Rollouts, those of a task side by side."""
    prompts = [encode_prompt(task.messages, tokenizer, args) for task in tasks]
    rollouts = [Rollout(task, number, env.start(task, args.seed), list(task.messages), [Segment(prompt)])
                for task, prompt in zip(tasks, prompts, strict=True) for number in range(num_samples)]
    eos = set(eos_ids(model, tokenizer))
    live = [r for r in rollouts if fits(r, args)]
    while live:
        live.sort(key=lambda r: len(r.segments[-1].prompt_ids) + len(r.segments[-1].response_ids))
        longest = len(live[-1].segments[-1].prompt_ids) + len(live[-1].segments[-1].response_ids)
        # A cached token costs far less memory than a trained one, hence the factor.
        rows = max(1, 16 * args.microbatch_tokens // (longest + args.max_response_tokens))
        stepping = []
        for start in range(0, len(live), rows):
            part = live[start:start + rows]
            replies = generate(model, [r.segments[-1].prompt_ids + r.segments[-1].response_ids for r in part],
                               args.max_response_tokens, temperature, tokenizer)
            texts = tokenizer.batch_decode([ids for ids, _ in replies], skip_special_tokens=True)
            for r, (ids, logprobs), text in zip(part, replies, texts, strict=True):
                r.segments[-1].append(ids, 1, logprobs)
                r.messages.append({"role": "assistant", "content": text})
                if ids[-1] in eos:
                    stepping.append(r)
                else:
                    r.termination = "length"
        slices = [stepping[i::args.max_concurrent] for i in range(min(args.max_concurrent, len(stepping)))]
        list(pool.map(step_episodes, slices))
        live = [r for r in stepping if not r.termination and observe(r, tokenizer, args)]
    for r in rollouts:
        r.episode.close()
    return rollouts


def step_episodes(rollouts):
    """In a thread: hand each last reply to its environment. One that fails ends its episode, not the run."""
    for r in rollouts:
        try:
            step = r.episode.step(r.messages[-1]["content"])
        except Exception as error:
            tqdm.write(f"task {r.task.id}: the environment failed: {type(error).__name__}: {error}", sys.stderr)
            r.termination = "error"
            continue
        r.steps.append(step)
        r.termination = "done" if step.terminated else "truncated" if step.truncated else ""


def fits(r, args):
    """Whether another reply fits the context budget; if not, the episode ends here."""
    used = len(r.segments[-1].prompt_ids) + len(r.segments[-1].response_ids)
    if used + args.max_response_tokens > args.max_context_tokens:
        r.termination = "context"
    return not r.termination


def observe(r, tokenizer, args):
    """Append the environment's answer. A history over the budget is cut after the task and starts a segment."""
    r.messages += r.steps[-1].messages
    answer = encode_answer(r.steps[-1].messages, tokenizer, args)
    r.segments[-1].append(answer, 0, [0.0] * len(answer))
    head, history = r.task.messages, r.messages[len(r.task.messages):]
    replies = [i for i, message in enumerate(history) if message["role"] == "assistant"]
    for first in replies if not fits(r, args) else ():
        segment = Segment(encode_prompt(head + history[first:], tokenizer, args))
        if len(segment.prompt_ids) + args.max_response_tokens <= args.max_context_tokens:
            r.segments[-1] = dataclasses.replace(
                r.segments[-1], response_ids=r.segments[-1].response_ids[:-len(answer)],
                response_mask=r.segments[-1].response_mask[:-len(answer)],
                rollout_logprobs=r.segments[-1].rollout_logprobs[:-len(answer)])
            r.segments.append(segment)
            r.termination = ""
            break
    return not r.termination


# Update: segments to a gradient


def microbatches(segments, budget):
    """Cut segments, in order, into passes of at most `budget` padded response tokens (at least one segment)."""
    part, longest = [], 0
    for segment in segments:
        longest = max(longest, len(segment.response_ids))
        if part and longest * (len(part) + 1) > budget:
            yield part
            part, longest = [], len(segment.response_ids)
        part.append(segment)
    if part:
        yield part


def collate(segments, pad_id, device):
    """Tensors of a pass: prompts (U, P) padded left, each once; all else (B, T), padded right."""
    unique = {}
    rows = [unique.setdefault(tuple(segment.prompt_ids), len(unique)) for segment in segments]

    def right(name, dtype):
        return pad([getattr(segment, name) for segment in segments], 0, device, dtype=dtype)

    batch = dict(
        prompts=pad([list(prompt) for prompt in unique], pad_id, device, left=True),
        prompt_mask=pad([[1] * len(prompt) for prompt in unique], 0, device, left=True),
        prompt_of_row=torch.tensor(rows, device=device),
        responses=pad([segment.response_ids for segment in segments], pad_id, device),
        valid=pad([[1] * len(segment.response_ids) for segment in segments], 0, device),
        response_mask=right("response_mask", torch.float32),
        rollout_logprobs=right("rollout_logprobs", torch.float32),
        advantages=torch.tensor([[segment.advantage] for segment in segments], device=device))
    for name in ("old_logprobs", "ref_logprobs"):
        if getattr(segments[0], name) is not None:
            batch[name] = right(name, torch.float32)
    return batch


@torch.no_grad()
def store_logprobs(model, segments, name, args, pad_id, device):
    """Write the model's log-probabilities of each response into segment.<name>."""
    for part in microbatches(segments, args.microbatch_tokens):
        with precision(args, device):
            logprobs, _ = token_logprobs(model, collate(part, pad_id, device), args.temperature)
        for segment, row in zip(part, logprobs.tolist(), strict=True):
            setattr(segment, name, row[:len(segment.response_ids)])


def pass_loss(model, batch, weight, args):
    """The share of the minibatch's loss that lies in this pass, and sums over its tokens for the log."""
    logprobs, entropy = token_logprobs(model, batch, args.temperature)                   # (B, T)
    mask, rollout_logprobs = batch["response_mask"], batch["rollout_logprobs"]
    # On policy, the policy before the update is the one being differentiated.
    old_logprobs = batch.get("old_logprobs", logprobs.detach())
    per_token, clipped = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, args.loss,
                                     args.clip_low, args.clip_high)
    mismatch = torch.exp(old_logprobs - rollout_logprobs)                                # raw, before the cap
    if args.tis_cap:
        # Truncated importance sampling: the sampler's numerics differ a little from the trainer's.
        per_token = per_token * mismatch.clamp(max=args.tis_cap)
    ref_logprobs = batch.get("ref_logprobs", logprobs.detach())
    kl = k3(ref_logprobs - logprobs)
    loss = ((per_token + args.kl_coef * kl - args.entropy_coef * entropy) * weight).sum()
    sums = dict(policy_loss=(per_token * weight).sum(), kl_loss=(kl * mask).sum(), entropy=(entropy * mask).sum(),
                k1=((logprobs - ref_logprobs) * mask).sum(), clipfrac=(clipped * mask).sum(),
                approx_kl=(k3(logprobs - old_logprobs) * mask).sum(), advantage=(batch["advantages"] * mask).sum(),
                mismatch_kl=(k3(old_logprobs - rollout_logprobs) * mask).sum(),
                frac_capped=((mismatch > (args.tis_cap or math.inf)) * mask).sum(), tokens=mask.sum())
    return loss, {name: value.detach().double() for name, value in sums.items()}, (mismatch * mask).detach().max()


def update(model, reference, optimizer, groups, args, pad_id, device):
    """All optimiser steps of an iteration on groups of segments.  -> metrics, number of steps."""
    segments = [segment for group in groups for segment in group]
    if not args.on_policy:
        store_logprobs(model, segments, "old_logprobs", args, pad_id, device)
    if args.kl_coef:
        with reference() as frozen:
            store_logprobs(frozen, segments, "ref_logprobs", args, pad_id, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals, norms, ratio_max = {}, [], torch.zeros((), device=device)
    for _ in range(args.epochs):
        order = torch.randperm(len(groups)).tolist() if not args.on_policy else range(len(groups))
        for chosen in np.array_split(np.array(order), min(args.minibatches, len(groups))):
            rows = [segment for index in chosen for segment in groups[index]]
            num_tokens, num_sequences = sum(sum(s.response_mask) for s in rows), len(rows)
            for part in microbatches(rows, args.microbatch_tokens):
                batch = collate(part, pad_id, device)
                weight = token_weights(batch["response_mask"], args.aggregation, num_tokens, num_sequences,
                                       args.max_response_tokens)
                with precision(args, device):
                    loss, sums, largest = pass_loss(model, batch, weight, args)
                loss.backward()
                totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
                ratio_max = torch.maximum(ratio_max, largest)
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm))
            if not torch.isfinite(norms[-1] + sums["policy_loss"]):
                raise FloatingPointError(f"loss {float(loss)} with gradient norm {float(norms[-1])}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    names = list(totals)
    values = torch.stack([*totals.values(), torch.stack(norms).double().mean(), ratio_max.double()]).tolist()
    totals, grad_norm, ratio_max = dict(zip(names, values)), values[-2], values[-1]
    mean = {name: value / (len(norms) if name == "policy_loss" else totals["tokens"]) for name, value in totals.items()}
    metrics = {f"train/{name}": mean[name] for name in
               ("policy_loss", "kl_loss", "entropy", "clipfrac", "approx_kl", "advantage")}
    metrics |= {"train/grad_norm": grad_norm, "mismatch/kl": mean["mismatch_kl"], "mismatch/ratio_max": ratio_max,
                "mismatch/frac_capped": mean["frac_capped"]}
    return metrics | ({"kl/k1": mean["k1"]} if args.kl_coef else {}), len(norms)


# Evaluate: the same rollout on held-out tasks, no update, fixed seeds


def evaluate(model, tokenizer, env, args, device, pool, score):
    """pass@1 and pass@n at --eval-temperature, and greedy accuracy, by source.  -> metrics, sampled Rollouts."""
    tasks = [env.task("test", index) for index in range(min(args.eval_tasks, env.num_tasks("test")))]
    torch.manual_seed(args.seed)  # the same draws at every evaluation; the next iteration seeds anew
    with precision(args, device):
        sampled = rollout(model, tokenizer, env, tasks, args.eval_samples, args.eval_temperature, args, pool)
        greedy = rollout(model, tokenizer, env, tasks, 1, 0.0, args, pool)
    metrics = {}
    for source in sorted({task.source for task in tasks}):
        mine = [r for r in sampled if r.task.source == source]
        correct = np.array([r.correct for r in mine]).reshape(-1, args.eval_samples)     # (tasks, n)
        metrics[f"val/{source}/pass@1"] = float(correct.mean())
        metrics[f"val/{source}/pass@{args.eval_samples}"] = float(correct.max(1).mean())
        metrics[f"val/{source}/greedy"] = float(np.mean([r.correct for r in greedy if r.task.source == source]))
        for part in sorted({part for r in mine for part in r.info}):
            metrics[f"val/{source}/{part}"] = float(np.mean([float(r.info.get(part, 0.0)) for r in mine]))
    for r in sampled:
        r.reward = score(r)
    return metrics, sampled


# Log and checkpoint: the run folder


def describe_run(args, algo, model_hash, source=""):
    """The meta line: what identifies a run. `source` is code that changes the result, such as the reward's."""
    def git(*command):
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    flags = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                    transformers=transformers.__version__, **({"cuda": torch.version.cuda} if torch.version.cuda else {}))
    now = datetime.now(timezone.utc)
    return dict(
        schema_version=1, run_id=f"{now:%Y%m%d_%H%M%S}__{algo}__{Path(args.env).stem}__s{args.seed}", algo=algo,
        env=args.env, seed=args.seed, args=flags, config_hash=sha256(json.dumps(flags) + source),
        reward_sha256=sha256(source), git_sha=git("rev-parse", "HEAD"), git_dirty=bool(git("status", "--porcelain")),
        versions=versions, device=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        argv=sys.argv, started_at=now.isoformat(), model=args.model, model_sha256=model_hash)


def sha256(data):
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def weights_sha256(model):
    """Hash of the names, shapes and values of all weights."""
    parts = [f"{name} {tuple(tensor.shape)} {sha256(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())}"
             for name, tensor in sorted(model.state_dict().items())]
    return sha256("\n".join(parts))


class Run:
    """A run folder: train_log.jsonl and TensorBoard with the same numbers, checkpoints, receipts.

    A folder that holds a checkpoint is continued. Every file that a kill could tear is written beside its place,
    flushed to the disk and renamed.
    """

    MAY_CHANGE = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints", "log_episodes", "print_samples",
                  "track", "max_concurrent"}  # flags that leave the numbers as they are

    def __init__(self, args, meta):
        self.args, self.meta = args, meta
        self.dir = Path(args.run_dir or Path("runs", args.experiment, meta["run_id"]))
        self.checkpoint, self.state, self.log = None, None, None
        try:
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.dir / "train_log.jsonl").open("ab").close()
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: not a folder that can be written to ({error})") from error
        self._find_checkpoint()
        if self.state:
            self._check_same_run()

    def _find_checkpoint(self):
        """The newest complete checkpoint; a damaged one is named and the one before it taken."""
        folders = sorted((self.dir / "checkpoints").glob("step_*"), reverse=True)
        for folder in folders:
            try:
                for name, digest in json.loads((folder / "manifest.json").read_text()).items():
                    if sha256((folder / name).read_bytes()) != digest:
                        raise ValueError(f"{name} has changed since it was written")
                self.state = torch.load(folder / "trainer_state.pt", weights_only=True)
                self.checkpoint = folder
                return
            except (OSError, ValueError, KeyError) as error:
                print(f"checkpoint {folder} is damaged ({error}); trying the one before", file=sys.stderr)
        if folders:
            raise BadInput(f"--run-dir {self.dir}: every checkpoint in it is damaged; use another folder")

    def _check_same_run(self):
        """Refuse, by name, whatever would make the continued run another run."""
        try:
            with (self.dir / "train_log.jsonl").open() as log:
                old = json.loads(log.readline())["meta"]
        except (ValueError, KeyError) as error:
            raise BadInput(f"{self.dir}/train_log.jsonl: expected a meta line first ({error})") from error
        for name, value in self.meta["args"].items():
            if name not in self.MAY_CHANGE and old["args"].get(name) != value:
                raise BadInput(f"--{name.replace('_', '-')} {value}: the run in {self.dir} was started with "
                               f"{old['args'].get(name)}; give that, or another --run-dir")
        for key, what in (("model_sha256", "the weights of --model"), ("reward_sha256", "the reward function")):
            if old[key] != self.meta[key]:
                raise BadInput(f"--run-dir {self.dir}: {what} changed since the run was started")
        self.meta = dict(self.meta, run_id=old["run_id"])

    def open(self):
        """Write the meta line, or cut the log to the checkpoint and mark the place."""
        path, counters = self.dir / "train_log.jsonl", ("iteration", "env_steps", "opt_steps")
        content = json.dumps({"meta": self.meta}) + "\n"
        if self.state:
            data, end = path.read_bytes(), self.state["log_bytes"]
            kept = [line for line in data[end:].splitlines(True) if line.endswith(b"\n")
                    and not {"resume", "error"}.isdisjoint(json.loads(line))]
            resume = dict(run_id=self.meta["run_id"], trace_id=self.trace_id(self.state["opt_steps"]),
                          **{name: self.state[name] for name in counters}, checkpoint=self.checkpoint.name,
                          git_sha=self.meta["git_sha"], at=self.meta["started_at"])
            content = (data[:end] + b"".join(kept)).decode() + json.dumps({"resume": resume}) + "\n"
        iteration = self.state["iteration"] if self.state else -1
        for folder in self.dir.glob("episodes/*_step_*"):
            if int(folder.name.rpartition("_")[2]) > iteration:
                shutil.rmtree(folder)  # written again, and summaries add up
        replace_file(path, content.encode())
        self.log = path.open("ab")
        self.writer = SummaryWriter(self.dir, purge_step=iteration + 1)

    def trace_id(self, opt_steps):
        return f"{self.meta['run_id']}:{opt_steps}"

    def record(self, counters, values):
        """One line of numbers, all finite, to the log and to TensorBoard."""
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise FloatingPointError(f"{bad[0]} is {values[bad[0]]} at iteration {counters['iteration']}")
        self.write(dict(run_id=self.meta["run_id"], trace_id=self.trace_id(counters["opt_steps"]), **counters, **values))
        for name, value in values.items():
            self.writer.add_scalar(name, value, counters["iteration"])

    def write(self, line):
        self.log.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self.log.flush()

    def save(self, model, tokenizer, state):
        """checkpoints/step_<iteration>, complete or not at all; then drop the oldest."""
        os.fsync(self.log.fileno())
        folder = self.dir / "checkpoints" / f"step_{state['iteration']:06d}"
        temporary = folder.with_name(f".{folder.name}.writing")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            torch.save(dict(state, log_bytes=self.log.tell()), temporary / "trainer_state.pt")
            manifest = {path.name: sha256(path.read_bytes()) for path in sorted(temporary.iterdir())}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                flush_to_disk(path)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            flush_to_disk(folder.parent)
            replace_file(folder.parent / "state.json", json.dumps({"last": folder.name}).encode())
        except OSError as error:
            raise OSError(f"checkpoint {folder} could not be written ({error}); those before it stay") from error
        if self.args.keep_checkpoints:
            for old in sorted(folder.parent.glob("step_*"))[:-self.args.keep_checkpoints]:
                shutil.rmtree(old)

    def fail(self, error, counters, evidence):
        """A receipt: what is needed to look into a failure, and an error line that names it.  -> its folder."""
        trace_id = self.trace_id(counters["opt_steps"])
        folder = self.dir / "receipts" / trace_id
        folder.mkdir(parents=True, exist_ok=True)
        report = dict(self.meta, **counters, type=type(error).__name__, message=str(error),
                      traceback=traceback.format_exception(error))
        (folder / "receipt.json").write_text(json.dumps(report, indent=1))
        (folder / "evidence.json").write_text(json.dumps(evidence, indent=1))
        self.write({"trace_id": trace_id, "error": {"type": type(error).__name__, "message": str(error),
                                                    "receipt": str(folder.relative_to(self.dir))}})
        return folder


def flush_to_disk(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def replace_file(path, data):
    """Write data beside path and rename, so that path is the old file or the new one, never a torn one."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_bytes(data)
    flush_to_disk(temporary)
    temporary.replace(path)


def write_episodes(folder, rollouts, rate, table_rows, writer, iteration):
    """A share of the episodes as JSON, a table of the first ones, and a summary that adds up over writes."""
    chosen = [r for r in rollouts if random.Random(f"{iteration} {r.task.id} {r.number}").random() < rate]
    rows = [dict(prompt=r.task.messages[-1]["content"], response=r.messages[-1]["content"], reward=r.reward,
                 is_correct=r.correct, data_source=r.task.source, metrics_json=json.dumps(r.info))
            for r in rollouts[::max(1, len(rollouts) // table_rows)][:table_rows]] if table_rows else []
    if not chosen and not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for r in chosen:
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in r.task.id)
        (folder / f"{name}_{r.number}.json").write_text(json.dumps(dict(
            task_id=r.task.id, source=r.task.source, number=r.number, reward=r.reward, correct=r.correct, info=r.info,
            termination=r.termination, turns=len(r.steps), messages=r.messages,
            segments=[dataclasses.asdict(segment) for segment in r.segments]), indent=1))
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else dict(episodes=0, reward_sum=0, correct_sum=0, written=0)
    added = dict(episodes=len(rollouts), reward_sum=sum(r.reward for r in rollouts),
                 correct_sum=sum(r.correct for r in rollouts), written=len(chosen))
    summary = {name: summary[name] + value for name, value in added.items()}
    replace_file(path, json.dumps(summary, indent=1).encode())
    if rows:
        replace_file(folder / "table.json", json.dumps(rows, indent=1).encode())
        lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
        lines += ["| " + " | ".join(str(v).replace("|", "\\|").replace("\n", "<br>") for v in row.values()) + " |"
                  for row in rows]
        writer.add_text("val/samples", "\n".join(lines), iteration)


def print_samples(rollouts, count, title):
    """Prompt, response and reward in colours."""
    for r in rollouts[::max(1, len(rollouts) // max(count, 1))][:count]:
        reply = "\n".join(message["content"] for message in r.messages[len(r.task.messages):])
        tqdm.write(f"\033[2m{title} {r.task.id}\033[0m \033[34m{r.task.messages[-1]['content']}\033[0m "
                   f"\033[{'32' if r.correct else '33'}m{reply}\033[0m reward {r.reward:g} ({r.termination})")


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


def spread(name, values):
    """{name/mean, name/max, name/min}, zeros when there is nothing."""
    values = np.array(values if len(values) else [0.0], dtype=np.float64)
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def rollout_metrics(rollouts, seconds):
    """What the log says of an iteration's episodes."""
    rewards = [r.reward for r in rollouts]
    ends = ("done", "truncated", "length", "context", "error")
    shares = {end: sum(r.termination == end for r in rollouts) / len(rollouts) for end in ends}
    tokens = sum(r.num_tokens for r in rollouts)
    return {
        "train/reward": float(np.mean(rewards)), "train/pass@1": float(np.mean([r.correct for r in rollouts])),
        **spread("critic/score", rewards), **spread("critic/rewards", rewards),
        **spread("response_length", [sum(len(s.response_ids) for s in r.segments) for r in rollouts]),
        "response_length/clip_ratio": shares["length"] + shares["context"],
        **spread("prompt_length", [len(r.segments[0].prompt_ids) for r in rollouts]),
        "rollout/throughput": tokens / seconds, "rollout/finished": shares["done"],
        "rollout/turns": float(np.mean([sum(m["role"] == "assistant" for m in r.messages) for r in rollouts])),
        **{f"rollout/termination/{end}": share for end, share in shares.items()}}


def system_metrics(since):
    """Of this process. `since` is (wall time, processor time) at the record before [s]."""
    wall, processor = time.perf_counter(), time.process_time()
    metrics = {"system/memory_usage": psutil.Process().memory_info().rss / 2**30,
               "system/cpu_utilization": (processor - since[1]) / (wall - since[0])}
    if torch.cuda.is_available():
        metrics["system/gpu_memory"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics


def main(args):
    # Set-up: whatever is wrong with the input is found here, before anything is trained.
    load_dotenv(".env")
    torch.set_num_threads(args.threads)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    env = envs.make(args.env, **envs.parse_options(args.env_kwargs))
    score = envs.load_object(args.reward_fn, "--reward-fn") if args.reward_fn else episode_reward
    tokenizer = load_tokenizer(args.model)
    check_template(tokenizer, args, env.multi_turn)
    frozen_dtype = torch.bfloat16 if args.lora_rank and args.dtype == "bfloat16" else torch.float32
    base = load_weights(args.model, frozen_dtype)
    run = Run(args, describe_run(args, "grpo", weights_sha256(base), envs.source_of(score)))
    if args.lora_rank:
        model = add_lora(base, args, run.checkpoint)
    else:
        model = load_weights(str(run.checkpoint)) if run.checkpoint else base
    model.to(device)
    start = load_weights(args.model).to(device) if args.kl_coef and not args.lora_rank else None
    reference = functools.partial(frozen_reference, model, start)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, args.beta2), fused=True,
                                  weight_decay=args.weight_decay)
    counters, cursor, elapsed = dict(iteration=0, env_steps=0, opt_steps=0), 0, 0.0
    if run.state:
        optimizer.load_state_dict(run.state["optimizer"])
        counters = {name: run.state[name] for name in counters}
        cursor, elapsed = run.state["cursor"], run.state["elapsed"]
    if args.track:
        import wandb
        wandb.init(project="plainrl", name=run.meta["run_id"], config=run.meta["args"], dir=run.dir, sync_tensorboard=True)
    run.open()
    num_weights = sum(parameter.numel() for parameter in parameters)
    print(f"{run.dir}\n{args.prompts_per_iteration} prompts x {args.group_size} responses = "
          f"{args.responses_per_iteration} episodes an iteration, in {args.epochs * args.minibatches} optimiser step(s), "
          f"passes of {args.microbatch_tokens} tokens; {num_weights:,} trained weights on {device}"
          + (f"; continuing after iteration {counters['iteration']}" if run.state else ""))
    pool = ThreadPoolExecutor(args.max_concurrent)
    progress = tqdm(total=args.iterations, initial=counters["iteration"], disable=None, unit="it")
    times, before, rollouts = {}, (time.perf_counter(), time.process_time()), []
    start_time = time.perf_counter() - elapsed

    @contextlib.contextmanager
    def timed(name):
        began = time.perf_counter()
        yield
        times[name] = times.get(name, 0.0) + time.perf_counter() - began

    def validate():
        with timed("eval"):
            metrics, samples = evaluate(model, tokenizer, env, args, device, pool, score)
            folder = run.dir / "episodes" / f"val_step_{counters['iteration']:06d}"
            write_episodes(folder, samples, args.log_episodes, args.val_table_samples, run.writer, counters["iteration"])
            print_samples(samples, args.print_samples, "val")
        tqdm.write(f"iteration {counters['iteration']}: " + ", ".join(
            f"{name.removeprefix('val/')} {value:.3f}" for name, value in metrics.items() if "@" in name or "greedy" in name))
        return metrics

    def record(values):
        nonlocal times, before
        wall = time.perf_counter() - start_time
        tokens = counters["env_steps"] - record.tokens
        speed = tokens / max(time.perf_counter() - before[0], 1e-9)
        values |= {f"time/{name}": times.get(name, 0.0) for name in ("rollout", "update", "sync", "eval", "checkpoint")}
        run.record(counters, dict(wall_time_s=wall, sps=speed) | values | system_metrics(before))
        times, before, record.tokens = {}, (time.perf_counter(), time.process_time()), counters["env_steps"]

    record.tokens = counters["env_steps"]
    try:
        if not run.state:
            record(validate())
        for iteration in range(counters["iteration"] + 1, args.iterations + 1):
            torch.manual_seed(args.seed * 1_000_003 + iteration)  # so that a resume needs no generator's state

            # 1. Rollout: group_size responses to each prompt, from the current policy.
            groups, rollouts, submitted = [], [], 0
            with timed("rollout"):
                for _ in range(1 + args.dynamic_sampling):
                    tasks = [env.task("train", task_index(cursor + i, args.seed, env.num_tasks("train")))
                             for i in range(args.prompts_per_iteration)]
                    cursor += len(tasks)
                    with precision(args, device):
                        fresh = rollout(model, tokenizer, env, tasks, args.group_size, args.temperature, args, pool)
                    for r in fresh:
                        r.reward = float(score(r))
                    rollouts += fresh

                    # 2. Advantages: each reward against its group; a group without signal is dropped.
                    rewards = torch.tensor([r.reward for r in fresh]).view(-1, args.group_size)
                    correct = torch.tensor([r.correct for r in fresh]).view(-1, args.group_size)
                    advantages = group_advantages(rewards, args.scale_rewards, args.baseline, args.advantage_balance)
                    alive = (rewards != rewards[:, :1]).any(1) | (correct != correct[:, :1]).any(1)
                    for index in alive.nonzero().flatten().tolist():
                        group = []
                        for r, advantage in zip(fresh[index * args.group_size:(index + 1) * args.group_size],
                                                advantages[index].tolist(), strict=True):
                            for segment in r.segments:
                                segment.advantage = advantage
                                if not (args.mask_truncated and r.termination in ("length", "context")):
                                    group.append(segment)
                        groups.append([segment for segment in group if any(segment.response_mask)])
                    submitted += len(tasks)
                    if len(groups) >= args.prompts_per_iteration:
                        break
            trainable = len(groups)
            groups = [group for group in groups if group][:args.prompts_per_iteration]

            # 3. and 4. Old log-probabilities, where the policy moves within the iteration; update.
            rate = learning_rate(iteration, args)
            for parameter_group in optimizer.param_groups:
                parameter_group["lr"] = rate
            metrics, steps = dict.fromkeys(NO_UPDATE, 0.0), 0
            with timed("update"):
                if groups:
                    metrics, steps = update(model, reference, optimizer, groups, args, tokenizer.pad_token_id, device)
                weight_norm = float(torch.nn.utils.get_total_norm(parameters))

            # 5. Hand the new weights to the sampler.
            with timed("sync"):
                sync_weights(model)

            # 6. Log, evaluate, checkpoint.
            counters = dict(iteration=iteration, env_steps=counters["env_steps"] + sum(r.num_tokens for r in rollouts),
                            opt_steps=counters["opt_steps"] + steps)
            trained = [segment.advantage for group in groups for segment in group]
            metrics |= rollout_metrics(rollouts, times["rollout"])
            metrics |= {"train/learning_rate": rate, "train/global_step": counters["opt_steps"],
                        "train/weight_norm": weight_norm, "rollout/groups_submitted": submitted,
                        "rollout/groups_trainable": trainable,
                        **spread("critic/advantages", trained), **spread("critic/returns", trained)}
            if iteration == 1:
                first = rollouts[0].segments[0]
                tqdm.write(f"first prompt {tokenizer.decode(first.prompt_ids)!r} and response "
                           f"{tokenizer.decode(first.response_ids)!r}")
            print_samples(rollouts, args.print_samples, "train")
            write_episodes(run.dir / "episodes" / f"train_step_{iteration:06d}", rollouts, args.log_episodes, 0,
                           run.writer, iteration)
            line = dict(reward=metrics["train/reward"], pass1=metrics["train/pass@1"], grad=metrics["train/grad_norm"],
                        trainable=trainable / submitted)
            progress.set_postfix({name: f"{value:.3f}" for name, value in line.items()}, refresh=False)
            progress.update()
            if progress.disable:
                print(f"{iteration}/{args.iterations} " + " ".join(f"{name} {value:.3f}" for name, value in line.items()))
            last = iteration == args.iterations
            if last or args.eval_every and iteration % args.eval_every == 0:
                metrics |= validate()
            record(metrics)
            if last or iteration % args.checkpoint_every == 0:
                with timed("checkpoint"):
                    run.save(model, tokenizer, dict(counters, cursor=cursor, elapsed=time.perf_counter() - start_time,
                                                    optimizer=optimizer.state_dict()))
    except (Exception, KeyboardInterrupt) as error:
        progress.close()
        evidence = [dict(task_id=r.task.id, messages=r.messages, reward=r.reward) for r in rollouts[:64]]
        receipt = run.fail(error, counters, evidence)
        if isinstance(error, (FloatingPointError, KeyboardInterrupt, OSError, BadInput)):
            raise SystemExit(f"error: {type(error).__name__}: {error} (receipt: {receipt})") from None
        raise
    finally:
        run.writer.close()
    progress.close()


NO_UPDATE = ("train/policy_loss", "train/kl_loss", "train/entropy", "train/clipfrac", "train/approx_kl",
             "train/advantage", "train/grad_norm", "mismatch/kl", "mismatch/ratio_max", "mismatch/frac_capped")


@contextlib.contextmanager
def frozen_reference(model, base):
    """The starting model: a second copy, or the adapter's base with the adapter switched off."""
    if base is None:
        with model.disable_adapter():
            yield model
    else:
        yield base


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except BadInput as problem:
        sys.exit(f"error: {problem}")
