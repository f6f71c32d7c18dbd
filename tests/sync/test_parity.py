"""parity: sound twins agree, and of every planted fault the module is named.

The faults are those that ports of these models have really had (PITFALLS), planted in one twin's class, in both twins
in turn; the other twin is sound, and is captured once.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import torch
import yaml
from mindspore import nn as ms_nn

from ms_train import attention as ms_attention
from ms_train import experts as ms_experts
from ms_train import linear as ms_linear
from ms_train import loss as ms_loss
from ms_train import mtp as ms_mtp
from ms_train import norm as ms_norm
from ms_train import ops as ms_ops
from ms_train import router as ms_router
from shared_ops import rope
from shared_ops.config import ModelConfig, load_model_config
from shared_ops.errors import UserError, run_cli
from shared_ops.params import CORRECTION_BIAS, manifest
from torch_proto import attention, block, checkpoint, experts, linear, model, mtp, ops, optim, router
from weight_sync import parity
from weight_sync.agreement import compare, problem, side_ms_train, side_torch_proto, side_transformers
from weight_sync.agreement.compare import compare_sides, difference
from weight_sync.agreement.report import Report, remarks, write_html, write_json
from weight_sync.agreement.steps import compare_steps
from weight_sync.agreement.verdict import judge

BOUND, ROWS, LENGTH = 1e-5, 4, 40
SIDES = {"ms_train": side_ms_train, "torch_proto": side_torch_proto, "transformers": side_transformers}
# one dense layer, one with experts, one for prediction; o_proj is square; positions beyond YaRN's original length
SMALL = {"vocab_size": 257, "hidden_size": 36, "num_hidden_layers": 2, "first_k_dense_replace": 1,
         "num_nextn_predict_layers": 1}  # fmt: skip
PLAIN = {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0, "router_z_loss_coef": 0.0}  # what transformers has
CHANGES = {
    "v3": ("tiny_v3", SMALL),
    "v2": ("tiny_v2", SMALL | {"num_nextn_predict_layers": 0}),
}  # fmt: skip


def setting_of(name: str, **changes):
    base, small = CHANGES[name]
    config = ModelConfig.model_validate(load_model_config(base).model_dump() | small | changes)
    return problem.sized(problem.in_default_run(config), config, ROWS, LENGTH)


class Kept:
    """A sound side whose pass and steps are made once for all tests (on another one: steps change the parameters)."""

    def __init__(self, side, build):
        self.side, self.name, self.source = side, side.name, side.source
        self.replay, self.shares = getattr(side, "replay", None), getattr(side, "shares", None)
        self._build = build
        self._capture, self._steps = None, []

    def capture(self, batch, forced):
        if forced:
            return self.side.capture(batch, forced)
        if self._capture is None:
            self._capture = self.side.capture(batch, forced)
        return self._capture

    def step(self, batch, lr, update):
        self._update = update
        if not self._steps:
            self._stepping = self._build()
        if update > len(self._steps):
            self._steps.append((self._stepping.step(batch, lr, update), self._stepping.arrays()))
        return self._steps[update - 1][0]

    def arrays(self):
        return self._steps[self._update - 1][1]


class Case:
    """One configuration with its parameters, batch and sound sides."""

    def __init__(self, name, **changes):
        self.setting = setting_of(name, **changes)
        self.parameters = problem.made_parameters(self.setting.model, 3)
        self.batch = problem.made_batch(self.setting, 3)
        self._sound = {}

    def build(self, name):
        return SIDES[name].Side(self.setting, problem.State(self.parameters))

    def sound(self, name):
        if name not in self._sound:
            self._sound[name] = Kept(self.build(name), lambda: self.build(name))
        return self._sound[name]

    def compare(self, reference, follower, steps=0) -> Report:
        """As parity.run does it."""
        names = reference.name, follower.name
        found = compare_sides(reference, follower, self.batch, BOUND)
        made = list(compare_steps(reference, follower, self.batch, self.setting, steps, BOUND)) if steps else []
        verdict = judge(names, found, made, BOUND, self.setting, [reference.source, follower.source])
        return Report(names, BOUND, [("what", "a test")], found, made, verdict)

    def with_fault(self, twin, steps=0) -> Report:
        """The twin, built anew with what the test has planted, against the other one."""
        if twin == "ms_train":
            return self.compare(self.build("ms_train"), self.sound("torch_proto"), steps)
        return self.compare(self.sound("ms_train"), self.build("torch_proto"), steps)


@pytest.fixture(scope="session")
def cases():
    made = {}

    def get(name) -> Case:
        if name not in made:
            made[name] = Case(name)
        return made[name]

    return get


def ms_implementation(interface: type) -> type:
    """The class that an operation of ms_train is on this machine."""
    return ms_ops._IMPLEMENTATIONS[interface][ms_ops.BACKENDS.index(ms_ops.select("auto"))]


def blamed(report: Report, module: str, direction: str = "outputs") -> None:
    """The verdict names exactly this module, in words too."""
    blame = report.comparison.blame
    assert blame is not None, report.verdict.sentence
    assert (blame.key.path, blame.direction) == (module, direction), report.verdict.sentence
    assert not report.verdict.agrees and report.verdict.first == module
    assert module in report.verdict.sentence and len(report.verdict.sources) == 2
    assert blame.difference > 10 * BOUND  # by far, and not by rounding


# --- sound sides agree -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps"), [("v3", 2), ("v2", 0)])
def test_sound_twins_agree(cases, name, steps):
    """Compiles a training step of MindSpore: 10 s."""
    case = cases(name)
    report = case.compare(case.sound("ms_train"), case.sound("torch_proto"), steps)
    assert report.verdict.agrees and report.verdict.first is None, report.verdict.sentence
    assert report.comparison.worst.worst <= BOUND and not report.comparison.flips
    assert [made.moved for made in report.steps] == [0] * steps
    if steps:
        assert report.steps[0].losses[0] - report.steps[1].losses[0] > 1e-3  # the optimizer works
    # nothing is compared by accident: every module and every parameter of the model is there
    paths = {row.key.path for row in report.comparison.rows}
    trained = {p.name for p in manifest(case.setting.model) if p.trainable}
    assert {n.rpartition(".")[0] for n in trained} <= paths
    assert {n for row in report.comparison.rows for n in row.parameters} == trained
    layer = "model.layers.1"
    assert {"total_loss", "cross_entropy", "lm_head", "DeepseekForCausalLM", "model.rotary_table", layer,
            f"{layer}.self_attn.attention", f"{layer}.self_attn.rotary",
            f"{layer}.mlp.gate.top_experts"} <= paths  # fmt: skip
    assert report.comparison.only[0] == ([] if name == "v3" else ["linear"])  # v2's tied head multiplies there
    assert all(path.endswith(".routed.swiglu") for path in report.comparison.only[1])


@pytest.mark.parametrize("name", ["v3", "v2"])
@pytest.mark.parametrize("twin", ["torch_proto", "ms_train"])
def test_sound_twins_agree_with_transformers(twin, name):
    case = Case(name, **PLAIN)
    report = case.compare(case.build("transformers"), case.build(twin))
    assert report.verdict.agrees, report.verdict.sentence
    paths = {row.key.path for row in report.comparison.rows}
    assert {"model.embed_tokens", "model.layers.0.self_attn.q_a_proj" if name == "v3" else "lm_head",
            "model.layers.1.mlp.gate", "model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts.down_proj",
            "model.layers.1.self_attn", "model.norm", "total_loss"} <= paths  # fmt: skip


def test_the_execution_mode_is_left_as_it_was(cases):
    call = ms_nn.Cell.__call__
    with side_ms_train.mode(ms.GRAPH_MODE):
        side = cases("v3").build("ms_train")
        side.capture(cases("v3").batch, {})
        assert ms.get_context("mode") == ms.GRAPH_MODE
        ms.set_context(mode=ms.PYNATIVE_MODE)
        cases("v3").build("ms_train")
        assert ms.get_context("mode") == ms.PYNATIVE_MODE
    assert ms_nn.Cell.__call__ is call and "predict" not in vars(side.model.model.layers[2])


def test_an_error_inside_a_module_leaves_nothing_behind(cases, monkeypatch):
    def construct(self, *_):
        raise RuntimeError("planted")

    side = cases("v3").build("ms_train")
    with monkeypatch.context() as inside:
        inside.setattr(ms_router.Router, "construct", construct)
        with pytest.raises(RuntimeError, match="planted"):
            side.capture(cases("v3").batch, {})
    assert side.capture(cases("v3").batch, {}).calls


# --- the batch and the parameters --------------------------------------------------------------------------------


def test_the_batch_has_what_makes_faults_visible():
    setting = setting_of("v3")
    batch = problem.made_batch(setting, 0)
    segments, positions = batch.segment_ids, batch.position_ids
    assert segments.shape == (ROWS, LENGTH) and (segments[0] == 1).all() and (positions[0] == np.arange(LENGTH)).all()
    assert segments[1].max() >= 3 and (segments[2] == 0).any() and (segments[3] == 0).all()
    starts = np.flatnonzero(np.diff(segments[1])) + 1
    assert (positions[1, starts] == 0).all() and (positions[1, starts - 1] > 0).any()
    assert not (batch.labels[0, 3] != -100).any() and batch.denominators[0, 1] == 3
    assert LENGTH > setting.model.rope_scaling.original_max_position_embeddings
    assert np.array_equal(problem.made_batch(setting, 0).input_ids, batch.input_ids)
    assert not np.array_equal(problem.made_batch(setting, 1).input_ids, batch.input_ids)
    for rows, length in ((1, 4), (2, 4), (3, 5), (8, 96)):
        made = problem.made_batch(problem.sized(setting, setting.model, rows, length), 0)
        assert made.input_ids.shape == (2, rows, length)


def test_no_made_parameter_hides_anything():
    config = setting_of("v3").model
    values = problem.made_parameters(config, 0)
    for p in manifest(config):
        assert values[p.name].shape == p.shape and values[p.name].dtype == np.float32
        assert values[p.name].std() > 0.01, p.name
        if p.name.endswith(CORRECTION_BIAS):  # beside scores around 0.5, most sums are negative
            assert (values[p.name] < -0.5).mean() > 0.6 and values[p.name].max() > -0.5


def test_what_a_difference_is():
    a = np.array([[1.0, -4.0], [2.0, 3.0]], np.float32)
    assert difference(a, a) == 0 and difference(a, a + np.float32(0.4)) == pytest.approx(0.1, rel=0.2)
    assert difference(a, a * np.float32(1 + 2e-6)) == pytest.approx(2e-6, rel=0.1)
    assert difference(a, a[:1]) == math.inf and difference(a, np.where(a > 2, np.nan, a)) == math.inf
    hidden = np.where(a > 2, -np.inf, a)
    assert difference(hidden, hidden) == 0 and difference(hidden, a) == math.inf
    assert difference(np.full(2, np.nan), np.full(2, np.nan)) == math.inf
    assert difference(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]])) == 0.5
    assert difference(None, np.zeros(3)) == 0 and difference(None, np.ones(3)) == 1
    assert difference(np.zeros(3), np.zeros(3)) == 0 and difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0


# --- planted faults ----------------------------------------------------------------------------------------------


def test_group_mask_of_zero(cases, monkeypatch):
    """P7: sums are negative, so a closed group's 0 is chosen."""
    real = router.Router.selection_scores
    monkeypatch.setattr(router.Router, "selection_scores",
                        lambda self, scores: real(self, scores).nan_to_num(neginf=0.0))  # fmt: skip
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.1.mlp.gate")
    assert "chosen experts" in report.verdict.sentence and not report.comparison.flips


