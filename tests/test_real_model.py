"""A real chat model: SmolLM2-135M-Instruct, made by tools/get_smollm2.py, with its own template."""

import os
import random
import signal
import time
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import grpo_llm
import sft
from tests.run_folders import finish, full_forward, package, process, records, timeless, told, wait_for
from tools import get_smollm2, merge_adapter
from tools.validate_train_log import validate

pytestmark = pytest.mark.slow
ENV = str(Path(__file__).with_name("yes_no.py"))
FLAGS = dict(
    env=f"{ENV}:YesNo", iterations=3, prompts_per_iteration=2, group_size=4, max_response_tokens=6,
    eval_tasks=2, eval_samples=2, eval_every=0, checkpoint_every=1, keep_checkpoints=0, log_episodes=1.0,
    learning_rate=1e-4, entropy_coef=0.0, warmup_iterations=0)


@pytest.fixture(scope="module")
def folder():
    """That of the checkout, made where it is not there."""
    path = get_smollm2.ROOT / "models" / "smollm2-135m"
    if "CI" not in os.environ and not path.exists():
        pytest.importorskip("gguf")
    assert get_smollm2.main([]) == 0
    return str(path)


@pytest.fixture(scope="module")
def loaded(folder):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def command(folder, run, **flags):
    """The words of a command line, and its process."""
    words = ["--model", folder, "--run-dir", run]
    for name, value in (FLAGS | flags).items():
        name = name.replace("_", "-")
        words += [f"--{name}"] if value is True else [f"--{name}", value]
    return process("grpo_llm.py", *words, env=dict(OMP_NUM_THREADS="1"))


@pytest.fixture(scope="module")
def lora_run(folder, tmp_path_factory):
    """Three iterations with an adapter; what was said."""
    run = tmp_path_factory.mktemp("lora") / "run"
    return run, finish(command(folder, run, lora_rank=8))


def test_the_tool_says_what_it_can_not_do(folder, tmp_path, capsys):
    assert get_smollm2.main([]) == 0 and "is there already" in capsys.readouterr().out
    for words, says in (["--gguf", tmp_path / "x.gguf"], "no such file"), (["--out", tmp_path], "no model's"):
        assert get_smollm2.main([*map(str, words)]) == 2
        line = capsys.readouterr().err
        assert says in line and line.count("\n") == 1
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    assert get_smollm2.main(["--gguf", str(tmp_path / "bad.gguf"), "--out", str(tmp_path / "new")]) == 2
    assert "expected a GGUF file" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_it_answers_sensibly_and_ends(loaded):
    model, tokenizer = loaded
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                        add_generation_prompt=True)["input_ids"]
    ((reply, _),) = grpo_llm.generate(model, [ids], 30, 0.0, [2], [0])
    assert "Paris" in tokenizer.decode(reply) and reply[-1] == 2


def conversations(count):
    rng = random.Random(1)
    texts = ["Yes.", "No, it is 41.", "Naïve café: 漢字 👍", "def f(x):\n    return x\n", "so  ",
             "<think>a</think> b"]
    for _ in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            messages += [{"role": "user", "content": rng.choice(texts)},
                         {"role": "assistant", "content": rng.choice(texts)}]
        yield messages


def test_prompts_and_conversations_are_the_templates_ids_and_answers_are_what_is_learned(loaded):
    model, tokenizer = loaded
    env = envs.make(f"{ENV}:YesNo")
    args = grpo_llm.Args()
    engine = grpo_llm.HfEngine(model, tokenizer, args)
    player = grpo_llm.Player(engine, tokenizer, env, args, grpo_llm.Sampling(1.0, (1, "train")))
    for task, _, ids in player.prompts([env.task("train", n) for n in range(10)]):
        assert ids == tokenizer.apply_chat_template(task.messages, add_generation_prompt=True)["input_ids"]
    eos = sft.eos_ids(model, tokenizer)
    for messages in conversations(50):
        ids, mask = sft.encode_conversation(messages, tokenizer, eos)
        whole = tokenizer.apply_chat_template(messages)["input_ids"]
        assert ids == whole, tokenizer.decode(ids)
        learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
        answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert learned == "".join(answers)


