"""Compute the loss with seqpar; `plain_ways` explains what a step is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

import seqpar
from benchmarks.loss.plain_ways import Step
from benchmarks.loss.problems import Inputs


class OwnProjection(nn.Module):
    """Project like `nn.Linear` from a class of its own, whose closed form the engine cannot know."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return self.linear(hidden)  # type: ignore[no-any-return]


def engine(
    replicas: int | None = None, known: bool = True, chunk_tokens: int | None = None
) -> Callable[[Inputs], Step]:
    """Use `LossCompute`.

    Args:
        replicas: how often the device is in the device list; None passes no list.
        known: whether the generator is one whose closed form the engine knows.
        chunk_tokens: None leaves the choice to the engine.
    """

    def prepare(x: Inputs) -> Step:
        generator: nn.Module = x.generator
        if not known:
            generator = OwnProjection(x.generator)
        devices = None
        if replicas is not None:
            devices = [x.hidden.device] * replicas
        criterion = seqpar.LabelSmoothing(x.problem.smoothing, "torch")
        compute = seqpar.LossCompute(generator, criterion, devices, chunk_tokens=chunk_tokens)
        return lambda: compute(x.hidden, x.target).total / x.tokens

    return prepare


def linear_cross_entropy(x: Inputs) -> Step:
    """Use `seqpar.linear_cross_entropy`: projection and loss in one call, gradients in closed form."""

    def step() -> Tensor:
        smoothing = x.problem.smoothing
        loss = seqpar.linear_cross_entropy(x.hidden, x.weight, x.target, bias=x.bias, label_smoothing=smoothing)
        return loss.total / x.tokens

    return step
