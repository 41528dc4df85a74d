"""Recognise mistakes by what differs between ranks: their counts, their sums, a rank without a part."""

from __future__ import annotations

import math

import torch

from seqpar.testing.evidence import SAME, Evidence, ratio, same, spelt


def local_count(e: Evidence) -> str | None:
    """Recognise a division by this rank's tokens instead of the step's."""
    if not e.tokens or e.world == 1:
        return None
    # (sum / tokens here, averaged over the ranks) / (sum / divisor), and the same times the ranks
    own_mean = e.divisor / (e.tokens * e.world)
    own_count = e.divisor / e.tokens
    # Only a per-token gradient shows it: a parameter's mixes the wrong factors of all ranks
    for name, got, plain in e.pairs():
        times = ratio(got, plain)
        if name not in e.per_token or not times or math.isclose(times, 1, rel_tol=SAME):
            continue
        for expected_ratio, how in ((own_mean, f" / ({e.tokens} x {e.world} ranks)"), (own_count, f" / {e.tokens}")):
            if math.isclose(times, expected_ratio, rel_tol=SAME):
                return (
                    f"the local token count, without an all-reduce of it: here {e.tokens} of the step's "
                    f"{e.divisor:g} tokens, and {name}'s gradient is {spelt(times)} times the plain one, "
                    f"{e.divisor:g}{how}"
                )
    return None


def reduced_twice(e: Evidence) -> str | None:
    """Recognise parameters' gradients that were summed over the ranks before they are averaged over them."""
    if e.world == 1:
        return None
    times = {name: ratio(got, plain) for name, got, plain in e.pairs()}
    twice = [n for n, r in times.items() if n not in e.per_token and r and math.isclose(r, e.world, rel_tol=SAME)]
    own = [r for n, r in times.items() if n in e.per_token]
    if not twice or not all(r and math.isclose(r, 1, rel_tol=SAME) for r in own):
        return None
    return (
        f"a gradient is reduced twice: that of {', '.join(twice)} is {e.world} times the plain one, the number of "
        f"ranks, and that of each rank's own tokens is right"
    )


def silent_rank(e: Evidence) -> str | None:
    """Recognise a rank whose loss does not reach the parameters: their gradients are those of the other ranks."""
    for name, got, plain in e.pairs():
        uses = [gradient for _, gradient in e.uses.get(name, ())]
        each = len(uses) // e.world
        if e.world == 1 or name in e.per_token or not each or len(uses) != each * e.world:
            continue
        for rank in range(e.world):
            # The plain loss computes one rank's tokens after the other's
            own = torch.stack(uses[rank * each : (rank + 1) * each]).sum(0)
            if own.any() and same(got, plain - own):
                return f"rank {rank} contributes nothing: the gradient of {name} is that of the other ranks alone"
    return None


def world_size(e: Evidence) -> str | None:
    """Recognise the number of ranks as a factor too many or too few."""
    times = e.ratio()
    if e.world > 1 and times:
        # DDP averages over the ranks: without the factor world, gradients are 1/world; with it twice, world times
        for exponent, what in ((-1, "averaged over the ranks"), (1, "multiplied by the number of ranks")):
            if math.isclose(times, e.world**exponent, rel_tol=SAME):
                return f"the world size: all gradients are {spelt(times)} times the plain ones, {what} once too often"
    return None
