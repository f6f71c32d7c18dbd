"""B's values as A's in the same places: zeroed, rounded, times a factor, times a factor per FP8 block."""

from collections.abc import Callable

import numpy as np

from weight_sync.canonical import CanonicalTensor
from weight_sync.differences.explanation import Explanation, not_looked_at
from weight_sync.differences.figures import Factor, Rounding, Statistics
from weight_sync.differences.reading import FLOAT64, coarser_dtype, read
from weight_sync.quantised import BLOCK as FP8_BLOCK

_STRIP_BYTES = 64  # memory for an element of a strip of blocks: of two strips on both sides, in float64


def in_place(found: Statistics) -> Explanation | None:
    """What the values of both sides have to do with each other, each in its place."""
    for side, mine, other in (("B", found.contents_b, found.contents_a), ("A", found.contents_a, found.contents_b)):
        if mine.zero and not other.zero:
            return Explanation(f"all zero in {side}", f"all zero in {side}", {"all_zero": side})
    for rounding in found.roundings:
        if rounding.agree and rounding.rounded:
            return with_rounding(None, rounding)
    if found.one_sided == 0 and found.factor.found:
        factor = found.dot / found.square_a
        return Explanation("a constant factor", f"B is A times {factor:.5g}", {"factor": factor})
    if found.within_fp8:
        side = "B" if found.fp8_b else "A"
        text = f"within the rounding of {side}'s FP8 blocks"
        return Explanation("rounded to FP8", text, {"rounded": "fp8", "side": side})
    return None


def with_rounding(arranged: Explanation | None, rounding: Rounding) -> Explanation:
    """One side as the other one rounded, and also `arranged` where that is given."""
    side, kind = rounding.rounded, f"rounded to {rounding.dtype}"
    text = f"{side} is {'A' if side == 'B' else 'B'} rounded to {rounding.dtype}"
    facts = {"rounded": rounding.dtype.name, "side": side}
    if arranged is None:
        return Explanation(kind, text, facts)
    kind, text, facts = f"{arranged.kind} and {kind}", f"{arranged.text}; {text}", {**arranged.facts, **facts}
    return Explanation(kind, text, facts, arranged.whole)


def has_blocks(tensor: CanonicalTensor) -> bool:
    """Whether quantised to FP8 it would have more than one scale."""
    shape = tensor.entry.part_shape
    return len(shape) == 2 and shape[0] * shape[1] > FP8_BLOCK**2


def block_factors(
    a: CanonicalTensor, b: CanonicalTensor, budget: int, advance: Callable[[int], None]
) -> Explanation | None:
    """Is B, tensors that `has_blocks`, A times one number in each FP8 block of 128 x 128? `advance` is told the bytes
    done with."""
    height, width = a.entry.part_shape
    if FP8_BLOCK * width * _STRIP_BYTES > budget:
        return not_looked_at("a factor per FP8 block")
    factors, found = [], False
    for part in range(0, a.size, height * width):
        for row in range(0, height, FP8_BLOCK):
            start, stop = part + row * width, part + min(row + FP8_BLOCK, height) * width
            x, y = (read(tensor, start, stop).astype(FLOAT64).reshape(-1, width) for tensor in (a, b))
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                return None
            for column in range(0, width, FP8_BLOCK):
                factor = Factor(coarser_dtype(a.dtype, b.dtype))
                factor.update(*(strip[:, column : column + FP8_BLOCK].reshape(-1) for strip in (x, y)))
                if not factor.holds:
                    return None
                found = found or factor.found
                if factor.factor is not None:
                    factors.append(factor.factor)
            advance((stop - start) * (a.dtype.itemsize + b.dtype.itemsize))
    if not found:
        return None
    low, high = min(factors), max(factors)
    text = f"B is A times one factor per 128 x 128 block, {low:.5g} to {high:.5g}: FP8 scales left out or misapplied"
    return Explanation("a factor per FP8 block", text, {"block_factors": [low, high]})
