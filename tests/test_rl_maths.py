"""Equations of grpo_llm.py and ppo_llm.py against float64 references. Whole losses are in test_updates.py."""

import collections
import functools
import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch

import envs
import grpo_llm
import ppo_llm
from envs import BadInput
from tests.run_folders import package
from tests.test_updates import corrections, group_advantages


@pytest.mark.parametrize("balance", [0.0, 0.4, -1.0])
@pytest.mark.parametrize("baseline, scale", [
    ("mean", False), ("mean", True), ("loo", False), ("loo", True), ("maxrl", False)])
def test_advantages_follow_their_formulas(baseline, scale, balance):
    rng = random.Random(2)
    flags = dict(scale_rewards=scale, baseline=baseline, advantage_balance=balance)
    for rewards in [[rng.random() for _ in range(2 + n % 5)] for n in range(32)] + [[0.25] * 5, [0.5, 0.0]]:
        found = grpo_llm.group_advantages(rewards, scale, baseline, balance)
        assert found.tolist() == pytest.approx(group_advantages(rewards, flags), abs=1e-7)


def test_maxrl_is_for_rewards_of_0_or_more():
    assert grpo_llm.group_advantages([0.0, 0.0, 0.0], baseline="maxrl").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(BadInput, match=r"^--baseline maxrl: a reward is -0.5; expected 0 or more$"):
        grpo_llm.group_advantages([1.0, -0.5, 0.0], baseline="maxrl")


def group_of(*ends):
    """Episodes of a group, of one token each.  ends: (reward, termination)"""
    found = []
    for number, (reward, termination) in enumerate(ends):
        r = grpo_llm.Rollout(envs.Task("t", "s", [], {}), (0, number), "", [], reward=reward,
                             termination=termination)
        r.segments = [grpo_llm.Segment([1], [2], [1], [0.0])]
        found.append(r)
    return found


def advantages_of(rollouts, **flags):
    """Of each episode of each group that is trained: its number in the group, its advantage."""
    args = grpo_llm.Args(group_size=4, **flags)
    of_segments = {id(s): r.order[1] for r in rollouts for s in r.segments}
    return [{of_segments[id(s)]: s.advantages[0] for s in group}
            for group in grpo_llm.trainable_groups(rollouts, args)]


@pytest.mark.parametrize("cut", ["length", "context"])
@pytest.mark.parametrize(("flags", "winner", "loser"), [  # of rewards 3 and 1, by hand: their mean is 2
    (dict(), 1.0, -1.0), (dict(scale_rewards=True), 1 / (1 + 1e-6), -1 / (1 + 1e-6)),
    (dict(baseline="loo"), 2.0, -2.0), (dict(baseline="loo", scale_rewards=True), 2.0, -2.0),
    (dict(baseline="maxrl"), 0.5, -0.5), (dict(advantage_balance=0.25), 1.0, -0.75)])
def test_a_reply_that_is_masked_because_it_is_cut_votes_in_no_baseline(flags, winner, loser, cut):
    group = [(3.0, "done"), (-7.0, cut), (1.0, "truncated"), (0.0, cut)]
    (found,) = advantages_of(group_of(*group), mask_truncated=True, **flags)
    assert found == {0: pytest.approx(winner, rel=2e-6), 2: pytest.approx(loser, rel=2e-6)}
    # Without the flag it votes and is trained, and so is with it what another limit ended.
    for is_masked, end in ((False, cut), (True, "timeout")):
        group = [(3.0, "done"), (0.0, end), (1.0, "truncated"), (0.0, end)]
        (found,) = advantages_of(group_of(*group), mask_truncated=is_masked, **flags)
        assert len(found) == 4 and found[0] != pytest.approx(winner) and found[1] < 0


@pytest.mark.parametrize("rewards_of_cut", [(0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.5, 0.25)])
def test_a_group_without_two_whole_replies_that_differ_is_not_trained(rewards_of_cut):
    for num_cut in range(5):
        for high, low in ((1.0, 1.0), (1.0, 0.0)):
            rewards = [*rewards_of_cut[:num_cut], *([high] + [low] * 3)[:4 - num_cut]]
            ends = ["length"] * num_cut + ["done"] * (4 - num_cut)
            found = advantages_of(group_of(*zip(rewards, ends, strict=True)), mask_truncated=True)
            assert len(found) == (high != low and num_cut <= 2), (num_cut, high, low)
            assert all(min(group) == num_cut and len(group) == 4 - num_cut for group in found)


