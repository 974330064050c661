"""What benchmarks reckon: a token's memory from a model's config alone, operations; gpu.py at toy sizes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

HIDDEN, INNER, HEADS, WORDS, LAYERS = 256, 704, 4, 1000, 2


@pytest.fixture
def reckon(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import update_memory
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, vocab_size=WORDS, tie_word_embeddings=True)
    return functools.partial(update_memory.reckon, config)


def test_a_token_takes_what_a_count_by_hand_says_and_a_quarter_at_most_with_checkpointing(reckon):
    # Twice a norm: what comes in and what it is normalised to, in float32, and the latter in bfloat16.
    norms = 2 * (4 + 4 + 2) * HIDDEN
    attention = (3 + 1) * 2 * HIDDEN + 4 * HEADS  # queries, keys, values, output; a float32 sum of each head
    inner = 4 * 2 * INNER  # the gate, its activation, what it multiplies, the product
    figures = reckon(0)
    assert figures["layer"] > 4 * figures["layer_checkpointed"]
    assert figures["layer"] == pytest.approx(norms + attention + inner, rel=0.25)
    assert figures["layer_checkpointed"] == pytest.approx(4 * HIDDEN, rel=0.05)  # what comes in, in float32
    # Beside the layers: what the last norm takes.
    assert figures["token"] == pytest.approx(LAYERS * figures["layer"] + norms / 2, rel=0.05)
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert figures["trained"] == 4 * (matrices + (WORDS + 2 * LAYERS + 1) * HIDDEN)
    assert figures["frozen"] == 0
    assert figures["casts"] == pytest.approx(2 * matrices, rel=0.05)


@pytest.mark.slow  # two seconds, and it holds little that the first does not
def test_with_an_adapter_the_weights_are_frozen_and_checkpointing_keeps_a_quarter_at_most(reckon):
    figures = reckon(16)
    assert figures["layer"] > 4 * figures["layer_checkpointed"] > 0
    # Beside what is kept: a layer that is computed again, and its gradients.
    assert 2 * figures["layer"] < figures["token_checkpointed"] < 2.2 * figures["layer"]
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert figures["frozen"] == 2 * (matrices + (WORDS + 2 * LAYERS + 1) * HIDDEN)
    assert figures["trained"] == 4 * LAYERS * 16 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import gpu
    return gpu


def test_operations_for_the_utilisation_are_those_that_torch_counts(gpu, tmp_path):
    gpu.make_model(tmp_path / "model", "Qwen3-0.6B", toy=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")

    def counted(length):
        ids = torch.arange(length)[None]
        with FlopCounterMode(display=False) as counter:
            model(ids).logits.sum().backward()
        return counter.get_total_flops()

    def ours(length):
        return gpu.training_flops(tmp_path / "model", 0, 0, 1, length, lora=False)

    # torch counts a token's attention to those after it too: as much again as to those before it.
    attention = (ours(128) - 2 * ours(64)) / 2
    assert counted(64) == pytest.approx(ours(64) + attention, rel=0.02)
    # A prompt is computed once for its replies, and has no logits. Frozen weights have no gradient.
    once = gpu.training_flops(tmp_path / "model", 1, 64, 2, 64, lora=False)
    hidden, words, layers = 64, 512, 2
    head, pairs = 3 * 2 * 64 * hidden * words, 2 * 64 * 64  # of each reply's tokens with the prompt's
    assert once == 3 * ours(64) - head + 3 * 4 * layers * hidden * pairs
    frozen = gpu.training_flops(tmp_path / "model", 0, 0, 1, 64, lora=True)
    assert frozen == pytest.approx(ours(64) * 2 / 3, rel=0.1)


@pytest.mark.parametrize("name, peak", [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
                                        ("NVIDIA H200", 989e12), ("a card of nobody", None)])
def test_the_peak_is_that_of_the_card(gpu, name, peak):
    assert gpu.peak_of(name, 0) == peak
    assert gpu.peak_of(name, 100) == 100e12


def test_docs_have_the_table_of_what_was_measured(gpu):
    page = (Path(__file__).parent.parent / "docs" / "gpu.md").read_text()
    assert gpu.table(gpu.read_rows(Path(__file__).parent.parent / "docs" / "results")) in page


@pytest.mark.slow
def test_one_command_measures_all_parts_and_goes_on_where_it_was_stopped(gpu, tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "all", "--toy", "--out", str(tmp_path)]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    def run():
        return subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, text=True,
                              capture_output=True, timeout=600)

    first = run()
    assert first.returncode == 0, first.stdout + first.stderr
    rows = gpu.read_rows(tmp_path)
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert {row["value"] for row in rows if row["part"] == "exact"} == {0.0}
    assert "not measured yet" not in (tmp_path / "gpu.md").read_text()
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    (tmp_path / "gpu.csv").write_text("\n".join(lines[:-2]) + "\n")
    assert run().returncode == 0
    again = gpu.read_rows(tmp_path)
    assert [(row["part"], row["job"], row["figure"]) for row in again] == \
        [(row["part"], row["job"], row["figure"]) for row in rows]
    assert again[:-2] == rows[:-2]  # nothing else was run again
