"""Compute the scores of some rows from their products, and the products' gradient, by torch or by Triton kernels.

`rows/scores.py` has the scores of a row of logits and G, their gradient; d loss / d product is G times the derivative
of softcap and temperature.

Shape suffixes: K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's classes, if it is split),
P picked classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.token_loss import wide
from seqpar.kernels.row_kernel import RowKernel, why_no_kernel
from seqpar.linear.projection import Projection
from seqpar.rows.scores import RowFunction, RowSums, Softmax, Upstream


class Read(NamedTuple):
    """What is in memory after some rows' logits have been read; a kernel reads them again."""

    softmax: Softmax | None
    tanh_KV: Tensor | None
    """tanh(product / softcap) with a softcap."""
    share_N: Tensor | None = None
    """This rank's share of the probability, where the sums do not have it."""


class OwnSums(NamedTuple):
    """The sums of some rows over this rank's classes alone."""

    read: Read
    sums: RowSums
    """As `RowFunction.over_parts` takes them."""
    here_KP: Tensor | None
    """Which picked classes are here; None if all are."""
    numbers_KV: Tensor
    """What `before` counts: the logits, or for a kernel the products."""


class ProjectedRows:
    """The row function behind a projection.

    Args:
        projection: from hidden to logits, with a temperature that is the same for all rows.
        function: which scores are wanted. Its class weights, if any, have the products' dtype or a wider one.
    """

    def __init__(self, projection: Projection, function: RowFunction) -> None:
        self.projection = projection
        self.function = function
        self.kernel: RowKernel | None = None
        weight_VD = projection.weight_VD
        if len(weight_VD) and RowKernel.knows(function) and not why_no_kernel(weight_VD.device.type):
            self.kernel = RowKernel(function, projection.bias_V, projection.softcap, projection.temperature)
        self.biased = self.kernel is None
        """Whether the products that it reads have the bias; a kernel adds it itself, in float32."""
        self.product: Callable[[Tensor], Tensor] = partial(projection.product, biased=self.biased)
        """Return the products of a chunk's rows."""

    def rows_at_once(self, rows: int) -> int:
        """Return how many of a chunk's rows are read at once."""
        # A kernel needs no cache, and a split vocabulary's all-gathers cost the same for a block as for the chunk
        if self.kernel is not None or self.function.split is not None:
            return rows
        return self.projection.rows_at_once(rows)

    def sums(
        self, product_KV: Tensor, picked_KP: Tensor, temperature_K: Tensor | None, again: bool
    ) -> tuple[Read, RowSums]:
        """Return the sums of some rows, and what `gradient_` needs unless `again` is false.

        Args:
            temperature_K: a temperature for each row, by which the projection's logits are divided further.
        """
        own = self.own_sums(product_KV, picked_KP, temperature_K, again)
        sums = self.function.over_parts(own.sums, picked_KP, own.here_KP)
        if self.function.rank:
            before_K = self.before(own, picked_KP[:, 0], sums.picked_NP[:, 0], temperature_K)
            sums = sums._replace(rank_N=self.function.over_ranks(before_K))
        return own.read, sums

    def own_sums(self, product_KV: Tensor, picked_KP: Tensor, temperature_K: Tensor | None, again: bool) -> OwnSums:
        """Return the sums over this rank's classes; the arguments are those of `sums`."""
        if self.kernel is not None:
            index_KP, here_KP = self.function.locate(picked_KP, product_KV.size(1))
            own = self.kernel.sums(product_KV, index_KP, picked_KP[:, 0], temperature_K)
            return OwnSums(Read(None, None), own, here_KP, product_KV)
        logits_KV, tanh_KV = self._logits(product_KV, temperature_K)
        # The softmax takes their place, and no class may come before another by its rounding
        kept_KV = logits_KV.clone() if self.function.rank else logits_KV
        # z - m is needed once more in the gradient, but not by the sums alone
        scratch = self._memory("terms", logits_KV, self.function.entropy) if again else logits_KV
        softmax, own, here_KP = self.function.own_sums_(logits_KV, picked_KP, out=self._out(logits_KV), scratch=scratch)
        return OwnSums(Read(softmax, tanh_KV), own, here_KP, kept_KV)

    def before(self, own: OwnSums, target_K: Tensor, gold_K: Tensor, temperature_K: Tensor | None) -> Tensor:
        """Return how many of this rank's classes come before the target, whose logit is `gold_K`."""
        if self.kernel is not None:
            return self.kernel.before(own.numbers_KV, target_K, gold_K, temperature_K)
        return self.function.before(own.numbers_KV, target_K, gold_K)

    def read(self, product_KV: Tensor, sums: RowSums, temperature_K: Tensor | None, entropy: bool) -> Read:
        """Return what `gradient_` needs of products that have been computed again; `entropy` is whether its arrives."""
        if self.kernel is not None:
            return Read(None, None)
        logits_KV, tanh_KV = self._logits(product_KV, temperature_K)
        function = self.function._replace(entropy=entropy)
        out = self._memory("softmax", logits_KV, True) if entropy else self._in_place(logits_KV)
        if self.function.split is None or sums.share_N is not None:
            return Read(function.softmax_(logits_KV, sums.best_N, out), tanh_KV)
        own_lse_N = logits_KV.logsumexp(-1)
        share_N = ((own_lse_N - sums.best_N) - sums.log_sum_N).exp()
        return Read(function.softmax_(logits_KV, sums.best_N, out), tanh_KV, share_N)

    def gradient_(
        self,
        read: Read,
        product_KV: Tensor,
        picked_KP: Tensor,
        temperature_K: Tensor | None,
        sums: RowSums,
        upstream: Upstream,
        into_KV: Tensor | None = None,
    ) -> Tensor:
        """Overwrite the products by their gradient, or `into_KV`; return it, without a kernel not yet rounded."""
        if into_KV is None:
            into_KV = product_KV
        if read.softmax is None:
            assert self.kernel is not None
            index_KP, here_KP = self.function.locate(picked_KP, product_KV.size(1))
            if here_KP is not None:
                index_KP = index_KP.where(here_KP, -1)
            self.kernel.gradient_(product_KV, index_KP, temperature_K, sums, upstream, into_KV)
            return into_KV
        if read.share_N is not None:
            sums = sums._replace(share_N=read.share_N)
        grad_KV = self.function.gradient_(read.softmax, picked_KP, sums, upstream)
        # The derivative of the logits by the capped product
        slope = 1.0 if temperature_K is None else temperature_K.reciprocal()
        return self.projection.to_product_(grad_KV, read.tanh_KV, slope, into_KV)

    def _logits(self, product_KV: Tensor, temperature_K: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return logits in float32 or wider that may be overwritten, and tanh(product / softcap) with a softcap."""
        logits_KV, tanh_KV = self.projection.logits(product_KV)
        logits_KV = logits_KV.to(wide(logits_KV.dtype))
        if temperature_K is not None:
            logits_KV /= temperature_K.unsqueeze(1)
        return logits_KV, tanh_KV

    def _out(self, logits_KV: Tensor) -> Tensor | None:
        """Return memory for the softmax beside z - m if that is wanted, else in its place."""
        if self.function.entropy:
            return self._memory("softmax", logits_KV, True)
        return self._in_place(logits_KV)

    def _in_place(self, logits_KV: Tensor) -> Tensor | None:
        """Return the logits' own memory; None on devices whose softmax is not known to work in place."""
        return logits_KV if self.projection.in_place else None

    def _memory(self, name: str, logits_KV: Tensor, wanted: bool) -> Tensor | None:
        """Return memory of the logits' size beside them; None if it is not wanted."""
        if not wanted:
            return None
        if not self.projection.in_place:
            return torch.empty_like(logits_KV)
        return self.projection.buffer(name, len(logits_KV), logits_KV.dtype)