LOSSES = ("clip", "cispo", "gspo", "dppo", "sapo", "pg")


def off_policy_batch(num_sequences=24, length=9):
    """Log-probabilities now, before and of the sampler, apart by 0.4 nats and more; advantages; mask."""
    generator = torch.Generator().manual_seed(3)
    shape = (num_sequences, length)
    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old = (logprobs + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    sampled = (old + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(num_sequences, 1, generator=generator, dtype=torch.float64).expand(shape)
    mask = (torch.rand(shape, generator=generator) < 0.8).double()
    mask[:, 0] = 1
    return logprobs.requires_grad_(), old, sampled, advantages, mask


def slope_of(loss, new, old, advantage, mean_ratio):
    """The derivative of a token's loss by its log-probability, worked out by hand, and whether it is 0."""
    ratio = math.exp(new - old)
    if loss == "pg":
        return -advantage, False
    if loss == "cispo":
        return -min(max(ratio, 0.8), 1.28) * advantage, not 0.8 <= ratio <= 1.28
    if loss == "sapo":  # 4 sigmoid' = 1 / cosh^2
        steepness = 1.0 if advantage > 0 else 1.05
        return -advantage * ratio / math.cosh(steepness * (ratio - 1) / 2) ** 2, False
    if loss == "dppo":
        moved = math.exp(new) - math.exp(old)
        masked = moved > 0.2 if advantage > 0 else moved < -0.2
        return -advantage * ratio * (not masked) + 2e-3 * (new - old), masked
    ratio = mean_ratio if loss == "gspo" else ratio
    clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
    return -advantage * ratio * (not clipped), clipped


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_a_loss_is_the_one_worked_out_by_hand(loss):
    logprobs, old, _, advantages, mask = off_policy_batch()
    per_token, is_out = grpo_llm.policy_loss(logprobs, old, advantages, mask, loss, 0.2, 0.28)
    gradient, = torch.autograd.grad((per_token * mask).sum(), logprobs)
    seen = set()
    for row, chosen in enumerate(mask.bool().tolist()):
        places = [place for place, is_chosen in enumerate(chosen) if is_chosen]
        new, before = logprobs[row].tolist(), old[row].tolist()
        mean_ratio = math.exp(sum(new[place] - before[place] for place in places) / len(places))
        for place in places:
            slope, out = slope_of(loss, new[place], before[place], float(advantages[row, 0]), mean_ratio)
            assert float(gradient[row, place]) == pytest.approx(slope, rel=1e-6, abs=1e-12)
            assert bool(is_out[row, place]) == out
            seen.add(out)
    assert seen == ({False} if loss in ("sapo", "pg") else {False, True})


def test_on_the_policy_that_sampled_all_losses_have_one_gradient():
    logprobs, _, _, advantages, mask = off_policy_batch()
    found = []
    for loss in LOSSES:
        per_token, _ = grpo_llm.policy_loss(logprobs, logprobs.detach(), advantages, mask, loss, 0.2, 0.28)
        found.append(torch.autograd.grad((per_token * mask).sum(), logprobs)[0])
        torch.testing.assert_close(found[-1], -advantages * mask)


@pytest.mark.parametrize("correction, bounds", [
    ("none", ()), *itertools.product(["tis", "icepop", "mis"], [(), (0.7, 1.5)])])
def test_a_correction_is_its_formula_token_by_token(correction, bounds):
    _, old, sampled, _, mask = off_policy_batch()
    flags = dict(correction=correction) | (dict(correction_bounds=bounds) if bounds else {})
    weights, is_out = grpo_llm.correction_weights(old - sampled, mask, correction, bounds)
    for row, chosen in enumerate(mask.bool()):
        expected, bound = corrections((old - sampled)[row], chosen, flags)
        torch.testing.assert_close(weights[row][chosen], expected[chosen])
        assert is_out[row][chosen].tolist() == bound[chosen].tolist()
    assert is_out.any() == (correction != "none")


def test_the_weights_of_tokens_are_means_over_tokens_or_sequences_or_a_constant_length():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
    for aggregation, first, second in (("token", 1 / 9, 1 / 9), ("sequence", 1 / 3 / 7, 1 / 7),
                                       ("constant", 1 / 7 / 11, 1 / 7 / 11)):
        found = grpo_llm.token_weights(mask, aggregation, 9, 7, 11)  # of a minibatch of several passes
        assert found[0].tolist() == pytest.approx([first, first, 0, first, 0])
        assert found[1:].tolist() == [pytest.approx([0, second, 0, 0, 0]), [0.0] * 5]


def of_script(loss, old_logprobs, batch, correction, aggregation):
    """The loss of grpo_llm.py on a batch, and its gradient by the log-probabilities."""
    logprobs, old, sampled, advantages, mask = batch
    per_token, _ = grpo_llm.policy_loss(logprobs, old_logprobs, advantages, mask, loss, 0.2, 0.28)
    weights, _ = grpo_llm.correction_weights(old - sampled, mask, correction)
    weights *= grpo_llm.token_weights(mask, aggregation, mask.sum(), len(mask), 1)
    total = (per_token * weights).sum()
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss, correction", [
    ("clip", "none"), ("clip", "tis"), ("clip", "mis"), ("clip", "icepop"), ("cispo", "none"),
    ("gspo", "none"), ("gspo", "mis"), ("sapo", "none"), ("sapo", "icepop")])
