"""report.html: complete, offline, escaped, from any metrics file a run can leave."""

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shared_ops.errors import UserError
from shared_ops.monitor.history import encode_number
from shared_ops.monitor.report import MAX_POINTS, _thinned, write_report

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
run: {name: "%s"}
model: {model_type: deepseek_v3, num_hidden_layers: 4, n_routed_experts: 12, num_experts_per_tok: 3}
train: {steps: 40, global_batch_size: 8}
"""


class Page(HTMLParser):
    """The text outside of script and style, and all tags."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.scripts, self._raw = [], [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else self._raw

    def handle_endtag(self, tag):
        self._raw = None if tag == self._raw else self._raw

    def handle_data(self, data):
        (self.scripts if self._raw == "script" else self.text).append(data)

    @property
    def charts(self):
        """The data of every chart, as the page's scripts hold it."""
        return [
            json.loads(call.group(1))
            for script in self.scripts[1:]
            for call in re.finditer(r'Plotly\.newPlot\(\s*"chart-\d+",\s*(\[.*?\]),\s*\{"', script, re.S)
        ]


def run_folder(path, rows, config=CONFIG % "run", twin="ms_train"):
    folder = path / twin
    folder.mkdir(parents=True)
    if config:
        (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(step, loss=None, layers=(1, 2), **changes):
    return {
        "step": step,
        "tokens": step * 64,
        "loss": encode_number(5 - 0.05 * step if loss is None else loss),
        "aux_loss": 0.01,
        "mtp_loss": 5.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 900.0,
        "step_seconds": 0.1,
        "expert_load": {str(k): [1 / 12] * 12 for k in layers},
        "memory_bytes": 1 << 27,
        "time": 1e9 + step,
        **changes,
    }


def test_a_report_has_everything_and_needs_no_network(tmp_path):
    rows = [row(step) for step in range(1, 41)] + [{"step": 40, "val_loss": 3.25, "time": 1e9 + 41}]
    folder = run_folder(tmp_path / "run", rows)
    (folder / "run.json").write_text(
        json.dumps({"parameters": 12345678, "unigram_entropy": 6.125, "ranks": 2})
    )
    page = Page(write_report(folder).read_text())
    text = " ".join(page.text)
    for expected in (
        "deepseek_v3",
        "12,345,678",
        "3.0000",
        "3.2500",
        "6.1250",
        "2,560",
        "Losses are finite",
        "Gradient norm",
        "Learning rate",
        "Throughput",
        "Expert load at step 40",
    ):
        assert expected in text, expected
    assert not [
        attrs
        for tag, attrs in page.tags
        if tag in ("script", "link", "img") and ("src" in attrs or "href" in attrs)
    ]
    traces = [trace for chart in page.charts for trace in chart]
    names = {trace.get("name") for trace in traces}
    assert {
        "training",
        "validation",
        "multi-token prediction",
        "unigram entropy",
        "layer 1",
        "layer 2",
    } <= names
    heat = [trace for trace in traces if trace["type"] == "heatmap"]
    assert len(heat) == 1 and len(heat[0]["z"]) == 2 and heat[0]["z"][0] == pytest.approx([1.0] * 12)
    assert 'showSendToCloud": false' in page.scripts[-1], "nothing of a run leaves by a button"


def test_the_data_manifest_s_entropy_comes_first(tmp_path):
    folder = run_folder(tmp_path / "run", [row(1), row(2)])
    assert "7.5000 nats" in write_report(folder, {"unigram_entropy": 7.5}).read_text()


def test_losses_that_are_not_finite_are_gaps_and_remarks(tmp_path):
    rows = [row(1), row(2, math.nan), row(3, math.inf), row(4), {"step": 4, "val_loss": "nan", "time": 0}]
    page = Page(write_report(run_folder(tmp_path / "run", rows)).read_text())
    training = next(trace for trace in page.charts[0] if trace["name"] == "training")
    assert training["y"] == [4.95, None, None, 4.8]
    assert "loss is not finite at steps 2, 3." in " ".join(page.text)


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "</title><img src=x onerror=alert(1)>", "{{ 7*7 }}"]
)
def test_hostile_names_are_text(tmp_path, hostile):
    clean = run_folder(tmp_path / "clean", [row(1), row(2)])
    scripts = sum(tag == "script" for tag, _ in Page(write_report(clean).read_text()).tags)
    folder = run_folder(
        tmp_path / hostile.replace("/", "_"),
        [row(1, layers=(hostile,)), row(2, layers=(hostile,))],
        CONFIG % hostile,
    )
    (folder / "run.json").write_text(json.dumps({"device": hostile, "parameters": hostile}))
    page = Page(write_report(folder).read_text())
    assert sum(tag == "script" for tag, _ in page.tags) == scripts
    assert not any(tag == "img" for tag, _ in page.tags)
    assert page.text.count(hostile) >= 3, "the title, the heading and the device, as they are"


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([], "No training step was logged."),
        ([{"step": 3, "val_loss": 2.0, "time": 1.0}], "No training step was logged."),
        ([row(1)], "from 4.9500 at step 1"),
        ([row(1, layers=()), row(2, layers=())], "Losses are finite"),
        ([row(1, grad_norm=None, mtp_loss=None, memory_bytes=None)], "4.9500"),
    ],
)
def test_short_and_sparse_runs(tmp_path, rows, expected):
    assert expected in " ".join(
        Page(write_report(run_folder(tmp_path / "run", rows, config=None)).read_text()).text
    )


def test_a_torn_line_and_a_damaged_one(tmp_path):
    folder = run_folder(tmp_path / "run", [row(1)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('garbage\n{"step": 2, "lo')
    assert "1 line(s) of metrics.jsonl" in write_report(folder).read_text()


def test_long_curves_keep_their_peaks_and_gaps():
    y = [1.0] * 50_000
    y[12_345], y[23_456], y[34_567] = 9.0, -9.0, math.nan
    xs, ys = _thinned(range(50_000), y)
    assert len(xs) <= MAX_POINTS and xs == sorted(xs)
    assert 9.0 in ys and -9.0 in ys and any(math.isnan(v) for v in ys)
    assert _thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_bad_files_are_named(tmp_path):
    folder = run_folder(tmp_path / "run", [row(1)])
    (folder / "run.json").write_text("{")
    with pytest.raises(UserError, match="run.json"):
        write_report(folder)
    with pytest.raises(UserError, match="ms_train"):
        write_report(tmp_path / "run")


def test_command_line(tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "shared_ops.monitor", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    folder = run_folder(tmp_path / "run", [row(1)])
    done = command("report", folder)
    assert done.returncode == 0 and Path(done.stdout.strip()) == folder / "report.html"
    assert (folder / "report.html").stat().st_size > 1_000_000
    bad = command("report", tmp_path)
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and "metrics.jsonl" in bad.stderr
    assert command("nonsense").returncode == 2 and "RUN_FOLDER" in command("report", "--help").stdout