def test_norm_eps(cases, monkeypatch):
    """P19: activations of a fresh embedding are small."""
    real = ms_norm.RMSNorm.__init__
    monkeypatch.setattr(ms_norm.RMSNorm, "__init__", lambda self, size, eps: real(self, size, 1e-5))
    report = cases("v3").with_fault("ms_train")
    blamed(report, "model.layers.0.input_layernorm.rms_norm")


def test_rotary_halves(cases, monkeypatch):
    """P1."""

    def forward(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    monkeypatch.setattr(ops.Rotary, "forward", forward)
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.0.self_attn.rotary")


def test_rotary_pairs_rearranged_outside_of_the_operation(cases, monkeypatch):
    """P1, the fault in the attention's own code: the operation itself is right."""
    real = ms_attention.MultiHeadLatentAttention.construct

    def construct(self, x_TD, cos, sin, visible):
        return real(self, x_TD, cos[..., ::-1], sin[..., ::-1], visible)

    monkeypatch.setattr(ms_attention.MultiHeadLatentAttention, "construct", construct)
    blamed(cases("v3").with_fault("ms_train"), "model.layers.0.self_attn")


def test_gate_and_up_exchanged_in_the_experts(cases, monkeypatch):
    """P18."""

    def construct(self, x_TD, slots_TK, weights_TK):
        width = self.down_proj.shape[2]
        exchanged = ms.ops.concat((self.gate_up_proj[:, width:], self.gate_up_proj[:, :width]), 1)
        return self.routed(x_TD, slots_TK, weights_TK, exchanged, self.down_proj)

    monkeypatch.setattr(ms_experts.RoutedExperts, "construct", construct)
    blamed(cases("v3").with_fault("ms_train"), "model.layers.1.mlp.experts")


def test_gate_and_up_exchanged_in_the_dense_mlp(cases, monkeypatch):
    """P18."""
    monkeypatch.setattr(experts.MLP, "forward",
                        lambda self, x: self.down_proj(self.swiglu(self.up_proj(x), self.gate_proj(x))))  # fmt: skip
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.0.mlp")


def test_no_routed_scaling(cases, monkeypatch):
    """P10: the choice is right, the weights are not."""
    real = ms_router.Router.construct

    def construct(self, x_TD, mask_BS):
        slots, weights, statistics = real(self, x_TD, mask_BS)
        return slots, weights / self.scaling, statistics

    monkeypatch.setattr(ms_router.Router, "construct", construct)
    report = cases("v3").with_fault("ms_train")
    blamed(report, "model.layers.1.mlp.gate")
    assert "the weights" in report.verdict.sentence


@pytest.mark.parametrize("direction", ["outputs", "gradients"])
def test_modules_of_mindspore_are_tried_alone(monkeypatch, direction):
    """Against transformers it is ms_train that follows, and gets what transformers' modules got."""
    real = ms_router.Router.construct
    factor = 1.01 if direction == "outputs" else 1.0

    def construct(self, x_TD, mask_BS):
        slots, weights, statistics = real(self, x_TD, mask_BS)
        return slots, factor * weights + 0.01 * (weights - ms.ops.stop_gradient(weights)), statistics

    monkeypatch.setattr(ms_router.Router, "construct", construct)
    case = Case("v3", **PLAIN)
    report = case.compare(case.build("transformers"), case.build("ms_train"))
    blamed(report, "model.layers.1.mlp.gate", direction)


def test_bias_in_the_weights(cases, monkeypatch):
    """P9."""
    real = router.Router.forward

    def forward(self, x_TD, mask_BS):
        slots, weights, statistics = real(self, x_TD, mask_BS)
        return slots, weights * (1 + self.e_score_correction_bias[slots]), statistics

    monkeypatch.setattr(router.Router, "forward", forward)
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.1.mlp.gate")


def test_group_scores_of_the_other_version(cases, monkeypatch):
    """P8: V2 groups by their sum, as V3 does."""

    def amax(self, axis):
        return self.topk(2, axis).values.sum(axis)

    real = router.Router.selection_scores

    def selection_scores(self, scores):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(torch.Tensor, "amax", amax)
            return real(self, scores)

    monkeypatch.setattr(router.Router, "selection_scores", selection_scores)
    blamed(cases("v2").with_fault("torch_proto"), "model.layers.1.mlp.gate")


def test_transposed_square_matrix(cases, monkeypatch):
    """P32: loaded wrong, and no shape tells."""
    real = checkpoint.StateMap.put

    def put(self, tensor, canonical, stacked):
        if canonical.ndim == 2 and canonical.shape[0] == canonical.shape[1]:
            canonical = canonical.T
        real(self, tensor, canonical, stacked)

    monkeypatch.setattr(checkpoint.StateMap, "put", put)
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.0.self_attn.o_proj")


def test_kv_norm_over_the_rotary_part_too(cases, monkeypatch):
    """P5."""

    class Normed(torch.nn.Module):
        def __init__(self, inner, norm, rank):
            super().__init__()
            self.inner, self.norm, self.rank = inner, [norm], rank

        def forward(self, x):
            both = self.inner(x)
            both = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-6)
            return torch.cat((both[:, : self.rank] * self.norm[0].weight, both[:, self.rank :]), -1)

    real = attention.MultiHeadLatentAttention.forward

    def forward(self, x_TD, *rest):
        projection, norm = self.kv_a_proj_with_mqa, self.kv_a_layernorm
        self._modules["kv_a_proj_with_mqa"] = Normed(projection, norm, self.kv_lora_rank)
        self._modules["kv_a_layernorm"] = torch.nn.Identity()
        try:
            return real(self, x_TD, *rest)
        finally:
            self._modules.update(kv_a_proj_with_mqa=projection, kv_a_layernorm=norm)

    monkeypatch.setattr(attention.MultiHeadLatentAttention, "forward", forward)
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.0.self_attn")
    assert any("kv_a_layernorm" in line for line in remarks(report))  # which this twin no longer calls


