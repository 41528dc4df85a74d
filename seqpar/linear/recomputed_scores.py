"""Compute one chunk of a projection onto the vocabulary and the scores of its tokens, and their gradient.

    product = hidden @ weight.T + bias                                   (K, V)
    logits  = cap(product) / temperature,  cap(x) = softcap tanh(x / softcap)

`rows/scores.py` has the scores of a row of logits and G, their gradient with respect to the logits. There are two
ways to get the gradient of hidden; G' = d / d product is G times the derivative of cap over the temperature:

    backward recomputes the product:          d hidden = G' @ weight,  d weight = G'.T @ hidden
    with a frozen projection, forward keeps   A = (d log_prob / d product) @ weight
                       and backward returns   d hidden_i = (u_i + sum_j g_ij) A_i
                                                           + sum_j g_ij (c_ij weight_(id_ij) - c_i weight_(y_i))

where c is the derivative of cap over the temperature, at the target or at the given class. Row i of A does not depend
on any upstream factor, so that the product need not be recomputed. The same holds for the entropy's gradient, but
keeping it would take a third product either way, and read or write the logits five times instead of three.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's
classes, if it is split), J given classes, P = 1 + J.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import RowGradient
from seqpar.core.token_loss import wide
from seqpar.linear.leaves import LinearSlots
from seqpar.linear.projection import Projection, zero_rows
from seqpar.rows.scores import Sums, Upstream


class HiddenSlots(NamedTuple):
    """Where forward keeps what backward needs under a frozen projection."""

    log_prob: RowGradient
    """A."""
    slope_NP: Tensor
    """c at the target and at each given class."""


class RecomputedScores:
    """The scores of one chunk, and their gradient, for which the chunk's product is recomputed.

    Args:
        projection: must already be set (`ask_for`) to compute the scores.
        picked_NP: the target and the given classes of all rows.
        temperature_N: a temperature for each row, which divides the projection's logits further; None is 1.
        counted_N: which rows count; None if no chunk contains rows that do not.
    """

    def __init__(
        self, projection: Projection, picked_NP: Tensor, temperature_N: Tensor | None, counted_N: Tensor | None
    ) -> None:
        self.projection = projection
        self.picked_NP = picked_NP
        self.temperature_N = temperature_N
        self.counted_N = counted_N

    def sums(self, hidden_KD: Tensor, chunk: Chunk, kept: HiddenSlots | None = None) -> Sums:
        """Return the sums of a chunk's rows; store the gradients that a frozen projection allows in `kept`."""
        hidden_KD = self.prepare_hidden(hidden_KD, chunk)
        with torch.autocast(hidden_KD.device.type, enabled=False):
            product_KV = self.projection.product(hidden_KD)
            together = join([self._block_sums(block, kept is not None) for block in self._blocks(product_KV, chunk)])
            if kept is not None:
                kept.slope_NP[chunk] = self._slope(chunk, together.picked_NP)
                kept.log_prob.write_product(chunk, product_KV, self.projection.weight_VD)
        return together

    def _block_sums(self, block: _Block, own_gradients: bool) -> Sums:
        """Return the sums of some rows; with `own_gradients`, overwrite their products with d log_prob / d product."""
        rows = (block.product, block.picked, block.temperature)
        read, sums = self.projection.sums(*rows, again=False)
        if own_gradients:
            self.projection.gradient_(read, *rows, sums, Upstream(log_prob=torch.ones_like(sums.best_N)))
        return sums

    def store_gradients(
        self, hidden_KD: Tensor, chunk: Chunk, sums: Sums, upstream: Upstream, slots: LinearSlots
    ) -> None:
        """Recompute the chunk's product, and store the gradients of hidden, weight and bias.

        Args:
            sums, upstream: those of all rows.
        """
        hidden_KD = self.prepare_hidden(hidden_KD, chunk)
        sums = sums.select(chunk)
        upstream = upstream.select(chunk)
        bias_grads = []
        with torch.autocast(hidden_KD.device.type, enabled=False):
            product_KV = self.projection.product(hidden_KD)
            for block in self._blocks(product_KV, chunk):
                own = sums.select(block.rows)
                factors = upstream.select(block.rows)
                read = self.projection.read_again(block.product, own, block.temperature, factors.entropy is not None)
                grad_KV = self.projection.gradient_(read, block.product, block.picked, block.temperature, own, factors)
                if slots.bias is not None:
                    bias_grads.append(grad_KV.sum(0, dtype=self.projection.wide))
            self.projection.back(product_KV, hidden_KD, chunk, bias_grads, slots)

    def slots(self, hidden_ND: Tensor) -> HiddenSlots:
        """Return empty slots for all rows."""
        product_dtype = self.projection.weight_VD.dtype
        # Backward adds terms to A, so it must not be rounded to less than the products' own dtype
        like_ND = hidden_ND.detach().to(torch.promote_types(hidden_ND.dtype, product_dtype))
        slope_NP = hidden_ND.new_zeros(self.picked_NP.shape, dtype=wide(product_dtype))
        return HiddenSlots(RowGradient(like_ND), slope_NP)

    def hidden_gradient(
        self,
        upstream: Upstream,
        weight_VD: Tensor,
        of_log_prob_ND: Tensor,
        slope_NP: Tensor,
    ) -> Tensor:
        """Return the gradient of hidden under a frozen projection from what forward has kept."""
        u_N = upstream.log_prob
        g_NJ = upstream.log_probs_at
        if u_N is None:
            u_N = slope_NP.new_zeros(len(slope_NP))
        if g_NJ is not None:
            u_N = u_N + g_NJ.sum(-1)
        grad_ND = u_N.unsqueeze(1) * of_log_prob_ND
        if g_NJ is not None:
            # sum_j g_j (c_j weight_(id_j) - c_y weight_y)
            factor_NP = torch.cat([-g_NJ.sum(1, keepdim=True), g_NJ], 1) * slope_NP
            index_NP, here_NP = self.projection.function.locate(self.picked_NP, len(weight_VD))
            if here_NP is not None:
                factor_NP = factor_NP.where(here_NP, 0)
            if len(weight_VD):
                for factor_N, index_N in zip(factor_NP.unbind(1), index_NP.unbind(1), strict=True):
                    grad_ND += factor_N.unsqueeze(1) * weight_VD[index_N]
        return grad_ND

    def _slope(self, chunk: Chunk, picked_logits_KP: Tensor) -> Tensor:
        """Return c at the target and the given classes: the derivative of their logits with respect to the product."""
        slope_KP = torch.full_like(picked_logits_KP, 1 / self.projection.temperature)
        if self.temperature_N is not None:
            slope_KP = slope_KP / self.temperature_N[chunk].unsqueeze(1)
        if self.projection.softcap is None:
            return slope_KP
        # logits = slope softcap tanh(product / softcap), so the derivative is slope (1 - tanh^2)
        tanh_KP = picked_logits_KP / (slope_KP * self.projection.softcap)
        return slope_KP * (1 - tanh_KP.square())

    def prepare_hidden(self, hidden_KD: Tensor, chunk: Chunk) -> Tensor:
        """Return the chunk's hidden states in the products' dtype, with 0 in rows that do not count."""
        hidden_KD = hidden_KD.to(self.projection.weight_VD.dtype)
        if self.counted_N is None:
            return hidden_KD
        return zero_rows(hidden_KD, ~self.counted_N[chunk])

    def _blocks(self, product_KV: Tensor, chunk: Chunk) -> Iterator[_Block]:
        """Yield the blocks of a chunk that go through the softmax one after the other."""
        rows = len(product_KV)
        size = self.projection.rows_at_once(rows)
        picked_KP = self.picked_NP[chunk]
        temperature_K = None
        if self.temperature_N is not None:
            temperature_K = self.temperature_N[chunk]
        for start in range(0, rows, size):
            block = slice(start, start + size)
            yield _Block(
                rows=block,
                product=product_KV[block],
                picked=picked_KP[block],
                temperature=None if temperature_K is None else temperature_K[block],
            )


class _Block(NamedTuple):
    """Some rows of a chunk."""

    rows: slice
    """Their places in the chunk."""
    product: Tensor
    picked: Tensor
    temperature: Tensor | None


def join(blocks: list[Sums]) -> Sums:
    """Return the sums of all blocks, joined."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*blocks, strict=True)
    return Sums(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
