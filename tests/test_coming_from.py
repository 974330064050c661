"""docs/coming_from.md: the other projects' names are theirs. That ours are ours, test_docs.py sees to."""

import dataclasses
import os
import re

import pytest

from tests.run_folders import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text()


def names(before):
    """Those of the first column of the table that follows a text."""
    text = PAGE.partition(before)[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[0] for line in text.splitlines()[2:]]
    return [name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row)]


@pytest.mark.slow
def test_names_of_trl_are_fields_of_its_configs():
    if "CI" not in os.environ:
        pytest.importorskip("trl")
    import inspect

    import trl

    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known |= set(inspect.signature(trl.GRPOTrainer).parameters)
    found = names("## TRL\n")
    assert len(found) > 35 and set(found) - known == set()
    known = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    found = names("`SFTConfig`")
    assert len(found) > 8 and set(found) - known == set()
