"""Any store in canonical form: the model's parameters by name, read piece by piece and dequantised on the way.

Stored tensors are matched to the configuration's parameters by the table in `names`; whatever does not fit is a
`UserError` before anything is read.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from shared_ops.config import ModelConfig, load_model_config, validate
from shared_ops.errors import UserError
from shared_ops.weights import PARAMS, REPORT
from weight_sync import dtypes, names, quantised
from weight_sync.stores.base import Store, Stored
from weight_sync.stores.detect import open_store
from weight_sync.stores.training_state import MOMENTS

BFLOAT16, FLOAT32, FLOAT64 = dtypes.from_name("bfloat16"), np.dtype(np.float32), np.dtype(np.float64)
TRAINING = "training_state.json"  # beside converted weights: the moments lie there too
_FP8, _UE8M0 = ("float8_e4m3fn",), ("float8_e8m0fnu", "uint8")
_PACKED = ("int8", "uint8")
_QUANTISED_ONLY = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


class Part(NamedTuple):
    """A stored tensor that is a row block of a canonical one; `scales` where it is quantised (a small array)."""

    stored: Stored
    shape: tuple[int, ...]  # after dequantisation
    scales: Stored | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)


class CanonicalTensor:
    """A parameter in canonical form, read lazily; `dtype` is what it holds after dequantisation."""

    __slots__ = ("entry", "parts", "dtype", "kind")

    def __init__(self, entry: names.Entry, parts: Sequence[Part], dtype: np.dtype, kind: str = PARAMS):
        self.entry, self.parts, self.dtype, self.kind = entry, tuple(parts), dtype, kind

    @property
    def key(self) -> str:
        """Its name in a training state: params/NAME, adam_m/NAME, adam_v/NAME."""
        return self.kind + self.name

    @property
    def name(self) -> str:
        return self.entry.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.parameter.shape

    @property
    def size(self) -> int:
        return self.entry.parameter.size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_quantised(self) -> bool:
        return any(part.scales is not None for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are the stored ones."""
        return all(part.scales is None and part.stored.dtype == self.dtype for part in self.parts)

    @property
    def stored_dtype(self) -> str:
        """What the store holds, as safetensors spells it: "BF16", "F8_E4M3 with F32 scales"."""
        kinds = []
        for part in self.parts:
            kind = dtypes.to_safetensors(part.stored.dtype)
            if part.scales is not None:
                kind += f" with {dtypes.to_safetensors(part.scales.dtype)} scales"
            if kind not in kinds:
                kinds.append(kind)
        return " + ".join(kinds)

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Elements [start, stop) in row-major order as flat arrays of `dtype`, views of the store where they can be."""
        size = self.size // len(self.parts)  # parts are of one shape
        while start < stop:
            number, low = divmod(start, size)
            high = min(stop - number * size, size)
            yield from self._read_part(self.parts[number], low, high)
            start += high - low

    def _read_part(self, part: Part, start: int, stop: int) -> Iterator[np.ndarray]:
        if part.scales is not None:
            yield _dequantise(part, start, stop, self.dtype)
            return
        width = part.stored.dtype.itemsize
        for piece in part.stored.pieces(start * width, stop * width):
            values = piece.view(part.stored.dtype)
            yield values if values.dtype == self.dtype else dtypes.cast(values, self.dtype)

    def chunks(self, max_bytes: int) -> Iterator[np.ndarray]:
        """The whole tensor as flat arrays of at most `max_bytes`."""
        step = max(max_bytes // self.dtype.itemsize, 1)
        for start in range(0, self.size, step):
            yield from self.read(start, min(start + step, self.size))

    def array(self) -> np.ndarray:
        """The whole tensor as an array of its own."""
        out, position = np.empty(self.size, self.dtype), 0
        for chunk in self.chunks(64 << 20):
            out[position : position + chunk.size] = chunk
            position += chunk.size
        return out.reshape(self.shape)


def _dequantise(part: Part, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Elements [start, stop) of a quantised part, exact in `dtype`: fp32, or bf16 for power-of-two scales."""
    columns = part.shape[-1]
    first, last = start // columns, -(-stop // columns)
    packing = columns // part.stored.shape[-1]
    width = part.stored.shape[-1] * part.stored.dtype.itemsize
    raw = np.concatenate([*part.stored.pieces(first * width, last * width)]).reshape(last - first, -1)
    try:
        if packing == 2:
            groups = part.scales.shape[-1]
            scales = _whole(part.scales, first * groups, last * groups).reshape(-1, groups)
            values = quantised.dequantise_mxfp4(raw, scales)
        else:
            scales = _whole(part.scales).reshape(part.scales.shape)
            values = quantised.dequantise_fp8(raw, scales, first)
    except ValueError as error:
        raise UserError(f"{part.stored.name}: {error}: the quantised tensor is damaged") from None
    out = dtypes.cast(values, dtype)
    if dtype != FLOAT32 and not quantised.exact_dtype(scales) and not np.array_equal(out.astype(FLOAT32), values):
        raise UserError(f"{part.scales.name}: has scales so extreme that {dtype} cannot hold the values: it is damaged")
    return out.reshape(-1)[start - first * columns : stop - first * columns]


