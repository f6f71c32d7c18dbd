"""Packed rows: the batch contract, against a token-by-token account of it in plain Python."""

import numpy as np
import pytest

from shared_ops.data.packing import PackedDataset, batch_from_documents
from shared_ops.data.prepare import prepare
from shared_ops.data.sampler import validation_batches
from shared_ops.data.token_file import open_tokens
from shared_ops.errors import UserError

KEYS = ["input_ids", "labels", "position_ids", "segment_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("packing")
    for i in range(12):
        (root / f"text{i:02}.txt").write_text("".join(chr(97 + (i * k) % 26) for k in range(1, 4 + 9 * i)))
    prepare([str(root)], root / ".out", "train:259", 1, (0.8, 0.2), 1, quiet=True)
    return root / ".out"


def account(documents, length, pad):
    """The contract, one token after the other, for the whole stream."""
    stream = [(document, token) for document, tokens in enumerate(documents) for token in tokens]
    rows = []
    for start in range(0, len(stream), length):
        row = {name: [] for name in KEYS}
        for column in range(length):
            at = start + column
            if at >= len(stream):
                values = (pad, -100, None, 0)
            else:
                document, token = stream[at]
                new = column == 0 or stream[at - 1][0] != document
                position = 0 if new else row["position_ids"][-1] + 1
                segment = 1 if column == 0 else row["segment_ids"][-1] + new
                follows = at + 1 < len(stream) and stream[at + 1][0] == document
                values = (token, stream[at + 1][1] if follows else -100, position, segment)
            for name, value in zip(KEYS, values):
                row[name].append(value)
        rows.append(row)
    return rows


@pytest.mark.parametrize("length", [1, 2, 7, 16, 61, 4096])
def test_rows_are_the_contract(folder, length):
    dataset = PackedDataset(folder, "train", length)
    tokens = open_tokens(folder / "train")
    documents = [tokens.document(i).tolist() for i in range(len(tokens))]
    expected = account(documents, length, dataset.pad_id)
    assert len(documents) > 5 and len(dataset) == len(expected)
    order = np.random.default_rng(0).permutation(len(dataset))
    batch = dataset.rows(order)
    for name in KEYS:
        assert batch[name].dtype == np.int32 and batch[name].shape == (len(dataset), length)
        for found, index in zip(batch[name].tolist(), order):
            wanted = expected[index][name]
            assert [f for f, w in zip(found, wanted) if w is not None] == [w for w in wanted if w is not None]


def test_documents_begin_with_the_only_bos_and_no_label_crosses(folder):
    dataset = PackedDataset(folder, "train", 32)
    batch = dataset.rows(np.arange(len(dataset)))
    ids, labels, segments = (batch[name] for name in ("input_ids", "labels", "segment_ids"))
    assert (ids == 0).sum() == (ids == 1).sum() == len(dataset.tokens)
    assert (labels[ids == 1] == -100).all(), "after EOS comes another document"
    assert not (labels == 0).any(), "BOS is never predicted"
    # Everything else inside the stream has a label: each document loses exactly one.
    assert (labels != -100).sum() == (segments != 0).sum() - len(dataset.tokens)


def test_explicit_documents_with_padding():
    batch = batch_from_documents([[[5, 6, 7], [8, 9]], [], [[1, 2, 3, 4, 5, 6, 7]], [[4], [5]]], 7, pad_id=99)
    assert batch["input_ids"].tolist() == [
        [5, 6, 7, 8, 9, 99, 99], [99] * 7, [1, 2, 3, 4, 5, 6, 7], [4, 5] + [99] * 5]
    assert batch["labels"].tolist() == [
        [6, 7, -100, 9, -100, -100, -100], [-100] * 7, [2, 3, 4, 5, 6, 7, -100], [-100] * 7]
    assert batch["segment_ids"].tolist() == [
        [1, 1, 1, 2, 2, 0, 0], [0] * 7, [1] * 7, [1, 2, 0, 0, 0, 0, 0]]
    assert batch["position_ids"][0, :5].tolist() == [0, 1, 2, 0, 1]
    assert all(values.dtype == np.int32 for values in batch.values())
    with pytest.raises(ValueError, match="row 1"):
        batch_from_documents([[[1]], [[1, 2, 3]]], 2)


def test_rows_and_explicit_documents_agree(folder):
    dataset = PackedDataset(folder, "validation", 4096)
    documents = [dataset.tokens.document(i) for i in range(len(dataset.tokens))]
    explicit = batch_from_documents([documents], 4096, dataset.pad_id)
    found = dataset.rows(np.array([0]))
    for name in KEYS:
        np.testing.assert_array_equal(found[name], explicit[name])


def test_rows_out_of_range(folder):
    dataset = PackedDataset(folder, "train", 16)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.rows(np.array([0, index]))
    assert dataset.rows(np.array([], np.int64))["labels"].shape == (0, 16)


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_sees_each_row_once_in_order_and_pads_the_last_batch(folder, world_size):
    dataset = PackedDataset(folder, "train", 16)
    for rows in (1, 4, 7, 10**6):
        ranks = [list(validation_batches(dataset, rows, 4, rank, world_size)) for rank in range(world_size)]
        batches = [np.concatenate([part["labels"] for part in parts]) for parts in zip(*ranks)]
        expected = dataset.rows(np.arange(min(rows, len(dataset))))["labels"]
        assert all(len(batch) == 4 for batch in batches)
        found = np.concatenate(batches)
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert (found[len(expected):] == -100).all() and len(found) - len(expected) < 4


def test_a_split_without_documents_says_so(tmp_path):
    (tmp_path / "one.txt").write_text("one document only")
    prepare([str(tmp_path / "one.txt")], tmp_path / "out", "train:259", 0, (0.5, 0.5), 1, quiet=True)
    assert len(PackedDataset(tmp_path / "out", "train", 8)) == 3
    with pytest.raises(UserError, match="'validation' has no documents"):
        PackedDataset(tmp_path / "out", "validation", 8)
    with pytest.raises(UserError, match="no split 'test'"):
        PackedDataset(tmp_path / "out", "test", 8)
    with pytest.raises(UserError, match="no prepared data"):
        PackedDataset(tmp_path / "nowhere", "train", 8)
