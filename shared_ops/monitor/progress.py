"""The console: a bar on a terminal, one plain line per logged step anywhere else.

Launchers tail a worker's log and CI keeps one, so without a terminal a line must stand alone: no escape
codes, no carriage returns, flushed at once.
"""

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from shared_ops.monitor.history import Row

SMOOTHING = 0.9  # weight of the past in the moving average of the step time


def duration(seconds: float) -> str:
    """45s, 2m31s, 1h02m, 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


class TimeLeft:
    """Seconds to the end from a moving average of `step_seconds`.

    The first row of a process holds compilation, so it is forgotten when the second one comes.
    """

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.rows = 0
        self.average = 0.0

    def update(self, step: int, step_seconds: float | None) -> float | None:
        """Seconds left after `step`, None while it is not known."""
        if not isinstance(step_seconds, (int, float)) or not 0 <= step_seconds < float("inf"):
            return None
        self.rows += 1
        self.average = (
            step_seconds if self.rows <= 2 else SMOOTHING * self.average + (1 - SMOOTHING) * step_seconds
        )
        left = max(0, self.total_steps - step)
        return left * self.average if self.rows >= 2 or left == 0 else None


class Progress:
    """Shows rows as they come. `console`: a rich Console, a text stream, or None for standard output."""

    def __init__(self, total_steps: int, start_step: int = 0, console: Console | TextIO | None = None):
        self.total_steps = total_steps
        self.time_left = TimeLeft(total_steps)
        if isinstance(console, Console):
            self.console, terminal = console, console.is_terminal
        else:
            stream = sys.stdout if console is None else console
            # rich also calls a stream a terminal when the environment says so (FORCE_COLOR): not here.
            terminal = stream.isatty()
            self.console = Console(file=stream, force_terminal=terminal)
        self.bar: Bar | None = None
        if terminal and not self.console.is_dumb_terminal:
            self.bar = Bar(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[facts]}", markup=False, style="cyan"),
                console=self.console,
                refresh_per_second=2,
                expand=True,
            )
            self.task = self.bar.add_task("", total=total_steps, completed=start_step, facts="starting")
            self.bar.start()
            self.console.show_cursor(True)  # a process that is killed would leave the terminal without one

    def train(self, row: Row) -> None:
        """Show a training row."""
        left = self.time_left.update(row["step"], row.get("step_seconds"))
        facts = (
            f"loss {_fixed(row.get('loss'), 4)}  grad {_fixed(row.get('grad_norm'), 2)}  "
            f"lr {_scientific(row.get('lr'))}  {_thousands(row.get('tokens_per_second'))} tok/s  "
            f"ETA {'-' if left is None else duration(left)}"
        )
        if self.bar:
            self.bar.update(self.task, completed=row["step"], facts=facts)
        else:
            self._print(f"{self._step(row['step'])}  {facts}")

    def validation(self, step: int, val_loss: float) -> None:
        """Show a validation result."""
        self._print(f"{self._step(step)}  validation loss {_fixed(val_loss, 4)}")

    def message(self, text: str) -> None:
        """Print text as it is, above the bar if there is one."""
        self._print(text)

    def close(self) -> None:
        """Take the bar down, leaving its last state on the screen."""
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps)) + 1}}/{self.total_steps}"

    def _print(self, text: str) -> None:
        if self.bar:
            self.console.print(Text(text), soft_wrap=True)
        else:
            self.console.file.write(text + "\n")
            self.console.file.flush()


def _fixed(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _scientific(value: float | None) -> str:
    return f"{value:.1e}" if isinstance(value, (int, float)) else "-"


def _thousands(value: float | None) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else "-"
