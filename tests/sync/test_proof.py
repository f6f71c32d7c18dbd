"""What a conversion claims is so: faults planted into disk, source and journal are found before anything is published.

Every expectation is a conversion without the fault, or the hub's names and bits written out in support/checkpoints.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from checkpoints import BF16, Stop, canonical_values, cut_short, hub_folder, hub_values, read_hub, small

from shared_ops.errors import UserError, run_cli
from weight_sync import __main__ as weight_sync
from weight_sync import conversion
from weight_sync.canonical import CanonicalTensor, open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options
from weight_sync.stores import atomic

FORMATS = ("hf", "torch", "mindspore", "hdf5", "onnx")
FIRST, NORM, BIAS = "model.embed_tokens.weight", "model.norm.weight", "model.layers.2.mlp.gate.e_score_correction_bias"
QUANTISED = "model.layers.0.self_attn.o_proj.weight"
MTP = "model.layers.3."


def model(**changes):
    """Three layers, two with experts, and a prediction layer."""
    return small("tiny_v3", **{"num_hidden_layers": 3, "first_k_dense_replace": 1, **changes})


def source_folder(folder: Path, dtype=BF16, config=None, change: dict | None = None, **more) -> Path:
    config = config or model()
    hub = hub_values(config, canonical_values(config, dtype=dtype))
    return hub_folder(folder, config, hub | (change or {}), **more)


def run(source: Path, destination: Path, to: str, **options) -> dict:
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **{"workers": 1, **options}))


def command(*arguments) -> int:
    return run_cli(weight_sync.main, ["convert", *map(str, arguments), "--quiet"])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return source_folder(tmp_path_factory.mktemp("proof") / "in")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The same in fp32 and without copies."""
    config = model()
    hub = hub_values(config, canonical_values(config, dtype=np.float32), copies=False)
    return hub_folder(tmp_path_factory.mktemp("proof") / "in", config, hub)


@pytest.fixture(scope="module")
def right(source, tmp_path_factory):
    """The source in HDF5, without any fault on the way."""
    folder = tmp_path_factory.mktemp("right") / "h5"
    run(source, folder, "hdf5")
    return folder


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A step folder with moments."""
    from shared_ops.config import load_run_config
    from shared_ops.params import manifest
    from shared_ops.resume import state_meta
    from shared_ops.training_state import ArraySlice, StepWriter, write_shard

    config = load_run_config(None, ["model=tiny_v3", "model.vocab_size=300", "train.sequence_length=64"])
    arrays = {"params/" + name: v for name, v in canonical_values(config.model, dtype=np.float32).items()}
    for kind in ("adam_m/", "adam_v/"):
        moments = canonical_values(config.model, seed=len(arrays), dtype=np.float32)
        arrays |= {kind + p.name: moments[p.name] for p in manifest(config.model) if p.trainable}
    whole = [(name, ArraySlice(value, (0,) * value.ndim, value.shape)) for name, value in arrays.items()]
    with StepWriter(tmp_path_factory.mktemp("state") / "checkpoints", 7, state_meta(config, "key", 70)) as writer:
        return writer.publish({"s.h5": write_shard(writer.folder / "s.h5", whole)})


@pytest.fixture(scope="module")
def with_moments(state, tmp_path_factory):
    """The step folder as HDF5 folders of weights and moments."""
    folder = tmp_path_factory.mktemp("moments") / "h5"
    run(state, folder, "hdf5", optimizer=True)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the report, which has times in it."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.endswith("conversion.json")}


def span(file: Path, name: str) -> tuple[int, int]:
    """Where a safetensors file holds a tensor: (first byte, number of bytes)."""
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:head])[name]["data_offsets"]
    return head + start, stop - start


def interrupt(monkeypatch, source: Path, destination: Path, after: int = 20, **options) -> Path:
    """Begin a conversion and stop it after some tensors; returns the partial folder."""
    with monkeypatch.context() as patch:
        cut_short(patch, after)
        with pytest.raises(Stop):
            run(source, destination, **options)
    return destination.with_name(f".{destination.name}.partial")


def went_on(report: dict) -> bool:
    return any("interrupted run" in note for note in report["notes"])


def flip_on_its_way(monkeypatch, offset: int) -> None:
    """A disk that writes one wrong bit at this place of every file."""
    pwrite = os.pwrite

    def wrong(descriptor, data, at):
        data = bytearray(data)
        if at <= offset < at + len(data):
            data[offset - at] ^= 1
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", wrong)


# --- --verify ---


def place(folder: Path, value: np.ndarray) -> int:
    """Where the largest file holds a tensor's bytes."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    offset = file.read_bytes().find(value.tobytes())
    assert offset > 0
    return offset


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_wrong_bit_on_the_disk_is_found(source, tmp_path, monkeypatch, to, dtype):
    run(source, tmp_path / "right", to, dtype=dtype, max_file=1 << 30)
    value = canonical_values(model())["model.layers.1.mlp.experts.down_proj"][4]
    offset = place(tmp_path / "right", value.astype(np.float32) if dtype else value)
    flip_on_its_way(monkeypatch, offset + 17)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.down_proj is not what was written"):
        run(source, tmp_path / "out", to, dtype=dtype, verify=True, max_file=1 << 30)
    assert not (tmp_path / "out").exists()


