"""Packing of sequences into rows: several behind each other, each with positions and attention of its own.

Shapes: B sequences, R rows, W width of a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where sequences lie in rows."""

    rows: int
    width: int
    starts: list[int]
    """The cell of each sequence's first token, counted through all rows: row x width + column."""


def pack(lengths: Sequence[int], width: int) -> Places:
    """Put sequences into as few rows of `width` as best-fit-decreasing finds (Johnson et al. 1974).

    The longest sequence comes first, and each goes into the fullest row that has room for it. Rows are wider where a
    sequence is longer than `width`, and as narrow as their contents where these are shorter.
    """
    width = max(width, max(lengths, default=0))
    columns = [0] * len(lengths)
    row_of = [0] * len(lengths)
    rows = 0
    # The room left in each row and the row's number, sorted
    room: list[tuple[int, int]] = []
    for sequence in sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence]):
        length = lengths[sequence]
        fullest = bisect_left(room, (length, 0))
        if fullest < len(room):
            left, row = room.pop(fullest)
        else:
            left, row = width, rows
            rows += 1
        columns[sequence] = width - left
        row_of[sequence] = row
        insort(room, (left - length, row))
    if room:
        width -= room[0][0]
    return Places(rows, width, [row * width + column for row, column in zip(row_of, columns, strict=True)])


def own_cells_mask(sequence_RW: Tensor) -> Tensor:
    """Return which cells each cell may attend to, (R, 1, W, W): those of its own sequence that are not after it.

    `sequence_RW` is the number of each cell's sequence; cells of padding have a number that no sequence has.
    """
    width = sequence_RW.size(1)
    earlier_WW = torch.ones(width, width, dtype=torch.bool, device=sequence_RW.device).tril()
    own_RWW = sequence_RW[:, :, None] == sequence_RW[:, None, :]
    return (own_RWW & earlier_WW)[:, None]
