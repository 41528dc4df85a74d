"""Find what calls of a pair change outside its modules: globals, attributes of classes and functions, closures.

A number there may count calls without harm as long as no result depends on it; if one does, it would depend on the
chunks. A tensor that is left there with a graph, such as an auxiliary loss, would be one chunk's.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from seqpar.core.device_facts import is_on_host
from seqpar.core.graphs import version_of
from seqpar.core.reach import Place, function_in, is_of_library, places_used_by
from seqpar.core.structures import has_in_class
from seqpar.engine.effects import (
    KEEPS_A_GRAPH,
    OF_TORCH,
    PLAIN,
    Held,
    is_open,
    is_same,
    named_values,
    names_of_new_graphs,
)
from seqpar.engine.module_calls import HOOKS, OF_ALL
from seqpar.engine.trial import REPEATS, Outcome, Trial

MOST_FUNCTIONS = 200
"""How many functions are looked into: one may reach a whole program."""

MOST_OF_A_TABLE = 2**16
"""How many numbers a tensor may have that is put back: a data set is larger."""


class Surroundings(Held):
    """What stands under the names that the code of modules uses, as it is now."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.first: Surroundings | None = None
        """The same after the first call, once that has been looked at."""
        self.places: list[Place] = []
        self._of_name: Counter[str] = Counter()
        self._todo: deque[Any] = deque(_code_of(head))
        for place in _hooks_of(head):
            self._add(place)
        seen: set[object] = set()
        while self._todo and len(seen) < MOST_FUNCTIONS:
            code = self._todo.popleft()
            if code in seen or is_of_library(code):
                continue
            seen.add(code)
            self._take_away_later(code)
            for place in _places_of(code):
                self._add(place)

    def _add(self, place: Place) -> None:
        self.places.append(place)
        # Of several functions of one name each has its own
        self.values[place.name, self._of_name[place.name]] = self._look(place.value)
        self._of_name[place.name] += 1

    def _take_away_later(self, code: Any) -> None:
        """Remember to take away what a function or class gets in attributes that it does not have."""
        own = {*vars(code)}

        def put_back() -> None:
            for name in vars(code).keys() - own:
                if not is_open(vars(code)[name]):
                    delattr(code, name)

        self.undo.append(put_back)

    def _look(self, value: Any) -> object:
        if type(value) in weakref.ProxyTypes:
            return id(value)
        if isinstance(value, MethodType):
            return self._look((value.__func__, value.__self__))
        if code := value if isinstance(value, type) else function_in(value):
            self._todo.append(code)
        else:
            self._todo += _own_classes(value)
        # Too much hangs on a model, unlike a metric, which has no parameters; and the numbers of a data set are many
        is_model = isinstance(value, nn.Module) and next(value.parameters(), None) is not None
        if is_model or (has_in_class(value, "__array_interface__") and getattr(value, "size", 0) > MOST_OF_A_TABLE):
            return type(value)
        return super()._look(value)

    def _look_at_tensor(self, tensor: Tensor) -> object:
        # Not the numbers of a data set
        if tensor.grad_fn is None and tensor.numel() > MOST_OF_A_TABLE:
            return id(tensor), version_of(tensor)
        return super()._look_at_tensor(tensor)

    def put_back(self, *, keeps_made: bool = False) -> None:
        """Let names stand for what they stood for, and containers hold what they held.

        Args:
            keeps_made: whether a name that stood for None keeps what a call has made, such as an open file or a model;
                but not what calls add to, such as a number, a list or an iterator.
        """
        made = [place.value is None and not isinstance(place.read(), (*PLAIN, Tensor)) for place in self.places]
        now = Surroundings(self.head) if keeps_made and any(made) else None
        for place, key, is_made in zip(self.places, self.values, made, strict=True):
            if not (is_made and now is not None and self._stays(place.read(), key, now)):
                place.write(place.value)
        for undo in self.undo:
            undo()

    def _stays(self, made: Any, key: tuple[str, int], now: Surroundings) -> bool:
        """Return whether what a call has made is open, or has not changed since the first call."""
        inside: Collection[Any] = made if isinstance(made, (list, tuple, set, deque)) else ()
        if isinstance(made, dict):
            inside = made.values()
        if any(map(is_open, (made, *inside))):
            return True
        if isinstance(made, Iterator) or self.first is None:
            return False
        missing = object()
        return is_same(self.first.values.get(key, missing), now.values.get(key))


