"""metrics.jsonl, TensorBoard, run folder, console lines, health."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from shared_ops.errors import UserError
from shared_ops.monitor.health import loss_spikes, remarks
from shared_ops.monitor.history import TRAIN_KEYS, History, iter_rows, load_imbalance
from shared_ops.monitor.progress import Progress, TimeLeft, duration
from shared_ops.monitor.recorder import Recorder
from shared_ops.monitor.run_folder import RunFolder


def row(at, **changes):
    return {
        "step": at,
        "tokens": at * 1024,
        "loss": 5.0 - 0.01 * at,
        "aux_loss": 0.001,
        "mtp_loss": 5.5,
        "grad_norm": 1.234,
        "lr": 3e-4,
        "tokens_per_second": 1234.4,
        "step_seconds": 0.5,
        "expert_load": {"1": [0.5, 0.25, 0.25, 0.0]},
        "memory_bytes": 1 << 28,
        **changes,
    }


def record(folder, steps, total=400, console=None, **options):
    console = console or io.StringIO()
    with Recorder(
        folder, total, console=console, tensorboard=options.pop("tensorboard", False), **options
    ) as recorder:
        for step in steps:
            recorder.train(row(step))
    return console.getvalue()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, "run", "ms_train").create()


def lines(folder):
    return folder.metrics.read_text().splitlines()


def steps(folder):
    return [json.loads(line)["step"] for line in lines(folder)]


def test_rows_have_exactly_the_agreed_keys(folder):
    with Recorder(folder, 400, console=io.StringIO(), tensorboard=False) as recorder:
        recorder.train(
            row(10, loss=np.float32(4.5), step=np.int64(10), expert_load={3: np.array([0.75, 0.25])})
        )
        assert len(lines(folder)) == 1, "a row is on disk as soon as it is recorded"
        recorder.validation(10, 5.25)
        for bad in (row(20, extra=1), {k: v for k, v in row(20).items() if k != "lr"}):
            with pytest.raises(ValueError, match="extra|lr"):
                recorder.train(bad)
    first, second = map(json.loads, lines(folder))
    assert list(first) == [
        "step",
        "tokens",
        "loss",
        "aux_loss",
        "mtp_loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "step_seconds",
        "expert_load",
        "memory_bytes",
        "time",
    ]
    assert first["step"] == 10 and first["loss"] == 4.5 and first["expert_load"] == {"3": [0.75, 0.25]}
    assert list(second) == ["step", "val_loss", "time"] and second["val_loss"] == 5.25


def test_numbers_that_are_not_finite_are_valid_json_and_readable(folder):
    with Recorder(folder, 400, console=io.StringIO(), tensorboard=True) as recorder:
        recorder.train(
            row(1, loss=float("nan"), grad_norm=np.float32("inf"), aux_loss=-math.inf, mtp_loss=None)
        )
        recorder.validation(1, math.nan)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    raw = json.loads(lines(folder)[0], parse_constant=refuse)
    assert (raw["loss"], raw["grad_norm"], raw["aux_loss"], raw["mtp_loss"]) == ("nan", "inf", "-inf", None)
    train, validation = iter_rows(folder.metrics)
    assert math.isnan(train["loss"]) and train["grad_norm"] == math.inf and math.isnan(validation["val_loss"])


def test_resume_drops_later_rows_and_a_torn_line(folder):
    record(folder, range(1, 8))
    with open(folder.metrics, "a") as file:
        file.write('{"step": 5, "loss": 1.')
    told = record(folder, [6, 7], start_step=5, resumed=True)
    assert steps(folder) == [1, 2, 3, 4, 5, 6, 7]
    assert "dropped 3" in told
    assert [p.name for p in folder.path.iterdir()] == ["metrics.jsonl"]


def test_resume_keeps_a_whole_last_line_that_lacks_its_end(folder):
    record(folder, [1, 2])
    folder.metrics.write_text(folder.metrics.read_text().rstrip("\n"))
    record(folder, [3], start_step=2, resumed=True)
    assert steps(folder) == [1, 2, 3]


def test_resume_in_a_folder_without_metrics(folder):
    record(folder, [101], start_step=100, resumed=True)
    assert steps(folder) == [101]


def test_a_fresh_start_loses_nothing(folder):
    for start in range(3):
        told = record(folder, [start], tensorboard=True)
        assert ("set aside" in told) == (start > 0)
        (folder.checkpoints / f"step_0000000{start}").mkdir(parents=True)
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "checkpoints",
        "checkpoints.1",
        "checkpoints.2",
        "metrics.jsonl",
        "metrics.jsonl.1",
        "metrics.jsonl.2",
        "tb",
        "tb.1",
        "tb.2",
    ]
    assert json.loads((folder.path / "metrics.jsonl.1").read_text())["step"] == 0
    assert (folder.path / "checkpoints.2" / "step_00000001").is_dir() and steps(folder) == [2]


def test_resume_sets_an_abandoned_branch_of_checkpoints_aside(folder):
    for step in (100, 200, 300):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    record(folder, [], start_step=100, resumed=True)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step_00000100"]
    aside = folder.path / "checkpoints.1"
    assert sorted(p.name for p in aside.iterdir()) == ["step_00000200", "step_00000300"]


def test_tensorboard_holds_the_curves(folder):
    with Recorder(folder, 400, console=io.StringIO()) as recorder:
        recorder.train(row(10))
        recorder.validation(10, 5.25)
    content = b"".join(p.read_bytes() for p in folder.tensorboard.iterdir())
    for tag in (
        "train/loss",
        "train/aux_loss",
        "train/mtp_loss",
        "train/grad_norm",
        "train/lr",
        "train/tokens_per_second",
        "validation/loss",
        "expert_load/layer_1_max_over_mean",
    ):
        assert tag.encode() in content, tag


def test_config_and_facts(folder):
    folder.write_config("a: 1\n")
    folder.write_config("a: 2\n")
    folder.write_facts({"parameters": 5})
    assert folder.config.read_text() == "a: 2\n" and json.loads(folder.facts.read_text()) == {"parameters": 5}
    assert folder.path.parts[-2:] == ("run", "ms_train")
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.yaml", "run.json"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a\nb"])
def test_run_names_stay_inside_the_run_folder(tmp_path, name):
    with pytest.raises(UserError, match="run.name"):
        RunFolder(tmp_path, name, "ms_train")


def test_a_file_in_the_way_is_a_readable_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="run folder"):
        RunFolder(tmp_path, "run", "ms_train").create()


def test_lines_without_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich colour files
    stream = io.StringIO()
    progress = Progress(400, 0, stream)
    progress.train(row(30, step_seconds=60.0))
    progress.train(row(40, loss=5.12344))
    progress.validation(40, 5.2)
    progress.message("saved [bold]step_00000040[/bold]")
    progress.train(row(50, loss=math.nan, tokens_per_second=None))
    progress.close()
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines() == [
        "step   30/400  loss 4.7000  grad 1.23  lr 3.0e-04  1,234 tok/s  ETA -",
        "step   40/400  loss 5.1234  grad 1.23  lr 3.0e-04  1,234 tok/s  ETA 3m00s",
        "step   40/400  validation loss 5.2000",
        "saved [bold]step_00000040[/bold]",
        "step   50/400  loss nan  grad 1.23  lr 3.0e-04  - tok/s  ETA 2m55s",
    ]


def test_a_bar_on_a_terminal():
    stream = io.StringIO()
    progress = Progress(
        400, 0, Console(file=stream, force_terminal=True, width=110, _environ={"TERM": "xterm"})
    )
    progress.train(row(30))
    progress.train(row(40))
    progress.message("a [red]message")
    progress.close()
    assert "\x1b[" in stream.getvalue() and "40/400" in stream.getvalue()
    assert "loss 4.6000" in stream.getvalue() and "a [red]message" in stream.getvalue()
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l"), (
        "the cursor is shown again"
    )


def test_time_left_forgets_the_step_that_compiled():
    left = TimeLeft(100)
    assert left.update(1, 90.0) is None
    assert left.update(2, 1.0) == pytest.approx(98)
    assert left.update(3, 2.0) == pytest.approx(97 * 1.1)
    assert left.update(4, math.nan) is None and left.update(100, 1.0) == 0


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.6, "1m00s"), (151, "2m31s"), (3725, "1h02m"), (273600, "3d04h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def history(losses, **columns):
    return History(
        {**row(i + 1), "loss": loss, **{k: v[i] for k, v in columns.items()}} for i, loss in enumerate(losses)
    )


def texts(found):
    return " ".join(f"{remark.level}: {remark.text}" for remark in found)


def test_health_of_a_good_run():
    rng = np.random.default_rng(0)
    losses = 5 * np.exp(-np.arange(200) / 50) + 2 + rng.normal(size=200) * 0.05
    even = [{"1": list(rng.dirichlet(np.full(8, 50)))} for _ in losses]
    assert [r.level for r in remarks(history(losses, expert_load=even))] == ["good"]


def test_health_names_what_is_wrong():
    losses = [5 - 0.01 * i for i in range(100)]
    losses[40], losses[60] = math.nan, 9.0
    found = texts(
        remarks(
            history(
                losses,
                grad_norm=[math.inf if i == 40 else 1.0 for i in range(100)],
                expert_load=[{"1": [0.25] * 4, "7": [0.0, 0.9, 0.05, 0.05]}] * 100,
            )
        )
    )
    assert (
        "bad: loss is not finite at step 41." in found and "bad: grad_norm is not finite at step 41." in found
    )
    assert "warn: The loss jumps up at step 61." in found
    assert "in 1 of 2 MoE layers" in found and "in layer 7, expert 1 gets 3.6 times the mean" in found
    assert "in layer 7, 1 of 4 (0)" in found


def test_health_of_runs_that_do_not_learn_or_hold_nothing():
    assert "did not fall" in texts(remarks(history([5.0] * 50)))
    assert texts(remarks(History())) == "bad: No training step was logged."
    rows = [row(1), *({"step": s, "val_loss": v, "time": 0.0} for s, v in ((10, 4.0), (20, 5.0))), None]
    found = texts(remarks(History(rows)))
    assert "rose from its best, 4.0000 at step 10, to 5.0000" in found and "1 line(s)" in found


def test_a_level_that_lasts_is_no_spike_for_ever():
    losses = [3.0] * 30 + [5.0] * 60
    spikes = loss_spikes(list(range(1, 91)), losses)
    assert spikes and spikes[0] == 31 and len(spikes) <= 10


def test_imbalance():
    assert load_imbalance([0.25] * 4) == 1 and load_imbalance([1, 0, 0, 0]) == 4
    assert math.isnan(load_imbalance([0, 0])) and math.isnan(load_imbalance([]))


def test_layers_that_come_and_go_keep_their_place():
    made = History([row(1), row(2, expert_load={}), row(3, expert_load={"2": [1.0, 0.0]})])
    assert made.imbalance["1"][0] == 2 and made.imbalance["2"][2] == 2
    assert [len(c) for c in made.imbalance.values()] == [3, 3]


def test_summary(folder):
    with Recorder(folder, 40, console=io.StringIO(), tensorboard=False) as recorder:
        assert "No training step" in recorder.summary()
        for step in range(1, 41):
            recorder.train(row(step, expert_load={}, loss=math.nan if step == 7 else 5 - 0.1 * step))
        recorder.validation(20, 3.5)
        recorder.validation(40, 1.5)
        text = recorder.summary()
    assert "step 40: 40,960 tokens, loss 4.9000 -> 1.0000" in text
    assert "validation loss 1.5000 (best 1.5000 at step 40)" in text and "not finite at step 7" in text


def test_the_train_keys_are_the_documented_ones():
    assert set(TRAIN_KEYS) == {*row(1), "time"}
