"""weight_sync diff: figures against plain NumPy, and every explanation with the fault planted and without it."""

import io
import json
import tracemalloc
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, canonical_values, hub_folder, hub_values, small, write_safetensors
from rich.console import Console

from shared_ops.config import ModelConfig
from shared_ops.errors import UserError, run_cli
from shared_ops.params import Parameter
from shared_ops.training_state import write_step
from weight_sync import names
from weight_sync.__main__ import main as weight_sync
from weight_sync.canonical import CanonicalTensor, Part, open_weights
from weight_sync.convert import Options, convert
from weight_sync.diff import show, verdict
from weight_sync.differences import comparison
from weight_sync.differences.arrangements import describe_experts, explain, row_orders
from weight_sync.differences.comparison import compare
from weight_sync.differences.fingerprints import as_matrices, fingerprints
from weight_sync.differences.in_place import block_factors
from weight_sync.layouts import SAME, exchange_gate_up, rope_permutation
from weight_sync.progress import Progress
from weight_sync.stores.base import Mapped

CONFIG = small(num_hidden_layers=3, num_nextn_predict_layers=1)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
L0, L2 = "model.layers.0.", "model.layers.2."  # dense, routed
GATE_UP, DOWN = L2 + "mlp.experts.gate_up_proj", L2 + "mlp.experts.down_proj"
ROUTER, BIAS = L2 + "mlp.gate.weight", L2 + "mlp.gate.e_score_correction_bias"
BIAS_OF_MTP = BIAS.replace("layers.2", "layers.3")
Q_B, KV_A, KV_B = (L0 + f"self_attn.{part}.weight" for part in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
O_PROJ, NORM, EH = L0 + "self_attn.o_proj.weight", L0 + "input_layernorm.weight", "model.layers.3.eh_proj.weight"
GATE, UP = L0 + "mlp.gate_proj.weight", L0 + "mlp.up_proj.weight"
SHUFFLE = [3, 0, 10, 2, 9, 1, 4, 11, 5, 8, 6, 7]


def store(folder: Path, values: dict[str, np.ndarray], config: ModelConfig = CONFIG) -> Path:
    """Canonical names in one safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    write_safetensors(folder / "model.safetensors", values)
    return folder


def hdf5(folder: Path, values: dict[str, np.ndarray]) -> Path:
    """The same as HDF5, which also has float64."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with h5py.File(folder / "model.h5", "w") as file:
        for name, value in values.items():
            file["params/" + name] = value.view(np.uint16) if value.dtype == BF16 else value
            if value.dtype == BF16:
                file["params/" + name].attrs["dtype"] = "bfloat16"
    return folder


def diff(a: Path, b: Path, **options) -> dict:
    with open_weights(a) as left, open_weights(b) as right:
        report = compare(left, right, **options)
    json.dumps(report, allow_nan=False)
    return report


@pytest.fixture(scope="module")
def values():
    return canonical_values(CONFIG)


@pytest.fixture(scope="module")
def original(values, tmp_path_factory):
    return store(tmp_path_factory.mktemp("diff") / "a", values)


@pytest.fixture
def changed(original, values, tmp_path):
    """The report on the original and a copy with some tensors replaced; all others must be equal."""

    def run(replaced: dict[str, np.ndarray], a: dict[str, np.ndarray] | None = None, **options) -> dict[str, dict]:
        number = len(list(tmp_path.iterdir()))
        left = store(tmp_path / f"a{number}", {**values, **a}) if a else original
        report = diff(left, store(tmp_path / f"b{number}", {**values, **replaced}), **options)
        assert {name for name, row in report["tensors"].items() if row["status"] != "equal"} == set(replaced)
        return report

    return run


def text(report: dict, name: str) -> str:
    found = report["tensors"][name]["explanation"]
    return found["text"] if found else "unexplained"


def other(value: np.ndarray, seed: int = 77) -> np.ndarray:
    """Another tensor of the kind."""
    return (np.random.default_rng(seed).standard_normal(value.shape) * 0.05).astype(value.dtype)


# --- equal, and not ---


def test_equal_in_every_format(v3, tmp_path, capfd):
    for to in ("mindspore", "hdf5", "onnx"):
        convert(v3, tmp_path / to, Options(to=to, quiet=True, sync=False))
        assert weight_sync(["diff", str(v3), str(tmp_path / to), "--quiet"]) == 0
        out = capfd.readouterr().out
        assert "223 tensors bitwise equal" in out and "EQUAL: all 223 tensors" in out and "┃" not in out


def training_state(folder: Path, values: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> Path:
    """A step folder with the given second moments."""
    model = {**CONFIG.model_dump(), "router_z_loss_coef": 0.7, "expert_placement": "modulo"}
    arrays = [(f"params/{name}", value) for name, value in values.items()]
    arrays += [(f"adam_m/{name}", value * F32.type(0.1)) for name, value in values.items() if name != BIAS_OF_MTP and
               name != BIAS] + [(f"adam_v/{name}", value) for name, value in second.items()]  # fmt: skip
    return write_step(folder, 7, arrays, {"config": {"model": model}})


def test_training_states(tmp_path, capfd):
    """Against the hub folder made of it, whose config.json cannot carry some fields; and against each other."""
    values = canonical_values(CONFIG, dtype=F32)
    second = {name: value * value for name, value in values.items() if name not in (BIAS, BIAS_OF_MTP)}
    step = training_state(tmp_path / "a", values, second)
    convert(step, tmp_path / "hub", Options(to="hf", quiet=True, sync=False))
    assert weight_sync(["diff", str(step), str(tmp_path / "hub"), "--quiet"]) == 0
    out = capfd.readouterr().out
    assert "moments, which only A has, are not compared" in out and "step 7" in out and "EQUAL" in out
    report = diff(step, tmp_path / "hub")
    assert {field["field"] for field in report["config"]} == {"router_z_loss_coef", "expert_placement"}
    assert report["a"]["format"] == "training_state" and report["totals"]["bitwise_equal"] == len(values)
    second[DOWN] = second[DOWN][SHUFFLE]
    report = diff(step, training_state(tmp_path / "b", values, second))
    assert {name for name, row in report["tensors"].items() if row["status"] != "equal"} == {f"adam_v/{DOWN}"}
    assert text(report, f"adam_v/{DOWN}") == f"experts {SHUFFLED}"
    assert report["totals"]["tensors"] == len(values) + 2 * len(second)


@pytest.mark.parametrize("flip", [(GATE_UP, 13823, 1), (BIAS, 0, 1), ("model.norm.weight", 17, 0x8000)])
def test_one_bit_is_found_and_placed(changed, values, flip):
    name, position, mask = flip
    value = values[name].copy()
    bits = value.reshape(-1).view(f"u{value.itemsize}")
    bits[position] ^= np.array(mask, bits.dtype)
    row = changed({name: value})["tensors"][name]
    assert row["status"] == "differs" and row["differing"] == 1
    assert row["worst"]["index"] == [int(i) for i in np.unravel_index(position, value.shape)]
    assert row["worst"]["a"] == float(values[name].reshape(-1)[position])
    assert row["max_ulp"] == (1 if mask == 1 else 2 * (int(bits[position]) & 0x7FFF))
    assert row["explanation"] is None or not row["explanation"]["whole"]


@pytest.mark.parametrize("left, right", [(BF16, BF16), (F32, F32), (F32, BF16), (BF16, "float16"), (F64, F32)])
def test_figures_against_numpy(original, values, tmp_path, left, right):
    generator, name = np.random.default_rng(1), GATE_UP
    a = generator.standard_normal((12, 48, 40)).astype(left)
    b = (a.astype(np.float64) * generator.uniform(0.5, 1.5, a.shape)).astype(right)
    report = diff(hdf5(tmp_path / "a", {**values, name: a}), hdf5(tmp_path / "b", {**values, name: b}))
    row, x, y = report["tensors"][name], a.astype(np.float64), b.astype(np.float64)
    wide = a.dtype if a.dtype == b.dtype else F64 if left == F64 else F32
    ordered = [np.where(v < 0, -(v.view(f"i{v.itemsize}") & np.iinfo(f"i{v.itemsize}").max), v.view(f"i{v.itemsize}"))
               for v in (x.astype(wide), y.astype(wide))]  # fmt: skip
    assert row["differing"] == np.count_nonzero(x != y)
    assert row["max_abs"] == np.abs(x - y).max()
    assert row["max_rel"] == (np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))).max()
    assert row["max_ulp"] == max(abs(int(i) - int(j)) for i, j in zip(*(o.reshape(-1) for o in ordered)))
    np.testing.assert_allclose(row["cosine"], (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), rtol=1e-12)
    norm = max(np.linalg.norm(x), np.linalg.norm(y))
    np.testing.assert_allclose(row["relative_l2"], np.linalg.norm(x - y) / norm, rtol=1e-12)
    assert text(report, name) == "unexplained"
    assert report["totals"]["max_abs_in"] == name


