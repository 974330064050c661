"""Mutants: one line of a file is changed, and the fast tests of that file run until one fails. Or none does.

    python tests/mutants.py 'envs/*' sft.py      # those of some files, or by name: '*clip*'
    python tests/mutants.py --changed            # of lines that the last commit or the working tree changed
    python tests/mutants.py --trace              # so that --changed meets only tests that execute the lines
    python tests/mutants.py --matrix FILE.csv    # all tests that fail, of each mutant

docs/testing.md says more.
"""

import argparse
import collections
import csv
import fnmatch
import importlib
import json
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import mutate  # noqa: E402

# The tests that a file is for, the likeliest to fail first; then pytest's -k.
TESTS = {
    "grpo_llm.py": (
        "rl_maths crash draws updates checks flags rollout rewards runs chat engines distributed terminal",
        "not ppo and not sft"),
    "ppo_llm.py": (
        "rl_maths crash draws updates checks flags runs rollout rewards chat distributed",
        "not grpo and not sft"),
    "sft.py": ("crash draws sft sft_data flags runs distributed terminal", "not grpo and not ppo"),
    "a2c_vecenv.py": (
        "a2c_maths crash flags runs a2c_runs a2c_distributed distributed terminal",
        "not grpo and not ppo and not sft"),
    "envs/__init__.py": ("envs rewards env_properties rows_files countdown logic text_envs", ""),
    "envs/chat.py": ("chat calls sft_data runs", "template or bad_input or chat or calls or sft_data"),
    "envs/calls.py": ("calls chat", ""),
    "envs/files.py": ("crash runs", "not ppo and not sft"),
    "envs/splits.py": ("sft_data", ""),
    "envs/countdown.py": ("countdown env_properties text_envs", "countdown"),
    "envs/mixture.py": ("mixture env_properties envs text_envs", "mixture or wait"),
    "envs/answers/": ("answers", ""),
    "envs/workers.py": ("openspiel answers", "worker or processor or held_up"),
    "envs/rows.py": (
        "rows env_properties rows_files trl_env",
        "not env_properties or rows or mixture or trl"),
    "envs/csv_files.py": ("rows_files", ""),
    "envs/census.py": ("rows_files", ""),
    "envs/adapters/": (
        "env_properties trl_env textarena openenv reasoning_gym verifiers mixture openspiel",
        ""),
    "envs/adapters/agent.py": ("agent env_properties", "agent"),
    "envs/adapters/endpoint.py": ("agent env_properties", "agent"),
    "envs/adapters/trl.py": ("trl_env env_properties rows", "not env_properties or trl"),
    "envs/logic/": ("logic env_properties text_envs", "logic"),
    "envs/openspiel/": ("openspiel env_properties text_envs", "openspiel"),
    "envs/arcagi3/": ("arcagi3 env_properties text_envs", "arcagi3"),
    "envs/code/repl.py": ("repl env_properties", "test_repl or repl"),
    "envs/code/expectations.py": ("expectations", ""),
    "envs/code/executor.py": ("sandbox", "executor"),
    "envs/code/": ("swe env_properties", "test_swe or swe"),
    "envs/pixels/": ("pixel_goal goal_template gymnasium_vec game_boy atari a2c_distributed", ""),
    "tools/check_rows.py": ("check_rows", ""),
    "tools/compare_runs.py": ("tools golden", "compare or golden or runs"),
    "tools/convert_sft.py": ("convert_sft", ""),
    "tools/diagnose.py": ("diagnose", ""),
    "tools/merge_adapter.py": ("crash merge_adapter", "merge"),
    "tools/view_episodes.py": ("view_episodes", ""),
    "tools/dump_policy_gif.py": ("dump_policy_gif", ""),
    "tools/watch_run.py": ("watch_run", ""),
    "tools/report_run.py": ("terminal", ""),
    "tools/": ("tools", ""),
    "docs/reading/exercises/": ("exercises", ""),
    "docs/reading/": ("reading rl_maths", ""),
    "docs/rewards/": ("rewards", ""),
    "docs/variants/ppo_vecenv.diff": ("variants", "transition or surrogate"),
    "docs/variants/teachers.diff": ("variants", "its_own_teacher or equal_teachers or the_reverse"),
    "docs/variants/turns.diff": ("variants", "turn_is"),
}

