"""Scores of translations: sacreBLEU's BLEU, chrF and TER with their signatures and intervals, and exact matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from recipes.translation.errors import DataError
from recipes.translation.scores.bootstrap import RESAMPLES, SEED, Interval, intervals
from recipes.translation.scores.statistics import (
    Measured,
    measure_bleu,
    measure_bleu_lowercase,
    measure_chrf,
    measure_exact_match,
    measure_multi_bleu_lowercase,
    measure_ter,
)
from recipes.translation.text.bleu_tokenizers import check_tokenizer, tokenizer_for


@dataclass(frozen=True)
class Scores:
    """Scores in percent; each signature says exactly how its score was computed."""

    sentences: int
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    ter: float
    """Edits per 100 words of the references: less is better, and it may exceed 100."""
    ter_signature: str
    bleu_lowercase: float
    """BLEU of the lower-cased text with the same tokeniser: the figure that most Multi30k papers report."""
    bleu_lowercase_signature: str
    exact_match: float
    """Percentage of translations that equal the reference, character for character."""
    multi_bleu_lowercase: float | None
    """BLEU-4 of lower-cased text that is already tokenised, as Moses' `multi-bleu.perl -lc` computes it: sacreBLEU's
    without tokeniser and without smoothing. None with any other tokeniser."""
    multi_bleu_lowercase_signature: str | None
    comet: float | None
    """The mean score of a COMET model, times 100; None unless one was asked for."""
    comet_signature: str | None
    intervals: Mapping[str, Interval]
    """The 95 % confidence interval of each score, by the name of its field."""
    resamples: int = RESAMPLES
    seed: int = SEED
    """The bootstrap resamples that the intervals come from."""

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "intervals": {name: list(bounds) for name, bounds in self.intervals.items()}}

    def __str__(self) -> str:
        rows = [
            ("BLEU", "bleu", self.bleu_signature),
            ("BLEU, lower-cased", "bleu_lowercase", self.bleu_lowercase_signature),
            ("multi-bleu -lc", "multi_bleu_lowercase", self.multi_bleu_lowercase_signature),
            ("chrF", "chrf", self.chrf_signature),
            ("TER", "ter", self.ter_signature),
            ("COMET", "comet", self.comet_signature),
            ("exact match", "exact_match", f"of {self.sentences:,} sentences"),
        ]
        lines = [
            f"  {title:<18} {getattr(self, name):6.2f}  {self.intervals[name]!s:<16}  {note}"
            for title, name, note in rows
            if getattr(self, name) is not None
        ]
        return "\n".join([*lines, f"  [ ] is the 95 % confidence interval: {drawn(self.resamples, self.seed)}"])


def drawn(resamples: int, seed: int) -> str:
    """Return how the resamples were drawn."""
    return f"bootstrap, {resamples:,} resamples, seed {seed}"


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "auto",
    language: str = "",
) -> Scores:
    """Compare translations with one reference each.

    `tokenize` is sacreBLEU's name of a tokeniser (13a, intl, char, zh, ja-mecab, ...); "none" is for text that is
    already tokenised, and adds the score of `multi-bleu.perl -lc`; "auto" chooses by `language` or by the references'
    script. `lowercase` also makes the main BLEU and chrF case-insensitive, as TER always is.

    Raises DataError if the two differ in length (sacreBLEU itself would silently cut the longer one) or are empty, and
    ConfigError for a tokeniser that is not available.
    """
    return scores_of(measure(hypotheses, references, lowercase=lowercase, tokenize=tokenize, language=language))


def scores_of(measured: Sequence[Measured]) -> Scores:
    """Return the scores of the metrics that `measure` returned."""
    found = {one.name: one for one in measured}

    def value(name: str) -> float | None:
        if name not in found:
            return None
        return found[name].score

    def signature(name: str) -> str | None:
        if name not in found:
            return None
        return found[name].signature

    return Scores(
        sentences=len(found["bleu"].statistics),
        bleu=found["bleu"].score,
        bleu_signature=found["bleu"].signature,
        chrf=found["chrf"].score,
        chrf_signature=found["chrf"].signature,
        ter=found["ter"].score,
        ter_signature=found["ter"].signature,
        bleu_lowercase=found["bleu_lowercase"].score,
        bleu_lowercase_signature=found["bleu_lowercase"].signature,
        exact_match=found["exact_match"].score,
        multi_bleu_lowercase=value("multi_bleu_lowercase"),
        multi_bleu_lowercase_signature=signature("multi_bleu_lowercase"),
        comet=value("comet"),
        comet_signature=signature("comet"),
        intervals=dict(zip(found, intervals(measured), strict=True)),
    )


def measure(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "auto",
    language: str = "",
) -> list[Measured]:
    """Compute every metric of `score`, with the statistics of each sentence; arguments and errors are the same."""
    check_pairs(hypotheses, references)
    tokenize = tokenizer_for(tokenize, language, references)
    check_tokenizer(tokenize)
    found = [
        measure_bleu(hypotheses, references, tokenize=tokenize, lowercase=lowercase),
        measure_bleu_lowercase(hypotheses, references, tokenize=tokenize),
        measure_chrf(hypotheses, references, lowercase=lowercase),
        measure_ter(hypotheses, references),
        measure_exact_match(hypotheses, references),
    ]
    if tokenize == "none":
        found.insert(2, measure_multi_bleu_lowercase(hypotheses, references))
    return found


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool, tokenize: str) -> float:
    """Compute the BLEU of `score` alone."""
    check_pairs(hypotheses, references)
    return measure_bleu(hypotheses, references, tokenize=tokenize, lowercase=lowercase).score


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool) -> float:
    """Compute the chrF of `score` alone."""
    check_pairs(hypotheses, references)
    return measure_chrf(hypotheses, references, lowercase=lowercase).score


def check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise DataError unless there is one hypothesis for each reference, and at least one."""
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} hypotheses but {len(references):,} references; there must be one for each"
        )
    if not references:
        raise DataError("there is nothing to evaluate: no sentences")
