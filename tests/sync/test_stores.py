"""The stores one by one: files written by hand or by each format's own library, and what must be refused in them."""

import binascii
import json
import os
from itertools import product
from math import prod
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, canonical_values, hub_folder, hub_values, small, write_safetensors

from shared_ops.errors import UserError
from weight_sync.canonical import open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options
from weight_sync.stores import hdf5, mindspore, onnx, safetensors
from weight_sync.stores.base import Rows, TensorPlan, split_into_files
from weight_sync.stores.detect import format_at, format_of, open_store
from weight_sync.stores.protobuf import Malformed, encode_varint, fields, number, varints

F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)
GIB = 1 << 30


def content(stored, start: int = 0, stop: int | None = None) -> bytes:
    """The bytes [start, stop) of a stored tensor."""
    return b"".join(piece.tobytes() for piece in stored.pieces(start, stored.nbytes if stop is None else stop))


def refused(read, *said: str) -> None:
    """Reading must end in one line that says all this."""
    with pytest.raises(UserError) as error:
        read()
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in said), error.value


def tensor_of(name: str, nbytes: int) -> TensorPlan:
    return TensorPlan(name, (nbytes,), U8)


# --- pieces of tensors, groups of tensors ---


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (2, 2, 3, 2), (3, 1), (1,), ()])
def test_any_range_of_bytes_of_rows(shape):
    values = np.arange(prod(shape), dtype=np.int32).reshape(shape) * 0x01020305
    read: list = []

    def rows(index):
        read.append(index)
        return values[index]

    stored, whole = Rows("x", shape, values.dtype, rows), values.tobytes()
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert content(stored, start, stop) == whole[start:stop], (start, stop)
    if len(shape) > 1:  # of a matrix, only the rows that are asked for
        read.clear()
        content(stored, len(whole) - 1)
        (index,) = read
        assert index[-1].start == shape[-2] - 1


@pytest.mark.parametrize(
    "sizes, groups",
    [
        ([40, 40, 40], [[40, 40], [40]]),
        ([50, 50, 50], [[50, 50], [50]]),
        ([99, 2], [[99], [2]]),
        ([10, 500, 10], [[10], [500], [10]]),
        ([100, 0, 1], [[100, 0], [1]]),
        ([0, 0], [[0, 0]]),
        ([], []),
    ],
)
def test_files_are_filled_up_to_their_limit_and_never_beyond(sizes, groups):
    tensors = [tensor_of(f"t{i}", size) for i, size in enumerate(sizes)]
    found = split_into_files(tensors, 100)
    assert [[tensor.nbytes for tensor in group] for group in found] == groups
    assert [tensor for group in found for tensor in group] == tensors


def test_what_else_a_file_holds_counts():
    found = split_into_files([tensor_of(f"t{i}", 40) for i in range(5)], 100, lambda tensor: 10)
    assert [len(group) for group in found] == [2, 2, 1]


# --- protobuf ---

NUMBERS = [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (16383, "ff7f"), (16384, "808001"),
           (2**28, "8080808001"), (2**31, "8080808008"), (2**63 - 1, "ffffffffffffffff7f")]  # fmt: skip


@pytest.mark.parametrize("value, encoded", NUMBERS)
def test_numbers(value, encoded):
    assert encode_varint(value).hex() == encoded
    data = np.frombuffer(b"." + number(5, value) + b"\x0a\x01x", np.uint8)
    field, after = fields(data, 1, len(data))
    assert (field.number, field.value, varints(data, field)) == (5, value, [value])
    assert (after.number, after.start, after.stop) == (1, len(data) - 1, len(data))


def test_packed_numbers():
    """One field with all of them, as protobuf packs repeated integers."""
    packed = bytes.fromhex("".join(encoded for _, encoded in NUMBERS))
    data = np.frombuffer(bytes([0x0A, len(packed)]) + packed, np.uint8)
    (field,) = fields(data, 0, len(data))
    assert varints(data, field) == [value for value, _ in NUMBERS]


@pytest.mark.parametrize("damaged", ["08", "0880", "08" + "ff" * 10, "0a05616263", "0b", "0801ff", "00", "0901020304"])
def test_what_is_no_message(damaged):
    data = np.frombuffer(bytes.fromhex(damaged), np.uint8)
    with pytest.raises(Malformed):
        list(fields(data, 0, len(data)))


