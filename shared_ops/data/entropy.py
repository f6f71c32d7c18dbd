"""How predictable tokens are from their frequencies alone: what a trained model must beat."""

import numpy as np

_CHUNK = 1 << 22


def count_tokens(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs, int64 [vocab_size], in bounded memory."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[start : start + _CHUNK], minlength=vocab_size)
    return counts


def entropy(counts: np.ndarray) -> float | None:
    """Entropy in nats of the distribution with these counts; None without any."""
    total = counts.sum()
    if not total:
        return None
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())


def cross_entropy(counts: np.ndarray, train_counts: np.ndarray) -> float | None:
    """Mean -log q in nats over tokens with `counts`, q = `train_counts` + 1, normalised; None without any."""
    total = counts.sum()
    if not total:
        return None
    log_q = np.log(train_counts + 1.0) - np.log(train_counts.sum() + len(train_counts))
    return float(-(counts * log_q).sum() / total)
