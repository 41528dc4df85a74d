"""Compute a projection's gradients over tiles of the vocabulary, with all rows at once, given the rows' sums.

    for each tile of classes:   product = hidden @ weight[tile].T, overwritten by its gradient G
                                d weight[tile] = G.T @ hidden,   d hidden += G @ weight[tile]

A tile's weight gradient is complete: it is rounded once and written once, in its own dtype, or added into a tensor of
the caller's. Only hidden's gradient, which is small, is summed. Over chunks of rows it is the other way round.

Shape suffixes: M rows that count, D hidden, V vocabulary (this rank's classes, if it is split), T classes of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.device_facts import FACTS
from seqpar.core.graphs import without_autocast
from seqpar.core.stored_gradients import plus_product
from seqpar.core.token_loss import wide
from seqpar.distributed.vocab_parallel import VocabShard
from seqpar.linear.leaves import ByLeaf, LinearGradients, LinearLeaves, LinearWanted
from seqpar.linear.projection import Projection
from seqpar.rows.scores import ClassWeights, RowFunction, Sums, Upstream

TILE_CLASSES = 128
"""Tiles have a multiple of this many classes, so that rows of the weight's gradient begin at whole vectors."""


def worth_tiles(device_type: str) -> bool:
    """Return whether tiles are faster than chunks of rows: not on a CPU, where they took 1.05 to 1.15 times as long."""
    return not FACTS[device_type].is_host


class KnownRows(NamedTuple):
    """All rows that count, whose sums and upstream factors are known."""

    hidden_MD: Tensor
    picked_MP: Tensor
    temperature_M: Tensor | None
    sums: Sums
    upstream: Upstream


class VocabTiles:
    """The gradients of a projection, tile by tile.

    Args:
        function: the row function over this rank's classes.
        vocab_size: the size of the whole vocabulary.
        budget: the bytes of a tile's logits.
    """

    def __init__(self, projection: Projection, function: RowFunction, vocab_size: int, budget: int) -> None:
        self.projection = projection
        self.function = function._replace(top_k=0, rank=False)
        self.vocab_size = vocab_size
        self.budget = budget
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def gradients(
        self, leaves: LinearLeaves, rows: KnownRows, wanted: LinearWanted, weight_grad: Tensor | None = None
    ) -> LinearGradients:
        """Return the gradients of the rows' hidden states, of the weight and of the bias.

        Args:
            weight_grad: a tensor to add the weight's gradient into, instead of returning it.
        """
        weight_VD = self.projection.weight_VD
        hidden_MD = rows.hidden_MD.to(weight_VD.dtype)
        # Here a part is a tile, so this rank's share of the probability does not apply
        rows = rows._replace(hidden_MD=hidden_MD, sums=rows.sums._replace(share_N=None))
        tiles = self._tiles(len(hidden_MD))
        hidden_sum: Tensor | None = None
        weight_V = bias_V = None
        if wanted.weight and weight_grad is None:
            weight_V = torch.zeros_like(leaves.weight)
        if wanted.bias:
            assert leaves.bias is not None
            bias_V = torch.empty_like(leaves.bias)
        with without_autocast(weight_VD.device.type):
            for tile in tiles:
                grad_MT = self._gradient(tile, rows)
                if wanted.hidden:
                    hidden_sum = plus_product(hidden_sum, grad_MT, weight_VD[tile])
                if weight_V is not None:
                    _write_product(weight_V[tile], grad_MT.t(), hidden_MD)
                elif weight_grad is not None and wanted.weight:
                    plus_product(weight_grad[tile], grad_MT.t(), hidden_MD)
                if bias_V is not None:
                    bias_V[tile] = grad_MT.sum(0, dtype=rows.sums.best_N.dtype)
        self.buffers.clear()
        if not wanted.hidden:
            return ByLeaf(None, weight_V, bias_V, None)
        if hidden_sum is None:
            hidden_sum = leaves.hidden.new_zeros(hidden_MD.shape)
        return ByLeaf(hidden_sum.to(leaves.hidden.dtype), weight_V, bias_V, None)

    def _tiles(self, rows: int) -> list[slice]:
        """Return the classes of each tile."""
        classes = len(self.projection.weight_VD)
        row_bytes = max(1, rows * self.projection.weight_VD.dtype.itemsize)
        size = max(1, self.budget // row_bytes // TILE_CLASSES) * TILE_CLASSES
        return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]

    def _gradient(self, tile: slice, rows: KnownRows) -> Tensor:
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
        for start in range(0, len(product_MT), size):
            some = slice(start, start + size)
            sums = rows.sums.select(some)
            upstream = rows.upstream.select(some)
            temperature_K = None if rows.temperature_M is None else rows.temperature_M[some]
            read = own.read_again(product_MT[some], sums, temperature_K, upstream.entropy is not None)
            own.gradient_(read, product_MT[some], rows.picked_MP[some], temperature_K, sums, upstream)
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