def _whole(stored: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Elements of a small tensor in the dtype that the dequantisers take: fp32, or raw UE8M0 bytes."""
    width = stored.dtype.itemsize
    pieces = [*stored.pieces(start * width, (stored.size if stop is None else stop) * width)]
    raw = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    return raw if width == 1 else dtypes.cast(raw.view(stored.dtype), FLOAT32)


@dataclass
class Weights:
    """A store in canonical form; a context manager that closes it."""

    store: Store
    config: ModelConfig
    config_json: bytes | None
    tensors: dict[str, CanonicalTensor]
    copies: list[tuple[str, Stored]]  # canonical name, a further tensor that must equal it
    ignored: list[tuple[str, str]]
    with_mtp: bool
    report: dict[str, Any] | None = None  # conversion.json beside the weights
    notes: list[str] = field(default_factory=list)
    moments: dict[str, dict[str, CanonicalTensor]] = field(default_factory=dict)  # of a training state, by kind
    training: dict[str, Any] | None = None  # its manifest less the files
    without_moments: str | None = None  # why there are none although there should be
    more_stores: list[Store] = field(default_factory=list)

    @property
    def store_files(self) -> list[Path]:
        """Every file that was opened."""
        return [path for store in (self.store, *self.more_stores) for path in store.files]

    @property
    def path(self) -> Path:
        return self.store.path

    @property
    def format(self) -> str:
        return self.store.format

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for store in (self.store, *self.more_stores):
            store.close()


def open_weights(path: Path, config: Path | str | None = None) -> Weights:
    """Open weights of any format. `config` (a model name, file or folder) stands in for a missing config.json.

    `UserError` for everything that does not fit: no weights, damage, names, shapes and dtypes that are not the model's.
    """
    path = Path(path)
    stores: list[Store] = []
    try:
        stores.append(open_store(path))
        weights = _open(stores[0], path, config)
        _open_moments(weights, stores)
        weights.more_stores = stores[1:]
        return weights
    except BaseException as error:
        for store in stores:
            store.close()
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        raise


def _open(store: Store, path: Path, config: Path | str | None) -> Weights:
    if config is not None:
        model, text = load_model_config(str(config)), None
        if Path(config).suffix == ".json" and Path(config).is_file():
            text = Path(config).read_bytes()
    elif store.state is not None:
        model, text = validate(ModelConfig, store.state.model, str(path)), None
    elif store.config_json is not None:
        model, text = _parse(store.config_json, f"{path}: config.json"), store.config_json
    else:
        raise UserError(f"{path}: has no config.json beside it: give the model's with --config")
    tensors = store.tensors
    constants = []
    if store.format == "onnx":  # a graph's other constants are no weights
        constants = [name for name in tensors if not names.is_a_parameters(name)]
        tensors = {name: tensor for name, tensor in tensors.items() if names.is_a_parameters(name)}
    found = names.match(model, tensors.keys(), str(path))
    ignored = found.ignored
    if constants:
        ignored += [(name, "a constant of the exported graph, no parameter of the model") for name in constants]
    canonical = {}
    for entry, stored_names in found.entries:
        canonical[entry.parameter.name] = _tensor(entry, [tensors[name] for name in stored_names], tensors, str(path))
    shared = [(name, tensors[copy]) for name, copy in found.copies]
    for name, copy in shared:
        original = canonical[name].parts[0].stored
        if copy.shape != canonical[name].shape or copy.dtype != original.dtype:
            raise UserError(f"{path}: {copy.name} should be a copy of {name}, but has another shape or dtype")
        if names.scale_of(copy.name, tensors) or canonical[name].is_quantised:
            raise UserError(f"{path}: {copy.name} or {name} is quantised; embedding and head never are")
    report = _report(path if path.is_dir() else path.parent)
    return Weights(store, model, text, canonical, shared, ignored, found.with_mtp, report, list(store.notes))


def _open_moments(weights: Weights, stores: list[Store]) -> None:
    """A training state's moments: in the state itself, or in the folders that a conversion made of it."""
    path, first = weights.path, stores[0]
    by_kind: dict[str, dict[str, Stored]] = {}
    if first.state is not None:
        by_kind, weights.training = first.state.moments, first.state.training
    elif path.is_dir() and (path / TRAINING).is_file():
        try:
            weights.training = _training(path / TRAINING)
            for kind in MOMENTS:
                stores.append(open_store(path / kind.rstrip("/")))
                by_kind[kind] = stores[-1].tensors
        except UserError as error:  # the weights are whole all the same
            weights.without_moments = str(error)
            return
    for kind, tensors in by_kind.items():
        where = f"{path}: {kind.rstrip('/')}"
        found = names.match(weights.config, tensors.keys(), where, trained_only=True)
        weights.moments[kind] = {
            entry.parameter.name: _tensor(entry, [tensors[name] for name in stored], tensors, where, kind)
            for entry, stored in found.entries
        }


def _training(path: Path) -> dict[str, Any]:
    try:
        training = json.loads(path.read_bytes())
        if isinstance(training["step"], int) and isinstance(training["meta"], dict):
            return training
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path}: is not what a conversion with --optimizer writes: convert the training state again")


