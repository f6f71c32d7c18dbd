"""A step folder of the trainers: its parameters are weights, its moments and its position can go along."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_ops.errors import UserError
from shared_ops.training_state import FORMAT, MANIFEST, STATE, StepReader, file_facts, read_step
from shared_ops.training_state import seal as write_manifest
from shared_ops.weights import PARAMS
from weight_sync.stores.base import Rows, Store, Stored, TensorPlan, TrainingState
from weight_sync.stores.hdf5 import Hdf5Plan

RUN_FACTS = "run.json"  # of a run folder: RUN_FOLDER/checkpoints/step_00000100
MOMENTS = "adam_m/", "adam_v/"


def is_step(folder: Path) -> bool:
    """Whether a folder is a training state."""
    try:
        return json.loads((folder / MANIFEST).read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def read_folder(folder: Path) -> Store:
    """The store of a step folder; checksums are verified first."""
    meta, reader = read_step(folder)
    try:
        model = meta["config"]["model"]
    except (KeyError, TypeError):
        reader.close()
        raise UserError(f"{folder}: its manifest has no model configuration") from None
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    step = meta.pop("step")
    state = TrainingState(model, {kind: _tensors(reader, kind) for kind in MOMENTS}, {"step": step, "meta": meta})
    return Store(
        folder, "training_state", _tensors(reader, PARAMS), [folder / MANIFEST, *(folder / name for name in files)],
        notes=[f"training state of step {step}"], close=reader.close, state=state,
    )  # fmt: skip


def data_folder(step: Path) -> Path | None:
    """Where the run of a step folder has its data, tokenizer included; None where that is not known or gone."""
    try:
        return Path(json.loads((step.resolve().parent.parent / RUN_FACTS).read_bytes())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tensors(reader: StepReader, kind: str) -> dict[str, Stored]:
    def rows(name: str) -> Rows:
        read = lambda index: reader.slice(name, index)  # noqa: E731
        return Rows(name.removeprefix(kind), reader.shape(name), reader.dtype(name), read)

    return {name.removeprefix(kind): rows(name) for name in reader.names() if name.startswith(kind)}


def plan(tensors: Sequence[TensorPlan]) -> tuple[list[Hdf5Plan], dict[str, bytes]]:
    """(the file to write, nothing beside it); `seal` makes it a step folder."""
    return [Hdf5Plan(STATE, tensors, group="")], {}


def seal(folder: Path, training: Mapping[str, Any]) -> None:
    """Write the manifest of a complete state file."""
    write_manifest(folder, training["step"], training["meta"], {STATE: file_facts(folder / STATE)})
