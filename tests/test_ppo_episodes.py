"""What ppo_llm.py learns from an episode: rewards at turns, masks, failed environments, sub-agents."""

import copy
import itertools
import math
import random
import statistics
import types

import pytest
import torch

import envs
import ppo_llm
from envs import Step, Task
from ppo_llm import Args, Segment
from tests.run_folders import episodes, full_forward, train
from tests.test_ppo_maths import Recorder, policy_and_critic
from tests.test_rollout import PROBLEMS, Speaker, World, over, reply_ids, wrong

SMALL = dict(iterations=1, prompts_per_iteration=24, minibatches=1, eval_tasks=1, eval_samples=1,
             log_episodes=1.0, critic="none", gae_lambda=1.0)


def chosen(segments, name):
    """The numbers that stand at the policy's tokens."""
    return [x for s in segments for x, m in zip(s[name], s["response_mask"], strict=True) if m]


def check_whitened(learned):
    """The segments' advantages are 0 at the environment's tokens, whitened over all others."""
    for s in learned:
        assert not any(x for name in ("rewards", "returns", "advantages")
                       for x, m in zip(s[name], s["response_mask"], strict=True) if not m)
    advantages, returns = (chosen(learned, name) for name in ("advantages", "returns"))
    mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
    assert advantages == pytest.approx([(x - mean) / deviation for x in returns], abs=1e-6)


# Where rewards land


@pytest.mark.parametrize("given", ["list", "number"])
def test_a_reward_is_at_the_last_token_of_its_turn_and_each_token_has_what_is_still_to_come(
        tmp_path, given):
    """Up to five turns in one or more segments; the last reply may be one that was cut."""
    code = tmp_path / "custom.py"
    code.write_text("""
from tests.two_turn import TwoTurn
class Five(TwoTurn):
    replies = 5
def list(r): return [(-2.0) ** n for n, _ in enumerate(r.steps)]
def number(r): return 0.5 - len(r.turns)
""")
    folder = train(ppo_llm, tmp_path / "run", **SMALL, env=f"{code}:Five", reward_fn=f"{code}:{given}",
                   max_context_tokens=64)
    played, summary = episodes(folder, "train_step_000001")

    for episode in played:
        turns, segments = episode["turns"], episode["segments"]
        heard = len(turns) - (episode["termination"] == "length")  # what was cut has no step, so no reward
        rewards = [(-2.0) ** n for n in range(heard)] + [0.0] * (len(turns) - heard)
        if given == "number":
            rewards = [0.0] * (len(turns) - 1) + [0.5 - len(turns)]

        expected = []
        for turn, reward in zip(turns, rewards, strict=True):
            expected += [0.0] * (turn["end"] - turn["start"] - 1) + [reward]
        assert chosen(segments, "rewards") == expected and episode["reward"] == sum(expected)
        to_come = list(itertools.accumulate(reversed(expected)))[::-1]
        assert chosen(segments, "returns") == pytest.approx(to_come, abs=1e-12)

    check_whitened([s for episode in played for s in episode["segments"]])
    assert any(len(episode["segments"]) > 1 for episode in played)
    assert {"done", "length"} <= {episode["termination"] for episode in played}
    assert max(len(episode["turns"]) for episode in played) > 3
    assert summary["reward_sum"] == pytest.approx(sum(episode["reward"] for episode in played))


# What the environment wrote


def test_nothing_is_learned_from_what_the_environment_wrote(monkeypatch, countdown_tiny):
    """Its tokens have advantages and returns of 0, and no number that stands at them matters."""
    monkeypatch.setattr(ppo_llm, "MAX_GRAD_NORM", 1e9)
    args = Args(kl_coef=0.1, max_context_tokens=60)
    policy, critic = policy_and_critic(copy.deepcopy(countdown_tiny[0]), args)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)

    tokenizer, env = countdown_tiny[1], envs.make("tests/two_turn.py:TwoTurn")
    env.replies = 8
    task = env.task("train", 0)
    said = iter([text for text in [wrong(env)] * 7 + [env.solution(task)] for _ in range(2)])
    engine = Speaker(tokenizer, lambda text: reply_ids(tokenizer, next(said)))
    rollouts = ppo_llm.rollout(engine, tokenizer, env, [task], 2, 1.0, args,
                               lambda r: [0.1 * n for n in range(len(r.steps))])
    played = ppo_llm.trainable_episodes(rollouts, args)
    segments = [segment for episode in played for segment in episode]
    assert len(played) == 2 and len(segments) > 2

    def store():
        for name in ("old_logprobs", "ref_logprobs"):
            ppo_llm.store_logprobs(policy, played, name, args, tokenizer.pad_token_id)
        for s in segments:  # so that there is a penalty
            s.ref_logprobs = [p - 0.1 * m for p, m in zip(s.ref_logprobs, s.response_mask, strict=True)]
        ppo_llm.store_values(critic, played, args, tokenizer.pad_token_id)

    def spoil(*names):
        for s in segments:
            for name in names:
                numbers = zip(getattr(s, name), s.response_mask, strict=True)
                setattr(s, name, [x if m else noise.uniform(-5, 5) for x, m in numbers])

    def learned():
        """All that an iteration logs, learns and learns from."""
        metrics = ppo_llm.estimate_advantages(played, 0.1, args)
        targets = [[*zip(s.advantages, s.returns, s.response_mask, strict=True)] for s in segments]
        spoil("advantages", "returns")
        gradients = []
        for model, terms in ((policy, ppo_llm.policy_terms), (critic, ppo_llm.value_terms)):
            recorder = Recorder(model)
            torch.manual_seed(1)
            metrics |= ppo_llm.update(model, recorder, 0.0, terms, played, 1, 1, args,
                                      tokenizer.pad_token_id)[0]
            gradients += recorder.steps
        return metrics, targets, gradients

    noise = random.Random(1)
    store()
    before = learned()
    for advantage, target, mask in itertools.chain(*before[1]):
        assert bool(advantage) == bool(target) == bool(mask)
    spoil("old_logprobs", "ref_logprobs", "rollout_logprobs", "values")
    after = learned()
    assert before[:2] == after[:2]
    for one, other in zip(before[2], after[2], strict=True):
        assert torch.equal(one, other) and one.norm() > 1e-3


