"""Mutants: one line of a file is changed, and the fast tests of that file run until one fails. Or none does.

    python tests/mutants.py                      # all, in about half an hour on one core
    python tests/mutants.py sft.py 'envs/*'      # those of some files, or by name: '*clip*'
    python tests/mutants.py --list

docs/testing.md says more. It works on a copy of the working tree, in which nothing else is changed.
"""

import argparse
import fnmatch
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one mutant; one that hangs is killed, too

# The tests that a file is for, the likeliest to fail first; then pytest's -k.
TESTS = {
    "grpo_llm.py": ("grpo_maths crash draws updates rollout runs engines", "not ppo and not sft"),
    "ppo_llm.py": ("ppo_maths crash draws updates ppo_episodes runs rollout", "not grpo and not sft"),
    "sft.py": ("crash draws sft sft_data runs", "not grpo and not ppo"),
    "a2c_vecenv.py": ("a2c_maths crash runs a2c_runs a2c_distributed", "not grpo and not ppo and not sft"),
    "envs/__init__.py": ("envs countdown logic text_envs", ""),
    "envs/countdown.py": ("countdown text_envs", "countdown"),
    "envs/mixture.py": ("mixture envs text_envs", "mixture or wait"),
    "envs/logic/": ("logic text_envs", "logic"),
    "envs/openspiel/": ("openspiel text_envs", "openspiel"),
    "envs/arcagi3/": ("arcagi3 text_envs", "arcagi3"),
    "envs/code/repl.py": ("repl", ""),
    "envs/code/": ("swe", ""),
    "envs/pixels/": ("pixel_goal goal_template gymnasium_vec game_boy", ""),
    "tools/convert_sft.py": ("convert_sft", ""),
    "tools/merge_adapter.py": ("crash merge_adapter", "merge"),
    "tools/view_episodes.py": ("view_episodes", ""),
    "tools/": ("tools", ""),
}

