"""What a conversion will write: which canonical tensor goes where, in which dtype, into which files, in which steps."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shared_ops.errors import UserError
from shared_ops.weights import CONFIG, PARAMS
from weight_sync import dtypes, names, quantised
from weight_sync.canonical import BFLOAT16, FLOAT32, CanonicalTensor, Weights
from weight_sync.sizes import sized
from weight_sync.stores import hdf5, mindspore, onnx, safetensors, torch, training_state
from weight_sync.stores.base import FilePlan, Rows, TensorPlan

STATE = "training_state"
FORMATS = ("hf", "torch", "mindspore", "hdf5", "onnx", STATE)
DTYPES = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}
FP8 = "fp8"
CHUNK = 1 << 19  # bytes that one thread works on at a time: hashed and written while they are in the cache
SPLIT = {"hf": 5_000_000_000, "torch": 50_000_000_000, "mindspore": mindspore.LARGEST_CKPT, "onnx": 1 << 30}

# what a hub folder's config.json says of FP8 weights
_FP8_CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# bytes of memory for one element under work: of the source, fp32, the result, and what statistics need
_ELEMENT_BYTES = {"plain": 0, "copied": 16, "cast": 64, "dequantised": 80, "quantised": 96}


@dataclass(frozen=True)
class Options:
    """How to convert; sizes in bytes. `sync` False leaves the last word to the system's write-back.

    `optimizer`: the moments and the position of a training state go along.
    """

    to: str
    dtype: str | None = None
    max_memory: int = 2 << 30
    max_file: int | None = None
    mindspore_file: str = "auto"
    scale_format: str | None = None
    optimizer: bool = False
    config: str | None = None
    verify: bool = False
    overwrite: bool = False
    quiet: bool = False
    sync: bool = True
    workers: int = min(4, os.cpu_count() or 1)


class Target(NamedTuple):
    """A canonical tensor, the dtype it is written in (None: FP8 blocks), the names its bytes go to in their order,
    those of its FP8 scales, and those of whole copies."""

    tensor: CanonicalTensor
    dtype: np.dtype | None
    names: tuple[str, ...]
    scales: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


class Plan:
    """All of one conversion's decisions. `UserError` where they cannot be made."""

    def __init__(self, weights: Weights, options: Options):
        self.weights, self.options = weights, options
        self.scale_format = options.scale_format or _scale_format(weights.config_json)
        self.copies = _copies(weights)
        groups = [weights.tensors, *(weights.moments.values() if options.optimizer else ())]
        self.targets = {tensor.key: self._target(tensor) for group in groups for tensor in group.values()}
        self.config_json = self._config_json()
        self.tensors: list[TensorPlan] = []
        self.files: dict[str, FilePlan] = {}  # path in the destination -> plan
        self.beside: dict[str, bytes] = {}
        for folder, targets in self._folders():
            self._add_folder(folder, targets)
        self.workers, self.steps = _share_memory(self.targets, options)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    # --- tensors ---

    def _target(self, tensor: CanonicalTensor) -> Target:
        entry, to = tensor.entry, self.options.to
        if to != "hf":
            return Target(tensor, self._dtype(tensor), (tensor.key if to == STATE else tensor.name,))
        if self.options.dtype == FP8 and entry.row.quantised:
            return Target(tensor, None, entry.hub, tuple(names.scale_names(name)[0] for name in entry.hub))
        copies = tuple(copy for name, copy in self.copies if tensor.key == PARAMS + name)
        return Target(tensor, self._dtype(tensor), entry.hub, (), copies)

    def _dtype(self, tensor: CanonicalTensor) -> np.dtype:
        if tensor.entry.row.dtype == "float32" or self.options.to == STATE:
            return FLOAT32
        asked = DTYPES.get(self.options.dtype or "")
        return tensor.dtype if asked is None or tensor.entry.row.dtype == "integer" else asked

    def tensor_plans(self, target: Target) -> Iterator[TensorPlan]:
        """What is stored for a target."""
        whole = len(target.names) == 1
        shape = target.tensor.shape if whole else target.tensor.entry.part_shape
        scales = dtypes.from_name("float8_e8m0fnu") if self.scale_format == "ue8m0" else FLOAT32
        for number, name in enumerate(target.names):
            if target.dtype is None:
                yield TensorPlan(name, shape, dtypes.from_name("float8_e4m3fn"))
                yield TensorPlan(target.scales[number], quantised.scales_shape(shape), scales)
            else:
                yield TensorPlan(name, shape, target.dtype)
        for name in target.copies:
            yield TensorPlan(name, shape, target.dtype)

    # --- files ---

    def _folders(self) -> Iterator[tuple[str, list[Target]]]:
        """The weights in the destination itself, each kind of moments in its own folder; a training state is one."""
        if self.options.to == STATE:
            yield "", [*self.targets.values()]
            return
        folders: dict[str, list[Target]] = {}
        for key, target in self.targets.items():
            folders.setdefault("" if key.startswith(PARAMS) else key.split("/")[0] + "/", []).append(target)
        yield from folders.items()

    def _add_folder(self, folder: str, targets: Sequence[Target]) -> None:
        tensors = [tensor for target in targets for tensor in self.tensor_plans(target)]
        files, beside = self._file_plans(tensors)
        self.tensors += tensors
        self.files |= {folder + file.name: file for file in files}
        self.beside |= {folder + name: content for name, content in beside.items()}

    def _file_plans(self, tensors: Sequence[TensorPlan]) -> tuple[Sequence[FilePlan], Mapping[str, bytes]]:
        to, options = self.options.to, self.options
        limit = options.max_file or SPLIT.get(to, 0)
        if to == "hf":
            return safetensors.plan(tensors, limit, {"format": "pt"})
        if to == "torch":
            return torch.plan(tensors, limit)
        if to == "mindspore":
            return mindspore.plan(tensors, limit, options.mindspore_file)
        if to == "onnx":
            return onnx.plan(tensors, limit, {CONFIG: self.config_json.decode()})
        if to == STATE:
            return training_state.plan(tensors)
        return hdf5.plan(tensors)

    def _config_json(self) -> bytes:
        """The source's config.json to the byte, unless what it says of the stored dtype is no longer so."""
        weights = self.weights
        config = json.loads(weights.config_json) if weights.config_json else weights.config.to_hf()
        sizes: Counter[str] = Counter()
        for key, target in self.targets.items():
            if key.startswith(PARAMS):
                if target.dtype is not None:
                    sizes[target.dtype.name] += target.tensor.size
        dtype = sizes.most_common(1)[0][0]  # of what is not FP8
        edited = dict(config)
        changed = any(t.dtype is None or t.dtype != t.tensor.dtype for t in self.targets.values())
        if weights.config_json is None:
            edited["dtype"] = dtype
        elif changed or "quantization_config" in config:
            edited |= {key: dtype for key in ("torch_dtype", "dtype") if key in config}
        edited.pop("quantization_config", None)
        if self.options.dtype == FP8:
            scale_format = {"scale_fmt": "ue8m0"} if self.scale_format == "ue8m0" else {}
            edited["quantization_config"] = _FP8_CONFIG | scale_format
        if weights.config_json is not None and edited == config:
            return weights.config_json
        return json.dumps(edited, indent=2, ensure_ascii=False).encode() + b"\n"


