"""Scores of translations: sacreBLEU's BLEU, chrF and TER with their signatures and intervals, and exact matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.translation.errors import DataError
from recipes.translation.scores.bootstrap import RESAMPLES, SEED, intervals
from recipes.translation.scores.statistics import TITLES, Measured, compute_metric, mean_of, metrics
from recipes.translation.text.bleu_tokenizers import tokenizer_for
from recipes.translation.text.metric_command import words_of


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
