"""Token files: documents' ids, one after the other, readable in place.

`.bin` holds the raw ids, uint16 or int32, little endian; `.idx` is Megatron's MMapIndexedDataset index:

    9 bytes  b"MMIDIDX\\0\\0"        uint64  version 1
    uint8    type of the ids (8 = uint16, 4 = int32)
    uint64   n sequences             uint64  n + 1 entries of the document index
    int32    [n]      length of each sequence in tokens
    int64    [n]      where it starts in .bin, in bytes
    int64    [n + 1]  document index: first sequence of each document, and n at the end

Here each sequence is one document, so the document index is 0, 1, …, n. The `.h5` file has the same content
as two contiguous datasets: `ids` [tokens] and `offsets` int64 [n + 1] in tokens.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from shared_ops.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COPY_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenFile:
    """Documents in place: `ids` [tokens], a read-only view of the file; `offsets` int64 [documents + 1]."""

    path: Path
    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, without a copy."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class TokenWriter:
    """Writes PREFIX.bin document by document, and PREFIX.idx at the end of the `with` block.

    A block that ends in an exception leaves no `.idx`, so that the rest is never taken for whole.
    """

    def __init__(self, prefix: Path, vocab_size: int):
        self.prefix, self.vocab_size, self.dtype = prefix, vocab_size, dtype_for(vocab_size)
        self._lengths = array("q")

    def __enter__(self) -> "TokenWriter":
        self._bin = open(_with_suffix(self.prefix, ".bin"), "wb")
        return self

    def add(self, ids: np.ndarray | Sequence[int]) -> None:
        """Append one document; `UserError` for an id outside the vocabulary."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
            raise ValueError(f"expected a document: a vector of integers, got {ids.dtype} {ids.shape}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            path, wrong = _with_suffix(self.prefix, ".bin"), low if low < 0 else high
            raise UserError(f"{path}: token id {wrong} does not fit: expected 0 to {self.vocab_size - 1}")
        self._bin.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(ids.size)

    def __exit__(self, kind, value, trace) -> None:
        self._bin.close()
        if kind is None:
            _write_index(_with_suffix(self.prefix, ".idx"), np.array(self._lengths, np.int64), self.dtype)


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and int32 that holds the ids 0 … vocab_size - 1."""
    if not 0 < vocab_size <= 2**31:
        raise UserError(f"vocab_size {vocab_size}: expected 1 to {2**31}, what int32 ids can hold")
    return _DTYPES[8] if vocab_size <= 2**16 else _DTYPES[4]


def index_arrays(lengths: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths int32 [n], byte pointers int64 [n], document index int64 [n + 1], from lengths int [n]."""
    lengths = np.asarray(lengths, np.int64)
    if lengths.size and lengths.max() >= 2**31:
        raise UserError(f"a document has {lengths.max()} tokens, an index holds less than 2^31: split it")
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * itemsize, out=pointers[1:])
    return lengths.astype(np.int32), pointers, np.arange(len(lengths) + 1, dtype=np.int64)


def write_h5(prefix: Path, vocab_size: int) -> None:
    """Write PREFIX.h5 from PREFIX.bin and .idx."""
    tokens = open_tokens(prefix)
    with h5py.File(_with_suffix(prefix, ".h5"), "w") as file:
        file.attrs["vocab_size"] = vocab_size
        file.create_dataset("offsets", data=tokens.offsets)
        ids = file.create_dataset("ids", tokens.ids.shape, tokens.ids.dtype)
        for start in range(0, len(tokens.ids), _COPY_TOKENS):
            ids[start : start + _COPY_TOKENS] = tokens.ids[start : start + _COPY_TOKENS]


def open_tokens(prefix: Path) -> TokenFile:
    """Open PREFIX.bin with PREFIX.idx; `UserError` naming the file that is missing, short or inconsistent."""
    bin_path, index_path = _with_suffix(prefix, ".bin"), _with_suffix(prefix, ".idx")
    dtype, lengths, pointers, documents = _read_index(index_path)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    whole = np.array_equal(pointers, offsets[:-1] * dtype.itemsize) and not (lengths < 0).any()
    if not whole or not np.array_equal(documents, np.arange(len(lengths) + 1)):
        raise UserError(f"{index_path}: inconsistent, expected one sequence per document, back to back")
    size, expected = _size(bin_path), int(offsets[-1]) * dtype.itemsize
    if size != expected:
        raise UserError(f"{bin_path}: has {size} bytes where {index_path.name} expects {expected}: "
                        "make it anew")
    return TokenFile(bin_path, _map(bin_path, dtype, int(offsets[-1]), 0), offsets)


def open_h5(path: Path) -> TokenFile:
    """Open the HDF5 form, ids mapped in place; `UserError` naming a file that is missing, short or wrong."""
    _size(path)
    try:
        with h5py.File(path, "r") as file:
            ids, offsets = file["ids"], file["offsets"][:].astype(np.int64)
            dtype, (count,), start = ids.dtype, ids.shape, ids.id.get_offset()
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: is no whole HDF5 token file: {error}") from error
    contiguous = start is not None or count == 0
    if dtype not in _CODES or not contiguous or not len(offsets) or offsets[0] != 0 or offsets[-1] != count \
            or (np.diff(offsets) < 0).any():
        raise UserError(f"{path}: inconsistent, expected contiguous uint16 or int32 ids and their offsets")
    return TokenFile(path, _map(path, dtype, count, start or 0), offsets)


def _write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    arrays = index_arrays(lengths, dtype.itemsize)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(lengths) + 1))
        for values in arrays:
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    size = _size(path)
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise UserError(f"{path}: {size} bytes are too few for a token index: make it anew")
    magic, version, code, count, entries = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise UserError(f"{path}: is no token index of version 1 with uint16 or int32 ids")
    expected = _HEADER.size + 12 * count + 8 * entries
    if size != expected:
        raise UserError(f"{path}: has {size} bytes where its header expects {expected}: make it anew")
    raw = np.memmap(path, np.uint8, "r")
    cuts = np.cumsum([_HEADER.size, 4 * count, 8 * count])
    lengths, pointers, documents = (raw[start:stop] for start, stop in zip(cuts, [*cuts[1:], size]))
    return _DTYPES[code], lengths.view("<i4"), pointers.view("<i8"), documents.view("<i8")


def _map(path: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, "r", offset, (count,))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)
