"""Control groups, of version 2 or 1: what all processes of a sandbox together may take."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PATIENCE = 10.0  # with processes that are ending [s]


def make(memory: int, processes: int) -> list[Path]:
    """New groups with limits [bytes; number]: one of v2, one or two of v1, none where there can be none."""
    groups, name = [], f"sandbox-{os.getpid()}-{secrets.token_hex(8)}"
    values = {"memory.max": memory, "memory.limit_in_bytes": memory, "pids.max": processes}
    try:
        for parent, files in places():
            groups.append(parent / name)
            groups[-1].mkdir()
            for file in files:
                (groups[-1] / file).write_text(str(values[file]))
    except BaseException:
        remove(groups)
        raise
    return groups


def remove(groups: list[Path]) -> None:
    """Remove groups, of which the last processes may still be ending."""
    for group in groups:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists() or time.monotonic() > deadline:
                break
            time.sleep(0.001)


@functools.cache
def places() -> list[tuple[Path, list[str]]]:
    """Folders in which this process can make groups, and the files in such a group that hold its limits."""
    own = {}  # {controllers: the group that this process is in}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own[controllers] = path.strip("/")

    unified = ROOT / own.get("", "")
    of_both = ["memory.max", "pids.max"]
    known = [(unified, of_both), (unified.parent, of_both),
             (ROOT / "memory" / own.get("memory", ""), ["memory.limit_in_bytes"]),
             (ROOT / "pids" / own.get("pids", ""), ["pids.max"])]
    return [(parent, found) for parent, files in known if (found := _in_new_groups(parent, files))]


def _in_new_groups(parent: Path, files: list[str]) -> list[str]:
    """Which of these files groups have that are made in a folder. Those of trainers that were killed go."""
    if not os.access(parent / "cgroup.procs", os.W_OK):
        return []

    for old in parent.glob("sandbox-*"):
        if not os.path.exists(f"/proc/{old.name.split('-')[1]}"):
            with contextlib.suppress(OSError):
                old.rmdir()

    trial = parent / f"sandbox-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        trial.mkdir()
        found = [file for file in files if (trial / file).exists()]
        trial.rmdir()
    except OSError:
        return []
    return found
