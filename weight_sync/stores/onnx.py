"""ONNX models: weights as the initialisers of a graph. The onnx package is not needed.

    ModelProto { ir_version = 1; producer_name = 2; graph = 7; opset_import = 8; metadata_props = 14; }
    GraphProto { node = 1; name = 2; initializer = 5; input = 11; output = 12; }
    TensorProto { dims = 1; data_type = 2; float_data = 4; name = 8; raw_data = 9; double_data = 10; external_data = 13;
                  data_location = 14; }   little endian

An exported graph (torch_proto.export) is read as well: its initialisers that are no parameters are left out. Weights
beyond what protobuf can hold lie in one file beside the model.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from shared_ops.errors import UserError
from weight_sync import dtypes
from weight_sync.stores.base import HeadedFile, Mapped, Span, Stored, TensorPlan, check_name, inside, map_file
from weight_sync.stores.protobuf import (
    DELIMITED,
    VARINT,
    Malformed,
    delimited,
    fields,
    number,
    opening,
    text,
    varints,
)  # fmt: skip

FILE, DATA = "model.onnx", "model.onnx.data"
LARGEST_MODEL = (2 << 30) - (1 << 20)
_ALIGN = 4096
_RAW, _FLOAT_DATA, _DOUBLE_DATA = 9, 4, 10
_TYPED = {5: "int32_data", 6: "string_data", 7: "int64_data", 11: "uint64_data"}


def is_model(head: bytes) -> bool:
    """Whether a file's first bytes are those of a ModelProto: ir_version, then another known field."""
    return (
        len(head) > 3
        and head[0] == 0x08
        and 0 < head[1] < 0x40
        and head[2] in (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)
    )


def read_file(path: Path) -> tuple[dict[str, Stored], list[Path], dict[str, str]]:
    """(initialisers, all files that were opened, the model's metadata)."""
    data = map_file(path)
    mapped: dict[str, np.ndarray] = {}
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    graphs = 0
    try:
        for part in fields(data, 0, len(data)):
            if part.number == 7 and part.wire == DELIMITED:
                graphs += 1
                for field in fields(data, part.start, part.stop):
                    if field.number == 5 and field.wire == DELIMITED:
                        tensor = _tensor(path, data, field, mapped)
                        if tensor.name in tensors:
                            raise UserError(f"{path}: the initialiser {tensor.name} is there twice")
                        tensors[tensor.name] = tensor
            elif part.number == 14 and part.wire == DELIMITED:
                key, value = _pair(data, part)
                metadata[key] = value
    except Malformed as error:
        raise UserError(f"{path}: cannot be read as an ONNX model ({error}): it is truncated or damaged") from None
    if graphs != 1:
        raise UserError(f"{path}: holds {graphs} graphs, expected an ONNX model with one: it is truncated or damaged")
    return tensors, [path, *(path.parent / name for name in mapped)], metadata


def _tensor(path: Path, data: np.ndarray, message, mapped: dict[str, np.ndarray]) -> Stored:
    name, shape, kind, spans, external, elsewhere = "", [], 0, [], {}, False
    typed = ""
    for field in fields(data, message.start, message.stop):
        if field.number == 1:
            shape += varints(data, field)
        elif field.number == 2 and field.wire == VARINT:
            kind = field.value
        elif field.number == 8:
            name = text(data, field)
        elif field.number in (_RAW, _FLOAT_DATA, _DOUBLE_DATA) and field.stop > field.start:
            spans.append((field.start, field.stop - field.start))
        elif field.number in _TYPED:
            typed = _TYPED[field.number]
        elif field.number == 13:
            key, value = _pair(data, field)
            external[key] = value
        elif field.number == 14 and field.wire == VARINT:
            elsewhere = field.value == 1
    check_name(name, path)
    try:
        dtype = dtypes.from_onnx(kind)
    except KeyError:
        raise UserError(
            f"{path}: the initialiser {name} has the data type {kind}, which is no dtype of weights"
        ) from None
    nbytes = prod(shape) * dtype.itemsize
    if elsewhere:
        data, spans = _external(path, name, external, nbytes, mapped)
    elif typed and not spans:
        return _Typed(name, tuple(shape), dtype, path, typed)
    if sum(length for _, length in spans) != nbytes:
        raise UserError(
            f"{path}: the initialiser {name} has not the {nbytes} bytes of its shape {shape}: it is damaged"
        )
    return Mapped(name, shape, dtype, data, spans)


