"""From the sums of some rows to the loss: every term has one denominator, that of the global batch."""

from typing import NamedTuple

from torch import Tensor, nn

from shared_ops.config import ModelConfig


class LossSums(NamedTuple):
    """Per depth cross_entropy [K] over labels, aux [K] over rows and z [K] over tokens, the last two over the depth's
    layers too; counts [L, E], tokens per expert of each layer."""

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

    def forward(self, sums: LossSums, denominators_K3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(total, cross entropy, weighted router losses, mean cross entropy of the prediction depths)."""
        labels, rows, tokens = denominators_K3.clamp(min=1).unbind(1)
        cross_entropy = sums.cross_entropy / labels
        aux_loss = (self.aux_loss_alpha * sums.aux / rows + self.router_z_loss_coef * sums.z / tokens).sum()
        mtp_loss = cross_entropy[1:].sum() / self.depths
        total = cross_entropy[0] + aux_loss + self.mtp_loss_weight * mtp_loss
        return total, cross_entropy[0], aux_loss, mtp_loss
