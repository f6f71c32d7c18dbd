"""Operations of the model, one `nn.Cell` each, without parameters.

This is the only file that asks which device it runs on. Every operation has up to three implementations:

- `native`: Ascend's fused kernels;
- `cpu_kernels`: the small C++ library of `cpu_kernels.cc`, where a C++ compiler is at hand;
- `composite`: plain MindSpore operations, which run anywhere.

`select()` fixes the choice, once, before the network is built; without it the first operation built does.
The interface classes state the contract; constructing one gives an instance of the implementation chosen.

Shapes: B rows, S sequence, T tokens, N heads, D hidden, E expert slots, K slots per token, F expert width.
"""

import logging

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import (
    GroupedMatmul,
    MoeTokenPermute,
    MoeTokenUnpermute,
    RotaryPositionEmbedding,
    Swiglu,
)

from ms_train import cpu_kernels
from shared_ops.batch import IGNORED
from shared_ops.errors import UserError

BACKENDS = ("native", "cpu_kernels", "composite")

_logger = logging.getLogger(__name__)
_selected: str | None = None


def select(backend: str = "auto") -> str:
    """Fix the implementation that operations built from now on use; returns its name.

    `auto` takes `native` on Ascend, on CPU `cpu_kernels` where they can be built, else `composite`.
    Raises `UserError` when the named backend does not exist or is not available here.
    """
    global _selected
    _selected = _resolve(backend)
    return _selected


def selected() -> str:
    """The backend in use; decides it on the first call when `select` was not called."""
    return _selected or select()


def _resolve(backend: str) -> str:
    if backend not in ("auto", *BACKENDS):
        raise UserError(f"operations backend {backend!r}: expected auto, {', '.join(BACKENDS)}")
    device, automatic = ms.get_context("device_target"), backend == "auto"
    if automatic:
        backend = {"Ascend": "native", "CPU": "cpu_kernels"}.get(device, "composite")
    needed = {"native": "Ascend", "cpu_kernels": "CPU"}.get(backend, device)
    if device != needed:
        raise UserError(f"operations backend {backend!r} needs device {needed}, this process uses {device}")
    if backend == "cpu_kernels":
        try:
            cpu_kernels.library()
        except cpu_kernels.Unavailable as error:
            if not automatic:
                raise UserError(f"operations backend {backend!r}: {error}; use auto or composite") from error
            _logger.warning("no CPU kernels, slower operations of MindSpore take their place: %s", error)
            backend = "composite"
    return backend


class _Operation(nn.Cell):
    """Constructing an interface class yields its implementation for the selected backend."""

    def __new__(cls, *args, **kwargs):
        if cls in _IMPLEMENTATIONS:
            cls = _IMPLEMENTATIONS[cls][BACKENDS.index(selected())]
        return super().__new__(cls)


# ---------------------------------------------------------------------------------------------- interface

class Linear(_Operation):
    """x [..., in], w [out, in] -> x @ w^T [..., out] in x's dtype (w is cast to it)."""

    def __init__(self):
        super().__init__()


