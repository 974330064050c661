"""docs/reading: the short programs are as plain as they promise, and do what the full scripts do."""

import ast
import collections
import copy
import csv
import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo_llm
import ppo_llm
from tests.density import MOST, density
from tests.run_folders import ROOT, asked_once, finish, full_forward, load_script, process, records
from tools import docs_tables, plot_train_log
from tools.validate_train_log import name_of

FULL = {"grpo": grpo_llm, "ppo": ppo_llm}
PATHS = {name: ROOT / "docs" / "reading" / f"{name}.py" for name in FULL}
LINES = {"grpo": 350, "ppo": 400}
DENSITY = MOST | {"longest": 110, "width": 58, "function": 39}
# What the algorithms differ in; all else that both hold under one name is the same to the letter.
DIFFER = {"Args", "SHOWN", "policy_loss", "token_logprobs", "learning_rate", "update", "main"}
cuts = pytest.mark.parametrize("name", FULL)


@cuts
def test_a_cut_is_short_and_plain(name):
    measured = density(PATHS[name])
    bounds = DENSITY | {"lines": LINES[name]}
    assert {figure: measured[figure] for figure in bounds if measured[figure] > bounds[figure]} == {}


def test_density_counts_what_it_says(tmp_path):
    file = tmp_path / "dense.py"
    file.write_text("# a comment\n\na, b = 1, 2\nc, d = (x for x in 'ab')\ne = 1 if a else 2 if b else 3\n"
                    "f = ['', 1] * e + [0] * 3\ng = [[y for y in x] for x in f]\n"
                    "def h():\n    return 'h' * 2\ni, j = (1, 2) if a else (3, 4)\n")
    measured = density(file)
    counts = {name: number * 8 / 1000 for name, number in measured.items() if name not in
              ("lines", "longest", "width", "function")}
    assert counts == dict(pairs=1, unpacked=2, comprehensions=3, conditionals=3, products=2,
                          **{"nested comprehensions": 1, "nested conditionals": 1})
    assert (measured["lines"], measured["function"], measured["longest"]) == (10, 2, 31)


def test_what_both_cuts_hold_is_the_same_to_the_letter():
    texts = {}
    for name, path in PATHS.items():
        source = path.read_text()
        for node in ast.parse(source).body:
            what = getattr(node, "name", None) or isinstance(node, ast.Assign) and node.targets[0].id
            if what:
                texts.setdefault(what, {})[name] = ast.get_source_segment(source, node)
    both = {what: set(found.values()) for what, found in texts.items() if len(found) == 2}
    assert {what for what, found in both.items() if len(found) == 2} == DIFFER
    assert {"generate", "sample", "uniform", "rollout", "evaluate"} <= set(both)


@cuts
def test_flags_are_those_of_the_full_script(name):
    full = {flag.name: flag for flag in docs_tables.flags(ROOT / f"{name}_llm.py")}
    for flag in docs_tables.flags(PATHS[name]):
        assert flag.default == full[flag.name].default, flag
        assert full[flag.name].type.startswith(flag.type), flag


# Every function of a cut beside the full script's equations, on random tensors. Those of whole rollouts are
# compared by the runs below.
BY_RUNS = {"rollout", "evaluate", "record", "main"}
SAME, CASES = 2e-6, {}


def case(*names):
    """Of the functions that these cuts hold under the name of the test."""
    def of(compare):
        CASES.update({(name, compare.__name__.removeprefix("its_").removesuffix("_of_ppo")): compare
                      for name in names})
        return compare
    return of


def alike(found, expected, tolerance=SAME):
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ratios(seed=0):
    """Log-probabilities before and after an update, apart by more than the clip; advantages, some 0."""
    old = -draw(9, 6, seed=seed).abs()
    return old + 0.4 * draw(9, 6, seed=seed + 1), old, draw(9, 6, seed=seed + 2).mul(2).round() / 2


@case("grpo")
def its_group_advantages(cut, full, model):
    for rewards in (draw(8, 5), draw(8, 2).round(), torch.zeros(3, 4), draw(8, 4).mul(2).round()):
        for scale in (False, True):
            expected = [full.group_advantages(row, scale) for row in rewards.tolist()]
            alike(cut.group_advantages(rewards, scale), torch.tensor(np.array(expected)))


