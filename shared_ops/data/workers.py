"""Run a function over many items in threads, with results in the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map` in `workers` threads, at most 2 * workers items ahead, so that memory stays bounded.

    For functions that mostly wait or run outside the interpreter lock. An exception of an item is raised in
    its turn, and what has not started by then never does.
    """
    if workers == 1:
        yield from map(function, items)
        return
    items = iter(items)
    pool = ThreadPoolExecutor(workers)
    try:
        pending = deque(pool.submit(function, item) for item in islice(items, 2 * workers))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(items, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
