"""Name the tensors of a projection that gradients flow into, and sum a loss over chunks with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.chunked_gradient import Walk
from seqpar.core.chunks import Chunk
from seqpar.core.stored_gradients import Gradients, RowGradient, SummedGradient
from seqpar.core.token_loss import TokenLoss


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on and casts such a tensor, else hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class LinearLeaves(NamedTuple):
    """The tensors that gradients flow into; all but weight and bias have one row for each token."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None
    per_token: tuple[Tensor, ...] = ()
    """What the loss of a row takes beside its scores."""

    @property
    def of_tokens(self) -> tuple[Tensor | None, ...]:
        """Return those with one row for each token, in the order of `LinearSlots.of`."""
        return (self.hidden, self.token_weight, *self.per_token)

    @property
    def params(self) -> tuple[Tensor | None, ...]:
        """Return the others, in that order."""
        return (self.weight, self.bias)

    def first(self, chunks: int) -> Sequence[TokenLoss]:
        """Return the loss of no tokens if there are no chunks; a chunk of a projection has every field."""
        return [] if chunks else [TokenLoss.zero(product_dtype(self.hidden), self.hidden.device, tells=True)]


class LinearSlots(NamedTuple):
    """The slot in which each leaf's gradient times `scale` is stored; None where no gradient is wanted."""

    hidden: RowGradient | None
    weight: SummedGradient | None
    bias: SummedGradient | None
    token_weight: RowGradient | None
    per_token: tuple[RowGradient | None, ...]
    scale: float | Tensor

    @classmethod
    def of(cls, gradients: Gradients) -> LinearSlots:
        """Return the slots by name, in the order of `LinearLeaves`."""
        hidden, token_weight, *per_token = gradients.per_token
        weight, bias = gradients.params
        return cls(hidden, weight, bias, token_weight, tuple(per_token), gradients.scale)


class LinearWanted(NamedTuple):
    """Which leaves want a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    token_weight: bool = False


class LinearGradients(NamedTuple):
    """The gradient of each leaf; None where it was not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    token_weight: Tensor | None


def loss_and_gradients(
    walk: Walk,
    chunks: Sequence[Chunk],
    leaves: LinearLeaves,
    wanted: LinearWanted,
    scale: float | Tensor = 1.0,
) -> tuple[TokenLoss, LinearGradients]:
    """Return the summed loss of all chunks and its gradients times `scale`, outside autograd."""
    constants = (False,) * len(leaves.per_token)
    wanted_in_order = (wanted.hidden, wanted.token_weight, *constants, wanted.weight, wanted.bias)
    gradients = Gradients(leaves.of_tokens, leaves.params, wanted_in_order, chunks, scale)
    stored = gradients if any(wanted) else None
    loss = walk(chunks, leaves, stored)
    slots = LinearSlots.of(gradients)
    return loss, LinearGradients(
        hidden=_released(slots.hidden, leaves.hidden),
        weight=_released(slots.weight, leaves.weight),
        bias=_released(slots.bias, leaves.bias),
        token_weight=_released(slots.token_weight, leaves.token_weight),
    )


def _released(slot: RowGradient | SummedGradient | None, leaf: Tensor | None) -> Tensor | None:
    """Return the gradient stored in a slot: zeros if no chunk has written to it."""
    if slot is None or leaf is None:
        return None
    grad = slot.release(None)
    if grad is None:
        return torch.zeros_like(leaf)
    return grad