class RMSNorm(_Operation):
    """x [..., D], w [D] -> x / sqrt(mean(x^2) + eps) * w, statistics in fp32, cast to x's dtype before the
    multiplication by w (Zhang and Sennrich 2019)."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps


class Rotary(_Operation):
    """x [B,S,N,r], cos and sin [B,S,1,r/2] fp32 -> [B,S,N,r]: rotates the interleaved pairs (2i, 2i+1) by
    the angle of column i, in fp32. No gradient flows to the tables."""

    def __init__(self):
        super().__init__()


class Attention(_Operation):
    """q and k [B,S,N,h], v [B,S,N,v], visible(segment_ids [B,S] int32) -> softmax(scale q k^T) v, [B,S,N,v].

    Query i sees key j iff j <= i, both have the same segment id and, with a window, i - j < sliding_window.
    Softmax in fp32.
    """

    def __init__(self, scale: float, sliding_window: int | None = None):
        super().__init__()
        self.scale = float(scale)
        self.sliding_window = sliding_window

    def visible(self, segment_ids):
        """What `construct` takes to know which keys are visible, made once per step for all layers."""
        return segment_ids


class SwiGLU(_Operation):
    """gate, up (same shape) -> silu(gate) * up."""

    def __init__(self):
        super().__init__()


class RoutedExperts(_Operation):
    """Dropless mixture of SwiGLU experts with static shapes.

    x [T,D], slots [T,K] int32 in 0..E-1, weights [T,K] fp32, gate_up [E,2F,D] (rows 0..F-1 gate, F..2F-1 up),
    down [E,D,F] -> y [T,D] with y_t = sum_k weights_tk * down_e (silu(gate_e x_t) * up_e x_t), e = slots_tk.
    Every (token, choice) pair is computed, whatever the balance. Gradients to x, weights, gate_up and down.
    """

    def __init__(self, n_slots: int, top_k: int):
        super().__init__()
        self.n_slots = n_slots
        self.top_k = top_k


class TopK(_Operation):
    """scores [T,n] -> the indices of the k largest of each row, by descending score, [T,k] int32.

    No gradient: gather the scores with the indices. The order of equal scores is not specified.
    """

    def __init__(self, k: int):
        super().__init__()
        self.k = k


class ChosenMask(_Operation):
    """indices [T,K] int32 in 0..n-1, distinct in a row -> [T,n] fp32, 1 where chosen. No gradient."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n


class CrossEntropySum(_Operation):
    """logits [T,V], labels [T] int32 -> sum over labels != -100 of -log softmax(logits)[label], fp32 scalar.

    All labels ignored gives 0 with zero gradients.
    """

    def __init__(self):
        super().__init__()


class SumOfSquares(_Operation):
    """x (any shape) -> sum of x^2, fp32 scalar, accumulated to better than 1e-6. For norms: no gradient."""

    def __init__(self):
        super().__init__()


# ---------------------------------------------------------------------------------------------- composites

class _CompositeLinear(Linear):
    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x, w):
        y = self.matmul(x.reshape(-1, x.shape[-1]), w.astype(x.dtype))
        return y.reshape(x.shape[:-1] + (w.shape[0],))


class _CompositeRMSNorm(RMSNorm):
    """The gradient is written out: the automatic one sums over the last axis, a slow operation on CPU,
    where a mean over it is fast."""

    def __init__(self, eps: float):
        super().__init__(eps)
        self.mean = ops.ReduceMean(keep_dims=True)
        self.rsqrt = ops.Rsqrt()

    def construct(self, x, w):
        x32 = x.astype(ms.float32)
        r = self.rsqrt(self.mean(x32 * x32, -1) + self.eps)
        return (x32 * r).astype(x.dtype) * w.astype(x.dtype)

    def bprop(self, x, w, out, dout):
        x32, dy = x.astype(ms.float32), dout.astype(ms.float32)
        r = self.rsqrt(self.mean(x32 * x32, -1) + self.eps)
        normed = x32 * r
        dn = dy * w.astype(ms.float32)
        dx = (dn - normed * self.mean(dn * normed, -1)) * r
        dw = (dy * normed).reshape(-1, x.shape[-1]).sum(0)
        return dx.astype(x.dtype), dw.astype(w.dtype)


class _CompositeRotary(Rotary):
    """Swapping the members of the pairs, with the sign, is a product with a constant matrix, exact because
    each column holds a single 1 or -1: a few nodes where strided slices and a stack take many."""

    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul()
        self.matmul_t = ops.MatMul(transpose_b=True)

    def construct(self, x, cos, sin):
        c, s, swap = self.tables(x, cos, sin)
        x32 = x.astype(ms.float32)
        y = x32 * c + self.matmul(x32.reshape(-1, x.shape[-1]), swap).reshape(x.shape) * s
        return y.astype(x.dtype)

    def bprop(self, x, cos, sin, out, dout):
        c, s, swap = self.tables(x, cos, sin)
        dy = dout.astype(ms.float32)
        dx = dy * c + self.matmul_t((dy * s).reshape(-1, x.shape[-1]), swap).reshape(x.shape)
        return dx.astype(x.dtype), ops.zeros_like(cos), ops.zeros_like(sin)

    def tables(self, x, cos, sin):
        return _full_width(cos), _full_width(sin), _pair_swap(x.shape[-1])


