"""New settings of a resumed run that may be what was meant, and make numbers jump or lose models without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from recipes.translation.errors import ConfigError
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.run_folder.numbered import kept_models
from recipes.translation.run_folder.resume import SCORING, flat
from recipes.translation.settings.config import RunConfig


def check_jumps(before: RunConfig, now: RunConfig, state: TrainingState) -> None:
    """Raise ConfigError for the first such setting."""
    for what in jumps(before, now, state):
        raise ConfigError(f"{what}; keep the setting, begin another --run with training.start_from, or add --insist")


def jumps(before: RunConfig, now: RunConfig, state: TrainingState) -> Iterator[str]:
    """Yield what would jump, of a run that has been saved with the settings `before`."""
    was, will_be = before.training, now.training
    if was.precision != will_be.precision:
        yield (
            f"training.precision was {was.precision} and is {will_be.precision}: from step {state.step + 1:,} on "
            "weights and losses are rounded differently"
        )
    if was.patience and will_be.patience and was.validate_every != will_be.validate_every:
        yield (
            f"training.validate_every was {was.validate_every:,} and is {will_be.validate_every:,}: training.patience "
            f"{will_be.patience} counts validations, and would end the run after a different number of steps"
        )
    asked = [(each.patience, each.steps, each.epochs) for each in (was, will_be)]
    if asked[0] != asked[1] and 0 < will_be.patience <= state.stale:
        yield (
            f"training.patience is {will_be.patience}, and the last {state.stale} validations were not better than "
            f"that of step {state.best_step:,}: the run would end without another step"
        )
    kept = len(kept_models(Path(now.run)))
    if 0 < will_be.keep_checkpoints < min(was.keep_checkpoints, kept):
        yield (
            f"training.keep_checkpoints was {was.keep_checkpoints} and is {will_be.keep_checkpoints}: the next "
            f"validation would remove {kept + 1 - will_be.keep_checkpoints} of the {kept} models in {now.run}/kept"
        )
    if not was.validate_bleu or not will_be.validate_bleu:
        return
    old, new = flat(before), flat(now)
    for name in sorted(SCORING):
        if old[name] != new[name]:
            yield (
                f"{name} was {old[name]} and is {new[name]}: BLEU and chrF of later validations could not be compared "
                "with the earlier ones"
            )
