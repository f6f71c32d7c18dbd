"""Training states on disk: framework free, device free, whole or not there.

    checkpoints/step_00000100/
      state.h5        contiguous datasets "params/model.norm.weight", "adam_m/…", "adam_v/…"; bf16 as its
                      uint16 bits with the attribute dtype = "bfloat16"
      manifest.json   {"format", "format_version", "step", "meta": {config, consumed_samples, digests, …},
                       "files": {"state.h5": {"size", "xxh3_64"}}, "checksum": xxh3_64 of all the rest}

In a job of several ranks each writes a shard, `state-00000-of-00004.h5` (the reader takes any file names and any number
of them). A dataset that is only a part of an array has the attributes global_shape and global_offset, where it lies in
the whole; the reader puts the pieces together.

A step folder is written under a temporary name in the same folder, files and folders are synced, the
manifest comes last, and a rename makes it a step folder. So a kill, a full disk or a power cut at any
moment leaves all former step folders and at most a temporary one, which the next writer removes. The
writer (rank 0) holds a lock on its temporary folder (the kernel frees it with the process), which is how the next
one knows a dead writer's folder from a living one's. The temporary name has a token that the ranks agree on, so that a
straggler of a dead job can never write into a living one's folder. Where a step folder exists already, it is renamed to
`.replaced-step_…` for the moment until the new one has its name; readers take that one if the moment was
cut short.
"""

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Self

import h5py
import ml_dtypes
import numpy as np
import xxhash

from shared_ops.errors import UserError
from shared_ops.files import sync, write_atomically

FORMAT, FORMAT_VERSION = "training-state", 1
MANIFEST, STATE = "manifest.json", "state.h5"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_STEP = re.compile(r"(?:\.replaced-)?step_(\d{8,})")
_OTHER_CHOICE = "choose another step folder (or --resume auto, which takes the newest complete one)"
_MOVE_AWAY = "choose another step folder, or move this one away and give --resume auto, which takes the newest left"
_SAME_MODEL = "resume with the model configuration that the state was written with"
OPEN_SHARDS = 32  # files that a reader keeps open: there may be more shards than a process may open
_STALE_SECONDS = 24 * 3600  # a temporary folder's age on file systems that know no locks


class ArraySlice(NamedTuple):
    """A part of a larger array: `array` lies at `offset` of an array of shape `global_shape`."""

    array: np.ndarray
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]


# --- writing ------------------------------------------------------------------------------------------------


def write_step(
    checkpoints_dir: Path,
    step: int,
    arrays: Iterable[tuple[str, np.ndarray | ArraySlice]],
    meta: Mapping[str, Any],
    rank: int = 0,
    ranks: int = 1,
    total: Callable[[float], float] = float,
) -> Path:
    """Write one step folder and return its path; an existing one of that step is replaced.

    All ranks of a job call it together, each with its share of the arrays. `total(number)` is the sum of a number over
    the ranks, exact for integers below 2^24, and waits for all of them. `arrays` is consumed one by one, so a generator
    keeps memory low. `meta` must be plain JSON.

    `UserError` when the disk refuses; former step folders are untouched then. A rank that fails raises its own error
    after all have ended their shards, and rank 0 removes them; the other ranks then wait for that error to end the job.
    """
    with StepWriter(checkpoints_dir, step, meta) if rank == 0 else contextlib.nullcontext() as writer:
        token = int(total(writer.token if writer else 0))  # now the folder is there
        folder, error = _temporary_folder(Path(checkpoints_dir), step, token), None
        try:
            _write_share(folder, _shard_name(rank, ranks), arrays)
        except Exception as caught:  # noqa: BLE001  the other ranks must hear of any
            error = caught
        failed = total(float(error is not None)) > 0
        if failed and writer:
            writer.discard()
        if error:
            raise error
        if failed:
            total(0.0)
            raise RuntimeError(f"step {step} is not saved: another rank could not write its share")
        if writer:
            writer.publish(_facts_of_shards(folder, ranks))
    return _step_folder(Path(checkpoints_dir), step)


def _shard_name(rank: int, ranks: int) -> str:
    return STATE if ranks == 1 else f"state-{rank:05d}-of-{ranks:05d}.h5"


def _step_folder(checkpoints_dir: Path, step: int) -> Path:
    return checkpoints_dir / f"step_{step:08d}"


def _temporary_folder(checkpoints_dir: Path, step: int, token: int) -> Path:
    return checkpoints_dir / f".tmp-{_step_folder(checkpoints_dir, step).name}-{token:06x}"


