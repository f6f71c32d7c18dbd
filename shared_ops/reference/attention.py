"""Multi-head latent attention: DeepSeek-V2 section 2.1 (eq. 9-19, appendix C), DeepSeek-V3 section 2.1.1."""

import numpy as np

from shared_ops.reference.arrays import Grads, Params, f64, linear, linear_backward, softmax, softmax_backward
from shared_ops.reference.norm import rms_norm, rms_norm_backward
from shared_ops.reference.rope import rotate, rotate_backward


def visible(segment_ids, sliding_window: int | None = None) -> np.ndarray:
    """[B, S, S], True where query i sees key j: same segment, j <= i, and i - j < sliding_window if set.

    Padding (segment 0) sees the padding before it, so that no row of the softmax is empty.
    """
    segment_ids = np.asarray(segment_ids)
    position = np.arange(segment_ids.shape[1])
    distance = position[:, None] - position[None, :]
    near = distance >= 0
    if sliding_window is not None:
        near &= distance < sliding_window
    return near & (segment_ids[:, :, None] == segment_ids[:, None, :])


def split_heads(x, heads: int, first: int, second: int):
    """Rows per head are [first | second]: [..., N*(first+second)] -> [..., N, first], [..., N, second]."""
    x = x.reshape(*x.shape[:-1], heads, first + second)
    return x[..., :first], x[..., first:]


def attention(x, params: Params, config, cos, sin, segment_ids, softmax_scale: float):
    """x [B, S, D] -> [B, S, D].

    params: q_proj.weight, or q_a_proj.weight, q_a_layernorm.weight and q_b_proj.weight where
    config.q_lora_rank is set; kv_a_proj_with_mqa.weight, kv_a_layernorm.weight, kv_b_proj.weight,
    o_proj.weight. cos, sin [B, S, r/2] carry YaRN's amplitude, softmax_scale its temperature.
    """
    x = f64(x)
    batch, length, _ = x.shape
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    rank, eps = config.kv_lora_rank, config.rms_norm_eps
    caches = {}

    # queries: eq. 37-40, or one projection (DeepSeek-V2-Lite, appendix B)
    if config.q_lora_rank is None:
        q, caches["q"] = linear(x, params["q_proj.weight"])
    else:
        q_latent, caches["q_a"] = linear(x, params["q_a_proj.weight"])
        q_normal, caches["q_norm"] = rms_norm(q_latent, params["q_a_layernorm.weight"], eps)
        q, caches["q_b"] = linear(q_normal, params["q_b_proj.weight"])
    q_nope, q_rope = split_heads(q, heads, nope, rope)

    # keys and values: eq. 41-46; one rotary key for all heads, and the norm is on the latent only
    latent_rope, caches["kv_a"] = linear(x, params["kv_a_proj_with_mqa.weight"])
    latent, k_rope = latent_rope[..., :rank], latent_rope[..., rank:]
    latent, caches["kv_norm"] = rms_norm(latent, params["kv_a_layernorm.weight"], eps)
    kv, caches["kv_b"] = linear(latent, params["kv_b_proj.weight"])
    k_nope, value = split_heads(kv, heads, nope, config.v_head_dim)

    q_rope, caches["q_rope"] = rotate(q_rope, cos[:, :, None], sin[:, :, None])
    k_rope, caches["k_rope"] = rotate(k_rope, cos, sin)
    k_rope = np.broadcast_to(k_rope[:, :, None], (batch, length, heads, rope))

    query = np.concatenate([q_nope, q_rope], axis=-1).transpose(0, 2, 1, 3)  # [B, N, S, h]
    key = np.concatenate([k_nope, k_rope], axis=-1).transpose(0, 2, 1, 3)
    value = value.transpose(0, 2, 1, 3)  # [B, N, S, v]

    logits = query @ key.transpose(0, 1, 3, 2) * softmax_scale
    mask = visible(segment_ids, config.sliding_window)[:, None]
    probability = softmax(np.where(mask, logits, -np.inf))
    mixed = (probability @ value).transpose(0, 2, 1, 3).reshape(batch, length, -1)
    out, caches["o"] = linear(mixed, params["o_proj.weight"])
    return out, (caches, query, key, value, probability, softmax_scale, config)


def attention_backward(dout, cache) -> tuple[np.ndarray, Grads]:
    """-> (dx [B, S, D], gradients under the names of `attention`'s params)."""
    caches, query, key, value, probability, softmax_scale, config = cache
    batch, heads, length, _ = query.shape
    nope = config.qk_nope_head_dim
    grads: Grads = {}

    dmixed, grads["o_proj.weight"] = linear_backward(dout, caches["o"])
    dmixed = dmixed.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
    dvalue = probability.transpose(0, 1, 3, 2) @ dmixed
    # invisible keys have probability 0, and so their logits get exactly 0
    dlogits = softmax_backward(dmixed @ value.transpose(0, 1, 3, 2), probability) * softmax_scale
    dquery = (dlogits @ key).transpose(0, 2, 1, 3)  # [B, S, N, h]
    dkey = (dlogits.transpose(0, 1, 3, 2) @ query).transpose(0, 2, 1, 3)
    dvalue = dvalue.transpose(0, 2, 1, 3)

    # all heads share the rotary key
    dk_rope = rotate_backward(dkey[..., nope:].sum(axis=2), caches["k_rope"])
    dkv = np.concatenate([dkey[..., :nope], dvalue], axis=-1).reshape(batch, length, -1)
    dlatent, grads["kv_b_proj.weight"] = linear_backward(dkv, caches["kv_b"])
    dlatent, grads["kv_a_layernorm.weight"] = rms_norm_backward(dlatent, caches["kv_norm"])
    dlatent_rope = np.concatenate([dlatent, dk_rope], axis=-1)
    dx, grads["kv_a_proj_with_mqa.weight"] = linear_backward(dlatent_rope, caches["kv_a"])

    dq_rope = rotate_backward(dquery[..., nope:], caches["q_rope"])
    dq = np.concatenate([dquery[..., :nope], dq_rope], axis=-1).reshape(batch, length, -1)
    if config.q_lora_rank is None:
        dx_q, grads["q_proj.weight"] = linear_backward(dq, caches["q"])
    else:
        dq_normal, grads["q_b_proj.weight"] = linear_backward(dq, caches["q_b"])
        dq_latent, grads["q_a_layernorm.weight"] = rms_norm_backward(dq_normal, caches["q_norm"])
        dx_q, grads["q_a_proj.weight"] = linear_backward(dq_latent, caches["q_a"])
    return dx + dx_q, grads
