"""Compare what a function gives for rows in company, all in one call, with what it gives for each row alone.

A loss may be computed chunk by chunk if each row's share of it, in value and in gradient, depends on that row alone:

    sum over the rows:  f(rows) = sum_i f(row_i)
    gradient:           d f(rows) / d row_i = d f(row_i) / d row_i

Both hold exactly for a sum of one term per row, so any difference above rounding means that a row looks at others:
hard-example mining, a quantile, a weight by the batch's mean, a contrastive term, a mean.

Shape suffixes: K rows in company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.core.checks import refuse_reentrant
from seqpar.core.graphs import dtypes_of_graph, graph_of_its_own

ROUNDINGS = 10_000
"""By how many roundings of the least precise dtype a product of any width, followed by an exponential, may differ."""

CANCELLED = 16
"""How many roundings of the largest gradient may be left of one whose terms cancel, such as the gradient of the
direction of a normalised weight of width 1."""

EIGHTH = 0.125
"""A factor of a loss that adds no rounding of its own."""

OfRows = Callable[[Sequence[Tensor]], Tensor]
"""(one tensor (K, ...) for each argument) -> a result for each row (K, ...), or their sum, one number."""


class Answer(NamedTuple):
    """What a function gives for some rows."""

    values: Tensor
    """(K, ...) for the rows, or the sum over them, one number."""
    gradients: tuple[Tensor, ...]
    """Those of the sum, with respect to each argument that requires one, (K, ...); 0 if the result requires none."""
    precision: Precision


class Change(NamedTuple):
    """The largest differences between rows in company and the same rows alone, relative to the largest number."""

    value: float
    gradient: float
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """Return whether both are no more than rounding may make."""
        return max(self.value, self.gradient) <= self.rounding

    def __str__(self) -> str:
        if self.gradient > self.rounding:
            return f"a row's gradient changes with the other rows, by {self.gradient:.2g} of the largest"
        return f"a row's loss changes with the other rows and their order, by {self.value:.2g} of the largest"


def ask(function: OfRows, rows: Sequence[Tensor], least: torch.dtype = torch.float32) -> Answer:
    """Return what the function gives for these rows, with the gradients of the arguments that require one.

    Args:
        least: the least precise dtype it is assumed to compute in if there is no graph that tells.
    """
    leaves = [t.detach().requires_grad_(torch.is_grad_enabled() and t.requires_grad) for t in rows]
    with graph_of_its_own():
        # Copies, because a function may change its input in place, and autograd forbids that for a leaf
        values = function([t.clone() if t.requires_grad else t for t in leaves])
        precision = precision_of(values, least)
        wanted = [t for t in leaves if t.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if values.requires_grad:
            refuse_reentrant(values)
            found = torch.autograd.grad(values.sum(), wanted, allow_unused=True)
    grads = (torch.zeros_like(t) if grad is None else grad for t, grad in zip(wanted, found, strict=True))
    return Answer(values.detach(), tuple(grads), precision)


def ask_alone(function: OfRows, rows: Sequence[Tensor], least: torch.dtype = torch.float32) -> Answer:
    """Return what the function gives for each of these rows by itself, one after the other."""
    return join_answers([_alone(function, [t[i : i + 1] for t in rows], least) for i in range(len(rows[0]))])


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Return as one answer what a function gave for rows that were passed one after the other."""
    values = torch.stack([answer.values for answer in answers])
    gradients = tuple(map(torch.cat, zip(*(answer.gradients for answer in answers), strict=True)))
    return Answer(values, gradients, max(answer.precision for answer in answers))


def _alone(function: OfRows, row: Sequence[Tensor], least: torch.dtype) -> Answer:
    """Return what the function gives for one row, passed twice if it does not take a single one (a `squeeze`)."""
    try:
        answer = ask(function, row, least)
        return answer._replace(values=answer.values.reshape(answer.values.shape[1:]))
    except Exception:
        values, gradients, precision = ask(function, [torch.cat([t, t]) for t in row], least)
    return Answer(values[0] if values.dim() else values / 2, tuple(g[:1] for g in gradients), precision)


