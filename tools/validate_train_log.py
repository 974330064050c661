"""Check a train_log.jsonl against schema version 1 (docs/train_log.md).

    python tools/validate_train_log.py runs/countdown/20261121_041500__grpo__countdown__s1
    python tools/validate_train_log.py train_log.jsonl --strict

LOG is the file, or the run folder that holds it. The verdict is JSON on standard output; the exit status is 0
for a sound log and 1 otherwise. Any file gets a verdict, however broken. METRICS says what every metric is
and means; the tables in docs/ are made from it. Tests call `validate(path)` and `name_of(algo, key)`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

SCHEMA_VERSION = 1
MOST_ANOMALIES = 200  # listed; the rest are counted, since a run gone wrong repeats itself on every line
COUNTERS = ("iteration", "env_steps", "opt_steps")

# Kinds of value. text: not empty; number: int or float, never a bool; amount: a number from 0; count: an int
# from 0; rate: a number in [0, 1]; utc: ISO 8601 with its offset; `_or_null`: none, or not known.


def _keys(**names: str) -> dict[str, str]:
    """key -> kind, from kind="key key"."""
    return {name: kind for kind, text in names.items() for name in text.split()}


META = _keys(count="schema_version", text="run_id algo config_hash device", text_or_null="env git_sha",
             flag_or_null="git_dirty", integer="seed", object="args versions", texts="argv", utc="started_at")
VERSIONS = _keys(text="python torch numpy")
META_OPTIONAL = _keys(text="script_sha256")  # in newer logs
META_LLM = _keys(string="model", text="model_sha256")  # model is "" when it starts from random weights
META_A2C = _keys(count="num_envs num_actions", count_or_null="frames_per_step stack_k",
                 text_or_null="action_codec_id goal_dir goal_sha256")
META_ROM = _keys(text="rom_path rom_sha256", text_or_null="state_path state_sha256",
                 count="release_after_frames")
RESUME = _keys(text="run_id trace_id checkpoint", count="iteration env_steps opt_steps",
               text_or_null="git_sha", utc="at")
RESUME_OPTIONAL = _keys(flag_or_null="git_dirty", text="script_sha256")  # in newer logs
ERROR = _keys(text="type", string="message", text_or_null="receipt")

# Metrics of a record: name -> (kind, meaning). One whose kind has a ? need not be there. After the kind come
# the parts of a family: critic/score, "number mean max min", is critic/score/mean and so on. <x> is any text.
_SPREAD = "number mean max min"
_EVERY = {
    "run_id": ("text", "the same as in the meta line"),
    "trace_id": ("text", "<run_id>:<opt_steps>; errors and receipts carry it too"),
    "iteration": ("count", "one rollout and its updates (sft: one optimiser step), from 1; 0 before the "
                  "first"),
    "env_steps": ("count", "so far: environment steps (a2c), generated tokens (grpo, ppo), trained tokens "
                  "(sft)"),
    "opt_steps": ("count", "optimiser steps so far"),
    "wall_time_s": ("amount", "time so far, evaluations and earlier parts of a continued run included [s]"),
    "sps": ("amount", "env_steps per second since the record before, evaluation included"),
}
_SYSTEM = {
    "system/processes": ("amount?", "processes of torchrun; 1 without it"),
    "system/memory_usage": ("amount?", "resident memory of the process; as all of system/*, of the first one "
                            "[GiB]"),
    "system/cpu_utilization": ("amount?", "processor time over wall time since the record before [cores]"),
    "system/gpu_memory": ("amount?", "peak memory allocated on the GPU; 0 without one [GiB]"),
}
_ACCURACY = {
    "val/<source>/pass@1": ("rate?", "held-out correctness at --eval-temperature, mean over tasks and "
                            "samples"),
    "val/<source>/pass@<n>": ("rate?", "share of held-out tasks with a correct response among n"),
    "val/<source>/greedy": ("rate?", "held-out correctness of greedy decoding"),
}
_GRPO_AND_PPO = {
    "train/policy_loss": ("number", "policy loss without entropy bonus and KL penalty, mean of the updates"),
    "train/kl_loss": ("number", "k3 estimate of KL(policy || starting model), 0 without a reference "
                      "[nats/token]"),
    "train/entropy": ("number", "mean entropy of the next-token distribution on response tokens [nats]"),
    "train/reward": ("number", "mean reward of the iteration's episodes, failed ones aside, as in all that "
                     "follows"),
    "train/advantage": ("number", "mean advantage over the tokens trained on"),
    "train/clipfrac": ("rate", "share of trained tokens that the loss clips or masks; 0 of sapo and pg"),
    "train/approx_kl": ("number", "k3 estimate of KL(old policy || policy) [nats/token]"),
    "train/grad_norm": ("amount", "global gradient norm before clipping"),
    "train/weight_norm": ("amount?", "global norm of the policy's trained weights"),
    "train/learning_rate": ("number", "learning rate of the iteration"),
    "train/pass@1": ("rate?", "share of the iteration's episodes that are correct"),
    "kl/k1": ("number?", "mean of logprobs - ref_logprobs, 0 without a reference [nats/token]"),
    "critic/score": (_SPREAD, "episode rewards: mean, max, min"),
    "critic/advantages": (_SPREAD, "advantages of the trained responses: mean, max, min"),
    "response_length": (_SPREAD, "tokens after the prompt: mean, max, min [tokens]"),
    "response_length/clip_ratio": ("rate", "share of the responses that a length limit cut off"),
    "prompt_length": (_SPREAD, "tokens of the prompt: mean, max, min [tokens]"),
    "rollout/throughput": ("amount", "generated tokens per second of rollout [tokens/s]"),
    "rollout/turns": ("amount", "mean replies per episode"),
    "rollout/segments": ("amount?", "segments per episode: more than 1 where a template or the context "
                         "budget made the history fork"),
    "rollout/finished": ("rate", "share of the episodes that the environment ended"),
    "rollout/termination": ("rate? <reason>", "share by reason, one or more, which sum to 1: done, truncated "
                            "(environment's limit), length, context, turns, timeout, error"),
    "rollout/retries": ("amount?", "times that an episode was played again because its environment failed"),
    "rollout/sub_agents": ("amount?", "mean number of sub-agents per episode"),
    "env/suspicious": ("amount?", "share of the episodes whose code has forged results of its tests"),
    "mismatch/kl": ("number", "k3 estimate of KL(sampler || trainer) before the update [nats/token]"),
    "mismatch/ratio_max": ("number", "largest trainer / sampler probability ratio of a token, before the "
                           "cap"),
    "mismatch/ratio_mean": ("amount?", "mean trainer / sampler probability ratio: 1 where the sampler draws "
                            "from the policy"),
    "mismatch/slope": ("number?", "how the difference of the two log-probabilities grows with them: 0; -0.02 "
                       "where the sampler's temperature is 2 % higher"),
    "mismatch/ess": ("amount?", "effective sample size of the tokens' trainer / sampler ratios, as a share "
                     "of their number: 1 where all are equal (arXiv:2602.17616, there of sequences)"),
    "mismatch/frac_capped": ("rate", "share of tokens whose weight the correction caps or sets to 0"),
    "time": ("amount rollout update sync eval checkpoint", "rollout, update, sync, eval, checkpoint (those "
             "since the record before) [s]"),
    **_SYSTEM,
    **_ACCURACY,
    "val/<source>/correct": ("rate?", "correct, a part of info, over the responses of pass@1"),
    "val/<source>/<part>": ("number?", "mean of each named part of the environment's info"),
    "train/<source>/<part>": ("number?", "the same of the iteration's episodes"),
}
# What an update measures is not logged in an iteration without one: of GRPO, where no group is trainable, ...
_OF_UPDATE = {"train/policy_loss", "train/kl_loss", "train/entropy", "train/clipfrac", "train/approx_kl",
              "train/advantage", "train/grad_norm", "kl/k1", "mismatch/kl", "mismatch/ratio_max",
              "mismatch/frac_capped"}
# ... and of PPO, where the critic learns alone.
_OF_POLICY = {"train/policy_loss", "train/clipfrac", "train/approx_kl", "train/advantage", "train/grad_norm",
              "train/learning_rate"}
METRICS = {
    "sft": {
        "train/loss": ("number", "cross-entropy per response token, mean of the steps since the record "
                       "before [nats]"),
        "train/learning_rate": ("number", "learning rate of the last step"),
        "train/epoch": ("number", "rows seen over rows there are"),
        "train/throughput": ("amount", "tokens per second, prompts included, padding not [tokens/s]"),
        "train/grad_norm": ("amount", "global gradient norm before clipping, mean since the record before"),
        "train/weight_norm": ("amount?", "global norm of the trained weights"),
        "train/padding": ("rate?", "share of the computed tokens that are padding, in the last step"),
        "data/rows": ("count?", "rows that are learned from (first record only, as are the four below)"),
        "data/held_out": ("count?", "rows that val/loss is measured on"),
        "data/truncated": ("count?", "rows of data, of both kinds, that were cut to --max-length"),
        "data/dropped": ("count?", "rows that were left out, having nothing to learn: an empty response, or "
                         "one cut off"),
        "data/repeated": ("count?", "rows with the prompt of another one, which are never on both sides: of "
                          "held-out files they are left out"),
        "val/loss": ("number?", "cross-entropy per response token on held-out rows [nats]"),
        **_ACCURACY,
        "val/<source>/pass@1": ("rate?", "held-out correctness at temperature 1, mean over tasks and "
                                "samples"),
        "time": ("amount? rollout update sync eval checkpoint", "update, eval, checkpoint (those since the "
                 "record before; rollout and sync are 0 here) [s]"),
        **_SYSTEM,
        "system/memory_usage": ("amount", _SYSTEM["system/memory_usage"][1]),
    },
    "grpo": _GRPO_AND_PPO | {name: (f"{kind.removesuffix('?')}?", f"{meaning} (if there was an update)")
                             for name, (kind, meaning) in _GRPO_AND_PPO.items() if name in _OF_UPDATE} | {
        "rollout/groups_submitted": ("count", "groups sampled"),
        "rollout/groups_trainable": ("count", "groups whose rewards differ, of episodes that count"),
        "rollout/groups_incomplete": ("amount?", "groups that lost a member to a failing environment"),
    },
    "ppo": _GRPO_AND_PPO | {
        "train/policy_loss": ("number?", "policy loss without the entropy bonus, mean over the tokens "
                              "trained on (here and below, and on those of a minibatch that --target-kl "
                              "stops at)"),
        "mismatch/ratio_max": ("number?", _GRPO_AND_PPO["mismatch/ratio_max"][1]),
        "train/value_loss": ("number?", "the critic's loss, half of critic/vf_loss"),
        "train/entropy": ("number", "mean entropy of the next-token distribution on response tokens; its "
                          "estimate, the mean of -logprobs, where the critic trains alone [nats]"),
        "train/kl_loss": ("number", "k3 estimate of KL(policy || starting model) before the update, 0 "
                          "without a reference [nats/token]"),
        "train/clipfrac": ("rate?", _GRPO_AND_PPO["train/clipfrac"][1]),
        "train/advantage": ("number?", "mean advantage, whitened, over the tokens trained on"),
        "train/approx_kl": ("number?", "k3 estimate of KL(old policy || policy), mean of the minibatches "
                            "[nats/token]"),
        "train/grad_norm": ("amount?", "global gradient norm of the policy before clipping"),
        "train/learning_rate": ("number?", "the policy's learning rate"),
        "train/policy_steps": ("amount?", "optimiser steps of the policy in this iteration; --target-kl may "
                               "end them early"),
        "kl/k1": ("number?", "mean of logprobs - ref_logprobs before the update, 0 without a reference "
                  "[nats/token]"),
        "kl/coef": ("number?", "weight of the penalty in the rewards [1/nats]"),
        "critic/score": (_SPREAD, "episode rewards before the penalty: mean, max, min"),
        "critic/rewards": (_SPREAD, "episode rewards after the penalty, sums over tokens: mean, max, min"),
        "critic/advantages": (_SPREAD, "advantages of policy tokens before whitening: mean, max, min"),
        "critic/returns": (_SPREAD, "what the critic is fitted to, advantage + old value: mean, max, min"),
        "critic/values": (_SPREAD, "values at policy tokens before the update: mean, max, min"),
        "critic/vf_loss": ("number?", "squared error of the values, the clipped one where larger, mean over "
                           "tokens"),
        "critic/vf_clipfrac": ("rate?", "share of the tokens whose clipped error was the larger"),
        "critic/vf_explained_var": ("number", "1 - var(returns - values) / var(returns), values before the "
                                    "update"),
        "critic/vpred_mean": ("number?", "mean value during the critic's update"),
        "critic/grad_norm": ("amount?", "global gradient norm of a critic of its own before clipping"),
        "critic/weight_norm": ("amount?", "global norm of the critic's trained weights"),
        "critic/learning_rate": ("number?", "learning rate of a critic of its own"),
    },
    "a2c": {
        "reward_mean": ("number", "reward per environment step"),
        "done_rate": ("rate", "steps that ended an episode by themselves (terminated) [fraction]"),
        "trunc_rate": ("rate", "steps at which a limit cut the episode [fraction]"),
        "reset_rate": ("rate", "steps after which a new episode began [fraction]"),
        "success_rate": ("rate", "done / reset: episodes that reached the goal [fraction]; 0 without a goal "
                         "or a reset"),
        "dist_p10": ("number", "distance to the goal in the last rollout, 10th percentile [0..1]; 0 without "
                     "a goal"),
        "dist_p50": ("number", "its median"),
        "dist_p90": ("number", "its 90th percentile"),
        "reward_p10": ("number?", "reward of a step in the last rollout, 10th percentile"),
        "reward_p50": ("number?", "its median"),
        "reward_p90": ("number?", "its 90th percentile"),
        "entropy_mean": ("number", "of the policy [nats]; log(number of actions) is random play"),
        "value_mean": ("number", "predicted value, in the last rollout"),
        "value_std": ("amount", "its standard deviation"),
        "value_min": ("number?", "the least"),
        "value_max": ("number?", "the greatest"),
        "action_hist": ("histogram", "how often each action was chosen [count]"),
        "policy_loss": ("number?", "mean of -A log pi; near 0 by construction where advantages are "
                        "normalised"),
        "value_loss": ("number?", "mean squared error of the values"),
        "explained_variance": ("number?", "1 - var(R - V) / var(R) in the last rollout; 0 is a constant "
                               "guess"),
        "grad_norm": ("number?", "norm of the gradient before clipping"),
        "episode_return": ("number?", "mean undiscounted return of the episodes that ended; 0 if none did"),
        "episode_length": ("number?", "their mean length [steps]"),
        "eval/success_rate": ("rate?", "evaluation, actions sampled: episodes that reached the goal "
                              "[fraction]"),
        "eval/steps": ("number?", "lower median length of those [steps]; 0 if none"),
        "eval/return": ("number?", "mean undiscounted return of all"),
        "eval/greedy_success_rate": ("rate?", "the same with the likeliest action"),
        "eval/greedy_steps": ("number?", "the same with the likeliest action [steps]"),
        "eval/greedy_return": ("number?", "the same with the likeliest action"),
        "time": ("amount? eval checkpoint", "eval, checkpoint (those since the record before) [s]"),
        **_SYSTEM,
    },
}
METRICS = {algo: metrics | _EVERY for algo, metrics in METRICS.items()}
METRICS["ppo"]["opt_steps"] = ("count", "optimiser steps so far, the critic's included")


def keys_of(name: str, kind: str) -> list[str]:
    """The keys that a name in METRICS stands for: itself, or name/part for each part after the kind."""
    return [f"{name}/{part}" for part in kind.split()[1:]] or [name]


def required(metrics: dict[str, tuple[str, str]]) -> dict[str, str]:
    """key -> kind of those that every record of training has."""
    return {key: kind.split()[0] for name, (kind, _) in metrics.items() for key in keys_of(name, kind)
            if not kind.split()[0].endswith("?")}


def pattern(key: str) -> str:
    """A regular expression in which <x> stands for any text."""
    return re.sub(r"<\w+>", ".+", re.escape(key))


@functools.lru_cache(4096)
def name_of(algo: str, key: str) -> str | None:
    """The name in METRICS that stands for a key of a record: an exact one before one with <x>."""
    found = [(each.count("<"), name) for name, (kind, _) in METRICS[algo].items()
             for each in keys_of(name, kind) if re.fullmatch(pattern(each), key)]
    return min(found, default=(0, None), key=lambda pair: pair[0])[1]


COMMON = required(_EVERY)
REQUIRED = {algo: required(metrics) for algo, metrics in METRICS.items()}  # of a record of training
# Besides, of a record with an update: which number says so, and what it needs.
REQUIRED_OF_UPDATE = {
    "grpo": ("rollout/groups_trainable", required({name: _GRPO_AND_PPO[name] for name in _OF_UPDATE})),
    "ppo": ("train/policy_steps", required({name: _GRPO_AND_PPO[name] for name in _OF_POLICY}))}
MOST_IDLE = 10  # iterations of GRPO without an update, one after another, before a warning
ALGOS = tuple(METRICS)

# Families of keys of which a training record needs at least one, whatever the name.
_TEXT_FAMILIES = {"rollout/termination/<reason>": "rollout/termination/.+", "system/<name>": "system/.+"}
FAMILIES = {
    "sft": {}, "ppo": _TEXT_FAMILIES, "grpo": _TEXT_FAMILIES,
    "a2c": {"<name>_loss": ".*loss", "grad_norm": ".*grad_norm"},
}
PASS_AT = re.compile(r"val/(.+)/pass@([1-9][0-9]*)")


def validate(path, strict: bool = False) -> dict:
    """The verdict on one log: ok, records, resumes, errors, first, last, anomalies, warnings.

    path: the file or its run folder. A cut-off last line is a warning, with strict an anomaly. Never raises
    for what a file holds.
    """
    path = Path(path)
    checker = Checker(strict)
    try:
        if path.is_dir():
            path = path / "train_log.jsonl"
        if not path.is_file():  # also keeps away from pipes and devices, which may never end
            checker.wrong(None, "file", "is not a file" if path.exists() else "does not exist")
            return checker.verdict(path)
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                checker.line(number, raw)
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        checker.wrong(None, "file", f"cannot be read ({type(error).__name__})")
        return checker.verdict(path)
    checker.end()
    return checker.verdict(path)


class Checker:
    """Reads the lines of one log in order and keeps what the later ones are held against."""

    def __init__(self, strict: bool):
        self.strict = strict
        self.anomalies, self.warnings, self.left_out = [], [], 0
        self.num_idle = 0  # iterations without an update, one after another
        self.metas = self.records = self.resumes = self.errors = self.lines = 0
        self.run_id = self.algo = self.num_actions = None
        self.first = self.last = None
        self.floor = {}  # counters of the last record; the next one may not be below
        self.resumed = {}  # counters of a resume line with no record after it yet

    def wrong(self, line, field, what) -> None:
        if len(self.anomalies) < MOST_ANOMALIES:
            self.anomalies.append({"line": line, "field": clip(field), "wrong": what})
        else:
            self.left_out += 1

    def verdict(self, path) -> dict:
        return {
            "ok": not self.anomalies, "log": str(path), "records": self.records, "resumes": self.resumes,
            "errors": self.errors, "first": self.first, "last": self.last, "anomalies": self.anomalies,
            "anomalies_left_out": self.left_out, "warnings": self.warnings,
        }

    def line(self, number: int, raw: bytes) -> None:
        self.lines = number
        repeated = []
        try:
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: unique(pairs, repeated))
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or 5,000 digits
            if not raw.endswith(b"\n") and is_open(raw):
                cut = {"line": number, "field": "line", "wrong": "cut off: the process died while writing"}
                (self.anomalies if self.strict else self.warnings).append(cut)
            else:
                self.wrong(number, "line", f"invalid JSON: {clip(reason(error, raw))}")
            return
        for key in repeated:
            self.wrong(number, key, "the key stands twice in one object")
        if not isinstance(value, dict):
            self.wrong(number, "line", f"expected an object, got {show(value)}")
            return
        for field, what in unreadable_numbers(value):
            self.wrong(number, field, what)
        if "meta" in value:
            self.meta(number, value["meta"])
        elif "resume" in value:
            self.resume(number, value["resume"])
        elif "error" in value:
            self.error(number, value)
        else:
            self.record(number, value)

    def end(self) -> None:
        if not self.lines:
            self.wrong(None, "file", "is empty")
        if not self.metas:
            self.wrong(1, "meta", "line 1 must be the meta line; there is none")
        if not self.records:
            self.wrong(self.lines, "record", "there is no record")

    def meta(self, line: int, meta) -> None:
        self.metas += 1
        if self.metas > 1:
            self.wrong(line, "meta", "there is more than one meta line")
            return
        if line > 1:
            self.wrong(line, "meta", "the meta line must be line 1")
        if not self.keys(line, meta, META | present(META_OPTIONAL, meta), "meta"):
            return
        algo = meta.get("algo")
        if isinstance(algo, str) and algo not in ALGOS:
            self.wrong(line, "meta.algo", f"expected one of {', '.join(ALGOS)}, got {show(algo)}")
        elif isinstance(algo, str):
            self.algo = algo
        version = meta.get("schema_version")
        if is_number(version) and version != SCHEMA_VERSION:
            self.wrong(line, "meta.schema_version", f"unknown: {show(version)}, expected {SCHEMA_VERSION}")
        if isinstance(meta.get("versions"), dict):
            self.keys(line, meta["versions"], VERSIONS, "meta.versions")
        if self.algo == "a2c":
            rom = any(key in meta for key in META_ROM) or meta.get("env") == "pyboy"
            self.keys(line, meta, META_A2C | (META_ROM if rom else {}), "meta")
            self.num_actions = meta.get("num_actions")
        elif self.algo:
            self.keys(line, meta, META_LLM, "meta")
        self.same_run(line, "meta.run_id", meta.get("run_id"))

    def record(self, line: int, record: dict) -> None:
        self.records += 1
        needed = dict(COMMON)
        if self.algo and not is_validation_only(record, self.algo):
            needed |= REQUIRED[self.algo]
            if self.algo in REQUIRED_OF_UPDATE:
                name, of_update = REQUIRED_OF_UPDATE[self.algo]
                if record.get(name) != 0:
                    needed |= of_update
                if self.algo == "grpo":
                    self.count_idle(line, record.get(name))
            for family, pattern in FAMILIES[self.algo].items():
                if not any(re.fullmatch(pattern, key) for key in record):
                    self.wrong(line, family, "missing: at least one such key is required")
        self.keys(line, record, optional_keys(record, self.algo) | needed, "")
        self.same_run(line, "run_id", record.get("run_id"))
        self.trace(line, "trace_id", record)
        self.forward(line, record)
        if self.algo == "a2c":
            self.pixels(line, record)
        elif self.algo:
            self.fractions(line, record)

    def count_idle(self, line: int, num_trainable) -> None:
        """Warn once of a run that does not learn."""
        self.num_idle = self.num_idle + 1 if num_trainable == 0 else 0
        if self.num_idle == MOST_IDLE:
            self.warnings.append(f"line {line}: {MOST_IDLE} iterations without an update, since no group has "
                                 "replies of different reward: nothing is learned")

    def resume(self, line: int, resume) -> None:
        self.resumes += 1
        if not self.keys(line, resume, RESUME | present(RESUME_OPTIONAL, resume), "resume"):
            return
        self.same_run(line, "resume.run_id", resume.get("run_id"))
        self.trace(line, "resume.trace_id", resume)
        # A resume cuts off the records past its checkpoint and keeps the resume lines. So it stands at or
        # after the last record, while an earlier resume, from a later checkpoint, is no lower bound for it.
        self.resumed = {name: resume[name] for name in COUNTERS if is_count(resume.get(name))}
        for name, value in self.resumed.items():
            if value < self.floor.get(name, 0):
                what = f"goes back from {show(self.floor[name])} to {show(value)}"
                self.wrong(line, f"resume.{name}", what)

    def error(self, line: int, value: dict) -> None:
        self.errors += 1
        self.keys(line, value["error"], ERROR, "error")
        self.keys(line, value, {"trace_id": "text"}, "")
        trace_id = value.get("trace_id")
        if not isinstance(trace_id, str):
            return
        run_id, _, opt_steps = trace_id.rpartition(":")
        if not re.fullmatch("[0-9]+", opt_steps):
            self.wrong(line, "trace_id", f"expected <run_id>:<opt_steps>, got {show(trace_id)}")
        else:
            self.same_run(line, "trace_id", run_id)

    def keys(self, line: int, value, kinds: dict, where: str) -> bool:
        """Every key there and of its kind; False when `value` is no object at all."""
        if not isinstance(value, dict):
            self.wrong(line, where, f"expected an object, got {show(value)}")
            return False
        for key, kind in kinds.items():
            field = f"{where}.{key}" if where else key
            if key not in value:
                self.wrong(line, field, "missing")
            elif (what := misfit(kind, value[key])) is not None:
                self.wrong(line, field, what)
        return True

    def same_run(self, line: int, field: str, run_id) -> None:
        if not isinstance(run_id, str):
            return  # reported as missing or of the wrong type
        if self.run_id is None:
            self.run_id = run_id
        elif run_id != self.run_id:
            self.wrong(line, field, f"the run_id changes from {show(self.run_id)} to {show(run_id)}")

    def trace(self, line: int, field: str, value: dict) -> None:
        run_id, opt_steps, trace_id = value.get("run_id"), value.get("opt_steps"), value.get("trace_id")
        if isinstance(run_id, str) and is_count(opt_steps) and isinstance(trace_id, str):
            if trace_id != f"{run_id}:{opt_steps}":
                expected = clip(f"{run_id}:{opt_steps}")
                self.wrong(line, field, f"expected <run_id>:<opt_steps> = {expected}, got {show(trace_id)}")

    def forward(self, line: int, record: dict) -> None:
        counters = {name: record[name] for name in (*COUNTERS, "wall_time_s") if is_number(record.get(name))}
        for name, value in counters.items():
            before = max(self.floor.get(name, 0), self.resumed.get(name, 0))
            if value < before:
                self.wrong(line, name, f"goes back from {show(before)} to {show(value)}")
        self.floor, self.resumed = self.floor | counters, {}
        self.last = counters
        self.first = self.first or counters

    def pixels(self, line: int, record: dict) -> None:
        for low, high in (("dist_p10", "dist_p50"), ("dist_p50", "dist_p90"), ("reward_p10", "reward_p50"),
                          ("reward_p50", "reward_p90")):
            if is_number(record.get(low)) and is_number(record.get(high)) and record[low] > record[high]:
                self.wrong(line, low, f"{show(record[low])} is over {high}, {show(record[high])}")
        counts = record.get("action_hist")
        if isinstance(counts, list) and is_count(self.num_actions) and len(counts) != self.num_actions:
            self.wrong(line, "action_hist", f"expected {self.num_actions} counts, got {len(counts)}")

    def fractions(self, line: int, record: dict) -> None:
        reasons = [key for key in record if key.startswith("rollout/termination/")]
        parts = [record[key] for key in reasons if is_number(record[key])]
        if parts and len(parts) == len(reasons) and abs(math.fsum(parts) - 1) > 1e-6:
            what = f"the fractions sum to {math.fsum(parts):.9g}, not 1"
            self.wrong(line, "rollout/termination/<reason>", what)
        for key, value in record.items():
            match = PASS_AT.fullmatch(key)
            once = record.get(f"val/{match[1]}/pass@1") if match else None
            if is_number(once) and is_number(value) and value < once - 1e-9:
                self.wrong(line, key, f"{show(value)} is below pass@1, {show(once)}")


def is_validation_only(record: dict, algo: str) -> bool:
    """A record that only evaluates, as the one before the first update: counters, val/ and data/ keys do."""
    own = REQUIRED[algo].keys() - COMMON.keys()
    trained = own.__contains__ if algo == "a2c" else lambda key: key.startswith("train/")
    return any(key.startswith(("val/", "data/")) for key in record) and not any(map(trained, record))


def present(kinds: dict[str, str], value) -> dict[str, str]:
    """Those of the keys that `value` has."""
    return {key: kind for key, kind in kinds.items() if isinstance(value, dict) and key in value}


def optional_keys(record: dict, algo: str | None) -> dict[str, str]:
    """The keys of a record that need not be there but have a kind -> that kind."""
    found = {}
    for key in record:
        if algo and (name := name_of(algo, key)):
            found[key] = METRICS[algo][name][0].split()[0].rstrip("?")
    return found


def is_finite(value) -> bool:
    """Finite, and within 64 bits when an integer: what a reader in another language can hold."""
    return math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**64


def is_number(value) -> bool:
    """An int or a float that can be compared: not a bool, not NaN, not infinite, not over 64 bits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)


