"""One HTML file that tells how a run went: numbers, curves, expert load, remarks. It needs no network."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from shared_ops.errors import UserError
from shared_ops.files import write_atomically
from shared_ops.monitor.health import remarks
from shared_ops.monitor.history import History
from shared_ops.monitor.page import PAGE
from shared_ops.monitor.progress import duration
from shared_ops.monitor.run_folder import TWINS

MAX_POINTS = 3000  # per curve; beyond it, only the lowest and highest of neighbouring points are drawn
# Its own buttons include one that uploads the data to a server.
CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtons": [["toImage", "resetScale2d"]],
}
BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#059669", "#64748b"
LAYER_COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")


def write_report(run_folder: str | Path, data_manifest: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a run folder (`<run.dir>/<run.name>/<twin>`) from its metrics.jsonl.

    config.yaml and run.json are used where they are. `data_manifest` may hold `unigram_entropy` (nats per
    token), what a model that knows only token frequencies would reach; it goes before run.json's.
    `UserError` for a folder without metrics.
    """
    folder = Path(run_folder)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        inside = [str(folder / twin) for twin in TWINS if (folder / twin / "metrics.jsonl").is_file()]
        raise UserError(
            f"{folder}: no metrics.jsonl there; expected the folder of one run and one twin, such as "
            + (" or ".join(inside) if inside else "runs/quickstart/ms_train")
        )
    history = History.read(metrics)
    facts = {**_mapping(folder / "run.json"), **(data_manifest or {})}
    entropy = _positive(facts.get("unigram_entropy"))
    config = _mapping(folder / "config.yaml")
    charts = _charts(history, entropy)
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    absolute = folder.absolute()
    html = page.render(
        name=_section(config, "run").get("name") or absolute.parent.name,
        twin=absolute.name,
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        plotly_js=Markup(get_plotlyjs()),
        tiles=_tiles(history, entropy),
        remarks=remarks(history),
        charts=charts,
        table=_table(config, facts, history, entropy),
        folder=str(absolute),
    )
    path = folder / "report.html"
    write_atomically(path, html)
    return path


# --- numbers ------------------------------------------------------------------------------------------------


def _tiles(history: History, entropy: float | None) -> list[tuple[str, str, str]]:
    """(title, value, small print) of the figures at the top."""
    last, tiles = history.last, []
    if last:
        first = history.train["loss"][0]
        tiles.append(
            (
                "Training loss",
                _fixed(last["loss"]),
                f"from {_fixed(first)} at step {int(history.train['step'][0])}",
            )
        )
    if history.validation["step"]:
        value = history.validation["val_loss"][-1]
        small = f"perplexity {math.exp(value):,.1f}" if math.isfinite(value) and value < 50 else ""
        tiles.append(
            (
                "Validation loss",
                _fixed(value),
                f"{small} at step {int(history.validation['step'][-1])}".strip(),
            )
        )
    if entropy is not None:
        tiles.append(("Unigram entropy", _fixed(entropy), "what token frequencies alone reach"))
    if last:
        tiles.append(("Steps", f"{int(last['step']):,}", f"{_count(last['tokens'])} tokens"))
        rates = sorted(v for v in history.train["tokens_per_second"] if math.isfinite(v))
        if rates:
            tiles.append(("Tokens per second", f"{rates[len(rates) // 2]:,.0f}", "median"))
        memory = [v for v in history.train["memory_bytes"] if math.isfinite(v)]
        if memory and max(memory) > 0:
            tiles.append(("Memory", _bytes(max(memory)), "highest logged"))
    return tiles


