"""The equations of ppo_llm.py against float64 references, written token by token, as the papers have them."""

import copy
import dataclasses
import itertools
import math
import random
import statistics
import types

import numpy as np
import pytest
import torch

import envs
import ppo_llm
from envs import BadInput
from ppo_llm import Args, Critic, Rollout, Segment
from tests.run_folders import full_forward, gradients, same_tree

CLIP = 0.2


# Tables of numbers, and episodes with several segments


def random_mask(rng, size):
    """The policy's at both ends, the environment's somewhere between them."""
    mask = [1] + [rng.choice([0, 1, 1]) for _ in range(size - 2)] + [1]
    mask[rng.randrange(1, size - 1)] = 0
    return mask


def random_numbers(rng, mask):
    """All that a segment holds beside its ids; values are computed at the environment's tokens as well."""
    def chosen(scale):
        return [m * rng.gauss(0, scale) for m in mask]

    old = [-3 * rng.random() * m for m in mask]
    return dict(
        response_mask=mask, old_logprobs=old, values=[rng.gauss(0, 1 if m else 100) for m in mask],
        rollout_logprobs=[x + noise for x, noise in zip(old, chosen(0.3), strict=True)],
        ref_logprobs=[x + noise for x, noise in zip(old, chosen(0.5), strict=True)],
        rewards=[x * rng.choice([0, 1]) for x in chosen(1.0)], returns=chosen(1.0), advantages=chosen(1.0))


def random_segment(rng, prompt, vocab=37):
    size = rng.randrange(4, 10)
    ids = [rng.randrange(3, vocab) for _ in range(size)]
    return Segment(prompt, ids, **random_numbers(rng, random_mask(rng, size)))


def random_episodes(seed, vocab=37, shared=True):
    """Episodes of one to three segments; some prompts and some ids are equal, the numbers never are."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(size)] for size in (1, 4, 7, 2, 5, 6, 3, 8, 4)]
    draw = iter([prompt for prompt in prompts[:3] for _ in range(3)] if shared else prompts)
    episodes = [[random_segment(rng, next(draw), vocab) for _ in range(size)] for size in (1, 2, 3, 1, 2)]
    first = episodes[0][0]
    episodes[-1].append(dataclasses.replace(first, **random_numbers(rng, first.response_mask)))
    if shared:  # and equal ids of which the policy chose others
        episodes.append([dataclasses.replace(first, **random_numbers(rng, [1] * len(first.response_ids)))])
    return episodes


def flat(episodes, name=None):
    """All segments, or one of their lists joined."""
    segments = [segment for episode in episodes for segment in episode]
    return np.array([x for segment in segments for x in getattr(segment, name)]) if name else segments


def k3(log_ratio):
    """arXiv:2402.03300, eq. 4."""
    return math.exp(log_ratio) - log_ratio - 1


# Generalised advantage estimation


def reference_gae(rewards, values, mask, gamma, lam):
    """arXiv:1506.02438, eq. 16 in its first form: the mean of the k-step advantages, weighted by lambda^k.

    All those that reach the end are equal, and so are one with the weight of all.
    """
    steps, result = [t for t, m in enumerate(mask) if m], [0.0] * len(mask)
    for i, t in enumerate(steps):
        left = steps[i:]
        for k in range(1, len(left) + 1):
            k_step = sum(gamma**j * rewards[u] for j, u in enumerate(left[:k])) - values[t]
            k_step += gamma**k * values[left[k]] if k < len(left) else 0.0
            result[t] += k_step * lam**(k - 1) * (1 - lam if k < len(left) else 1)
    return result


def gae_table(seed, rows=6, width=11):
    """rewards, values, mask (B, T): large garbage outside the mask, no step at all in the last row."""
    rng = random.Random(seed)
    padding = [i % 6 for i in range(rows - 1)]
    mask = [random_mask(rng, width - n) + [0] * n for n in padding] + [[0] * width]
    rewards, values = ([[rng.gauss(0, 1 if m else 1e3) for m in row] for row in mask] for _ in range(2))
    return rewards, values, mask


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_gae_is_the_weighted_mean_of_all_k_step_advantages(gamma, lam):
    for seed in range(4):
        table = gae_table(seed)
        tensors = (torch.tensor(x, dtype=torch.float64) for x in table)
        found = ppo_llm.gae(*tensors, gamma, lam).tolist()
        for row, *columns in zip(found, *table, strict=True):
            assert row == pytest.approx(reference_gae(*columns, gamma, lam), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_a_perfect_critic_leaves_no_advantage(gamma, lam):
    rewards, values, mask = gae_table(6)
    for row, to_go, chosen in zip(rewards, values, mask, strict=True):
        steps = [t for t, m in enumerate(chosen) if m]
        for i, t in enumerate(steps):
            to_go[t] = sum(gamma**j * row[u] for j, u in enumerate(steps[i:]))
    found = ppo_llm.gae(*(torch.tensor(x, dtype=torch.float64) for x in (rewards, values, mask)), gamma, lam)
    assert found.abs().max() < 1e-12


# Whitening


def test_whitening_takes_mean_and_population_deviation_of_the_chosen_alone():
    x, _, mask = gae_table(7)
    found = ppo_llm.whiten(*(torch.tensor(y, dtype=torch.float64) for y in (x, mask))).tolist()
    places = [(b, t) for b, row in enumerate(mask) for t, m in enumerate(row) if m]
    chosen = [x[b][t] for b, t in places]
    mean, deviation = statistics.fmean(chosen), statistics.pstdev(chosen)
    expected = [[(value - mean) / deviation * m for value, m in zip(*rows, strict=True)]
                for rows in zip(x, mask, strict=True)]
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_are_whitened_to_nothing(dtype):
    _, _, mask = gae_table(8, rows=40)
    mask, rounded = torch.tensor(mask, dtype=dtype), False
    for value in (0.1, 0.7, -1.3, 1 / 3):
        x = torch.full_like(mask, value)
        rounded |= (x * mask).sum() / mask.sum() != x[0, 0]
        assert ppo_llm.whiten(x, mask).abs().max() < 5e-3
    assert rounded  # for some of them the mean is not exact, and there is a difference to blow up


# Losses


def loss_table(seed, size=200):
    """Three rows of numbers, of which the second is near the first."""
    rng = random.Random(seed)
    first = [rng.gauss(-1, 1) for _ in range(size)]
    return first, [x + rng.gauss(0, 0.5) for x in first], [rng.gauss(0, 1) for _ in range(size)]


def check_loss(found, row, others, of_token, binds):
    """The script's losses and flags at `row`, against a formula for one token; no gradient where it binds."""
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    per_token, flags = found(x, *(torch.tensor(other, dtype=torch.float64) for other in others))
    per_token.sum().backward()
    tokens = list(zip(row, *others, strict=True))
    assert per_token.tolist() == pytest.approx([of_token(*token) for token in tokens], abs=1e-12)
    assert flags.tolist() == [binds(*token) for token in tokens] and set(flags.tolist()) == {True, False}
    assert not x.grad[flags].any() and x.grad[~flags].all()


