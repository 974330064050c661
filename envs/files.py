"""Files that a kill, a power cut or a second program must not spoil: their hash, the disk, a lock."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from envs import BadInput


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(*paths: Path) -> None:
    """What was written to files, or a name in a folder, outlives a power cut from here on."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def take_lock(file) -> None:
    """Lock a file until this process ends, however it does. BadInput where another process has it."""
    import fcntl  # not on Windows
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no child that outlives us has it
    except (BlockingIOError, PermissionError):
        file.seek(0)
        other = file.read() or "another process"
        raise BadInput(f"--run-dir {Path(file.name).parent}: {other} is running in it") from None
    except OSError as error:
        print(f"warning: {file.name} cannot be locked ({error}): a second run there goes unnoticed")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
