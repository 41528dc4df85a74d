"""Which validation is the best so far, by `training.best_by`."""

from __future__ import annotations

import math

from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.training.validation import Validation


def note_validation(state: TrainingState, found: Validation, best_by: str = "loss") -> bool:
    """Record a validation in the state; return whether it is the best so far. Of equal ones the earlier stays."""
    better = is_better(state, found, best_by)
    if better:
        state.stale = 0
        state.best_loss = found.loss
        state.best_score = None
        if best_by != "loss":
            state.best_score = score_of(found, best_by)
        state.best_step = found.step
    else:
        state.stale += 1
    return better


def is_better(state: TrainingState, found: Validation, best_by: str) -> bool:
    """Return whether the loss is lower, or BLEU or chrF higher, than that of the best validation before."""
    if best_by != "loss":
        return state.best_score is None or score_of(found, best_by) > state.best_score
    best = state.best_loss
    if best is None or math.isnan(best):
        best = math.inf
    return found.loss < best


def score_of(found: Validation, best_by: str) -> float:
    """Return the validation's BLEU or chrF."""
    score: float | None = getattr(found, best_by)
    assert score is not None  # the settings are refused where validations translate nothing
    return score


def out_of_patience(state: TrainingState, settings: TrainingConfig) -> bool:
    """Return whether the last `patience` validations brought no improvement; never with patience 0."""
    return 0 < settings.patience <= state.stale
