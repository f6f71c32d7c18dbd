"""A trainer whose rank 1 fails in its third step: failing_main.py TWIN raise|kill [arguments of the trainer]."""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from shared_ops.errors import run_cli
from shared_ops.training_loop import TrainingLoop


def main(twin_name: str, how: str, arguments: list[str]) -> int:
    real_run = TrainingLoop.run

    def run(self, twin):
        real_step, steps = twin.step, []

        def step(*values):
            steps.append(values)
            if len(steps) == 3 and self.rank == 1:
                (Path(self.config.run.dir) / "failed_at").touch()
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("planted failure in rank 1")
            return real_step(*values)

        twin.step = step
        real_run(self, twin)

    TrainingLoop.run = run
    return run_cli(import_module(f"{twin_name}.main").main, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
