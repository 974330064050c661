"""Every flag of every script does what its help says.

A check below belongs to some flags of some scripts: it makes short runs with inputs for which the flag
matters, and says what must hold between them, a direction or an exact relation. The flags are read from
`Args`: one without a check fails, and so does a choice of a flag that no run has made.
"""

import atexit
import collections
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import types
import typing
import zlib
from pathlib import Path

import datasets
import gymnasium
import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

import a2c_vecenv as a2c
import grpo_llm
import ppo_llm
import sft
from envs import BadInput, Episode, Step
from envs.countdown import Countdown
from tests.run_folders import (
    ROOT,
    TINY,
    asked_once,
    command_line,
    episodes,
    full_forward,
    killed_after,
    log_lines,
    records,
    same_end,
    state_of,
    timeless,
    weights_of,
    write_jsonl,
)
from tests.test_updates import CHECKSUM, corrections, group_advantages, surrogate
from tests.two_turn import TwoTurn
from tools import docs_tables
from tools.validate_train_log import validate

torch.set_num_threads(1)
RL = (grpo_llm, ppo_llm)
LLM = (*RL, sft)
ALL = (*LLM, a2c)
CHECKS = {}  # (name of a script, flag) -> its check
DONE = {}  # (check, script) -> what it has raised
RAN = {}  # (script, flag, value) -> whether the log of a run with it was found valid
STAND_INS = ("compile", "cudagraphs", "self_test")  # of which no run here is a real one


def shows(*flags, of):
    """What follows is the check of these flags of these scripts."""
    def register(check):
        for script, flag in itertools.product(of, flags):
            assert (script.__name__, flag) not in CHECKS, f"two checks of {flag}"
            CHECKS[script.__name__, flag] = check
    return register


def flags_of(script):
    return [field.name for field in dataclasses.fields(script.Args)]


FLAG = re.compile(r"\bargs\.(\w+)")


@functools.cache
def readers(script):
    """{flag: the text of each function and class that reads it}, {flag: the lines of `main` that do}"""
    functions, lines = collections.defaultdict(set), collections.defaultdict(list)
    text = (ROOT / f"{script.__name__}.py").read_text("utf-8")
    for part in re.split(r"^(?=(?:@|def |class |async def )\w)", text, flags=re.M):
        if part.startswith("def main("):
            for line in part.splitlines():
                for flag in FLAG.findall(line):
                    lines[flag].append(line.strip())
        else:
            for flag in FLAG.findall(part):
                functions[flag].add(part.strip())
    return functions, lines


OF_CRITIC = ("lora_rank", "lora_adapter_path", "gradient_checkpointing")  # mean ppo_llm.py's critic, too


def is_known(script, flag):
    """Whether what reads a flag is in a script before, to the letter."""
    if script is ppo_llm and flag in OF_CRITIC:
        return False
    functions, lines = (of[flag] for of in readers(script))
    earlier = [[of[flag] for of in readers(other)] for other in ALL[:ALL.index(script)]]
    return any(functions <= known and lines == same and (functions or lines) for known, same in earlier)


def cases():
    """Of code that scripts have in common to the letter, the check of the first of them is fast."""
    for script in ALL:
        for flag in flags_of(script):
            marks = [pytest.mark.slow] if is_known(script, flag) else []
            yield pytest.param(script, flag, id=f"{script.__name__}-{flag}", marks=marks)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("script", "flag"), cases())
def test_a_flag_does_what_its_help_says(script, flag, lab, tmp_path, monkeypatch):
    if (script.__name__, flag) not in CHECKS:
        known = docs_tables.flags(ROOT / f"{script.__name__}.py")
        (told,) = [one.help for one in known if one.name == flag]
        pytest.fail(f"{script.__name__}.py --{flag.replace('_', '-')}: no check in tests/test_flags.py shows "
                    f"that it does what its help says: {told}", pytrace=False)
    check = CHECKS[script.__name__, flag]
    if (check, script) not in DONE:  # several flags may have one check, which runs once
        DONE[check, script] = None
        try:
            check(Runs(lab, script, tmp_path, monkeypatch))
        except BaseException as error:
            DONE[check, script] = error
    if DONE[check, script]:
        raise DONE[check, script]
    for value in choices_of(script, flag):
        assert (script, flag, value) in RAN, f"no run here has --{flag.replace('_', '-')} {value}"
        assert RAN[script, flag, value]


def choices_of(script, flag):
    kind = typing.get_type_hints(script.Args)[flag]
    if kind is bool:
        return [False] if flag in STAND_INS else [False, True]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return [value for value in choices if value != "vllm"]


def test_there_is_no_check_of_a_flag_that_is_gone():
    assert not set(CHECKS) - {(script.__name__, flag) for script in ALL for flag in flags_of(script)}


# Runs, and what is seen of them


SHORT = dict(eval_every=0, checkpoint_every=1, keep_checkpoints=0)
FEW = dict(eval_tasks=2, eval_samples=2, learning_rate=1e-3, final_learning_rate=1.0)
THREE = ("test_tasks=32", "max_operands=3")
FOUR = ("test_tasks=32", "min_operands=4", "max_operands=4")
OF_RL = SHORT | FEW | dict(
    model=TINY,  # prompts of 7 and of 8 tokens; most replies have 9 or 13, as solutions have
    env_kwargs=("test_tasks=32", "max_operands=4"), max_response_tokens=13, reward_fn=f"{ROOT}/{CHECKSUM}",
    iterations=1, prompts_per_iteration=4, group_size=4, warmup_iterations=0, epochs=1, minibatches=1,
    log_episodes=1.0)
BASE = {  # of all runs here: one step, at the peak of the learning rate
    grpo_llm: OF_RL | dict(max_grad_norm=1e9),
    ppo_llm: OF_RL | dict(critic_warmup=0, critic_epochs=1, critic_minibatches=1),
    sft: SHORT | FEW | dict(model=TINY, steps=1, batch_size=4, log_every=1, warmup_steps=0,
                            schedule="constant"),
    a2c: SHORT | dict(iterations=2, num_envs=6, num_steps=4, hidden_size=16, log_every=1, eval_episodes=2,
                      eval_envs=2, anneal=False, env_kwargs=("max_steps=9",)),
}
# Seven iterations of the smallest runs, for what happens every so many of them.
LONG = {
    grpo_llm: dict(iterations=7, prompts_per_iteration=2, group_size=4, warmup_iterations=2,
                   final_learning_rate=0.25, max_response_tokens=4, eval_tasks=1, eval_every=3,
                   checkpoint_every=2, keep_checkpoints=2),
    sft: dict(steps=7, batch_size=3, evaluates=True, eval_every=3, checkpoint_every=2, keep_checkpoints=2,
              learning_rate=3e-4),
    a2c: dict(iterations=7, eval_every=3, checkpoint_every=2, keep_checkpoints=2, num_envs=2, num_steps=2),
}
LONG[ppo_llm] = LONG[grpo_llm] | dict(critic_warmup=2)
FILES = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, FILES, ignore_errors=True)
NOISE = 1.0  # what a sampler's log-probabilities are off by, where it is told to [nats]
# The equations whose arguments and results are kept.
KEPT = {grpo_llm: ("policy_loss",), ppo_llm: ("clipped_policy_loss",), sft: ("token_losses",),
        a2c: ("a2c_loss", "rollout", "evaluate")}


# Of 16 and of 11 tokens, of which 9 and 5 are learned, with <eos>.
LONG_ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"),
             ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60"), ("8 8 1 -> 1", "8 - 8 = 0; 1 - 0 = 1")]
SHORT_ROWS = [("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"), ("2 5 -> 7", "2 + 5 = 7"),
              ("4 4 -> 8", "4 + 4 = 8")]


class Runs:
    """The runs of a check. Called with flags that differ from BASE and defaults; equal ones are made once.

    evaluates: without it an evaluation says nothing, which takes no time. noise: of what the sampler says
    [nats].
    """

    def __init__(self, lab, script, folder, patch):
        self.lab, self.script, self.folder, self.patch = lab, script, folder, patch

    def __call__(self, noise=0.0, evaluates=False, **flags):
        usual, flags = vars(self.script.Args()) | BASE[self.script], self.of_rows(evaluates) | flags
        given = {name: value for name, value in flags.items() if value != usual[name]}
        return self.lab(self.script, noise, evaluates, **given)

    def of_rows(self, evaluates):
        """sft.py learns four rows of equal length; evaluations are of shorter ones."""
        if self.script is not sft:
            return {}
        return dict(train_files=(self.rows("long", LONG_ROWS),), val_ratio=0.0) | (
            dict(val_files=(self.rows("short", SHORT_ROWS),)) if evaluates else {})

    def rows(self, name, rows):
        texts = [dict(prompt=prompt, response=response) for prompt, response in rows]
        return write_jsonl(FILES / f"{name}.jsonl", texts)

    def long(self, **flags):
        return self(**LONG[self.script] | flags)

    def into(self, folder, evaluates=False, **flags):
        """One that is not kept, in a folder of its own."""
        return Seen(self.script, folder, BASE[self.script] | self.of_rows(evaluates) | flags, 0.0, evaluates)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return str(self.folder / name)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    @functools.cache
    def run(script, noise, evaluates, **flags):
        return Seen(script, tmp_path_factory.mktemp("run"), BASE[script] | flags, noise, evaluates)
    return run