def test_softmax_scale_without_mscale(cases, monkeypatch):
    """P2."""
    monkeypatch.setattr(rope, "softmax_scale", lambda config: config.qk_head_dim**-0.5)
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.0.self_attn.attention")


def test_documents_that_see_each_other(cases, monkeypatch):
    """P26."""
    chosen = ms_implementation(ms_ops.Attention)
    real = chosen.construct

    def construct(self, q, k, v, visible):
        return real(self, q, k, v, ms.ops.zeros_like(visible))

    monkeypatch.setattr(chosen, "construct", construct)
    blamed(cases("v3").with_fault("ms_train"), "model.layers.0.self_attn.attention")


def test_a_residual_left_out(cases, monkeypatch):
    """Glue of a layer that no module inside it shows."""
    real = block.DecoderLayer.forward

    def forward(self, x_TD, *rest):
        out, statistics = real(self, x_TD, *rest)
        return (out - x_TD if self.is_moe else out), statistics

    monkeypatch.setattr(block.DecoderLayer, "forward", forward)
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.1")
    assert "modules inside it agree" in report.verdict.sentence


def test_order_of_what_the_prediction_layer_joins(cases, monkeypatch):
    """P21."""

    def predict(self, hidden_TD, embedded_TD, cos, sin, visible, mask_BS):
        both = self.concat((self.hnorm(hidden_TD), self.enorm(embedded_TD)))
        hidden_TD, statistics = self.construct(self.eh_proj(both), cos, sin, visible, mask_BS)
        return self.shared_head(hidden_TD), statistics

    monkeypatch.setattr(ms_mtp.MultiTokenPredictor, "predict", predict)
    blamed(cases("v3").with_fault("ms_train"), "model.layers.2")


