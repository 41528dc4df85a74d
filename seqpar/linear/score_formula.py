"""Compute one chunk of a projection onto the vocabulary and the scores of its tokens, and their gradient.

    product = hidden @ weight.T + bias                                   (K, V)
    logits  = cap(product) / temperature,  cap(x) = softcap tanh(x / softcap)

`rows/score_rows.py` has the scores of a row of logits and G, their gradient with respect to the logits. There are two
ways to the gradient of hidden, G' = d / d product being G times the derivative of cap over the temperature:

    backward computes the product again:      d hidden = G' @ weight,  d weight = G'.T @ hidden
    with a frozen projection, forward keeps   A = (d log_prob / d product) @ weight
                                              Q = (d entropy / d product) @ weight
                           and backward has   d hidden_i = (u_i + sum_j g_ij) A_i + h_i Q_i
                                                           + sum_j g_ij (c_ij weight_(id_ij) - c_i weight_(y_i))

where c is the derivative of cap over the temperature, at the target or at the given class. Row i of A and Q does not
depend on any upstream factor, so that no second product is needed.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's
classes, if it is split), J given classes, P = 1 + J.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import RowGradient
from seqpar.core.token_loss import wide
from seqpar.kernels.row_kernel import why_no_kernel
from seqpar.kernels.score_kernel import ScoreKernel
from seqpar.linear.formula import Projection, zero_rows
from seqpar.linear.leaves import LinearSlots
from seqpar.rows.score_rows import (
    ScoreSums,
    Softmax,
    SplitScores,
    Upstream,
    log_probs_gradient_,
    over_ranks,
    score_sums,
    scores_gradient_,
    softmax_,
)

INVARIANT_ROWS = 64
"""Rows of every product in batch-invariant mode: a matrix product of one shape rounds each row in one way."""

INVARIANT_WIDTH = 16
"""What the width of a product is a multiple of in that mode, filled up with zeros. With other widths (5, 7, 33) MKL's
rounding of a row was measured to depend on the row's place; with multiples of 4 it never did."""


class HiddenSlots(NamedTuple):
    """Where forward keeps what backward needs under a frozen projection."""

    log_prob: RowGradient
    """A."""
    entropy: RowGradient | None
    """Q; None if no entropy is wanted."""
    slope_NP: Tensor
    """c at the target and at each given class."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return A, Q and the slopes."""
        of_entropy = None if self.entropy is None else self.entropy.rows
        return self.log_prob.rows, of_entropy, self.slope_NP


