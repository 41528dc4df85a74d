"""What training minimises: which hidden states are computed of a batch, and which loss of them.

An `Objective` gives a layout two modules for a model. The layout distributes them over devices or processes; it does
not need to know which objective it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

import seqpar
from models import EncoderDecoder
from recipes.translation.data.corpora import corpora_of
from recipes.translation.settings.config import RunConfig, TrainingConfig
from recipes.translation.text.subwords import PAD, Subwords
from recipes.translation.training.distillation import DistillationLoss, Teacher, WithTeacher
from recipes.translation.training.minimum_risk import RiskLoss, SentenceBleu, Utility, WithSamples
from recipes.translation.training.r_drop import BothLogits, RDrop, TwoPasses


class Objective(Protocol):
    """The two modules of a training step."""

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return a module of `(src, tgt)` that computes hidden states, or those and a dict of more for each token."""

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return a module of `(hidden, target, **more)`, or of lists of them for each device, that sums the loss."""


class CrossEntropyObjective:
    """The usual loss: cross-entropy with label smoothing."""

    def __init__(self, settings: TrainingConfig) -> None:
        self.settings = settings

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return the model itself."""
        return model

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return the loss of the model's generator."""
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


class RDropObjective(CrossEntropyObjective):
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


class MinimumRiskObjective(CrossEntropyObjective):
    """The usual loss, and the risk of translations that the model samples."""

    def __init__(self, settings: TrainingConfig, utility: Utility, start: tuple[int, ...], max_length: int) -> None:
        super().__init__(settings)
        self.utility = utility
        self.start = start
        self.max_length = max_length

    def passes(self, model: EncoderDecoder) -> nn.Module:
        """Return passes of the targets and of the samples."""
        settings = self.settings
        return WithSamples(
            model, self.utility, settings.risk_samples, settings.risk_temperature, self.start, self.max_length
        )

    def loss(
        self, model: EncoderDecoder, devices: Sequence[torch.device] | None, vocab: seqpar.VocabShard | None
    ) -> nn.Module:
        """Return the weighted sum of loss and risk."""
        return RiskLoss(
            self.of(model.generator, self.criterion(), devices, vocab),
            model.generator,
            weight=self.settings.risk_weight,
            temperature=self.settings.risk_temperature,
            chunk_tokens=self.settings.chunk_tokens,
        )


class DistillationObjective(CrossEntropyObjective):
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


def objective_of(config: RunConfig, teacher: Teacher | None, target: Subwords | None) -> Objective:
    """Return the objective of the settings; minimum risk needs the target's subwords."""
    settings = config.training
    if teacher is not None:
        return DistillationObjective(settings, teacher)
    if settings.r_drop:
        return RDropObjective(settings)
    if settings.risk_samples:
        assert target is not None
        # All corpora have the same tokeniser (`load_corpus`)
        utility = SentenceBleu(target, corpora_of(config)[0].data)
        return MinimumRiskObjective(settings, utility, target.symbols.start, config.decoding.max_length)
    return CrossEntropyObjective(settings)
