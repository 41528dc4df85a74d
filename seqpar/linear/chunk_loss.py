"""Compute one chunk of a projection and its loss, and store all gradients.

    product = hidden @ weight.T + bias,   z = logits of the product (`Projection`)
    loss    = sum_i a_i loss_i(z_i),      a = token_weight

The loss of a row is any function of its scores (`ScoredRows`), or compares whole rows with a teacher's
(`linear/against_teacher.py`). Its derivatives are known together with it, so that the gradient of the product is
computed from the logits while they are in memory: three matrix products, and two under a frozen projection.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V this rank's classes, P
picked classes.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Rows, Walk, sum_over_chunks
from seqpar.core.chunks import Chunk
from seqpar.core.graphs import without_autocast
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss, sum_of_parts, wide
from seqpar.linear.leaves import LinearSlots
from seqpar.linear.projected_rows import ProjectedRows
from seqpar.linear.projection import Projection, zero_rows
from seqpar.rows.scores import RowFunction, times
from seqpar.rows.smoothing import LossOfScores

Factor = float | Tensor
"""What the gradients of some rows are multiplied by: one number, or one for each row."""


class BlockLoss(NamedTuple):
    """The results of some rows, the same on every rank."""

    loss_K: Tensor
    nll_K: Tensor
    correct_K: Tensor
    grad_KV: Tensor | None
    """The products' gradient, which has overwritten them, before it was rounded; None if no gradient is wanted."""
    per_token: tuple[Tensor, ...] = ()
    """The gradient of each per-token tensor of the loss, if any of them wants one."""


class RowsLoss(Protocol):
    """The loss of rows of products, and its gradient."""

    biased: bool
    """Whether the products must have the bias; a kernel adds it itself, in float32."""

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows go through the softmax at once."""

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return further tensors that a chunk needs, with one row for each of its rows."""

    def block_(
        self,
        product_KV: Tensor,
        target_K: Tensor,
        given: tuple[Tensor, ...],
        counted_K: Tensor | None,
        factor: Factor | None,
    ) -> BlockLoss:
        """Return the loss of some rows; overwrite their products by `factor` times their gradient unless it is None.

        Args:
            given: those rows of the per-token tensors, then of the chunk's further ones.
            counted_K: which rows count; None if all do.
        """


class _Block(NamedTuple):
    """Some rows of a chunk."""

    product_KV: Tensor
    target_K: Tensor
    given: tuple[Tensor, ...]
    counted_K: Tensor | None
    weight_K: Tensor | None

    def cut(self, size: int) -> list[_Block]:
        """Return blocks of at most so many rows, which go through the softmax one after the other."""
        rows = len(self.target_K)
        if rows <= size:
            return [self]
        return [self._rows(slice(start, start + size)) for start in range(0, rows, size)]

    def _rows(self, some: slice) -> _Block:
        """Return some of the rows."""
        return _Block(
            self.product_KV[some],
            self.target_K[some],
            tuple(t[some] for t in self.given),
            None if self.counted_K is None else self.counted_K[some],
            None if self.weight_K is None else self.weight_K[some],
        )


