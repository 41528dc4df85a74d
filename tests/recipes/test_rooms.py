"""The shape of the recipe: its rooms are few, few of them know each other, and none two know each other in a circle.

A room is a folder of `recipes/translation`, or one of its files. An arrow goes from one that imports to one that is
imported, whatever the number of imports.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

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
