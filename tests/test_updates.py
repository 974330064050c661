"""An iteration of grpo_llm.py and ppo_llm.py, replayed: what a run's flags do to weights and optimiser.

A run keeps its checkpoints and all episodes. From the first checkpoint and the episodes of the second
iteration all that this iteration learns and logs is computed here again, in float64, sequence by sequence, as
the papers have it. It must come to the second checkpoint and to the second record.
"""

import itertools
import math
import statistics

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import grpo_llm
import ppo_llm
from tests.run_folders import TINY, episodes, records, slow_but, train
from tools.validate_train_log import validate

torch.set_num_threads(1)
NOISE = 1.2e-3  # what the sampler's log-probabilities are off by [nats]: just under what ends a run
RUN = dict(iterations=2, checkpoint_every=1, keep_checkpoints=0, log_episodes=1.0, eval_every=0, eval_tasks=1,
           eval_samples=1, warmup_iterations=4, learning_rate=2e-3)
VALUE_CLIP, VALUE_COEF = 0.5, 5.0  # docs/ppo_llm.md
TURNS = dict(env="tests/two_turn.py:FourTurn", env_kwargs=("test_tasks=32",), max_context_tokens=45)


def noisy_run(script, folder, monkeypatch, **flags):
    """A run whose sampler reports log-probabilities that are a little too high and too low, by turns."""
    generate = script.generate

    def noisy(*given):
        return [(ids, [p + NOISE * (-1) ** (n + i) for i, p in enumerate(logprobs)])
                for n, (ids, logprobs) in enumerate(generate(*given))]

    monkeypatch.setattr(script, "generate", noisy)
    return train(script, folder, **RUN | flags)


# Models


def base_model():
    return AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager").double().eval()


def checkpoint(folder, iteration):
    """-> trained weights of the policy, what else the trainer keeps"""
    path = folder / "checkpoints" / f"step_{iteration:06d}"
    weights = load_file(next(path.glob("*model.safetensors")))
    state = torch.load(path / "trainer_state.pt")
    return {clean(name): tensor.double() for name, tensor in weights.items()}, state


def clean(name):
    """A weight's name without the marks of PEFT, of a critic and of two modules that are trained together."""
    for prefix in ("0.", "1.", "base_model.model.", "decoder."):
        name = name.removeprefix(prefix)
    return name.replace(".default.", ".").replace("lm_head.", "").removeprefix("model.")


def forward(model, trained, ids, scale=0.0):
    """A plain model whose weights are replaced, or to which LoRA's products are added.  -> states, logits"""
    weights = {}
    for name, tensor in trained.items():
        if ".lora_A." in name:
            target = "model." + name.replace(".lora_A.", ".")
            product = trained[name.replace(".lora_A.", ".lora_B.")] @ tensor
            weights[target] = model.get_parameter(target) + scale * product
        elif ".lora_B." not in name and not name.startswith("head."):
            weights["model." + name] = tensor
    out = functional_call(model, weights, (torch.tensor([ids]),), dict(use_cache=False,
                                                                       output_hidden_states=True))
    return out.hidden_states[-1][0], out.logits[0]


def response_of(s, states, logits, temperature):
    """The decoder's states before each token of a response, its log-probabilities and entropies."""
    before = slice(len(s["prompt_ids"]) - 1, -1)
    p = torch.log_softmax(logits[before] / temperature, -1)
    targets = torch.tensor(s["response_ids"])
    return states[before], p[torch.arange(len(targets)), targets], -(p.exp() * p).sum(-1)


# Losses, of each token of a sequence


def k3(log_ratio):
    """arXiv:2402.03300, eq. 4."""
    return torch.exp(log_ratio) - log_ratio - 1


def surrogate(kind, new, old, advantage, chosen, low, high):
    """PPO eq. 7, CISPO eq. 4, GSPO eq. 5.  -> loss, whether the clip binds"""
    ratio = torch.exp(new - old)
    if kind == "gspo":
        ratio = torch.exp((new - old)[chosen].mean()).expand_as(new)
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    if kind == "cispo":
        return -clipped.detach() * advantage * new, ratio != clipped
    return -torch.minimum(ratio * advantage, clipped * advantage), clipped * advantage < ratio * advantage