def _scale_format(config_json: bytes | None) -> str:
    quantisation = (json.loads(config_json) if config_json else {}).get("quantization_config")
    return "ue8m0" if isinstance(quantisation, dict) and quantisation.get("scale_fmt") == "ue8m0" else "float32"


def _copies(weights: Weights) -> list[tuple[str, str]]:
    """What a hub folder repeats: what these weights repeat or did where they came from, else what the hub's do."""
    possible = {copy: name for name, copy in names.copies(weights.config)}
    there = {copy.name for _, copy in weights.copies}
    if weights.report is not None:
        there |= set(weights.report["copies"])
    elif weights.format != "hf" and weights.with_mtp:
        there |= {copy for copy in possible if copy != "lm_head.weight"}
    return [(name, copy) for copy, name in possible.items() if copy in there]


# --- memory ---


def _share_memory(targets: Mapping[str, Target], options: Options) -> tuple[int, dict[str, int]]:
    """(threads, elements under work at a time for each tensor) such that all threads together keep the bound."""
    least = max(targets.values(), key=_least_bytes)
    needed = _least_bytes(least)
    if needed > options.max_memory:
        raise UserError(
            f"--max-memory {sized(options.max_memory)} is too little, {least.tensor.name} needs {sized(needed)}"
        )
    workers = max(1, min(options.workers, options.max_memory // max(needed, 1)))
    steps = {}
    for key, target in targets.items():
        unit, kind = _unit(target)
        size = CHUNK // target.tensor.dtype.itemsize
        if per_element := _ELEMENT_BYTES[kind]:
            size = min(size, options.max_memory // workers // per_element)
        steps[key] = max(size // unit, 1) * unit
    return workers, steps


def _unit(target: Target) -> tuple[int, str]:
    """(elements that must be worked on together, what is done to them)."""
    tensor = target.tensor
    if target.dtype is None:
        return quantised.BLOCK * tensor.shape[-1], "quantised"
    if tensor.is_quantised:
        return tensor.shape[-1], "dequantised"
    if target.dtype != tensor.dtype or not tensor.is_plain:
        return 1, "cast"
    if any(isinstance(part.stored, Rows) for part in tensor.parts):
        return tensor.shape[-1] if tensor.shape else 1, "copied"
    return 1, "plain"


def _least_bytes(target: Target) -> int:
    unit, kind = _unit(target)
    return unit * _ELEMENT_BYTES[kind]


def reading_step(tensor: CanonicalTensor, max_memory: int) -> int:
    """Elements to read at a time in whole rows, two readers keeping the bound together."""
    row = tensor.shape[-1] if tensor.shape else 1
    per_element = _ELEMENT_BYTES["copied" if tensor.is_plain else "dequantised"]
    return max(min(CHUNK // tensor.dtype.itemsize, max_memory // 2 // per_element) // row, 1) * row


def fingerprint(plan: Plan) -> dict[str, Any]:
    """What an interrupted run must have had in common to be gone on from."""
    files = plan.weights.store_files
    try:
        source = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    except OSError as error:
        raise UserError(f"{error.filename}: was removed while it was read ({error.strerror})") from None
    options = {key: getattr(plan.options, key) for key in ("to", "dtype", "max_file", "mindspore_file", "optimizer")}
    return {"source": source, "scales": plan.scale_format, "config": plan.config_json.decode(),
            "tensors": len(plan.tensors), **options}  # fmt: skip
