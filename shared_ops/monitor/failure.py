"""A rank that fails ends its whole job within seconds, with its message on rank 0's console.

A rank that raises leaves the others in a collective that never completes; the launcher notices late, and
under msrun rank 0's log is the only one on the console. So a failing rank writes a file `rank_00003.json`
into the run's `failures/` folder (which all ranks share), and a thread on every rank looks there twice a
second: rank 0 prints the message, and every rank leaves through `os._exit`, which needs no main thread.
msrun also waits for its scheduler process, which finds out by time-outs only: give it a watch as well, with
`rank=SCHEDULER`, before it enters the framework's initialisation. It spends its life in there without ever
letting another thread run, so its watch is a small process of its own.

Which files count: those written *after this process started* (by its start time in the kernel, not the
time of this import). Jobs in one run folder follow each other, so whatever a former job wrote is older than
every process of this one, and no stale file can end a new job, whether or not somebody removed it. The
price: a rank that fails before another one's process has even been started is not seen by that one, which
is then ended by its launcher as without this watch. A launcher starts its processes within far less time
than a rank needs to import anything, so that takes clocks of several machines that disagree by seconds. Files
carry the job's address (the launcher's master or scheduler), and those of another job are ignored. Removal
by rank 0 at its start is tidiness only and follows the same rule, so it cannot take a file of this job.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from shared_ops.errors import EXIT_BAD_INPUT, UserError
from shared_ops.files import write_atomically

POLL_SECONDS = 0.5
# How long a rank stays once it knows: as soon as the launcher sees the first exit code, it ends all ranks and
# the tail of rank 0's log, and rank 0 must have read and printed the message by then.
LINGER_SECONDS = 3 * POLL_SECONDS
SCHEDULER = -1  # the rank of a process that takes part in no collective


class FailureWatch:
    """Watches `folder` from construction to `stop()`.

        with FailureWatch(run_folder.failures, rank, world_size):
            train()

    As a context manager it reports whatever leaves the block and then ends the process (exit code 2 for a
    `UserError`, else 1); with one rank alone it does nothing and the exception goes its way.
    """

    def __init__(self, folder: str | Path, rank: int, world_size: int):
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.started = process_start_time()
        self.job = job_address()
        self._stop = threading.Event()
        self._telling, self._told = threading.Lock(), False
        if world_size > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            if rank == SCHEDULER:
                _start_guard(self.folder, self.job, self.started)
                return
            if rank == 0:
                self._tidy()
            threading.Thread(target=self._poll, name="failure watch", daemon=True).start()

    def report(self, error: BaseException) -> int:
        """Print this rank's error, leave it for the other ranks, and return the exit code to leave with.

        The watch is over then. Without another rank nothing is written. Where another rank has failed before,
        a collective that broke is a consequence and must not hide the cause: only one line is printed for it.
        """
        self.stop()
        code, message = exit_code(error), _message(error)
        earlier = [] if isinstance(error, UserError) else self._others()
        if earlier:
            self._tell(earlier[0])
            _print(f"rank {self.rank} stopped after that: {type(error).__name__}")
            return earlier[0]["code"]
        _print(f"error: rank {self.rank}: {message}" if self.world_size > 1 else f"error: {message}")
        if self.world_size > 1:
            record = {
                "rank": self.rank,
                "job": self.job,
                "time": time.time(),
                "code": code,
                "message": message,
            }
            try:
                write_atomically(self.folder / f"rank_{self.rank:05d}.json", json.dumps(record))
            except OSError as failed:  # a full disk must not hide the error itself
                _print(f"rank {self.rank}: cannot tell the other ranks: {failed}")
        return code

    def fail(self, error: BaseException) -> NoReturn:
        """Report, then end this process without its exit handlers: a framework's may wait for other ranks."""
        code = self.report(error)
        if self.world_size > 1:
            time.sleep(LINGER_SECONDS)
        _leave(code)

    def stop(self) -> None:
        """Stop watching: after the last collective, or when this rank itself is leaving."""
        self._stop.set()

    def __enter__(self) -> "FailureWatch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, SystemExit) and error.code in (None, 0):
            self.stop()
        elif self.world_size > 1:
            self.fail(error)

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            if others := self._others():
                self._tell(others[0])
                time.sleep(LINGER_SECONDS)
                if not self._stop.is_set():
                    _leave(others[0]["code"])

    def _others(self) -> list[dict]:
        """The other ranks' failures, the first one first."""
        if self.world_size == 1:
            return []
        records = failures(self.folder, self.job, self.started)
        return sorted((r for r in records if r["rank"] != self.rank), key=lambda record: record["time"])

    def _tell(self, record: dict) -> None:
        """Rank 0 prints another rank's message, once."""
        with self._telling:
            if self.rank == 0 and not self._told:
                _print(f"error: rank {record['rank']}: {record['message']}")
            self._told = True

    def _tidy(self) -> None:
        for path in self.folder.glob("rank_*.json"):
            record = _read(path)
            if record is not None and record["time"] <= self.started:
                path.unlink(missing_ok=True)


def failures(folder: Path, job: str, since: float) -> list[dict]:
    """The failure records of a job's ranks written after `since`."""
    records = [_read(path) for path in sorted(folder.glob("rank_*.json"))]
    return [
        record for record in records if record is not None and record["job"] == job and record["time"] > since
    ]


def _start_guard(folder: Path, job: str, since: float) -> None:
    """Start the process that ends this one after a failure; it ends with this one, whose pipe then closes."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    arguments = [str(folder.absolute()), job, repr(since), str(os.getpid())]
    _GUARDS.append(
        subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    )


def _guard(folder: str, job: str, since: str, process: str) -> None:
    def gone(seconds: float) -> bool:
        return bool(select.select([sys.stdin], [], [], seconds)[0])

    while not gone(POLL_SECONDS):
        # The scheduler leaves last: without it, the ranks would fill their logs with lost connections.
        if failures(Path(folder), job, float(since)) and not gone(2 * LINGER_SECONDS):
            os.kill(int(process), signal.SIGKILL)


def _read(path: Path) -> dict | None:
    """A failure file's record; None where it was removed meanwhile or is something else."""
    try:
        record = json.loads(path.read_text())
        return {
            "rank": int(record["rank"]),
            "job": str(record["job"]),
            "time": float(record["time"]),
            "code": int(record["code"]),
            "message": str(record["message"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _message(error: BaseException) -> str:
    """What a person needs: a traceback only for a fault of the program."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"left with exit code {error.code}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "".join(traceback.format_exception(error)).rstrip()


def exit_code(error: BaseException) -> int:
    """2 for bad input, a SystemExit's own code, else 1."""
    if isinstance(error, UserError):
        return EXIT_BAD_INPUT
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def job_address() -> str:
    """What the ranks of a job have in common and two jobs at a time have not: where they meet."""
    names = ("MS_SCHED_HOST", "MS_SCHED_PORT", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def process_start_time() -> float:
    """When this process was started, in seconds since the epoch."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # field 22, starttime, counted after the command's name
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return _IMPORTED


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


_IMPORTED = time.time()
_GUARDS: list[subprocess.Popen] = []  # held, so that their pipes stay open as long as this process lives

if __name__ == "__main__":
    _guard(*sys.argv[1:])
