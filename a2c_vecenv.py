"""A2C: synchronous advantage actor-critic on thousands of vectorised pixel environments.

    loss = mean[ -A_t log pi(a_t|s_t) + value_coef (R_t - V(s_t))^2 - entropy_coef H(pi(.|s_t)) ]

n-step returns (arXiv:1602.01783, algorithm S3), or their average by GAE (arXiv:1506.02438). The actors of
the paper are rows of one tensor here, and all wait for the update. An episode that a time limit cut is not
over: its last observation still has a value (arXiv:1712.00378).

A2C updates once on what it collected, with the weights that collected it. So the forward pass that chose the
actions *is* that of the update: its graph is kept, no observation is stored, and nothing is computed twice.

    python a2c_vecenv.py                                        # the pixel goal, 100 s on one CPU core
    python a2c_vecenv.py --env-id CartPole-v1 --num-envs 8      # any Gymnasium id with discrete actions
    python a2c_vecenv.py --num-envs 16384 --num-steps 4 --network nature --dtype bfloat16 --cudagraphs
    torchrun --nproc_per_node=2 a2c_vecenv.py --num-envs 1024   # shared by two GPUs or CPU cores
    python a2c_vecenv.py --self-test                            # a toy world in 20 s: JSON, exit code 0 or 1

Expect eval/success_rate to leave 0 near 100,000 steps and to end at 1.00, sampled and greedy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import tyro
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs
from envs import BadInput
from envs.pixels import VEC_ENVS, join_states, make_vec, state_of_rows


@dataclasses.dataclass
class Args:
    # Environment
    env_id: str = "pixel-goal"
    """pixel-goal, pyboy (a Game Boy), or any Gymnasium id with discrete actions"""
    env_kwargs: tuple[str, ...] = ()
    """options of the environment, as key=value (docs/pixel_goal.md)"""
    alpha: float = 5.0
    """goal environments: reward of coming closer, per distance; one step comes 0.03 closer"""
    num_envs: int = 32
    """environments, stepped together"""

    # Algorithm
    iterations: int = 1200
    """rollouts, of num_envs x num_steps environment steps each"""
    num_steps: int = 16
    """steps of each environment per rollout; 1 is TD(0)"""
    update_every: int = 1
    """rollouts per optimiser step; their gradients are averaged"""
    gamma: float = 0.99
    """discount per step"""
    gae_lambda: float = 0.95
    """1: n-step returns; 0: one-step TD"""
    bootstrap_truncated: bool = True
    """a time limit is not an end: the value of the last observation counts"""
    normalize_advantages: bool = True
    """mean 0, standard deviation 1 over the rollout"""
    value_coef: float = 0.05
    """weight of the squared error of the values; returns reach 12 here, and 0.5 would drown the policy"""
    entropy_coef: float = 0.05
    """weight of the policy's entropy [per nat]"""
    learning_rate: float = 1e-3
    """of Adam"""
    anneal: bool = True
    """learning rate and entropy bonus fall linearly to 0; without it the greedy policy lags behind"""
    max_grad_norm: float = 0.5
    """the gradient is clipped to this norm"""

    # Network
    network: Literal["small", "nature", "patch"] = "small"
    """encoder of pictures; an environment with vectors gets an MLP"""
    hidden_size: int = 128
    """width of the last layer before policy and value (nature: 512 in the paper)"""

    # Speed: none of these changes the result beyond rounding
    chunk: int = 256
    """rows per forward and backward pass, so that they stay in the cache"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; the weights, the losses and the sums stay in float32"""
    recompute: bool = False
    """keep observations instead of activations: less memory, a quarter slower"""
    compile: bool = False
    """torch.compile of the network"""
    cudagraphs: bool = False
    """compile it into CUDA graphs (mode reduce-overhead)"""
    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda, cuda:1, ..."""
    threads: int = 1
    """CPU threads of a process; a second one hardly helps networks of this size"""
    dist_timeout: float = 1800.0
    """longest wait for another process, under torchrun [s]"""

    # Evaluation, log and checkpoints
    eval_every: int = 100
    """iterations between evaluations; 0: only at the end"""
    eval_episodes: int = 128
    """episodes per evaluation, sampled and again greedy"""
    eval_envs: int = 64
    """separate environments that play them; each plays the same number"""
    log_every: int = 20
    """iterations per record"""
    checkpoint_every: int = 200
    """iterations between checkpoints"""
    keep_checkpoints: int = 2
    """the last so many are kept; 0: all"""
    run_dir: str = ""
    """run folder; one that holds a checkpoint is continued (empty: runs/<experiment>/<run_id>)"""
    experiment: str = "a2c"
    """runs of one experiment share a folder"""
    track: bool = False
    """mirror TensorBoard to Weights & Biases"""
    seed: int = 1
    """of weights, actions and environments"""
    self_test: bool = False
    """learn a toy world, print the verdict as JSON and exit with 0 or 1"""

    def __post_init__(self):
        for name in ("num_envs", "iterations", "num_steps", "update_every", "chunk", "threads", "hidden_size",
                     "eval_episodes", "eval_envs", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 1 or more")
        finite = ("learning_rate", "max_grad_norm", "entropy_coef", "value_coef", "eval_every",
                  "keep_checkpoints")
        largest = dict(gamma=1, gae_lambda=1, seed=2**31, dist_timeout=1e9)
        for name, top in (largest | dict.fromkeys(finite, sys.float_info.max)).items():
            value = getattr(self, name)
            if not 0 <= value <= top or name in ("max_grad_norm", "dist_timeout") and not value:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 0 to {top:g}")
        for name, unit in (("checkpoint_every", "log_every"), ("eval_every", "log_every"),
                           ("iterations", "log_every"), ("log_every", "update_every")):
            if getattr(self, name) % getattr(self, unit):  # no window and no gradient is left half full
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected a multiple of "
                               f"--{unit.replace('_', '-')} {getattr(self, unit)}")
        if self.normalize_advantages and self.num_envs * self.num_steps < 2:
            raise BadInput("--normalize-advantages needs two steps or more in a rollout")


METRICS = {
    "reward_mean": "reward per environment step",
    "done_rate": "steps that ended an episode by themselves (terminated) [fraction]",
    "trunc_rate": "steps at which a limit cut the episode [fraction]",
    "reset_rate": "steps after which a new episode began [fraction]",
    "success_rate": "done / reset: episodes that reached the goal [fraction]; 0 without a goal or a reset",
    "dist_p10": "distance to the goal in the last rollout, 10th percentile [0..1]; 0 without a goal",
    "dist_p50": "its median",
    "dist_p90": "its 90th percentile",
    "entropy_mean": "of the policy [nats]; log(number of actions) is random play",
    "value_mean": "predicted value, in the last rollout",
    "value_std": "its standard deviation",
    "action_hist": "how often each action was chosen [count]",
    "policy_loss": "mean of -A log pi; near 0 by construction where advantages are normalised",
    "value_loss": "mean squared error of the values",
    "explained_variance": "1 - var(R - V) / var(R) in the last rollout; 0 is a constant guess",
    "grad_norm": "norm of the gradient before clipping",
    "episode_return": "mean undiscounted return of the episodes that ended; 0 if none did",
    "episode_length": "their mean length [steps]",
    "eval/success_rate": "evaluation, actions sampled: episodes that reached the goal [fraction]",
    "eval/steps": "lower median length of those [steps]; 0 if none",
    "eval/return": "mean undiscounted return of all",
    "eval/greedy_success_rate": "the same with the likeliest action",
    "eval/greedy_steps": "the same with the likeliest action [steps]",
    "eval/greedy_return": "the same with the likeliest action",
    "wall_time_s": "seconds since the start, earlier parts of a continued run included [s]",
    "sps": "environment steps per second since the record before, evaluation included",
    "iteration": "rollouts so far",
    "env_steps": "environment steps so far",
    "opt_steps": "optimiser steps so far",
    "system/processes": "processes of torchrun; 1 without it",
    "system/memory_usage": "resident memory of the process; as all of system/*, of the first one [GiB]",
    "system/gpu_memory": "most GPU memory used so far [GiB], with CUDA",
}


# Maths


def gae(rewards, values, next_values, terminated, done, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16). All (T, E) -> (T, E).

    terminated stops the bootstrap (that state has no future); done stops the trace (the next row is another
    episode). next_values[t] is V of the observation that step t returned *before* any autoreset, so that a
    time limit still bootstraps. lam = 1 gives n-step returns minus values, lam = 0 the TD error.
    """
    deltas = rewards + gamma * next_values * ~terminated - values                            # (T, E)
    decay = gamma * lam * ~done
    advantages, trace = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = trace = deltas[t] + decay[t] * trace
    return advantages


