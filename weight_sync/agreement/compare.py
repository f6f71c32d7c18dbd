"""Two captures of one pass, module by module: how far apart they are, and which module is the first that makes them so.

A difference is the largest one in a tensor, relative to the tensor's largest value on either side; of integers and of
choices it is the share of rows that differ. Chosen experts are compared as sets (frameworks order equal scores
differently), their weights expert by expert.

What is blamed has been tried alone: a module of one side gets what the other side's module got, and its outputs and
gradients are compared with the other's. So neither rounding that adds up along depth nor what an earlier module has
spoilt is taken for a fault. Faults in outputs come first, in the order of the data, then those in gradients, in the
order of the backward pass; a module comes after the modules inside it, and so is blamed only for what they do not show.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shared_ops.batch import Batch
from weight_sync.agreement.capture import Call, Capture, Forced, Key, Leaf


class Side(Protocol):
    """One implementation with the parameters; `replay` is the twins' only."""

    name: str

    def capture(self, batch: Batch, forced: Forced) -> Capture:
        """One pass, forward and backward; choices as `forced` says, else its own."""

    def replay(
        self, call: Call, before: Sequence[Key], inputs: Sequence[Leaf], gradients: Sequence[np.ndarray], forced: Forced
    ) -> tuple[Call, dict[str, np.ndarray]]:
        """A call alone, on other inputs and other gradients of its outputs; `before` are the calls that the whole pass
        has made by then -> the call and the gradients of its parameters, in canonical form."""

    def shares(self, parameter: str) -> tuple[str, ...]:
        """Paths of further modules that use a parameter."""

    def source(self, path: str) -> str:
        """Where the code of a module is."""


@dataclass
class Row:
    """Differences of one call: of what enters, of what leaves, of the gradient that comes from behind, of the one that
    goes on to the modules before, and of those of its own parameters."""

    key: Key
    kind: str
    input: float = 0.0
    output: float = 0.0
    output_gradient: float = 0.0
    input_gradient: float = 0.0
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def gradient(self) -> float:
        """The worst of what the module's backward makes."""
        return max(self.input_gradient, *self.parameters.values(), 0.0)

    @property
    def worst(self) -> float:
        return max(self.input, self.output, self.output_gradient, self.gradient)


@dataclass(frozen=True)
class Blame:
    """The first module at fault, in its "outputs" or "gradients"; `finding` says in words what it makes of equal
    inputs."""

    key: Key
    direction: str
    difference: float
    finding: str


@dataclass(frozen=True)
class Flip:
    """Rounding decided a choice: in these rows of a TopK call two scores were equal up to `gap`, relative to the
    largest."""

    key: Key
    rows: np.ndarray
    gap: float


@dataclass
class Comparison:
    """All calls that both sides have, in the order of the data. `flips` were made equal before comparing."""

    rows: list[Row]
    flips: list[Flip]
    blame: Blame | None
    only: tuple[list[str], list[str]]  # modules that only one side calls

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: row.worst)


def compare_sides(reference: Side, follower: Side, batch: Batch, bound: float) -> Comparison:
    """Run both on the batch; the follower, a twin, takes the reference's choice where rounding decides it."""
    theirs, forced, flips = reference.capture(batch, {}), {}, []
    while True:
        ours = follower.capture(batch, forced)
        found = ties(theirs, ours, bound)
        if not found:
            break
        for flip, chosen in found:
            flips.append(flip)
            rows, values = forced.get(flip.key, (np.empty(0, np.int64), chosen[:0]))
            forced[flip.key] = np.concatenate((rows, flip.rows)), np.concatenate((values, chosen))
    rows = [row_of(theirs.calls[key], call) for key, call in ours.calls.items() if key in theirs.calls]
    _attach_parameters(rows, theirs, ours)
    spoilt = {row.key for row in rows if row.input > bound}  # by a fault: no rounding that anyone wants to know of
    flips = [flip for flip in flips if flip.key not in spoilt]
    only = [sorted({k.path for k in a.calls.keys() - b.calls.keys()}) for a, b in ((theirs, ours), (ours, theirs))]
    blame = _Trial(theirs, ours, follower, forced).first_fault(rows, bound)
    return Comparison(rows, flips, blame, tuple(only))


