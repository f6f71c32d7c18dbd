"""What every store gives: tensors whose bytes are read where they lie, and files whose bytes are known in advance.

Reading: a `Store` maps each stored name to a `Stored` tensor, which hands out pieces of its bytes, as views of a memory
map wherever the format allows it. Writing: a `FilePlan` makes a file complete but for its tensors' bytes and says
where these go, so that any thread may fill any part at any time and a crash costs only what was not filled yet.
"""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from shared_ops.errors import UserError

Span = tuple[int, int]  # offset in the file, number of bytes


_SHAPES: dict[tuple[int, ...], tuple[int, ...]] = {}  # a published model has 90,000 tensors of twenty shapes


class Stored(ABC):
    """A tensor as its store holds it, in row-major order and little endian."""

    __slots__ = ("name", "shape", "dtype")

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype):
        self.name, self.dtype = name, dtype
        self.shape = _SHAPES.setdefault(tuple(shape), tuple(shape))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The bytes [start, stop) of the tensor as uint8 arrays, one after the other."""


class Mapped(Stored):
    """Bytes in a memory-mapped file, in one span or in several."""

    __slots__ = ("file", "_spans")

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype, file: np.ndarray, spans: Sequence[Span]):
        super().__init__(name, shape, dtype)
        self.file = file
        if sum(length for _, length in spans) != self.nbytes:
            raise ValueError(f"{name}: {spans} are not the {self.nbytes} bytes of {dtype} {self.shape}")
        self._spans = spans[0][0] if len(spans) == 1 else tuple(spans)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        spans = [(self._spans, self.nbytes)] if isinstance(self._spans, int) else self._spans
        for offset, length in spans:
            low, high = max(start, 0), min(stop, length)
            if low < high:
                yield self.file[offset + low : offset + high]
            start, stop = start - length, stop - length


class Rows(Stored):
    """A tensor behind `read(index)`, an indexing function: what cannot be mapped (chunks, slices over shards)."""

    __slots__ = ("read",)

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype, read: Callable[[Any], np.ndarray]):
        super().__init__(name, shape, dtype)
        self.read = read

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        if start >= stop:
            return
        if not self.shape:
            yield _as_bytes(self.read(()))[start:stop]
            return
        width = self.dtype.itemsize * (self.shape[-1] if len(self.shape) > 1 else 1)
        axis = max(len(self.shape) - 2, 0)  # the axis of rows: a row is the last axis, or one value of a vector
        rows = self.shape[axis]
        low, high = start // width, -(-stop // width)
        while low < high:
            leading, first = divmod(low, rows)
            count = min(high - low, rows - first)
            index = (
                (*np.unravel_index(leading, self.shape[:axis]), slice(first, first + count))
                if axis
                else (slice(first, first + count),)
            )
            block = _as_bytes(self.read(tuple(int(i) if not isinstance(i, slice) else i for i in index)))
            yield block[max(start - low * width, 0) : stop - low * width]
            low += count


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class TrainingState(NamedTuple):
    """What a step folder holds beside its weights: the model section of its configuration, the moments by kind, and
    its manifest less the files."""

    model: dict[str, Any]
    moments: dict[str, dict[str, Stored]]
    training: dict[str, Any]


@dataclass
class Store:
    """An opened file or folder of weights: stored name -> tensor, and what lies beside them."""

    path: Path
    format: str
    tensors: dict[str, Stored]
    files: list[Path]  # everything that was opened, for the source's fingerprint
    config_json: bytes | None = None
    notes: list[str] = field(default_factory=list)  # what a report should say about how it was read
    close: Callable[[], None] = lambda: None
    state: TrainingState | None = None


class TensorPlan(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class FilePlan(Protocol):
    """One file to write: `create` makes it at its full size, `locate` says where the tensors' bytes go."""

    name: str
    tensors: Sequence[TensorPlan]

    def create(self, path: Path) -> None: ...

    def locate(self, path: Path) -> dict[str, Span]: ...


class HeadedFile:
    """A file plan of heads and tensors in turn: `pieces` are (the bytes before a tensor, the tensor)."""

    def __init__(self, name: str, pieces: Sequence[tuple[bytes, TensorPlan]]):
        self.name, self.tensors = name, [tensor for _, tensor in pieces]
        self._heads: list[tuple[int, bytes]] = []
        self._spans: dict[str, Span] = {}
        position = 0
        for head, tensor in pieces:
            self._heads.append((position, head))
            position += len(head)
            self._spans[tensor.name] = (position, tensor.nbytes)
            position += tensor.nbytes
        self._size = position

    def create(self, path: Path) -> None:
        """All but the tensors' bytes."""
        with open(path, "wb") as file:
            file.truncate(self._size)
            for position, head in self._heads:
                file.seek(position)
                file.write(head)

    def locate(self, path: Path) -> dict[str, Span]:
        """Where each tensor's bytes go."""
        return self._spans


def map_file(path: Path) -> np.ndarray:
    """A file's bytes as a read-only uint8 array over a memory map."""
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return np.empty(0, np.uint8)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(mapped, np.uint8)


def check_name(name: str, where: Path) -> None:
    """`UserError` for names that could be taken for a path out of a folder."""
    parts = name.replace("\\", "/").split("/")
    if not name.isprintable() or not name or name.startswith(("/", "\\")) or ".." in parts:
        raise UserError(
            f"{where}: refuses the tensor name {name!r}: a name must be a plain one, not empty, absolute or with '..'"
        )


def inside(folder: Path, name: str, where: Path) -> Path:
    """The file `name` directly in `folder`; `UserError` for a name that leads out of it."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{where}: names the file {name!r}: only plain file names in its own folder are allowed")
    return folder / name


def split_into_files(
    tensors: Sequence[TensorPlan], limit: int, overhead: Callable[[TensorPlan], int] = lambda tensor: 0
) -> list[list[TensorPlan]]:
    """Tensors in order, in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    groups: list[list[TensorPlan]] = []
    used = limit
    for tensor in tensors:
        size = tensor.nbytes + overhead(tensor)
        if used + size > limit or not groups:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += size
    return groups


def numbered(stem: str, suffix: str, count: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` …"""
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]
