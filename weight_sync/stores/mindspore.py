"""MindSpore checkpoints: `.ckpt`, and safetensors with MindSpore's metadata. MindSpore itself is not needed.

    .ckpt: message Checkpoint { repeated Value value = 1; }
           Value { string tag = 1; Tensor tensor = 2; }   a large tensor is several values of one tag in a row
           Tensor { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }
           optionally "crc_num" and ten bytes of checksum at the end

MindSpore cannot load a .ckpt of 2 GiB or more, so larger weights become several files, and weights with one tensor of
that size safetensors. It loads each file with `mindspore.load_checkpoint`.
"""

import binascii
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from shared_ops.errors import UserError
from weight_sync import dtypes
from weight_sync.stores import safetensors
from weight_sync.stores.base import (
    HeadedFile,
    Mapped,
    Span,
    Stored,
    TensorPlan,
    check_name,
    map_file,
    numbered,
    split_into_files,
)  # fmt: skip
from weight_sync.stores.protobuf import DELIMITED, Malformed, delimited, fields, number, opening, text, varints

SUFFIX = ".ckpt"
LARGEST_CKPT = (2 << 30) - (1 << 20)
_METADATA = {"format": "ms"}
_CRC = b"crc_num"


def is_checkpoint(head: bytes) -> bool:
    """Whether a file's first bytes are those of a .ckpt: field 1, its length, field 1 (tag)."""
    if not head or head[0] != 0x0A:
        return False
    position = 1
    while position < len(head) and head[position] & 0x80:
        position += 1
    return head[position + 1 : position + 2] == b"\n"


def read_file(path: Path) -> dict[str, Stored]:
    """All tensors of a .ckpt."""
    data = map_file(path)
    stop = len(data)
    if data[max(stop - 17, 0) : stop - 10].tobytes() == _CRC:
        stop -= 17
        if binascii.crc32(data[:stop]) != int.from_bytes(data[-10:].tobytes(), "big"):
            raise UserError(f"{path}: is damaged, its checksum is not that of its content; convert or save it again")
    tensors: dict[str, Stored] = {}
    values: list[tuple[str, tuple[int, ...], str, Span]] = []
    try:
        for value in fields(data, 0, stop):
            values.append(_value(data, value))
    except Malformed as error:
        raise UserError(
            f"{path}: cannot be read as a MindSpore checkpoint ({error}): it is truncated, damaged or encrypted"
        ) from None
    position = 0
    while position < len(values):
        tag, dims, kind, _ = values[position]
        spans = []
        while position < len(values) and values[position][:3] == (tag, dims, kind):
            spans.append(values[position][3])
            position += 1
        check_name(tag, path)
        if tag in tensors:
            raise UserError(f"{path}: {tag} is there twice")
        shape = () if dims == (0,) else dims  # MindSpore's way to say that a tensor is a scalar
        try:
            dtype = dtypes.from_mindspore(kind)
        except KeyError:
            raise UserError(f"{path}: {tag} has the type {kind!r}, which is no dtype of weights") from None
        if sum(length for _, length in spans) != prod(shape) * dtype.itemsize:
            raise UserError(f"{path}: {tag} has not the bytes of {kind} {list(shape)}: the file is damaged")
        tensors[tag] = Mapped(tag, shape, dtype, data, spans)
    return tensors


def _value(data: np.ndarray, value) -> tuple[str, tuple[int, ...], str, Span]:
    tag, dims, kind, span = "", [], "", (value.start, 0)
    if value.number != 1 or value.wire != DELIMITED:
        raise Malformed(f"field {value.number} at byte {value.start}")
    for field in fields(data, value.start, value.stop):
        if field.number == 1:
            tag = text(data, field)
        elif field.number == 2:
            for inner in fields(data, field.start, field.stop):
                if inner.number == 1:
                    dims += varints(data, inner)
                elif inner.number == 2:
                    kind = text(data, inner)
                elif inner.number == 3:
                    span = (inner.start, inner.stop - inner.start)
        else:
            raise Malformed(f"{tag or 'a value'} is no plain tensor")
    return tag, tuple(dims), kind, span


def _head(tensor: TensorPlan) -> bytes:
    """The bytes of a value before its tensor_content, which comes last."""
    facts = b"".join(number(1, n) for n in tensor.shape or (0,)) + delimited(2, dtypes.to_mindspore(tensor.dtype))
    content = opening(3, tensor.nbytes)
    inner = opening(2, len(facts) + len(content) + tensor.nbytes) + facts + content
    tag = delimited(1, tensor.name)
    return opening(1, len(tag) + len(inner) + tensor.nbytes) + tag + inner


def plan(tensors: Sequence[TensorPlan], max_file: int, kind: str = "auto") -> tuple[list, dict[str, bytes]]:
    """(files to write, small files beside them); `kind` ckpt, safetensors, or auto: ckpt where it fits."""
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    fits = largest.nbytes + len(_head(largest)) <= LARGEST_CKPT
    if kind == "ckpt" and not fits:
        raise UserError(
            f"{largest.name} has {largest.nbytes} bytes: MindSpore loads no .ckpt of 2 GiB; use --mindspore-file "
            "safetensors"
        )
    if kind == "safetensors" or not fits:
        return safetensors.plan(tensors, max_file, _METADATA)
    groups = split_into_files(tensors, min(max_file, LARGEST_CKPT), lambda tensor: len(_head(tensor)))
    names = numbered("model", SUFFIX, len(groups))
    return [HeadedFile(name, [(_head(t), t) for t in group]) for name, group in zip(names, groups)], {}
