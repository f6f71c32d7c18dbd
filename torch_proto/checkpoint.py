"""Initial values, save and resume: between the twin's parameters and canonical arrays."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from shared_ops.expert_table import placement_of
from shared_ops.init import initial_value
from shared_ops.params import manifest
from shared_ops.shares import Part
from shared_ops.training_state import StepReader
from shared_ops.weights import Weights
from torch_proto.model import DeepseekForCausalLM
from torch_proto.optim import AdamW


class StateMap:
    """The model's tensors by canonical name; stacked experts are in slot order here and in canonical order outside."""

    def __init__(self, model: DeepseekForCausalLM):
        self.config = model.config
        self.placement = placement_of(model.config)
        self.moved = not np.array_equal(self.placement.slot_of_expert, np.arange(model.config.n_routed_experts))
        self.named = dict(model.named_parameters())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Give every parameter its value for `seed`."""
        for p in manifest(self.config):
            value = initial_value(p, seed, self.config.initializer_range)
            self.put(self.named[p.name], value, p.stacked_experts)

    def put(self, tensor: Tensor, canonical: np.ndarray, stacked: bool) -> None:
        """Copy a canonical array into a tensor of the twin (copy_ would take any dtype and shapes that broadcast)."""
        if stacked and self.moved:
            canonical = canonical[self.placement.expert_of_slot]
        if canonical.shape != tensor.shape or canonical.dtype != np.float32:
            raise ValueError(f"{canonical.dtype} {canonical.shape} does not fit {tuple(tensor.shape)}")
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(canonical)))

    def take(self, tensor: Tensor, stacked: bool, rows: slice = slice(None)) -> np.ndarray:
        """The canonical array of a tensor of the twin, or rows of it."""
        tensor = tensor.detach()
        if stacked and self.moved:  # one by one: a gather would need room for all of them on the device
            return np.stack([tensor[slot].cpu().numpy() for slot in self.placement.slot_of_expert[rows].tolist()])
        return tensor[rows].cpu().numpy()

    def held(self, optimizer: AdamW) -> dict[str, tuple[Tensor, bool]]:
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

    @torch.no_grad()
    def restore(self, optimizer: AdamW, state: StepReader, step: int) -> None:
        """The reverse of `arrays`."""
        for name, (tensor, stacked) in self.held(optimizer).items():
            self.put(tensor, state[name], stacked)
        optimizer.set_step(step)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over the parameters alone."""
        for p in manifest(self.config):
            self.put(self.named[p.name], weights[f"params/{p.name}"], p.stacked_experts)
