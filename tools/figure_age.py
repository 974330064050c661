"""Does a figure show what today's code computes? benchmarks/refresh.py and tools/docs_tables.py ask this.

A figure names the commit that it was made at and its sources. It is stale if a source computes otherwise now:

    a training script, of a figure of kind "learning"    its golden logs (tests/golden) hold other numbers
    other Python files, and scripts of other kinds       another syntax tree, but for docstrings and imports
    a .diff                                              other lines are added or removed
    any other file                                       another content

Golden logs are compared from one commit that changed them to the next, up to the working tree: by the
tolerances of tools/compare_runs.py --golden, in what both have of LEARNED. Where a commit changes the command
of a golden run, its logs cannot be compared, which matters only if it changes the script as well.

A clone without history knows no commits, and without git there is nothing to ask: CannotTell.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import golden

SCRIPTS = ("grpo_llm.py", "ppo_llm.py", "sft.py", "a2c_vecenv.py")
COMMANDS = "tools/golden.py"
# What is sampled, learned and held out. Others may come to mean another thing, and the curves stay.
LEARNED = re.compile(
    r"(val|eval)/.*|(train/|critic/)?(reward.*|.*loss|approx_kl|entropy.*|.*_norm|learning_rate)"
    r"|env_steps|response_length/.*|success_rate|episode_.*|dist_.*")
NOW = ""  # in place of a commit: the working tree


class CannotTell(Exception):
    """There is no git, or no such commit here."""


def git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CannotTell("git is not installed") from error
    if done.returncode:
        raise CannotTell((done.stderr.strip().splitlines() or ["git failed"])[-1])
    return done.stdout


def text_at(root: Path, commit: str, path: str) -> str | None:
    """A file's text at a commit; None where it was not there."""
    if commit == NOW:
        file = root / path
        return file.read_text("utf-8", "replace") if file.is_file() else None
    return committed_text(root, commit, path)


@functools.cache
def committed_text(root: Path, commit: str, path: str) -> str | None:
    try:
        return git(root, "show", f"{commit}:{path}")
    except CannotTell:
        return None


def why_stale(root: Path, commit: str, kind: str, sources: tuple[str, ...]) -> str:
    """In what a source computes otherwise than at a commit, in a few words; empty where none does."""
    git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    for source in sources:
        if kind == "learning" and source in SCRIPTS:
            why = why_logged_otherwise(root, commit, source)
        else:
            why = why_written_otherwise(root, commit, NOW, source)
        if why:
            return why
    return ""


def why_written_otherwise(root: Path, old: str, new: str, source: str) -> str:
    """source: a file, or a folder of them."""
    for path in git(root, "diff", "--name-only", *filter(None, (old, new)), "--", source).splitlines():
        before, after = text_at(root, old, path), text_at(root, new, path)
        if before is None or after is None:
            return f"{path} was {'not there' if before is None else 'there'}"
        if meaning(path, before) != meaning(path, after):
            return f"{path} computes otherwise"
    return ""


def meaning(path: str, text: str):
    """What a file says, without what only its readers see."""
    if path.endswith(".diff"):
        return [line for line in text.splitlines()
                if line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))]
    if not path.endswith(".py"):
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [part for part in node.body if not computes_nothing(part)]
    return ast.dump(tree)


def computes_nothing(node: ast.AST) -> bool:
    """An import, or a docstring, of a field too."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, (ast.Import, ast.ImportFrom))


def why_logged_otherwise(root: Path, commit: str, script: str) -> str:
    default = next(name for name, (command, _) in golden.RUNS.items() if command.split()[0] == script)
    if log_at(root, commit, default) is None:
        return f"{script} had no golden log yet"
    history = git(root, "rev-list", "--reverse", f"{commit}..HEAD", "--", "tests/golden", COMMANDS).split()
    for later in history:
        if why := why_other_logs_of(root, later, script):
            return why
    return why_other_logs(root, git(root, "rev-parse", "HEAD").strip(), NOW, script)


@functools.cache
def why_other_logs_of(root: Path, commit: str, script: str) -> str:
    return why_other_logs(root, f"{commit}^", commit, script)


def why_other_logs(root: Path, before: str, after: str, script: str) -> str:
    """What the golden logs of a script say of a step in the history."""
    old_commands, new_commands = commands_at(root, before), commands_at(root, after)
    for name, command in old_commands.items():
        old, new = log_at(root, before, name), log_at(root, after, name)
        if command.split()[0] != script or old is None or new is None:
            continue
        if new_commands.get(name) == command:
            if key := first_other(old, new):
                at = f" since {after[:7]}" if after else ""
                return f"{script} logs another {key}{at} (golden run {name})"
        elif why_written_otherwise(root, before, after, script):
            return f"{script} changed with the command of its golden run {name}, at {after[:7] or 'the end'}"
    return ""


def first_other(old: list[dict], new: list[dict]) -> str:
    """The first metric of LEARNED that differs by more than rounding; empty where none does."""
    for record, other in zip(old, new, strict=False):
        for key in filter(LEARNED.fullmatch, record):
            if key in other and not golden.excess(key, record[key], other[key], record) <= 1:  # it may be nan
                return key
    return ""


def commands_at(root: Path, commit: str) -> dict[str, str]:
    """{name of a golden run: its command} as tools/golden.py has them at a commit. Nothing is imported."""
    names: dict = {}
    for node in ast.parse(text_at(root, commit, COMMANDS) or "").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                code = compile(ast.Expression(node.value), COMMANDS, "eval")
                value = eval(code, {"__builtins__": {}}, names)
            except (NameError, TypeError, AttributeError):  # of no constant
                continue
            names[node.targets[0].id] = value
    return {name: command for name, (command, _) in names.get("RUNS", {}).items()}


def log_at(root: Path, commit: str, name: str) -> list[dict] | None:
    text = text_at(root, commit, f"tests/golden/{name}.jsonl")
    return None if text is None else [json.loads(line) for line in text.splitlines()]
