"""Scores of parts of a test set: by the length of the source, or by labels such as domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipes.translation.errors import DataError
from recipes.translation.scores.bootstrap import Interval, interval, intervals, resampled_scores
from recipes.translation.scores.scores import drawn
from recipes.translation.scores.statistics import TITLES, Measured
from recipes.translation.text.bleu_tokenizers import tokenizer_for

SHOWN = ("bleu", "multi_bleu_lowercase", "chrf", "ter", "comet")
"""Metrics of which a table has a column."""
BOUNDS = (10, 20, 30, 40, 50, 60)
"""The largest length in each part but the last (Koehn and Knowles 2017 go by tens too)."""
FEW = 100
"""Sentences below which a table warns that a score says little."""


@dataclass(frozen=True)
class Part:
    """Some sentences of a test set."""

    label: str
    sentences: int
    scores: Sequence[float]
    intervals: Sequence[Interval]


@dataclass(frozen=True)
class Parts:
    """The scores of all parts of a test set."""

    heading: str
    metrics: Sequence[str]
    """Their titles."""
    parts: Sequence[Part]

    def __str__(self) -> str:
        width = max(len(self.heading), *(len(part.label) for part in self.parts))
        columns = "".join(f"  {title:>6}  {'':<16}" for title in self.metrics)
        lines = [f"  {self.heading:<{width}}  sentences{columns}"]
        for part in self.parts:
            cells = "".join(
                f"  {score:6.2f}  {bounds!s:<16}" for score, bounds in zip(part.scores, part.intervals, strict=True)
            )
            lines.append(f"  {part.label:<{width}}  {part.sentences:9,}{cells}")
        note = f"  [ ] is the 95 % confidence interval: {drawn()}"
        if any(part.sentences < FEW for part in self.parts):
            note += f"; a part of fewer than {FEW} sentences says little"
        return "\n".join(line.rstrip() for line in [*lines, note])


def scores_of_parts(measured: Sequence[Measured], heading: str, parts: Mapping[str, Sequence[int]]) -> Parts:
    """Score each part, a label and the numbers of its sentences, with the same metrics as the whole."""
    return _scored(heading, {label: [one.subset(rows) for one in measured] for label, rows in parts.items()})


def scores_of_sets(sets: Mapping[str, Sequence[Measured]]) -> Parts:
    """Score several test sets, and the mean of their scores, which weighs each set alike.

    Resamples of the mean are the means of the sets' own, which draw the same rows where two sets are equally long: sets
    that translate the same sentences into several languages are easy or difficult together.
    """
    found = _scored("test set", sets)
    drawn_MR = np.mean([resampled_scores(_shown(measured)) for measured in sets.values()], axis=0)
    scores_M = np.mean([part.scores for part in found.parts], axis=0)
    sentences = sum(part.sentences for part in found.parts)
    mean = Part("mean", sentences, scores_M.tolist(), [interval(scores_R) for scores_R in drawn_MR])
    return replace(found, parts=[*found.parts, mean])


def _scored(heading: str, sets: Mapping[str, Sequence[Measured]]) -> Parts:
    parts = []
    for label, measured in sets.items():
        shown = _shown(measured)
        parts.append(Part(label, len(shown[0].statistics), [one.score for one in shown], intervals(shown)))
    titles = {**TITLES, "multi_bleu_lowercase": "m-bleu"}
    return Parts(heading, [titles[one.name] for one in shown], parts)


def _shown(measured: Sequence[Measured]) -> list[Measured]:
    return [one for one in measured if one.name in SHOWN]


def parts_by_length(sources: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
    """Return a heading, and the sentences of each range of lengths that has any, the shortest first.

    Lengths are words, as spaces separate them; in scripts without spaces between words (Chinese, Japanese, Thai, ...)
    they are characters, and each range is three times as wide.
    """
    unit, length_of = unit_of_length(sources)
    wide = 3 if unit == "characters" else 1
    lengths = [length_of(source) for source in sources]
    parts: dict[str, list[int]] = {}
    low = 0
    for bound in BOUNDS:
        parts[f"{low}-{wide * bound}"] = [row for row, length in enumerate(lengths) if low <= length <= wide * bound]
        low = wide * bound + 1
    parts[f"{low}-"] = [row for row, length in enumerate(lengths) if length >= low]
    return f"source {unit}", {label: rows for label, rows in parts.items() if rows}


def unit_of_length(texts: Sequence[str]) -> tuple[str, Callable[[str], int]]:
    """Return the unit of these texts' lengths, and the function that counts it in one."""
    if tokenizer_for("auto", "", texts) in ("zh", "ja-mecab", "char"):
        return "characters", lambda text: len("".join(text.split()))
    return "words", lambda text: len(text.split())


def parts_by_label(labels: Sequence[str], where: str, sentences: int) -> dict[str, list[int]]:
    """Return the sentences of each label, in the order in which the labels first occur.

    Raises DataError unless there is a label for each sentence.
    """
    if len(labels) != sentences:
        raise DataError(
            f"{where} has {len(labels):,} labels, and the test set {sentences:,} sentences; there must be one for each"
        )
    parts: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        if not label.strip():
            raise DataError(f"{where}: label {row + 1:,} is empty; give every sentence a label")
        parts.setdefault(label.strip(), []).append(row)
    return parts
