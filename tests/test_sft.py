"""sft.py: the loss and its gradient in every cut of a batch, LoRA, validation, and runs on the CPU.

How rows of data become tokens is in test_sft_data.py.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

import envs
import sft
from tests.run_folders import (
    LAST,
    TINY,
    InterruptAt,
    command_line,
    in_halves,
    kill_at,
    log_lines,
    process,
    records,
    same_end,
    same_tree,
    train,
)
from tools import merge_adapter
from tools.validate_train_log import validate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied heads and Conv1D
torch.set_num_threads(1)


ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"),
        ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"), ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60"),
        ("2 5 -> 7", "2 + 5 = 7"), ("8 8 1 -> 1", "8 - 8 = 0; 1 - 0 = 1")]


def write_rows(tmp_path, kind, rows=ROWS, chat=False):
    path = tmp_path / f"rows.{kind}"
    data = [{"prompt": [{"role": "user", "content": prompt}] if chat else prompt, "response": response}
            for prompt, response in rows]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    else:
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), path)
    return path


# The loss and its gradient, however the batch is cut


KINDS = {  # each with attention or positions of its own
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "mistral": (MistralConfig, dict(sliding_window=5)),
    "gpt2": (GPT2Config, dict(n_embd=16, n_head=4, n_layer=2)),
}
LEAKING = {  # a state that goes on from row to row, linear attention, a convolution
    "mamba": (MambaConfig, dict(state_size=4)),
    "qwen3-next": (Qwen3NextConfig, dict(
        layer_types=["linear_attention", "full_attention"], head_dim=4, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)),
    "lfm2": (Lfm2Config, dict(layer_types=["conv", "full_attention"])),
}


def slow_but(quick, cases):
    """pytest's parameters of all the cases, marked as slow but for the first few."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (n >= quick)) for n, case in enumerate(cases)]


