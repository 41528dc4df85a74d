"""Recognise mistakes by how many times each part of a step, such as a sentence, is in a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seqpar.testing.evidence import SAME, Evidence, besides, close, shares_of, spell


def shares_of_parts(gradients: Mapping[str, Tensor | None], parts: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return how many times each part is in all gradients together; an empty list if that cannot be seen."""
    names = [name for name in parts[0] if gradients.get(name) is not None] if parts else []
    if not names:
        return []
    flat = [torch.cat([one[n].flatten() for n in names]) for one in ({n: gradients[n] for n in names}, *parts)]  # type: ignore[union-attr]
    return shares_of(flat[0], flat[1:]) or []


def unreduced_parts(e: Evidence) -> str | None:
    """Recognise ranks that keep the gradients of their own parts."""
    said = _only_some(e)
    if not said or not e.ranks_differ:
        return None
    return f"not reduced over ranks: each rank keeps the gradient of its own tokens; in rank {e.rank} {said}"


def last_only(e: Evidence) -> str | None:
    """Recognise a step in which only some micro-batches, such as the last, count."""
    said = _only_some(e)
    if not said:
        return None
    shares = shares_of_parts(e.got[1], e.parts)
    if shares[-1] and shares[0] == 0:
        return f"only the gradient of the last micro-batch is kept: {said}"
    return f"a part of the step contributes nothing: {said}"


def _only_some(e: Evidence) -> str:
    """Say which parts are in the gradient, if some are missing and all others have the same factor."""
    shares = shares_of_parts(e.got[1], e.parts)
    there = [times for times in shares if times and not math.isnan(times)]
    if 0 not in shares or not there or not all(close(times, there[0]) for times in there):
        return ""
    kept = ", ".join(str(number) for number, times in enumerate(shares) if times)
    return f"it has the gradient of sentences {kept} alone, of {len(shares)}{besides(there[0])}"


def means_of_parts(e: Evidence) -> str | None:
    """Recognise micro-batches that are each divided by their own tokens.

    Micro-batch m with a share w_m of the step's tokens then has 1 / (M w_m) times its plain gradient if the M means are
    averaged, and 1 / w_m times it if they are added up.
    """
    if e.micro_batches < 2:
        return None
    shares = shares_of_parts(e.got[1], e.parts)
    weight: dict[float, float] = {}
    for times, own in zip(shares, e.weights, strict=True) if shares else ():
        near = next((known for known in weight if math.isclose(known, times, rel_tol=SAME)), times)
        weight[near] = weight.get(near, 0.0) + own
    if len(weight) < 2 or not all(times > 0 for times in weight):
        return None
    # share x weight is the same for every micro-batch, and k times as large if k of them have the same share
    each = sum(times * own for times, own in weight.items()) / e.micro_batches
    if not all(close(times * own / each, round(times * own / each)) for times, own in weight.items()):
        return None
    said = "each micro-batch is divided by its own tokens, not by those of the step"
    ratios = ", ".join(spell(times) for times in sorted(weight))
    if close(each, 1):
        return f"a sum of means: {said}, and their sum not by the {e.micro_batches} micro-batches (shares {ratios})"
    return f"mean of means: {said} (shares {ratios}){besides(each * e.micro_batches)}"
