"""How the learning rate changes: a table of schedules, each a function of the step's number and of settings.

With `plateau` it also depends on the validations: how often they have reduced it is saved with a run's state. A resumed
run therefore has the same rates as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import NamedTuple


class Step(NamedTuple):
    """A step, and the settings that its learning rate may depend on."""

    number: int
    """Counted from 1."""
    rate: float
    """`training.learning_rate`."""
    warmup: int
    """`training.warmup`, or 1 if that is 0."""
    steps: int
    """Number of steps of the whole training."""
    d_model: int
    """The model's width."""
    reduced: float = 1.0
    """The fraction of the rate that is left after reductions by validations without an improvement."""

    @property
    def warm(self) -> float:
        """Return the fraction of the warm-up that is done, which exceeds 1 after it."""
        return self.number / self.warmup

    @property
    def rest(self) -> float:
        """Return the fraction of the steps after the warm-up that is left: 1 at its end, 0 just after the last step.

        The last step itself still learns. If training ends within the warm-up, the divisor would be 0 or less.
        """
        return max(self.steps + 1 - self.number, 0) / max(self.steps + 1 - self.warmup, 1)


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate."""

    rate: Callable[[Step], float]
    help: str
    """How the rate falls after the warm-up."""
    by_steps: bool = False
    """Whether it depends on the number of steps, so that resuming a run with a different number changes its rates."""
    by_validations: bool = False
    """Whether validations reduce it, by `training.plateau_patience` and `plateau_factor`."""


def _noam(step: Step) -> float:
    """Return `rate * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)` (Vaswani et al. 2017, section 5.3)."""
    # min(step * warmup^-1.5, step^-0.5) = warmup^-0.5 * min(step / warmup, (warmup / step)^0.5)
    return step.rate * _rise_and_fall(step) / sqrt(step.d_model * step.warmup)


def _rise_and_fall(step: Step) -> float:
    """Rise to 1 at the end of the warm-up, where both terms are 1."""
    return min(step.warm, sqrt(step.warmup / step.number))


def _cosine(step: Step) -> float:
    """Return `rate * (1 + cos(pi * done)) / 2` after the warm-up (Loshchilov and Hutter 2017, equation 5)."""
    done = 1 - min(step.rest, 1.0)
    return step.rate * min(step.warm, (1 + cos(pi * done)) / 2)


SCHEDULES = {
    "inverse_sqrt": Schedule(lambda step: step.rate * _rise_and_fall(step), "with the square root of the step"),
    "linear": Schedule(lambda step: step.rate * min(step.warm, step.rest), "linearly to 0 at the end", by_steps=True),
    "cosine": Schedule(_cosine, "along half a cosine to 0 at the end", by_steps=True),
    "noam": Schedule(_noam, "as inverse_sqrt does, from a peak of the model's width"),
    "constant": Schedule(lambda step: step.rate * min(step.warm, 1.0), "not at all"),
    "plateau": Schedule(
        lambda step: step.rate * min(step.warm, 1.0) * step.reduced,
        "by plateau_factor after every plateau_patience validations without a better one",
        by_validations=True,
    ),
}
