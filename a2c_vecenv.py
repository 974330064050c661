"""A2C: synchronous advantage actor-critic on thousands of vectorised pixel environments.

    loss = mean[ -A_t log pi(a_t|s_t) + value_coef (R_t - V(s_t))^2 - entropy_coef H(pi(.|s_t)) ]

Advantages are n-step returns minus values (arXiv:1602.01783, algorithm S3), or GAE (arXiv:1506.02438). Unlike
in A3C, the actors are rows of one batch, updated synchronously; and an episode that a time limit truncates
bootstraps from the value of its last observation (arXiv:1712.00378).

The update uses the weights that collected the data, so the forward pass that sampled the actions is also the
one that is differentiated: its graph is kept, observations are not, and there is no second pass.

    python a2c_vecenv.py                                        # the pixel goal, 100 s on one CPU core
    python a2c_vecenv.py --env-id CartPole-v1 --num-envs 8      # any Gymnasium id with discrete actions
    python a2c_vecenv.py --num-envs 16384 --num-steps 4 --network nature --dtype bfloat16 --cudagraphs
    torchrun --nproc_per_node=2 a2c_vecenv.py --num-envs 1024   # data-parallel on two GPUs or CPU cores
    python a2c_vecenv.py --self-test                            # a toy world in 20 s: JSON, exit code 0 or 1

Expect eval/success_rate to rise from 0 at about 100,000 steps and to end at 1.00, sampled and greedy.
"""

import contextlib
import ctypes
import hashlib
import json
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
from typing import Annotated, Literal

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn  # later, its functions' defaults would hold the process group open at exit
import tyro
from dotenv import load_dotenv
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from envs import BadInput, as_bad_input, parse_options, pixels
from envs.files import flush_to_disk, sha256, take_lock

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=dict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True))
class Args:
    # Environment
    env_id: str = "pixel-goal"  # pixel-goal, pyboy (a Game Boy), ALE/Pong-v5, or a Gymnasium id
    env_kwargs: tuple[str, ...] = ()  # options of the environment, key=value (docs/pixel_goal.md, atari.md)
    alpha: float = 5.0  # goal environments: reward per decrease of the distance (one step: 0.03)
    num_envs: PositiveInt = 32  # environments, stepped in parallel

    # Algorithm
    iterations: PositiveInt = 1200  # optimiser steps, each on update_every rollouts
    num_steps: PositiveInt = 16  # steps of each environment per rollout; 1: TD(0)
    update_every: PositiveInt = 1  # rollouts per optimiser step; their gradients are averaged
    gamma: Share = 0.99  # discount per step
    gae_lambda: Share = 0.95  # 1: n-step returns; 0: one-step TD
    bootstrap_truncated: bool = True  # at a time limit, bootstrap from the value of the last observation
    normalize_advantages: bool = True  # mean 0, standard deviation 1 over the rollout
    value_coef: NonNegativeFloat = 0.05  # weight of the value loss; returns reach 12: 0.5 would dominate
    entropy_coef: NonNegativeFloat = 0.05  # weight of the policy's entropy [per nat]
    learning_rate: NonNegativeFloat = 1e-3  # of Adam
    anneal: bool = True  # learning rate and entropy bonus decay linearly to 0
    max_grad_norm: PositiveFloat = 0.5  # the gradient is clipped to this norm

    # Network
    network: Literal["small", "nature", "patch"] = "small"  # encoder of images; vectors get an MLP
    hidden_size: PositiveInt = 128  # width of the last layer before policy and value (Nature's paper: 512)

    # Speed: none of these changes the result beyond rounding
    chunk: PositiveInt = 256  # rows per forward and backward pass, so that activations fit the cache
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast; weights and losses in float32
    compile: bool = False  # torch.compile of the network
    cudagraphs: bool = False  # torch.compile with CUDA graphs (mode reduce-overhead)

    # Evaluation, log and checkpoints
    eval_every: NonNegativeInt = 100  # iterations between evaluations; 0: only at the end
    eval_episodes: PositiveInt = 128  # episodes per evaluation, with sampled and again with greedy actions
    eval_envs: PositiveInt = 64  # separate environments; these episodes are shared out equally among them
    log_every: PositiveInt = 20  # iterations per record; evaluations and checkpoints write one too
    checkpoint_every: PositiveInt = 200  # iterations between checkpoints
    keep_checkpoints: NonNegativeInt = 2  # newest regular ones to keep beside the last one; 0: all
    run_dir: str = ""  # the run's folder; one that holds a checkpoint is continued (default: a new one)
    experiment: str = "a2c"  # runs/<experiment>/ holds the run
    seed: Annotated[int, Field(ge=0, le=2**31)] = 1  # of weights, actions and environments
    self_test: bool = False  # learn a toy world, print the verdict as JSON and exit with 0 or 1

    def __post_init__(self):
        if self.normalize_advantages and self.num_envs * self.num_steps < 2:
            raise BadInput("--normalize-advantages needs at least two steps in a rollout")
        if min(self.num_envs, self.eval_envs) < WORLD_SIZE:
            raise BadInput(f"--num-envs {self.num_envs}, --eval-envs {self.eval_envs}: expected one or more "
                           f"for each of {WORLD_SIZE} processes")

    @property
    def may_change(self) -> set[str]:
        """Flags that a continued run may change, since they do not affect what is learned."""
        length = set() if self.anneal else {"iterations"}
        return length | {"run_dir", "experiment", "checkpoint_every", "keep_checkpoints"}


UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # it started this process
RANK, WORLD_SIZE = 0, 1
if UNDER_TORCHRUN:
    RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# Maths


def gae(rewards, values, next_values, terminated, done, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16). All (T, E) -> (T, E).

    terminated stops the bootstrap (that state has no future); done stops the trace (the next row is another
    episode). next_values[t] is V of the observation that step t returned *before* any autoreset, so that a
    time limit still bootstraps. lam = 1 gives n-step returns minus values, lam = 0 the TD error.
    """
    deltas = rewards + gamma * next_values * ~terminated - values  # (T, E)
    decay = gamma * lam * ~done  # (T, E)
    advantages = torch.empty_like(deltas)
    trace = torch.zeros_like(deltas[0])  # (E,)
    for t in reversed(range(len(deltas))):
        trace = deltas[t] + decay[t] * trace
        advantages[t] = trace
    return advantages


def a2c_loss(logprobs, entropies, values, advantages, returns, value_coef, entropy_coef):
    """Policy gradient, value regression, entropy bonus (arXiv:1602.01783, section 4).  All (T, E).

    Advantages and returns are constants, without a gradient.  -> loss, policy loss, value loss
    """
    policy_loss = -(advantages * logprobs).mean()
    value_loss = (returns - values).square().mean()
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropies.mean()
    return loss, policy_loss, value_loss


def choose_actions(logits, greedy=False, others=(0, 0)):
    """An action for each row of logits (E, A), sampled or the likeliest.  -> (E,)

    argmax of p / Exp(1) noise is distributed as p: the Gumbel-max trick without logarithms. others: how many
    rows other processes hold before and after these. Each process draws the noise of all rows, so that an
    action does not depend on the process.
    """
    probs = logits.softmax(-1)
    if greedy:
        return probs.argmax(-1)
    before, after = others
    num_rows, num_actions = logits.shape
    noise = logits.new_empty(before + num_rows + after, num_actions).exponential_()
    return (probs / noise[before:before + num_rows]).argmax(-1)


# Network


CONVOLUTIONS = {  # of the image encoders: channels, kernel, stride
    "patch": [(16, 8, 8)],  # a linear map of patches of 8 x 8 pixels
    "small": [(16, 8, 4), (32, 4, 2)],  # arXiv:1312.5602, section 4.1
    "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],  # Mnih et al., Nature 518 (2015), Methods
}


class Agent(nn.Module):
    """Encoder, policy head and value head.  obs (E, *obs_shape) -> logits (E, A), values (E,)"""

    def __init__(self, env, network="small", hidden_size=128, dtype="float32"):
        super().__init__()
        self.scale = env.scale
        self.bfloat16 = dtype == "bfloat16"
        if len(env.obs_shape) == 1:
            layers = [nn.LazyLinear(hidden_size), nn.Tanh(), nn.LazyLinear(hidden_size), nn.Tanh()]
        else:
            layers = []
            for channels, kernel, stride in CONVOLUTIONS[network]:
                layers += [nn.LazyConv2d(channels, kernel, stride), nn.ReLU()]
            layers += [nn.Flatten(), nn.LazyLinear(hidden_size), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        with as_bad_input(f"--network {network}: images of shape {env.obs_shape} are too small"):
            self.body(torch.zeros(1, *env.obs_shape))  # sizes the lazy layers
        self.policy = nn.Linear(hidden_size, env.num_actions)
        self.value = nn.Linear(hidden_size, 1)
        gains = {self.policy: 0.01, self.value: 1.0}  # the policy begins nearly uniform
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gains.get(layer, 2**0.5))  # for ReLU
                nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        with torch.autocast(obs.device.type, torch.bfloat16, self.bfloat16):
            # scale makes a copy: the graph keeps it, and the environment overwrites obs.
            hidden = self.body(self.scale(obs))
            return self.policy(hidden).float(), self.value(hidden).squeeze(-1).float()


def forward(network, obs, chunk):
    """Logits and values of any number of observations, computed `chunk` at a time."""
    outputs = [network(rows) for rows in obs.split(chunk)]
    logits, values = zip(*outputs, strict=True)
    return torch.cat(logits), torch.cat(values)


# Rollout, evaluation, metrics


def make_env(args, num_envs, device):
    """This process's share of num_envs environments."""
    first = RANK * num_envs // WORLD_SIZE
    stop = (RANK + 1) * num_envs // WORLD_SIZE
    options = parse_options(args.env_kwargs)
    if args.env_id in pixels.VEC_ENVS:  # the goal environments
        options = {"alpha": args.alpha} | options
    env = pixels.make_vec(args.env_id, stop - first, device, **options)
    return pixels.RecordEpisodeStatistics(env, others=(first, num_envs - stop))


