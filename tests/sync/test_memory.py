"""--max-memory is a bound that holds: anonymous memory measured in a process of its own, whatever is done."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import canonical_values, hub_folder, hub_values, small

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
ALLOWED = 64 << 20  # beyond the bound: names, headers, the process itself

MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from convert_speed import MemoryWatch
from pathlib import Path
from weight_sync.conversion import convert
from weight_sync.plan import Options
from weight_sync.stores.base import TensorPlan
from weight_sync.stores.torch import TorchPlan
import numpy as np
if sys.argv[4] == "torch":  # what torch imports when it first saves
    TorchPlan("x", [TensorPlan("x", (3,), np.dtype("float32"))]).create(Path(sys.argv[3] + ".pt"))
bound, options = int(sys.argv[5]), json.loads(sys.argv[6])
with MemoryWatch() as watch:
    convert(Path(sys.argv[2]), Path(sys.argv[3]), Options(to=sys.argv[4], max_memory=bound, quiet=True, **options))
print(watch.peak - watch.first)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """About 150 MB in fp32, and the same in FP8; one stacked tensor has 52 MB."""
    root = tmp_path_factory.mktemp("memory")
    config = small("tiny_v3", num_hidden_layers=3, num_nextn_predict_layers=0, hidden_size=640, vocab_size=4000,
                   moe_intermediate_size=850)  # fmt: skip
    values = canonical_values(config, dtype=np.float32)
    hub_folder(root / "fp32", config, hub_values(config, values))
    hub = {}
    for name, value in hub_values(config, values).items():
        hub[name] = value
        if name.endswith("_proj.weight"):
            hub[name] = value.astype(ml_dtypes.float8_e4m3fn)
            hub[name + "_scale_inv"] = np.ones([-(-n // 128) for n in value.shape], np.float32)
    hub_folder(root / "fp8", config, hub, quantization_config={})
    return root


@pytest.mark.parametrize("source, to, bound, options", [
    ("fp32", "hdf5", 4 << 20, {}),
    ("fp32", "torch", 4 << 20, {}),
    ("fp32", "mindspore", 16 << 20, {"dtype": "bf16", "verify": True}),
    ("fp32", "hf", 32 << 20, {"dtype": "fp8", "verify": True}),
    ("fp8", "onnx", 16 << 20, {"dtype": "bf16", "verify": True}),
])  # fmt: skip
def test_the_bound_holds(sources, tmp_path, source, to, bound, options):
    arguments = [BENCHMARKS, sources / source, tmp_path / "out", to, bound, json.dumps(options)]
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= bound + ALLOWED
