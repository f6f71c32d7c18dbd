"""Operations without parameters; the only file that asks which device a tensor is on.

The forward pass reads sizes from `.shape`, which an exported graph keeps free; `len()` would fix them.

Shapes: B rows, S sequence, T = B S tokens, D hidden, N heads, h/v query and value head widths, r rotary width, E
experts, K experts per token, F expert width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_ops.batch import IGNORED


class Linear(nn.Module):
    """x [..., in] times w [out, in] -> [..., out] in x's dtype."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype))


class RMSNorm(nn.Module):
    """x [..., D] over its root mean square; statistics in fp32, cast to x's dtype, then times weight [D]."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * weight.to(x.dtype)


class Rotary(nn.Module):
    """Rotate the interleaved pairs of x [B, S, N, r] by cos, sin [B, S, 1, r/2], in fp32."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
        return out.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Softmax attention inside documents: q, k [B, S, N, h], v [B, S, N, v] -> [B, S, N, v].

    Query i sees key j if j <= i, both lie in one segment and, with a sliding window, i - j < window.
    """

    def __init__(self, scale: float, sliding_window: int | None = None):
        super().__init__()
        self.scale = scale
        self.sliding_window = sliding_window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        value_width = v.shape[-1]
        if q.device.type == "cpu":  # its fused kernel takes one width only; without it [B, N, S, S] is in memory
            width = max(q.shape[-1], value_width)
            q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=self.scale)
        return out.transpose(1, 2)[..., :value_width]

    def visible(self, segment_ids: Tensor) -> Tensor:
        """bool [B, 1, S, S], made once per step for all layers."""
        length = segment_ids.shape[1]
        position = torch.arange(length, device=segment_ids.device)
        distance = position[:, None] - position[None, :]
        seen = distance >= 0
        if self.sliding_window is not None:
            seen = seen & (distance < self.sliding_window)
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        return (same & seen)[:, None]


class SwiGLU(nn.Module):
    """silu(gate) * up (arXiv 2002.05202)."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class RoutedExperts(nn.Module):
    """Dropless mixture: x [T, D], slots int [T, K], weights [T, K], gate_up [E, 2F, D], down [E, D, F] -> [T, D].

    Rows 0..F-1 of an expert's gate_up are the gate. Every (token, choice) pair is computed, none is padded or dropped.
    """

    def __init__(self, n_slots: int, top_k: int):
        super().__init__()
        self.n_slots = n_slots
        self.top_k = top_k
        self.swiglu = SwiGLU()

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        flat = slots.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        counts = (flat[:, None] == torch.arange(self.n_slots, device=flat.device)).sum(0)
        sorted_x = _ToExperts.apply(x, order, inverse, self.top_k)
        gate, up = grouped_linear(sorted_x, gate_up.to(x.dtype), counts).chunk(2, -1)
        sorted_y = grouped_linear(self.swiglu(gate, up), down.to(x.dtype), counts)
        y_TKD = _FromExperts.apply(sorted_y, order, inverse).view(*weights.shape, -1)
        return torch.bmm(weights[:, None], y_TKD.float())[:, 0].to(x.dtype)  # weights keep fp32


class _ToExperts(torch.autograd.Function):
    """Copy each token to its K places; the gradient is gathered and summed in fixed order, without atomics."""

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _FromExperts(torch.autograd.Function):
    """Undo the sort; the gradient is the sort itself."""

    @staticmethod
    def forward(ctx, y, order, inverse):
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [M, in], sorted by group, times weight [E, out, in] of their group; counts int [E] adds up to M."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    return _grouped_linear(x.contiguous(), weight, counts)


@torch.library.custom_op("torch_proto::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One matrix product per group, each straight into its place. A custom operator: torch.compile need not look in."""
    rows = counts.tolist()
    out = x.new_empty(len(x), weight.shape[1])
    for part, to, w in zip(x.split(rows), out.split(rows), weight, strict=True):
        torch.mm(part, w.T, out=to)
    return out


@torch.library.custom_op("torch_proto::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    rows, grad = counts.tolist(), grad.contiguous()
    grad_x, grad_w = torch.empty_like(x), torch.empty_like(weight)
    parts = (t.split(rows) for t in (x, grad, grad_x))
    for part, g, to_x, w, to_w in zip(*parts, weight, grad_w, strict=True):
        torch.mm(g, w, out=to_x)
        torch.mm(g.T, part, out=to_w)
    return grad_x, grad_w


@_grouped_linear.register_fake
def _(x, weight, counts):
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_linear_backward.register_fake
def _(grad, x, weight, counts):
    return torch.empty_like(x), torch.empty_like(weight)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return *_grouped_linear_backward(grad, *ctx.saved_tensors), None


_grouped_linear.register_autograd(_backward, setup_context=_save_for_backward)


class TopK(nn.Module):
    """Indices [T, k] of the k largest of scores [T, n], largest first; ties in any order."""

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def forward(self, scores: Tensor) -> Tensor:
        return scores.detach().topk(self.k, -1).indices


class ChosenMask(nn.Module):
    """indices int [T, K] -> fp32 [T, n], 1 where chosen."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def forward(self, indices: Tensor) -> Tensor:
        zeros = torch.zeros(indices.shape[0], self.n, device=indices.device)
        return zeros.scatter_(1, indices, 1.0)


class CrossEntropySum(nn.Module):
    """Sum of -log softmax(logits [T, V])[labels [T]] over the labels that are not -100, in fp32."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CrossEntropySum.apply(logits, labels)


class _CrossEntropySum(torch.autograd.Function):
    """Keeps logits and their log-sum-exp only: torch's own stores the log-probabilities and a gradient of zeros too."""

    @staticmethod
    def forward(ctx, logits, labels):
        wide = logits.float()
        log_sum = wide.logsumexp(-1)
        valid = labels != IGNORED
        picked = wide.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        ctx.save_for_backward(logits, labels, log_sum)
        return torch.where(valid, log_sum - picked, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, labels, log_sum = ctx.saved_tensors
        out = (logits - log_sum[:, None]).exp_()
        out.scatter_add_(1, labels.clamp(min=0)[:, None], out.new_full((len(labels), 1), -1.0))
        out.mul_(torch.where(labels != IGNORED, grad, 0.0)[:, None])
        return out.to(logits.dtype), None


class SumOfSquares(nn.Module):
    """Sum of x^2 as fp64 scalar: fp32 accumulation is off by 5e-4 on tensors of 8M elements."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