def _parse(text: bytes, where: str) -> ModelConfig:
    try:
        return ModelConfig.from_hf(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is no JSON ({error})") from None


def _report(folder: Path) -> dict[str, Any] | None:
    """A conversion's report, None where there is none or where it is not one."""
    try:
        content = json.loads((folder / REPORT).read_bytes())
        for facts in content["tensors"].values():
            facts["destination"]["dtype"], facts["destination"]["xxh3_64"]
        return content if all(isinstance(name, str) for name in content["copies"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _tensor(
    entry: names.Entry, stored: list[Stored], all_stored: dict[str, Stored], where: str, kind: str = PARAMS
) -> CanonicalTensor:
    whole = len(stored) == 1 and stored[0].name == entry.parameter.name
    expected = entry.parameter.shape if whole else entry.part_shape
    parts = [_part(tensor, expected, all_stored, where) for tensor in stored]
    kinds = {_content_dtype(part, where) for part in parts}
    if entry.row.dtype == "float32":
        kinds.add(FLOAT32)
    dtype = kinds.pop() if len(kinds) == 1 else FLOAT64 if FLOAT64 in kinds else FLOAT32
    return CanonicalTensor(entry, parts, dtype, kind)


def _part(stored: Stored, expected: tuple[int, ...], all_stored: dict[str, Stored], where: str) -> Part:
    scales = all_stored.get(names.scale_of(stored.name, all_stored))
    kind = stored.dtype.name
    packed = kind in _PACKED and stored.shape == (*expected[:-1], expected[-1] // 2)
    if stored.shape != expected and not packed:
        hint = ", its transpose" if stored.shape == expected[::-1] else ""
        raise UserError(
            f"{where}: {stored.name} has the shape {list(stored.shape)}, by the configuration {list(expected)}{hint}"
        )
    if scales is None:
        if kind in _QUANTISED_ONLY or kind in _PACKED:
            raise UserError(
                f"{where}: {stored.name} is quantised ({dtypes.to_safetensors(stored.dtype)}), but its scales "
                f"{stored.name.removesuffix('.weight')}.weight_scale_inv are not there"
            )
        return Part(stored, expected)
    if len(expected) != 2:
        raise UserError(f"{where}: {stored.name} has scales, but only matrices are quantised")
    if packed:
        if expected[1] % 32 or scales.shape != (expected[0], expected[1] // 32) or scales.dtype.name not in _UE8M0:
            raise UserError(
                f"{where}: {scales.name} is {scales.dtype} {list(scales.shape)}; {stored.name} has one UE8M0 "
                f"scale byte per 32 values, [{expected[0]}, {expected[1] // 32}]"
            )
    elif kind in _FP8:
        quantised.check_scales(f"{where}: {stored.name}", expected, scales.shape)
        if scales.dtype.name not in (*_UE8M0, "float32", "bfloat16", "float16"):
            raise UserError(f"{where}: {scales.name} is {scales.dtype}, expected fp32 or UE8M0 scales")
    else:
        raise UserError(
            f"{where}: {scales.name} gives scales, but {stored.name} is {dtypes.to_safetensors(stored.dtype)}, not FP8 "
            "E4M3 or packed FP4"
        )
    return Part(stored, expected, scales)


def _content_dtype(part: Part, where: str) -> np.dtype:
    """The smallest dtype that holds a part's values exactly; power-of-two scales leave FP8 and FP4 exact in bf16."""
    if part.scales is not None:
        return BFLOAT16 if part.scales.dtype.itemsize == 1 else FLOAT32
    if part.stored.dtype.kind in "iub":
        raise UserError(f"{where}: {part.stored.name} is {part.stored.dtype}, expected a floating-point tensor")
    return part.stored.dtype
