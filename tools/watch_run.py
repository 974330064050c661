"""Watch what a run leaves on its machine: processes, temporary space, stale folders (docs/watch_run.md).

    python tools/watch_run.py runs/grpo/RUN                  # a line a minute, until Ctrl-C
    python tools/watch_run.py runs/grpo/RUN --once           # exit status 1 when it is over a limit

The run's processes are those whose command line names RUN as --run-dir and those that write its
train_log.jsonl. Episodes with a sandbox have child processes. A run that is killed may leave behind what it
was writing, or handing to a sampler. This program reads and tells; it ends and deletes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools.command_line import Parser, at_least, ends_in_one_line

GIB = 2**30
NEAR = 0.8  # share of a limit from which it warns
STALE = 3600.0  # age of temporary files that nobody will rename any more [s]


def run_processes(run: Path) -> list[psutil.Process]:
    """Those of the run itself, torchrun and its workers among them, as far as this user may see them."""
    found = []
    psutil.process_iter.cache_clear()  # it would take a number that is used again for the process before
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and (names_run(process, run) or writes_log(process, run)):
                found.append(process)
    return found


def names_run(process: psutil.Process, run: Path) -> bool:
    words = [word for argument in process.cmdline() for word in argument.split("=", argument[:2] == "--")]
    return any(flag in ("--run-dir", "--run_dir") and Path(process.cwd(), place).resolve() == run
               for flag, place in itertools.pairwise(words))


def writes_log(process: psutil.Process, run: Path) -> bool:
    log = str(run / "train_log.jsonl")
    return any(file.path == log and getattr(file, "mode", "w") != "r" for file in process.open_files())


def children_of(processes: list[psutil.Process]) -> set[psutil.Process]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found - set(processes)


def memory(processes) -> float:
    """Resident [GiB]; pages that several share are counted for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total / GIB


def temporary(run: Path) -> tuple[float, list[Path]]:
    """Space of what is not renamed yet or was handed to a sampler [GiB]; and what of it is old."""
    found, size, stale = [], 0, []
    for pattern in ("sync/*", ".*.writing", "*/.*.writing"):
        with contextlib.suppress(OSError):  # what was listed may be gone
            found += run.glob(pattern)
    for path in found:
        with contextlib.suppress(OSError):
            size += sum(place.lstat().st_blocks * 512 for place in (path, *path.rglob("*")))
            if time.time() - path.stat().st_mtime > STALE:
                stale.append(path)
    return size / GIB, stale


def look(run: Path, most_processes: int, most_space: float) -> tuple[str, bool]:
    """What there is to say now, and whether a limit is passed."""
    processes = run_processes(run)
    children = children_of(processes)
    space, old = temporary(run)
    stale = [] if processes else old  # a run that is alive may need what it has
    age = time.time() - (run / "train_log.jsonl").stat().st_mtime
    says = [f"processes {len(processes)} ({memory(processes):.2f} GiB)",
            f"child processes {len(children)} ({memory(children):.2f} GiB)", f"temporary {space:.2f} GiB",
            f"stale {len(stale)}" + (f" ({stale[0]} among them)" if stale else ""),
            f"last log line {age:.0f} s ago"]
    over = False
    for name, value, limit in (("child processes", len(children), most_processes),
                               ("temporary", space, most_space)):
        if value > NEAR * limit:
            over |= value > limit
            where = "over" if value > limit else "near"
            says.append(f"WARNING: {name} {value:g}, {where} the limit of {limit:g}")
    return f"{time.strftime('%H:%M:%S')}  " + " | ".join(says), over


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Watch processes, temporary space and stale folders of a run.")
    parser.add_run(every=60.0)
    parser.add_argument("--once", action="store_true", help="one line; exit status 1 when over a limit")
    parser.add_argument("--max-processes", type=at_least(1), default=256,
                        help="child processes over which it warns (256)")
    parser.add_argument("--max-space", type=at_least(0, float), default=50.0, metavar="GIB",
                        help="space of temporary files over which it warns [GiB] (50)")
    args = parser.parse_args(argv)
    if not (args.run / "train_log.jsonl").is_file():
        raise BadInput(f"{args.run}: expected a run folder, which holds train_log.jsonl")
    run = args.run.resolve()
    while True:
        line, over = look(run, args.max_processes, args.max_space)
        print(line, flush=True)
        if args.once:
            return int(over)
        time.sleep(args.every)


if __name__ == "__main__":
    sys.exit(main())
