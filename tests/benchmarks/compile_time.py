"""Compile time and peak memory of ms_train's training step against the number of layers.

    python tests/benchmarks/compile_time.py [--layers N …] [--all] [section.key=value …]

Each number of layers in a process of its own, at tiny width: what counts is the graph, not the arithmetic. Compiling
is the first step less the second. `--all` adds 64 layers, which takes many minutes and several GiB.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise

LAYERS = (2, 8, 16)
BASE = ["model=tiny_v3", "model.num_nextn_predict_layers=0", "model.first_k_dense_replace=1", "run.name=benchmark",
        "train.sequence_length=32", "train.global_batch_size=2"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="numbers of layers (default 2 8 16)")
    parser.add_argument("--all", action="store_true", help="64 layers too")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="overrides of configs/quickstart.yaml")
    arguments = parser.parse_intermixed_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, BASE + arguments.overrides)), flush=True)
        return
    layers = sorted({*arguments.layers, *([64] if arguments.all else [])})
    print(f"{os.cpu_count()} CPU(s); {' '.join(BASE + arguments.overrides)}")
    print(f"{'layers':>6}{'compile s':>11}{'CPU s':>8}{'build s':>9}{'step s':>8}{'peak MiB':>10}{'kernels':>13}")
    rows = {}
    for count in layers:
        rows[count] = row = run(count, arguments.overrides)
        print(f"{count:6}{row['compile']:11.1f}{row['cpu']:8.1f}{row['build']:9.1f}{row['step']:8.3f}"
              f"{row['peak_bytes'] / 2**20:10.0f}{row['kernels']:>13}", flush=True)  # fmt: skip
    for fewer, more in pairwise(layers):
        ratio, cpu = (rows[more][key] / rows[fewer][key] for key in ("compile", "cpu"))
        print(f"{more} to {fewer} layers: compile time {ratio:.2f}, its CPU time {cpu:.2f}")


def run(layers: int, overrides: list[str]) -> dict:
    """Measure in a new process; its last line is the answer, the others are the framework's chatter."""
    environment = {**os.environ, "GLOG_v": "3"}
    command = [sys.executable, __file__, "--worker", str(layers), *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{layers} layers: the process ended with code {done.returncode}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def measure(layers: int, overrides: list[str]) -> dict:
    """Seconds to build, compile and make a step, and the peak of the resident memory in bytes."""
    from step_time import rows

    from ms_train import ops
    from ms_train.parallel import Parallel
    from ms_train.trainer import Trainer
    from shared_ops.batch import training_batch
    from shared_ops.config import load_run_config

    config = load_run_config(None, [*overrides, f"model.num_hidden_layers={layers}"])
    batch = training_batch(rows(config), config.model.num_nextn_predict_layers)
    began = time.perf_counter()
    trainer = Trainer(config, Parallel())
    build = time.perf_counter() - began
    seconds, cpu = [], []
    for update in (1, 2, 3):
        began, cpu_began = time.perf_counter(), time.process_time()
        trainer.step(batch, 1e-3, update, False)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    step = min(seconds[1:])
    return {"build": build, "compile": seconds[0] - step, "cpu": cpu[0] - min(cpu[1:]), "step": step,
            "peak_bytes": trainer.memory_bytes(), "kernels": ops.selected()}  # fmt: skip


if __name__ == "__main__":
    main()
