"""docs/coming_from.md: ours are flags of the script that is named, and TRL's names are its own."""

import dataclasses
import functools
import re

import pytest

from tests.run_folders import ROOT, package
from tools.docs_tables import flags

PAGE = (ROOT / "docs/coming_from.md").read_text()
# Fields of TRL's PPOConfig and of what it inherits, as of the commit that the page names: 1.16 has neither.
OF_PPO = set("""
    batch_size cliprange cliprange_value dataset_num_proc gamma gradient_accumulation_steps kl_coef
    kl_estimator lam learning_rate local_batch_size local_mini_batch_size
    local_rollout_forward_batch_size micro_batch_size mini_batch_size missing_eos_penalty
    model_adapter_name num_mini_batches num_ppo_epochs num_sample_generations num_total_batches
    per_device_train_batch_size push_to_hub ref_adapter_name response_length reward_model_path
    sft_model_path stop_token stop_token_id temperature total_episodes vf_coef whiten_rewards
    world_size
    """.split())


def tables():
    """(the heading or line before it, the script at its head, its rows of three cells)"""
    found = []
    for before, text in re.findall(r"\n([^\n|]+)\n\n((?:\|.*\n)+)", PAGE):
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
        if head[1].endswith(".py"):
            found.append((before, head[1], rows))
    return found


TABLES = tables()


@functools.cache
def options_of(script):
    known = {flag.option for flag in flags(ROOT / script)}
    return known | {name.replace("--", "--no-", 1) for name in known}


@pytest.mark.parametrize("before, script, rows", TABLES, ids=[before[:20] for before, *_ in TABLES])
def test_ours_are_flags_of_that_script_or_none_with_what_to_do(before, script, rows):
    for row in rows:
        theirs, ours = row[:2]
        named = re.search(r" of (\w+\.py)", ours)
        known = options_of(named[1] if named else script)
        given = re.findall(r"--[a-z][a-z0-9-]*", ours)
        assert set(given) <= known, row
        assert given or ours == "none" or ours.startswith("see ["), row
        assert re.search("[a-z]", theirs) and len(row) == 3, row


def test_each_system_has_a_table_and_its_version():
    listed = re.findall(r"^\| \[(.+?)\]\(#.*?\) \| .*[0-9a-f]{7}|^\| \[(TRL)\]", PAGE, re.MULTILINE)
    systems = {one or other for one, other in listed}
    assert systems == {"TRL", "verl", "OpenRLHF", "open-instruct", "OpenPipe ART", "rLLM"}
    assert len(TABLES) == 8 and min(len(rows) for *_, rows in TABLES) > 14
    assert all(f"\n## {system}\n" in PAGE for system in systems)


def names(before):
    """Those of the first column of the table that follows a text."""
    (rows,) = [rows for text, _, rows in TABLES if text.startswith(before)]
    return {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row[0])}


def test_names_of_trls_former_ppo_are_its_own():
    found = names("`PPOConfig`")
    assert len(found) > 25 and found <= OF_PPO


@pytest.mark.slow
def test_names_of_trl_are_fields_of_its_configs():
    package("trl")
    import inspect

    import trl

    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known |= set(inspect.signature(trl.GRPOTrainer).parameters)
    found = names("`GRPOConfig`")
    assert len(found) > 50 and found - known == set()
    known = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    found = names("`SFTConfig`")
    assert len(found) > 20 and found - known == set()
