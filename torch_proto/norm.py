"""Root mean square layer normalisation (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from torch_proto import ops


class RMSNorm(nn.Module):
    """x [..., D] -> [..., D]; statistics in fp32, cast to x's dtype, then times the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.rms_norm = ops.RMSNorm(eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight)
