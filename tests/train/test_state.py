"""Save, resume and given weights with the real twins, in this process: MindSpore compiles once, 15 s."""

import importlib
import json
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pytest

from shared_ops.config import load_run_config
from shared_ops.params import CORRECTION_BIAS, manifest
from shared_ops.resume import expected_arrays, state_meta
from shared_ops.shares import share_out
from shared_ops.training_loop import StepValues, TrainingLoop
from shared_ops.training_state import StepWriter, read_step, write_shard, write_step

SMALL = ["model=tiny_v3", "model.num_hidden_layers=3", "model.num_nextn_predict_layers=1", "train.sequence_length=40",
         "model.expert_placement=hash:7", "train.global_batch_size=4", "train.micro_batch_size=1", "train.log_steps=1",
         "optim.warmup_steps=5", "optim.bias_update_rate=0.004", "monitor.tensorboard=false", "monitor.report=false",
         "checkpoint.save_total_limit=9"]  # fmt: skip


class Stopped(Exception):
    """Instead of a step."""


@pytest.fixture(params=["torch_proto", "ms_train"], scope="module")
def twin(request, folder, text):
    """A twin's package, its configuration and trainers."""
    steps = ["train.steps=6", "checkpoint.save_steps=3"]
    config = load_run_config(None, [*SMALL, text, f"run.dir={folder / 'state'}", *steps])

    def trainer(**train):
        """A new one; `train`: changed keys of that section."""
        changed = config.model_copy(update={"train": config.train.model_copy(update=train)})
        parallel = importlib.import_module(f"{request.param}.parallel").Parallel()
        return importlib.import_module(f"{request.param}.trainer").Trainer(changed, parallel)

    return SimpleNamespace(name=request.param, config=config, trainer=trainer, compiled=trainer())


def run(twin, name, trainer, resume=None, weights=None, **train):
    """Train under a run name of its own: (first sample of each step's batch, rows of metrics.jsonl, checkpoints)."""
    config = twin.config.model_copy(update={
        "run": twin.config.run.model_copy(update={"name": name}),
        "train": twin.config.train.model_copy(update=train),
    })  # fmt: skip
    loop = TrainingLoop(config, twin.name, 0, 1, resume and str(resume), bool(train), weights)
    loop.prepare()
    at, asked = loop.batches.at, []

    def recording(consumed):
        asked.append(consumed)
        return at(consumed)

    loop.batches.at = recording
    loop.run(trainer)
    rows = [json.loads(line) for line in loop.folder.metrics.read_text().splitlines()]
    return asked, [row for row in rows if "loss" in row], loop.folder.checkpoints


@pytest.fixture(scope="module")
def straight(twin):
    """Six steps of four micro-batches, with a state after the third."""
    return run(twin, "straight", twin.compiled)


def contents(step_folder):
    meta, reader = read_step(step_folder)
    with reader:
        return meta, {name: reader[name] for name in reader.names()}


def test_a_resume_under_accumulation_is_bitwise(twin, straight):
    """P27: the second half asks for samples 12, 16, 20: 12 micro-batches of one row are skipped."""
    asked, rows, checkpoints = run(twin, "resumed", twin.compiled, resume=straight[2] / "step_00000003")
    assert straight[0] == [0, 4, 8, 12, 16, 20] and asked == [12, 16, 20]
    assert [row["step"] for row in rows] == [4, 5, 6]
    for row, other in zip(rows, straight[1][3:], strict=True):
        for key in ("loss", "aux_loss", "mtp_loss", "grad_norm", "lr", "tokens", "expert_load"):
            assert row[key] == other[key], f"step {row['step']} {key}"
    (meta, arrays), (other_meta, others) = (contents(c / "step_00000006") for c in (checkpoints, straight[2]))
    assert meta["consumed_samples"] == other_meta["consumed_samples"] == 24
    assert arrays.keys() == others.keys() == expected_arrays(twin.config).keys()
    for name, array in arrays.items():
        assert array.tobytes() == others[name].tobytes(), name
    _, halfway = contents(straight[2] / "step_00000003")
    assert all((halfway[name] != array).any() for name, array in arrays.items()), "each array has changed since"


def test_a_changed_batch_goes_on_by_samples(twin, straight):
    """P27: after 3 steps of 4 samples, a batch of 2 goes on at samples 12 and 14."""
    trainer, made = twin.trainer(global_batch_size=2), []

    def only_noted(batch, lr, update, stop):  # another batch is another graph to compile
        made.append((update, batch.input_ids.shape[1]))
        return StepValues(0.0, 0.0, 0.0, 0.0, 0.0, np.zeros((len(twin.config.model.moe_layers), 12)))

    trainer.step = only_noted
    asked, rows, checkpoints = run(
        twin, "by_samples", trainer, resume=straight[2] / "step_00000003", global_batch_size=2, stop_after=5
    )
    assert asked == [12, 14] and made == [(4, 2), (5, 2)]
    assert [row["tokens"] for row in rows] == [14 * 40, 16 * 40]
    assert contents(checkpoints / "step_00000005")[0]["consumed_samples"] == 16


