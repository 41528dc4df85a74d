"""One chunk of a projection onto the vocabulary and its loss, with every gradient by formula.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a part of it, D hidden, V vocabulary (this rank's part
of it, where it is split).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import ChunkLoss, Rows, differentiable_sum, sum_over_chunks
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients, RowGradient, SummedGradient
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.kernels.row_kernel import RowKernel, aligned, why_no_kernel
from seqpar.losses.softmax_loss import (
    SoftTarget,
    VocabPart,
    logits_gradient_,
    row_losses,
    softmax_and_sums,
    softmax_factor,
    with_weights,
)

CACHE = 2**23
"""Bytes of logits, for each CPU thread, that the softmax's dozen passes go over together: few enough to be read from a
cache, enough that the calls themselves cost little (measured from 2^18 to a whole chunk)."""


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's, where it is on and would cast; else hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class LinearLeaves(NamedTuple):
    """The tensors that gradients flow into; hidden and token_weight have one row for each token."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None


class LinearSlots(NamedTuple):
    """Where the gradient of each leaf is stored, `scale` times as large; None where it is not wanted."""

    hidden: RowGradient | None
    weight: SummedGradient | None
    bias: SummedGradient | None
    token_weight: RowGradient | None
    scale: float | Tensor

    @classmethod
    def of(cls, gradients: Gradients) -> LinearSlots:
        """Name the slots that `differentiable_loss` and `loss_and_gradients` made."""
        hidden, token_weight = gradients.per_token
        weight, bias = gradients.params
        return cls(hidden, weight, bias, token_weight, gradients.scale)


class LinearWanted(NamedTuple):
    """Which leaves want a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    token_weight: bool = False


class LinearGradients(NamedTuple):
    """The gradient of each leaf; None where it was not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    token_weight: Tensor | None


def differentiable_loss(
    chunk_loss: ChunkLoss, chunks: Sequence[Chunk], leaves: LinearLeaves, loss_scale: float | Tensor = 1.0
) -> TokenLoss:
    """Return the summed loss of all chunks as one node of autograd's graph."""
    per_token = (leaves.hidden, leaves.token_weight)
    params = (leaves.weight, leaves.bias)
    return differentiable_sum(chunk_loss, chunks, per_token, params, _empty(leaves), loss_scale)


def loss_and_gradients(
    chunk_loss: ChunkLoss,
    chunks: Sequence[Chunk],
    leaves: LinearLeaves,
    wanted: LinearWanted,
    scale: float | Tensor = 1.0,
) -> tuple[TokenLoss, LinearGradients]:
    """Return the summed loss of all chunks and its gradients times `scale`, outside autograd."""
    per_token = (leaves.hidden, leaves.token_weight)
    params = (leaves.weight, leaves.bias)
    asked = (wanted.hidden, wanted.token_weight, wanted.weight, wanted.bias)
    gradients = Gradients(per_token, params, asked, len(chunks), scale)
    loss = sum_over_chunks(chunk_loss, chunks, per_token, _empty(leaves), gradients if any(asked) else None)
    slots = LinearSlots.of(gradients)
    return loss, LinearGradients(
        hidden=_released(slots.hidden, leaves.hidden),
        weight=_released(slots.weight, leaves.weight),
        bias=_released(slots.bias, leaves.bias),
        token_weight=_released(slots.token_weight, leaves.token_weight),
    )


def _released(slot: RowGradient | SummedGradient | None, leaf: Tensor | None) -> Tensor | None:
    """Return what a slot has stored: zeros where there was no chunk."""
    if slot is None or leaf is None:
        return None
    found = slot.release(None)
    return torch.zeros_like(leaf) if found is None else found


def _empty(leaves: LinearLeaves) -> TokenLoss:
    return TokenLoss.zero(product_dtype(leaves.hidden), leaves.hidden.device, tells=True)


