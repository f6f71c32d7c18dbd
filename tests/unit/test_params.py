"""The manifest: names, shapes, counts, decay. Published counts are recomputed here from the papers' formulas."""

import re

import pytest

from shared_ops.config import CONFIGS, ModelConfig, load_model_config
from shared_ops.params import CORRECTION_BIAS, layer_of, manifest, parameter_count

MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))


def model(name: str = "tiny_v3", **changes) -> ModelConfig:
    return ModelConfig.model_validate(load_model_config(name).model_dump() | changes)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in manifest(config)}


# --- published counts --------------------------------------------------------------------------------------------


def attention(hidden: int, heads: int, q_rank: int | None) -> int:
    """MLA with latent 512, head widths 128 + 64 and 128 (arXiv 2405.04434, eq. 9-19); norms of the latents."""
    latent, nope, rope, value = 512, 128, 64, 128
    queries = hidden * heads * (nope + rope) if q_rank is None else (hidden + heads * (nope + rope) + 1) * q_rank
    return queries + hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden


def moe(hidden: int, width: int, experts: int, shared: int) -> int:
    return experts * hidden + 3 * hidden * width * (experts + shared)


def decoder(hidden, heads, q_rank, dense_width, dense, layers, width, experts, shared) -> int:
    """Trained values of the decoder layers."""
    each = attention(hidden, heads, q_rank) + 2 * hidden
    return layers * each + dense * 3 * hidden * dense_width + (layers - dense) * moe(hidden, width, experts, shared)