class ScoreFormula:
    """The scores of one chunk, and their gradient in closed form.

    Args:
        projection: from hidden to logits, with a temperature that is the same for all rows.
        picked_NP: of all rows, the target and the given classes.
        temperature_N: a temperature for each row, by which the projection's logits are divided further; None is 1.
        entropy: whether to compute the entropy.
        top_k: how many of the largest log-probabilities to return.
        split: the classes of a split vocabulary that this rank has; None if it has all.
        masked: whether logits may be -inf.
        counted_N: which rows count; None if no chunk contains rows that do not.
    """

    def __init__(
        self,
        projection: Projection,
        picked_NP: Tensor,
        temperature_N: Tensor | None,
        *,
        entropy: bool,
        top_k: int,
        split: SplitScores | None,
        masked: bool,
        counted_N: Tensor | None,
    ) -> None:
        self.projection = projection
        self.picked_NP = picked_NP
        self.temperature_N = temperature_N
        self.entropy = entropy
        self.top_k = top_k
        self.split = split
        self.masked = masked
        self.counted_N = counted_N
        self.kernel: ScoreKernel | None = None
        weight_VD = projection.weight_VD
        # Of the largest classes the kernels know the first alone
        if len(weight_VD) and top_k <= 1 and not why_no_kernel(weight_VD.device.type):
            self.kernel = ScoreKernel(projection.bias_V, projection.softcap, projection.temperature)

    def sums(self, hidden_KD: Tensor, chunk: Chunk, kept: HiddenSlots | None = None) -> ScoreSums:
        """Return the sums of a chunk's rows; store the gradients that a frozen projection allows in `kept`."""
        hidden_KD = self._prepared(hidden_KD, chunk)
        with torch.autocast(hidden_KD.device.type, enabled=False):
            product_KV = self.projection.product(hidden_KD, biased=self.kernel is None)
            entropy_KV = None
            if kept is not None and kept.entropy is not None:
                entropy_KV = self.projection.buffer("entropy", len(hidden_KD), product_KV.dtype)
            sums_of_block = self._block_sums if self.kernel is None else self._block_sums_by_kernel
            blocks = self._blocks(product_KV, chunk, entropy_KV)
            joined = _joined([sums_of_block(block, kept is not None) for block in blocks])
            if kept is not None:
                kept.slope_NP[chunk] = self._slope(chunk, joined.picked_NP)
                kept.log_prob.write_product(chunk, product_KV, self.projection.weight_VD)
            if kept is not None and kept.entropy is not None and entropy_KV is not None:
                kept.entropy.write_product(chunk, entropy_KV, self.projection.weight_VD)
        return joined

    def _block_sums(self, block: _Block, own_gradients: bool) -> ScoreSums:
        """Return the sums of some rows; with `own_gradients`, their products are overwritten."""
        logits_KV, tanh_KV = self._logits(block)
        made, sums = score_sums(
            logits_KV,
            block.picked,
            entropy=self.entropy,
            masked=self.masked,
            top_k=self.top_k,
            split=self.split,
            out=self._memory("softmax", logits_KV, self.entropy),
            # The gradients of a frozen projection need z - m once more
            scratch=self._memory("terms", logits_KV, block.entropy_product is not None),
        )
        if own_gradients:
            self._own_gradients_(block, made, sums, tanh_KV)
        return sums

    def _block_sums_by_kernel(self, block: _Block, own_gradients: bool) -> ScoreSums:
        """Do as `_block_sums`, in a kernel for the sums and one for each gradient."""
        assert self.kernel is not None
        index_KP = self._local(block.picked)
        rows = (block.product, index_KP, block.temperature)
        sums = self.kernel.sums(*rows, entropy=self.entropy, top=self.top_k == 1)
        if self.split is not None:
            sums = over_ranks(sums, index_KP >= 0, self.split, self.top_k)
        if own_gradients:
            one_K = torch.ones_like(sums.best_N)
            if block.entropy_product is not None:
                only_entropy = Upstream(torch.zeros_like(one_K), one_K, None)
                self.kernel.gradient_(*rows, sums, only_entropy, block.entropy_product)
            self.kernel.gradient_(*rows, sums, Upstream(one_K, None, None))
        return sums

    def _local(self, picked_KP: Tensor) -> Tensor:
        """Return the picked classes, counted from this rank's first one; -1 for those of other ranks."""
        if self.split is None:
            return picked_KP
        index_KP, owned_KP = self.split.locate(picked_KP, len(self.projection.weight_VD))
        return index_KP.where(owned_KP, -1)

    def batch_invariant(self) -> ScoreFormula:
        """Return the same formula with a width of hidden that `sums_in_tile` takes."""
        weight_VD = self.projection.weight_VD
        missing = -weight_VD.size(1) % INVARIANT_WIDTH
        projection = Projection(
            pad(weight_VD, (0, missing)),
            self.projection.bias_V,
            weight_VD.dtype,
            self.projection.softcap,
            self.projection.temperature,
        )
        return self._of(projection, self.picked_NP, self.temperature_N, self.counted_N)

    def sums_in_tile(self, hidden_KD: Tensor, chunk: Chunk) -> ScoreSums:
        """Do as `sums` for at most INVARIANT_ROWS rows, in tensors of exactly so many."""
        rows, width = hidden_KD.shape
        missing = INVARIANT_ROWS - rows
        picked_KP = pad(self.picked_NP[chunk], (0, 0, 0, missing))
        temperature_K = None
        if self.temperature_N is not None:
            temperature_K = pad(self.temperature_N[chunk], (0, missing), value=1.0)
        counted_K = None
        if self.counted_N is not None:
            counted_K = pad(self.counted_N[chunk], (0, missing), value=True)
        tile = self._of(self.projection, picked_KP, temperature_K, counted_K)
        hidden_KD = pad(hidden_KD, (0, self.projection.weight_VD.size(1) - width, 0, missing))
        return tile.sums(hidden_KD, slice(0, INVARIANT_ROWS)).rows(slice(0, rows))

    def _of(
        self, projection: Projection, picked_NP: Tensor, temperature_N: Tensor | None, counted_N: Tensor | None
    ) -> ScoreFormula:
        """Return the same formula for other rows."""
        return ScoreFormula(
            projection,
            picked_NP,
            temperature_N,
            entropy=self.entropy,
            top_k=self.top_k,
            split=self.split,
            masked=self.masked,
            counted_N=counted_N,
        )

    def store_gradients(
        self, hidden_KD: Tensor, chunk: Chunk, sums: ScoreSums, upstream: Upstream, slots: LinearSlots
    ) -> None:
        """Compute the chunk's product again, and store the gradients of hidden, weight and bias.

        Args:
            sums, upstream: of all rows.
        """
        hidden_KD = self._prepared(hidden_KD, chunk)
        sums = sums.rows(chunk)
        upstream = upstream.rows(chunk)
        bias_grads = []
        with torch.autocast(hidden_KD.device.type, enabled=False):
            product_KV = self.projection.product(hidden_KD, biased=self.kernel is None)
            for block in self._blocks(product_KV, chunk):
                grad_KV = self._gradient(block, sums.rows(block.rows), upstream.rows(block.rows))
                bias_grads.append(self.projection.bias_gradient(grad_KV, slots))
            self.projection.back(product_KV, hidden_KD, chunk, bias_grads, slots)

    def _gradient(self, block: _Block, sums: ScoreSums, upstream: Upstream) -> Tensor:
        """Overwrite a block's product by its gradient, and return that gradient: without a kernel not yet rounded."""
        if self.kernel is not None:
            self.kernel.gradient_(block.product, self._local(block.picked), block.temperature, sums, upstream)
            return block.product
        entropy = upstream.entropy_N is not None
        logits_KV, tanh_KV = self._logits(block)
        out = self._memory("softmax", logits_KV, entropy)
        made = softmax_(logits_KV, sums.best_N, entropy=entropy, masked=self.masked, out=out)
        gradient = scores_gradient_ if entropy else log_probs_gradient_
        grad_KV = gradient(made, block.picked, sums, upstream, self.split)
        return self.projection.to_product_(grad_KV, tanh_KV, block.slope, block.product)

    def slots(self, hidden_ND: Tensor) -> HiddenSlots:
        """Return empty slots for all rows."""
        product_dtype = self.projection.weight_VD.dtype
        # A and Q are added up in backward, so that they must not be rounded below the products' own dtype
        like_ND = hidden_ND.detach().to(torch.promote_types(hidden_ND.dtype, product_dtype))
        of_entropy = RowGradient(like_ND) if self.entropy else None
        slope_NP = hidden_ND.new_zeros(self.picked_NP.shape, dtype=wide(product_dtype))
        return HiddenSlots(RowGradient(like_ND), of_entropy, slope_NP)

    def hidden_gradient(
        self,
        upstream: Upstream,
        weight_VD: Tensor,
        of_log_prob_ND: Tensor,
        of_entropy_ND: Tensor | None,
        slope_NP: Tensor,
    ) -> Tensor:
        """Return the gradient of hidden under a frozen projection, from what forward has kept."""
        grad_ND = upstream.of_all_log_probs().unsqueeze(1) * of_log_prob_ND
        if of_entropy_ND is not None and upstream.entropy_N is not None:
            grad_ND += upstream.entropy_N.unsqueeze(1) * of_entropy_ND
        g_NJ = upstream.log_probs_at_NJ
        if g_NJ is not None:
            # sum_j g_j (c_j weight_(id_j) - c_y weight_y)
            factor_NP = torch.cat([-g_NJ.sum(1, keepdim=True), g_NJ], 1) * slope_NP
            index_NP = self.picked_NP
            if self.split is not None:
                index_NP, owned_NP = self.split.locate(index_NP, len(weight_VD))
                factor_NP = factor_NP.where(owned_NP, 0)
            if len(weight_VD):
                for factor_N, index_N in zip(factor_NP.unbind(1), index_NP.unbind(1), strict=True):
                    grad_ND += factor_N.unsqueeze(1) * weight_VD[index_N]
        return grad_ND

    def _own_gradients_(self, block: _Block, made: Softmax, sums: ScoreSums, tanh_KV: Tensor | None) -> None:
        """Overwrite the block's product by d log_prob / d product, and its second one by d entropy / d product."""
        one_K = torch.ones_like(sums.best_N)
        if block.entropy_product is not None:
            # First, because it overwrites z - m alone, and the softmax is needed once more
            tanh_twice_KV = None
            if tanh_KV is not None:
                tanh_twice_KV = tanh_KV.clone()
            only_entropy = Upstream(torch.zeros_like(one_K), one_K, None)
            grad_KV = scores_gradient_(made, block.picked, sums, only_entropy, self.split)
            self.projection.to_product_(grad_KV, tanh_twice_KV, block.slope, block.entropy_product)
        grad_KV = log_probs_gradient_(made, block.picked, sums, Upstream(one_K, None, None), self.split)
        self.projection.to_product_(grad_KV, tanh_KV, block.slope, block.product)

    def _slope(self, chunk: Chunk, picked_logits_KP: Tensor) -> Tensor:
        """Return c at the target and the given classes: the derivative of their logits by the uncapped product."""
        slope_KP = torch.full_like(picked_logits_KP, 1 / self.projection.temperature)
        if self.temperature_N is not None:
            slope_KP = slope_KP / self.temperature_N[chunk].unsqueeze(1)
        if self.projection.softcap is None:
            return slope_KP
        # logits = slope softcap tanh(product / softcap), so that the derivative is slope (1 - tanh^2)
        tanh_KP = picked_logits_KP / (slope_KP * self.projection.softcap)
        return slope_KP * (1 - tanh_KP.square())

    def _prepared(self, hidden_KD: Tensor, chunk: Chunk) -> Tensor:
        """Return the chunk's hidden states in the products' dtype, with 0 in rows that do not count."""
        hidden_KD = hidden_KD.to(self.projection.weight_VD.dtype)
        if self.counted_N is None:
            return hidden_KD
        return zero_rows(hidden_KD, ~self.counted_N[chunk])

    def _blocks(self, product_KV: Tensor, chunk: Chunk, entropy_KV: Tensor | None = None) -> Iterator[_Block]:
        """Yield the blocks of a chunk that go through the softmax one after the other."""
        rows = len(product_KV)
        size = rows
        # A kernel needs no cache, and a split vocabulary's collectives cost the same for a block as for the chunk
        if self.split is None and self.kernel is None:
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
                entropy_product=None if entropy_KV is None else entropy_KV[block],
            )

    def _logits(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Return the block's logits in memory that may be overwritten, and tanh(product / softcap) with a softcap."""
        logits_KV, tanh_KV = self.projection.logits(block.product)
        dtype = wide(logits_KV.dtype)
        if not self.projection.in_place or logits_KV.dtype != dtype:
            # An accelerator's product may be narrow
            logits_KV = logits_KV.to(dtype, copy=True)
        if block.temperature is not None:
            logits_KV /= block.temperature.unsqueeze(1)
        return logits_KV, tanh_KV

    def _memory(self, name: str, logits_KV: Tensor, wanted: bool) -> Tensor | None:
        """Return memory of the logits' size beside them; None if it is not wanted."""
        if not wanted:
            return None
        if not self.projection.in_place:
            return torch.empty_like(logits_KV)
        return self.projection.buffer(name, len(logits_KV), logits_KV.dtype)


class _Block(NamedTuple):
    """Some rows of a chunk."""

    rows: slice
    """Their places in the chunk."""
    product: Tensor
    picked: Tensor
    temperature: Tensor | None
    entropy_product: Tensor | None

    @property
    def slope(self) -> Tensor | float:
        """Return the derivative of the logits by the capped product: 1 / temperature."""
        if self.temperature is None:
            return 1.0
        return self.temperature.reciprocal()


def _joined(blocks: list[ScoreSums]) -> ScoreSums:
    """Return the sums of all blocks."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*blocks, strict=True)
    return ScoreSums(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
