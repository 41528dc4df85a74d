"""Whether an implementation is right: its loss and gradients against the plain loss in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.implementations import Implementation
from benchmarks.loss.plain_ways import plain
from benchmarks.loss.problems import CHECK, Inputs, Problem

FACTOR = 0.125
"""What the loss is multiplied by before the backward; a power of 2, so that no rounding comes of it."""
TWICE = 2.0
"""An implementation may be so many times as far from the truth as the plain loss in the same dtype."""

Answer = dict[str, Tensor]
"""The loss and the gradients, by name."""


def answer(x: Inputs, implementation: Implementation, factor: float = 1.0) -> Answer:
    """What one step gives, in float64."""
    x.clear()
    loss = implementation.prepare(x)()
    if loss.requires_grad:
        (loss * factor).backward()
    found = {"loss": loss.detach(), "hidden": x.hidden.grad, "weight": x.weight.grad}
    if implementation.bias:
        found["bias"] = x.bias.grad
    return {name: torch.zeros(()) if value is None else value.detach().double() for name, value in found.items()}


def truth(x: Inputs, bias: bool) -> Answer:
    """The plain loss of the same numbers, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x.hidden, x.weight, x.bias)]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits, x.target, label_smoothing=x.problem.smoothing, reduction="sum") / x.tokens
    gradients = torch.autograd.grad(loss, leaves)
    names = ["hidden", "weight", "bias"] if bias else ["hidden", "weight"]
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=False))}


def errors(found: Answer, right: Answer) -> dict[str, float]:
    """The relative distance of each part (a Euclidean norm)."""
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in right.items()}


def what_is_wrong(implementation: Implementation, problem: Problem, device: str) -> tuple[dict[str, float], list[str]]:
    """Its errors at a small problem of that dtype and smoothing, and in words what is wrong with it.

    Wrong is what lies more than twice as far from float64 as the plain loss in the same dtype, and more than that dtype
    rounds one number by.
    """
    small = CHECK._replace(smoothing=problem.smoothing, dtype=problem.dtype)  # with a bias: what has none, gets zeros
    x = Inputs(small, device, bias=implementation.bias)
    right = truth(x, implementation.bias)
    rounding = torch.finfo(problem.dtype).eps / 2
    allowed = {
        name: max(TWICE * error, rounding)
        for name, error in errors(answer(x, Implementation(plain, bias=implementation.bias)), right).items()
    }
    once = errors(answer(x, implementation), right)
    words = []
    for name, error in once.items():
        if error > allowed[name]:
            label = "loss" if name == "loss" else f"{name} gradient"
            words.append(f"{label} off by {error:.1e} ({TWICE * error / allowed[name]:.1f} x plain's)")
    if _ignores_factor(implementation, x, rounding):
        words.append("ignores a factor on the loss")
    x.clear()
    return once, words


def _ignores_factor(implementation: Implementation, x: Inputs, rounding: float) -> bool:
    """Whether an eighth of the loss does not give an eighth of the gradients."""
    whole, eighth = answer(x, implementation), answer(x, implementation, FACTOR)
    if not implementation.prepare(x)().requires_grad:
        return False  # its loss is a number, and says so
    gradients = {name: value * FACTOR for name, value in whole.items() if name != "loss"}
    return any(error > rounding for error in errors(eighth, gradients).values())
