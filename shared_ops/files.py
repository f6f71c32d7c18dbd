"""Writes that are there completely or not at all, also after a crash of the machine."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder (new files, renames), durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace `path` by `data`: a reader, or a crash at any moment, meets the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
