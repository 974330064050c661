"""benchmarks/update_memory.py --model: what a token of a pass takes, from a model's config alone."""

import functools
from pathlib import Path

import pytest
from transformers import LlamaConfig

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
