"""What calls change around the code of a pair: refused where results depend on it, or where a graph is left there."""

from __future__ import annotations

import functools
import sys
import threading
import types
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar.engine.module_calls import surroundings_of
from tests.backward import with_gradient
from tests.seqpar.engine import pairs
from tests.seqpar.engine.pairs import Made, V, cross_entropy

NUMBER = 0
LEFT: list[Any] = []
BOX: Any = types.ModuleType("box")
BOX.calls = 0
Step = Callable[[], int]
"""Something that returns how often it was called."""


def smoothed(z: Tensor, y: Tensor, calls: int) -> Tensor:
    """Annealed over 50,000 calls: a step changes a float32 loss by a few of its roundings."""
    return F.cross_entropy(z, y, reduction="sum", label_smoothing=min(0.5, calls / 100_000))


def counter() -> Step:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def of_entry(held: Any, key: Any = 0) -> Step:
    def step() -> int:
        held[key] += 1
        return int(held[key])

    return step


def of_attribute(owner: Any) -> Step:
    def step() -> int:
        owner.calls += 1
        return int(owner.calls)

    return step


def with_calls(owner: Any) -> Any:
    owner.calls = 0
    return owner


def add_to(calls: dict[str, int]) -> int:
    calls["n"] += 1
    return calls["n"]


def in_a_global() -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER


def in_a_name_as_text() -> int:
    globals()["NUMBER"] += 1
    return int(globals()["NUMBER"])


def in_a_module() -> int:
    BOX.calls += 1
    return int(BOX.calls)


def in_an_attribute_as_text() -> int:
    setattr(BOX, "calls", getattr(BOX, "calls") + 1)  # noqa: B009, B010
    return int(getattr(BOX, "calls"))  # noqa: B009


def in_a_module_that_is_imported_here() -> int:
    import box  # type: ignore[import-not-found]

    box.calls += 1
    return int(box.calls)


def in_a_loaded_module() -> int:
    sys.modules["box"].calls += 1
    return int(sys.modules["box"].calls)


def in_functions() -> int:
    def outer() -> int:
        def inner() -> int:
            BOX.calls += 1
            return int(BOX.calls)

        return inner()

    return outer()


def of_the_first_call() -> Step:
    is_first = True

    def step() -> int:
        nonlocal is_first
        calls, is_first = 0 if is_first else 1, False
        return calls

    return step


def of_a_default() -> Step:
    def step(calls: list[int] = [0]) -> int:  # noqa: B006
        calls[0] += 1
        return calls[0]

    return step


def of_a_default_of_a_keyword() -> Step:
    def step(*, calls: list[int] = [0]) -> int:  # noqa: B006
        calls[0] += 1
        return calls[0]

    return step


def of_a_function() -> Step:
    def step() -> int:
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return int(step.calls)  # type: ignore[attr-defined]

    return step


def of_a_class() -> Step:
    class Schedule:
        calls = 0

        @classmethod
        def step(cls) -> int:
            cls.calls += 1
            return cls.calls

    return lambda: Schedule.step()


def of_a_tensor() -> Step:
    calls = torch.zeros(())
    return lambda: int(calls.add_(1))


def of_a_set() -> Step:
    calls: set[int] = set()
    return lambda: calls.add(len(calls)) or len(calls)


def of_a_context_variable() -> Step:
    calls: ContextVar[int] = ContextVar("calls", default=0)
    return lambda: (calls.set(calls.get() + 1), calls.get())[1]


def of_one_of_two_names() -> Step:
    """Two closures whose functions and names are the same, of which the first counts."""
    first, second = counter(), counter()
    second()
    return lambda: first() if first else second()


def of_the_last_of_many() -> Step:
    """A function that is reached through twenty others."""
    called = counter()
    for _ in range(20):
        called = functools.partial(lambda inner: inner(), called)
    return called


