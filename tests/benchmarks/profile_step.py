"""Where the time of ms_train's step goes on CPU, by type of operation, from MindSpore's profiler.

    python tests/benchmarks/profile_step.py [--steps N] [section.key=value …]

"Custom" are the kernels of ms_train/cpu_kernels.cc; with train.kernels=composite MindSpore's own operations take their
place.
"""

import argparse
import csv
import os
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="profiled steps (default 5)")
    parser.add_argument("overrides", nargs="*", help="overrides of configs/quickstart.yaml")
    arguments = parser.parse_intermixed_args()
    os.environ |= {"GLOG_v": "3", "OMP_WAIT_POLICY": "passive"}  # as ms_train/main.py sets them

    import mindspore as ms
    from step_time import BASE, twin_step

    from shared_ops.config import load_run_config

    step = twin_step(load_run_config(None, [*BASE, *arguments.overrides]), "ms_train")
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler = ms.Profiler(output_path=folder)
        for _ in range(arguments.steps):
            step()
        profiler.stop()
        profiler.analyse()
        (table,) = Path(folder).glob("*/FRAMEWORK/cpu_op_type_info_0.csv")
        rows = list(csv.DictReader(table.open()))
    rows.sort(key=lambda row: -float(row["total_compute_time"]))
    total = sum(float(row["total_compute_time"]) for row in rows)
    print(f"\n{'operation':22}{'calls a step':>14}{'ms a step':>12}{'share':>8}")
    for row in rows[:15]:
        time = float(row["total_compute_time"])
        calls = int(row["type_occurrences"]) / arguments.steps
        print(f"{row['op_type']:22}{calls:14.0f}{time / arguments.steps:12.2f}{time / total:8.1%}")
    print(f"{'all':22}{'':14}{total / arguments.steps:12.2f}{1:8.1%}")


if __name__ == "__main__":
    main()