FAULTS = [
    ("a plain tensor", {}, NORM),
    ("a copy", {}, MTP + "embed_tokens.weight"),
    ("another copy", {}, MTP + "shared_head.head.weight"),
    ("a rounded tensor", {"dtype": "fp16"}, NORM),
    ("a rounded copy", {"dtype": "fp16"}, MTP + "embed_tokens.weight"),
    ("FP8 blocks", {"dtype": "fp8"}, QUANTISED),
    ("an FP8 scale", {"dtype": "fp8"}, QUANTISED + "_scale_inv"),
    ("an FP8 exponent", {"dtype": "fp8", "scale_format": "ue8m0"}, QUANTISED + "_scale_inv"),
]


@pytest.mark.parametrize("options, name", [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
@pytest.mark.parametrize("again", [True, False], ids=["verified again", "not verified again"])
def test_what_failed_the_verification_is_not_taken_over(source, tmp_path, monkeypatch, options, name, again):
    run(source, tmp_path / "right", "hf", **options)
    offset, size = span(tmp_path / "right" / "model.safetensors", name)
    with monkeypatch.context() as patch:
        flip_on_its_way(patch, offset + size // 2)
        with pytest.raises(UserError, match=r"is not what was written|differs"):
            run(source, tmp_path / "out", "hf", verify=True, **options)
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out", "hf", verify=again, **options)
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_bit_that_was_read_wrong_is_found(source, tmp_path, monkeypatch):
    """What was written is what was read, but not what the source holds."""
    read, first = CanonicalTensor.read, [True]

    def once(self, start, stop):
        for values in read(self, start, stop):
            if self.name == NORM and first:
                first.clear()
                values = values.copy()
                values.view(np.uint8)[3] ^= 1
            yield values

    monkeypatch.setattr(CanonicalTensor, "read", once)
    with pytest.raises(UserError, match=NORM):
        run(source, tmp_path / "out", "hdf5", verify=True)
    assert not first and not (tmp_path / "out").exists()


def test_a_disk_that_takes_half_of_what_it_is_given(source, tmp_path, monkeypatch):
    pwrite = os.pwrite
    run(source, tmp_path / "right", "hf")
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, bytes(data)[: -(-len(data) // 2)], at))
    run(source, tmp_path / "out", "hf")
    assert content(tmp_path / "out") == content(tmp_path / "right")


@pytest.mark.parametrize("when", ["first tensor", "last tensor"])
def test_a_source_that_changes_meanwhile_is_an_error(tmp_path, monkeypatch, when):
    source = source_folder(tmp_path / "in")
    record, count = atomic.Partial.record_tensor, len(canonical_values(model()))
    numbers = iter(range(1, count + 1))

    def changing(self, name, facts):
        record(self, name, facts)
        if next(numbers) == (1 if when == "first tensor" else count):
            offset, _ = span(source / "model.safetensors", FIRST)
            with open(source / "model.safetensors", "r+b") as file:
                file.seek(offset)
                file.write(b"\x11\x22")

    monkeypatch.setattr(atomic.Partial, "record_tensor", changing)
    with pytest.raises(UserError, match="chang"):
        run(source, tmp_path / "out", "hdf5")
    assert not (tmp_path / "out").exists()


# --- interrupted runs ---


def test_a_scale_that_is_gone_is_written_again(source, tmp_path, monkeypatch):
    run(source, tmp_path / "right", "hf", dtype="fp8")
    offset, size = span(tmp_path / "right" / "model.safetensors", QUANTISED + "_scale_inv")
    partial = interrupt(monkeypatch, source, tmp_path / "out", to="hf", dtype="fp8")
    with open(partial / "model.safetensors", "r+b") as file:
        file.seek(offset)
        assert any(file.read(size))
        file.seek(offset)
        file.write(bytes(size))
    report = run(source, tmp_path / "out", "hf", dtype="fp8")
    assert report["notes"] == ["went on from an interrupted run that had written 19 tensors"]
    assert content(tmp_path / "out") == content(tmp_path / "right")


OTHER = {
    "dtype": ({"to": "hdf5"}, {"to": "hdf5", "dtype": "fp16"}),
    "max_file": ({"to": "hf", "max_file": 60_000}, {"to": "hf"}),
    "to": ({"to": "mindspore"}, {"to": "hdf5"}),
    "mindspore_file": ({"to": "mindspore"}, {"to": "mindspore", "mindspore_file": "safetensors"}),
    "scale_format": ({"to": "hf", "dtype": "fp8"}, {"to": "hf", "dtype": "fp8", "scale_format": "ue8m0"}),
    "config": ({"to": "onnx", "config": "a.json"}, {"to": "onnx", "config": "b.json"}),
}


@pytest.mark.parametrize("first, second", OTHER.values(), ids=OTHER)
def test_a_run_with_another_option_begins_anew(tmp_path, monkeypatch, first, second):
    """config.json does not say the dtype, so that it cannot give the change away."""
    source = source_folder(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    (source / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.json").write_text(json.dumps(config))
    (tmp_path / "b.json").write_text(json.dumps(config | {"transformers_version": "5.0"}))
    monkeypatch.chdir(tmp_path)
    interrupt(monkeypatch, source, tmp_path / "out", **first)
    assert run(source, tmp_path / "out", **second)["notes"] == []
    run(source, tmp_path / "right", **second)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    assert not list(tmp_path.glob(".*"))


def test_a_run_with_moments_begins_anew(state, tmp_path, monkeypatch):
    interrupt(monkeypatch, state, tmp_path / "out", to="hdf5")
    assert not went_on(run(state, tmp_path / "out", "hdf5", optimizer=True))
    assert (tmp_path / "out" / "adam_v" / "model.h5").exists()


def test_nothing_but_the_result_is_published(source, tmp_path, monkeypatch):
    """Neither the journal nor what another attempt had left."""
    partial = interrupt(monkeypatch, source, tmp_path / "out", to="hf", max_file=60_000)
    (partial / "old").mkdir()
    (partial / "old" / "stray.bin").write_text("stray")
    run(source, tmp_path / "out", "hdf5")
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")} == {
        "out", "out/model.h5", "out/config.json", "out/conversion.json"
    }  # fmt: skip


def test_an_overflow_at_the_start_leaves_nothing(tmp_path):
    """V2 has no correction bias: every tensor overflows, so that none is written before the threads stop."""
    config = small("tiny_v2", num_hidden_layers=3, first_k_dense_replace=1)
    values = {name: value * 1e8 for name, value in canonical_values(config, dtype=np.float32).items()}
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    with pytest.raises(UserError, match=f"{FIRST} has the value .*float16"):
        run(source, tmp_path / "out", "hf", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_journal_without_its_first_line_is_not_used(source, tmp_path, monkeypatch):
    """The files have the same sizes, so only the first line tells the two conversions apart."""
    partial = interrupt(monkeypatch, source, tmp_path / "out", to="hdf5")
    lines = (partial / atomic.JOURNAL).read_bytes().split(b"\n")
    (partial / atomic.JOURNAL).write_bytes(b"\n".join([lines[0][:30], *lines[1:]]))
    assert not went_on(run(source, tmp_path / "out", "hdf5", dtype="fp16"))
    run(source, tmp_path / "right", "hdf5", dtype="fp16")
    assert content(tmp_path / "out") == content(tmp_path / "right")


MALFORMED = [b"[]", b"5", b"null", b'"file"', b"\xff\xfe", b"[" * 100_000, b'{"file": 1}', b'{"file": "model.h5"}',
             b'{"file": ["model.h5"], "size": 1}', b'{"file": "model.h5", "size": "x"}', b'{"tensor": "x"}',
             b'{"tensor": [], "facts": 3}', b'{"tensor": "params/model.norm.weight", "facts": null}',
             b'{"tensor": "params/model.embed_tokens.weight", "facts": []}',
             b'{"tensor": "params/model.embed_tokens.weight", "facts": {}}',
             b'{"tensor": "params/model.embed_tokens.weight", "facts": {"file_xxh3_64": 5}}']  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("where", ["first", "among the files", "last"])
def test_a_damaged_journal_is_no_crash(source, right, tmp_path, monkeypatch, line, where):
    partial = interrupt(monkeypatch, source, tmp_path / "out", after=3, to="hdf5")
    lines = (partial / atomic.JOURNAL).read_bytes().split(b"\n")
    lines.insert({"first": 0, "among the files": 1, "last": len(lines) - 1}[where], line)
    (partial / atomic.JOURNAL).write_bytes(b"\n".join(lines))
    report = run(source, tmp_path / "out", "hdf5")
    assert content(tmp_path / "out") == content(right)
    assert report["tensors"] == json.loads((right / "conversion.json").read_text())["tensors"]


def test_no_room_keeps_what_is_there(source, tmp_path, monkeypatch):
    """Less than none, since the file system may have given the file all its blocks already."""
    interrupt(monkeypatch, source, tmp_path / "out", to="hdf5")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=-(1 << 40)))
        with pytest.raises(UserError, match="no room"):
            run(source, tmp_path / "out", "hdf5")
    assert run(source, tmp_path / "out", "hdf5")["notes"] == [
        "went on from an interrupted run that had written 20 tensors"
    ]


def test_no_room_from_the_start_leaves_nothing(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(UserError, match="no room"):
        run(source, tmp_path / "out", "hdf5")
    assert not list(tmp_path.iterdir())


def renaming_fails(monkeypatch, partial: Path) -> None:
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def failing(old, new, *more, real=real, **others):
            if Path(old) == partial:
                raise OSError(5, "Input/output error")
            return real(old, new, *more, **others)

        monkeypatch.setattr(os, name, failing)


def test_a_replacement_that_fails_gives_the_old_folder_back(source, wide, tmp_path, monkeypatch):
    run(source, tmp_path / "out", "hdf5")
    old = content(tmp_path / "out")
    with monkeypatch.context() as patch:
        renaming_fails(patch, tmp_path / ".out.partial")
        with pytest.raises(UserError):
            run(wide, tmp_path / "out", "hdf5", overwrite=True)
    with pytest.raises(UserError, match="there already"):
        run(wide, tmp_path / "out", "hdf5")
    assert content(tmp_path / "out") == old and not (tmp_path / ".out.replaced").exists()
    run(wide, tmp_path / "out", "hdf5", overwrite=True)
    run(wide, tmp_path / "right", "hdf5")
    assert content(tmp_path / "out") == content(tmp_path / "right") and not list(tmp_path.glob(".*"))


def test_a_replaced_folder_that_was_not_removed(source, wide, tmp_path):
    """A run was killed after its second rename: the new folder is the right one."""
    run(source, tmp_path / "out", "hdf5")
    run(wide, tmp_path / ".out.replaced", "hdf5")
    new = content(tmp_path / "out")
    with pytest.raises(UserError, match="there already"):
        run(wide, tmp_path / "out", "hdf5")
    assert content(tmp_path / "out") == new
    run(wide, tmp_path / "out", "hdf5", overwrite=True)
    run(wide, tmp_path / "right", "hdf5")
    assert content(tmp_path / "out") == content(tmp_path / "right") and not list(tmp_path.glob(".*"))


def test_companions_are_those_of_the_last_run(tmp_path, monkeypatch):
    source = source_folder(tmp_path / "in")
    (source / "tokenizer.json").write_text("old")
    with monkeypatch.context() as patch:
        renaming_fails(patch, tmp_path / ".out.partial")
        with pytest.raises(UserError):
            run(source, tmp_path / "out", "hdf5")
    (source / "tokenizer.json").write_text("new")
    run(source, tmp_path / "out", "hdf5")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"


# --- the destination ---


def test_a_way_into_the_source_by_a_symlink_is_refused(source, tmp_path):
    inner = Path(shutil.copytree(source, tmp_path / "in"))
    (tmp_path / "link").symlink_to(inner)
    before = content(inner)
    for one, other in ((inner, tmp_path / "link" / "out"), (tmp_path / "link", inner / "out"),
                       (inner, tmp_path / "link")):  # fmt: skip
        with pytest.raises(UserError, match="apart"):
            run(one, other, "hdf5", overwrite=True)
    assert content(inner) == before


@pytest.mark.parametrize("what", ["an empty folder", "nothing"])
def test_a_symlink_as_destination_works_or_is_refused_at_once(source, tmp_path, monkeypatch, what):
    if what == "an empty folder":
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    began, lay_out = [], conversion._Conversion._lay_out
    monkeypatch.setattr(conversion._Conversion, "_lay_out", lambda *a: (began.append(1), lay_out(*a)))
    try:
        run(source, tmp_path / "out", "hf")
    except UserError as error:
        assert not began and "out" in str(error)
        assert not (tmp_path / ".out.partial").exists()
    else:
        assert read_hub(tmp_path / "out") == read_hub(source)


@pytest.mark.parametrize("held", [(), ("thesis.txt",), (atomic.JOURNAL, "thesis.txt")], ids=str)
def test_a_partial_folder_that_leads_elsewhere_is_refused(source, tmp_path, held):
    (tmp_path / "mine").mkdir()
    for name in held:
        (tmp_path / "mine" / name).write_text("{}\n")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.out\.partial"):
        run(source, tmp_path / "out", "hdf5")
    assert content(tmp_path / "mine") == dict.fromkeys(held, b"{}\n") and not (tmp_path / "out").exists()


def test_a_partial_folder_of_somebody_else_is_refused(source, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.txt").write_text("long")
    with pytest.raises(UserError, match=r"\.out\.partial"):
        run(source, tmp_path / "out", "hdf5")
    assert content(tmp_path / ".out.partial") == {"thesis.txt": b"long"} and not (tmp_path / "out").exists()


def test_overwriting_what_is_no_weights_folder_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("long")
    with pytest.raises(UserError, match="out"):
        run(source, tmp_path / "out", "hdf5", overwrite=True)
    assert content(tmp_path / "out") == {"thesis.txt": b"long"}
    run(source, tmp_path / "weights", "hf")
    run(source, tmp_path / "weights", "hdf5", overwrite=True)
    assert content(tmp_path / "weights").keys() == {"model.h5", "config.json"}


def test_more_files_than_may_be_open(source, tmp_path):
    """Either it needs no more of them, or it says so."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 12, limits[1]))
    try:
        run(source, tmp_path / "out", "hf", max_file=4000)
    except UserError as error:
        assert "open" in str(error)
        assert not (tmp_path / "out").exists()
    else:
        assert read_hub(tmp_path / "out") == read_hub(source)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_report_that_cannot_be_printed(source, tmp_path):
    """A process of its own, for what Python does at its end."""
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "hdf5", "--quiet"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "weight_sync", *arguments], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=60)  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode == 0 or (done.returncode == 2 and "error: " in done.stderr), done
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(source)


# --- dtypes ---


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_fp8_of_float64(tmp_path, scale_format):
    """Its checksums are of the values that the FP8 blocks stand for, and --verify agrees."""
    source = source_folder(tmp_path / "in", dtype=np.float64, change={
        name: value.astype(np.float32) for name, value in canonical_values(model()).items() if "bias" in name
    })  # fmt: skip
    report = run(source, tmp_path / "out", "hf", dtype="fp8", scale_format=scale_format, verify=True)
    with open_weights(tmp_path / "out") as weights:
        for name in (QUANTISED, "model.layers.1.mlp.experts.gate_up_proj", NORM):
            facts, value = report["tensors"][name], weights.tensors[name].array()
            written = np.float64 if name == NORM else np.float32
            assert facts["source"]["dtype"] == "float64"
            assert facts["destination"]["xxh3_64"] == xxhash.xxh3_64(value.astype(written).tobytes()).hexdigest()
    assert "cast" in report["tensors"][QUANTISED]
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_wider_expert_widens_them_all(tmp_path, dtype):
    config, name = model(), "model.layers.1.mlp.experts.down_proj"
    values = canonical_values(config)
    right = values[name].astype(dtype)
    right[3] = np.random.default_rng(1).standard_normal(right[3].shape)
    hub = hub_values(config, values) | {name.replace("down_proj", "3.down_proj.weight"): right[3]}
    run(hub_folder(tmp_path / "in", config, hub), tmp_path / "out", "hdf5", verify=True)
    with open_weights(tmp_path / "out") as weights:
        found = weights.tensors[name].array()
        assert found.dtype == right.dtype and found.tobytes() == right.tobytes()
        other = weights.tensors["model.layers.2.mlp.experts.down_proj"].array()
        assert other.dtype == BF16


def test_a_correction_bias_beyond_fp32_is_refused(tmp_path):
    bias = np.full(12, 1 / 3)
    with pytest.raises(UserError, match=BIAS):
        run(source_folder(tmp_path / "in", change={BIAS: bias}), tmp_path / "out", "hdf5")
    assert not (tmp_path / "out").exists()


def test_config_json_names_the_dtype_of_most_of_the_values(tmp_path):
    """Two large tensors in bf16, all the small ones in fp32."""
    config = model(vocab_size=5000)
    values = {name: value if value.shape[0] == 5000 else value.astype(np.float32)
              for name, value in canonical_values(config).items()}  # fmt: skip
    source = hub_folder(tmp_path / "in", config, hub_values(config, values))
    run(source, tmp_path / "out", "hf", config=str(source))  # the folder's model, not its text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# --- copies, prediction layers, what lies beside ---


def bare(path: Path, values: dict[str, np.ndarray]) -> Path:
    """A state dict and nothing else."""
    import torch

    torch.save({
        name: torch.from_numpy(value.view(np.uint16).copy()).view(torch.bfloat16) if value.dtype == BF16
        else torch.from_numpy(value) for name, value in values.items()
    }, path)  # fmt: skip
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_mtp", [False, True])
def test_a_bare_state_dict_gets_the_copies_of_the_hub(tmp_path, tied, with_mtp):
    config = model(tie_word_embeddings=tied)
    values = {n: v for n, v in canonical_values(config).items() if with_mtp or not n.startswith(MTP)}
    (tmp_path / "x.json").write_text(json.dumps(config.to_hf()))
    run(bare(tmp_path / "x.pt", values), tmp_path / "out", "hf", config=str(tmp_path / "x.json"), verify=True)
    right = hub_folder(tmp_path / "right", config, hub_values(config, values))
    assert read_hub(tmp_path / "out") == read_hub(right)


def test_a_tied_model_and_its_prediction_layer(tmp_path):
    """Both copies are of the embedding; there is no lm_head, unless it is there."""
    config = model(tie_word_embeddings=True)
    hub = hub_values(config, canonical_values(config))
    for name, more in (("without", {}), ("with", {"lm_head.weight": hub[FIRST]})):
        source = hub_folder(tmp_path / name, config, hub | more)
        for to in ("hdf5", "onnx"):
            run(source, tmp_path / name / ".." / f"{name}-{to}", to, verify=True)
            run(tmp_path / f"{name}-{to}", tmp_path / f"{name}-{to}-back", "hf", verify=True)
            assert read_hub(tmp_path / f"{name}-{to}-back") == read_hub(source)


def test_the_second_of_two_prediction_layers_alone_is_refused(tmp_path):
    config = model(num_nextn_predict_layers=2)
    hub = hub_values(config, canonical_values(config))
    hub = {name: value for name, value in hub.items() if not name.startswith(MTP)}
    with pytest.raises(UserError, match=r"missing: model\.layers\.3\.") as refused:
        run(hub_folder(tmp_path / "in", config, hub), tmp_path / "out", "hdf5")
    assert "there in part" in str(refused.value)


@pytest.mark.parametrize("copy", ["dtype", "shape"])
def test_a_copy_of_another_kind_is_refused(tmp_path, copy):
    value = canonical_values(model())[FIRST]
    other = value.astype(np.float32) if copy == "dtype" else value[:-1]
    source = source_folder(tmp_path / "in", change={MTP + "embed_tokens.weight": other})
    with pytest.raises(UserError, match=f"{MTP}embed_tokens.weight should be a copy of {FIRST}.*another shape"):
        run(source, tmp_path / "out", "hdf5")


@pytest.mark.parametrize("at", [0, -1], ids=["first value", "last value"])
def test_copies_are_compared_to_their_end(tmp_path, monkeypatch, at):
    value = canonical_values(model())[FIRST].copy()
    value[at, at] *= 2
    source = source_folder(tmp_path / "in", change={MTP + "embed_tokens.weight": value})
    monkeypatch.setattr(conversion, "CHUNK", 1000)
    with pytest.raises(UserError, match="embed_tokens.weight differs from"):
        run(source, tmp_path / "out", "hdf5")


def test_a_single_file_has_the_report_beside_it(wide, tmp_path):
    """It says that there were no copies, and what was written."""
    run(wide, tmp_path / "h5", "hdf5")
    run(tmp_path / "h5" / "model.h5", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(wide)
    offset = place(tmp_path / "h5", canonical_values(model(), dtype=np.float32)[NORM])
    with open(tmp_path / "h5" / "model.h5", "r+b") as file:
        file.seek(offset + 5)
        file.write(b"\x3c")
    with pytest.raises(UserError, match=f"{NORM} is not what was written there"):
        run(tmp_path / "h5" / "model.h5", tmp_path / "again", "hf")


def test_a_given_config_json_goes_along_to_the_byte(source, tmp_path):
    text = (source / "config.json").read_bytes().replace(b": ", b" :  ") + b"\n \n"
    (tmp_path / "x.json").write_bytes(text)
    file = Path(shutil.copy(source / "model.safetensors", tmp_path / "x.safetensors"))
    for to in FORMATS:
        run(file, tmp_path / to, to, config=str(tmp_path / "x.json"))
        assert (tmp_path / to / "config.json").read_bytes() == text


@pytest.mark.parametrize("to", FORMATS)
def test_companions_are_carried_and_nothing_written_is_replaced(tmp_path, to):
    source = source_folder(tmp_path / "in")
    companions = ("README.md", "LICENSE-MODEL", "tokenizer.model", "generation_config.json", "modeling_x.py")
    for name in (*companions, "journal.jsonl", "conversion.json", "notes.txt"):
        (source / name).write_text("{}")
    run(source, tmp_path / "out", to)
    assert all((tmp_path / "out" / name).read_text() == "{}" for name in companions)
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["mapped"] == len(canonical_values(model()))
    assert not {"journal.jsonl", "notes.txt"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_parameters_beyond_the_configuration_are_no_constants(tmp_path):
    """An ONNX graph's own constants are left out, another model's parameters are not."""
    config = model(num_nextn_predict_layers=0)
    run(source_folder(tmp_path / "in", config=config), tmp_path / "onnx", "onnx")
    smaller = model(num_nextn_predict_layers=0, num_hidden_layers=2)
    (tmp_path / "x.json").write_text(json.dumps(smaller.to_hf()))
    with pytest.raises(UserError, match=r"model\.layers\.2\."):
        run(tmp_path / "onnx", tmp_path / "out", "hf", config=str(tmp_path / "x.json"))


# --- files that are not what their names say ---

DEEP = "[" * 100_000
DESTINATIONS = [
    "5", "[]", "{}", '{"destination": 5}', '{"destination": null}', '{"destination": {"dtype": "bfloat16"}}',
    '{"destination": {"dtype": [], "xxh3_64": {}}}',
]  # fmt: skip
REPORTS = [
    "[]", "5", "null", "{", DEEP, "\0", "\udcff", '{"tensors": 5, "copies": []}', '{"tensors": {}, "copies": 5}',
    '{"tensors": {}, "copies": null}', '{"tensors": {}, "copies": [[1]]}', '{"tensors": {}, "copies": [{}]}',
    *(f'{{"tensors": {{"model.norm.weight": {facts}}}, "copies": []}}' for facts in DESTINATIONS),
]  # fmt: skip


@pytest.mark.parametrize("text", REPORTS, ids=range(len(REPORTS)))
def test_a_malformed_report_is_no_crash(right, tmp_path, text):
    shutil.copytree(right, tmp_path / "in")
    (tmp_path / "in" / "conversion.json").write_bytes(text.encode(errors="surrogateescape"))
    code = command(tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert code in (0, 2) and (tmp_path / "out").exists() == (code == 0)


STATES = ["[]", "5", "{", DEEP, "\udcff", "{}", '{"step": 7}', '{"step": "x", "meta": {}}',
          '{"step": 7, "meta": 5}', '{"meta": {}}', '{"step": 7, "meta": {"config": 1}}']  # fmt: skip


@pytest.mark.parametrize("text", STATES, ids=range(len(STATES)))
def test_a_malformed_training_position_is_no_crash(with_moments, tmp_path, text):
    from shared_ops.training_state import read_step

    shutil.copytree(with_moments, tmp_path / "in")
    (tmp_path / "in" / "training_state.json").write_bytes(text.encode(errors="surrogateescape"))
    assert command(tmp_path / "in", tmp_path / "again", "--to", "hf", "--optimizer") in (0, 2)
    assert command(tmp_path / "in", tmp_path / "weights", "--to", "hf") in (0, 2)
    if command(tmp_path / "in", tmp_path / "state", "--to", "training_state") == 0:
        read_step(tmp_path / "state")


QUANTISATIONS = ["fp8", 5, [], [1], True, None, {}, {"scale_fmt": 5}, {"scale_fmt": {}}, {"weight_block_size": "x"},
                 {"weight_block_size": [128]}, {"quant_method": 7}]  # fmt: skip


@pytest.mark.parametrize("content", QUANTISATIONS, ids=str)
def test_a_malformed_quantisation_is_no_crash(tmp_path, content):
    source = source_folder(tmp_path / "in", quantization_config=content)
    assert command(source, tmp_path / "a", "--to", "hdf5") in (0, 2)
    assert command(source, tmp_path / "b", "--to", "hf", "--dtype", "fp8") in (0, 2)