# file -> name: (text that the file holds exactly once, what takes its place)
MUTANTS = {
    "grpo_llm.py": {
        "RLOO's factor": ("(size - 1).clamp(min=1)", "size.clamp(min=1)"),
        "sample deviation": (
            "centred.square().sum(1, keepdim=True) / size",
            "centred.square().sum(1, keepdim=True) / (size - 1)"),
        "balance of the other sign": ("torch.where(advantages < 0", "torch.where(advantages > 0"),
        "k3 without its minus": ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio)"),
        "GSPO: gradient of the mean": ("sequence.detach() + logprobs", "sequence + logprobs"),
        "GSPO: unmasked mean": ("(log_ratio * mask).sum(1", "log_ratio.sum(1"),
        "clip sides exchanged": (
            "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
        "clip: the larger": ("-torch.minimum(ratio * adv", "-torch.maximum(ratio * adv"),
        "CISPO: gradient of its weight": ("-clipped.detach() * adv", "-clipped * adv"),
        "clipfrac counts equal ones": ("clipped * advantages > -ratio", "clipped * advantages >= -ratio"),
        "mean of sequences over tokens": ("clamp(min=1) / num_sequences", "clamp(min=1) / num_tokens"),
        "constant of the pass": ("(num_sequences * longest)", "(len(mask) * longest)"),
        "temperature is not the trainer's": (".float() / temperature, dim", ".float(), dim"),
        "entropy of the other sign": ("entropy = -(logits", "entropy = (logits"),
        "positions from 1": ("positions = (valid.cumsum(1) - 1)", "positions = valid.cumsum(1)"),
        "padding is attended to": ("attention_mask=valid,", "attention_mask=None,"),
        "rate of the iteration before": (
            "learning_rate(iteration + 1, args)", "learning_rate(iteration, args)"),
        "logged rate": (
            'learning_rate": learning_rate(iteration, ', 'learning_rate": learning_rate(iteration + 1, '),
        "warm-up from 0": ("min(1.0, iteration /", "min(1.0, (iteration - 1) /"),
        "decay over all iterations": ("(iteration - args.warmup_iterations) /", "iteration /"),
        "the same order in each epoch": ("seed * 1_000_003 + epoch", "seed * 1_000_003"),
        "a single eos is ignored": ("if ids is None else [ids]", "if ids is None else []"),
        "the same number at each token": ("seeds = seeds + GAMMA", "pass"),
        "tokens of probability 0": ("cdf[:, -1:], right=True)", "cdf[:, -1:])"),
        "the same numbers in each turn": (" {len(r.turns)}", ""),
        "the same numbers in a retry": ("{r.retries} {len", "{len"),
        "the same numbers in a group": ("{kind} {position} {number}", "{kind} {position}"),
        "the seed says nothing of replies": ('f"{args.seed} {kind}', 'f"{kind}'),
        "the same numbers in each iteration": ('"train", drawn + mine.start)', '"train", mine.start)'),
        "the same order in each iteration": ("1_000_003 + iteration + 1", "1_000_003"),
        "dynamic sampling draws again the same": ("task_index(drawn + i", "task_index(cursor + i"),
        "the cursor forgets extra rounds": (
            "iteration + 1, drawn", "iteration + 1, cursor + args.prompts_per_iteration"),
        "one round more": ("range(1 + args.dynamic_sampling)", "range(2 + args.dynamic_sampling)"),
        "more groups than asked for": ("if group][:len(mine)]", "if group]"),
        "minibatches lose the remainder": (
            "np.array(order, dtype=int), minibatches",
            "np.array(order, dtype=int)[:len(order) // minibatches * minibatches], minibatches"),
        "--beta2 is ignored": ("betas=(0.9, args.beta2)", "betas=(0.9, 0.95)"),
        "importance weight: a floor": ("mismatch.clamp(max=", "mismatch.clamp(min="),
        "importance weight upside down": (
            'torch.exp(old_logprobs - batch["rollout_logprobs"])',
            'torch.exp(batch["rollout_logprobs"] - old_logprobs)'),
        "KL of the other direction": ("kl = k3(ref_logprobs - logprobs)", "kl = k3(logprobs - ref_logprobs)"),
        "entropy is punished": ("- args.entropy_coef * entropy", "+ args.entropy_coef * entropy"),
        "KL without its coefficient": ("+ args.kl_coef * kl", "+ kl"),
        "no old log-probabilities": ("if not args.on_policy:", "if False:"),
        "the reference is the policy": ("store_logprobs(reference or model", "store_logprobs(model"),
        "the adapter stays on": ("nullcontext() if reference else model", "nullcontext() if True else model"),
        "means over the last minibatch": ("num_seen += num_tokens", "num_seen = num_tokens"),
        "policy loss of the last step": (
            'len(norms) if name == "train/policy_loss"', '1 if name == "train/policy_loss"'),
        "--max-grad-norm is ignored": ("(parameters, args.max_grad_norm)", "(parameters, 1.0)"),
        "gradients pile up": ("optimizer.zero_grad(set_to_none=True)", "pass"),
        "one epoch": ("for _ in range(args.epochs)", "for _ in range(1)"),
        "groups in order": ("torch.randperm(len(groups)).tolist()", "range(len(groups))"),
        "groups without signal": ("(highest > lowest)", "(highest >= lowest)"),
        "cut by the context is not cut": (
            'termination in ("length", "context")\n', 'termination == "length"\n'),
        "failed ones are trained": ('not cut and "error" not in', 'not cut and "none" not in'),
        "the environment's tokens are trained": (
            "segment.append(ids, 0, [0.0]", "segment.append(ids, 1, [0.0]"),
        "cut replies reach the environment": ("if ids[-1] in self.engine.eos else None", ""),
        "one turn more": ("== self.args.max_turns", "== self.args.max_turns + 1"),
        "what was earned is lost": ("reward=earned + step.reward", "reward=step.reward"),
        "greedy is sampled": ("(1, 0.0)))", "(1, 1.0)))"),
        "pass@n: all right": ("correct.max(1)", "correct.min(1)"),
        "evaluation at the other temperature": ("(n, args.eval_temperature)", "(n, args.temperature)"),
        "other validation episodes each time": ('draw = kind if kind == "val" else', "draw ="),
        "clip_ratio without the context": ('shares["length"] + shares["context"]', 'shares["length"]'),
        "episodes are written twice": (
            'replace_file(path, b"".join(json', 'path.open("ab").write(b"".join(json'),
        "the optimiser is not restored": ('if run.state["optimizer"]:', "if False:"),
        "the cursor is not restored": ('cursor, metrics = run.state["cursor"]', "cursor, metrics = 0"),
        "nothing reaches the disk": ("    os.fsync(handle)", "    pass"),
        "a replaced file is not flushed": ("    flush_to_disk(temporary)\n", ""),
        "a checkpoint's log is not on the disk": ("os.fsync(self.log.fileno())", "pass"),
        "a checkpoint's files are not flushed": ("(*temporary.iterdir(), temporary)", "(temporary,)"),
        "a checkpoint's folder is not flushed": ("(*temporary.iterdir(), temporary)", "temporary.iterdir()"),
        "a checkpoint's name is not flushed": ("flush_to_disk(folder.parent)", "pass"),
        "the log is not flushed": ("self.log.flush()", "pass"),
        "damaged checkpoints count": ("[:self.checkpoints.index(folder) + 1]", ""),
        "manifests are not looked at": ("sha256(folder / name) != digest", "False"),
        "one checkpoint more": (
            "complete[:-self.args.keep_checkpoints]", "complete[:-self.args.keep_checkpoints - 1]"),
        "the log is not cut": ("lines = [data[:end],", "lines = [data,"),
        "TensorBoard keeps what is made again": ("+ bool(self.state)", ""),
        "flags may change": ("may_change and flags.get(name) != value", "may_change and False"),
        "the clock starts anew": (' - start["elapsed"]', ""),
        "times add up for ever": (
            "self.times, self.since = {}, (wall, processor", "self.since = (wall, processor"),
        "sps of the whole run": ("sps=(env_steps - self.since[2])", "sps=env_steps"),
        "a stop is not saved": ("(last or stopped or iteration %", "(last or iteration %"),
    },
    "ppo_llm.py": {
        "GAE: no lambda": ("delta + gamma * lam * trace", "delta + gamma * trace"),
        "GAE: values of others' tokens": ("torch.where(chosen, values[:, t], next_value)", "values[:, t]"),
        "whitened where nothing is": ("torch.rsqrt(variance + 1e-8) * mask", "torch.rsqrt(variance + 1e-8)"),
        "the penalty is a reward": ('rows("rewards") - penalty', 'rows("rewards") + penalty'),
        "k1 of the other direction": (
            "return logprobs - ref_logprobs if", "return ref_logprobs - logprobs if"),
        "controller's upper bound": ("-0.2), 0.2)", "-0.2), 0.4)"),
        "controller while frozen": ("if args.kl_target and not frozen:", "if args.kl_target:"),
        "clip: no upper side": ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(min=1 - clip)"),
        "value loss: the smaller": ("torch.maximum(error, near_error)", "torch.minimum(error, near_error)"),
        "value loss: not halved": ("return errors / 2,", "return errors,"),
        "value loss without its weight": ("VALUE_COEF * value_loss", "value_loss"),
        "returns are advantages": ("returns = advantages + values", "returns = advantages"),
        "entropy is punished": ("- args.entropy_coef * entropy", "+ args.entropy_coef * entropy"),
        "importance weight without cap": (".clamp(max=TIS_CAP)", ""),
        "loss over the pass": ("* mask).sum() / num_tokens", "* mask).sum() / mask.sum()"),
        "target_kl of the last pass": ("kl += sums.get", "kl = sums.get"),
        "target_kl is ignored": ("> args.target_kl:", "> math.inf:"),
        "rate a step late": ("iteration - start + 1, args.iterations", "iteration - start, args.iterations"),
        "rate of the iteration before": (
            "learning_rate(args.learning_rate, iteration + 1", "learning_rate(args.learning_rate, iteration"),
        "the critic's rate of the iteration before": (
            "learning_rate(args.critic_learning_rate, iteration + 1",
            "learning_rate(args.critic_learning_rate, iteration"),
        "the policy moves too early": ("return 1 + (self.critic_warmup", "return (self.critic_warmup"),
        "reward beside a turn's last token": (".rewards[end - 1]", ".rewards[end - 2]"),
        "a single reward at the first turn": (
            "[0.0] * (len(r.turns) - 1) + [rewards]", "[rewards] + [0.0] * (len(r.turns) - 1)"),
        "episodes in order": ("torch.randperm(len(episodes)).numpy()", "np.arange(len(episodes))"),
        "minibatches lose the remainder": (
            ".numpy(), minibatches)", ".numpy()[:len(episodes) // minibatches * minibatches], minibatches)"),
        "--critic-beta2 is ignored": ('"critic_optimizer": args.critic_beta2', '"critic_optimizer": 0.99'),
        "--critic-epochs is ignored": (
            "args.critic_epochs, args.critic_minibatches, args, pad",
            "1, args.critic_minibatches, args, pad"),
        "a resume forgets the coefficient": (
            'for name in ("cursor", "metrics", "kl_coef"))',
            'if name != "kl_coef" else args.kl_coef for name in ("cursor", "metrics", "kl_coef"))'),
        "a resume forgets the critic": ('run.state["critic"], options', "critic.state_dict(), options"),
        "a resume forgets the critic's optimiser": (
            "in optimizers if run.state[name]", 'in optimizers if name == "optimizer" and run.state[name]'),
        "the critic's steps are not counted": ("+ steps + critic_steps", "+ steps"),
        "cursor stands still": ("cursor += args.prompts_per_iteration", "pass"),
        "failed ones are trained": ('if "error" not in (r.termination', 'if "none" not in (r.termination'),
        "explained variance is the other share": ("float(1 - unexplained", "float(unexplained"),
    },
    "sft.py": {
        "the shift by one": ('batch["response_mask"][:, 1:]', 'batch["response_mask"][:, :-1]'),
        "warm-up from 0": ("min(1.0, step /", "min(1.0, (step - 1) /"),
        "wsd goes down too early": ("steps * (1 - WSD_DECAY)", "steps * (1 - 2 * WSD_DECAY)"),
        "vectors decay": ("p.ndim < 2], weight_decay=0.0", "p.ndim < 2], weight_decay=weight_decay"),
        "--beta2 is ignored": ("betas=(0.9, args.beta2)", "betas=(0.9, 0.95)"),
        "another chat template on resume": (
            'template = [args.chat_template] if args.chat_template not in', "template = [] if args.seed in"),
        "the first record forgets": ('None, run.state["window"],', "None, [],"),
        "demonstrations of max_length": (
            "and len(longer) <= args.max_length", "and len(longer) < args.max_length"),
        "demonstrations cut too early": (
            "while len(longer) > args.max_length", "while len(longer) >= args.max_length"),
        "rows of max_length": ("if len(ids) > args.max_length:", "if len(ids) >= args.max_length:"),
        "the other end is cut": ('if args.truncation == "left"', 'if args.truncation == "right"'),
        "the first token is learned": ("return ids, [0, *mask[1:]]", "return ids, mask"),
        "the eos is not learned": (
            "[0] * len(prompt) + [learned] * len(ids)",
            "[0] * len(prompt) + [learned] * (len(ids) - 1) + [0]"),
        "rows are renamed before they are flushed": (
            "flush_to_disk(temporary)\n    replace_file", "replace_file"),
        "rows come before their counts": (
            'replace_file(path.with_suffix(".json"), json.dumps(counts).encode())\n    '
            "temporary.replace(path)",
            'temporary.replace(path)\n    replace_file(path.with_suffix(".json"), '
            "json.dumps(counts).encode())"),
        "rows are encoded anew on resume": ("not (run.state and path.exists())", "True"),
        "the start is the best": ("is_best = step > 0 and", "is_best ="),
        "a resume forgets the best": ('(run.state["best"], run.state["best_loss"])', '("", math.inf)'),
        "the best is dropped": ('if old.name != state.get("best"):', "if True:"),
        "loss over the pass": (
            "response_loss(model, batch) / num_targets",
            'response_loss(model, batch) / batch["response_mask"].sum()'),
        "epochs lose the remainder": ("math.ceil(args.epochs", "math.floor(args.epochs"),
        "rows from the second batch on": ("((step - 1) * args.batch_size + i", "(step * args.batch_size + i"),
        "rate of the step before": (
            'group["lr"] = learning_rate(step, ', 'group["lr"] = learning_rate(step - 1, '),
        "logged rate": ('rate": learning_rate(step, ', 'rate": learning_rate(step + 1, '),
        "val/loss by rows": ("/ count_targets(held_out)", "/ len(held_out)"),
        "greedy is sampled": ("correct(1, 0.0)", "correct(1, 1.0)"),
        "cut replies may be right": ("ids[-1] in ends and", ""),
        "held-out rows are learned": ("order[num_val:]", "order"),
        "the last record alone": ("dtype=torch.float64).mean(0)", "dtype=torch.float64)[-1]"),
        "positions go on in packed rows": (
            "range(len(ids))), strict", "range(len(fit[0]), len(fit[0]) + len(ids))), strict"),
        "rows for another kernel": (
            "model.config._attn_implementation in SKIPPING",
            "model.config._attn_implementation not in SKIPPING"),
        "the same order in each epoch": ("seed * 1_000_003 + epoch", "seed * 1_000_003"),
        "the optimiser is not restored": (
            'dcp.set_optimizer_state_dict(model, optimizer, run.state.pop("optimizer"), options=FULL)',
            "pass"),
        "spaces before a turn are learned": ("offsets[first][1] <= start", "offsets[first][1] < start"),
        "a log is not on the disk": ("os.fsync(self.log.fileno())", "pass"),
    },
    "a2c_vecenv.py": {
        "a time limit is an end": (
            "next_values * ~terminated - values", "next_values * ~(terminated | done) - values"),
        "traces cross episodes": ("decay = gamma * lam * ~done", "decay = gamma * lam * ~terminated"),
        "entropy is punished": ("value_loss - entropy_coef", "value_loss + entropy_coef"),
        "final observations of wrong rows": (
            '["final_obs"][truncated[done]]', '["final_obs"][:int(truncated.sum())]'),
        "values of the next episode": (
            'torch.where(batch["truncated"], batch.pop("cut_values"), next_values)',
            'batch.pop("cut_values") * 0 + next_values'),
        "annealing off by one": ("args.anneal * (iteration - 1)", "args.anneal * iteration"),
        "Adam's eps": ("eps=1e-5, ", ""),
        "evaluation starts as training": ("args.seed + 1_000_000 + rows", "args.seed + rows"),
        "other draws at each evaluation": ("torch.manual_seed(args.seed)  # the same", "pass  # the same"),
        "the same numbers in each iteration": ("args.seed * 1_000_003 + iteration", "args.seed * 1_000_003"),
        "population deviation": ("everyone.std()", "everyone.std(correction=0)"),
        "gradients are summed": (" / args.update_every).backward()", ").backward()"),
        "--max-grad-norm is ignored": ("agent.parameters(), args.max_grad_norm)", "agent.parameters(), 0.5)"),
        "the rate is not annealed": ('["lr"] = args.learning_rate * left', '["lr"] = args.learning_rate'),
        "the bonus is not annealed": ("args.entropy_coef * left", "args.entropy_coef"),
        "returns go on": ("episodes.masked_fill_(done, 0)", "pass"),
        "a resume forgets the returns": (
            'episodes = run.state["episodes"]', 'episodes = 0 * run.state["episodes"]'),
        "a resume forgets the worlds": ('if run.state["env"] is not None:', "if False:"),
        "grad_norm of idle rollouts": ('metrics["grad_norm"] *= args.update_every', "pass"),
        "episodes lose the remainder": (
            "-((row - args.eval_episodes) // args.eval_envs)", "args.eval_episodes // args.eval_envs"),
        "short episodes are preferred": ("numbers[done & (played < due)]", "numbers[done]"),
        "a limit is a success": (
            "torch.stack([terminated & env.has_goal", "torch.stack([done & env.has_goal"),
        "greedy is sampled": ("clocks = 1.0 if greedy else", "clocks ="),
        "weights are not looked at": ("if not all(torch.isfinite(weight).all()", "if not all(True"),
        "a checkpoint's files are not flushed": ("(*temporary.iterdir(), temporary)", "(temporary,)"),
        "a checkpoint is renamed first": (
            "            temporary.rename(folder)\n            flush_to_disk(folder.parent)",
            "            flush_to_disk(folder.parent)\n            temporary.rename(folder)"),
        "a stop is not saved": ("if last or stopped or iteration %", "if last or iteration %"),
        "the optimiser is not restored": ('optimizer.load_state_dict(run.state["optimizer"])', "pass"),
        "success by steps": ('metrics["done_rate"] / episodes', 'metrics["done_rate"]'),
    },
    "envs/__init__.py": {
        "what is thought counts": ('"" if "<think>" in text else', ""),
        "the beginning is kept": ("text[-MAX_REPLY:]", "text[:MAX_REPLY]"),
        "the first </think>": ('reply.rfind("</think>") + len', 'reply.find("</think>") + len'),
        "false is true": ('return value.lower() in ("true", "1")', "return True"),
    },
    "envs/countdown.py": {
        "numbers are used twice": ("            pool.remove(n)", "            pass"),
        "numbers are left over": ("return True, pool == [target]", "return True, target in pool"),
        "division with a rest": ('"/": a == result * b', '"/": a // b == result'),
        "any operator": ("if not right or op not in config.operators or", "if not right or"),
        "expressions leave numbers out": ("sorted(used) == sorted(nums)", "set(used) <= set(nums)"),
        "the first answer": ('start = reply.rfind("<answer>", 0', 'start = reply.find("<answer>", 0'),
        "leading zeros": (" or LEADING_ZERO.search(text)", ""),
        "splits overlap": ("if problem and not self._is_test(*problem)", "if problem"),
        "held-out targets are trained": ("return is_test([], target) or is_test", "return is_test"),
        "a try twice": ("        left.remove(first)\n", ""),
        "order decides the split": ("map(str, sorted(nums))", "map(str, nums)"),
        "held-out rows are trained": ("not in held_out]", "or True]"),
    },
    "envs/mixture.py": {
        "weights are ignored": ("(place, int(number or 1))", "(place, 1)"),
        "train tasks do not come round": ('inner % self.envs[short].num_tasks("train")', "inner"),
        "some tasks never come": ("max(math.ceil(n / self", "min(math.ceil(n / self"),
        "waits for nothing": ("any(env.blocking for", "all(env.blocking for"),
    },
    "envs/logic/__init__.py": {
        "splits share their seeds": ('TEST_SEEDS if split == "test" else 0', "0"),
        "types 4 and 5 are alike": ("    if number == 5:", "    if False:"),
        "splits overlap": ("family.key(data)) == (seed >= TEST_SEEDS)", "family.key(data)) in (True, False)"),
    },
    "envs/logic/sudoku.py": {
        "givens may change": ('given in (".", digit)', "True"),
        "the first grid": ("rows, found = [], bare\n", "rows, found = [], found or bare\n"),
    },
    "envs/openspiel/__init__.py": {
        "ties are won": ("returns[player] > max(others)", "returns[player] >= max(others)"),
        "moves as good as the rest": ("return margin > 1e-9 or", "return margin > -1e-9 or"),
        "returns are not scaled": ("(value - case.low) / (case.high - case.low)", "value"),
        "two moves alike": ("return alike[0] if len(alike) == 1 else None", "return alike[0]"),
        "illegal numbers": (
            "return number if number in legal else None", "return number if number >= 0 else None"),
        "an illegal move goes on": (
            "return self._end(0.0, 0.0, legal=0.0)", "return self._end(0.5, 0.0, legal=0.0)"),
    },
    "envs/arcagi3/__init__.py": {
        "a click on a block's corner": (
            "value * self.scale + self.scale // 2) for", "value * self.scale) for"),
        "a changed block's corner": (
            "min(k * self.scale + self.scale // 2, size - 1)", "min(k * self.scale, size - 1)"),
        "the first action counts": (
            'found = value if "action" in value else found',
            'found = found or (value if "action" in value else None)'),
        "coordinates from 1": ("not 0 <= value <= limit", "not 1 <= value <= limit"),
        "true is a coordinate": ("type(value) is not int or", "not isinstance(value, int) or"),
        "the score in place of its rise": ('"delta_score": now - before', '"delta_score": now'),
        "one action more": ("self.turns >= self.config.max_actions", "self.turns > self.config.max_actions"),
        "the first screen of an animation": (
            "grid = self.shrink(frame.grids[-1])", "grid = self.shrink(frame.grids[0])"),
        "splits overlap": ("if split_of_game(game_id) == split:", "if True:"),
    },
    "envs/code/repl.py": {
        "a failing test is expected in vain": (
            "results.get(name) == outcome for", 'results.get(name) in (outcome, "PASSED") for'),
        "the same files earn": ("if left == original:", "if False:"),
        "tests of the model count": (
            "files.items() if not scenario.is_test(path)}\n        if", "files.items()}\n        if"),
        "partial where all is asked for": (
            '"partial" if self.config.reward_mode == "partial"', '"partial" if True'),
        "one turn more": ("self.turns >= self.config.max_turns", "self.turns > self.config.max_turns"),
        "one question more": (
            "self.asked + len(prompts) > self.config.max_queries", "self.asked > self.config.max_queries"),
        "splits overlap": ("held_out == (split ==", "held_out in (True, split =="),
    },
    "envs/code/swe.py": {
        "no reward without PASS_TO_PASS": ('kept = kept if row["PASS_TO_PASS"] else 1.0', "pass"),
        "case of a test's path": ("if path.lower() in theirs", "if path in theirs"),
        "case of a test's folder": ("PurePosixPath(path.lower()).parts", "PurePosixPath(path).parts"),
        "one test is enough": ("correct=float(fixed == kept == 1)", "correct=float(fixed > 0 and kept == 1)"),
        "broken tests count in part": ("partial=fixed if kept == 1 else 0.0", "partial=fixed"),
        "the first diff": ("block = fenced[-1] if fenced", "block = fenced[0] if fenced"),
        "diffs of git's own files": ('any(part.lower().startswith(".git")', 'any(part.startswith(".git/")'),
        "paths that lead elsewhere": ('part in ("", ".", "..")', 'part in ("", ".")'),
        "links are text": ("and mode[1] not in PLAIN_MODES", "and False"),
    },
    "envs/code/testing.py": {
        "canaries may live": (
            "any(results.get(name, outcome) != outcome for name, outcome in must.items())", "False"),
        "canaries among the tests may live": (
            'any(results.get(name) == "PASSED" for name in hidden)', "False"),
        "doubles may pass": ('results.forged |= again.get(name) == "PASSED"', "pass"),
        "a test may say it twice": ("len(results) != len(reports) or", ""),
        "the tree decides over tests": ("if not decides(path)}", "}"),
        "an end before the end": (' or ["", "end", ""] not in reports', ""),
        "a test that was not called": ('"PASSED" if "call" in phases else "FAILED"', '"PASSED"'),
    },
    "envs/code/doubles.py": {
        "canaries at the end": ("before = rng.choice([*tests, None])", "before = None"),
        "canaries that are expected to fail": ('"xfail" in mark or', ""),
    },
    "envs/pixels/goals.py": {
        "streaks are not broken": ("(streak + 1) * (dist < config.tau)", "streak + (dist < config.tau)"),
        "one step in a row fewer": ("streak >= config.k_consecutive", "streak > config.k_consecutive"),
        "one step more": ("steps >= config.max_steps", "steps > config.max_steps"),
        "farther is better": ("(previous_dist - dist)", "(dist - previous_dist)"),
        "distances wrap": ("torch.maximum(frames, goal) - torch.minimum(frames, goal)", "frames - goal"),
        "the oldest of a stack": ("frames[:, -1:], goal[None]", "frames[:, :1], goal[None]"),
        "pictures are not checked": ('!= meta["template_sha256"]', "is None"),
    },
    "envs/pixels/pixel_goal.py": {
        "the door opens from anywhere": ("ahead(facing)[2] == DOOR", "ahead(facing)[2] >= 0"),
        "closed doors let through": (
            "free = (tile == FLOOR) | ((tile == DOOR) & (door == 1))",
            "free = (tile == FLOOR) | (tile == DOOR)"),
        "actions under the menu": ("following[hidden] = state()[hidden, None]", "pass"),
        "the same episodes again": (
            "hash32(hash32(self._seed) + self._episode)", "hash32(hash32(self._seed))"),
        "stacks do not move": (
            "codes[:, -self.config.stack_k:-1] = codes[:, 1 - self.config.stack_k:].clone()", "pass"),
        "steps go on": ("self._steps.masked_fill_(mask, 0)", "pass"),
        "the distance of the episode before": (
            "self._dist = torch.where(mask, self._distance(), self._dist)", "pass"),
    },
    "envs/pixels/gymnasium.py": {
        "final observations are the next ones": (
            "final.append(np.array(self._convert(obs), self._array.dtype))",
            "final.append(np.array(self._convert(env.reset()[0]), self._array.dtype))"),
        "ends and limits exchanged": ("terminated.append(ended)", "terminated.append(cut)"),
        "CartPole's steps go on": ("env.steps[rows] = 0", "pass"),
    },
    "tools/validate_train_log.py": {
        "counters may go back": ("            if value < before:", "            if False:"),
        "NaN is a number": (
            "math.isfinite(value) if isinstance(value, float)", "True if isinstance(value, float)"),
        "keys may stand twice": ("if len(value) != len(pairs):", "if False:"),
        "runs may change": ("elif run_id != self.run_id:", "elif False:"),
        "rates over 1": ("not 0 <= value <= 1", "not 0 <= value"),
    },
    "tools/merge_adapter.py": {
        "files are not flushed": ('for path in (*temporary.rglob("*"), temporary)', "for path in ()"),
        "what differs is merged": ("elif not difference <= min", "elif difference < -min"),
    },
}

