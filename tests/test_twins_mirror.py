"""The twins mirror each other: files, classes, methods, attributes (from the syntax trees), and the parameters.

What only one twin has is listed here, each with its reason; an entry that is no longer needed fails.
"""

import ast
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shared_ops.config import ModelConfig, load_model_config
from shared_ops.init import initial_value
from shared_ops.params import manifest

ROOT = Path(__file__).resolve().parent.parent
TWINS = ("ms_train", "torch_proto")

ONLY_IN_MS_TRAIN = {
    "cpu_kernels.py": "compiles the C++ kernels that MindSpore lacks on CPU; torch has its own",
    "cpu_kernels.cc": "the kernels",
    "launcher.py": "torchrun forwards signals and ends its workers, msrun does not",
}
ONLY_IN_TORCH_PROTO = {
    "export.py": "PyTorch writes ONNX; MindSpore's own deployment format is MindIR",
    "onnx_ops.py": "the operations that its ONNX exporter lacks",
}
# (file, class, name): reason
CLASSES = {
    ("step.py", "MicroBatchLoss"): "value_and_grad differentiates one cell; torch's backward needs none",
    ("parallel.py", "Sum"): "a collective inside the graph is a cell; torch calls a method",
    ("parallel.py", "SumAll"): "likewise",
}
METHODS = {
    ("step.py", "TrainStep", "accumulate"): "the loop over micro-batches as a function of the graph",
    ("optim.py", "AdamW", "update"): "torch's AdamW is no module; MindSpore's is called",
    ("optim.py", "AdamW", "set_step"): "torch counts the updates itself; MindSpore's step is told",
    ("optim.py", "AdamW", "rates"): "the bias correction, which torch makes inside",
}
ATTRIBUTES = {
    ("parallel.py", "Parallel", "meet"): "`total` is a compiled sum; torch sums directly",
    ("step.py", "TrainStep", "total_loss"): "in MicroBatchLoss",
    ("step.py", "TrainStep", "row_numbers"): "the graph's loop gathers the rows of a micro-batch",
    ("model.py", "DeepseekForCausalLM", "linear"): "of a tied head; torch has it as a function",
}
CALLS = {"construct", "forward", "__call__"}  # one thing, named as each framework wants it


class Class(NamedTuple):
    bases: list[str]
    methods: dict[str, list[str]]  # public ones, __init__ and the call: names of their arguments
    attributes: dict[str, set[str]]  # of self, parameters and submodules: what they are


