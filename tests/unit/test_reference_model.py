"""The whole model in float64: every gradient, the parts of a batch, documents, layer kinds, speed.

One config is made so that a mistake shows: unequal dimensions, 12 experts in 4 groups of which 2 are open, 3
chosen of the 6 left, a correction bias with negative sums, scaling, unequal mscales, positions to twice the
original length of YaRN, padding, packed documents and a row that is masked altogether.
"""

import time

import numpy as np
import pytest

from shared_ops.config import ModelConfig
from shared_ops.params import manifest
from shared_ops.reference import model, rope
from shared_ops.reference.arrays import sub
from shared_ops.reference.block import block
from shared_ops.reference.finite_difference import worst_error
from shared_ops.reference.loss import IGNORED

V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 23,
    "hidden_size": 20,
    "intermediate_size": 26,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 32,
    "num_attention_heads": 3,
    "q_lora_rank": 11,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "rope_theta": 100.0,
    "rope_scaling": {
        "factor": 4.0,
        "original_max_position_embeddings": 6,
        "beta_fast": 2.0,
        "beta_slow": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "aux_loss_alpha": 0.3,
    "router_z_loss_coef": 0.1,
    "num_nextn_predict_layers": 2,
    "mtp_loss_weight": 0.4,
    "rms_norm_eps": 1e-6,
}
V2 = V3 | {
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.6,
    "sliding_window": 5,
    "tie_word_embeddings": True,
}
V2_LITE = V2 | {"topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 0, "sliding_window": None}
CASES = {"v3": V3, "v2": V2, "v2_lite": V2_LITE}

# a document that fills its row to twice the original length; three packed ones and padding; all padding
SEGMENTS = np.array([[1] * 12, [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0], [0] * 12])
POSITIONS = np.array([[*range(12)], [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 1], [*range(12)]])


def make_config(values, **changes):
    return ModelConfig.model_validate(values | changes)


def make_params(config, seed=0):
    """Larger than a real initialisation, so that no gradient is lost in the noise."""
    rng = np.random.default_rng(seed)
    params = {}
    for parameter in manifest(config):
        if parameter.init == "ones":
            params[parameter.name] = rng.uniform(0.5, 1.5, parameter.shape)
        elif parameter.init == "zeros":
            params[parameter.name] = rng.uniform(-1.0, 0.4, parameter.shape)  # some score + bias are negative
        else:
            params[parameter.name] = rng.standard_normal(parameter.shape) * parameter.shape[-1] ** -0.5
    return params


def make_batch(config, seed=0):
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, SEGMENTS.shape)
    following = np.roll(ids, -1, axis=1)
    same = (SEGMENTS == np.roll(SEGMENTS, -1, axis=1)) & (SEGMENTS != 0)
    same[:, -1] = False
    labels = np.where(same, following, IGNORED)
    labels[0, 4] = IGNORED
    batch = {"input_ids": ids, "labels": labels, "position_ids": POSITIONS, "segment_ids": SEGMENTS}
    return {name: values.astype(np.int32) for name, values in batch.items()}


