"""What the comparison found: a table on the console, a page with the differences along depth, JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared_ops.errors import UserError
from shared_ops.files import write_atomically
from shared_ops.monitor.history import encode_number
from shared_ops.monitor.report import BLUE, CONFIG, GREEN, GREY, ORANGE
from shared_ops.params import layer_of
from weight_sync.agreement.compare import Comparison, Row
from weight_sync.agreement.page import PAGE
from weight_sync.agreement.steps import StepComparison
from weight_sync.agreement.verdict import Verdict

RED = "#dc2626"
HIGHEST = 10.0  # what a logarithmic axis shows of infinity
CONSOLE_ROWS = 60
STEP_COLUMNS = 5
COLUMNS = ("input", "output", "gradient of output", "gradient of input and parameters")
SHORT_COLUMNS = ("input", "output", "grad out", "grad in")


@dataclass(frozen=True)
class Report:
    """Everything that is shown. `facts` are (what, value) lines about the problem."""

    names: tuple[str, str]
    bound: float
    facts: Sequence[tuple[str, str]]
    comparison: Comparison
    steps: Sequence[StepComparison]
    verdict: Verdict


def values(row: Row) -> tuple[float, float, float, float]:
    """A row's differences, in the order of COLUMNS."""
    return row.input, row.output, row.output_gradient, row.gradient


# --- the console -------------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Facts, table and verdict."""
    for what, value in report.facts:
        _line(console, f"{what}: {value}")
    console.print(_modules(report))
    if report.steps:
        console.print(_steps(report))
    for line in remarks(report):
        _line(console, line)
    _line(console, report.verdict.sentence, "bold green" if report.verdict.agrees else "bold red")
    for place in report.verdict.sources:
        _line(console, f"  {place}")


def _line(console: Console, text: str, style: str = "") -> None:
    """One line, however long."""
    console.print(Text(text, style=style), soft_wrap=True)


_CAPTION = "grad out: of the output, from behind; grad in: of the input and the parameters, what the module makes"


def _modules(report: Report) -> Table:
    title = f"Relative differences of {report.names[0]} and {report.names[1]}, bound {report.bound:.0e}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_CAPTION)
    table.add_column("module", overflow="fold")
    for column in SHORT_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    worst = report.comparison.worst
    shown = list(_shown(report))
    if len(shown) < len(report.comparison.rows):
        table.caption += f"; {len(shown)} of {len(report.comparison.rows)} calls, --html and --json have them all"
    for row in shown:
        style = "bold" if row.key == report.verdict.key else None
        mark = " ← first" if row.key == report.verdict.key else " ← worst" if row is worst else ""
        table.add_row(Text(str(row.key) + mark), *(_cell(v, v > report.bound) for v in values(row)), style=style)
    return table


def _cell(difference: float, over: bool) -> Text:
    return Text(f"{difference:.1e}", style="bold red" if over else "")


def _shown(report: Report) -> Iterator[Row]:
    """The larger modules, and the first and the worst whatever they are. Where that are too many, of layers without a
    fault only the layer itself."""
    verdict, worst = report.verdict, report.comparison.worst
    rows = [row for row in report.comparison.rows if _large(row.key.path) or row.key == verdict.key or row is worst]
    long = len(rows) > CONSOLE_ROWS
    guilty = layer_of(verdict.key.path) if verdict.key else None
    for row in rows:
        layer = layer_of(row.key.path)
        if long and layer is not None and layer != guilty and row is not worst and len(row.key.path.split(".")) > 3:
            continue
        yield row


def _large(path: str) -> bool:
    """Layers, their attention, norms, routers and feed-forward parts; what is outside of layers."""
    parts = path.split(".")
    if layer_of(path) is None:
        return len(parts) <= 2 and parts[-1] != "linear"
    return len(parts) <= 4 or (len(parts) == 5 and parts[4] in ("gate", "experts", "shared_experts"))


