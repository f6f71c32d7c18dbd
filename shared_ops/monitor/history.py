"""Reading metrics.jsonl back.

A line is one JSON object: a training row has `loss`, a validation row has `val_loss`.
JSON has no number for a loss that is not finite, and null would hide which one it was, so the writer puts
the strings "nan", "inf", "-inf" in its place (float() takes them in most languages); `iter_rows` gives
floats again. A last line that a crash tore off is no row.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TRAIN_KEYS = (
    "step",
    "tokens",
    "loss",
    "aux_loss",
    "mtp_loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "step_seconds",
    "expert_load",
    "memory_bytes",
    "time",
)
VALIDATION_KEYS = ("step", "val_loss", "time")
SCALARS = tuple(key for key in TRAIN_KEYS if key != "expert_load")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Row = dict[str, Any]


def encode_number(value: float | int | None) -> float | int | str | None:
    """A number as valid JSON; NumPy scalars become Python's."""
    if value is None or isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def parse_row(line: str) -> Row | None:
    """One line's row, or None where it is not a whole row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()
    }


def iter_rows(path: Path) -> Iterator[Row | None]:
    """The rows of a metrics file in order; None for a line that cannot be read (not for a torn last one)."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            row = parse_row(line)
            if row is not None or line.endswith("\n"):
                yield row


def load_imbalance(load: Iterable[float]) -> float:
    """Largest share over mean share of one layer's experts: 1 is even, the number of experts the worst."""
    shares = np.asarray(list(load), dtype=np.float64)
    mean = shares.mean() if shares.size else 0.0
    return float(shares.max() / mean) if mean > 0 else math.nan


class History:
    """The columns of a run, small enough for long runs: expert loads are kept only for the last rows.

    `train[key]` and `validation[key]` are lists of floats, one per row (None becomes nan);
    `imbalance[layer]` the max/mean load at each training row; `recent_loads` the last `window` rows'
    {layer: shares}; `damaged_lines` counts unreadable lines.
    """

    def __init__(self, rows: Iterable[Row | None] = (), window: int = 10):
        self.train: dict[str, list[float]] = {key: [] for key in SCALARS}
        self.validation: dict[str, list[float]] = {key: [] for key in VALIDATION_KEYS}
        self.imbalance: dict[str, list[float]] = {}
        self.recent_loads: deque[Mapping[str, list[float]]] = deque(maxlen=window)
        self.damaged_lines = 0
        for row in rows:
            if row is None:
                self.damaged_lines += 1
            else:
                self.add(row)

    @classmethod
    def read(cls, path: Path) -> "History":
        """The history in a metrics file."""
        return cls(iter_rows(path))

    def add(self, row: Row) -> None:
        """Take one training or validation row."""
        if "val_loss" in row:
            for key in VALIDATION_KEYS:
                self.validation[key].append(_number(row.get(key)))
            return
        for key in SCALARS:
            self.train[key].append(_number(row.get(key)))
        rows, load = len(self), row.get("expert_load") or {}
        for layer, shares in load.items():
            column = self.imbalance.setdefault(str(layer), [math.nan] * (rows - 1))
            column.append(load_imbalance(shares))
        for column in self.imbalance.values():
            column.extend([math.nan] * (rows - len(column)))
        if load:
            self.recent_loads.append(load)

    def __len__(self) -> int:
        """Number of training rows."""
        return len(self.train["step"])

    @property
    def last(self) -> dict[str, float]:
        """The scalars of the last training row; empty without one."""
        return {key: column[-1] for key, column in self.train.items()} if len(self) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