@ms.constexpr
def _pair_swap(width: int):
    """The [width, width] matrix P with (x P)[2i] = -x[2i+1], (x P)[2i+1] = x[2i]."""
    matrix = np.zeros((width, width), np.float32)
    even = np.arange(0, width, 2)
    matrix[even + 1, even] = -1.0
    matrix[even, even + 1] = 1.0
    return Tensor(matrix)


def _full_width(table):
    """[B,S,1,r/2] -> [B,S,1,r] with every column twice."""
    b, s, one, half = table.shape
    pairs = ops.broadcast_to(table.reshape(b, s, one, half, 1), (b, s, one, half, 2))
    return pairs.reshape(b, s, one, 2 * half)


class _CompositeAttention(Attention):
    """Scores of all pairs of a head: [B,N,S,S] fp32 in memory."""

    HIDDEN = -1e30  # added to a score; finite, since no row is empty: i sees itself

    def __init__(self, scale: float, sliding_window: int | None = None):
        super().__init__(scale, sliding_window)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.matmul = ops.BatchMatMul()
        self.softmax = ops.Softmax(-1)
        self.transpose = ops.Transpose()

    def visible(self, segment_ids):
        """What is added to the scores, [B,1,S,S] fp32."""
        return _hidden(segment_ids, self.sliding_window).astype(ms.float32).expand_dims(1) * self.HIDDEN

    def construct(self, q, k, v, visible):
        q = self.transpose((q * self.scale).astype(q.dtype), (0, 2, 1, 3))
        k = self.transpose(k, (0, 2, 1, 3))
        v = self.transpose(v, (0, 2, 1, 3))
        p = self.softmax(self.scores(q, k).astype(ms.float32) + ops.stop_gradient(visible))
        return self.transpose(self.matmul(p.astype(v.dtype), v), (0, 2, 1, 3))


def _hidden(segment_ids, sliding_window):
    """segment_ids [B,S] -> [B,S,S] bool, True where query i (axis 1) does not see key j (axis 2)."""
    position = ops.arange(segment_ids.shape[1])
    i, j = position.expand_dims(1), position.expand_dims(0)
    hidden = ops.logical_or(j > i, segment_ids.expand_dims(2) != segment_ids.expand_dims(1))
    if sliding_window is not None:
        hidden = ops.logical_or(hidden, i - j >= sliding_window)
    return hidden


class _CompositeSwiGLU(SwiGLU):
    def construct(self, gate, up):
        return ops.silu(gate) * up


