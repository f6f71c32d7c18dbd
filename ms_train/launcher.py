"""What msrun does not do for its processes: a clean stop, a quick end, and no orphans.

msrun answers Ctrl-C by SIGKILL to its workers at once, and after a worker's failure it waits half a minute for its
scheduler. So each process that msrun starts forks, before mindspore is imported: msrun knows the parent, the child
does the work in a session of its own. A child whose parent is killed gets SIGTERM from the kernel, which the training
loop answers by saving; the scheduler's parent ends the scheduler as soon as no worker of this machine is left.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.2
LINGER_SECONDS = 1.5  # rank 0 shows another rank's end before msrun ends rank 0
_PR_SET_PDEATHSIG = 1
_console: list[tuple[int, int]] = []  # in rank 0: msrun's standard output, and the parent whose end tells of msrun's


def role() -> str | None:
    """MS_WORKER or MS_SCHED under msrun, else None."""
    return os.environ.get("MS_ROLE")


def enter(on_death: Callable[[str], None]) -> None:
    """Fork as this process's role asks; returns in the process that does the work. Alone it does nothing.

    `on_death(how)` is called in a worker's parent when the worker was ended by a signal: nobody else can tell.
    """
    if role() == "MS_WORKER":
        _worker(on_death)
    elif role() == "MS_SCHED":
        _scheduler()


def take_console() -> None:
    """If msrun is gone, and with it the tail of this rank's log: print to the console that msrun had."""
    for console, parent in _console:
        if os.getppid() != parent:
            os.dup2(console, 1)
            os.dup2(console, 2)


def leave() -> None:
    """End a worker whose work is done at once: mindspore's own shutdown on CPU takes six to ten seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    if role() is not None:
        os._exit(0)


def _worker(on_death: Callable[[str], None]) -> None:
    launcher, parent = os.getppid(), os.getpid()
    console = _console_of(launcher)
    child = os.fork()
    if child == 0:
        os.setsid()
        _signal_when_parent_dies(signal.SIGTERM, parent)
        if console is not None:
            _console.append((console, parent))
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    _signal_when_parent_dies(signal.SIGTERM, launcher)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        on_death(f"ended by signal {-code} ({signal.Signals(-code).name})")
        time.sleep(LINGER_SECONDS)
    os._exit(code if code >= 0 else 128 - code)


def _scheduler() -> None:
    launcher, parent = os.getppid(), os.getpid()
    child = os.fork()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C reaches it, and workers still need it
    if child == 0:
        _signal_when_parent_dies(signal.SIGKILL, parent)
        return
    seen = False
    while True:
        time.sleep(POLL_SECONDS)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            os._exit(os.waitstatus_to_exitcode(status) & 255)
        alive = _has_workers(launcher)
        seen = seen or alive
        if os.getppid() != launcher or (seen and not alive):
            os.kill(child, signal.SIGKILL)
            os._exit(0)


def _signal_when_parent_dies(number: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), number)


def _console_of(launcher: int) -> int | None:
    """msrun's standard output, for rank 0 to write to once msrun and its tail of the log are gone."""
    if os.environ.get("RANK_ID", "0") != "0":
        return None
    try:
        return os.open(f"/proc/{launcher}/fd/1", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return None


def _has_workers(launcher: int) -> bool:
    """Whether msrun has a live child that is a worker."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == launcher and state != "Z" and b"MS_ROLE=MS_WORKER" in (folder / "environ").read_bytes():
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False
