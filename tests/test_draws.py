"""No random number is used twice: within a rollout, from one to the next, from run to run."""

import asyncio
from pathlib import Path

import pytest
import torch

import envs
import grpo_llm
import ppo_llm
import sft
from envs.countdown import Countdown
from tests.run_folders import episodes, train

RL = [grpo_llm, ppo_llm]


class Listener(grpo_llm.Engine):
    """A sampler that says the same each time and keeps the seeds that it is given."""

    def __init__(self, tokenizer):
        self.eos, self.seeds, self.reply = [tokenizer.eos_token_id], [], [5, tokenizer.eos_token_id]

    async def serve(self):
        await asyncio.Event().wait()

    async def sample(self, prompt_ids, temperature, seed=0, order=()):
        self.seeds.append(seed)
        return self.reply, [0.0] * len(self.reply)


class Flaky(Countdown):
    """Two turns; the first attempt at the first task fails in the second one."""

    attempts = 0

    def start(self, task, seed):
        self.attempts += 1
        return Turns(self.attempts == 1)


class Turns(envs.Episode):
    def __init__(self, fails):
        self.turns, self.fails = 0, fails

    def step(self, reply):
        self.turns += 1
        if self.turns == 2 and self.fails:
            raise RuntimeError("this once")
        answer = [] if self.turns == 2 else [{"role": "user", "content": "1 2 -> 3"}]
        return envs.Step(answer, 0.0, not answer, False, {"correct": 0.0})


@pytest.mark.parametrize("script", RL)
def test_no_two_replies_of_a_rollout_or_of_another_one_share_their_numbers(script, countdown_tiny, capsys):
    _, tokenizer = countdown_tiny
    listener, env = Listener(tokenizer), Flaky(Countdown.Config())
    tasks = [env.task("train", index) for index in range(3)]
    for seed, kind, first in ((1, "train", 0), (1, "train", 3), (1, "val", 0), (2, "train", 0)):
        args = script.Args(seed=seed)
        script.rollout(listener, tokenizer, env, tasks, 2, 1.0, args, lambda r: 0.0, kind, first)
    assert len(listener.seeds) == 4 * 3 * 2 * 2 + 2 == len(set(listener.seeds))
    assert "this once" in capsys.readouterr().err


class One(Countdown):
    """All tasks are the same but for their names."""

    def task(self, split, index):
        task = super().task(split, 0)
        return envs.Task(f"{split}-{index}", task.source, task.messages, task.data)


@pytest.mark.parametrize("script", RL)
def test_the_same_prompt_gets_other_replies_in_each_iteration(script, tmp_path):
    """... of a policy that does not move; and the same ones in each evaluation."""
    folder = train(script, tmp_path / "run", env=f"{Path(__file__)}:One", env_kwargs=("test_tasks=2",),
                   iterations=2, eval_every=1, log_episodes=1.0, learning_rate=1e-12, temperature=3.0,
                   eval_temperature=3.0)
    said = {name: [episode["messages"][-1]["content"] for episode in episodes(folder, name)[0]]
            for name in ("train_step_000001", "train_step_000002", "val_step_000000", "val_step_000002")}
    train_1, train_2, val_0, val_2 = said.values()
    assert all(one != other for one, other in zip(train_1, train_2, strict=True))
    assert val_0 == val_2


@pytest.mark.parametrize("script", RL)
def test_minibatches_are_drawn_anew_in_each_epoch_and_iteration(script, tmp_path, monkeypatch):
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda size: drawn.append(randperm(size)) or drawn[-1])
    own = dict(prompts_per_iteration=6) if script is grpo_llm else dict(
        prompts_per_iteration=16, critic="none")
    train(script, tmp_path / "run", iterations=2, epochs=2, minibatches=2, eval_every=0, eval_tasks=1, **own)
    assert len(drawn) == 4 == len({tuple(order.tolist()) for order in drawn})
    assert len(set(map(len, drawn))) == 1  # or this would say nothing


@pytest.mark.parametrize("script", [*RL, sft])
def test_tasks_come_in_a_new_order_in_each_epoch(script):
    first, second = ([script.task_index(i + 10 * e, 1, 10) for i in range(10)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [script.task_index(i, 2, 10) for i in range(10)] != first
