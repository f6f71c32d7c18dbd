"""Two stores of weights, of any formats, compared tensor by tensor in canonical form.

    python -m weight_sync diff A B [--json FILE] [--config FILE] [--config-b FILE] [--max-memory SIZE] [--limit N]

A tensor that differs is measured, and where its values are the other's in another arrangement (transposed, experts
permuted, gate and up exchanged, rotary rows in another order, another tensor's) or the other's rounded, that is said:
ports go wrong in these ways. Nothing larger than a strip of a tensor is in memory: arrangements are recognised by
64-bit fingerprints of rows and columns. The comparison is in `differences`; here are the command and what it prints.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_ops.errors import EXIT_DIFFERENT, EXIT_OK, UserError
from shared_ops.files import write_atomically
from shared_ops.params import layer_of
from weight_sync.canonical import open_weights
from weight_sync.differences.comparison import compare
from weight_sync.differences.explanation import listed
from weight_sync.sizes import parse_size

_FIGURES = ("max abs", "max rel", "max ulp", "cosine")
_WIDE = 150  # columns of a terminal in which everything has a column of its own


def main(argv: Sequence[str]) -> int:
    """`python -m weight_sync diff`: 0 where everything is equal to the bit, 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="weight_sync diff", description="Compare two stores of weights.")
    parser.add_argument("a", metavar="A", type=Path, help="folder or file, or a training state's step folder")
    parser.add_argument("b", metavar="B", type=Path, help="the other one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything to this file")
    parser.add_argument("--config", help="the model's config.json, YAML file or name, instead of those beside A and B")
    parser.add_argument("--config-b", help="likewise for B alone")
    parser.add_argument("--max-memory", default="2GiB", metavar="SIZE", help="memory to work with (default: 2GiB)")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="rows of the table (default: 50)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json}: its folder is not there")
    with (
        open_weights(arguments.a, arguments.config) as a,
        open_weights(arguments.b, arguments.config_b or arguments.config) as b,
    ):
        report = compare(a, b, parse_size(arguments.max_memory), arguments.quiet)
    show(report, report_console(), max(arguments.limit, 0))
    if arguments.json:
        write_json(arguments.json, {"verdict": verdict(report), **report})
    return EXIT_OK if report["equal"] else EXIT_DIFFERENT


def report_console() -> Console:
    """Standard output; a file or pipe gets lines of 200 characters."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report; `UserError` where the disk refuses it."""
    try:
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def show(report: dict[str, Any], console: Console, limit: int = 50) -> None:
    """Print the report: configuration, tensors from the worst on, verdict."""
    for side in "ab":
        facts = report[side]
        mtp = "with" if facts["with_mtp"] else "without"
        step = "" if facts["step"] is None else f", step {facts['step']}"
        console.print(f"{side.upper()}: {facts['path']} ({facts['format']}, {facts['model_type']}, {facts['tensors']} "
                      f"parameters, {mtp} multi-token prediction{step})", soft_wrap=True)  # fmt: skip
        for note in facts["notes"]:
            console.print(f"   {note}", soft_wrap=True)
    moments = [report[side]["moments"] for side in "ab"]
    if moments[0] != moments[1]:
        console.print(f"the optimizer's moments, which only {'A' if moments[0] else 'B'} has, are not compared")
    if report["config"]:
        table = Table("field", "A", "B", "", title="configuration")
        for field in report["config"]:
            table.add_row(field["field"], str(field["a"]), str(field["b"]), "" if field["counts"] else "not counted")
        console.print(table)
    if lines := _table_rows(report):
        console.print(_table(lines, limit, console.width))
    totals = report["totals"]
    if totals["bitwise_equal"]:
        stored = totals["bitwise_equal_stored_differently"]
        console.print(f"{totals['bitwise_equal']} tensors bitwise equal" +
                      (f", {stored} of them stored in another dtype" if stored else ""))  # fmt: skip
        for text, names in _odd_contents(report["tensors"]).items():
            console.print(f"in both: {text}: {listed(names, 4)}", soft_wrap=True)
    others = Counter(_of_both(row, "dtype") for row in report["tensors"].values() if row["status"] == "dtype")
    for pair, count in others.items():
        console.print(f"{count} tensors have the same values in another dtype ({pair})")
    for finding in report["findings"]:
        console.print(finding, soft_wrap=True)
    console.print(verdict(report), style="green" if report["equal"] else "bold red", soft_wrap=True)


