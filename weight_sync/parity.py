"""Two implementations on the same weights and the same batch, module by module.

    python -m weight_sync parity [--config FILE] [--weights PATH] [--pair A,B] [--steps N] [--html FILE] [--json FILE]

Compares inputs, outputs, gradients and chosen experts of every module of ms_train, torch_proto and transformers' model,
two at a time, then optimizer steps of the twins, and names the first module that makes them differ (compare says
how). Exit code 0 where they agree, 1 where they differ, 2 for bad input.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from shared_ops.config import DEFAULT_RUN_FILE, ModelConfig, RunConfig
from shared_ops.errors import EXIT_DIFFERENT, EXIT_OK, UserError
from shared_ops.params import parameter_count
from weight_sync.agreement import problem
from weight_sync.agreement.compare import compare_sides
from weight_sync.agreement.report import Report, show, write_html, write_json
from weight_sync.agreement.steps import compare_steps
from weight_sync.agreement.verdict import judge

# Who is followed where rounding decides a choice, and whose modules are tried alone: the last, a twin, quick to call.
SIDES = ("transformers", "ms_train", "torch_proto")
DEFAULT_ROWS, DEFAULT_STEPS, DEFAULT_BOUND = 4, 2, 1e-5
# before the first import of mindspore: errors only, and processes that share cores must not spin
ENVIRONMENT = {"GLOG_v": "3", "OMP_WAIT_POLICY": "passive"}

Number = TypeVar("Number", int, float)


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code. Raises `UserError` for bad input."""
    asked = _parser().parse_args(argv)
    names = _pair(asked.pair)
    steps = _steps(asked.steps, names)
    for path in (asked.html, asked.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: the folder {path.absolute().parent} does not exist")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    report = run(names, asked.config, asked.weights, asked.rows, asked.sequence_length, asked.seed, asked.bound, steps)
    show(report, Console())
    if asked.html:
        write_html(report, asked.html)
        print(f"page {asked.html}")
    if asked.json:
        write_json(report, asked.json)
    return EXIT_OK if report.verdict.agrees else EXIT_DIFFERENT


def run(
    names: tuple[str, str],
    config: str | None = None,
    weights: Path | None = None,
    rows: int = DEFAULT_ROWS,
    length: int | None = None,
    seed: int = 0,
    bound: float = DEFAULT_BOUND,
    steps: int = 0,
) -> Report:
    """Compare the two sides. Raises `UserError` for bad input."""
    began = time.perf_counter()
    setting, state, facts = prepare(names, config, weights, rows, length, seed)
    batch = problem.made_batch(setting, seed)
    console = Console(stderr=True)
    with console.status(f"building {names[0]} and {names[1]}") as status:
        sides = [importlib.import_module(f"weight_sync.agreement.side_{name}").Side(setting, state) for name in names]
        status.update("running both on the batch, module by module")
        comparison = compare_sides(*sides, batch, bound)
        made = []
        if steps and comparison.blame is None:
            # a compiled step's gradients are held to what the modules one by one have shown
            step_bound = max(bound, 2 * comparison.worst.worst)
            status.update("compiling the training step")
            for one in compare_steps(*sides, batch, setting, steps, step_bound):
                made.append(one)
                status.update(f"optimizer step {one.step} of {steps}")
    verdict = judge(names, comparison, made, bound, setting, [side.source for side in sides])
    facts.append(("seconds", f"{time.perf_counter() - began:.0f}"))
    return Report(names, bound, facts, comparison, made, verdict)


def prepare(
    names: Sequence[str], config: str | None, weights: Path | None, rows: int, length: int | None, seed: int
) -> tuple[RunConfig, problem.State, list[tuple[str, str]]]:
    """(configuration, parameters, facts in words)."""
    setting = None
    if config is not None or weights is None:
        setting = problem.load_config(str(config or DEFAULT_RUN_FILE), rows, length)
    if weights is not None:
        model, parameters, source = problem.read_parameters(weights, setting and setting.model)
        setting = problem.sized(setting or problem.in_default_run(model), model, rows, length)
    left_out = []
    if "transformers" in names:
        model, left_out = importlib.import_module("weight_sync.agreement.side_transformers").comparable(setting.model)
        setting = problem.sized(setting, model, rows, length)
    if weights is None:
        parameters, source = problem.made_parameters(setting.model, seed), f"made from seed {seed}"
    facts = [
        ("configuration", config or (str(weights) if weights else "quickstart")),
        ("model", _words(setting.model)),
        ("parameters", source),
        ("batch", f"{rows} rows of {setting.train.sequence_length} tokens, made from seed {seed}, fp32"),
    ]
    if left_out:
        facts.append(("left out", ", ".join(left_out) + ": transformers has none"))
    return setting, problem.State(parameters), facts


def _words(model: ModelConfig) -> str:
    depths = f" + {model.num_nextn_predict_layers} for prediction" if model.num_nextn_predict_layers else ""
    return (f"{model.model_type}, {model.num_hidden_layers}{depths} layers, {model.n_routed_experts} experts, "
            f"{parameter_count(model):,} parameters")  # fmt: skip


# --- the command line --------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weight_sync parity",
        description="Compare two implementations on the same weights and batch, module by module.",
        epilog="Exit code 0: they agree; 1: they differ; 2: bad input.",
    )
    parser.add_argument("--config", metavar="FILE", help="run file, model file or name, or a Hugging Face folder or "
                        "config.json (default: the weights', else configs/quickstart.yaml)")  # fmt: skip
    parser.add_argument("--weights", type=Path, metavar="PATH", help="weights of any format that weight_sync reads "
                        "(default: made from the seed)")  # fmt: skip
    parser.add_argument("--pair", metavar="A,B", default="ms_train,torch_proto",
                        help=f"two of {', '.join(SIDES)} (default: ms_train,torch_proto)")  # fmt: skip
    parser.add_argument("--steps", type=_number(int, 0), metavar="N",
                        help=f"optimizer steps (default: {DEFAULT_STEPS}; with transformers none)")  # fmt: skip
    parser.add_argument("--bound", type=_number(float, 1e-12), metavar="X", default=DEFAULT_BOUND,
                        help="largest difference, relative to a tensor's largest (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=_number(int, 1), metavar="R", default=DEFAULT_ROWS,
                        help="rows of the batch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--sequence-length", type=_number(int, 1), metavar="S",
                        help=f"tokens of a row (default: the run file's, at most {problem.MAX_LENGTH})")  # fmt: skip
    parser.add_argument("--seed", type=_number(int, 0), metavar="N", default=0, help="of the batch and of made weights")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves along depth")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every difference")
    return parser


def _number(kind: Callable[[str], Number], least: Number) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {least} on")
        return value

    return parse


def _pair(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or len(set(names)) != 2 or not set(names) <= set(SIDES):
        raise UserError(f"--pair {text}: expected two of {', '.join(SIDES)}, such as ms_train,torch_proto")
    return tuple(sorted(names, key=SIDES.index))


def _steps(asked: int | None, names: Sequence[str]) -> int:
    if "transformers" not in names:
        return DEFAULT_STEPS if asked is None else asked
    if asked:
        raise UserError(f"--steps {asked}: only the twins have training steps; leave it out with transformers")
    return 0
