"""From the sums of some rows to the loss: every term has one denominator, that of the global batch."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from shared_ops.config import ModelConfig


class TotalLoss(nn.Cell):
    """Token-weighted means; `denominators` [K, 3] counts the global batch's labels, rows and tokens per depth.

    total = cross entropy + weighted router losses + mtp_loss_weight * mean of the prediction depths' cross entropy.
    All four results add up over rows, micro-batches and ranks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.aux_loss_alpha, self.router_z_loss_coef = config.aux_loss_alpha, config.router_z_loss_coef
        self.mtp_loss_weight, self.depths = config.mtp_loss_weight, max(config.num_nextn_predict_layers, 1)
        self.has_depths, self.has_experts = config.num_nextn_predict_layers > 0, bool(config.moe_layers)
        self.depth_of_layer = Tensor(np.array(config.moe_layer_depths, np.int32))
        self.gather = ms.ops.Gather()

    def construct(self, sums, denominators_K3):
        """(total, cross entropy, weighted router losses, mean cross entropy of the prediction depths)."""
        denominators = ms.ops.maximum(denominators_K3, 1.0)
        labels, rows, tokens = denominators[:, 0], denominators[:, 1], denominators[:, 2]
        cross_entropy_K, aux_L, z_L, _ = sums
        cross_entropy_K = cross_entropy_K / labels
        aux_loss = Tensor(0.0, ms.float32)
        if self.has_experts:
            aux = (aux_L / self.gather(rows, self.depth_of_layer, 0)).sum()
            z = (z_L / self.gather(tokens, self.depth_of_layer, 0)).sum()
            aux_loss = self.aux_loss_alpha * aux + self.router_z_loss_coef * z
        mtp_loss = Tensor(0.0, ms.float32)
        if self.has_depths:
            mtp_loss = cross_entropy_K[1:].sum() / self.depths
        total = cross_entropy_K[0] + aux_loss + self.mtp_loss_weight * mtp_loss
        return total, cross_entropy_K[0], aux_loss, mtp_loss
