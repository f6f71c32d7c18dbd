"""Fill one folder with tokenizer, token files and manifest from scanned documents."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from shared_ops.data import corpus, entropy
from shared_ops.data.corpus import Document
from shared_ops.data.manifest import MANIFEST, Manifest, SpecialIds, SplitRecord, record_files, save_manifest
from shared_ops.data.reporter import Reporter
from shared_ops.data.split import SPLITS, is_validation, order_keys
from shared_ops.data.token_file import TokenWriter, open_tokens, write_h5
from shared_ops.data.tokenizer import TextTokenizer, library_threads, train, training_size
from shared_ops.data.workers import ordered_map
from shared_ops.errors import UserError

TOKENIZER = "tokenizer.json"
FILES = {TOKENIZER, MANIFEST, *(split + suffix for split in SPLITS for suffix in (".bin", ".idx", ".h5"))}
_FORMAT = 1  # part of the key: raise it when the same inputs are to give other files
_SAMPLE_BYTES = 256 << 20  # more text than this does not make a better vocabulary
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Request:
    """What decides the content of the folder, but for the documents. `given` is None for `train:N`."""

    source: Sequence[str]
    tokenizer: str
    given: TextTokenizer | None
    seed: int
    split: tuple[float, float]


@dataclass(frozen=True)
class Inputs:
    """The scanned documents that are not empty, how many are, and the fingerprint of all of them."""

    documents: list[Document]
    empty: int
    fingerprint: str


def scan(files: Sequence[corpus.DocumentFile], workers: int, report: Reporter) -> Inputs:
    """Read every file once; `UserError` when all are empty."""
    documents, empty, fingerprint = [], 0, xxhash.xxh3_128()
    with report.progress(f"reading {len(files)} files", len(files)) as advance:
        for document in ordered_map(corpus.scan, files, workers):
            name = document.name.encode("utf-8", errors="surrogateescape")
            fingerprint.update(b"%d:%s%d:%s" % (len(name), name, document.size, document.digest))
            if document.size:
                documents.append(document)
            else:
                empty += 1
            advance(1)
    if not documents:
        raise UserError(f"source: all {empty} documents are empty, expected text")
    return Inputs(documents, empty, fingerprint.hexdigest())


def key(inputs: Inputs, request: Request) -> str:
    """Stands for inputs and arguments: folders with equal keys have equal content."""
    tokenizer = request.tokenizer if request.given is None else request.given.digest
    identity = [_FORMAT, inputs.fingerprint, tokenizer, request.seed, request.split]
    return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())


def build(folder: Path, inputs: Inputs, request: Request, workers: int, report: Reporter) -> Manifest:
    """Write all FILES into the empty `folder`; the number of workers (threads) does not show in them."""
    order = order_keys([document.digest for document in inputs.documents], request.seed)
    validation = is_validation(order, request.split)
    parts = {name: [inputs.documents[i] for i in np.flatnonzero(validation == (name == "validation"))]
             for name in SPLITS}
    with library_threads(workers > 1):
        tokenizer = request.given or _train(parts["train"], order[~validation], request.tokenizer, report)
    (folder / TOKENIZER).write_bytes(tokenizer.json.encode("utf-8"))
    size = sum(document.size for document in inputs.documents)
    # The library's own threads are off: `workers` of ours each encode a batch.
    with report.progress("encoding", size) as advance, library_threads(False):
        replaced = sum(_write_split(folder / name, parts[name], tokenizer, workers, advance)
                       for name in SPLITS)
    manifest = Manifest(
        key=key(inputs, request),
        source=corpus.describe(request.source),
        fingerprint=inputs.fingerprint,
        seed=request.seed,
        split=list(request.split),
        tokenizer=request.tokenizer if request.given is None else Path(request.tokenizer).name,
        tokenizer_digest=tokenizer.digest,
        special_ids=SpecialIds(bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad),
        vocab_size=tokenizer.vocab_size,
        skipped_empty_documents=inputs.empty,
        replaced_invalid_utf8=replaced,
        splits=_describe_splits(folder, parts, tokenizer.vocab_size),
        files=record_files(folder),
    )
    save_manifest(folder, manifest)
    return manifest


def _train(documents: Sequence[Document], order: np.ndarray, spec: str, report: Reporter) -> TextTokenizer:
    """Train on the documents, or on a sample in the hashed order if they are more than enough."""
    total = sum(document.size for document in documents)
    if total > _SAMPLE_BYTES:
        documents, total = [documents[i] for i in np.argsort(order, kind="stable")], _SAMPLE_BYTES
    with report.progress(f"training {spec}", total) as advance:

        def texts() -> Iterator[str]:
            left = total
            for document in documents:
                raw = corpus.read_scanned(document)[:left]
                yield corpus.decode(raw)[0]
                advance(len(raw))
                left -= len(raw)
                if not left:
                    return

        return train(texts(), training_size(spec))


def _write_split(prefix: Path, documents: Sequence[Document], tokenizer: TextTokenizer, workers: int,
                 advance: Callable[[int], None]) -> int:
    """Write the split's three files; returns how often invalid UTF-8 was replaced."""

    def encode(batch: list[Document]) -> tuple[list[np.ndarray], int]:
        texts, invalid = zip(*(corpus.decode(corpus.read_scanned(document)) for document in batch))
        return tokenizer.encode(texts), sum(invalid)

    replaced = 0
    batches = list(_batches(documents))
    with TokenWriter(prefix, tokenizer.vocab_size) as writer:
        for batch, (encoded, invalid) in zip(batches, ordered_map(encode, batches, workers), strict=True):
            for ids in encoded:
                writer.add(ids)
            replaced += invalid
            advance(sum(document.size for document in batch))
    write_h5(prefix, tokenizer.vocab_size)
    return replaced


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _describe_splits(folder: Path, parts: dict[str, list[Document]],
                     vocab_size: int) -> dict[str, SplitRecord]:
    counts = {name: entropy.count_tokens(open_tokens(folder / name).ids, vocab_size) for name in parts}
    train = counts["train"]
    nats = {"train": entropy.entropy(train), "validation": entropy.cross_entropy(counts["validation"], train)}
    return {name: SplitRecord(
        documents=len(documents),
        tokens=int(counts[name].sum()),
        bytes=sum(document.size for document in documents),
        unigram_entropy=nats[name],
    ) for name, documents in parts.items()}
