"""HDF5 files: one dataset per tensor, bf16 as its uint16 bits with the attribute dtype = "bfloat16".

Written as the shards of a training state are (`params/<canonical name>`, contiguous), so that the trainers read them.
FP8 and other dtypes that h5py lacks are stored as integers of their width with the same attribute.
"""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from shared_ops.errors import UserError
from shared_ops.weights import MODEL, PARAMS
from weight_sync import dtypes
from weight_sync.stores.base import Mapped, Rows, Span, Store, Stored, TensorPlan, check_name, map_file

MAGIC = b"\x89HDF\r\n\x1a\n"


def read_files(path: Path, files: Sequence[Path], merge) -> Store:
    """All tensors of the given files; close the store when done."""
    opened: list[h5py.File] = []
    close = lambda: [file.close() for file in opened]  # noqa: E731
    try:
        tensors = merge((file, _read_file(file, opened)) for file in files)
    except BaseException:
        close()
        raise
    return Store(path, "hdf5", tensors, list(files), close=close)


def _read_file(path: Path, opened: list[h5py.File]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    try:
        file = h5py.File(path, "r", locking=False)
        opened.append(file)
        data = map_file(path)

        def index(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Dataset):
                tensor = _tensor(path, name, item, data)
                if tensor.name in tensors:
                    raise UserError(f"{path}: holds {tensor.name} twice, once under {PARAMS}")
                tensors[tensor.name] = tensor

        file.visititems(index)  # hard links only: no soft or external link is followed
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as HDF5 ({error}): it is truncated or damaged") from None
    return tensors


def _tensor(path: Path, stored_name: str, dataset: h5py.Dataset, data: np.ndarray) -> Stored:
    check_name(stored_name, path)
    name = stored_name.removeprefix(PARAMS)
    layout = dataset.id.get_create_plist()
    if dataset.is_virtual or layout.get_external_count():
        raise UserError(f"{path}: {stored_name} has its data in another file, which is not followed")
    attribute = dataset.attrs.get("dtype") if h5py.h5a.get_num_attrs(dataset.id) else None
    try:
        dtype = dtypes.from_name(attribute) if isinstance(attribute, str) else dtypes.known(dataset.dtype)
    except KeyError:
        raise UserError(
            f"{path}: {stored_name} has the dtype {attribute or dataset.dtype}, no dtype of weights"
        ) from None
    if dtype.itemsize != dataset.dtype.itemsize or dataset.dtype.byteorder == ">":
        raise UserError(f"{path}: {stored_name} is declared {dtype} but holds {dataset.dtype}")
    offset = dataset.id.get_offset()
    if not dataset.size:
        return Mapped(name, dataset.shape, dtype, data, [])
    if layout.get_layout() == h5py.h5d.CONTIGUOUS and offset is not None:
        if offset + dataset.nbytes > len(data):
            raise UserError(f"{path}: {stored_name} lies beyond the end of the file: it is truncated or damaged")
        return Mapped(name, dataset.shape, dtype, data, [(offset, dataset.nbytes)])
    return Rows(name, dataset.shape, dtype, dataset.__getitem__)


class Hdf5Plan:
    """The HDF5 file to write."""

    def __init__(self, name: str, tensors: Sequence[TensorPlan], group: str = PARAMS):
        self.name, self.tensors, self._group = name, tensors, group

    def create(self, path: Path) -> None:
        """All datasets, contiguous and with their room allocated."""
        with h5py.File(path, "w", locking=False) as file:
            for tensor in self.tensors:
                stored = _storable(tensor.dtype)
                creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                creation.set_layout(h5py.h5d.CONTIGUOUS)
                creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                creation.set_obj_track_times(False)
                links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
                links.set_create_intermediate_group(True)
                space = h5py.h5s.create_simple(tensor.shape) if tensor.shape else h5py.h5s.create(h5py.h5s.SCALAR)
                dataset = h5py.Dataset(h5py.h5d.create(
                    file.id, (self._group + tensor.name).encode(), h5py.h5t.py_create(stored), space, creation, links
                ))  # fmt: skip
                if stored != tensor.dtype:
                    dataset.attrs["dtype"] = tensor.dtype.name

    def locate(self, path: Path) -> dict[str, Span]:
        """Where the library put each dataset's bytes."""
        with h5py.File(path, "r", locking=False) as file:
            return {
                tensor.name: (file[self._group + tensor.name].id.get_offset() or 0, tensor.nbytes)
                for tensor in self.tensors
            }


def _storable(dtype: np.dtype) -> np.dtype:
    """The dtype itself, or the unsigned integer of its width for what h5py does not know."""
    return (
        dtype
        if dtype.kind in "iufb" and not dtype.name.startswith(("bfloat", "float8"))
        else np.dtype(f"u{dtype.itemsize}")
    )


def plan(tensors: Sequence[TensorPlan]) -> tuple[list, dict[str, bytes]]:
    """(the file to write, nothing beside it)."""
    return [Hdf5Plan(MODEL, tensors)], {}
