"""Turn what was measured of a loss or of scores into a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from seqpar.testing.conformance.finding import Finding
from seqpar.testing.conformance.inputs import GRADIENTS, Deviation, error

ROUNDING = 1e-6
"""The relative difference allowed between two float32 gradients that should be equal."""


def error_finding(worst: Deviation, dtype: torch.dtype, shown: Callable[[], str]) -> Finding:
    """Return the verdict on the largest error; `shown` returns a reproduction."""
    if math.isinf(worst.error):
        return Finding("fail", f"{worst.label}: none, or not a number", shown())
    size = f"{worst.error:.1e}"
    if worst.plain and dtype != torch.float64:
        size += f", {worst.error / worst.plain:.1f} x plain's"
    if worst.of_allowed <= 1:
        return Finding("pass", f"{worst.name} {size}")
    return Finding("fail", f"{worst.label} off by {size}", shown())


def errors_of_parts(found: Sequence[Deviation]) -> str:
    """Return the relative error of the value and of each gradient, in the order of the reference."""
    order = {name: place for place, name in enumerate(("loss", *GRADIENTS))}
    parts = sorted((d for d in found if d.name in order), key=lambda d: order[d.name])
    return ", ".join(f"{d.name} {d.error:.1e}" for d in parts)


def second_backward_finding(
    leaves: Mapping[str, Tensor], again: Callable[[], None], shown: Callable[[str], str]
) -> Finding:
    """Return the verdict on a second backward: it raises an error, or adds the same gradients once more.

    Args:
        leaves: whose `.grad` has the gradients of the first backward.
        again: runs the second backward.
        shown: returns a reproduction for the leaf of that name.
    """
    first = {name: t.grad.clone() for name, t in leaves.items() if t.grad is not None}
    try:
        again()
    except Exception as raised:  # whatever its author chose to raise
        return Finding("pass", f"raises {type(raised).__name__}")
    # 2 g: `.grad` has the first gradient already and should have the same once more
    off = {name: error(leaves[name].grad, 2 * g) for name, g in first.items()}
    name = max(off, key=lambda n: off[n])
    if off[name] <= ROUNDING:
        return Finding("pass", "right")
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}, in silence", shown(name))
