"""tools/merge_adapter.py: what it writes is base + adapter, and what it refuses it names, leaving nothing."""

import importlib.util
import json
import math
import os
import shutil
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from envs.code import trees
from tests import run_folders
from tests.run_folders import command_line, fork, full_disk, records, slow_but, told
from tools import merge_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, as odd adapters are made

TINY = Path(run_folders.TINY)
SIZES = dict(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOKENS = torch.arange(74).reshape(2, 37) % 37


def write_base(folder, kind=LlamaConfig, dtype=torch.float32, shard="1GB", seed=0, **options):
    """A small model with random weights, biases included, and no tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**SIZES | options))
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            tensor.data += 0.2 * torch.randn_like(tensor)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def write_adapter(folder, base, **options):
    """An adapter whose weights, B included, are random."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    modules = ["q_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(**dict(r=4, task_type="CAUSAL_LM", target_modules=modules) | options)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            # DoRA's magnitudes: a sign would turn rows round, which training does not.
            noise = torch.rand_like(tensor) if "magnitude" in name else torch.randn_like(tensor)
            tensor.data += 0.2 * noise
    model.save_pretrained(folder)


def merge(tmp_path, capsys, *flags, out="merged"):
    return told(capsys, merge_adapter.main, "--adapter", tmp_path / "adapter", "--output-dir", tmp_path / out,
                *flags)


@torch.no_grad()
def logits(folder, adapter=None):
    """In float64, of the weights as they are stored: what differs then differs in the weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    return model.eval()(TOKENS).logits


def tensors(folder):
    """{name: (shape, type)} of what a folder's safetensors hold"""
    return {name: (tensor.shape, tensor.dtype) for path in folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()}


def assert_merged(tmp_path, report, base="base", out="merged"):
    """The promises of a merge in the base's type, float32."""
    base, out = tmp_path / base, tmp_path / out
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert tensors(out) == tensors(base)
    assert report["parameters"] == sum(shape.numel() for shape, _ in tensors(base).values())
    expected = logits(base, tmp_path / "adapter")
    assert (expected - logits(base)).abs().max() > 0.01  # the adapter does something
    torch.testing.assert_close(logits(out), expected, rtol=1e-5, atol=1e-5)
    assert report["largest_difference"] <= 1e-5 * expected.abs().max() and report["rounding"] == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


TIED = dict(tie_word_embeddings=True)
SAVED_TIED = dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
CASES = {  # of the base, of the adapter, modules that change
    "tied": (TIED, {}, 6),
    "shards": (dict(shard="4KB"), dict(target_modules="all-linear"), 14),
    "biases": (dict(attention_bias=True, mlp_bias=True),
               dict(target_modules="all-linear", lora_bias=True), 14),
    "trained-biases": (dict(attention_bias=True), dict(bias="all"), 6),
    "dora": (TIED, dict(use_dora=True), 6),
    "ranks": ({}, dict(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 5},
                       layers_to_transform=[1]), 3),
    "untied-head": ({}, dict(modules_to_save=["lm_head"], target_modules=["q_proj", "embed_tokens"]), 4),
    "both-ends": (TIED, SAVED_TIED, 8),
    "new-tokens": (TIED, dict(trainable_token_indices=[3, 9]), 8),
}


@pytest.mark.parametrize("case", slow_but([*CASES][::4], CASES))
def test_the_merged_model_is_base_plus_adapter(case, tmp_path, capsys):
    base, adapter, modules = CASES[case]
    write_base(tmp_path / "base", **base)
    write_adapter(tmp_path / "adapter", tmp_path / "base", **adapter)
    before = trees.read(tmp_path)
    report = merge(tmp_path, capsys)
    assert {name: value for name, value in trees.read(tmp_path).items() if "merged" not in name} == before
    assert_merged(tmp_path, report)
    assert report["modules"] == modules and report["adapter_effect"] > 0.01
    assert report["dtype"] == "float32" and report["tokenizer"] == "none"


