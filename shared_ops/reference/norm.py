"""RMSNorm (arXiv 1910.07467), the only norm of the models: DeepSeek-V2 section 3.1.2, V3 section 2.1."""

import numpy as np

from shared_ops.reference.arrays import f64


def rms_norm(x, weight, eps: float):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, x [..., D], weight [D]."""
    x, weight = f64(x), f64(weight)
    scale = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    normal = x * scale
    return normal * weight, (normal, scale, weight)


def rms_norm_backward(dy, cache):
    """-> (dx [..., D], dweight [D]).

    With n = x s and s = (mean(x^2) + eps)^-1/2: ds/dx_i = -s^3 x_i / D, so dx = s (dn - n mean(dn * n)).
    """
    normal, scale, weight = cache
    dnormal = dy * weight
    dx = scale * (dnormal - normal * (dnormal * normal).mean(axis=-1, keepdims=True))
    return dx, (dy * normal).reshape(-1, weight.size).sum(axis=0)
