"""The pitfalls' own numbers and properties on both twins (PITFALLS P1, P7-P10, P12, P13, P18-P21, P23, P26)."""

import importlib
import math
from functools import cache
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
import torch
import twin_ms
import twin_ms_composite
import twin_torch
from cases import parameters, worst
from mindspore import Tensor, nn

import ms_train.ops
import torch_proto.loss
import torch_proto.ops
from shared_ops.batch import training_batch
from shared_ops.config import ModelConfig, RunConfig
from shared_ops.data.packing import batch_from_documents
from shared_ops.expert_table import placement_of
from shared_ops.init import initial_value
from shared_ops.params import CORRECTION_BIAS, manifest
from shared_ops.reference import model as reference
from shared_ops.reference import optim as reference_optim
from shared_ops.training_loop import StepValues, TrainingLoop

TWINS = {"torch": twin_torch, "ms": twin_ms, "ms_composite": twin_ms_composite}
PACKAGES = {"torch": "torch_proto", "ms": "ms_train", "ms_composite": "ms_train"}


class Call(nn.Cell):
    """An operation as the root of a graph."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def construct(self, *inputs):
        return self.operation(*inputs)


def call(twin, make, *inputs):
    """`make(ops)` of a twin, applied to arrays (integers are indices)."""
    TWINS[twin].prepare()
    if twin == "torch":
        tensors = [torch.from_numpy(x.astype(np.int64) if x.dtype == np.int32 else x) for x in inputs]
        return make(torch_proto.ops)(*tensors).numpy()
    return Call(make(ms_train.ops))(*map(Tensor, inputs)).asnumpy()


def f32(*values):
    return np.array(values, np.float32)


@pytest.fixture(params=TWINS)
def any_ops(request):
    """The operations of every backend."""
    return request.param


@pytest.fixture(params=["torch", "ms"])
def twin(request):
    return request.param


# --- operations --------------------------------------------------------------------------------------------------


def test_rotary_pairs_are_interleaved(any_ops):
    """P1: dot products of rotated q and k [half-split 5.703238, 4.501984; q only 5.008947, 4.100867]."""
    positions = np.arange(4)[:, None] * np.array([1.0, 1e-2])
    q, k = f32(1, 2, 3, 4), f32(0.5, -1, 0.25, 2)
    x = np.stack([np.tile(q, (4, 1)), np.tile(k, (4, 1))], 1)[None]  # [1, S, 2 heads, 4]
    cos, sin = (f(positions)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
    y = call(any_ops, lambda ops: ops.Rotary(), x, cos, sin)[0].astype(np.float64)
    for q_position, k_position, dot in ((1, 0, 6.306166), (3, 1, 7.653869), (2, 2, 7.25)):
        assert y[q_position, 0] @ y[k_position, 1] == pytest.approx(dot, abs=2e-6)


def test_gate_comes_first(any_ops):
    """P18: silu(gate) up [1.761594; interleaved read as blocked 1.462117, 11.43089]."""
    assert call(any_ops, lambda ops: ops.SwiGLU(), f32(1), f32(2)) == pytest.approx(1.462117, abs=2e-6)
    gate_up = f32([1, 0], [2, 0], [3, 0], [4, 0])[None]
    y = call(
        any_ops, lambda ops: ops.RoutedExperts(1, 1), f32([1, 0]), np.zeros((1, 1), np.int32), f32([1]), gate_up,
        np.eye(2, dtype=np.float32)[None],
    )  # fmt: skip
    assert y[0] == pytest.approx([2.193176, 7.046377], rel=1e-6)


def test_norm_epsilon(any_ops):
    """P19 [eps 1e-5: .301511]."""
    y = call(any_ops, lambda ops: ops.RMSNorm(1e-6), np.full((2, 6), 1e-3, np.float32), np.ones(6, np.float32))
    assert y == pytest.approx(np.full((2, 6), 0.707107), abs=1e-6)


@pytest.mark.parametrize("half_twin", ["torch", "ms_composite"])  # the CPU kernels have fp32 only
def test_norm_in_half_precision(half_twin):
    """P19: statistics in fp32 [fp16 x=300: 0]; the cast comes before the weight (DESIGN 5.1)."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((8, 64)).astype(np.float16)
    weight = (1 + 0.3 * generator.standard_normal(64)).astype(np.float32)
    large = call(half_twin, lambda ops: ops.RMSNorm(1e-6), np.full((1, 6), 300, np.float16), np.ones(6, np.float32))
    assert large.dtype == np.float16 and (large == 1).all()
    wide = x.astype(np.float64)
    normal = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(np.float16)
    y = call(half_twin, lambda ops: ops.RMSNorm(1e-6), x, weight)
    assert (y == normal * weight.astype(np.float16)).mean() > 0.99
    assert (y == (normal.astype(np.float32) * weight).astype(np.float16)).mean() < 0.9


