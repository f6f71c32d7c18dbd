"""Jobs that only save, without a framework; what a kill at many moments of a save leaves, and a rank that fails.

savers.py FOLDER RANKS random COUNT | calls: SIGKILL at random moments, or at each call; prints what each left, as JSON
savers.py FOLDER RANKS limit: one save in which the last rank may write only little, under `FailureWatch`; exit codes

A process of its own that imports once and forks for each save, so that hundreds of them take seconds.
"""

import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shared_ops.monitor.failure import FailureWatch
from shared_ops.shares import share_out
from shared_ops.training_state import MANIFEST, latest_step, read_step, write_step

# 4 MB: one array that three ranks must cut, small ones, and a single value
SHAPES = {"params/a": (3000, 256), "params/b": (7,), "adam_m/a": (600, 256), "adam_v/a": (300, 256), "params/c": (1, 1)}
HANGS_AFTER = 20.0  # seconds


def values(name: str, step: int) -> np.ndarray:
    """An array of the state of a step; no two steps have an element in common."""
    shape = SHAPES[name]
    return (np.arange(np.prod(shape), dtype=np.float32) % 1000 + 1000 * step).reshape(shape)


def meet(ranks: int) -> list[Callable[[float], float]]:
    """`total` of `shared_ops.training_state.write_step` for each of several processes, over sockets to rank 0."""
    pairs = [socket.socketpair() for _ in range(ranks - 1)]

    def receive(link: socket.socket) -> float:
        data = link.recv(8, socket.MSG_WAITALL)
        if len(data) < 8:
            raise RuntimeError("connection closed by another rank")
        return struct.unpack("d", data)[0]

    def of_rank(rank: int) -> Callable[[float], float]:
        mine = [first for first, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]

        def total(number: float) -> float:
            for link in {end for pair in pairs for end in pair} - set(mine):
                link.close()  # so that the others notice when this process ends
            try:
                if rank == 0:
                    number += sum(map(receive, mine))
                for link in mine:
                    link.sendall(struct.pack("d", number))
                return number if rank == 0 else receive(mine[0])
            except OSError as error:  # as the frameworks report it
                raise RuntimeError(str(error)) from None

        return total

    return [of_rank(rank) for rank in range(ranks)]


def save(folder: Path, step: int, rank: int, ranks: int, total: Callable[[float], float]) -> Path:
    """Write one rank's share of a step; returns the step folder."""
    parts = share_out(SHAPES, ranks)[rank]
    arrays = ((part.name, part.place(values(part.name, step)[part.rows])) for part in parts)
    return write_step(folder, step, arrays, {"step of the arrays": step}, rank, ranks, total)


def together(ranks: int, work: Callable[[int, Callable[[float], float]], Any]) -> list:
    """`work(rank, total)` on a thread for each rank; what each returned or raised. Who raises leaves for good."""
    barrier, numbers = threading.Barrier(ranks, timeout=HANGS_AFTER), [0.0] * ranks

    def of_rank(rank: int) -> Any:
        def total(number: float) -> float:
            numbers[rank] = number
            try:
                barrier.wait()
                result = sum(numbers)
                barrier.wait()  # nobody changes a number before all have read it
            except threading.BrokenBarrierError:
                raise RuntimeError("connection closed by another rank") from None
            return result

        try:
            return work(rank, total)
        except Exception as error:  # noqa: BLE001
            barrier.abort()
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks)))


def check(folder: Path) -> int:
    """The newest complete step; raises unless all of it is there, with right checksums and values."""
    newest = latest_step(folder)
    meta, reader = read_step(newest, verify=True)
    with reader:
        assert meta["step of the arrays"] == meta["step"], meta
        assert reader.names() == sorted(SHAPES)
        for name in SHAPES:
            assert np.array_equal(reader[name], values(name, meta["step"])), (newest, name)
    return meta["step"]


