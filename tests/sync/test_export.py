"""Exported graphs: what onnxruntime computes, what the initialisers hold, and when nothing is written.

Each of the three models takes some seconds to trace, so that all tests share them.
"""

import contextlib
import functools
import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import twin_torch
import yaml
from cases import LENGTH, parameters, rows, tiny, worst
from onnxscript import ir

from shared_ops.config import ModelConfig
from shared_ops.errors import UserError, run_cli
from shared_ops.init import initial_value
from shared_ops.params import layer_of, manifest
from shared_ops.training_state import write_shard, write_step
from torch_proto import export, onnx_ops, ops
from weight_sync.canonical import open_weights

GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "sliding_window": None}
MODELS = {  # as few layers as show everything, the last one with routed experts; slots are not in canonical order
    "v3": ("tiny_v3", {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "expert_placement": "hash:7"}),
    "v2": ("tiny_v2", {"num_hidden_layers": 1, "expert_placement": "modulo"}),
    "lite": ("tiny_v2", {"num_hidden_layers": 1, **GREEDY}),
}
LONGEST = 256  # positions, eight times what YaRN starts from
EQUAL = ("model.layers.0.post_attention_layernorm.weight", "model.layers.0.input_layernorm.weight")


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    return export_once(request.param, tmp_path_factory.getbasetemp())


@functools.cache
def export_once(case: str, folder: Path) -> SimpleNamespace:
    name, changes = MODELS[case]
    changes = {**changes, "first_k_dense_replace": changes["num_hidden_layers"] - 1, "vocab_size": 307}
    config = ModelConfig.model_validate(tiny(name).model_dump() | changes)
    values = parameters(config)
    values[EQUAL[1]] = values[EQUAL[0]]  # what optimizers of graphs like to merge
    weights = hdf5_folder(folder / f"{case}_weights", config, values)
    path, model_file = folder / f"{case}.onnx", folder / f"{case}.yaml"
    model_file.write_text(yaml.safe_dump(config.model_dump()))
    placed = [] if config.expert_placement == "contiguous" else ["--config", str(model_file)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_cli(export.main, [str(path), "--weights", str(weights), *placed]) == 0
    twin = twin_torch.build_model(config, LONGEST, values)
    main = [p for p in manifest(config) if layer_of(p.name) != config.num_hidden_layers]
    return SimpleNamespace(config=config, values=values, path=path, printed=printed.getvalue(), twin=twin, main=main)


def hdf5_folder(folder: Path, config: ModelConfig, values: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    write_shard(folder / "model.h5", ((f"params/{name}", value) for name, value in values.items()))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], feeds)[0]


def feeds_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """Packed documents, padding, a row of one token and a row of nothing."""
    return {name: array.astype(np.int64) for name, array in rows(config, LENGTH).items() if name in export.INPUTS}


@torch.no_grad()
def logits(model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return model.main_logits(*(torch.from_numpy(feeds[name]) for name in export.INPUTS)).numpy()


# --- what it computes --------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_twin(exported):
    feeds = feeds_of(exported.config)
    assert not feeds["segment_ids"][-1].any()
    actual = run(exported.path, feeds)
    assert actual.dtype == np.float32
    assert worst(actual, logits(exported.twin, feeds)) < 1e-5  # rounding; 1e-4 is promised


@pytest.mark.parametrize(
    ("batch", "length", "first"), [(1, 1, 0), (1, 1, LONGEST - 1), (3, 100, LONGEST - 100), (2, 5, 30)]
)
def test_any_number_of_rows_tokens_and_positions(exported, batch, length, first):
    """One token chooses few of the experts, so that most have no rows."""
    ids = np.random.default_rng(batch).integers(0, exported.config.vocab_size, (batch, length))
    positions = np.tile(np.arange(first, first + length), (batch, 1))
    feeds = {"input_ids": ids, "position_ids": positions, "segment_ids": np.ones_like(ids)}
    assert worst(run(exported.path, feeds), logits(exported.twin, feeds)) < 1e-5


def test_inputs_and_outputs_are_named_and_free(exported):
    graph = onnx.load(exported.path).graph

    def shapes(values) -> dict[str, list]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    assert shapes(graph.input) == dict.fromkeys(export.INPUTS, ["batch", "sequence"])
    assert shapes(graph.output) == {"logits": ["batch", "sequence", exported.config.vocab_size]}


@pytest.mark.parametrize(
    "counts", [[0, 4, 0, 0, 3, 0], [0, 0, 0, 0, 0, 9], [7, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 5000, 1, 0, 300]]
)
def test_experts_without_rows_and_with_all_of_them(counts):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((sum(counts), 5), np.float32)
    weight, counts = generator.standard_normal((6, 3, 5), np.float32), np.array(counts)
    session = onnxruntime.InferenceSession(onnx_ops.grouped_linear.to_model_proto().SerializeToString())
    (actual,) = session.run(None, {"x": x, "weight": weight, "counts": counts})
    expected = ops.grouped_linear(*map(torch.from_numpy, (x, weight, counts)))
    assert worst(actual, expected.numpy()) < 1e-6


# --- what it holds -----------------------------------------------------------------------------------------------


def test_parameters_are_initialisers_to_the_bit(exported):
    onnx.checker.check_model(exported.path, full_check=True)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(exported.path).graph.initializer}
    names = [p.name for p in exported.main]
    assert [name for name in tensors if not name.startswith("constants/")] == names
    for name in names:
        assert tensors[name].dtype == np.float32 and tensors[name].shape == exported.values[name].shape
        assert tensors[name].tobytes() == exported.values[name].tobytes(), name


