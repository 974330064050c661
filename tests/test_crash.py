"""What a machine that loses its power finds on the disk: the writes of each script, in their order."""

import os
import shutil
import signal
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import a2c_vecenv
import grpo_llm
import ppo_llm
import sft
from tests.run_folders import TINY, log_lines, signal_once, train, write_jsonl
from tools import merge_adapter

ROWS = [dict(prompt=f"{n} 1 -> {n + 1}", response=f"{n} + 1 = {n + 1}") for n in range(9)]
SHORT = dict(iterations=2, checkpoint_every=1, eval_every=0)


class Disk:
    """Follows fsync and rename in a folder. flushed: what the disk surely holds, path -> (size, time)."""

    def __init__(self, folder, patch):
        self.folder, self.flushed, self.renamed, self.torn = folder, {}, [], []
        for name in ("rename", "replace"):
            patch.setattr(os, name, self.then(self.before_rename, getattr(os, name)))
        patch.setattr(os, "fsync", self.then(self.before_fsync, os.fsync))

    @staticmethod
    def then(first, second):
        return lambda *given, **options: (first(*given), second(*given, **options))[1]

    def now(self, path):
        return os.stat(path).st_size, os.stat(path).st_mtime_ns

    def before_fsync(self, handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        self.flushed[Path(path)] = self.now(path)

    def before_rename(self, old, new):
        old, new = Path(old), Path(new)
        if self.folder not in new.parents or any(part.endswith(".writing") for part in new.parent.parts):
            return
        self.renamed.append(new.name)
        self.torn += [path for path in (old, *old.rglob("*")) if self.flushed.get(path) != self.now(path)]
        if new.name.startswith("step_"):
            log, counted = self.folder / "train_log.jsonl", torch.load(old / "trainer_state.pt")["log_bytes"]
            self.torn += [log] * (self.flushed.get(log, (0,))[0] < counted)
        if new.name == "state.json":  # what it names must be there under this name
            self.torn += [new.parent] * (new.parent not in self.flushed)
        self.flushed.pop(new.parent, None)


# What ppo_llm.py does there is grpo_llm.py's to the letter.
@pytest.mark.parametrize("script", [
    grpo_llm, sft, a2c_vecenv, pytest.param(ppo_llm, marks=pytest.mark.slow)])
def test_whatever_gets_its_name_is_on_the_disk_as_it_is(script, tmp_path, monkeypatch):
    folder, rows = tmp_path / "run", write_jsonl(tmp_path / "rows.jsonl", ROWS)
    disk = Disk(folder, monkeypatch)
    if script is a2c_vecenv:
        a2c_vecenv.main(a2c_vecenv.Args(
            **SHORT, num_envs=2, num_steps=2, hidden_size=4, log_every=1, eval_envs=1, eval_episodes=1,
            env_kwargs=("max_steps=4",), run_dir=str(folder)))
    elif script is sft:
        train(sft, folder, model=TINY, train_files=(rows,), steps=2, batch_size=2, checkpoint_every=1)
    else:
        train(script, folder, **SHORT, eval_tasks=1, eval_samples=1)
    assert disk.torn == []
    assert {"step_000001", "step_000002", "state.json"} <= set(disk.renamed)
    assert script is not sft or "train.arrow" in disk.renamed


@pytest.mark.slow
def test_damaged_checkpoints_do_not_count_among_those_to_keep(tmp_path, monkeypatch, capsys):
    """A run falls back from two of them and is stopped in between: the one that it wrote has to stay."""
    flags = dict(iterations=3, checkpoint_every=1, eval_every=0, eval_tasks=1, eval_samples=1,
                 prompts_per_iteration=2, group_size=2)
    folder = train(grpo_llm, tmp_path / "run", keep_checkpoints=0, **flags)
    for step in (2, 3):
        (folder / "checkpoints" / f"step_{step:06d}" / "trainer_state.pt").write_bytes(b"torn")
    with monkeypatch.context() as patch:
        signal_once(patch, signal.SIGTERM, 2)
        train(grpo_llm, folder, keep_checkpoints=1, **flags)
    shutil.copytree(folder / "checkpoints/step_000002", folder / "checkpoints/step_000002_mine")
    train(grpo_llm, folder, keep_checkpoints=1, **flags)
    marks = [Path(line["resume"]["checkpoint"]).name for line in log_lines(folder) if "resume" in line]
    assert marks == ["step_000001", "step_000002"]
    assert {p.name for p in folder.glob("checkpoints/step_*")} == {"step_000002_mine", "step_000003"}


def test_a_merged_model_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(TINY)
    config = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    disk = Disk(tmp_path / "out", monkeypatch)
    merge_adapter.main(["--adapter", str(tmp_path / "adapter"), "--base-model", TINY,
                        "--output-dir", str(tmp_path / "out" / "merged")])
    assert (disk.renamed, disk.torn) == (["merged"], [])
