"""Test whether the backward of a pair is linear in the factor of the loss, and adds up over rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.graphs import without_autocast
from seqpar.core.row_independence import CANCELLED, EIGHTH, largest_difference
from seqpar.core.surroundings import REPEATS
from seqpar.engine.trial import PROBE_ROWS, Outcome, Trial, in_float32, widen

HALVES = "the gradient of a half of the rows plus that of the other"


def ask_about_backward(trial: Trial, why_once: str) -> bool:
    """Return whether gradients are linear in the factor of the loss; if not, they are computed again in backward.

    Args:
        why_once: why the pair cannot be computed twice; "" if it can.

    Raises:
        ValueError: the gradients of all rows are not those of their halves together, or they depend on the factor and
            the pair cannot be computed twice.
    """
    if not trial.wanted:
        return True
    found = _ask(trial, training=True)
    if found.by_halves and found.is_random and not found.by_factor:
        # For example because of dropout: test without it
        found = _ask(trial, training=False)
        if found.is_random and not found.by_factor:
            return True
    outside = "clip or normalise the gradient outside (a hook on hidden)"
    if found.by_factor and found.is_random:
        why_once = "it is random"
    if found.by_factor and why_once:
        raise ValueError(
            f"backward through the pair is not linear: {found.by_factor}, and it cannot be computed again when the "
            f"factor is known, as {why_once}: {outside}"
        )
    if found.by_halves:
        raise ValueError(
            f"backward through the pair is not linear: {found.by_halves}. Gradients are taken for each chunk: {outside}"
        )
    return not found.by_factor


class _Answer(NamedTuple):
    """Which gradient is not what it would be in a linear backward, in words; "" if all are."""

    by_factor: str
    by_halves: str
    is_random: bool
    """Whether the pair is random; determined only if its backward is not linear."""


def _ask(trial: Trial, training: bool) -> _Answer:
    """Test a copy of the pair, in its present mode (`training`) or in evaluation mode."""
    with trial.keep_state():
        copy = trial.copy()
        if not training:
            copy.eval()
        whole = trial.outcome(copy)
        by_factor = _what_factor_changes(trial, copy, whole)
        by_halves = _what_halves_change(trial, copy, whole)
        if by_factor and not by_halves:
            # Some backwards join rows only if the factor is not 1
            by_halves = _what_halves_change(trial, copy, trial.outcome(copy, factor=EIGHTH), EIGHTH)
        return _Answer(by_factor, by_halves, bool(by_factor or by_halves) and _is_random(trial, copy))


def _what_factor_changes(trial: Trial, copy: nn.ModuleDict, whole: Outcome) -> str:
    """Return which gradient of a multiple of the loss is not that multiple, in words; "" if none."""
    for factor in (EIGHTH, -1.0):
        other = trial.outcome(copy, factor=factor)
        for name, grad in whole.gradients.items():
            # A missing gradient is a gradient of 0
            found = other.gradients.get(name, torch.zeros_like(grad))
            by = _change(found / factor, grad, [whole, other], factor)
            if by > max(whole.precision.rounding, other.precision.rounding):
                return f"the gradient of {name} of {factor:g} x loss is off by {by:.2g} from {factor:g} x gradient"
    return ""


def _what_halves_change(trial: Trial, copy: nn.ModuleDict, whole: Outcome, factor: float = 1.0) -> str:
    """Return which gradient of the rows is not that of their halves together, in words; "" if none."""
    half = PROBE_ROWS // 2
    parts = (slice(0, half), slice(half, PROBE_ROWS))
    halves = [trial.outcome(copy, some, factor) for some in parts]
    outcomes = [whole, *halves]
    of_rows = ("hidden", *trial.names, *trial.of_criterion)
    for name, grad in whole.gradients.items():
        zeros = [torch.zeros_like(grad[some] if name in of_rows else grad) for some in parts]
        each = [outcome.gradients.get(name, none) for outcome, none in zip(halves, zeros, strict=True)]
        joined = torch.cat(each) if name in of_rows else torch.stack(each).sum(0)
        by = _change(joined, grad, outcomes)
        if by <= max(outcome.precision.rounding for outcome in outcomes):
            continue
        if _is_cancelled(joined - grad, outcomes) and not _is_off_in_float32(trial, copy):
            continue
        return f"{HALVES} is off by {by:.2g} from that of all rows, for {name}"
    return ""


def _is_off_in_float32(trial: Trial, copy: nn.ModuleDict) -> bool:
    """Return whether a pair in a narrower dtype, if computed in float32, has different gradients in halves.

    In bfloat16, what is left of terms that cancel cannot be told from the whole gradient of a different parameter.
    False for a pair that does not run in float32, because it uses another dtype inside.
    """
    narrow = [t for t in (*trial.rows, *copy.parameters(), *copy.buffers()) if t.is_floating_point()]
    if all(t.dtype.itemsize >= 4 for t in narrow):
        return False
    widened = shallow_copy(trial)
    widened.rows = [widen(t) for t in trial.rows]
    widened.of_criterion = {name: widen(t) for name, t in trial.of_criterion.items()}
    wide = in_float32(copy)
    with contextlib.suppress(Exception), without_autocast(trial.target_K.device.type):
        return bool(_what_halves_change(widened, wide, widened.outcome(wide)))
    return False


def _change(found: Tensor, expected: Tensor, outcomes: Sequence[Outcome], factor: float = 1.0) -> float:
    """Return the largest difference relative to the largest number, and 0 for what underflow leaves.

    In float16 a small gradient is a multiple of the smallest number, which grows when it is divided by the factor.
    """
    by = largest_difference(found, expected)
    smallest = max(outcome.precision.smallest for outcome in outcomes) / abs(factor)
    if by and float((found - expected).abs().max()) <= CANCELLED * smallest:
        return 0.0
    return by


def _is_cancelled(difference: Tensor, outcomes: Sequence[Outcome]) -> bool:
    """Return whether a difference of gradients is what rounding leaves of terms that cancel."""
    eps = max(outcome.precision.eps for outcome in outcomes)
    largest = max(float(grad.abs().max()) for grad in outcomes[0].gradients.values() if grad.numel())
    return float(difference.abs().max()) <= CANCELLED * eps * largest


def _is_random(trial: Trial, copy: nn.ModuleDict) -> bool:
    """Return whether the pair gives different results when it is called again with different random numbers."""
    first = trial.call(copy)
    return not all(first.is_same(trial.call(copy)) for _ in range(REPEATS))
