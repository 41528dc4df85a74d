"""Recognise a different label smoothing by its gradient, which is linear in eps: g(eps) = g(0) + eps (g(1) - g(0))."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqpar.rows.conventions import CONVENTIONS, Convention
from seqpar.rows.criteria import LabelSmoothing
from seqpar.testing.evidence import SAME, Evidence, Result, besides, shares_of

HALF = 0.5
"""The eps, besides 0, at which a convention's gradient is computed."""
DIGITS = 3
"""The largest number of decimal places of an eps that somebody would choose."""


class Smoothing(NamedTuple):
    """A smoothed cross-entropy, and the factor by which its gradients are the gradients in question."""

    convention: str
    eps: float
    times: float

    def __str__(self) -> str:
        if abs(self.eps) <= SAME:
            return "no label smoothing"
        return f"label smoothing of {self.eps:.6g} in the convention {self.convention!r}"


def other_smoothing(e: Evidence) -> str | None:
    """Recognise the cross-entropy of the same logits with a different convention or eps, or without smoothing."""
    theirs = _smoothings(e, e.got)
    if not theirs:
        return None
    plain = _smoothings(e, e.expected)
    if not plain:
        found = _choose(theirs, e.smoothing)
        return f"the plain cross-entropy with {found}, where the criterion is another one, or has class weights"
    own = _choose(plain, e.smoothing)
    found = _choose(theirs, (own.convention, own.eps))
    if str(found) == str(own):
        return None
    more = besides(found.times / own.times)
    if found.convention != own.convention and abs(found.eps - own.eps) <= SAME:
        return f"the smoothing convention {found.convention!r}, where the criterion has {own.convention!r}{more}"
    return f"{found}, where the criterion has {str(own).removeprefix('label smoothing of ')}{more}"


def _smoothings(e: Evidence, result: Result) -> list[Smoothing]:
    """Return the smoothings that give these gradients; an eps in one convention may equal another eps in a second."""
    found: list[Smoothing] = []
    if e.smoothed is None:
        return found
    for convention in CONVENTIONS:
        # There may be too few classes for a convention
        with suppress(Exception):
            none, half = (_flat(e.smoothed(convention, eps), result) for eps in (0.0, HALF))
            shares = shares_of(_flat(result, result), [none, (half - none) / HALF])
            if shares and shares[0] and -SAME <= (eps := shares[1] / shares[0]) < 1:
                found.append(Smoothing(convention, eps, shares[0]))
    return found


def _flat(of: Result, like: Result) -> Tensor:
    """Return all gradients in one dimension; a missing one counts as 0."""
    pairs = [(of[1][name], g) for name, g in like[1].items() if g is not None]
    return torch.cat([(torch.zeros_like(g) if own is None else own).flatten() for own, g in pairs])


def _choose(found: list[Smoothing], known: tuple[str, float] | None) -> Smoothing:
    """Return the likeliest: the known one, else one with its eps, else one with a round eps, else any."""

    def unlikely(one: Smoothing) -> tuple[bool, bool, bool]:
        convention, eps = known or ("torch", math.nan)
        is_round = abs(round(one.eps, DIGITS) - one.eps) <= SAME
        return not abs(one.eps - eps) <= SAME, not is_round, one.convention != convention

    return min(found, key=unlikely)


class OtherSmoothing(TorchFunctionMode):
    """Compute every `F.cross_entropy` without class weights with this smoothing convention and eps."""

    def __init__(self, convention: Convention, eps: float) -> None:
        super().__init__()
        self.convention, self.eps = convention, eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.cross_entropy:
            return func(*args, **(kwargs or {}))
        return self._smooth(*args, **(kwargs or {}))

    def _smooth(
        self,
        logits: Tensor,
        target: Tensor,
        weight: None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **deprecated: None,
    ) -> Tensor:
        loss = LabelSmoothing(self.eps, self.convention, ignore_index=ignore_index).token_loss(logits, target)
        if weight is not None or reduction == "none":
            raise NotImplementedError
        if reduction == "mean":
            return loss.total / loss.tokens
        return loss.total
