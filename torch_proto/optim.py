"""Gradient clipping, AdamW and the correction bias: what changes parameters once per step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared_ops.config import Optim
from shared_ops.params import Parameter
from torch_proto.ops import SumOfSquares


class ClipByGlobalNorm:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norm before."""

    def __init__(self, max_norm: float):
        self.max_norm = max_norm
        self.sum_of_squares = SumOfSquares()

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        norm = torch.stack([self.sum_of_squares(g) for g in gradients]).sum().sqrt().float()
        torch._foreach_mul_(list(gradients), (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class AdamW:
    """AdamW with decoupled decay of matrices only (arXiv 1711.05101), moments by canonical parameter name."""

    def __init__(self, model: nn.Module, parameters: Sequence[Parameter], optim: Optim):
        named = dict(model.named_parameters())
        self.trained = {p.name: named[p.name] for p in parameters if p.trainable}
        groups = [
            {"params": [named[p.name] for p in parameters if p.trainable and p.decay == decay], "weight_decay": amount}
            for decay, amount in ((True, optim.weight_decay), (False, 0.0))
        ]
        self.adam = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, fused=True)
        for p in self.trained.values():
            self.adam.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def update(self, lr: float) -> None:
        """One step with the gradients that the parameters hold."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """First and second moment of each trained parameter."""
        return {
            name: (self.adam.state[p]["exp_avg"], self.adam.state[p]["exp_avg_sq"]) for name, p in self.trained.items()
        }

    def set_step(self, step: int) -> None:
        """Go on after `step` updates."""
        for p in self.trained.values():
            self.adam.state[p]["step"].fill_(step)


class CorrectionBiasUpdate:
    """Auxiliary-loss-free balancing (arXiv 2412.19437, 2.1.2): b_i += rate * sign(mean load - load_i)."""

    def __init__(self, biases: Sequence[Tensor], rate: float):
        self.biases = biases
        self.rate = rate

    @torch.no_grad()
    def __call__(self, counts_LE: Tensor) -> None:
        """`counts_LE`: tokens per expert of the whole global batch, one row per layer."""
        for bias, counts in zip(self.biases, counts_LE, strict=True):
            bias += self.rate * torch.sign(counts.mean() - counts)