def test_zero_signs_differ_in_bits_only(changed, values):
    a, b = np.zeros_like(values[NORM]), np.zeros_like(values[NORM])
    b[3] = -0.0
    row = changed({NORM: b}, {NORM: a})["tensors"][NORM]
    assert (row["differing"], row["max_abs"], row["max_ulp"], row["cosine"]) == (1, 0.0, 0, None)
    assert row["explanation"] is None and row["worst"]["index"] == [3]


def test_the_last_bytes_count(tmp_path):
    """21 values of two bytes: no whole number of machine words."""
    config = small(num_hidden_layers=2, num_nextn_predict_layers=0, kv_lora_rank=21)
    values, name = canonical_values(config), L0 + "self_attn.kv_a_layernorm.weight"
    value = values[name].copy()
    value[20] += BF16.type(0.25)
    report = diff(store(tmp_path / "a", values, config), store(tmp_path / "b", {**values, name: value}, config))
    assert report["totals"]["differ"] == 1 and report["tensors"][name]["worst"]["index"] == [20]


# --- explanations: each with its fault planted, worded with its direction, alone and combined ---


def halves(value: np.ndarray, heads: int, to_halves: bool = True) -> np.ndarray:
    return value[rope_permutation(len(value), heads, 8, to_halves)]


def woven(value: np.ndarray) -> np.ndarray:
    """Gate and up rows in turn."""
    experts, rows, width = value.shape
    return value.reshape(experts, 2, rows // 2, width).swapaxes(1, 2).reshape(value.shape)


def gathered(value: np.ndarray, cut: int) -> np.ndarray:
    """[H, first | second] rows as all first, then all second."""
    heads = value.reshape(3, -1, value.shape[1])
    return np.concatenate([heads[:, :cut].reshape(-1, value.shape[1]), heads[:, cut:].reshape(-1, value.shape[1])])


def second_first(value: np.ndarray, heads: int, cut: int) -> np.ndarray:
    heads = value.reshape(heads, -1, value.shape[1])
    return np.concatenate([heads[:, cut:], heads[:, :cut]], axis=1).reshape(value.shape)


SHUFFLED = "permuted: slot 0 holds expert 3, 1 holds 0, 2 holds 10, 3 holds 2, 4 holds 9, 5 holds 1, … (12 of 12 moved)"
AS_TEXT = [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
IN_HALVES = "rotary rows: interleaved pairs in A, halves in B"
REARRANGED = {
    "experts": (GATE_UP, lambda v: v[SHUFFLE], "experts " + SHUFFLED),
    "experts' down": (DOWN, lambda v: v[SHUFFLE], "experts " + SHUFFLED),
    "router": (ROUTER, lambda v: v[SHUFFLE], "router rows " + SHUFFLED),
    "bias": (BIAS, lambda v: v[SHUFFLE], "router rows " + SHUFFLED),
    "expert 10 before 2": (
        DOWN, lambda v: v[AS_TEXT],
        "experts permuted: B has them in the order of their numbers as text (0, 1, 10, 11, …)",
    ),
    "expert 10 before 2 in A": (
        DOWN, lambda v: v[np.argsort(AS_TEXT)],
        "experts permuted: A has them in the order of their numbers as text (0, 1, 10, 11, …)",
    ),
    "experts rotated": (DOWN, lambda v: np.roll(v, -5, 0), "experts permuted: slot s holds expert (s + 5) mod 12"),
    "experts reversed": (GATE_UP, lambda v: v[::-1], "experts permuted: in reverse order"),
    "two experts": (
        GATE_UP, lambda v: v[[0, 1, 10, 3, 4, 5, 6, 7, 8, 9, 2, 11]],
        "experts permuted: slot 2 holds expert 10, 10 holds 2",
    ),
    "an expert twice": (
        GATE_UP, lambda v: v[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 11]],
        "experts repeated: slot 10 holds expert 2; nowhere in B: 10",
    ),
    "gate and up": (GATE_UP, exchange_gate_up, "gate and up exchanged"),
    "gate and up woven": (GATE_UP, woven, "gate and up rows alternate in B, A has halves (gate first)"),
    "up and gate woven": (
        GATE_UP, lambda v: woven(exchange_gate_up(v)), "up and gate rows alternate in B, A has halves (gate first)"
    ),
    "experts, gate and up": (
        GATE_UP, lambda v: exchange_gate_up(v)[SHUFFLE], f"experts {SHUFFLED}; gate and up exchanged"
    ),
    "experts as text, woven": (
        GATE_UP, lambda v: woven(v)[AS_TEXT],
        "experts permuted: B has them in the order of their numbers as text (0, 1, 10, 11, …); gate and up rows "
        "alternate in B, A has halves (gate first)",
    ),
    "q_b in halves": (Q_B, lambda v: halves(v, 3), IN_HALVES),
    "q_b in pairs": (Q_B, lambda v: halves(v, 3, False), "rotary rows: halves in A, interleaved pairs in B"),
    "q_b gathered": (
        Q_B, lambda v: gathered(v, 10), "nope and rope rows: per head in A, all nope before all rope in B"
    ),
    "q_b rope first": (Q_B, lambda v: second_first(v, 3, 10), "nope and rope rows: nope first in A, rope first in B"),
    "kv_a in halves": (KV_A, lambda v: halves(v, 1), IN_HALVES),
    "kv_a in pairs": (KV_A, lambda v: halves(v, 1, False), "rotary rows: halves in A, interleaved pairs in B"),
    "kv_a rope first": (
        KV_A, lambda v: second_first(v, 1, 20), "latent and rope rows: latent first in A, rope first in B"
    ),
    "kv_b gathered": (
        KV_B, lambda v: gathered(v, 10), "k_nope and v rows: per head in A, all k_nope before all v in B"
    ),
    "kv_b v first": (KV_B, lambda v: second_first(v, 3, 10), "k_nope and v rows: k_nope first in A, v first in B"),
    "columns of eh_proj": (EH, lambda v: np.roll(v, 40, 1), "columns of embedding and hidden state exchanged"),
    "any rows": (O_PROJ, lambda v: v[::-1], "the same rows in another order"),
    "any columns": (O_PROJ, lambda v: v[:, ::-1], "the same columns in another order"),
    "elements": (NORM, lambda v: v[::-1], "the same elements in another order"),
    "zero": (O_PROJ, np.zeros_like, "all zero in B"),
    "doubled": (O_PROJ, lambda v: v * v.dtype.type(2), "B is A times 2"),
    "negative": (BIAS, lambda v: -v, "B is A times -1"),
    "scaled by little": (BIAS, lambda v: v * v.dtype.type(1.01), "B is A times 1.01"),
    "scaled": (NORM, lambda v: v * v.dtype.type(0.3), "B is A times 0.3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REARRANGED)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rearrangements_are_named(changed, values, case, dtype):
    name, change, expected = REARRANGED[case]
    value = (values[name].astype(F32) * F32.type(1.0001)).astype(values[name].dtype if name == BIAS else dtype)
    report = changed({name: np.ascontiguousarray(change(value))}, {name: value})
    found = text(report, name)
    if case == "scaled":
        assert report["tensors"][name]["explanation"]["factor"] == pytest.approx(0.3, abs=1e-3)
    else:
        assert found == expected
    assert report["totals"]["unexplained"] == 0 and not report["equal"]
    if expected.startswith(("experts", "router rows")) and ";" not in expected:
        assert np.array_equal(value[report["tensors"][name]["explanation"]["experts"]], change(value))


@pytest.mark.parametrize("name", [GATE_UP, DOWN, ROUTER, BIAS, Q_B, KV_A, KV_B, O_PROJ, NORM, EH, GATE, UP])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_another_tensor_is_not_explained(changed, values, name, dtype):
    value = values[name].astype(F32 if name == BIAS else dtype)
    noisy = (value.astype(np.float64) * np.random.default_rng(3).uniform(0.97, 1.03, value.shape)).astype(value.dtype)
    for wrong in (other(value), noisy):
        report = changed({name: wrong}, {name: value})
        assert text(report, name) == "unexplained" and report["totals"]["unexplained"] == 1
        assert "1 unexplained" in verdict(report)


@pytest.mark.parametrize("case", REARRANGED)
def test_an_arrangement_with_one_wrong_value_is_not_explained(changed, values, case):
    name, change, _ = REARRANGED[case]
    value = np.ascontiguousarray(change(values[name])).copy()
    value.reshape(-1)[-1] = 0.625
    found = changed({name: value})["tensors"][name]["explanation"]
    assert found is None or not found["whole"]


def test_a_square_matrix_transposed(tmp_path):
    """o_proj [40, 40]."""
    config = small(num_hidden_layers=3, num_nextn_predict_layers=0, num_attention_heads=5, v_head_dim=8)
    values = canonical_values(config)
    a = store(tmp_path / "a", values, config)
    value = values[O_PROJ]
    report = diff(a, store(tmp_path / "b", {**values, O_PROJ: np.ascontiguousarray(value.T)}, config))
    assert text(report, O_PROJ) == "transposed" and report["totals"]["explained"] == {"transposed": 1}
    report = diff(a, store(tmp_path / "c", {**values, O_PROJ: other(value)}, config))
    assert text(report, O_PROJ) == "unexplained"


def test_square_experts_transposed_permuted_and_exchanged(tmp_path):
    config = small(num_hidden_layers=3, num_nextn_predict_layers=0, moe_intermediate_size=20)  # gate_up [12, 40, 40]
    values = canonical_values(config)
    value = values[GATE_UP]
    a = store(tmp_path / "a", values, config)
    for number, (order, exchanged, expected) in enumerate([
        (range(12), False, "every expert transposed"),
        (SHUFFLE, False, f"experts {SHUFFLED}; every expert transposed"),
        (SHUFFLE, True, f"experts {SHUFFLED}; gate and up exchanged; every expert transposed"),
    ]):
        port = (exchange_gate_up(value) if exchanged else value)[list(order)].swapaxes(1, 2)
        report = diff(a, store(tmp_path / f"b{number}", {**values, GATE_UP: np.ascontiguousarray(port)}, config))
        assert text(report, GATE_UP) == expected


def test_other_widths_are_listed_and_transposes_found(tmp_path):
    """Hidden and intermediate size of one are the other's the other way round."""
    facts = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "first_k_dense_replace": 2}
    a, b = small(**facts), small(**facts, hidden_size=56, intermediate_size=40, rope_theta=5000.0)
    values, port = canonical_values(a), canonical_values(b, seed=6)
    port[GATE] = np.ascontiguousarray(values[GATE].T)
    port["model.embed_tokens.weight"][:, :40] = values["model.embed_tokens.weight"]
    report = diff(store(tmp_path / "a", values, a), store(tmp_path / "b", port, b))
    fields = {field["field"]: (field["a"], field["b"]) for field in report["config"]}
    assert fields == {"hidden_size": (40, 56), "intermediate_size": (56, 40), "rope_theta": (1000.0, 5000.0)}
    assert {name for name, row in report["tensors"].items() if row["explanation"]} == {GATE}
    row = report["tensors"][GATE]
    assert (row["status"], row["shape"]) == ("shape", {"a": [56, 40], "b": [40, 56]})
    assert row["explanation"]["text"] == "transposed"
    assert report["tensors"][L0 + "self_attn.q_b_proj.weight"]["status"] == "differs"  # of one shape in both


def test_a_larger_vocabulary(values, original, tmp_path):
    larger = small(num_hidden_layers=3, num_nextn_predict_layers=1, vocab_size=310)
    padded = {**values}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded[name] = np.concatenate([values[name], np.zeros((10, 40), BF16)])
    padded["lm_head.weight"][299, 39] += 1
    report = diff(original, store(tmp_path / "b", padded, larger))
    assert text(report, "model.embed_tokens.weight") == "the first 300 rows are the same"
    assert text(report, "lm_head.weight") == "unexplained"
    assert report["totals"]["bitwise_equal"] == len(values) - 2


def test_gate_and_up_of_a_dense_mlp(changed, values):
    report = changed({GATE: values[UP], UP: values[GATE]})
    assert text(report, GATE) == text(report, UP) == "gate and up exchanged"
    assert report["tensors"][GATE]["explanation"]["tensor"] == UP
    shared = [L2 + f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up")]
    report = changed({shared[0]: values[shared[1]], shared[1]: values[shared[0]]})
    assert text(report, shared[0]) == text(report, shared[1]) == "gate and up exchanged"


def test_gate_alone_that_is_up_is_not_an_exchange(changed, values):
    report = changed({GATE: values[UP]})
    assert text(report, GATE) == f"is A's {UP}"
    nearly = values[UP].copy()
    nearly[55, 39] += 1
    assert text(changed({GATE: nearly}), GATE) == "unexplained"
    report = changed({GATE: values[UP], UP: other(values[UP])})
    assert text(report, GATE) == f"is A's {UP}" and text(report, UP) == "unexplained"


def test_layers_in_the_order_of_their_numbers_as_text(v3, tmp_path):
    """Thirteen layers of which a port has taken 10 for 2 and so on."""
    config = small("tiny_v3")
    values = canonical_values(config)
    order = dict(zip(map(str, range(2, 13)), sorted(map(str, range(2, 13)))))  # 2: 10, 3: 11, …
    port = {}
    for name in values:
        parts = name.split(".")
        if parts[1] == "layers" and parts[2] in order:
            parts[2] = order[parts[2]]
        port[name] = values[".".join(parts)]
    report = diff(v3, store(tmp_path / "b", port, config))
    assert text(report, "model.layers.2.self_attn.o_proj.weight") == "is A's model.layers.10.self_attn.o_proj.weight"
    assert text(report, "model.layers.12.mlp.experts.down_proj") == "is A's model.layers.9.mlp.experts.down_proj"
    assert report["totals"]["unexplained"] == 0
    assert report["findings"][0].startswith("layers moved: B's 2 holds A's 10 (16 tensors), 3 holds A's 11 (16")


def test_router_and_experts_alike_or_not(changed, values):
    moved = {name: np.ascontiguousarray(values[name][SHUFFLE]) for name in (ROUTER, BIAS, GATE_UP, DOWN)}
    assert changed(moved)["findings"] == ["router and experts are permuted alike: layers 2"]
    experts = {name: moved[name] for name in (GATE_UP, DOWN)}
    assert changed(experts)["findings"] == ["router and experts are not permuted alike: layers 2"]
    mixed = {**moved, DOWN: np.ascontiguousarray(values[DOWN][::-1])}
    assert changed(mixed)["findings"] == ["router and experts are not permuted alike: layers 2"]
    unknown = {**moved, DOWN: other(values[DOWN])}
    assert changed(unknown)["findings"] == []


def test_some_experts_are_wrong(changed, values):
    value = values[DOWN][[0, 1, 2, 4, 3, 5, 6, 7, 8, 9, 10, 11]].copy()
    value[7] = other(value[7])
    report = changed({DOWN: value})
    assert text(report, DOWN) == "11 of 12 experts are A's; those of other values: 7; 2 of A's are in another slot"
    assert report["tensors"][DOWN]["explanation"]["experts"] == [0, 1, 2, 4, 3, 5, 6, -1, 8, 9, 10, 11]
    assert report["totals"]["unexplained"] == 1


def test_experts_that_are_alike_do_not_hide_a_permutation(changed, values):
    """Correction biases are often equal."""
    a = np.round(values[BIAS] * 20).astype(F32)
    assert len(set(a.tolist())) < 9
    order = changed({BIAS: a[SHUFFLE]}, {BIAS: a})["tensors"][BIAS]["explanation"]["experts"]
    assert sorted(order) == list(range(12)) and np.array_equal(a[order], a[SHUFFLE])


def test_describe_experts_counts_only_the_moved():
    big = np.random.default_rng(0).permutation(256).tolist()
    assert describe_experts(big)[1].endswith(f"({sum(i != e for i, e in enumerate(big))} of 256 moved)")
    assert len(describe_experts(big)[1]) < 150
    assert describe_experts([1, 0])[1] == "experts permuted: slot 0 holds expert 1, 1 holds 0"


# --- rounding ---


@pytest.mark.parametrize("to", [BF16, np.dtype(np.float16)])
@pytest.mark.parametrize("kept", [True, False])
def test_rounded(changed, values, to, kept):
    """The rounded side in its own dtype, or written back as fp32."""
    a = canonical_values(CONFIG, dtype=F32)[DOWN]
    b = a.astype(to) if kept else a.astype(to).astype(F32)
    assert text(changed({DOWN: b}, {DOWN: a}), DOWN) == f"B is A rounded to {to}"
    assert text(changed({DOWN: a}, {DOWN: b}), DOWN) == f"A is B rounded to {to}"
    wrong = b.copy()
    wrong[3, 3, 3] = np.nextafter(b[3, 3, 3], b.dtype.type(9))
    assert text(changed({DOWN: wrong}, {DOWN: a}), DOWN).startswith(("unexplained", "11 of 12 experts"))


def test_rounded_and_rearranged(changed, values):
    a = canonical_values(CONFIG, dtype=F32)
    port = exchange_gate_up(a[GATE_UP])[SHUFFLE]
    expected = f"experts {SHUFFLED}; gate and up exchanged; "
    assert text(changed({GATE_UP: port.astype(BF16)}, {GATE_UP: a[GATE_UP]}), GATE_UP) == (
        expected + "B is A rounded to bfloat16"
    )
    half = port.astype(np.float16).astype(F32)
    assert text(changed({GATE_UP: half}, {GATE_UP: a[GATE_UP]}), GATE_UP) == expected + "B is A rounded to float16"
    other_way = a[GATE_UP].astype(BF16)
    assert text(changed({GATE_UP: port}, {GATE_UP: other_way}), GATE_UP).endswith("A is B rounded to bfloat16")
    dense = {GATE: a[UP].astype(BF16), UP: a[GATE].astype(BF16)}
    report = changed(dense, {GATE: a[GATE], UP: a[UP]})
    assert text(report, GATE) == text(report, UP) == "gate and up exchanged"


def test_the_same_values_in_another_dtype_are_no_bitwise_equality(changed, values, capfd):
    report = changed({NORM: values[NORM].astype(F32)})
    row = report["tensors"][NORM]
    assert (row["status"], row["dtype"]) == ("dtype", {"a": "bfloat16", "b": "float32"})
    assert not report["equal"] and report["totals"]["same_values_other_dtype"] == 1
    rearranged = changed({GATE_UP: exchange_gate_up(values[GATE_UP]).astype(F32)})
    assert text(rearranged, GATE_UP) == "gate and up exchanged"


# --- FP8 ---

WIDE = small(num_hidden_layers=3, num_nextn_predict_layers=0, hidden_size=140, moe_intermediate_size=136)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(folder, values, the folder in FP8, its values) with experts [12, 272, 140]: several blocks, ragged."""
    root = tmp_path_factory.mktemp("fp8")
    generator, values = np.random.default_rng(2), canonical_values(WIDE)
    values[GATE_UP] = (values[GATE_UP] * generator.uniform(0.2, 5, (12, 272, 1))).astype(BF16)
    hub_folder(root / "bf16", WIDE, hub_values(WIDE, values))
    convert(root / "bf16", root / "fp8", Options(to="hf", dtype="fp8", quiet=True, sync=False))
    with open_weights(root / "fp8") as weights:
        rounded = {name: tensor.array() for name, tensor in weights.tensors.items()}
    return root / "bf16", values, root / "fp8", rounded


def test_fp8_rounding(wide, tmp_path):
    folder, values, fp8, rounded = wide
    report = diff(folder, fp8)
    row = report["tensors"][GATE_UP]
    assert row["stored"] == {"a": "BF16", "b": "F8_E4M3 with F32 scales"} and row["max_rel"] > 0.05
    assert text(report, GATE_UP) == "within the rounding of B's FP8 blocks"
    assert report["totals"]["unexplained"] == 0
    assert text(diff(fp8, folder), GATE_UP) == "within the rounding of A's FP8 blocks"
    noise = np.random.default_rng(0).uniform(0.85, 1.1, (12, 272, 140))
    off = {**values, GATE_UP: (values[GATE_UP] * noise).astype(BF16)}
    assert text(diff(store(tmp_path / "off", off, WIDE), fp8), GATE_UP) == "unexplained"
    largest = np.unravel_index(np.abs(rounded[GATE_UP]).argmax(), (12, 272, 140))
    for factor, expected in ((1.06, "within the rounding of B's FP8 blocks"), (1.08, "11 of 12 experts are A's")):
        off[GATE_UP] = rounded[GATE_UP].copy()
        off[GATE_UP][largest] *= factor
        assert text(diff(store(tmp_path / str(factor), off, WIDE), fp8), GATE_UP).startswith(expected)
    assert text(diff(store(tmp_path / "off2", {**values, DOWN: other(values[DOWN])}, WIDE), fp8), DOWN) == "unexplained"
    # what was rounded and written as fp32 is no FP8 store: the figures alone tell
    assert text(diff(folder, store(tmp_path / "f32", rounded, WIDE)), GATE_UP) == "unexplained"


def test_fp8_scales_misapplied(wide, tmp_path):
    """P28: left out, divided by."""
    _, _, fp8, rounded = wide
    a = rounded[GATE_UP].reshape(24, 136, 140)
    scales = np.stack([np.kron(np.arange(1, 5).reshape(2, 2) + part % 3, np.ones((128, 128)))[:136, :140]
                       for part in range(24)])  # fmt: skip
    expected = "B is A times one factor per 128 x 128 block, "
    for number, wrong in enumerate((a / scales, a / scales**2, a * scales)):
        value = wrong.reshape(12, 272, 140).astype(np.float32)
        report = diff(fp8, store(tmp_path / f"b{number}", {**rounded, GATE_UP: value}, WIDE))
        assert text(report, GATE_UP).startswith(expected), number
    assert report["tensors"][GATE_UP]["explanation"]["block_factors"] == pytest.approx([1, 6])
    value = (a * scales).reshape(12, 272, 140).astype(np.float32)
    value[11, 271, 139] *= 1.001
    assert text(diff(fp8, store(tmp_path / "wrong", {**rounded, GATE_UP: value}, WIDE)), GATE_UP) == "unexplained"


def test_too_little_memory_for_block_factors_is_said(wide, tmp_path):
    """As it is of other arrangements, alone and beside that."""
    _, _, fp8, rounded = wide
    scales = np.kron(np.arange(1, 5).reshape(2, 2), np.ones((128, 128)))[:136, :140]
    wrong = (rounded[GATE_UP].reshape(24, 136, 140) * scales).reshape(12, 272, 140).astype(np.float32)
    b = store(tmp_path / "b", {**rounded, GATE_UP: wrong}, WIDE)
    blocks = "not looked at for a factor per FP8 block: --max-memory is too little"
    both = f"not looked at for other arrangements: --max-memory is too little; {blocks}"
    for memory, expected in ((1_000_000, blocks), (200_000, both)):
        report = diff(fp8, b, max_memory=memory)
        assert text(report, GATE_UP) == expected and report["totals"]["unexplained"] == 1
    assert text(diff(fp8, b, max_memory=5_000_000), GATE_UP).startswith("B is A times one factor per 128 x 128 block")
    off = rounded[GATE_UP].astype(np.float32) * np.random.default_rng(5).uniform(0.9, 1.1, (12, 272, 140)).astype(F32)
    off[3] = rounded[GATE_UP][3]
    report = diff(fp8, store(tmp_path / "off", {**rounded, GATE_UP: off}, WIDE), max_memory=1_000_000)
    assert text(report, GATE_UP).startswith("1 of 12 experts are A's") and text(report, GATE_UP).endswith("; " + blocks)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_block_factors_stay_within_what_they_ask_for(dtype):
    value = np.random.default_rng(0).standard_normal((300, 2000)).astype(dtype)
    left, right = tensor(value), tensor(value * dtype.type(2))
    needed = 128 * 2000 * 64
    assert block_factors(left, right, needed - 1, lambda count: None).kind == "not looked at"
    tracemalloc.start()
    found = block_factors(left, right, needed, lambda count: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.facts == {"block_factors": [2, 2]} and peak < needed


def test_last_digits_are_no_block_factors(wide, tmp_path):
    """One unit in the last place, here and there, is a factor of nearly 1 in every block."""
    _, values, _, _ = wide
    bits = values[GATE_UP].view(np.uint16)
    noisy = (bits + (np.random.default_rng(4).random(bits.shape) < 0.5).astype(np.uint16)).view(BF16)
    a, b = store(tmp_path / "a", values, WIDE), store(tmp_path / "b", {**values, GATE_UP: noisy}, WIDE)
    report = diff(a, b)
    assert text(report, GATE_UP) == "unexplained" and report["tensors"][GATE_UP]["max_ulp"] == 1


# --- NaN, infinities, zeros ---


def test_nan_and_infinities(changed, values):
    value = values[DOWN].copy()
    value[0, 0, 0], value[1, 1, 1], value[2, 2, 2] = np.nan, np.inf, -np.inf
    report = changed({DOWN: value})
    row = report["tensors"][DOWN]
    assert row["b"] == {"all_zero": False, "nan": 1, "inf": 2} and row["a"]["nan"] == row["a"]["inf"] == 0
    assert (row["differing"], row["not_finite_in_one"], row["max_abs"]) == (3, 3, 0.0)
    assert row["worst"] == {"index": [0, 0, 0], "a": float(values[DOWN][0, 0, 0]), "b": None}
    assert report["totals"]["unexplained"] == 1
    both = value.copy()
    both[5, 5, 5] = 1.5
    row = changed({DOWN: both}, {DOWN: value})["tensors"][DOWN]
    assert (row["differing"], row["not_finite_in_one"], row["a"], row["b"]) == (1, 0, row["b"], row["a"])
    assert row["max_abs"] == abs(1.5 - float(values[DOWN][5, 5, 5])) and np.isfinite(row["cosine"])
    another_nan = value.copy()
    another_nan.view(np.uint16)[0, 0, 0] += 1
    row = changed({DOWN: another_nan}, {DOWN: value})["tensors"][DOWN]
    assert (row["differing"], row["not_finite_in_one"], row["max_ulp"]) == (1, 0, 0)


def test_nan_in_both_is_equal_and_told(original, values, tmp_path, capfd):
    nan, zero = values[NORM].copy(), np.zeros_like(values[O_PROJ])
    nan[7] = np.nan
    a, b = (store(tmp_path / side, {**values, NORM: nan, O_PROJ: zero}) for side in "ab")
    assert weight_sync(["diff", str(a), str(b), "--quiet"]) == 0
    out = capfd.readouterr().out
    assert f"NaN or infinite values: {NORM}" in out and f"all zero: {O_PROJ}" in out
    capfd.readouterr()
    assert weight_sync(["diff", str(original), str(original), "--quiet"]) == 0
    assert "in both" not in capfd.readouterr().out


# --- names, prediction layers, copies, configurations ---


def test_a_missing_prediction_layer_is_one_line(values, tmp_path, capfd):
    a = hub_folder(tmp_path / "a", CONFIG, hub_values(CONFIG, values))
    without = {name: value for name, value in values.items() if ".layers.3." not in name}
    b = hub_folder(tmp_path / "b", CONFIG, hub_values(CONFIG, without, copies=False))
    assert weight_sync(["diff", str(a), str(b), "--quiet", "--json", str(tmp_path / "out.json")]) == 1
    out, report = capfd.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    count = sum(".layers.3." in name for name in values)
    assert f"model.layers.3.* ({count} tensors)" in out and out.count("layers.3.") == 1
    assert "only in A: the whole layer, multi-token prediction" in out
    assert report["totals"]["only_in_a"] == count and report["totals"]["bitwise_equal"] == len(values) - count
    assert report["tensors"][EH]["status"] == "only in A"
    assert diff(b, a)["totals"]["only_in_b"] == count


def test_a_missing_bias_is_a_line_of_its_own(values, original, tmp_path, capfd):
    greedy = ModelConfig.model_validate(CONFIG.model_dump() | {"topk_method": "group_limited_greedy"})
    without = {name: value for name, value in values.items() if "correction_bias" not in name}
    assert weight_sync(["diff", str(original), str(store(tmp_path / "b", without, greedy)), "--quiet"]) == 1
    out = capfd.readouterr().out
    assert BIAS in out and "only in A" in out and "topk_method" in out and "group_limited_greedy" in out


def test_copies_of_shared_tensors(values, tmp_path):
    hub = hub_values(CONFIG, values)
    good = hub_folder(tmp_path / "good", CONFIG, hub)
    head = "model.layers.3.shared_head.head.weight"
    bad = hub_folder(tmp_path / "bad", CONFIG, {**hub, head: other(hub[head])})
    worse = hub_folder(tmp_path / "worse", CONFIG, {**hub, head: other(hub[head], 78)})
    without = hub_folder(tmp_path / "without", CONFIG, hub_values(CONFIG, values, copies=False))
    assert diff(good, without)["equal"] and diff(bad, bad)["equal"]
    for pair in ((good, bad), (bad, without), (bad, worse)):
        report = diff(*pair)
        assert not report["equal"] and [copy["name"] for copy in report["copies"]] == [head]
        assert report["totals"]["bitwise_equal"] == len(values)
        assert "1 copies of shared tensors differ" in verdict(report)


def test_fields_of_the_configuration(values, original, tmp_path):
    """What training alone uses does not make two stores different."""
    loss = store(tmp_path / "loss", values, ModelConfig.model_validate(CONFIG.model_dump() | {"aux_loss_alpha": 0.5}))
    report = diff(original, loss)
    assert report["equal"] and [field["field"] for field in report["config"]] == ["aux_loss_alpha"]
    theta = store(tmp_path / "theta", values, ModelConfig.model_validate(CONFIG.model_dump() | {"rope_theta": 2000.0}))
    report = diff(original, theta)
    assert not report["equal"] and "1 fields of the configuration differ" in verdict(report)


# --- the command ---


def test_table_worst_first_and_limited(values, original, tmp_path, capfd):
    small_change = values[UP].copy()
    small_change[0, 0] *= 1.01
    nan = values[NORM].copy()
    nan[0] = np.nan
    changes = {UP: small_change, O_PROJ: other(values[O_PROJ]), NORM: nan, GATE_UP: exchange_gate_up(values[GATE_UP])}
    b = store(tmp_path / "b", {**values, **changes})
    assert weight_sync(["diff", str(original), str(b), "--quiet"]) == 1
    out = capfd.readouterr().out
    order = sorted((NORM, O_PROJ, GATE_UP, UP), key=out.index)
    assert order[0] == NORM and order[-1] == UP and "B has 1 NaN" in out
    assert f"{len(values) - 4} tensors bitwise equal" in out and "DIFFERENT: " in out.splitlines()[-1]
    assert weight_sync(["diff", str(original), str(b), "--quiet", "--limit", "1"]) == 1
    out = capfd.readouterr().out
    assert "… 3 more" in out and f"│ {O_PROJ}" not in out


@pytest.mark.parametrize("width", [80, 200])
def test_findings_are_readable_at_any_width(changed, values, width):
    report = changed({GATE_UP: exchange_gate_up(values[GATE_UP]), O_PROJ: other(values[O_PROJ])})
    stream = io.StringIO()
    show(report, Console(file=stream, width=width, markup=False))
    lines = stream.getvalue().splitlines()
    assert any("gate and up exchanged" in line for line in lines[:-1])
    assert max(len(line) for line in lines if "│" in line) <= width


def strict(text: str) -> dict:
    def refuse(token: str) -> None:
        raise ValueError(token)

    return json.loads(text, parse_constant=refuse)


def test_json_is_complete_and_without_nan(values, original, tmp_path, capfd):
    value = values[NORM].copy()
    value[:] = np.inf
    b = store(tmp_path / "b", {**values, NORM: value, O_PROJ: np.zeros_like(values[O_PROJ])})
    out = tmp_path / "report.json"
    assert weight_sync(["diff", str(original), str(b), "--quiet", "--json", str(out)]) == 1
    report = strict(out.read_text())
    assert set(report["tensors"]) == set(values) and report["verdict"] in capfd.readouterr().out
    assert report["tensors"][O_PROJ]["cosine"] is None and report["definitions"]["max_ulp"]
    assert report["a"]["format"] == "hf" and report["totals"]["tensors"] == len(values)
    assert [path.name for path in tmp_path.iterdir()] == ["b", "report.json"] or not list(tmp_path.glob(".report*"))


def bad_input(capfd, *arguments: object) -> str:
    assert run_cli(weight_sync, ["diff", *map(str, arguments), "--quiet"]) == 2
    return capfd.readouterr().err


def test_bad_input(values, original, tmp_path, capfd):
    assert "nothing: not there" in bad_input(capfd, original, tmp_path / "nothing")
    misspelt = {name.replace(NORM, NORM.replace("norm", "nrom")): value for name, value in values.items()}
    assert f"1 tensors of the model are missing: {NORM}" in bad_input(capfd, original, store(tmp_path / "b", misspelt))
    assert "its folder is not there" in bad_input(capfd, original, original, "--json", tmp_path / "no" / "out.json")
    assert "is no size" in bad_input(capfd, original, original, "--max-memory", "much")
    (tmp_path / "bare").mkdir()
    write_safetensors(tmp_path / "bare" / "model.safetensors", values)
    assert "--config" in bad_input(capfd, original, tmp_path / "bare")
    config = original / "config.json"
    assert weight_sync(["diff", str(original), str(tmp_path / "bare"), "--config", str(config), "--quiet"]) == 0
    assert weight_sync(["diff", str(original), str(tmp_path / "bare"), "--config-b", str(config), "--quiet"]) == 0


# --- streaming ---


@pytest.mark.parametrize("memory", [3000, 20_000, 200_000])
def test_a_small_bound_finds_the_same(values, original, tmp_path, memory):
    """Bounds below a row, below a matrix, below a tensor."""
    changes = {GATE_UP: exchange_gate_up(values[GATE_UP])[SHUFFLE], O_PROJ: other(values[O_PROJ]),
               UP: values[UP] * BF16.type(2), Q_B: halves(values[Q_B], 3),
               DOWN: np.ascontiguousarray(values[DOWN][::-1]).astype(F32)}  # fmt: skip
    b = store(tmp_path / "b", {**values, **changes})
    whole, small_steps = diff(original, b), diff(original, b, max_memory=memory)
    exact = ("status", "differing", "max_abs", "max_rel", "max_ulp", "worst")
    for name, row in whole["tensors"].items():
        found = small_steps["tensors"][name]
        assert {key: row.get(key) for key in exact} == {key: found.get(key) for key in exact}
        if memory > 100_000:
            assert found["explanation"] == row["explanation"]
    if memory < 100_000:
        assert text(small_steps, GATE_UP) == "not looked at for other arrangements: --max-memory is too little"
        assert "rounded" not in text(small_steps, DOWN)
        assert small_steps["totals"]["unexplained"] > 1


def test_memory_stays_within_the_bound(tmp_path):
    """Embedding and head of 10 MB each: equal within 2 MB, measured and explained within 6."""
    config = small(num_hidden_layers=2, num_nextn_predict_layers=0, hidden_size=64, vocab_size=40_000)
    values = canonical_values(config, dtype=F32)
    embedding = "model.embed_tokens.weight"
    port = {**values, "lm_head.weight": other(values["lm_head.weight"]), embedding: values[embedding][::-1]}
    port[embedding] = np.ascontiguousarray(port[embedding])
    a, b, c = (store(tmp_path / n, v, config) for n, v in (("a", values), ("b", port), ("c", values)))
    del values, port
    for right, bound in ((b, 6 << 20), (c, 2 << 20)):
        tracemalloc.start()
        report = diff(a, right, max_memory=bound)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < bound + (1 << 20), f"{peak} bytes"
        assert report["equal"] == (right == c)
    with open_weights(a) as left, open_weights(b) as right:
        found = compare(left, right, max_memory=6 << 20)
    assert text(found, embedding) == "the same rows in another order" and text(found, "lm_head.weight") == "unexplained"


def test_too_little_memory_for_a_quantised_row(wide, capfd):
    assert "which is quantised, takes 35.0 KiB" in bad_input(capfd, wide[0], wide[2], "--max-memory", "10kB")


def test_progress_counts_all_that_is_read(changed, values, wide, monkeypatch, tmp_path):
    """Also when arrangements, block factors and other names are looked for, and a reading that ends early."""
    bars = []

    class Recorded(Progress):
        def __init__(self, what, total, quiet):
            super().__init__(what, total, quiet)
            self.foreseen, self.largest = total, 0
            bars.append(self)

        def advance(self, count):
            super().advance(count)
            self.largest = max(self.largest, count)

    monkeypatch.setattr(comparison, "Progress", Recorded)

    def further(replaced) -> int:
        """Bytes read that were not foreseen."""
        changed(replaced, max_memory=200_000)
        assert bars[-1].done == bars[-1].total and bars[-1].largest <= 100_000 // 128 * 4
        return bars[-1].done - bars[-1].foreseen

    assert further({}) == 0
    assert further({DOWN: values[DOWN][::-1]}) == 2 * values[DOWN].nbytes
    assert further({DOWN: other(values[DOWN])}) == 2 * values[DOWN].nbytes
    assert further({O_PROJ: np.zeros_like(values[O_PROJ])}) == 0
    assert further({GATE: values[UP]}) == 4 * values[GATE].nbytes  # for arrangements, then as A's up
    nearly = values[UP].copy()
    nearly[2, 0] += 1
    assert further({GATE: nearly}) == 2 * values[GATE].nbytes
    head = "lm_head.weight"
    a, cut = store(tmp_path / "a", values), small(num_hidden_layers=3, num_nextn_predict_layers=1, vocab_size=290)
    shorter = {name: value[:290] if value.shape[0] == 300 else value for name, value in values.items()}
    diff(a, store(tmp_path / "cut", shorter, cut))
    assert bars[-1].done == bars[-1].total == bars[-1].foreseen - 2 * (values[head].nbytes - shorter[head].nbytes)
    _, _, fp8, rounded = wide
    scaled = rounded[GATE_UP].astype(F32) * (1 + np.arange(140) // 128).astype(F32)
    diff(fp8, store(tmp_path / "scaled", {**rounded, GATE_UP: scaled}, WIDE))
    assert bars[-1].done == bars[-1].total == bars[-1].foreseen + 2 * 2 * scaled.nbytes  # arrangements, blocks


# --- fingerprints and explanations of any shape ---


def tensor(value: np.ndarray, name: str = GATE, axes=("a", "b", "c")) -> CanonicalTensor:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    stored = Mapped(name, value.shape, value.dtype, data, [(0, value.nbytes)])
    entry = names.Entry(Parameter(name, value.shape, axes), names.Row(name, (name,), SAME), (name,), value.shape)
    return CanonicalTensor(entry, [Part(stored, value.shape)], value.dtype)


def explained(a: np.ndarray, b: np.ndarray, name: str = GATE, step: int = 64, axes=("a", "b", "c")):
    left, right = tensor(a, name, axes), tensor(b, name, axes)
    return explain(left, fingerprints(left, a.dtype, step), fingerprints(right, b.dtype, step), CONFIG)


@pytest.mark.parametrize("seed", range(40))
def test_fuzz_shapes(seed):
    """Random shapes and read sizes: fingerprints do not depend on the latter; arrangements are found, noise is not."""
    generator = np.random.default_rng(seed)
    dtype = [BF16, F32, np.dtype(np.float16), np.dtype(np.float64)][seed % 4]
    shape = tuple(generator.integers(2, 13, int(generator.integers(2, 4))))
    value = generator.standard_normal(shape).astype(dtype)
    name, step = DOWN if len(shape) == 3 else GATE, int(generator.integers(1, 200))
    left = fingerprints(tensor(value), dtype, step)
    whole = fingerprints(tensor(value), dtype, 10**6)
    assert np.array_equal(left.rows, whole.rows) and np.array_equal(left.columns, whole.columns)
    stack, rows, columns = as_matrices(shape)
    assert left.rows.shape == (stack, rows) and left.columns.shape == (stack, columns)
    turned = fingerprints(tensor(value.swapaxes(-1, -2)), dtype, step)
    assert np.array_equal(turned.rows, left.columns) and np.array_equal(turned.columns, left.rows)
    assert "transposed" in explained(value, value.swapaxes(-1, -2), name, step).text
    assert explained(value, generator.standard_normal(shape).astype(dtype), name, step) is None
    shuffled = value.copy()
    generator.permuted(shuffled.reshape(-1), out=shuffled.reshape(-1))
    assert shuffled.tobytes() == value.tobytes() or explained(value, shuffled, name, step) is None
    if len(shape) == 3:
        order = generator.permutation(shape[0])
        found = explained(value, value[order], name, step)
        assert found.facts == {"experts": order.tolist()} if (order != np.arange(shape[0])).any() else not found.text
    elif rows > 2:
        assert explained(value, np.roll(value, 1, 0), name, step).kind == "rows in another order"
        assert explained(value, np.roll(value, 1, 1), name, step).kind == "columns in another order"


@pytest.mark.parametrize("name, rows", [(Q_B, 54), (KV_A, 28), (KV_B, 66), (GATE_UP, 48), (GATE_UP, 10)])
def test_row_orders_are_permutations_and_differ(name, rows):
    orders = [(what, order.tolist()) for what, order in row_orders(name, rows, CONFIG)]
    assert all(sorted(order) == list(range(rows)) and order != list(range(rows)) for what, order in orders
               if "per head" not in what or name != KV_A)  # fmt: skip
    texts = [what for what, _ in orders]
    assert len(set(texts)) == len(texts)


def test_queries_without_compression():
    """V2-Lite's q_proj [H (nope + rope), D]."""
    value = np.random.default_rng(0).standard_normal((54, 40)).astype(F32)
    found = explained(value, halves(value, 3), "model.layers.11.self_attn.q_proj.weight")
    assert found.text == IN_HALVES and explained(value, halves(value, 3), O_PROJ).kind == "rows in another order"


def test_rope_of_four_dimensions_is_its_own_inverse():
    """P1: the direction cannot be told from four dimensions, the permutation can."""
    config = small(num_hidden_layers=3, num_nextn_predict_layers=0, qk_rope_head_dim=4)
    value = np.random.default_rng(0).standard_normal((3 * 14, 28)).astype(F32)
    left, right = (tensor(v, Q_B) for v in (value, value[rope_permutation(42, 3, 4, True)]))
    found = explain(left, fingerprints(left, F32, 99), fingerprints(right, F32, 99), config)
    assert found.text.startswith("rotary rows")


def test_user_errors_of_either_side_name_it(original, tmp_path):
    with pytest.raises(UserError, match="gone"):
        diff(original, tmp_path / "gone")


def test_ulp_is_counted_in_the_wider_dtype(changed, values):
    one = np.full_like(values[NORM], 1)
    half = one.astype(F32) + F32.type(2.0**-9)
    row = changed({NORM: half}, {NORM: one})["tensors"][NORM]
    assert row["max_ulp"] == 2**14 and row["max_abs"] == 2.0**-9 and ml_dtypes.finfo(BF16).nmant == 7