def test_biases_stay_apart(twin, straight, tmp_path):
    """P11: 6.90, 6.91, 6.92 are one value in bf16, and three in a state, before and after a resume."""
    _, arrays = contents(straight[2] / "step_00000003")
    biases = {f"params/{p.name}": (6.9 + 0.01 * np.arange(p.size)).astype(np.float32)
              for p in manifest(twin.config.model) if p.name.endswith(CORRECTION_BIAS)}  # fmt: skip
    assert len(biases) == 2 and all(len(set(b.astype(ml_dtypes.bfloat16).tolist())) < len(b) for b in biases.values())
    for precision in ("fp32", "bf16"):  # MindSpore computes no bf16 on CPU, but it holds and saves
        first, second = twin.trainer(precision=precision), twin.trainer(precision=precision)
        _, state = read_step(write_step(tmp_path / precision, 3, (arrays | biases).items(), {}))
        with state:
            first.restore(state, 3)
        _, state = read_step(write_step(tmp_path / precision, 4, first.arrays(), {}))
        with state:
            second.restore(state, 4)
        after = dict(second.arrays())
        for name, bias in biases.items():
            assert after[name].dtype == np.float32 and after[name].tobytes() == bias.tobytes()


def test_the_shares_of_several_ranks_are_the_whole_state(twin, straight, tmp_path):
    """What each rank takes from the device, cut arrays and experts in other slots included."""
    _, arrays = contents(straight[2] / "step_00000006")
    shares = share_out(expected_arrays(twin.config), 64)
    cut = {part.name for share in shares for part in share if part.stop - part.start < part.shape[0]}
    assert any(".experts." in name for name in cut), cut
    _, state = read_step(straight[2] / "step_00000006")
    with state:
        twin.compiled.restore(state, 6)
    with StepWriter(tmp_path, 6, {}) as writer:
        facts = {}
        for rank, parts in enumerate(shares):
            taken = zip(parts, twin.compiled.arrays(parts), strict=True)
            placed = [(name, part.place(array)) for part, (name, array) in taken]
            facts[f"{rank}.h5"] = write_shard(writer.folder / f"{rank}.h5", placed)
        _, together = contents(writer.publish(facts))
    assert together.keys() == arrays.keys()
    assert all(together[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_a_run_begins_with_given_weights(twin, straight, tmp_path):
    """bf16 weights in an HDF5 folder: their values exactly, the bias in fp32, no moments, step 0, sample 0."""
    _, arrays = contents(straight[2] / "step_00000006")
    weights = {}
    with h5py.File(tmp_path / "model.h5", "w") as file:
        for p in manifest(twin.config.model):
            array = arrays[f"params/{p.name}"]
            if p.dtype == "weights":
                array = array.astype(ml_dtypes.bfloat16)
                file.create_dataset(f"params/{p.name}", data=array.view(np.uint16)).attrs["dtype"] = "bfloat16"
            else:
                file.create_dataset(f"params/{p.name}", data=array)
            weights[f"params/{p.name}"] = array.astype(np.float32)
    (tmp_path / "config.json").write_text(json.dumps(twin.config.model.to_hf()))
    trainer, seen = twin.trainer(), {}

    def instead_of_a_step(batch, lr, update, stop):
        seen.update(state={name: array.copy() for name, array in trainer.arrays()}, lr=lr, update=update)
        raise Stopped

    trainer.step = instead_of_a_step
    with pytest.raises(Stopped):
        run(twin, "weights", trainer, weights=tmp_path)
    assert seen["update"] == 1 and seen["lr"] == straight[1][0]["lr"]
    for name, array in seen["state"].items():
        expected = weights[name] if name in weights else np.zeros_like(array)
        assert array.tobytes() == expected.tobytes(), name
    assert seen["state"].keys() == expected_arrays(twin.config).keys()


def test_the_parameters_of_a_state_begin_another_run(twin, straight, tmp_path):
    """The first loss of a run with the weights of step 3 is that of step 4 on the same rows."""
    meta, arrays = contents(straight[2] / "step_00000003")
    again = write_step(tmp_path, 3, arrays.items(), state_meta(twin.config, meta["data_key"], 0))
    _, (resumed, *_), _ = run(twin, "from_sample_0", twin.compiled, resume=again)
    asked, (begun, *_), _ = run(twin, "from_weights", twin.compiled, weights=straight[2] / "step_00000003")
    assert asked[0] == 0 and begun["step"] == 1
    assert begun["loss"] == resumed["loss"] != straight[1][0]["loss"]
