"""Step → learning rate, the same numbers in both twins.

Updates are counted t = 1, 2, …, so that the first update of a linear warm-up already learns:
lr(t) = peak * t / warmup_steps for t <= warmup_steps. After it, with N the planned run's steps:

    constant  peak
    linear    a straight line from peak to min_ratio * peak at t = N
    cosine    half a cosine from peak to min_ratio * peak at t = N
    wsd       warm-up, stable, decay: peak, then over the last decay_fraction * N steps a straight line
              to min_ratio * peak at t = N

Past N the value of N stays. A warm-up that is longer than the run is simply cut off by its end.
Everything is a pure function of t in float64: a resumed run needs no schedule state.
"""

import math
from typing import Protocol

from shared_ops.errors import UserError

SCHEDULES = ("constant", "cosine", "linear", "wsd")


class ScheduleSettings(Protocol):
    """The fields that `learning_rate` reads from the configuration's `optim` section."""

    lr: float
    warmup_steps: int
    schedule: str
    min_lr_ratio: float
    decay_fraction: float


def learning_rate(optim: ScheduleSettings, step: int, total_steps: int) -> float:
    """Learning rate of update `step` (1, 2, …) of a run planned for `total_steps` updates."""
    return scheduled_rate(
        step,
        peak=optim.lr,
        warmup_steps=optim.warmup_steps,
        total_steps=total_steps,
        schedule=optim.schedule,
        min_ratio=optim.min_lr_ratio,
        decay_fraction=optim.decay_fraction,
    )


def scheduled_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    schedule: str = "cosine",
    min_ratio: float = 0.0,
    decay_fraction: float = 0.1,
) -> float:
    """`learning_rate` from plain numbers.

    `ValueError` for a step below 1, `UserError` for an unknown schedule.
    """
    if step < 1 or total_steps < 1:
        raise ValueError(f"updates are counted from 1: step {step} of {total_steps}")
    if schedule not in SCHEDULES:
        raise UserError(f"optim.schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    t = min(step, total_steps)
    if t <= warmup_steps:
        return peak * (t / warmup_steps)
    if schedule == "constant":
        return float(peak)
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, total_steps - decay_fraction * total_steps)
        if t <= start:
            return float(peak)
    progress = (t - start) / (total_steps - start)  # in (0, 1], exactly 1 at the end
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_ratio + (1.0 - min_ratio) * shape)
