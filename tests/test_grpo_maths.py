"""The equations of grpo_llm.py against float64 references, written as the papers write them: in loops."""

import contextlib
import dataclasses
import math
import random
import statistics

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_llm
from grpo_llm import Args, Segment
from tests.run_folders import full_forward, gradients

LOSSES = ("clip", "cispo", "gspo")
AGGREGATIONS = ("token", "sequence", "constant")
LOW, HIGH, LONGEST = 0.2, 0.28, 9


@pytest.fixture
def any_sampler(monkeypatch):
    """Updates on what a sampler with other numbers has said, which a run would refuse."""
    monkeypatch.setattr(grpo_llm, "MISMATCH_TOLERANCE", {"float32": math.inf})


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


def test_a_group_of_two_under_loo_gets_the_difference_of_its_rewards():
    assert grpo_llm.group_advantages(torch.tensor([[1.0, 0.0]]), baseline="loo").tolist() == [[1.0, -1.0]]


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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_add_up_over_passes(aggregation):
    mask = tensors(token_table(4))[3]
    of_all = (int(mask.sum()), len(mask), LONGEST)
    whole = grpo_llm.token_weights(mask, aggregation, *of_all)
    parts = [grpo_llm.token_weights(part, aggregation, *of_all) for part in mask.split(2)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    lengths = mask.sum(1)
    expected = {"token": lengths / lengths.sum(), "sequence": torch.full_like(lengths, 1 / len(mask)),
                "constant": lengths / (LONGEST * len(mask))}[aggregation]
    torch.testing.assert_close(whole.sum(1), expected, rtol=1e-12, atol=0)
    assert not whole[mask == 0].any()


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


# One pass: pass_loss on given log-probabilities


def a_pass(monkeypatch, args, changes=(), seed=5):
    """pass_loss where the model's numbers are random ones.  -> loss, sums, largest ratio, inputs."""
    table = token_table(seed)
    logprobs, old, advantages, mask = tensors(table)
    generator = torch.Generator().manual_seed(seed)
    def noise():
        return 0.2 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    entropy = (1 + noise()).requires_grad_()
    batch = dict(response_mask=mask, advantages=advantages, old_logprobs=old,
                 rollout_logprobs=old + 0.1 * noise(), ref_logprobs=(logprobs + noise()).detach())
    batch = {name: value for name, value in (batch | dict(changes)).items() if value is not None}
    monkeypatch.setattr(grpo_llm, "token_logprobs", lambda model, batch, temperature: (logprobs, entropy))
    weight = grpo_llm.token_weights(mask, args.aggregation, int(mask.sum()), len(mask), LONGEST)
    loss, sums, ratio_max = grpo_llm.pass_loss(None, batch, weight, args)
    return loss, {name: float(value) for name, value in sums.items()}, float(ratio_max), \
        dict(batch, logprobs=logprobs, entropy=entropy, weight=weight)


PLAIN = dict(kl_coef=0.0, entropy_coef=0.0, tis_cap=0.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_penalties_are_k3_and_entropy_times_their_coefficients(monkeypatch, aggregation):
    plain, *_ = a_pass(monkeypatch, Args(**PLAIN, aggregation=aggregation))
    with_kl, _, _, x = a_pass(monkeypatch, Args(**PLAIN | dict(kl_coef=0.3), aggregation=aggregation))
    log_ratio = x["ref_logprobs"] - x["logprobs"]
    k3 = (log_ratio.exp() - 1 - log_ratio) * x["weight"]
    assert (with_kl - plain).item() == pytest.approx(0.3 * k3.sum().item(), rel=1e-9)
    assert k3.sum().item() > 1e-3
    args = Args(**PLAIN | dict(entropy_coef=0.3), aggregation=aggregation)
    with_entropy, _, _, x = a_pass(monkeypatch, args)
    bonus = (x["entropy"] * x["weight"]).sum().item()
    assert (with_entropy - plain).item() == pytest.approx(-0.3 * bonus, rel=1e-9)


def test_the_importance_weight_is_capped_and_the_ratio_is_logged_before_the_cap(monkeypatch):
    _, old, _, mask = tensors(token_table(5))
    assert mask[1, 0] == mask[2, 6] == 1
    rollout = old.clone()
    rollout[1, 0] -= math.log(5.0)   # the trainer finds this token five times as likely as the sampler did
    rollout[2, 6] -= math.log(0.25)  # and this one four times less
    outside = tuple((mask == 0).nonzero()[0].tolist())
    rollout[outside] -= math.log(90.0)  # what the mask leaves out is not seen anywhere
    changes = dict(rollout_logprobs=rollout)
    losses = {}
    for cap in (2.0, 0.0):
        args = Args(**PLAIN | dict(tis_cap=cap))
        loss, sums, ratio_max, x = a_pass(monkeypatch, args, changes)
        losses[cap] = loss
        assert ratio_max == pytest.approx(5.0)
        assert sums["mismatch/frac_capped"] == (1 if cap else 0)
        expected = 5 - 1 - math.log(5) + 0.25 - 1 - math.log(0.25)
        assert sums["mismatch/kl"] == pytest.approx(expected)
    per_token, _ = grpo_llm.policy_loss(x["logprobs"], old, x["advantages"], mask, "clip", LOW, HIGH)
    capped = torch.ones_like(mask)
    capped[1, 0], capped[2, 6] = 2.0, 0.25
    per_token = per_token.detach() * x["weight"]
    assert losses[2.0].item() == pytest.approx(float((per_token * capped).sum()), rel=1e-12)
    assert losses[0.0].item() == pytest.approx(float(per_token.sum()), rel=1e-12)


def test_the_importance_weight_has_no_gradient_of_its_own(monkeypatch):
    """On policy the weight is computed from the logprobs that are being differentiated."""
    _, old, _, mask = tensors(token_table(5))
    changes = dict(old_logprobs=None, rollout_logprobs=old)
    args = Args(**PLAIN | dict(tis_cap=2.0))
    loss, _, _, x = a_pass(monkeypatch, args, changes)
    loss.backward()
    weights = (x["logprobs"].detach() - old).exp().clamp(max=2.0)
    expected = -weights * x["advantages"] * x["weight"]  # d(-ratio A)/d logprob is -A at ratio 1
    torch.testing.assert_close(x["logprobs"].grad, expected, rtol=1e-9, atol=1e-12)


def test_environment_tokens_get_no_gradient_and_no_say(monkeypatch):
    args = Args(kl_coef=0.1, entropy_coef=0.1, tis_cap=2.0)
    loss, sums, ratio_max, x = a_pass(monkeypatch, args)
    loss.backward()
    outside = x["response_mask"] == 0
    assert outside.any()
    for name in ("logprobs", "entropy"):
        assert not x[name].grad[outside].any()
        assert x[name].grad[~outside].all()
    changes = {name: torch.where(outside, x[name] - 7.0, x[name])
               for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs")}
    other_loss, other_sums, other_max, _ = a_pass(monkeypatch, args, changes)
    assert (other_loss.item(), other_sums, other_max) == (loss.item(), sums, ratio_max)


def test_the_logged_sums_are_those_of_their_definitions(monkeypatch):
    loss, sums, _, x = a_pass(monkeypatch, Args(**PLAIN))
    new, old, ref, mask = (x[name].tolist() for name in (
        "logprobs", "old_logprobs", "ref_logprobs", "response_mask"))
    chosen = [(b, t) for b, row in enumerate(mask) for t, m in enumerate(row) if m]

    def k3(log_ratio):
        return math.exp(log_ratio) - 1 - log_ratio

    expected = {
        "train/policy_loss": loss.item(),
        "kl/k1": sum(new[b][t] - ref[b][t] for b, t in chosen),
        "train/kl_loss": sum(k3(ref[b][t] - new[b][t]) for b, t in chosen),
        "train/approx_kl": sum(k3(new[b][t] - old[b][t]) for b, t in chosen),
        "train/advantage": sum(float(x["advantages"][b, 0]) for b, t in chosen),
        "train/entropy": sum(x["entropy"][b, t].item() for b, t in chosen)}
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-9)


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


# From segments to log-probabilities: the model is called


def random_segments(seed, prompt_lengths, vocab=37, longest=LONGEST, shared=True):
    """Segments with random ids: some share a prompt, some are copies, masks have zeros in the middle."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in prompt_lengths]
    segments = []
    for prompt in prompts * 2 if shared else prompts:
        n = rng.randrange(4, longest + 1)
        mask = [1] + [rng.choice([0, 1]) for _ in range(n - 2)] + [1]
        mask[rng.randrange(1, n - 1)] = 0
        ids = [rng.randrange(3, vocab) for _ in range(n)]
        segments.append(Segment(prompt, ids, mask, [0.0] * n, advantage=rng.choice([-1, 1]) * rng.random()))
    # Equal ids with another advantage; and equal ids of which the policy chose others.
    first, last = segments[0], segments[-1]
    segments.append(dataclasses.replace(first, advantage=-first.advantage / 3))
    other = [1] * len(last.response_ids)
    segments.append(dataclasses.replace(last, response_mask=other, rollout_logprobs=[0.0] * len(other)))
    return segments


@pytest.mark.parametrize(("attention", "dtype", "tolerance"), [
    ("sdpa", torch.float64, 1e-6), ("sdpa", torch.float32, 1e-5), ("eager", torch.float32, 1e-5)])
@pytest.mark.parametrize("prompt_lengths", [(5,), (1,), (1, 1), (6, 1, 3), (2, 8)])
def test_shared_prompts_give_the_logprobs_of_each_sequence_alone(
        random_llama, prompt_lengths, attention, dtype, tolerance):
    model = random_llama(attn_implementation=attention, dtype=dtype)
    segments = random_segments(1, prompt_lengths)
    random.Random(2).shuffle(segments)
    batch = grpo_llm.collate(segments, 0, "cpu")
    assert len(batch["prompts"]) == len(prompt_lengths)
    assert len(batch["responses"]) == len(segments) - 1
    logprobs, entropy = grpo_llm.token_logprobs(model, batch, 0.7)
    weights = torch.randn(2, *logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (logprobs.double() * weights[0] + entropy.double() * weights[1]).sum().backward()
    found = gradients(model)
    total = 0.0
    for b, segment in enumerate(segments):
        n, mask = len(segment.response_ids), torch.tensor(segment.response_mask)
        expected, expected_entropy = (x * mask for x in full_forward(model, segment, 0.7))
        torch.testing.assert_close(logprobs[b, :n].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[b, :n].double(), expected_entropy, rtol=1e-5, atol=1e-5)
        assert not logprobs[b, n:].any() and not entropy[b, n:].any()
        total = total + (expected * weights[0, b, :n] + expected_entropy * weights[1, b, :n]).sum()
    total.backward()
    expected = gradients(model)
    assert (found - expected).norm() < tolerance * expected.norm()


# Update: a whole minibatch


class Recorder:
    """In the optimiser's place: keeps each step's gradient and leaves the weights."""

    def __init__(self, model):
        self.model, self.steps = model, []
        self.param_groups = [dict(params=list(model.parameters()))]

    def step(self):
        self.steps.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))

    def zero_grad(self, set_to_none):
        self.model.zero_grad(set_to_none=set_to_none)


def an_update(model, groups, args, reference=None):
    """-> the gradients of the optimiser's steps, the metrics, the number of passes."""
    recorder, passes = Recorder(model), []
    original = grpo_llm.pass_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_llm, "pass_loss", lambda *a: passes.append(a[1]) or original(*a))
        metrics, steps = grpo_llm.update(model, reference, recorder, groups, args, 0)
    assert steps == len(recorder.steps)
    return recorder.steps, metrics, len(passes)


def two_policies(random_llama, seed=1):
    """Segments sampled by one model, per group, their reference's and their sampler's logprobs at hand."""
    model, start = random_llama(seed=seed), random_llama(seed=seed)
    with torch.no_grad():
        torch.manual_seed(seed)
        for parameter in start.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    groups = [random_segments(10 * seed + i, (3 + i, 1 + i), shared=False) for i in range(6)]
    generator = random.Random(seed)
    for segment in (s for group in groups for s in group):
        values = full_forward(model, segment, 0.7)[0].tolist()
        segment.rollout_logprobs = [m * (v + generator.gauss(0, 0.4))
                                    for v, m in zip(values, segment.response_mask, strict=True)]
    return model, start, groups


def reference_gradient(model, start, segments, args):
    """Gradient of one minibatch's loss on policy, from plain full forwards, sequence by sequence."""
    tokens = sum(sum(s.response_mask) for s in segments)
    total = 0.0
    for s in segments:
        chosen = [t for t, m in enumerate(s.response_mask) if m]
        new, entropy = full_forward(model, s, args.temperature)
        with torch.no_grad():
            ref, _ = full_forward(start, s, args.temperature)
        weight = {"token": 1 / tokens, "sequence": 1 / (len(chosen) * len(segments)),
                  "constant": 1 / (args.max_response_tokens * len(segments))}[args.aggregation]
        for t in chosen:
            old = new[t].detach()
            trust = min(math.exp(old - s.rollout_logprobs[t]), args.tis_cap)
            ratio = torch.exp(new[t] - old)  # 1: nothing is clipped, and the three losses have one gradient
            gap = ref[t] - new[t]
            total = total + weight * (-ratio * s.advantage * trust - args.entropy_coef * entropy[t]
                                      + args.kl_coef * (torch.exp(gap) - gap - 1))
    total.backward()
    return gradients(model)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("any_sampler")
def test_the_update_has_the_gradient_of_the_written_loss_however_it_is_cut(random_llama, loss, aggregation):
    model, start, groups = two_policies(random_llama)
    segments = [s for group in groups for s in group]
    common = dict(loss=loss, aggregation=aggregation, kl_coef=0.2, entropy_coef=0.05, temperature=0.7,
                  max_grad_norm=1e9, max_response_tokens=LONGEST)
    expected, results = None, []
    for budget in (10_000, 12):
        args = Args(**common, microbatch_tokens=budget)
        steps, metrics, passes = an_update(model, groups, args, start)
        assert len(steps) == 1
        assert passes == 1 if budget == 10_000 else passes >= 8
        results.append((steps[0], metrics))
    (whole, metrics), (cut, cut_metrics) = results
    expected = reference_gradient(model, start, segments, args)
    assert (whole - expected).norm() < 2e-6 * expected.norm()
    assert (cut - whole).norm() < 1e-6 * whole.norm()
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("any_sampler")
def test_several_epochs_and_minibatches_do_not_depend_on_the_cut_either(random_llama):
    model, _, groups = two_policies(random_llama)
    common = dict(epochs=2, minibatches=3, temperature=0.7, max_grad_norm=1e9, prompts_per_iteration=6)
    results = []
    for budget in (10_000, 12):
        torch.manual_seed(1)
        steps, metrics, passes = an_update(model, groups, Args(**common, microbatch_tokens=budget))
        assert len(steps) == 6
        assert (passes == 6) == (budget == 10_000)
        results.append((torch.stack(steps), metrics))
    assert (results[1][0] - results[0][0]).norm() < 1e-6 * results[0][0].norm()
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)
    mean_norm = torch.stack([gradient.norm() for gradient in results[0][0]]).mean()
    assert results[0][1]["train/grad_norm"] == pytest.approx(mean_norm.item(), rel=1e-5)
    # The two epochs saw the same groups in other minibatches.
    first, second = results[0][0][:3], results[0][0][3:]
    assert not torch.allclose(first.sort(0).values, second.sort(0).values)


