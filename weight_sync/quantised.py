"""Quantised weights: matrices of few bits with block scales, to fp32 and back.

On disk, for a matrix [r, c]:

    format   elements                               scales                                value
    FP8      [r, c] bytes, float8 E4M3FN            [ceil(r/128), ceil(c/128)], one per   element x scale
             (largest 448, no infinity,             128 x 128 block, the blocks at the
             0x7F and 0xFF are NaN)                 right and lower edge cut off;
                                                    float32 or UE8M0 bytes
    MXFP4    [r, c/2] bytes, two float4 E2M1        [r, c/32] UE8M0 bytes, one per 32     element x scale
             (0 .5 1 1.5 2 3 4 6 and the sign),     values of a row
             the first in the low four bits

    UE8M0    a power of two in a byte b: 2**(b - 127), 255 is NaN

The hub calls FP8 scales `weight_scale_inv`, and they multiply all the same. The block is always 128 x 128: a matrix of
576 rows has 5 rows of scales, the last for 64 rows. A NaN, and a product that fp32 cannot hold, is damage.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import ml_dtypes
import numpy as np

from shared_ops.errors import UserError

BLOCK = 128  # rows and columns of an FP8 block
GROUP = 32  # values of a row that share an MXFP4 scale
FP8_MAX, FP4_MAX = 448.0, 6.0
SMALLEST_SCALE = np.float32(2.0**-126)  # written; a subnormal one would have fewer than 24 digits

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_CHUNK = 1 << 18  # elements worked on at once: what a pass leaves is in the cache for the next
_FP32_MAX = float(np.finfo(np.float32).max)


class DamagedValue(ValueError):
    """A value that no weight has; `position` is (row, column) in the matrix, or in its scales."""

    def __init__(self, what: str, position: Sequence[int]):
        self.position = tuple(int(i) for i in position)
        super().__init__(f"{what} at {list(self.position)}")


# --- scales ---


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the FP8 scales of a matrix (or of stacked matrices)."""
    return (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))


def check_scales(name: str, shape: Sequence[int], found: Sequence[int]) -> None:
    """`UserError` naming the tensor unless the scales found are those of an FP8 matrix of this shape."""
    if len(shape) < 2:
        raise UserError(f"{name} is FP8 of shape {list(shape)}; block scales are for matrices only")
    expected = scales_shape(shape)
    if tuple(found) != expected:
        raise UserError(
            f"{name} is FP8 of shape {list(shape)} and has scales of shape {list(found)}; one per "
            f"{BLOCK} x {BLOCK} block makes {list(expected)}: the file is damaged, or has blocks of another size"
        )


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Scales as fp32: UE8M0 bytes (uint8 or float8_e8m0fnu) are decoded, fp32, bf16 and fp16 keep their value.

    `TypeError` for any other dtype. A byte 255 becomes NaN; the dequantisers refuse it.
    """
    if scales.dtype in (np.uint8, _E8M0):
        return _POWERS[scales.view(np.uint8)]
    if scales.dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        return scales.astype(np.float32, copy=False)
    raise TypeError(f"scales are float32 or UE8M0 bytes, not {scales.dtype}")


_POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.nan).astype(np.float32)


def _finite_scales(scales: np.ndarray, first_row: int = 0) -> tuple[np.ndarray, float]:
    """Decoded scales and their largest magnitude; `DamagedValue` if one is NaN or infinite."""
    values = scale_values(scales)
    largest = float(np.abs(values).max(initial=0))
    if not np.isfinite(largest):
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DamagedValue(f"the scale {values[row, column]}", (first_row + row, column))
    return values, largest


def exact_dtype(scales: np.ndarray) -> bool:
    """Whether every FP8 or FP4 value times its scale is exact in bf16; fp32 is needed otherwise.

    So it is if all scales are powers of two (or 0) and no product leaves bf16's range: E4M3 goes from steps of 2**-9
    to 448 = 1.75 * 2**8 in 4 digits, bf16 from steps of 2**-133 to below 2**128 in 8, so scales go from 2**-124 to
    2**119. FP4's elements are a subset of E4M3's.
    """
    values = scale_values(scales)
    digits, exponent = np.frexp(np.abs(values))
    power = (digits == 0.5) & (exponent - 1 >= -124) & (exponent - 1 <= 119)
    return bool((power | (values == 0)).all())


# --- to fp32 ---


def dequantise_fp8(
    rows: np.ndarray, scales: np.ndarray, first_row: int = 0, out: np.ndarray | None = None
) -> np.ndarray:
    """fp32 [r, c] of E4M3 bytes [r, c], rows first_row … of a matrix with all its scales [S_r, S_c].

    first_row need not begin a block; `out`, contiguous fp32 [r, c], is filled if given. `ValueError` where the scales
    do not cover the rows, or have other columns; `DamagedValue` for a NaN, an infinite scale, or a product beyond fp32.
    """
    codes = rows.view(np.uint8)
    count, columns = codes.shape
    low, high = first_row // BLOCK, -(-(first_row + count) // BLOCK)
    if first_row < 0 or scales.ndim != 2 or high > len(scales) or scales.shape[1] != -(-columns // BLOCK):
        raise ValueError(
            f"scales of shape {list(scales.shape)} are not those of rows {first_row} to {first_row + count} with "
            f"{columns} columns"
        )
    out = _output(out, (count, columns))
    if not out.size:
        return out
    values, largest = _finite_scales(scales[low:high], low)
    # A byte's seven magnitude bits at the top of fp32's exponent and fraction are its value times 2**-120, subnormals
    # included, which fp32 multiplies exactly. In the scales the factor costs nothing, unless they would overflow.
    in_scales = largest < 128
    by_column = np.repeat(values * _REBIAS if in_scales else values, BLOCK, axis=1)[:, :columns]
    _check_subnormals()
    for start, stop in _strips(count, columns, first_row):
        part, result = codes[start:stop], out[start:stop]
        if (part | 0x80).max() == 0xFF:
            row, column = np.argwhere((part | 0x80) == 0xFF)[0]
            raise DamagedValue(f"the FP8 byte 0x{part[row, column]:02X} (NaN)", (first_row + start + row, column))
        bits = result.view(np.int32)
        np.copyto(bits, part.view(np.int8))  # extends the sign
        bits <<= 20
        bits &= np.int32(-1 << 31 | 0x7F << 20)
        if not in_scales:
            result *= _REBIAS
        with np.errstate(over="ignore"):
            result *= by_column[(first_row + start) // BLOCK - low]
    if largest > _FP32_MAX / FP8_MAX:
        _check_range(out, first_row)
    return out


_REBIAS = np.float32(2.0**120)


def _check_subnormals() -> None:
    if not np.float32(2.0**-126) * np.float32(0.5) * np.float32(2.0):
        raise RuntimeError("this process flushes subnormal numbers to zero, which would lose small weights")


def _check_range(values: np.ndarray, first_row: int = 0) -> None:
    infinite = ~np.isfinite(values)
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise DamagedValue("a product of element and scale beyond fp32", (first_row + row, column))


def _output(out: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """`out`, or memory of its own: the kernel's clearing of new pages costs as much as the work."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected contiguous float32 {list(shape)}")
    return out


