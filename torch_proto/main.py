"""Train with PyTorch: `python torch_proto/main.py` or `torchrun --nproc-per-node=N torch_proto/main.py`."""

import os
import sys
from collections.abc import Sequence

from shared_ops.command_line import parse
from shared_ops.errors import run_cli

# set before the first import of torch: OpenMP threads that spin while they wait make a shared machine many times slower
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}


def main(argv: Sequence[str]) -> None:
    """Configuration -> model -> training."""
    config, resume, force, weights = parse("torch_proto/main.py", argv)
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)

    from shared_ops.monitor.failure import FailureWatch
    from shared_ops.training_loop import TrainingLoop
    from torch_proto.parallel import Parallel
    from torch_proto.trainer import Trainer, check_precision

    parallel = Parallel()
    loop = TrainingLoop(config, "torch_proto", parallel.rank, parallel.world_size, resume, force, weights)
    with FailureWatch(loop.folder.failures, parallel.rank, parallel.world_size):
        check_precision(config.train.precision, parallel.device)
        loop.prepare()
        parallel.start()
        loop.run(Trainer(config, parallel))
        parallel.finish()


if __name__ == "__main__":
    sys.exit(run_cli(main))
