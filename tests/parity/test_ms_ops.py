"""Every operation of ms_train/ops.py, forward and backward, in both CPU backends, against float64 NumPy.

All cases of a backend share one compiled graph: compiling is what costs time here.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import ops as ms_ops

from ms_train import cpu_kernels, ops
from shared_ops.batch import IGNORED
from shared_ops.errors import UserError

TOLERANCE = 1e-5  # of each tensor's largest value: DESIGN section 5, point 7
THREADS = 3  # of the CPU kernels: more than one, whatever the machine, and no divisor of the sizes


# ------------------------------------------------------------------------------ float64 formulas
# Each returns the output and a function from the output's gradient to {argument index: gradient}.

def linear(x, w):
    def backward(dy):
        return {0: dy @ w, 1: dy.reshape(-1, w.shape[0]).T @ x.reshape(-1, w.shape[1])}
    return x @ w.T, backward


def rms_norm(x, w, eps):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    n = x * r

    def backward(dy):
        dn = dy * w
        return {0: r * (dn - n * (dn * n).mean(-1, keepdims=True)), 1: (dy * n).reshape(-1, len(w)).sum(0)}
    return n * w, backward


def rotary(x, cos, sin):
    def rotate(x, sin):
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    return rotate(x, sin), lambda dy: {0: rotate(dy, -sin)}


def attention(q, k, v, segment_ids, scale, window):
    i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])[None, :]
    visible = (j <= i) & (i - j < (window or q.shape[1]))
    visible = visible[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
    s = np.where(visible[:, None], np.einsum("bind,bjnd->bnij", q, k) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def backward(dy):
        dp = np.einsum("binv,bjnv->bnij", dy, v)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        return {0: np.einsum("bnij,bjnd->bind", ds, k), 1: np.einsum("bnij,bind->bjnd", ds, q),
                2: np.einsum("bnij,binv->bjnv", p, dy)}
    return np.einsum("bnij,bjnv->binv", p, v), backward


def swiglu(gate, up):
    s = 0.5 * (1 + np.tanh(0.5 * gate))  # the sigmoid
    return gate * s * up, lambda dy: {0: dy * up * s * (1 + gate * (1 - s)), 1: dy * gate * s}


def routed_experts(x, slots, weights, gate_up, down):
    width = down.shape[2]
    experts = []  # (expert, its pairs' tokens and choices, activations, backward of the activation)
    for e in range(len(down)):
        t, k = np.nonzero(slots == e)
        h = x[t] @ gate_up[e].T
        experts.append((e, t, k, *swiglu(h[:, :width], h[:, width:])))
    y = np.zeros_like(x)
    for e, t, k, a, _ in experts:
        np.add.at(y, t, weights[t, k, None] * (a @ down[e].T))

    def backward(dy):
        dx, dw, dgate_up, ddown = map(np.zeros_like, (x, weights, gate_up, down))
        for e, t, k, a, swiglu_backward in experts:
            dw[t, k] = (dy[t] * (a @ down[e].T)).sum(-1)
            weighted = weights[t, k, None] * dy[t]
            ddown[e] = weighted.T @ a
            parts = swiglu_backward(weighted @ down[e])
            dh = np.concatenate([parts[0], parts[1]], -1)
            dgate_up[e] = dh.T @ x[t]
            np.add.at(dx, t, dh @ gate_up[e])
        return {0: dx, 2: dw, 3: dgate_up, 4: ddown}
    return y, backward


def top_k(scores, k):
    return np.argsort(-scores, -1, kind="stable")[:, :k], None


def chosen_mask(indices, n):
    return (indices[:, :, None] == np.arange(n)).any(1).astype(np.float64), None


def cross_entropy_sum(logits, labels):
    rows, valid = np.arange(len(labels)), labels != IGNORED
    index = np.where(valid, labels, 0)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def backward(dy):
        grad = np.exp(log_p)
        grad[rows, index] -= 1
        return {0: grad * valid[:, None] * dy}
    return -(log_p[rows, index] * valid).sum(), backward


def sum_of_squares(x):
    return (x * x).sum(), None


def router_use(scores):
    """The operations without gradient on the path of one that has: scores picked by their own top 2."""
    index = top_k(scores, 2)[0]
    factor = chosen_mask(index, scores.shape[1])[0].sum(0)[:2] + (scores * scores).sum()

    def backward(dy):
        grad = np.zeros_like(scores)
        np.put_along_axis(grad, index, dy * factor, -1)
        return {0: grad}
    return np.take_along_axis(scores, index, -1) * factor, backward


class AttentionUse(nn.Cell):
    def __init__(self, scale: float, window: int | None):
        super().__init__()
        self.attention = ops.Attention(scale, window)

    def construct(self, q, k, v, segment_ids):
        return self.attention(q, k, v, self.attention.visible(segment_ids))


class RouterUse(nn.Cell):
    def __init__(self, n_experts: int):
        super().__init__()
        self.top_k, self.chosen, self.squares = ops.TopK(2), ops.ChosenMask(n_experts), ops.SumOfSquares()

    def construct(self, scores):
        index = self.top_k(scores)
        factor = self.chosen(index).sum(0)[:2] + self.squares(scores)
        return ms_ops.gather_elements(scores, 1, index) * factor


# ------------------------------------------------------------------------------ cases

@dataclasses.dataclass
class Case:
    name: str
    cell: Callable[[], nn.Cell]
    reference: Callable
    inputs: tuple[np.ndarray, ...]
    transposed: bool = False  # the first input's axes 0 and 1 are swapped inside the graph: a strided operand
    only_kernels: bool = False  # large enough that the kernels split it among threads; no news for composites


def cases() -> list[Case]:
    rng = np.random.default_rng(7)

    def normal(*shape, std=1.0):
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def packed(*rows):
        """Rows of (segment id, length) -> segment_ids."""
        return np.array([np.repeat(*zip(*row, strict=True)) for row in rows], np.int32)

    def norm(name, eps, *inputs, **options):
        return Case(name, lambda: ops.RMSNorm(eps), functools.partial(rms_norm, eps=eps), inputs, **options)

    def att(name, b, s, n, h, v, segments, window=None, std=1.0, **options):
        scale = 0.37 * h ** -0.5
        return Case(name, lambda: AttentionUse(scale, window),
                    functools.partial(attention, scale=scale, window=window),
                    (normal(b, s, n, h, std=std), normal(b, s, n, h, std=std), normal(b, s, n, v), segments),
                    **options)

    def experts(name, t, d, f, e, k, slots, **options):
        return Case(name, lambda: ops.RoutedExperts(e, k), routed_experts,
                    (normal(t, d), slots.astype(np.int32), rng.uniform(0.05, 1.0, (t, k)).astype(np.float32),
                     normal(e, 2 * f, d, std=d ** -0.5), normal(e, d, f, std=f ** -0.5)), **options)

    def choose(t, e, k):
        return np.stack([rng.permutation(e)[:k] for _ in range(t)])

    angle = rng.uniform(0, 40, (2, 7, 1, 5))
    uneven = choose(70, 12, 3).astype(np.int32)
    uneven[uneven == 5] = 6  # expert 5 is empty, 6 may come twice in a row
    labels = rng.integers(0, 37, 19).astype(np.int32)
    labels[[0, 7, 18]] = IGNORED
    tie_free = np.stack([rng.permutation(13) for _ in range(9)]).astype(np.float32) - 6
    grouped = np.where(tie_free > 0, tie_free, -np.inf).astype(np.float32)  # six of thirteen are finite
    return [
        Case("linear", ops.Linear, linear, (normal(2, 9, 20), normal(7, 20))),
        Case("linear many rows", ops.Linear, linear, (normal(450, 34), normal(150, 34)), only_kernels=True),
        Case("linear many columns", ops.Linear, linear, (normal(40, 530), normal(470, 530)),
             only_kernels=True),
        Case("linear 1 row", ops.Linear, linear, (normal(1, 48), normal(5, 48))),
        Case("linear strided", ops.Linear, linear, (normal(5, 33), normal(48, 5)), transposed=True),
        norm("rms_norm", 1e-6, normal(3, 5, 37), 1 + normal(37, std=0.3)),
        norm("rms_norm many rows", 1e-6, normal(133, 40), 1 + normal(40, std=0.3), only_kernels=True),
        norm("rms_norm small", 1e-6, 1e-3 + normal(2, 16, std=1e-4), np.ones(16, np.float32)),  # P19
        norm("rms_norm zero", 1e-6, np.zeros((1, 8), np.float32), normal(8)),
        norm("rms_norm strided", 1e-5, normal(21, 11), normal(21), transposed=True),
        Case("rotary", ops.Rotary, rotary,
             (normal(2, 7, 3, 10), np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))),
        Case("swiglu", ops.SwiGLU, swiglu, (normal(2, 5, 19, std=4), normal(2, 5, 19))),
        Case("swiglu extreme", ops.SwiGLU, swiglu,
             (np.array([-200, -90, -20, -1e-6, 0, 1e-6, 20, 90, 200], np.float32), normal(9))),
        att("attention", 2, 37, 3, 12, 8, packed([(1, 37)], [(1, 37)])),
        att("attention packed", 2, 150, 2, 8, 12, packed([(1, 70), (2, 1), (3, 60), (0, 19)], [(0, 150)])),
        att("attention window", 1, 140, 2, 8, 4, packed([(1, 100), (2, 40)]), window=17),
        att("attention window 1", 1, 9, 1, 4, 6, packed([(1, 9)]), window=1, only_kernels=True),
        att("attention sharp", 1, 66, 1, 16, 16, packed([(1, 66)]), std=6.0),
        att("attention scattered", 1, 80, 1, 8, 8, rng.integers(0, 3, (1, 80)).astype(np.int32),
            only_kernels=True),
        experts("experts", 70, 20, 9, 12, 3, uneven),
        experts("experts many rows", 350, 24, 150, 3, 2, choose(350, 3, 2), only_kernels=True),
        experts("experts one takes all", 40, 16, 8, 5, 1, np.full((40, 1), 3)),
        experts("experts two of many", 33, 12, 16, 16, 2, choose(33, 2, 2), only_kernels=True),
        Case("chosen_mask", lambda: ops.ChosenMask(13), functools.partial(chosen_mask, n=13),
             (choose(20, 13, 3).astype(np.int32),)),
        Case("top_k", lambda: ops.TopK(4), functools.partial(top_k, k=4), (grouped,)),
        Case("top_k all", lambda: ops.TopK(13), functools.partial(top_k, k=13), (tie_free,)),
        Case("router use", lambda: RouterUse(13), router_use, (tie_free * 0.1,)),
        Case("cross_entropy", ops.CrossEntropySum, cross_entropy_sum, (normal(19, 37, std=5), labels)),
        Case("cross_entropy many", ops.CrossEntropySum, cross_entropy_sum,
             (normal(50, 2100, std=3), rng.integers(0, 2100, 50).astype(np.int32)), only_kernels=True),
        Case("cross_entropy large", ops.CrossEntropySum, cross_entropy_sum,
             (normal(4, 9) + 3e4, np.array([8, 0, 3, IGNORED], np.int32))),
        Case("cross_entropy ignored", ops.CrossEntropySum, cross_entropy_sum,
             (normal(3, 9), np.full(3, IGNORED, np.int32))),
        Case("sum_of_squares", ops.SumOfSquares, sum_of_squares, (normal(3, 5, 101),)),
    ]


CASES = cases()


@functools.cache
def expected(index: int):
    """(output, output gradient given, {argument: gradient}) of a case, in float64."""
    c = CASES[index]
    inputs = [a.astype(np.float64) if a.dtype == np.float32 else a for a in c.inputs]
    if c.transposed:
        inputs[0] = inputs[0].swapaxes(0, 1)
    y, backward = c.reference(*inputs)
    dy = np.random.default_rng(index).standard_normal(np.shape(y)).astype(np.float32)
    gradients = backward(dy.astype(np.float64)) if backward else {}
    if c.transposed:
        gradients[0] = gradients[0].swapaxes(0, 1)
    return y, dy, gradients


# ------------------------------------------------------------------------------ MindSpore

class OneCase(nn.Cell):
    def __init__(self, c: Case):
        super().__init__()
        self.cell, self.transposed = c.cell(), c.transposed

    def construct(self, first, *rest):
        if self.transposed:
            first = first.swapaxes(0, 1)
        return self.cell(first, *rest)


class AllCases(nn.Cell):
    """Per case the output, and where it has them the gradients of all inputs."""

    def __init__(self, indices: list[int]):
        super().__init__()
        self.entries = nn.CellList([OneCase(CASES[i]) for i in indices])
        self.count = len(indices)
        self.start = tuple(int(end) for end in np.cumsum([0] + [len(CASES[i].inputs) + 1 for i in indices]))
        self.differentiable = tuple(bool(expected(i)[2]) for i in indices)
        self.grad = ms_ops.GradOperation(get_all=True, sens_param=True)

    @ms.jit
    def construct(self, *flat):
        results = ()
        for i in range(self.count):
            args, dy = flat[self.start[i]:self.start[i + 1] - 1], flat[self.start[i + 1] - 1]
            y, gradients = self.entries[i](*args), ()
            if self.differentiable[i]:
                gradients = self.grad(self.entries[i])(*args, dy)
            results += ((y, gradients),)
        return results


def to_numpy(value):
    return tuple(map(to_numpy, value)) if isinstance(value, (tuple, list)) else value.asnumpy()


def use(backend: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    try:
        ops.select(backend)
    except UserError as error:
        pytest.skip(str(error))


def set_threads(backend: str, threads: int) -> None:
    if backend == "cpu_kernels":
        ctypes.CDLL(str(cpu_kernels.library())).set_threads(threads)


@functools.cache
def results(backend: str):
    """{case: (output, gradients)} of all cases, computed twice."""
    use(backend)
    indices = [i for i, c in enumerate(CASES) if backend == "cpu_kernels" or not c.only_kernels]
    flat = [Tensor(a) for i in indices for a in (*CASES[i].inputs, expected(i)[1])]
    net = AllCases(indices)
    set_threads(backend, THREADS)
    runs = [to_numpy(net(*flat)) for _ in range(2)]
    set_threads(backend, cpu_kernels.threads())
    return [dict(zip(indices, run, strict=True)) for run in runs]


@pytest.fixture(autouse=True)
def backend_of_the_process(monkeypatch):
    """What these tests select ends with them."""
    monkeypatch.setattr(ops, "_selected", ops._selected)


BACKENDS = ("composite", "cpu_kernels")
RUNS = [pytest.param(backend, i, id=f"{backend}-{c.name}") for backend in BACKENDS
        for i, c in enumerate(CASES) if backend == "cpu_kernels" or not c.only_kernels]


def error(actual, wanted):
    """The largest deviation, relative to the largest value wanted (absolute where that is 0)."""
    assert actual.shape == np.shape(wanted)
    return np.abs(actual.astype(np.float64) - wanted).max() / (np.abs(wanted).max() or 1.0)


@pytest.mark.parametrize("backend, index", RUNS)
def test_against_float64(backend, index):
    y, gradients = results(backend)[0][index]
    wanted_y, _, wanted_gradients = expected(index)
    if np.asarray(wanted_y).dtype.kind == "i":
        assert y.dtype == np.int32
        finite = np.take_along_axis(CASES[index].inputs[0], wanted_y, 1) > -np.inf
        np.testing.assert_array_equal(np.where(finite, y, -1), np.where(finite, wanted_y, -1))
        assert all(len(set(row)) == len(row) for row in y.tolist())
    else:
        assert y.dtype == np.float32
        assert error(y, wanted_y) <= TOLERANCE
    for argument, wanted in wanted_gradients.items():
        assert error(gradients[argument], wanted) <= TOLERANCE, f"gradient of argument {argument}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_every_run(backend):
    flatten = [[a for y, g in run.values() for a in (y, *g)] for run in results(backend)]
    for first, second in zip(*flatten, strict=True):
        np.testing.assert_array_equal(first, second)


def test_reference_gradients():
    """The float64 formulas' own gradients equal central differences."""
    rng = np.random.default_rng(3)
    for index, c in enumerate(CASES):
        _, dy, gradients = expected(index)
        if c.transposed or "large" in c.name or "router" in c.name:
            continue
        inputs = [a.astype(np.float64) if a.dtype == np.float32 else a for a in c.inputs]
        for argument, gradient in gradients.items():
            direction, h = rng.standard_normal(gradient.shape), 1e-6
            ahead, behind = ([a + step * direction if i == argument else a for i, a in enumerate(inputs)]
                             for step in (h, -h))
            difference = ((c.reference(*ahead)[0] - c.reference(*behind)[0]) * dy).sum() / (2 * h)
            scale = 1 + np.abs(gradient).max() * gradient.size ** 0.5
            assert abs(difference - (gradient * direction).sum()) <= 1e-6 * scale, c.name


