"""Static expert hash tables: where each routed expert lives.

A placement is a permutation expert -> slot with its inverse. Slots are consecutive per group and per device: group
g owns slots [g E/G, (g+1) E/G), device d of an expert-parallel group of size P owns [d E/P, (d+1) E/P). Routing by
groups and expert parallelism read this table and nothing else. Weights on disk keep canonical expert order.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared_ops.config import ModelConfig
from shared_ops.errors import UserError
from shared_ops.files import write_atomically


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """`slot_of_expert` and `expert_of_slot` are int32 [E], each the other's inverse."""

    slot_of_expert: np.ndarray
    expert_of_slot: np.ndarray
    n_group: int

    @property
    def n_experts(self) -> int:
        return len(self.slot_of_expert)

    @property
    def group_of_expert(self) -> np.ndarray:
        """int32 [E]."""
        return self.slot_of_expert // np.int32(self.n_experts // self.n_group)

    @property
    def experts_of_group(self) -> np.ndarray:
        """int32 [G, E/G]."""
        return self.expert_of_slot.reshape(self.n_group, -1)

    def device_of_expert(self, expert_parallel: int) -> np.ndarray:
        """int32 [E]; raises `UserError` where `expert_parallel` does not fit experts and groups."""
        check_expert_parallel(self.n_experts, self.n_group, expert_parallel)
        return self.slot_of_expert // np.int32(self.n_experts // expert_parallel)

    @property
    def digest(self) -> str:
        """Identifies the table in checkpoints: equal digests mean equal routing and equal slots."""
        header = f"placement-1:{self.n_experts}:{self.n_group}:".encode()
        return hashlib.sha256(header + self.slot_of_expert.astype("<i4").tobytes()).hexdigest()


def from_slots(slot_of_expert: np.ndarray, n_group: int, where: str = "expert placement") -> ExpertPlacement:
    """A placement from its table; raises `UserError` unless it is an int32 permutation that the groups divide."""
    table = np.asarray(slot_of_expert)
    if table.ndim != 1 or table.dtype != np.int32:
        raise UserError(f"{where}: expected a one-dimensional int32 table, got {table.dtype} {list(table.shape)}")
    n = len(table)
    if n == 0 or n_group < 1 or n % n_group:
        raise UserError(f"{where}: {n} experts are not divisible into n_group={n_group} groups")
    if not np.array_equal(np.sort(table), np.arange(n)):
        raise UserError(f"{where}: not a permutation of the slots 0..{n - 1}")
    table, inverse = table.copy(), np.argsort(table).astype(np.int32)
    table.setflags(write=False)
    inverse.setflags(write=False)
    return ExpertPlacement(table, inverse, n_group)


def check_expert_parallel(n_experts: int, n_group: int, expert_parallel: int) -> None:
    """A rank holds whole groups, or a group spans whole ranks; anything else is a `UserError`."""
    if expert_parallel < 1 or n_experts % expert_parallel:
        raise UserError(f"expert_parallel={expert_parallel}: must divide n_routed_experts={n_experts}")
    if n_group % expert_parallel and expert_parallel % n_group:
        raise UserError(f"expert_parallel={expert_parallel} and n_group={n_group}: one must divide the other")


# --- builders ----------------------------------------------------------------------------------------------------


def contiguous(n_experts: int, n_group: int) -> ExpertPlacement:
    """Expert e in slot e: the published models' order."""
    return from_slots(np.arange(n_experts, dtype=np.int32), n_group)


def modulo(n_experts: int, n_group: int) -> ExpertPlacement:
    """Expert e in group e mod n_group."""
    expert = np.arange(n_experts)
    slots = expert % n_group * (n_experts // max(n_group, 1)) + expert // n_group
    return from_slots(slots.astype(np.int32), n_group)


def seeded_hash(n_experts: int, n_group: int, seed: int) -> ExpertPlacement:
    """A pseudo-random permutation, the same on every machine."""
    keys = [hashlib.blake2b(f"{seed}:{e}".encode(), digest_size=16).digest() for e in range(n_experts)]
    slots = np.empty(n_experts, np.int32)
    slots[sorted(range(n_experts), key=keys.__getitem__)] = np.arange(n_experts)
    return from_slots(slots, n_group)


def balanced(loads: np.ndarray, groups: ExpertPlacement, expert_parallel: int) -> ExpertPlacement:
    """Spread measured loads [E] evenly over `expert_parallel` devices, heaviest first onto the lightest device.

    The groups of `groups` stay together, so that group-limited routing chooses the same experts as before.
    """
    loads = np.asarray(loads, np.float64)
    n, n_group = groups.n_experts, groups.n_group
    if loads.shape != (n,) or not np.isfinite(loads).all() or (loads < 0).any():
        raise UserError(f"expert loads: expected {n} finite numbers >= 0, got shape {list(loads.shape)}")
    check_expert_parallel(n, n_group, expert_parallel)
    members = groups.experts_of_group
    if expert_parallel <= n_group:
        order = _spread(loads[members].sum(1), expert_parallel)
        expert_of_slot = members[order].reshape(-1)
    else:
        spread = [member[_spread(loads[member], expert_parallel // n_group)] for member in members]
        expert_of_slot = np.concatenate(spread)
    return from_slots(np.argsort(expert_of_slot).astype(np.int32), n_group)


def _spread(loads: np.ndarray, bins: int) -> np.ndarray:
    """Items ordered bin by bin, equally many in each, greedily balanced."""
    room = [len(loads) // bins] * bins
    totals, contents = [0.0] * bins, [[] for _ in range(bins)]
    for item in np.argsort(-loads, kind="stable"):
        chosen = min((b for b in range(bins) if room[b]), key=lambda b: (totals[b], b))
        contents[chosen].append(item)
        totals[chosen] += loads[item]
        room[chosen] -= 1
    return np.concatenate([np.array(sorted(c), np.int64) for c in contents])


# --- files and configuration -------------------------------------------------------------------------------------


def write(placement: ExpertPlacement, path: Path) -> None:
    """Write a table as .npz (slot_of_expert, n_group)."""
    buffer = io.BytesIO()
    np.savez(buffer, slot_of_expert=placement.slot_of_expert, n_group=np.int32(placement.n_group))
    write_atomically(Path(path), buffer.getvalue())


def read(path: Path) -> ExpertPlacement:
    """Read and validate a table written by `write`."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return from_slots(file["slot_of_expert"], int(file["n_group"]), str(path))
    except (OSError, KeyError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an expert table: {error}") from None


def placement_of(config: ModelConfig) -> ExpertPlacement:
    """The table that `config.expert_placement` names: contiguous, modulo, hash:SEED or a file written by `write`."""
    kind, experts, groups = config.expert_placement, config.n_routed_experts, config.n_group
    if kind == "contiguous":
        return contiguous(experts, groups)
    if kind == "modulo":
        return modulo(experts, groups)
    if kind.startswith("hash:") and kind[5:].isdecimal():
        return seeded_hash(experts, groups, int(kind[5:]))
    if not Path(kind).is_file():
        raise UserError(
            f"expert_placement={kind!r}: expected contiguous, modulo, hash:SEED or the path of an expert table"
        )
    table = read(Path(kind))
    if (table.n_experts, table.n_group) != (experts, groups):
        raise UserError(
            f"{kind}: the table is for {table.n_experts} experts in {table.n_group} groups, the model has "
            f"{experts} in {groups}"
        )
    return table