# file -> name: (text that the file holds exactly once, what takes its place)
MUTANTS = {
    "grpo_llm.py": {
        "RLOO's factor": ("size / max(size - 1, 1)", "size / size"),
        "MaxRL divides by nothing": ("advantages / max(rewards.mean(), 1e-9)", "advantages / 1.0"),
        "DPPO masks the other side": (
            "moved > DPPO_LIMIT, moved < -DPPO_LIMIT", "moved < -DPPO_LIMIT, moved > DPPO_LIMIT"),
        "DPPO's penalty is masked too": (
            "DPPO_KL_COEF * log_ratio**2", "DPPO_KL_COEF * log_ratio**2 * ~is_masked"),
        "DPPO's ratio is to the trainer": (
            'if args.loss == "dppo" else old_logprobs', "if False else old_logprobs"),
        "SAPO: one steepness": ("torch.where(advantages > 0, 1.0, 1.05)", "torch.ones_like(advantages)"),
        "SAPO without its 4": ("(ratio - 1)) * 4 / steepness", "(ratio - 1)) / steepness"),
        "MIS over padding": ("(log_mismatch * mask).sum(1", "log_mismatch.sum(1"),
        "what is masked keeps its weight": ("weights.masked_fill(is_out, 0.0)", "weights.clamp(low, high)"),
        "TIS has no lower bound": ("weights.clamp(low, high)", "weights.clamp(max=high)"),
        "sample deviation": ("rewards.std()", "rewards.std(ddof=1)"),
        "balance of the other sign": ("np.where(advantages < 0", "np.where(advantages > 0"),
        "k3 without its minus": ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio)"),
        "GSPO: gradient of the mean": ("sequence.detach() + (", "sequence + ("),
        "temperature is not the trainer's": (".float() / temperature, dim", ".float(), dim"),
        "padding is attended to": (
            "valid, position_ids=positions,", "torch.ones_like(valid), position_ids=positions,"),
        "decay over all iterations": ("(iteration - args.warmup_iterations) /", "iteration /"),
        "the same number at each token": ("draws[live, t]", "draws[live, 0]"),
        "the same numbers in a retry": ("r.retries, len(r.turns)", "len(r.turns)"),
        "the same numbers in each iteration": ("score, drawn + mine.start)", "score, mine.start)"),
        "a group's reward is of failures, too": (
            'played = [r for r in rollouts[start:start + num_samples] if r.termination != "error"]',
            "played = rollouts[start:start + num_samples]"),
        "dynamic sampling draws again the same": ("training_task(drawn + i", "training_task(cursor + i"),
        "--beta2 is ignored": ("betas=(0.9, args.beta2)", "betas=(0.9, 0.95)"),
        "entropy is punished": ("- args.entropy_coef * entropy", "+ args.entropy_coef * entropy"),
        "no old log-probabilities": ("if args.epochs * args.minibatches > 1:", "if False:"),
        "the adapter stays on": ("with model.disable_adapter():", "with contextlib.nullcontext():"),
        "gradients pile up": ("optimizer.zero_grad(set_to_none=True)", "pass"),
        "groups without signal": (
            "if any(abs(a) > 1e-9 for segment in segments for a in segment.advantages):", "if segments:"),
        "rounding is a signal": ("abs(a) > 1e-9", "abs(a) > 0"),
        "a cache that is none": ("if not cache.is_initialized:", "if False:"),
        "advantages of the last tokens": (
            "itertools.compress(segment.advantages, segment.response_mask)", "segment.advantages[-1:]"),
        "a changed script is not told": ("not in (None, sha256(Path(__file__)))", "in ()"),
        "a receipt without its traceback": ("traceback.format_exception(error)", "str(error)"),
        "the sampler's words are not compared": ("abs(mean - 1) > most_off", "-1 > most_off"),
        "the sampler's temperature is not": ("abs(slope) > most_slope", "-1 > most_slope"),
        "prompts are not counted in a pass": (
            "+ 1) * (longest_prompt + longest_response)", "+ 1) * longest_response"),
        "an open thought is forgotten": ("r.reply = opening + sampled", "r.reply = sampled"),
        "a sequence's mean over padding": (
            "mask / mask.sum(1, keepdim=True).clamp(min=1)", "mask / mask.shape[1]"),
        "tokens of the first segment alone": (
            "sum(segment.response_mask) for member in self.family for segment in member.segments",
            "sum(segment.response_mask) for member in self.family for segment in member.segments[:1]"),
        "what just fits does not": ("args.max_response_tokens <= args.max_context_tokens:",
                                    "args.max_response_tokens < args.max_context_tokens:"),
        "a prompt that just fits does not": ("0 < len(r.prompt_ids) <= self", "0 < len(r.prompt_ids) < self"),
        "sps of a resumed run": ("self.begin_record(time.perf_counter())", "self.begin_record(self.started)"),
        "two runs in one folder": ("if RANK == 0:  # where it fails", "if False:  # where it fails"),
        "the bar stays": ("initial=start, leave=False", "initial=start, leave=True"),
        "the bar of replies stays": ("contextlib.closing(self.engine.bar)", "contextlib.nullcontext()"),
        "each record has a line": ("and now > self.spoken_at + 10", "and now > self.spoken_at"),
        "one source for all": ("np.mean(found)", "found[0]"),
        "a short run has last lines": ("> self.started + 10)", "> self.started)"),
        "no last lines at a terminal": ("(not self.progress.disable or", "(False or"),
        "a model's code is run": ("str(path), trust_remote_code=False", "str(path)"),
        "cut by the context is not cut": ('("error", "length", "context") if', '("error", "length") if'),
        "failed ones are trained": ('else ("error",)', "else ()"),
        "cut ones vote": ("if r.termination not in left_out]", 'if r.termination != "error"]'),
        "failed sub-agents are trained": (
            "if member.termination not in left_out and any(", "if any("),
        "the environment's tokens are trained": (
            "segment.append(added, 0, [0.0]", "segment.append(added, 1, [0.0]"),
        "cut replies reach the environment": ("if not has_ended:", "if False:"),
        "any adapter will do": ('if kind != "LORA" or other:', 'if kind != "LORA":'),
        "PiSSA will do": ("if start not in (True,", "if not start and start not in (True,"),
        "a target that is not there": ("if not any(f\".{name}\"", "if not names and any(f\".{name}\""),
        "one token too many": ("if last >= size:", "if last > size:"),
        "DPPO is corrected": ('return "none" if self.loss == "dppo" else "tis"', 'return "tis"'),
        "what was earned is lost": ("reward=earned + step.reward", "reward=step.reward"),
        "pass@n: all right": ("correct.max(1)", "correct.min(1)"),
        "the optimiser is not restored": ('if state["optimizer"]:', "if False:"),
        "the cursor is not restored": ('cursor = state["cursor"]', "cursor = 0"),
        "a checkpoint's name is not flushed": ("flush_to_disk(folder.parent)", "pass"),
        "manifests are not looked at": ("sha256(folder / name) != digest", "False"),
        "the log is not cut": ('self.log.truncate(self.state["log_bytes"])', "pass"),
        "TensorBoard keeps what is made again": ("+ bool(self.checkpoint)", ""),
        "a stop is not saved": ("(is_last or stopped or iteration %", "(is_last or iteration %"),
        "a second evaluation of the start": ("(iteration == 0 or metrics and is_due)", "(metrics or is_due)"),
        "errors leave the log": (
            "('{\"trace_id\"', '{\"resume\"') if self.checkpoint else ('{\"trace_id\"',)",
            "('{\"resume\"',)"),
        "flags that do not matter are in the hash": (
            'what.keys() - self.args.may_change - {"args", "run_id"}', 'what.keys() - {"args", "run_id"}'),
        "a receipt of another rank": ("rank=RANK, receipt=", "rank=0, receipt="),
        "a log that ends before its checkpoint": (
            'if state["log_bytes"] > self.log.seek(0, os.SEEK_END):', "if False:"),
        "a copy is a checkpoint": (" if p.name[5:].isdecimal())", " if p.name[5:6].isdecimal())"),
        "seeds of an evaluation without the rank": (
            "Sampling(args.eval_temperature, seed), args, score, mine.start))",
            "Sampling(args.eval_temperature, seed), args, score))"),
        "tokens of one rank": (
            "lengths = gather([sum(s.response_mask) for s in segments])",
            "lengths = [sum(s.response_mask) for s in segments]"),
        "a mean over ranks": (
            "        module.set_gradient_divide_factor(1.0)",
            "        module.set_gradient_divide_factor(None)"),
        "sums of one rank": (
            "of_ranks = gather([torch.stack([*totals.values()]).tolist()])",
            "of_ranks = [torch.stack([*totals.values()]).tolist()]"),
        "one more checkpoint is kept": (
            "regular[-self.args.keep_checkpoints:]}", "regular[-self.args.keep_checkpoints - 1:]}"),
        "the newest step by its letters": (
            "key=lambda p: int(p.name[5:]))  # oldest first", "key=str)  # oldest first"),
        "processor time since the start": (
            "time.process_time() - self.processor_clock", "time.process_time()"),
        "marks of resumes are lost": (
            "kept = ('{\"trace_id\"', '{\"resume\"') if self.checkpoint else ('{\"trace_id\"',)",
            "kept = ('{\"trace_id\"',)"),
        "the summary is of what was chosen": (
            "reward_sum=sum(r.reward for r in rollouts)", "reward_sum=sum(r.reward for r in chosen)"),
        "equal replies to any prompt are one row": (
            "tokens = tuple(s.prompt_ids), tuple(s.response_ids), tuple(s.response_mask)",
            "tokens = tuple(s.response_ids), tuple(s.response_mask)"),
        "what just fits a pass does not": (
            "if parts[-1] and num_tokens > args.microbatch_tokens:",
            "if parts[-1] and num_tokens >= args.microbatch_tokens:"),
        "the penalty pushes away": ("per_token + args.kl_coef * kl", "per_token - args.kl_coef * kl"),
        "evaluations at training's temperature": (
            "Sampling(args.eval_temperature, seed)", "Sampling(args.temperature, seed)"),
        "replies of every seed are alike": (
            'Sampling(args.temperature, (args.seed, "train"))', 'Sampling(args.temperature, (1, "train"))'),
        "one round of dynamic sampling fewer": (
            "for _ in range(1 + args.dynamic_sampling):", "for _ in range(max(1, args.dynamic_sampling)):"),
        "the rate that is logged is the peak": (
            '"train/learning_rate": rate,', '"train/learning_rate": args.learning_rate,'),
        "a time limit in milliseconds": (
            "self.args.episode_timeout or None)", "self.args.episode_timeout * 1000 or None)"),
        "the first server alone": (
            "itertools.cycle(self.args.vllm_url)", "itertools.cycle(self.args.vllm_url[:1])"),
        "bounds of the correction are ignored": (
            "args.weighting, args.correction_bounds)", "args.weighting)"),
        "a resume's reference is its checkpoint": (
            "reference = add_lora(reference, args)", "reference = add_lora(reference, args, run.checkpoint)"),
        "a resume's adapter is the flag's": (
            "model = add_lora(model, args, run.checkpoint)", "model = add_lora(model, args)"),
        "the same numbers in each round": ("score, drawn + mine.start)", "score, cursor + mine.start)"),
        "the last rank's adapter": (
            "name, problem = gather([(name, problem)])[0]", "name, problem = gather([(name, problem)])[-1]"),
        "an update does not end what is idle": (
            "num_idle = 0 if num_trainable", "num_idle = num_idle if num_trainable"),
        "cut by the context is no clip": (
            '(ends["length"] + ends["context"]) / num_played', 'ends["length"] / num_played'),
        "what the environment truncated is not scored": (
            'if r.termination in ("done", "truncated")]', 'if r.termination == "done"]'),
        "the first step is scored": ("r.steps[-1] = step", "r.steps[0] = step"),
    },
    "ppo_llm.py": {
        "GAE: no lambda": ("+ gamma * lam * trace", "+ gamma * trace"),
        "GAE: others' tokens count": (
            "itertools.compress(getattr(s, name), s.response_mask)", "getattr(s, name)"),
        "the penalty is a reward": ('"rewards") - kl_coef', '"rewards") + kl_coef'),
        "a turn has no reward of its own": ("args.reward_fn, of_turns=True)", "args.reward_fn)"),
        "controller's upper bound": ("-0.2), 0.2)", "-0.2), 0.4)"),
        "controller between its bounds": ("kl / target - 1,", "kl - target,"),
        "target_kl of all steps together": (
            "all_reduce(kl) > args", "all_reduce(kl) + 0.05 * len(norms) > args"),
        "value loss: the smaller": ("torch.maximum(error, near_error)", "torch.minimum(error, near_error)"),
        "returns are advantages": ("returns = advantages + values", "returns = advantages"),
        "importance weight without cap": (".clamp(max=TIS_CAP)", ""),
        "loss over the pass": ("* mask).sum() / num_tokens", "* mask).sum() / mask.sum()"),
        "target_kl of the last pass": ("kl += total /", "kl = total /"),
        "rate a step late": ("done = iteration - start + 1", "done = iteration - start"),
        "a single reward at the first turn": (
            "[0.0] * (len(r.turns) - 1) + [rewards]", "[rewards] + [0.0] * (len(r.turns) - 1)"),
        "a resume forgets the coefficient": (
            'kl_coef = state["kl_coef"]', "kl_coef = args.kl_coef"),
        "a resume forgets the critic": ('state.pop("critic"), options', "critic.state_dict(), options"),
        "the critic's steps are not counted": ("+ steps + critic_steps", "+ steps"),
        "failed ones are trained": ('"error" not in (r.termination', '"none" not in (r.termination'),
        "the clock begins again": ('time.perf_counter() - self.state["elapsed"]', "time.perf_counter()"),
        "what a stop saved counts": ("if int(p.name[5:]) % self.args.checkpoint_every == 0]", "if p.name]"),
        "sps of the whole run": ("sps=env_steps / seconds", 'sps=self.counters["env_steps"] / seconds'),
        "a run's id is new": ('            self.meta["run_id"] = old["run_id"]\n', ""),
        "whitened by rank": (
            "total, count = all_reduce(torch.stack([(x * mask).sum(), mask.sum()]))",
            "total, count = torch.stack([(x * mask).sum(), mask.sum()])"),
        "values in bfloat16": (
            "with torch.autocast(hidden.device.type, enabled=False):",
            "with torch.autocast(hidden.device.type, torch.bfloat16):"),
        "the critic keeps its layers": ("            checkpoint_layers(backbone)\n", "            pass\n"),
        "the critic's layers keep everything": ("checkpoint_layers(backbone)", "backbone"),
        "the step beyond --target-kl is made": (
            "optimizer.zero_grad()\n            break", "optimizer.step()\n            break"),
        "the critic learns alone once more": (
            "if learned and iteration >= alone:", "if learned and iteration > alone:"),
        "the coefficient starts anew": (
            "adapt_kl_coef(kl_coef, measured", "adapt_kl_coef(args.kl_coef, measured"),
        "a rank without episodes earns 0": ("tolist()[:len(episodes)])", "tolist())"),
        "target_kl of one rank": ("all_reduce(kl) > args", "kl > args"),
        "as many steps as one rank can": ("max(gather([len(episodes)]))", "max(len(episodes), 1)"),
        "failed sub-agents are trained": (
            '"error" not in (r.termination, member.termination)', 'r.termination != "error"'),
        "the critic has no adapter": (
            "            if args.lora:\n                backbone = add_lora(backbone, args)\n", ""),
        "a resume's reference is its checkpoint": (
            "reference = add_lora(reference, args)", "reference = add_lora(reference, args, run.checkpoint)"),
        "a reward of all sorts does not end what is idle": ("num_idle = 0 if", "num_idle = num_idle if"),
        "warm-up while the critic is alone": (
            "learning_rate(args.learning_rate, iteration + 1, alone + 1, args)",
            "learning_rate(args.learning_rate, iteration + 1, 1, args)"),
        "a shared critic's head starts anew": (
            'state.pop("critic"), options=FULL)',
            'state.pop("critic") if args.critic == "own" else critic.state_dict(), options=FULL)'),
    },
    "sft.py": {
        "the shift by one": ('batch["response_mask"][:, 1:]', 'batch["response_mask"][:, :-1]'),
        "warm-up from 0": ("min(1.0, step /", "min(1.0, (step - 1) /"),
        "wsd goes down too early": ("steps * (1 - WSD_DECAY)", "steps * (1 - 2 * WSD_DECAY)"),
        "a last step of few rows is left out": ("math.ceil(args.epochs", "math.floor(args.epochs"),
        "rows of any length": ("    if size > most:\n", "    if False:\n"),
        "vectors decay": ("vectors, weight_decay=0.0", "vectors, weight_decay=args.weight_decay"),
        "the other end is cut": ('if args.truncation == "left"', 'if args.truncation == "right"'),
        "rows are renamed before they are flushed": (
            "flush_to_disk(temporary)\n    temporary.replace(path)\n\n\ndef examples",
            "temporary.replace(path)\n\n\ndef examples"),
        "a resume forgets the best": ('run.state["best"], run.state["best_loss"]', '"", math.inf'),
        "rows from the second batch on": ("(step - 1) * args.batch_size + i", "step * args.batch_size + i"),
        "val/loss by rows": ("/ sum(sum(mask) for _, mask in held_out)", "/ len(held_out)"),
        "two terminators are learned": ("    return ends[0]\n", "    return ends[-1]\n"),
        "half a character stays": ('text = re.sub("[\\ud800-\\udfff]"', 're.sub("[\\ud800-\\udfff]"'),
        "repeated rows are held out": ("np.flatnonzero(~repeated)", "np.arange(len(val))"),
        "a log is not on the disk": (', pointer, self.dir / "train_log.jsonl")', ", pointer)"),
        "the best is removed": ("kept = {*names.values(), *regular", "kept = {folder.name, *regular"),
        "one more is kept": (
            "regular[-self.args.keep_checkpoints:]", "regular[-self.args.keep_checkpoints - 1:]"),
        "half is none": ("(\\d+\\.?\\d*)", "(\\d+)\\.?\\d*"),
        "a file's rows once": ("places += [of_file] * int(whole)", "places += [of_file]"),
        "a half is one and a half": ("[of_file] * int(whole)", "[of_file] * max(1, int(whole))"),
        "the loss of the last step": (
            "torch.tensor(window, dtype=torch.float64).mean(0).tolist()", "window[-1]"),
        "draws of every call of an evaluation": (
            "torch.manual_seed(args.seed * 1_000_003 + start)", "torch.manual_seed(args.seed * 1_000_003)"),
        ".5 is taken for 1.5": (
            're.fullmatch(r"(.+)=(\\d+\\.?\\d*)", part)',
            're.fullmatch(r"(.+)=(\\d+\\.?\\d*)", part.replace("=0", "=1"))'),
        "a record has its last step's loss": (
            "torch.tensor(window, dtype=torch.float64).mean(0)",
            "torch.tensor(window, dtype=torch.float64)[-1]"),
        "the best checkpoint is the first one": (
            'if metrics.get("val/loss", math.inf) < best_loss:',
            'if not best and metrics.get("val/loss", math.inf) < best_loss:'),
        "a resume forgets the best loss": (
            'best, best_loss = run.state["best"], run.state["best_loss"]', 'best = run.state["best"]'),
        "a resume forgets the steps since the record": ('window = run.state["window"]', "window = []"),
        "an epoch ends where the batch divides it": (
            "epoch_ends = step * args.batch_size % num_rows < args.batch_size",
            "epoch_ends = step * args.batch_size % num_rows == 0"),
        "pass@n counts the greedy reply": ("of_source[:, :-1].max(1)", "of_source.max(1)"),
        "a cut prompt is compared": (
            "fingerprints(all_ids, all_mask.index(1), row[keys[0]])",
            "fingerprints(ids, mask.index(1), row[keys[0]])"),
        "a resume's adapter is the flag's": (
            "model = add_lora(model, args, run.checkpoint)", "model = add_lora(model, args)"),
    },
    "a2c_vecenv.py": {
        "a time limit is an end": (
            "next_values * ~terminated - values", "next_values * ~(terminated | done) - values"),
        "traces cross episodes": ("decay = gamma * lam * ~done", "decay = gamma * lam * ~terminated"),
        "entropy is punished": ("value_loss - entropy_coef", "value_loss + entropy_coef"),
        "population deviation": ("all_advantages.std()", "all_advantages.std(correction=0)"),
        "gradients are summed": (" / args.update_every).backward()", ").backward()"),
        "the rate is not annealed": ('["lr"] = args.learning_rate * frac', '["lr"] = args.learning_rate'),
        "a resume forgets the worlds": ('if run.state.get("env"):', "if False:"),
        "short episodes are preferred": ('["reset_mask"] & (number < args.eval_episodes)', '["reset_mask"]'),
        "greedy is sampled": ("    if greedy:", "    if False:"),
        "what is trained on is evaluated": ('env.reset(args.seed, "eval")', "env.reset(args.seed)"),
        "weights and evaluations draw the same": ('"eval actions"', '"weights"'),
        "a checkpoint is renamed first": (
            "            temporary.rename(folder)\n            flush_to_disk(folder.parent)",
            "            flush_to_disk(folder.parent)\n            temporary.rename(folder)"),
        "every flag may change": (
            "if name not in may_differ and was.get(name) != now.get(name):", "if False:"),
        "times are not put back": (
            "        self.times = dict.fromkeys(TIMES, 0.0)\n",
            '        self.times = getattr(self, "times", dict.fromkeys(TIMES, 0.0))\n'),
        "evaluations of every seed are alike": ('env.reset(args.seed, "eval")', 'env.reset(1, "eval")'),
        "traces cross lost lives": (
            'batch["terminated"] | batch["truncated"], args.gamma', 'batch["reset_mask"], args.gamma'),
    },
    "envs/__init__.py": {
        "what is thought counts": ("        if opening in reply:\n", "        if False:\n"),
        "the beginning is kept": ("reply[-MAX_REPLY:]", "reply[:MAX_REPLY]"),
        "false is true": ('return value.lower() in ("true", "1")', "return True"),
        "the last of two keys": ("if len(found) < len(pairs):", "if False:"),
        "a byte order mark is text": ('encoding="utf-8-sig", newline', 'encoding="utf-8", newline'),
        "the same order in each epoch": ("seed * 1_000_003 + epoch", "seed * 1_000_003"),
        "the one held out is trained": ('        split["train"].remove(split["test"][0])\n', ""),
        "a demonstration without its prompt": (
            'else [*task.messages, {"role": "assistant"', 'else [{"role": "assistant"'),
        "a group is seen one by one": ('parameters[:1] == ["rollouts"]', "False"),
        "any parameter means a group": ('parameters[:1] == ["rollouts"]', '"rollouts" in parameters'),
        "rewards for some are enough": ("or len(rewards) != len(rollouts):", "or False:"),
        "the order of a dictionary": ("if not isinstance(rewards, list | tuple) or len", "if len"),
        "an array is no list": ('if hasattr(rewards, "tolist"):', "if False:"),
        "an exception is nobody's": ("        error.add_note(", "        str("),
    },
    "envs/chat.py": {
        "a template need not read": ('    if says == b"same":\n', "    if False:\n"),
        "a form that is not known is taken": ("        if not (style.forms or style.by_library):\n",
                                              "        if False:\n"),
        "arguments are always objects": (
            "ensure_ascii=False) if style.arguments_as_text", "ensure_ascii=False) if 0"),
        "a call in the text will do": ("behind[0] == behind[1]", "True"),
        "calls in thoughts": ("read_calls(answer, form, tools)", "read_calls(reply, form, tools)"),
        "marks are not read": ("    return all(marks.values())\n", "    return True\n"),
        "an eos in a key": ("            yield place, str(key)\n", ""),
        "blank replies are learned": ("if not is_wanted(message) or not says_something(message)",
                                      "if not is_wanted(message)"),
        "marks that disagree": ("    if len({*marks.values()}) > 1:\n", "    if False:\n"),
        "a mask is a mark of what is learned": (
            "marks[name] = bool(value) == MARKS[name]", "marks[name] = bool(value)"),
        "ids of calls before": (
            'waiting = [call["id"] for call in calls]', 'waiting += [call["id"] for call in calls]'),
        "ids answer the last call first": ("waiting.pop(0)", "waiting.pop()"),
        "a thought closed before": (
            "if start >= 0 and not prompt[start + len(opening):].strip():", "if start >= 0:"),
        "the first thought alone": (
            "answer = answer.rpartition(closing)[2]", "answer = answer.partition(closing)[2] or answer"),
        "a space in front": (
            "tokenizer(before + text, add_special_tokens=False).input_ids[length:]",
            "tokenizer(text, add_special_tokens=False).input_ids"),
        "any number of calls is sent": ("for call in calls[:MAX_CALLS]:", "for call in calls:"),
        "of a mixture the first alone is looked at": (
            "            continue\n        style = style_of(tokenizer)",
            "            return\n        style = style_of(tokenizer)"),
    },
    "envs/calls.py": {
        "half a call is one": ("if not closed and stop < len(answer):", "if False:"),
        "texts without a type": ("if name not in types:", "if True:"),
        "any number of calls": ("for _ in range(MAX_CALLS):", "while True:"),
        "what is left over does not matter": ("    if form.whole and text.strip():\n", "    if False:\n"),
        "positional arguments are lost": ("or node.args or", "or"),
    },
    "envs/files.py": {
        "the lock ends with a child": ("fcntl.lockf(file,", "fcntl.flock(file,"),
        "nothing reaches the disk": ("    os.fsync(handle)", "    pass"),
    },
    "envs/splits.py": {
        "rows without a prompt are one": ("if given.strip() else ids", ""),
        "rows are told apart by what they say": ("    if len(np.unique(np.concatenate(keys))) > 1:\n",
                                                 "    if False:\n"),
        "more are held out": ("        if sizes[prompt] <= room:\n", "        if room > 0:\n"),
        "the largest is held out": ("chosen[sizes.argmin()]", "chosen[sizes.argmax()]"),
        "what is learned has one prompt": (
            "len(np.unique(np.concatenate(keys))) > 1", "len(np.unique(keys[0])) > 1"),
        "what is held out has one prompt": (
            "len(np.unique(np.concatenate(keys))) > 1", "len(np.unique(keys[-1])) > 1"),
    },
    "envs/countdown.py": {
        "numbers are used twice": ("            pool.remove(n)", "            pass"),
        "numbers are left over": ("return True, pool == [target]", "return True, target in pool"),
        "division with a rest": ('"/": a == result * b', '"/": a // b == result'),
        "splits overlap": ("if problem and not self._is_test(*problem)", "if problem"),
        "held-out targets are trained": ("return is_test([], target) or is_test", "return is_test"),
        "a try twice": ("        left.remove(first)\n", ""),
        "held-out rows are trained": ("not in held_out]", "or True]"),
    },
    "envs/mixture.py": {
        "what another file holds out is trained on": (
            "if question_of(task) not in self._held_out[short]:", "if True:"),
        "weights are ignored": ("(place, int(number or 1))", "(place, 1)"),
        "some tasks never come": ("max(math.ceil(n / self", "min(math.ceil(n / self"),
        "waits for nothing": ("any(env.blocking for", "all(env.blocking for"),
        "groups are not scored": ("return env.score_group(task, conversations, steps)", "return steps"),
        "what a derived kind holds out is trained on": (
            "kinds(other) & kinds(env)", "kinds(other) == kinds(env)"),
    },
    "envs/answers/__init__.py": {
        "the first tag": ("zip(tags[-2::-1], tags[:0:-1]", "zip(tags[:-1], tags[1:]"),
        "escaped braces count": (r'_BRACE = re.compile(r"(?<!\\)[{}]")', '_BRACE = re.compile(r"[{}]")'),
        "two boxes: the last": ("if inside is not None and len(boxes) > 1:", "if False:"),
        "a heading is an answer": ("is_picture or _HEADING.match(rest) or", "is_picture or"),
        "no mark within a mark": ("if (inner := boxed(found)) is not None:", "if False:"),
        "4 apples are in 14 apples": (r'before = r"(?<!\w)(?<!\d[.,])(?<![.\-+/^\u2212])"', 'before = ""'),
        "several answers: the first": ('answer in data["answers"])', 'answer in data["answers"][:1])'),
        "mathematics: the beginning": ("text[-MOST_MATH:]", "text[:MOST_MATH]"),
        "mathematics of any length": ("if len(found) <= MOST_MATH else None", ""),
    },
    "envs/workers.py": {
        "a limit of the clock": ("poll(seconds and seconds + STUCK)", "poll(seconds)"),
        "a limit of the clock, in the process": ("signal.setitimer(signal.ITIMER_PROF, seconds or 0)",
                                                 "signal.setitimer(signal.ITIMER_REAL, seconds or 0)"),
        "no limit": ("signal.setitimer(signal.ITIMER_PROF, seconds or 0)", "pass"),
        "what died is not asked again": ("for _ in range(2):", "for _ in range(1):"),
        "who took too long is asked again": ("if status == -signal.SIGPROF:", "if False:"),
        "a start that fails is a verdict": ("class WorkerError(OSError)", "class WorkerError(RuntimeError)"),
    },
    "envs/answers/plain_text.py": {
        "letters as they are composed": ("text = composed(text).strip()", "text = text.strip()"),
        "3² is 32": ('("[⁰¹²³⁴-⁹⁺⁻]+",', '("[⁰]+",'),
        "- 42 is -42": (r"[^\S\n]*-[^\S\n]+(?=[$€£¥]?[\d.])", r"[^\S\n]*-[^\S\n]+(?=[$€£¥])"),
        "marks stay": ('return _MARKDOWN.sub("", text)', "return text"),
    },
    "envs/answers/numbers.py": {
        "nearly whole": ("<= Fraction(1, 10**9)", "<= Fraction(1, 10**3)"),
        "every number is whole": ("return abs(one - gold) <= TOLERANCE * max(abs(one), abs(gold))",
                                  "return one == gold"),
        "a percentage is a number": ("is_meant = gold.scale < 1 or ASKS_PERCENT.search(question)",
                                     "is_meant = True"),
        "whole numbers are added to any fraction": ('if match["whole"] and value < 1', 'if match["whole"]'),
        "a part is the whole": ("return not (_BEHIND.match(behind) or _BEFORE.search(before))",
                               "return True"),
    },
    "envs/answers/final_number.py": {
        "a withdrawn answer counts": ("return None if WITHDRAWN.search(rest) else place", "return place"),
        "the first number": ("last = len(found) - 1\n", "last = 0\n"),
        "a remark behind the answer": ("and not _CONCLUDES.search(rest):", "and False:"),
        "several numbers: the last": ("found[last].whole and not several else", "found[last].whole else"),
        "several names: the last": ("if _are_several(found[:place + 1], text, marked):", "if False:"),
        "a sum is its last term": ('if "operation" not in between:', "if True:"),
        "an expression is its number": ("or marked and _is_expression(text, found):", "or False:"),
        "steps are numbers": ("return answers or found", "return found"),
        "a heading announces": ("if is_heading and re.search(", "if False and re.search("),
    },
    "envs/answers/choices.py": {
        "what is rejected is chosen": (" not in rejected\n", " not in ()\n"),
        "the last of a list": ("found = without_list(found)", "pass"),
        "one of two": ("and (not second or second.end(1) in rejected)", ""),
        "the other of two": ("return (not first or _place(first, start) in rejected)", "return True"),
        "all numbers count from 0": ("return int(has_last)", "return 0"),
        "an unclear file counts from 0": ("if has_zero == has_last:", "if has_zero and has_last:"),
        "labels are letters": ("row[\"labels\"] = known if", "row[\"labels\"] = [] if"),
        "what is taken back": ("if taken_back := WITHDRAWN.search(text, match.end()):", "if False:"),
    },
    "envs/answers/programs.py": {
        "the last block": ("last = defining[-1] if defining else", "last = -1 if defining else"),
        "blocks alone": ("if missing & defined(other, imports=True):", "if False:"),
        "a check that is not called": ('calls.append(f"check({entry_point})")', "pass"),
        "tests that are not called": ('calls.append(f"{node.name}()")', "pass"),
        "no set-up": ("setup.append(without_words(parsed(lines)))", "pass"),
        "the solution's all()": ('own |= {*dir(builtins), "__name__"}', 'own |= {"__name__"}'),
        "no prompt before it": ("[without_words(parsed(head) or", "[without_words(None and"),
    },
    "envs/code/executor.py": {
        "all may train on what can be forged": ('split == "train" and config', 'split == "all" and config'),
        "what can be forged is not marked": ('{"unjudged": 1.0} if', '{"unjudged": 0.0} if'),
    },
    "envs/rows.py": {
        "answers of any length": ("if size > check.most:", "if False:"),
        "nested as deeply as one likes": ("        check_depth(row)\n", ""),
        "what nests too deeply ends the run": ("except ROW_ERRORS as error", "except ValueError as error"),
        "SystemExit ends the run": ("except BaseException as error:", "except Exception as error:"),
        "rewards without an order": ("if not isinstance(rewards, (str, bytes, dict, set)):", "if True:"),
        "the second row of an id": ("if task.id in known:", "if False:"),
        "8.0 stays 8.0": ('text.rstrip("0").rstrip(".")', "text"),
        "NaN is an answer": ("or value != value or", "or"),
        "a value is a test": ("isinstance(found, list) and all(", "not isinstance(found, list) or all("),
        "half of the rows may be lost": ("len(part.bad) >= len(part.rows)", "len(part.bad) > len(part.rows)"),
        "a reward of None is 0": ("if reward is not None:\n",
                                  "if True:\n                    reward = reward or 0.0\n"),
        "weights of rewards are not used": ("totals[k] += weight * reward", "totals[k] += reward"),
        "a check beside rewards earns nothing": ("[total + step.reward for", "[total for"),
        "what is held out is trained on": ("if key[place] not in keys]", "if key[place]]"),
        "rows with one prompt on both sides": ('"test" if first[key[place]] in held_out',
                                               '"test" if task.id in held_out'),
        "what is partly right is right": (
            "reward is not None and reward >= 1)", "reward is not None and reward > 0)"),
        "the last reward says what is right": (
            "self.first_decides and place == 0:", "self.first_decides:"),
        "rewards of one reply for all": (
            'completions = [messages[-1]["content"] for messages in completions]',
            'completions = [completions[0][-1]["content"]] * len(steps)'),
        "one right answer of several": (
            "if isinstance(value, list) else [value]:", "[:1] if isinstance(value, list) else [value]:"),
        "the system message comes last": (
            '[{"role": "system", "content": config.system}, *messages]',
            '[*messages, {"role": "system", "content": config.system}]'),
        "what is thought is judged": ("self.check.marked(final_part(reply),", "self.check.marked(reply,"),
        "tests have the default's time": ("timeout=config.timeout)", "timeout=Config.timeout)"),
        "a reward has another one's weight": (
            "[*zip(labels, functions, weights, strict=True)]",
            "[*zip(labels, functions, weights[::-1], strict=True)]"),
        "each reply has the first one's verdict": (
            "infos = [dict(step.info) for step in steps]", "infos = [dict(steps[0].info) for _ in steps]"),
        "held out by row, not by prompt": ("zlib.crc32(key_of[name].encode())", "zlib.crc32(name.encode())"),
        "no file of the option test": ('held_out = config.test or "test"', 'held_out = "test"'),
        "a column named completions wins": (
            "columns |= dict(prompts=prompts, completions=completions,",
            "columns = columns | dict(prompts=prompts, completions=columns.get('completions', completions),"),
        "functions get the last message alone": (
            "[messages[start:] for messages", "[messages[-1:] for messages"),
        "a file's names begin where blank lines end": (
            "before += rows[-1][0] if rows else 0", "before += len(rows)"),
    },
    "envs/csv_files.py": {
        "the first delimiter that gives columns": (
            "> 1 and all(len(cells) == len(table[0]) for cells in table)", "> 1"),
        "the last of two columns": ("        if name in columns:\n", "        if False:\n"),
        "a gap is not needed": ('if "" in values and', "if"),
    },
    "envs/census.py": {
        "the first rows, not a sample": ("places[int(k * step)]", "places[k]"),
        "one form of an answer": ("for name, reply in given:", "for name, reply in given[:1]:"),
        "one answer of several": ("for answer in env.gold(task):", "for answer in env.gold(task)[:1]:"),
    },
    "envs/adapters/agent.py": {
        "any reward solves": ("float(reward >= self.config.solved_at)", "float(reward > 0)"),
        "the agent's own verdict is overruled": ('info.setdefault("correct", ', 'info.update(correct='),
        "an answer that is empty is the last reply": (
            "last_reply if answer is None else answer", "answer or last_reply"),
        "a rewritten history goes on": (
            "and len(request.history) > known and request.history[:known] == self.history)",
            "and len(request.history) > known)"),
        "other tools go on": ("self.request is None and request.tools == self.tools\n",
                              "self.request is None\n"),
        "an ended conversation goes on": ("return (self.live and self.request is None",
                                          "return (self.request is None"),
        "all is read again": ("new = request.messages[len(self.history):]", "new = request.messages[1:]"),
        "calls are not in the history": ('said["tool_calls"] = [{"function": call} for call in calls]',
                                         "pass"),
        "the first conversation alone": ('if self.num_branches and self.env.config.train == "all":',
                                         "if False:"),
        "all conversations whatever is told": ('if self.num_branches and self.env.config.train == "all":',
                                               "if self.num_branches:"),
        "an agent that fails is worth nothing": ("if self.failure and not self.cut:", "if False:"),
        "what was cut off has ended": ("step.terminated, step.truncated = not self.cut, bool(self.cut)",
                                       "step.terminated, step.truncated = True, False"),
        "who fails behind a limit is played again": ("if self.failure and not self.cut:",
                                                     "if self.failure:"),
        "a key outlives its episode": ("        self.env.endpoint.sessions.pop(self.key, None)\n", ""),
        "no request is counted": ("            self.num_requests += 1\n", ""),
        "any number waits": ("if len(self.waiting) >= MAX_WAITING:", "if False:"),
        "one conversation at a time": (
            "self.branches = [Conversation(request) for request in self.waiting]\n"
            "        self.waiting = []", "self.branches = [Conversation(self.waiting.pop(0))]"),
        "branches wait for ever": ("LATE):\n                break", "9e9):\n                break"),
        "a branch is never over": (
            "if not any(other.is_extended_by(request) for other in others):", "if False:"),
        "exit codes are of no consequence": ("            if code:\n", "            if False:\n"),
        "the first line is the reward": ("return lines[-1].strip()", "return lines[0].strip()"),
        "a command outlives its episode": ("            self.cancel = lambda: kill(process.pid)\n", ""),
        "a cut reply ends as others do": ('conversation.answer("", None, "length")',
                                          'conversation.answer("", None)'),
    },
    "envs/adapters/endpoint.py": {
        "several replies are promised": ('"n": (None, 1), ', ""),
        "images are left out": (
            '        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):\n',
            "        if kind not in TEXT_PARTS:\n            continue\n        if False:\n"),
        "answers of tools as they come": ("        if is_tool:\n", "        if False:\n"),
        "any key will do": ('if scheme.lower() == "bearer" else None',
                            'or [*self.endpoint.sessions.values(), None][0]'),
        "spaces tell messages apart": ('" ".join(message["content"].split())', 'message["content"]'),
        "arguments in another order are others": (
            'json.dumps(call["function"]["arguments"], sort_keys=True)',
            'json.dumps(call["function"]["arguments"])'),
        "no developer": ('"developer": "system"', '"developer": "developer"'),
        "calls are no reason to end": ('"delta": {}, "finish_reason": finish_reason}',
                                       '"delta": {}, "finish_reason": "stop"}'),
        "calls of a stream are one": ('{"index": index} | call', '{"index": 0} | call'),
        "temperature is not named": ('SAMPLING = ("temperature", ', 'SAMPLING = ('),
    },
    "envs/adapters/trl.py": {
        "a turn too many": ("self.turns < self.env.config.max_turns",
                            "self.turns <= self.env.config.max_turns"),
        "what is cut off has ended": ("step.reward, not truncated, truncated, info",
                                      "step.reward, True, False, info"),
        "the check's reward is lost": ('step.reward += info["get_reward"]',
                                       'step.reward = info["get_reward"]'),
        "any reward solves": ("float(reward >= self.env.config.solved_at)", "float(reward > 0)"),
        "all rows begin alike": ("with seeded(task.id),", "with seeded(self.config.file),"),
        "errors of calls are not counted": ("            self.failed += 1\n", ""),
        "solved_at is 1": ("float(reward >= self.env.config.solved_at)", "float(reward >= 1)"),
        "one seed for all rows": ("with seeded(task.id),", "with seeded(''),"),
    },
    "envs/logic/__init__.py": {
        "types 4 and 5 are alike": ("    if number == 5:", "    if False:"),
    },
    "envs/logic/sudoku.py": {
        "givens may change": ('given in (".", digit)', "True"),
        "boxes may repeat a digit": ("for unit in UNITS)", "for unit in UNITS[:18])"),
    },
    "envs/logic/game_of_24.py": {
        "numbers are used twice": (
            'sorted(numbers) == sorted(data["numbers"])', 'set(numbers) == set(data["numbers"])'),
        "any operator will do": (' and used <= set(data["operators"])', ""),
    },
    "envs/logic/cryptarithm.py": {
        "a letter is two digits": (
            "len(matched) == len(letters) == len(digits)", "len(matched) == len(digits)"),
        "two letters are one digit": (
            "len(matched) == len(letters) == len(digits)", "len(matched) == len(letters)"),
    },
    "envs/openspiel/__init__.py": {
        "ties are won": ("returns[player] > max(others)", "returns[player] >= max(others)"),
    },
    "envs/arcagi3/__init__.py": {
        "a click on a block's corner": (
            "value * self.scale + self.scale // 2) for", "value * self.scale) for"),
        "one action more": ("self.turns >= self.config.max_actions", "self.turns > self.config.max_actions"),
    },
    "envs/code/repl.py": {
        "a failing test is expected in vain": (
            "results.get(name) == outcome}", 'results.get(name) in (outcome, "PASSED")}'),
        "the same files earn": ("if left == original:", "if False:"),
        "a call with other arguments is done": ("given.keys() != {*needed}", "not given.keys() >= {*needed}"),
        "each call has the time of a block": (
            '(arguments["code"], self.left)', '(arguments["code"], self.config.turn_timeout)'),
    },
    "envs/code/swe.py": {
        "no reward without PASS_TO_PASS": ('kept = kept if row["PASS_TO_PASS"] else 1.0', "pass"),
        "paths that lead elsewhere": ('part in ("", ".", "..")', 'part in ("", ".")'),
        "skipped is passed": ('kinds & {"failure", "skipped"}', 'kinds & {"failure"}'),
        "links are text": ("and mode[1] not in PLAIN_MODES", "and False"),
    },
    "envs/code/testing.py": {
        "values are not compared": ('            found[name] = "FAILED"\n', ""),
        "what the solution compares is lost": ("keep = _cached(solved,", "_cached(solved,"),
        "the tree decides over tests": ("if not decides(path)}", "}"),
        "a test that was not called": ('"PASSED" if "call" in phases else "FAILED"', '"PASSED"'),
    },
    "envs/code/expectations.py": {
        "marks that expect failures": (' or "xfail" in mark', ""),
        "a check that is left out": ("missing = needed - ", "missing = needed - needed - "),
        "a check of another number": ("number not in self.checks", "False and number not in self.checks"),
        "any row will do": ("if not 0 <= (row or 0) < len(self.wanted):", "if False:"),
        "values that the test shows": ("bits = BITS_OF_A_PLACE", "pass"),
        "examples of the task": ("squeezed(self.text) in shown or", "False or"),
        "the hardest check": ("min(each[name], key=", "max(each[name], key="),
        "equal values count each time": ("sum(dict(found).values())", "sum(bits for _, bits in found)"),
        "what follows a return is certain": ("                certain_here = False\n", ""),
        "what is caught is certain": ("ast.Try) and not node.handlers", "ast.Try)"),
        "the first column of a table": ("row.elts[at] = ast.", "row.elts[0] = ast."),
        "lists are tuples": ('"list": lambda items: [rebuilt(item) for item in items],',
                             '"list": lambda items: tuple(rebuilt(item) for item in items),'),
        "exceptions by any name": ("return not {*names}.isdisjoint(classes) and", "return bool(classes) and"),
        "helpers that check": ("self.helpers - self.own", "set()"),
    },
    "envs/pixels/__init__.py": {
        "a resume forgets how far episodes are": ('self.so_far.copy_(state["so_far"].T)', "pass"),
        "rows of seed 1 are those of seed 2": (
            "[derive_seed(seed, split, start, row) for row in rows]",
            "[derive_seed(seed + row, split, start) for row in rows]"),
        "training and evaluation are alike": ("*use.encode(), *numbers", "*numbers"),
        "an episode's return goes on": ('self.so_far.masked_fill_(info["reset_mask"], 0)', "pass"),
        "returns are of clipped rewards": ('info.get("score", rewards)', "rewards"),
        "every process goes on with the first rows": (
            "state_of_rows(state, range(self.others[0], self.others[0] + self.num_envs))",
            "state_of_rows(state, range(self.num_envs))"),
    },
    "envs/pixels/goals.py": {
        "farther is better": ("(previous_dist - dist)", "(dist - previous_dist)"),
        "distances wrap": ("torch.maximum(frames, goal) - torch.minimum(frames, goal)", "frames - goal"),
    },
    "envs/pixels/pixel_goal.py": {
        "the door opens from anywhere": ("ahead(facing)[2] == DOOR", "ahead(facing)[2] >= 0"),
    },
    "envs/pixels/gymnasium.py": {
        "0 does not stay 0": ("bounded & ~signed", "bounded"),
        "a bound for all elements": ("span = np.where(bounded & (span > 0), span, 1)", "span = span.max()"),
        "a last observation may be anything": (
            "                self._check_observation(obs)\n                final", "                final"),
        "ends and limits exchanged": ("terminated.append(ended)", "terminated.append(cut)"),
    },
    "envs/pixels/atari.py": {
        "the score is clipped": ("reward = score.clamp(-1, 1)", "reward = score.clamp_(-1, 1)"),
        "a lost life ends the game": (
            '{"reset_mask": terminated | truncated, ', '{"reset_mask": terminated | truncated | lost, '),
        "the next game's picture": ("final = obs[ended]", "final = obs[ended] * 0"),
        "the same game again": ("self._seeds[row] = derive_seed(", "_ = derive_seed("),
        "all rows are replayed from the start": (
            "actions[len(actions) - lengths[row]:, row]", "actions[:lengths[row], row]"),
    },
    "tools/validate_train_log.py": {
        "counters may go back": ("            if value < before:", "            if False:"),
        "NaN is a number": (
            "math.isfinite(value) if isinstance(value, float)", "True if isinstance(value, float)"),
    },
    "tools/compare_runs.py": {
        "the largest loss is the best": ('value < best if key == "val/loss" else',
                                         'value > best if key == "val/loss" else'),
        "the last record is the longest run": ('max((record["iteration"] for',
                                               'min((record["iteration"] for'),
        "the iteration of the last": ('best, at = value, record["iteration"]', "best = value"),
        "folders are flags": ("if name not in but and any(", "if any("),
        "runs of one name": ("if len(set(names)) < len(names):", "if False:"),
        "equal figures are best": ("len(set(numbers)) < 2", "len(numbers) < 2"),
        "the CSV is rounded": (
            '("" if value is None else value for value in values)', "(shown(value) for value in values)"),
        "equal or not": (
            "return min(golden.compare(args.golden, args.run[0] if args.run else None), 1)",
            "golden.compare(args.golden, args.run[0] if args.run else None)"),
        "flags of the first run alone": (
            'for name in dict.fromkeys(name for meta in metas for name in meta["args"])',
            'for name in metas[0]["args"]'),
    },
    "tools/check_rows.py": {
        "the last file alone": ("fine &= all_fine", "fine = all_fine"),
    },
    "tools/view_episodes.py": {
        "tokens of the last segment": ('segments[turn["segment"]], slice', "segments[-1], slice"),
    },
    "tools/diagnose.py": {
        "a dip is a symptom": ("len(once) > LASTING and min(once[-LASTING:]) > once[0]", "len(once) > 1"),
        "the start is the end": ("statistics.fmean(values[-size:])", "statistics.fmean(values[:size])"),
        "the entropy of a solved task": ("right is None or right > SOLVED", "right is None"),
        "the critic's steps are the policy's": ('r.get("train/policy_steps") != 0]', "True]"),
        "a record of just now": ("if silent < limit or not", "if not"),
        "the outermost function": ("for name in reversed(called):", "for name in called:"),
        "the oldest episodes": ("reversed(runs.episode_files(run.folder))", "runs.episode_files(run.folder)"),
        "text reaches the terminal": ("c if c.isprintable() else", "c if c else"),
        "rewards that are once the same": ("sum(same) >= SHARE_SAME * len(same)", "any(same)"),
        "an evaluation that says nothing": ("best[source][0] - once[source][0] > SAME", "False"),
        "the exit status": ("return int(bool(found))\n    count", "return 0\n    count"),
        "an adapter that goes on": (
            'bool(run.args.get("lora_rank") or run.args.get("lora_adapter_path"))',
            'bool(run.args.get("lora_rank"))'),
        "the last difference": (
            'key=lambda record: record["iteration"]):\n        twin',
            'key=lambda record: -record["iteration"]):\n        twin'),
        "right at first": ("        return correct[1]\n", "        return correct[0]\n"),
        "far and clipped": (
            "(step > STEP_KL or clipped > CLIPPED)", "(step > STEP_KL and clipped > CLIPPED)"),
        "a run that has ended hangs": ("if run.planned and run.last_iteration >= run.planned:", "if False:"),
        "all of it has to be lost": ("best - end < FALLEN * (best - floor)", "best - end < best - floor"),
        "one share varies": ("math.sqrt(2 * max(share", "math.sqrt(max(share"),
        "float32 is bfloat16": (
            'MISMATCH.get(run.args.get("dtype"), MISMATCH["bfloat16"])', 'MISMATCH["bfloat16"]'),
        "rewards below 0 cannot fall": (
            'floor = min(run.values("critic/score/min") or rewards)', "floor = 0.0"),
        "a slow run hangs": ("max(SILENT, TIMES_LONGER *", "min(SILENT, TIMES_LONGER *"),
        "one idle iteration is the end": ("all(same[-IDLE:])", "any(same[-IDLE:])"),
    },
    "tools/runs.py": {
        "a line that is half written": ('if not line.endswith(b"\\n"):', "if False:"),
        "seeds are experiments": ('OF_THE_FOLDER | {"seed"}', "OF_THE_FOLDER"),
        "another version of the script is another experiment": (' and name != "script_sha256"', ""),
        "the newest checkpoint by its letters": ("key=lambda path: int(path.name[5:])", "key=str"),
    },
    "tools/merge_adapter.py": {
        "files are not flushed": ('for path in (*temporary.rglob("*"), temporary)', "for path in ()"),
        "one type for all": ("chosen or types.get(name) or common", "chosen or common"),
        "what differs is merged": ("elif not difference <= min", "elif difference < -min"),
    },
    "envs/adapters/__init__.py": {
        "what is held out is trained on": ("index + index // (TEST_SHARE - 1) + 1", "index"),
        "Python's generator is not put back": ("            random.setstate(state)\n", "            pass\n"),
        "NumPy's generator is not put back": (
            "            np.random.set_bit_generator(generator)\n", "            pass\n"),
        "a prompt twice": (
            "self.listed.setdefault(json.dumps(messages), given)",
            "self.listed[json.dumps([*messages, len(self.listed)])] = given"),
        "train tasks are one off": ("index // (TEST_SHARE - 1) + 1", "index // TEST_SHARE + 1"),
        "every task scores by the first": (
            'given = self.listed[self.prompts[task.data["place"]]]', "given = self.listed[self.prompts[0]]"),
    },
    "envs/adapters/seats.py": {
        "one seat for ever": ('"seat": turn % self.seats[game]', '"seat": 0'),
        "held-out seeds are trained": ('"seed": 2 * index + (split == "test")', '"seed": index'),
        "a draw is won": ("earned[0] > 0 and earned[0] == max(earned)", "earned[0] == max(earned)"),
        "rewards of the first seat": ("rewards.get((self.own + k) % self.seats, 0.0)", "rewards.get(k, 0.0)"),
        "a child's seat is the game's": ("seat=(seat - self.own) % self.seats)", "seat=seat)"),
        "who fails wins": ("-1.0 if other == seat else 1.0", "1.0 if other == seat else -1.0"),
        "others' invalid moves count": ("seat == self.own and not valid", "not valid"),
        "any limit loses": ('if reason == "length" else {}', "if reason else {}"),
        "its own words are forgotten": (
            '        self.talk[seat].append({"role": "assistant", "content": reply})\n', ""),
    },
    "envs/adapters/textarena.py": {
        "told its own words": (
            "for sender, text, _ in new if sender != seat)", "for sender, text, _ in new)"),
        "a random seat moves while it tries": (
            "self.move(seat, move, copy.deepcopy(self.game))", "self.move(seat, move)"),
        "every game starts alike": ('seeded(f"{self.key} reset")', 'seeded("reset")'),
    },
    "envs/adapters/openenv.py": {
        "what is held out is trained on": ('index if split == "test" else TEST_SEEDS + index', "index"),
        "one seed overlaps": ("else TEST_SEEDS + index}", "else TEST_SEEDS - 1 + index}"),
    },
    "docs/rewards/concise.py": {
        "as much where few are right": (" * len(right) / len(rollouts)", ""),
        "wrong ones pay, too": ("        if r.correct:\n", "        if right:\n"),
    },
    "docs/rewards/gdpo.py": {
        "parts are not normalised": (" / (values.std() + 1e-6)", ""),
        "one weight for all": ("weight * normalised", "normalised"),
        "a part that is not told": ("if known and part not in known:", "if False:"),
    },
    "docs/rewards/judge.py": {
        "each reply is judged": ("sorted(set(attempts), key", "sorted(attempts, key"),
        "the order of sampling": (
            "key=lambda text: hashlib.sha256(text.encode()).digest()", "key=attempts.index"),
        "without a verdict all lose": ('            r.termination = "error"\n', "            pass\n"),
        "the cache is not kept": ('self.cache.open("a")', 'open(os.devnull, "w")'),
        "failures long ago count": ("        self.failures = 0\n        return", "        return"),
        "the key in an error": ('text.replace(self.key, "...") if self.key else text', "text"),
        "the URL in an error": ('f"{type(error).__name__} at', 'f"{error} at'),
        "a second try is none": ("TRIES = 3", "TRIES = 1"),
        "a score too many": ("if len(found) != count or set", "if set"),
        "a text is a score": (
            "type(score) not in (int, float) or not 0 <= score <= 1", "not 0 <= float(score) <= 1"),
        "any number is a score": (" or not 0 <= score <= 1:", ":"),
    },
    "docs/variants/ppo_vecenv.diff": {
        "the larger surrogate": ("-torch.min(ratio", "-torch.max(ratio"),
        "only large ratios are clipped": ("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(None, 1 + clip)"),
        "the smaller error of the value": ("value_loss.maximum(", "value_loss.minimum("),
        "values near the returns": ("near = old_values + (", "near = returns + ("),
        "normalised over the rollout": ("all_rows(advantages, env)[mb]", "all_rows(advantages, env)"),
        "drawn with replacement": (
            "torch.randperm(args.num_envs * args.num_steps,",
            "torch.randint(args.num_steps * args.num_envs, (args.num_steps * args.num_envs,),"),
        "observations are overwritten": ("seen = obs.clone()", "seen = obs"),
        "the ratio is 1": ('- batch["logprobs"][mine]', '- policy.log_prob(batch["actions"][mine]).detach()'),
        "not the minibatch's mean": ("(loss.sum() / mb.sum())", "(loss.sum() / args.num_envs)"),
        "entropy bonus does not decay": ("args.entropy_coef * frac * policy", "args.entropy_coef * policy"),
        "optimiser steps of one epoch": ("opt_steps=iteration * args.epochs *", "opt_steps=iteration *"),
        "the first minibatch is left out": ("== number  #", "== number + 1  #"),
        "a minibatch of one transition": ("< 2 * self.minibatches", "< self.minibatches"),
    },
    "docs/variants/teachers.diff": {
        "the shortest name wins": ("max(fitting, key=len)", "min(fitting, key=len)"),
        "teachers are swapped": ("segment.teacher == name]", "segment.teacher != name]"),
        "a denominator for each pass": (
            "pass_loss(model, teacher, batch, num_tokens,",
            'pass_loss(model, teacher, batch, int(batch["response_mask"].sum()),'),
        "a name is a whole source": ('f"{source}/".startswith(f"{name}/")', "source == name"),
        "two teachers for one source": ("< len(args.teacher):", "< len(args.teachers):"),
    },
    "docs/variants/turns.diff": {
        "later rewards count in full": ("args.turn_discount * earned", "earned"),
        "turns are compared by their number": ("same_state[envs.to_json(messages)]", "same_state[turn]"),
        "later rewards count for nothing": (" + args.turn_discount * earned", ""),
        "a --reward-fn is not heard": ("rewards[-1] += r.reward - sum(rewards)", "rewards[-1] += 0.0"),
        "the episode's advantage in full": ("[args.episode_coef * advantage]", "[advantage]"),
        "the turn's advantage in full": ("+= args.turn_coef * advantage", "+= advantage"),
        "the turn's advantage on its first token": ("in range(start, end):  # eq. 8", "in [start]:  # eq. 8"),
        "the turn's advantage in the last segment": ("r.segments[place].adv", "r.segments[-1].adv"),
    },
    "docs/reading/grpo.py": {
        "sample deviation": ("rewards.std(1, keepdim=True, correction=0)", "rewards.std(1, keepdim=True)"),
        "entropy is punished": ("- args.entropy_coef * entropy", "+ args.entropy_coef * entropy"),
        "a mean of means": (
            "(loss / num_tokens).backward()", '(loss / part["response_mask"].sum()).backward()'),
        "groups that all differ": (
            "(rewards != rewards[:, :1]).any(1)", "(rewards != rewards[:, :1])[:, 1:].all(1)"),
        "all tasks draw the same": ("{split} {task_number} {number} 0 0", "{split} {number} 0 0"),
        "the reference learns": ("reference = copy.deepcopy(model) if", "reference = model if"),
        "KL of the other direction": ("kl = k3(ref_logprobs - logprobs)", "kl = k3(logprobs - ref_logprobs)"),
    },
    "docs/reading/exercises/length_normalise.diff": {
        "all tokens are one reply": ("mask.sum(1, keepdim=True)", "mask.sum()"),
    },
    "docs/reading/ppo.py": {
        "GAE: no lambda": ("+ gamma * lam * trace", "+ gamma * trace"),
        "returns are advantages": ('batch["returns"] = advantages + values', 'batch["returns"] = advantages'),
        "the reward comes first": ("rewards.scatter_(1, last,", "rewards.scatter_(1, 0 * last,"),
        "the policy begins too early": (
            "if iteration > args.critic_warmup:", "if iteration >= args.critic_warmup:"),
        "the smaller error": ("torch.maximum((values - returns)", "torch.minimum((values - returns)"),
        "advantages of what is masked": (
            'batch["advantages"] = whiten(advantages, mask)',
            'batch["advantages"] = whiten(advantages, torch.ones_like(mask))'),
        "padding is whitened": ("chosen = x[mask > 0]", "chosen = x"),
    },
    "tools/report_run.py": {
        "the last figure is the first": ("-> {values[-1]:.3f}", "-> {values[0]:.3f}"),
        "a best checkpoint is passed over": ("evaluation(meta, best or newest)", "evaluation(meta, newest)"),
        "an evaluation into the run's folder": ("if flag not in NOT_OF_EVALUATION:", "if True:"),
        "a picture of one iteration": ('if record["iteration"]}) > 1', 'if record["iteration"]}) > 0'),
        "an adapter is a model": ('if args.get("lora_rank") or args.get("lora_adapter_path"):', "if False:"),
        "folders with spaces": ("return shlex.quote(min(", "return str(min("),
    },
    "tools/track_run.py": {
        "only the first pattern": ("for pattern in patterns:", "for pattern in patterns[:1]:"),
        "full width is not read": ('"NFKC" if marks else "NFKD"', '"NFC" if marks else "NFD"'),
        "accents are letters": ('and (marks or kind[0] != "M")', ""),
        "names are not redacted": (
            "{safe(name, patterns): safe(item, patterns)", "{name: safe(item, patterns)"),
        "the prompt has the reply": (
            "prompt, response = spoken(messages[:start], patterns)",
            "prompt, response = spoken(messages[:start + 1], patterns)"),
        "partly right is right": (
            "None if correct is None else correct == 1", "None if correct is None else correct > 0"),
        "records are sent twice": (
            'if record["iteration"] > after and', 'if record["iteration"] >= after and'),
        "the host is told": ("wandb.Settings(**PRIVATE) if args.redact else None", "None"),
        "seeds are no group": (
            "group = f\"{meta['algo']}-{meta['experiment_hash']}\"",
            "group = f\"{meta['algo']}-{meta['run_id']}\""),
        "a checkpoint again and again": ("        if name == sent:\n            return sent\n", ""),
        "the last checkpoint is the best": (".get(args.artifacts, sent)", '.get("last", sent)'),
    },
    "envs/adapters/openenv_client.py": {
        "the last reward solves": ("self.total += result.reward", "self.total = result.reward"),
        "partly correct is solved": ("solved = result.correct >= 1", "solved = result.correct > 0"),
        "the first observation is not compared": (
            "if self.turns == 1 and [self.begin()] != self.task.messages:",
            "if self.turns == 1 and not self.begin():"),
    },
    "envs/adapters/reasoning_gym.py": {
        "held-out questions are trained": (
            '% TEST_SHARE == 0) == (split == "test"):', '% TEST_SHARE == 0) >= (split == "test"):'),
        "partly right is correct": ('float(info["score"] == 1)', 'float(info["score"] > 0)'),
        "chunks overlap but for one": ("seed=1 + number * CHUNK", "seed=1 + number"),
        "a split draws a task's question again": ("number + draw * self.num_tasks(split)", "number + draw"),
    },
    "envs/adapters/verifiers.py": {
        "the sum says what is correct": (
            "(scores.get(self.config.correct, 0.0) if self.config.correct else reward)", "reward"),
    },
}