def test_the_policy_loss_is_the_clipped_surrogate():
    old, new, advantages = loss_table(1)

    def of_token(new, old, advantage):  # arXiv:1707.06347, eq. 7
        ratio = math.exp(new) / math.exp(old)
        return -min(ratio * advantage, min(max(ratio, 1 - CLIP), 1 + CLIP) * advantage)

    def binds(new, old, advantage):
        ratio = math.exp(new - old)
        return ratio > 1 + CLIP and advantage > 0 or ratio < 1 - CLIP and advantage < 0

    check_loss(lambda *x: ppo_llm.clipped_policy_loss(*x, CLIP), new, (old, advantages), of_token, binds)


def test_the_value_loss_is_the_larger_of_the_free_and_the_clipped_error():
    old, values, returns = loss_table(1)

    def of_token(value, old, target):
        return max((value - target)**2, (min(max(value, old - 0.3), old + 0.3) - target)**2)

    def binds(value, old, target):  # it has left for where the return is, which earns no more
        return value > old + 0.3 and target > (value + old + 0.3) / 2 \
            or value < old - 0.3 and target < (value + old - 0.3) / 2

    check_loss(lambda *x: ppo_llm.clipped_value_loss(*x, 0.3), values, (old, returns), of_token, binds)


# The penalty and its controller


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_both_penalties_are_kl_to_the_reference_in_expectation(kind):
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        log_p, log_q = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
        p, q = log_p.exp().tolist(), log_q.exp().tolist()
        estimates = ppo_llm.kl_penalty(log_p, log_q, kind)
        expected = {"k1": [math.log(a / b) for a, b in zip(p, q, strict=True)],
                    "k3": [b / a - 1 - math.log(b / a) for a, b in zip(p, q, strict=True)]}[kind]
        assert estimates.tolist() == pytest.approx(expected, rel=1e-9)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert float((log_p.exp() * estimates).sum()) == pytest.approx(kl, rel=1e-9) and kl > 0.01


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_in_the_reward_k1_descends_kl_and_k3_the_difference_of_its_two_directions(kind):
    """So k3 does not lead back to the reference: near it, the two directions have the same gradient."""
    generator = torch.Generator().manual_seed(2)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    log_p, log_q = logits.requires_grad_().log_softmax(-1), other.log_softmax(-1)
    penalty = ppo_llm.kl_penalty(log_p, log_q, kind).detach()
    found, = torch.autograd.grad((log_p.exp().detach() * penalty * log_p).sum(), logits, retain_graph=True)
    kl, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    expected, = torch.autograd.grad(kl if kind == "k1" else kl - reverse, logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_coefficient_follows_its_proportional_controller():
    for kl, target in itertools.product((-0.1, 0.0, 0.45, 0.5, 0.55, 0.61, 0.9, 1.0, 1.1, 9.0), (1.0, 0.5)):
        error = np.clip((kl - target) / target, -0.2, 0.2)  # arXiv:1909.08593, section 2.2
        assert ppo_llm.adapt_kl_coef(0.3, kl, target) == pytest.approx(0.3 * (1 + 0.1 * error), rel=1e-12)


# From episodes to advantages


def reference_estimates(episodes, coef, args):
    """-> advantages before whitening, returns (lists over all tokens), metrics"""
    advantages, returns, scores, logprobs = [], [], [], []
    for episode in episodes:
        mask, values, old, ref, sampled, rewards = (flat([episode], name) for name in (
            "response_mask", "values", "old_logprobs", "ref_logprobs", "rollout_logprobs", "rewards"))
        steps = [(o, r, s) for o, r, s, m in zip(old, ref, sampled, mask, strict=True) if m]
        penalty = [o - r if args.kl_penalty == "k1" else k3(r - o) for o, r in zip(old, ref, strict=True)]
        penalised = rewards - coef * np.array(penalty) * mask
        row = np.array(reference_gae(penalised, values, mask, 1.0, args.gae_lambda))
        advantages, returns = [*advantages, *row], [*returns, *((row + values) * mask)]
        scores, logprobs = [*scores, sum(penalised)], [*logprobs, *steps]
    chosen = flat(episodes, "response_mask") > 0
    values = flat(episodes, "values")[chosen]
    table = dict(rewards=scores, advantages=np.array(advantages)[chosen], returns=np.array(returns)[chosen],
                 values=values)
    metrics = {f"critic/{name}/{of.__name__}": of(x) for name, x in table.items()
               for of in (np.mean, np.max, np.min)}
    ratios = np.array([math.exp(old - sampled) for old, _, sampled in logprobs])
    return np.array(advantages), np.array(returns), metrics | {
        "critic/vf_explained_var": 1 - np.var(table["returns"] - values) / np.var(table["returns"]),
        "train/kl_loss": np.mean([k3(ref - old) for old, ref, _ in logprobs]), "kl/coef": coef,
        "kl/k1": np.mean([old - ref for old, ref, _ in logprobs]),
        "mismatch/kl": np.mean([k3(old - sampled) for old, _, sampled in logprobs]),
        "mismatch/ratio_max": max(ratios), "mismatch/frac_capped": np.mean(ratios > ppo_llm.TIS_CAP)}


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_advantages_returns_and_metrics_of_episodes_with_several_segments(monkeypatch, lam, kind):
    monkeypatch.setattr(ppo_llm, "TIS_CAP", 1.2)
    args = Args(gae_lambda=lam, kl_penalty=kind, kl_coef=0.5)
    for seed in (1, 2, 3):
        episodes = random_episodes(seed)
        # The controller's coefficient counts, not the one that it started from.
        advantages, returns, expected = reference_estimates(episodes, 0.17, args)
        metrics = ppo_llm.estimate_advantages(episodes, 0.17, args)
        assert metrics == pytest.approx(expected, rel=1e-9) and 0 < metrics["mismatch/frac_capped"] < 1
        mask = flat(episodes, "response_mask")
        chosen = advantages[mask > 0]
        whitened = (advantages - chosen.mean()) / chosen.std() * mask
        assert flat(episodes, "advantages") == pytest.approx(whitened, abs=1e-6)
        assert flat(episodes, "returns") == pytest.approx(returns, rel=1e-9, abs=1e-12)
        for segment in flat(episodes):
            assert len(segment.advantages) == len(segment.returns) == len(segment.response_ids)


def test_without_a_coefficient_there_is_no_penalty_and_no_reference():
    episodes = random_episodes(4)
    scores = [sum(flat([episode], "rewards")) for episode in episodes]
    for segment in flat(episodes):
        segment.ref_logprobs = None
    metrics = ppo_llm.estimate_advantages(episodes, 0.0, Args(kl_coef=0.0))
    assert metrics["critic/rewards/mean"] == pytest.approx(statistics.fmean(scores))
    assert metrics["kl/k1"] == metrics["train/kl_loss"] == 0.0


def plain_segment(mask, rewards, values=None):
    """A segment of which only rewards and values matter."""
    zeros = [0.0] * len(mask)
    return Segment([3], [4] * len(mask), mask, zeros, rewards, zeros, values=values or zeros)


def test_a_reward_reaches_the_segments_before_its_own_and_no_other_episode():
    first, last = plain_segment([1, 0, 1], [0.0] * 3), plain_segment([1, 1], [0.0, 1.0])
    alone = plain_segment([1, 1], [0.0, 0.0])
    ppo_llm.estimate_advantages([[first, last], [alone]], 0.0, Args(gae_lambda=1.0))
    assert (first.returns, last.returns, alone.returns) == ([1.0, 0.0, 1.0], [1.0, 1.0], [0.0, 0.0])
    assert first.advantages[0] == first.advantages[2] == last.advantages[1] > 0 > alone.advantages[0]
    ppo_llm.estimate_advantages([[first], [last], [alone]], 0.0, Args(gae_lambda=1.0))
    assert first.returns == [0.0, 0.0, 0.0] and first.advantages[0] < 0 == first.advantages[1]


@pytest.mark.parametrize(("values", "explained"), [
    ([1.0, 1.0, 3.0, 3.0], 1.0), ([0.0] * 4, 0.0), ([2.0] * 4, 0.0), ([3.0, 3.0, 1.0, 1.0], -3.0)])
def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one(values, explained):
    episodes = [[plain_segment([1, 1], [0.0, reward], values[2 * i:2 * i + 2])]
                for i, reward in enumerate((1.0, 3.0))]
    metrics = ppo_llm.estimate_advantages(episodes, 0.0, Args(gae_lambda=1.0))
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1])
def test_equal_rewards_explain_nothing_whatever_the_critic_says(reward):
    rng, episodes = random.Random(1), []
    for _ in range(20):  # the returns (R - V) + V differ in their last bits
        size = rng.randrange(3, 9)
        zeros, values = [0.0] * size, [rng.gauss(0.3, 0.2) for _ in range(size)]
        episodes.append([Segment([3], [4] * size, [1] * size, zeros, [*zeros[1:], reward], zeros,
                                 values=values)])
    metrics = ppo_llm.estimate_advantages(episodes, 0.0, Args(gae_lambda=1.0))
    assert metrics["critic/vf_explained_var"] == 0.0


