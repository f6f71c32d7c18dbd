"""An output folder that is either whole or not there, whoever writes it and whenever they are stopped.

For a folder DIR everything is made in `.DIR.tmp` beside it and renamed at the end. One process at a time does
so, under a lock on `.DIR.lock`; what a killed one has left is removed by the next.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_ops.errors import UserError
from shared_ops.files import sync


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `folder` among the processes of this machine; calls `on_wait` if another holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(_beside(folder, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file, or the end of the process, releases the lock


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A new empty folder that takes the place of `folder` when the block ends well, and else disappears.

    The caller holds the lock. A reader sees the old folder, for an instant none, then the new one; files it
    has open stay as they were.
    """
    temporary, old = _beside(folder, "tmp"), _beside(folder, "old")
    _remove(temporary, old)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if folder.exists():
            os.rename(folder, old)
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        _remove(temporary, old)


def refuse_foreign_folder(folder: Path, is_ours: bool) -> None:
    """`UserError` if what stands at `folder` is a file, or a folder with contents that is not ours."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, expected a folder to be made")
    if folder.exists() and not is_ours and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty and was not made by this command: choose another folder")


def refuse_foreign_files(folder: Path, our_files: set[str]) -> None:
    """`UserError` if replacing our `folder` would delete files that are not ours."""
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if foreign := sorted(present - our_files):
        raise UserError(f"{folder}: would be made anew, but holds {foreign[0]}, which this command did not "
                        "make: move that away or choose another folder")


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