def _strips(rows: int, columns: int, first_row: int = 0) -> Iterator[tuple[int, int]]:
    """Row ranges that are small and lie within one row of blocks each."""
    step, start = max(_CHUNK // max(columns, 1), 1), 0
    while start < rows:
        stop = min(rows, start + step, start + BLOCK - (first_row + start) % BLOCK)
        yield start, stop
        start = stop


def dequantise_mxfp4(packed: np.ndarray, scales: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """fp32 [r, c] of packed E2M1 pairs [r, c/2] and scales [r, c/32], for any rows of a matrix.

    `out`, contiguous fp32 [r, c], is filled if given. `ValueError` where the shapes do not fit; `DamagedValue` for a
    NaN scale or a product beyond fp32.
    """
    codes = packed.view(np.uint8)
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if columns % GROUP or scales.shape != (rows, columns // GROUP):
        raise ValueError(f"scales of shape {list(scales.shape)} are not those of MXFP4 [{rows}, {columns}]")
    values, largest = _finite_scales(scales)
    out = _output(out, (rows, columns))
    with np.errstate(over="ignore"):
        for start, stop in _strips(rows, columns):
            result = out[start:stop]
            # clip: no byte is outside the table, and checking for it needs a copy of the result
            np.take(_PAIRS, codes[start:stop], out=result.view(np.uint64), mode="clip")
            groups = result.reshape(stop - start, -1, GROUP)
            groups *= values[start:stop, :, None]
    if largest > _FP32_MAX / FP4_MAX:
        _check_range(out)
    return out


_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# both values of a byte, moved as one word
_PAIRS = np.stack([np.tile(_FP4_VALUES, 16), np.repeat(_FP4_VALUES, 16)], axis=-1).view(np.uint64).reshape(-1)


# --- from fp32 ---


def quantise_fp8(strip: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 bytes [r, c] and scales [ceil(r/128), ceil(c/128)] of fp32 [r, c] that begins at a row of blocks.

    The scale of a block is its largest magnitude / 448: "float32" as it is, "ue8m0" rounded up to a power of two and
    given as bytes; at least 2**-126, and 1 for a block of zeros. Values are divided by it in fp32 and rounded to the
    nearest element, ties to even; none lies beyond 448. `DamagedValue` for NaN, infinities, and values so near
    fp32's largest that they would be read back as infinite.
    """
    if scale_format not in ("float32", "ue8m0"):
        raise ValueError(f"scale format {scale_format!r}, expected float32 or ue8m0")
    _check_fp32(strip)
    rows, columns = strip.shape
    codes, scales = np.empty((rows, columns), np.uint8), np.empty(scales_shape(strip.shape), np.float32)
    if not codes.size:
        return codes, scales if scale_format == "float32" else scales.astype(np.uint8)
    edges = np.arange(0, columns, BLOCK)
    for band, start in enumerate(range(0, rows, BLOCK)):
        part = strip[start : start + BLOCK]
        by_column = np.maximum(part.max(axis=0), -part.min(axis=0))
        largest = np.maximum.reduceat(by_column, edges)
        _check_finite(largest, part, start)
        scales[band] = _power_scales(largest, 8) if scale_format == "ue8m0" else _ratio_scales(largest)
    by_column = np.repeat(scales, BLOCK, axis=1)[:, :columns]
    table = _code_table("float8_e4m3fn", FP8_MAX)
    for start, stop in _strips(rows, columns):
        bits = _round_to_odd(np.divide(strip[start:stop], by_column[start // BLOCK], order="C"))
        np.take(table, bits, out=codes[start:stop], mode="clip")
    if scales.max() * FP8_MAX > _FP32_MAX / 2:
        dequantise_fp8(codes, scales)  # may find a product beyond fp32
    return codes, scales if scale_format == "float32" else _scale_bytes(scales)


def quantise_mxfp4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed E2M1 pairs [r, c/2] and UE8M0 scales [r, c/32] of fp32 [r, c], c a multiple of 32.

    The scale of 32 values is the smallest power of two (from 2**-126; 1 for zeros) by which their largest magnitude
    is at most 7, and a value between 6 and 7 becomes 6: half of the 2 that lie between FP4's largest numbers, so no
    value is off by more than half a step. (The OCP specification's own rule allows up to 8, off by a whole step.)
    Rounding is to nearest, ties to even. Errors as in `quantise_fp8`, `ValueError` for other widths.
    """
    _check_fp32(rows)
    count, columns = rows.shape
    if columns % GROUP:
        raise ValueError(f"MXFP4 has groups of {GROUP} values, {columns} columns are no whole number of them")
    packed, scales = np.empty((count, columns // 2), np.uint8), np.empty((count, columns // GROUP), np.float32)
    low_code = _code_table("float4_e2m1fn", FP4_MAX)
    high_code = low_code << 4
    for start, stop in _strips(count, columns):
        part, strip_scales = np.ascontiguousarray(rows[start:stop]), scales[start:stop]
        # As integers, magnitudes are ordered as their values are, infinity and NaN above all.
        magnitude = part.view(np.int32) & np.int32(0x7FFFFFFF)
        largest = np.maximum.reduceat(magnitude.reshape(-1), np.arange(0, part.size, GROUP)).view(np.float32)
        _check_finite(largest, part, start)
        strip_scales[...] = _power_scales(largest, 2).reshape(strip_scales.shape)
        scaled = part.reshape(stop - start, -1, GROUP) / strip_scales[..., None]
        bits = _round_to_odd(scaled.reshape(part.shape))
        np.take(high_code, bits[:, 1::2], out=packed[start:stop], mode="clip")
        packed[start:stop] |= np.take(low_code, bits[:, ::2], mode="clip")
    if scales.max(initial=0) * FP4_MAX > _FP32_MAX / 2:
        dequantise_mxfp4(packed, scales)  # may find a product beyond fp32
    return packed, _scale_bytes(scales)


def _check_fp32(values: np.ndarray) -> None:
    if values.dtype != np.float32:  # the bits of another dtype would be taken for fp32's
        raise TypeError(f"fp32 values are quantised, not {values.dtype}")


def _check_finite(largest: np.ndarray, part: np.ndarray, first_row: int) -> None:
    if not np.isfinite(largest).all():
        row, column = np.argwhere(~np.isfinite(part))[0]
        raise DamagedValue(f"the value {part[row, column]}", (first_row + row, column))


def _ratio_scales(largest: np.ndarray) -> np.ndarray:
    scales = np.maximum(largest / np.float32(FP8_MAX), SMALLEST_SCALE)
    scales[largest == 0] = 1
    return scales


def _power_scales(largest: np.ndarray, exponent: int) -> np.ndarray:
    """The smallest power of two s with largest <= 1.75 * 2**exponent * s, from 2**-126; 1 for 0."""
    # The addition carries into the exponent where the fraction is beyond .75.
    biased = ((largest.view(np.int32) + np.int32(0x1FFFFF)) >> 23) - exponent
    biased = np.where(largest == 0, 127, np.maximum(biased, 1)).astype(np.int32)
    return (biased << 23).view(np.float32)


def _scale_bytes(scales: np.ndarray) -> np.ndarray:
    """UE8M0 bytes of scales that are normal powers of two."""
    return (scales.view(np.int32) >> 23).astype(np.uint8)


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """The bits of fp32 values as bf16, inexact ones towards zero with the last bit set.

    A second rounding, to a format of fewer digits, then goes where one rounding of the fp32 value would.
    """
    bits = values.view(np.uint32)
    odd = bits & np.uint32(0xFFFF)
    odd += np.uint32(0xFFFF)  # carries into the upper half unless the lower one is zero
    odd |= bits
    return odd.view(np.uint16)[..., 1::2]


@cache
def _code_table(element: str, largest: float) -> np.ndarray:
    """Codes, uint8, of all 2**16 bf16 numbers: rounded to nearest even, those beyond the largest made it."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(values), -largest, largest).astype(getattr(ml_dtypes, element)).view(np.uint8)
