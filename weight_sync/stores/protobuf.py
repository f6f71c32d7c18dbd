"""The part of the protobuf wire format that weights files use, read in place and written in one stream.

Checkpoints of MindSpore and ONNX models are protobuf messages of which a few bytes are structure and the rest tensors.
The libraries load such a message whole; here only its structure is looked at and the tensors stay where they are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """A field of a message; `start` and `stop` bound its content in the file, `value` is a varint's."""

    number: int
    wire: int
    start: int
    stop: int
    value: int


class Malformed(ValueError):
    """The bytes are no message."""


def fields(data: np.ndarray, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message at [start, stop) of `data` (uint8); `Malformed` where it is none."""
    while start < stop:
        key, start = _varint(data, start, stop)
        number, wire = key >> 3, key & 7
        value = 0
        if wire == VARINT:
            first = start
            value, end = _varint(data, start, stop)
            start = first
        elif wire == FIXED64:
            end = start + 8
        elif wire == FIXED32:
            end = start + 4
        elif wire == DELIMITED:
            length, start = _varint(data, start, stop)
            end = start + length
        else:
            raise Malformed(f"wire type {wire} at byte {start}")
        if end > stop or not number:
            raise Malformed(f"a field that ends at byte {end}, beyond byte {stop}")
        yield Field(number, wire, start, end, value)
        start = end


def varints(data: np.ndarray, field: Field) -> list[int]:
    """A repeated integer field's values in this occurrence: one, or several packed."""
    if field.wire == VARINT:
        return [field.value]
    values, position = [], field.start
    while position < field.stop:
        value, position = _varint(data, position, field.stop)
        values.append(value)
    return values


def text(data: np.ndarray, field: Field) -> str:
    """A string field."""
    try:
        return data[field.start : field.stop].tobytes().decode()
    except UnicodeDecodeError:
        raise Malformed(f"no text at byte {field.start}") from None


def _varint(data: np.ndarray, position: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while position < stop and shift < 64:
        byte = int(data[position])
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Malformed(f"no number at byte {position}")


def encode_varint(value: int) -> bytes:
    """A non-negative number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A varint field."""
    return encode_varint(field << 3 | VARINT) + encode_varint(value)


def opening(field: int, length: int) -> bytes:
    """What precedes `length` bytes of a delimited field."""
    return encode_varint(field << 3 | DELIMITED) + encode_varint(length)


def delimited(field: int, content: bytes | str) -> bytes:
    """A string, bytes or message field."""
    content = content.encode() if isinstance(content, str) else content
    return opening(field, len(content)) + content
