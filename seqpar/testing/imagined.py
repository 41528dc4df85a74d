"""Compute the plain loss with a common mistake in it, to recognise that mistake in another loss's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from seqpar.testing.gradients import plain_loss

Mistake = Callable[..., Tensor]
"""`mistake(generator, criterion, hidden, target, **per_token)` returns a summed loss."""


def shifts() -> Iterator[tuple[str, Mistake]]:
    """Yield the ways to shift the targets, as a sentence and the plain loss with the mistake."""
    yield "targets shifted by one: each token is held against the next one's target", partial(_shift, first=1)
    yield "targets shifted by one: each token is held against the target before it", partial(_shift, first=-1)
    rolled = "targets shifted by one, and those of the end are at the beginning"
    yield rolled, partial(_roll, by=-1)
    yield "targets shifted by one, and those of the beginning are at the end", partial(_roll, by=1)


def with_criterion(
    generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, *, other: nn.Module, **per_token: Any
) -> Tensor:
    """Return the plain loss with a different criterion."""
    return plain_loss(generator, other, hidden, target, **per_token)


def _roll(
    generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, *, by: int, **per_token: Any
) -> Tensor:
    """Return the plain loss against targets that are rolled over time."""
    return plain_loss(generator, criterion, hidden, target.roll(by, -1), **per_token)


def _shift(
    generator: nn.Module, criterion: nn.Module, hidden: Tensor, target: Tensor, *, first: int, **per_token: Any
) -> Tensor:
    """Return the plain loss of all tokens that have a target `first` steps further on."""
    dim = target.dim() - 1
    steps = target.size(dim) - 1
    here, there = (0, 1) if first > 0 else (1, 0)
    extra = {name: t.narrow(dim, here, steps) for name, t in per_token.items()}
    return plain_loss(generator, criterion, hidden.narrow(dim, here, steps), target.narrow(dim, there, steps), **extra)
