"""A student's predictions held against a teacher's, both from hidden states, in chunks: neither's logits are whole.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a part of it, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Rows
from seqpar.core.chunks import Chunk, cut_rows, recording, rows_per_chunk
from seqpar.core.stored_gradients import Gradients
from seqpar.core.tensor_checks import check_floating
from seqpar.core.token_loss import TokenLoss
from seqpar.linear.formula import LinearLeaves, LinearSlots, Projection, differentiable_loss, product_dtype
from seqpar.linear.inputs import Inputs, Settings, checked

Direction = Literal["forward", "reverse"]


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    *,
    direction: Direction,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> TokenLoss:
    """The summed Kullback-Leibler divergence between a teacher's predictions and a student's.

    Plain equivalent of `direction="forward"`, over the rows whose target is not `ignore_index`:

        student = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        teacher = (F.linear(teacher_hidden, teacher_weight, teacher_bias) / temperature).log_softmax(-1)
        F.kl_div(student, teacher, log_target=True, reduction="sum")  # "reverse": student and teacher change places

    Hinton et al. (2015) multiply the loss by `temperature**2`, so that its gradient keeps its size; that factor is left
    to the caller. "reverse", KL(student || teacher), is that of MiniLLM (Gu et al. 2024, section 2).

    Args:
        hidden, weight, bias: the student's, as in `linear_cross_entropy`.
        teacher_hidden, teacher_weight, teacher_bias: the teacher's, of any hidden size, over the same vocabulary. They
            get no gradient.
        target: the classes, of hidden's leading shape; for the loss they only say which rows are ignored.
        direction: which of the two is the distribution the divergence is an expectation under: "forward", the
            teacher, or "reverse", the student.
        temperature: what both logits are divided by; above 0.
        chunk_tokens: the most rows whose logits exist at once, the student's and the teacher's; None chooses by bytes.

    Returns:
        `TokenLoss`: `total` in nats, float32 or wider, differentiable once; `nll` and `correct` of the student against
        `target`, at this temperature.

    Raises:
        TypeError: a float target; hidden and weight of different dtypes outside autocast.
        ValueError: shapes or devices that disagree; a temperature or chunk size out of its range; another direction.
        IndexError: a target outside [0, V) that is not ignored (with value and position).
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction is {direction!r}; it must be 'forward' or 'reverse'")
    settings = Settings(ignore_index=ignore_index, temperature=temperature, chunk_tokens=chunk_tokens)
    checked(Inputs(hidden, weight, target, bias), settings, None)
    check_floating(teacher_weight, "teacher_weight")
    if len(weight) != len(teacher_weight) or weight.device != teacher_weight.device:
        raise ValueError(
            f"weight has {len(weight)} classes on {weight.device} and teacher_weight {len(teacher_weight)} on "
            f"{teacher_weight.device}; both must speak of the same vocabulary on one device"
        )
    checked(Inputs(teacher_hidden, teacher_weight, target, teacher_bias), settings, None, of="teacher_")
    dtype, target_N = product_dtype(hidden), target.flatten().long()
    student = Projection(weight, bias, dtype, temperature=float(temperature))
    teacher = Projection(teacher_weight, teacher_bias, product_dtype(teacher_hidden), temperature=float(temperature))
    ignored = ignore_index if recording(hidden.device) else None
    formula = _Divergence(student, teacher, teacher_hidden.detach().flatten(0, -2), target_N, direction, ignored)
    most = chunk_tokens or rows_per_chunk(len(weight), dtype, hidden.device.type)
    chunks = cut_rows(target_N != ignore_index, most)
    return differentiable_loss(formula, chunks, LinearLeaves(hidden.flatten(0, -2), weight, bias))


class _Divergence:
    """One chunk: its divergence, and the gradients of the student's hidden states, weight and bias.

    `ignored` is the target of rows that count for nothing though a chunk has them; None where they were left out.
    """

    def __init__(
        self,
        student: Projection,
        teacher: Projection,
        teacher_ND: Tensor,
        target_N: Tensor,
        direction: Direction,
        ignored: int | None,
    ) -> None:
        self.student, self.teacher, self.teacher_ND = student, teacher, teacher_ND
        self.target_N, self.reverse, self.ignored = target_N, direction == "reverse", ignored

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed divergence; `rows` are those of hidden, and None for token_weight."""
        student, teacher, target_K = self.student, self.teacher, self.target_N[chunk]
        hidden_KD, _ = rows
        assert hidden_KD is not None
        slots = None if gradients is None else LinearSlots.of(gradients)
        with torch.autocast(target_K.device.type, enabled=False):  # what it would cast has been
            hidden_KD = self._kept(hidden_KD, target_K).to(student.weight_VD.dtype)
            product_KV = student.product(hidden_KD)
            teachers_KV = teacher.product(self._kept(self.teacher_ND[chunk], target_K).to(teacher.weight_VD.dtype))
            size = min(student.rows_at_once(len(target_K)), teacher.rows_at_once(len(target_K)))
            blocks = zip(product_KV.split(size), teachers_KV.split(size), target_K.split(size), strict=True)
            losses, biases = zip(*(self._block(*block, slots) for block in blocks), strict=True)
            if slots is not None:
                student.back(product_KV, hidden_KD, chunk, biases, slots)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def _kept(self, hidden_KD: Tensor, target_K: Tensor) -> Tensor:
        """Zeros in the rows that count for nothing: whatever is there, a gradient of 0 times it must be 0."""
        return hidden_KD if self.ignored is None else hidden_KD.masked_fill((target_K == self.ignored).unsqueeze(1), 0)

    def _block(
        self, product_KV: Tensor, teachers_KV: Tensor, target_K: Tensor, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor | None]:
        kept_K = torch.ones_like(target_K, dtype=torch.bool) if self.ignored is None else target_K != self.ignored
        target_K = target_K.where(kept_K, 0)
        logits_KV, _ = self.student.logits(product_KV)
        at_K1, correct_K = target_K.unsqueeze(1), logits_KV.max(-1).indices == target_K
        student_KV = logits_KV.log_softmax(-1)
        teacher_KV = self.teacher.logits(teachers_KV)[0].to(student_KV.dtype).log_softmax(-1)
        nll_K = -student_KV.gather(1, at_K1).squeeze(1)
        p_KV = student_KV.exp()
        if self.reverse:
            apart_KV = student_KV.sub_(teacher_KV)
            loss_K1 = (p_KV * apart_KV).sum(-1, keepdim=True)
            grad_KV = p_KV.mul_(apart_KV.sub_(loss_K1))
        else:
            q_KV = teacher_KV.exp()
            loss_K1 = (q_KV * teacher_KV.sub_(student_KV)).sum(-1, keepdim=True)
            grad_KV = p_KV.sub_(q_KV)
        total, nll = (t_K.where(kept_K, torch.zeros_like(t_K)).sum() for t_K in (loss_K1.squeeze(1), nll_K))
        loss = TokenLoss(total, kept_K.sum(), nll, (correct_K & kept_K).sum())
        if gradients is None:
            return loss, None
        if self.ignored is not None:
            grad_KV.masked_fill_(~kept_K.unsqueeze(1), 0)
        grad_KV = self.student.to_product_(grad_KV, None, gradients.scale, product_KV)
        return loss, self.student.bias_gradient(grad_KV, gradients)
