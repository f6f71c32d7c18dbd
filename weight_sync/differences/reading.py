"""Both sides of a comparison piece by piece: how much at once, the bits of what is read, and the dtype for both."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from shared_ops.errors import UserError
from weight_sync import dtypes
from weight_sync.canonical import FLOAT32, CanonicalTensor
from weight_sync.sizes import sized

FLOAT64 = np.dtype(np.float64)
STEP = 1 << 18  # elements read at once
ELEMENT_BYTES = 128  # memory for one element read at once, on both sides
TEMPORARY = 96 << 10  # bytes of a temporary array: larger ones leave the cache, and malloc maps them anew every time
BLOCK = TEMPORARY // 8  # elements of such an array


def both(a: CanonicalTensor, b: CanonicalTensor, step: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first element, values of a, values of b), as far as both go."""
    size = min(a.size, b.size)
    for start in range(0, size, step):
        stop = min(start + step, size)
        yield start, read(a, start, stop), read(b, start, stop)


def read(tensor: CanonicalTensor, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) as one array."""
    pieces = [*tensor.read(start, stop)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def step_within(budget: int, *tensors: CanonicalTensor) -> int:
    """Elements to read at once: whole rows where they fit; a quantised tensor cannot be read in less."""
    columns = max(tensor.shape[-1] for tensor in tensors)
    step = min(STEP, budget // ELEMENT_BYTES)
    if step < columns:
        quantised = [tensor.name for tensor in tensors if tensor.is_quantised]
        if quantised:
            raise UserError(
                f"--max-memory is too little: to read a row of {quantised[0]}, which is quantised, takes "
                f"{sized(2 * columns * ELEMENT_BYTES)}"
            )
        return max(step, 1)
    return step // columns * columns


def as_bits(values: np.ndarray) -> np.ndarray:
    """`values` as unsigned integers of their width."""
    return values.view(f"u{values.dtype.itemsize}")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and size have the same bytes; eight are compared at a time."""
    a, b = (np.ascontiguousarray(values).view(np.uint8) for values in (a, b))
    whole = len(a) // 8 * 8
    words = a[:whole].view(np.uint64) == b[:whole].view(np.uint64)
    return bool(words.all()) and np.array_equal(a[whole:], b[whole:])


def round_to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
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
