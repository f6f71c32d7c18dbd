"""Rows of fixed length cut from the stream of documents, as the batch contract wants them.

A batch is int32 [B, S]: `input_ids`; `labels`, the next token, or -100 where it belongs to another document
or there is none; `position_ids`, restarting at 0 with each document and each row; `segment_ids`, the number
of the document in its row from 1, and 0 for padding.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared_ops.batch import IGNORED
from shared_ops.data.manifest import load_manifest
from shared_ops.data.token_file import open_tokens
from shared_ops.errors import UserError

Batch = dict[str, np.ndarray]


class PackedDataset:
    """One split of a prepared folder, seen as rows: row i is tokens [i S, i S + S) of its documents' stream.

    The last row is filled up with padding, so that every token is in exactly one row.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int):
        if sequence_length < 1:
            raise UserError(f"sequence_length {sequence_length}: expected at least 1")
        folder = Path(folder)
        manifest = load_manifest(folder)
        if split not in manifest.splits:
            raise UserError(f"{folder}: has no split '{split}', expected {' or '.join(manifest.splits)}")
        self.tokens = open_tokens(folder / split)
        if not len(self.tokens):
            raise UserError(f"{folder}: the split '{split}' has no documents: prepare more text "
                            "(two documents or more fill both splits) or another split")
        self.sequence_length = sequence_length
        self.pad_id = manifest.special_ids.pad
        self.vocab_size = manifest.vocab_size

    def __len__(self) -> int:
        """The number of rows."""
        return -(-len(self.tokens.ids) // self.sequence_length)

    def rows(self, indices: np.ndarray) -> Batch:
        """The batch [n, S] of the rows with these indices, int [n]; `IndexError` for one out of range."""
        indices = np.asarray(indices, np.int64)
        if indices.size and not (0 <= indices.min() and indices.max() < len(self)):
            raise IndexError(f"row {indices.min()} to {indices.max()} of {len(self)}")
        length, total = self.sequence_length, len(self.tokens.ids)
        starts = indices * length
        ids = np.zeros((len(indices), length + 1), np.int32)
        for row, start in zip(ids, starts.tolist()):
            piece = self.tokens.ids[start : start + length + 1]
            row[: len(piece)] = piece
        return _contract(ids, self._boundaries(starts), np.minimum(total - starts, length), self.pad_id)

    def _boundaries(self, starts: np.ndarray) -> np.ndarray:
        """bool [n, S + 1]: whether a document, or the end of the stream, begins at this token of the row."""
        offsets, length = self.tokens.offsets, self.sequence_length
        first = np.searchsorted(offsets, starts, "left")
        count = np.searchsorted(offsets, starts + length, "right") - first
        row = np.repeat(np.arange(len(starts)), count)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        boundaries = np.zeros((len(starts), length + 1), bool)
        boundaries[row, offsets[first[row] + nth] - starts[row]] = True
        return boundaries


def batch_from_documents(rows: Sequence[Sequence[Sequence[int]]], sequence_length: int,
                         pad_id: int = 0) -> Batch:
    """The batch [n, S] of explicit rows, each a list of documents (ids as given), padded at the end.

    A row without documents is all padding. `ValueError` if a row's documents are longer than the row.
    """
    ids = np.zeros((len(rows), sequence_length + 1), np.int32)
    boundaries = np.zeros((len(rows), sequence_length + 1), bool)
    used = np.zeros(len(rows), np.int64)
    for index, documents in enumerate(rows):
        stream = np.array([token for document in documents for token in document], np.int32)
        if len(stream) > sequence_length:
            raise ValueError(f"row {index} has {len(stream)} tokens, expected at most {sequence_length}")
        ids[index, : len(stream)] = stream
        boundaries[index, np.cumsum([0, *map(len, documents)])] = True
        used[index] = len(stream)
    return _contract(ids, boundaries, used, pad_id)


def empty_rows(count: int, sequence_length: int, pad_id: int) -> Batch:
    """A batch [count, S] of padding only."""
    return batch_from_documents([[]] * count, sequence_length, pad_id)


def _contract(ids: np.ndarray, boundaries: np.ndarray, used: np.ndarray, pad_id: int) -> Batch:
    """From ids and boundaries [n, S + 1] (the token after the row included) and the tokens used, [n]."""
    columns = np.arange(ids.shape[1] - 1, dtype=np.int32)
    begins = boundaries[:, :-1] | (columns == 0)
    padding = columns >= used[:, None]
    document_start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return {
        "input_ids": np.where(padding, np.int32(pad_id), ids[:, :-1]),
        "labels": np.where(boundaries[:, 1:] | padding, np.int32(IGNORED), ids[:, 1:]),
        "position_ids": columns - document_start,
        "segment_ids": np.where(padding, np.int32(0), np.cumsum(begins, axis=1, dtype=np.int32)),
    }