def test_prediction_loss_without_its_weight(cases, monkeypatch):
    """A fault in the loss alone, which changes no activation."""
    real = ms_loss.TotalLoss.__init__

    def __init__(self, config):
        real(self, config)
        self.mtp_loss_weight = 1.0

    monkeypatch.setattr(ms_loss.TotalLoss, "__init__", __init__)
    report = cases("v3").with_fault("ms_train")
    blamed(report, "total_loss")
    assert "the total" in report.verdict.sentence


def test_loss_over_padding_too(cases, monkeypatch):
    """P20."""
    monkeypatch.setattr(ops.CrossEntropySum, "forward",
                        lambda self, logits, labels: torch.nn.functional.cross_entropy(
                            logits, labels.clamp(min=0), reduction="sum"))  # fmt: skip
    blamed(cases("v3").with_fault("torch_proto"), "cross_entropy")


def test_labels_of_a_prediction_depth_not_shifted(cases, monkeypatch):
    """P21: every module is right, the model gives one of them the wrong labels."""
    real = model.DeepseekForCausalLM.forward

    def forward(self, input_ids, labels, *rest):
        return real(self, input_ids, labels[:1].expand_as(labels), *rest)

    monkeypatch.setattr(model.DeepseekForCausalLM, "forward", forward)
    blamed(cases("v3").with_fault("torch_proto"), "DeepseekForCausalLM")


