"""State how far a loss may be from the truth: 1e-12 in float64, otherwise at most twice as far as plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
    """Return |found - right| / |right| in the Euclidean norm; infinite if `found` alone is missing or the error is nan.

    A missing `right` counts as 0.
    """
    if found is None:
        return 0.0 if right is None else math.inf
    if right is None:
        right = torch.zeros(())
    relative = float((found - right).norm() / right.norm().clamp(min=1e-300))
    if math.isnan(relative):
        return math.inf
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
        off = error(found, right[name])
        plainly = max(error(one[name], right[name]) for one in own)
        # Not `off > allowed`, which is false for nan
        if not off <= max(TWICE * plainly, TWICE * torch.finfo(torch.float32).eps):
            return (
                f"{spell_error(name, found, right[name])}, where plain PyTorch in float32 is off by {plainly:.2g}; "
                "twice as much is allowed where the device has no float64"
            )
    return ""


def as_float64(result: Result) -> Result:
    """Return a loss and its gradients in float64, on the CPU if their device has none."""
    value, gradients = result
    device = value.device if has_float64(value.device) else torch.device("cpu")

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(device).double()

    return wide(value), {name: g if g is None else wide(g) for name, g in gradients.items()}


def in_dtype(modules: nn.ModuleDict, dtype: torch.dtype) -> nn.ModuleDict:
    """Return the modules, copied if any of their parameters or buffers has a different floating or complex dtype.

    They are in one container, so that a parameter they share is still one parameter in the copies.
    """

    def wanted(tensor: Tensor) -> torch.dtype:
        if tensor.is_complex():
            # `Module.to(torch.float64)` would drop the imaginary part
            return dtype.to_complex()
        return dtype if tensor.is_floating_point() else tensor.dtype

    if all(t.dtype == wanted(t) for t in (*modules.parameters(), *modules.buffers())):
        return modules
    copies = copy.deepcopy(modules)
    for tensor in (*copies.parameters(), *copies.buffers()):
        tensor.data = tensor.data.to(wanted(tensor))
    return copies


def _name(result: Result) -> dict[str, Tensor | None]:
    """Return the loss and its gradients by the names that messages use."""
    value, gradients = as_float64(result)
    return {"the loss": value, **{f"the gradient of {name}": g for name, g in gradients.items()}}
