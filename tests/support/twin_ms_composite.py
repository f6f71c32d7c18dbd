"""The MindSpore twin with plain MindSpore operations, as it runs where there are neither kernels nor a compiler."""

from twin_ms import TOLERANCE, build_model, modules, ops, run_model, run_module

__all__ = ["TOLERANCE", "build_model", "modules", "prepare", "run_model", "run_module"]


def prepare():
    """Build with composites."""
    ops.select("composite")
