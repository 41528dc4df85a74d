"""Compute one chunk of a projection onto the vocabulary and its cross-entropy, with all gradients in closed form.

    product = hidden @ weight.T + bias                                   (K, V)
    logits  = cap(product) / temperature,  cap(x) = softcap tanh(x / softcap)
    loss    = sum_i a_i loss_i(logits_i),  a = token_weight, and `rows/softmax_loss.py` has the loss of a row

Backward, with G = d loss / d product, which overwrites the product:

    d hidden = G @ weight,  d weight = G.T @ hidden,  d bias = sum of G's rows,  d a_i = loss_i

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's
classes, if it is split).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Rows
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.kernels.row_kernel import RowKernel, aligned, why_no_kernel
from seqpar.linear.leaves import LinearSlots
from seqpar.rows.softmax_loss import (
    RowSums,
    SoftTarget,
    SplitVocabulary,
    logits_gradient_,
    row_losses,
    softmax_and_sums,
    softmax_factor,
    with_weights,
)

CACHE = 2**23
"""Bytes of logits, for each CPU thread, that go through the softmax's dozen passes in one block: few enough to stay in
a cache, enough that the calls themselves cost little (measured from 2^18 to a whole chunk)."""


class Projection:
    """Compute logits from hidden states, and gradients back from theirs, in buffers that all chunks reuse.

    logits = cap(hidden @ weight.T + bias) / temperature, where cap(x) is softcap * tanh(x / softcap).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        softcap: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.weight_VD = weight.detach().to(dtype)
        self.bias_V = None if bias is None else bias.detach().to(dtype)
        self.softcap = softcap
        self.temperature = temperature
        # Only the CPU's softmax is known to work in place; other devices' allocators reuse memory anyway
        self.in_place = self.weight_VD.device.type == "cpu"
        self.widen = self.in_place and wide(dtype) != dtype
        self.buffers: dict[str, Tensor] = {}

    def product(self, hidden_KD: Tensor, biased: bool = True) -> Tensor:
        """Return hidden @ weight.T, with the bias if `biased`.

        A product that `logits` will widen has no bias: it is added there, before the sum is rounded.
        """
        out = self.buffer("product", len(hidden_KD), hidden_KD.dtype)
        if self.bias_V is None or self.widen or not biased:
            return torch.mm(hidden_KD, self.weight_VD.t(), out=out)
        return torch.addmm(self.bias_V, hidden_KD, self.weight_VD.t(), out=out)

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows make a block of the softmax: on the CPU as many as fit in its cache."""
        if not self.in_place:
            return rows
        row_bytes = len(self.weight_VD) * wide(self.weight_VD.dtype).itemsize
        return max(1, min(rows, CACHE * torch.get_num_threads() // max(1, row_bytes)))

    def logits(self, product_KV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of some rows, and tanh(product / softcap) if there is a softcap.

        The logits may use the product's memory.
        """
        x_KV = product_KV
        dtype = wide(product_KV.dtype)
        plain = self.softcap is None and self.temperature == 1
        # Softcap and temperature are computed in float32. A plain product stays narrow on an accelerator, whose softmax
        # widens it in registers; the CPU's passes are several times as fast on a wide copy
        if self.widen or (x_KV.dtype != dtype and not plain):
            x_KV = self.buffer("wide", len(x_KV), dtype).copy_(x_KV)
            if self.bias_V is not None and self.widen:
                x_KV += self.bias_V
        if plain:
            return x_KV, None
        if self.softcap is None:
            return x_KV.div_(self.temperature), None
        tanh_KV = x_KV.div_(self.softcap).tanh_()
        capped = self.buffer("capped", len(x_KV), dtype)
        return torch.mul(tanh_KV, self.softcap / self.temperature, out=capped), tanh_KV

    def to_product_(
        self, grad_KV: Tensor, tanh_KV: Tensor | None, row_factor: float | Tensor, product_KV: Tensor
    ) -> Tensor:
        """Overwrite the product with its gradient, and return the same gradient in the logits' dtype.

        d product = row_factor / temperature * (1 - tanh^2) * d logits
        """
        if tanh_KV is not None:
            # The derivative of softcap tanh(x / softcap) is 1 - tanh^2
            grad_KV *= tanh_KV.square_().neg_().add_(1)
        factor = row_factor / self.temperature
        if isinstance(factor, Tensor) and factor.dim():
            grad_KV *= factor.unsqueeze(1)
        elif isinstance(factor, Tensor) or factor != 1:
            grad_KV *= factor
        if grad_KV is not product_KV:
            product_KV.copy_(grad_KV)
        return grad_KV

    def back(
        self,
        product_KV: Tensor,
        hidden_KD: Tensor,
        chunk: Chunk,
        bias_grads: Sequence[Tensor | None],
        gradients: LinearSlots,
    ) -> None:
        """Store the gradients of hidden, weight and bias.

        Args:
            product_KV: the gradient G of the product, which has overwritten it.
            bias_grads: the sums of G's rows, block by block.
        """
        # d hidden = G @ weight
        if gradients.hidden is not None:
            gradients.hidden.write_product(chunk, product_KV, self.weight_VD)
        # d weight = G.T @ hidden
        if gradients.weight is not None:
            gradients.weight.add_product(product_KV.t(), hidden_KD)
        block_grads = [grad for grad in bias_grads if grad is not None]
        if gradients.bias is not None and block_grads:
            gradients.bias.add(torch.stack(block_grads).sum(0))

    def bias_gradient(self, grad_KV: Tensor, gradients: LinearSlots) -> Tensor | None:
        """Return the bias's gradient from some rows; None if it is not wanted."""
        if gradients.bias is None:
            return None
        return grad_KV.sum(0, dtype=wide(grad_KV.dtype))

    def buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        """Return memory for some rows' products or logits; it is the same memory at every call with the same name."""
        buffer = self.buffers.get(name)
        if buffer is None or len(buffer) < rows:
            classes = len(self.weight_VD)
            width = classes if why_no_kernel(self.weight_VD.device.type) else aligned(classes)
            # The sizes of chunks differ by at most one row, so this buffer is large enough for all of them
            buffer = self.weight_VD.new_empty((rows + 1, width), dtype=dtype)[:, :classes]
            self.buffers[name] = buffer
        return buffer[:rows]


