"""sft.py against TRL's SFTTrainer: the same rows, side by side, in tokens per CPU second on one thread.

    sh benchmarks/make_trl_env.sh                        # once: .venv-trl, where TRL lives
    python benchmarks/sft_vs_trl.py speed                # padded and packed, both libraries
    python benchmarks/sft_vs_trl.py speed --profile      # and where the time of a step goes

Each side is a process of its own on the same core: ours runs sft.main itself on a JSONL file, TRL's runs
SFTTrainer.train on its rows. They take turns, a block of steps each; while one works, the others wait for
input. A token is a real one: padding is computed and not counted. Imports, tokenisation, TRL's packing
beforehand and checkpoints are left out; our packing, done anew for each step, and our log, a record every 10
steps, are not. TRL's logging is off. The names of the sides:

    ours               sft.py; its passes hold at most --microbatch-tokens 4096, the default
    ours-1024          the same with --microbatch-tokens 1024
    ours-packed        with --packing
    trl                SFTTrainer, 8 rows in a pass, 4 passes a step
    trl-grouped        the same with train_sampling_strategy="group_by_length"
    trl-4              4 rows in a pass, 8 passes a step
    trl-packed-512x1   packing=True with max_length=512, 1 packed row in a pass: without flash-attention, the
                       rows of a pass become one row, whose whole square is computed and masked

The model is a Llama of 0.86M parameters with random weights in float32; a step learns from 32 rows (TRL's
packing: from 2,048 tokens, or one pass if that is more), whose lengths are drawn log-normally. The script
refuses to go on if a side learns from a row or a mask that is not the file's, or if those of ours and TRL's
padded ones, which read the same rows at every step, disagree on the loss.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import hashlib
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

from sides import REPOSITORY, Gate, Worker, append_csv, check_environment, in_turn

VOCABULARY, ROWS, PASS_ROWS, BLOCK, SEED = 448, 32, 8, 10, 1  # rows a step, a pass of TRL's; steps a block
STEP_TOKENS = 2048  # of TRL's packing; 32 rows are about as many
MODEL = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)
RECIPE = dict(learning_rate=1e-3, weight_decay=0.01)  # gradients are clipped to a norm of 1 on both sides
STAGES = ("data", "forward", "backward", "clipping", "optimiser")
SIDES = ("ours,ours-1024,ours-packed,ours-packed-1024,trl,trl-grouped,trl-packed-512x1,trl-packed-1024x1,"
         "trl-packed-1024x8")


def write_inputs(folder, num_rows):
    """A model folder and rows.jsonl.  -> the rows as the file has them, and as (ids, mask)"""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    special = ["<pad>", "<eos>", "<unk>"]
    words = special + [f"w{number}" for number in range(len(special), VOCABULARY)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>",
                            unk_token="<unk>").save_pretrained(folder / "model")
    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, pad_token_id=0,
                                 eos_token_id=1, **MODEL)).save_pretrained(folder / "model")
    random, rows, coded = np.random.default_rng(SEED), [], []
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(num_rows):
            length = int(np.clip(np.exp(random.normal(np.log(54), 0.65)), 10, 200))
            ids = random.integers(len(special), VOCABULARY, length - 1).tolist()
            cut = int(length * random.uniform(0.3, 0.7))
            prompt, response = (" ".join(words[i] for i in part) for part in (ids[:cut], ids[cut:]))
            rows.append(dict(prompt=prompt, response=" " + response))
            coded.append((ids + [1], [0] * cut + [1] * (length - cut)))
            file.write(json.dumps(rows[-1]) + "\n")
    return rows, coded


def digest(row):
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]


class Seen:
    """What a side learned from since the last report: the tensors of its passes, taken apart afterwards."""

    def __init__(self):
        self.passes = []

    def report(self):
        """-> tokens without padding, tokens with it, the digest of each row"""
        import torch
        rows, computed = [], 0
        for tokens, mask, positions in self.passes:
            computed += tokens.numel()
            positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
            for ids, learned, places in zip(tokens.tolist(), mask.int().tolist(), positions.tolist(),
                                            strict=True):
                starts = [t for t, place in enumerate(places) if place == 0] + [len(ids)]
                for start, end in zip(starts, starts[1:], strict=False):
                    while end > start and ids[end - 1] == 0:
                        end -= 1
                    if end > start:
                        rows.append((ids[start:end], learned[start:end]))
        self.passes = []
        tokens = sum(len(ids) for ids, _ in rows)
        return dict(tokens=tokens, computed=computed, rows=sorted(map(digest, rows)))


def timed(gate, stage, function):
    def inside(*args, **kwargs):
        with gate.stage(stage):
            return function(*args, **kwargs)
    return inside


def time_torch(gate):
    """Backward, clipping and optimiser are torch's on both sides."""
    import torch
    torch.set_num_threads(1)
    torch.Tensor.backward = timed(gate, "backward", torch.Tensor.backward)
    torch.nn.utils.clip_grad_norm_ = timed(gate, "clipping", torch.nn.utils.clip_grad_norm_)
    torch.optim.AdamW.step = timed(gate, "optimiser", torch.optim.AdamW.step)


