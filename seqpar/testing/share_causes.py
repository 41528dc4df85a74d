"""Recognise mistakes by how many times each part is in a gradient: a rank's tokens, a sentence, one use of a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seqpar.testing.evidence import SAME, Evidence, besides, close, shares_of, spell, tally

KINDS = (
    ("token count, without an all-reduce of it", "tokens"),
    ("number of targets, ignored ones counted", "targets"),
)
"""What the two entries of `Evidence.counts` are called in two places of a message."""


def shares_of_ranks(e: Evidence) -> tuple[str, list[float]]:
    """Return a gradient's name, and how many times it has each rank's tokens; nan if that cannot be seen."""
    for name, got, _ in e.pairs():
        uses = [gradient for _, gradient in e.uses.get(name, ())]
        each = len(uses) // e.world
        if name in e.per_token or not each or len(uses) != each * e.world:
            continue
        own = [torch.stack(uses[rank * each : (rank + 1) * each]).sum(0) for rank in range(e.world)]
        shares = shares_of(got, own)
        if shares is not None:
            return name, shares
    # A per-token gradient shows this only for its own rank
    for name, times in e.ratios().items():
        if name in e.per_token and times:
            return name, [times if rank == e.rank else math.nan for rank in range(e.world)]
    return "", []


def local_count(e: Evidence) -> str | None:
    """Recognise a division by each rank's own tokens, or by all its rows, instead of the step's tokens."""
    if e.world == 1:
        return None
    name, shares = shares_of_ranks(e)
    seen = {rank: times for rank, times in enumerate(shares) if not math.isnan(times)}
    # (sum / tokens here, averaged over the ranks) / (sum / divisor), and the same times the number of ranks
    for kind, (what, noun) in enumerate(KINDS):
        for world, factor in ((e.world, f" x {e.world} ranks"), (1, "")):
            own = {rank: e.counts[rank][kind] * world for rank in seen}
            if not all(n and close(r, e.divisor / n) for r, n in ((seen[k], own[k]) for k in seen)):
                continue
            if all(close(r, 1) for r in seen.values()):
                continue
            rank = e.rank if e.rank in seen else min(seen)
            n, times = e.counts[rank][kind], spell(seen[rank])
            of = sum(counts[kind] for counts in e.counts)
            whose = f"{name}'s gradient"
            if name not in e.per_token:
                whose = f"this rank's part of {whose}"
            bottom = f"({n}{factor})" if factor else f"{n}"
            return (
                f"the local {what}: here {n} of the step's {of} {noun}, and {whose} is {times} times the "
                f"plain one, {e.divisor:g} / {bottom}"
            )
    return None


def unequal_reductions(e: Evidence) -> str | None:
    """Recognise parameters whose gradients are reduced over the ranks differently from all others."""
    times = e.ratios()
    off = {name: r for name, r in times.items() if not close(r, 1)}
    first = next(iter(off.values()), None)
    if e.world == 1 or not first or len(off) == len(times) or e.per_token & off.keys():
        return None
    if not all(r and close(r, first) for r in off.values()) or "." in spell(first):
        return None
    said = "reduced twice" if first > 1 else "divided by ranks twice"
    return f"a gradient is {said}: that of {', '.join(off)} is {spell(first)} times the plain one, and no other"


def contributes_nothing(silent: Sequence[int]) -> str:
    """Say that ranks contribute nothing to a gradient."""
    if len(silent) == 1:
        return f"rank {silent[0]} contributes nothing"
    return f"ranks {' and '.join(map(str, silent))} contribute nothing"


def silent_ranks(e: Evidence) -> str | None:
    """Recognise ranks whose loss does not reach the parameters, whose gradients are those of the other ranks."""
    if e.world == 1:
        return None
    name, shares = shares_of_ranks(e)
    silent = [rank for rank, times in enumerate(shares) if times == 0]
    heard = [times for times in shares if times and not math.isnan(times)]
    if not silent or not heard or not all(close(times, heard[0]) for times in heard):
        return None
    return f"{contributes_nothing(silent)}: the gradient of {name} is that of the other ranks alone{besides(heard[0])}"


def miscounted_uses(e: Evidence) -> str | None:
    """Recognise a tensor with several uses, some of which do not count exactly once, on all ranks alike."""
    for name, got, _ in e.pairs():
        uses = e.uses.get(name, ())
        each = len(uses) // e.world
        if each < 2 or each * e.world != len(uses):
            continue
        # Summed over the ranks
        of_use = [torch.stack([gradient for _, gradient in uses[use::each]]).sum(0) for use in range(each)]
        shares = shares_of(got, of_use) or []
        counted = {use: times for use, times in enumerate(shares) if times and not math.isnan(times)}
        if not counted:
            continue
        least = min(counted.values(), key=abs)
        called = {use: f"use {use + 1} ({uses[use][0]})" for use in counted}
        if 0 in shares and all(close(times, least) for times in counted.values()):
            only = f"{name} is used {each} times, and its gradient is that of {', '.join(called.values())} alone"
            return f"a missed tie: {only}{besides(least)}"
        more = {use: round(times / least) for use, times in counted.items() if times / least > 1.5}
        if more and all(close(times / least, round(times / least)) for times in counted.values()):
            has = ", ".join(f"that of {called[use]} {count} times" for use, count in more.items())
            return f"a use counted too often: of {each} uses of {name}, its gradient has {has}{besides(least)}"
    return None


def world_size(e: Evidence) -> str | None:
    """Recognise gradients that are multiplied or divided by the number of ranks once too often."""
    times = e.ratio()
    if e.world > 1 and times:
        # DDP averages over the ranks: without the factor world, gradients are 1/world as large; with two, world times
        for exponent, what in ((-1, "averaged over the ranks"), (1, "multiplied by the number of ranks")):
            if close(times, e.world**exponent):
                return f"the world size: all gradients are {spell(times)} times the plain ones, {what} once too often"
    return None


def shares_of_parts(gradients: Mapping[str, Tensor | None], parts: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return how many times each part is in all gradients together; an empty list if that cannot be seen."""
    names = [name for name in parts[0] if gradients.get(name) is not None] if parts else []
    if not names:
        return []
    flat = [torch.cat([one[n].flatten() for n in names]) for one in ({n: gradients[n] for n in names}, *parts)]  # type: ignore[union-attr]
    return shares_of(flat[0], flat[1:]) or []


def parts_of_step(
    whole: Mapping[str, Tensor | None], means: Sequence[Mapping[str, Tensor]]
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Return what each sentence adds to the gradient, and its share of the step; nothing if they do not add up.

    The gradient of a sentence alone is that of its own mean; its share is the weight that makes their sum the whole.
    """
    weights = shares_of_parts(whole, means)
    if len(weights) < 2 or not all(weight > SAME for weight in weights):
        return [], []
    parts = [{n: g * weight for n, g in mean.items()} for mean, weight in zip(means, weights, strict=True)]
    return parts, [weight / sum(weights) for weight in weights]


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
    weight = tally(zip(shares_of_parts(e.got[1], e.parts), e.weights, strict=False))
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
