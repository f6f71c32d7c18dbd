"""Carry a conversion out: lay the files out, fill them by several threads, prove what was written, publish.

All formats are known byte for byte before the first tensor is read, so the files are made first and then filled, from
views of the memory-mapped source wherever nothing but places change. The destination becomes visible when it is
complete; conversion.json in it is the report, with a checksum of every tensor's content before and after.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shared_ops.config import ModelConfig
from shared_ops.errors import UserError
from shared_ops.files import sync
from shared_ops.weights import CONFIG, PARAMS, REPORT
from weight_sync import dtypes, quantised
from weight_sync.canonical import FLOAT32, TRAINING, CanonicalTensor, Weights, open_weights
from weight_sync.output import Output
from weight_sync.plan import CHUNK, STATE, Options, Plan, Target, fingerprint, reading_step
from weight_sync.progress import Progress
from weight_sync.sizes import sized
from weight_sync.stores import training_state
from weight_sync.stores.atomic import Partial, disk_errors
from weight_sync.stores.detect import holds_weights

# what lies beside weights and belongs to them: tokenizer, generation settings, model card
_COMPANIONS = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|merges|generation_config|chat_template.*|preprocessor_config)"
    r"\.(json|jinja|model|txt)|(configuration|modeling|tokenization)_\w+\.py|README\.md|LICENSE.*"
)


def convert(source: Path, destination: Path, options: Options) -> dict[str, Any]:
    """Convert and return the report (the content of conversion.json).

    `UserError` for everything that is wrong with source, destination or options; the source is never touched, and what
    was at the destination stays until the new folder is complete.
    """
    source, destination = Path(source), Path(destination)
    _check_paths(source, destination)
    with open_weights(source, options.config) as weights:
        if options.optimizer and not weights.moments:
            reason = weights.without_moments or "they come from a training state"
            raise UserError(f"{source}: has no optimizer moments to take along: {reason}")
        return _Conversion(weights, destination, options).run()


def _check_paths(source: Path, destination: Path) -> None:
    here, there = source.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"{destination}: must lie apart from the source {source}")


class _Stopped(Exception):
    """A tensor was left unfinished because the conversion ends."""


class _Conversion:
    """One conversion under way."""

    def __init__(self, weights: Weights, destination: Path, options: Options):
        self.weights, self.destination, self.options = weights, destination, options
        self.plan = Plan(weights, options)
        self.fingerprint = fingerprint(self.plan)
        self.done: dict[str, dict[str, Any]] = {}
        self.notes = [*weights.notes, *_not_carried(weights)]
        self.stopping = False

    def run(self) -> dict[str, Any]:
        """Everything from the first check to the last rename."""
        _check_copies(self.weights)
        with Partial(self.destination, self.fingerprint, self.options.overwrite, holds_weights) as partial:
            self._check_room(partial)
            try:
                return self._write(partial)
            except UserError as error:
                if partial.filled or self.done:
                    raise UserError(f"{error} (begun in {partial.folder}: remove it if it is not to go on)") from None
                partial.forget()
                raise

    def _write(self, partial: Partial) -> dict[str, Any]:
        began = time.perf_counter()
        self._lay_out(partial)
        with disk_errors(self.destination):
            self.output = Output(partial.folder, self.plan.files)
        try:
            self._take_over(partial)
            with Progress("converting", self.plan.nbytes, self.options.quiet) as progress:
                self._fill(partial, progress)
        finally:
            self.output.close()
        if fingerprint(self.plan) != self.fingerprint:
            partial.forget()
            raise UserError(f"{self.weights.path}: was changed while it was read: convert it when nobody writes it")
        copied = time.perf_counter()
        with disk_errors(self.destination):
            self._write_beside(partial.folder)
            if self.options.sync:
                for path in partial.folder.rglob("*"):
                    sync(path)
        synced = time.perf_counter()
        report = self._report()
        if self.options.verify:
            report["verified"] = verify(self.weights, partial.folder, self.done, self.options)
            self._verify_copies(partial.folder)
        seconds = {"copy": copied - began, "sync": synced - copied, "verify": time.perf_counter() - synced}
        report["seconds"] = {key: round(value, 3) for key, value in seconds.items()}
        with disk_errors(self.destination):
            (partial.folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            sync(partial.folder / REPORT)
        partial.publish()
        return report

    # --- files ---

    def _check_room(self, partial: Partial) -> None:
        needed = self.plan.nbytes - sum(path.stat().st_blocks * 512 for path in partial.folder.rglob("*"))
        free = shutil.disk_usage(partial.folder).free
        if needed > free:
            if not partial.laid_out:
                partial.forget()
            raise UserError(
                f"{self.destination}: no room: {sized(needed)} more are needed, its disk has {sized(free)} left"
            )

    def _lay_out(self, partial: Partial) -> None:
        for name, plan in self.plan.files.items():
            path = partial.folder / name
            if path.exists() and path.stat().st_size == partial.laid_out.get(name):
                continue
            with disk_errors(self.destination):
                path.parent.mkdir(exist_ok=True)
                plan.create(path)
                sync(path)
                partial.record_file(name)

    def _take_over(self, partial: Partial) -> None:
        """Tensors that an interrupted run has filled, if the files still hold them."""
        for key, target in self.plan.targets.items():
            facts = partial.filled.get(key)
            if facts is not None and facts["file_xxh3_64"] == self.output.checksum(target):
                self.done[key] = facts
        if partial.filled:
            self.notes.append(f"went on from an interrupted run that had written {len(self.done)} tensors")

    def _write_beside(self, folder: Path) -> None:
        for name, content in self.plan.beside.items():
            (folder / name).write_bytes(content)
        if self.options.to == STATE:
            training_state.seal(folder, self.weights.training)
            return
        (folder / CONFIG).write_bytes(self.plan.config_json)
        if self.options.optimizer:
            (folder / TRAINING).write_text(json.dumps(self.weights.training, indent=1) + "\n", "utf-8")
        source = self.weights.path
        if self.weights.format == STATE:
            source = training_state.data_folder(source)
        for path in sorted(source.iterdir()) if source is not None and source.is_dir() else ():
            if _COMPANIONS.fullmatch(path.name) and path.is_file():
                shutil.copyfile(path, folder / path.name)

    # --- tensors ---

    def _fill(self, partial: Partial, progress: Progress) -> None:
        left = []
        for key, target in self.plan.targets.items():
            if key in self.done:
                progress.advance(self.output.nbytes(target))
            else:
                left.append(target)

        def work(target: Target) -> None:
            if self.stopping:
                return
            try:
                facts = self._fill_one(target, progress)
            except _Stopped:
                return  # another thread's error is the one to tell
            except BaseException:
                self.stopping = True  # the other threads need not go on
                raise
            partial.record_tensor(target.tensor.key, facts)
            self.done[target.tensor.key] = facts

        with ThreadPoolExecutor(self.plan.workers) as pool:
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
        before, after, codes, scales = (xxhash.xxh3_64() for _ in range(4))
        statistics = dtypes.CastStatistics()
        changes = target.dtype is None or target.dtype != tensor.dtype
        for position, values in self._pieces(target):
            if self.stopping:
                raise _Stopped
            before.update(_bytes(values))
            if target.dtype is None:
                self._fill_quantised(target, position, values, statistics, after, codes, scales)
            else:
                out = self._cast(values, target, statistics) if changes else values
                raw = _bytes(out)
                if changes:
                    after.update(raw)
                with disk_errors(self.destination):
                    self.output.write(target, position * target.dtype.itemsize, raw)
            progress.advance(values.size * (target.dtype.itemsize if target.dtype else 1) * (1 + len(target.copies)))
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
        if statistics.changed and tensor.entry.row.dtype == "float32":
            raise UserError(
                f"{self.weights.path}: {tensor.name} is {tensor.stored_dtype} and fp32 would round it, which never "
                "happens to it: store it as fp32"
            )
        if statistics.changed:
            facts["cast"] = statistics.as_dict()
            if target.dtype is None:
                del facts["cast"]["max_ulp_error"]  # it counts units of fp32, in which the values are compared
        # of the bytes as they were given, in the order of Output.checksum; the disk may have made others of them
        facts["file_xxh3_64"] = codes.hexdigest() + scales.hexdigest() if target.dtype is None else content
        return facts

    def _pieces(self, target: Target) -> Iterator[tuple[int, np.ndarray]]:
        """(first element, values) over the tensor; strips of 128 rows of one part where they will be quantised."""
        tensor, step = target.tensor, self.plan.steps[target.tensor.key]
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
                yield start, joined(tensor.read(start, start + size))

    def _fill_quantised(
        self,
        target: Target,
        position: int,
        values: np.ndarray,
        statistics: dtypes.CastStatistics,
        *digests: xxhash.xxh3_64,
    ) -> None:
        """Quantise a strip and write it; `digests` of what it means as fp32, of its elements and of its scales."""
        rows, columns = target.tensor.entry.part_shape
        part, within = divmod(position // columns, rows)
        strip = dtypes.cast(values, FLOAT32).reshape(-1, columns)
        try:
            weights, scales = quantised.quantise_fp8(strip, self.plan.scale_format)
        except ValueError as error:
            raise UserError(f"{self.weights.path}: {target.tensor.name} cannot be quantised: {error}") from None
        back = quantised.dequantise_fp8(weights, scales, 0)
        statistics.update(strip.reshape(-1), back.reshape(-1))
        raw = [_bytes(array.reshape(-1)) for array in (back, weights, scales)]
        for digest, content in zip(digests, raw, strict=True):
            digest.update(content)
        with disk_errors(self.destination):
            self.output.write_to(target, target.names[part], within * columns, raw[1])
            self.output.write_to(target, target.scales[part], within // quantised.BLOCK * len(raw[2]), raw[2])

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

    def _check_source(self, tensor: CanonicalTensor, checksum: str) -> None:
        written = (
            (self.weights.report or {}).get("tensors", {}).get(_report_name(tensor.key), {}).get("destination", {})
        )
        if written.get("dtype") == tensor.dtype.name and written.get("xxh3_64") != checksum:
            raise UserError(
                f"{self.weights.path}: {_report_name(tensor.key)} is not what was written there (checksum {checksum}, "
                f"{REPORT} says {written.get('xxh3_64')}): the file is damaged; if it was changed on purpose, remove "
                f"{REPORT}"
            )

    def _verify_copies(self, folder: Path) -> None:
        with open_weights(folder) as result:
            _check_copies(result)
            written = {copy for target in self.plan.targets.values() for copy in target.copies}
            if {copy.name for _, copy in result.copies} != written:
                raise UserError(f"{folder}: does not hold the copies {', '.join(sorted(written))} that were written")

    # --- the report ---

    def _report(self) -> dict[str, Any]:
        weights, plan = self.weights, self.plan
        parts = [part for target in plan.targets.values() for part in target.tensor.parts]
        read = [part.stored for part in parts] + [part.scales for part in parts if part.scales is not None]
        read += [copy for _, copy in weights.copies]
        return {
            "source": {"path": str(weights.path), "format": weights.format, "tensors": len(read),
                       "bytes": sum(stored.nbytes for stored in read)},
            "destination": {"format": self.options.to, "tensors": len(plan.tensors), "bytes": plan.nbytes,
                            "files": sorted(plan.files)},
            "options": {"dtype": self.options.dtype, "max_memory": self.options.max_memory},
            "mapped": len(plan.targets),
            "with_mtp": weights.with_mtp,
            "copies": [copy for _, copy in plan.copies],
            "ignored": [{"name": name, "rule": rule} for name, rule in weights.ignored],
            "notes": self.notes,
            "tensors": {_report_name(key): self.done[key] for key in plan.targets},
        }  # fmt: skip


def _not_carried(weights: Weights) -> list[str]:
    """Settings of a run's model that a Hugging Face config.json has no key for."""
    if weights.config_json is not None:
        return []
    ours, theirs = weights.config, ModelConfig.from_hf(weights.config.to_hf())
    lost = [
        f"{key}={value!r}" for key, value in ours.model_dump().items() if getattr(theirs, key) != getattr(ours, key)
    ]
    return [f"config.json has no key for {', '.join(lost)}: a run from it needs them anew"] if lost else []


