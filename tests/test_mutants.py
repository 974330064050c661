"""tests/mutants.py: which mutants a change calls for, which tests they meet, and what is said of them."""

import subprocess
import sys

import pytest

from tests import mutants, mutate
from tests.run_folders import needs_git

SOURCE = '''"""A file."""
LIMIT = 3


def share(found, wanted, strict=False):
    if found < 0 or not wanted:  # negative
        return 0.0
    total = found - wanted
    found.append(total, last=True)
    return [f"{x + 1}" for x in found if x in wanted]
'''
TESTS = '''
from a import share

def test_share():
    assert share(1, 0) == 0.0
'''


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "test_a.py").write_text(TESTS)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    return tmp_path


def test_mutants_are_made_of_the_lines_that_are_asked_for_and_of_no_others(tree):
    made = {}
    for mutant in mutate.made_mutants("a.py", {2, 6, 8, 9, 10}):
        lines = mutant.text.splitlines()
        pairs = enumerate(zip(SOURCE.splitlines(), lines, strict=True), 1)
        ((number, (_, new)),) = [(number, pair) for number, pair in pairs if pair[0] != pair[1]]
        assert number == mutant.lines.start
        made.setdefault(number, set()).add(new.strip())
        compile(mutant.text, "a.py", "exec")
    assert made[2] == {"LIMIT = (4)"} and made[8] == {"total = (found)", "total = (found + wanted)"}
    assert made[9] == {"pass", "found.append(total, last=(False))", "(found.append(total))"}
    assert made[10] == {'return [f"{x + 1}" for x in found if (x not in wanted)]'}
    assert len(made[6]) == mutate.MOST_OF_LINE


@needs_git
def test_lines_that_a_commit_or_the_working_tree_changed(tree):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True,
                       capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    (tree / "a.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 5"))
    (tree / "test_a.py").unlink()
    git("commit", "-am", "two")
    (tree / "a.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 5").replace("        return 0.0\n", ""))
    assert mutate.changed_lines("HEAD~1") == {"a.py": {2, 6, 7}}  # beside what was taken out
    assert mutate.changed_lines("HEAD") == {"a.py": {6, 7}}


def test_a_mutant_meets_the_tests_that_execute_its_statement_wherever_that_has_moved(tree):
    known = dict(text=SOURCE, lines={"2": 0, "5": 0, "6": 1, "7": 2, "8": 3, "9": 3})
    traced = dict(files={"a.py": known}, seconds={"one": 1.0, "two": 1.0, "three": 1.0}, failed=["three"],
                  sets=[[0], [1, 2, 3], [1], [2]])

    def meets(old, file="a.py"):
        text = (tree / "a.py").read_text()
        line = text[:text.index(old)].count("\n") + 1
        return mutate.tests_of(mutate.Mutant(file, "", "", range(line, line + 1)), traced)

    assert meets("return 0.0") == {"one"} and meets("total =") == {"two"}
    assert meets("found < 0") == meets("LIMIT = 3") == {"one", "two"}  # imports are every test's
    (tree / "a.py").write_text(SOURCE.replace("    total", "    # new\n    new = (\n        1)\n    total"))
    assert meets("total =") == {"two"} and meets("return 0.0") == {"one"}
    assert meets("new =") == {"one", "two"}  # those of the lines about it
    assert meets("total =", "b.py") is None


@pytest.mark.slow
def test_mutants_are_killed_survive_or_run_out_of_time(tree):
    script = f"""
import multiprocessing, sys
sys.path.insert(0, {str(mutate.Path(__file__).parent.parent)!r})
from pathlib import Path
from tests import mutate
multiprocessing.set_start_method("fork")
mutate.ROOT = Path({str(tree)!r})
mutate.copy_tree = lambda folder: [Path(folder, name).write_text((mutate.ROOT / name).read_text())
                                   for name in ("a.py", "test_a.py")]
table = dict(killed=("0.0", "1.0"), survives=("found < 0", "found < 1"), hangs=("total", "while True: total"),
             raises=("    if found", "    while not wanted: 1\\n    if found"))
for mutant in mutate.kept_mutants({{"a.py": {{name: pair for name, pair in table.items()
                                              if SOURCE.count(pair[0]) == 1}}}}):
    for _, failed, _ in mutate.tried([(mutant, dict(arguments=["test_a.py", "-o", "addopts="]))], 1, 20):
        print(mutant.name, failed)
"""
    done = subprocess.run([sys.executable, "-c", script.replace("SOURCE", repr(SOURCE))], text=True,
                          capture_output=True, check=True)
    assert done.stdout.splitlines()[:2] == ["killed ['test_a.py::test_share']", "survives []"]
    assert done.stdout.splitlines()[2].startswith("raises ['out of time (")


def test_the_list_and_the_table_name_each_mutant_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--list", "tools/runs.py", "*GAE*"])
    mutants.main()
    lines = capsys.readouterr().out.splitlines()
    of_runs = [line for line in lines if line.startswith("tools/runs.py ")]
    assert len({*lines}) == len(lines) > len(of_runs) == len(mutants.MUTANTS["tools/runs.py"])