@pytest.mark.parametrize("backend", BACKENDS)
def test_sum_of_squares_is_accurate_on_large_tensors(backend):
    use(backend)
    x = (np.random.default_rng(0).standard_normal(8_000_000) * 10).astype(np.float32)
    total = ops.SumOfSquares()(Tensor(x)).asnumpy()
    exact = np.square(x.astype(np.float64)).sum()
    assert abs(total - exact) <= 1e-6 * exact


def test_kernels_do_not_hide_nan():
    use("cpu_kernels")
    x = np.ones((2, 3, 1, 4), np.float32)
    x[0, 1, 0, 2] = np.nan
    flat, ids = Tensor(x.reshape(6, 4)), Tensor(np.ones((2, 3), np.int32))
    labels, slots = Tensor(np.zeros(6, np.int32)), Tensor(np.zeros((6, 1), np.int32))
    matrix, experts = Tensor(np.ones((4, 4), np.float32)), Tensor(np.ones((1, 8, 4), np.float32))
    weights = Tensor(np.ones((6, 1), np.float32))
    outputs = {
        "linear": ops.Linear()(flat, matrix),
        "rms_norm": ops.RMSNorm(1e-6)(flat, matrix[0]),
        "swiglu": ops.SwiGLU()(flat, flat),
        "attention": ops.Attention(1.0)(Tensor(x), Tensor(x), Tensor(np.ones_like(x)), ids),
        "experts": ops.RoutedExperts(1, 1)(flat, slots, weights, experts, experts[:, :4]),
        "cross_entropy": ops.CrossEntropySum()(flat, labels),
        "sum_of_squares": ops.SumOfSquares()(flat),
    }
    assert {name for name, y in outputs.items() if not np.isnan(y.asnumpy()).any()} == set()
    assert not np.isnan(outputs["attention"].asnumpy()[1]).any()


