"""Rows → remarks: what a person should look at before believing a run.

The checks are few and robust (medians, not means), because a false alarm in every run is read by nobody.
"""

import math
from typing import NamedTuple

import numpy as np

from shared_ops.monitor.history import History, load_imbalance

SPIKE_WINDOW = 20  # rows before a row that say what is usual there
SPIKE_DEVIATIONS = 6.0  # robust standard deviations above the usual …
SPIKE_RATIO = 0.1  # … and at least this share of it: on a smooth curve noise is no spike
UNEVEN_LOAD = 3.0  # max/mean expert load over the last rows


class Remark(NamedTuple):
    """`level` is "bad" (the run is not to be trusted), "warn" (look at it) or "good"."""

    level: str
    text: str


def remarks(history: History) -> list[Remark]:
    """Everything noteworthy in a run; one "good" remark where there is nothing."""
    if not len(history):
        return [Remark("bad", "No training step was logged.")]
    found = [
        *_non_finite(history),
        *_spikes(history),
        *_no_progress(history),
        *_validation(history),
        *_experts(history),
    ]
    if history.damaged_lines:
        found.append(Remark("warn", f"{history.damaged_lines} line(s) of metrics.jsonl cannot be read."))
    return found or [Remark("good", "Losses are finite and fall, no spikes, expert load is even enough.")]


def loss_spikes(steps: list[float], losses: list[float]) -> list[int]:
    """Steps whose loss stands far above that of the rows before them."""
    spikes: list[int] = []
    usual: list[float] = []  # finite rows that were no spikes
    high: list[float] = []  # the spikes since the last usual row
    for step, value in zip(steps, losses):
        if not math.isfinite(value):
            continue
        before = np.asarray(usual[-SPIKE_WINDOW:])
        median = float(np.median(before)) if before.size >= SPIKE_WINDOW // 2 else math.inf
        deviation = 1.4826 * float(np.median(np.abs(before - median))) if before.size else 0.0
        if value - median > max(SPIKE_DEVIATIONS * deviation, SPIKE_RATIO * abs(median)):
            spikes.append(int(step))
            high.append(value)
            if len(high) == SPIKE_WINDOW // 2:  # a level that lasts is the new usual one
                usual, high = high, []
        else:
            usual.append(value)
            high = []
    return spikes


def _non_finite(history: History) -> list[Remark]:
    found = []
    for key in ("loss", "aux_loss", "mtp_loss", "grad_norm"):
        steps = [int(s) for s, v in zip(history.train["step"], history.train[key]) if not math.isfinite(v)]
        # A column that is empty throughout was not measured; the loss always is.
        if steps and (key == "loss" or len(steps) < len(history)):
            found.append(Remark("bad", f"{key} is not finite at {_steps(steps)}."))
    steps = [
        int(s)
        for s, v in zip(history.validation["step"], history.validation["val_loss"])
        if not math.isfinite(v)
    ]
    if steps:
        found.append(Remark("bad", f"Validation loss is not finite at {_steps(steps)}."))
    return found


def _spikes(history: History) -> list[Remark]:
    steps = loss_spikes(history.train["step"], history.train["loss"])
    return [Remark("warn", f"The loss jumps up at {_steps(steps)}.")] if steps else []


def _no_progress(history: History) -> list[Remark]:
    losses = [v for v in history.train["loss"] if math.isfinite(v)]
    if len(losses) < 20:
        return []
    part = max(len(losses) // 10, 5)
    first, last = float(np.median(losses[:part])), float(np.median(losses[-part:]))
    return (
        [Remark("warn", f"The loss did not fall: {first:.4f} at the start, {last:.4f} at the end.")]
        if last >= first
        else []
    )


def _validation(history: History) -> list[Remark]:
    losses = history.validation["val_loss"]
    finite = [(v, int(s)) for s, v in zip(history.validation["step"], losses) if math.isfinite(v)]
    if len(finite) < 2:
        return []
    best, at = min(finite)
    return (
        [
            Remark(
                "warn",
                f"Validation loss rose from its best, {best:.4f} at step {at}, to {finite[-1][0]:.4f}.",
            )
        ]
        if finite[-1][0] > 1.05 * best
        else []
    )


def _experts(history: History) -> list[Remark]:
    loads = list(history.recent_loads)
    uneven: list[tuple[float, str, int]] = []
    idle: list[tuple[int, str, np.ndarray, int]] = []
    for layer, shares in (loads[-1] if loads else {}).items():
        mean = np.mean([load[layer] for load in loads if len(load.get(layer, ())) == len(shares)], axis=0)
        if (ratio := load_imbalance(mean)) > UNEVEN_LOAD:
            uneven.append((ratio, layer, int(mean.argmax())))
        if (empty := np.flatnonzero(mean == 0)).size:
            idle.append((empty.size, layer, empty, mean.size))
    found, rows = [], f"over the last {len(loads)} logged steps"
    if uneven:
        ratio, layer, expert = max(uneven)
        found.append(
            Remark(
                "warn",
                f"Expert load is uneven in {len(uneven)} of {len(loads[-1])} MoE layers {rows}; "
                f"worst: in layer {layer}, expert {expert} gets {ratio:.1f} times the mean.",
            )
        )
    if idle:
        count, layer, empty, total = max(idle, key=lambda entry: entry[0])
        names = ", ".join(map(str, empty[:8])) + (", …" if count > 8 else "")
        found.append(
            Remark(
                "warn",
                f"Experts without a token in {len(idle)} of {len(loads[-1])} MoE layers {rows}; "
                f"worst: in layer {layer}, {count} of {total} ({names}).",
            )
        )
    return found


def _steps(steps: list[int]) -> str:
    """`step 3`, `steps 3, 4` or `12 steps (3, 4, 5, …)`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 6:
        return "steps " + ", ".join(map(str, steps))
    return f"{len(steps)} steps ({', '.join(map(str, steps[:5]))}, …)"