def test_weight_sync_reads_it(exported):
    with open_weights(exported.path) as weights:
        assert list(weights.tensors) == [p.name for p in exported.main]
        for name, tensor in weights.tensors.items():
            assert tensor.array().tobytes() == exported.values[name].tobytes(), name
        ours = {"expert_placement", "mtp_loss_weight", "router_z_loss_coef"}  # the hub has no such keys
        assert weights.config.model_dump(exclude=ours) == exported.config.model_dump(exclude=ours)


def test_what_it_reports(exported):
    differ = "onnxruntime's logits differ from PyTorch's by at most"
    found = re.fullmatch(rf"(.*): 0\.\d MB, exported in \d+ s; {differ} (.*) of the largest.*\ninputs .*\n", exported.printed)
    assert found[1] == str(exported.path) and 0 < float(found[2]) < 1e-5


def test_it_tells_nothing_of_this_machine(exported):
    assert str(Path(export.__file__).parent).encode() not in exported.path.read_bytes()


# --- files -------------------------------------------------------------------------------------------------------


def test_large_weights_lie_in_one_file_beside_the_model(tmp_path):
    case = export_once("v3", tmp_path.parent)
    path = tmp_path / "model.onnx"
    export.save(ir.load(case.path), path, largest_model=1000)
    data = tmp_path / "model.onnx.data"
    assert sorted(tmp_path.iterdir()) == [path, data]
    assert data.stat().st_size > 5 * path.stat().st_size
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in (path, data):
        shutil.move(file, moved)
    feeds = feeds_of(case.config)
    assert run(moved / path.name, feeds).tobytes() == run(case.path, feeds).tobytes()
    with open_weights(moved / path.name) as weights:
        for p in case.main:
            assert weights.tensors[p.name].array().tobytes() == case.values[p.name].tobytes()


def test_a_model_is_never_beside_the_data_of_another(tmp_path):
    out, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    for number, files in enumerate([(out.name, data.name), (out.name, data.name), (out.name,)]):
        with export.staging(out) as folder:
            for name in files:
                (folder / name).write_text(str(number))
            export.publish(folder, out)
        assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(files, str(number))


RUN_FILE = """
model: tiny_v2
run: {seed: 3}
data: {source: stdlib}
train: {steps: 1, global_batch_size: 1, sequence_length: 8}
optim: {lr: 0.001}
"""


class Stopped(Exception):
    pass


def loaded(arguments: list[str], monkeypatch) -> dict[str, np.ndarray]:
    """The parameters that the command is about to export."""
    found = {}

    def stop(model, config):
        found.update((name, p.detach().numpy().copy()) for name, p in model.named_parameters())
        raise Stopped

    monkeypatch.setattr(export, "to_onnx", stop)
    with pytest.raises(Stopped):
        export.main(arguments)
    return found


def test_without_weights_it_takes_the_initial_values_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    values = loaded([str(tmp_path / "new" / "model.onnx"), "--config", str(tmp_path / "run.yaml")], monkeypatch)
    config = tiny("tiny_v2")
    assert values.keys() == {p.name for p in manifest(config)}
    for p in manifest(config):
        assert values[p.name].tobytes() == initial_value(p, 3, config.initializer_range).tobytes()


