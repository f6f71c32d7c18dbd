"""Optimizer steps of both twins as training makes them, side by side.

Free running: step 2 starts from what each twin made of step 1. Every step sees the same batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shared_ops.batch import Batch
from shared_ops.config import Optim, RunConfig
from shared_ops.params import CORRECTION_BIAS, manifest
from shared_ops.schedule import learning_rate
from shared_ops.training_loop import StepValues
from weight_sync.agreement.compare import difference

# Two roundings of each twin, to half a unit in the last place, per step; relative to the largest value.
PARAMETER_BOUND = 4e-7


class Stepping(Protocol):
    """A twin that trains."""

    def step(self, batch: Batch, lr: float, update: int) -> StepValues:
        """Make update 1, 2, …"""

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of "params/…", "adam_m/…" and "adam_v/…", in canonical form."""


@dataclass(frozen=True)
class Quantity:
    """One compared quantity after a step. `of` names the worst tensor, `blamed` the first beyond the bound."""

    name: str
    difference: float
    bound: float
    of: str = ""
    blamed: str = ""
    judged: bool = True

    @property
    def agrees(self) -> bool:
        return not self.judged or self.difference <= self.bound


@dataclass
class StepComparison:
    """Update `step` of both twins. `moved` is the number of (token, choice) pairs that went to another expert."""

    step: int
    losses: tuple[float, float]
    moved: int
    quantities: list[Quantity] = field(default_factory=list)

    @property
    def fault(self) -> Quantity | None:
        return next((q for q in self.quantities if not q.agrees), None)


def compare_steps(
    reference: Stepping, follower: Stepping, batch: Batch, run: RunConfig, count: int, bound: float
) -> Iterator[StepComparison]:
    """Make `count` updates on both sides and compare after each.

    A choice that went another way in one twin (`moved`) changes a token's gradient: from there on the losses have 50
    times the bound, and the rest is shown without a verdict.
    """
    expected, moved = {}, 0
    for step in range(1, count + 1):
        lr = learning_rate(run.optim, step, run.train.steps)
        values = [side.step(batch, lr, step) for side in (reference, follower)]
        arrays = [side.arrays() for side in (reference, follower)]
        moved += round(float(np.abs(values[0].counts - values[1].counts).sum() / 2))
        made = StepComparison(step, (values[0].loss, values[1].loss), moved)
        for name in ("loss", "aux_loss", "mtp_loss", "grad_norm"):
            a, b = (np.float64(getattr(v, name)) for v in values)
            judged = moved == 0 or name == "loss"
            made.quantities.append(Quantity(name, difference(a, b), bound if moved == 0 else 50 * bound, judged=judged))
        made.quantities += _tensors(run, arrays, expected, step, lr, bound, moved == 0)
        yield made


def _tensors(
    run: RunConfig, arrays: Sequence[dict[str, np.ndarray]], expected: dict[str, np.ndarray], step: int, lr: float,
    bound: float, judged: bool,
) -> Iterator[Quantity]:  # fmt: skip
    """Moments, and of the parameters what their moments do not explain: where a gradient is as small as its own
    rounding, Adam's first steps are as large as everywhere. `expected` is carried from step to step."""
    specs = manifest(run.model)
    trained = [p for p in specs if p.trainable]
    a, b = arrays
    for kind, factor in (("adam_m", 1), ("adam_v", 2)):  # the second holds squares
        found = {p.name: difference(a[f"{kind}/{p.name}"], b[f"{kind}/{p.name}"]) for p in trained}
        yield _quantity(kind, found, factor * bound, judged)
    found = {}
    for p in specs:
        theirs, ours = a[f"params/{p.name}"], b[f"params/{p.name}"]
        if p.trainable:
            updates = [_update(run.optim, x[f"adam_m/{p.name}"], x[f"adam_v/{p.name}"], step, lr) for x in arrays]
            keep = 1 - lr * run.optim.weight_decay * p.decay
            expected[p.name] = keep * expected.get(p.name, 0.0) - (updates[0] - updates[1])
            ours = ours + expected[p.name]
        found[p.name] = difference(theirs.astype(np.float64), ours.astype(np.float64))
    biases = {name: found.pop(name) for name in list(found) if name.endswith(CORRECTION_BIAS)}
    yield _quantity("parameters", found, PARAMETER_BOUND * step, judged)
    if biases:
        yield _quantity("correction biases", biases, PARAMETER_BOUND * step, judged)


def _update(optim: Optim, m: np.ndarray, v: np.ndarray, step: int, lr: float) -> np.ndarray:
    """What AdamW subtracts, decay apart, in float64."""
    first, second = (1 - beta**step for beta in optim.betas)
    return lr * (m.astype(np.float64) / first) / (np.sqrt(v.astype(np.float64) / second) + optim.eps)


def _quantity(name: str, found: dict[str, float], bound: float, judged: bool) -> Quantity:
    worst = max(found, key=found.__getitem__)
    blamed = next((key for key, value in found.items() if value > bound), "")
    return Quantity(name, found[worst], bound, worst, blamed, judged)
