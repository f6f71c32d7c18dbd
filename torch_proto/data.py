"""Batches -> tensors on the device."""

import torch

from shared_ops.batch import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch as tensors: indices int64, as torch's lookups and losses want them."""
    tensors = (torch.from_numpy(array) for array in batch)
    return Batch(*(t.to(device, torch.long if t.dtype == torch.int32 else None, non_blocking=True) for t in tensors))
