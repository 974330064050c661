"""Equations of grpo_llm.py and ppo_llm.py against float64 references. Whole losses are in test_updates.py."""

import itertools
import math
import random

import pytest
import torch

import grpo_llm
import ppo_llm
from tests.test_updates import group_advantages


@pytest.mark.parametrize("balance", [0.0, 0.4, -1.0])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "loo"])
def test_advantages_follow_their_formulas(baseline, scale, balance):
    rng = random.Random(2)
    flags = dict(scale_rewards=scale, baseline=baseline, advantage_balance=balance)
    for rewards in [[rng.random() for _ in range(2 + n % 5)] for n in range(32)] + [[0.25] * 5]:
        found = grpo_llm.group_advantages(rewards, scale, baseline, balance)
        assert found.tolist() == pytest.approx(group_advantages(rewards, flags), abs=1e-7)


@pytest.mark.parametrize("chunk_elements", [1, 3 * 23 + 5, 2**23])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_selected_logprobs_equal_a_float64_log_softmax_however_they_are_cut(chunk_elements, temperature):
    torch.manual_seed(1)
    inputs, head = torch.randn(11, 6, dtype=torch.float64), torch.nn.Linear(6, 23, bias=False).double()
    targets, (a, b) = torch.randint(23, (11,)), torch.randn(2, 11, dtype=torch.float64)
    results = []
    for of_script in (True, False):
        hidden, head.weight.grad = inputs.clone().requires_grad_(), None
        if of_script:
            logprobs, entropy = grpo_llm.selected_logprobs(hidden, head, targets, temperature, chunk_elements)
        else:
            p = torch.softmax(hidden @ head.weight.T / temperature, -1)
            logprobs, entropy = p[torch.arange(len(p)), targets].log(), -(p * p.log()).sum(-1)
        (a * logprobs + b * entropy).sum().backward()
        results.append((logprobs, entropy, hidden.grad, head.weight.grad.clone()))

    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


class Head(torch.nn.Linear):
    """Remembers for how many tokens at a time logits were made."""

    def forward(self, hidden):
        self.made.append(len(hidden))
        return super().forward(hidden)


