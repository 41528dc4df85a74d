"""Flatten and rebuild nested containers of tensors: dict, list, tuple, NamedTuple, dataclass."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound=tuple[Any, ...])


def each(function: Callable[[Tensor], Tensor], record: Record) -> Record:
    """Return a NamedTuple of tensors with the function applied to each; a field that is None stays None."""
    kind: Any = type(record)
    made: Record = kind(*(None if t is None else function(t) for t in record))
    return made


def leaves(structure: object) -> Iterator[object]:
    """Yield everything in the structure that is not a container, in a fixed order."""
    for child in _children(structure):
        # `_children` yields a leaf itself
        if child is structure:
            yield structure
        else:
            yield from leaves(child)


def rebuild(structure: object, values: Iterator[object]) -> Any:
    """Return a copy of the structure with its leaves taken, in order, from `values`."""
    if isinstance(structure, PackedSequence):
        raise TypeError("a PackedSequence cannot be cut by rows; pass the padded batch and its lengths instead")
    if isinstance(structure, Mapping):
        # A copy instead of a call of its class, so that a BatchEncoding or an OrderedDict stays one
        made = copy.copy(structure)
        for key in structure:
            made[key] = rebuild(structure[key], values)  # type: ignore[index]
        return made
    # A NamedTuple takes its values as arguments, a plain tuple takes one iterable
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(rebuild(child, values) for child in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(rebuild(child, values) for child in structure)
    if _is_dataclass(structure):
        record = copy.copy(structure)
        for field in dataclasses.fields(structure):
            # Plain assignment would raise on a frozen dataclass
            object.__setattr__(record, field.name, rebuild(getattr(structure, field.name), values))
        return record
    return next(values)


def map_tensors(function: Callable[[Tensor], Tensor], structure: object) -> Any:
    """Return the structure with `function` applied to each tensor and everything else unchanged."""
    mapped = []
    for leaf in leaves(structure):
        if isinstance(leaf, Tensor):
            leaf = function(leaf)
        mapped.append(leaf)
    return rebuild(structure, iter(mapped))


def has_in_class(value: object, name: str) -> bool:
    """Return whether the class of a value has an attribute; unlike `hasattr`, without calling the value's own code.

    A configuration whose `__getattr__` is `dict.get` would have every attribute, each of them None.
    """
    return any(name in vars(kind) for kind in type(value).__mro__)


def attributes_of(value: object) -> dict[str, Any]:
    """Return an object's attributes; an empty dict if it has none, such as a number."""
    return {**(dict_of(value) or {}), **slots_of(value)}


def dict_of(value: object) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; None if it has none."""
    try:
        # Not `__getattr__`, which might make one up
        own = type(value).__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def slots_of(value: object) -> dict[str, Any]:
    """Return the attributes that an object holds in `__slots__`."""
    found = {}
    for name in slot_names(type(value)):
        # Not by `getattr`, which for an unset one would call `__getattr__`
        slot = inspect.getattr_static(type(value), name)
        if isinstance(slot, MemberDescriptorType):
            with contextlib.suppress(AttributeError):
                found[name] = slot.__get__(value, type(value))
    return found


def slot_names(kind: type) -> list[str]:
    """Return the names in the `__slots__` of a class and its bases, such as those of a dataclass with slots."""
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for each in named for name in ([each] if isinstance(each, str) else each) if name[:2] != "__"]


def copy_containers(structure: object) -> Any:
    """Return a copy of the containers with the same leaves: what is taken out of the copy stays in the original."""
    if isinstance(structure, (list, MutableMapping)):
        keys = range(len(structure)) if isinstance(structure, list) else list(structure)
        children = [copy_containers(structure[key]) for key in keys]
        try:
            made: Any = copy.copy(structure)
            for key, child in zip(keys, children, strict=True):
                made[key] = child
        except TypeError:  # a frozen container, out of which nothing can be taken
            return structure
        return made
    if isinstance(structure, tuple):
        children = [copy_containers(child) for child in structure]
        if all(new is old for new, old in zip(children, structure, strict=True)):
            return structure
        return type(structure)(*children) if hasattr(structure, "_fields") else type(structure)(children)
    if _is_dataclass(structure):
        made = copy.copy(structure)
        for field in dataclasses.fields(structure):
            object.__setattr__(made, field.name, copy_containers(getattr(structure, field.name)))
        return made
    return structure


def describe(structure: object) -> str:
    """Return the nesting of the containers as text, for error messages; a leaf is the name of its type."""
    if isinstance(structure, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in structure.items()) + "}"
    if isinstance(structure, (list, tuple)):
        return f"{type(structure).__name__}[" + ", ".join(describe(v) for v in structure) + "]"
    return type(structure).__name__


def _is_dataclass(structure: object) -> TypeGuard[DataclassInstance]:
    """Return whether the structure is an instance of a dataclass; `is_dataclass` is true of the class, too."""
    return has_in_class(structure, "__dataclass_fields__")


def _children(structure: object) -> Iterator[object]:
    """Yield the direct contents of a container, and anything else itself."""
    if isinstance(structure, Mapping):
        yield from structure.values()
    elif isinstance(structure, (list, tuple)):
        yield from structure
    elif _is_dataclass(structure):
        yield from (getattr(structure, field.name) for field in dataclasses.fields(structure))
    else:
        yield structure
