"""One chunk of a projection onto the vocabulary and its loss, with every gradient by formula.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a part of it, D hidden, V vocabulary (this rank's part
of it, where it is split).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.chunked_gradient import ByFormula, Gradients, chunked_gradient
from seqpar.chunks import Chunk
from seqpar.criteria import SoftTarget, VocabPart, logits_gradient_, row_losses, softmax_and_sums
from seqpar.token_loss import TokenLoss, wide

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

    def product(self, hidden_KD: Tensor) -> Tensor:
        """hidden @ weight.T, with the bias unless it is added when the product is widened."""
        out = self._buffer("product", len(hidden_KD), hidden_KD.dtype)
        if self.bias_V is None or self.widen:
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
        return grad_KV.sum(0) if self.bias_V is not None and gradients.wanted[1] else None

    def _buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        held = self.buffers.get(name)
        if held is None or len(held) < rows:
            # Chunks are even but for one row, which the first one may lack
            held = self.weight_VD.new_empty((rows + 1, len(self.weight_VD)), dtype=dtype)
            self.buffers[name] = held
        return held[:rows]


class LinearFormula:
    """Cross-entropy of one chunk: its loss and all its gradients.

    Args:
        projection: from hidden to logits.
        target_N: all rows' classes; a chunk says which rows are its own.
        q: what the logits are held against.
        part: how sums over the classes here become those of the vocabulary; None where all classes are here.
    """

    def __init__(self, projection: Projection, target_N: Tensor, q: SoftTarget, part: VocabPart | None = None) -> None:
        self.projection, self.target_N, self.part = projection, target_N, part
        if q.weight_V is not None:
            q = q._replace(weight_V=q.weight_V.detach().to(wide(projection.weight_VD.dtype)))
        self.q = q

    def __call__(self, rows: tuple[Tensor, ...], chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """rows: the chunk's hidden states and, where tokens are weighted, their weights."""
        projection, target_K = self.projection, self.target_N[chunk]
        weight_K = rows[1].to(wide(projection.weight_VD.dtype)) if len(rows) > 1 else None
        with torch.autocast(target_K.device.type, enabled=False):  # what it would cast has been
            hidden_KD = rows[0].to(projection.weight_VD.dtype)
            product_KV = projection.product(hidden_KD)
            # A split vocabulary takes the chunk at once, for its all-reduces are per block
            size = projection.rows_at_once(len(target_K)) if self.part is None else len(target_K)
            weights = [None] * -(-len(target_K) // size) if weight_K is None else weight_K.split(size)
            blocks = zip(product_KV.split(size), target_K.split(size), weights, strict=True)
            losses, row_loss, biases = zip(*(self._block(*block, gradients) for block in blocks), strict=True)
            if gradients is not None:
                projection.back(product_KV, hidden_KD, chunk, biases, gradients)
                if weight_K is not None:
                    gradients.write(1, chunk, torch.cat(row_loss) * gradients.scale)
        return TokenLoss(*(torch.stack(column).sum() for column in zip(*losses, strict=True)))

    def scores(self, hidden_KD: Tensor, chunk: Chunk) -> Tensor:
        """log p of the chunk's targets."""
        projection, target_K, found = self.projection, self.target_N[chunk], []
        with torch.autocast(target_K.device.type, enabled=False):
            product_KV = projection.product(hidden_KD.to(projection.weight_VD.dtype))
            size = projection.rows_at_once(len(target_K)) if self.part is None else len(target_K)
            for block_KV, block_K in zip(product_KV.split(size), target_K.split(size), strict=True):
                logits_KV, _ = projection.logits(block_KV)
                _, sums = softmax_and_sums(logits_KV, block_K, self.q, self.part, self._out(logits_KV))
                found.append(sums.gold_N - sums.lse_N)
        return torch.cat(found)

    def _block(
        self, product_KV: Tensor, target_K: Tensor, weight_K: Tensor | None, gradients: Gradients | None
    ) -> tuple[TokenLoss, Tensor, Tensor | None]:
        """Some rows' loss, summed and for each; where gradients are wanted, theirs takes the product's place, and the
        bias's is returned."""
        logits_KV, tanh_KV = self.projection.logits(product_KV)
        p_KV, sums = softmax_and_sums(logits_KV, target_K, self.q, self.part, self._out(logits_KV))
        count = torch.full((), len(target_K), device=target_K.device)
        loss_K = row_losses(sums, self.q)
        total = (loss_K if weight_K is None else loss_K * weight_K).sum()
        loss = TokenLoss(total, count, (sums.lse_N - sums.gold_N).sum(), sums.correct_N.sum())
        if gradients is None:
            return loss, loss_K, None
        grad_KV = logits_gradient_(p_KV, target_K, sums, self.q, self.part)
        factor = gradients.scale if weight_K is None else weight_K * gradients.scale
        grad_KV = self.projection.to_product_(grad_KV, tanh_KV, factor, product_KV)
        return loss, loss_K, self.projection.bias_gradient(grad_KV, gradients)

    def _out(self, logits_KV: Tensor) -> Tensor | None:
        """The memory of the softmax: the logits' own where that is promised to work, else torch's to allocate."""
        return logits_KV if self.projection.in_place else None
