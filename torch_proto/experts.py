"""Feed-forward parts: the dense MLP, routed experts and their mixture with the shared experts."""

import torch
from torch import Tensor, nn

from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement
from torch_proto import ops
from torch_proto.linear import Linear
from torch_proto.router import Router, RouterStatistics


class MLP(nn.Module):
    """x [T, D] -> down(silu(gate(x)) * up(x)) [T, D]."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width)
        self.up_proj = Linear(hidden_size, width)
        self.down_proj = Linear(width, hidden_size)
        self.swiglu = ops.SwiGLU()

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))


class RoutedExperts(nn.Module):
    """The stacked routed experts of one layer, in slot order."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.routed = ops.RoutedExperts(experts, config.num_experts_per_tok)

    def forward(self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.routed(x_TD, slots_TK, weights_TK, self.gate_up_proj, self.down_proj)


class MixtureOfExperts(nn.Module):
    """x [T, D], mask [B, S] -> (routed + shared experts [T, D], router statistics)."""

    def __init__(self, config: ModelConfig, placement: ExpertPlacement):
        super().__init__()
        self.gate = Router(config, placement)
        self.experts = RoutedExperts(config)
        self.has_shared = config.n_shared_experts > 0
        if self.has_shared:
            width = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = MLP(config.hidden_size, width)

    def forward(self, x_TD: Tensor, mask_BS: Tensor) -> tuple[Tensor, RouterStatistics]:
        slots, weights, statistics = self.gate(x_TD, mask_BS)
        out = self.experts(x_TD, slots, weights)
        if self.has_shared:
            out = out + self.shared_experts(x_TD)
        return out, statistics