@pytest.mark.parametrize("half_twin", ["torch", "ms_composite"])
def test_half_precision_computes_in_fp32_where_it_must(half_twin):
    """P4, DESIGN 5.1: rotary with fp32 tables, cross entropy, router logits; fp16 stands for any narrow type."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 40, 2, 8)).astype(np.float16)
    angle = np.arange(217, 257)[None, :, None, None] * np.array([1, 0.3, 0.1, 0.01])
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = x[..., 0::2].astype(np.float64), x[..., 1::2].astype(np.float64)
    rotated = np.stack((even * cos - odd * sin, odd * cos + even * sin), -1).reshape(x.shape).astype(np.float16)
    y = call(half_twin, lambda ops: ops.Rotary(), x, cos.astype(np.float32), sin.astype(np.float32))
    assert y.dtype == np.float16 and (y == rotated).mean() > 0.99

    logits, labels = (8 * generator.standard_normal((50, 61))).astype(np.float16), np.arange(50, dtype=np.int32)
    wide = logits.astype(np.float64)
    loss = (np.log(np.exp(wide).sum(-1)) - wide[range(50), labels]).sum()
    assert call(half_twin, lambda ops: ops.CrossEntropySum(), logits, labels) == pytest.approx(loss, rel=1e-6)

    config = router_config(12, **V2_ROUTING)
    x = generator.standard_normal((40, 12)).astype(np.float16)
    weight = generator.standard_normal((12, 12)).astype(np.float32)
    scores = np.exp(x.astype(np.float64) @ weight.T.astype(np.float64))
    scores /= scores.sum(-1, keepdims=True)

    def outputs(module, x, mask):
        return (module(x, mask)[1],)

    TWINS[half_twin].prepare()
    module = TWINS[half_twin].modules.Router(config, placement_of(config))
    (weights,), _, _ = TWINS[half_twin].run_module(
        module, {"weight": weight}, outputs, [x, np.ones((1, 40), np.float32)], [np.ones((40, 2), np.float32)]
    )
    nearest = np.abs(weights[:, :, None] - scores[:, None]).min(-1)  # whichever expert was chosen
    assert weights.dtype == np.float32 and nearest.max() < 2e-6


def test_the_norm_of_large_gradients_is_accurate():
    """DESIGN 5.6: fp32 sums are off by 5e-4 on 8M elements (MindSpore's is test_ms_ops' matter)."""
    x = torch.full((8_000_000,), 0.1)
    exact = len(x) * float(x[0].double()) ** 2
    assert float(torch_proto.ops.SumOfSquares()(x)) == pytest.approx(exact, rel=1e-7)


# --- routing -----------------------------------------------------------------------------------------------------


def router_config(experts, **changes):
    """hidden_size = n_routed_experts: through the identity the inputs are the logits."""
    return ModelConfig.model_validate(SMALL | {"hidden_size": experts, "n_routed_experts": experts} | changes)


def route(twin, config, scores, bias=None, mask=None):
    """(dense weights [T, E] by canonical expert, counts, aux) of rows of tokens with the given scores [B, S, E]."""
    scores = np.asarray(scores, np.float64).reshape(-1, np.shape(scores)[-2], config.n_routed_experts)
    logits = np.log(scores / (1 - scores)) if config.scoring_func == "sigmoid" else np.log(scores)
    mask = np.ones(scores.shape[:2], np.float32) if mask is None else np.asarray(mask, np.float32)
    placement, e = placement_of(config), config.n_routed_experts

    def outputs(module, x, mask, slots):
        chosen, weights, statistics = module(x, mask)
        return ((chosen[:, :, None] == slots) * weights[:, :, None]).sum(1), statistics[0], statistics[1]

    TWINS[twin].prepare()
    values = {"weight": np.eye(e, dtype=np.float32), CORRECTION_BIAS: np.asarray(bias or np.zeros(e), np.float32)}
    inputs = [logits.reshape(-1, e).astype(np.float32), mask, np.arange(e, dtype=np.int32)]
    (dense, counts, aux), _, gradients = TWINS[twin].run_module(
        TWINS[twin].modules.Router(config, placement), values, outputs, inputs,
        [np.ones((mask.size, e), np.float32), np.ones(e, np.float32), np.ones((), np.float32)],
    )  # fmt: skip
    assert CORRECTION_BIAS not in gradients  # P9: its gradient is exactly 0
    return dense[:, placement.slot_of_expert], counts, float(aux)


SMALL = {
    "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 20, "intermediate_size": 26,
    "moe_intermediate_size": 6, "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 32,
    "num_attention_heads": 3, "q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 5, "n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "aux_loss_alpha": 0.3, "router_z_loss_coef": 0.1, "num_nextn_predict_layers": 1,
    "mtp_loss_weight": 0.4, "rms_norm_eps": 1e-3, "expert_placement": "hash:3",
}  # fmt: skip
V3_ROUTING = {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 2, "expert_placement": "contiguous"}
V2_ROUTING = V3_ROUTING | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "scoring_func": "softmax",
                           "norm_topk_prob": False, "routed_scaling_factor": 1.0}  # fmt: skip


def test_closed_groups_never_win_and_the_bias_never_weighs(twin):
    """P7, P9 [with mask 0 some of 4-7; biased weights .8333, .7738, .8929]."""
    config = router_config(8, **V3_ROUTING | {"topk_group": 2, "num_experts_per_tok": 3})
    scores = [[[0.30, 0.20, 0.35, 0.25, 0.10, 0.05, 0.15, 0.12]]]
    weights, counts, _ = route(twin, config, scores, bias=[-1.0] * 8)
    assert weights[0] == pytest.approx([0.833333, 0, 0.972222, 0.694444, 0, 0, 0, 0], abs=5e-6)
    assert counts.tolist() == [1, 0, 1, 1, 0, 0, 0, 0]


def test_group_score(twin):
    """P8: V2 takes the group of the highest score, V3 of the two highest, V2-Lite none."""
    scores = np.array([[[0.40, 0.01, 0.25, 0.22, 0.15, 0.10, 0.05, 0.04]]])
    greedy = V2_ROUTING | {"topk_method": "greedy", "n_group": 1}
    for changes, chosen in ((V3_ROUTING, [2, 3]), (V2_ROUTING, [0, 1]), (greedy, [0, 2])):
        given = scores if changes is V3_ROUTING else scores / scores.sum()
        _, counts, _ = route(twin, router_config(8, **changes), given)
        assert np.nonzero(counts)[0].tolist() == chosen


def test_groups_are_those_of_the_placement(twin):
    """Experts e and e + 4 form a group: .40+.15 beats .25+.05, where neighbours would give {2, 3}."""
    scores = [[[0.40, 0.01, 0.25, 0.22, 0.15, 0.10, 0.05, 0.04]]]
    _, counts, _ = route(twin, router_config(8, **V3_ROUTING | {"expert_placement": "modulo"}), scores)
    assert np.nonzero(counts)[0].tolist() == [0, 4]


def test_normalise_and_scale_exactly_once(twin):
    """P10 [3.75, 2.5]."""
    scores = np.array([[[0.3, 0.2, 0.15, 0.15, 0.1, 0.1]]])
    v2 = V2_ROUTING | {"topk_method": "greedy", "n_group": 1, "routed_scaling_factor": 16.0}
    weights, _, _ = route(twin, router_config(6, **v2), scores)
    assert weights[0] == pytest.approx([4.8, 3.2, 0, 0, 0, 0], abs=5e-5)
    weights, _, _ = route(twin, router_config(6, **V3_ROUTING | {"n_group": 1}), scores)
    assert weights[0] == pytest.approx([1.5, 1.0, 0, 0, 0, 0], abs=2e-5)


FIRST, OPPOSITE = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    "scoring, rows, bias, mask, expected",
    [
        ("softmax", [FIRST], None, None, 1.4),
        ("sigmoid", [[0.8, 0.6, 0.4, 0.2]], None, None, 1.4),  # normalised first [2.8]
        ("softmax", [FIRST, OPPOSITE], None, None, 2 * 1.4),  # a row at a time [pooled 1.0]
        ("sigmoid", [FIRST], [-0.3, 0, 0, 0.3], None, 1.4),  # counts the unbiased choice [0.8]
        ("softmax", [FIRST, OPPOSITE, FIRST], None, [[1] * 5, [1, 1, 0, 0, 0], [0] * 5], 2 * 1.4),  # no padding
    ],
)  # fmt: skip
def test_balance_loss(twin, scoring, rows, bias, mask, expected):
    """P13, before alpha and the number of rows."""
    changes = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "expert_placement": "contiguous"}
    if scoring == "softmax":
        changes |= V2_ROUTING | {"topk_method": "greedy", "n_group": 1}
    scores = np.repeat(np.array(rows)[:, None], 5, axis=1)
    if mask:  # what is masked out is routed elsewhere
        scores = np.where(np.array(mask)[:, :, None] != 0, scores, np.array([0.05, 0.15, 0.2, 0.6]))
    _, counts, aux = route(twin, router_config(4, **changes), scores, bias, mask)
    assert aux == pytest.approx(expected, rel=2e-5)
    assert counts.sum() == 2 * (np.sum(mask) if mask else len(rows) * 5)


def test_balance_loss_without_alpha_is_0(twin):
    changes = V2_ROUTING | {"topk_method": "greedy", "n_group": 1, "aux_loss_alpha": 0.0}
    assert route(twin, router_config(4, **changes), [[FIRST] * 5])[2] == 0.0


# --- losses ------------------------------------------------------------------------------------------------------


def test_losses_are_weighted_by_tokens(twin):
    """P20: 1 token of loss 3 and 9 of loss 1 make 1.2 [2.0]; 0 labels make 0."""
    config = ModelConfig.model_validate(SMALL | {"num_nextn_predict_layers": 0})
    module = importlib.import_module(f"{PACKAGES[twin]}.loss").TotalLoss(config)
    for sums, labels, expected in (([3.0, 9.0], 10, 1.2), ([0.0, 0.0], 0, 0.0)):
        denominators = f32([labels, 2, 10])
        parts = []
        for value in sums:
            rest = (np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros((1, 12), np.float32))
            if twin == "torch":
                given = torch_proto.loss.LossSums(torch.tensor([value]), *map(torch.from_numpy, rest))
                total = module(given, torch.from_numpy(denominators))[0]
            else:
                given = (Tensor(f32(value)), *map(Tensor, rest))
                total = module(given, Tensor(denominators))[0]
            parts.append(float(total))
        assert sum(parts) == pytest.approx(expected, abs=1e-6)


# --- a training step -----------------------------------------------------------------------------------------------

LENGTH, ROWS, RATE, BETAS, SEED = 12, 4, 1e-3, (0.9, 0.95), 5
LR, DECAY = 1e-3, 0.1
CONFIG = ModelConfig.model_validate(SMALL)
VALUES = parameters(CONFIG)


def batch(rows):
    """Row 0 whole, row 1 padding, row 2 a document of one token (no prediction depth), row 3 packed and padded."""
    generator = np.random.default_rng(4)
    documents = [[generator.integers(0, 61, n).tolist() for n in lengths] for lengths in ((12,), (), (1,), (5, 4))]
    return batch_from_documents([documents[i] for i in rows], LENGTH)


def of_twin(name, micro_rows):
    """A twin's trainer. The clip leaves gradients as they are, so that the first moment holds them."""
    run = RunConfig.model_validate({
        "run": {"seed": SEED}, "model": SMALL, "data": {"path": "nowhere"},
        "train": {"steps": 9, "global_batch_size": ROWS, "micro_batch_size": micro_rows, "sequence_length": LENGTH},
        "optim": {"lr": 0.7, "betas": list(BETAS), "weight_decay": DECAY, "clip_grad_norm": 1e9,
                  "bias_update_rate": RATE},
    })  # fmt: skip
    package = PACKAGES[name]
    parallel = importlib.import_module(f"{package}.parallel").Parallel()
    return importlib.import_module(f"{package}.trainer").Trainer(run, parallel)