def _write_share(folder: Path, name: str, arrays: Iterable[tuple[str, np.ndarray | ArraySlice]]) -> None:
    """Write a rank's shard into rank 0's temporary folder, and its facts beside it."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: rank 0 has made this folder to save in, and another rank does not see it: run.dir must be on "
            "a file system that all machines share"
        )
    facts = write_shard(folder / name, arrays)
    with _disk_errors(folder / name):
        write_atomically(folder / f"{name}.json", json.dumps(facts))


def _facts_of_shards(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """What the ranks' `_write_share` left, for the manifest."""
    facts = {}
    for name in (_shard_name(rank, ranks) for rank in range(ranks)):
        path = folder / f"{name}.json"
        with _disk_errors(path):
            facts[name] = json.loads(path.read_bytes())
            path.unlink()
    return facts


class StepWriter:
    """Writes a step folder in parts: make it on one rank, let every rank `write_shard` a file of its own into
    `.folder`, then `publish` on the first rank with what the ranks' `write_shard` returned."""

    def __init__(self, checkpoints_dir: Path, step: int, meta: Mapping[str, Any]):
        # Before anything is on disk: a value that is no JSON must not cost a half-written state.
        self.meta = json.loads(json.dumps(dict(meta), allow_nan=False))
        self.step = int(step)
        self.checkpoints_dir = Path(checkpoints_dir)
        self.target = _step_folder(self.checkpoints_dir, self.step)
        self.token = secrets.randbelow(1 << 24)
        self.folder = _temporary_folder(self.checkpoints_dir, self.step, self.token)
        self._lock = None
        with _disk_errors(self.target):
            self.checkpoints_dir.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.checkpoints_dir)
            self.folder.mkdir()
            self._lock = _lock(self.folder)

    def publish(self, files: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write the manifest and give the folder its name; `files` maps each shard's name to its facts."""
        with _disk_errors(self.target):
            sync(self.folder)
            seal(self.folder, self.step, self.meta, files)
            replaced = self.checkpoints_dir / f".replaced-{self.target.name}"
            if self.target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(self.target, replaced)
            os.rename(self.folder, self.target)
            sync(self.checkpoints_dir)
            shutil.rmtree(replaced, ignore_errors=True)
        self._unlock()
        return self.target

    def discard(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()


def write_shard(path: Path, arrays: Iterable[tuple[str, np.ndarray | ArraySlice]]) -> dict[str, Any]:
    """Write arrays into one HDF5 file, synced; returns its size and checksum for `StepWriter.publish`."""
    with _disk_errors(path):
        disk = _Disk(path)
    with disk:
        with h5py.File(disk, "w") as file:
            for name, value in arrays:  # what their producer raises goes through as it is
                _write_array(file, name, value)
                disk.check()
        disk.check()
    with _disk_errors(path):
        sync(path)
        return file_facts(path)


class _Disk(io.FileIO):
    """The file that h5py writes a shard to. HDF5 crashes after a disk has refused its metadata, so it never hears of
    it: what failed is kept for `check`, and what would be written after it goes nowhere."""

    def __init__(self, path: Path):
        super().__init__(path, "w+")
        self.path = path
        self._error: OSError | None = None

    def write(self, data: memoryview) -> None:
        """All of it, or as far as the disk goes."""
        try:
            while self._error is None and len(data):
                data = data[super().write(data) :]
        except OSError as error:
            self._error = error

    def truncate(self, size: int) -> None:
        """HDF5 sets the file's length when it closes it."""
        try:
            super().truncate(size)
        except OSError as error:
            self._error = self._error or error

    def check(self) -> None:
        """`UserError` for what the disk has refused."""
        if self._error is not None:
            with _disk_errors(self.path):
                raise self._error


def _write_array(file: h5py.File, name: str, value: np.ndarray | ArraySlice) -> None:
    array = np.asarray(value.array if isinstance(value, ArraySlice) else value)
    if not name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is no name for an array")
    if name in file:
        raise ValueError(f"{name} is given twice")
    dtype = array.dtype.newbyteorder("=") if array.dtype.kind in "iufb" else array.dtype
    if dtype != BFLOAT16 and dtype.kind not in "iufb":
        raise ValueError(f"{name} has dtype {array.dtype}, which a training state does not hold")
    array = np.asarray(array, dtype=dtype, order="C")
    stored = array.view(np.uint16) if dtype == BFLOAT16 else array
    dataset = file.create_dataset(name, data=stored, track_times=False)  # no times: equal states, equal files
    if dtype == BFLOAT16:
        dataset.attrs["dtype"] = dtype.name
    if not isinstance(value, ArraySlice):
        return
    shape, offset = value.global_shape, value.offset
    if (
        len(shape) != array.ndim
        or len(offset) != array.ndim
        or any(o < 0 or o + n > g for o, n, g in zip(offset, array.shape, shape))
    ):
        raise ValueError(
            f"{name}: a slice of shape {array.shape} at {offset} is not in an array of shape {shape}"
        )
    dataset.attrs["global_shape"] = np.asarray(shape, dtype=np.int64)
    dataset.attrs["global_offset"] = np.asarray(offset, dtype=np.int64)


def clean_leftovers(checkpoints_dir: Path) -> None:
    """Remove what dead writers left; a step folder whose replacement was cut short gets its name back."""
    for path in list(Path(checkpoints_dir).glob(".*")):
        if path.name.startswith(".replaced-"):
            original = path.with_name(path.name.removeprefix(".replaced-"))
            if original.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.rename(path, original)
        elif path.name.startswith(".deleted-") or path.name.startswith(".tmp-") and not _alive(path):
            shutil.rmtree(path, ignore_errors=True)


def rotate(checkpoints_dir: Path, limit: int | None) -> list[Path]:
    """Remove all but the newest `limit` complete step folders; returns the removed ones. None keeps all.

    Call it after a successful `write_step` only. Damaged folders do not count, so they never push out a
    good one; they go when all kept ones are newer.
    """
    if limit is None:
        return []
    if limit < 1:
        raise ValueError(f"a run keeps at least one checkpoint, not {limit}")
    folders = _step_folders(checkpoints_dir)
    complete = [step for step, folder in folders if _damage(folder) is None]
    if len(complete) <= limit:
        return []
    oldest_kept = complete[limit - 1]
    removed = []
    for step, folder in folders:
        if step < oldest_kept:
            doomed = folder.with_name(f".deleted-{folder.name}")
            os.rename(folder, doomed)  # at no moment is there a step folder without some of its files
            shutil.rmtree(doomed, ignore_errors=True)
            removed.append(folder)
    return removed


# --- reading ------------------------------------------------------------------------------------------------


def latest_step(checkpoints_dir: Path, on_damage: Callable[[str], None] | None = None) -> Path | None:
    """The newest step folder whose manifest is whole and whose files have their sizes; None without one.

    `on_damage` gets a message for every newer folder that is passed over. Checksums are left to `read_step`.
    """
    for _, folder in _step_folders(checkpoints_dir):
        damage = _damage(folder)
        if damage is None:
            return folder
        if on_damage:
            on_damage(f"passing over a damaged checkpoint: {damage}")
    return None


def read_step(folder: Path, verify: bool = True) -> tuple[dict[str, Any], "StepReader"]:
    """Open a step folder: (`meta` with `step` added, reader). `UserError` for any damage.

    Sizes are always checked; `verify` also reads all files once for their checksums, which is enough on
    one rank of a job.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    _check_sizes(folder, manifest)
    if verify:
        for name, facts in manifest["files"].items():
            if _file_checksum(folder / name) != facts["xxh3_64"]:
                raise UserError(
                    f"{folder / name}: damaged or exchanged, its checksum is not the manifest's; {_MOVE_AWAY}"
                )
    return {**manifest["meta"], "step": manifest["step"]}, StepReader(folder, list(manifest["files"]))


class _Piece(NamedTuple):
    """A dataset: the file and the dtype it is stored in, and where it lies in the whole array."""

    file: str
    stored: np.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StepReader:
    """The arrays of a step folder by canonical name, read when asked for; a context manager.

    `reader[name]` is a whole array, `reader.slice(name, index)` reads only that part of the files; any thread may ask.
    """

    def __init__(self, folder: Path, files: Iterable[str]):
        self.folder = Path(folder)
        self._files: dict[str, h5py.File] = {}  # the open ones, the last used last
        self._reading = threading.Lock()  # no thread may close a file that another one reads
        self._pieces: dict[str, list[_Piece]] = {}
        self._facts: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for file in files:
            try:
                self._open(file).visititems(lambda name, item, file=file: self._index(file, name, item))
            except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
                self.close()
                raise UserError(f"{self.folder / file}: cannot be read as HDF5 ({error}); {_OTHER_CHOICE}") from error
        for name, pieces in self._pieces.items():
            held, whole = sum(math.prod(piece.shape) for piece in pieces), math.prod(self.shape(name))
            twice = any(_overlap(a, b) for a, b in combinations(pieces, 2))
            if held != whole or twice:
                self.close()
                raise UserError(
                    f"{self.folder}: the shards hold {held} of the {whole} elements of {name}"
                    f"{', some of them twice' if twice else ''}; {_OTHER_CHOICE}"
                )

    def _open(self, file: str) -> h5py.File:
        """One of the files, of which only a few are open at a time."""
        self._files[file] = self._files.pop(file, None) or h5py.File(self.folder / file, "r", locking=False)
        if len(self._files) > OPEN_SHARDS:
            self._files.pop(next(iter(self._files))).close()
        return self._files[file]

    def _index(self, file: str, name: str, item: h5py.Group | h5py.Dataset) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        # Most have none, and finding that out the long way is slow for thousands of arrays.
        attributes = dict(item.attrs) if h5py.h5a.get_num_attrs(item.id) else {}
        if item.is_virtual or item.external:
            raise ValueError(f"{name} has its data in another file")
        stored = item.dtype
        dtype = BFLOAT16 if attributes.get("dtype") == "bfloat16" else stored
        if dtype.itemsize != stored.itemsize:
            raise ValueError(f"{name} is declared {dtype} but holds {stored}")
        facts = dtype, tuple(int(n) for n in attributes.get("global_shape", item.shape))
        if self._facts.setdefault(name, facts) != facts:
            raise ValueError(f"{name} has another dtype or shape in another shard")
        offset = tuple(int(n) for n in attributes.get("global_offset", [0] * item.ndim))
        self._pieces.setdefault(name, []).append(_Piece(file, stored, offset, item.shape))

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._fact(name)[1]

    def dtype(self, name: str) -> np.dtype:
        """Its dtype, ml_dtypes' bfloat16 included."""
        return self._fact(name)[0]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.slice(name, ...)

    def slice(self, name: str, index: Any) -> np.ndarray:
        """`whole_array[index]` for integers, slices of step 1 and an ellipsis, without reading the rest."""
        dtype, shape = self._fact(name)
        spans, dropped = _spans(name, index, shape)
        pieces = self._pieces[name]
        stored = np.empty([stop - start for start, stop in spans], dtype=pieces[0].stored)
        try:
            for piece in pieces:
                # The part of this piece that was asked for, in the piece's and in the result's coordinates.
                cut = [
                    (max(start, o), min(stop, o + n))
                    for (start, stop), o, n in zip(spans, piece.offset, piece.shape)
                ]
                if all(low < high for low, high in cut):
                    source = tuple(slice(low - o, high - o) for (low, high), o in zip(cut, piece.offset))
                    target = tuple(
                        slice(low - start, high - start) for (low, high), (start, _) in zip(cut, spans)
                    )
                    with self._reading:
                        stored[target] = self._open(piece.file)[name][source]
        except (OSError, KeyError) as error:
            raise UserError(f"{self.folder}: {name} cannot be read ({error}); {_OTHER_CHOICE}") from error
        array = stored.view(BFLOAT16) if dtype == BFLOAT16 else stored
        return (
            array[tuple(0 if axis in dropped else slice(None) for axis in range(len(shape)))]
            if dropped
            else array
        )

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        dtypes: Collection[np.dtype | type] | None = None,
        prefix: str = "",
        advice: str = _SAME_MODEL,
    ) -> None:
        """`UserError` unless the state holds exactly these arrays, name → shape, each in one of `dtypes` (None: any).

        `prefix`: only names that begin so are looked at.
        """
        check_names((n for n in self._pieces if n.startswith(prefix)), expected, str(self.folder), advice)
        wrong = [
            f"{name} is {list(self.shape(name))}, expected {list(shape)}"
            for name, shape in expected.items()
            if self.shape(name) != tuple(shape)
        ]
        if wrong:
            raise UserError(f"{self.folder}: shapes differ from the model's: {_listed(wrong)}; {advice}")
        if dtypes is not None:
            known = [np.dtype(dtype) for dtype in dtypes]
            wrong = [f"{name} is {self.dtype(name)}" for name in expected if self.dtype(name) not in known]
            if wrong:
                raise UserError(f"{self.folder}: {_listed(wrong)}; expected {' or '.join(map(str, known))}")

    def _fact(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        if name not in self._facts:
            raise UserError(f"{self.folder}: holds no array {name}")
        return self._facts[name]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_names(found: Iterable[str], expected: Iterable[str], where: str, advice: str = _SAME_MODEL) -> None:
    """`UserError` naming what is missing and what is too much, unless the two sets are equal."""
    found, expected = set(found), set(expected)
    parts = []
    if missing := sorted(expected - found):
        parts.append(f"{len(missing)} missing: {_listed(missing)}")
    if extra := sorted(found - expected):
        parts.append(f"{len(extra)} not expected: {_listed(extra)}")
    if parts:
        raise UserError(f"{where}: its arrays are not the model's; {'; '.join(parts)}; {advice}")


def _overlap(a: _Piece, b: _Piece) -> bool:
    """Whether two pieces of one array have elements in common."""
    corners = zip(a.offset, a.shape, b.offset, b.shape)
    return all(max(i, j) < min(i + n, j + m) for i, n, j, m in corners)


def _listed(names: list[str], limit: int = 10) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


def _spans(name: str, index: Any, shape: tuple[int, ...]) -> tuple[list[tuple[int, int]], set[int]]:
    """An index as (start, stop) per axis, and the axes that an integer drops."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{name} has {len(shape)} axes, the index {index} has {len(parts)}")
    spans, dropped = [], set()
    for axis, (part, size) in enumerate(zip(parts, shape)):
        if isinstance(part, slice):
            start, stop, stride = part.indices(size)
            if stride != 1:
                raise IndexError(f"{name}: only slices of step 1 can be read, not {part}")
            spans.append((start, max(start, stop)))
        else:
            position = int(part) + (size if part < 0 else 0)
            if not 0 <= position < size:
                raise IndexError(f"{name}: {part} is outside axis {axis} of {size}")
            spans.append((position, position + 1))
            dropped.add(axis)
    return spans, dropped


# --- the manifest -------------------------------------------------------------------------------------------


def _step_folders(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder), newest first; a `.replaced-` folder only where its step has no other."""
    found: dict[int, Path] = {}
    if Path(checkpoints_dir).is_dir():
        for path in sorted(Path(checkpoints_dir).iterdir()):  # "." sorts before "s"
            if (match := _STEP.fullmatch(path.name)) and path.is_dir():
                found[int(match[1])] = path
    return sorted(found.items(), reverse=True)


def _damage(folder: Path) -> str | None:
    """What is wrong with a step folder as far as manifest and sizes tell."""
    try:
        _check_sizes(folder, _manifest(folder))
    except UserError as error:
        return str(error)
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a step folder such as checkpoints/step_00000100")
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("not an object")
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing, so this is no complete step folder; {_OTHER_CHOICE}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {_OTHER_CHOICE}") from error
    if manifest.get("format") != FORMAT or manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format {manifest.get('format')!r} version {manifest.get('format_version')!r}; this "
            f"program reads {FORMAT!r} version {FORMAT_VERSION}: use the version that wrote it"
        )
    if manifest.pop("checksum", None) != _manifest_checksum(manifest):
        raise UserError(f"{path}: damaged or edited, its checksum does not fit; {_OTHER_CHOICE}")
    return manifest


def _check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    for name, facts in manifest["files"].items():
        path = folder / name
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise UserError(f"{folder / MANIFEST}: names the file {name!r}, which is not in its folder")
        if not path.is_file():
            raise UserError(f"{path}: missing, though the manifest names it; {_OTHER_CHOICE}")
        if path.stat().st_size != facts["size"]:
            raise UserError(
                f"{path}: {path.stat().st_size} bytes, the manifest says {facts['size']}: it was cut off "
                f"or changed; {_OTHER_CHOICE}"
            )


def seal(folder: Path, step: int, meta: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest of a folder whose shards are complete; `files` maps their names to `file_facts`."""
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        "meta": dict(meta),
        "files": {name: dict(facts) for name, facts in files.items()},
    }
    _check_sizes(folder, manifest)
    manifest["checksum"] = _manifest_checksum(manifest)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a shard."""
    return {"size": path.stat().st_size, "xxh3_64": _file_checksum(path)}


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def _file_checksum(path: Path) -> str:
    digest, buffer = xxhash.xxh3_64(), bytearray(1 << 22)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


# --- locks and disk errors ----------------------------------------------------------------------------------


def _lock(folder: Path) -> int | None:
    """Hold a lock on a folder until the descriptor is closed or the process ends; None without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _alive(folder: Path) -> bool:
    """Whether a writer still works on a temporary folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: only age tells
        try:
            return time.time() - folder.stat().st_mtime < _STALE_SECONDS
        except OSError:
            return False
    finally:
        os.close(descriptor)


class _disk_errors:
    """Turns a disk's refusal into a `UserError` that says which."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            advice = (
                "free some space, or lower checkpoint.save_total_limit"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "check the folder's permissions and free space"
            )
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; {advice}. Checkpoints written before are untouched"
            ) from error