class StoredLoss:
    """The summed loss of one chunk, whose gradients are stored.

    Args:
        projection: from hidden to logits.
        rows_loss: the loss of a row.
        target_N: the classes of all rows; a chunk selects its own.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
    """

    def __init__(self, projection: Projection, rows_loss: RowsLoss, target_N: Tensor, ignored: int | None) -> None:
        self.projection = projection
        self.rows_loss = rows_loss
        self.target_N = target_N
        self.ignored = ignored

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed loss; `rows` are those of hidden, token_weight and the per-token tensors."""
        hidden_KD, weight_K, *per_token = rows
        assert hidden_KD is not None
        if weight_K is not None:
            weight_K = weight_K.to(wide(self.projection.weight_VD.dtype))
        target_K = self.target_N[chunk]
        counted_K = None
        if self.ignored is not None:
            counted_K = target_K != self.ignored
            hidden_KD = zero_rows(hidden_KD, ~counted_K)
            # An ignored target need not be a class; class 0 stands in for it
            target_K = target_K.where(counted_K, 0)
        slots = None if gradients is None else LinearSlots.of(gradients)
        given = (*(t for t in per_token if t is not None), *self.rows_loss.of_chunk(chunk, counted_K))
        # `product_dtype` has applied autocast; here it would cast sums that must stay in float32
        with without_autocast(target_K.device.type):
            hidden_KD = hidden_KD.to(self.projection.weight_VD.dtype)
            product_KV = self.projection.product(hidden_KD, self.rows_loss.biased)
            whole = _Block(product_KV, target_K, given, counted_K, weight_K)
            cut = whole.cut(self.rows_loss.rows_at_once(len(target_K)))
            blocks = list(map(self._block, cut, repeat(slots)))
            if slots is not None:
                self.projection.back(product_KV, hidden_KD, chunk, [found.bias_V for found in blocks], slots)
                if slots.token_weight is not None:
                    # total = sum_i a_i loss_i, so d total / d a_i = loss_i
                    slots.token_weight.write(chunk, torch.cat([found.loss_K for found in blocks]) * slots.scale)
                for i, slot in enumerate(slots.per_token):
                    if slot is not None:
                        slot.write(chunk, torch.cat([found.per_token[i] for found in blocks]))
        return sum_of_parts([found.sums for found in blocks])

    def _block(self, block: _Block, slots: LinearSlots | None) -> _Found:
        """Return the sums and gradients of some rows; overwrite their products if any gradient is wanted."""
        factor: Factor | None = None
        if slots is not None:
            factor = slots.scale if block.weight_K is None else block.weight_K * slots.scale
        found = self.rows_loss.block_(block.product_KV, block.target_K, block.given, block.counted_K, factor)
        loss_K, nll_K, correct_K = found.loss_K, found.nll_K, found.correct_K
        if block.counted_K is None:
            count = torch.full((), len(loss_K), device=loss_K.device)
        else:
            count = block.counted_K.sum()
            loss_K, nll_K, correct_K = (
                t.where(block.counted_K, torch.zeros_like(t)) for t in (loss_K, nll_K, correct_K)
            )
        weighted_K = loss_K if block.weight_K is None else loss_K * block.weight_K
        sums = TokenLoss(weighted_K.sum(), count, nll_K.sum(), correct_K.sum())
        bias_V = None
        if found.grad_KV is not None and slots is not None:
            bias_V = self.projection.bias_gradient(found.grad_KV, slots)
        return _Found(sums, loss_K, bias_V, found.per_token)


class _Found(NamedTuple):
    """The sums of a block's rows, and gradients that its chunk puts together."""

    sums: TokenLoss
    loss_K: Tensor
    bias_V: Tensor | None
    per_token: tuple[Tensor, ...]


class ScoredRows:
    """A loss that is a function of each row's scores.

    Args:
        rows: the row function behind the projection; it finds out whether targets are correct.
        loss: the function.
        ids_NJ: further classes of all rows; None without.
        temperature_N: a temperature for each row, by which the projection's logits are divided further; None is 1.
    """

    def __init__(
        self,
        rows: ProjectedRows,
        loss: LossOfScores,
        ids_NJ: Tensor | None = None,
        temperature_N: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.ids_NJ = ids_NJ
        self.temperature_N = temperature_N
        self.biased = rows.biased
        self.rows_at_once = rows.rows_at_once

    def of_chunk(self, chunk: Chunk, counted_K: Tensor | None) -> tuple[Tensor, ...]:
        """Return the further classes of a chunk's rows and their temperatures, as far as there are any."""
        found = []
        if self.ids_NJ is not None:
            ids_KJ = self.ids_NJ[chunk]
            # An ignored row's ids may be anything
            found.append(ids_KJ if counted_K is None else ids_KJ.where(counted_K.unsqueeze(1), 0))
        if self.temperature_N is not None:
            found.append(self.temperature_N[chunk])
        return tuple(found)

    def block_(
        self,
        product_KV: Tensor,
        target_K: Tensor,
        given: tuple[Tensor, ...],
        counted_K: Tensor | None,
        factor: Factor | None,
    ) -> BlockLoss:
        """Do as `RowsLoss` says."""
        picked_KP = target_K.unsqueeze(1)
        temperature_K = None
        if self.temperature_N is not None:
            *given, temperature_K = given  # type: ignore[assignment]
        if self.ids_NJ is not None:
            *given, ids_KJ = given  # type: ignore[assignment]
            picked_KP = torch.cat([picked_KP, ids_KJ], 1)
        wanted = factor is not None
        read, sums = self.rows.sums(product_KV, picked_KP, temperature_K, again=wanted)
        scores = self.rows.function.scores(sums)
        found = self.loss(scores, given, wanted)
        assert sums.correct_N is not None
        if factor is None:
            return BlockLoss(found.loss_N, -scores.log_prob, sums.correct_N, None)
        upstream = found.upstream.times(factor, counted_K)
        grad_KV = self.rows.gradient_(read, product_KV, picked_KP, temperature_K, sums, upstream)
        per_token = tuple(times(grad, factor, counted_K) for grad in found.per_token)
        return BlockLoss(found.loss_N, -scores.log_prob, sums.correct_N, grad_KV, per_token)


def scored_chunks(
    projection: Projection,
    function: RowFunction,
    loss: LossOfScores,
    target_N: Tensor,
    ignored: int | None,
    ids_NJ: Tensor | None = None,
    temperature_N: Tensor | None = None,
) -> Walk:
    """Return the walk over a loss of each row's scores; the arguments are those of the classes above."""
    rows = ProjectedRows(projection, function._replace(correct=True))
    return partial(
        sum_over_chunks, StoredLoss(projection, ScoredRows(rows, loss, ids_NJ, temperature_N), target_N, ignored)
    )
