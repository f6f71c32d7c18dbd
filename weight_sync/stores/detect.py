"""Which format is a file or folder? Its content says, not its name."""

import re
from pathlib import Path

from shared_ops.errors import UserError
from shared_ops.weights import CONFIG
from weight_sync.stores import hdf5, mindspore, onnx, safetensors, torch, training_state
from weight_sync.stores.base import Store

_LEGACY_PICKLE = b"\x80\x02"
# what trainers save beside weights
_OTHER_NAMES = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)|LICENSE.*")
# never weights, though some begin like them (a SentencePiece tokenizer is the twin of a .ckpt)
_OTHER = (".json", ".jsonl", ".jinja", ".txt", ".md", ".py", ".model", ".yaml", ".yml", ".html", ".log", ".pdf", ".png")


def open_store(path: Path) -> Store:
    """The store at a file or folder. `UserError` where there are no weights to read."""
    kind, files = _find(Path(path))
    if kind == "training_state":
        return training_state.read_folder(path)
    folder = path if path.is_dir() else path.parent
    store = _read(kind, path, files)
    if (folder / CONFIG).is_file():
        beside = (folder / CONFIG).read_bytes()
        if store.config_json not in (None, beside):
            raise UserError(
                f"{folder / CONFIG}: is not the configuration that the model itself carries: remove it, or give "
                "the right one with --config"
            )
        store.config_json = beside
        store.files.append(folder / CONFIG)
    return store


def format_at(path: Path) -> str:
    """The format of a file or folder."""
    return _find(Path(path))[0]


def holds_weights(folder: Path) -> bool:
    """Whether a folder holds weights of any format, or of several."""
    return training_state.is_step(folder) or bool(_candidates(folder))


def _find(path: Path) -> tuple[str, list[Path]]:
    if not path.exists():
        raise UserError(f"{path}: not there")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: is neither a file nor a folder")
    if path.is_dir() and training_state.is_step(path):
        return "training_state", []
    by_format = _candidates(path)
    if len(by_format) > 1:
        found = "; ".join(f"{kind}: {', '.join(p.name for p in files[:3])}" for kind, files in by_format.items())
        raise UserError(f"{path}: holds weights of several formats ({found}): name one of the files")
    if not by_format:
        known = "(known: safetensors, .pt, .ckpt, HDF5, ONNX, a training state's step folder)"
        steps = sorted(step for depth in ("", "checkpoints/", "*/checkpoints/") for step in path.glob(depth + "step_*"))
        raise UserError(f"{path}: no weights found {known}" + (f"; did you mean {steps[-1]}?" if steps else ""))
    return next(iter(by_format.items()))


def _candidates(path: Path) -> dict[str, list[Path]]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    else:
        files = [path]
    by_format: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix not in _OTHER and not _OTHER_NAMES.fullmatch(file.name) and (kind := format_of(file)):
            by_format.setdefault(kind, []).append(file)
    if len(by_format) > 1 and "onnx" in by_format:  # an ONNX model's data can look like anything
        data = {opened for model in by_format["onnx"] for opened in onnx.read_file(model)[1]}
        by_format = {k: left for k, v in by_format.items() if (left := [f for f in v if k == "onnx" or f not in data])}
    if not by_format and path.is_dir() and (path / safetensors.INDEX).exists():
        by_format["hf"] = []  # all shards are missing, which the index will say
    return by_format


def format_of(file: Path) -> str | None:
    """The format of one file by its first bytes, None for what is no weights."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(64)
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    if head.startswith(hdf5.MAGIC):
        return "hdf5"
    if head.startswith(torch.MAGIC):
        return "torch"
    if safetensors.is_safetensors(head, size) or file.name.endswith(safetensors.SUFFIX):
        return "hf"
    if onnx.is_model(head) or file.name.endswith(".onnx"):
        return "onnx"
    if mindspore.is_checkpoint(head) or file.name.endswith(mindspore.SUFFIX):
        return "mindspore"
    if file.suffix in (".h5", ".hdf5"):
        return "hdf5"
    if file.suffix in (".pt", ".pth") or head.startswith(_LEGACY_PICKLE):
        return "torch"
    return None


def _read(kind: str, path: Path, files: list[Path]) -> Store:
    if kind == "hdf5":
        return hdf5.read_files(path, files, safetensors.merge)
    if kind == "hf":
        return (
            safetensors.read_folder(path, files)
            if path.is_dir()
            else Store(path, "hf", safetensors.read_file(path), [path])
        )
    if kind == "onnx":
        if len(files) > 1:
            raise UserError(f"{path}: holds several ONNX models ({', '.join(f.name for f in files)}): name one of them")
        tensors, opened, metadata = onnx.read_file(files[0])
        config = metadata.get(CONFIG)
        return Store(path, "onnx", tensors, opened, config.encode() if config else None)
    read_file = {"torch": torch.read_file, "mindspore": mindspore.read_file}[kind]
    return Store(path, kind, safetensors.merge((file, read_file(file)) for file in files), list(files))
