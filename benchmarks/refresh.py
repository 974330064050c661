"""Makes figures and measurements again that show what today's code does no longer.

    python benchmarks/refresh.py --list                  # every figure: its cost, its commit, why it is stale
    python benchmarks/refresh.py                         # make all stale ones, the cheapest first
    python benchmarks/refresh.py --readme                # those of README.md
    python benchmarks/refresh.py --only sft ppo_llm      # of these
    python benchmarks/refresh.py --budget 60             # as many as fit into an hour of one core

The same command goes on where it was stopped: a figure that was made is left out, a command that has ended is
not run again, and a training run continues from its folder in runs/refresh. What was run with code that
computes otherwise by now is removed and begins anew.

figures.json beside this file has the commit that each figure was made at. This program writes it; the numbers
in a page's text are renewed by hand. tools/figure_age.py decides what is stale. To make a current one anew,
remove its line in figures.json, and runs/refresh.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.figure_age import CannotTell, git, why_stale

ROOT = Path(__file__).resolve().parent.parent
COMMITS = "benchmarks/figures.json"
RUNS = "runs/refresh"


def seeds(command: str) -> tuple[str, ...]:
    """A command for each of the three seeds, which it calls {s}."""
    return tuple(command.replace("{s}", str(seed)) for seed in (1, 2, 3))


def three(runs: str) -> str:
    """The folders of the three seeds, for the plot."""
    return " ".join(seeds(f"{RUNS}/{runs}/s{{s}}"))


def plot(name: str, words: str) -> str:
    return (f"python tools/plot_train_log.py {words} "
            f"--out docs/figures/{name}.png --csv docs/results/{name}.csv")


GRPO = seeds(f"python grpo_llm.py --seed {{s}} --run-dir {RUNS}/grpo/s{{s}}")
PPO = seeds(f"python ppo_llm.py --seed {{s}} --run-dir {RUNS}/ppo/s{{s}}")
CRITIC = (
    f"patch ppo_llm.py docs/variants/critic_lambda.diff -o {RUNS}/ppo_critic_lambda.py",
    *seeds(f"python {RUNS}/ppo_critic_lambda.py --seed {{s}} --run-dir {RUNS}/critic_lambda/s{{s}}"))
SFT = seeds(f"python sft.py --seed {{s}} --run-dir {RUNS}/sft/s{{s}}")
SFT_LONG = seeds(f"python sft.py --steps 2000 --seed {{s}} --run-dir {RUNS}/sft_long/s{{s}}")
A2C = seeds(f"python a2c_vecenv.py --seed {{s}} --run-dir {RUNS}/a2c/s{{s}}")
READING = seeds(f"python docs/reading/grpo.py --seed {{s}} --run-dir {RUNS}/reading_grpo/s{{s}}")
VLLM = seeds(f"python grpo_llm.py --engine vllm --seed {{s}} --run-dir {RUNS}/vllm/s{{s}}")
OFTEN = "--eval-every 10 --eval-samples 4"
GRPO_OFTEN = seeds(f"python grpo_llm.py --seed {{s}} {OFTEN} --run-dir {RUNS}/grpo_often/s{{s}}")
TAUGHT = f"--teacher {RUNS}/grpo_often/s1/checkpoints/step_000500 --seed {{s}} {OFTEN}"
DISTILL = (
    f"patch grpo_llm.py docs/variants/sampled_distill.diff -o {RUNS}/grpo_sampled_distill.py",
    f"patch {RUNS}/grpo_sampled_distill.py docs/variants/distill.diff -o {RUNS}/grpo_distill.py",
    *seeds(f"python {RUNS}/grpo_distill.py {TAUGHT} --run-dir {RUNS}/distill/s{{s}}"),
    *seeds(f"python {RUNS}/grpo_distill.py {TAUGHT} --divergence forward --run-dir {RUNS}/forward/s{{s}}"),
    *seeds(f"python {RUNS}/grpo_sampled_distill.py {TAUGHT} --run-dir {RUNS}/sampled_distill/s{{s}}"))
TINY_SFT = ("--model models/countdown-tiny --batch-size 64 --steps 300 --learning-rate 2e-3 --dtype float32 "
            "--microbatch-tokens 8192 --max-response-tokens 16 --weight-decay 0.01 --beta2 0.95 "
            "--eval-every 0 --eval-tasks 128 --eval-samples 1 --checkpoint-every 300")
EVALS = "--eval-every 20 --eval-tasks 256 --eval-samples 2 --seed {s}"
PAIRS = "--prompts-per-iteration 32 --group-size 2"  # a teacher judges each reply: two of a prompt will do
# sft.py takes skill=mixed alone for its default, which it drops where another environment is given.
MIXED = "skill=mixed novice_share=0.7"
HINTED = f"{RUNS}/self/sft/checkpoints/step_000300"
SELF = (
    *DISTILL[:2],
    f"patch {RUNS}/grpo_distill.py docs/variants/self_distill.diff -o {RUNS}/grpo_self_distill.py",
    f"python sft.py --env docs/variants/hinted.py:Hinted --env-kwargs {MIXED} {TINY_SFT} "
    f"--run-dir {RUNS}/self/sft")
for arm, start, rate in (("shipped", "models/countdown-tiny", 0.05), ("fixed", HINTED, 0.0),
                         ("moving", HINTED, 0.05)):
    SELF += seeds(f"python {RUNS}/grpo_self_distill.py --model {start} --teacher {start} "
                  f"--teacher-rate {rate} --hint ' | {{solution}} |' --iterations 100 {PAIRS} {EVALS} "
                  f"--run-dir {RUNS}/self/{arm}/s{{s}}")
MIX = "--env-kwargs difficulty=true max_operands=4"
THREE, FOUR = (f"{RUNS}/teachers/{name}/checkpoints/step_000300" for name in ("three", "four"))
TEACHERS = (
    *DISTILL[:2],
    f"patch {RUNS}/grpo_distill.py docs/variants/teachers.diff -o {RUNS}/grpo_teachers.py",
    f"python sft.py --env countdown {MIX} {MIXED} {TINY_SFT} --run-dir {RUNS}/teachers/student",
    f"python sft.py --env countdown --env-kwargs difficulty=true {TINY_SFT} --run-dir {RUNS}/teachers/three",
    f"python sft.py --env countdown {MIX} min_operands=4 {TINY_SFT} --run-dir {RUNS}/teachers/four")
BOTH = f"{MIX} --model {RUNS}/teachers/student/checkpoints/step_000300 --iterations 100 {EVALS}"
for arm, given in (("own", f"countdown/3={THREE} countdown/4={FOUR}"), ("one", FOUR)):
    TEACHERS += seeds(f"python {RUNS}/grpo_teachers.py --teacher {given} {BOTH} {PAIRS} "
                      f"--run-dir {RUNS}/teachers/{arm}/s{{s}}")
TEACHERS += seeds(f"python grpo_llm.py {BOTH} --prompts-per-iteration 8 "
                  f"--run-dir {RUNS}/teachers/grpo/s{{s}}")
REINFORCE = (
    f"patch ppo_llm.py docs/variants/reinforce.diff -o {RUNS}/reinforce_llm.py",
    *seeds(f"python {RUNS}/reinforce_llm.py --eval-samples 4 --seed {{s}} --run-dir {RUNS}/reinforce/s{{s}}"))
DYCK = "--env logic --env-kwargs types=dyck_language style=words dyck_min_length=4 dyck_max_length=12"
LOGIC = (
    *seeds(f"python sft.py {DYCK} --steps 150 --eval-every 0 --checkpoint-every 150 --max-response-tokens 14 "
           f"--seed {{s}} --run-dir {RUNS}/logic/sft{{s}}"),
    *seeds(f"python grpo_llm.py {DYCK} --model {RUNS}/logic/sft{{s}}/checkpoints/step_000300 "
           "--prompts-per-iteration 256 --iterations 500 --minibatches 2 --learning-rate 1e-3 "
           f"--max-response-tokens 14 --seed {{s}} --run-dir {RUNS}/logic/s{{s}}"))
HEX = ('--env openspiel --env-kwargs "cases=hex(board_size=4)" mode=game style=words max_random_steps=2 '
       "num_tasks_per_case=1000000")
OPENSPIEL = (
    "python -c \"import envs, sft; "
    "case = dict(cases='hex(board_size=4)', mode='game', style='words', max_random_steps=2); "
    "env = envs.make('openspiel', **case); "
    "words = sft.new_tokenizer(env.vocabulary); "
    "shape = dict(hidden_size=128, intermediate_size=384, num_attention_heads=4); "
    f"sft.new_model(sft.Args(), words, **shape).save_pretrained('{RUNS}/hex/start'); "
    f"words.save_pretrained('{RUNS}/hex/start')\"",
    f"python sft.py --model {RUNS}/hex/start {HEX} playouts=1 --dtype float32 --microbatch-tokens 4096 "
    "--weight-decay 0.01 --beta2 0.95 --max-response-tokens 16 --batch-size 64 --steps 800 "
    f"--learning-rate 3e-3 --eval-tasks 128 --eval-every 100 --checkpoint-every 200 --run-dir {RUNS}/hex/sft",
    *seeds(f"python grpo_llm.py {HEX} --model {RUNS}/hex/sft/checkpoints/step_000800 --max-response-tokens 4 "
           "--iterations 100 --eval-every 20 --eval-tasks 256 --eval-samples 4 --seed {s} "
           f"--run-dir {RUNS}/hex/s{{s}}"))
REWARDS = "--eval-every 20 --eval-tasks 256 --eval-samples 4"
GDPO = ()
for arm in ("summed", "summed_points", "decoupled"):
    GDPO += seeds(
        f"python grpo_llm.py --env benchmarks/rewards.py:Ordered --reward-fn benchmarks/rewards.py:{arm} "
        f"{'' if arm == 'decoupled' else '--scale-rewards '}--iterations 120 {REWARDS} --seed {{s}} "
        f"--run-dir {RUNS}/{arm}/s{{s}}")
EXAM = "--env docs/variants/exam.py:Exam"
EXAM_RUN = (f"{EXAM} --model {RUNS}/exam/sft/checkpoints/step_000200 --iterations 60 --eval-every 10 "
            "--eval-samples 4")
TURNS = (
    f"python sft.py {EXAM} --model models/countdown-tiny --steps 200 "
    "--batch-size 64 --learning-rate 2e-3 --dtype float32 --microbatch-tokens 8192 --max-response-tokens 16 "
    "--weight-decay 0.01 --beta2 0.95 --eval-every 0 --checkpoint-every 200 --eval-tasks 128 "
    f"--run-dir {RUNS}/exam/sft",
    f"patch grpo_llm.py docs/variants/turns.diff -o {RUNS}/grpo_turns.py")
OWN = f"{RUNS}/grpo_turns.py --episode-coef 0 --turn-discount 0"
for arm, script in (("sum", "grpo_llm.py"), ("gigpo", f"{RUNS}/grpo_turns.py"), ("own", OWN)):
    TURNS += seeds(f"python {script} {EXAM_RUN} --prompts-per-iteration 32 --seed {{s}} "
                   f"--run-dir {RUNS}/exam/{arm}/s{{s}}")
TURNS += seeds(f"python ppo_llm.py {EXAM_RUN} --prompts-per-iteration 256 --seed {{s}} "
               f"--run-dir {RUNS}/exam/ppo/s{{s}}")
PONG = (
    "python a2c_vecenv.py --env-id ALE/Pong-v5 --network small --hidden-size 256 --num-envs 16 --num-steps 5 "
    "--learning-rate 5e-4 --no-anneal --no-normalize-advantages --entropy-coef 0.01 --value-coef 0.5 "
    "--iterations 50000 --eval-every 0 --eval-episodes 100 --eval-envs 20 --log-every 250 "
    f"--checkpoint-every 2500 --run-dir {RUNS}/a2c/pong",)

SHOP = f"data={RUNS}/shop/rows.jsonl prompt=question"
SHOP_RUN = (f"--model {RUNS}/shop/sft/checkpoints/step_000800 --max-response-tokens 10 "
            "--prompts-per-iteration 16 --iterations 40 --eval-every 5 --eval-tasks 64 --eval-samples 2 "
            "--max-concurrent 256")
AGENT = (
    f"python -m docs.agent.shop_env {RUNS}/shop/rows.jsonl",
    f"python sft.py --env docs/agent/shop_env.py:Shop --env-kwargs {SHOP} --batch-size 64 --steps 800 "
    f"--eval-every 0 --checkpoint-every 800 --max-response-tokens 10 --run-dir {RUNS}/shop/sft",
    *seeds(f"python grpo_llm.py --env docs/agent/shop_env.py:Shop --env-kwargs {SHOP} {SHOP_RUN} "
           f"--seed {{s}} --run-dir {RUNS}/shop/class/s{{s}}"),
    *seeds(f"python grpo_llm.py --env agent --env-kwargs program=docs/agent/shop_openai.py:run {SHOP} "
           f"{SHOP_RUN} --seed {{s}} --run-dir {RUNS}/shop/agent/s{{s}}"))

TRICKS = "benchmarks/results/tricks.csv"


class Figure(NamedTuple):
    name: str
    outputs: tuple[str, ...]
    sources: tuple[str, ...]  # the files and folders that it is a figure of
    kind: str  # learning: curves of training runs; cost: time, memory or speed; drawn, or counted
    minutes: float  # of one core
    commands: tuple[str, ...]  # in the root of the repository, one after the other
    needs: str = ""  # a package that requirements.txt does not have, or a folder that git does not


def read_commits(root: Path) -> dict[str, dict[str, str]]:
    """{name of a figure: its commit, and at which later one it was seen to be the same}"""
    path = root / COMMITS
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_commits(root: Path, commits: dict[str, dict[str, str]]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(commits[name])}" for name in sorted(commits)]
    (root / COMMITS).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def curve(name: str, sources: str, minutes: float, runs: tuple[str, ...], words: str, needs="") -> Figure:
    """A learning curve, with its CSV, of the logs of some runs."""
    outputs = (f"docs/results/{name}.csv", f"docs/figures/{name}.png")
    commands = (*runs, plot(name, words))
    return Figure(name, outputs, tuple(sources.split()), "learning", minutes, commands, needs)


def cost(name: str, sources: str, minutes: float, *programs: str, needs="") -> Figure:
    """A CSV that programs of benchmarks/ append to, and that is there once all have ended."""
    new, out = f"{RUNS}/{name}.csv", f"benchmarks/results/{name}.csv"
    measured = " && ".join(f"python benchmarks/{program} --out {new}" for program in programs)
    command = f"rm -f {new} && {measured} && cp {new} {out}"
    of = (*sources.split(), f"benchmarks/{programs[0].split()[0]}")
    return Figure(name, (out,), of, "cost", minutes, (command,), needs)


FIGURES = (
    curve("grpo_llm", "grpo_llm.py", 3, GRPO, f"--log {three('grpo')} --smoothing 10"),
    curve("grpo_vs_sft", "grpo_llm.py sft.py", 11, GRPO + SFT_LONG,
          f"--log {three('grpo')} --control {three('sft_long')} --control-label 'SFT continued' "
          "--x wall_time_s --panel 'held out' --title 'python grpo_llm.py, 3 seeds, one CPU core'"),
    curve("sft", "sft.py", 5, SFT, f"--log {three('sft')}"),
    curve("ppo_llm", "ppo_llm.py", 8, PPO, f"--log {three('ppo')} --smoothing 5"),
    curve("ppo_or_grpo_tokens", "ppo_llm.py grpo_llm.py", 11, GRPO + PPO,
          f"--log {three('ppo')} --control {three('grpo')} --control-label grpo_llm.py --panel 'held out' "
          "--title 'PPO and GRPO, 3 seeds each'"),
    # tests/test_reading.py holds docs/reading/grpo.py to what grpo_llm.py logs.
    curve("reading_grpo", "grpo_llm.py", 13, GRPO + READING,
          f"--log {three('reading_grpo')} --control {three('grpo')} --control-label grpo_llm.py "
          "--panel 'held out' --title 'docs/reading/grpo.py and grpo_llm.py, 3 seeds each'"),
    # The golden logs of the full scripts say whether what the exercises change computes otherwise.
    Figure("reading_exercises", ("docs/results/reading_exercises.csv", "docs/figures/reading_exercises.png"),
           ("grpo_llm.py", "ppo_llm.py", "docs/reading/exercises"), "learning", 12, (
               "rm -rf runs/exercises",
               "python benchmarks/exercises.py", "python benchmarks/exercises.py --plot")),
    curve("a2c_vecenv", "a2c_vecenv.py", 5, A2C,
          f"--log {three('a2c')} --title 'python a2c_vecenv.py, 3 seeds, one CPU core'"),
    curve("a2c_readme", "a2c_vecenv.py", 5, A2C,
          f"--log {three('a2c')} --panel 'success rate' "
          "--title 'python a2c_vecenv.py, 3 seeds, one CPU core'"),
    Figure("a2c_policy", ("docs/figures/a2c_vecenv.gif",), ("a2c_vecenv.py",), "learning", 2, (
               A2C[0],
               f"python tools/dump_policy_gif.py --run {RUNS}/a2c/s1 --greedy --episodes 3 --seed 2 "
               f"--scale 3 --env-kwargs menu_prob=1 --out {RUNS}/a2c/look",
               f"cp {RUNS}/a2c/look/rollout.gif docs/figures/a2c_vecenv.gif")),
    curve("a2c_pong", "a2c_vecenv.py envs/pixels/atari.py", 170, PONG,
          f"--log {RUNS}/a2c/pong --panel return --title 'Pong, one seed, one core'", needs="ale_py"),
    curve("engines", "grpo_llm.py", 20, GRPO + VLLM,
          f"--log {three('grpo')} --control {three('vllm')} --control-label vLLM --panel 'held out' "
          "--title 'python grpo_llm.py, 3 seeds each'", needs="vllm"),
    Figure("losses", ("docs/results/losses.csv", "docs/figures/losses.png"),
           ("grpo_llm.py", "docs/variants/stale.diff"), "learning", 480, (
               f"rm -rf {RUNS}/losses docs/results/losses.csv",
               *(f"python benchmarks/losses.py --stage {stage} --runs {RUNS}/losses"
                 for stage in ("rates", "grid", "knobs")), "python benchmarks/losses.py --plot")),
    Figure("smollm2",
           ("docs/results/smollm2.csv", "docs/figures/smollm2.png", "docs/figures/smollm2_readme.png"),
           ("grpo_llm.py", "sft.py", "ppo_llm.py", "docs/variants/shuffled.diff",
            "envs/adapters/reasoning_gym.py"), "learning", 220, (
               f"rm -rf {RUNS}/smollm2",
               f"python benchmarks/smollm2.py --runs {RUNS}/smollm2",
               f"python benchmarks/smollm2.py --table --runs {RUNS}/smollm2",
               "python benchmarks/smollm2.py --plot"), needs="reasoning_gym"),
    curve("variants_distill", "grpo_llm.py docs/variants/sampled_distill.diff docs/variants/distill.diff", 10,
          GRPO_OFTEN + DISTILL,
          f"--log {three('distill')} --log {three('forward')} --log {three('sampled_distill')} "
          f"--label 'reverse KL' 'forward KL' 'sampled token' --control {three('grpo_often')} "
          "--control-label GRPO --panel 'held out' --title 'On-policy distillation and GRPO, 3 seeds each'"),
    curve("variants_teachers",
          "grpo_llm.py sft.py docs/variants/sampled_distill.diff docs/variants/distill.diff "
          "docs/variants/teachers.diff", 10, TEACHERS,
          f"--log {three('teachers/own')} --log {three('teachers/one')} --log {three('teachers/grpo')} "
          "--label 'a teacher for each' 'the second for both' GRPO "
          "--key val/countdown/3/greedy val/countdown/4/greedy "
          "--title 'Two tasks and their teachers, 3 seeds each'"),
    curve("variants_self_distill",
          "grpo_llm.py sft.py docs/variants/sampled_distill.diff docs/variants/distill.diff "
          "docs/variants/self_distill.diff docs/variants/hinted.py", 6, SELF,
          f"--log {three('self/fixed')} --log {three('self/moving')} --log {three('self/shipped')} "
          "--label 'fixed teacher' 'teacher at rate 0.05' 'shipped model, rate 0.05' "
          "--key val/countdown/pass@1 val/countdown/greedy "
          "--title 'A self-teacher that sees the solution, 3 seeds each'"),
    curve("variants_reinforce", "ppo_llm.py docs/variants/reinforce.diff", 8, REINFORCE,
          f"--log {three('reinforce')} --smoothing 10 --panel 'held out' "
          "--title 'REINFORCE with the batch as its baseline, 3 seeds'"),
    curve("variants_critic_lambda", "ppo_llm.py docs/variants/critic_lambda.diff", 16, PPO + CRITIC,
          f"--log {three('critic_lambda')} --control {three('ppo')} --control-label ppo_llm.py "
          "--key val/countdown/pass@1 critic/vf_explained_var "
          "--title 'PPO whose critic has a lambda of 1, 3 seeds each'"),
    curve("variants_turns", "grpo_llm.py ppo_llm.py docs/variants/turns.diff docs/variants/exam.py", 30,
          TURNS, f"--log {three('exam/gigpo')} --log {three('exam/own')} --log {three('exam/sum')} "
          f"--log {three('exam/ppo')} --label GiGPO 'turns alone' 'GRPO, the sum' PPO "
          "--key val/exam/solved val/exam/pass@1 --title 'An exam of four problems, 3 seeds each'"),
    curve("rewards_gdpo", "grpo_llm.py docs/rewards/gdpo.py benchmarks/rewards.py", 6, GDPO,
          f"--log {three('decoupled')} --log {three('summed')} --log {three('summed_points')} "
          "--label GDPO sum 'sum, second part x 10' --key val/countdown/pass@1 val/countdown/ordered "
          "--title 'Countdown with a second part of the reward, 3 seeds each'"),
    Figure("variants_ppo", ("docs/results/variants_ppo.csv", "docs/figures/variants_ppo.png"),
           ("a2c_vecenv.py", "docs/variants/ppo_vecenv.diff"), "learning", 15, (
               "rm -f docs/results/variants_ppo.csv",
               "python benchmarks/ppo_vs_a2c.py", "python benchmarks/ppo_vs_a2c.py --plot"), needs="ale_py"),
    curve("logic_dyck", "grpo_llm.py sft.py envs/logic", 15, LOGIC,
          f"--log {three('logic')} --panel 'held out' "
          "--title 'GRPO on logic/dyck_language, 3 seeds, one CPU core'"),
    curve("openspiel_grpo", "grpo_llm.py sft.py envs/openspiel", 20, OPENSPIEL,
          f"--log {three('hex')} --smoothing 10 --panel 'held out' "
          "--title 'GRPO on whole games of hex 4x4 against random play, 3 seeds'", needs="pyspiel"),
    curve("agent", "grpo_llm.py sft.py docs/agent envs/adapters/agent.py envs/adapters/endpoint.py", 8, AGENT,
          f"--log {three('shop/agent')} --control {three('shop/class')} --control-label 'an Env class' "
          "--panel 'held out' --title 'An agent of the openai client, 3 seeds, one CPU core'",
          needs="openai"),
    Figure("arcagi3", ("docs/figures/arcagi3.gif",), ("envs/arcagi3",), "drawn", 0.2, (
        f"python tools/run_arc_eval.py --game-id maze-17 --scripted --out {RUNS}/arcagi3",
        f"cp {RUNS}/arcagi3/frames.gif docs/figures/arcagi3.gif")),
    Figure("pixel_goal", ("docs/figures/pixel_goal.png",),
           ("envs/pixels/pixel_goal.py", "benchmarks/pixel_goal.py"), "drawn", 0.2,
           ("python benchmarks/pixel_goal.py figure --out docs/figures/pixel_goal.png",)),
    Figure("sampler_updates", ("benchmarks/results/sampler_updates.csv",),
           ("grpo_llm.py", "benchmarks/sampler.py"), "learning", 150, (
               f"rm -rf {RUNS}/sampler",
               f"python benchmarks/sampler.py updates --runs {RUNS}/sampler",
               f"python benchmarks/sampler.py updates --engine vllm --runs {RUNS}/sampler",
               f"python benchmarks/sampler.py table --runs {RUNS}/sampler"), needs="vllm"),
    Figure("sampler_faults", ("benchmarks/results/sampler_faults.csv",),
           ("grpo_llm.py", "benchmarks/sampler.py"), "learning", 60,
           (f"rm -rf {RUNS}/faults benchmarks/results/sampler_faults.csv",
            f"python benchmarks/sampler.py faults --runs {RUNS}/faults"), needs="models/smollm2-135m"),
    cost("overlap_speed", "grpo_llm.py docs/variants/overlap.diff", 15,
         "overlap.py --width 192 --iterations 20", needs="vllm"),
    cost("overlap_in_flight", "grpo_llm.py docs/variants/overlap.diff docs/variants/inflight.diff", 15,
         "overlap.py --in-flight --cores 0 0 --width 64 --max-response-tokens 128 --prompts 4 --iterations 8 "
         "--repeats 3",
         "overlap.py --in-flight --width 64 --max-response-tokens 200 --prompts 4 --iterations 10 "
         "--repeats 3", needs="vllm"),
    cost("overlap_in_flight_hf", "grpo_llm.py docs/variants/overlap.diff docs/variants/overlap_hf.diff "
         "docs/variants/inflight_hf.diff", 5,
         "overlap.py --engine hf --in-flight --iterations 40 --eval-tasks 256 --repeats 3",
         "overlap.py --engine hf --in-flight --width 64 --max-response-tokens 256 --prompts 4 "
         "--iterations 16 --repeats 3"),
    cost("step", "grpo_llm.py", 4, "grpo_vs_trl.py step", needs=".venv-trl"),
    cost("real", "grpo_llm.py", 60, "grpo_vs_trl.py real --repeats 5", needs=".venv-trl"),
    cost("run", "grpo_llm.py", 8, "grpo_vs_trl.py run", needs=".venv-trl"),
    Figure("speedrun", ("benchmarks/results/speedrun.csv", "docs/figures/speedrun.png"),
           ("grpo_llm.py", "ppo_llm.py", "docs/reading/grpo.py", "benchmarks/time_to.py"), "cost", 75, (
               "rm -f benchmarks/results/speedrun.csv",
               "python benchmarks/time_to.py --sides default,maxrl,reading,ppo,trl --seeds 1,2,3,4,5 "
               "--out benchmarks/results/speedrun.csv",
               "python benchmarks/time_to.py --table benchmarks/results/speedrun.csv "
               "--plot docs/figures/speedrun.png"), needs=".venv-trl"),
    Figure("speedrun_diff", ("benchmarks/results/speedrun_diff.csv",),
           ("grpo_llm.py", "docs/variants/pods.diff", "benchmarks/time_to.py"), "cost", 20, (
               "rm -f benchmarks/results/speedrun_diff.csv",
               f"patch grpo_llm.py docs/variants/pods.diff -o {RUNS}/grpo_pods.py",
               f"python benchmarks/time_to.py --sides 'default,maxrl --iterations 250,{RUNS}/grpo_pods.py' "
               "--seeds 1,2,3,4,5 --out benchmarks/results/speedrun_diff.csv")),
    cost("iteration", "grpo_llm.py", 4, "iteration.py --repeats 3"),
    Figure("tricks", (TRICKS,), ("grpo_llm.py", "benchmarks/iteration.py"), "cost", 40, (
               f"rm -f {TRICKS}",
               f"python benchmarks/smollm2.py --only form_1 --runs {RUNS}/smollm2",
               f"python benchmarks/iteration.py --tricks --repeats 3 --out {TRICKS}",
               "python benchmarks/iteration.py --tricks --iterations 2 --repeats 3 "
               f"--real {RUNS}/smollm2/form_1/checkpoints/step_000020 --out {TRICKS}"),
           needs="models/smollm2-135m"),
    cost("rollout", "grpo_llm.py", 5,
         f"rollout.py --trained {RUNS}/grpo/s1/checkpoints/step_000500"),
    cost("rollout_engines", "grpo_llm.py", 5, "rollout.py --engines", needs="vllm"),
    cost("update_memory", "grpo_llm.py", 4, "update_memory.py"),
    cost("sft_vs_trl_speed", "sft.py", 6, "sft_vs_trl.py speed", needs=".venv-trl"),
    cost("a2c_pixels", "a2c_vecenv.py", 6, "a2c_vs_sb3.py pixels --steps 6144", needs=".venv-sb3"),
    cost("ppo_pixels", "a2c_vecenv.py docs/variants/ppo_vecenv.diff", 6,
         "a2c_vs_sb3.py ppo --networks small --steps 2048 --num-steps 16", needs=".venv-sb3"),
    cost("a2c_cartpole", "a2c_vecenv.py", 8, "a2c_vs_sb3.py cartpole", needs=".venv-sb3"),
    cost("a2c_scale", "a2c_vecenv.py", 15, "a2c_vs_sb3.py scale --repeats 2"),
    cost("a2c_atari", "a2c_vecenv.py envs/pixels/atari.py", 5,
         "a2c_vs_sb3.py atari --steps 3200", needs=".venv-sb3"),
    cost("agent_cost", "envs/adapters/agent.py envs/adapters/endpoint.py envs/__init__.py", 3, "agent.py",
         needs="openai"),
    cost("logic", "envs/logic", 2, "logic.py"),
    cost("openspiel", "envs/openspiel", 3, "openspiel.py", needs="pyspiel"),
    Figure("pixel_goal_players", ("benchmarks/results/pixel_goal_players.csv",),
           ("envs/pixels/pixel_goal.py", "benchmarks/pixel_goal.py"), "counted", 0.5,
           ("python benchmarks/pixel_goal.py players --out benchmarks/results/pixel_goal_players.csv",)),
    cost("pixel_goal_speed", "envs/pixels/pixel_goal.py", 1, "pixel_goal.py speed"),
)

BY_HAND = ("docs/figures/design.svg", "docs/figures/view_episodes.png")  # a drawing, a picture of a browser


def state(figure: Figure, commits: dict[str, dict[str, str]], root: Path) -> str:
    """Why a figure is stale; empty where it is current. Raises CannotTell."""
    if figure.name not in commits:
        return "it was never made"
    entry = commits[figure.name]
    return why_stale(root, entry.get("same_at", entry["commit"]), figure.kind, figure.sources)


def is_in_readme(figure: Figure, root: Path) -> bool:
    text = (root / "README.md").read_text("utf-8")
    return any(output in text for output in figure.outputs)


def lacks(figure: Figure) -> bool:
    """Whether what the figure needs is not here."""
    if figure.needs.startswith((".", "models/")):
        return not (ROOT / figure.needs).exists()
    return bool(figure.needs) and importlib.util.find_spec(figure.needs) is None


def print_list(figures: list[Figure]) -> None:
    """A line for each figure."""
    commits = read_commits(ROOT)
    print(f"{'figure':20} {'minutes':>7}  {'commit':8} state")
    for figure in figures:
        try:
            why = state(figure, commits, ROOT)
        except CannotTell as error:
            said = f"cannot tell: {error}"
        else:
            said = f"stale: {why}" if why else "current"
        readme = ", in README.md" if is_in_readme(figure, ROOT) else ""
        needs = f", needs {figure.needs}" if lacks(figure) else ""
        commit = commits.get(figure.name, {}).get("commit", "")
        print(f"{figure.name:20} {figure.minutes:7g}  {commit:8} {said}{readme}{needs}")


class Failed(Exception):
    """A command of a figure ended with another exit status than 0."""


class Commands:
    """Which commands have ended, and with the code of which commit they began."""

    def __init__(self):
        self.path = ROOT / RUNS / "commands.json"
        self.of = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}

    def note(self, command: str, commit: str, ended: bool) -> None:
        self.of[command] = dict(commit=commit, ended=ended)
        writing = self.path.with_suffix(".writing")
        writing.write_text(json.dumps(self.of, indent=1) + "\n", "utf-8")
        writing.replace(self.path)

    def begin(self, command: str, figure: Figure, head: str) -> str:
        """The commit that a command is of. What it left behind of code that computes otherwise is removed."""
        if command in self.of:
            commit = self.of[command]["commit"]
            if not why_stale(ROOT, commit, figure.kind, figure.sources):
                return commit
        folder = re.search(rf"--run-dir ({RUNS}/\S+)", command)
        if folder:
            shutil.rmtree(ROOT / folder[1], ignore_errors=True)
        self.note(command, head, False)
        return head


def make(figure: Figure, head: str) -> str:
    """Run the commands of a figure that have not ended.  -> the commit that the first of them is of"""
    commands, began = Commands(), ""
    for command in figure.commands:
        commit = commands.begin(command, figure, head)
        began = began or commit
        if not commands.of[command]["ended"]:
            run(command, ROOT / RUNS / f"{figure.name}.log")
            commands.note(command, commit, True)
    return began


def run(command: str, log: Path) -> None:
    """One thread; `python` is the one that runs this. What the command prints is added to the log."""
    environment = os.environ | dict(
        OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT),  # for scripts that a diff has made, which import envs
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {command}", file=file, flush=True)
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, stdout=file, stderr=file)
    if done.returncode:
        last = (log.read_text("utf-8", "replace").strip().splitlines() or [""])[-1]
        where = log.relative_to(ROOT)
        raise Failed(f"exit status {done.returncode} of {command}\n    {last} (more in {where})")


def chosen(options: argparse.Namespace) -> list[Figure]:
    """The figures that are asked for, the cheapest first."""
    known = {figure.name for figure in FIGURES}
    for name in options.only or ():
        if name not in known:
            raise SystemExit(f"error: --only {name}: expected some of {', '.join(sorted(known))}")
    figures = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    if options.readme:
        figures = [figure for figure in figures if is_in_readme(figure, ROOT)]
    return sorted(figures, key=lambda figure: figure.minutes)


def stale_ones(figures: list[Figure]) -> list[Figure]:
    """Those to be made. What cannot be made here, or would not be of its commit, is named and left out."""
    commits, found = read_commits(ROOT), []
    for figure in figures:
        if not state(figure, commits, ROOT):
            continue
        changed = git(ROOT, "status", "--porcelain", "--", *figure.sources).splitlines()
        if lacks(figure):
            print(f"{figure.name}: left out, {figure.needs} is not here")
        elif changed:
            print(f"{figure.name}: left out, {changed[0][3:]} is not committed: no commit names its code")
        else:
            found.append(figure)
    return found


def refresh(figures: list[Figure], budget: float) -> bool:
    """-> whether all commands went well"""
    from tqdm import tqdm
    head = git(ROOT, "rev-parse", "--short", "HEAD").strip()
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    for name in ("envs", "models"):  # beside the variants, which look for them there
        link = ROOT / RUNS / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    began, well = time.monotonic(), True
    with tqdm(figures, unit="figure", disable=None) as bar:
        for figure in bar:
            minutes = (time.monotonic() - began) / 60
            if minutes + figure.minutes > budget:
                tqdm.write(f"{figure.name}: left out, --budget has less than {figure.minutes:g} minutes left")
                break
            bar.set_description(figure.name)
            started = time.monotonic()
            try:
                commit = make(figure, head)
            except Failed as error:
                tqdm.write(f"{figure.name}: {error}")
                well = False
                continue
            write_commits(ROOT, read_commits(ROOT) | {figure.name: dict(commit=commit)})
            tqdm.write(f"{figure.name}: made, in {(time.monotonic() - started) / 60:.1f} minutes")
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="make nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these figures")
    parser.add_argument("--readme", action="store_true", help="of those in README.md")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES",
                        help="begin no figure that would not end by then")
    options = parser.parse_args()
    figures = chosen(options)
    if options.list:
        return print_list(figures)
    try:
        well = refresh(stale_ones(figures), options.budget)
    except CannotTell as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