@case("grpo")
def its_policy_loss(cut, full, model):
    new, old, advantages = ratios()
    expected = full.policy_loss(new, old, advantages, torch.ones_like(new), "clip", 0.1, 0.3)
    for one, other in zip(cut.policy_loss(new, old, advantages, 0.1, 0.3), expected, strict=True):
        alike(one, other)


@case("ppo")
def its_policy_loss_of_ppo(cut, full, model):
    new, old, advantages = ratios()
    expected = full.clipped_policy_loss(new, old, advantages, 0.15)
    assert 0.1 < expected[1].double().mean() < 0.9
    for one, other in zip(cut.policy_loss(new - old, advantages, 0.15), expected, strict=True):
        alike(one, other)


@case("grpo")
def its_k3(cut, full, model):
    log_ratio = torch.cat([draw(50), 1e-4 * draw(50), torch.zeros(1)]).float()
    alike(cut.k3(log_ratio), full.k3(log_ratio), 0.0)


@case("ppo")
def its_gae(cut, full, model):
    mask = torch.arange(7) < torch.tensor([[7], [4], [1], [6]])
    rewards, values = draw(4, 7) * mask, draw(4, 7, seed=1) * mask
    for gamma, lam in ((1.0, 0.95), (0.8, 0.6), (0.9, 0.0), (0.9, 1.0)):
        alike(cut.gae(rewards, values, lam, gamma), full.gae(rewards, values, gamma, lam))
    alike(cut.gae(rewards, values, 0.7), full.gae(rewards, values, full.DISCOUNT, 0.7))


@case("ppo")
def its_whiten(cut, full, model):
    mask = (torch.arange(42) % 5 > 1).double().view(6, 7)  # with holes
    for x in (3 * draw(6, 7) + 2, 1e-6 * draw(6, 7), torch.full((6, 7), 0.1).double()):
        alike(cut.whiten(x, mask), full.whiten(x, mask))


@case("ppo")
def its_value_loss(cut, full, model):
    values, old, returns = 2 * draw(3, 9, 6)
    errors, is_clipped = full.clipped_value_loss(values, old, returns, full.VALUE_CLIP)
    assert 0.1 < is_clipped.double().mean() < 0.9
    alike(cut.value_loss(values, old, returns), errors)


@case("grpo", "ppo")
def its_learning_rate(cut, full, model):
    for iterations, warmup, final in ((20, 5, 0.2), (8, 0, 0.0), (4, 10, 0.5), (5, 5, 1.0)):
        flags = dict(iterations=iterations, warmup_iterations=warmup, final_learning_rate=final)
        for i in range(1, iterations + 1):
            if full is grpo_llm:
                flags["learning_rate"] = 2.0
                found = [cut.learning_rate(i, cut.Args(**flags)), full.learning_rate(i, full.Args(**flags))]
                assert found[0] == pytest.approx(found[1], 1e-12)
            for start in (1, 4) if full is ppo_llm else ():
                found, expected = (of.learning_rate(2.0, i, start, of.Args(**flags)) for of in (cut, full))
                assert found == pytest.approx(expected, 1e-12), (i, start)


@case("grpo", "ppo")
def its_uniform(cut, full, model):
    """SHAKE128 of a text, 8 bytes a number, of which 53 bits are used: FIPS 202."""
    for seed, found in zip("ab", cut.uniform(["a", "b"], 5).tolist(), strict=True):
        words = struct.unpack("<5Q", hashlib.shake_128(seed.encode()).digest(40))
        assert found == [(word % 2**53) / 2**53 for word in words]


@case("grpo", "ppo")
def its_sample(cut, full, model):
    logits, draws = 3 * draw(40, 11), torch.linspace(0, 1 - 1e-12, 40).double()
    for temperature in (0.0, 0.5, 1.0, 2.0):
        expected = full.sample(logits, torch.arange(40), temperature, draws)
        for one, other in zip(cut.sample(logits, temperature, draws), expected, strict=True):
            alike(one, other)


