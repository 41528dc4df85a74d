"""What training minimises: which hidden states are computed from a batch, and which loss from them.

An `Objective` gives a layout two modules for a model. The layout distributes them over devices or processes, and need
not know which objective it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

import seqpar
from models import EncoderDecoder
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.training.distillation import DistillationLoss, Teacher, WithTeacher


@dataclass(frozen=True)
class Objective:
    """The two modules of a training step: for cross-entropy with label smoothing, alone or with distillation."""

    settings: TrainingConfig
    teacher: Teacher | None = None
    """The model whose divergence from the student is part of the loss."""

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return a module of `(src, tgt)` that computes hidden states, perhaps with a dict of more for each token."""
        if self.teacher is not None:
            return WithTeacher(model, self.teacher)
        return model

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> seqpar.LossCompute | DistillationLoss:
        """Return a module of `(hidden, target, **more)`, or of lists with one for each device, that sums the loss."""
        settings = self.settings
        criterion = seqpar.LabelSmoothing(settings.label_smoothing, settings.smoothing_convention, ignore_index=PAD)
        usual = seqpar.LossCompute(model.generator, criterion, devices, settings.chunk_tokens, vocab=vocab)
        if self.teacher is None:
            return usual
        return DistillationLoss(
            usual, self.teacher, weight=settings.teacher_weight, temperature=settings.teacher_temperature
        )
