"""Export the main model's forward pass to ONNX: `python -m torch_proto.export OUT.onnx --config FILE --weights PATH`.

The graph takes input_ids, position_ids and segment_ids, int64 [batch, sequence] with both axes free (positions stay
below the length of the rotary table), and gives logits, fp32 [batch, sequence, vocabulary]. Every parameter is an
initialiser with its canonical name, shape and values, so that the file is a weights file too; all others are named
`constants/…`. The metadata entry config.json is the model's configuration as the hub spells it.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_ops.config import ModelConfig, load_model_config, load_run_config, read_yaml
from shared_ops.data.packing import batch_from_documents
from shared_ops.errors import EXIT_DIFFERENT, EXIT_OK, UserError, run_cli
from shared_ops.files import sync
from shared_ops.init import initial_value
from shared_ops.params import Parameter, manifest
from shared_ops.weights import PARAMS, open_weights
from torch_proto.checkpoint import StateMap
from torch_proto.model import DeepseekForCausalLM
from torch_proto.router import Router

if TYPE_CHECKING:
    from onnxscript import ir

SEGMENTS = "segment_ids: a number from 1 for each document packed into a row (1 everywhere for one text), 0: padding"
INPUTS, OUTPUT = ("input_ids", "position_ids", "segment_ids"), "logits"
CONSTANTS, DATA_SUFFIX = "constants/", ".data"
LARGEST_MODEL = 2_000_000_000  # protobuf ends at 2 GiB: beyond it all tensors go to one file beside the model
Value = Callable[[Parameter], np.ndarray]
TOLERANCE = 1e-4  # of onnxruntime's logits, relative to the largest


def main(argv: Sequence[str]) -> int:
    """Configuration and weights -> graph -> check -> OUT."""
    arguments = _parser().parse_args(argv)
    out, begin = arguments.out, time.monotonic()
    _require_packages(["onnx", "onnxscript", *(["onnxruntime"] if arguments.check else [])])
    if out.suffix != ".onnx":
        raise UserError(f"{out}: expected a file name that ends in .onnx")
    with weights_of(arguments.config, arguments.weights) as (config, value):
        model = MainModel(config, _length(arguments.sequence_length, config.max_position_embeddings))
        with staging(out) as folder:
            model.load(value)
            save(to_onnx(model, config), folder / out.name)
            size = sum(file.stat().st_size for file in folder.iterdir())
            report = f"{out}: {size / 1e6:,.1f} MB, exported in {time.monotonic() - begin:.0f} s"
            if arguments.check:
                agreement = check(model, folder / out.name)
                if not agreement.holds:
                    print(f"error: {agreement}, allowed are {TOLERANCE:.0e}: {out} is not written", file=sys.stderr)
                    return EXIT_DIFFERENT
                report += f"; {agreement}"
            publish(folder, out)
    print(report)
    print(f"inputs {', '.join(INPUTS)}, int64 [batch, sequence]; {SEGMENTS}; output {OUTPUT}")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_proto.export",
        description="Write the main model's forward pass and its weights as an ONNX model.",
        epilog=f"The model takes {', '.join(INPUTS)}, int64 [batch, sequence]; {SEGMENTS}. It gives {OUTPUT}.",
    )
    parser.add_argument("out", type=Path, metavar="OUT.onnx", help="file to write")
    parser.add_argument(
        "--config", metavar="FILE",
        help="run file, model file, model name or Hugging Face folder (default: the weights')",
    )  # fmt: skip
    parser.add_argument(
        "--weights", type=Path, metavar="PATH",
        help="step folder or HDF5 weights folder (default: the initial values of the run file's seed)",
    )  # fmt: skip
    parser.add_argument(
        "--sequence-length", type=int, metavar="S",
        help="length of the rotary table: positions are 0 .. S-1 (default: max_position_embeddings)",
    )  # fmt: skip
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not compare the logits of onnxruntime and PyTorch"
    )
    return parser


def _require_packages(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the ONNX export needs {', '.join(missing)}: pip install -e '.[torch,onnx]'")


def _length(asked: int | None, longest: int) -> int:
    length = longest if asked is None else asked
    if not 1 <= length <= longest:
        raise UserError(f"--sequence-length {length}: expected 1 to the model's max_position_embeddings={longest}")
    return length


# --- the weights -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def weights_of(config: str | None, weights: Path | None) -> Iterator[tuple[ModelConfig, Value]]:
    """(model, canonical value of a parameter): stored ones, or a run's initial values (seed 0 without a run file)."""
    model, seed = read_config(config) if config is not None else (None, 0)
    if weights is None:
        if model is None:
            raise UserError("nothing to export: give --config, --weights or both")
        yield model, lambda p: initial_value(p, seed, model.initializer_range)
        return
    with open_weights(weights, model) as stored:
        yield stored.model, lambda p: stored[PARAMS + p.name]


