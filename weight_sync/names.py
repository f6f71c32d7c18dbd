"""Canonical names <-> the Hugging Face hub's, as one table; each direction reads the same row.

A row is one kind of tensor: its canonical name, the hub's tensors it is made of, how they lie in it (`Layout`), its
dtype rule, and whether the published FP8 checkpoints quantise it. `{layer}` is any layer, multi-token prediction
layers included; `{expert}` runs over the routed experts. What is in no row is an error, unless a rule ignores it.
"""

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared_ops.config import ModelConfig
from shared_ops.errors import UserError
from shared_ops.params import CORRECTION_BIAS, Parameter, layer_of, manifest
from weight_sync.layouts import SAME, STACKED, STACKED_GATE_UP, Layout


@dataclass(frozen=True)
class Row:
    """One kind of tensor. `copies`: names under which a prediction layer repeats it.

    dtype "weights" follows the store and --dtype, "float32" never leaves fp32, "integer" is never cast.
    """

    canonical: str
    hub: tuple[str, ...]
    layout: Layout = SAME
    dtype: Literal["weights", "float32", "integer"] = "weights"
    quantised: bool = False
    copies: tuple[str, ...] = ()


def _same(name: str, **rules) -> Row:
    return Row(name, (name,), **rules)


_L = "model.layers.{layer}."
_ATTENTION, _MLP, _EXPERT = _L + "self_attn.", _L + "mlp.", _L + "mlp.experts.{expert}."

