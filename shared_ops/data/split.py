"""Which documents are for training and which for validation."""

from collections.abc import Sequence

import numpy as np
import xxhash

from shared_ops.errors import UserError

SPLITS = ("train", "validation")


def check_fractions(split: Sequence[float]) -> tuple[float, float]:
    """The fractions (train, validation) if train > 0, validation >= 0 and they add up to 1."""
    if len(split) != 2:
        raise UserError(f"split {tuple(split)}: expected two fractions, train and validation: 0.95,0.05")
    train, validation = map(float, split)
    if not (0 < train <= 1 and 0 <= validation < 1 and abs(train + validation - 1) <= 1e-6):
        raise UserError(f"split {train:g},{validation:g}: expected train > 0, validation >= 0, sum 1")
    return train, validation


def order_keys(digests: Sequence[bytes], seed: int) -> np.ndarray:
    """A hash in [0, 2^64) for each document, uint64 [n]: a function of seed and content only."""
    seed &= (1 << 64) - 1
    return np.array([xxhash.xxh3_64_intdigest(digest, seed) for digest in digests], dtype=np.uint64)


def is_validation(keys: np.ndarray, split: tuple[float, float]) -> np.ndarray:
    """bool [n]. Copies of a document share a key, so that no text is on both sides.

    A document stays where it is when others come or go, except that each split with a fraction above 0 gets
    at least one document where there are two or more; a single document is for training.
    """
    chosen = keys < np.uint64(min(int(split[1] * 2**64), 2**64 - 1))
    if split[1] > 0 and len(keys) > 1:
        if not chosen.any():
            chosen[np.argmin(keys)] = True
        if chosen.all():
            chosen[np.argmax(keys)] = False
    elif len(keys) == 1 or split[1] == 0:
        chosen[:] = False
    return chosen
