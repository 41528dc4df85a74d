"""Metrics as sums: a corpus score is a function of the sum of its sentences' statistics.

So the score of any resample, shuffle or subset of the sentences costs a product of matrices, and no text is read again.
The statistics are sacreBLEU's; the functions compute sacreBLEU's scores from many sums at a time.

Shapes: N sentences, K statistics of a sentence, R sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One metric of one system's translations."""

    name: str
    title: str
    signature: str
    """How exactly the score was computed."""
    score: float
    """Of the corpus, in percent."""
    statistics: Array
    """(N, K)."""
    of_sums: Callable[[Array], Array]
    """Sums of statistics (R, K) -> scores (R,)."""
    higher_is_better: bool = True

    def subset(self, rows: Sequence[int]) -> Measured:
        """Return the same of these sentences only."""
        statistics = self.statistics[list(rows)]
        return replace(self, statistics=statistics, score=float(self.of_sums(statistics.sum(0, keepdims=True))[0]))


def measure_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str, lowercase: bool = False
) -> Measured:
    """Compute BLEU-4 with sacreBLEU's default smoothing (Papineni et al. 2002; Post 2018)."""
    # Without force, sacreBLEU warns about tokenised text, for which "none" is meant
    metric = BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    return _measured("bleu", "BLEU", metric, hypotheses, references, bleu_of_sums)


def measure_bleu_lowercase(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str) -> Measured:
    """Compute BLEU-4 of the lower-cased text."""
    found = measure_bleu(hypotheses, references, tokenize=tokenize, lowercase=True)
    return replace(found, name="bleu_lowercase", title="BLEU, lower-cased")


