"""From differences to a sentence: whether two sides agree, and if not, what makes them differ first."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared_ops.config import RunConfig
from weight_sync.agreement.capture import Key
from weight_sync.agreement.compare import Comparison
from weight_sync.agreement.steps import StepComparison

# what to read when a quantity of a step is the first that differs though every module agrees
_MADE_BY = {
    "loss": "the losses of the whole step",
    "aux_loss": "the router losses of the whole step",
    "mtp_loss": "the prediction losses of the whole step",
    "grad_norm": "the gradients of the whole step, or their global norm",
    "adam_m": "its gradient in the whole step, clipping, or AdamW's first moment",
    "adam_v": "AdamW's second moment (the first agrees)",
    "parameters": "AdamW's update or weight decay (its moments agree)",
    "correction biases": "the update of the correction bias",
}


@dataclass(frozen=True)
class Verdict:
    """`first` is what differs first, a module's path or a quantity of a step; None where the sides agree."""

    agrees: bool
    sentence: str
    first: str | None = None
    key: Key | None = None
    sources: tuple[str, ...] = ()  # the code to read, one place a side


def judge(
    names: Sequence[str], comparison: Comparison, steps: Sequence[StepComparison], bound: float, run: RunConfig,
    sources: Sequence,
) -> Verdict:  # fmt: skip
    """`sources` are functions path -> where a side's code of that module is."""
    both = " and ".join(names)
    if comparison.blame is not None:
        return _blamed(both, comparison, bound, sources)
    worst = comparison.worst
    layers = run.model.num_hidden_layers + run.model.num_nextn_predict_layers
    if worst.worst > bound * layers:
        return Verdict(
            False, f"{both} differ by {worst.worst:.1e} in {worst.key}, and no single module does so alone: many small "
            f"differences, each below the bound {bound:.0e}, that are no rounding", str(worst.key), worst.key,
        )  # fmt: skip
    for made in steps:
        if fault := made.fault:
            of = f" of {fault.blamed}" if fault.blamed else ""
            return Verdict(
                False, f"{both} agree in every module, but update {made.step} differs in {fault.name}{of}: "
                f"{fault.difference:.1e} apart, the bound is {fault.bound:.0e}. Look at {_MADE_BY[fault.name]}",
                f"{fault.name}{of}",
            )  # fmt: skip
    sentence = f"{both} agree: {len(comparison.rows)} calls of modules"
    if worst.worst > bound:
        sentence += (f", each within {bound:.0e} alone; rounding adds up to {worst.worst:.1e} over {layers} layers "
                     f"({worst.key})")  # fmt: skip
    else:
        sentence += f" within {bound:.0e} (worst {worst.worst:.1e} in {worst.key})"
    if steps:
        last = steps[-1]
        sentence += f", and {len(steps)} optimizer step{'s' if len(steps) > 1 else ''}"
        if last.moved:
            sentence += f", in which rounding sent {last.moved} (token, choice) pairs to another expert"
    return Verdict(True, sentence)


def _blamed(both: str, comparison: Comparison, bound: float, sources: Sequence) -> Verdict:
    blame = comparison.blame
    key = blame.key
    given = {"outputs": "given the same input", "gradients": "given the same input and the same gradient of its output"}
    inside = any(row.key.path.startswith(f"{key.path}.") for row in comparison.rows)
    own = "; the modules inside it agree, so it is its own code" if inside else ""
    code = tuple(source(key.path) for source in sources)
    pass_ = "" if blame.direction == "outputs" else "the backward pass of "
    return Verdict(
        False, f"{both} differ first in {pass_}{key}: {given[blame.direction]}, {blame.finding} (bound {bound:.0e})"
        f"{own}", key.path, key, code,
    )  # fmt: skip
