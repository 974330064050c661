"""Each docs/variants/*.diff applies to its script as it is, is short, trains, resumes, and is its equation."""

import math
import re
import shutil
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.run_folders import (
    LAST,
    ROOT,
    SMALL,
    TINY,
    episodes,
    load_script,
    process,
    records,
    same_end,
    slow_but,
    variants,
)
from tests.test_updates import (
    RUN,
    TURNS,
    Adam,
    base_model,
    checkpoint,
    forward,
    learnable,
    near,
    response_of,
    surrogate,
    weight_of,
)
from tools.validate_train_log import validate

PAGE = (ROOT / "docs" / "variants.md").read_text()
DIFFS = sorted(path.name for path in (ROOT / "docs" / "variants").glob("*.diff"))
COMMANDS = {diff: (script, name) for script, diff, name in
            re.findall(r"patch (\w+\.py) docs/variants/(\S+\.diff) -o (\w+\.py)", PAGE)}
FLAGS = {"distill.diff": ["--teacher", TINY]}  # that a variant cannot run without
TO_RENEW = "make it anew: docs/variants.md, 'One that no longer applies'"


@pytest.mark.parametrize("diff", DIFFS)
def test_a_variant_applies_as_it_stands_and_is_short(diff, tmp_path):
    assert diff in COMMANDS and f"\n## {diff}\n" in PAGE, "docs/variants.md does not say how to make it"
    script, name = COMMANDS[diff]
    path = ROOT / "docs" / "variants" / diff
    patch = subprocess.run(["patch", script, path, "-o", tmp_path / name], cwd=ROOT, capture_output=True,
                           text=True)
    said = patch.stdout + patch.stderr
    assert patch.returncode == 0 and not re.search("offset|fuzz|FAILED", said), f"{said}{TO_RENEW}"

    shutil.copy(ROOT / script, tmp_path)
    subprocess.run(["git", "apply", path], cwd=tmp_path, check=True)
    assert (tmp_path / script).read_text() == (tmp_path / name).read_text()

    lines = path.read_text().splitlines()[2:]
    added = [line[1:] for line in lines if line.startswith("+")]
    removed = sum(line.startswith("-") for line in lines)
    assert len(added) < 60 and (len(added) + removed < 60 or removed > 5 * len(added))
    assert max(map(len, added)) <= 110


@pytest.mark.slow
@pytest.mark.parametrize("diff", DIFFS)
def test_a_variant_that_is_killed_goes_on_as_if_nothing_had_happened(diff, tmp_path):
    script, name = COMMANDS[diff]
    small = SMALL[script.removesuffix(".py")] | dict(iterations=4, eval_every=0, checkpoint_every=1,
                                                     keep_checkpoints=0)
    flags = [word for flag, value in small.items() for word in (f"--{flag.replace('_', '-')}", value)]
    flags += FLAGS.get(diff, [])

    def start(folder):
        return process(variants()[name], *flags, "--run-dir", tmp_path / folder)

    whole = start("whole")
    out, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, out[-2000:]
    assert validate(tmp_path / "whole", strict=True)["ok"]

    killed = start("killed")
    while not (tmp_path / "killed" / "checkpoints" / "step_000002").is_dir():
        assert killed.poll() is None, killed.communicate()[0][-2000:]
    killed.kill()
    killed.communicate()
    assert killed.returncode == -9

    resumed = start("killed")
    out, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, out[-2000:]
    assert validate(tmp_path / "killed", strict=True)["ok"]
    assert "resume" in (tmp_path / "killed" / "train_log.jsonl").read_text()
    same_end(tmp_path / "whole", tmp_path / "killed", LAST)


# distill.diff


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a model that is not the policy, and its weights."""
    folder, model = tmp_path_factory.mktemp("teacher"), AutoModelForCausalLM.from_pretrained(TINY)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


DISTILL = {
    "default": {},
    "turns": dict(TURNS, prompts_per_iteration=3, epochs=2, microbatch_tokens=60, temperature=0.7,
                  reward_coef=0.5),
    "lora": dict(lora_rank=2, lora_alpha=8, learning_rate=2e-2, group_size=1),
}


@pytest.mark.parametrize("case", slow_but(("lora",), DISTILL))
def test_a_token_counts_by_what_the_teacher_thinks_of_it(case, teacher, tmp_path):
    flags, script = DISTILL[case], load_script(variants()["grpo_distill.py"])
    folder = tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | RUN | dict(
        env_kwargs=("test_tasks=32",), teacher=str(teacher), run_dir=str(folder)) | flags))
    played, _ = episodes(folder, "train_step_000002")
    segments = [s for episode in played for s in episode["segments"]]
    (before, state), (after, end) = (checkpoint(folder, n) for n in (1, 2))
    model, theirs = base_model(), AutoModelForCausalLM.from_pretrained(teacher).double().eval()
    trained, epochs, temperature = learnable(before), flags.get("epochs", 1), flags.get("temperature", 1.0)
    adam = Adam(trained, state["optimizer"], flags.get("learning_rate", 2e-3) * 2 / 4, 0.95, 1.0)
    known, kl = [], 0.0
    for epoch in range(epochs):
        loss = 0.0
        for number, s in enumerate(segments):
            ids, chosen = s["prompt_ids"] + s["response_ids"], torch.tensor(s["response_mask"]) > 0
            _, new, _ = response_of(s, *forward(model, trained, ids, 4.0), temperature)
            if not epoch:
                _, taught, _ = response_of(s, *forward(theirs, {}, ids), temperature)
                known.append((new.detach(), taught.detach() - new.detach()))
            old, says = known[number]
            advantages = says + flags.get("reward_coef", 0.0) * s["advantage"]
            lost, _ = surrogate("clip", new, old, advantages, chosen, 0.2, 0.28)
            loss = loss + lost[chosen].sum() * weight_of(s, segments, flags)
            kl -= float((old - new.detach() + says)[chosen].sum()) * weight_of(s, segments, flags)
        adam.step(loss)
    adam.check(after, end["optimizer"], 1e-4 if epochs == 1 else 3e-3)
    near({name: after[name] - before[name] for name in trained},
         {name: trained[name].detach() - before[name] for name in trained}, 2e-2)
    record = records(folder)[-1]
    assert record["kl/k1"] == pytest.approx(kl / epochs, rel=2e-3) and math.isfinite(kl)
    assert record["rollout/groups_trainable"] == record["rollout/groups_submitted"]


def test_a_teacher_of_other_tokens_is_one_line(teacher, tmp_path):
    script = load_script(variants()["grpo_distill.py"])
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(["another"])
    shutil.copytree(teacher, tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    for folder, says in ((tmp_path / "other", "expected the tokenizer of --model"),
                         (tmp_path / "none", "it cannot be loaded")):
        with pytest.raises(script.BadInput, match=f"^--teacher {re.escape(str(folder))}: {says}.*$"):
            script.main(script.Args(teacher=str(folder), run_dir=str(tmp_path / "run")))