@pytest.mark.parametrize("in_float32", [(), ("norm", "q_proj")], ids=["one-type", "two-types"])
def test_a_bfloat16_base_gives_bfloat16_unless_dtype_says_float32(in_float32, tmp_path, capsys):
    """And of two types each tensor keeps its own."""
    write_base(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=True)
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    for name in stored:
        if any(part in name for part in in_float32):
            stored[name] = stored[name].float() * 1.001  # which bfloat16 does not have
    save_file(stored, file, metadata={"format": "pt"})
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    reports = {"bfloat16": merge(tmp_path, capsys, out="bfloat16"),
               "float32": merge(tmp_path, capsys, "--dtype", "float32", out="float32")}
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    for name, report in reports.items():
        told = json.loads((tmp_path / name / "config.json").read_text())
        assert report["dtype"] == name and told == config | {"dtype": name}

    kept, whole = (load_file(tmp_path / name / "model.safetensors") for name in reports)
    for name, tensor in whole.items():
        assert tensor.dtype == torch.float32 and kept[name].dtype == stored[name].dtype
        assert torch.equal(kept[name], tensor.to(stored[name].dtype))
    expected = logits(tmp_path / "base", tmp_path / "adapter")
    torch.testing.assert_close(logits(tmp_path / "float32"), expected, rtol=1e-5, atol=1e-5)
    moved = float((logits(tmp_path / "bfloat16") - expected).abs().max())
    assert reports["float32"]["rounding"] == 0 and moved > 1e-3
    assert moved / 3 < reports["bfloat16"]["rounding"] < moved * 3