class Seen:
    """A finished run: its folder, what it said, and what went through torch and the equations."""

    def __init__(self, script, folder, flags, noise, evaluates):
        self.script, self.folder, self.flags = script, folder, flags
        self.steps = []  # of optimisers
        self.passes = []  # of decoders: whether there is a gradient, rows, tokens in each
        self.layers = collections.Counter()  # begun, with a gradient and without
        self.dtypes = set()  # of a layer: whether there is a gradient, dtypes of its result and weights
        self.orders = []  # that were drawn
        self.gradients = []  # of each loss of a2c_vecenv.py
        self.calls = collections.defaultdict(list)  # of KEPT
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            hook = register_optimizer_step_pre_hook(self.keep_step)
            self.watch(patch, noise)
            if not evaluates and script in RL:
                patch.setattr(script, "evaluate", lambda *_: ({"val/none": 0.0}, []))
            if not evaluates and script is a2c:
                patch.setattr(script, "evaluate", lambda *_, **__: {"eval/none": 0.0})
            try:
                with asked_once(script):
                    script.main(script.Args(**flags | dict(run_dir=str(folder))))
            finally:
                hook.remove()
        self.said = said.getvalue()
        if not str(folder):
            (self.folder,) = Path("runs", flags.get("experiment", script.Args.experiment)).iterdir()
        for flag in flags_of(script):
            value = flags.get(flag, getattr(script.Args, flag))
            if isinstance(value, bool | str) and (script, flag, value) not in RAN:
                RAN[script, flag, value] = validate(self.folder)["ok"]
        self.log = records(self.folder)
        self.last = self.log[-1]

    def keep_step(self, optimizer, *_):
        groups = optimizer.param_groups
        if not groups[0]["lr"]:  # one that is made for the sake of the optimiser's state
            return
        weights = itertools.chain(*(group["params"] for group in groups))
        gradient = [p.grad.detach().flatten() for p in weights if p.grad is not None]
        self.steps.append(types.SimpleNamespace(
            optimizer=id(optimizer), rates=[group["lr"] for group in groups], betas=groups[0]["betas"],
            decays=[group["weight_decay"] for group in groups], gradient=torch.cat(gradient)))
        if len(self.steps) > 2:
            self.steps[-2].gradient = None  # the first and the last are enough, of hundreds of runs

    def watch(self, patch, noise):
        layer, decoder, permute = LlamaMLP.forward, LlamaModel.forward, torch.randperm

        def watched_layer(module, hidden):
            self.layers[torch.is_grad_enabled()] += 1  # to compute it again ends before the result
            result = layer(module, hidden)
            self.dtypes.add((torch.is_grad_enabled(), result.dtype, next(module.parameters()).dtype))
            return result

        def watched_decoder(module, input_ids, **given):
            self.passes.append((torch.is_grad_enabled(), *input_ids.shape))
            return decoder(module, input_ids=input_ids, **given)

        def watched_order(size):
            self.orders.append(permute(size))
            return self.orders[-1]

        patch.setattr(LlamaMLP, "forward", watched_layer)
        patch.setattr(LlamaModel, "forward", watched_decoder)
        patch.setattr(torch, "randperm", watched_order)
        for name in KEPT[self.script]:
            function = getattr(self.script, name)
            patch.setattr(self.script, name, functools.partial(self.keep_call, name, function))
        if self.script in RL:
            generate = self.script.generate

            def watched_generate(*given):
                if not self.calls["generate"]:  # what was computed before is a test of the model
                    self.dtypes.clear()
                self.calls["generate"].append(True)
                return [(ids, [p + noise * (-1) ** token for token, p in zip(ids, logprobs, strict=True)])
                        for ids, logprobs in generate(*given)]

            patch.setattr(self.script, "generate", watched_generate)
            if noise:
                patch.setitem(self.script.LIMITS, "float32", (math.inf, math.inf, math.inf))

    def keep_call(self, name, function, *given, **more):
        result = function(*given, **more)
        self.calls[name].append((copied(given), copied(result)))
        if name == "a2c_loss":
            agent, *_ = self.calls["rollout"][-1][0]
            found = torch.autograd.grad(result[0], [*agent.parameters()], retain_graph=True)
            self.gradients.append(torch.cat([gradient.flatten() for gradient in found]).double())
        return result

    def played(self, kind="train", step=1):
        return episodes(self.folder, f"{kind}_step_{step:06d}")[0]

    def segments(self, **which):
        return [s for episode in self.played(**which) for s in episode["segments"]]

    @property
    def kept(self):
        return sorted(int(path.name[5:]) for path in self.folder.glob("checkpoints/step_*"))

    @functools.cached_property
    def end(self):
        """The weights of the last checkpoint."""
        return weights_of(self.folder / f"checkpoints/step_{self.kept[-1]:06d}")

    def policy_steps(self):
        return [step for step in self.steps if step.optimizer == self.steps[-1].optimizer]

    def critic_steps(self):
        return [step for step in self.steps if step.optimizer != self.steps[-1].optimizer]

    @property
    def gradient(self):
        """Of the last step, as it was before it was clipped."""
        clipped = self.steps[-1].gradient.double()
        return clipped * self.last["train/grad_norm"] / clipped.norm()

    def column(self, name):
        return [record[name] for record in self.log if name in record]


def copied(thing):
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone()
    if isinstance(thing, dict):
        return {name: copied(item) for name, item in thing.items()}
    if isinstance(thing, tuple):
        return tuple(map(copied, thing))
    return thing


def moved(seen):
    """How far the last checkpoint is from the shipped weights, in one vector."""
    start = load_file(Path(TINY) / "model.safetensors")
    return torch.cat([(seen.end[name].double() - start[name]).flatten() for name in sorted(start)])


def far(one, other):
    """The relative difference of two vectors."""
    return float((one - other).norm() / other.norm())


def val(record):
    return {name: value for name, value in record.items() if name.startswith("val/")}


def of_evaluation(seen, step):
    """Numbers of an evaluation that are others with other weights."""
    if seen.script is sft:
        return [seen.log[step]["val/loss"]]
    return [p for s in seen.segments(kind="val", step=step) for p in s["rollout_logprobs"]]


@functools.cache
def tiny():
    model = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager").double().eval()
    return model, AutoTokenizer.from_pretrained(TINY)


def weights_of_tiny():
    """All in one vector."""
    return torch.nn.utils.parameters_to_vector(tiny()[0].parameters()).detach().float()


def is_rounded(numbers):
    """The share of numbers that bfloat16 has."""
    numbers = torch.tensor(numbers)
    return float((numbers == numbers.bfloat16().float()).double().mean())


def is_shown_by(file, *names):
    """The check is a test of another file; one that needs a GPU, a server or minutes."""
    text = (ROOT / "tests" / file).read_text("utf-8")
    for name in names:
        assert f"\ndef {name}(" in text, f"tests/{file} has no {name}"


# Task


class Talk(Countdown):
    """Countdown under another name."""

    def task(self, split, index):
        return dataclasses.replace(super().task(split, index), source="talk")


OF_ENV = dict(evaluates=True, env_kwargs=THREE)  # of sft.py, which else learns rows


def of_env(run):
    return OF_ENV | (dict(train_files=(), val_files=(), val_ratio=0.1) if run.script is sft else {})


@shows("env", of=LLM)
def _(run):
    """The checks of evaluations have those of countdown."""
    seen = run(**of_env(run) if run.script is sft else dict(evaluates=True), env=f"{__file__}:Talk")
    assert {name.split("/")[1] for name in val(seen.last) if name.count("/") == 2} == {"talk"}
    (meta,) = [line["meta"] for line in log_lines(seen.folder) if "meta" in line]
    assert meta["env"].endswith("Talk")


@shows("env_kwargs", of=RL)
def _(run):
    for seen, longest in ((run(env_kwargs=THREE), 7), (run(), 8)):  # <bos> 6 18 14 -> 38 :
        assert (seen.last["prompt_length/min"], seen.last["prompt_length/max"]) == (7, longest)


@shows("env_kwargs", of=[sft])
def _(run):
    """... and a reply of one step more, without `=` and `;`: 18 14 + 32 and <eos>."""
    assert run(**of_env(run)).last["env_steps"] == 4 * (7 + 2 * 4 + 1)
    assert run(**of_env(run) | dict(env_kwargs=FOUR)).last["env_steps"] == 4 * (8 + 3 * 4 + 1)


def length(r):
    return float(len(r.messages[-1]["content"]))


@shows("reward_fn", of=RL)
def _(run):
    seen = run(reward_fn=f"{__file__}:length")
    said = [len(episode["messages"][-1]["content"]) for episode in seen.played()]
    assert [episode["reward"] for episode in seen.played()] == said != [e["reward"] for e in run().played()]
    assert seen.last["train/reward"] == statistics.fmean(said) and len({*said}) > 1
    own = run(reward_fn="").played()  # the environment's
    assert [episode["reward"] for episode in own] == [episode["correct"] for episode in own]


# Model


@shows("model", of=LLM)
def _(run):
    """Another one begins where the run that made it has ended."""
    one = run(evaluates=True)
    other = run(evaluates=True, model=str(one.folder / "checkpoints/step_000001"))
    assert of_evaluation(other, 0) == pytest.approx(of_evaluation(one, 1), rel=1e-4)
    assert of_evaluation(other, 0) != pytest.approx(of_evaluation(one, 0), rel=1e-3)
    if run.script is sft:  # without one, weights are random
        assert run(evaluates=True, model="").log[0]["val/loss"] > math.log(50)


@shows("chat_template", of=LLM)
def _(run):
    """The model's begins with <bos> and ends with `:`; where there is a reply, with <eos>, which all need."""
    template = run.write("chat.jinja", "{% for m in messages %}{{ ': : : ' if m.role == 'assistant' }}"
                         "{{ m.content }} {% endfor %}{% if add_generation_prompt %}: : : {% endif %}")
    sizes = []
    for given in ("model", "plain", template):
        seen = run(chat_template=given)
        sizes.append(seen.last["env_steps"] / 4 if run.script is sft else seen.last["prompt_length/min"])
    assert sizes == ([16, 14, 17] if run.script is sft else [7, 5, 8])


@shows("dtype", of=LLM)
def _(run):
    """All passes, and no weights: neither trained ones nor log-probabilities, losses and values."""
    flags = dict(iterations=2) if run.script in RL else {}
    whole, half = run(**flags), run(**flags, dtype="bfloat16")
    single, double = torch.bfloat16, torch.float32
    assert {of[1:] for of in whole.dtypes} == {(double, double)}
    assert {of[1:] for of in half.dtypes if of[0]} == {(single, double)}
    assert {tensor.dtype for tensor in half.end.values()} == {double}
    if run.script is sft:
        evaluated = run(evaluates=True, dtype="bfloat16")
        assert (False, single, double) in evaluated.dtypes
        losses = [result for _, result in evaluated.calls["token_losses"]]
        assert {of.dtype for of in losses} == {double} and is_rounded(torch.cat(losses).tolist()) < 0.2
        assert half.last["train/loss"] == pytest.approx(whole.last["train/loss"], rel=0.02)
        assert half.last["train/loss"] != pytest.approx(whole.last["train/loss"], rel=1e-6)
        assert {of[1:] for of in half.dtypes if of[0]} == {(single, double)}
    else:
        assert {of[1:] for of in half.dtypes} == {(single, double)}
        names = ["rollout_logprobs"]
        if run.script is ppo_llm:
            names += ["old_logprobs", "values", "returns", "advantages"]
        for name in names:
            numbers = [x for s in half.segments(step=2) for x in s[name] if x]
            assert is_rounded(numbers) < 0.2, name
    adapted = run(dtype="bfloat16", lora_rank=3)
    assert {of for of in adapted.dtypes if of[0]} == {(True, single, single)}  # the frozen base is bfloat16
    assert {tensor.dtype for tensor in adapted.end.values()} == {double}


def adapters(seen):
    """{name of a module: the ranks of its adapters}"""
    found = collections.defaultdict(set)
    for name, tensor in seen.end.items():
        if "lora_A" in name:
            found[re.search(r"\.(\w+)\.lora_A", name)[1]].add(len(tensor))
    return found


LINEAR = {f"{name}_proj" for name in ("q", "k", "v", "o", "up", "down", "gate")}


def of_both(seen):
    """What is kept of ppo_llm.py's critic and of its policy."""
    folder = seen.folder / "checkpoints/step_000001"
    return state_of(folder)["critic"], load_file(folder / "adapter_model.safetensors")


