"""Look up a given rotary table by position."""

import torch
from torch import Tensor, nn

from shared_ops import rope
from shared_ops.config import ModelConfig


class RotaryTable(nn.Module):
    """position_ids int [B, S] -> (cos, sin), each fp32 [B, S, 1, qk_rope_head_dim / 2]."""

    def __init__(self, config: ModelConfig, length: int):
        super().__init__()
        cos, sin = rope.tables(config, length)
        self.cos = nn.Buffer(torch.from_numpy(cos), persistent=False)
        self.sin = nn.Buffer(torch.from_numpy(sin), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids][:, :, None], self.sin[position_ids][:, :, None]
