"""Find the Hugging Face Trainer that runs a model, and correct the two facts that it read from the model.

A Trainer reads them once, in its constructor: whether the model divides its loss by the step's number of labels
(`accepts_loss_kwargs`), and whether it predicts the label after each position, so that the first label is not counted
(its `loss_type`). A model with the chunked loss does the first, and the second if its labels are shifted.

The Trainer is found in the call stack, because it passes to a model neither itself nor what it needs from it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from seqpar.integrations.peft_adapters import base_of
from seqpar.integrations.transformers_model import shifts_labels

MET: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers that have trained a model with the loss; they are updated if it is applied to that model again."""

WITH_TRAINER = "write `with apply_seqpar_loss(trainer):`, or apply it to the model before the Trainer is made"


class Facts(NamedTuple):
    """What a Trainer reads from a model."""

    divides: bool
    """Whether the model divides its loss by `num_items_in_batch`."""
    shifts: bool
    """Whether the first label of a sequence is neither predicted nor counted."""


def facts_of(model: PreTrainedModel) -> Facts:
    """Return what a Trainer would read from a model, as its constructor does."""
    divides = getattr(model, "accepts_loss_kwargs", None)
    if divides is None:
        parameters = inspect.signature(model.forward).parameters.values()
        divides = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return Facts(divides, getattr(model, "loss_type", None) in LOSS_MAPPING and shifts_labels(model))


def is_trainer(value: object) -> bool:
    """Return whether a value is a Hugging Face Trainer, without importing that class."""
    trainers = sys.modules.get("transformers.trainer")
    return trainers is not None and isinstance(value, trainers.Trainer)


def model_of(trainer: Any) -> PreTrainedModel:
    """Return the Hugging Face model that a Trainer trains, without wrappers, including PEFT's."""
    return base_of(trainer.accelerator.unwrap_model(trainer.model))


def trainer_facts(trainer: Any) -> Facts:
    """Return what a Trainer has read from its model."""
    return Facts(bool(trainer.model_accepts_loss_kwargs), bool(getattr(trainer, "_loss_shifts_labels", False)))


def give_facts(trainer: Any, facts: Facts) -> None:
    """Make a Trainer use these facts."""
    trainer.model_accepts_loss_kwargs = facts.divides and not _has_own_denominator(trainer)
    trainer._loss_shifts_labels = facts.shifts


def _has_own_denominator(trainer: Any) -> bool:
    """Return whether a Trainer itself counts the labels of sequences split over ranks, as with DeepSpeed."""
    return bool(getattr(getattr(trainer.accelerator, "parallelism_config", None), "sp_enabled", False))


class ToldTrainers:
    """What Trainers read from a model with the chunked loss, and those that were created before they could read it."""

    def __init__(self, model: PreTrainedModel, shifts: bool) -> None:
        self.model = model
        self.own = facts_of(model)
        """What the model's class says by itself."""
        self.facts = Facts(True, shifts)
        self.trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Any Trainer created from now on reads these
        flags: dict[str, Any] = {"accepts_loss_kwargs": True}
        if shifts:
            flags["loss_type"] = "ForCausalLM"
        self.flags_before = {name: vars(model)[name] for name in flags if name in vars(model)}
        self.flags = tuple(flags)
        vars(model).update(flags)
        for trainer in list(MET):
            if model_of(trainer) is model:
                self.meet(trainer)

    def meet(self, trainer: Any) -> None:
        """Make a Trainer that was created earlier use what is true of the model now."""
        MET.add(trainer)
        self.trainers.add(trainer)
        give_facts(trainer, self.facts)

    def restore_flags(self, state: dict[str, Any]) -> None:
        """Restore the flags in the model's attributes, or in those of a copy."""
        for name in self.flags:
            del state[name]
        state.update(self.flags_before)

    def correct(self) -> None:
        """Make the Trainers use again what their models say by themselves."""
        for trainer in list(MET):
            model = model_of(trainer)
            # A Trainer with a model_init may have created a new model since
            if model is self.model or trainer in self.trainers:
                give_facts(trainer, facts_of(model))

    def refuse_others(self, given: Mapping[str, object]) -> None:
        """Raise an error if a Trainer computes the loss itself, or would divide this one by a different number."""
        name = type(self.model).__name__
        if given.get("fused_lm_head"):
            raise TypeError(
                f"TRL's trainer computes the loss of {name} itself; pass it "
                "compute_loss_func=compute_loss_func(applied), or use seqpar.integrations.trl.apply_seqpar_scores"
            )
        if (step := running_trainer("training_step")) is not None:
            refuse_other_facts(step, name, self.own, self.facts, given)
            MET.add(step.f_locals["self"])


