"""Central differences: how hand-derived gradients are verified, in float64."""

from collections.abc import Callable, Mapping

import numpy as np

STEP = 1e-5


def worst_error(
    function: Callable[[], float],
    arrays: Mapping[str, np.ndarray],
    grads: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    directions: int = 1,
    entries: int = 3,
) -> tuple[float, str]:
    """Largest relative error of `grads` against central differences of `function`, and where it is.

    `function` reads `arrays` (float64), which are perturbed in place and restored. Each array is moved along
    random directions, with an error relative to the derivative or, where that happens to be small, to its
    typical size |gradient| / sqrt(size); and along single entries, the one with the largest gradient among
    them, with an error relative to that gradient. Where the gradient is all 0, the difference must be below
    1e-9.
    """
    worst = (0.0, "")
    for name, array in arrays.items():
        grad = grads[name]
        assert grad.shape == array.shape, (name, grad.shape, array.shape)
        largest = float(np.abs(grad).max())

        def error(direction: np.ndarray, scale: float, array=array, grad=grad) -> float:
            start = array.copy()
            array += STEP * direction
            above = function()
            array[...] = start - STEP * direction
            below = function()
            array[...] = start
            derivative = float((grad * direction).sum())
            return abs((above - below) / (2 * STEP) - derivative) / max(abs(derivative), scale)

        for _ in range(directions):
            direction = rng.standard_normal(array.shape)
            direction /= np.linalg.norm(direction)
            typical = float(np.linalg.norm(grad)) / array.size**0.5
            worst = max(worst, (error(direction, typical or 1e-3), f"{name} along a direction"))
        for flat in {int(np.abs(grad).argmax()), *rng.integers(array.size, size=entries).tolist()}:
            entry = np.zeros(array.shape)
            entry.flat[flat] = 1.0
            where = ", ".join(str(i) for i in np.unravel_index(flat, array.shape))
            worst = max(worst, (error(entry, largest or 1e-3), f"{name}[{where}]"))
    return worst