# --- differences -------------------------------------------------------------------------------------------------


def difference(a: np.ndarray | None, b: np.ndarray | None) -> float:
    """See the module; infinite where shapes, infinities or NaNs differ. None is a tensor of zeros."""
    if a is None or b is None:
        return 0.0 if not _any(a) and not _any(b) else 1.0
    if a.shape != b.shape:
        return np.inf
    if a.size == 0:
        return 0.0
    if a.dtype.kind != "f":
        rows = (a != b).reshape(len(a) if a.ndim else 1, -1).any(1)
        return float(rows.mean())
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        if not np.array_equal(a[~finite], b[~finite]):
            return np.inf
        a, b = a[finite], b[finite]
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0) / scale) if scale > 0 else 0.0


def _any(a: np.ndarray | None) -> bool:
    return a is not None and bool(np.any(a))


def row_of(theirs: Call, ours: Call) -> Row:
    """The differences of one call, parameters apart."""
    row = Row(ours.key, ours.kind)
    row.input, row.input_gradient = _worst(aligned(theirs, "inputs"), aligned(ours, "inputs"))
    row.output, row.output_gradient = _worst(aligned(theirs, "outputs"), aligned(ours, "outputs"))
    return row


def _worst(theirs: Sequence[Leaf], ours: Sequence[Leaf]) -> tuple[float, float]:
    pairs = list(zip(theirs, ours, strict=False))
    return max((_of(a, b, "value") for a, b in pairs), default=0.0), max(
        (_of(a, b, "gradient") for a, b in pairs), default=0.0
    )


def _of(a: Leaf, b: Leaf, what: str) -> float:
    """The difference of two leaves' values or gradients; 0 where one side has nothing to compare."""
    if not comparable(a.value, b.value) or (what == "gradient" and not (a.tracked and b.tracked)):
        return 0.0
    return difference(getattr(a, what), getattr(b, what))


