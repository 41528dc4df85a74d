"""The learning rate of each step, a function of the step number alone, so that resuming needs no saved state."""

from __future__ import annotations

from math import sqrt

from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import TrainingConfig


def learning_rate(settings: TrainingConfig, step: int, d_model: int) -> float:
    """Return the learning rate of step `step`, counted from 1.

    - `inverse_sqrt`: linear to `learning_rate` at step `warmup`, then falling with the square root of the step.
    - `noam`: `learning_rate * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)` (Vaswani et al. 2017,
      section 5.3).
    - `linear`: linear to `learning_rate` at step `warmup`, then linear towards 0 just after step `steps`.
    - `constant`: linear to `learning_rate` at step `warmup`, then unchanged.
    """
    warmup = max(settings.warmup, 1)
    if settings.schedule == "constant":
        return settings.learning_rate * min(step / warmup, 1.0)
    if settings.schedule == "linear":
        # 1 at step `warmup` and 0 at steps + 1, so that the last step still learns. The divisor is 0 or less where the
        # training ends within the warm-up
        left = max(settings.steps + 1 - step, 0) / max(settings.steps + 1 - warmup, 1)
        return settings.learning_rate * min(step / warmup, left)
    # Rises to 1 at step `warmup`, where both terms are 1. Noam's rate is this over sqrt(d_model * warmup):
    # min(step * warmup^-1.5, step^-0.5) = warmup^-0.5 * min(step / warmup, (warmup / step)^0.5)
    shape = min(step / warmup, sqrt(warmup / step))
    if settings.schedule == "inverse_sqrt":
        return settings.learning_rate * shape
    if settings.schedule == "noam":
        return settings.learning_rate * shape / sqrt(d_model * warmup)
    raise ValueError(f"training.schedule is {settings.schedule!r}; it must be inverse_sqrt, linear, noam or constant")


def check_rate(before: TrainingConfig, now: TrainingConfig, made: int, d_model: int) -> None:
    """Raise ConfigError if the next step of a run that is resumed would have another learning rate than before."""
    old, new = (learning_rate(settings, made + 1, d_model) for settings in (before, now))
    if old != new:
        raise ConfigError(
            f"training.steps was {before.steps:,} and is {now.steps:,}, on which training.schedule {now.schedule} "
            f"depends: the learning rate of step {made + 1:,} would be {new:.2g}, not {old:.2g}; keep training.steps, "
            "begin another --run with training.start_from, or add --insist"
        )
