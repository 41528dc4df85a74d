"""What training minimises: which hidden states are computed from a batch, and which loss from them.

An `Objective` gives a layout two modules for a model. The layout distributes them over devices or processes, and need
not know which objective it is: the usual loss, or word-level distillation as well, which draws the student's
predictions towards a teacher's on the same prefixes.

Let q be the teacher's and p the student's prediction of a token (at temperature T with the index T), CE the usual loss
and w a weight. The loss of the token is

    (1 - w) CE(p)  +  w T^2 KL(q_T || p_T)

(Hinton et al. 2015, section 2, including their factor T^2; Kim and Rush 2016, section 3.1, for words). The teacher gets
no gradient. The logits of both exist for only one chunk of tokens at a time, in `seqpar.linear_distillation`.

Shape suffixes: B batch, T time, D the student's hidden size, E the teacher's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import seqpar
from models import EncoderDecoder
from recipes.translation.settings.config import TrainingConfig
from recipes.translation.text.subwords import PAD
from recipes.translation.training.parts import reshard
from seqpar.core.device_sum import sum_on_first
from seqpar.distributed.torch_private import forget_forwards, is_fsdp_unit
from seqpar.engine.scores import over_devices


class Teacher:
    """A trained model alongside the one in training, without gradients and dropout.

    It is not a module, so that the parameters of the model in training, which are optimised, saved, copied or sharded,
    do not include the teacher's.

    Args:
        model: whole, or sharded by FSDP2; then its layers are gathered one by one, and the rest stays gathered until
            `release`. It is changed in place, to evaluation mode without gradients.
        devices: those of the model in training; each distinct device gets a copy.
    """

    def __init__(self, model: EncoderDecoder, devices: Sequence[torch.device]) -> None:
        model.eval().requires_grad_(False)
        first, *others = dict.fromkeys(devices)
        self.models = {device: copy.deepcopy(model).to(device) for device in others}
        self.models[first] = model.to(first)

    @torch.no_grad()
    def hidden(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Return the hidden states (B, T, E) of the teacher, on the device of `src`."""
        hidden_BTE: Tensor = self.models[src.device](src, tgt)
        return hidden_BTE

    def predictions(self, hidden_BTE: Tensor, own: slice) -> seqpar.TeacherHidden:
        """Return the teacher's predictions of the classes `own`, given its hidden states."""
        generator = self.models[hidden_BTE.device].generator
        return seqpar.TeacherHidden(hidden_BTE, generator.weight[own], generator.bias[own])

    def release(self) -> None:
        """Free what the loss of a batch needed: all but this rank's rows of a sharded model."""
        for model in self.models.values():
            if is_fsdp_unit(model):
                reshard(model)
                # FSDP2 would forget them at the end of the backward, but none follows
                forget_forwards(model)


class WithTeacher(nn.Module):
    """A model's hidden states and, as `teacher`, those of the teacher for the same sentences and prefixes."""

    def __init__(self, model: nn.Module, teacher: Teacher) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute both, on the device of `src`."""
        return self.model(src, tgt), {"teacher": self.teacher.hidden(src, tgt)}


class DistillationLoss(nn.Module):
    """The summed loss of the tokens that are not padding.

    Plain equivalent over these tokens, with logits `student` and `teacher`, T for `temperature` and w for `weight`:

        kl = F.kl_div((student / T).log_softmax(-1), (teacher / T).log_softmax(-1), log_target=True, reduction="sum")
        (1 - w) * usual + w * T**2 * kl

    Args:
        usual: the loss CE; both losses use its generator, devices, part of the vocabulary and chunks.
        teacher: the teacher, on every device that has hidden states of the student.
        weight: w, above 0 and at most 1; at 1, CE is not computed, and `nll` and `correct` are None.
        temperature: T, above 0.
    """

    def __init__(self, usual: seqpar.LossCompute, teacher: Teacher, *, weight: float, temperature: float) -> None:
        super().__init__()
        self.usual = usual
        self.teacher = teacher
        self.weight = weight
        self.temperature = temperature

    def forward(
        self, hidden: Tensor | list[Tensor], target: Tensor, *, teacher: Tensor | list[Tensor]
    ) -> seqpar.TokenLoss:
        """Return, on the first device, the loss of hidden states (B, T, D) or of a list with those of each replica."""
        usual = self.usual
        options = {"chunk_tokens": usual.chunk_tokens}
        divergence = sum_on_first(
            over_devices(
                self._divergence, usual.head, usual.devices, usual.vocab, hidden, target, {"teacher": teacher}, options
            )
        )
        self.teacher.release()
        total = self.weight * self.temperature**2 * divergence.total
        if self.weight == 1:
            return seqpar.TokenLoss(total, divergence.tokens)
        found: seqpar.TokenLoss = usual(hidden, target)
        return found._replace(total=(1 - self.weight) * found.total + total)

    def prefetch(self) -> None:
        """Start sending the generator to the other devices."""
        self.usual.prefetch()

    def _divergence(
        self, hidden: Tensor, weight: Tensor, target: Tensor, *, teacher: Tensor, **options: Any
    ) -> seqpar.TokenLoss:
        """Return the divergence for the rows of one device, without `nll` and `correct`."""
        own = slice(None)
        if self.usual.vocab is not None:
            own = slice(self.usual.vocab.start, self.usual.vocab.start + len(weight))
        predictions = self.teacher.predictions(teacher, own)
        return seqpar.linear_distillation(
            hidden, weight, predictions, target, divergence="forward_kl", temperature=self.temperature, **options
        )


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