def test_tied_head(cases, monkeypatch):
    """The tied head is a method of the model."""
    real = model.DeepseekForCausalLM.logits
    monkeypatch.setattr(model.DeepseekForCausalLM, "logits", lambda self, normed: real(self, normed) * 1.01)
    blamed(cases("v2").with_fault("torch_proto"), "lm_head")


def test_choice_of_the_wrong_expert(cases, monkeypatch):
    """No tie: the operation itself leaves the best one out."""
    real = ops.TopK.forward

    def forward(self, scores):
        if self.k != 3:
            return real(self, scores)
        return scores.detach().topk(self.k + 1, -1).indices[:, 1:]

    monkeypatch.setattr(ops.TopK, "forward", forward)
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.1.mlp.gate.top_experts")
    assert not report.comparison.flips


# --- faults in gradients only ------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", ["torch_proto", "ms_train"])
def test_wrong_backward_of_an_activation(cases, monkeypatch, twin):
    """The outputs are equal to the bit; the backward pass meets the last of them first."""
    detached = {"torch_proto": torch.detach, "ms_train": ms.ops.stop_gradient}[twin]
    owner, method = ops.SwiGLU, "forward"
    if twin == "ms_train":
        owner, method = ms_implementation(ms_ops.SwiGLU), "construct"
    real = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, gate, up: real(self, gate, up) + 0.1 * (up - detached(up)))
    report = cases("v3").with_fault(twin)
    blamed(report, "model.layers.2.mlp.shared_experts.swiglu", "gradients")
    assert "backward pass of" in report.verdict.sentence and "up" in report.verdict.sentence


def test_no_gradient_of_one_weight(cases, monkeypatch):
    """Only a parameter's gradient is wrong."""
    real = linear.Linear.forward

    def forward(self, x):
        if self.weight.shape == (36, 36):  # o_proj
            return self.linear(x, self.weight.detach())
        return real(self, x)

    monkeypatch.setattr(linear.Linear, "forward", forward)
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.2.self_attn.o_proj", "gradients")
    assert "model.layers.2.self_attn.o_proj.weight" in report.verdict.sentence


def test_no_gradient_of_a_weight_that_is_used_past_its_module(cases, monkeypatch):
    """The module that holds it is never called: the one around it is blamed."""

    def forward(self, x):
        hidden = self.swiglu(self.gate_proj(x), self.up_proj(x))
        return torch.nn.functional.linear(hidden, self.down_proj.weight.detach())

    monkeypatch.setattr(experts.MLP, "forward", forward)
    report = cases("v3").with_fault("torch_proto")
    blamed(report, "model.layers.2.mlp.shared_experts", "gradients")
    assert "model.layers.2.mlp.shared_experts.down_proj.weight" in report.verdict.sentence


def test_no_gradient_of_the_embedding(cases, monkeypatch):
    """Its weight is used by several calls, of which one is not the parameter's whole gradient."""
    monkeypatch.setattr(ms_linear.Embedding, "construct",
                        lambda self, ids: self.gather(ms.ops.stop_gradient(self.weight), ids, 0))  # fmt: skip
    report = cases("v3").with_fault("ms_train")
    blamed(report, "model.embed_tokens", "gradients")
    assert "on one side only" in report.verdict.sentence