# Rewards of turns


def a_rollout(turns=((0, 0, 2), (0, 3, 5), (1, 0, 3))):
    segments = [plain_segment([1, 1, 0, 1, 1], [0.0] * 5), plain_segment([1, 1, 1], [0.0] * 3)]
    return Rollout(envs.Task("t", "s", [], {}), 0, (0, 0), "", segments=segments, turns=list(turns),
                   termination="done")


@pytest.mark.parametrize(("rewards", "first", "second", "total"), [
    ([1.0, 2.0, 4.0], [0, 1, 0, 0, 2], [0, 0, 4], 7), ((1, 2, 4), [0, 1, 0, 0, 2], [0, 0, 4], 7),
    (3.0, [0] * 5, [0, 0, 3], 3), (True, [0] * 5, [0, 0, 1], 1),
    ([1.5], [0, 1.5, 0, 0, 0], [0, 0, 0], 1.5), ([], [0] * 5, [0] * 3, 0)])
def test_a_turns_reward_is_at_its_last_token_a_single_one_at_the_last_turns(rewards, first, second, total):
    r = a_rollout()
    ppo_llm.set_reward(r, rewards)
    assert [segment.rewards for segment in r.segments] == [first, second] and r.reward == total


@pytest.mark.parametrize(("rewards", "total"), [([], 0.0), (-1.0, -1.0), ([-1.0], -1.0)])
def test_an_episode_without_a_turn_has_a_reward_and_no_token_for_it(rewards, total):
    r = a_rollout(turns=())
    ppo_llm.set_reward(r, rewards)
    assert r.reward == total and not any(any(segment.rewards) for segment in r.segments)