def multiplied(count: Step, factor: int | Fraction) -> Step:
    return lambda: int(factor * count())


def of_a_method_that_is_a_closure() -> Step:
    count = counter()
    return type("Schedule", (), {"step": lambda self: count()})().step  # type: ignore[no-any-return]


class Schedule:
    """An object that counts, in attributes, when it or its method is called."""

    def __init__(self) -> None:
        self.name, self.most, self.calls, self.at = "linear", 0.1, 0, {"warmup": 4, "calls": 0}

    def step(self) -> int:
        self.calls += 1
        return self.calls

    def __call__(self) -> int:
        self.at["calls"] += 1
        return self.at["calls"]


class Counted:
    """What gives its class's number of calls, or that of a global, by a method or a descriptor."""

    calls = 0

    def __get__(self, owner: Any, kind: type) -> int:
        Counted.calls += 1
        return Counted.calls

    def step(self) -> int:
        return in_a_module()


class Described:
    """It has one as an attribute."""

    calls = Counted()


def of_a_method() -> Step:
    counted = Counted()
    return lambda: counted.step()


def of_a_descriptor() -> Step:
    described = Described()
    return lambda: described.calls


def of_an_attribute_beside_slots() -> Step:
    class Slotted:
        __slots__ = ("kind",)

    class Config(Slotted):
        def __init__(self) -> None:
            self.kind, self.calls = "linear", 0

    config = Config()
    return lambda: setattr(config, "calls", config.calls + 1) or config.calls


