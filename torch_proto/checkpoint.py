"""Initial values, save and resume: between the twin's parameters and canonical arrays."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from shared_ops.expert_table import placement_of
from shared_ops.init import initial_value
from shared_ops.params import manifest
from shared_ops.training_state import StepReader
from torch_proto.model import DeepseekForCausalLM
from torch_proto.optim import AdamW


class StateMap:
    """The model's tensors by canonical name; stacked experts are in slot order here and in canonical order outside."""

    def __init__(self, model: DeepseekForCausalLM):
        self.config = model.config
        self.placement = placement_of(model.config)
        self.named = dict(model.named_parameters())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Give every parameter its value for `seed`."""
        for p in manifest(self.config):
            value = initial_value(p, seed, self.config.initializer_range)
            self.put(self.named[p.name], value, p.stacked_experts)

    def put(self, tensor: Tensor, canonical: np.ndarray, stacked: bool) -> None:
        """Copy a canonical array into a tensor of the twin."""
        if stacked:
            canonical = canonical[self.placement.expert_of_slot]
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(canonical)))

    def take(self, tensor: Tensor, stacked: bool) -> np.ndarray:
        """The canonical array of a tensor of the twin."""
        array = tensor.detach().cpu().numpy()
        return array[self.placement.slot_of_expert] if stacked else array

    def arrays(self, optimizer: AdamW) -> Iterator[tuple[str, np.ndarray]]:
        """Everything that training changes, one array at a time."""
        moments = optimizer.moments()
        for p in manifest(self.config):
            yield f"params/{p.name}", self.take(self.named[p.name], p.stacked_experts)
            if p.trainable:
                for kind, moment in zip(("adam_m", "adam_v"), moments[p.name], strict=True):
                    yield f"{kind}/{p.name}", self.take(moment, p.stacked_experts)

    @torch.no_grad()
    def restore(self, optimizer: AdamW, state: StepReader, step: int) -> None:
        """The reverse of `arrays`."""
        moments = optimizer.moments()
        for p in manifest(self.config):
            self.put(self.named[p.name], state[f"params/{p.name}"], p.stacked_experts)
            if p.trainable:
                for kind, moment in zip(("adam_m", "adam_v"), moments[p.name], strict=True):
                    self.put(moment, state[f"{kind}/{p.name}"], p.stacked_experts)
        optimizer.set_step(step)