def test_rewards_for_no_turn_and_those_that_are_not_finite_are_refused():
    for turns, rewards in ((3, [0.0] * 4), (0, [0.0] * 2)):
        with pytest.raises(BadInput, match=f"{len(rewards)} rewards for {turns} turns"):
            ppo_llm.set_reward(a_rollout() if turns else a_rollout(turns=()), rewards)
    for rewards in (math.nan, [0.0, math.nan, 0.0], [math.inf, -math.inf]):
        ppo_llm.set_reward(r := a_rollout(), rewards)
        with pytest.raises(FloatingPointError, match="task t is"):
            ppo_llm.trainable_episodes([r], Args())


def test_episodes_in_which_the_policy_said_nothing_are_not_trained_on():
    r, silent = a_rollout(), a_rollout()
    silent.segments = [Segment([1])]
    r.segments.append(Segment([1]))
    assert ppo_llm.trainable_episodes([silent, r], Args()) == [r.segments[:2]]


# From segments to values and log-probabilities: the model is called


def critic_on(decoder, policy=None, seed=0):
    """A critic whose head has learned something."""
    critic = Critic(decoder, decoder.config.hidden_size, policy)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        critic.head.weight.normal_(generator=generator)
        critic.head.bias.normal_(generator=generator)
    return critic


