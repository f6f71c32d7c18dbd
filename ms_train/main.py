"""Train with MindSpore: `msrun … ms_train/main.py` or `python ms_train/main.py`."""

import os
import sys
from collections.abc import Sequence

from shared_ops.command_line import parse
from shared_ops.errors import run_cli

# what must be set before the first import of mindspore
QUIET = {"GLOG_v": "3"}  # errors only
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}  # processes that share cores must not spin


def main(argv: Sequence[str]) -> None:
    """Configuration -> model -> training."""
    config, resume, force = parse("ms_train/main.py", argv)
    for name, value in (QUIET | SHARED_CORES).items():
        os.environ.setdefault(name, value)

    from ms_train.parallel import Parallel
    from ms_train.trainer import Trainer
    from shared_ops.monitor.failure import FailureWatch
    from shared_ops.training_loop import TrainingLoop

    parallel = Parallel()
    loop = TrainingLoop(config, "ms_train", parallel.rank, parallel.world_size, resume, force)
    with FailureWatch(loop.folder.failures, parallel.rank, parallel.world_size):
        loop.prepare()
        parallel.start()
        loop.run(Trainer(config, parallel))
        parallel.finish()


if __name__ == "__main__":
    sys.exit(run_cli(main))
