"""Find the settings that decide what code runs: the flags, strings, enum members and functions that objects hold.

Numbers are left out, because many change in every step, such as a step count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from seqpar.core.reach import is_of_library, used_by
from seqpar.core.structures import attributes_of, dict_of, slot_names

Found = TypeVar("Found")

SETTINGS = (bool, str, NoneType, Enum, torch.dtype, torch.device)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
CONTAINERS = (dict, list, tuple, set, frozenset)
OTHERS = (Tensor, nn.Module, ModuleType)
"""What is inspected elsewhere, or through the names that code uses."""
MOST_ENTRIES = 64
"""How many entries of a container are inspected: a longer one is data."""
MOST_HELD = 256
"""How many attributes and entries in one object, or values that a function uses, are inspected."""
DEEPEST = 2
"""How deeply nested objects are inspected."""
OF_TORCH = (vars(nn.Module()).keys() | {"_is_replica", "_flat_weights", "_flat_weight_refs"}) - {"training"}
"""What torch itself keeps in a module, except its mode, and what a replica or an RNN renews with its parameters."""

SETTING, FUNCTION, HOLDER = "a setting", "a function", "a holder of settings"


class _ByClass(dict[type, Found]):
    """What a function returns for each class: a dict, as a call looks up thousands."""

    def __init__(self, find: Callable[[type], Found]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, kind: type) -> Found:
        """Determine and store the answer for a class that is looked up for the first time."""
        return self.setdefault(kind, self._find(kind))


def _role_of(kind: type) -> str:
    """Return the role of attributes of a class, "" for none of the three."""
    if issubclass(kind, SETTINGS):
        return SETTING
    if issubclass(kind, FUNCTIONS) or _is_function(kind):
        return FUNCTION
    if issubclass(kind, CONTAINERS) or (_has_attributes(kind) and not issubclass(kind, OTHERS)):
        return HOLDER
    return ""


def _own_classes_of(kind: type) -> list[type]:
    """Return a class and its base classes, without Python's own and those of libraries."""
    return [base for base in kind.__mro__ if base.__module__ != "builtins" and not is_of_library(base)]


ROLES = _ByClass(_role_of)
OWN_CLASSES = _ByClass(_own_classes_of)
_SLOTS = _ByClass(slot_names)


def _is_function(kind: type) -> bool:
    """Return whether objects of a class, such as a partial, can be called and are equal only to themselves."""
    if issubclass(kind, OTHERS) or kind.__eq__ is not object.__eq__ or not kind.__weakrefoffset__:
        return False
    return any("__call__" in vars(base) for base in kind.__mro__)


def _has_attributes(kind: type) -> bool:
    """Return whether objects of a class have attributes of their own."""
    return bool(kind.__dictoffset__) or any("__slots__" in vars(base) for base in kind.__mro__)


def noted(name: object, value: Any, role: str) -> tuple[object, object]:
    """Return a setting or a function for comparison: a function, which may hold a batch, by a weak reference.

    Such a reference equals another one only while the function is alive.
    """
    return name, ref(value) if role is FUNCTION else value


def settings_of(holder: Any) -> Iterator[object]:
    """Yield the settings and functions that an object or a container holds, itself or in nested ones."""
    todo = deque([(holder, 1)])
    left = MOST_HELD
    while todo:
        holder, depth = todo.popleft()
        entries = _entries_of(holder)
        left -= len(entries)
        if left < 0:
            return
        for name, value in entries:
            role = ROLES[type(value)]
            if role is HOLDER:
                if depth < DEEPEST:
                    todo.append((value, depth + 1))
            elif role:
                yield noted(name, value, role)


def _entries_of(holder: Any) -> list[tuple[object, Any]]:
    """Return what an object or a container holds, by name or position; nothing for a container that is data."""
    if not isinstance(holder, CONTAINERS):
        # In the quickest way, because it runs in every call
        own = attributes_of(holder) if _SLOTS[type(holder)] else dict_of(holder)
        return [*own.items()] if own else []
    if len(holder) > MOST_ENTRIES:
        return []
    if isinstance(holder, dict):
        return [*holder.items()]
    if isinstance(holder, (set, frozenset)):
        # A set has no order: its strings are sorted, and have no positions
        return [("", word) for word in sorted(word for word in holder if isinstance(word, str))]
    return [*enumerate(holder)]


def settings_of_class(kind: type) -> Iterator[object]:
    """Yield the settings and functions of a class and of its base classes, except those of libraries."""
    for base in OWN_CLASSES[kind]:
        for name, value in vars(base).items():
            role = ROLES[type(value)]
            if role and role is not HOLDER and not name.startswith("__"):
                yield noted(name, value, role)


def settings_used_by(function: Any) -> Iterator[object]:
    """Yield the settings in what a function uses: flags around it, objects, modules, and functions that it calls."""
    todo = deque([function])
    seen: set[int] = set()
    while todo and len(seen) < MOST_HELD:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inside = used_by(value)
        todo.extend(inside)
        if not inside:
            yield from _settings_within(value)
            todo.extend(_modules_in(value))


def _modules_in(value: Any) -> list[Any]:
    """Return the modules that an object or a container holds."""
    if isinstance(value, type) or ROLES[type(value)] is not HOLDER:
        return []
    return [held for _, held in _entries_of(value) if isinstance(held, nn.Module)]


def _settings_within(value: Any) -> Iterator[object]:
    """Yield the value if it is a setting, or the settings of an object, of a container or of a module and its parts."""
    if isinstance(value, SETTINGS):
        yield value
    elif isinstance(value, nn.Module):
        for module in value.modules():
            yield type(module)
            for name, held in vars(module).items():
                if name not in OF_TORCH and ROLES[type(held)] is SETTING:
                    yield name, held
    elif ROLES[type(value)] is HOLDER and not isinstance(value, type):
        yield from settings_of(value)
        yield from settings_of_class(type(value))