def _code_of(head: nn.Module) -> Iterator[Any]:
    """Yield the classes of modules, and the functions and called objects that were set on them."""
    for module in head.modules():
        yield from _own_classes(module)
        own = [value for name, value in vars(module).items() if name not in OF_TORCH]
        yield from filter(None, map(function_in, own))
        for value in own:
            yield from _own_classes(value)


def _own_classes(value: Any) -> Iterator[type]:
    """Yield the classes of an object but for Python's own and those of libraries: its methods may be called."""
    return (kind for kind in type(value).__mro__ if kind.__module__ != "builtins" and not is_of_library(kind))


def _hooks_of(head: nn.Module) -> Iterator[Place]:
    """Yield the hooks of modules, and of all modules: functions, methods, or objects that are called."""
    of_one = ((owner, vars(module)[name]) for owner, module in head.named_modules() for name in HOOKS)
    of_all = (("all modules", hooks) for _, hooks in OF_ALL)
    for owner, hooks in (*of_one, *of_all):
        for hook in hooks.values():
            # Only what is in it can change
            yield Place(f"a hook of {owner}", hook, lambda value: None, lambda: None)


def _places_of(code: Any) -> Iterator[Place]:
    """Yield what a function uses, or the attributes of a class."""
    if isinstance(code, FunctionType):
        yield from places_used_by(code)
        return
    for name, value in list(vars(code).items()):
        if not name.startswith("__") or function_in(value):
            write = partial(_set_on_class, code, name, value)
            yield Place(f"{code.__name__}.{name}", value, write, partial(vars(code).get, name))


def _set_on_class(kind: type, name: str, old: object, value: object) -> None:
    """Set an attribute that has changed; some of a class cannot be set."""
    if vars(kind).get(name) is not old:
        setattr(kind, name, value)


def ask_about_surroundings(trial: Trial, before: Surroundings, harmless: Collection[str] = ()) -> list[str]:
    """Raise ValueError if results depend on what calls change outside the modules; else return what they change.

    Even a small dependence, such as that of smoothing annealed over many thousand calls: what changes it is put back,
    and then the results must be the same bit by bit. One that shows after more than `REPEATS` calls is not found.
    """
    here = Surroundings(trial.head)
    before.first = before.first or here
    changed = [name for name in before.changed_names(here) if name not in harmless]
    if not changed:
        return []
    # Results may be others in the first call alone; but what it has opened is not opened again
    before.put_back(keeps_made=True)
    first = _call(trial)
    later = ((number, _call(trial)) for number in range(1, REPEATS))
    number, other = next((found for found in later if first.difference(found[1])), (0, first))
    if other is first:
        return changed
    for _ in range(REPEATS):
        before.put_back(keeps_made=True)
        again = [_call(trial) for _ in range(number + 1)]
        if first.difference(again[0]) or other.difference(again[-1]):
            return changed
    # Of which some may have changed in backward alone
    names = " or ".join(before.changed_names(Surroundings(trial.head))[:3])
    raise ValueError(
        f"{names} changes with every call, and so do the results; the pair is called once for each chunk, so that "
        "they would depend on the chunks: change it outside, once a step"
    )


def ask_about_iterators(trial: Trial, before: Surroundings) -> None:
    """Raise ValueError if results change where the pair takes from an iterator, which cannot be put back."""
    names = [name for held in (trial.held, before) for name, _ in named_values(Iterator, held)]
    if not names:
        return
    try:
        first, *later = (_call(trial) for _ in range(1 + REPEATS))
    except Exception:  # the first call of the probe says what does not fit
        return
    # An accelerator may add in another order each time; on the CPU a small change in every call is the iterator's
    changes_a_little = is_on_host(trial.target_K) and all(map(first.difference, later))
    if changes_a_little or not all(map(first.is_same, later)):
        raise ValueError(
            f"{names[0]} is an iterator, and the results change from call to call; the pair is called once for each "
            "chunk, so that what is taken from it would depend on the chunks: take from it outside, once a step"
        )


def ask_about_graphs_left(trial: Trial, before: Surroundings) -> None:
    """Raise ValueError if calls have left a tensor with a graph outside the modules."""
    if left := names_of_new_graphs(before, Surroundings(trial.head)):
        before.put_back()
        raise ValueError(f"{left[0]} {KEEPS_A_GRAPH}")


def _call(trial: Trial) -> Outcome:
    """Return what a copy gives, always with the same random numbers."""
    with trial.keep_state():
        return trial.call(trial.copy())
