"""Multi-token prediction: shifted inputs, labels and masks (P21)."""

import numpy as np

from shared_ops.reference.loss import IGNORED
from shared_ops.reference.mtp import mtp_input_ids, mtp_labels, mtp_mask


def test_mask_shifts_again_at_each_depth():
    segments = np.array([[1, 1, 1, 1, 1, 0]])
    assert [int(mtp_mask(segments, depth).sum()) for depth in range(4)] == [5, 4, 3, 2]
    assert mtp_mask(segments, 2)[0].tolist() == [True, True, True, False, False, False]


def test_documents_end_their_own_predictions():
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0] * 8])
    ids = np.arange(10, 34).reshape(3, 8)
    labels = np.where(segments == np.roll(segments, -1, axis=1), np.roll(ids, -1, axis=1), IGNORED)
    labels[:, -1] = IGNORED
    labels[2] = IGNORED
    assert labels[0].tolist() == [11, 12, IGNORED, 14, 15, 16, IGNORED, IGNORED]
    one, two = (mtp_labels(labels, segments, depth) for depth in (1, 2))
    assert one[0].tolist() == [12, IGNORED, IGNORED, 15, 16, IGNORED, IGNORED, IGNORED]
    assert one[1].tolist() == [20, 21, 22, 23, 24, 25, IGNORED, IGNORED]
    assert two[0].tolist() == [IGNORED, IGNORED, IGNORED, 16, IGNORED, IGNORED, IGNORED, IGNORED]
    # the mask asks for the token that is embedded, the label for one more
    assert mtp_mask(segments, 1)[0].tolist() == [True, True, False, True, True, True, False, False]
    for depth in (1, 2, 9):
        assert not mtp_mask(segments, depth)[2].any()
        assert (mtp_labels(labels, segments, depth)[2] == IGNORED).all()


def test_inputs_are_the_tokens_ahead():
    ids = np.array([[5, 6, 7, 8]])
    assert mtp_input_ids(ids, 1).tolist() == [[6, 7, 8, 0]]
    assert mtp_input_ids(ids, 3).tolist() == [[8, 0, 0, 0]]
    assert mtp_input_ids(ids, 5).tolist() == [[0, 0, 0, 0]]