def verdict(report: dict[str, Any]) -> str:
    """The report in a line."""
    totals = report["totals"]
    if report["equal"]:
        return f"EQUAL: all {totals['tensors']} tensors are the same in name, shape, dtype and every bit"
    parts = [f"{totals['bitwise_equal']} of {totals['tensors']} tensors bitwise equal"]
    unequal = totals["differ"] + totals["same_values_other_dtype"] + totals["other_shape"]
    if unequal:
        kinds = [f"{count} {kind}" for kind, count in sorted(totals["explained"].items(), key=lambda item: -item[1])]
        if totals["unexplained"]:
            kinds.append(f"{totals['unexplained']} unexplained")
        parts.append(f"{unequal} differ ({', '.join(kinds)})")
    parts += [f"{totals[f'only_in_{side}']} only in {side.upper()}" for side in "ab" if totals[f"only_in_{side}"]]
    if report["copies"]:
        parts.append(f"{len(report['copies'])} copies of shared tensors differ")
    if count := sum(field["counts"] for field in report["config"]):
        parts.append(f"{count} fields of the configuration differ")
    if totals["max_abs_in"]:
        parts.append(f"largest difference {totals['max_abs']:.4g} in {totals['max_abs_in']}")
    return "DIFFERENT: " + "; ".join(parts)


def _odd_contents(rows: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Equal tensors that hold what weights should not."""
    odd: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row["status"] == "equal":
            if row["a"]["nan"] or row["a"]["inf"]:
                odd.setdefault("NaN or infinite values", []).append(name)
            elif row["a"]["all_zero"]:
                odd.setdefault("all zero", []).append(name)
    return odd


def _table(lines: Sequence[tuple[str, ...]], limit: int, width: int) -> Table:
    caption = "worst first; rel: |a-b| / max(|a|,|b|); ulp: representable values between, in the wider dtype"
    shown = list(lines[:limit])
    if len(lines) > limit:
        shown.append((f"… {len(lines) - limit} more", *[""] * 6, "--limit shows them, --json has them"))
    if width < _WIDE:  # what is said of a tensor one below the other
        table = Table("tensor", "figures", title="tensors", caption=caption, show_lines=True)
        for name, shape, dtype, *figures, finding in shown:
            named = [f"{heading} {figure}" for heading, figure in zip(_FIGURES, figures) if figure]
            table.add_row("\n".join(filter(None, (name, f"{shape} {dtype}".strip(), finding))), "\n".join(named))
        return table
    table = Table(title="tensors", caption=caption)
    table.add_column("tensor", overflow="fold")
    for heading in ("shape", "dtype", *_FIGURES):
        table.add_column(heading, justify="right" if heading in _FIGURES else "left")
    table.add_column("finding", overflow="fold")
    for line in shown:
        table.add_row(*line)
    return table


def _table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """What has other values, the worst first; a layer that one side lacks is one line."""
    rows = {name: row for name, row in report["tensors"].items() if row["status"] not in ("equal", "dtype")}
    layers: dict[int | None, list[str]] = {}
    for name in report["tensors"]:
        layers.setdefault(layer_of(name), []).append(name)
    lines = []
    for layer, names in layers.items():
        statuses = {report["tensors"][name]["status"] for name in names}
        if layer is None or len(statuses) > 1 or not (status := statuses.pop()).startswith("only"):
            continue
        is_mtp = layer >= min(report[side]["num_hidden_layers"] for side in "ab")
        text = f"{status}: the whole layer" + (", multi-token prediction" if is_mtp else "")
        lines.append((f"model.layers.{layer}.* ({len(names)} tensors)", *[""] * 6, text))
        for name in names:
            del rows[name]
    lines += [(copy["name"], *[""] * 6, copy["text"]) for copy in report["copies"]]
    worst_first = sorted(rows.items(), key=lambda item: _badness(item[1]), reverse=True)
    return lines + [_table_row(name, row) for name, row in worst_first]


def _badness(row: dict[str, Any]) -> tuple[bool, bool, float, float]:
    distance = row.get("relative_l2")
    return (
        row["status"].startswith("only") or row["status"] == "shape",
        row.get("not_finite_in_one", 0) > 0,
        math.inf if distance is None else distance,
        row.get("max_ulp", 0),
    )


def _table_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    figures = [_figure(row, key.replace(" ", "_")) for key in _FIGURES]
    return name, _of_both(row, "shape"), _of_both(row, "dtype"), *figures, _finding(row)


def _of_both(row: dict[str, Any], key: str) -> str:
    values = [_short(value) for value in row[key].values()]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _short(value: Any) -> str:
    return str(value).replace(" ", "").replace("bfloat", "bf").replace("float", "fp")


def _figure(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    value = row[key]
    if value is None:
        return "-"
    return f"{value:.6f}" if key == "cosine" else f"{value:.3g}" if isinstance(value, float) else str(value)


def _finding(row: dict[str, Any]) -> str:
    parts = []
    if row["status"].startswith("only") or row["status"] == "shape":
        parts.append({"shape": "another shape"}.get(row["status"], row["status"]))
    if row["explanation"]:
        parts.append(row["explanation"]["text"])
    elif row["status"] == "differs":
        parts.append(f"unexplained; {row['differing']} of {math.prod(row['shape']['a'])} values differ")
    for side in "ab":
        facts = row.get(side, {})
        parts += [f"{side.upper()} has {facts[key]} {text}" for key, text in (("nan", "NaN"), ("inf", "infinite"))
                  if facts.get(key)]  # fmt: skip
    return "; ".join(parts)
