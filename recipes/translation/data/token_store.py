"""Items of different lengths as flat arrays in files: written once, checked, and mapped by every process.

A store is a folder. Each of its sequences of items has two files of plain little-endian numbers: NAME.values has the
items one after another, and NAME.ends, in uint64, where each of them ends. store.json has the files' types and SHA-256,
and whatever else its writer notes. No code is ever run from a store, and no item is in memory until it is asked for.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import numpy
import numpy.typing

from recipes.translation.errors import DataError
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.files.json_fields import TEXT, TEXTS, WrongFieldError, each, field_in, fields, is_whole, value
from recipes.translation.files.writing import claim, flush, make_folder, move_into_place

Array = numpy.typing.NDArray[Any]
T = TypeVar("T")

NOTE = "store.json"
ENDS = "<u8"
SLICE = 10_000
"""Number of items that are made or written at a time."""
DTYPES = ("|u1", "<u2", "<u4", ENDS)
"""Types of numbers: bytes of UTF-8 text, the ids of small and of large vocabularies, and ends."""
NOTED = fields(
    {
        "files": fields({"*": TEXT}),
        "dtypes": fields({"*": value(f"one of {', '.join(DTYPES)}", lambda found: found in DTYPES)}),
        "corpora": each(value("a number of pairs", lambda found: is_whole(found) and found >= 0)),
        "said": TEXTS,
    }
)
"""The required form of store.json."""


class Kind(NamedTuple):
    """What the items are, and how they are made from part of an array."""

    unpacked: Callable[[Array], Any]
    """Turns part of an array into something that can be sliced."""
    item: Callable[[Any], Any]
    """Turns such a slice into an item."""


def _decode(text: bytes) -> str:
    # In a store whose digests somebody has recomputed, the bytes may be anything
    return text.decode(errors="replace")


IDS = Kind(numpy.ndarray.tolist, list)
TEXT_ITEMS = Kind(numpy.ndarray.tobytes, _decode)


class Flat(Sequence[T]):
    """Items of different lengths, one after another in one array.

    Args:
        values: the array.
        ends: where each item ends in it.
        kind: what the items are.
        files: the files of both arrays, if they are mapped; unpickled in another process, they are mapped there again.
    """

    def __init__(self, values: Array, ends: Array, kind: Kind, files: tuple[Path, Path] | None = None) -> None:
        self.values = values
        self.ends = ends
        self.kind = kind
        self.files = files

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._items(*index.indices(len(self)))
        place = range(len(self))[index]
        return self.kind.item(self.kind.unpacked(self.values[self.start(place) : int(self.ends[place])]))

    def start(self, place: int) -> int:
        """Return where an item begins."""
        return int(self.ends[place - 1]) if place else 0

    def lengths(self, start: int, end: int) -> Array:
        """Return the number of values of each item from `start` to `end`."""
        if not start:
            return numpy.diff(self.ends[:end].astype(numpy.int64), prepend=0)
        found: Array = self.ends[start:end] - self.ends[start - 1 : end - 1]
        return found.astype(numpy.int64, copy=False)

    def _items(self, start: int, end: int, step: int) -> list[T]:
        if step != 1:
            return [self[place] for place in range(start, end, step)]
        first = self.start(start)
        ends = [0, *(self.ends[start:end].astype(numpy.int64) - first).tolist()]
        whole = self.kind.unpacked(self.values[first : first + ends[-1]])
        return [self.kind.item(whole[at:end]) for at, end in pairwise(ends)]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.files is None:
            return Flat, (self.values, self.ends, self.kind)
        return map_files, (*self.files, self.values.dtype.str, self.kind)


def flat_ids(items: Sequence[Sequence[int]]) -> Flat[list[int]]:
    """Return lists of ids as one array in memory."""
    lengths = numpy.fromiter(map(len, items), numpy.int64, len(items))
    values = numpy.fromiter(chain.from_iterable(items), numpy.int32, int(lengths.sum()))
    return Flat(values, numpy.cumsum(lengths), IDS)


def map_files(values: Path, ends: Path, dtype: str, kind: Kind) -> Flat[Any]:
    """Map the two files of a sequence."""
    return Flat(_map_file(values, dtype), _map_file(ends, ENDS), kind, (values, ends))


def _map_file(path: Path, dtype: str) -> Array:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return numpy.empty(0, dtype)
    return numpy.memmap(path, dtype, "r").view(numpy.ndarray)


class FlatWriter:
    """Writes the two files of a sequence, part by part."""

    def __init__(self, values: IO[bytes], ends: IO[bytes], dtype: str) -> None:
        self.values = values
        self.ends = ends
        self.dtype = dtype
        self._end = 0

    def add(self, values: Array | bytes, lengths: Sequence[int]) -> None:
        """Add items, given as concatenated values, with the number of values of each."""
        if not isinstance(values, bytes):
            values = values.astype(self.dtype).tobytes()
        ends = self._end + numpy.cumsum(lengths, dtype=ENDS)
        self.values.write(values)
        self.ends.write(ends.tobytes())
        self._end = int(ends[-1])


class Store:
    """A store whose files `check` verifies, unless another process on this machine has already done so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        note = field_in(folder / NOTE)
        try:
            NOTED(note, "")
        except WrongFieldError as error:
            raise damaged_store_error(folder, f"{NOTE}: {error}") from None
        self.digests: dict[str, str] = note["files"]
        """The SHA-256 of each file."""
        self.dtypes: dict[str, str] = note["dtypes"]
        self.corpora: list[int] = note["corpora"]
        """The number of pairs of each training corpus, in the order of the settings."""
        self.notices: list[str] = note["said"]
        """What was noticed while the store was made."""

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum((self.folder / name).stat().st_size for name in self.digests)

    def array(self, name: str) -> Array:
        """Map a file."""
        return _map_file(self.folder / name, self.dtypes[name])

    def flat(self, name: str, kind: Kind) -> Flat[Any]:
        """Map a sequence."""
        values, ends = names_of(name)
        return map_files(self.folder / values, self.folder / ends, self.dtypes[values], kind)

    def check(self, limits: Mapping[str, int]) -> Self:
        """Raise DataError unless the files are those that were written, and have sequences with values below `limits`.

        Anyone who can write to a shared folder can recompute the SHA-256, so the sequences themselves are checked as
        well: they must have one item for each pair, and ids within the vocabulary.
        """
        if foreign := [path.name for path in _files_of(self.folder) if not stat.S_ISREG(path.lstat().st_mode)]:
            raise damaged_store_error(self.folder, f"{foreign[0]} is not a file")
        if digests_of(self.folder) != self.digests:
            raise damaged_store_error(self.folder, f"its files do not have the SHA-256 of {NOTE}")
        for name, dtype in self.dtypes.items():
            if name not in self.digests or (self.folder / name).stat().st_size % numpy.dtype(dtype).itemsize:
                raise damaged_store_error(self.folder, f"{name} is not a file of {dtype}")
        for name, limit in limits.items():
            if reason := self._wrong(name, limit):
                raise damaged_store_error(self.folder, f"{name}: {reason}")
        return self

    def _wrong(self, name: str, limit: int) -> str:
        """Return what is wrong with a sequence; empty if nothing is."""
        if not set(names_of(name)) <= self.dtypes.keys():
            return "missing"
        found = self.flat(name, IDS)
        if len(found) != sum(self.corpora):
            return f"{len(found):,} items for {sum(self.corpora):,} pairs"
        last = 0
        for ends in parts_of(found.ends):
            if ends[0] < last or (ends[1:] < ends[:-1]).any():
                return "an item ends before it begins"
            last = int(ends[-1])
        if last != len(found.values):
            return f"the last item ends at {last:,} of {len(found.values):,} values"
        largest = max((int(values.max()) for values in parts_of(found.values)), default=-1)
        return f"a value is {largest:,}, of {limit:,}" if largest >= limit else ""


