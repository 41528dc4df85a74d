"""Find out what calls of modules change besides their result, and restore it.

A pair is called on copies, once for each chunk, so what it keeps between calls would depend on the chunks, or be lost.
What modules hold is compared by value: numbers, tensors, containers and the attributes of other objects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
import sys
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.checks import is_dense
from seqpar.core.device_facts import accelerators_among
from seqpar.core.graphs import version_of
from seqpar.core.reach import is_of_library
from seqpar.core.settings import OF_TORCH
from seqpar.core.structures import attributes_of, dict_of, has_in_class, slots_of

OF_A_COPY = {"_parameters", "_buffers", "_modules", "_is_replica"}
"""The attributes of which a structural copy has its own."""

UNLOOKED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Parameter)
"""What is compared by identity and not inspected further."""

PLAIN = (int, float, complex, str, bytes, type(None))

MOST_OBJECTS = 2_000
"""How many objects are inspected: a module may hold its trainer, and through it everything."""

DEEPEST = 50
"""How deeply nested objects are inspected, such as the members of a linked list: Python allows 1,000 nested calls."""

MOST_NUMBERS = 2**24
"""How many numbers of tensors are copied: a module may hold an optimizer's state."""


KEEPS_A_GRAPH = (
    "holds a tensor with a graph after a call, which would be one chunk's, on a copy: add it to the loss that the "
    "criterion returns, compute it beside the engine, or detach it where it is only looked at"
)


@dataclass(eq=False)
class Graph:
    """A tensor that a module holds with its graph, and its numbers: a copy, unless there are too many."""

    tensor: Tensor
    numbers: Tensor


