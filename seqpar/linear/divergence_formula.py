"""Compute one chunk of a projection and its divergence from a teacher, with all gradients in closed form.

    product = hidden @ weight.T + bias,   z = logits of the product (`Projection`)
    loss    = sum_i a_i loss_i(z_i),      a = token_weight; a `Comparison` has the loss of a row and its gradient

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V this rank's classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Rows
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.formula import Projection, zero_rows
from seqpar.linear.inputs import Inputs, Settings, planned
from seqpar.linear.leaves import LinearSlots, differentiable_loss


class RowResults(NamedTuple):
    """The results of some rows, the same on every rank."""

    loss_K: Tensor
    nll_K: Tensor
    correct_K: Tensor


class Comparison(Protocol):
    """The divergence between the student's rows of logits and what the teacher says of the same rows."""

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows the teacher's side takes at once."""

    def of_chunk(self, chunk: Chunk, ignored_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the teacher's tensors for a chunk, with one row for each of its rows.

        Args:
            ignored_K: which rows do not count; None if all do.
        """

    def compare_(self, logits_KV: Tensor, target_K: Tensor, teacher: tuple[Tensor, ...]) -> tuple[RowResults, Tensor]:
        """Return the results of some rows and the gradient of their logits, which may be overwritten."""


def divergence_loss(
    inputs: Inputs, settings: Settings, shard: VocabShard, comparison: Comparison, loss_scale: float | Tensor
) -> TokenLoss:
    """Return the summed divergence of all rows that are not ignored, as one node of autograd's graph."""
    leaves, chunks, student, target_N, split, ignored = planned(inputs, settings, shard)
    formula = DivergenceFormula(student, comparison, target_N, split is not None, ignored)
    return differentiable_loss(formula, chunks, leaves, loss_scale)


class DivergenceFormula:
    """The divergence of one chunk, and the gradients of the student's leaves.

    Args:
        split: whether other ranks have other classes, so that every block costs collectives.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
    """

    def __init__(
        self, student: Projection, comparison: Comparison, target_N: Tensor, split: bool, ignored: int | None
    ) -> None:
        self.student = student
        self.comparison = comparison
        self.target_N = target_N
        self.split = split
        self.ignored = ignored

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed divergence; `rows` are those of hidden and of token_weight."""
        student = self.student
        hidden_KD, weight_K = rows
        assert hidden_KD is not None
        target_K = self.target_N[chunk]
        ignored_K = None
        if self.ignored is not None:
            ignored_K = target_K == self.ignored
            hidden_KD = zero_rows(hidden_KD, ignored_K)
        slots = None if gradients is None else LinearSlots.of(gradients)
        teacher = self.comparison.of_chunk(chunk, ignored_K)
        # `product_dtype` has applied autocast; here it would cast sums that must stay in float32
        with torch.autocast(target_K.device.type, enabled=False):
            hidden_KD = hidden_KD.to(student.weight_VD.dtype)
            product_KV = student.product(hidden_KD)
            blocks = self._blocks(product_KV, target_K, weight_K, teacher)
            losses, loss_blocks, biases = zip(*(self._block(*block, slots) for block in blocks), strict=True)
            if slots is not None:
                student.back(product_KV, hidden_KD, chunk, biases, slots)
                if slots.token_weight is not None:
                    # total = sum_i a_i loss_i, so d total / d a_i = loss_i
                    slots.token_weight.write(chunk, torch.cat(loss_blocks) * slots.scale)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def _blocks(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, teacher: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]]:
        """Return the blocks of a chunk that are compared one after the other: product, target, weight, teacher."""
        size = len(target_K)
        # A split vocabulary's collectives cost the same for a block as for the chunk, and ranks must take the same rows
        if not self.split:
            size = min(self.student.rows_at_once(size), self.comparison.rows_at_once(size))
        targets = target_K.split(size)
        weights: Sequence[Tensor | None] = [None] * len(targets)
        if weight_K is not None:
            weights = weight_K.to(wide(product_KV.dtype)).split(size)
        teachers = zip(*(tensor.split(size) for tensor in teacher), strict=True)
        return zip(product_KV.split(size), targets, weights, teachers, strict=True)

    def _block(
        self,
        product_KV: Tensor,
        target_K: Tensor,
        weight_K: Tensor | None,
        teacher: tuple[Tensor, ...],
        gradients: LinearSlots | None,
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """Return some rows' summed divergence, that of each, and their bias gradient if it is wanted.

        If any gradient is wanted, the product is overwritten with its gradient.
        """
        counted_K = torch.ones_like(target_K, dtype=torch.bool)
        if self.ignored is not None:
            counted_K = target_K != self.ignored
            target_K = target_K.where(counted_K, 0)
        logits_KV, tanh_KV = self.student.logits(product_KV)
        logits_KV = logits_KV.to(wide(logits_KV.dtype))
        rows, grad_KV = self.comparison.compare_(logits_KV, target_K, teacher)
        rows = RowResults(*(t.where(counted_K, torch.zeros_like(t)) for t in rows))
        weighted_K = rows.loss_K if weight_K is None else rows.loss_K * weight_K
        loss = TokenLoss(weighted_K.sum(), counted_K.sum(), rows.nll_K.sum(), rows.correct_K.sum())
        if gradients is None:
            return loss, rows.loss_K, None
        if self.ignored is not None:
            grad_KV.masked_fill_(~counted_K.unsqueeze(1), 0)
        factor = gradients.scale if weight_K is None else weight_K * gradients.scale
        # to_product_ divides by the temperature
        grad_KV = self.student.to_product_(grad_KV, tanh_KV, factor, product_KV)
        return loss, rows.loss_K, self.student.bias_gradient(grad_KV, gradients)
