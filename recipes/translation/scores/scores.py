"""Scores of translations: sacreBLEU's BLEU, chrF and TER with their signatures and intervals, and exact matches.

A corpus score is a function of the sum of its sentences' statistics, which are sacreBLEU's, as are the scores. So the
score of any resample or shuffle of the sentences costs only a matrix product, and no text is read again. Confidence
intervals are by bootstrap resampling of the sentences (Efron 1979; for BLEU, Koehn 2004).

Shapes: N sentences, K statistics of a sentence, R resamples or other sums, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from recipes.translation.errors import DataError
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.metric_command import words_of

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


def record_of(found: Sequence[Measured]) -> dict[str, Any]:
    """Return the scores of the metrics that `measure` returned, in percent, as they are written to a file.

    For each metric, by name, there are its score, its signature, which says exactly how the score was computed, and its
    95 % confidence interval. The score of a metric that was not requested is None.
    """
    record: dict[str, Any] = {"sentences": len(found[0].statistics)}
    by_name = {one.name: one for one in found}
    for name in TITLES:
        one = by_name.get(name)
        record[name] = one and one.score
        if name != "exact_match":
            record[f"{name}_signature"] = one and one.signature
    bounds = dict(zip(by_name, intervals(found), strict=True))
    return {**record, "intervals": bounds, "resamples": RESAMPLES, "seed": SEED}


def scores_in_words(record: Mapping[str, Any]) -> str:
    """Return a line for each score in what `record_of` returned."""
    notes = {"exact_match_signature": f"of {record['sentences']:,} sentences", **record}
    lines = [
        f"  {title:<18} {record[name]:6.2f}  {record['intervals'][name]!s:<16}  {notes[f'{name}_signature']}"
        for name, title in TITLES.items()
        if record[name] is not None
    ]
    return "\n".join([*lines, f"  [ ] is the 95 % confidence interval: {describe_resampling()}"])


def describe_resampling() -> str:
    """Return how the resamples were drawn."""
    return f"bootstrap, {RESAMPLES:,} resamples, seed {SEED}"


def measure(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> list[Measured]:
    """Compute every metric, with the statistics of each sentence, for translations with one reference each.

    `tokenize` is sacreBLEU's name for a tokeniser (13a, intl, char, zh, ja-mecab, ...); "none" is for text that is
    already tokenised, and adds the score of `multi-bleu.perl -lc`. `lowercase` makes the main BLEU and chrF
    case-insensitive, as TER always is.

    Raises DataError if the two differ in length (sacreBLEU itself would silently cut the longer one) or are empty.
    """
    check_pairs(hypotheses, references)
    matches = [100.0 * (hypothesis == reference) for hypothesis, reference in zip(hypotheses, references, strict=True)]
    return [
        *(
            compute_metric(name, metric, hypotheses, references)
            for name, metric in metrics(tokenize, lowercase).items()
            if name != "multi_bleu_lowercase" or tokenize == "none"
        ),
        mean_of("exact_match", f"of {len(references):,} sentences", matches),
    ]


def score_of(
    name: str, hypotheses: Sequence[str], references: Sequence[str], lowercase: bool, tokenize: str = "13a"
) -> float:
    """Compute only the metric with this name, as `measure` does."""
    return compute_metric(name, metrics(tokenize, lowercase)[name], hypotheses, references).score


def check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise DataError unless there is one hypothesis for each reference, and at least one."""
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} hypotheses but {len(references):,} references; there must be one for each"
        )
    if not references:
        raise DataError("there is nothing to evaluate: no sentences")


def check_metrics(tokenize: str | None, command: str | None) -> None:
    """Raise an error, before torch is imported, for a tokeniser or a program that is not available."""
    tokenizer_for(tokenize or "auto", "")
    if command is not None:
        words_of(command)


SHOWN = ("bleu", "multi_bleu_lowercase", "chrf", "ter", "metric_command")
"""Metrics that have a column in the table."""
FEW = 100
"""Number of sentences below which a table warns that a score says little."""


@dataclass(frozen=True)
class Row:
    """The scores of a test set."""

    name: str
    sentences: int
    scores: Sequence[float]
    intervals: Sequence[Interval]


@dataclass(frozen=True)
class Table:
    """The scores of several test sets; the last row has their mean."""

    metrics: Sequence[str]
    """The metrics' titles."""
    rows: Sequence[Row]

    def __str__(self) -> str:
        width = max(len("test set"), *(len(row.name) for row in self.rows))
        columns = "".join(f"  {title:>6}  {'':<16}" for title in self.metrics)
        lines = [f"  {'test set':<{width}}  sentences{columns}"]
        for row in self.rows:
            cells = "".join(
                f"  {score:6.2f}  {bounds!s:<16}" for score, bounds in zip(row.scores, row.intervals, strict=True)
            )
            lines.append(f"  {row.name:<{width}}  {row.sentences:9,}{cells}")
        note = f"  [ ] is the 95 % confidence interval: {describe_resampling()}"
        if any(row.sentences < FEW for row in self.rows):
            note += f"; a test set of fewer than {FEW} sentences says little"
        return "\n".join(line.rstrip() for line in [*lines, note])


def scores_of_sets(sets: Mapping[str, Sequence[Measured]]) -> Table:
    """Score several test sets with the same metrics, and compute the mean of their scores, which weights sets equally.

    Resamples of the mean are the means of the sets' own resamples, which draw the same rows if two sets are equally
    long: sets that translate the same sentences into several languages are easy or difficult together.
    """
    shown = {name: [one for one in measured if one.name in SHOWN] for name, measured in sets.items()}
    rows = [
        Row(name, len(some[0].statistics), [one.score for one in some], intervals(some)) for name, some in shown.items()
    ]
    drawn_MR = np.mean([resampled_scores(some) for some in shown.values()], axis=0)
    scores_M = np.mean([row.scores for row in rows], axis=0)
    sentences = sum(row.sentences for row in rows)
    mean = Row("mean", sentences, scores_M.tolist(), [interval(scores_R) for scores_R in drawn_MR])
    titles = {**TITLES, "multi_bleu_lowercase": "m-bleu"}
    (some, *_) = shown.values()
    return Table([titles[one.name] for one in some], [*rows, mean])
