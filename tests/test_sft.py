"""sft.py: the loss and its gradient in every cut of a batch, a step replayed in float64, LoRA, validation."""

import dataclasses
import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, Lfm2Config, LlamaConfig, MambaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import envs
import sft
from envs.countdown import Countdown
from tests.run_folders import TINY, command_line, killed_after, records, same_end, told, train, write_jsonl
from tools import merge_adapter
from tools.validate_train_log import validate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied heads and Conv1D
torch.set_num_threads(1)


ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"),
        ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"), ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60"),
        ("2 5 -> 7", "2 + 5 = 7"), ("8 8 1 -> 1", "8 - 8 = 0; 1 - 0 = 1")]


def write_rows(tmp_path, rows=ROWS):
    return write_jsonl(tmp_path / "rows.jsonl", [dict(prompt=p, response=r) for p, r in rows])


KINDS = {
    "llama": (LlamaConfig, {}),
    "gpt2": (GPT2Config, dict(n_embd=16, n_head=4, n_layer=2)),
    # The rows of these would leak: a state that goes on from one to the next, a convolution.
    "mamba": (MambaConfig, dict(state_size=4)),
    "lfm2": (Lfm2Config, dict(layer_types=["conv", "full_attention"])),
    # With a part for pictures, which sees no gradient.
    "gemma3": (lambda **text: transformers.Gemma3Config(text_config=text, vision_config=dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
        patch_size=14), mm_tokens_per_image=4, eos_token_id=2), dict(head_dim=16)),
}


def write_model(folder, kind, **options):
    """A model of random weights, biases and norms included, wide enough that what a token sees matters."""
    torch.manual_seed(0)
    config, own = KINDS[kind]
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
    name = write_jsonl(tmp_path / "chats.jsonl", [dict(messages=messages) for messages in chats])
    return dict(train_files=(name,), messages_key="messages", val_ratio=0.0, batch_size=len(chats))


def one_step(folder, **flags):
    """The loss of a step, its gradient as the first moment keeps it, clipped, and the rows (ids, mask)."""
    train(sft, folder, **dict(steps=1, eval_every=0, eval_tasks=1, eval_samples=1,
                           checkpoint_every=1, warmup_steps=0) | flags)
    state = torch.load(folder / "checkpoints" / "step_000001" / "trainer_state.pt")["optimizer"]["state"]
    gradient = torch.cat([state[name]["exp_avg"].flatten().double() / 0.1 for name in sorted(state)])
    return records(folder)[-1]["train/loss"], gradient, rows_of(folder)


def rows_of(folder):
    rows = datasets.Dataset.from_file(str(folder / "data" / "train.arrow"))
    return [(row["ids"], row["mask"]) for row in rows]


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
    weights = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    gradient = torch.cat([weight.grad.flatten() for _, weight in weights])
    return loss.item(), gradient / max(1.0, float(gradient.norm()))


def assert_close(found, expected, tolerance=1e-5):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert (found[1] - expected[1]).norm() < tolerance * expected[1].norm()


CUTS = {"alone": dict(microbatch_tokens=1), "padded": dict(microbatch_tokens=90), "whole": {},
        "packed": dict(packing=True, microbatch_tokens=130), "one-row": dict(packing=True)}


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_an_adapted_vocabulary_has_the_gradient_of_the_whole_model(tmp_path):
    """The loss goes round the model's own forward pass, so an adapter of the head must be met on that way."""
    flags = write_chats(tmp_path) | dict(model=write_model(tmp_path / "model", "llama"))
    first = train(sft, tmp_path / "first", **flags, lora_rank=2, learning_rate=0.1, steps=2,
                  lora_target_modules="q_proj,lm_head,embed_tokens")
    assert records(first)[-1]["train/loss"] != records(first)[1]["train/loss"]
    adapter = str(first / "checkpoints/step_000002")
    assert modules_of(load_file(f"{adapter}/adapter_model.safetensors")) == {
        "q_proj", "lm_head", "embed_tokens"}
    for cut in ("padded", "packed"):
        *found, rows = one_step(tmp_path / cut, **flags, lora_adapter_path=adapter, **CUTS[cut])
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(flags["model"]), adapter,
                                               is_trainable=True)
        assert_close(found, reference(model, rows), 1e-4)