class LinearFormula:
    """The cross-entropy of one chunk and all its gradients, in closed form.

    Args:
        projection: from hidden to logits.
        target_N: the classes of all rows; a chunk selects its own.
        q: the target distribution of a row, over this rank's classes.
        split: turns sums over this rank's classes into sums over the vocabulary; None if this rank has all classes.
        ignored: the target of rows that a chunk contains but that do not count; None if no chunk contains such rows.
    """

    def __init__(
        self,
        projection: Projection,
        target_N: Tensor,
        q: SoftTarget,
        split: SplitVocabulary | None = None,
        ignored: int | None = None,
    ) -> None:
        self.projection = projection
        self.target_N = target_N
        self.split = split
        self.ignored = ignored
        if q.weight_V is not None:
            q = q._replace(weight_V=q.weight_V.detach().to(wide(projection.weight_VD.dtype)))
        self.q = q
        self.kernel: RowKernel | None = None
        weight_VD = projection.weight_VD
        if len(weight_VD) and not why_no_kernel(weight_VD.device.type):
            self.kernel = RowKernel(q, projection.bias_V, projection.softcap, projection.temperature, ignored)

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed loss; `rows` are those of hidden and of token_weight."""
        projection = self.projection
        target_K = self.target_N[chunk]
        hidden_KD, weight_K = rows
        assert hidden_KD is not None
        slots = None if gradients is None else LinearSlots.of(gradients)
        # `product_dtype` has applied autocast; here it would cast sums that must stay in float32
        with torch.autocast(target_K.device.type, enabled=False):
            hidden_KD = hidden_KD.to(projection.weight_VD.dtype)
            if self.ignored is not None:
                hidden_KD = zero_rows(hidden_KD, target_K == self.ignored)
            product_KV = projection.product(hidden_KD, biased=self.kernel is None)
            block_loss = self._block if self.kernel is None else self._block_by_kernel
            blocks = self._blocks(product_KV, target_K, weight_K)
            losses, loss_blocks, bias_grads = zip(*(block_loss(*block, slots) for block in blocks), strict=True)
            if slots is not None:
                projection.back(product_KV, hidden_KD, chunk, bias_grads, slots)
                if slots.token_weight is not None:
                    # total = sum_i a_i loss_i, so d total / d a_i = loss_i
                    slots.token_weight.write(chunk, torch.cat(loss_blocks) * slots.scale)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def _blocks(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Return the blocks of a chunk that go through the softmax one after the other: product, target, weight."""
        size = len(target_K)
        # A kernel needs no cache, and a split vocabulary's all-reduces cost the same for a block as for the chunk
        if self.split is None and self.kernel is None:
            size = self.projection.rows_at_once(size)
        targets = target_K.split(size)
        weights: Sequence[Tensor | None] = [None] * len(targets)
        if weight_K is not None:
            weights = weight_K.to(wide(product_KV.dtype)).split(size)
        return zip(product_KV.split(size), targets, weights, strict=True)

    def _block(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """Return some rows' summed loss, the loss of each, and their bias gradient if it is wanted.

        If any gradient is wanted, the product is overwritten with its gradient.
        """
        counted_K = self._counted(target_K)
        # An ignored target need not be a class; class 0 stands in for it, and its row's results are zeroed below
        if counted_K is not None:
            target_K = target_K.where(counted_K, 0)
        logits_KV, tanh_KV = self.projection.logits(product_KV)
        p_KV, sums = softmax_and_sums(logits_KV, target_K, self.q, self.split, self._out(logits_KV))
        rows = _RowResults.of(sums, self.q)
        if counted_K is not None:
            rows = _RowResults(*(t.where(counted_K, torch.zeros_like(t)) for t in rows))
        loss = rows.summed(weight_K, counted_K)
        if gradients is None:
            return loss, rows.loss_K, None
        grad_KV = logits_gradient_(p_KV, target_K, sums, self.q, self.split)
        if counted_K is not None:
            grad_KV.masked_fill_(~counted_K.unsqueeze(1), 0)
        grad_KV = self.projection.to_product_(grad_KV, tanh_KV, _factor(weight_K, gradients), product_KV)
        return loss, rows.loss_K, self.projection.bias_gradient(grad_KV, gradients)

    def _block_by_kernel(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """Do as `_block`, in one kernel, or for a split vocabulary in two with the sums over ranks between them."""
        assert self.kernel is not None
        factor = 1.0 if gradients is None else _factor(weight_K, gradients)
        if self.split is None:
            rows = _RowResults(*self.kernel.whole_(product_KV, target_K, factor, gradients is not None))
        else:
            index_K, owned_K = self.split.locate(target_K, product_KV.size(1))
            # The kernel takes -1 for a target that another rank has
            local_K = index_K.where(owned_K, -1)
            sums = with_weights(self.kernel.part_sums(product_KV, local_K), self.q, index_K, owned_K)
            sums = self.split.combine(sums, target_K)
            rows = _RowResults.of(sums, self.q)
            # The forward sums must be exchanged before any gradient: p needs lse of the whole vocabulary
            if gradients is not None:
                mass = softmax_factor(sums, self.q)
                self.kernel.part_gradient_(product_KV, local_K, sums.lse_N, mass, factor)
        loss = rows.summed(weight_K, self._counted(target_K))
        if gradients is None:
            return loss, rows.loss_K, None
        return loss, rows.loss_K, self.projection.bias_gradient(product_KV, gradients)

    def _counted(self, target_K: Tensor) -> Tensor | None:
        """Return which rows count; None if all do."""
        if self.ignored is None:
            return None
        return target_K != self.ignored

    def _out(self, logits_KV: Tensor) -> Tensor | None:
        """Return memory for the softmax: the logits' own if it may overwrite them, else None."""
        return logits_KV if self.projection.in_place else None


class _RowResults(NamedTuple):
    """The results of some rows."""

    loss_K: Tensor
    nll_K: Tensor
    correct_K: Tensor

    @classmethod
    def of(cls, sums: RowSums, q: SoftTarget) -> _RowResults:
        """Return the results that follow from the sums over the vocabulary; -log p_y = lse - z_y."""
        return cls(row_losses(sums, q), sums.lse_N - sums.gold_N, sums.correct_N)

    def summed(self, weight_K: Tensor | None, counted_K: Tensor | None) -> TokenLoss:
        """Return the sums: of the losses times the token weights, of everything else without them."""
        count = torch.full((), len(self.loss_K), device=self.loss_K.device) if counted_K is None else counted_K.sum()
        weighted_K = self.loss_K if weight_K is None else self.loss_K * weight_K
        return TokenLoss(weighted_K.sum(), count, self.nll_K.sum(), self.correct_K.sum().to(torch.int64))


def zero_rows(hidden_KD: Tensor, ignored_K: Tensor) -> Tensor:
    """Return the hidden states with 0 in ignored rows: the weight's gradient is G.T @ hidden, and 0 x nan is nan."""
    return hidden_KD.masked_fill(ignored_K.unsqueeze(1), 0)


def _factor(weight_K: Tensor | None, gradients: LinearSlots) -> float | Tensor:
    """Return the factor of each row's gradient: its token weight times the scale."""
    if weight_K is None:
        return gradients.scale
    return weight_K * gradients.scale
