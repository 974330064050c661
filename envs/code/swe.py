"""Fix an issue of a repository with one unified diff: single turn, rows of SWE-bench's schema.

    env = envs.make("swe")                           # small repositories that come with it, real bugs
    task = env.task("train", 0)                      # the issue, and the repository's files
    step = env.start(task, seed=1).step("```diff\n--- a/shop/cart.py\n+++ b/shop/cart.py\n@@ ...\n```")
    step.info["correct"], step.info["fail_to_pass"], step.info["pass_to_pass"]

    envs.make("swe", dataset="princeton-nlp/SWE-bench_Lite", snapshots="snapshots")    # your own checkouts
    envs.make("swe", dataset="rows.jsonl", executor_url="http://127.0.0.1:8002")       # container images

`correct`: the diff applies, and every test of FAIL_TO_PASS and PASS_TO_PASS passes once the row's test_patch
is applied too. Neither that nor the row's patch ever reaches a prompt. Diffs that touch tests, or what
decides over them, score 0 unrun. docs/swe.md has the rules.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import secrets
import shlex
import shutil
import tarfile
import time
import xml.etree.ElementTree
import zlib
from pathlib import Path, PurePosixPath
from typing import Literal

from envs import BadInput, Env, Episode, Step, Task, check_option, final_part, hold_out, read_rows
from envs.code import sandbox, testing, trees
from envs.code.executor import HttpExecutor, check_trust, marks, warning

BUNDLED = Path(__file__).with_name("swe_instances")
RANGE = re.compile(r"\[?\s*(?P<first>\d{1,9})\s*[-,]\s*(?P<last>\d{1,9})\s*\]?")
FIRST = 100  # instances that are taken where neither task_ids nor task_id_range says which
MAX_FILES = 100  # that a diff may touch
MAX_CHANGED = 16 * sandbox.MIB  # bytes of the files that a diff gives
TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")  # a row must have
OPTIONAL = ("version", "hints_text", "environment_setup_commit", "created_at")
HUNK = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
FENCE = re.compile(r"([ \t]*)```[ \t]*([\w+-]*)[ \t]*\r?")
MODE = re.compile(r"(?:old mode|new mode|new file mode|deleted file mode|index \w+\.\.\w+) (\d{6})\s*")
PLAIN_MODES = ("100644", "100755")
MOVED = re.compile(r"(rename|copy) (from|to) (.*)")

SYSTEM = """You fix bugs in repositories. You read an issue{files}, find its cause, and reply with one \
unified diff against the repository as it is, in this form:

```diff
--- a/path/to/file.py
+++ b/path/to/file.py
@@ -10,3 +10,3 @@
 a line that stays
-a line that goes
+a line that comes
 a line that stays
```

