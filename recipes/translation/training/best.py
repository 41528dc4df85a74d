"""Which validation is the best so far, by `training.best_by`."""

from __future__ import annotations

import math

from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.settings.metrics import METRICS
from recipes.translation.training.validation import Validation


def note_validation(state: TrainingState, found: Validation, best_by: str = "loss") -> bool:
    """Record a validation in the state; return whether it is the best so far. Of equal ones the earlier stays."""
    better = is_better(state, found, best_by)
    if better:
        state.stale = 0
        state.best_loss = found["loss"]
        state.best_score = None
        if best_by != "loss":
            state.best_score = found[best_by]
        state.best_step = found.step
    else:
        state.stale += 1
    return better


def is_better(state: TrainingState, found: Validation, best_by: str) -> bool:
    """Return whether the number that decides is better than that of the best validation before."""
    before = state.best_score
    if best_by == "loss":
        before = state.best_loss
    now = found[best_by]
    assert now is not None  # the settings are refused where validations translate nothing
    if before is None or math.isnan(before):
        return True
    if METRICS[best_by].smaller_is_better:
        return now < before
    return now > before


def out_of_patience(state: TrainingState, settings: TrainingConfig) -> bool:
    """Return whether the last `patience` validations brought no improvement; never with patience 0."""
    return 0 < settings.patience <= state.stale
