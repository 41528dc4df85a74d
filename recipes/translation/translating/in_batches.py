"""Work on many sentences: in batches of similar length, divided over the processes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import TypeVar

from models import evaluating
from recipes.translation.processes.ranks import Ranks
from recipes.translation.processes.status_line import SentenceProgress
from recipes.translation.run_folder.translator import Translator
from seqpar.distributed.collectives import gather_objects

T = TypeVar("T")


def in_batches(
    translator: Translator,
    ids: list[list[int]],
    search: Callable[[list[int]], list[T]],
    ranks: Ranks,
    label: str = "",
) -> Mapping[int, T]:
    """Search in batches of sentences of similar length; return the results by row, except for empty sentences.

    `search` takes the rows of a batch, the longest sentence first. Each rank searches some sentences of every length,
    and returns the results of all. `label` is as in `translate`.
    """
    longest_first = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: -len(ids[row]))
    # Batches of sentences of similar length have little padding; every rank gets some of every length
    mine = longest_first[ranks.rank :: ranks.world]
    size = translator.config.decoding.batch_sentences
    found: dict[int, T] = {}
    progress = SentenceProgress(label, [len(ids[row]) for row in mine], len(longest_first))
    with evaluating(translator.models), progress:
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            found.update(zip(rows, search(rows), strict=True))
            progress.advance(len(rows))
    ranks.meet()
    return ChainMap(*gather_objects(found, ranks.group))
