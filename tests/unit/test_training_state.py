"""Step folders: bits survive, damage is named, a kill at any moment leaves the newest complete one."""

import json
import os
import resource
import subprocess
import sys
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


def test_shards_that_hold_a_part_twice(tmp_path):
    """As many elements as the whole has, but a quarter of them twice and a quarter never."""
    with StepWriter(tmp_path, 5, META) as writer:
        facts = {
            name: write_shard(writer.folder / name, [("w", ArraySlice(np.ones((2, 3)), (start, 0), (4, 3)))])
            for name, start in (("a.h5", 0), ("b.h5", 1))
        }
        folder = writer.publish(facts)
    with pytest.raises(UserError, match="12 of the 12 elements of w, some of them twice"):
        read_step(folder)


def test_more_shards_than_a_process_may_open(tmp_path):
    writer = StepWriter(tmp_path, 5, META)
    names = [f"{i}.h5" for i in range(90)]
    facts = {
        name: write_shard(writer.folder / name, [("w", ArraySlice(np.full((2,), i), (2 * i,), (180,)))])
        for i, name in enumerate(names)
    }
    writer.publish(facts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 40
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
        _, reader = read_step(tmp_path / "step_00000005")
        with reader:
            for _ in range(2):
                np.testing.assert_array_equal(reader["w"], np.arange(180) // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    halves = {"params/half": (2, 3)}
    reader.check(halves, [ml_dtypes.bfloat16], prefix="params/half")
    with pytest.raises(UserError, match="params/half is bfloat16; expected float32 or float16"):
        reader.check(halves, [np.float32, np.float16], prefix="params/half")
    with pytest.raises(UserError, match="1 missing: params/third; think again"):
        reader.check(halves | {"params/third": (1,)}, prefix="params/half", advice="think again")


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


WRITE = """
import sys, pathlib, numpy as np
from shared_ops.errors import run_cli
from shared_ops.training_state import write_step
arrays = [(f"params/model.layers.{i}.{'weight' * 9}", np.ones(50)) for i in range(3000)]  # much to say about them, too
sys.exit(run_cli(lambda a: write_step(pathlib.Path(a[0]), 2, arrays, {}) and None))
"""


def refused_write(folder, **options):
    """The one message of a process that cannot save 32 MB there; what was there before is still good."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WRITE, str(folder)]
    process = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60, **options)
    assert process.returncode == 2 and process.stdout == "", process.stderr
    (message,) = process.stderr.splitlines()
    assert message.startswith(f"error: cannot write {folder}"), message
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    read_step(folder / "step_00000001")[1].close()
    return message


def test_a_file_size_limit(tmp_path):
    save(tmp_path, 1)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    assert "File too large" in refused_write(tmp_path, preexec_fn=limit)


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(disk):
    folder = disk / "checkpoints"
    save(folder, 1)
    assert "No space left on device; free some space" in refused_write(folder)
    save(folder, 3)  # and there is room again


def test_a_read_only_disk(disk):
    folder = disk / "checkpoints"
    save(folder, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "Read-only file system; check the folder's permissions" in refused_write(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    assert "Permission denied; check the folder's permissions" in refused_write(tmp_path)
    tmp_path.chmod(0o755)


def test_a_living_writer_s_folder_is_left_alone(tmp_path):
    with StepWriter(tmp_path, 7, META) as writer:
        facts = write_shard(writer.folder / "state.h5", sample().items())
        save(tmp_path, 8)
        assert writer.publish({"state.h5": facts}).is_dir()
    assert read_step(tmp_path / "step_00000007")[0]["step"] == 7
