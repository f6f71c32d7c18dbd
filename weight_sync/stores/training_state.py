"""A step folder of the trainers, seen as weights: its parameters, without the optimizer's moments."""

import json
from pathlib import Path
from typing import Any

from shared_ops.errors import UserError
from shared_ops.training_state import FORMAT, MANIFEST, read_step
from weight_sync.stores.base import Rows, Store

_PARAMS = "params/"


def is_step(folder: Path) -> bool:
    """Whether a folder is a training state."""
    try:
        return json.loads((folder / MANIFEST).read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def read_folder(folder: Path) -> tuple[Store, dict[str, Any]]:
    """(store, the model section of the configuration it was trained with); checksums are verified first."""
    meta, reader = read_step(folder)
    try:
        model = meta["config"]["model"]
    except (KeyError, TypeError):
        reader.close()
        raise UserError(f"{folder}: its manifest has no model configuration") from None

    def rows(name: str) -> Rows:
        return Rows(
            name.removeprefix(_PARAMS), reader.shape(name), reader.dtype(name), lambda index: reader.slice(name, index)
        )

    names = [name for name in reader.names() if name.startswith(_PARAMS)]
    tensors = {name.removeprefix(_PARAMS): rows(name) for name in names}
    files = [folder / MANIFEST, *(folder / name for name in json.loads((folder / MANIFEST).read_bytes())["files"])]
    notes = [f"training state of step {meta['step']}: its weights are taken, its optimizer moments are left"]
    return Store(folder, "training_state", tensors, files, notes=notes, close=reader.close), model