SANDBOXED = ("envs/code/repl.py", "envs/code/testing.py", "envs/answers/programs.py")  # their tests are slow


def pytest_arguments(file):
    """pytest's arguments for a file: the entry of TESTS that names it most closely."""
    names, chosen = TESTS[max((place for place in TESTS if file.startswith(place)), key=len)]
    slow = ["-m", ""] if file in SANDBOXED else []
    return [*(f"tests/test_{name}.py" for name in names.split()), "-k", chosen, *slow]


NAMED = ROOT / "tests" / "mutants.csv"  # of each mutant the test that killed it last
TRACE = ROOT / "runs" / "mutants" / "trace.json"
SECONDS = 120  # that --changed may take
# Their diffs quote lines of the scripts, so that any change fails them: it is not seen to be wrong.
QUOTING = tuple(f"tests/test_{name}.py" for name in ("benchmarks", "commands", "docs", "overlap", "variants"))


def read_csv(path):
    """{(file, mutant): [tests]}"""
    found = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault((row["file"], row["mutant"]), []).append(row["test"])
    return found


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("file", "mutant", "test"), *rows])


def read_trace(jobs, make=False):
    """Which tests execute which lines; nothing where nobody has traced it."""
    if make and not TRACE.is_file():
        print("tracing which tests execute which lines: some minutes", flush=True)
        TRACE.parent.mkdir(parents=True, exist_ok=True)
        TRACE.write_text(json.dumps(mutate.trace(jobs)))
    return json.loads(TRACE.read_text()) if TRACE.is_file() else dict(files={}, seconds={}, failed=[])


