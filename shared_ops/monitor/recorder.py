"""Rank 0's record of a run: metrics.jsonl, TensorBoard files and the console."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console

from shared_ops.files import sync
from shared_ops.monitor.health import remarks
from shared_ops.monitor.history import TRAIN_KEYS, History, Row, encode_number, load_imbalance, parse_row
from shared_ops.monitor.progress import Progress, duration
from shared_ops.monitor.run_folder import RunFolder

BOARD_KEYS = ("loss", "aux_loss", "mtp_loss", "grad_norm", "lr", "tokens_per_second")


class Recorder:
    """Writes and shows the rows of a run. Only rank 0 has one.

    `total_steps`: where this run ends. A fresh run sets a former run's files in the folder aside (see
    `RunFolder.set_aside`); a run resumed after `start_step` goes on in the same files, without the rows
    past `start_step`, which it computes again, and without a last line that a crash tore off.
    `console`: see `Progress`. Losses that are not finite are written as strings (see `history`).
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int,
        start_step: int = 0,
        resumed: bool = False,
        console: Console | TextIO | None = None,
        tensorboard: bool = True,
    ):
        self.folder = folder.create()
        moved = folder.set_aside(start_step if resumed else None)
        dropped = keep_rows(folder.metrics, start_step) if resumed and folder.metrics.exists() else 0
        self.history = History()
        self.started = time.time()
        self.progress = Progress(total_steps, start_step, console)
        if moved:
            self.message(f"set aside from a former run: {', '.join(moved)} in {folder.path}")
        if dropped:
            self.message(f"metrics.jsonl: dropped {dropped} line(s) past step {start_step} or torn")
        self.file = open(folder.metrics, "a", encoding="utf-8")
        self.board = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # slow to import, and only rank 0 needs it

            logging.getLogger("tensorboardX.x2num").setLevel(
                logging.ERROR
            )  # a loss of nan is reported elsewhere
            self.board = SummaryWriter(
                str(folder.tensorboard), flush_secs=10, purge_step=start_step + 1 if resumed else None
            )

    def train(self, row: Mapping[str, Any]) -> None:
        """Record a training row: the keys `TRAIN_KEYS` (`time` may be left out), numbers or None.

        `expert_load` is {layer: shares of its experts}, as lists or arrays. `ValueError` for other keys.
        """
        row = {**row}
        row.setdefault("time", time.time())
        if set(row) != set(TRAIN_KEYS):
            raise ValueError(
                f"a metrics row lacks {sorted(set(TRAIN_KEYS) - set(row))} and has "
                f"{sorted(set(row) - set(TRAIN_KEYS))} too much"
            )
        row["expert_load"] = {str(layer): _shares(load) for layer, load in (row["expert_load"] or {}).items()}
        row = self._write({key: row[key] for key in TRAIN_KEYS})
        self.history.add(row)
        if self.board:
            for key in BOARD_KEYS:
                if row[key] is not None:
                    self.board.add_scalar(f"train/{key}", row[key], row["step"], row["time"])
            for layer, load in row["expert_load"].items():
                self.board.add_scalar(
                    f"expert_load/layer_{layer}_max_over_mean", load_imbalance(load), row["step"], row["time"]
                )
        self.progress.train(row)

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation loss measured after `step`."""
        row = self._write({"step": step, "val_loss": val_loss, "time": time.time()})
        self.history.add(row)
        if self.board:
            self.board.add_scalar("validation/loss", row["val_loss"], row["step"], row["time"])
        self.progress.validation(row["step"], row["val_loss"])

    def message(self, text: str) -> None:
        """Print text for a person."""
        self.progress.message(text)

    def summary(self) -> str:
        """A few lines on what this process recorded, for the end of a run."""
        history, lines = self.history, []
        if len(history):
            steps, losses = history.train["step"], history.train["loss"]
            lines.append(
                f"step {int(steps[-1])}: {history.last['tokens']:,.0f} tokens, loss {losses[0]:.4f} -> "
                f"{losses[-1]:.4f}, {duration(time.time() - self.started)}"
            )
        if history.validation["step"]:
            best = int(np.argmin(np.nan_to_num(history.validation["val_loss"], nan=np.inf)))
            lines.append(
                f"validation loss {history.validation['val_loss'][-1]:.4f} (best "
                f"{history.validation['val_loss'][best]:.4f} at step {int(history.validation['step'][best])})"
            )
        lines += [f"{remark.level}: {remark.text}" for remark in remarks(history) if remark.level != "good"]
        return "\n".join(lines)

    def close(self) -> None:
        """Flush everything to disk and take the bar down; may be called twice."""
        self.progress.close()
        if not self.file.closed:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        if self.board:
            self.board.close()
            self.board = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, row: Row) -> Row:
        """Append one line; returns the row with plain Python numbers."""
        encoded = {key: value if key == "expert_load" else encode_number(value) for key, value in row.items()}
        line = json.dumps(encoded, allow_nan=False, separators=(", ", ": "))
        self.file.write(line + "\n")
        self.file.flush()
        plain = parse_row(line)
        assert plain is not None
        return plain


def keep_rows(metrics: Path, last_step: int) -> int:
    """Drop rows past `last_step` and unreadable lines from a metrics file, atomically; returns how many."""
    dropped, temporary = 0, metrics.with_name(f".{metrics.name}.tmp")
    with (
        open(metrics, encoding="utf-8", errors="replace") as source,
        open(temporary, "w", encoding="utf-8") as target,
    ):
        for line in source:
            row = parse_row(line)
            if row is None or row["step"] > last_step:
                dropped += 1
            else:
                target.write(line if line.endswith("\n") else line + "\n")
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, metrics)
    sync(metrics.parent)
    return dropped


def _shares(load: Any) -> list[float | str]:
    """Shares of one layer's experts, to six digits: a row of a large model has thousands of them."""
    return [encode_number(float(f"{value:.6g}")) for value in np.asarray(load, dtype=np.float64).tolist()]
