"""State how far a loss may be from the truth: 1e-12 in float64, otherwise at most twice as far as plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.testing.evidence import Result

TWICE = 2.0
"""The error allowed to an implementation, relative to that of plain PyTorch in the same dtype."""
DRAWS = 3
"""Plain PyTorch's own error is the largest of this many draws: in a single draw, a number may be right by luck."""
EXACT = 1e-12
"""The relative error allowed in float64."""


def has_float64(device: torch.device) -> bool:
    """Return whether a device has float64, which mps does not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except TypeError:
        return False
    return True


def error(found: Tensor | None, right: Tensor | None) -> float:
    """Return |found - right| / |right| in the Euclidean norm; infinite if `found` is missing or the error is nan."""
    assert right is not None
    if found is None:
        return float("inf")
    relative = float((found - right).norm() / right.norm().clamp(min=1e-300))
    if math.isnan(relative):
        return float("inf")
    return relative


def spell_error(name: str, found: Tensor | None, right: Tensor | None) -> str:
    """Say how far a tensor is from the truth, which may be 0 or None."""
    if found is not None and (right is None or not right.any()):
        return f"{name} has the norm {float(found.norm()):.2g} and should be 0"
    return f"{name} is off by {error(found, right):.2g} of its size"


def farther_than_twice_plain(got: Result, plain: Sequence[Result], truth: Result) -> str:
    """Return the first number that is more than twice as far from the truth as plain PyTorch's; empty if none is.

    `plain` holds several draws of the same numbers, of which the farthest counts. Two units in the last place are
    always allowed, because plain PyTorch's own sum over a few tokens may be right to the last bit by luck.
    """
    right = _name(truth)
    own = [_name(one) for one in plain]
    for name, found in _name(got).items():
        off = _error(found, right[name])
        plainly = max(_error(one[name], right[name]) for one in own)
        # Not `off > allowed`, which is false for nan
        if not off <= max(TWICE * plainly, TWICE * torch.finfo(torch.float32).eps):
            return (
                f"{spell_error(name, found, right[name])}, where plain PyTorch in float32 is off by {plainly:.2g}; "
                "twice as much is allowed where the device has no float64"
            )
    return ""


def _error(found: Tensor | None, right: Tensor | None) -> float:
    """Return the relative error, treating a missing gradient as 0."""
    if found is None and right is None:
        return 0.0
    if right is None:
        right = torch.zeros(())
    return error(found, right)


def as_float64(result: Result) -> Result:
    """Return a loss and its gradients in float64, on the CPU if their device has none."""
    value, gradients = result
    if has_float64(value.device):
        return value.double(), {name: g if g is None else g.double() for name, g in gradients.items()}
    return value.cpu().double(), {name: g if g is None else g.cpu().double() for name, g in gradients.items()}


def _name(result: Result) -> dict[str, Tensor | None]:
    """Return the loss and its gradients by the names that messages use."""
    value, gradients = as_float64(result)
    return {"the loss": value, **{f"the gradient of {name}": g for name, g in gradients.items()}}
