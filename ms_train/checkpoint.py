"""Initial values, save and resume: between the twin's parameters and canonical arrays."""

from collections.abc import Iterator

import numpy as np
from mindspore import Parameter, Tensor

from ms_train.model import DeepseekForCausalLM
from ms_train.optim import AdamW
from shared_ops.expert_table import placement_of
from shared_ops.init import initial_value
from shared_ops.params import manifest
from shared_ops.training_state import StepReader


class StateMap:
    """The model's tensors by canonical name; stacked experts are in slot order here and in canonical order outside."""

    def __init__(self, model: DeepseekForCausalLM):
        self.config = model.config
        self.placement = placement_of(model.config)
        self.named = {p.name: p for p in model.get_parameters()}

    def initialise(self, seed: int) -> None:
        """Give every parameter its value for `seed`."""
        for p in manifest(self.config):
            value = initial_value(p, seed, self.config.initializer_range)
            self.put(self.named[p.name], value, p.stacked_experts)

    def put(self, tensor: Parameter, canonical: np.ndarray, stacked: bool) -> None:
        """Copy a canonical array into a parameter of the twin (set_data would take any shape and dtype)."""
        if stacked:
            canonical = canonical[self.placement.expert_of_slot]
        if canonical.shape != tensor.shape or canonical.dtype != np.float32:
            raise ValueError(f"{tensor.name}: {canonical.dtype} {canonical.shape} does not fit {tensor.shape}")
        tensor.set_data(Tensor(np.array(canonical)))

    def take(self, tensor: Parameter, stacked: bool) -> np.ndarray:
        """The canonical array of a parameter of the twin."""
        array = tensor.asnumpy()
        return array[self.placement.slot_of_expert] if stacked else array

    def arrays(self, optimizer: AdamW) -> Iterator[tuple[str, np.ndarray]]:
        """Everything that training changes, one array at a time."""
        moments = optimizer.moments()
        for p in manifest(self.config):
            yield f"params/{p.name}", self.take(self.named[p.name], p.stacked_experts)
            if p.trainable:
                for kind, moment in zip(("adam_m", "adam_v"), moments[p.name], strict=True):
                    yield f"{kind}/{p.name}", self.take(moment, p.stacked_experts)

    def restore(self, optimizer: AdamW, state: StepReader) -> None:
        """The reverse of `arrays`."""
        moments = optimizer.moments()
        for p in manifest(self.config):
            self.put(self.named[p.name], state[f"params/{p.name}"], p.stacked_experts)
            if p.trainable:
                for kind, moment in zip(("adam_m", "adam_v"), moments[p.name], strict=True):
                    self.put(moment, state[f"{kind}/{p.name}"], p.stacked_experts)