def rollout(agent, env, obs, args):
    """num_steps of all environments with the current policy.  -> the next obs, (T, E) tensors by name"""
    steps = []
    truncated_obs = []  # the last ones of the episodes that a time limit truncated
    for _ in range(args.num_steps):
        logits, values = forward(agent, obs, args.chunk)
        actions = choose_actions(logits.detach(), others=env.others)
        obs, rewards, terminated, truncated, info = env.step(actions)
        if args.bootstrap_truncated and bool(truncated.any()):
            # final_obs has rows of the episodes that ended alone.
            truncated_obs.append(info["final_obs"][truncated[info["reset_mask"]]])
        step = dict(logits=logits, values=values, actions=actions, rewards=rewards, terminated=terminated,
                    truncated=truncated)
        names = ("reset_mask", "success", "dist", "episode_return", "episode_length")
        steps.append(step | {name: info[name] for name in names})

    batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}  # (T, E)
    log_pi = batch.pop("logits").log_softmax(-1)  # (T, E, A)
    batch["logprobs"] = log_pi.gather(-1, batch["actions"][..., None]).squeeze(-1)
    batch["entropies"] = -(log_pi.exp() * log_pi).sum(-1)

    with torch.no_grad():  # agent.forward is not compiled: here the number of rows varies
        _, last_values = forward(agent.forward, obs, args.chunk)  # (E,)
        next_values = torch.cat([batch["values"][1:], last_values[None]])  # (T, E)
        next_values.masked_fill_(batch["truncated"], 0.0)  # there it is the next episode's
        if truncated_obs:
            final_values = [forward(agent.forward, x, args.chunk)[1] for x in truncated_obs]
            next_values[batch["truncated"]] = torch.cat(final_values)
    batch["next_values"] = next_values
    return obs, batch  # its logprobs, entropies and values have a graph


@torch.no_grad()
def evaluate(agent, env, args, greedy=False):
    """Play eval_episodes episodes, equally many in each environment: the first to end are the short ones."""
    torch.manual_seed(pixels.derive_seed(args.seed, "eval actions"))  # each time the same
    obs = env.reset(args.seed, "eval")
    number = torch.arange(env.num_envs, device=env.device) + env.others[0]  # of the row's episode
    results = []
    while (number < args.eval_episodes).any():
        logits, _ = forward(agent.forward, obs, args.chunk)
        obs, *_, info = env.step(choose_actions(logits, greedy, env.others))
        counts = info["reset_mask"] & (number < args.eval_episodes)
        result = [info["success"], info["episode_length"], info["episode_return"]]
        if counts.any():  # tensors kept at each step would fragment memory
            results += torch.stack(result, -1)[counts]  # each (3,)
        number += args.eval_envs * info["reset_mask"]
    success, lengths, returns = torch.stack(gather(results)).unbind(-1)
    steps = lengths[success > 0].median().item() if success.any() else 0.0  # the lower median
    prefix = "eval/greedy_" if greedy else "eval/"
    return {prefix + "success_rate": success.mean().item(), prefix + "steps": steps,
            prefix + "return": returns.mean().item()}


MEANS = dict(reward_mean="rewards", done_rate="terminated", trunc_rate="truncated", reset_rate="reset_mask",
             entropy_mean="entropies", policy_loss="policy_loss", value_loss="value_loss",
             success_rate="success", episode_return="episode_return", episode_length="episode_length")


