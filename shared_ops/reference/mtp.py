"""Multi-token prediction: DeepSeek-V3 section 2.2 (eq. 21-25). Depth k = 1, 2, ... looks k tokens further."""

import numpy as np

from shared_ops.reference.arrays import Grads, Params, linear, linear_backward, put
from shared_ops.reference.block import block, block_backward
from shared_ops.reference.loss import IGNORED
from shared_ops.reference.norm import rms_norm, rms_norm_backward


def shift(x, depth: int, fill: int = 0) -> np.ndarray:
    """x[:, t + depth] at t, `fill` past the end of the row; x [B, S]."""
    x = np.asarray(x)
    out = np.full_like(x, fill)
    out[:, : max(x.shape[1] - depth, 0)] = x[:, depth:]
    return out


def mtp_mask(segment_ids, depth: int) -> np.ndarray:
    """[B, S] bool: tokens whose document has a token `depth` places further; depth 0: all but padding."""
    segment_ids = np.asarray(segment_ids)
    return (segment_ids != 0) & (shift(segment_ids, depth) == segment_ids)


def mtp_input_ids(input_ids, depth: int) -> np.ndarray:
    """[B, S]: the tokens embedded at `depth`; past the end of the row token 0 (masked where it matters)."""
    return shift(input_ids, depth)


def mtp_labels(labels, segment_ids, depth: int) -> np.ndarray:
    """[B, S]: the labels of `depth` from those of the main model; ignored where `mtp_mask` is False."""
    return np.where(mtp_mask(segment_ids, depth), shift(labels, depth, IGNORED), IGNORED)


def mtp(hidden, embedded, params: Params, config, cos, sin, segment_ids, softmax_scale, **moe_arguments):
    """One depth, from the one before: hidden [B, S, D], what the head reads there, and the embedded tokens [B, S, D].

    -> (hidden of this depth before and after shared_head.norm, MoEStatistics); the head and the next depth read the
    second. The paper leaves open which of the two goes on; those who train and serve these models (Megatron,
    transformers, vLLM) take the normalised one, from the main model too.
    params: enorm.weight, hnorm.weight, eh_proj.weight, shared_head.norm.weight and those of a MoE `block`.
    eq. 21 writes [hidden; embedding]; the published weights of eh_proj have the embedding first.
    """
    eps = config.rms_norm_eps
    e_normal, e_cache = rms_norm(embedded, params["enorm.weight"], eps)
    h_normal, h_cache = rms_norm(hidden, params["hnorm.weight"], eps)
    x, eh_cache = linear(np.concatenate([e_normal, h_normal], axis=-1), params["eh_proj.weight"])
    (out, statistics), block_cache = block(
        x, params, config, True, cos, sin, segment_ids, softmax_scale, **moe_arguments
    )
    normal, norm_cache = rms_norm(out, params["shared_head.norm.weight"], eps)
    return (out, normal, statistics), (e_cache, h_cache, eh_cache, block_cache, norm_cache)


def mtp_backward(dnormal, cache):
    """Gradients of <dnormal, normalised hidden> + the layer's losses.

    -> (dhidden [B, S, D], dembedded [B, S, D], gradients of `mtp`'s params).
    """
    e_cache, h_cache, eh_cache, block_cache, norm_cache = cache
    grads: Grads = {}
    dx, grads["shared_head.norm.weight"] = rms_norm_backward(dnormal, norm_cache)
    dx, block_grads = block_backward(dx, block_cache)
    put(grads, "", block_grads)
    dboth, grads["eh_proj.weight"] = linear_backward(dx, eh_cache)
    width = dboth.shape[-1] // 2
    dembedded, grads["enorm.weight"] = rms_norm_backward(dboth[..., :width], e_cache)
    dhidden, grads["hnorm.weight"] = rms_norm_backward(dboth[..., width:], h_cache)
    return dhidden, dembedded, grads