def rows(batch, *index):
    return {name: values[list(index)] for name, values in batch.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient(case):
    config = make_config(CASES[case])
    params, batch = make_params(config), make_batch(config)
    groups = np.random.default_rng(1).permutation(12) % 4 if case == "v3" else None
    output, cache = model.forward(params, batch, config, group_of_expert=groups)
    grads = model.backward(cache)
    assert grads.keys() == params.keys()
    assert sorted(output.statistics) == [2, 3, 4, 5]
    for part in (output.loss, output.balance_loss, output.z_loss, output.mtp_loss):
        assert part > 1e-2
    if case == "v3":
        some = output.statistics[3].routing.scores + params["model.layers.3.mlp.gate.e_score_correction_bias"]
        assert (some < 0).any() and (some > 0).any()
    trained = {name: params[name] for name in grads if not name.endswith("e_score_correction_bias")}
    assert all(not grads[name].any() for name in grads.keys() - trained.keys())
    assert all(grads[name].any() for name in trained)

    if groups is not None:  # the placement table reaches every router: 2 of its groups are open to a token
        for statistics in output.statistics.values():
            assert {len(set(groups[chosen])) for chosen in statistics.routing.selected} <= {1, 2}

    def total():
        return model.forward(params, batch, config, group_of_expert=groups)[0].total

    error, where = worst_error(total, trained, grads, np.random.default_rng(2), entries=1)
    assert error < 1e-6, where


@pytest.mark.parametrize("split", [((0,), (1, 2)), ((2,), (1,), (0,)), ((1, 0, 2),)])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_add_up_to_the_whole(case, split):
    config = make_config(CASES[case])
    params, batch = make_params(config), make_batch(config)
    whole, cache = model.forward(params, batch, config)
    whole_grads = model.backward(cache)
    parts = [rows(batch, *part) for part in split]
    of_part = [model.Denominators.of(part, config) for part in parts]
    denominators = sum(of_part[1:], of_part[0])
    assert denominators == model.Denominators.of(batch, config)
    outputs, caches = zip(*(model.forward(params, part, config, denominators) for part in parts), strict=True)
    for name in ("loss", "balance_loss", "z_loss", "aux_loss", "mtp_loss", "total"):
        assert sum(getattr(out, name) for out in outputs) == pytest.approx(getattr(whole, name), rel=1e-12)
    for layer, counts in whole.counts.items():
        assert np.array_equal(sum(out.counts[layer] for out in outputs), counts)
    part_grads = [model.backward(cache) for cache in caches]
    for name, grad in whole_grads.items():
        assert sum(part[name] for part in part_grads) == pytest.approx(grad, rel=1e-9, abs=1e-13), name


def test_statistics_count_real_tokens_only():
    config = make_config(V3)
    output, _ = model.forward(make_params(config), make_batch(config), config)
    # 12 + 10 tokens; one less per document at each depth
    assert {layer: int(counts.sum()) for layer, counts in output.counts.items()} == {
        2: 22 * 3, 3: 22 * 3, 4: 18 * 3, 5: 14 * 3,
    }  # fmt: skip
    denominators = model.Denominators.of(make_batch(config), config)
    assert denominators == model.Denominators(labels=(17, 13, 9), rows=(2, 2, 2), tokens=(22, 18, 14))


def test_losses_are_means_over_valid_labels():
    config = make_config(V3)
    batch = make_batch(config)
    output, _ = model.forward(make_params(config), batch, config)

    def mean(logits, depth):
        losses = []
        for b, t in np.ndindex(SEGMENTS.shape):
            if t + depth + 1 >= 12 or not SEGMENTS[b, t] == SEGMENTS[b, t + depth + 1] != 0:
                continue
            if (b, t + depth) == (0, 4):
                continue
            p = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            losses.append(-np.log(p[batch["input_ids"][b, t + depth + 1]]))
        return np.mean(losses)

    assert output.loss == pytest.approx(mean(output.logits, 0))
    depths = [mean(logits, depth) for depth, logits in enumerate(output.mtp_logits, start=1)]
    assert output.mtp_loss == pytest.approx(np.mean(depths))
    assert output.total == pytest.approx(output.loss + output.aux_loss + 0.4 * output.mtp_loss)


@pytest.mark.parametrize("case", CASES)
def test_batch_without_labels_or_tokens_is_0(case):
    config = make_config(CASES[case])
    params, batch = make_params(config), make_batch(config)
    output, cache = model.forward(params, rows(batch, 2), config)
    assert (output.loss, output.aux_loss, output.mtp_loss, output.total) == (0, 0, 0, 0)
    assert all(not grad.any() for grad in model.backward(cache).values())
    assert all(not counts.any() for counts in output.counts.values())


def test_documents_are_independent():
    """In a row of packed documents each one's logits are those it has alone, whatever the others are."""
    config = make_config(V3)
    params, batch = make_params(config), make_batch(config)
    packed, _ = model.forward(params, batch, config)
    alone = {name: values[1:2, 3:7] for name, values in batch.items()}
    alone["segment_ids"] = np.ones((1, 4), np.int32)
    single, _ = model.forward(params, alone, config)
    assert packed.logits[1, 3:7] == pytest.approx(single.logits[0], rel=1e-10, abs=1e-12)
    changed = {name: values.copy() for name, values in batch.items()}
    changed["input_ids"][1, :3] = (changed["input_ids"][1, :3] + 5) % 23
    other, _ = model.forward(params, changed, config)
    assert np.array_equal(packed.logits[1, 3:], other.logits[1, 3:])
    # multi-token prediction reads ahead, but what it predicts from another document is masked
    for depth, (before, after) in enumerate(zip(packed.mtp_logits, other.mtp_logits, strict=True), start=1):
        assert np.array_equal(before[1, 3:], after[1, 3:])
        labelled = model.labels_at(batch, depth)[1] != IGNORED
        changed_ahead = {name: values.copy() for name, values in batch.items()}
        changed_ahead["input_ids"][1, 7:] = (changed_ahead["input_ids"][1, 7:] + 5) % 23
        ahead, _ = model.forward(params, changed_ahead, config)
        inside = labelled & (SEGMENTS[1] == 2)
        assert inside.sum() == 3 - depth
        assert np.array_equal(before[1, inside], ahead.mtp_logits[depth - 1][1, inside])


def test_mtp_layers_follow_the_last_layer():
    """Their index is num_hidden_layers, not 61, and depth 2 reads depth 1's hidden state."""
    config = make_config(V3)
    params, batch = make_params(config), make_batch(config)
    output, _ = model.forward(params, batch, config)
    moved = params | {"model.layers.4.eh_proj.weight": params["model.layers.4.eh_proj.weight"][:, ::-1]}
    other, _ = model.forward(moved, batch, config)
    assert np.array_equal(output.logits, other.logits)
    assert not np.allclose(output.mtp_logits[0], other.mtp_logits[0])
    assert not np.allclose(output.mtp_logits[1], other.mtp_logits[1])
    # the first half of eh_proj's columns read the embedding: without them the tokens ahead do not matter
    deaf = params["model.layers.4.eh_proj.weight"].copy()
    deaf[:, :20] = 0
    later = batch | {"input_ids": np.where(np.arange(12) == 11, 3, batch["input_ids"])}
    one, _ = model.forward(params | {"model.layers.4.eh_proj.weight": deaf}, batch, config)
    two, _ = model.forward(params | {"model.layers.4.eh_proj.weight": deaf}, later, config)
    assert np.array_equal(one.mtp_logits[0][0, 10], two.mtp_logits[0][0, 10])
    with_embedding, _ = model.forward(params, later, config)
    assert not np.allclose(output.mtp_logits[0][0, 10], with_embedding.mtp_logits[0][0, 10])


def test_first_layer_gets_the_positions_and_both_scales_of_yarn():
    config = make_config(V3)
    params, batch = make_params(config), make_batch(config)
    output, _ = model.forward(params, batch, config)
    temperature, all_dim = (1 + 0.1 * mscale * np.log(4) for mscale in (1.0, 0.707))
    angles = POSITIONS[..., None] * rope.inverse_frequencies(8, 100.0, config.rope_scaling)
    embedded = params["model.embed_tokens.weight"][batch["input_ids"]]
    assert np.array_equal(output.hidden[0], embedded)
    (first, _), _ = block(
        embedded,
        sub(params, "model.layers.0."),
        config,
        False,
        np.cos(angles) * temperature / all_dim,
        np.sin(angles) * temperature / all_dim,
        SEGMENTS,
        all_dim**2 / np.sqrt(6 + 8),
    )
    assert output.hidden[1] == pytest.approx(first, rel=1e-12, abs=1e-12)


def test_float32_parameters_are_computed_in_float64():
    config = make_config(V3)
    params, batch = make_params(config), make_batch(config)
    single = {name: value.astype(np.float32) for name, value in params.items()}
    output, cache = model.forward(single, batch, config)
    wide, _ = model.forward({name: value.astype(np.float64) for name, value in single.items()}, batch, config)
    assert output.logits.dtype == np.float64
    assert np.array_equal(output.logits, wide.logits)
    assert all(grad.dtype == np.float64 for grad in model.backward(cache).values())


def test_four_layers_and_200_tokens_take_less_than_two_seconds():
    config = make_config(V3, hidden_size=64, intermediate_size=96, vocab_size=4096)
    params = make_params(config)
    ids = np.random.default_rng(0).integers(0, 4096, (2, 100))
    same = np.ones_like(ids)
    batch = {"input_ids": ids, "labels": ids, "position_ids": np.cumsum(same, 1) - 1, "segment_ids": same}
    started = time.process_time()
    model.backward(model.forward(params, batch, config)[1])
    assert time.process_time() - started < 2 * 2  # processor time of at most two threads