@shows("lora_rank", of=LLM)
def _(run):
    for rank, seen in ((2, run(lora_rank=2)), (3, run(dtype="bfloat16", lora_rank=3))):
        assert adapters(seen) == dict.fromkeys(LINEAR, {rank})
        trained = {name for name in seen.end if "lora_" not in name}
        assert all(name.startswith("head.") for name in trained)  # that of ppo_llm.py's critic
        if run.script is ppo_llm:  # whose layers have adapters, as many as the policy's
            critic, policy = (sum("lora_" in name for name in names) for names in of_both(seen))
            assert critic == policy > 0, "of the critic's copy only the head is trained, or all"
    assert not adapters(run()) and re.search(r"LoRA adapts .*q_proj", run(lora_rank=2).said)


@shows("lora_alpha", of=LLM)
def _(run):
    """What an adapter adds is in proportion to alpha / rank, and so is its gradient while B is 0."""
    one, other = run(lora_rank=2), run(lora_rank=2, lora_alpha=64)
    assert other.last["train/grad_norm"] == pytest.approx(2 * one.last["train/grad_norm"], rel=1e-4)
    config = other.folder / "checkpoints/step_000001/adapter_config.json"
    assert json.loads(config.read_text())["lora_alpha"] == 64


@shows("lora_target_modules", of=LLM)
def _(run):
    assert adapters(run(lora_rank=2, lora_target_modules="q_proj,up_proj")).keys() == {"q_proj", "up_proj"}


@shows("lora_adapter_path", of=LLM)
def _(run):
    """Goes on where the adapter's run has ended, with its rank, and trains nothing else. It is the reference
    of a penalty, too; a resumed run goes on from the adapter of its checkpoint, and keeps that reference.
    """
    small = {} if run.script is sft else dict(max_response_tokens=5, prompts_per_iteration=2)
    first = run(evaluates=True, lora_rank=2, learning_rate=2e-2, **small)
    flags = dict(steps=2) if run.script is sft else dict(iterations=2, kl_coef=0.1)
    flags |= small | dict(lora_adapter_path=str(first.folder / "checkpoints/step_000001"), learning_rate=2e-2,
                  checkpoint_every=1, keep_checkpoints=0)
    seen = run(evaluates=True, **flags)
    assert of_evaluation(seen, 0) == pytest.approx(of_evaluation(first, 1), rel=1e-4)
    assert of_evaluation(seen, 0) != pytest.approx(of_evaluation(first, 0), rel=1e-3)
    assert adapters(seen) == adapters(first) and seen.end.keys() == first.end.keys()
    if run.script in RL:
        assert abs(seen.log[1]["train/kl_loss"]) < 1e-9 < seen.log[2]["train/kl_loss"]
    folder = killed_after(seen.folder, run.folder / "run", 1)
    run.into(folder, evaluates=True, **flags)
    same_end(seen.folder, folder, "step_000002")


@shows("gradient_checkpointing", of=LLM)
def _(run):
    """Each layer with a gradient is computed twice, the critic's too, and the rest and all numbers stay."""
    plain, kept = run(), run(gradient_checkpointing=True)
    assert kept.layers == {True: 2 * plain.layers[True], False: plain.layers[False]}
    assert far(kept.gradient, plain.gradient) < 1e-6
    norms = [name for name in plain.last if name.endswith("grad_norm")]
    for name in norms:
        assert kept.last[name] == pytest.approx(plain.last[name], rel=1e-6)


# Engine


@shows("engine", "vllm_kwargs", of=RL)
def _(run):
    """vllm starts vLLM, here a stand-in that keeps what it is told; test_engines.py has the real one."""
    told = []

    class LLM:
        def __init__(self, model, **options):
            told.append((model, options))
            raise RuntimeError("a stand-in")

    run.patch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM))
    flags = dict(engine="vllm", dtype="bfloat16", max_context_tokens=99, seed=2**32 + 5)
    for kwargs in ((), ("gpu_memory_utilization=0.25", "max_num_seqs=7", "quantization=fp8")):
        with pytest.raises(BadInput, match="--engine vllm: .*a stand-in"):
            run.into(run.folder / "run", **flags, vllm_kwargs=kwargs)
    (model, plain), (_, given) = told
    assert model == TINY or model.endswith("countdown-tiny")
    assert (plain["dtype"], plain["max_model_len"], plain["seed"]) == ("bfloat16", 99, 5)
    assert given == plain | dict(gpu_memory_utilization=0.25, max_num_seqs=7, quantization="fp8")
    is_shown_by("test_engines.py",
                "test_with_vllm_each_sampled_token_has_the_trainers_logprob_and_a_resume_is_exact")


@shows("vllm_url", of=RL)
def _(run):
    """Each server gets the weights, and some of the prompts."""
    asked = []

    def post(url, **_):
        asked.append(url)
        if "completions" in url:
            raise requests.ConnectionError("gone")
        return types.SimpleNamespace(raise_for_status=lambda: None)

    run.patch.setattr(requests, "post", post)
    urls = ("http://one:1", "http://two:2/")
    with pytest.raises(SystemExit, match="--vllm-url http://(one|two).*gone"):
        run.into(run.folder / "run", engine="vllm", vllm_url=urls)
    hosts = [url.split("/")[2] for url in asked]
    assert hosts[:6] == ["one:1"] * 3 + ["two:2"] * 3 and {*hosts[6:]} == {"one:1", "two:2"}
    is_shown_by("test_engines.py", "test_every_server_samples_with_the_policys_weights_in_every_iteration")


# The three sizes


@shows("prompts_per_iteration", "group_size", of=RL)
def _(run):
    for flags in ({}, dict(prompts_per_iteration=3, group_size=5)):
        seen = run(**flags)
        tasks = [episode["task_id"] for episode in seen.played()]
        assert len({*tasks}) == seen.flags["prompts_per_iteration"]
        assert {*collections.Counter(tasks).values()} == {seen.flags["group_size"]}
    if run.script is ppo_llm:
        assert {*collections.Counter(e["task_id"] for e in run(group_size=1).played()).values()} == {1}


@shows("microbatch_tokens", of=LLM)
def _(run):
    """What just fits is one pass, and one token less makes two. The gradient is the same."""
    plain = run()
    graph, rows, width = next(shape for shape in plain.passes if shape[0])
    size = rows * (width + 1)  # the last token predicts nothing and is not computed
    whole, cut = run(microbatch_tokens=size), run(microbatch_tokens=size - 1)
    counts = [sum(shape[0] for shape in seen.passes) for seen in (plain, whole, cut)]
    assert counts[0] == counts[1] == (2 if run.script is ppo_llm else 1) and counts[2] == 2 * counts[0]
    assert all(rows * (width + 1) < size for graph, rows, width in cut.passes if graph)
    assert far(cut.gradient, plain.gradient) < 1e-5
    for name in ("train/loss", "train/policy_loss", "train/entropy", "critic/vf_loss", "critic/grad_norm"):
        assert cut.last.get(name, 0.0) == pytest.approx(plain.last.get(name, 0.0), rel=1e-5, abs=1e-7), name


# Rollout


def replies(seen, **which):
    return [s["response_ids"] for s in seen.segments(**which)]


@shows("max_response_tokens", of=RL)
def _(run):
    """In training and in evaluations: those that are cut have as many, and of the others none has more."""
    for limit in (3, 9):  # a solution has 9, <eos> included
        seen = run(evaluates=True, max_response_tokens=limit)
        for kind in ("train", "val"):
            played = seen.played(kind)
            lengths = [len(reply) for reply in replies(seen, kind=kind)]
            assert max(lengths) == limit
            assert all(length == limit for length, episode in zip(lengths, played, strict=True)
                       if episode["termination"] == "length")
        assert seen.last["response_length/max"] == limit
    ends = [{episode["termination"] for episode in run(evaluates=True, max_response_tokens=limit).played()}
            for limit in (3, 9)]
    assert ends == [{"length"}, {"length", "done"}]


TURNS = dict(env=f"{ROOT}/tests/two_turn.py:FourTurn", prompts_per_iteration=2)


@shows("max_context_tokens", of=RL)
def _(run):
    """Prompts have 7 or 8 tokens, replies up to 13. A longer history loses its oldest turns."""
    found = set()
    for episode in run(max_context_tokens=20).played():
        size = len(episode["segments"][0]["prompt_ids"])
        found.add((size, episode["termination"] == "context"))
    assert found == {(7, False), (8, True)}
    with pytest.raises(BadInput, match="--max-context-tokens 19: the shortest prompt has 7"):
        run.into(run.folder / "run", max_context_tokens=19)
    whole, cut = run(**TURNS), run(**TURNS, max_context_tokens=45)
    assert max(len(s["prompt_ids"] + s["response_ids"]) for s in whole.segments()) > 45
    longest = [len(s["prompt_ids"] + s["response_ids"]) for s in cut.segments()]
    assert 35 < max(longest) <= 45 and cut.last["rollout/segments"] > 1 == whole.last["rollout/segments"]


@shows("temperature", of=RL)
def _(run):
    """Sampler and trainer both divide by it, and evaluations do not."""
    plain, hot = run(), run(evaluates=True, temperature=2.0)
    assert hot.last["train/entropy"] > 1.3 * plain.last["train/entropy"]
    assert hot.last["mismatch/kl"] < 1e-9
    of_temperature(hot.segments()[:4], 2.0)
    of_temperature(plain.segments()[:4], 1.0)
    of_temperature(hot.segments(kind="val", step=0), 1.0)


def with_ids(s):
    return types.SimpleNamespace(ids=s["prompt_ids"] + s["response_ids"], **s)


