"""The equations of grpo_llm.py against float64 references, written as the papers write them: in loops.

What a whole iteration makes of them is in test_updates.py.
"""

import math
import random
import statistics

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_llm
from grpo_llm import Args

LOSSES = ("clip", "cispo", "gspo")
AGGREGATIONS = ("token", "sequence", "constant")
LOW, HIGH, LONGEST = 0.2, 0.28, 9


# Advantages


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
def test_advantages_follow_their_formulas(baseline, scale, balance):
    rng = random.Random(1)
    groups = [[rng.choice([0.0, 0.1, 1.0]) + rng.random() for _ in range(6)] for _ in range(5)]
    groups.append([0.25] * 6)
    found = grpo_llm.group_advantages(torch.tensor(groups, dtype=torch.float64), scale, baseline, balance)
    for row, group in zip(found.tolist(), groups, strict=True):
        assert row == pytest.approx(reference_advantages(group, scale, baseline, balance), abs=1e-7)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "loo"])
def test_who_did_not_play_has_no_part_in_its_group(baseline, scale):
    rng = random.Random(2)
    rewards = torch.tensor([[rng.random() for _ in range(5)] for _ in range(32)], dtype=torch.float64)
    played = torch.tensor([[bool(n >> k & 1) for k in range(5)] for n in range(32)])
    found = grpo_llm.group_advantages(rewards, scale, baseline, 0.3, played)
    for row, group, here in zip(found.tolist(), rewards.tolist(), played.tolist(), strict=True):
        others = [reward for reward, there in zip(group, here, strict=True) if there]
        expected = iter(reference_advantages(others, scale, baseline, 0.3) if len(others) > 1 else [0.0])
        assert row == pytest.approx([next(expected) if there else 0.0 for there in here], abs=1e-7)


# Losses, on tables of numbers


def token_table(seed, rows=5, width=7):
    """Rows of (logprobs, old, advantage, mask) as plain floats, some ratios clipped on either side."""
    rng = random.Random(seed)
    table = []
    for _ in range(rows):
        old = [-3 * rng.random() for _ in range(width)]
        mask = [1] + [rng.choice([0, 1, 1]) for _ in range(width - 2)] + [1]
        mask[rng.randrange(1, width - 1)] = 0  # an environment's token in the middle
        table.append(([x + rng.gauss(0, 0.3) for x in old], old, rng.choice([-1, 1]) * rng.random(), mask))
    return table


def reference_policy_loss(table, loss, aggregation, logprobs, frozen):
    """As the papers have it, token by token. `frozen` are the log-probabilities behind a stop-gradient."""
    per_sequence = []
    for (_, old, advantage, mask), new, still in zip(table, logprobs, frozen, strict=True):
        chosen = [t for t, m in enumerate(mask) if m]
        terms = []
        for t in chosen:
            ratio = math.exp(new[t] - old[t])
            if loss == "cispo":
                weight = min(max(math.exp(still[t] - old[t]), 1 - LOW), 1 + HIGH)
                terms.append(-weight * advantage * new[t])
                continue
            if loss == "gspo":
                s = math.exp(sum(still[u] - old[u] for u in chosen) / len(chosen))
                ratio = s * math.exp(new[t]) / math.exp(still[t])
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            terms.append(-min(ratio * advantage, clipped * advantage))
        per_sequence.append(terms)
    if aggregation == "token":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if aggregation == "sequence":
        return sum(sum(terms) / len(terms) for terms in per_sequence) / len(table)
    return sum(map(sum, per_sequence)) / (len(table) * LONGEST)


def finite_differences(function, rows, step=1e-6):
    """d function / d rows[b][t], central."""
    gradient = [[0.0] * len(row) for row in rows]
    for b, row in enumerate(rows):
        for t, value in enumerate(row):
            sides = []
            for sign in (1, -1):
                row[t] = value + sign * step
                sides.append(function(rows))
            row[t] = value
            gradient[b][t] = (sides[0] - sides[1]) / (2 * step)
    return gradient


def tensors(table):
    logprobs, old, advantages, mask = (torch.tensor([row[i] for row in table], dtype=torch.float64)
                                       for i in range(4))
    return logprobs.requires_grad_(), old, advantages[:, None], mask


def script_loss(table, loss, aggregation):
    logprobs, old, advantages, mask = tensors(table)
    per_token, _ = grpo_llm.policy_loss(logprobs, old, advantages, mask, loss, LOW, HIGH)
    weight = grpo_llm.token_weights(mask, aggregation, int(mask.sum()), len(mask), LONGEST)
    return logprobs, (per_token * weight).sum()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_gradients_follow_the_papers(loss, aggregation, seed):
    table = token_table(seed)
    logprobs, value = script_loss(table, loss, aggregation)
    value.backward()
    base = [row[0][:] for row in table]
    frozen = [row[0][:] for row in table]
    expected = reference_policy_loss(table, loss, aggregation, base, frozen)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    expected = finite_differences(
        lambda rows: reference_policy_loss(table, loss, aggregation, rows, frozen), base)
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
    assert logprobs.grad.abs().sum() > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_gspo_has_the_gradient_of_its_sequence_objective(seed):
    """GSPO's eq. 5 knows sequences only; the token form of eq. 14 must have the same gradient."""
    table = token_table(seed)

    def objective(rows):
        total = 0.0
        for (_, old, advantage, mask), new in zip(table, rows, strict=True):
            s = math.exp(sum(m * (n - o) for n, o, m in zip(new, old, mask, strict=True)) / sum(mask))
            total += min(s * advantage, min(max(s, 1 - LOW), 1 + HIGH) * advantage)
        return -total / len(table)

    logprobs, value = script_loss(table, "gspo", "sequence")
    value.backward()
    rows = [row[0][:] for row in table]
    assert value.item() == pytest.approx(objective(rows), abs=1e-12)
    expected = torch.tensor(finite_differences(objective, rows), dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_clip_flags_mark_the_tokens_whose_ratio_was_replaced(loss):
    table = token_table(3)
    logprobs, old, advantages, mask = tensors(table)
    _, flags = grpo_llm.policy_loss(logprobs, old, advantages, mask, loss, LOW, HIGH)
    seen = set()
    for b, (new, before, advantage, chosen) in enumerate(table):
        log_ratios = [n - o for n, o in zip(new, before, strict=True)]
        for t, log_ratio in enumerate(log_ratios):
            if not chosen[t]:
                continue
            if loss == "gspo":
                log_ratio = statistics.fmean(x for x, m in zip(log_ratios, chosen, strict=True) if m)
            above, below = math.exp(log_ratio) > 1 + HIGH, math.exp(log_ratio) < 1 - LOW
            binds = above or below if loss == "cispo" else above and advantage > 0 or below and advantage < 0
            assert bool(flags[b, t]) == binds, (b, t)
            seen.add(binds)
    assert seen == {True, False}


# KL


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


# From hidden states to log-probabilities


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


# Schedule


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
