"""Every module of both twins against its float64 reference, forward and backward."""

import importlib

import numpy as np
import pytest
from cases import parameters, rows, tiny, worst

from shared_ops import rope
from shared_ops.expert_table import placement_of
from shared_ops.reference import attention, block, experts, mtp, norm, router
from shared_ops.reference.arrays import sub

TWINS = ("twin_torch", "twin_ms", "twin_ms_composite")


# What a twin's module gives, written once: both frameworks read it. Routing comes as dense weights [T, slots], since
# frameworks order equal scores differently.


def norm_outputs(module, x, *_):
    return (module(x),)


def attention_outputs(module, x, cos, sin, segments, mask, slots):
    return (module(x, cos, sin, module.attention.visible(segments)),)


def router_outputs(module, x, cos, sin, segments, mask, slots):
    chosen, weights, statistics = module(x, mask)
    dense = ((chosen[:, :, None] == slots) * weights[:, :, None]).sum(1)
    return dense, statistics[1], statistics[2], statistics[0]


def moe_outputs(module, x, cos, sin, segments, mask, slots):
    out, statistics = module(x, mask)
    return out, statistics[1], statistics[2], statistics[0]


def dense_block_outputs(module, x, cos, sin, segments, mask, slots):
    return (module(x, cos, sin, module.self_attn.attention.visible(segments), mask)[0],)


def block_outputs(module, x, cos, sin, segments, mask, slots):
    out, statistics = module(x, cos, sin, module.self_attn.attention.visible(segments), mask)
    return out, statistics[1], statistics[2], statistics[0]


