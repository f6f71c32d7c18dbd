"""Step folders: bits survive, damage is named, a kill at any moment leaves the newest complete one."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shared_ops.errors import UserError
from shared_ops.training_state import (
    ArraySlice,
    StepWriter,
    check_names,
    latest_step,
    read_step,
    rotate,
    write_shard,
    write_step,
)

REPOSITORY = Path(__file__).parents[2]
META = {"config": {"model": {"hidden_size": 8}}, "consumed_samples": 12, "tables": {"placement": "ab12"}}


def sample():
    rng = np.random.default_rng(0)
    bits = np.array([0x0000, 0x8000, 0x3F80, 0x7F80, 0x7FC0, 0x0001], dtype=np.uint16)
    return {
        "params/model.embed_tokens.weight": rng.normal(size=(7, 5)).astype(np.float32),
        "params/model.layers.10.mlp.experts.down_proj": rng.normal(size=(3, 4, 2)).astype(np.float32),
        "params/half": bits.view(ml_dtypes.bfloat16).reshape(2, 3),
        "adam_m/model.embed_tokens.weight": np.array([np.nan, np.inf, -0.0, 1e-45], dtype=np.float32),
        "tables/placement": np.array([65535, 65536, -(2**31), 2**31 - 1], dtype=np.int32),
        "data/position": np.array([2**63 - 1, -(2**63)], dtype=np.int64),
        "scalar": np.array(3.5, dtype=np.float64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }


def save(folder, step=100, arrays=None):
    return write_step(folder, step, (arrays or sample()).items(), META)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_round_trip_keeps_every_bit(tmp_path):
    folder = save(tmp_path)
    assert folder == tmp_path / "step_00000100" and [p.name for p in tmp_path.iterdir()] == ["step_00000100"]
    meta, reader = read_step(folder)
    assert meta == {**META, "step": 100}
    with reader:
        assert reader.names() == sorted(sample())
        for name, expected in sample().items():
            got = reader[name]
            assert got.dtype == expected.dtype and got.shape == expected.shape == reader.shape(name)
            assert got.tobytes() == expected.tobytes(), name
        assert reader["params/half"].view(np.uint16).ravel().tolist() == [
            0,
            0x8000,
            0x3F80,
            0x7F80,
            0x7FC0,
            1,
        ]


def test_arrays_in_other_memory_layouts_are_stored_by_value(tmp_path):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    folder = save(tmp_path, arrays={"t": base.T, "s": base[:, ::2], "b": base.astype(">f4")})
    _, reader = read_step(folder)
    for name, expected in (("t", base.T), ("s", base[:, ::2]), ("b", base)):
        np.testing.assert_array_equal(reader[name], expected)


def test_the_same_state_gives_the_same_file(tmp_path):
    first, second = save(tmp_path / "a"), save(tmp_path / "b")
    assert (first / "state.h5").read_bytes() == (second / "state.h5").read_bytes()


@pytest.mark.parametrize(
    "index", [np.s_[2:5], np.s_[1], np.s_[-1], np.s_[..., 1:2], np.s_[2:4, 3], np.s_[5:2], np.s_[:]]
)
def test_slices(tmp_path, index):
    whole = sample()["params/model.embed_tokens.weight"]
    _, reader = read_step(save(tmp_path))
    np.testing.assert_array_equal(reader.slice("params/model.embed_tokens.weight", index), whole[index])
    with pytest.raises(IndexError):
        reader.slice("params/model.embed_tokens.weight", 7)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's counters")
def test_a_slice_does_not_read_the_rest(tmp_path):
    folder = save(tmp_path, arrays={"big": np.ones((4096, 1024), dtype=np.float32)})
    _, reader = read_step(folder, verify=False)
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])
    before = read()
    assert reader.slice("big", np.s_[4000:4001]).sum() == 1024
    assert read() - before < 100_000  # of 16 MiB


def test_shards_are_put_together(tmp_path):
    whole = np.arange(48, dtype=np.float32).reshape(6, 8).astype(ml_dtypes.bfloat16)
    writer = StepWriter(tmp_path, 5, META)
    parts = {"rank0.h5": (slice(0, 6), slice(0, 3)), "rank1.h5": (slice(0, 6), slice(3, 8))}
    facts = {
        name: write_shard(
            writer.folder / name,
            [
                ("w", ArraySlice(whole[cut], (cut[0].start, cut[1].start), whole.shape)),
                (f"only_{name}", np.ones(2)),
            ],
        )
        for name, cut in parts.items()
    }
    assert latest_step(tmp_path) is None
    _, reader = read_step(writer.publish(facts))
    assert reader["w"].tobytes() == whole.tobytes() and reader.shape("w") == (6, 8)
    np.testing.assert_array_equal(reader.slice("w", np.s_[2, 2:5]), whole[2, 2:5])
    assert reader.names() == ["only_rank0.h5", "only_rank1.h5", "w"]

    with StepWriter(tmp_path, 6, META) as writer:  # one shard is forgotten
        name, cut = "rank0.h5", parts["rank0.h5"]
        facts = write_shard(writer.folder / name, [("w", ArraySlice(whole[cut], (0, 0), whole.shape))])
        folder = writer.publish({name: facts})
    with pytest.raises(UserError, match="18 of the 48 elements of w"):
        read_step(folder)


def test_truncated_file(tmp_path):
    folder = save(tmp_path)
    state = folder / "state.h5"
    os.truncate(state, state.stat().st_size - 1)
    with pytest.raises(UserError, match=r"state\.h5.*bytes.*choose another step folder"):
        read_step(folder, verify=False)
    assert latest_step(tmp_path) is None


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_flipped_bit_anywhere_in_the_state(tmp_path, where):
    folder = save(tmp_path)
    flip(folder / "state.h5", int((folder / "state.h5").stat().st_size * where))
    with pytest.raises(UserError, match=r"state\.h5: damaged"):
        read_step(folder)


def test_flipped_bit_anywhere_in_the_manifest(tmp_path):
    folder = save(tmp_path)
    original = (folder / "manifest.json").read_bytes()
    silent = []
    for at in range(0, len(original), 3):
        flip(folder / "manifest.json", at)
        try:
            meta, reader = read_step(folder, verify=False)
            reader.close()
            if meta != {**META, "step": 100}:
                silent.append(at)
        except UserError as error:
            assert "manifest.json" in str(error) or "state" in str(error)
        (folder / "manifest.json").write_bytes(original)
    assert silent == []


def test_missing_parts(tmp_path):
    folder = save(tmp_path)
    (folder / "state.h5").rename(tmp_path / "kept")
    with pytest.raises(UserError, match=r"state\.h5: missing"):
        read_step(folder)
    (tmp_path / "kept").rename(folder / "state.h5")
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json: missing"):
        read_step(folder)
    with pytest.raises(UserError, match="no such folder"):
        read_step(tmp_path / "step_00000999")


def test_other_format_version(tmp_path):
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(UserError, match="version 99"):
        read_step(folder)


def test_latest_passes_over_damage_and_says_so(tmp_path):
    assert latest_step(tmp_path / "nothing") is None
    good, newer, newest = save(tmp_path, 9), save(tmp_path, 10), save(tmp_path, 100)
    (newest / "manifest.json").unlink()
    os.truncate(newer / "state.h5", 10)
    (tmp_path / "step_00000200.bak").mkdir()
    (tmp_path / "step_notes.txt").write_text("x")
    told = []
    assert latest_step(tmp_path, told.append) == good
    assert len(told) == 2 and "step_00000100" in told[0] and "step_00000010" in told[1]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    folder = save(tmp_path, 5, {"x": np.ones(3)})
    _, reader = read_step(folder)
    assert reader.names() == ["x"] and [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_a_replacement_cut_short_is_still_found_and_healed(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 5).rename(tmp_path / ".replaced-step_00000005")
    found = latest_step(tmp_path)
    assert read_step(found)[0]["step"] == 5
    save(tmp_path, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_0000000{n}" for n in (4, 5, 6)]


def test_rotate(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "step_00000030" / "manifest.json").unlink()  # damaged: does not count
    assert rotate(tmp_path, None) == []
    assert rotate(tmp_path, 2) == [tmp_path / "step_00000010"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_000000{n}" for n in (20, 30, 40)]
    assert rotate(tmp_path, 1) == [tmp_path / "step_00000030", tmp_path / "step_00000020"]
    assert rotate(tmp_path, 1) == [] and read_step(latest_step(tmp_path))[0]["step"] == 40
    with pytest.raises(ValueError):
        rotate(tmp_path, 0)


def test_names_and_shapes_are_checked(tmp_path):
    _, reader = read_step(save(tmp_path))
    shapes = {name: array.shape for name, array in sample().items()}
    reader.check(shapes)
    with pytest.raises(UserError, match=r"1 missing: params/new; 1 not expected: scalar"):
        reader.check({**{n: s for n, s in shapes.items() if n != "scalar"}, "params/new": (1,)})
    with pytest.raises(UserError, match=r"embed_tokens\.weight is \[7, 5\], expected \[5, 7\]"):
        reader.check({**shapes, "params/model.embed_tokens.weight": (5, 7)})
    with pytest.raises(UserError, match="and 90 more"):
        check_names([], [f"name{n}" for n in range(100)], "here")
    with pytest.raises(UserError, match="no array nope"):
        reader["nope"]


@pytest.mark.parametrize(
    "arrays, meta",
    [
        ([("a", np.ones(1)), ("a", np.ones(1))], {}),  # twice the same name
        ([("a/../b", np.ones(1))], {}),
        ([("a", np.array(["text"]))], {}),
        ([("a", np.ones(1))], {"lr": float("nan")}),
        ([("a", np.ones(1))], {"array": np.ones(1)}),
        ([("a", ArraySlice(np.ones(3), (2,), (4,)))], {}),
    ],
)
def test_refused_content_leaves_nothing_behind(tmp_path, arrays, meta):
    good = save(tmp_path, 1)
    with pytest.raises((ValueError, TypeError)):
        write_step(tmp_path, 2, arrays, meta)
    assert list(tmp_path.iterdir()) == [good]


def test_an_error_of_the_producer_goes_through_and_leaves_nothing(tmp_path):
    def arrays():
        yield "a", np.ones(4)
        raise RuntimeError("device lost")

    good = save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="device lost"):
        write_step(tmp_path, 2, arrays(), META)
    assert list(tmp_path.iterdir()) == [good]


def run_python(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_full_disk_is_a_readable_error_and_keeps_what_was_there(tmp_path):
    good = save(tmp_path, 1)
    code = """
