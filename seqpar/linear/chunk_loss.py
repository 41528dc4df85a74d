"""Compute one chunk of a projection and its loss, and store all gradients.

    product = hidden @ weight.T + bias,   z = logits of the product (`Projection`)
    loss    = sum_i a_i loss_i(z_i),      a = token_weight

The loss of a row is any function of its scores (`ScoreLoss`), or compares whole rows with a teacher's
(`linear/against_teacher.py`). Its derivatives are computed together with it, so that the gradient of the product is
computed from the logits while they are in memory: three matrix products, or two under a frozen projection.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V this rank's classes, P
picked classes, J given classes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import ChunkTensors
from seqpar.core.chunks import Chunk
from seqpar.core.graphs import without_autocast
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss, sum_of_parts
from seqpar.linear.projection import Projection, slots_of, zero_rows
from seqpar.rows.scores import times
from seqpar.rows.smoothing import LossOfScores

Factor = float | Tensor
"""What the gradients of some rows are multiplied by: one number, or one for each row."""


class Block(NamedTuple):
    """Some rows of a chunk."""

    product_KV: Tensor
    target_K: Tensor
    given: tuple[Tensor, ...]
    """Their per-token tensors, then what `ProductLoss.of_chunk` returned."""
    counted_K: Tensor | None
    """Which of them count; None if all do."""
    weight_K: Tensor | None

    def cut(self, size: int) -> list[Block]:
        """Return blocks of at most `size` rows, which go through the softmax one after the other."""
        rows = len(self.target_K)
        if rows <= size:
            return [self]
        return [self._rows(slice(start, start + size)) for start in range(0, rows, size)]

    def factor(self, scale: Factor) -> Factor:
        """Return the factor for each row's gradients, given the factor for all rows."""
        return scale if self.weight_K is None else self.weight_K * scale

    def _rows(self, some: slice) -> Block:
        """Return some of the rows."""
        return Block(
            self.product_KV[some],
            self.target_K[some],
            tuple(t[some] for t in self.given),
            None if self.counted_K is None else self.counted_K[some],
            None if self.weight_K is None else self.weight_K[some],
        )


class BlockLoss(NamedTuple):
    """The results of some rows, the same on every rank."""

    loss_K: Tensor
    nll_K: Tensor
    correct_K: Tensor
    grad_KV: Tensor | None
    """The gradient that has overwritten the products, as it was before rounding; None if no gradient is wanted."""
    per_token: tuple[Tensor, ...] = ()
    """The gradient of each per-token tensor of the loss, if any of them wants one."""

    def of_counted(self, counted_K: Tensor) -> BlockLoss:
        """Return the results with 0 in rows that do not count."""
        loss_K, nll_K, correct_K = (times(t, 1.0, counted_K) for t in (self.loss_K, self.nll_K, self.correct_K))
        return BlockLoss(loss_K, nll_K, correct_K, self.grad_KV, self.per_token)

    def sums(self, block: Block) -> TokenLoss:
        """Return the summed loss, given 0 in rows that do not count."""
        loss_K = self.loss_K if block.weight_K is None else self.loss_K * block.weight_K
        count = torch.full((), len(loss_K), device=loss_K.device) if block.counted_K is None else block.counted_K.sum()
        return TokenLoss(loss_K.sum(), count, self.nll_K.sum(), self.correct_K.sum())


class ProductLoss(Protocol):
    """The loss of rows of products, and its gradient."""

    projection: Projection

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows go through the softmax at once."""

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return further tensors that a chunk needs, with one row for each of its rows."""

    def block_(self, block: Block, factor: Factor | None) -> BlockLoss:
        """Return the loss of some rows; overwrite their products with `factor` times their gradient if it is given."""


