"""What a person sees while data is prepared: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 5.0


class Reporter:
    """Messages go to standard output, progress to standard error."""

    def __init__(self, quiet: bool):
        self._quiet = quiet

    def say(self, message: str) -> None:
        if not self._quiet:
            print(message, flush=True)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields `advance(amount)`, to be called until `total` is reached."""
        if self._quiet:
            yield lambda amount: None
        elif sys.stderr.isatty():
            with _bar(what, total) as advance:
                yield advance
        else:
            with _lines(what, total) as advance:
                yield advance


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


@contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[[int], None]]:
    begin = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{what}: {100 * done // max(total, 1)} %", file=sys.stderr, flush=True)

    yield advance
    print(f"{what}: done in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
