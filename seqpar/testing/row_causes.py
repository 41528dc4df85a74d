"""Recognise mistakes by the gradient of each token: dropped chunks, means of means, padding that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from seqpar.testing.evidence import Evidence, close, is_several, ratio, spell, tally

MOST_ALIKE = 16
"""The maximum number of parts with the rarest number of tokens that is recognised."""

MOST_KINDS = 3
"""The maximum number of kinds of rows, such as the right ones, that are described."""
MOST_RUNS = 4
"""The maximum number of runs of rows that are written out."""


class RowRatios(NamedTuple):
    """The ratio of each row's or time step's gradient to the plain one, if the plain one is not 0."""

    name: str
    what: str
    ratios: list[float]
    at: list[int]
    """The rows' positions."""
    of: int


def rows_of(e: Evidence) -> list[RowRatios]:
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
                found.append(RowRatios(name, what, ratios, at, len(plain_view)))
    return found


def dropped_rows(e: Evidence) -> str | None:
    """Recognise by its zeros a chunk that is never computed."""
    for rows in rows_of(e):
        for odd, others in _pairs_of_ratios(rows):
            if odd == 0 and (where := _one_run(rows, odd)):
                place, at = where
                said = {"last": "the last chunk is dropped", "first": "the first chunk is dropped"}
                return (
                    f"{said.get(place, 'a chunk in the middle is skipped')}: {rows.name} has no gradient in its {at}, "
                    f"of {rows.of}, and {_multiple(others)} elsewhere"
                )
    return None


def repeated_rows(e: Evidence) -> str | None:
    """Recognise a chunk that is computed more than once while the others are right."""
    for rows in rows_of(e):
        for odd, others in _pairs_of_ratios(rows):
            if is_several(odd) and close(others, 1) and (where := _one_run(rows, odd)):
                return (
                    f"a chunk is counted {round(odd)} times: the gradient of {rows.name} is {round(odd)} times the "
                    f"plain one in its {where[1]}, of {rows.of}, and right elsewhere"
                )
    return None


def where_off(e: Evidence, name: str) -> str:
    """Say in which rows a tensor's gradient is off, and by how much; return "" if its rows are all alike."""
    got, plain = (of[1][name] for of in (e.got, e.expected))
    if name not in e.per_token or got is None or plain is None:
        return ""
    found: dict[str, list[int]] = {}
    for number, (row, right) in enumerate(zip(got.flatten(0, -2), plain.flatten(0, -2), strict=True)):
        if row.any() or right.any():
            found.setdefault(difference(row, right), []).append(number)
    if "right" not in found or not 2 <= len(found) <= MOST_KINDS:
        return ""
    of = len(got.flatten(0, -2))
    off = [f"{said} in its {_spans(rows)}" for said, rows in found.items() if said != "right"]
    return f"{', '.join(off)}, of {of}, and right elsewhere"


def difference(got: Tensor, plain: Tensor) -> str:
    """Say how a gradient differs from the plain one."""
    if not plain.any():
        return "not 0, as the plain one is,"
    times = ratio(got, plain)
    if times is None:
        return "no multiple of the plain one"
    if close(times, 1):
        return "right"
    return f"{spell(times)} times the plain one"


def _spans(rows: Sequence[int]) -> str:
    """Return the positions of rows in words, with runs given by their ends."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], row]
        else:
            runs.append([row])
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(runs) > MOST_RUNS:
        return f"{len(rows)} rows"
    return f"rows {', '.join(' to '.join(map(str, run)) for run in runs)}"


def _multiple(r: float) -> str:
    """Describe a gradient that is r times the plain one."""
    if close(r, 1):
        return "the right one"
    return f"{spell(r)} times the plain one"


def _pairs_of_ratios(rows: RowRatios) -> list[tuple[float, float]]:
    """Return the two ratios that the rows have, in both orders, if they have exactly two."""
    kinds = [*tally((r, 1) for r in rows.ratios)]
    if len(kinds) != 2:
        return []
    return [(kinds[0], kinds[1]), (kinds[1], kinds[0])]


def _one_run(rows: RowRatios, odd: float) -> tuple[str, str] | None:
    """Return where the rows with this ratio are (first, last or between) and which they are, if they form one run."""
    found = [i for i, r in zip(rows.at, rows.ratios, strict=True) if close(r, odd)]
    # The engine cuts rows or time steps, so a chunk is a run of one of these
    if any(found[0] < i < found[-1] for i in set(rows.at) - set(found)):
        return None
    if rows.at[-1] == found[-1]:
        return "last", f"last {rows.of - found[0]} {rows.what}"
    if rows.at[0] == found[0]:
        return "first", f"first {found[-1] + 1} {rows.what}"
    return "between", f"{rows.what} {found[0]} to {found[-1]}"


def mean_of_means(e: Evidence) -> str | None:
    """Recognise parts of the tokens that are each divided by their own number.

    In part c, with n_c tokens, sum_c (1/C) mean_c has divisor / (C n_c) times the plain gradient: ratio x count is the
    same for every part, and k times as large if k parts, such as sentences, have the same number of tokens.
    """
    if e.tokens is None or e.world > 1:
        return None
    for rows in rows_of(e):
        if rows.what != "rows":
            continue
        counts = tally((r, 1) for r in rows.ratios)
        if len(counts) < 2 or min(counts) <= 0:
            continue
        if any(_are_parts(counts, fewest, e.divisor) for fewest in range(1, MOST_ALIKE + 1)):
            parts = ", ".join(f"{spell(r)} times the plain one in {n} rows" for r, n in counts.items())
            return f"a mean of means: each part is divided by its own tokens, so {rows.name}'s gradient is {parts}"
    return None


def _are_parts(counts: Mapping[float, int], fewest: int, divisor: float) -> bool:
    """Return whether the rows with each ratio can be k equal parts; `fewest` is the smallest k of all ratios.

    The parts' means are either added up or averaged.
    """
    smallest = min(r * n for r, n in counts.items())
    total = 0
    for r, n in counts.items():
        parts = r * n / smallest * fewest
        if not close(parts, round(parts)) or n % round(parts):
            return False
        total += round(parts)
    return any(close(smallest / fewest, divisor / of) for of in (1, total))


def counted_padding(e: Evidence) -> str | None:
    """Recognise ignored rows that have a gradient."""
    for name, got, plain in e.pairs():
        if name not in e.per_token:
            continue
        got_ND, plain_ND = got.flatten(0, -2), plain.flatten(0, -2)
        extra = got_ND.any(1) & ~plain_ND.any(1)
        # Padding that counts leaves the other rows right, or divides them all by one number
        if not extra.any() or ratio(got_ND[~extra], plain_ND[~extra]) is None:
            continue
        count = int(extra.sum())
        if e.ignored is None:
            return (
                f"ignored padding is counted, it seems: {name} has a gradient in {count} rows where the plain one is 0"
            )
        # A row's plain gradient may be 0 for a different reason, such as its class's weight
        if not (extra.cpu() & ~e.ignored.cpu()).any():
            return f"ignored padding is counted: {name} has a gradient in {count} rows whose target is ignored"
    return None
