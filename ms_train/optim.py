"""Gradient clipping, AdamW and the correction bias: what changes parameters once per step."""

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter, ParameterTuple, nn

from ms_train.ops import SumOfSquares
from shared_ops.config import Optim
from shared_ops.params import Parameter as ParameterSpec


class ClipByGlobalNorm(nn.Cell):
    """gradients -> (gradients times min(1, max_norm / (norm + 1e-6)), the norm before)."""

    def __init__(self, max_norm: float):
        super().__init__()
        self.max_norm = max_norm
        self.sum_of_squares = SumOfSquares()
        self.map = ms.ops.HyperMap()
        self.add = ms.ops.AddN()

    def construct(self, gradients):
        norm = ms.ops.sqrt(self.add(self.map(self.sum_of_squares, gradients)))
        coefficient = ms.ops.minimum(self.max_norm / (norm + 1e-6), 1.0)
        return self.map(ms.ops.partial(_scale, coefficient), gradients), norm


def _scale(factor, tensor):
    return tensor * factor


class AdamW(nn.Cell):
    """AdamW with decoupled decay of matrices only (arXiv 1711.05101), moments by canonical parameter name."""

    def __init__(self, model: nn.Cell, parameters: Sequence[ParameterSpec], optim: Optim):
        super().__init__(auto_prefix=False)
        named = {p.name: p for p in model.get_parameters()}
        trained = [p for p in parameters if p.trainable]
        self.names = [p.name for p in trained]
        self.decayed = tuple(p.decay for p in trained)
        self.parameters = ParameterTuple([named[name] for name in self.names])
        self.first = self.parameters.clone("adam_m", init="zeros")
        self.second = self.parameters.clone("adam_v", init="zeros")
        self.betas, self.eps, self.weight_decay = tuple(optim.betas), optim.eps, optim.weight_decay
        self.adam = ms.ops.Adam()
        self.assign = ms.ops.Assign()
        self.map = ms.ops.HyperMap()  # a Python loop that grows a tuple costs quadratic compile time

    def construct(self, gradients, keep, lr, eps):
        """One step with the scalars of `rates`."""
        update = ms.ops.partial(self._update_parameter, keep, lr, eps)
        return self.map(update, self.decayed, self.parameters, self.first, self.second, gradients)

    def _update_parameter(self, keep, lr, eps, decayed, parameter, first, second, gradient):
        if decayed:
            gradient = ms.ops.depend(gradient, self.assign(parameter, parameter * keep))
        beta1, beta2 = self.betas
        no_power = 0.0  # the bias correction is in lr and eps already
        return self.adam(parameter, first, second, no_power, no_power, lr, beta1, beta2, eps, gradient)

    def rates(self, lr: float, update: int) -> tuple[float, float, float]:
        """(factor on decayed parameters, learning rate and eps with the bias correction of update 1, 2, …).

        Computed on the host in double precision: 1 - beta2^t loses digits in fp32. Adam's kernel adds eps to sqrt(v)
        before the correction, torch after it: eps sqrt(1 - beta2^t) makes them the same.
        """
        first, second = (1.0 - beta**update for beta in self.betas)
        return 1.0 - lr * self.weight_decay, lr * second**0.5 / first, self.eps * second**0.5

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
