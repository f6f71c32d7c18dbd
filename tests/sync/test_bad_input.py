"""Damage and wrong input: one clear message each, exit code 2, and nothing is destroyed or half written."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import canonical_values, hub_folder, hub_values, small, write_safetensors

from shared_ops.errors import UserError
from weight_sync.canonical import open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options
from weight_sync.sizes import parse_size

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


def run(source: Path, destination: Path, to: str, **options) -> dict:
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **options))


@pytest.fixture
def folder(v3, tmp_path):
    """A copy of the V3 folder to damage."""
    return Path(shutil.copytree(v3, tmp_path / "in"))


def refusal(source: Path, to: str = "hdf5", **options) -> str:
    """The message of a conversion that must be refused and leave nothing."""
    target = source.parent / "refused"
    with pytest.raises(UserError) as error:
        run(source, target, to, **options)
    assert not target.exists() and not list(source.parent.glob(".refused*"))
    message = str(error.value)
    assert "\n" not in message and str(source) in message
    return message


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


# --- P30: index files ---


def test_a_missing_shard(folder):
    (folder / SHARDS[1]).unlink()
    assert SHARDS[1] in refusal(folder) and "lacks" in refusal(folder)


def test_all_shards_missing(folder):
    for shard in SHARDS:
        (folder / shard).unlink()
    assert SHARDS[0] in refusal(folder)


@pytest.mark.parametrize("cut", [1, 1000, 20_000])
def test_a_truncated_shard(folder, cut):
    data = (folder / SHARDS[2]).read_bytes()
    (folder / SHARDS[2]).write_bytes(data[:-cut])
    assert SHARDS[2] in refusal(folder) and "damaged or incomplete" in refusal(folder)


def test_bytes_after_the_end(folder):
    with open(folder / SHARDS[0], "ab") as file:
        file.write(b"\0")
    assert "header describes" in refusal(folder)


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, (10).to_bytes(8, "little") + b"{not json}", b"PK\x03\x04 no zip"])
def test_no_header(folder, head):
    (folder / SHARDS[0]).write_bytes(head)
    assert SHARDS[0] in refusal(folder)


def test_overlapping_tensors_and_wrong_sizes(folder):
    data = (folder / SHARDS[0]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    for change in (
        {"shape": [1, 1]},
        {"data_offsets": [0, 2]},
        {"dtype": "F31"},
        {"shape": "x"},
        {"data_offsets": [2]},
    ):
        text = json.dumps(header | {name: header[name] | change}).encode()
        (folder / SHARDS[0]).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        assert SHARDS[0] in refusal(folder)


def test_a_key_in_two_shards(folder):
    edit_index(folder, lambda index: None)
    extra = {"model.norm.weight": canonical_values(small())["model.norm.weight"]}
    for shard in SHARDS:
        if "model.norm.weight" not in (folder / shard).read_bytes()[:60_000].decode("latin1"):
            write_safetensors(folder / shard, extra)
    assert "model.norm.weight" in refusal(folder)


def test_a_key_that_its_shard_lacks(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"model.ghost.weight": SHARDS[0]}))
    assert f"model.ghost.weight (said to be in {SHARDS[0]})" in refusal(folder)


def test_a_key_that_the_index_does_not_name(folder):
    edit_index(folder, lambda index: index["weight_map"].pop("model.norm.weight"))
    assert "model.norm.weight" in refusal(folder) and "does not name" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 5, None])
def test_a_path_that_leaves_the_folder(folder, name):
    shutil.copy(folder / SHARDS[0], folder.parent / "outside.safetensors")

    def change(index):
        index["weight_map"] = {k: name if v == SHARDS[0] else v for k, v in index["weight_map"].items()}

    edit_index(folder, change)
    assert refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}, "weight_map": {}}', "\0"]
)
def test_no_index(folder, text):
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_a_wrong_total_size_is_noted(folder, tmp_path):
    edit_index(folder, lambda index: index["metadata"].update(total_size=5))
    assert any("total_size 5" in note for note in run(folder, tmp_path / "out", "hdf5")["notes"])


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "..\\x", ""])
def test_tensor_names_that_are_paths(folder, name):
    (folder / INDEX).unlink()
    for shard in SHARDS[1:]:
        (folder / shard).unlink()
    write_safetensors(folder / SHARDS[0], {name: np.zeros(3, np.float32)})
    assert "refuses the tensor name" in refusal(folder)


# --- the configuration ---


def test_wrong_configuration(folder):
    text = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": 12}, "model.layers.13"),
        ({"num_hidden_layers": 14}, "model.layers.13.enorm"),
        ({"n_routed_experts": 16}, "experts.12"),
        ({"n_routed_experts": 8}, "experts.8"),
        ({"hidden_size": 41}, "[300, 41]"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax"}, "e_score_correction_bias"),
    ):
        (folder / "config.json").write_text(json.dumps(text | change))
        assert said in refusal(folder), change
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder)
    (folder / "config.json").unlink()
    assert "--config" in refusal(folder)


def test_a_transposed_tensor_is_told(folder, tmp_path):
    config = small()
    values = canonical_values(config)
    hub = hub_values(config, values)
    hub["model.layers.0.mlp.up_proj.weight"] = hub["model.layers.0.mlp.up_proj.weight"].T
    assert "its transpose" in refusal(hub_folder(tmp_path / "t", config, hub))


def test_integers_where_weights_belong(folder, tmp_path):
    config = small()
    hub = hub_values(config, canonical_values(config))
    hub["model.norm.weight"] = np.ones(40, np.int64)
    assert "expected a floating-point tensor" in refusal(hub_folder(tmp_path / "i", config, hub))


# --- no weights, several, other formats ---


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no weights found" in refusal(tmp_path / "empty")
    (tmp_path / "text").write_text("hello")
    assert "no weights found" in refusal(tmp_path / "text")
    with pytest.raises(UserError, match="not there"):
        run(tmp_path / "nothing", tmp_path / "out", "hf")


def test_a_sentencepiece_tokenizer_is_not_taken_for_weights(folder, tmp_path):
    """It begins as a MindSpore checkpoint does."""
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02" * 9)
    run(folder, tmp_path / "out", "hdf5")
    assert (tmp_path / "out" / "tokenizer.model").exists()


def test_two_formats_in_one_folder(folder, tmp_path):
    run(folder, tmp_path / "h5", "hdf5")
    shutil.copy(tmp_path / "h5" / "model.h5", folder)
    assert "several formats" in refusal(folder)


class Evil:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["evil in a dict", "evil", "list", "nested", "empty", "empty wrapper", "text"])
def test_pickles_that_are_more_than_tensors(v3, tmp_path, kind):
    import torch

    evil = Evil(tmp_path / "evil")
    contents = {"evil in a dict": {"a": evil}, "evil": evil, "list": [1, 2], "nested": {"a": {"b": 1}}, "empty": {},
                "empty wrapper": {"epoch": 3, "model": {}}, "text": "text"}  # fmt: skip
    torch.save(contents[kind], tmp_path / "x.pt")
    said = refusal(tmp_path / "x.pt", config=str(v3 / "config.json"))
    assert "state_dict" in said and not evil.path.exists()


def test_a_bare_pickle(v3, tmp_path):
    evil = Evil(tmp_path / "evil")
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": evil}))
    assert refusal(tmp_path / "x.pt", config=str(v3 / "config.json"))
    assert not evil.path.exists()


@pytest.mark.parametrize("to", ["hf", "torch", "mindspore", "hdf5", "onnx"])
def test_truncated_files_of_every_format(v3, tmp_path, to):
    run(v3, tmp_path / "in", to)
    (file,) = [path for path in (tmp_path / "in").iterdir() if path.stem == "model"]
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) * 2 // 3, 100, 9):
        file.write_bytes(whole[:length])
        assert refusal(tmp_path / "in", config=str(v3 / "config.json"))


@pytest.mark.parametrize("to", ["hf", "torch", "mindspore", "hdf5", "onnx"])
def test_a_flipped_byte_is_found_in_every_format(v3, tmp_path, to):
    run(v3, tmp_path / "in", to)
    (file,) = [path for path in (tmp_path / "in").iterdir() if path.stem == "model"]
    data = bytearray(file.read_bytes())
    value = canonical_values(small())["model.layers.7.mlp.experts.down_proj"]
    at = data.find(np.ascontiguousarray(value[3]).tobytes())
    assert at > 0
    data[at + 11] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(UserError, match="model.layers.7.mlp.experts.down_proj is not what was written.*damaged"):
        run(tmp_path / "in", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["torch", "mindspore", "hdf5", "onnx"])
def test_flipped_bytes_anywhere_never_end_in_a_traceback(v3, tmp_path, to):
    """Structure damaged at random: a message, or the weights as they were."""
    run(v3, tmp_path / "in", to)
    (file,) = [path for path in (tmp_path / "in").iterdir() if path.stem == "model"]
    whole, generator = file.read_bytes(), np.random.default_rng(1)
    head = 12_000 if to != "torch" else len(whole)  # a zip has its structure at its end
    for _ in range(25):
        data = bytearray(whole)
        data[int(generator.integers(head - 12_000, head))] ^= int(generator.integers(1, 256))
        file.write_bytes(bytes(data))
        try:
            with open_weights(tmp_path / "in") as weights:
                for tensor in weights.tensors.values():
                    tensor.array()
        except UserError:
            pass


def test_onnx_external_data_must_stay_in_its_folder(v3, tmp_path):
    run(v3, tmp_path / "in", "onnx", max_file=1000)
    shutil.copy(tmp_path / "in" / "model.onnx.data", tmp_path / "model.onnx.dat!")
    model = (tmp_path / "in" / "model.onnx").read_bytes()
    (tmp_path / "in" / "model.onnx").write_bytes(model.replace(b"model.onnx.data", b"../model.onnx.d", 1))
    assert "plain file names" in refusal(tmp_path / "in")
    (tmp_path / "in" / "model.onnx").write_bytes(model)
    (tmp_path / "in" / "model.onnx.data").unlink()
    assert "model.onnx.data" in refusal(tmp_path / "in")


def test_hdf5_links_out_of_the_file_are_not_followed(v3, tmp_path):
    import h5py

    run(v3, tmp_path / "in", "hdf5")
    run(v3, tmp_path / "other", "hdf5")
    with h5py.File(tmp_path / "in" / "model.h5", "r+") as file:
        del file["params/model.norm.weight"]
        file["params/model.norm.weight"] = h5py.ExternalLink("../other/model.h5", "params/model.norm.weight")
    assert "model.norm.weight" in refusal(tmp_path / "in")


# --- destinations ---


def test_a_destination_that_is_there(v3, tmp_path):
    (tmp_path / "out").mkdir()
    run(v3, tmp_path / "out", "hdf5")  # an empty folder may be taken
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="there already"):
        run(v3, tmp_path / "out", "torch")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    run(v3, tmp_path / "out", "torch", overwrite=True)
    assert not (tmp_path / "out" / "model.h5").exists() and (tmp_path / "out" / "model.pt").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        run(v3, tmp_path / "file", "hdf5", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_overwriting_with_damaged_weights_keeps_the_old(folder, tmp_path):
    run(folder, tmp_path / "out", "hdf5")
    (folder / SHARDS[1]).unlink()
    with pytest.raises(UserError):
        run(folder, tmp_path / "out", "hdf5", overwrite=True)
    assert (tmp_path / "out" / "model.h5").exists()


def test_source_and_destination_must_lie_apart(folder):
    for target in (folder, folder / "sub", folder.parent):
        with pytest.raises(UserError, match="apart"):
            run(folder, target, "hdf5", overwrite=True)


def test_unwritable_destination(v3):
    with pytest.raises(UserError, match="/proc/x"):
        run(v3, Path("/proc/x/y"), "hdf5")


def command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "weight_sync", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_command_line(v3, tmp_path):
    done = command("convert", v3, tmp_path / "out.h5", "--verify", "--quiet")
    assert done.returncode == 0 and "no value was rounded" in done.stdout and "verified" in done.stdout, done
    assert (tmp_path / "out.h5" / "model.h5").exists()  # DST is a folder, taken literally
    done = command("convert", tmp_path / "out.h5", tmp_path / "back")
    assert done.returncode == 0 and list((tmp_path / "back").glob("*.safetensors"))
    for arguments in (
        ("convert", tmp_path / "missing", tmp_path / "x"),
        ("convert", v3, tmp_path / "x", "--max-memory", "much"),
        ("convert", v3, tmp_path / "x", "--to", "hdf5", "--dtype", "fp8"),
        ("convert", v3, tmp_path / "x", "--to", "hdf5", "--mindspore-file", "ckpt"),
        ("convert", v3, tmp_path / "x", "--scale-format", "ue8m0"),
        ("convert", v3, tmp_path / "x", "--to", "zip"),
        ("convers",),
        (),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "error" in done.stderr, (arguments, done)
    for arguments in (("--help",), ("convert", "--help")):
        assert command(*arguments).returncode == 0


@pytest.mark.parametrize(
    "text, size",
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5kB", 1500), ("7", 7), ("1e9", 10**9), ("3T", 3 * 10**12)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1XB", "1.2.3", "nan"])
def test_no_sizes(text):
    with pytest.raises(UserError, match="no size"):
        parse_size(text)