def test_gradient_that_stops_inside_the_attention(cases, monkeypatch):
    """The latent is detached: the modules inside are right, and so is the output."""
    real = attention.MultiHeadLatentAttention.forward

    def forward(self, x_TD, *rest):
        norm = self.kv_a_layernorm
        self._modules["kv_a_layernorm"] = torch.nn.Sequential(Detached(), norm)
        try:
            return real(self, x_TD, *rest)
        finally:
            self._modules["kv_a_layernorm"] = norm

    class Detached(torch.nn.Module):
        def forward(self, x):
            return x.detach()

    monkeypatch.setattr(attention.MultiHeadLatentAttention, "forward", forward)
    blamed(cases("v3").with_fault("torch_proto"), "model.layers.2.self_attn", "gradients")


def test_balance_loss_without_gradient(cases, monkeypatch):
    """Its value is right."""
    real = ms_router.Router.aux

    def aux(self, scores, *rest):
        return real(self, ms.ops.stop_gradient(scores), *rest)

    monkeypatch.setattr(ms_router.Router, "aux", aux)
    report = cases("v3").with_fault("ms_train")
    blamed(report, "model.layers.1.mlp.gate", "gradients")
    assert "the balance loss carries a gradient on one side only" in report.verdict.sentence


# --- faults in the steps only ------------------------------------------------------------------------------------


def step_fault(report: Report, quantity: str, of: str = "") -> None:
    assert report.comparison.blame is None and not report.verdict.agrees
    assert report.verdict.first == (f"{quantity} of {of}" if of else quantity), report.verdict.sentence
    assert "agree in every module" in report.verdict.sentence and quantity in report.verdict.sentence


def test_decayed_norms(cases, monkeypatch):
    """P23."""
    real = optim.AdamW.__init__

    def __init__(self, model, parameters, settings):
        real(self, model, parameters, settings)
        for group in self.adam.param_groups:
            group["weight_decay"] = settings.weight_decay

    monkeypatch.setattr(optim.AdamW, "__init__", __init__)
    step_fault(cases("v3").with_fault("torch_proto", steps=1), "parameters", "model.layers.0.input_layernorm.weight")


def test_clipping_by_another_norm(cases, monkeypatch):
    """The embedding's gradient is not counted."""
    real = optim.ClipByGlobalNorm.__call__

    def __call__(self, gradients):
        return real(self, gradients[1:])

    monkeypatch.setattr(optim.ClipByGlobalNorm, "__call__", __call__)
    step_fault(cases("v3").with_fault("torch_proto", steps=1), "grad_norm")


def test_correction_bias_the_wrong_way(cases, monkeypatch):
    """P12."""
    real = optim.CorrectionBiasUpdate.__init__
    monkeypatch.setattr(optim.CorrectionBiasUpdate, "__init__",
                        lambda self, biases, rate: real(self, biases, -rate))  # fmt: skip
    step_fault(cases("v3").with_fault("torch_proto", steps=1), "correction biases",
               f"model.layers.1.mlp.gate.{CORRECTION_BIAS}")  # fmt: skip


def test_second_moment_of_the_wrong_beta(cases, monkeypatch):
    """P22."""
    real = optim.AdamW.__init__

    def __init__(self, model, parameters, settings):
        real(self, model, parameters, settings)
        for group in self.adam.param_groups:
            group["betas"] = (settings.betas[0], 0.999)

    monkeypatch.setattr(optim.AdamW, "__init__", __init__)
    step_fault(cases("v3").with_fault("torch_proto", steps=1), "adam_v", "model.embed_tokens.weight")


# --- choices that rounding decides -------------------------------------------------------------------------------


def tied_case(monkeypatch, what: str, preferred: float, **changes) -> Case:
    """Two experts of each group, or two groups, with the same router weights have the same scores: which is chosen is
    rounding, and what follows differs by far. `preferred` is what torch_proto adds to the second of a pair."""
    case = Case("v3", **changes)
    for name, value in case.parameters.items():
        if ".gate." in name and what == "experts":
            value[1::3] = value[::3]
        elif ".gate." in name:
            value[3:6] = value[:3]
    number, period = {"experts": (12, 3), "groups": (4, 4)}[what]
    real, second = ops.TopK.forward, torch.arange(number) % period == 1

    def forward(self, scores):
        return real(self, scores + preferred * second if scores.shape[-1] == number else scores)

    monkeypatch.setattr(ops.TopK, "forward", forward)
    return case


@pytest.mark.parametrize("what", ["experts", "groups"])
@pytest.mark.parametrize(("reference", "preferred"), [("ms_train", 1e-7), ("transformers", -1e-7)])
def test_a_tie_is_reported_and_not_blamed(monkeypatch, reference, preferred, what):
    case = tied_case(monkeypatch, what, preferred, **PLAIN)
    sides = Kept(case.build(reference), None), case.build("torch_proto")
    report = case.compare(*sides)
    assert report.verdict.agrees, report.verdict.sentence
    assert report.comparison.worst.worst <= BOUND
    flips = {flip.key.path: flip for flip in report.comparison.flips}
    flip = flips[f"model.layers.1.mlp.gate.top_{what}"]
    assert len(flip.rows) > 3 and flip.gap < 1e-6
    assert any("rounding decided" in line and flip.key.path in line for line in remarks(report))
    # left alone, they would differ by far
    monkeypatch.setattr(compare, "ties", lambda *_: [])
    left_alone = case.compare(*sides)
    assert {row.key.path: row.output for row in left_alone.comparison.rows}["model.layers.1.mlp.experts"] > 0.01


