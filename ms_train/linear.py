"""Weights that multiply: Linear and Embedding, without biases."""

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.common.initializer import initializer

from ms_train import ops


class Linear(nn.Cell):
    """x [..., in] -> [..., out], computed in x's dtype whatever the weight's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = Parameter(initializer("zeros", (out_features, in_features), ms.float32), name="weight")
        self.linear = ops.Linear()

    def construct(self, x):
        return self.linear(x, self.weight)


class Embedding(nn.Cell):
    """ids int [...] -> [..., D] in `dtype`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype):
        super().__init__()
        self.weight = Parameter(initializer("zeros", (vocab_size, hidden_size), ms.float32), name="weight")
        self.dtype = dtype
        self.gather = ms.ops.Gather()

    def construct(self, ids):
        return self.gather(self.weight, ids, 0).astype(self.dtype)
