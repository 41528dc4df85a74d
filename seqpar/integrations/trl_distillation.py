"""Train with TRL's `DistillationTrainer` using the divergence of `seqpar.linear_distillation`.

The trainer computes the hidden states of student and teacher, and passes them with the weights of both output
embeddings to its own function (`trl.trainer.distillation_trainer._chunked_divergence_loss`). That function is replaced
while a batch's loss is computed.

Shape suffixes: B sentences, T time steps of the completions, N = B x T rows, D the student's hidden size, E the
teacher's, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer import distillation_trainer

from seqpar.core.checks import is_dtensor
from seqpar.distributed.collectives import whole_tensor
from seqpar.integrations.peft_adapters import adapter_of, base_of
from seqpar.integrations.trl_head import WITHOUT, ReadModels, inside_head
from seqpar.integrations.trl_node import check_function
from seqpar.linear.distillation import linear_distillation
from seqpar.linear.teachers import TeacherHidden
from seqpar.linear.token_scores import token_scores

OWN = "_chunked_divergence_loss"
"""TRL's own function."""
ARGUMENTS = [
    "student_hidden_states",
    "teacher_hidden_states",
    "student_lm_head_weight",
    "teacher_lm_head_weight",
    "completion_mask",
    "beta",
    "num_items_in_batch",
    "student_lm_head_bias",
    "teacher_lm_head_bias",
    "student_logit_scale",
    "teacher_logit_scale",
    "student_final_logit_softcapping",
    "teacher_final_logit_softcapping",
    "temperature",
]