def checkpoint(folder, step):
    """-> the model in float64, its trained weights, the state of the optimiser"""
    place = folder / "checkpoints" / f"step_{step:06d}"
    adapted = (place / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(TINY if adapted else place)
    model = peft.PeftModel.from_pretrained(model, place, is_trainable=True) if adapted else model
    weights = {name: weight for name, weight in model.double().named_parameters() if weight.requires_grad}
    return model, weights, torch.load(place / "trainer_state.pt")["optimizer"]["state"]


@pytest.mark.parametrize("case", [
    dict(microbatch_tokens=20, weight_decay=3.0, beta2=0.7),
    dict(lora_rank=2, learning_rate=1e-2, gradient_checkpointing=True)], ids=["small-passes", "lora"])
def test_a_step_of_sft_is_the_update_that_is_written(case, tmp_path):
    """Each step learns all rows, and the second one is held against the first one's checkpoint."""
    flags = dict(steps=2, batch_size=len(ROWS), val_ratio=0.0, eval_every=0, checkpoint_every=1,
                 warmup_steps=4, model=TINY, train_files=(write_rows(tmp_path),)) | case
    folder = train(sft, tmp_path / "run", **flags)
    args, record = sft.Args(**flags), records(folder)[-1]
    rate = args.learning_rate * 2 / 4

    model, weights, moments = checkpoint(folder, 1)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW([dict(params=[weight], weight_decay=args.weight_decay * (weight.ndim > 1))
                                   for weight in weights.values()], lr=rate, betas=(0.9, args.beta2))
    for name, weight in weights.items():
        optimizer.state[weight] = {key: x.double() if x.ndim else x for key, x in moments[name].items()}
    loss, _ = reference(model, rows_of(folder))
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimizer.step()

    def near(found, expected, tolerance):
        one, other = (torch.cat([x[name].detach().double().flatten() for name in weights])
                      for x in (found, expected))
        assert (one - other).norm() < tolerance * other.norm()

    _, after, moments = checkpoint(folder, 2)
    for key in ("exp_avg", "exp_avg_sq"):
        near({name: moments[name][key] for name in weights},
             {name: optimizer.state[weight][key] for name, weight in weights.items()}, 1e-4)
    near(*({name: x[name] - before[name] for name in weights} for x in (after, weights)), 2e-3)
    found = [record[f"train/{name}"] for name in ("loss", "grad_norm", "learning_rate")]
    assert found == pytest.approx([loss, norm.item(), rate], rel=1e-4)


@pytest.mark.parametrize("kind", ["mamba", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_model_whose_rows_would_leak_is_refused(kind, tmp_path):
    model = write_model(tmp_path / "model", kind)
    flags = dict(model=model, dtype="bfloat16", steps=1, train_files=(write_rows(tmp_path),))
    with pytest.raises(envs.BadInput, match=f"--packing: rows of {model} change one another"):
        train(sft, tmp_path / "run", packing=True, **flags)
    assert not (tmp_path / "run" / "train_log.jsonl").read_bytes()
    train(sft, tmp_path / "run", **flags)  # without it, it learns


@pytest.mark.parametrize(("chunk_elements", "sizes"), [
    (10**6, [23]), (4 * 50 + 7, [4, 4, 4, 4, 4, 3] * 2), (7, [1] * 46)])  # tokens; each chunk twice
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_loss_in_chunks_is_the_cross_entropy(dtype, tolerance, chunk_elements, sizes):
    torch.manual_seed(0)
    head, weight = torch.nn.Linear(8, 50).to(dtype), torch.rand(23)
    hidden, targets = torch.randn(23, 8, dtype=dtype, requires_grad=True), torch.randint(50, (23,))
    seen, kept = [], []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    def gradients_of(losses):
        return torch.autograd.grad((weight * losses).sum(), [hidden, *head.parameters()])

    expected = functional.cross_entropy(head(hidden).float(), targets, reduction="none")
    head.register_forward_hook(lambda module, arguments, logits: seen.append(len(logits)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = sft.token_losses(hidden, head, targets, chunk_elements)
    assert losses.shape == (23,) and losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    for one, other in zip(gradients_of(losses), gradients_of(expected), strict=True):
        assert one.dtype == dtype and (one - other).float().norm() <= tolerance * other.float().norm()
    assert sorted(seen) == sorted(sizes)
    assert len(sizes) == 1 or max(kept, default=0) < 23 * 50 > sum(kept)  # no logits wait


def test_gradient_checkpointing_recomputes_the_layers_and_changes_nothing(tmp_path, monkeypatch):
    """... with dropout in the configuration, which stays off: a step's loss is val/loss before it."""
    rows = (write_rows(tmp_path, ROWS[:3]),)
    flags = dict(model=write_model(tmp_path / "model", "llama", attention_dropout=0.5), lora_rank=2,
                 train_files=rows, val_files=rows, packing=True, batch_size=3, steps=2)
    computed, forward = Counter(), LlamaMLP.forward

    def counted(*given):
        computed[recomputes, torch.is_grad_enabled()] += 1
        return forward(*given)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    monkeypatch.setattr(sft, "is_repeated", lambda train, val: np.zeros(len(val), bool))  # the same file
    for recomputes in (False, True):
        train(sft, tmp_path / str(recomputes), gradient_checkpointing=recomputes, **flags)
    assert computed[True, True] == 2 * computed[False, True] > 0
    assert computed[True, False] == computed[False, False]  # validation is not computed again
    same_end(tmp_path / "False", tmp_path / "True", "step_000002")
    before, after, _ = records(tmp_path / "True")
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


def modules_of(adapter):
    """The names of what the tensors of an adapter adapt."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name}


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    """A finished run that adapts a copy of countdown-tiny to rows. -> its flags, its folder, the adapter's"""
    base = shutil.copytree(TINY, tmp_path_factory.mktemp("adapting") / "base")
    flags = dict(model=str(base), lora_rank=4, learning_rate=1e-2, train_files=(write_rows(base.parent),))
    before, folder = [path.read_bytes() for path in base.iterdir()], base.parent / "run"
    train(sft, folder, dtype="bfloat16", packing=True, **flags)
    assert [path.read_bytes() for path in base.iterdir()] == before
    return flags, folder, folder / "checkpoints/step_000004"


def test_lora_trains_the_adapter_and_nothing_else_and_peft_merges_it(adapting, tmp_path, capsys):
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

    merged = told(capsys, merge_adapter.main, "--adapter", out, "--output-dir", tmp_path / "merged")
    assert merged["adapter_effect"] > 0.1


@pytest.mark.slow
def test_an_adapter_is_gone_on_from_and_must_be_of_the_same_model(adapting, tmp_path):
    flags, first, made = adapting
    adapter = str(shutil.copytree(made, tmp_path / "adapter"))
    flags = flags | dict(lora_rank=0, lora_adapter_path=adapter, lora_alpha=1, dtype="bfloat16", packing=True,
                         steps=2)
    with pytest.raises(envs.BadInput, match=f"--lora-adapter-path {adapter}: no adapter for"):
        train(sft, tmp_path / "other", **flags | dict(model=write_model(tmp_path / "another", "llama")))

    folder = train(sft, tmp_path / "second", **flags)
    before, after = records(first)[-1], records(folder)
    assert after[0]["val/loss"] == before["val/loss"] != records(first)[0]["val/loss"]
    assert after[-1]["val/loss"] != after[0]["val/loss"]
    second = folder / "checkpoints/step_000002"
    config = json.loads((second / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    # Another adapter at its place would make the run another run.
    shutil.copy(second / "adapter_model.safetensors", adapter)
    with pytest.raises(envs.BadInput, match="model_sha256"):
        train(sft, folder, **flags)


BACKWARDS = [(f"{a} {b} -> {c}", f"{c} + {b} = {a}") for a, b, c in (
    (1, 5, 9), (2, 7, 8), (5, 3, 4), (3, 4, 7), (9, 2, 5), (6, 6, 1), (8, 3, 2))]


def checkpoints(folder):
    """Numbers of the steps whose checkpoints there are, and what state.json says of them."""
    steps = sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    return steps, json.loads((folder / "checkpoints" / "state.json").read_text())


@pytest.mark.slow
def test_the_best_checkpoint_is_named_and_kept(tmp_path):
    """val/loss falls to step 7 and rises from there on: there is a form to learn, and there are few rows."""
    (tmp_path / "val").mkdir()
    flags = dict(model=TINY, train_files=(write_rows(tmp_path, BACKWARDS[:3]),), batch_size=3, steps=14,
                 val_files=(write_rows(tmp_path / "val", BACKWARDS[3:]),), learning_rate=2e-3,
                 schedule="constant", eval_every=1, checkpoint_every=2)
    folder = train(sft, tmp_path / "run", **flags)
    losses = [record["val/loss"] for record in records(folder)]
    best = losses.index(min(losses))
    assert best == 7 and losses[7] < losses[14] - 0.3 and losses[7] < losses[0] - 1
    named = {"last": "step_000014", "best": "step_000007"}
    assert checkpoints(folder) == ([7, 12, 14], named)

    # Those before it, each the best in its time, count among the regular ones neither then nor later.
    rare = train(sft, tmp_path / "rare", **flags | dict(checkpoint_every=5))
    assert checkpoints(rare) == ([5, 7, 10, 14], named)

    # A run that goes on from step 12 knows of it.
    killed = train(sft, killed_after(folder, tmp_path / "killed", 12), **flags)
    assert checkpoints(killed) == ([7, 12, 14], named)

    again = train(sft, tmp_path / "again", **flags | dict(
        model=str(folder / "checkpoints" / "step_000007"), steps=1, learning_rate=0.1, warmup_steps=0))
    assert records(again)[0]["val/loss"] == pytest.approx(losses[7], rel=1e-6)
    assert checkpoints(again)[1]["best"] == "step_000001"  # the start has none, though its loss is lower
    assert validate(folder)["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "evaluated"), [
    (dict(eval_every=4), [0, 3, 4, 5, 8, 9]), (dict(eval_every=0), [0, 9]),
    (dict(eval_every=99, batch_size=25), [*range(10)])])
def test_validation_comes_before_and_after_and_in_between(flags, evaluated, tmp_path):
    """Ten rows in batches of four: the epochs end in the steps 3, 5 and 8."""
    rows = (write_rows(tmp_path, (ROWS + BACKWARDS)[:11]),)
    folder = train(sft, tmp_path / "run", model=TINY, train_files=rows, steps=9, log_every=2,
                   checkpoint_every=4, **dict(batch_size=4) | flags)
    assert [record["iteration"] for record in records(folder) if "val/loss" in record] == evaluated
    assert [record["iteration"] for record in records(folder)] == sorted({0, 2, 4, 6, 8, *evaluated})
    assert (records(folder)[0]["data/rows"], records(folder)[0]["data/held_out"]) == (10, 1)
    assert not any("data/rows" in record for record in records(folder)[1:])


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own_and_none_need_be_held_out(tmp_path):
    """One row a step, at a rate of nothing: the losses tell which."""
    rows = (write_rows(tmp_path, ROWS[:6]),)
    flags = dict(train_files=rows, val_ratio=0.0, model=TINY, batch_size=1, steps=0, learning_rate=1e-30,
                 checkpoint_every=99)
    folder = train(sft, tmp_path / "run", **flags, epochs=2.5)
    losses = [round(record["train/loss"], 5) for record in records(folder)[1:]]
    assert [record["train/epoch"] for record in records(folder)[1:]] == pytest.approx(
        [n / 6 for n in range(1, 16)])
    assert len(set(losses)) == 6 and set(losses[:6]) == set(losses[6:12]) and losses[:6] != losses[6:12]
    assert len(set(losses[12:])) == 3
    assert not [key for record in records(folder) for key in record if key.startswith("val/")]
    assert checkpoints(folder)[1] == {"last": "step_000015"} and validate(folder)["ok"]


@pytest.mark.parametrize("form", [[f"--model={TINY}"], []])
def test_flags_win_over_the_defaults_of_the_command_line(form, tmp_path, capsys):
    words = ["--train-files", write_rows(tmp_path), "--batch-size", 2, "--warmup-steps", 1,
             "--steps", 1, "--run-dir", tmp_path / "run"]
    assert command_line("sft.py", *words, *form) == 0, capsys.readouterr().err
    args = json.loads((tmp_path / "run" / "train_log.jsonl").read_text().splitlines()[0])["meta"]["args"]
    given = dict(train_files=[str(tmp_path / "rows.jsonl")], batch_size=2, warmup_steps=1, steps=1,
                 run_dir=str(tmp_path / "run"), model=TINY if form else "")
    expected = dataclasses.asdict(sft.Args()) | (sft.REAL_MODEL if form else {}) | given
    assert args == json.loads(json.dumps(expected))
    assert validate(tmp_path / "run")["ok"]


def test_variables_of_other_systems_are_named(tmp_path, capsys, monkeypatch):
    for name in ("SFT_LR", "SFT_BATCH_SIZE", "SFT_XYZ", "NOT_SFT_SEED"):
        monkeypatch.setenv(name, "7")
    assert command_line("sft.py", "--help") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " is set, and not read" in line]
    assert said == [f"{name} is set, and not read: pass a flag (python sft.py --help)"
                    for name in ("SFT_BATCH_SIZE", "SFT_LR", "SFT_XYZ")]


@pytest.mark.slow
def test_a_weight_says_how_often_an_epoch_has_the_rows_of_a_file(tmp_path):
    """One row a step, at a rate of nothing: the losses tell which. Three rows twice, half of four once."""
    for name, rows in (("a", ROWS[:3]), ("b,b=1", ROWS[3:])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, rows)
    flags = dict(model=TINY, batch_size=1, steps=0, epochs=2, learning_rate=1e-30, val_ratio=0.0)
    plain = train(sft, tmp_path / "plain", train_files=(
        f"{tmp_path}/a/rows.jsonl,{tmp_path}/a/../a/rows.jsonl=1", f"{tmp_path}/b,b=1/rows.jsonl"), **flags)
    assert records(plain)[0]["data/rows"] == 10
    folder = train(sft, tmp_path / "run", train_files=(
        f"{tmp_path}/a/rows.jsonl=2", f"{tmp_path}/b,b=1/rows.jsonl"), **flags | dict(epochs=1))
    assert records(folder)[0]["data/rows"] == 10
    halved = train(sft, tmp_path / "half", **flags, train_files=(f"{tmp_path}/a/rows.jsonl=2.5",))
    losses = [round(record["train/loss"], 5) for record in records(halved)[1:]]
    counts = [[*map(epoch.count, {*losses})] for epoch in (losses[:8], losses[8:])]
    assert len(losses) == 16 and counts[0] == counts[1] and sorted(counts[0]) == [2, 3, 3]

    for files, says in ((("x.jsonl=0",), "x.jsonl=0: expected each file once, with a weight above 0"),
                        (("x.jsonl,x.jsonl=2",), "expected each file once"), (("x.jsonl=much",), "=much'")):
        with pytest.raises(envs.BadInput, match=says):
            train(sft, tmp_path / "bad", train_files=files)
    with pytest.raises(envs.BadInput, match="--val-files x.jsonl=2: expected files without weights"):
        train(sft, tmp_path / "bad", train_files=("x.jsonl",), val_files=("x.jsonl=2",))


@pytest.mark.parametrize(("words", "options"), [
    ("", ("skill=mixed",)), ("--env logic", ()), ("--env=logic --env-kwargs a=b", ("a=b",)),
    ("--env x.py:Own --env-kwargs skill=mixed", ("skill=mixed",)), ("--model a/b", ()),
    ("--model a/b --env-kwargs skill=mixed", ("skill=mixed",))])
def test_options_that_are_given_are_kept_and_those_of_the_default_run_are_of_no_other(
        words, options, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sft.py", *words.split()])
    assert sft.read_flags().env_kwargs == options


@pytest.mark.slow
def test_padding_and_tokens_are_counted(tmp_path):
    """The rows by hand: bos, prompt, `:`, response without `=` and `;`, eos."""
    lengths = [len(f"<bos> {prompt} : {response} <eos>".replace("=", "").replace(";", "").split())
               for prompt, response in ROWS]
    rows = (write_rows(tmp_path),)
    total, longest, shares = sum(lengths), max(lengths), []
    for name, flags in dict(one=dict(microbatch_tokens=1), all={}, packed=dict(packing=True)).items():
        folder = train(sft, tmp_path / name, train_files=rows, val_ratio=0.0, model=TINY, batch_size=7,
                       eval_every=0, steps=2, checkpoint_every=2, **flags)
        _, *after = records(folder)
        assert [record["env_steps"] for record in records(folder)] == [0, total, 2 * total]
        for record in after:
            assert record["train/throughput"] == pytest.approx(total / record["time/update"], rel=1e-6)
        shares.append(after[-1]["train/padding"])
    assert shares == [0, pytest.approx(1 - total / (7 * longest)), 0] and 0 < shares[1] < 0.25


@pytest.mark.slow
def test_a_run_goes_on_between_two_records(tmp_path):
    """The record after the checkpoint of step 3 speaks of that step, too."""
    flags = dict(model=TINY, train_files=(write_rows(tmp_path),), steps=4, batch_size=2, eval_every=0,
                 log_every=4, checkpoint_every=1, keep_checkpoints=0)
    whole = train(sft, tmp_path / "whole", **flags)
    halves = train(sft, killed_after(whole, tmp_path / "halves", 3), **flags)
    same_end(whole, halves)
    each = records(train(sft, tmp_path / "each", **flags | dict(log_every=1)))[1:]
    mean = sum(record["train/loss"] for record in each) / 4
    assert records(whole)[-1]["train/loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_template_or_file(tmp_path):
    template, rows = shutil.copy(f"{TINY}/chat_template.jinja", tmp_path), write_rows(tmp_path)
    flags = dict(model=TINY, train_files=(rows,), chat_template=template, steps=1, eval_every=0)
    folder = train(sft, tmp_path / "run", **flags)
    for path in (Path(template), Path(rows)):
        before = path.read_text()
        path.write_text(before + "\n")
        with pytest.raises(envs.BadInput, match=r"files_and_template_sha256 \w+ \(it was"):
            train(sft, folder, **flags)
        path.write_text(before)
    train(sft, folder, **flags)


def test_accuracy_is_that_of_replies_that_end_and_greedy_ones_are_transformers(tmp_path):
    """A reply of three numbers has 8 tokens and its eos."""
    options, found = ("test_tasks=16", "min_operands=3", "max_operands=3"), {}
    env, expected = envs.make("countdown", **envs.parse_options(options)), []
    model, tokenizer = (kind.from_pretrained(TINY) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for index in range(16):
        task = env.task("test", index)
        prompt = tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(prompt.input_ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[0]
        text = tokenizer.decode(ids[prompt.input_ids.shape[1]:], skip_special_tokens=True)
        expected.append(env.start(task, 1).step(text).info["correct"])
    for limit in (8, 9):
        folder = train(sft, tmp_path / f"{limit}", model=TINY, steps=1, env_kwargs=("skill=mixed", *options),
                       eval_tasks=16, eval_samples=2, eval_every=0, max_response_tokens=limit)
        start = records(folder)[0]
        found[limit] = [start[f"val/countdown/{name}"] for name in ("greedy", "pass@1", "pass@2")]
    assert found[8] == [0, 0, 0]
    assert 0.2 < found[9][0] == sum(expected) / 16 < 1 and 0 < found[9][1] < found[9][2] <= 2 * found[9][1]


class Last(Countdown):
    """Of the replies to a task, the last alone is right: the greedy one."""

    def score_group(self, task, conversations, steps):
        return [dataclasses.replace(step, info=dict(correct=float(step is steps[-1]))) for step in steps]


def test_the_greedy_reply_counts_in_no_other_share(tmp_path):
    folder = train(sft, tmp_path / "run", model=TINY, steps=1, env=f"{__file__}:Last", eval_every=0,
                   env_kwargs=("test_tasks=8",), eval_tasks=8, eval_samples=2, max_response_tokens=20)
    found = [records(folder)[0][f"val/countdown/{name}"] for name in ("greedy", "pass@1", "pass@2")]
    assert found == [1, 0, 0]


def test_a_conversation_is_cut_only_where_it_does_not_fit():
    """Words of one token each: the start has 3, a reply 3 with its eos, what is said to it 3."""
    tokenizer = sft.new_tokenizer(["hi", "a", ":", *"1234"])
    messages = [dict(role="user", content="hi")]
    for number in "1234":
        messages += [dict(role="assistant", content=f"a {number}"), dict(role="user", content=f"hi {number}")]

    def rows(most):
        found = sft.encode_demonstration(messages[:-1], 1, tokenizer, sft.Args(max_length=most),
                                         [tokenizer.eos_token_id])
        return [f"{tokenizer.decode(ids)} {sum(mask)}" for ids, mask in found]

    a, b, c, d = "<bos> hi : a 1 <eos>", " hi 1 : a 2 <eos>", " hi 2 : a 3 <eos>", " hi 3 : a 4 <eos>"
    after_a, after_b = (f"<bos> hi : a {number} <eos>" for number in "23")
    for most in (24, 100):
        assert rows(most) == [f"{a}{b}{c}{d} 12"]
    for most in (18, 23):  # the last reply stands after the two turns before it
        assert rows(most) == [f"{a}{b}{c} 9", f"{after_a}{c}{d} 3"]
    for most in (12, 17):
        assert rows(most) == [f"{a}{b} 6", f"{after_a}{c} 3", f"{after_b}{d} 3"]
