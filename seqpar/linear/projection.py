"""Compute logits from hidden states, and the gradients of a projection from the logits' gradient.

    product = hidden @ weight.T + bias                                   (K, V)
    logits  = cap(product) / temperature,  cap(x) = softcap tanh(x / softcap)

Backward, with G = d loss / d product, which overwrites the product:

    d hidden = G @ weight,  d weight = G.T @ hidden,  d bias = sum of G's rows

Shape suffixes: N rows (batch x time), K rows of one chunk or of a block of it, D hidden, V vocabulary (this rank's
classes, if it is split).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk
from seqpar.core.device_facts import FACTS, is_on_host
from seqpar.core.stored_gradients import in_own_precision
from seqpar.core.token_loss import wide
from seqpar.kernels.row_kernel import aligned, why_no_kernel
from seqpar.linear.leaves import LinearSlots

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
        softcap: float | None,
        temperature: float,
    ) -> None:
        # Products are taken where autograd is off; only a cast would be recorded here
        self.weight_VD = weight if weight.dtype == dtype else weight.detach().to(dtype)
        self.bias_V = bias if bias is None or bias.dtype == dtype else bias.detach().to(dtype)
        self.softcap = softcap
        self.temperature = temperature
        self.in_place = FACTS[self.weight_VD.device.type].has_softmax_in_place
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
        """Return how many rows make a block of the softmax, at least 1: on the CPU as many as fit in its cache."""
        if not self.in_place:
            return max(1, rows)
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

    def may_be_masked(self) -> bool:
        """Return whether logits may be -inf: only where the bias is. On an accelerator that is not read."""
        if self.bias_V is None:
            return False
        return not is_on_host(self.bias_V) or bool((self.bias_V == -math.inf).any())

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
            gradients.bias.add(block_grads[0] if len(block_grads) == 1 else torch.stack(block_grads).sum(0))

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
            padded = self.weight_VD.new_empty((rows + 1, width), dtype=dtype)
            buffer = padded
            if width != classes:
                # The CPU's products may read whole tiles, beyond the end of a row, and 0 x nan would be nan
                padded[:, classes:] = 0
                buffer = padded[:, :classes]
            self.buffers[name] = buffer
        return buffer[:rows]


def zero_rows(hidden_KD: Tensor, ignored_K: Tensor) -> Tensor:
    """Return the hidden states with 0 in ignored rows: the weight's gradient is G.T @ hidden, and 0 x nan is nan."""
    return hidden_KD.masked_fill(ignored_K.unsqueeze(1), 0)
