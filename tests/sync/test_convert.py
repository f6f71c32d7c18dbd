"""Conversions between all stores: bit-identical, readable by each format's own library, within the dtype contract."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from checkpoints import BF16, canonical_values, hub_folder, hub_values, read_hub, small, write_safetensors

from shared_ops.errors import UserError
from weight_sync.canonical import open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options

FORMATS = ("hf", "torch", "mindspore", "hdf5", "onnx")


def run(source: Path, destination: Path, to: str, **options) -> dict:
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **options))


@pytest.fixture(scope="module")
def stores(v3, v2, tmp_path_factory):
    """Both models in every format."""
    root = tmp_path_factory.mktemp("stores")
    folders = {}
    for (name, source), to in product((("v3", v3), ("v2", v2)), FORMATS):
        folders[name, to] = root / f"{name}-{to}"
        run(source, folders[name, to], to, verify=True, max_file=150_000)
    return folders


@pytest.mark.parametrize("model", ["v3", "v2"])
@pytest.mark.parametrize("first, second", list(product(FORMATS, FORMATS)))
def test_any_to_any_to_hf_is_the_same_to_the_bit(stores, model, first, second, request, tmp_path):
    run(stores[model, first], tmp_path / "b", second)
    run(tmp_path / "b", tmp_path / "c", "hf")
    original = request.getfixturevalue(model)
    assert read_hub(tmp_path / "c") == read_hub(original)
    assert (tmp_path / "c" / "config.json").read_bytes() == (original / "config.json").read_bytes()


def expected(folder: Path) -> dict[str, np.ndarray]:
    """Canonical values of the session's V3 folder."""
    return canonical_values(small("tiny_v3"))


def same(actual: np.ndarray, value: np.ndarray) -> bool:
    return actual.shape == value.shape and actual.tobytes() == value.tobytes()


def test_pytorch_reads_what_is_written_for_it(stores, v3):
    import torch

    state = {}
    for path in sorted(stores["v3", "torch"].glob("*.pt")):
        state |= torch.load(path, weights_only=True)
    values = expected(v3)
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert str(state[name].dtype) == f"torch.{value.dtype.name}"
        assert same(state[name].view(torch.uint8).numpy().view(value.dtype), value), name


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_mindspore_reads_what_is_written_for_it(v3, tmp_path, kind):
    import mindspore

    run(v3, tmp_path / "ms", "mindspore", mindspore_file=kind, max_file=150_000)
    state = {}
    for path in sorted((tmp_path / "ms").glob(f"*.{kind}")):
        state |= mindspore.load_checkpoint(str(path), format=kind)
    values = expected(v3)
    assert state.keys() == values.keys()
    for name, value in values.items():
        array = state[name].asnumpy()
        assert str(array.dtype) == value.dtype.name and same(array, value), name  # MindSpore's bfloat16 is its own


def test_h5py_reads_what_is_written(stores, v3):
    import h5py

    with h5py.File(stores["v3", "hdf5"] / "model.h5") as file:
        for name, value in expected(v3).items():
            data = file["params/" + name]
            assert data.chunks is None
            if value.dtype == BF16:
                assert data.dtype == np.uint16 and data.attrs["dtype"] == "bfloat16"
            assert same(data[()].view(value.dtype), value), name


