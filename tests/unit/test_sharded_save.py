"""A step written by several ranks: shares, equality with one writer's, ranks that fail, kills at many moments."""

import json
import os
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
import savers

from shared_ops.config import load_model_config
from shared_ops.errors import UserError
from shared_ops.params import manifest
from shared_ops.shares import SLACK, share_out
from shared_ops.training_state import ArraySlice, read_step, write_step

REPOSITORY = Path(__file__).parents[2]


# --- shares --------------------------------------------------------------------------------------------------------


def shapes_of(model):
    return {f"{kind}/{p.name}": p.shape for p in manifest(load_model_config(model)) for kind in ("params", "adam_m")}


def elements(share):
    return sum((part.stop - part.start) * prod(part.shape[1:]) for part in share)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64, 1024])
@pytest.mark.parametrize("model", ["tiny_v3", "v3"])
def test_shares_are_all_rows_once_and_equal(model, ranks):
    shapes = shapes_of(model)
    shares = share_out(shapes, ranks)
    assert len(shares) == ranks
    rows = {name: 0 for name in shapes}
    for part in (part for share in shares for part in share):  # in order: each part begins where the former one ended
        assert part.start == rows[part.name] < part.stop and part.shape == shapes[part.name]
        rows[part.name] = part.stop
    assert rows == {name: shape[0] for name, shape in shapes.items()}
    assert sum(map(len, shares)) - len(shapes) <= ranks - 1, "cuts"
    even = sum(map(prod, shapes.values())) / ranks
    row = max(prod(shape[1:]) for shape in shapes.values())  # a row is not cut
    assert max(map(elements, shares)) <= even * (1 + 2 * SLACK) + row
    assert min(map(elements, shares)) >= even * (1 - 2 * SLACK) - row


def test_arrays_stay_whole_where_that_costs_little():
    even = share_out({"a": (50, 2), "b": (50, 2), "c": (7,), "d": (100, 2), "e": (7,)}, 2)
    assert [[(part.name, part.start, part.stop) for part in share] for share in even] == [
        [("a", 0, 50), ("b", 0, 50), ("c", 0, 7)], [("d", 0, 100), ("e", 0, 7)]
    ]  # fmt: skip
    uneven = share_out({"a": (7,), "b": (99, 3), "c": (9,)}, 2)
    assert [(part.name, part.start, part.stop) for part in uneven[1]] == [("b", 50, 99), ("c", 0, 9)]


def test_a_part_knows_its_place():
    (whole,), (cut, *_) = share_out({"a": (6, 2)}, 1)[0], share_out({"a": (6, 2)}, 2)[1]
    array = np.arange(12.0).reshape(6, 2)
    assert whole.place(array) is array
    placed = cut.place(array[cut.rows])
    assert isinstance(placed, ArraySlice) and placed.offset == (3, 0) and placed.global_shape == (6, 2)
    np.testing.assert_array_equal(placed.array, array[3:])


# --- saving together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_number_of_writers_writes_the_same_state(tmp_path, ranks):
    folders = savers.together(ranks, lambda rank, total: savers.save(tmp_path, 7, rank, ranks, total))
    assert folders == [tmp_path / "step_00000007"] * ranks
    assert savers.check(tmp_path) == 7
    shards = ["state.h5"] if ranks == 1 else [f"state-{rank:05}-of-{ranks:05}.h5" for rank in range(ranks)]
    assert sorted(path.name for path in folders[0].iterdir()) == ["manifest.json", *shards]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000007"]
    sizes = [(folders[0] / name).stat().st_size for name in shards]
    assert max(sizes) < 1.1 * min(sizes), "every rank writes its share"
    _, reader = read_step(folders[0])
    with reader:  # a slice over the border of two shards
        index = np.s_[900:2100, 3]
        np.testing.assert_array_equal(reader.slice("params/a", index), savers.values("params/a", 7)[index])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_leaves_nothing_half_published(tmp_path, failing):
    savers.together(3, lambda rank, total: savers.save(tmp_path, 1, rank, 3, total))

    def arrays(rank):
        yield f"params/{rank}", np.ones((100, 100), np.float32)
        if rank == failing:
            raise ValueError("device lost")

    results = savers.together(3, lambda rank, total: write_step(tmp_path, 2, arrays(rank), {}, rank, 3, total))
    assert [type(result) for result in results] == [
        ValueError if rank == failing else RuntimeError for rank in range(3)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] and savers.check(tmp_path) == 1
    savers.together(3, lambda rank, total: savers.save(tmp_path, 2, rank, 3, total))
    assert savers.check(tmp_path) == 2


def test_a_folder_that_only_rank_0_sees(tmp_path):
    elsewhere = {0: tmp_path / "a", 1: tmp_path / "b"}
    results = savers.together(2, lambda rank, total: savers.save(elsewhere[rank], 1, rank, 2, total))
    assert isinstance(results[1], UserError) and "a file system that all machines share" in str(results[1])
    assert list(elsewhere[0].iterdir()) == [] and not elsewhere[1].exists()


# --- ranks as processes --------------------------------------------------------------------------------------------


def run_savers(folder, *arguments):
    """What `savers.py` prints, and its standard error."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, savers.__file__, str(folder), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), process.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_kill_at_any_moment_leaves_the_newest_complete_step(tmp_path, ranks):
    """SIGKILL at 30 moments spread over a save, to all ranks at once or to one of them; `savers.check` reads all."""
    result, _ = run_savers(tmp_path / "checkpoints", ranks, "random", 30)
    left = Counter(result["left"])
    assert sum(left.values()) == 30 and result["hidden"] == []
    assert left["shards"] + left["folder"] >= 5, f"too few kills hit a save to tell anything: {left}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_at_each_call_leaves_the_newest_complete_step(tmp_path, ranks):
    """SIGKILL before each file that is opened, made, renamed or removed while a step replaces itself."""
    result, _ = run_savers(tmp_path / "checkpoints", ranks, "calls")
    assert result["hidden"] == []
    assert set(result["left"]) >= {
        "folder", "shards", "manifest", "manifest, no step folder", "published, former one left", "published"
    }  # fmt: skip


def test_one_rank_s_full_disk_ends_the_job_with_its_message(tmp_path):
    result, errors = run_savers(tmp_path / "checkpoints", 3, "limit")
    assert result == {"codes": [2, 2, 2], "files": []}
    assert "error: rank 2: cannot write" in errors and "File too large" in errors and "Traceback" not in errors
