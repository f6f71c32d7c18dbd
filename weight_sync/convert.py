"""Convert weights from any store to any other, tensor by tensor, within a memory bound, and prove it.

python -m weight_sync convert SRC DST [--to hf|torch|mindspore|hdf5|onnx] [--dtype fp32|bf16|fp16|fp8] …
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_ops.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from shared_ops.weights import REPORT
from weight_sync.conversion import convert
from weight_sync.plan import DTYPES, FORMATS, FP8, STATE, Options
from weight_sync.sizes import parse_size, sized
from weight_sync.stores.detect import format_at


def main(argv: Sequence[str]) -> int:
    """`python -m weight_sync convert`."""
    parser = argparse.ArgumentParser(prog="weight_sync convert", description="Convert weights between formats.")
    parser.add_argument("source", metavar="SRC", type=Path, help="folder or file, or a training state's step folder")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder to make, taken literally")
    parser.add_argument("--to", choices=FORMATS, help="format (default: hf, or hdf5 where SRC is hf)")
    parser.add_argument("--dtype", choices=(*DTYPES, FP8), help="round to this dtype (default: keep; FP8 and FP4 "
                        "become bf16 where that is exact, else fp32); fp8 goes with --to hf")  # fmt: skip
    parser.add_argument("--max-memory", default="2GiB", metavar="SIZE", help="memory to work with (default: 2GiB)")
    parser.add_argument("--max-file-size", metavar="SIZE", help="split into files of at most this size")
    parser.add_argument("--mindspore-file", choices=("auto", "ckpt", "safetensors"), default="auto", help="files of "
                        "--to mindspore (default auto: .ckpt, unless a tensor has 2 GiB or more)")  # fmt: skip
    parser.add_argument("--scale-format", choices=("float32", "ue8m0"), help="scales of --dtype fp8 (default: as "
                        "config.json says, else float32)")  # fmt: skip
    parser.add_argument("--config", help="the model's config.json, YAML file or name, where SRC has no config.json")
    parser.add_argument("--optimizer", action="store_true", help="take a training state's moments and position "
                        "along; --to training_state makes one again")  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="read DST again and compare")
    parser.add_argument("--overwrite", action="store_true", help="replace DST when the new one is complete")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(argv)
    to = arguments.to or _default_format(arguments.source)
    _check_options(arguments, to)
    options = Options(
        to=to, dtype=arguments.dtype, max_memory=parse_size(arguments.max_memory),
        max_file=parse_size(arguments.max_file_size) if arguments.max_file_size else None,
        mindspore_file=arguments.mindspore_file, scale_format=arguments.scale_format, config=arguments.config,
        optimizer=arguments.optimizer or to == STATE, verify=arguments.verify, overwrite=arguments.overwrite,
        quiet=arguments.quiet,
    )  # fmt: skip
    try:
        report = convert(arguments.source, arguments.destination, options)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    print("\n".join(summary(report, arguments.destination)), flush=True)
    return EXIT_OK


def _default_format(source: Path) -> str:
    return "hdf5" if format_at(source) == "hf" else "hf"


def _check_options(arguments: argparse.Namespace, to: str) -> None:
    if arguments.dtype == FP8 and to != "hf":
        raise UserError(
            f"--dtype fp8 with --to {to}: FP8 with block scales is a format of Hugging Face folders, use --to hf"
        )
    if arguments.dtype and (arguments.optimizer or to == STATE):
        raise UserError(
            "--dtype: a training state keeps its fp32 weights and moments; convert the weights alone to round"
        )
    if arguments.max_file_size and to in ("hdf5", STATE):
        raise UserError(f"--max-file-size: {to} is one file whatever its size")
    if arguments.scale_format and arguments.dtype != FP8:
        raise UserError("--scale-format goes with --dtype fp8")
    if arguments.mindspore_file != "auto" and to != "mindspore":
        raise UserError("--mindspore-file goes with --to mindspore")


def summary(report: dict[str, Any], destination: Path) -> list[str]:
    """The report in a few lines."""
    source, target, seconds = report["source"], report["destination"], report["seconds"]
    rate = target["bytes"] / max(seconds["copy"], 1e-9)
    lines = [
        f"{source['path']} ({source['format']}) -> {destination} ({target['format']})",
        f"read {source['tensors']} tensors, {sized(source['bytes'])}; mapped to {report['mapped']} canonical ones"
        f"{'' if report['with_mtp'] else ' (no multi-token prediction layer)'}; wrote {target['tensors']} tensors, "
        f"{sized(target['bytes'])} in {len(target['files'])} file(s)",
        f"{seconds['copy']:.1f} s, {sized(int(rate))}/s; sync {seconds['sync']:.1f} s",
    ]
    rules = Counter(item["rule"] for item in report["ignored"])
    lines += [f"ignored {count}: {rule}" for rule, count in rules.items()]
    if report["copies"] and target["format"] == "hf":
        lines.append(f"copies of shared tensors: {', '.join(report['copies'])}")
    lines += report["notes"]
    casts = {name: facts["cast"] for name, facts in report["tensors"].items() if "cast" in facts}
    if casts:
        worst = sorted(casts, key=lambda name: -casts[name]["max_abs_error"])
        relative = max(cast["max_rel_error"] for cast in casts.values())
        lines.append(
            f"rounded {len(casts)} tensors, largest error {casts[worst[0]]['max_abs_error']:.3g}, relative "
            f"{relative:.3g}; worst first: {', '.join(worst[:5])}{', … (all in the report)' if len(worst) > 5 else ''}"
        )
    else:
        lines.append("no value was rounded")
    if "verified" in report:
        lines.append(f"verified {report['verified']} tensors against what was read and written")
    lines.append(f"report {destination / REPORT}")
    return lines
