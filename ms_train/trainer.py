"""The twin behind the training loop: builds model and step, moves values in and out."""

import resource
from collections.abc import Iterable

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_train import ops
from ms_train.checkpoint import StateMap
from ms_train.data import to_device
from ms_train.model import DeepseekForCausalLM
from ms_train.parallel import Parallel
from ms_train.step import TrainStep, ValidationStep
from shared_ops.batch import Batch
from shared_ops.config import RunConfig
from shared_ops.errors import UserError
from shared_ops.resume import expected_arrays
from shared_ops.shares import Part, share_out
from shared_ops.training_loop import StepValues
from shared_ops.training_state import StepReader
from shared_ops.weights import Weights

DTYPES = {"fp32": ms.float32, "bf16": ms.bfloat16}
LAYERS_WITHIN_DEFAULT_RECURSION = 24


class Trainer:
    """Implements `shared_ops.training_loop.Twin`."""

    def __init__(self, config: RunConfig, parallel: Parallel):
        self.config, self.parallel = config, parallel
        self.device = parallel.device
        self.first_step_notice = "compiling the training graph: the first step takes a while"
        if config.model.num_hidden_layers > LAYERS_WITHIN_DEFAULT_RECURSION:
            ms.set_recursion_limit(10000)
        ops.select(config.train.kernels)
        self.model = DeepseekForCausalLM(config.model, config.train.sequence_length, DTYPES[config.train.precision])
        self.states = StateMap(self.model)
        self.states.initialise(config.run.seed)
        self.train_step = TrainStep(self.model, config, parallel)
        self.validation_step = ValidationStep(self.model, parallel)

    def step(self, batch: Batch, lr: float, update: int, stop: bool) -> StepValues:
        """Update number `update` (1, 2, …)."""
        rates = self.train_step.optimizer.rates(lr, update)
        scalars = (Tensor(float(value), ms.float32) for value in (*rates, stop))
        reported, norm, counts = self.train_step(*to_device(batch), *scalars)
        loss, aux_loss, mtp_loss, stops = reported.asnumpy().tolist()
        return StepValues(loss, aux_loss, mtp_loss, float(norm.asnumpy()), stops, counts.asnumpy())

    def validate(self, batch: Batch) -> tuple[float, float]:
        """Cross entropy sum and number of labels, over all ranks."""
        b = to_device(batch)
        both = self.validation_step(b.input_ids, b.labels, b.position_ids, b.segment_ids, b.denominators)
        total, labels = both.asnumpy().tolist()
        return total, labels

    def arrays(self, parts: Iterable[Part] | None = None) -> Iterable[tuple[str, np.ndarray]]:
        """The given parts of the training state in canonical form, or all of it."""
        if parts is None:
            (parts,) = share_out(expected_arrays(self.config), 1)
        return self.states.arrays(self.train_step.optimizer, parts)

    def restore(self, state: StepReader, updates: int) -> None:
        """Take over a training state; the count of updates comes with each step."""
        self.states.restore(self.train_step.optimizer, state)

    def load(self, weights: Weights) -> None:
        """Take over parameters only."""
        self.states.load(weights)

    def total(self, number: float) -> float:
        """The sum of a number over all ranks."""
        return self.parallel.total(number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.parallel.total(0)

    def memory_bytes(self) -> int:
        """Peak memory: the device's allocations, or this process's resident set."""
        if self.device == "Ascend":
            return ms.runtime.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_precision(precision: str, device: str) -> None:
    """`UserError` where the device cannot compute in `precision`."""
    if precision == "bf16" and device == "CPU":
        raise UserError("train.precision=bf16: MindSpore has no bf16 arithmetic on CPU, use fp32 here or an Ascend")
