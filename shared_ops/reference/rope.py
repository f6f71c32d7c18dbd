"""Rotary embedding on interleaved pairs, and YaRN's frequencies, amplitude and softmax scale.

RoPE: arXiv 2104.09864 eq. 15. Decoupled rotary keys: DeepSeek-V2 section 2.1.3. YaRN: arXiv 2309.00071
sections 3.2 (frequencies) and 3.4 (attention temperature), in DeepSeek's form. `scaling` is None or has the
attributes factor, original_max_position_embeddings, beta_fast, beta_slow, mscale and mscale_all_dim.
"""

import math

import numpy as np

from shared_ops.reference.arrays import f64


def inverse_frequencies(rope_dim: int, theta: float, scaling=None) -> np.ndarray:
    """Angle per position of each pair i, [rope_dim / 2]: theta^(-2i/rope_dim), slowed down by YaRN.

    YaRN's paper blends by the number of turns a pair makes in the original length; DeepSeek's models (and so
    this) blend linearly in the index of the pair, between the indices at which that number is beta_fast and
    beta_slow: the fast pairs below the ramp keep their frequency, the slow ones above it have it divided by
    the factor.
    """
    plain = theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if scaling is None:
        return plain
    low, high = ramp_range(rope_dim, theta, scaling)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    slowed = np.clip((np.arange(rope_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1.0 - slowed) + plain / scaling.factor * slowed


def ramp_range(rope_dim: int, theta: float, scaling) -> tuple[float, float]:
    """First and last index of the ramp: the pair that turns `beta` times in the original length L has the
    index rope_dim ln(L / (2 pi beta)) / (2 ln theta)."""

    def index(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(index(scaling.beta_fast)), math.ceil(index(scaling.beta_slow))
    return max(low, 0), min(high, rope_dim - 1)


def mscale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1 for factor > 1 (arXiv 2309.00071 section 3.4; the weight is DeepSeek's)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def amplitude(scaling=None) -> float:
    """What cos and sin are multiplied by: m(f, mscale) / m(f, mscale_all_dim); 1 without YaRN."""
    if scaling is None:
        return 1.0
    return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)


def softmax_scale(qk_head_dim: int, scaling=None) -> float:
    """Factor on the products of queries and keys: h^-1/2 (DeepSeek-V2 eq. 18) m(f, mscale_all_dim)^2."""
    scale = qk_head_dim**-0.5
    return scale if scaling is None else scale * mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def tables(positions, frequencies, scale: float = 1.0):
    """(cos, sin) of positions [...] times frequencies [r/2], each [..., r/2]; `scale` is YaRN's amplitude."""
    angles = f64(positions)[..., None] * frequencies
    return scale * np.cos(angles), scale * np.sin(angles)


def rotate(x, cos, sin):
    """Rotate the pairs (0,1), (2,3), ... of the last axis by their angles; the output stays interleaved.

    x [..., r]; cos, sin [..., r/2], broadcast against x's pairs.
    """
    x, cos, sin = f64(x), f64(cos), f64(sin)
    even, odd = x[..., 0::2], x[..., 1::2]
    y = np.empty_like(x)
    y[..., 0::2] = even * cos - odd * sin
    y[..., 1::2] = even * sin + odd * cos
    return y, (cos, sin)


def rotate_backward(dy, cache):
    """-> dx: the transposed rotation, which is the one by the opposite angle."""
    cos, sin = cache
    return rotate(dy, cos, -sin)[0]
