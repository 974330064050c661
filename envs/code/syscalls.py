"""The system calls that code in the sandbox may make, as a program of the kernel's filter (seccomp).

syscalls.txt lists them: those of Docker's default profile, without System V and POSIX queues, keys, io_uring,
memory of no process, what reaches into other processes, and what tells which files others have read. Some
arguments of clone and socket are refused, and flags of preadv2 and pwritev2.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from pathlib import Path

TABLE = Path(__file__).with_name("syscalls.txt")
PROCESSORS = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of the table, AUDIT_ARCH
FAMILIES = (1, 2, 10, 16)  # of sockets: UNIX, INET, INET6, NETLINK
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000  # flags of clone: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET


@functools.cache
def program() -> bytes:
    """A filter that allows what TABLE lists and refuses the rest, as a program of classic BPF."""
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    column, architecture = PROCESSORS[platform.machine()]
    rows = [line.split() for line in TABLE.read_text().splitlines() if line[0] != "#"]
    numbers = {row[0]: int(row[column]) for row in rows if row[column] != "-"}

    # (operation, steps to skip if true, if false, operand). Loaded are 0: the number, 4: the architecture,
    # 16 and 56: the first and the sixth argument. Newer calls and clone3, whose flags are out of sight, are
    # unknown: the C library then takes older ones.
    newest = max(numbers.values())
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, unknown), (load, 0, 0, 0),
             (at_least, 0, 1, newest + 1), (answer, 0, 0, unknown),
             (equal, 0, 1, CLONE3), (answer, 0, 0, unknown)]

    steps += [(equal, 0, 4, numbers.pop("clone")), (load, 0, 0, 16), (has_bits, 0, 1, NEW_NAMESPACES),
              (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    for name in ("socket", "socketpair"):
        steps += [(equal, 0, 2 * len(FAMILIES) + 2, numbers.pop(name)), (load, 0, 0, 16)]
        for family in FAMILIES:
            steps += [(equal, 0, 1, family), (answer, 0, 0, allow)]
        steps.append((answer, 0, 0, refuse))
    for name in ("preadv2", "pwritev2"):  # RWF_NOWAIT tells what is in memory, and who was here before
        steps += [(equal, 0, 4, numbers.pop(name)), (load, 0, 0, 56), (equal, 0, 1, 0), (answer, 0, 0, allow),
                  (answer, 0, 0, refuse)]

    left = set(numbers.values())
    for first in sorted(number for number in left if number - 1 not in left):
        end = next(number for number in range(first, newest + 2) if number not in left)
        steps += [(at_least, 0, 2, first), (at_least, 1, 0, end), (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (answer, 0, 0, refuse)])