# --- MindSpore ---


def length(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value % 128 + 128]), value // 128
    return out + bytes([value])


def message(field: int, inside: bytes) -> bytes:
    return bytes([field * 8 + 2]) + length(len(inside)) + inside


def ckpt_value(tag: str, shape, raw: bytes, kind: str = "Float32") -> bytes:
    dims = b"".join(b"\x08" + length(n) for n in shape)
    return message(1, message(1, tag.encode()) + message(2, dims + message(2, kind.encode()) + message(3, raw)))


def test_a_tensor_in_several_values(tmp_path):
    """MindSpore cuts large tensors: the tag and the shape of the whole, a part of the bytes."""
    whole = np.arange(30, dtype=np.float32)
    raw = whole.tobytes()
    cut = [ckpt_value("w", (5, 6), part) for part in (raw[:40], raw[40:44], raw[44:])]
    other = ckpt_value("v", (2,), b"ABCDEFGH")
    (tmp_path / "x.ckpt").write_bytes(other + b"".join(cut) + ckpt_value("s", (0,), b"wxyz"))
    read = mindspore.read_file(tmp_path / "x.ckpt")
    assert list(read) == ["v", "w", "s"] and [t.shape for t in read.values()] == [(2,), (5, 6), ()]
    for start in range(0, 121):
        for stop in (start, start + 1, start + 5, 41, 44, 45, 120):
            assert content(read["w"], start, min(stop, 120)) == raw[start : min(stop, 120)], (start, stop)
    assert content(read["v"]) == b"ABCDEFGH" and content(read["s"]) == b"wxyz"


def test_the_checksum_of_a_checkpoint(tmp_path):
    body = ckpt_value("w", (3,), b"0123456789ab")
    end = b"crc_num" + binascii.crc32(body).to_bytes(10, "big")
    path = tmp_path / "x.ckpt"
    path.write_bytes(body + end)
    assert content(mindspore.read_file(path)["w"]) == b"0123456789ab"
    at = body.index(b"5")
    path.write_bytes(body[:at] + b"4" + body[at + 1 :] + end)
    refused(lambda: mindspore.read_file(path), str(path), "checksum")


def test_checkpoints_that_are_damaged(tmp_path):
    path = tmp_path / "x.ckpt"
    a, b = ckpt_value("a", (1,), b"1234"), ckpt_value("b", (1,), b"5678")
    path.write_bytes(a + b + a)
    refused(lambda: mindspore.read_file(path), str(path), "a is there twice")
    for wrong in (ckpt_value("w", (3,), b"1234"), ckpt_value("w", (1,), b"12345678"), ckpt_value("w", (1,), b"")):
        path.write_bytes(a + wrong)
        refused(lambda: mindspore.read_file(path), str(path), "w has not the bytes of Float32")
    path.write_bytes(a + ckpt_value("w", (1,), b"1234", "Float31"))
    refused(lambda: mindspore.read_file(path), str(path), "w has the type 'Float31'")


def ends(file) -> int:
    """How far into a planned file its tensors reach."""
    return max(offset + size for offset, size in file.locate(Path()).values())


