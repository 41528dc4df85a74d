"""Compute the scores of tokens chunk by chunk, and recompute the product for their gradient: by chunks, or by tiles.

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

The product is recomputed for a chunk of rows with all classes, or for a tile of classes with all rows:

    for each tile:   product = hidden @ weight[tile].T, overwritten by G'
                     d weight[tile] = G'.T @ hidden,   d hidden += G' @ weight[tile]

A tile's weight gradient is complete: it is rounded once and written once, in its own dtype, or added into a tensor of
the caller's. Only hidden's gradient, which is small, is summed. Over chunks of rows it is the other way round.

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, M rows that count, D hidden, V
vocabulary (this rank's classes, if it is split), T classes of a tile, J given classes, P = 1 + J.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import FACTS
from seqpar.core.graphs import without_autocast
from seqpar.core.stored_gradients import RowGradient, plus_product
from seqpar.core.token_loss import wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.projection import (
    ByLeaf,
    LinearGradients,
    LinearLeaves,
    LinearSlots,
    LinearWanted,
    Projection,
    zero_rows,
)
from seqpar.rows.scores import ClassWeights, Sums, Upstream


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
                grad_KV = block.gradient_(self.projection, sums, upstream)
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
        """Return the blocks of a chunk that go through the softmax one after the other."""
        size = self.projection.rows_at_once(len(product_KV))
        temperature_K = None
        if self.temperature_N is not None:
            temperature_K = self.temperature_N[chunk]
        return _cut_blocks(product_KV, self.picked_NP[chunk], temperature_K, size)


class _Block(NamedTuple):
    """Some rows of a chunk or a tile."""

    rows: slice
    """Their places in it."""
    product: Tensor
    picked: Tensor
    temperature: Tensor | None

    def gradient_(self, projection: Projection, sums: Sums, upstream: Upstream) -> Tensor:
        """Overwrite the products with their gradient and return it, given the sums and factors of the chunk or tile."""
        sums = sums.select(self.rows)
        upstream = upstream.select(self.rows)
        read = projection.read_again(self.product, sums, self.temperature, upstream.entropy is not None)
        return projection.gradient_(read, self.product, self.picked, self.temperature, sums, upstream)


def _cut_blocks(product_KV: Tensor, picked_KP: Tensor, temperature_K: Tensor | None, size: int) -> Iterator[_Block]:
    """Yield blocks of at most `size` rows."""
    for start in range(0, len(product_KV), size):
        rows = slice(start, start + size)
        temperature = None if temperature_K is None else temperature_K[rows]
        yield _Block(rows, product_KV[rows], picked_KP[rows], temperature)


def join(blocks: list[Sums]) -> Sums:
    """Return the sums of all blocks, joined."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*blocks, strict=True)
    return Sums(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


TILE_CLASSES = 128
"""Tiles have a multiple of this many classes, so that rows of the weight's gradient begin at whole vectors."""


def worth_tiles(device_type: str) -> bool:
    """Return whether tiles are faster than chunks of rows: not on a CPU, where they took 1.05 to 1.15 times as long."""
    return not FACTS[device_type].is_host


class _KnownRows(NamedTuple):
    """All rows that count, whose sums and upstream factors are known."""

    hidden_MD: Tensor
    picked_MP: Tensor
    temperature_M: Tensor | None
    sums: Sums
    upstream: Upstream


class VocabTiles:
    """The gradients of a projection, tile by tile.

    Args:
        formula: the rows' scores.
        vocab_size: the size of the whole vocabulary.
        budget: the bytes of a tile's logits.
    """

    def __init__(self, formula: RecomputedScores, vocab_size: int, budget: int) -> None:
        self.formula = formula
        self.projection = formula.projection
        self.function = formula.projection.function._replace(top_k=0, rank=False)
        self.vocab_size = vocab_size
        self.budget = budget
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def gradients(
        self,
        leaves: LinearLeaves,
        which: Chunk,
        sums_M: Sums,
        upstream_M: Upstream,
        wanted: LinearWanted,
        weight_grad: Tensor | None = None,
    ) -> LinearGradients:
        """Return the gradients of hidden, weight and bias.

        Args:
            which: the rows that count.
            sums_M, upstream_M: the sums of these rows, and their factors.
            weight_grad: a tensor to add the weight's gradient into, instead of returning it.
        """
        weight_VD = self.projection.weight_VD
        rows = self._rows(leaves.hidden, which, sums_M, upstream_M)
        hidden_MD = rows.hidden_MD
        hidden_sum: Tensor | None = None
        weight_V = bias_V = None
        if wanted.weight and weight_grad is None:
            weight_V = torch.zeros_like(leaves.weight)
        if wanted.bias:
            assert leaves.bias is not None
            bias_V = torch.empty_like(leaves.bias)
        with without_autocast(weight_VD.device.type):
            for tile in self._tiles(len(hidden_MD)):
                grad_MT = self._gradient(tile, rows)
                if wanted.hidden:
                    hidden_sum = plus_product(hidden_sum, grad_MT, weight_VD[tile])
                if weight_V is not None:
                    _write_product(weight_V[tile], grad_MT.t(), hidden_MD)
                elif weight_grad is not None and wanted.weight:
                    plus_product(weight_grad[tile], grad_MT.t(), hidden_MD)
                if bias_V is not None:
                    bias_V[tile] = grad_MT.sum(0, dtype=sums_M.best_N.dtype)
        self.buffers.clear()
        if not wanted.hidden:
            return ByLeaf(None, weight_V, bias_V, None)
        if hidden_sum is None:
            hidden_sum = leaves.hidden.new_zeros(hidden_MD.shape)
        return ByLeaf(spread_rows(hidden_sum, which, leaves.hidden), weight_V, bias_V, None)

    def _rows(self, hidden_ND: Tensor, which: Chunk, sums_M: Sums, upstream_M: Upstream) -> _KnownRows:
        """Return what is known of the rows that count."""
        formula = self.formula
        temperature_M = None
        if formula.temperature_N is not None:
            temperature_M = formula.temperature_N[which]
        hidden_MD = formula.prepare_hidden(hidden_ND[which], which)
        # Here a part is a tile, so this rank's share of the probability does not apply
        sums_M = sums_M._replace(share_N=None)
        return _KnownRows(hidden_MD, formula.picked_NP[which], temperature_M, sums_M, upstream_M)

    def _tiles(self, rows: int) -> list[slice]:
        """Return the classes of each tile."""
        classes = len(self.projection.weight_VD)
        row_bytes = max(1, rows * self.projection.weight_VD.dtype.itemsize)
        size = max(1, self.budget // row_bytes // TILE_CLASSES) * TILE_CLASSES
        return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]

    def _gradient(self, tile: slice, rows: _KnownRows) -> Tensor:
        """Return the gradient of the products for a tile's classes."""
        projection = self.projection
        bias_T = None if projection.bias_V is None else projection.bias_V[tile]
        weight_TD = projection.weight_VD[tile]
        own = Projection(weight_TD, bias_T, weight_TD.dtype, projection.softcap, projection.temperature)
        own.buffers = self.buffers.setdefault(len(weight_TD), {})
        first = tile.start if self.function.split is None else self.function.split.start + tile.start
        weights = self.function.weights
        if weights is not None:
            weights = _weights_of_tile(weights, tile, len(weight_TD))
        shard = VocabShard(None, first, self.vocab_size)
        # Asked for before the split is set, because with a split it would be all rows at once
        size = own.rows_at_once(len(rows.hidden_MD))
        own.ask_for(self.function._replace(split=shard, weights=weights))
        product_MT = own.product(rows.hidden_MD)
        for block in _cut_blocks(product_MT, rows.picked_MP, rows.temperature_M, size):
            block.gradient_(own, rows.sums, rows.upstream)
        return product_MT


def _weights_of_tile(weights: ClassWeights, tile: slice, classes: int) -> ClassWeights:
    """Return the weights of a tile's classes, with W over all classes."""
    excluded = weights.excluded
    if excluded is not None:
        excluded -= tile.start
        if not 0 <= excluded < classes:
            excluded = None
    return ClassWeights(None if weights.weight_V is None else weights.weight_V[tile], excluded, weights.total)


def _write_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Write `a @ b` into zeros, rounded once."""
    if into.dtype == a.dtype:
        torch.mm(a, b, out=into)
    elif into.dtype == wide(a.dtype):
        plus_product(into, a, b)
    else:
        into.copy_(a @ b)


def spread_rows(of_rows: Tensor, which: Chunk, like: Tensor) -> Tensor:
    """Return a gradient for all rows in the dtype of `like`, given that of some rows; 0 in the others."""
    if isinstance(which, slice):
        return of_rows.to(like.dtype)
    return torch.zeros_like(like).index_copy_(0, which, of_rows.to(like.dtype))
