"""Multi-token prediction (arXiv 2412.19437, section 2.2): one more decoder layer per depth."""

import torch
from torch import Tensor, nn

from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement
from torch_proto.block import DecoderLayer
from torch_proto.linear import Linear
from torch_proto.norm import RMSNorm
from torch_proto.router import RouterStatistics


class SharedHead(nn.Module):
    """The norm in front of the output head, which is the main model's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.norm(x_TD)


class MultiTokenPredictor(DecoderLayer):
    """Normalised hidden states of the depth before and embeddings of the tokens ahead -> those of this depth.

    What the head reads goes on to the next depth, as where these models are served.
    """

    def __init__(self, config: ModelConfig, placement: ExpertPlacement, layer: int):
        super().__init__(config, placement, layer)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def predict(
        self, hidden_TD: Tensor, embedded_TD: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, mask_BS: Tensor
    ) -> tuple[Tensor, RouterStatistics | None]:
        both = torch.cat((self.enorm(embedded_TD), self.hnorm(hidden_TD)), -1)
        hidden_TD, statistics = self(self.eh_proj(both), cos, sin, visible, mask_BS)
        return self.shared_head(hidden_TD), statistics
