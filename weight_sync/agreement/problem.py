"""What both sides get: one configuration, one set of parameters, one batch."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml

from shared_ops.batch import Batch, training_batch
from shared_ops.config import (
    DEFAULT_RUN_FILE,
    ModelConfig,
    RunConfig,
    load_model_config,
    load_run_config,
    read_yaml,
    validate,
)
from shared_ops.data.packing import batch_from_documents
from shared_ops.errors import UserError
from shared_ops.init import initial_value
from shared_ops.params import CORRECTION_BIAS, Parameter, manifest

NORM_SPREAD = 0.3
BIAS_MEAN, BIAS_SPREAD = -0.8, 0.35  # beside sigmoid scores near 0.5: most sums negative, some not
MAX_LENGTH = 256  # of the default: more than that is a question of patience


def load_config(where: str, rows: int, length: int | None) -> RunConfig:
    """A run file, or a model (name, YAML file, Hugging Face's config.json or its folder) in the default run.

    The batch is `rows` by `length` in fp32, uncut, whatever the file says. Raises `UserError`.
    """
    path = Path(where)
    is_yaml = path.is_file() and path.suffix != ".json"
    content = read_yaml(path) if is_yaml else {}
    if "model" in content:
        run = load_run_config(path)
    elif is_yaml and "model_type" not in content:
        raise UserError(f"{path}: expected a run file (with a key model) or a model file (with a key model_type)")
    else:
        run = in_default_run(load_model_config(where))
    return sized(run, run.model, rows, length)


def in_default_run(model: ModelConfig) -> RunConfig:
    """The quickstart's run with another model."""
    return sized(load_run_config(DEFAULT_RUN_FILE), model, 1, None)


def sized(run: RunConfig, model: ModelConfig, rows: int, length: int | None) -> RunConfig:
    """The run in one process on a batch of this size, in fp32 and uncompiled (a compiled layer shows no inside)."""
    shortest = model.num_nextn_predict_layers + 1
    if length is None:
        length = min(run.train.sequence_length, model.max_position_embeddings, MAX_LENGTH)
    if not shortest < length <= model.max_position_embeddings:
        raise UserError(f"--sequence-length {length}: expected {shortest + 1} to {model.max_position_embeddings}, so "
                        "that every prediction depth has a token to predict and every position an angle")  # fmt: skip
    train = {"global_batch_size": rows, "micro_batch_size": None, "sequence_length": length, "precision": "fp32",
             "compile": False}  # fmt: skip
    values = run.model_dump()
    values.update(model=model.model_dump(), train=values["train"] | train, parallel={})
    return validate(RunConfig, values, "parity")


class State(Mapping):
    """A training state before the first step, as the trainers restore it: parameters, and moments of zero."""

    def __init__(self, parameters: dict[str, np.ndarray]):
        self.parameters = parameters

    def __getitem__(self, name: str) -> np.ndarray:
        kind, _, name = name.partition("/")
        return self.parameters[name] if kind == "params" else np.zeros_like(self.parameters[name])

    def __iter__(self) -> Iterator[str]:
        return (f"params/{name}" for name in self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def made_parameters(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """fp32 by canonical name: the trainers' initial values of that seed, but no norm is all ones and no correction bias
    zero, which would hide what they do."""
    return {p.name: _made(p, seed, config.initializer_range) for p in manifest(config)}


def _made(p: Parameter, seed: int, std: float) -> np.ndarray:
    normal = dataclasses.replace(p, init="normal")
    if p.name.endswith(CORRECTION_BIAS):
        return np.float32(BIAS_MEAN) + initial_value(normal, seed, BIAS_SPREAD)
    if p.init == "ones":
        return np.float32(1) + initial_value(normal, seed, NORM_SPREAD)
    return initial_value(p, seed, std)


def read_parameters(path: Path, model: ModelConfig | None) -> tuple[ModelConfig, dict[str, np.ndarray], str]:
    """(the model, fp32 parameters by canonical name, what was read in words) of any store of weights.

    Without `model` the store's own configuration counts; without weights of the prediction depths they are left out.
    `UserError` where the weights are not the model's.
    """
    from weight_sync.canonical import open_weights

    with _model_file(model) as file, open_weights(path, file) as weights:
        model = weights.config
        if not weights.with_mtp and model.num_nextn_predict_layers:
            model = ModelConfig.model_validate(model.model_dump() | {"num_nextn_predict_layers": 0})
        parameters = {p.name: weights.tensors[p.name].array().astype(np.float32) for p in manifest(model)}
        return model, parameters, f"{path} ({weights.format})"


@contextmanager
def _model_file(model: ModelConfig | None) -> Iterator[Path | None]:
    """The model as a file, which is how `open_weights` takes one."""
    if model is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(yaml.safe_dump(model.model_dump()), encoding="utf-8")
        yield path


def made_batch(run: RunConfig, seed: int) -> Batch:
    """Random tokens in documents: row 0 is one document, the others are packed with several, every second one with
    padding behind them; of three rows and more the last has nothing at all."""
    generator = np.random.default_rng(seed)
    rows, length, vocabulary = run.train.global_batch_size, run.train.sequence_length, run.model.vocab_size
    documents = []
    for row in range(rows):
        sizes = [length]
        if row:
            filled = length if row % 2 else max(length - length // 4, 1)
            cuts = np.sort(generator.choice(np.arange(1, max(filled, 2)), size=min(3, filled - 1), replace=False))
            sizes = np.diff([0, *cuts, filled]).tolist()
        if row == rows - 1 and rows >= 3:
            sizes = []
        documents.append([generator.integers(0, vocabulary, size).tolist() for size in sizes])
    return training_batch(batch_from_documents(documents, length), run.model.num_nextn_predict_layers)
