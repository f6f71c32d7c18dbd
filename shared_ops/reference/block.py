"""One decoder layer, pre-norm with two residual branches: DeepSeek-V2 figure 2, DeepSeek-V3 section 2.1."""

from shared_ops.reference.arrays import Grads, Params, f64, put, sub
from shared_ops.reference.attention import attention, attention_backward
from shared_ops.reference.experts import mlp, mlp_backward, moe, moe_backward
from shared_ops.reference.norm import rms_norm, rms_norm_backward


def block(x, params: Params, config, is_moe: bool, cos, sin, segment_ids, softmax_scale, **moe_arguments):
    """x [B, S, D] -> ([B, S, D], MoEStatistics, or None of a dense layer).

    params: input_layernorm.weight, self_attn.*, post_attention_layernorm.weight, mlp.*. `moe_arguments` are
    `experts.moe`'s mask, group_of_expert, rows and tokens.
    """
    x = f64(x)
    normal, norm1_cache = rms_norm(x, params["input_layernorm.weight"], config.rms_norm_eps)
    attended, attention_cache = attention(
        normal, sub(params, "self_attn."), config, cos, sin, segment_ids, softmax_scale
    )
    middle = x + attended
    normal, norm2_cache = rms_norm(middle, params["post_attention_layernorm.weight"], config.rms_norm_eps)
    if is_moe:
        (out, statistics), mlp_cache = moe(normal, sub(params, "mlp."), config, **moe_arguments)
    else:
        out, mlp_cache = mlp(normal, sub(params, "mlp."))
        statistics = None
    return (middle + out, statistics), (norm1_cache, attention_cache, norm2_cache, mlp_cache, is_moe)


def block_backward(dout, cache):
    """Gradient of <dout, out> + balance_loss + z_loss -> (dx [B, S, D], gradients of `block`'s params)."""
    norm1_cache, attention_cache, norm2_cache, mlp_cache, is_moe = cache
    grads: Grads = {}
    dnormal, mlp_grads = (moe_backward if is_moe else mlp_backward)(dout, mlp_cache)
    put(grads, "mlp.", mlp_grads)
    dmiddle, grads["post_attention_layernorm.weight"] = rms_norm_backward(dnormal, norm2_cache)
    dmiddle = dmiddle + dout
    dnormal, attention_grads = attention_backward(dmiddle, attention_cache)
    put(grads, "self_attn.", attention_grads)
    dx, grads["input_layernorm.weight"] = rms_norm_backward(dnormal, norm1_cache)
    return dx + dmiddle, grads
