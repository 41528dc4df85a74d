"""Compute a projection's cross-entropy in as little memory as its gradients leave: four products instead of three.

    forward:    for each chunk of rows, one product, from which a few sums of each row are kept
    backward:   for each tile of the vocabulary with all rows, that product again and two more (`VocabTiles`)

There is no float32 sum of the weight's gradient, and the gradient's factor is known when it is computed, so that it is
rounded only once, or added into a tensor of the caller's.

Shape suffixes: N rows (batch x time), M rows that are in a chunk, P = 1 picked class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.core.checks import check_choice, check_like, check_type, refuse_second_derivative
from seqpar.core.chunks import CPU_BUDGET, Chunk, cover
from seqpar.core.device_facts import is_on_host
from seqpar.core.graphs import is_asked_for
from seqpar.core.token_loss import TokenLoss, wide
from seqpar.linear.inputs import Checked, Inputs, PreparedCall, Settings, prepare, weights_of_classes
from seqpar.linear.projection import ByLeaf
from seqpar.linear.recomputed_scores import RecomputedScores, VocabTiles, join, spread_rows
from seqpar.rows.scores import RowFunction, Sums
from seqpar.rows.smoothing import CrossEntropyOfScores, RowLosses

LEAST_BUDGET = 128 * 2**20
"""Bytes of a chunk's or tile's logits on an accelerator: enough for products of 512 rows or of 8,192 classes."""


def check_memory(memory: object, weight_grad: object, soft_target: object, inputs: Inputs) -> None:
    """Raise unless `memory` and `weight_grad` are as `linear_cross_entropy` requires."""
    if memory is not None:
        check_choice(memory, "memory", ("least",))
    if soft_target is not None:
        raise ValueError("memory='least' is given with soft_target, whose loss has no such way: leave out memory")
    if weight_grad is None:
        return
    if memory is None:
        raise ValueError(
            "weight_grad is given without memory='least', which alone knows the gradient's factor when it adds it"
        )
    weight_grad = check_type(weight_grad, "weight_grad", Tensor, "a tensor of weight's shape, or None")
    check_like(weight_grad, "weight_grad", weight=inputs.weight)
    if weight_grad.dtype != wide(inputs.weight.dtype) or weight_grad.requires_grad:
        found = f"has dtype {weight_grad.dtype}" if not weight_grad.requires_grad else "requires a gradient itself"
        raise TypeError(f"weight_grad {found}; it must be a plain tensor of {wide(inputs.weight.dtype)}, a sum")
    if torch.is_grad_enabled() and not inputs.weight.requires_grad:
        raise ValueError("weight_grad is given, but weight requires no gradient: leave out one or the other")


def least_memory(inputs: Inputs, settings: Settings, given: Checked, weight_grad: Tensor | None) -> TokenLoss:
    """Return the loss, given arguments that have been checked."""
    if settings.chunk_tokens is None:
        row_bytes = max(1, given.shard.largest_even_part * wide(inputs.hidden.dtype).itemsize)
        settings = settings._replace(chunk_tokens=max(1, _budget(inputs.hidden) // row_bytes))
    call = _Call(prepare(inputs, settings, given), given, weight_grad)
    leaves = call.leaves
    tensors = (leaves.hidden, leaves.weight, leaves.bias, leaves.token_weight)
    return TokenLoss(*_LeastMemory.apply(call, *tensors))


def _budget(hidden: Tensor) -> int:
    """Return the bytes of a chunk's or a tile's logits on hidden's kind of device."""
    return CPU_BUDGET if is_on_host(hidden) else LEAST_BUDGET


