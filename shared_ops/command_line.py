"""The trainers' command line: the same arguments for both twins."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shared_ops.config import DEFAULT_RUN_FILE, RunConfig, load_run_config
from shared_ops.errors import UserError


class Arguments(NamedTuple):
    config: RunConfig
    resume: str | None
    force: bool
    weights: Path | None


def parse(program: str, argv: Sequence[str]) -> Arguments:
    """Read arguments and the configuration; raises `UserError` for bad values, exits for --help and bad syntax."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train a DeepSeek model as a YAML run file describes it.",
        epilog="example: train.steps=100 optim.lr=1e-3 model=tiny_v3",
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_RUN_FILE, help="run file (default: quickstart.yaml)")
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="go on from a step folder; auto: the newest of this run, or from the start where there is none",
    )
    parser.add_argument("--force", action="store_true", help="resume although settings outside the model differ")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="PATH",
        help="begin from these weights: an HDF5 folder that weight_sync has written, or a step folder",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the run file")
    parsed = parser.parse_intermixed_args(argv)
    if parsed.weights and parsed.resume not in (None, "auto"):
        raise UserError(
            f"--weights {parsed.weights} begins a new run and --resume {parsed.resume} goes on with another one: give "
            "one of the two (--resume auto takes the weights as long as there is no checkpoint)"
        )
    config = load_run_config(parsed.config, parsed.overrides)
    return Arguments(config, parsed.resume, parsed.force, parsed.weights)