def _table(
    config: Mapping[str, Any], facts: Mapping[str, Any], history: History, entropy: float | None
) -> list[tuple[str, str]]:
    """(what, value) rows of the summary."""
    model, train, optim = (_section(config, key) for key in ("model", "train", "optim"))
    rows: list[tuple[str, Any]] = [("Model", model.get("model_type") or config.get("model"))]
    if model:
        rows.append(
            (
                "Layers",
                _joined(
                    ("{} in all", model.get("num_hidden_layers")),
                    ("{} dense", model.get("first_k_dense_replace")),
                    ("{} for multi-token prediction", model.get("num_nextn_predict_layers")),
                ),
            )
        )
        rows.append(
            (
                "Width",
                _joined(
                    ("hidden {}", model.get("hidden_size")),
                    ("{} heads", model.get("num_attention_heads")),
                    ("vocabulary {}", model.get("vocab_size")),
                ),
            )
        )
        rows.append(
            (
                "Experts",
                _joined(
                    ("{} routed", model.get("n_routed_experts")),
                    ("{} per token", model.get("num_experts_per_tok")),
                    ("{} shared", model.get("n_shared_experts")),
                ),
            )
        )
    parameters = facts.get("parameters", config.get("parameters"))
    rows.append(
        (
            "Parameters",
            f"{_count(parameters)} ({parameters:,})" if isinstance(parameters, int) else parameters,
        )
    )
    rows.append(
        (
            "Batch",
            _joined(
                ("{} sequences", train.get("global_batch_size")),
                ("{} tokens each", train.get("sequence_length")),
                ("{}", train.get("precision")),
            ),
        )
    )
    rows.append(("Planned steps", train.get("steps")))
    rows.append(
        (
            "Optimizer",
            _joined(
                ("peak lr {}", optim.get("lr")),
                ("{}", optim.get("schedule")),
                ("warm-up {}", optim.get("warmup_steps")),
                ("weight decay {}", optim.get("weight_decay")),
            ),
        )
    )
    rows += [(key.capitalize(), facts.get(key)) for key in ("ranks", "device", "data")]
    if last := history.last:
        rows.append(("Tokens trained", f"{last['tokens']:,.0f}" if math.isfinite(last["tokens"]) else None))
        rows.append(("Final loss", _fixed(last["loss"])))
        times = [v for v in (*history.train["time"], *history.validation["time"]) if math.isfinite(v)]
        if len(times) > 1:
            rows.append(("Time from first to last row", duration(max(times) - min(times))))
    if losses := history.validation["val_loss"]:
        best = min((v for v in losses if math.isfinite(v)), default=math.nan)
        rows.append(("Validation loss", f"{_fixed(losses[-1])} (best {_fixed(best)})"))
    if entropy is not None:
        rows.append(("Unigram entropy of the data", f"{entropy:.4f} nats per token"))
    return [(what, str(value)) for what, value in rows if value not in (None, "")]


# --- charts -------------------------------------------------------------------------------------------------


def _charts(history: History, entropy: float | None) -> list[dict[str, Any]]:
    """Charts in the order of the page: title, text, whether wide, and the plotly markup."""
    train, steps, charts = history.train, history.train["step"], []

    def add(
        title: str,
        figure: go.Figure,
        y: str,
        text: str = "",
        wide: bool = False,
        height: int = 320,
        x: str = "step",
    ) -> None:
        figure.update_layout(
            template="plotly_white",
            height=height,
            margin={"l": 60, "r": 16, "t": 34, "b": 44},
            font={
                "family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
                "size": 12,
                "color": "#334155",
            },
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            hovermode="x unified",
            xaxis={"title": {"text": x}, "gridcolor": "#eef2f7"},
            yaxis={"title": {"text": y}, "gridcolor": "#eef2f7", "automargin": True},
            paper_bgcolor="#fff",
            plot_bgcolor="#fff",
            modebar={"bgcolor": "rgba(255,255,255,0)", "color": "#94a3b8"},
        )
        if any(isinstance(trace, go.Heatmap) for trace in figure.data):
            figure.update_layout(hovermode="closest")
        markup = figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"chart-{len(charts)}", config=CONFIG
        )
        charts.append({"title": title, "text": text, "wide": wide, "markup": Markup(markup)})

    if not steps:
        return charts
    loss = go.Figure()
    _line(loss, steps, train["loss"], "training", BLUE)
    if any(v for v in train["mtp_loss"] if math.isfinite(v)):
        _line(loss, steps, train["mtp_loss"], "multi-token prediction", GREEN, dash="dot")
    if history.validation["step"]:
        loss.add_trace(
            go.Scatter(
                x=history.validation["step"],
                y=_finite(history.validation["val_loss"]),
                name="validation",
                mode="lines+markers",
                line={"color": ORANGE, "width": 2},
            )
        )
    if entropy is not None:
        # A trace, not a shape: it then has a legend entry and takes part in the axis range.
        loss.add_trace(
            go.Scatter(
                x=[steps[0], steps[-1]],
                y=[entropy, entropy],
                name="unigram entropy",
                mode="lines",
                line={"color": GREY, "width": 1.5, "dash": "dash"},
            )
        )
    add(
        "Loss",
        loss,
        "nats per token",
        "Cross entropy; below the unigram entropy the model uses context."
        if entropy is not None
        else "Cross entropy per token.",
        wide=True,
        height=400,
    )

    for title, key, y in (
        ("Gradient norm", "grad_norm", "before clipping"),
        ("Learning rate", "lr", ""),
        ("Throughput", "tokens_per_second", "tokens per second"),
        ("Auxiliary loss", "aux_loss", "as added to the loss"),
    ):
        if any(math.isfinite(v) for v in train[key]) and (key != "aux_loss" or any(train[key])):
            figure = go.Figure()
            _line(figure, steps, train[key], title.lower(), BLUE)
            if key in ("tokens_per_second", "lr"):
                figure.update_yaxes(rangemode="tozero")
            figure.update_layout(showlegend=False)
            add(title, figure, y)

    if history.imbalance:
        figure = go.Figure()
        for index, (layer, column) in enumerate(history.imbalance.items()):
            _line(figure, steps, column, f"layer {layer}", LAYER_COLORS[index % len(LAYER_COLORS)], width=1.3)
        figure.update_layout(showlegend=len(history.imbalance) <= len(LAYER_COLORS))
        add("Expert load, largest over mean", figure, "max / mean", "1 is perfectly even.", wide=True)
    if history.recent_loads:
        load = history.recent_loads[-1]
        add(
            f"Expert load at step {int(steps[-1])}",
            _heat_map(load),
            "MoE layer",
            "Share of each expert over the mean of its layer: 1 is even, 0 is an expert without tokens.",
            wide=True,
            height=min(900, 130 + 26 * len(load)),
            x="expert",
        )
    return charts


