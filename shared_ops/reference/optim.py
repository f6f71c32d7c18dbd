"""Gradient clipping, AdamW, the learning rate's warm-up and the update of the routers' correction bias."""

import math

import numpy as np

from shared_ops.reference.arrays import Grads, Params, f64

CLIP_EPS = 1e-6


def global_norm(grads: Params) -> float:
    """Euclidean norm of all gradients together, each parameter once."""
    return math.sqrt(sum(float((f64(grad) ** 2).sum()) for grad in grads.values()))


def clip(grads: Params, max_norm: float) -> tuple[Grads, float]:
    """-> (gradients times min(1, max_norm / (norm + 1e-6)), norm before clipping)."""
    norm = global_norm(grads)
    coefficient = min(1.0, max_norm / (norm + CLIP_EPS))
    return {name: f64(grad) * coefficient for name, grad in grads.items()}, norm


def adamw(param, grad, m, v, step: int, lr: float, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay=True):
    """One AdamW update (arXiv 1711.05101 algorithm 2, in torch's form) -> (param, m, v), all new arrays.

    `step` counts from 1. `decay` is the parameter's group: True for matrices, False for norms, biases and
    scales, whose decay is left out whatever `weight_decay` is.
    """
    param, grad, m, v = f64(param), f64(grad), f64(m), f64(v)
    if decay:
        param = param * (1.0 - lr * weight_decay)
    m = betas[0] * m + (1.0 - betas[0]) * grad
    v = betas[1] * v + (1.0 - betas[1]) * grad**2
    denominator = np.sqrt(v) / math.sqrt(1.0 - betas[1] ** step) + eps
    return param - lr / (1.0 - betas[0] ** step) * m / denominator, m, v


def bias_update(bias, counts, rate: float) -> np.ndarray:
    """DeepSeek-V3 section 2.1.2: `rate` down for experts above the mean load, up below it; not recentred.

    bias [E]; counts [E] integers, summed over the global batch of one optimizer step.
    """
    counts = np.asarray(counts, np.int64)
    # sign(mean - count) in integers, so that a count equal to the mean is exactly 0
    return f64(bias) + rate * np.sign(counts.sum() - counts.size * counts)


def warmup(step: int, peak: float, warmup_steps: int) -> float:
    """Learning rate of update `step` = 1, 2, ... during and after a linear warm-up to a constant peak."""
    return peak * min(1.0, step / max(warmup_steps, 1))
