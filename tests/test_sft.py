"""sft.py: the loss and its gradient in every cut of a batch, LoRA, validation, and runs on the CPU.

How rows of data become tokens is in test_sft_data.py.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path

import datasets
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
    command_line,
    killed_after,
    log_lines,
    records,
    same_end,
    same_tree,
    slow_but,
    train,
)
from tools import merge_adapter
from tools.validate_train_log import validate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied heads and Conv1D
torch.set_num_threads(1)


ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"),
        ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"), ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60"),
        ("2 5 -> 7", "2 + 5 = 7"), ("8 8 1 -> 1", "8 - 8 = 0; 1 - 0 = 1")]


def write_rows(tmp_path, rows=ROWS):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(dict(prompt=prompt, response=response)) + "\n"
                            for prompt, response in rows))
    return str(path)


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


def write_model(folder, kind, **options):
    """A model of random weights, biases and norms included, wide enough that what a token sees matters."""
    torch.manual_seed(0)
    config, own = (KINDS | LEAKING)[kind]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_config(config(**dict(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5, pad_token_id=0, bos_token_id=1,
        eos_token_id=2) | own | options))
    for tensor in model.parameters():
        if tensor.ndim == 1:
            tensor.data += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_chats(tmp_path):
    """Conversations of one to three answers, so that what is learned has gaps."""
    chats = [[dict(role=role, content=text) for row in ROWS[n:n + 1 + n % 3]
              for role, text in zip(("user", "assistant"), row, strict=True)] for n in range(len(ROWS))]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(dict(messages=messages)) + "\n" for messages in chats))
    return dict(train_files=(str(path),), messages_key="messages", val_ratio=0.0, batch_size=len(chats))


def one_step(folder, **flags):
    """The loss of a step, its gradient as the first moment keeps it, clipped, and the rows (ids, mask)."""
    train(sft, folder, **dict(steps=1, eval_every=0, eval_tasks=1, eval_samples=1,
                           checkpoint_every=1, warmup_steps=0) | flags)
    state = torch.load(folder / "checkpoints" / "step_000001" / "trainer_state.pt")["optimizer"]["state"]
    rows = datasets.Dataset.from_file(str(folder / "data" / "train.arrow"))
    gradient = torch.cat([state[name]["exp_avg"].flatten().double() / 0.1 for name in sorted(state)])
    return records(folder)[-1]["train/loss"], gradient, [(row["ids"], row["mask"]) for row in rows]


def reference(model, rows):
    """Each row alone, in float64 and by plain attention.  -> loss, clipped gradient in one vector"""
    model, total = model.double().eval(), 0.0
    (model.get_base_model() if isinstance(model, peft.PeftModel) else model).set_attn_implementation("eager")
    for ids, mask in rows:
        chosen = [t for t in range(len(ids)) if mask[t]]
        logits = model(torch.tensor([ids])).logits[0]
        total = total + functional.cross_entropy(
            logits[[t - 1 for t in chosen]], torch.tensor(ids)[chosen], reduction="sum")
    loss = total / sum(sum(mask) for _, mask in rows)
    loss.backward()
    trained = sorted((name, p.grad.flatten()) for name, p in model.named_parameters() if p.grad is not None)
    gradient = torch.cat([grad for _, grad in trained])
    return loss.item(), gradient / max(1.0, float(gradient.norm()))


def assert_close(found, expected, tolerance=1e-5):
    """Loss and gradient, relative to their size."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert (found[1] - expected[1]).norm() < tolerance * expected[1].norm()


CUTS = {"alone": dict(microbatch_tokens=1), "padded": dict(microbatch_tokens=90), "whole": {},
        "packed": dict(packing=True, microbatch_tokens=130), "one-row": dict(packing=True)}