def full_values(decoder, head, segment):
    """V before each token of a segment's response, alone and without a cache, in float64."""
    hidden = decoder(torch.tensor([segment.ids]), use_cache=False).last_hidden_state[0].double()
    values = hidden @ head.weight[0].double() + head.bias.double()
    return values[len(segment.prompt_ids) - 1:-1]


@pytest.mark.parametrize("budget", [10_000, 20, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_values_and_logprobs_are_those_of_each_sequence_alone(countdown_tiny, shared, budget):
    model, _ = countdown_tiny
    critic, args = critic_on(model.get_decoder()), Args(temperature=0.7, microbatch_tokens=budget)
    segments = flat(random_episodes(1, vocab=112, shared=shared))
    random.Random(2).shuffle(segments)
    ppo_llm.store_values(critic, [segments], args, 0)
    ppo_llm.store_logprobs(model, [segments], "old_logprobs", args, 0)
    for s in segments:
        with torch.no_grad():
            values = full_values(model.model, critic.head, s).tolist()
            logprobs = full_forward(model, s, 0.7)[0].tolist()
        assert s.values == pytest.approx(values, abs=1e-4) and statistics.pstdev(values) > 0.1
        assert s.old_logprobs == pytest.approx(
            [m * x for m, x in zip(s.response_mask, logprobs, strict=True)], abs=1e-4)


# Update: a whole minibatch


class Recorder(torch.optim.SGD):
    """Keeps each step's gradient."""

    def __init__(self, module):
        super().__init__([p for p in module.parameters() if p.requires_grad])
        self.steps = []

    def step(self):
        self.steps.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]).double())
        super().step()


def an_update(module, terms, episodes, args, rate=0.0, epochs=1, minibatches=1, frozen=False, norm=None):
    """-> the steps' gradients, the metrics, (minibatch, sum of KL, tokens) of each pass"""
    recorder, passes = Recorder(module), []

    def observed(module, batch, args):
        per_token, logged = terms(module, batch, args)
        kl, mask = logged.get("train/approx_kl", 0 * per_token).detach(), batch["response_mask"]
        passes.append((len(recorder.steps), float((kl * mask).sum()), float(mask.sum())))
        return per_token, logged

    torch.manual_seed(1)
    metrics, found, steps = ppo_llm.update(module, recorder, rate, observed, episodes, epochs, minibatches,
                                          args, 0, frozen)
    assert steps == len(recorder.steps) and all(p.grad is None for p in module.parameters())
    mean_norm = statistics.fmean(float(g.norm()) for g in recorder.steps) if steps else 0.0
    assert found == pytest.approx(norm or mean_norm, rel=1e-5)
    return recorder.steps, metrics, passes


def old_policy(model, episodes, temperature=0.7, noise=0.3):
    """Give the segments log-probabilities that the model has moved away from."""
    rng = random.Random(3)
    for s in flat(episodes):
        with torch.no_grad():
            logprobs = full_forward(model, s, temperature)[0].tolist()
        s.old_logprobs, s.rollout_logprobs = ([m * (x + rng.gauss(0, noise)) for x, m in zip(
            logprobs, s.response_mask, strict=True)] for _ in range(2))


def mean_over_tokens(episodes, of_segment, module):
    """of_segment gives loss and metrics at a segment's tokens.  -> gradient of the mean, means"""
    sums, tokens = {}, sum(flat(episodes, "response_mask"))
    for s in flat(episodes):
        chosen = torch.tensor(s.response_mask) > 0
        for name, x in of_segment(s).items():
            sums[name] = sums.get(name, 0.0) + x[chosen].sum() / tokens
    sums.pop("loss").backward()
    return gradients(module), {name: float(x.detach()) for name, x in sums.items()}


def reference_policy(model, args):
    def of_segment(s):
        new, entropy = full_forward(model, s, args.temperature)
        old, sampled, advantages = (torch.tensor(x, dtype=torch.float64) for x in (
            s.old_logprobs, s.rollout_logprobs, s.advantages))
        ratio, trust = torch.exp(new - old), torch.exp(old - sampled).clamp(max=ppo_llm.TIS_CAP)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -trust * torch.minimum(ratio * advantages, clipped * advantages)
        return {"loss": loss - args.entropy_coef * entropy, "train/policy_loss": loss,
                "train/entropy": entropy, "train/approx_kl": ratio - 1 - ratio.log(),
                "train/advantage": advantages,
                "train/clipfrac": (clipped * advantages < ratio * advantages).double()}
    return of_segment


