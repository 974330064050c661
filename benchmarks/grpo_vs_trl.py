"""grpo_llm.py against TRL's GRPOTrainer: the same work, side by side, in CPU seconds on one thread.

    sh benchmarks/make_trl_env.sh                        # once: .venv-trl, where TRL lives
    python benchmarks/grpo_vs_trl.py step                # one iteration of identical work, two sizes
    python benchmarks/grpo_vs_trl.py real                # `step` of SmolLM2-135M, all weights and LoRA
    python benchmarks/grpo_vs_trl.py run                 # the whole default run, 500 iterations a side
    python benchmarks/grpo_vs_trl.py run --iterations 100 --repeats 3 --out benchmarks/results/run.csv

Each side is a process of its own on the same core: ours runs grpo_llm.main itself, TRL's runs
GRPOTrainer.train. They take turns, a block of iterations each, so that a machine that slows down slows all
of them; while one works, the others wait for input. Counted is the process's CPU time in these blocks
(imports, set-up, evaluation and checkpoints are not), in three parts:

    rollout   drawing tasks, sampling, rewards, advantages        TRL: _generate_and_score_completions
    update    forward, backward, optimiser, metrics of the loss   TRL: the rest of the training step
    other     ours: the log of each iteration (JSON lines and TensorBoard). TRL: data loader, callbacks; its
              logging is switched off

`step` forces every response to the same length (no token ends one) and gives each group a signal (rewards 0
1 0 1 ...), so both sides sample and train on the same number of tokens. `run` is the default recipe: the
same checkpoint, problems in the same order, rewards and hyperparameters. TRL trains on groups without
signal too; the side `trl-drop` is TRL with these dropped before the loss, as ours does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time

from sides import REPOSITORY, Gate, Worker, append_csv, check_environment, check_smollm2, in_turn

SIZES = "32x16x9,16x8x64"  # of `step`: prompts x responses to each x tokens of each
REAL_SIZES = "4x4x64,4x4x64-lora"  # of `real`; -lora trains an adapter
LORA_RANK = 16
RUN_TOKENS = 9  # longest reply in `run`: two steps and eos
FIELDS = ("started_at", "mode", "size", "seed", "side", "block", "iterations", "rollout", "update", "other",
          "total", "tokens", "reward", "greedy")
EVAL_TASKS = 512


def our_args(job, **more):
    """The flags of grpo_llm.py for this job: its defaults, but for what is named here."""
    import grpo_llm
    size = dict(zip(("prompts_per_iteration", "group_size", "max_response_tokens"), job["size"], strict=True))
    unmeasured = dict(eval_every=0, eval_samples=1, checkpoint_every=10**9, log_episodes=0.0)
    if job["mode"] == "real":
        more |= dict(learning_rate=1e-6, entropy_coef=0.0, lora_rank=job["lora_rank"])
    return grpo_llm.Args(model=str(REPOSITORY / job["model"]), seed=job["seed"], iterations=job["iterations"],
                         **size, **unmeasured, **more)


def trl_config(flags, **more):
    """The flags of grpo_llm.py in TRL's names; those without one must have the value that TRL's way means."""
    from trl import GRPOConfig
    same = dict(loss="clip", aggregation="token", baseline="mean", scale_rewards=False, advantage_balance=0.0,
                epochs=1, minibatches=1, kl_coef=0.0, dynamic_sampling=0, mask_truncated=False,
                dtype="float32", lora_target_modules="all-linear", lora_adapter_path="",
                gradient_checkpointing=False)
    for name, value in same.items():
        if flags[name] != value:
            sys.exit(f"error: grpo_llm.py's {name} is {flags[name]}, and this comparison is for {value}")
    rate = flags["learning_rate"]
    return GRPOConfig(
        max_steps=flags["iterations"], seed=flags["seed"], shuffle_dataset=False,
        per_device_train_batch_size=flags["prompts_per_iteration"] * flags["group_size"],
        num_generations=flags["group_size"], max_completion_length=flags["max_response_tokens"],
        temperature=flags["temperature"], top_k=0, scale_rewards="none", loss_type="dapo", beta=0.0,
        epsilon=flags["clip_low"], epsilon_high=flags["clip_high"], entropy_coef=flags["entropy_coef"],
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=flags["beta2"], learning_rate=rate,
        weight_decay=0.0, max_grad_norm=flags["max_grad_norm"],
        warmup_steps=flags["warmup_iterations"], lr_scheduler_type="polynomial",
        lr_scheduler_kwargs=dict(lr_end=rate * flags["final_learning_rate"], power=1.0),
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, **more)


def alternating_reward(rollout):
    """--reward-fn of `step` and `real`: half of each group succeeds, whatever it wrote."""
    return rollout.order[-1] % 2


def work_ours(job, gate):
    """Run grpo_llm.main, with a gate after each line of its log."""
    import grpo_llm
    timed, record = grpo_llm.Run.timed, grpo_llm.Run.record
    seen = 0

    @contextlib.contextmanager
    def timed_in_cpu_seconds(run, name):
        with gate.stage(name if name in ("rollout", "update") else "excluded"), timed(run, name):
            yield

    def record_and_wait(run, values):
        nonlocal seen
        record(run, values)
        greedy = values.get("val/countdown/greedy")
        if run.counters["iteration"]:
            gate.iteration_done(run.counters["env_steps"] - seen, dict(greedy=greedy),
                                reward=values["train/reward"])
        seen = run.counters["env_steps"]
        if gate.left == 0 and run.counters["iteration"] < job["iterations"]:
            if not run.counters["iteration"]:
                gate.send(greedy=greedy)
            gate.wait()

    grpo_llm.Run.timed, grpo_llm.Run.record = timed_in_cpu_seconds, record_and_wait
    more = dict(eval_tasks=EVAL_TASKS)
    if job["mode"] != "run":
        grpo_llm.Engine.eos = property(lambda engine: [-1], lambda engine, ids: None)  # no token ends one
        more = dict(eval_tasks=1, reward_fn=f"{__file__}:alternating_reward")
    with tempfile.TemporaryDirectory() as folder:
        grpo_llm.main(our_args(job, run_dir=folder, **more))


def work_trl(job, gate):
    """Run GRPOTrainer.train on the same problems in the same order, with a gate after each step."""
    os.environ |= dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    import envs
    torch.set_num_threads(1)
    prompts, group, tokens = job["size"]
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY / job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / job["model"])
    env = envs.make("countdown")

    def prompt_text(task):
        return tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)

    def rewards(prompts, completions, completion_ids, index, **_):
        if job["mode"] != "run":
            return [i % 2 for i in range(len(prompts))]
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [env.start(tasks[i], job["seed"]).step(text).reward if end else 0.0
                for text, end, i in zip(completions, ended, index, strict=True)]

    def greedy_accuracy():
        tests = [env.task("test", i) for i in range(min(EVAL_TASKS, env.num_tasks("test")))]
        batch = tokenizer([prompt_text(task) for task in tests], return_tensors="pt", padding=True,
                          padding_side="left", return_token_type_ids=False)
        ids = model.generate(**batch, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
        ended = (ids == tokenizer.eos_token_id).any(1).tolist()
        scores = [end and env.start(task, 1).step(text).info["correct"]
                  for task, text, end in zip(tests, texts, ended, strict=True)]
        return sum(scores) / len(scores)

    class Gated(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if gate.left == 0:
                gate.wait()

        def on_step_end(self, args, state, control, **_):
            metrics = trainer._metrics["train"]
            generated = round(metrics["completions/mean_length"][-1] * prompts * group)
            gate.stages["update"] += time.process_time() - trainer.step_began
            if gate.left > 1 or state.global_step < job["iterations"]:
                gate.iteration_done(generated, dict(greedy=None), reward=metrics["reward"][-1])
            else:
                self.last = generated, metrics["reward"][-1]

    class Trainer(GRPOTrainer):
        step_began = 0.0

        def _generate_and_score_completions(self, inputs):
            with gate.stage("rollout"):
                output = super()._generate_and_score_completions(inputs)
                if job["side"] == "trl-drop":
                    drop_groups_without_signal(output, group)
            self.step_began = time.process_time()
            return output

    tasks = {index: env.task("train", index) for index in job["tasks"]}
    texts = {index: prompt_text(task) for index, task in tasks.items()}
    rows = Dataset.from_dict(dict(prompt=[texts[i] for i in job["tasks"]], index=job["tasks"]))
    with tempfile.TemporaryDirectory() as folder:
        config = trl_config(job["flags"], output_dir=folder)
        gated = Gated()
        adapter = None
        if job["lora_rank"]:
            adapter = LoraConfig(r=job["lora_rank"], lora_alpha=job["flags"]["lora_alpha"],
                                 target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = Trainer(model, rewards, config, rows, processing_class=tokenizer, callbacks=[gated],
                          peft_config=adapter)
        if job["mode"] != "run":
            trainer.eos_token_ids = [-1]  # no token ends a response
            trainer.generation_kwargs["eos_token_id"] = trainer.generation_config.eos_token_id = [-1]
        gate.send(prompts=[tokenizer(texts[index]).input_ids for index in job["tasks"][:prompts]],
                  greedy=greedy_accuracy() if job["mode"] == "run" else None)
        trainer.train()
        with gate.stage("excluded"):
            model.eval()
            greedy = greedy_accuracy() if job["mode"] == "run" else None
        tokens, reward = gated.last
        gate.iteration_done(tokens, dict(greedy=greedy), reward=reward)


def drop_groups_without_signal(output, group):
    """Take out of TRL's batch, in place, the groups whose advantages are all zero, as grpo_llm.py does."""
    rows = len(output["advantages"])
    alive = output["advantages"].view(-1, group).ne(0).any(1)
    if alive.any():
        keep = alive.repeat_interleave(group)
        for name, value in output.items():
            if value.dim() and len(value) == rows:
                output[name] = value[keep]
        output["num_items_in_batch"] = output["completion_mask"].sum()