@pytest.mark.parametrize("kind", slow_but(["llama"], KINDS))
def test_every_cut_gives_the_loss_and_gradient_of_rows_alone(kind, tmp_path, monkeypatch):
    flags = write_chats(tmp_path) | dict(model=write_model(tmp_path / "model", kind))
    for cut, sizes in CUTS.items():
        *found, rows = one_step(tmp_path / cut, **flags, **sizes)
        if cut == "alone":
            expected = reference(AutoModelForCausalLM.from_pretrained(flags["model"]), rows)
            assert all(0 < sum(mask) < len(ids) - 1 for ids, mask in rows)
        assert_close(found, expected)
    # Kernels that skip what a mask would hide need a GPU: here the rows laid out for them go to another.
    monkeypatch.setattr(sft, "SKIPPING_KERNELS", ("sdpa",))
    *found, _ = one_step(tmp_path / "skipping", **flags, packing=True, microbatch_tokens=100)
    assert_close(found, expected)
    assert records(tmp_path / "skipping")[-1]["train/padding"] == 0


def test_an_adapted_vocabulary_has_the_gradient_of_the_whole_model(tmp_path):
    """The loss goes round the model's own forward pass, so an adapter of the head must be met on that way."""
    flags = write_chats(tmp_path) | dict(model=write_model(tmp_path / "model", "llama"))
    first = train(sft, tmp_path / "first", **flags, lora_rank=2, learning_rate=0.1, steps=2,
                  lora_target_modules="q_proj,lm_head,embed_tokens")
    assert records(first)[-1]["train/loss"] != records(first)[1]["train/loss"]
    adapter = f"{tmp_path}/first-model"
    assert modules_of(load_file(f"{adapter}/adapter_model.safetensors")) == {
        "q_proj", "lm_head", "embed_tokens"}
    for cut in ("padded", "packed"):
        *found, rows = one_step(tmp_path / cut, **flags, lora_adapter_path=adapter, **CUTS[cut])
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(flags["model"]), adapter,
                                               is_trainable=True)
        assert_close(found, reference(model, rows), 1e-4)


@pytest.mark.parametrize("kind", slow_but(["mamba"], LEAKING))
def test_a_model_whose_rows_would_leak_is_refused(kind, tmp_path, capfd):
    """The first rows are too long to share a packed row, and the later ones are not."""
    model, order = write_model(tmp_path / "model", kind), sft.permutation(1, 12)
    short = [(prompt, response) for prompt, response in ROWS if len(prompt) < 14][:4]
    rows = {int(index): ("1 1 -> 2", "1 + 1 = 2; " * 17) if place < 6 else short[place % 4]
            for place, index in enumerate(order)}
    flags = dict(model=model, dtype="bfloat16", val_ratio=0.0, steps=1, log_every=1, checkpoint_every=1,
                 train_files=(write_rows(tmp_path, [rows[n] for n in range(12)]),))
    with pytest.raises(envs.BadInput) as told:
        train(sft, tmp_path / "run", packing=True, **flags)
    said = str(told.value)
    assert said.startswith("--packing") and model in said and "\n" not in said
    assert not (tmp_path / "run" / "train_log.jsonl").read_bytes()
    train(sft, tmp_path / "run", **flags)  # without it, it learns


def test_packed_rows_are_kept_apart_by_the_mask_alone(tmp_path, monkeypatch):
    flags = dict(model=write_model(tmp_path / "model", "llama"), dtype="bfloat16", packing=True, steps=1,
                 train_files=(write_rows(tmp_path),))
    # It is the mask made of position_ids that keeps them apart.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(envs.BadInput, match="--packing"):
        train(sft, tmp_path / "leaking", **flags)


@pytest.mark.parametrize("chunk_elements", [10**6, 4 * 50 + 7, 7])
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


DROPOUT = {"llama": dict(attention_dropout=0.5),
           "gpt2": dict(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)}


@pytest.mark.parametrize(("kind", "lora"), [("llama", 2), pytest.param("gpt2", 0, marks=pytest.mark.slow)])
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
                    microbatch_tokens=130, gradient_checkpointing=checkpointing, steps=2,
                    eval_tasks=1)
        runs.append((run, sum(computed), len(computed) - sum(computed)))
        computed.clear()
    (one, grad, others), (other, twice, the_same) = runs
    assert twice == 2 * grad > 0 and the_same == others  # sampling is not computed again
    same_end(one, other, "step_000002")


