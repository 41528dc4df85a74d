"""Compute the divergence between a student's and a teacher's predictions from the hidden states of both, in chunks.

With the student's logits z and log-probabilities log p, the teacher's log q, and temperature t (p and q include it):

    forward, KL(q || p):  loss = sum_k q_k (log q_k - log p_k),   t d loss / d z_k = p_k - q_k
    reverse, KL(p || q):  loss = sum_k p_k (log p_k - log q_k),   t d loss / d z_k = p_k (log p_k - log q_k - loss)

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary.
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
from seqpar.linear.formula import Projection, zero_rows
from seqpar.linear.inputs import Inputs, Settings, checked
from seqpar.linear.leaves import LinearLeaves, LinearSlots, differentiable_loss, product_dtype

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
    """Return the summed Kullback-Leibler divergence between a teacher's predictions and a student's.

    Plain equivalent of `direction="forward"`, over the rows whose target is not `ignore_index`:

        student = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        teacher = (F.linear(teacher_hidden, teacher_weight, teacher_bias) / temperature).log_softmax(-1)
        F.kl_div(student, teacher, log_target=True, reduction="sum")  # "reverse": student and teacher change places

    Hinton et al. (2015) multiply the loss by `temperature**2`, which makes its gradient's size independent of the
    temperature; that factor is left to the caller. "reverse", KL(student || teacher), is that of MiniLLM (Gu et al.
    2024, section 2).

    Args:
        hidden, weight, bias: the student's, as in `linear_cross_entropy`.
        teacher_hidden, teacher_weight, teacher_bias: the teacher's, of any hidden size, over the same vocabulary. They
            get no gradient.
        target: the classes, of hidden's leading shape; for the loss they only say which rows are ignored.
        direction: the distribution under which the divergence is an expectation: "forward", the teacher's, or
            "reverse", the student's.
        temperature: divides the logits of both; above 0.
        chunk_tokens: the most rows whose logits exist at once, the student's and the teacher's; None chooses by bytes.

    Returns:
        `TokenLoss`: `total` in nats, float32 or wider, differentiable once; `nll` and `correct` of the student against
        `target`, at this temperature.

    Raises:
        TypeError: a float target; hidden and weight of different dtypes outside autocast.
        ValueError: shapes or devices that do not fit; a temperature or chunk size out of its range; another direction.
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
            f"{teacher_weight.device}; both must have the same vocabulary on one device"
        )
    checked(Inputs(teacher_hidden, teacher_weight, target, teacher_bias), settings, None, prefix="teacher_")
    dtype = product_dtype(hidden)
    target_N = target.flatten().long()
    student = Projection(weight, bias, dtype, temperature=float(temperature))
    teacher = Projection(teacher_weight, teacher_bias, product_dtype(teacher_hidden), temperature=float(temperature))
    ignored = ignore_index if recording(hidden.device) else None
    formula = _Divergence(student, teacher, teacher_hidden.detach().flatten(0, -2), target_N, direction, ignored)
    most = chunk_tokens or rows_per_chunk(len(weight), dtype, hidden.device.type)
    chunks = cut_rows(target_N != ignore_index, most)
    return differentiable_loss(formula, chunks, LinearLeaves(hidden.flatten(0, -2), weight, bias))


class _Divergence:
    """The divergence of one chunk, and the gradients of the student's hidden states, weight and bias.

    Args:
        teacher_ND: the teacher's hidden states of all rows.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
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
        self.student = student
        self.teacher = teacher
        self.teacher_ND = teacher_ND
        self.target_N = target_N
        self.reverse = direction == "reverse"
        self.ignored = ignored

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed divergence; `rows` are those of hidden, and None for token_weight."""
        student = self.student
        teacher = self.teacher
        target_K = self.target_N[chunk]
        hidden_KD, _ = rows
        assert hidden_KD is not None
        teacher_KD = self.teacher_ND[chunk]
        if self.ignored is not None:
            hidden_KD = zero_rows(hidden_KD, target_K == self.ignored)
            teacher_KD = zero_rows(teacher_KD, target_K == self.ignored)
        slots = None if gradients is None else LinearSlots.of(gradients)
        # `product_dtype` has applied autocast; here it would cast sums that must stay in float32
        with torch.autocast(target_K.device.type, enabled=False):
            hidden_KD = hidden_KD.to(student.weight_VD.dtype)
            product_KV = student.product(hidden_KD)
            teacher_product_KV = teacher.product(teacher_KD.to(teacher.weight_VD.dtype))
            size = min(student.rows_at_once(len(target_K)), teacher.rows_at_once(len(target_K)))
            blocks = zip(product_KV.split(size), teacher_product_KV.split(size), target_K.split(size), strict=True)
            losses, biases = zip(*(self._block(*block, slots) for block in blocks), strict=True)
            if slots is not None:
                student.back(product_KV, hidden_KD, chunk, biases, slots)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def _block(
        self, product_KV: Tensor, teacher_product_KV: Tensor, target_K: Tensor, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor | None]:
        """Return some rows' summed divergence, and their bias gradient if it is wanted.

        If any gradient is wanted, the product is overwritten with its gradient.
        """
        counted_K = torch.ones_like(target_K, dtype=torch.bool)
        if self.ignored is not None:
            counted_K = target_K != self.ignored
            target_K = target_K.where(counted_K, 0)
        logits_KV, _ = self.student.logits(product_KV)
        correct_K = logits_KV.max(-1).indices == target_K
        log_p_KV = logits_KV.log_softmax(-1)
        teacher_logits_KV, _ = self.teacher.logits(teacher_product_KV)
        log_q_KV = teacher_logits_KV.to(log_p_KV.dtype).log_softmax(-1)
        nll_K = -log_p_KV.gather(1, target_K.unsqueeze(1)).squeeze(1)
        p_KV = log_p_KV.exp()
        # In place, in this order: each line overwrites only what no later line reads
        if self.reverse:
            difference_KV = log_p_KV.sub_(log_q_KV)
            loss_K1 = (p_KV * difference_KV).sum(-1, keepdim=True)
            grad_KV = p_KV.mul_(difference_KV.sub_(loss_K1))
        else:
            q_KV = log_q_KV.exp()
            loss_K1 = (q_KV * log_q_KV.sub_(log_p_KV)).sum(-1, keepdim=True)
            grad_KV = p_KV.sub_(q_KV)
        total = loss_K1.squeeze(1).where(counted_K, 0).sum()
        nll = nll_K.where(counted_K, 0).sum()
        loss = TokenLoss(total, counted_K.sum(), nll, (correct_K & counted_K).sum())
        if gradients is None:
            return loss, None
        if self.ignored is not None:
            grad_KV.masked_fill_(~counted_K.unsqueeze(1), 0)
        # to_product_ divides by the temperature
        grad_KV = self.student.to_product_(grad_KV, None, gradients.scale, product_KV)
        return loss, self.student.bias_gradient(grad_KV, gradients)
