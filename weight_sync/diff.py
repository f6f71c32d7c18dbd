"""Two stores of weights, of any formats, compared tensor by tensor in canonical form.

    python -m weight_sync diff A B [--json FILE] [--config FILE] [--config-b FILE] [--max-memory SIZE] [--limit N]

A tensor that differs is measured, and where its values are the other's in another arrangement (transposed, experts
permuted, gate and up exchanged, rotary rows in another order, another tensor's) or the other's rounded, that is said:
ports go wrong in these ways. Nothing larger than a strip of a tensor is in memory: arrangements are recognised by
64-bit fingerprints of rows and columns.
"""

import argparse
import json
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from shared_ops.config import ModelConfig
from shared_ops.errors import EXIT_DIFFERENT, EXIT_OK, UserError
from shared_ops.files import write_atomically
from shared_ops.params import CORRECTION_BIAS, layer_of
from weight_sync import dtypes
from weight_sync.canonical import BFLOAT16, FLOAT32, CanonicalTensor, Weights, open_weights
from weight_sync.convert import parse_size
from weight_sync.layouts import rope_permutation
from weight_sync.progress import Progress, sized
from weight_sync.quantised import BLOCK as FP8_BLOCK
from weight_sync.stores.base import Stored

FLOAT16, FLOAT64 = np.dtype(np.float16), np.dtype(np.float64)
DEFINITIONS = {
    "bitwise equal": "same shape, dtype and bits, read in canonical form (FP8 and FP4 dequantised)",
    "max_abs": "largest |a - b|, over elements that are finite on both sides",
    "max_rel": "largest |a - b| / max(|a|, |b|), likewise; 2 means opposite signs of one size",
    "max_ulp": "largest number of representable values from a to b, likewise, in the wider dtype where these differ",
    "cosine": "a·b / (|a| |b|); null where either is all zero",
    "relative_l2": "|a - b| / max(|a|, |b|) of the whole tensors, by which the table is sorted",
}
# fields of a configuration that training uses and that no weights' meaning depends on; prediction layers that are not
# there on one side count by their tensors
TRAINING_ONLY = ("aux_loss_alpha", "router_z_loss_coef", "mtp_loss_weight", "initializer_range", "expert_placement",
                 "num_nextn_predict_layers")  # fmt: skip

_STEP = 1 << 18  # elements read at once
_TEMPORARY = 96 << 10  # bytes of a temporary array: larger ones leave the cache, and malloc maps them anew every time
_BLOCK = _TEMPORARY // 8
_ELEMENT_BYTES = 128  # memory for one element read at once, on both sides
_PRINT_BYTES = 64  # memory for a row or column: both sides' fingerprints, and what their comparison needs
_FIGURES = ("max abs", "max rel", "max ulp", "cosine")
_WIDE = 150  # columns of a terminal in which everything has a column of its own
_HEAD = 64  # first elements by which a tensor's double under another name is looked for


# --- reading both sides ---------------------------------------------------------------------------------------------


def _read(tensor: CanonicalTensor, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) as one array."""
    pieces = [*tensor.read(start, stop)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _step(budget: int, *tensors: CanonicalTensor) -> int:
    """Elements to read at once: whole rows where they fit; a quantised tensor cannot be read in less."""
    columns = max(tensor.shape[-1] for tensor in tensors)
    step = min(_STEP, budget // _ELEMENT_BYTES)
    if step < columns:
        quantised = [tensor.name for tensor in tensors if tensor.is_quantised]
        if quantised:
            raise UserError(
                f"--max-memory is too little: to read a row of {quantised[0]}, which is quantised, takes "
                f"{sized(2 * columns * _ELEMENT_BYTES)}"
            )
        return max(step, 1)
    return step // columns * columns


def _both(a: CanonicalTensor, b: CanonicalTensor, step: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first element, values of a, values of b) over two tensors of one shape."""
    for start in range(0, a.size, step):
        stop = min(start + step, a.size)
        yield start, _read(a, start, stop), _read(b, start, stop)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and size have the same bytes; eight are compared at a time."""
    a, b = (np.ascontiguousarray(values).view(np.uint8) for values in (a, b))
    whole = len(a) // 8 * 8
    words = a[:whole].view(np.uint64) == b[:whole].view(np.uint64)
    return bool(words.all()) and np.array_equal(a[whole:], b[whole:])


def _round(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` in another floating dtype; what is too large becomes infinite."""
    try:
        return dtypes.cast(values, dtype)
    except dtypes.CastOverflow:
        with np.errstate(over="ignore"):
            return values.astype(FLOAT64).astype(dtype)


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype that holds both exactly."""
    return a if a == b else FLOAT64 if FLOAT64 in (a, b) else FLOAT32


def coarser_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The one with fewer digits."""
    return max(a, b, key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))


