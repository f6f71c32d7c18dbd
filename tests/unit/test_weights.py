"""Weights that a run begins with: what is read, what is refused, and the command line."""

import json

import h5py
import ml_dtypes
import numpy as np
import pytest

from shared_ops.command_line import parse
from shared_ops.config import RunConfig, load_model_config, load_run_config
from shared_ops.errors import EXIT_BAD_INPUT, UserError, run_cli
from shared_ops.params import CORRECTION_BIAS, manifest
from shared_ops.resume import expected_arrays, state_meta
from shared_ops.training_state import write_step
from shared_ops.weights import open_weights

BASE = ["model=tiny_v3", "train.sequence_length=64", "data.path=nowhere"]
FIRST_MTP = f"model.layers.{load_model_config('tiny_v3').num_hidden_layers}."  # of two

NORM = "model.norm.weight"


def run(*overrides: str) -> RunConfig:
    return load_run_config(None, [*BASE, *overrides])


def values(config: RunConfig) -> dict[str, np.ndarray]:
    """bf16 parameters, with fp32 biases that bf16 cannot tell apart."""
    generator, arrays = np.random.default_rng(0), {}
    for p in manifest(config.model):
        if p.name.endswith(CORRECTION_BIAS):
            arrays[p.name] = (6.9 + 0.01 * np.arange(p.size)).astype(np.float32)
        else:
            arrays[p.name] = generator.standard_normal(p.shape).astype(ml_dtypes.bfloat16)
    return arrays


