"""Expert placement: permutations, groups and devices, files, digests."""

import numpy as np
import pytest

from shared_ops import expert_table
from shared_ops.config import ModelConfig, load_model_config
from shared_ops.errors import UserError
from shared_ops.expert_table import (
    balanced,
    check_expert_parallel,
    contiguous,
    from_slots,
    modulo,
    placement_of,
    seeded_hash,
)

E, G = 12, 4
SKEWED = np.array([90, 1, 2, 80, 3, 4, 70, 5, 6, 1, 1, 1], np.float64)
# golden: they must be the same on every machine, and in every checkpoint written so far
HASH_3 = [2, 8, 11, 5, 7, 3, 10, 4, 1, 0, 6, 9]
CONTIGUOUS_DIGEST = "2970476a7dcf23b272566a55d5070f236eb3629c98cad5d592a06fe4fea5c643"
PLACEMENTS = {
    "contiguous": contiguous(E, G),
    "modulo": modulo(E, G),
    "hash": seeded_hash(E, G, 3),
    "balanced": balanced(SKEWED, contiguous(E, G), 2),
    "balanced in groups": balanced(SKEWED, seeded_hash(E, G, 3), E),
}


def refused(call, *fragments):
    with pytest.raises(UserError) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value)


def model(**changes) -> ModelConfig:
    return ModelConfig.model_validate(load_model_config("tiny_v3").model_dump() | changes)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_permutation_with_its_inverse(name):
    p = PLACEMENTS[name]
    assert p.slot_of_expert.dtype == p.expert_of_slot.dtype == np.int32
    assert sorted(p.slot_of_expert) == list(range(E))
    assert (p.slot_of_expert[p.expert_of_slot] == np.arange(E)).all()
    assert (p.expert_of_slot[p.slot_of_expert] == np.arange(E)).all()
    with pytest.raises(ValueError, match="read-only"):
        p.slot_of_expert[0] = 1


