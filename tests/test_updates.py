"""An iteration of grpo_llm.py and ppo_llm.py, replayed: what a run's flags do to weights and optimiser.

From the first checkpoint and the episodes of the second iteration all that this iteration learns and logs is
computed here again, in float64, sequence by sequence, as the papers have it.
"""

import collections
import functools
import itertools
import math
import statistics

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import grpo_llm
import ppo_llm
from tests.run_folders import (
    TINY,
    episodes,
    killed_after,
    records,
    same_checkpoint,
    same_numbers,
    slow_but,
    timeless,
    train,
)
from tests.test_sft import write_model
from tools.validate_train_log import validate

torch.set_num_threads(1)
NOISE = 1.2e-3  # what the sampler's log-probabilities are off by [nats]: just under what ends a run
RUN = dict(iterations=2, checkpoint_every=1, keep_checkpoints=0, log_episodes=1.0, eval_every=0, eval_tasks=1,
           eval_samples=1, warmup_iterations=4, learning_rate=2e-3)
VALUE_CLIP, VALUE_COEF = 0.5, 5.0  # docs/ppo_llm.md
TURNS = dict(env="tests/two_turn.py:FourTurn", env_kwargs=("test_tasks=32",), max_context_tokens=45,
             reward_fn=f"{__file__}:patience")
CHECKSUM = "tests/test_draws.py:checksum"


def patience(r):
    return 0.5 - len(r.turns) - (r.termination == "context")


def noisy_run(script, folder, monkeypatch, **flags):
    """A run whose sampler reports log-probabilities that are a little too high and too low, by turns."""
    generate = script.generate

    def noisy(*given):
        return [(ids, [p + NOISE * (-1) ** (n + i) for i, p in enumerate(logprobs)])
                for n, (ids, logprobs) in enumerate(generate(*given))]

    monkeypatch.setattr(script, "generate", noisy)
    return train(script, folder, **RUN | flags)


@functools.cache
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


def k3(log_ratio):
    """arXiv:2402.03300, eq. 4."""
    return torch.exp(log_ratio) - log_ratio - 1


def surrogate(kind, new, old, advantage, chosen, low, high):
    """PPO eq. 7, CISPO eq. 4, GSPO eq. 5, DPPO eq. 12, SAPO eq. 6, REINFORCE.  -> loss, whether it binds"""
    ratio, unbound = torch.exp(new - old), torch.zeros(new.shape, dtype=torch.bool)
    if kind == "pg":
        return -advantage * new, unbound
    if kind == "sapo":  # by an identity: the gate is (2 / t) (1 + tanh(t (ratio - 1) / 2))
        t = 1.0 if advantage > 0 else 1.05
        return -advantage * (1 + torch.tanh(t * (ratio - 1) / 2)) * 2 / t, unbound
    if kind == "dppo":
        far = (new.exp() - old.exp()) * math.copysign(1, advantage) > 0.2
        return torch.where(far, 0.0, -ratio * advantage) + 1e-3 * (new - old) ** 2, far
    if kind == "gspo":
        ratio = torch.exp((new - old)[chosen].mean()).expand_as(new)
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    if kind == "cispo":
        return -clipped.detach() * advantage * new, ratio != clipped
    return -torch.minimum(ratio * advantage, clipped * advantage), clipped * advantage < ratio * advantage


def corrections(log_mismatch, chosen, flags):
    """The weight of each token, one at a time, and whether it is not the ratio itself."""
    kind = flags.get("correction", "none" if flags.get("loss") == "dppo" else "tis")
    usual = dict(tis=(0, 2), icepop=(0.5, 5), mis=(0, 3), none=(0, 1))
    low, high = flags.get("correction_bounds", usual[kind])
    found = []
    for value in log_mismatch.tolist():
        ratio = math.exp(float(log_mismatch[chosen].sum()) if kind == "mis" else value)
        kept = min(max(ratio, low), high)
        if kind == "none":
            kept = ratio = 1.0
        elif kind != "tis" and kept != ratio:
            kept = 0.0
        found.append((kept, kept != ratio))
    weights, are_bound = zip(*found, strict=True)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(are_bound)