@cache
def step(name, micro_rows):
    """(trainer, values, gradients by canonical name, state) after one update from VALUES with all four rows."""
    trainer = of_twin(name, micro_rows)
    initial = {n: a.copy() for n, a in trainer.arrays()}
    return (trainer, initial, *update(trainer, training_batch(batch(range(ROWS)), 1)))


def update(trainer, given, moments=None, step=1):
    """Update number `step` from VALUES and moments {name: (m, v)} (zeros)."""
    state = {}
    for p in manifest(CONFIG):
        state[f"params/{p.name}"] = VALUES[p.name]
        m, v = moments[p.name] if moments else np.zeros((2, *p.shape), np.float32)
        state |= {f"adam_m/{p.name}": m, f"adam_v/{p.name}": v}
    trainer.restore(state, step - 1)
    values = trainer.step(given, LR, step, False)
    after = {n: a.copy() for n, a in trainer.arrays()}
    gradients = {n[7:]: a / (1 - BETAS[0]) for n, a in after.items() if n.startswith("adam_m/")}
    return values, gradients, after


@cache
def expected():
    groups = placement_of(CONFIG).group_of_expert
    output, state = reference.forward(VALUES, batch(range(ROWS)), CONFIG, group_of_expert=groups)
    return output, reference.backward(state)


