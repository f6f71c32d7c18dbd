"""A training batch as both twins take it: multi-token prediction targets, router masks and loss denominators."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

IGNORED = -100


class Batch(NamedTuple):
    """K = 1 + multi-token prediction depths; depth 0 is the main model.

    input_ids, labels: int32 [K, B, S]; row k holds the tokens that depth k embeds and predicts (labels -100: ignored)
    router_mask: float32 [K, B, S], 1 where a token counts for router statistics
    position_ids, segment_ids: int32 [B, S]
    denominators: float32 [K, 3]: labels, rows with a masked-in token, masked-in tokens, each summed over the batch
    """

    input_ids: np.ndarray
    labels: np.ndarray
    router_mask: np.ndarray
    position_ids: np.ndarray
    segment_ids: np.ndarray
    denominators: np.ndarray


def training_batch(rows: Mapping[str, np.ndarray], depths: int) -> Batch:
    """Add the shifted targets of `depths` prediction depths (arXiv 2412.19437, section 2.2).

    Position t of depth k embeds token t+k and predicts token t+k+1, as long as they lie in the same document.
    """
    ids, labels, segments = rows["input_ids"], rows["labels"], rows["segment_ids"]
    shape = (1 + depths, *ids.shape)
    all_ids = np.zeros(shape, np.int32)
    all_labels = np.full(shape, IGNORED, np.int32)
    mask = np.zeros(shape, np.float32)
    for k in range(1 + depths):
        length = ids.shape[1] - k
        same = (segments[:, :length] == segments[:, k:]) & (segments[:, :length] != 0)
        all_ids[k, :, :length] = ids[:, k:]
        all_labels[k, :, :length] = np.where(same, labels[:, k:], IGNORED)
        mask[k, :, :length] = same
    counts = [(all_labels != IGNORED).sum((1, 2)), mask.any(2).sum(1), mask.sum((1, 2))]
    denominators = np.stack(counts, 1).astype(np.float32)
    return Batch(all_ids, all_labels, mask, rows["position_ids"], segments, denominators)


def micro_batch(batch: Batch, first: int, rows: int) -> Batch:
    """Rows first .. first+rows-1, with the denominators of the whole batch."""
    part = slice(first, first + rows)
    return Batch(
        batch.input_ids[:, part],
        batch.labels[:, part],
        batch.router_mask[:, part],
        batch.position_ids[part],
        batch.segment_ids[part],
        batch.denominators,
    )
