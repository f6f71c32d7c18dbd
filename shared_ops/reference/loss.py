"""Cross entropy over valid tokens, the sequence-wise balance loss and the router z-loss.

Every mean is a sum over the global batch divided by a count over the global batch. The denominators can be
given, so that the parts of a batch (micro-batches, ranks) add up to exactly the whole, in value and in
gradient.
"""

import numpy as np

from shared_ops.reference.arrays import f64, logsumexp, softmax

IGNORED = -100  # the label of a token that is not predicted


def cross_entropy(logits, labels):
    """Sum of -log softmax(logits)[label] over labels that are not IGNORED.

    logits [..., V], labels [...] -> ((sum, number of valid labels), cache).
    """
    logits, labels = f64(logits), np.asarray(labels)
    valid = labels != IGNORED
    target = np.where(valid, labels, 0)[..., None]
    nll = logsumexp(logits) - np.take_along_axis(logits, target, axis=-1)[..., 0]
    return (float(np.where(valid, nll, 0.0).sum()), int(valid.sum())), (logits, target, valid)


def cross_entropy_backward(dsum: float, cache) -> np.ndarray:
    """-> dlogits [..., V]: softmax minus one-hot at valid tokens, 0 at ignored ones."""
    logits, target, valid = cache
    dlogits = softmax(logits)
    np.put_along_axis(dlogits, target, np.take_along_axis(dlogits, target, axis=-1) - 1.0, axis=-1)
    return np.where(valid[..., None], dlogits, 0.0) * dsum


def balance_loss(scores, chosen, mask, alpha: float, rows: int | None = None):
    """alpha * mean over non-empty rows of sum_i f_i P_i: DeepSeek-V3 eq. 17-20, V2 eq. 23-25 per sequence.

    scores [B, S, E]; chosen [B, S, K] the experts that f counts; mask [B, S]; `rows`: number of non-empty
    rows of the global batch. Over the T_b unmasked tokens of row b, with s' the scores divided by their sum
    over the experts: f_i = E / (K T_b) * (number of tokens that chose i), P_i = mean of s'_i. The gradient
    flows through P only.
    """
    scores, mask = f64(scores), np.asarray(mask, bool)
    experts, per_token = scores.shape[-1], chosen.shape[-1]
    tokens_of_row = mask.sum(axis=1)  # [B]
    rows = int((tokens_of_row > 0).sum()) if rows is None else rows
    share = np.where(mask, 1.0 / np.maximum(tokens_of_row, 1)[:, None], 0.0)  # [B, S], 0 in an empty row
    total = scores.sum(axis=-1, keepdims=True)
    normal = scores / total
    hits = np.zeros_like(scores)
    np.put_along_axis(hits, np.asarray(chosen), 1.0, axis=-1)
    f = experts / per_token * (hits * share[..., None]).sum(axis=1)  # [B, E]
    p = (normal * share[..., None]).sum(axis=1)
    factor = alpha / max(rows, 1)
    return float(factor * (f * p).sum()), (normal, total, share, f, factor)


def balance_loss_backward(dloss: float, cache) -> np.ndarray:
    """-> dscores [B, S, E]. With s' = s / sum(s): ds = (ds' - sum(ds' * s')) / sum(s)."""
    normal, total, share, f, factor = cache
    dnormal = dloss * factor * f[:, None, :] * share[..., None]
    return (dnormal - (dnormal * normal).sum(axis=-1, keepdims=True)) / total


def z_loss(logits, mask, coefficient: float, tokens: int | None = None):
    """coefficient * mean over unmasked tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906 eq. 5).

    logits [T, E], mask [T]; `tokens`: number of unmasked tokens of the global batch.
    """
    logits, mask = f64(logits), np.asarray(mask, bool)
    tokens = int(mask.sum()) if tokens is None else tokens
    log_norm = logsumexp(logits)
    factor = coefficient / max(tokens, 1)
    return float(factor * (np.where(mask, log_norm, 0.0) ** 2).sum()), (logits, log_norm, mask, factor)


def z_loss_backward(dloss: float, cache) -> np.ndarray:
    """-> dlogits [T, E]: 2 lse softmax(logits)."""
    logits, log_norm, mask, factor = cache
    return dloss * factor * 2.0 * np.where(mask, log_norm, 0.0)[:, None] * softmax(logits)