@pytest.mark.parametrize("external", [False, True])
def test_onnx_reads_and_accepts_what_is_written(v3, tmp_path, external):
    import onnx
    import onnx.numpy_helper

    run(v3, tmp_path / "onnx", "onnx", max_file=1000 if external else None)
    assert (tmp_path / "onnx" / "model.onnx.data").exists() == external
    path = tmp_path / "onnx" / "model.onnx"
    onnx.checker.check_model(str(path))
    model = onnx.load(str(path))
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = expected(v3)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert same(found[name], value), name


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mindspore", "transformers", "onnx", "safetensors"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
from shared_ops.errors import run_cli
from weight_sync.__main__ import main
sys.exit(run_cli(main, sys.argv[1:]))
"""


def test_without_any_framework(v3, tmp_path):
    def blocked(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", BLOCKED, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    way = ((v3, "h5", "hdf5"), ("h5", "ms", "mindspore"), ("ms", "onnx", "onnx"), ("onnx", "hf", "hf"))
    for source, target, to in way:
        done = blocked("convert", tmp_path / source, tmp_path / target, "--to", to)
        assert done.returncode == 0, done.stderr
    assert read_hub(tmp_path / "hf") == read_hub(v3)
    assert blocked("inspect", tmp_path / "h5").returncode == 0
    assert blocked("diff", tmp_path / "h5", v3).returncode == 0
    done = blocked("convert", v3, tmp_path / "pt", "--to", "torch")
    assert done.returncode == 2 and "pip install -e '.[torch]'" in done.stderr and "Traceback" not in done.stderr


# --- what the own libraries write is read ---


def test_a_plain_state_dict_of_either_naming(v3, tmp_path):
    import torch

    config = small("tiny_v3")
    values = expected(v3)
    tensors = lambda named: {  # noqa: E731
        name: torch.from_numpy(value.view(np.uint16).copy()).view(torch.bfloat16) if value.dtype == BF16
        else torch.from_numpy(value) for name, value in named.items()
    }  # fmt: skip
    for kind, state in (
        ("canonical", tensors(values)),
        ("hub", tensors(hub_values(config, values))),
        ("wrapped", {"model": tensors(values)}),
    ):
        torch.save(state, tmp_path / f"{kind}.pth")
        run(tmp_path / f"{kind}.pth", tmp_path / kind, "hf", config=str(v3 / "config.json"))
        assert read_hub(tmp_path / kind) == read_hub(v3), kind


def test_a_transposed_view_in_a_state_dict_is_read_in_its_order(v3, tmp_path):
    import torch

    state = {}
    for name, value in expected(v3).items():
        tensor = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).copy()).view(
            torch.bfloat16 if value.dtype == BF16 else torch.float32
        ).view(value.shape)  # fmt: skip
        state[name] = tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    torch.save(state, tmp_path / "views.pt")
    run(tmp_path / "views.pt", tmp_path / "out", "hf", config=str(v3 / "config.json"), max_memory=100_000)
    assert read_hub(tmp_path / "out") == read_hub(v3)


@pytest.mark.parametrize("crc", [False, True])
def test_a_checkpoint_that_mindspore_wrote(v3, tmp_path, crc):
    import mindspore
    from mindspore import Parameter, Tensor

    values = expected(v3)
    mindspore.save_checkpoint(
        [{"name": name, "data": Parameter(Tensor(value))} for name, value in values.items()],
        str(tmp_path / "x.ckpt"), crc_check=crc,
    )  # fmt: skip
    (tmp_path / "config.json").write_bytes((v3 / "config.json").read_bytes())
    run(tmp_path / "x.ckpt", tmp_path / "out", "hf")
    assert read_hub(tmp_path / "out") == read_hub(v3)


def test_chunked_and_compressed_hdf5_is_read(v3, tmp_path):
    import h5py

    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in" / "weights.hdf5", "w") as file:
        for name, value in expected(v3).items():
            stored = value.view(np.uint16) if value.dtype == BF16 else value
            data = file.create_dataset(name, data=stored, chunks=True, compression="gzip", shuffle=True)
            data.attrs["dtype"] = value.dtype.name
    run(tmp_path / "in", tmp_path / "out", "hf", config=str(v3 / "config.json"), max_memory=60_000)
    assert read_hub(tmp_path / "out") == read_hub(v3)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """(a step folder in two shards, its run's configuration, its arrays)."""
    from shared_ops.config import load_run_config
    from shared_ops.params import manifest
    from shared_ops.resume import state_meta
    from shared_ops.training_state import ArraySlice, StepWriter, write_shard

    config = load_run_config(None, ["model=tiny_v3", "train.sequence_length=64"])
    values = canonical_values(config.model, dtype=np.float32)
    arrays = {f"params/{name}": value for name, value in values.items()}
    for number, kind in enumerate(("adam_m", "adam_v")):
        moments = canonical_values(config.model, seed=8 + number, dtype=np.float32)
        arrays |= {f"{kind}/{p.name}": moments[p.name] for p in manifest(config.model) if p.trainable}
    meta = state_meta(config, "key", 70)
    with StepWriter(tmp_path_factory.mktemp("state") / "checkpoints", 7, meta) as writer:
        halves = [[], []]
        for name, value in arrays.items():
            half = len(value) // 2
            halves[0].append((name, ArraySlice(value[:half], (0,) * value.ndim, value.shape)))
            halves[1].append((name, ArraySlice(value[half:], (half, *[0] * (value.ndim - 1)), value.shape)))
        facts = {f"s{n}.h5": write_shard(writer.folder / f"s{n}.h5", part) for n, part in enumerate(halves)}
        return writer.publish(facts), config, arrays


def test_a_step_folder_is_a_source(step, tmp_path):
    folder, config, arrays = step
    report = run(folder, tmp_path / "out", "hf", verify=True, max_memory=100_000)
    assert report["notes"][0] == "training state of step 7"
    assert "router_z_loss_coef=0.001" in report["notes"][1]  # the hub's config.json has no key for it
    hub = hub_values(config.model, {name[7:]: value for name, value in arrays.items() if name.startswith("params/")})
    found = read_hub(tmp_path / "out")
    assert found.keys() == hub.keys()
    assert all(found[name][2] == np.ascontiguousarray(value).tobytes() for name, value in hub.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == "float32" and written["num_nextn_predict_layers"] == 2


def test_the_tokenizer_of_the_run_goes_along(step, tmp_path):
    import shutil

    run_folder, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.json").write_text("{}")
    shutil.copytree(step[0].parent, run_folder / "checkpoints")
    (run_folder / "run.json").write_text(json.dumps({"data": str(data)}))
    run(run_folder / "checkpoints" / step[0].name, tmp_path / "out", "hf")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(UserError, match="did you mean .*step_00000007"):
        run(run_folder, tmp_path / "other", "hf")


@pytest.mark.parametrize("to", FORMATS)
def test_a_whole_training_state_goes_through_every_format(step, tmp_path, to):
    from shared_ops.resume import check_resumable, expected_arrays
    from shared_ops.training_state import read_step

    folder, config, arrays = step
    run(folder, tmp_path / "x", to, optimizer=True, verify=True)
    run(tmp_path / "x", tmp_path / "y", "torch", optimizer=True)
    run(tmp_path / "y", tmp_path / "back", "training_state", optimizer=True, verify=True)
    meta, state = read_step(tmp_path / "back")
    assert meta == read_step(folder)[0] and meta["step"] == 7 and meta["consumed_samples"] == 70
    state.check(expected_arrays(config))
    check_resumable(meta, config, "key", "back", force=False)
    for name, value in arrays.items():
        assert same(state[name], value), name
    run(tmp_path / "x", tmp_path / "weights", "hdf5")  # the weights alone, without the moments
    assert not (tmp_path / "weights" / "adam_m").exists()


def test_weights_alone_make_no_training_state(v3, tmp_path):
    with pytest.raises(UserError, match="no optimizer moments"):
        run(v3, tmp_path / "out", "training_state", optimizer=True)


def test_damaged_moments_are_refused(step, tmp_path):
    run(step[0], tmp_path / "x", "torch", optimizer=True)
    file = tmp_path / "x" / "adam_v" / "model.pt"
    data = bytearray(file.read_bytes())
    value = step[2]["adam_v/model.layers.2.mlp.experts.down_proj"][4]
    data[data.find(value.tobytes()) + 9] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UserError, match="adam_v/model.layers.2.mlp.experts.down_proj is not what was written"):
        run(tmp_path / "x", tmp_path / "y", "training_state", optimizer=True)
    file.unlink()
    with pytest.raises(UserError, match="adam_v"):
        run(tmp_path / "x", tmp_path / "y", "training_state", optimizer=True)


# --- dtypes ---


def test_nothing_is_rounded_unless_asked(stores, v3, tmp_path):
    report = run(v3, tmp_path / "out", "hdf5")
    assert not any("cast" in facts for facts in report["tensors"].values())


def test_the_correction_bias_stays_fp32_and_rounding_is_reported(v2, v3, tmp_path):
    report = run(v2, tmp_path / "v2", "hdf5", dtype="bf16", verify=True)
    name = "model.embed_tokens.weight"
    cast = report["tensors"][name]["cast"]
    value = canonical_values(small("tiny_v2"), dtype="float32")[name]
    error = np.abs(value.astype(BF16).astype(np.float64) - value).max()
    assert cast["max_abs_error"] == pytest.approx(error, rel=1e-6) and 0 < cast["max_ulp_error"] <= 0.5
    with open_weights(tmp_path / "v2") as weights:
        assert same(weights.tensors[name].array(), value.astype(BF16))
    assert json.loads((tmp_path / "v2" / "config.json").read_text())["torch_dtype"] == "bfloat16"

    run(v3, tmp_path / "v3", "torch", dtype="fp16", verify=True)
    with open_weights(tmp_path / "v3") as weights:
        kinds = {name: tensor.dtype.name for name, tensor in weights.tensors.items()}
        biases = {name for name in kinds if name.endswith("e_score_correction_bias")}
        assert len(biases) == 12 and {kinds[name] for name in biases} == {"float32"}
        assert {kinds[name] for name in kinds.keys() - biases} == {"float16"}
        values = canonical_values(small("tiny_v3"))
        assert all(same(weights.tensors[name].array(), values[name]) for name in biases)


def test_bias_values_that_bf16_makes_equal_survive(tmp_path):
    """P11: 6.90, 6.91 and 6.92 are one value in bf16."""
    config = small("tiny_v3")
    values = canonical_values(config)
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    values[name][:3] = 6.90, 6.91, 6.92
    hub_folder(tmp_path / "in", config, hub_values(config, values))
    for number, to in enumerate(FORMATS):
        run(tmp_path / "in", tmp_path / to, to, dtype="bf16")
        with open_weights(tmp_path / to) as weights:
            assert same(weights.tensors[name].array(), values[name])
    assert len(np.unique(values[name][:3].astype(BF16))) == 1


def test_bf16_bit_patterns_survive_every_store(tmp_path):
    """P31: zero, negative zero, one, infinity, NaN, the smallest subnormal."""
    config = small("tiny_v3")
    values = canonical_values(config)
    pattern = np.array([0x0000, 0x8000, 0x3F80, 0x7F80, 0x7FC0, 0x0001], np.uint16)
    name = "model.layers.5.mlp.experts.gate_up_proj"
    values[name].reshape(-1)[:6] = pattern.view(BF16)
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    for to in FORMATS:
        run(source, tmp_path / to, to)
        with open_weights(tmp_path / to) as weights:
            assert weights.tensors[name].array().reshape(-1)[:6].view(np.uint16).tolist() == pattern.tolist()


def test_a_cast_that_overflows_is_refused(tmp_path):
    config = small("tiny_v3")
    values = canonical_values(config, dtype=np.float32)
    values["model.norm.weight"][3] = 70000
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    with pytest.raises(UserError, match="model.norm.weight.*70000.*float16"):
        run(source, tmp_path / "out", "hf", dtype="fp16")
    assert not (tmp_path / "out").exists()


# --- memory ---


def test_a_bound_below_one_tensor_is_kept_and_one_below_a_row_is_refused(v3, tmp_path):
    run(v3, tmp_path / "a", "hdf5", dtype="fp32", max_memory=4096)
    with open_weights(tmp_path / "a") as weights:
        for name, value in canonical_values(small("tiny_v3")).items():
            assert same(weights.tensors[name].array(), value.astype(np.float32))
    with pytest.raises(UserError, match=r"--max-memory 1000 B is too little, .* needs "):
        run(v3, tmp_path / "b", "hf", dtype="fp8", max_memory=1000)


# --- prediction layer, copies, companions ---


def test_without_prediction_layer_the_folder_is_complete(tmp_path):
    config = small("tiny_v3")
    values = {k: v for k, v in canonical_values(config).items() if not k.startswith("model.layers.13.")}
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    for to in FORMATS:
        assert not run(source, tmp_path / to, to)["with_mtp"]
        run(tmp_path / to, tmp_path / f"{to}-back", "hf")
        assert read_hub(tmp_path / f"{to}-back") == read_hub(source)


def test_copies_return_only_where_they_were(tmp_path):
    config = small("tiny_v3")
    source = hub_folder(tmp_path / "in", config, hub_values(config, canonical_values(config), copies=False))
    for to in FORMATS:
        run(source, tmp_path / to, to)
        run(tmp_path / to, tmp_path / f"{to}-back", "hf")
        assert read_hub(tmp_path / f"{to}-back") == read_hub(source), to


def test_a_copy_that_differs_is_refused(tmp_path):
    config = small("tiny_v3")
    hub = hub_values(config, canonical_values(config))
    hub["model.layers.13.embed_tokens.weight"] = -hub["model.layers.13.embed_tokens.weight"]
    source = hub_folder(tmp_path / "in", config, hub)
    with pytest.raises(UserError, match="layers.13.embed_tokens.weight differs from model.embed_tokens.weight"):
        run(source, tmp_path / "out", "hdf5")


def test_the_tokenizer_goes_along(v3, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for path in v3.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.bak").write_text("mine")
    run(source, tmp_path / "a", "mindspore")
    run(tmp_path / "a", tmp_path / "b", "hf")
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}" and not (tmp_path / "b" / "notes.bak").exists()


def test_shards_keep_to_the_size_asked_for(v3, tmp_path):
    run(v3, tmp_path / "out", "hf", max_file=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 3 and index["metadata"]["total_size"] == sum(len(t[2]) for t in read_hub(v3).values())
    assert max(sizes) < 100_000 + 40_000  # and the header


def test_the_report(v3, tmp_path):
    write = dict(read_hub(v3))
    report = run(v3, tmp_path / "out", "hdf5", verify=True)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == report
    config = small("tiny_v3")
    assert report["source"]["tensors"] == len(write) and report["mapped"] == len(canonical_values(config))
    assert report["verified"] == report["mapped"] and report["ignored"] == []
    import xxhash

    for name, value in canonical_values(config).items():
        facts = report["tensors"][name]
        digest = xxhash.xxh3_64(np.ascontiguousarray(value).tobytes()).hexdigest()
        assert facts["source"]["xxh3_64"] == facts["destination"]["xxh3_64"] == digest


def test_rotary_leftovers_are_reported(v3, tmp_path):
    config = small("tiny_v3")
    hub = hub_values(config, canonical_values(config))
    hub["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    report = run(hub_folder(tmp_path / "in", config, hub), tmp_path / "out", "hdf5")
    assert [item["name"] for item in report["ignored"]] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_write_safetensors_of_the_tests_is_valid(tmp_path):
    import safetensors.numpy

    write_safetensors(tmp_path / "x.safetensors", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    assert safetensors.numpy.load_file(tmp_path / "x.safetensors")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
