"""Write rows of text as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; every row must have as many cells as the header."""
    lines = [markdown_row(header), "|" + "---|" * len(header)]
    lines += [markdown_row(row) for row in rows]
    return "\n".join(lines)


def markdown_row(cells: Sequence[str]) -> str:
    """Return one row of a table; use it for tables that are printed row by row while measuring."""
    row = "|"
    for cell in cells:
        # An empty cell is "| |", not "|  |"
        if cell:
            row += f" {cell}"
        row += " |"
    return row
