"""Comparison of several systems on one test set, with the first of them as the baseline.

A system is a file of translations, one per line, or a run whose translations `evaluate` has written.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.translation.data.corpora import Corpora, HeldOutSplit
from recipes.translation.errors import DataError
from recipes.translation.files.atomic_folder import MODELS, whole_folder
from recipes.translation.files.lines import read_lines
from recipes.translation.run_folder.checkpoint import saved_config
from recipes.translation.run_folder.made_from import lines_digest, model_with, noted_digest
from recipes.translation.scores.bootstrap import SEED, Interval, intervals
from recipes.translation.scores.paired_tests import TRIALS, Comparison, compare_metrics
from recipes.translation.scores.scores import describe_resampling, measure
from recipes.translation.scores.statistics import TITLES, Measured
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
                f"{one.name} has {len(one.translations):,} translations, and the test set {len(expected):,} sentences: "
                "compare translations of the same test set"
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
        raise DataError(f"{file} was not translated by a model that {name} has now: {again}, or name the file itself")
    pairs = data.pairs
    # The references may have been corrected since, so all systems are scored again
    sources = noted_digest(scores, "sources", "sha256")
    if sources and sources != lines_digest(pair.source for pair in pairs):
        raise DataError(
            f"{file} has the translations of other sentences than {data.setting} has now: {again}, or name the file "
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
