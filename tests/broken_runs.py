"""Short runs that are broken on purpose, and good ones: what tools/diagnose.py is tried on.

    python tests/broken_runs.py no_step runs/no_step      # makes that run
    python tests/broken_runs.py --record runs             # trims those in runs/ to tests/data/diagnose/

Each is a real run of a script, most of them with nothing but a bad flag. RUNS names the symptoms that the
tool sees, the one that the run is there for first; of a good run there are none.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from envs import Episode  # noqa: E402
from envs.countdown import Countdown  # noqa: E402

GIB = 2**30
HERE = "tests/broken_runs.py"


# Environments and rewards


class Judged(Episode):
    """Countdown with another verdict."""

    def __init__(self, episode, verdict):
        self.episode, self.verdict = episode, verdict

    def step(self, reply):
        step = self.episode.step(reply)
        reward = float(self.verdict(reply))
        return dataclasses.replace(step, reward=reward, info=dict(step.info, correct=float(reward >= 0.5)))


class AlwaysWrong(Countdown):
    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: False)


class AlwaysRight(Countdown):
    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: True)


class Fooled(Countdown):
    """Its verifier counts ones, which needs no thought."""

    def start(self, task, seed):
        return Judged(super().start(task, seed), lambda reply: reply.count("1") / 12)


class Forged(Countdown):
    """Marks some replies as forgers, as the REPL's runner of tests does."""

    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def marked(reply):
            found = step(reply)
            return dataclasses.replace(found, info=dict(found.info, suspicious=float("+" in reply)))

        episode.step = marked
        return episode


class Stuck(Countdown):
    """Its five hundredth episode of training never begins."""

    started = 0

    def start(self, task, seed):
        self.started += "train" in task.id
        if self.started >= 500:
            time.sleep(10_000)
        return super().start(task, seed)


def longer(rollout):
    """Pays for length alone."""
    return len(rollout.reply) / 100


def repeat(rollout):
    """Pays for saying the same word again."""
    words = rollout.reply.split()
    return 1 - len({*words}) / max(len(words), 1)


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
            none = (math.inf, math.inf, math.inf)
            more.enter_context(mock.patch.object(
                script, "check_sampler", lambda trainer, sampler, _: check(trainer, sampler, none)))
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
    fault: object = None  # what no flag does

    @property
    def given(self):
        """{flag: value}, of which the last one counts."""
        words = self.flags.split()
        return dict(zip(words[::2], words[1::2], strict=True))


def grpo(flags, expected="", fault=None):
    few = ("--iterations 60 --eval-tasks 128 --prompts-per-iteration 32 --eval-every 10 --log-episodes 0.02 "
           "--checkpoint-every 60 ")
    return Case("grpo_llm", few + flags, expected, fault)


def ppo(flags, expected=""):
    return Case("ppo_llm", "--eval-tasks 128 --prompts-per-iteration 64 --eval-every 10 " + flags, expected)


def sft(flags, expected=""):
    return Case("sft", "--steps 100 --eval-every 0 --eval-tasks 64 " + flags, expected)


RUNS = {
    "good_grpo": Case("grpo_llm", ""),
    "good_ppo": Case("ppo_llm", ""),
    "good_sft": Case("sft", ""),
    "good_kl": grpo("--iterations 150 --kl-coef 1e-6"),
    "good_lora": grpo("--iterations 50 --lora-rank 4"),
    "good_short": grpo(""),
    "always_0": grpo(f"--iterations 20 --env {HERE}:AlwaysWrong", "reward_stays"),
    "always_1": grpo(f"--iterations 20 --env {HERE}:AlwaysRight", "reward_stays"),
    "ppo_always_0": ppo(f"--iterations 20 --env {HERE}:AlwaysWrong", "reward_stays entropy_rises kl"),
    "cut": grpo("--iterations 20 --max-response-tokens 5", "reward_stays length"),
    "no_step": grpo("--iterations 30", "no_step", no_step),
    "lora_rate_0": grpo("--iterations 30 --lora-rank 4 --learning-rate 1e-12", "lora"),
    "lora_rate_low": grpo("--iterations 50 --lora-rank 4 --learning-rate 2e-6", "lora"),
    "rate_high": grpo("--learning-rate 0.05", "reward_falls"),
    "rate_10": grpo("--learning-rate 5e-3 --entropy-coef 0", "reward_falls"),
    "ppo_rate_high": ppo("--iterations 30 --critic-warmup 2 --learning-rate 0.05",
                         "reward_falls entropy_collapses length"),
    "repeat": grpo(f"--reward-fn {HERE}:repeat --entropy-coef 0 --learning-rate 2e-3",
                   "entropy_collapses length verifier"),
    "bonus": grpo("--entropy-coef 1", "reward_falls entropy_rises"),
    "kl": grpo("--kl-coef 1e-6 --learning-rate 0.01", "reward_falls kl"),
    "epochs": grpo("--epochs 8 --minibatches 4 --learning-rate 3e-3 --clip-low 1 --clip-high 5",
                   "reward_falls entropy_rises kl length"),
    "longer": grpo(f"--reward-fn {HERE}:longer --max-response-tokens 32", "length verifier"),
    "narrow": grpo("--learning-rate 2e-3 --entropy-coef 0", "pass_at_n"),
    "temperature": grpo("--temperature 3", "pass_at_n greedy"),
    "hotter": grpo("--iterations 5", "sampler", hotter),
    "hotter_unseen": grpo("--iterations 30", "sampler", hotter_unseen),
    "resumed": grpo("--iterations 8 --eval-tasks 16 --final-learning-rate 1", "resumed"),
    "memory": grpo("--prompts-per-iteration 4096 --microbatch-tokens 10000000 --eval-tasks 8", "memory",
                   little_memory),
    "stuck": grpo(f"--env {HERE}:Stuck --eval-tasks 8 --eval-samples 1", "hangs"),
    "template": grpo("--iterations 10 --env tests/two_turn.py:TwoTurn "
                     "--chat-template tests/data/diagnose/forgetful.jinja", "template"),
    "fooled": grpo(f"--env {HERE}:Fooled --entropy-coef 0 --learning-rate 2e-3", "verifier"),
    "forged": grpo(f"--iterations 20 --env {HERE}:Forged", "verifier"),
    "nan": grpo(f"--reward-fn {HERE}:not_a_number", "not_finite"),
    "sft_rate_high": sft("--schedule constant --learning-rate 1", "sft_loss"),
    "sft_rate_0": sft("--learning-rate 1e-12", "no_step"),
}


