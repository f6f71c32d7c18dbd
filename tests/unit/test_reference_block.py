"""A decoder layer and a depth of multi-token prediction: residuals and gradients."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared_ops.reference import rope
from shared_ops.reference.attention import attention
from shared_ops.reference.block import block, block_backward
from shared_ops.reference.experts import mlp
from shared_ops.reference.finite_difference import worst_error
from shared_ops.reference.mtp import mtp, mtp_backward
from shared_ops.reference.norm import rms_norm

D, E, F = 10, 12, 4
SEGMENTS = np.array([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]])
CONFIG = SimpleNamespace(
    rms_norm_eps=1e-6,
    num_attention_heads=3,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
    kv_lora_rank=7,
    q_lora_rank=None,
    sliding_window=None,
    n_routed_experts=E,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    aux_loss_alpha=0.3,
    router_z_loss_coef=0.1,
)
ATTENTION = {
    "self_attn.q_proj.weight": (42, D),
    "self_attn.kv_a_proj_with_mqa.weight": (15, D),
    "self_attn.kv_a_layernorm.weight": (7,),
    "self_attn.kv_b_proj.weight": (33, 7),
    "self_attn.o_proj.weight": (D, 15),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
}
DENSE = {
    "mlp.gate_proj.weight": (17, D),
    "mlp.up_proj.weight": (17, D),
    "mlp.down_proj.weight": (D, 17),
}
MOE = {
    "mlp.gate.weight": (E, D),
    "mlp.gate.e_score_correction_bias": (E,),
    "mlp.experts.gate_up_proj": (E, 2 * F, D),
    "mlp.experts.down_proj": (E, D, F),
    "mlp.shared_experts.gate_proj.weight": (2 * F, D),
    "mlp.shared_experts.up_proj.weight": (2 * F, D),
    "mlp.shared_experts.down_proj.weight": (D, 2 * F),
}
MTP = {
    "enorm.weight": (D,),
    "hnorm.weight": (D,),
    "eh_proj.weight": (D, 2 * D),
    "shared_head.norm.weight": (D,),
}


def make(shapes, seed=0):
    rng = np.random.default_rng(seed)
    params = {name: rng.standard_normal(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]])
    cos, sin = rope.tables(positions, rope.inverse_frequencies(8, 100.0), 1.2)
    return rng, params, (cos, sin, SEGMENTS, 0.4)


def trained(grads):
    return {name: grad for name, grad in grads.items() if not name.endswith("e_score_correction_bias")}


def test_two_residual_branches_each_behind_its_norm():
    rng, params, arguments = make(ATTENTION | DENSE)
    x = rng.standard_normal((2, 5, D))
    (out, statistics), _ = block(x, params, CONFIG, False, *arguments)

    def below(prefix):
        return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}

    normal, _ = rms_norm(x, params["input_layernorm.weight"], 1e-6)
    middle = x + attention(normal, below("self_attn."), CONFIG, *arguments)[0]
    normal, _ = rms_norm(middle, params["post_attention_layernorm.weight"], 1e-6)
    assert np.array_equal(out, middle + mlp(normal, below("mlp."))[0])
    assert statistics is None


@pytest.mark.parametrize("is_moe", [False, True])
def test_block_gradient(is_moe):
    rng, params, arguments = make(ATTENTION | (MOE if is_moe else DENSE))
    x, direction = rng.standard_normal((2, 5, D)), rng.standard_normal((2, 5, D))
    moe_arguments = {"mask": SEGMENTS != 0} if is_moe else {}

    def value():
        (out, statistics), _ = block(x, params, CONFIG, is_moe, *arguments, **moe_arguments)
        losses = statistics.balance_loss + statistics.z_loss if is_moe else 0.0
        return (out * direction).sum() + losses

    _, cache = block(x, params, CONFIG, is_moe, *arguments, **moe_arguments)
    dx, grads = block_backward(direction, cache)
    assert grads.keys() == params.keys()
    grads = {"x": dx, **trained(grads)}
    error, where = worst_error(value, {"x": x, **{n: params[n] for n in grads if n != "x"}}, grads, rng, 2, 4)
    assert error < 1e-6, where


def test_mtp_gradient():
    """Through what the head and the next depth read."""
    rng, params, arguments = make(ATTENTION | MOE | MTP)
    hidden, embedded, to_normal = rng.standard_normal((3, 2, 5, D))
    mask = SEGMENTS != 0

    def value():
        (_, normal, statistics), _ = mtp(hidden, embedded, params, CONFIG, *arguments, mask=mask)
        losses = statistics.balance_loss + statistics.z_loss
        return (normal * to_normal).sum() + losses

    _, cache = mtp(hidden, embedded, params, CONFIG, *arguments, mask=mask)
    dhidden, dembedded, grads = mtp_backward(to_normal, cache)
    assert grads.keys() == params.keys()
    grads = {"hidden": dhidden, "embedded": dembedded, **trained(grads)}
    arrays = {"hidden": hidden, "embedded": embedded, **params}
    error, where = worst_error(value, {name: arrays[name] for name in grads}, grads, rng, 2, 4)
    assert error < 1e-6, where
