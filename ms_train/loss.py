"""From the sums of some rows to the loss: every term has one denominator, that of the global batch."""

import mindspore as ms
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
        self.has_depths = config.num_nextn_predict_layers > 0

    def construct(self, sums, denominators_K3):
        """(total, cross entropy, weighted router losses, mean cross entropy of the prediction depths)."""
        denominators = ms.ops.maximum(denominators_K3, 1.0)
        labels, rows, tokens = denominators[:, 0], denominators[:, 1], denominators[:, 2]
        cross_entropy_K, aux_K, z_K, _ = sums
        cross_entropy_K = cross_entropy_K / labels
        aux_loss = (self.aux_loss_alpha * aux_K / rows + self.router_z_loss_coef * z_K / tokens).sum()
        mtp_loss = Tensor(0.0, ms.float32)
        if self.has_depths:
            mtp_loss = cross_entropy_K[1:].sum() / self.depths
        total = cross_entropy_K[0] + aux_loss + self.mtp_loss_weight * mtp_loss
        return total, cross_entropy_K[0], aux_loss, mtp_loss
