"""Byte-level BPE: trained on the corpus, or read from a `tokenizer.json`.

A document is [BOS, tokens of the text…, EOS]. Both are put there by id; the text itself never yields them,
not even where it spells them out.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared_ops.data.pieces import PIECE, pieces
from shared_ops.errors import UserError

BOS, EOS, PAD = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>"
_BOS_NAMES = ("<｜begin▁of▁sentence｜>", BOS, "<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>")
_EOS_NAMES = ("<｜end▁of▁sentence｜>", EOS, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")
_PAD_NAMES = ("<｜▁pad▁｜>", PAD, "<pad>", "[PAD]")
_SMALLEST = 3 + 256

# How DeepSeek-V3's tokenizer cuts text before merging: digits by three, runs of Chinese and Japanese, words
# with one leading character, punctuation, line ends, spaces. Two differences: runs are at most 128 long, as
# the time to learn from one cut grows with the square of its length (a megabyte of spaces would take hours);
# and for the same reason the last rule cuts runs of what is none of these, such as NUL.
_CUTS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]{1,128}",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]{1,128}|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]{1,128}"""
    r"| ?[\p{P}\p{S}]{1,128}[\r\n]{0,128}|\s{0,128}[\r\n]{1,128}|\s{1,128}(?!\S)|\s{1,128}"
    r"|[^\s\p{L}\p{M}\p{N}\p{P}\p{S}]{1,128}",
)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the ids of its special tokens.

    `json` is the text of its `tokenizer.json`. `divisible`: whether a text cut before a line has the same
    tokens (not so for tokenizers that put something in front of each text).
    """

    backend: Tokenizer
    json: str
    bos: int
    eos: int
    pad: int
    vocab_size: int
    divisible: bool

    @property
    def digest(self) -> str:
        """xxh3-128 of `json`, hex."""
        return xxhash.xxh3_128_hexdigest(self.json.encode("utf-8"))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text's document, int32 [2 + tokens]: BOS, the text's tokens, EOS."""
        long = [self.divisible and len(text) > PIECE for text in texts]
        short = iter(_encode(self.backend, [text for text, is_long in zip(texts, long) if not is_long]))
        return [self._document(self._encode_long(text) if is_long else next(short))
                for text, is_long in zip(texts, long)]

    def _encode_long(self, text: str) -> np.ndarray:
        return np.concatenate([np.array(_encode(self.backend, [piece])[0], np.int32)
                               for piece in pieces(text, PIECE)])

    def _document(self, ids: list[int] | np.ndarray) -> np.ndarray:
        document = np.empty(len(ids) + 2, np.int32)
        document[0], document[-1] = self.bos, self.eos
        body = document[1:-1]
        body[:] = ids
        if ((body == self.bos) | (body == self.eos)).any():
            raise UserError("tokenizer: ordinary text yields the id of BOS or EOS: list both in added_tokens")
        return document


def training_size(tokenizer: str) -> int | None:
    """N of `train:N`, None for anything else (a file); `UserError` when N is no possible size."""
    kind, colon, number = tokenizer.partition(":")
    if kind != "train" or not colon:
        return None
    if not (number.isascii() and number.isdigit()) or not _SMALLEST <= int(number) < 2**31:
        raise UserError(f"tokenizer {tokenizer}: expected train:N with N, the size of the vocabulary, at "
                        f"least {_SMALLEST} (3 special tokens and 256 bytes)")
    return int(number)


def train(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Learn `vocab_size` tokens, specials (ids 0, 1, 2) and bytes included: a pure function of the texts.

    A pair of tokens seen only once is not merged. `UserError` when the texts do not hold enough pairs.
    Long texts are looked at in pieces.
    """
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text, PIECE)), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise UserError(f"tokenizer train:{vocab_size}: the training text yields at most {reached} tokens: "
                        f"use train:{reached} or less, or more text")
    return _parse(tokenizer.to_str(pretty=True), f"train:{vocab_size}")


def load(path: Path) -> TextTokenizer:
    """Read a `tokenizer.json`; `UserError` when it is none, or has no known BOS or EOS."""
    if path.is_dir():
        raise UserError(f"tokenizer {path}: is a folder, expected a file such as {path / 'tokenizer.json'}")
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"tokenizer {path}: no such file, expected a tokenizer.json or train:N") from error
    except OSError as error:
        raise UserError(f"tokenizer {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"tokenizer {path}: is not UTF-8 text, expected a tokenizer.json") from error
    return _parse(text, str(path))


@contextmanager
def library_threads(parallel: bool) -> Iterator[None]:
    """Let the tokenizer library start threads of its own, or not, inside the block.

    Afterwards its setting is what the user had set, else off: left open, the library would warn on every
    later fork of this process.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name, "false")
    os.environ[name] = "true" if parallel else "false"
    try:
        yield
    finally:
        os.environ[name] = before


def _parse(text: str, origin: str) -> TextTokenizer:
    try:
        fields = json.loads(text)
        backend = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception, whatever is wrong with the file
        raise UserError(f"tokenizer {origin}: is no tokenizer.json: {error}") from error
    bos = _find(backend, _BOS_NAMES, "BOS", origin)
    eos = _find(backend, _EOS_NAMES, "EOS", origin)
    pad = next((name for name in _PAD_NAMES if backend.token_to_id(name) is not None), eos)
    backend = Tokenizer.from_str(json.dumps(_with_special(fields, {bos, eos, pad})))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # text that spells a special token is text
    vocab_size = 1 + max(backend.get_vocab().values())
    whole, first, second = _encode(backend, ["a b\nc d", "a b\n", "c d"])
    return TextTokenizer(backend, text, *map(backend.token_to_id, (bos, eos, pad)), vocab_size,
                         divisible=whole == first + second)


def _encode(backend: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _find(backend: Tokenizer, names: Sequence[str], what: str, origin: str) -> str:
    for name in names:
        if backend.token_to_id(name) is not None:
            return name
    raise UserError(f"tokenizer {origin}: has no {what} token, expected one of {' '.join(names)}")


def _with_special(fields: dict, names: set[str]) -> dict:
    """The tokenizer with these added tokens marked special: without the mark, text could yield them."""
    added = [{**token, "special": token["special"] or token["content"] in names}
             for token in fields.get("added_tokens", [])]
    return {**fields, "added_tokens": added}
