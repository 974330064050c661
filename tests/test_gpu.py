"""benchmarks/gpu.py: the operations it reckons with, its table, and all of it at toy sizes."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.run_folders import ROOT


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
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
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert gpu.table(gpu.read_rows(ROOT / "docs" / "results")) in page


@pytest.mark.slow
@pytest.mark.release
def test_one_command_measures_all_parts_and_goes_on_where_it_was_stopped(gpu, tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "all", "--toy", "--out", str(tmp_path)]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    def run():
        return subprocess.run(command, cwd=ROOT, env=environment, text=True,
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
