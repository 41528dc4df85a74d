"""Settings that earlier versions had, which runs of these versions have saved in their folders."""

from __future__ import annotations

from typing import NamedTuple


class Former(NamedTuple):
    """A setting that is no longer there."""

    unused: str
    """Its value in runs that did not use it, which may still be read."""
    instead: str
    """What to do about any other value."""


RISK = Former(
    "0",
    "minimum-risk training is no longer part of training: leave it out, and see examples/minimum_risk.py for a loop "
    "with seqpar.objectives.minimum_risk; a model that was trained with it comes over by `export --to hf` of "
    "the version that trained it, and `import` of this one",
)
FORMER = {
    "training.risk_samples": RISK,
    "training.risk_weight": RISK._replace(unused="0.9"),
    "training.risk_temperature": RISK._replace(unused="0.5"),
    "subwords.min_count": Former("1", "it was for subwords.kind word, which is no longer there: leave it out"),
}
WORDS = (
    "a vocabulary of whole words is no longer there; train with subwords (a model of words is read by the version that "
    "trained it)"
)
FORMER_VALUES = {("subwords.kind", "word"): WORDS}
"""What to do about values that a setting no longer has."""
