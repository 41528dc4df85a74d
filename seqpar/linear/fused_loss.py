"""Sum a projection's cross-entropy over chunks, with one Triton kernel that computes a row's loss and its gradient.

Each chunk of rows takes a product, the kernel, which overwrites the product with its gradient G, and two products of G,

    d hidden = G @ weight,   d [weight, bias] = G.T @ [hidden, 1]

so that the bias's gradient is a column next to the weight's and G need not be read again for it. Meanwhile nothing is
read from the device.

Shape suffixes: N rows, K rows of one chunk, D hidden, V vocabulary, R rows of numbers about rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Leaves
from seqpar.core.chunks import Chunk, rows_in
from seqpar.core.graphs import without_autocast
from seqpar.core.stored_gradients import Gradients, RowGradient, SummedGradient, in_own_precision, plus_product
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.kernels.row_kernel import align
from seqpar.kernels.row_loss import RowLoss, count_targets, scale_rows
from seqpar.linear.projection import Projection, zero_rows
from seqpar.rows.smoothing import SoftTarget

COUNTED = 2**24
"""Up to this number float32 counts exactly."""

SPARE = 2**27
"""How many numbers of a weight's gradient backward may write into memory besides the float32 sum: at most 256 MiB, half
of what the logits of a chunk took, which are freed by then. A larger sum is overwritten with its gradient, as in
`narrowed`, and has no extra column: rereading the logits takes only 1 to 5 % of the products' time at such a width."""

BESIDE = 8
"""Columns of ones next to the hidden states: one would do, but eight keep rows at multiples of 16 bytes."""


class FusedLoss:
    """The cross-entropy of all rows, whose gradients are stored.

    Args:
        q: the target distribution.
        weight_V: the class weights, in float32 or wider; None if all are 1.
        weight_sum: W, their sum over the classes that have a share of the smoothing; None without smoothing.
        target_N: the classes of all rows.
        count: how many of them are not ignored, on the device; None counts them here.
        ignore_index: the ignored target.
        in_chunks: whether chunks contain ignored rows.
    """

    def __init__(
        self,
        projection: Projection,
        q: SoftTarget,
        weight_V: Tensor | None,
        weight_sum: float | Tensor | None,
        target_N: Tensor,
        count: Tensor | None,
        ignore_index: int,
        in_chunks: bool,
    ) -> None:
        self.projection = projection
        self.target_N = target_N.contiguous()
        self.count = count
        self.ignore_index = ignore_index
        self.ignored = ignore_index if in_chunks else None
        capped = (projection.softcap, projection.temperature)
        self.kernel = RowLoss(q, weight_V, weight_sum, self.ignored, projection.bias_V, *capped)

    def __call__(self, chunks: Sequence[Chunk], leaves: Leaves, gradients: Gradients | None) -> TokenLoss:
        """Return the summed loss; store its gradients in `gradients` unless that is None."""
        count = self.count
        if count is None:
            # They are known to be classes, or are not checked at all
            count = count_targets(self.target_N, 2**62, self.ignore_index)
        dtype = wide(self.projection.weight_VD.dtype)
        token_weight_N = None
        hidden_ND, given_weight_N = leaves.of_tokens
        assert hidden_ND is not None
        if given_weight_N is not None:
            token_weight_N = given_weight_N.to(dtype).contiguous()
        rows = sum(map(rows_in, chunks))
        out_RN = self.target_N.new_empty((3 if token_weight_N is None else 4, rows), dtype=dtype)
        with without_autocast(out_RN.device.type):
            self._walk(chunks, hidden_ND, token_weight_N, out_RN, gradients)
        sums = out_RN.sum(1) if rows <= COUNTED else out_RN.double().sum(1)
        total, nll, correct, *_ = sums.unbind()
        return TokenLoss(total.to(dtype), count, nll.to(dtype), correct.long())

    def _walk(
        self,
        chunks: Sequence[Chunk],
        hidden_ND: Tensor,
        token_weight_N: Tensor | None,
        out_RN: Tensor,
        gradients: Gradients | None,
    ) -> None:
        """Write the numbers of each row, chunk by chunk, and store the gradients."""
        weight_VD = self.projection.weight_VD
        weight_DV = weight_VD.t()
        most = max(map(rows_in, chunks), default=0)
        product_KV = self._product_memory(most)
        scale = None if gradients is None else _on_device(gradients.scale, out_RN)
        stored = None
        place = 0
        for chunk in chunks:
            rows = rows_in(chunk)
            hidden_KD = hidden_ND[chunk].to(weight_VD.dtype)
            target, token_weight, first = self.target_N, token_weight_N, 0
            if isinstance(chunk, slice):
                first = chunk.start
            else:
                target = target[chunk]
                token_weight = None if token_weight is None else token_weight[chunk]
            if self.ignored is not None:
                hidden_KD = zero_rows(hidden_KD, target[first : first + rows] == self.ignored)
            own_KV = None if product_KV is None else product_KV[:rows]
            grad_KV = torch.mm(hidden_KD, weight_DV, out=own_KV)
            if gradients is not None and stored is None:
                # Only now, while the device is busy with the first product
                stored = _Stored(gradients, weight_VD, len(chunks), most)
            self.kernel(grad_KV, target, token_weight, first, scale, out_RN, place, stored is not None)
            if stored is not None:
                stored.add(chunk, grad_KV, hidden_KD, out_RN, place)
            # Before the next product allocates memory, which may then be this
            del grad_KV
            place += rows

    def _product_memory(self, most: int) -> Tensor | None:
        """Return memory in which each row of a product is aligned; None if rows are aligned anyway."""
        weight_VD = self.projection.weight_VD
        classes = weight_VD.size(0)
        if align(classes) == classes:
            return None
        return weight_VD.new_empty((most, align(classes)))[:, :classes]