def padded(cut, lists, left=False):
    width = max(map(len, lists))
    rows = [[cut.PADDING] * (width - len(ids)) * left + ids + [cut.PADDING] * (width - len(ids)) * (not left)
            for ids in lists]
    return torch.tensor(rows)


PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11, 12, 13], [14, 15], [3, 4, 5, 6, 7], [9, 10]]


@case("grpo", "ppo")
def its_generate(cut, full, model):
    seeds = [f"seed {n}" for n in range(len(PROMPTS))]
    (_, _, _, eos, *_), _ = full.generate(model, PROMPTS[:1], 7, 1.3, [99], seeds[:1])[0]
    for temperature in (0.0, 1.3):
        expected = full.generate(model, PROMPTS, 7, temperature, [eos], seeds)
        ids, logprobs = cut.generate(model, padded(cut, PROMPTS, left=True), seeds, temperature, eos, 7)
        for row, (tokens, values) in enumerate(expected):
            assert ids[row].tolist() == tokens + [cut.PADDING] * (ids.shape[1] - len(tokens))
            alike(logprobs[row, :len(tokens)], torch.tensor(values), 1e-5)
    assert len({len(tokens) for tokens, _ in expected}) > 1


def batch_of(cut, full, model, temperature):
    """Responses of many lengths.  -> a cut's batch of them, log-probabilities, entropies, their segments"""
    lengths = (3, 1, 6, 4, 2, 6, 5)
    responses = [(3 + (draw(n, seed=n).abs() * 10).long() % 30).tolist() for n in lengths]
    segments = [full.Segment(prompt, response) for prompt, response in zip(PROMPTS, responses, strict=True)]
    ids = padded(cut, responses)
    mask = (ids != cut.PADDING).double()
    known = torch.zeros(2, *ids.shape, dtype=torch.float64)
    with torch.no_grad():
        for row, segment in enumerate(segments):
            for n, numbers in enumerate(full_forward(model, segment, temperature)):
                known[n, row, :len(segment.response_ids)] = numbers
    old = known[0] + 0.3 * draw(*ids.shape, seed=5)
    return dict(prompt_ids=padded(cut, PROMPTS, left=True), response_ids=ids, response_mask=mask,
                old_logprobs=old * mask, rewards=draw(len(ids), seed=6)), *known, segments


@case("grpo", "ppo")
def its_token_logprobs(cut, full, model):
    for temperature in (1.0, 0.7):
        batch, *expected, _ = batch_of(cut, full, model, temperature)
        for one, other in zip(cut.token_logprobs(model, batch, temperature), expected, strict=True):
            alike(one * batch["response_mask"], other, 1e-5)


@case("ppo")
def its_model_inputs(cut, full, model):
    batch, *_, segments = batch_of(cut, full, model, 1.0)
    inputs = cut.model_inputs(batch)
    for row, segment in enumerate(segments):
        chosen = inputs["attention_mask"][row] > 0
        assert inputs["input_ids"][row][chosen].tolist() == segment.ids[:int(chosen.sum())]
        assert inputs["position_ids"][row][chosen].tolist() == list(range(int(chosen.sum())))
        assert int(chosen.sum()) in (len(segment.ids) - 1, len(segment.ids))


