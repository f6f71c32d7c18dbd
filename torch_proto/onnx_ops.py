"""What PyTorch's ONNX exporter has no translation for, in ONNX's own operators. Imported by `export` only.

Without padding and without a bound on an expert's rows: the routed experts run as ONNX's Loop over those that a token
chose, each reading its own rows and its own weights.
"""

import torch
from onnxscript import FLOAT, INT64, script
from onnxscript import opset18 as op

import torch_proto.ops  # noqa: F401  registers torch.ops.torch_proto

OPSET = 18  # the exporter's own: another is converted to afterwards


@script()
def grouped_linear(x: FLOAT[...], weight: FLOAT[...], counts: INT64[...]) -> FLOAT[...]:
    """`torch_proto.ops.grouped_linear`: x [M, in] sorted by group, weight [E, out, in], counts [E] -> [M, out]."""
    ends = op.CumSum(counts, 0)
    chosen = op.Squeeze(op.NonZero(counts), [0])
    n_chosen = op.Size(chosen)
    parts = op.SequenceEmpty()
    for i in range(n_chosen):
        expert = op.Gather(chosen, op.Unsqueeze(i, [0]))
        end = op.Gather(ends, expert)
        rows = op.Slice(x, end - op.Gather(counts, expert), end, [0])
        parts = op.SequenceInsert(parts, op.Gemm(rows, op.Squeeze(op.Gather(weight, expert), [0]), transB=1))
    return op.ConcatFromSequence(parts, axis=0)


def sort(x, stable=True, dim=-1, descending=False):
    """A stable ascending sort of a vector: TopK takes the lower index first among equals."""
    return op.TopK(x, op.Shape(x), largest=0)


TRANSLATIONS = {
    torch.ops.torch_proto.grouped_linear.default: grouped_linear,
    torch.ops.aten.sort.stable: sort,
}
