"""Hold what the library sets out to reach against what was measured: the worst case over each claim's problems."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy
import torch

from benchmarks.loss.implementations import ENGINE, OURS, OWN, OWN_SMALL, PLAIN, REPLICAS, TORCH_DEFAULT
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
from benchmarks.loss.timing import CHUNKED

Number = Callable[[Entry], float | None]
"""A figure of an entry, or None where it has none."""
BUT_THE_LARGEST = SHAPES[:4]
SIZES = {"N": "rows", "D": "width", "V": "vocab_size"}


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
    small = entries_of(results, "small")
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
        most(
            f"{engine}: peak memory, less what the bare products' libraries take, / what is allowed",
            every,
            over(own_peak, allowed),
            1.0,
        ),
        most("own generator: time / plain's", four, over(time_of(OWN), time_of(PLAIN)), 1.25),
        most("own generator, 128 rows: time / plain's", small, over(time_of(OWN_SMALL), time_of(PLAIN)), 1.25),
        most("own generator, 128 rows: peak memory / plain's", small, over(peak_of(OWN_SMALL), peak_of(PLAIN)), 1 / 8),
        of_padding(entries_of(results, "padding")),
        most(f"{engine}, N from 1,024 to 16,384: peak memory / what is allowed", growing, to_allowed, 1.0),
        most(
            f"{engine}: peak memory without the hidden gradient / that of the fewest rows",
            growing,
            lambda entry: over(beyond_hidden, lambda _: beyond_hidden(growing[0]))(entry),
            1.1,
        ),
    ]
    for name, line in lines(results).items():
        deviation = dict(zip(map(problem_of, line), straight_line(*points(name, line))[2], strict=True))
        claim = f"{engine}: time off a line in {name}"
        found.append(most(claim, line, lambda e, found=deviation: abs(found[problem_of(e)]), 0.1))  # type: ignore[misc]
    for name in (ENGINE, OWN):
        one, four_times = [replicas for replicas, (of, _) in REPLICAS.items() if of == name]
        ratio = over(time_of(four_times), time_of(one))
        found.append(most(f"`{name}`: four replicas' time / one's", entries_of(results, "devices"), ratio, 1.05))
    return [target for target in found if target is not None]


def of_padding(entries: list[Entry]) -> Target | None:
    """Return the claim about padding, for which the problem has to be measured with and without."""
    padded, whole = ([entry for entry in entries if bool(problem_of(entry).padding) is has] for has in (True, False))
    if not whole:
        return None
    claim = f"30 % padding, `{ENGINE}`: time without / time with"
    return least(claim, padded, over(lambda _: median(whole[0], ENGINE), time_of(ENGINE)), 1.25)


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


def own_peak(entry: Entry) -> float | None:
    """Return the engine's peak less what the bare products' libraries take."""
    whole, libraries = peak(entry, ENGINE), peak(entry, CHUNKED)
    if whole is None or libraries is None:
        return None
    return whole - libraries


def beyond_hidden(entry: Entry) -> float | None:
    """Return the engine's peak less the hidden gradient, which every implementation must hand back."""
    whole = peak(entry, ENGINE)
    problem = problem_of(entry)
    if whole is None:
        return None
    return whole - problem.rows * problem.width * problem.dtype.itemsize


def lines(results: Results) -> dict[str, list[Entry]]:
    """Return the entries of the part `linear` along each of N, D and V, the other two fixed."""
    problems = {problem_of(entry): entry for entry in entries_of(results, "linear")}
    found = {}
    for name, size in SIZES.items():
        # All three lines cross at one base problem, so the commonest value of each other size is the base's
        rest = [other for other in SIZES.values() if other != size]
        values = {other: [getattr(problem, other) for problem in problems] for other in rest}
        base = {other: max(set(seen), key=seen.count) for other, seen in values.items() if seen}
        line = [p for p in problems if all(getattr(p, other) == value for other, value in base.items())]
        if len(line) > 2:
            found[name] = [problems[p] for p in sorted(line, key=operator.attrgetter(size))]
    return found


def points(name: str, line: list[Entry]) -> tuple[list[int], list[float]]:
    """Return the sizes of a line's problems and the engine's seconds."""
    return [getattr(problem_of(e), SIZES[name]) for e in line], [median(e, ENGINE) or 0.0 for e in line]


def straight_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return start and slope of the line with the least squared relative deviations, and those deviations."""
    # polyfit squares the weights, too: sum ((t - line) / t)^2
    slope, start = numpy.polyfit(sizes, times, 1, w=1 / numpy.asarray(times))
    return start, slope, [t / (start + slope * s) - 1 for s, t in zip(sizes, times, strict=True)]