PUBLISHED = {
    # name: (exact count, as published in billions, embeddings + final norm + layers)
    "v2_lite": (15_706_484_224, 15.7,
                2 * 102400 * 2048 + 2048 + decoder(2048, 16, None, 10944, 1, 27, 1408, 64, 2)),
    "v2": (235_741_434_880, 236, 2 * 102400 * 5120 + 5120 + decoder(5120, 128, 1536, 12288, 1, 60, 1536, 160, 2)),
    "v3": (671_026_404_352, 671, 2 * 129280 * 7168 + 7168 + decoder(7168, 128, 1536, 18432, 3, 61, 2048, 256, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    exact, billions, derived = PUBLISHED[name]
    config = load_model_config(name)
    assert parameter_count(config, with_mtp=False) == exact == derived
    assert round(exact / 1e9, 1 if billions < 100 else None) == billions


def test_multi_token_prediction_adds_one_layer_and_its_own_projection():
    config, hidden = load_model_config("v3"), 7168
    layer = attention(hidden, 128, 1536) + 2 * hidden + moe(hidden, 2048, 256, 1)
    extra = layer + 2 * hidden * hidden + 3 * hidden  # eh_proj; enorm, hnorm, shared_head.norm
    assert parameter_count(config) - parameter_count(config, with_mtp=False) == extra == 11_610_067_968
    # correction biases are held beside the trained values: 58 layers and the prediction layer
    assert sum(p.size for p in manifest(config)) - parameter_count(config) == 59 * 256


# --- names and shapes --------------------------------------------------------------------------------------------


def test_v3_layers_in_full():
    """Every name and shape of a dense, a routed and a prediction layer (P5, P14, P21)."""
    attention_part = {
        "input_layernorm.weight": (40,),
        "self_attn.q_a_proj.weight": (28, 40),
        "self_attn.q_a_layernorm.weight": (28,),
        "self_attn.q_b_proj.weight": (3 * 18, 28),
        "self_attn.kv_a_proj_with_mqa.weight": (20 + 8, 40),
        "self_attn.kv_a_layernorm.weight": (20,),
        "self_attn.kv_b_proj.weight": (3 * (10 + 12), 20),
        "self_attn.o_proj.weight": (40, 3 * 12),
        "post_attention_layernorm.weight": (40,),
    }
    dense = attention_part | {
        "mlp.gate_proj.weight": (56, 40), "mlp.up_proj.weight": (56, 40), "mlp.down_proj.weight": (40, 56),
    }  # fmt: skip
    routed = attention_part | {
        "mlp.gate.weight": (12, 40),
        f"mlp.gate.{CORRECTION_BIAS}": (12,),
        "mlp.experts.gate_up_proj": (12, 48, 40),
        "mlp.experts.down_proj": (12, 40, 24),
        # two shared experts are one MLP of twice the width
        "mlp.shared_experts.gate_proj.weight": (48, 40),
        "mlp.shared_experts.up_proj.weight": (48, 40),
        "mlp.shared_experts.down_proj.weight": (40, 48),
    }
    prediction = {"enorm.weight": (40,), "hnorm.weight": (40,), "eh_proj.weight": (40, 80)}
    prediction = prediction | routed | {"shared_head.norm.weight": (40,)}
    expected = {"model.embed_tokens.weight": (4099, 40)}
    for layer, parts in enumerate((dense, dense, routed, prediction, prediction)):
        expected |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    expected |= {"model.norm.weight": (40,), "lm_head.weight": (4099, 40)}
    assert list(shapes(model()).items()) == list(expected.items())  # and in this order


def test_what_a_configuration_adds_or_takes_away():
    v2 = shapes(model("tiny_v2"))
    assert v2["model.layers.0.self_attn.q_proj.weight"] == (3 * 18, 40)
    assert not any("q_a_" in name or "q_b_" in name or CORRECTION_BIAS in name for name in v2)
    assert "lm_head.weight" not in v2  # tied to the embedding
    assert "lm_head.weight" in shapes(model("tiny_v2", tie_word_embeddings=False))
    bare = shapes(model(n_shared_experts=0, num_nextn_predict_layers=0, first_k_dense_replace=0))
    assert not any("shared_experts" in name or "eh_proj" in name or ".mlp.gate_proj" in name for name in bare)
    assert "model.layers.0.mlp.gate.weight" in bare
    dense = shapes(model(first_k_dense_replace=3, num_nextn_predict_layers=0))
    assert not any("experts" in name for name in dense)


def test_layers_are_in_numerical_order_and_prediction_comes_last():
    config = model(num_hidden_layers=12)
    layers = [layer_of(p.name) for p in manifest(config) if layer_of(p.name) is not None]
    assert layers == sorted(layers) and set(layers) == set(range(14))
    with_prediction = {layer_of(p.name) for p in manifest(config) if "eh_proj" in p.name}
    assert with_prediction == {12, 13}  # num_hidden_layers + depth - 1, and 61 only for V3
    assert {layer_of(p.name) for p in manifest(load_model_config("v3")) if "eh_proj" in p.name} == {61}
    assert layer_of("model.norm.weight") is layer_of("lm_head.weight") is None


@pytest.mark.parametrize("name", MODELS)
def test_every_name_is_given_once(name):
    names = [p.name for p in manifest(load_model_config(name))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MODELS)
def test_axes_name_every_dimension(name):
    config = load_model_config(name)
    sizes = {"vocab": config.vocab_size, "hidden": config.hidden_size, "hidden_pair": 2 * config.hidden_size,
             "experts": config.n_routed_experts, "router": config.n_routed_experts,
             "gate_up": 2 * config.moe_intermediate_size, "expert_width": config.moe_intermediate_size,
             "q_lora": config.q_lora_rank, "kv_lora": config.kv_lora_rank,
             "kv_lora_rope": config.kv_lora_rank + config.qk_rope_head_dim}  # fmt: skip
    for p in manifest(config):
        assert len(p.axes) == len(p.shape), p.name
        for axis, size in zip(p.axes, p.shape, strict=True):
            if axis == "heads":
                assert size % config.num_attention_heads == 0, p.name
            elif axis == "width":
                assert size in (config.intermediate_size, config.n_shared_experts * config.moe_intermediate_size)
            else:
                assert size == sizes[axis], (p.name, axis)
        assert p.stacked_experts == (".mlp.experts." in p.name)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_decay_class(name):
    """P23: decay on matrices only; the correction bias is no parameter of the optimizer at all."""
    norm = re.compile(r"(norm|layernorm)\.weight$")
    for p in manifest(load_model_config(name)):
        if p.name.endswith(CORRECTION_BIAS):
            expected = (False, False, "zeros", "float32")
        elif norm.search(p.name):
            expected = (True, False, "ones", "weights")
        else:
            expected = (True, True, "normal", "weights")
        assert (p.trainable, p.decay, p.init, p.dtype) == expected, p.name


@pytest.mark.parametrize("name", ["tiny_v3", "tiny_v2"])
def test_names_and_shapes_are_those_of_transformers(name):
    import torch
    import transformers

    # four heads: transformers' V2 wants them to divide the hidden size
    config = model(name, num_nextn_predict_layers=0, num_attention_heads=4)
    hf = transformers.AutoConfig.for_model(**config.to_hf())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(hf)
    named = dict(theirs.named_parameters()) | {n: b for n, b in theirs.named_buffers() if n.endswith(CORRECTION_BIAS)}
    assert {n: tuple(t.shape) for n, t in named.items()} == shapes(config)
