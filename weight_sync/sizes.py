"""Numbers of bytes in words, read and written."""

import re

from shared_ops.errors import UserError


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500MB", "1e9"."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    try:
        value = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{text!r} is no size: expected something like 2GiB, 500MB or 1000000") from None
    if not 1 <= value < 1 << 60:
        raise UserError(f"{text!r} is no size: expected at least one byte, and less than an exabyte")
    return int(value)


def sized(count: int) -> str:
    """A number of bytes in words: 3.2 GiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{count} B"
