"""Mixing of corpora: how many pairs of each an epoch contains, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing

Array = numpy.typing.NDArray[Any]


class Mixture:
    """Several corpora, which follow each other, sampled by weight and temperature.

    An epoch has as many pairs as the corpora have together. Of them a corpus of n pairs and weight w has a share in
    proportion to w n^(1/T), where T is the temperature (Arivazhagan et al. 2019, "Massively multilingual neural machine
    translation in the wild", section 4.2), and at least one pair, unless w is 0. A corpus is gone through from pass to
    pass, each in an order of its own, and an epoch continues where the last one ended: no pair is used twice before
    all pairs of its corpus are used. The pairs of an epoch depend on (seed, epoch) alone.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], temperature: float, seed: int) -> None:
        self._bounds = numpy.cumsum(sizes)
        self._weights = numpy.array(weights)
        self._temperature = temperature
        self._seed = seed

    def counts(self, usable: Array) -> list[int]:
        """Return how many pairs of each corpus an epoch has, of which only the `usable` indices may be drawn."""
        sizes = numpy.array([len(members) for members in self._members(usable)])
        sizes[self._weights == 0] = 0
        if not sizes.any():
            return [0] * len(sizes)
        shares = self._weights * sizes ** (1 / self._temperature) * (sizes > 0)
        exact = sizes.sum() * shares / shares.sum()
        counts = exact.astype(numpy.int64)
        # The pairs that rounding down leaves over go where it took most
        most = numpy.argsort(counts - exact, kind="stable")
        counts[most[: round(sizes.sum()) - counts.sum()]] += 1
        # A share below one pair is one pair, or a small corpus would never be used; there are at least as many pairs
        for corpus in ((shares > 0) & (counts == 0)).nonzero()[0]:
            counts[corpus] = 1
            counts[counts.argmax()] -= 1
        return [int(count) for count in counts]

    def draw_epoch(self, epoch: int, usable: Array) -> Array:
        """Return the indices of an epoch's pairs, which are all `usable`."""
        found = [usable[:0]]
        for number, (members, count) in enumerate(zip(self._members(usable), self.counts(usable), strict=True)):
            position = epoch * count
            end = position + count
            while position < end:
                through, start = divmod(position, len(members))
                order = numpy.random.default_rng([self._seed, number, through]).permutation(len(members))
                taken = order[start : start + end - position]
                found.append(members[taken])
                position += len(taken)
        return numpy.concatenate(found)

    def _members(self, usable: Array) -> list[Array]:
        return numpy.split(usable, numpy.searchsorted(usable, self._bounds[:-1]))