def reference_critic(critic, args):
    def of_segment(s):
        values = full_values(critic.decoder or critic.policy[0].get_decoder(), critic.head, s)
        old, returns = (torch.tensor(x, dtype=torch.float64) for x in (s.values, s.returns))
        clip = ppo_llm.VALUE_CLIP
        clipped = torch.maximum(torch.minimum(values, old + clip), old - clip)
        errors = torch.maximum((values - returns)**2, (clipped - returns)**2)
        return {"loss": 0.5 * errors, "train/value_loss": 0.5 * errors, "critic/vf_loss": errors,
                "critic/vf_clipfrac": (errors > (values - returns)**2).double(),
                "critic/vpred_mean": values}
    return of_segment


def reference_both(both, args):
    policy, critic = (reference(module, args) for reference, module in zip(
        (reference_policy, reference_critic), both, strict=True))

    def of_segment(s):
        a, b = policy(s), critic(s)
        return a | b | {"loss": a["loss"] + ppo_llm.VALUE_COEF * b["loss"]}
    return of_segment


COMMON = dict(clip=CLIP, entropy_coef=0.05, temperature=0.7)


@pytest.fixture(autouse=True)
def gradients_as_they_are(monkeypatch):
    monkeypatch.setattr(ppo_llm, "MAX_GRAD_NORM", 1e9)


WHICH = pytest.mark.parametrize("which", ["policy", "critic", "both"])


def both_terms(both, batch, args):
    return ppo_llm.policy_terms(both[0], batch, args, both[1])


def policy_or_critic(random_llama, which):
    """-> module, terms, episodes, reference of the loss; "both": a policy, and a critic that shares it"""
    model, episodes = random_llama(), random_episodes(5)
    old_policy(model, episodes)
    if which == "policy":
        return model, ppo_llm.policy_terms, episodes, reference_policy
    critic = critic_on(model.get_decoder(), model if which == "both" else None)
    if which == "critic":
        return critic, ppo_llm.value_terms, episodes, reference_critic
    return torch.nn.ModuleList([model, critic]), both_terms, episodes, reference_both


@WHICH
def test_the_update_has_the_gradient_of_the_written_loss_however_it_is_cut(random_llama, which):
    module, terms, episodes, reference = policy_or_critic(random_llama, which)
    expected, means = mean_over_tokens(episodes, reference(module, Args(**COMMON)), module)
    assert all(0.05 < means[name] < 0.95 for name in means if "clipfrac" in name)
    for budget in (10_000, 20, 1):
        args = Args(**COMMON, microbatch_tokens=budget)
        (gradient,), metrics, passes = an_update(module, terms, episodes, args)
        assert len(passes) == 1 if budget == 10_000 else len(passes) >= 4
        assert (gradient - expected).norm() < 1e-5 * expected.norm()
        assert metrics == pytest.approx(means, rel=1e-4, abs=1e-6)


@WHICH
def test_each_epoch_is_cut_into_minibatches_that_add_up_to_it(random_llama, which):
    module, terms, episodes, _ = policy_or_critic(random_llama, which)
    args = Args(**COMMON)
    (whole,), metrics, _ = an_update(module, terms, episodes, args)
    steps, same, passes = an_update(module, terms, episodes, args, epochs=2, minibatches=3)
    assert len(steps) == len(passes) == 6 and same == pytest.approx(metrics, rel=1e-5)
    shares = [tokens / sum(flat(episodes, "response_mask")) for _, _, tokens in passes]
    assert len(set(shares)) > 1
    for epoch in (slice(0, 3), slice(3, 6)):
        total = sum(share * gradient for share, gradient in zip(shares[epoch], steps[epoch], strict=True))
        assert (total - whole).norm() < 1e-5 * whole.norm()
    assert not any(torch.allclose(a, b) for a in steps[:3] for b in steps[3:])  # another permutation


def test_the_gradient_is_clipped_by_its_global_norm_and_returned_before(monkeypatch, random_llama):
    module, terms, episodes, _ = policy_or_critic(random_llama, "policy")
    (free,), *_ = an_update(module, terms, episodes, Args(**COMMON))
    monkeypatch.setattr(ppo_llm, "MAX_GRAD_NORM", 0.01)
    (clipped,), *_ = an_update(module, terms, episodes, Args(**COMMON), norm=float(free.norm()))
    torch.testing.assert_close(clipped, 0.01 * free / free.norm(), rtol=1e-3, atol=1e-9)