def _report_name(key: str) -> str:
    """Parameters under their names alone, moments as adam_m/NAME."""
    return key.removeprefix(PARAMS)


def _check_copies(weights: Weights) -> None:
    for name, copy in weights.copies:
        original = weights.tensors[name].parts[0].stored
        for start in range(0, copy.nbytes, CHUNK):
            stop = min(start + CHUNK, copy.nbytes)
            if not np.array_equal(joined(original.pieces(start, stop)), joined(copy.pieces(start, stop))):
                raise UserError(
                    f"{weights.path}: {copy.name} differs from {name}; a prediction layer shares embedding and head "
                    "with the model (arXiv 2412.19437, 2.2)"
                )


def verify(weights: Weights, folder: Path, written: dict[str, dict[str, Any]], options: Options) -> int:
    """Read `folder` again and compare every tensor: to the checksum of what was written, and where no dtype changed to
    the source bit by bit. Returns the number of tensors; `UserError` naming the first that differs."""
    with open_weights(folder) as result:
        found = {
            tensor.key: tensor for group in (result.tensors, *result.moments.values()) for tensor in group.values()
        }
        sources = {t.key: t for group in (weights.tensors, *weights.moments.values()) for t in group.values()}
        with Progress("verifying", sum(t.nbytes for t in found.values()), options.quiet) as progress:
            for key, facts in written.items():
                _verify_one(found[key], sources[key], facts, options.max_memory, progress, folder)
    return len(written)


def _verify_one(
    tensor: CanonicalTensor,
    source: CanonicalTensor,
    facts: dict[str, Any],
    max_memory: int,
    progress: Progress,
    folder: Path,
) -> None:
    same = "cast" not in facts and source.dtype == tensor.dtype
    digest, step = xxhash.xxh3_64(), reading_step(tensor, max_memory)
    wrong = f"{folder}: {_report_name(tensor.key)} is not what was written: the disk does not return what it was given"
    for start in range(0, tensor.size, step):
        stop = min(start + step, tensor.size)
        values = joined(tensor.read(start, stop))
        if same and not np.array_equal(_bytes(values), _bytes(joined(source.read(start, stop)))):
            raise UserError(wrong)
        digest.update(_bytes(dtypes.cast(values, dtypes.from_name(facts["destination"]["dtype"]))))
        progress.advance(values.nbytes)
    if digest.hexdigest() != facts["destination"]["xxh3_64"]:
        raise UserError(wrong)


def joined(pieces: Iterator[np.ndarray]) -> np.ndarray:
    """Pieces as one array, a view where it is one piece."""
    arrays = [*pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)
