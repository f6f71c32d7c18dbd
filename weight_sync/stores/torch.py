"""PyTorch files: a plain state dict in a zip archive, as torch.save writes it. The only store that imports torch.

Read with weights_only (nothing is ever unpickled that is not a tensor) and mapped into memory; written as a skeleton
whose storages are filled in place.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared_ops.errors import UserError
from weight_sync import dtypes
from weight_sync.stores.base import Mapped, Rows, Span, Stored, TensorPlan, check_name, numbered, split_into_files

MAGIC = b"PK\x03\x04"
SUFFIX = ".pt"
_WRAPPERS = ("state_dict", "model", "module", "params")


def _torch():
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch files need torch: pip install -e '.[torch]'") from None
    return torch


def read_file(path: Path) -> dict[str, Stored]:
    """All tensors of one file."""
    torch = _torch()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises a dozen kinds, for damage and for pickles that are more than tensors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path}: cannot be read as a state dict of tensors ({reason}); it is damaged, or holds other objects than "
            "tensors, which are never loaded: save model.state_dict() alone"
        ) from None
    tensors = {}
    for name, tensor in _state_dict(loaded, path, torch).items():
        check_name(name, path)
        tensors[name] = _stored(name, tensor, path, torch)
    return tensors


def _state_dict(loaded: Any, path: Path, torch) -> Mapping[str, Any]:
    for _ in range(3):  # the state dict itself, or in one or two wrappers
        if not isinstance(loaded, Mapping) or not loaded:
            break
        if all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()):
            return loaded
        inner = [key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if len(inner) != 1:
            break
        loaded = loaded[inner[0]]
    if isinstance(loaded, Mapping):
        odd = [
            f"{key!r} ({type(value).__name__})" for key, value in loaded.items() if not isinstance(value, torch.Tensor)
        ]
        what = "is empty" if not loaded else f"also holds {', '.join(odd[:3]) or 'keys that are no names'}"
    else:
        what = f"holds a {type(loaded).__name__}"
    raise UserError(f"{path}: expected a state dict, name -> tensor; it {what}: save model.state_dict() alone")


def _stored(name: str, tensor, path: Path, torch) -> Stored:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise UserError(f"{path}: {name} is no plain dense tensor with values")
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        dtype = dtypes.from_name(str(tensor.dtype).removeprefix("torch."))
    except KeyError:
        raise UserError(f"{path}: {name} has the dtype {tensor.dtype}, which is no dtype of weights") from None
    if tensor.is_contiguous():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        return Mapped(name, tensor.shape, dtype, data, [(0, len(data))])

    def read(index) -> np.ndarray:
        rows = tensor.detach()[index].contiguous()
        return rows.reshape(-1).view(torch.uint8).numpy()

    return Rows(name, tensor.shape, dtype, read)


class TorchPlan:
    """One .pt file to write."""

    def __init__(self, name: str, tensors: Sequence[TensorPlan]):
        self.name, self.tensors = name, tensors

    def create(self, path: Path) -> None:
        """The archive with empty storages."""
        torch = _torch()
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype.name)) for t in self.tensors}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)

    def locate(self, path: Path) -> dict[str, Span]:
        """Where each storage's bytes go; torch.save numbers them in the dict's order."""
        archive = _torch()._C.PyTorchFileReader(str(path))
        return {
            tensor.name: (archive.get_record_offset(f"data/{number}") if tensor.nbytes else 0, tensor.nbytes)
            for number, tensor in enumerate(self.tensors)
        }


def plan(tensors: Sequence[TensorPlan], max_file: int) -> tuple[list, dict[str, bytes]]:
    """(files to write, nothing beside them)."""
    _torch()
    groups = split_into_files(tensors, max_file)
    return [TorchPlan(name, group) for name, group in zip(numbered("model", SUFFIX, len(groups)), groups)], {}
