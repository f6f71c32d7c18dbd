"""What passes through the modules of one side: inputs, outputs and gradients of every call, by canonical path.

A side wraps the calls of its modules in `Recorder.call`; nothing here knows its framework.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Key(NamedTuple):
    """One call: the module's path, and which of its calls in the pass it is, from 0."""

    path: str
    number: int

    def __str__(self) -> str:
        return self.path if self.number == 0 else f"{self.path} (call {self.number + 1})"


@dataclass(slots=True)
class Leaf:
    """A tensor that enters or leaves a module; `value` is None where None does. `tracked` tells whether it depends on
    what has a gradient. `gradient` is the part of this place: what other readers of the same tensor add to its gradient
    is not in it; None is zero."""

    value: np.ndarray | None
    gradient: np.ndarray | None = None
    tracked: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """`kind` is the class of the module, the same in both twins; `began` numbers the calls by when they begin."""

    key: Key
    kind: str
    began: int
    arguments: tuple  # as given, with leaves for tensors
    inputs: list[Leaf]
    outputs: list[Leaf] = field(default_factory=list)


@dataclass(frozen=True)
class Capture:
    """One forward and backward pass. `calls` are in the order in which they end: the order of the data, a module after
    the modules inside it. `gradients` has the trained parameters, in canonical form."""

    calls: dict[Key, Call]
    gradients: dict[str, np.ndarray]


# Choices to make otherwise than the scores say: rows of a TopK call's output, and what they are to be.
Forced = Mapping[Key, tuple[np.ndarray, np.ndarray]]


class Recorder:
    """Records calls. `tap(tensor)` gives (what to go on with, its Leaf), or None for what is no tensor;
    `with_rows(tensor, rows, values)` a tensor in which some rows are others; `before` are calls of the pass that have
    been made already."""

    def __init__(
        self,
        tap: Callable[[Any], tuple[Any, Leaf] | None],
        with_rows: Callable[[Any, np.ndarray, np.ndarray], Any],
        forced: Forced,
        before: Iterable[Key] = (),
    ):
        self.tap, self.with_rows, self.forced = tap, with_rows, forced
        self.calls: dict[Key, Call] = {}
        self._numbers = Counter(key.path for key in before)
        self._begun = 0

    def call(self, path: str, kind: str, run: Callable, *arguments: Any) -> Any:
        """`run(*arguments)`, recorded."""
        key = Key(path, self._numbers[path])
        self._numbers[path] += 1
        self._begun += 1
        began, inputs = self._begun, []
        tapped, kept = self._leaves(arguments, inputs)
        call = Call(key, kind, began, kept, inputs)
        out = run(*tapped)
        if key in self.forced:
            out = self.with_rows(out, *self.forced[key])
        out, _ = self._leaves(out, call.outputs)
        self.calls[key] = call
        return out

    def _leaves(self, tree: Any, into: list[Leaf]) -> tuple[Any, Any]:
        """The tree with tapped tensors, and the tree with leaves, which are also listed in `into`."""
        if isinstance(tree, (tuple, list)):
            both = [self._leaves(item, into) for item in tree]
            return rebuilt(tree, [tapped for tapped, _ in both]), rebuilt(tree, [leaf for _, leaf in both])
        tapped, leaf = (None, Leaf(None)) if tree is None else self.tap(tree) or (tree, None)
        if leaf is None:  # a number or a string
            return tree, tree
        into.append(leaf)
        return tapped, leaf


def rebuilt(like: tuple | list, items: list) -> tuple | list:
    """`items` in a tuple, named tuple or list like the given one."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def with_tensors(tree: Any, tensor_of: Callable[[Leaf], Any]) -> Any:
    """`Call.arguments` with tensors in the place of leaves."""
    if isinstance(tree, (tuple, list)):
        return rebuilt(tree, [with_tensors(item, tensor_of) for item in tree])
    if not isinstance(tree, Leaf):
        return tree
    return None if tree.value is None else tensor_of(tree)
