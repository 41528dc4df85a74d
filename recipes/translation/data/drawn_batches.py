"""Batches of sentence pairs whose subwords are sampled anew in every epoch.

A draw is a function of (seed, epoch, pair), so that a run can resume in the middle of an epoch, and every process draws
the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import numpy.typing

from recipes.translation.data.batches import Batch, EpochBatches, Ids, TokenBatches, padded_batch
from recipes.translation.data.corpora import Corpora
from recipes.translation.settings.checks import check_sampling
from recipes.translation.text.subwords import Subwords

PROBED = 1_000
"""Number of pairs whose draws are part of the data's fingerprint."""
SLICE = 1_000
"""Number of pairs drawn between two checks whether the process is about to end."""


@dataclass(frozen=True)
class Drawing:
    """How one side of the pairs is drawn."""

    subwords: Subwords
    sampling: float
    """As in `Subwords.sample`; 0 samples nothing."""


class DrawnBatches:
    """The batches of `plain`, with subwords that every epoch draws anew.

    An index counts the pairs of all epochs, `epoch * pairs + pair`, so that `batch` knows which draw is meant. Every
    epoch contains the pairs that `plain` does. A draw that is longer than `max_length` is replaced by the sentence's
    usual subwords.

    Sampling makes more subwords than usual, so they are drawn twice: before an epoch for their lengths, to make batches
    within the token budget, and again when a batch is made; only the two lengths of each pair are kept in between.
    While an epoch is in use, a thread draws the lengths of the next one.

    Args:
        plain: the batches without sampling.
        source, target: how each side is drawn.
    """

    def __init__(self, plain: TokenBatches, source: Drawing, target: Drawing) -> None:
        self.plain = plain
        self.sides = (source, target)
        self._pairs = len(plain.sources)
        self._orders: dict[int, Future[TokenBatches]] = {}

    @property
    def dropped(self) -> int:
        """Return the number of pairs that are left out of every epoch because they are longer than `max_length`."""
        return self.plain.dropped

    @property
    def over_budget(self) -> int:
        """Return the number of pairs that are longer than a batch may be."""
        return self.plain.over_budget

    def epoch(self, number: int) -> Sequence[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices."""
        batches = self._order(number).epoch(number)
        if number + 1 not in self._orders:
            self._orders = {number: self._orders[number], number + 1: self._draw_in_thread(number + 1)}
        if isinstance(batches, EpochBatches):
            batches.first = number * self._pairs
        return batches

    def count(self, number: int) -> int:
        """Return the number of batches of an epoch."""
        return self._order(number).count(number)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make the tensors of the pairs with these indices, all of one epoch, in this order."""
        if not len(indices):
            return padded_batch([], [])
        sources, targets = self.draw(indices[0] // self._pairs, [index % self._pairs for index in indices])
        return padded_batch(sources, targets, self.plain.symbols)

    def draw(self, epoch: int, pairs: Sequence[int]) -> tuple[list[Ids], list[Ids]]:
        """Draw the subwords of both sides of these pairs in an epoch."""
        sources = self._draw_side(0, self.plain.sources, epoch, pairs)
        targets = self._draw_side(1, self.plain.targets, epoch, pairs)
        return sources, targets

    def probe(self) -> tuple[list[Ids], list[Ids]]:
        """Draw the first pairs as the first epoch does, to show whether another process draws the same."""
        return self.draw(0, range(min(self._pairs, PROBED)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: everything but the thread's work."""
        return {**self.__dict__, "_orders": {}}

    def _draw_side(self, which: int, ids: Sequence[Ids], epoch: int, pairs: Sequence[int]) -> list[Ids]:
        side = self.sides[which]
        plain = [ids[pair] for pair in pairs]
        if not side.sampling:
            return plain
        seeds = _seeds(self.plain.seed, epoch, which, self._pairs)[list(pairs)].tolist()
        drawn = side.subwords.sample(plain, seeds, side.sampling)
        longest = self.plain.max_length
        return [new if len(new) <= longest else usual for new, usual in zip(drawn, plain, strict=True)]

    def _order(self, epoch: int) -> TokenBatches:
        """Return the batches of an epoch, in the order of their drawn lengths."""
        if epoch not in self._orders:
            self._orders = {epoch: self._draw_in_thread(epoch)}
        return self._orders[epoch].result()

    def _draw_order(self, epoch: int) -> TokenBatches:
        # Pairs outside the epoch keep their lengths: one that is too long must not get in through a shorter draw
        lengths = (self.plain.source_lengths.astype(numpy.int32), self.plain.target_lengths.astype(numpy.int32))
        pairs = numpy.unique(self.plain.pairs(epoch))
        for start in range(0, len(pairs), SLICE):
            if not threading.main_thread().is_alive():
                raise RuntimeError("the process ends")
            part = pairs[start : start + SLICE]
            for side, drawn in zip(lengths, self.draw(epoch, part.tolist()), strict=True):
                side[part] = [len(ids) for ids in drawn]
        return self.plain.with_lengths(*lengths)

    def _draw_in_thread(self, epoch: int) -> Future[TokenBatches]:
        found: Future[TokenBatches] = Future()

        def draw() -> None:
            try:
                found.set_result(self._draw_order(epoch))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=draw).start()
        return found


def drawn_batches(
    corpora: Corpora, plain: TokenBatches, source: Subwords, target: Subwords
) -> TokenBatches | DrawnBatches:
    """Return batches that sample the training pairs in every epoch, or `plain` unless the settings ask for sampling."""
    config = corpora.config
    settings = config.subwords
    sampling = {side: settings.sampling * (settings.sampled in ("both", side)) for side in ("source", "target")}
    for side, amount in zip((source, target), sampling.values(), strict=True):
        check_sampling(side.kind, amount, f" ({' '.join(settings.model)})" if settings.model else "")
    if not settings.sampling:
        return plain
    return DrawnBatches(plain, Drawing(source, sampling["source"]), Drawing(target, sampling["target"]))


@lru_cache(maxsize=4)
def _seeds(seed: int, epoch: int, which: int, pairs: int) -> numpy.typing.NDArray[numpy.uint32]:
    """Return a seed for each sentence of one side in an epoch."""
    seeds: numpy.typing.NDArray[numpy.uint32]
    seeds = numpy.random.SeedSequence([seed, epoch, which]).generate_state(pairs, numpy.uint32).astype(numpy.uint32)
    return seeds
