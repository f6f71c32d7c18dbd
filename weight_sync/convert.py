"""Convert weights from any store to any other, tensor by tensor, within a memory bound, and prove it.

    python -m weight_sync convert SRC DST [--to hf|torch|mindspore|hdf5|onnx] [--dtype fp32|bf16|fp16|fp8] …

All formats are known byte for byte before the first tensor is read, so the files are laid out first and then filled by
several threads, from views of the memory-mapped source. DST becomes visible when it is complete; `conversion.json` in
it is the report, with a checksum of every tensor's content in canonical form before and after.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shared_ops.errors import EXIT_OK, UserError
from shared_ops.files import sync
from weight_sync import dtypes, names, quantised
from weight_sync.canonical import BFLOAT16, FLOAT32, REPORT, CanonicalTensor, Weights, open_weights
from weight_sync.progress import Progress, sized
from weight_sync.stores import hdf5, mindspore, onnx, safetensors, torch
from weight_sync.stores.atomic import Partial, disk_errors
from weight_sync.stores.base import Rows, Span, TensorPlan
from weight_sync.stores.detect import format_at

FORMATS = ("hf", "torch", "mindspore", "hdf5", "onnx")
DTYPES = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}
FP8 = "fp8"
CONFIG = "config.json"
VERSION = 1

EXIT_INTERRUPTED = 130  # what shells say of Ctrl-C

_CHUNK = 8 << 20
_MAX_FILE = {"hf": 5_000_000_000, "torch": 50_000_000_000, "mindspore": mindspore.LARGEST_CKPT, "onnx": 1 << 30}
# what lies beside weights and belongs to them: tokenizer, generation settings, model card
_COMPANIONS = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|merges|generation_config|chat_template.*|preprocessor_config)"
    r"\.(json|jinja|model|txt)|(configuration|modeling|tokenization)_\w+\.py|README\.md|LICENSE.*"
)
# what a hub folder's config.json says of FP8 weights
_FP8_CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# bytes of memory for one element under work: of the source, fp32, the result, and what statistics need
_ELEMENT_BYTES = {"plain": 0, "copied": 8, "cast": 64, "dequantised": 80, "quantised": 96}


@dataclass(frozen=True)
class Options:
    """How to convert; sizes in bytes. `sync` False leaves the last word to the system's write-back."""

    to: str
    dtype: str | None = None
    max_memory: int = 2 << 30
    max_file: int | None = None
    mindspore_file: str = "auto"
    scale_format: str | None = None
    config: str | None = None
    verify: bool = False
    overwrite: bool = False
    quiet: bool = False
    sync: bool = True
    workers: int = min(4, os.cpu_count() or 1)


class Target(NamedTuple):
    """A canonical tensor, the dtype it is written in (None: FP8 blocks), the names its bytes go to in their order,
    those of its FP8 scales, and those of whole copies."""

    tensor: CanonicalTensor
    dtype: np.dtype | None
    names: tuple[str, ...]
    scales: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


def convert(source: Path, destination: Path, options: Options) -> dict[str, Any]:
    """Convert and return the report (the content of conversion.json, `seconds` included).

    `UserError` for everything that is wrong with source, destination or options; the source is never touched, and what
    was at the destination stays until the new folder is complete.
    """
    source, destination = Path(source), Path(destination)
    _check_paths(source, destination)
    with open_weights(source, options.config) as weights:
        return _Conversion(weights, destination, options).run()


def _check_paths(source: Path, destination: Path) -> None:
    here, there = source.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"{destination}: must lie apart from the source {source}")