@pytest.mark.parametrize("twin, micro_rows", [("torch", 4), ("torch", 2), ("torch", 1), ("ms", 1)])
def test_any_split_into_micro_batches_is_the_whole_batch(twin, micro_rows):
    """P20, P12: losses, gradients, counts and bias of one step are those of the float64 model on the whole batch.

    Rows have unequal numbers of labels, experts lie in hashed slots and groups, eps of the norms is not the default.
    """
    _, _, values, gradients, after = step(twin, micro_rows)
    output, expected_gradients = expected()
    assert [values.loss, values.aux_loss, values.mtp_loss] == pytest.approx(
        [output.loss, output.aux_loss, output.mtp_loss], rel=1e-5
    )
    counts = np.stack([output.counts[layer] for layer in CONFIG.moe_layers])
    assert np.array_equal(values.counts, counts)
    assert set(gradients) == {p.name for p in manifest(CONFIG) if p.trainable}
    for parameter, gradient in gradients.items():
        assert worst(gradient, expected_gradients[parameter]) <= 1e-5, parameter
        second = (1 - BETAS[1]) * expected_gradients[parameter] ** 2
        assert worst(after[f"adam_v/{parameter}"], second) <= 3e-5, parameter
    assert values.grad_norm == pytest.approx(reference_optim.global_norm(
        {n: g for n, g in expected_gradients.items() if not n.endswith(CORRECTION_BIAS)}), rel=1e-5)  # fmt: skip
    for layer, of_layer in zip(CONFIG.moe_layers, counts, strict=True):
        parameter = f"model.layers.{layer}.mlp.gate.{CORRECTION_BIAS}"
        bias = reference_optim.bias_update(VALUES[parameter], of_layer, RATE)
        assert np.abs(after[f"params/{parameter}"] - bias).max() < 2e-7


