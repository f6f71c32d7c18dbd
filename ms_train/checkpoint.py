"""Initial values, save and resume: between the twin's parameters and canonical arrays."""

from collections.abc import Iterable, Iterator

import numpy as np
from mindspore import Parameter, Tensor

from ms_train.model import DeepseekForCausalLM
from ms_train.optim import AdamW
from shared_ops.expert_table import placement_of
from shared_ops.init import initial_value
from shared_ops.params import manifest
from shared_ops.shares import Part
from shared_ops.training_state import StepReader
from shared_ops.weights import Weights


class StateMap:
    """The model's tensors by canonical name; stacked experts are in slot order here and in canonical order outside."""

    def __init__(self, model: DeepseekForCausalLM):
        self.config = model.config
        self.placement = placement_of(model.config)
        self.moved = not np.array_equal(self.placement.slot_of_expert, np.arange(model.config.n_routed_experts))
        self.named = {p.name: p for p in model.get_parameters()}

    def initialise(self, seed: int) -> None:
        """Give every parameter its value for `seed`."""
        for p in manifest(self.config):
            value = initial_value(p, seed, self.config.initializer_range)
            self.put(self.named[p.name], value, p.stacked_experts)

    def put(self, tensor: Parameter, canonical: np.ndarray, stacked: bool) -> None:
        """Copy a canonical array into a parameter of the twin (set_data would take any shape and dtype)."""
        if stacked and self.moved:
            canonical = canonical[self.placement.expert_of_slot]
        if canonical.shape != tensor.shape or canonical.dtype != np.float32:
            raise ValueError(f"{tensor.name}: {canonical.dtype} {canonical.shape} does not fit {tensor.shape}")
        tensor.set_data(Tensor(np.array(canonical)))

    def take(self, tensor: Parameter, stacked: bool, rows: slice = slice(None)) -> np.ndarray:
        """The canonical array of a parameter of the twin, or rows of it."""
        if stacked and self.moved:  # one by one: a gather would need room for all of them on the device
            return np.stack([tensor[slot].asnumpy() for slot in self.placement.slot_of_expert[rows].tolist()])
        whole = rows in (slice(None), slice(0, tensor.shape[0]))
        return (tensor if whole else tensor[rows]).asnumpy()

    def held(self, optimizer: AdamW) -> dict[str, tuple[Parameter, bool]]:
        """All that training changes: name in a training state -> what holds it, and whether it is stacked experts."""
        moments, held = optimizer.moments(), {}
        for p in manifest(self.config):
            held[f"params/{p.name}"] = self.named[p.name], p.stacked_experts
            if p.trainable:
                for kind, moment in zip(("adam_m", "adam_v"), moments[p.name], strict=True):
                    held[f"{kind}/{p.name}"] = moment, p.stacked_experts
        return held

    def arrays(self, optimizer: AdamW, parts: Iterable[Part]) -> Iterator[tuple[str, np.ndarray]]:
        """Parts of it in canonical form, one at a time."""
        held = self.held(optimizer)
        for part in parts:
            yield part.name, self.take(*held[part.name], part.rows)

    def restore(self, optimizer: AdamW, state: StepReader) -> None:
        """The reverse of `arrays`."""
        for name, (tensor, stacked) in self.held(optimizer).items():
            self.put(tensor, state[name], stacked)

    def load(self, weights: Weights) -> None:
        """Take over the parameters alone."""
        for p in manifest(self.config):
            self.put(self.named[p.name], weights[f"params/{p.name}"], p.stacked_experts)
