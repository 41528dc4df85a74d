"""Store the gradients that forward takes chunk by chunk until the one backward needs them.

A per-token tensor (hidden states) has one gradient row for each of its own rows: a chunk writes its rows in place. A
parameter (the projection's weight) has one gradient for all tokens: the chunks' gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.chunks import Chunk, cover
from seqpar.core.device_facts import FACTS
from seqpar.core.token_loss import wide

PRODUCT_ROWS = 2048
"""Rows of a low-precision weight gradient that the CPU multiplies, widens and adds at a time. So few are still in a
cache when they are added (5 ms instead of 22 for 32,000 x 512 on 2 cores), and the temporary is small."""


FIRST_NUMBERS = 2**18
"""Numbers that are narrowed first, through a temporary of at most 1 MiB; every further pass narrows twice as many."""


class RowGradient:
    """The gradient of one per-token tensor, in its dtype.

    Args:
        covered: whether chunks will write all of its rows.
    """

    def __init__(self, leaf: Tensor, covered: bool = False) -> None:
        self.rows: Tensor | None = torch.empty_like(leaf) if covered else torch.zeros_like(leaf)

    def write(self, chunk: Chunk, grad: Tensor | float) -> None:
        """Store the gradient of a chunk's rows; 0 if they have none."""
        assert self.rows is not None
        if isinstance(grad, Tensor) and not isinstance(chunk, slice):
            # Indexing does not narrow; copying into a slice does, in one pass
            grad = grad.to(self.rows.dtype)
        self.rows[chunk] = grad

    def write_product(self, chunk: Chunk, a: Tensor, b: Tensor) -> None:
        """Store `a @ b`, without a copy where the chunk's rows are adjacent."""
        assert self.rows is not None
        if FACTS[a.device.type].widens_products and a.dtype != wide(a.dtype):
            # The product sums over all classes, and cuBLAS adds up parts of such a sum in the dtype of the result
            self.write(chunk, torch.mm(a, b, out_dtype=wide(a.dtype)))
        elif isinstance(chunk, slice) and self.rows.dtype == a.dtype:
            torch.mm(a, b, out=self.rows[chunk])
        else:
            self.write(chunk, a @ b)

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the gradient times `factor` (None is 1) and drop the reference to it."""
        rows = self.rows
        self.rows = None
        if rows is None or factor is None:
            return rows
        return rows.mul_(in_own_precision(factor, rows))


class SummedGradient:
    """The gradient of one parameter, summed over chunks in float32 or wider.

    Args:
        dtype: that of the parameter.
        chunks: how many chunks there will be. The gradient of a single chunk needs no sum and stays in its own dtype.
    """

    def __init__(self, dtype: torch.dtype, chunks: int) -> None:
        self.dtype = dtype
        self.chunks = chunks
        self.parts: list[Tensor] = []
        """The sum: as a whole, or as its upper and lower rows, each half in memory of its own (`narrow`)."""
        # Autograd may return one tensor as the gradient of two parameters: such a tensor must not change in place
        self.shared = False

    def add(self, grad: Tensor) -> None:
        """Add one chunk's gradient."""
        if self.chunks == 1:
            self.parts = [grad]
            self.shared = True
            return
        if not self.parts:
            dtype = _sum_dtype(grad)
            self.parts = [rows.to(dtype, copy=True) for rows in self._cut_parts(grad, dtype)]
        elif len(self.parts) == 1:
            _add_rows(self.parts[0], grad)
        else:
            for part, rows in zip(self.parts, grad.chunk(2), strict=True):
                _add_rows(part, rows)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add one chunk's gradient, `a @ b`."""
        if self.chunks == 1:
            self.parts = [torch.mm(a, b)]
            return
        cut = self._cut_parts(a, wide(a.dtype))
        sums: Sequence[Tensor | None] = self.parts or [None] * len(cut)
        self.parts = [plus_product(part, rows, b) for part, rows in zip(sums, cut, strict=True)]

    def _cut_parts(self, rows: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the rows of the parts of a sum in this dtype: halves if `narrow` will halve its numbers' size."""
        halved = rows.dim() > 1 and len(rows) > 1 and dtype.itemsize == 2 * self.dtype.itemsize
        return rows.chunk(2) if halved else [rows]

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the sum times `factor` (None is 1), in the parameter's dtype, and drop the reference to it.

        None if no chunk added a gradient.
        """
        parts = self.parts
        self.parts = []
        if not parts:
            return None
        if factor is None:
            return narrow(parts, self.dtype)
        factor = in_own_precision(factor, parts[0])
        if self.shared:
            return (parts[0] * factor).to(parts[0].dtype).to(self.dtype)
        if FACTS[factor.device.type].is_host:
            for part in parts:
                part.mul_(factor)
            return narrow(parts, self.dtype)
        return narrow(parts, self.dtype, factor)


class Gradients:
    """The stored gradients of a loss: one slot for each tensor, None where no gradient is wanted.

    Slots store `scale` times the gradient, so that small gradients do not underflow in float16.
    """

    streams: Sequence[torch.Stream] = ()
    """The streams on which gradients are released, if they are on several devices."""

    def __init__(
        self,
        per_token: Sequence[Tensor | None],
        params: Sequence[Tensor | None],
        wanted: Sequence[bool],
        chunks: Sequence[Chunk],
        scale: float | Tensor,
    ) -> None:
        rows_wanted = wanted[: len(per_token)]
        sums_wanted = wanted[len(per_token) :]
        first, *_ = [t for t in per_token if t is not None]
        covered = cover(chunks, first.size(0))
        self.per_token = [
            RowGradient(t, covered) if t is not None and w else None
            for t, w in zip(per_token, rows_wanted, strict=True)
        ]
        self.params = [
            SummedGradient(t.dtype, len(chunks)) if t is not None and w else None
            for t, w in zip(params, sums_wanted, strict=True)
        ]
        self.scale = scale
        if isinstance(scale, Tensor):
            # Without dimensions, so that it can multiply a loss on the rows' device; a copy, because a GradScaler
            # changes its tensor in place
            self.scale = scale.detach().to(first.device, copy=True).reshape(())
        self.detached_chunks = 0
        """How many chunks had a loss without a graph, such as a detached number."""

    def of(self, upstream: Tensor) -> tuple[Gradients, Tensor]:
        """Return these gradients and the factor to multiply them by, on upstream's device.

        d (factor x total) / d leaf = factor x (stored gradient / scale)
        """
        if isinstance(self.scale, Tensor):
            return self, upstream / self.scale.to(upstream.device)
        if self.scale == 1:
            return self, upstream
        return self, upstream / self.scale


def in_own_precision(factor: Tensor, grad: Tensor) -> Tensor:
    """Return the factor on the gradient's device, in a shape with which it keeps its own precision.

    An accelerator's kernel converts a number without dimensions to the gradient's dtype, in which 65,536 is inf
    (float16) and 1 / 7,000 is off by 0.1 % (bfloat16). With the gradient's number of dimensions it keeps its dtype.
    """
    factor = factor.to(grad.device)
    if FACTS[grad.device.type].is_host:
        return factor
    return factor.reshape((1,) * grad.dim())


def narrow(parts: Sequence[Tensor], dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """Return `(torch.cat(parts) * factor).to(dtype)`; two halves are narrowed into the memory of the first.

    The first is converted from front to back and then has room for the second, whose memory is free afterwards. So a
    float32 sum and its bfloat16 gradient never exist at the same time, and the gradient holds no more memory than its
    numbers. A factor (None is 1) is multiplied in the same pass, for which a CPU would need a temporary.
    """
    if len(parts) == 1:
        (whole,) = parts
        return (whole if factor is None else whole.mul_(factor)).to(dtype)
    first_N, second_N = (part.flatten() for part in parts)
    narrow_N = first_N.view(dtype)[: len(first_N) + len(second_N)]
    done = min(max(parts[0].size(-1), FIRST_NUMBERS), len(first_N))
    _narrow(first_N[:done].clone(), factor, narrow_N[:done])
    # Number i of four bytes moves from byte 4i to byte 2i. Numbers [done, 2 done) are read at bytes 4 done and above
    # and written below, over numbers that have been converted already. So each pass can convert twice as many
    while done < len(first_N):
        following = slice(done, min(2 * done, len(first_N)))
        _narrow(first_N[following], factor, narrow_N[following])
        done *= 2
    _narrow(second_N, factor, narrow_N[len(first_N) :])
    return narrow_N.view(sum(map(len, parts)), *parts[0].shape[1:])


def _narrow(wide_N: Tensor, factor: Tensor | None, out_N: Tensor) -> None:
    """Write numbers times a factor (None is 1) into memory of another dtype."""
    if factor is None:
        out_N.copy_(wide_N)
    else:
        torch.mul(wide_N, factor.flatten(), out=out_N)


def _sum_dtype(grad: Tensor) -> torch.dtype:
    """Return the dtype that the chunks' gradients are summed in.

    Vectors, such as a bias, are summed in float64 at hardly any cost: the plain gradient is a single careful reduction,
    whose accuracy a running float32 sum does not reach.
    """
    if grad.dim() < 2 and FACTS[grad.device.type].has_float64:
        return torch.promote_types(grad.dtype, torch.float64)
    return wide(grad.dtype)


def _add_rows(total: Tensor, grad: Tensor) -> None:
    """Add `grad` to `total` in place, in blocks of rows where that is faster."""
    if grad.dim() < 2 or grad.dtype == total.dtype or FACTS[grad.device.type].adds_wider_at_once:
        total.add_(grad)
        return
    for sum_rows, grad_rows in zip(total.split(PRODUCT_ROWS), grad.split(PRODUCT_ROWS), strict=True):
        sum_rows.add_(grad_rows.to(sum_rows.dtype))


def plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total + a @ b` in float32 or wider, in as few passes over the sum as the device allows; None is 0.

    A sum that is given is overwritten.
    """
    dtype = wide(a.dtype)
    # addmm adds within the product: no second pass over the sum, and no temporary of its size
    if dtype == a.dtype:
        return torch.mm(a, b) if total is None else torch.addmm(total, a, b, out=total)
    if FACTS[a.device.type].widens_products:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    if total is None:
        total = a.new_zeros((a.size(0), b.size(1)), dtype=dtype)
    if FACTS[a.device.type].adds_wider_at_once:
        return total.add_(torch.mm(a, b))
    for sum_rows, a_rows in zip(total.split(PRODUCT_ROWS), a.split(PRODUCT_ROWS), strict=True):
        sum_rows.add_(torch.mm(a_rows, b).to(dtype))
    return total