def measure_multi_bleu_lowercase(hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """Compute BLEU-4 of lower-cased text that is already tokenised, without smoothing: Moses' multi-bleu.perl -lc."""
    metric = BLEU(lowercase=True, tokenize="none", smooth_method="none", force=True)
    of_sums = unsmoothed_bleu_of_sums
    return _measured("multi_bleu_lowercase", "multi-bleu -lc", metric, hypotheses, references, of_sums)


def measure_chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Measured:
    """Compute chrF2 of character 6-grams (Popović 2015)."""
    return _measured("chrf", "chrF", CHRF(lowercase=lowercase), hypotheses, references, chrf_of_sums)


def measure_ter(hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """Compute the translation edit rate without regard to case, of which less is better (Snover et al. 2006).

    sacreBLEU searches the shifts of words in plain Python, which takes longer than all other metrics together.
    """
    found = _measured("ter", "TER", TER(), hypotheses, references, ter_of_sums)
    return replace(found, higher_is_better=False)


def measure_exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """Compute the percentage of translations that equal the reference, character for character."""
    matches = [100.0 * (hypothesis == reference) for hypothesis, reference in zip(hypotheses, references, strict=True)]
    return mean_of("exact_match", "exact match", f"of {len(references):,} sentences", matches)


def mean_of(name: str, title: str, signature: str, values: Sequence[float]) -> Measured:
    """Return a metric that is the mean of a number of each sentence."""
    statistics = np.array([[value, 1.0] for value in values])
    return Measured(name, title, signature, float(np.mean(values)), statistics, mean_of_sums)


def _measured(
    name: str,
    title: str,
    metric: Any,
    hypotheses: Sequence[str],
    references: Sequence[str],
    of_sums: Callable[[Array], Array],
) -> Measured:
    """Compute a metric of sacreBLEU, with one reference for each sentence."""
    statistics = metric._extract_corpus_statistics(hypotheses, [references])
    score = metric._aggregate_and_compute(statistics).score
    return Measured(name, title, str(metric.get_signature()), score, np.array(statistics, dtype=np.float64), of_sums)


def bleu_of_sums(sums_RK: Array, smooth: bool = True, effective_order: bool = False) -> Array:
    """Compute BLEU-4 in percent from (length, reference's length, 4 x matches, 4 x n-grams): (R, 10) -> (R,).

    exp(min(0, 1 - r / c) + mean of log p_n), Papineni et al. 2002, section 2.3. With `smooth`, the k-th order without a
    match counts as 1 / 2^k of a match (method 3 of Chen and Cherry 2014). With `effective_order`, which is for single
    sentences, the mean is over the orders of which the hypothesis has an n-gram; otherwise BLEU without one is 0.
    """
    length_R = sums_RK[:, 0]
    reference_R = sums_RK[:, 1]
    matches_R4 = sums_RK[:, 2:6]
    total_R4 = sums_RK[:, 6:10]
    counted_R4 = total_R4 > 0
    defined_R = matches_R4.any(1)
    orders_R = np.maximum(1, counted_R4.sum(1))
    if not effective_order:
        defined_R &= counted_R4.all(1)
    if smooth:
        without_R4 = matches_R4 == 0
        matches_R4 = np.where(without_R4, 0.5 ** without_R4.cumsum(1), matches_R4)
    precision_R4 = np.divide(matches_R4, total_R4, out=np.ones_like(total_R4), where=counted_R4)
    with np.errstate(divide="ignore", invalid="ignore"):  # where BLEU is 0 by definition
        brevity_R = np.minimum(0.0, 1.0 - reference_R / length_R)
        score_R = 100.0 * np.exp(brevity_R + np.log(precision_R4).sum(1) / orders_R)
    return np.where(defined_R, score_R, 0.0)


def unsmoothed_bleu_of_sums(sums_RK: Array) -> Array:
    """Compute BLEU that is 0 without a match of any order: (R, 10) -> (R,)."""
    return bleu_of_sums(sums_RK, smooth=False)


def sentence_bleu_of_sums(sums_RK: Array) -> Array:
    """Compute BLEU of single sentences: (R, 10) -> (R,)."""
    return bleu_of_sums(sums_RK, effective_order=True)


CHRF_BETA = 2
"""chrF2 weighs recall twice as much as precision."""


def chrf_of_sums(sums_RK: Array) -> Array:
    """Compute chrF in percent from (n-grams, reference's n-grams, matches) of each order: (R, 3 x orders) -> (R,).

    (1 + beta^2) P R / (beta^2 P + R), with P and R averaged over the orders that both sides have (Popović 2015).
    """
    hypothesis_RN, reference_RN, matches_RN = sums_RK.reshape(len(sums_RK), -1, 3).transpose(2, 0, 1)
    counted_RN = (hypothesis_RN > 0) & (reference_RN > 0)
    orders_R = np.maximum(1, counted_RN.sum(1))
    precision_R = np.divide(matches_RN, hypothesis_RN, out=np.zeros_like(matches_RN), where=counted_RN).sum(1)
    recall_R = np.divide(matches_RN, reference_RN, out=np.zeros_like(matches_RN), where=counted_RN).sum(1)
    precision_R = precision_R / orders_R
    recall_R = recall_R / orders_R
    weight = CHRF_BETA**2
    below_R = weight * precision_R + recall_R
    above_R = 100.0 * (1 + weight) * precision_R * recall_R
    score_R: Array = np.divide(above_R, below_R, out=np.zeros_like(above_R), where=below_R > 0)
    return score_R


def ter_of_sums(sums_RK: Array) -> Array:
    """Compute edits per reference word in percent: (R, 2) -> (R,). Without any reference word, any edit is 100."""
    edits_R = sums_RK[:, 0]
    words_R = sums_RK[:, 1]
    without_R = np.where(edits_R > 0, 100.0, 0.0)
    return np.divide(100.0 * edits_R, words_R, out=without_R, where=words_R > 0)


def mean_of_sums(sums_RK: Array) -> Array:
    """Compute the mean from (sum, count): (R, 2) -> (R,)."""
    mean_R: Array = sums_RK[:, 0] / sums_RK[:, 1]
    return mean_R