def test_no_checkpoint_is_of_two_gib():
    """MindSpore cannot load one (protobuf's limit), whatever limit was asked for. Nothing is written here."""
    large = [tensor_of("small", 8), TensorPlan("large", (3, 1 << 28), F32)]
    files, _ = mindspore.plan(large, 5 * GIB)
    assert [file.name for file in files] == ["model.safetensors"]
    assert [file.name for file in mindspore.plan(large, GIB)[0]][0] == "model-00001-of-00002.safetensors"
    refused(lambda: mindspore.plan(large, 5 * GIB, "ckpt"), "large has 3221225472 bytes", "--mindspore-file")
    files, beside = mindspore.plan([tensor_of(f"t{i}", GIB * 3 // 4) for i in range(4)], 50 * GIB)
    assert [file.name for file in files] == ["model-00001-of-00002.ckpt", "model-00002-of-00002.ckpt"] and not beside
    exact = mindspore.LARGEST_CKPT // 2
    for tensors in ([tensor_of("a", exact), tensor_of("b", exact)], [tensor_of("a", 2 * exact)]):
        for file in mindspore.plan(tensors, 50 * GIB)[0]:  # a byte more than fits, with names and shapes
            assert file.name.endswith(".safetensors") or ends(file) <= mindspore.LARGEST_CKPT < 2 * GIB


def test_checkpoints_keep_the_asked_size_with_names_and_shapes(tmp_path):
    tensors = [tensor_of("a long name of a tensor " * 2 + str(i), 50) for i in range(20)]
    files, _ = mindspore.plan(tensors, 1000, "ckpt")
    read = {}
    for file in files:
        file.create(tmp_path / file.name)
        assert (tmp_path / file.name).stat().st_size <= 1000
        read |= mindspore.read_file(tmp_path / file.name)
    assert list(read) == [tensor.name for tensor in tensors] and len(files) == 3


def test_safetensors_for_mindspore_say_so(tmp_path):
    """As mindspore.save_checkpoint(format="safetensors") writes it."""
    (file,), _ = mindspore.plan([tensor_of("w", 8)], GIB, "safetensors")
    file.create(tmp_path / file.name)
    head = (tmp_path / file.name).read_bytes()
    header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    assert header["__metadata__"] == {"format": "ms"}


# --- ONNX ---


@pytest.fixture
def model(v3, tmp_path):
    """V3 as an ONNX model with its data beside it."""
    convert(v3, tmp_path / "onnx", Options(to="onnx", quiet=True, sync=False, max_file=1000))
    return tmp_path / "onnx" / "model.onnx"


def initializer(name: str, values, kind: int = 1, raw: bool = True):
    from onnx import helper

    values = np.asarray(values)
    return helper.make_tensor(name, kind, values.shape, values.tobytes() if raw else values.ravel().tolist(), raw)


def save(path: Path, *initializers) -> Path:
    """A model of these initialisers, by the onnx package."""
    from onnx import helper

    graph = helper.make_graph([], "g", [], [], initializer=initializers)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def external(name: str, shape, **facts) -> object:
    from onnx import TensorProto

    found = TensorProto(name=name, dims=shape, data_type=1, data_location=TensorProto.EXTERNAL)
    for key, value in facts.items():
        found.external_data.add(key=key, value=str(value))
    return found


def test_external_data_of_onnx(tmp_path):
    (tmp_path / "d").write_bytes(bytes(range(64)))
    path = save(tmp_path / "x.onnx", external("a", [2, 3], location="d", offset=40, length=24),
                external("b", [4], location="./d"))  # fmt: skip
    tensors, files, _ = onnx.read_file(path)
    assert content(tensors["a"]) == bytes(range(40, 64)) and content(tensors["b"]) == bytes(range(16))
    assert files == [path, tmp_path / "d"]


@pytest.mark.parametrize(
    "facts",
    [
        {"offset": 44, "length": 24},
        {"offset": 41, "length": 24},
        {"offset": 64, "length": 24},
        {"offset": 1 << 62, "length": 24},
        {"offset": -8, "length": 24},
        {"offset": 0, "length": 20},
        {"offset": 0, "length": 28},
        {"offset": 48},
        {"offset": "x"},
        {"length": "24.5"},
    ],
)
def test_external_data_that_is_not_there(tmp_path, facts):
    (tmp_path / "d").write_bytes(bytes(64))
    path = save(tmp_path / "x.onnx", external("a", [2, 3], location="d", **facts))
    refused(lambda: onnx.read_file(path), str(tmp_path / "d"), "has no 24 bytes at", "for a")


@pytest.mark.parametrize("location", ["../d", "/etc/hostname", "sub/d", "..", "", "./../d"])
def test_external_data_lies_beside_its_model(tmp_path, location):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "in" / "sub"):
        (folder / "d").write_bytes(bytes(64))
    path = save(tmp_path / "in" / "x.onnx", external("a", [2, 3], location=location))
    refused(lambda: onnx.read_file(path), str(path), "only plain file names")


def test_external_data_begins_at_pages():
    """The format's advice: a multiple of 4096, so that it can be mapped."""
    (data,), _ = onnx.plan([tensor_of(f"t{i}", size) for i, size in enumerate((5, 4096, 4097, 0, 1))], 100, {})
    assert [offset for offset, _ in data.locate(Path()).values()] == [0, 4096, 8192, 16384, 16384]


def test_a_truncated_data_file_beside_a_model(model):
    data = model.with_name("model.onnx.data")
    os.truncate(data, data.stat().st_size - 1)
    refused(lambda: open_weights(model.parent), str(data), "truncated or damaged")


def test_initialisers_that_are_damaged(tmp_path):
    a, b = initializer("a", np.ones(3, np.float32)), initializer("b", np.zeros(2, np.float32))
    path = save(tmp_path / "x.onnx", a, b, a)
    refused(lambda: onnx.read_file(path), str(path), "the initialiser a is there twice")
    b.dims[0] = 3
    refused(lambda: onnx.read_file(save(path, a, b)), str(path), "b has not the 12 bytes")


def test_constants_that_are_no_raw_bytes_may_lie_beside_weights(v3, tmp_path):
    """Exporters keep a graph's own constants as int32_data, int64_data, float_data; bf16 weights may come so too."""
    config = json.loads((v3 / "config.json").read_bytes())
    values = canonical_values(small())
    kinds = {"bfloat16": 16, "float32": 1}
    weights = [initializer(name, value, kinds[value.dtype.name]) for name, value in values.items()]
    constants = [initializer("axes", np.array([1, 2], np.int32), 6, raw=False),
                 initializer("shape", np.array([3], np.int64), 7, raw=False),
                 initializer("eps", np.array([1e-6], np.float32), 1, raw=False)]  # fmt: skip
    path = save(tmp_path / "x.onnx", *constants, *weights)
    with open_weights(path, v3 / "config.json") as opened:
        assert {name for name, _ in opened.ignored} == {"axes", "shape", "eps"}
        for name, value in values.items():
            assert opened.tensors[name].array().tobytes() == value.tobytes(), name
    norm = np.zeros(config["hidden_size"], np.float32)
    typed = [w for w in weights if w.name != "model.norm.weight"] + [initializer("model.norm.weight", norm, 16, False)]
    path = save(tmp_path / "typed.onnx", *typed)
    options = Options(to="hdf5", quiet=True, sync=False, config=str(v3 / "config.json"))
    refused(lambda: convert(path, tmp_path / "out", options), str(path), "model.norm.weight", "int32_data", "raw_data")
    assert not (tmp_path / "out").exists()


def test_no_model_is_of_two_gib():
    """protobuf's limit, whatever limit was asked for."""
    for sizes in ([GIB] * 3, [3 * GIB], [2 * GIB - 1], [GIB, GIB]):
        files, beside = onnx.plan([tensor_of(f"t{i}", size) for i, size in enumerate(sizes)], 50 * GIB, {})
        assert [file.name for file in files] == ["model.onnx.data"] and list(beside) == ["model.onnx"]
        assert ends(files[0]) >= sum(sizes)
    (file,), beside = onnx.plan([tensor_of("t", GIB)], 50 * GIB, {})
    assert file.name == "model.onnx" and not beside


# --- safetensors ---


def write_header(path: Path, header: str, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
    return path


def facts(start: int, stop: int) -> str:
    return f'{{"dtype":"F32","shape":[2],"data_offsets":[{start},{stop}]}}'


def test_a_header_in_any_order(tmp_path):
    header = f'{{"c":{facts(16, 24)},"a":{facts(0, 8)},"b":{facts(8, 16)}}}'
    read = safetensors.read_file(write_header(tmp_path / "x", header, b"AAAAaaaaBBBBbbbbCCCCcccc"))
    assert {name: content(tensor) for name, tensor in read.items()} == {
        "a": b"AAAAaaaa", "b": b"BBBBbbbb", "c": b"CCCCcccc"
    }  # fmt: skip


def test_the_header_is_padded_to_eight_bytes(tmp_path):
    """The format's rule, so that tensors of any dtype are aligned in a mapped file."""
    for more in range(8):
        (file,), _ = safetensors.plan([TensorPlan("n" * (more + 1), (2,), F32)], 100, {"format": "pt"})
        file.create(tmp_path / "x")
        ((offset, _),) = file.locate(tmp_path / "x").values()
        assert offset % 8 == 0 and (tmp_path / "x").stat().st_size == offset + 8
        assert list(safetensors.read_file(tmp_path / "x")) == ["n" * (more + 1)]


def test_every_byte_belongs_to_one_tensor(tmp_path):
    path = tmp_path / "x"
    for spans, size in (
        (((0, 8), (0, 8)), 8),  # twice the same
        (((0, 8), (4, 12)), 12),
        (((0, 8), (12, 20)), 20),  # a gap
        (((4, 12), (12, 20)), 20),
        (((0, 8), (8, 16)), 20),
        (((0, 8), (8, 16)), 12),
    ):
        header = ",".join(f'"{name}":{facts(*span)}' for name, span in zip("ab", spans))
        write_header(path, "{" + header + "}", bytes(size))
        refused(lambda: safetensors.read_file(path), str(path), "damaged or incomplete")


def test_a_key_that_is_twice_in_a_header(tmp_path):
    path = write_header(tmp_path / "x", f'{{"a":{facts(0, 8)},"a":{facts(0, 8)}}}', bytes(8))
    refused(lambda: safetensors.read_file(path), str(path), "a is there twice")


def test_a_file_that_begins_almost_like_safetensors(tmp_path):
    """The ninth byte is a brace, but the eight before it are no length of a header in this file."""
    (tmp_path / "f").write_text("function{ return 1 }")
    assert format_of(tmp_path / "f") is None
    refused(lambda: format_at(tmp_path), "no weights found")
    head = (600 << 20).to_bytes(8, "little") + b"{"
    assert not safetensors.is_safetensors(head, 1 << 40)  # no header is of 600 MiB
    assert safetensors.is_safetensors((100).to_bytes(8, "little") + b"{", 1 << 40)
    assert not safetensors.is_safetensors((100).to_bytes(8, "little"), 1 << 40)


# --- HDF5 ---


def read_hdf5(path: Path) -> dict[str, bytes]:
    store = hdf5.read_files(path, [path], safetensors.merge)
    try:
        return {name: content(tensor) for name, tensor in store.tensors.items()}
    finally:
        store.close()


def test_hdf5_data_in_other_files_is_not_followed(tmp_path):
    values = np.arange(6, dtype=np.float32)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = values
    (tmp_path / "raw").write_bytes(values.tobytes())
    layout = h5py.VirtualLayout((6,), np.float32)
    layout[:] = h5py.VirtualSource("other.h5", "x", (6,))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("params/x", layout)
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("params/x", (6,), np.float32, external=[(str(tmp_path / "raw"), 0, 24)])
    for name in ("virtual.h5", "external.h5"):
        refused(lambda: read_hdf5(tmp_path / name), str(tmp_path / name), "params/x", "another file")


@pytest.mark.parametrize("chunks", [None, (2,)])
@pytest.mark.parametrize(
    "stored, declared",
    [(">f4", None), (">u2", "bfloat16"), ("u1", "bfloat16"), ("u4", "bfloat16"), ("u2", "float32"), ("u8", "float32")],
)
def test_hdf5_dtypes_that_are_not_as_declared(tmp_path, stored, declared, chunks):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("params/x", data=np.arange(6, dtype=stored), chunks=chunks)
        if declared:
            data.attrs["dtype"] = declared
    refused(lambda: read_hdf5(path), str(path), "params/x is declared", "but holds")


def test_hdf5_as_other_programs_write_it(tmp_path):
    """Chunks, compression, no group, an empty dataset, one that was never written."""
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=values, chunks=(3, 2), compression="gzip")
        file.create_dataset("params/plain", data=values)
        file.create_dataset("unwritten", (2, 2), np.float32, fillvalue=2)
        file.create_dataset("empty", (0, 5), np.float32)
        file.create_dataset("bf16", data=np.arange(3, dtype=np.uint16)).attrs["dtype"] = "bfloat16"
    assert read_hdf5(tmp_path / "x.h5") == {
        "chunked": values.tobytes(), "plain": values.tobytes(), "empty": b"", "bf16": bytes((0, 0, 1, 0, 2, 0)),
        "unwritten": np.full(4, 2, np.float32).tobytes(),
    }  # fmt: skip


def test_an_hdf5_file_that_shrinks_while_it_is_opened(tmp_path, monkeypatch):
    """HDF5 itself refuses files that were cut before; its own address of the data is believed no further."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.zeros(9, np.float32)
        file["b"] = np.arange(9000, dtype=np.float32)
    map_file = hdf5.map_file

    def cut_and_map(path: Path) -> np.ndarray:
        os.truncate(path, path.stat().st_size - 4)
        return map_file(path)

    monkeypatch.setattr(hdf5, "map_file", cut_and_map)
    refused(lambda: read_hdf5(path), str(path), "b lies beyond the end of the file")


def test_hdf5_that_holds_a_tensor_twice(tmp_path):
    """NAME and params/NAME are the same tensor."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["w"] = np.ones(3, np.float32)
        file["params/w"] = np.zeros(3, np.float32)
    refused(lambda: read_hdf5(path), str(path), "w", "twice")


# --- PyTorch ---


def test_which_state_dict_of_several_is_not_guessed(tmp_path):
    import torch

    from weight_sync.stores.torch import read_file

    path = tmp_path / "x.pt"
    for wrapper in ("state_dict", "model", "module", "params"):
        torch.save({wrapper: {"w": torch.ones(2)}, "epoch": 3}, path)
        assert content(read_file(path)["w"]) == np.ones(2, np.float32).tobytes()
    torch.save({"state_dict": {"w": torch.ones(2)}, "model": {"w": torch.zeros(2)}}, path)
    refused(lambda: read_file(path), str(path), "'state_dict' (dict)", "'model' (dict)")


def test_views_in_a_pytorch_file(tmp_path):
    import torch

    from weight_sync.stores.torch import read_file

    x = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    views = {"whole": x, "transposed": x.transpose(0, 2), "columns": x[:, 1:, ::2], "scalar": x[1, 2, 3],
             "expanded": x[:, :1].expand(2, 5, 4), "empty": x[:0], "rows": x[1]}  # fmt: skip
    torch.save(views, tmp_path / "x.pt")
    read = read_file(tmp_path / "x.pt")
    for name, view in views.items():
        assert read[name].shape == tuple(view.shape) and read[name].dtype == BF16
        assert content(read[name]) == view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
    # read row by row: as a whole it could be far larger than the file
    assert isinstance(read["expanded"], Rows) and isinstance(read["transposed"], Rows)


def test_pytorch_tensors_without_plain_bytes(tmp_path):
    import torch

    from weight_sync.stores.torch import read_file

    path = tmp_path / "x.pt"
    torch.save({"ok": torch.ones(2), "w": torch.empty(2, 3, device="meta")}, path)
    refused(lambda: read_file(path), str(path), "w ")
    for view in (torch._neg_view(torch.arange(6.0).reshape(2, 3)), torch._neg_view(torch.arange(6.0).reshape(2, 3)).T):
        torch.save({"w": view}, path)
        values = -np.arange(6, dtype=np.float32).reshape(2, 3)
        assert content(read_file(path)["w"]) == (values if view.shape == (2, 3) else values.T).tobytes()


# --- which format ---


def test_onnx_data_that_looks_like_another_format(model, tmp_path):
    """The first weights happen to be the bytes that HDF5 files begin with."""
    data = model.with_name("model.onnx.data")
    for magic, kind in ((hdf5.MAGIC, "hdf5"), (b"PK\x03\x04", "torch"), (b"\x80\x02", "torch")):
        with open(data, "r+b") as file:
            file.write(magic)
        assert format_of(data) == kind
        store = open_store(model.parent)
        assert store.format == "onnx" and set(store.tensors) == set(canonical_values(small()))
    with h5py.File(model.with_name("weights.h5"), "w") as file:  # no data of the model
        file["x"] = np.ones(3, np.float32)
    refused(lambda: open_store(model.parent), "several formats", "weights.h5")


def test_two_onnx_models_in_a_folder(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"{name}.onnx", initializer(name, np.ones(3, np.float32)))
    refused(lambda: open_store(tmp_path), str(tmp_path), "several ONNX models (a.onnx, b.onnx)")
    assert set(open_store(tmp_path / "b.onnx").tensors) == {"b"}


def test_hidden_files_are_no_weights(tmp_path):
    """macOS leaves ._NAME files on foreign disks, editors and downloads others."""
    write_safetensors(tmp_path / "model.safetensors", {"w": np.ones(3, np.float32)})
    write_safetensors(tmp_path / ".model.safetensors", {"old": np.ones(3, np.float32)})
    (tmp_path / "._model.safetensors").write_bytes(b"\0\5\x16\7Mac OS X")
    (tmp_path / ".x.h5").write_bytes(hdf5.MAGIC)
    store = open_store(tmp_path)
    assert (store.format, set(store.tensors), store.files) == ("hf", {"w"}, [tmp_path / "model.safetensors"])


@pytest.mark.parametrize("to", ["hf", "torch", "hdf5", "mindspore", "onnx"])
def test_a_name_with_a_line_break_is_told_in_one_line(v3, tmp_path, to):
    import torch

    name, value = "model.layers.0.a\nb.weight", np.ones(3, np.float32)
    path = tmp_path / "x"
    if to == "hf":
        write_safetensors(path, {name: value})
    elif to == "torch":
        torch.save({name: torch.ones(3)}, path)
    elif to == "hdf5":
        with h5py.File(path, "w") as file:
            file[name] = value
    elif to == "onnx":
        save(tmp_path / "x.onnx", initializer(name, value)).rename(path)
    else:
        path.write_bytes(ckpt_value(name, (3,), value.tobytes()))
    refused(lambda: open_weights(path, v3 / "config.json"), str(path))


# --- scales ---

E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def with_scales(folder: Path, name: str, value, scales, hidden: int = 64) -> Path:
    """A hub folder in which one tensor is quantised."""
    config = small("tiny_v2", num_hidden_layers=3, hidden_size=hidden)
    hub = hub_values(config, canonical_values(config))
    hub |= {name: value, name + "_scale_inv": scales}
    return hub_folder(folder, config, hub)


def test_scales_of_packed_fp4(tmp_path):
    """One UE8M0 byte per 32 values of a row, nothing else."""
    packed = np.full((56, 32), 0x21, np.uint8)  # 0.5, 1
    for scales in (np.full((56, 2), 128, np.uint8), np.full((56, 2), 128, np.uint8).view(E8M0)):
        with open_weights(with_scales(tmp_path / scales.dtype.name, UP, packed, scales)) as weights:
            assert weights.tensors[UP].array().tolist() == [[1.0, 2.0] * 32] * 56
    wrong = [np.full(shape, 128, np.uint8) for shape in ((56, 1), (56, 4), (2, 56), (112, 1), (112,), (1, 1))]
    wrong += [np.ones((56, 2), dtype) for dtype in (np.float32, np.float16, np.int64)]
    for i, scales in enumerate(wrong):
        folder = with_scales(tmp_path / str(i), UP, packed, scales)
        refused(lambda: open_weights(folder), str(folder), UP + "_scale_inv", "one UE8M0 scale byte per 32", "[56, 2]")
    folder = with_scales(tmp_path / "40", UP, packed[:, :20], np.full((56, 1), 128, np.uint8), hidden=40)
    refused(lambda: open_weights(folder), str(folder), UP + "_scale_inv", "one UE8M0 scale byte per 32")


def test_scales_of_what_is_no_matrix(tmp_path):
    values = (np.zeros(32, np.int8), np.zeros(64, np.uint8).view(E4M3), np.ones(64, BF16))
    for i, (value, scales) in enumerate(product(values, (np.full(2, 127, np.uint8), np.ones(1, np.float32)))):
        folder = with_scales(tmp_path / str(i), NORM, value, scales)
        refused(lambda: open_weights(folder), str(folder), NORM + " has scales, but only matrices")


def test_scales_of_fp8_are_no_integers(tmp_path):
    folder = with_scales(tmp_path / "in", UP, np.zeros((56, 64), np.uint8).view(E4M3), np.ones((1, 1), np.int64))
    refused(lambda: open_weights(folder), str(folder), UP + "_scale_inv", "expected fp32 or UE8M0")


@pytest.mark.parametrize("scale, code, fits", [(0, 0x01, False), (0, 0x38, True), (246, 0x7E, True), (2, 0x01, False),
                                               (3, 0x01, True)])  # fmt: skip
def test_scales_with_which_bf16_would_not_be_exact(tmp_path, scale, code, fits):
    """UE8M0 scales promise bf16: E4M3's 2**-9 times 2**-125 (byte 2) is half of bf16's smallest number."""
    codes = np.zeros((56, 64), np.uint8)
    codes[50, 60] = code
    folder = with_scales(tmp_path / "in", UP, codes.view(E4M3), np.full((1, 1), scale, np.uint8))
    with open_weights(folder) as weights:
        if fits:
            wanted = float(np.uint8(code).view(E4M3)) * 2.0 ** (scale - 127)
            array = weights.tensors[UP].array()
            assert array.dtype == BF16 and float(array[50, 60]) == wanted and np.count_nonzero(array) == 1
        else:
            refused(lambda: weights.tensors[UP].array(), UP + "_scale_inv", "extreme")