def is_count(value) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


def misfit(kind: str, value) -> str | None:
    """What is wrong with `value` as one of the kinds above; None when nothing is."""
    if kind.endswith("_or_null"):
        return None if value is None else misfit(kind.removesuffix("_or_null"), value)
    if kind == "histogram":
        return histogram_misfit(value)
    if kind in ("number", "integer", "amount", "count", "rate"):
        return number_misfit(kind, value)
    expected, fits = {
        "text": ("text", isinstance(value, str) and value != ""),
        "string": ("text", isinstance(value, str)),
        "texts": ("a list of text", isinstance(value, list) and all(isinstance(item, str) for item in value)),
        "object": ("an object", isinstance(value, dict)),
        "flag": ("true or false", isinstance(value, bool)),
        "utc": ("a UTC time in ISO 8601", is_utc(value)),
    }[kind]
    return None if fits else f"expected {expected}, got {show(value)}"


def number_misfit(kind: str, value) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"expected a number, got {show(value)}"
    if not is_finite(value):
        return None  # reported for every field of the line by unreadable_numbers
    if kind in ("count", "integer") and not isinstance(value, int):
        return f"expected an integer, got {show(value)}"
    if kind in ("count", "amount") and value < 0:
        return f"expected at least 0, got {show(value)}"
    if kind == "rate" and not 0 <= value <= 1:
        return f"expected a rate in [0, 1], got {show(value)}"
    return None


