"""Metrics as sums: a corpus score is a function of the sum of its sentences' statistics.

The score of any resample or shuffle of the sentences therefore costs only a matrix product, and no text is read again.
Statistics and scores are sacreBLEU's.

Shapes: N sentences, K statistics of a sentence, R sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

Array = NDArray[np.float64]
TITLES = {
    "bleu": "BLEU",
    "bleu_lowercase": "BLEU, lower-cased",
    "multi_bleu_lowercase": "multi-bleu -lc",
    "chrf": "chrF",
    "ter": "TER",
    "metric_command": "metric command",
    "exact_match": "exact match",
}
"""Every metric, in the order in which they are shown."""


@dataclass(frozen=True)
class Measured:
    """One metric of one system's translations."""

    name: str
    """One of `TITLES`."""
    signature: str
    """How exactly the score was computed."""
    score: float
    """The corpus score, in percent."""
    statistics: Array
    """(N, K)."""
    of_sums: Callable[[Array], Array]
    """Sums of statistics (R, K) -> scores (R,)."""


def metrics(tokenize: str = "13a", lowercase: bool = False) -> dict[str, Any]:
    """Return sacreBLEU's metrics by name.

    bleu is BLEU-4 with sacreBLEU's default smoothing (Papineni et al. 2002; Post 2018), and bleu_lowercase the same for
    lower-cased text, the figure that most Multi30k papers report. multi_bleu_lowercase is Moses' multi-bleu.perl -lc:
    without smoothing, for text that is already tokenised. chrf is chrF2 with character 6-grams (Popović 2015). ter is
    the translation edit rate, case-insensitive edits per 100 reference words, where less is better (Snover et al.
    2006); sacreBLEU searches for word shifts in plain Python, which takes longer than all other metrics together.
    """
    # Without force, sacreBLEU warns about tokenised text, for which "none" is intended
    return {
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenize, force=True),
        "bleu_lowercase": BLEU(lowercase=True, tokenize=tokenize, force=True),
        "multi_bleu_lowercase": BLEU(lowercase=True, tokenize="none", smooth_method="none", force=True),
        "chrf": CHRF(lowercase=lowercase),
        "ter": TER(),
    }


def compute_metric(name: str, metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """Compute one of sacreBLEU's metrics, with one reference for each sentence."""
    statistics = metric._extract_corpus_statistics(hypotheses, [references])
    score = metric._aggregate_and_compute(statistics).score
    of_sums = partial(scores_of_sums, metric)
    return Measured(name, str(metric.get_signature()), score, np.array(statistics, dtype=np.float64), of_sums)


def mean_of(name: str, signature: str, values: Sequence[float]) -> Measured:
    """Return a metric that is the mean of one number per sentence."""
    statistics = np.array([[value, 1.0] for value in values])
    return Measured(name, signature, float(np.mean(values)), statistics, mean_of_sums)


def side_by_side(measured: Sequence[Measured]) -> Array:
    """Return the statistics of several metrics, or systems, as one matrix."""
    return np.concatenate([one.statistics for one in measured], axis=1)


def scores_of_all(measured: Sequence[Measured], sums_RK: Array) -> list[Array]:
    """Compute the scores from sums of the columns of `side_by_side`, (R,) for each metric."""
    ends = np.cumsum([one.statistics.shape[1] for one in measured])[:-1]
    return [one.of_sums(sums) for one, sums in zip(measured, np.split(sums_RK, ends, axis=1), strict=True)]


def scores_of_sums(metric: Any, sums_RK: Array) -> Array:
    """Compute the scores, in percent, of one of sacreBLEU's metrics from sums of its statistics: (R, K) -> (R,)."""
    return np.array([metric._compute_score_from_stats(sums).score for sums in sums_RK.tolist()])


def mean_of_sums(sums_RK: Array) -> Array:
    """Compute the mean from (sum, count): (R, 2) -> (R,)."""
    mean_R: Array = sums_RK[:, 0] / sums_RK[:, 1]
    return mean_R
