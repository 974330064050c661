"""How many tests of real packages get doubles, and of which kind (envs/code/doubles.py): a table.

    python tools/double_shares.py numpy scipy pandas matplotlib networkx sympy
    python tools/double_shares.py path/to/tests

Of packages that are installed, their own tests (modules test_*.py, functions test* in them and in classes).
Nothing is imported or run.
"""

from __future__ import annotations

import ast
import collections
import importlib.metadata
import importlib.util
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from envs.code import doubles
from tools.command_line import Parser, ends_in_one_line

KINDS = ("value", "check", "line")  # as doubles.change has them


def counts(sources: list[str]) -> collections.Counter:
    """Tests of modules by the kind of their doubles ('': none), and all of them as `tests`."""
    found = collections.Counter()
    for source in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes that are none, in old tests
                module = ast.parse(source)
                kinds = doubles.versions(source, random.Random(0), 2).kinds
        except (SyntaxError, ValueError):
            continue
        number = 0
        for part in ast.walk(module):
            if isinstance(part, ast.Module | ast.ClassDef):
                number += sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                              and node.name.startswith("test") for node in part.body)
        found["tests"] += number
        found.update(kinds.values())
        found[""] += number - len(kinds)
    return found


def modules_of(name: str) -> tuple[str, list[Path]]:
    """A package's name and version, or a folder's name, and its modules of tests."""
    folder, label = Path(name), name
    if not folder.is_dir():
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise BadInput(f"{name}: expected a package that is installed, or a folder")
        folder, label = Path(spec.submodule_search_locations[0]), f"{name} {importlib.metadata.version(name)}"
    paths = sorted(folder.rglob("test_*.py"))
    if not paths:
        raise BadInput(f"{name}: expected modules test_*.py below {folder}, got none")
    return label, paths


def show(packages: list[str]) -> None:
    print("| tests of | modules | tests | value | check | line | none |")
    print("|---|---|---|---|---|---|---|")
    for name in packages:
        label, paths = modules_of(name)
        found = counts([path.read_text(encoding="utf-8", errors="replace") for path in paths])
        shares = [f"{found[kind] / max(1, found['tests']):.1%}" for kind in (*KINDS, "")]
        print(f"| {label} | {len(paths)} | {found['tests']} | {' | '.join(shares)} |", flush=True)


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, prog="double_shares")
    parser.add_argument("packages", nargs="+", help="packages that are installed, or folders")
    show(parser.parse_args(argv).packages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