def gradient_of(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@case("grpo")
def its_batch_loss(cut, full, model, rows=slice(None), **flags):
    """... and, with as many passes as it likes, those of an update."""
    reference = copy.deepcopy(model)
    for weight in reference.parameters():
        weight.data += 0.05 * draw(*weight.shape, seed=weight.numel())
    args = cut.Args(temperature=0.7, kl_coef=0.3, entropy_coef=0.1, clip_low=0.1, clip_high=0.2, **flags)
    batch, *_, segments = batch_of(cut, full, model, 0.7)
    batch["advantages"] = draw(len(segments), 1, seed=9)
    sums = collections.Counter()

    def of_row(row, part, logprobs, entropy):
        with torch.no_grad():
            ref, _ = full_forward(reference, segments[row], 0.7)
        old, advantage = batch["old_logprobs"][row, part], batch["advantages"][row].expand(len(logprobs))
        losses, clipped = full.policy_loss(logprobs, old, advantage, torch.ones_like(old), "clip", 0.1, 0.2)
        kl = full.k3(ref - logprobs)
        for name, x in {"policy_loss": losses, "kl_loss": kl, "entropy": entropy, "clipfrac": clipped,
                        "approx_kl": full.k3(logprobs - old)}.items():
            sums[f"train/{name}"] += x.sum().item()
        return (losses + 0.3 * kl - 0.1 * entropy).sum()

    total = sum(of_row(row, slice(len(segment.response_ids)), *full_forward(model, segment, 0.7))
                for row, segment in enumerate(segments))
    if not flags:
        loss, found = cut.batch_loss(model, reference, batch, args)
        alike(loss, total.detach(), 1e-5)
        assert found == pytest.approx(dict(sums), rel=1e-4, abs=1e-5)
        return
    (total / batch["response_mask"].sum()).backward()
    norm = float(gradient_of(model).norm())
    expected = gradient_of(model) * min(1.0, args.max_grad_norm / norm)
    model.zero_grad()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    metrics = cut.update(model, reference, torch.optim.SGD(model.parameters(), 0.5), batch, args)
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(before, model.parameters())
    assert not any(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    alike((before - after) / 0.5, expected, 1e-4)
    means = {name: total / float(batch["response_mask"].sum()) for name, total in sums.items()}
    assert metrics == pytest.approx(means | {"train/grad_norm": norm}, rel=1e-4, abs=1e-5)


@case("grpo")
def its_update(cut, full, model):
    for number, tokens in ((1, 10**4), (2, 4 * 6), (7, 1)):  # of passes
        assert -(-7 // max(1, tokens // 6)) == number
        its_batch_loss(cut, full, model, microbatch_tokens=tokens, max_grad_norm=0.5)


@case("ppo")
def its_Critic(cut, full, model):
    critic = cut.Critic(model).double()
    batch, *_, segments = batch_of(cut, full, model, 1.0)
    assert not critic(batch).any() and {*critic.head.parameters()} < {*critic.parameters()}
    critic.head.weight.data, critic.head.bias.data = draw(1, 16), draw(1)
    expected = torch.zeros_like(batch["response_mask"])
    for row, s in enumerate(segments):
        states = model.get_decoder()(torch.tensor([s.ids])).last_hidden_state[0]
        expected[row, :len(s.response_ids)] = critic.head(states[len(s.prompt_ids) - 1:-1])[:, 0].detach()
    alike(critic(batch) * batch["response_mask"], expected, 1e-5)
    critic.decoder.norm.weight.data += 1  # it is a copy
    assert not torch.equal(critic.decoder.norm.weight, model.get_decoder().norm.weight)


@case("ppo")
def its_estimate_advantages(cut, full, model):
    batch, *_, segments = batch_of(cut, full, model, 0.7)
    mask, values = batch["response_mask"], draw(*batch["response_ids"].shape, seed=3)
    for kl_coef, lam in ((0.0, 1.0), (0.4, 0.6)):
        rewards = torch.zeros_like(mask)
        for row, s in enumerate(segments):
            rewards[row, len(s.response_ids) - 1] = batch["rewards"][row]
            with torch.no_grad():
                drift = batch["old_logprobs"][row, :len(s.response_ids)] - full_forward(model, s, 0.7)[0]
            rewards[row, :len(s.response_ids)] -= kl_coef * drift
        advantages = full.gae(rewards, values * mask, full.DISCOUNT, lam)
        returns, chosen = (advantages + values * mask)[mask > 0], advantages[mask > 0]
        args = cut.Args(kl_coef=kl_coef, gae_lambda=lam, temperature=0.7)
        found = dict(batch)
        metrics = cut.estimate_advantages(lambda batch: values, model, found, args)
        alike(found["values"] * mask, values * mask, 1e-5)
        alike(found["returns"][mask > 0], returns, 1e-5)
        alike(found["advantages"], full.whiten(advantages, mask), 1e-5)
        explained = 1 - chosen.var(correction=0) / returns.var(correction=0)
        assert metrics == {"critic/vf_explained_var": pytest.approx(float(explained), abs=1e-5)}


@case("ppo")
def its_policy_terms(cut, full, model):
    batch, logprobs, entropy, _ = batch_of(cut, full, model, 0.7)
    batch["advantages"], mask = draw(*logprobs.shape, seed=8), batch["response_mask"]
    losses, clipped = full.clipped_policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], 0.1)
    found, logged = cut.policy_terms(model, batch, cut.Args(clip=0.1, entropy_coef=0.3, temperature=0.7))
    alike(found * mask, (losses - 0.3 * entropy) * mask, 1e-5)
    expected = {"policy_loss": losses, "entropy": entropy, "clipfrac": clipped.double(),
                "approx_kl": full.k3(logprobs - batch["old_logprobs"])}
    assert {*logged} == {f"train/{name}" for name in expected}
    for name, x in expected.items():
        alike(logged[f"train/{name}"].double() * mask, x * mask, 1e-5)


@case("ppo")
def its_value_terms(cut, full, model):
    values, old, returns = 2 * draw(3, 5, 4)
    batch = dict(values=old, returns=returns)
    errors, _ = full.clipped_value_loss(values, old, returns, full.VALUE_CLIP)
    found, logged = cut.value_terms(lambda given: values, batch, cut.Args())
    alike(found, errors / 2)
    for name, x in {"train/value_loss": errors / 2, "critic/vf_loss": errors}.items():
        alike(logged.pop(name), x)
    assert not logged


@case("ppo")
def its_update_of_ppo(cut, full, model):
    """Of three minibatches, two epochs; the steps are held against plain gradients, the log against means."""
    weight = torch.nn.Linear(1, 1, bias=False).double()
    mask = (torch.arange(6) < torch.tensor([[6], [1], [4], [2], [5], [3], [6]])).double()
    batch = dict(rewards=draw(7), response_mask=mask, x=draw(7, 6))

    def terms(model, batch, args):
        losses = batch["x"] * torch.sin(model.weight) * 3
        return losses, {"train/some": batch["x"]}

    torch.manual_seed(4)
    orders = [torch.randperm(7).tensor_split(3) for _ in range(2)]
    at, norms = weight.weight.item(), []
    for rows in (*orders[0], *orders[1]):
        mean = float((batch["x"] * mask)[rows].sum() / mask[rows].sum())
        norms.append(abs(mean * math.cos(at) * 3))
        at -= 0.2 * mean * math.cos(at) * 3 * min(1.0, full.MAX_GRAD_NORM / norms[-1])
    torch.manual_seed(4)
    metrics = cut.update("train", weight, terms, torch.optim.SGD(weight.parameters(), 0.2), batch, 2, 3, None)
    assert weight.weight.item() == pytest.approx(at, rel=1e-5) and min(norms) < 1 < max(norms)
    assert metrics == pytest.approx({"train/some": float((batch["x"] * mask).sum() / mask.sum()),
                                     "train/grad_norm": sum(norms) / 6}, rel=1e-5)


def functions_of(name):
    """All that a cut defines, but for its flags and what whole runs compare."""
    return [node.name for node in ast.parse(PATHS[name].read_text()).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in BY_RUNS | {"Args"}]


@pytest.mark.parametrize("name, function", [
    (name, function) for name in FULL for function in functions_of(name)])
def test_each_function_of_a_cut_is_the_full_scripts_equation(name, function, random_llama):
    assert (name, function) in CASES, f"docs/reading/{name}.py: no case compares {function}"
    model = random_llama()
    model.as_forward = lambda function: function()
    CASES[name, function](load_script(PATHS[name]), FULL[name], model)


FEWER = {"grpo": dict(iterations=2, prompts_per_iteration=16),
         "ppo": dict(iterations=2, prompts_per_iteration=64, critic_warmup=1)}
DEFAULT = {"grpo": dict(iterations=6), "ppo": dict(iterations=6, critic_warmup=2)}
OTHER = {  # every flag that is not the default, in little
    "grpo": dict(iterations=2, seed=2, prompts_per_iteration=6, group_size=3, microbatch_tokens=100, epochs=2,
                 scale_rewards=True, clip_low=0.05, clip_high=0.1, kl_coef=0.1, temperature=0.8, beta2=0.9,
                 max_grad_norm=0.1, warmup_iterations=1, final_learning_rate=0.5, learning_rate=1e-3,
                 entropy_coef=0.1, max_response_tokens=12, eval_every=2),
    "ppo": dict(iterations=2, seed=2, prompts_per_iteration=12, epochs=1, minibatches=2, critic_epochs=2,
                critic_minibatches=3, critic_warmup=1, critic_learning_rate=2e-3, critic_beta2=0.8, beta2=0.9,
                gae_lambda=0.8, clip=0.05, kl_coef=0.1, temperature=2.0, warmup_iterations=1,
                final_learning_rate=0.5, learning_rate=1e-3, entropy_coef=0.1, max_response_tokens=12,
                eval_every=2),
}
EXACT = ("iteration", "env_steps", "opt_steps", "train/reward", "rollout/", "response_length/", "val/")


@pytest.mark.parametrize("name, flags", [
    *OTHER.items(),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (*FEWER.items(), *DEFAULT.items()))])