def _steps(report: Report) -> Table:
    steps = report.steps if len(report.steps) <= STEP_COLUMNS else [report.steps[0], *report.steps[1 - STEP_COLUMNS :]]
    table = Table(title="Optimizer steps as training makes them", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("after step")
    for made in steps:
        table.add_column(str(made.step), justify="right", no_wrap=True)
    for side, name in enumerate(report.names):
        table.add_row(f"loss of {name}", *(f"{made.losses[side]:.6f}" for made in steps))
    table.add_row("(token, choice) pairs moved", *(str(made.moved) for made in steps))
    for i, quantity in enumerate(steps[0].quantities):
        found = (made.quantities[i] for made in steps)
        table.add_row(quantity.name, *(_cell(q.difference, not q.agrees) for q in found))
    return table


def remarks(report: Report) -> list[str]:
    """What a reader of the differences should know."""
    lines = []
    for flip in report.comparison.flips:
        lines.append(f"{flip.key}: rounding decided {len(flip.rows)} choice{'s' if len(flip.rows) > 1 else ''} (scores "
                     f"{flip.gap:.1e} apart); {report.names[1]} follows {report.names[0]} there")  # fmt: skip
    if "transformers" not in report.names:
        for name, paths in zip(report.names, report.comparison.only, strict=True):
            own = [path for path in paths if not path.endswith(_INSIDE_KERNELS) and path != _TIED_PRODUCT]
            if own:
                lines.append(f"only {name} calls {', '.join(own[:5])}{' …' if len(own) > 5 else ''}")
    return lines


# parts of one twin that the other has inside a kernel or a function
_INSIDE_KERNELS, _TIED_PRODUCT = (".routed.swiglu",), "linear"


# --- the page ----------------------------------------------------------------------------------------------------


def write_html(report: Report, path: Path) -> None:
    """One self-contained page. `UserError` where it cannot be written."""
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    rows = [
        {
            "name": str(row.key),
            "first": row.key == report.verdict.key,
            "cells": [(f"{v:.1e}", v > report.bound) for v in values(row)],
        }
        for row in report.comparison.rows
    ]
    steps = [
        {
            "step": made.step, "losses": [f"{loss:.6f}" for loss in made.losses], "moved": made.moved,
            "cells": [(f"{q.difference:.1e}", not q.agrees, q.of) for q in made.quantities],
        }
        for made in report.steps
    ]  # fmt: skip
    html = page.render(
        names=report.names,
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        plotly_js=Markup(get_plotlyjs()),
        verdict=report.verdict,
        facts=report.facts,
        remarks=remarks(report),
        charts=_charts(report),
        columns=COLUMNS,
        rows=rows,
        quantities=[q.name for q in report.steps[0].quantities] if report.steps else [],
        steps=steps,
        bound=f"{report.bound:.0e}",
    )
    _write(path, html)


def _charts(report: Report) -> list[dict[str, Any]]:
    rows = report.comparison.rows
    forward, backward = go.Figure(), go.Figure()
    _curve(forward, report, [row.output for row in rows], "output", BLUE)
    _curve(backward, report, [row.output_gradient for row in rows], "gradient that comes from behind", ORANGE)
    _curve(backward, report, [row.gradient for row in rows], "gradients that the module makes", GREEN)
    blame = report.comparison.blame
    if blame is not None:
        of_outputs = blame.direction == "outputs"
        of = [row.output if of_outputs else row.gradient for row in rows]
        _mark(forward if of_outputs else backward, [row.key for row in rows].index(blame.key), of, str(blame.key))
    titles = (
        ("Forward", forward, "The outputs of every module, in the order of the data: rounding makes a slow rise, a "
         "fault a step. What is equal to the bit is not drawn."),
        ("Backward", backward, "The gradients of every module; the backward pass goes from right to left."),
    )  # fmt: skip
    charts = []
    for number, (title, figure, text) in enumerate(titles):
        _finish(figure, report)
        markup = figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"chart-{number}", config=CONFIG)
        charts.append({"title": title, "text": text, "markup": Markup(markup)})
    return charts