class AppliedDistillation:
    """The divergence of a `DistillationTrainer`, until `remove()`; `apply_seqpar_scores` returns it.

    Example:
        >>> from trl import DistillationTrainer
        >>> from seqpar.integrations.trl import apply_seqpar_scores
        >>> given = {"args": arguments, "train_dataset": dataset, "processing_class": tokenizer}
        >>> trainer = DistillationTrainer(model, teacher_model=reference, **given)
        >>> applied = apply_seqpar_scores(trainer)
        >>> output = trainer.train()
        >>> applied.remove()  # from here on the divergence is TRL's own
        >>> output.global_step == arguments.max_steps
        True
    """

    def __init__(self, trainer: Any, chunk_tokens: int | None) -> None:
        self.trainer = trainer
        self.chunk_tokens = chunk_tokens
        self.models = ReadModels()
        check_function("its divergence", distillation_trainer, OWN, ARGUMENTS, _sums_of_three_rows)
        teacher = trainer.teacher_model
        if teacher is None or type(trainer)._compute_loss is not distillation_trainer.DistillationTrainer._compute_loss:
            raise TypeError(f"this {type(trainer).__name__} has a loss or a teacher of another kind; {WITHOUT}")
        if "_compute_loss" in vars(trainer):
            raise ValueError(f"this {type(trainer).__name__} has the divergence already; remove() it first")
        self._temperature(trainer.model)
        trainer._compute_loss = self._compute_loss

    def remove(self) -> None:
        """Restore the trainer; a second call does nothing."""
        vars(self.trainer).pop("_compute_loss", None)

    def __enter__(self) -> AppliedDistillation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _temperature(self, student: Any) -> float:
        """Return the number that both models divide their logits by; raise if they differ in it or do anything else."""
        factors = []
        for model in (student, self.trainer.accelerator.unwrap_model(self.trainer.teacher_model)):
            base = base_of(model)
            name = type(base).__name__
            reading = self.models.reading(base)
            if adapter_of(base) is not None:
                raise TypeError(
                    f"the output embeddings of {name} have an adapter, which distillation does not take; leave them "
                    f"out of the adapter's target_modules, or {WITHOUT}"
                )
            if reading.softcap is not None:
                raise ValueError(
                    f"{name} caps its logits at {reading.softcap:g}, which distillation does not take; {WITHOUT}"
                )
            factors.append(reading.temperature)
        if not math.isclose(*factors):
            ours, theirs = (f"{1 / factor:g}" for factor in factors)
            raise ValueError(f"the student multiplies its logits by {ours} and the teacher by {theirs}; {WITHOUT}")
        return factors[0]

    def _compute_loss(self, student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Compute TRL's loss of a batch with our function in place of its own."""
        own = getattr(distillation_trainer, OWN)
        ours = partial(self._divergence, base_of(student), self._temperature(student))
        setattr(distillation_trainer, OWN, ours)
        try:
            return type(self.trainer)._compute_loss(self.trainer, student, inputs, num_items_in_batch)
        finally:
            setattr(distillation_trainer, OWN, own)

    def _divergence(
        self,
        student: Any,
        factor: float,
        hidden_BTD: Tensor,
        teacher_BTE: Tensor,
        weight_VD: Tensor,
        teacher_weight_VE: Tensor,
        completion_mask: Tensor,
        beta: float,
        *,
        num_items_in_batch: Tensor | float | None,
        teacher_lm_head_bias: Tensor | None,
        temperature: float,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what TRL's function returns: the mean divergence, the summed entropy, and the number of tokens.

        The factors are those the models were found to use, not those TRL reads from their configurations.
        """
        bias = None if teacher_lm_head_bias is None else whole_tensor(teacher_lm_head_bias)
        teacher = TeacherHidden(teacher_BTE, whole_tensor(teacher_weight_VE), bias)
        numbers = (beta, temperature * factor, self.chunk_tokens)
        head = student.get_output_embeddings()

        def compute(hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return divergence(hidden_BTD, head, teacher, completion_mask != 0, *numbers)

        # TRL would gather a sharded weight, but leave each rank the gradient of its own tokens
        is_sharded = is_dtensor(head.weight)
        total, entropy, tokens = inside_head(head, compute, hidden_BTD) if is_sharded else compute(hidden_BTD)
        if num_items_in_batch is None:
            num_items_in_batch = tokens.clamp(min=1)
        return total / num_items_in_batch, entropy, tokens


def divergence(
    hidden_BTD: Tensor,
    head: nn.Linear,
    teacher: TeacherHidden,
    counts_BT: Tensor,
    beta: float,
    temperature: float,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence of the student's predictions from the teacher's, their entropy, and the number of tokens.

    The first two are sums over the rows that count, and the entropy has no gradient. With `beta` 0 the divergence is
    KL(teacher || student), with 1 KL(student || teacher), in between the Jensen-Shannon divergence.
    """
    # To the loss, targets only say which rows are ignored
    target_BT = torch.where(counts_BT, 0, -100)
    options: dict[str, Any] = {"bias": head.bias, "temperature": temperature, "chunk_tokens": chunk_tokens}
    kind: dict[str, Any] = {"divergence": "jsd", "beta": beta}
    if beta in (0, 1):
        kind = {"divergence": ("forward_kl", "reverse_kl")[int(beta)]}
    loss = linear_distillation(hidden_BTD, head.weight, teacher, target_BT, **kind, **options)
    with torch.no_grad():
        scores = token_scores(hidden_BTD, head.weight, target_BT, entropy=True, **options)
    assert scores.entropy is not None
    return loss.total, scores.entropy.sum(), counts_BT.sum()


def _sums_of_three_rows(own: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, TRL's number and ours for each part that TRL's divergence returns."""
    head = nn.utils.skip_init(nn.Linear, 2, 5)
    head.weight.copy_(torch.linspace(-2, 3, 10).view(5, 2))
    head.bias.copy_(torch.linspace(0, 1, 5))
    hidden, mask = torch.linspace(-1, 1, 6).view(1, 3, 2), torch.tensor([[1, 0, 1]])
    teacher = TeacherHidden(hidden.flip(1), head.weight.flip(0), head.bias.flip(0))
    for beta in (0.0, 0.3, 1.0):
        theirs = own(
            *(hidden, teacher.hidden, head.weight, teacher.weight, mask, beta, 4),
            student_lm_head_bias=head.bias,
            teacher_lm_head_bias=teacher.bias,
            temperature=0.7,
        )
        total, entropy, tokens = divergence(hidden, head, teacher, mask != 0, beta, 0.7)
        parts = [f"{part} for beta {beta:g}" for part in ("losses", "entropies", "counts")]
        yield from zip(parts, map(torch.as_tensor, theirs), (total / 4, entropy, tokens), strict=True)
