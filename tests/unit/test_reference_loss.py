"""Cross entropy over valid tokens (P20)."""

import numpy as np
import pytest

from shared_ops.reference.finite_difference import worst_error
from shared_ops.reference.loss import IGNORED, cross_entropy, cross_entropy_backward


def logits_with_loss(loss, tokens):
    """[tokens, 2] logits whose cross entropy with label 0 is `loss` at each token."""
    return np.tile([0.0, np.log(np.expm1(loss))], (tokens, 1))


def test_tokens_weigh_equally_whatever_the_micro_batch():
    parts = [cross_entropy(logits_with_loss(loss, n), np.zeros(n, int)) for loss, n in ((3.0, 1), (1.0, 9))]
    sums, counts = zip(*(out for out, _ in parts), strict=True)
    assert sum(sums) / sum(counts) == pytest.approx(1.2)
    assert np.mean([s / c for s, c in zip(sums, counts, strict=True)]) == pytest.approx(2.0)
    # and so the gradients: each token's is divided by the global count
    both = np.concatenate([logits_with_loss(3.0, 1), logits_with_loss(1.0, 9)])
    (_, count), cache = cross_entropy(both, np.zeros(10, int))
    split = np.concatenate([cross_entropy_backward(1 / sum(counts), cache) for _, cache in parts])
    assert np.array_equal(cross_entropy_backward(1 / count, cache), split)


def test_ignored_labels_give_nothing():
    logits = np.array([[1.0, 2, 3], [np.nan, np.inf, 0], [3, 2, 1]])
    with np.errstate(invalid="ignore"):
        (total, count), cache = cross_entropy(logits, [2, IGNORED, 2])
        dlogits = cross_entropy_backward(1.0, cache)
    assert count == 2
    assert total == pytest.approx(2 * np.log(1 + np.exp(-1) + np.exp(-2)) + 2)
    assert not dlogits[1].any()
    (total, count), cache = cross_entropy(logits[:1], [IGNORED])
    assert (total, count) == (0.0, 0)
    assert not cross_entropy_backward(1.0 / max(count, 1), cache).any()


def test_large_logits_do_not_overflow():
    assert cross_entropy([[5000.0, 0.0]], [1])[0][0] == pytest.approx(5000)
    assert cross_entropy([[5000.0, 0.0]], [0])[0][0] == 0


def test_gradient():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((2, 5, 7)), rng.integers(0, 7, (2, 5))
    labels[0, 1] = labels[1, 4] = IGNORED
    grad = cross_entropy_backward(0.7, cross_entropy(logits, labels)[1])
    error, where = worst_error(
        lambda: 0.7 * cross_entropy(logits, labels)[0][0], {"logits": logits}, {"logits": grad}, rng, 5, 8
    )
    assert error < 1e-8, where
