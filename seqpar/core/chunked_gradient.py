"""One autograd node that computes a loss chunk by chunk and stores gradients instead of logits.

    before:    for each chunk c:  l_c = the chunk's summed loss;  store the gradient of l_c
    forward:   return sum_c l_c
    backward:  return upstream factor x stored gradient, for the hidden states and for each parameter

Every loss goes through this node as a `Walk` over its chunks, usually `sum_over_chunks` with a `ChunkLoss`, which
computes one chunk's loss and stores its gradient. `AutogradChunkLoss` in this file calls autograd, for any generator
and criterion; the closed forms of `seqpar.linear` compute the gradient themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.core.checks import (
    check_type,
    refuse_second_backward,
    refuse_second_derivative,
    refuse_transforms,
    refuse_unknown_leaves,
)
from seqpar.core.chunks import Chunk, note_rows
from seqpar.core.device_facts import select_streams
from seqpar.core.graphs import graph_of_its_own, is_asked_for
from seqpar.core.stored_gradients import Gradients
from seqpar.core.token_loss import TokenLoss, sum_of_parts, wide

ChunkTensors = tuple[Tensor | None, ...]
"""One chunk's rows of each per-token tensor; None for a tensor that was not given."""

THIS, INSTEAD = "the chunked loss", "the plain, un-chunked loss"
"""For errors: what refuses a second derivative, and what has one."""

UNREGISTERED = (
    "and is neither a registered parameter nor a per-token argument; register it, or pass it as a keyword (a forward "
    "that was set on the instance keeps the original's parameters: change the class instead)"
)

DETACHED = (
    "the loss does not require grad, though hidden or a parameter does: something was detached in the criterion "
    "(.detach(), torch.tensor(...)) or in the generator (torch.no_grad())"
)

PerChunk = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Chunk], TokenLoss]
"""(params, this chunk's rows of each per-token tensor, the chunk) -> the chunk's summed loss."""