Counts and the lines that stay must be exact. Change as little as the issue needs, and no tests: others, \
which you do not see, will run."""


@dataclasses.dataclass(frozen=True)
class Config:
    # Which instances
    dataset: str = ""
    """rows: a .jsonl, .json or .parquet file, or a hub data set such as princeton-nlp/SWE-bench_Lite; empty:
    the small repositories that come with this"""
    split: str = "test"
    """split of a hub data set"""
    cache_dir: str = ""
    """folder with task_<instance_id>.json, a row each: written for each row that a data set gives"""
    use_cache_only: bool = False
    """the rows are those in cache_dir; nothing else is read"""
    task_ids: str | list[str | int] = ""
    """these instances, with commas or as a JSON list, such as [0,99]: by instance_id, with use_cache_only by
    file, such as 3 for task_3.json, or by their place in the data set, from 0"""
    task_id_range: str = ""
    """without task_ids, the rows of these places, from 0: first-last, or [first,last], both included; empty:
    the first 100"""
    test_share: float = 0.25
    """share of the instances, by a hash of the id, that are the test split, at least one of several; the
    others are train. 0: none is held out"""
    # What the model reads
    context: Literal["files", "oracle", "tree", "none"] = "files"
    """the repository's files as far as there is room; those that the reference patch touches, which is a
    strong hint; their names; nothing. Needs the snapshot"""
    max_context_chars: int = 30_000
    """of files and names in a prompt [characters]"""
    max_file_lines: int = 400
    """of a file; the rest is left out, and the prompt says so [lines]"""
    hints: bool = False
    """the prompt has the row's hints_text: what was said about the issue before it was fixed"""
    # How it is judged
    snapshots: str = ""
    """folder with a folder for each instance_id: the repository at base_commit"""
    executor_url: str = ""
    """service that runs the tests in the instance's container image, in place of the sandbox"""
    trust_executor: bool = False
    """train on its rewards, which the code that is tested can forge"""
    image: str = "swebench/sweb.eval.x86_64.{id}:latest"
    """name of that image; {id}: the instance_id in lower case with _1776_ for __; also {instance_id}, {repo},
    {version}"""
    setup: str = ""
    """shell commands before the tests in the container, such as: . /opt/miniconda3/bin/activate testbed"""
    export_only: bool = False
    """judge nothing and give 0: for tools/export_predictions.py and the official evaluators"""
    reward: Literal["binary", "partial"] = "binary"
    """1 if correct, else 0; or the share of FAIL_TO_PASS that passes if all of PASS_TO_PASS does, else 0"""
    guessable: bool = False
    """train on instances, too, whose tests code that computes nothing passes oftener than once in 1,000"""
    timeout: float = 60.0
    """longest run of the tests [s]"""
    memory: int = 2048
    """address space of a process in the sandbox [MiB]"""

    def __post_init__(self):
        check = functools.partial(check_option, "swe", self)
        check(not self.use_cache_only or self.cache_dir, "use_cache_only", "cache_dir beside it")
        check(not (self.use_cache_only and self.dataset), "use_cache_only", "no dataset beside it")
        check(not self.task_id_range or RANGE.fullmatch(self.task_id_range), "task_id_range",
              "first-last, or [first,last]")
        check(0 <= self.test_share <= 1, "test_share", "0 to 1")
        for option in ("max_context_chars", "max_file_lines", "memory"):
            check(getattr(self, option) >= 1, option, "1 or more")
        check(0 < self.timeout < 1e6, "timeout", "seconds above 0")
        check(not (self.snapshots and self.bundled), "snapshots", "a dataset beside it")
        check(re.fullmatch(r"([^{}]|{(id|instance_id|repo|version)})+", self.image), "image",
              "a name, with no other braces than {id}, {instance_id}, {repo} and {version}")
        judges = [bool(self.executor_url), self.export_only]
        check(sum(judges) < 2, "export_only", "no executor_url beside it")
        if not (self.bundled or self.snapshots or any(judges)):
            raise BadInput("environment swe: nothing can run the tests of these instances: give "
                           "snapshots=FOLDER (repositories at base_commit), executor_url=URL "
                           "(container images), or export_only=true (no reward; tools/export_predictions.py)")

    @property
    def bundled(self) -> bool:
        return not self.dataset and not self.use_cache_only