def compare(options, mode, size_name, sides, seed, blocks):
    """Let the sides take turns through the blocks (iterations each).  -> rows of the CSV, warm-up too."""
    import envs
    import grpo_llm
    size = [int(number) for number in size_name.removesuffix("-lora").split("x")]
    model = "models/smollm2-135m" if mode == "real" else "models/countdown-tiny"
    job = dict(mode=mode, size=size, seed=seed, iterations=sum(blocks), model=model,
               lora_rank=LORA_RANK if size_name.endswith("-lora") else 0)
    args, env = our_args(job), envs.make("countdown")
    if job["iterations"] == args.warmup_iterations:  # TRL's schedule divides by what is left after it
        sys.exit(f"error: {job['iterations']} iterations are all warm-up: expected more or fewer")
    job["flags"] = dataclasses.asdict(args)
    job["tasks"] = [envs.shuffled(cursor, seed, env.num_tasks("train"))
                    for cursor in range(size[0] * job["iterations"])]
    tokenizer = grpo_llm.load_tokenizer(args)
    texts = [grpo_llm.render(env.task("train", index).messages, tokenizer, args)
             for index in job["tasks"][:size[0]]]
    prompts = tokenizer(texts, add_special_tokens=False).input_ids
    started_at, rows, workers = datetime.datetime.now().isoformat(timespec="seconds"), [], []
    try:
        for side in sides:
            python = sys.executable if side == "ours" else options.trl_python
            workers.append(Worker(__file__, python, job | dict(side=side), options.core))
            if workers[-1].first.get("prompts", prompts) != prompts:
                sys.exit(f"error: {side} reads other prompts than grpo_llm.py")
        for block, iterations in enumerate(blocks):
            for worker in in_turn(workers, block):
                answer = worker.go(iterations)
                row = dict(started_at=started_at, mode=mode, size=size_name, seed=seed, side=worker.side)
                rows.append(row | dict(block=block) | {name: answer[name] for name in FIELDS[6:]})
                print(f"{size_name} seed {seed} block {block:2} {worker.side:8} CPU s/iteration: "
                      + ", ".join(f"{part} {answer[part] / iterations:.4f}"
                                  for part in ("rollout", "update", "other", "total"))
                      + f"; tokens {answer['tokens']}, reward {answer['reward']:.3f}"
                      + (f", held-out greedy {worker.first['greedy']:.3f} -> {answer['greedy']:.3f}"
                         if mode == "run" and answer["greedy"] is not None else ""), flush=True)
    finally:
        for worker in workers:
            worker.close()
    return rows