def of_grpo(s, response, flags, known):
    """The loss at each token of a segment, and what is logged of it."""
    _, new, entropy = response
    chosen = torch.tensor(s["response_mask"]) > 0
    kind = flags.get("loss", "clip")
    loss, binds = surrogate(kind, new, known["sampled" if kind == "dppo" else "old"], s["advantage"], chosen,
                            flags.get("clip_low", 0.2), flags.get("clip_high", 0.28))
    weights, are_bound = corrections(known["old"] - known["sampled"], chosen, flags)
    loss = loss * weights
    kl = k3(known["ref"] - new) if flags.get("kl_coef") else 0 * new
    total = loss + flags.get("kl_coef", 0.0) * kl - flags.get("entropy_coef", 0.02) * entropy
    return total, {"train/policy_loss": loss, "train/kl_loss": kl, "train/entropy": entropy,
                   "train/clipfrac": binds, "train/approx_kl": k3(new - known["old"]),
                   "mismatch/kl": k3(known["old"] - known["sampled"]),
                   "mismatch/frac_capped": are_bound}


def of_ppo(s, response, flags, known):
    _, new, entropy = response
    advantages = torch.tensor(s["advantages"], dtype=torch.float64)
    loss, binds = surrogate("clip", new, known["old"], advantages, None, *[flags.get("clip", 0.2)] * 2)
    loss = loss * torch.exp(known["old"] - known["sampled"]).clamp(max=2.0)
    return loss - flags.get("entropy_coef", ppo_llm.Args().entropy_coef) * entropy, {
        "train/policy_loss": loss, "train/entropy": entropy, "train/clipfrac": binds,
        "train/approx_kl": k3(new - known["old"]), "train/advantage": advantages}


def of_critic(s, response, head):
    values = response[0] @ head["head.weight"][0] + head["head.bias"]
    old, returns = (torch.tensor(s[name], dtype=torch.float64) for name in ("values", "returns"))
    near = torch.maximum(torch.minimum(values, old + VALUE_CLIP), old - VALUE_CLIP)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return errors / 2, {"train/value_loss": errors / 2, "critic/vpred_mean": values, "critic/vf_loss": errors,
                        "critic/vf_clipfrac": errors > (values - returns) ** 2}


def group_advantages(rewards, flags):
    """GRPO, Dr. GRPO, RLOO, MaxRL, one group at a time."""
    found = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1:]
        advantage = reward - statistics.fmean(others if flags.get("baseline") == "loo" else rewards)
        advantage /= statistics.pstdev(rewards) + 1e-6 if flags.get("scale_rewards") else 1
        if flags.get("baseline") == "maxrl":
            advantage = reward * len(rewards) / sum(rewards) - 1
        balance = flags.get("advantage_balance", 0.0)
        found.append(advantage * (1 - max(balance, 0.0) if advantage < 0 else 1 + min(balance, 0.0)))
    return found


def grpo_segments(played, flags):
    """The segments of each group that teaches, with their advantages, which the log must hold too."""
    groups = []
    for _, members in itertools.groupby(played, key=lambda episode: episode["task_id"]):
        left_out = ("error", "length", "context") if flags.get("mask_truncated") else ("error",)
        members = [episode for episode in members if episode["termination"] not in left_out]
        rewards = [episode["reward"] for episode in members]
        if len(set(rewards)) < 2:
            continue
        groups.append([])
        for episode, advantage in zip(members, group_advantages(rewards, flags), strict=True):
            for s in episode["segments"]:
                assert s["advantages"] == pytest.approx([advantage] * len(s["response_ids"]), abs=1e-5)
                groups[-1].append(s | dict(advantage=advantage))
    return groups


