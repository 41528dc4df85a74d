"""Word-level distillation: the student's predictions are drawn towards a teacher's on the same prefixes.

With q the teacher's and p the student's prediction of a token, at temperature T where they have the index T, CE the
usual loss and w a weight, the loss of the token is

    (1 - w) CE(p)  +  w T^2 KL(q_T || p_T)

(Hinton et al. 2015, section 2, with their factor T^2; Kim and Rush 2016, section 3.1, for words). The teacher gets no
gradient. The logits of both exist for one chunk of tokens at a time, in `seqpar.linear_distillation`.

Shape suffixes: B batch, T time, D the student's hidden size, E the teacher's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

import seqpar
from models import EncoderDecoder
from recipes.translation.text.subwords import PAD
from seqpar.distributed.torch_private import forget_forwards


class Teacher:
    """A trained model beside the one in training, without gradient and dropout.

    It is not a module, so that the parameters of the model in training are only its own: those that are optimised,
    saved, copied, or sharded.

    Args:
        model: whole, or sharded by FSDP2, whose layers are gathered one by one and the rest until `release`; it is
            changed in place, to evaluation mode without gradients.
        devices: those of the model in training; each distinct one gets a copy.
        sequence: the ranks that have different time steps of the same sentences. Each computes the teacher's states of
            all of them, and keeps its own.
    """

    def __init__(
        self, model: EncoderDecoder, devices: Sequence[torch.device], sequence: ProcessGroup | None = None
    ) -> None:
        model.eval().requires_grad_(False)
        first, *others = dict.fromkeys(devices)
        self.models = {device: copy.deepcopy(model).to(device) for device in others}
        self.models[first] = model.to(first)
        self.sequence = sequence

    @torch.no_grad()
    def hidden(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Return the hidden states (B, T, E) of the teacher, on the device of `src`."""
        hidden_BTE: Tensor = self.models[src.device](src, tgt)
        if self.sequence is None:
            return hidden_BTE
        return seqpar.split_time(hidden_BTE, self.sequence)

    def predictions(self, hidden_BTE: Tensor, own: slice) -> seqpar.TeacherHidden:
        """Return the teacher's predictions of the classes `own`, given its hidden states."""
        generator = self.models[hidden_BTE.device].generator
        return seqpar.TeacherHidden(hidden_BTE, generator.weight[own], generator.bias[own])

    def release(self) -> None:
        """Free what the loss of a batch needed: of a model that is sharded, all but this rank's rows."""
        for model in self.models.values():
            if isinstance(model, FSDPModule):
                model.reshard()
                # No backward follows, at whose end it would forget them
                forget_forwards(model)


class WithTeacher(nn.Module):
    """A model's hidden states, and as `teacher` those of the teacher for the same sentences and prefixes."""

    def __init__(self, model: nn.Module, teacher: Teacher) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute both, on the device of `src`."""
        return self.model(src, tgt), {"teacher": self.teacher.hidden(src, tgt)}


class _Rows(NamedTuple):
    """What a device has of a batch."""

    hidden_BTD: Tensor
    target_BT: Tensor
    teacher_BTE: Tensor


class DistillationLoss(nn.Module):
    """The summed loss of the tokens that are not padding.

    Plain equivalent, over these tokens, with `student` and `teacher` as their logits, T `temperature`, w `weight`:

        kl = F.kl_div((student / T).log_softmax(-1), (teacher / T).log_softmax(-1), log_target=True, reduction="sum")
        (1 - w) * usual + w * T**2 * kl

    Args:
        usual: the loss CE, of the same generator.
        generator: the student's projection; this rank's rows of it, if the vocabulary is split.
        teacher: the teacher, on every device of the student's hidden states.
        weight: w, from above 0 to 1, where CE is not computed and `nll` and `correct` are None.
        temperature: T, above 0.
        chunk_tokens: the most tokens whose logits exist at once; None chooses by bytes.
        vocab: the classes of this rank, if the vocabulary is split.
    """

    def __init__(
        self,
        usual: seqpar.LossCompute,
        generator: nn.Linear,
        teacher: Teacher,
        *,
        weight: float,
        temperature: float,
        chunk_tokens: int | None = None,
        vocab: seqpar.VocabShard | None = None,
    ) -> None:
        super().__init__()
        self.usual = usual
        self.generator = generator
        self.teacher = teacher
        self.weight = weight
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.vocab = vocab

    def forward(
        self, hidden: Tensor | list[Tensor], target: Tensor, *, teacher: Tensor | list[Tensor]
    ) -> seqpar.TokenLoss:
        """Return the loss of hidden states (B, T, D), or of a list with those of each replica, on the first device."""
        if isinstance(hidden, Tensor):
            assert isinstance(teacher, Tensor)
            divergence = self._divergence(self.generator, hidden, target, teacher)
        else:
            assert not isinstance(teacher, Tensor)
            shares = _by_device(hidden, target, teacher)
            divergence = self._summed(shares)
        self.teacher.release()
        total = self.weight * self.temperature**2 * divergence.total
        if self.weight == 1:
            return seqpar.TokenLoss(total, divergence.tokens)
        usual: seqpar.TokenLoss = self.usual(hidden, target)
        return usual._replace(total=(1 - self.weight) * usual.total + total)

    def _summed(self, shares: Sequence[_Rows]) -> seqpar.TokenLoss:
        """Return the divergence of all shares on the first one's device, each computed where its share is.

        The generator's gradient is that of all shares. The sum has no `nll` and no `correct`.
        """
        devices = [share.hidden_BTD.device for share in shares]
        generators = seqpar.replicate(self.generator, devices)
        arguments = [(replica, *share) for replica, share in zip(generators, shares, strict=True)]
        losses = seqpar.parallel_apply([self._divergence] * len(shares), arguments, devices=devices)
        moved = [seqpar.TokenLoss(loss.total.to(devices[0]), loss.tokens.to(devices[0])) for loss in losses]
        return sum(moved[1:], start=moved[0])

    def _divergence(
        self, generator: nn.Linear, hidden_BTD: Tensor, target_BT: Tensor, teacher_BTE: Tensor
    ) -> seqpar.TokenLoss:
        own = slice(None)
        if self.vocab is not None:
            own = slice(self.vocab.start, self.vocab.start + len(generator.weight))
        return seqpar.linear_distillation(
            hidden_BTD,
            generator.weight,
            self.teacher.predictions(teacher_BTE, own),
            target_BT,
            divergence="forward_kl",
            bias=generator.bias,
            temperature=self.temperature,
            ignore_index=PAD,
            chunk_tokens=self.chunk_tokens,
            vocab=self.vocab,
        )


def _by_device(hidden: Sequence[Tensor], target: Tensor, teacher: Sequence[Tensor]) -> list[_Rows]:
    """Return what each distinct device has; replicas on one device become one, with one weight gradient."""
    found: dict[torch.device, list[_Rows]] = {}
    targets = target.split([len(each) for each in hidden])
    for hidden_BTD, target_BT, teacher_BTE in zip(hidden, targets, teacher, strict=True):
        device = hidden_BTD.device
        found.setdefault(device, []).append(_Rows(hidden_BTD, target_BT.to(device), teacher_BTE))
    return [_Rows(*(torch.cat(parts) for parts in zip(*shares, strict=True))) for shares in found.values()]