def ends_of_rows(per_token: Sequence[Tensor]) -> Tensor:
    """Return the indices of the smallest and the largest row of each tensor: in a mask, one of padding and another."""
    size_N = torch.stack([t.detach().float().unsqueeze(1).flatten(1).sum(1) for t in per_token])
    return torch.stack([size_N.argmin(1), size_N.argmax(1)], 1).flatten()


def difference(one: Answer, other: Answer) -> float:
    """Return the largest relative difference of values and gradients."""
    pairs = zip((one.values, *one.gradients), (other.values, *other.gradients), strict=True)
    return max(largest_difference(*pair) for pair in pairs)


def change_in_company(together: Answer, alone: Answer, row_K: Tensor | None = None) -> Change:
    """Return by how much rows in company differ from the same rows alone.

    Args:
        row_K: for each row in company, which of the rows alone it is; None if they are the same in the same order.
    """
    values = alone.values if row_K is None else alone.values[row_K]
    if together.values.dim() < values.dim():
        # In company they gave one number, their sum, whose rounding depends on the sizes of its terms
        value = float((values.sum() - together.values).abs() / values.abs().sum().clamp(min=TINY))
        value = value if torch.isfinite(values).all() and torch.isfinite(together.values) else 0.0
    else:
        value = largest_difference(values, together.values)
    precision = max(together.precision, alone.precision)
    pairs = [(a if row_K is None else a[row_K], b) for a, b in zip(alone.gradients, together.gradients, strict=False)]
    left_over = precision.cancelled * max(_size(t) for t in (values, *alone.gradients, *together.gradients))
    gradient = max((largest_difference(*pair) for pair in pairs if max(map(_size, pair)) > left_over), default=0.0)
    return Change(value, gradient, precision.rounding)


def _size(numbers: Tensor) -> float:
    """Return the largest absolute value of those that are finite; 0 if there are none."""
    return float(numbers.where(numbers.isfinite(), 0).abs().max()) if numbers.numel() else 0.0


TINY = torch.finfo(torch.float32).tiny


class Precision(NamedTuple):
    """The precision of the dtypes in which a result was computed."""

    eps: float
    """One rounding of the least precise of them."""
    smallest: float
    """The smallest number that all of them can represent: gradients below it underflow."""

    @property
    def rounding(self) -> float:
        """Return the relative difference that many roundings may make: at most half of the digits."""
        return float(min(ROUNDINGS * self.eps, self.eps**0.5))

    @property
    def cancelled(self) -> float:
        """Return how much may be left, relative to the largest number, of a gradient whose terms cancel.

        An example is the gradient of a number that is added to the scores of all classes. What is left is rounding,
        which on some CPUs depends on how many rows are computed at once.
        """
        return min(CANCELLED * self.eps, self.rounding / 8)


def precision_of(result: Tensor, least: torch.dtype) -> Precision:
    """Return the precision of the dtypes in a result's graph; if it has none, `least` is assumed to be among them."""
    dtypes = {result.dtype, *dtypes_of_graph(result)}
    if result.grad_fn is None:
        dtypes.add(least)
    kinds = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point]
    return Precision(max(kind.eps for kind in kinds), max(kind.tiny * kind.eps for kind in kinds))


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest number, over numbers that are finite in both."""
    wider = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a = a.detach().to(wider)
    b = b.detach().to(wider)
    # A masked class has -inf in every row, and -inf - -inf is nan
    finite = a.isfinite() & b.isfinite()
    if not finite.any():
        return 0.0
    largest = max(float(t.where(finite, 0).abs().max()) for t in (a, b))
    return float((a - b).where(finite, 0).abs().max()) / largest if largest else 0.0