def test_a_fault_behind_a_tie_is_found(monkeypatch):
    """The tie is in the same module: its weights are wrong too."""
    case = tied_case(monkeypatch, "experts", 1e-7)
    real = router.Router.forward

    def forward(self, x_TD, mask_BS):
        slots, weights, statistics = real(self, x_TD, mask_BS)
        return slots, weights * 1.01, statistics

    monkeypatch.setattr(router.Router, "forward", forward)
    report = case.compare(case.build("ms_train"), case.build("torch_proto"))
    assert report.comparison.flips
    blamed(report, "model.layers.1.mlp.gate")
    assert "the weights: " in report.verdict.sentence


# --- rounding that adds up ---------------------------------------------------------------------------------------


def test_rounding_along_depth_is_no_fault(cases):
    """What exceeds the bound in the whole pass, though no module does so alone, is allowed a bound for every layer."""
    case = cases("v3")
    found = compare_sides(case.sound("ms_train"), case.sound("torch_proto"), case.batch, BOUND)
    assert found.blame is None
    found.rows[5].output = 2 * BOUND
    verdict = judge(("a", "b"), found, [], BOUND, case.setting, [])
    assert verdict.agrees and "rounding adds up to 2.0e-05 over 3 layers" in verdict.sentence


def test_only_what_a_module_does_alone_is_blamed(cases, monkeypatch):
    """Behind a fault everything differs; here the first module's own difference is within the bound."""
    real = linear.Embedding.forward
    monkeypatch.setattr(linear.Embedding, "forward", lambda self, ids: real(self, ids) * (1 + 0.5 * BOUND))
    case = cases("v3")
    report = case.compare(case.sound("ms_train"), case.build("torch_proto"))
    assert report.verdict.agrees and report.comparison.worst.worst > 0.4 * BOUND


def test_many_small_differences_are_no_agreement(cases):
    """Beyond what the layers' bounds add up to, the verdict is that they differ, though no module is blamed."""
    case = cases("v3")
    found = compare_sides(case.sound("ms_train"), case.sound("torch_proto"), case.batch, BOUND)
    found.rows[5].output = 4 * BOUND
    verdict = judge(("a", "b"), found, [], BOUND, case.setting, [])
    assert not verdict.agrees and "no single module" in verdict.sentence and str(found.rows[5].key) in verdict.sentence


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(setting_of("v3").model.model_dump()))
    return path


def test_exit_code_page_and_json_of_a_difference(model_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mtp.SharedHead, "forward", lambda self, x: self.norm(x) * 1.001)
    page, data = tmp_path / "page.html", tmp_path / "found.json"
    code = run_cli(parity.main, ["--config", str(model_file), "--sequence-length", "24", "--rows", "3", "--pair",
                                 "torch_proto, ms_train", "--html", str(page), "--json", str(data)])  # fmt: skip
    out = capsys.readouterr().out
    name = "model.layers.2.shared_head"
    assert code == 1 and f"{name} ← first" in out and "torch_proto.mtp.SharedHead.forward" in out
    assert f"differ first in {name}" in " ".join(out.split())
    html = page.read_text()
    assert f"differ first in {name}" in html and html.count("Plotly.newPlot") >= 2 and "<script src" not in html
    assert '<tr class="first"><td>model.layers.2.shared_head</td>' in html.replace("\n", "")
    found = json.loads(data.read_text())
    assert (found["agree"], found["first"], found["direction"]) == (False, name, "outputs")
    assert {row["module"] for row in found["modules"]} >= {name, "model.layers.1.mlp.gate"}
    assert found["steps"] == []  # a step's numbers would only repeat it


