"""The scores of several test sets, and their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recipes.translation.scores.bootstrap import Interval, interval, intervals, resampled_scores
from recipes.translation.scores.scores import describe_resampling
from recipes.translation.scores.statistics import TITLES, Measured

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
