"""Comparison of several systems on one test set, with the first of them as the baseline.

A system is a file of translations, one per line, or a run whose translations `evaluate` has written. Whether two of
them really differ, or only by chance on this test set, is the question of paired tests over its sentences: every score
is computed from the same sentence statistics as the interval of a single system, so that resampling or shuffling reads
no text.

Shapes: N sentences, K statistics of a sentence, R resamples or trials.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.translation.data.corpora import Corpora, HeldOutSplit
from recipes.translation.errors import DataError
from recipes.translation.files.atomic_folder import MODELS, whole_folder
from recipes.translation.files.lines import read_lines
from recipes.translation.run_folder.checkpoint import saved_config
from recipes.translation.run_folder.made_from import lines_digest, model_with, noted_digest
from recipes.translation.scores.scores import (
    RESAMPLES,
    SEED,
    TITLES,
    Array,
    Interval,
    Measured,
    describe_resampling,
    interval,
    intervals,
    measure,
    resampled_scores,
    scores_of_all,
    side_by_side,
)
from recipes.translation.settings.config import RunConfig
from recipes.translation.text.bleu_tokenizers import tokenizer_for


@dataclass(frozen=True)
class System:
    """A system's translations of the test set, and what its run says about the test set."""

    name: str
    translations: Sequence[str]
    references: Sequence[str] | None = None
    """The references in the run's data; None for a file of translations."""
    config: RunConfig | None = None


@dataclass(frozen=True)
class Metric:
    """One metric for the baseline and the systems that are compared with it."""

    measured: Measured
    interval: Interval
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Table:
    """Every metric for every system."""

    names: Sequence[str]
    """The systems, the baseline first."""
    sentences: int
    metrics: Sequence[Metric]

    def __str__(self) -> str:
        width = max(len("system"), *map(len, self.names))
        blocks = [
            f"{self.sentences:,} sentences; the baseline is {self.names[0]}",
            *(self._block(metric, width) for metric in self.metrics),
            f"[ ] is the 95 % confidence interval. Intervals and p (bootstrap): {describe_resampling()} (Koehn 2004); "
            f"p (randomisation): {TRIALS:,} trials, seed {SEED} (Riezler and Maxwell 2005). Both tests are paired and "
            "two-sided.",
        ]
        return "\n\n".join(blocks)

    def _block(self, metric: Metric, width: int) -> str:
        better = "more is better"
        if metric.measured.name == "ter":
            better = "less is better"
        first, *others = self.names
        lines = [
            f"{TITLES[metric.measured.name]} ({better})   {metric.measured.signature}",
            f"  {'system':<{width}}   score  {'':<16}  difference  {'':<16}  p (bootstrap)  p (randomisation)",
            f"  {first:<{width}}  {metric.measured.score:6.2f}  {metric.interval!s:<16}",
        ]
        for name, found in zip(others, metric.comparisons, strict=True):
            lines.append(
                f"  {name:<{width}}  {found.score:6.2f}  {found.interval!s:<16}  {found.difference:>+10.2f}  "
                f"{found.difference_interval!s:<16}  {found.p_bootstrap:13.4f}  {found.p_randomisation:17.4f}"
            )
        return "\n".join(line.rstrip() for line in lines)