class Swe(Env):
    """One issue, one diff. Correct: all tests of the row pass."""

    Config = Config
    blocking = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.rows = {row["instance_id"]: row for row in load_rows(config)}
        for name in self.rows if config.snapshots else ():
            if not (folder := Path(config.snapshots) / name).is_dir():
                raise BadInput(f"environment swe: option snapshots: {folder}: no such folder")
        bound = round(config.test_share * 2**32)
        self._split = {"train": list(self.rows), "test": []}
        if bound:
            self._split = hold_out(list(self.rows), lambda name: zlib.crc32(name.encode()) < bound,
                                   "environment swe: instance")
        self.executor = None
        if config.executor_url:
            self.executor = HttpExecutor(config.executor_url)
            self.executor.check()
        elif not config.export_only:
            sandbox.check()
            if not shutil.which("git"):
                raise BadInput("environment swe: git is not installed; it applies the diffs")

    @property
    def about(self) -> str:
        """What cannot be told from right code, and which instances are left out."""
        lines = [warning("swe", self.config), testing.about_guessed("swe", self.guessed)]
        return "\n".join(line for line in lines if line)

    @functools.cached_property
    def guessed(self) -> list[str]:
        """The instances that are not trained on."""
        if self.config.guessable or self.config.export_only or self.executor:
            return []
        return [name for name in self._split["train"] if self.guess(name) > testing.MOST_GUESSED]

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """{split: its instances}"""
        left_out = {*self.guessed}
        return dict(self._split, train=[name for name in self._split["train"] if name not in left_out])

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        if split == "train" and self.guessed and not self.names["train"]:
            raise BadInput(f"{testing.about_guessed('swe', self.guessed)}; none is left")
        if split == "train" and not self._split["train"]:
            raise BadInput("environment swe: every instance belongs to the test split; name more, or choose "
                           "with test_share (test_share=0: all train)")
        if split == "test" and not self._split["test"] and self.config.test_share:
            raise BadInput("environment swe: the one instance is for training, which leaves none to be held "
                           "out; name more, or choose with test_share (0: none is, 1: all are)")
        return len(self.names[split])

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        check_trust("swe", self.config, split)
        return self.task_of(self.names[split][index])

    def task_of(self, name: str) -> Task:
        row = self.rows[name]
        shown = context(row, self.snapshot(name) or {}, self.config)
        parts = [f"Repository: {row['repo']}", f"Issue:\n{row['problem_statement'].strip()}"]
        if self.config.hints and row["hints_text"].strip():
            parts.append(f"What was said about it:\n{row['hints_text'].strip()}")
        system = SYSTEM.format(files=" and the files of a repository" if shown else "")
        messages = [{"role": "system", "content": system},
                    {"role": "user", "content": "\n\n".join([*parts, shown] if shown else parts)}]
        return Task(name, "swe", messages, {"instance_id": name})

    def start(self, task: Task, seed: int) -> Attempt:
        return Attempt(self, task)

    def solution(self, task: Task) -> str:
        return "```diff\n" + self.rows[task.data["instance_id"]]["patch"].rstrip("\n") + "\n```"

    @functools.lru_cache(256)  # noqa: B019 (an environment lives as long as its process)
    def snapshot(self, name: str) -> dict[str, bytes] | None:
        """The repository at base_commit, where there is one at hand."""
        if not self.config.bundled and not self.config.snapshots:
            return None
        folder = (BUNDLED if self.config.bundled else Path(self.config.snapshots)) / name
        return trees.read(folder)

    @functools.lru_cache(256)  # noqa: B019
    def solved(self, name: str) -> dict[str, bytes] | None:
        """The repository with the row's patch."""
        changed = apply(self.snapshot(name), self.rows[name]["patch"])
        return changed and {path: content for path, content in (self.snapshot(name) | changed).items()
                            if content is not None}

    def judge(self, name: str, patch: str) -> testing.Outcomes | None:
        """{test: outcome} with the diff and the row's test_patch, None if the diff does not apply."""
        row = self.rows[name]
        names = tuple(dict.fromkeys(row["FAIL_TO_PASS"] + row["PASS_TO_PASS"]))
        if self.executor:
            return run_in_image(self.executor, row, patch, names, self.config)
        snapshot = self.snapshot(name)
        changed = apply(snapshot, patch)
        if changed is None:
            return None
        tree = {path: content for path, content in (snapshot | changed).items() if content is not None}
        if any(str(folder) in tree for path in tree for folder in PurePosixPath(path).parents):
            return None  # a file where a folder is
        return testing.run_tests(tree, self.tests(name), list(names), row["plain"], self.config.timeout,
                                 self.config.memory, solved=self.solved(name))

    @functools.lru_cache(256)  # noqa: B019
    def tests(self, name: str) -> dict[str, bytes]:
        """The files of the row's tests, and those that decide how they run."""
        row, snapshot = self.rows[name], self.snapshot(name)
        tests = apply(snapshot, row["test_patch"])
        if tests is None:
            raise sandbox.SandboxError(f"instance {name}: field test_patch does not apply to its snapshot")
        asked = {test.partition("::")[0] for test in row["FAIL_TO_PASS"] + row["PASS_TO_PASS"]}
        asked |= {*tests, *(path for path in snapshot if testing.decides(path))}
        return {path: content for path, content in (snapshot | tests).items()
                if content is not None and path in asked}

    def guess(self, name: str, keep=None) -> float:
        """How often code that computes nothing passes the tests, at most. keep: as testing.guess has it."""
        if self.executor or self.config.export_only:
            return 1.0
        try:
            tests = self.tests(name)
        except sandbox.SandboxError:  # it will never be judged
            return 1.0
        row = self.rows[name]
        return testing.guess(tests, row["FAIL_TO_PASS"], row["problem_statement"], keep)


