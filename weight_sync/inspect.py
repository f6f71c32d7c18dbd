"""What a file or folder of weights holds, whatever its format.

    python -m weight_sync inspect PATH [--config FILE] [--json FILE] [--tensors]

Headers and indices are read, of the tensors only scales. Where the weights do not fit their configuration, or there is
none, what is stored is listed all the same, and the command ends as on any bad input.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_ops.config import ModelConfig
from shared_ops.errors import EXIT_OK, UserError
from shared_ops.params import parameter_count
from weight_sync import dtypes
from weight_sync.canonical import Part, Weights, open_weights
from weight_sync.diff import report_console, write_json
from weight_sync.sizes import sized
from weight_sync.stores.base import Store
from weight_sync.stores.detect import open_store

_FILES_SHOWN = 12


def inspect(path: Path, config: str | None = None) -> dict[str, Any]:
    """The facts, as --json writes them. `UserError` where `open_weights` has one."""
    with open_weights(path, config) as weights:
        return {
            **_of_files(weights.store, weights.store_files),
            "model": weights.config.model_dump(),
            "parameters": {
                "without_mtp": parameter_count(weights.config, with_mtp=False),
                "with_mtp": parameter_count(weights.config),
            },
            "with_mtp": weights.with_mtp,
            "dtypes": _dtypes(weights),
            "copies": [{"name": copy.name, "of": name} for name, copy in weights.copies],
            "ignored": [{"name": name, "rule": rule} for name, rule in weights.ignored],
            "notes": weights.notes,
            "training": _training(weights) if weights.training else None,
            "conversion": _conversion(weights.report) if weights.report else None,
            "tensors": {
                tensor.name: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.name,
                    "stored": " + ".join(dict.fromkeys(map(stored_kind, tensor.parts))),
                    "stored_tensors": len(tensor.parts),
                }
                for tensor in weights.tensors.values()
            },
        }


def inspect_stored(path: Path, error: UserError) -> dict[str, Any]:
    """What is stored, without a model to go by. `UserError` where even that cannot be read."""
    store = open_store(path)
    try:
        stored = {
            name: {"shape": list(tensor.shape), "dtype": dtypes.to_safetensors(tensor.dtype)}
            for name, tensor in store.tensors.items()
        }
        return {**_of_files(store, store.files), "error": str(error), "stored": stored}
    finally:
        store.close()


def _of_files(store: Store, paths: Sequence[Path]) -> dict[str, Any]:
    folder = store.path if store.path.is_dir() else store.path.parent
    files = [{"name": str(path.relative_to(folder)), "bytes": path.stat().st_size} for path in paths]
    return {
        "path": str(store.path),
        "format": store.format,
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
        "stored_tensors": len(store.tensors),
    }


def stored_kind(part: Part) -> str:
    """How a part of a tensor is stored, in full: "BF16", "F8_E4M3 in 128 x 128 blocks with F32 scales"."""
    kind = dtypes.to_safetensors(part.stored.dtype)
    if part.scales is None:
        return kind
    packed = part.stored.shape != part.shape
    kind = f"FP4 pairs in {kind}, groups of 32" if packed else f"{kind} in 128 x 128 blocks"
    scales = part.scales.dtype
    return f"{kind} with {'UE8M0' if scales.itemsize == 1 else dtypes.to_safetensors(scales)} scales"


def _dtypes(weights: Weights) -> list[dict[str, Any]]:
    """By stored kind, the largest first: parameters that are (partly) so, values, bytes with scales."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in weights.tensors.values():
        for kind in {stored_kind(part) for part in tensor.parts}:
            found.setdefault(kind, {"stored": kind, "parameters": 0, "values": 0, "bytes": 0})["parameters"] += 1
        for part in tensor.parts:
            facts = found[stored_kind(part)]
            facts["values"] += part.size
            facts["bytes"] += part.stored.nbytes + (part.scales.nbytes if part.scales is not None else 0)
    return sorted(found.values(), key=lambda facts: -facts["bytes"])