def small_model(kind, **options):
    """Random weights, biases and norms included, wide enough that what a token sees matters."""
    torch.manual_seed(0)
    config, own = (KINDS | LEAKING)[kind]
    model = AutoModelForCausalLM.from_config(config(**dict(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        | own | options)).eval()
    for tensor in model.parameters():
        if tensor.ndim == 1:
            tensor.data += 0.2 * torch.randn_like(tensor)
    return model


def write_model(folder, kind, **options):
    """Such a model with the tokenizer of countdown-tiny."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    small_model(kind, vocab_size=len(tokenizer), **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def mixed_rows(lengths=(41, 3, 12, 2, 27, 8, 19, 5, 33, 2, 38, 25, 17)):
    """Rows with several responses each, among them the first token that can be one, and the last."""
    rng, rows = random.Random(0), []
    for number, length in enumerate(lengths):
        mask = [0, *(rng.randrange(2) for _ in range(length - 1))]
        mask[-1], mask[1] = 1 - number % 2, 1
        rows.append(([rng.randrange(3, 37) for _ in range(length)], mask))
    return rows


def reference(model, rows):
    """Each row alone, in float64 and by plain attention.  -> loss, gradients in one vector"""
    model, total = copy.deepcopy(model).double(), 0.0
    (model.get_base_model() if isinstance(model, peft.PeftModel) else model).set_attn_implementation("eager")
    for ids, mask in rows:
        logits = model(torch.tensor([ids])).logits[0]
        chosen = [t for t in range(len(ids)) if mask[t]]
        total = total + functional.cross_entropy(
            logits[[t - 1 for t in chosen]], torch.tensor(ids)[chosen], reduction="sum")
    loss = total / sum(sum(mask) for _, mask in rows)
    loss.backward()
    return loss.item(), flat_gradient(model)


def flat_gradient(model):
    """Of the trained weights, in float64; they are reset."""
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
    model.zero_grad(set_to_none=True)
    return flat


def gradient_step(model, rows, /, **flags):
    """Loss and gradient as the loop of sft.py makes them.  -> loss, gradients in one vector, the passes"""
    args, loss = sft.Args(**dict(model="small") | flags), 0.0
    passes = list(sft.batches(rows, args, 0, model))
    for batch in passes:
        part = sft.response_loss(model, batch) / sft.count_targets(rows)
        part.backward()
        loss += part.item()
    return loss, flat_gradient(model), passes


def assert_close(one, other, tolerance=1e-5):
    """Loss and gradient, relative to their size."""
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    assert (one[1] - other[1]).norm() < tolerance * other[1].norm()


CUTS = {
    "alone": dict(microbatch_tokens=1), "padded": dict(microbatch_tokens=90),
    "padded-whole": dict(microbatch_tokens=10_000), "packed": dict(packing=True, microbatch_tokens=130),
    "packed-whole": dict(packing=True, microbatch_tokens=10_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_the_loss_and_gradient_of_rows_alone(kind):
    model, rows = small_model(kind), mixed_rows()
    assert model.config._attn_implementation == "sdpa"
    expected = reference(model, rows)
    for cut, flags in CUTS.items():
        *found, passes = gradient_step(model, rows, **flags)
        assert_close(found, expected)
        shapes = [tuple(batch["tokens"].shape) for batch in passes]
        if cut == "alone":
            assert sorted(shapes) == sorted((1, len(ids)) for ids, _ in rows)
        elif cut.startswith("padded"):
            assert sum(size for size, _ in shapes) == len(rows) and max(size for size, _ in shapes) > 1
        else:
            assert sum(size for size, _ in shapes) <= 2  # of 13 rows
        if cut == "packed-whole":
            assert shapes[0][0] == 2  # one of the two is padded, too
        assert all(size * width <= max(flags["microbatch_tokens"], 41) for size, width in shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_long_packed_rows_for_kernels_that_skip_give_the_same_loss_and_gradient(kind, monkeypatch):
    """Those kernels need a GPU, so here the rows that are laid out for them go through plain attention."""
    monkeypatch.setattr(sft, "SKIPPING_KERNELS", ("eager",))
    model, rows = small_model(kind), mixed_rows()
    model.set_attn_implementation("eager")
    *found, passes = gradient_step(model, rows, packing=True, microbatch_tokens=100)
    assert_close(found, reference(model, rows))
    assert len(passes) == 3 and all(batch["tokens"].shape[0] == 1 for batch in passes)
    assert sum(batch["tokens"].numel() for batch in passes) == sum(len(ids) for ids, _ in rows)  # no padding
    starts = sum(int((batch["position_ids"] == 0).sum()) for batch in passes)
    assert starts == len(rows) and max(batch["tokens"].shape[1] for batch in passes) <= 100
    # A row that is longer than a pass is one of its own.
    *found, passes = gradient_step(model, rows, packing=True, microbatch_tokens=30)
    assert_close(found, reference(model, rows))
    assert max(batch["tokens"].shape[1] for batch in passes) == 41 and 232 / 41 < len(passes) < len(rows)


def test_a_pass_is_at_most_a_quarter_padding():
    rows = mixed_rows(lengths=[200, *range(2, 120)])
    model = small_model("llama")
    for flags in (dict(), dict(packing=True)):
        passes = list(sft.batches(rows, sft.Args(microbatch_tokens=400, **flags), 0, model))
        seen = []
        for batch in passes:
            real = int((batch["tokens"] != 0).sum())  # the rows hold none of the padding's id
            assert 0.75 * batch["tokens"].numel() <= real <= batch["tokens"].numel() <= 400
            seen += batch["tokens"][batch["tokens"] != 0].tolist()
        assert sorted(seen) == sorted(token for ids, _ in rows for token in ids)


@pytest.mark.parametrize(("kind", "dtype"), slow_but(2, [
    ("mamba", "bfloat16"), ("qwen3-next", "float32"), ("lfm2", "bfloat16")]))
def test_a_model_whose_rows_would_leak_is_refused(kind, dtype, tmp_path, capfd):
    """The first rows are too long to share a packed row, and the later ones are not."""
    model, order = write_model(tmp_path / "model", kind), sft.permutation(1, 12)
    short = [(prompt, response) for prompt, response in ROWS if len(prompt) < 14][:4]
    rows = {int(index): ("1 1 -> 2", "1 + 1 = 2; " * 17) if place < 6 else short[place % 4]
            for place, index in enumerate(order)}
    flags = dict(model=model, dtype=dtype, val_ratio=0.0, steps=1, log_every=1, checkpoint_every=1,
                 train_files=(str(write_rows(tmp_path, "jsonl", [rows[n] for n in range(12)])),))
    with pytest.raises(envs.BadInput) as told:
        train(sft, tmp_path / "run", packing=True, **flags)
    said = str(told.value)
    assert said.startswith("--packing") and model in said and "\n" not in said
    assert not (tmp_path / "run" / "train_log.jsonl").read_bytes()
    train(sft, tmp_path / "run", **flags)  # without it, it learns


@pytest.mark.parametrize(("kind", "dtype"), slow_but(2, [
    ("llama", "bfloat16"), ("mistral", "float32"), ("gpt2", "float32"), ("qwen2", "bfloat16")]))
def test_a_model_whose_rows_do_not_leak_packs(kind, dtype, tmp_path, monkeypatch):
    flags = dict(model=write_model(tmp_path / "model", kind), dtype=dtype, packing=True, steps=1,
                 train_files=(str(write_rows(tmp_path, "jsonl")),))
    train(sft, tmp_path / "run", **flags)
    # It is the mask made of position_ids that keeps them apart.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(envs.BadInput, match="--packing"):
        train(sft, tmp_path / "leaking", **flags)


@pytest.mark.parametrize("chunk_elements", [10**6, 23 * 50, 4 * 50 + 7, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_is_the_cross_entropy(dtype, chunk_elements):
    torch.manual_seed(0)
    head, weight = torch.nn.Linear(8, 50).to(dtype), torch.rand(23)
    hidden, targets = torch.randn(23, 8, dtype=dtype, requires_grad=True), torch.randint(50, (23,))
    inputs, seen, kept = [hidden, *head.parameters()], [], []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    def gradients_of(losses):
        return torch.autograd.grad((weight * losses).sum(), inputs)

    expected = functional.cross_entropy(head(hidden).float(), targets, reduction="none")
    head.register_forward_hook(lambda module, arguments, logits: seen.append(logits.numel()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = sft.token_losses(hidden, head, targets, chunk_elements)
    assert losses.shape == (23,) and losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for one, other in zip(gradients_of(losses), gradients_of(expected), strict=True):
        assert one.dtype == dtype and (one - other).float().norm() <= tolerance * other.float().norm()
    size = max(1, chunk_elements // 50)  # tokens in a chunk
    chunks = math.ceil(23 / size)
    assert sum(seen) == 23 * 50 * (1 if chunks == 1 else 2) and max(seen) == 50 * min(size, 23)
    assert chunks == 1 or max(kept, default=0) < 23 * 50 > sum(kept)  # no logits wait for the backward pass


# Gradient checkpointing


DROPOUT = {
    "llama": dict(attention_dropout=0.5), "qwen2": dict(attention_dropout=0.5),
    "mistral": dict(attention_dropout=0.5), "gpt2": dict(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5),
}


@pytest.mark.parametrize(("kind", "lora"), slow_but(2, [
    ("llama", 2), ("gpt2", 0), ("mistral", 2), ("qwen2", 0)]))
def test_gradient_checkpointing_recomputes_the_layers_and_changes_nothing(kind, lora, tmp_path, monkeypatch):
    """... with dropout in the model's configuration, which stays off."""
    folder, runs, computed = write_model(tmp_path / "model", kind, **DROPOUT[kind]), [], []
    layer = type(next(m for m in AutoModelForCausalLM.from_pretrained(folder).modules()
                      if isinstance(m, torch.nn.Module) and type(m).__name__.endswith("MLP")))
    forward = layer.forward

    def counted(*given):
        computed.append(torch.is_grad_enabled())
        return forward(*given)

    monkeypatch.setattr(layer, "forward", counted)
    for checkpointing in (False, True):
        run = train(sft, tmp_path / str(checkpointing), model=folder, lora_rank=lora, packing=True,
                    microbatch_tokens=130, gradient_checkpointing=checkpointing)
        runs.append((run, sum(computed), len(computed) - sum(computed)))
        computed.clear()
    (one, grad, others), (other, twice, the_same) = runs
    assert twice == 2 * grad > 0 and the_same == others  # sampling is not computed again
    same_end(one, other)


def test_a_model_with_dropout_is_trained_without(tmp_path):
    folder = write_model(tmp_path / "model", "gpt2", **DROPOUT["gpt2"])
    rows = (str(write_rows(tmp_path, "jsonl", ROWS[:2])),)
    run = train(sft, tmp_path / "run", model=folder, train_files=rows, val_files=rows, batch_size=2, steps=1,
                eval_every=0, checkpoint_every=1)
    before, after = records(run)
    assert after["train/loss"] == pytest.approx(before["val/loss"], rel=1e-6)


# The optimiser


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_matrices_decay_and_norms_and_biases_do_not(kind):
    model = small_model(kind)
    optimizer = torch.optim.AdamW(sft.parameter_groups(model, 0.25), lr=0.1, betas=(0.9, 0.95), fused=True)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for tensor in model.parameters():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    moved = set()
    for name, tensor in model.named_parameters():
        if not torch.equal(tensor, before[name]):
            moved.add(name)
            torch.testing.assert_close(tensor.detach(), before[name] * (1 - 0.1 * 0.25))
    vectors = {name for name in before if name.endswith("bias") or ".ln_" in name or "norm" in name}
    assert moved == set(before) - vectors and vectors and len(moved) > 8


def test_the_learning_rate_of_sft_warms_up_and_decays():
    def rates(steps, **flags):
        args = sft.Args(learning_rate=2.0, **flags)
        return [sft.learning_rate(step, steps, args) for step in range(steps + 1)]

    cosine = rates(110, warmup_steps=10, final_learning_rate=0.25)
    assert cosine[1] == pytest.approx(0.2) and cosine[10] == pytest.approx(2.0) == max(cosine)
    assert cosine[60] == pytest.approx((2.0 + 0.5) / 2) and cosine[110] == pytest.approx(0.5)
    constant = rates(20, warmup_steps=4, schedule="constant")
    assert [constant[step] for step in (2, 4, 12, 20)] == [1.0, 2.0, 2.0, 2.0]
    stable = rates(200, warmup_steps=10, schedule="wsd", final_learning_rate=0.1)
    assert stable[5] == 1.0 and stable[10:181] == [2.0] * 171
    assert [stable[step] for step in (185, 190, 200)] == pytest.approx([1.55, 1.1, 0.2])


# LoRA


def folder_hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


@pytest.fixture
def lora_run(tmp_path):
    """Flags of a run that adapts a copy of countdown-tiny to rows."""
    shutil.copytree(TINY, tmp_path / "base")
    return dict(model=str(tmp_path / "base"), lora_rank=4, learning_rate=1e-2,
                train_files=(str(write_rows(tmp_path, "jsonl")),))


@pytest.mark.parametrize("dtype", slow_but(1, ["bfloat16", "float32"]))
def test_lora_trains_the_adapter_and_nothing_else(dtype, lora_run, tmp_path):
    before = folder_hashes(tmp_path / "base")
    folder = train(sft, tmp_path / "run", dtype=dtype, packing=True, **lora_run)
    assert folder_hashes(tmp_path / "base") == before
    adapter = load_file(tmp_path / "run-model" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 3 and all("lora_" in name for name in adapter)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert all(tensor.abs().max() > 0 for tensor in adapter.values())  # B, too, which starts at zero
    assert not list((tmp_path / "run-model").glob("model*.safetensors"))
    norm = math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in adapter.values()))
    assert records(folder)[-1]["train/weight_norm"] == pytest.approx(norm, rel=1e-5)
    assert records(folder)[-1]["train/loss"] < records(folder)[1]["train/loss"]


