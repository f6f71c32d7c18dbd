"""From the sums of some rows to the loss: every term has one denominator, that of the global batch."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared_ops.config import ModelConfig


class LossSums(NamedTuple):
    """cross_entropy [K] over labels; aux [L] over rows; z [L] over tokens; counts [L, E] tokens per expert."""

    cross_entropy: Tensor
    aux: Tensor
    z: Tensor
    counts: Tensor


class TotalLoss(nn.Module):
    """Token-weighted means; `denominators` [K, 3] counts the global batch's labels, rows and tokens per depth.

    total = cross entropy + weighted router losses + mtp_loss_weight * mean of the prediction depths' cross entropy.
    All four results add up over rows, micro-batches and ranks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.aux_loss_alpha, self.router_z_loss_coef = config.aux_loss_alpha, config.router_z_loss_coef
        self.mtp_loss_weight, self.depths = config.mtp_loss_weight, max(config.num_nextn_predict_layers, 1)
        self.depth_of_layer = nn.Buffer(torch.tensor(config.moe_layer_depths, dtype=torch.long), persistent=False)

    def forward(self, sums: LossSums, denominators_K3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(total, cross entropy, weighted router losses, mean cross entropy of the prediction depths)."""
        labels, rows, tokens = denominators_K3.clamp(min=1).unbind(1)
        cross_entropy = sums.cross_entropy / labels
        aux = (sums.aux / rows[self.depth_of_layer]).sum()
        z = (sums.z / tokens[self.depth_of_layer]).sum()
        aux_loss = self.aux_loss_alpha * aux + self.router_z_loss_coef * z
        mtp_loss = cross_entropy[1:].sum() / self.depths
        total = cross_entropy[0] + aux_loss + self.mtp_loss_weight * mtp_loss
        return total, cross_entropy[0], aux_loss, mtp_loss
