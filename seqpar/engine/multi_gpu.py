"""Compute the loss, its backward and the optimizer's step in one call, as in 2018: `MultiGPULossCompute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from seqpar.core.checks import check_number, check_scalar, kind_of
from seqpar.core.token_loss import TokenLoss
from seqpar.engine.loss_compute import LossCompute
from seqpar.multi_device.devices import Device

UNTRAINED = (
    "an opt is given, but neither out nor a parameter of the generator or the criterion requires a gradient: pass "
    "opt=None to evaluate, or out without detach()"
)


class Stepper(Protocol):
    """A torch optimizer, or a wrapper of one (NoamOpt of 2018) that has `.step()` and `.optimizer`."""

    def step(self) -> object:
        """Take one optimizer step."""


class MultiGPULossCompute:
    """Compute loss, backward and optimizer step in one call, with the arguments of 2018.

    Plain equivalent of `compute(out, targets, normalize)`:

        total = criterion(generator(out).flatten(0, 1), targets.flatten())
        (total / normalize).backward(); opt.step(); opt.zero_grad(); return float(total)

    Source: `MultiGPULossCompute` of The Annotated Transformer (Harvard NLP, 2018), with the same arguments.

    Args:
        generator, criterion, devices: as in `LossCompute`.
        opt: a torch optimizer, or a Noam-style wrapper with `.step()` and `.optimizer`; None only evaluates.
        chunk_size: time steps whose logits exist at once, 5 in 2018; None cuts rows by memory, as `LossCompute` does.

    Raises:
        TypeError: `opt` has no `.step()`. Everything `LossCompute` raises.

    Example:
        >>> generator = nn.Linear(8, 50)
        >>> opt = torch.optim.Adam(generator.parameters())
        >>> compute = seqpar.MultiGPULossCompute(generator, seqpar.CrossEntropy(), ["cpu", "cpu"], opt)
        >>> out, targets = torch.randn(2, 6, 8), torch.randint(50, (2, 6))
        >>> first = compute(out, targets, targets.numel())
        >>> compute(out, targets, targets.numel()) < first  # the first call took a step
        True
    """

    def __init__(
        self,
        generator: nn.Module,
        criterion: nn.Module,
        devices: Sequence[Device],
        opt: Stepper | None = None,
        chunk_size: int | None = None,
    ) -> None:
        if opt is not None and not callable(getattr(opt, "step", None)):
            raise TypeError(f"opt is {kind_of(opt)}; it must be an optimizer with .step(), or None to evaluate")
        self.engine = LossCompute(generator, criterion, devices, chunk_size=chunk_size)
        self.opt = opt

    def __call__(
        self,
        out: Tensor | Sequence[Tensor],
        targets: Tensor | Sequence[Tensor],
        normalize: float | Tensor,
        **per_token: Any,
    ) -> float:
        """Return the summed loss as a float; with `opt`, first take a step on the gradient of sum / normalize.

        Raises:
            TypeError: with `opt`, `normalize` is not a number. ValueError: with `opt`, it is not finite, or not above
                0 although there are tokens. RuntimeError: with `opt`, nothing requires a gradient. Everything
                `LossCompute` raises.
        """
        with torch.set_grad_enabled(self.opt is not None):
            loss = self.engine(out, targets, **per_token)
        if self.opt is not None:
            if not loss.total.requires_grad:
                raise RuntimeError(UNTRAINED)
            _check_normalize(normalize, loss)
            (loss.total / normalize).backward()
            self.opt.step()
            optimizer: Any = getattr(self.opt, "optimizer", self.opt)
            optimizer.zero_grad()
        return float(loss.total.detach())


def _check_normalize(normalize: object, loss: TokenLoss) -> None:
    """Raise unless `normalize` is a finite number that is above 0 if there are tokens.

    Without tokens, 0 is accepted: all gradients are then 0, whatever the factor.
    """
    check_scalar(normalize, "normalize")
    number = float(normalize)  # type: ignore[arg-type]
    check_number(number, "normalize")
    if number <= 0 and int(loss.tokens):
        raise ValueError(f"normalize is {number} for {int(loss.tokens)} tokens; it must be above 0")
