"""The text of the training pairs, cleaned and without tags, and their ids: made once, and from then on mapped.

The text is read from the corpora, the subwords are made from it, and with them the ids of its pairs. It also has a
digest of each pair, to find validation and test pairs in the training data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy

from recipes.translation.data.token_store import (
    ENDS,
    SLICE,
    TEXT_ITEMS,
    Array,
    Flat,
    FlatWriter,
    Store,
    parts_of,
    sequence,
    write_store,
    writer,
)
from recipes.translation.text.model_text import OtherForm
from recipes.translation.text.pair import Pair
from recipes.translation.text.subwords import UNK, Subwords

LAYOUT = 1
"""Part of every key; increase it when this module writes something different from the same data."""
SIDES = ("source", "target")
BYTES = "|u1"
DIGESTS = "digests"
DIGEST = 8
"""Bytes of a pair's digest: with 100 million pairs and 1,000 held-out ones, one in 10^8 runs has a false match."""


class TrainingText:
    """The text of all training corpora, one corpus after another."""

    def __init__(self, store: Store) -> None:
        self.corpora = store.corpora
        self.sources: Flat[str] = store.flat("source", TEXT_ITEMS)
        self.targets: Flat[str] = store.flat("target", TEXT_ITEMS)
        self._digests = store.array(DIGESTS)

    def __len__(self) -> int:
        return len(self.sources)

    def pairs_among(self, held_out: Sequence[set[Pair]]) -> Iterator[list[int]]:
        """Yield for each training corpus how many pairs of each set it contains, in either direction."""
        known = [_both_ways(pairs) for pairs in held_out]
        start = 0
        for count in self.corpora:
            there = _find_digests(self._digests[start : start + count], numpy.concatenate([*known, EMPTY]).ravel())
            yield [int(numpy.isin(digests, there).any(axis=1).sum()) for digests in known]
            start += count


EMPTY = numpy.empty((0, 2), "<u8")
LAST_BITS = numpy.uint64((1 << 16) - 1)


def _both_ways(pairs: set[Pair]) -> Array:
    """Return the digests of pairs, as they are and with their sides exchanged, (pairs, 2)."""
    found = [digest_of(each) for pair in pairs for each in (pair, Pair(pair.target, pair.source))]
    return numpy.frombuffer(b"".join(found), "<u8").reshape(-1, 2)


def _find_digests(digests: Array, wanted: Array) -> Array:
    """Return the wanted digests that occur among a training corpus's, each of which is read once."""
    wanted = numpy.unique(wanted)
    if not len(wanted):
        return wanted
    there = numpy.zeros(len(wanted), bool)
    # A look-up of a digest's last 16 bits rules out nearly all of millions, faster than a search for each
    possible = numpy.zeros(1 << 16, bool)
    possible[wanted & LAST_BITS] = True
    for part in parts_of(digests):
        part = part[possible[part & LAST_BITS]]
        places = numpy.searchsorted(wanted, part) % len(wanted)
        there[places[wanted[places] == part]] = True
    return wanted[there]


def digest_of(pair: Pair) -> bytes:
    """Return the digest that identifies a pair, ignoring blanks that a copy may have lost."""
    text = "\0".join(" ".join(side.split()) for side in pair)
    return blake2b(text.encode(), digest_size=DIGEST).digest()


def write_text(folder: Path, corpora: Callable[[Callable[[str], None]], Iterable[Iterable[Pair]]]) -> None:
    """Write the pairs that `corpora` returns, given a function to report what is noticed in them."""

    def write(files: Mapping[str, IO[bytes]]) -> dict[str, Any]:
        said: list[str] = []
        sides = [writer(files, side, BYTES) for side in SIDES]
        counts = [_write_pairs(sides, files[DIGESTS], pairs) for pairs in corpora(said.append)]
        return {"corpora": counts, "said": said}

    write_store(folder, {**sequence("source", BYTES), **sequence("target", BYTES), DIGESTS: ENDS}, write)


def _write_pairs(sides: Sequence[FlatWriter], digests: IO[bytes], pairs: Iterable[Pair]) -> int:
    """Write the pairs of a corpus; return their number."""
    count = 0
    each_pair = iter(pairs)
    while part := list(islice(each_pair, SLICE)):
        for side, texts in zip(sides, zip(*part, strict=True), strict=True):
            encoded = [text.encode() for text in texts]
            side.add(b"".join(encoded), list(map(len, encoded)))
        digests.write(b"".join(map(digest_of, part)))
        count += len(part)
    return count


class Part(NamedTuple):
    """Pairs of one corpus that are split into subwords at a time."""

    start: int
    end: int
    tags: tuple[str, ...]
    """What is put in front of their sources."""


def write_ids(
    folder: Path, text: TrainingText, tags: Sequence[tuple[str, ...]], subwords: tuple[Subwords, Subwords], threads: int
) -> None:
    """Split the training text into subwords, with the tags of each corpus, in this many threads."""
    dtypes = ["<u2" if len(side) <= 1 << 16 else "<u4" for side in subwords]

    def write(files: Mapping[str, IO[bytes]]) -> dict[str, Any]:
        writers = [writer(files, name, dtype) for name, dtype in zip(SIDES, dtypes, strict=True)]
        form = OtherForm(subwords[1])
        unknown = [0, 0]
        counts = [0, 0]
        for found, other in _encode_parts(text, tags, subwords, threads):
            form.join(other)
            for side, (ids, lengths) in enumerate(found):
                writers[side].add(ids, lengths)
                unknown[side] += int((ids == UNK).sum())
                counts[side] += len(ids)
        said = form.lines("data", "target sentences are learned")
        said += [
            f"[data] {unknown[side]:,} of {counts[side]:,} {name} subwords are unknown: the model reads, or learns to "
            "write, the same symbol in place of all of them"
            for side, name in enumerate(SIDES)
            if unknown[side]
        ]
        return {"corpora": text.corpora, "said": said}

    files = sequence("source", dtypes[0]) | sequence("target", dtypes[1])
    write_store(folder, files, write)


def _parts(corpora: Sequence[int], tags: Sequence[tuple[str, ...]]) -> Iterator[Part]:
    first = 0
    for count, each in zip(corpora, tags, strict=True):
        for start in range(first, first + count, SLICE):
            yield Part(start, min(start + SLICE, first + count), each)
        first += count


Encoded = list[tuple[Array, list[int]]]
"""For each side, the concatenated ids of all sentences, and the number of ids of each sentence."""


def _encode_parts(
    text: TrainingText, tags: Sequence[tuple[str, ...]], subwords: tuple[Subwords, Subwords], threads: int
) -> Iterator[tuple[Encoded, OtherForm]]:
    """Yield each part in subwords, working ahead by only one part per thread: memory does not grow with the corpus."""
    begun: deque[Future[tuple[Encoded, OtherForm]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for part in _parts(text.corpora, tags):
            begun.append(pool.submit(_encode_part, text, part, subwords))
            # While one part is written, every thread has another to work on
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def _encode_part(text: TrainingText, part: Part, subwords: tuple[Subwords, Subwords]) -> tuple[Encoded, OtherForm]:
    sources, targets = text.sources[part.start : part.end], text.targets[part.start : part.end]
    form = OtherForm(subwords[1])
    form.add(targets)
    if part.tags:
        before = " ".join((*part.tags, ""))
        sources = [before + sentence for sentence in sources]
    found = [side.encode(sentences) for side, sentences in zip(subwords, (sources, targets), strict=True)]
    return [(numpy.fromiter(chain.from_iterable(side), numpy.int32), list(map(len, side))) for side in found], form