def read_config(where: str) -> tuple[ModelConfig, int]:
    """(model, seed): of a run file, or a model by file, name or folder with seed 0."""
    path = Path(where)
    if path.is_file() and path.suffix != ".json" and "model" in read_yaml(path):
        run = load_run_config(path)
        return run.model, run.run.seed
    return load_model_config(where), 0


# --- the graph ---------------------------------------------------------------------------------------------------


class MainModel(DeepseekForCausalLM):
    """The model without what only training needs, on positions 0 .. length-1; experts are in canonical order."""

    forward = DeepseekForCausalLM.main_logits

    def __init__(self, config: ModelConfig, length: int):
        only_training = {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0, "router_z_loss_coef": 0.0}
        super().__init__(config.model_copy(update=only_training), length)
        self.length = length
        for router in self.modules():
            if isinstance(router, Router):  # ONNX looks up with int64; groups follow the expert table, slots need not
                router.experts_of_group = router.experts_of_group.long()
                router.group_of_expert = router.group_of_expert.long()
                router.slot_of_expert = torch.arange(router.n_experts)

    @torch.no_grad()
    def load(self, value: Value) -> None:
        """Give every parameter its canonical value."""
        states = StateMap(self)
        for p in manifest(self.config):
            states.put(states.named[p.name], value(p), stacked=False)


def to_onnx(model: MainModel, config: ModelConfig) -> "ir.Model":
    """The graph; its tensors share the memory of the model's."""
    from onnxscript import ir

    from torch_proto.onnx_ops import OPSET, TRANSLATIONS

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    example = tuple(torch.zeros(2, 5, dtype=torch.long) for _ in INPUTS)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            model, example, dynamo=True, optimize=False, verbose=False, opset_version=OPSET,
            custom_translation_table=TRANSLATIONS, dynamic_shapes=(sizes,) * len(INPUTS),
            input_names=INPUTS, output_names=[OUTPUT],
        )  # fmt: skip
        # the optimizer folds small weights into others and merges equal ones, but inputs it does not touch
        graph = program.model.graph
        parameters = [graph.initializers.pop(p.name) for p in manifest(model.config)]
        tensors = {value.name: value.const_value for value in parameters}
        for value in parameters:
            value.const_value = None
        graph.inputs.extend(parameters)
        program.optimize()
    graph = program.model.graph
    constants = [graph.initializers.pop(name) for name in list(graph.initializers)]
    parameters = graph.inputs[len(INPUTS) :]
    del graph.inputs[len(INPUTS) :]
    for value in parameters:
        value.const_value = tensors[value.name]
    for value in constants:
        value.name = CONSTANTS + value.name
    for value in (*parameters, *constants):
        graph.register_initializer(value)
    for part in (graph, *graph.inputs, *graph.outputs, *graph.initializers.values()):
        part.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(graph):  # the paths of this machine's source files, among others
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    program.model.metadata_props["config.json"] = json.dumps(config.to_hf(), indent=2)
    return program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings about its own parts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# --- the files ---------------------------------------------------------------------------------------------------


