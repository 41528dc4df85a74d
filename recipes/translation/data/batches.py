"""Batches of sentence pairs within a token budget: little padding, a new order every epoch, every pair once."""

from __future__ import annotations

import copy
import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.translation.data.mixing import Mixture
from recipes.translation.data.token_store import Array, Flat, flat_ids
from recipes.translation.text.subwords import ORDINARY, PAD, Symbols

Ids = Sequence[int]


class Batch(NamedTuple):
    """Padded ids of a batch, one row for each sentence: `src` (N, S), `tgt_in` and `tgt_out` (N, T), all int64.

    src = subwords + end; tgt_in = start + subwords; tgt_out = subwords + end.
    """

    src: Tensor
    tgt_in: Tensor
    tgt_out: Tensor

    @property
    def tokens(self) -> int:
        """Return the number of target tokens without padding."""
        return int((self.tgt_out != PAD).sum())


class Epochs(Protocol):
    """The batches of every epoch, a function of the epoch's number only."""

    def epoch(self, number: int) -> Sequence[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices."""

    def count(self, number: int) -> int:
        """Return the number of batches of an epoch."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make the tensors of the pairs with these indices, in this order."""


class TokenBatches:
    """Pairs of sentences in subwords, cut into batches of at most `batch_tokens` cells on either side.

    The pairs of a batch have similar lengths. Every epoch has the same number of batches, `len(self)`, and contains
    every pair once. The pairs of each batch and the order of the batches depend only on (seed, epoch), so that a run
    resumes in the middle of an epoch with `epoch(n)[done:]`. A pair longer than `max_length` subwords on either side is
    left out and counted in `dropped`; a pair that exceeds the budget is a batch of its own.

    With a `mixture` of corpora an epoch contains the pairs that it draws, some of them repeatedly or not at all, and
    the number of batches varies a little; `len(self)` is then that of the first epoch.
    """

    def __init__(
        self,
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        *,
        batch_tokens: int,
        seed: int,
        max_length: float = math.inf,
        mixture: Mixture | None = None,
        symbols: Symbols = ORDINARY,
    ) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"sources and targets are pairs: got {len(sources):,} and {len(targets):,}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.seed = seed
        self.batch_tokens = batch_tokens
        self.max_length = max_length
        self.mixture = mixture
        self.sources = sources if isinstance(sources, Flat) else flat_ids(sources)
        self.targets = targets if isinstance(targets, Flat) else flat_ids(targets)
        self.symbols = symbols
        self._order_by(self.sources.lengths, self.targets.lengths)

    @property
    def source_lengths(self) -> Array:
        """Return the number of subwords of each source, without start and end symbols."""
        return self.sources.lengths(0, len(self.sources))

    @property
    def target_lengths(self) -> Array:
        """Return the number of subwords of each target."""
        return self.targets.lengths(0, len(self.targets))

    def _order_by(self, source_lengths: Lengths, target_lengths: Lengths) -> None:
        """Order the pairs by these lengths, in subwords without start and end symbols."""
        short = [numpy.empty(0, numpy.int32)]
        for start, end in self._slices():
            longer = numpy.maximum(source_lengths(start, end), target_lengths(start, end))
            short.append((start + numpy.flatnonzero(longer <= self.max_length)).astype(numpy.int32))
        self.pairs_short_enough = numpy.concatenate(short)
        """The indices of the pairs that are not left out."""
        self.dropped = len(self.sources) - len(self.pairs_short_enough)
        self._sort_lengths(source_lengths, target_lengths)
        self._cuts = self._find_cuts(self._counts(self.pairs(0)))

    def __len__(self) -> int:
        if not len(self.pairs(0)):  # all are too long, or belong to corpora with weight 0
            return 0
        return len(self._cuts) + 1  # k cuts make k + 1 batches

    @property
    def over_budget(self) -> int:
        """Return the number of pairs that are longer than a batch may be."""
        found = 0
        for start, end in self._slices():
            longer = numpy.maximum(self.sources.lengths(start, end), self.targets.lengths(start, end))
            found += int(((longer + 1 > self.batch_tokens) & (longer <= self.max_length)).sum())
        return found

    def epoch(self, number: int) -> Sequence[list[int]]:
        """Return the batches of an epoch (0, 1, ...), each a list of indices into the pairs."""
        if not len(self):
            return []
        rng = numpy.random.default_rng([self.seed, number])
        pairs = self.pairs(number)
        found = self._sort(pairs)
        # Without a mixture every epoch has the same pairs
        cuts = self._cuts if self.mixture is None else self._find_cuts(found.counts)
        # The random numbers break ties between pairs of equal lengths, so that batches have different pairs every epoch
        ties = rng.random(len(pairs))
        order = numpy.empty_like(pairs)
        start = 0
        for end in numpy.cumsum(found.counts).tolist():
            places = found.places[start:end]
            order[start:end] = pairs[places[order_of(ties[places])]]
            start = end
        # The batches are shuffled too: sorted by length, a whole epoch would go from long sentences to short ones
        return EpochBatches(order, cuts, rng.permutation(len(cuts) + 1))

    def count(self, number: int) -> int:
        """Return the number of batches of an epoch, which is the same for all without a mixture."""
        if self.mixture is None or not len(self):
            return len(self)
        return len(self._find_cuts(self._counts(self.pairs(number)))) + 1

    def pairs(self, epoch: int) -> Array:
        """Return the indices of the pairs of an epoch."""
        if self.mixture is None:
            return self.pairs_short_enough
        return self.mixture.draw_epoch(epoch, self.pairs_short_enough)

    def with_lengths(self, source_lengths: Array, target_lengths: Array) -> TokenBatches:
        """Return batches of the same pairs, ordered by other lengths."""
        found = copy.copy(self)
        found._order_by(lambda start, end: source_lengths[start:end], lambda start, end: target_lengths[start:end])
        return found

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make the tensors of the pairs with these indices, in this order."""
        sources = [self.sources[index] for index in indices]
        targets = [self.targets[index] for index in indices]
        return padded_batch(sources, targets, self.symbols)

    def _slices(self) -> Iterator[tuple[int, int]]:
        """Yield where each slice of the pairs begins and ends."""
        for start in range(0, len(self.sources), SLICE):
            yield start, min(start + SLICE, len(self.sources))

    def _sort_lengths(self, source_lengths: Lengths, target_lengths: Lengths) -> None:
        """Sort the lengths that occur, a few thousand at most, so that an epoch's sort need not compare them.

        Target lengths descend. Source lengths descend for one target length and ascend for the next, so that a batch
        with two target lengths still has similar source lengths.
        """

        def lengths(of_side: Lengths, start: int, end: int) -> Array:
            """Return one side's lengths, capped just above `max_length`, since a table has an entry for each length."""
            if self.max_length == math.inf:
                return of_side(start, end)
            return numpy.minimum(of_side(start, end), int(self.max_length) + 1)

        sources, source_place = _distinct(functools.partial(lengths, source_lengths), self._slices())
        targets, target_place = _distinct(functools.partial(lengths, target_lengths), self._slices())

        def keys(start: int, end: int) -> Array:
            """Return one number for both lengths of a pair."""
            key: Array = target_place[lengths(target_lengths, start, end)] * len(sources)
            return key + source_place[lengths(source_lengths, start, end)]

        occurs = numpy.zeros(len(targets) * len(sources), bool)
        for start, end in self._slices():
            occurs[keys(start, end)] = True
        found = numpy.flatnonzero(occurs)
        # With the end symbol
        of_target, of_source = targets[found // max(1, len(sources))] + 1, sources[found % max(1, len(sources))] + 1
        direction = numpy.where(of_target % 2 == 0, -1, 1)
        order = numpy.lexsort((direction * of_source, -of_target))
        # numpy uses a radix sort for 16 bits
        places = numpy.empty(len(occurs), dtype=numpy.uint16 if len(order) <= 1 << 16 else numpy.int32)
        places[found[order]] = numpy.arange(len(order))
        self._places = numpy.empty(len(self.sources), places.dtype)
        for start, end in self._slices():
            self._places[start:end] = places[keys(start, end)]
        self._longer = numpy.maximum(of_target, of_source)[order]

    def _counts(self, pairs: Array) -> Array:
        """Count the pairs with each combination of lengths that occurs."""
        counts = numpy.zeros(len(self._longer), numpy.int64)
        for start in range(0, len(pairs), SLICE):
            counts += numpy.bincount(self._places[pairs[start : start + SLICE]], minlength=len(counts))
        return counts

    def _sort(self, pairs: Array) -> Sorted:
        """Sort pairs by their lengths: count them, then place each slice of the pairs behind the slices before it."""
        counts = self._counts(pairs)
        places = numpy.empty(len(pairs), numpy.int32)
        free = numpy.cumsum(counts) - counts
        for start in range(0, len(pairs), SLICE):
            lengths = self._places[pairs[start : start + SLICE]]
            order = numpy.argsort(lengths, kind="stable")
            of_part = numpy.bincount(lengths, minlength=len(counts))
            # Where the first pair of each length goes, minus its place in the sorted slice
            shift = free - (numpy.cumsum(of_part) - of_part)
            places[shift[lengths[order]] + numpy.arange(len(order))] = start + order
            free += of_part
        return Sorted(places, counts)

    def _find_cuts(self, counts: Array) -> list[int]:
        """Return where batches begin in the sorted pairs, without the first one's 0.

        Random tie-breaking only exchanges pairs of equal lengths on both sides, so the cuts are the same in every epoch
        that has the same pairs.
        """
        cuts = []
        start = 0
        longest = 0
        position = 0
        for length, count in zip(self._longer.tolist(), counts.tolist(), strict=True):
            end = position + count
            if count:
                longest = max(longest, length)
            while position < end:
                # A batch takes rows x longest cells
                more = self.batch_tokens // longest - (position - start)
                if more < 1 and position > start:
                    cuts.append(position)
                    start = position
                    longest = length
                    continue
                position += min(max(more, 1), end - position)
        return cuts


Lengths = Callable[[int, int], Array]
"""Returns the lengths of the sentences from one index to another."""
SLICE = 1 << 18
"""Number of pairs whose lengths are in memory at a time."""


class Sorted(NamedTuple):
    """Pairs in the order of their lengths."""

    places: Array
    """Their indices in the array that was sorted."""
    counts: Array
    """How many pairs have each combination of lengths that occurs."""


def _distinct(lengths: Lengths, slices: Iterable[tuple[int, int]]) -> tuple[Array, Array]:
    """Return the lengths that occur, in ascending order, and for each length its place among them."""
    occurs = numpy.zeros(1, bool)
    for start, end in slices:
        found = lengths(start, end)
        if found.max() >= len(occurs):
            occurs = numpy.pad(occurs, (0, int(found.max()) + 1 - len(occurs)))
        occurs[found] = True
    return numpy.flatnonzero(occurs), numpy.cumsum(occurs) - 1


def order_of(ties: Array) -> Array:
    """Return the order in which a stable sort puts random numbers, in a third of its time."""
    order: Array = numpy.argsort(ties)
    ordered = ties[order]
    if (ordered[1:] == ordered[:-1]).any():
        # The order of equal numbers depends on the processor
        order = numpy.argsort(ties, kind="stable")
    return order


class EpochBatches(Sequence[list[int]]):
    """The batches of an epoch, each made when it is asked for.

    Args:
        order: the indices of all batches.
        cuts: where the second batch begins in `order`, the third, and so on.
        shuffled: the number of the batch that comes first, second, and so on.
        first: an offset that is added to every index.
    """

    def __init__(self, order: Array, cuts: Sequence[int], shuffled: Array, first: int = 0) -> None:
        self.order = order
        self.bounds = [0, *cuts, len(order)]
        self.shuffled = shuffled
        self.first = first

    def __len__(self) -> int:
        return len(self.shuffled)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        number = int(self.shuffled[index])
        return [self.first + each for each in self.order[self.bounds[number] : self.bounds[number + 1]].tolist()]


def batches_of_rank(batches: Sequence[list[int]], data_rank: int, data_ranks: int) -> list[list[int]]:
    """Return one data rank's share of a step; together, the data ranks' batches contain each sentence exactly once.

    Each data rank gets the same number of whole batches. The remaining batches, fewer than `data_ranks`, are each
    divided by sentences; a batch with fewer sentences than data ranks leaves nothing for some of them.
    """
    # Of 7 batches, each of 3 data ranks gets 2 whole ones and a third of the sentences of the seventh
    even = len(batches) // data_ranks * data_ranks
    divided = [batch[data_rank::data_ranks] for batch in batches[even:]]
    return [*batches[data_rank:even:data_ranks], *filter(None, divided)]


Position = tuple[int, int]
"""An epoch, and how many of its batches are done."""


class Steps(Dataset[tuple[Position, list[Batch]]]):
    """One process's batches of each optimizer step, with the position in the data after the step.

    Args:
        batches: the data.
        accumulate: number of batches in a step.
        data_rank, data_ranks: which of the processes with different sentences this is; see `batches_of_rank`.
        device: the model's device; for an accelerator, worker processes make the batches, in pinned memory on CUDA.
    """

    def __init__(self, batches: Epochs, accumulate: int, data_rank: int, data_ranks: int, device: torch.device) -> None:
        self.batches = batches
        self.accumulate = accumulate
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.device = device
        self.workers = WORKERS
        if device.type == "cpu":  # its cores are busy with the model
            self.workers = 0

    def __getitem__(self, step: tuple[Position, list[list[int]]]) -> tuple[Position, list[Batch]]:
        position, indices = step
        return position, [self.batches.batch(batch) for batch in indices]

    def after(self, epoch: int, done: int) -> Iterator[tuple[Position, list[Batch]]]:
        """Yield steps endlessly, starting after `done` batches of `epoch`; a step may cross the end of an epoch."""
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=self._indices(epoch, done),
            collate_fn=tuple,  # no collation
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_parent,
        )
        # Workers start with these signals blocked: one that arrives at once must not end them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_PARENT)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _indices(self, epoch: int, done: int) -> Iterator[tuple[Position, list[list[int]]]]:
        step: list[list[int]] = []
        while True:
            batches = self.batches.epoch(epoch)
            for number in range(done, len(batches)):
                step.append(batches[number])
                if len(step) == self.accumulate:
                    yield (epoch, number + 1), batches_of_rank(step, self.data_rank, self.data_ranks)
                    step = []
            del batches  # before those of the next epoch need as much memory
            # A step that is not full takes its other batches from the next epoch, so that all steps have the same size
            epoch += 1
            done = 0


WORKERS = 2
"""Number of worker processes that make batches ahead of an accelerator."""


LEFT_TO_THE_PARENT = {signal.SIGINT, signal.SIGTERM}
"""A terminal sends Ctrl-C, and Slurm SIGTERM, to the workers as well, but the parent still finishes its step."""
if sys.platform == "darwin":
    # macOS does not say who sent a signal; blocked there, SIGTERM would never end a worker
    LEFT_TO_THE_PARENT.remove(signal.SIGTERM)


def _leave_signals_to_the_parent(_: int) -> None:
    """Let only the parent end this process, which started with LEFT_TO_THE_PARENT blocked."""
    if signal.SIGTERM in LEFT_TO_THE_PARENT:
        threading.Thread(target=_end_by_parent, daemon=True).start()


def _end_by_parent() -> None:
    """End this process on a SIGTERM from its parent, and from nobody else."""
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def padded_batch(sources: Sequence[Ids], targets: Sequence[Ids], symbols: Symbols = ORDINARY) -> Batch:
    """Make the tensors of pairs of ids, with padding, start and end symbols."""
    whole = [symbols.target(ids) for ids in targets]
    return Batch(
        src=pad_rows([symbols.source(ids) for ids in sources]),
        tgt_in=pad_rows([ids[:-1] for ids in whole]),
        tgt_out=pad_rows([ids[1:] for ids in whole]),
    )


def pad_rows(rows: list[list[int]]) -> Tensor:
    """Return rows of ids as one tensor, padded at the end to the longest."""
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.long).reshape(-1, width)
