"""Generators and criteria that functions compute, a batch for them, and the comparison with the plain loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar

V = 11


class Made(nn.Module):
    """A generator or criterion that a function of it and of its inputs computes; it holds what is given by name."""

    def __init__(self, function: Any, **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *inputs: Tensor, **per_token: Tensor) -> Any:
        return self.function(self, *inputs, **per_token)


cross_entropy: Callable[..., Tensor] = functools.partial(F.cross_entropy, reduction="sum")
each_row: Callable[..., Tensor] = functools.partial(F.cross_entropy, reduction="none")


def batch(rows: int = 20, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 4).to(dtype).requires_grad_(), torch.randint(V, (rows,))


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(4, V).to(dtype)


def assert_same(total: Tensor, plain: Tensor, ends: Sequence[Tensor], factor: float = 1, atol: float = 1e-14) -> None:
    """Two losses are equal, and so are the gradients of `factor` times each; none is a gradient of 0."""
    torch.testing.assert_close(total, plain, rtol=1e-12, atol=0)
    found, expected = (torch.autograd.grad(factor * x, ends, materialize_grads=True) for x in (total, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=atol)


def assert_plain(generator: nn.Module, criterion: nn.Module, chunk_tokens: int = 4, **options: Any) -> None:
    """The engine has the loss and the gradients of the plain calls."""
    hidden, target = batch(9)
    engine = seqpar.LossCompute(generator, criterion, chunk_tokens=chunk_tokens, **options)
    total = engine(hidden, target).total
    assert_same(total, criterion(generator(hidden), target), [hidden, *generator.parameters()])
