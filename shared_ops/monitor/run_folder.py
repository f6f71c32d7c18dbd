"""The folder of one run of one twin: `<run.dir>/<run.name>/<twin>/`.

config.yaml  metrics.jsonl  tb/  checkpoints/step_00000100/  report.html  run.json  failures/
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from shared_ops.errors import UserError
from shared_ops.files import write_atomically

TWINS = ("ms_train", "torch_proto")
_STEP = re.compile(r"step_(\d{8,})")


class RunFolder:
    """Paths of a run folder; `create` makes it. `UserError` for a name that is not a single folder name."""

    def __init__(self, run_dir: str | Path, run_name: str, twin: str):
        if twin not in TWINS:
            raise ValueError(f"twin is {twin!r}, expected one of {TWINS}")
        if run_name in ("", ".", "..") or any(mark in run_name for mark in "/\\\0\n"):
            raise UserError(
                f"run.name is {run_name!r}; it becomes a folder under run.dir, so choose a name "
                "without slashes, such as 'my-run'"
            )
        self.run_name, self.twin = run_name, twin
        self.path = Path(run_dir) / run_name / twin
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tb"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"
        self.facts = self.path / "run.json"
        self.failures = self.path / "failures"

    def create(self) -> "RunFolder":
        """Make the folder (every rank may call it); `UserError` where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the run folder {self.path}: {error.strerror}; choose another "
                "run.dir or run.name"
            ) from error
        return self

    def hold(self) -> None:
        """Keep other jobs out until this process ends; `UserError` while another one trains here. Rank 0 only."""
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115  closing it would give it up
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another job is training in this run folder; wait for it, or choose another run.name"
            ) from None
        except OSError:  # a file system without locks
            pass

    def write_config(self, yaml_text: str) -> None:
        """Write the resolved configuration."""
        write_atomically(self.config, yaml_text)

    def write_facts(self, facts: Mapping[str, object]) -> None:
        """Write run.json, what the report shows beside the curves.

        It knows `parameters` (count), `unigram_entropy` (nats per token), `ranks`, `device`, `data`.
        """
        write_atomically(self.facts, json.dumps(dict(facts), indent=2) + "\n")

    def set_aside(self, resumed_at: int | None = None) -> list[str]:
        """Rename what a former run left and this one would mix up with; returns the new names. Rank 0 only.

        A fresh start (None) sets aside metrics, TensorBoard files and all checkpoints. A run resumed at a
        step sets aside only the checkpoints of later steps: an abandoned branch, which would outrank the
        new ones. Names get the first free number (`metrics.jsonl.1`, `checkpoints.1`).
        """
        kept = (self.metrics, self.tensorboard, self.checkpoints)
        if resumed_at is None:
            whole, later = [path for path in kept if _holds_anything(path)], []
        else:
            whole, later = (
                [],
                sorted(
                    folder
                    for folder in self.checkpoints.glob("step_*")
                    if (match := _STEP.fullmatch(folder.name)) and int(match[1]) > resumed_at
                ),
            )
        if not whole and not later:
            return []
        number = 1
        while any(path.with_name(f"{path.name}.{number}").exists() for path in kept):
            number += 1
        moves = [(path, path.with_name(f"{path.name}.{number}")) for path in whole]
        if later:
            aside = self.checkpoints.with_name(f"checkpoints.{number}")
            aside.mkdir()
            moves += [(folder, aside / folder.name) for folder in later]
        for source, target in moves:
            os.rename(source, target)
        return [str(target.relative_to(self.path)) for _, target in moves]


def _holds_anything(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0