def test_a_step_folder_and_bf16_are_weights_too(tmp_path, monkeypatch):
    config = ModelConfig.model_validate(tiny("tiny_v2").model_dump() | {"expert_placement": "hash:7"})
    values = {name: value.astype(ml_dtypes.bfloat16) for name, value in parameters(config).items()}
    arrays = [(f"{kind}/{name}", value) for kind in ("adam_m", "params") for name, value in values.items()]
    step = write_step(tmp_path, 7, arrays, {"config": {"model": config.model_dump()}})
    hdf5 = hdf5_folder(tmp_path / "hdf5", config, values)
    for weights in (step, hdf5):
        found = loaded([str(tmp_path / "model.onnx"), "--weights", str(weights)], monkeypatch)
        for name, value in values.items():
            assert found[name].tobytes() == value.astype(np.float32).tobytes(), name


# --- when it must not be written ---------------------------------------------------------------------------------


def test_a_graph_that_computes_something_else_is_not_written(tmp_path, monkeypatch, capsys):
    case = export_once("lite", tmp_path.parent)
    monkeypatch.setattr(export, "to_onnx", lambda model, config: ir.load(case.path))  # not with the initial values
    out, model = tmp_path / "model.onnx", tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump(case.config.model_dump()))
    out.write_text("the former one")
    arguments = [str(out), "--config", str(model)]
    assert run_cli(export.main, arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: onnxruntime's logits differ") and "is not written" in message
    assert sorted(tmp_path.iterdir()) == [out, model]
    assert out.read_text() == "the former one"
    assert run_cli(export.main, [*arguments, "--no-check"]) == 0
    assert run(out, feeds_of(case.config)).tobytes() == run(case.path, feeds_of(case.config)).tobytes()


def test_the_check_sees_one_wrong_expert_and_leaves_ties_out(tmp_path):
    case = export_once("lite", tmp_path.parent)
    model = export.MainModel(case.config, LONGEST)

    def changed(name: str, index: int | slice, factor: float) -> export.Agreement:
        values = {**case.values, name: case.values[name].copy()}
        values[name][index] *= factor
        model.load(lambda p: values[p.name])
        return export.check(model, case.path)

    down = "model.layers.0.mlp.experts.down_proj"
    same = changed(down, 5, 1.0)
    assert same.holds and same.difference < 1e-5 and same.compared > 6
    assert not changed(down, 5, 1.001).holds
    with pytest.raises(UserError, match="cannot be checked"):
        changed("model.layers.0.mlp.gate.weight", slice(None), 0.0)  # all experts are equal
    with pytest.raises(UserError, match="not finite"):
        changed(down, 5, np.nan)


@pytest.mark.parametrize(
    ("out", "arguments", "message"),
    [
        ("model.onnx", ["--config", "tiny_v5"], "model 'tiny_v5': no such file"),
        ("model.pt", ["--config", "tiny_v3"], "expected a file name that ends in .onnx"),
        ("folder.onnx", ["--config", "tiny_v3"], "is a folder"),
        ("file/model.onnx", ["--config", "tiny_v3"], "cannot be written: "),
        ("model.onnx", ["--config", "tiny_v3", "--sequence-length", "0"], "--sequence-length 0: expected 1 to"),
        ("model.onnx", ["--config", "tiny_v3", "--sequence-length", "257"], "max_position_embeddings=256"),
        ("model.onnx", [], "give --config, --weights or both"),
        ("model.onnx", ["--weights", "nowhere"], "nowhere: no such folder"),
        ("model.onnx", ["--weights", "hdf5", "--config", "tiny_v3"], "weights of another model: "),
        ("model.onnx", ["--weights", "hdf5", "--config", "v2_lite"], "model.hidden_size: 40 there, 2048 now"),
        ("model.onnx", ["--weights", "integers"], "params/model.embed_tokens.weight is uint8"),
    ],
)
def test_bad_input_is_one_readable_line(out, arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    config = tiny("tiny_v2")
    hdf5_folder(tmp_path / "hdf5", config, parameters(config))
    hdf5_folder(tmp_path / "integers", config, {p.name: np.ones(p.shape, np.uint8) for p in manifest(config)})
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run_cli(export.main, [str(tmp_path / out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_says_what_to_install(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert run_cli(export.main, [str(tmp_path / "model.onnx"), "--config", "tiny_v3"]) == 2
    assert f"needs {package}: pip install -e '.[torch,onnx]'" in capsys.readouterr().err
