"""Which rank writes which part of a training state.

The arrays lie end to end, and rank r of n takes what lies between r/n and (r+1)/n of all elements (the arrays of a
training state have one dtype, so of all bytes). At most n - 1 arrays are cut, each along dimension 0, at the nearest
row; one whose cutting would shift the balance by less than 1/64 of a share stays whole.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from shared_ops.training_state import ArraySlice

SLACK = 1 / 64  # of a share


class Part(NamedTuple):
    """Rows [start, stop) along dimension 0 of the array `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def place(self, array: np.ndarray) -> np.ndarray | ArraySlice:
        """The part's values with their place in the whole array; as they are where the part is all of it."""
        if self.stop - self.start == self.shape[0]:
            return array
        return ArraySlice(array, (self.start,) + (0,) * (len(self.shape) - 1), self.shape)


def share_out(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> list[list[Part]]:
    """The parts of each rank, in the order of `shapes` (name -> shape of at least one row)."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    share = sum(map(prod, shapes.values())) / ranks
    begin = 0
    for name, shape in shapes.items():
        size, rows = prod(shape), shape[0]
        rank, start = min(int(begin / share), ranks - 1), 0
        while start < rows:
            last = rank + 1 == ranks
            stop = rows if last else _rows_before((rank + 1) * share - begin, size, rows, SLACK * share)
            if stop > start:
                shares[rank].append(Part(name, shape, start, stop))
                start = stop
            rank += 1
        begin += size
    return shares


def _rows_before(boundary: float, size: int, rows: int, slack: float) -> int:
    """How many of an array's rows lie before `boundary`, which counts elements from its begin."""
    if boundary <= slack:
        return 0
    if size - boundary <= slack:
        return rows
    return round(boundary / size * rows)
