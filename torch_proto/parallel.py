"""The only file that names ranks and devices' groups: data parallelism over torchrun's processes."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Parallel:
    """One process of `world_size`; sums over all of them. Without torchrun's environment it is alone."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def start(self) -> None:
        """Join the other processes."""
        if self.world_size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place and equal to the bit on each."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Sum many tensors over all processes in place, as one message."""
        if self.world_size == 1:
            return
        flat = self.sum(torch.cat([t.reshape(-1) for t in tensors]))
        for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def total(self, number: float) -> float:
        """The sum of a number over all processes, exact for integers below 2^24; waits for all of them."""
        return self.sum(torch.full((1,), number, dtype=torch.float32, device=self.device)).item()

    def finish(self) -> None:
        """Leave together."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
