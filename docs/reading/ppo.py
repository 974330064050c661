"""PPO for language models with a learned critic, to be read in one sitting.

A critic estimates the reward to come before each response token:

    A_t = sum_l (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l)   GAE eq. 16
    L = - mean_t min(ratio A, clip(ratio) A)                       PPO eq. 7
    L_V = 1/2 mean_t max((V - R)^2, (clip(V) - R)^2)           R = A + V_old

The reward comes at a response's last token, a penalty for leaving the starting
model at every token (--kl-coef, arXiv:1909.08593); advantages are whitened. The
critic has a backbone of its own, is fitted before the policy, and alone at first.

    python docs/reading/ppo.py    # Countdown on a laptop CPU, in a few minutes

This is ppo_llm.py on one device, for one turn, without resume: with the same
flags it logs the same rewards and losses. README.md compares the two.
"""

import collections
import copy
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
import envs


@dataclass
class Args:
    # Task, model and sampling
    env: str = "countdown"  # an environment of one turn: a name, or path/to/file.py:Class
    env_kwargs: tuple[str, ...] = ()  # its options, as key=value
    model: str = "models/countdown-tiny"  # folder or hub id of the model to start from
    prompts_per_iteration: int = 512  # different prompts in an iteration
    max_response_tokens: int = 16  # longest reply, eos included [tokens]
    temperature: float = 1.0  # the sampler and the trainer divide logits by it

    # Optimisation
    seed: int = 1  # decides all random numbers
    iterations: int = 160  # rollouts, each followed by its updates
    epochs: int = 1  # passes of the policy over an iteration's responses
    minibatches: int = 4  # the policy's optimiser steps per epoch
    learning_rate: float = 5e-4  # the policy's peak, of Adam
    warmup_iterations: int = 10  # linear warm-up of each rate [iterations]
    final_learning_rate: float = 0.1  # where the decay ends, as a share of the peak
    beta2: float = 0.95  # Adam's second decay rate; the first is 0.9

    # Critic and loss
    critic_warmup: int = 10  # first iterations, which train the critic alone [iterations]
    critic_epochs: int = 1  # passes of the critic over an iteration's responses
    critic_minibatches: int = 16  # its optimiser steps per epoch
    critic_learning_rate: float = 1e-3  # the critic's peak, of Adam
    critic_beta2: float = 0.99  # its second decay rate
    gae_lambda: float = 0.95  # 1 uses the returns alone, less relies on the critic
    clip: float = 0.2  # of the ratio, at 1 - this and at 1 + this
    kl_coef: float = 0.0  # weight of the KL penalty in each token's reward [1/nats]
    entropy_coef: float = 0.04  # weight of the entropy bonus [1/nats]

    # Evaluation and log
    eval_every: int = 20  # iterations between evaluations; 0: first and last alone
    eval_tasks: int = 512  # held-out tasks, always the same ones
    eval_samples: int = 16  # responses per task, for pass@1 and pass@n
    run_dir: str = ""  # folder of log and trained model (default: a new one)


# Marks the left of prompts and the right of responses. A pad token's id would not do: it may be that of eos.
PADDING = -1  # a model gets 0 in its place, masked
SHOWN = ("iteration", "train/reward", "critic/vf_explained_var", "val/")  # printed


# Maths

def gae(rewards, values, lam, gamma=1.0):
    """GAE (arXiv:1506.02438 eq. 16).  All (B, T), 0 after the end"""
    deltas = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    advantages = torch.zeros_like(deltas)
    trace = 0.0  # (B,)
    for t in reversed(range(deltas.shape[1])):
        trace = deltas[:, t] + gamma * lam * trace
        advantages[:, t] = trace
    return advantages


def whiten(x, mask):
    """Zero mean and unit (population) variance where mask is 1, 0 elsewhere.  -> (B, T)"""
    chosen = x[mask > 0]
    # The constant keeps the rounding errors of equal advantages from being blown up to signals.
    return (x - chosen.mean()) * torch.rsqrt(chosen.var(correction=0) + 1e-8) * mask


def policy_loss(log_ratio, advantages, clip):
    """Loss of each token, and whether it was clipped.  All (B, T)"""
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)  # arXiv:1707.06347 eq. 7
    return per_token, clipped * advantages < ratio * advantages


def value_loss(values, old_values, returns, clip=0.5):
    """Squared error of a value, or of one within clip of the old, if larger.  All (B, T)"""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square())