def refuse_options(trainer: Any) -> None:
    """Raise an error for a Trainer that computes its loss itself, from all logits or otherwise."""
    kind = type(trainer).__name__
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        raise TypeError(
            f"this {kind} computes its loss itself; use seqpar.integrations.trl.apply_seqpar_scores(trainer)"
        )
    if trainer.label_smoother is not None:
        raise ValueError(
            f"this {kind} has label_smoothing_factor={trainer.args.label_smoothing_factor:g}, which needs all logits; "
            "leave that at 0, and write label_smoothing here"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(
            f"this {kind} has a compute_loss_func, and takes the labels away for it; leave it out, or give it that of "
            "seqpar.integrations.transformers.compute_loss_func(apply_seqpar_loss(model))"
        )


def running_trainer(*methods: str) -> FrameType | None:
    """Return the innermost frame of a Trainer's method (one of these names if any are given); None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        named = not methods or frame.f_code.co_name in methods
        if named and is_trainer(frame.f_locals.get("self")):
            return frame
        frame = frame.f_back
    return None


def calling_trainer(way_out: str) -> Any:
    """Return the Trainer that calls a callback; raise RuntimeError if none does."""
    frame = running_trainer()
    if frame is None:
        raise RuntimeError(f"the callback was called by no Trainer; {way_out}")
    return frame.f_locals["self"]


def refuse_other_facts(step: FrameType, name: str, own: Facts, facts: Facts, given: Mapping[str, object]) -> None:
    """Raise RuntimeError for a Trainer's step whose gradient would not be that of the whole step.

    Args:
        step: the frame of the Trainer's `training_step`.
        name: the name of the model's class.
        own: what the model's class says by itself.
        facts: what is true with the chunked loss.
        given: the arguments of the forward.
    """
    trainer = step.f_locals["self"]
    read = trainer_facts(trainer)
    kind = type(trainer).__name__
    # If the collator has already shifted the labels, both ways of counting agree
    if read.shifts != facts.shifts and given.get("shift_labels") is None:
        counted = "counts" if facts.shifts else "does not count"
        raise RuntimeError(
            f"this {kind} was made before apply_seqpar_loss and {counted} the first label of every sequence, which "
            f"{name} does {'not ' if facts.shifts else ''}predict; {WITH_TRAINER}"
        )
    if given.get("num_items_in_batch") is not None or trainer.compute_loss_func is not None or _is_whole_step(trainer):
        return
    if not read.divides and not _has_own_denominator(trainer):
        raise RuntimeError(
            f"this {kind} was made before apply_seqpar_loss and gives {name} no num_items_in_batch, so that the loss "
            f"would be a mean of means; {WITH_TRAINER}"
        )
    lost = (
        step.f_locals.get("num_items_in_batch") is not None and getattr(trainer, "loss_is_scaled_for_ga", None) is None
    )
    if lost and not own.divides:
        raise RuntimeError(
            f"{kind}.compute_loss does not pass num_items_in_batch on to {name}, so that the gradient would be too "
            "large by the number of accumulation steps; pass it: model(**inputs, num_items_in_batch=num_items_in_batch)"
        )


def _is_whole_step(trainer: Any) -> bool:
    """Return whether an optimizer step sees only one batch, so that the batch's mean is exact."""
    steps = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return bool(steps == 1 and trainer.args.world_size == 1 and trainer.args.n_gpu <= 1)


def asks_for_loss_alone(labelled: bool) -> bool:
    """Return whether a Trainer is evaluating the model and uses nothing but the loss.

    That is so if its own `compute_loss` runs for its own `prediction_step` with `prediction_loss_only`, and if
    `Seq2SeqTrainer` has generated the predictions.
    """
    frame = running_trainer("compute_loss", "prediction_step")
    if frame is None:
        return False
    trainers = sys.modules["transformers.trainer"]
    if frame.f_code is trainers.Trainer.compute_loss.__code__ and frame.f_back is not None:
        evaluation = frame.f_back
        own = evaluation.f_code is trainers.Trainer.prediction_step.__code__
        return own and bool(evaluation.f_locals["prediction_loss_only"])
    generating = sys.modules.get("transformers.trainer_seq2seq")
    return labelled and generating is not None and frame.f_code is generating.Seq2SeqTrainer.prediction_step.__code__
