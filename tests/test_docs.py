"""What README.md and docs/ say holds, CI begins with it, and the scripts hold what the style promises."""

import ast
import collections
import contextlib
import functools
import importlib.metadata
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import refresh
from tests.mutants import MUTANTS, pytest_arguments
from tests.run_folders import ROOT, needs_git, variants
from tools import copy_shared, docs_tables, figure_age
from tools.docs_tables import DocsError, readme_commands, rendered

SCRIPTS = list(docs_tables.SCRIPTS)
WITH_ARGS = [*SCRIPTS, "docs/reading/grpo.py", "docs/reading/ppo.py"]  # each has a class Args, for tyro
PAGES = [str(page.relative_to(ROOT)) for page in docs_tables.pages()]


def test_tables_in_docs_are_current():
    assert [str(page) for page, _ in docs_tables.stale_pages()] == [], "run python tools/docs_tables.py"


@pytest.mark.parametrize("script", WITH_ARGS)
def test_every_flag_is_documented_and_read(script):
    fields = {flag.name for flag in docs_tables.flags(ROOT / script)}  # raises where a docstring is missing
    assert sorted(fields - names_read(ast.parse((ROOT / script).read_text()))) == []


def names_read(tree: ast.Module) -> set[str]:
    """x of args.x, and of self.x in class Args; checking a field in __post_init__ is not reading it."""
    def is_args(node):
        return (isinstance(node, ast.Name) and node.id == "args") or getattr(node, "attr", "") == "args"

    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_args(node.value)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            parts = [part for part in node.body if getattr(part, "name", "") != "__post_init__"]
            inside = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Attribute)]
            found |= {node.attr for node in inside if getattr(node.value, "id", "") == "self"}
    return found


def test_helpers_of_one_name_are_the_same_to_the_letter():
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    whole = dict(texts)
    assert not any(copy_shared.copy_shared(texts).values()) and texts == whole
    differ = collections.defaultdict(set)
    for text in texts.values():
        for name, (first, last) in copy_shared.definitions(text).items():
            differ[name].add("\n".join(text.splitlines()[first:last]))
    assert {name for name in copy_shared.DIFFER if len(differ[name]) < 2} == set()  # the same by now


def test_a_change_of_a_shared_function_is_copied_to_the_other_scripts():
    one = "X = 1\n\n\n@mark\ndef both():\n    return 1\n\n\ndef main():\n    both()\n"
    other = one.replace("1", "2").replace("both()", "pass").replace("def pass", "def both()")
    texts = {"one.py": one, "other.py": "import y\n" + other}
    assert copy_shared.copy_shared(texts) == {"one.py": [], "other.py": ["X", "both"]}
    assert texts == {"one.py": one, "other.py": "import y\n" + one.replace("    both()", "    pass")}


def names_allowed(script: str) -> set[str]:
    """What tests/README.md lists of a script, `main` and `Args`, and the functions of its section Maths."""
    rows = re.findall(r"^\| (`.+?`) \| (`.+`) \|$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    listed = {name for scripts, names in rows if f"`{script}`" in scripts
              for name in re.findall(r"`(\w+)`", names)}
    source = (ROOT / script).read_text()
    maths = re.search(r"\n# Maths\n(.+?)\n\n\n# [A-Z]", source, re.DOTALL)[1]
    return {"main", "Args"} | listed | set(re.findall(r"^def (\w+)", maths, re.MULTILINE))


