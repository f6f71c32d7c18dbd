"""What only whole processes show: failing ranks, stale failures, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared_ops.monitor.failure import FailureWatch, process_start_time
from shared_ops.monitor.interrupt import SAME_SECONDS, Interrupt

REPOSITORY = Path(__file__).parents[2]

# Like a collective that never completes: native code, without the interpreter's lock, deaf to signals.
HANG = """
import ctypes
def hang():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

RANK = (
    HANG
    + """
import os, sys, time
from shared_ops.errors import UserError
from shared_ops.monitor.failure import FailureWatch
folder, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with FailureWatch(folder, rank, 2):
    print("ready", flush=True)
    if what == "stuck":
        hang()
    time.sleep(0.2)
    if what == "user":
        raise UserError("data.path is missing")
    if what == "bug":
        raise ValueError("shapes differ")
    if what == "exit":
        sys.exit(3)
    time.sleep(float(what))
"""
)


# The same with less patience, where the times themselves are not the matter.
QUICK = RANK.replace(
    "folder, rank",
    "import shared_ops.monitor.failure as f; f.POLL_SECONDS, f.LINGER_SECONDS = 0.1, 0.4\nfolder, rank",
    1,
)


def start(code, *arguments, **environment):
    names = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MS_", "MASTER_", "TORCHELASTIC"))
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        text=True,
        env={**names, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ends(process, seconds=10):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, err


CASES = [
    (0, "user", 2, "data.path is missing"),
    (1, "user", 2, "data.path is missing"),
    (1, "bug", 1, "shapes differ"),
    (0, "exit", 3, "left with exit code 3"),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs of all cases, run side by side: (seconds, [(exit code, stderr) of both ranks]) of each."""
    begin, running, ended = time.monotonic(), {}, {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("failures")
        running[case] = [
            start(RANK, folder, rank, case[1] if rank == case[0] else "stuck") for rank in (0, 1)
        ]
    for case, ranks in running.items():
        ended[case] = [ends(rank, 30) for rank in ranks]
    return time.monotonic() - begin, ended


@pytest.mark.parametrize("case", CASES)
def test_a_failing_rank_ends_the_stuck_one(jobs, case):
    seconds, ended = jobs
    failing, what, code, text = case
    (code0, err0), (code1, _) = ended[case]
    assert (code0, code1) == (code, code) and seconds < 15
    assert f"rank {failing}: " in err0 and text in err0, "rank 0's console tells what failed and where"
    assert ("Traceback" in err0) == (what == "bug")


def test_a_broken_collective_does_not_hide_its_cause(tmp_path):
    """Rank 0's collective breaks because rank 1 left: rank 0 prints the cause and takes its code."""
    victim = QUICK.replace(
        "time.sleep(0.2)", "while not os.path.exists(folder + '/rank_00001.json'): time.sleep(0.01)"
    )
    ranks = [start(victim, tmp_path, 0, "bug"), start(QUICK, tmp_path, 1, "user")]
    (code0, err0), (code1, _) = map(ends, ranks)
    assert (code0, code1) == (2, 2)
    assert err0.count("error: rank 1: data.path is missing") == 1
    assert "stopped after that: ValueError" in err0 and "Traceback" not in err0


def test_a_rank_that_fails_before_the_other_one_watches(tmp_path):
    first = start(QUICK.replace("with Fail", "time.sleep(0.8)\nwith Fail"), tmp_path, 0, "stuck")
    second = start(QUICK, tmp_path, 1, "user")
    assert ends(second)[0] == 2 and ends(first)[0] == 2


def test_failures_of_a_former_or_another_job_end_nothing(tmp_path):
    assert ends(start(QUICK, tmp_path, 1, "bug"))[0] == 1
    left = json.loads((tmp_path / "rank_00001.json").read_text())
    ranks = [start(QUICK, tmp_path, rank, 0.9) for rank in (0, 1)]
    # A job at another address that fails meanwhile, and files that are something else.
    (tmp_path / "rank_00007.json").write_text(
        json.dumps({**left, "rank": 7, "job": "MASTER_PORT=1", "time": time.time()})
    )
    (tmp_path / "rank_00008.json").write_text("[]")
    assert [ends(rank)[0] for rank in ranks] == [0, 0]
    assert not (tmp_path / "rank_00001.json").exists(), "rank 0 tidies up"


def test_a_scheduler_that_holds_the_interpreter_s_lock_ends_too(tmp_path):
    scheduler = start(
        """
import ctypes, sys
from shared_ops.monitor.failure import SCHEDULER, FailureWatch
FailureWatch(sys.argv[1], SCHEDULER, 2)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
""",
        tmp_path,
    )
    assert ends(start(QUICK, tmp_path, 1, "user"))[0] == 2
    assert ends(scheduler, 15)[0] == -signal.SIGKILL


def test_one_rank_alone_is_left_to_the_caller(tmp_path):
    with pytest.raises(ValueError), FailureWatch(tmp_path / "failures", 0, 1):
        raise ValueError
    assert not (tmp_path / "failures").exists()


def test_process_start_time():
    code = """
import time; time.sleep(0.5)
from shared_ops.monitor.failure import process_start_time
print(process_start_time())
"""
    before = time.time()
    process = start(code)
    out, _ = process.communicate(timeout=30)
    assert before - 0.05 < float(out) < before + 0.4
    assert abs(process_start_time() - process_start_time()) < 0.05


LOOP = """
import os, sys, time
from shared_ops.monitor.interrupt import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt.requested or sys.argv[1] == "stubborn":
        time.sleep(0.02)
print("saved", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number):
    process = start(LOOP, "polite")
    process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0 and out == "saved\n" and "again" in err

    process = start(LOOP, "stubborn")
    process.stdout.readline()
    for pause in (0.2, SAME_SECONDS + 0.3, 0.2):  # the second comes with the first, as from a launcher; the third counts
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(pause)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 128 + number and out == "" and "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_end_a_process_that_never_returns_to_python(number):
    process = start(
        HANG
        + """
from shared_ops.monitor.interrupt import Interrupt
with Interrupt():
    print("ready", flush=True)
    hang()
"""
    )
    process.stdout.readline()
    for pause in (0.2, SAME_SECONDS + 0.3):
        time.sleep(pause)
        process.send_signal(number)
    assert ends(process, 5)[0] == 128 + number


def test_a_step_that_does_not_end_is_left():
    process = start(
        HANG
        + """
from shared_ops.monitor.interrupt import Interrupt
with Interrupt(patience=0.3):
    print("ready", flush=True)
    hang()
"""
    )
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    code, message = ends(process, 5)
    assert code == 128 + signal.SIGTERM and "leaving without saving" in message


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupt(announce=False) as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert interrupt.requested
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1