TABLE = (
    _same("model.embed_tokens.weight", copies=(_L + "embed_tokens.weight",)),
    _same("model.norm.weight"),
    _same("lm_head.weight", copies=(_L + "shared_head.head.weight",)),
    _same(_L + "input_layernorm.weight"),
    _same(_L + "post_attention_layernorm.weight"),
    _same(_ATTENTION + "q_proj.weight", quantised=True),
    _same(_ATTENTION + "q_a_proj.weight", quantised=True),
    _same(_ATTENTION + "q_a_layernorm.weight"),
    _same(_ATTENTION + "q_b_proj.weight", quantised=True),
    _same(_ATTENTION + "kv_a_proj_with_mqa.weight", quantised=True),
    _same(_ATTENTION + "kv_a_layernorm.weight"),
    _same(_ATTENTION + "kv_b_proj.weight", quantised=True),
    _same(_ATTENTION + "o_proj.weight", quantised=True),
    _same(_MLP + "gate_proj.weight", quantised=True),
    _same(_MLP + "up_proj.weight", quantised=True),
    _same(_MLP + "down_proj.weight", quantised=True),
    _same(_MLP + "gate.weight"),
    _same(_MLP + "gate." + CORRECTION_BIAS, dtype="float32"),
    _same(_MLP + "shared_experts.gate_proj.weight", quantised=True),
    _same(_MLP + "shared_experts.up_proj.weight", quantised=True),
    _same(_MLP + "shared_experts.down_proj.weight", quantised=True),
    Row(
        _MLP + "experts.gate_up_proj", (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"), STACKED_GATE_UP,
        quantised=True,
    ),
    Row(_MLP + "experts.down_proj", (_EXPERT + "down_proj.weight",), STACKED, quantised=True),
    # multi-token prediction (V3)
    _same(_L + "enorm.weight"),
    _same(_L + "hnorm.weight"),
    _same(_L + "eh_proj.weight"),
    _same(_L + "shared_head.norm.weight"),
)  # fmt: skip

# stored names that are left out, and why
IGNORED = (
    (
        re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"),
        "rotary tables: computed from the configuration",
    ),
)

# what a quantised tensor's scales are called: suffix of the tensor -> suffixes of its scales
SCALES = {".weight": (".weight_scale_inv", ".weight_scale", ".scale")}

_ROWS = {row.canonical: row for row in TABLE}
_LAYER = re.compile(r"(?<=^model\.layers\.)\d+")


def row_of(canonical: str) -> Row:
    """The row of a canonical name; `KeyError` where the table has none."""
    return _ROWS[_LAYER.sub("{layer}", canonical)]


class Entry(NamedTuple):
    """A parameter of the model, its row, and its tensors in the hub's names, in the order of its bytes."""

    parameter: Parameter
    row: Row
    hub: tuple[str, ...]
    part_shape: tuple[int, ...]


def entries(config: ModelConfig, with_mtp: bool = True) -> list[Entry]:
    """All parameters of a model, in manifest order; without its prediction layers if so asked."""
    found = []
    for parameter in manifest(config):
        layer = layer_of(parameter.name)
        if not with_mtp and layer is not None and layer >= config.num_hidden_layers:
            continue
        row = row_of(parameter.name)
        experts = range(parameter.shape[0]) if row.layout.stacked else (0,)
        hub = tuple(name.format(layer=layer, expert=expert) for expert in experts for name in row.hub)
        found.append(Entry(parameter, row, hub, row.layout.part_shape(parameter.shape)))
    return found


def copies(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(canonical name, the hub's name of its copy) of what the prediction layers share with the model.

    Where embedding and head are tied, the head is a copy of the embedding.
    """
    for row in TABLE:
        canonical = row.canonical
        if canonical == "lm_head.weight" and config.tie_word_embeddings:
            canonical = "model.embed_tokens.weight"
        for name in row.copies:
            for depth in range(config.num_nextn_predict_layers):
                yield canonical, name.format(layer=config.num_hidden_layers + depth)
    if config.tie_word_embeddings:
        yield "model.embed_tokens.weight", "lm_head.weight"


class Match(NamedTuple):
    """How a store's names make a model: entries with the stored names of each, copies that are there, names that a rule
    ignores, and whether the prediction layers are there."""

    entries: list[tuple[Entry, tuple[str, ...]]]
    copies: list[tuple[str, str]]
    ignored: list[tuple[str, str]]
    with_mtp: bool


def match(config: ModelConfig, stored: Collection[str], where: str, trained_only: bool = False) -> Match:
    """Find every parameter's stored tensors, under its canonical name or the hub's; `trained_only`: the optimizer's.

    `UserError` naming each parameter that has none and each stored name that belongs to none.
    """
    left = dict.fromkeys(stored)
    if config.num_hidden_layers > len(left):
        raise UserError(
            f"{where}: has {len(left)} tensors, the configuration {config.num_hidden_layers} layers: it is a "
            "part of the weights (give the folder of all), or the configuration is another model's"
        )
    ignored = [(name, rule) for name in left for pattern, rule in IGNORED if pattern.search(name)]
    for name, _ in ignored:
        del left[name]
    first_mtp = config.num_hidden_layers
    depths = range(first_mtp, first_mtp + config.num_nextn_predict_layers)
    with_mtp = any(_layer(name) in depths for name in left)
    there, missing = [], []
    for entry in entries(config, with_mtp):
        if trained_only and not entry.parameter.trainable:
            continue
        names = (entry.parameter.name,) if entry.parameter.name in left else entry.hub
        absent = [name for name in names if name not in left]
        missing += absent
        for name in names:
            left.pop(name, None)
        there.append((entry, names))
    shared = [(canonical, name) for canonical, name in copies(config) if name in left]
    for _, name in shared:
        del left[name]
    for name in stored:
        left.pop(scale_of(name, stored), None)  # read with its tensor
    if missing or left:
        raise UserError(f"{where}: " + _complaint(config, missing, list(left), with_mtp))
    return Match(there, shared, ignored, with_mtp)


def _layer(name: str) -> int:
    """The layer index of a stored name, -1 outside the layers."""
    found = _LAYER.search(name)
    return int(found.group()) if found and len(found.group()) < 10 else -1


def scale_names(name: str) -> list[str]:
    """Names under which a tensor's scales may be stored."""
    return [name.removesuffix(end) + scale for end, scales in SCALES.items() if name.endswith(end) for scale in scales]


def scale_of(name: str, stored: Collection[str]) -> str | None:
    """The stored name of a tensor's scales, None where there are none."""
    return next((scale for scale in scale_names(name) if scale in stored), None)


def is_a_parameters(name: str) -> bool:
    """Whether a name has the form of one in the table, for any layer and expert."""
    return _FORMS.fullmatch(name) is not None


_FORMS = re.compile("|".join(
    re.escape(name).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
    for row in TABLE for name in (row.canonical, *row.hub, *row.copies)
))  # fmt: skip


def _complaint(config: ModelConfig, missing: list[str], left: list[str], with_mtp: bool) -> str:
    parts = []
    if missing:
        lines = [name + _nearest(name, left, "stored is") for name in missing[:5]]
        parts.append(f"{len(missing)} tensors of the model are missing: {_more(lines, len(missing))}")
        if "lm_head.weight" in missing:
            parts.append("lm_head.weight may be absent only where tie_word_embeddings is true")
        if with_mtp and all(_layer(name) >= config.num_hidden_layers for name in missing):
            parts.append(
                "the multi-token prediction layer is there in part; a checkpoint has all of it or nothing of it"
            )
    if left:
        known = missing or [name for entry in entries(config) for name in (entry.parameter.name, *entry.hub[:2])]
        lines = [name + _nearest(name, [k for k in known if _layer(k) == _layer(name)] or known, "nearest known:")
                 for name in left[:5]]  # fmt: skip
        parts.append(f"{len(left)} tensors belong to no parameter of the model: {_more(lines, len(left))}")
    layers = f"{config.num_hidden_layers} layers and {config.num_nextn_predict_layers} for multi-token prediction"
    return "; ".join(parts) + f". The configuration ({config.model_type}, {layers}) must be that of the weights"


def _nearest(name: str, known: list[str], words: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" ({words} {close[0]})" if close else ""


def _more(lines: list[str], count: int) -> str:
    return ", ".join(lines) + (f", and {count - len(lines)} more" if count > len(lines) else "")
