"""Root mean square layer normalisation (arXiv 1910.07467)."""

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.common.initializer import initializer

from ms_train import ops


class RMSNorm(nn.Cell):
    """x [..., D] -> [..., D]; statistics in fp32, cast to x's dtype, then times the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = Parameter(initializer("ones", (size,), ms.float32), name="weight")
        self.rms_norm = ops.RMSNorm(eps)

    def construct(self, x):
        return self.rms_norm(x, self.weight)