def test_the_exported_adapter_is_loaded_by_peft_and_merged(lora_run, tmp_path, capsys):
    out = tmp_path / "run-model"
    train(sft, tmp_path / "run", **lora_run)
    ids = AutoTokenizer.from_pretrained(out)("<bos> 6 18 14 -> 38 : 18 + 14", return_tensors="pt").input_ids
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(lora_run["model"])(ids).logits
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(out)(ids).logits
    assert (loaded - base).abs().max() > 0.1
    capsys.readouterr()
    assert merge_adapter.main(["--adapter", str(out), "--output-dir", str(tmp_path / "merged")]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == 7 * 3
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, loaded, rtol=1e-4, atol=1e-4)
    assert lora_run["model"] in (out / "README.md").read_text()


ADAPTED = {  # flags, what is adapted
    "default": (dict(), "qkvoudg"),
    "named": (dict(lora_target_modules="q_proj,lm_head,embed_tokens"), "qle"),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_the_vocabulary_is_adapted_only_when_it_is_named(case, lora_run, tmp_path):
    flags, letters = ADAPTED[case]
    train(sft, tmp_path / "run", **lora_run | dict(steps=1, eval_every=0) | flags)
    adapter = load_file(tmp_path / "run-model" / "adapter_model.safetensors")
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name}
    names = dict(q="q_proj", k="k_proj", v="v_proj", o="o_proj", u="up_proj", d="down_proj", g="gate_proj",
                 l="lm_head", e="embed_tokens")
    assert adapted == {names[letter] for letter in letters}