@pytest.mark.slow
def test_a_checkpoint_of_grpo_llm_becomes_a_model_that_vllm_samples_from_and_training_goes_on_with(
        tmp_path, capsys, monkeypatch):
    """grpo_llm.py ends where vLLM's log-probabilities are not those of transformers."""
    flags = ["--iterations", 1, "--prompts-per-iteration", 4, "--group-size", 4, "--eval-tasks", 4,
             "--eval-samples", 2, "--warmup-iterations", 0]
    assert command_line("grpo_llm.py", *flags, "--lora-rank", 4, "--learning-rate", 0.05,
                        "--run-dir", tmp_path / "run") == 0
    (tmp_path / "run" / "checkpoints" / "step_000001").rename(tmp_path / "adapter")
    shutil.copytree(TINY, tmp_path / "base")

    # Its base is models/countdown-tiny, which stands beside the repository's root wherever the tool is run.
    monkeypatch.chdir(tmp_path)
    report = merge(tmp_path, capsys)
    assert_merged(tmp_path, report)
    assert report["tokenizer"] == "adapter" and report["modules"] == 21

    merged = tmp_path / "merged"
    assert sorted(path.name for path in merged.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json"]
    assert len({path.stat().st_mode for path in merged.iterdir()}) == 1  # who may read one may read all

    if not importlib.util.find_spec("vllm"):  # importing it takes its time
        pytest.skip("vLLM is not installed")
    run = fork(tmp_path / "said", "grpo_llm.py", *flags, "--model", merged, "--engine", "vllm", "--run-dir",
               tmp_path / "next", "--max-context-tokens", 320, daemon=False)
    run.join(300)
    assert run.exitcode == 0, (tmp_path / "said").read_text()[-3000:]
    assert records(tmp_path / "next")[-1]["mismatch/kl"] < 1e-6


def test_the_tokenizer_is_the_adapters_or_else_the_bases(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "base")
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    (tmp_path / "base" / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    # Reading lets it pass and writing refuses it: a temperature without sampling. Copied, it stays as it is.
    odd = json.dumps({"eos_token_id": [2, 3], "do_sample": False, "temperature": 0.5})
    (tmp_path / "base" / "generation_config.json").write_text(odd)
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    assert merge(tmp_path, capsys)["tokenizer"] == "base"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "additional_chat_templates/tools.jinja", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()

    shutil.copy(TINY / "tokenizer_config.json", tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("mine")
    assert merge(tmp_path, capsys, out="other")["tokenizer"] == "adapter"
    assert (tmp_path / "other" / "chat_template.jinja").read_text() == "mine"
    assert not (tmp_path / "other" / "additional_chat_templates").exists()
    assert (tmp_path / "other" / "generation_config.json").read_text() == odd


def test_a_hub_id_is_looked_up_in_the_cache_at_the_adapters_revision(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    for number, name in enumerate(("main", "old")):
        shutil.copytree(write_base(tmp_path / name, seed=number), cached / "snapshots" / (str(number) * 40))
        (cached / "refs" / name).write_text(str(number) * 40)
    write_adapter(tmp_path / "adapter", tmp_path / "old")
    change_json(tmp_path / CONFIG, base_model_name_or_path="some/model", revision="old")
    assert_merged(tmp_path, merge(tmp_path, capsys), base="old")
    report = merge(tmp_path, capsys, "--base-model", "some/model", out="newer")
    assert_merged(tmp_path, report, base="main", out="newer")
    assert "no/model" in merge(tmp_path, capsys, "--base-model", "no/model", out="none")["error"]


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_base(folder / "base", tie_word_embeddings=True)
    write_adapter(folder / "adapter", folder / "base")
    return folder


@pytest.fixture
def pair(whole_pair, tmp_path):
    """A tied base and an adapter, which may be broken.  -> flags that name the base"""
    shutil.copytree(whole_pair, tmp_path, dirs_exist_ok=True)
    return ["--base-model", tmp_path / "base"]


def refused(tmp_path, capsys, *says, flags=(), out="merged"):
    """One line that says all of it; and the disk is as before."""
    before = trees.read(tmp_path)
    error = merge(tmp_path, capsys, *flags, out=out)["error"]
    for text in says:
        assert text in error, error
    assert trees.read(tmp_path) == before
    assert not (tmp_path / out).exists() or out != "merged"
    assert not list(tmp_path.glob(".*"))


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scale(path, factor, *names):
    """Multiply some tensors of a file, or all."""
    stored = load_file(path)
    for name in names or stored:
        stored[name].mul_(factor)
    save_file(stored, path, {"format": "pt"})


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


V_PROJ = "model.layers.1.self_attn.v_proj.lora_B.weight"
CONFIG, WEIGHTS, BASE = "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "base/config.json"
BROKEN = {  # file, what is done to it, what is said beside the folder's name
    "no-config": (CONFIG, Path.unlink, "there is no adapter_config.json"),
    "torn-weights": (WEIGHTS, truncate, "its adapter_model.safetensors cannot be read"),
    "nan": (WEIGHTS, lambda path: scale(path, math.nan, f"base_model.model.{V_PROJ}"), f"in {V_PROJ}"),
    "not-lora": (CONFIG, lambda path: change_json(path, peft_type="PREFIX_TUNING"), "expected a LoRA"),
    "later": (CONFIG, lambda path: change_json(path, use_lora_squared=True, use_later=False),
              "sets use_lora_squared, which is unknown to PEFT"),
    "nameless": (CONFIG, lambda path: change_json(path, base_model_name_or_path=None), "names no base; give"),
    "no-base": (CONFIG, lambda path: change_json(path, base_model_name_or_path="models/none"),
                "expected a folder with config.json and weights"),
    "torn-base": ("base/model.safetensors", truncate, "cannot be loaded"),
    "torn-base-config": (BASE, truncate, "config.json cannot be read"),
    "longer-base": (BASE, lambda path: change_json(path, num_hidden_layers=3),
                    "the files lack model.layers.2.input_layernorm.weight and 8 more"),
    "shorter-base": (BASE, lambda path: change_json(path, num_hidden_layers=1),
                     "the model has no place for model.layers.1.input_layernorm.weight and 8 more"),
    "quantized-base": (BASE, lambda path: change_json(path, quantization_config={"bits": 4}),
                       "it is quantized; give the model that it was made from as --base-model"),
    "adapted-base": (BASE, lambda path: path.with_name("adapter_config.json").write_text("{}"), "an adapter"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_input_is_one_clear_line(case, pair, tmp_path, capsys):
    change_json(tmp_path / CONFIG, base_model_name_or_path=str(tmp_path / "base"))
    file, spoil, says = BROKEN[case]
    spoil(tmp_path / file)
    refused(tmp_path, capsys, str(tmp_path / file.partition("/")[0]), says)


GPT2 = dict(kind=GPT2Config, n_embd=16, n_head=4, n_layer=2)
TIES = "the base ties its embedding to its head, and the adapter changes them"
MISFITS = {  # the base that the adapter was made on, the adapter, what is said of the tied base with 2 layers
    "width": (dict(hidden_size=32), {}, "layers.0.self_attn.q_proj.lora_A.weight is [4, 32] in the adapter"),
    "deeper": (dict(num_hidden_layers=3), {}, "no place for model.layers.2.self_attn.o_proj.lora_A.weight"),
    "shallower": (dict(num_hidden_layers=1), {}, "lacks model.layers.1.self_attn.o_proj.lora_A.weight and 5"),
    "other-family": (GPT2, dict(target_modules=["c_attn"]), "c_attn"),
    "untied": (dict(tie_word_embeddings=False), SAVED_TIED, "the adapter lacks lm_head.weight"),
    "more-layers": (TIED, dict(layer_replication=[[0, 2], [1, 2]]), "its logits would be"),
    "alora": (TIED, dict(alora_invocation_tokens=[3]), "aLoRA"),
    "lora-bias": (TIED, dict(lora_bias=True), "lora_bias"),
    # What changes one of two tied tensors, or what PEFT adds to both of them, that is to the one twice.
    "saved-head": (TIED, dict(modules_to_save=["lm_head"]), f"and the base has 4,512; {TIES}"),
    "embedding": (TIED, dict(target_modules=["q_proj", "embed_tokens"]), TIES),
    "both-twice": (TIED, dict(target_modules=["embed_tokens"], ensure_weight_tying=True), TIES),
}


@pytest.mark.parametrize("case", slow_but([*MISFITS][::2], MISFITS))
def test_an_adapter_that_does_not_fit_is_refused_by_both_names(case, pair, tmp_path, capsys):
    other, adapter, says = MISFITS[case]
    write_base(tmp_path / "other", **other)
    write_adapter(tmp_path / "adapter", tmp_path / "other", **adapter)
    verdict = "cannot be merged" if other == TIED else "does not fit"
    refused(tmp_path, capsys, f"--adapter {tmp_path / 'adapter'} {verdict}",
            f"--base-model {tmp_path / 'base'}", says, flags=pair)


def test_where_nothing_can_be_written_all_stays_as_it_is(pair, tmp_path, capsys):
    for out in ("adapter", "adapter/README.md"):
        refused(tmp_path, capsys, f"--output-dir {tmp_path / out}: expected a new folder or an empty one",
                flags=pair, out=out)
    out = "adapter/README.md/merged"
    refused(tmp_path, capsys, f"{out}: cannot be written", flags=pair, out=out)
    with full_disk(4096):  # too small for the weights
        refused(tmp_path, capsys, "/merged: cannot be written", flags=pair)


def test_a_merge_that_goes_wrong_is_found_out(pair, tmp_path, capsys, monkeypatch):
    """By the two comparisons: in memory, where a merge leaves the weights alone, and of what was written."""
    with monkeypatch.context() as patch:
        patch.setattr(peft.tuners.lora.Linear, "merge", lambda *args, **options: None)
        # So weak an adapter that its absence hides behind a bound that is relative to the logits alone.
        for _ in range(2):
            refused(tmp_path, capsys, "cannot be merged", "its logits would be", flags=pair)
            scale(tmp_path / WEIGHTS, 0.005)
    save = merge_adapter.save

    def damaging(folder, *rest):
        done = save(folder, *rest)
        scale(folder / "model.safetensors", 1.01, "model.norm.weight")
        return done

    monkeypatch.setattr(merge_adapter, "save", damaging)
    refused(tmp_path, capsys, "/merged: read again, its logits are off by", flags=pair)
