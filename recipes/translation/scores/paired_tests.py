"""Do two systems really differ, or only by chance on this test set? Paired tests over the sentences of one test set.

Every score is computed from the same sentence statistics as the interval of a single system (`statistics`), so that
resampling or shuffling reads no text.

Shapes: N sentences, K statistics of a sentence, R resamples or trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.translation.scores.bootstrap import RESAMPLES, SEED, Interval, interval, resampled_scores
from recipes.translation.scores.statistics import Array, Measured, scores_of_all, side_by_side

TRIALS = 10_000
"""Number of shuffles in a randomisation test, as in sacreBLEU."""
CELLS = 2**22
"""The most choices that are converted to numbers at a time."""


@dataclass(frozen=True)
class Comparison:
    """A metric of a system, and how it differs from the baseline's."""

    score: float
    interval: Interval
    difference: float
    """The system's score minus the baseline's."""
    difference_interval: Interval
    """The interval of the difference, over resamples that both systems share: narrower than either system's own."""
    p_bootstrap: float
    """The two-sided p-value of paired bootstrap resampling (Koehn 2004)."""
    p_randomisation: float
    """The two-sided p-value of paired approximate randomisation (Riezler and Maxwell 2005)."""


def compare_metrics(baseline: Sequence[Measured], system: Sequence[Measured]) -> list[Comparison]:
    """Compare each metric of a system with the same metric of the baseline, which has the same sentences."""
    # One call for both systems: they must see the same resamples
    drawn = resampled_scores([*baseline, *system], RESAMPLES, SEED)
    shuffled = shuffled_differences(baseline, system, TRIALS, SEED)
    found = []
    for index, (one, other) in enumerate(zip(baseline, system, strict=True)):
        difference = other.score - one.score
        of_baseline_R = drawn[index]
        of_system_R = drawn[len(baseline) + index]
        found.append(
            Comparison(
                score=other.score,
                interval=interval(of_system_R),
                difference=difference,
                difference_interval=interval(of_system_R - of_baseline_R),
                p_bootstrap=p_value(deviations(of_system_R - of_baseline_R), difference),
                p_randomisation=p_value(shuffled[index], difference),
            )
        )
    return found


def deviations(differences_R: Array) -> Array:
    """Return how far the resamples' differences are from their mean, in either direction.

    If the systems did not differ, the differences would be centred on 0 rather than on their mean, so the mean is
    subtracted (Efron and Tibshirani 1993, chapter 16). It is subtracted before the sign is dropped: sacreBLEU and Moses
    take absolute values first, and then about one in eight pairs of equal systems seems to differ at the level of 0.05.
    """
    centred_R: Array = np.abs(differences_R - differences_R.mean())
    return centred_R


def p_value(statistics_R: Array, difference: float) -> float:
    """Return (c + 1) / (R + 1), where c statistics are at least as large as the absolute difference observed.

    A statistic that is equal counts, as in Riezler and Maxwell 2005. sacreBLEU counts only larger ones, so that a
    system would differ significantly from itself; if none is equal, its p-value is the same.
    """
    # The same sum computed in another order may be off by a few units in the last place
    least = abs(difference) - 1e-9
    return float((np.sum(statistics_R >= least) + 1) / (len(statistics_R) + 1))


def shuffled_differences(
    baseline: Sequence[Measured], system: Sequence[Measured], trials: int = TRIALS, seed: int = SEED
) -> list[Array]:
    """Return the absolute differences after swapping the translations of random sentences, (R,) for each metric.

    Each sentence is swapped with probability 1/2: if the systems did not differ, neither would the scores of the two
    mixtures. The mixtures' sums are the systems' own plus or minus the swapped sentences' differences in statistics.
    """
    one_NK = side_by_side(baseline)
    other_NK = side_by_side(system)
    # Which sentences each trial swaps
    picked_RN = np.random.default_rng(seed).integers(2, size=(trials, len(one_NK)), dtype=bool)
    block = max(1, CELLS // len(one_NK))
    starts = range(0, trials, block)
    moved_RK = np.concatenate([picked_RN[start : start + block] @ (one_NK - other_NK) for start in starts])
    mixed = scores_of_all(baseline, other_NK.sum(0) + moved_RK)
    rest = scores_of_all(baseline, one_NK.sum(0) - moved_RK)
    return [np.abs(one_R - other_R) for one_R, other_R in zip(mixed, rest, strict=True)]
