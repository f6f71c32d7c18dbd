"""SwiGLU (arXiv 2002.05202), routed and shared experts: DeepSeek-V2 section 2.2, V3 section 2.1.2."""

from dataclasses import dataclass

import numpy as np

from shared_ops.reference.arrays import Grads, Params, f64, linear, linear_backward, put, sigmoid, sub
from shared_ops.reference.loss import balance_loss, balance_loss_backward, z_loss, z_loss_backward
from shared_ops.reference.router import Routing, route, route_backward


def swiglu(gate, up):
    """silu(gate) * up, silu(x) = x sigmoid(x)."""
    gate, up = f64(gate), f64(up)
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, cache):
    """-> (dgate, dup). silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x)."""
    gate, up = cache
    s = sigmoid(gate)
    return dy * up * s * (1.0 + gate * (1.0 - s)), dy * gate * s


def mlp(x, params: Params):
    """down(silu(gate(x)) * up(x)), x [..., D]; params {gate,up,down}_proj.weight."""
    gate, gate_cache = linear(x, params["gate_proj.weight"])
    up, up_cache = linear(x, params["up_proj.weight"])
    hidden, swiglu_cache = swiglu(gate, up)
    out, down_cache = linear(hidden, params["down_proj.weight"])
    return out, (gate_cache, up_cache, swiglu_cache, down_cache)


def mlp_backward(dout, cache) -> tuple[np.ndarray, Grads]:
    """-> (dx [..., D], gradients of `mlp`'s params)."""
    gate_cache, up_cache, swiglu_cache, down_cache = cache
    dhidden, ddown = linear_backward(dout, down_cache)
    dgate, dup = swiglu_backward(dhidden, swiglu_cache)
    dx_gate, dgate_weight = linear_backward(dgate, gate_cache)
    dx_up, dup_weight = linear_backward(dup, up_cache)
    grads = {"gate_proj.weight": dgate_weight, "up_proj.weight": dup_weight, "down_proj.weight": ddown}
    return dx_gate + dx_up, grads


def expert_params(params: Params, expert: int) -> dict[str, np.ndarray]:
    """One expert's `mlp` parameters from the stacked ones: gate_up_proj rows 0..F-1 are gate, F..2F-1 up."""
    gate_up = params["gate_up_proj"][expert]
    width = gate_up.shape[0] // 2
    return {
        "gate_proj.weight": gate_up[:width],
        "up_proj.weight": gate_up[width:],
        "down_proj.weight": params["down_proj"][expert],
    }


def routed_experts(x, params: Params, selected, weights):
    """Sum over a token's experts of weight * expert(x); no token is dropped.

    x [T, D]; params gate_up_proj [E, 2F, D], down_proj [E, D, F]; selected, weights [T, K] -> [T, D].
    """
    x, weights = f64(x), f64(weights)
    out = np.zeros_like(x)
    caches = []
    for expert in range(params["down_proj"].shape[0]):
        token, slot = np.nonzero(selected == expert)
        answer, cache = mlp(x[token], expert_params(params, expert))
        out[token] += weights[token, slot, None] * answer  # an expert is selected at most once per token
        caches.append((token, slot, answer, cache))
    return out, (x.shape, weights, caches)


def routed_experts_backward(dout, cache) -> tuple[np.ndarray, np.ndarray, Grads]:
    """-> (dx [T, D], dweights [T, K], gradients of gate_up_proj and down_proj; an idle expert's are 0)."""
    shape, weights, caches = cache
    dx, dweights = np.zeros(shape), np.zeros_like(weights)
    gate_up_grads, down_grads = [], []
    for token, slot, answer, mlp_cache in caches:
        dweights[token, slot] = (dout[token] * answer).sum(axis=-1)
        dx_expert, grads = mlp_backward(weights[token, slot, None] * dout[token], mlp_cache)
        dx[token] += dx_expert
        gate_up_grads.append(np.concatenate([grads["gate_proj.weight"], grads["up_proj.weight"]]))
        down_grads.append(grads["down_proj.weight"])
    return dx, dweights, {"gate_up_proj": np.stack(gate_up_grads), "down_proj": np.stack(down_grads)}


def expert_counts(selected, mask, n_experts: int) -> np.ndarray:
    """[E] int64: how often each expert was selected by the tokens that `mask` [T] keeps."""
    return np.bincount(selected[np.asarray(mask, bool)].ravel(), minlength=n_experts)


@dataclass(frozen=True)
class MoEStatistics:
    """What a mixture of experts reports besides its output."""

    routing: Routing
    counts: np.ndarray  # [E] int64, masked tokens excluded
    balance_loss: float  # the layer's part of the total loss, coefficient included
    z_loss: float  # likewise


def moe(
    x, params: Params, config, mask, group_of_expert=None, rows: int | None = None, tokens: int | None = None
):
    """Routed plus shared experts, x [B, S, D] -> ([B, S, D], MoEStatistics).

    params: gate.weight, gate.e_score_correction_bias (noaux_tc), experts.gate_up_proj, experts.down_proj and
    shared_experts.{gate,up,down}_proj.weight, one MLP n_shared_experts * F wide. mask [B, S] is True for the
    tokens that count in statistics and auxiliary losses; rows and tokens are the losses' denominators over
    the global batch (default: those of `mask`).
    """
    x, mask = f64(x), np.asarray(mask, bool)
    batch, length, width = x.shape
    flat = x.reshape(-1, width)
    routing, route_cache = route(
        flat, params["gate.weight"], params.get("gate.e_score_correction_bias"), config, group_of_expert
    )
    out, routed_cache = routed_experts(flat, sub(params, "experts."), routing.selected, routing.weights)
    out, shared_cache = out.reshape(x.shape), None
    if config.n_shared_experts:
        shared, shared_cache = mlp(x, sub(params, "shared_experts."))
        out = out + shared
    balance, balance_cache = balance_loss(
        routing.scores.reshape(batch, length, -1),
        routing.balance_selected.reshape(batch, length, -1),
        mask,
        config.aux_loss_alpha,
        rows,
    )
    z, z_cache = z_loss(routing.logits, mask.ravel(), config.router_z_loss_coef, tokens)
    counts = expert_counts(routing.selected, mask.ravel(), config.n_routed_experts)
    cache = (route_cache, routed_cache, shared_cache, balance_cache, z_cache)
    return (out, MoEStatistics(routing, counts, balance, z)), cache


def moe_backward(dout, cache, dbalance: float = 1.0, dz: float = 1.0) -> tuple[np.ndarray, Grads]:
    """Gradient of <dout, out> + dbalance * balance_loss + dz * z_loss.

    -> (dx [B, S, D], gradients of `moe`'s params).
    """
    route_cache, routed_cache, shared_cache, balance_cache, z_cache = cache
    grads: Grads = {}
    dflat, dweights, routed_grads = routed_experts_backward(dout.reshape(-1, dout.shape[-1]), routed_cache)
    put(grads, "experts.", routed_grads)
    dscores = balance_loss_backward(dbalance, balance_cache)
    dx_gate, gate_grads = route_backward(
        dweights, route_cache, dscores.reshape(len(dweights), -1), z_loss_backward(dz, z_cache)
    )
    put(grads, "gate.", gate_grads)
    dx = (dflat + dx_gate).reshape(dout.shape)
    if shared_cache is not None:
        dx_shared, shared_grads = mlp_backward(dout, shared_cache)
        put(grads, "shared_experts.", shared_grads)
        dx = dx + dx_shared
    return dx, grads