def our_args(job, **more):
    """The flags of sft.py for a side."""
    import sft
    _, packing, tokens = re.fullmatch(r"(ours)(-packed)?(?:-(\d+))?", job["side"]).groups()
    size = dict(microbatch_tokens=int(tokens)) if tokens else {}
    unmeasured = dict(eval_every=0, checkpoint_every=BLOCK * 10**6)
    return sft.Args(
        model=f"{job['folder']}/model", train_files=(f"{job['folder']}/rows.jsonl",), val_ratio=0.0,
        packing=bool(packing), batch_size=ROWS, seed=SEED, steps=job["steps"], schedule="constant",
        warmup_steps=0, beta2=0.95, log_every=BLOCK, **size, **RECIPE, **unmeasured, **more)


def work_ours(job, gate):
    """Run sft.main, with a gate after each record of its log."""
    import sft
    time_torch(gate)
    seen = Seen()
    response_loss, record = sft.response_loss, sft.Run.record
    examples_of_rows = sft.examples_of_rows

    def loss_and_note(model, batch):
        with gate.stage("forward"):
            loss = response_loss(model, batch)
        seen.passes.append((batch["tokens"], batch["response_mask"], batch["position_ids"]))
        return loss

    def timed_examples(*args, **kwargs):
        example, *rest = examples_of_rows(*args, **kwargs)
        return timed(gate, "data", example), *rest

    def record_and_wait(run, values):
        record(run, values)
        if run.counters["iteration"]:
            gate.iteration_done(more=seen.report, iterations=BLOCK, loss=values["train/loss"])
        else:
            gate.send()
            seen.passes = []
        if gate.left == 0 and run.counters["iteration"] < job["steps"]:
            gate.wait()

    sft.response_loss, sft.Run.record = loss_and_note, record_and_wait
    sft.batches = timed(gate, "data", sft.batches)
    sft.examples_of_rows = timed_examples
    with tempfile.TemporaryDirectory() as folder:
        sft.main(our_args(job, run_dir=folder))


