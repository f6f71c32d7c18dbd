"""64-bit fingerprints of a tensor's rows and columns, by which its parts are recognised wherever they are."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weight_sync.canonical import CanonicalTensor
from weight_sync.differences.reading import BLOCK, as_bits, read, round_to

PRINT_BYTES = 64  # memory for a row or column: both sides' fingerprints, and what their comparison needs


class Prints(NamedTuple):
    """Fingerprints of a tensor seen as S stacked matrices [R, C]: uint64 `rows` [S, R] and `columns` [S, C].

    Σ key[i] · bits[i] mod 2**64 over a row's or a column's elements, with the same keys for both, so that a matrix's
    rows and its transpose's columns have the same ones.
    """

    rows: np.ndarray
    columns: np.ndarray


def fingerprints(
    tensor: CanonicalTensor, dtype: np.dtype, step: int, advance: Callable[[int], None] = lambda count: None
) -> Prints:
    """Of the tensor's values in `dtype`, read `step` elements at a time; `advance` is told the bytes done with."""
    stack, height, width = as_matrices(tensor.shape)
    keys = _keys(max(height, width))
    rows, columns = np.zeros(stack * height, np.uint64), np.zeros((stack, width), np.uint64)
    for start in range(0, tensor.size, step):
        values = read(tensor, start, min(start + step, tensor.size))
        nbytes = values.nbytes
        while values.size:
            row, column = divmod(start, width)
            matrix, within = divmod(row, height)
            # whole rows of one matrix, few enough for the cache, or else a part of one row
            count = min(values.size // width, height - within, max(BLOCK // width, 1)) if column == 0 else 0
            taken = values[: count * width if count else min(width - column, BLOCK)]
            bits = as_bits(round_to(taken, dtype)).astype(np.uint64)
            if count:
                bits = bits.reshape(count, width)
                rows[row : row + count] = np.einsum("ij,j->i", bits, keys[:width])
                columns[matrix] += np.einsum("i,ij->j", keys[within : within + count], bits)
            else:
                rows[row : row + 1] += np.einsum("j,j->", bits, keys[column : column + bits.size])
                columns[matrix, column : column + bits.size] += keys[within] * bits
            start, values = start + taken.size, values[taken.size :]
        advance(nbytes)
    return Prints(rows.reshape(stack, height), columns)


def as_matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """(S, R, C) of a tensor; a vector is one column."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape), 1)


def _keys(count: int) -> np.ndarray:
    """The same pseudo-random uint64 numbers every time (splitmix64: Steele, Lea, Flood 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
