"""B's tensor as A's in another arrangement: rows and columns as ports order them, experts permuted, transposed."""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from shared_ops.config import ModelConfig
from weight_sync.canonical import CanonicalTensor
from weight_sync.differences.explanation import Explanation, listed
from weight_sync.differences.fingerprints import Prints
from weight_sync.layouts import rope_permutation


def explain(tensor: CanonicalTensor, a: Prints, b: Prints, config: ModelConfig) -> Explanation | None:
    """How a tensor's rows and columns in B come from those in A; None where they do not."""
    is_matrix, experts = len(tensor.shape) > 1, "experts" if len(tensor.shape) == 3 else "router rows"
    height, partly = a.rows.shape[1], None
    router = tensor.entry.parameter.axes[0] == "router" and a.rows.shape == b.rows.shape
    if router:  # its rows are the experts'
        source = _sources(a.rows.reshape(-1, 1), b.rows.reshape(-1, 1))
        if (source >= 0).all():
            return _arranged(source, "", False, experts)
        partly = _partly(source, experts)
    for transposed in (False, True) if is_matrix else (False,):
        there = b.columns if transposed else b.rows
        orders = [("", np.arange(height)), *row_orders(tensor.name, height, config)]
        for text, order in orders if there.shape == a.rows.shape else ():
            source = _sources(a.rows[:, order], there)
            if (source >= 0).all():
                return _arranged(source, text, transposed, experts)
            if not (text or transposed or router):
                partly = _partly(source, experts)
    for text, order in column_orders(tensor.name, a.columns.shape[1]):
        if a.columns.shape == b.columns.shape and np.array_equal(a.columns[:, order], b.columns):
            return Explanation(text, text, {"columns": text})
    what = "rows" if is_matrix else "elements"
    if a.rows.shape == b.rows.shape and _same_set(a.rows, b.rows):
        return Explanation(f"{what} in another order", f"the same {what} in another order", {"rows": "other"})
    if is_matrix and a.columns.shape == b.columns.shape and _same_set(a.columns, b.columns):
        return Explanation("columns in another order", "the same columns in another order", {"columns": "other"})
    return partly


