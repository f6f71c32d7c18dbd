"""What a training state must have in common with the run that goes on from it."""

import json

import numpy as np
import pytest

from shared_ops import expert_table
from shared_ops.config import RunConfig, load_run_config
from shared_ops.errors import UserError
from shared_ops.params import manifest
from shared_ops.resume import check_resumable, expected_arrays, state_meta

BASE = ["model=tiny_v3", "train.sequence_length=64"]


def run(*overrides: str) -> RunConfig:
    return load_run_config(None, [*BASE, *overrides])


def saved(*overrides: str, data_key: str = "abc") -> dict:
    """What the manifest of a training state says, as JSON brings it back."""
    return json.loads(json.dumps(state_meta(run(*overrides), data_key, 24)))


def refusal(meta: dict, config: RunConfig, data_key: str = "abc", force: bool = False) -> str:
    with pytest.raises(UserError) as error:
        check_resumable(meta, config, data_key, "runs/a/step_00000003", force)
    assert str(error.value).startswith("runs/a/step_00000003: ")
    return str(error.value)


def test_the_same_run_goes_on():
    check_resumable(saved(), run(), "abc", "here", force=False)
    assert saved()["consumed_samples"] == 24 and saved()["data_key"] == "abc" and saved()["seed"] == 0


HARMLESS = [
    "run.name=other", "run.dir=elsewhere", "parallel.dp=4", "checkpoint.save_steps=7", "checkpoint.save_total_limit=9",
    "monitor.report=false", "monitor.tensorboard=false", "train.stop_after=5", "train.log_steps=3",
    "train.validate_steps=11", "train.validation_sequences=2", "train.micro_batch_size=2", "train.kernels=composite",
    "train.compile=true", "data.cache_dir=elsewhere", "data.path=elsewhere",
]  # fmt: skip


@pytest.mark.parametrize("override", HARMLESS)
def test_what_never_matters(override):
    check_resumable(saved(), run(override), "abc", "here", force=False)
    check_resumable(saved(override), run(), "abc", "here", force=False)


NEEDS_FORCE = [
    ("train.steps=301", "train.steps: 300 there, 301 now"),
    ("train.global_batch_size=16", "train.global_batch_size: 8 there, 16 now"),
    ("train.sequence_length=32", "train.sequence_length: 64 there, 32 now"),
    ("train.precision=bf16", "train.precision: 'fp32' there, 'bf16' now"),
    ("optim.lr=1e-4", "optim.lr: 0.002 there, 0.0001 now"),
    ("optim.betas=[0.9, 0.99]", "optim.betas: [0.9, 0.95] there, [0.9, 0.99] now"),
    ("optim.weight_decay=0", "optim.weight_decay: 0.1 there, 0.0 now"),
    ("run.seed=1", "run.seed: 0 there, 1 now"),
]


@pytest.mark.parametrize(("override", "line"), NEEDS_FORCE)
def test_what_matters_is_named_and_can_be_forced(override, line):
    message = refusal(saved(), run(override))
    assert line in message and "--force" in message
    check_resumable(saved(), run(override), "abc", "here", force=True)


def test_other_data_is_named_and_can_be_forced():
    assert "data: prepared as abc there, xyz now" in refusal(saved(), run(), data_key="xyz")
    check_resumable(saved(), run(), "xyz", "here", force=True)


MODEL = [
    ("model.hidden_size=48", "model.hidden_size: 40 there, 48 now"),
    ("model.rope_scaling.factor=8", "model.rope_scaling.factor: 4.0 there, 8.0 now"),
    ("model.rope_scaling=null", "model.rope_scaling.factor: 4.0 there, None now"),
    ("model.routed_scaling_factor=1.0", "model.routed_scaling_factor: 2.5 there, 1.0 now"),
    ("model.mtp_loss_weight=0.1", "model.mtp_loss_weight: 0.3 there, 0.1 now"),
    ("model.expert_placement=modulo", "expert placement table"),
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("override", "line"), MODEL)
def test_the_model_is_never_forced(override, line, force):
    message = refusal(saved(), run(override), force=force)
    assert line in message and "--force" not in message and "take the old values" in message


