"""Initial values: a pure function of seed, name and element, the same bits everywhere."""

import math
from itertools import product

import numpy as np
import pytest

from shared_ops import init
from shared_ops.config import load_model_config
from shared_ops.init import initial_value
from shared_ops.params import Parameter, manifest

STACKED = Parameter("model.layers.3.mlp.experts.gate_up_proj", (5, 6, 7), ("experts", "gate_up", "hidden"))
MATRIX = Parameter("model.layers.0.mlp.up_proj.weight", (9, 11), ("width", "hidden"))
VECTOR = Parameter("vector", (23,), ("hidden",))


def bits(array: np.ndarray) -> np.ndarray:
    assert array.dtype == np.float32
    return array.view(np.uint32)


def normal(count: int, name: str = "sample", seed: int = 0, std: float = 1.0) -> np.ndarray:
    return initial_value(Parameter(name, (count,), ("hidden",)), seed, std).astype(np.float64)


# --- slices ------------------------------------------------------------------------------------------------------


def cuts(size: int) -> list[slice]:
    middle = size // 2
    return [slice(None), slice(0, 1), slice(1, None), slice(middle, middle + 2), slice(size - 1, size),
            slice(middle, middle), slice(-2, None), slice(0, size + 5)]  # fmt: skip


@pytest.mark.parametrize("parameter", [VECTOR, MATRIX, STACKED], ids=lambda p: f"{len(p.shape)}d")
def test_any_slice_equals_that_part_of_the_whole(parameter):
    whole = initial_value(parameter, 7, 0.02)
    assert whole.shape == parameter.shape
    for index in product(*map(cuts, parameter.shape)):
        part = initial_value(parameter, 7, 0.02, index)
        assert part.shape == whole[index].shape
        assert np.array_equal(bits(part), bits(whole[index]))


def test_an_index_may_leave_out_the_last_dimensions():
    whole = initial_value(STACKED, 7, 0.02)
    assert np.array_equal(initial_value(STACKED, 7, 0.02, (slice(1, 3),)), whole[1:3])
    assert np.array_equal(initial_value(STACKED, 7, 0.02, ()), whole)


def test_the_size_of_a_chunk_does_not_matter(monkeypatch):
    whole = initial_value(STACKED, 7, 0.02)
    for chunk in (1, 3, 4, 50):  # the generator makes four words at once
        monkeypatch.setattr(init, "_CHUNK", chunk)
        assert np.array_equal(bits(initial_value(STACKED, 7, 0.02)), bits(whole))


def test_a_slice_of_a_giant_is_made_without_the_rest():
    """V3's experts of a layer are 30 GB in fp32; the last rows of the last expert cost what they hold."""
    giant = Parameter("model.layers.60.mlp.experts.gate_up_proj", (256, 4096, 7168), STACKED.axes)
    last = initial_value(giant, 0, 0.006, (slice(255, 256), slice(4095, 4096)))
    assert last.shape == (1, 1, 7168)
    flat = Parameter(giant.name, (256 * 4096 * 7168,), ("hidden",))
    assert np.array_equal(last.reshape(-1), initial_value(flat, 0, 0.006, (slice(-7168, None),)))


def test_ones_and_zeros_have_slices_too():
    for kind, value in (("ones", 1.0), ("zeros", 0.0)):
        parameter = Parameter("p", (5, 4), ("hidden", "hidden"), init=kind)
        part = initial_value(parameter, 0, 0.02, (slice(1, 3),))
        assert part.shape == (2, 4) and part.dtype == np.float32 and (part == value).all()


# --- independence ------------------------------------------------------------------------------------------------


def test_seeds_names_and_neighbours_are_independent():
    count = 100_000
    reference = normal(count)
    others = {
        "next seed": normal(count, seed=1),
        "next name": normal(count, name="sample1"),
        "next element": np.roll(reference, 1),
        "next block of the generator": np.roll(reference, 4),
        "next column": reference.reshape(100, -1).T.reshape(-1),
    }
    for what, other in others.items():
        assert abs(np.corrcoef(reference, other)[0, 1]) < 4 / math.sqrt(count), what
        assert abs(np.corrcoef(reference**2, other**2)[0, 1]) < 4 / math.sqrt(count), what
    # the key keeps seed and name apart
    assert not np.array_equal(normal(8, name="2x", seed=1), normal(8, name="x", seed=12))
    assert len(np.unique(reference.astype(np.float32))) > 0.98 * count