def of_grpo(s, new, entropy, flags, known):
    """A segment's loss at each token, and what is logged of it."""
    chosen = torch.tensor(s["response_mask"]) > 0
    loss, binds = surrogate(flags.get("loss", "clip"), new, known["old"], s["advantage"], chosen,
                            flags.get("clip_low", 0.2), flags.get("clip_high", 0.28))
    mismatch = torch.exp(known["old"] - known["sampled"])
    cap = flags.get("tis_cap", 2.0)
    loss = loss * (mismatch.clamp(max=cap) if cap else 1)
    kl = k3(known["ref"] - new) if flags.get("kl_coef") else 0 * new
    total = loss + flags.get("kl_coef", 0.0) * kl - flags.get("entropy_coef", 0.02) * entropy
    return total, {"train/policy_loss": loss, "train/kl_loss": kl, "train/entropy": entropy,
                   "train/clipfrac": binds, "train/approx_kl": k3(new - known["old"]),
                   "mismatch/kl": k3(known["old"] - known["sampled"]),
                   "mismatch/frac_capped": mismatch > (cap or math.inf)}


def of_ppo(s, new, entropy, flags, known):
    advantages = torch.tensor(s["advantages"], dtype=torch.float64)
    loss, binds = surrogate("clip", new, known["old"], advantages, None, *[flags.get("clip", 0.2)] * 2)
    loss = loss * torch.exp(known["old"] - known["sampled"]).clamp(max=2.0)
    return loss - flags.get("entropy_coef", ppo_llm.Args().entropy_coef) * entropy, {
        "train/policy_loss": loss, "train/entropy": entropy, "train/clipfrac": binds,
        "train/approx_kl": k3(new - known["old"]), "train/advantage": advantages}


def of_critic(s, values):
    old, returns = (torch.tensor(s[name], dtype=torch.float64) for name in ("values", "returns"))
    near = torch.maximum(torch.minimum(values, old + VALUE_CLIP), old - VALUE_CLIP)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return errors / 2, {"train/value_loss": errors / 2, "critic/vpred_mean": values, "critic/vf_loss": errors,
                        "critic/vf_clipfrac": errors > (values - returns) ** 2}


# What is learned from


def group_advantages(rewards, flags):
    """GRPO, Dr. GRPO, RLOO, one group at a time."""
    found = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1:]
        advantage = reward - statistics.fmean(others if flags.get("baseline") == "loo" else rewards)
        advantage /= statistics.pstdev(rewards) + 1e-6 if flags.get("scale_rewards") else 1
        balance = flags.get("advantage_balance", 0.0)
        found.append(advantage * (1 - max(balance, 0.0) if advantage < 0 else 1 + min(balance, 0.0)))
    return found


def grpo_segments(played, flags):
    """The segments of each group that teaches, with their advantages, which the log must hold too."""
    groups = []
    for _, members in itertools.groupby(played, key=lambda episode: episode["task_id"]):
        members = [episode for episode in members if episode["termination"] != "error"]
        rewards = [episode["reward"] for episode in members]
        if len(set(rewards)) < 2:
            continue
        groups.append([])
        for episode, advantage in zip(members, group_advantages(rewards, flags), strict=True):
            cut = flags.get("mask_truncated") and episode["termination"] in ("length", "context")
            for s in () if cut else episode["segments"]:
                assert s["advantage"] == pytest.approx(advantage, abs=1e-5)
                groups[-1].append(s | dict(advantage=advantage))
    return groups


def ppo_segments(played, flags):
    sound = [episode["segments"] for episode in played if episode["termination"] != "error"]
    return [learned for segments in sound if (learned := [s for s in segments if any(s["response_mask"])])]


