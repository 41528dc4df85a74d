"""The shape of the recipe: its rooms are few, few of them know each other, and none two know each other in a circle.

Functions are given the sections of the settings that they need, and few the whole.

The training loop stays one that is read at a glance.

A room is a folder of `recipes/translation`, or one of its files. An arrow goes from one that imports to one that is
imported, whatever the number of imports.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from recipes.translation import train as training

RECIPE = "recipes.translation"
MOST_ROOMS = 20
MOST_ARROWS = 100


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The modules of the recipe that each of them imports."""
    graph = grimp.build_graph("recipes", cache_dir=None)
    inside = {name for name in graph.modules if f"{name}.".startswith(f"{RECIPE}.")}
    return {name: graph.find_modules_directly_imported_by(name) & inside for name in inside}


@pytest.fixture(scope="module")
def arrows(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms to which each room has an arrow."""
    found: dict[str, set[str]] = {}
    for name, others in imports.items():
        own = room_of(name)
        found.setdefault(own, set()).update(room_of(other) for other in others)
        found[own].discard(own)
    return found


def room_of(module: str) -> str:
    """The part of a module's name after the recipe's; empty for the recipe itself."""
    return module.removeprefix(RECIPE).lstrip(".").partition(".")[0]


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names along a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_recipe_has_few_rooms_and_few_arrows_between_them(arrows: dict[str, set[str]]) -> None:
    assert len(arrows) <= MOST_ROOMS, sorted(arrows)
    assert sum(map(len, arrows.values())) <= MOST_ARROWS, {name: sorted(to) for name, to in sorted(arrows.items())}


def test_neither_rooms_nor_files_import_each_other_in_a_circle(
    arrows: dict[str, set[str]], imports: dict[str, set[str]]
) -> None:
    assert circle_in(arrows) == []
    assert circle_in(imports) == []


MOST_WHOLE = 15
ROOT = Path(__file__).parents[2]


def taking_the_whole(source: str) -> Iterator[str]:
    """The functions of a file that have a parameter of the type RunConfig, or of one that is made of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            types = [ast.unparse(each.annotation) for each in every if each is not None and each.annotation is not None]
            if any("RunConfig" in each for each in types):
                yield node.name


def test_few_functions_are_given_all_settings_of_a_run_and_not_only_sections() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("recipes", "models")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in taking_the_whole(path.read_text())
    ]
    assert len(found) <= MOST_WHOLE, "hand over the sections that are needed: " + "; ".join(found)


def test_a_function_that_takes_all_settings_is_found_however_it_is_written() -> None:
    written = "def a(x: RunConfig): ...\nasync def b(*, y: 'list[RunConfig] | None'): ...\n"
    methods = "class C:\n    def c(self, z: config.RunConfig): ...\n    def d(self, z: DataConfig) -> RunConfig: ...\n"
    assert list(taking_the_whole(written + methods)) == ["a", "b", "c"]


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
