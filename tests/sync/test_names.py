"""The table of names: complete, one row for both directions, and what does not fit is named."""

import numpy as np
import pytest
from checkpoints import canonical_values, hub_values, small

from shared_ops.config import load_model_config
from shared_ops.errors import UserError
from shared_ops.params import manifest
from weight_sync import layouts, names


@pytest.mark.parametrize("model", ["v2_lite", "v2", "v3", "tiny_v2", "tiny_v3"])
def test_every_parameter_has_a_row_with_the_manifests_dtype_rule(model):
    config = load_model_config(model)
    found = names.entries(config)
    assert [entry.parameter for entry in found] == list(manifest(config))
    assert all(entry.row.dtype == entry.parameter.dtype for entry in found)


def test_every_row_is_used():
    used = {entry.row for model in ("v2_lite", "v2", "v3") for entry in names.entries(load_model_config(model))}
    assert used == set(names.TABLE)


@pytest.mark.parametrize("name, changes", [("tiny_v3", {"num_nextn_predict_layers": 2}), ("tiny_v2", {})])
def test_hub_names_are_those_written_by_hand(name, changes):
    config = small(name, **changes)
    expected = hub_values(config, canonical_values(config))
    ours = {hub for entry in names.entries(config) for hub in entry.hub}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert ours | {copy for _, copy in names.copies(config)} - tied == expected.keys()


def test_published_v3_names():
    """91,991 tensors less the scales are what the hub's index lists."""
    entries = names.entries(load_model_config("v3"))
    hub = [name for entry in entries for name in entry.hub]
    assert len(set(hub)) == len(hub) == 2 + 1 + 62 * 9 + 3 * 3 + 59 * 5 + 59 * 256 * 3 + 4
    assert "model.layers.61.eh_proj.weight" in hub and "model.layers.60.mlp.experts.255.up_proj.weight" in hub
    copies = [copy for _, copy in names.copies(load_model_config("v3"))]
    assert copies == ["model.layers.61.embed_tokens.weight", "model.layers.61.shared_head.head.weight"]
    plain = {entry.parameter.name for entry in entries if not entry.row.quantised}
    assert "model.layers.61.eh_proj.weight" in plain and "lm_head.weight" in plain
    assert "model.layers.3.mlp.gate.weight" in plain and "model.layers.0.mlp.up_proj.weight" not in plain


@pytest.mark.parametrize("layout", [layouts.SAME, layouts.STACKED, layouts.STACKED_GATE_UP, layouts.Layout(parts=3)])
def test_join_and_cut_are_inverse(layout):
    shape = (12, 6, 5) if layout.stacked else (6, 5)
    canonical = np.arange(np.prod(shape)).reshape(shape)
    parts = layouts.cut(layout, canonical)
    assert {part.shape for part in parts} == {layout.part_shape(shape)}
    np.testing.assert_array_equal(layouts.join(layout, parts), canonical)
    # what the converters rely on: the parts one after the other are the canonical tensor's values
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), canonical.ravel())


def test_expert_ten_comes_after_expert_two():
    entry = next(e for e in names.entries(small()) if e.parameter.name == "model.layers.2.mlp.experts.down_proj")
    assert [name.split(".")[5] for name in entry.hub] == [str(expert) for expert in range(12)]


@pytest.mark.parametrize("dim", [8, 64])
def test_rope_permutation(dim):
    """P1: interleaved pairs to halves and back; at dim 4 the permutation is its own inverse and shows nothing."""
    rows, blocks = 3 * (10 + dim), 3
    there = layouts.rope_permutation(rows, blocks, dim, True)
    back = layouts.rope_permutation(rows, blocks, dim, False)
    assert there[10 : 10 + dim].tolist() == [*range(10, 10 + dim, 2), *range(11, 10 + dim, 2)]
    assert there[:10].tolist() == list(range(10)) and not np.array_equal(there, back)
    np.testing.assert_array_equal(there[back], np.arange(rows))


# --- P29: nothing is dropped silently ---


def stored(config):
    return dict.fromkeys(hub_values(config, canonical_values(config)))


def complaint(config, found) -> str:
    with pytest.raises(UserError) as error:
        names.match(config, found, "folder")
    return str(error.value)


def test_deleted_added_and_misspelt_keys_are_named():
    config = small()
    found = stored(config)
    name = "model.layers.3.mlp.experts.10.up_proj.weight"
    without = {key: None for key in found if key != name}
    assert name in complaint(config, without)
    said = complaint(config, found | {"model.layers.3.mlp.experts.12.up_proj.weight": None})
    assert "experts.12.up_proj" in said and "1 tensors belong to no parameter" in said
    said = complaint(config, without | {name.replace("up_proj", "upproj"): None})
    assert f"{name} (stored is {name.replace('up_proj', 'upproj')})" in said
    assert f"{name.replace('up_proj', 'upproj')} (nearest known: {name})" in said


def test_a_prediction_layer_is_there_or_not_but_not_in_part():
    config = small()
    found = stored(config)
    without = {key: None for key in found if not key.startswith("model.layers.13.")}
    match = names.match(config, without, "folder")
    assert not match.with_mtp and len(match.entries) < len(manifest(config))
    assert names.match(config, found, "folder").with_mtp
    del found["model.layers.13.enorm.weight"]
    assert "in part" in complaint(config, found)


def test_layers_beyond_the_configuration_are_refused():
    assert "model.layers.13.enorm.weight" in complaint(small(num_nextn_predict_layers=0), stored(small()))


def test_head_may_be_absent_only_where_it_is_tied():
    found = stored(small())
    del found["lm_head.weight"]
    assert "tie_word_embeddings" in complaint(small(), found)
    tied = small("tiny_v2")
    assert names.match(tied, [*stored(tied), "lm_head.weight"], "x").copies == [
        ("model.embed_tokens.weight", "lm_head.weight")
    ]


def test_rotary_leftovers_are_ignored_by_a_rule_and_nothing_else_is():
    config = small()
    leftovers = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(13)]
    match = names.match(config, [*stored(config), *leftovers], "folder")
    assert [name for name, _ in match.ignored] == leftovers and "rotary" in match.ignored[0][1]
    assert "inv_freq2" in complaint(config, [*stored(config), "model.layers.0.self_attn.rotary_emb.inv_freq2"])


def test_scales_go_with_their_tensor_and_nowhere_else():
    config = small()
    name = "model.layers.0.mlp.up_proj.weight"
    assert names.match(config, [*stored(config), name + "_scale_inv"], "x").with_mtp
    assert "down_projx" in complaint(config, [*stored(config), "model.layers.0.mlp.down_projx.weight_scale_inv"])
