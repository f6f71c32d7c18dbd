"""What is measured of two tensors of one shape, block by block."""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from weight_sync import dtypes
from weight_sync.canonical import BFLOAT16, CanonicalTensor
from weight_sync.differences.reading import BLOCK, FLOAT64, TEMPORARY, as_bits, coarser_dtype, common_dtype, round_to

FLOAT16 = np.dtype(np.float16)
DEFINITIONS = {
    "bitwise equal": "same shape, dtype and bits, read in canonical form (FP8 and FP4 dequantised)",
    "max_abs": "largest |a - b|, over elements that are finite on both sides",
    "max_rel": "largest |a - b| / max(|a|, |b|), likewise; 2 means opposite signs of one size",
    "max_ulp": "largest number of representable values from a to b, likewise, in the wider dtype where these differ",
    "cosine": "a·b / (|a| |b|); null where either is all zero",
    "relative_l2": "|a - b| / max(|a|, |b|) of the whole tensors, by which the table is sorted",
}


class Statistics:
    """What `DEFINITIONS` says, block by block, and how the values of two tensors hang together in their places."""

    def __init__(self, a: CanonicalTensor, b: CanonicalTensor):
        self.common = common_dtype(a.dtype, b.dtype)
        narrow = a.dtype == b.dtype and a.dtype in (BFLOAT16, FLOAT16)
        self.roundings = [] if narrow else [Rounding(BFLOAT16), Rounding(FLOAT16)]
        self.factor = Factor(coarser_dtype(a.dtype, b.dtype))
        self.fp8 = a.is_quantised != b.is_quantised
        self.fp8_b = b.is_quantised
        self.fp8_excess = self.largest = 0.0
        self.differing = self.one_sided = self.max_ulp = 0
        self.max_abs = self.max_rel = self.dot = self.square_a = self.square_b = self.square_difference = 0.0
        self.worst = (0, 0.0, 0.0)  # position, value of a, value of b
        self.contents_a, self.contents_b = Contents(), Contents()

    def update(self, start: int, a: np.ndarray, b: np.ndarray) -> None:
        """Add the elements from `start` on."""
        for at in range(0, a.size, BLOCK):
            x, y = (dtypes.cast(values[at : at + BLOCK], self.common) for values in (a, b))
            self._update(start + at, x, y)

    def _update(self, start: int, a: np.ndarray, b: np.ndarray) -> None:
        self.contents_a.update(a)
        self.contents_b.update(b)
        for rounding in self.roundings:
            rounding.update(a, b)
        unequal = as_bits(a) != as_bits(b)
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
        """The figures, as --json writes them; `shape`: the tensors'."""
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


class Contents:
    """Whether a tensor is all zero, and its numbers of NaN and infinities, chunk by chunk."""

    def __init__(self) -> None:
        self.zero, self.nan, self.inf = True, 0, 0

    def update(self, values: np.ndarray) -> None:
        """Add values."""
        infinity = as_bits(np.array(np.inf, values.dtype))
        magnitude = np.array(np.iinfo(infinity.dtype).max >> 1, infinity.dtype)
        block = TEMPORARY // values.dtype.itemsize
        for start in range(0, values.size, block):
            part = values[start : start + block]
            largest = (as_bits(part) & magnitude).max()
            self.zero = self.zero and bool(largest == 0)
            if largest >= infinity:
                nan = int(np.isnan(part).sum())
                self.nan += nan
                self.inf += int((~np.isfinite(part)).sum()) - nan

    def as_dict(self) -> dict[str, Any]:
        """The facts, as --json writes them."""
        return {"all_zero": self.zero, "nan": self.nan, "inf": self.inf}


class Rounding:
    """Do both sides agree when rounded to `dtype`, and which of them hold nothing but its values?"""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.agree, self.exact_a, self.exact_b = dtype, True, True, True

    def update(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add values of one dtype."""
        if not (self.exact_a or self.exact_b):
            return
        low_a, low_b = round_to(a, self.dtype), round_to(b, self.dtype)
        self.exact_a = self.exact_a and np.array_equal(as_bits(dtypes.cast(low_a, a.dtype)), as_bits(a))
        self.exact_b = self.exact_b and np.array_equal(as_bits(dtypes.cast(low_b, b.dtype)), as_bits(b))
        self.agree = self.agree and np.array_equal(as_bits(low_a), as_bits(low_b))

    @property
    def rounded(self) -> str | None:
        """Which side can be the other one rounded, however arranged."""
        if self.exact_a == self.exact_b:
            return None
        return "B" if self.exact_b else "A"


class Factor:
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


def _number(value: float) -> float | None:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else None
