"""Train with PyTorch: `python torch_proto/main.py` or `torchrun --nproc-per-node=N torch_proto/main.py`."""

import sys
from collections.abc import Sequence

from shared_ops.command_line import parse
from shared_ops.errors import run_cli


def main(argv: Sequence[str]) -> None:
    """Configuration -> model -> training."""
    config, resume, force = parse("torch_proto/main.py", argv)

    from shared_ops.monitor.failure import FailureWatch
    from shared_ops.training_loop import TrainingLoop
    from torch_proto.parallel import Parallel
    from torch_proto.trainer import Trainer

    parallel = Parallel()
    loop = TrainingLoop(config, "torch_proto", parallel.rank, parallel.world_size, resume, force)
    with FailureWatch(loop.folder.failures, parallel.rank, parallel.world_size):
        loop.prepare()
        parallel.start()
        loop.run(Trainer(config, parallel))
        parallel.finish()


if __name__ == "__main__":
    sys.exit(run_cli(main))