def comparable(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Whether both sides mean the same by a tensor. What says which keys are visible has a form of each side's own."""
    return a is not None and b is not None and _sort(a) == _sort(b)


def _sort(a: np.ndarray) -> str:
    return "i" if a.dtype.kind == "u" else a.dtype.kind


# Where chosen experts are, by kind of module: position of the choices [T, K], and of their weights.
CHOICES = {("TopK", "outputs"): (0, None), ("ChosenMask", "inputs"): (0, None), ("Router", "outputs"): (0, 1),
           ("RoutedExperts", "inputs"): (1, 2)}  # fmt: skip


def aligned(call: Call, where: str) -> list[Leaf]:
    """Inputs or outputs with every row's choices in ascending order, and their weights with them."""
    leaves = list(getattr(call, where))
    if (call.kind, where) not in CHOICES:
        return leaves
    chosen, weights = CHOICES[call.kind, where]
    order = np.argsort(leaves[chosen].value, axis=-1, kind="stable")
    for position in (chosen, weights):
        if position is not None:
            leaf = leaves[position]
            gradient = leaf.gradient if leaf.gradient is None else np.take_along_axis(leaf.gradient, order, -1)
            leaves[position] = Leaf(np.take_along_axis(leaf.value, order, -1), gradient, leaf.tracked)
    return leaves


def _attach_parameters(rows: Sequence[Row], theirs: Capture, ours: Capture) -> None:
    """Give every parameter's gradient to the first call of its module, or of the nearest one around it."""
    first = {row.key.path: row for row in reversed(rows)}
    outermost = max(rows, key=lambda row: -ours.calls[row.key].began)
    for name in sorted(theirs.gradients.keys() | ours.gradients.keys()):
        path = name.rpartition(".")[0]
        while path and path not in first:
            path = path.rpartition(".")[0]
        row = first.get(path, outermost)
        row.parameters[name] = difference(theirs.gradients.get(name), ours.gradients.get(name))


# --- choices that rounding decides -------------------------------------------------------------------------------


def ties(theirs: Capture, ours: Capture, bound: float) -> list[tuple[Flip, np.ndarray]]:
    """Choices that differ though the scores say as much for one as for the other, and what the reference chose."""
    flips = ((_flip(call, chosen, bound), chosen) for call, chosen in _both_choices(theirs, ours))
    return [(flip, chosen[flip.rows]) for flip, chosen in flips if flip is not None]


def _both_choices(theirs: Capture, ours: Capture) -> Iterator[tuple[Call, np.ndarray]]:
    """The follower's calls of TopK, each with the reference's indices."""
    for key, call in ours.calls.items():
        if call.kind == "TopK" and key in theirs.calls:
            chosen = theirs.calls[key].outputs[0].value
            if chosen.shape == call.outputs[0].value.shape:
                yield call, chosen


def _same_set(own: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[T]"""
    return (np.sort(own, -1) == np.sort(chosen, -1)).all(-1)


def _flip(call: Call, chosen: np.ndarray, bound: float) -> Flip | None:
    scores, own = call.inputs[0].value, call.outputs[0].value
    rows = np.flatnonzero(~_same_set(own, chosen))
    if not len(rows):
        return None
    scale = np.abs(scores[np.isfinite(scores)]).max(initial=0.0)
    exchanged = _chosen_mask(own[rows], scores.shape[-1]) != _chosen_mask(chosen[rows], scores.shape[-1])
    gaps = np.where(exchanged, scores[rows], -np.inf).max(-1) - np.where(exchanged, scores[rows], np.inf).min(-1)
    tied = gaps <= 2 * bound * scale
    return Flip(call.key, rows[tied], float(gaps[tied].max() / scale)) if tied.any() else None


def _chosen_mask(indices: np.ndarray, n: int) -> np.ndarray:
    """[R, K] -> bool [R, n]"""
    mask = np.zeros((len(indices), n), bool)
    np.put_along_axis(mask, indices.astype(np.int64), True, -1)
    return mask


# --- the first fault ---------------------------------------------------------------------------------------------


class _Trial:
    """Tries the follower's modules alone, on what the reference's modules got."""

    def __init__(self, theirs: Capture, ours: Capture, follower: Side, forced: Forced):
        self.theirs, self.ours, self.follower = theirs, ours, follower
        # all that is chosen alike in the reference's order, so that gradients of weights meet their weights
        self.forced = dict(forced)
        for call, chosen in _both_choices(theirs, ours):
            rows = np.flatnonzero(_same_set(call.outputs[0].value, chosen))
            self.forced[call.key] = rows, chosen[rows]

    def first_fault(self, rows: Sequence[Row], bound: float) -> Blame | None:
        """See the module."""
        for row in rows:
            if row.output > bound:
                found, finding = self._outputs_alone(row.key, bound)
                if found > bound:
                    return Blame(row.key, "outputs", found, finding)
        for row in rows:
            if tensor := self._cut(row.key):
                return Blame(row.key, "gradients", 1.0, f"{tensor} carries a gradient on one side only")
        for row in sorted(rows, key=lambda row: self.ours.calls[row.key].began, reverse=True):
            if row.gradient > bound:
                found, finding = self._gradients_alone(row)
                if found > bound:
                    return Blame(row.key, "gradients", found, finding)
        return None

    def _cut(self, key: Key) -> str | None:
        """The output at which one side's gradient stops, though it reaches the same inputs on both."""
        theirs, ours = self.theirs.calls[key], self.ours.calls[key]
        inputs, outputs = (
            [i for i, (a, b) in enumerate(zip(getattr(theirs, where), getattr(ours, where), strict=False))
             if comparable(a.value, b.value) and a.tracked != b.tracked and (_any(a.gradient) or _any(b.gradient))]
            for where in ("inputs", "outputs")
        )  # fmt: skip
        return _name(ours, "outputs", outputs[0]) if outputs and not inputs else None

    def _outputs_alone(self, key: Key, bound: float) -> tuple[float, str]:
        """The difference of a module's first output beyond the bound on equal inputs, else of the worst; also in
        words."""
        theirs, (ours, _) = self.theirs.calls[key], self._replay(key)
        pairs = list(zip(aligned(theirs, "outputs"), aligned(ours, "outputs"), strict=False))
        differences = [_of(a, b, "value") for a, b in pairs]
        first = next((i for i, found in enumerate(differences) if found > bound), int(np.argmax(differences)))
        found, name = differences[first], _name(ours, "outputs", first)
        if pairs[first][1].value.dtype.kind == "f":
            return found, f"{name}: {_apart(found)}"
        return found, f"{name}: {found:.1%} of the rows differ"

    def _gradients_alone(self, row: Row) -> tuple[float, str]:
        """The worst difference of the gradients that a module makes of equal inputs and gradients; in words too."""
        theirs, (ours, _) = self.theirs.calls[row.key], self._replay(row.key)
        pairs = zip(aligned(theirs, "inputs"), aligned(ours, "inputs"), strict=False)
        found = {_name(ours, "inputs", i): _of(a, b, "gradient") for i, (a, b) in enumerate(pairs)}
        for name in row.parameters:
            users = [key for key in self.ours.calls if key.path in (row.key.path, *self.follower.shares(name))]
            parts = [self._replay(key)[1].get(name) for key in users if key in self.theirs.calls]
            total = sum((part for part in parts if part is not None), np.float32(0))
            found[name] = difference(self.theirs.gradients.get(name), total)
        worst = max(found, key=found.__getitem__)
        return found[worst], f"the gradient of {worst}: {_apart(found[worst])}"

    def _replay(self, key: Key) -> tuple[Call, dict[str, np.ndarray]]:
        theirs, ours = self.theirs.calls[key], self.ours.calls[key]
        inputs = [_instead(own, theirs.inputs[i] if i < len(theirs.inputs) else None)
                  for i, own in enumerate(ours.inputs) if own.value is not None]  # fmt: skip
        gradients = []
        for i, own in enumerate(ours.outputs):
            given = theirs.outputs[i].gradient if i < len(theirs.outputs) else None
            zeros = np.zeros(() if own.value is None else own.value.shape, np.float32)
            gradients.append(zeros if given is None else given.reshape(zeros.shape))
        before = [other for other, call in self.ours.calls.items() if call.began < ours.began]
        return self.follower.replay(ours, before, inputs, gradients, self.forced)


def _instead(own: Leaf, given: Leaf | None) -> Leaf:
    """The reference's tensor in the follower's form; its own where the reference has no such tensor."""
    if given is None or not comparable(own.value, given.value) or own.value.size != given.value.size:
        return own
    return Leaf(given.value.astype(own.value.dtype, copy=False).reshape(own.value.shape), tracked=given.tracked)


def _apart(found: float) -> str:
    return f"{found:.1e} apart" if np.isfinite(found) else "of another shape, or not finite"


_NAMES = {
    ("Router", "outputs"): ("the chosen experts", "the weights", "the token counts", "the balance loss", "the z-loss"),
    ("RoutedExperts", "inputs"): ("x", "the slots", "the weights", "gate_up_proj", "down_proj"),
    ("TopK", "outputs"): ("the choice",),
    ("Linear", "inputs"): ("x", "the weight"),
    ("RMSNorm", "inputs"): ("x", "the weight"),
    ("SwiGLU", "inputs"): ("the gate", "up"),
    ("Attention", "inputs"): ("the queries", "the keys", "the values"),
    ("TotalLoss", "outputs"): ("the total", "the cross entropy", "the router losses", "the prediction loss"),
    ("DeepseekForCausalLM", "outputs"): ("the cross entropy", "the balance loss", "the z-loss", "the token counts"),
}


def _name(call: Call, where: str, position: int) -> str:
    """A tensor of a call in words."""
    names = _NAMES.get((call.kind, where), ())
    if position < len(names):
        return names[position]
    single = {"inputs": "the input", "outputs": "the output"}[where]
    return single if len(getattr(call, where)) == 1 else f"{single} {position + 1}"
