"""--max-memory as arithmetic: threads times step times bytes keep the bound, and the bytes are what the work takes.

test_memory measures whole processes; here every kind of work counts by itself, by what NumPy allocates.
"""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, canonical_values, hub_folder, hub_values, small

from shared_ops.errors import UserError
from weight_sync import dtypes, plan, quantised
from weight_sync.canonical import open_weights
from weight_sync.conversion import joined
from weight_sync.plan import Options, Plan, reading_step
from weight_sync.stores.base import Rows

FLOAT32, FLOAT16, FLOAT64 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def model():
    return small("tiny_v3", num_hidden_layers=3, first_k_dense_replace=1, vocab_size=3000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """bf16 and FP8 in safetensors, and chunked HDF5, which cannot be mapped."""
    import h5py

    root, config = tmp_path_factory.mktemp("plan"), model()
    values = canonical_values(config)
    folders = {"plain": hub_folder(root / "plain", config, hub_values(config, values))}
    fp8 = {}
    for name, value in hub_values(config, values).items():
        fp8[name] = value
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            fp8[name] = value.astype(E4M3)
            fp8[name + "_scale_inv"] = np.ones([-(-n // 128) for n in value.shape], np.float32)
    folders["fp8"] = hub_folder(root / "fp8", config, fp8, quantization_config={})
    for kind, dtype in (("rows", BF16), ("wide rows", FLOAT64)):
        folders[kind] = root / kind
        folders[kind].mkdir()
        (folders[kind] / "config.json").write_bytes((folders["plain"] / "config.json").read_bytes())
        with h5py.File(folders[kind] / "model.h5", "w") as file:
            for name, value in values.items():
                bits = value.view(np.uint16) if dtype == BF16 else value.astype(dtype)
                if name.endswith("bias"):
                    bits = value
                data = file.create_dataset(name, data=bits, chunks=True)
                data.attrs["dtype"] = "bfloat16" if bits.dtype == np.uint16 else bits.dtype.name
    return folders


KINDS = [
    ("plain", "hdf5", None), ("plain", "hdf5", "fp32"), ("plain", "hf", "fp8"), ("fp8", "hdf5", None),
    ("fp8", "hf", "bf16"), ("rows", "hdf5", None), ("rows", "hf", "fp16"), ("wide rows", "hdf5", None),
]  # fmt: skip


@pytest.mark.parametrize("source, to, dtype", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("bound", [60_000, 500_001, 1 << 20, 7_777_777, 64 << 20])
def test_all_threads_together_keep_the_bound(sources, source, to, dtype, workers, bound):
    with open_weights(sources[source]) as weights:
        options = Options(to=to, dtype=dtype, max_memory=bound, workers=workers)
        try:
            made = Plan(weights, options)
        except UserError as error:  # a strip of FP8 blocks needs more
            assert "--max-memory" in str(error) and bound < 1 << 20 and dtype == "fp8"
            return
        assert 1 <= made.workers <= workers
        for key, target in made.targets.items():
            tensor, step = target.tensor, made.steps[key]
            mapped = not any(isinstance(part.stored, Rows) for part in tensor.parts)
            if mapped and tensor.is_plain and target.dtype == tensor.dtype:
                assert step * tensor.dtype.itemsize <= plan.CHUNK  # views, no memory
                continue
            _, kind = plan._unit(target)
            assert plan._ELEMENT_BYTES[kind] >= (tensor.dtype.itemsize if kind == "copied" else 24)
            assert made.workers * step * plan._ELEMENT_BYTES[kind] <= bound
            if target.dtype is None or tensor.is_quantised or (kind == "copied" and tensor.shape):
                assert step % tensor.shape[-1] == 0  # whole rows


def test_threads_are_as_many_as_asked_for_where_there_is_room(sources):
    with open_weights(sources["plain"]) as weights:
        assert Plan(weights, Options(to="hf", dtype="fp8", workers=3)).workers == 3
        made = Plan(weights, Options(to="hf", dtype="fp8", workers=3, max_memory=1_200_000))
        assert 1 <= made.workers < 3
        assert Plan(weights, Options(to="hdf5", workers=5, max_memory=10)).workers == 5  # views need none


@pytest.mark.parametrize("bound", [10_000, 500_001, 3 << 20, 64 << 20])
def test_two_readers_together_keep_the_bound(sources, bound):
    """The second reads the source beside the copy; never less than one row."""
    for source in sources.values():
        with open_weights(source) as weights:
            for tensor in weights.tensors.values():
                step, row = reading_step(tensor, bound), tensor.shape[-1]
                assert step % row == 0 and step > 0
                each = tensor.dtype.itemsize if tensor.is_plain else 24
                assert step == row or 2 * step * each <= bound, tensor.name
                assert step == row or step * tensor.dtype.itemsize <= plan.CHUNK


# --- what the work really takes ---

N, COLUMNS = 1 << 18, 512


def allocated(work) -> float:
    """Bytes per element at the most, of N elements."""
    work()  # imports and tables
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / N
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", ["plain", "fp8", "rows", "wide rows"])
def test_memory_of_a_reader(sources, source):
    """One of two, in pieces that are put together: expert by expert, as chunked HDF5 hands them out."""
    bound = 200_000
    with open_weights(sources[source]) as weights:
        tensor = weights.tensors["model.layers.1.mlp.experts.gate_up_proj"]
        step = min(reading_step(tensor, bound), tensor.size)
        read = lambda: joined(tensor.read(0, step))  # noqa: E731
        assert allocated(read) * N <= bound // 2 + 4096 * tensor.shape[0]  # and h5py's selections


@pytest.mark.parametrize("before", [FLOAT64, FLOAT32, FLOAT16, BF16])
@pytest.mark.parametrize("after", [FLOAT32, FLOAT16, BF16])
def test_memory_of_a_cast(before, after):
    """Of a source that is read into memory, as the widest case."""
    stored = (np.random.default_rng(0).standard_normal(N)).astype(before)

    def work():
        values = np.concatenate([stored])
        dtypes.CastStatistics().update(values, dtypes.cast(values, after))

    assert allocated(work) <= plan._ELEMENT_BYTES["cast"]


@pytest.mark.parametrize("after", [FLOAT32, FLOAT16, BF16])
def test_memory_of_dequantisation(after):
    stored = np.random.default_rng(0).standard_normal((N // COLUMNS, COLUMNS)).astype(E4M3)
    scales = np.full((-(-N // COLUMNS // 128), COLUMNS // 128), 0.37, np.float32)

    def work():
        values = quantised.dequantise_fp8(np.concatenate([stored]), scales, 0)
        out = dtypes.cast(values, after)
        dtypes.CastStatistics().update(values.reshape(-1), out.reshape(-1))

    assert allocated(work) <= plan._ELEMENT_BYTES["dequantised"]


@pytest.mark.parametrize("before", [FLOAT64, FLOAT32, BF16])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_memory_of_quantisation(before, scale_format):
    stored = np.random.default_rng(0).standard_normal((N // COLUMNS, COLUMNS)).astype(before)

    def work():
        strip = dtypes.cast(np.concatenate([stored]), FLOAT32)
        weights, scales = quantised.quantise_fp8(strip, scale_format)
        back = quantised.dequantise_fp8(weights, scales, 0)
        dtypes.CastStatistics().update(strip.reshape(-1), back.reshape(-1))

    assert allocated(work) <= plan._ELEMENT_BYTES["quantised"]
