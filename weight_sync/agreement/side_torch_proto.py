"""The PyTorch twin as a side of the comparison: its modules' calls are recorded where they are made."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from shared_ops.batch import Batch
from shared_ops.config import RunConfig
from shared_ops.params import manifest
from shared_ops.training_loop import StepValues
from torch_proto.data import to_device
from torch_proto.parallel import Parallel
from torch_proto.trainer import Trainer
from weight_sync.agreement.capture import Call, Capture, Forced, Key, Leaf, Recorder, with_tensors

HEAD, LOSS = "lm_head", "total_loss"


class Side:
    """torch_proto, with the given parameters."""

    name = "torch_proto"

    def __init__(self, config: RunConfig, state: Mapping[str, np.ndarray]):
        self.config = config
        self.trainer = Trainer(config, Parallel())
        self.trainer.restore(state, 0)
        self.model, self.device = self.trainer.model, self.trainer.parallel.device
        self.trained = [p for p in manifest(config.model) if p.trainable]
        self.places = places(self.model)
        self.places[LOSS] = (self.trainer.train_step.total_loss, "forward")
        if self.model.tied:  # the head is a method then
            self.places[HEAD] = (self.model, "logits")

    def source(self, path: str) -> str:
        """Where the code of a module is."""
        module, method = self.places[path]
        return f"{type(module).__module__}.{type(module).__name__}.{method}"

    def capture(self, batch: Batch, forced: Forced) -> Capture:
        """One pass over the batch, forward and backward."""
        recorder = Recorder(tap, with_rows, forced)
        with recorded(self.places, recorder):
            tensors = to_device(batch, self.device)
            sums = self.model(*tensors[:5])
            self.places[LOSS][0](sums, tensors.denominators)[0].backward()
        return Capture(recorder.calls, self._take_gradients())

    def shares(self, parameter: str) -> tuple[str, ...]:
        """A tied head uses the embedding's weight."""
        return (HEAD,) if self.model.tied and parameter == "model.embed_tokens.weight" else ()

    def replay(
        self,
        call: Call,
        before: Sequence[Key],
        inputs: Sequence[Leaf],
        gradients: Sequence[np.ndarray],
        forced: Forced,
    ) -> tuple[Call, dict[str, np.ndarray]]:
        """See `compare.Side`."""
        recorder, given = Recorder(tap, with_rows, forced, before), iter(inputs)

        def tensor_of(_: Leaf) -> Tensor:
            leaf = next(given)
            return torch.from_numpy(np.array(leaf.value)).to(self.device).requires_grad_(leaf.tracked)

        arguments = with_tensors(call.arguments, tensor_of)
        with recorded(self.places, recorder):
            module, method = self.places[call.key.path]
            out = flat(getattr(module, method)(*arguments))
            pairs = [(t, torch.from_numpy(np.array(g)).to(t)) for t, g in zip(out, gradients, strict=True)
                     if t is not None and t.requires_grad]  # fmt: skip
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))
        return recorder.calls[call.key], self._take_gradients()

    def step(self, batch: Batch, lr: float, update: int) -> StepValues:
        """Update 1, 2, … as training makes it."""
        return self.trainer.step(batch, lr, update, False)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the training state's arrays."""
        return {name: np.array(array) for name, array in self.trainer.arrays()}

    def _take_gradients(self) -> dict[str, np.ndarray]:
        """The parameters' gradients in canonical form; the parameters have none afterwards."""
        states, found = self.trainer.states, {}
        for p in self.trained:
            parameter = states.named[p.name]
            if parameter.grad is not None:
                found[p.name] = states.take(parameter.grad, p.stacked_experts)
                parameter.grad = None
        return found


def places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Canonical path -> module and the method that is its call."""
    named = ((path or type(model).__name__, module) for path, module in model.named_modules())
    return {path: (module, "predict" if hasattr(module, "predict") else "forward") for path, module in named}


@contextmanager
def recorded(where: Mapping[str, tuple[nn.Module, str]], recorder: Recorder) -> Iterator[None]:
    """Calls of the modules go through the recorder."""
    for path, (module, method) in where.items():
        run = getattr(module, method)
        setattr(module, method, partial(recorder.call, path, type(module).__name__, run))
    try:
        yield
    finally:
        for module, method in where.values():
            delattr(module, method)  # the class's shows again


def tap(tensor: object) -> tuple[Tensor, Leaf] | None:
    """An alias whose gradient is this place's alone."""
    if not isinstance(tensor, Tensor):
        return None
    value = tensor.detach().cpu().numpy()
    leaf = Leaf(value.copy() if tensor.is_leaf else value)  # a step changes parameters in place
    leaf.tracked = tensor.requires_grad
    if not leaf.tracked:
        return tensor, leaf
    alias = tensor.view_as(tensor)

    def keep(gradient: Tensor) -> None:
        leaf.gradient = gradient.detach().cpu().numpy()

    alias.register_hook(keep)
    return alias, leaf


def with_rows(tensor: Tensor, rows: np.ndarray, values: np.ndarray) -> Tensor:
    """A copy in which some rows are others."""
    out = tensor.clone()
    out[torch.from_numpy(rows).to(out.device)] = torch.from_numpy(values).to(out)
    return out


def flat(tree: object) -> list[Tensor | None]:
    """The tensors of nested tuples, in order; None stays."""
    return [t for item in tree for t in flat(item)] if isinstance(tree, (tuple, list)) else [tree]
