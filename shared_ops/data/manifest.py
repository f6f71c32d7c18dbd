"""What a prepared folder says about itself, and whether it is whole."""

import json
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from shared_ops.errors import UserError

MANIFEST = "manifest.json"
_CHUNK = 1 << 23


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Record):
    """Size in bytes and xxh3-64 (hex) of one file of the folder."""

    size: int
    xxh3: str


class SpecialIds(_Record):
    bos: int
    eos: int
    pad: int


class SplitRecord(_Record):
    """Size of one split; `bytes` are those of the input files.

    `unigram_entropy`, in nats per token, is what a model reaches that knows only how often each token occurs
    in the training split (for `train` the entropy itself, for the others the cross entropy with add-one
    smoothing): a loss below it shows that something is learnt. None for a split without tokens.
    """

    documents: int
    tokens: int
    bytes: int
    unigram_entropy: float | None


class Manifest(_Record):
    """`manifest.json` of a prepared folder. `key` stands for inputs and arguments: equal key, equal files."""

    format: Literal["shared_ops.data"] = "shared_ops.data"
    version: Literal[1] = 1
    key: str
    source: list[str]
    fingerprint: str
    seed: int
    split: list[float]
    tokenizer: str
    tokenizer_digest: str
    special_ids: SpecialIds
    vocab_size: int
    skipped_empty_documents: int
    replaced_invalid_utf8: int
    splits: dict[str, SplitRecord]
    files: dict[str, FileRecord]


def checksum(path: Path) -> str:
    """xxh3-64 of a file's content, hex."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def record_files(folder: Path) -> dict[str, FileRecord]:
    """A record of every file in `folder`, by name."""
    paths = sorted(folder.iterdir())
    return {path.name: FileRecord(size=path.stat().st_size, xxh3=checksum(path)) for path in paths}


def save_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")


def load_manifest(folder: Path, verify: bool = False) -> Manifest:
    """The manifest of a prepared folder whose files all have their size, and with `verify` their checksum.

    `UserError` naming what is missing or differs. Folders get their name only when complete, so a folder
    that fails here was damaged later, or is none of ours.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{folder}: is no prepared data ({MANIFEST}: {error.strerror}): "
                        "make it with 'python -m shared_ops.data prepare'") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: is no manifest of prepared data, version 1: "
                        f"{'.'.join(map(str, first['loc']))} {first['msg']}") from error
    for name, record in manifest.files.items():
        _check_file(folder / name, record, verify)
    return manifest


def _check_file(path: Path, record: FileRecord, verify: bool) -> None:
    try:
        size = path.stat().st_size
        digest = checksum(path) if verify and size == record.size else record.xxh3
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: prepare the folder again") from error
    if size != record.size:
        raise UserError(f"{path}: has {size} bytes where {MANIFEST} says {record.size}: "
                        "prepare the folder again")
    if digest != record.xxh3:
        raise UserError(f"{path}: differs from its checksum in {MANIFEST}: prepare the folder again")