class Attempt(Episode):
    """One reply, one verdict."""

    def __init__(self, env: Swe, task: Task):
        self.env, self.name, self.over = env, task.data["instance_id"], False

    def step(self, reply: str) -> Step:
        row, config = self.env.rows[self.name], self.env.config
        info = dict(correct=0.0, format=0.0, allowed=0.0, applied=0.0, fail_to_pass=0.0, pass_to_pass=0.0,
                    partial=0.0, error=0.0, suspicious=0.0, guessable=self.env.guess(self.name),
                    **marks(config))
        patch = find_patch(final_part(reply))
        if self.over or patch is None:
            return self._end(info)
        info["format"] = 1.0
        try:
            patch = check_patch(patch, row["test_patch"])
        except BadPatch:
            return self._end(info)
        info["allowed"] = 1.0
        if config.export_only:
            return self._end(info)
        try:
            results = self.env.judge(self.name, patch)
        except sandbox.SandboxError:
            return self._end(info | {"error": 1.0})
        except BadInput:
            results = None  # a name that no file can have
        if results is None:
            return self._end(info)
        fixed, kept = (sum(results.get(name) == "PASSED" for name in row[field]) / max(len(row[field]), 1)
                       for field in ("FAIL_TO_PASS", "PASS_TO_PASS"))
        kept = kept if row["PASS_TO_PASS"] else 1.0
        return self._end(info | dict(
            applied=1.0, fail_to_pass=fixed, pass_to_pass=kept, partial=fixed if kept == 1 else 0.0,
            correct=float(fixed == kept == 1), suspicious=float(results.forged or results.skipped),
            guessable=self.env.guess(self.name, results.kept)))

    def _end(self, info) -> Step:
        self.over = True
        failed = info["error"] > 0  # of the sandbox or the service: no verdict
        reward = info["partial"] if self.env.config.reward == "partial" else info["correct"]
        return Step([], reward, not failed, failed, info)


# Diffs


class BadPatch(ValueError):
    """A diff that is not run, and why."""


def find_patch(text: str) -> str | None:
    """The diff of a reply: the last block fenced as diff or patch, or that begins like one; or the text.

    A fence ends with one as far to the right: one within the diff has its line's blank before it. A block
    that is all as far to the right as its fence, as in a list, is moved to the left.
    """
    lines, fenced, bare = text.split("\n"), [], []
    start, indent, language = None, "", ""
    for number, line in enumerate(lines):
        fence = FENCE.fullmatch(line)
        if not fence:
            continue
        if start is None:
            start, indent, language = number + 1, fence[1], fence[2].lower()
        elif fence[1] == indent and not fence[2]:
            block = moved_left(lines[start:number], indent)
            if language in ("diff", "patch") or begins(block) == 0:
                fenced.append(block)
            start = None
    if start is not None and language in ("diff", "patch"):  # cut off, or without its end
        fenced.append(moved_left(lines[start:], indent))
    if not fenced and (first := begins(lines)) is not None:
        bare = lines[first:]
    block = fenced[-1] if fenced else bare
    body = "\n".join(block).strip("\n")
    return f"{body}\n" if body.strip() else None


def moved_left(lines: list[str], indent: str) -> list[str]:
    """Without the indent that all lines have but blank ones; if one has it not, as they are."""
    shared = all(line.startswith(indent) or not line.strip() for line in lines)
    return [line.removeprefix(indent) for line in lines] if shared else lines


def begins(lines: list[str]) -> int | None:
    """The line at which a diff begins."""
    for number, line in enumerate(lines):
        if line.startswith("diff --git ") or line.startswith("--- ") and (
                number + 1 < len(lines) and lines[number + 1].startswith("+++ ")):
            return number
    return None


@dataclasses.dataclass
class Change:
    """What a diff does to one file."""

    old: str | None  # None: the file is new
    new: str | None  # None: it goes
    mode: str = PLAIN_MODES[0]  # of a new file
    copied: bool = False  # `old` stays as it is
    hunks: list[str] = dataclasses.field(default_factory=list)  # lines


def changed_paths(patch: str) -> list[str]:
    """The files that a diff names. BadPatch for what is no well-formed diff of text in plain files."""
    return paths_of(parse_patch(patch))


def paths_of(changes: list[Change]) -> list[str]:
    return list(dict.fromkeys(path for change in changes for path in (change.old, change.new) if path))