@WHICH
def test_a_number_that_is_not_finite_stops_before_the_weights_change(random_llama, which):
    module, terms, episodes, _ = policy_or_critic(random_llama, which)
    for name in ("advantages", "returns"):
        getattr(episodes[0][0], name)[0] = math.nan
    recorder = Recorder(module)
    with pytest.raises(FloatingPointError):
        ppo_llm.update(module, recorder, 1.0, terms, episodes, 1, 1, Args(**COMMON), 0)
    assert not recorder.steps


@pytest.mark.parametrize("budget", [10_000, 12])
def test_target_kl_ends_the_updates_at_the_first_minibatch_that_exceeds_it(random_llama, budget):
    def run(target):
        model, episodes = random_llama(), random_episodes(5)
        args = Args(**COMMON, microbatch_tokens=budget, target_kl=target)
        ppo_llm.store_logprobs(model, episodes, "old_logprobs", args, 0)
        steps, _, passes = an_update(model, ppo_llm.policy_terms, episodes, args, 0.02, 2, 3)
        sums = [[(kl, tokens) for minibatch, kl, tokens in passes if minibatch == i] for i in range(6)]
        return steps, [sum(kl for kl, _ in x) / sum(tokens for _, tokens in x) for x in sums if x]

    every_step, kls = run(0.0)
    assert len(every_step) == len(kls) == 6 and kls[0] < 1e-9 < kls[1]
    ends = set()
    for target in (1e-9, *(factor * kl for kl in sorted(kls)[3::2] for factor in (0.99, 1.01))):
        steps, seen = run(target)
        end = next((i for i, kl in enumerate(kls) if kl > target), 6)
        assert seen == kls[:end + 1] and len(steps) == end
        assert all(map(torch.equal, steps, every_step))
        ends.add(end)
    assert len(ends) > 2 and {1, 6} <= ends


@WHICH
def test_a_frozen_update_measures_and_changes_nothing(random_llama, which):
    module, terms, episodes, _ = policy_or_critic(random_llama, which)
    before = copy.deepcopy(module.state_dict())
    _, metrics, _ = an_update(module, terms, episodes, Args(**COMMON), epochs=1, minibatches=2)
    steps, same, passes = an_update(module, terms, episodes, Args(**COMMON, target_kl=1e-9), 1.0, epochs=2,
                                    minibatches=2, frozen=True)
    assert steps == [] and len(passes) == 2  # one epoch measures all, and no target ends it
    assert same == metrics and all(map(math.isfinite, same.values()))
    same_tree(module.state_dict(), before)


# Critics


def policy_and_critic(base, args):
    """As main makes them: beneath two adapters lie the same tensors."""
    backbone = copy.deepcopy(base, {id(p): p for p in base.parameters()} if args.lora else None)
    policy = ppo_llm.add_lora(base, args) if args.lora else base
    return policy, ppo_llm.make_critic(policy, backbone, args)


def values_of(critic, args):
    segments = flat(random_episodes(5))
    ppo_llm.store_values(critic, [segments], args, 0)
    return [segment.values for segment in segments]


def train(module, terms, args):
    """-> names of the weights that moved, names of those that are trained"""
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad])
    ppo_llm.update(module, optimizer, 0.1, terms, random_episodes(5), 3, 1, args, 0)
    after = dict(module.named_parameters())
    return {name for name in after if not torch.equal(before[name], after[name])}, \
        {name for name, weight in after.items() if weight.requires_grad}


HEAD = {"head.weight", "head.bias"}
LORA = pytest.mark.parametrize("rank", [0, 4])


@LORA
def test_policy_and_a_critic_of_its_own_leave_each_other_alone(random_llama, rank):
    args = Args(lora_rank=rank)
    policy, critic = policy_and_critic(random_llama(dtype=torch.float32), args)
    assert not any(map(any, values_of(critic, args)))  # at first
    pairs = ((critic, ppo_llm.value_terms, policy), (policy, ppo_llm.policy_terms, critic))
    for module, terms, other in pairs:
        before = copy.deepcopy(other.state_dict())
        moved, trained = train(module, terms, args)
        adapters = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
        everything = {name for name, _ in module.named_parameters()}
        assert moved == trained == (adapters | HEAD & trained if rank else everything)
        assert len(adapters) == (2 * 2 * 7 if rank else 0)  # A and B of two layers' seven projections
        same_tree(other.state_dict(), before)
        assert all(p.grad is None for p in other.parameters())
    assert all(map(all, values_of(critic, args)))


