"""An exponential moving average of the weights, which validation and translation use in their place.

After step t = 1, 2, ... the average e of a weight w, which starts as the initial weight, becomes

    e <- d e + (1 - d) w    with    d = min(decay, (1 + t) / (10 + t))

The smaller d of the first steps lets the average forget the initial weights, as in TensorFlow's
`ExponentialMovingAverage` with `num_updates`. See Polyak and Juditsky 1992 on why an average is the better estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from recipes.translation.training.layout import Layout
from recipes.translation.training.parts import local_of


class WeightAverage:
    """The average of a model's weights, distributed as they are; without a decay it is the weights themselves."""

    def __init__(self, layout: Layout, decay: float) -> None:
        self.layout = layout
        self.decay = decay
        self.averages: dict[str, Tensor] = {}
        if decay:
            self.averages = {name: weight.detach().clone() for name, weight in layout.model.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step `step`, counted from 1."""
        if not self.averages:
            return
        weights = [local_of(weight) for weight in self.layout.model.parameters()]
        averages = [local_of(average) for average in self.averages.values()]
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(averages, weights, step)

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights to validate and translate with: the averages, if there are any."""
        return self.averages or dict(self.layout.model.named_parameters())

    def others(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights that averages stand in for, as `weights/<parameter>`."""
        if not self.averages:
            return {}
        return {f"weights/{name}": weight for name, weight in self.layout.model.named_parameters()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, give the model the averages as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap weights and averages, one at a time."""
        for name, weight in self.layout.model.named_parameters():
            if name in self.averages:
                own, average = local_of(weight), local_of(self.averages[name])
                kept = own.clone()
                own.copy_(average)
                average.copy_(kept)