def test_loss_and_gradient_are_those_of_trl(loss, correction, monkeypatch, tmp_path):
    """GRPOTrainer._compute_loss of TRL 1.16 on a batch's log-probabilities, in place of a model's."""
    package("trl")
    from accelerate import Accelerator
    from trl import GRPOConfig, GRPOTrainer

    batch = off_policy_batch()
    logprobs, old, sampled, advantages, mask = batch
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], beta=0.0, epsilon=0.2,
        loss_type=dict(clip="grpo", gspo="grpo").get(loss, loss),
        epsilon_high={"cispo": 1.28}.get(loss, 0.28),  # of CISPO it is the bound itself
        importance_sampling_level={"gspo": "sequence"}.get(loss, "token"))
    peer = GRPOTrainer.__new__(GRPOTrainer)
    names = ("loss_type", "beta", "epsilon_high", "importance_sampling_level", "off_policy_mask_threshold",
             "top_entropy_quantile")
    vars(peer).update(
        {name: getattr(args, name) for name in names}, args=args, epsilon_low=args.epsilon, use_vllm=True,
        vllm_importance_sampling_correction=correction != "none", aux_loss_enabled=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=args.steps_per_generation,
        accelerator=Accelerator(cpu=True), model=torch.nn.Identity(),
        _metrics=collections.defaultdict(functools.partial(collections.defaultdict, list)))
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies",
                        lambda *_, **__: (logprobs, torch.zeros_like(old), None))
    weights, _ = grpo_llm.correction_weights(old - sampled, mask, correction)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    theirs = peer._compute_loss(None, dict(
        prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids, completion_mask=mask,
        advantages=advantages[:, 0], old_per_token_logps=old, importance_sampling_ratio=weights,
        num_items_in_batch=mask.sum()))
    theirs = theirs * args.steps_per_generation
    if loss == "cispo":  # it has no lower bound
        monkeypatch.setattr(torch.Tensor, "clamp", lambda x, low, high: torch.clamp(x, max=high))
    ours, gradient = of_script(loss, old, batch, correction, "token" if loss == "cispo" else "sequence")
    torch.testing.assert_close(ours, theirs.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, logprobs)[0])


# A batch, and what others computed of it: tests/data/losses.json says which functions of which commits.
RECORDED = json.loads((Path(__file__).parent / "data/losses.json").read_text())


@pytest.mark.parametrize("name", RECORDED["results"])
def test_loss_and_gradient_are_those_that_others_compute(name):
    batch = [torch.tensor(RECORDED[part], dtype=torch.float64) for part in (
        "logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")]
    batch[0].requires_grad_()
    recorded = RECORDED["results"][name]
    anchor = batch[2] if recorded["loss"] == "dppo" else batch[1]
    total, gradient = of_script(recorded["loss"], anchor, batch, recorded["correction"],
                                recorded["aggregation"])
    assert float(total) == pytest.approx(recorded["value"], rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(recorded["gradient"], dtype=torch.float64),
                               rtol=1e-6, atol=1e-8)


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
