"""Dtypes of weights: their names in every format, casts between the floating-point ones, and what a cast loses.

A look-up of a name that is in no row raises `KeyError`: the caller knows the file and the tensor and says so.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class _Row(NamedTuple):
    name: str  # canonical: NumPy's, ml_dtypes' and torch's
    numpy: np.dtype
    safetensors: str
    mindspore: str | None  # TensorProto.tensor_type of a .ckpt file; None: such files cannot hold it
    onnx: int  # TensorProto.DataType


def _row(name: str, safetensors: str, mindspore: str | None, onnx: int) -> _Row:
    return _Row(name, np.dtype(getattr(ml_dtypes, name, name)), safetensors, mindspore, onnx)


TABLE = (
    _row("float64", "F64", "Float64", 11),
    _row("float32", "F32", "Float32", 1),
    _row("bfloat16", "BF16", "BFloat16", 16),
    _row("float16", "F16", "Float16", 10),
    _row("float8_e4m3fn", "F8_E4M3", None, 17),
    _row("float8_e5m2", "F8_E5M2", None, 19),
    _row("float8_e8m0fnu", "F8_E8M0", None, 24),
    _row("int64", "I64", "Int64", 7),
    _row("uint64", "U64", "UInt64", 13),
    _row("int32", "I32", "Int32", 6),
    _row("uint32", "U32", "UInt32", 12),
    _row("int16", "I16", "Int16", 5),
    _row("uint16", "U16", "UInt16", 4),
    _row("int8", "I8", "Int8", 3),
    _row("uint8", "U8", "UInt8", 2),
    _row("bool", "BOOL", "Bool", 9),
)


# --- names ---


def known(dtype: np.dtype) -> np.dtype:
    """`dtype` in native byte order, if it is in the table; `KeyError` otherwise."""
    return _find("numpy", np.dtype(dtype).newbyteorder("=")).numpy


def from_name(name: str) -> np.dtype:
    """The dtype of a canonical name such as "bfloat16"; `KeyError` for an unknown one."""
    return _find("name", name).numpy


def from_safetensors(code: str) -> np.dtype:
    """The dtype of a safetensors code such as "BF16"; `KeyError` for an unknown one."""
    return _find("safetensors", code).numpy


def from_mindspore(code: str) -> np.dtype:
    """The dtype of a .ckpt file's tensor_type such as "BFloat16"; `KeyError` for an unknown one."""
    return _find("mindspore", code).numpy


def from_onnx(code: int) -> np.dtype:
    """The dtype of an ONNX TensorProto.DataType; `KeyError` for an unknown one."""
    return _find("onnx", code).numpy


def to_safetensors(dtype: np.dtype) -> str:
    """The safetensors code of a dtype; `KeyError` where there is none."""
    return _code("safetensors", dtype)


def to_mindspore(dtype: np.dtype) -> str:
    """The tensor_type of a dtype in a .ckpt file; `KeyError` where there is none (FP8)."""
    return _code("mindspore", dtype)


def to_onnx(dtype: np.dtype) -> int:
    """The ONNX TensorProto.DataType of a dtype; `KeyError` where there is none."""
    return _code("onnx", dtype)


_BY = {column: {getattr(row, column): row for row in TABLE} for column in _Row._fields}
del _BY["mindspore"][None]


def _find(column: str, code: Any) -> _Row:
    try:
        return _BY[column][code]
    except (KeyError, TypeError):  # TypeError: damaged metadata may hold a list where a name belongs
        raise KeyError(f"{code!r} is no dtype of weights; {column} has {', '.join(map(str, _BY[column]))}") from None


def _code(column: str, dtype: np.dtype) -> Any:
    code = getattr(_find("numpy", known(dtype)), column)
    if code is None:
        raise KeyError(f"{column} files cannot hold {dtype}; they hold {', '.join(map(str, _BY[column]))}")
    return code


# --- casts ---

_FLOATS = {from_name(name): ml_dtypes.finfo(from_name(name)) for name in ("float64", "float32", "bfloat16", "float16")}
_FLOAT64, _FLOAT32, _BFLOAT16 = from_name("float64"), from_name("float32"), from_name("bfloat16")
_BLOCK = 1 << 17  # elements worked on at once: what a pass leaves is in the cache for the next


class CastOverflow(ValueError):
    """A finite value would become infinite; `value` is the one of largest magnitude, `dtype` what cannot hold it."""

    def __init__(self, value: float, dtype: np.dtype):
        largest = float(_FLOATS[dtype].max)
        super().__init__(f"{value:.9g} does not fit into {dtype}, whose largest value is {largest:.9g}")
        self.value, self.dtype = value, dtype


