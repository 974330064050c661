"""docs/environments.md: each command of its table evaluates and trains a tiny model for two iterations."""

import json
import re
import shlex

import pytest
import torch
import tyro
from transformers import PhiConfig, PhiForCausalLM

import envs
import grpo_llm
import ppo_llm
from tests.run_folders import ROOT, asked_once, package
from tests.test_rollout import byte_tokenizer
from tests.test_rows import write
from tests.test_trl_env import SHOP
from tools.validate_train_log import validate

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Of two rows or a few, one is held out, which a line says.
pytestmark = pytest.mark.filterwarnings("ignore:environment rows")
WAYS = re.findall(r"^\| (.+?) \| `(--env .+?)` \|", (ROOT / "docs/environments.md").read_text(), re.MULTILINE)
QUICK = ("questions with a number as the answer", "a file and reward functions made for TRL",
         "a class of your own")
# As one of the openai client, of nothing but Python.
AGENT = '''
import json, os, sys, urllib.request

def run(task, base_url, api_key):
    body = json.dumps(dict(model="policy", messages=[dict(role="user", content=task["question"])]))
    request = urllib.request.Request(f"{base_url}/chat/completions", body.encode(), {
        "Authorization": f"Bearer {api_key}", "Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"] == task["answer"])

if __name__ == "__main__":
    print(run(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
'''
TINY = dict(iterations=2, prompts_per_iteration=2, group_size=2, eval_tasks=2, eval_samples=2,
            max_response_tokens=6, eval_every=0, log_episodes=1.0)


def number_rows(count=30):
    return [dict(question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(count)]


def make_model(path):
    """Of bytes; it has learned nothing, but to end its replies soon."""
    tokenizer = byte_tokenizer(CHATML)
    torch.manual_seed(1)
    model = PhiForCausalLM(PhiConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id))
    model.lm_head.bias.data[tokenizer.eos_token_id] = 4.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_files(tmp_path):
    """The table's files, and a model, `tiny`."""
    write(tmp_path / "train.jsonl", number_rows())
    write(tmp_path / "test.jsonl", number_rows(4))
    (tmp_path / "system.txt").write_text("Be brief.")
    write(tmp_path / "gsm8k.jsonl",
          [dict(row, answer=f"It is so.\n#### {row['answer']}") for row in number_rows()])
    write(tmp_path / "choices.csv",
          [dict(question=f"{n}: (A) or (B)?", letter="AB"[n % 2]) for n in range(30)])
    write(tmp_path / "math.jsonl",
          [dict(problem=f"Half of {n}?", answer=rf"\frac{{{n}}}{{2}}") for n in range(30)])
    write(tmp_path / "HumanEval.jsonl", [
        dict(prompt=f"Write f{n}.", test=f"def check(f):\n    assert f() == 'the {n}th'",
             entry_point=f"f{n}")
        for n in range(30)])
    asked = [[dict(role="user", content=f"How much is {n}?")] for n in range(30)]
    write(tmp_path / "verl.parquet", [
        dict(data_source="so/many", prompt=asked[n], ability="math", extra_info=dict(index=n),
             reward_model=dict(style="rule", ground_truth=str(n))) for n in range(30)])
    write(tmp_path / "rlvr.parquet", [dict(messages=asked[n], ground_truth=str(n), dataset="math")
                                      for n in range(30)])
    write(tmp_path / "trl.jsonl", [dict(prompt=asked[n], hint=str(n), answer=str(n)) for n in range(30)])
    (tmp_path / "shop.py").write_text(SHOP.replace("class Counter", "class Shop"))
    (tmp_path / "letters_taskset.py").write_text((ROOT / "tests/letters_taskset.py").read_text())
    (tmp_path / "my.py").write_text(
        "def correct(prompts, completions, answer, **columns):\n"
        "    return [float(c[-1]['content'] == a) for c, a in zip(completions, answer)]\n"
        "def brief(completions, **columns):\n"
        "    texts = [completion[-1]['content'] for completion in completions]\n"
        "    return [None if '?' in text else 1 / (1 + len(text)) for text in texts]\n")
    write(tmp_path / "tasks.jsonl", number_rows())
    (tmp_path / "my_agent.py").write_text(AGENT)
    page = (ROOT / "docs/design.md").read_text()
    example = re.search(r"\n(    import dataclasses\n.+?)\n\nFor several turns", page, re.DOTALL)[1]
    (tmp_path / "my_env.py").write_text(re.sub(r"^    ", "", example, flags=re.MULTILINE))
    (tmp_path / "my_reward.py").write_text("def reward(rollout):\n    return len(rollout.reply) / 100\n")
    make_model(tmp_path / "tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("what, flags", [
    pytest.param(*way, id=way[0], marks=[pytest.mark.slow] * (way[0] not in QUICK)) for way in WAYS
    if "--env openenv" not in way[1]])  # test_openenv.py has it: it needs a server
def test_each_command_evaluates_and_trains(folder, what, flags):
    for name in ("math_verify", "reasoning_gym", "textarena", "verifiers"):
        if name.replace("_verify", "") in flags.replace("-", "_"):
            package(name)
    flags = shlex.split(flags)
    scripts = [grpo_llm] if what in QUICK else [grpo_llm, ppo_llm]
    for script in scripts:
        run = folder / script.__name__
        own = dict(critic="none", gae_lambda=1.0) if script is ppo_llm else {}
        given = tyro.cli(script.Args, args=flags)
        with asked_once(script):
            script.main(script.Args(**vars(given) | TINY | own | dict(model="tiny", run_dir=str(run))))
        assert validate(run, strict=True)["ok"]
        lines = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
        source = envs.make(given.env, **envs.parse_options(given.env_kwargs)).task("test", 0).source
        assert f"val/{source}/pass@1" in lines[1]
        assert any(key.startswith("train/") and key.endswith("/correct") for key in lines[-1])
    env = envs.make(given.env, **envs.parse_options(given.env_kwargs))
    for reply in ("", "\x00\ud800" * 100, "(" * 5000, "<think>", "\\boxed{" * 500):
        task = env.task("train", 1)
        episode = env.start(task, 1)
        step = episode.step(reply, []) if task.tools else episode.step(reply)
        assert not step.info.get("correct") and not step.info.get("error")
        episode.close()


@pytest.mark.parametrize("name, message", [
    ("row", "unknown environment 'row' .did you mean 'rows'.*known: .*reasoning-gym.*textarena.*trl"),
    ("reasoning_gym", "unknown environment 'reasoning_gym' .did you mean 'reasoning-gym'"),
    ("shop.py:Shop", "--env shop.py:Shop: expected a class derived from envs.Env, with a Config")])
def test_a_wrong_name_is_one_line(folder, name, message):
    with pytest.raises(envs.BadInput, match=message):
        envs.make(name)


def test_what_a_page_promises_is_there():
    assert len(WAYS) >= 16 and {what for what in QUICK} <= {what for what, _ in WAYS}