def test_first_iterations_log_what_the_full_script_logs(name, flags, tmp_path):
    few = dict(eval_every=0, eval_tasks=8, eval_samples=2, env_kwargs=("test_tasks=32",))
    cut = load_script(PATHS[name])
    for script, folder in ((FULL[name], "full"), (cut, "cut")):
        with asked_once(script):
            script.main(script.Args(**few | flags, run_dir=str(tmp_path / folder)))
    full, short = records(tmp_path / "full"), records(tmp_path / "cut")
    assert len(short) == len(full) == flags["iterations"] + 1
    learned = {"train/policy_loss", "train/entropy", "train/grad_norm", "train/approx_kl", "train/reward"}
    assert learned <= set(short[-1])
    for theirs, ours in zip(full, short, strict=True):
        for key in ours.keys() - {"wall_time_s"}:
            assert name_of(name, key), f"{key} is not in METRICS"
            tolerance = 1e-7 if key.startswith(EXACT) else 1e-3  # a mean is rounded to float32 here
            assert ours[key] == pytest.approx(theirs[key], tolerance, 1e-3 * tolerance), key
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model")
    start = AutoModelForCausalLM.from_pretrained(cut.Args.model)
    assert not model.get_input_embeddings().weight.equal(start.get_input_embeddings().weight)


