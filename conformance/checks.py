"""What losses and scores are asked alike; each check returns a finding, with five lines that show a failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from conformance.finding import Finding, RaisedError
from conformance.problem import GRADIENTS, Deviation, Problem, deviations, leaves
from seqpar.testing.evidence import FACTOR
from seqpar.testing.precision import error

ROUNDING = 1e-6
"""The relative difference allowed between two float32 gradients that should be equal."""


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def compare(problems: Problem | Iterable[Problem]) -> Finding:
    """Return the verdict on the worst number or gradient of one or several problems, relative to what is allowed."""
    given = [problems] if isinstance(problems, Problem) else problems
    found = [(x, deviations(x)[0]) for x in given]
    x, worst = max(found, key=lambda pair: pair[1].of_allowed)
    return judge(x, worst)


def compares(problems: Callable[[Any], Problem | Iterable[Problem]]) -> Callable[[Any], Finding]:
    """Return the check that compares an adapter's answers to these problems with the plain ones."""
    return lambda adapter: compare(problems(adapter))


def judge(x: Problem, worst: Deviation, rows: str = "") -> Finding:
    """Return the verdict on the largest error; `rows` is the index of the rows that were looked at."""
    if math.isinf(worst.error):
        return Finding("fail", f"{worst.label}: none, or not a number", show(x, worst, rows))
    size = f"{worst.error:.1e}"
    if worst.plain and x.options.dtype != torch.float64:
        size += f", {worst.error / worst.plain:.1f} x plain's"
    if worst.of_allowed <= 1:
        return Finding("pass", f"{worst.name} {size}")
    return Finding("fail", f"{worst.label} off by {size}", show(x, worst, rows))


def show(x: Problem, worst: Deviation, rows: str = "") -> str:
    """Return the reproduction of a wrong number or gradient, with plain PyTorch's own error in a comment."""
    allowed = f"at most {worst.allowed:.1e} is right"
    if x.options.dtype != torch.float64:
        allowed += f" (plain PyTorch in that dtype: {worst.plain:.1e})"
    return x.compared(worst.name, allowed, rows)


def dtype_check(problem: Callable[[Any, torch.dtype], Problem], dtype: torch.dtype) -> Callable[[Any], Finding]:
    """Return a check of all numbers and gradients: 1e-12 in float64, else at most twice plain PyTorch's own error."""

    def check(adapter: Any) -> Finding:
        x = problem(adapter, dtype)
        found = deviations(x)
        order = {name: place for place, name in enumerate((*x.wanted(), *GRADIENTS))}
        parts = ", ".join(f"{d.name} {d.error:.1e}" for d in sorted(found, key=lambda d: order[d.name]))
        finding = judge(x, found[0])
        return replace(finding, figure=f"{finding.figure}; {parts}")

    return check


def second_backward(x: Problem) -> Finding:
    """Check that `backward()` after `backward(retain_graph=True)` raises an error or gives twice the gradient."""
    # With a factor, which an implementation that stores its gradients may apply to them once more
    x = replace(x, factor=FACTOR)
    tensors = x.made()
    result = x.run(tensors)
    try:
        x.backward(result, tensors, retain_graph=True)
    except RaisedError as raised:  # refused at once, as by a compiled graph that reuses what it stored
        again = x.made()
        x.backward(x.run(again), again)  # an error here is one of backward itself
        return _refused(raised)
    first = {name: t.grad.clone() for name, t in leaves(tensors).items() if t.grad is not None}
    if not first:
        return no_gradients(x)
    try:
        x.backward(result, tensors)
    except RaisedError as raised:  # whatever its author chose to raise
        return _refused(raised)
    # 2 g: `.grad` has the first gradient already and should have the same once more
    off = {name: error(tensors[name].grad, 2 * g) for name, g in first.items()}
    name = max(off, key=lambda n: off[n])
    if off[name] <= ROUNDING:
        return Finding("pass", "right")
    backward = f"{x.loss_code}.backward"
    twice = f"{backward}(retain_graph=True); first = {name}.grad.clone(); {backward}()"
    ratio = f"print(float({name}.grad.norm() / first.norm()))  # 2 is right; no error is raised"
    return Finding("fail", f"{name} gradient off by {off[name]:.2g}, in silence", x.shown(twice, ratio))


def _refused(raised: RaisedError) -> Finding:
    """Return the verdict on a second backward that is an error."""
    return Finding("pass", f"raises {type(raised.__cause__).__name__}")


def no_gradients(x: Problem) -> Finding:
    """Return the failure of an implementation without any gradient."""
    return Finding("fail", "no gradients at all", x.shown(f"{x.backward_code}; print(weight.grad)"))