def test_greedy_replies_are_those_of_transformers(loaded):
    model, tokenizer = loaded
    texts = ["What is the capital of France?", "Is 71 larger than 33? Yes or No?", "Count to five."]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
        "input_ids"] for text in texts]
    found = grpo_llm.generate(model, prompts, 12, 0.0, [2], range(3))
    for prompt, (ids, _) in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2)
        assert expected[0, len(prompt):].tolist() == ids


def test_an_adapter_is_trained_in_float32_without_a_mismatch(lora_run):
    run, said = lora_run
    assert "weights; defaults for 20,000,000 or more: --" in said
    assert "LoRA adapts down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in said
    verdict = validate(run, strict=True)
    assert verdict["ok"], verdict
    log = records(run)
    updated = [record for record in log[1:] if record["rollout/groups_trainable"]]
    assert updated and all(0 <= record["mismatch/kl"] < 1e-9 for record in updated)
    assert all(record["train/grad_norm"] > 0 for record in updated)


def test_rounding_of_few_tokens_in_bfloat16_ends_no_run(folder, tmp_path):
    finish(command(folder, tmp_path / "run", lora_rank=8, dtype="bfloat16"))
    log = records(tmp_path / "run")
    assert log[-1]["iteration"] == 3 and max(record.get("mismatch/kl", 0) for record in log) > 1e-6


def test_a_kill_and_the_same_command_are_an_uninterrupted_run(folder, lora_run, tmp_path):
    whole, _ = lora_run
    run = command(folder, tmp_path / "run", lora_rank=8)
    wait_for(lambda: (tmp_path / "run/checkpoints/step_000001").exists(), run)
    time.sleep(1)
    run.send_signal(signal.SIGKILL)
    run.wait()
    finish(command(folder, tmp_path / "run", lora_rank=8))
    resumed = [line for line in timeless(tmp_path / "run") if "resume" not in line]
    assert resumed == timeless(whole)
    name = "checkpoints/step_000003/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_the_merged_model_is_the_adapted_one(folder, loaded, lora_run, tmp_path, capsys):
    adapter = lora_run[0] / "checkpoints/step_000003"
    report = told(capsys, merge_adapter.main, "--adapter", adapter, "--base-model", folder, "--output-dir",
                  tmp_path / "merged")
    assert report["largest_difference"] < 1e-3 < report["adapter_effect"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[1, 520, 330, 2, 198]])
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_several_turns_are_trained_on_what_the_model_saw(loaded):
    model, tokenizer = loaded
    env = envs.make(f"{ENV}:YesNo", turns=3)
    args = grpo_llm.Args(max_response_tokens=24)
    engine = grpo_llm.HfEngine(grpo_llm.distribute(model, torch.device("cpu")), tokenizer, args)
    rollouts = grpo_llm.rollout(engine, tokenizer, env, [env.task("train", n) for n in range(3)], 2,
                                grpo_llm.Sampling(1.0, (1, "train")), args, grpo_llm.episode_reward)
    assert max(len(r.turns) for r in rollouts) > 1
    for r in rollouts:
        for segment in r.segments:
            with torch.no_grad():
                expected, _ = full_forward(model, segment, 1.0)
            expected *= torch.tensor(segment.response_mask)
            assert segment.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("flags", [pytest.param({}, marks=pytest.mark.release), dict(lora_rank=8)],
                         ids=["full", "lora"])
def test_vllm_samples_with_its_weights(folder, flags, tmp_path):
    package("vllm")
    finish(command(folder, tmp_path / "run", engine="vllm", **flags, iterations=2, learning_rate=1e-5,
                   max_context_tokens=256, eval_tasks=1, eval_samples=1, checkpoint_every=2))
    updated = [record for record in records(tmp_path / "run")[1:] if record["rollout/groups_trainable"]]
    assert updated and all(abs(record["mismatch/kl"]) < 1e-6 for record in updated)