def weight_of(s, segments, flags):
    """What a token's loss is multiplied by."""
    num_tokens, own = sum(sum(one["response_mask"]) for one in segments), sum(s["response_mask"])
    return {"token": 1 / num_tokens, "sequence": 1 / (own * len(segments)),
            "constant": 1 / (flags.get("max_response_tokens", 16) * len(segments))}[
                flags.get("aggregation", "token")]


class Adam:
    """arXiv:1412.6980, algorithm 1, from the moments of a checkpoint on."""

    def __init__(self, trained, state, rate, beta2, max_norm):
        self.trained, self.rate, self.beta2, self.max_norm, self.norms = trained, rate, beta2, max_norm, []
        kept = {clean(name): moments for name, moments in state["state"].items()} if state else {}
        self.moments = {name: [kept[name][of].double() for of in ("exp_avg", "exp_avg_sq")] if kept
                        else [torch.zeros_like(tensor) for _ in range(2)] for name, tensor in trained.items()}
        self.steps = float(next(iter(kept.values()))["step"]) if kept else 0.0

    def step(self, loss):
        gradients = torch.autograd.grad(loss, [*self.trained.values()])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        self.norms.append(norm)
        self.steps += 1
        for (name, tensor), g in zip(self.trained.items(), gradients, strict=True):
            g = g * min(1.0, self.max_norm / norm)
            m, v = self.moments[name]
            m, v = self.moments[name] = [0.9 * m + 0.1 * g, self.beta2 * v + (1 - self.beta2) * g * g]
            with torch.no_grad():
                step = m / (1 - 0.9**self.steps) / ((v / (1 - self.beta2**self.steps)).sqrt() + 1e-8)
                tensor -= self.rate * step

    def check(self, weights, state, tolerance):
        """That the checkpoint holds these weights and moments."""
        kept = {clean(name): moments for name, moments in state["state"].items()}
        assert kept.keys() == self.moments.keys() <= weights.keys()
        for of, number in (("exp_avg", 0), ("exp_avg_sq", 1)):
            near({name: moments[of] for name, moments in kept.items()},
                 {name: moments[number] for name, moments in self.moments.items()}, tolerance)


def near(found, expected, tolerance):
    """All numbers together, relative to their size."""
    one, other = (torch.cat([numbers[name].double().flatten() for name in expected]) for numbers in
                  (found, expected))
    difference = float((one - other).norm() / other.norm())
    assert difference < tolerance, difference


def learnable(weights):
    return {name: tensor.double().clone().requires_grad_() for name, tensor in weights.items()}


def mean_of(sums, segments, times=1):
    num_tokens = sum(sum(s["response_mask"]) for s in segments) * times
    return {name: float(value) / num_tokens for name, value in sums.items()}


# The tests


GRPO = {
    "cut": dict(microbatch_tokens=20),
    "failing": dict(env="tests/two_turn.py:Flaky", env_kwargs=("test_tasks=32",), group_size=8,
                    temperature=1.5),
    "turns": dict(TURNS, prompts_per_iteration=3, kl_coef=0.3, epochs=2, mask_truncated=True,
                  microbatch_tokens=60, tis_cap=0.0),
    "lora": dict(lora_rank=2, lora_alpha=8, kl_coef=0.3, epochs=2, learning_rate=2e-2),
    "dynamic": dict(dynamic_sampling=2, prompts_per_iteration=3, temperature=0.3),
    "loo": dict(baseline="loo", scale_rewards=True, advantage_balance=0.4, beta2=0.9, entropy_coef=0.01,
                tis_cap=1.0005, max_grad_norm=0.01, temperature=0.7),
    "balance": dict(advantage_balance=-0.6, clip_low=0.01, clip_high=0.02, epochs=2),
    "cispo-sequence": dict(loss="cispo", aggregation="sequence", epochs=2),
    "gspo-constant": dict(TURNS, loss="gspo", aggregation="constant", clip_low=0.02, clip_high=0.02, epochs=2,
                          prompts_per_iteration=3, microbatch_tokens=60),
}