def test_logits_exist_for_one_chunk_at_a_time_and_none_are_kept_for_the_backward_pass():
    vocab = 50_000
    head = Head(4, vocab, bias=False)

    def sizes(num_tokens, chunk_elements):
        head.made, kept, hidden = [], [], torch.randn(num_tokens, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            found = grpo_llm.selected_logprobs(hidden, head, torch.arange(num_tokens), 1.0, chunk_elements)
        sum(found).sum().backward()
        return head.made, sum(kept)

    made, kept = sizes(7, 2**23)
    assert made == [7] and kept > 7 * vocab  # what the bound is for
    made, kept = sizes(20, 5 * vocab)
    assert made == 8 * [5] and kept < vocab  # four chunks, there and back


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_gae_is_the_discounted_sum_of_the_errors_up_to_the_end(gamma, lam):
    """arXiv:1506.02438, eq. 16, of episodes that are not equally long."""
    torch.manual_seed(1)
    mask = torch.arange(11) < torch.randint(12, (40, 1))
    rewards, values = torch.randn(2, 40, 11, dtype=torch.float64) * mask
    errors = rewards + gamma * torch.nn.functional.pad(values, (0, 1))[:, 1:] - values
    weights = [[(gamma * lam)**max(k - t, 0) * (k >= t) for t in range(11)] for k in range(11)]
    expected = errors @ torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(ppo_llm.gae(rewards, values, gamma, lam), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_are_whitened_to_nothing(dtype):
    mask, rounded = (torch.arange(440) % 7 > 1).to(dtype).view(40, 11), False
    for value in (0.1, 0.7, -1.3, 1 / 3):
        x = torch.full_like(mask, value)
        rounded |= (x * mask).sum() / mask.sum() != x[0, 0]
        assert ppo_llm.whiten(x, mask).abs().max() < 5e-3
    assert rounded  # for some of them the mean is not exact, and there is a difference to blow up


def test_the_value_loss_is_the_larger_of_the_free_and_the_clipped_error():
    torch.manual_seed(1)
    old, returns = torch.randn(2, 200, dtype=torch.float64)
    values = (old + 0.5 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    errors, clipped = ppo_llm.clipped_value_loss(values, old, returns, 0.3)
    errors.sum().backward()

    tokens = list(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True))
    assert errors.tolist() == pytest.approx([
        max((value - target)**2, (min(max(value, old - 0.3), old + 0.3) - target)**2)
        for value, old, target in tokens], abs=1e-12)
    # It has left for where the return is, which earns no more.
    assert clipped.tolist() == [
        value > old + 0.3 and target > (value + old + 0.3) / 2
        or value < old - 0.3 and target < (value + old - 0.3) / 2 for value, old, target in tokens]
    assert clipped.any() and not values.grad[clipped].any() and values.grad[~clipped].all()

    apart = torch.randn(3, 1000) * torch.tensor([[1], [1e-3], [1]])
    assert not ppo_llm.clipped_value_loss(*apart, clip=10.0)[1].any()  # rounding is not clipping


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_penalties_are_kl_in_expectation_and_k3_in_a_reward_descends_the_difference_of_its_directions(kind):
    """So k3 does not lead back to the reference: near it, the two directions have the same gradient."""
    torch.manual_seed(1)
    logits, other = torch.randn(2, 7, dtype=torch.float64)
    log_p, log_q = logits.requires_grad_().log_softmax(-1), other.log_softmax(-1)
    p, q = log_p.exp().tolist(), log_q.exp().tolist()
    penalty = (log_p - log_q if kind == "k1" else ppo_llm.k3(log_q - log_p)).detach()
    expected = {"k1": [math.log(a / b) for a, b in zip(p, q, strict=True)],
                "k3": [b / a - 1 - math.log(b / a) for a, b in zip(p, q, strict=True)]}[kind]
    assert penalty.tolist() == pytest.approx(expected, rel=1e-9)

    kl, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    torch.testing.assert_close((log_p.exp() * penalty).sum(), kl, rtol=1e-9, atol=0.0)
    assert kl > 0.01
    found, = torch.autograd.grad((log_p.exp().detach() * penalty * log_p).sum(), logits, retain_graph=True)
    expected, = torch.autograd.grad(kl if kind == "k1" else kl - reverse, logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_coefficient_follows_its_proportional_controller():
    for kl, target in itertools.product((-0.1, 0.0, 0.45, 0.55, 0.61, 0.9, 1.0, 1.1, 9.0), (1.0, 0.5)):
        error = min(max((kl - target) / target, -0.2), 0.2)  # arXiv:1909.08593, section 2.2
        assert ppo_llm.adapt_kl_coef(0.3, kl, target) == pytest.approx(0.3 * (1 + 0.1 * error), rel=1e-12)


@pytest.mark.parametrize(("iterations", "warmup", "final", "start", "expected"), [
    (110, 10, 0.25, 11, {0: 0.0, 10: 0.0, 11: 0.2, 15: 1.0, 20: 2.0, 65: 1.25, 110: 0.5}),
    (110, 10, 0.25, 1, {1: 0.2, 5: 1.0, 10: 2.0, 60: 1.25, 110: 0.5}),
    (20, 0, 1.0, 1, {1: 2.0, 10: 2.0, 20: 2.0}), (20, 0, 0.0, 11, {15: 1.0, 20: 0.0}),
    (4, 10, 0.1, 1, {1: 0.2, 4: 0.8}), (4, 10, 0.1, 2, {1: 0.0, 2: 0.2, 4: 0.6}),  # no end to the warm-up
    (4, 4, 0.1, 1, {1: 0.5, 4: 2.0}), (4, 4, 0.1, 11, {1: 0.0, 4: 0.0})])  # the policy never learns
def test_the_learning_rate_warms_up_from_its_first_iteration_and_decays_to_its_share(
        iterations, warmup, final, start, expected):
    schedule = dict(iterations=iterations, warmup_iterations=warmup, final_learning_rate=final)
    found = {i: ppo_llm.learning_rate(2.0, i, start, ppo_llm.Args(**schedule)) for i in expected}
    assert found == pytest.approx(expected)
    if start == 1:
        args = grpo_llm.Args(**schedule, learning_rate=2.0)
        assert {i: grpo_llm.learning_rate(i, args) for i in expected} == pytest.approx(expected)
