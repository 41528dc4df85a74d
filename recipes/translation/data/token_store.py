"""Tokenised training pairs in a memory-mapped Arrow file, found again by what they were made from.

The file is a stream of record batches, the format of Hugging Face `datasets`' own cache: `Dataset.from_file` opens it.
Subwords are read when a batch is built, so that a corpus may be larger than memory; of each pair only its two lengths
are in memory. Nothing here runs code from a file.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from recipes.translation.errors import DataError
from recipes.translation.files.atomic_folder import sha256
from recipes.translation.files.json_fields import TEXT, each, fields, is_whole, parsed, value
from recipes.translation.files.writing import claimed, flush, put
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import Subwords

ROWS = 50_000
"""Pairs in a record batch."""
LAYOUT = 2
"""Part of every key: it changes when this file writes something else from the same data."""
PAIRS = "pairs.arrow"
FACTS = "facts.json"
COUNT = value("a whole number, not below 0", lambda found: is_whole(found) and found >= 0)
CHECK = fields({"corpora": each(COUNT), "sha256": TEXT})
"""What `facts.json` must be: the number of pairs of each corpus, which follow each other, and of the Arrow file."""


class StoredIds(Sequence[list[int]]):
    """One side of the stored pairs: a sequence of lists of ids, each read from the file when it is asked for."""

    def __init__(self, chunks: Sequence[tuple[numpy.typing.NDArray[Any], numpy.typing.NDArray[Any]]]) -> None:
        self._chunks = chunks
        self.lengths = numpy.concatenate([numpy.diff(offsets) for _, offsets in chunks])
        """The number of subwords of each sentence."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        chunk, row = divmod(index % len(self), ROWS)
        values, offsets = self._chunks[chunk]
        return values[offsets[row] : offsets[row + 1]].tolist()


@dataclass(frozen=True)
class TokenStore:
    """The ids of both sides of all training corpora, one corpus after the other."""

    sources: StoredIds
    targets: StoredIds
    corpora: list[int]
    """The number of pairs of each."""
    sha256: str
    """Of the file."""

    @classmethod
    def open(cls, folder: Path, corpora: int, sizes: tuple[int, int]) -> TokenStore:
        """Map a store that `write_store` has written of so many corpora; raise DataError if it is damaged.

        `sizes` are those of the vocabularies of source and target.
        """
        import pyarrow

        facts = _facts(folder)
        counts: list[int] = facts["corpora"]
        if len(counts) != corpora:
            raise DataError(_damaged(folder, f"{FACTS} has the sizes of {len(counts):,} corpora, not {corpora:,}"))
        try:
            with pyarrow.memory_map(str(folder / PAIRS)) as file:
                batches = list(pyarrow.ipc.open_stream(file))
            for batch in batches:
                batch.validate(full=True)  # offsets within the values; it does not read the values
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise DataError(_damaged(folder, " ".join(str(error).split()))) from None
        _check_batches(folder, batches, sizes)
        sides: list[StoredIds] = []
        for name in ("source", "target"):
            columns = [batch.column(name) for batch in batches]
            sides.append(StoredIds([(column.values.to_numpy(), column.offsets.to_numpy()) for column in columns]))
        if not len(sides[0]) == len(sides[1]) == sum(counts):
            raise DataError(_damaged(folder, f"it has {len(sides[0]):,} pairs, not {sum(counts):,}"))
        return cls(sides[0], sides[1], counts, facts["sha256"])


def check_store(folder: Path) -> bool:
    """Return whether there is a store in `folder`; raise DataError if its file is not the one that was written."""
    if not folder.is_dir():
        return False
    if not (folder / PAIRS).is_file() or sha256(folder / PAIRS) != _facts(folder)["sha256"]:
        raise DataError(_damaged(folder, f"the SHA-256 of {PAIRS} is not the one in {FACTS}"))
    return True


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
        sizes = _write_pairs(unfinished / PAIRS, corpora, source, target, threads)
        facts = {"corpora": sizes, "sha256": sha256(unfinished / PAIRS)}
        (unfinished / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            flush(path)
        if not folder.exists():
            put(unfinished, folder)


def _write_pairs(
    path: Path, corpora: Iterable[Iterable[tuple[str, Pair]]], source: Subwords, target: Subwords, threads: int
) -> list[int]:
    """Write the pairs in record batches of ROWS, which may contain the end of one corpus and the start of the next."""
    import pyarrow

    kinds = [pyarrow.list_(_kind(len(side))) for side in (source, target)]
    schema = pyarrow.schema(list(zip(("source", "target"), kinds, strict=True)))
    sizes: list[int] = []
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        each_row = _counted(corpora, sizes)
        while rows := list(islice(each_row, ROWS)):
            ids = (
                source.encode([text for text, _ in rows], threads),
                target.encode([pair.target for _, pair in rows], threads),
            )
            columns = [pyarrow.array(side, kind) for side, kind in zip(ids, kinds, strict=True)]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    return sizes


def _counted(corpora: Iterable[Iterable[tuple[str, Pair]]], sizes: list[int]) -> Iterator[tuple[str, Pair]]:
    for corpus in corpora:
        sizes.append(0)
        for row in corpus:
            sizes[-1] += 1
            yield row


def _kind(vocabulary: int) -> Any:
    """Return the smallest type for the ids of a vocabulary."""
    import pyarrow

    if vocabulary <= 1 << 16:
        return pyarrow.uint16()
    return pyarrow.int32()


def _check_batches(folder: Path, batches: Sequence[Any], sizes: tuple[int, int]) -> None:
    """Raise DataError unless record batches are such as `_write_pairs` writes for vocabularies of these sizes."""
    import pyarrow

    kinds = [pyarrow.list_(kind) for kind in (pyarrow.uint16(), pyarrow.int32())]
    for number, batch in enumerate(batches, start=1):
        if batch.schema.names != ["source", "target"] or not set(batch.schema.types).issubset(kinds):
            found = ", ".join(f"{field.name} ({field.type})" for field in batch.schema)
            raise DataError(_damaged(folder, f"{PAIRS} has the columns {found}, not lists of ids, source and target"))
        if not 0 < len(batch) <= ROWS or (len(batch) < ROWS and number < len(batches)):
            raise DataError(_damaged(folder, f"a part of {PAIRS} has {len(batch):,} rows, not {ROWS:,}"))
        if any(column.null_count or column.values.null_count for column in batch.columns):
            raise DataError(_damaged(folder, f"{PAIRS} has rows without ids"))
        for side, size in zip(batch.schema.names, sizes, strict=True):
            values = batch.column(side).values.to_numpy()
            for found in (values.min(initial=0), values.max(initial=0)):
                if not 0 <= found < size:
                    reason = f"{PAIRS} has the {side} id {found}, and its subwords are 0 to {size - 1}"
                    raise DataError(_damaged(folder, reason))
    if not batches:
        raise DataError(_damaged(folder, f"{PAIRS} has no rows"))


def _facts(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parsed((folder / FACTS).read_text(encoding="utf-8"))
        CHECK(found, "")
    except (OSError, ValueError) as error:
        raise DataError(_damaged(folder, f"{FACTS}: {error}")) from None
    return found


def _damaged(folder: Path, reason: str) -> str:
    return f"{folder} is damaged ({reason}): remove it, and it is made again"