def rollout_means(batch, num_actions):
    """Means of the tensors in MEANS, frequencies of actions.  -> (len(MEANS) + num_actions,) float64"""
    numbers = [batch[name] for name in MEANS.values()]
    numbers += [batch["actions"] == action for action in range(num_actions)]
    return torch.stack([number.mean(dtype=torch.float64) for number in numbers])


def window_metrics(window, grad_norms, batch, args, env):
    """Over all processes: means of a window of rollouts, statistics of its last; one copy to the host."""
    means = all_reduce(torch.stack(window).mean(0) * (env.num_envs / args.num_envs))
    names = ("dist", "rewards", "values", "returns")
    distances, rewards, values, returns = all_rows(torch.stack([batch[name] for name in names]), env)
    last = {f"dist_p{level}": distances.quantile(level / 100) for level in (10, 50, 90)}
    last |= {f"reward_p{level}": rewards.quantile(level / 100) for level in (10, 50, 90)}
    last |= dict(value_mean=values.mean(), value_std=values.std(correction=0),
                 value_min=values.min(), value_max=values.max())
    unexplained = (returns - values).var(correction=0)
    last["explained_variance"] = 1 - unexplained / returns.var(correction=0).clamp(min=1e-8)
    last["grad_norm"] = torch.stack(grad_norms).mean()
    names = [*last, *MEANS]
    numbers = torch.cat([torch.stack([*last.values()]), means]).tolist()
    metrics = dict(zip(names, numbers, strict=False))  # the rest are frequencies of actions
    num_steps = len(window) * args.num_steps * args.num_envs
    metrics["action_hist"] = [round(share * num_steps) for share in numbers[len(names):]]
    for name in ("success_rate", "episode_return", "episode_length"):  # per step -> per episode
        metrics[name] /= max(metrics["reset_rate"], 1e-12)
    return metrics


# Machinery: processes, under torchrun: all weights, a share of the environments; gradients as of one process.


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


def all_rows(rows, env):
    """Columns of this process's environments -> of all.  (..., env.num_envs) -> (..., num_envs)"""
    return all_reduce(nn.functional.pad(rows, env.others))  # exact: the others add zeros


# Machinery: run folder. A kill at any moment loses at most the work since the last checkpoint, from which the
# same command goes on exactly. The same to the letter in all four scripts.


TIMES = ("time/eval", "time/checkpoint")  # measured by Run.timed
# What Run.record shows: name -> metric and its format.
SHOWN = {"return": ("episode_return", ".2f"),
         "success": ("success_rate", ".3f"),
         "steps/s": ("sps", ",.0f"),
         "score": ("eval/return", ".2f"),
         "solved": ("eval/success_rate", ".3f"),
         "greedy": ("eval/greedy_success_rate", ".3f")}


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


# Main: set-up, in which errors in the input are found, then the loop