def test_nothing_to_learn_is_no_nan(twin):
    """P20: all labels -100 give loss 0 and no gradient to the head; only padding gives no gradient at all."""
    trainer = step(twin, 1)[0]
    rows = batch(range(ROWS))
    unlabelled = training_batch(rows | {"labels": np.full_like(rows["labels"], -100)}, 1)
    values, gradients, _ = update(trainer, unlabelled)
    assert values.loss == values.mtp_loss == 0.0 and values.aux_loss > 0
    assert not gradients["lm_head.weight"].any() and all(np.isfinite(g).all() for g in gradients.values())
    values, gradients, after = update(trainer, training_batch(batch([1, 1, 1, 1]), 1))
    assert values[:5] == (0.0, 0.0, 0.0, 0.0, 0.0) and not values.counts.any()
    assert not any(g.any() for g in gradients.values())
    for p in manifest(CONFIG):  # P23: without gradients a matrix decays, everything else stays
        wanted = VALUES[p.name] * np.float32(1 - LR * DECAY if p.decay else 1)
        assert np.abs(after[f"params/{p.name}"] - wanted).max() <= (1e-7 if p.decay else 0), p.name


def test_an_update_goes_on_from_a_state(twin):
    """P22, P27: update 7 from given moments is the formula's, with the rate that the loop gives it."""
    generator = np.random.default_rng(7)
    moments = {p.name: np.stack([0.01 * generator.standard_normal(p.shape), generator.uniform(1e-6, 1e-4, p.shape)])
               .astype(np.float32) for p in manifest(CONFIG)}  # fmt: skip
    _, _, after = update(step(twin, 1)[0], training_batch(batch(range(ROWS)), 1), moments, 7)
    for p in manifest(CONFIG):
        if p.trainable:
            wanted = reference_optim.adamw(VALUES[p.name], expected()[1][p.name], *moments[p.name], 7, LR, BETAS, 1e-8,
                                           DECAY, p.decay)  # fmt: skip
            for kind, value, bound in zip(("params", "adam_m", "adam_v"), wanted, (1e-6, 1e-5, 3e-5), strict=True):
                assert worst(after[f"{kind}/{p.name}"], value) <= bound, (kind, p.name)


