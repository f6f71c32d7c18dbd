"""Look up a given rotary table by position."""

import mindspore as ms
from mindspore import Tensor, nn

from shared_ops import rope
from shared_ops.config import ModelConfig


class RotaryTable(nn.Cell):
    """position_ids int [B, S] -> (cos, sin), each fp32 [B, S, 1, qk_rope_head_dim / 2]."""

    def __init__(self, config: ModelConfig, length: int):
        super().__init__()
        cos, sin = rope.tables(config, length)
        self.cos = Tensor(cos)
        self.sin = Tensor(sin)
        self.gather = ms.ops.Gather()

    def construct(self, position_ids):
        cos = self.gather(self.cos, position_ids, 0).expand_dims(2)
        return cos, self.gather(self.sin, position_ids, 0).expand_dims(2)
