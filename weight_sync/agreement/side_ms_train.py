"""The MindSpore twin as a side of the comparison.

A compiled graph shows nothing of its inside, so the modules are compared in PyNative mode: the same cells, called one
by one, with the same kernels. The optimizer's steps, which follow, run as the compiled graph of training.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.common.api import _pynative_executor

from ms_train.data import to_device
from ms_train.parallel import Parallel
from ms_train.step import MicroBatchLoss
from ms_train.trainer import Trainer
from shared_ops.batch import Batch
from shared_ops.config import RunConfig
from shared_ops.params import manifest
from shared_ops.training_loop import StepValues
from weight_sync.agreement.capture import Call, Capture, Forced, Key, Leaf, Recorder, with_tensors

HEAD, LOSS = "lm_head", "total_loss"


class Side:
    """ms_train, with the given parameters."""

    name = "ms_train"

    def __init__(self, config: RunConfig, state: Mapping[str, np.ndarray]):
        self.config = config
        with mode(ms.GRAPH_MODE):
            self.trainer = Trainer(config, Parallel())
        self.trainer.restore(state, 0)
        self.model = self.trainer.model
        self.loss = MicroBatchLoss(self.model)
        self.trained = [p for p in manifest(config.model) if p.trainable]
        named = ((path or type(self.model).__name__, cell) for path, cell in self.model.cells_and_names())
        self.places = {path: (cell, "predict" if hasattr(cell, "predict") else "construct") for path, cell in named}
        self.places[LOSS] = (self.loss.total_loss, "construct")
        if self.model.tied:  # the head is a method then
            self.places[HEAD] = (self.model, "logits")

    def source(self, path: str) -> str:
        """Where the code of a module is."""
        cell, method = self.places[path]
        return f"{type(cell).__module__}.{type(cell).__name__}.{method}"

    def capture(self, batch: Batch, forced: Forced) -> Capture:
        """One pass over the batch, forward and backward."""
        recorder = Recorder(tap, with_rows, forced)
        weights = ParameterTuple([self.trainer.states.named[p.name] for p in self.trained])
        tensors = to_device(batch)

        def loss() -> tuple:
            """Of constants: arguments would be tracked for gradients."""
            return self.loss(*tensors)

        with pynative(), recorded(self.places, recorder):
            _, gradients = ms.value_and_grad(loss, None, weights, has_aux=True)()
            return Capture(as_arrays(recorder.calls), self._canonical(self.trained, gradients))

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
        recorder, given, variables = Recorder(tap, with_rows, forced, before), iter(inputs), []
        cell, method = self.places[call.key.path]

        def tensor_of(_: Leaf) -> Tensor:
            leaf = next(given)
            tensor = Tensor(np.array(leaf.value))
            if leaf.tracked:
                variables.append(tensor)
            return tensor

        arguments = with_tensors(call.arguments, tensor_of)
        own = {id(p) for p in cell.get_parameters()}
        specs = [p for p in self.trained if id(self.trainer.states.named[p.name]) in own]
        weights = ParameterTuple([self.trainer.states.named[p.name] for p in specs])

        def total(*changed: Tensor) -> Tensor:
            """<outputs, their gradients>, so that its gradient is the call's."""
            new = dict(zip(map(id, variables), changed, strict=True))
            run = getattr(cell, method) if method in ("predict", "logits") else cell
            out = flat(run(*_replaced(arguments, new)))
            result = Tensor(0.0, ms.float32)
            for tensor, gradient in zip(out, gradients, strict=True):
                if tensor is not None and tensor.dtype == ms.float32:
                    result = result + (tensor * Tensor(np.array(gradient))).sum()
            return result

        with pynative(), recorded(self.places, recorder):
            positions = tuple(range(len(variables))) or None
            by_weight = ()
            if positions or specs:
                _, found = ms.value_and_grad(total, positions, weights if specs else None)(*variables)
                by_weight = (found[1] if positions else found) if specs else ()
            else:
                total()
            return as_arrays(recorder.calls)[call.key], self._canonical(specs, by_weight)

    def step(self, batch: Batch, lr: float, update: int) -> StepValues:
        """Update 1, 2, … as training makes it: one compiled graph."""
        with mode(ms.GRAPH_MODE):
            return self.trainer.step(batch, lr, update, False)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the training state's arrays."""
        return {name: np.array(array) for name, array in self.trainer.arrays()}

    def _canonical(self, specs: Sequence, gradients: Sequence[Tensor]) -> dict[str, np.ndarray]:
        states = self.trainer.states
        return {p.name: states.take(g, p.stacked_experts) for p, g in zip(specs, gradients, strict=True)}


