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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shared_ops.errors import UserError
from shared_ops.files import sync

JOURNAL = "journal.jsonl"
_AGAIN = "run the same command again, it goes on where it stopped"


class Partial:
    """The folder under construction; a context manager that holds its lock. `UserError` where it cannot be made."""

    def __init__(
        self, destination: Path, fingerprint: Mapping[str, Any], overwrite: bool, is_weights: Callable[[Path], bool]
    ):
        self.destination = Path(os.path.realpath(destination))
        self.is_weights = is_weights
        self.folder = self.destination.with_name(f".{self.destination.name}.partial")
        self._replaced = self.destination.with_name(f".{self.destination.name}.replaced")
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.overwrite = overwrite
        self.laid_out: dict[str, int] = {}  # files and their sizes, by the journal
        self.filled: dict[str, dict[str, Any]] = {}  # tensors, by the journal

    def __enter__(self) -> Self:
        with disk_errors(self.destination):
            if self.destination.is_mount():
                raise UserError(
                    f"{self.destination}: is a mount point, which no folder can replace: name one inside it"
                )
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.folder, self._replaced):
                if path.is_symlink() or (path.exists() and not path.is_dir()):
                    raise UserError(f"{path}: is in the way of the conversion: remove it")
            self._check_destination()
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._begin()
        except BaseException:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # if it is still empty
            os.close(self._lock)
            raise
        return self

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.destination}: another conversion is writing it: wait for it or stop it") from None
        except OSError:
            pass  # a file system without locks
        with disk_errors(self.destination):
            self._recover()
            self._check_destination()
            if not self._read_journal():
                held = [*self.folder.iterdir()]
                if held and not (self.folder / JOURNAL).exists():
                    raise UserError(
                        f"{self.folder}: is no unfinished conversion: remove it, or choose another destination"
                    )
                for path in held:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._journal = os.open(self.folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if not self.laid_out:
                os.ftruncate(self._journal, 0)
                self._record({"conversion": self.fingerprint})
                os.fsync(self._journal)

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
            sync(self.folder)
            if self.destination.exists():
                if any(self.destination.iterdir()):
                    os.rename(self.destination, self._replaced)
                else:
                    self.destination.rmdir()
            os.rename(self.folder, self.destination)
            (self.destination / JOURNAL).unlink()
            sync(self.destination.parent)
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _record(self, line: Mapping[str, Any]) -> None:
        os.write(self._journal, json.dumps(line, allow_nan=False).encode() + b"\n")

    def _read_journal(self) -> bool:
        """Whether the folder holds the beginning of this very conversion. Lines that were cut short do not count."""
        try:
            lines = [_parsed(text) for text in (self.folder / JOURNAL).read_bytes().split(b"\n")]
        except FileNotFoundError:
            return False
        if lines[0].get("conversion") != self.fingerprint:
            return False
        for line in lines:
            name, size, tensor, facts = (line.get(key) for key in ("file", "size", "tensor", "facts"))
            if isinstance(name, str) and isinstance(size, int):
                self.laid_out[name] = size
            elif isinstance(tensor, str) and isinstance(facts, dict) and "file_xxh3_64" in facts:
                self.filled[tensor] = facts
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
        if not any(self.destination.iterdir()):
            return
        if not self.overwrite:
            raise UserError(f"{self.destination}: is there already: choose another folder, or --overwrite it")
        if not self.is_weights(self.destination):
            raise UserError(
                f"{self.destination}: holds no weights, and --overwrite replaces nothing else: remove it first"
            )


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a `UserError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"{path}: no room left ({error.strerror}): free some and {_AGAIN}") from None
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise UserError(f"{path}: too many open files: raise `ulimit -n`, or write fewer files") from None
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"{path}: cannot be made, a file is in its way: choose another folder") from None
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{path}: the name is too long: choose a shorter one") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path}: may not be written ({error.strerror}): choose another folder") from None
        raise UserError(f"{path}: cannot be written ({error.strerror or error}): {_AGAIN}") from None
