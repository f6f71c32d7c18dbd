"""Dtype names in every format; casts are right bit by bit and lose what their statistics say, no more."""

import threading
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from weight_sync import dtypes
from weight_sync.dtypes import CastOverflow, CastStatistics, cast, ulp_distance

F64, F32, BF16, F16 = (dtypes.from_name(name) for name in ("float64", "float32", "bfloat16", "float16"))
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
DIGITS = {F64: (52, -1022), F32: (23, -126), BF16: (7, -126), F16: (10, -14)}  # of the fraction, smallest exponent


@pytest.fixture(autouse=True)
def nan_is_no_warning():
    with np.errstate(all="ignore"):
        yield


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def to_torch(array: np.ndarray) -> torch.Tensor:
    """torch has its own idea of NumPy's dtypes: hand over the bits."""
    return torch.from_numpy(bits(array).view(f"i{array.dtype.itemsize}")).view(getattr(torch, array.dtype.name))


def from_torch(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return tensor.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy().view(dtype)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal bits, NaN with any payload."""
    nan = np.isnan(left)
    return np.array_equal(nan, np.isnan(right)) and np.array_equal(bits(left)[~nan], bits(right)[~nan])


def hostile_fp32() -> np.ndarray:
    """Random bit patterns, and each edge of bf16 and fp16 with its neighbours: ties, subnormals, the largest."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    near_bf16 = (ALL_16_BITS.astype(np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    halves = ALL_16_BITS.view(F16).astype(np.float32)
    middle = bits((halves[:-1] + halves[1:]) / 2)[:, None] + np.array([-1, 0, 1], np.int32).view(np.uint32)
    return np.concatenate([random, near_bf16.reshape(-1), middle.reshape(-1)]).view(np.float32)


def fits(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Those that are not finite, or stay so; half a unit beyond the largest value rounds to infinity."""
    digits, _ = DIGITS[dtype]
    largest = float(ml_dtypes.finfo(dtype).max) * (1 + 2.0 ** -(digits + 2))
    return values[~np.isfinite(values) | (np.abs(values.astype(np.float64)) < largest)]


# --- names ---


def test_names_of_all_formats_agree_with_the_formats_own_libraries():
    from mindspore.train.serialization import tensor_to_ms_type
    from safetensors.torch import _TYPES as safetensors_types

    onnx = pytest.importorskip("onnx")
    seen = 0
    for row in dtypes.TABLE:
        assert dtypes.from_name(row.name) == row.numpy and row.numpy.name == row.name
        assert dtypes.from_safetensors(dtypes.to_safetensors(row.numpy)) == row.numpy
        assert dtypes.from_onnx(dtypes.to_onnx(row.numpy)) == row.numpy
        if row.safetensors in safetensors_types:
            assert safetensors_types[row.safetensors] == getattr(torch, row.name)
            seen += 1
        assert onnx.helper.tensor_dtype_to_np_dtype(row.onnx) == row.numpy
        if row.mindspore is not None:
            assert str(tensor_to_ms_type[row.mindspore]) == row.mindspore
            assert dtypes.from_mindspore(dtypes.to_mindspore(row.numpy)) == row.numpy
    assert seen >= 13
    ours = {row.mindspore for row in dtypes.TABLE}
    assert set(tensor_to_ms_type) - ours == {"str", "Int4"}  # neither is a weight's


def test_known_takes_any_byte_order_and_nothing_else():
    assert dtypes.known(np.dtype(">f4")) == F32
    assert dtypes.known(np.dtype(ml_dtypes.bfloat16)) == BF16
    for unknown in (np.dtype("V2"), np.dtype("complex64"), np.dtype("U3"), np.dtype([("a", "f4")])):
        with pytest.raises(KeyError):
            dtypes.known(unknown)


@pytest.mark.parametrize(
    "look_up, code",
    [
        (dtypes.from_safetensors, "F4"),
        (dtypes.from_safetensors, "bf16"),
        (dtypes.from_safetensors, ["BF16"]),
        (dtypes.from_mindspore, "Int4"),
        (dtypes.from_mindspore, None),
        (dtypes.from_onnx, 8),
        (dtypes.from_name, "float"),
    ],
)
def test_an_unknown_name_is_a_key_error_that_shows_it(look_up, code):
    with pytest.raises(KeyError) as error:
        look_up(code)
    assert repr(code) in str(error.value)


def test_mindspore_files_hold_no_fp8():
    with pytest.raises(KeyError, match="mindspore files cannot hold float8_e4m3fn"):
        dtypes.to_mindspore(dtypes.from_name("float8_e4m3fn"))


# --- casts ---


@pytest.mark.parametrize("source, target", [(BF16, F32), (BF16, F16), (F16, F32), (F16, BF16), (BF16, F64), (F16, F64)])
def test_all_16_bit_patterns_go_where_torch_takes_them(source, target):
    values = fits(ALL_16_BITS.view(source), target)
    assert values.size > 30000
    assert same(cast(values, target), from_torch(to_torch(values).to(getattr(torch, target.name)), target))


def test_widening_and_back_is_the_identity():
    for source in (BF16, F16):
        for target in (F32, F64):
            values = ALL_16_BITS.view(source)
            assert same(cast(cast(values, target), source), values)
    kept = np.array([0x0000, 0x8000, 0x3F80, 0x7F80, 0x7FC0, 0x0001], np.uint16).view(BF16)
    assert np.array_equal(bits(cast(cast(kept, F32), BF16)), bits(kept))  # these to the bit, the NaN too


@pytest.mark.parametrize("target", [BF16, F16])
def test_fp32_is_rounded_as_torch_and_ml_dtypes_round_it(target):
    values = fits(hostile_fp32(), target)
    assert values.size > 100_000
    ours = cast(values, target)
    assert same(ours, from_torch(to_torch(values).to(getattr(torch, target.name)), target))
    assert same(ours, values.astype(target))
    nan = np.isnan(values)
    assert nan.any() and np.array_equal(np.signbit(ours[nan]), np.signbit(values[nan]))


@pytest.mark.parametrize("target, one_more", [(BF16, 0x3F81), (F16, 0x3C01), (F32, 0x3F800001)])
def test_float64_is_rounded_once(target, one_more):
    digits, _ = DIGITS[target]
    above_the_tie = np.array([1 + 2.0 ** -(digits + 1) + 2.0**-40, -1 - 2.0 ** -(digits + 1) - 2.0**-40])
    ours = cast(above_the_tie, target)
    # [over fp32, as ml_dtypes and torch go: bf16 0x3F80, fp16 0x3C00]
    assert [int(b) for b in bits(ours)] == [one_more, one_more | 1 << (8 * target.itemsize - 1)]


@pytest.mark.parametrize("target", [F32, BF16, F16])
def test_float64_goes_to_the_nearest_by_exact_arithmetic(target):
    """Against the neighbours in rational numbers, which no rounding can fool."""
    rng = np.random.default_rng(1)
    digits, smallest = DIGITS[target]
    exponents = rng.integers(smallest - digits - 2, 15, 400)
    beyond = rng.choice([0, 0.5, 0.5 + 2.0**-25, 0.5 - 2.0**-25, 0.3], 400)  # of a unit: ties, and close to them
    coarse = rng.integers(1 << digits, 2 << digits, 400) + beyond
    values = np.ldexp(coarse, exponents - digits) * rng.choice([-1, 1], 400)
    for value, result in zip(values, cast(values, target)):
        exact, found = Fraction(float(value)), Fraction(float(result))
        code = int(bits(result))
        for neighbour in (code - 1, code + 1):
            other = np.array(neighbour & ((1 << 8 * target.itemsize) - 1), f"u{target.itemsize}").view(target)
            if np.isfinite(other):
                distance = abs(Fraction(float(other)) - exact) - abs(found - exact)
                assert distance > 0 or distance == 0 and code % 2 == 0


@pytest.mark.parametrize(
    "source, target, worst",
    [(F32, BF16, -3.4e38), (F32, F16, -65520.0), (F64, F32, -1e39), (F64, BF16, -3.4e38), (BF16, F16, -65536.0)],
)
def test_a_finite_value_never_becomes_infinite(source, target, worst):
    values = np.array([np.inf, 1.0, -worst * 0.99, np.nan, worst, -np.inf], np.float64).astype(source)
    values = np.tile(values, 100_000)  # over several blocks
    with pytest.raises(CastOverflow) as error:
        cast(values, target)
    assert error.value.value == float(values[4]) and error.value.dtype == target
    kept = cast(values[[0, 1, 3, 5]], target)
    assert np.array_equal(kept.astype(np.float64), [np.inf, 1.0, np.nan, -np.inf], equal_nan=True)


@pytest.mark.parametrize("place", [0, 399_999])
@pytest.mark.parametrize("value", [1e5, -1e5])
def test_one_overflow_among_many_values_is_found(place, value):
    values = np.ones(400_000, np.float32)
    values[place] = value
    with pytest.raises(CastOverflow) as error:
        cast(values, F16)
    assert error.value.value == value


def test_the_largest_value_of_the_target_is_no_overflow():
    for target in (F32, BF16, F16):
        largest = float(ml_dtypes.finfo(target).max)
        assert cast(np.array([largest, -largest]), target).astype(np.float64).tolist() == [largest, -largest]
    beyond = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32)  # below and at the tie above bf16's largest
    assert bits(cast(beyond[:1], BF16)) == [0x7F7F]
    with pytest.raises(CastOverflow):
        cast(beyond[1:], BF16)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8, np.uint8, np.bool_])
def test_integers_are_never_cast(dtype):
    table = np.array([1, 0, 1], dtype)
    for target in (BF16, F32, F64, np.dtype(np.int16)):
        with pytest.raises(TypeError):  # [bf16 makes the expert 383 number 384]
            cast(table, target)
        with pytest.raises(TypeError):
            cast(np.ones(3, target), table.dtype)
    assert cast(table, table.dtype) is table


def test_fp8_is_no_target_of_a_cast():
    with pytest.raises(TypeError):
        cast(np.ones(3, np.float32), dtypes.from_name("float8_e4m3fn"))
    with pytest.raises(TypeError):
        cast(np.ones(3, dtypes.from_name("float8_e4m3fn")), F32)


def test_any_shape_and_layout_is_cast():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array in (values, values.T, values[:, ::2, 1:], values[0, 0, 0], values[:0], values.astype(">f4")):
        result = cast(np.asarray(array), BF16)
        assert result.shape == array.shape and result.dtype == BF16
        assert np.array_equal(result.astype(np.float32), array)
    assert np.array_equal(cast(values.astype(">f4"), F32), values)


def test_out_is_used_and_checked():
    values, out = np.linspace(-1, 1, 200_001, dtype=np.float32), np.empty(200_001, BF16)
    assert cast(values, BF16, out) is out
    assert same(out, cast(values, BF16))
    for wrong in (out[:-1], np.empty(200_001, F16), np.empty(400_002, BF16)[::2]):
        with pytest.raises(ValueError):
            cast(values, BF16, wrong)


# --- statistics ---


def test_statistics_by_hand():
    # ulp of bf16 in [1, 2) is 2**-7, in [256, 512) it is 2
    before = np.array([1.0, 1 + 2.0**-9, 257.0, 0.0, -0.0, np.nan, np.inf], np.float32)
    after = cast(before, BF16)
    statistics = CastStatistics()
    statistics.update(before, after)
    relative = pytest.approx(1 / 257, rel=1e-6)  # 257 becomes 256
    assert statistics.as_dict() == {
        "values": 7, "changed": 2, "max_abs_error": 1.0, "max_rel_error": relative, "max_ulp_error": 0.5
    }  # fmt: skip


@pytest.mark.parametrize("source", [F64, F32, BF16, F16])
@pytest.mark.parametrize("target", [F64, F32, BF16, F16])
def test_rounding_loses_at_most_half_a_unit(source, target):
    values = hostile_fp32() if source in (F64, F32) else ALL_16_BITS.view(source)
    values = fits(values, target).astype(source)
    statistics = CastStatistics()
    statistics.update(values, cast(values, target))
    exact = DIGITS[source][0] <= DIGITS[target][0] and DIGITS[source][1] >= DIGITS[target][1]
    if exact or source == F64 and target == F32:  # these float64 values are fp32's
        assert statistics.as_dict() == {"values": values.size, "changed": 0} | dict.fromkeys(
            ("max_abs_error", "max_rel_error", "max_ulp_error"), 0.0
        )
    else:
        assert 0.4 < statistics.max_ulp_error <= 0.5 and 0 < statistics.changed < values.size


def test_errors_of_float64_are_measured_in_float64():
    values = np.random.default_rng(4).normal(0, 1, 10_000)
    statistics = CastStatistics()
    statistics.update(values, cast(values, F32))
    assert 0.4 < statistics.max_ulp_error <= 0.5 and statistics.changed == values.size
    assert 0 < statistics.max_rel_error <= 2.0**-24  # [over fp32: 0]


def test_a_cast_that_truncates_or_zeroes_or_breaks_does_not_pass():
    values = np.random.default_rng(2).normal(0, 0.006, 300_000).astype(np.float32)

    def statistics(after):
        found = CastStatistics()
        found.update(values, after)
        return found

    assert statistics(cast(values, BF16)).max_ulp_error <= 0.5
    truncated = (bits(values) >> 16).astype(np.uint16).view(BF16)
    assert 0.99 < statistics(truncated).max_ulp_error < 1
    zeros = statistics(np.zeros(values.size, BF16))  # [passes a check with an absolute tolerance of 0.1]
    assert zeros.max_abs_error < 0.1 and zeros.max_rel_error == 1 and zeros.max_ulp_error > 128
    for place, wrong in ((0, np.nan), (299_999, np.inf)):
        broken = cast(values, BF16).copy()
        broken[place] = wrong
        assert statistics(broken).max_ulp_error == np.inf
    flushed = CastStatistics()
    flushed.update(np.array([1e-40], np.float32), np.zeros(1, BF16))
    assert flushed.max_ulp_error > 0.5 and flushed.changed == 1


def test_an_infinity_that_changed_sign_and_a_difference_beyond_the_dtype_count():
    for before, after in (([np.inf], [-np.inf]), ([np.nan], [1.0]), ([3e38], [-3e38])):
        statistics = CastStatistics()
        statistics.update(np.array(before, np.float32), np.array(after, BF16))
        assert (statistics.changed, statistics.max_abs_error) == (1, np.inf)


def test_statistics_of_parts_merged_are_those_of_the_whole():
    values = fits(hostile_fp32(), BF16)
    after = cast(values, BF16)
    whole = CastStatistics()
    whole.update(values, after)
    parts = [CastStatistics() for _ in range(3)]
    threads = [threading.Thread(target=part.update, args=(values[i::3], after[i::3])) for i, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged = CastStatistics()
    for part in parts:
        merged.merge(part)
    assert merged.as_dict() == whole.as_dict() and whole.changed > 0


def test_shapes_that_differ_are_an_error():
    with pytest.raises(ValueError):
        CastStatistics().update(np.zeros(3, np.float32), np.zeros((3, 1), BF16))
    with pytest.raises(ValueError):
        ulp_distance(np.zeros(3, np.float32), np.zeros(4, np.float32))


# --- distance ---


@pytest.mark.parametrize("dtype", [BF16, F16, dtypes.from_name("float8_e4m3fn"), dtypes.from_name("float8_e5m2")])
def test_distance_counts_the_values_in_between(dtype):
    """Against the rank of every value among all of the dtype's distinct ones."""
    values = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
    wide = values.astype(np.float64)
    distinct = np.unique(wide[~np.isnan(wide)])  # -0 and +0 are one
    rank = np.searchsorted(distinct, wide)
    other = np.random.default_rng(3).permutation(values.size)
    expected = np.abs(rank - rank[other])
    nan = np.isnan(wide)
    expected[nan ^ nan[other]] = np.iinfo(np.int64).max
    expected[nan & nan[other]] = 0
    found = ulp_distance(values, values[other])
    assert found.dtype == np.int64 and np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_distance_of_the_wide_dtypes(dtype):
    one, largest = np.ones((), dtype)[()], np.finfo(dtype).max
    tiny = np.finfo(dtype).smallest_subnormal
    top = int(bits(np.array(largest, dtype)))
    left = np.array([1, 1, 0.0, -tiny, -1, largest, np.nan, 1, -largest, 2], dtype)
    right = np.array([1, np.nextafter(one, dtype.type(2)), -0.0, tiny, 1, np.inf, -np.nan, -np.nan, largest, 1], dtype)
    far = 2**63 - 1
    expected = [0, 1, 0, 2, 2 * int(bits(np.array(one))), 1, 0, far, min(2 * top, far), 1 << np.finfo(dtype).nmant]
    # [as signed difference that went round: -largest to largest in float64 is negative]
    assert ulp_distance(left, right).tolist() == expected
    assert ulp_distance(right, left).tolist() == expected
    alone = [int(ulp_distance(left[i : i + 1], right[i : i + 1])[0]) for i in range(len(left))]
    assert alone == expected


def test_distance_needs_one_floating_dtype():
    for a, b in ((BF16, F16), (np.dtype(np.int32), np.dtype(np.int32))):
        with pytest.raises(TypeError):
            ulp_distance(np.zeros(2, a), np.zeros(2, b))
