"""Check an implementation's loss and gradients with the conformance kit, at a small problem."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import conformance
from benchmarks.loss.implementations import Implementation
from benchmarks.loss.problems import CHECK, TIME, Inputs, Problem
from conformance import problem as kit
from conformance.checks import factor_errors
from conformance.finding import RaisedError
from conformance.problem import Problem as KitProblem
from seqpar.testing.precision import TWICE


def kit_inputs(implementation: Implementation, problem: Problem, device: str) -> KitProblem:
    """Return the kit's inputs for an implementation at the sizes, dtype and smoothing of a problem.

    The kit draws the tensors. With padding, sentences are of many lengths: from all TIME steps down to as few as make
    the padding's share right.
    """

    def loss(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: conformance.Options
    ) -> Tensor:
        given = problem._replace(
            rows=len(hidden), smoothing=options.label_smoothing, dtype=options.dtype, bias=bias is not None
        )
        found = implementation.prepare(given_inputs(given, hidden, weight, bias, target))()
        assert found is not None
        return found

    adapter = conformance.Adapter("the implementation", loss, offers=_offers(implementation))
    options = conformance.Options(dtype=problem.dtype, label_smoothing=problem.smoothing, reduction=adapter.reduction)
    return KitProblem(
        adapter,
        problem.rows,
        problem.width,
        problem.vocab_size,
        options,
        change=partial(_pad, problem=problem) if problem.padding else "",
        device=device,
    )


def given_inputs(problem: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Inputs:
    """Return inputs of the kit's tensors, which stand in place of a layer's own parameters: they get the gradients."""
    generator = nn.Linear(weight.size(1), weight.size(0), bias is not None, device="meta")
    generator.weight = weight  # type: ignore[assignment]
    generator.bias = bias  # type: ignore[assignment]
    return Inputs(problem, hidden, generator, target)


def _offers(implementation: Implementation) -> frozenset[str]:
    """Return what the kit may ask for: every step returns the mean over the tokens that are not padding."""
    lacks: set[str] = {"sum", "chunks", "CPU memory"}
    if not implementation.bias:
        lacks.add("bias")
    return conformance.EVERYTHING - lacks


def _pad(tensors: SimpleNamespace, problem: Problem) -> None:
    """Ignore the ends of sentences."""
    lengths = torch.linspace(TIME, TIME * (1 - 2 * problem.padding), problem.rows // TIME)
    tensors.target.view(-1, TIME).masked_fill_(torch.arange(TIME) >= lengths[:, None], -100)


def what_is_wrong(implementation: Implementation, problem: Problem, device: str) -> list[str]:
    """Return in words what is wrong with an implementation at a small problem of that dtype and smoothing.

    Wrong is a loss or gradient more than twice as far from float64 as the plain loss in the same dtype, and further
    than that dtype rounds one number.
    """
    x = kit_inputs(implementation, CHECK._replace(smoothing=problem.smoothing, dtype=problem.dtype), device)
    words = deviating(x)
    if _ignores_factor(x):
        words.append("ignores a factor on the loss")
    return words


def deviating(x: kit.Problem) -> list[str]:
    """Return what deviates more than it may, in words; raise what the implementation raises."""
    try:
        found = kit.deviations(x)
    except RaisedError as raised:  # the kit's own, around the error that says what the implementation refused
        raise raised.__cause__ or raised from None
    return [f"{d.label} off by {d.error:.1e} ({TWICE * d.of_allowed:.1f} x plain's)" for d in found if d.of_allowed > 1]


def _ignores_factor(x: KitProblem) -> bool:
    """Return whether an eighth of the loss fails to give an eighth of the gradients."""
    if not x.run(x.made()).requires_grad:
        return False  # the loss is a plain number, which promises no gradients
    rounding = torch.finfo(x.options.dtype).eps / 2
    return any(error > rounding for error in factor_errors(x).values())
