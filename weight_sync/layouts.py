"""Layouts: how a canonical tensor lies in other names' tensors, and the permutations by which ports go wrong.

A table row of `names` names its layout; every transform here is invertible. The converters never apply one to an
array: the layouts that checkpoints need are changes of byte order between whole rows, which they copy range by range.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """`parts` tensors, row blocks one below the other, make one canonical matrix; `stacked`: one set per expert."""

    parts: int = 1
    stacked: bool = False

    def part_shape(self, canonical: Sequence[int]) -> tuple[int, ...]:
        """Shape of one part of a canonical tensor."""
        shape = tuple(canonical[1:]) if self.stacked else tuple(canonical)
        if shape[0] % self.parts:
            raise ValueError(f"{self.parts} parts do not make the rows of {tuple(canonical)}")
        return (shape[0] // self.parts, *shape[1:])


SAME = Layout()
STACKED = Layout(stacked=True)
STACKED_GATE_UP = Layout(parts=2, stacked=True)


def join(layout: Layout, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The canonical tensor of parts in order (expert by expert)."""
    rows = [np.concatenate(parts[at : at + layout.parts]) for at in range(0, len(parts), layout.parts)]
    return np.stack(rows) if layout.stacked else rows[0]


def cut(layout: Layout, canonical: np.ndarray) -> list[np.ndarray]:
    """The parts of a canonical tensor, the inverse of `join`."""
    blocks = canonical if layout.stacked else [canonical]
    return [part for block in blocks for part in np.split(block, layout.parts)]


def exchange_gate_up(stacked: np.ndarray) -> np.ndarray:
    """[E, 2F, D] with the halves of gate and up exchanged; its own inverse."""
    return np.concatenate(np.split(stacked, 2, axis=1)[::-1], axis=1)


def rope_order(dim: int) -> np.ndarray:
    """The order that makes interleaved rotary pairs (0,1),(2,3),… two halves: 0, 2, 4, …, 1, 3, 5, …"""
    return np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])


def rope_permutation(rows: int, blocks: int, rope_dim: int, to_halves: bool) -> np.ndarray:
    """Row order of a projection whose `blocks` equal row blocks (heads) each end in `rope_dim` rotary rows.

    `to_halves` goes from interleaved pairs to halves, False back.
    """
    order = rope_order(rope_dim) if to_halves else np.argsort(rope_order(rope_dim))
    block = rows // blocks
    one = np.concatenate([np.arange(block - rope_dim), block - rope_dim + order])
    return (np.arange(blocks)[:, None] * block + one).reshape(-1)
