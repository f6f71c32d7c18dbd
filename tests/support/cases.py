"""Configurations, parameters and rows that make mistakes visible (DESIGN: test configurations that can fail)."""

import numpy as np

from shared_ops.config import ModelConfig, load_model_config
from shared_ops.data.packing import batch_from_documents
from shared_ops.init import initial_value
from shared_ops.params import CORRECTION_BIAS, manifest

LENGTH = 72  # the tiny models' YaRN starts from 32 positions: more than twice that


def tiny(name: str) -> ModelConfig:
    """tiny_v3, tiny_v2, or tiny_greedy: V2-Lite's routing with what the others lack."""
    if name != "tiny_greedy":
        return load_model_config(name)
    changes = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "q_lora_rank": 28,
               "n_shared_experts": 0, "sliding_window": None, "tie_word_embeddings": False,
               "expert_placement": "hash:3", "rms_norm_eps": 3e-5}  # fmt: skip
    return ModelConfig.model_validate(load_model_config("tiny_v2").model_dump() | changes)


def parameters(config: ModelConfig, seed: int = 1) -> dict[str, np.ndarray]:
    """fp32, canonical names. Norms are not ones, and correction biases are not zero, some sums negative."""
    generator, values = np.random.default_rng(seed), {}
    for p in manifest(config):
        value = initial_value(p, seed, 0.2)
        if p.init == "ones":
            value = value + 0.3 * generator.standard_normal(p.shape)
        if p.name.endswith(CORRECTION_BIAS):
            value = generator.uniform(-1.0, 0.1, p.shape)
        values[p.name] = value.astype(np.float32)
    return values


def rows(config: ModelConfig, length: int = LENGTH, seed: int = 2) -> dict[str, np.ndarray]:
    """Five rows: one document over the whole row, three packed ones, two and padding, one token (nothing for a
    prediction depth), and nothing at all."""
    generator = np.random.default_rng(seed)

    def document(size: int) -> list[int]:
        return generator.integers(0, config.vocab_size, size).tolist()

    third = length // 3
    documents = [
        [document(length)],
        [document(third - 5), document(7), document(length - third - 2)],
        [document(third), document(third - 8)],
        [document(1)],
        [],
    ]
    return batch_from_documents(documents, length)


def worst(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference relative to the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    scale = np.abs(expected).max() if expected.size else 0.0
    difference = np.abs(actual - expected).max() if expected.size else 0.0
    assert np.isfinite(difference), "not finite"
    return float(difference / scale) if scale > 0 else float(difference)
