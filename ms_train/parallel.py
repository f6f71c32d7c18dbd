"""The only file that names ranks and devices' groups: data parallelism over msrun's processes."""

import os
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

LINGER_SECONDS = 2.0


class Parallel:
    """One process of `world_size`; sums over all of them. Without msrun's environment it is alone."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK_ID", 0))
        self.world_size = int(os.environ.get("MS_WORKER_NUM", 1))
        ms.set_context(mode=ms.GRAPH_MODE)
        self.device = "CPU"
        if os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or os.path.exists("/dev/davinci_manager"):
            self.device = "Ascend"
        ms.set_device(self.device)

    def start(self) -> None:
        """Join the other processes."""
        if self.world_size > 1:
            init()
            self.rank, self.world_size = get_rank(), get_group_size()
            self.meet = _Meeting(self.world_size)

    def sum(self) -> "Sum":
        """A cell that sums a tensor over all processes, inside the graph."""
        return Sum(self.world_size)

    def sum_all(self) -> "SumAll":
        """A cell that sums many fp32 tensors over all processes."""
        return SumAll(self.world_size)

    def total(self, number: float) -> float:
        """The sum of a number over all processes, exact for integers below 2^24; waits for all of them."""
        if self.world_size == 1:
            return float(number)
        return float(self.meet(Tensor(np.full(1, number, np.float32))).asnumpy()[0])

    def finish(self) -> None:
        """Leave together: rank 0's last message fails if a receiver ends before it was acknowledged."""
        self.total(0)
        if self.rank > 0:
            time.sleep(LINGER_SECONDS)


class Sum(nn.Cell):
    """fp32 tensor -> its sum over all processes, equal to the bit on each."""

    def __init__(self, world_size: int):
        super().__init__()
        self.alone = world_size == 1
        if not self.alone:
            self.all_reduce = ms.ops.AllReduce(ms.ops.ReduceOp.SUM)

    def construct(self, x):
        if self.alone:
            return x
        return self.all_reduce(x)


class _Meeting(nn.Cell):
    """A sum on its own, compiled: what `total` is made of."""

    def __init__(self, world_size: int):
        super().__init__()
        self.sum = Sum(world_size)

    @ms.jit
    def construct(self, x):
        return self.sum(x)


class SumAll(nn.Cell):
    """A tuple of fp32 tensors -> their sums over all processes. A message costs about 2 ms however small it is, so
    small tensors travel as one; large ones go alone, which spares copying them."""

    LARGE = 1 << 16  # elements

    def __init__(self, world_size: int):
        super().__init__()
        self.alone = world_size == 1
        self.sum = Sum(world_size)
        self.concat = ms.ops.Concat(0)

    def construct(self, tensors):
        if self.alone:
            return tensors
        small = ()
        for tensor in tensors:
            if tensor.size < self.LARGE:
                small = small + (tensor.reshape(-1),)
        total = self.sum(self.concat(small))
        summed, start = (), 0
        for tensor in tensors:
            if tensor.size < self.LARGE:
                summed = summed + (total[start : start + tensor.size].reshape(tensor.shape),)
                start = start + tensor.size
            else:
                summed = summed + (self.sum(tensor),)
        return summed
