"""Recognise mistakes by what differs between ranks: their counts, their sums, or a rank that contributes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from seqpar.testing.evidence import SAME, Evidence, besides, close, shares_of, spell

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


def world_size(e: Evidence) -> str | None:
    """Recognise gradients that are multiplied or divided by the number of ranks once too often."""
    times = e.ratio()
    if e.world > 1 and times:
        # DDP averages over the ranks: without the factor world, gradients are 1/world as large; with two, world times
        for exponent, what in ((-1, "averaged over the ranks"), (1, "multiplied by the number of ranks")):
            if math.isclose(times, e.world**exponent, rel_tol=SAME):
                return f"the world size: all gradients are {spell(times)} times the plain ones, {what} once too often"
    return None
