"""A trainer that is to go on from something damaged: one message, exit code 2, and all files as they were."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import savers

from shared_ops.command_line import parse
from shared_ops.config import load_run_config
from shared_ops.data.manifest import load_manifest
from shared_ops.data.prepare import prepare
from shared_ops.errors import EXIT_BAD_INPUT, run_cli
from shared_ops.resume import expected_arrays, state_meta
from shared_ops.shares import share_out
from shared_ops.training_loop import TrainingLoop
from shared_ops.training_state import write_step

SMALL = ["model=tiny_v3", "model.num_hidden_layers=3", "model.num_nextn_predict_layers=0", "train.sequence_length=64"]
FIRST, SHARD, LAST = (f"state-{rank:05}-of-00003.h5" for rank in range(3))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for number in range(20):
        (root / f"{number}.txt").write_text(" ".join(str(number * factor) for factor in range(60)))
    prepare([str(root)], root / ".out", "train:300", 0, (0.8, 0.2), 1, quiet=True)
    return root / ".out"


@pytest.fixture(scope="module")
def states(text, tmp_path_factory):
    """Steps 3 and 6 of a run on three ranks."""
    folder = tmp_path_factory.mktemp("states")
    config, key = load_run_config(None, [*SMALL, f"data.path={text}"]), load_manifest(text).key

    def save(rank, total, step):
        parts = share_out(expected_arrays(config), 3)[rank]
        arrays = ((p.name, p.place(np.full(p.shape, step, np.float32)[p.rows])) for p in parts)
        return write_step(folder, step, arrays, state_meta(config, key, 8 * step), rank, 3, total)

    for step in (3, 6):
        savers.together(3, lambda rank, total, step=step: save(rank, total, step))
    return folder


@pytest.fixture
def checkpoints(states, tmp_path):
    """A copy of them as the checkpoints of a run."""
    folder = tmp_path / "runs" / "mine" / "torch_proto" / "checkpoints"
    shutil.copytree(states, folder)
    return folder


def begin(argv):
    """What both trainers do before they load a framework, and what they say they begin with."""
    config, resume, force, weights = parse("main.py", argv)
    loop = TrainingLoop(config, "torch_proto", 0, 1, resume, force, weights)
    loop.prepare()
    print("step", loop.start)


@pytest.fixture
def trainer(text, tmp_path, capsys):
    """Run it: (exit code, standard output, standard error)."""

    def run(*arguments):
        where = [f"data.path={text}", f"run.dir={tmp_path / 'runs'}", "run.name=mine"]
        code = run_cli(begin, [*SMALL, *where, *arguments])
        return code, *capsys.readouterr()

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)


def exchange(folder: Path) -> None:
    other = folder.with_name("step_00000003") / SHARD
    assert other.stat().st_size == (folder / SHARD).stat().st_size, "sizes alone tell nothing"
    shutil.copyfile(other, folder / SHARD)


DAMAGES = {
    "truncated": (lambda folder: os.truncate(folder / SHARD, 5000), f"{SHARD}: 5000 bytes, the manifest says"),
    "flipped in the first shard": (lambda folder: flip(folder / FIRST, 0.5), f"{FIRST}: damaged or exchanged"),
    "flipped in the last shard": (lambda folder: flip(folder / LAST, 0.9), f"{LAST}: damaged or exchanged"),
    "a shard missing": (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: missing, though the manifest names it"),
    "a shard of another step": (exchange, f"{SHARD}: damaged or exchanged"),
    "the manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "no complete step folder"),
    "the manifest edited": (lambda folder: flip(folder / "manifest.json", 0.7), "manifest.json"),
    "a shard as manifest": (lambda folder: shutil.copyfile(folder / SHARD, folder / "manifest.json"), "manifest.json"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_folder(trainer, checkpoints, damage):
    spoil, message = DAMAGES[damage]
    folder = checkpoints / "step_00000006"
    assert trainer("--resume", str(folder)) == (0, "step 6\n", "")
    spoil(folder)
    before = contents(checkpoints)
    code, out, error = trainer("--resume", str(folder))
    assert (code, out) == (EXIT_BAD_INPUT, "") and contents(checkpoints) == before
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    # auto takes the one before where sizes tell the damage; where only a checksum does, it stops and says what to do
    code, out, error = trainer("--resume", "auto")
    if "damaged or exchanged" in error:
        assert code == EXIT_BAD_INPUT and "move this one away and give --resume auto" in error
        folder.rename(checkpoints / "aside")
        code, out, error = trainer("--resume", "auto")
    assert code == 0 and out.endswith("step 3\n") and error == ""


@pytest.mark.parametrize("option", ["--resume", "--weights"])
def test_what_is_no_step_folder(trainer, checkpoints, tmp_path, option):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "model.safetensors").write_text("x")
    for path in (tmp_path / "notes", tmp_path / "notes" / "model.safetensors", tmp_path / "nowhere", checkpoints):
        code, out, error = trainer(option, str(path))
        assert (code, out, error.count("\n")) == (EXIT_BAD_INPUT, "", 1) and str(path) in error
    assert trainer(option, str(checkpoints / "step_00000003"))[0] == 0


def test_weights_are_for_a_run_without_checkpoints(trainer, checkpoints):
    weights = ("--weights", str(checkpoints / "step_00000003"))
    assert trainer(*weights, "--resume", "auto") == (0, "step 6\n", "")
    assert trainer(*weights) == (0, "step 0\n", "")
    assert trainer(*weights, "--resume", "auto", "run.name=other") == (0, "step 0\n", "")
    flip(checkpoints / "step_00000003" / SHARD, 0.5)
    code, _, error = trainer(*weights)
    assert code == EXIT_BAD_INPUT and f"{SHARD}: damaged" in error
    code, _, error = trainer("--weights", str(checkpoints / "step_00000006"), "model.hidden_size=48")
    assert code == EXIT_BAD_INPUT and "model.hidden_size: 40 there, 48 now" in error


def test_moments_of_another_dtype(trainer, checkpoints, text):
    """copy_ and set_data would cast them silently."""
    config = load_run_config(None, [*SMALL, f"data.path={text}"])
    arrays = {name: np.zeros(shape, np.float32) for name, shape in expected_arrays(config).items()}
    arrays["adam_v/model.norm.weight"] = np.zeros(40, np.float64)
    folder = write_step(checkpoints, 9, arrays.items(), state_meta(config, load_manifest(text).key, 72))
    code, _, error = trainer("--resume", str(folder))
    assert code == EXIT_BAD_INPUT and "adam_v/model.norm.weight is float64; expected float32" in error
