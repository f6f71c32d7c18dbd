"""From the sums of one set of rows to the loss: every term has one denominator, that of the global batch."""

from typing import NamedTuple

from torch import Tensor

from shared_ops.config import ModelConfig


class LossSums(NamedTuple):
    """cross_entropy [K] over labels; aux [L] over rows; z [L] over tokens; counts [L, E] tokens per expert."""

    cross_entropy: Tensor
    aux: Tensor
    z: Tensor
    counts: Tensor


class LossParts(NamedTuple):
    """Scalars that add up over rows, micro-batches and ranks: the total, and what is reported of it."""

    total: Tensor
    loss: Tensor
    aux_loss: Tensor
    mtp_loss: Tensor


def loss_parts(config: ModelConfig, sums: LossSums, denominators_K3: Tensor) -> LossParts:
    """Token-weighted means: `denominators_K3` counts labels, rows and tokens of the whole global batch per depth.

    total = cross entropy + weighted router losses + mtp_loss_weight * mean over depths of their cross entropy.
    """
    labels, rows, tokens = denominators_K3.clamp(min=1).unbind(1)
    cross_entropy = sums.cross_entropy / labels
    depth = list(config.moe_layer_depths)
    aux, z = (sums.aux / rows[depth]).sum(), (sums.z / tokens[depth]).sum()
    aux_loss = config.aux_loss_alpha * aux + config.router_z_loss_coef * z
    mtp_loss = cross_entropy[1:].sum() / max(config.num_nextn_predict_layers, 1)
    total = cross_entropy[0] + aux_loss + config.mtp_loss_weight * mtp_loss
    return LossParts(total, cross_entropy[0], aux_loss, mtp_loss)
