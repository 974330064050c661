"""Compare runs: their numbers with the golden logs in tests/golden.

    python tools/compare_runs.py --golden                # makes all ten golden runs and compares them
    python tools/compare_runs.py --golden grpo           # one of them
    python tools/compare_runs.py runs/mine --golden grpo # a run folder with the log of that name

Prints a line for each log: equal, or the first number that differs, by run, iteration and key, and both
values. The exit status is 0 where all are equal and 1 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import golden
from tools.command_line import Parser, ends_in_one_line


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path,
                        help="a run folder; without one, the golden runs are made")
    parser.add_argument("--golden", nargs="*", metavar="NAME", required=True,
                        help=f"golden logs to compare with: {', '.join(golden.RUNS)} (all)")
    args = parser.parse_args(argv)
    if args.run and len(args.golden) != 1:
        parser.error(f"{args.run}: expected one name behind --golden, since a run has one log")
    return min(golden.compare(args.golden, args.run), 1)


if __name__ == "__main__":
    raise SystemExit(main())
