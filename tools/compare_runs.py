"""Compare runs: the flags in which they differ, and how well each did on what was held out.

    python tools/compare_runs.py runs/grpo/A runs/grpo/B                     # a table to read
    python tools/compare_runs.py runs/grpo/* --form markdown                 # one for a page
    python tools/compare_runs.py runs/grpo/* --form csv > runs.csv           # a row for each run
    python tools/compare_runs.py --golden                 # makes the golden runs of tests/golden and compares
    python tools/compare_runs.py runs/mine --golden grpo  # a run folder with the golden log of that name

A run is its folder, or its train_log.jsonl. Held out are val/<source>/pass@n, greedy, val/loss, and what
eval/ measures of a2c: each in the last evaluation, and in the best one, with its iteration. docs/train_log.md
has more. plot_train_log.py takes `differing` from here.

With --golden: a line for each log, equal, or the first number that differs, by run, iteration and key, and
both values; the exit status is 0 where all are equal and 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import golden, runs
from tools.command_line import Parser, ends_in_one_line
from tools.validate_train_log import is_number

HELD_OUT = re.compile(r"val/.+/(greedy|pass@\d+)|val/loss|eval/(greedy_)?(success_rate|return)")
FACTS = ("algo", "env", "config_hash", "experiment_hash", "git_sha")  # shown of every run
BOLD, PLAIN = "\033[1m", "\033[0m"


def differing(metas: list[dict], but=frozenset()) -> dict[str, list]:
    """{flag: its value in each} of the flags that differ, but for some; None where a run has no such flag.

    Where no flag differs but hashes do, what else a run shares with its continuation: hashes of weights, of
    the reward's source, of files.
    """
    found = {}
    for name in dict.fromkeys(name for meta in metas for name in meta["args"]):
        values = [meta["args"].get(name) for meta in metas]
        if name not in but and any(value != values[0] for value in values):
            found[f"--{name.replace('_', '-')}"] = values
    if found:
        return found
    for name in dict.fromkeys(name for meta in metas for name in meta if name.endswith("_sha256")):
        values = [meta.get(name) for meta in metas]
        if any(value != values[0] for value in values):
            found[name] = values
    return found


def held_out(records: list[dict]) -> dict[str, tuple]:
    """{metric: (final, best, iteration of the best)} of what was measured on held-out tasks."""
    found = {}
    for record in records:
        for key, value in record.items():
            if not HELD_OUT.fullmatch(key) or not is_number(value):
                continue
            _, best, at = found.get(key, (value, value, record["iteration"]))
            better = value < best if key == "val/loss" else value > best
            if better:
                best, at = value, record["iteration"]
            found[key] = (value, best, at)
    return found


def table(logs: list[runs.Log]) -> dict[str, list]:
    """{name of a row: its value in each run, None where there is none}"""
    metas = [log.meta | {"experiment_hash": runs.experiment_hash(log.meta)} for log in logs]
    rows = {name: [meta.get(name) for meta in metas] for name in FACTS}
    rows["iterations"] = [max((record["iteration"] for record in log.records), default=0) for log in logs]
    rows |= differing(metas, but={"run_dir"})
    figures = [held_out(log.records) for log in logs]
    for key in sorted({key for of_run in figures for key in of_run}):
        for number, part in enumerate(("final", "best", "best at")):
            rows[f"{key} {part}"] = [of_run[key][number] if key in of_run else None for of_run in figures]
    return rows


def shown(value, name: str = "") -> str:
    if value is None:
        return "-"
    if name.endswith(("_hash", "_sha", "_sha256")):
        return str(value)[:8]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return " ".join(str(value).splitlines())


def best_of(name: str, values: list) -> set[int]:
    """Places of the best values of a row of held-out figures; none where all are equal."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not name.endswith((" final", " best")) or len(set(numbers)) < 2:
        return set()
    best = min(numbers) if name.startswith("val/loss") else max(numbers)
    return {place for place, value in enumerate(values) if value == best}


def as_text(names: list[str], rows: dict[str, list], bold: bool) -> str:
    """A column for each run, as wide as it needs; in a terminal the best figure of a row is bold."""
    cells = [["", *names]]
    cells += [[name, *(shown(value, name) for value in values)] for name, values in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    best = [set(), *(best_of(name, values) for name, values in rows.items())]
    lines = []
    for row, places in zip(cells, best, strict=True):
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for place in places if bold else ():
            padded[place + 1] = f"{BOLD}{padded[place + 1]}{PLAIN}"
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def as_markdown(names: list[str], rows: dict[str, list]) -> str:
    lines = [["", *map(cell, names)], ["---"] * (1 + len(names))]
    for name, values in rows.items():
        texts = [cell(shown(value, name)) for value in values]
        for place in best_of(name, values):
            texts[place] = f"**{texts[place]}**"
        lines.append([f"`{cell(name)}`", *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_csv(names: list[str], rows: dict[str, list]) -> str:
    """A row for each run, with whole hashes and unrounded numbers."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", *rows])
    for number, name in enumerate(names):
        values = [values[number] for values in rows.values()]
        writer.writerow([name, *("" if value is None else value for value in values)])
    return file.getvalue().rstrip("\n")


def compare(paths: list[Path], form: str, bold: bool) -> str:
    logs = [runs.read(path, damaged=[]) for path in paths]
    names = [log.folder.name for log in logs]
    if len(set(names)) < len(names):  # folders of one name in different places
        names = [str(path) for path in paths]
    rows = table(logs)
    if form == "csv":
        return as_csv(names, rows)
    return as_markdown(names, rows) if form == "markdown" else as_text(names, rows, bold)


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Compare runs: flags that differ, and held-out figures.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", nargs="*", type=Path, metavar="RUN", help="run folders, or their logs")
    parser.add_argument("--form", choices=("text", "markdown", "csv"), default="text", help="of the table")
    parser.add_argument("--golden", nargs="*", metavar="NAME",
                        help=f"compare with golden logs: {', '.join(golden.RUNS)} (all)")
    args = parser.parse_args(argv)
    if args.golden is not None:
        if len(args.run) > 1 or args.run and len(args.golden) != 1:
            parser.error("expected one run and one name behind --golden, or no run")
        return min(golden.compare(args.golden, args.run[0] if args.run else None), 1)
    if not args.run:
        parser.error("expected RUN, the folders of runs, or --golden")
    print(compare(args.run, args.form, bold=sys.stdout.isatty()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
