"""Find what code uses from its surroundings: what may hold state there, or be called."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from seqpar.core.structures import dict_of

LIBRARIES = {"torch", "torchgen", "seqpar", "numpy", "transformers", "collections", "functools", "typing", "logging"}
# Every test function with an assertion uses the first, and the modules in the other must not be restored
LIBRARIES |= {"_pytest", "sys"}
# What threads share is not restored: an item that a thread has added meanwhile would be lost, and another waits for it
LIBRARIES |= {"queue", "threading", "multiprocessing", "concurrent", "asyncio"}
"""Packages whose code is not inspected."""


WRAPPERS = {
    MethodType: "__func__",
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    partial: "func",
    partialmethod: "func",
    cached_property: "func",
}
"""The attribute in which each of them holds its function."""


class Place(NamedTuple):
    """A name in the surroundings of a function, and its value."""

    name: str
    value: Any
    write: Callable[[Any], object]
    """Gives the name a different value."""
    read: Callable[[], Any]
    """Returns the name's current value."""


def read_only(name: str, value: Any) -> Place:
    """Return a place whose value cannot be replaced: only what is in it can change."""
    return Place(name, value, lambda value: None, lambda: None)


def is_of_library(code: Any) -> bool:
    """Return whether a function, class or module comes with one of `LIBRARIES`."""
    name = code.__name__ if isinstance(code, ModuleType) else getattr(code, "__module__", None)
    return (name or "").partition(".")[0] in LIBRARIES


def places_used_by(function: FunctionType) -> Iterator[Place]:
    """Yield what a function uses: its closure, defaults and attributes, globals, and names in modules that it names."""
    name = function.__name__
    named = {}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A name that has no value yet
        with contextlib.suppress(ValueError):
            named[variable] = cell.cell_contents
            yield Place(
                f"{variable} in the closure of {name}",
                cell.cell_contents,
                partial(setattr, cell, "cell_contents"),
                partial(getattr, cell, "cell_contents"),
            )
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield read_only(f"a default of {name}", default)
    yield from _entries(vars(function), {*vars(function)}, f"{name}.")
    names = names_in(function.__code__)
    around = function.__globals__
    yield from _entries(around, names, "the global ")
    for name in sorted(_globals_set_in(function.__code__) - around.keys()):
        # It has no value yet
        yield Place(f"the global {name}", None, partial(_write_or_remove, around, name), partial(around.get, name))
    # Modules that the function imports itself, too
    named |= {used: around.get(used, sys.modules.get(used)) for used in sorted(names)}
    for used, module in named.items():
        if isinstance(module, ModuleType) and not is_of_library(module):
            yield from _entries(vars(module), names, f"{used}.")


def used_by(value: Any) -> list[Any]:
    """Return what a function, a method or a partial uses; nothing for a library's function, or for anything else."""
    if isinstance(value, FunctionType) and not is_of_library(value):
        return [place.value for place in places_used_by(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return []


def _entries(owner: dict[str, Any], names: set[str], prefix: str) -> Iterator[Place]:
    """Yield the places of these names in a dict of attributes or globals."""
    for name in sorted(names & owner.keys()):
        yield Place(f"{prefix}{name}", owner[name], partial(owner.__setitem__, name), partial(owner.get, name))


def _write_or_remove(owner: dict[str, Any], name: str, value: Any) -> None:
    """Give a name its value back, or remove it if that is None."""
    if value is None:
        owner.pop(name, None)
    else:
        owner[name] = value


@lru_cache(maxsize=1024)
def _globals_set_in(code: CodeType) -> frozenset[str]:
    """Return the globals that code sets, and those that the functions it defines set."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own.union(*map(_globals_set_in, inner)))


def names_in(code: CodeType) -> set[str]:
    """Return the names that code and the functions it defines use, written out or as a string for `getattr`."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return {*code.co_names, *texts}.union(*map(names_in, inner))


def function_in(value: Any) -> FunctionType | None:
    """Return the function in a method, property or wrapper, or the function itself; None if there is none."""
    for _ in range(8):
        if isinstance(value, (FunctionType, type)):
            break
        value = _inside(value)
    return value if isinstance(value, FunctionType) else None


def _inside(value: Any) -> Any:
    """Return what a method, property or wrapper wraps; None for anything else, whose attributes are not evaluated."""
    for kind, name in WRAPPERS.items():
        if isinstance(value, kind):
            return getattr(value, name)
    # Set by functools.wraps and lru_cache
    return (dict_of(value) or {}).get("__wrapped__")
