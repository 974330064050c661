"""Every command of the pages and docstrings is run here in short, or by a test that is named, or cannot be run here.

Flags of all programs are parsed, and the environments of training commands made, in the fast tests.
"""

import ast
import re
import shlex
from typing import NamedTuple

import pytest

from tests.run_folders import ROOT
from tools.docs_tables import code_lines, pages

PROGRAM = re.compile(
    r"(\$ )?([A-Z_]+=\S+ +)*(exec |taskset -c \d+ )*(\S+/)?"
    r"(python[0-9.]*|sh|bash|torchrun|pip|uv|pytest|ruff|vllm|docker|git|curl|patch|cp|srun|sbatch|apt-get|wandb|diff"
    r"|export|for|make_\w+\.sh|\.ci/run)(?= |$)")
NO_COMMAND = re.compile(r"(diff --git a/|for \S+(, \S+)? in .*:$|for .*\)$)")
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
VALUES = {"$s": "1", "$seed": "1", "$prompt": "short", "$name": "one"}


class Command(NamedTuple):
    page: str
    line: str  # its words, what the shell does with them aside

    @property
    def words(self):
        return shlex.split(self.line)


def texts():
    """{path: text of a page, docstring of a program, or comment that a shell script begins with}"""
    found = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", ROOT / "tests/README.md"]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in found}
    for pattern in ("*.py", "tools/*", "benchmarks/*", "docs/reading/*.py", "envs/**/*.py", "tests/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.suffix == ".py" and not name.startswith(("envs/code/repl_scenarios", "envs/code/swe_inst")):
                texts[name] = ast.get_docstring(ast.parse(path.read_text())) or ""
            elif path.suffix == ".sh":
                comment = re.match(r"(#.*\n)+", path.read_text())[0]
                texts[name] = re.sub("^# ?", "", comment, flags=re.MULTILINE)
    return texts


def simple_commands(line):
    """The commands of a line of the shell: without loops, comments, pipes, assignments and redirections."""
    line = re.sub(r" (> \S+|<<.*|\|\| \[.*)", " ", line).removeprefix("$ ")
    for name, value in VALUES.items():
        line = line.replace(name, value)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";|&"):
            words.append(word)
            continue
        while words and (words[0] in ("do", "done", "exec") or re.match(r"[A-Z_]+=", words[0])):
            words.pop(0)
        if words[:2] == ["taskset", "-c"]:
            words = words[3:]
        if words and words[0] not in ("for", "export"):
            yield shlex.join(words)
        words = []


def commands_of(page, text):
    pending = ""
    spans = [*code_lines(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans += ["", *(" ".join(span.split()) for span in INLINE.findall(prose) if " " in span or ".sh" in span)]
    for line in spans:
        if not pending and (not PROGRAM.match(line) or NO_COMMAND.match(line)):
            continue
        line = pending + line
        try:
            found = [*simple_commands(line)]
        except ValueError:  # a quotation that goes on
            pending = line + "\n"
            continue
        pending = ""
        yield from (Command(page, command) for command in found)


def commands():
    return [command for page, text in texts().items() for command in commands_of(page, text)]