def test_an_adapted_vocabulary_has_the_gradient_of_the_whole_model():
    """The loss goes round the model's own forward pass, so an adapter of the head must be met on that way."""
    model = peft.get_peft_model(small_model("llama"), peft.LoraConfig(
        r=2, target_modules=["q_proj", "lm_head", "embed_tokens"], task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, tensor in model.named_parameters():
        tensor.data += 0.3 * torch.randn_like(tensor) * ("lora_" in name)
    model.double()  # such large weights round by more than the difference that is allowed
    expected = reference(model, mixed_rows())
    for cut in CUTS.values():
        *found, _ = gradient_step(model, mixed_rows(), **cut)
        assert_close(found, expected)


def test_an_adapter_is_gone_on_from(lora_run, tmp_path):
    first = train(sft, tmp_path / "first", **lora_run)
    flags = {name: value for name, value in lora_run.items() if name != "lora_rank"}
    adapter = str(tmp_path / "first-model")
    folder = train(sft, tmp_path / "second", lora_adapter_path=adapter, lora_alpha=1, **flags)
    before, after = records(first)[-1], records(folder)
    assert after[0]["val/loss"] == before["val/loss"] != records(first)[0]["val/loss"]
    assert after[-1]["val/loss"] != after[0]["val/loss"]
    config = json.loads((tmp_path / "second-model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert "lora_rank" not in flags and log_lines(folder)[0]["meta"]["args"]["lora_adapter_path"] == adapter
    # Another adapter at its place would make the run another run.
    shutil.copy(tmp_path / "second-model" / "adapter_model.safetensors", adapter)
    with pytest.raises(envs.BadInput, match="the model"):
        train(sft, folder, lora_adapter_path=adapter, lora_alpha=1, **flags)


def test_an_adapter_of_another_model_is_refused(lora_run, tmp_path):
    other = write_model(tmp_path / "other", "llama")
    train(sft, tmp_path / "first", **lora_run)
    flags = lora_run | dict(model=other, lora_rank=0, lora_adapter_path=str(tmp_path / "first-model"))
    with pytest.raises(envs.BadInput, match="--lora-adapter-path .*first-model") as told:
        train(sft, tmp_path / "second", **flags)
    assert "\n" not in str(told.value)
    for path in ("nowhere", TINY):
        with pytest.raises(ValueError, match=f"--lora-adapter-path {path}: .*adapter_"):
            train(sft, tmp_path / "third", **flags | dict(lora_adapter_path=path))


# Validation, and the checkpoint with the lowest loss


BACKWARDS = [(f"{a} {b} -> {c}", f"{c} + {b} = {a}") for a, b, c in (
    (1, 5, 9), (2, 7, 8), (5, 3, 4), (3, 4, 7), (9, 2, 5), (6, 6, 1), (8, 3, 2))]


@pytest.fixture
def overfitting(tmp_path):
    """Flags with which val/loss falls to step 7 and rises from there on: a form to learn, and few rows."""
    (tmp_path / "val").mkdir()
    return dict(model=TINY, train_files=(str(write_rows(tmp_path, "jsonl", BACKWARDS[:3])),),
                val_files=(str(write_rows(tmp_path / "val", "jsonl", BACKWARDS[3:])),), batch_size=3,
                steps=14, learning_rate=2e-3, schedule="constant", eval_every=1, checkpoint_every=2)


def checkpoints(folder):
    """Numbers of the steps whose checkpoints there are, and what state.json says of them."""
    steps = sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    return steps, json.loads((folder / "checkpoints" / "state.json").read_text())


@pytest.mark.parametrize("keep", slow_but(1, [2, 1, 0]))
def test_the_best_checkpoint_is_named_and_kept(keep, overfitting, tmp_path):
    folder = train(sft, tmp_path / "run", keep_checkpoints=keep, **overfitting)
    losses = [record["val/loss"] for record in records(folder)]
    best = losses.index(min(losses))
    assert best == 7 and losses[7] < losses[14] - 0.3 and losses[7] < losses[0] - 1
    steps, named = checkpoints(folder)
    assert steps == {1: [7, 14], 2: [7, 12, 14], 0: [*range(1, 9), 10, 12, 14]}[keep]
    assert named == {"last": "step_000014", "best": "step_000007"}
    again = train(sft, tmp_path / "again", **overfitting | dict(
        model=str(folder / "checkpoints" / "step_000007"), steps=1, learning_rate=0.1, warmup_steps=0))
    assert records(again)[0]["val/loss"] == pytest.approx(losses[7], rel=1e-6)
    assert checkpoints(again)[1]["best"] == "step_000001"  # the start has none, though its loss is lower
    assert validate(folder)["ok"]


@pytest.mark.parametrize(("flags", "evaluated"), slow_but(2, [
    (dict(eval_every=4), [0, 3, 4, 5, 8, 9]), (dict(eval_every=0), [0, 9]),
    (dict(eval_every=99, batch_size=25), [*range(10)])]))
def test_validation_comes_before_and_after_and_in_between(flags, evaluated, tmp_path):
    """Ten rows in batches of four: the epochs end in the steps 3, 5 and 8."""
    path = write_rows(tmp_path, "jsonl", (ROWS + BACKWARDS)[:11])
    folder = train(sft, tmp_path / "run", model=TINY, train_files=(str(path),), steps=9, log_every=2,
                   checkpoint_every=4, **dict(batch_size=4) | flags)
    assert [record["iteration"] for record in records(folder) if "val/loss" in record] == evaluated
    logged = {0, 2, 4, 6, 8, *evaluated}
    assert [record["iteration"] for record in records(folder)] == sorted(logged)
    assert (records(folder)[0]["data/rows"], records(folder)[0]["data/held_out"]) == (10, 1)
    assert not any("data/rows" in record for record in records(folder)[1:])


def test_a_record_holds_the_mean_loss_since_the_one_before(tmp_path):
    fine, coarse = (train(sft, tmp_path / str(every), log_every=every, checkpoint_every=6, eval_every=0,
                          steps=6) for every in (1, 3))
    for name in ("train/loss", "train/grad_norm"):
        values = [record[name] for record in records(fine)[1:]]
        assert [record[name] for record in records(coarse)[1:]] == pytest.approx(
            [sum(values[:3]) / 3, sum(values[3:]) / 3])


def test_a_run_without_held_out_rows(tmp_path):
    folder = train(sft, tmp_path / "run", model=TINY, train_files=(str(write_rows(tmp_path, "jsonl")),),
                   val_ratio=0.0, batch_size=7, eval_every=1)
    assert not [key for record in records(folder) for key in record if key.startswith("val/")]
    assert (records(folder)[0]["data/rows"], records(folder)[0]["data/held_out"]) == (7, 0)
    assert [record["train/epoch"] for record in records(folder)[1:]] == [1, 2, 3, 4]
    assert checkpoints(folder) == ([2, 4], {"last": LAST})
    card = (tmp_path / "run-model" / "README.md").read_text()
    assert f"train/loss | {records(folder)[-1]['train/loss']:.3f}" in card and "val/loss" not in card
    assert validate(folder)["ok"]


# Epochs, defaults, metrics


@pytest.mark.parametrize(("epochs", "batch_size", "steps", "seen"), [
    (2, 3, 4, {2}), (0.5, 3, 1, {0, 1}), (1, 5, 2, {1, 2})])
def test_epochs_decide_how_often_a_row_is_seen(epochs, batch_size, steps, seen, tmp_path, monkeypatch):
    """... once in each, in an order of its own."""
    order, cut = [], sft.batches

    def watched(rows, *rest):
        if torch.is_grad_enabled():
            order.extend(tuple(ids) for ids, _ in rows)
        return cut(rows, *rest)

    monkeypatch.setattr(sft, "batches", watched)
    rows = (str(write_rows(tmp_path, "jsonl", ROWS[:6])),)
    folder = train(sft, tmp_path / "run", train_files=rows, val_files=rows, model=TINY, batch_size=batch_size,
                   steps=0, epochs=epochs, checkpoint_every=1, eval_every=0)
    assert records(folder)[-1]["iteration"] == steps and len(order) == steps * batch_size
    assert records(folder)[-1]["train/epoch"] == pytest.approx(steps * batch_size / 6)
    assert {*map(order.count, order), *[0] * (len(set(order)) < 6)} == seen
    if epochs == 2:
        assert set(order[:6]) == set(order[6:]) and order[:6] != order[6:]


@pytest.mark.parametrize("form", slow_but(1, [[f"--model={TINY}"], ["--model", TINY], []]))
def test_flags_win_over_the_defaults_of_the_command_line(form, tmp_path, capsys):
    words = ["--train-files", write_rows(tmp_path, "jsonl"), "--batch-size", 2, "--warmup-steps", 1,
             "--steps", 1, "--run-dir", tmp_path / "run", "--output-dir", tmp_path / "model"]
    assert command_line("sft.py", *words, *form) == 0, capsys.readouterr().err
    args = log_lines(tmp_path / "run")[0]["meta"]["args"]
    given = dict(train_files=[str(tmp_path / "rows.jsonl")], batch_size=2, warmup_steps=1, steps=1,
                 run_dir=str(tmp_path / "run"), output_dir=str(tmp_path / "model"),
                 model=TINY if form else "")
    expected = dataclasses.asdict(sft.Args()) | (sft.REAL_MODEL if form else {}) | given
    assert args == json.loads(json.dumps(expected))
    assert (tmp_path / "model" / "config.json").is_file() and validate(tmp_path / "run")["ok"]


@pytest.mark.parametrize("form", slow_but(2, [[], ["--model", "some/model"], ["--model=some/model"]]))
def test_help_shows_the_defaults_that_would_apply(form, capsys):
    assert command_line("sft.py", *form, "--help") == 0
    said = capsys.readouterr().out
    assert "--learning-rate" in said and ("2e-06" in said) is bool(form) and ("0.005" in said) is not form


def test_padding_and_tokens_are_counted(tmp_path):
    """The rows by hand: bos, prompt, `:`, response without `=` and `;`, eos."""
    lengths = [len(f"<bos> {prompt} : {response} <eos>".replace("=", "").replace(";", "").split())
               for prompt, response in ROWS]
    rows = (str(write_rows(tmp_path, "jsonl")),)
    total, longest, shares = sum(lengths), max(lengths), []
    for name, flags in dict(one=dict(microbatch_tokens=1), all={}, packed=dict(packing=True)).items():
        folder = train(sft, tmp_path / name, train_files=rows, val_files=rows, model=TINY, batch_size=7,
                       eval_every=0, steps=2, checkpoint_every=2, **flags)
        before, *after = records(folder)
        assert before["env_steps"] == 0 and [record["env_steps"] for record in after] == [total, 2 * total]
        assert all(0 < record["train/throughput"] < 1e9 for record in after)
        for record in after:
            assert record["train/throughput"] == pytest.approx(total / record["time/update"], rel=1e-6)
            assert record["train/global_step"] == record["opt_steps"] == record["iteration"]
        assert len({record["train/padding"] for record in after}) == 1
        shares.append(after[-1]["train/padding"])
    assert shares == [0, pytest.approx(1 - total / (7 * longest)), 0] and 0 < shares[1] < 0.25


# Continuing a run


CHATS = [[dict(role="user", content=prompt), dict(role="assistant", content=response)]
         for prompt, response in ROWS]
FILES = dict(train_files=("rows",))
CONTINUED = {
    "packing": dict(packing=True, microbatch_tokens=130),
    "messages": dict(train_files=("chats",), messages_key="messages", steps=0, epochs=1.4, schedule="wsd"),
    "val-files": dict(val_files=("val", "rows"), train_files=("rows", "val"), dtype="bfloat16"),
    "lora": dict(lora_rank=2, learning_rate=1e-2),
    "lora-bf16": dict(lora_rank=2, learning_rate=1e-2, dtype="bfloat16", packing=True,
                      gradient_checkpointing=True),
    "lora-vocabulary": dict(lora_rank=2, learning_rate=1e-2, lora_exclude_modules="",
                            lora_target_modules="q_proj,lm_head,embed_tokens"),
    "lora-adapter": dict(lora_adapter_path="adapter", learning_rate=1e-2),
}
QUICK = {"packing", "lora"}


def in_files(tmp_path, flags):
    """The flags with paths in place of names of what is written there."""
    (tmp_path / "val").mkdir()
    chats = tmp_path / "chats.jsonl"
    two = [chat + CHATS[number - 1] for number, chat in enumerate(CHATS)]
    chats.write_text("".join(json.dumps(dict(messages=messages)) + "\n" for messages in CHATS + two))
    paths = dict(rows=str(write_rows(tmp_path, "parquet")), chats=str(chats),
                 val=str(write_rows(tmp_path / "val", "jsonl", BACKWARDS)))
    if "lora_adapter_path" in flags:
        flags = flags | dict(lora_adapter_path=str(tmp_path / "first-model"))
        train(sft, tmp_path / "first", model=TINY, train_files=(paths["val"],), lora_rank=3, steps=2)
    return dict(model=TINY, batch_size=5, keep_checkpoints=0) | FILES | flags | {
        name: tuple(paths[path] for path in flags.get(name, FILES.get(name, ())))
        for name in ("train_files", "val_files")}


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CONTINUED])
def test_a_run_that_is_interrupted_within_an_epoch_goes_on_bit_for_bit(case, tmp_path):
    flags = in_files(tmp_path, CONTINUED[case])
    halves = in_halves(sft, tmp_path, **flags)
    assert records(halves)[-2]["train/epoch"] % 1
    # Rows are encoded again where their file is gone.
    if case == "packing":
        with InterruptAt(sft, 3), pytest.raises(SystemExit):
            train(sft, tmp_path / "again", **flags)
        shutil.rmtree(tmp_path / "again" / "data")
        same_end(tmp_path / "whole", train(sft, tmp_path / "again", **flags))
    exported = [load_file(next((tmp_path / f"{name}-model").glob("*model.safetensors")))
                for name in ("whole", "halves")]
    same_tree(*exported)


# Data, tokenizer and export


def reference_row(model, tokenizer, prompt, response):
    """Summed -log p of a row's response and eos, and their number, by a plain forward pass in float64."""
    before = tokenizer(f"<bos> {prompt} :", add_special_tokens=False).input_ids
    after = tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    logits = model(torch.tensor([before + after])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    total = -sum(logprobs[len(before) + t - 1, token] for t, token in enumerate(after))
    return total.item(), len(after)


@pytest.mark.parametrize(("kind", "chat"), [("jsonl", False), ("parquet", True)])
def test_the_loss_is_that_of_response_and_eos_alone(kind, chat, tmp_path):
    """All rows but one are the first batch; the other one is the held-out side."""
    path = write_rows(tmp_path, kind, chat=chat)
    folder = train(sft, tmp_path / "run", train_files=(str(path),), model=TINY, batch_size=len(ROWS) - 1,
                   steps=1, eval_every=0, checkpoint_every=1)
    model = AutoModelForCausalLM.from_pretrained(TINY).double()
    with torch.no_grad():
        totals = [reference_row(model, AutoTokenizer.from_pretrained(TINY), *row) for row in ROWS]
    before, after = records(folder)
    (held_out,) = [row for row in totals if before["val/loss"] == pytest.approx(row[0] / row[1], rel=1e-4)]
    totals.remove(held_out)
    expected = sum(total for total, _ in totals) / sum(n for _, n in totals)
    assert after["train/loss"] == pytest.approx(expected, rel=1e-4)
    assert after["val/loss"] != before["val/loss"]
    assert validate(folder)["ok"]


def test_the_exported_model_stands_alone(tmp_path, capsys):
    folder = train(sft, tmp_path / "run")
    out = tmp_path / "run-model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    trained = load_file(folder / "checkpoints" / LAST / "model.safetensors")
    exported = load_file(out / "model.safetensors")
    same_tree(trained, exported)
    assert model.config.tie_word_embeddings
    assert model.num_parameters() == sum(tensor.numel() for tensor in trained.values())
    words = "6 18 14 -> 38 :".split()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "6 18 14 -> 38"}],
                                           add_generation_prompt=True)["input_ids"]
    assert prompt == [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(words)]
    assert len(set(prompt)) == 7 and tokenizer.unk_token_id not in prompt
    card = (out / "README.md").read_text()
    assert f"val/loss | {records(folder)[-1]['val/loss']:.3f}" in card
    # What was there before is kept beside it.
    train(sft, tmp_path / "again", output_dir=str(out), seed=2)
    kept = load_file(tmp_path / "run-model.previous" / "model.safetensors")
    same_tree(kept, exported)
    with pytest.raises(AssertionError):
        same_tree(kept, load_file(out / "model.safetensors"))
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_every_solution_of_the_environment_survives_the_tokenizer(countdown_tiny):
    tokenizer, env = countdown_tiny[1], envs.make("countdown", skill="mixed")
    assert len(tokenizer) == len(env.vocabulary) + 4
    for index in range(300):
        text = env.solution(env.task("train", index))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer("18 + 14 = 32; 32 + 6 = 38", add_special_tokens=False).input_ids) == 8