@LORA
def test_a_shared_critic_is_a_head_on_the_policys_states_and_trains_with_it(random_llama, rank):
    args = Args(lora_rank=rank, critic="shared")
    policy, critic = policy_and_critic(random_llama(dtype=torch.float32), args)
    assert {name for name, _ in critic.named_parameters()} == HEAD
    assert not any(map(any, values_of(critic, args)))
    moved, trained = train(torch.nn.ModuleList([policy, critic]), both_terms, args)
    assert moved == trained and {name.removeprefix("1.") for name in moved} > HEAD
    decoder, _ = ppo_llm.decoder_and_head(policy)
    for segment, found in zip(flat(random_episodes(5)), values_of(critic, args), strict=True):
        with torch.no_grad():
            expected = full_values(decoder, critic.head, segment).tolist()
        assert found == pytest.approx(expected, abs=1e-4) and max(map(abs, found)) > 1e-3


@pytest.mark.parametrize(("targets", "num_adapted"), [("all-linear", 7), ("q_proj,lm_head,embed_tokens", 1)])
def test_two_adapters_share_the_frozen_weights_beneath_them(random_llama, targets, num_adapted):
    base = random_llama(dtype=torch.float32)
    policy, critic = policy_and_critic(base, Args(lora_rank=4, lora_target_modules=targets))
    policys = {name.removeprefix("base_model.model.model."): p for name, p in policy.named_parameters()}
    critics = {name.removeprefix("decoder."): p for name, p in critic.named_parameters()}
    assert policys.keys() - critics.keys() == {"base_model.model.lm_head.weight"}
    assert critics.keys() - policys.keys() == HEAD
    frozen = {name for name, weight in critics.items() if not weight.requires_grad}
    assert len(frozen) == 2 + 2 * 9 and len(critics) == len(HEAD) + len(frozen) + 2 * 2 * num_adapted
    for name in critics.keys() & policys.keys():
        assert (critics[name].data_ptr() == policys[name].data_ptr()) == (name in frozen), name
        assert "embed_tokens" not in name or name in frozen


# Schedule


@pytest.mark.parametrize(("iterations", "warmup", "final", "start", "expected"), [
    (110, 10, 0.25, 11, {0: 0.0, 10: 0.0, 11: 0.2, 15: 1.0, 20: 2.0, 65: 1.25, 110: 0.5}),
    (110, 10, 0.25, 1, {1: 0.2, 10: 2.0, 60: 1.25, 110: 0.5}),  # the critic's
    (20, 0, 1.0, 3, {2: 0.0, 3: 2.0, 10: 2.0, 20: 2.0}), (20, 0, 0.0, 11, {15: 1.0, 20: 0.0}),
    (4, 10, 0.1, 2, {1: 0.0, 2: 0.2, 4: 0.6}),  # no end to the warm-up
    (4, 4, 0.1, 1, {1: 0.5, 4: 2.0}), (4, 4, 0.1, 11, {1: 0.0, 4: 0.0})])  # the policy never learns
def test_the_learning_rate_warms_up_from_its_first_iteration_and_decays_to_its_share(
        iterations, warmup, final, start, expected):
    args = Args(iterations=iterations, warmup_iterations=warmup, final_learning_rate=final)
    found = {i: ppo_llm.learning_rate(2.0, i, start, args) for i in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("critic", "first"), [("own", 4), ("shared", 1), ("none", 1)])
def test_the_policy_waits_for_a_critic_of_its_own_alone(critic, first):
    assert Args(critic=critic, critic_warmup=3).first_policy_iteration == first


# All of it


def test_a_penalty_alone_leads_back_to_the_reference(random_llama):
    args, prompt = Args(entropy_coef=0.0, kl_coef=1.0, critic="none"), [1, 3, 4]
    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=2)
    policy, reference = (random_llama(vocab_size=8, seed=seed, dtype=torch.float32, num_hidden_layers=1,
                                      hidden_size=32, initializer_range=0.2) for seed in (1, 2))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)

    def kl():
        with torch.no_grad():
            p, q = (model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
                    for model in (policy, reference))
        return float((p.exp() * (p - q)).sum())

    start = kl()
    torch.manual_seed(1)
    for _ in range(20):
        replies = ppo_llm.generate(policy, [prompt] * 128, 1, 1.0, tokenizer)
        episodes = [[Segment(prompt, ids, [1], logprobs, [0.0])] for ids, logprobs in replies]
        for model, name in ((reference, "ref_logprobs"), (policy, "old_logprobs")):
            ppo_llm.store_logprobs(model, episodes, name, args, 0)
        ppo_llm.store_values(None, episodes, args, 0)
        ppo_llm.estimate_advantages(episodes, args.kl_coef, args)
        ppo_llm.update(policy, optimizer, 5e-3, ppo_llm.policy_terms, episodes, 2, 1, args, 0)
    assert kl() < 0.1 * start and start > 0.3