def options_of(mutant, traced, named, stop=True):
    """The tests that a mutant meets: those that execute its lines, and new ones; else those of TESTS."""
    tests = mutate.tests_of(mutant, traced)
    first = named.get(mutant.key, [])
    if not tests or mutant.file in SANDBOXED:  # slow ones are not traced
        return dict(arguments=pytest_arguments(mutant.file), first=first, stop=stop)
    if "/" not in mutant.file:
        tests = {test for test in tests if not test.startswith(QUOTING)}
    seconds = collections.Counter()  # of each file with such tests
    for test in tests:
        seconds[test.partition("::")[0]] += traced["seconds"][test]
    known = {test.partition("::")[0] for test in traced["seconds"]}
    for path in pytest_arguments(mutant.file):
        if path.endswith(".py") and path not in known:
            seconds[path] = 1.0
    for test in first:
        seconds[test.partition("::")[0]] = -1.0
    without = traced["seconds"].keys() - tests - {*first}
    return dict(arguments=sorted(seconds, key=seconds.get), without=without, first=first, stop=stop)


def try_all(mutants, args, seconds=math.inf):
    """Say of each mutant which test failed.  -> those that survive, those for which there was no time"""
    traced, named = read_trace(args.jobs), read_csv(NAMED)
    survived, left, killers = [], {mutant.key: mutant for mutant in mutants}, set()
    tasks = [(mutant, options_of(mutant, traced, named)) for mutant in mutants]
    for mutant, failed, took in mutate.tried(tasks, args.jobs, seconds):
        if failed and failed[0].startswith("out of time") and took < mutate.LIMIT - 1:
            continue
        left.pop(mutant.key)
        survived += [mutant] * (not failed)
        named[mutant.key] = failed or named.get(mutant.key, [])
        says = f"killed by {failed[0].removeprefix('tests/')}" if failed else "SURVIVED"
        print(f"{mutant.file:28} {mutant.name:45} {took:5.0f} s  {says}", flush=True)
        killers |= {*failed}
    check_killers(killers)
    known = {(file, name) for file in MUTANTS for name in MUTANTS[file]}
    write_csv(NAMED, sorted((*key, tests[0]) for key, tests in named.items() if tests and key in known))
    return survived, [*left.values()]


