"""No random number is used twice: within a rollout, from one to the next, from run to run."""

import itertools
import zlib
from pathlib import Path

import pytest

import envs
import grpo_llm
import ppo_llm
import sft
from envs.countdown import Attempt, Countdown
from tests.run_folders import TINY, episodes, train
from tests.test_rollout import Speaker, byte_tokenizer, failing

RL = pytest.mark.parametrize("script", [grpo_llm, ppo_llm])


@RL
def test_no_two_replies_of_a_rollout_or_of_another_one_share_their_numbers(script, capsys):
    """Of one to three turns; the first attempt at a task fails in its second one."""
    speaker, world = Speaker(byte_tokenizer(), lambda text: "the same each time"), failing(1)
    tasks = [world.task("train", index) for index in range(3)]
    for seed, kind, first in ((1, "train", 0), (1, "train", 3), (1, "val", 0), (2, "train", 0)):
        args = script.Args(seed=seed, chat_template="plain")
        sampling = script.Sampling(1.0, (seed, kind))
        script.rollout(speaker, speaker.tokenizer, world, tasks, 2, sampling, args, lambda r: 0.0, first)
    seeds = [request.sampling.seed for request in speaker.asked]
    assert len(seeds) == 4 * 2 * (1 + 2 + 3) + 2 == len(set(seeds))
    assert "lost" in capsys.readouterr().err


class One(Countdown):
    """All tasks are the same but for their names."""

    def task(self, split, index):
        task = super().task(split, 0)
        return envs.Task(f"{split}-{index}", task.source, task.messages, task.data)


def checksum(r):
    """A reward that tells any two replies apart, so that each group carries a signal."""
    return zlib.crc32(r.messages[-1]["content"].encode()) / 2**32


def nothing(r):
    """A reward with which no round of --dynamic-sampling is enough."""
    return 0.0


def test_tasks_that_sft_samples_in_different_calls_have_draws_of_their_own(tmp_path, monkeypatch):
    """Two calls of four equal tasks each, and the same again in the next evaluation."""
    heard, start = [], Countdown.start
    monkeypatch.setattr(Countdown, "start", lambda env, task, seed: (
        heard.append(task.id), start(env, task, seed))[1])
    monkeypatch.setattr(Attempt, "step", lambda attempt, reply, step=Attempt.step: (
        heard.append(reply), step(attempt, reply))[1])
    train(sft, tmp_path / "run", env=f"{Path(__file__)}:One", env_kwargs=("test_tasks=8",), model=TINY,
          steps=1, eval_tasks=8, eval_samples=3, microbatch_tokens=30, max_response_tokens=10,
          learning_rate=1e-12)
    replies = {}
    for name, reply in zip(heard[::2], heard[1::2], strict=True):
        replies.setdefault(name, []).append(reply)
    assert len(replies) == 8 and heard[:len(heard) // 2] == heard[len(heard) // 2:]
    calls = [[replies[f"test-{n}"] for n in numbers] for numbers in (range(4), range(4, 8))]
    assert calls[0] != calls[1]


@RL
def test_the_same_prompt_gets_other_replies_in_each_iteration_and_round(script, tmp_path):
    """... of a policy that does not move; and the same ones in each evaluation."""
    rounds = dict(dynamic_sampling=1, reward_fn=f"{__file__}:nothing") if script is grpo_llm else {}
    folder = train(script, tmp_path / "run", env=f"{Path(__file__)}:One", env_kwargs=("test_tasks=2",),
                   iterations=2, eval_every=1, log_episodes=1.0, learning_rate=1e-12, temperature=3.0,
                   eval_temperature=3.0, **rounds)
    train_1, train_2, val_0, val_2 = (
        [episode["messages"][-1]["content"] for episode in episodes(folder, name)[0]]
        for name in ("train_step_000001", "train_step_000002", "val_step_000000", "val_step_000002"))
    size = len(train_1) // (1 + len(rounds) // 2)
    parts = [replies[start:start + size] for replies in (train_1, train_2)
             for start in range(0, len(replies), size)]
    assert len(parts) == (4 if rounds else 2)
    for one, other in itertools.combinations(parts, 2):
        equal = [reply for reply, again in zip(one, other, strict=True) if reply == again]
        assert not equal, f"drawn with the same numbers: {equal}"
    assert val_0 == val_2
