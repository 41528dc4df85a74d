"""Find out what calls change around the code they run: globals, attributes of classes and functions, closures.

A number there may count calls without harm as long as no result depends on it; a result that does would depend on the
chunks. A tensor that is left there with a graph, such as an auxiliary loss, would be one chunk's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import Any, TypeVar

from torch import Tensor, nn

from seqpar.core.effects import PLAIN, Held, is_open, is_same, named_values, names_of_new_graphs
from seqpar.core.graphs import version_of
from seqpar.core.reach import Place, function_in, is_of_library, places_used_by, read_only
from seqpar.core.settings import OWN_CLASSES
from seqpar.core.structures import has_in_class

Result = TypeVar("Result")

REPEATS = 16
"""How often the same rows must give the same result before code counts as deterministic."""

MOST_FUNCTIONS = 200
"""How many functions are inspected: one may reach a whole program."""

MOST_OF_A_TABLE = 2**16
"""How many numbers a tensor that is restored may have: a data set is larger."""


class Surroundings(Held):
    """The current values of the names that code uses.

    Args:
        used: returns functions and classes, and further places besides those that they use.
    """

    def __init__(self, used: Callable[[], tuple[Iterable[Any], Iterable[Place]]]) -> None:
        super().__init__()
        self.used = used
        self.first: Surroundings | None = None
        """The surroundings after the first call, once they have been inspected."""
        self.places: list[Place] = []
        self._of_name: Counter[str] = Counter()
        codes, places = used()
        self._todo: deque[Any] = deque(codes)
        for place in places:
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

    def now(self) -> Surroundings:
        """Return the surroundings as they are now."""
        return Surroundings(self.used)

    def _add(self, place: Place) -> None:
        self.places.append(place)
        # Functions with the same name each have their own values
        self.values[place.name, self._of_name[place.name]] = self._look(place.value)
        self._of_name[place.name] += 1

    def _take_away_later(self, code: Any) -> None:
        """Remember to remove the attributes that a function or class does not have yet."""
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
            # Whose methods may be called
            self._todo += OWN_CLASSES[type(value)]
        # Too much hangs on a model (a metric, without parameters, is inspected), and a data set has too many numbers
        is_model = isinstance(value, nn.Module) and next(value.parameters(), None) is not None
        if is_model or (has_in_class(value, "__array_interface__") and getattr(value, "size", 0) > MOST_OF_A_TABLE):
            return type(value)
        return super()._look(value)

    def _look_at_tensor(self, tensor: Tensor) -> object:
        # Without the numbers of a data set
        if tensor.grad_fn is None and tensor.numel() > MOST_OF_A_TABLE:
            return id(tensor), version_of(tensor)
        return super()._look_at_tensor(tensor)

    def put_back(self, *, keeps_made: bool = False) -> None:
        """Restore the values of names and the contents of containers.

        Args:
            keeps_made: whether a name whose value was None keeps what a call has made, such as an open file or a model,
                but not what calls add to, such as a number, a list or an iterator.
        """
        made = [place.value is None and not isinstance(place.read(), (*PLAIN, Tensor)) for place in self.places]
        now = self.now() if keeps_made and any(made) else None
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


ONE_CHUNKS = (
    "holds a tensor with a graph after a call, which would be one chunk's: add it to the loss that is returned, or "
    "detach it where it is only looked at"
)

MOST_ASKED = 256
"""How many functions are remembered."""


class Asked:
    """The functions that were tested, and whether they change what is around them."""

    def __init__(self) -> None:
        self._changes: dict[object, bool] = {}

    def changes(self, code: object) -> bool | None:
        """Return whether calls of a function change what is around it; None if it has not been tested."""
        return self._changes.get(code)

    def add(self, code: object, changes: bool) -> None:
        """Remember a function, by its `code_of` and other facts, until `MOST_ASKED` others have come after it."""
        for earliest in list(self._changes)[: 1 - MOST_ASKED]:
            self._changes.pop(earliest, None)
        self._changes[code] = changes


def code_of(function: Any) -> object:
    """Return what a function runs: its code, and the code of functions and the settings around it.

    Settings are flags and strings in a closure or among the defaults, the arguments of a partial, and an object that is
    called or whose method is called. Numbers and containers in a closure are left out, because they may be counts.
    """
    return _code_within(function, [])


def _code_within(value: Any, around: list[FunctionType]) -> object:
    """Return the code of a value in the closures of the functions `around`; the value may be one of these itself."""
    if isinstance(value, partial):
        given = (*value.args, *value.keywords.values())
        settings = [each if isinstance(each, (int, float)) else _code_within(each, around) for each in given]
        return _code_within(value.func, around), tuple(value.keywords), tuple(settings)
    if isinstance(value, MethodType):
        return _code_within(value.__func__, around), Identity(value.__self__)
    if isinstance(value, FunctionType):
        if any(value is each for each in around):
            return value.__code__
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inside = [_code_within(default, [*around, value]) for default in defaults]
        for cell in value.__closure__ or ():
            # A name that has no value yet
            with contextlib.suppress(ValueError):
                inside.append(_code_within(cell.cell_contents, [*around, value]))
        return value.__code__, tuple(inside)
    if isinstance(value, (bool, str, NoneType)):
        return value
    return Identity(value) if callable(value) else type(value)


class Identity:
    """A reference to an object that equals other references to it, and nothing once the object is gone."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._value = lambda: value
        # Not every object can be referenced weakly
        with contextlib.suppress(TypeError):
            self._value = weakref.ref(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._value() is other._value() is not None


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
    """Set an attribute of a class, but only if it has changed: some cannot be set."""
    if vars(kind).get(name) is not old:
        setattr(kind, name, value)


def refuse_iterators(
    what: str,
    call: Callable[[], Result],
    difference: Callable[[Result, Result], float],
    is_same: Callable[[Result, Result], bool],
    is_exact: bool,
    *held: Held,
) -> None:
    """Raise ValueError if there is an iterator, which cannot be rewound, and results change from call to call.

    Args:
        is_same: whether results are the same up to rounding.
        is_exact: whether they are the same bit by bit if nothing changes; an accelerator may add in a different order
            each time.
        held: where to look for iterators; the others are as in `ask_about_state_around`.
    """
    names = [name for one in held for name, _ in named_values(Iterator, one)]
    if not names:
        return
    try:
        first, *later = (call() for _ in range(1 + REPEATS))
    except Exception:  # a later check says what does not fit
        return
    # A change in every call, however small, is due to the iterator
    changes_a_little = is_exact and all(difference(first, other) for other in later)
    if changes_a_little or not all(is_same(first, other) for other in later):
        raise ValueError(
            f"{names[0]} is an iterator, and the results change from call to call; {what} is called once for each "
            "chunk, so that what is taken from it would depend on the chunks: take from it outside, once a step"
        )


def ask_about_function(
    name: str,
    call: Callable[[], Result],
    difference: Callable[[Result, Result], float],
    rounding: float,
    is_exact: bool,
    before: Surroundings,
) -> list[str]:
    """Raise ValueError if a function's results depend on an iterator or a state; else return what its calls change.

    Args:
        rounding: the largest difference of results that are the same; the others are as in `refuse_iterators`.
    """

    def is_same(one: Result, other: Result) -> bool:
        return difference(one, other) <= rounding

    refuse_iterators(name, call, difference, is_same, is_exact, before)
    return ask_about_state_around(name, call, difference, before)


def refuse_graphs_left(before: Surroundings, wrong: str) -> None:
    """Raise ValueError, with `wrong` as its text, if calls have left a tensor with a graph around them."""
    if left := names_of_new_graphs(before, before.now()):
        before.put_back()
        raise ValueError(f"{left[0]} {wrong}")


def surroundings_of_function(name: str, function: Any) -> Surroundings:
    """Return the current values of the names that a function, or an object that is called, uses."""
    return Surroundings(lambda: ((), [read_only(name, function)]))


def ask_about_state_around(
    what: str,
    call: Callable[[], Result],
    difference: Callable[[Result, Result], float],
    before: Surroundings,
    harmless: Collection[str] = (),
) -> list[str]:
    """Raise ValueError if results depend on what calls change around them; else return what they change.

    Even a small dependence is found, such as that on smoothing annealed over many thousand calls: results depend on
    what changes if restoring it gives the same series of results again, bit by bit. A dependence that shows only after
    more than `REPEATS` calls is not found.

    Args:
        what: the name of what is called.
        call: calls it, always with the same random numbers.
        difference: of two results; 0 if they are the same.
        before: its surroundings before the first call, which has already been made.
        harmless: names that an earlier check has returned.
    """
    here = before.now()
    before.first = before.first or here
    changed = [name for name in before.changed_names(here) if name not in harmless]
    if not changed:
        return []
    # Restored, because only the first call's results may differ; but what it has opened is not opened again
    before.put_back(keeps_made=True)
    first = call()
    later = ((number, call()) for number in range(1, REPEATS))
    number, other = next((found for found in later if difference(first, found[1])), (0, first))
    if other is first:
        return changed
    for _ in range(REPEATS):
        before.put_back(keeps_made=True)
        again = [call() for _ in range(number + 1)]
        if difference(first, again[0]) or difference(other, again[-1]):
            return changed
    # Compared anew, because some may have changed only in backward
    names = " or ".join(before.changed_names(before.now())[:3])
    raise ValueError(
        f"{names} changes with every call, and so do the results; {what} is called once for each chunk, so that "
        "they would depend on the chunks: change it outside, once a step"
    )