def cast(array: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """`array` in another of float64, float32, bfloat16, float16, rounded once, to nearest even.

    Infinities, signs of zeros and subnormals are kept; NaN stays NaN with its sign, its payload may change. An array
    that has the dtype already is returned as it is, of any kind. `out`, contiguous and of the right shape and dtype, is
    used for the result of a cast if given, which saves new memory. `CastOverflow` where a finite value would become
    infinite; `TypeError` for integers, bool and FP8, which are never cast.
    """
    source, target = known(array.dtype), known(dtype)
    if source == target:
        return array.astype(target, copy=False)  # copies only a foreign byte order
    if source not in _FLOATS or target not in _FLOATS:
        raise TypeError(f"{source} is never cast to {target}: only float64, float32, bfloat16 and float16 are")
    if out is None:
        out = np.empty(array.shape, target)
    elif out.shape != array.shape or out.dtype != target or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected contiguous {target} {list(array.shape)}")
    may_overflow = _FLOATS[target].max < _FLOATS[source].max
    suspect = False
    with np.errstate(over="ignore", invalid="ignore"):
        for values, result in _blocks(array, out):
            _convert(values, result)
            suspect = suspect or (may_overflow and _any_not_finite(result))
    if suspect:
        _refuse_overflow(array, target)
    return out


def _convert(values: np.ndarray, out: np.ndarray) -> None:
    # NumPy's and ml_dtypes' casts round right and release the GIL, but for one: float64 to bfloat16 rounds twice.
    if values.dtype.itemsize == 8 and out.dtype == _BFLOAT16:
        values = _round_to_odd(values)
    np.copyto(out, values, casting="unsafe")


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32, inexact ones towards zero with the last bit set, so that a second rounding sees no tie."""
    nearest = values.astype(np.float32)
    back, bits = nearest.astype(np.float64), nearest.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= back != values
    return nearest


def _any_not_finite(values: np.ndarray) -> bool:
    # As bits, infinities and NaN are the largest of their sign: seen as signed the positive, as unsigned the negative.
    infinity = np.array(np.inf, values.dtype)
    return values.size > 0 and bool(
        _bits(values, "i").max() >= _bits(infinity, "i") or _bits(values, "u").max() >= _bits(-infinity, "u")
    )


def _refuse_overflow(array: np.ndarray, target: np.dtype) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        finite = array[np.isfinite(array)].astype(np.float64)
        worst = finite[np.abs(finite) == np.abs(finite).max(initial=0)][:1]  # none where nothing is finite
        result = np.empty(worst.shape, target)
        _convert(worst, result)
    if not np.isfinite(result).all():
        raise CastOverflow(worst.item(), target)


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Equal parts of arrays of one shape, flat and small enough for the cache."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield tuple(array[start : start + _BLOCK] for array in flat)


def _bits(values: np.ndarray, kind: str) -> np.ndarray:
    return values.view(f"{kind}{values.dtype.itemsize}")


# --- what a cast loses ---


class CastStatistics:
    """Errors of a cast, summed up over chunks; one per thread, then `merge`.

    values, changed     numbers of values, and of those that are not equal after the cast (NaN to NaN is equal)
    max_abs_error       largest |after - before|
    max_rel_error       largest |after - before| / |before|
    max_ulp_error       largest |after - before| in units in the last place of the target dtype at `before`:
                        rounding to nearest gives at most 0.5, any other rounding shows as more

    Values that were not finite before count only if they changed; an error that is no number counts as infinite.
    """

    def __init__(self) -> None:
        self.values = self.changed = 0
        self.max_abs_error = self.max_rel_error = self.max_ulp_error = 0.0

    def update(self, before: np.ndarray, after: np.ndarray) -> None:
        """Add a chunk: values before the cast and after it, of one shape; `after` has the target dtype."""
        if before.shape != after.shape:
            raise ValueError(f"before the cast {before.shape}, after it {after.shape}")
        self.values += before.size
        target = known(after.dtype)
        wide = _FLOAT64 if _FLOAT64 in (known(before.dtype), target) else _FLOAT32
        # An array, because against a scalar np.maximum takes three times as long.
        floor = np.full(min(before.size, _BLOCK), _FLOATS[target].smallest_normal, wide)
        with np.errstate(all="ignore"):
            for old, new in _blocks(before, after):
                self._update(old.astype(wide, copy=False), new.astype(wide, copy=False), floor, target)

    def _update(self, old: np.ndarray, new: np.ndarray, floor: np.ndarray, target: np.dtype) -> None:
        # The difference is exact: a value and its rounding are apart by few digits of the wider dtype.
        error = np.subtract(new, old)
        np.abs(error, out=error)
        largest = error.max(initial=0)
        if largest == 0:
            return
        if not np.isfinite(largest):
            self._update_finite(old, new, floor, target)
            return
        self.changed += np.count_nonzero(_bits(error, "i"))  # ten times as fast as of floats
        self.max_abs_error = max(self.max_abs_error, float(largest))
        # 2**exponent of each value, by which its unit in the last place goes; among the target's subnormals the unit
        # no longer shrinks
        binade = (_bits(old, "i") & _bits(np.array(np.inf, old.dtype), "i")).view(old.dtype)
        np.maximum(binade, floor[: binade.size], out=binade)
        np.divide(error, binade, out=binade)
        self.max_ulp_error = max(self.max_ulp_error, float(binade.max()) * 2.0 ** _FLOATS[target].nmant)
        np.divide(error, np.abs(old, out=binade), out=error)
        self.max_rel_error = max(self.max_rel_error, float(np.fmax.reduce(error)))  # passes over 0 / 0

    def _update_finite(self, old: np.ndarray, new: np.ndarray, floor: np.ndarray, target: np.dtype) -> None:
        """A block with infinities or NaN: the others as usual, these by whether they stayed what they were."""
        finite = np.isfinite(old) & np.isfinite(new)
        if finite.all():  # the difference itself overflowed
            wrong = old != new
        else:
            wrong = ~finite & (old != new) & ~(np.isnan(old) & np.isnan(new))
            self._update(old[finite], new[finite], floor, target)
        if wrong.any():
            self.changed += np.count_nonzero(wrong)
            self.max_abs_error = self.max_rel_error = self.max_ulp_error = float("inf")

    def merge(self, other: "CastStatistics") -> None:
        """Add what another one has seen."""
        self.values += other.values
        self.changed += other.changed
        for name in ("max_abs_error", "max_rel_error", "max_ulp_error"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def as_dict(self) -> dict[str, float]:
        """The five figures by name."""
        return dict(vars(self))


_FURTHEST = np.iinfo(np.int64).max
# magnitude bits above which a number is NaN
_LARGEST = {
    **{dtype: int(_bits(np.array(np.inf, dtype), "i")) for dtype in _FLOATS},
    from_name("float8_e5m2"): 0x7C,
    from_name("float8_e4m3fn"): 0x7E,
}


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable values apart a and b are, element by element, int64; both of one floating dtype.

    0 means equal (+0 equals -0), 1 neighbours; infinity is the neighbour of the largest finite value. Two NaN are 0
    apart, whatever their payloads; NaN and a number, like float64 values that far apart, 2**63 - 1.
    """
    dtype = known(a.dtype)
    if known(b.dtype) != dtype or dtype not in _LARGEST:
        raise TypeError(f"the distance between {a.dtype} and {b.dtype} is not defined")
    if a.shape != b.shape:
        raise ValueError(f"{a.shape} and {b.shape} have no distance element by element")
    distance = np.empty(a.shape, np.int64)
    for left, right, out in _blocks(a.astype(dtype, copy=False), b.astype(dtype, copy=False), distance):
        left, right = _ordered(left), _ordered(right)
        np.subtract(np.maximum(left, right), np.minimum(left, right), out=out)
        if dtype == _FLOAT64:
            out[out < 0] = _FURTHEST  # the difference went round
        if max(left.max(), right.max(), -left.min(), -right.min()) > _LARGEST[dtype]:
            left_nan, right_nan = np.abs(left) > _LARGEST[dtype], np.abs(right) > _LARGEST[dtype]
            out[left_nan | right_nan] = _FURTHEST
            out[left_nan & right_nan] = 0
    return distance


def _ordered(values: np.ndarray) -> np.ndarray:
    """int64 in the order of the values, neighbours one apart, zero at 0: the magnitude bits with the sign applied."""
    bits = _bits(values, "i")
    sign = bits >> (8 * bits.itemsize - 1)  # 0, or all ones
    magnitude = bits & np.iinfo(bits.dtype).max
    magnitude ^= sign
    magnitude -= sign
    return magnitude.astype(np.int64, copy=False)