def histogram_misfit(value) -> str | None:
    if not isinstance(value, list):
        return f"expected a list of counts, got {show(value)}"
    for index, count in enumerate(value):
        if (what := misfit("count", count)) is not None:
            return f"count {index}: {what}"
    return None


def is_utc(value) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except (TypeError, ValueError, OverflowError):
        return False


def unreadable_numbers(value: dict):
    """Yields (field, what is wrong) for every number of a line that is not finite, at any depth."""
    stack = [("", value)]  # not recursion: the parser reads deeper than a Python function may call itself
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            stack += [(f"{path}.{key}"[-200:] if path else key, part) for key, part in item.items()]
        elif isinstance(item, list):
            stack += [(path, part) for part in item]
        elif isinstance(item, (int, float)) and not is_finite(item):
            yield path, "an integer over 64 bits" if isinstance(item, int) else f"not finite: {item}"


def unique(pairs: list, repeated: list) -> dict:
    """The object of `pairs`. Keys that stand twice go into `repeated`: readers differ on which one counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen = set()
        repeated += sorted({key for key, _ in pairs if key in seen or seen.add(key)})
    return value


def is_open(raw: bytes) -> bool:
    """Whether a line that does not parse is an object whose end is missing: more braces open than close."""
    text = raw.decode("utf-8", errors="replace").lstrip()
    # Possessive (*+): a long line leaves no places to go back to.
    bare = re.sub(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', "", text, flags=re.DOTALL)
    return text.startswith("{") and bare.count("{") > bare.count("}")


def reason(error: Exception, raw: bytes) -> str:
    if not raw.strip():
        return "the line is empty"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error) if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {error}"


def show(value) -> str:
    """A value in a message: short, whatever it holds."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else clip(json.dumps(value))


def clip(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a train_log.jsonl; the verdict is JSON on stdout.")
    parser.add_argument("log", help="train_log.jsonl, or the run folder that holds it")
    parser.add_argument("--strict", action="store_true", help="a cut-off last line fails too")
    args = parser.parse_args()
    verdict = validate(args.log, strict=args.strict)
    try:
        print(json.dumps(verdict, indent=2), flush=True)
    except BrokenPipeError:  # `| head` has read enough; nor shall the interpreter's last flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
