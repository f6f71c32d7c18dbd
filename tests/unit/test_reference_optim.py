"""AdamW, decay, clipping, warm-up and the bias update (P12, P22-P24)."""

import numpy as np
import pytest

from shared_ops.reference.optim import adamw, bias_update, clip, global_norm, warmup

P22 = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def test_first_adamw_step():
    gradient = np.array([1.0, 1e-8])
    moved, m, v = adamw(np.zeros(2), gradient, np.zeros(2), np.zeros(2), step=1, **P22)
    assert -moved == pytest.approx([1.0e-3, 5.0e-4], rel=1e-6)
    without_correction = 1e-3 * m / (np.sqrt(v) + 1e-8)
    assert without_correction == pytest.approx([4.472e-4, 8.17e-5], rel=1e-3)
    eps_before_correction = 1e-3 * np.sqrt(0.05) / 0.1 * m / (np.sqrt(v) + 1e-8)
    assert eps_before_correction[1] == pytest.approx(1.827e-4, rel=1e-3)


def test_later_steps_against_the_closed_form():
    """With a constant gradient both corrected moments are exact: every step is lr g / (|g| + eps)."""
    p, m, v = np.zeros(1), np.zeros(1), np.zeros(1)
    for step in range(1, 8):
        p, m, v = adamw(p, np.array([-2.0]), m, v, step, **P22)
        assert p[0] == pytest.approx(step * 1e-3, rel=1e-7)


def test_decay_is_decoupled_and_only_on_matrices():
    zero, one = np.zeros(1), np.ones(1)
    assert adamw(one, zero, zero, zero, 1, weight_decay=0.1, decay=True, **P22)[0][0] == pytest.approx(0.9999)
    assert adamw(one, zero, zero, zero, 1, weight_decay=0.1, decay=False, **P22)[0][0] == 1.0


def test_clip():
    grads = {"a": np.array([3.0]), "b": np.array([[4.0]])}
    assert global_norm(grads) == 5
    clipped, norm = clip(grads, 1.0)
    assert norm == 5
    assert clipped["a"][0] == pytest.approx(3 / 5.000001, rel=1e-9)
    assert np.array_equal(clip(grads, 6.0)[0]["b"], grads["b"])
    # a large float32 tensor: the sum of squares is accumulated in float64
    assert global_norm({"a": np.full(1 << 22, 0.1, np.float32)}) == pytest.approx(0.1 * 2048, rel=1e-7)


def test_bias_update_counts_the_global_batch():
    rate, micro = 1e-3, np.array([6, 2, 4, 4])
    assert bias_update(np.zeros(4), micro + micro, rate).tolist() == [-0.001, 0.001, 0, 0]
    per_micro_batch = bias_update(bias_update(np.zeros(4), micro, rate), micro, rate)
    assert per_micro_batch.tolist() == [-0.002, 0.002, 0, 0]
    # signs only, and not recentred: the sum of the biases may change
    assert bias_update(np.zeros(4), [10, 2, 2, 2], rate).tolist() == [-0.001, 0.001, 0.001, 0.001]
    assert bias_update(np.array([0.5]), [7], rate).tolist() == [0.5]


def test_warmup_reaches_the_peak():
    rates = [warmup(step, 1.0, 10) for step in (1, 3, 10, 11, 500)]
    assert rates == pytest.approx([0.1, 0.3, 1, 1, 1])
    assert warmup(1, 2.0, 0) == 2.0
