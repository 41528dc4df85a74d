"""An exponential moving average of the weights, which validation and translation use in the weights' place.

After step t = 1, 2, ... the average e of a weight w, which begins as the first weight, becomes

    e <- d e + (1 - d) w    with    d = min(decay, (1 + t) / (10 + t))

The smaller d of the first steps lets the average forget the first weights; it is that of TensorFlow's
`ExponentialMovingAverage` with `num_updates`. See Polyak and Juditsky 1992 on why an average is the better estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from recipes.translation.errors import CheckpointError
from recipes.translation.training.layout import Layout


class WeightAverage:
    """The average of a model's weights, distributed as these are; without a decay it is the weights themselves."""

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
        weights = [_local(weight) for weight in self.layout.model.parameters()]
        averages = [_local(average) for average in self.averages.values()]
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(averages, weights, step)

    @torch.no_grad()
    def fill(self, saved: Mapping[str, Tensor], folder: Path) -> None:
        """Set the averages from whole ones, of the checkpoint in `folder`."""
        for name in sorted(self.averages.keys() ^ saved.keys()):
            raise CheckpointError(f"{folder} does not fit training.ema {self.decay:g}: {name} is in one of them alone")
        for name, average in self.averages.items():
            _local(average).copy_(_local(self.layout.part(name, saved[name], average)))

    def whole_averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each average, whole on every rank; the weights themselves without a decay."""
        tensors: Mapping[str, Tensor] = self.averages or dict(self.layout.model.named_parameters())
        for name, tensor in tensors.items():
            yield name, self.layout.whole(name, tensor)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whose average is another number, whole, with its name `weights/<parameter>`."""
        if self.averages:
            for name, weight in self.layout.model.named_parameters():
                yield f"weights/{name}", self.layout.whole(name, weight)


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()
