"""Initial values: a pure function of (seed, parameter name, element index).

Element i of a parameter is made from word i of a Philox stream whose key is a hash of seed and name, so any rank
makes any slice without making the rest. The normal deviate uses additions, multiplications, divisions and square
roots only, which IEEE 754 rounds correctly: the bits are the same on every machine, whatever its mathematics library.
"""

import hashlib
from collections.abc import Iterator
from itertools import product

import numpy as np

from shared_ops.params import Parameter


def initial_value(
    parameter: Parameter, seed: int, std: float, index: tuple[slice, ...] | None = None
) -> np.ndarray:
    """The float32 initial value of `parameter`, or of the part that `index` (slices of step 1) selects."""
    shape = parameter.shape
    index = (index or ()) + (slice(None),) * (len(shape) - len(index or ()))
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    part = tuple(max(stop - start, 0) for start, stop in bounds)
    if parameter.init != "normal":
        return np.full(part, 1.0 if parameter.init == "ones" else 0.0, np.float32)
    out = np.empty(part, np.float32)
    flat, done = out.reshape(-1), 0
    for start, count in _runs(bounds, shape):
        for first in range(start, start + count, _CHUNK):
            size = min(_CHUNK, start + count - first)
            values = _normal(_uniform(parameter.name, seed, first, size))
            flat[done : done + size] = values * std
            done += size
    return out


_CHUNK = 1 << 18  # elements made at once: a few megabytes of float64 temporaries


def _runs(bounds: list[tuple[int, int]], shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first flat index, length) of each contiguous run of the slice, in order."""
    whole = len(shape)
    while whole and bounds[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    run = max(whole - 1, 0)  # dimension `run` is cut, all behind it are whole
    inner = int(np.prod(shape[run + 1 :], dtype=np.int64))
    first, last = bounds[run]
    if last <= first:
        return
    strides = [int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(run)]
    for outer in product(*(range(*bounds[d]) for d in range(run))):
        base = sum(i * stride for i, stride in zip(outer, strides, strict=True))
        yield base + first * inner, (last - first) * inner


def _uniform(name: str, seed: int, first: int, count: int) -> np.ndarray:
    """Elements first .. first+count-1 of the stream, in (0, 1), float64."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, "<u8")
    block, skip = divmod(first, 4)  # Philox-4x64 makes four words per counter value
    words = np.random.Philox(key=key, counter=[block, 0, 0, 0]).random_raw(skip + count)[skip:]
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normal(u: np.ndarray) -> np.ndarray:
    """The normal quantile of u, by Wichura's AS 241 (PPND16, relative error 1e-16)."""
    q = u - 0.5
    central = np.abs(q) <= 0.425
    r = 0.180625 - q * q
    out = q * _ratio(r, _A, _B)
    tail = ~central
    if tail.any():
        side = q[tail]
        r = np.sqrt(-_log(np.where(side < 0, u[tail], 1 - u[tail])))
        near, far = _ratio(r - 1.6, _C, _D), _ratio(r - 5.0, _E, _F)
        out[tail] = np.copysign(np.where(r <= 5, near, far), side)
    return out


def _ratio(x: np.ndarray, numerator: tuple[float, ...], denominator: tuple[float, ...]) -> np.ndarray:
    top, bottom = np.full_like(x, numerator[-1]), np.full_like(x, denominator[-1])
    for a, b in zip(numerator[-2::-1], denominator[-2::-1], strict=True):
        top = top * x + a
        bottom = bottom * x + b
    return top / bottom


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm by log(m * 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)), m in [sqrt(1/2), sqrt(2))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, 2 * mantissa, mantissa)
    exponent = exponent - small
    z = (mantissa - 1) / (mantissa + 1)
    square, series = z * z, np.zeros_like(z)
    for k in range(21, 0, -2):  # |z| < 0.172: the next term is below 1e-18
        series = series * square + 1.0 / k
    return exponent * 0.6931471805599453 + 2 * z * series


# coefficients of AS 241, constant term first
_A = (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
      45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727)  # fmt: skip
_B = (1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077,
      21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610)  # fmt: skip
_C = (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
      1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4)  # fmt: skip
_D = (1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550,
      0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9)  # fmt: skip
_E = (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
      0.0265321895265761230930, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7)  # fmt: skip
_F = (1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15)  # fmt: skip
