"""What a training state must have in common with the run that goes on from it."""

from collections.abc import Collection, Mapping
from typing import Any

from shared_ops.config import RunConfig
from shared_ops.errors import UserError
from shared_ops.expert_table import placement_of
from shared_ops.params import manifest

# differences that never change the training: a prefix stands for all below it
HARMLESS = (
    "run",
    "parallel",
    "checkpoint",
    "monitor",
    "train.stop_after",
    "train.log_steps",
    "train.validate_steps",
    "train.validation_sequences",
    "train.micro_batch_size",
    "train.kernels",
    "train.compile",
    # what the data and the expert table are, their keys say; where they lie does not matter
    "data",
    "model.expert_placement",
)


def state_meta(config: RunConfig, data_key: str, consumed_samples: int) -> dict[str, Any]:
    """What a training state says beside its arrays."""
    return {
        "config": config.model_dump(),
        "seed": config.run.seed,
        "data_key": data_key,
        "consumed_samples": consumed_samples,
        "tables": {"expert_placement": placement_of(config.model).digest},
    }


def expected_arrays(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Name -> canonical shape of every array of a training state."""
    shapes = {}
    for p in manifest(config.model):
        for kind in ("params", "adam_m", "adam_v") if p.trainable else ("params",):
            shapes[f"{kind}/{p.name}"] = p.shape
    return shapes


def check_resumable(meta: Mapping[str, Any], config: RunConfig, data_key: str, where: str, force: bool) -> None:
    """`UserError` that lists field by field what differs and matters; `force` accepts all but the model."""
    now = state_meta(config, data_key, 0)
    try:
        different = differences(meta["config"], now["config"], HARMLESS)
        if meta["tables"] != now["tables"]:
            different.append(f"expert placement table: {meta['tables']} there, {now['tables']} now")
        if meta["data_key"] != data_key:
            different.append(f"data: prepared as {meta['data_key']} there, {data_key} now")
        if meta["seed"] != now["seed"]:
            different.append(f"run.seed: {meta['seed']} there, {now['seed']} now (it orders the samples)")
        int(meta["consumed_samples"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: its manifest lacks what a resume needs ({error})") from None
    hard = [line for line in different if line.startswith(("model.", "expert placement"))]
    if hard or (different and not force):
        advice = "another model needs a run of its own" if hard else "accept the change with --force"
        listed = "; ".join(different)
        raise UserError(f"{where}: cannot go on from it: {listed}; take the old values, or {advice}")


def differences(was: Mapping[str, Any], now: Mapping[str, Any], harmless: Collection[str]) -> list[str]:
    """One line for each field of a nested configuration that differs, but for the `harmless` and what is below them."""
    was, now = _flat(was), _flat(now)
    return [
        f"{key}: {was.get(key)!r} there, {now.get(key)!r} now"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key) and not any(key == h or key.startswith(h + ".") for h in harmless)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