class _Contents:
    """Whether a tensor is all zero, and its numbers of NaN and infinities, chunk by chunk."""

    def __init__(self) -> None:
        self.zero, self.nan, self.inf = True, 0, 0

    def update(self, values: np.ndarray) -> None:
        infinity = _bits(np.array(np.inf, values.dtype))
        magnitude = np.array(np.iinfo(infinity.dtype).max >> 1, infinity.dtype)
        block = _TEMPORARY // values.dtype.itemsize
        for start in range(0, values.size, block):
            part = values[start : start + block]
            largest = (_bits(part) & magnitude).max()
            self.zero = self.zero and bool(largest == 0)
            if largest >= infinity:
                nan = int(np.isnan(part).sum())
                self.nan += nan
                self.inf += int((~np.isfinite(part)).sum()) - nan

    def as_dict(self) -> dict[str, Any]:
        return {"all_zero": self.zero, "nan": self.nan, "inf": self.inf}


# --- measuring ------------------------------------------------------------------------------------------------------


class _Rounding:
    """Do both sides agree when rounded to `dtype`, and which of them hold nothing but its values?"""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.agree, self.exact_a, self.exact_b = dtype, True, True, True

    def update(self, a: np.ndarray, b: np.ndarray) -> None:
        if not (self.exact_a or self.exact_b):
            return
        low_a, low_b = _round(a, self.dtype), _round(b, self.dtype)
        self.exact_a = self.exact_a and np.array_equal(_bits(dtypes.cast(low_a, a.dtype)), _bits(a))
        self.exact_b = self.exact_b and np.array_equal(_bits(dtypes.cast(low_b, b.dtype)), _bits(b))
        self.agree = self.agree and np.array_equal(_bits(low_a), _bits(low_b))

    @property
    def rounded(self) -> str | None:
        """Which side can be the other one rounded, however arranged."""
        if self.exact_a == self.exact_b:
            return None
        return "B" if self.exact_b else "A"