def test_texts_of_any_words_get_a_tokenizer_of_bytes(tmp_path):
    rows = [("What is two and two?", "Four, naïvely: 4 €."), ("And three?", "Five.\n")] * 3
    path = write_rows(tmp_path, "jsonl", rows)
    folder = train(sft, tmp_path / "run", train_files=(str(path),), batch_size=2, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run-model")
    for text in rows[0]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert validate(folder)["ok"]


# Slow: processes of their own


@pytest.mark.slow
def test_kills_while_rows_are_encoded_and_later_change_nothing(tmp_path):
    rng, env = random.Random(os.environ.get("KILLS_SEED", "1")), envs.make("countdown", skill="mixed")
    tasks = [env.task("train", index) for index in range(4000)]
    rows = [(task.messages[-1]["content"], env.solution(task)) for task in tasks]
    flags = ["--model", TINY, "--train-files", write_rows(tmp_path, "jsonl", rows), "--packing",
             "--batch-size", 16, "--dtype", "float32", "--learning-rate", 1e-3, "--steps", 60,
             "--eval-tasks", 40, "--eval-every", 6, "--log-every", 3, "--checkpoint-every", 2]

    def start(name):
        folder, out = tmp_path / name, tmp_path / f"{name}-model"
        return folder, process("sft.py", *flags, "--run-dir", folder, "--output-dir", out)

    for moment in ("encoding", "log", "writing"):
        folder, run = start("killed")
        assert kill_at(moment, run, folder, rng, pause=0.3 if moment == "encoding" else 0.01)
        assert moment != "encoding" or any((folder / "data").glob(".train.arrow.writing"))
    for name in ("killed", "whole"):
        folder, run = start(name)
        output, _ = run.communicate(timeout=600)
        assert run.returncode == 0, output
    same_end(tmp_path / "killed", folder, "step_000060")
    assert checkpoints(tmp_path / "killed") == checkpoints(folder)
    assert validate(tmp_path / "killed")["ok"] and 1 <= validate(tmp_path / "killed")["resumes"] <= 2
    same_tree(*(load_file(tmp_path / f"{name}-model" / "model.safetensors") for name in ("whole", "killed")))
    assert not list((tmp_path / "killed" / "data").glob(".*"))


def test_options_that_are_countdowns_by_default_are_for_countdown_alone():
    assert sft.Args().env_options == ("skill=mixed",) == sft.Args(env_kwargs=("skill=mixed",)).env_options
    assert sft.Args(env="logic").env_options == () == sft.Args(env_kwargs=()).env_options
    assert sft.Args(env="logic", env_kwargs=("types=sudoku",)).env_options == ("types=sudoku",)
