"""Two stores compared tensor by tensor: equal, or measured and, where that can be, explained.

Tensors are compared in threads, each within its part of the memory; arrangements are looked for by one at a time.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from weight_sync import dtypes
from weight_sync.canonical import CanonicalTensor, Weights
from weight_sync.differences.arrangements import explain
from weight_sync.differences.explanation import Explanation, is_explained, not_looked_at
from weight_sync.differences.figures import Contents, Statistics
from weight_sync.differences.fingerprints import PRINT_BYTES, as_matrices, fingerprints
from weight_sync.differences.in_place import block_factors, has_blocks, in_place, with_rounding
from weight_sync.differences.reading import (
    ELEMENT_BYTES,
    both,
    coarser_dtype,
    common_dtype,
    read,
    round_to,
    same_bits,
    step_within,
)
from weight_sync.differences.report import report_on
from weight_sync.progress import Progress

_HEAD = 64  # first elements by which a tensor's double under another name is looked for


def compare(
    a: Weights, b: Weights, max_memory: int = 2 << 30, quiet: bool = True, workers: int = min(4, os.cpu_count() or 1)
) -> dict[str, Any]:
    """The report on two stores, as --json writes it. `UserError` where one of them cannot be read."""
    return _Comparison(a, b, max_memory, quiet, workers).run()


class _Comparison:
    """One comparison under way."""

    def __init__(self, a: Weights, b: Weights, max_memory: int, quiet: bool, workers: int):
        self.a, self.b = a, b
        kinds = [kind for kind in a.moments if kind in b.moments]
        self.of_a, self.of_b = (_with_moments(weights, kinds) for weights in (a, b))
        self.common = [name for name in self.of_a if name in self.of_b]
        widest = max((self.of_a[name].shape[-1] for name in self.common), default=1)
        self.workers = max(1, min(workers, max_memory // (2 * widest * ELEMENT_BYTES)))
        self.budget = max_memory // 2 // self.workers  # of each; the other half is for fingerprints
        self.room_for_prints = max_memory // 2
        self.explaining = threading.Lock()
        self.stop = threading.Event()
        total = sum(of_one[name].nbytes for name in self.common for of_one in (self.of_a, self.of_b))
        self.progress = Progress("comparing", total, quiet)

    def run(self) -> dict[str, Any]:
        """Compare everything."""
        with self.progress:
            found = self._compare_all()
            rows = {name: found.get(name) or self._alone(name) for name in {**self.of_a, **self.of_b}}
            self._look_elsewhere(rows)
        return report_on(self.a, self.b, rows, self.budget)

    def _compare_all(self) -> dict[str, dict[str, Any]]:
        """Rows of the report for what is in both."""
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                running = {name: pool.submit(self._compare, name) for name in self.common}
                return {name: future.result() for name, future in running.items()}
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _alone(self, name: str) -> dict[str, Any]:
        tensor, key = (self.of_a[name], "a") if name in self.of_a else (self.of_b[name], "b")
        return {
            "status": f"only in {key.upper()}",
            "shape": {key: list(tensor.shape)},
            "dtype": {key: tensor.dtype.name},
            "stored": {key: tensor.stored_dtype},
            "explanation": None,
        }

    def _compare(self, name: str) -> dict[str, Any]:
        a, b = self.of_a[name], self.of_b[name]
        row = {
            "status": "equal",
            "shape": {"a": list(a.shape), "b": list(b.shape)},
            "dtype": {"a": a.dtype.name, "b": b.dtype.name},
            "stored": {"a": a.stored_dtype, "b": b.stored_dtype},
            "explanation": None,
        }
        with _Reading(self.progress, self.stop, a.nbytes + b.nbytes) as reading:
            if a.shape != b.shape:
                found = self._other_shape(a, b, reading)
                return row | {"status": "shape", "explanation": found and found.as_dict()}
            if contents := self._equal(a, b, reading):
                cosine = None if contents["all_zero"] else 1.0
                row |= {"differing": 0, "max_abs": 0.0, "max_rel": 0.0, "max_ulp": 0, "cosine": cosine,
                        "relative_l2": 0.0, "a": contents, "b": contents}  # fmt: skip
                if a.dtype != b.dtype:
                    same = Explanation("another dtype", "the same values", {})
                    row |= {"status": "dtype", "explanation": same.as_dict()}
                return row
            statistics = self._measured(a, b, reading)
        found = self._explained(a, b, statistics)
        return row | statistics.as_dict(a.shape) | {"status": "differs", "explanation": found and found.as_dict()}

    def _chunks(
        self, a: CanonicalTensor, b: CanonicalTensor, reading: "_Reading"
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first element, values of a, values of b), as far as both go."""
        width = a.dtype.itemsize + b.dtype.itemsize
        for start, x, y in both(a, b, step_within(self.budget, a, b)):
            yield start, x, y
            reading.to((start + x.size) * width)

    def _equal(self, a: CanonicalTensor, b: CanonicalTensor, reading: "_Reading") -> dict[str, Any] | None:
        """What is in both if their values are the same to the bit, in the dtype that holds both; else None."""
        contents, common = Contents(), common_dtype(a.dtype, b.dtype)
        for _, x, y in self._chunks(a, b, reading):
            x, y = dtypes.cast(x, common), dtypes.cast(y, common)
            if not same_bits(x, y):
                return None
            contents.update(x)
        return contents.as_dict()

    def _measured(self, a: CanonicalTensor, b: CanonicalTensor, reading: "_Reading") -> Statistics:
        statistics = Statistics(a, b)
        for start, x, y in self._chunks(a, b, reading):
            statistics.update(start, x, y)
        return statistics

    def _explained(self, a: CanonicalTensor, b: CanonicalTensor, statistics: Statistics) -> Explanation | None:
        found = in_place(statistics) or self._rearranged(a, b, statistics)
        if found and found.whole or not has_blocks(a):
            return found
        with self._once_more(a, b) as reading:
            factors = block_factors(a, b, self.budget, reading.advance)
        if factors and not factors.whole and found:
            return found._replace(text=f"{found.text}; {factors.text}")
        return factors or found

    def _rearranged(self, a: CanonicalTensor, b: CanonicalTensor, statistics: Statistics) -> Explanation | None:
        """B's tensor as A's in another arrangement; where one side holds only values of a narrower dtype and the other
        does not, after rounding to that."""
        if not self._has_room_for_prints(a):
            return not_looked_at("other arrangements")
        roundings = [rounding for rounding in statistics.roundings if rounding.rounded]
        for rounding in roundings or [None]:
            with self._once_more(a, b) as reading:
                found = self._arranged(a, b, rounding.dtype if rounding else statistics.common, reading)
            if found:
                return with_rounding(found, rounding) if rounding else found
        return None

    def _other_shape(self, a: CanonicalTensor, b: CanonicalTensor, reading: "_Reading") -> Explanation | None:
        """Transposed, or something added at the end."""
        dtype = coarser_dtype(a.dtype, b.dtype)
        if b.shape == (*a.shape[:-2], *a.shape[:-3:-1]):
            has_room = self._has_room_for_prints(a)
            return self._arranged(a, b, dtype, reading) if has_room else not_looked_at("other arrangements")
        if len(a.shape) == len(b.shape) and a.shape[1:] == b.shape[1:]:
            chunks = self._chunks(a, b, reading)
            if all(same_bits(round_to(x, dtype), round_to(y, dtype)) for _, x, y in chunks):
                rows, what = min(a.shape[0], b.shape[0]), ("elements", "rows", "experts")[len(a.shape) - 1]
                return Explanation(f"{what} added or cut off", f"the first {rows} {what} are the same", {"same": rows})
        return None

    def _has_room_for_prints(self, tensor: CanonicalTensor) -> bool:
        stack, height, width = as_matrices(tensor.shape)
        return stack * (height + width) * PRINT_BYTES <= self.room_for_prints

    def _arranged(
        self, a: CanonicalTensor, b: CanonicalTensor, dtype: np.dtype, reading: "_Reading"
    ) -> Explanation | None:
        step = step_within(self.budget, a, b)
        with self.explaining:
            prints = [fingerprints(tensor, dtype, step, reading.advance) for tensor in (a, b)]
            return explain(a, *prints, self.a.config)

    def _look_elsewhere(self, rows: dict[str, dict[str, Any]]) -> None:
        """Explain tensors of B that are another tensor of A: gate for up, one layer for another."""
        heads: dict[str, np.ndarray] = {}
        for name in [name for name, row in rows.items() if row["status"] == "differs" and not is_explained(row)]:
            b = self.of_b[name]
            head = read(b, 0, min(_HEAD, b.size))
            for other, a in self.of_a.items():
                if other == name or a.shape != b.shape:
                    continue
                if other not in heads:
                    heads[other] = read(a, 0, min(_HEAD, a.size))
                dtype = coarser_dtype(a.dtype, b.dtype)
                if not same_bits(round_to(heads[other], dtype), round_to(head, dtype)):
                    continue
                with self._once_more(a, b) as reading:
                    chunks = self._chunks(a, b, reading)
                    same = all(same_bits(round_to(x, dtype), round_to(y, dtype)) for _, x, y in chunks)
                if same:
                    found = Explanation("another tensor", f"is A's {other}", {"tensor": other})
                    rows[name]["explanation"] = found.as_dict()
                    break
        _join_exchanges(rows)

    def _once_more(self, a: CanonicalTensor, b: CanonicalTensor) -> "_Reading":
        """A reading of both tensors that the progress bar has not counted with."""
        self.progress.expect(a.nbytes + b.nbytes)
        return _Reading(self.progress, self.stop, a.nbytes + b.nbytes)


