"""From source files to a folder of token files that training reads, made once and reused after.

    DIR/tokenizer.json  {train,validation}.{bin,idx,h5}  manifest.json

The result is a function of the documents, the tokenizer, the seed and the split: not of the number of
workers, the machine or the time.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from shared_ops.data.build import FILES, Request, build, key, scan
from shared_ops.data.corpus import find_documents
from shared_ops.data.folder import locked, refuse_foreign_files, refuse_foreign_folder, staged
from shared_ops.data.manifest import MANIFEST, Manifest, load_manifest
from shared_ops.data.reporter import Reporter
from shared_ops.data.split import check_fractions
from shared_ops.data.tokenizer import load, training_size
from shared_ops.errors import UserError


def prepare(source: Sequence[str], out: Path, tokenizer: str, seed: int, split: tuple[float, float],
            workers: int, quiet: bool = False) -> Manifest:
    """Make the folder `out` from `source`, or find it there, whole and of the same inputs and arguments.

    source: 'stdlib' and paths. tokenizer: 'train:N' or the path of a tokenizer.json. seed: decides the split.
    split: fractions of train and validation. workers: threads. Several processes may call this for the same
    folder at once: one makes it, the others wait and reuse it. `UserError` for bad input, and when `out` has
    contents of another origin, which are never touched.
    """
    request = _request(source, tokenizer, seed, split)
    if workers < 1:
        raise UserError(f"workers {workers}: expected at least 1")
    out, report = Path(out).resolve(), Reporter(quiet)
    try:
        refuse_foreign_folder(out, _claims_to_be_ours(out))
        files = find_documents(source, exclude=out)
        with locked(out, lambda: report.say(f"waiting for another process that prepares {out}")):
            found = _find_prepared(out, report)
            inputs = scan(files, workers, report)
            if found is not None and found.key == key(inputs, request):
                report.say(f"reusing {out}: same inputs and arguments")
                return found
            if found is not None:
                report.say(f"making {out} anew: inputs or arguments have changed")
            refuse_foreign_folder(out, _claims_to_be_ours(out))  # once more: time has passed
            refuse_foreign_files(out, FILES)
            with staged(out) as folder:
                manifest = build(folder, inputs, request, workers, report)
            return manifest
    except OSError as error:
        raise UserError(f"{out}: cannot be made: {error}") from error


def _request(source: Sequence[str], tokenizer: str, seed: int, split: tuple[float, float]) -> Request:
    given = None if training_size(tokenizer) else load(Path(tokenizer))
    return Request(source, tokenizer, given, seed, check_fractions(split))


def _find_prepared(out: Path, report: Reporter) -> Manifest | None:
    """The manifest of the whole folder at `out`; None if there is none, or only a damaged one of ours."""
    try:
        return load_manifest(out, verify=True)
    except UserError as damage:
        if _claims_to_be_ours(out):
            report.say(f"making {out} anew: {damage}")
        return None


def _claims_to_be_ours(out: Path) -> bool:
    try:
        fields = json.loads((out / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and fields.get("format") == Manifest.model_fields["format"].default
