"""Which files are documents, and their text: one file is one document."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shared_ops.errors import UserError

STDLIB = "stdlib"
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A file that holds one document; `name` is its path relative to the source, with forward slashes."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Document:
    """A scanned document: `size` in bytes and `digest` (xxh3-128) of its content."""

    name: str
    path: Path
    size: int
    digest: bytes


def find_documents(source: Sequence[str], exclude: Path | None = None) -> list[DocumentFile]:
    """List the documents of `source`: the word `stdlib` and paths of files and folders, in the order given.

    A folder stands for every regular file below it that is not hidden, sorted by relative path; links to
    folders are not followed. A file reached twice is listed once. The folder `exclude` (the output) is left
    out, so that a result inside its own source does not become input. A missing path raises `UserError`.
    """
    if not source:
        raise UserError(f"source: expected '{STDLIB}' or paths of text files and folders, got none")
    exclude = exclude.resolve() if exclude else None
    found: dict[str, DocumentFile] = {}
    for item in source:
        for document in _expand(str(item), exclude):
            found.setdefault(os.path.realpath(document.path), document)
    if not found:
        raise UserError(f"source {_listed(source)}: no documents found, expected at least one regular file")
    return list(found.values())


def read(document: DocumentFile | Document) -> bytes:
    """The file's bytes; `UserError` when it cannot be read."""
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise UserError(f"{document.path}: cannot be read: {error.strerror}") from error


def scan(document: DocumentFile) -> Document:
    """Read the file once for its size and digest."""
    raw = read(document)
    return Document(document.name, document.path, len(raw), xxhash.xxh3_128_digest(raw))


def read_scanned(document: Document) -> bytes:
    """The bytes that were scanned; `UserError` if the file has changed since."""
    raw = read(document)
    if len(raw) != document.size or xxhash.xxh3_128_digest(raw) != document.digest:
        raise UserError(f"{document.path}: changed while it was being prepared: run the command again")
    return raw


def decode(raw: bytes) -> tuple[str, int]:
    """Text and the number of U+FFFD put in place of invalid UTF-8; all else, NUL and CR too, is kept."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        # EF cannot continue a sequence, so every EF BF BD in the input is a genuine U+FFFD.
        return text, text.count(_REPLACEMENT) - raw.count(_REPLACEMENT.encode())


def describe(source: Sequence[str]) -> list[str]:
    """The source as it is recorded: the items given, with the interpreter's version for the stdlib."""
    version = f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))}"
    # File names need not be UTF-8, the record is.
    items = (os.fsencode(item).decode("utf-8", errors="replace") for item in map(str, source))
    return [f"{STDLIB} ({version})" if item == STDLIB else item for item in items]


def _expand(item: str, exclude: Path | None) -> Iterator[DocumentFile]:
    if item == STDLIB:
        yield from _stdlib()
        return
    path = Path(item)
    if path.is_dir():
        yield from _folder(path, exclude)
    elif path.is_file():
        yield DocumentFile(path.name, path)
    elif path.exists():
        raise UserError(f"source {item}: expected a regular file or a folder")
    else:
        raise UserError(f"source {item}: no such file or folder (the word '{STDLIB}' means Python's library)")


def _stdlib() -> Iterator[DocumentFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for document in _walk(root, lambda folder: folder.name not in _NOT_STDLIB):
        if document.name.endswith(".py"):
            yield document


def _folder(root: Path, exclude: Path | None) -> Iterator[DocumentFile]:
    if exclude is not None and root.resolve() == exclude:
        return

    def wanted(folder: Path) -> bool:
        hidden = folder.name.startswith(".")
        return not hidden and (exclude is None or folder.name != exclude.name or folder.resolve() != exclude)

    for document in _walk(root, wanted):
        if not document.path.name.startswith("."):
            yield document


def _walk(root: Path, wanted: Callable[[Path], bool]) -> list[DocumentFile]:
    """The regular files below `root` in sorted order, without folders that are not `wanted(folder)`."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    documents = []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if wanted(Path(folder, name))]
        for path in (Path(folder, name) for name in files):
            if path.is_file():
                documents.append(DocumentFile(path.relative_to(root).as_posix(), path))
    return sorted(documents, key=lambda document: os.fsencode(document.name))


def _listed(source: Sequence[str]) -> str:
    return ", ".join(map(str, source))