class _Typed(Stored):
    """A constant that is not stored as raw bytes: fine as long as it is no weight."""

    __slots__ = ("path", "typed")

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype, path: Path, typed: str):
        super().__init__(name, shape, dtype)
        self.path, self.typed = path, typed

    def pieces(self, start: int, stop: int):
        raise UserError(f"{self.path}: {self.name} is stored as {self.typed}; export the model with raw_data")


def _external(
    path: Path, name: str, external: dict[str, str], nbytes: int, mapped: dict[str, np.ndarray]
) -> tuple[np.ndarray, list[Span]]:
    location = external.get("location", "")
    file = inside(path.parent, location.removeprefix("./"), path)
    if not file.is_file():
        raise UserError(f"{path}: {name} lies in {location}, which is not there: put both files into one folder")
    if file.name not in mapped:
        mapped[file.name] = map_file(file)
    try:
        offset, length = int(external.get("offset", 0)), int(external.get("length", nbytes))
    except ValueError:
        offset = length = -1
    if length != nbytes or offset < 0 or offset + length > len(mapped[file.name]):
        raise UserError(
            f"{file}: has no {nbytes} bytes at {external.get('offset', 0)} for {name}: truncated or damaged"
        )
    return mapped[file.name], [(offset, length)]


def _pair(data: np.ndarray, message) -> tuple[str, str]:
    values = {field.number: text(data, field) for field in fields(data, message.start, message.stop)}
    return values.get(1, ""), values.get(2, "")


def _embedded(tensors: Sequence[TensorPlan], metadata: dict[str, str]) -> HeadedFile:
    """One .onnx file that holds the tensors themselves."""
    heads = [_facts(tensor) + opening(_RAW, tensor.nbytes) for tensor in tensors]
    sizes = [len(head) + tensor.nbytes for head, tensor in zip(heads, tensors)]
    heads = [opening(5, size) + head for head, size in zip(heads, sizes)]
    graph = delimited(2, "weights")
    length = len(graph) + sum(map(len, heads)) + sum(tensor.nbytes for tensor in tensors)
    heads[0] = _model_head(metadata) + opening(7, length) + graph + heads[0]
    return HeadedFile(FILE, list(zip(heads, tensors)))


def _raw_data(tensors: Sequence[TensorPlan]) -> HeadedFile:
    """The file of raw bytes beside a model; what precedes a tensor aligns it."""
    pieces, position = [], 0
    for tensor in tensors:
        gap = -position % _ALIGN
        pieces.append((bytes(gap), tensor))
        position += gap + tensor.nbytes
    return HeadedFile(DATA, pieces)


def _model_head(metadata: dict[str, str]) -> bytes:
    pairs = (delimited(14, delimited(1, key) + delimited(2, value)) for key, value in metadata.items())
    return (
        number(1, 10) + delimited(2, "weight_sync") + delimited(8, delimited(1, "") + number(2, 21)) + b"".join(pairs)
    )


def _facts(tensor: TensorPlan) -> bytes:
    dims = b"".join(number(1, n) for n in tensor.shape)
    return dims + number(2, dtypes.to_onnx(tensor.dtype)) + delimited(8, tensor.name)


def _model(data: HeadedFile, metadata: dict[str, str]) -> bytes:
    graph = delimited(2, "weights")
    for tensor in data.tensors:
        offset, length = data.locate(Path())[tensor.name]
        facts = {"location": DATA, "offset": str(offset), "length": str(length)}
        pairs = b"".join(delimited(13, delimited(1, key) + delimited(2, value)) for key, value in facts.items())
        graph += delimited(5, _facts(tensor) + pairs + number(14, 1))
    return _model_head(metadata) + delimited(7, graph)


def plan(tensors: Sequence[TensorPlan], max_file: int, metadata: dict[str, str]) -> tuple[list, dict[str, bytes]]:
    """(files to write, small files beside them): one model, or beyond `max_file` bytes a model and its data."""
    if sum(tensor.nbytes for tensor in tensors) + 1024 * len(tensors) <= min(max_file, LARGEST_MODEL):
        return [_embedded(tensors, metadata)], {}
    data = _raw_data(tensors)
    return [data], {FILE: _model(data, metadata)}