def names_used(tree: ast.Module):
    """(scripts, name) of each name of a script in a test: imported, an attribute, replaced by monkeypatch."""
    scripts = {name.removesuffix(".py"): {name} for name in SCRIPTS}
    known = {name.asname or name.name: scripts[name.name] for node in ast.walk(tree)
             if isinstance(node, ast.Import) for name in node.names if name.name in scripts}
    if known:  # one of several scripts
        known |= {"script": set(SCRIPTS), "trainer": {"grpo_llm.py", "ppo_llm.py"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in scripts:
            yield from ((scripts[node.module], name.name) for name in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in known:
            yield known[node.value.id], node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            of, name, *_ = *node.args, None
            if getattr(of, "id", "") in known and isinstance(name, ast.Constant):
                yield known[of.id], name.value


def test_tests_use_no_other_names_of_scripts_than_tests_readme_lists():
    allowed, wrong = {script: names_allowed(script) for script in SCRIPTS}, set()
    names = "|".join(script.removesuffix(".py") for script in SCRIPTS)
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text("utf-8")
        used = names_used(ast.parse(text)) if re.search(rf"(import|from) ({names})\b", text) else ()
        wrong |= {(path.name, name) for scripts, name in used if not name.startswith("__")
                  and not any(name in allowed[script] for script in scripts)}
    assert wrong == set()


@functools.cache
def listed_commands() -> list[tuple[str, str]]:
    texts = {page: (ROOT / page).read_text("utf-8") for page in PAGES}
    return [(page, command) for page, text in texts.items() for command in readme_commands(text)]


def located(script: str) -> Path:
    return variants().get(script, ROOT / script)


@functools.cache
def known_flags(script: str) -> set[str]:
    if script in WITH_ARGS or script in variants():
        fields = re.search(r"^class Args.*?\n\n\n", located(script).read_text("utf-8"), re.M | re.S)[0]
        names = [name.replace("_", "-") for name in re.findall(r"^    (\w+): ", fields, re.MULTILINE)]
        return {"--help", *(f"--{name}" for name in names), *(f"--no-{name}" for name in names)}
    tree = ast.parse((ROOT / script).read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)
             and getattr(node.func, "attr", "") == "add_argument"]
    names = {name.value for call in calls for name in call.args if isinstance(name, ast.Constant)}
    return {"--help"} | {name for name in names if name.startswith("--")}


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({shlex.split(command)[1] for _, command in listed_commands()}))
def test_the_programs_of_the_docs_tell_their_flags(script, monkeypatch, capsys):
    if "add_argument" not in (source := located(script).read_text("utf-8")) and "tyro" not in source:
        return  # takes none, and starts its work at once
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.syspath_prepend(located(script).parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(located(script)), run_name="__main__")
    assert not ended.value.code
    shown = set(re.findall(r"--[a-z0-9][a-z0-9_-]*", capsys.readouterr().out))
    assert {name for name in known_flags(script) if not name.startswith("--no-")} <= shown


# Flags of other programs that the pages name.
FOREIGN = set("""
    --nnodes --nproc-per-node --node-rank --master-addr --master-port --max-restarts --shutdown-timeout
    --host --max-model-len --logprobs-mode --generation-config --enable-lora --max-lora-rank --max-loras
    --max-cpu-loras --enforce-eager --enable-scale-out --cap-add --security-opt --git --fuzz --reject
    --nodes --ntasks-per-node --gpus-per-node --cpus-per-task --requeue --signal --label --pid
    --require-hashes --universal --generate-hashes --python-version --upgrade
    """.split())  # torchrun, vllm serve, docker, git, patch, sbatch, diff, py-spy; pip, uv


@functools.cache
def all_flags() -> set[str]:
    paths = [path for folder in ("tools", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    paths += [ROOT / "tests" / "mutants.py"]
    programs = [*WITH_ARGS, *variants(), *(str(path.relative_to(ROOT)) for path in paths)]
    return {flag.replace("_", "-") for program in programs for flag in known_flags(program)}


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_flags_that_a_page_names_exist(page):
    """In the text too, where a flag that is gone stays longest; and names of scripts, in lines of Python."""
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)
    assert {name.replace("_", "-") for name in named} - all_flags() - FOREIGN == set()
    names = r"\b(sft|\w+_llm|a2c_vecenv|envs)\.(?!py|md|txt|csv|png|gif|diff)(\w+)"
    for module, name in re.findall(names, text):
        assert pkgutil.resolve_name(f"{module}.{name}") is not None  # raises where there is none


def test_files_that_pages_link_to_and_agents_are_told_of_exist():
    missing = []
    for page in [*PAGES, "benchmarks/README.md", "tests/README.md"]:
        text = (ROOT / page).read_text("utf-8")
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        missing += [f"{page}: {link}" for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    named = re.findall(r"[\w.]+/[\w/.]*|\w+\.(?:py|md|txt)\b", (ROOT / "AGENTS.md").read_text("utf-8"))
    missing += [f"AGENTS.md: {path}" for path in named if not (ROOT / path).exists()]
    assert missing == []


@needs_git
def test_no_file_names_a_path_of_one_machine():
    """The lookbehind lets a folder of that name inside another path pass, as in tests/root/."""
    path = r"(?<![\w.>*)}\]])/(work/|root/|home/[a-z]+/|opt/venvs)"
    found = subprocess.run(
        ["git", "-c", "grep.fallbackToNoIndex=true", "grep", "-InP", path, "--", ".", ":!runs", ":!*venv*"],
        cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert (found.returncode, found.stdout + found.stderr) == (1, "")


def test_ci_runs_the_commands_of_the_readme_to_the_letter_before_anything_else():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (pip install -r requirements\.txt && .+)$", readme, re.M)
    assert [command.split("&& ")[1] for command in commands] == ["python grpo_llm.py", "pytest"]
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    given = "pip install -r requirements.txt"
    places = [lines.index(command) for command in commands]
    assert places == sorted(places)
    for number in places:  # each in an environment of its own, in which nothing else was installed
        before = next(i for i in range(number, -1, -1) if lines[i].startswith("python3 -m venv"))
        assert {line for line in lines[before:number] if "install" in line} <= {given}
    others = [i for i, line in enumerate(lines)
              if line != given and re.search(r"\b(pip|apt-get)\b.* install\b", line)]
    assert min(set(others) - set(places)) > max(places)


def test_the_lock_has_a_version_and_hashes_of_every_package_and_those_of_the_requirements():
    lock = (ROOT / "requirements.lock").read_text()
    locked, entries = {}, re.split(r"^(?=[^ #\n])", lock, flags=re.M)[1:]
    for entry in entries:
        lines = [line.removesuffix("\\").strip() for line in entry.splitlines()]
        first, *hashes = [line for line in lines if not line.startswith("#")]
        requirement = Requirement(first)
        (version,) = requirement.specifier
        assert version.operator == "==" and "*" not in version.version and not requirement.url, first
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), first
        locked.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (entry,) = locked[canonicalize_name(requirement.name)]
            assert (entry.specifier, entry.marker) == (requirement.specifier, requirement.marker), RENEW
    # What the packages that are installed here, in these versions, need is there, too.
    for name, of_name in locked.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.distribution(name)
            if any(installed.version in entry.specifier for entry in of_name):
                needed = map(Requirement, installed.requires or ())
                missing = [one.name for one in needed if canonicalize_name(one.name) not in locked
                           and (not one.marker or one.marker.evaluate({"extra": ""}))]
                assert not missing, f"{name}: {RENEW}"
    command = "pip install --require-hashes -r requirements.lock"
    for page in ("README.md", ".ci/run"):
        assert command in (ROOT / page).read_text()
    assert lock.split("\n")[1].removeprefix("#").strip() in (ROOT / "CONTRIBUTING.md").read_text()


RENEW = "renew requirements.lock, as CONTRIBUTING.md says"


def test_each_mutant_changes_one_place_that_is_there():
    for file, mutants in MUTANTS.items():
        text = (ROOT / file).read_text("utf-8")
        assert [name for name, (old, _) in mutants.items() if text.count(old) != 1] == [], file
        assert all((ROOT / path).exists() for path in pytest_arguments(file) if path.endswith(".py"))


# The tool itself, on scripts and pages made for it.

SCRIPT = '''
class Args:
    size: int = 1  # how many
    name: str
    """a | b"""
'''
TABLE = '''<!-- flags: s.py -->
| flag | type | default | meaning |
| --- | --- | --- | --- |
| `--size` | `int` | `1` | how many |
| `--name` | `str` | required | a \\| b |
<!-- end -->
'''
PAGE = "# A page\n\n<!-- flags: s.py -->\nold\n<!-- end -->\ntext\n<!-- metrics: sft.py -->\n<!-- end -->\n"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs").mkdir()
    for script in ("s.py", *SCRIPTS):
        (tmp_path / script).write_text(SCRIPT)
    (tmp_path / "docs" / "s.md").write_text(PAGE)
    return tmp_path


def test_check_names_stale_pages_and_writing_mends_them(repository, monkeypatch, capsys):
    monkeypatch.setattr(docs_tables, "stale_pages", functools.partial(docs_tables.stale_pages, repository))
    monkeypatch.setattr(docs_tables, "ROOT", repository)
    monkeypatch.setattr(refresh, "FIGURES", ())
    assert docs_tables.main(["--check"]) == 1
    assert "docs/s.md" in capsys.readouterr().out
    assert (repository / "docs" / "s.md").read_text() == PAGE
    assert docs_tables.main([]) == 0
    assert TABLE in (repository / "docs" / "s.md").read_text()
    capsys.readouterr()
    assert docs_tables.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_every_figure_has_a_command_a_commit_and_a_page():
    there = [path for folder in ("docs/results", "docs/figures", "benchmarks/results")
             for path in (ROOT / folder).iterdir()]
    outputs = [output for figure in refresh.FIGURES for output in figure.outputs]
    assert sorted([*outputs, *refresh.BY_HAND]) == sorted(str(path.relative_to(ROOT)) for path in there)
    assert {*refresh.read_commits(ROOT)} == {figure.name for figure in refresh.FIGURES}
    pages = "".join((ROOT / page).read_text("utf-8") for page in [*PAGES, "benchmarks/README.md"])
    for figure in refresh.FIGURES:
        assert all((ROOT / source).exists() for source in figure.sources)
        missing = [output for output in figure.outputs
                   if output.startswith("docs/figures/") and Path(output).name not in pages]
        assert missing == [], "no page shows it"


def git(repository, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True)


def commit(repository, **files):
    """Write files by their names in PLACES, and commit all.  -> the commit"""
    for name, text in files.items():
        path = repository / PLACES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "a change")
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=repository, text=True).strip()


PLACES = dict(script="sft.py", env="envs/task.py", diff="docs/a.diff", data="data.txt", readme="README.md",
              log="tests/golden/sft.jsonl", commands="tools/golden.py")
ENV = '''import json


def score(reply):
    """What it is worth."""
    return 1.0  # at most
'''
DIFF = "--- a/sft.py\n+++ b/sft.py\n@@ -1,2 +1,2 @@\n context\n-old\n+new\n"
LOG = '{"iteration": 1, "train/loss": 0.5, "val/loss": 1.0, "rollout/turns": 2.0}\n'
COMMANDS = 'FEW = "--few"\nRUNS = {"sft": (f"sft.py {FEW}", 6)}\n'
OTHER_LOG, OTHER_COMMANDS = LOG.replace("0.5", "0.6"), COMMANDS.replace("few", "fewer")


@pytest.fixture
def history(tmp_path):
    git(tmp_path, "init", "--quiet")
    first = commit(tmp_path, script="x = 1\n", env=ENV, diff=DIFF, data="1", log=LOG, commands=COMMANDS)
    return tmp_path, first


@needs_git
@pytest.mark.parametrize("change, source, kind, says", [
    (dict(env=ENV.replace("at most", "or less")), "envs/task.py", "cost", ""),
    (dict(env=ENV.replace("What it", "All that it")), "envs", "cost", ""),
    (dict(env=ENV.replace("import json\n", "")), "envs", "cost", ""),
    (dict(env=ENV.replace("1.0", "2.0")), "envs", "cost", "envs/task.py computes otherwise"),
    (dict(diff=DIFF.replace("1,2", "8,2").replace(" context", " other")), "docs/a.diff", "learning", ""),
    (dict(diff=DIFF.replace("+new", "+newer")), "docs/a.diff", "learning", "docs/a.diff computes otherwise"),
    (dict(data="2"), "data.txt", "picture", "data.txt computes otherwise"),
    (dict(script="x = 2\n"), "sft.py", "cost", "sft.py computes otherwise"),
    # Of a learning curve its golden log decides.
    (dict(script="x = 2\n"), "sft.py", "learning", ""),
    (dict(script="x = 2\n", log=LOG.replace("0.5", "0.50001")), "sft.py", "learning", ""),
    (dict(log=OTHER_LOG), "sft.py", "learning", "sft.py logs another train/loss"),
    (dict(log=LOG.replace(', "val/loss": 1.0', "")), "sft.py", "learning", ""),
    (dict(log=LOG.replace("}", ', "new": 1}')), "sft.py", "learning", ""),
    (dict(log=LOG.replace("2.0", "3.0")), "sft.py", "learning", ""),
    (dict(log=OTHER_LOG, commands=OTHER_COMMANDS), "sft.py", "learning", ""),
    (dict(log=OTHER_LOG, commands=OTHER_COMMANDS, script="x = 2\n"),
     "sft.py", "learning", "sft.py changed with the command of its golden run sft"),
])
@pytest.mark.parametrize("committed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_figure_is_stale_where_its_source_computes_otherwise(
        history, change, source, kind, says, committed):
    repository, first = history
    if committed:
        commit(repository, **change)
    for name, text in change.items():
        (repository / PLACES[name]).write_text(text)
    why = figure_age.why_stale(repository, first, kind, (source,))
    assert bool(why) == bool(says) and why.startswith(says)


@needs_git
def test_a_figure_that_is_older_than_the_golden_logs_is_stale(tmp_path):
    git(tmp_path, "init", "--quiet")
    first = commit(tmp_path, script="x = 1\n")
    commit(tmp_path, log=LOG, commands=COMMANDS)
    assert figure_age.why_stale(tmp_path, first, "learning", ("sft.py",)) == "sft.py had no golden log yet"


@needs_git
def test_check_fails_where_a_figure_of_the_readme_is_stale(history, monkeypatch, capsys):
    repository, first = history
    figures = [refresh.Figure(name, (f"{name}.png",), ("envs",), "cost", 1, ())
               for name in ("first", "second")]
    (repository / "benchmarks").mkdir()
    commit(repository, readme="![The first](first.png)\n")
    refresh.write_commits(repository, {figure.name: dict(commit=first) for figure in figures})
    monkeypatch.setattr(docs_tables, "stale_pages", lambda: [])
    monkeypatch.setattr(docs_tables, "ROOT", repository)
    monkeypatch.setattr(refresh, "FIGURES", figures)
    assert docs_tables.main(["--check"]) == 0 and capsys.readouterr().out == ""
    changed = commit(repository, env=ENV.replace("1.0", "2.0"))
    assert docs_tables.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "first, a figure of README.md, is stale: envs/task.py computes otherwise" in said
    assert "run python benchmarks/refresh.py --readme" in said and "warning: second is a stale figure" in said
    shown = dict(first=dict(commit=first, same_at=changed), second=dict(commit=changed))
    refresh.write_commits(repository, shown)
    assert docs_tables.main(["--check"]) == 0 and capsys.readouterr().out == ""
    # A clone without history, and no git: it cannot tell, and does not fail.
    refresh.write_commits(repository, {figure.name: dict(commit="0123456") for figure in figures})
    assert docs_tables.main(["--check"]) == 0
    assert capsys.readouterr().out.startswith("cannot tell whether 2 figures are stale: ")
    monkeypatch.setenv("PATH", "")
    assert docs_tables.main(["--check"]) == 0
    assert capsys.readouterr().out == "cannot tell whether 2 figures are stale: git is not installed\n"


@pytest.mark.parametrize("script, page, says", [
    (SCRIPT.replace("  # how many", ""), PAGE, "Args.size has no docstring or comment"),
    (SCRIPT.replace("class Args", "class Options"), PAGE, "no class Args"),
    ("class Args(:", PAGE, "not Python"),
    (SCRIPT, PAGE.replace("sft.py", "s.py"), "s.py: tools/validate_train_log.py has no metrics of it"),
    (SCRIPT, PAGE.replace("metrics: sft.py", "lines: sft.py"), "malformed"),
    (SCRIPT, PAGE.replace(" s.py", " t.py"), "there is no t.py"),
    (SCRIPT, PAGE.replace("old\n<!-- end -->\n", ""), "<!-- end -->"),
    (SCRIPT, PAGE + "[`gone`](../s.py)", "s.md: s.py defines no gone"),
])
def test_what_cannot_be_a_table_is_named(repository, script, page, says):
    (repository / "s.py").write_text(script)
    with pytest.raises(DocsError, match=re.escape(says)):
        rendered(page, "s.md", repository)


def test_commands_are_found_in_code_blocks_alone():
    text = """
    python indented.py --seed 1 \\
        --epochs 2

```bash
pip install -r requirements.txt && python grpo_llm.py   # it's the first
$ python3 sft.py --train-files a.jsonl "b c.jsonl" --epochs 2 | tail -n 1
for s in 1 2; do CUDA_VISIBLE_DEVICES=0 python tools/x.py --seed $s --run-dir runs/<id>; done
torchrun --nproc_per_node=2 ppo_llm.py --seed 3
it's no command
```
python outside.py
"""
    assert [shlex.split(command) for command in readme_commands(text)] == [
        ["python", "indented.py", "--seed", "1", "--epochs", "2"],
        ["python", "grpo_llm.py"],
        ["python", "sft.py", "--train-files", "a.jsonl", "b c.jsonl", "--epochs", "2"],
        ["python", "tools/x.py", "--seed", "$s", "--run-dir", "runs/<id>"],
        ["python", "ppo_llm.py", "--seed", "3"],
    ]
