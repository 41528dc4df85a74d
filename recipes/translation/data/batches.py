"""Batches of sentence pairs with a budget of tokens: little padding, a new order every epoch, nothing left out."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.translation.data.subwords import BOS, EOS, PAD

Ids = Sequence[int]
Array = numpy.typing.NDArray[Any]


class Batch(NamedTuple):
    """Padded ids of a batch, one row a sentence: `src` (N, S), `tgt_in` and `tgt_out` (N, T), all int64.

    src = subwords + end; tgt_in = start + subwords; tgt_out = subwords + end.
    """

    src: Tensor
    tgt_in: Tensor
    tgt_out: Tensor

    @property
    def tokens(self) -> int:
        """Target tokens, padding left out."""
        return int((self.tgt_out != PAD).sum())


class TokenBatches:
    """Sentence pairs cut into batches of at most `batch_tokens` cells on either side, padding included.

    Pairs of similar length share a batch. Every epoch has the same number of batches, `len(self)`, and holds
    every pair once; which pairs meet and in which order the batches come depends on (seed, epoch) alone, so
    a run resumes in the middle of an epoch with `epoch(n)[done:]`. A pair longer than `max_length` subwords on
    either side is left out and counted in `dropped`; one that exceeds the budget is a batch of its own.
    """

    def __init__(
        self,
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        *,
        batch_tokens: int,
        seed: int = 0,
        max_length: int | None = None,
    ) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"sources and targets are pairs: got {len(sources):,} and {len(targets):,}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.sources, self.targets, self.seed = sources, targets, seed
        source_lengths = numpy.array([len(ids) for ids in sources], dtype=numpy.int64)
        target_lengths = numpy.array([len(ids) for ids in targets], dtype=numpy.int64)
        limit = numpy.inf if max_length is None else max_length
        self._kept = numpy.flatnonzero((source_lengths <= limit) & (target_lengths <= limit))
        self.dropped = len(sources) - len(self._kept)
        self._source_lengths = source_lengths[self._kept] + 1  # the end
        self._target_lengths = target_lengths[self._kept] + 1
        self._cuts = self._cut(batch_tokens)

    def __len__(self) -> int:
        return len(self._cuts) + 1 if len(self._kept) else 0

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch (0, 1, ...), each a list of indices into the pairs."""
        if not len(self._kept):
            return []
        rng = numpy.random.default_rng([self.seed, number])
        order = self._kept[self._order(rng.random(len(self._kept)))]
        batches = numpy.split(order, self._cuts)
        return [batches[place].tolist() for place in rng.permutation(len(batches))]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The tensors of the pairs with these indices, in this order."""
        targets = [list(self.targets[index]) for index in indices]
        return Batch(
            src=_padded([[*self.sources[index], EOS] for index in indices]),
            tgt_in=_padded([[BOS, *ids] for ids in targets]),
            tgt_out=_padded([[*ids, EOS] for ids in targets]),
        )

    def padding_share(self, epoch: int) -> float:
        """The part of all source and target cells of an epoch that is padding."""
        cells = 0
        for batch in self.epoch(epoch):
            longest = max(len(self.sources[index]) for index in batch), max(len(self.targets[index]) for index in batch)
            cells += len(batch) * (sum(longest) + 2)
        filled = int(self._source_lengths.sum() + self._target_lengths.sum())
        return 1 - filled / cells if cells else 0.0

    def _order(self, ties: Array) -> Array:
        """Places of the kept pairs: by target length, then by source length, then by `ties`.

        Source lengths fall and rise by turns, so that a batch reaching into the next target length finds
        source lengths there like its own.
        """
        direction = numpy.where(self._target_lengths % 2 == 0, -1, 1)
        return numpy.lexsort((ties, direction * self._source_lengths, -self._target_lengths))

    def _cut(self, budget: int) -> list[int]:
        """Where batches begin, the first one left out.

        Chance only swaps pairs that are equally long on both sides, so the same cuts fit every epoch.
        """
        order = self._order(numpy.zeros(len(self._kept)))
        longer = numpy.maximum(self._source_lengths, self._target_lengths)[order].tolist()
        cuts, start, longest = [], 0, 0
        for place, length in enumerate(longer):
            longest = max(longest, length)
            if place > start and (place - start + 1) * longest > budget:
                cuts.append(place)
                start, longest = place, length
        return cuts


def share_of(batches: Sequence[list[int]], share: int, shares: int) -> list[list[int]]:
    """The part of a step's batches that falls to one of `shares`: each sentence to exactly one.

    Whole batches as far as they go round; of each of the rest every `shares`-th sentence, which may be none.
    """
    even = len(batches) // shares * shares
    parts = [batch[share::shares] for batch in batches[even:]]
    return [*batches[share:even:shares], *filter(None, parts)]


class Steps(Dataset["tuple[tuple[int, int], list[Batch]]"]):
    """A share of each optimizer step's batches, with the position in the data that follows the step.

    Args:
        batches: the data.
        accumulate: batches a step.
        share, shares: which part of each step falls to this process.
        device: where it will be used; for an accelerator, worker processes make the batches, in pinned memory.
    """

    def __init__(self, batches: TokenBatches, accumulate: int, share: int, shares: int, device: torch.device) -> None:
        self.batches, self.accumulate, self.share, self.shares, self.device = batches, accumulate, share, shares, device
        self.workers = 0 if device.type == "cpu" else WORKERS

    def __getitem__(self, step: Any) -> Any:
        position, indices = step
        return position, [self.batches.batch(batch) for batch in indices]

    def after(self, epoch: int, done: int) -> Iterator[tuple[tuple[int, int], list[Batch]]]:
        """Steps without end, from batch `done` of `epoch` on. An epoch's last batches share a step with the next's."""
        steps: Iterable[Any] = self._indices(epoch, done)
        return iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=steps,
                collate_fn=_as_it_is,
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                worker_init_fn=_leave_signals_to_the_parent,
            )
        )

    def _indices(self, epoch: int, done: int) -> Iterator[tuple[tuple[int, int], list[list[int]]]]:
        step: list[list[int]] = []
        while True:
            for number, indices in enumerate(self.batches.epoch(epoch)[done:], start=done + 1):
                step.append(indices)
                if len(step) == self.accumulate:
                    yield (epoch, number), share_of(step, self.share, self.shares)
                    step = []
            epoch, done = epoch + 1, 0


WORKERS = 2
"""Worker processes that make batches ahead of an accelerator."""


def _as_it_is(step: Any) -> Any:
    return step


def _leave_signals_to_the_parent(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.long).reshape(-1, width)
