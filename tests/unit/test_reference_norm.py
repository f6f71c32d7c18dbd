"""RMSNorm in float64 (P19) and its gradient."""

import numpy as np
import pytest

from shared_ops.reference.finite_difference import worst_error
from shared_ops.reference.norm import rms_norm, rms_norm_backward


def test_epsilon_is_added_to_the_mean_square():
    x, one = np.full((1, 6), 1e-3), np.ones(6)
    assert rms_norm(x, one, 1e-6)[0] == pytest.approx(np.full((1, 6), 0.707107), abs=5e-7)
    assert rms_norm(x, one, 1e-5)[0] == pytest.approx(np.full((1, 6), 0.301511), abs=5e-7)


def test_statistics_do_not_overflow_in_the_dtype_of_the_input():
    x = np.full((1, 4), 300, np.float16)  # 300^2 is infinite in float16
    assert rms_norm(x, np.ones(4, np.float16), 1e-6)[0] == pytest.approx(np.ones((1, 4)))
    with np.errstate(over="ignore"):
        assert (x / np.sqrt((x * x).mean(dtype=np.float16)) == 0).all()


def test_gradient():
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((2, 3, 7)), "weight": rng.standard_normal(7)}
    direction = rng.standard_normal((2, 3, 7))
    _, cache = rms_norm(arrays["x"], arrays["weight"], 0.1)
    grads = dict(zip(arrays, rms_norm_backward(direction, cache), strict=True))
    error, where = worst_error(
        lambda: (rms_norm(arrays["x"], arrays["weight"], 0.1)[0] * direction).sum(), arrays, grads, rng, 5, 8
    )
    assert error < 1e-8, where