def compare(
    systems: Sequence[str], references: Path | None = None, split: HeldOutSplit = "test", tokenize: str | None = None
) -> Table:
    """Compare each system with the first one, in BLEU, chrF and TER.

    The test set is `references`, or the `split` of the data of the runs among the systems; they must all have the same.
    `tokenize` is sacreBLEU's tokeniser; the default is the first run's or, for files only, one chosen by their script.

    Raises DataError for systems with different test sets or lengths, and if nothing says what the test set is.
    """
    found = [_system(name, split) for name in systems]
    expected = _references(found, references)
    for one in found:
        if len(one.translations) != len(expected):
            raise DataError(
                f"{one.name} has {len(one.translations):,} translations, but the test set has {len(expected):,} "
                "sentences: compare translations of the same test set"
            )
    configs = [one.config for one in found if one.config is not None]
    language = ""
    if configs:
        tokenize = tokenize or configs[0].data.tokenize
        language = configs[0].data.target
        if references is None:  # the test set is a corpus's, which may have a language of its own
            language = Corpora(configs[0]).the_one(split).data.target
    tokenize = tokenizer_for(tokenize or "auto", language, expected)
    lowercase = bool(configs) and configs[0].subwords.lowercase
    measured = [measure(one.translations, expected, lowercase=lowercase, tokenize=tokenize) for one in found]
    return table([one.name for one in found], measured)


def table(names: Sequence[str], measured: Sequence[Sequence[Measured]]) -> Table:
    """Compare every metric of the other systems with that of the first one."""
    baseline, *others = measured
    # BLEU of lower-cased text and exact matches add little to these, and more tests find more by chance
    kept = [index for index, one in enumerate(baseline) if one.name in ("bleu", "multi_bleu_lowercase", "chrf", "ter")]
    baseline = [baseline[index] for index in kept]
    compared_with = [compare_metrics(baseline, [other[index] for index in kept]) for other in others]
    metrics = [
        Metric(one, bounds, [rows[index] for rows in compared_with])
        for index, (one, bounds) in enumerate(zip(baseline, intervals(baseline), strict=True))
    ]
    return Table(names, len(baseline[0].statistics), metrics)


def _system(name: str, split: HeldOutSplit) -> System:
    path = Path(name)
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"there is no file or run {name}; name files of translations, or runs")
        return System(name, read_lines(path))
    model = next((path / model for model in MODELS if whole_folder(path / model)), None)
    if model is None:
        raise DataError(f"{name} is not a run: it has none of {', '.join(MODELS)}; name runs, or files of translations")
    config = saved_config(model)
    data = Corpora(config).the_one(split)
    file = path / f"{split}.translations.txt"
    again = f"evaluate --run {shlex.quote(name)} --split {split}"
    if not file.exists():
        raise DataError(f"there is no {file}: make it with {again}")
    scores = path / f"{split}.scores.json"
    by = model_with(path, noted_digest(scores, "weights", 0))
    if not by:
        raise DataError(f"{file} was not translated by any model that {name} has now: {again}, or name the file itself")
    pairs = data.pairs
    # The references may have been corrected since, so all systems are scored again
    sources = noted_digest(scores, "sources", "sha256")
    if sources and sources != lines_digest(pair.source for pair in pairs):
        raise DataError(
            f"{file} has translations of sentences other than those {data.setting} has now: {again}, or name the file "
            "itself"
        )
    if by != "best":
        name = f"{name} ({by})"
    return System(name, read_lines(file), [pair.target for pair in pairs], config)


def _references(systems: Sequence[System], path: Path | None) -> Sequence[str]:
    """Return the references of the test set; raise DataError if not all systems have the same, or none has any."""
    known = [(one.name, one.references) for one in systems if one.references is not None]
    if path is not None:
        given = read_lines(path)
        # A run that lower-cases its data has lower-cased references
        if any(one.config is not None and one.config.subwords.lowercase for one in systems):
            given = [line.lower() for line in given]
        known.insert(0, (str(path), given))
    if not known:
        raise DataError(
            "files of translations do not say which test set they belong to: name its references with --references"
        )
    (where, expected), *others = known
    for name, lines in others:
        if len(lines) != len(expected):
            raise DataError(
                f"the test sets differ: {where} has {len(expected):,} references, that of {name} {len(lines):,}"
            )
        for number, (one, other) in enumerate(zip(expected, lines, strict=True), start=1):
            if one != other:
                raise DataError(
                    f"the test sets differ: reference {number:,} of {where} is {one!r}, that of {name} {other!r}"
                )
    return expected


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