def save(model: "ir.Model", path: Path, largest_model: int = LARGEST_MODEL) -> None:
    """Write a graph; beyond `largest_model` bytes its tensors lie in `path` + ".data". Not atomic."""
    from onnxscript import ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    data = path.name + DATA_SUFFIX if size > largest_model else None
    try:
        ir.save(model, path, external_data=data)
        for file in (path, *([path.with_name(data)] if data else [])):
            sync(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder beside `out` for the time of writing."""
    folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    if out.is_dir():
        raise UserError(f"{out}: is a folder, expected the name of a file to write")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}: {error.filename}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, out: Path) -> None:
    """Move the staged files to their names; a model never stands beside another's data."""
    data, old_data = folder / (out.name + DATA_SUFFIX), out.with_name(out.name + DATA_SUFFIX)
    try:
        if old_data.exists():
            out.unlink(missing_ok=True)
            old_data.unlink()
        if data.exists():
            out.unlink(missing_ok=True)
            os.replace(data, old_data)
        os.replace(folder / out.name, out)
        sync(out.parent)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from None


# --- the check ---------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """The largest difference of any logit, relative to the largest logit; and how much was compared."""

    difference: float
    compared: int
    rows: int

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE

    def __str__(self) -> str:
        text = f"onnxruntime's logits differ from PyTorch's by at most {self.difference:.1e} of the largest"
        if self.compared < self.rows:
            text += f" ({self.rows - self.compared} of {self.rows} rows left out: a router's choice hangs on rounding)"
        return text


def check(model: MainModel, path: Path) -> Agreement:
    """Run a file with onnxruntime and the model with PyTorch on packed documents, padding and the last positions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    batch = _batch(model.config.vocab_size, model.length)
    difference, compared, rows = 0.0, 0, 0
    for feeds in (batch, {name: array[:1, :1] for name, array in batch.items()}):
        (actual,) = session.run([OUTPUT], feeds)
        expected, certain = _expected(model, feeds)
        if not np.isfinite(expected).all():
            raise UserError("the weights give logits that are not finite: take others, or export them with --no-check")
        worst = np.abs(actual - expected).max((1, 2))[certain] / np.abs(expected).max()
        difference = max(difference, worst.max(initial=0), 0 if np.isfinite(actual).all() else np.inf)
        compared, rows = compared + len(worst), rows + len(actual)
    if not compared:
        raise UserError(f"{path.name}: cannot be checked, every row's routers choose between equals; use --no-check")
    return Agreement(float(difference), compared, rows)


def _batch(vocab_size: int, length: int, rows: int = 12, longest: int = 48) -> dict[str, np.ndarray]:
    """Rows of random documents and padding; the first is one document at the last positions, the last one is empty."""
    generator, width = np.random.default_rng(0), min(length, longest)
    filled = [width, *generator.integers(1, width + 1, rows - 2), 0]
    sizes = [[width], *(generator.multinomial(n, [1 / 3] * 3) for n in filled[1:])]
    documents = [[generator.integers(0, vocab_size, n).tolist() for n in row if n] for row in sizes]
    batch = batch_from_documents(documents, width)
    batch["position_ids"][0] += length - width
    return {name: batch[name].astype(np.int64) for name in INPUTS}


def _expected(model: MainModel, feeds: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """PyTorch's logits [B, S, V], and bool [B]: rows in which no router's choice hangs on the last bits."""
    rows, ties = len(feeds[INPUTS[0]]), []

    def watch(top_k, inputs: tuple[Tensor], _) -> None:
        (scores,) = inputs
        if top_k.k < scores.shape[1]:
            best = scores.topk(top_k.k + 1).values
            ties.append((best[:, -2] - best[:, -1] < 1e-5 * best[:, 0].abs()).view(rows, -1).any(1))

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [top.register_forward_hook(watch) for r in routers for top in (r.top_experts, r.top_groups)]
    try:
        with torch.no_grad():
            logits = model(*(torch.from_numpy(feeds[name]) for name in INPUTS))
    finally:
        for hook in hooks:
            hook.remove()
    tied = torch.stack(ties).any(0) if ties else torch.zeros(rows, dtype=torch.bool)
    return logits.numpy(), ~tied.numpy()


if __name__ == "__main__":
    sys.exit(run_cli(main))