def trl_config(job, **more):
    """SFTTrainer's flags for a side."""
    from trl import SFTConfig
    grouped, rows, length, packed = re.fullmatch(
        r"trl(-grouped)?(?:-(\d+))?(?:-packed-(\d+)x(\d+))?", job["side"]).groups()
    order = dict(train_sampling_strategy="group_by_length" if grouped else "sequential")
    rows = int(rows or PASS_ROWS)
    passes = ROWS // rows
    if length:
        length, rows, order = int(length), int(packed), {}  # {}: TRL's own order, random
        order |= dict(packing=True, max_length=length)
        passes = max(1, STEP_TOKENS // (length * rows))
    return SFTConfig(
        per_device_train_batch_size=rows, gradient_accumulation_steps=passes, max_steps=job["steps"],
        seed=SEED, optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, lr_scheduler_type="constant",
        warmup_steps=0, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True, **RECIPE, **order, **more)


def work_trl(job, gate):
    """Run SFTTrainer.train, with a gate before each step."""
    os.environ |= dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTTrainer
    time_torch(gate)
    seen, losses = Seen(), []

    class Gated(TrainerCallback):
        started = False

        def report(self):
            loss = float(sum(losses)) / gate.size
            losses.clear()
            return seen.report() | dict(loss=loss)

        def on_step_begin(self, args, state, control, **_):
            if not self.started:
                gate.send()
            else:
                gate.iteration_done(more=self.report)
            self.started = True
            if gate.left == 0:
                gate.wait()

        def on_train_end(self, args, state, control, **_):
            gate.iteration_done(more=self.report)

    class Trainer(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            with gate.stage("forward"):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            seen.passes.append((inputs["input_ids"], inputs["labels"] != -100, inputs.get("position_ids")))
            losses.append(loss.detach())
            return loss

        def get_batch_samples(self, *args, **kwargs):
            with gate.stage("data"):
                return super().get_batch_samples(*args, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(f"{job['folder']}/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(f"{job['folder']}/model")
    with open(f"{job['folder']}/ordered.jsonl") as file:
        rows = [json.loads(line) for line in file]
    rows = Dataset.from_list([dict(prompt=row["prompt"], completion=row["response"]) for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, trl_config(job, output_dir=folder), train_dataset=rows, processing_class=tokenizer,
                callbacks=[Gated()]).train()


def steps_of_block(side):
    """10, or fewer where a step of TRL's packing has more tokens than those of the others."""
    packed = re.fullmatch(r"trl-packed-(\d+)x(\d+)", side)
    tokens = int(packed[1]) * int(packed[2]) if packed else 0
    return max(1, BLOCK * STEP_TOKENS // max(STEP_TOKENS, tokens))


def compare(options, mode, sides):
    """Let the sides take turns through the blocks.  -> rows of the CSV, those of the warm-up too."""
    import numpy as np

    import envs
    blocks = 1 + options.repeats
    num_rows = blocks * BLOCK * ROWS
    started_at, rows, workers = datetime.datetime.now().isoformat(timespec="seconds"), [], []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        texts, coded = write_inputs(folder, num_rows)
        lengths = [len(ids) for ids, _ in coded]
        print(f"{num_rows} rows of {min(lengths)} to {max(lengths)} tokens, {statistics.mean(lengths):.1f} "
              f"on average; {sum(sum(mask) for _, mask in coded) / sum(lengths):.0%} responses")
        held = np.random.default_rng(SEED).permutation(num_rows)  # as sft.py does, so that TRL reads the same
        order = [int(held[envs.shuffled(i, SEED, num_rows)]) for i in range(num_rows)]
        (folder / "ordered.jsonl").write_text("".join(json.dumps(texts[i]) + "\n" for i in order))
        known = set(map(digest, coded))
        for side in sides:
            python = sys.executable if side.startswith("ours") else options.trl_python
            job = dict(side=side, folder=name, steps=blocks * steps_of_block(side))
            workers.append(Worker(__file__, python, job, options.core))
            stack.callback(workers[-1].close)
        for block in range(blocks):
            answers = {}
            for worker in in_turn(workers, block):
                answer = answers[worker.side] = worker.go(steps_of_block(worker.side))
                row = dict(started_at=started_at, mode=mode, side=worker.side, block=block)
                rows.append(row | {key: answer[key] for key in ("iterations", "tokens", "computed", *STAGES,
                                                                "other", "total", "loss")})
                padding = 1 - answer["tokens"] / answer["computed"]
                print(f"block {block:2} {worker.side:18} {answer['tokens'] / answer['total']:8,.0f} "
                      f"tokens/s, {padding:.0%} padding, loss {answer['loss']:.4f}", flush=True)
            check_same_work(answers, known, [digest(coded[i]) for i in order], block)
    return rows


def check_same_work(answers, known, in_order, block):
    """Exit if a side saw a row that is none of the file's, or if sides that should agree do not."""
    expected = sorted(in_order[block * BLOCK * ROWS:(block + 1) * BLOCK * ROWS])
    losses = []
    for side, answer in answers.items():
        if foreign := len(set(answer["rows"]) - known):
            sys.exit(f"error: {side}: {foreign} of its rows are not in the file, or have another mask")
        if re.fullmatch(r"ours.*|trl(-\d+)?", side):
            losses.append(answer["loss"])
            if collections.Counter(answer["rows"]) != collections.Counter(expected):
                sys.exit(f"error: {side} learned from other rows in block {block}")
    if losses and max(losses) - min(losses) > 1e-3:
        sys.exit(f"error: the losses of block {block} are {losses}")


def summarise(rows, sides, profile):
    """Tokens per CPU second: medians of the blocks; ratios are medians of those of blocks in turn."""
    of_side = {side: [r for r in rows if r["side"] == side] for side in sides}
    speed = {side: [r["tokens"] / r["total"] for r in mine] for side, mine in of_side.items()}
    ours = [side for side in sides if side.startswith("ours")]
    print("\n| side | tokens a step | padding | tokens per CPU s | "
          + " | ".join(f"{mine} / it" for mine in ours) + " |\n" + "|---" * (4 + len(ours)) + "|")
    for side in sides:
        tokens, computed, steps = (sum(r[key] for r in of_side[side])
                                   for key in ("tokens", "computed", "iterations"))
        ratios = [statistics.median(a / b for a, b in zip(speed[mine], speed[side], strict=True))
                  for mine in ours]
        print(f"| {side} | {tokens / steps:,.0f} | {1 - tokens / computed:.1%} | "
              f"{statistics.median(speed[side]):,.0f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
    if profile:
        print(f"\n| ms a step, and share | {' | '.join(sides)} |\n" + "|---" * (1 + len(sides)) + "|")
        for stage in (*STAGES, "other", "total"):
            cells = []
            for mine in of_side.values():
                part, total, steps = (sum(r[key] for r in mine) for key in (stage, "total", "iterations"))
                cells.append(f"{1000 * part / steps:.1f}, {part / total:.1%}")
            print(f"| {stage} | {' | '.join(cells)} |")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("mode", choices=("speed", "worker"))
    parser.add_argument("--repeats", type=int, default=7, help="measured blocks of 10 steps")
    parser.add_argument("--sides", default=SIDES, help="with commas")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    parser.add_argument("--trl-python", default=str(REPOSITORY / ".venv-trl/bin/python"))
    parser.add_argument("--core", type=int, default=0, help="the core that all sides are pinned to")
    parser.add_argument("--out", default="", help="CSV file to append each block's measurements to")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.mode == "worker":
        gate = Gate(STAGES)
        job = json.loads(sys.stdin.readline())
        (work_ours if job["side"].startswith("ours") else work_trl)(job, gate)
        return
    check_environment("torch", "transformers", "datasets", "tyro", "pydantic")
    check_environment("torch", "transformers", "datasets", "trl", python=options.trl_python, made_by="trl")
    sides = options.sides.split(",")
    rows = compare(options, options.mode, sides)
    summarise([r for r in rows if r["block"]], sides, options.profile)  # block 0 warms up
    if options.out:
        append_csv(options.out, rows)


if __name__ == "__main__":
    main()
