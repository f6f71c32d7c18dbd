"""One decoder layer: attention and feed-forward, each normalised before and added after."""

from mindspore import nn

from ms_train.attention import MultiHeadLatentAttention
from ms_train.experts import MLP, MixtureOfExperts
from ms_train.norm import RMSNorm
from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement


class DecoderLayer(nn.Cell):
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

    def construct(self, x_TD, cos, sin, visible, mask_BS):
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, visible)
        normed = self.post_attention_layernorm(x_TD)
        if self.is_moe:
            out, statistics = self.mlp(normed, mask_BS)
        else:
            out, statistics = self.mlp(normed), None
        return x_TD + out, statistics