def chunk_loss(
    loss: ProductLoss,
    target_N: Tensor,
    ignored: int | None,
    rows: ChunkTensors,
    chunk: Chunk,
    gradients: Gradients | None,
) -> TokenLoss:
    """Return the chunk's summed loss; store its gradients in `gradients` unless that is None.

    Args:
        target_N: the classes of all rows; a chunk selects its own.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
        rows: the chunk's rows of hidden, token_weight and the per-token tensors.
    """
    projection = loss.projection
    hidden_KD, weight_K, *per_token = rows
    assert hidden_KD is not None
    if weight_K is not None:
        weight_K = weight_K.to(projection.wide)
    target_K = target_N[chunk]
    counted_K = None
    if ignored is not None:
        counted_K = target_K != ignored
        hidden_KD = zero_rows(hidden_KD, ~counted_K)
        # An ignored target need not be a class; class 0 stands in for it
        target_K = target_K.where(counted_K, 0)
    given = (*per_token, *loss.of_chunk(chunk, counted_K))
    slots = None if gradients is None else slots_of(gradients)
    # `product_dtype` has already applied autocast, which would here cast sums that must stay in float32
    with without_autocast(target_K.device.type):
        hidden_KD = hidden_KD.to(projection.weight_VD.dtype)
        product_KV = projection.product(hidden_KD)
        whole = Block(product_KV, target_K, given, counted_K, weight_K)  # type: ignore[arg-type]
        sums, losses, per_token_grads, bias_grads = [], [], [], []
        for block in whole.cut(loss.rows_at_once(len(target_K))):
            found = loss.block_(block, None if gradients is None else block.factor(gradients.scale))
            if block.counted_K is not None:
                found = found.of_counted(block.counted_K)
            if found.grad_KV is not None and slots is not None and slots.bias is not None:
                # Now, because the next block's gradient may reuse its memory
                bias_grads.append(found.grad_KV.sum(0, dtype=projection.wide))
            sums.append(found.sums(block))
            losses.append(found.loss_K)
            per_token_grads.append(found.per_token)
        if gradients is not None and slots is not None:
            projection.back(product_KV, hidden_KD, chunk, bias_grads, slots)
            if slots.token_weight is not None:
                # total = sum_i a_i loss_i, so d total / d a_i = loss_i
                slots.token_weight.write(chunk, torch.cat(losses) * gradients.scale)
            for i, slot in enumerate(slots.per_token):
                if slot is not None:
                    # If a loss has returned no gradients, this raises IndexError rather than leave them at 0
                    slot.write(chunk, torch.cat([grads[i] for grads in per_token_grads]))
    return sum_of_parts(sums)


class ScoreLoss:
    """A loss that is a function of each row's scores.

    Args:
        projection: must already be set (`ask_for`) to compute the scores and whether targets are correct.
        loss: the function.
        ids_NJ: further classes of all rows, if any.
        temperature_N: a temperature for each row, which divides the projection's logits further; None is 1.
    """

    def __init__(
        self,
        projection: Projection,
        loss: LossOfScores,
        ids_NJ: Tensor | None = None,
        temperature_N: Tensor | None = None,
    ) -> None:
        self.projection = projection
        self.rows_at_once = projection.rows_at_once
        self.loss = loss
        self.ids_NJ = ids_NJ
        self.temperature_N = temperature_N

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the further classes and the temperatures of a chunk's rows, if there are any."""
        found = []
        if self.ids_NJ is not None:
            ids_KJ = self.ids_NJ[chunk]
            # An ignored row's ids may be anything
            found.append(ids_KJ if counted_K is None else ids_KJ.where(counted_K.unsqueeze(1), 0))
        if self.temperature_N is not None:
            found.append(self.temperature_N[chunk])
        return tuple(found)

    def block_(self, block: Block, factor: Factor | None) -> BlockLoss:
        """Implement `ProductLoss.block_`."""
        given = list(block.given)
        temperature_K = None if self.temperature_N is None else given.pop()
        picked_KP = block.target_K.unsqueeze(1)
        if self.ids_NJ is not None:
            picked_KP = torch.cat([picked_KP, given.pop()], 1)
        wanted = factor is not None
        read, sums = self.projection.sums(block.product_KV, picked_KP, temperature_K, again=wanted)
        scores = self.projection.function.scores(sums)
        found = self.loss(scores, given, wanted)
        assert sums.correct_N is not None
        if factor is None:
            return BlockLoss(found.loss_N, -scores.log_prob, sums.correct_N, None)
        upstream = found.upstream.times(factor, block.counted_K)
        grad_KV = self.projection.gradient_(read, block.product_KV, picked_KP, temperature_K, sums, upstream)
        per_token = tuple([times(grad, factor, block.counted_K) for grad in found.per_token])
        return BlockLoss(found.loss_N, -scores.log_prob, sums.correct_N, grad_KV, per_token)
