"""A progress bar with bytes, rate and time left; without a terminal a line now and then."""

import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from weight_sync.sizes import sized

_LINE_SECONDS = 15.0


class Progress:
    """A context manager; `advance` and `expect` may be called from any thread."""

    def __init__(self, what: str, total: int, quiet: bool):
        self.what, self.total, self.done = what, total, 0
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()
        self._bar = None
        self._lines = not quiet and not _is_terminal()
        if not quiet and _is_terminal():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                       TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def expect(self, count: int) -> None:
        """`count` more bytes are to be done than was thought, or fewer."""
        with self._lock:
            self.total += count
            if self._bar:
                self._bar.update(self._task, total=self.total)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        with self._lock:
            self.done += count
            if self._bar:
                self._bar.update(self._task, completed=self.done)
            elif self._lines and (now := time.monotonic()) - self._said > _LINE_SECONDS:
                self._said = now
                rate = self.done / (now - self._began)
                left = (self.total - self.done) / max(rate, 1)
                print(
                    f"{self.what}: {sized(self.done)} of {sized(self.total)}, {sized(int(rate))}/s, {left:.0f} s left",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
