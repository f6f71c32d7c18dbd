"""Conversions that are cut short: nothing half written gets the destination's name, and a second run goes on.

Ctrl-C ends every command in a line.
"""

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Stop, canonical_values, cut_short, hub_folder, hub_values, read_hub, small

from shared_ops.errors import UserError, run_cli
from weight_sync import __main__ as weight_sync
from weight_sync.conversion import convert
from weight_sync.plan import Options
from weight_sync.stores.atomic import JOURNAL


def run(source: Path, destination: Path, to: str, **options) -> dict:
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **options))


def command(source: Path, destination: Path, to: str, *more) -> list[str]:
    return [
        sys.executable,
        "-m",
        "weight_sync",
        "convert",
        *map(str, (source, destination)),
        "--to",
        to,
        "--quiet",
        *more,
    ]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 30 MB, so that there is time to kill."""
    config = small("tiny_v3", vocab_size=30_000, hidden_size=120)
    hub = hub_values(config, canonical_values(config, dtype=np.float32))
    return hub_folder(tmp_path_factory.mktemp("large") / "in", config, hub, 2)


@pytest.mark.parametrize("to", ["hf", "torch", "mindspore", "hdf5", "onnx"])
def test_a_second_run_goes_on(v3, tmp_path, monkeypatch, to):
    with monkeypatch.context() as patch:
        cut_short(patch, 40)
        with pytest.raises(Stop):
            run(v3, tmp_path / "out", to, workers=1, max_file=100_000)
    assert not (tmp_path / "out").exists()
    report = run(v3, tmp_path / "out", to, max_file=100_000, verify=True)
    assert report["notes"] == ["went on from an interrupted run that had written 40 tensors"]
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(v3) and not list(tmp_path.glob(".*"))


def test_what_the_journal_says_is_not_trusted(v3, tmp_path, monkeypatch):
    """The second tensor's bytes never reached the disk; the journal's last line was torn."""
    with monkeypatch.context() as patch:
        cut_short(patch, 10)
        with pytest.raises(Stop):
            run(v3, tmp_path / "out", "hdf5", workers=1)
    partial = tmp_path / ".out.partial"
    with open(partial / JOURNAL, "ab") as file:
        file.write(b'{"tensor": "model.norm.weight", "fac')
    second = json.loads((partial / JOURNAL).read_text().split("\n")[3])["tensor"]
    import h5py

    with h5py.File(partial / "model.h5") as file:
        offset = file[second].id.get_offset()
    with open(partial / "model.h5", "r+b") as file:
        file.seek(offset)
        file.write(bytes(16))
    assert run(v3, tmp_path / "out", "hdf5")["notes"][0].endswith("written 9 tensors")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(v3)


def test_a_truncated_file_is_laid_out_anew(v3, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        cut_short(patch, 10)
        with pytest.raises(Stop):
            run(v3, tmp_path / "out", "mindspore", workers=1)
    os.truncate(tmp_path / ".out.partial" / "model.ckpt", 1000)
    run(v3, tmp_path / "out", "mindspore")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(v3)


@pytest.mark.parametrize("what", ["options", "source"])
def test_another_conversion_does_not_go_on(v3, tmp_path, monkeypatch, what):
    source = Path(shutil.copytree(v3, tmp_path / "in"))
    with monkeypatch.context() as patch:
        cut_short(patch, 10)
        with pytest.raises(Stop):
            run(source, tmp_path / "out", "hdf5", workers=1)
    if what == "source":
        os.utime(source / "model-00001-of-00003.safetensors")
    report = run(source, tmp_path / "out", "hdf5", dtype="fp32" if what == "options" else None, verify=True)
    assert report["notes"] == []


def test_killed_at_random_moments(large, tmp_path):
    """SIGKILL when the journal has reached a random length, again and again: some seconds, a process each time."""
    target, generator = tmp_path / "out", np.random.default_rng(7)
    journal = tmp_path / ".out.partial" / JOURNAL
    kills = 0
    for _ in range(6):
        process = subprocess.Popen(command(large, target, "hdf5"), stdout=subprocess.DEVNULL)
        length = generator.uniform(0.05, 0.9) * 100_000  # it ends with about that many bytes
        while process.poll() is None:
            if journal.exists() and journal.stat().st_size > length:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
            time.sleep(0.001)
        if target.exists():
            break
    if not target.exists():
        subprocess.run(command(large, target, "hdf5"), check=True, capture_output=True)
    assert kills
    run(target, tmp_path / "back", "hf", verify=True)
    assert read_hub(tmp_path / "back") == read_hub(large)


def test_interrupted_by_the_keyboard(large, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(large), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors and "same command" in errors, errors
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").exists()
    assert run(large, tmp_path / "out", "hdf5")["notes"]


SLOW = """
import sys, time
from shared_ops.errors import run_cli
from weight_sync import __main__
from weight_sync.stores import atomic
record = atomic.Partial.record_tensor
def slow(self, name, facts):
    record(self, name, facts)
    print(name, flush=True)
    time.sleep(0.2)
