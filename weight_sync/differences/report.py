"""The report on two stores: both sides, their configurations, totals, and what the tensors' rows say together."""

from collections import Counter
from typing import Any

import numpy as np

from shared_ops.config import ModelConfig
from shared_ops.params import CORRECTION_BIAS, layer_of
from weight_sync.canonical import Weights
from weight_sync.differences.explanation import is_explained, listed
from weight_sync.differences.figures import DEFINITIONS
from weight_sync.differences.reading import STEP
from weight_sync.stores.base import Stored

# fields of a configuration that training uses and that no weights' meaning depends on; prediction layers that are not
# there on one side count by their tensors
TRAINING_ONLY = ("aux_loss_alpha", "router_z_loss_coef", "mtp_loss_weight", "initializer_range", "expert_placement",
                 "num_nextn_predict_layers")  # fmt: skip
_OF_EXPERTS = tuple("mlp." + part for part in ("gate.weight", "gate." + CORRECTION_BIAS, "experts.gate_up_proj",
                                               "experts.down_proj"))  # fmt: skip


def report_on(a: Weights, b: Weights, rows: dict[str, dict[str, Any]], budget: int) -> dict[str, Any]:
    """As --json writes it; `rows`: every tensor's, `budget`: bytes of memory."""
    copies = _copies(a, b, budget)
    config = _config_differences(a.config, b.config)
    counts = Counter(row["status"] for row in rows.values())
    unequal = [row for row in rows.values() if row["status"] in ("differs", "dtype", "shape")]
    kinds = Counter(row["explanation"]["kind"] for row in unequal if is_explained(row))
    measured = {name: row for name, row in rows.items() if row.get("max_abs")}
    worst = max(measured, key=lambda name: measured[name]["max_abs"], default=None)
    equal = set(counts) <= {"equal"} and not copies and not any(field["counts"] for field in config)
    stored = sum(row["status"] == "equal" and row["stored"]["a"] != row["stored"]["b"] for row in rows.values())
    return {
        "a": _side(a),
        "b": _side(b),
        "equal": equal,
        "config": config,
        "totals": {
            "tensors": len(rows),
            "bitwise_equal": counts["equal"],
            "bitwise_equal_stored_differently": stored,
            "same_values_other_dtype": counts["dtype"],
            "other_shape": counts["shape"],
            "differ": counts["differs"],
            "only_in_a": counts["only in A"],
            "only_in_b": counts["only in B"],
            "explained": dict(kinds),
            "unexplained": len(unequal) - sum(kinds.values()),
            "max_abs": rows[worst]["max_abs"] if worst else 0.0,
            "max_abs_in": worst,
            "max_ulp": max((row["max_ulp"] for row in measured.values()), default=0),
        },
        "copies": copies,
        "findings": [*_expert_findings(rows), *_layer_findings(rows)],
        "definitions": DEFINITIONS,
        "tensors": rows,
    }


def _side(weights: Weights) -> dict[str, Any]:
    return {
        "path": str(weights.path),
        "format": weights.format,
        "model_type": weights.config.model_type,
        "with_mtp": weights.with_mtp,
        "num_hidden_layers": weights.config.num_hidden_layers,
        "tensors": len(weights.tensors),
        "moments": [kind.rstrip("/") for kind in weights.moments],
        "step": (weights.training or {}).get("step"),
        "ignored": [{"name": name, "rule": rule} for name, rule in weights.ignored],
        "notes": weights.notes,
    }


def _config_differences(a: ModelConfig, b: ModelConfig) -> list[dict[str, Any]]:
    here, there = a.model_dump(), b.model_dump()
    return [
        {"field": key, "a": here[key], "b": there[key], "counts": key not in TRAINING_ONLY}
        for key in here
        if here[key] != there[key]
    ]


def _copies(a: Weights, b: Weights, budget: int) -> list[dict[str, str]]:
    """Further copies of a shared tensor (tied head, prediction layers) that make the two sides differ."""
    sides = [dict((copy.name, (canonical, copy)) for canonical, copy in side.copies) for side in (a, b)]
    found = []
    for name in sorted({*sides[0], *sides[1]}):
        canonical = (sides[0].get(name) or sides[1][name])[0]
        off = [
            name in copies and not _same_stored(copies[name][1], weights.tensors[canonical].parts[0].stored, budget)
            for weights, copies in zip((a, b), sides)
        ]
        if off == [True, True] and _same_stored(sides[0][name][1], sides[1][name][1], budget):
            continue
        if any(off):
            where = "both, and not alike" if all(off) else "A" if off[0] else "B"
            found.append({"name": name, "text": f"should be a copy of {canonical} and is not, in {where}"})
    return found


def _same_stored(a: Stored, b: Stored, budget: int) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    step = max(min(STEP, budget // 4), 1)
    return all(
        np.array_equal(*(np.concatenate([*stored.pieces(at, min(at + step, a.nbytes))]) for stored in (a, b)))
        for at in range(0, a.nbytes, step)
    )


def _expert_findings(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Layers whose experts are permuted: with or without their router."""
    findings: dict[str, list[int]] = {}
    for layer in sorted({layer for name in rows if (layer := layer_of(name)) is not None}):
        orders = []
        for name in (f"model.layers.{layer}.{part}" for part in _OF_EXPERTS):
            if name in rows and "only" not in rows[name]["status"]:
                found = rows[name]["explanation"] or {}
                same = rows[name]["status"] in ("equal", "dtype") or found.get("whole") and "experts" not in found
                orders.append("same" if same else str(found.get("experts")))
        if set(orders) <= {"same"}:
            continue
        if len(set(orders)) == 1 and orders[0] != "None":
            findings.setdefault("router and experts are permuted alike", []).append(layer)
        elif "None" not in orders:
            findings.setdefault("router and experts are not permuted alike", []).append(layer)
    return [f"{text}: layers {listed(layers, 12)}" for text, layers in findings.items()]


def _layer_findings(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Layers that hold another one's tensors."""
    moves = Counter()
    for name, row in rows.items():
        other = (row["explanation"] or {}).get("tensor")
        if other and (here := layer_of(name)) is not None and (there := layer_of(other)) not in (None, here):
            moves[here, there] += 1
    moves = sorted((pair, count) for pair, count in moves.items() if count > 1)
    whole = [f"{here} holds A's {there} ({count} tensors)" for (here, there), count in moves]
    return [f"layers moved: B's {listed(whole, 12)}"] if whole else []
