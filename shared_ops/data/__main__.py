"""`python -m shared_ops.data prepare`: text files → token files."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared_ops.data.manifest import Manifest
from shared_ops.data.prepare import prepare
from shared_ops.errors import EXIT_INTERRUPTED, UserError, run_cli

_EXAMPLES = """examples:
  python -m shared_ops.data prepare --source stdlib --out data/stdlib
  python -m shared_ops.data prepare --source docs notes.txt --out data/notes --split 0.9,0.1
  python -m shared_ops.data prepare --source books --out data/books --tokenizer models/v3/tokenizer.json

DIR is complete when it appears, and is reused as long as inputs and arguments stay the same. Files that are
not UTF-8 are no error: what is invalid becomes U+FFFD and is counted; empty files are skipped and counted.
"""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    begin = time.monotonic()
    try:
        manifest = prepare(arguments.source, arguments.out, arguments.tokenizer, arguments.seed,
                           _fractions(arguments.split), arguments.workers)
    except KeyboardInterrupt:
        print(f"interrupted: {arguments.out} is as it was before", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(_summary(arguments.out, manifest, time.monotonic() - begin))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shared_ops.data",
                                     description="Training data from text files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "prepare", help="turn text files into token files", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Turn text files into token files (.bin/.idx for Megatron's readers, .h5) with train\n"
                    "and validation splits, a tokenizer and a manifest. One file is one document.")
    command.add_argument("--source", nargs="+", required=True, metavar="PATH",
                         help="text files and folders of them (all files that are not hidden), or the "
                              "word 'stdlib': the .py files of this Python's standard library")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    command.add_argument("--tokenizer", default="train:4096", metavar="train:N|FILE",
                         help="train a byte-level BPE of N tokens on the training split, or read a "
                              "tokenizer.json (default: %(default)s)")
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N",
                         help="threads; the result does not depend on it (default: cores, %(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="S",
                         help="decides which documents are for validation (default: %(default)s)")
    command.add_argument("--split", default="0.95,0.05", metavar="T,V",
                         help="fractions of the documents for train and validation (default: %(default)s)")
    return parser


def _fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise UserError(f"--split {text}: expected two fractions such as 0.95,0.05") from error


def _summary(out: Path, manifest: Manifest, seconds: float) -> str:
    lines = [f"{out} is ready after {seconds:.1f} s: tokenizer {manifest.tokenizer}, "
             f"vocabulary of {manifest.vocab_size:,}"]
    for name, split in manifest.splits.items():
        entropy = split.unigram_entropy
        nats = "" if entropy is None else f", unigram entropy {entropy:.4f} nats/token"
        lines.append(f"  {name:<10} {split.documents:>7,} documents {split.bytes / 1e6:>9,.1f} MB "
                     f"{split.tokens:>13,} tokens{nats}")
    if manifest.skipped_empty_documents or manifest.replaced_invalid_utf8:
        lines.append(f"  skipped {manifest.skipped_empty_documents:,} empty documents, "
                     f"replaced {manifest.replaced_invalid_utf8:,} invalid UTF-8 sequences by U+FFFD")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_cli(main))