class Held:
    """What modules currently hold in attributes that are neither parameters nor buffers nor modules.

    Args:
        heads: modules of the same structure, such as a copy and its original: a method that was set on the original
            instance changes the original even if the copy is called.
    """

    def __init__(self, *heads: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.undo: list[Callable[[], None]] = []
        self.generators: list[Any] = []
        # With the values themselves, because the id of a freed value may be reused. Submodules that an attribute holds
        # as well are inspected only as submodules: FSDP2 replaces their parameters
        self._seen: dict[int, tuple[object, object]] = {
            id(module): (module, type(module)) for head in heads for module in head.modules()
        }
        self._numbers = 0
        self._depth = 0
        self.values: dict[tuple[str, int], object] = {}
        for i, head in enumerate(heads):
            for owner, module in head.named_modules():
                own = vars(module)
                self._keep(own, dict, own.update)
                for name in own:
                    if name not in OF_TORCH:
                        self.values[f"{owner}.{name}".lstrip("."), i] = self._look(own[name])

    def _look(self, value: Any) -> object:
        """Return a copy of a value's contents, and remember how to restore what can be changed in place."""
        if type(value) in weakref.ProxyTypes:
            return id(value)
        if isinstance(value, (*UNLOOKED, *PLAIN)) or len(self._seen) > MOST_OBJECTS or self._depth > DEEPEST:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if isinstance(value, Tensor):
            looked = self._look_at_tensor(value)
            self._seen[id(value)] = value, looked
            return looked
        # Before its items, which may lead back to it
        self._seen[id(value)] = value, type(value)
        if isinstance(value, (list, deque)):
            self._keep(value, list, value.extend)
            return type(value), *self._look_at_each(value)
        if isinstance(value, (dict, set)):
            # Not by the value's own `copy`, which a subclass may have changed
            self._keep(value, dict if isinstance(value, dict) else set, value.update)
            # Not its pairs, each of which would count as an object: a vocabulary has thousands
            items = (*value, *value.values()) if isinstance(value, dict) else value
            return type(value), *self._look_at_each(items)
        if isinstance(value, (tuple, frozenset)):
            return type(value), *self._look_at_each(value)
        if _random_state(value) is not None:
            self.generators.append(value)
            return type(value)
        if isinstance(value, (array, bytearray)) or (
            has_in_class(value, "__array_interface__") and has_in_class(value, "tobytes")
        ):
            return self._look_at_array(value)
        return self._look_at_object(value)

    def _look_at_each(self, values: Iterable[Any]) -> tuple[object, ...]:
        self._depth += 1
        found = tuple(map(self._look, values))
        self._depth -= 1
        return found

    def _look_at_array(self, value: Any) -> object:
        """Return the contents of a numpy or Python array, or of a numpy scalar."""
        old = copy.copy(value)
        numbers = _bytes_of(value)

        def put_back() -> None:
            # Only if it has changed: some are read-only
            if _bytes_of(value) != numbers:
                value[... if has_in_class(value, "__array_interface__") else slice(None)] = old

        self.undo.append(put_back)
        return type(value), getattr(value, "shape", len(numbers)), numbers

    def _look_at_variable(self, variable: ContextVar[Any]) -> object:
        """Return a copy of a context variable's value, if it has one."""
        try:
            old = variable.get()
        except LookupError:
            return type(variable)

        def put_back() -> None:
            if variable.get() is not old:
                variable.set(old)

        self.undo.append(put_back)
        return type(variable), *self._look_at_each([old])

    def _look_at_object(self, value: Any) -> object:
        """Return a copy of an object's attributes; the object itself if it has none, such as a number."""
        if isinstance(value, ContextVar):
            return self._look_at_variable(value)
        if isinstance(value, functools.partial):
            return type(value), *self._look_at_each((value.func, value.args, value.keywords))
        # What libraries such as FSDP2 keep in a module is not the pair's, and their tensors may have no memory
        if is_of_library(type(value)) and not isinstance(value, (nn.Module, UserDict, UserList, ChainMap)):
            return value
        own = dict_of(value)
        slots = slots_of(value)
        if own is None and not slots:
            return value
        if own is not None:
            self._keep(own, dict, own.update)
        self.undo += [functools.partial(object.__setattr__, value, name, old) for name, old in slots.items()]
        attributes = attributes_of(value)
        return type(value), *self._look_at_each((*attributes, *attributes.values()))

    def _look_at_tensor(self, tensor: Tensor) -> object:
        self._numbers += tensor.numel()
        if not is_dense(tensor) or not tensor.untyped_storage().size():
            return id(tensor)
        is_copied = self._numbers <= MOST_NUMBERS
        numbers = tensor.detach().clone() if is_copied else tensor.detach()
        if tensor.grad_fn is not None:
            return Graph(tensor, numbers)
        if not is_copied:
            return id(tensor)
        version = version_of(tensor)
        if not tensor.is_inference():
            self.tensors.append(tensor)

        def put_back() -> None:
            # An inference tensor does not count its changes, and can be changed in inference mode only
            if version_of(tensor) != version or tensor.is_inference():
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(numbers)

        self.undo.append(put_back)
        return numbers

    def _keep(self, value: Any, copied: Callable[[Any], Any], fill: Callable[[Any], object]) -> None:
        """Remember to restore a container if its items have changed by then; what was opened since stays in it."""
        old = copied(value)
        # Held here as well, because the dict of an object's attributes may be freed, too
        self._seen[id(value)] = value, type(value)

        def put_back() -> None:
            if not _is_unchanged(value, old):
                opened = _opened_since(value, old)
                value.clear()
                fill(old)
                fill(opened)

        self.undo.append(put_back)

    @contextlib.contextmanager
    def keep_state(self, device: torch.device) -> Iterator[None]:
        """Restore, after the block, what the modules held and all random states."""
        versions = torch.autograd._unsafe_preserve_version_counter(tuple(self.tensors))  # type: ignore[attr-defined]
        with keep_random_states(device, self.generators), versions:
            try:
                yield
            finally:
                for put_back in self.undo:
                    put_back()

    def changed_names(self, other: Held) -> list[str]:
        """Return the names of the attributes that differ from those of another time, or that only one time has."""
        names = {**self.values, **other.values}
        missing = object()
        return [n for n, i in names if not is_same(self.values.get((n, i), missing), other.values.get((n, i), missing))]


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of an array: unlike its numbers, each of them equals itself."""
    return bytes(value) if isinstance(value, bytearray) else value.tobytes()


def _is_unchanged(value: Any, old: Any) -> bool:
    """Return whether a container has exactly the items that it had, in the same order."""
    if isinstance(value, dict):
        return _are_the_same(value, old) and _are_the_same(value.values(), old.values())
    if isinstance(value, (list, deque)):
        return _are_the_same(value, old)
    return isinstance(value, set) and value == old


def _opened_since(value: Any, old: Any) -> Any:
    """Return the new items that are open, such as a file or a tracker's run: opened again, there would be two.

    An item that has replaced an open one is not returned.
    """
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if old.get(name) is None and is_open(item)}
    if any(is_open(other) and not any(item is other for item in value) for other in old):
        return []
    return [item for item in value if is_open(item) and not any(item is other for other in old)]


def is_open(value: Any) -> bool:
    """Return whether a value must be closed by its owner; a generator has a `close`, too, but is not opened."""
    return has_in_class(value, "close") and not isinstance(value, GeneratorType)


def _are_the_same(values: Collection[Any], old: Collection[Any]) -> bool:
    return len(values) == len(old) and all(map(operator.is_, values, old))


def is_same(a: object, b: object) -> bool:
    """Return whether two values are the same, by contents; nan is the same as nan."""
    if isinstance(a, Graph) or isinstance(b, Graph):
        return isinstance(a, Graph) and isinstance(b, Graph) and is_same(a.numbers, b.numbers)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        return a is b or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if a is b or type(a) is not type(b):
        return a is b
    with contextlib.suppress(Exception):
        return bool(a == b) or (a != a and b != b)
    return True


@contextlib.contextmanager
def keep_random_states(device: torch.device, generators: list[Any]) -> Iterator[None]:
    """Restore, after the block, the random states of torch, Python, numpy if it is loaded, and these generators."""
    numpy = sys.modules.get("numpy.random")
    sources = [(random.getstate, random.setstate), *filter(None, map(_random_state, generators))]
    if numpy is not None:
        sources.append((numpy.get_state, numpy.set_state))
    before = [read() for read, _ in sources]
    try:
        with torch.random.fork_rng(accelerators_among([device]), device_type=device.type):
            yield
    finally:
        for (_, write), state in zip(sources, before, strict=True):
            write(state)


def _random_state(source: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and set the state of a random number generator; None for anything else."""
    if isinstance(source, torch.Generator) or type(source).__name__ == "RandomState":
        return source.get_state, source.set_state
    # The system's generator has no state
    if isinstance(source, random.Random) and not isinstance(source, random.SystemRandom):
        return source.getstate, source.setstate
    # numpy's Generator, without importing numpy
    if has_in_class(source, "bit_generator"):
        bits = source.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def named_values(kind: type, held: Held) -> Iterator[tuple[str, Any]]:
    """Yield the values of a class, held directly or in a container, each with the name under which it is held."""
    for (name, _), value in held.values.items():
        todo = [value]
        while todo:
            each = todo.pop()
            if isinstance(each, kind):
                yield name, each
            elif isinstance(each, tuple):
                todo += each


def names_of_new_graphs(before: Held, after: Held) -> list[str]:
    """Return the names under which there is a tensor with a graph that was not there before."""
    there = {id(graph.tensor) for _, graph in named_values(Graph, before)}
    return [name for name, graph in named_values(Graph, after) if id(graph.tensor) not in there]
