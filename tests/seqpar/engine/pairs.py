"""Generators and criteria that functions compute, a batch for them, and the comparison with the plain loss."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
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


class Head(nn.Module):
    """A projection with something done before it, after it, and to what it holds."""

    def __init__(self, before: Any = None, after: Any = None, of_weight: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, V).double()
        self.before, self.after, self.of_weight = before, after, of_weight
        self.steps = 0
        self.seen: list[int] = []
        self.recent: deque[int] = deque(maxlen=9)
        self.histogram = np.zeros(2)
        self.sums = {"most": 100, "rows": 0}
        self.total = torch.zeros((), dtype=torch.float64)
        # Not the first of the parameters
        self.late = nn.ParameterDict({"gate": torch.zeros(4, dtype=torch.float64)})
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.names, self.inner = {"a"}, SimpleNamespace(steps=0)
        self.box, self.pair, self.cells, self.keys = [nn.Identity()], ([],), [torch.zeros(3)], {0: None}
        self.leaf, self.table, self.once = torch.zeros(2, requires_grad=True), torch.zeros(100), True
        self.chain = None
        for _ in range(400):
            self.chain = [self.chain]
        self.circle: list[Any] = []
        self.circle.append(self.circle)
        self.own = torch.Generator().manual_seed(1)
        self.twister, self.legacy, self.numpy = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.before is not None:
            hidden = self.before(self, hidden * 1)
        if self.of_weight is None:
            scores = self.linear(hidden)
        else:
            weight = self.linear.weight * 1
            if weight.requires_grad:
                weight.register_hook(self.of_weight)
            scores = F.linear(hidden, weight, self.linear.bias)
        if self.after is not None:
            self.after(self, scores)
        return scores