def read(path: Path) -> dict[str, Class]:
    """The public classes of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.parent.name
    modules, names = set(), {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package + "."):
            names |= {alias.asname or alias.name for alias in node.names}

    def kind(value: ast.expr) -> str | None:
        """What an expression builds: a parameter, a constant, a list of modules, or a class of the twin."""
        if not isinstance(value, ast.Call):
            return None
        callee = ast.unparse(value.func)
        if isinstance(value.func, ast.Attribute) and value.func.attr == "to":
            return kind(value.func.value)
        if callee in ("Parameter", "nn.Parameter"):
            return "parameter"
        if callee in ("Tensor", "nn.Buffer"):
            return "constant"
        if callee in ("nn.CellList", "nn.ModuleList"):
            return "list"
        module, _, name = callee.rpartition(".")
        return name if module in modules or (not module and name in names) else None

    def attributes(node: ast.ClassDef) -> dict[str, set[str]]:
        found = {}
        for assign in ast.walk(node):
            if not isinstance(assign, ast.Assign):
                continue
            target, value = assign.targets[0], assign.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for to, what in pairs:
                if isinstance(to, ast.Attribute) and ast.unparse(to.value) == "self" and kind(what):
                    found.setdefault(to.attr, set()).add(kind(what))
        return found

    def methods(node: ast.ClassDef) -> dict[str, list[str]]:
        functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
        kept = [f for f in functions if not f.name.startswith("_") or f.name in ("__init__", "__call__")]
        return {"call" if f.name in CALLS else f.name: [a.arg for a in f.args.args] for f in kept}

    return {
        node.name: Class([ast.unparse(base) for base in node.bases], methods(node), attributes(node))
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


FILES = sorted(path.name for path in (ROOT / "torch_proto").glob("*.py"))
COMMON = [name for name in FILES if (ROOT / "ms_train" / name).exists()]
PAIRS = {name: tuple(read(ROOT / twin / name) for twin in TWINS) for name in COMMON}
# what a function returns: torch names the parts, a MindSpore graph returns plain tuples
CONTAINERS = {name for _, torch in PAIRS.values() for name, c in torch.items() if "NamedTuple" in c.bases}


def test_the_same_files():
    in_ms_train = {path.name for path in (ROOT / "ms_train").iterdir() if path.suffix in (".py", ".cc")}
    assert in_ms_train - set(FILES) == set(ONLY_IN_MS_TRAIN)
    assert set(FILES) - in_ms_train == set(ONLY_IN_TORCH_PROTO)


@pytest.mark.parametrize("file", PAIRS)
def test_the_same_classes(file):
    ms, torch = PAIRS[file]
    allowed = {name for place, name in CLASSES if place == file}
    assert set(ms) - set(torch) == allowed
    assert set(torch) - set(ms) <= CONTAINERS


def differences(part) -> set[tuple[str, str, str]]:
    """(file, class, name) of what one twin's classes have and the other's have not or otherwise."""
    return {
        (file, name, item)
        for file, (ms, torch) in PAIRS.items()
        for name in ms.keys() & torch.keys()
        for item in part(file, ms[name]).keys() | part(file, torch[name]).keys()
        if part(file, ms[name]).get(item) != part(file, torch[name]).get(item)
    }


def test_the_same_methods():
    def methods(file, c):
        return {name: True for name in c.methods if name not in ("__init__", "call")}

    assert differences(methods) == set(METHODS)


def test_the_same_parameters_and_submodules():
    def attributes(file, c):
        return {} if file == "ops.py" else c.attributes  # operations have no parameters, and several implementations

    assert differences(attributes) == set(ATTRIBUTES)
    # the test reads what it should
    assert PAIRS["attention.py"][0]["MultiHeadLatentAttention"].attributes["attention"] == {"Attention"}
    assert PAIRS["router.py"][1]["Router"].attributes["e_score_correction_bias"] == {"parameter"}
    assert PAIRS["block.py"][0]["DecoderLayer"].attributes["mlp"] == {"MLP", "MixtureOfExperts"}


def test_modules_are_built_and_called_alike():
    """The same names of arguments, where torch's class is a module: `__init__`, and forward as construct."""
    checked = 0
    for file, (ms, torch) in PAIRS.items():
        for name in ms.keys() & torch.keys():
            if not {"nn.Module", "DecoderLayer"} & set(torch[name].bases):
                continue
            for method in ("__init__", "call"):
                here, there = ms[name].methods.get(method), torch[name].methods.get(method)
                if here is not None and there is not None:
                    assert here == there, (file, name, method)
                    checked += 1
    assert checked > 30


# --- the parameters themselves -----------------------------------------------------------------------------------


def both_models(config: ModelConfig, seed: int, monkeypatch):
    """{name: (array as held, canonical array)} of each twin with its initial values."""
    os.environ.setdefault("GLOG_v", "3")
    from ms_train import checkpoint as ms_checkpoint
    from ms_train import model as ms_model
    from ms_train import ops
    from torch_proto import checkpoint as torch_checkpoint
    from torch_proto import model as torch_model

    monkeypatch.setattr(ops, "_selected", None)  # restored afterwards: other tests choose for themselves
    ops.select("composite")
    for model, checkpoint in ((ms_model, ms_checkpoint), (torch_model, torch_checkpoint)):
        states = checkpoint.StateMap(model.DeepseekForCausalLM(config, 32))
        states.initialise(seed)
        stacked = {p.name: p.stacked_experts for p in manifest(config)}
        named = states.named.items()
        yield {name: (states.take(p, False), states.take(p, stacked.get(name, False))) for name, p in named}


@pytest.mark.parametrize(
    ("name", "changes"), [("tiny_v2", {}), ("tiny_v3", {}), ("tiny_v3", {"expert_placement": "hash:7"})]
)
def test_the_same_parameters_with_the_same_bits(name, changes, monkeypatch):
    """Names and shapes of the manifest, all of them, and its values to the bit, whatever the expert table."""
    config = ModelConfig.model_validate(load_model_config(name).model_dump() | changes)
    parameters = {p.name: p for p in manifest(config)}
    ms, torch = both_models(config, 5, monkeypatch)
    assert set(ms) == set(torch) == set(parameters)
    for key, p in parameters.items():
        value = initial_value(p, 5, config.initializer_range)
        for held, canonical in (ms[key], torch[key]):
            assert held.shape == p.shape and held.dtype == np.float32, key
            assert canonical.tobytes() == value.tobytes(), key
        assert ms[key][0].tobytes() == torch[key][0].tobytes(), key
    moved = [key for key, p in parameters.items() if ms[key][0].tobytes() != ms[key][1].tobytes()]
    assert bool(moved) == bool(changes) and all(parameters[key].stacked_experts for key in moved)
