"""Speed and memory of `weight_sync convert` against cp of the same bytes and a load-everything script.

    python tests/benchmarks/convert_speed.py [--gigabytes 4] [--max-memory 512MiB] [--rounds 7] [--dir FOLDER]

Writes a synthetic V3 checkpoint in bf16 (3-layer cut, experts as many as fill the size), then measures, in rounds that
take turns so that all meet the same disk: cp of the same files, HF -> HDF5, HF -> MindSpore, HDF5 -> HF; and once the
plain script that loads all tensors, stacks and saves them. The page cache makes rates vary by a factor of two and more
from run to run: the median of the ratios within each round counts. Each conversion runs in a process of its own; its
memory is how far RssAnon grows after the imports. The last fsync is not counted; the source is in the page cache.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

PLAIN = "plain script HF -> HDF5"
JOBS = {"HF -> HDF5": ("hf", "hdf5"), "HF -> MindSpore": ("hf", "mindspore"), "HDF5 -> HF": ("h5", "hf")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (default 4)")
    parser.add_argument("--max-memory", default="512MiB", help="bound of the conversions (default 512MiB)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the median counts (default 7)")
    parser.add_argument("--dir", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(*arguments.worker)), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        run(Path(folder), arguments)


def run(folder: Path, arguments: argparse.Namespace) -> None:
    """Write, warm, measure in turns, print."""
    source, size = folder / "hf", synthetic(folder / "hf", arguments.gigabytes)
    print(f"{os.cpu_count()} CPU(s), {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} files, "
          f"--max-memory {arguments.max_memory}")  # fmt: skip
    worker("convert", source, folder / "h5", "hdf5", arguments.max_memory)
    rates: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    names = ["cp", *JOBS]
    for number in range(arguments.rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn], *([PLAIN] if number == 0 else [])):
            target = folder / "out"
            if name == "cp":
                seconds, grown = copy(source, target), 0
            else:
                kind, origin, to = ("convert", *JOBS[name]) if name in JOBS else ("plain", "hf", "hdf5")
                result = worker(kind, folder / origin, target, to, arguments.max_memory)
                seconds, grown = result["seconds"], result["grown"]
            shutil.rmtree(target)
            os.sync()  # nobody pays for another's pages
            rates.setdefault(name, []).append(size / seconds / 1e6)
            memory[name] = max(memory.get(name, 0), grown)
    print(f"{'':24}{'MB/s':>8}{'slowest':>9}{'fastest':>9}{'of cp':>8}{'RssAnon growth MiB':>20}")
    for name in (*names, PLAIN):
        values = rates[name]
        ratio = median(value / cp for value, cp in zip(values, rates["cp"]))
        grown = memory[name] / 2**20
        print(f"{name:24}{median(values):8.0f}{min(values):9.0f}{max(values):9.0f}{ratio:8.2f}{grown:20.0f}")


def copy(source: Path, target: Path) -> float:
    """Seconds of cp."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    return time.perf_counter() - began


def worker(kind: str, source: Path, target: Path, to: str, max_memory: str) -> dict:
    """Convert in a new process."""
    command = [sys.executable, __file__, "--max-memory", max_memory, "--worker", kind, source, target, to]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} {source} -> {to}: the process ended with code {done.returncode}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def measure(kind: str, source: str, target: str, to: str) -> dict:
    """Seconds of the copying, and by how many bytes RssAnon grew at most after the imports."""
    import h5py  # noqa: F401  what both ways need is imported before memory is looked at
    import safetensors.numpy  # noqa: F401

    from weight_sync.conversion import convert
    from weight_sync.plan import Options
    from weight_sync.sizes import parse_size

    bound = sys.argv[sys.argv.index("--max-memory") + 1]
    options = Options(to=to, max_memory=parse_size(bound), quiet=True, sync=False)
    with MemoryWatch() as watch:
        began = time.perf_counter()
        if kind == "plain":
            plain(Path(source), Path(target))
        else:
            convert(Path(source), Path(target), options)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "grown": watch.peak - watch.first}


class MemoryWatch:
    """Samples RssAnon two hundred times a second."""

    def __enter__(self):
        self.first = self.peak = anonymous()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *exception) -> None:
        self.ended.set()
        self.thread.join()


def anonymous() -> int:
    """RssAnon of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def plain(source: Path, target: Path) -> None:
    """What one would write at first: load all, stack the experts, save all."""
    import h5py
    import numpy as np
    from safetensors import deserialize

    target.mkdir()
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, facts in deserialize(path.read_bytes()):
            kind = np.float32 if facts["dtype"] == "F32" else np.uint16
            tensors[name] = np.frombuffer(facts["data"], kind).reshape(facts["shape"])
    stacked: dict[str, list] = {}
    for name, value in tensors.items():
        head, _, rest = name.partition(".experts.")
        kind = rest.partition(".")[2]
        stacked.setdefault(f"{head}.experts.{kind}" if rest else name, []).append(value)
    with h5py.File(target / "model.h5", "w") as file:
        for name, values in stacked.items():
            file.create_dataset(name, data=np.stack(values) if ".experts." in name else values[0])


def synthetic(folder: Path, gigabytes: float) -> int:
    """A hub folder of about that size in bf16; returns the bytes of its tensors."""
    import numpy as np

    from shared_ops.config import ModelConfig, load_model_config
    from weight_sync import names
    from weight_sync.canonical import BFLOAT16, FLOAT32
    from weight_sync.stores import safetensors
    from weight_sync.stores.base import TensorPlan

    base = load_model_config("v3").model_dump()
    cut = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "hidden_size": 2048,
           "intermediate_size": 4096, "moe_intermediate_size": 1024, "vocab_size": 32768, "n_group": 1, "topk_group": 1,
           "num_attention_heads": 16, "num_experts_per_tok": 4}  # fmt: skip
    experts = max(round((gigabytes * 1e9 - 0.45e9) / (2 * 2 * 3 * 1024 * 2048)), 8)
    config = ModelConfig.model_validate(base | cut | {"n_routed_experts": experts})
    plans = [
        TensorPlan(name, entry.part_shape, FLOAT32 if entry.row.dtype == "float32" else BFLOAT16)
        for entry in names.entries(config)
        for name in entry.hub
    ]
    files, beside = safetensors.plan(plans, 1_000_000_000, {"format": "pt"})
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(BFLOAT16).view(np.uint8)
    for plan in files:
        plan.create(folder / plan.name)
        with open(folder / plan.name, "r+b") as file:
            for number, (offset, length) in enumerate(plan.locate(folder / plan.name).values()):
                file.seek(offset)
                shift = number * 4096 % len(values)
                noise = np.roll(values, shift)
                for start in range(0, length, len(noise)):
                    file.write(noise[: min(len(noise), length - start)])
    for name, content in beside.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return sum(plan.nbytes for plan in plans)


if __name__ == "__main__":
    main()