class _Conversion:
    """One conversion under way."""

    def __init__(self, weights: Weights, destination: Path, options: Options):
        self.weights, self.destination, self.options = weights, destination, options
        self.scale_format = options.scale_format or _scale_format(weights.config_json)
        self.copies = _copies(weights)
        self.targets = [self._target(tensor) for tensor in weights.tensors.values()]
        self.plans = [plan for target in self.targets for plan in self._tensor_plans(target)]
        self.config_json = _config_json(weights, options, self.targets, self.scale_format)
        self.files, self.beside = self._file_plans()
        self.workers, self.steps = _share_memory(self.targets, options)
        self.done: dict[str, dict[str, Any]] = {}
        self.notes = list(weights.notes)
        self.stopping = False

    # --- what is to be written ---

    def _target(self, tensor: CanonicalTensor) -> Target:
        entry, asked = tensor.entry, self.options.dtype
        if self.options.to != "hf":
            return Target(tensor, self._dtype(tensor), (tensor.name,))
        if asked == FP8 and entry.row.quantised:
            return Target(tensor, None, entry.hub, tuple(names.scale_names(name)[0] for name in entry.hub))
        copies = tuple(copy for canonical, copy in self.copies if canonical == tensor.name)
        return Target(tensor, self._dtype(tensor), entry.hub, (), copies)

    def _dtype(self, tensor: CanonicalTensor) -> np.dtype:
        if tensor.entry.row.dtype == "float32":
            return FLOAT32
        asked = DTYPES.get(self.options.dtype or "")
        return tensor.dtype if asked is None or tensor.entry.row.dtype == "integer" else asked

    def _tensor_plans(self, target: Target) -> Iterator[TensorPlan]:
        whole = len(target.names) == 1 and target.names[0] == target.tensor.name
        shape = target.tensor.shape if whole else target.tensor.entry.part_shape
        scales = dtypes.from_name("float8_e8m0fnu") if self.scale_format == "ue8m0" else FLOAT32
        for number, name in enumerate(target.names):
            if target.dtype is None:
                yield TensorPlan(name, shape, dtypes.from_name("float8_e4m3fn"))
                yield TensorPlan(target.scales[number], quantised.scales_shape(shape), scales)
            else:
                yield TensorPlan(name, shape, target.dtype)
        for name in target.copies:
            yield TensorPlan(name, shape, target.dtype)

    def _file_plans(self) -> tuple[list, dict[str, bytes]]:
        to, options = self.options.to, self.options
        limit = options.max_file or _MAX_FILE.get(to, 0)
        if to == "hf":
            return safetensors.plan(self.plans, limit, {"format": "pt"})
        if to == "torch":
            return torch.plan(self.plans, limit)
        if to == "mindspore":
            return mindspore.plan(self.plans, limit, options.mindspore_file)
        if to == "onnx":
            return onnx.plan(self.plans, limit, {CONFIG: self.config_json.decode()})
        return hdf5.plan(self.plans)

    # --- the work ---

    def run(self) -> dict[str, Any]:
        """Lay out, fill, verify, publish."""
        self._check_copies()
        total = sum(plan.nbytes for plan in self.plans)
        with Partial(self.destination, self._fingerprint(), self.options.overwrite) as partial:
            self._check_room(partial, total)
            try:
                return self._write(partial, total)
            except BaseException:
                if not partial.filled and not self.done:
                    partial.forget()
                raise

    def _write(self, partial: Partial, total: int) -> dict[str, Any]:
        began = time.perf_counter()
        self._lay_out(partial)
        self.output = _Output(partial.folder, self.files)
        try:
            self._take_over(partial)
            with Progress("converting", total, self.options.quiet) as progress:
                self._fill(partial, progress)
        finally:
            self.output.close()
        copied = time.perf_counter()
        with disk_errors(self.destination):
            self._write_beside(partial.folder)
            if self.options.sync:
                for path in partial.folder.iterdir():
                    sync(path)
        synced = time.perf_counter()
        report = self._report(partial.folder, total)
        if self.options.verify:
            report["verified"] = verify(self.weights, partial.folder, self.done, self.options)
        seconds = {"copy": copied - began, "sync": synced - copied, "verify": time.perf_counter() - synced}
        report["seconds"] = {key: round(value, 3) for key, value in seconds.items()}
        with disk_errors(self.destination):
            (partial.folder / REPORT).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
            sync(partial.folder / REPORT)
        partial.publish()
        return report

    def _lay_out(self, partial: Partial) -> None:
        for plan in self.files:
            path = partial.folder / plan.name
            if path.exists() and path.stat().st_size == partial.laid_out.get(plan.name):
                continue
            for tensor in plan.tensors:
                partial.filled.pop(tensor.name, None)
            with disk_errors(self.destination):
                plan.create(path)
                sync(path)
                partial.record_file(plan.name)

    def _take_over(self, partial: Partial) -> None:
        """Tensors that an interrupted run has filled, if the files still hold them."""
        for target in self.targets:
            facts = partial.filled.get(target.tensor.name)
            if facts is not None and facts["file_xxh3_64"] == self.output.checksum(target):
                self.done[target.tensor.name] = facts
        if partial.filled:
            self.notes.append(f"went on from an interrupted run that had written {len(self.done)} tensors")

    def _fill(self, partial: Partial, progress: Progress) -> None:
        left = []
        for target in self.targets:
            if target.tensor.name in self.done:
                progress.advance(self.output.nbytes(target))
            else:
                left.append(target)

        def work(target: Target) -> None:
            if self.stopping:
                return
            facts = self._fill_one(target, progress)
            partial.record_tensor(target.tensor.name, facts)
            self.done[target.tensor.name] = facts

        with ThreadPoolExecutor(self.workers) as pool:
            running = [pool.submit(work, target) for target in left]
            try:
                for future in running:
                    future.result()
            except BaseException:
                self.stopping = True
                pool.shutdown(cancel_futures=True)
                raise

    def _fill_one(self, target: Target, progress: Progress) -> dict[str, Any]:
        tensor = target.tensor
        before, after = xxhash.xxh3_64(), xxhash.xxh3_64()
        statistics = dtypes.CastStatistics()
        changes = target.dtype != tensor.dtype
        for position, values in self._pieces(target):
            if self.stopping:
                raise InterruptedError
            before.update(_bytes(values))
            if target.dtype is None:
                self._fill_quantised(target, position, values, statistics, after)
            else:
                out = self._cast(values, target, statistics) if changes else values
                raw = _bytes(out)
                if changes:
                    after.update(raw)
                with disk_errors(self.destination):
                    self.output.write(target, position * target.dtype.itemsize, raw)
            progress.advance(values.size * (target.dtype.itemsize if target.dtype else 1))
        source, content = before.hexdigest(), (after if changes else before).hexdigest()
        self._check_source(tensor, source)
        facts: dict[str, Any] = {
            "shape": list(tensor.shape),
            "source": {"stored": tensor.stored_dtype, "dtype": tensor.dtype.name, "xxh3_64": source},
            "destination": {
                "stored": "F8_E4M3" if target.dtype is None else dtypes.to_safetensors(target.dtype),
                "dtype": (target.dtype or FLOAT32).name,
                "xxh3_64": content,
            },
        }
        if statistics.changed:
            facts["cast"] = statistics.as_dict()
        facts["file_xxh3_64"] = self.output.checksum(target) if target.dtype is None or target.copies else content
        return facts

    def _pieces(self, target: Target) -> Iterator[tuple[int, np.ndarray]]:
        """(first element, values) over the tensor; strips of 128 rows of one part where they will be quantised."""
        tensor, step = target.tensor, self.steps[target.tensor.name]
        if target.dtype is not None:
            position = 0
            for start in range(0, tensor.size, step):
                for values in tensor.read(start, min(start + step, tensor.size)):
                    yield position, values
                    position += values.size
            return
        rows, columns = tensor.entry.part_shape
        for part in range(len(target.names)):
            for row in range(0, rows, quantised.BLOCK):
                start = (part * rows + row) * columns
                size = min(quantised.BLOCK, rows - row) * columns
                yield start, _joined(tensor.read(start, start + size))

    def _fill_quantised(self, target: Target, position: int, values: np.ndarray, statistics, after) -> None:
        rows, columns = target.tensor.entry.part_shape
        part, within = divmod(position // columns, rows)
        strip = dtypes.cast(values, FLOAT32).reshape(-1, columns)
        try:
            weights, scales = quantised.quantise_fp8(strip, self.scale_format)
        except ValueError as error:
            raise UserError(f"{self.weights.path}: {target.tensor.name} cannot be quantised: {error}") from None
        back = quantised.dequantise_fp8(weights, scales, 0)
        statistics.update(strip.reshape(-1), back.reshape(-1))
        after.update(_bytes(back.reshape(-1)))
        raw = _bytes(scales.reshape(-1))
        with disk_errors(self.destination):
            self.output.write_to(target.names[part], within * columns, _bytes(weights.reshape(-1)))
            self.output.write_to(target.scales[part], within // quantised.BLOCK * len(raw), raw)

    def _cast(self, values: np.ndarray, target: Target, statistics) -> np.ndarray:
        try:
            out = dtypes.cast(values, target.dtype)
        except dtypes.CastOverflow as error:
            raise UserError(
                f"{self.weights.path}: {target.tensor.name} has the value {error.value}, which {target.dtype} does not "
                "hold: choose --dtype fp32 or bf16"
            ) from None
        statistics.update(values, out)
        return out

    # --- checks ---

    def _check_source(self, tensor: CanonicalTensor, checksum: str) -> None:
        written = (self.weights.report or {}).get("tensors", {}).get(tensor.name, {}).get("destination", {})
        if written.get("dtype") == tensor.dtype.name and written.get("xxh3_64") != checksum:
            raise UserError(
                f"{self.weights.path}: {tensor.name} is not what was written there (checksum {checksum}, {REPORT} says "
                f"{written.get('xxh3_64')}): the file is damaged; if it was changed on purpose, remove {REPORT}"
            )

    def _check_copies(self) -> None:
        for name, copy in self.weights.copies:
            original = self.weights.tensors[name].parts[0].stored
            for start in range(0, copy.nbytes, _CHUNK):
                stop = min(start + _CHUNK, copy.nbytes)
                if not all(map(np.array_equal, original.pieces(start, stop), copy.pieces(start, stop))):
                    raise UserError(
                        f"{self.weights.path}: {copy.name} differs from {name}; a prediction layer shares embedding "
                        "and head with the model (arXiv 2412.19437, 2.2)"
                    )

    def _check_room(self, partial: Partial, total: int) -> None:
        held = sum(path.stat().st_blocks * 512 for path in partial.folder.iterdir())
        free = shutil.disk_usage(partial.folder).free
        if total - held > free:
            partial.forget()
            raise UserError(
                f"{self.destination}: no room: the weights need {sized(total)}, its disk has {sized(free)} left"
            )

    def _fingerprint(self) -> dict[str, Any]:
        """What an interrupted run must have had in common to be gone on from."""
        source = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in self.weights.store.files}
        options = {key: getattr(self.options, key) for key in ("to", "dtype", "max_file", "mindspore_file")}
        return {"version": VERSION, "source": source, "scales": self.scale_format, "config": self.config_json.decode(),
                "tensors": len(self.plans), **options}  # fmt: skip

    # --- what lies beside the weights ---

    def _write_beside(self, folder: Path) -> None:
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        (folder / CONFIG).write_bytes(self.config_json)
        source = self.weights.path
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if _COMPANIONS.fullmatch(path.name) and path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    def _report(self, folder: Path, total: int) -> dict[str, Any]:
        weights = self.weights
        ordered = {target.tensor.name: self.done[target.tensor.name] for target in self.targets}
        read = sum(part.stored.nbytes for tensor in weights.tensors.values() for part in tensor.parts)
        return {
            "version": VERSION,
            "source": {"path": str(weights.path), "format": weights.format, "tensors": len(weights.store.tensors),
                       "bytes": read},
            "destination": {"format": self.options.to, "tensors": len(self.plans), "bytes": total,
                            "files": sorted(plan.name for plan in self.files)},
            "options": {"dtype": self.options.dtype, "max_memory": self.options.max_memory},
            "mapped": len(weights.tensors),
            "with_mtp": weights.with_mtp,
            "copies": [copy for _, copy in self.copies],
            "ignored": [{"name": name, "rule": rule} for name, rule in weights.ignored],
            "notes": self.notes,
            "tensors": ordered,
        }  # fmt: skip


class _Output:
    """The files under construction: write or read any part of any tensor, from any thread."""

    def __init__(self, folder: Path, files: Sequence):
        self._descriptors: list[int] = []
        self._spans: dict[str, tuple[int, Span]] = {}
        for plan in files:
            descriptor = os.open(folder / plan.name, os.O_RDWR)
            self._descriptors.append(descriptor)
            for name, span in plan.locate(folder / plan.name).items():
                self._spans[name] = (descriptor, span)
        self._starts: dict[str, list[int]] = {}

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def write(self, target: Target, position: int, raw: np.ndarray) -> None:
        """Bytes at `position` of a tensor in canonical order, and into its copies."""
        starts = self._starts.get(target.tensor.name)
        if starts is None:
            starts, at = [], 0
            for name in target.names:
                starts.append(at)
                at += self._spans[name][1][1]
            self._starts[target.tensor.name] = starts
        for copy in target.copies:
            self.write_to(copy, position, raw)
        index = bisect_right(starts, position) - 1
        while len(raw):
            name = target.names[index]
            within = position - starts[index]
            room = self._spans[name][1][1] - within
            self.write_to(name, within, raw[:room])
            raw, position, index = raw[room:], position + room, index + 1

    def write_to(self, name: str, position: int, raw: np.ndarray) -> None:
        """Bytes at `position` of one stored tensor."""
        descriptor, (offset, length) = self._spans[name]
        if position + len(raw) > length:
            raise ValueError(f"{name}: {len(raw)} bytes at {position} of {length}")
        view, at = memoryview(raw), offset + position
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written

    def nbytes(self, target: Target) -> int:
        return sum(self._spans[name][1][1] for name in (*target.names, *target.scales, *target.copies))

    def checksum(self, target: Target) -> str:
        """Of what the files hold of a target now: its parts, then its scales, then its copies."""
        digest, buffer = xxhash.xxh3_64(), bytearray(1 << 20)
        for name in (*target.names, *target.scales, *target.copies):
            descriptor, (offset, length) = self._spans[name]
            while length:
                view = memoryview(buffer)[: min(length, len(buffer))]
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    return ""
                digest.update(view[:count])
                offset, length = offset + count, length - count
        return digest.hexdigest()


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _share_memory(targets: Sequence[Target], options: Options) -> tuple[int, dict[str, int]]:
    """(threads, elements under work at a time for each tensor) such that all threads together keep the bound."""
    least = max(targets, key=_least_bytes)
    needed = _least_bytes(least)
    if needed > options.max_memory:
        raise UserError(
            f"--max-memory {sized(options.max_memory)} is too little, {least.tensor.name} needs {sized(needed)} at least"
        )
    workers = max(1, min(options.workers, options.max_memory // max(needed, 1)))
    steps = {}
    for target in targets:
        unit, kind = _unit(target)
        size = _CHUNK // target.tensor.dtype.itemsize
        if per_element := _ELEMENT_BYTES[kind]:
            size = min(size, options.max_memory // workers // per_element)
        steps[target.tensor.name] = max(size // unit, 1) * unit
    return workers, steps


def _unit(target: Target) -> tuple[int, str]:
    """(elements that must be worked on together, what is done to them)."""
    tensor = target.tensor
    if target.dtype is None:
        return quantised.BLOCK * tensor.shape[-1], "quantised"
    if tensor.is_quantised:
        return tensor.shape[-1], "dequantised"
    if target.dtype != tensor.dtype or not tensor.is_plain:
        return 1, "cast"
    if any(isinstance(part.stored, Rows) for part in tensor.parts):
        return tensor.shape[-1] if tensor.shape else 1, "copied"
    return 1, "plain"


def _least_bytes(target: Target) -> int:
    unit, kind = _unit(target)
    return unit * _ELEMENT_BYTES[kind]


def _scale_format(config_json: bytes | None) -> str:
    quantisation = (json.loads(config_json) if config_json else {}).get("quantization_config") or {}
    return "ue8m0" if quantisation.get("scale_fmt") == "ue8m0" else "float32"


def _copies(weights: Weights) -> list[tuple[str, str]]:
    """What a hub folder repeats: what these weights repeat or did where they came from, else what the hub's do."""
    possible = dict((copy, canonical) for canonical, copy in names.copies(weights.config))
    if weights.copies or (weights.format == "hf" and weights.report is None):
        return [(canonical, copy.name) for canonical, copy in weights.copies]
    if weights.report is not None:
        return [(possible[copy], copy) for copy in weights.report.get("copies", []) if copy in possible]
    return [(canonical, copy) for copy, canonical in possible.items() if weights.with_mtp and copy != "lm_head.weight"]


def _config_json(weights: Weights, options: Options, targets: Sequence[Target], scale_format: str) -> bytes:
    """The source's config.json to the byte, unless what it says of the stored dtype is no longer so."""
    config = json.loads(weights.config_json) if weights.config_json else weights.config.to_hf()
    kinds = Counter()
    for target in targets:
        kinds[(target.dtype or BFLOAT16).name] += target.tensor.size
    dtype = kinds.most_common(1)[0][0]
    edited = dict(config)
    if weights.config_json is None:
        edited["dtype"] = dtype
    elif any(target.dtype != target.tensor.dtype for target in targets) or "quantization_config" in config:
        for key in ("torch_dtype", "dtype"):
            if key in edited:
                edited[key] = dtype
    if options.dtype == FP8:
        edited["quantization_config"] = _FP8_CONFIG | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})
    else:
        edited.pop("quantization_config", None)
    if weights.config_json is not None and edited == config:
        return weights.config_json
    return json.dumps(edited, indent=2, ensure_ascii=False).encode() + b"\n"


def verify(weights: Weights, folder: Path, written: dict[str, dict[str, Any]], options: Options) -> int:
    """Read `folder` again and compare every tensor: to the checksum of what was written, and where no dtype changed to
    the source bit by bit. Returns the number of tensors; `UserError` naming the first that differs."""
    with (
        open_weights(folder) as result,
        Progress("verifying", sum(t.nbytes for t in result.tensors.values()), options.quiet) as progress,
    ):
        for name, facts in written.items():
            tensor, source = result.tensors[name], weights.tensors[name]
            same = "cast" not in facts and facts["source"]["dtype"] == tensor.dtype.name
            digest, step = xxhash.xxh3_64(), _verify_step(tensor, options)
            for start in range(0, tensor.size, step):
                stop = min(start + step, tensor.size)
                values = _joined(tensor.read(start, stop))
                if same and not np.array_equal(_bytes(values), _bytes(_joined(source.read(start, stop)))):
                    raise UserError(
                        f"{folder}: {name} differs from the source: the disk does not return what was written"
                    )
                digest.update(_bytes(dtypes.cast(values, dtypes.from_name(facts["destination"]["dtype"]))))
                progress.advance(values.nbytes)
            if digest.hexdigest() != facts["destination"]["xxh3_64"]:
                raise UserError(f"{folder}: {name} is not what was written: the disk does not return what was written")
        return len(written)


def _verify_step(tensor: CanonicalTensor, options: Options) -> int:
    row = tensor.shape[-1]
    per_element = _ELEMENT_BYTES["dequantised" if not tensor.is_plain else "copied"]
    return max(min(_CHUNK // tensor.dtype.itemsize, options.max_memory // 2 // per_element) // row, 1) * row


def _joined(pieces: Iterator[np.ndarray]) -> np.ndarray:
    arrays = [*pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# --- the command ---


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500MB", "1e9"."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    try:
        value = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    except (TypeError, ValueError):
        raise UserError(f"{text!r} is no size: expected something like 2GiB, 500MB or 1000000") from None
    if value < 1:
        raise UserError(f"{text!r} is no size: expected at least one byte")
    return int(value)


def main(argv: Sequence[str]) -> int:
    """`python -m weight_sync convert`."""
    parser = argparse.ArgumentParser(prog="weight_sync convert", description="Convert weights between formats.")
    parser.add_argument("source", metavar="SRC", type=Path, help="folder or file, or a training state's step folder")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder to make, taken literally")
    parser.add_argument(
        "--to", choices=FORMATS, help="format (default: hf, or hdf5 where SRC is hf)"
    )
    parser.add_argument("--dtype", choices=(*DTYPES, FP8), help="round to this dtype (default: keep; FP8 and FP4 sources "
                        "become bf16 where that is exact, else fp32). fp8 is for --to hf")  # fmt: skip
    parser.add_argument("--max-memory", default="2GiB", metavar="SIZE", help="memory to work with (default: 2GiB)")
    parser.add_argument("--max-file-size", metavar="SIZE", help="split into files of at most this size")
    parser.add_argument("--mindspore-file", choices=("auto", "ckpt", "safetensors"), default="auto", help="kind of file "
                        "for --to mindspore (default auto: .ckpt, unless a tensor has 2 GiB or more)")  # fmt: skip
    parser.add_argument("--scale-format", choices=("float32", "ue8m0"), help="scales of --dtype fp8 (default: as "
                        "config.json says, else float32)")  # fmt: skip
    parser.add_argument("--config", help="the model's config.json, YAML file or name, where SRC has no config.json")
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
        verify=arguments.verify, overwrite=arguments.overwrite, quiet=arguments.quiet,
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
        f"read {source['tensors']} tensors, {sized(source['bytes'])}; mapped to {report['mapped']} parameters"
        f"{'' if report['with_mtp'] else ' (no multi-token prediction layer)'}; wrote {target['tensors']} tensors, "
        f"{sized(target['bytes'])} in {len(target['files'])} file(s)",
        f"{seconds['copy']:.1f} s, {sized(int(rate))}/s; sync {seconds['sync']:.1f} s",
    ]
    rules = Counter(item["rule"] for item in report["ignored"])
    lines += [f"ignored {count}: {rule}" for rule, count in rules.items()]
    if report["copies"]:
        lines.append(f"copies of shared tensors: {', '.join(report['copies'])}")
    lines += report["notes"]
    casts = {name: facts["cast"] for name, facts in report["tensors"].items() if "cast" in facts}
    if casts:
        worst = max(casts, key=lambda name: casts[name]["max_abs_error"])
        relative = max(cast["max_rel_error"] for cast in casts.values())
        lines.append(
            f"rounded {len(casts)} tensors: largest error {casts[worst]['max_abs_error']:.3g} ({worst}), relative "
            f"error {relative:.3g}"
        )
    else:
        lines.append("no value was rounded")
    if "verified" in report:
        lines.append(f"verified {report['verified']} tensors against what was read and written")
    lines.append(f"report {destination / REPORT}")
    return lines
