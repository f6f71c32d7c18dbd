"""The twin behind the training loop: builds model and step, moves values in and out."""

import resource
from collections.abc import Iterable

import numpy as np
import torch

from shared_ops.batch import Batch
from shared_ops.config import RunConfig
from shared_ops.errors import UserError
from shared_ops.resume import expected_arrays
from shared_ops.shares import Part, share_out
from shared_ops.training_loop import StepValues
from shared_ops.training_state import StepReader
from shared_ops.weights import Weights
from torch_proto.checkpoint import StateMap
from torch_proto.data import to_device
from torch_proto.model import DeepseekForCausalLM
from torch_proto.parallel import Parallel
from torch_proto.step import TrainStep, ValidationStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    """Implements `shared_ops.training_loop.Twin`."""

    def __init__(self, config: RunConfig, parallel: Parallel):
        self.config, self.parallel = config, parallel
        self.device = describe_device(parallel.device)
        self.first_step_notice = "compiling the layers: the first step takes a while" if config.train.compile else None
        self.model = DeepseekForCausalLM(config.model, config.train.sequence_length, DTYPES[config.train.precision])
        self.model.to(parallel.device)
        self.states = StateMap(self.model)
        self.states.initialise(config.run.seed)
        self.train_step = TrainStep(self.model, config, parallel)
        self.validation_step = ValidationStep(self.model, parallel)

    def step(self, batch: Batch, lr: float, update: int, stop: bool) -> StepValues:
        """One update; torch's AdamW counts updates itself."""
        result = self.train_step(to_device(batch, self.parallel.device), lr, stop)
        scalars = torch.stack(result[:-1]).tolist()
        return StepValues(*scalars, result.counts.cpu().numpy())

    def validate(self, batch: Batch) -> tuple[float, float]:
        """Cross entropy sum and number of labels, over all ranks."""
        total, labels = self.validation_step(to_device(batch, self.parallel.device))
        return float(total), float(labels)

    def arrays(self, parts: Iterable[Part] | None = None) -> Iterable[tuple[str, np.ndarray]]:
        """The given parts of the training state in canonical form, or all of it."""
        if parts is None:
            (parts,) = share_out(expected_arrays(self.config), 1)
        return self.states.arrays(self.train_step.optimizer, parts)

    def restore(self, state: StepReader, updates: int) -> None:
        """Take over a training state."""
        self.states.restore(self.train_step.optimizer, state, updates)

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
        if self.parallel.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_device(device: torch.device) -> str:
    """A device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def check_precision(precision: str, device: torch.device) -> None:
    """`UserError` where the device cannot compute in `precision`."""
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision=bf16: {describe_device(device)} has no bf16 arithmetic, use fp32")
