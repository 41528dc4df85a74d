"""Recognise mistakes by the gradient of each token: dropped chunks, means of means, padding that counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from seqpar.testing.evidence import SAME, Evidence, ratio, spelt

MOST_ALIKE = 16
"""How many parts of equally many tokens, of the rarest size, are recognised."""


class Rows(NamedTuple):
    """The ratio of each row's gradient, or each time step's, to the plain one, where there is a plain one."""

    name: str
    what: str
    ratios: list[float]
    at: list[int]
    """The rows' positions."""
    of: int


def rows_of(e: Evidence) -> list[Rows]:
    """Return the ratios of every per-token tensor whose rows, or time steps, are multiples of the plain ones."""
    found = []
    for name, got, plain in e.pairs():
        if name not in e.per_token:
            continue
        views = {"rows": (got.flatten(0, -2), plain.flatten(0, -2))}
        # (B, T, D) may be cut over time
        if got.dim() == 3:
            views["time steps"] = got.transpose(0, 1), plain.transpose(0, 1)
        for what, (got_view, plain_view) in views.items():
            at = [i for i, row in enumerate(plain_view) if row.any()]
            times = [ratio(got_view[i], plain_view[i]) for i in at]
            ratios = [r for r in times if r is not None]
            if len(ratios) == len(at):
                found.append(Rows(name, what, ratios, at, len(plain_view)))
    return found


def dropped_rows(e: Evidence) -> str | None:
    """Recognise a chunk that is never computed, by its zeros."""
    for rows in rows_of(e):
        lost = [i for i, r in zip(rows.at, rows.ratios, strict=True) if r == 0]
        kept = [r for r in rows.ratios if r]
        # The engine cuts rows or time steps, so a chunk is a run of one of these
        if not lost or not kept or any(lost[0] < i < lost[-1] for i in set(rows.at) - set(lost)):
            continue
        one = all(math.isclose(r, kept[0], rel_tol=SAME) for r in kept)
        elsewhere = "the right one"
        if not one:
            elsewhere = "different multiples of the plain one"
        elif not math.isclose(kept[0], 1, rel_tol=SAME):
            elsewhere = f"{spelt(kept[0])} times the plain one"
        if one and rows.at[-1] == lost[-1]:
            return (
                f"the last chunk is dropped: {rows.name} has no gradient in its last {rows.of - lost[0]} {rows.what}, "
                f"of {rows.of}, and {elsewhere} before them"
            )
        if one and lost[0] > rows.at[0]:
            return (
                f"a chunk in the middle is skipped: {rows.name} has no gradient in its {rows.what} {lost[0]} to "
                f"{lost[-1]}, of {rows.of}, and {elsewhere} before and after them"
            )
    return None


def mean_of_means(e: Evidence) -> str | None:
    """Recognise parts of the tokens that are each divided by their own number.

    sum_c (1/C) mean_c has in part c, of n_c tokens, divisor / (C n_c) times the plain gradient: ratio x count is the
    same for every part, and k times as large where k parts, as sentences often do, have equally many tokens.
    """
    if e.tokens is None or e.world > 1:
        return None
    for rows in rows_of(e):
        if rows.what != "rows":
            continue
        counts: dict[float, int] = {}
        for r in rows.ratios:
            near = next((known for known in counts if math.isclose(known, r, rel_tol=SAME)), r)
            counts[near] = counts.get(near, 0) + 1
        if len(counts) < 2 or min(counts) <= 0:
            continue
        if any(_are_parts(counts, fewest) for fewest in range(1, MOST_ALIKE + 1)):
            parts = ", ".join(f"{spelt(r)} times the plain one in {n} rows" for r, n in counts.items())
            return f"a mean of means: each part is divided by its own tokens, so {rows.name}'s gradient is {parts}"
    return None


def _are_parts(counts: Mapping[float, int], fewest: int) -> bool:
    """Return whether rows with one ratio are k parts of equally many rows; `fewest` is the smallest k of all ratios."""
    smallest = min(r * n for r, n in counts.items())
    for r, n in counts.items():
        parts = r * n / smallest * fewest
        if not math.isclose(parts, round(parts), rel_tol=SAME) or n % round(parts):
            return False
    return True


def counted_padding(e: Evidence) -> str | None:
    """Recognise ignored rows that have a gradient."""
    for name, got, plain in e.pairs():
        if name in e.per_token:
            # The plain gradient of a row that is ignored is exactly 0, and of any other practically never
            extra = int((got.flatten(0, -2).any(1) & ~plain.flatten(0, -2).any(1)).sum())
            if extra:
                return f"ignored padding is counted: {name} has a gradient in {extra} rows whose target is ignored"
    return None
