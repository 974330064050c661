"""Trees of files as dictionaries, relative path -> content: read from disk, laid over each other, packed."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path, PurePosixPath

from envs import BadInput


def laid_over(files: dict, others: dict) -> dict:
    """files and others. A file of `files` gives way where others have a file or a folder of its name."""
    taken = {*others, *(str(folder) for path in others for folder in PurePosixPath(path).parents)}
    return {path: content for path, content in files.items() if path not in taken and not any(
        str(folder) in others for folder in PurePosixPath(path).parents)} | others


def tar(files: dict) -> bytes:
    """An archive of relative path -> str or bytes. BadInput for a path that leads out of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            # Half of a surrogate pair has no UTF-8, but a file may hold anything.
            content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
            entry = tarfile.TarInfo(str(inside(path)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def read(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder, by relative path; links and .git are left out."""
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and not path.is_symlink() and ".git" not in path.relative_to(folder).parts
            and not {"__pycache__", ".pytest_cache"} & {*path.parts}}


def inside(path) -> PurePosixPath:
    """The path, if it is a relative one that leads nowhere else."""
    pure = PurePosixPath(path)
    plain = not re.search("[\0\ud800-\udfff]", str(path)) and pure.parts
    if pure.is_absolute() or ".." in pure.parts or not plain:
        raise BadInput(f"sandbox: file {str(path)[:200]!r}: expected a relative path without '..'")
    return pure