def a2c_loss(logprobs, entropies, values, advantages, returns, value_coef, entropy_coef):
    """Policy gradient, value regression, entropy bonus (arXiv:1602.01783, section 4).  (T, E) -> scalars

    The gradient flows through logprobs, entropies and values; advantages and returns are constants.
    -> loss, policy loss, value loss
    """
    policy_loss = -(advantages * logprobs).mean()
    value_loss = (returns - values).square().mean()
    return policy_loss + value_coef * value_loss - entropy_coef * entropies.mean(), policy_loss, value_loss


def choose_actions(logits, greedy=False, others=(0, 0)):
    """An action from each row of logits (E, A), on their device: the first of A clocks to ring.

    others: so many rows before and after these are another process's. Their clocks are drawn too, and left
    alone, so that a row gets the same ones whoever holds it.
    """
    (E, A), (before, after) = logits.shape, others
    clocks = 1.0 if greedy else logits.new_empty(before + E + after, A).exponential_()[before:before + E]
    return (logits.softmax(-1) / clocks).argmax(-1)                                          # (E,)


# Network


class Agent(nn.Module):
    """Encoder with a policy head and a value head.  obs (E, *obs_shape) -> logits (E, A), values (E,)"""

    def __init__(self, env, network="small", hidden_size=128):
        super().__init__()
        self.decode, self.high = env.decode, env.obs_high
        channels = env.obs_shape[0]
        if len(env.obs_shape) == 1:
            body = [nn.Linear(channels, hidden_size), nn.Tanh()]
            body += [nn.Linear(hidden_size, hidden_size), nn.Tanh()]
        elif network == "patch":  # one linear map of tiles of 8 x 8 pixels
            body = [nn.Conv2d(channels, 16, 8, 8), nn.ReLU()]
        elif network == "nature":  # Mnih et al., Nature 518 (2015), Methods
            body = [nn.Conv2d(channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
            body += [nn.Conv2d(64, 64, 3, 1), nn.ReLU()]
        else:  # its predecessor of arXiv:1312.5602, section 4.1
            body = [nn.Conv2d(channels, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
        if len(env.obs_shape) == 3:
            try:
                size = nn.Sequential(*body)(torch.zeros(1, *env.obs_shape)).numel()
            except RuntimeError as error:
                raise BadInput(f"--network {network}: {env.obs_shape} pictures are too small") from error
            body += [nn.Flatten(), nn.Linear(size, hidden_size), nn.ReLU()]
        self.body = nn.Sequential(*body)
        self.policy, self.value = nn.Linear(hidden_size, env.num_actions), nn.Linear(hidden_size, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                gain = {self.policy: 0.01, self.value: 1.0}.get(layer, math.sqrt(2))  # first, act at random
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        hidden = self.body(self.decode(obs) * (1 / self.high))  # float32, a copy: obs is the environment's
        return self.policy(hidden).float(), self.value(hidden).squeeze(-1).float()


def forward(agent, obs, args):
    """The agent on any number of rows, in chunks that stay in the cache."""
    if not torch.is_grad_enabled():
        parts = [agent.forward(part) for part in obs.split(args.chunk)]  # not compiled: the rows may vary
    elif args.recompute:  # what a pass keeps must outlive the environment's buffer
        parts = [recompute(agent, part, use_reentrant=False, preserve_rng_state=False)
                 for part in obs.clone().split(args.chunk)]
    else:
        parts = [agent(part) for part in obs.split(args.chunk)]
    return parts[0] if len(parts) == 1 else [torch.cat(outputs) for outputs in zip(*parts, strict=True)]


def precision(args, device):
    """The arithmetic of every pass, sampling included, so that sampler and trainer agree."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


# Processes: those that torchrun started, if it did. Each holds all weights and its share of the environments.


UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


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


def whole(rows, env):
    """The columns of all processes, from those of this one's rows.  (..., env.num_envs) -> (..., all)"""
    return total(nn.functional.pad(rows, env.others))  # x + 0 is x, whatever the order of the sum


def gathered(item):
    """Of each process its item, in the order of ranks. For what is no tensor, and not in every iteration."""
    items = [item] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(items, item)
    return items


def from_rank_0(work):
    """What work() of rank 0 returns, on every rank; or its BadInput."""
    try:
        results = [work() if rank() == 0 else None]
    except BadInput as error:
        results = [error]
    if num_ranks() > 1:
        dist.broadcast_object_list(results)
    if isinstance(results[0], BadInput):
        raise results[0]
    return results[0]


def sum_gradients(agent):
    """Over processes, by one sum of one flat tensor."""
    grads = [weight.grad for weight in agent.parameters()]
    flat = total(torch.cat([grad.flatten() for grad in grads]))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))  # channels_last stays so


# Rollout and evaluation


def make_env(args, num_envs, device):
    """This process's share of num_envs environments."""
    rows = share(num_envs)
    goal = {"alpha": args.alpha} if args.env_id in VEC_ENVS else {}
    env = make_vec(args.env_id, len(rows), device, **goal | envs.parse_options(args.env_kwargs))
    env.others = rows.start, num_envs - rows.stop
    return env


def rollout(agent, env, obs, episodes, args):
    """num_steps of every environment with the current policy.

    -> obs after it; a dict of (num_steps, num_envs) tensors, of which logprobs, entropies and values carry
    the graph. episodes ("return" and "length" so far, (num_envs,)) is updated.
    """
    steps = []
    for _ in range(args.num_steps):
        logits, values = forward(agent, obs, args)
        actions = choose_actions(logits.detach(), others=env.others)
        obs, rewards, terminated, truncated, info = env.step(actions)
        # V of the last observation of an episode that was cut (0 without the bootstrap): what the environment
        # returned is already the first observation of the next one.
        cut_values = torch.zeros_like(rewards)
        if args.bootstrap_truncated and bool(truncated.any()):
            cut = truncated[info["reset_mask"]]
            with torch.no_grad():
                cut_values[truncated] = forward(agent, info["final_obs"][cut], args)[1]
        done = terminated | truncated
        episodes["return"] += rewards
        episodes["length"] += 1
        steps.append(dict(
            logits=logits, values=values, actions=actions, rewards=rewards, terminated=terminated,
            truncated=truncated, done=done, cut_values=cut_values,
            dist=info.get("dist", torch.zeros_like(rewards)).clone(),
            ended_return=episodes["return"] * done, ended_length=episodes["length"] * done))
        for so_far in episodes.values():
            so_far.masked_fill_(done, 0)
    batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}         # (T, E)
    log_pi = batch.pop("logits").log_softmax(-1)                                             # (T, E, A)
    batch["logprobs"] = log_pi.gather(-1, batch["actions"][..., None]).squeeze(-1)
    batch["entropies"] = -(log_pi.exp() * log_pi).sum(-1)
    # Autocast keeps the weights it has cast, so this pass must come after one with gradient.
    with torch.no_grad():
        last_values = forward(agent, obs, args)[1]
    next_values = torch.cat([batch["values"].detach()[1:], last_values[None]])
    batch["next_values"] = torch.where(batch["truncated"], batch["cut_values"], next_values)
    return obs, batch


@torch.no_grad()
def evaluate(agent, env, args, greedy):
    """Exactly eval_episodes episodes. Each environment plays its share, so that short ones are not preferred.

    -> success rate, lower median of the steps of successes, mean return
    """
    torch.manual_seed(args.seed)  # the same draws at every evaluation; each iteration seeds anew
    first = env.others[0]
    obs = env.reset(args.seed + 1_000_000 + first)  # starts that training seeds do not begin with
    rows = torch.arange(first, first + env.num_envs, device=env.device)
    due = (args.eval_episodes - rows + args.eval_envs - 1) // args.eval_envs                 # of each row
    played, returns, lengths = (torch.zeros(env.num_envs, device=env.device) for _ in range(3))
    found, all_due = [torch.zeros(0, 3, device=env.device)], int(due.sum())
    while sum(map(len, found)) < all_due:
        logits, _ = forward(agent, obs, args)
        obs, rewards, terminated, _, info = env.step(choose_actions(logits, greedy, env.others))
        returns += rewards
        lengths += 1
        counts = info["reset_mask"] & (played < due)
        if counts.any():
            found.append(torch.stack([returns, lengths, terminated & env.has_goal], -1)[counts])
        played += info["reset_mask"]
        returns, lengths = returns * ~info["reset_mask"], lengths * ~info["reset_mask"]
    returns, lengths, success = torch.cat(gathered(torch.cat(found).cpu())).unbind(-1)
    steps = lengths[success > 0].median().item() if success.any() else 0.0  # torch's median is the lower one
    return success.mean().item(), steps, returns.mean().item()


def evaluation_metrics(agent, env, args):
    metrics = {}
    for prefix, greedy in (("eval/", False), ("eval/greedy_", True)):
        numbers = evaluate(agent, env, args, greedy)
        for name, number in zip(("success_rate", "steps", "return"), numbers, strict=True):
            metrics[prefix + name] = number
    return metrics


# Log and checkpoint: the run folder


MEANS = dict(reward_mean="rewards", done_rate="terminated", trunc_rate="truncated", reset_rate="done",
             entropy_mean="entropies", policy_loss="policy_loss", value_loss="value_loss",
             grad_norm="grad_norm", episode_return="ended_return", episode_length="ended_length")


def rollout_means(batch, num_actions):
    """What one rollout adds to a record: its means and its count of actions.  -> (len(MEANS) + A,) float64"""
    actions = batch["actions"].flatten()
    counts = torch.zeros(num_actions, dtype=torch.float64, device=actions.device)
    counts.scatter_add_(0, actions, torch.ones_like(actions, dtype=torch.float64))
    means = [batch[name].detach().mean(dtype=torch.float64) for name in MEANS.values()]
    return torch.cat([torch.stack(means), counts])


def window_metrics(window, batch, returns, args, env):
    """A record: means over the rollouts of its window, percentiles and values of the last one.

    All is computed on the device, of all processes' rows, and crosses to the host in one tensor.
    """
    distances, values, returns = whole(torch.stack([batch["dist"], batch["values"], returns]), env)
    means = torch.stack(window).mean(0)
    means[:len(MEANS)] *= env.num_envs / args.num_envs
    percentiles = distances.flatten().quantile(torch.tensor([0.1, 0.5, 0.9], device=values.device))
    errors = (returns - values).var(correction=0)
    explained = 1 - errors / returns.var(correction=0).clamp(min=1e-8)
    last = torch.stack([*percentiles, values.mean(), values.std(correction=0), explained]).double()
    numbers = torch.cat([last, total(means)]).tolist()
    names = ("dist_p10", "dist_p50", "dist_p90", "value_mean", "value_std", "explained_variance", *MEANS)
    metrics = dict(zip(names, numbers, strict=False))
    metrics["action_hist"] = [round(count * len(window)) for count in numbers[len(names):]]
    metrics["grad_norm"] *= args.update_every  # rollouts without an optimiser step count as 0
    episodes = max(metrics["reset_rate"], 1e-12)  # ended per step
    metrics["episode_return"] /= episodes
    metrics["episode_length"] /= episodes
    metrics["success_rate"] = metrics["done_rate"] / episodes if env.has_goal else 0.0
    return metrics


def meta_line(args, env):
    """What identifies a run."""
    def git(*command):
        with contextlib.suppress(OSError):  # a copy without git runs too
            here = Path(__file__).parent
            done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=here)
            return done.stdout.strip() if done.returncode == 0 else None

    flags = vars(args) | dict(env_kwargs=list(args.env_kwargs))
    now, gpu = datetime.now(UTC), env.device.type == "cuda"
    versions = dict(python=platform.python_version(), torch=str(torch.__version__), numpy=np.__version__)
    return dict(
        run_id=f"{now:%Y%m%d_%H%M%S}__a2c__{args.env_id.replace('/', '-')}__s{args.seed}", schema_version=1,
        algo="a2c", env=args.env_id, seed=args.seed, args=flags, argv=sys.argv, num_envs=args.num_envs,
        config_hash=sha256(json.dumps(flags)), git_sha=git("rev-parse", "HEAD"),
        git_dirty=None if (changes := git("status", "--porcelain")) is None else bool(changes),
        started_at=now.isoformat(),
        versions=versions | ({"cuda": torch.version.cuda} if gpu else {}),
        device=torch.cuda.get_device_name(env.device) if gpu else platform.machine()) | env.log_meta


class RunFolder:
    """The log (train_log.jsonl and TensorBoard), checkpoints, receipts; and the counters.

    A folder that holds a checkpoint is continued. Whatever a kill could tear is written beside its place,
    flushed to the disk and renamed. Only rank 0 reads and writes; the others hold a copy, for its numbers.
    """

    MAY_CHANGE = {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints", "track", "dist_timeout"}

    def __init__(self, args, meta):
        self.args, self.meta, self.state, self.checkpoint = args, meta, None, ""
        self.dir = Path(args.run_dir or Path("runs", args.experiment, meta["run_id"]))
        try:
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.dir / "train_log.jsonl").open("ab").close()
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: not a folder that can be written to ({error})") from error
        files = self.checkpoints()
        for path in reversed(files):
            try:
                state = torch.load(path, weights_only=True, map_location="cpu")
                if not {"agent", "optimizer", "env", "episodes", "log_bytes"} <= set(state):
                    raise ValueError("not a checkpoint of this script")
                self.state, self.checkpoint = state, path.name
                break
            except Exception as error:  # torch.load raises many kinds for a torn file
                print(f"checkpoint {path} is damaged ({error}): trying the one before", file=sys.stderr)
        if files and not self.state:
            raise BadInput(f"--run-dir {self.dir}: every checkpoint in it is damaged; use another folder")
        if self.state or (self.dir / "train_log.jsonl").stat().st_size:
            self.check_same_run()
        start = self.state or dict(iteration=0, env_steps=0, opt_steps=0, elapsed=0.0)
        self.counters = {name: start[name] for name in ("iteration", "env_steps", "opt_steps")}
        self.started = time.perf_counter() - start["elapsed"]
        self.since = (time.perf_counter(), self.counters["env_steps"])

    def checkpoints(self):
        """The checkpoint files, oldest first."""
        files = [path for path in (self.dir / "checkpoints").glob("step_*.pt") if path.stem[5:].isdigit()]
        return sorted(files, key=lambda path: int(path.stem[5:]))

    def check_same_run(self):
        """Refuse, by name, whatever would make the continued run another run."""
        try:
            with (self.dir / "train_log.jsonl").open() as log:
                old = json.loads(log.readline())["meta"]
            flags, goal, run_id = dict(old["args"]), old.get("goal_sha256"), str(old["run_id"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{self.dir}/train_log.jsonl: expected a meta line first ({error!r})") from error
        for name, value in self.meta["args"].items():
            if name not in self.MAY_CHANGE and flags.get(name) != value:
                raise BadInput(f"--{name.replace('_', '-')} {value}: the run in {self.dir} was started with "
                               f"{flags.get(name)}; use that, or another --run-dir")
        if goal != self.meta.get("goal_sha256"):
            raise BadInput(f"--run-dir {self.dir}: the goal changed since that run was started")
        self.meta["run_id"] = run_id

    def open(self):
        """In the first process: write the meta line; or cut the log to the checkpoint and mark the place."""
        self.log = self.writer = None
        if rank():
            return
        path, content = self.dir / "train_log.jsonl", json.dumps({"meta": self.meta}).encode() + b"\n"
        if self.state:
            data, end = path.read_bytes(), self.state["log_bytes"]
            kept = [line for line in data[end:].splitlines(True) if line.startswith(b'{"resume"')
                    or line.startswith(b'{"trace_id"') and line.endswith(b"\n")]
            mark = dict(run_id=self.meta["run_id"], trace_id=self.trace_id, **self.counters,
                        checkpoint=self.checkpoint, git_sha=self.meta["git_sha"], at=self.meta["started_at"])
            content = data[:end] + b"".join(kept) + json.dumps({"resume": mark}).encode() + b"\n"
        replace_file(path, content)
        self.log = path.open("ab")
        self.writer = SummaryWriter(self.dir, purge_step=self.counters["iteration"] + 1)

    @property
    def trace_id(self):
        return f"{self.meta['run_id']}:{self.counters['opt_steps']}"

    def record(self, values):
        """One line of numbers, all finite."""
        now, env_steps = time.perf_counter(), self.counters["env_steps"]
        sps = (env_steps - self.since[1]) / (now - self.since[0])
        values = dict(wall_time_s=now - self.started, sps=sps) | values
        values["system/processes"] = num_ranks()
        values["system/memory_usage"] = psutil.Process().memory_info().rss / 2**30
        if torch.cuda.is_available():
            values["system/gpu_memory"] = torch.cuda.max_memory_allocated() / 2**30
        for name, value in values.items():
            if name != "action_hist":
                if not math.isfinite(value):
                    raise FloatingPointError(f"{name} is {value}")
                if self.writer:
                    self.writer.add_scalar(name, value, self.counters["iteration"])
        self.write(dict(run_id=self.meta["run_id"], trace_id=self.trace_id) | self.counters | values)
        self.since = (now, env_steps)

    def write(self, line):
        if self.log:
            self.log.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self.log.flush()

    def close(self):
        if self.writer:
            self.writer.close()

    def save(self, state):
        """checkpoints/step_<iteration>.pt, complete or not at all; then drop the oldest."""
        if rank():
            return
        path = self.dir / "checkpoints" / f"step_{self.counters['iteration']:06d}.pt"
        elapsed = time.perf_counter() - self.started
        state = state | self.counters | dict(elapsed=elapsed, log_bytes=self.log.tell(), meta=self.meta)
        temporary = path.with_name(f".{path.name}.writing")
        try:
            os.fsync(self.log.fileno())
            torch.save(state, temporary)
            flush_to_disk(temporary)
            temporary.replace(path)
            flush_to_disk(path.parent)
            replace_file(path.parent / "state.json", json.dumps({"last": path.name}).encode())
        except Exception as error:  # a full disk raises RuntimeError here
            temporary.unlink(missing_ok=True)
            raise OSError(f"{path} could not be written ({error}); earlier checkpoints stay") from error
        if self.args.keep_checkpoints:
            # A later one is a damaged one that this run fell back from; it must not count as the newest.
            complete = self.checkpoints()
            for old in complete[:complete.index(path) + 1][:-self.args.keep_checkpoints]:
                old.unlink()

    def fail(self, error, env, batch):
        """Leave a receipt, with the last frames of four environments, and end with a non-zero exit."""
        if not Peers.tell():
            raise SystemExit(f"rank {rank()}: ended, because another process failed")
        if rank():
            raise error
        what = dict(type=type(error).__name__, message=str(error))
        folder = self.dir / "receipts" / self.trace_id
        receipt = self.meta | self.counters | what | dict(traceback=traceback.format_exception(error))
        for name in ("actions", "dist", "rewards"):
            receipt[f"last_{name}"] = batch[name][:, :4].tolist() if batch else []
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "receipt.json").write_text(json.dumps(receipt, indent=1))
            self.write({"trace_id": self.trace_id, "error": what | dict(receipt=f"receipts/{folder.name}")})
        with contextlib.suppress(Exception):  # nor must an environment that cannot draw itself any more
            for row in range(min(4, env.num_envs)):
                if (frame := env.frames(row)) is not None:
                    Image.fromarray(frame).save(folder / f"frame_{row}.png")
        if not isinstance(error, (FloatingPointError, KeyboardInterrupt, OSError, BadInput)):
            raise error
        raise SystemExit(f"error: {what['type']}: {error} (receipt: {folder})")


def sha256(data):
    """Of bytes, a text, or what a file holds."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


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


def start_tracking(run, args):
    """Mirror TensorBoard to Weights & Biases; before the writer is opened, or it would see nothing."""
    if args.track:
        try:
            import wandb
        except ImportError as error:
            raise BadInput(f"--track: {error}; pip install wandb") from error
        wandb.init(project="plainrl", name=run.meta["run_id"], config=run.meta["args"], dir=run.dir,
                   sync_tensorboard=True)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def choose_device(args):
    """The device that --device names. Raises BadInput when there is none such."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"--device {name}: {first_line(error)}") from error


def main(args):
    """Train.  -> the last evaluation"""
    # Set-up: whatever is wrong with the input is found here, before anything is trained.
    torch.set_num_threads(args.threads)
    Preempted.listen()
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    device = start_processes(args)
    for name in ("num_envs", "eval_envs"):
        if getattr(args, name) < num_ranks():
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: expected one or more for each "
                           f"of {num_ranks()} processes")
    env, eval_env = make_env(args, args.num_envs, device), make_env(args, args.eval_envs, device)
    torch.manual_seed(args.seed)
    agent = Agent(env, args.network, args.hidden_size).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    run = from_rank_0(lambda: RunFolder(args, meta_line(args, env)))
    obs = env.reset(args.seed + env.others[0])
    episodes = {name: torch.zeros(env.num_envs, device=device) for name in ("return", "length")}
    if run.state:
        agent.load_state_dict(run.state["agent"])
        optimizer.load_state_dict(run.state["optimizer"])
        if run.state["env"] is not None:
            rows = share(args.num_envs)
            obs = env.load_state_dict(state_of_rows(run.state["env"], rows))
            episodes = {name: tensor[rows.start:rows.stop].to(device)
                        for name, tensor in run.state["episodes"].items()}
    if args.compile or args.cudagraphs:
        agent.compile(mode="reduce-overhead" if args.cudagraphs else "default")
    if rank() == 0:
        start_tracking(run, args)
    run.open()
    say(f"{run.dir}\n{args.num_envs} environments x {args.num_steps} steps = "
        f"{args.num_envs * args.num_steps} steps a rollout, {args.update_every} of them an optimiser step; "
        f"{sum(p.numel() for p in agent.parameters()):,} weights on {device}"
        + (f", {num_ranks()} processes" if num_ranks() > 1 else "")
        + (f"; continuing after iteration {run.counters['iteration']}" if run.state else ""))
    progress = tqdm(total=args.iterations, initial=run.counters["iteration"], unit="it",
                    disable=bool(rank()) or None)
    window, batch, metrics = [], None, {}

    try:
        for iteration in range(run.counters["iteration"] + 1, args.iterations + 1):
            torch.manual_seed(args.seed * 1_000_003 + iteration)  # a resume needs no generator's state

            with precision(args, device):
                # 1. Rollout: num_steps of all environments, with the graph of the forward passes.
                obs, batch = rollout(agent, env, obs, episodes, args)

            # 2. Advantages, and the returns that the values should have predicted.
            values = batch["values"].detach()
            advantages = gae(batch["rewards"], values, batch["next_values"], batch["terminated"],
                             batch["done"], args.gamma, args.gae_lambda)
            returns = advantages + values
            if args.normalize_advantages:
                everyone = whole(advantages, env)
                advantages = (advantages - everyone.mean()) / (everyone.std() + 1e-8)

            # 3. Update: one gradient on the whole rollout, the sum over processes of means by their rows.
            left = 1 - args.anneal * (iteration - 1) / args.iterations
            loss, policy_loss, value_loss = a2c_loss(
                batch["logprobs"], batch["entropies"], batch["values"], advantages, returns, args.value_coef,
                args.entropy_coef * left)
            (loss * (env.num_envs / args.num_envs) / args.update_every).backward()
            grad_norm = torch.zeros_like(loss)
            if iteration % args.update_every == 0:
                optimizer.param_groups[0]["lr"] = args.learning_rate * left
                if num_ranks() > 1:
                    sum_gradients(agent)
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                run.counters["opt_steps"] += 1
            run.counters["iteration"] = iteration
            run.counters["env_steps"] += args.num_envs * args.num_steps
            batch |= dict(policy_loss=policy_loss, value_loss=value_loss, grad_norm=grad_norm)
            batch = {name: tensor.detach() for name, tensor in batch.items()}  # let go of the graph
            window.append(rollout_means(batch, env.num_actions))

            # 4. Log, evaluate, checkpoint.
            progress.update()
            last = iteration == args.iterations
            if iteration % args.log_every:
                continue
            metrics = window_metrics(window, batch, returns, args, env)
            window = []
            if last or args.eval_every and iteration % args.eval_every == 0:
                metrics |= evaluation_metrics(agent, eval_env, args)
            release_memory()
            run.record(metrics)
            shown = {name: f"{metrics[name]:.3f}" for name in SHOWN if name in metrics}
            progress.set_postfix(shown, refresh=False)
            if progress.disable:
                say(f"{iteration}/{args.iterations} " + " ".join(f"{name} {n}" for name, n in shown.items()))
            stopped = stop_asked()
            if last or stopped or iteration % args.checkpoint_every == 0:
                if not all(torch.isfinite(weight).all() for weight in agent.parameters()):
                    raise FloatingPointError("a weight is not finite any more")
                run.save(dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(),
                              env=join_states(gathered(env.state_dict())),
                              episodes={name: whole(episodes[name], env) for name in episodes}))
            if stopped:
                say(f"SIGTERM: stopped after iteration {iteration}, which is saved; to go on, give the same "
                    f"command with --run-dir {run.dir}")
                break
    except (Exception, KeyboardInterrupt) as error:
        run.fail(error, env, batch)
    finally:
        progress.close()
        run.close()
        Preempted.forget()
        env.close()
        eval_env.close()
    end_processes()
    return metrics


def stop_asked():
    """Whether SIGTERM came to any process. A record's end is when the run can stop and lose nothing."""
    try:
        together(lambda: None)
    except Preempted:
        return True
    return False


def release_memory():
    """Give freed memory back to the system. glibc keeps the pieces between tensors that are alive, and a run
    of 16,384 environments would grow by 2 MiB an update."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no such call, and no such need
        ctypes.CDLL(None).malloc_trim(0)


SHOWN = ("episode_return", "success_rate", "eval/success_rate", "eval/greedy_success_rate", "entropy_mean",
         "grad_norm")


def self_test():
    """Learn a toy world in some 20 s; the verdict as JSON on the last line, and as exit code."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        metrics = main(Args(env_kwargs=("difficulty=8", "door=false"), network="patch", iterations=500,
                            device="cpu", eval_every=0, run_dir=folder))
    ok = metrics["eval/success_rate"] >= 0.95
    print(json.dumps(dict(ok=ok, seconds=round(time.perf_counter() - began, 1)) | metrics))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        args = tyro.cli(Args)
        sys.exit(self_test()) if args.self_test else main(args)
    except BadInput as problem:
        sys.exit(f"error: {problem}" if Peers.tell() else 1)
