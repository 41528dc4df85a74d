"""The metrics of a validation: a single table, which everything that names one of them is made from.

Validation computes them in this order, `metrics.jsonl` and the trackers have them as `valid_<name>`, the log shows
them, `training.best_by` can be any of them, and the report has a tile, a row and a chart for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import seqpar


@dataclass(frozen=True)
class Translated:
    """Validation sentences that were translated, and the scores that `evaluate` would compute for them."""

    translations: Sequence[str]
    references: Sequence[str]
    bleu: Callable[[], float]
    chrf: Callable[[], float]


@dataclass(frozen=True)
class Metric:
    """A metric of a validation, computed from the loss's sums or else from the translations."""

    label: str
    """What it is called in the log and in tables."""
    digits: int
    """Its number of decimals in the log."""
    caption: str
    """What its chart says about it."""
    of_loss: Callable[[seqpar.TokenLoss], float] | None = None
    """For several corpora it is computed over all their tokens."""
    of_translations: Callable[[Translated], float] | None = None
    """For several corpora it is the mean over them. It is missing if `training.validate_bleu` is 0."""
    unit: str = ""
    smaller_is_better: bool = False
    log_scale: bool = False
    """Whether it may span orders of magnitude."""

    def format_value(self, value: float) -> str:
        """Return a value for the log: accuracy 34.5 %."""
        number = f"{value:.{self.digits}f}" if abs(value) < 1e6 else f"{value:.1e}"
        return f"{self.label} {number} {self.unit}".rstrip()

    @property
    def title(self) -> str:
        """Return the title of its chart."""
        if self.label.islower():
            return self.label.capitalize()
        return self.label

    @property
    def heading(self) -> str:
        """Return its name in a table whose numbers have no units: accuracy (%)."""
        if self.unit:
            return f"{self.label} ({self.unit})"
        return self.label


def _loss(loss: seqpar.TokenLoss) -> float:
    return float(loss.total) / int(loss.tokens)


def _perplexity(loss: seqpar.TokenLoss) -> float:
    assert loss.nll is not None  # every objective's criterion computes it
    return math.exp(min(float(loss.nll) / int(loss.tokens), 700.0))  # exp(710) overflows


def _accuracy(loss: seqpar.TokenLoss) -> float:
    assert loss.correct is not None  # as above
    return 100 * int(loss.correct) / int(loss.tokens)


METRICS = {
    "loss": Metric(
        "loss",
        3,
        "Per target token, smoothed as in training.",
        of_loss=_loss,
        smaller_is_better=True,
    ),
    "perplexity": Metric(
        "perplexity",
        2,
        "Of the validation pairs: exp of the unsmoothed loss per target token, so that runs with different label "
        "smoothing can be compared, but only with the same subwords.",
        of_loss=_perplexity,
        smaller_is_better=True,
        log_scale=True,
    ),
    "accuracy": Metric(
        "accuracy",
        1,
        "Percentage of the validation's target tokens that are the model's first choice, given the reference's tokens "
        "before them.",
        of_loss=_accuracy,
        unit="%",
    ),
    "bleu": Metric(
        "BLEU",
        1,
        "Of greedy translations of the first validation sentences (validate_bleu).",
        of_translations=lambda said: said.bleu(),
    ),
    "chrf": Metric("chrF", 1, "Of the same translations.", of_translations=lambda said: said.chrf()),
}