def test_a_model_with_dropout_is_trained_without(tmp_path):
    folder = write_model(tmp_path / "model", "gpt2", **DROPOUT["gpt2"])
    rows = (write_rows(tmp_path, ROWS[:2]),)
    run = train(sft, tmp_path / "run", model=folder, train_files=rows, val_files=rows, batch_size=2, steps=1,
                eval_every=0, checkpoint_every=1)
    before, after = records(run)
    assert after["train/loss"] == pytest.approx(before["val/loss"], rel=1e-6)


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


def folder_hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def modules_of(adapter):
    """The names of what the tensors of an adapter adapt."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name}


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    """A finished run that adapts a copy of countdown-tiny to rows. -> its flags, its folder, the adapter's"""
    base = shutil.copytree(TINY, tmp_path_factory.mktemp("adapting") / "base")
    flags = dict(model=str(base), lora_rank=4, learning_rate=1e-2, train_files=(write_rows(base.parent),))
    before, folder = folder_hashes(base), base.parent / "run"
    train(sft, folder, dtype="bfloat16", packing=True, **flags)
    assert folder_hashes(base) == before
    return flags, folder, f"{folder}-model"


def test_lora_trains_the_adapter_and_nothing_else_and_peft_loads_and_merges_it(adapting, tmp_path, capsys):
    flags, folder, out = adapting
    adapter = load_file(f"{out}/adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 3 and all("lora_" in name for name in adapter)
    assert modules_of(adapter) == {f"{name}_proj" for name in ("q", "k", "v", "o", "up", "down", "gate")}
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert all(tensor.abs().max() > 0 for tensor in adapter.values())  # B, too, which starts at zero
    assert not list(Path(out).glob("model*.safetensors"))
    norm = math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in adapter.values()))
    assert records(folder)[-1]["train/weight_norm"] == pytest.approx(norm, rel=1e-5)
    assert records(folder)[-1]["train/loss"] < records(folder)[1]["train/loss"]
    assert flags["model"] in Path(out, "README.md").read_text()

    ids = AutoTokenizer.from_pretrained(out)("<bos> 6 18 14 -> 38 : 18 + 14", return_tensors="pt").input_ids
    merge_adapter.main(["--adapter", out, "--output-dir", str(tmp_path / "merged")])
    assert json.loads(capsys.readouterr().out)["modules"] == 7 * 3
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(flags["model"])(ids).logits
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert (loaded - base).abs().max() > 0.1
    torch.testing.assert_close(merged, loaded, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_gone_on_from(adapting, tmp_path):
    flags, first, made = adapting
    adapter = str(shutil.copytree(made, tmp_path / "adapter"))
    flags = flags | dict(lora_rank=0, lora_adapter_path=adapter, lora_alpha=1, dtype="bfloat16", packing=True,
                         steps=2)
    folder = train(sft, tmp_path / "second", **flags)
    before, after = records(first)[-1], records(folder)
    assert after[0]["val/loss"] == before["val/loss"] != records(first)[0]["val/loss"]
    assert after[-1]["val/loss"] != after[0]["val/loss"]
    config = json.loads((tmp_path / "second-model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert log_lines(folder)[0]["meta"]["args"]["lora_adapter_path"] == adapter
    # Another adapter at its place would make the run another run.
    shutil.copy(tmp_path / "second-model" / "adapter_model.safetensors", adapter)
    with pytest.raises(envs.BadInput, match="the model"):
        train(sft, folder, **flags)


def test_an_adapter_of_another_model_is_refused(adapting, tmp_path):
    flags, _, adapter = adapting
    flags = flags | dict(model=write_model(tmp_path / "other", "llama"), lora_rank=0)
    with pytest.raises(envs.BadInput, match="--lora-adapter-path .*run-model") as told:
        train(sft, tmp_path / "second", lora_adapter_path=adapter, **flags)
    assert "\n" not in str(told.value)
    for path in ("nowhere", TINY):
        with pytest.raises(ValueError, match=f"--lora-adapter-path {path}: .*adapter_"):
            train(sft, tmp_path / "third", lora_adapter_path=path, **flags)


BACKWARDS = [(f"{a} {b} -> {c}", f"{c} + {b} = {a}") for a, b, c in (
    (1, 5, 9), (2, 7, 8), (5, 3, 4), (3, 4, 7), (9, 2, 5), (6, 6, 1), (8, 3, 2))]


@pytest.fixture
def overfitting(tmp_path):
    """Flags with which val/loss falls to step 7 and rises from there on: a form to learn, and few rows."""
    (tmp_path / "val").mkdir()
    return dict(model=TINY, train_files=(write_rows(tmp_path, BACKWARDS[:3]),),
                val_files=(write_rows(tmp_path / "val", BACKWARDS[3:]),), batch_size=3,
                steps=14, learning_rate=2e-3, schedule="constant", eval_every=1, checkpoint_every=2)


def checkpoints(folder):
    """Numbers of the steps whose checkpoints there are, and what state.json says of them."""
    steps = sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    return steps, json.loads((folder / "checkpoints" / "state.json").read_text())


@pytest.mark.parametrize("keep", slow_but([2], [2, 1, 0]))
def test_the_best_checkpoint_is_named_and_kept(keep, overfitting, tmp_path):
    folder = train(sft, tmp_path / "run", keep_checkpoints=keep, **overfitting)
    losses = [record["val/loss"] for record in records(folder)]
    best = losses.index(min(losses))
    assert best == 7 and losses[7] < losses[14] - 0.3 and losses[7] < losses[0] - 1
    steps, named = checkpoints(folder)
    assert steps == {1: [7, 14], 2: [7, 12, 14], 0: [*range(1, 9), 10, 12, 14]}[keep]
    assert named == {"last": "step_000014", "best": "step_000007"}
    if keep != 1:  # a run that goes on from step 12 knows of it
        killed = train(sft, killed_after(folder, tmp_path / "killed", 12), keep_checkpoints=keep,
                       **overfitting | dict(output_dir=f"{folder}-model"))
        assert checkpoints(killed) == (steps, named)
    again = train(sft, tmp_path / "again", **overfitting | dict(
        model=str(folder / "checkpoints" / "step_000007"), steps=1, learning_rate=0.1, warmup_steps=0))
    assert records(again)[0]["val/loss"] == pytest.approx(losses[7], rel=1e-6)
    assert checkpoints(again)[1]["best"] == "step_000001"  # the start has none, though its loss is lower
    assert validate(folder)["ok"]


@pytest.mark.parametrize(("flags", "evaluated"), [
    (dict(eval_every=4), [0, 3, 4, 5, 8, 9]), (dict(eval_every=0), [0, 9]),
    (dict(eval_every=99, batch_size=25), [*range(10)])])
def test_validation_comes_before_and_after_and_in_between(flags, evaluated, tmp_path):
    """Ten rows in batches of four: the epochs end in the steps 3, 5 and 8."""
    path = write_rows(tmp_path, (ROWS + BACKWARDS)[:11])
    folder = train(sft, tmp_path / "run", model=TINY, train_files=(str(path),), steps=9, log_every=2,
                   checkpoint_every=4, **dict(batch_size=4) | flags)
    assert [record["iteration"] for record in records(folder) if "val/loss" in record] == evaluated
    logged = {0, 2, 4, 6, 8, *evaluated}
    assert [record["iteration"] for record in records(folder)] == sorted(logged)
    assert (records(folder)[0]["data/rows"], records(folder)[0]["data/held_out"]) == (10, 1)
    assert not any("data/rows" in record for record in records(folder)[1:])


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own_and_none_need_be_held_out(tmp_path):
    """One row a step, at a rate of nothing: the losses tell which."""
    rows = (write_rows(tmp_path, ROWS[:6]),)
    flags = dict(train_files=rows, val_ratio=0.0, model=TINY, batch_size=1, steps=0, learning_rate=1e-30)
    folder = train(sft, tmp_path / "run", **flags, epochs=2.5)
    losses = [round(record["train/loss"], 5) for record in records(folder)[1:]]
    assert [record["train/epoch"] for record in records(folder)[1:]] == pytest.approx(
        [n / 6 for n in range(1, 16)])
    assert len(set(losses)) == 6 and set(losses[:6]) == set(losses[6:12]) and losses[:6] != losses[6:12]
    assert len(set(losses[12:])) == 3

    assert not [key for record in records(folder) for key in record if key.startswith("val/")]
    assert (records(folder)[0]["data/rows"], records(folder)[0]["data/held_out"]) == (6, 0)
    assert checkpoints(folder)[1] == {"last": "step_000015"} and validate(folder)["ok"]
    card = (tmp_path / "run-model" / "README.md").read_text()
    assert f"train/loss | {records(folder)[-1]['train/loss']:.3f}" in card and "val/loss" not in card


@pytest.mark.parametrize("form", [[f"--model={TINY}"], []])
def test_flags_win_over_the_defaults_of_the_command_line(form, tmp_path, capsys):
    words = ["--train-files", write_rows(tmp_path), "--batch-size", 2, "--warmup-steps", 1,
             "--steps", 1, "--run-dir", tmp_path / "run", "--output-dir", tmp_path / "model"]
    assert command_line("sft.py", *words, *form) == 0, capsys.readouterr().err
    args = log_lines(tmp_path / "run")[0]["meta"]["args"]
    given = dict(train_files=[str(tmp_path / "rows.jsonl")], batch_size=2, warmup_steps=1, steps=1,
                 run_dir=str(tmp_path / "run"), output_dir=str(tmp_path / "model"),
                 model=TINY if form else "")
    expected = dataclasses.asdict(sft.Args()) | (sft.REAL_MODEL if form else {}) | given
    assert args == json.loads(json.dumps(expected))
    assert (tmp_path / "model" / "config.json").is_file() and validate(tmp_path / "run")["ok"]


def test_help_shows_the_defaults_that_would_apply(capsys):
    assert command_line("sft.py", "--model", "some/model", "--help") == 0
    said = capsys.readouterr().out
    assert "--learning-rate" in said and "2e-06" in said and "0.005" not in said


def test_padding_and_tokens_are_counted(tmp_path):
    """The rows by hand: bos, prompt, `:`, response without `=` and `;`, eos."""
    lengths = [len(f"<bos> {prompt} : {response} <eos>".replace("=", "").replace(";", "").split())
               for prompt, response in ROWS]
    rows = (write_rows(tmp_path),)
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
    train(sft, tmp_path / "again", output_dir=str(out), seed=2, steps=1, eval_every=0, eval_tasks=1)
    kept = load_file(tmp_path / "run-model.previous" / "model.safetensors")
    same_tree(kept, exported)
    with pytest.raises(AssertionError):
        same_tree(kept, load_file(out / "model.safetensors"))
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_texts_of_any_words_get_a_tokenizer_of_bytes(tmp_path):
    rows = [("What is two and two?", "Four, naïvely: 4 €."), ("And three?", "Five.\n")] * 3
    path = write_rows(tmp_path, rows)
    folder = train(sft, tmp_path / "run", train_files=(str(path),), batch_size=2, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run-model")
    for text in rows[0]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert validate(folder)["ok"]


def test_options_that_are_countdowns_by_default_are_for_countdown_alone():
    assert sft.Args().env_options == ("skill=mixed",) == sft.Args(env_kwargs=("skill=mixed",)).env_options
    assert sft.Args(env="logic").env_options == () == sft.Args(env_kwargs=()).env_options
    assert sft.Args(env="logic", env_kwargs=("types=sudoku",)).env_options == ("types=sudoku",)