def weight_of(s, segments, flags):
    """What a token's loss is multiplied by."""
    num_tokens, own = sum(sum(one["response_mask"]) for one in segments), sum(s["response_mask"])
    return {"token": 1 / num_tokens, "sequence": 1 / (own * len(segments)),
            "constant": 1 / (flags.get("max_response_tokens", 10) * len(segments))}[
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
        kept = {clean(name): moments for name, moments in state["state"].items()}
        assert kept.keys() == self.moments.keys() <= weights.keys()
        for number, of in enumerate(("exp_avg", "exp_avg_sq")):
            near({name: moments[of] for name, moments in kept.items()},
                 {name: moments[number] for name, moments in self.moments.items()}, tolerance)


def near(found, expected, tolerance):
    one, other = (torch.cat([numbers[name].double().flatten() for name in expected]) for numbers in
                  (found, expected))
    difference = float((one - other).norm() / other.norm())
    assert difference < tolerance, difference


def learnable(weights):
    return {name: tensor.double().clone().requires_grad_() for name, tensor in weights.items()}


def check_step(adam, before, after, state, tolerance):
    """That a checkpoint holds Adam's moments, and the weights of the one before it have moved as Adam's."""
    adam.check(after, state, tolerance)
    near({name: after[name] - before[name] for name in before},
         {name: adam.trained[name].detach() - before[name] for name in before}, 2e-2)


def known_before(model, trained, segments, flags):
    """What an update takes as given, of each segment: states and log-probabilities before it."""
    known, scale, temperature = [], flags.get("lora_alpha", 32) / 2, flags.get("temperature", 1.0)
    with torch.no_grad():
        for s in segments:
            ids = s["prompt_ids"] + s["response_ids"]
            states, old, _ = response_of(s, *forward(model, trained, ids, scale), temperature)
            ref = response_of(s, *forward(model, {}, ids), temperature)[1] if "kl_coef" in flags else None
            known.append(dict(states=states, old=old, ref=ref, sampled=torch.tensor(
                s["rollout_logprobs"], dtype=torch.float64)))
    return known


def replay(adam, model, segments, known, of_segment, flags, epochs=1, stop=math.inf):
    """Steps on all segments at once, until the KL exceeds `stop`.  -> means of what is logged"""
    sums, done, scale = {}, 0, flags.get("lora_alpha", 32) / 2
    share = 1 / sum(sum(s["response_mask"]) for s in segments)
    while done < epochs:
        loss = kl = 0.0
        for s, numbers in zip(segments, known, strict=True):
            chosen, weight = torch.tensor(s["response_mask"]) > 0, weight_of(s, segments, flags)
            out = forward(model, adam.trained, s["prompt_ids"] + s["response_ids"], scale)
            response = response_of(s, *out, flags.get("temperature", 1.0))
            total, logged = of_segment(s, response, flags, numbers)
            loss = loss + total[chosen].sum() * weight
            for name, x in logged.items():
                found = float(x.detach()[chosen].double().sum())
                sums[name] = sums.get(name, 0.0) + found * (weight if name == "train/policy_loss" else share)
                kl += found * share if name == "train/approx_kl" else 0.0
        done += 1
        if kl > stop:
            break
        adam.step(loss)
    return {name: x / done for name, x in sums.items()}


GRPO = {
    "failing": dict(env="tests/two_turn.py:Flaky", env_kwargs=("test_tasks=32",), group_size=8,
                    temperature=1.5),
    "turns": dict(TURNS, prompts_per_iteration=3, kl_coef=0.3, epochs=2, mask_truncated=True,
                  microbatch_tokens=60, correction="none", aggregation="sequence"),
    "lora": dict(lora_rank=2, lora_alpha=8, kl_coef=0.3, epochs=2, learning_rate=2e-2, beta2=0.9,
                 prompts_per_iteration=3, env_kwargs=("test_tasks=32", "max_operands=4"), reward_fn=CHECKSUM),
    # Replies of one token: equal ones to one prompt, which count as often as they occur, and to several.
    "short": dict(max_response_tokens=1, epochs=2, kl_coef=0.3, prompts_per_iteration=4, reward_fn=CHECKSUM,
                  env_kwargs=("test_tasks=32", "max_number=4")),
    "dynamic": dict(dynamic_sampling=2, prompts_per_iteration=3, temperature=0.6),
    "context": dict(TURNS, mask_truncated=True, max_context_tokens=26, loss="dppo", reward_fn=CHECKSUM),
    "loo": dict(baseline="loo", scale_rewards=True, advantage_balance=0.4, beta2=0.9, entropy_coef=0.01,
                correction_bounds=(0.9995, 1.0005), max_grad_norm=0.01, temperature=1.5, group_size=16,
                prompts_per_iteration=3,
                env_kwargs=("test_tasks=32", "max_operands=4"), reward_fn=CHECKSUM),  # prompts of two lengths
    "gspo-constant": dict(TURNS, loss="gspo", aggregation="constant", clip_low=0.02, clip_high=0.02, epochs=2,
                          prompts_per_iteration=3, microbatch_tokens=60),
    "cut": dict(microbatch_tokens=20),
    "balance": dict(advantage_balance=-0.6, clip_low=0.01, clip_high=0.02, epochs=2),
    "cispo-sequence": dict(loss="cispo", aggregation="sequence", epochs=2),
    "dppo": dict(loss="dppo", epochs=3, learning_rate=8e-3, reward_fn=CHECKSUM),
    "sapo-icepop": dict(loss="sapo", correction="icepop", correction_bounds=(0.99, 1.001), epochs=2),
    "pg-maxrl-mis": dict(TURNS, loss="pg", baseline="maxrl", correction="mis", reward_fn=CHECKSUM,
                         correction_bounds=(0.0, 1.0005), prompts_per_iteration=3),
}


@pytest.mark.parametrize("case", slow_but(
    ("turns", "lora", "short", "dynamic", "context"), GRPO))
def test_an_iteration_of_grpo_is_its_equations(case, tmp_path, monkeypatch):
    flags = GRPO[case]
    folder = noisy_run(grpo_llm, tmp_path / "run", monkeypatch, **flags)
    assert validate(folder, strict=True)["ok"]
    played, record = episodes(folder, "train_step_000002")[0], records(folder)[-1]
    groups = grpo_segments(played, flags)
    segments = [s for group in groups[:flags.get("prompts_per_iteration")] for s in group]

    (before, state), (after, end) = (checkpoint(folder, n) for n in (1, 2))
    model, trained, num_epochs = base_model(), learnable(before), flags.get("epochs", 1)
    adam = Adam(trained, state["optimizer"], flags.get("learning_rate", 2e-3) * 2 / 4,
                flags.get("beta2", 0.95), flags.get("max_grad_norm", 1.0))
    known = known_before(model, trained, segments, flags)
    expected = replay(adam, model, segments, known, of_grpo, flags, num_epochs)
    check_step(adam, before, after, end["optimizer"], 1e-4 if num_epochs == 1 else 3e-3)

    expected |= {"train/grad_norm": statistics.fmean(adam.norms), "train/learning_rate": adam.rate,
                 "rollout/groups_trainable": len(groups)}
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name
    assert num_epochs == 1 or (record["train/clipfrac"] > 0) == ("sapo" not in case)
    assert flags.get("correction", "none") == "none" or 0.1 < record["mismatch/frac_capped"] < 0.9
    assert record["mismatch/ratio_max"] == pytest.approx(math.exp(NOISE), rel=1e-4)
    if case == "turns":
        assert record["rollout/segments"] > 1
        assert len({sum(s["response_mask"]) for s in segments}) > 1  # or all aggregations are alike
    if case in ("lora", "loo"):
        assert len({len(s["prompt_ids"]) for s in segments}) > 1  # or nothing tells what is done with padding
    if case == "short":
        pairs = [(tuple(s["prompt_ids"]), tuple(s["response_ids"])) for s in segments]
        assert len({*pairs}) < len(pairs) and len({reply for _, reply in pairs}) < len({*pairs})
    assert case != "context" or 0 < record["rollout/termination/context"] < 1
    sound = [episode["termination"] for episode in played if episode["termination"] != "error"]
    cut = sum(sound.count(end) for end in ("length", "context")) / len(sound)
    assert record["response_length/clip_ratio"] == pytest.approx(cut)
    assert case != "failing" or any(len(group) < flags["group_size"] for group in groups)
    if case == "dynamic":  # rounds of other tasks, until enough groups teach, or three of them were played
        tasks = [episode["task_id"] for episode in episodes(folder, "train_step_000001")[0] + played]
        assert len(tasks) == 4 * len(set(tasks)) and len(played) == 4 * record["rollout/groups_submitted"]
        assert len(groups) > 3 and record["rollout/groups_submitted"] in (6, 9)


def check_advantages(played, flags):
    """Over the tokens that the policy chose, whatever stands between two turns."""
    found, expected = [], []
    for episode in played:
        rewards, values, returns, whitened, old, ref = (
            torch.tensor([x for s in episode["segments"] for x in itertools.compress(
                s[name] or (), s["response_mask"])], dtype=torch.float64)
            for name in ("rewards", "values", "returns", "advantages", "old_logprobs", "ref_logprobs"))
        # A single reward is that of the last turn, even if it was cut.
        assert rewards.tolist() == [0.0] * (len(rewards) - 1) + [episode["reward"]]
        if "kl_coef" in flags:
            rewards -= flags["kl_coef"] * (k3(ref - old) if "kl_penalty" in flags else old - ref)
        values = values if len(values) else torch.zeros_like(rewards)
        advantages = ppo_llm.gae(rewards[None], values[None], 1.0, 0.95)[0]
        torch.testing.assert_close(returns, advantages + values)
        found, expected = [*found, whitened], [*expected, advantages]
    raw, found = torch.cat(expected), torch.cat(found)
    torch.testing.assert_close(found, (raw - raw.mean()) / raw.std(correction=0), rtol=1e-5, atol=1e-5)


PPO = {
    "cut": dict(microbatch_tokens=20, beta2=0.9, critic_beta2=0.8, clip=0.05, kl_coef=0.3, kl_penalty="k3"),
    "turns": dict(TURNS, prompts_per_iteration=5, critic_epochs=1, microbatch_tokens=60, temperature=0.9,
                  kl_coef=0.1),
    "lora": dict(lora_rank=2, lora_alpha=8, learning_rate=2e-2, critic_learning_rate=2e-2, kl_coef=0.1),
    "shared": dict(critic="shared", entropy_coef=0.1, critic_warmup=9),  # which is for a critic of its own
    "shared-lora": dict(critic="shared", lora_rank=2, lora_alpha=8, learning_rate=2e-2),
    "target": dict(critic="none", critic_warmup=9, target_kl=0.08,  # more than that of each pass
                   microbatch_tokens=20),
    "later": dict(critic="none", critic_warmup=9, target_kl=0.25, epochs=9,  # of the fourth epoch,
                  microbatch_tokens=60),  # in several passes
}


@pytest.mark.parametrize("case", slow_but(("turns", "shared", "later"), PPO))
def test_an_iteration_of_ppo_is_its_equations(case, tmp_path, monkeypatch):
    flags = dict(critic_epochs=2, critic_minibatches=1, minibatches=1, epochs=2, critic_warmup=0,
                 critic_learning_rate=5e-3) | PPO[case]
    folder = noisy_run(ppo_llm, tmp_path / "run", monkeypatch, **flags)
    assert validate(folder, strict=True)["ok"]
    record, kind = records(folder)[-1], flags.get("critic", "own")
    played, _ = episodes(folder, "train_step_000002")
    segments = [s for episode in played for s in episode["segments"] if any(s["response_mask"])]
    check_advantages(played, flags)
    if case == "turns":
        assert {episode["reward"] + len(episode["turns"]) for episode in played} == {0.5}
        assert {"done", "length"} <= {episode["termination"] for episode in played}

    # What is known of the policy and the critic before the update.
    (before, state), (after, end) = (checkpoint(folder, n) for n in (1, 2))
    critic, critic_after = ({clean(name): tensor.double() for name, tensor in of["critic"].items()}
                            for of in (state, end))
    if kind == "shared":
        before, after = before | critic, after | critic_after
    model, trained = base_model(), learnable(before)
    known = known_before(model, trained, segments, flags)
    if "kl_coef" in flags:
        for s, numbers in zip(segments, known, strict=True):
            mask, given = torch.tensor(s["response_mask"]), torch.tensor(s["ref_logprobs"]).double()
            torch.testing.assert_close(given * mask, numbers["ref"] * mask, rtol=0.0, atol=1e-4)
    of_critics = known_before(model, critic, segments, flags) if kind == "own" else known
    for s, seen in zip(segments, of_critics if critic else (), strict=bool(critic)):
        chosen = torch.tensor(s["response_mask"]) > 0
        values = seen["states"] @ critic["head.weight"][0] + critic["head.bias"]
        torch.testing.assert_close(torch.tensor(s["values"]).double()[chosen], values[chosen],
                                   rtol=1e-4, atol=2e-5)

    def of_both(s, response, flags, numbers):
        (loss, logged), (value_loss, more) = of_ppo(s, response, flags, numbers), of_critic(
            s, response, trained)
        return loss + VALUE_COEF * value_loss, logged | more

    adam = Adam(trained, state["optimizer"], flags.get("learning_rate", 2e-3) * 2 / 4,
                flags.get("beta2", 0.95), 1.0)
    expected = replay(adam, model, segments, known, of_both if kind == "shared" else of_ppo, flags,
                      flags["epochs"], flags.get("target_kl", math.inf))
    check_step(adam, before, after, end["optimizer"], 3e-3)
    expected |= {"train/grad_norm": statistics.fmean(adam.norms), "train/learning_rate": adam.rate,
                 "train/policy_steps": len(adam.norms)}
    if kind == "own":
        weights = learnable(critic)
        fit = Adam(weights, state["critic_optimizer"], flags["critic_learning_rate"] * 2 / 4,
                   flags.get("critic_beta2", 0.99), 1.0)
        expected |= replay(fit, model, segments, known, lambda s, response, *_: of_critic(
            s, response, weights), flags, flags["critic_epochs"])
        check_step(fit, critic, critic_after, end["critic_optimizer"], 3e-3)
        expected |= {"critic/grad_norm": statistics.fmean(fit.norms), "critic/learning_rate": fit.rate}
    else:
        assert not {"critic/grad_norm", "critic/learning_rate"} & set(record)
    if kind == "none":
        assert record["critic/values/mean"] == 0 and "critic/vf_loss" not in record

    for name, number in expected.items():
        rounded = 0.05 if name == "critic/vf_clipfrac" else 2e-6  # where the two errors are all but equal
        assert record[name] == pytest.approx(number, rel=3e-3, abs=rounded), name
    assert len(adam.norms) == {"target": 1, "later": 3}.get(case, 2)
    assert case == "target" or record["train/clipfrac"] > 0


# A pass cut in one, and as many as there are rows, of several turns and unequal lengths. sft.py's are in
# test_sft.py, a2c_vecenv.py's in test_a2c_maths.py.
SHORT_TURNS = dict(TURNS, env="tests/two_turn.py:TwoTurn", max_context_tokens=100)
CUT = {
    "grpo": (grpo_llm, dict(SHORT_TURNS, prompts_per_iteration=3, group_size=4, kl_coef=0.3,
                            aggregation="sequence", entropy_coef=0.1)),
    "ppo": (ppo_llm, dict(SHORT_TURNS, prompts_per_iteration=8, critic_warmup=0, critic_epochs=1, epochs=1,
                          critic_minibatches=1, minibatches=1, kl_coef=0.3, critic_learning_rate=1e-3)),
}


@pytest.mark.parametrize("case", CUT)
def test_a_pass_cut_in_one_and_many_gives_the_same_gradients_and_numbers(case, tmp_path, monkeypatch):
    script, flags = CUT[case]
    flags = dict(eval_every=0, eval_tasks=1, eval_samples=1, checkpoint_every=1, keep_checkpoints=0) | flags
    flags |= dict(iterations=1, log_episodes=1.0)
    passes, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *given: (passes.append(1), backward(*given)))
    counts, found = [], []
    for tokens in (10**6, 1):
        passes.clear()
        folder = train(script, tmp_path / f"{tokens}", microbatch_tokens=tokens, **flags)
        counts.append(len(passes))
        found.append((folder, checkpoint(folder, 1)[1]))
    assert counts[1] >= 6 * counts[0], counts
    (whole, expected), (folder, state) = found
    for one, other in zip(timeless(whole), timeless(folder), strict=True):
        same_numbers(one | dict(trace_id=0), other | dict(trace_id=0), f"record {one['iteration']}")
    for name in ("optimizer", "critic_optimizer"):
        if name in state:
            ours, others = ({key: moments["exp_avg"] for key, moments in of[name]["state"].items()}
                            for of in (state, expected))
            near(ours, others, 1e-4)


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_no_pass_has_more_tokens_than_it_may_unless_one_row_has_and_each_segment_is_in_one(script):
    segments = [script.Segment([n] * (1 + n % 4), [n] * (1 + n % 7), [1] * (1 + n % 7), [0.0] * (1 + n % 7))
                for n in range(40)]
    known = dict(advantages=0.0) if script is grpo_llm else {}
    for limit in (1, 8, 23, 60, 10**4):
        seen = []
        for s in segments:
            for name, value in known.items():
                setattr(s, name, [value] * len(s.response_ids))
        for part, batch in script.microbatches(segments, script.Args(microbatch_tokens=limit), "cpu"):
            rows, prompt = batch["prompts"].shape
            assert rows == 1 or rows * (prompt + batch["responses"].shape[1]) <= limit
            seen += map(id, part)
        assert sorted(seen) == sorted(map(id, segments))


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [
    (ppo_llm, dict(critic_warmup=0)), (grpo_llm, {}), (ppo_llm, dict(critic="shared", lora_rank=2))])