@pytest.mark.usefixtures("any_sampler")
def test_off_policy_updates_are_clipped_against_the_policy_that_sampled(random_llama):
    """The weights move between steps: the second step's ratio is to the weights before the first."""
    model, _, groups = two_policies(random_llama)
    args = Args(epochs=2, temperature=0.7, tis_cap=0.0, entropy_coef=0.0, max_grad_norm=1e9)
    segments = [s for group in groups for s in group]
    before = [full_forward(model, s, 0.7)[0].detach() for s in segments]

    class Ascent(Recorder):
        def step(self):
            super().step()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(0.3 * parameter.grad)

    optimizer = Ascent(model)
    metrics, _ = grpo_llm.update(model, None, optimizer, groups, args, 0)
    second = random_llama(seed=1)
    flat, start = optimizer.steps[0], 0
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.sub_(0.3 * flat[start:start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
    total, clipped, tokens = 0.0, 0, sum(sum(s.response_mask) for s in segments)
    for s, old in zip(segments, before, strict=True):
        new = full_forward(second, s, 0.7)[0]
        for t, m in enumerate(s.response_mask):
            ratio = torch.exp(new[t] - old[t])
            bounded = ratio.clamp(1 - LOW, 1 + HIGH)
            clipped += m * int(bounded * s.advantage < ratio * s.advantage)
            total = total - m * torch.minimum(ratio * s.advantage, bounded * s.advantage) / tokens
    total.backward()
    expected = gradients(second)
    assert (optimizer.steps[1] - expected).norm() < 1e-5 * expected.norm()
    assert 0 < metrics["train/clipfrac"] == pytest.approx(clipped / (2 * tokens))
    first = -sum(s.advantage * sum(s.response_mask) for s in segments) / tokens  # every ratio is 1
    assert metrics["train/policy_loss"] == pytest.approx((first + total.item()) / 2, rel=1e-5)


@pytest.mark.usefixtures("any_sampler")
def test_the_gradient_is_clipped_by_its_global_norm_and_logged_before(random_llama):
    model, _, groups = two_policies(random_llama)
    (free,), metrics, _ = an_update(model, groups, Args(temperature=0.7, max_grad_norm=1e9))
    (clipped,), same, _ = an_update(model, groups, Args(temperature=0.7, max_grad_norm=0.01))
    assert same["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"]) and free.norm() > 0.1
    torch.testing.assert_close(clipped, 0.01 * free / free.norm(), rtol=1e-3, atol=0)


def test_the_on_policy_clip_loss_is_zero_while_its_gradient_is_not(random_llama):
    model = random_llama()
    segments = [Segment([5, 6], [7 + i, 8, 9 + i], [1, 1, 1], [0.0] * 3) for i in range(4)]
    for segment, advantage in zip(segments, (0.75, -0.25, -0.25, -0.25), strict=True):
        segment.advantage = advantage
        segment.rollout_logprobs = full_forward(model, segment, 1.0)[0].tolist()
    steps, metrics, _ = an_update(model, [segments], Args(entropy_coef=0.0, max_grad_norm=1e9))
    assert metrics["train/policy_loss"] == pytest.approx(0.0, abs=1e-6)
    assert steps[0].norm() > 0.1
    assert metrics["train/grad_norm"] == pytest.approx(float(steps[0].norm()), rel=1e-5)
    assert metrics["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/clipfrac"] == metrics["mismatch/frac_capped"] == 0.0


@pytest.mark.usefixtures("any_sampler")
def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(random_llama):
    model, _, groups = two_policies(random_llama)
    groups[2][0].advantage = math.nan
    recorder = Recorder(model)
    with pytest.raises(FloatingPointError):
        grpo_llm.update(model, None, recorder, groups, Args(temperature=0.7), 0)
    assert not recorder.steps


@pytest.mark.parametrize("stale", [0.0, 0.01])
def test_stale_log_probabilities_stop_before_the_weights_change(random_llama, stale):
    model, _, groups = two_policies(random_llama)
    for segment in (s for group in groups for s in group):
        exact = full_forward(model, segment, 0.7)[0].tolist()
        segment.rollout_logprobs = [m * (p - stale)
                                    for p, m in zip(exact, segment.response_mask, strict=True)]
    recorder, args = Recorder(model), Args(temperature=0.7, epochs=2)
    with pytest.raises(grpo_llm.EngineError, match="mismatch/kl") if stale else contextlib.nullcontext():
        grpo_llm.update(model, None, recorder, groups, args, 0)
    assert len(recorder.steps) == (0 if stale else 2)


# Passes and schedule


def test_passes_hold_every_segment_once_within_the_budget():
    rng = random.Random(1)
    segments = [Segment([3], [4 + i % 40] * rng.randrange(1, 30)) for i in range(60)]
    segments += [Segment([3], segments[0].response_ids) for _ in range(20)]  # copies cost nothing
    parts = list(grpo_llm.microbatches(segments, 64))
    assert sorted(id(s) for part in parts for s in part) == sorted(map(id, segments))
    lengths = [len(s.response_ids) for part in parts for s in part]
    assert lengths == sorted(lengths)  # rows of one pass are of like length
    for part in parts:
        distinct = {tuple(s.response_ids) for s in part}
        assert len(distinct) == 1 or len(distinct) * max(map(len, distinct)) <= 64
    assert len(parts) < 60
    different = list({tuple(s.response_ids): s for s in segments}.values())[:5]
    assert [len(part) for part in grpo_llm.microbatches(different, 1)] == [1] * 5


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
