"""Fixtures that several files of tests share. Nothing heavy is imported before a test asks for it."""

import gc
import os
import signal
from pathlib import Path

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
               "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # a thread, beside which tests fork
# A job that a shell runs in the background ignores Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(Path(__file__).resolve().parent.parent)  # paths in tests begin at the checkout
gc.disable()  # a tenth of the time that imports take is spent in walking what stays


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_sandbox_and_no_waiting_in_fast_tests(request, monkeypatch):
    """bubblewrap is not on every machine: fast tests do without it, and a test that needs it is slow.

    Nor do they wait for the disk.
    """
    if request.node.get_closest_marker("slow"):
        return

    from envs.code import sandbox

    def started(*args, **options):
        raise AssertionError("a fast test starts a sandbox: mark it slow")

    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what the disk surely holds has tests of its own
    monkeypatch.setattr(sandbox, "check", lambda: None)
    monkeypatch.setattr(sandbox.Sandbox, "__init__", started)


@pytest.fixture(scope="session")
def countdown_tiny():
    """(model, tokenizer) of the shipped checkpoint. Shared: copy the model before changing it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = Path(__file__).resolve().parent.parent / "models" / "countdown-tiny"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def random_llama():
    """Builder of small Llamas with random weights, wide enough that their distributions are far from flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)

    def build(vocab_size=37, seed=0, dtype=torch.float64, **options):
        torch.manual_seed(seed)
        config = LlamaConfig(**dict(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, tie_word_embeddings=False) | options)
        return LlamaForCausalLM(config).to(dtype).eval()
    return build
