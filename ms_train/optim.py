"""Gradient clipping, AdamW and the correction bias: what changes parameters once per step."""

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_train.ops import SumOfSquares
from shared_ops.config import Optim
from shared_ops.params import Parameter as ParameterSpec


class ClipByGlobalNorm(nn.Cell):
    """gradients -> (gradients times min(1, max_norm / (norm + 1e-6)), the norm before)."""

    def __init__(self, max_norm: float):
        super().__init__()
        self.max_norm = max_norm
        self.sum_of_squares = SumOfSquares()

    def construct(self, gradients):
        total = Tensor(0.0, ms.float32)
        for gradient in gradients:
            total = total + self.sum_of_squares(gradient)
        norm = ms.ops.sqrt(total)
        coefficient = ms.ops.minimum(self.max_norm / (norm + 1e-6), 1.0)
        clipped = ()
        for gradient in gradients:
            clipped = clipped + (gradient * coefficient,)
        return clipped, norm


class AdamW(nn.Cell):
    """AdamW with decoupled decay of matrices only (arXiv 1711.05101), moments by canonical parameter name."""

    def __init__(self, model: nn.Cell, parameters: Sequence[ParameterSpec], optim: Optim):
        super().__init__(auto_prefix=False)
        named = {p.name: p for p in model.get_parameters()}
        trained = [p for p in parameters if p.trainable]
        self.names = [p.name for p in trained]
        self.decayed = [p.decay for p in trained]
        self.parameters = ParameterTuple([named[name] for name in self.names])
        self.first = self.parameters.clone("adam_m", init="zeros")
        self.second = self.parameters.clone("adam_v", init="zeros")
        self.betas, self.eps, self.weight_decay = tuple(optim.betas), optim.eps, optim.weight_decay
        self.adam = ms.ops.Adam()
        self.assign = ms.ops.Assign()

    def construct(self, gradients, lr, beta1_power, beta2_power):
        """One step; `beta1_power` is beta1^t of update t, fp32 scalars. Adam's kernel adds eps to sqrt(v) before
        the bias correction, torch after: eps * sqrt(1 - beta2^t) makes them the same."""
        eps = self.eps * ms.ops.sqrt(1.0 - beta2_power)
        done = ()
        for i in range(len(self.decayed)):
            gradient = gradients[i]
            if self.decayed[i]:
                keep = 1.0 - lr * self.weight_decay
                gradient = ms.ops.depend(gradient, self.assign(self.parameters[i], self.parameters[i] * keep))
            done = done + (
                self.adam(self.parameters[i], self.first[i], self.second[i], beta1_power, beta2_power, lr,
                          self.betas[0], self.betas[1], eps, gradient),
            )  # fmt: skip
        return done

    def moments(self) -> dict[str, tuple[Parameter, Parameter]]:
        """First and second moment of each trained parameter."""
        return dict(zip(self.names, zip(self.first, self.second, strict=True), strict=True))


class CorrectionBiasUpdate(nn.Cell):
    """Auxiliary-loss-free balancing (arXiv 2412.19437, 2.1.2): b_i += rate * sign(mean load - load_i)."""

    def __init__(self, biases: Sequence[Parameter], rate: float):
        super().__init__(auto_prefix=False)
        self.biases = ParameterTuple(biases)
        self.rate = rate

    def construct(self, counts_LE):
        """`counts_LE`: tokens per expert of the whole global batch, one row per layer."""
        change = self.rate * ms.ops.sign(counts_LE.mean(1, keep_dims=True) - counts_LE)
        done = ()
        for i in range(len(self.biases)):
            done = done + (ms.ops.assign_add(self.biases[i], change[i]),)
        return done