def _training(weights: Weights) -> dict[str, Any]:
    meta = weights.training.get("meta") or {}
    moments = {kind.rstrip("/"): len(tensors) for kind, tensors in weights.moments.items()}
    return {"step": weights.training.get("step"), "consumed_samples": meta.get("consumed_samples"), "moments": moments}


def _conversion(report: Mapping[str, Any]) -> dict[str, Any]:
    """The gist of conversion.json."""
    tensors = report["tensors"].values()
    return {
        "source": report.get("source"),
        "dtype": (report.get("options") or {}).get("dtype"),
        "rounded": sum("cast" in facts for facts in tensors),
        "checksums": sum("xxh3_64" in (facts.get("destination") or {}) for facts in tensors),
        "verified": report.get("verified"),
    }


# --- to read --------------------------------------------------------------------------------------------------------


def show(facts: Mapping[str, Any], console: Console, tensors: bool = False) -> None:
    """Print what `inspect` found."""
    table = Table(title=facts["path"], show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    _show_store(facts, table)
    config = ModelConfig.model_validate(facts["model"])
    for key, text in _model_lines(config).items():
        table.add_row(key, text)
    counts = facts["parameters"]
    text = f"{_count(counts['without_mtp'])} trained"
    if config.num_nextn_predict_layers:
        text += f", {_count(counts['with_mtp'])} with multi-token prediction"
    table.add_row("parameters", text)
    for kind in facts["dtypes"]:
        text = f"{kind['parameters']} parameters, {_count(kind['values'])} values, {sized(kind['bytes'])}"
        table.add_row("stored as", f"{kind['stored']}: {text}")
    table.add_row("complete", _completeness(config, facts))
    if facts["training"]:
        step = facts["training"]
        moments = ", ".join(f"{kind} of {count} parameters" for kind, count in step["moments"].items())
        table.add_row("training state", f"step {step['step']}, {step['consumed_samples']} samples consumed; {moments}")
    for note in facts["notes"]:
        table.add_row("note", note)
    for copy in facts["copies"]:
        table.add_row("copy", f"{copy['name']}, of {copy['of']}")
    for rule in dict.fromkeys(item["rule"] for item in facts["ignored"]):
        names = [item["name"] for item in facts["ignored"] if item["rule"] == rule]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        table.add_row("ignored", f"{', '.join(names[:3])}{more} ({rule})")
    if facts["conversion"]:
        table.add_row("conversion.json", _conversion_line(facts["conversion"], len(facts["tensors"])))
    console.print(table)
    if tensors:
        console.print(_tensor_table(facts))


def _show_store(facts: Mapping[str, Any], table: Table) -> None:
    files = facts["files"]
    table.add_row("format", f"{facts['format']}, {facts['stored_tensors']} stored tensors")
    lines = [f"{file['name']} ({sized(file['bytes'])})" for file in files[:_FILES_SHOWN]]
    if len(files) > _FILES_SHOWN:
        lines.append(f"… {len(files) - _FILES_SHOWN} more")
    table.add_row("files", f"{len(files)}, {sized(facts['bytes'])}: {', '.join(lines)}")


def _model_lines(c: ModelConfig) -> dict[str, str]:
    dense, routed = c.first_k_dense_replace, c.num_hidden_layers - c.first_k_dense_replace
    layers = f"{c.num_hidden_layers}: {dense} dense, {routed} with experts"
    if c.num_nextn_predict_layers:
        layers += f"; {c.num_nextn_predict_layers} for multi-token prediction"
    experts = f"{c.n_routed_experts} routed, {c.num_experts_per_tok} per token, {c.n_shared_experts} shared, "
    experts += f"width {c.moe_intermediate_size}, {c.topk_method} on {c.scoring_func}"
    if c.n_group > 1:
        experts += f", {c.topk_group} of {c.n_group} groups"
    queries = "no query compression" if c.q_lora_rank is None else f"query rank {c.q_lora_rank}"
    context = f"{c.max_position_embeddings} positions, theta {c.rope_theta:g}"
    if c.rope_scaling:
        context += f", YaRN {c.rope_scaling.factor:g} x {c.rope_scaling.original_max_position_embeddings}"
    if c.sliding_window:
        context += f", window {c.sliding_window}"
    return {
        "model": f"{c.model_type}, hidden size {c.hidden_size}, vocabulary {c.vocab_size}"
                 f"{', embedding and head tied' if c.tie_word_embeddings else ''}",
        "layers": layers,
        "attention": f"{c.num_attention_heads} heads of {c.qk_nope_head_dim} + {c.qk_rope_head_dim} rotary, values "
                     f"{c.v_head_dim}; latent {c.kv_lora_rank}, {queries}",
        "dense width": str(c.intermediate_size),
        "experts": experts,
        "context": context,
    }  # fmt: skip


def _completeness(config: ModelConfig, facts: Mapping[str, Any]) -> str:
    text = f"yes, all {len(facts['tensors'])} parameters of the configuration"
    if config.num_nextn_predict_layers and not facts["with_mtp"]:
        return text + ", but for its multi-token prediction layers, of which there is nothing"
    return text + (", multi-token prediction included" if facts["with_mtp"] else "")


def _conversion_line(conversion: Mapping[str, Any], count: int) -> str:
    source = conversion["source"] or {}
    parts = [f"converted from {source.get('path')} ({source.get('format')})"]
    if conversion["dtype"]:
        parts.append(f"--dtype {conversion['dtype']}")
    parts.append(f"{conversion['rounded'] or 'no'} parameters were rounded")
    parts.append(f"checksums of {conversion['checksums']} of {count} parameters, not compared here")
    if conversion["verified"]:
        parts.append("was read again and compared when it was written")
    return "; ".join(parts)


def _tensor_table(facts: Mapping[str, Any]) -> Table:
    table = Table(title="parameters, by canonical name")
    table.add_column("name", overflow="fold")
    for heading in ("shape", "dtype", "stored as"):
        table.add_column(heading)
    for name, tensor in facts["tensors"].items():
        stored = tensor["stored"] + (f", {tensor['stored_tensors']} tensors" if tensor["stored_tensors"] > 1 else "")
        table.add_row(name, str(tensor["shape"]), tensor["dtype"], stored)
    return table


def show_stored(facts: Mapping[str, Any], console: Console, tensors: bool = False) -> None:
    """Print what `inspect_stored` found: names with their numbers left out, unless every tensor is asked for."""
    table = Table(title=facts["path"], show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    _show_store(facts, table)
    console.print(table)
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for name, tensor in facts["stored"].items():
        pattern = name if tensors else re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        groups.setdefault((pattern, tensor["dtype"]), []).append(tensor["shape"])
    table = Table(title="stored tensors")
    table.add_column("name", overflow="fold")
    for heading in ("tensors", "dtype", "shape"):
        table.add_column(heading)
    for (pattern, dtype), shapes in groups.items():
        distinct = list(dict.fromkeys(map(str, shapes)))
        table.add_row(pattern, str(len(shapes)), dtype, ", ".join(distinct[:3]) + (", …" if len(distinct) > 3 else ""))
    console.print(table)


def _count(number: int) -> str:
    """1234567 as 1,234,567; large ones in billions too."""
    return f"{number:,}" + (f" ({number / 1e9:.2f} billion)" if number >= 1e8 else "")


def main(argv: Sequence[str]) -> int:
    """`python -m weight_sync inspect`."""
    parser = argparse.ArgumentParser(prog="weight_sync inspect", description="Say what a store of weights holds.")
    parser.add_argument("path", metavar="PATH", type=Path, help="folder or file, or a training state's step folder")
    parser.add_argument("--config", help="the model's config.json, YAML file or name, instead of the one beside PATH")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all of it to this file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    arguments = parser.parse_args(argv)
    console = report_console()
    try:
        facts = inspect(arguments.path, arguments.config)
    except UserError as error:
        facts = inspect_stored(arguments.path, error)
        show_stored(facts, console, arguments.tensors)
        if arguments.json:
            write_json(arguments.json, facts)
        raise
    show(facts, console, arguments.tensors)
    if arguments.json:
        write_json(arguments.json, facts)
    return EXIT_OK