def folder_of(tmp_path, config: RunConfig, arrays: dict[str, np.ndarray] | None = None, changes: dict | None = None):
    """An HDF5 folder of weights as weight_sync writes it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    with h5py.File(folder / "model.h5", "w") as file:
        for name, array in (arrays or values(config)).items():
            narrow = array.dtype == ml_dtypes.bfloat16
            dataset = file.create_dataset(f"params/{name}", data=array.view(np.uint16) if narrow else array)
            if narrow:
                dataset.attrs["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config.model.to_hf() | (changes or {})))
    return folder


def refusal(folder, config: RunConfig) -> str:
    with pytest.raises(UserError) as error:
        open_weights(folder, config.model)
    return str(error.value)


def test_narrow_weights_widen_exactly(tmp_path):
    config = run()
    with open_weights(folder_of(tmp_path, config), config.model) as weights:
        for name, array in values(config).items():
            wide = weights[f"params/{name}"]
            assert wide.dtype == np.float32 and wide.tobytes() == array.astype(np.float32).tobytes(), name
        bias = weights[f"params/model.layers.2.mlp.gate.{CORRECTION_BIAS}"]
        assert bias[:3].tolist() == np.array([6.90, 6.91, 6.92], np.float32).tolist()


def test_the_parameters_of_a_training_state(tmp_path):
    config = run()
    state = {name: np.full(shape, len(name), np.float32) for name, shape in expected_arrays(config).items()}
    folder = write_step(tmp_path, 3, state.items(), state_meta(config, "abc", 12))
    with open_weights(folder, config.model) as weights:
        for p in manifest(config.model):
            np.testing.assert_array_equal(weights[f"params/{p.name}"], state[f"params/{p.name}"])
    assert "model.hidden_size: 40 there, 48 now" in refusal(folder, run("model.hidden_size=48"))
    (folder / "state.h5").write_bytes(b"x" * (folder / "state.h5").stat().st_size)
    assert "checksum" in refusal(folder, config)


FREE = ["model.expert_placement=hash:3", "model.mtp_loss_weight=0.1", "model.router_z_loss_coef=0.01",
        "model.aux_loss_alpha=0.5", "model.initializer_range=0.1"]  # fmt: skip


@pytest.mark.parametrize("override", FREE)
def test_what_a_run_may_have_of_its_own(tmp_path, override):
    with open_weights(folder_of(tmp_path, run()), run(override).model):
        pass


def test_every_other_field_of_the_model_must_fit(tmp_path):
    config = run()
    folder = folder_of(tmp_path, config)
    free = {override[6:].partition("=")[0] for override in FREE}
    other = {"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax", "rope_scaling": None}
    for key, value in config.model:
        if key not in free:
            changed = config.model.model_copy(update={key: other[key] if key in other else (value or 0) + 1})
            with pytest.raises(UserError, match=f"weights of another model: model.{key}"):
                open_weights(folder, changed)
    message = refusal(folder, run("model.hidden_size=48", "model.routed_scaling_factor=1.0"))
    assert "model.hidden_size: 40 there, 48 now; model.routed_scaling_factor: 2.5 there, 1.0 now" in message


def test_weights_without_the_prediction_layer(tmp_path):
    """transformers saves none, whatever config.json says."""
    config = run()
    without = {p.name: values(config)[p.name] for p in manifest(run("model.num_nextn_predict_layers=0").model)}
    folder = folder_of(tmp_path, config, without)
    message = refusal(folder, config)
    assert "these weights have no multi-token prediction layer: set model.num_nextn_predict_layers=0" in message
    open_weights(folder, run("model.num_nextn_predict_layers=0").model).reader.close()
    both = refusal(folder, run("model.hidden_size=48"))
    assert "model.hidden_size" in both and "set model.num_nextn_predict_layers=0" in both


def test_a_prediction_layer_too_much_is_not_dropped(tmp_path):
    folder = folder_of(tmp_path, run())
    assert "model.num_nextn_predict_layers: 2 there, 0 now" in refusal(folder, run("model.num_nextn_predict_layers=0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(NORM), f"1 missing: params/{NORM}"),
        (lambda a: a.update(extra=np.ones(2, np.float32)), "1 not expected: params/extra"),
        (lambda a: a.update({"model.norm.weigth": a.pop(NORM)}), "params/model.norm.weigth"),
        (lambda a: a.pop(FIRST_MTP + "enorm.weight"), f"1 missing: params/{FIRST_MTP}enorm.weight"),
        (lambda a: a.update({NORM: np.ones(41, np.float32)}), f"params/{NORM} is [41], expected [40]"),
        (lambda a: a.update({NORM: np.ones(40)}), f"params/{NORM} is float64; expected float32 or bfloat16 or float16"),
        (lambda a: a.update({NORM: np.ones(40, np.int32)}), f"params/{NORM} is int32; expected"),
    ],
)  # fmt: skip
def test_each_name_shape_and_dtype_is_checked(tmp_path, change, message):
    config, arrays = run(), values(run())
    change(arrays)
    assert message in refusal(folder_of(tmp_path, config, arrays), config)


def test_what_is_no_weights_folder(tmp_path):
    config = run()
    assert "no such folder" in refusal(tmp_path / "nowhere", config)
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"x")
        for path in (tmp_path, tmp_path / name):
            assert f"convert it first: python -m weight_sync convert {path} DIR --to hdf5" in refusal(path, config)
    folder = folder_of(tmp_path, config)
    whole = (folder / "model.h5").read_bytes()
    (folder / "model.h5").write_bytes(whole[: len(whole) // 2])
    assert "model.h5: cannot be read as HDF5" in refusal(folder, config)
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in refusal(folder, config)
    (folder / "config.json").unlink()
    assert "config.json: missing" in refusal(folder, config)


def test_an_external_file_is_not_followed(tmp_path):
    config, arrays = run(), values(run())
    del arrays[NORM]
    folder = folder_of(tmp_path, config, arrays)
    (tmp_path / "secret").write_bytes(bytes(160))
    with h5py.File(folder / "model.h5", "a") as file:
        file.create_dataset(f"params/{NORM}", (40,), np.float32, external=[(str(tmp_path / "secret"), 0, 160)])
    assert "data in another file" in refusal(folder, config)


def test_the_command_line(capsys):
    weights = lambda *arguments: parse("main.py", [*BASE, *arguments]).weights
    assert weights() is None and str(weights("--weights", "w")) == "w"
    assert str(weights("--weights", "w", "--resume", "auto")) == "w"
    assert run_cli(lambda argv: weights(*argv) and None, ["--weights", "w", "--resume", "s"]) == EXIT_BAD_INPUT
    assert "--weights w begins a new run and --resume s goes on with another one" in capsys.readouterr().err