def parse_patch(patch: str) -> list[Change]:
    """What a diff says. BadPatch for what is no well-formed diff of text in plain files."""
    lines, number, changes, header = patch.split("\n"), 0, [], {}

    def finish():
        """A header without hunks: of a file that is empty, new or deleted, moved or copied."""
        if changing := header.keys() & {"rename", "copy", "new file", "deleted file"}:
            changes.append(change_of(header, None, [], changing))
        header.clear()

    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith(("GIT binary patch", "Binary files ")):
            raise BadPatch("binary data")
        if (mode := MODE.fullmatch(line)) and mode[1] not in PLAIN_MODES:
            raise BadPatch(f"mode {mode[1]}")
        if line.startswith("diff --git "):
            finish()
            header["names"] = line.removeprefix("diff --git ").rstrip("\r")
        elif found := MOVED.fullmatch(line):
            header.setdefault(found[1], {})[found[2]] = checked(found[3])
        elif mode and line.startswith(("new file mode", "deleted file mode")):
            header[line.partition(" mode")[0]] = mode[1]
        elif line.startswith("--- ") and number < len(lines) and lines[number].startswith("+++ "):
            names = [header_path(text) for text in (line, lines[number])]
            found, number = read_hunks(lines, number + 1)
            if line.endswith("\r"):  # Windows' line ends are the reply's, not the file's
                found = [text.removesuffix("\r") for text in found]
            changes.append(change_of(header, names, found, header.keys() & {"rename", "copy"}))
            header.clear()
    finish()
    if not changes:
        raise BadPatch("no change")
    if len(paths_of(changes)) > MAX_FILES:
        raise BadPatch(f"more than {MAX_FILES} files")
    return changes


def change_of(header: dict, names: list[str | None] | None, found: list[str], changing: set[str]) -> Change:
    """header: what stands between `diff --git` and the hunks; names: of the --- and +++ lines, if any."""
    moved = header.get("rename") or header.get("copy")
    if moved:
        if len(changing) > 1 or moved.keys() != {"from", "to"} or names not in (None, [*moved.values()]):
            raise BadPatch("a file moved to two places, or to none")
        return Change(moved["from"], moved["to"], copied="copy" in header, hunks=found)
    if names is None:
        # No other line has the name.
        old, _, new = header.get("names", "").partition(" b/")
        if not (old.startswith("a/") and old[2:] == new):
            raise BadPatch("no file")
        names = [None, checked(new)] if "new file" in header else [checked(new), None]
    if names == [None, None]:
        raise BadPatch("no file")
    if None not in names and names[0] != names[1]:
        raise BadPatch("two names of one file")
    return Change(*names, mode=header.get("new file", PLAIN_MODES[0]), hunks=found)


def write_patch(changes: list[Change]) -> str:
    """The diff that says this and nothing else, whatever programs would find in the text that was read."""
    lines = []
    for change in changes:
        old, new = change.old or change.new, change.new or change.old
        lines.append(f"diff --git a/{old} b/{new}")
        if change.old is None:
            lines.append(f"new file mode {change.mode}")
        elif change.new is None:
            lines.append(f"deleted file mode {PLAIN_MODES[0]}")
        elif old != new:
            way = "copy" if change.copied else "rename"
            lines += [f"{way} from {old}", f"{way} to {new}"]
        if change.hunks and None not in (change.old, change.new):
            # With this mode neither git nor patch takes a link for the file.
            lines.append(f"index {'1' * 40}..{'2' * 40} {PLAIN_MODES[0]}")
        if change.hunks:
            sides = (f"a/{change.old}" if change.old else "/dev/null",
                     f"b/{change.new}" if change.new else "/dev/null")
            lines += [f"--- {sides[0]}", f"+++ {sides[1]}", *change.hunks]
    return "\n".join([*lines, ""])


def header_path(line: str) -> str | None:
    """The path of a --- or +++ line without its first part (a/, b/); None for /dev/null."""
    path = line[4:].rstrip("\r").partition("\t")[0].rstrip(" ")
    if path == "/dev/null":
        return None
    _, slash, rest = path.partition("/")
    if not slash:
        raise BadPatch(f"{path[:80]}: expected a/ or b/ before a path")
    if path.startswith("/"):
        raise BadPatch("an absolute path")
    return checked(rest)


