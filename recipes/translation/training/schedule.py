"""The learning rate of each step, by the schedule that the settings name."""

from __future__ import annotations

from recipes.translation.errors import ConfigError
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.schedules import SCHEDULES, Step


def learning_rate(settings: TrainingConfig, step: int, d_model: int) -> float:
    """Return the learning rate of step `step`, counted from 1."""
    schedule = SCHEDULES[settings.schedule]
    return schedule.rate(Step(step, settings.learning_rate, max(settings.warmup, 1), settings.steps, d_model))


def check_rate(before: TrainingConfig, now: TrainingConfig, made: int, d_model: int) -> None:
    """Raise ConfigError if the next step of a run that is resumed would have another learning rate than before."""
    if not SCHEDULES[now.schedule].by_steps:
        return
    old, new = (learning_rate(settings, made + 1, d_model) for settings in (before, now))
    if old != new:
        raise ConfigError(
            f"training.steps was {before.steps:,} and is {now.steps:,}, on which training.schedule {now.schedule} "
            f"depends: the learning rate of step {made + 1:,} would be {new:.2g}, not {old:.2g}; keep training.steps, "
            "begin another --run with training.start_from, or add --insist"
        )
