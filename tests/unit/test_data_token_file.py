"""Token files: values and offsets survive, Megatron's layout is kept, damage is named."""

import struct

import numpy as np
import pytest

from shared_ops.data.token_file import TokenWriter, dtype_for, index_arrays, open_h5, open_tokens, write_h5
from shared_ops.errors import UserError

WIDE = [[65535, 65536, 128799], [129279], [0, 1, 2, 3, 129279]]
NARROW = [[7, 65535], [0, 300, 2], [1]]


def write(prefix, documents, vocab_size):
    with TokenWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document))
    write_h5(prefix, vocab_size)


def megatron(prefix):
    """An independent reading of .bin and .idx, after Megatron-LM's indexed_dataset.py."""
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    at = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    pointers = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", index, at + 12 * sequences)
    assert len(index) == at + 12 * sequences + 8 * entries
    assert documents[0] == 0 and documents[-1] == sequences
    letter = {8: "H", 4: "i"}[code]
    return code, [list(struct.unpack_from(f"<{length}{letter}", data, pointer))
                  for length, pointer in zip(lengths, pointers)], documents


@pytest.mark.parametrize("documents, vocab_size, code", [
    (WIDE, 129280, 4), (NARROW, 65536, 8), (NARROW, 65537, 4)])
def test_every_id_survives_in_megatrons_layout_and_in_h5(tmp_path, documents, vocab_size, code):
    prefix = tmp_path / "v1.train"  # a dot in the name is not a suffix
    write(prefix, documents, vocab_size)
    prefix.with_name("plain.bin").write_bytes((tmp_path / "v1.train.bin").read_bytes())
    prefix.with_name("plain.idx").write_bytes((tmp_path / "v1.train.idx").read_bytes())
    found_code, found, index = megatron(tmp_path / "plain")
    assert (found_code, found, index) == (code, documents, tuple(range(len(documents) + 1)))
    for tokens in (open_tokens(prefix), open_h5(tmp_path / "v1.train.h5")):
        assert [tokens.document(i).tolist() for i in range(len(tokens))] == documents
        assert tokens.offsets.dtype == np.int64 and isinstance(tokens.ids, np.memmap)


@pytest.mark.parametrize("vocab_size, document", [
    (65536, [1, 65536]), (65536, [-1]), (129280, [129280]), (300, [300])])
def test_an_id_that_does_not_fit_raises_and_leaves_no_index(tmp_path, vocab_size, document):
    with pytest.raises(UserError, match=r"t\.bin.*does not fit"):
        write(tmp_path / "t", [[1, 2], document], vocab_size)
    with pytest.raises(UserError, match=r"t\.idx"):
        open_tokens(tmp_path / "t")


def test_uint16_only_where_it_holds_the_vocabulary():
    assert [dtype_for(n).name for n in (300, 65536, 65537, 129280)] == ["uint16", "uint16", "int32", "int32"]
    with pytest.raises(UserError, match="vocab_size"):
        dtype_for(2**31 + 1)


def test_offsets_are_64_bit():
    lengths, pointers, documents = index_arrays(np.full(5, 2**31 - 1), 4)
    assert pointers.tolist() == [i * (2**31 - 1) * 4 for i in range(5)]
    assert (lengths.dtype, pointers.dtype, documents.dtype) == (np.int32, np.int64, np.int64)
    with pytest.raises(UserError, match="2147483648"):
        index_arrays(np.array([1, 2**31]), 2)


def test_no_documents_is_a_valid_file(tmp_path):
    write(tmp_path / "t", [], 300)
    assert megatron(tmp_path / "t") == (8, [], (0,))
    for tokens in (open_tokens(tmp_path / "t"), open_h5(tmp_path / "t.h5")):
        assert len(tokens) == 0 and len(tokens.ids) == 0


def poke(path, offset, data):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize("name, damage", [
    ("t.bin", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    ("t.bin", lambda path: path.write_bytes(path.read_bytes() + b"\0\0")),
    ("t.bin", lambda path: path.unlink()),
    ("t.idx", lambda path: path.unlink()),
    ("t.idx", lambda path: path.write_bytes(b"")),
    ("t.idx", lambda path: path.write_bytes(path.read_bytes()[:-8])),
    ("t.idx", lambda path: poke(path, 0, b"MMIDIDY")),
    ("t.idx", lambda path: poke(path, 9, b"\2")),
    ("t.idx", lambda path: poke(path, 17, b"\7")),
    ("t.idx", lambda path: poke(path, 18, b"\xff" * 8)),
    ("t.idx", lambda path: poke(path, 34, struct.pack("<2i", 3, 2))),  # lengths swapped, the sum kept
    ("t.idx", lambda path: poke(path, 34 + 12 + 8, struct.pack("<q", 6))),  # a pointer off by one token
    ("t.h5", lambda path: path.unlink()),
    ("t.h5", lambda path: path.write_bytes(path.read_bytes()[:-2])),
    ("t.h5", lambda path: path.write_bytes(b"nothing of the kind")),
])
def test_damage_is_named(tmp_path, name, damage):
    write(tmp_path / "t", NARROW, 65536)
    damage(tmp_path / name)
    with pytest.raises(UserError, match=name):
        open_h5(tmp_path / "t.h5") if name == "t.h5" else open_tokens(tmp_path / "t")