def read_hunks(lines: list[str], number: int) -> tuple[list[str], int]:
    """-> the lines of the hunks that begin at a line, of which there must be one; the number of the next"""
    found = []
    while number < len(lines) and (hunk := HUNK.match(lines[number])):
        found.append(hunk[0])
        number += 1
        old, new = (1 if count is None else int(count) for count in hunk.groups())
        while old > 0 or new > 0 or number < len(lines) and lines[number].startswith("\\"):
            # Blank lines at the end of the last hunk may have gone with those behind it.
            line = lines[number] if number < len(lines) else "" if old == new <= 3 else "end"
            kind = line[:1]
            if kind not in ("", " ", "\r", "+", "-", "\\"):
                raise BadPatch("the counts of a hunk are wrong")
            old -= kind not in ("+", "\\")
            new -= kind not in ("-", "\\")
            if kind == "\\":
                line = "\\ No newline at end of file"
            # Some leave out the space of an empty line.
            found.append(f" {line}" if kind in ("", "\r") else line)
            number += 1
        if old or new:
            raise BadPatch("the counts of a hunk are wrong")
    if not found:
        raise BadPatch("a file without a hunk")
    return found, number


def checked(path: str) -> str:
    """A path within the tree, written in one way only."""
    path = path.rstrip("\r")
    parts = path.split("/")
    if not path or len(path) > 1000 or not path.isprintable() or '"' in path or "\\" in path:
        raise BadPatch("a path that cannot be")  # git writes unusual names in quotes, with backslashes
    if any(part in ("", ".", "..") for part in parts):
        raise BadPatch(f"{path[:80]}: leads elsewhere")
    if any(part.lower().startswith(".git") and part.lower() != ".github" for part in parts):
        raise BadPatch(f"{path[:80]}: belongs to git")
    return path


def check_patch(patch: str, test_patch: str) -> str:
    """A model's diff, written anew: it says what was read of it and nothing else.

    BadPatch if it touches tests, or what decides over them.
    """
    changes = parse_patch(patch)
    theirs = {path.lower() for path in test_paths(test_patch)}
    for path in paths_of(changes):
        if path.lower() in theirs or belongs_to_tests(path):
            raise BadPatch(f"{path}: belongs to the tests")
        if any(map(str.isspace, path)):
            raise BadPatch(f"{path[:80]}: a blank, after which programs may read a date")
    for change in changes:
        if change.new not in (None, change.old) and testing.shadows(change.new):
            raise BadPatch(f"{change.new}: would be imported in place of what runs the tests")
    return write_patch(changes)


@functools.lru_cache(4096)
def test_paths(test_patch: str) -> tuple[str, ...]:
    return tuple(changed_paths(test_patch))


def belongs_to_tests(path: str) -> bool:
    parts = PurePosixPath(path.lower()).parts
    return (testing.decides(path) or testing.is_test(path.lower()) or "tests" in parts[:-1]
            or parts[0] in ("test", "testing"))


# SWE-bench's evaluators try these in turn: git apply, then patch with some fuzz.
APPLY = """git apply --whitespace=nowarn {0} || {{
    command -v patch && patch --batch --forward --fuzz=5 -p1 -i {0}; }}"""


def apply(files: dict[str, bytes], patch: str) -> dict[str, bytes | None] | None:
    """What a diff makes of the files that it names (None: deleted); None if it does not apply.

    It runs in the sandbox over these files alone and nothing else is read back, so that whatever a program
    takes a diff to say, no other file can change. Raises BadPatch, SandboxError.
    """
    changes = parse_patch(patch)
    paths = paths_of(changes)
    for change in changes:
        content, hunks = files.get(change.old) or b"", "\n".join(change.hunks)
        if content.count(b"\r\n") == content.count(b"\n") > 0 and "\r" not in hunks:
            # Windows' line ends, which no prompt shows: the diff's lines get them too.
            change.hunks = re.sub(r"(?m)^[ +-].*$(?!\n\\)", r"\g<0>\r", hunks).split("\n")
            patch = write_patch(changes)
    found = _applied(tuple((path, files.get(path)) for path in paths), patch)
    return None if found is None else {path: found.get(path) for path in paths}


