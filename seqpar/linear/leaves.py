"""Name the tensors of a projection that gradients flow into, and sum a loss over chunks with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Leaves, Walk
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients, RowGradient, SummedGradient
from seqpar.core.token_loss import TokenLoss


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on and casts hidden's dtype, else hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


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
