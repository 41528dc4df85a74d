"""The steps of a training, which ends after `training.steps` or `training.epochs`, whichever comes first."""

from __future__ import annotations

from dataclasses import replace

from recipes.translation.data.batches import Epochs
from recipes.translation.settings.config import TrainingConfig


def with_steps(settings: TrainingConfig, batches: Epochs) -> TrainingConfig:
    """Return the settings with the number of steps after which training ends, also where epochs decide it.

    An epoch counts as many batches as the first has: where subwords are sampled or corpora mixed, the others have a few
    more or less, which only drawing them would tell.
    """
    if not settings.epochs:
        return settings
    steps = steps_of_epochs(settings, batches)
    return replace(settings, steps=min(steps, settings.steps or steps))


def steps_of_epochs(settings: TrainingConfig, batches: Epochs) -> int:
    """Return the steps that the epochs come to; the last one takes what it lacks from the next epoch."""
    return -(-settings.epochs * batches.count(0) // settings.accumulate)
