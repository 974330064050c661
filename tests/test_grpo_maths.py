"""Equations of grpo_llm.py against float64 references, in loops. The losses are in test_updates.py."""

import math
import random
import statistics

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_llm
from grpo_llm import Args


def reference_advantages(group, scale, baseline, balance):
    result = []
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1:]
        advantage = reward - (statistics.fmean(group) if baseline == "mean" else statistics.fmean(others))
        if scale:
            advantage /= statistics.pstdev(group) + 1e-6
        if balance > 0 and advantage < 0:
            advantage *= 1 - balance
        if balance < 0 and advantage > 0:
            advantage *= 1 - abs(balance)
        result.append(advantage)
    return result


@pytest.mark.parametrize("balance", [0.0, 0.4, 1.0, -0.4, -1.0])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "loo"])
def test_advantages_follow_their_formulas_and_who_did_not_play_has_no_part(baseline, scale, balance):
    """Every choice of those who played in a group of five, and equal rewards."""
    rng = random.Random(2)
    rewards = [[rng.random() for _ in range(5)] for _ in range(32)] + [[0.25] * 5]
    played = [[bool(n >> k & 1) for k in range(5)] for n in range(32)] + [[True] * 5]
    found = grpo_llm.group_advantages(torch.tensor(rewards, dtype=torch.float64), scale, baseline, balance,
                                      torch.tensor(played))
    for row, group, here in zip(found.tolist(), rewards, played, strict=True):
        others = [reward for reward, there in zip(group, here, strict=True) if there]
        expected = iter(reference_advantages(others, scale, baseline, balance) if len(others) > 1 else [0.0])
        assert row == pytest.approx([next(expected) if there else 0.0 for there in here], abs=1e-7)


def test_the_ratio_of_a_sequence_is_the_mean_over_its_chosen_tokens():
    torch.manual_seed(1)
    (new, old), mask = 0.1 * torch.randn(2, 4, 7), torch.arange(7) % torch.arange(2, 6)[:, None] == 0
    found, _ = grpo_llm.policy_loss(new, old, torch.ones(4, 1), mask.float(), "gspo", 0.2, 0.28)
    for row, log_ratio, chosen in zip(-found, new - old, mask, strict=True):
        torch.testing.assert_close(row, log_ratio[chosen].mean().exp().expand(7))


def test_k3_is_kl_in_expectation_and_never_negative():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        log_p, log_q = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
        p, q = log_p.exp().tolist(), log_q.exp().tolist()
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        estimates = grpo_llm.k3(log_q - log_p)
        assert (estimates >= 0).all() and kl > 0.01
        assert float((log_p.exp() * estimates).sum()) == pytest.approx(kl, rel=1e-12)
        expected = [b / a - 1 - math.log(b / a) for a, b in zip(p, q, strict=True)]
        assert estimates.tolist() == pytest.approx(expected, rel=1e-9)


def head_inputs(num_tokens=11, width=6, vocab=23):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    head = torch.nn.Linear(width, vocab, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, width, generator=generator, dtype=torch.float64))
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    coefficients = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return hidden, head, targets, coefficients


@pytest.mark.parametrize("chunk_elements", [1, 23, 3 * 23 + 5, 11 * 23, 2**23])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_selected_logprobs_equal_a_float64_log_softmax_however_they_are_cut(chunk_elements, temperature):
    hidden, head, targets, (a, b) = head_inputs()
    results = []
    for of_script in (True, False):
        h, head.weight.grad = hidden.clone().requires_grad_(), None
        if of_script:
            logprobs, entropy = grpo_llm.selected_logprobs(h, head, targets, temperature, chunk_elements)
        else:
            p = torch.softmax(h @ head.weight.T / temperature, -1)
            logprobs, entropy = p[torch.arange(len(p)), targets].log(), -(p * p.log()).sum(-1)
        (a * logprobs + b * entropy).sum().backward()
        results.append((logprobs, entropy, h.grad, head.weight.grad.clone()))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def test_logits_exist_for_one_chunk_at_a_time_forward_and_backward():
    vocab, width, chunk_elements = 151_936, 4, 5 * 151_936
    head = torch.nn.Linear(width, vocab, bias=False)

    def largest(num_tokens, chunk_elements):
        hidden = torch.randn(num_tokens, width, requires_grad=True)
        with LargestTensor() as mode:
            logprobs, entropy = grpo_llm.selected_logprobs(
                hidden, head, torch.arange(num_tokens), 1.0, chunk_elements)
            (logprobs.sum() + entropy.sum()).backward()
        return mode.largest

    assert largest(7, 2**23) == 7 * vocab  # what the bound is for
    assert largest(10, chunk_elements) == largest(20, chunk_elements) == chunk_elements


def test_no_logits_are_kept_for_the_backward_pass():
    hidden, head, targets, _ = head_inputs(num_tokens=40, vocab=500)

    def kept(chunk_elements):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x)
        with hooks:
            grpo_llm.selected_logprobs(hidden.requires_grad_(), head, targets, 1.0, chunk_elements)
        return sum(sizes)

    assert kept(40 * 500) > 40 * 500
    assert kept(8 * 500) < 500


def test_the_learning_rate_warms_up_and_decays_to_its_share():
    args = Args(iterations=110, warmup_iterations=10, learning_rate=2.0, final_learning_rate=0.25)
    rate = [grpo_llm.learning_rate(i, args) for i in range(111)]
    assert rate[1] == pytest.approx(0.2)
    assert rate[5] == pytest.approx(1.0)
    assert rate[10] == pytest.approx(2.0) == max(rate)
    assert rate[60] == pytest.approx((2.0 + 0.5) / 2)
    assert rate[110] == pytest.approx(0.5)
    constant = Args(iterations=20, warmup_iterations=0, learning_rate=2.0, final_learning_rate=1.0)
    assert [grpo_llm.learning_rate(i, constant) for i in (1, 10, 20)] == [2.0] * 3
    short = Args(iterations=4, warmup_iterations=10, learning_rate=2.0)
    assert [grpo_llm.learning_rate(i, short) for i in (1, 4)] == pytest.approx([0.2, 0.8])
