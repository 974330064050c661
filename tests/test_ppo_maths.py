"""Equations of ppo_llm.py against float64 references. The policy's loss is in test_updates.py."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

import ppo_llm
from ppo_llm import Args


def random_mask(rng, size):
    """The policy's at both ends, the environment's somewhere between them."""
    mask = [1] + [rng.choice([0, 1, 1]) for _ in range(size - 2)] + [1]
    mask[rng.randrange(1, size - 1)] = 0
    return mask


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_are_whitened_to_nothing(dtype):
    _, _, mask = gae_table(8, rows=40)
    mask, rounded = torch.tensor(mask, dtype=dtype), False
    for value in (0.1, 0.7, -1.3, 1 / 3):
        x = torch.full_like(mask, value)
        rounded |= (x * mask).sum() / mask.sum() != x[0, 0]
        assert ppo_llm.whiten(x, mask).abs().max() < 5e-3
    assert rounded  # for some of them the mean is not exact, and there is a difference to blow up


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


def test_the_value_loss_is_the_larger_of_the_free_and_the_clipped_error():
    old, values, returns = loss_table(1)

    def of_token(value, old, target):
        return max((value - target)**2, (min(max(value, old - 0.3), old + 0.3) - target)**2)

    def binds(value, old, target):  # it has left for where the return is, which earns no more
        return value > old + 0.3 and target > (value + old + 0.3) / 2 \
            or value < old - 0.3 and target < (value + old - 0.3) / 2

    check_loss(lambda *x: ppo_llm.clipped_value_loss(*x, 0.3), values, (old, returns), of_token, binds)
    torch.manual_seed(1)
    apart = torch.randn(3, 1000) * torch.tensor([[1], [1e-3], [1]])
    assert not ppo_llm.clipped_value_loss(*apart, clip=10.0)[1].any()  # rounding is not clipping


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
