"""Short runs that are broken on purpose, and good ones: what tools/diagnose.py is tried on.

    python tests/broken_runs.py no_step runs/no_step      # makes that run
    python tests/broken_runs.py --list

Each is a real run of a script, most of them with nothing but a bad flag. `expected` names the symptoms that
the tool has to see, and it may see no other; a good run has none.
"""

import contextlib
import dataclasses
import importlib
import math
import resource
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from envs import Episode
from envs.countdown import Countdown
from tests.two_turn import TwoTurn

GIB = 2**30
HERE = "tests/broken_runs.py"
SHORT = "--eval-tasks 128 --prompts-per-iteration 32 --eval-every 10 --log-episodes 0.02".split()


# Environments and rewards


class Judged(Episode):
    """Countdown with another verdict."""

    def __init__(self, episode, verdict):
        self.episode, self.verdict = episode, verdict

    def step(self, reply):
        step = self.episode.step(reply)
        correct = float(self.verdict(reply))
        return dataclasses.replace(step, reward=correct, info=dict(step.info, correct=correct))


class AlwaysWrong(Countdown):
    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: False)


class AlwaysRight(Countdown):
    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: True)


class Fooled(Countdown):
    """Its verifier looks for a text that needs no thought."""

    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: reply.count("1") > 3)


class Forged(Countdown):
    """Sees that one reply in some has written its own verdict, as the REPL's runner does."""

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def marked(reply):
            found = step(reply)
            return dataclasses.replace(found, info=dict(found.info, suspicious=float("+" in reply)))

        episode.step = marked
        return episode


class Stuck(Countdown):
    """The fifth task never ends."""

    def start(self, task, seed):
        started.append(task.id)
        if "train" in task.id and len(started) > 500:
            time.sleep(10_000)
        return super().start(task, seed)


started = []


class Thoughtful(TwoTurn):
    """Two turns, for a template that drops what the model said first."""


def longer(rollout):
    """Pays for length alone."""
    return len(rollout.reply) / 100


def not_a_number(rollout):
    return math.nan if len(rollout.reply) > 24 else 0.0


# Faults that no flag makes


@contextlib.contextmanager
def no_step(script):
    """The optimiser's step moves no weight."""
    import torch

    step = torch.optim.AdamW.step

    def still(self, *given, **named):
        before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        step(self, *given, **named)
        with torch.no_grad():
            for group, values in zip(self.param_groups, before, strict=True):
                for p, value in zip(group["params"], values, strict=True):
                    p.copy_(value)

    with mock.patch.object(torch.optim.AdamW, "step", still):
        yield


@contextlib.contextmanager
def hotter(script, unseen=False):
    """The sampler divides by another temperature; unseen: and no check ends the run."""
    sample, check = script.sample, script.check_sampler

    def hot(logits, row, temperature, uniform):
        return sample(logits, row, temperature and 1.3 * temperature, uniform)

    with mock.patch.object(script, "sample", hot), contextlib.ExitStack() as more:
        if unseen:
            more.enter_context(mock.patch.object(
                script, "check_sampler", lambda trainer, sampler, _: check(trainer, sampler, math.inf)))
        yield


@contextlib.contextmanager
def hotter_unseen(script):
    with hotter(script, unseen=True):
        yield