def _with_moments(weights: Weights, kinds: Sequence[str]) -> dict[str, CanonicalTensor]:
    """The parameters, and the moments of the optimizer as adam_m/NAME."""
    return {**weights.tensors, **{t.key: t for kind in kinds for t in weights.moments[kind].values()}}


def _join_exchanges(rows: dict[str, dict[str, Any]]) -> None:
    """Gate that is A's up, with up that is A's gate."""
    for gate in rows:
        if not gate.endswith(".gate_proj.weight"):
            continue
        up = gate.replace(".gate_proj.", ".up_proj.")
        held = [(rows.get(name, {}).get("explanation") or {}).get("tensor") for name in (gate, up)]
        if held == [up, gate]:
            for name, other in ((gate, up), (up, gate)):
                kind = "gate and up exchanged"
                rows[name]["explanation"] = Explanation(kind, kind, {"tensor": other}).as_dict()


class _Reading:
    """Bytes of tensors on their way, on the progress bar, which at the end expects no more of what was left out.

    `InterruptedError` once the comparison is to stop.
    """

    def __init__(self, progress: Progress, stop: threading.Event, nbytes: int):
        self.progress, self.stop, self.nbytes, self.done = progress, stop, nbytes, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.expect(self.done - self.nbytes)

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self.to(self.done + count)

    def to(self, done: int) -> None:
        """So many are done; nothing new where a second look began at the start again."""
        if self.stop.is_set():
            raise InterruptedError
        if done > self.done:
            self.progress.advance(done - self.done)
            self.done = done
