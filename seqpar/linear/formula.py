"""One chunk of a projection onto the vocabulary and its loss, with every gradient by formula.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a part of it, D hidden, V vocabulary (this rank's part
of it, where it is split).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import ByFormula, Gradients, chunked_gradient
from seqpar.core.chunks import Chunk
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


def walk_by_formula(
    hidden_ND: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunks: Sequence[Chunk],
    formula: LinearFormula,
    token_weight_N: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
) -> TokenLoss:
    """The loss of what has been checked, over these chunks; `formula` is of this weight and bias."""
    dtype = formula.projection.weight_VD.dtype
    per_token = [hidden_ND] if token_weight_N is None else [hidden_ND, token_weight_N]
    params = [weight] if bias is None else [weight, bias]
    empty = TokenLoss.zero(dtype, hidden_ND.device, tells=True)
    return chunked_gradient(ByFormula(formula), chunks, per_token, params, empty, loss_scale)


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
        self, product_KV: Tensor, hidden_KD: Tensor, chunk: Chunk, biases: Sequence[Tensor | None], out: Gradients
    ) -> None:
        """From the product's gradient to those of hidden (per-token tensor 0), weight and bias (parameters 0 and 1)."""
        out.write_product(0, chunk, product_KV, self.weight_VD)
        out.add_product(0, product_KV.t(), hidden_KD)
        parts = [part for part in biases if part is not None]
        if parts:
            out.add(1, torch.stack(parts).sum(0))

    def bias_gradient(self, grad_KV: Tensor, gradients: Gradients) -> Tensor | None:
        """The bias's, of some rows; None where it is not wanted."""
        wanted = self.bias_V is not None and gradients.wanted[1]
        return grad_KV.sum(0, dtype=wide(grad_KV.dtype)) if wanted else None

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

    def __call__(self, rows: tuple[Tensor, ...], chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """rows: the chunk's hidden states and, where tokens are weighted, their weights."""
        projection, target_K = self.projection, self.target_N[chunk]
        weight_K = rows[1].to(wide(projection.weight_VD.dtype)) if len(rows) > 1 else None
        with torch.autocast(target_K.device.type, enabled=False):  # what it would cast has been
            hidden_KD = rows[0].to(projection.weight_VD.dtype)
            if self.ignored is not None:  # whatever is there, a gradient of 0 times it must be 0
                hidden_KD = hidden_KD.masked_fill((target_K == self.ignored).unsqueeze(1), 0)
            product_KV = projection.product(hidden_KD, biased=self.kernel is None)
            size = self._rows_at_once(len(target_K))
            weights = [None] * -(-len(target_K) // size) if weight_K is None else weight_K.split(size)
            blocks = zip(product_KV.split(size), target_K.split(size), weights, strict=True)
            block_loss = self._block if self.kernel is None else self._block_by_kernel
            losses, row_loss, biases = zip(*(block_loss(*block, gradients) for block in blocks), strict=True)
            if gradients is not None:
                projection.back(product_KV, hidden_KD, chunk, biases, gradients)
                if weight_K is not None:
                    gradients.write(1, chunk, torch.cat(row_loss) * gradients.scale)
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
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: Gradients | None
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
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: Gradients | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """The same in one kernel, or, of a split vocabulary, in two with the ranks' sums between them."""
        assert self.kernel is not None
        factor = 1.0 if gradients is None else _factor(weight_K, gradients)
        kept_K = None if self.ignored is None else target_K != self.ignored
        if self.part is None:
            rows_K = self.kernel.whole_(product_KV, target_K, factor, gradients is not None)
        else:
            index_K, owned_K = self.part.place(target_K, product_KV.size(1))
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


def _factor(weight_K: Tensor | None, gradients: Gradients) -> float | Tensor:
    """What each row's gradient is multiplied by."""
    return gradients.scale if weight_K is None else weight_K * gradients.scale