class ChunkLoss(Protocol):
    """One chunk's loss, with its gradient.

    Called under `no_grad`, on detached rows. Unless `gradients` is None, in which case none is wanted, it stores the
    gradient of the summed loss, times `gradients.scale`, in the slots that are not None.
    """

    def __call__(self, rows: ChunkTensors, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed loss."""


Walk = Callable[[Sequence[Chunk], Any, Gradients | None], TokenLoss]
"""(chunks, leaves, gradients) -> the summed loss; such as `sum_over_chunks` with its first argument bound."""


class Leaves(NamedTuple):
    """The tensors that gradients flow into; None stands for one that was not given."""

    of_tokens: Sequence[Tensor | None]
    """Tensors with one row per token, hidden first."""
    params: Sequence[Tensor | None]
    """All others."""
    empty: TokenLoss | None
    """The loss of no tokens, to which the chunks' losses are added; None if those show which sums there are."""


def differentiable_sum(
    walk: Walk,
    chunks: Sequence[Chunk],
    leaves: Leaves,
    loss_scale: float | Tensor,
) -> TokenLoss:
    """Return the loss of a walk over the chunks as one node of autograd's graph.

    Arguments and errors are those of `chunked_gradient`, but nothing is checked: the chunks must not overlap, and those
    of `cut_rows` and `cut_time` never do.
    """
    per_token = leaves.of_tokens
    params = leaves.params
    tensors = (*per_token, *params)
    refuse_transforms(tensors)
    grad_enabled = torch.is_grad_enabled()
    wanted = [grad_enabled and t is not None and t.requires_grad for t in tensors]
    gradients = None
    # The chunks leave no graph behind: the node below, whose output is the sum, stands in for all of theirs
    with torch.no_grad():
        if any(wanted):
            gradients = Gradients(per_token, params, wanted, chunks, loss_scale)
        loss = walk(chunks, leaves, gradients)
    if gradients is None:
        return loss
    return TokenLoss(*StoredGradient.apply(gradients, loss, len(chunks), *tensors))


def sum_over_chunks(
    chunk_loss: ChunkLoss,
    chunks: Sequence[Chunk],
    leaves: Leaves,
    gradients: Gradients | None,
) -> TokenLoss:
    """Return the loss of all chunks; store its gradients in `gradients` unless that is None. Call under `no_grad`."""
    losses = [] if leaves.empty is None else [leaves.empty]
    per_token = leaves.of_tokens
    for chunk in chunks:
        # (K, ...) of each (N, ...): a view if the chunk is a slice, else a copy
        rows = tuple([t if t is None else t.detach()[chunk] for t in per_token])
        try:
            losses.append(chunk_loss(rows, chunk, gradients))
        except Exception as error:
            note_rows(error, chunk)
            raise
    return sum_of_parts(losses)


class StoredGradient(torch.autograd.Function):
    """The node: forward returns a loss whose gradients are stored already, backward scales and returns them."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Gradients, loss: TokenLoss, chunks: int, *leaves: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.gradients = gradients
        ctx.handed_out = set()
        ctx.any_chunks = chunks > 0
        ctx.is_detached = is_detached(gradients.detached_chunks, chunks, loss.total)
        ctx.leaves = len(leaves)
        # Only these have an entry in `next_functions`
        ctx.given = [i for i, t in enumerate(leaves) if t is not None]
        # For zeros, if there are no chunks that store gradients
        ctx.shapes = {}
        for i, leaf in enumerate(() if chunks else leaves):
            if leaf is not None and leaf.requires_grad:
                ctx.shapes[i] = _Shape(leaf.shape, leaf.dtype, leaf.device)
        # Counts and `nll` are reported, never differentiated
        ctx.mark_non_differentiable(*[t for t in loss[1:] if t is not None])
        # An unused output's gradient arrives as None, not as zeros that would cost memory
        ctx.set_materialize_grads(False)
        return tuple(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms((upstream,))
        refuse_second_derivative(THIS, INSTEAD)
        # Forward's first three arguments are not tensors and have no gradient
        constants = (None,) * 3
        # In the order of forward's leaves
        grads: list[Tensor | None] = [None] * ctx.leaves
        asked = {i for i, (node, _) in zip(ctx.given, ctx.next_functions, strict=True) if is_asked_for(node)}
        # A zero-bubble pipeline asks for hidden's gradient first, and for the parameters' in a second backward. Each is
        # scaled and handed out once, and nothing is recomputed
        refuse_second_backward(not asked.isdisjoint(ctx.handed_out), THIS)
        ctx.handed_out |= asked
        if upstream is None:
            return *constants, *grads
        if ctx.is_detached:
            raise RuntimeError(DETACHED)
        if not ctx.any_chunks:
            # Not 0 x upstream: with no tokens the caller may have divided by 0
            for i, shape in ctx.shapes.items():
                grads[i] = shape.zeros()
            return *constants, *grads
        gradients, factor = ctx.gradients.of(upstream)
        slots = (*gradients.per_token, *gradients.params)
        with select_streams(gradients.streams):
            for i in sorted(asked):
                # Each slot holds the only reference to its gradient, and frees it before the next one is scaled
                if (slot := slots[i]) is not None:
                    grads[i] = slot.release(factor)
        return *constants, *grads


def is_detached(detached_chunks: int, chunks: int, total: Tensor) -> bool:
    """Return whether no chunk's loss required a gradient although it is not 0: a 0 may be a sum of nothing."""
    return 0 < detached_chunks == chunks and bool(total != 0)


def leaf_copies(params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return detached copies where each chunk's graph ends, so that no hook of a parameter fires once per chunk."""
    grad_enabled = torch.is_grad_enabled()
    return tuple([p.detach().requires_grad_(grad_enabled and p.requires_grad) for p in params])


class AutogradChunkLoss:
    """A chunk's loss by any function of tensors, with autograd's gradient; each chunk's graph is freed immediately.

    Args:
        function: `(params, rows, chunk) -> TokenLoss`, the chunk's summed loss.
        params: the leaves of its graph besides the rows; those that require a gradient get one.
    """

    def __init__(self, function: PerChunk, params: Sequence[Tensor]) -> None:
        self.function = function
        self.params = tuple(params)

    def __call__(self, rows: ChunkTensors, chunk: Chunk, gradients: Gradients | None) -> TokenLoss:
        """Return the chunk's summed loss; store its gradient in `gradients` unless that is None."""
        given = tuple(t for t in rows if t is not None)
        if gradients is None:
            return check_token_loss(self.function(self.params, given, chunk))
        # The rows are detached, so they are leaves of this chunk's graph, and so are the parameters
        for t, slot in zip(given, gradients.per_token, strict=True):
            t.requires_grad_(slot is not None)
        leaves = (*given, *self.params)
        # `differentiable_sum` runs under no_grad
        with torch.enable_grad(), graph_of_its_own():
            # Copies, because a generator may change its input in place, and autograd forbids that for a leaf
            own = tuple(t.clone() if t.requires_grad else t for t in given)
            loss = check_token_loss(self.function(self.params, own, chunk))
        # In every chunk, because the first may have no token for an expert that is in a plain list
        refuse_unknown_leaves(loss.total, leaves, "the generator or criterion used", UNREGISTERED)
        gradients.detached_chunks += not loss.total.requires_grad
        grads = _gradients(loss.total, leaves, gradients.scale)
        # `grads` is in the order of `leaves`: first the rows, then the parameters
        for slot, grad in zip(gradients.per_token, grads[: len(given)], strict=True):
            if slot is not None:
                slot.write(chunk, 0 if grad is None else grad)
        for param_slot, grad in zip(gradients.params, grads[len(given) :], strict=True):
            if param_slot is not None and grad is not None:
                param_slot.add(grad)
        # Detached, because its graph would keep this chunk's logits alive
        return loss.detach()


def check_token_loss(loss: TokenLoss) -> TokenLoss:
    """Return the loss with a 0-dimensional total in float32 or wider; raise unless it is a TokenLoss of one number."""
    check_type(loss, "per_chunk", TokenLoss, "a TokenLoss of sums", verb="returned")
    total = loss.total
    # A tangent may come from a weight or a factor that is not among the arguments
    refuse_transforms((total,))
    if total.numel() != 1 or total.is_complex():
        returned = f"shape {tuple(total.shape)} in {total.dtype}"
        raise ValueError(f"the criterion returned {returned}; it must return one real number, the sum")
    if total.dim():
        total = total.reshape(())
    return loss._replace(total=total.to(wide(total.dtype)))


def _gradients(total: Tensor, leaves: tuple[Tensor, ...], scale: float | Tensor) -> list[Tensor | None]:
    """Return the gradient of `scale x total` with respect to each leaf; None for a leaf that requires none."""
    if not total.requires_grad:
        return [None] * len(leaves)
    wanted = [t for t in leaves if t.requires_grad]
    # d (scale x total) / d leaf: the scale enters at the top, before a small number can underflow
    upstream = None
    if isinstance(scale, Tensor) or scale != 1:
        upstream = torch.ones_like(total) * scale
    # A parameter need not take part in every chunk, such as an expert to which none of the chunk's tokens was sent
    grads = iter(torch.autograd.grad(total, wanted, upstream, allow_unused=True))
    return [next(grads) if t.requires_grad else None for t in leaves]


class _Shape(NamedTuple):
    """The shape, dtype and device of a leaf, stored instead of the leaf so that its memory can be freed."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """Return a gradient of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
