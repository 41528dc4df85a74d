"""Batches of sentence pairs whose subwords are drawn anew in every epoch: subword regularisation.

The draw of a sentence is a function of (seed, epoch, sentence), so that a run resumes in the middle of an epoch, and
every process draws the same. Batches have a budget of tokens, so they are made after an epoch's subwords are known.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from recipes.translation.data.batches import Array, Batch, Ids, TokenBatches, padded_batch
from recipes.translation.data.sentence_pairs import Pair
from recipes.translation.data.subwords import Subwords
from recipes.translation.settings.config import RunConfig

PROBED = 1_000
"""Pairs whose draws are part of the data's fingerprint."""
SLICE = 1_000
"""Sentences drawn between two looks at whether the process is about to end."""


@dataclass(frozen=True)
class Side:
    """One side of the pairs, and how it is split into subwords."""

    sentences: Sequence[str]
    ids: Sequence[Ids]
    """Their subwords when nothing is sampled."""
    subwords: Subwords
    sampling: float
    """As in `Subwords.sample`; 0 always returns `ids`."""


class SampledBatches:
    """Batches as `TokenBatches` makes them, of subwords that are drawn anew in every epoch.

    An index counts the pairs of all epochs, `epoch * pairs + pair`, so that `batch` knows which draw is meant. Every
    epoch contains the same pairs: those that are within `max_length` when nothing is sampled. A draw that is longer
    than `max_length` is replaced by the subwords that are not sampled. While an epoch is in use, a thread draws the
    next one.
    """

    def __init__(self, source: Side, target: Side, *, batch_tokens: int, seed: int, max_length: int) -> None:
        self.sides = (source, target)
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.max_length = max_length
        self.pairs = len(source.ids)
        self.plain = self._batches([source.ids, target.ids])
        self._drawn: dict[int, TokenBatches] = {}
        self._ahead: dict[int, Future[TokenBatches]] = {}

    @property
    def dropped(self) -> int:
        """Return the number of pairs that are left out of every epoch, as longer than `max_length`."""
        return self.plain.dropped

    def epoch(self, number: int) -> list[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices."""
        batches = self._of(number).epoch(number)
        if number + 1 not in self._ahead:
            self._ahead = {number + 1: self._draw_in_thread(number + 1)}
        return [[number * self.pairs + pair for pair in batch] for batch in batches]

    def count(self, number: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self._of(number))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make the tensors of the pairs with these indices, all of one epoch, in this order."""
        if not len(indices):
            return padded_batch([], [])
        epoch = indices[0] // self.pairs
        pairs = [index % self.pairs for index in indices]
        if epoch in self._drawn:
            return self._drawn[epoch].batch(pairs)
        # A worker process, or the last batches of an epoch in a step that has begun the next one
        return padded_batch(*self.draw(epoch, pairs))

    def draw(self, epoch: int, pairs: Sequence[int]) -> tuple[list[Ids], list[Ids]]:
        """Draw the subwords of both sides of these pairs in an epoch."""
        source, target = (self._draw_side(which, epoch, pairs) for which in range(2))
        return source, target

    def probe(self) -> tuple[list[Ids], list[Ids]]:
        """Draw the first pairs as the first epoch does: what shows whether another process draws the same."""
        return self.draw(0, range(min(self.pairs, PROBED)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs, which is everything but the thread's work."""
        return {**self.__dict__, "_ahead": {}}

    def _of(self, number: int) -> TokenBatches:
        if number not in self._drawn:
            if number in self._ahead:
                self._drawn = {number: self._ahead[number].result()}
            else:
                self._drawn = {number: self._draw(number)}
        return self._drawn[number]

    def _draw_side(self, which: int, epoch: int, pairs: Sequence[int]) -> list[Ids]:
        side = self.sides[which]
        if not side.sampling:
            return [side.ids[pair] for pair in pairs]
        seeds = _seeds(self.seed, epoch, which, self.pairs)
        found = side.subwords.sample([side.sentences[pair] for pair in pairs], seeds[list(pairs)], side.sampling)
        drawn: list[Ids] = []
        for ids, pair in zip(found, pairs, strict=True):
            drawn.append(ids)
            if len(ids) > self.max_length:
                drawn[-1] = side.ids[pair]
        return drawn

    def _draw(self, epoch: int) -> TokenBatches:
        sides: tuple[list[Ids], list[Ids]] = ([], [])
        for start in range(0, self.pairs, SLICE):
            if not threading.main_thread().is_alive():
                raise RuntimeError("the process ends")
            drawn = self.draw(epoch, range(start, min(start + SLICE, self.pairs)))
            for whole, part in zip(sides, drawn, strict=True):
                whole += part
        return self._batches(sides)

    def _draw_in_thread(self, epoch: int) -> Future[TokenBatches]:
        found: Future[TokenBatches] = Future()

        def draw() -> None:
            try:
                found.set_result(self._draw(epoch))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=draw).start()
        return found

    def _batches(self, sides: Sequence[Sequence[Ids]]) -> TokenBatches:
        sources, targets = sides
        return TokenBatches(
            sources, targets, batch_tokens=self.batch_tokens, seed=self.seed, max_length=self.max_length
        )


def sampled_batches(
    config: RunConfig, pairs: Sequence[Pair], plain: TokenBatches, source: Subwords, target: Subwords
) -> SampledBatches:
    """Return the batches of training pairs whose subwords are drawn, given the batches in which they are not."""
    settings = config.subwords
    amounts = {"source": settings.sampling, "target": settings.sampling}
    if settings.sampled != "both":
        amounts = {"source": 0.0, "target": 0.0, settings.sampled: settings.sampling}
    return SampledBatches(
        Side([pair.source for pair in pairs], plain.sources, source, amounts["source"]),
        Side([pair.target for pair in pairs], plain.targets, target, amounts["target"]),
        batch_tokens=config.training.batch_tokens,
        seed=config.training.seed,
        max_length=config.training.max_length,
    )


@lru_cache(maxsize=4)
def _seeds(seed: int, epoch: int, which: int, pairs: int) -> Array:
    """Return a seed for each sentence of a side in an epoch."""
    return numpy.random.SeedSequence([seed, epoch, which]).generate_state(pairs, numpy.uint32)