@contextmanager
def mode(wanted: int) -> Iterator[None]:
    """An execution mode; afterwards the process has the one it had."""
    before = ms.get_context("mode")
    ms.set_context(mode=wanted)
    try:
        yield
    finally:
        ms.set_context(mode=before)


@contextmanager
def pynative() -> Iterator[None]:
    """Cells run one by one. An error in the middle of a gradient would be in the way of every later one."""
    with mode(ms.PYNATIVE_MODE):
        try:
            yield
        except BaseException:
            _pynative_executor.clear_res()
            raise


@contextmanager
def recorded(places: Mapping[str, tuple[nn.Cell, str]], recorder: Recorder) -> Iterator[None]:
    """Calls of the cells go through the recorder.

    Around `Cell.__call__`, because a cell with a bprop of its own (the composite operations) hides what happens in its
    construct from the gradient, and takes no hooks.
    """
    called = {id(cell): path for path, (cell, method) in places.items() if method == "construct"}
    methods = [(path, cell, method) for path, (cell, method) in places.items() if method != "construct"]
    call_of_cell = nn.Cell.__call__

    def recorded_call(cell: nn.Cell, *arguments, **named):
        path = called.get(id(cell))
        if path is None or named:
            return call_of_cell(cell, *arguments, **named)
        return recorder.call(path, kind(cell), partial(call_of_cell, cell), *arguments)

    nn.Cell.__call__ = recorded_call
    for path, cell, method in methods:
        object.__setattr__(cell, method, partial(recorder.call, path, kind(cell), getattr(cell, method)))
    try:
        yield
    finally:
        nn.Cell.__call__ = call_of_cell
        for _, cell, method in methods:
            object.__delattr__(cell, method)  # the class's shows again


def kind(cell: nn.Cell) -> str:
    """The class; of an operation its interface, whatever the backend."""
    return next(c.__name__ for c in type(cell).__mro__ if not c.__name__.startswith("_"))


def tap(tensor: object) -> tuple[Tensor, Leaf] | None:
    """An alias whose gradient is this place's alone. The leaf holds tensors until `as_arrays`: to wait for each would
    take three times as long."""
    if not isinstance(tensor, (Tensor, Parameter)):
        return None
    leaf = Leaf(tensor)
    if tensor.dtype != ms.float32:
        return tensor, leaf
    alias = tensor.view_as(tensor)
    leaf.tracked = alias._requires_grad
    if not leaf.tracked:
        return tensor, leaf

    def keep(gradient: Tensor) -> Tensor:
        leaf.gradient = gradient
        return gradient

    alias.register_hook(keep)
    return alias, leaf


def as_arrays(calls: dict[Key, Call]) -> dict[Key, Call]:
    """The calls with arrays for tensors; of parameters copies, since a step changes them in place."""
    for call in calls.values():
        for leaf in (*call.inputs, *call.outputs):
            if leaf.value is not None:
                value = leaf.value.asnumpy()
                leaf.value = value.copy() if isinstance(leaf.value, Parameter) else value
            if leaf.gradient is not None:
                leaf.gradient = leaf.gradient.asnumpy()
    return calls


def with_rows(tensor: Tensor, rows: np.ndarray, values: np.ndarray) -> Tensor:
    """A copy in which some rows are others."""
    out = tensor.asnumpy().copy()
    out[rows] = values
    return Tensor(out)


def flat(tree: object) -> list[Tensor | None]:
    """The tensors of nested tuples, in order; None stays."""
    return [t for item in tree for t in flat(item)] if isinstance(tree, (tuple, list)) else [tree]


def _replaced(tree: object, new: Mapping[int, Tensor]) -> object:
    """Nested tuples with some tensors replaced, by identity."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_replaced(item, new) for item in tree)
    return new.get(id(tree), tree)
