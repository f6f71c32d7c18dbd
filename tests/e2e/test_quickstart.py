"""README's first command, shortened: what a newcomer sees and finds. It prepares real text and compiles: 40 s."""

import json
import re
import subprocess

import jobs
import pytest
import yaml

from shared_ops.config import RunConfig
from shared_ops.training_state import read_step

MSRUN_ITSELF = ("Start scheduler process", "Start worker process", "mindspore/parallel/cluster/")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    line = [*jobs.command("ms_train", 2, folder), f"run.dir={folder}", f"data.cache_dir={folder / 'data'}",
            "train.steps=12", "train.log_steps=4", "train.validate_steps=6", "train.validation_sequences=8",
            "optim.warmup_steps=4"]  # fmt: skip
    process = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, cwd=folder)
    assert process.returncode == 0, process.stdout
    return folder, process.stdout


def test_the_console_is_clean(quickstart):
    """Every line that is not msrun's own is ours: no framework warnings, nothing of other ranks, no escape codes."""
    folder, console = quickstart
    assert "\x1b" not in console and "\r" not in console
    ours = [line for line in console.splitlines() if line and not any(own in line for own in MSRUN_ITSELF)]
    assert not [line for line in ours if "WARNING" in line or "Warning" in line or line.startswith("[")]
    steps = [line for line in ours if line.startswith("step ") and "tok/s" in line]
    assert [re.split(r"[ /]+", line)[1] for line in steps] == ["1", "4", "8", "12"]
    assert all(re.search(r"loss \d+\.\d+ .*tok/s .*ETA", line) for line in steps)
    assert sum("unigram entropy" in line for line in ours) == 3  # at the start, and beside the two final losses
    (worker,) = (folder / "msrun").glob("worker_1.log")
    assert worker.read_text() == ""


def test_what_a_run_leaves(quickstart):
    folder, console = quickstart
    run = folder / "quickstart" / "ms_train"
    resolved = RunConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    assert resolved.train.steps == 12 and resolved.model.n_routed_experts == 16
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train, validation = [r for r in rows if "loss" in r], [r for r in rows if "val_loss" in r]
    assert [r["step"] for r in train] == [1, 4, 8, 12] and [r["step"] for r in validation] == [6, 12]
    keys = {"step", "tokens", "loss", "aux_loss", "mtp_loss", "grad_norm", "lr", "tokens_per_second", "step_seconds",
            "expert_load", "memory_bytes", "time"}  # fmt: skip
    assert all(set(r) == keys for r in train)
    assert train[-1]["tokens"] == 12 * 8 * 256 and train[-1]["loss"] < train[0]["loss"]
    assert set(train[-1]["expert_load"]) == {"1", "2", "3", "4"}
    assert all(sum(load) == pytest.approx(1, abs=1e-4) for load in train[-1]["expert_load"].values())
    assert list((run / "tb").glob("events.*"))
    report = (run / "report.html").read_text()
    assert all(word in report for word in ("unigram", "Gradient norm", "Learning rate", "Expert load")), "report"
    meta, state = read_step(run / "checkpoints" / "step_00000012")
    with state:
        assert meta["consumed_samples"] == 96
    for path in (run / "report.html", run / "metrics.jsonl", run / "checkpoints" / "step_00000012"):
        assert str(path) in console
