"""The files under construction: any part of any tensor is written where it belongs, from any thread."""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from weight_sync.plan import Target
from weight_sync.stores.base import FilePlan, Span


class Output:
    """Opened files and where each stored tensor lies in them; names are looked up in a target's own folder."""

    def __init__(self, root: Path, files: Mapping[str, FilePlan]):
        self._descriptors: list[int] = []
        self._spans: dict[tuple[str, str], tuple[int, Span]] = {}
        self._starts: dict[str, list[int]] = {}
        try:
            for path, plan in files.items():
                folder = path.rpartition("/")[0]
                descriptor = os.open(root / path, os.O_RDWR)
                self._descriptors.append(descriptor)
                for name, span in plan.locate(root / path).items():
                    self._spans[folder, name] = (descriptor, span)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def write(self, target: Target, position: int, raw: np.ndarray) -> None:
        """Bytes at `position` of a tensor in canonical order, and into its copies."""
        for copy in target.copies:
            self.write_to(target, copy, position, raw)
        starts = self._starts_of(target)
        index = bisect_right(starts, position) - 1
        while len(raw):
            within = position - starts[index]
            room = self._find(target, target.names[index])[1][1] - within
            self.write_to(target, target.names[index], within, raw[:room])
            raw, position, index = raw[room:], position + room, index + 1

    def write_to(self, target: Target, name: str, position: int, raw: np.ndarray) -> None:
        """Bytes at `position` of one stored tensor."""
        descriptor, (offset, length) = self._find(target, name)
        if position + len(raw) > length:
            raise ValueError(f"{name}: {len(raw)} bytes at {position} of {length}")
        view, at = memoryview(raw), offset + position
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written

    def nbytes(self, target: Target) -> int:
        """All bytes that are stored for a target."""
        return sum(self._find(target, name)[1][1] for name in _all_names(target))

    def checksum(self, target: Target) -> str:
        """xxh3 of what the files hold of a target now: of its parts, and of its scales; "" where a copy differs."""
        parts = self._digest(target, target.names)
        if any(self._digest(target, [copy]) != parts for copy in target.copies):
            return ""
        return parts + (self._digest(target, target.scales) if target.scales else "")

    def _digest(self, target: Target, names: Sequence[str]) -> str:
        digest, buffer = xxhash.xxh3_64(), bytearray(1 << 20)
        for name in names:
            descriptor, (offset, length) = self._find(target, name)
            while length:
                view = memoryview(buffer)[: min(length, len(buffer))]
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    return ""
                digest.update(view[:count])
                offset, length = offset + count, length - count
        return digest.hexdigest()

    def _find(self, target: Target, name: str) -> tuple[int, Span]:
        folder = target.tensor.key.partition("/")[0]
        return self._spans.get((folder, name)) or self._spans["", name]

    def _starts_of(self, target: Target) -> list[int]:
        """Where each of a target's parts begins in its canonical bytes."""
        starts = self._starts.get(target.tensor.key)
        if starts is None:
            starts, at = [], 0
            for name in target.names:
                starts.append(at)
                at += self._find(target, name)[1][1]
            self._starts[target.tensor.key] = starts
        return starts


def _all_names(target: Target) -> tuple[str, ...]:
    return (*target.names, *target.scales, *target.copies)
