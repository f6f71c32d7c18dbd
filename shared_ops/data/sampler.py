"""Which row comes when: a pure function of the seed and the number of samples consumed so far.

Nothing is remembered between calls, so a run resumes at a sample, whatever the batch size or number of ranks
before and after. Each epoch has its own order, a keyed permutation computed element by element (Feistel
network with cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); no list of all
rows ever exists.
"""

from collections.abc import Iterator

import numpy as np

from shared_ops.data.packing import Batch, PackedDataset, empty_rows
from shared_ops.errors import UserError

_ROUNDS = 6
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Sampler:
    """Sample i is row `permutation of epoch i // n` (i mod n) of n rows."""

    def __init__(self, n_samples: int, seed: int):
        if not 1 <= n_samples <= 2**62:
            raise UserError(f"n_samples {n_samples}: expected at least one row to draw from")
        self.n_samples = n_samples
        self.seed = np.uint64(seed & (2**64 - 1))
        # Two halves of `half` bits: the network permutes [0, 4^half), less than 4 n values.
        self._half = np.uint64(max(1, ((n_samples - 1).bit_length() + 1) // 2))

    def indices(self, start: int, count: int) -> np.ndarray:
        """The rows of samples start … start + count - 1, int64 [count]; cost grows with count alone."""
        if start < 0 or count < 0:
            raise ValueError(f"start {start}, count {count}: expected no negative number")
        samples = np.arange(start, start + count, dtype=np.uint64)
        keys = _mix(_mix(samples // np.uint64(self.n_samples) + _ODD) ^ self.seed)
        rows = self._permute(samples % np.uint64(self.n_samples), keys)
        outside = np.flatnonzero(rows >= self.n_samples)
        while outside.size:
            rows[outside] = self._permute(rows[outside], keys[outside])
            outside = outside[rows[outside] >= self.n_samples]
        return rows.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for number in range(_ROUNDS):
            keys = keys + _ODD
            left, right = right, left ^ (_mix(keys ^ _mix(right + np.uint64(number))) & mask)
        return (left << self._half) | right


class Batches:
    """The batches of one rank: rows r B / w … of each global batch of B rows, for rank r of w."""

    def __init__(self, dataset: PackedDataset, sampler: Sampler, global_batch_size: int, rank: int,
                 world_size: int):
        self._dataset, self._sampler = dataset, sampler
        self._share = _share(global_batch_size, rank, world_size)
        self._first = rank * self._share

    def at(self, consumed_samples: int) -> Batch:
        """This rank's part [B / w, S] of the global batch that begins after `consumed_samples`."""
        return self._dataset.rows(self._sampler.indices(consumed_samples + self._first, self._share))


def validation_batches(dataset: PackedDataset, rows: int, batch_size: int, rank: int,
                       world_size: int) -> Iterator[Batch]:
    """The first `rows` rows (all, if there are fewer), in order, each once; this rank's part of each batch.

    Every batch has `batch_size` rows over all ranks: the last is filled up with rows of padding.
    """
    share = _share(batch_size, rank, world_size)
    rows = min(rows, len(dataset))
    for start in range(0, rows, batch_size):
        first = start + rank * share
        indices = np.arange(first, max(first, min(first + share, rows)))
        batch = dataset.rows(indices)
        filling = empty_rows(share - len(indices), dataset.sequence_length, dataset.pad_id)
        yield {name: np.concatenate([values, filling[name]]) for name, values in batch.items()}


def _share(batch_size: int, rank: int, world_size: int) -> int:
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: expected 0 to world_size - 1 = {world_size - 1}")
    if batch_size < 1 or batch_size % world_size:
        raise UserError(f"global batch of {batch_size} rows: expected a positive multiple of "
                        f"{world_size}, the number of ranks that share it")
    return batch_size // world_size


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): uint64 in, well-mixed uint64 out, one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
