"""benchmarks/update_memory.py: what a token takes. benchmarks/losses.py: runs that go on; its rules."""

import csv
import functools
import math
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks import losses
from tests.run_folders import ROOT, records

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


def test_a_rate_is_the_one_of_the_largest_mean_area_once_all_its_seeds_have_ended():
    method = ("countdown", "pg", "tis", "mean")
    areas = {0.5: (0.7, 0.9), 1.0: (0.9, 0.6), 2.0: (0.1, 0.95)}
    rows = [dict(stage="rates", problem="countdown", loss="pg", correction="tis", baseline="mean",
                 factor=str(factor), area=str(area)) for factor, both in areas.items() for area in both]
    assert losses.chosen_factor(method, rows) == 0.5
    assert math.isnan(losses.chosen_factor(method, rows[1:]))
    assert math.isnan(losses.chosen_factor(("countdown", "pg", "mis", "mean"), rows))


def test_an_interval_is_students_t():
    mean, half = losses.interval([0.1, 0.2, 0.4])
    assert (mean, half) == pytest.approx((0.7 / 3, 4.303 * statistics.stdev([0.1, 0.2, 0.4]) / 3**0.5))
    assert math.isnan(losses.interval([0.5])[1])


@pytest.mark.slow
def test_runs_of_losses_go_on_after_a_kill_and_end_once(tmp_path):
    table, runs = tmp_path / "losses.csv", tmp_path / "runs"
    command = [sys.executable, ROOT / "benchmarks/losses.py", "--stage", "rates", "--problems", "countdown",
               "--smoke", "--first", "2", "--csv", table, "--runs", runs]
    first = losses.jobs_of("rates", [], ["countdown"])[0]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        while not [*runs.glob(f"{first.name}/checkpoints/step_000002")]:
            assert process.poll() is None
            time.sleep(0.05)
        losses.os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(command, cwd=ROOT, check=True)
    log = (runs / first.name / "train_log.jsonl").read_text()
    assert log.count('{"resume"') == 1
    rows = [*csv.DictReader(table.open())]
    assert [(row["loss"], row["staleness"], row["seed"]) for row in rows] == [
        ("clip", "4", "11"), ("clip", "4", "12")]
    last = records(runs / first.name)[-1]
    assert float(rows[0]["greedy"]) == pytest.approx(last["val/countdown/greedy"], abs=1e-4)
    assert {record.get("rollout/staleness") for record in records(runs / first.name)[1:]} == {0, 1, 2, 3, 4}
    subprocess.run(command, cwd=ROOT, check=True)  # the next two
    assert len([*csv.DictReader(table.open())]) == 4
    assert (runs / first.name / "train_log.jsonl").read_text() == log
    subprocess.run([sys.executable, ROOT / "benchmarks/losses.py", "--table", "--csv", table], check=True)
