"""The ids of the training pairs, in files that every process maps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy

from recipes.translation.data.token_store import SLICE, Array, sequence, write_store, writer
from recipes.translation.data.training_text import SIDES, TrainingText
from recipes.translation.text.model_text import OtherForm
from recipes.translation.text.subwords import UNK, Subwords

LAYOUT = 1
"""Part of every key; increase it when this module writes something different from the same text."""


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
            "write, one and the same in place of all of them"
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