class _Call:
    """One call, and the function that computes the sums of its rows."""

    def __init__(self, call: PreparedCall, given: Checked, weight_grad: Tensor | None) -> None:
        self.leaves, self.chunks, projection, target_N, split, ignored = call
        self.vocab_size = given.shard.vocab_size
        self.weight_grad = weight_grad
        counted_N = None if ignored is None else target_N != ignored
        self.which = _all_of(self.chunks, len(target_N))
        dtype = wide(projection.weight_VD.dtype)
        if given.class_weight is not None:
            # A copy, because backward reads it again, and the caller may change the original in between
            given = given._replace(class_weight=given.class_weight.clone())
        weights, gold_weight_N = weights_of_classes(given, target_N, split, dtype)
        self.loss = CrossEntropyOfScores(given.q, weights)
        self.gold_weight_M = [] if gold_weight_N is None else [gold_weight_N[self.which]]
        self.counted_M = None if counted_N is None else counted_N[self.which]
        # A copy for the same reason
        picked_N = target_N.clone() if counted_N is None else target_N.where(counted_N, 0)
        projection.ask_for(RowFunction(weights=weights, correct=True, split=split))
        self.formula = RecomputedScores(projection, picked_N.unsqueeze(1), None, counted_N)

    def losses(self, hidden_ND: Tensor) -> tuple[RowLosses, Sums, TokenLoss]:
        """Return the loss of each row, what backward needs, and their sums without token weights."""
        parts = [self.formula.sums(hidden_ND[chunk], chunk) for chunk in self.chunks]
        self.formula.projection.buffers.clear()
        sums = join(parts)
        scores = self.formula.projection.function.scores(sums)
        found = self.loss(scores, self.gold_weight_M, True)
        assert sums.correct_N is not None
        columns = (found.loss_N, -scores.log_prob, sums.correct_N)
        tokens = torch.full((), len(found.loss_N), device=hidden_ND.device)
        if self.counted_M is not None:
            columns = tuple(t.where(self.counted_M, torch.zeros_like(t)) for t in columns)  # type: ignore[assignment]
            tokens = self.counted_M.sum()
        loss_M, nll_M, correct_M = columns
        return found._replace(loss_N=loss_M), sums, TokenLoss(loss_M, tokens, nll_M.sum(), correct_M.sum())


def _all_of(chunks: Sequence[Chunk], rows: int) -> Chunk:
    """Return the rows of all chunks together."""
    indices = [chunk for chunk in chunks if isinstance(chunk, Tensor)]
    return torch.cat(indices) if indices else slice(0, rows if cover(chunks, rows) else 0)


class _LeastMemory(torch.autograd.Function):
    """The autograd node, which saves a few numbers per row. Its outputs are the fields of `TokenLoss`."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None, token_weight_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.found = None
        # Only these have a node before this one
        ctx.given = [i for i, t in enumerate((hidden_ND, weight, bias, token_weight_N)) if t is not None]
        ctx.save_for_backward(hidden_ND, weight, bias, token_weight_N)
        if not call.chunks:
            loss = TokenLoss.zero(call.formula.projection.weight_VD.dtype, hidden_ND.device, tells=True)
        else:
            losses, sums, loss = call.losses(hidden_ND)
            # Backward needs neither the picked logits nor whether predictions are correct
            ctx.found = losses, sums._replace(picked_NP=sums.picked_NP[:, :0], correct_N=None)
            total_M = loss.total
            if token_weight_N is not None:
                total_M = total_M * token_weight_N[call.which]
            loss = loss._replace(total=total_M.sum())
        ctx.mark_non_differentiable(*[t for t in loss[1:] if t is not None])
        return tuple(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy with memory='least'", "the plain, un-chunked loss")
        call: _Call = ctx.call
        hidden_ND, weight, bias, token_weight_N = ctx.saved_tensors
        # By this backward, which may be for hidden only: the weight's gradient must not be added twice
        asked = {i for i, (node, _) in zip(ctx.given, ctx.next_functions, strict=True) if is_asked_for(node)}
        wanted = ByLeaf(0 in asked, 1 in asked, 2 in asked, 3 in asked)
        if upstream is None:
            return None, None, None, None, None
        if ctx.found is None:
            own = (wanted.hidden, wanted.weight and call.weight_grad is None, wanted.bias, wanted.token_weight)
            zeros = zip(ctx.saved_tensors, own, strict=True)
            return None, *(torch.zeros_like(t) if is_wanted else None for t, is_wanted in zeros)
        losses, sums = ctx.found
        token_weight = None
        factor = upstream
        if token_weight_N is not None:
            factor = upstream * token_weight_N[call.which]
            token_weight = spread_rows(losses.loss_N * upstream, call.which, token_weight_N)
        tiles = VocabTiles(call.formula, call.vocab_size, _budget(hidden_ND))
        leaves = ByLeaf(hidden_ND, weight, bias)
        factors = losses.upstream.times(factor, call.counted_M)
        found = tiles.gradients(leaves, call.which, sums, factors, wanted, call.weight_grad)
        return None, found.hidden, found.weight, found.bias, token_weight if wanted.token_weight else None