@functools.lru_cache(4096)
def _applied(named, patch):
    # The names of what is read back come from outside, so no file can pass for a flag.
    script = f"mkdir -p tree; cd tree; ({APPLY.format('../diff')}) > /dev/null 2>&1 || exit 9" + ('''
        for path in "$@"; do [ -f "$path" ] && [ ! -h "$path" ] && echo "./$path"; done > ../names
        exec tar --create --file=- --verbatim-files-from --files-from=../names''')
    files = {f"tree/{path}": content for path, content in named if content is not None} | {"diff": patch}
    limits = sandbox.Limits(timeout=30, output=MAX_CHANGED // 4)
    with sandbox.Sandbox(["sh", "-c", script, "sh", *(path for path, _ in named)], files, limits) as box:
        output, finished = box.talk(b"", time.monotonic() + limits.timeout)
        if box.wait(5.0 if finished else 0.0) != 0 or output.total > len(output.head):
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(output.head), mode="r:") as archive:
                return {entry.name.removeprefix("./"): archive.extractfile(entry).read()
                        for entry in archive if entry.isreg()}
        except (tarfile.TarError, OSError, EOFError):
            return None


# Container images


def run_in_image(executor, row, patch, names, config) -> testing.Outcomes | None:
    """{test: outcome} from pytest's report in the image, None if the diff does not apply."""
    paths = sorted({name.partition("::")[0] for name in names})
    first, last = (testing.canaries(path, plain=False) for path in (paths[0], paths[-1]))
    nonce = secrets.token_hex(16)
    folder = f"/tmp/{nonce}"
    tests = " ".join(shlex.quote(path) for path in (first[0], *paths, last[0]))
    command = f"""{config.setup or ':'}
mkdir {folder} && mv .{nonce}.diff {folder}/diff && mv .{nonce}.tests {folder}/tests
({APPLY.format(f'{folder}/diff')}) > /dev/null 2>&1 < /dev/null || {{ echo {nonce} refused; exit 0; }}
echo {nonce} begun
git apply --whitespace=nowarn {folder}/tests || exit 1
python -c {shlex.quote(testing.LAUNCHER)} -q -o cache_dir={folder}/cache --maxfail=0 --tb=no \
    --junitxml={folder}/xml {tests} > /dev/null 2>&1
echo; echo {nonce}; cat {folder}/xml; echo; echo {nonce}"""
    files = {f".{nonce}.diff": patch, f".{nonce}.tests": row["test_patch"], **dict((first[:2], last[:2]))}
    image = config.image.format(id=row["instance_id"].lower().replace("__", "_1776_"), repo=row["repo"],
                                instance_id=row["instance_id"], version=row["version"])
    done = executor.test(image, files, command, config.timeout)
    if f"{nonce} refused" in done.output.splitlines():
        return None
    parts = done.output.split(f"\n{nonce}\n")
    if done.timed_out:
        return testing.Outcomes()
    if len(parts) < 3 and nonce not in done.output:
        raise sandbox.SandboxError(f"{executor.url}: instance {row['instance_id']}: the tests did not run: "
                                   f"{done.output[-200:].strip()}")
    must = first[2] | last[2]
    reports = junit_results(parts[1] if len(parts) == 3 else "", names, must)
    return testing.counted(reports, must, list(names))


def junit_results(text: str, names, canaries) -> list[tuple[str, str]]:
    """Outcomes in a JUnit report, by pytest's names of those tests that are asked for."""
    known = {}
    for name in [*names, *canaries]:
        path, _, rest = name.partition("::")
        place, bracket, parameters = rest.partition("[")
        *classes, function = place.split("::")
        where = ".".join([path.removesuffix(".py").replace("/", "."), *classes])
        known[where, f"{function}{bracket}{parameters}"] = name
    results = []
    try:
        for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
            name = known.get((case.get("classname"), case.get("name")))
            kinds = {child.tag for child in case}
            if name:
                failed = "FAILED" if kinds & {"failure", "skipped"} else "PASSED"
                results.append((name, "ERROR" if "error" in kinds else failed))
    except (xml.etree.ElementTree.ParseError, UnicodeEncodeError):  # half of a surrogate pair
        return []
    return results


# Prompts


def context(row: dict, files: dict[str, bytes], config: Config) -> str:
    """The part of a prompt that shows the repository; empty for nothing."""
    if config.context == "none" or not files:
        return ""
    names = sorted(path for path in files if not belongs_to_tests(path))
    if config.context == "oracle":
        touched = set(changed_paths(row["patch"]))
        names = [name for name in names if name in touched]
    room, parts, left = config.max_context_chars, [], []
    for name in sorted(names, key=lambda name: (not name.endswith(".py"), name)):
        try:
            text = files[name].decode().replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError:
            text = None
        lines = text.split("\n") if text else []  # as git counts them: splitlines knows ten other ends
        if len(lines) > config.max_file_lines:
            lines = [*lines[:config.max_file_lines], f"[{len(lines) - config.max_file_lines} lines left out]"]
        part = f"{name}\n```\n" + "\n".join(lines) + "\n```"
        if config.context == "tree" or text is None or len(part) > room:
            left.append(name)
        else:
            parts.append(part)
            room -= len(part)
    text = "\n\n".join(["Files:", *parts]) if parts else ""
    if left:
        listed = sandbox.clip("\n".join(left), max(room, 200))
        text += ("\n\nOther files:\n" if parts else "Files, by name:\n") + listed
    return text