def make(name, folder):
    """That run, in this process, whose working directory is the repository."""
    import tyro

    case = RUNS[name]
    if name == "resumed":
        return make_resumed(case, folder)
    script = importlib.import_module(case.script)
    words = [word for pair in case.given.items() for word in pair]
    args = tyro.cli(script.Args, args=[*words, "--run-dir", str(folder)])
    with case.fault(script) if case.fault else contextlib.nullcontext():
        script.main(args)


def make_resumed(case, folder):
    """Half of the run with one commit of a copy, half with the next."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(ROOT / "grpo_llm.py", place)
        for name in ("envs", "models"):
            Path(place, name).symlink_to(ROOT / name)
        commit = "git add grpo_llm.py && git -c user.name=a -c user.email=a@b commit -qm {}"
        subprocess.run("git init -q && " + commit.format("one"), shell=True, cwd=place, check=True)
        for iterations in (4, 8):
            given = case.given | {"--iterations": str(iterations), "--run-dir": str(Path(folder).resolve())}
            words = [word for pair in given.items() for word in pair]
            subprocess.run([sys.executable, "grpo_llm.py", *words], cwd=place, check=True)
            with Path(place, "grpo_llm.py").open("a") as file:
                file.write("# another line\n")
            subprocess.run(commit.format("two"), shell=True, cwd=place, check=True)


# Recording: of a log what the tool reads, of some records


RECORDS = 10  # of training, evenly, besides those with an evaluation
EPISODES = 30
KEPT = re.compile(
    r"iteration|opt_steps|env_steps|wall_time_s|val/.+/(pass@\d+|greedy)|train/(reward|loss|pass@1|entropy|"
    r"kl_loss|approx_kl|clipfrac|grad_norm|weight_norm|policy_steps)|train/.+/format|critic/score/(max|min)|"
    r"response_length/(mean|clip_ratio)|mismatch/(kl|ratio_mean|slope)|env/suspicious|"
    r"rollout/(turns|segments|groups_trainable|termination/error)")
ARGS = ("learning_rate", "iterations", "steps", "eval_tasks", "eval_samples", "entropy_coef", "kl_coef",
        "dtype", "lora_rank", "lora_adapter_path", "max_response_tokens")


def trim(key, value):
    digits = 9 if key == "train/weight_norm" else 4
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def record(run, target):
    """A small copy of a run, without the names of this machine."""
    lines = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
    trained = [number for number, line in enumerate(lines) if "train/reward" in line or "train/loss" in line]
    step = max(1, (len(trained) - 1) / (RECORDS - 1))
    chosen = {trained[round(number * step)] for number in range(min(RECORDS, len(trained)))}
    chosen.update([number for number in trained if "train/entropy" in lines[number]][-3:])
    kept = []
    for number, line in enumerate(lines):
        if "meta" in line:
            meta = line["meta"]
            args = {name: meta["args"][name] for name in ARGS if name in meta["args"]}
            kept.append(dict(meta=dict(algo=meta["algo"], git_sha=meta["git_sha"], args=args)))
        elif "error" in line or "resume" in line:
            kept.append(line)
        elif number in chosen or any(key.startswith("val/") for key in line):
            kept.append({key: trim(key, value) for key, value in line.items() if KEPT.fullmatch(key)})
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    for receipt in run.glob("receipts/*/traceback.txt"):
        called = re.findall(r", line \d+, in (\w+)", receipt.read_text())
        place = target / receipt.relative_to(run)
        place.parent.mkdir(parents=True)
        frames = [f'  File "script.py", line 1, in {name}\n' for name in called]
        place.write_text("".join(frames))
    for path in sorted(run.glob("episodes/*.jsonl"))[-1:] if run.name == "fooled" else []:
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        few = [dict(task_id=e["task_id"], correct=e["correct"], messages=e["messages"])
               for e in episodes if "messages" in e][:EPISODES]
        (target / "episodes").mkdir()
        (target / "episodes" / path.name).write_text("".join(json.dumps(e) + "\n" for e in few))


def main():
    name, folder = sys.argv[1:]
    if name != "--record":
        make(name, folder)
        return
    for name in RUNS:
        if (run := Path(folder, name)).is_dir() and name != "stuck":
            record(run, ROOT / "tests" / "data" / "diagnose" / name)


if __name__ == "__main__":
    main()