def summarise(rows, sides):
    """Print what an iteration costs each side, and how many times as much it costs TRL.

    step, real: medians of the blocks, and of the ratios of blocks measured in turn. run: means of all
    iterations, since the work changes as the policy learns.
    """
    mode, others = rows[0]["mode"], sides[1:]
    parts = {name: (name,) for name in ("rollout", "update")} | {"rollout + update": ("rollout", "update")}
    parts |= {name: (name,) for name in ("other", "total")}
    print(f"\n| {mode} {rows[0]['size']}, CPU s per iteration | {' | '.join(sides)} | "
          + " | ".join(f"{side} / ours" for side in others) + " |\n" + "|---" * (2 * len(sides)) + "|")
    for name, fields in parts.items():
        costs = {side: [] for side in sides}
        for r in rows:
            costs[r["side"]].append(sum(r[field] for field in fields) / r["iterations"])
        values = [statistics.median(costs[side]) for side in sides]
        if mode != "run":
            ratios = [statistics.median(b / a for a, b in zip(costs["ours"], costs[side], strict=True))
                      for side in others]
        else:
            values = [sum(r[field] for r in rows if r["side"] == side for field in fields)
                      / sum(r["iterations"] for r in rows if r["side"] == side) for side in sides]
            ratios = [value / values[0] for value in values[1:]]
        cells = [f"{value:.4f}" for value in values] + [f"{r:.2f}" if name != "other" else "" for r in ratios]
        print(f"| {name} | {' | '.join(cells)} |")
    if mode == "run":
        whole = [f"{sum(r['total'] for r in rows if r['side'] == side):.1f}" for side in sides]
        print(f"| the whole run, CPU s | {' | '.join(whole)} |" + " |" * len(others))
        greedy = {r["side"]: r["greedy"] for r in rows if r["greedy"] is not None}
        print(f"| held-out greedy at its end | {' | '.join(f'{greedy[side]:.3f}' for side in sides)} |"
              + " |" * len(others))


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("mode", choices=("step", "real", "run", "worker"))
    parser.add_argument("--iterations", type=int, default=500, help="of `run`")
    parser.add_argument("--block", type=int, default=50, help="iterations of `run` in one turn")
    parser.add_argument("--repeats", type=int, default=0,
                        help="step: measured blocks of 3 iterations [7]; real: of one [7]; run: seeds [1]")
    parser.add_argument("--sides", default="", help="with commas: ours,trl,trl-drop")
    parser.add_argument("--sizes", default="", help="with commas: prompts x group x tokens; of `step` "
                        f"[{SIZES}], of `real` [{REAL_SIZES}]")
    parser.add_argument("--trl-python", default=str(REPOSITORY / ".venv-trl/bin/python"))
    parser.add_argument("--core", type=int, default=0, help="the core that all sides are pinned to")
    parser.add_argument("--out", default="", help="CSV file to append each block's measurements to")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.mode == "worker":
        gate = Gate(("rollout", "update"))
        job = json.loads(sys.stdin.readline())
        (work_ours if job["side"] == "ours" else work_trl)(job, gate)
        return
    check_environment("torch", "transformers", "peft", "tyro", "pydantic")
    check_environment("torch", "transformers", "datasets", "peft", "trl",
                      python=options.trl_python, made_by="trl")
    if options.mode == "real":
        check_smollm2()
    import grpo_llm
    comparisons = []
    if options.mode != "run":
        sides = (options.sides or "ours,trl").split(",")
        usual, block = (SIZES, 3) if options.mode == "step" else (REAL_SIZES, 1)
        for name in (options.sizes or usual).split(","):
            rows = compare(options, options.mode, name, sides, 1, [block] * (1 + (options.repeats or 7)))
            comparisons.append((rows, [r for r in rows if r["block"]], sides))  # block 0 warms up
    else:
        sides = (options.sides or "ours,trl,trl-drop").split(",")
        blocks = [options.block] * (options.iterations // options.block)
        blocks += [options.iterations % options.block] if options.iterations % options.block else []
        size = f"{grpo_llm.Args.prompts_per_iteration}x{grpo_llm.Args.group_size}x{RUN_TOKENS}"
        for seed in range(1, (options.repeats or 1) + 1):
            rows = compare(options, "run", size, sides, seed, blocks)
            comparisons.append((rows, rows, sides))
    for rows, measured, sides in comparisons:
        summarise(measured, sides)
        if options.out:
            append_csv(options.out, rows)


if __name__ == "__main__":
    main()