def test_exit_code_of_agreement_with_weights(tmp_path, capsys):
    """Weights of a Hugging Face folder, whose configuration counts where none is given; it promises prediction layers
    that are not there, as transformers' own do."""
    from weight_sync.convert import main as convert

    source = training_state(tmp_path, setting_of("v3", num_nextn_predict_layers=0))
    assert run_cli(convert, [str(source), str(tmp_path / "hf"), "--to", "hf"]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    arguments = ["--weights", str(tmp_path / "hf"), "--sequence-length", "24", "--pair", "transformers,torch_proto"]
    assert run_cli(parity.main, arguments) == 0
    out = capsys.readouterr().out
    assert "transformers and torch_proto agree: " in out and f"parameters: {tmp_path / 'hf'} (hf)" in out


def training_state(folder, setting):
    """A training state with made parameters."""
    from shared_ops.resume import state_meta
    from shared_ops.training_state import write_step

    state = problem.State(problem.made_parameters(setting.model, 1))
    arrays = []
    for p in manifest(setting.model):
        kinds = ("params", "adam_m", "adam_v") if p.trainable else ("params",)
        arrays += [(f"{kind}/{p.name}", state[f"{kind}/{p.name}"]) for kind in kinds]
    return write_step(folder / "checkpoints", 1, arrays, state_meta(setting, "made", 0))


def test_weights_of_another_model(tmp_path, model_file, capsys):
    source = training_state(tmp_path, setting_of("v3", kv_lora_rank=24))
    code = run_cli(parity.main, ["--config", str(model_file), "--weights", str(source)])
    error = capsys.readouterr().err
    assert code == 2 and "kv_a_proj_with_mqa" in error and str(source) in error and "Traceback" not in error


BAD = {
    "no_such_config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "neither_run_nor_model": (["--config", "{other}"], "expected a run file"),
    "unknown_pair": (["--pair", "ms_train,jax"], "expected two of transformers, ms_train, torch_proto"),
    "pair_of_one": (["--pair", "ms_train,ms_train"], "expected two of"),
    "steps_with_transformers": (["--pair", "ms_train,transformers", "--steps", "1"], "only the twins"),
    "too_long": (["--config", "{model}", "--sequence-length", "1000"], "--sequence-length 1000"),
    "too_short": (["--config", "{model}", "--sequence-length", "2"], "--sequence-length 2"),
    "no_such_weights": (["--config", "{model}", "--weights", "nowhere"], "nowhere"),
    "no_such_folder": (["--config", "{model}", "--html", "nowhere/page.html"], "does not exist"),
    "not_transformers": (["--config", "{placed}", "--pair", "transformers,torch_proto"], "expert_placement=hash:3"),
    "refused_by_transformers": (["--config", "tiny_v2", "--pair", "transformers,torch_proto"], "not a multiple"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path, model_file, capsys):
    arguments, message = BAD[case]
    placed, other = tmp_path / "placed.yaml", tmp_path / "other.yaml"
    placed.write_text(yaml.safe_dump(setting_of("v3", expert_placement="hash:3").model.model_dump()))
    other.write_text("optim: {lr: 1.0}\n")
    arguments = [a.format(model=model_file, placed=placed, other=other) for a in arguments]
    assert run_cli(parity.main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--bound", "-1"], ["--seed", "x"], ["--steps", "-1"]])
def test_bad_numbers(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        parity.main(arguments)
    assert stopped.value.code == 2 and "expected a number from" in capsys.readouterr().err


def test_every_kind_of_configuration(tmp_path, model_file):
    """Run file, model file, model name, config.json and its folder."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_model_config("tiny_v3").to_hf()))
    for where in ("tiny_v3", folder, folder / "config.json"):
        setting = problem.load_config(str(where), 4, None)
        assert setting.model.kv_lora_rank == 20 and setting.train.sequence_length == 256
        assert setting.train.global_batch_size == 4 and setting.optim.lr == 2e-3
    run_file = tmp_path / "run.yaml"
    text = yaml.safe_load((Path(__file__).parents[2] / "configs" / "quickstart.yaml").read_text())
    text["optim"]["lr"], text["train"]["micro_batch_size"], text["parallel"] = 1e-4, 4, {"dp": 2}
    run_file.write_text(yaml.safe_dump(text))
    setting = problem.load_config(str(run_file), 3, 64)
    assert setting.optim.lr == 1e-4 and setting.train.sequence_length == 64 and setting.micro_batches(1) == (3, 1)
    assert problem.load_config(str(model_file), 1, 8).model.hidden_size == 36
    with pytest.raises(UserError, match="tiny_v9"):
        problem.load_config("tiny_v9", 4, None)


def test_page_of_agreement(cases, tmp_path):
    case = cases("v3")
    report = case.compare(case.sound("ms_train"), case.sound("torch_proto"), steps=2)
    write_html(report, tmp_path / "page.html")
    write_json(report, tmp_path / "found.json")
    html = (tmp_path / "page.html").read_text()
    assert "agree: " in html and "differs first" not in html and "correction biases" in html
    assert "bound 1e-05" in html and "layer 1" in html
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["agree"] and found["first"] is None and len(found["steps"]) == 2
    with pytest.raises(UserError, match="cannot be written"):
        write_html(report, tmp_path / "nowhere" / "page.html")


def test_the_command_as_a_user_starts_it(model_file):
    """A process of its own: 15 s, most of them imports."""
    line = [sys.executable, "-m", "weight_sync", "parity", "--config", str(model_file), "--sequence-length", "16",
            "--steps", "0"]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ms_train and torch_proto agree" in " ".join(done.stdout.split()) and not done.stderr
