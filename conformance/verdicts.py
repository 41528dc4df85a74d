"""Turn what was measured of a loss or of scores into a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from conformance.finding import Finding, RaisedError
from conformance.problem import GRADIENTS, Deviation, Problem, leaves
from seqpar.testing.evidence import FACTOR
from seqpar.testing.precision import error

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


def second_backward_finding(x: Problem) -> Finding:
    """Return the verdict on `backward()` after `backward(retain_graph=True)`: an error, or the same gradients again."""
    tensors = x.made()
    result = x.run(tensors)
    try:
        # With a factor, which an implementation that stores its gradients may apply to them once more
        x.backward(result, tensors, FACTOR, retain_graph=True)
    except RaisedError as raised:  # refused at once, as by a compiled graph that reuses what it stored
        again = x.made()
        x.backward(x.run(again), again, FACTOR)  # an error here is one of backward itself
        return _refused(raised)
    first = {name: t.grad.clone() for name, t in leaves(tensors).items() if t.grad is not None}
    if not first:
        return no_gradients(x)
    try:
        x.backward(result, tensors, FACTOR)
    except RaisedError as raised:  # whatever its author chose to raise
        return _refused(raised)
    # 2 g: `.grad` has the first gradient already and should have the same once more
    off = {name: error(tensors[name].grad, 2 * g) for name, g in first.items()}
    name = max(off, key=lambda n: off[n])
    if off[name] <= ROUNDING:
        return Finding("pass", "right")
    backward = f"({x.loss_code} * {FACTOR}).backward"
    twice = f"{backward}(retain_graph=True); first = {name}.grad.clone(); {backward}()"
    ratio = f"print(float({name}.grad.norm() / first.norm()))  # 2 is right; no error is raised"
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}, in silence", x.shown(twice, ratio))


def _refused(raised: RaisedError) -> Finding:
    """Return the verdict on a second backward that is an error."""
    return Finding("pass", f"raises {type(raised.__cause__).__name__}")


def no_gradients(x: Problem) -> Finding:
    """Return the failure of an implementation without any gradient."""
    return Finding("fail", "no gradients at all", x.shown(f"{x.backward_code}; print(weight.grad)"))
