"""The training loop stays one that is read at a glance."""

from __future__ import annotations

import ast
import inspect

from recipes.translation import train as training

LINES = 25
NAMES = 30


def loop_of(source: str) -> ast.While:
    """Return the one `while` of a module."""
    (found,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]
    return found


def lines_of(loop: ast.While) -> int:
    """Count the lines of the loop's body, those of comments between statements included."""
    end = loop.body[-1].end_lineno
    assert end is not None
    return end - loop.lineno


def names_of(loop: ast.While) -> set[str]:
    """Return every name that the condition and the body read or set; an attribute belongs to the name before it."""
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}


def test_lines_and_names_are_counted_as_a_reader_counts_them() -> None:
    loop = loop_of("while a.b < c:\n    # why\n    d = a.f(\n        1,\n    )\n    e(d)\n")
    assert lines_of(loop) == 5
    assert names_of(loop) == {"a", "c", "d", "e"}


def test_the_loop_fits_on_a_page() -> None:
    loop = loop_of(inspect.getsource(training))
    assert lines_of(loop) <= LINES
    assert len(names_of(loop)) <= NAMES, sorted(names_of(loop))
