"""Rotary position embedding: inverse frequencies, YaRN, cos/sin tables and the softmax scale.

Everything is computed in float64 and rounded once to float32: bf16 positions would merge from 257 on. Half of the
rotary width is stored, one column per interleaved pair.
"""

import math

import numpy as np

from shared_ops.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """[qk_rope_head_dim / 2] float64; YaRN's ramp (arXiv 2309.00071, "NTK-by-parts") starts from the original length."""
    dim, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    extrapolated = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return extrapolated

    def dimension(rotations: float) -> float:
        """The pair index that turns `rotations` times within the original length."""
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), dim - 1)
    width = high - low or 0.001  # a step, without dividing by zero
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return extrapolated * (1 - ramp) + extrapolated / scaling.factor * ramp


def amplitude(config: ModelConfig) -> float:
    """Factor on cos and sin: m(factor, mscale) / m(factor, mscale_all_dim)."""
    s = config.rope_scaling
    return _mscale(s.factor, s.mscale) / _mscale(s.factor, s.mscale_all_dim) if s else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """Factor on the attention logits: qk_head_dim^-1/2 * m(factor, mscale_all_dim)^2."""
    s = config.rope_scaling
    return config.qk_head_dim**-0.5 * (_mscale(s.factor, s.mscale_all_dim) ** 2 if s else 1.0)


def tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each [length, qk_rope_head_dim / 2] float32, for positions 0 .. length-1."""
    angles = np.arange(length, dtype=np.float64)[:, None] * inverse_frequencies(config)
    scale = amplitude(config)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
