"""weight_sync inspect: what every kind of store holds is said, also of what does not fit together."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import canonical_values, hub_folder, hub_values, small, write_safetensors

from shared_ops.errors import run_cli
from shared_ops.params import parameter_count
from shared_ops.training_state import write_step
from weight_sync.__main__ import main as weight_sync
from weight_sync.convert import Options, convert
from weight_sync.stores.base import Mapped

CONFIG = small("tiny_v3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def values():
    return canonical_values(CONFIG)


@pytest.fixture(scope="module")
def hub(values, tmp_path_factory):
    """With copies, a rotary table to ignore, and two shards."""
    tensors = hub_values(CONFIG, values)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    return hub_folder(tmp_path_factory.mktemp("inspect") / "hub", CONFIG, tensors, 2)


@pytest.fixture
def inspect(tmp_path, capfd):
    """(exit code, standard output in one line of words, JSON) of the command."""

    def run(path: Path, *options: str) -> tuple[int, str, dict]:
        out = tmp_path / "inspect.json"
        out.unlink(missing_ok=True)
        code = run_cli(weight_sync, ["inspect", str(path), "--json", str(out), *options])
        shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
        return code, shown, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_a_hub_folder(hub, values, inspect):
    code, shown, facts = inspect(hub)
    assert code == 0
    for words in (
        "deepseek_v3, hidden size 40, vocabulary 300", "3: 2 dense, 1 with experts; 1 for multi-token prediction",
        "3 heads of 10 + 8 rotary, values 12; latent 20, query rank 28", "2 of 4 groups",
        "12 routed, 3 per token, 2 shared, width 24, noaux_tc on sigmoid", "256 positions, theta 1000, YaRN 4 x 32",
        f"complete yes, all {len(values)} parameters of the configuration, multi-token prediction included",
        "model.layers.3.embed_tokens.weight, of model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight, of lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq (rotary tables: computed from the configuration)",
    ):  # fmt: skip
        assert words in shown, words
    assert facts["format"] == "hf" and facts["conversion"] is None and facts["training"] is None
    assert {file["name"]: file["bytes"] for file in facts["files"]} == {
        path.name: path.stat().st_size for path in hub.iterdir()
    }
    assert facts["bytes"] == sum(path.stat().st_size for path in hub.iterdir())
    counts, trained = facts["parameters"], parameter_count(CONFIG)
    assert counts == {"without_mtp": parameter_count(CONFIG, False), "with_mtp": parameter_count(CONFIG)}
    assert f"{counts['without_mtp']:,} trained, {counts['with_mtp']:,} with multi-token prediction" in shown
    biases = [value for name, value in values.items() if "correction_bias" in name]
    assert facts["dtypes"] == [
        {"stored": "BF16", "parameters": len(values) - 2, "values": trained, "bytes": 2 * trained},
        {"stored": "F32", "parameters": 2, "values": 24, "bytes": sum(value.nbytes for value in biases)},
    ]
    assert "--tensors" not in shown and "model.layers.2.mlp.experts.gate_up_proj" not in shown


def test_every_tensor(hub, values, inspect):
    _, shown, facts = inspect(hub, "--tensors")
    assert list(facts["tensors"]) == list(values)
    for name, value in values.items():
        found = facts["tensors"][name]
        assert found["shape"] == list(value.shape) and found["dtype"] == value.dtype.name
        assert f"{name} {list(value.shape)} {value.dtype.name} {found['stored']}" in shown
    assert "model.layers.2.mlp.experts.gate_up_proj [12, 48, 40] bfloat16 BF16, 24 tensors" in shown


@pytest.mark.parametrize("to", ["mindspore", "hdf5", "onnx"])
def test_converted_weights_say_where_they_come_from(hub, values, inspect, tmp_path, to):
    convert(hub, tmp_path / to, Options(to=to, dtype="fp16", verify=True, quiet=True, sync=False))
    code, shown, facts = inspect(tmp_path / to)
    assert code == 0 and facts["format"] == to
    rounded = facts["conversion"]["rounded"]
    assert 0 < rounded < len(values)
    assert (
        f"converted from {hub} (hf); --dtype fp16; {rounded} parameters were rounded; checksums of {len(values)} of "
        f"{len(values)} parameters, not compared here; was read again and compared when it was written"
    ) in shown
    assert {kind["stored"] for kind in facts["dtypes"]} == {"F16", "F32"}


def test_fp8_is_spelt_out(hub, inspect, tmp_path):
    convert(hub, tmp_path / "fp8", Options(to="hf", dtype="fp8", quiet=True, sync=False))
    _, shown, facts = inspect(tmp_path / "fp8")
    quantised, plain, biases = facts["dtypes"]
    assert quantised["stored"] == "F8_E4M3 in 128 x 128 blocks with F32 scales" and plain["stored"] == "BF16"
    parts = sum(t["stored_tensors"] for t in facts["tensors"].values() if t["stored"] == quantised["stored"])
    assert quantised["bytes"] == quantised["values"] + 4 * parts  # every matrix is one block
    assert f"F8_E4M3 in 128 x 128 blocks with F32 scales: {quantised['parameters']} parameters" in shown
    assert quantised["values"] + plain["values"] == facts["parameters"]["with_mtp"]


def test_fp4_is_spelt_out(values, inspect, tmp_path):
    config = small("tiny_v3", num_hidden_layers=3, hidden_size=64)
    tensors = hub_values(config, canonical_values(config), copies=False)
    name = "model.layers.2.mlp.experts.11.gate_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = np.zeros((rows, columns // 2), np.int8)
    tensors[name.replace(".weight", ".weight_scale_inv")] = np.full((rows, columns // 32), 127, np.uint8)
    _, shown, facts = inspect(hub_folder(tmp_path / "fp4", config, tensors))
    fp4 = "FP4 pairs in I8, groups of 32 with UE8M0 scales"
    found = next(kind for kind in facts["dtypes"] if kind["stored"] == fp4)
    assert found["values"] == rows * columns and found["bytes"] == rows * columns // 2 + rows * columns // 32
    assert facts["tensors"]["model.layers.2.mlp.experts.gate_up_proj"]["stored"] == f"BF16 + {fp4}"
    assert fp4 in shown


def test_without_prediction_layers(values, inspect, tmp_path):
    without = {name: value for name, value in values.items() if ".layers.3." not in name}
    code, shown, facts = inspect(hub_folder(tmp_path / "b", CONFIG, hub_values(CONFIG, without, copies=False)))
    assert code == 0 and not facts["with_mtp"]
    assert f"all {len(without)} parameters of the configuration, but for its multi-token prediction layers" in shown


def test_v2_has_no_prediction_layers_and_tied_embeddings(v2, inspect):
    _, shown, facts = inspect(v2)
    assert "embedding and head tied" in shown and "no query compression" in shown and "window 24" in shown
    assert "group_limited_greedy on softmax" in shown and "multi-token" not in shown
    assert {kind["stored"] for kind in facts["dtypes"]} == {"F32", "F16"}


def test_a_training_state(values, inspect, tmp_path):
    trained = [name for name in values if "correction_bias" not in name]
    arrays = [(f"params/{name}", value.astype(np.float32)) for name, value in values.items()]
    arrays += [(f"{kind}/{name}", values[name].astype(np.float32)) for kind in ("adam_m", "adam_v") for name in trained]
    meta = {"config": {"model": CONFIG.model_dump()}, "consumed_samples": 480}
    step = write_step(tmp_path / "checkpoints", 120, arrays, meta)
    code, shown, facts = inspect(step)
    assert code == 0 and facts["format"] == "training_state"
    moments = {"adam_m": len(trained), "adam_v": len(trained)}
    assert facts["training"] == {"step": 120, "consumed_samples": 480, "moments": moments}
    assert f"step 120, 480 samples consumed; adam_m of {len(trained)} parameters, adam_v of" in shown
    assert [kind["stored"] for kind in facts["dtypes"]] == ["F32"]
    assert [file["name"] for file in facts["files"]] == ["manifest.json", "state.h5"]
    convert(step, tmp_path / "hub", Options(to="hf", optimizer=True, quiet=True, sync=False))
    code, shown, converted = inspect(tmp_path / "hub")
    assert code == 0 and converted["training"] == facts["training"] and "step 120, 480 samples" in shown
    assert "adam_v/model.safetensors" in {file["name"] for file in converted["files"]}


# --- what does not fit is shown all the same ---


def test_names_that_do_not_fit(hub, values, inspect, tmp_path, capfd):
    tensors = {name.replace("kv_a_layernorm", "kv_a_norm"): value for name, value in hub_values(CONFIG, values).items()}
    folder = hub_folder(tmp_path / "b", CONFIG, tensors)
    out = tmp_path / "out.json"
    assert run_cli(weight_sync, ["inspect", str(folder), "--json", str(out)]) == 2
    captured = capfd.readouterr()
    shown, facts = " ".join(captured.out.replace("│", " ").split()), json.loads(out.read_text())
    assert "4 tensors of the model are missing: model.layers.0.self_attn.kv_a_layernorm.weight" in captured.err
    assert "model.layers.*.self_attn.kv_a_norm.weight 4 BF16 [20]" in shown
    assert "model.layers.*.mlp.experts.*.down_proj.weight 24 BF16 [40, 24]" in shown
    assert f"hf, {len(tensors)} stored tensors" in shown
    assert facts["error"] in captured.err and len(facts["stored"]) == len(tensors)
    assert facts["stored"]["lm_head.weight"] == {"shape": [300, 40], "dtype": "BF16"}
    assert run_cli(weight_sync, ["inspect", str(folder), "--tensors"]) == 2
    assert "model.layers.1.self_attn.kv_a_norm.weight" in capfd.readouterr().out


def test_weights_without_a_configuration(hub, values, inspect, tmp_path, capfd):
    write_safetensors(tmp_path / "bare.safetensors", {**values, "model.norm.weight": values["model.norm.weight"]})
    code, shown, facts = inspect(tmp_path / "bare.safetensors")
    assert code == 2 and "model.norm.weight 1 BF16 [40]" in shown and "give the model's with --config" in facts["error"]
    code, shown, _ = inspect(tmp_path / "bare.safetensors", "--config", str(hub / "config.json"))
    assert code == 0 and f"all {len(values)} parameters" in shown


def test_one_shard_of_several(hub, inspect):
    code, shown, facts = inspect(hub / "model-00001-of-00002.safetensors")
    assert code == 2 and "tensors of the model are missing" in facts["error"] and "lm_head.weight" in facts["stored"]


def test_nothing_there_or_damaged(hub, tmp_path, capfd):
    assert run_cli(weight_sync, ["inspect", str(tmp_path / "nothing")]) == 2
    assert "not there" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run_cli(weight_sync, ["inspect", str(tmp_path / "empty")]) == 2
    assert "no weights found" in capfd.readouterr().err
    shutil.copytree(hub, tmp_path / "cut")
    shard = tmp_path / "cut" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert run_cli(weight_sync, ["inspect", str(tmp_path / "cut")]) == 2
    assert "damaged or incomplete" in capfd.readouterr().err
    assert run_cli(weight_sync, ["inspect", str(hub), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "cannot be written" in capfd.readouterr().err


def test_no_tensor_is_read(hub, inspect, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Mapped, "pieces", refuse)
    code, _, facts = inspect(hub, "--tensors")
    assert code == 0 and facts["tensors"]
