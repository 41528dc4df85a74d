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


def engine(known: bool = True) -> Callable[[Inputs], Step]:
    """Use `LossCompute`, with a generator whose closed form the engine knows or (`known=False`) does not."""

    def prepare(x: Inputs) -> Step:
        generator: nn.Module = x.generator
        if not known:
            generator = OwnProjection(x.generator)
        criterion = seqpar.LabelSmoothing(x.problem.smoothing, "torch")
        compute = seqpar.LossCompute(generator, criterion)
        return lambda: compute(x.hidden, x.target).total / x.tokens

    return prepare