import sys, pathlib, numpy as np
from shared_ops.errors import run_cli
from shared_ops.training_state import write_step
sys.exit(run_cli(lambda a: write_step(pathlib.Path(a[0]), 2, [("a", np.ones(10**6))], {}) and None))
"""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    process = run_python(code, tmp_path, preexec_fn=limit)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and "cannot write" in stderr and "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == [good] and read_step(good)


SAVER = """
import sys, pathlib, numpy as np
from shared_ops.training_state import rotate, write_step
folder, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    write_step(folder, step, ((f"a{i}", np.full(200_000, step, np.float32)) for i in range(5)), {"sum": step})
    rotate(folder, 2)
    print(step, flush=True)
"""


def test_kill_during_a_save_leaves_the_newest_complete_one(tmp_path):
    """SIGKILL at random moments of a loop that does little else than saving and rotating."""
    rng, step, leftovers = random.Random(1), 0, 0
    for _ in range(4):
        process = run_python(SAVER, tmp_path, step)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.12))
        process.send_signal(signal.SIGKILL)
        done = [int(line) for line in process.communicate()[0].split()]
        newest = latest_step(tmp_path)
        meta, reader = read_step(newest)
        with reader:
            assert meta["step"] >= max(done, default=step + 1) and meta["sum"] == meta["step"]
            assert all((reader[f"a{i}"] == meta["step"]).all() for i in range(5))
        step = meta["step"]
        leftovers += sum(p.name.startswith(".") for p in tmp_path.iterdir())
    assert leftovers > 0, "no kill hit a save: the test tests nothing"
    save(tmp_path, step + 1)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_living_writer_s_folder_is_left_alone(tmp_path):
    with StepWriter(tmp_path, 7, META) as writer:
        facts = write_shard(writer.folder / "state.h5", sample().items())
        save(tmp_path, 8)
        assert writer.publish({"state.h5": facts}).is_dir()
    assert read_step(tmp_path / "step_00000007")[0]["step"] == 7