def _curve(figure: go.Figure, report: Report, differences: Sequence[float], name: str, color: str) -> None:
    labels = [[str(row.key), f"{v:.2e}"] for row, v in zip(report.comparison.rows, differences, strict=True)]
    shown = [min(v, HIGHEST) or None for v in differences]
    figure.add_trace(
        go.Scatter(
            x=list(range(len(shown))), y=shown, name=name, mode="lines+markers", line={"color": color, "width": 1},
            connectgaps=True, marker={"size": 4}, customdata=labels,
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra>" + name + "</extra>",
        )
    )  # fmt: skip


def _mark(figure: go.Figure, place: int, differences: Sequence[float], label: str) -> None:
    figure.add_trace(
        go.Scatter(
            x=[place], y=[min(differences[place], HIGHEST) or None], name="differs first", mode="markers",
            marker={"size": 13, "color": RED, "symbol": "circle-open", "line": {"width": 3}},
            hovertemplate=f"{label}<extra>differs first</extra>",
        )
    )  # fmt: skip


def _finish(figure: go.Figure, report: Report) -> None:
    rows = report.comparison.rows
    # a trace, not a shape: it then has a legend entry
    figure.add_trace(
        go.Scatter(x=[0, len(rows) - 1], y=[report.bound] * 2, name=f"bound {report.bound:.0e}", mode="lines",
                   line={"color": GREY, "dash": "dash", "width": 1.5}, hoverinfo="skip")
    )  # fmt: skip
    parts = [_part(row.key.path) for row in rows]
    starts = _apart([i for i, part in enumerate(parts) if i == 0 or part != parts[i - 1]], parts)
    figure.update_layout(
        template="plotly_white", height=400, margin={"l": 70, "r": 16, "t": 34, "b": 64},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12, "color": "#334155"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, hovermode="closest",
        xaxis={"tickvals": starts, "ticktext": [parts[i] for i in starts], "tickangle": -45, "gridcolor": "#eef2f7"},
        yaxis={"type": "log", "dtick": 1, "exponentformat": "e", "title": {"text": "relative difference"},
               "gridcolor": "#eef2f7"},
        paper_bgcolor="#fff", plot_bgcolor="#fff", modebar={"bgcolor": "rgba(255,255,255,0)", "color": "#94a3b8"},
    )  # fmt: skip


def _apart(starts: Sequence[int], parts: Sequence[str]) -> list[int]:
    """The places of labels that do not overlap: layers before others, earlier before later."""
    kept: list[int] = []
    for start in sorted(starts, key=lambda i: not parts[i].startswith("layer ")):
        if all(abs(start - other) * 30 >= len(parts) for other in kept):
            kept.append(start)
    return sorted(kept)


def _part(path: str) -> str:
    """The label of a stretch of the axis: a layer, or a module outside of layers."""
    layer = layer_of(path)
    return f"layer {layer}" if layer is not None else path.removeprefix("model.").split(".")[0]


# --- JSON --------------------------------------------------------------------------------------------------------


def write_json(report: Report, path: Path) -> None:
    """Every difference, for scripts; infinite ones as "inf". `UserError` where it cannot be written."""
    comparison, verdict = report.comparison, report.verdict
    blame = comparison.blame
    content = {
        "pair": report.names,
        "agree": verdict.agrees,
        "verdict": verdict.sentence,
        "first": verdict.first,
        "direction": blame.direction if blame else None,
        "bound": report.bound,
        "facts": dict(report.facts),
        "modules": [
            {
                "module": row.key.path, "call": row.key.number + 1, "class": row.kind, "input": row.input,
                "output": row.output, "output_gradient": row.output_gradient, "input_gradient": row.input_gradient,
                "parameters": row.parameters,
            }
            for row in comparison.rows
        ],
        "flips": [
            {"module": flip.key.path, "call": flip.key.number + 1, "rows": flip.rows.tolist(), "gap": flip.gap}
            for flip in comparison.flips
        ],
        "steps": [
            {
                "step": made.step, "losses": made.losses, "moved": made.moved,
                "quantities": {
                    q.name: {"difference": q.difference, "bound": q.bound, "of": q.of, "judged": q.judged}
                    for q in made.quantities
                },
            }
            for made in report.steps
        ],
    }  # fmt: skip
    _write(path, json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON's own types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return encode_number(value)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from None