STEPS: dict[str, tuple[Callable[[], Step], str]] = {
    "a global": (lambda: in_a_global, "the global NUMBER"),
    "a global whose name is a text": (lambda: in_a_name_as_text, "the global NUMBER"),
    "a module": (lambda: in_a_module, "BOX.calls"),
    "an attribute whose name is a text": (lambda: in_an_attribute_as_text, "BOX.calls"),
    "an import of the function's own": (lambda: in_a_module_that_is_imported_here, "box.calls"),
    "a loaded module": (lambda: in_a_loaded_module, "box.calls"),
    "a module in a closure": (lambda: of_attribute(with_calls(types.ModuleType("box"))), "owner.calls"),
    "a function in functions": (lambda: in_functions, "BOX.calls"),
    "a closure that no longer changes the loss after ten calls": (
        lambda: multiplied(counter(), 5_000),
        "calls in the closure of count",
    ),
    "the first call": (of_the_first_call, "is_first in the closure of step"),
    "every thirteenth call": (
        lambda: (lambda count: lambda: count() // 13)(counter()),
        "calls in the closure of count",
    ),
    "a default": (of_a_default, "a default of step"),
    "a default of a keyword": (of_a_default_of_a_keyword, "a default of step"),
    "an attribute of a function": (of_a_function, "step.calls"),
    "a class": (of_a_class, "Schedule.calls"),
    "a tensor": (of_a_tensor, "calls in the closure of <lambda>"),
    "a set": (of_a_set, "calls in the closure of <lambda>"),
    "a context variable": (of_a_context_variable, "calls in the closure of <lambda>"),
    "an array": (lambda: of_entry(array("q", [0])), "held in the closure of step"),
    "a thread's own": (lambda: of_attribute(with_calls(threading.local())), "owner in the closure of step"),
    "one of two names": (of_one_of_two_names, "calls in the closure of count"),
    "the last of many functions": (of_the_last_of_many, "calls in the closure of count"),
    "a wrapper": (lambda: functools.lru_cache(maxsize=0)(counter()), "calls in the closure of count"),
    "a partial": (lambda: functools.partial(add_to, {"n": 0}), "step in the closure of <lambda>"),
    "a keyword of a partial": (lambda: functools.partial(add_to, calls={"n": 0}), "step in the closure of <lambda>"),
    "a method": (lambda: Schedule().step, "step in the closure of <lambda>"),
    "a method in a partial": (lambda: functools.partial(Schedule().step), "step in the closure of <lambda>"),
    "an object": (Schedule, "step in the closure of <lambda>"),
    "a method of an object that counts in a module": (of_a_method, "BOX.calls"),
    "a method that is a closure": (of_a_method_that_is_a_closure, "calls in the closure of count"),
    "a descriptor": (of_a_descriptor, "Counted.calls"),
    "an attribute beside slots": (of_an_attribute_beside_slots, "config in the closure of <lambda>"),
}
"""By where a function that the criterion's own calls has its count, and how that is named."""


def annealed(step: Step) -> nn.Module:
    return Made(lambda self, z, y: smoothed(z, y, step()))


def of_a_closure() -> nn.Module:
    calls = 0

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return smoothed(z, y, calls)

    return Made(function)


def of_a_partial() -> nn.Module:
    def function(calls: dict[str, int], self: Any, z: Tensor, y: Tensor) -> Tensor:
        return smoothed(z, y, add_to(calls))

    return Made(functools.partial(function, {"n": 0}))


def of_its_class() -> nn.Module:
    class Annealed(nn.Module):
        _calls = 0

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            type(self)._calls += 1
            return smoothed(z, y, self._calls)

    return Annealed()


def of_slots() -> nn.Module:
    class Slotted:
        __slots__ = "calls"

    @dataclass(slots=True)
    class Config(Slotted):
        other: int = 0

    return Made(lambda self, z, y: smoothed(z, y, of_attribute(self.config)()), config=with_calls(Config()))


def of_a_backward() -> nn.Module:
    calls = [0]

    def drifting(grad: Tensor) -> Tensor:
        """A millionth larger in every backward."""
        calls[0] += 1
        return grad * (1 + 1e-6 * calls[0])

    return Made(lambda self, z, y: cross_entropy(with_gradient(z, drifting), y))


def of_a_late_parameter() -> nn.Module:
    """A parameter that later calls use has a gradient, and changes no number."""
    count = counter()

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        late = self.linear.bias if count() > 6 else z.detach()
        return smoothed(z, y, 0) + (late - late.detach()).sum()

    return Made(function, linear=nn.Linear(4, V))


def of_a_hook(kind: str) -> Any:
    """A count in the closure of a hook, of the kind that torch registers under that name."""

    def made() -> nn.Module:
        calls, harmless = 0, counter()

        def hook(module: nn.Module, *given: Any) -> Any:
            nonlocal calls
            calls += 1
            changed = given[0 if kind == "full_backward_hook" else -1]
            if isinstance(changed, Tensor):
                return changed * (1 + calls / 100_000)
            # Of targets there is no gradient, and they are no numbers
            return tuple(t * (1 + calls / 100_000) if t is not None and t.is_floating_point() else t for t in changed)

        # Beside a count without harm
        module = Made(lambda self, z, y: cross_entropy(z, y) + 0 * harmless())
        getattr(module, f"register_{kind}")(hook)
        return module

    return made


class Monitor:
    """A hook that is an object, or has one: it multiplies what it is given."""

    everywhere = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        self.calls += 1
        return returned * (1 + self.calls / 100_000)

    def counted_by_the_class(self, module: nn.Module, given: Any, returned: Tensor) -> Tensor:
        Monitor.everywhere += 1
        return returned * (1 + Monitor.everywhere / 100_000)


class WithSlots(Monitor):
    """One whose attributes its class has named."""

    __slots__ = ("calls",)


class ByTheClass(Monitor):
    """One whose class counts."""

    __call__ = Monitor.counted_by_the_class


class Wrapping:
    """What calls something else."""

    def __init__(self, function: Any) -> None:
        self.func = function

    def __call__(self, *given: Any) -> Any:
        return self.func(*given)


def with_hook(hook: Any) -> nn.Module:
    module = Made(lambda self, z, y: cross_entropy(z, y))
    module.register_forward_hook(hook)
    return module


def of_forward(reach: Any) -> Callable[[], nn.Module]:
    """A criterion made from a forward whose closure has a count."""

    def made() -> nn.Module:
        count = counter()
        return reach(lambda self, z, y: smoothed(z, y, count()))  # type: ignore[no-any-return]

    return made


def of_a_property() -> nn.Module:
    count = counter()
    forward = lambda self, z, y: smoothed(z, y, self.calls)  # noqa: E731
    return type("Asked", (nn.Module,), {"calls": property(lambda self: count()), "forward": forward})()


def changed_by(change: Callable[[int, Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    """A criterion whose loss changes by a function of the number of calls, the scores and the targets."""

    def made() -> nn.Module:
        count = counter()
        return Made(lambda self, z, y: smoothed(z, y, 0) + change(count(), z, y))

    return made


IN_COUNT, IN_HOOK = "calls in the closure of count", "calls in the closure of hook"
PAIRS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a closure of the criterion's function": (of_a_closure, "calls in the closure of function"),
    "a partial that is the criterion's function": (of_a_partial, "criterion.function"),
    "the criterion's class": (of_its_class, "Annealed._calls"),
    "an array of its own": (
        lambda: Made(lambda self, z, y: smoothed(z, y, of_entry(self.calls)()), calls=bytearray(1)),
        "criterion.calls",
    ),
    "slots": (of_slots, "criterion.config"),
    "a backward": (of_a_backward, "calls in the closure of drifting"),
    "the forward of a base": (
        of_forward(lambda f: type("Derived", (type("Base", (nn.Module,), {"forward": f}),), {})()),
        IN_COUNT,
    ),
    "its call": (of_forward(lambda f: type("Called", (nn.Module,), {"__call__": f})()), IN_COUNT),
    "a part": (
        of_forward(
            lambda f: Made(lambda self, z, y: self.part(z, y), part=type("Part", (nn.Module,), {"forward": f})()),
        ),
        IN_COUNT,
    ),
    "a property": (of_a_property, IN_COUNT),
    "the loss alone": (changed_by(lambda calls, z, y: calls / 1000), IN_COUNT),
    "the gradient alone": (changed_by(lambda calls, z, y: calls / 1000 * (z - z.detach()).sum()), IN_COUNT),
    "a parameter that later calls use": (of_a_late_parameter, IN_COUNT),
    **{
        f"a {kind}": (of_a_hook(kind), IN_HOOK)
        for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")
    },
    "a hook that is an object": (lambda: with_hook(Monitor()), "a hook of criterion"),
    "a hook with slots": (lambda: with_hook(WithSlots()), "a hook of criterion"),
    "a hook that is a method": (lambda: with_hook(Monitor().__call__), "a hook of criterion"),
    "a hook that is a partial": (
        lambda: with_hook(functools.partial(Monitor.__call__, Monitor())),
        "a hook of criterion",
    ),
    "a hook around another": (lambda: with_hook(Wrapping(Monitor())), "a hook of criterion"),
    "a hook whose class counts": (lambda: with_hook(ByTheClass()), "Monitor.everywhere"),
    "an attribute that is called": (
        lambda: Made(lambda self, z, y: self.scale(self, None, cross_entropy(z, y)), scale=ByTheClass()),
        "Monitor.everywhere",
    ),
    "a method of an attribute": (
        lambda: Made(lambda self, z, y: smoothed(z, y, self.counted.step()), counted=Counted()),
        "BOX.calls",
    ),
}
"""By where the criterion itself has its count, or what the count changes, and how it is named."""
CHANGING = {name: (lambda make=make: annealed(make()), said) for name, (make, said) in STEPS.items()} | PAIRS


def batch() -> tuple[Tensor, Tensor]:
    return pairs.batch(dtype=torch.float32)


@pytest.mark.parametrize("where", CHANGING)
def test_results_that_depend_on_how_often_the_pair_was_called_are_refused_by_name(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "box", BOX)
    made, name = CHANGING[where]
    engine = seqpar.LossCompute(nn.Linear(4, V), made(), chunk_tokens=3)
    with pytest.raises(ValueError, match=rf"^(.* or )?{name}( or .*)? changes with every call") as error:
        engine(*batch())
    assert "\n" not in str(error.value)


def test_a_hook_of_all_modules_that_counts_is_refused() -> None:
    class OfCriteria(Monitor):
        def __call__(self, module: nn.Module, given: Any, returned: Tensor) -> Any:
            return super().__call__(module, given, returned) if isinstance(module, Made) else None

    criterion = Made(lambda self, z, y: cross_entropy(z, y))
    handle = nn.modules.module.register_module_forward_hook(OfCriteria())
    try:
        with pytest.raises(ValueError, match=r"^a hook of all modules changes with every call"):
            seqpar.LossCompute(nn.Linear(4, V), criterion, chunk_tokens=3)(*batch())
    finally:
        handle.remove()


def test_an_assertion_in_a_test_brings_nothing_of_pytests_own_with_it() -> None:
    """A first call looked at all that it reaches, and took ten times as long."""

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        assert len(z) == len(y)
        return cross_entropy(z, y)

    names = [name for name, _ in surroundings_of(nn.ModuleList([Made(function)])).values]
    assert "the global @pytest_ar" in names
    assert not [name for name in names if name.startswith("@pytest_ar.")]


class Large(np.ndarray[Any, Any]):
    """An array that must not be copied."""

    def copy(self, *_: Any) -> Any:
        raise MemoryError


def test_what_a_pair_may_reach_around_its_code_is_neither_copied_nor_in_its_way() -> None:
    """A graph of the caller's, a data set, another module, a name without a value, and a count in a 250th function."""
    graph, array, other = torch.ones(3, requires_grad=True).sum(), np.zeros(2**16 + 1).view(Large), nn.Linear(4, V)
    count = counter()
    for _ in range(250):
        count = functools.partial(lambda inner: inner(), count)

    def function(self: Any, z: Tensor, y: Tensor) -> Tensor:
        if len(y) < 0:
            return graph * array[0] * other.bias * unset
        return cross_entropy(z, y) * (1 + 0 * count())

    assert seqpar.LossCompute(nn.Linear(4, V), Made(function), chunk_tokens=5)(*batch()).total.isfinite()
    if function is None:
        unset = 1


def auxiliary(self: Any, hidden: Tensor) -> Tensor:
    scores: Tensor = self.linear(hidden)
    LEFT.append(scores.square().mean().expand(self.size))
    return scores


@pytest.mark.parametrize("size", [(), (2**16 + 1,)])
def test_a_tensor_with_a_graph_that_is_left_in_a_global_list_is_refused_and_taken_out(size: tuple[int, ...]) -> None:
    """Of any size, unlike a data set."""
    LEFT[:] = [torch.zeros(())]
    engine = seqpar.LossCompute(Made(auxiliary, linear=nn.Linear(4, V), size=size), seqpar.CrossEntropy())
    with pytest.raises(ValueError, match=r"^the global LEFT holds a tensor with a graph after a call[^\n]*$"):
        engine(*batch())
    assert len(LEFT) == 1


def test_a_tensor_with_a_graph_that_is_left_under_a_name_for_nothing_is_refused_and_taken_out() -> None:
    kept: Any = None

    def function(self: Any, hidden: Tensor) -> Tensor:
        nonlocal kept
        scores: Tensor = self.linear(hidden)
        kept = [scores.mean()]
        return scores

    with pytest.raises(ValueError, match="kept in the closure of function holds a tensor with a graph"):
        seqpar.LossCompute(Made(function, linear=nn.Linear(4, V)), seqpar.CrossEntropy())(*batch())
    assert kept is None