def start(
    folder: Path, step: int, ranks: int, before: Callable[[int], None] = lambda rank: None
) -> tuple[list[int], int]:
    """Fork the ranks of a job that saves once: (process ids, descriptor that ends when all are about to begin).

    Each calls `before(rank)`. Exit code 3: another rank is gone.
    """
    totals, (ready, tell) = meet(ranks), os.pipe()
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.close(ready)
                before(rank)
                os.close(tell)
                save(folder, step, rank, ranks, totals[rank])
                code = 0
            except RuntimeError:
                code = 3
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        processes.append(process)
    os.close(tell)
    return processes, ready


def finish(processes: list[int]) -> list[int]:
    """Exit codes, negative for signals; a process that does not end is an error."""
    codes, deadline = {}, time.monotonic() + HANGS_AFTER
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[process] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.0005)
    assert time.monotonic() < deadline, "a rank hangs"
    return [codes[process] for process in processes]


def left(folder: Path, step: int) -> str:
    """How far a save came."""
    published = (folder / f"step_{step:08d}").is_dir()
    for temporary in folder.glob(".tmp-*"):
        if (temporary / MANIFEST).exists():
            return "manifest" if published else "manifest, no step folder"
        return "shards" if any(temporary.glob("*.h5")) else "folder"
    if any(folder.glob(".replaced-*")):
        return "published, former one left"
    return "published" if published else "nothing"


def kill_at_random(folder: Path, ranks: int, count: int) -> dict:
    """SIGKILL to all ranks, or to one of them, at `count` moments spread over the time of a save."""
    begin = time.monotonic()
    for step in (1, 2, 3):
        assert finish(start(folder, step, ranks)[0]) == [0] * ranks
    seconds = (time.monotonic() - begin) / 3
    generator, last, lefts = random.Random(ranks), 3, []
    for moment in range(count):
        step = last + 1
        processes, ready = start(folder, step, ranks)
        os.read(ready, 1)
        os.close(ready)
        time.sleep((moment + generator.random()) / count * seconds)
        for victim in processes if moment % 2 else [generator.choice(processes)]:
            os.kill(victim, signal.SIGKILL)
        codes = finish(processes)
        assert all(code in (0, 3, -signal.SIGKILL) for code in codes), codes
        lefts.append(left(folder, step))
        newest = check(folder)
        assert newest == (step if lefts[-1] == "published" else last), (newest, lefts[-1])
        last = newest
    return {"left": lefts, "seconds": seconds}


def kill_at_each_call(folder: Path, ranks: int) -> dict:
    """SIGKILL to rank 0 at its first, second, … call that opens, makes, renames or removes something."""
    lefts, at = [], 0
    assert finish(start(folder, 1, ranks)[0]) == [0] * ranks
    while True:
        at += 1
        calls = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal calls
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"):
                calls += 1
                if calls == at:  # noqa: B023
                    os.kill(os.getpid(), signal.SIGKILL)

        codes = finish(start(folder, 1, ranks, lambda rank: rank or sys.addaudithook(hook))[0])  # noqa: B023
        lefts.append(left(folder, 1))
        assert check(folder) == 1
        if codes == [0] * ranks:
            return {"left": lefts}


def save_with_little_room(folder: Path, ranks: int) -> dict:
    """The last rank's disk is full in mid-save, the others' are not."""
    totals, processes = meet(ranks), []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            if rank == ranks - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            with FailureWatch(folder.parent / "failures", rank, ranks):
                save(folder, 50, rank, ranks, totals[rank])
            os._exit(0)
        processes.append(process)
    return {"codes": finish(processes)}


if __name__ == "__main__":
    target, size, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if how == "random":
        result = kill_at_random(target, size, int(sys.argv[4]))
    elif how == "calls":
        result = kill_at_each_call(target, size)
    else:
        result = save_with_little_room(target, size)
        print(json.dumps(result | {"files": sorted(path.name for path in target.iterdir())}))
        sys.exit()
    assert finish(start(target, 99, size)[0]) == [0] * size and check(target) == 99  # and the next save tidies up
    print(json.dumps(result | {"hidden": [path.name for path in target.iterdir() if path.name.startswith(".")]}))