def names_of(name: str) -> tuple[str, str]:
    """Return the names of the two files of a sequence."""
    return f"{name}.values", f"{name}.ends"


def parts_of(array: Array) -> Iterator[Array]:
    """Yield an array in parts, so that intermediate results stay small."""
    for start in range(0, len(array), PART):
        yield array[start : start + PART]


PART = 1 << 18


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != NOTE)


def digests_of(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every file in a store, several at a time."""
    paths = _files_of(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {path.name: digest for path, digest in zip(paths, pool.map(sha256, paths), strict=True)}


def damaged_store_error(folder: Path, reason: str) -> DataError:
    """Return the error for a store whose files are not those that were written."""
    return DataError(f"{folder} is damaged ({reason}): remove it, and it will be made again")


def write_store(
    folder: Path, dtypes: Mapping[str, str], write: Callable[[Mapping[str, IO[bytes]]], dict[str, Any]]
) -> None:
    """Write a store, whole or not at all: `write` fills its files, given by name, and returns the rest of the note.

    Several runs may write the same store at the same time. On one machine the others wait for the first; another
    machine, whose locks may not be visible here, writes a folder of its own. The first to be finished is kept.
    """
    make_folder(folder.parent)
    unfinished = folder.with_name(f".unfinished-{folder.name}-{socket.gethostname()}")
    with claim(unfinished, folder=True):
        if folder.exists():
            return
        with ExitStack() as held:
            note = write({name: held.enter_context((unfinished / name).open("xb")) for name in dtypes})
        note = {"files": digests_of(unfinished), "dtypes": dict(dtypes), **note}
        (unfinished / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            flush(path)
        if not folder.exists():
            move_into_place(unfinished, folder)


def sequence(name: str, dtype: str) -> dict[str, str]:
    """Return the names of a sequence's files with their types."""
    values, ends = names_of(name)
    return {values: dtype, ends: ENDS}


def writer(files: Mapping[str, IO[bytes]], name: str, dtype: str) -> FlatWriter:
    """Return the writer of a sequence's files."""
    values, ends = names_of(name)
    return FlatWriter(files[values], files[ends], dtype)