def test_everything_that_differs_is_in_one_message():
    message = refusal(saved(), run("optim.lr=1e-4", "train.steps=9", "run.name=b", "run.seed=2"), data_key="xyz")
    for part in ("optim.lr", "train.steps", "run.seed", "data: prepared"):
        assert part in message
    assert "run.name" not in message
    both = refusal(saved(), run("optim.lr=1e-4", "model.v_head_dim=14"), force=True)
    assert "optim.lr" in both and "model.v_head_dim" in both


def test_a_table_is_known_by_its_content(tmp_path):
    """A table that was moved, or written to a file, is the same; another one under the same name is not."""
    path = tmp_path / "table.npz"
    expert_table.write(expert_table.modulo(12, 4), path)
    meta = saved("model.expert_placement=modulo")
    config = run(f"model.expert_placement={path}")
    check_resumable(meta, config, "abc", "here", force=False)
    meta = json.loads(json.dumps(state_meta(config, "abc", 0)))
    expert_table.write(expert_table.contiguous(12, 4), path)
    assert "expert placement table" in refusal(meta, config, force=True)


@pytest.mark.parametrize("key", ["config", "seed", "data_key", "consumed_samples", "tables"])
def test_a_manifest_without_what_a_resume_needs(key):
    meta = saved()
    del meta[key]
    assert key in refusal(meta, run(), force=True)


def test_a_manifest_that_is_none():
    for broken in ({}, saved() | {"config": None}, saved() | {"config": 3}, saved() | {"consumed_samples": "many"}):
        assert "lacks what a resume needs" in refusal(broken, run(), force=True)


def test_expected_arrays_are_parameters_and_moments_of_the_trained():
    config = run()
    arrays = expected_arrays(config)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert arrays[f"params/{bias}"] == (12,) and f"adam_m/{bias}" not in arrays and f"adam_v/{bias}" not in arrays
    stacked = "model.layers.2.mlp.experts.gate_up_proj"
    assert arrays[f"params/{stacked}"] == arrays[f"adam_m/{stacked}"] == arrays[f"adam_v/{stacked}"] == (12, 48, 40)
    copies = {p: 3 if p.trainable else 1 for p in manifest(config.model)}
    assert len(arrays) == sum(copies.values())
    assert sum(np.prod(shape) for shape in arrays.values()) == sum(p.size * n for p, n in copies.items())


def leaves(values: dict, prefix: str = "") -> list[str]:
    """Dotted names of all plain values of a configuration."""
    return [
        name
        for key, value in values.items()
        for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def test_every_other_field_matters():
    """Each field of the configuration, changed in the state: accepted exactly where DESIGN lists it."""
    free = {"train.stop_after", "train.log_steps", "train.validate_steps", "train.validation_sequences",
            "train.micro_batch_size", "train.kernels", "train.compile", "model.expert_placement"}  # fmt: skip
    names = leaves(saved()["config"])
    assert len(names) > 70 and free < set(names)
    for name in names:
        meta = saved()
        *path, last = name.split(".")
        section = meta["config"]
        for part in path:
            section = section[part]
        section[last] = "something else"
        if name in free or path[0] in ("run", "parallel", "checkpoint", "monitor", "data"):
            check_resumable(meta, run(), "abc", "here", force=False)
        else:
            assert f"{name}: 'something else' there" in refusal(meta, run())
            if path[0] == "model":
                refusal(meta, run(), force=True)


def test_a_field_that_one_side_does_not_know():
    """A state of a version with another key: harmless only below a harmless section."""
    meta = saved()
    meta["config"]["monitor"]["colour"] = "blue"
    check_resumable(meta, run(), "abc", "here", force=False)
    meta["config"]["optim"]["amsgrad"] = True
    assert "optim.amsgrad: True there, None now" in refusal(meta, run())