@pytest.mark.parametrize("case", slow_but([name for name in GRPO if name not in ("cut", "balance")], GRPO))
def test_an_iteration_of_grpo_is_its_equations(case, tmp_path, monkeypatch):
    flags = GRPO[case]
    folder = noisy_run(grpo_llm, tmp_path / "run", monkeypatch, **flags)
    assert validate(folder, strict=True)["ok"]
    played, _ = episodes(folder, "train_step_000002")
    groups = grpo_segments(played, flags)
    segments = [s for group in groups[:flags.get("prompts_per_iteration")] for s in group]
    record, model, scale = records(folder)[-1], base_model(), flags.get("lora_alpha", 32) / 2
    before, state = checkpoint(folder, 1)
    trained, num_epochs = learnable(before), flags.get("epochs", 1)
    adam = Adam(trained, state["optimizer"], flags.get("learning_rate", 2e-3) * 2 / 4,
                flags.get("beta2", 0.95), flags.get("max_grad_norm", 1.0))
    temperature, known, sums = flags.get("temperature", 1.0), {}, {}
    for epoch in range(num_epochs):
        loss = 0.0
        for number, s in enumerate(segments):
            ids = s["prompt_ids"] + s["response_ids"]
            _, new, entropy = response_of(s, *forward(model, trained, ids, scale), temperature)
            if not epoch:
                with torch.no_grad():
                    _, ref, _ = response_of(s, *forward(model, {}, ids), temperature)
                known[number] = dict(old=new.detach(), ref=ref, sampled=torch.tensor(
                    s["rollout_logprobs"], dtype=torch.float64))
            chosen = torch.tensor(s["response_mask"]) > 0
            total, logged = of_grpo(s, new, entropy, flags, known[number])
            loss = loss + total[chosen].sum() * weight_of(s, segments, flags)
            for name, x in logged.items():
                weight = weight_of(s, segments, flags) if name == "train/policy_loss" else 1.0
                sums[name] = sums.get(name, 0.0) + float(x.detach()[chosen].double().sum()) * weight
        adam.step(loss)

    after, state = checkpoint(folder, 2)
    tolerance = 1e-4 if num_epochs == 1 else 3e-3
    adam.check(after, state["optimizer"], tolerance)
    near({name: after[name] - before[name] for name in trained},
         {name: trained[name].detach() - before[name] for name in trained}, 2e-2)
    expected = mean_of({name: x for name, x in sums.items() if name != "train/policy_loss"}, segments,
                       num_epochs) | {"train/policy_loss": sums["train/policy_loss"] / num_epochs,
                                      "train/grad_norm": statistics.fmean(adam.norms),
                                      "train/learning_rate": adam.rate,
                                      "rollout/groups_trainable": len(groups)}
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name
    assert num_epochs == 1 or record["train/clipfrac"] > 0
    assert record["mismatch/ratio_max"] == pytest.approx(math.exp(NOISE), rel=1e-4)
    assert case != "turns" or record["rollout/segments"] > 1
    assert case != "dynamic" or len(groups) > 3
    assert case != "failing" or any(len(group) < flags["group_size"] for group in groups)


PPO = {
    "default": {},
    "cut": dict(microbatch_tokens=20, beta2=0.9, critic_beta2=0.8, clip=0.05),
    "turns": dict(TURNS, prompts_per_iteration=5, critic_epochs=1, microbatch_tokens=60, temperature=0.7),
    "lora": dict(lora_rank=2, lora_alpha=8, learning_rate=2e-2, critic_learning_rate=2e-2),
    "shared": dict(critic="shared", entropy_coef=0.1),
    "shared-lora": dict(critic="shared", lora_rank=2, lora_alpha=8, learning_rate=2e-2),
    "none": dict(critic="none"),
    "target": dict(critic="none", target_kl=0.05, microbatch_tokens=20),  # more than that of each pass
}


