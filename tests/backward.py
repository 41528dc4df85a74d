"""Numbers with a backward of one's own, as a wrong one may be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None]:
        return ctx.change(*upstream), None


def with_gradient(x: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The same numbers, whose gradient a function changes."""
    changed: Tensor = _WithGradient.apply(x, change)
    return changed