class _CompositeRoutedExperts(RoutedExperts):
    """Sorts the T*K pairs by expert, pads each expert to whole blocks of rows, and multiplies the blocks with
    their expert's gathered weights in one batched product. The number of blocks is the upper bound over all
    routings, so that shapes are static."""

    def __init__(self, n_slots: int, top_k: int):
        super().__init__(n_slots, top_k)
        self.batch_matmul_t = ops.BatchMatMul(transpose_b=True)
        self.batch_matmul = ops.BatchMatMul()

    def construct(self, x, slots, weights, gate_up, down):
        tokens, k, e = x.shape[0], self.top_k, self.n_slots
        width = down.shape[2]
        block = _block_rows(tokens * k, e)
        n_blocks = (tokens * k + block - 1) // block + e
        row_of_pair, block_expert = self.layout(ops.stop_gradient(slots).reshape(-1), block, n_blocks)
        # Rows that hold no pair read token 0; nothing reads what they give.
        pairs = ops.arange(tokens * k).astype(ms.int32)
        token_of_row = ops.tensor_scatter_update(ops.zeros((n_blocks * block,), ms.int32),
                                                 row_of_pair.expand_dims(1), pairs // k)
        rows = ops.gather(x, token_of_row, 0).reshape(n_blocks, block, -1)
        h = self.batch_matmul_t(rows, ops.gather(gate_up.astype(x.dtype), block_expert, 0))
        h = ops.silu(h[..., :width]) * h[..., width:]
        y = self.batch_matmul_t(h, ops.gather(down.astype(x.dtype), block_expert, 0))
        y = ops.gather(y.reshape(n_blocks * block, -1), row_of_pair, 0).reshape(tokens, k, -1)
        y = self.batch_matmul(weights.expand_dims(1), y.astype(ms.float32))  # weights keep fp32
        return y.reshape(tokens, -1).astype(x.dtype)

    def layout(self, slot, block, n_blocks):
        """slot [T*K] -> the row of each pair in the padded order [T*K], the expert of each block."""
        experts = ops.arange(self.n_slots).astype(ms.int32)
        chosen = (slot.expand_dims(1) == experts.expand_dims(0)).astype(ms.int32)
        before = ops.cumsum(chosen, 0)                       # [T*K, E], counts the pair itself
        blocks_end = ops.cumsum((before[-1] + (block - 1)) // block, 0)
        first_row = ops.concat((ops.zeros((1,), ms.int32), blocks_end[:-1].astype(ms.int32))) * block
        rank = ops.gather_elements(before, 1, slot.expand_dims(1)).reshape(-1) - 1
        row_of_pair = ops.gather(first_row, slot, 0) + rank.astype(ms.int32)
        index = ops.arange(n_blocks).astype(ms.int32)
        ended = index.expand_dims(1) >= blocks_end.astype(ms.int32).expand_dims(0)
        block_expert = ended.astype(ms.int32).sum(-1).astype(ms.int32)
        return row_of_pair, ops.minimum(block_expert, self.n_slots - 1)


@ms.constexpr
def _block_rows(pairs: int, experts: int) -> int:
    """Rows a block: a power of two near half of an expert's even share, at least 8 and at most 128."""
    rows = 8
    while rows < 128 and 4 * rows * experts <= pairs:
        rows *= 2
    return rows


class _CompositeTopK(TopK):
    def __init__(self, k: int):
        super().__init__(k)
        self.top_k = ops.TopK(sorted=True)

    def construct(self, scores):
        return ops.stop_gradient(self.top_k(ops.stop_gradient(scores), self.k)[1])


class _CompositeChosenMask(ChosenMask):
    def construct(self, indices):
        columns = ops.arange(self.n).astype(ms.int32)
        chosen = ops.stop_gradient(indices).expand_dims(2) == columns
        return ops.stop_gradient(chosen.astype(ms.float32).sum(1))


class _CompositeCrossEntropySum(CrossEntropySum):
    def __init__(self):
        super().__init__()
        self.log_softmax = ops.LogSoftmax(-1)

    def construct(self, logits, labels):
        valid = labels != IGNORED
        index = ops.select(valid, labels, ops.zeros_like(labels))
        picked = ops.gather_elements(self.log_softmax(logits.astype(ms.float32)), 1, index.expand_dims(1))
        return -(picked.reshape(-1) * valid.astype(ms.float32)).sum()


class _CompositeSumOfSquares(SumOfSquares):
    def construct(self, x):
        x = ops.stop_gradient(x).astype(ms.float32)
        return ops.reduce_sum(x * x)


# ---------------------------------------------------------------------------------------------- Ascend
# Where no class follows, the composite is what an Ascend runs too: its compiler fuses those few operations.

class _NativeRMSNorm(RMSNorm):
    """The kernel multiplies by w before it rounds: in bf16 one rounding less than the contract says."""

    def __init__(self, eps: float):
        super().__init__(eps)
        self.rms_norm = ops.RmsNorm(eps)

    def construct(self, x, w):
        return self.rms_norm(x, w.astype(x.dtype))[0]


class _NativeRotary(Rotary):
    """In fp32, so that the tables stay fp32. B and S become one axis: for interleaved pairs the kernel wants
    one table for all of its first axis."""

    INTERLEAVED = 1

    def __init__(self):
        super().__init__()
        self.rotate = RotaryPositionEmbedding()

    def construct(self, x, cos, sin):
        tokens, width = x.shape[0] * x.shape[1], x.shape[3]
        c = _full_width(cos).reshape(1, tokens, 1, width)
        s = _full_width(sin).reshape(1, tokens, 1, width)
        y = self.rotate(x.astype(ms.float32).reshape(1, tokens, -1, width), c, s, self.INTERLEAVED)
        return y.reshape(x.shape).astype(x.dtype)


class _NativeAttention(_CompositeAttention):
    """Flash attention, which has no fp32: fp32 takes the composite.

    The kernel wants one head width, a multiple of 16: q, k and v are filled up with zeros, which add nothing to
    the scores and give output columns that are dropped.
    """

    MULTIPLE = 16

    def visible(self, segment_ids):
        """The mask that the heads share, [B,1,S,S] bool, True where hidden."""
        return _hidden(segment_ids, self.sliding_window).expand_dims(1)

    def construct(self, q, k, v, visible):
        if q.dtype == ms.float32:
            return super().construct(q, k, v, visible.astype(ms.float32) * self.HIDDEN)
        value = v.shape[3]
        width = (max(q.shape[3], value) + self.MULTIPLE - 1) // self.MULTIPLE * self.MULTIPLE
        q, k, v = _widen(q, width), _widen(k, width), _widen(v, width)
        y = ops.flash_attention_score(q, k, v, q.shape[2], attn_mask=visible, scalar_value=self.scale,
                                      input_layout="BSND", sparse_mode=0)
        return y[..., :value]


def _widen(x, width):
    """Zeros after the last axis up to `width`; what is that wide already stays."""
    if x.shape[-1] >= width:
        return x
    return ops.concat((x, ops.zeros(x.shape[:-1] + (width - x.shape[-1],), x.dtype)), -1)


class _NativeTopK(TopK):
    """`mint.topk` calls aclnnTopk, which is documented for fp32; whether the operator of `ops.TopK` keeps it is not."""

    def construct(self, scores):
        return ops.stop_gradient(ms.mint.topk(ops.stop_gradient(scores), self.k)[1].astype(ms.int32))


class _NativeRoutedExperts(RoutedExperts):
    def __init__(self, n_slots: int, top_k: int):
        super().__init__(n_slots, top_k)
        self.grouped_gate_up = GroupedMatmul(split_item=3, group_type=0)  # one output, rows in groups
        self.grouped_down = GroupedMatmul(split_item=3, group_type=0)
        self.permute = MoeTokenPermute()
        self.unpermute = MoeTokenUnpermute()
        self.swiglu = Swiglu()
        self.transpose = ops.Transpose()

    def construct(self, x, slots, weights, gate_up, down):
        slots = ops.stop_gradient(slots)
        ends = self.group_ends(slots)
        rows, order = self.permute(x, slots)
        h = self.grouped(self.grouped_gate_up, rows, gate_up, ends)
        y = self.grouped(self.grouped_down, self.swiglu(h, -1), down, ends)
        return self.unpermute(y, order, weights.astype(x.dtype))  # the kernel wants one dtype

    def grouped(self, matmul, rows, weight, ends):
        """Each group of rows times the transpose of its [out, in] matrix."""
        weight = self.transpose(weight.astype(rows.dtype), (0, 2, 1))
        return matmul([rows], [weight], None, None, None, None, None, ends)[0]

    def group_ends(self, slots):
        """The last row, exclusive, of each expert in the sorted order, [E] int64."""
        up_to = slots.reshape(-1, 1) <= ops.arange(self.n_slots).astype(ms.int32)
        return up_to.astype(ms.int32).sum(0).astype(ms.int64)


# ---------------------------------------------------------------------------------------------- CPU kernels

def _constant(*values: float) -> Tensor:
    """Settings travel to a kernel as a small tensor."""
    return Tensor(np.array(values, np.float32))


class _KernelLinear(Linear):
    def __init__(self):
        super().__init__()
        self.kernel = cpu_kernels.linear()

    def construct(self, x, w):
        return self.kernel(x, w.astype(x.dtype))


class _KernelRMSNorm(RMSNorm):
    def __init__(self, eps: float):
        super().__init__(eps)
        self.kernel = cpu_kernels.rms_norm()
        self.eps_tensor = _constant(eps)

    def construct(self, x, w):
        return self.kernel(x, w, self.eps_tensor)


class _KernelRotary(Rotary):
    def __init__(self):
        super().__init__()
        self.kernel = cpu_kernels.rotary()
        self.forward_sign = _constant(1.0)

    def construct(self, x, cos, sin):
        return self.kernel(x, cos, sin, self.forward_sign)


class _KernelAttention(Attention):
    def __init__(self, scale: float, sliding_window: int | None = None):
        super().__init__(scale, sliding_window)
        self.kernel = cpu_kernels.attention()
        self.options = _constant(scale, sliding_window or 0)

    def construct(self, q, k, v, visible):
        return self.kernel(q, k, v, visible, self.options)[0]


class _KernelSwiGLU(SwiGLU):
    def __init__(self):
        super().__init__()
        self.kernel = cpu_kernels.swiglu()

    def construct(self, gate, up):
        return self.kernel(gate, up)


class _KernelRoutedExperts(RoutedExperts):
    def __init__(self, n_slots: int, top_k: int):
        super().__init__(n_slots, top_k)
        self.kernel = cpu_kernels.routed_experts()

    def construct(self, x, slots, weights, gate_up, down):
        return self.kernel(x, slots, weights, gate_up, down)[0]


class _KernelTopK(TopK):
    def __init__(self, k: int):
        super().__init__(k)
        self.kernel = cpu_kernels.top_k()
        self.places = Tensor(np.arange(k, dtype=np.int32))

    def construct(self, scores):
        return ops.stop_gradient(self.kernel(ops.stop_gradient(scores), self.places))


class _KernelChosenMask(ChosenMask):
    def __init__(self, n: int):
        super().__init__(n)
        self.kernel = cpu_kernels.chosen_mask()
        self.columns = Tensor(np.arange(n, dtype=np.int32))

    def construct(self, indices):
        return ops.stop_gradient(self.kernel(ops.stop_gradient(indices), self.columns))


class _KernelCrossEntropySum(CrossEntropySum):
    def __init__(self):
        super().__init__()
        self.kernel = cpu_kernels.cross_entropy_sum()

    def construct(self, logits, labels):
        return self.kernel(logits, labels)[0].reshape(())


class _KernelSumOfSquares(SumOfSquares):
    def __init__(self):
        super().__init__()
        self.kernel = cpu_kernels.sum_of_squares()

    def construct(self, x):
        return ops.stop_gradient(self.kernel(ops.stop_gradient(x))).reshape(())


# Interface -> its implementations, in the order of BACKENDS.
_IMPLEMENTATIONS = {
    Linear: (_CompositeLinear, _KernelLinear, _CompositeLinear),
    RMSNorm: (_NativeRMSNorm, _KernelRMSNorm, _CompositeRMSNorm),
    Rotary: (_NativeRotary, _KernelRotary, _CompositeRotary),
    Attention: (_NativeAttention, _KernelAttention, _CompositeAttention),
    SwiGLU: (_CompositeSwiGLU, _KernelSwiGLU, _CompositeSwiGLU),
    RoutedExperts: (_NativeRoutedExperts, _KernelRoutedExperts, _CompositeRoutedExperts),
    TopK: (_NativeTopK, _KernelTopK, _CompositeTopK),
    ChosenMask: (_CompositeChosenMask, _KernelChosenMask, _CompositeChosenMask),
    CrossEntropySum: (_CompositeCrossEntropySum, _KernelCrossEntropySum, _CompositeCrossEntropySum),
    SumOfSquares: (_CompositeSumOfSquares, _KernelSumOfSquares, _CompositeSumOfSquares),
}
