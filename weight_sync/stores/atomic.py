"""A folder that is there completely or not at all, and a journal by which an interrupted conversion goes on.

Everything is written into `.NAME.partial` beside the destination. Its journal says which files were laid out and which
tensors were filled, each with the checksum of its bytes; on a second run only what the files still hold by that
checksum counts. When all is written and synced, one rename makes it the destination.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shared_ops.errors import UserError
from shared_ops.files import sync

JOURNAL = "journal.jsonl"
_AGAIN = "run the same command again, it goes on where it stopped"


class Partial:
    """The folder under construction; a context manager that holds its lock. `UserError` where it cannot be made."""

    def __init__(self, destination: Path, fingerprint: Mapping[str, Any], overwrite: bool):
        self.destination = Path(os.path.abspath(destination))
        self.folder = self.destination.with_name(f".{self.destination.name}.partial")
        self._replaced = self.destination.with_name(f".{self.destination.name}.replaced")
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.overwrite = overwrite
        self.laid_out: dict[str, int] = {}  # files and their sizes, by the journal
        self.filled: dict[str, dict[str, Any]] = {}  # tensors, by the journal

    def __enter__(self) -> Self:
        with disk_errors(self.destination):
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._recover()
            self._check_destination()
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"{self.destination}: another conversion is writing it: wait for it or stop it") from None
        except OSError:
            pass  # a file system without locks
        with disk_errors(self.destination):
            if not self._read_journal():
                for path in self.folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._journal = os.open(self.folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if not self.laid_out and not self.filled:
                os.ftruncate(self._journal, 0)
                self._record({"conversion": self.fingerprint})
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._journal)
        os.close(self._lock)

    def record_file(self, name: str) -> None:
        """A file has its structure and its full size, durably."""
        self.laid_out[name] = (self.folder / name).stat().st_size
        self._record({"file": name, "size": self.laid_out[name]})

    def record_tensor(self, name: str, facts: Mapping[str, Any]) -> None:
        """A tensor's bytes were written; may be called from any thread."""
        self._record({"tensor": name, "facts": dict(facts)})

    def forget(self) -> None:
        """Remove everything: what was written is of no use."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self) -> None:
        """Give the folder its name."""
        with disk_errors(self.destination):
            (self.folder / JOURNAL).unlink()
            sync(self.folder)
            if self.destination.exists():
                if any(self.destination.iterdir()):
                    os.rename(self.destination, self._replaced)
                else:
                    self.destination.rmdir()
            os.rename(self.folder, self.destination)
            sync(self.destination.parent)
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _record(self, line: Mapping[str, Any]) -> None:
        os.write(self._journal, json.dumps(line, allow_nan=False).encode() + b"\n")

    def _read_journal(self) -> bool:
        """Whether the folder holds the beginning of this very conversion."""
        try:
            lines = (self.folder / JOURNAL).read_bytes().split(b"\n")
        except FileNotFoundError:
            return False
        for number, text in enumerate(lines[:-1]):  # the last one is empty, or was cut short
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if number == 0 and line.get("conversion") != self.fingerprint:
                return False
            if "file" in line:
                self.laid_out[line["file"]] = line["size"]
            elif "tensor" in line:
                self.filled[line["tensor"]] = line["facts"]
        return bool(self.laid_out)

    def _recover(self) -> None:
        """A replacement that was cut short between its two renames gives the old folder its name back."""
        if self._replaced.exists():
            if self.destination.exists():
                shutil.rmtree(self._replaced)
            else:
                os.rename(self._replaced, self.destination)

    def _check_destination(self) -> None:
        if not self.destination.exists():
            return
        if not self.destination.is_dir():
            raise UserError(f"{self.destination}: is a file; the destination is a folder that the conversion makes")
        if any(self.destination.iterdir()) and not self.overwrite:
            raise UserError(f"{self.destination}: is there already: choose another folder, or --overwrite it")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a `UserError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"{path}: no room left ({error.strerror}): free some and {_AGAIN}") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path}: may not be written ({error.strerror}): choose another folder") from None
        raise UserError(f"{path}: cannot be written ({error.strerror or error}): {_AGAIN}") from None
