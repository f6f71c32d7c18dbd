"""What changes how the PyTorch twin computes, but not what."""

import jobs
import pytest


def test_bf16_follows_fp32(folder, text, long_run):
    """bf16 has 8 bits: over 20 steps the loss stays within 1 % of fp32, and does not equal it."""
    job = jobs.finish("torch_proto", folder, "bf16", "model=tiny_v3", text, "train.steps=50", "train.stop_after=20",
                      "train.precision=bf16")  # fmt: skip
    pairs = list(zip(job.rows, long_run("torch_proto", "tiny_v3").rows, strict=False))
    assert all(row["loss"] == pytest.approx(other["loss"], rel=0.01) for row, other in pairs)
    assert any(row["loss"] != other["loss"] for row, other in pairs)


def test_compiled_layers_are_the_same_model(folder, text, long_run):
    """torch.compile builds C++ for each kind of layer: 30 s. The first steps, before choices can flip."""
    job = jobs.finish("torch_proto", folder, "compiled", "model=tiny_v3", text, "train.steps=50", "train.stop_after=10",
                      "train.compile=true")  # fmt: skip
    for row, other in zip(job.rows, long_run("torch_proto", "tiny_v3").rows, strict=False):
        for key in ("loss", "aux_loss", "mtp_loss"):
            assert row[key] == pytest.approx(other[key], rel=1e-5), f"step {row['step']} {key}"
