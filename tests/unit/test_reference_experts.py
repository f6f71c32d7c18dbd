"""SwiGLU (P18), routed and shared experts (P14), counts, and their gradients."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared_ops.reference.experts import (
    expert_counts,
    expert_params,
    mlp,
    mlp_backward,
    moe,
    moe_backward,
    routed_experts,
    swiglu,
)
from shared_ops.reference.finite_difference import worst_error

D, F, E, K = 5, 4, 12, 3


def moe_config(method, n_shared=2):
    return SimpleNamespace(
        topk_method=method,
        scoring_func="sigmoid" if method == "noaux_tc" else "softmax",
        n_routed_experts=E,
        n_shared_experts=n_shared,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        norm_topk_prob=method == "noaux_tc",
        routed_scaling_factor=1.7,
        aux_loss_alpha=0.6,
        router_z_loss_coef=0.3,
    )


def moe_params(rng, config):
    shapes = {"gate.weight": (E, D), "experts.gate_up_proj": (E, 2 * F, D), "experts.down_proj": (E, D, F)}
    if config.n_shared_experts:
        wide = config.n_shared_experts * F
        shapes["shared_experts.gate_proj.weight"] = shapes["shared_experts.up_proj.weight"] = (wide, D)
        shapes["shared_experts.down_proj.weight"] = (D, wide)
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if config.topk_method == "noaux_tc":
        params["gate.e_score_correction_bias"] = rng.uniform(-1.0, 0.4, E)
    return params


def test_gate_is_activated_and_up_multiplies():
    assert swiglu(1.0, 2.0)[0] == pytest.approx(1.462117, abs=1e-6)
    assert swiglu(2.0, 1.0)[0] == pytest.approx(1.761594, abs=1e-6)
    assert swiglu([1.0, 2.0], [3.0, 4.0])[0] == pytest.approx([2.193176, 7.046377], abs=1e-6)


def test_stacked_rows_are_gate_then_up():
    # one input and an identity behind: rows 1, 2 are gates and 3, 4 ups
    params = {"gate_up_proj": np.array([[[1.0], [2.0], [3.0], [4.0]]]), "down_proj": np.array([np.eye(2)])}
    assert mlp([1.0], expert_params(params, 0))[0] == pytest.approx([2.193176, 7.046377], abs=1e-6)
    interleaved = {name: rows[:, [0, 2, 1, 3]] if "gate" in name else rows for name, rows in params.items()}
    assert mlp([1.0], expert_params(interleaved, 0))[0] == pytest.approx([1.462117, 11.43089], abs=1e-5)


def test_routed_experts_against_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    params = {"gate_up_proj": rng.standard_normal((E, 2 * F, D)), "down_proj": rng.standard_normal((E, D, F))}
    x, weights = rng.standard_normal((9, D)), rng.random((9, K))
    selected = np.stack([rng.permutation(E)[:K] for _ in range(9)])
    out, _ = routed_experts(x, params, selected, weights)
    for t in range(9):
        expected = np.zeros(D)
        for expert, weight in zip(selected[t], weights[t], strict=True):
            gate_up = params["gate_up_proj"][expert] @ x[t]
            hidden = gate_up[:F] / (1 + np.exp(-gate_up[:F])) * gate_up[F:]
            expected += weight * params["down_proj"][expert] @ hidden
        assert out[t] == pytest.approx(expected, rel=1e-12)


def test_every_token_reaches_all_its_experts():
    rng = np.random.default_rng(1)
    config = moe_config("noaux_tc", n_shared=0)
    params = moe_params(rng, config)
    params["gate.weight"][:] = 0  # all tokens to the same experts: none is dropped
    x, mask = rng.standard_normal((2, 20, D)), np.ones((2, 20), bool)
    (_, statistics), _ = moe(x, params, config, mask)
    assert sorted(statistics.counts)[-K:] == [40] * K
    assert statistics.counts.sum() == 40 * K


def test_counts_leave_masked_tokens_out():
    selected = np.array([[0, 1], [0, 2], [3, 1]])
    assert expert_counts(selected, [True, False, True], 5).tolist() == [1, 2, 0, 1, 0]
    assert expert_counts(selected, [False] * 3, 5).tolist() == [0] * 5


def test_shared_experts_are_one_mlp_of_their_joint_width():
    rng = np.random.default_rng(2)
    config = moe_config("greedy")
    params = moe_params(rng, config)
    assert params["shared_experts.gate_proj.weight"].shape == (2 * F, D)
    x, mask = rng.standard_normal((1, 6, D)), np.ones((1, 6), bool)
    shared = {name[len("shared_experts.") :]: w for name, w in params.items() if name.startswith("shared")}
    (with_shared, _), _ = moe(x, params, config, mask)
    config.n_shared_experts = 0
    (without, _), _ = moe(x, params, config, mask)
    assert with_shared - without == pytest.approx(mlp(x, shared)[0])


def test_mlp_gradient():
    rng = np.random.default_rng(3)
    params = {f"{name}_proj.weight": rng.standard_normal((F, D)) for name in ("gate", "up")}
    params["down_proj.weight"] = rng.standard_normal((D, F))
    x, direction = rng.standard_normal((2, 3, D)), rng.standard_normal((2, 3, D))
    dx, grads = mlp_backward(direction, mlp(x, params)[1])
    error, where = worst_error(
        lambda: (mlp(x, params)[0] * direction).sum(), {"x": x, **params}, {"x": dx, **grads}, rng, 4, 8
    )
    assert error < 1e-7, where


@pytest.mark.parametrize("n_shared", [0, 2])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_moe_gradient(method, n_shared):
    """Of the output and both auxiliary losses, with masked tokens and a row that is masked altogether."""
    rng = np.random.default_rng(4)
    config = moe_config(method, n_shared)
    params = moe_params(rng, config)
    x, direction = rng.standard_normal((3, 7, D)), rng.standard_normal((3, 7, D))
    mask = rng.random((3, 7)) < 0.8
    mask[1] = False

    def value():
        (out, statistics), _ = moe(x, params, config, mask)
        return (out * direction).sum() + statistics.balance_loss + statistics.z_loss

    (_, statistics), cache = moe(x, params, config, mask)
    assert statistics.counts.sum() == mask.sum() * K
    dx, grads = moe_backward(direction, cache)
    assert grads.keys() == params.keys()
    bias = grads.pop("gate.e_score_correction_bias", None)
    assert bias is None or not bias.any()
    arrays = {"x": x, **{name: params[name] for name in grads}}
    error, where = worst_error(value, arrays, {"x": dx, **grads}, rng, 3, 6)
    assert error < 1e-7, where