class _Stored:
    """The gradients of all leaves, chunk by chunk, in the slots of `gradients`.

    Args:
        chunks: the number of chunks.
        most: the number of rows in the largest chunk.
    """

    def __init__(self, gradients: Gradients, weight_VD: Tensor, chunks: int, most: int) -> None:
        self.weight_VD = weight_VD
        self.scale = gradients.scale
        self.hidden, self.token_weight = gradients.per_token
        self.weight, self.bias = gradients.params
        self.ones_KB: Tensor | None = None
        if self.hidden is not None:
            self.hidden = gradients.per_token[0] = _HiddenGradient(self.hidden)
        if self.weight is None:
            return
        if chunks > 1 and weight_VD.numel() > SPARE:
            return
        self.weight = whole = _WeightGradient(self.weight, weight_VD.size(1))
        gradients.params[0] = whole
        # A single chunk's gradient is copied once to drop the column; the copy may be as large as its logits were
        has_room = chunks > 1 or (most >= whole.width and weight_VD.numel() <= SPARE)
        if self.bias is not None and wide(weight_VD.dtype) != weight_VD.dtype and has_room:
            self.ones_KB = weight_VD.new_ones((most, BESIDE))
            gradients.params[1] = whole.beside = _ColumnGradient(self.bias, whole)
            self.bias = None

    def add(self, chunk: Chunk, grad_KV: Tensor, hidden_KD: Tensor, out_RN: Tensor, place: int) -> None:
        """Store a chunk's gradients, given the gradient of its product."""
        rows = grad_KV.size(0)
        if self.hidden is not None:
            self.hidden.write_product(chunk, grad_KV, self.weight_VD)
        if self.ones_KB is not None:
            ones_KB = self.ones_KB if rows == self.ones_KB.size(0) else self.ones_KB[:rows]
            hidden_KD = torch.cat([hidden_KD, ones_KB], 1)
        if self.weight is not None:
            self.weight.add_product(grad_KV.t(), hidden_KD)
        if self.bias is not None:
            self.bias.add(grad_KV.sum(0, dtype=wide(grad_KV.dtype)))
        if self.token_weight is not None:
            # total = sum_i a_i loss_i, so d total / d a_i = loss_i
            self.token_weight.write(chunk, out_RN[3, place : place + rows] * self.scale)


class _HiddenGradient(RowGradient):
    """The gradient of the hidden states, which one kernel scales."""

    def __init__(self, slot: RowGradient) -> None:
        self.rows = slot.rows

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the gradient times `factor` (None is 1) and drop the reference to it."""
        rows = self.rows
        self.rows = None
        if rows is not None and factor is not None:
            scale_rows(rows, factor, rows)
        return rows


class _WeightGradient(SummedGradient):
    """The weight's gradient, with the bias's in an extra column if there is a `beside` to receive that."""

    def __init__(self, slot: SummedGradient, width: int) -> None:
        super().__init__(slot.dtype, slot.chunks)
        self.width = width
        self.beside: _ColumnGradient | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add one chunk's gradient, `a @ b`."""
        if self.chunks == 1:
            self.parts = [torch.mm(a, b)]
        else:
            self.parts = [plus_product(self.parts[0] if self.parts else None, a, b)]

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the sum times `factor` (None is 1) in the weight's dtype, and drop the reference to it."""
        if not self.parts:
            return None
        (total,) = self.parts
        self.parts = []
        if self.beside is None and total.dtype == self.dtype:
            if factor is not None:
                scale_rows(total, factor, total)
            return total
        found = total.new_empty((total.size(0), self.width), dtype=self.dtype)
        bias_V = None
        if self.beside is not None:
            bias_V = total.new_empty(total.size(0), dtype=self.beside.dtype)
            self.beside.parts = [bias_V]
            self.beside.factor = factor
        scale_rows(total, factor, found, bias_V)
        return found


class _ColumnGradient(SummedGradient):
    """The bias's gradient, which is summed in a column next to the weight's."""

    def __init__(self, slot: SummedGradient, weight: _WeightGradient) -> None:
        super().__init__(slot.dtype, slot.chunks)
        self.weight = weight
        self.factor: Tensor | None = None

    def release(self, factor: Tensor | None) -> Tensor | None:
        """Return the gradient times `factor` (None is 1) in the bias's dtype, and drop the reference to it."""
        if not self.parts and self.weight.parts:
            # The weight's gradient is not asked for, or only later
            column_V = self.weight.parts[0][:, self.weight.width]
            return (column_V if factor is None else column_V * in_own_precision(factor, column_V)).to(self.dtype)
        if not self.parts:
            return None
        (found,) = self.parts
        self.parts = []
        if factor is self.factor or factor is None or self.factor is None:
            return found
        # An earlier backward, with its own factor, asked for the weight's gradient
        ratio = (factor / self.factor).where(factor != self.factor, 1.0)
        return (found * in_own_precision(ratio, found)).to(self.dtype)


def _on_device(scale: float | Tensor, like: Tensor) -> Tensor | None:
    """Return the scale for a kernel; None for 1."""
    if isinstance(scale, (int, float)) and scale == 1:
        return None
    return torch.as_tensor(scale, dtype=like.dtype, device=like.device)