def model_inputs(batch):
    """Prompts and responses as a model reads them, all but the last token.  -> (B, P + T - 1)"""
    # Its output at a position is about the token after it, so the last T are of the response.
    tokens = torch.cat([batch["prompt_ids"], batch["response_ids"][:, :-1]], 1)
    valid = (tokens != PADDING).long()
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    return dict(input_ids=tokens.clamp(min=0), attention_mask=valid, position_ids=positions)


def token_logprobs(model, batch, temperature):
    """Log-probability and entropy of each response token [nats].  -> two (B, T)"""
    response_ids = batch["response_ids"]  # (B, T)
    inputs = model_inputs(batch)
    output = model(**inputs, use_cache=False, logits_to_keep=response_ids.shape[1])
    logprobs = torch.log_softmax(output.logits.float() / temperature, dim=-1)  # (B, T, V)
    entropy = -(logprobs.exp() * logprobs).sum(-1)  # (B, T)
    chosen = response_ids.clamp(min=0)[:, :, None]  # (B, T, 1)
    return logprobs.gather(-1, chosen).squeeze(-1), entropy


class Critic(torch.nn.Module):
    """V before each response token [reward]: a head, zero at first, on a copy of the policy."""

    def __init__(self, policy):
        super().__init__()
        self.decoder = copy.deepcopy(policy.get_decoder())
        self.head = torch.nn.Linear(policy.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch):
        output = self.decoder(**model_inputs(batch), use_cache=False)
        longest = batch["response_ids"].shape[1]
        return self.head(output.last_hidden_state[:, -longest:]).squeeze(-1)  # (B, T)


def learning_rate(peak, iteration, start, args):
    """0 before iteration `start`, linear warm-up from there, then linear decay."""
    done = iteration - start + 1
    warmup = min(max(done / max(args.warmup_iterations, 1), 0.0), 1.0)
    decay_iterations = args.iterations - start + 1 - args.warmup_iterations
    progress = max(done - args.warmup_iterations, 0) / max(decay_iterations, 1)
    return peak * warmup * (1 - (1 - args.final_learning_rate) * progress)


# Update: scored responses to gradients

@torch.no_grad()
def estimate_advantages(critic, reference, batch, args):
    """Add the critic's values, advantages and returns (B, T) to a batch.  -> metrics"""
    mask = batch["response_mask"]  # (B, T)
    last = mask.sum(1, keepdim=True).long() - 1  # (B, 1), index of the last token
    rewards = torch.zeros_like(mask)
    rewards.scatter_(1, last, batch["rewards"][:, None])
    if args.kl_coef:
        ref_logprobs, _ = token_logprobs(reference, batch, args.temperature)
        rewards -= args.kl_coef * (batch["old_logprobs"] - ref_logprobs) * mask
    values = critic(batch) * mask
    advantages = gae(rewards, values, args.gae_lambda)
    batch["values"] = values
    batch["returns"] = advantages + values
    batch["advantages"] = whiten(advantages, mask)
    unexplained = advantages[mask > 0].var(correction=0)  # advantages are returns - values
    variance = batch["returns"][mask > 0].var(correction=0).clamp(min=1e-12)
    return {"critic/vf_explained_var": (1 - unexplained / variance).item()}


def policy_terms(model, batch, args):
    """The policy's loss, and numbers for the log.  -> (B, T), {name: (B, T)}"""
    logprobs, entropy = token_logprobs(model, batch, args.temperature)
    log_ratio = logprobs - batch["old_logprobs"]
    per_token, clipped = policy_loss(log_ratio, batch["advantages"], args.clip)
    logged = {"train/policy_loss": per_token, "train/entropy": entropy, "train/clipfrac": clipped,
              "train/approx_kl": torch.expm1(log_ratio) - log_ratio}  # KL(old || policy), never negative
    return per_token - args.entropy_coef * entropy, logged


def value_terms(critic, batch, args):
    """The critic's loss, and numbers for the log.  -> (B, T), {name: (B, T)}"""
    errors = value_loss(critic(batch), batch["values"], batch["returns"])
    return errors / 2, {"train/value_loss": errors / 2, "critic/vf_loss": errors}


