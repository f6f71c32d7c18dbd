"""One decoder layer: attention and feed-forward, each normalised before and added after."""

from torch import Tensor, nn

from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement
from torch_proto.attention import MultiHeadLatentAttention
from torch_proto.experts import MLP, MixtureOfExperts
from torch_proto.norm import RMSNorm
from torch_proto.router import RouterStatistics


class DecoderLayer(nn.Module):
    """x [T, D] -> (x [T, D], router statistics, or None in a dense layer)."""

    def __init__(self, config: ModelConfig, placement: ExpertPlacement, layer: int):
        super().__init__()
        self.is_moe = config.is_moe_layer(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_moe:
            self.mlp = MixtureOfExperts(config, placement)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, mask_BS: Tensor
    ) -> tuple[Tensor, RouterStatistics | None]:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, visible)
        normed = self.post_attention_layernorm(x_TD)
        if self.is_moe:
            out, statistics = self.mlp(normed, mask_BS)
        else:
            out, statistics = self.mlp(normed), None
        return x_TD + out, statistics