class Projection:
    """hidden -> logits, and their gradient back, in buffers that every chunk uses again.

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
        self.softcap, self.temperature = softcap, temperature
        # The CPU's softmax may write over its input; elsewhere that is not promised, and memory is cached
        self.in_place = self.weight_VD.device.type == "cpu"
        self.widen = self.in_place and wide(dtype) != dtype
        self.buffers: dict[str, Tensor] = {}

    def product(self, hidden_KD: Tensor, biased: bool = True) -> Tensor:
        """hidden @ weight.T, with the bias unless it is added when the product is widened, or is not asked for."""
        out = self._buffer("product", len(hidden_KD), hidden_KD.dtype)
        if self.bias_V is None or self.widen or not biased:
            return torch.mm(hidden_KD, self.weight_VD.t(), out=out)
        return torch.addmm(self.bias_V, hidden_KD, self.weight_VD.t(), out=out)

    def rows_at_once(self, rows: int) -> int:
        """How many go through the softmax together: on the CPU what its cache holds, so that the passes are fast."""
        if not self.in_place:
            return rows
        bytes_a_row = len(self.weight_VD) * wide(self.weight_VD.dtype).itemsize
        return max(1, min(rows, CACHE * torch.get_num_threads() // max(1, bytes_a_row)))

    def logits(self, product_KV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Some rows' logits, and the tanh they came through; the product's memory may be theirs."""
        x_KV, dtype = product_KV, wide(product_KV.dtype)
        plain = self.softcap is None and self.temperature == 1
        if self.widen or (x_KV.dtype != dtype and not plain):
            x_KV = self._buffer("wide", len(x_KV), dtype).copy_(x_KV)
            if self.bias_V is not None and self.widen:
                x_KV += self.bias_V
        if self.softcap is None:
            return x_KV if plain else x_KV.div_(self.temperature), None
        tanh_KV = x_KV.div_(self.softcap).tanh_()
        capped = self._buffer("capped", len(x_KV), dtype)
        return torch.mul(tanh_KV, self.softcap / self.temperature, out=capped), tanh_KV

    def to_product_(
        self, grad_KV: Tensor, tanh_KV: Tensor | None, row_factor: float | Tensor, product_KV: Tensor
    ) -> Tensor:
        """The logits' gradient times a factor for each row becomes the product's, in its place; returned wide."""
        if tanh_KV is not None:
            grad_KV *= tanh_KV.square_().neg_().add_(1)
        factor = row_factor / self.temperature
        if isinstance(factor, Tensor):
            grad_KV *= factor.unsqueeze(1) if factor.dim() else factor
        elif factor != 1:
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
        """Store the gradients of hidden, weight and bias, given that of the product.

        product = hidden @ weight.T + bias, so with G the product's gradient: hidden's is G @ weight, the weight's
        G.T @ hidden, the bias's the sum of G's rows.
        """
        if gradients.hidden is not None:
            gradients.hidden.write_product(chunk, product_KV, self.weight_VD)
        if gradients.weight is not None:
            gradients.weight.add_product(product_KV.t(), hidden_KD)
        found = [grad for grad in bias_grads if grad is not None]
        if gradients.bias is not None and found:
            gradients.bias.add(torch.stack(found).sum(0))

    def bias_gradient(self, grad_KV: Tensor, gradients: LinearSlots) -> Tensor | None:
        """Return the bias's gradient from some rows; None where it is not wanted."""
        if gradients.bias is None:
            return None
        return grad_KV.sum(0, dtype=wide(grad_KV.dtype))

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        held = self.buffers.get(name)
        if held is None or len(held) < rows:
            # Chunks are even but for one row, which the first one may lack
            classes = len(self.weight_VD)
            width = classes if why_no_kernel(self.weight_VD.device.type) else aligned(classes)
            held = self.weight_VD.new_empty((rows + 1, width), dtype=dtype)[:, :classes]
            self.buffers[name] = held
        return held[:rows]