def of_temperature(segments, temperature):
    for s in segments:
        expected, _ = full_forward(tiny()[0], with_ids(s), temperature)
        assert s["rollout_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def rare(r):
    """The replies to some tasks teach something."""
    return 0.0 if zlib.crc32(r.task.id.encode()) % 3 else length(r)


def same(r):
    return 1.0


@shows("dynamic_sampling", of=[grpo_llm])
def _(run):
    """As many rounds more as it takes, and no more than are allowed, each of other tasks."""
    flags = dict(max_response_tokens=5)
    for seen, rounds in ((run(dynamic_sampling=2, reward_fn=f"{__file__}:same", **flags), 3),
                         (run(dynamic_sampling=2), 1), (run(reward_fn=f"{__file__}:rare", **flags), 1)):
        assert seen.last["rollout/groups_submitted"] == 4 * rounds
        assert len({episode["task_id"] for episode in seen.played()}) == 4 * rounds
    some = run(dynamic_sampling=5, reward_fn=f"{__file__}:rare", **flags)
    played, trainable = some.played(), []
    for start in range(0, len(played), 16):
        groups = itertools.groupby(played[start:start + 16], key=lambda episode: episode["task_id"])
        trainable.append(sum(len({e["reward"] for e in group}) > 1 for _, group in groups))
    assert 1 < len(trainable) < 6 and sum(trainable[:-1]) < 4 <= sum(trainable)
    assert some.last["rollout/groups_trainable"] == sum(trainable)
    # Of what is more than enough, the first are trained: the others got advantages, too.
    assert len(some.calls["policy_loss"][0][0][0]) == 16


class Crowd(TwoTurn):
    """Tells how many episodes have been open at once."""

    def __init__(self, config):
        super().__init__(config)
        self.open = self.most = 0

    def start(self, task, seed):
        self.open += 1
        self.most = max(self.most, self.open)
        episode = super().start(task, seed)
        step, close = episode.step, episode.close

        def counted(reply):
            answer = step(reply)
            answer.info["most"] = self.most
            return answer

        def closed():
            self.open -= 1
            close()

        episode.step, episode.close = counted, closed
        return episode


@shows("max_concurrent", of=RL)
def _(run):
    """The replies are the same."""
    flags = dict(env=f"{__file__}:Crowd", prompts_per_iteration=2)
    seen = {most: run(**flags, max_concurrent=most) for most in (0, 3)}
    for most, one in seen.items():
        assert max(episode["info"]["most"] for episode in one.played() if episode["info"]) == (most or 8)
        assert replies(one) == replies(seen[0])


@shows("max_turns", of=RL)
def _(run):
    plain, two = run(**TURNS), run(**TURNS, max_turns=2)
    counts = [[len(episode["turns"]) for episode in seen.played()] for seen in (plain, two)]
    assert max(counts[0]) == 4 and [*map(max, counts)] == [4, 2]
    assert counts[1] == [min(count, 2) for count in counts[0]]
    ends = [two.last[f"rollout/termination/{end}"] for end in ("turns", "done")]
    assert ends[0] > 0 and plain.last["rollout/termination/turns"] == 0


class Slow(Countdown):
    """In training a quarter of the replies is waited for, until the episode is closed."""

    blocking, patience = True, 0.2  # seconds, after which it is not waited any more
    drawn, waited, closed = [], [], []  # moments, replies, seconds since the first task was drawn

    def training_task(self, number, seed):
        self.drawn.append(time.monotonic())
        return super().training_task(number, seed)

    def start(self, task, seed):
        episode, ended = super().start(task, seed), threading.Event()
        step, close = episode.step, episode.close

        def slow(reply):
            if zlib.crc32(reply.encode()) % 4 == 0:
                self.waited.append(reply)
                ended.wait(self.patience)
            return step(reply)

        def closed():
            close()
            self.closed.append(time.monotonic() - self.drawn[0])
            ended.set()

        episode.step, episode.close = slow, closed
        return episode


class Patient(Slow):
    patience = 10.0


@shows("episode_timeout", of=RL)
def _(run):
    """In seconds. On a busy machine other replies may be late, too, which is seen as they are closed."""
    flags = dict(temperature=3.0, prompts_per_iteration=2, group_size=4)
    for limit in (0.0, 60.0):
        seen = run(env=f"{__file__}:Slow", episode_timeout=limit, **flags)
        assert seen.last["rollout/termination/timeout"] == 0 < len(read_anew().Slow.waited)
    seen = run(env=f"{__file__}:Patient", episode_timeout=0.3, **flags)
    slow, num_cut = read_anew().Slow, 8 * seen.last["rollout/termination/timeout"]
    in_time = [seconds for seconds in slow.closed if seconds < 0.3]
    assert num_cut and len(slow.waited) <= num_cut <= 8 - len(in_time)


def read_anew():
    """This file as the last run has read it, for an environment in it."""
    return sys.modules[f"file_{Path(__file__).stem}"]


class Asks(Countdown):
    """The first reply is not scored: a sub-agent gets the task, and then the episode ends."""

    multi_turn = True

    def start(self, task, seed):
        return Asked(super().start(task, seed), task)


class Asked(Episode):
    def __init__(self, episode, task):
        self.episode, self.task = episode, task

    def step(self, reply):
        child = dataclasses.replace(self.task, id=f"{self.task.id}-child")
        return Step([], 0.0, False, False, {}, [(child, self.episode)])

    def resume(self, replies):
        return Step([], 0.0, True, False, dict(correct=0.0, heard=len(replies)))


@shows("train_sub_agents", of=RL)
def _(run):
    for trained in (False, True):
        seen = run(env=f"{__file__}:Asks", train_sub_agents=trained)
        children = [child for episode in seen.played() for child in episode["sub_agents"]]
        assert len(children) > 8
        for child in children:
            assert (child["segments"][0]["advantages"] is not None) is trained
        rows = seen.calls["policy_loss" if run.script is grpo_llm else "clipped_policy_loss"][0][0][0]
        assert len(rows) == 16 + len(children) * trained


# Optimisation


@shows("seed", of=RL)
def _(run):
    """Tasks, replies, also to the same tasks of evaluations, orders of minibatches, an adapter's weights."""
    one, again = run(lora_rank=2), run.into(run.folder / "again", lora_rank=2)
    assert timeless(one.folder) == timeless(again.folder) and replies(one) == replies(again)
    flags = dict(lora_rank=2, epochs=2, minibatches=2, evaluates=True, max_response_tokens=5)
    one, other = run(**flags), run(**flags, seed=2)
    tasks = [{episode["task_id"] for episode in seen.played()} for seen in (one, other)]
    assert not tasks[0] & tasks[1]
    start = dict(kind="val", step=0)
    assert [e["task_id"] for e in one.played(**start)] == [e["task_id"] for e in other.played(**start)]
    assert replies(one, **start) != replies(other, **start)
    plain = [reply[:5] for reply in replies(run(evaluates=True), **start)]
    assert replies(one, **start) == plain  # an adapter begins as nothing
    orders = [[order.tolist() for order in seen.orders] for seen in (one, other)]
    assert orders[0] != orders[1] and len(orders[0]) >= 2
    name = next(name for name in one.end if "lora_A" in name)
    assert abs(torch.cosine_similarity(one.end[name].flatten(), other.end[name].flatten(), dim=0)) < 0.5
    flags = dict(env_kwargs=(*FOUR, "train_tasks=1"), prompts_per_iteration=1)
    one, other = run(**flags), run(**flags, seed=2)
    assert len({episode["task_id"] for seen in (one, other) for episode in seen.played()}) == 1
    assert replies(one) != replies(other)


@shows("iterations", of=RL)
def _(run):
    assert [record["iteration"] for record in run(iterations=2).log] == [0, 1, 2]
    none = run(evaluates=True, iterations=0)
    assert [record["iteration"] for record in none.log] == [0] and "val/countdown/greedy" in none.last
    assert (none.kept, run(iterations=2).kept) == ([], [1, 2])


@shows("epochs", "minibatches", of=[grpo_llm])
def _(run):
    """An epoch is a new order of the groups; of minibatches there are no more than groups."""
    for epochs, minibatches, steps in ((2, 3, 6), (1, 99, 4)):
        seen = run(epochs=epochs, minibatches=minibatches)
        assert seen.last["rollout/groups_trainable"] == 4
        assert len(seen.orders) == epochs and len(seen.steps) == seen.last["opt_steps"] == steps


@shows("epochs", "minibatches", "critic_epochs", "critic_minibatches", of=[ppo_llm])
def _(run):
    """Of minibatches there are no more than episodes."""
    for sizes in ((2, 3, 3, 4), (1, 99, 1, 99)):
        epochs, minibatches, critic_epochs, critic_minibatches = sizes
        seen = run(epochs=epochs, minibatches=minibatches, critic_epochs=critic_epochs,
                   critic_minibatches=critic_minibatches, prompts_per_iteration=1)
        assert len(seen.orders) == epochs + critic_epochs
        counts = epochs * min(minibatches, 4), critic_epochs * min(critic_minibatches, 4)
        assert (len(seen.policy_steps()), len(seen.critic_steps())) == counts
        assert (seen.last["train/policy_steps"], seen.last["opt_steps"]) == (counts[0], sum(counts))


RATES = [0.5, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25]  # seven iterations, two of warm-up, down to a quarter


def rates_of(seen, steps, name):
    """What an optimiser was given, which is what the log says."""
    assert [step.rates[0] for step in steps] == pytest.approx(seen.column(name), rel=1e-12)
    assert all(len({*step.rates}) == 1 for step in steps)
    return seen.column(name)


@shows("learning_rate", of=LLM)
def _(run):
    """Twice the rate moves each weight twice as far in Adam's first step."""
    flags = dict(weight_decay=0.0) if run.script is sft else {}
    one, other = run(**flags), run(**flags, learning_rate=2e-3)
    for seen, rate in ((one, 1e-3), (other, 2e-3)):
        assert rates_of(seen, seen.policy_steps(), "train/learning_rate") == [rate]
    assert far(moved(other), 2 * moved(one)) < 1e-3


@shows("warmup_iterations", "final_learning_rate", of=[grpo_llm])
def _(run):
    seen = run.long()
    assert rates_of(seen, seen.steps, "train/learning_rate") == pytest.approx([1e-3 * rate for rate in RATES])
    assert run(iterations=2).column("train/learning_rate") == pytest.approx([1e-3, 1e-3])


@shows("warmup_iterations", "final_learning_rate", "critic_warmup", "critic_learning_rate", of=[ppo_llm])
def _(run):
    """The policy begins after the critic's warm-up, with a warm-up of its own; both end at the same share."""
    seen = run.long(critic_learning_rate=4e-3)
    assert seen.column("train/policy_steps") == [0, 0, 1, 1, 1, 1, 1]
    rates = rates_of(seen, seen.critic_steps(), "critic/learning_rate")
    assert rates == pytest.approx([4e-3 * rate for rate in RATES])
    rates = rates_of(seen, seen.policy_steps(), "train/learning_rate")
    assert rates == pytest.approx([5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert run(iterations=2).column("train/learning_rate") == pytest.approx([1e-3, 1e-3])
    assert run().critic_steps()[0].rates == [1e-3]


@shows("beta2", of=LLM)
def _(run):
    """After a step, the second moment is 1 - beta2 of the squared gradient."""
    for beta2 in (0.95, 0.5):
        seen = run(beta2=beta2)
        state = state_of(seen.folder / "checkpoints/step_000001")["optimizer"]["state"]
        second = torch.cat([moments["exp_avg_sq"].flatten() for moments in state.values()]).double()
        first = torch.cat([moments["exp_avg"].flatten() for moments in state.values()]).double()
        assert {step.betas for step in seen.policy_steps()} == {(0.9, beta2)}
        assert far(second, (1 - beta2) * (first / 0.1) ** 2) < 1e-4
    if run.script is ppo_llm:
        assert {step.betas for step in run(beta2=0.5).critic_steps()} == {(0.9, 0.99)}


@shows("critic_beta2", of=[ppo_llm])
def _(run):
    seen = run(critic_beta2=0.5)
    assert {step.betas for step in seen.critic_steps()} == {(0.9, 0.5)}
    assert {step.betas for step in seen.policy_steps()} == {(0.9, 0.95)}


@shows("max_grad_norm", of=[grpo_llm])
def _(run):
    """What is logged is the norm before."""
    plain = run()
    norm = plain.last["train/grad_norm"]
    cut = run(max_grad_norm=norm / 4)
    assert [float(seen.steps[0].gradient.norm()) for seen in (plain, cut)] == pytest.approx(
        [norm, norm / 4], rel=1e-4)
    assert cut.last["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


# The loss of grpo_llm.py


def third(r):
    """0, 0.5 or 1: rewards that differ within a group, and ties."""
    return zlib.crc32(r.messages[-1]["content"].encode()) % 3 / 2


def groups_of(seen):
    """(rewards, advantages) of each group that teaches; the advantage of an episode is that of its tokens."""
    for _, members in itertools.groupby(seen.played(), key=lambda episode: episode["task_id"]):
        members = [*members]
        advantages = [{*episode["segments"][0]["advantages"]} for episode in members]
        yield [e["reward"] for e in members], [of.pop() for of in advantages if len(of) == 1]


@shows("scale_rewards", "baseline", "advantage_balance", of=[grpo_llm])
def _(run):
    for flags in ({}, dict(scale_rewards=True, advantage_balance=0.4), dict(baseline="maxrl"),
                  dict(baseline="loo", advantage_balance=-0.4)):
        groups = [*groups_of(run(reward_fn=f"{__file__}:third", **flags))]
        assert len(groups) == 4 and any(len({*rewards}) == 3 for rewards, _ in groups)
        for rewards, advantages in groups:
            assert advantages == pytest.approx(group_advantages(rewards, flags), abs=1e-6), flags


def losses(seen, flags):
    """The mean loss of each step's tokens, and the share at which it binds, from the log-probabilities."""
    found, bound = [], []
    for (new, old, advantages, mask, *_), _ in seen.calls["policy_loss"]:
        total = binds = 0.0
        for row in range(len(mask)):
            chosen = mask[row] > 0
            advantage = float(advantages[row, 0])
            if flags.get("loss") == "dppo":
                advantage = advantage or -1e-30  # which moves on the side of those that are not positive
            loss, binding = surrogate(flags.get("loss", "clip"), new[row], old[row], advantage, chosen,
                                      flags.get("clip_low", 0.2), flags.get("clip_high", 0.28))
            total += float(loss[chosen].sum())
            binds += float(binding[chosen].sum())
        found.append(total / float(mask.sum()))
        bound.append(binds / float(mask.sum()))
    return found, bound


PENALTY = dict(iterations=2, learning_rate=3e-3, max_response_tokens=6)
FAR = dict(epochs=2, learning_rate=3e-3)  # so that the policy leaves the one that sampled


@shows("loss", "clip_low", "clip_high", of=[grpo_llm])
def _(run):
    """Each choice is its equation, with bounds of its own below and above."""
    choices = typing.get_args(typing.get_type_hints(grpo_llm.Args)["loss"])
    cases = [dict(loss=loss) for loss in choices] + [dict(clip_low=0.02, clip_high=0.04)]
    values = []
    for flags in cases:
        seen = run(**FAR, **flags)
        found, bound = losses(seen, flags)
        assert seen.last["train/policy_loss"] == pytest.approx(statistics.fmean(found), abs=2e-6), flags
        assert seen.last["train/clipfrac"] == pytest.approx(statistics.fmean(bound), abs=1e-6), flags
        assert bound[0] == 0 and (bound[-1] > 0) is (flags.get("loss") not in ("sapo", "pg")), flags
        values.append((found[-1], bound[-1]))
    assert len({value for value, _ in values}) == len(cases)
    assert values[0][1] < values[-1][1]  # tighter bounds bind more often


@shows("aggregation", of=[grpo_llm])
def _(run):
    """On the policy that sampled, where the ratio is 1 and replies have different lengths."""
    for aggregation in ("token", "sequence", "constant"):
        seen = run(aggregation=aggregation)
        lengths = [len(s["response_ids"]) for s in seen.segments()]
        advantages = [s["advantages"][0] for s in seen.segments()]
        shares = {"token": [n / sum(lengths) for n in lengths], "sequence": [1 / len(lengths)] * len(lengths),
                  "constant": [n / (13 * len(lengths)) for n in lengths]}[aggregation]
        expected = -sum(share * advantage for share, advantage in zip(shares, advantages, strict=True))
        assert len({*lengths}) > 2
        assert seen.last["train/policy_loss"] == pytest.approx(expected, abs=1e-6), aggregation


@shows("correction", "correction_bounds", of=[grpo_llm])
def _(run):
    """A sampler that is off by a factor of e, to one side or the other."""
    choices = typing.get_args(typing.get_type_hints(grpo_llm.Args)["correction"])
    values = {}
    for flags in (dict(correction=kind) for kind in choices):
        if flags["correction"] == "tis":  # which auto is, too
            flags["correction_bounds"] = (0.5, 2.5)
        known = {name: value for name, value in flags.items() if value != "auto"}
        seen = run(noise=NOISE, **flags)
        total = capped = count = 0.0
        for s in seen.segments():
            mismatch = torch.tensor([-NOISE * (-1) ** token for token in s["response_ids"]]).double()
            weights, are_bound = corrections(mismatch, torch.ones(len(mismatch)) > 0, known)
            total -= float(weights.sum()) * s["advantages"][0]
            capped += float(are_bound.sum())
            count += len(mismatch)
        values[total] = flags
        assert seen.last["train/policy_loss"] == pytest.approx(total / count, abs=1e-5), flags
        assert seen.last["mismatch/frac_capped"] == pytest.approx(capped / count, abs=1e-6), flags
        assert seen.last["mismatch/ratio_max"] == pytest.approx(math.exp(NOISE), rel=1e-3)
    assert len(values) == len(choices)
    off = run(noise=NOISE, loss="dppo").calls["policy_loss"][0][0]  # with which the ratio is to the sampler
    assert (off[0] - off[1])[off[3] > 0].abs().min() > 0.9


@shows("mask_truncated", of=[grpo_llm])
def _(run):
    """Replies that were cut teach nothing and count in no mean."""
    plain, masked = (run(mask_truncated=on) for on in (False, True))
    left_out = 0
    for _, members in itertools.groupby(masked.played(), key=lambda episode: episode["task_id"]):
        members = [*members]
        rewards = [e["reward"] for e in members if e["termination"] == "done"]
        for episode in members:
            advantages = episode["segments"][0]["advantages"]
            if episode["termination"] == "length":
                left_out += 1
                assert advantages is None
            else:
                assert advantages[0] == pytest.approx(episode["reward"] - statistics.fmean(rewards), abs=1e-6)
    assert left_out and all(episode["segments"][0]["advantages"] for episode in plain.played())


@shows("kl_coef", of=[grpo_llm])
def _(run):
    """The penalty's gradient is in proportion; it holds the policy near the model that it began as."""
    none, one, two = (run(**PENALTY, kl_coef=coef) for coef in (0.0, 0.5, 1.0))
    assert far(one.gradient, none.gradient) > 1e-2
    assert far(two.gradient - none.gradient, 2 * (one.gradient - none.gradient)) < 1e-3
    assert none.last["train/kl_loss"] == none.last["kl/k1"] == 0 < one.last["train/kl_loss"]
    assert one.log[1]["train/kl_loss"] == pytest.approx(0, abs=1e-9)
    (before,) = [weights_of(one.folder / "checkpoints/step_000001")]
    way = torch.cat([before[name].flatten() for name, _ in tiny()[0].named_parameters()]) - weights_of_tiny()
    assert float(way.double() @ (one.gradient - none.gradient)) > 0  # back to where it came from


@shows("entropy_coef", of=RL)
def _(run):
    """The bonus's gradient is in proportion, and raises the entropy."""
    none, one, two = (run(entropy_coef=coef) for coef in (0.0, 0.02, 0.04))
    assert far(one.gradient, none.gradient) > 1e-3
    assert far(two.gradient - none.gradient, 2 * (one.gradient - none.gradient)) < 1e-3
    model, start = copy.deepcopy(tiny()[0]), weights_of_tiny().double()
    way = (none.gradient - one.gradient)[:len(start)]
    entropies = []
    for step in (0.0, 0.01):
        torch.nn.utils.vector_to_parameters(start + step * way / way.norm(), model.parameters())
        with torch.no_grad():
            found = [full_forward(model, with_ids(s), 1.0)[1] for s in one.segments()]
        entropies.append(float(torch.cat(found).mean()))
    assert entropies[1] > entropies[0] + 1e-4


# Critic and loss of ppo_llm.py


@shows("critic", of=[ppo_llm])
def _(run):
    """A decoder with an optimiser of its own; a head that the policy's optimiser trains, too; or no value."""
    flags = dict(iterations=2, critic_warmup=1)
    own, shared, none = (run(**flags, critic=kind) for kind in ("own", "shared", "none"))
    kept = [state_of(seen.folder / "checkpoints/step_000002")["critic"] for seen in (own, shared, none)]
    assert any("layers" in name for name in kept[0]) and not kept[2]
    assert {*kept[1]} == {"head.weight", "head.bias"}
    assert kept[1]["head.weight"].abs().sum() > 0
    for seen in (shared, none):
        assert len({step.optimizer for step in seen.steps}) == 1
        assert "critic/grad_norm" not in seen.last and seen.column("train/policy_steps") == [1, 1]
    assert len({step.optimizer for step in own.steps}) == 2 and own.column("train/policy_steps") == [0, 1]
    assert own.last["critic/grad_norm"] > 0 and shared.last["critic/vf_loss"] > 0
    assert ["critic/vf_loss" in seen.last for seen in (own, shared, none)] == [True, True, False]
    values = [[x for s in seen.segments(step=2) for x in s["values"]] for seen in (own, shared, none)]
    assert any(values[0]) and any(values[1]) and not any(values[2])


@shows("target_kl", of=[ppo_llm])
def _(run):
    """The pass that is beyond it makes no step, and none follows."""
    flags = dict(epochs=5, learning_rate=2e-4, critic="none")
    plain = run(**flags)
    distances = []
    for (new, old, advantages, *_), _ in plain.calls["clipped_policy_loss"]:
        log_ratio = (new - old)[advantages != 0].double()  # not of padding
        distances.append(float((log_ratio.exp() - 1 - log_ratio).mean()))
    assert plain.last["train/policy_steps"] == 5 and distances == sorted(distances)
    seen = run(**flags, target_kl=(distances[2] + distances[3]) / 2)
    assert seen.last["train/policy_steps"] == 3 == len(seen.steps)


@shows("clip", of=[ppo_llm])
def _(run):
    shares = []
    for clip in (0.2, 0.02):
        seen = run(**FAR, clip=clip)
        means, bound = [], []
        for (new, old, advantages, *_), _ in seen.calls["clipped_policy_loss"]:
            chosen = advantages != 0  # not padding
            loss, binds = surrogate("clip", new, old, advantages, None, clip, clip)
            means.append(float(loss[chosen].mean()))
            bound.append(float(binds[chosen].double().mean()))
        assert seen.last["train/policy_loss"] == pytest.approx(statistics.fmean(means), abs=2e-6)
        assert seen.last["train/clipfrac"] == pytest.approx(statistics.fmean(bound), abs=1e-6)
        shares.append(seen.last["train/clipfrac"])
    assert 0 < shares[0] < shares[1]


@shows("gae_lambda", of=[ppo_llm])
def _(run):
    """While all values are 0, a token's return is the reward, times lambda for each token in between."""
    for lam in (0.5, 1.0):
        for episode in run(gae_lambda=lam).played():
            returns = episode["segments"][0]["returns"]
            expected = [episode["reward"] * lam**left for left in reversed(range(len(returns)))]
            assert returns == pytest.approx(expected, abs=1e-6), lam


@shows("kl_coef", "kl_penalty", "kl_target", of=[ppo_llm])
def _(run):
    """Each token's reward loses the coefficient times its distance; the coefficient follows the target."""
    for flags in (dict(kl_coef=0.3), dict(kl_coef=0.3, kl_target=1e-4, iterations=4),
                  dict(kl_coef=0.6, kl_penalty="k3", kl_target=10.0, iterations=3)):
        seen = run(**PENALTY | flags)
        assert seen.column("kl/coef")[0] == flags["kl_coef"]
        for record in seen.log[1:]:
            lengths = [len(s["response_ids"]) for s in seen.segments(step=record["iteration"])]
            kl = record["train/kl_loss" if "kl_penalty" in flags else "kl/k1"] * statistics.fmean(lengths)
            paid = record["critic/score/mean"] - record["critic/rewards/mean"]
            assert paid == pytest.approx(record["kl/coef"] * kl, abs=1e-6), flags
            assert abs(kl) > 1e-3 or record["iteration"] == 1
        if "kl_target" in flags:
            coef = seen.column("kl/coef")
            for before, after, kl in zip(coef, coef[1:], seen.column("kl/k1"), strict=False):
                error = min(max(kl / flags["kl_target"] - 1, -0.2), 0.2)
                assert after == pytest.approx(before * (1 + 0.1 * error))
            assert len({*coef}) > 2
        else:
            assert {*seen.column("kl/coef")} == {flags["kl_coef"]}


# Evaluation


def evaluated(seen):
    return [record["iteration"] for record in seen.log if any("val/" in name for name in record)]


@shows("eval_every", of=ALL)
def _(run):
    """... and at the end, at the start but for a2c_vecenv.py, and in the step that ends an epoch.

    An epoch has four rows, a batch three, so that it ends with a batch or within one.
    """
    expected = {a2c: [3, 6, 7], sft: [0, 2, 3, 4, 6, 7]}.get(run.script, [0, 3, 6, 7])
    assert evaluated(run.long()) == expected
    assert evaluated(run(evaluates=run.script is sft)) == ([2] if run.script is a2c else [0, 1])


@shows("eval_tasks", "eval_samples", of=RL)
def _(run):
    """Always the same tasks, the first ones; each reply to them is another one."""
    for flags in ({}, dict(eval_tasks=3, eval_samples=3)):
        seen = run(evaluates=True, **flags)
        tasks, samples = (seen.flags[name] for name in ("eval_tasks", "eval_samples"))
        for step in (0, 1):
            names = collections.Counter(episode["task_id"] for episode in seen.played("val", step))
            assert len(names) == tasks and {*names.values()} == {samples}
        right = np.array([e["correct"] for e in seen.played("val")]).reshape(tasks, samples)
        assert f"val/countdown/pass@{samples}" in seen.last and len(val(seen.last)) == 6
        assert seen.last[f"val/countdown/pass@{samples}"] == right.max(1).mean()
        assert seen.last["val/countdown/pass@1"] == pytest.approx(right.mean())
    few, more = ([e["task_id"] for e in run(evaluates=True, **flags).played("val")]
                 for flags in ({}, dict(eval_tasks=3, eval_samples=3)))
    assert {*few} < {*more}


@shows("eval_temperature", of=RL)
def _(run):
    """Of the sampled replies of evaluations alone."""
    plain, hot = run(evaluates=True), run(evaluates=True, eval_temperature=3.0)
    start = dict(kind="val", step=0)
    of_temperature(plain.segments(**start), 1.0)
    of_temperature(hot.segments(**start), 3.0)
    assert replies(hot, **start) != replies(plain, **start) and replies(hot) == replies(plain)
    assert hot.log[0]["val/countdown/greedy"] == plain.log[0]["val/countdown/greedy"]


@shows("eval_tasks", "eval_samples", of=[sft])
def _(run):
    """Each evaluation samples so many replies to so many tasks, and one greedily."""
    for tasks, samples in ((2, 2), (3, 4)):
        seen = run(**of_env(run), eval_tasks=tasks, eval_samples=samples)
        assert seen.log[0]["data/held_out"] == tasks
        names = {f"val/countdown/{name}" for name in ("pass@1", f"pass@{samples}", "greedy")}
        assert names <= {*val(seen.last)}
        prompts = {shape[1] for shape in seen.passes if not shape[0] and shape[2] == 7}
        assert prompts == {tasks * samples, tasks}
        score = seen.last["val/countdown/pass@1"] * tasks * samples
        assert score == pytest.approx(round(score))


@shows("max_response_tokens", of=[sft])
def _(run):
    """A solution has nine tokens, <eos> included: one less, and none is right."""
    flags = of_env(run) | dict(eval_tasks=16, eval_samples=1)
    right = [run(**flags, max_response_tokens=limit).log[0]["val/countdown/greedy"] for limit in (8, 9)]
    assert right[0] == 0 < right[1]


# Log


@shows("experiment", of=ALL)
def _(run):
    run.patch.chdir(run.folder)
    flags = {sft: dict(steps=1)}.get(run.script, dict(iterations=1))
    seen = run.into("", **flags, experiment="mine")
    assert [*Path("runs").iterdir()] == [Path("runs/mine")] and seen.folder.name == seen.last["run_id"]


@shows("run_dir", of=ALL)
def _(run):
    """Where a run has been, it is continued; elsewhere one begins."""
    more = dict(steps=2) if run.script is sft else dict(iterations=3 if run.script is a2c else 2)
    count = max(more.values())
    folder = shutil.copytree(run().folder, run.folder / "run")
    seen = run.into(folder, **more)
    begun = [record["iteration"] for record in run().log]
    assert [record["iteration"] for record in seen.log] == [*begun, count]
    (resume,) = [line["resume"] for line in log_lines(folder) if "resume" in line]
    assert resume["iteration"] == count - 1 and len(seen.policy_steps()) == 1
    assert seen.log[:-1] == run().log and (folder / f"checkpoints/step_{count:06d}").is_dir()


@shows("checkpoint_every", "keep_checkpoints", of=[*RL, a2c])
def _(run):
    """Saved every two iterations and at the end, which is kept beside the newest of the regular ones."""
    assert run.long().kept == [4, 6, 7]
    assert run(iterations=2).kept == [1, 2]  # all, every iteration


@shows("log_episodes", of=RL)
def _(run):
    """That share of training's, and of an evaluation the first replies to its first ten tasks besides."""
    flags = dict(evaluates=True, prompts_per_iteration=16, max_response_tokens=3, eval_tasks=12)
    all_, some, none = (run(**flags, log_episodes=share) for share in (1.0, 0.25, 0.0))
    named = [{(e["task_id"], e["number"]) for e in seen.played()} for seen in (all_, some)]
    assert len(named[0]) == 64 and 8 < len(named[1]) < 26 and named[1] < named[0]
    assert not (none.folder / "episodes/train_step_000001.jsonl").exists()
    of_val = [[(e["task_id"], e["number"]) for e in seen.played("val")] for seen in (all_, some, none)]
    assert [len(of_val[0]), len(of_val[2])] == [24, 10] and {number for _, number in of_val[2]} == {0}
    assert 10 < len(of_val[1]) < 24 and {*of_val[2]} < {*of_val[1]}


@shows("print_samples", of=RL)
def _(run):
    """At each of two evaluations and a rollout."""
    for number in (0, 2):
        said = run(evaluates=True, print_samples=number).said
        assert [len(re.findall(f"^{kind} ", said, re.M)) for kind in ("val", "train")] == [2 * number, number]


# sft.py: data

# Each row of an epoch is a step.
EVERY = dict(steps=0, epochs=1.0, batch_size=1, learning_rate=1e-30, checkpoint_every=9)


def taught(seen):
    """The rows that a run has made of its files: (ids, mask)."""
    rows = datasets.Dataset.from_file(str(seen.folder / "data/train.arrow"))
    return [(row["ids"], row["mask"]) for row in rows]


def sizes(seen):
    """The number of tokens of each step."""
    return [*np.diff(seen.column("env_steps"))]


@shows("train_files", of=[sft])
def _(run):
    """Their rows in place of an environment's; with a weight, each so often."""
    long, short = run.rows("long", LONG_ROWS), run.rows("short", SHORT_ROWS)
    for weights, counts in ((("", ""), (4, 4)), (("=1.5", "=0.5"), (6, 2)), (("=2", "=.25"), None)):
        files = (long + weights[0], short + weights[1])
        if counts is None:  # not a number
            with pytest.raises(BadInput, match="short.jsonl=.25"):
                run.into(run.folder / "bad", train_files=files, val_ratio=0.0, **EVERY)
            continue
        seen = run.into(run.folder / f"run{counts[0]}", train_files=files, val_ratio=0.0, **EVERY)
        assert seen.log[0]["data/rows"] == 8 and len(sizes(seen)) == 8
        assert (sizes(seen).count(16), sizes(seen).count(11)) == counts
        losses = collections.Counter(round(loss, 5) for loss in seen.column("train/loss"))
        assert sorted(losses.values()) == [1] * 8 if counts == (4, 4) else [1, 1, 1, 1, 2, 2]
    assert not val(seen.last)


@shows("val_files", of=[sft])
def _(run):
    """val/loss is of their rows: what train/loss would be."""
    long, short = run.rows("long", LONG_ROWS), run.rows("short", SHORT_ROWS)
    seen = run.into(run.folder / "one", train_files=(long,), val_files=(short,))
    other = run.into(run.folder / "other", train_files=(short,), val_ratio=0.0, batch_size=4)
    few = run.into(run.folder / "few", train_files=(long,), val_files=(short,), eval_tasks=4)
    assert (seen.log[0]["data/rows"], seen.log[0]["data/held_out"]) == (4, 2)  # --eval-tasks 2
    assert few.log[0]["data/held_out"] == 4
    assert few.log[0]["val/loss"] == pytest.approx(other.last["train/loss"], rel=1e-5)


@shows("dataset", "splits", of=[sft])
def _(run):
    """What is asked of the hub, and which of its splits is learned and which is held out."""
    asked, parts = [], dict(train=LONG_ROWS, test=SHORT_ROWS, other=SHORT_ROWS[:3])

    def load(name, config, split, streaming):
        asked.append((name, config, split))
        rows = [dict(prompt=prompt, response=response) for prompt, response in parts[split]]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    run.patch.setattr(datasets, "load_dataset", load)
    for number, (name, splits, counts) in enumerate([
            ("owner/name", None, (4, 0)), ("owner/name:main", ("other",), (3, 0)),
            ("owner/name", ("test", "train"), (4, 4)), ("owner/name", ("train", "other"), (4, 3))]):
        flags = dict(splits=splits) if splits else {}
        seen = run.into(run.folder / str(number), train_files=(), dataset=name, eval_tasks=9, **flags)
        assert (seen.log[0]["data/rows"], seen.log[0]["data/held_out"]) == counts
        width = {len(ids) for ids, _ in taught(seen)}
        assert width == ({16} if splits in (None, ("train", "other")) else {11})
    assert [split for *_, split in asked] == ["train", "other", "test", "train", "train", "other"]
    assert [(name, config) for name, config, _ in asked[:2]] == [("owner/name", None), ("owner/name", "main")]


@shows("prompt_key", "response_key", "messages_key", of=[sft])
def _(run):
    """Of columns of other names, and of conversations, the same rows; in these, all replies are learned."""
    one = run.rows("long", LONG_ROWS)
    other = write_jsonl(run.folder / "other.jsonl", [
        dict(prompt="1 1 -> 2", response="1 + 1 = 2", question=question, answer=answer)
        for question, answer in LONG_ROWS])
    chats = [[dict(role=role, content=text) for row in rows for role, text in zip(
        ("user", "assistant"), row, strict=True)] for rows in (*([row] for row in LONG_ROWS), LONG_ROWS[:2])]
    chat = write_jsonl(run.folder / "chat.jsonl", [dict(turns=messages) for messages in chats])
    flags = dict(val_ratio=0.0, batch_size=4)
    plain = taught(run.into(run.folder / "1", train_files=(one,), **flags))
    keys = dict(prompt_key="question", response_key="answer")
    named = run.into(run.folder / "2", train_files=(other,), **keys, **flags)
    talks = run.into(run.folder / "3", train_files=(chat,), messages_key="turns", **flags)
    assert taught(named) == plain == taught(talks)[:4]
    assert sum(taught(talks)[4][1]) == 2 * sum(plain[0][1]) == 18


@shows("val_ratio", of=[sft])
def _(run):
    """A share of the rows, and no more than --eval-tasks."""
    files = (run.rows("all", LONG_ROWS + SHORT_ROWS),)
    for number, (ratio, tasks, held_out) in enumerate([(0.0, 9, 0), (0.25, 9, 2), (0.5, 9, 4), (0.5, 3, 3)]):
        seen = run.into(run.folder / str(number), train_files=files, val_ratio=ratio, eval_tasks=tasks)
        assert (seen.log[0]["data/rows"], seen.log[0]["data/held_out"]) == (8 - held_out, held_out)
        assert ("val/loss" in seen.last) is bool(held_out)


@shows("max_length", "truncation", of=[sft])
def _(run):
    files = (run.rows("long", LONG_ROWS),)
    flags = dict(train_files=files, val_ratio=0.0, batch_size=4)
    whole = run.into(run.folder / "whole", max_length=16, **flags)  # which just fits
    with pytest.raises(BadInput, match="--max-length 15: a row has 16 tokens"):
        run.into(run.folder / "error", max_length=15, **flags)
    assert whole.log[0]["data/truncated"] == 0 and {len(ids) for ids, _ in taught(whole)} == {16}
    for end, part in (("left", slice(-12, None)), ("right", slice(12))):
        seen = run.into(run.folder / end, max_length=12, truncation=end, **flags)
        assert seen.log[0]["data/truncated"] == 4 and sizes(seen) == [4 * 12]
        assert [ids for ids, _ in taught(seen)] == [ids[part] for ids, _ in taught(whole)]
        learned = [sum(mask) for _, mask in taught(seen)]
        assert learned == [9 if end == "left" else 5] * 4


@shows("packing", of=[sft])
def _(run):
    """Rows of different lengths in one: nothing is padded, and the gradient is the same."""
    files = (run.rows("all", LONG_ROWS + SHORT_ROWS),)
    plain, packed = (run.into(run.folder / str(on), train_files=files, batch_size=8, packing=on)
                     for on in (False, True))
    shapes = [[shape[1:] for shape in seen.passes if shape[0]] for seen in (plain, packed)]
    assert shapes == [[(8, 15)], [(1, 107)]]  # the last token predicts nothing
    assert plain.last["train/padding"] == pytest.approx(1 - 108 / 128) and packed.last["train/padding"] == 0
    assert far(packed.gradient, plain.gradient) < 1e-4
    assert packed.last["train/loss"] == pytest.approx(plain.last["train/loss"], rel=1e-5)


@shows("batch_size", of=[sft])
def _(run):
    for size in (3, 4):
        seen = run(batch_size=size)
        assert seen.last["env_steps"] == 16 * size
        assert [shape[1] for shape in seen.passes if shape[0]] == [size]


@shows("seed", of=[sft])
def _(run):
    """Which rows come first, the replies of an evaluation, and the weights of a new model or adapter."""
    one, again = run(lora_rank=2), run.into(run.folder / "again", lora_rank=2)
    assert timeless(one.folder) == timeless(again.folder)
    name, other = next(name for name in one.end if "lora_A" in name), run(lora_rank=2, seed=2)
    assert abs(torch.cosine_similarity(one.end[name].flatten(), other.end[name].flatten(), dim=0)) < 0.5
    flags = of_env(run) | dict(eval_tasks=8, eval_samples=4)
    one, other = (run(**flags, seed=seed) for seed in (1, 2))
    assert one.last["train/loss"] != other.last["train/loss"]
    assert one.log[0]["val/loss"] == other.log[0]["val/loss"]  # of the same tasks and weights
    assert one.log[0]["val/countdown/greedy"] == other.log[0]["val/countdown/greedy"]
    assert one.log[0]["val/countdown/pass@1"] != other.log[0]["val/countdown/pass@1"]
    new = [run(evaluates=True, model="", seed=seed).log[0]["val/loss"] for seed in (1, 2)]
    assert new[0] != pytest.approx(new[1], rel=1e-4)


@shows("steps", "epochs", of=[sft])
def _(run):
    """Without steps, as many as the rows of the epochs take: the last one is filled."""
    assert [record["iteration"] for record in run(steps=2).log] == [0, 1, 2]
    files = (run.rows("all", LONG_ROWS + SHORT_ROWS),)
    for number, (epochs, steps) in enumerate([(1.5, 4), (0.375, 1), (0.376, 2)]):
        seen = run.into(run.folder / str(number), train_files=files, batch_size=3, steps=0, epochs=epochs,
                        checkpoint_every=9)
        assert seen.last["iteration"] == seen.last["opt_steps"] == steps, epochs
        assert seen.last["train/epoch"] == pytest.approx(3 * steps / 8)
        assert f"steps 0 to {steps}, {steps * 3 / 8:.3g} epochs of 8 rows" in seen.said
    seen = run.into(run.folder / "both", train_files=files, batch_size=3, steps=2, epochs=9.0)
    assert seen.last["iteration"] == 2
    with pytest.raises(BadInput, match="--steps 0"):
        run.into(run.folder / "none", train_files=(), steps=0)


@shows("schedule", "warmup_steps", "final_learning_rate", of=[sft])
def _(run):
    """Ten steps of which two warm up, down to a fifth."""
    warm = [0.5, 1.0]
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * n / 8)) / 2 for n in range(1, 9)]
    for schedule, rest in (("constant", [1.0] * 8), ("cosine", cosine), ("wsd", [1.0] * 7 + [0.2])):
        seen = run(schedule=schedule, steps=10, warmup_steps=2, final_learning_rate=0.2, batch_size=1,
                   checkpoint_every=10)
        rates = rates_of(seen, seen.steps, "train/learning_rate")
        assert rates == pytest.approx([1e-3 * rate for rate in warm + rest]), schedule


@shows("weight_decay", of=[sft])
def _(run):
    """Beside the step, which is the same; of matrices, and not of norms."""
    none, some = run(weight_decay=0.0), run(weight_decay=0.5)
    assert some.steps[0].decays == [0.5, 0.0] and none.steps[0].decays == [0.0, 0.0]
    start = load_file(Path(TINY) / "model.safetensors")
    for name, tensor in start.items():
        expected = none.end[name] - (1e-3 * 0.5 * tensor if tensor.ndim > 1 else 0.0)
        torch.testing.assert_close(some.end[name], expected, rtol=0.0, atol=2e-7)


@shows("log_every", of=[sft])
def _(run):
    """The loss of a record is the mean since the one before it."""
    flags = dict(steps=5, checkpoint_every=5)
    every, third = run(**flags), run(**flags, log_every=3)
    assert [record["iteration"] for record in third.log] == [0, 3, 5]
    for name in ("train/loss", "train/grad_norm"):
        each, means = every.column(name), third.column(name)
        assert means == pytest.approx([statistics.fmean(each[:3]), statistics.fmean(each[3:])], rel=1e-6)
        assert len({*each}) == 5


@shows("checkpoint_every", "keep_checkpoints", of=[sft])
def _(run):
    """Beside the newest regular ones, the last one and that of least val/loss, be it old or new."""
    flags = dict(train_files=(run.rows("short", SHORT_ROWS),), val_files=(run.rows("long", LONG_ROWS),),
                 eval_every=1)
    worse = run.long(**flags, learning_rate=3e-3)
    better = run.long(**flags, learning_rate=1e-4, keep_checkpoints=1, checkpoint_every=3)
    losses = [seen.column("val/loss")[1:] for seen in (worse, better)]
    assert min(losses[0]) == losses[0][0]  # or nothing is shown
    assert losses[1] == sorted(losses[1], reverse=True)
    assert (worse.kept, better.kept) == ([1, 4, 6, 7], [6, 7])
    pointer = json.loads((worse.folder / "checkpoints/state.json").read_text())
    assert pointer == dict(last="step_000007", best="step_000001")
    assert run(steps=2).kept == [1, 2]  # all, every step


# a2c_vecenv.py


def batches(seen):
    """What each rollout has seen, (T, E) by name."""
    return [result[1] for _, result in seen.calls["rollout"]]


def objectives(seen):
    """Of each rollout: the advantages and returns that are learned, the loss and its two parts."""
    return [types.SimpleNamespace(entropies=given[1], values=given[2], advantages=given[3], returns=given[4],
                                  value_coef=given[5], entropy_coef=given[6], loss=result[0],
                                  policy=result[1], value=result[2])
            for given, result in seen.calls["a2c_loss"]]


ENDS = ("max_steps=3", "k_consecutive=1")  # within a rollout of four steps


@shows("env_id", "env_kwargs", of=[a2c])
def _(run):
    pole = run(env_id="CartPole-v1", env_kwargs=("max_episode_steps=3",))
    assert (len(pole.last["action_hist"]), len(run().last["action_hist"])) == (2, 8)
    assert pole.last["episode_length"] == 3
    assert run(env_kwargs=ENDS).last["trunc_rate"] > run().log[0]["trunc_rate"] == 0
    assert run(env_kwargs=ENDS).last["episode_length"] == 3


@shows("alpha", of=[a2c])
def _(run):
    """The part of the reward that is for coming nearer is in proportion to it."""
    none, one = (batches(run(alpha=alpha, num_steps=9))[0] for alpha in (0.0, 5.0))
    assert torch.equal(none["actions"], one["actions"])
    nearer = -torch.diff(one["dist"], dim=0)[:7]
    torch.testing.assert_close((one["rewards"] - none["rewards"])[1:8], 5.0 * nearer, rtol=1e-4, atol=1e-5)
    assert nearer.abs().max() > 0


@shows("num_envs", "num_steps", "iterations", "update_every", of=[a2c])
def _(run):
    thrice = dict(iterations=1, update_every=3, max_grad_norm=1e9)
    for flags in ({}, dict(num_envs=3, num_steps=5, iterations=3), thrice):
        seen = run(**flags)
        names = ("iterations", "update_every", "num_steps", "num_envs")
        sizes = {name: seen.flags.get(name, 1) for name in names}
        shape = sizes["num_steps"], sizes["num_envs"]
        assert {batch["rewards"].shape for batch in batches(seen)} == {shape}
        assert len(batches(seen)) == sizes["iterations"] * sizes["update_every"]
        assert seen.last["env_steps"] == math.prod(sizes.values())
        assert len(seen.steps) == seen.last["iteration"] == sizes["iterations"] == seen.kept[-1]
    # The gradient is the mean of those of rollouts with the same weights.
    seen = run(**thrice)
    assert far(seen.steps[0].gradient, torch.stack(seen.gradients).mean(0)) < 1e-5
    assert far(seen.gradients[0], seen.gradients[1]) > 0.1


@shows("gamma", "gae_lambda", "bootstrap_truncated", of=[a2c])
def _(run):
    """The targets of the values, step by step; what a time limit ended goes on from its last observation."""
    cases = [{}, dict(gamma=0.5, gae_lambda=1.0), dict(gae_lambda=0.0, bootstrap_truncated=False)]
    for flags in cases:
        seen = run(env_kwargs=ENDS, num_steps=8, **flags)
        gamma, lam = flags.get("gamma", 0.99), flags.get("gae_lambda", 0.95)
        batch, objective = batches(seen)[0], objectives(seen)[0]
        later = trace = 0.0
        for t in reversed(range(8)):
            cut, lost = batch["truncated"][t], batch["terminated"][t]
            after = batch["next_values"][t]
            if t < 7:
                after = torch.where(cut, after, batch["values"][t + 1])
            later = batch["rewards"][t] + gamma * after * ~lost - batch["values"][t]
            trace = later + gamma * lam * trace * ~(cut | lost)
            torch.testing.assert_close(objective.returns[t], trace + batch["values"][t], rtol=1e-4, atol=1e-5)
        last = batch["next_values"][batch["truncated"]]
        assert len(last) and bool(last.any()) is flags.get("bootstrap_truncated", True)


@shows("normalize_advantages", of=[a2c])
def _(run):
    raw, scaled = (objectives(run(normalize_advantages=on))[0] for on in (False, True))
    plain, normal = raw.advantages, scaled.advantages
    torch.testing.assert_close(plain, raw.returns - raw.values, rtol=1e-4, atol=1e-5)
    assert float(normal.mean()) == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(normal, (plain - plain.mean()) / plain.std(), rtol=1e-4, atol=1e-5)


@shows("value_coef", "entropy_coef", of=[a2c])
def _(run):
    """The loss is the sum of its parts, and each gradient is in proportion."""
    gradients = []
    for value_coef, entropy_coef in ((0.0, 0.0), (0.3, 0.0), (0.0, 30.0), (0.6, 60.0)):
        seen = run(max_grad_norm=1e9, value_coef=value_coef, entropy_coef=entropy_coef)
        own = objectives(seen)[0]
        expected = own.policy + value_coef * own.value - entropy_coef * own.entropies.mean()
        assert float(own.loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        gradients.append(seen.steps[0].gradient)
    none, value, bonus, both = gradients
    assert far(value, none) > 1e-2 < far(bonus, none)
    assert far(both - none, 2 * (value - none) + 2 * (bonus - none)) < 1e-3


@shows("learning_rate", "anneal", of=[a2c])
def _(run):
    """Rate and bonus fall to nothing together."""
    for anneal, shares in ((False, [1.0] * 4), (True, [1.0, 0.75, 0.5, 0.25])):
        seen = run(iterations=4, anneal=anneal, learning_rate=0.02)
        assert [step.rates for step in seen.steps] == [[pytest.approx(0.02 * share)] for share in shares]
        bonuses = [own.entropy_coef for own in objectives(seen)]
        assert bonuses == pytest.approx([0.05 * share for share in shares])
    assert run().steps[0].rates == [1e-3]


@shows("max_grad_norm", of=[a2c])
def _(run):
    free = run(max_grad_norm=1e9)
    norm = float(free.steps[0].gradient.norm())
    cut = run(max_grad_norm=norm / 4)
    assert float(cut.steps[0].gradient.norm()) == pytest.approx(norm / 4, rel=1e-4)
    assert free.log[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert cut.log[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


LAYERS = {"small": [(16, 8), (32, 4)], "nature": [(32, 8), (64, 4), (64, 3)], "patch": [(16, 8)]}


@shows("network", "hidden_size", of=[a2c])
def _(run):
    """Channels and kernels of the encoder; the width before the heads."""
    assert {*LAYERS} == {*typing.get_args(typing.get_type_hints(a2c.Args)["network"])}
    for network, layers in LAYERS.items():
        weights = run(network=network, hidden_size=24).end
        found = [(len(tensor), tensor.shape[-1]) for tensor in weights.values() if tensor.ndim == 4]
        assert found == layers
        assert (weights["value.weight"].shape, weights["policy.weight"].shape) == ((1, 24), (8, 24))


@shows("chunk", of=[a2c])
def _(run):
    """So many rows in a pass at most; the same actions and gradient."""
    counts, forward = [], a2c.Agent.forward

    def counted(agent, obs):
        counts.append(len(obs))
        return forward(agent, obs)

    run.patch.setattr(a2c.Agent, "forward", counted)
    whole, cut = (run.into(run.folder / str(chunk), chunk=chunk, max_grad_norm=1e9) for chunk in (6, 4))
    half = counts.index(4)  # where the second run begins
    assert max(counts[:half]) == 6 and 6 not in counts[half:] and {4, 2} == {*counts[half:]}
    assert torch.equal(batches(cut)[0]["actions"], batches(whole)[0]["actions"])
    assert far(cut.steps[0].gradient, whole.steps[0].gradient) < 1e-5


@shows("dtype", of=[a2c])
def _(run):
    """The layers; what is learned and lost stays float32."""
    kinds, forward = [], torch.nn.Conv2d.forward

    def watched(layer, x):
        result = forward(layer, x)
        kinds.append((result.dtype, layer.weight.dtype))
        return result

    run.patch.setattr(torch.nn.Conv2d, "forward", watched)
    for dtype, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        kinds.clear()
        seen = run.into(run.folder / dtype, dtype=dtype)
        assert {*kinds[10:]} == {(kind, torch.float32)}  # the first ones size the network
        assert {tensor.dtype for tensor in seen.end.values()} == {torch.float32}
        own = objectives(seen)[0]
        learned = [own.loss, own.values, own.entropies, own.advantages, own.returns]
        assert {tensor.dtype for tensor in learned} == {torch.float32}
    assert is_rounded(own.returns.flatten().tolist()) < 0.2


@shows("compile", "cudagraphs", of=[a2c])
def _(run):
    """The network's own passes; a slow test compares the numbers."""
    told = []
    run.patch.setattr(torch.nn.Module, "compile", lambda module, **how: told.append((type(module), how)))
    for number, flags in enumerate(({}, dict(compile=True), dict(cudagraphs=True))):
        run.into(run.folder / str(number), iterations=1, **flags)
    assert told == [(a2c.Agent, dict(mode="default")), (a2c.Agent, dict(mode="reduce-overhead"))]
    is_shown_by("test_a2c_runs.py", "test_a_compiled_run_gives_the_same_numbers")


class Numbered(gymnasium.Env):
    """An episode is one step and earns its number since the last seed."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    number = -1

    def reset(self, *, seed=None, options=None):
        self.number = 0 if seed is not None else self.number + 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(self.number), True, False, {}


class Seeded(Numbered):
    """It earns what its seed says."""

    def reset(self, *, seed=None, options=None):
        self.number = self.number if seed is None else seed % 1000
        return np.zeros(1, np.float32), {}


for kind in (Numbered, Seeded):
    if f"{kind.__name__}Flags-v0" not in gymnasium.registry:  # this file is read again for its environments
        gymnasium.register(f"{kind.__name__}Flags-v0", kind, disable_env_checker=True)


@shows("eval_episodes", "eval_envs", of=[a2c])
def _(run):
    """Shared out equally: of seven episodes on three, 0 1 2, 0 1 and 0 1."""
    for number, count, numbers in ((7, 3, [0, 1, 2, 0, 1, 0, 1]), (4, 1, [0, 1, 2, 3]), (2, 2, [0, 0])):
        flags = dict(env_id="NumberedFlags-v0", env_kwargs=(), eval_episodes=number, eval_envs=count)
        seen = run(evaluates=True, **flags)
        for name in ("eval/return", "eval/greedy_return"):
            assert seen.last[name] == pytest.approx(statistics.fmean(numbers))


@shows("log_every", of=[a2c])
def _(run):
    """A record's means are over the iterations since the one before it."""
    flags = dict(iterations=5, checkpoint_every=5)
    every, third = run(**flags), run(**flags, log_every=3)
    assert [record["iteration"] for record in third.log] == [3, 5]
    assert [record["iteration"] for record in every.log] == [1, 2, 3, 4, 5]
    for name in ("grad_norm", "policy_loss", "entropy_mean"):
        each = every.column(name)
        means = [statistics.fmean(each[:3]), statistics.fmean(each[3:])]
        assert third.column(name) == pytest.approx(means, rel=1e-4, abs=1e-7)


@shows("seed", of=[a2c])
def _(run):
    """Weights, actions, the environments' starts, and those of evaluations."""
    flags = dict(learning_rate=0.0, num_envs=16)
    one, other = run(**flags), run(**flags, seed=2)
    again = run.into(run.folder / "again", **flags)
    assert timeless(one.folder) == timeless(again.folder)
    for name in ("policy.weight", "body.0.weight"):
        assert abs(torch.cosine_similarity(one.end[name].flatten(), other.end[name].flatten(), dim=0)) < 0.5
    first, second = batches(one)[0], batches(other)[0]
    for name in ("actions", "dist"):
        assert not torch.equal(first[name], second[name])
    assert (first["dist"][0] == second["dist"][0]).double().mean() < 0.8
    assert not torch.equal(batches(one)[0]["actions"], batches(one)[1]["actions"])
    earned = [run(evaluates=True, env_id="SeededFlags-v0", env_kwargs=(), seed=seed).last for seed in (1, 2)]
    for name in ("reward_mean", "eval/return", "eval/greedy_return"):
        assert earned[0][name] != earned[1][name]
    assert earned[0]["reward_mean"] != earned[0]["eval/return"] == earned[0]["eval/greedy_return"]


@shows("self_test", of=[a2c])
def _(run):
    """The toy world, whatever else; the slow test waits for the verdict."""
    def world(env_id, count, device, **options):
        raise BadInput(f"{env_id} {count} {options}")

    run.patch.setattr("envs.pixels.make_vec", world)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert command_line("a2c_vecenv.py", "--self-test") == 1
    assert re.search(r"pixel-goal 32 .*'difficulty': '8', 'door': 'false'", said.getvalue())
    is_shown_by("test_a2c_runs.py", "test_the_self_test_passes_and_says_so_as_json")