def check_killers(killers):
    """Say which of the tests that failed fail without any mutant, too."""
    killers = {test for test in killers if "::" in test}
    if killers:
        file = "tests/mutants.py"  # any that stays as it is
        unchanged = mutate.Mutant(file, "as it is", (ROOT / file).read_text("utf-8"), range(0))
        (_, failed, _), = mutate.tried([(unchanged, dict(arguments=sorted(killers), stop=False))], 1)
        for test in failed:
            print(f"{test} fails as it is: whether it sees a mutant is not known")


def try_changed(args):
    """The mutants of lines that were changed, and some that are made of these lines."""
    lines = mutate.changed_lines(args.changed)
    lines = {file: numbers for file, numbers in lines.items() if any(map(file.startswith, TESTS))}
    kept = [mutant for mutant in mutate.kept_mutants(MUTANTS)
            if lines.get(mutant.file, set()).intersection(mutant.lines)]
    made = [mutant for file, numbers in lines.items() for mutant in mutate.made_mutants(file, numbers)]
    random.Random(1).shuffle(made)  # where there is no time for all, some of each file
    if args.list:
        return print("\n".join(f"{mutant.file:28} {mutant.name}" for mutant in kept + made))
    named = read_csv(NAMED)
    kept.sort(key=lambda mutant: mutant.key not in named)
    print(f"{len(kept)} mutants of changed lines, and {len(made)} that are made of them", flush=True)
    survived, left = try_all(kept + made, args, SECONDS)
    for what, mutants in (("no time was left for", left), ("nothing fails with", survived)):
        for mutant in sorted(mutants, key=lambda mutant: (mutant.file, mutant.lines.start)):
            print(f"{what} {mutant.file}:{mutant.lines.start}, {mutant.name}")
    return min(len(survived), 100)


