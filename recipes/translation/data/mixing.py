"""Mixing of corpora: how many pairs of each an epoch contains, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing

Array = numpy.typing.NDArray[Any]


class Mixture:
    """Several concatenated corpora, sampled by weight and temperature.

    An epoch has as many pairs as the corpora together. A corpus of n pairs and weight w has a share of them in
    proportion to w n^(1/T), where T is the temperature (Arivazhagan et al. 2019, "Massively multilingual neural machine
    translation in the wild", section 4.2), and at least one pair, unless w is 0. Each corpus is gone through in passes,
    each in a new order, and an epoch continues where the last one ended: no pair is used twice before all pairs of its
    corpus have been used. The pairs of an epoch depend only on (seed, epoch).
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], temperature: float, seed: int) -> None:
        self._bounds = numpy.cumsum(sizes)
        self._weights = numpy.array(weights)
        self._temperature = temperature
        self._seed = seed

    def counts(self, usable: Array) -> list[int]:
        """Return how many pairs of each corpus an epoch has if only the `usable` indices may be drawn."""
        sizes = numpy.array([len(members) for members in self._members(usable)])
        sizes[self._weights == 0] = 0
        if not sizes.any():
            return [0] * len(sizes)
        shares = self._weights * sizes ** (1 / self._temperature) * (sizes > 0)
        exact = sizes.sum() * shares / shares.sum()
        counts = exact.astype(numpy.int64)
        # The pairs left over by rounding down go to the corpora that lost most by it
        most = numpy.argsort(counts - exact, kind="stable")
        counts[most[: round(sizes.sum()) - counts.sum()]] += 1
        # A share below one pair becomes one, or a small corpus would never be used; there are enough pairs for that
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
