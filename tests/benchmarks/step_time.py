"""Step time and peak memory of transformers' model, torch_proto and ms_train on one configuration, side by side.

    python tests/benchmarks/step_time.py [--rounds N] [--threads N] [section.key=value …]

Each runs in a process of its own; the processes take turns step by step, so that whatever else the machine does hits
all alike. A step is forward, backward, clipping and AdamW on the same packed rows. transformers has neither
multi-token prediction nor router losses, so the configuration has them off.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

CONTESTANTS = ("transformers", "torch_proto", "torch_compiled", "ms_train")  # torch_compiled: train.compile=true
BASE = ["model.num_nextn_predict_layers=0", "model.aux_loss_alpha=0", "run.name=benchmark"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="measured steps of each (default 12)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the process whose turn it is")
    parser.add_argument("--only", choices=CONTESTANTS, nargs="+", default=CONTESTANTS)
    parser.add_argument("--worker", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="overrides of configs/quickstart.yaml")
    arguments = parser.parse_intermixed_args()
    overrides = BASE + arguments.overrides
    if arguments.worker:
        serve(arguments.worker, overrides)
    else:
        compare(arguments.only, overrides, arguments.rounds, arguments.threads)


def compare(names: tuple[str, ...], overrides: list[str], rounds: int, threads: int) -> None:
    """Start the workers, let them take turns, print the table."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "GLOG_v": "3"}
    workers = {}
    for name in names:
        command = [sys.executable, __file__, "--worker", name, *overrides]
        workers[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        print(f"{name}: {ask(workers[name])['ready']}", flush=True)  # built and warmed up
    seconds = {name: [] for name in names}
    for _ in range(rounds):
        for name, worker in workers.items():
            seconds[name].append(ask(worker, "step")["seconds"])
    peaks = {name: ask(worker, "end")["peak_bytes"] for name, worker in workers.items()}
    base = statistics.median(seconds[names[0]])
    print(f"\n{threads} thread(s), median of {rounds} steps; {' '.join(overrides)}")
    print(f"{'':14}{'step s':>9}{'min s':>9}{'to ' + names[0]:>17}{'peak MiB':>10}")
    for name in names:
        median = statistics.median(seconds[name])
        ratio = f"{median / base:.2f}"
        print(f"{name:14}{median:9.3f}{min(seconds[name]):9.3f}{ratio:>17}{peaks[name] / 2**20:10.0f}")


def ask(worker: subprocess.Popen, command: str | None = None) -> dict:
    """Send a command, return the answer; lines that are no answer are the framework's chatter."""
    if command:
        worker.stdin.write(command + "\n")
        worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"a worker ended with code {worker.wait()}")


def serve(name: str, overrides: list[str]) -> None:
    """Answer commands on standard input with JSON lines."""
    from shared_ops.config import load_run_config

    config = load_run_config(None, overrides)
    began = time.perf_counter()
    if name == "transformers":
        step = transformers_step(config)
    elif name == "torch_compiled":
        step = twin_step(load_run_config(None, [*overrides, "train.compile=true"]), "torch_proto")
    else:
        step = twin_step(config, name)
    for _ in range(3):
        loss = step()
    print(json.dumps({"ready": f"loss {loss:.5f} after 3 steps, {time.perf_counter() - began:.0f} s to get there"}),
          flush=True)  # fmt: skip
    for line in sys.stdin:
        if line.strip() == "end":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak_bytes": peak}), flush=True)
            return
        began = time.perf_counter()
        step()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def rows(config):
    """Two documents in each row, ids from a seeded generator."""
    import numpy as np

    from shared_ops.data.packing import batch_from_documents

    length, vocab = config.train.sequence_length, config.model.vocab_size
    generator = np.random.default_rng(0)
    cut = length // 3
    documents = [
        [generator.integers(0, vocab, cut).tolist(), generator.integers(0, vocab, length - cut).tolist()]
        for _ in range(config.train.global_batch_size)
    ]
    return batch_from_documents(documents, length)


def twin_step(config, name: str):
    """The whole production step of a twin."""
    from importlib import import_module

    from shared_ops.batch import training_batch

    parallel = import_module(f"{name}.parallel").Parallel()
    trainer = import_module(f"{name}.trainer").Trainer(config, parallel)
    batch = training_batch(rows(config), 0)
    updates = iter(range(1, 1 << 30))
    return lambda: trainer.step(batch, 1e-3, next(updates), False).loss


def transformers_step(config):
    """The same step around transformers' model, with its fastest attention and experts for this device."""
    import torch
    import transformers

    c = config.model
    hf = transformers.AutoConfig.for_model(**c.to_hf())
    hf._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa", dtype=torch.float32)
    optim = config.optim
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=tuple(optim.betas), eps=optim.eps, fused=True)
    batch = {key: torch.from_numpy(value).long() for key, value in rows(config).items()}
    segments, length = batch["segment_ids"], config.train.sequence_length
    visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length).tril().bool()
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"],
              "attention_mask": visible[:, None]}  # fmt: skip
    labels = batch["labels"]

    def step() -> float:
        logits = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, c.vocab_size), labels.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    main()
