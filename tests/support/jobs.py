"""Training jobs as a user starts them: commands, their output, and what they leave in the run folder."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from shared_ops.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train.sequence_length=72", "train.global_batch_size=4", "train.log_steps=1", "optim.warmup_steps=5",
         "monitor.tensorboard=false", "monitor.report=false"]  # fmt: skip


def prepare_text(folder: Path) -> Path:
    """A prepared folder of a megabyte of real text: parts of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = ("asyncio", "email", "json", "logging", "unittest", "http", "xml")
    sources = sorted(str(path) for name in packages for path in (library / name).rglob("*.py"))
    prepare(sources, folder, "train:4096", 0, (0.9, 0.1), workers=2, quiet=True)
    return folder


def command(twin: str, ranks: int, folder: Path, script: str | None = None) -> list[str]:
    """The launcher's command line for a twin; several ranks meet at a free port."""
    script = script or str(ROOT / twin / "main.py")
    if ranks == 1:
        return [sys.executable, script]
    launcher = str(Path(sys.executable).with_name("msrun" if twin == "ms_train" else "torchrun"))
    if twin == "torch_proto":
        return [launcher, "--standalone", f"--nproc-per-node={ranks}", script]
    return [launcher, f"--worker_num={ranks}", f"--local_worker_num={ranks}", "--join=True",
            f"--master_port={free_port()}", f"--log_dir={folder / 'msrun'}", "--tail_worker_log=0", script]  # fmt: skip


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(ranks: int) -> dict[str, str]:
    """One thread for each of several ranks, as the launchers set it; everything else as it is."""
    return {**os.environ, "OMP_NUM_THREADS": "1"} if ranks > 1 else dict(os.environ)


class Job:
    """A finished job: exit code, what the console showed, and the run folder."""

    def __init__(self, twin: str, folder: Path, name: str, process: subprocess.CompletedProcess):
        self.code, self.console = process.returncode, process.stdout
        self.path = folder / name / twin

    @property
    def rows(self) -> list[dict]:
        """The training rows of metrics.jsonl."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, loss) of each validation."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["val_loss"]) for row in map(json.loads, lines) if "val_loss" in row]

    def state(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:08d}"


def run(twin: str, folder: Path, name: str, *arguments: str, ranks: int = 1, timeout: int = 300) -> Job:
    """Run a job to its end; the console is standard output and standard error together."""
    line = [*command(twin, ranks, folder), f"run.dir={folder}", f"run.name={name}", *SMALL, *arguments]
    process = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
                             env=environment(ranks), cwd=folder)  # fmt: skip
    return Job(twin, folder, name, process)


def finish(twin: str, folder: Path, name: str, *arguments: str, ranks: int = 1) -> Job:
    """`run` for a job that must end well."""
    job = run(twin, folder, name, *arguments, ranks=ranks)
    assert job.code == 0, job.console
    return job