def main(args):
    """Train.  -> the last record's numbers"""
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    device = start_processes()
    env = make_env(args, args.num_envs, device)
    eval_env = make_env(args, args.eval_envs, device)
    torch.manual_seed(pixels.derive_seed(args.seed, "weights"))
    agent = Agent(env, args.network, args.hidden_size, args.dtype).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    run = Run(args, "a2c", args.env_id, num_envs=args.num_envs, **env.log_meta)
    if run.checkpoint:
        agent.load_state_dict(run.state["agent"])
        optimizer.load_state_dict(run.state["optimizer"])
    if run.state.get("env"):
        obs = env.load_state_dict(run.state["env"])
    else:  # new episodes, in a resumed run too if its environment cannot be saved
        obs = env.reset(args.seed, "train", run.counters["env_steps"])
    if args.compile or args.cudagraphs:
        agent.compile(mode="reduce-overhead" if args.cudagraphs else "default")
    run.open(args.iterations)
    start = run.counters["iteration"] + 1
    print_rank_0(f"{run.dir}\nFrom iteration {start} on {args.num_envs} environments x "
                 f"{args.num_steps} steps on {device}\nObservations: {env.scaling}")
    window, grad_norms = [], []  # of the rollouts and updates since the last record
    batch = {}  # the last rollout
    metrics = {}  # the last record
    stop = []  # not empty once SIGTERM has arrived
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

    def finish_iteration(iteration):
        """Log, evaluate, save a checkpoint, each when it is due.  -> whether to stop early"""
        nonlocal metrics
        last = iteration == args.iterations
        evaluate_now = last or args.eval_every and iteration % args.eval_every == 0
        save_now = last or iteration % args.checkpoint_every == 0
        if not (evaluate_now or save_now or iteration % args.log_every == 0):
            return False
        metrics = window_metrics(window, grad_norms, batch, args, env)
        window.clear()
        grad_norms.clear()
        if evaluate_now:
            with run.timed("eval"):
                metrics |= evaluate(agent, eval_env, args) | evaluate(agent, eval_env, args, greedy=True)
        with contextlib.suppress(OSError, AttributeError):  # only glibc has this call
            ctypes.CDLL(None).malloc_trim(0)  # else freed pieces between live tensors accumulate
        run.record(metrics)
        stopped = any(gather(stop))
        if save_now or stopped:
            if not all(torch.isfinite(weight).all() for weight in agent.parameters()):
                raise FloatingPointError("a weight is not finite")
            with run.timed("checkpoint"):
                state = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(),
                             env=pixels.join_states(gather([env.state_dict()])))
                run.save(state, lambda folder: (folder / "meta.json").write_text(json.dumps(run.meta)))
        if stopped:
            print_rank_0(f"SIGTERM: stopped after iteration {iteration}; go on with --run-dir {run.dir}")
        return stopped

    try:
        for iteration in range(start, args.iterations + 1):
            # No two iterations or runs share a seed, and a resume needs no generator state.
            torch.manual_seed(pixels.derive_seed(args.seed, "actions", iteration))
            frac = 1 - (iteration - 1) / args.iterations if args.anneal else 1.0

            for _ in range(args.update_every):
                # 1. Rollout: num_steps of all environments; the graph of the forward passes is kept.
                obs, batch = rollout(agent, env, obs, args)

                # 2. Advantages, and returns: the targets of the values.
                values = batch["values"].detach()
                advantages = gae(batch["rewards"], values, batch["next_values"], batch["terminated"],
                                 batch["terminated"] | batch["truncated"], args.gamma, args.gae_lambda)
                batch["returns"] = advantages + values
                if args.normalize_advantages:
                    all_advantages = all_rows(advantages, env)
                    advantages = (advantages - all_advantages.mean()) / (all_advantages.std() + 1e-8)

                # 3. Gradient: summed over processes, that of the mean over all rollouts and rows.
                loss, batch["policy_loss"], batch["value_loss"] = a2c_loss(
                    batch["logprobs"], batch["entropies"], batch["values"], advantages,
                    batch["returns"], args.value_coef, args.entropy_coef * frac)
                (loss * (env.num_envs / args.num_envs) / args.update_every).backward()
                batch = {name: tensor.detach() for name, tensor in batch.items()}  # frees the graph
                window.append(rollout_means(batch, env.num_actions))

            # 4. Update.
            for weight in agent.parameters():
                all_reduce(weight.grad)
            grad_norms.append(nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))
            optimizer.param_groups[0]["lr"] = args.learning_rate * frac
            optimizer.step()
            optimizer.zero_grad()
            run.counters |= dict(iteration=iteration, opt_steps=iteration,
                                 env_steps=iteration * args.update_every * args.num_envs * args.num_steps)

            # 5. Log, evaluate, checkpoint.
            if finish_iteration(iteration):
                break
        else:
            if not args.self_test:  # whose folder goes
                run.finish()
    except (Exception, KeyboardInterrupt) as error:
        run.fail(error, pixels.receipt_files(env, batch))
    if UNDER_TORCHRUN:
        dist.destroy_process_group()
    return metrics


def self_test():
    """Learn a toy world in 20 s; print the verdict as JSON on the last line.  -> exit code"""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a test of the CPU
    with tempfile.TemporaryDirectory() as folder:
        metrics = main(Args(env_kwargs=("difficulty=8", "door=false"), network="patch", iterations=300,
                            eval_every=0, run_dir=folder, self_test=True))
    ok = metrics.get("eval/success_rate", 0.0) >= 0.95  # SIGTERM leaves it out
    print(json.dumps(dict(ok=ok) | metrics))
    return 0 if ok else 1


if __name__ == "__main__":
    load_dotenv(".env")  # a variable that is set already stays
    sys.stdout.reconfigure(line_buffering=True)  # a file gets each line at once
    try:
        args = tyro.cli(Args)
        if args.self_test:
            sys.exit(self_test())
        main(args)
    except (BadInput, OSError) as problem:
        sys.exit(f"error: {problem}")
