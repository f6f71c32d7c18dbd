"""Long texts in pieces, because the tokenizer library needs about 100 bytes of memory per byte of text."""

from collections.abc import Iterator

PIECE = 1 << 20


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters that add up to it.

    Cuts are at the last line that begins with a visible character: there a byte-level BPE, which never merges
    over a line end and what follows it, yields the same tokens with and without the cut. A text with no such
    line within `size` characters is cut at `size`.
    """
    start = 0
    while len(text) - start > size:
        stop = _last_line(text, start, start + size)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _last_line(text: str, start: int, stop: int) -> int:
    """Where the last line in text[start + 1 : stop + 1] begins, else `stop`."""
    at = stop
    while (line_end := text.rfind("\n", start, at)) >= 0:
        if not text[line_end + 1].isspace():
            return line_end + 1
        at = line_end
    return stop