# Rows


def load_rows(config: Config) -> list[dict]:
    """The rows that the options name, checked. BadInput names file and field."""
    ids = config.task_ids.split(",") if isinstance(config.task_ids, str) else config.task_ids
    ids = [str(part).strip() for part in ids if str(part).strip()]
    if config.use_cache_only:
        paths = sorted(Path(config.cache_dir).glob("task_*.json"))
        pairs = [(str(path), read_json(path, "option cache_dir")) for path in paths]
    else:
        name = config.dataset or str(BUNDLED / "rows.jsonl")
        where = f"environment swe: option dataset={name}"
        pairs = [(f"{name}: row {number}", row) for number, row in read_rows(name, where, config.split)]
    if ids:
        known = {str(number): pair for number, pair in enumerate(pairs)}
        known |= {str(row.get("instance_id")): (place, row) for place, row in pairs if isinstance(row, dict)}
        if config.use_cache_only:
            known |= {Path(place).stem.removeprefix("task_"): (place, row) for place, row in pairs}
        if missing := [name for name in ids if name not in known]:
            raise BadInput(f"environment swe: option task_ids: no instance {', '.join(missing)}")
        pairs = [known[name] for name in ids]
    elif config.task_id_range:
        first, last = map(int, RANGE.fullmatch(config.task_id_range).group("first", "last"))
        pairs = pairs[first:last + 1]
    else:
        pairs = pairs[:FIRST]
    if not pairs:
        raise BadInput(f"environment swe: no instances in {config.cache_dir or config.dataset}"
                       f"{f' at {config.task_id_range}' if config.task_id_range else ''}")
    rows = [check_row(row, place) for place, row in pairs]
    if len({row["instance_id"] for row in rows}) < len(rows):
        raise BadInput(f"environment swe: {config.dataset or config.cache_dir}: an instance_id occurs twice")
    if config.cache_dir and not config.use_cache_only:
        write_cache(Path(config.cache_dir), rows)
    return rows


def check_row(row, where: str) -> dict:
    """A row with tests as lists. BadInput names what is missing or of the wrong form."""
    def wrong(field, expected):
        value = row.get(field) if isinstance(row, dict) else row
        return BadInput(f"environment swe: {where}: field {field}: expected {expected}, "
                        f"got {str(value)[:80]!r}")

    if not isinstance(row, dict):
        raise BadInput(f"environment swe: {where}: expected an object, got {str(row)[:80]!r}")
    for field in TEXTS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise wrong(field, "a text")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", row["instance_id"]):  # it names folders
        raise wrong("instance_id", "letters, digits, dots, dashes and underscores")
    row = {field: "" for field in OPTIONAL} | row
    for field in OPTIONAL:
        row[field] = "" if row[field] is None else row[field]
        if not isinstance(row[field], str):
            raise wrong(field, "a text")
    for field in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = row.get(field)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            pass
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise wrong(field, "a list of tests, or its JSON")
        if not value and field == "FAIL_TO_PASS":
            raise wrong(field, "at least one test")
        row[field] = value
    for field in ("patch", "test_patch"):
        try:
            changed_paths(row[field])
        except BadPatch as error:
            raise wrong(field, f"a unified diff ({error})") from error
    if not isinstance(row.setdefault("plain", False), bool):
        raise wrong("plain", "true or false")
    return row


def read_json(path: Path, option: str):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = type(error).__name__
        raise BadInput(f"environment swe: {option}: {path} cannot be read ({reason})") from error


def write_cache(folder: Path, rows: list[dict]):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            path = folder / f"task_{row['instance_id']}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(row, default=str), encoding="utf-8")
            temporary.replace(path)
    except OSError as error:
        raise BadInput(f"environment swe: option cache_dir={folder}: cannot be written "
                       f"({error.strerror})") from error
