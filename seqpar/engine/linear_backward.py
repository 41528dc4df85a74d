"""Ask whether the backward of a pair is linear in the factor of the loss, and adds up over rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqpar.core.row_independence import largest_difference
from seqpar.engine.trial import PROBE_ROWS, REPEATS, Trial

HALVES = "the gradient of a half of the rows plus that of the other"

CANCELLED = 16
"""How many roundings of the largest gradient may be left of one whose terms cancel, as that of the direction of a
normalised weight of width 1."""


def refuse_nonlinear(trial: Trial, is_scaled: bool) -> None:
    """Raise ValueError unless gradients are linear in the factor of the loss, and those of all rows a sum.

    With a `loss_scale` the factor is known, and need not be tried.
    """
    if not trial.wanted:
        return
    for training in (True, False):
        with trial.kept():
            copy = trial.copy()
            if not training:
                # Random, for example by dropout: ask without that
                copy.eval()
            different = _nonlinear(trial, copy, is_scaled)
            if not different or (different.startswith(HALVES) and not training and _is_random(trial, copy)):
                return
            if different.startswith(HALVES) and training and _is_random(trial, copy):
                continue
        raise ValueError(
            f"backward through the pair is not linear: {different}. Gradients are taken for each chunk, and "
            "multiplied by the factor of the loss afterwards: clip or normalise the gradient outside (a hook on "
            "hidden); if the factor alone matters, pass it as loss_scale (1 / tokens of the step)"
        )


def _nonlinear(trial: Trial, copy: nn.ModuleDict, is_scaled: bool) -> str:
    """Return which gradient is not what it must be, in words; "" if all are."""

    def gradients(some: slice = slice(None), factor: float = 1.0) -> dict[str, Tensor]:
        with trial.kept():
            outcome = trial.call(copy, some, factor)
        roundings.append(outcome.rounding)
        epses.append(outcome.eps)
        return outcome.gradients

    roundings: list[float] = []
    epses: list[float] = []
    whole = gradients()
    if not is_scaled:
        for factor in (0.125, -1.0):
            other = gradients(factor=factor)
            for name, grad in whole.items():
                by = largest_difference(other[name] / factor, grad) if name in other else 1.0
                if by > max(roundings):
                    return f"the gradient of {name} of {factor:g} x loss is off by {by:.2g} from {factor:g} x gradient"
    half = PROBE_ROWS // 2
    halves = [gradients(some) for some in (slice(0, half), slice(half, PROBE_ROWS))]
    of_rows = ("hidden", *trial.names, *trial.of_criterion)
    for name, grad in whole.items():
        parts = [part[name] for part in halves if name in part]
        if not parts:
            continue
        joined = torch.cat(parts) if name in of_rows else torch.stack(parts).sum(0)
        by = largest_difference(joined, grad)
        if by > max(roundings):
            if name not in of_rows and _is_cancelled(joined - grad, whole, max(epses)):
                continue
            return f"{HALVES} is off by {by:.2g} from that of all rows, for {name}"
    return ""


def _is_cancelled(difference: Tensor, gradients: dict[str, Tensor], eps: float) -> bool:
    """Return whether a difference of a parameter's gradient is what rounding leaves of terms that cancel."""
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad.numel())
    return float(difference.abs().max()) <= CANCELLED * eps * largest


def _is_random(trial: Trial, copy: nn.ModuleDict) -> bool:
    """Return whether the pair gives other numbers when it is called again with other random numbers."""
    first = trial.call(copy)
    return not all(first.is_same(trial.call(copy)) for _ in range(REPEATS))
