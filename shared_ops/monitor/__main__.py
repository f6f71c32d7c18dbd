"""`python -m shared_ops.monitor report RUN_FOLDER`"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shared_ops.errors import run_cli


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m shared_ops.monitor", description="Look at a training run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        help="write report.html of a run",
        description=("Write report.html, which needs no network, from the metrics.jsonl of a run."),
    )
    report.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN_FOLDER",
        help="<run.dir>/<run.name>/<twin>, such as runs/quickstart/ms_train",
    )
    arguments = parser.parse_args(argv)
    from shared_ops.monitor.report import write_report  # plotly is slow to import: not for --help

    print(write_report(arguments.run_folder))


if __name__ == "__main__":
    sys.exit(run_cli(main))
