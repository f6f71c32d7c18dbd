"""Train with MindSpore: `msrun … ms_train/main.py` or `python ms_train/main.py`."""

import os
import sys
from collections.abc import Sequence

from ms_train import launcher
from shared_ops.command_line import parse
from shared_ops.errors import run_cli
from shared_ops.monitor.failure import FailureWatch
from shared_ops.training_loop import TrainingLoop

# what must be set before the first import of mindspore
QUIET = {"GLOG_v": "3"}  # errors only
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}  # processes that share cores must not spin


def main(argv: Sequence[str]) -> None:
    """Configuration -> model -> training."""
    config, resume, force, weights = parse("ms_train/main.py", argv)
    for name, value in (QUIET | SHARED_CORES).items():
        os.environ.setdefault(name, value)
    rank, world_size = int(os.environ.get("RANK_ID", 0)), int(os.environ.get("MS_WORKER_NUM", 1))
    loop = TrainingLoop(config, "ms_train", rank, world_size, resume, force, weights)
    loop.on_stop = launcher.take_console
    launcher.enter(lambda how: FailureWatch(loop.folder.failures, rank, world_size).report(RuntimeError(how)))

    from ms_train.parallel import Parallel

    if launcher.role() == "MS_SCHED":
        Parallel().start()  # returns when all workers have left
        return
    with FailureWatch(loop.folder.failures, rank, world_size):
        from ms_train.trainer import Trainer, check_precision

        parallel = Parallel()
        check_precision(config.train.precision, parallel.device)
        loop.prepare()
        parallel.start()
        loop.run(Trainer(config, parallel))
        parallel.finish()
    launcher.leave()


if __name__ == "__main__":
    sys.exit(run_cli(main))
