"""Compute logits and scores from hidden states, and turn their gradients into those of the projection.

    product = hidden @ weight.T + bias                                   (K, V)
    logits  = cap(product) / temperature,  cap(x) = softcap tanh(x / softcap)

`rows/scores.py` has the scores of a row of logits and their gradient, which torch or Triton kernels compute. Backward,
with G = d loss / d product, which overwrites the product:

    d hidden = G @ weight,  d weight = G.T @ hidden,  d bias = sum of G's rows

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's
classes, if it is split), P picked classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Leaves, Walk
from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import FACTS, why_no_kernel
from seqpar.core.stored_gradients import Gradients, RowGradient, SummedGradient, in_own_precision
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.kernels.row_kernel import RowKernel, align
from seqpar.rows.scores import RowFunction, Softmax, Sums, Upstream

CACHE = 2**23
"""Bytes of logits, for each CPU thread, that go through the softmax's dozen passes in one block: few enough to stay in
cache, but enough that the calls themselves cost little (measured from 2^18 to a whole chunk)."""


OfTokens = TypeVar("OfTokens")
OfParams = TypeVar("OfParams")


class ByLeaf(NamedTuple, Generic[OfTokens, OfParams]):
    """One thing for each tensor that gradients flow into; all but weight and bias have one row for each token."""

    hidden: OfTokens
    weight: OfParams
    bias: OfParams | None = None
    token_weight: OfTokens | None = None
    per_token: tuple[OfTokens, ...] = ()
    """What the loss of a row takes besides its scores."""


LinearLeaves = ByLeaf[Tensor, Tensor]
"""The tensors themselves."""

LinearSlots = ByLeaf[RowGradient | None, SummedGradient | None]
"""Where each gradient is stored; None if it is not wanted."""

LinearWanted = ByLeaf[bool, bool]
"""Which of the tensors want a gradient."""

LinearGradients = ByLeaf[Tensor | None, Tensor | None]
"""Their gradients; None if not wanted."""


class Read(NamedTuple):
    """What remains in memory after some rows' logits have been read; nothing with a kernel, which reads them again."""

    softmax: Softmax | None
    tanh_KV: Tensor | None
    """tanh(product / softcap) with a softcap."""


class OwnSums(NamedTuple):
    """The sums of some rows over this rank's classes alone."""

    read: Read
    sums: Sums
    """As `RowFunction.over_parts` takes them."""
    here_KP: Tensor | None
    """Which picked classes are here; None if all are."""
    numbers_KV: Tensor
    """The numbers that `before` compares: the logits, or for a kernel the products."""


