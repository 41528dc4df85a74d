"""A training in progress: the update of each step, the validations, and the models and states that are saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.translation.data.corpus import Corpus
from recipes.translation.errors import TrainingError
from recipes.translation.processes.ranks import Ranks
from recipes.translation.run_folder.checkpoint import TrainingState
from recipes.translation.run_folder.saving import Saver
from recipes.translation.run_folder.translator import Translator
from recipes.translation.settings.config import RunConfig
from recipes.translation.training.ema import WeightAverage
from recipes.translation.training.half_precision import skips
from recipes.translation.training.journal import Journal
from recipes.translation.training.machine import return_free_memory
from recipes.translation.training.optimizer import update
from recipes.translation.training.parts import local_of
from recipes.translation.training.progress import StepNumbers
from recipes.translation.training.trained_weights import merge_lora
from recipes.translation.training.validation import Validation, note_validation, reduce_rate, validate
from seqpar.distributed.collectives import gather_numbers


@dataclass
class Training:
    """A training in progress, with all that its updates, validations and checkpoints need."""

    config: RunConfig
    corpus: Corpus
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    state: TrainingState
    ranks: Ranks
    journal: Journal
    saver: Saver

    def update(self, done: StepNumbers, rate: float) -> None:
        """Update the weights with the gradient of a step, unless it is to be skipped, and note the step."""
        if skips(self.config.training, self.state, done.norm):
            self.optimizer.zero_grad()
            self.journal.note_skipped_step(self.state)
            return
        check_finite(self.state.step, done, self.saver)
        update(self.optimizer, rate)
        self.average.update(self.state.step)
        self.state.tokens += done.tokens
        self.journal.note_step(self.state, done, rate)

    def validate_and_save(self) -> None:
        """Validate, and start saving the model and the state. Every rank calls this."""
        moments = self.good_moments()
        found = self.validate()
        settings = self.config.training
        better = note_validation(self.state, found, settings.best_by)
        reduced = reduce_rate(self.state, settings)
        # Before the state: if this process is killed in between, the run that resumes discards these records
        self.journal.keep(found)
        self.saver.save(
            self.translator(),
            found.as_dict(),
            self.average.weights(),
            moments,
            self.state,
            validated=True,
            better=better,
        )
        self.journal.announce_validation(self.state, found)
        if reduced:
            left = settings.plateau_factor**self.state.reductions
            self.journal.progress.say(
                f"[train] {settings.plateau_patience} validations without a better one: the learning rate is "
                f"multiplied by {settings.plateau_factor:g} ({left:.3g} in all)"
            )
        return_free_memory()

    def validate(self) -> Validation:
        """Return a validation of the model; raise TrainingError if its loss is not finite. Every rank calls this."""
        layout = self.average.layout
        with self.average.in_place(), layout.independent() as ranks:
            translator = self.translator()
            if layout.has_whole_model:
                translator = merge_lora(translator)
            found = validate(translator, self.corpus.valid, layout.plain_loss(translator.model), self.state.step, ranks)
        loss = found["loss"]
        if loss is None or not math.isfinite(loss):
            raise spoiled_numbers_error(self.state.step, f"the validation loss is {loss}", self.saver)
        return found

    def validate_start(self, start: str) -> None:
        """Validate the model that a new run starts from, if there is one. Every rank calls this."""
        if start:
            self.journal.note_start(self.state, self.validate(), start)

    def save_if_due(self) -> None:
        """Start saving the state if it is due; raise the error of an earlier save. Every rank calls this."""
        self.saver.check()
        if self.saver.is_due(self.state.step):
            self.save_between()

    def save_between(self) -> None:
        """Start saving the state without a validation. Every rank calls this."""
        moments = self.good_moments()
        self.journal.flush()
        self.saver.save(self.translator(), {"step": self.state.step}, self.average.weights(), moments, self.state)

    def translator(self) -> Translator:
        """Return this rank's part of the model in training, with its settings and vocabularies."""
        return Translator(self.config, self.average.layout.model, self.corpus.source, self.corpus.target)

    def good_moments(self) -> dict[str, Tensor]:
        """Return this rank's part of the moments and, with `training.ema`, of the weights that averages stand in for.

        Raises TrainingError, on every rank, if any of these numbers or of the weights is not finite.
        """
        moments = self.average.layout.moments(self.optimizer) | self.average.others()
        parts = {"the weights": self.average.weights(), "the optimizer's moments": moments}
        good = [all(bool(local_of(each).isfinite().all()) for each in part.values()) for part in parts.values()]
        everywhere = gather_numbers([int(each) for each in good], self.ranks.for_steps().group)
        for name, each in zip(parts, zip(*everywhere, strict=True), strict=True):
            if not all(each):
                raise spoiled_numbers_error(self.state.step, f"{name} are no longer finite", self.saver)
        return moments


def check_finite(step: int, done: StepNumbers, saver: Saver) -> None:
    """Raise TrainingError for a loss or gradient norm that is not finite, before the optimizer's step."""
    if not math.isfinite(done.loss):
        raise spoiled_numbers_error(step, f"the loss is {done.loss}", saver)
    if not math.isfinite(done.norm):
        raise spoiled_numbers_error(step, f"the loss is {done.loss:.3f} but its gradient is {done.norm}", saver)


def spoiled_numbers_error(step: int, what: str, saver: Saver) -> TrainingError:
    """Return the error for numbers that are nan or infinite, with advice."""
    message = (
        f"step {step}: {what}: try a smaller training.learning_rate, a longer training.warmup, training.clip 1, "
        "or training.precision float32"
    )
    if last := saver.last():
        message += f"; {last} has the last good state"
    return TrainingError(message)
