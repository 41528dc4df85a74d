"""Batches of sentence pairs that are drawn anew in every epoch: noise in the source text, then sampled subwords.

A draw is a function of (seed, epoch, pair), so that a run resumes in the middle of an epoch, and every process draws
the same. Noise changes the training text, and other subwords are drawn from those of the sentence.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy
import numpy.typing

from recipes.translation.data.batches import Batch, EpochBatches, Ids, TokenBatches, padded_batch
from recipes.translation.data.corpora import Corpora
from recipes.translation.data.model_text import tags_of
from recipes.translation.data.noise import noisy
from recipes.translation.data.token_store import Store
from recipes.translation.data.training_text import TrainingText
from recipes.translation.settings.checks import check_sampling
from recipes.translation.settings.data import NoiseConfig
from recipes.translation.text.subwords import Subwords

PROBED = 1_000
"""Pairs whose draws are part of the data's fingerprint."""
SLICE = 1_000
"""Pairs drawn between two looks at whether the process is about to end."""
NO_NOISE = NoiseConfig()


@dataclass(frozen=True)
class Drawing:
    """What is drawn of one side of the pairs."""

    subwords: Subwords
    sampling: float
    """As in `Subwords.sample`; 0 samples nothing."""
    noise: NoiseConfig = NO_NOISE
    texts: Sequence[str] = ()
    """The sentences, if they get noise."""
    symbols: Sequence[str] = ()
    """Tags and symbols, which have no noise and are never split."""

    @property
    def changes(self) -> bool:
        """Return whether anything is drawn."""
        return bool(self.sampling) or self.noise != NO_NOISE

    def draw(self, plain: Sequence[Ids], pairs: Sequence[int], seed: str, seeds: Sequence[int]) -> Sequence[Ids]:
        """Draw the subwords of the sentences of these pairs, given those without noise of which none is sampled.

        `seed` is that of the noise, and `seeds` are those of the segmentations.
        """
        if self.noise != NO_NOISE:
            texts = [noisy(self.texts[pair], self.noise, f"{seed} {pair}", self.symbols) for pair in pairs]
            plain = self.subwords.encode(texts)
        if not self.sampling:
            return plain
        return self.subwords.sample(plain, seeds, self.sampling, self.symbols)


class DrawnBatches:
    """The batches of `plain`, with noise or sampled subwords, or both, that every epoch draws anew.

    An index counts the pairs of all epochs, `epoch * pairs + pair`, so that `batch` knows which draw is meant. Every
    epoch contains the pairs that `plain` does. A draw that is longer than `max_length`, or empty, is replaced by the
    pair's subwords without noise and without sampling.

    Sampled subwords are many more than others. So they are drawn twice: their lengths before an epoch, for batches
    within the budget of tokens, and themselves when a batch is made; nothing but the two lengths of a pair is kept.
    While an epoch is in use, a thread draws the lengths of the next one. Noise alone changes few lengths: then batches
    are cut by the lengths without it, and may exceed the budget by some percent.

    Args:
        plain: the batches without noise, of which nothing is sampled.
        source, target: what is drawn of either side.
    """

    def __init__(self, plain: TokenBatches, source: Drawing, target: Drawing) -> None:
        self.plain = plain
        self.sides = (source, target)
        self.sampled = any(side.sampling for side in self.sides)
        self._pairs = len(plain.sources)
        self._orders: dict[int, Future[TokenBatches]] = {}

    @property
    def dropped(self) -> int:
        """Return the number of pairs that are left out of every epoch, as longer than `max_length`."""
        return self.plain.dropped

    @property
    def over_budget(self) -> int:
        """Return the number of pairs that are longer than a batch may be."""
        return self.plain.over_budget

    def epoch(self, number: int) -> Sequence[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices."""
        batches = self._order(number).epoch(number)
        if self.sampled and number + 1 not in self._orders:
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
        """Draw the first pairs as the first epoch does: what shows whether another process draws the same."""
        return self.draw(0, range(min(self._pairs, PROBED)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs, which is everything but the thread's work."""
        return {**self.__dict__, "_orders": {}}

    def _draw_side(self, which: int, ids: Sequence[Ids], epoch: int, pairs: Sequence[int]) -> list[Ids]:
        side = self.sides[which]
        plain = [ids[pair] for pair in pairs]
        if not side.changes:
            return plain
        seed = self.plain.seed
        seeds: Sequence[int] = ()
        if side.sampling:
            seeds = _seeds(seed, epoch, which, self._pairs)[list(pairs)].tolist()
        found = []
        for drawn, without in zip(side.draw(plain, pairs, f"{seed} {epoch}", seeds), plain, strict=True):
            usable = drawn
            if not 0 < len(drawn) <= self.plain.max_length:
                usable = without
            found.append(usable)
        return found

    def _order(self, epoch: int) -> TokenBatches:
        """Return the batches of an epoch: where subwords are sampled, in the order of their drawn lengths."""
        if not self.sampled:
            return self.plain
        if epoch not in self._orders:
            self._orders = {epoch: self._draw_in_thread(epoch)}
        return self._orders[epoch].result()

    def _draw_order(self, epoch: int) -> TokenBatches:
        # The lengths of pairs that the epoch does not contain stay: a pair too long must not come in by a shorter draw
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


class TaggedText(Sequence[str]):
    """Source sentences of the training text under the tags of their corpora."""

    def __init__(self, corpora: Corpora) -> None:
        text = TrainingText(Store(corpora.text_folder))  # which one process of the machine has checked
        self.sentences = text.sources
        self.tags = [" ".join((*corpus.tags, "")) if corpus.tags else "" for corpus in corpora.training]
        self.ends = list(accumulate(text.corpora))

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, pair: Any) -> Any:
        return self.tags[bisect_right(self.ends, pair)] + self.sentences[pair]


def drawn_batches(
    corpora: Corpora, plain: TokenBatches, source: Subwords, target: Subwords
) -> TokenBatches | DrawnBatches:
    """Return what every epoch draws of the training pairs `plain`: themselves, unless the settings ask for more."""
    config = corpora.config
    settings = config.subwords
    sampling = {side: settings.sampling * (settings.sampled in ("both", side)) for side in ("source", "target")}
    for side, amount in zip((source, target), sampling.values(), strict=True):
        check_sampling(side.kind, amount, f" ({' '.join(settings.model)})" if settings.model else "")
    texts = TaggedText(corpora) if config.noise != NO_NOISE else ()
    of_source = Drawing(source, sampling["source"], config.noise, texts, [*tags_of(config), *settings.symbols])
    of_target = Drawing(target, sampling["target"], symbols=settings.symbols)
    if not (of_source.changes or of_target.changes):
        return plain
    return DrawnBatches(plain, of_source, of_target)


@lru_cache(maxsize=4)
def _seeds(seed: int, epoch: int, which: int, pairs: int) -> numpy.typing.NDArray[numpy.uint32]:
    """Return a seed for each sentence of a side in an epoch."""
    seeds: numpy.typing.NDArray[numpy.uint32]
    seeds = numpy.random.SeedSequence([seed, epoch, which]).generate_state(pairs, numpy.uint32).astype(numpy.uint32)
    return seeds
