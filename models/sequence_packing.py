"""Packing of sequences into rows: several one after another, each with positions and attention of its own.

Shapes: B sequences, R rows, W width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
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
    """Put sequences into rows of about `width` tokens, or of the length of the longest one, with little padding.

    Up to four numbers of rows are tried, and the one that leaves the fewest cells empty is taken: with as many
    sequences in a row as fit into `width` on average, one more or one less, or with rows as long as the longest one.
    """
    total = sum(lengths)
    if not total:
        return Places(0, 0, [0] * len(lengths))
    each = max(1, width * len(lengths) // total)
    counts = {-(-len(lengths) // number) for number in (each - 1, each, each + 1) if number}
    counts.add(-(-total // max(lengths)))
    found = [fill_rows(lengths, rows) for rows in sorted(counts)]
    return min(found, key=lambda places: places.rows * places.width)


def fill_rows(lengths: Sequence[int], rows: int) -> Places:
    """Put sequences into rows, longest first, each into the least full row, to keep rows short (Graham 1969)."""
    filled = [(0, row) for row in range(rows)]
    row_of = [0] * len(lengths)
    columns = [0] * len(lengths)
    for sequence in sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence]):
        columns[sequence], row_of[sequence] = filled[0]
        heapreplace(filled, (columns[sequence] + lengths[sequence], row_of[sequence]))
    width = max(filled)[0]
    return Places(rows, width, [row * width + column for row, column in zip(row_of, columns, strict=True)])


def own_cells_mask(sequence_RW: Tensor) -> Tensor:
    """Return which cells each cell may attend to, (R, 1, W, W): those of its own sequence that are not after it.

    `sequence_RW` is the number of each cell's sequence; padding cells have a number that no sequence has.
    """
    width = sequence_RW.size(1)
    earlier_WW = torch.ones(width, width, dtype=torch.bool, device=sequence_RW.device).tril()
    own_RWW = sequence_RW[:, :, None] == sequence_RW[:, None, :]
    return (own_RWW & earlier_WW)[:, None]