# ------------------------------------------------------------------------------ choosing and building

@pytest.fixture
def fresh_choice(monkeypatch):
    """No backend chosen, no library built; undone afterwards."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    monkeypatch.setattr(ops, "_selected", None)
    cpu_kernels.library.cache_clear()
    yield monkeypatch
    cpu_kernels.library.cache_clear()


def test_without_a_compiler_composites_take_over_with_one_warning(fresh_choice, caplog):
    fresh_choice.setenv("CXX", "no-such-compiler")
    assert isinstance(ops.SwiGLU(), ops.SwiGLU)
    assert ops.selected() == "composite"
    assert [r.getMessage() for r in caplog.records if r.name == "ms_train.ops"] == [
        "no CPU kernels, slower operations of MindSpore take their place: no C++ compiler (no-such-compiler)"
    ]


def test_a_compiler_that_fails_is_reported(fresh_choice, tmp_path):
    fresh_choice.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh_choice.setattr(cpu_kernels, "FLAGS", (*cpu_kernels.FLAGS, "--no-such-flag"))
    with pytest.raises(UserError, match=r"'cpu_kernels': \S+ failed: .*--no-such-flag.*; use auto"):
        ops.select("cpu_kernels")
    assert ops.select() == "composite"
    assert not list((tmp_path / "deepseek-twins").iterdir())


def test_forced_backends(fresh_choice):
    with pytest.raises(UserError, match="'native' needs device Ascend, this process uses CPU"):
        ops.select("native")
    with pytest.raises(UserError, match="'fast': expected auto, native, cpu_kernels, composite"):
        ops.select("fast")
    assert ops.select("composite") == "composite"
    assert type(ops.TopK(2)).__name__ == "_CompositeTopK"


def test_builders_at_once_and_a_damaged_library(fresh_choice, tmp_path):
    fresh_choice.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = tuple(flag.replace("-O3", "-O0") for flag in cpu_kernels.FLAGS)
    fresh_choice.setattr(cpu_kernels, "FLAGS", quick)
    try:
        command = cpu_kernels._command()
    except cpu_kernels.Unavailable as error:
        pytest.skip(str(error))
    name = f"cpu_kernels-{cpu_kernels._key(command)}.so"
    (tmp_path / "deepseek-twins").mkdir()
    (tmp_path / "deepseek-twins" / name).write_bytes(b"half a library")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: cpu_kernels.library.__wrapped__(), range(2)))
    assert [p.name for p in paths] == [name, name]
    assert [p.name for p in (tmp_path / "deepseek-twins").iterdir()] == [name]
    built = paths[0].stat()
    assert cpu_kernels.library() == paths[0] and paths[0].stat().st_mtime_ns == built.st_mtime_ns


@pytest.mark.parametrize(
    "given, workers, wanted",
    [("3", "2", 3), ("4,2", "", 4), ("", "2", 4), ("", "100", 1), ("", "", 8), ("x", "", 8)],
)
def test_threads(monkeypatch, given, workers, wanted):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("MS_WORKER_NUM", workers)
    monkeypatch.setattr(cpu_kernels.os, "sched_getaffinity", lambda _: set(range(8)))
    assert cpu_kernels.threads() == wanted
