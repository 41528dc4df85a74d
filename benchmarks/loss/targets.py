"""Hold what the library sets out to reach against what was measured: the worst case over each claim's problems."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from benchmarks.loss.implementations import ENGINE, OURS, OWN, PLAIN, TORCH_DEFAULT
from benchmarks.loss.problems import SHAPES
from benchmarks.loss.results import (
    Entry,
    Results,
    entries_of,
    fastest_to_floor,
    floor_seconds,
    median,
    peak,
    problem_of,
)

Number = Callable[[Entry], float | None]
"""A figure of an entry, or None where it has none."""
BUT_THE_LARGEST = SHAPES[:4]


class Target(NamedTuple):
    """State one claim: its limit as text, the worst that was measured, where, and whether that is within the limit."""

    claim: str
    limit: str
    measured: str
    where: str
    reached: bool


def targets(results: Results) -> list[Target]:
    """Return every claim that the file has figures for."""
    every = entries_of(results, "shapes")
    four = [e for e in every if problem_of(e)._replace(dtype=torch.float32, smoothing=0.0) in BUT_THE_LARGEST]
    single = [entry for entry in four if problem_of(entry).dtype == torch.float32]
    half = [entry for entry in four if problem_of(entry).dtype == torch.bfloat16]
    smoothed = [entry for entry in single if problem_of(entry).smoothing]
    rough = [entry for entry in single if not problem_of(entry).smoothing]
    growing = entries_of(results, "memory")
    engine = f"`{ENGINE}`"
    peers = "fastest peer's time / `LossCompute`'s"
    seconds = time_of(ENGINE)
    of_plain = over(time_of(PLAIN), seconds)
    in_products = over(seconds, floor_seconds)
    fastest = partial(fastest_to_floor, name=ENGINE)
    allowed = itemgetter("allowed bytes")
    to_allowed = over(peak_of(ENGINE), allowed)
    found = [
        most(f"float32, {engine}: time / three products", single, in_products, 1.15),
        most(f"float32, {engine}: time / three products, fastest runs", single, fastest, 1.15),
        least(f"float32, smoothing: plain's time / {engine}'s", smoothed, of_plain, 1.6),
        least(f"float32, no smoothing: plain's time / {engine}'s", rough, of_plain, 1.3),
        least(f"float32: {peers}", single, over(fastest_peer, seconds), 1.0),
        most(f"bfloat16, {engine}: time / three products", half, in_products, 1.4),
        most(f"bfloat16, {engine}: time / three products, fastest runs", half, fastest, 1.4),
        least(f"bfloat16: plain's time / {engine}'s", half, of_plain, 2.0),
        least(
            f"bfloat16: torch op's time, default options, / {engine}'s",
            [entry for entry in half if not problem_of(entry).smoothing],
            over(time_of(TORCH_DEFAULT), seconds),
            3.0,
        ),
        least(f"bfloat16: {peers}", half, over(fastest_peer, seconds), 1.0),
        most(f"{engine}: peak memory / what is allowed", every, to_allowed, 1.0),
        most("own generator: time / plain's", four, over(time_of(OWN), time_of(PLAIN)), 1.25),
        most(f"{engine}, N from 1,024 to 16,384: peak memory / what is allowed", growing, to_allowed, 1.0),
    ]
    return [target for target in found if target is not None]


def most(claim: str, entries: list[Entry], number: Number, limit: float) -> Target | None:
    """Claim that a number is at most the limit in every entry; None where there is no figure."""
    return _judged(claim, entries, number, limit, f"<= {limit:.3g}", largest=True)


def least(claim: str, entries: list[Entry], number: Number, limit: float) -> Target | None:
    """Claim that a number is at least the limit in every entry; None where there is no figure."""
    return _judged(claim, entries, number, limit, f">= {limit:.3g}", largest=False)


def _judged(
    claim: str, entries: list[Entry], number: Number, limit: float, text: str, *, largest: bool
) -> Target | None:
    found = [(value, entry) for entry in entries if (value := number(entry)) is not None]
    if not found:
        return None
    ordered = sorted(found, key=lambda pair: pair[0], reverse=largest)
    worst, entry = ordered[0]
    measured = f"{worst:.3g}"
    if len(found) > 1:
        measured += f" (best {ordered[-1][0]:.3g})"
    is_inside = operator.le if largest else operator.ge
    inside = sum(is_inside(value, limit) for value, _ in found)
    where = f"{problem_of(entry).title}; {inside} of {len(found)} inside"
    return Target(claim, text, measured, where, inside == len(found))


def over(number: Number, other: Number) -> Number:
    """Return the ratio of two figures, None where one of them is missing."""

    def ratio(entry: Entry) -> float | None:
        value, unit = number(entry), other(entry)
        if value is None or unit is None:
            return None
        return value / unit

    return ratio


def time_of(name: str) -> Number:
    """Return an implementation's median seconds."""
    return lambda entry: median(entry, name)


def peak_of(name: str) -> Number:
    """Return an implementation's peak bytes."""
    return lambda entry: peak(entry, name)


def fastest_peer(entry: Entry) -> float | None:
    """Return the least of the others' median seconds."""
    theirs = [median(entry, name) for name in entry["seconds"] if name not in OURS]
    return min((time for time in theirs if time is not None), default=None)