def update(name, model, terms, optimizer, batch, epochs, minibatches, args):
    """Optimiser steps on the loss that terms(model, batch, args) gives.  -> metrics"""
    num_tokens = batch["response_mask"].sum().item()
    metrics = collections.defaultdict(float)  # means over tokens or steps
    for _ in range(epochs):
        for rows in torch.randperm(len(batch["rewards"])).tensor_split(minibatches):
            minibatch = {key: tensor[rows] for key, tensor in batch.items()}
            mask = minibatch["response_mask"]
            per_token, logged = terms(model, minibatch, args)
            loss = (per_token * mask).sum() / mask.sum()
            loss.backward()
            for key, value in logged.items():
                metrics[key] += (value.detach() * mask).sum().item() / num_tokens / epochs
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            metrics[f"{name}/grad_norm"] += norm.item() / epochs / minibatches
            optimizer.step()
            optimizer.zero_grad()
    return metrics


# Rollout: tasks to scored responses

def uniform(seeds, count):
    """Random numbers in [0, 1) from the hash of each seed's text.  -> (seeds, count) float64"""
    data = b"".join(hashlib.shake_128(seed.encode()).digest(8 * count) for seed in seeds)
    bits = torch.frombuffer(bytearray(data), dtype=torch.int64).view(len(seeds), count)
    return (bits & (2**53 - 1)).double() * 2.0**-53


