"""Rotary pairs, YaRN and its scales (P1-P4)."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from shared_ops.reference import rope

PERMUTED = [0, 2, 1, 3]  # between interleaved and half-split pairs at d=4


def yarn(**changes):
    published = {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return SimpleNamespace(**(published | changes))


def rotated(x, position):
    cos, sin = rope.tables([position], rope.inverse_frequencies(len(x), 1e4))
    return rope.rotate(np.array([x]), cos, sin)[0][0]


def half_split(x, position):
    """The other convention, pairs (i, i + d/2): what code without the permutation computes."""
    half = len(x) // 2
    angle = position * rope.inverse_frequencies(len(x), 1e4)
    low, high, cos, sin = x[:half], x[half:], np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, low * sin + high * cos])


@pytest.mark.parametrize(
    ("q_position", "k_position", "right", "unpermuted", "only_q"),
    [(1, 0, 6.306166, 5.703238, 5.008947), (3, 1, 7.653869, 4.501984, 4.100867), (5, 5, 7.25, 7.25, None)],
)
def test_pairs_are_interleaved(q_position, k_position, right, unpermuted, only_q):
    q, k = np.array([1.0, 2, 3, 4]), np.array([0.5, -1, 0.25, 2])
    assert rotated(q, q_position) @ rotated(k, k_position) == pytest.approx(right, abs=1e-6)
    assert half_split(q, q_position) @ half_split(k, k_position) == pytest.approx(unpermuted, abs=1e-6)
    permuted_q = half_split(q[PERMUTED], q_position)
    assert permuted_q @ half_split(k[PERMUTED], k_position) == pytest.approx(right, abs=1e-6)
    if only_q is not None:
        assert permuted_q @ half_split(k, k_position) == pytest.approx(only_q, abs=1e-6)


def test_output_stays_interleaved():
    y = rotated(np.array([1.0, 0, 0, 0, 0, 0, 1, 0]), 2)
    slow = 2 * 1e4 ** (-6 / 8)
    expected = [np.cos(2), np.sin(2), 0, 0, 0, 0, np.cos(slow), np.sin(slow)]
    assert y == pytest.approx(np.array(expected))


def test_rotation_backward_is_its_transpose():
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((2, 3, 5, 8)), rng.standard_normal((2, 3, 5, 8))
    angle = rng.standard_normal((2, 3, 1, 4))
    y, cache = rope.rotate(x, 1.3 * np.cos(angle), 1.3 * np.sin(angle))
    assert (y * dy).sum() == pytest.approx((x * rope.rotate_backward(dy, cache)).sum(), rel=1e-13)


def test_yarn_scales():
    v3, lite = yarn(), yarn(mscale=0.707, mscale_all_dim=0.707)
    assert rope.softmax_scale(192, v3) == pytest.approx(0.1352338, abs=5e-8)
    assert rope.softmax_scale(192) == pytest.approx(0.0721688, abs=5e-8)
    assert rope.softmax_scale(192, lite) == pytest.approx(0.1147214, abs=5e-8)
    assert rope.amplitude(v3) == rope.amplitude(lite) == rope.amplitude() == 1.0
    # published configs have both mscales equal: only a made-up one tells which goes where
    unequal = yarn(mscale=1.0, mscale_all_dim=0.707)
    assert rope.amplitude(unequal) == pytest.approx(1.085726, abs=5e-7)
    factor = rope.softmax_scale(192, unequal) * 192**0.5
    assert factor == pytest.approx(1.589626, abs=5e-7)
    assert rope.mscale(40, unequal.mscale) ** 2 == pytest.approx(1.873854, abs=5e-7)
    # without mscale_all_dim the amplitude has the whole temperature and the softmax none
    assert rope.amplitude(yarn(mscale_all_dim=0.0)) == pytest.approx(rope.mscale(40, 1))
    assert rope.softmax_scale(192, yarn(mscale_all_dim=0.0)) == rope.softmax_scale(192)
    assert rope.mscale(0.5, 1.0) == 1.0


def test_yarn_ramp_starts_from_the_original_length():
    assert rope.ramp_range(64, 1e4, yarn()) == (10, 23)
    assert rope.ramp_range(64, 1e4, yarn(original_max_position_embeddings=163840)) == (23, 36)
    frequencies = rope.inverse_frequencies(64, 1e4, yarn())
    listed = [1, 0.056234, 0.0055, 3.33e-5, 3.33e-6]
    assert frequencies[[0, 10, 16, 23, 31]] == pytest.approx(listed, rel=2e-3)
    plain = rope.inverse_frequencies(64, 1e4)
    assert np.array_equal(frequencies[:11], plain[:11])
    assert frequencies[23:] == pytest.approx(plain[23:] / 40)


def test_yarn_ramp_of_no_width_is_a_step():
    # the window is so short that every pair turns less than once in it
    frequencies = rope.inverse_frequencies(8, 1e4, yarn(original_max_position_embeddings=4))
    assert frequencies == pytest.approx(rope.inverse_frequencies(8, 1e4) / [1, 40, 40, 40])


def test_positions_are_not_rounded_to_bfloat16():
    rounded = np.float64(np.array(257).astype(ml_dtypes.bfloat16))
    assert rounded == 256
    cos, _ = rope.tables([257, rounded], np.ones(1))
    assert cos[0, 0] == pytest.approx(np.cos(257), abs=1e-15)
    assert abs(cos[0, 0] - cos[1, 0]) == pytest.approx(0.859, abs=1e-3)