def test_gradient_checkpointing_computes_each_layer_again_and_changes_nothing(
        script, flags, tmp_path, monkeypatch):
    """Of the policy, and of the critic beside it; without a gradient nothing is computed again."""
    computed, forward = collections.Counter(), LlamaMLP.forward

    def counted(*given):
        computed[recomputes, torch.is_grad_enabled()] += 1
        return forward(*given)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    for recomputes in (False, True):
        train(script, tmp_path / str(recomputes), gradient_checkpointing=recomputes, **RUN | dict(
            iterations=1, prompts_per_iteration=4, env_kwargs=("test_tasks=4",)) | flags)
    assert computed[True, True] == 2 * computed[False, True] > 0
    assert computed[True, False] == computed[False, False] > 0
    same_checkpoint(tmp_path / "False", tmp_path / "True", "step_000001")


def test_values_are_float32_whatever_the_passes_are(tmp_path):
    """bfloat16 tells a value of 1 from one of 1.01, and no nearer ones: returns would be as coarse."""
    folder = train(ppo_llm, tmp_path / "run", **RUN | dict(
        dtype="bfloat16", critic_warmup=2, critic_learning_rate=5e-3, prompts_per_iteration=4))
    played, _ = episodes(folder, "train_step_000002")
    values = torch.tensor([value for episode in played for s in episode["segments"] for value in s["values"]])
    assert len(values) > 20 and (values.bfloat16().float() != values).double().mean() > 0.9


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_minibatches_share_out_every_group_or_episode(script, tmp_path, monkeypatch):
    """Two, of an odd number, in an order that each epoch of each iteration draws anew."""
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda size: drawn.append(randperm(size)) or drawn[-1])
    flags = dict(minibatches=2, epochs=2, prompts_per_iteration=5, entropy_coef=0.0, temperature=2.0)
    flags |= dict(reward_fn=CHECKSUM) | (dict(critic="none") if script is ppo_llm else {})
    folder = noisy_run(script, tmp_path / "run", monkeypatch, **flags)
    assert len(drawn) == 4 == len({tuple(order.tolist()) for order in drawn})
    assert len(set(map(len, drawn))) == 1  # or this would say nothing
    played, _ = episodes(folder, "train_step_000002")
    units = grpo_segments(played, flags) if script is grpo_llm else [e["segments"] for e in played]
    assert len(units) % 2 and len(units) > 2

    (before, state), (after, end) = (checkpoint(folder, n) for n in (1, 2))
    trained, model = learnable(before), base_model()
    adam = Adam(trained, state["optimizer"], 2e-3 * 2 / 4, 0.95, 1.0)
    known = [known_before(model, trained, unit, flags) for unit in units]
    for chosen in (*drawn[-2].chunk(2), *drawn[-1].chunk(2)):
        segments, numbers = ([one for n in chosen for one in of[n]] for of in (units, known))
        replay(adam, model, segments, numbers, of_ppo if script is ppo_llm else of_grpo, flags)
    check_step(adam, before, after, end["optimizer"], 1e-3)