# Not killed, since nothing that anyone can see differs.
EQUAL = {
    ("sft.py", "rows for another kernel"): "equal: packed rows are only laid out otherwise",
}


def source_of(mutant):
    file, name = mutant
    return (ROOT / file).read_text(), *MUTANTS[file][name]


def pytest_arguments(file):
    """pytest's arguments for a file: the entry of TESTS that names it most closely."""
    names, chosen = TESTS[max((place for place in TESTS if file.startswith(place)), key=len)]
    slow = ["-m", ""] if file in ("envs/code/repl.py", "envs/code/testing.py") else []  # they need a sandbox
    return [*(f"tests/test_{name}.py" for name in names.split()), "-k", chosen, *slow]


class FirstFailure:
    """A plugin of pytest that tells which test failed."""

    def __init__(self, told):
        self.told = told

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.told.put(report.nodeid.removeprefix("tests/"))

    pytest_collectreport = pytest_runtest_logreport


def run_tests(folder, arguments, told):
    import pytest

    os.chdir(folder)
    sys.path[0], sys.argv[1:] = str(folder), []
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    code = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *arguments], plugins=[FirstFailure(told)])
    if code != 1:
        told.put("" if code == 0 else f"pytest ends with {code!r}")
    told.close()
    told.join_thread()
    os._exit(0)


