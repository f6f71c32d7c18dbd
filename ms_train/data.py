"""Batches -> tensors."""

from mindspore import Tensor

from shared_ops.batch import Batch


def to_device(batch: Batch) -> Batch:
    """The same batch as tensors, int32 and fp32."""
    return Batch(*(Tensor(array) for array in batch))