atomic.Partial.record_tensor = slow
sys.exit(run_cli(__main__.main, ["convert", sys.argv[1], sys.argv[2], "--to", "hdf5", "--quiet"]))
"""


@pytest.mark.parametrize("name", weight_sync.COMMANDS)
def test_every_command_ends_in_a_line(name, monkeypatch, capfd):
    """Also where the interrupt comes as another exception, as out of an extension that was being imported."""
    module, raised = importlib.import_module(f"weight_sync.{name}"), []

    def interrupted(argv):
        raise raised[-1] from raised[0]

    monkeypatch.setattr(module, "main", interrupted)
    for error in (KeyboardInterrupt(), SystemError()):
        raised.append(error)
        assert run_cli(weight_sync.main, [name]) == 130
        assert tuple(capfd.readouterr()) == ("", "interrupted\n")
    raised[:] = [ValueError(), SystemError()]
    with pytest.raises(SystemError):
        weight_sync.main([name])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_interrupted_by_the_keyboard(large, tmp_path, number):
    """While its threads look for arrangements, for minutes more if nothing stops them; MindSpore passes SIGTERM on."""
    config = small("tiny_v3", vocab_size=30_000, hidden_size=120)
    port = hub_folder(tmp_path / "port", config, hub_values(config, canonical_values(config, dtype=np.float32, seed=9)))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_DIFF, str(large), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.stdout.readline() not in ("model.embed_tokens.weight\n", ""):
        pass
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")


SLOW_DIFF = """
import runpy, sys, time
from weight_sync.differences import fingerprints
read = fingerprints.read
def slow(tensor, start, stop):
    print(tensor.name, flush=True)
    time.sleep(0.5)
    return read(tensor, start, stop)
fingerprints.read = slow
sys.argv[1:] = ["diff", sys.argv[1], sys.argv[2], "--max-memory", "4MB", "--quiet"]
runpy.run_module("weight_sync", run_name="__main__")
"""


def test_two_at_once(v3, tmp_path, monkeypatch):
    from weight_sync.stores.atomic import Partial

    first = Partial(tmp_path / "out", {"a": 1}, False, lambda folder: True)
    with first, pytest.raises(UserError, match="another conversion is writing it"):
        run(v3, tmp_path / "out", "hdf5")


def test_a_full_disk(large, tmp_path):
    """A limit on file sizes stands for the disk; the message says what to do, and it then works."""
    limit = lambda: (  # noqa: E731
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000)),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    done = subprocess.run(
        command(large, tmp_path / "out", "hdf5"), capture_output=True, text=True, preexec_fn=limit, timeout=60
    )
    assert done.returncode == 2 and "no room left" in done.stderr and "Traceback" not in done.stderr, done
    assert not (tmp_path / "out").exists()
    run(large, tmp_path / "out", "hdf5")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(large, v3, tmp_path):
    """A file system of 10 MB: what was there stays as it was."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no mount here")
    try:
        run(v3, disk / "out", "hdf5")
        before = (disk / "out" / "model.h5").read_bytes()
        done = subprocess.run(command(large, disk / "out", "hdf5", "--overwrite"), capture_output=True, text=True)
        assert done.returncode == 2 and "no room" in done.stderr and "Traceback" not in done.stderr, done
        assert (disk / "out" / "model.h5").read_bytes() == before and not (disk / ".out.partial").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_replacement_cut_short_between_its_renames(v3, tmp_path):
    run(v3, tmp_path / "out", "hdf5")
    os.rename(tmp_path / "out", tmp_path / ".out.replaced")
    with pytest.raises(UserError, match="there already"):
        run(v3, tmp_path / "out", "torch")
    assert (tmp_path / "out" / "model.h5").exists()
