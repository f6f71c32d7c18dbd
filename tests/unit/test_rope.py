"""Rotary tables of the twins: YaRN's frequencies, amplitude and softmax scale (P2-P4)."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared_ops import rope
from shared_ops.config import CONFIGS, ModelConfig, load_model_config
from shared_ops.reference import rope as reference

V3 = load_model_config("v3")


def model(base: ModelConfig = V3, **scaling) -> ModelConfig:
    """V3 with other YaRN settings; qk_head_dim 192, rotary dim 64."""
    values = base.model_dump()
    values["rope_scaling"] = values["rope_scaling"] | scaling if scaling.get("factor", 1) else None
    return ModelConfig.model_validate(values)


def test_softmax_scale_and_amplitude():
    assert rope.softmax_scale(V3) == pytest.approx(0.1352338, abs=5e-8)  # without the factor 0.0721688
    assert rope.softmax_scale(load_model_config("v2_lite")) == pytest.approx(0.1147214, abs=5e-8)
    assert rope.softmax_scale(model(factor=None)) == pytest.approx(0.0721688, abs=5e-8)
    assert rope.amplitude(V3) == rope.amplitude(load_model_config("v2_lite")) == rope.amplitude(model(factor=None)) == 1
    # published models have both mscales equal: only a made-up one tells which goes where
    unequal = model(mscale=1.0, mscale_all_dim=0.707)
    assert rope.amplitude(unequal) == pytest.approx(1.085726, abs=5e-7)
    factor = rope.softmax_scale(unequal) * 192**0.5
    assert factor == pytest.approx(1.589626, abs=5e-7)  # from mscale it would be 1.873854
    assert rope.amplitude(load_model_config("tiny_v3")) == pytest.approx(1.138629 / 1.098011, rel=1e-6)


def test_without_mscale_all_dim_the_amplitude_has_it_all():
    config = model(mscale=1.0, mscale_all_dim=0.0)
    assert rope.amplitude(config) == pytest.approx(1.368888, abs=5e-7)
    assert rope.softmax_scale(config) == 192**-0.5
    assert rope.amplitude(model(factor=1.0, mscale=1.0, mscale_all_dim=0.0)) == 1.0  # nothing is stretched


def test_the_ramp_starts_from_the_original_length():
    frequencies = rope.inverse_frequencies(V3)
    assert frequencies.shape == (32,) and frequencies.dtype == np.float64
    listed = [1, 0.056234, 0.0055, 3.33e-5, 3.33e-6]
    assert frequencies[[0, 10, 16, 23, 31]] == pytest.approx(listed, rel=2e-3)
    plain = rope.inverse_frequencies(model(factor=None))
    assert np.array_equal(frequencies[:11], plain[:11]) and (frequencies[11:] < plain[11:]).all()
    assert frequencies[23:] == pytest.approx(plain[23:] / 40) and frequencies[22] > 1.5 * plain[22] / 40
    # from the stretched length, the wrong one, the ramp would be 23..36: nothing slowed down before 24
    wrong = rope.inverse_frequencies(model(original_max_position_embeddings=163840))
    assert np.array_equal(wrong[:24], plain[:24]) and wrong[16] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": None},
        {"factor": 1.0},
        {"factor": 2.5, "original_max_position_embeddings": 77, "beta_fast": 5.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 2},  # every pair turns less than once: a step
        {"original_max_position_embeddings": 10**12},  # every pair turns often: the ramp lies behind the last
        {"beta_fast": 3.0, "beta_slow": 3.0},
        {"mscale": 0.3, "mscale_all_dim": 1.7},
    ],
)
@pytest.mark.parametrize(("dim", "theta"), [(64, 1e4), (8, 1e3), (2, 50.0), (64, 1e6)])
def test_the_float64_reference_says_the_same(changes, dim, theta):
    values = model(**changes).model_dump() | {"qk_rope_head_dim": dim, "rope_theta": theta}
    config = ModelConfig.model_validate(values)
    scaling = SimpleNamespace(**values["rope_scaling"]) if values["rope_scaling"] else None
    expected = reference.inverse_frequencies(dim, theta, scaling)
    assert rope.inverse_frequencies(config) == pytest.approx(expected, rel=1e-15)
    assert rope.amplitude(config) == pytest.approx(reference.amplitude(scaling), rel=1e-15)
    assert rope.softmax_scale(config) == pytest.approx(reference.softmax_scale(128 + dim, scaling), rel=1e-15)
    cos, sin = rope.tables(config, 9)
    wide_cos, wide_sin = reference.tables(np.arange(9), expected, reference.amplitude(scaling))
    assert np.array_equal(cos, wide_cos.astype(np.float32)) and np.array_equal(sin, wide_sin.astype(np.float32))


@pytest.mark.parametrize("name", ["v2", "v2_lite", "v3", "tiny_v3"])
def test_transformers_says_the_same(name):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = load_model_config(name)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config.to_hf()), "cpu")
    assert rope.inverse_frequencies(config) == pytest.approx(frequencies.double().numpy(), rel=1e-6)
    assert rope.amplitude(config) == pytest.approx(attention_factor, rel=1e-12)


def test_tables_are_fp32_and_exact_at_late_positions():
    """P4: bf16 makes position 256 of 257 (cos off by 0.859); fp32 angles are off by 1e-3 at the longest position."""
    length = 2 * 4096
    cos, sin = rope.tables(V3, length)
    assert cos.shape == sin.shape == (length, 32) and cos.dtype == sin.dtype == np.float32
    assert (cos[0] == 1).all() and (sin[0] == 0).all()
    assert cos[257, 0] == np.float32(np.cos(257.0)) and abs(cos[257, 0] - cos[256, 0]) > 0.8
    angle = (length - 1) * rope.inverse_frequencies(V3)
    assert np.abs(cos[-1] - np.cos(angle)).max() < 6e-8 and np.abs(sin[-1] - np.sin(angle)).max() < 6e-8
    assert np.abs(cos[-1] - np.cos((length - 1) * rope.inverse_frequencies(V3).astype(np.float32))).max() > 1e-5


def test_the_amplitude_is_in_the_tables():
    config = load_model_config("tiny_v3")
    cos, sin = rope.tables(config, 100)
    assert np.hypot(cos, sin) == pytest.approx(np.full((100, 4), rope.amplitude(config)), rel=1e-6)
    assert rope.amplitude(config) > 1.03


def test_every_model_has_its_tables():
    for path in (CONFIGS / "models").glob("*.yaml"):
        config = load_model_config(path)
        assert np.isfinite(rope.tables(config, 16)).all() and rope.softmax_scale(config) > 0
