"""What training minimises: which hidden states are computed of a batch, and which loss of them.

An `Objective` gives a layout two modules for a model. The layout distributes them over devices or processes; it does
not need to know which objective it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import seqpar
from models import EncoderDecoder
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.training.distillation import DistillationLoss, Teacher, WithTeacher
from recipes.translation.training.r_drop import BothLogits, RDrop, TwoPasses


class Objective:
    """The two modules of a training step: for the usual loss, cross-entropy with label smoothing."""

    def __init__(self, settings: TrainingConfig) -> None:
        self.settings = settings

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return a module of `(src, tgt)` that computes hidden states, or those and a dict of more for each token."""
        return model

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return a module of `(hidden, target, **more)`, or of lists of them for each device, that sums the loss."""
        return self.of(model.generator, self.criterion(), devices, vocab)

    def criterion(self) -> nn.Module:
        """Return the criterion of the settings."""
        return seqpar.LabelSmoothing(
            self.settings.label_smoothing, self.settings.smoothing_convention, ignore_index=PAD
        )

    def of(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[torch.device] | None,
        vocab: seqpar.VocabShard | None,
    ) -> seqpar.LossCompute:
        """Return the loss of any generator and criterion, in chunks of the settings' size."""
        return seqpar.LossCompute(generator, criterion, devices, self.settings.chunk_tokens, vocab=vocab)


class RDropObjective(Objective):
    """R-Drop: the usual loss of two passes, and their divergence."""

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return both passes of the model."""
        return TwoPasses(model)

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return the loss of both passes' logits."""
        criterion = RDrop(self.criterion(), self.settings.r_drop, PAD)
        return self.of(BothLogits(model.generator), criterion, devices, vocab)


class DistillationObjective(Objective):
    """The usual loss, and the divergence from a teacher's predictions."""

    def __init__(self, settings: TrainingConfig, teacher: Teacher) -> None:
        super().__init__(settings)
        self.teacher = teacher

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return a pass of the model and one of the teacher."""
        return WithTeacher(model, self.teacher)

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return the weighted sum of both losses."""
        return DistillationLoss(
            self.of(model.generator, self.criterion(), devices, vocab),
            model.generator,
            self.teacher,
            weight=self.settings.teacher_weight,
            temperature=self.settings.teacher_temperature,
            chunk_tokens=self.settings.chunk_tokens,
            vocab=vocab,
        )


def objective_of(settings: TrainingConfig, teacher: Teacher | None) -> Objective:
    """Return the objective of the settings."""
    if teacher is not None:
        return DistillationObjective(settings, teacher)
    if settings.r_drop:
        return RDropObjective(settings)
    return Objective(settings)
