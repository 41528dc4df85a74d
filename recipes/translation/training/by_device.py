"""A loss of the states that several replicas of a model have computed, each with a copy of the generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

import seqpar


def summed_by_device(
    loss_of: Callable[..., seqpar.TokenLoss], generator: nn.Module, shares: Sequence[Sequence[Tensor]]
) -> seqpar.TokenLoss:
    """Return the sum, on the first share's device, of `loss_of(generator, *share)`, each computed where its share is.

    The generator's gradient is that of all shares. The sum has no `nll` and no `correct`.
    """
    devices = [share[0].device for share in shares]
    generators = seqpar.replicate(generator, devices)
    arguments = [(replica, *share) for replica, share in zip(generators, shares, strict=True)]
    losses = seqpar.parallel_apply([loss_of] * len(shares), arguments, devices=devices)
    moved = [seqpar.TokenLoss(loss.total.to(devices[0]), loss.tokens.to(devices[0])) for loss in losses]
    return sum(moved[1:], start=moved[0])