def write_matrix(mutants, args):
    """All tests that fail, of each mutant; goes on with a file that is there."""
    path, traced = args.matrix, read_trace(args.jobs, make=True)
    known = read_csv(path)
    tasks = [(mutant, options_of(mutant, traced, {}, stop=False))
             for mutant in mutants if mutant.key not in known]
    if not known:
        write_csv(path, [])
    began = time.monotonic()
    for done, (mutant, failed, took) in enumerate(mutate.tried(tasks, args.jobs), 1):
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = [(*mutant.key, test.removeprefix("tests/")) for test in failed or [""]]
            csv.writer(file, lineterminator="\n").writerows(rows)
        left = (time.monotonic() - began) / done * (len(tasks) - done)
        print(f"{done}/{len(tasks)} {mutant.file:28} {mutant.name:45} {took:5.0f} s  {len(failed)} fail; "
              f"{left / 60:.0f} min left", flush=True)
    summary(read_csv(path), traced)


def summary(matrix, traced):
    """What each test is worth: CPU seconds, mutants that it kills, those that no other test kills."""
    kills, alone = collections.Counter(), collections.Counter()
    for tests in matrix.values():
        kills.update(tests)
        if len(tests) == 1:
            alone.update(tests)
    seconds = {test.removeprefix("tests/"): taken for test, taken in traced["seconds"].items()}
    print("CPU seconds, mutants killed, killed by it alone")
    for test in sorted(seconds, key=seconds.get, reverse=True):
        print(f"{seconds[test]:8.2f} {kills[test]:4} {alone[test]:4}  {test}")
    idle = [test for test in seconds if not alone[test]]
    print(f"{len(idle)} of {len(seconds)} tests kill none alone: {sum(map(seconds.get, idle)):.0f} of "
          f"{sum(seconds.values()):.0f} CPU seconds; {alone['']} of {len(matrix)} mutants survive")