def test_validation_is_the_mean_over_labels(twin):
    step(twin, 1)[0].restore({f"{k}/{p.name}": VALUES[p.name] for p in manifest(CONFIG)
                              for k in ("params", "adam_m", "adam_v")}, 0)  # fmt: skip
    total, labels = step(twin, 1)[0].validate(training_batch(batch(range(ROWS)), 1))
    assert labels == 11 + 0 + 0 + 4 + 3 and total / labels == pytest.approx(expected()[0].loss, rel=1e-5)


def test_the_seed_decides_the_initial_values(twin):
    initial = step(twin, 1)[1]
    for p in manifest(CONFIG):
        assert np.array_equal(initial[f"params/{p.name}"], initial_value(p, SEED, CONFIG.initializer_range)), p.name


class Recording:
    """A twin that only notes what the loop asks for."""

    device = "none"

    def __init__(self):
        self.updates, self.rates = [], []

    def step(self, batch, lr, update, stop):
        self.updates.append(update)
        self.rates.append(lr)
        return StepValues(0.0, 0.0, 0.0, 0.0, 0.0, np.zeros((2, 12)))

    def barrier(self):
        pass


@pytest.mark.parametrize("start", [0, 3])
def test_the_loop_gives_update_t_its_rate(tmp_path, start):
    """P24, P27: warm-up 10 gives .3 of the peak at t=3, before and after a resume; so do the rows of each step."""
    run = RunConfig.model_validate({
        "run": {"dir": str(tmp_path)}, "model": SMALL, "data": {"path": "nowhere"}, "optim": {"lr": 1.0, "warmup_steps": 10},
        "train": {"steps": 20, "stop_after": 12, "global_batch_size": 4, "sequence_length": LENGTH},
    })  # fmt: skip
    loop = TrainingLoop(run, "torch_proto", 1, 2, None, False)  # not rank 0: nothing is written
    asked = []

    def at(consumed):
        asked.append(consumed)
        return batch(range(ROWS))

    loop.batches, loop.start, loop.consumed, loop.state_folder = SimpleNamespace(at=at), start, 4 * start, None
    twin, loop._save = Recording(), lambda twin, step: None
    loop._loop(twin, None, run.train.last_step)
    assert twin.updates == list(range(start + 1, 13)) and asked == [4 * (t - 1) for t in twin.updates]
    horizon = [0.5 * (1 + math.cos(math.pi * t / 10)) * 0.9 + 0.1 for t in (1, 2)]  # of 20 steps, not of 12
    assert twin.rates == pytest.approx(([t / 10 for t in range(1, 11)] + horizon)[start:])


# --- packed documents ----------------------------------------------------------------------------------------------


class Logits(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    @ms.jit
    def construct(self, ids, positions, segments):
        return self.model.main_logits(ids, positions, segments)


@pytest.mark.parametrize("dense, bound", [(2, 0.0), (1, 2e-6)])
def test_packed_documents_do_not_see_each_other(twin, dense, bound):
    """P26: B in [A|B] equals B alone; another A of the same length leaves B as it is.

    To the bit without routed experts; with them A decides how many rows an expert's matrix product has, and so which
    code multiplies (seen: 4e-7; MindSpore's composites, whose shapes are static, are equal to the bit).
    """
    config = ModelConfig.model_validate(
        SMALL | {"num_hidden_layers": 2, "first_k_dense_replace": dense, "num_nextn_predict_layers": 0}
    )
    TWINS[twin].prepare()
    model = TWINS[twin].build_model(config, 30, parameters(config))
    net = Logits(model) if twin == "ms" else None

    def logits(*documents):
        rows = batch_from_documents([documents], 30)
        arrays = [rows[key] for key in ("input_ids", "position_ids", "segment_ids")]
        if net:
            return net(*map(Tensor, arrays)).asnumpy()[0]
        return model.main_logits(*(torch.from_numpy(a).long() for a in arrays)).detach().numpy()[0]

    generator = np.random.default_rng(6)
    for _ in range(3):
        a, other, b = (generator.integers(0, 61, n).tolist() for n in (13, 13, 11))
        packed, changed, alone = logits(a, b), logits(other, b), logits(b)
        assert worst(changed[:13], packed[:13]) > 0.01
        assert worst(changed[13:24], packed[13:24]) <= bound
        assert worst(packed[13:24], alone[:11]) <= 2e-6