def mtp_outputs(module, x, cos, sin, segments, mask, slots):
    hidden, embedded = x[: x.shape[0] // 2], x[x.shape[0] // 2 :]
    visible = module.self_attn.attention.visible(segments)
    out, statistics = module.predict(hidden, embedded, cos, sin, visible, mask)
    return out, statistics[1], statistics[2], statistics[0]


class Problem:
    """Inputs of one configuration: activations, tables, masks, and cotangents for what comes out."""

    def __init__(self, name: str):
        self.config = c = tiny(name)
        self.values, self.rows = parameters(c), rows(c)
        self.segments = self.rows["segment_ids"]
        self.mask = (self.segments != 0).astype(np.float32)
        self.generator = np.random.default_rng(3)
        cos, sin = rope.tables(c, self.segments.shape[1])
        self.cos, self.sin = (table[self.rows["position_ids"]] for table in (cos, sin))
        self.placement = placement_of(c)
        self.tokens = self.mask.size

    def normal(self, *shape: int) -> np.ndarray:
        return self.generator.standard_normal(shape).astype(np.float32)

    def inputs(self, x: np.ndarray) -> list[np.ndarray]:
        tables = (table[:, :, None].astype(np.float32) for table in (self.cos, self.sin))
        return [x, *tables, self.segments, self.mask, np.arange(self.config.n_routed_experts, dtype=np.int32)]

    @property
    def moe_arguments(self) -> dict:
        """Denominators of 1: the twins' modules give sums."""
        return {"mask": self.mask != 0, "group_of_expert": self.placement.group_of_expert, "rows": 1, "tokens": 1}


def compare(problem, twin_name, module, prefix, outputs, x, cotangents, reference, exact=()):
    """Run the twin, hold outputs, input gradient and every parameter gradient against the reference's."""
    twin = importlib.import_module(twin_name)
    values = sub(problem.values, prefix)
    in_slots = {n: v[problem.placement.expert_of_slot] if "experts." in n and v.ndim == 3 else v
                for n, v in values.items()}  # fmt: skip
    twin.prepare()
    built = module(twin.modules)
    results, input_gradient, gradients = twin.run_module(
        built, in_slots, outputs, problem.inputs(x), [np.asarray(c, np.float32) for c in cotangents]
    )
    expected, expected_input_gradient, expected_gradients = reference(values)
    for i, (result, value) in enumerate(zip(results, expected, strict=True)):
        if i in exact:
            assert np.array_equal(result, value)
        else:
            assert worst(result, value) <= twin.TOLERANCE, f"output {i}"
    assert worst(input_gradient, expected_input_gradient) <= twin.TOLERANCE, "input gradient"
    checked = set()
    for name, gradient in gradients.items():
        value = expected_gradients[name]
        if "experts." in name and value.ndim == 3:
            value = value[problem.placement.expert_of_slot]
        assert worst(gradient, value) <= twin.TOLERANCE, name
        checked.add(name)
    untrained = {name for name in values if name.endswith("e_score_correction_bias")}
    assert checked == set(values) - untrained


@pytest.mark.parametrize("twin", TWINS)
def test_rms_norm(twin):
    p = Problem("tiny_v3")
    c = p.config
    x = p.normal(p.tokens, c.hidden_size) * np.float32(1e-3)  # small enough that eps shows
    dout = p.normal(*x.shape)

    def reference(values):
        y, cache = norm.rms_norm(x, values["weight"], c.rms_norm_eps)
        dx, dweight = norm.rms_norm_backward(dout, cache)
        return [y], dx, {"weight": dweight}

    compare(p, twin, lambda m: m.RMSNorm(c.hidden_size, c.rms_norm_eps), "model.norm.", norm_outputs, x, [dout],
            reference)  # fmt: skip


@pytest.mark.parametrize("name", ["tiny_v3", "tiny_v2"])  # with and without query latent; without and with a window
@pytest.mark.parametrize("twin", TWINS)
def test_attention(twin, name):
    p = Problem(name)
    c = p.config
    x, dout = p.normal(p.tokens, c.hidden_size), p.normal(p.tokens, c.hidden_size)
    shape = (*p.segments.shape, c.hidden_size)

    def reference(values):
        y, cache = attention.attention(
            x.reshape(shape), values, c, p.cos, p.sin, p.segments, rope.softmax_scale(c)
        )
        dx, gradients = attention.attention_backward(dout.reshape(shape), cache)
        return [y.reshape(x.shape)], dx.reshape(x.shape), gradients

    compare(p, twin, lambda m: m.MultiHeadLatentAttention(c), "model.layers.0.self_attn.", attention_outputs, x,
            [dout], reference)  # fmt: skip


def moe_reference(p, dout, forward, backward):
    """Outputs of a layer with routed experts: activations, balance and z sums, counts."""
    c = p.config
    (y, statistics), cache = forward()
    dx, gradients = backward(dout, cache)
    alpha, z = c.aux_loss_alpha or 1, c.router_z_loss_coef or 1
    return [y, statistics.balance_loss / alpha, statistics.z_loss / z, statistics.counts], dx, gradients


@pytest.mark.parametrize("name", ["tiny_v3", "tiny_v2", "tiny_greedy"])
@pytest.mark.parametrize("twin", TWINS)
def test_mixture_of_experts(twin, name):
    """Router, routed experts in slot order and shared experts; the router's losses with their coefficients."""
    p = Problem(name)
    c, layer = p.config, p.config.first_k_dense_replace
    x, dout = p.normal(p.tokens, c.hidden_size), p.normal(p.tokens, c.hidden_size)
    shape = (*p.segments.shape, c.hidden_size)

    def reference(values):
        results, dx, gradients = moe_reference(
            p, dout.reshape(shape), lambda: experts.moe(x.reshape(shape), values, c, **p.moe_arguments),
            experts.moe_backward,
        )  # fmt: skip
        return [results[0].reshape(x.shape), *results[1:]], dx.reshape(x.shape), gradients

    cotangents = [dout, c.aux_loss_alpha, c.router_z_loss_coef, np.zeros(c.n_routed_experts)]
    compare(p, twin, lambda m: m.MixtureOfExperts(c, p.placement), f"model.layers.{layer}.mlp.", moe_outputs, x,
            cotangents, reference, exact=(3,))  # fmt: skip


@pytest.mark.parametrize("name", ["tiny_v3", "tiny_v2", "tiny_greedy"])
@pytest.mark.parametrize("twin", TWINS)
def test_router(twin, name):
    p = Problem(name)
    c, layer = p.config, p.config.first_k_dense_replace
    x, ddense = p.normal(p.tokens, c.hidden_size), p.normal(p.tokens, c.n_routed_experts)
    order = p.placement.expert_of_slot

    def reference(values):
        routing, cache = router.route(
            x, values["weight"], values.get("e_score_correction_bias"), c, p.placement.group_of_expert
        )
        # the two losses are test_mixture_of_experts' matter: here their cotangent is 0
        dweights = np.take_along_axis(ddense[:, p.placement.slot_of_expert], routing.selected, -1)
        dx, gradients = router.route_backward(dweights, cache)
        counts = experts.expert_counts(routing.selected, p.mask.reshape(-1) != 0, c.n_routed_experts)
        return [routing.dense_weights()[:, order], counts], dx, gradients

    def outputs(module, *inputs):
        results = router_outputs(module, *inputs)
        return results[0], results[3]

    compare(p, twin, lambda m: m.Router(c, p.placement), f"model.layers.{layer}.mlp.gate.", outputs, x,
            [ddense, np.zeros(c.n_routed_experts)], reference, exact=(1,))  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_dense_block(twin):
    p = Problem("tiny_v2")
    c = p.config
    x, dout = p.normal(p.tokens, c.hidden_size), p.normal(p.tokens, c.hidden_size)
    shape = (*p.segments.shape, c.hidden_size)

    def reference(values):
        (y, _), cache = block.block(
            x.reshape(shape), values, c, False, p.cos, p.sin, p.segments, rope.softmax_scale(c)
        )
        dx, gradients = block.block_backward(dout.reshape(shape), cache)
        return [y.reshape(x.shape)], dx.reshape(x.shape), gradients

    compare(p, twin, lambda m: m.DecoderLayer(c, p.placement, 0), "model.layers.0.", dense_block_outputs, x, [dout],
            reference)  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_multi_token_prediction(twin):
    p = Problem("tiny_v3")
    c, layer = p.config, p.config.num_hidden_layers
    x = p.normal(2 * p.tokens, c.hidden_size)
    dnormal = p.normal(p.tokens, c.hidden_size)
    shape = (2, *p.segments.shape, c.hidden_size)

    def reference(values):
        hidden, embedded = x.reshape(shape)
        (_, normal, statistics), cache = mtp.mtp(
            hidden, embedded, values, c, p.cos, p.sin, p.segments, rope.softmax_scale(c), **p.moe_arguments
        )
        dhidden, dembedded, gradients = mtp.mtp_backward(dnormal.reshape(shape[1:]), cache)
        flat = (p.tokens, c.hidden_size)
        balance, z = statistics.balance_loss / c.aux_loss_alpha, statistics.z_loss / c.router_z_loss_coef
        results = [normal.reshape(flat), balance, z, statistics.counts]
        return results, np.concatenate((dhidden, dembedded)).reshape(x.shape), gradients

    cotangents = [dnormal, c.aux_loss_alpha, c.router_z_loss_coef, np.zeros(c.n_routed_experts)]
    compare(p, twin, lambda m: m.MultiTokenPredictor(c, p.placement, layer), f"model.layers.{layer}.", mtp_outputs, x,
            cotangents, reference, exact=(3,))  # fmt: skip