def test_the_parameters_of_a_model_are_all_different():
    config = load_model_config("tiny_v3")
    drawn = [p for p in manifest(config) if p.init == "normal"]
    first = {initial_value(p, 0, 0.02).reshape(-1)[:8].tobytes() for p in drawn}
    assert len(first) == len(drawn) > 20


# --- distribution ------------------------------------------------------------------------------------------------


def test_moments():
    x = normal(400_000, std=0.02) / 0.02
    error = 4 / math.sqrt(len(x))
    assert abs(x.mean()) < error
    assert abs(x.var() - 1) < error * math.sqrt(2)
    assert abs((x**3).mean()) < error * math.sqrt(15)
    assert abs((x**4).mean() - 3) < error * math.sqrt(96)


def test_distribution_function():
    """Kolmogorov and Smirnov: the largest distance of the empirical from the normal distribution function."""
    x = np.sort(normal(100_000))
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    steps = np.arange(len(x) + 1) / len(x)
    distance = max(np.abs(exact - steps[1:]).max(), np.abs(exact - steps[:-1]).max())
    assert distance < 1.63 / math.sqrt(len(x))  # 1 % level; seed and name are fixed
    assert np.abs(x).max() > 4  # the tails are there


def test_the_quantile_is_right_to_the_last_digits():
    """Through erfc, the other way round; in the middle, at the joints 0.425 and r = 5, and to the ends of the tails."""
    ends = 2.0 ** -np.arange(2, 54)
    joints = np.array([0.075, 0.925, math.exp(-25.0), 0.5])
    u = np.concatenate([ends, 1 - ends, joints, np.nextafter(joints, 0), np.nextafter(joints, 1), [0.5 * 2.0**-53],
                        np.linspace(0.001, 0.999, 999)])  # fmt: skip
    x = init._normal(u)
    low = u <= 0.5  # the upper half has its information in 1 - u
    back = np.array([0.5 * math.erfc(abs(value) / math.sqrt(2)) for value in x])
    assert np.abs(back / np.where(low, u, 1 - u) - 1).max() < 2e-14
    assert (np.sign(x) == np.where(u == 0.5, 0, np.where(low, -1, 1))).all()
    logarithm = init._log(u)
    assert logarithm == pytest.approx([math.log(value) for value in u], rel=4e-16, abs=1e-300)


def test_numbers_stay_inside_the_open_interval():
    u = init._uniform("sample", 0, 0, 100_000)
    assert 0 < u.min() and u.max() < 1


# --- the bits ----------------------------------------------------------------------------------------------------

GOLDEN = {  # (name, seed, std, first element): float32 bits
    ("model.embed_tokens.weight", 0, 0.02, 0): ["3b3ee465", "bccfb8b5", "bc3dccc0", "3b186691", "3bc01192", "bcce5804"],
    ("model.embed_tokens.weight", 1, 0.02, 0): ["bcc9f70a", "bca843a0", "baebafad", "bbca1a4e"],
    ("model.layers.60.mlp.experts.gate_up_proj", 1234, 0.006, 7516192765): ["3a9de015", "bb86a81f", "3c228fa1"],
    ("lm_head.weight", 1 << 40, 1.0, 3): ["3f939574", "bf480b13", "3e435767", "3f92b2ea", "3dc69f5b"],
    # out in both tails, where the quantile has other branches
    ("tails", 0, 1.0, 3283475): ["c09de76e"],
    ("tails", 0, 1.0, 208728): ["40a5474f"],
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_golden_bits(case):
    """A change here changes every run: another machine, library or version must give these bits."""
    name, seed, std, first = case
    giant = Parameter(name, (1 << 40,), ("hidden",))
    expected = GOLDEN[case]
    values = initial_value(giant, seed, std, (slice(first, first + len(expected)),))
    assert [f"{word:08x}" for word in bits(values)] == expected
