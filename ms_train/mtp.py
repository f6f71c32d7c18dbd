"""Multi-token prediction (arXiv 2412.19437, section 2.2): one more decoder layer per depth."""

import mindspore as ms
from mindspore import nn

from ms_train.block import DecoderLayer
from ms_train.linear import Linear
from ms_train.norm import RMSNorm
from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement


class SharedHead(nn.Cell):
    """The norm in front of the output head, which is the main model's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, x_TD):
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
        self.concat = ms.ops.Concat(-1)

    def predict(self, hidden_TD, embedded_TD, cos, sin, visible, mask_BS):
        both = self.concat((self.enorm(embedded_TD), self.hnorm(hidden_TD)))
        hidden_TD, statistics = self.construct(self.eh_proj(both), cos, sin, visible, mask_BS)
        return self.shared_head(hidden_TD), statistics
