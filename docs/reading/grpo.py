"""GRPO for language models with verifiable rewards, to be read in one sitting.

For each prompt, `group_size` responses are sampled. An advantage is a reward
against its group's:

    A_i = r_i - mean(r_1..r_G)                      GRPO, arXiv:2402.03300 sec. 4.1.2
    L = - mean_t min(ratio A, clip(ratio, 1 - low, 1 + high) A)
                                                    PPO, arXiv:1707.06347 eq. 7

Where the defaults differ from the GRPO paper: no division by the standard
deviation (Dr. GRPO, arXiv:2503.20783), a mean over all tokens and an asymmetric
clip (DAPO, arXiv:2503.14476), groups whose rewards are all equal are dropped,
no KL penalty, a small entropy bonus.

    python docs/reading/grpo.py    # Countdown on a laptop CPU, in a few minutes
    python docs/reading/grpo.py --scale-rewards --clip-high 0.2 --kl-coef 0.04

This is grpo_llm.py on one device, for one turn, without resume: with the same
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
    prompts_per_iteration: int = 64  # different prompts in an iteration
    group_size: int = 8  # responses sampled per prompt; a group is its baseline
    max_response_tokens: int = 16  # longest reply, eos included [tokens]
    temperature: float = 1.0  # the sampler and the trainer divide logits by it

    # Optimisation
    seed: int = 1  # decides all random numbers
    iterations: int = 500  # rollouts, each followed by its updates
    epochs: int = 1  # optimiser steps, each on all responses of an iteration
    microbatch_tokens: int = 4096  # response tokens per pass; changes memory alone [tokens]
    learning_rate: float = 5e-4  # peak learning rate of Adam
    warmup_iterations: int = 10  # linear warm-up [iterations]
    final_learning_rate: float = 0.1  # where the decay ends, as a share of the peak
    beta2: float = 0.95  # Adam's second decay rate; the first is 0.9
    max_grad_norm: float = 1.0  # gradient clipping, by global norm

    # Loss
    scale_rewards: bool = False  # divide advantages by the group's standard deviation
    clip_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_high: float = 0.28  # the ratio is clipped at 1 + this
    kl_coef: float = 0.0  # weight of the KL penalty to the starting model
    entropy_coef: float = 0.02  # weight of the entropy bonus [1/nats]

    # Evaluation and log
    eval_every: int = 50  # iterations between evaluations; 0: first and last alone
    eval_tasks: int = 512  # held-out tasks, always the same ones
    eval_samples: int = 16  # responses per task, for pass@1 and pass@n
    run_dir: str = ""  # folder of log and trained model (default: a new one)


# Marks the left of prompts and the right of responses. A pad token's id would not do: it may be that of eos.
PADDING = -1  # a model gets 0 in its place, masked
SHOWN = ("iteration", "train/reward", "train/grad_norm", "val/")  # printed


# Maths

def group_advantages(rewards, scale=False):
    """Each reward against its group's: GRPO sec. 4.1.2, or Dr. GRPO.  -> (groups, G)"""
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale:
        advantages = advantages / (rewards.std(1, keepdim=True, correction=0) + 1e-6)
    return advantages


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """Loss of each token, and whether it was clipped.  (B, T), (B, T), (B, 1) -> two (B, T)"""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)  # PPO eq. 7
    return per_token, clipped * advantages < ratio * advantages


def k3(log_ratio):
    """KL(p || q) estimated from samples of p, unbiased, never negative; log_ratio = log q - log p."""
    return torch.expm1(log_ratio) - log_ratio  # GRPO eq. 4; joschu.net/blog/kl-approx.html calls it k3


def token_logprobs(model, batch, temperature):
    """Log-probability and entropy of each response token [nats].  -> two (B, T)"""
    response_ids = batch["response_ids"]  # (B, T)
    # Logits at a position are of the token after it: that shift by one happens here and nowhere else.
    tokens = torch.cat([batch["prompt_ids"], response_ids[:, :-1]], 1)  # (B, P + T - 1)
    valid = (tokens != PADDING).long()
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=tokens.clamp(min=0), attention_mask=valid, position_ids=positions,
                   use_cache=False, logits_to_keep=response_ids.shape[1])
    logprobs = torch.log_softmax(output.logits.float() / temperature, dim=-1)  # (B, T, V)
    entropy = -(logprobs.exp() * logprobs).sum(-1)  # (B, T)
    chosen = response_ids.clamp(min=0)[:, :, None]  # (B, T, 1)
    return logprobs.gather(-1, chosen).squeeze(-1), entropy


def learning_rate(iteration, args):
    """Linear warm-up, then linear decay to a share of the peak in the last iteration."""
    warmup = min(iteration / max(args.warmup_iterations, 1), 1.0)
    decay_iterations = args.iterations - args.warmup_iterations
    progress = max(iteration - args.warmup_iterations, 0) / max(decay_iterations, 1)
    return args.learning_rate * warmup * (1 - (1 - args.final_learning_rate) * progress)