@pytest.mark.parametrize("case", slow_but(("cut", "turns", "shared", "target"), PPO))
def test_an_iteration_of_ppo_is_its_equations(case, tmp_path, monkeypatch):
    flags = dict(critic_epochs=2, critic_minibatches=1, minibatches=1, epochs=2, critic_warmup=0,
                 critic_learning_rate=5e-3) | PPO[case]
    folder = noisy_run(ppo_llm, tmp_path / "run", monkeypatch, **flags)
    assert validate(folder, strict=True)["ok"]
    learned = ppo_segments(episodes(folder, "train_step_000002")[0], flags)
    segments = [s for episode in learned for s in episode]
    record, model, scale = records(folder)[-1], base_model(), flags.get("lora_alpha", 32) / 2
    temperature, kind = flags.get("temperature", 1.0), flags.get("critic", "own")
    before, state = checkpoint(folder, 1)
    after, end = checkpoint(folder, 2)
    critic = {clean(name): tensor.double() for name, tensor in state["critic"].items()}
    trained = learnable(before | (critic if kind == "shared" else {}))
    rate = flags.get("learning_rate", 2e-3) * 2 / 4
    adam = Adam(trained, state["optimizer"], rate, flags.get("beta2", 0.95), 1.0)
    known = []
    for s in segments:  # what is logged of the policy and the critic before the update
        ids, chosen = s["prompt_ids"] + s["response_ids"], torch.tensor(s["response_mask"])
        states, new, _ = response_of(s, *forward(model, trained, ids, scale), temperature)
        if kind == "own":
            states, *_ = response_of(s, *forward(model, critic, ids, scale), temperature)
        values = states @ critic["head.weight"][0] + critic["head.bias"] if critic else 0 * new
        found = torch.tensor([s["old_logprobs"], s["values"]], dtype=torch.float64)
        torch.testing.assert_close(found[:, chosen > 0], torch.stack([new, values]).detach()[:, chosen > 0],
                                   rtol=1e-4, atol=2e-5)
        known.append(dict(old=new.detach(), sampled=torch.tensor(s["rollout_logprobs"], dtype=torch.float64)))

    def epochs(adam, trained, count, of_segment, stop=math.inf):
        sums, done = {}, 0
        for _ in range(count):
            loss, kl = 0.0, 0.0
            for s, numbers in zip(segments, known, strict=True):
                chosen = torch.tensor(s["response_mask"]) > 0
                out = forward(model, trained, s["prompt_ids"] + s["response_ids"], scale)
                total, logged = of_segment(s, response_of(s, *out, temperature), trained, numbers)
                loss = loss + total[chosen].sum() * weight_of(s, segments, {})
                for name, x in logged.items():
                    sums[name] = sums.get(name, 0.0) + float(x.detach()[chosen].double().sum())
                kl += float(logged.get("train/approx_kl", 0 * total).detach()[chosen].sum())
            done += 1
            if kl * weight_of(segments[0], segments, {}) > stop:
                break
            adam.step(loss)
        return mean_of(sums, segments, done)

    def policy(s, response, trained, numbers):
        states, new, entropy = response
        loss, logged = of_ppo(s, new, entropy, flags, numbers)
        if kind != "shared":
            return loss, logged
        value_loss, more = of_critic(s, states @ trained["head.weight"][0] + trained["head.bias"])
        return loss + VALUE_COEF * value_loss, logged | more

    def value(s, response, trained, numbers):
        return of_critic(s, response[0] @ trained["head.weight"][0] + trained["head.bias"])

    expected = epochs(adam, trained, 2, policy, flags.get("target_kl", math.inf))
    expected["train/grad_norm"], expected["train/learning_rate"] = statistics.fmean(adam.norms), rate
    expected["train/policy_steps"] = len(adam.norms)
    adam.check(trained, end["optimizer"], 3e-3)
    near({name: after[name] - before[name] for name in before},
         {name: trained[name].detach() - before[name] for name in before}, 2e-2)
    if kind == "own":
        weights = learnable(critic)
        fit = Adam(weights, state["critic_optimizer"], flags["critic_learning_rate"] * 2 / 4,
                   flags.get("critic_beta2", 0.99), 1.0)
        expected |= epochs(fit, weights, flags["critic_epochs"], value)
        expected["critic/grad_norm"], expected["critic/learning_rate"] = statistics.fmean(fit.norms), fit.rate
        fit.check(weights, end["critic_optimizer"], 3e-3)
        moved = {clean(name): tensor.double() - critic[clean(name)] for name, tensor in end["critic"].items()}
        near(moved, {name: weights[name].detach() - critic[name] for name in weights}, 2e-2)
    for name, number in expected.items():
        rounded = 0.05 if name == "critic/vf_clipfrac" else 2e-6  # where the two errors are all but equal
        assert record[name] == pytest.approx(number, rel=3e-3, abs=rounded), name
    assert len(adam.norms) == (1 if case == "target" else 2) and record["train/clipfrac"] + (
        case == "target") > 0


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_minibatches_share_out_every_group_or_episode(script, tmp_path, monkeypatch):
    """Two, of an odd number, at a rate of nothing: the first moment tells the gradient of each."""
    flags = dict(minibatches=2, learning_rate=1e-30, entropy_coef=0.0, warmup_iterations=0)
    flags |= (dict(critic="none", prompts_per_iteration=5, epochs=1) if script is ppo_llm else
              dict(prompts_per_iteration=5))
    folder = noisy_run(script, tmp_path / "run", monkeypatch, **flags)
    played, _ = episodes(folder, "train_step_000002")
    units = (ppo_segments if script is ppo_llm else grpo_segments)(played, flags)
    (_, first), (before, last) = (checkpoint(folder, n) for n in (1, 2))
    trained, model, sums = learnable(before), base_model(), []
    for unit in units:
        loss = 0.0
        for s in unit:
            chosen = torch.tensor(s["response_mask"]) > 0
            out = forward(model, trained, s["prompt_ids"] + s["response_ids"])
            _, new, entropy = response_of(s, *out, 1.0)
            known = dict(old=new.detach(), sampled=torch.tensor(s["rollout_logprobs"], dtype=torch.float64))
            loss = loss + (of_ppo if script is ppo_llm else of_grpo)(s, new, entropy, flags, known)[0][
                chosen].sum()
        gradients = torch.autograd.grad(loss, [*trained.values()])
        sums.append((torch.cat([g.flatten() for g in gradients]), sum(sum(s["response_mask"]) for s in unit)))

    def moment(state):
        kept = {clean(name): moments["exp_avg"] for name, moments in state["optimizer"]["state"].items()}
        return torch.cat([kept[name].double().flatten() for name in trained])

    def mean_gradient(numbers):
        total = sum(sums[n][0] for n in numbers) / sum(sums[n][1] for n in numbers)
        return total * min(1.0, 1.0 / float(total.norm()))

    found, everything = moment(last) - 0.81 * moment(first), range(len(units))
    errors = []
    for size in (len(units) // 2, len(units) - len(units) // 2):
        for chosen in itertools.combinations(everything, size):
            others = [n for n in everything if n not in chosen]
            expected = 0.09 * mean_gradient(chosen) + 0.1 * mean_gradient(others)
            errors.append(float((found - expected).norm() / expected.norm()))
    assert len(units) % 2 and min(errors) < 1e-3 and sorted(errors)[1] > 1e-2


def test_the_weight_between_ppos_sampler_and_trainer_is_capped_at_two(tmp_path, monkeypatch):
    """A token that the trainer finds 4 times as likely as the sampler said is as one 8 times as likely."""
    generate, ends, capped = ppo_llm.generate, [], []
    for times in (4.0, 8.0):
        def off(*given, times=times):
            (ids, (first, *others)), *replies = generate(*given)
            return [(ids, [first - math.log(times), *others]), *replies]

        monkeypatch.setattr(ppo_llm, "generate", off)
        folder = train(ppo_llm, tmp_path / f"{times}", **RUN | dict(
            iterations=1, dtype="bfloat16", critic="none", epochs=1, minibatches=1, prompts_per_iteration=16))
        ends.append(checkpoint(folder, 1)[1]["optimizer"]["state"]["model.norm.weight"]["exp_avg"])
        capped.append(records(folder)[1]["mismatch/frac_capped"] > 0)
    assert capped == [True, True] and torch.equal(*ends)
