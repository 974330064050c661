"""The system calls that code in the sandbox may make, as a program of the kernel's filter (seccomp).

syscalls.txt lists them: those of Docker's default profile, without System V and POSIX queues, keys, io_uring,
memory of no process, what reaches into other processes, and what tells of other sandboxes, which read the
same files. `special` says what is refused by its arguments, and what is only said to be done.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import platform
import struct
from pathlib import Path

TABLE = Path(__file__).with_name("syscalls.txt")
PROCESSORS = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of the table, AUDIT_ARCH
FAMILIES = (1, 2, 10, 16)  # of sockets: UNIX, INET, INET6, NETLINK
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000  # flags of clone: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
PIDFD = 0x1000  # flag of clone; what stands in such a file counts the processes of the machine
HUGE_PAGES = 0x40000  # flag of mmap; the machine has some number of them
ADVICE = (12, 20, 21, 25)  # of madvise, on pages of others too: MERGEABLE, COLD, PAGEOUT, COLLAPSE
LOCKS = (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38)  # commands of fcntl; the last two are F_OFD_...
# Allowed are DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK; SETOWN, GETOWN, SETSIG, GETSIG, SETOWN_EX, GETOWN_EX;
# OFD_GETLK, DUPFD_QUERY, DUPFD_CLOEXEC, SETPIPE_SZ, GETPIPE_SZ. Not: leases, signals for what others do in a
# folder, hints that stay with a file.
COMMANDS = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 15, 16, 36, 1027, 1030, 1031, 1032)

LOAD, AND, EQUAL, AT_LEAST, HAS_BITS, ANSWER = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW = 0x7FFF0000
DONE = 0x00050000  # the call returns 0 and has done nothing; with an error number added, it fails
REFUSE, UNKNOWN, INVALID = DONE | errno.EPERM, DONE | errno.ENOSYS, DONE | errno.EINVAL


def argument(number: int) -> tuple[int, int, int, int]:
    """Load the lower half of an argument: of those looked at here the kernel reads no more."""
    return LOAD, 0, 0, 16 + 8 * number


def by_value(load, answers: dict[int, int], otherwise: int):
    """Steps that answer by what was loaded."""
    steps = list(load)
    for value, found in answers.items():
        steps += [(EQUAL, 0, 1, value), (ANSWER, 0, 0, found)]
    return [*steps, (ANSWER, 0, 0, otherwise)]


def by_bits(load, bits: int, found: int):
    """Steps that give an answer where any of the bits is set, and allow the rest."""
    return [load, (HAS_BITS, 0, 1, bits), (ANSWER, 0, 0, found), (ANSWER, 0, 0, ALLOW)]


def special():
    """{name: steps} for calls that are allowed with some arguments only."""
    families = by_value([argument(0)], dict.fromkeys(FAMILIES, ALLOW), REFUSE)
    # RWF_NOWAIT tells what is in memory, and who was here before.
    without_flags = by_value([argument(5)], {0: ALLOW}, REFUSE)
    # A lock on a file of /usr or on /dev/null would be seen in all sandboxes. Programs go on without one.
    fcntls = dict.fromkeys(COMMANDS, ALLOW) | dict.fromkeys(LOCKS, DONE)
    # File systems' own requests: EXT4_IOC_GET_ES_CACHE tells which files somebody has read.
    of_file_systems = [argument(1), (AND, 0, 0, 0xFF00)]
    return {
        "clone": by_bits(argument(0), NEW_NAMESPACES | PIDFD, REFUSE),
        "socket": families,
        "socketpair": families,
        "preadv2": without_flags,
        "pwritev2": without_flags,
        "flock": [(ANSWER, 0, 0, DONE)],
        "fcntl": by_value([argument(1)], fcntls, INVALID),
        "fadvise64": [(ANSWER, 0, 0, DONE)],
        "madvise": by_value([argument(2)], dict.fromkeys(ADVICE, INVALID), ALLOW),
        "mmap": by_bits(argument(3), HUGE_PAGES, DONE | errno.ENOMEM),
        "ioctl": by_value(of_file_systems, {ord("f") << 8: DONE | errno.ENOTTY}, ALLOW),
    }


@functools.cache
def program() -> bytes:
    """A filter that allows what TABLE lists and refuses the rest, as a program of classic BPF."""
    column, architecture = PROCESSORS[platform.machine()]
    rows = [line.split() for line in TABLE.read_text().splitlines() if line[0] != "#"]
    numbers = {row[0]: int(row[column]) for row in rows if row[column] != "-"}

    # (operation, steps to skip if true, if false, operand). Loaded are 4: the architecture, 0: the number.
    # Newer calls and clone3, whose flags are out of sight, are unknown: the C library then takes older ones.
    newest = max(numbers.values())
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (ANSWER, 0, 0, UNKNOWN), (LOAD, 0, 0, 0),
             (AT_LEAST, 0, 1, newest + 1), (ANSWER, 0, 0, UNKNOWN),
             (EQUAL, 0, 1, CLONE3), (ANSWER, 0, 0, UNKNOWN)]
    for name, answers in special().items():
        steps += [(EQUAL, 0, len(answers), numbers.pop(name)), *answers]

    left = set(numbers.values())
    for first in sorted(number for number in left if number - 1 not in left):
        end = next(number for number in range(first, newest + 2) if number not in left)
        steps += [(AT_LEAST, 0, 2, first), (AT_LEAST, 1, 0, end), (ANSWER, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (ANSWER, 0, 0, REFUSE)])
