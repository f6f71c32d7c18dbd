"""The whole model: embedding, decoder layers, multi-token prediction, head, losses, and every gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from shared_ops.reference import rope
from shared_ops.reference.arrays import Grads, Params, add, f64, linear, linear_backward, put, sub
from shared_ops.reference.block import block, block_backward
from shared_ops.reference.experts import MoEStatistics
from shared_ops.reference.loss import IGNORED, cross_entropy, cross_entropy_backward
from shared_ops.reference.mtp import mtp, mtp_backward, mtp_input_ids, mtp_labels, mtp_mask
from shared_ops.reference.norm import rms_norm, rms_norm_backward

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Denominators:
    """Counts over the global batch that the losses are divided by.

    Index 0 is the main model, k the k-th depth. Those of a global batch are the sum (`+`) of its parts'.
    """

    labels: tuple[int, ...]  # valid labels
    rows: tuple[int, ...]  # rows with an unmasked token
    tokens: tuple[int, ...]  # unmasked tokens

    @classmethod
    def of(cls, batch: Mapping[str, np.ndarray], config) -> Self:
        segments, depths = batch["segment_ids"], range(config.num_nextn_predict_layers + 1)
        masks = [mtp_mask(segments, depth) for depth in depths]
        labels = [labels_at(batch, depth) for depth in depths]
        return cls(
            labels=tuple(int((label != IGNORED).sum()) for label in labels),
            rows=tuple(int(mask.any(axis=1).sum()) for mask in masks),
            tokens=tuple(int(mask.sum()) for mask in masks),
        )

    def __add__(self, other: Self) -> Self:
        def both(a, b):
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return type(self)(
            both(self.labels, other.labels), both(self.rows, other.rows), both(self.tokens, other.tokens)
        )


@dataclass(frozen=True)
class Output:
    """What the model says of a batch. With given denominators the losses are its parts of the global ones."""

    logits: np.ndarray  # [B, S, V]
    mtp_logits: tuple[np.ndarray, ...]  # one [B, S, V] per depth
    hidden: tuple[np.ndarray, ...]  # embedding, then each layer's output (MTP layers last), [B, S, D]
    statistics: dict[int, MoEStatistics]  # per MoE layer
    loss: float  # cross entropy of the next token
    balance_loss: float  # summed over layers, coefficient included
    z_loss: float  # likewise
    mtp_loss: float  # mean over depths, not weighted
    total: float  # loss + balance_loss + z_loss + mtp_loss_weight * mtp_loss: what is differentiated

    @property
    def aux_loss(self) -> float:
        """What the metrics call aux_loss: both auxiliary losses of the routers, as they enter the total."""
        return self.balance_loss + self.z_loss

    @property
    def counts(self) -> dict[int, np.ndarray]:
        """Per MoE layer [E]: how many (unmasked) tokens selected each expert."""
        return {layer: statistics.counts for layer, statistics in self.statistics.items()}


def labels_at(batch: Mapping[str, np.ndarray], depth: int) -> np.ndarray:
    """[B, S] labels of the main model (depth 0, as in the batch) or of a depth of multi-token prediction."""
    if depth == 0:
        return np.asarray(batch["labels"])
    return mtp_labels(batch["labels"], batch["segment_ids"], depth)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def forward(
    params: Params,
    batch: Mapping[str, np.ndarray],
    config,
    denominators: Denominators | None = None,
    group_of_expert=None,
) -> tuple[Output, tuple]:
    """batch: input_ids, labels, position_ids, segment_ids, each int [B, S].

    `denominators` are those of the global batch that this one is a part of (default: this is all of it);
    `group_of_expert` [E] is the placement table (default: contiguous groups).
    """
    denominators = denominators or Denominators.of(batch, config)
    segments = np.asarray(batch["segment_ids"])
    embedding = f64(params[EMBEDDING])
    head = embedding if config.tie_word_embeddings else params[HEAD]
    frequencies = rope.inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    cos, sin = rope.tables(batch["position_ids"], frequencies, rope.amplitude(config.rope_scaling))
    scale = rope.softmax_scale(config.qk_nope_head_dim + config.qk_rope_head_dim, config.rope_scaling)

    def moe_arguments(depth: int) -> dict:
        return {
            "mask": mtp_mask(segments, depth),
            "group_of_expert": group_of_expert,
            "rows": denominators.rows[depth],
            "tokens": denominators.tokens[depth],
        }

    def head_loss(normal, depth: int):
        """-> (logits, loss divided by its global count, what backward needs)."""
        logits, head_cache = linear(normal, head)
        (total, _), loss_cache = cross_entropy(logits, labels_at(batch, depth))
        count = max(denominators.labels[depth], 1)
        return logits, total / count, (head_cache, loss_cache, count)

    x = embedding[batch["input_ids"]]
    hidden, statistics, layer_caches = [x], {}, []
    for layer in range(config.num_hidden_layers):
        is_moe = layer >= config.first_k_dense_replace
        (x, layer_statistics), cache = block(
            x, sub(params, layer_prefix(layer)), config, is_moe, cos, sin, segments, scale, **moe_arguments(0)
        )
        hidden.append(x)
        layer_caches.append(cache)
        if is_moe:
            statistics[layer] = layer_statistics
    normal, norm_cache = rms_norm(x, params[NORM], config.rms_norm_eps)
    logits, loss, head_cache = head_loss(normal, 0)

    mtp_logits, mtp_losses, mtp_caches = [], [], []
    for depth in range(1, config.num_nextn_predict_layers + 1):
        layer = config.num_hidden_layers + depth - 1
        embedded = embedding[mtp_input_ids(batch["input_ids"], depth)]
        layer_params = sub(params, layer_prefix(layer))
        (x, normal, statistics[layer]), cache = mtp(
            normal, embedded, layer_params, config, cos, sin, segments, scale, **moe_arguments(depth)
        )
        hidden.append(x)
        depth_logits, depth_loss, depth_head_cache = head_loss(normal, depth)
        mtp_logits.append(depth_logits)
        mtp_losses.append(depth_loss)
        mtp_caches.append((cache, depth_head_cache))

    mtp_loss = sum(mtp_losses) / max(len(mtp_losses), 1)
    balance_loss = sum(layer.balance_loss for layer in statistics.values())
    z_loss = sum(layer.z_loss for layer in statistics.values())
    output = Output(
        logits=logits,
        mtp_logits=tuple(mtp_logits),
        hidden=tuple(hidden),
        statistics=statistics,
        loss=loss,
        balance_loss=balance_loss,
        z_loss=z_loss,
        mtp_loss=mtp_loss,
        total=loss + balance_loss + z_loss + config.mtp_loss_weight * mtp_loss,
    )
    return output, (params, batch, config, layer_caches, norm_cache, head_cache, mtp_caches)


def backward(cache) -> Grads:
    """Gradient of `Output.total` for every parameter by canonical name; the correction bias gets zeros."""
    params, batch, config, layer_caches, norm_cache, head_cache, mtp_caches = cache
    grads: Grads = {}
    dembedding = np.zeros(np.shape(params[EMBEDDING]))
    head_name = EMBEDDING if config.tie_word_embeddings else HEAD

    def head_loss_backward(dloss: float, cache) -> np.ndarray:
        linear_cache, loss_cache, count = cache
        dnormal, dhead = linear_backward(cross_entropy_backward(dloss / count, loss_cache), linear_cache)
        add(grads, head_name, dhead)
        return dnormal

    # the deepest prediction first: its input is the normalised hidden state of the depth before
    depths = config.num_nextn_predict_layers
    dnormal = np.zeros(norm_cache[0].shape)
    for depth in reversed(range(1, depths + 1)):
        cache, depth_head_cache = mtp_caches[depth - 1]
        dnormal = dnormal + head_loss_backward(config.mtp_loss_weight / depths, depth_head_cache)
        dnormal, dembedded, layer_grads = mtp_backward(dnormal, cache)
        put(grads, layer_prefix(config.num_hidden_layers + depth - 1), layer_grads)
        np.add.at(dembedding, mtp_input_ids(batch["input_ids"], depth), dembedded)

    dx, grads[NORM] = rms_norm_backward(dnormal + head_loss_backward(1.0, head_cache), norm_cache)
    for layer in reversed(range(config.num_hidden_layers)):
        dx, layer_grads = block_backward(dx, layer_caches[layer])
        put(grads, layer_prefix(layer), layer_grads)
    np.add.at(dembedding, np.asarray(batch["input_ids"]), dx)
    add(grads, EMBEDDING, dembedding)
    return grads