class LinearFormula:
    """Cross-entropy of one chunk: its loss and all its gradients.

    Args:
        projection: from hidden to logits.
        target_N: all rows' classes; a chunk says which rows are its own.
        q: what the logits are held against.
        part: how sums over the classes here become those of the vocabulary; None where all classes are here.
        ignored: the target of rows that count for nothing though a chunk has them; None where they were left out.
    """

    def __init__(
        self,
        projection: Projection,
        target_N: Tensor,
        q: SoftTarget,
        part: VocabPart | None = None,
        ignored: int | None = None,
    ) -> None:
        self.projection, self.target_N, self.part, self.ignored = projection, target_N, part, ignored
        if q.weight_V is not None:
            q = q._replace(weight_V=q.weight_V.detach().to(wide(projection.weight_VD.dtype)))
        self.q = q
        self.kernel: RowKernel | None = None
        weight_VD = projection.weight_VD
        if len(weight_VD) and not why_no_kernel(weight_VD.device.type):
            self.kernel = RowKernel(q, projection.bias_V, projection.softcap, projection.temperature, ignored)

    def __call__(self, rows: Rows, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed loss; `rows` are those of hidden and of token_weight."""
        projection, target_K = self.projection, self.target_N[chunk]
        hidden_KD, weight_K = rows
        assert hidden_KD is not None
        if weight_K is not None:
            weight_K = weight_K.to(wide(projection.weight_VD.dtype))
        slots = None if gradients is None else LinearSlots.of(gradients)
        with torch.autocast(target_K.device.type, enabled=False):  # what it would cast has been
            hidden_KD = hidden_KD.to(projection.weight_VD.dtype)
            if self.ignored is not None:  # whatever is there, a gradient of 0 times it must be 0
                hidden_KD = hidden_KD.masked_fill((target_K == self.ignored).unsqueeze(1), 0)
            product_KV = projection.product(hidden_KD, biased=self.kernel is None)
            size = self._rows_at_once(len(target_K))
            weights = [None] * -(-len(target_K) // size) if weight_K is None else weight_K.split(size)
            blocks = zip(product_KV.split(size), target_K.split(size), weights, strict=True)
            block_loss = self._block if self.kernel is None else self._block_by_kernel
            losses, row_loss, biases = zip(*(block_loss(*block, slots) for block in blocks), strict=True)
            if slots is not None:
                projection.back(product_KV, hidden_KD, chunk, biases, slots)
                if slots.token_weight is not None:
                    slots.token_weight.write(chunk, torch.cat(row_loss) * slots.scale)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def scores(self, hidden_KD: Tensor, chunk: Chunk) -> Tensor:
        """log p of the chunk's targets; 0 where the target is `ignored`."""
        projection, target_K, found = self.projection, self.target_N[chunk], []
        kept_K = None if self.ignored is None else target_K != self.ignored
        if kept_K is not None:
            hidden_KD, target_K = hidden_KD.masked_fill(~kept_K.unsqueeze(1), 0), target_K.where(kept_K, 0)
        with torch.autocast(target_K.device.type, enabled=False):
            product_KV = projection.product(hidden_KD.to(projection.weight_VD.dtype))
            size = self._rows_at_once(len(target_K))
            for block_KV, block_K in zip(product_KV.split(size), target_K.split(size), strict=True):
                logits_KV, _ = projection.logits(block_KV)
                _, sums = softmax_and_sums(logits_KV, block_K, self.q, self.part, self._out(logits_KV))
                found.append(sums.gold_N - sums.lse_N)
        scores_K = torch.cat(found)
        return scores_K if kept_K is None else scores_K.where(kept_K, torch.zeros_like(scores_K))

    def _block(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """Some rows' loss, summed and for each; where gradients are wanted, theirs takes the product's place, and the
        bias's is returned."""
        kept_K = None if self.ignored is None else target_K != self.ignored
        target_K = target_K if kept_K is None else target_K.where(kept_K, 0)
        logits_KV, tanh_KV = self.projection.logits(product_KV)
        p_KV, sums = softmax_and_sums(logits_KV, target_K, self.q, self.part, self._out(logits_KV))
        loss_K, nll_K, correct_K = row_losses(sums, self.q), sums.lse_N - sums.gold_N, sums.correct_N
        if kept_K is not None:
            loss_K, nll_K, correct_K = (t.where(kept_K, torch.zeros_like(t)) for t in (loss_K, nll_K, correct_K))
        loss = _summed(loss_K, nll_K, correct_K, weight_K, kept_K)
        if gradients is None:
            return loss, loss_K, None
        grad_KV = logits_gradient_(p_KV, target_K, sums, self.q, self.part)
        if kept_K is not None:
            grad_KV.masked_fill_(~kept_K.unsqueeze(1), 0)
        grad_KV = self.projection.to_product_(grad_KV, tanh_KV, _factor(weight_K, gradients), product_KV)
        return loss, loss_K, self.projection.bias_gradient(grad_KV, gradients)

    def _block_by_kernel(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: LinearSlots | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """The same in one kernel, or, of a split vocabulary, in two with the ranks' sums between them."""
        assert self.kernel is not None
        factor = 1.0 if gradients is None else _factor(weight_K, gradients)
        kept_K = None if self.ignored is None else target_K != self.ignored
        if self.part is None:
            rows_K = self.kernel.whole_(product_KV, target_K, factor, gradients is not None)
        else:
            index_K, owned_K = self.part.locate(target_K, product_KV.size(1))
            here_K = index_K.where(owned_K, -1)
            sums = with_weights(self.kernel.part_sums(product_KV, here_K), self.q, index_K, owned_K)
            sums = self.part.combine(sums, target_K)
            rows_K = row_losses(sums, self.q), sums.lse_N - sums.gold_N, sums.correct_N
            if gradients is not None:
                mass = softmax_factor(sums, self.q)
                self.kernel.part_gradient_(product_KV, here_K, sums.lse_N, mass, factor)
        loss = _summed(*rows_K, weight_K, kept_K)
        return loss, rows_K[0], None if gradients is None else self.projection.bias_gradient(product_KV, gradients)

    def _rows_at_once(self, rows: int) -> int:
        """A split vocabulary takes the chunk at once, for its all-reduces are per block; so does a kernel."""
        at_once = self.part is not None or self.kernel is not None
        return rows if at_once else self.projection.rows_at_once(rows)

    def _out(self, logits_KV: Tensor) -> Tensor | None:
        """The memory of the softmax: the logits' own where that is promised to work, else torch's to allocate."""
        return logits_KV if self.projection.in_place else None


def _summed(
    loss_K: Tensor, nll_K: Tensor, correct_K: Tensor, weight_K: Tensor | None, kept_K: Tensor | None
) -> TokenLoss:
    """Of the rows' losses, without weights, their weighted sum and the plain sums of the others."""
    count = torch.full((), len(loss_K), device=loss_K.device) if kept_K is None else kept_K.sum()
    total = (loss_K if weight_K is None else loss_K * weight_K).sum()
    return TokenLoss(total, count, nll_K.sum(), correct_K.sum().to(torch.int64))


def _factor(weight_K: Tensor | None, gradients: LinearSlots) -> float | Tensor:
    """What each row's gradient is multiplied by."""
    return gradients.scale if weight_K is None else weight_K * gradients.scale
