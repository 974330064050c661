"""The mutants of tests/mutants.py do not rot: each still changes one place of its file."""

from tests.mutants import EQUAL, MUTANTS, ROOT, pytest_arguments


def test_each_mutant_changes_one_place_that_is_there():
    for file, mutants in MUTANTS.items():
        text = (ROOT / file).read_text()
        assert [name for name, (old, _) in mutants.items() if text.count(old) != 1] == [], file
        assert all((ROOT / path).exists() for path in pytest_arguments(file) if path.endswith(".py"))
    assert all(name in MUTANTS[file] for file, name in EQUAL)