class _Factor:
    """Is b = factor · a, up to the rounding of their dtypes, and not b = a?"""

    def __init__(self, dtype: np.dtype):
        """`dtype`: the coarser one."""
        facts = ml_dtypes.finfo(dtype)
        self.eps, self.smallest = float(facts.eps), float(facts.smallest_subnormal)
        self.factor: float | None = None
        self.holds, self.is_one, self.seen = True, True, 0

    def update(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add float64 values."""
        if not self.holds:
            return
        if self.factor is None and (square := float(a @ a)) > 0:
            self.factor = float(a @ b) / square
        self.seen += int(np.count_nonzero(a))
        self.is_one = self.is_one and self._near(a, b)
        if not self.is_one:
            self.holds = self._near(a * (self.factor or 0.0), b)

    def _near(self, expected: np.ndarray, b: np.ndarray) -> bool:
        return bool((np.abs(b - expected) <= self.eps * np.abs(expected) + self.smallest).all())

    @property
    def found(self) -> bool:
        """Whether there is a factor, over enough elements to mean something."""
        return self.holds and not self.is_one and bool(self.factor) and self.seen >= 4


class _Statistics:
    """What `DEFINITIONS` says, block by block, and how the values of two tensors hang together in their places."""

    def __init__(self, a: CanonicalTensor, b: CanonicalTensor):
        self.common = common_dtype(a.dtype, b.dtype)
        narrow = a.dtype == b.dtype and a.dtype in (BFLOAT16, FLOAT16)
        self.roundings = [] if narrow else [_Rounding(BFLOAT16), _Rounding(FLOAT16)]
        self.factor = _Factor(coarser_dtype(a.dtype, b.dtype))
        self.fp8 = a.is_quantised != b.is_quantised
        self.fp8_b = b.is_quantised
        self.fp8_excess = self.largest = 0.0
        self.differing = self.one_sided = self.max_ulp = 0
        self.max_abs = self.max_rel = self.dot = self.square_a = self.square_b = self.square_difference = 0.0
        self.worst = (0, 0.0, 0.0)  # position, value of a, value of b
        self.contents_a, self.contents_b = _Contents(), _Contents()

    def update(self, start: int, a: np.ndarray, b: np.ndarray) -> None:
        """Add the elements from `start` on."""
        for at in range(0, a.size, _BLOCK):
            x, y = (dtypes.cast(values[at : at + _BLOCK], self.common) for values in (a, b))
            self._update(start + at, x, y)

    def _update(self, start: int, a: np.ndarray, b: np.ndarray) -> None:
        self.contents_a.update(a)
        self.contents_b.update(b)
        for rounding in self.roundings:
            rounding.update(a, b)
        unequal = _bits(a) != _bits(b)
        differing = int(np.count_nonzero(unequal))
        if differing and not self.differing:  # until a larger difference comes, which -0 and NaN have none of
            first = int(unequal.argmax())
            self.worst = (start + first, float(a[first]), float(b[first]))
        self.differing += differing
        finite = np.isfinite(a) & np.isfinite(b)
        if not finite.all():
            self.one_sided += int(np.count_nonzero(unequal & ~finite & ~(np.isnan(a) & np.isnan(b))))
            a, b = (np.where(finite, values, values.dtype.type(0)) for values in (a, b))
        x, y = a.astype(FLOAT64), b.astype(FLOAT64)
        self.factor.update(x, y)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.dot += float(x @ y)
            self.square_a += float(x @ x)
            self.square_b += float(y @ y)
            if not differing:
                self.largest = max(self.largest, float(np.abs(x).max()))
                return
            difference = np.abs(x - y)
            self.square_difference += float(difference @ difference)
            self._worst(start, difference, x, y)
            np.abs(x, out=x)
            np.abs(y, out=y)
            if self.fp8:
                stored = y if self.fp8_b else x
                self.fp8_excess = max(self.fp8_excess, float((difference - stored * (2**-4 + 2**-8)).max()))
            larger = np.maximum(x, y, out=x)
            self.largest = max(self.largest, float(larger.max()))
            self.max_rel = max(self.max_rel, float(np.fmax.reduce(difference / larger, initial=0.0)))
        self.max_ulp = max(self.max_ulp, int(dtypes.ulp_distance(a, b).max()))

    def _worst(self, start: int, difference: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        at = int(difference.argmax())
        if difference[at] > self.max_abs:
            self.max_abs, self.worst = float(difference[at]), (start + at, float(x[at]), float(y[at]))

    @property
    def within_fp8(self) -> bool:
        """Whether rounding to FP8 blocks explains every difference: half a unit of E4M3's three digits, or of its
        subnormals under the largest scale there can be (a block's largest / 448, up to twice that as a power of 2)."""
        return self.fp8 and self.one_sided == 0 and self.fp8_excess <= 2 * self.largest / 448 * 2**-10

    def as_dict(self, shape: Sequence[int]) -> dict[str, Any]:
        norm_a, norm_b = math.sqrt(self.square_a), math.sqrt(self.square_b)
        largest_norm = max(norm_a, norm_b)
        at, x, y = self.worst
        return {
            "differing": self.differing,
            "max_abs": _number(self.max_abs),
            "max_rel": _number(self.max_rel),
            "max_ulp": self.max_ulp,
            "cosine": _number(self.dot / norm_a / norm_b) if norm_a and norm_b else None,
            "relative_l2": _number(math.sqrt(self.square_difference) / largest_norm) if largest_norm else 0.0,
            "worst": {"index": [int(i) for i in np.unravel_index(at, shape)], "a": _number(x), "b": _number(y)},
            "not_finite_in_one": self.one_sided,
            "a": self.contents_a.as_dict(),
            "b": self.contents_b.as_dict(),
        }


def _number(value: float) -> float | None:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else None


# --- fingerprints ---------------------------------------------------------------------------------------------------


class Prints(NamedTuple):
    """Fingerprints of a tensor seen as S stacked matrices [R, C]: uint64 `rows` [S, R] and `columns` [S, C].

    Σ key[i] · bits[i] mod 2**64 over a row's or a column's elements, with the same keys for both, so that a matrix's
    rows and its transpose's columns have the same ones.
    """

    rows: np.ndarray
    columns: np.ndarray


def as_matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """(S, R, C) of a tensor; a vector is one column."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape), 1)


def _keys(count: int) -> np.ndarray:
    """The same pseudo-random uint64 numbers every time (splitmix64: Steele, Lea, Flood 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fingerprints(tensor: CanonicalTensor, dtype: np.dtype, step: int) -> Prints:
    """Of the tensor's values in `dtype`, read `step` elements at a time."""
    stack, height, width = as_matrices(tensor.shape)
    keys = _keys(max(height, width))
    rows, columns = np.zeros(stack * height, np.uint64), np.zeros((stack, width), np.uint64)
    for start in range(0, tensor.size, step):
        values = _read(tensor, start, min(start + step, tensor.size))
        while values.size:
            row, column = divmod(start, width)
            matrix, within = divmod(row, height)
            # whole rows of one matrix, few enough for the cache, or else a part of one row
            count = min(values.size // width, height - within, max(_BLOCK // width, 1)) if column == 0 else 0
            taken = values[: count * width if count else min(width - column, _BLOCK)]
            bits = _bits(_round(taken, dtype)).astype(np.uint64)
            if count:
                bits = bits.reshape(count, width)
                rows[row : row + count] = np.einsum("ij,j->i", bits, keys[:width])
                columns[matrix] += np.einsum("i,ij->j", keys[within : within + count], bits)
            else:
                rows[row : row + 1] += np.einsum("j,j->", bits, keys[column : column + bits.size])
                columns[matrix, column : column + bits.size] += keys[within] * bits
            start, values = start + taken.size, values[taken.size :]
    return Prints(rows.reshape(stack, height), columns)


# --- explaining -----------------------------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """How B's tensor comes from A's: `kind` for counting, `text` to read, `facts` for programs.

    `whole` is False where it accounts for a part of the tensor only.
    """

    kind: str
    text: str
    facts: dict[str, Any]
    whole: bool = True


def row_orders(name: str, rows: int, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(what a port did, order) such that B's row r is A's row order[r], for one kind of tensor."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    index, heads = np.arange(rows), config.num_attention_heads
    if module == "gate_up_proj":
        exchanged = np.roll(index, rows // 2)
        yield "gate and up exchanged", exchanged
        for halves, what in ((index, "gate and up"), (exchanged, "up and gate")):
            woven = halves.reshape(2, -1).T.reshape(-1)
            yield f"{what} rows alternate in B, A has halves (gate first)", woven
            yield f"{what} rows alternate in A, B has halves (gate first)", np.argsort(woven)
    elif module in ("q_proj", "q_b_proj"):
        yield from _rope_orders(rows, heads, config.qk_rope_head_dim)
        yield from _two_part_orders(index.reshape(heads, -1), config.qk_nope_head_dim, "nope", "rope")
    elif module == "kv_a_proj_with_mqa":
        yield from _rope_orders(rows, 1, config.qk_rope_head_dim)
        yield from _two_part_orders(index.reshape(1, -1), config.kv_lora_rank, "latent", "rope")
    elif module == "kv_b_proj":
        yield from _two_part_orders(index.reshape(heads, -1), config.qk_nope_head_dim, "k_nope", "v")


def _rope_orders(rows: int, heads: int, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "rotary rows: interleaved pairs in A, halves in B", rope_permutation(rows, heads, dim, True)
    yield "rotary rows: halves in A, interleaved pairs in B", rope_permutation(rows, heads, dim, False)


def _two_part_orders(heads: np.ndarray, cut: int, first: str, second: str) -> Iterator[tuple[str, np.ndarray]]:
    """Orders that ports take for rows [H, first | second]: parts gathered over the heads, or second before first."""
    gathered = np.concatenate([heads[:, :cut].reshape(-1), heads[:, cut:].reshape(-1)])
    swapped = np.concatenate([heads[:, cut:], heads[:, :cut]], axis=1).reshape(-1)
    yield f"{first} and {second} rows: per head in A, all {first} before all {second} in B", gathered
    yield f"{first} and {second} rows: all {first} before all {second} in A, per head in B", np.argsort(gathered)
    yield f"{first} and {second} rows: {first} first in A, {second} first in B", swapped
    yield f"{first} and {second} rows: {second} first in A, {first} first in B", np.argsort(swapped)


def column_orders(name: str, columns: int) -> Iterator[tuple[str, np.ndarray]]:
    """As `row_orders`, for columns."""
    if name.endswith(".eh_proj.weight"):
        yield "columns of embedding and hidden state exchanged", np.roll(np.arange(columns), columns // 2)


def explain(tensor: CanonicalTensor, a: Prints, b: Prints, config: ModelConfig) -> Explanation | None:
    """How a tensor's rows and columns in B come from those in A; None where they do not."""
    is_matrix, experts = len(tensor.shape) > 1, "experts" if len(tensor.shape) == 3 else "router rows"
    height, partly = a.rows.shape[1], None
    router = tensor.entry.parameter.axes[0] == "router" and a.rows.shape == b.rows.shape
    if router:  # its rows are the experts'
        source = _sources(a.rows.reshape(-1, 1), b.rows.reshape(-1, 1))
        if (source >= 0).all():
            return _arranged(source, "", False, experts)
        partly = _partly(source, experts)
    for transposed in (False, True) if is_matrix else (False,):
        there = b.columns if transposed else b.rows
        orders = [("", np.arange(height)), *row_orders(tensor.name, height, config)]
        for text, order in orders if there.shape == a.rows.shape else ():
            source = _sources(a.rows[:, order], there)
            if (source >= 0).all():
                return _arranged(source, text, transposed, experts)
            if not (text or transposed or router):
                partly = _partly(source, experts)
    for text, order in column_orders(tensor.name, a.columns.shape[1]):
        if a.columns.shape == b.columns.shape and np.array_equal(a.columns[:, order], b.columns):
            return Explanation(text, text, {"columns": text})
    what = "rows" if is_matrix else "elements"
    if a.rows.shape == b.rows.shape and _same_set(a.rows, b.rows):
        return Explanation(f"{what} in another order", f"the same {what} in another order", {"rows": "other"})
    if is_matrix and a.columns.shape == b.columns.shape and _same_set(a.columns, b.columns):
        return Explanation("columns in another order", "the same columns in another order", {"columns": "other"})
    return partly


def _same_set(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))


def _sources(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For every block of b [S, N] the place of an equal block in a [S, N], -1 where there is none: its own place before
    others, one not yet taken before one that is."""
    here, wanted = ([xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks] for blocks in (a, b))
    source = np.array([place if here[place] == digest else -1 for place, digest in enumerate(wanted)])
    holders: dict[int, list[int]] = {}
    free: dict[int, list[int]] = {}
    for place, digest in enumerate(here):
        holders.setdefault(digest, []).append(place)
        if source[place] < 0:
            free.setdefault(digest, []).append(place)
    for place, digest in enumerate(wanted):
        if source[place] < 0 and digest in holders:
            source[place] = free[digest].pop(0) if free.get(digest) else holders[digest][0]
    return source


def _arranged(source: np.ndarray, rows: str, transposed: bool, experts: str) -> Explanation:
    kinds, parts, facts = [], [], {}
    if not np.array_equal(source, np.arange(len(source))):
        kind, text = describe_experts(source.tolist(), experts)
        kinds.append(kind)
        parts.append(text)
        facts["experts"] = source.tolist()
    if rows:
        kinds.append(rows)
        parts.append(rows)
        facts["rows"] = rows
    if transposed:
        kinds.append("transposed")
        parts.append("every expert transposed" if experts == "experts" else "transposed")
        facts["transposed"] = True
    return Explanation(" and ".join(kinds), "; ".join(parts), facts)


def _partly(source: np.ndarray, experts: str) -> Explanation | None:
    """Where some of the experts are there."""
    found = source >= 0
    if not found.any():
        return None
    text = f"{found.sum()} of {len(source)} {experts} are A's; those of other values: {_listed(np.where(~found)[0])}"
    if (moved := found & (source != np.arange(len(source)))).any():
        text += f"; {moved.sum()} of A's are in another slot"
    return Explanation("partly", text, {"experts": source.tolist()}, whole=False)


def describe_experts(source: Sequence[int], what: str = "experts") -> tuple[str, str]:
    """(kind, text) for which expert of A each slot of B holds."""
    count, own = len(source), list(range(len(source)))
    by_text = sorted(own, key=str)
    moved = [f"{slot} holds {expert}" for slot, expert in enumerate(source) if slot != expert]
    some = ", ".join(moved[:6]).replace(" holds ", " holds expert ", 1)
    some = f"slot {some}" + (f", … ({len(moved)} of {count} moved)" if len(moved) > 6 else "")
    if sorted(source) != own:
        return f"{what} repeated", f"{what} repeated: {some}; nowhere in B: {_listed(sorted(set(own) - set(source)))}"
    if source in (by_text, np.argsort(by_text).tolist()):
        side = "B" if source == by_text else "A"
        some = f"{side} has them in the order of their numbers as text ({_listed(by_text[:4])}, …)"
    elif count > 2 and len({(expert - slot) % count for slot, expert in enumerate(source)}) == 1:
        some = f"slot s holds expert (s + {source[0]}) mod {count}"
    elif count > 2 and source == own[::-1]:
        some = "in reverse order"
    return f"{what} permuted", f"{what} permuted: {some}"


def _listed(items: Sequence[Any], limit: int = 6) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(str(item) for item in items[:limit]) + more


def _in_place(found: _Statistics) -> Explanation | None:
    """What the values of both sides have to do with each other, each in its place."""
    for side, mine, other in (("B", found.contents_b, found.contents_a), ("A", found.contents_a, found.contents_b)):
        if mine.zero and not other.zero:
            return Explanation(f"all zero in {side}", f"all zero in {side}", {"all_zero": side})
    for rounding in found.roundings:
        if rounding.agree and rounding.rounded:
            return _rounded(rounding, None)
    if found.one_sided == 0 and found.factor.found:
        factor = found.dot / found.square_a
        return Explanation("a constant factor", f"B is A times {factor:.5g}", {"factor": factor})
    if found.within_fp8:
        side = "B" if found.fp8_b else "A"
        text = f"within the rounding of {side}'s FP8 blocks"
        return Explanation("rounded to FP8", text, {"rounded": "fp8", "side": side})
    return None


def _rounded(rounding: _Rounding, arranged: Explanation | None) -> Explanation:
    side, kind = rounding.rounded, f"rounded to {rounding.dtype}"
    text = f"{side} is {'A' if side == 'B' else 'B'} rounded to {rounding.dtype}"
    facts = {"rounded": rounding.dtype.name, "side": side}
    if arranged is None:
        return Explanation(kind, text, facts)
    kind, text, facts = f"{arranged.kind} and {kind}", f"{arranged.text}; {text}", {**arranged.facts, **facts}
    return Explanation(kind, text, facts, arranged.whole)


def block_factors(a: CanonicalTensor, b: CanonicalTensor, budget: int) -> tuple[float, float] | None:
    """(smallest, largest) factor if B is A times one number in each FP8 block of 128 x 128, else None."""
    if len(a.entry.part_shape) != 2:
        return None
    height, width = a.entry.part_shape
    if height * width <= FP8_BLOCK**2 or FP8_BLOCK * width * _ELEMENT_BYTES > budget:
        return None
    factors, found = [], False
    for part in range(0, a.size, height * width):
        for row in range(0, height, FP8_BLOCK):
            start, stop = part + row * width, part + min(row + FP8_BLOCK, height) * width
            x, y = (_read(tensor, start, stop).astype(FLOAT64).reshape(-1, width) for tensor in (a, b))
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                return None
            for column in range(0, width, FP8_BLOCK):
                factor = _Factor(coarser_dtype(a.dtype, b.dtype))
                factor.update(*(strip[:, column : column + FP8_BLOCK].reshape(-1) for strip in (x, y)))
                if not factor.holds:
                    return None
                found = found or factor.found
                if factor.factor is not None:
                    factors.append(factor.factor)
    return (min(factors), max(factors)) if found else None


# --- comparing ------------------------------------------------------------------------------------------------------


def compare(
    a: Weights, b: Weights, max_memory: int = 2 << 30, quiet: bool = True, workers: int = min(4, os.cpu_count() or 1)
) -> dict[str, Any]:
    """The report on two stores, as --json writes it. `UserError` where one of them cannot be read."""
    return _Comparison(a, b, max_memory, quiet, workers).run()


class _Comparison:
    """One comparison under way."""

    def __init__(self, a: Weights, b: Weights, max_memory: int, quiet: bool, workers: int):
        self.a, self.b, self.quiet = a, b, quiet
        kinds = [kind for kind in a.moments if kind in b.moments]
        self.of_a, self.of_b = (_with_moments(weights, kinds) for weights in (a, b))
        self.common = [name for name in self.of_a if name in self.of_b]
        widest = max((self.of_a[name].shape[-1] for name in self.common), default=1)
        self.workers = max(1, min(workers, max_memory // (2 * widest * _ELEMENT_BYTES)))
        self.budget = max_memory // 2 // self.workers  # of each; the other half is for fingerprints
        self.room_for_prints = max_memory // 2
        self.explaining = threading.Lock()
        self.stopping = False

    def run(self) -> dict[str, Any]:
        """Compare everything."""
        total = sum(tensor.nbytes for name in self.common for tensor in (self.of_a[name], self.of_b[name]))
        with Progress("comparing", total, self.quiet) as progress, ThreadPoolExecutor(self.workers) as pool:
            running = {name: pool.submit(self._compare, name, progress) for name in self.common}
            try:
                found = {name: future.result() for name, future in running.items()}
            except BaseException:
                self.stopping = True
                pool.shutdown(cancel_futures=True)
                raise
        rows = {name: found.get(name) or self._alone(name) for name in {**self.of_a, **self.of_b}}
        self._look_elsewhere(rows)
        return self._report(rows)

    def _alone(self, name: str) -> dict[str, Any]:
        tensor, key = (self.of_a[name], "a") if name in self.of_a else (self.of_b[name], "b")
        return {
            "status": f"only in {key.upper()}",
            "shape": {key: list(tensor.shape)},
            "dtype": {key: tensor.dtype.name},
            "stored": {key: tensor.stored_dtype},
            "explanation": None,
        }

    def _compare(self, name: str, progress: Progress) -> dict[str, Any]:
        a, b = self.of_a[name], self.of_b[name]
        row = {
            "status": "equal",
            "shape": {"a": list(a.shape), "b": list(b.shape)},
            "dtype": {"a": a.dtype.name, "b": b.dtype.name},
            "stored": {"a": a.stored_dtype, "b": b.stored_dtype},
            "explanation": None,
        }
        reached = _Reached(progress, a.dtype.itemsize + b.dtype.itemsize)
        if a.shape != b.shape:
            row |= {"status": "shape", "explanation": _as_dict(self._other_shape(a, b))}
        elif contents := self._equal(a, b, reached):
            cosine = None if contents["all_zero"] else 1.0
            row |= {"differing": 0, "max_abs": 0.0, "max_rel": 0.0, "max_ulp": 0, "cosine": cosine, "relative_l2": 0.0,
                    "a": contents, "b": contents}  # fmt: skip
            if a.dtype != b.dtype:
                same = Explanation("another dtype", "the same values", {})
                row |= {"status": "dtype", "explanation": _as_dict(same)}
        else:
            row |= self._measure(a, b, reached)
        reached.to(a.size)
        return row

    def _chunks(self, a: CanonicalTensor, b: CanonicalTensor) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for start, x, y in _both(a, b, _step(self.budget, a, b)):
            if self.stopping:
                raise InterruptedError
            yield start, x, y

    def _equal(self, a: CanonicalTensor, b: CanonicalTensor, reached: "_Reached") -> dict[str, Any] | None:
        """What is in both if their values are the same to the bit, in the dtype that holds both; else None."""
        contents, common = _Contents(), common_dtype(a.dtype, b.dtype)
        for start, x, y in self._chunks(a, b):
            x, y = dtypes.cast(x, common), dtypes.cast(y, common)
            if not _same_bits(x, y):
                return None
            contents.update(x)
            reached.to(start + x.size)
        return contents.as_dict()

    def _measure(self, a: CanonicalTensor, b: CanonicalTensor, reached: "_Reached") -> dict[str, Any]:
        statistics = _Statistics(a, b)
        for start, x, y in self._chunks(a, b):
            statistics.update(start, x, y)
            reached.to(start + x.size)
        found = _in_place(statistics) or self._rearranged(a, b, statistics)
        if (found is None or not found.whole) and (factors := block_factors(a, b, self.budget)):
            text = "B is A times one factor per 128 x 128 block, {:.5g} to {:.5g}: FP8 scales left out or misapplied"
            found = Explanation("a factor per FP8 block", text.format(*factors), {"block_factors": list(factors)})
        return {**statistics.as_dict(a.shape), "status": "differs", "explanation": _as_dict(found)}

    def _rearranged(self, a: CanonicalTensor, b: CanonicalTensor, statistics: _Statistics) -> Explanation | None:
        """B's tensor as A's in another arrangement; where one side holds only values of a narrower dtype and the other
        does not, after rounding to that."""
        roundings = [rounding for rounding in statistics.roundings if rounding.rounded]
        for rounding in roundings:
            if found := self._explain(a, b, rounding.dtype):
                return _rounded(rounding, found)
        return None if roundings else self._explain(a, b, statistics.common)

    def _other_shape(self, a: CanonicalTensor, b: CanonicalTensor) -> Explanation | None:
        """Transposed, or something added at the end."""
        dtype = coarser_dtype(a.dtype, b.dtype)
        if b.shape == (*a.shape[:-2], *a.shape[:-3:-1]):
            return self._explain(a, b, dtype)
        if len(a.shape) == len(b.shape) and a.shape[1:] == b.shape[1:]:
            size, rows = min(a.size, b.size), min(a.shape[0], b.shape[0])
            step = _step(self.budget, a, b)
            parts = ([_read(t, at, min(at + step, size)) for t in (a, b)] for at in range(0, size, step))
            if all(_same_bits(*(_round(values, dtype) for values in part)) for part in parts):
                what = ("elements", "rows", "experts")[len(a.shape) - 1]
                return Explanation(f"{what} added or cut off", f"the first {rows} {what} are the same", {"same": rows})
        return None

    def _explain(self, a: CanonicalTensor, b: CanonicalTensor, dtype: np.dtype) -> Explanation | None:
        stack, height, width = as_matrices(a.shape)
        if stack * (height + width) * _PRINT_BYTES > self.room_for_prints:
            text = "not looked at for other arrangements: --max-memory is too little"
            return Explanation("not looked at", text, {}, whole=False)
        step = _step(self.budget, a, b)
        with self.explaining:
            return explain(a, fingerprints(a, dtype, step), fingerprints(b, dtype, step), self.a.config)

    def _look_elsewhere(self, rows: dict[str, dict[str, Any]]) -> None:
        """Explain tensors of B that are another tensor of A: gate for up, one layer for another."""
        heads: dict[str, np.ndarray] = {}
        for name in [name for name, row in rows.items() if row["status"] == "differs" and not _is_explained(row)]:
            b = self.of_b[name]
            head = _read(b, 0, min(_HEAD, b.size))
            for other, a in self.of_a.items():
                if other == name or a.shape != b.shape:
                    continue
                if other not in heads:
                    heads[other] = _read(a, 0, min(_HEAD, a.size))
                dtype = coarser_dtype(a.dtype, b.dtype)
                if _same_bits(_round(heads[other], dtype), _round(head, dtype)) and all(
                    _same_bits(_round(x, dtype), _round(y, dtype)) for _, x, y in self._chunks(a, b)
                ):
                    text = f"is A's {other}"
                    rows[name]["explanation"] = _as_dict(Explanation("another tensor", text, {"tensor": other}))
                    break
        for name in rows:
            if name.endswith(".gate_proj.weight"):
                other = name.replace(".gate_proj.", ".up_proj.")
                both = [(rows.get(n, {}).get("explanation") or {}).get("tensor") for n in (name, other)]
                if both == [other, name]:
                    for n, is_ in ((name, other), (other, name)):
                        kind = "gate and up exchanged"
                        rows[n]["explanation"] = _as_dict(Explanation(kind, kind, {"tensor": is_}))

    # --- the report ---

    def _report(self, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
        copies = self._copies()
        config = _config_differences(self.a.config, self.b.config)
        counts = Counter(row["status"] for row in rows.values())
        unequal = [row for row in rows.values() if row["status"] in ("differs", "dtype", "shape")]
        kinds = Counter(row["explanation"]["kind"] for row in unequal if _is_explained(row))
        measured = {name: row for name, row in rows.items() if row.get("max_abs")}
        worst = max(measured, key=lambda name: measured[name]["max_abs"], default=None)
        equal = set(counts) <= {"equal"} and not copies and not any(field["counts"] for field in config)
        stored = sum(row["status"] == "equal" and row["stored"]["a"] != row["stored"]["b"] for row in rows.values())
        return {
            "a": _side(self.a),
            "b": _side(self.b),
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

    def _copies(self) -> list[dict[str, str]]:
        """Further copies of a shared tensor (tied head, prediction layers) that make the two sides differ."""
        sides = [dict((copy.name, (canonical, copy)) for canonical, copy in side.copies) for side in (self.a, self.b)]
        found = []
        for name in sorted({*sides[0], *sides[1]}):
            canonical = (sides[0].get(name) or sides[1][name])[0]
            off = [
                name in copies and not self._same_stored(copies[name][1], weights.tensors[canonical].parts[0].stored)
                for weights, copies in zip((self.a, self.b), sides)
            ]
            if off == [True, True] and self._same_stored(sides[0][name][1], sides[1][name][1]):
                continue
            if any(off):
                where = "both, and not alike" if all(off) else "A" if off[0] else "B"
                found.append({"name": name, "text": f"should be a copy of {canonical} and is not, in {where}"})
        return found

    def _same_stored(self, a: Stored, b: Stored) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        step = min(_STEP, self.budget // 4)
        return all(
            np.array_equal(*(np.concatenate([*stored.pieces(at, min(at + step, a.nbytes))]) for stored in (a, b)))
            for at in range(0, a.nbytes, step)
        )


def _with_moments(weights: Weights, kinds: Sequence[str]) -> dict[str, CanonicalTensor]:
    """The parameters, and the moments of the optimizer as adam_m/NAME."""
    return {**weights.tensors, **{t.key: t for kind in kinds for t in weights.moments[kind].values()}}


class _Reached:
    """How far a tensor has been read for the first time."""

    def __init__(self, progress: Progress, width: int):
        self.progress, self.width, self.position = progress, width, 0

    def to(self, position: int) -> None:
        """Elements up to here."""
        if position > self.position:
            self.progress.advance((position - self.position) * self.width)
            self.position = position


def _is_explained(row: dict[str, Any]) -> bool:
    return bool(row["explanation"]) and row["explanation"]["whole"]


def _as_dict(explanation: Explanation | None) -> dict[str, Any] | None:
    if explanation is None:
        return None
    return {"kind": explanation.kind, "text": explanation.text, "whole": explanation.whole, **explanation.facts}


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


_OF_EXPERTS = tuple("mlp." + part for part in ("gate.weight", "gate." + CORRECTION_BIAS, "experts.gate_up_proj",
                                               "experts.down_proj"))  # fmt: skip


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
    return [f"{text}: layers {_listed(layers, 12)}" for text, layers in findings.items()]


def _layer_findings(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Layers that hold another one's tensors."""
    moves = Counter()
    for name, row in rows.items():
        other = (row["explanation"] or {}).get("tensor")
        if other and (here := layer_of(name)) is not None and (there := layer_of(other)) not in (None, here):
            moves[here, there] += 1
    moves = sorted((pair, count) for pair, count in moves.items() if count > 1)
    whole = [f"{here} holds A's {there} ({count} tensors)" for (here, there), count in moves]
    return [f"layers moved: B's {_listed(whole, 12)}"] if whole else []


# --- the command ----------------------------------------------------------------------------------------------------


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
            console.print(f"in both: {text}: {_listed(names, 4)}", soft_wrap=True)
    others = Counter(_of_both(row, "dtype") for row in report["tensors"].values() if row["status"] == "dtype")
    for pair, count in others.items():
        console.print(f"{count} tensors have the same values in another dtype ({pair})")
    for finding in report["findings"]:
        console.print(finding, soft_wrap=True)
    console.print(verdict(report), style="green" if report["equal"] else "bold red", soft_wrap=True)


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
