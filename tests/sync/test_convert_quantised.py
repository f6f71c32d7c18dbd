"""FP8 and FP4 checkpoints in and FP8 out, against the formula written out once more here (P28)."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, canonical_values, hub_folder, hub_values, read_hub, small

from shared_ops.errors import UserError
from weight_sync.canonical import open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options

E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
FP8_CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# off 128 on both axes, some with several blocks: hidden 160, q_b 3 * 60, experts' 2 * 150
SIZES = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 150, "q_lora_rank": 132,
         "qk_nope_head_dim": 52, "num_hidden_layers": 4, "kv_lora_rank": 124}  # fmt: skip


def run(source, destination, to, **options):
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **options))


def is_quantised(name: str) -> bool:
    """As the published V3 does it: the projections of attention and feed-forward, and nothing else."""
    return name.endswith("_proj.weight") and "eh_proj" not in name or name.endswith("_with_mqa.weight")


def blocks(scales: np.ndarray, shape) -> np.ndarray:
    """The scale of every element, P28: block (i // 128, j // 128)."""
    rows, columns = np.indices(shape)
    return scales.astype(np.float32)[rows // 128, columns // 128]


def fp8_hub(config, scale_format: str, seed: int = 3) -> tuple[dict, dict]:
    """(hub tensors with FP8 weights and scales, what they mean as fp32)."""
    generator = np.random.default_rng(seed)
    hub, meaning = {}, {}
    for name, value in hub_values(config, canonical_values(config)).items():
        if not is_quantised(name):
            hub[name], meaning[name] = value, value
            continue
        codes = generator.standard_normal(value.shape).astype(np.float32) * 60
        shape = tuple(-(-n // 128) for n in value.shape)
        if scale_format == "float32":
            scales = generator.uniform(1e-5, 3e-4, shape).astype(np.float32)
        else:
            scales = np.ldexp(np.float32(1), generator.integers(-14, -6, shape)).astype(np.float32).astype(E8M0)
        hub[name] = codes.astype(E4M3)
        hub[name + "_scale_inv"] = scales
        meaning[name] = hub[name].astype(np.float32) * blocks(scales, value.shape)
    return hub, meaning


@pytest.fixture(scope="module", params=["float32", "ue8m0"])
def fp8(request, tmp_path_factory):
    config = small("tiny_v3", **SIZES)
    hub, meaning = fp8_hub(config, request.param)
    more = {"quantization_config": FP8_CONFIG | ({"scale_fmt": "ue8m0"} if request.param == "ue8m0" else {})}
    folder = hub_folder(tmp_path_factory.mktemp("fp8") / "in", config, hub, 5, **more)  # scales in other shards
    return request.param, config, folder, meaning


def values_of(folder, config) -> dict[str, np.ndarray]:
    with open_weights(folder) as weights:
        return hub_values(config, {name: tensor.array() for name, tensor in weights.tensors.items()})


@pytest.mark.parametrize("to", ["hdf5", "hf"])
def test_dequantised_without_rounding(fp8, tmp_path, to):
    scale_format, config, folder, meaning = fp8
    report = run(folder, tmp_path / "out", to, verify=True, max_memory=200_000)
    assert not any("cast" in facts for facts in report["tensors"].values())
    found = values_of(tmp_path / "out", config)
    exact = BF16 if scale_format == "ue8m0" else np.float32
    for name, value in meaning.items():
        assert found[name].dtype == (exact if is_quantised(name) else value.dtype), name
        np.testing.assert_array_equal(found[name].astype(np.float32), value.astype(np.float32), err_msg=name)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["torch_dtype"] == ("bfloat16" if scale_format == "ue8m0" else "float32")


def test_rounded_to_bf16_when_asked(fp8, tmp_path):
    _, config, folder, meaning = fp8
    run(folder, tmp_path / "out", "torch", dtype="bf16", verify=True)
    found = values_of(tmp_path / "out", config)
    for name, value in meaning.items():
        wanted = value if value.dtype == np.float32 and "bias" in name else value.astype(np.float32).astype(BF16)
        assert found[name].tobytes() == np.ascontiguousarray(wanted).tobytes(), name


def test_quantised_tensors_are_never_passed_on_as_bytes(fp8, tmp_path):
    _, config, folder, _ = fp8
    for to in ("hf", "torch", "mindspore", "hdf5", "onnx"):
        run(folder, tmp_path / to, to)
        with open_weights(tmp_path / to) as weights:
            assert {tensor.stored_dtype for tensor in weights.tensors.values()} <= {"BF16", "F32"}


@pytest.mark.parametrize("change, said", [
    (lambda hub, name: hub.pop(name + "_scale_inv"), "weight_scale_inv are not there"),
    (lambda hub, name: hub.update({name + "_scale_inv": hub[name + "_scale_inv"].T.copy()}), "scales of shape"),
    (lambda hub, name: hub.update({name: hub[name].view(np.int8)}), "not FP8"),
    (lambda hub, name: hub[name].view(np.uint8).__setitem__((3, 5), 0x7F), "NaN"),
])  # fmt: skip
def test_damaged_quantisation(tmp_path, change, said):
    config = small("tiny_v3", **SIZES)
    hub, _ = fp8_hub(config, "float32")
    name = "model.layers.0.mlp.down_proj.weight"
    hub[name + "_scale_inv"] = np.arange(1, 5, dtype=np.float32).reshape(2, 2)[:, :2].repeat(1, 0)
    if "shape" in said:
        hub[name + "_scale_inv"] = np.ones((3, 2), np.float32)
    change(hub, name)
    folder = hub_folder(tmp_path / "in", config, hub)
    with pytest.raises(UserError, match=said) as error:
        run(folder, tmp_path / "out", "hdf5")
    assert name in str(error.value) and not (tmp_path / "out").exists()


def test_a_scale_without_its_fp8_tensor(tmp_path):
    config = small("tiny_v3")
    hub = hub_values(config, canonical_values(config))
    hub["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    with pytest.raises(UserError, match="gives scales, but model.layers.0.mlp.up_proj.weight is BF16"):
        run(hub_folder(tmp_path / "in", config, hub), tmp_path / "out", "hdf5")


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".scale"])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_mxfp4_experts(tmp_path, suffix, kind):
    """As V4 ships its experts: two values a byte, the low four bits first; one UE8M0 byte per 32."""
    config = small("tiny_v3", **(SIZES | {"moe_intermediate_size": 96}))
    generator = np.random.default_rng(0)
    hub, meaning = {}, {}
    for name, value in hub_values(config, canonical_values(config)).items():
        hub[name] = meaning[name] = value
        if ".experts." not in name:
            continue
        rows, columns = value.shape
        packed = generator.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        scales = generator.integers(118, 130, (rows, columns // 32), dtype=np.uint8)
        nibbles = np.empty((rows, columns), np.uint8)
        nibbles[:, 0::2], nibbles[:, 1::2] = packed & 15, packed >> 4
        signs = np.where(nibbles & 8, -1, 1).astype(np.float32)
        powers = np.float32(2) ** (scales.astype(np.float32) - 127)
        meaning[name] = signs * FP4[nibbles & 7] * np.repeat(powers, 32, axis=1)
        hub[name] = packed.view(kind)
        hub[name.removesuffix(".weight") + suffix] = scales.view(E8M0)
    run(hub_folder(tmp_path / "in", config, hub, 3), tmp_path / "out", "mindspore", verify=True, max_memory=100_000)
    found = values_of(tmp_path / "out", config)
    for name, value in meaning.items():
        assert found[name].dtype == (value.dtype if "experts." not in name or "shared" in name else BF16), name
        np.testing.assert_array_equal(found[name].astype(np.float32), value.astype(np.float32), err_msg=name)


# --- FP8 out ---


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_fp8_is_read_back_within_half_a_step(tmp_path, scale_format):
    config = small("tiny_v3", **SIZES)
    values = canonical_values(config, dtype=np.float32)
    values["model.layers.0.mlp.gate_proj.weight"][:128, :128] = 0
    values["model.layers.0.self_attn.o_proj.weight"] *= np.float32(1e-30)
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    report = run(source, tmp_path / "out", "hf", dtype="fp8", scale_format=scale_format, verify=True)
    raw = read_hub(tmp_path / "out")
    hub = hub_values(config, values)
    quantised = {name for name in hub if is_quantised(name)}
    assert raw.keys() == hub.keys() | {name + "_scale_inv" for name in quantised}
    for name, value in hub.items():
        kind, shape, data = raw[name]
        if name not in quantised:
            assert kind == "F32" and data == np.ascontiguousarray(value).tobytes(), name
            continue
        assert kind == "F8_E4M3" and shape == value.shape
        kind, scale_shape, scale_data = raw[name + "_scale_inv"]
        assert kind == ("F32" if scale_format == "float32" else "F8_E8M0")
        assert scale_shape == tuple(-(-n // 128) for n in shape)
        scales = np.frombuffer(scale_data, np.float32 if scale_format == "float32" else E8M0).reshape(scale_shape)
        spread = blocks(scales, shape)
        scaled = value.astype(np.float64) / spread
        back = np.frombuffer(data, E4M3).reshape(shape).astype(np.float64)
        exponent = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6)))
        assert (np.abs(back - scaled) <= 2.0 ** (exponent - 3) / 2 * (1 + 1e-6)).all(), name
        assert np.abs(back).max() <= 448
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"] == FP8_CONFIG | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})
    assert report["tensors"]["model.layers.2.mlp.experts.down_proj"]["cast"]["max_abs_error"] > 0


def test_fp8_in_fp8_out_is_stable(fp8, tmp_path):
    """What was quantised by the largest value of its blocks comes back as it was."""
    scale_format, config, folder, _ = fp8
    run(folder, tmp_path / "a", "hf", dtype="fp8")
    run(tmp_path / "a", tmp_path / "b", "hdf5")
    run(tmp_path / "b", tmp_path / "c", "hf", dtype="fp8", scale_format=scale_format)
    a, c = read_hub(tmp_path / "a"), read_hub(tmp_path / "c")
    assert a.keys() == c.keys()
    if scale_format == "ue8m0":
        assert a == c
    else:  # amax / 448 * 448 may round: the scale by one unit in its last place, the elements not at all
        assert all(a[name] == c[name] for name in a if not name.endswith("_scale_inv"))


def test_infinite_weights_are_not_quantised(tmp_path):
    config = small("tiny_v3", **SIZES)
    values = canonical_values(config, dtype=np.float32)
    values["model.layers.0.mlp.gate_proj.weight"][150, 130] = np.inf
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    with pytest.raises(UserError, match="model.layers.0.mlp.gate_proj.weight cannot be quantised: the value inf"):
        run(source, tmp_path / "out", "hf", dtype="fp8")


@pytest.mark.parametrize("kind", [E4M3, np.dtype(np.int8), np.dtype(np.float64), np.dtype(np.int32)])
def test_scales_of_another_dtype_are_refused(tmp_path, kind):
    """One byte is not UE8M0 by that: an E4M3 one would become 2**-71."""
    config = small("tiny_v3", **SIZES)
    hub, _ = fp8_hub(config, "float32")
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    hub[name] = np.ones(hub[name].shape, kind)
    with pytest.raises(UserError, match=f"{name} is .*expected fp32 or UE8M0 scales"):
        run(hub_folder(tmp_path / "in", config, hub), tmp_path / "out", "hdf5")
