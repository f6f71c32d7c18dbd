"""The tokenizer: exact size, same result every time, lossless, one BOS and one EOS whatever the text."""

import json
import time

import pytest
from tokenizers import Tokenizer, models

from shared_ops.data import tokenizer as bpe
from shared_ops.data.pieces import pieces
from shared_ops.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "the quick brown fox, the lazy dog; 12345 12345\r\n" * 3,
         "наука 漢字 é" * 4]
ODD = ["", "\0", "\0\0 a\0", " " * 1000, "\r\n\r", "\ufeffa", "\ufffd", "e\u0301", "\U0001f600", "a" * 5000]


@pytest.fixture(scope="module")
def trained():
    return bpe.train(TEXTS, 300)


def test_exact_size_and_determinism(trained):
    assert trained.vocab_size == 300 and trained.backend.get_vocab_size() == 300
    assert len({trained.bos, trained.eos, trained.pad}) == 3
    assert bpe.train(TEXTS, 300).json == trained.json
    assert bpe.train(TEXTS, 301).json != trained.json


def test_any_text_comes_back(trained):
    for text, ids in zip(TEXTS + ODD, trained.encode(TEXTS + ODD)):
        assert trained.backend.decode(ids[1:-1].tolist(), skip_special_tokens=False) == text
        assert ids.dtype == "int32" and ids.max() < 300


def test_one_bos_and_one_eos_even_if_the_text_spells_them(trained):
    text = f"a{bpe.EOS}{bpe.BOS} b {bpe.PAD}"
    (ids,) = trained.encode([text])
    assert ids[0] == trained.bos and ids[-1] == trained.eos
    assert not {trained.bos, trained.eos, trained.pad} & set(ids[1:-1].tolist())
    assert trained.backend.decode(ids[1:-1].tolist(), skip_special_tokens=False) == text


LINES = "".join(f"def f{i}():\r\n\n    return {i} ** 2  # ...\n\n\n" for i in range(40))


@pytest.mark.parametrize("size", [1, 60, 1000])
def test_long_texts_are_encoded_in_pieces_with_the_same_tokens(trained, monkeypatch, size):
    texts = ["short", LINES, "x", LINES[:900], "\n" * 300 + "a" * 300]
    whole = trained.encode(texts)
    monkeypatch.setattr(bpe, "PIECE", size)
    pieced = trained.encode(texts)
    for text, one, other in zip(texts, whole, pieced):
        assert trained.backend.decode(other[1:-1].tolist(), skip_special_tokens=False) == text
        assert len(one) <= len(other) and (size < 60 or text[0] == "\n" or one.tolist() == other.tolist())
    assert max(map(len, pieces(LINES, 60))) <= 60 and "".join(pieces(LINES, 60)) == LINES


def test_a_tokenizer_that_is_not_divisible_gets_whole_texts(tmp_path, monkeypatch):
    fields = json.loads(bpe.train(TEXTS, 280).json)
    fields["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    loaded = bpe.load(tmp_path / "tokenizer.json")
    whole = loaded.encode([LINES])[0].tolist()
    monkeypatch.setattr(bpe, "PIECE", 60)
    assert loaded.encode([LINES])[0].tolist() == whole


@pytest.mark.parametrize("run", ["\0", " ", "\n", "\t\n", "a", "=", "7", "\u0301", "漢", "\U0001f600", "\1 "])
def test_endless_runs_are_learnt_from_and_encoded_in_linear_time(run):
    text = run * 150_000
    begin = time.monotonic()
    learnt = bpe.train([*TEXTS, text], 262)
    (ids,) = learnt.encode([text])
    assert time.monotonic() - begin < 10, "0.2 s is usual, a minute and more where the time is quadratic"
    assert learnt.backend.decode(ids[1:-1].tolist(), skip_special_tokens=False) == text


def test_too_little_text_names_a_size_that_works():
    with pytest.raises(UserError, match="use train:") as raised:
        bpe.train(TEXTS, 4096)
    reachable = int(str(raised.value).split("use train:")[1].split()[0])
    assert bpe.train(TEXTS, reachable).vocab_size == reachable < 4096


@pytest.mark.parametrize("size", ["", "258", "-5", "1e4", "4096x", "٤٠٩٦", str(2**31)])
def test_impossible_sizes(size):
    with pytest.raises(UserError, match="train:N"):
        bpe.training_size(f"train:{size}")


def test_sizes_and_files_are_told_apart():
    assert bpe.training_size("train:259") == 259
    assert bpe.training_size("models/train.json") is None


def saved(path, names, special=True):
    tokenizer = Tokenizer.from_str(bpe.train(TEXTS, 280).json)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = []
    for old in (bpe.BOS, bpe.EOS, bpe.PAD):
        del fields["model"]["vocab"][old]
    fields["model"]["vocab"] = {token: i for i, token in enumerate(fields["model"]["vocab"])}
    for i, name in enumerate(names):
        token = {"id": 1000 + i, "content": name, "special": special, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False}
        fields["added_tokens"].append(token)
    fields["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("bos, eos, pad", [
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"), ("<s>", "</s>", None),
    ("<|endoftext|>", "<|endoftext|>", None)])
@pytest.mark.parametrize("special", [True, False])
def test_a_file_gives_its_own_special_tokens(tmp_path, bos, eos, pad, special):
    names = list(dict.fromkeys(name for name in (bos, eos, pad) if name))
    loaded = bpe.load(saved(tmp_path / "tokenizer.json", names, special))
    ids = {name: loaded.backend.token_to_id(name) for name in names}
    assert (loaded.bos, loaded.eos, loaded.pad) == (ids[bos], ids[eos], ids[pad or eos])
    assert loaded.vocab_size == 1 + max(loaded.backend.get_vocab().values())
    (document,) = loaded.encode([f"a long text {bos} that is not cut off {eos}"])
    assert len(document) > 12 and not {ids[bos], ids[eos]} & set(document[1:-1].tolist())


def test_wrong_files_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="no such file"):
        bpe.load(path)
    for content in (b"", b"{}", b"\xff\xfe", b"[1]", Tokenizer(models.BPE()).to_str().encode()[:-5]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            bpe.load(path)
    with pytest.raises(UserError, match="no BOS token"):
        bpe.load(saved(path, ["</s>"]))
    with pytest.raises(UserError, match="no EOS token"):
        bpe.load(saved(path, ["<s>"]))
    with pytest.raises(UserError, match="is a folder"):
        bpe.load(tmp_path)