def prepare():
    # Two versions of a file may have one time and one size, so no bytecode is kept.
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    multiprocessing.set_start_method("fork")  # what takes long to import is imported once
    for name in ("torch.distributed.fsdp", "torch.utils.tensorboard", "transformers", "peft", "datasets"):
        importlib.import_module(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="files or names, with * and ?")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time (cores)")
    parser.add_argument("--changed", nargs="?", const="HEAD~1", metavar="REV",
                        help="in two minutes: mutants of the lines that were changed since then (HEAD~1)")
    parser.add_argument("--trace", action="store_true",
                        help="find out, again, which tests execute which lines: some minutes")
    parser.add_argument("--matrix", type=Path, metavar="FILE.csv",
                        help="write all tests that fail, of each mutant")
    args = parser.parse_args()
    if not args.list:
        prepare()
    if args.trace:
        TRACE.unlink(missing_ok=True)
        read_trace(args.jobs, make=True)
        if not (args.changed or args.matrix):
            return 0
    if args.changed:
        return try_changed(args)
    mutants = [mutant for mutant in mutate.kept_mutants(MUTANTS)
               if any(fnmatch.fnmatch(word, pattern) for pattern in args.patterns for word in mutant.key)]
    if args.list:
        return print("\n".join(f"{mutant.file:28} {mutant.name}" for mutant in mutants))
    if args.matrix:
        return write_matrix(mutants, args)
    survived, _ = try_all(mutants, args)
    print(f"{len(mutants) - len(survived)} of {len(mutants)} killed")
    return min(len(survived), 100)


if __name__ == "__main__":
    sys.exit(main())
