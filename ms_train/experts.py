"""Feed-forward parts: the dense MLP, routed experts and their mixture with the shared experts."""

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.common.initializer import initializer

from ms_train import ops
from ms_train.linear import Linear
from ms_train.router import Router
from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement


class MLP(nn.Cell):
    """x [T, D] -> down(silu(gate(x)) * up(x)) [T, D]."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, width)
        self.up_proj = Linear(hidden_size, width)
        self.down_proj = Linear(width, hidden_size)
        self.swiglu = ops.SwiGLU()

    def construct(self, x_TD):
        return self.down_proj(self.swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))


class RoutedExperts(nn.Cell):
    """The stacked routed experts of one layer, in slot order."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        gate_up = initializer("zeros", (experts, 2 * width, hidden), ms.float32)
        self.gate_up_proj = Parameter(gate_up, name="gate_up_proj")
        self.down_proj = Parameter(initializer("zeros", (experts, hidden, width), ms.float32), name="down_proj")
        self.routed = ops.RoutedExperts(experts, config.num_experts_per_tok)

    def construct(self, x_TD, slots_TK, weights_TK):
        return self.routed(x_TD, slots_TK, weights_TK, self.gate_up_proj, self.down_proj)


class MixtureOfExperts(nn.Cell):
    """x [T, D], mask [B, S] -> (routed + shared experts [T, D], router statistics)."""

    def __init__(self, config: ModelConfig, placement: ExpertPlacement):
        super().__init__()
        self.gate = Router(config, placement)
        self.experts = RoutedExperts(config)
        self.has_shared = config.n_shared_experts > 0
        if self.has_shared:
            width = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = MLP(config.hidden_size, width)

    def construct(self, x_TD, mask_BS):
        slots, weights, statistics = self.gate(x_TD, mask_BS)
        out = self.experts(x_TD, slots, weights)
        if self.has_shared:
            out = out + self.shared_experts(x_TD)
        return out, statistics