@cuts
def test_what_a_cut_cannot_do_is_said_at_once(name, tmp_path):
    cut = load_script(PATHS[name])
    with pytest.raises(SystemExit, match="several turns"):
        cut.main(cut.Args(env="tests/two_turn.py:TwoTurn"))
    (tmp_path / "train_log.jsonl").write_text("a run's\n")
    with pytest.raises(FileExistsError):
        cut.main(cut.Args(run_dir=str(tmp_path)))
    assert (tmp_path / "train_log.jsonl").read_text() == "a run's\n"


@pytest.mark.slow
@pytest.mark.release
@cuts
def test_the_default_run_ends_where_those_of_the_full_script_do(name, tmp_path):
    finish(process(f"docs/reading/{name}.py", "--run-dir", tmp_path))
    last = records(tmp_path)[-1]
    with (ROOT / "docs" / "results" / f"{name}_llm.csv").open() as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}  # the last of each metric
    for metric in ("val/countdown/greedy", "val/countdown/pass@1", "val/countdown/pass@16"):
        assert last[metric] > float(rows[metric]["low"]) - 0.03, metric
    assert last["env_steps"] == pytest.approx(float(rows["val/countdown/greedy"]["env_steps"]), rel=0.02)
    figure = tmp_path / "train.png"
    assert plot_train_log.main(["--log", str(tmp_path), "--out", str(figure)]) == 0
    assert figure.stat().st_size > 10_000