def test_the_weight_between_ppos_sampler_and_trainer_is_capped_at_two(tmp_path, monkeypatch):
    """A token that the trainer finds 4 times as likely as the sampler said is as one 8 times as likely."""
    generate, ends, capped = ppo_llm.generate, [], []
    monkeypatch.setitem(ppo_llm.LIMITS, "float32", (math.inf, math.inf, math.inf))
    for times in (4.0, 8.0):
        def off(*given, times=times):
            (ids, (first, *others)), *replies = generate(*given)
            return [(ids, [first - math.log(times), *others]), *replies]

        monkeypatch.setattr(ppo_llm, "generate", off)
        folder = train(ppo_llm, tmp_path / f"{times}", **RUN | dict(
            iterations=1, critic="none", epochs=1, minibatches=1, prompts_per_iteration=16))
        ends.append(checkpoint(folder, 1)[1]["optimizer"]["state"]["0.model.norm.weight"]["exp_avg"])
        capped.append(records(folder)[1]["mismatch/frac_capped"] > 0)
    assert capped == [True, True] and torch.equal(*ends)


def test_biases_that_an_adapter_trains_are_not_the_critics_too(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model := write_model(tmp_path / "model", "gpt2"))
    config = peft.LoraConfig(r=2, target_modules="all-linear", bias="all", task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    folder = train(ppo_llm, tmp_path / "run", **RUN | dict(iterations=1), model=model, critic_warmup=1,
                   reward_fn=CHECKSUM, lora_adapter_path=str(tmp_path / "adapter"))
    before, after = (load_file(path / "adapter_model.safetensors") for path in (
        tmp_path / "adapter", folder / "checkpoints" / "step_000001"))
    assert all(torch.equal(before[name], after[name]) for name in after) and "bias" in "".join(after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "gemma3"])
def test_recurrent_layers_and_parts_that_see_no_gradient_train_and_resume(kind, tmp_path):
    (tmp_path / "own.py").write_text("def score(r):\n    return len(r.reply)\n")
    flags = dict(model=write_model(tmp_path / "model", kind), iterations=2, prompts_per_iteration=16,
                 eval_every=0, eval_tasks=1, keep_checkpoints=0, checkpoint_every=1,
                 reward_fn=f"{tmp_path}/own.py:score")
    whole = train(grpo_llm, tmp_path / "whole", **flags)
    assert all(abs(r["mismatch/kl"]) < 1e-9 < r["train/grad_norm"] for r in records(whole)[1:])
    assert timeless(whole) == timeless(train(grpo_llm, killed_after(whole, tmp_path / "run", 1), **flags))