def sample(logits, temperature, draws):
    """A token for each row of logits (B, V).  draws (B,) in [0, 1) -> tokens, logprobs (B,)"""
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        # The first token whose cumulative probability exceeds the draw; in float32 long sums lose their tail.
        cdf = logprobs.exp().double().cumsum(-1)
        tokens = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)
        tokens = tokens.clamp(max=cdf.shape[1] - 1)  # (B, 1)
    else:
        tokens = logprobs.argmax(-1, keepdim=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def generate(model, prompt_ids, seeds, temperature, eos, max_new_tokens):
    """Sample a response to each prompt (B, P), up to eos.  -> response_ids, logprobs (B, T)

    seeds: a text for each response; its random numbers depend on nothing else.
    """
    draws = uniform(seeds, max_new_tokens).to(model.device)  # (B, max_new_tokens)
    tokens = prompt_ids  # (B, P); after the first pass the newest ones, (B, 1)
    valid = (tokens != PADDING).long()
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    done = torch.zeros(len(seeds), dtype=torch.bool, device=model.device)
    response_ids = []
    logprobs = []
    for t in range(max_new_tokens):
        output = model(input_ids=tokens.clamp(min=0), attention_mask=valid, position_ids=positions,
                       past_key_values=cache, logits_to_keep=1)
        token, logprob = sample(output.logits[:, -1], temperature, draws[:, t])  # (B,)
        response_ids.append(token.masked_fill(done, PADDING))
        logprobs.append(logprob.masked_fill(done, 0.0))
        done = done | (token == eos)
        if done.all():
            break
        tokens = token[:, None]
        valid = torch.cat([valid, torch.ones_like(tokens)], 1)  # (B, P + t + 1)
        positions = positions[:, -1:] + 1
    return torch.stack(response_ids, 1), torch.stack(logprobs, 1)


def rollout(model, tokenizer, env, tasks, samples, temperature, args, split, start=0):
    """Sample and score responses to each task.  -> {name: tensor}

    samples: the numbers of a task's responses; start: the number of the first task. Both seed the draws.
    """
    prompts = []
    seeds = []
    for task_number, task in enumerate(tasks, start):
        prompt = tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
        for number in samples:
            prompts.append(prompt)
            # The zeros are attempt and turn, which the full script counts.
            seeds.append(f"{args.seed} {split} {task_number} {number} 0 0")
    encoded = tokenizer(prompts, add_special_tokens=False, return_tensors="pt", padding=True)
    prompt_ids = encoded.input_ids.masked_fill(encoded.attention_mask == 0, PADDING)
    prompt_ids = prompt_ids.to(model.device)
    eos = tokenizer.eos_token_id
    response_ids, logprobs = generate(
        model, prompt_ids, seeds, temperature, eos, args.max_response_tokens)
    rewards = torch.zeros(len(seeds))
    correct = torch.zeros(len(seeds))
    for row, ids in enumerate(response_ids.tolist()):
        if eos in ids:  # a response that the length limit has cut is worth nothing
            text = tokenizer.decode(ids[:ids.index(eos)], skip_special_tokens=True)
            episode = env.start(tasks[row // len(samples)], args.seed)
            step = episode.step(text)
            episode.close()
            rewards[row] = step.reward
            correct[row] = step.info["correct"]  # 1 where the task was solved
    return {
        "prompt_ids": prompt_ids,  # (B, P)
        "response_ids": response_ids,  # (B, T), eos included
        "response_mask": (response_ids != PADDING).float(),  # (B, T)
        "old_logprobs": logprobs,  # (B, T): the sampler is the policy before its update
        "rewards": rewards.to(model.device),  # (B,)
        "correct": correct.to(model.device),  # (B,)
    }


# Evaluate: the same rollout on held-out tasks, with fixed seeds

def evaluate(model, tokenizer, env, args):
    """pass@1, pass@n and greedy accuracy.  -> metrics"""
    num_tasks = min(args.eval_tasks, env.num_tasks("test"))
    tasks = [env.task("test", index) for index in range(num_tasks)]
    sampled = [rollout(model, tokenizer, env, tasks, [number], 1.0, args, "val")["correct"]
               for number in range(args.eval_samples)]
    correct = torch.stack(sampled, 1)  # (tasks, n)
    greedy = rollout(model, tokenizer, env, tasks, [0], 0.0, args, "val")["correct"]
    name = f"val/{tasks[0].source}"  # such as val/countdown
    return {
        f"{name}/pass@1": correct.mean().item(),
        f"{name}/pass@{args.eval_samples}": correct.amax(1).mean().item(),
        f"{name}/greedy": greedy.mean().item(),
    }


# Main: set-up, then the loop

def record(log, metrics):
    """Log an iteration's numbers and print some of them."""
    log.write(json.dumps(metrics, allow_nan=False) + "\n")
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith(SHOWN)]
    tqdm.write(", ".join(shown))


def main(args):
    torch.set_num_threads(1)  # more do not help
    env = envs.make(args.env, **envs.parse_options(args.env_kwargs))
    if env.multi_turn:
        sys.exit(f"--env {args.env} has several turns: see ppo_llm.py")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left", trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    reference = copy.deepcopy(model) if args.kl_coef else None
    critic = Critic(model).to(model.device)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, args.beta2))
    critic_optimizer = torch.optim.Adam(critic.parameters(), betas=(0.9, args.critic_beta2))
    folder = Path(args.run_dir or time.strftime(f"runs/reading/%Y%m%d_%H%M%S_ppo_s{args.seed}"))
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "train_log.jsonl").open("x", buffering=1)  # x: never another run's
    meta = dict(schema_version=1, run_id=folder.name, algo="ppo", env=args.env, args=vars(args))
    log.write(json.dumps({"meta": meta}) + "\n")
    started = time.perf_counter()
    counters = {"iteration": 0, "env_steps": 0, "opt_steps": 0}  # env_steps: sampled tokens
    record(log, counters | evaluate(model, tokenizer, env, args))

    for iteration in tqdm(range(1, args.iterations + 1), unit="it", disable=None):
        # 1. Rollout: a response to each prompt, from the current policy.
        start = (iteration - 1) * args.prompts_per_iteration
        numbers = range(start, start + args.prompts_per_iteration)
        tasks = [env.training_task(number, args.seed) for number in numbers]
        batch = rollout(model, tokenizer, env, tasks, [0], args.temperature, args, "train", start)

        # 2. Advantages and returns of each token, from the critic's values before its update.
        metrics = estimate_advantages(critic, reference, batch, args)

        # 3. Fit the critic to the returns.
        torch.manual_seed(args.seed * 1_000_003 + iteration)  # the responses' order
        lr = learning_rate(args.critic_learning_rate, iteration, 1, args)
        critic_optimizer.param_groups[0]["lr"] = lr
        metrics |= update("critic", critic, value_terms, critic_optimizer, batch, args.critic_epochs,
                          args.critic_minibatches, args)
        counters["opt_steps"] += args.critic_epochs * args.critic_minibatches

        # 4. Update the policy, after --critic-warmup.
        if iteration > args.critic_warmup:
            lr = learning_rate(args.learning_rate, iteration, args.critic_warmup + 1, args)
            optimizer.param_groups[0]["lr"] = lr
            metrics |= update("train", model, policy_terms, optimizer, batch, args.epochs,
                              args.minibatches, args)
            counters["opt_steps"] += args.epochs * args.minibatches

        # 5. Metrics; evaluate, log.
        lengths = batch["response_mask"].sum(1)  # (B,)
        counters["iteration"] = iteration
        counters["env_steps"] += int(lengths.sum())
        metrics = counters | metrics | {
            "wall_time_s": time.perf_counter() - started,
            "train/reward": batch["rewards"].mean().item(),
            "response_length/mean": lengths.mean().item(),
        }
        if iteration == args.iterations or (args.eval_every and iteration % args.eval_every == 0):
            metrics |= evaluate(model, tokenizer, env, args)
        record(log, metrics)

    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(tyro.cli(Args))
