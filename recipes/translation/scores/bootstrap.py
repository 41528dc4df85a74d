"""Confidence intervals by bootstrap resampling of the sentences (Efron 1979; for BLEU, Koehn 2004).

Shapes: N sentences, K statistics of a sentence, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.translation.scores.statistics import Array, Measured, scores_of_all, side_by_side

RESAMPLES = 1_000
SEED = 12_345
"""Number of resamples and seed: sacreBLEU's defaults, so that its own intervals come from the same resamples."""


class Interval(NamedTuple):
    """The bounds of a 95 % confidence interval."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.2f}, {self.high:.2f}]"


def intervals(measured: Sequence[Measured], resamples: int = RESAMPLES, seed: int = SEED) -> list[Interval]:
    """Return the interval of each metric; all metrics see the same resamples."""
    return [interval(scores_R) for scores_R in resampled_scores(measured, resamples, seed)]


def interval(scores_R: Array) -> Interval:
    """Return the bounds that leave out a fortieth of the resamples on each side (Koehn 2004)."""
    ordered_R = np.sort(scores_R)
    left_out = len(ordered_R) // 40
    return Interval(float(ordered_R[left_out]), float(ordered_R[len(ordered_R) - left_out - 1]))


def resampled_scores(measured: Sequence[Measured], resamples: int = RESAMPLES, seed: int = SEED) -> list[Array]:
    """Return the scores of the resamples, (R,) for each metric.

    A resample draws N sentences from the N in the test set, with replacement. Its sums of statistics are its counts of
    the sentences times the statistics: one matrix product for all metrics and systems.
    """
    statistics_NK = side_by_side(measured)
    sums_RK = np.concatenate([counts @ statistics_NK for counts in _counts(len(statistics_NK), resamples, seed)])
    return scores_of_all(measured, sums_RK)


COUNTS = 2**22
"""The most counts that exist at a time."""


def _counts(sentences: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield how often each resample contains each sentence, some resamples at a time: (some of R, N)."""
    generator = np.random.default_rng(seed)
    block = max(1, COUNTS // sentences)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn: NDArray[np.int64] = generator.choice(sentences, size=(rows, sentences))
        # The indices in row r are offset by r x N, so that a single count serves all rows
        cells = (drawn + np.arange(rows)[:, None] * sentences).ravel()
        yield np.bincount(cells, minlength=rows * sentences).reshape(rows, sentences)