# Update: responses with advantages to a gradient

def batch_loss(model, reference, batch, args):
    """The loss, a sum over the response tokens.  -> loss, {name: sum over tokens} for the log"""
    mask = batch["response_mask"]  # (B, T)
    old_logprobs = batch["old_logprobs"]  # (B, T)
    advantages = batch["advantages"]  # (B, 1)
    logprobs, entropy = token_logprobs(model, batch, args.temperature)  # (B, T)
    per_token, clipped = policy_loss(logprobs, old_logprobs, advantages, args.clip_low, args.clip_high)
    kl = torch.zeros_like(logprobs)
    if args.kl_coef:
        with torch.no_grad():
            ref_logprobs, _ = token_logprobs(reference, batch, args.temperature)
        kl = k3(ref_logprobs - logprobs)  # KL(policy || reference)
    loss = per_token + args.kl_coef * kl - args.entropy_coef * entropy  # GRPO eq. 3, and the bonus
    logged = {"train/policy_loss": per_token, "train/kl_loss": kl, "train/entropy": entropy,
              "train/clipfrac": clipped, "train/approx_kl": k3(logprobs - old_logprobs)}  # KL(old || policy)
    sums = {name: (value.detach() * mask).sum().item() for name, value in logged.items()}
    return (loss * mask).sum(), sums


def update(model, reference, optimizer, batch, args):
    """The optimiser steps of an iteration, one for each epoch.  -> metrics"""
    num_responses, longest = batch["response_ids"].shape
    num_tokens = batch["response_mask"].sum().item()
    rows_per_pass = max(1, args.microbatch_tokens // longest)
    metrics = collections.defaultdict(float)  # means over tokens and epochs
    for _ in range(args.epochs):
        for rows in torch.arange(num_responses).split(rows_per_pass):
            part = {name: tensor[rows] for name, tensor in batch.items()}
            loss, sums = batch_loss(model, reference, part, args)
            # Sums, divided by the token count of all passes: their size does not change the gradient.
            (loss / num_tokens).backward()
            for name, value in sums.items():
                metrics[name] += value / num_tokens / args.epochs
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        metrics["train/grad_norm"] += norm.item() / args.epochs
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
        sys.exit(f"--env {args.env} has several turns: see grpo_llm.py")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left", trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    reference = copy.deepcopy(model) if args.kl_coef else None
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, args.beta2))
    folder = Path(args.run_dir or time.strftime(f"runs/reading/%Y%m%d_%H%M%S_grpo_s{args.seed}"))
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "train_log.jsonl").open("x", buffering=1)  # x: never another run's
    meta = dict(schema_version=1, run_id=folder.name, algo="grpo", env=args.env, args=vars(args))
    log.write(json.dumps({"meta": meta}) + "\n")
    started = time.perf_counter()
    counters = {"iteration": 0, "env_steps": 0, "opt_steps": 0}  # env_steps: sampled tokens
    record(log, counters | evaluate(model, tokenizer, env, args))

    for iteration in tqdm(range(1, args.iterations + 1), unit="it", disable=None):
        # 1. Rollout: group_size responses to each prompt, from the current policy.
        start = (iteration - 1) * args.prompts_per_iteration
        numbers = range(start, start + args.prompts_per_iteration)
        tasks = [env.training_task(number, args.seed) for number in numbers]
        batch = rollout(model, tokenizer, env, tasks, range(args.group_size), args.temperature, args,
                        "train", start)

        # 2. Advantages: each reward against its group's. Groups whose rewards are all equal are dropped.
        rewards = batch["rewards"].view(-1, args.group_size)  # (groups, G)
        advantages = group_advantages(rewards, args.scale_rewards)  # (groups, G)
        batch["advantages"] = advantages.view(-1, 1)  # (B, 1)
        trainable = (rewards != rewards[:, :1]).any(1)  # (groups,)
        rows = trainable.repeat_interleave(args.group_size)  # (B,)
        kept = {name: tensor[rows] for name, tensor in batch.items()}

        # 3. Update: one optimiser step for each epoch.
        optimizer.param_groups[0]["lr"] = learning_rate(iteration, args)
        metrics = {}
        if trainable.any():
            metrics = update(model, reference, optimizer, kept, args)
            counters["opt_steps"] += args.epochs

        # 4. Metrics; evaluate, log.
        lengths = batch["response_mask"].sum(1)  # (B,)
        counters["iteration"] = iteration
        counters["env_steps"] += int(lengths.sum())
        metrics = counters | metrics | {
            "wall_time_s": time.perf_counter() - started,
            "train/reward": rewards.mean().item(),
            "train/learning_rate": learning_rate(iteration, args),
            "response_length/mean": lengths.mean().item(),
            "rollout/groups_trainable": trainable.sum().item(),
        }
        if iteration == args.iterations or (args.eval_every and iteration % args.eval_every == 0):
            metrics |= evaluate(model, tokenizer, env, args)
        record(log, metrics)

    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(tyro.cli(Args))
