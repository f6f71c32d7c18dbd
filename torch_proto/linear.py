"""Weights that multiply: Linear and Embedding, without biases."""

import torch
from torch import Tensor, nn

from torch_proto import ops


class Linear(nn.Module):
    """x [..., in] -> [..., out], computed in x's dtype whatever the weight's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.linear = ops.Linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight)


class Embedding(nn.Module):
    """ids int [...] -> [..., D] in `dtype`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight).to(self.dtype)
