"""The batch of a step: targets of the prediction depths, router masks, denominators (P20, P21)."""

import numpy as np
import pytest

from shared_ops.batch import IGNORED, Batch, micro_batch, training_batch
from shared_ops.data.packing import batch_from_documents

_ = IGNORED


def row(ids, segments):
    """One row whose labels are the next token of the same document."""
    ids, segments = np.array(ids, np.int32), np.array(segments, np.int32)
    labels = np.full_like(ids, IGNORED)
    same = (segments[1:] == segments[:-1]) & (segments[1:] != 0)
    labels[:-1][same] = ids[1:][same]
    positions = np.arange(len(ids), dtype=np.int32)
    return {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}


def batch(*rows, depths=2) -> Batch:
    return training_batch({key: np.stack([r[key] for r in rows]) for key in rows[0]}, depths)


def test_each_depth_shifts_once_more():
    b = batch(row([11, 12, 13, 14, 15, 16], [1] * 6))
    assert b.input_ids[:, 0].tolist() == [
        [11, 12, 13, 14, 15, 16],
        [12, 13, 14, 15, 16, 0],
        [13, 14, 15, 16, 0, 0],
    ]
    # at depth k position t has embedded t+k and predicts t+k+1
    assert b.labels[:, 0].tolist() == [
        [12, 13, 14, 15, 16, _],
        [13, 14, 15, 16, _, _],
        [14, 15, 16, _, _, _],
    ]
    assert b.router_mask[:, 0].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert b.denominators.tolist() == [[5, 1, 6], [4, 1, 5], [3, 1, 4]]


def test_a_mask_of_five_leaves_four_and_three():
    """P21: mask [1,1,1,1,1,0], of the tokens as of the labels."""
    padded = batch(row([11, 12, 13, 14, 15, 0], [1, 1, 1, 1, 1, 0]))
    assert padded.denominators[:, 2].tolist() == [5, 4, 3]
    assert padded.router_mask[2, 0].tolist() == [1, 1, 1, 0, 0, 0]
    whole = batch(row([11, 12, 13, 14, 15, 16], [1] * 6))
    assert (whole.labels != IGNORED).sum((1, 2)).tolist() == [5, 4, 3]


def test_nothing_crosses_a_document():
    b = batch(row([11, 12, 13, 21, 22, 31, 0, 0], [1, 1, 1, 2, 2, 3, 0, 0]))
    assert b.labels[:, 0].tolist() == [
        [12, 13, _, 22, _, _, _, _],
        [13, _, _, _, _, _, _, _],
        [_] * 8,
    ]
    assert b.router_mask[:, 0].tolist() == [
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
    ]
    # what a masked position embeds does not matter, but it is a token of the vocabulary
    assert b.input_ids[1, 0].tolist() == [12, 13, 21, 22, 31, 0, 0, 0]
    assert b.denominators.tolist() == [[3, 1, 6], [1, 1, 3], [0, 1, 1]]


def test_denominators_count_the_batch():
    rows = (
        row([11, 12, 13, 14], [1, 1, 1, 1]),
        row([21, 31, 41, 0], [1, 2, 3, 0]),  # documents of one token: nothing to predict, but experts to count
        row([0, 0, 0, 0], [0, 0, 0, 0]),  # all masked: in no denominator
        row([51, 52, 0, 0], [1, 1, 0, 0]),
    )
    b = batch(*rows)
    assert b.denominators.dtype == np.float32
    assert b.denominators.tolist() == [[4, 3, 9], [2, 2, 4], [1, 1, 2]]
    assert (b.labels[:, 2] == IGNORED).all() and b.router_mask[:, 2].sum() == 0
    empty = batch(rows[2])
    assert empty.denominators.tolist() == [[0, 0, 0]] * 3


def test_labels_that_the_data_ignores_stay_ignored():
    r = row([11, 12, 13, 14], [1, 1, 1, 1])
    r["labels"][1] = IGNORED  # a prompt, say
    b = batch(r)
    assert b.labels[:, 0].tolist() == [[12, _, 14, _], [_, 14, _, _], [14, _, _, _]]
    assert b.router_mask[0].all()
    r["segment_ids"][:] = 0
    assert (batch(r).labels == IGNORED).all()  # padding has no labels whatever the rows say


def test_without_prediction_depths_the_rows_pass_through():
    r = row([11, 12, 13, 0], [1, 1, 1, 0])
    b = batch(r, depths=0)
    assert b.input_ids.shape == (1, 1, 4)
    for given, kept in (("input_ids", b.input_ids[0]), ("labels", b.labels[0]), ("position_ids", b.position_ids),
                        ("segment_ids", b.segment_ids)):  # fmt: skip
        assert np.array_equal(kept[0], r[given])


def test_packed_rows_have_the_agreed_types_and_do_not_change():
    rows = batch_from_documents([[[5, 6, 7], [8, 9]], [[1, 2, 3, 4, 5, 6]], []], 6)
    before = {key: value.copy() for key, value in rows.items()}
    b = training_batch(rows, 3)
    assert [a.dtype for a in b] == [np.int32, np.int32, np.float32, np.int32, np.int32, np.float32]
    assert [a.shape for a in b] == [(4, 3, 6)] * 3 + [(3, 6)] * 2 + [(4, 3)]
    assert all(np.array_equal(rows[key], before[key]) for key in rows)
    assert b.labels[0, 0].tolist() == [6, 7, _, 9, _, _]
    assert set(np.unique(b.router_mask)) == {0.0, 1.0}


def test_the_longest_chain_of_depths():
    b = batch(row([11, 12, 13], [1, 1, 1]), depths=2)
    assert b.input_ids[2, 0].tolist() == [13, 0, 0] and b.router_mask[2, 0].tolist() == [1, 0, 0]
    assert b.labels[2, 0].tolist() == [_, _, _]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_micro_batches_are_the_rows_with_the_denominators_of_all(rows):
    generator = np.random.default_rng(0)
    documents = [[generator.integers(0, 99, n).tolist() for n in sizes] for sizes in ([3, 4], [7], [], [2, 2, 2])]
    whole = training_batch(batch_from_documents(documents, 7), 2)
    parts = [micro_batch(whole, first, rows) for first in range(0, 4, rows)]
    for field, axis in (("input_ids", 1), ("labels", 1), ("router_mask", 1), ("position_ids", 0), ("segment_ids", 0)):
        joined = np.concatenate([getattr(part, field) for part in parts], axis)
        assert np.array_equal(joined, getattr(whole, field)), field
    assert all(np.array_equal(part.denominators, whole.denominators) for part in parts)


def test_token_weighted_means_do_not_depend_on_the_split():
    """P20: 1 token of loss 3 and 9 of loss 1 make 1.2 in any split; the mean of the means is 2."""
    whole = batch(row([1, 2] + [0] * 10, [1, 1] + [0] * 10), row(range(10, 22), [1] * 10 + [0] * 2), depths=0)
    sums = [
        ((micro_batch(whole, row, 1).labels[0] != IGNORED) * loss).sum() for row, loss in enumerate((3.0, 1.0))
    ]
    assert sums == [3.0, 9.0] and sum(sums) / whole.denominators[0, 0] == pytest.approx(1.2)
