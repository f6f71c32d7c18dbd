"""float64 arrays, named parameters and linear maps: what the rest of the reference is written with."""

from collections.abc import Mapping

import numpy as np

Params = Mapping[str, np.ndarray]
Grads = dict[str, np.ndarray]


def f64(x) -> np.ndarray:
    """`x` in float64 (no copy if it is already)."""
    return np.asarray(x).astype(np.float64, copy=False)


def sub(params: Params, prefix: str) -> dict[str, np.ndarray]:
    """The parameters below `prefix`, named relative to it: "mlp.gate.weight" in "mlp." is "gate.weight"."""
    return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


def put(grads: Grads, prefix: str, below: Grads) -> None:
    """The inverse of `sub`: add the gradients of the module at `prefix` to `grads` under their full names."""
    for name, value in below.items():
        add(grads, prefix + name, value)


def add(grads: Grads, name: str, value: np.ndarray) -> None:
    """Sum `value` into `grads[name]`: a parameter used twice gets the sum of both gradients."""
    grads[name] = grads[name] + value if name in grads else value


def linear(x, weight):
    """y = x W^T, x [..., in], weight [out, in] -> [..., out]; the models have no biases."""
    x, weight = f64(x), f64(weight)
    return x @ weight.T, (x, weight)


def linear_backward(dy, cache):
    """-> (dx [..., in], dweight [out, in])."""
    x, weight = cache
    rows_dy, rows_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dy @ weight, rows_dy.T @ rows_x


def sigmoid(x):
    """1 / (1 + e^-x), without overflow for any x."""
    return np.exp(-np.logaddexp(0.0, -f64(x)))


def logsumexp(x):
    """log sum exp over the last axis, which is dropped."""
    highest = x.max(axis=-1)
    return highest + np.log(np.exp(x - highest[..., None]).sum(axis=-1))


def softmax(x):
    """Softmax over the last axis; -inf entries get exactly 0."""
    x = f64(x)
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def softmax_backward(dy, y):
    """Gradient to the input of y = softmax(x): y * (dy - sum(dy * y))."""
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))