@pytest.mark.parametrize("name", PLACEMENTS)
def test_groups_and_devices_are_consecutive_slots(name):
    p = PLACEMENTS[name]
    assert p.group_of_expert.dtype == p.experts_of_group.dtype == np.int32
    assert p.experts_of_group.shape == (G, E // G)
    for group, members in enumerate(p.experts_of_group):
        assert (p.group_of_expert[members] == group).all()
        assert sorted(p.slot_of_expert[members]) == list(range(group * 3, group * 3 + 3))
    for devices in (1, 2, 4, 12):
        device = p.device_of_expert(devices)
        assert device.dtype == np.int32 and (np.bincount(device) == E // devices).all()
        assert (device == p.slot_of_expert // (E // devices)).all()
    assert (p.device_of_expert(4) == p.group_of_expert).all()


def test_builders_by_hand():
    assert contiguous(E, G).group_of_expert.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert modulo(E, G).group_of_expert.tolist() == [0, 1, 2, 3] * 3
    assert modulo(E, G).experts_of_group.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert seeded_hash(E, G, 3).slot_of_expert.tolist() == HASH_3
    assert seeded_hash(E, G, 4).slot_of_expert.tolist() != HASH_3


def test_a_hash_spreads_over_the_groups():
    groups = np.array([seeded_hash(64, 8, seed).group_of_expert for seed in range(200)])
    share = np.array([(groups == group).mean(0) for group in range(8)])  # of each expert in each group: 1/8
    assert np.abs(share - 1 / 8).max() < 5 * (1 / 8 * 7 / 8 / 200) ** 0.5


# --- balanced ----------------------------------------------------------------------------------------------------


def loads_of_devices(placement, loads, devices):
    return np.bincount(placement.device_of_expert(devices), loads)


def test_balanced_by_hand():
    """Groups of SKEWED weigh 93, 87, 81, 3: two devices hold 93 + 3 and 87 + 81 instead of 93 + 87 and 81 + 3."""
    groups = contiguous(E, G)
    assert loads_of_devices(groups, SKEWED, 2).tolist() == [180, 84]
    assert loads_of_devices(balanced(SKEWED, groups, 2), SKEWED, 2).tolist() == [96, 168]
    # a group over three devices: 90 + 1, 80 + 2, 3 + 4 instead of 90 + 80, 1 + 2, 3 + 4
    groups, loads = contiguous(E, 2), np.array([90, 80, 1, 2, 3, 4] + [1] * 6)
    assert loads_of_devices(groups, loads, 6).tolist() == [170, 3, 7, 2, 2, 2]
    assert balanced(loads, groups, 6).experts_of_group[0].tolist() == [0, 2, 1, 3, 4, 5]


@pytest.mark.parametrize("experts, groups, devices", [(64, 8, 4), (64, 8, 2), (64, 8, 16), (64, 4, 32), (64, 1, 8)])
def test_balanced_keeps_the_groups_and_lowers_the_heaviest_load(experts, groups, devices):
    generator = np.random.default_rng(0)
    before = seeded_hash(experts, groups, 1)
    gains = []
    for _ in range(20):
        loads = generator.lognormal(0, 1.5, experts)
        after = balanced(loads, before, devices)
        sets = {frozenset(members) for members in before.experts_of_group.tolist()}
        assert {frozenset(members) for members in after.experts_of_group.tolist()} == sets
        old, new = (loads_of_devices(p, loads, devices).max() for p in (before, after))
        gains.append(new / old)
        assert balanced(loads, before, devices).digest == after.digest
    assert np.mean(gains) < 0.95 and max(gains) < 1.05


def test_balanced_with_equal_loads_changes_no_load():
    p = balanced(np.ones(E), contiguous(E, G), 2)
    assert loads_of_devices(p, np.ones(E), 2).tolist() == [6, 6]
    assert (balanced(np.zeros(E), contiguous(E, G), 4).experts_of_group >= 0).all()


def test_balanced_refuses_loads_that_are_none():
    for loads in (np.ones(E - 1), np.full(E, np.nan), np.full(E, -1.0), np.full(E, np.inf), np.ones((1, E))):
        refused(lambda loads=loads: balanced(loads, contiguous(E, G), 2), "expert loads", "12 finite numbers")
    refused(lambda: balanced(np.ones(E), contiguous(E, G), 5), "expert_parallel=5")


# --- what fits ---------------------------------------------------------------------------------------------------


def test_expert_parallelism_fits_experts_and_groups():
    for parallel in (1, 2, 4, 8, 16, 32, 64, 128, 256):  # V3: 8 groups, runs with 64 or 256
        check_expert_parallel(256, 8, parallel)
        assert contiguous(256, 8).device_of_expert(parallel).max() == parallel - 1
    refused(lambda: check_expert_parallel(256, 8, 3), "expert_parallel=3", "divide n_routed_experts=256")
    refused(lambda: check_expert_parallel(256, 8, 512), "expert_parallel=512")
    refused(lambda: check_expert_parallel(256, 8, 0), "expert_parallel=0")
    refused(lambda: check_expert_parallel(12, 4, 6), "expert_parallel=6", "n_group=4", "one must divide the other")
    refused(lambda: contiguous(12, 4).device_of_expert(3), "expert_parallel=3", "n_group=4")


def test_tables_that_are_none():
    good = np.arange(12, dtype=np.int32)
    for slots, groups, fragment in [
        (good, 5, "not divisible into n_group=5"),
        (good, 0, "n_group=0"),
        (good[:0], 1, "0 experts"),
        (good + 1, 4, "not a permutation"),
        (np.where(good == 3, 4, good).astype(np.int32), 4, "not a permutation"),
        (good.astype(np.int64), 4, "int64"),
        (good.astype(np.float32), 4, "float32"),  # what a cast to a float dtype would make of it
        (good.reshape(3, 4), 4, "one-dimensional"),
    ]:
        refused(lambda slots=slots, groups=groups: from_slots(slots, groups, "here"), "here", fragment)
    for builder in (contiguous, modulo, lambda e, g: seeded_hash(e, g, 0)):
        refused(lambda builder=builder: builder(10, 4), "10 experts", "n_group=4")


# --- files and digests -------------------------------------------------------------------------------------------


def test_digests_identify_tables():
    assert contiguous(E, G).digest == CONTIGUOUS_DIGEST
    digests = [p.digest for p in PLACEMENTS.values()]
    assert len(set(digests)) == len(digests)
    assert contiguous(E, 2).digest != contiguous(E, G).digest  # the groups are part of it
    assert from_slots(contiguous(E, G).slot_of_expert, G).digest == CONTIGUOUS_DIGEST


@pytest.mark.parametrize("name", PLACEMENTS)
def test_write_and_read(name, tmp_path):
    written = PLACEMENTS[name]
    expert_table.write(written, tmp_path / "table.npz")
    read = expert_table.read(tmp_path / "table.npz")
    assert read.digest == written.digest and read.n_group == G
    assert (read.expert_of_slot == written.expert_of_slot).all()
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]


def test_damaged_files_never_give_another_table(tmp_path):
    path = tmp_path / "table.npz"
    expert_table.write(PLACEMENTS["hash"], path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    errors = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert expert_table.read(path).digest == PLACEMENTS["hash"].digest  # only in what zip does not use
        except UserError as error:
            assert str(path) in str(error)
            errors += 1
    assert errors > len(damaged) / 2


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "table.npz"
    refused(lambda: expert_table.read(path), str(path))
    path.write_text("expert table")
    refused(lambda: expert_table.read(path), str(path), "not an expert table")
    np.savez(path, slot_of_expert=np.arange(12, dtype=np.int32))
    refused(lambda: expert_table.read(path), "n_group")
    np.savez(path, slot_of_expert=np.zeros(12, np.int32), n_group=4)
    refused(lambda: expert_table.read(path), str(path), "not a permutation")
    np.savez(path, slot_of_expert=np.array([object()]), n_group=4)
    refused(lambda: expert_table.read(path), str(path), "not an expert table")  # nothing is unpickled
    with path.open("wb") as file:
        np.save(file, np.arange(12, dtype=np.int32))
    refused(lambda: expert_table.read(path), str(path), "not an expert table")


def test_the_configuration_names_a_table(tmp_path):
    assert placement_of(model()).digest == contiguous(12, 4).digest
    assert placement_of(model(expert_placement="modulo")).digest == modulo(12, 4).digest
    assert placement_of(model(expert_placement="hash:3")).digest == seeded_hash(12, 4, 3).digest
    path = tmp_path / "table.npz"
    expert_table.write(seeded_hash(12, 4, 9), path)
    assert placement_of(model(expert_placement=str(path))).digest == seeded_hash(12, 4, 9).digest
    expert_table.write(seeded_hash(12, 2, 9), path)
    refused(lambda: placement_of(model(expert_placement=str(path))), str(path), "12 experts in 2 groups", "12 in 4")
    for wrong in ("contigous", "hash:", "hash:x", "hash:-1", str(tmp_path / "none.npz"), str(tmp_path)):
        config = model(expert_placement=wrong)
        refused(lambda config=config: placement_of(config), f"expert_placement={wrong!r}", "hash:SEED")