# Who learns


PROBLEM = [{"role": "user", "content": PROBLEMS[3]}]


class Parents(World):
    """Each task calls two sub-agents, the second of which fails; so does every third task, after them."""

    def __init__(self):
        super().__init__(self.behave)

    def task(self, split, index):
        return Task(f"t{index}", "world", PROBLEM, {})

    def behave(self, episode, reply):
        name, _, child = episode.task.id.partition("/")
        if isinstance(reply, list):
            return over(int(name[1:]) % 7 / 8) if int(name[1:]) % 3 else 1 / 0
        if child:
            return over(9.0) if child == "0" else 1 / 0
        tasks = [Task(f"{name}/{n}", "world", PROBLEM, {}) for n in range(2)]
        return Step([], 0.0, False, False, {}, tuple((task, self.start(task)) for task in tasks))


@pytest.mark.parametrize("told", [False, True])
def test_failed_environments_teach_nothing_and_sub_agents_what_their_parent_earns_if_told_to(
        monkeypatch, tmp_path, capsys, told):
    monkeypatch.setattr(envs, "make", lambda name, **options: Parents())
    folder = train(ppo_llm, tmp_path / "run", **SMALL, train_sub_agents=told)
    played, _ = episodes(folder, "train_step_000001")
    learned, ends = [], set()
    for episode in played:
        for member in (episode, *episode["sub_agents"]):
            teaches = "error" not in (episode["termination"], member["termination"])
            ends.add((member is episode, episode["termination"], member["termination"]))
            for segment in member["segments"]:
                if teaches and (told or member is episode):
                    learned.append(segment)
                    assert chosen([segment], "returns") == [episode["reward"]] * sum(segment["response_mask"])
                else:
                    assert segment["advantages"] is segment["returns"] is segment["old_logprobs"] is None
    check_whitened(learned)
    assert {(True, "done", "done"), (True, "error", "error"), (False, "done", "done"),
            (False, "done", "error"), (False, "error", "done")} <= ends


# All of it: problems with a known optimum


VOCAB, PROMPT = 8, [1, 3, 4]
TOKENIZER = types.SimpleNamespace(pad_token_id=0, eos_token_id=2)


def probability(model, ids):
    with torch.no_grad():
        return float(full_forward(model, Segment(PROMPT, ids), 1.0)[0].sum().exp())


def every_reply(length):
    replies = [(token,) for token in range(VOCAB)]
    pairs = [a + b for a, b in itertools.product(replies, replies) if a != (2,)]  # 2 is eos
    return replies if length == 1 else [(2,), *pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "reward_of", "best"), [
    (1, lambda ids: ids[0] / 7, [7]), (2, lambda ids: 1.0 if ids == (5, 3) else -0.5, [5, 3])])
def test_ppo_finds_the_best_reply_and_the_critic_its_worth(random_llama, length, reward_of, best):
    args = Args(entropy_coef=0.0)
    base = random_llama(vocab_size=VOCAB, dtype=torch.float32, num_hidden_layers=1, hidden_size=32,
                        initializer_range=0.02)
    policy, critic = policy_and_critic(base, args)
    optimizer, critic_optimizer = (torch.optim.AdamW(module.parameters(), weight_decay=0.0)
                                   for module in (policy, critic))

    def iteration(policy_learns):
        played = []
        for ids, logprobs in ppo_llm.generate(policy, [PROMPT] * 128, length, 1.0, TOKENIZER):
            segment = Segment(PROMPT)
            segment.append(ids, 1, logprobs)
            segment.rewards[-1] = reward_of(tuple(ids))
            played.append([segment])
        ppo_llm.store_logprobs(policy, played, "old_logprobs", args, 0)
        ppo_llm.store_values(critic, played, args, 0)
        ppo_llm.estimate_advantages(played, 0.0, args)
        ppo_llm.update(critic, critic_optimizer, 2e-3, ppo_llm.value_terms, played, 2, 1, args, 0)
        if policy_learns:
            ppo_llm.update(policy, optimizer, 1e-2, ppo_llm.policy_terms, played, 2, 1, args, 0)

    assert probability(policy, best) < 2 / VOCAB**length
    torch.manual_seed(1)
    for policy_learns in (False, True):  # the critic alone, then both
        for _ in range(20):
            iteration(policy_learns)
        worth = math.fsum(probability(policy, list(ids)) * reward_of(ids) for ids in every_reply(length))
        segment = Segment(PROMPT, best, [1] * length)
        ppo_llm.store_values(critic, [[segment]], args, 0)
        assert segment.values[0] == pytest.approx(worth, abs=0.1)
    assert probability(policy, best) > 0.95
