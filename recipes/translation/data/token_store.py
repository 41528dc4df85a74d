"""Tokenised training pairs in memory-mapped Arrow files, found again by what they were made from.

Each corpus has a file, a stream of record batches, which is the format of Hugging Face `datasets`' own cache:
`Dataset.from_file` opens it. Subwords are read when a batch is built, so that a corpus may be larger than memory; of
each pair only its two lengths are in memory. Nothing here runs code from a file.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy.typing

from recipes.translation.errors import DataError
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.files.json_fields import noted_in
from recipes.translation.files.writing import claimed, flush, put
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import Subwords

ROWS = 50_000
"""Pairs in a record batch, of which the last of a corpus may have fewer."""
LAYOUT = 3
"""Part of every key: it changes when this file writes something else from the same data."""
PAIRS = "pairs-{:04}.arrow"
"""The file of the corpus of this number."""
DIGESTS = "sha256.json"
"""The SHA-256 of each of these files, by its name."""


class StoredIds(Sequence[list[int]]):
    """One side of the stored pairs: a sequence of lists of ids, each read from the file when it is asked for.

    Args:
        column: a pyarrow.ChunkedArray of lists.
    """

    def __init__(self, column: Any) -> None:
        import pyarrow.compute

        self._column = column
        self.lengths: numpy.typing.NDArray[Any] = pyarrow.compute.list_value_length(column).to_numpy()
        """The number of subwords of each sentence."""

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._column[index].to_pylist()
        return self._column[index].as_py()


@dataclass(frozen=True)
class TokenStore:
    """The ids of both sides of all training corpora, one corpus after the other."""

    sources: StoredIds
    targets: StoredIds
    corpora: list[int]
    """The number of pairs of each."""
    sha256: str
    """Of all files."""

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map a store that `write_store` has written, or that `check_store` has found whole."""
        import pyarrow

        digests: dict[str, str] | None = noted_in(folder / DIGESTS)
        if digests is None:  # something else stands where it should be
            raise damaged(folder)
        tables = []
        for name in digests:
            with pyarrow.memory_map(str(folder / name)) as file:
                tables.append(pyarrow.ipc.open_stream(file).read_all())
        whole = pyarrow.concat_tables(tables)
        sides = StoredIds(whole["source"]), StoredIds(whole["target"])
        return cls(*sides, list(map(len, tables)), "".join(digests.values()))


def check_store(folder: Path) -> bool:
    """Return whether there is a store in `folder`; raise DataError if its files are not those that were written."""
    if not folder.is_dir():
        return False
    if noted_in(folder / DIGESTS) != _digests(folder):
        raise damaged(folder)
    return True


def damaged(folder: Path) -> DataError:
    """Return the error for a store whose files are not those that were written."""
    return DataError(
        f"{folder} is damaged (its files do not have the SHA-256 of {DIGESTS}): remove it, and it is made again"
    )


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.glob("pairs-*.arrow"))}


def write_store(
    folder: Path, corpora: Iterable[Iterable[tuple[str, Pair]]], source: Subwords, target: Subwords, threads: int
) -> None:
    """Tokenise the corpora, given as source sentences with tags and pairs, and write the store, whole or not at all.

    Several runs may write the same store at the same time: on one machine the others wait for the first; another
    machine, whose locks may not be seen here, writes a folder of its own. The first one stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".unfinished-{folder.name}-{socket.gethostname()}")
    with claimed(unfinished, folder=True):
        if folder.exists():
            return
        for number, rows in enumerate(corpora):
            _write_pairs(unfinished / PAIRS.format(number), rows, source, target, threads)
        (unfinished / DIGESTS).write_text(json.dumps(_digests(unfinished), indent=2) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            flush(path)
        if not folder.exists():
            put(unfinished, folder)


def _write_pairs(
    path: Path, pairs: Iterable[tuple[str, Pair]], source: Subwords, target: Subwords, threads: int
) -> None:
    import pyarrow

    # The smallest type for the ids of a vocabulary
    kinds = [pyarrow.list_(pyarrow.uint16() if len(side) <= 1 << 16 else pyarrow.int32()) for side in (source, target)]
    schema = pyarrow.schema(list(zip(("source", "target"), kinds, strict=True)))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        each_row = iter(pairs)
        while rows := list(islice(each_row, ROWS)):
            ids = (
                source.encode([text for text, _ in rows], threads),
                target.encode([pair.target for _, pair in rows], threads),
            )
            columns = [pyarrow.array(side, kind) for side, kind in zip(ids, kinds, strict=True)]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
