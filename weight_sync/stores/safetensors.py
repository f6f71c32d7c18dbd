"""Safetensors files and Hugging Face folders of them.

    8 bytes little endian: length of the header · header: JSON {name: {dtype, shape, data_offsets}} · the tensors' bytes

The library's NumPy side knows neither bf16 nor FP8 and gives no byte offsets, so the header is read here: strictly, any
byte that is not accounted for is an error. A folder holds one file, or several and model.safetensors.index.json.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shared_ops.errors import UserError
from weight_sync import dtypes
from weight_sync.stores.base import (
    HeadedFile,
    Mapped,
    Store,
    Stored,
    TensorPlan,
    check_name,
    inside,
    map_file,
    numbered,
    split_into_files,
)  # fmt: skip

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_MAX_HEADER = 512 << 20
_DAMAGED = "the file is damaged or incomplete: download or convert it again"


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file's first bytes and its size are those of a safetensors file."""
    return len(head) >= 9 and int.from_bytes(head[:8], "little") <= min(size, _MAX_HEADER) and head[8:9] == b"{"


def read_file(path: Path) -> dict[str, Stored]:
    """All tensors of one file."""
    data = map_file(path)
    length = int.from_bytes(data[:8].tobytes(), "little") if len(data) >= 8 else -1
    if not 0 < length <= min(len(data) - 8, _MAX_HEADER):
        raise UserError(f"{path}: its header does not fit into its {len(data)} bytes; {_DAMAGED}")
    try:
        header = json.loads(data[8 : 8 + length].tobytes(), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = [(name, *_entry(name, facts)) for name, facts in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its header is no safetensors header ({error}); {_DAMAGED}") from None
    base, position, tensors = 8 + length, 0, {}
    for name, shape, dtype, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        check_name(name, path)
        if start != position or stop - start != prod(shape) * dtype.itemsize:
            raise UserError(f"{path}: {name} is said to lie at bytes {start} to {stop}, which does not fit; {_DAMAGED}")
        tensors[name] = Mapped(name, shape, dtype, data, [(base + start, stop - start)])
        position = stop
    if base + position != len(data):
        raise UserError(f"{path}: has {len(data)} bytes, its header describes {base + position}; {_DAMAGED}")
    return tensors


def _entry(name: str, facts: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype, int, int]:
    shape, (start, stop) = facts["shape"], facts["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name}: {shape} at {start} to {stop}")
    return tuple(shape), dtypes.from_safetensors(facts["dtype"]), start, stop


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice} is there twice")
    return values


def read_folder(folder: Path, files: Sequence[Path]) -> Store:
    """A folder's tensors: by its index where there is one, else all of `files`."""
    index = folder / INDEX
    if not index.exists():
        return Store(folder, "hf", merge((path, read_file(path)) for path in files), list(files))
    weight_map, total = _read_index(index)
    shards = {name: inside(folder, name, index) for name in dict.fromkeys(weight_map.values())}
    if absent := [name for name, path in shards.items() if not path.is_file()]:
        raise UserError(f"{index}: names {_listed(absent)}, which the folder lacks: download the missing files")
    read = {name: read_file(path) for name, path in shards.items()}
    tensors = merge((shards[name], part) for name, part in read.items())
    lacking = [f"{key} (said to be in {shard})" for key, shard in weight_map.items() if key not in read[shard]]
    if lacking:
        raise UserError(f"{index}: {_listed(lacking)} not there; {_DAMAGED}")
    if unnamed := sorted(tensors.keys() - weight_map.keys()):
        raise UserError(f"{index}: does not name {_listed(unnamed)}, which its shards hold; {_DAMAGED}")
    others = [path.name for path in files if path.name not in shards]
    notes = [f"{', '.join(others)} also there, but not named by {INDEX}: not read"] if others else []
    held = sum(tensor.nbytes for tensor in tensors.values())
    if total not in (None, held):
        notes.append(f"{INDEX} says total_size {total}, its tensors have {held} bytes")
    return Store(folder, "hf", tensors, [index, *shards.values()], notes=notes)


def _read_index(index: Path) -> tuple[dict[str, str], Any]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique)
        weight_map = content["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is empty")
        return weight_map, (content.get("metadata") or {}).get("total_size")
    except OSError as error:
        raise UserError(f"{index}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: is no safetensors index ({error}); {_DAMAGED}") from None


def merge(parts) -> dict[str, Stored]:
    """One mapping of several files' (path, tensors); `UserError` for a key that two of them hold."""
    tensors: dict[str, Stored] = {}
    holder: dict[str, Path] = {}
    for path, part in parts:
        if both := part.keys() & tensors.keys():
            name = min(both)
            raise UserError(f"{path}: {name} is also in {holder[name].name}: the two do not make one model's weights")
        tensors |= part
        holder |= dict.fromkeys(part, path)
    return tensors


def _listed(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _file(name: str, tensors: Sequence[TensorPlan], metadata: Mapping[str, str]) -> HeadedFile:
    """One safetensors file to write."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": dtypes.to_safetensors(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return HeadedFile(name, [(b"" if number else head, tensor) for number, tensor in enumerate(tensors)])


def plan(tensors: Sequence[TensorPlan], max_file: int, metadata: Mapping[str, str]) -> tuple[list, dict[str, bytes]]:
    """(files to write, small files to write beside them: the index of several)."""
    groups = split_into_files(tensors, max_file)
    files = [_file(name, group, metadata) for name, group in zip(numbered("model", SUFFIX, len(groups)), groups)]
    if len(files) == 1:
        return files, {}
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files, {INDEX: json.dumps(index, indent=2).encode() + b"\n"}