def _heat_map(load: Mapping[str, Sequence[float]]) -> go.Figure:
    width = max(len(shares) for shares in load.values())
    rows = []
    for shares in load.values():
        values = [float(share) * len(shares) for share in shares]
        rows.append([*_finite(values), *[None] * (width - len(values))])
    top = max([2.0, *(v for row in rows for v in row if v is not None)])
    figure = go.Figure(
        go.Heatmap(
            z=rows,
            x=list(range(width)),
            y=[f"layer {layer}" for layer in load],
            zmin=0,
            zmax=top,
            xgap=1,
            ygap=1,
            # white at 1, the even load; blue below it, red above
            colorscale=[(0, "#2563eb"), (1 / top, "#f8fafc"), (1, "#dc2626")],
            colorbar={"title": {"text": "× mean", "side": "right"}, "thickness": 12},
            hovertemplate="%{y}, expert %{x}: %{z:.2f} × mean<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _line(
    figure: go.Figure,
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    color: str,
    width: float = 1.8,
    dash: str = "solid",
) -> None:
    x, y = _thinned(x, y)
    figure.add_trace(
        go.Scatter(
            x=x,
            y=_finite(y),
            name=name,
            mode="lines+markers" if len(x) == 1 else "lines",
            line={"color": color, "width": width, "dash": dash},
            connectgaps=False,
        )
    )


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points that keep every peak and every gap."""
    if len(x) <= MAX_POINTS:
        return list(x), list(y)
    size = math.ceil(len(x) / (MAX_POINTS // 3))
    kept: list[int] = []
    for start in range(0, len(x), size):
        bucket = range(start, min(start + size, len(x)))
        finite = [i for i in bucket if math.isfinite(y[i])]
        gap = next((i for i in bucket if not math.isfinite(y[i])), None)
        picked = {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)} if finite else set()
        kept += sorted(picked | ({gap} if gap is not None else set()))
    return [x[i] for i in kept], [y[i] for i in kept]


def _finite(values: Sequence[float]) -> list[float | None]:
    """Gaps for values that no axis can show."""
    return [value if math.isfinite(value) else None for value in values]


# --- reading and formatting ---------------------------------------------------------------------------------


def _mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file's mapping; empty where there is none, since a report without it is still one."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({error}); repair or remove it") from error
    return content if isinstance(content, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _joined(*parts: tuple[str, Any]) -> str:
    return ", ".join(form.format(value) for form, value in parts if value is not None)


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else None


def _fixed(value: float) -> str:
    return f"{value:.4f}"


def _count(value: Any) -> str:
    """12.3 M, for a person."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1024:.0f} KiB"