def first_failure(folder, file):
    """Run the tests of a file in a process of its own.  -> the test that failed, empty if none did"""
    told = multiprocessing.Queue()
    process = multiprocessing.Process(target=run_tests, args=(folder, pytest_arguments(file), told))
    process.start()
    try:
        return told.get(timeout=LIMIT)
    except multiprocessing.queues.Empty:
        return f"out of time ({LIMIT} s)"
    finally:
        process.kill()
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="files or names, with * and ?")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    args = parser.parse_args()
    chosen = [(file, name) for file in MUTANTS for name in MUTANTS[file]
              if any(fnmatch.fnmatch(word, pattern) for pattern in args.patterns for word in (file, name))]
    if args.list:
        return print("\n".join(f"{file:28} {name}" for file, name in chosen))

    # Two versions of a file may have one time and one size, so no bytecode is kept.
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method("fork")  # what takes long to import is imported once
    for name in ("torch.distributed.fsdp", "torch.utils.tensorboard", "transformers", "peft", "datasets"):
        importlib.import_module(name)
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for path in filter(Path.is_file, map(ROOT.joinpath, tree.splitlines())):
            copy = Path(folder, path.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        for file in dict.fromkeys(file for file, _ in chosen):
            if failed := first_failure(folder, file):
                sys.exit(f"{file}: {failed} fails as it is")
            for mutant in (mutant for mutant in chosen if mutant[0] == file):
                text, old, new = source_of(mutant)
                Path(folder, file).write_text(text.replace(old, new))
                began = time.perf_counter()
                failed = first_failure(folder, file)
                survived += [mutant] * (not failed)
                print(f"{file:28} {mutant[1]:45} {time.perf_counter() - began:5.0f} s  "
                      + (f"killed by {failed}" if failed else EQUAL.get(mutant, "SURVIVED")), flush=True)
                Path(folder, file).write_text(text)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return len([mutant for mutant in survived if mutant not in EQUAL])


if __name__ == "__main__":
    sys.exit(main())
