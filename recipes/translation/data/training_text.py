"""The text of the training pairs, cleaned and without tags: read from the corpora once, and from then on mapped.

The subwords and the ids of the pairs are made from it. It also has a digest of each pair, to find validation and test
pairs in the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any

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
from recipes.translation.text.pair import Pair

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