class Projection:
    """Compute logits and scores from hidden states, and gradients on the way back, in buffers that all chunks reuse.

    logits = cap(hidden @ weight.T + bias) / temperature, where cap(x) is softcap * tanh(x / softcap).

    Args:
        temperature: one number for all rows.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        softcap: float | None,
        temperature: float,
    ) -> None:
        # Products are computed with autograd off; without detach, only the cast would be recorded
        self.weight_VD = weight if weight.dtype == dtype else weight.detach().to(dtype)
        self.bias_V = bias if bias is None or bias.dtype == dtype else bias.detach().to(dtype)
        self.softcap = softcap
        self.temperature = temperature
        kind = weight.device.type
        self.has_kernels = not why_no_kernel(kind)
        self.in_place = FACTS[kind].has_softmax_in_place
        self.wide = wide(dtype)
        """The dtype of the logits."""
        self.widen = self.in_place and self.wide != dtype
        self.buffers: dict[str, Tensor] = {}
        self.function = RowFunction()
        self.kernel: RowKernel | None = None

    def ask_for(self, function: RowFunction) -> Projection:
        """Set which scores of its rows this projection computes from now on; return the projection.

        Args:
            function: the scores; its class weights, if any, have the products' dtype or a wider one.
        """
        if function.entropy:
            function = function._replace(masked=self._may_be_masked())
        self.function = function
        self.kernel = None
        if self.has_kernels and len(self.weight_VD) and RowKernel.knows(function):
            self.kernel = RowKernel(function, self.bias_V, self.softcap, self.temperature)
        return self

    def product(self, hidden_KD: Tensor) -> Tensor:
        """Return hidden @ weight.T plus the bias.

        If the logits are computed in a wider dtype or by a kernel, the bias is added there, before the sum is rounded.
        """
        out = self.buffer("product", len(hidden_KD), hidden_KD.dtype)
        if self.bias_V is None or self.widen or self.kernel is not None:
            return torch.mm(hidden_KD, self.weight_VD.t(), out=out)
        return torch.addmm(self.bias_V, hidden_KD, self.weight_VD.t(), out=out)

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows, at least 1, make a block of the softmax: on the CPU as many as fit in its cache."""
        # A kernel needs no cache, and a split vocabulary's all-gathers cost the same for a block as for the chunk
        if not self.in_place or self.kernel is not None or self.function.split is not None:
            return max(1, rows)
        row_bytes = len(self.weight_VD) * self.wide.itemsize
        return max(1, min(rows, CACHE * torch.get_num_threads() // max(1, row_bytes)))

    def logits(self, product_KV: Tensor, temperature_K: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the logits of some rows in float32 or wider, and tanh(product / softcap) if there is a softcap.

        The logits may use the product's memory, and may be overwritten.

        Args:
            temperature_K: a temperature for each row, which divides the logits further.
        """
        x_KV, tanh_KV = product_KV, None
        if x_KV.dtype != self.wide:
            x_KV = self.buffer("wide", len(x_KV), self.wide).copy_(x_KV)
            if self.bias_V is not None and self.widen:
                x_KV += self.bias_V
        if self.softcap is not None:
            tanh_KV = x_KV.div_(self.softcap).tanh_()
            capped = self.buffer("capped", len(x_KV), self.wide)
            x_KV = torch.mul(tanh_KV, self.softcap / self.temperature, out=capped)
        elif self.temperature != 1:
            x_KV.div_(self.temperature)
        if temperature_K is not None:
            x_KV /= temperature_K.unsqueeze(1)
        return x_KV, tanh_KV

    def sums(
        self, product_KV: Tensor, picked_KP: Tensor, temperature_K: Tensor | None, again: bool
    ) -> tuple[Read, Sums]:
        """Return what `gradient_` needs (usable only if `again` is true) and the sums of some rows.

        Args:
            temperature_K: as in `logits`.
        """
        own = self.own_sums(product_KV, picked_KP, temperature_K, again)
        sums = own.sums
        if own.here_KP is not None:
            sums = self.function.over_parts(sums, picked_KP, own.here_KP)
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
        logits_KV, tanh_KV = self.logits(product_KV, temperature_K)
        # The softmax overwrites them, and its rounding must not put one class before another
        kept_KV = logits_KV.clone() if self.function.rank else logits_KV
        scratch = logits_KV
        if self.function.entropy and again:
            # The gradient needs z - m once more; the sums alone do not
            scratch = self._memory("terms", logits_KV)
        out = self._softmax_memory(logits_KV, self.function.entropy)
        softmax, own, here_KP = self.function.own_sums_(logits_KV, picked_KP, out=out, scratch=scratch)
        return OwnSums(Read(softmax, tanh_KV), own, here_KP, kept_KV)

    def before(self, own: OwnSums, target_K: Tensor, gold_K: Tensor, temperature_K: Tensor | None) -> Tensor:
        """Return how many of this rank's classes come before the target, whose logit is `gold_K`."""
        if self.kernel is not None:
            return self.kernel.before(own.numbers_KV, target_K, gold_K, temperature_K)
        return self.function.before(own.numbers_KV, target_K, gold_K)

    def read_again(self, product_KV: Tensor, sums: Sums, temperature_K: Tensor | None, entropy: bool) -> Read:
        """Return what `gradient_` needs from recomputed products; `entropy` says whether a gradient of it arrives."""
        if self.kernel is not None:
            return Read(None, None)
        logits_KV, tanh_KV = self.logits(product_KV, temperature_K)
        function = self.function._replace(entropy=entropy)
        out = self._softmax_memory(logits_KV, entropy)
        if self.function.split is not None and sums.share_N is None:
            return Read(function.probabilities_(logits_KV, sums, out), tanh_KV)
        return Read(function.softmax_(logits_KV, sums.best_N, out), tanh_KV)

    def gradient_(
        self,
        read: Read,
        product_KV: Tensor,
        picked_KP: Tensor,
        temperature_K: Tensor | None,
        sums: Sums,
        upstream: Upstream,
    ) -> Tensor:
        """Overwrite the products with their gradient and return it: without a kernel, before it was rounded."""
        if read.softmax is None:
            assert self.kernel is not None
            index_KP, here_KP = self.function.locate(picked_KP, product_KV.size(1))
            if here_KP is not None:
                index_KP = index_KP.where(here_KP, -1)
            self.kernel.gradient_(product_KV, index_KP, temperature_K, sums, upstream)
            return product_KV
        grad_KV = self.function.gradient_(read.softmax, picked_KP, sums, upstream)
        # The derivative of the logits with respect to the capped product
        slope = 1.0 if temperature_K is None else temperature_K.reciprocal()
        return self.to_product_(grad_KV, read.tanh_KV, slope, product_KV)

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
        elif isinstance(factor, Tensor):
            grad_KV *= in_own_precision(factor, grad_KV)
        elif factor != 1:
            grad_KV *= factor
        if grad_KV is not product_KV:
            product_KV.copy_(grad_KV)
        return grad_KV

    def back(
        self, product_KV: Tensor, hidden_KD: Tensor, chunk: Chunk, bias_grads: Sequence[Tensor], gradients: LinearSlots
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
        if gradients.bias is not None:
            gradients.bias.add(bias_grads[0] if len(bias_grads) == 1 else torch.stack([*bias_grads]).sum(0))

    def buffer(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        """Return memory for some rows' products or logits; it is the same memory at every call with the same name."""
        buffer = self.buffers.get(name)
        if buffer is None or len(buffer) < rows:
            classes = len(self.weight_VD)
            width = align(classes) if self.has_kernels else classes
            # The sizes of chunks differ by at most one row, so this buffer is large enough for all of them
            padded = self.weight_VD.new_empty((rows + 1, width), dtype=dtype)
            buffer = padded
            if width != classes:
                # The CPU's products may read whole tiles, beyond the end of a row, and 0 x nan would be nan
                padded[:, classes:] = 0
                buffer = padded[:, :classes]
            self.buffers[name] = buffer
        return buffer[:rows]

    def _softmax_memory(self, logits_KV: Tensor, entropy: bool) -> Tensor | None:
        """Return memory for the softmax: separate from z - m for the entropy, else the logits' own if that works."""
        if entropy:
            return self._memory("softmax", logits_KV)
        return logits_KV if self.in_place else None

    def _memory(self, name: str, logits_KV: Tensor) -> Tensor:
        """Return separate memory of the logits' size."""
        if not self.in_place:
            return torch.empty_like(logits_KV)
        return self.buffer(name, len(logits_KV), logits_KV.dtype)

    def _may_be_masked(self) -> bool:
        """Return whether logits may be -inf: only where the bias is. On an accelerator the bias is not read."""
        if self.bias_V is None:
            return False
        return not FACTS[self.bias_V.device.type].is_host or bool((self.bias_V == -math.inf).any())


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on and casts hidden's dtype, else hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def zero_rows(hidden_KD: Tensor, ignored_K: Tensor) -> Tensor:
    """Return the hidden states with 0 in ignored rows: the weight's gradient is G.T @ hidden, and 0 x nan is nan."""
    return hidden_KD.masked_fill(ignored_K.unsqueeze(1), 0)


def flatten(leaves: LinearLeaves, chunks: Sequence[Chunk]) -> Leaves:
    """Return the leaves in the order of `slots_of`, with the loss of no tokens if there are no chunks."""
    hidden, weight, bias, token_weight, per_token = leaves
    # All the sums of `TokenLoss`, as a projection's chunks have
    empty = None if chunks else TokenLoss.zero(product_dtype(hidden), hidden.device, tells=True)
    return Leaves((hidden, token_weight, *per_token), (weight, bias), empty)


def slots_of(gradients: Gradients) -> LinearSlots:
    """Return the slots by name."""
    hidden, token_weight, *per_token = gradients.per_token
    weight, bias = gradients.params
    return ByLeaf(hidden, weight, bias, token_weight, tuple(per_token))


def loss_and_gradients(
    walk: Walk, chunks: Sequence[Chunk], leaves: Leaves, wanted: LinearWanted, scale: float | Tensor = 1.0
) -> tuple[TokenLoss, LinearGradients]:
    """Return the summed loss of all chunks and its gradients times `scale`, outside autograd."""
    of_tokens = (wanted.hidden, bool(wanted.token_weight), *(False for _ in leaves.of_tokens[2:]))
    in_order = (*of_tokens, wanted.weight, bool(wanted.bias))
    gradients = Gradients(leaves.of_tokens, leaves.params, in_order, chunks, scale)
    loss = walk(chunks, leaves, gradients if any(in_order) else None)
    slots = slots_of(gradients)
    hidden, token_weight, *_ = leaves.of_tokens
    weight, bias = leaves.params
    return loss, ByLeaf(
        hidden=_release(slots.hidden, hidden),
        weight=_release(slots.weight, weight),
        bias=_release(slots.bias, bias),
        token_weight=_release(slots.token_weight, token_weight),
    )


def _release(slot: RowGradient | SummedGradient | None, leaf: Tensor | None) -> Tensor | None:
    """Return the gradient stored in a slot; zeros if no chunk has written to it."""
    if slot is None or leaf is None:
        return None
    grad = slot.release(None)
    if grad is None:
        return torch.zeros_like(leaf)
    return grad