@contextlib.contextmanager
def little_memory(script):
    """Room for the model and a rollout, and not for a pass over all of it."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + GIB, now + GIB))
    yield


@dataclasses.dataclass
class Case:
    script: str
    flags: str
    expected: str = ""  # names of symptoms
    fault: object = None

    @property
    def words(self):
        return self.flags.split()


GRPO = f"--iterations 60 {' '.join(SHORT)} "
RUNS = {
    "good_grpo": Case("grpo_llm", "--iterations 150"),
    "good_ppo": Case("ppo_llm", ""),
    "good_sft": Case("sft", ""),
    "good_lora": Case("grpo_llm", GRPO + "--iterations 50 --lora-rank 4"),
    "good_short": Case("grpo_llm", GRPO),
    "rate_high": Case("grpo_llm", GRPO + "--learning-rate 0.05"),
    "no_step": Case("grpo_llm", GRPO + "--iterations 30", fault=no_step),
    "rate_0": Case("grpo_llm", GRPO + "--iterations 30 --learning-rate 1e-12"),
    "lora_rate_0": Case("grpo_llm", GRPO + "--iterations 30 --lora-rank 4 --learning-rate 1e-12"),
    "lora_rate_low": Case("grpo_llm", GRPO + "--iterations 50 --lora-rank 4 --learning-rate 2e-6"),
    "cut": Case("grpo_llm", GRPO + "--iterations 20 --max-response-tokens 5"),
    "always_0": Case("grpo_llm", GRPO + f"--iterations 20 --env {HERE}:AlwaysWrong"),
    "always_1": Case("grpo_llm", GRPO + f"--iterations 20 --env {HERE}:AlwaysRight"),
    "ppo_always_0": Case("ppo_llm", f"--iterations 20 {' '.join(SHORT)} --prompts-per-iteration 64 "
                         f"--env {HERE}:AlwaysWrong"),
    "template": Case("grpo_llm", GRPO + "--iterations 10 --env tests/two_turn.py:TwoTurn "
                     "--chat-template tests/data/diagnose/forgetful.jinja"),
    "kl_longer": Case("grpo_llm", GRPO + f"--reward-fn {HERE}:longer --max-response-tokens 32 --kl-coef 1e-6"),
    "narrow": Case("grpo_llm", "--iterations 150 --eval-tasks 128 --eval-every 50 --prompts-per-iteration 4 "
                   "--learning-rate 2e-3 --entropy-coef 0"),
    "narrow2": Case("grpo_llm", "--iterations 100 --eval-tasks 128 --eval-every 50 --prompts-per-iteration 8 "
                   "--learning-rate 2e-3 --entropy-coef 0 --epochs 4"),
    "collapse": Case("grpo_llm", GRPO + "--learning-rate 5e-3 --entropy-coef 0"),
    "collapse2": Case("grpo_llm", GRPO + "--learning-rate 2e-3 --entropy-coef 0"),
    "bonus": Case("grpo_llm", GRPO + "--entropy-coef 1"),
    "kl": Case("grpo_llm", GRPO + "--kl-coef 1e-6 --learning-rate 1e-2"),
    "kl_good": Case("grpo_llm", "--iterations 150 --kl-coef 1e-6"),
    "epochs": Case("grpo_llm", GRPO + "--epochs 8 --minibatches 4 --learning-rate 3e-3 --clip-high 5 "
                   "--clip-low 1"),
    "hotter": Case("grpo_llm", GRPO + "--iterations 5", fault=hotter),
    "hotter_unseen": Case("grpo_llm", GRPO + "--iterations 30", fault=hotter_unseen),
    "fooled": Case("grpo_llm", GRPO + f"--env {HERE}:Fooled --entropy-coef 0 --learning-rate 2e-3"),
    "longer": Case("grpo_llm", GRPO + f"--reward-fn {HERE}:longer --max-response-tokens 32"),
    "forged": Case("grpo_llm", GRPO + f"--iterations 20 --env {HERE}:Forged"),
    "nan": Case("grpo_llm", GRPO + f"--reward-fn {HERE}:not_a_number"),
    "memory": Case("grpo_llm", GRPO + "--prompts-per-iteration 4096 --microbatch-tokens 10000000 "
                   "--eval-tasks 8", fault=little_memory),
    "stuck": Case("grpo_llm", GRPO + f"--env {HERE}:Stuck --eval-tasks 8 --eval-samples 1"),
    "ppo_greedy": Case("ppo_llm", "--iterations 30 --eval-every 5 --eval-tasks 128"),
    "ppo_rate_high": Case("ppo_llm", "--iterations 40 --eval-every 10 --eval-tasks 128 --learning-rate 0.05 "
                          "--prompts-per-iteration 128"),
    "temperature": Case("grpo_llm", GRPO + "--temperature 3"),
    "sft_rate_high": Case("sft", "--steps 200 --learning-rate 1 --eval-every 100 --eval-tasks 64"),
    "sft_rate_0": Case("sft", "--steps 100 --learning-rate 1e-12 --eval-every 50 --eval-tasks 64"),
}


def make(name, folder):
    """That run, in this process."""
    import tyro

    case = RUNS[name]
    script = importlib.import_module(case.script)
    words, given = [], {}
    for flag, value in zip(case.words[::2], case.words[1::2], strict=True):
        given[flag] = value  # the last one counts
    for flag, value in given.items():
        words += [flag, value]
    args = tyro.cli(script.Args, args=[*words, "--run-dir", str(folder)])
    with case.fault(script) if case.fault else contextlib.nullcontext():
        script.main(args)


def main():
    if sys.argv[1:] == ["--list"]:
        print("\n".join(RUNS))
        return
    name, folder = sys.argv[1:]
    make(name, folder)


if __name__ == "__main__":
    main()