def row_orders(name: str, rows: int, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(what a port did, order) such that B's row r is A's row order[r], for one kind of tensor."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    index, heads = np.arange(rows), config.num_attention_heads
    if module == "gate_up_proj":
        exchanged = np.roll(index, rows // 2)
        yield "gate and up exchanged", exchanged
        for halves, what in ((index, "gate and up"), (exchanged, "up and gate")):
            woven = halves.reshape(2, -1).T.reshape(-1)
            yield f"{what} rows alternate in B, A has halves (gate first)", woven
            yield f"{what} rows alternate in A, B has halves (gate first)", np.argsort(woven)
    elif module in ("q_proj", "q_b_proj"):
        yield from _rope_orders(rows, heads, config.qk_rope_head_dim)
        yield from _two_part_orders(index.reshape(heads, -1), config.qk_nope_head_dim, "nope", "rope")
    elif module == "kv_a_proj_with_mqa":
        yield from _rope_orders(rows, 1, config.qk_rope_head_dim)
        yield from _two_part_orders(index.reshape(1, -1), config.kv_lora_rank, "latent", "rope")
    elif module == "kv_b_proj":
        yield from _two_part_orders(index.reshape(heads, -1), config.qk_nope_head_dim, "k_nope", "v")


def _rope_orders(rows: int, heads: int, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "rotary rows: interleaved pairs in A, halves in B", rope_permutation(rows, heads, dim, True)
    yield "rotary rows: halves in A, interleaved pairs in B", rope_permutation(rows, heads, dim, False)


def _two_part_orders(heads: np.ndarray, cut: int, first: str, second: str) -> Iterator[tuple[str, np.ndarray]]:
    """Orders that ports take for rows [H, first | second]: parts gathered over the heads, or second before first."""
    gathered = np.concatenate([heads[:, :cut].reshape(-1), heads[:, cut:].reshape(-1)])
    swapped = np.concatenate([heads[:, cut:], heads[:, :cut]], axis=1).reshape(-1)
    yield f"{first} and {second} rows: per head in A, all {first} before all {second} in B", gathered
    yield f"{first} and {second} rows: all {first} before all {second} in A, per head in B", np.argsort(gathered)
    yield f"{first} and {second} rows: {first} first in A, {second} first in B", swapped
    yield f"{first} and {second} rows: {second} first in A, {first} first in B", np.argsort(swapped)


def column_orders(name: str, columns: int) -> Iterator[tuple[str, np.ndarray]]:
    """As `row_orders`, for columns."""
    if name.endswith(".eh_proj.weight"):
        yield "columns of embedding and hidden state exchanged", np.roll(np.arange(columns), columns // 2)


def _same_set(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))


def _sources(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For every block of b [S, N] the place of an equal block in a [S, N], -1 where there is none: its own place before
    others, one not yet taken before one that is."""
    here, wanted = ([xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks] for blocks in (a, b))
    source = np.array([place if here[place] == digest else -1 for place, digest in enumerate(wanted)])
    holders: dict[int, list[int]] = {}
    free: dict[int, list[int]] = {}
    for place, digest in enumerate(here):
        holders.setdefault(digest, []).append(place)
        if source[place] < 0:
            free.setdefault(digest, []).append(place)
    for place, digest in enumerate(wanted):
        if source[place] < 0 and digest in holders:
            source[place] = free[digest].pop(0) if free.get(digest) else holders[digest][0]
    return source


def _arranged(source: np.ndarray, rows: str, transposed: bool, experts: str) -> Explanation:
    kinds, parts, facts = [], [], {}
    if not np.array_equal(source, np.arange(len(source))):
        kind, text = describe_experts(source.tolist(), experts)
        kinds.append(kind)
        parts.append(text)
        facts["experts"] = source.tolist()
    if rows:
        kinds.append(rows)
        parts.append(rows)
        facts["rows"] = rows
    if transposed:
        kinds.append("transposed")
        parts.append("every expert transposed" if experts == "experts" else "transposed")
        facts["transposed"] = True
    return Explanation(" and ".join(kinds), "; ".join(parts), facts)


def _partly(source: np.ndarray, experts: str) -> Explanation | None:
    """Where some of the experts are there."""
    found = source >= 0
    if not found.any():
        return None
    text = f"{found.sum()} of {len(source)} {experts} are A's; those of other values: {listed(np.where(~found)[0])}"
    if (moved := found & (source != np.arange(len(source)))).any():
        text += f"; {moved.sum()} of A's are in another slot"
    return Explanation("partly", text, {"experts": source.tolist()}, whole=False)


def describe_experts(source: Sequence[int], what: str = "experts") -> tuple[str, str]:
    """(kind, text) for which expert of A each slot of B holds."""
    count, own = len(source), list(range(len(source)))
    by_text = sorted(own, key=str)
    moved = [f"{slot} holds {expert}" for slot, expert in enumerate(source) if slot != expert]
    some = ", ".join(moved[:6]).replace(" holds ", " holds expert ", 1)
    some = f"slot {some}" + (f", … ({len(moved)} of {count} moved)" if len(moved) > 6 else "")
    if sorted(source) != own:
        return f"{what} repeated", f"{what} repeated: {some}; nowhere in B: {listed(sorted(set(own) - set(source)))}"
    if source in (by_text, np.argsort(by_text).tolist()):
        side = "B" if source == by_text else "A"
        some = f"{side} has them in the order of their numbers as text ({listed(by_text[:4])}, …)"
    elif count > 2 and len({(expert - slot) % count for slot, expert in enumerate(source)}) == 1:
        some = f"slot s holds expert (s + {source[0]}) mod {count}"
    elif count > 2 and source == own[::-1]:
        some = "in reverse order"
    return f"{what} permuted", f"{what} permuted: {some}"

