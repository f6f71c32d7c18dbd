"""Weights that a new run begins with: an HDF5 folder from weight_sync, or the parameters of a training state.

    model.h5          datasets "params/<canonical name>", as in a training state's shards
    config.json       the model, as Hugging Face writes it
    conversion.json   the report of the conversion that made it: its checksums are compared where it is there
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np
import xxhash

from shared_ops.config import ModelConfig, validate
from shared_ops.errors import UserError
from shared_ops.params import manifest
from shared_ops.resume import differences
from shared_ops.training_state import MANIFEST, StepReader, read_step

MODEL, CONFIG, REPORT, PARAMS = "model.h5", "config.json", "conversion.json", "params/"
# what a run may have of its own with given weights: training and first values only, and where the experts lie
FREE = ("expert_placement", "mtp_loss_weight", "router_z_loss_coef", "aux_loss_alpha", "initializer_range")
EXACT_IN_FP32 = (np.float32, ml_dtypes.bfloat16, np.float16)


class Weights:
    """`weights["params/model.norm.weight"]` is an fp32 array, widened exactly if stored narrower; a context manager."""

    def __init__(self, model: ModelConfig, reader: StepReader, checksums: Mapping[str, str]):
        self.model, self.reader, self.checksums = model, reader, checksums

    def __getitem__(self, name: str) -> np.ndarray:
        """`UserError` where the content is not what conversion.json says."""
        array = self.reader[name]
        expected = self.checksums.get(name)
        if expected is not None and xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8)) != expected:
            raise UserError(
                f"{self.reader.folder}: {name} is not what was written there, by its checksum in {REPORT}: damaged; "
                f"if it was changed on purpose, remove {REPORT}"
            )
        return array.astype(np.float32, copy=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.reader.close()


def open_weights(folder: Path, model: ModelConfig | None, verify: bool = True) -> Weights:
    """The weights in `folder`, which must be those of `model`, all of them and no others; `UserError` if not.

    Without a `model` it is the one that the folder says.

    `verify`: read a step folder's files once for their checksums; an HDF5 folder's are compared when it is read.
    """
    folder = Path(folder)
    is_state = (folder / MANIFEST).is_file()
    reader, there = _open_state(folder, verify) if is_state else _open_model(folder)
    try:
        there = _without_absent_mtp(reader, there)
        model = model or there
        _check_model(folder, there, model)
        shapes = {PARAMS + p.name: p.shape for p in manifest(model)}
        looked_at = PARAMS if is_state else ""  # a state has moments, too, which a new run does not want
        reader.check(shapes, EXACT_IN_FP32, looked_at, f"{CONFIG} or the run file do not describe these weights")
    except BaseException:
        reader.close()
        raise
    return Weights(model, reader, {} if is_state else _checksums(folder / REPORT))


def _checksums(path: Path) -> dict[str, str]:
    """Dataset name -> checksum of its content, by a conversion's report; none where there is no report."""
    try:
        tensors = json.loads(path.read_bytes())["tensors"]
        return {PARAMS + name: facts["destination"]["xxh3_64"] for name, facts in tensors.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no conversion's report ({error}): remove it, or convert again") from None


def _open_state(folder: Path, verify: bool) -> tuple[StepReader, ModelConfig]:
    """(reader, the model that its run had)."""
    meta, reader = read_step(folder, verify)
    try:
        return reader, validate(ModelConfig, meta["config"]["model"], str(folder / MANIFEST))
    except (KeyError, TypeError, UserError) as error:
        reader.close()
        raise UserError(f"{folder / MANIFEST}: has no model configuration that this program knows ({error})") from None


def _open_model(folder: Path) -> tuple[StepReader, ModelConfig]:
    """(reader, the model as config.json says)."""
    if not folder.exists():
        raise UserError(f"--weights {folder}: no such folder")
    if not (folder / MODEL).is_file():
        raise UserError(
            f"--weights {folder}: neither a folder with {MODEL} and {CONFIG} nor a step folder of a trainer; convert "
            f"it first: python -m weight_sync convert {folder} DIR --to hdf5"
        )
    path = folder / CONFIG
    try:
        there = ModelConfig.from_hf(json.loads(path.read_bytes()), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; a folder of weights says there what model they belong to") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    return StepReader(folder, [MODEL]), there


def _without_absent_mtp(reader: StepReader, there: ModelConfig) -> ModelConfig:
    """Transformers saves no prediction layers, whatever the configuration says."""
    first = f"{PARAMS}model.layers.{there.num_hidden_layers}."
    if any(name.startswith(first) for name in reader.names()):
        return there
    return there.model_copy(update={"num_nextn_predict_layers": 0})


def _check_model(folder: Path, there: ModelConfig, model: ModelConfig) -> None:
    """`UserError` listing what makes the folder's model another one than the run's."""
    lines = differences({"model": there.model_dump()}, {"model": model.model_dump()}, [f"model.{key}" for key in FREE])
    if not lines:
        return
    advice = "give the run the model that these weights belong to"
    if there.num_nextn_predict_layers == 0 < model.num_nextn_predict_layers:
        lacking = "these weights have no multi-token prediction layer: set model.num_nextn_predict_layers=0"
        advice = lacking if len(lines) == 1 else f"{advice}; {lacking}"
    raise UserError(f"{folder}: weights of another model: {'; '.join(lines)}; {advice}")
